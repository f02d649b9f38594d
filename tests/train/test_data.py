"""Preparing text and the order of samples."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from pathlib import Path

import pytest

from train import data
from train.errors import Stop
from train.recipe import Data, Recipe, read_recipe

TINY = Path(__file__).resolve().parents[2] / "train" / "recipes" / "tiny.yaml"


def text_data(*sources: str, max_mib: float = 1.0, sequence_length: int = 4) -> Data:
    return Data(kind="text", sources=list(sources), sequence_length=sequence_length, max_mib=max_mib)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "b.txt").write_text("second")
    (folder / "a.txt").write_text("first")
    (folder / "image.txt").write_bytes(b"\x89PNG\0\0")
    (folder / "folder.txt").mkdir()
    (folder / "dangling.txt").symlink_to(folder / "none")
    return folder


def test_prepared_data_is_sorted_text_with_a_truthful_manifest(sources: Path, tmp_path: Path) -> None:
    prepared = data.prepare(text_data(f"{sources}/*.txt"), tmp_path / "data")
    assert (prepared.folder / "tokens.bin").read_bytes() == b"first\0second\0"
    manifest = json.loads((prepared.folder / "manifest.json").read_text())
    assert manifest["files"] == [f"{sources}/a.txt", f"{sources}/b.txt"]
    assert manifest["tokens"] == prepared.tokens == 13
    assert manifest["sha256"] == prepared.sha256 == hashlib.sha256(b"first\0second\0").hexdigest()
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [prepared.folder.name]


def test_the_same_files_give_the_same_tokens_and_a_second_call_keeps_them(sources: Path, tmp_path: Path) -> None:
    wanted = text_data(f"{sources}/*.txt")
    one, two = data.prepare(wanted, tmp_path / "one"), data.prepare(wanted, tmp_path / "two")
    assert one.sha256 == two.sha256
    (sources / "a.txt").write_text("changed")
    assert data.prepare(wanted, tmp_path / "one") == one
    assert data.prepare(wanted, tmp_path / "three").sha256 != one.sha256


def test_the_byte_budget_cuts(sources: Path, tmp_path: Path) -> None:
    prepared = data.prepare(text_data(f"{sources}/*.txt", max_mib=8 / 2**20), tmp_path)
    assert (prepared.folder / "tokens.bin").read_bytes() == b"first\0se"


def test_stdlib_is_a_source_everywhere() -> None:
    files, content = data.collect(text_data("{stdlib}/a*.py"))
    assert f"{sysconfig.get_path('stdlib')}/ast.py" in files
    assert b"class NodeVisitor" in content


def test_folder_name_does_not_depend_on_where_python_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = text_data("{stdlib}/*.py")
    name = data.folder_name(wanted)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: "/elsewhere")
    assert data.folder_name(wanted) == name
    assert data.folder_name(text_data("{stdlib}/*.py", max_mib=2)) != name


def test_what_cannot_be_used_is_told(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(Stop, match="no text file matches"):
        data.prepare(text_data(f"{sources}/*.md"), tmp_path / "data")
    with pytest.raises(Stop, match="13 tokens; expected at least one sequence of 14"):
        data.prepare(text_data(f"{sources}/*.txt", sequence_length=14), tmp_path / "data")
    with pytest.raises(Stop, match="storage that all nodes share"):
        data.wait_until_prepared(text_data("never"), tmp_path / "data", timeout_s=0.1)
    prepared = data.prepare(text_data(f"{sources}/*.txt"), tmp_path / "data")
    (prepared.folder / "tokens.bin").write_bytes(b"short")
    with pytest.raises(Stop, match=r"tokens.bin: 5 bytes; expected 13"):
        data.wait_until_prepared(text_data(f"{sources}/*.txt"), tmp_path / "data", timeout_s=0.1)


@pytest.fixture
def samples(tmp_path: Path) -> data.Samples:
    pytest.importorskip("torch")
    (tmp_path / "text").write_bytes(bytes(range(1, 201)))
    return data.Samples(data.prepare(text_data(str(tmp_path / "text")), tmp_path / "data"), sequence_length=4, seed=7)


def test_every_epoch_visits_every_sequence_once_in_another_order(samples: data.Samples) -> None:
    count = samples.count
    epochs = [[samples.sequence_at(epoch * count + index) for index in range(count)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [samples.sequence_at(index) for index in range(count)] == epochs[0]  # back again after a resume


def recipe_of(micro_batch: int, accumulation: int) -> Recipe:
    return read_recipe(TINY).model_copy(update={"micro_batch": micro_batch, "gradient_accumulation": accumulation})


@pytest.mark.parametrize(("world_size", "micro_batch", "accumulation"), [(1, 4, 4), (2, 4, 2), (4, 1, 4), (16, 1, 1), (8, 2, 1)])
def test_a_step_takes_the_same_samples_for_any_number_of_ranks(
    samples: data.Samples, world_size: int, micro_batch: int, accumulation: int
) -> None:
    recipe = recipe_of(micro_batch, accumulation)
    for step in (1, 2, 9):
        taken = []
        for micro_step in range(accumulation):
            for rank in range(world_size):
                first = data.first_position(recipe, step, micro_step, rank, world_size)
                taken += [samples.sequence_at(first + index) for index in range(micro_batch)]
        assert taken == [samples.sequence_at((step - 1) * 16 + index) for index in range(16)]


def test_a_batch_holds_the_bytes_of_its_sequences(samples: data.Samples) -> None:
    first = samples.count - 1  # the batch lies across two epochs
    batch = samples.batch(first, 3)
    assert str(batch.dtype) == "torch.int64"
    starts = [samples.sequence_at(first + index) * 4 for index in range(3)]
    assert batch.tolist() == [[start + 1, start + 2, start + 3, start + 4] for start in starts]
