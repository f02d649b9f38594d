"""The training loop: a DeepSpeed ZeRO engine, optimizer steps, metrics and checkpoints."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from pydantic import ValidationError

from train import checkpoint
from train.data import Prepared, Samples, first_position
from train.device import Device, choose_precision, memory_peak_gib
from train.errors import FAILED, Stop
from train.metrics import Heartbeat, Metrics, metrics_line
from train.model import build_model, count_parameters, parameter_groups
from train.recipe import Recipe

__all__ = ["Place", "agree_on_start", "build_engine", "choose_precision", "describe", "join_ranks", "leave_ranks", "train"]

LEAVE_S = 10.0
"""est.: destroying a healthy NCCL group takes well under a second."""


@dataclass(frozen=True)
class Place:
    """Where this process stands among all ranks, as torchrun says."""

    rank: int
    local_rank: int
    world_size: int


def join_ranks(device: Device, timeout_s: float) -> None:
    """Connect all ranks; every collective of every group fails after `timeout_s` instead of hanging.

    DeepSpeed makes its ZeRO groups without passing the timeout on, so torch's defaults are set as well.
    """
    timeout = timedelta(seconds=timeout_s)
    for default in ("default_pg_timeout", "default_pg_nccl_timeout"):
        if hasattr(dist.distributed_c10d, default):
            setattr(dist.distributed_c10d, default, timeout)
    if device.kind == "cpu":  # else DeepSpeed compiles a C++ extension for minutes at the first start
        getattr(deepspeed.ops, "__compatible_ops__", {})["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=device.backend, timeout=timeout, verbose=False)


def agree_on_start(start: checkpoint.Saved | None, checkpoints: Path) -> checkpoint.Saved | None:
    """Return rank 0's choice on every rank: on network storage another rank may still see an older folder."""
    step = torch.tensor(start.step if start else 0, device=_collective_device())
    dist.broadcast(step, src=0)
    folder = checkpoint.folder_of(checkpoints, int(step))
    if int(step) == 0:
        return None
    saved = checkpoint.read(folder)
    if isinstance(saved, str):
        expected = "the checkpoint that rank 0 continues from"
        raise Stop(folder, f"not whole, seen from this node: {saved}", expected, "put --run-dir on storage that all nodes share")
    return saved


def build_engine(recipe: Recipe, config: dict[str, Any], place: Place) -> Any:
    """Return a DeepSpeed engine for the recipe's model; raises Stop when DeepSpeed gave us anything else than asked for."""
    model = build_model(recipe.model, recipe.seed)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, recipe.optimizer.weight_decay), lr=recipe.optimizer.lr, betas=recipe.optimizer.betas
    )
    try:
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    except ValidationError as error:
        mistakes = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        raise Stop(recipe.ds_config, " | ".join(mistakes), "what DeepSpeed accepts", "correct the file") from None
    wanted = (config.get("zero_optimization", {}).get("stage", 0), place.world_size)
    found = (engine.zero_optimization_stage(), dist.get_world_size())
    if not isinstance(engine, deepspeed.DeepSpeedEngine) or found != wanted:
        observed = f"{type(engine).__name__}, ZeRO stage {found[0]}, world size {found[1]}"
        expected = f"DeepSpeedEngine, ZeRO stage {wanted[0]}, world size {wanted[1]}"
        raise Stop("deepspeed.initialize", observed, expected, "report this with the versions above", FAILED)
    return engine


def describe(recipe: Recipe, engine: Any, place: Place, device: Device, precision: str, prepared: Prepared) -> str:
    """Return what runs here, for people."""
    name = torch.cuda.get_device_name() if device.kind == "cuda" else f"CPU, {torch.get_num_threads()} thread(s) a rank"
    tokens = recipe.samples_per_step(place.world_size) * recipe.data.sequence_length
    return "\n".join(
        [
            f"recipe   {recipe.name}: {recipe.description}",
            f"model    {recipe.model.family}, {count_parameters(engine.module):,} parameters, {precision}",
            f"ranks    {place.world_size} x {name}, {dist.get_backend()}, ZeRO stage {engine.zero_optimization_stage()}",
            f"step     {tokens:,} tokens = {recipe.micro_batch} sequences x {recipe.data.sequence_length} "
            f"x {recipe.gradient_accumulation} accumulated x {place.world_size} ranks; {recipe.steps} steps",
            f"data     {prepared.tokens:,} tokens, sha256 {prepared.sha256[:12]}, {prepared.folder}",
            f"software torch {torch.__version__}, deepspeed {deepspeed.__version__}",
        ]
    )


