"""The recipe: what to train, as data. Read from JSON (or YAML, by hand), checked, and turned into DeepSpeed's configuration."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from train.errors import Stop

BYTE_VALUES = 256


class _Part(BaseModel):
    """Unknown keys are mistakes, and nothing changes after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Model(_Part):
    """`config` holds fields of the family's transformers configuration, such as hidden_size."""

    family: Literal["llama"]
    weights: None = None
    config: dict[str, Any]


class Lora(_Part):
    """Adapters for `method: lora`."""

    rank: PositiveInt
    alpha: float = Field(gt=0)
    dropout: float = Field(ge=0, lt=1)
    targets: list[str] = Field(min_length=1)


class Data(_Part):
    """Text files, read as bytes. `sources` are globs; `{stdlib}` is the folder of Python's own library."""

    kind: Literal["text"]
    sources: list[str] = Field(min_length=1)
    sequence_length: int = Field(ge=2)
    max_mib: float = Field(gt=0)


class Optimizer(_Part):
    """torch.optim.AdamW; matrices are decayed, vectors (norms) are not."""

    name: Literal["adamw"]
    lr: float = Field(gt=0)
    betas: tuple[float, float]
    weight_decay: float = Field(ge=0)


class Schedule(_Part):
    """Linear warm-up to `lr`, then half a cosine down to `lr * min_lr_ratio` at the last step."""

    name: Literal["cosine"]
    warmup_steps: int = Field(ge=0)
    min_lr_ratio: float = Field(ge=0, le=1)


class Checkpoint(_Part):
    """Save every so many steps (and at the end); the newest `keep` are kept."""

    every_steps: PositiveInt
    keep: PositiveInt


class Recipe(_Part):
    """Everything a run is made of, apart from where it runs."""

    name: str
    description: str = ""
    script: str = "main.py"
    model: Model
    method: Literal["full"] = "full"
    lora: Lora | None = None
    data: Data
    steps: PositiveInt
    micro_batch: PositiveInt
    gradient_accumulation: PositiveInt
    activation_checkpointing: Literal[False] = False
    loss_chunk_tokens: Literal[0] = 0
    precision: Literal["auto", "fp32", "bf16", "fp16"]
    optimizer: Optimizer
    schedule: Schedule
    gradient_clipping: float = Field(ge=0)
    ds_config: str
    checkpoint: Checkpoint
    seed: int = Field(ge=0)
    resume: bool

    def samples_per_step(self, world_size: int) -> int:
        """Return how many sequences one optimizer step takes over all ranks."""
        return self.micro_batch * self.gradient_accumulation * world_size

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of optimizer step `step` (from 1); it depends on nothing else."""
        peak, warmup = self.optimizer.lr, self.schedule.warmup_steps
        if step <= warmup:
            return peak * step / warmup
        progress = (step - warmup) / max(1, self.steps - warmup)
        lowest = peak * self.schedule.min_lr_ratio
        return lowest + (peak - lowest) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def read_recipe(file: Path) -> Recipe:
    """Return the recipe in `file`. Raises Stop naming every wrong key."""
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix in {".yaml", ".yml"}:
            import yaml

            content = yaml.safe_load(text)
        else:
            content = json.loads(text)
    except (OSError, ValueError) as error:
        raise Stop(file, str(error), "a readable recipe", "name the recipe with --recipe FILE") from None
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        mistakes = [f"{'.'.join(map(str, one['loc']))}: {one['msg']} (got {one['input']!r:.60})" for one in error.errors()]
        raise Stop(file, " | ".join(mistakes), "the keys of train/recipes/tiny.yaml", "correct the recipe") from None
    if recipe.model.config.get("vocab_size", 0) < BYTE_VALUES:
        raise Stop(
            file,
            f"model.config.vocab_size is {recipe.model.config.get('vocab_size')}",
            f"at least {BYTE_VALUES}, one for each byte of the text",
            "correct the recipe",
        )
    return recipe


def deepspeed_config(recipe: Recipe, file: Path, world_size: int, precision: str) -> dict[str, Any]:
    """Return DeepSpeed's configuration: `file` as the user wrote it, completed from the recipe.

    A key the recipe decides may stand in the file as "auto" or with the recipe's own value; another value is a mistake.
    """
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Stop(file, str(error), "a DeepSpeed configuration in JSON", "correct ds_config in the recipe") from None
    decided = {
        "train_micro_batch_size_per_gpu": recipe.micro_batch,
        "gradient_accumulation_steps": recipe.gradient_accumulation,
        "train_batch_size": recipe.samples_per_step(world_size),
        "gradient_clipping": recipe.gradient_clipping,
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16"},
    }
    for key, value in decided.items():
        found = config.get(key, "auto")
        if key in {"bf16", "fp16"} and isinstance(found, dict) and found.get("enabled", "auto") in {"auto", value["enabled"]}:  # type: ignore[index]
            config[key] = {**found, **value}  # type: ignore[dict-item]
        elif found in ("auto", value):
            config[key] = value
        else:
            remedy = f"remove {key} from the file, or change the recipe"
            raise Stop(file, f"{key} is {found!r}", f"{value!r}, as the recipe says", remedy)
    return config
