"""What the tests of models share: recipe `tiny` as it is resolved, and the shape of a model that takes milliseconds."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from train.device import Device
from train.recipe import Recipe

GOLDEN: dict[str, Any] = json.loads((Path(__file__).resolve().parents[1] / "golden" / "recipe-tiny.json").read_text())
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LORA = {"rank": 4, "alpha": 8, "dropout": 0.0, "targets": ["q_proj", "down_proj"]}
CPU = Device("cpu", "cpu", "gloo")


def tiny_recipe(**changes: Any) -> Recipe:
    """Return recipe `tiny` with other values at its top."""
    return Recipe.model_validate(copy.deepcopy(GOLDEN) | changes)
