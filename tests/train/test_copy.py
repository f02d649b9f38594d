"""Copies on other storage, against a real S3 server on loopback and a folder: whole ones only, verified, rotated, restored."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.train.test_checkpoint import names, write
from train import checkpoint, copies, storage
from train.checkpoint import ALONE, Saved
from train.errors import Stop
from train.recipe import Checkpoint

ROOT = Path(__file__).resolve().parents[2]
SECRET = "do-not-tell-anybody"
KEEP_ALL = Checkpoint(every_steps=1, keep=0)

if importlib.util.find_spec("fsspec") is None:
    pytest.skip("needs the extra `s3`", allow_module_level=True)


def save(folder: Path, step: int, size: int = 1000) -> Saved:
    """Save a small checkpoint as one rank does, and return it."""
    manifest = {"world_size": 1, "data_sha256": "d1", "recipe": {}}
    content = os.urandom(size)
    at = checkpoint.save(
        folder, step, lambda partial: write(partial, model=content, optimizer=b"moments"), ALONE, manifest, KEEP_ALL
    )
    saved = checkpoint.read(at)
    assert isinstance(saved, Saved)
    return saved


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    """Return the address of a real S3 server, which checks no signatures."""
    for package in ("moto", "flask", "s3fs"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install 's3fs' 'moto[server]'")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 60
        while True:
            assert server.poll() is None
            assert time.monotonic() < deadline_s
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Return the URL of an empty bucket; who may write there stands in the environment alone."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(copies, "WAITS_S", (0.1, 0.1))
    import s3fs

    bucket = f"bucket-{abs(hash(request.node.name))}"
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(bucket)
    return f"s3://{bucket}/prefix"


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return where the copies of a run go."""
    if request.param == "s3":
        return copies.url_of(str(request.getfixturevalue("s3")), "run-1")
    return copies.url_of(f"file://{tmp_path}/backup/", "run-1")


def steps(url: str) -> list[int]:
    return [one["step"] for one in copies.Store(url).manifests()[0]]


