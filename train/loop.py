"""The training loop: a DeepSpeed ZeRO engine, optimizer steps, metrics and checkpoints."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.comm import comm
from pydantic import ValidationError

from train import checkpoint
from train.anomalies import LossWatch, find_culprit
from train.batch import find_micro_batch
from train.board import Boards
from train.copies import Copies
from train.data import first_position, prefetch
from train.device import Device, choose_precision, memory_peaks_gib
from train.errors import FAILED, Stop, counted
from train.evaluate import held_out_loss
from train.feed import Found, samples_of, told_of
from train.flops import least_step_s
from train.loss import count_targets
from train.metrics import Heartbeat, Metrics, metrics_line
from train.model import build_model, build_optimizer, choose_kernels, count_parameters, drawn_on
from train.power import PowerMeter
from train.profiling import Tracer
from train.recipe import AUTO, Recipe, zero_of
from train.state import state_bytes, write_state
from train.timing import StepTimes
from train.universal import divided_anew
from train.weights import Weights

__all__ = ["Place", "all_ranks", "build_engine", "choose_precision", "describe", "join_ranks", "leave_ranks", "train"]

COPY_POLL_S = 0.5
"""How often the end of the last copy is looked for."""
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


def all_ranks(place: Place) -> checkpoint.Ranks:
    """Return all ranks, for checkpoints."""

    def gather(value: Any) -> list[Any]:
        everyones: list[Any] = [None] * place.world_size
        dist.all_gather_object(everyones, value)
        return everyones

    return checkpoint.Ranks(place.rank, place.world_size, gather)


def build_engine(
    recipe: Recipe, config: dict[str, Any], weights: Weights | None, place: Place, device: Device, precision: str
) -> tuple[Any, Recipe]:
    """Return a DeepSpeed engine for the recipe's model, and the recipe with the micro-batch settled.

    Raises Stop when DeepSpeed gave us anything else than asked for.
    """
    zero = zero_of(config)
    stage = zero.get("stage", 0)
    kernels = choose_kernels(recipe.kernels, device, precision, recipe.model.family)
    for notice in kernels.notices if place.rank == 0 else ():
        print(f"notice   {notice}", flush=True)
    model = build_model(recipe, weights, device, precision, kernels=kernels, sharded=stage == 3)
    optimizer = build_optimizer(model, recipe)
    if recipe.micro_batch == AUTO:
        found = find_micro_batch(recipe, model, count_parameters(model)[1], config, device, precision)
        recipe = recipe.divided(place.world_size, found)
        config = {
            **config,
            "train_micro_batch_size_per_gpu": recipe.micro_batch,
            "gradient_accumulation_steps": recipe.gradient_accumulation,
        }
    try:
        if stage == 3:  # one tensor after the other: the whole model need not fit on a GPU
            deepspeed.zero.Init(module=model, config_dict_or_path=config)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    except ValidationError as error:
        mistakes = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        raise Stop(recipe.ds_config, " | ".join(mistakes), "what DeepSpeed accepts", "correct the file") from None
    wanted = (stage, place.world_size)
    found_engine = (engine.zero_optimization_stage(), dist.get_world_size())
    if not isinstance(engine, deepspeed.DeepSpeedEngine) or found_engine != wanted:
        observed = f"{type(engine).__name__}, ZeRO stage {found_engine[0]}, world size {found_engine[1]}"
        expected = f"DeepSpeedEngine, ZeRO stage {wanted[0]}, world size {wanted[1]}"
        raise Stop("deepspeed.initialize", observed, expected, "report this with the versions above", FAILED)
    if stage == 0:
        engine.basic_optimizer.state.clear()  # in 16 bits DeepSpeed has taken a step with gradients of zero
    if stage == 0 and precision == "fp32":
        _tell_grad_norm(engine, recipe.gradient_clipping)
    return engine, recipe


def _tell_grad_norm(engine: Any, clipping: float) -> None:
    """Make an engine of neither ZeRO nor 16 bits tell its gradient norm: DeepSpeed clips there, and forgets it."""

    def clip() -> None:
        norm = torch.nn.utils.clip_grad_norm_(engine.module.parameters(), engine.gradient_clipping())
        engine.optimizer._global_grad_norm = norm

    engine.gradient_clipping = lambda: clipping or math.inf
    engine.clip_fp32_gradients = clip


def describe(recipe: Recipe, engine: Any, place: Place, device: Device, precision: str, prepared: Found) -> str:
    """Return what runs here, for people."""
    name = torch.cuda.get_device_name() if device.kind == "cuda" else f"CPU, {torch.get_num_threads()} thread(s) a rank"
    units = recipe.samples_per_step(place.world_size) * recipe.units_per_sample
    many, length = recipe.micro_batch, recipe.data.sequence_length
    each = f"{many} images" if recipe.unit == "images" else f"{many} sequences x {length}"
    parameters, trainable = count_parameters(engine.module)
    method = "" if trainable == parameters else f", {recipe.method} trains {trainable:,} of them"
    return "\n".join(
        [
            f"recipe   {recipe.name}: {recipe.description}",
            f"model    {recipe.model.family}, {parameters:,} parameters, {precision}{method}",
            f"ranks    {place.world_size} x {name}, {dist.get_backend()}, ZeRO stage {engine.zero_optimization_stage()}",
            f"step     {units:,} {recipe.unit} = {each} x {recipe.gradient_accumulation} accumulated x "
            f"{counted(place.world_size, 'rank')}; {counted(recipe.steps, 'step')}",
            f"lr       {recipe.told_rate(place.world_size)}",
            f"data     {prepared}",
            f"software torch {torch.__version__}, deepspeed {deepspeed.__version__}",
        ]
    )


def train(
    recipe: Recipe,
    engine: Any,
    run: Path,
    prepared: Found,
    place: Place,
    device: Device,
    start: checkpoint.Saved | None,
    heartbeat: Heartbeat,
    held_out: Found | None = None,
    *,
    profiled: bool = False,
) -> None:
    """Run the steps after `start` up to the recipe's last one, saving and evaluating as the recipe says."""
    first, ranks = 1, all_ranks(place)
    base = drawn_on(recipe, device, sharded=engine.zero_optimization_stage() == 3)
    precision = "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32"
    if start:
        checkpoint.require_same_state(start, engine.zero_optimization_stage(), precision)
        checkpoint.require_same_base(start, base)
        same = start.manifest["world_size"] == place.world_size
        with contextlib.nullcontext() if same else divided_anew(engine, start, ranks):
            loaded, _ = engine.load_checkpoint(
                str(start.folder),
                tag=checkpoint.STATE,
                load_lr_scheduler_states=False,
                custom_load_fn=None if recipe.method == "full" else partial(load_adapters, start.folder),
            )
        if loaded is None:  # DeepSpeed only warns, and would go on from random weights
            raise Stop(
                start.folder, "DeepSpeed does not load it", "a checkpoint of this DeepSpeed", "see the lines above", FAILED
            )
        first = start.step + 1
    metrics = Metrics(run, resumed_at=first - 1) if place.rank == 0 else None
    boards = Boards(run, recipe, resumed_at=first - 1) if metrics else None
    tracer = Tracer(run, place.rank, gpu=device.kind == "cuda") if profiled and place.local_rank == 0 else None
    samples = samples_of(prepared, recipe.data, recipe.seed)
    evaluated = samples_of(held_out, recipe.eval.data, recipe.seed, augment=False) if held_out and recipe.eval.data else None
    global_batch = recipe.samples_per_step(place.world_size)
    checkpoint_bytes = state_bytes(engine, recipe.optimizer.name, all_weights=recipe.method == "full")
    if place.rank == 0:
        notice = checkpoint.no_room(run / "checkpoints", checkpoint_bytes)
        lines = [*told_of(samples, recipe.steps, global_batch), *([f"notice   {notice}"] if notice else [])]
        print("\n".join(lines), flush=True)
    units_per_step = global_batch * recipe.units_per_sample
    watch = LossWatch(recipe.loss_spike)
    copies = Copies(recipe.checkpoint, run.name) if metrics and recipe.checkpoint.copy_to else None
    if copies and start:
        copies.offer(start.folder)
    manifest = {
        "world_size": place.world_size,
        "first_world_size": checkpoint.first_world_size(start) if start else place.world_size,
        "data_sha256": prepared.sha256,
        "recipe": recipe.model_dump(mode="json"),
        "zero_stage": engine.zero_optimization_stage(),
        "precision": precision,
        "drawn_on": base,
        "software": {"torch": str(torch.__version__), "deepspeed": deepspeed.__version__},
    }
    positions = (
        (first_position(recipe, step, micro_step, place.rank, place.world_size), recipe.micro_batch)
        for step in range(first, recipe.steps + 1)
        for micro_step in range(recipe.gradient_accumulation)
    )
    batches = prefetch(samples, positions, pin=device.kind == "cuda", ahead=recipe.gradient_accumulation)
    times, meter = StepTimes(device), PowerMeter(device)
    times.watch(comm.cdb)
    least_s = least_step_s(engine.module, recipe, device, precision, place.world_size)
    heartbeat.beat("train", first - 1)
    for step in range(first, recipe.steps + 1):
        if tracer:
            tracer.begin_step()
        began_s = time.perf_counter()
        times.begin("data")
        torch.manual_seed(recipe.seed + step * place.world_size + place.rank)  # dropout and the like: no state to save
        rate = recipe.learning_rate(step, global_batch)
        for group in engine.optimizer.param_groups:
            group["lr"] = rate
        loss, micro_losses, power_w = optimizer_step(engine, batches, recipe, place, device, times, meter.watts())
        norm = float(engine.get_global_grad_norm() or 0.0)
        complaint = watch.complaint(loss, None if engine.fp16_enabled() else norm)
        if complaint:
            apart = samples_of(prepared, recipe.data, recipe.seed)  # the other one works ahead, in its thread
            observed = f"{complaint} at learning rate {rate:.2e}; {find_culprit(micro_losses, apart, recipe, step)}"
            remedy = "look at these sequences, lower optimizer.lr or lengthen schedule.warmup_steps; the last checkpoint is kept"
            raise Stop(f"step {step}", observed, "a finite loss that does not jump", remedy, FAILED)
        times_s, step_time_s = times.split(), time.perf_counter() - began_s
        if tracer:
            tracer.end_step(last=step == recipe.steps)
        told: dict[str, float] = {}
        if evaluated and recipe.eval.every_steps and (step % recipe.eval.every_steps == 0 or step == recipe.steps):
            told = held_out_loss(
                engine,
                evaluated,
                recipe.eval.sequences,
                recipe.micro_batch,
                device,
                place.rank,
                place.world_size,
                partial(heartbeat.beat, "eval", step),
            )
        if metrics and boards:
            mfu = least_s / step_time_s if least_s else None
            line = metrics_line(
                step, recipe.unit, units_per_step, loss, norm, rate, step_time_s, times_s, memory_peaks_gib(device), mfu, power_w
            )
            line |= told
            metrics.write({**line, **(copies.status if copies else {})})
            boards.write(line)
            held = f" eval_loss {told['eval_loss']:.6f}" if told else ""
            print(
                f"step {step}/{recipe.steps} loss {loss:.6f} grad_norm {norm:.3f} lr {rate:.2e} "
                f"{step_time_s:.3f} s {units_per_step / step_time_s:,.0f} {recipe.unit}/s{held}",
                flush=True,
            )
        heartbeat.beat("train", step)
        if step % recipe.checkpoint.every_steps == 0 or step == recipe.steps:
            heartbeat.beat("checkpoint", step)
            saved = checkpoint.save(
                run / "checkpoints",
                step,
                lambda folder: write_state(engine, folder, checkpoint.STATE, all_weights=recipe.method == "full"),
                ranks,
                manifest,
                recipe.checkpoint,
                needed_bytes=checkpoint_bytes,
                in_use=copies.in_use() if copies else (),
            )
            if copies:
                copies.offer(saved)
            heartbeat.beat("train", step)
        if copies:
            copies.poll()
    while ranks.gather(copies.poll() if copies else False)[0]:  # all stay until the last copy is there, or given up
        heartbeat.beat("checkpoint")
        time.sleep(COPY_POLL_S)
    if copies:
        checkpoint.rotate(run / "checkpoints", recipe.steps, recipe.checkpoint)  # what was kept for them
    if boards:
        boards.close()
    heartbeat.beat("done")


