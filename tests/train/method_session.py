"""Trains many small recipes one after the other in one process group, as importing torch and DeepSpeed takes longest.

Started by torchrun: `method_session.py CASES.json FOLDER`. CASES is name -> {"recipe", "stop_after"?, "plain_ddp"?,
"poison_step"?}. Rank 0 writes FOLDER/results.json: name -> losses, trainable names, whether the frozen weights changed, or the
line of the Stop.
"""

# ruff: noqa: E402  (the tree comes onto the path first)

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed's use

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from train import checkpoint, data, loop
from train.device import choose_device
from train.errors import Stop
from train.metrics import Heartbeat
from train.model import count_parameters
from train.recipe import Recipe, deepspeed_config
from train.weights import find_weights

DS_CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs"


def fingerprint(model: torch.nn.Module, *, trains: bool) -> str:
    """Return a hash over the bits of all parameters that train, or of all that do not, and of their quantization."""
    digest = hashlib.sha256()
    for name, one in model.named_parameters():
        if one.requires_grad == trains and not hasattr(one, "ds_id"):
            state = getattr(one, "quant_state", None)
            scales = [state.absmax, state.state2.absmax] if state is not None else []
            for tensor in (one.data, *scales):
                digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def same_on_all_ranks(text: str) -> bool:
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, text)
    return len(set(everyones)) == 1


def poison(engine: Any, recipe: Recipe, step: int, rank: int) -> None:
    """Spoil the head before `step`: a thousandfold where a spike is looked for, else no number at all, on rank 1."""
    forward, calls = engine.module.forward, 0

    def forward_poisoned(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == (step - 1) * recipe.gradient_accumulation + 1 and (recipe.loss_spike or rank == 1):
            with torch.no_grad():
                engine.module.lm_head.weight.mul_(1000 if recipe.loss_spike else torch.nan)
        return forward(*given, **named)

    engine.module.forward = forward_poisoned


def train_plain_ddp(recipe: Recipe, folder: Path, place: loop.Place) -> dict[str, Any]:
    """Train as a person would with nothing but torch and transformers: what DeepSpeed's losses are held against."""
    prepared = data.prepare(recipe.data, folder / "data")
    samples = data.Samples(prepared, recipe.data.sequence_length, recipe.seed)
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(LlamaConfig(**recipe.model.config))
    optimizer = torch.optim.AdamW(
        [
            {"params": [one for one in model.parameters() if one.dim() >= 2], "weight_decay": recipe.optimizer.weight_decay},
            {"params": [one for one in model.parameters() if one.dim() < 2], "weight_decay": 0.0},
        ],
        betas=recipe.optimizer.betas,
    )
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    losses, norms = [], []
    for step in range(1, recipe.steps + 1):
        total = torch.zeros(())
        for micro_step in range(recipe.gradient_accumulation):
            first = data.first_position(recipe, step, micro_step, place.rank, place.world_size)
            tokens = samples.batch(first, recipe.micro_batch)["input_ids"]
            loss = ddp(input_ids=tokens, labels=tokens).loss / recipe.gradient_accumulation
            loss.backward()
            total += loss.detach()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.gradient_clipping)))
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate(step)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / place.world_size)
    return {"losses": losses, "norms": norms}


def train_once(
    recipe: Recipe, folder: Path, run: Path, place: loop.Place, start: checkpoint.Saved | None, poison_step: int = 0
) -> dict[str, Any]:
    device = choose_device(place.local_rank)
    prepared = data.prepare(recipe.data, folder / "data") if place.rank == 0 else None
    dist.barrier()
    prepared = prepared or data.prepare(recipe.data, folder / "data")
    recipe = recipe.divided(place.world_size)
    precision = loop.choose_precision(recipe.precision, device)
    config = deepspeed_config(recipe, DS_CONFIGS / recipe.ds_config, place.world_size, precision)
    engine, recipe = loop.build_engine(recipe, config, find_weights(recipe.model, folder / "models"), place, device, precision)
    model = engine.module
    names = [name for name, one in model.named_parameters() if one.requires_grad]
    before = fingerprint(model, trains=False)
    agree = same_on_all_ranks(fingerprint(model, trains=True) + before)
    if poison_step:
        poison(engine, recipe, poison_step, place.rank)
    loop.train(recipe, engine, run, prepared, place, device, start, Heartbeat(run, place.rank))
    lines = (run / "metrics.jsonl").read_text().splitlines() if place.rank == 0 else []
    dtypes = sorted({str(one.dtype) for name, one in model.named_parameters() if not one.requires_grad})
    return {
        "losses": [json.loads(line)["loss"] for line in lines],
        "norms": [json.loads(line)["grad_norm"] for line in lines],
        "rates": [json.loads(line)["lr"] for line in lines],
        "trains": names,
        "frozen_dtypes": dtypes,
        "frozen_unchanged": fingerprint(model, trains=False) == before,
        "ranks_agree": agree,
        "micro_batch": recipe.micro_batch,
        "gradient_accumulation": recipe.gradient_accumulation,
        "optimizer": type(engine.basic_optimizer).__name__,
        "class": type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__,
        "parameters": count_parameters(model),
    }


def run_case(name: str, case: dict[str, Any], folder: Path, place: loop.Place) -> dict[str, Any]:
    """Train a case; with `stop_after` once more up to that step and on from its checkpoint, as `resumed_losses`."""
    recipe = Recipe.model_validate(case["recipe"])
    if case.get("plain_ddp"):
        return train_plain_ddp(recipe, folder, place)
    result = train_once(recipe, folder, folder / name, place, None, case.get("poison_step", 0))
    if "stop_after" in case:
        halves = folder / f"{name}-halves"
        stop = case["stop_after"]
        first = recipe.model_copy(update={"checkpoint": recipe.checkpoint.model_copy(update={"every_steps": stop})})
        train_once(first, folder, halves, place, None)
        dist.barrier()
        start = checkpoint.read(checkpoint.folder_of(halves / "checkpoints", stop))
        assert isinstance(start, checkpoint.Saved), start
        dist.barrier()
        result["resumed_losses"] = train_once(recipe, folder, halves, place, start)["losses"]
        state = halves / "checkpoints" / f"step_{stop:08d}" / "state"
        result["model_states_bytes"] = sum(file.stat().st_size for file in state.glob("*model_states.pt"))
    return result


def main() -> None:
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    place = loop.Place(*(int(os.environ[key]) for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE")))
    loop.join_ranks(choose_device(place.local_rank), 300.0)
    results = {}
    for name, case in cases.items():
        began_s = time.monotonic()
        try:
            results[name] = run_case(name, case, folder, place)
        except Stop as stop:
            results[name] = {"stop": str(stop), "exit_code": stop.exit_code}
        results[name]["took_s"] = round(time.monotonic() - began_s, 1)
        if place.rank == 0:
            (folder / "results.json").write_text(json.dumps(results, indent=1))
            print(name, {key: value for key, value in results[name].items() if key != "trains"}, flush=True)
        gc.collect()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
