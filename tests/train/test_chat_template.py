"""The chat template of an export: a model is asked in the very tokens that it was trained on."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("numpy") is None:
    pytest.skip("needs the extra `train`", allow_module_level=True)

import numpy as np

from tests.train import toy_tokenizers
from tests.train.test_prepare import TALK, write_lines
from tests.train.test_training import small_recipe
from train.export import TEMPLATE_FILE, TOKENIZER_FILES, _bring_template, _bring_tokenizer, own_template
from train.recipe import Recipe
from train.weights import Weights

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = {"role": "system", "content": "Be brief."}
MINE = (
    "{% for message in messages %}{{ message['role'] + ':\n' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
)


def make(tmp_path: Path, kind: str, messages: list[dict[str, str]], template: str = "auto", own: bool = False) -> Path:
    """Return a folder where data/chat was made of `messages` with the tokenizer in models/toy, its `own` template or none."""
    toy = getattr(toy_tokenizers, kind)(tmp_path / "models" / "toy")
    if not own:
        config = json.loads((toy / "tokenizer_config.json").read_text())
        del config["chat_template"]
        (toy / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "mine.jinja").write_text(toy_tokenizers.LLAMA2 if kind == "llama2" else MINE)
    file = write_lines(tmp_path / "a.jsonl", [{"messages": messages}])
    words = [file, "--tokenizer", toy, "--out", tmp_path / "data" / "chat", "--template", template.format(tmp=tmp_path)]
    subprocess.run([sys.executable, ROOT / "train" / "prepare.py", *words], check=True, capture_output=True)
    return tmp_path


def exported(folder: Path) -> tuple[Path, tuple[str | None, str]]:
    """Return what an export has of the tokenizer, and what is told of its template."""
    data = {"kind": "prepared", "path": "chat", "sequence_length": 64}
    recipe, out = Recipe.model_validate(small_recipe(data=data)), folder / "out"
    out.mkdir()
    assert _bring_tokenizer(out, recipe, Weights(folder / "models" / "toy", "float32"), folder / "data")
    return out, _bring_template(out, recipe, folder / "data")


def asked(out: Path, messages: list[dict[str, str]], **more: Any) -> list[int]:
    from transformers import AutoTokenizer

    return list(AutoTokenizer.from_pretrained(str(out)).apply_chat_template(messages, **more)["input_ids"])


@pytest.mark.parametrize("template", ["auto", "{tmp}/mine.jinja"])
@pytest.mark.parametrize("kind", ["chatml", "llama2"])
@pytest.mark.parametrize("messages", [TALK, [SYSTEM, *TALK[:2]], TALK[:3]], ids=["turns", "system", "ends with a question"])
def test_a_tokenizer_without_a_template_gets_that_of_the_data(
    tmp_path: Path, kind: str, template: str, messages: list[dict[str, str]]
) -> None:
    if kind == "llama2" and template != "auto" and messages[0] == SYSTEM:
        pytest.skip("its template refuses a system's words")
    out, told = exported(make(tmp_path, kind, messages, template))
    assert told == ("of the data (default)" if template == "auto" else "of the data (file)", "")
    trained = np.fromfile(tmp_path / "data" / "chat" / "tokens.bin", "<u2").tolist()
    assert asked(out, messages) == trained
    counts = np.fromfile(tmp_path / "data" / "chat" / "loss.bin", np.uint8).tolist()
    first = [message["role"] for message in messages].index("assistant")
    if kind == "chatml":  # Llama 2's begins a response with a space, which the model writes itself
        assert asked(out, messages[:first], add_generation_prompt=True) == trained[: counts.index(1)]


def test_a_tokenizers_own_template_stays_and_another_one_of_the_data_is_told(tmp_path: Path) -> None:
    own = make(tmp_path / "own", "chatml", TALK, own=True)
    out, told = exported(own)
    assert told == ("of the tokenizer", "")
    assert asked(out, TALK) == np.fromfile(own / "data" / "chat" / "tokens.bin", "<u2").tolist()
    out, (whose, notice) = exported(make(tmp_path / "other", "chatml", TALK, "default", own=True))
    assert whose == "of the tokenizer" and "the data was made with another (its --template: default)" in notice
    assert own_template(out) == toy_tokenizers.CHATML and not (out / TEMPLATE_FILE).exists()


def test_nothing_is_written_where_nothing_is_known(tmp_path: Path) -> None:
    folder = make(tmp_path, "chatml", TALK)
    manifest = folder / "data" / "chat" / "manifest.json"
    manifest.write_text(
        json.dumps({key: value for key, value in json.loads(manifest.read_text()).items() if key != "chat_template"})
    )
    out, told = exported(folder)  # of a version before, or plain text alone
    assert told == (None, "")
    assert not (out / TEMPLATE_FILE).exists()
    assert TEMPLATE_FILE in TOKENIZER_FILES