def train(
    recipe: Recipe,
    engine: Any,
    run: Path,
    prepared: Prepared,
    place: Place,
    device: Device,
    start: checkpoint.Saved | None,
    heartbeat: Heartbeat,
) -> None:
    """Run the steps after `start` up to the recipe's last one, saving as the recipe says."""
    first = 1
    if start:
        loaded, _ = engine.load_checkpoint(str(start.folder), tag=checkpoint.STATE, load_lr_scheduler_states=False)
        if loaded is None:  # DeepSpeed only warns, and would go on from random weights
            raise Stop(
                start.folder, "DeepSpeed does not load it", "a checkpoint of this DeepSpeed", "see the lines above", FAILED
            )
        first = start.step + 1
    metrics = Metrics(run, resumed_at=first - 1) if place.rank == 0 else None
    samples = Samples(prepared, recipe.data.sequence_length, recipe.seed)
    tokens_per_step = recipe.samples_per_step(place.world_size) * recipe.data.sequence_length
    manifest = {
        "world_size": place.world_size,
        "data_sha256": prepared.sha256,
        "recipe": recipe.model_dump(mode="json"),
        "software": {"torch": str(torch.__version__), "deepspeed": deepspeed.__version__},
    }
    heartbeat.beat("train", first - 1)
    for step in range(first, recipe.steps + 1):
        began_s = time.perf_counter()
        torch.manual_seed(recipe.seed + step * place.world_size + place.rank)  # dropout and the like: no state to save
        rate = recipe.learning_rate(step)
        for group in engine.optimizer.param_groups:
            group["lr"] = rate
        loss, data_time_s = optimizer_step(engine, samples, recipe, place, device, step)
        norm = float(engine.get_global_grad_norm() or 0.0)
        require_finite(step, rate, loss=loss, **({} if engine.fp16_enabled() else {"gradient norm": norm}))
        step_time_s = time.perf_counter() - began_s
        if metrics:
            memory_gib = memory_peak_gib(device)
            metrics.write(metrics_line(step, tokens_per_step, loss, norm, rate, step_time_s, data_time_s, memory_gib))
            print(
                f"step {step}/{recipe.steps} loss {loss:.6f} grad_norm {norm:.3f} lr {rate:.2e} "
                f"{step_time_s:.3f} s {tokens_per_step / step_time_s:,.0f} tokens/s",
                flush=True,
            )
        heartbeat.beat("train", step)
        if step % recipe.checkpoint.every_steps == 0 or step == recipe.steps:
            heartbeat.beat("checkpoint", step)
            checkpoint.save(
                run / "checkpoints",
                step,
                write_state=lambda folder: engine.save_checkpoint(str(folder), tag=checkpoint.STATE, save_latest=False),
                barrier=dist.barrier,
                rank=place.rank,
                manifest=manifest,
                keep=recipe.checkpoint.keep,
            )
            heartbeat.beat("train", step)
    heartbeat.beat("done")


def optimizer_step(engine: Any, samples: Samples, recipe: Recipe, place: Place, device: Device, step: int) -> tuple[float, float]:
    """Run one optimizer step; return the mean loss over its micro-steps on all ranks, and the seconds spent on data."""
    loss_sum = torch.zeros((), device=device.name)
    data_time_s = 0.0
    for micro_step in range(recipe.gradient_accumulation):
        began_s = time.perf_counter()
        position = first_position(recipe, step, micro_step, place.rank, place.world_size)
        tokens = samples.batch(position, recipe.micro_batch).to(device.name)
        data_time_s += time.perf_counter() - began_s
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        loss_sum += loss.detach().float()
    dist.all_reduce(loss_sum)
    return loss_sum.item() / (recipe.gradient_accumulation * place.world_size), data_time_s


def require_finite(step: int, learning_rate: float, **values: float) -> None:
    """Raise Stop when one of `values` is not a number any more: going on would only spoil the checkpoints.

    Under fp16 an infinite gradient norm is normal: DeepSpeed skips that step and scales down.
    """
    for name, value in values.items():
        if not math.isfinite(value):
            observed = f"{name} is {value} at learning rate {learning_rate:.2e}"
            remedy = "lower optimizer.lr or lengthen schedule.warmup_steps; the last complete checkpoint is kept"
            raise Stop(f"step {step}", observed, "a finite number", remedy, FAILED)


def leave_ranks(device: Device) -> None:
    """Return when this process may end without hurting the others.

    gloo: nothing is in flight after the last barrier. NCCL: its proxy threads may still be sending what the last kernel
    handed them, so the group is destroyed in order; a peer that died meanwhile cannot hold us longer than LEAVE_S.
    """
    if device.kind == "cuda":
        torch.cuda.synchronize()
        leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
        leaving.start()
        leaving.join(LEAVE_S)


def _collective_device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"
