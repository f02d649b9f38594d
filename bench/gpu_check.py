"""What one GPU does with our training: MFU, and step time and peak memory as predicted and as measured, in a table of Markdown.

    bench/gpu_check.sh              # some minutes on one GPU, at most 8; exit 3 where there is none
    bench/gpu_check.sh --dry-run    # the same path at toy size on a CPU: it says nothing about speed

Each case is a process of its own and trains a shipped recipe's shape from random weights, through the engine and the step of
train/loop.py, on bytes of Python sources; nothing is saved. The micro-batch is the recipe's, or the largest that should fit.
Predictions are `r4090c plan`'s (launch/memory.py, launch/perf.py). Peak memory is the training's, with CUDA's context and
without what building the model took.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CASE_S, ALL_S = 100.0, 450.0
"""est.: seconds of a case (15 to start, 10 to build 7B, steps of at most 7) and of all of them, to stay below 8 minutes."""
STEPS, WARM_UP = 7, 3
NO_GPU = 3
GIB = 2**30
COPY_BYTES = 1 << 30
TOY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
TOY_LENGTH = 64
DOCUMENTS = 4


@dataclass(frozen=True)
class Case:
    """A recipe, and what is changed in it."""

    name: str
    recipe: str
    sets: tuple[str, ...] = ()
    most: int = 8
    """The micro-batch at most."""
    smaller: tuple[str, ...] = ()
    """What is changed as well where not even one sequence should fit."""
    packed: bool = False
    """Each row is DOCUMENTS documents, and the case fails where one of them sees another."""


CASES = (
    Case("llama1b-pretrain", "llama1b-pretrain", smaller=("optimizer.name=adamw8bit",)),
    Case("llama7b-lora", "llama7b", most=4),
    Case("llama7b-qlora", "llama7b", ("method=qlora",), most=4),
    Case("llama1b-lora-flash", "llama1b-pretrain", ("method=lora", "kernels.attention=auto"), most=4, packed=True),
    Case("llama1b-lora-eager", "llama1b-pretrain", ("method=lora", "kernels.attention=eager"), most=4, packed=True),
)
"""The last two differ in attention alone; with adapters, as eager attention needs the room that Adam's moments would take."""


def recipe_of(case: Case, *, toy: bool) -> dict[str, Any]:
    """Return the recipe of a case, with random weights, without accumulation."""
    from launch.recipe import load_recipe

    recipe = copy.deepcopy(load_recipe(case.recipe, case.sets))
    length = TOY_LENGTH if toy else recipe["data"]["sequence_length"]
    sources = ["{stdlib}/*.py", "{stdlib}/*/*.py"]
    recipe["data"] = {"kind": "text", "sources": sources, "sequence_length": length, "max_mib": 1 if toy else 16}
    recipe["model"]["weights"] = None
    recipe |= {
        "micro_batch": min(case.most, recipe["micro_batch"]),
        "gradient_accumulation": 1,
        "global_batch": 0,
        "steps": STEPS,
    }
    recipe |= {"resume": False, "eval": {"every_steps": 0, "sequences": 1, "data": None}}
    if toy:
        recipe["model"]["config"] |= TOY
        recipe["micro_batch"] = 2
    return recipe


# ---- the parent: predicts, starts a process for each case, and prints the table


def predicted(recipe: dict[str, Any], card: dict[str, Any] | None) -> dict[str, Any]:
    """Return peak_gib, step_s, mfu and micro_batch (the recipe's, or less where that should not fit); empty without a planner."""
    try:
        memory, perf, site = (importlib.import_module(f"launch.{name}") for name in ("memory", "perf", "site"))
    except ImportError:
        return {}
    from launch.recipe import load_ds_config
    from launch.training import training_of

    training = training_of(recipe, load_ds_config(recipe), on_gpu=card is not None)
    told: dict[str, Any] = {"micro_batch": training.micro_batch}
    if card is not None:
        here = replace(site.assume("1x1x4090"), card=card_of(site, card), name=card["name"])
        largest = memory.largest_micro_batch(training, here)
        told["fits"] = largest is not None
        told["micro_batch"] = min(training.micro_batch, largest or 1)
        training = replace(training, micro_batch=told["micro_batch"])
        speed = perf.predict(training, here)
        told |= {"step_s": speed.step_s, "mfu": speed.mfu}
    found = memory.memory_of(training, 1, 1, on_gpu=card is not None)
    return {**told, "peak_gib": found.total_gib, "parts_gib": {part: round(gib, 2) for part, gib in found.per_gpu_gib.items()}}


