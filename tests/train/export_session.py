"""Trains small models of several methods in one process group and keeps what they answer: `export_session.py CASES FOLDER`.

CASES (JSON) is name -> {"recipe", "tokenizer_in"?}. For each, FOLDER/<name> becomes a run folder with a checkpoint after step 2,
and FOLDER/<name>/logits.pt what the trained model says to the tokens 0 … 31.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed's use

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from train import checkpoint, loop  # noqa: E402
from train.device import choose_device  # noqa: E402
from train.recipe import Recipe, deepspeed_config  # noqa: E402
from train.state import write_state  # noqa: E402
from train.weights import find_weights  # noqa: E402

DS_CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs"


def train(recipe: Recipe, folder: Path, run: Path, place: loop.Place) -> None:
    device = choose_device(place.local_rank)
    recipe = recipe.divided(place.world_size)
    precision = loop.choose_precision(recipe.precision, device)
    config = deepspeed_config(recipe, DS_CONFIGS / recipe.ds_config, place.world_size, precision)
    engine, recipe = loop.build_engine(recipe, config, find_weights(recipe.model, folder / "models"), place, device, precision)
    for step in (1, 2):
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.02
        torch.manual_seed(step * 2 + place.rank)
        for _ in range(recipe.gradient_accumulation):
            tokens = torch.randint(0, 256, (recipe.micro_batch, 32))
            engine.backward(engine(input_ids=tokens, labels=tokens, num_items_in_batch=100).loss)
            engine.step()
    manifest = {
        "world_size": place.world_size,
        "data_sha256": "d1",
        "recipe": recipe.model_dump(mode="json"),
        "precision": precision,
    }
    everything = recipe.method == "full"
    checkpoint.save(
        run / "checkpoints",
        2,
        lambda partial: write_state(engine, partial, checkpoint.STATE, all_weights=everything),
        loop.all_ranks(place),
        manifest,
        recipe.checkpoint,
    )
    with torch.no_grad():  # not in eval(): there bitsandbytes computes 4 bits on some CPUs in bf16
        logits = engine.module(input_ids=torch.arange(32).unsqueeze(0)).logits.float()
    if place.rank == 0:
        torch.save(logits, run / "logits.pt")


def main() -> None:
    cases: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(sys.argv[2])
    place = loop.Place(*(int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")))
    loop.join_ranks(choose_device(place.local_rank), 120)
    for name, recipe in cases.items():
        train(Recipe.model_validate(recipe), folder, folder / name, place)
        gc.collect()
        dist.barrier()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
