"""Continues checkpoints of two ranks with as many ranks as torchrun starts: `universal_session.py CASES.json FOLDER`.

CASES is name -> recipe. With two ranks FOLDER/<name>/whole is trained first, with a checkpoint on the way, and what DeepSpeed's
ds_to_universal makes of it goes to FOLDER/<name>/converted.pt: name -> [fp32 weight, moments]. Then, from a copy of that
checkpoint, FOLDER/<name>/on-<ranks>; what the engine held after loading goes to FOLDER/<name>/on-<ranks>.pt: the same, and
the steps that the optimizer counts. A Stop goes to FOLDER/<name>/on-<ranks>.stop.
"""

# ruff: noqa: E402  (the tree comes onto the path first)

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed's use

import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from train import checkpoint, data, loop
from train.device import choose_device
from train.errors import Stop
from train.metrics import Heartbeat
from train.recipe import Recipe, deepspeed_config
from train.weights import find_weights

SAVED_AT = 3


def held_by(engine: Any) -> dict[str, Any]:
    """Return what the optimizer of all ranks holds together, as DeepSpeed's own functions gather it.

    Nothing of one of 16 bits without ZeRO: it is whole on each rank.
    """
    zero = engine.zero_optimization_stage()
    if zero in (1, 2):
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found: dict[str, Any] = {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        if zero:
            moments = [safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")]
            found[name] = [safe_get_full_fp32_param(parameter), *moments]
        elif parameter in engine.basic_optimizer.state:
            state = engine.basic_optimizer.state[parameter]
            found[name] = [parameter, state["exp_avg"], state["exp_avg_sq"]]
    found = {name: [tensor.detach().clone() for tensor in tensors] for name, tensors in found.items()}
    return {"tensors": found, "steps": sorted({float(state["step"]) for state in engine.basic_optimizer.state.values()})}


def converted(state: Path, out: Path) -> dict[str, Any]:
    """Return the weights and moments that ds_to_universal makes of a checkpoint."""
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ds_to_universal.main(
            argparse.Namespace(input_folder=str(state), output_folder=str(out), inject_missing_state=True, **options)
        )
    found = {}
    for folder in (out / "zero").iterdir():
        files = [folder / f"{kind}.pt" for kind in ("fp32", "exp_avg", "exp_avg_sq")]
        if all(file.exists() for file in files):
            loaded = [torch.load(file, weights_only=False) for file in files]
            found[folder.name] = [one["param"] if isinstance(one, dict) else one for one in loaded]
    return found


def train_on(recipe: Recipe, folder: Path, run: Path, place: loop.Place, start: checkpoint.Saved | None) -> None:
    """Train as main.py does."""
    device = choose_device(place.local_rank)
    prepared = data.prepare(recipe.data, folder / "data") if place.rank == 0 else None
    dist.barrier()
    prepared = prepared or data.prepare(recipe.data, folder / "data")
    if start:
        checkpoint.require_same(start, recipe, place.world_size, prepared.sha256)
    recipe = checkpoint.divided(recipe, start, place.world_size)
    precision = loop.choose_precision(recipe.precision, device)
    config = deepspeed_config(recipe, ROOT / "ds_configs" / recipe.ds_config, place.world_size, precision)
    weights = find_weights(recipe.model, folder / "models")
    engine, recipe = loop.build_engine(recipe, config, weights, place, device, precision)
    load = engine.load_checkpoint

    def load_and_look(*given: Any, **named: Any) -> Any:
        came = load(*given, **named)
        held = held_by(engine)
        if place.rank == 0:
            torch.save(held, run.with_suffix(".pt"))
        return came

    engine.load_checkpoint = load_and_look
    loop.train(recipe, engine, run, prepared, place, device, start, Heartbeat(run, place.rank))


def main() -> None:
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    place = loop.Place(*(int(os.environ[key]) for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE")))
    loop.join_ranks(choose_device(place.local_rank), 300.0)
    for name, content in cases.items():
        recipe, whole, run = Recipe.model_validate(content), folder / name / "whole", folder / name / f"on-{place.world_size}"
        try:
            if place.world_size == 2:
                train_on(recipe, folder, whole, place, None)
            saved = checkpoint.folder_of(whole / "checkpoints", SAVED_AT)
            if place.rank == 0:
                shutil.copytree(saved, run / "checkpoints" / saved.name)
                shutil.copy(whole / "metrics.jsonl", run)
                if place.world_size == 2 and list(saved.glob("state/*optim_states.pt")):
                    torch.save(
                        converted(saved / checkpoint.STATE, folder / name / "universal" / "out"), folder / name / "converted.pt"
                    )
            dist.barrier()
            start = checkpoint.read(run / "checkpoints" / saved.name)
            assert isinstance(start, checkpoint.Saved), start
            train_on(recipe, folder, run, place, start)
        except Stop as stop:
            if place.rank == 0:
                run.with_suffix(".stop").write_text(str(stop))
        if place.rank == 0:
            print(name, flush=True)
        gc.collect()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
