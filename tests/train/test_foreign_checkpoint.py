"""A checkpoint of somebody else's run may name any function: export and eval load none that names more than a checkpoint has."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from train.checkpoint import STATE, Saved
from train.errors import Stop
from train.recipe import read_recipe

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("needs the extra `train`", allow_module_level=True)
TINY = Path(__file__).resolve().parents[2] / "train" / "recipes" / "tiny.yaml"


class Trap:
    """What runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.command,)


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"])
def test_a_checkpoint_that_would_run_something_is_not_loaded(tmp_path: Path, name: str) -> None:
    import torch

    from train.export import trained_weights

    sprung, state = tmp_path / "sprung", tmp_path / STATE
    state.mkdir()
    torch.save({"module": {}, "more": Trap(f"touch {sprung}")}, state / name)
    torch.load(state / name, weights_only=False)
    assert sprung.exists(), "the trap works"
    sprung.unlink()
    with pytest.raises(Stop) as told:
        trained_weights(Saved(tmp_path, {"step": 1, "precision": "fp32"}), read_recipe(TINY))
    assert name in str(told.value) and "tensors, and classes of DeepSpeed" in str(told.value)
    assert not sprung.exists()
