"""The files that DeepSpeed keeps a run's state in, written so that a refusal on one rank leaves no other waiting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from train.storage import HashedFile

MOMENT_BYTES = {"adamw": 8, "adamw8bit": 2}
"""Two moments of a parameter, as the optimizer keeps them; where it has fp32 weights of its own they take 4 more."""


class StateWriter(TorchCheckpointEngine):
    """DeepSpeed's checkpoint engine, which hashes what it writes and keeps an error until all ranks have passed its barriers."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.files: dict[str, dict[str, int | str]] = {}
        self.refusal: OSError | None = None

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: rank 0 has made the folder, and on NFS ranks that all make it block each other (DeepSpeed PR 4536)."""

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file; after a refusal none more."""
        if self.refusal:
            return
        file: HashedFile | None = None
        try:
            file = HashedFile(Path(path))
            torch.save(state_dict, file)
            self.files[str(file.path.relative_to(self.folder))] = file.close()
        except (OSError, RuntimeError) as error:  # torch tells a refused write as a RuntimeError about positions
            self.refusal = file.refusal if file else error if isinstance(error, OSError) else None
            if self.refusal is None:
                raise


def write_state(engine: Any, folder: Path, tag: str, *, all_weights: bool) -> dict[str, dict[str, int | str]]:
    """Write this rank's files below `folder`/`tag`; return name -> {"bytes", "sha256"}. Raises OSError, after all ranks are done.

    Every rank calls this. `all_weights`: frozen ones too.
    """
    writer, usual = StateWriter(folder), engine.checkpoint_engine
    engine.checkpoint_engine = writer
    engine._copy_recovery_script = lambda *_: None  # rank 0's zero_to_fp32.py: an error there would leave the others waiting
    try:
        engine.save_checkpoint(str(folder), tag=tag, save_latest=False, exclude_frozen_parameters=not all_weights)
    finally:
        engine.checkpoint_engine = usual
    if writer.refusal:
        raise writer.refusal
    return writer.files


def state_bytes(engine: Any, optimizer: str, *, all_weights: bool) -> int:
    """Return about how many bytes a checkpoint of all ranks takes: the weights saved, fp32 weights and moments of what trains."""
    saved = [one for one in engine.module.parameters() if all_weights or one.requires_grad]
    trains = sum(getattr(one, "ds_numel", one.numel()) for one in saved if one.requires_grad)
    apart = engine.zero_optimization_stage() > 0 or engine.bfloat16_enabled() or engine.fp16_enabled()
    return sum(one.numel() * one.element_size() for one in saved) + trains * ((4 if apart else 0) + MOMENT_BYTES[optimizer])
