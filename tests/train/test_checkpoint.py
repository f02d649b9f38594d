"""Checkpoints: which one a run continues from, and that a kill at any moment leaves whole ones only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from train import checkpoint
from train.errors import Stop
from train.recipe import Recipe, read_recipe

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def recipe() -> Recipe:
    return read_recipe(ROOT / "train" / "recipes" / "tiny.yaml")


def save(folder: Path, step: int, recipe: Recipe, keep: int = 2, **manifest: Any) -> None:
    """Save a small checkpoint as one rank does."""

    def write_state(partial: Path) -> None:
        (partial / checkpoint.STATE / "model.pt").write_bytes(b"weights" * step)
        (partial / checkpoint.STATE / "optimizer.pt").write_bytes(b"moments" * step)

    full = {"world_size": 2, "data_sha256": "d1", "recipe": recipe.model_dump(mode="json"), **manifest}
    checkpoint.save(folder, step, write_state, lambda: None, 0, full, keep)


def test_the_newest_complete_one_is_continued_and_old_ones_go(tmp_path: Path, recipe: Recipe) -> None:
    assert checkpoint.find_start(tmp_path / "none", recipe, 2, "d1") is None
    for step in (9, 10, 100):
        save(tmp_path, step, recipe)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000010", "step_00000100"]
    assert (tmp_path / "latest").read_text() == "step_00000100\n"
    start = checkpoint.find_start(tmp_path, recipe, 2, "d1")
    assert start
    assert start.step == 100
    assert json.loads((start.folder / "complete").read_text())["files"] == {"state/model.pt": 700, "state/optimizer.pt": 700}


@pytest.mark.parametrize("damage", ["no manifest", "torn manifest", "file missing", "file cut", "partial", "moved", "unreadable"])
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


def test_an_edited_helper_script_is_no_damage(tmp_path: Path, recipe: Recipe) -> None:
    def write_state(partial: Path) -> None:
        (partial / checkpoint.STATE / "model.pt").write_bytes(b"weights")
        (partial / checkpoint.STATE / "zero_to_fp32.py").write_text("print()")

    full = {"world_size": 2, "data_sha256": "d1", "recipe": recipe.model_dump(mode="json")}
    checkpoint.save(tmp_path, 7, write_state, lambda: None, 0, full, 2)
    (tmp_path / "step_00000007" / "state" / "zero_to_fp32.py").write_text("print('edited')")
    assert [saved.step for saved in checkpoint.all_complete(tmp_path)] == [7]


KILLED_AT_EVERY_MOMENT = """
import json, os, sys
from pathlib import Path
from train import checkpoint
from train.recipe import read_recipe

recipe = read_recipe(Path("train/recipes/tiny.yaml"))
manifest = {"world_size": 1, "data_sha256": "d1", "recipe": recipe.model_dump(mode="json")}
TOUCH = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree")

def save(folder, step):
    def write_state(partial):
        (partial / checkpoint.STATE / "model.pt").write_text("weights")
    checkpoint.save(folder, step, write_state, lambda: None, 0, manifest, keep=2)

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
        "saved by 2 ranks, this run has 4; expected 2 ranks": (recipe, 4, "d1"),
        "trained on data d1, this run has data d2; expected the same data": (recipe, 2, "d2"),
        "another model: hidden_size was 320, is 640; expected the same model": (
            recipe.model_copy(update={"model": wider}),
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
        assert "--run-dir" in str(caught.value)
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
    with pytest.raises(Stop, match="another model: weights was llama-2-7b, is None"):
        checkpoint.find_start(tmp_path, recipe, 2, "d1")


def test_changes_that_may_be_continued_are_named(tmp_path: Path, recipe: Recipe) -> None:
    save(tmp_path, 20, recipe)
    changed = recipe.model_copy(update={"steps": 80, "seed": 2})
    start = checkpoint.find_start(tmp_path, changed, 2, "d1")
    assert start
    assert checkpoint.changed_keys(start, changed) == ["seed", "steps"]
    assert checkpoint.changed_keys(start, recipe) == []