def wait_for(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_what_is_copied_is_whole_and_can_be_restored(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert copies.restore(url, tmp_path / "none" / "checkpoints") is None
    here = tmp_path / "run" / "checkpoints"
    saved = [save(here, step, size=(51 << 20) if step == 3 else 1000) for step in (1, 2, 3)]  # one in several parts
    for one in saved:
        assert copies.main(one.folder, url, KEEP_ALL) == 0
    assert steps(url) == [1, 2, 3]
    store = copies.Store(url)
    store.files.pipe_file(f"{store.root}/step_00000000/state/model.pt", b"half")  # as when the copying was killed
    assert copies.main(saved[2].folder, url, Checkpoint(every_steps=1, keep=2)) == 0
    assert steps(url) == [2, 3]
    assert not store.files.exists(f"{store.root}/step_00000000/state/model.pt")
    assert not store.files.exists(f"{store.root}/step_00000001/state/model.pt")
    told = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"copied   step_00000001 to {url}: 1007 bytes in \d+\.\d s, read back and compared", told[0])
    assert told[-1] == f"copied   step_00000003 to {url}: was there already"

    there = tmp_path / "new" / "checkpoints"
    there.parent.mkdir()
    restored = copies.restore(url, there)
    assert restored
    assert restored.manifest == saved[2].manifest
    assert checkpoint.find_damage(restored) is None
    assert names(there) == ["latest", "step_00000003"]
    assert "hashes compared" in capsys.readouterr().out


def test_half_and_damaged_copies_are_not_restored(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    here = tmp_path / "run" / "checkpoints"
    for step in (1, 2, 3):
        assert copies.main(save(here, step).folder, url, KEEP_ALL) == 0
    store = copies.Store(url)
    store.files.rm(f"{store.root}/step_00000003/complete")  # as when the copying was killed
    assert steps(url) == [1, 2]
    model = f"{store.root}/step_00000002/state/model.pt"
    content = bytearray(store.files.cat_file(model))
    content[500] ^= 1
    store.files.pipe_file(model, bytes(content))
    there = tmp_path / "new" / "checkpoints"
    there.parent.mkdir()
    restored = copies.restore(url, there)
    assert restored
    assert restored.step == 1
    assert "step_00000002: OSError: state/model.pt has other content than was copied" in capsys.readouterr().out
    assert checkpoint.remove_half_ones(there) == ["step_00000002.partial"]

    store.files.pipe_file(f"{store.root}/step_00000001/complete", b'{"step": 1, "fi')  # torn
    with pytest.raises(Stop, match="no copy could be restored"):
        copies.restore(url, there)


def test_a_changed_checkpoint_here_is_not_copied(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    saved = save(tmp_path / "run" / "checkpoints", 1)
    (saved.folder / "state" / "optimizer.pt").write_bytes(b"MOMENTS")
    assert copies.main(saved.folder, url, KEEP_ALL) == 1
    assert steps(url) == []
    told = capsys.readouterr().out
    assert told.count("\n") == 1  # trying again would not help
    assert f"{saved.folder / 'state' / 'optimizer.pt'}: was changed since it was saved" in told


def test_a_server_that_is_away_is_a_warning_and_tried_again(
    tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = save(tmp_path / "run" / "checkpoints", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert copies.main(saved.folder, s3, KEEP_ALL) == 1
    told = capsys.readouterr().out.splitlines()
    assert [re.sub(r".*\((.*)\)", r"\1", line) for line in told] == [
        "try 1, the next in 0.1 s",
        "try 2, the next in 0.1 s",
        "given up",
    ]
    assert all(line.startswith(f"warning  step_00000001 is not copied to {s3}: ") for line in told)
    with pytest.raises(Stop, match=re.escape(f"{s3}: ")) as caught:
        copies.restore(s3, tmp_path / "new")
    assert SECRET not in str(caught.value)


def test_secrets_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    assert copies.explain(ValueError(f"signed with\n{SECRET}")) == "ValueError: signed with ***"
    wrong = {
        f"s3://someone:{SECRET}@bucket/x": "holds credentials",
        f"s3://bucket/x?token={SECRET}": "holds credentials",
        "backup": "not a URL",
        "s3://": "not a URL",
        "nonesuch://bucket/x": "fsspec knows no nonesuch://",
    }
    for url, told in wrong.items():
        with pytest.raises(Stop, match=told) as caught:
            copies.check_url(url)
        assert SECRET not in str(caught.value)
    copies.check_url("file:///backup")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "s3fs" else find(name))
    with pytest.raises(Stop, match=r"s3:// needs s3fs, which is not installed; expected s3fs; .* -m pip install r4090c\[s3\]"):
        copies.check_url("s3://bucket/x")


def test_a_server_that_never_answers_is_given_up(tmp_path: Path, s3: str) -> None:
    saved = save(tmp_path / "run" / "checkpoints", 1)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        away = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{deaf.getsockname()[1]}", storage.TIMEOUT: "2", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(ROOT / "train" / "copies.py"), str(saved.folder), s3, "1", "0"]
        pipe = subprocess.PIPE
        ran = subprocess.Popen(command, env=os.environ | away, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        assert ran.wait(timeout=60) == 1
    assert ran.stdout
    told = ran.stdout.read().splitlines()[-1]
    assert told.startswith(
        f"train: {s3.removeprefix('s3://')}: a request to it has not ended within 2 s; expected storage that answers"
    )


def drain(background: copies.Copies) -> None:
    wait_for(lambda: not background.poll())


def test_in_the_background_the_newest_waits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    here = tmp_path / "run" / "checkpoints"
    background = copies.Copies(Checkpoint(every_steps=1, keep=0, copy_to=f"file://{tmp_path}/backup"), "run-1")
    saved = {step: save(here, step) for step in (1, 2, 3)}
    began_s = time.monotonic()
    for one in saved.values():
        background.offer(one.folder)
        assert background.poll()
    assert time.monotonic() - began_s < 0.5  # a step does not wait for any of it
    assert background.in_use() == {"step_00000001"}
    drain(background)
    assert steps(f"file://{tmp_path}/backup/run-1") == [1, 3]
    assert background.status == {"copied_step": 3}
    assert background.in_use() == set()
    assert [line.split()[:2] for line in capfd.readouterr().out.splitlines()] == [["copied", f"step_0000000{n}"] for n in (1, 3)]

    (saved[2].folder / "state" / "model.pt").unlink()
    background.offer(saved[2].folder)
    drain(background)
    error = "warning  step_00000002 is not copied: model.pt: No such file or directory"
    assert background.status == {"copied_step": 3, "copy_error": error}


START = """
import sys, time
from pathlib import Path
from train import copies
from train.recipe import Checkpoint
background = copies.Copies(Checkpoint(every_steps=1, keep=0, copy_to=sys.argv[2]), "run-1")
background.offer(Path(sys.argv[1]))
print(background.running.pid, flush=True)
time.sleep(60)
"""


def test_the_copying_process_goes_with_its_rank_and_leaves_no_copy(tmp_path: Path, s3: str) -> None:
    saved = save(tmp_path / "run" / "checkpoints", 1)
    with socket.socket() as deaf:  # accepts, and says nothing
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        environment = os.environ | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{deaf.getsockname()[1]}", "PYTHONPATH": str(ROOT)}
        rank = subprocess.Popen(
            [sys.executable, "-c", START, saved.folder, s3], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert rank.stdout
        process = int(rank.stdout.readline())
        deaf.accept()
        command = Path(f"/proc/{process}/cmdline").read_bytes().decode().split("\0")
        assert not any(SECRET in word or "someone" in word for word in command)
        rank.send_signal(signal.SIGKILL)
        rank.wait()
        wait_for(lambda: not Path(f"/proc/{process}/cmdline").exists() or not Path(f"/proc/{process}/cmdline").read_bytes(), 10)
    assert steps(s3) == []


def test_a_restore_keeps_the_other_ranks_and_its_failure_reaches_them(tmp_path: Path) -> None:
    from tests.train.test_checkpoint import run_ranks

    url = f"file://{tmp_path}/backup/run-1"
    assert copies.main(save(tmp_path / "run" / "checkpoints", 4).folder, url, KEEP_ALL) == 0
    there = tmp_path / "new" / "checkpoints"
    there.parent.mkdir()

    def work(ranks: checkpoint.Ranks) -> Any:
        beats: list[int] = []
        start = copies.restore_together(url, there, ranks, lambda: beats.append(1))
        start = checkpoint.agree_on_start(start, there, lambda saved: None, ranks)
        return start.step if start else None

    assert run_ranks(2, work) == ["returned 4"] * 2
    shutil.rmtree(there)
    (tmp_path / "backup" / "run-1" / "step_00000004" / "state" / "model.pt").write_bytes(b"other")
    ends = run_ranks(2, work)
    assert ends[0] == ends[1]
    assert "no copy could be restored (step_00000004: OSError: state/model.pt has other content" in ends[0]
    shutil.rmtree(tmp_path / "backup" / "run-1")
    shutil.rmtree(there, ignore_errors=True)
    assert run_ranks(2, work) == ["returned None"] * 2


def no_beat(most: int = 20) -> Callable[[], None]:
    """Return what is called while a rank waits, which ends the test when it waits for ever."""
    beats = iter(range(most))
    return lambda: None if next(beats, None) is not None else pytest.fail("the ranks wait for ever")


@pytest.mark.parametrize("spoilt", ["files", "sha256", "saved_at", "outside", "list", "torn", "another step"])
def test_a_manifest_that_is_none_ends_every_rank_with_its_name(tmp_path: Path, spoilt: str) -> None:
    from tests.train.test_checkpoint import run_ranks

    url = f"file://{tmp_path}/backup/run-1"
    saved = save(tmp_path / "run" / "checkpoints", 5)
    assert copies.main(saved.folder, url, KEEP_ALL) == 0
    manifest = json.loads((saved.folder / "complete").read_text())
    model = {"bytes": 1000, "sha256": "0" * 64}
    texts = {
        "files": ({"step": 5}, "it lacks"),
        "sha256": (manifest | {"files": {"state/model.pt": {"bytes": 1000}}}, "it lacks 'sha256'"),
        "saved_at": (manifest | {"saved_at": "today"}, "saved_at is 'today'"),
        "outside": (manifest | {"files": {"../../model.pt": model}}, "files: ../../model.pt lies outside"),
        "list": ([1], "list indices must be integers"),
        "torn": ('{"step": 5, "fi', "no JSON: "),
        "another step": (manifest | {"step": 6}, "it is of step 6"),
    }
    text, told = texts[spoilt]
    (tmp_path / "backup" / "run-1" / "step_00000005" / "complete").write_text(text if spoilt == "torn" else json.dumps(text))
    there = tmp_path / "new" / "checkpoints"
    there.parent.mkdir()
    ends = run_ranks(2, lambda ranks: copies.restore_together(url, there, ranks, no_beat()))
    assert ends[0] == ends[1]
    assert f"{url}: no copy could be restored (step_00000005: complete is not a manifest of ours: {told}" in ends[0]
    assert sorted(path.name for path in tmp_path.rglob("*.pt") if "run" not in path.parts and "run-1" not in path.parts) == []
    assert copies.main(saved.folder, url, KEEP_ALL) == 0  # the next copy replaces it
    assert steps(url) == [5]


def test_whatever_ends_a_restore_ends_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.train.test_checkpoint import run_ranks

    def leave(*_: object, **__: object) -> None:
        raise SystemExit("left by something deep below")

    url = f"file://{tmp_path}/backup/run-1"
    assert copies.main(save(tmp_path / "run" / "checkpoints", 4).folder, url, KEEP_ALL) == 0
    (tmp_path / "new").mkdir()
    monkeypatch.setattr(shutil, "rmtree", leave)
    ends = run_ranks(2, lambda ranks: copies.restore_together(url, tmp_path / "new" / "checkpoints", ranks, no_beat()))
    assert ends[0] == ends[1]
    assert ends[0].startswith("restoring a copy: SystemExit: left by something deep below; expected a copy that is restored")


def test_storage_that_is_not_there_is_told_before_training(tmp_path: Path) -> None:
    run = tmp_path / "run-1"
    run.mkdir()
    away = f"file://{tmp_path}/mnt/backup"
    told = rf"recipe checkpoint.copy_to, {re.escape(away)}: there is no folder {re.escape(str(tmp_path))}/mnt; expected storage"
    with pytest.raises(Stop, match=told):
        copies.require_storage(away, run, begun=False)
    assert re.match(f"nothing is copied for now: {told}", copies.require_storage(away, run, begun=True))
    with pytest.raises(Stop, match=told):
        copies.restore(copies.url_of(away, run.name), run / "checkpoints")
    saved = save(run / "checkpoints", 1)
    assert copies.main(saved.folder, copies.url_of(away, run.name), KEEP_ALL) == 1
    assert not (tmp_path / "mnt").exists()  # nothing was written where something else would be mounted

    (tmp_path / "mnt").mkdir()
    notice = copies.require_storage(away, run, begun=False)
    assert (tmp_path / "mnt" / "backup").is_dir()
    assert notice == f"checkpoint.copy_to: {away} lies on the disk of the run folder itself: is its storage mounted?"
    assert copies.restore(copies.url_of(away, run.name), run / "checkpoints") is None
    (tmp_path / "mnt" / "file").write_text("")
    with pytest.raises(Stop, match=r"there is no folder .*/mnt/file"):
        copies.require_storage(f"file://{tmp_path}/mnt/file/backup", run, begun=False)


def test_another_disk_is_no_notice(tmp_path: Path) -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir() or shared.stat().st_dev == tmp_path.stat().st_dev or not os.access(shared, os.W_OK):
        pytest.skip("needs /dev/shm on a file system of its own")
    folder = shared / f"r4090c-test-{os.getpid()}"
    folder.mkdir()
    try:
        assert copies.require_storage(f"file://{folder}/backup", tmp_path, begun=False) == ""
    finally:
        shutil.rmtree(folder)


def test_a_bucket_that_is_not_there_is_told_and_an_empty_prefix_is_none(
    tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert copies.require_storage(s3, tmp_path, begun=False) == ""
    assert copies.restore(copies.url_of(s3, "run-1"), tmp_path / "checkpoints") is None
    gone = "s3://no-such-bucket/prefix"
    for look in (
        lambda: copies.require_storage(gone, tmp_path, begun=False),
        lambda: copies.restore(copies.url_of(gone, "run-1"), tmp_path / "checkpoints"),
    ):
        with pytest.raises(Stop, match=f"recipe checkpoint.copy_to, {gone}: there is no no-such-bucket; expected"):
            look()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    notice = copies.require_storage(s3, tmp_path, begun=False)
    assert notice.startswith(f"checkpoint.copy_to: {s3} cannot be looked at now: ")


@pytest.mark.train
@pytest.mark.long
def test_a_lost_run_folder_is_restored_and_trained_on_to_the_same_digits(tmp_path: Path, s3: str) -> None:
    from tests.train.test_training import TORCHRUN, arguments, finish, losses, metrics, small_recipe

    kept = {"every_steps": 3, "keep": 1, "copy_to": s3}
    recipe = small_recipe(checkpoint=kept, schedule={"name": "cosine", "warmup_steps": 5, "min_lr_ratio": 1.0})
    ran = finish(TORCHRUN + arguments(tmp_path, "run", recipe), **dict(os.environ))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert names(tmp_path / "run" / "checkpoints") == ["latest", "step_00000008"]
    assert list((tmp_path / "run" / "checkpoints").rglob("*.py")) == []  # DeepSpeed's script: an error there would be a hang
    assert steps(f"{s3}/run") == [8]
    assert f"copied   step_00000008 to {s3}/run: " in ran.stdout
    assert SECRET not in ran.stdout + ran.stderr
    assert all("copy_error" not in line for line in metrics(tmp_path, "run"))
    one_go = losses(tmp_path, "run")
    looked = f"no checkpoint in {tmp_path / 'run' / 'checkpoints'}, no copy in {s3}/run"
    assert f"notice   the run begins anew at step 1: {looked}\n" in ran.stdout

    shutil.rmtree(tmp_path / "run")
    ran = finish([*TORCHRUN, *arguments(tmp_path, "run", recipe), "--steps", "10"], **dict(os.environ))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"restore  step_00000008 from {s3}/run: " in ran.stdout
    assert "resume   after step 8" in ran.stdout
    assert [step for step, *_ in losses(tmp_path, "run")] == [9, 10]
    assert steps(f"{s3}/run") == [10]

    whole = finish(
        [*TORCHRUN, *arguments(tmp_path, "whole", {**recipe, "checkpoint": {"every_steps": 9, "keep": 1}}), "--steps", "10"]
    )
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert losses(tmp_path, "whole") == one_go + losses(tmp_path, "run")
