"""What people get wrong, told by the real programs: one line with the file and the remedy, exit code 2 or 1, in a second."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.train.test_checkpoint import save
from train.data import folder_name, open_prepared
from train.errors import Stop
from train.evaluate import tokenizers_differ
from train.feed import require_same_tokenizer
from train.recipe import Recipe
from train.weights import Weights

if importlib.util.find_spec("numpy") is None:
    pytest.skip("needs the extra `train`", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
TINY: dict[str, Any] = json.loads((ROOT / "tests" / "golden" / "recipe-tiny.json").read_text())
FOLDER_OF_DATA = {"kind": "prepared", "path": "text", "sequence_length": 32}
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")} | {"R4090C_DEVICE": "cpu"}


def recipe() -> dict[str, Any]:
    made = copy.deepcopy(TINY)
    made["model"]["weights"] = "toy"
    return made | {"data": FOLDER_OF_DATA}


def write_weights(folder: Path, dtype: str = "F32") -> None:
    """Write a folder that has the looks of a model: a configuration and one tensor."""
    header = json.dumps({"model.norm.weight": {"dtype": dtype, "shape": [4], "data_offsets": [0, 16]}}).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 256}))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder where everything is right: data/text, models/toy, a run with a checkpoint."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": f"number {n}"}) + "\n" for n in range(40)))
    prepare(folder, "in.jsonl", 0)
    write_weights(folder / "models" / "toy")
    sha256 = open_prepared(folder / "data" / "text", 32).sha256
    save(folder / "run" / "checkpoints", 20, Recipe.model_validate(recipe()), world_size=1, data_sha256=sha256)
    return folder


def prepare(folder: Path, file: str, code: int, *more: str) -> str:
    words = [str(folder / file), "--tokenizer", "bytes", "--out", str(folder / "data" / "text"), *more]
    return finish([str(ROOT / "train" / "prepare.py"), *words], code)


def finish(words: list[str], code: int) -> str:
    """Run a program of train/, which must end with `code`; return what it says on stderr."""
    ran = subprocess.run([sys.executable, *words], env=ENVIRONMENT, capture_output=True, text=True, timeout=100)
    assert ran.returncode == code, ran.stdout + ran.stderr
    return ran.stderr


def no_weights(at: Path) -> None:
    shutil.rmtree(at / "models")


def quantized_weights(at: Path) -> None:
    write_weights(at / "models" / "toy", "I8")


def cut_weights(at: Path) -> None:
    file = at / "models" / "toy" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


def other_tokenizer(at: Path) -> None:
    (at / "models" / "toy" / "tokenizer.json").write_text("{}")


def large_tokens(at: Path) -> None:
    manifest = at / "data" / "text" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"largest_token": ', '"largest_token": 9'))


def short_data(at: Path) -> None:
    shutil.rmtree(at / "data" / "text")
    (at / "short.jsonl").write_text('{"text": "short"}\n')
    prepare(at, "short.jsonl", 0)


def wrong_manifest(at: Path) -> None:
    manifest = at / "data" / "text" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"dtype": "uint8"', '"dtype": "uint16"'))


def changed_tokens(at: Path) -> None:
    file = at / "data" / "text" / "tokens.bin"
    file.write_bytes(b"X" + file.read_bytes()[1:])


def cut_shard(at: Path) -> None:
    (at / "run" / "checkpoints" / "step_00000020" / "state" / "model.pt").write_bytes(b"cut")


def held_out_nowhere(at: Path) -> None:
    write_held_out_recipe(at, "nowhere")


def held_out_of_another_tokenizer(at: Path) -> None:
    shutil.copytree(at / "data" / "text", at / "data" / "other")
    manifest = at / "data" / "other" / "manifest.json"
    manifest.write_text(
        manifest.read_text().replace('"name": "bytes"', '"name": "toy"').replace('"sha256": "277', '"sha256": "377')
    )
    write_held_out_recipe(at, "other")


def write_held_out_recipe(at: Path, path: str) -> None:
    evaluated = {"every_steps": 10, "sequences": 8, "data": FOLDER_OF_DATA | {"path": path}}
    (at / "recipe.json").write_text(json.dumps(recipe() | {"eval": evaluated}))


TRAINING: dict[Callable[[Path], None], str] = {
    no_weights: "{at}/models/toy: there is no such folder; expected a model: config.json and *.safetensors; copy the model there",
    quantized_weights: "{at}/models/toy/model.safetensors: model.norm.weight has numbers of kind I8; expected float32, ",
    cut_weights: "{at}/models/toy/model.safetensors: 99 bytes; expected 102, as its header says; copy the file again",
    other_tokenizer: "{at}/data/text/manifest.json: its tokenizer, bytes, is not {at}/models/toy/tokenizer.json; expected the "
    "tokenizer of the weights; r4090c data prepare … --tokenizer {at}/models/toy",
    large_tokens: "{at}/data/text/manifest.json: it has token 9,117, the model knows 256; expected tokens below 256; prepare the",
    short_data: "{at}/data/text/tokens.bin: 6 tokens; expected at least one sequence of 32; prepare more",
    wrong_manifest: "{at}/data/text/manifest.json: it contradicts itself; expected a manifest as it was written; prepare it",
    changed_tokens: "{at}/data/text/tokens.bin: its bytes are not those that were written; expected sha256 ",
    cut_shard: "{at}/run/checkpoints: no checkpoint is whole (step_00000020: state/model.pt has 3 bytes, 140 were written)",
    held_out_nowhere: "{at}/data/nowhere/manifest.json: No such file or directory; expected a folder that `r4090c data prepare` "
    "wrote; correct eval.data.path in the recipe\n",
    held_out_of_another_tokenizer: "{at}/data/other/manifest.json: its tokenizer is toy, that of the data trained on "
    "({at}/data/text) is bytes; expected one tokenizer for both; prepare it with the same",
}


@pytest.mark.parametrize("spoil", TRAINING, ids=lambda spoil: spoil.__name__)
def test_a_training_that_cannot_be_is_one_line(spoil: Callable[[Path], None], whole: Path, tmp_path: Path) -> None:
    at = tmp_path / "at"
    shutil.copytree(whole, at)
    (at / "recipe.json").write_text(json.dumps(recipe()))
    spoil(at)
    words = ["--recipe", str(at / "recipe.json"), "--run-dir", str(at / "run"), "--data-dir", str(at / "data")]
    told = finish([str(ROOT / "train" / "main.py"), *words], 2)
    assert told.count("\n") == 1, told
    assert told.startswith("train: " + TRAINING[spoil].format(at=at)), told


def test_data_that_cannot_be_prepared_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    told = prepare(tmp_path, "empty.jsonl", 2)
    assert told.count("\n") == 1 and told.startswith(f"data prepare: {tmp_path}/empty.jsonl: empty; expected at least one record")
    (tmp_path / "huge.jsonl").write_text(json.dumps({"text": "x" * 3_000_000}) + '\n{"text": "fine"}\n')
    told = prepare(tmp_path, "huge.jsonl", 1, "--max-record-mib", "1")
    assert f"{tmp_path}/huge.jsonl:1: " in told and "longer than 1 MiB" in told and "--max-bad 1" in told
    assert not (tmp_path / "data" / "text").exists()


def test_the_tokenizer_beside_the_weights_is_the_datas(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "toy"
    write_weights(folder)
    content = '{"model": "é"}\n'
    (folder / "tokenizer.json").write_text(content)
    shutil.copytree(whole / "data" / "text", tmp_path / "text")
    manifest = tmp_path / "text" / "manifest.json"
    told = json.loads(manifest.read_text())
    told["tokenizer"] = {"kind": "hf", "name": "toy", "sha256": hashlib.sha256(content.encode()).hexdigest()}
    manifest.write_text(json.dumps(told))
    assert require_same_tokenizer(open_prepared(tmp_path / "text", 32), Weights(folder, "float32")) == ""
    (folder / "tokenizer.json").write_text(content + " ")
    with pytest.raises(Stop, match=r"its tokenizer, toy, is not .*/toy/tokenizer.json"):
        require_same_tokenizer(open_prepared(tmp_path / "text", 32), Weights(folder, "float32"))
    assert require_same_tokenizer(open_prepared(tmp_path / "text", 32), None) == ""
    (folder / "tokenizer.json").unlink()
    told_nothing = require_same_tokenizer(open_prepared(tmp_path / "text", 32), Weights(folder, "float32"))
    assert told_nothing == f"{folder} has no tokenizer.json: whether {tmp_path / 'text'} is of its tokenizer was not compared"


def test_held_out_data_is_of_the_tokenizer_of_the_weights_and_of_what_was_trained_on(whole: Path, tmp_path: Path) -> None:
    data, weights = tmp_path / "data", Weights(tmp_path / "toy", "float32")
    for name in ("text", "held-out", "other"):
        shutil.copytree(whole / "data" / "text", data / name)
    manifest = data / "other" / "manifest.json"
    told = json.loads(manifest.read_text()) | {"tokenizer": {"kind": "hf", "name": "toy", "sha256": "12"}}
    manifest.write_text(json.dumps(told))
    write_weights(weights.folder)
    trained, held_out, other = (open_prepared(data / name, 32) for name in ("text", "held-out", "other"))
    wanted = Recipe.model_validate(recipe())
    assert tokenizers_differ(held_out, wanted, None, data) == ""
    for one in (None, weights):  # with no tokenizer beside the weights that of the training's data still tells
        with pytest.raises(
            Stop, match=r"other/manifest.json: its tokenizer is toy, that of the data trained on \(.*/text\) is bytes"
        ):
            tokenizers_differ(other, wanted, one, data)
    in_text = Recipe.model_validate(recipe() | {"data": TINY["data"]})  # bytes too
    folder = data / folder_name(in_text.data)
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    assert tokenizers_differ(held_out, in_text, None, data) == ""
    shutil.rmtree(trained.folder)
    assert "text is not there any more" in tokenizers_differ(held_out, wanted, None, data)
    assert "has no tokenizer.json" in tokenizers_differ(held_out, wanted, weights, data)
    (weights.folder / "tokenizer.json").write_text("{}")
    with pytest.raises(Stop, match=r"its tokenizer, bytes, is not .*/toy/tokenizer.json"):
        tokenizers_differ(held_out, wanted, weights, data)