def card_of(site: Any, card: dict[str, Any]) -> Any:
    """Return the planner's card, with this one's memory; of a card that it does not know the bandwidth that was measured."""
    from train.flops import peak_flop_per_s

    name = card["name"].removeprefix("NVIDIA ").removeprefix("GeForce ")
    known = next((one for one in site.CARDS.values() if one.name == name), None)
    if known is not None:
        return replace(known, memory_gib=card["memory_gib"])
    peak = peak_flop_per_s(card["name"], "bf16")
    return site.Card(card["name"], card["memory_gib"], peak / 1e12 if peak else None, None, card["copy_gbyte_s"])


def run_child(words: list[str], limit_s: float, *, cpu: bool) -> dict[str, Any]:
    """Return what a process of this program printed last, as JSON, or {"error": …}."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    if cpu:
        environment |= {"R4090C_DEVICE": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "bench.gpu_check", *words]
    try:
        ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {limit_s:.0f} s"}
    last = (ran.stdout.strip().splitlines() or [""])[-1]
    if ran.returncode == 0 and last.startswith("{"):
        return dict(json.loads(last))
    return {"error": ((ran.stderr or ran.stdout).strip().splitlines() or [f"ended with {ran.returncode}"])[-1][:200]}


def row(case: Case, wish: dict[str, Any], found: dict[str, Any]) -> str:
    """Return a line of the table."""
    if "error" in found:
        return f"| {case.name} | {found['error'].replace('|', '/')} |" + " |" * (len(COLUMNS) - 2)
    step_s, peak_gib = found["step_s"], found["peak_gib"]
    cells = [
        case.name,
        found["attention"],
        f"{found['micro_batch']} × {found['sequence_length']}",
        f"{step_s:.3f}",
        against(wish.get("step_s"), step_s, "{:.3f}"),
        f"{found['tokens_per_s']:,.0f}",
        "–" if found["mfu"] is None else f"{found['mfu']:.1%}",
        f"{peak_gib:.2f}",
        against(wish.get("peak_gib"), peak_gib, "{:.2f}"),
        f"{found['allocated_gib']:.2f}" if found["allocated_gib"] else "–",
        " / ".join(f"{found['times_s'][part] / step_s:.0%}" for part in ("forward", "backward", "comm", "optimizer")),
        "–" if found["power_w"] is None else f"{found['power_w']:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


COLUMNS = (
    *("case", "attention", "micro-batch × tokens", "step s", "predicted", "tokens/s", "MFU", "peak GiB", "predicted"),
    *("of tensors", "forward / backward / communication / optimizer", "W"),
)


def against(wish: float | None, found: float, form: str) -> str:
    """Return a prediction, and by how much it is too high (+) or too low."""
    return "–" if wish is None else f"{form.format(wish)} ({wish / found - 1:+.0%})"


def main() -> int:
    """Run the cases and print the table; 0 when all ran, 1 when one did not, 3 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="toy size on the CPU, to prove the path")
    parser.add_argument("--cases", default=",".join(case.name for case in CASES), help="only these, with commas between")
    parser.add_argument("--describe", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--case", metavar="FILE", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.describe or arguments.case:
        print(json.dumps(describe() if arguments.describe else measure(json.loads(arguments.case.read_text()))), flush=True)
        return 0
    began_s = time.monotonic()
    toy = arguments.dry_run
    machine = run_child(["--describe"], CASE_S, cpu=toy)
    if "error" in machine:
        print(f"gpu_check: {sys.executable}: {machine['error']}; expected torch, deepspeed and transformers", file=sys.stderr)
        return NO_GPU
    card = machine["card"]
    if card is None and not toy:
        print("gpu_check: no CUDA device; --dry-run proves the path on a CPU", file=sys.stderr)
        return NO_GPU
    print(f"### {card['name'] if card else f'{platform.machine()} CPU, toy size: proves the path, says nothing about speed'}\n")
    print(f"{machine['software']}; {time.strftime('%Y-%m-%d', time.gmtime())}; step: median of {STEPS - WARM_UP} after {WARM_UP}")
    if card:
        print(f"{card['memory_gib']:.2f} GiB, device-to-device copy {card['copy_gbyte_s']:,.0f} GB/s, driver {card['driver']}")
    print(f"\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    failed, notes = False, list[str]()
    for case in (case for case in CASES if case.name in arguments.cases.split(",")):
        recipe = recipe_of(case, toy=toy)
        wish = predicted(recipe, card)
        if wish.get("fits") is False and case.smaller:
            notes.append(f"{case.name}: should not fit, so with {' '.join(case.smaller)}")
            recipe = recipe_of(replace(case, sets=(*case.sets, *case.smaller)), toy=toy)
            wish = predicted(recipe, card)
        recipe["micro_batch"] = wish.get("micro_batch", recipe["micro_batch"])
        if recipe["kernels"]["attention"] == "eager":
            wish |= {"step_s": None, "peak_gib": None}  # the planner plans with fused attention
        file = Path(os.environ.get("TMPDIR", "/tmp")) / f"gpu_check_{os.getpid()}.json"
        file.write_text(json.dumps({"recipe": recipe, "packed": case.packed}))
        left_s = ALL_S - (time.monotonic() - began_s)
        found = run_child(["--case", str(file)], min(CASE_S, left_s), cpu=toy) if left_s > 20 else {"error": "no time was left"}
        file.unlink()
        failed |= "error" in found
        print(row(case, wish, found), flush=True)
        if wish.get("fits") is False:
            notes.append(f"{case.name}: should not fit; tried with one sequence all the same")
        if "parts_gib" in wish:
            parts = ", ".join(f"{part} {gib}" for part, gib in wish["parts_gib"].items() if gib)
            notes.append(f"{case.name}: predicted GiB {parts}")
    print("\n" + "\n".join(f"- {note}" for note in notes) if notes else "\nNo predictions: launch/memory.py is not here.")
    return 1 if failed else 0


# ---- the child: one case, or what machine this is


def describe() -> dict[str, Any]:
    """Return the versions, and the GPU with its memory and the bandwidth of a copy, None where there is none."""
    import deepspeed
    import torch
    import transformers

    software = f"torch {torch.__version__}, deepspeed {deepspeed.__version__}, transformers {transformers.__version__}"
    if os.environ.get("R4090C_DEVICE") == "cpu" or not torch.cuda.is_available():
        return {"software": software, "card": None}
    here = torch.cuda.get_device_properties(0)
    one, other = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    for _ in range(3):
        other.copy_(one)
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    for _ in range(10):
        other.copy_(one)
    torch.cuda.synchronize()
    gbyte_s = 2 * 10 * COPY_BYTES / (time.perf_counter() - began_s) / 1e9
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout.split("\n")[0].strip() or "unknown"
    except (OSError, subprocess.TimeoutExpired):
        driver = "unknown"
    card = {"name": here.name, "memory_gib": here.total_memory / GIB, "copy_gbyte_s": gbyte_s, "driver": driver}
    return {"software": software, "card": card}


def measure(wanted: dict[str, Any]) -> dict[str, Any]:
    """Train a few steps and return what they took."""
    from train.main import DS_CONFIGS, import_libraries, place_from_environment
    from train.recipe import Recipe, deepspeed_config

    recipe = Recipe.model_validate(wanted["recipe"])
    rank, local_rank, ranks = place_from_environment()
    loop, device = import_libraries(local_rank)

    import torch
    from deepspeed.comm import comm

    from train import feed
    from train.data import first_position, prefetch
    from train.flops import least_step_s
    from train.model import choose_kernels
    from train.power import PowerMeter
    from train.timing import StepTimes

    precision = loop.choose_precision(recipe.precision, device)
    config = deepspeed_config(recipe, DS_CONFIGS / recipe.ds_config, ranks, precision)
    place = loop.Place(rank, local_rank, ranks)
    loop.join_ranks(device, 60)
    data_dir = Path(os.environ.get("TMPDIR", "/tmp")) / "gpu_check_data"
    found = feed.find_data(recipe.data, recipe.model, data_dir, prepares=True, timeout_s=0)
    engine, recipe = loop.build_engine(recipe, config, None, place, device, precision)
    gpu = device.kind == "cuda"
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    samples = feed.samples_of(found, recipe.data, recipe.seed)
    positions = ((first_position(recipe, step, 0, rank, ranks), recipe.micro_batch) for step in range(1, STEPS + 1))
    batches = map(in_documents if wanted["packed"] else dict, prefetch(samples, positions, pin=gpu))
    times, meter = StepTimes(device), PowerMeter(device)
    times.watch(comm.cdb)
    taken: list[tuple[float, dict[str, float]]] = []
    power_w = math.nan
    for group in engine.optimizer.param_groups:
        group["lr"] = 1e-5
    for _ in range(STEPS):
        began_s = time.perf_counter()
        times.begin("data")
        loss, _, power_w = loop.optimizer_step(engine, batches, recipe, place, device, times, meter.watts())
        parts = times.split()
        taken.append((time.perf_counter() - began_s, parts))
    if not math.isfinite(loss):
        raise SystemExit(f"the loss is {loss}")
    if wanted["packed"] and (seen := what_later_documents_see(engine, in_documents(samples.batch(0, recipe.micro_batch)))):
        raise SystemExit(f"documents of a packed row see each other: another first one changes the loss of the last by {seen}")
    counted = taken[WARM_UP:]
    step_s = median(seconds for seconds, _ in counted)
    units = recipe.micro_batch * recipe.data.sequence_length
    least_s = least_step_s(engine.module, recipe, device, precision, ranks)
    if gpu:
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()
        peak, allocated = torch.cuda.max_memory_reserved() + outside, torch.cuda.max_memory_allocated()
    else:
        peak, allocated = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, 0
    return {
        "attention": choose_kernels(recipe.kernels, device, precision, recipe.model.family).attention,
        "micro_batch": recipe.micro_batch,
        "sequence_length": recipe.data.sequence_length,
        "step_s": step_s,
        "tokens_per_s": units / step_s,
        "mfu": least_s / step_s if least_s else None,
        "peak_gib": peak / GIB,
        "allocated_gib": allocated / GIB,
        "times_s": {part: median(parts[part] for _, parts in counted) for part in counted[0][1] if part != "comm_overlap"},
        "power_w": power_w if math.isfinite(power_w) else None,
        "loss": loss,
    }


def in_documents(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch whose rows are DOCUMENTS documents of one length, as train/data.py packs them."""
    import torch

    from train.data import IGNORED

    ids = batch["input_ids"]
    positions = (torch.arange(ids.shape[1]) % (ids.shape[1] // DOCUMENTS)).repeat(len(ids), 1)
    return {"input_ids": ids, "labels": batch["labels"].masked_fill(positions == 0, IGNORED), "position_ids": positions}


def what_later_documents_see(engine: Any, batch: dict[str, Any]) -> float:
    """Return by how much the summed loss of each row's last document changes with its first one: 0.0 where they are apart."""
    import torch

    from train.data import IGNORED

    length = batch["input_ids"].shape[1] // DOCUMENTS
    batch["labels"][:, : (DOCUMENTS - 1) * length] = IGNORED
    other = batch["input_ids"].clone()
    other[:, :length] = other[:, :length].flip(1)
    losses: list[float] = []
    engine.eval()
    with torch.no_grad():
        for ids in (batch["input_ids"], other):
            given = {name: one.to(engine.device) for name, one in {**batch, "input_ids": ids}.items()}
            losses.append(engine(**given, num_items_in_batch=1).loss.item())
    engine.train()
    return abs(losses[0] - losses[1])


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
