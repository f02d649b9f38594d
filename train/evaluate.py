"""The loss on held-out data: while a run trains, and of a run's checkpoint: `evaluate.py RUN --data-dir FOLDER`.

The held-out sequences are cut into micro-batches, which the ranks share. Each has its own place in a list that is summed in
order, so any number of ranks gives the same loss, to the last digit where they all compute alike.

As a program it is one process on one GPU (or the CPU). Exit codes as train/main.py.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # was train/: its data.py would hide other packages' modules

from train import feed
from train.checkpoint import require_same_base
from train.data import folder_name
from train.edge import leave_with
from train.errors import FAILED, Stop
from train.export import choose, recipe_of, trained_weights
from train.recipe import Data, Recipe
from train.weights import Weights, find_weights

if TYPE_CHECKING:
    from train.device import Device

LARGEST_EXPONENT = 700.0
"""math.exp of more is no float."""


def held_out_loss(
    model: Any,
    samples: feed.Samples,
    sequences: int,
    group: int,
    device: Device,
    rank: int = 0,
    world_size: int = 1,
    alive: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Return eval_loss, eval_perplexity (of text) and eval_time_s over the first `sequences` samples, 0 = all; on every rank.

    `group` samples at once. `alive` is called after each.
    """
    import torch
    import torch.distributed as dist

    from train.loss import count_targets

    began_s = time.perf_counter()
    if world_size > 1:
        for buffer in model.buffers():  # a ResNet's running means: each rank has its own, and rank 0's are those that are saved
            dist.broadcast(buffer, 0)
    count = min(sequences or samples.count, samples.count)
    groups = math.ceil(count / group)
    sums = torch.zeros(groups, 2, dtype=torch.float64, device=device.name)
    model.eval()
    try:
        with torch.no_grad():
            for turn in range(math.ceil(groups / world_size)):
                mine = turn * world_size + rank
                first = min(mine, groups - 1) * group  # too few for all: under ZeRO-3 every rank has to take part
                batch = samples.batch(first, min(group, count - first))
                on_device = {name: tensor.to(device.name, non_blocking=True) for name, tensor in batch.items()}
                loss = model(**on_device, num_items_in_batch=1).loss
                if mine < groups:
                    sums[mine, 0], sums[mine, 1] = loss.double(), count_targets(batch["labels"])
                alive()
    finally:
        model.train()
    if world_size > 1:
        dist.all_reduce(sums)
    total, targets = (math.fsum(column) for column in sums.T.tolist())
    loss = total / max(1.0, targets)
    told = {"eval_loss": loss}
    if "input_ids" in batch:
        told["eval_perplexity"] = math.exp(min(loss, LARGEST_EXPONENT))
    return {**told, "eval_time_s": round(time.perf_counter() - began_s, 6)}


def main() -> NoReturn:
    """Evaluate one checkpoint, tell what came of it, and leave at once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument("--data-dir", type=Path, required=True, metavar="FOLDER", help="where the data is")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint after this step [the newest]")
    parser.add_argument("--data", metavar="PATH", help="a folder of `r4090c data prepare`, or of images [eval.data]")
    parser.add_argument("--sequences", type=int, metavar="N", help="so many of it, 0 = all [eval.sequences]")
    parser.add_argument("--json", action="store_true", help="tell what is done in lines of JSON")
    arguments = parser.parse_args()

    def say(text: str) -> None:
        print(json.dumps({"doing": text}) if arguments.json else f"evaluate {text}", flush=True)

    def work() -> None:
        told = evaluate(arguments.run, arguments.data_dir, arguments.step, arguments.data, arguments.sequences, say)
        perplexity = f", perplexity {told['eval_perplexity']:.3f}" if "eval_perplexity" in told else ""
        words = f"evaluate step {told['step']}: loss {told['eval_loss']:.6f}{perplexity} over {told['samples']:,} samples"
        print(json.dumps({"result": told}) if arguments.json else words, flush=True)

    leave_with(work, arguments.run, as_json=arguments.json)


def evaluate(
    run: Path, data_dir: Path, step: int | None, path: str | None, sequences: int | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return the step, what was evaluated, and its figures. Raises Stop."""
    saved = choose(run / "checkpoints", step, say)
    recipe = recipe_of(saved)
    wanted = held_out_data(recipe, path)
    named = "eval.data.path in the run's recipe, or give --data" if path is None else f"--data {path}"
    found = feed.find_data(wanted, recipe.model, data_dir, prepares=True, timeout_s=0, named=named)
    weights = find_weights(recipe.model, data_dir.parent / "models")
    notice = tokenizers_differ(found, recipe, weights, data_dir)
    if notice:
        say(f"notice: {notice}")
    say("importing torch, transformers")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # on a CPU: the same sums as in the training

    from train.device import choose_device, choose_precision
    from train.model import build_model, choose_kernels, drawn_on

    device = choose_device(0)
    require_same_base(saved, drawn_on(recipe, device))
    precision = choose_precision(recipe.precision, device)
    wanted_kernels = recipe.kernels.model_copy(update={"compile": False})
    kernels = choose_kernels(wanted_kernels, device, precision, recipe.model.family)
    model: Any = build_model(recipe, weights, device, precision, kernels=kernels, sharded=False)
    loaded = model.load_state_dict(trained_weights(saved, recipe), strict=False)
    trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    wrong = sorted(trains.intersection(loaded.missing_keys)) + list(loaded.unexpected_keys)
    if wrong:
        observed = f"{len(wrong)} tensors are missing or not known: {', '.join(wrong[:3])}"
        raise Stop(
            saved.folder, observed, "the weights of the run's recipe", "evaluate it with the version that trained it", FAILED
        )
    samples = feed.samples_of(found, wanted, recipe.seed, augment=False)
    many = recipe.eval.sequences if sequences is None else sequences
    counted = min(many or samples.count, samples.count)
    say(f"{counted:,} samples of {found}")
    figures = held_out_loss(model, samples, many, recipe.micro_batch, device)
    if not math.isfinite(figures["eval_loss"]):
        remedy = "evaluate an earlier checkpoint with --step, or look at the data"
        raise Stop(saved.folder, f"its loss is {figures['eval_loss']}", "a finite one", remedy, FAILED)
    told = {"run": run.name, "step": saved.step, "samples": counted, "data": str(found), **figures}
    return {**told, "notice": notice} if notice else told


def tokenizers_differ(found: feed.Found, recipe: Recipe, weights: Weights | None, data_dir: Path) -> str:
    """Return a notice when nothing tells whether the data `found` is of the model's tokenizer, else "".

    Raises Stop when it is not. It is compared with the one beside the weights, and with the data's that the run was trained on.
    """
    beside = feed.require_same_tokenizer(found, weights)
    trained_on = feed.require_tokenizer_of_training(found, data_dir / (recipe.data.path or folder_name(recipe.data)))
    compared = not trained_on or (weights is not None and not beside)
    return "" if compared else "; ".join(filter(None, (beside, trained_on)))


def held_out_data(recipe: Recipe, path: str | None) -> Data:
    """Return the data to evaluate on. Raises Stop when neither the recipe nor `path` says."""
    if path is None:
        if recipe.eval.data is None:
            expected = "a folder of `r4090c data prepare`" if recipe.unit == "tokens" else "a folder of images"
            raise Stop("recipe eval.data", "the recipe has none", expected, "name one with --data PATH")
        return recipe.eval.data
    if recipe.unit == "images":
        return Data(kind="images", path=path, image_size=recipe.data.image_size)
    return Data(kind="prepared", path=path, sequence_length=recipe.data.sequence_length)


if __name__ == "__main__":
    main()