def load_adapters(folder: Path, src: dict[str, Any], dst: torch.nn.Module) -> None:
    """Load what trains from a checkpoint that holds nothing else. Raises Stop when something is missing or not known."""
    told = dst.load_state_dict(src, strict=False)
    trains = {name for name, parameter in dst.named_parameters() if parameter.requires_grad}
    wrong = sorted(trains.intersection(told.missing_keys)) + told.unexpected_keys
    if wrong:
        observed, expected = f"{len(wrong)} tensors are missing or not known: {', '.join(wrong[:3])}", "this recipe's adapters"
        remedy = "restore method and lora in the recipe, or begin a new run: r4090c launch without --resume"
        raise Stop(folder, observed, expected, remedy, FAILED)


def optimizer_step(
    engine: Any,
    batches: Iterator[dict[str, torch.Tensor]],
    recipe: Recipe,
    place: Place,
    device: Device,
    times: StepTimes,
    power_w: float,
) -> tuple[float, torch.Tensor, float]:
    """Run one optimizer step; return its loss over all ranks, this rank's by micro-step, and the `power_w` of all ranks together.

    The loss is the mean over all tokens of the step that count, however they are spread over micro-steps and ranks. DeepSpeed
    averages over both, so each micro-batch divides by an equal share of those tokens.
    """
    step = [next(batches) for _ in range(recipe.gradient_accumulation)]
    targets = torch.tensor(sum(count_targets(batch["labels"]) for batch in step), device=device.name)
    with times.communicating():
        dist.all_reduce(targets)
    share = max(1, targets.item()) / (recipe.gradient_accumulation * place.world_size)
    losses = []
    for batch in step:
        times.begin("forward")
        on_device = {name: tensor.to(device.name, non_blocking=True) for name, tensor in batch.items()}
        loss = engine(**on_device, num_items_in_batch=share).loss
        times.begin("backward")
        engine.backward(loss)
        times.begin("optimizer")
        engine.step()
        losses.append(loss.detach().float())
    told = torch.stack([sum(losses, torch.zeros((), device=device.name)), torch.tensor(power_w, device=device.name)])
    with times.communicating():
        dist.all_reduce(told)
    total, all_power_w = told.tolist()
    return total / (recipe.gradient_accumulation * place.world_size), torch.stack(losses), all_power_w


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
