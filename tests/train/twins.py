"""How a recipe becomes its toy twin: its own YAML and keys, tiny by `--set`; its weights and data lie where a user's would.

`lay_out` makes both below a data folder and the models folder beside it. As a program, started by torchrun, this trains every
recipe of a file in one process group without interruption: `twins.py RECIPES.json DATA_DIR FOLDER` leaves metrics.jsonl and
logits.pt in FOLDER/<name>.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

STEPS, EVERY = 16, 5
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}
SHORT = {"steps": STEPS, "checkpoint.every_steps": EVERY, "schedule.warmup_steps": 2, "micro_batch": 2}
TEXT = {**{f"model.config.{key}": value for key, value in SHAPE.items()}, **SHORT, "data.sequence_length": 64}
ADAPTERS = {**TEXT, "loss_chunk_tokens": 48, "optimizer.lr": 0.01, "lora.rank": 8}
"""The lora.dropout of the recipes stays: a resumed run must drop the same."""
HELD_OUT = "{kind: prepared, path: held-out, sequence_length: 64}"


@dataclass(frozen=True)
class Twin:
    """`sets`: what `--set` makes tiny; `merged`: exported into one model; `unit`: what a rate counts."""

    sets: dict[str, Any]
    merged: bool = False
    more: tuple[str, ...] = field(default=())

    @property
    def words(self) -> list[str]:
        """The words of a command line."""
        texts = [f"{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in self.sets.items()]
        return [word for text in (*texts, *self.more) for word in ("--set", text)]


TWINS = {
    "tiny": Twin({**TEXT, "data.max_mib": 0.5}),
    "llama7b": Twin(ADAPTERS),
    "llama13b": Twin(ADAPTERS, merged=True),
    "llama7b-full": Twin({**TEXT, "loss_chunk_tokens": 48, "optimizer.lr": 0.005}),
    "llama1b-pretrain": Twin(
        {**TEXT, "loss_chunk_tokens": 48, "optimizer.lr": 0.005, "model.config.num_key_value_heads": 2, "eval.every_steps": 8},
        more=(f"eval.data={HELD_OUT}",),
    ),
    "resnet50": Twin({**SHORT, "model.config.depth": 18, "model.config.num_classes": 4, "data.image_size": 32, "micro_batch": 8}),
}
CHATS = [{"instruction": f"What comes after {n}?", "output": f"After {n} comes {n + 1}."} for n in range(300)]
TEXTS = [{"text": f"The number {n} lies between {n - 1} and {n + 1}, as everybody knows."} for n in range(600)]

FAMILIES = ("mistral", "qwen2", "qwen3")
MAKE_WEIGHTS = """
import json, sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
for folder, family in json.loads(sys.argv[2]).items():
    torch.manual_seed(7)
    config = AutoConfig.for_model(family, initializer_range=0.1, **json.loads(sys.argv[1]))  # else adapters move little
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
"""


def lay_out(data_dir: Path) -> None:
    """Make what the recipes name: data `chat`, `text` and `held-out` by train/prepare.py, toy weights beside, by transformers."""
    data_dir.mkdir(parents=True, exist_ok=True)
    inputs = data_dir.parent / "twins"
    inputs.mkdir(exist_ok=True)
    for name, records in (("chat", CHATS), ("text", TEXTS[60:]), ("held-out", TEXTS[:60])):
        file = inputs / f"{name}.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        prepare = [str(ROOT / "train" / "prepare.py"), str(file), "--tokenizer", "bytes", "--out", str(data_dir / name)]
        subprocess.run([sys.executable, *prepare], check=True, capture_output=True, timeout=400)
    families = {"llama-2-7b": "llama", "llama-2-13b": "llama", **{name: name for name in FAMILIES}}
    folders = {str(data_dir.parent / "models" / name): family for name, family in families.items()}
    made = [sys.executable, "-c", MAKE_WEIGHTS, json.dumps(SHAPE), json.dumps(folders)]
    subprocess.run(made, check=True, capture_output=True, timeout=400)


def main() -> None:
    """Train each recipe of the file in one go, as train/main.py does."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed's use
    import torch
    import torch.distributed as dist

    from train import feed, loop
    from train.device import choose_device
    from train.metrics import Heartbeat
    from train.recipe import Recipe, deepspeed_config
    from train.weights import find_weights

    recipes, data_dir, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), Path(sys.argv[3])
    place = loop.Place(*(int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")))
    device = choose_device(place.local_rank)
    loop.join_ranks(device, 120)
    for name, content in recipes.items():
        recipe = Recipe.model_validate(content)
        weights = find_weights(recipe.model, data_dir.parent / "models")
        found, held_out = (
            feed.find_data(wanted, recipe.model, data_dir, prepares=place.rank == 0, timeout_s=60) if wanted else None
            for wanted in (recipe.data, recipe.eval.data if recipe.eval.every_steps else None)
        )
        assert found is not None
        precision = loop.choose_precision(recipe.precision, device)
        config = deepspeed_config(recipe, ROOT / "ds_configs" / recipe.ds_config, place.world_size, precision)
        engine, recipe = loop.build_engine(recipe, config, weights, place, device, precision)
        run = folder / name
        loop.train(recipe, engine, run, found, place, device, None, Heartbeat(run, place.rank), held_out=held_out)
        if place.rank == 0:
            torch.save(answer_of(engine.module), run / "logits.partial")
            (run / "logits.partial").rename(run / "logits.pt")
        del engine
        gc.collect()
        dist.barrier()


def answer_of(model: Any) -> Any:
    """Return the logits of one fixed batch; of language models without their heads in chunks, dropout left out."""
    import torch

    for module in model.modules():  # not eval(): bitsandbytes then computes 4 bits on some CPUs in bf16
        if isinstance(module, (torch.nn.Dropout, torch.nn.BatchNorm2d)):
            module.eval()
    with torch.no_grad():
        if model.config.model_type == "resnet":
            return model(pixel_values=pixels()).logits.float()
        language = model.get_base_model() if hasattr(model, "get_base_model") else model
        return language.lm_head(language.model(input_ids=tokens()).last_hidden_state).float()


def tokens() -> Any:
    """Return the batch that language models are asked about."""
    import torch

    return torch.arange(32, 96).unsqueeze(0)


def pixels() -> Any:
    """Return the batch that a ResNet is asked about, as bytes."""
    import torch

    return torch.randint(0, 256, (2, 3, 32, 32), generator=torch.Generator().manual_seed(1))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
