"""Checkpoints: which one a run continues from, that a kill at any moment leaves whole ones only, and what a full disk does."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from train import checkpoint, storage
from train.checkpoint import ALONE, Files, Ranks
from train.errors import Stop
from train.recipe import Checkpoint, Recipe, read_recipe

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def recipe() -> Recipe:
    return read_recipe(ROOT / "train" / "recipes" / "tiny.yaml")


def write(folder: Path, **contents: bytes) -> Files:
    """Write files as a rank does."""
    files = {}
    for name, content in contents.items():
        file = storage.HashedFile(folder / checkpoint.STATE / f"{name}.pt")
        file.write(content)
        files[f"{checkpoint.STATE}/{name}.pt"] = file.close()
    return files


def save(folder: Path, step: int, recipe: Recipe, keep: int = 2, keep_hours: float = 0, **manifest: Any) -> None:
    """Save a small checkpoint as one rank does."""
    full = {"world_size": 2, "data_sha256": "d1", "recipe": recipe.model_dump(mode="json"), **manifest}
    rotation = Checkpoint(every_steps=1, keep=keep, keep_hours=keep_hours)
    checkpoint.save(
        folder,
        step,
        lambda partial: write(partial, model=b"weights" * step, optimizer=b"moments" * step),
        ALONE,
        full,
        rotation,
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_complete_one_is_continued_and_old_ones_go(tmp_path: Path, recipe: Recipe) -> None:
    assert checkpoint.find_start(tmp_path / "none", recipe, 2, "d1") is None
    for step in (9, 10, 100):
        save(tmp_path, step, recipe)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000010", "step_00000100"]
    assert (tmp_path / "latest").read_text() == "step_00000100\n"
    start = checkpoint.find_start(tmp_path, recipe, 2, "d1")
    assert start
    assert start.step == 100
    files = json.loads((start.folder / "complete").read_text())["files"]
    assert {name: file["bytes"] for name, file in files.items()} == {"state/model.pt": 700, "state/optimizer.pt": 700}
    ran = subprocess.run(["sha256sum", start.folder / "state" / "model.pt"], capture_output=True, text=True, check=True)
    assert files["state/model.pt"]["sha256"] == ran.stdout.split()[0]


@pytest.mark.parametrize(
    "damage", ["no manifest", "torn manifest", "file missing", "file cut", "partial", "moved", "unreadable", "other manifest"]
)
def test_only_a_half_checkpoint_is_removed_and_a_damaged_one_is_skipped_and_told(
    tmp_path: Path, recipe: Recipe, damage: str
) -> None:
    save(tmp_path, 20, recipe)
    save(tmp_path, 40, recipe)
    newest = tmp_path / "step_00000040"
    if damage == "no manifest":
        (newest / "complete").unlink()
    elif damage == "torn manifest":
        (newest / "complete").write_text('{"step": 40, "fi')
    elif damage == "file missing":
        (newest / "state" / "model.pt").unlink()
    elif damage == "file cut":
        (newest / "state" / "optimizer.pt").write_bytes(b"mom")
    elif damage == "partial":
        newest.rename(tmp_path / "step_00000040.partial")
    elif damage == "moved":
        newest.rename(tmp_path / "step_00000060")
    elif damage == "other manifest":
        (newest / "complete").write_text('{"step": 40, "files": {"state/model.pt": {"bytes": 280}}}')
    elif damage == "unreadable":
        (newest / "complete").unlink()
        (newest / "complete").mkdir()
    (tmp_path / "step_by_step.txt").write_text("the user's own")
    start = checkpoint.find_start(tmp_path, recipe, 2, "d1")
    assert start
    assert start.step == 20
    half, damaged = (1, []) if damage == "partial" else (0, ["step_00000060" if damage == "moved" else "step_00000040"])
    assert len(checkpoint.remove_half_ones(tmp_path)) == half
    assert list(checkpoint.all_damaged(tmp_path)) == damaged
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000020", *damaged, "step_by_step.txt"]
    save(tmp_path, 40, recipe)
    assert [saved.step for saved in checkpoint.all_complete(tmp_path)] == [20, 40]


def test_without_a_whole_checkpoint_the_damaged_ones_are_named_and_kept(tmp_path: Path, recipe: Recipe) -> None:
    save(tmp_path, 40, recipe)
    (tmp_path / "step_00000040" / "state" / "model.pt").write_bytes(b"cut")
    with pytest.raises(Stop, match=r"step_00000040: state/model.pt has 3 bytes, 280 were written"):
        checkpoint.find_start(tmp_path, recipe, 2, "d1")
    assert checkpoint.remove_half_ones(tmp_path) == []
    assert (tmp_path / "step_00000040" / "complete").exists()


def test_other_files_in_a_checkpoint_are_no_damage(tmp_path: Path, recipe: Recipe) -> None:
    save(tmp_path, 7, recipe)
    (tmp_path / "step_00000007" / "state" / "zero_to_fp32.py").write_text("print('mine')")
    assert [saved.step for saved in checkpoint.all_complete(tmp_path)] == [7]


def test_a_changed_byte_is_noticed_and_the_one_before_is_taken(
    tmp_path: Path, recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (20, 30, 40):
        save(tmp_path, step, recipe, keep=0)

    def flip(step: int) -> None:
        file = tmp_path / f"step_{step:08d}" / "state" / "optimizer.pt"
        content = bytearray(file.read_bytes())
        content[100] ^= 1
        file.write_bytes(content)

    def agree() -> checkpoint.Saved | None:
        start = checkpoint.find_start(tmp_path, recipe, 2, "d1")
        assert start
        assert start.step == 40  # sizes alone tell nothing
        return checkpoint.agree_on_start(start, tmp_path, lambda saved: None, ALONE)

    for step in (40, 30):
        flip(step)
    start = agree()
    assert start
    assert start.step == 20
    told = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in told] == [f"left step_000000{n} alone, it is damaged" for n in (40, 30)]
    assert re.search(r"state/optimizer.pt was changed: its sha256 is \w{12}…, \w{12}… was written", told[0])

    save(tmp_path, 25, recipe, keep=1)  # the changed ones are later, and no reason to remove the whole one
    assert names(tmp_path) == ["latest", "step_00000025", "step_00000030", "step_00000040"]
    flip(25)
    with pytest.raises(Stop, match=r"no checkpoint is whole \(step_00000040: .*step_00000030: .*step_00000025: "):
        agree()


def test_each_rank_reads_its_share_of_the_files(tmp_path: Path, recipe: Recipe) -> None:
    save(tmp_path, 20, recipe)
    (tmp_path / "step_00000020" / "state" / "optimizer.pt").write_bytes(b"moment?" * 20)
    saved = checkpoint.read(tmp_path / "step_00000020")
    assert isinstance(saved, checkpoint.Saved)
    assert checkpoint.find_damage(saved, 0, 2) is None
    assert "optimizer.pt was changed" in str(checkpoint.find_damage(saved, 1, 2))
    assert "optimizer.pt was changed" in str(checkpoint.find_damage(saved))


def test_rotation_by_count_and_age(tmp_path: Path, recipe: Recipe) -> None:
    now_s = time.time()
    for step, hours in ((1, 50), (2, 30), (3, 10), (4, 5)):
        save(tmp_path, step, recipe, keep=0, saved_at=now_s - hours * 3600)
    assert len(checkpoint.all_complete(tmp_path)) == 4  # 0 = no limit

    def kept(keep: int, keep_hours: float, step: int, in_use: tuple[str, ...] = ()) -> list[int]:
        checkpoint.rotate(tmp_path, step, Checkpoint(every_steps=1, keep=keep, keep_hours=keep_hours), in_use)
        return [saved.step for saved in checkpoint.all_complete(tmp_path)]

    assert kept(0, 40, 4) == [2, 3, 4]
    assert kept(2, 0, 4, ("step_00000002",)) == [2, 3, 4]
    assert kept(2, 0, 4) == [3, 4]
    assert kept(5, 1, 4) == [4]  # itself too old, but the newest whole one stays
    assert kept(1, 1, 4) == [4]


KILLED_AT_EVERY_MOMENT = """
import json, os, sys
from pathlib import Path
from train import checkpoint, storage
from train.recipe import Checkpoint, read_recipe

