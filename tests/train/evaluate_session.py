"""Started by torchrun on some ranks: the held-out loss by all of them, and by each alone. Prints both from rank 0 as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from train import feed  # noqa: E402
from train.device import choose_device  # noqa: E402
from train.evaluate import held_out_loss  # noqa: E402
from train.model import Chosen, build_model  # noqa: E402
from train.recipe import read_recipe  # noqa: E402


def main() -> None:
    recipe, device = read_recipe(Path(sys.argv[1])), choose_device(0)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.barrier()
    found = feed.find_data(recipe.data, recipe.model, Path(sys.argv[2]), prepares=rank == 0, timeout_s=60)
    if not rank:
        dist.barrier()
    model = build_model(recipe, None, device, "fp32", kernels=Chosen("sdpa", liger=False, compile=False), sharded=False)
    told = []
    beats = 0

    def alive() -> None:
        nonlocal beats
        beats += 1

    for sequences, group in ((7, 2), (7, 1), (1, 4)):
        samples = feed.samples_of(found, recipe.data, recipe.seed)
        together = held_out_loss(model, samples, sequences, group, device, rank, ranks, alive)
        alone = held_out_loss(model, samples, sequences, group, device)
        losses = []
        for position in range(sequences):
            batch = samples.batch(position, 1)
            with torch.no_grad():
                losses.append(float(model(**batch, num_items_in_batch=1).loss) / (batch["input_ids"].shape[1] - 1))
        told.append([together["eval_loss"], alone["eval_loss"], sum(losses) / len(losses), together["eval_perplexity"]])
    everyones: list[object] = [None] * ranks
    dist.all_gather_object(everyones, [row[0] for row in told])
    if rank == 0:
        print("TOLD", json.dumps({"told": told, "everyones": everyones, "beats": beats, "training": model.training}), flush=True)
    dist.barrier()
    os._exit(0)  # as train/ ends: threads of gloo may still be there


main()
