"""A folder of weights is looked at before it is loaded: is it the recipe's model, whole, and in numbers that can train.

Reads config.json and the headers of the safetensors files: no libraries, so a mistake is told at once. The format of a
header (its length in 8 bytes, then JSON): https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.errors import Stop, reason
from train.recipe import Model

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""What can train, as safetensors calls it -> as torch does."""

OF_THE_TRAINING = ("use_cache",)
"""What the recipe's model.config may say otherwise than the folder's config.json."""

CONVERT = "save the model again with transformers: model.save_pretrained(FOLDER)"


@dataclass(frozen=True)
class Weights:
    """A folder that was found good. `dtype` is torch's name of most of its numbers."""

    folder: Path
    dtype: str


def find_weights(model: Model, models_dir: Path) -> Weights | None:
    """Return the weights that the recipe's model starts from, None for random ones. Raises Stop naming the file that is wrong."""
    if model.weights is None:
        return None
    folder = models_dir / model.weights  # an absolute path stays as it is
    if not folder.is_dir():
        remedy = "copy the model there, or correct model.weights in the recipe"
        raise Stop(folder, "there is no such folder", "a model: config.json and *.safetensors", remedy)
    _require_same_model(folder / "config.json", model)
    elements = dict.fromkeys(DTYPES.values(), 0)
    for file in _files(folder):
        for name, dtype, count in _tensors(file):
            if dtype not in DTYPES:
                expected = f"{', '.join(DTYPES.values())} (quantized by method int8 or qlora, when it is loaded)"
                raise Stop(file, f"{name} has numbers of kind {dtype}", expected, "get the weights that are not quantized")
            elements[DTYPES[dtype]] += count
    return Weights(folder, max(elements, key=lambda dtype: elements[dtype]))


def _require_same_model(file: Path, model: Model) -> None:
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        family = config["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        told = error.strerror if isinstance(error, OSError) else f"not a model's configuration ({type(error).__name__}: {error})"
        raise Stop(file, f"{told}", "JSON with model_type, as transformers writes it", CONVERT) from None
    if family != model.family:
        raise Stop(file, f"model_type {family}", f"{model.family}, as the recipe says", "correct model.family or model.weights")
    wrong = list(_contradictions(_in_one_form(model.config), _in_one_form(config)))
    if wrong:
        observed = ", ".join(f"{key} {found}" for key, _, found in wrong)
        expected = ", ".join(f"{key} {told}" for key, told, _ in wrong)
        raise Stop(file, observed, f"{expected}, as the recipe says", "correct model.config or model.weights")


def _in_one_form(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration as transformers 5 writes it: what says the same has the same name."""
    plain = {key: value for key, value in config.items() if key not in (*OF_THE_TRAINING, "rope_theta", "rope_scaling")}
    rotary = dict(_mapping(plain.pop("rope_parameters", None)))
    if "rope_theta" in config:
        rotary["rope_theta"] = config["rope_theta"]
    if "rope_scaling" in config:  # null: positions as they are
        rotary |= _mapping(config["rope_scaling"]) or {"rope_type": "default"}
    if "type" in rotary:
        rotary["rope_type"] = rotary.pop("type")
    if "torch_dtype" in plain:
        plain["dtype"] = plain.pop("torch_dtype")
    return {**plain, "rope_parameters": rotary}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _contradictions(told: dict[str, Any], found: dict[str, Any], of: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield name, what is told and what was found of each field that both have, and differs; a field of a field is `a.b`."""
    for key, value in told.items():
        if key not in found:
            continue
        if isinstance(value, dict) and isinstance(found[key], dict):
            yield from _contradictions(value, found[key], f"{of}{key}.")
        elif value != found[key]:
            yield f"{of}{key}", value, found[key]


def _files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers will read."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.exists():
        return [single]
    if not index.exists():
        found = ", ".join(sorted(path.name for path in folder.glob("*.bin"))[:3]) or "no weights"
        raise Stop(folder, f"holds {found}", "model.safetensors, or its parts with model.safetensors.index.json", CONVERT)
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        expected = "JSON with weight_map, as transformers writes it"
        raise Stop(index, f"{type(error).__name__}: {reason(error)}", expected, "copy the file again") from None
    for name in names:
        if not (folder / name).is_file():
            raise Stop(folder / name, "is not there", f"one of {len(names)} files that {index.name} lists", "copy it there")
    return [folder / name for name in names]


def _tensors(file: Path) -> list[tuple[str, str, int]]:
    """Return name, dtype and number of elements of each tensor. Raises Stop for a file that is cut off or no safetensors."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            size = file.stat().st_size
            if length > size:
                raise ValueError("its first 8 bytes are no length")
            header: dict[str, Any] = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        end = max(one["data_offsets"][1] for one in header.values())
        tensors = []
        for name, one in header.items():
            count = 1
            for dimension in one["shape"]:
                count *= dimension
            tensors.append((name, str(one["dtype"]), count))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise Stop(file, reason(error), "a safetensors file", "copy the file again") from None
    if 8 + length + end != size:
        raise Stop(file, f"{size} bytes", f"{8 + length + end}, as its header says", "copy the file again: it is cut off")
    return tensors