recipe = read_recipe(Path("train/recipes/tiny.yaml"))
manifest = {"world_size": 1, "data_sha256": "d1", "recipe": recipe.model_dump(mode="json")}
TOUCH = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree")

def save(folder, step):
    def write_state(partial):
        file = storage.HashedFile(partial / checkpoint.STATE / "model.pt")
        file.write(b"weights")
        return {"state/model.pt": file.close()}
    checkpoint.save(folder, step, write_state, checkpoint.ALONE, manifest, Checkpoint(every_steps=1, keep=2))

def run_until(moment, function):
    "Run in a child that is gone, as after kill -9, when it touches the file system for the moment-th time."
    child = os.fork()
    if not child:
        left = [moment]
        def hook(event, _):
            if event in TOUCH:
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)
        sys.addaudithook(hook)
        function()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

found = []
for moment in range(1000):
    folder = Path(sys.argv[1]) / str(moment)
    save(folder, 1); save(folder, 2)
    code = run_until(moment, lambda: save(folder, 3))
    start = checkpoint.find_start(folder, recipe, 1, "d1").step
    cleaned = run_until(moment, lambda: checkpoint.remove_half_ones(folder))
    checkpoint.remove_half_ones(folder)
    names = sorted(path.name for path in folder.glob("step_*"))
    whole = [saved.folder.name for saved in checkpoint.all_complete(folder)]
    save(folder, 4)
    found.append([code, start, names == whole, checkpoint.find_start(folder, recipe, 1, "d1").step])
    if code == 0:
        break
print(json.dumps(found))
"""


def test_a_kill_at_any_moment_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", KILLED_AT_EVERY_MOMENT, tmp_path], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = json.loads(ran.stdout)
    assert [code for code, *_ in found] == [9] * (len(found) - 1) + [0]
    assert len(found) > 15  # moments; fewer means that the hook saw nothing
    starts = [start for _, start, *_ in found]
    assert starts == sorted(starts)
    assert set(starts) == {2, 3}
    assert all(clean and after == 4 for _, _, clean, after in found)


def test_what_cannot_be_continued_is_one_line(tmp_path: Path, recipe: Recipe) -> None:
    save(tmp_path, 20, recipe)
    wider = recipe.model.model_copy(update={"config": {**recipe.model.config, "hidden_size": 640}})
    wrong = {
        "saved by 2 ranks, this run has 4; expected 2 ranks": (recipe.model_copy(update={"elastic": False}), 4, "d1"),
        "trained on data d1, this run has data d2; expected the same data": (recipe, 2, "d2"),
        "another training: hidden_size was 320, is 640; expected the same model, adapters and optimizer": (
            recipe.model_copy(update={"model": wider}),
            2,
            "d1",
        ),
        "another training: optimizer.name was adamw, is adamw8bit": (
            recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"name": "adamw8bit"})}),
            2,
            "d1",
        ),
        "the recipe says resume: false; expected an empty run folder": (recipe.model_copy(update={"resume": False}), 2, "d1"),
    }
    for told, (changed, world_size, data_sha256) in wrong.items():
        with pytest.raises(Stop) as caught:
            checkpoint.find_start(tmp_path, changed, world_size, data_sha256)
        assert told in str(caught.value)
        assert str(caught.value).startswith(str(tmp_path / "step_00000020"))
        assert "r4090c launch without --resume" in str(caught.value)
        assert caught.value.exit_code == 2


def test_a_checkpoint_of_a_recipe_that_named_no_weights_is_continued(tmp_path: Path, recipe: Recipe) -> None:
    """As it was saved before recipes had model.weights; other weights than none, and another family, are another model."""
    save(tmp_path, 20, recipe)
    complete = tmp_path / "step_00000020" / checkpoint.COMPLETE
    manifest = json.loads(complete.read_text())
    del manifest["recipe"]["model"]["weights"]
    complete.write_text(json.dumps(manifest))
    assert checkpoint.find_start(tmp_path, recipe, 2, "d1") is not None
    manifest["recipe"]["model"]["weights"] = "llama-2-7b"
    complete.write_text(json.dumps(manifest))
    with pytest.raises(Stop, match="another training: weights was llama-2-7b, is None"):
        checkpoint.find_start(tmp_path, recipe, 2, "d1")


def test_the_seed_of_random_weights_beside_adapters_stays(tmp_path: Path, recipe: Recipe) -> None:
    adapters = recipe.model_copy(update={"method": "lora"})
    save(tmp_path, 20, adapters)
    with pytest.raises(Stop, match="another training: seed was 1234, is 2"):
        checkpoint.find_start(tmp_path, adapters.model_copy(update={"seed": 2}), 2, "d1")


def test_a_state_in_other_shards_or_numbers_is_one_line(tmp_path: Path) -> None:
    saved = checkpoint.Saved(tmp_path / "step_00000020", {"zero_stage": 2, "precision": "fp32"})
    checkpoint.require_same_state(saved, 1, "fp32")
    for stage in (0, 3):
        with pytest.raises(
            Stop, match=rf"complete: saved under ZeRO stage 2, this run has {stage}; expected stage 2; restore ds_c"
        ):
            checkpoint.require_same_state(saved, stage, "fp32")
    with pytest.raises(Stop, match="saved in fp32, this run computes in bf16; expected fp32; set precision: fp32"):
        checkpoint.require_same_state(saved, 2, "bf16")
    before = checkpoint.Saved(tmp_path, {"precision": "bf16"})  # of a version that did not note the stage
    checkpoint.require_same_state(before, 3, "bf16")


def test_random_weights_beside_adapters_are_drawn_again_by_the_same_kind_of_device_alone(tmp_path: Path) -> None:
    saved = checkpoint.Saved(tmp_path / "step_00000020", {"drawn_on": "NVIDIA GeForce RTX 4090"})
    checkpoint.require_same_base(saved, "NVIDIA GeForce RTX 4090")
    told = "complete: its adapters trained beside random weights that NVIDIA GeForce RTX 4090 drew, and a CPU draws others"
    with pytest.raises(Stop, match=told):
        checkpoint.require_same_base(saved, "a CPU")
    checkpoint.require_same_base(saved, None)  # all weights, or those of a folder
    checkpoint.require_same_base(checkpoint.Saved(tmp_path, {}), "a CPU")  # of a version that did not note it


def test_a_checkpoint_survives_a_power_cut_before_older_ones_go(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def flushing(flush: Callable[[int], None]) -> Callable[[int], None]:
        def wrapped(opened: int) -> None:
            done.append(f"flush {Path(f'/proc/self/fd/{opened}').readlink().relative_to(tmp_path)}")
            flush(opened)

        return wrapped

    monkeypatch.setattr(os, "fsync", flushing(os.fsync))
    monkeypatch.setattr(os, "fdatasync", flushing(os.fdatasync))

    def naming(name: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        def wrapped(path: Path, to: Path) -> Path:
            done.append(f"name {to.name}")
            return name(path, to)

        return wrapped

    monkeypatch.setattr(Path, "rename", naming(Path.rename))
    monkeypatch.setattr(Path, "replace", naming(Path.replace))
    save(tmp_path, 1, recipe)
    done.clear()
    save(tmp_path, 2, recipe, keep=1)
    partial = "step_00000002.partial"
    assert done == [
        f"flush {partial}/state/model.pt",
        f"flush {partial}/state/optimizer.pt",
        "name complete",
        f"flush {partial}/complete",
        f"flush {partial}",
        f"flush {partial}/state",
        "name step_00000002",
        "name latest",
        "flush .",
        "name step_00000001.old",
    ]


def test_changes_that_may_be_continued_are_named(tmp_path: Path, recipe: Recipe) -> None:
    save(tmp_path, 20, recipe)
    changed = recipe.model_copy(update={"steps": 80, "seed": 2})
    start = checkpoint.find_start(tmp_path, changed, 2, "d1")
    assert start
    assert checkpoint.changed_keys(start, changed) == ["seed", "steps"]
    assert checkpoint.changed_keys(start, recipe) == []


# --------------------------------------------------------------------------- storage that refuses


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs root, to mount a small file system")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def run_ranks(count: int, work: Callable[[Ranks], Any]) -> list[str]:
    """Run `work` in `count` processes that gather over pipes; return what each raised or returned, as text."""

    def be(rank: int, pipe: Connection) -> None:
        def gather(value: Any) -> list[Any]:
            pipe.send(("gather", value))
            everyones: list[Any] = pipe.recv()
            return everyones

        try:
            came = f"returned {work(Ranks(rank, count, gather))}"
        except Stop as stop:
            came = f"{stop}"
        pipe.send(("end", came))

    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe() for _ in range(count)]
    processes = [fork.Process(target=be, args=(rank, theirs)) for rank, (_, theirs) in enumerate(pipes)]
    for process in processes:
        process.start()
    try:
        while True:
            for ours, _ in pipes:
                assert ours.poll(20), "a rank waits for ever"
            told = [ours.recv() for ours, _ in pipes]
            assert len({kind for kind, _ in told}) == 1  # all gather, or all end
            if told[0][0] == "end":
                return [text for _, text in told]
            for ours, _ in pipes:
                ours.send([value for _, value in told])
    finally:
        for process in processes:
            process.kill()


def save_by_two(folder: Path, step: int, sizes_mib: tuple[int, int], needed_bytes: int = 0) -> list[str]:
    """Save a checkpoint of two ranks, each with a file of so many MiB; return what came of it on each."""

    def work(ranks: Ranks) -> Any:
        manifest = {"world_size": 2, "data_sha256": "d1", "recipe": {}}
        content = os.urandom(sizes_mib[ranks.rank] << 20)
        rotation = Checkpoint(every_steps=1, keep=3)

        def write_in_turn(partial: Path) -> Files:
            first = partial / checkpoint.STATE / "rank0.pt"
            while ranks.rank and not (first.exists() and first.stat().st_size == sizes_mib[0] << 20):
                time.sleep(0.01)  # who comes last is the one whose file does not fit
            return write(partial, **{f"rank{ranks.rank}": content})

        return checkpoint.save(folder, step, write_in_turn, ranks, manifest, rotation, needed_bytes).name

    return run_ranks(2, work)


def test_a_disk_that_fills_up_ends_every_rank_and_keeps_the_one_before(small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    assert save_by_two(folder, 1, (1, 1)) == ["returned step_00000001"] * 2
    ends = save_by_two(folder, 2, (1, 7))  # rank 1's file does not fit; what is needed was told by the one before
    where = folder / "step_00000002.partial" / "state" / "rank1.pt"
    assert ends[0] == ends[1]
    assert re.fullmatch(
        rf"{where}: No space left on device \(rank 1, saving step_00000002\); expected room on the disk; "
        r"make some \(df -h, df -i\); step_00000001 is whole and can be continued from",  # nothing older that could go
        ends[0],
    )
    assert names(folder) == ["latest", "step_00000001"]
    assert [checkpoint.find_damage(saved) for saved in checkpoint.all_complete(folder)] == [None]
    assert save_by_two(folder, 2, (1, 1)) == ["returned step_00000002"] * 2  # its room was given back


def test_room_is_looked_at_before_anything_is_written(small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    ends = save_by_two(folder, 1, (1, 1), needed_bytes=9 << 20)
    assert ends[0] == ends[1]
    assert "8.0 MiB free, 9.0 MiB needed for the next checkpoint (rank 0, saving step_00000001)" in ends[0]
    assert "there is no earlier checkpoint" in ends[0]
    for step in (1, 2, 3):  # the third has no room beside the other two: the oldest goes early
        assert save_by_two(folder, step, (2, 1)) == [f"returned step_0000000{step}"] * 2
    assert names(folder) == ["latest", "step_00000002", "step_00000003"]
    (small_disk / "somebody's").write_bytes(bytes(1 << 20))
    (folder / "step_00000002" / "state" / "rank0.pt").unlink()  # damaged: not ours to remove
    ends = save_by_two(folder, 4, (2, 1))
    assert "needed for the next checkpoint" in ends[0]
    assert "step_00000003 is whole and can be continued from" in ends[0]
    assert names(folder) == ["latest", "step_00000002", "step_00000003"]


def test_no_room_is_told_at_the_start(small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    assert checkpoint.no_room(folder, 7 << 20) == ""
    assert checkpoint.no_room(folder, 9 << 20) == (
        f"{folder}: 8.0 MiB free, about 9.0 MiB needed for a checkpoint: "
        "make room (df -h) before the first one, or the run ends there"
    )
    for step in (1, 2):
        assert save_by_two(folder, step, (2, 1)) == [f"returned step_0000000{step}"] * 2
    assert checkpoint.no_room(folder, 9 << 20) == ""  # it is known now what one takes, and the older one goes for it
    (small_disk / "somebody's").write_bytes(bytes(1 << 20))
    (folder / "step_00000001" / "complete").unlink()
    assert "about 3.0 MiB needed" in checkpoint.no_room(folder, 1)


def test_a_full_disk_names_older_checkpoints_where_there_are_some(small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    for step in (1, 2):
        assert save_by_two(folder, step, (1, 1)) == [f"returned step_0000000{step}"] * 2
    ends = save_by_two(folder, 3, (1, 7))
    assert "make some (df -h, df -i), or lower checkpoint.keep; step_00000002 is whole" in ends[0]


def test_a_read_only_file_system_is_told_on_every_rank(small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    save_by_two(folder, 1, (1, 1))
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    ends = save_by_two(folder, 2, (1, 1))
    assert ends[0] == ends[1]
    assert ends[0].startswith(f"{folder / 'step_00000002.partial'}: Read-only file system (rank 0")
    assert "mount it read-write" in ends[0]
    assert "step_00000001 is whole" in ends[0]


def test_a_run_folder_that_cannot_be_written_is_one_line(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    recipe = ROOT / "train" / "recipes" / "tiny.yaml"
    command: list[str | Path] = [
        sys.executable,
        "train/main.py",
        "--recipe",
        recipe,
        "--run-dir",
        small_disk / "run",
        "--data-dir",
        small_disk / "data",
    ]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert ran.stderr.startswith(
        f"train: {small_disk}/run: Read-only file system; expected a file system that can be written; mount it"
    )
    assert ran.stderr.count("\n") == 1


def test_what_each_refusal_means() -> None:
    def told(number: int) -> str:
        return str(storage.refused(OSError(number, os.strerror(number)), Path("/shared/run")))

    assert told(errno.ESTALE).startswith(
        "/shared/run: Stale file handle; expected the folder that the NFS server exports; unmount"
    )
    assert "quota -s" in told(errno.EDQUOT)
    assert "dmesg" in told(errno.EIO)
    assert "dmesg" in told(errno.EMFILE)  # any other


def test_ranks_that_see_different_folders_are_told(tmp_path: Path) -> None:
    """Rank 1's storage is not rank 0's."""

    def work(ranks: Ranks) -> Any:
        def write_elsewhere(partial: Path) -> Files:
            own = tmp_path / str(ranks.rank) if ranks.rank else partial
            (own / checkpoint.STATE).mkdir(parents=True, exist_ok=True)
            return write(own, **{f"rank{ranks.rank}": b"x"})

        return checkpoint.save(tmp_path / "c", 1, write_elsewhere, ranks, {"world_size": 2}, Checkpoint(every_steps=1, keep=1))

    ends = run_ranks(2, work)
    assert ends[0] == ends[1]
    assert "rank1.pt: No such file or directory (rank 0" in ends[0]


HUNG = """
import sys
from pathlib import Path
from train import storage
file = storage.HashedFile(Path(sys.argv[1]))
print("not reached")
"""


def test_a_write_that_hangs_ends_the_rank_with_one_line(tmp_path: Path) -> None:
    pipe = tmp_path / "model.pt"
    os.mkfifo(pipe)  # opening it for writing waits until somebody reads: as with a dead NFS server nobody comes
    began_s = time.monotonic()
    environment = os.environ | {storage.TIMEOUT: "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", HUNG, pipe], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30
    )
    assert time.monotonic() - began_s < 10
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert re.fullmatch(
        rf"train: {pipe}: opening it has not ended within 1 s; expected storage that answers; see that .*\n", ran.stderr
    )


def test_a_step_back_is_taken_by_all_ranks(tmp_path: Path, recipe: Recipe) -> None:
    for step in (20, 40):
        save(tmp_path, step, recipe)
    (tmp_path / "step_00000040" / "state" / "optimizer.pt").write_bytes(b"moment!" * 40)  # which rank 1 reads

    def work(ranks: Ranks) -> Any:
        start = checkpoint.find_start(tmp_path, recipe, 2, "d1") if ranks.rank == 0 else None
        start = checkpoint.agree_on_start(start, tmp_path, lambda saved: None, ranks)
        return start.step if start else None

    assert run_ranks(2, work) == ["returned 20"] * 2


@pytest.mark.train
@pytest.mark.slow
def test_training_ends_on_all_ranks_when_a_file_does_not_fit(tmp_path: Path) -> None:
    """The disk has room for bytes, but not for one more file: the last rank that opens one is refused, inside torch.save."""
    from tests.train.test_training import ENVIRONMENT, arguments, small_recipe

    disk = tmp_path / "run" / "checkpoints"
    disk.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,nr_inodes=12", "none", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs root, to mount a small file system")
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        place = ENVIRONMENT | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, *arguments(tmp_path, "run", small_recipe())]
        ranks = [
            subprocess.Popen(command, env=place | {"RANK": rank, "LOCAL_RANK": rank}, stderr=subprocess.PIPE, text=True)
            for rank in ("0", "1")
        ]
        try:
            lines = [rank.communicate(timeout=150)[1].splitlines()[-1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert [rank.returncode for rank in ranks] == [1, 1]
        assert lines[0] == lines[1]
        assert re.match(
            rf"train: {disk}/step_00000006.partial/state/\w+.pt: No space left on device \(rank [01], saving step_00000006\); "
            r"expected room on the disk; make some .*; step_00000003 is whole and can be continued from",
            lines[0],
        )
        assert names(disk) == ["latest", "step_00000003"]
        assert [checkpoint.find_damage(saved) for saved in checkpoint.all_complete(disk)] == [None]
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
