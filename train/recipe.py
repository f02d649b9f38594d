"""The recipe: what to train, as data. Read from JSON (or YAML, by hand), checked, and turned into DeepSpeed's configuration.

As a program, it prints the JSON Schema of a recipe; with `--check`, what is wrong with the one on standard input, as JSON.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, ValidationError, WithJsonSchema, model_validator

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # was train/

from train.errors import Stop, counted, reason

BYTE_VALUES = 256

AUTO = 0
"""What `micro_batch: auto` is here until the ranks have found out what fits."""


MICRO_BATCH_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]}


Beta = Annotated[float, Field(ge=0, lt=1)]
MOST_SEED = 2**53
"""Far below what torch takes, as a step and a rank are added; and the largest that every reader of JSON keeps."""


class _Part(BaseModel):
    """Unknown keys are mistakes, and nothing changes after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


class Model(_Part):
    """`config` holds fields of the family's transformers configuration, such as hidden_size.

    `weights`: null (random, from the seed) or a folder of safetensors, absolute or below `models/` beside the data folder.
    `family`: transformers' model_type (llama, qwen3, gemma3_text, …). A resnet has depth and num_classes, and images for data.
    """

    family: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]
    weights: str | None = None
    config: dict[str, Any]


class Lora(_Part):
    """Adapters for the methods that train nothing else. `targets` are names of matrices, such as q_proj."""

    rank: PositiveInt
    alpha: float = Field(gt=0)
    dropout: float = Field(ge=0, lt=1)
    targets: list[str] = Field(min_length=1)


class Data(_Part):
    """`text`: files read as bytes. `sources` are globs; `{stdlib}` is the folder of Python's own library.

    `prepared`: `path` is a folder that `r4090c data prepare` wrote, absolute or below the data folder. `images`: `path` is
    "synthetic", or such a folder with a folder of pictures for each class; they are cut to `image_size` pixels squared.
    """

    kind: Literal["text", "prepared", "images"]
    sources: Annotated[list[str], Field(min_length=1)] | None = None
    path: str = ""
    sequence_length: int = Field(default=0, ge=0)
    max_mib: float = Field(default=0.0, ge=0)
    image_size: int = Field(default=224, ge=32)

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self) -> Data:
        if self.kind == "images":
            if not self.path:
                raise ValueError("kind images needs path, a folder, or synthetic")
            return self
        if self.sequence_length < 2:
            raise ValueError(f"sequence_length is {self.sequence_length}, and must be at least 2")
        if self.kind == "text" and not (self.sources and self.max_mib):
            raise ValueError("kind text needs sources and max_mib")
        if self.kind == "prepared" and not self.path:
            raise ValueError("kind prepared needs path, a folder that `r4090c data prepare` wrote")
        return self


class Optimizer(_Part):
    """torch's AdamW, or bitsandbytes' with moments of 8 bits; matrices are decayed, vectors (norms) are not.

    `lr_reference_batch`: `lr` is meant for a global batch of so many sequences; another one trains at
    lr × √(global batch / reference), the rule for Adam (Malladi et al. 2022, arXiv 2205.10287). null: `lr` as it stands.
    """

    name: Literal["adamw", "adamw8bit"]
    lr: float = Field(gt=0)
    betas: tuple[Beta, Beta]
    weight_decay: float = Field(ge=0)
    lr_reference_batch: PositiveInt | None = None


class Schedule(_Part):
    """Linear warm-up to `lr`, then half a cosine down to `lr * min_lr_ratio` at the last step."""

    name: Literal["cosine"]
    warmup_steps: int = Field(ge=0)
    min_lr_ratio: float = Field(ge=0, le=1)


class Kernels(_Part):
    """How the same arithmetic is carried out. What a machine lacks is left out, with a notice.

    `attention`: auto is flash where the package is installed and the GPU computes in 16 bits, else sdpa (torch's own).
    """

    attention: Literal["auto", "sdpa", "flash", "eager"] = "auto"
    liger: bool = False
    compile: bool = False


class Checkpoint(_Part):
    """Save every so many steps (and at the end).

    The newest `keep` are kept, but none older than `keep_hours`, 0 = no such limit; the newest whole one always stays.
    `copy_to`: a folder on other storage, as a URL (s3://bucket/prefix, file:///mnt/backup), that whole ones are copied to.
    """

    every_steps: PositiveInt
    keep: int = Field(ge=0)
    keep_hours: float = Field(default=0.0, ge=0)
    copy_to: str | None = None


class Evaluation(_Part):
    """The loss on data that is not trained on, after every so many steps (and the last one); 0 = never.

    `data` is like the recipe's own; its first `sequences` (or images) in shuffled order are taken, 0 = all of them.
    """

    every_steps: int = Field(default=0, ge=0)
    sequences: int = Field(default=64, ge=0)
    data: Data | None = None

    @model_validator(mode="after")
    def _has_data(self) -> Evaluation:
        if self.every_steps and self.data is None:
            raise ValueError("every_steps needs data, which is not trained on, like the recipe's own")
        return self


class Recipe(_Part):
    """Everything a run is made of, apart from where it runs.

    `method`: full trains all weights; lora adapters beside frozen weights of 16 (on a CPU 32) bits, int8 and qlora beside
    weights of 8 bits (LLM.int8) and 4 bits (nf4). `global_batch`: sequences of one optimizer step over all ranks; 0 is
    micro_batch × gradient_accumulation × ranks, otherwise gradient_accumulation follows from it. `loss_spike`: stop when the
    loss exceeds the median of the last steps so many times over, 0 = never. `wandb`: the project of Weights & Biases that the
    metrics also go to, "" = none. `elastic`: another number of ranks may continue the run, with the global batch it began with.
    """

    name: str
    description: str = ""
    script: str = "main.py"
    model: Model
    method: Literal["full", "lora", "int8", "qlora"] = "full"
    lora: Lora | None = None
    data: Data
    steps: PositiveInt
    micro_batch: Annotated[
        int, Field(ge=0), BeforeValidator(lambda value: AUTO if value == "auto" else value), WithJsonSchema(MICRO_BATCH_SCHEMA)
    ]
    gradient_accumulation: PositiveInt
    global_batch: int = Field(default=0, ge=0)
    activation_checkpointing: bool = False
    loss_chunk_tokens: int = Field(default=0, ge=0)
    kernels: Kernels = Kernels()
    loss_spike: float = Field(default=0.0, ge=0)
    precision: Literal["auto", "fp32", "bf16", "fp16"]
    optimizer: Optimizer
    schedule: Schedule
    gradient_clipping: float = Field(ge=0)
    ds_config: str
    checkpoint: Checkpoint
    eval: Evaluation = Evaluation()
    wandb: str = ""
    elastic: bool = True
    seed: int = Field(ge=0, le=MOST_SEED)
    resume: bool

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        if self.method != "full" and self.lora is None:
            raise ValueError(f"lora: method {self.method} needs it (rank, alpha, dropout, targets)")
        if self.micro_batch == AUTO and not self.global_batch:
            raise ValueError("global_batch: micro_batch auto needs it, so that the step stays the same whatever fits")
        if (self.model.family == "resnet") != (self.data.kind == "images"):
            raise ValueError(f"data.kind: {self.data.kind} is not what model.family {self.model.family} learns from")
        if self.eval.data and (self.eval.data.kind == "images") != (self.data.kind == "images"):
            raise ValueError(f"eval.data.kind: {self.eval.data.kind} is not like data.kind {self.data.kind}")
        if self.model.family == "resnet":
            language = {"method": self.method != "full", "micro_batch auto": self.micro_batch == AUTO}
            language |= {"model.weights": self.model.weights is not None, "loss_chunk_tokens": self.loss_chunk_tokens > 0}
            language |= {"activation_checkpointing": self.activation_checkpointing}
            if any(language.values()):
                raise ValueError(f"{', '.join(key for key in language if language[key])}: not for a resnet")
        if 0 < self.loss_spike <= 1:
            raise ValueError(f"loss_spike: {self.loss_spike} stops every run; give more than 1, or 0 for never")
        return self

    @property
    def unit(self) -> str:
        """What rates count."""
        return "images" if self.data.kind == "images" else "tokens"

    @property
    def units_per_sample(self) -> int:
        """Tokens of a sequence, 1 for an image."""
        return 1 if self.data.kind == "images" else self.data.sequence_length

    def samples_per_step(self, world_size: int) -> int:
        """Return how many sequences one optimizer step takes over all ranks."""
        return self.global_batch or self.micro_batch * self.gradient_accumulation * world_size

    def divided(self, world_size: int, micro_batch: int = AUTO) -> Recipe:
        """Return the recipe with the micro_batch given (or its own) and the gradient_accumulation that keeps the global batch.

        Raises Stop when the global batch cannot be divided so.
        """
        size = micro_batch or self.micro_batch
        if not self.global_batch:
            return self
        if self.global_batch % (max(1, size) * world_size):
            parts = f"micro-batches of {size or 'any size'} on {counted(world_size, 'rank')}"
            raise Stop(
                "recipe global_batch",
                f"{self.global_batch} sequences a step cannot be divided into {parts}",
                f"a multiple of {max(1, size) * world_size}",
                "change global_batch, micro_batch or the number of ranks",
            )
        if size == AUTO:
            return self
        accumulation = self.global_batch // (size * world_size)
        return self.model_copy(update={"micro_batch": size, "gradient_accumulation": accumulation})

    def peak_rate(self, global_batch: int | None = None) -> float:
        """Return the learning rate after warm-up: `lr`, scaled to the global batch where the recipe tells for which one it is."""
        reference = self.optimizer.lr_reference_batch
        return self.optimizer.lr * (math.sqrt(global_batch / reference) if reference and global_batch else 1.0)

    def told_rate(self, world_size: int) -> str:
        """Return the learning rate after warm-up, and whether it follows from the global batch, for people."""
        batch, reference = self.samples_per_step(world_size), self.optimizer.lr_reference_batch
        why = "as the recipe says, whatever the global batch (optimizer.lr_reference_batch: null)"
        if reference:
            why = f"{self.optimizer.lr:.2e} x sqrt({batch} / {reference}) (optimizer.lr_reference_batch: {reference})"
        return f"{self.peak_rate(batch):.2e} at a global batch of {batch:,}: {why}"

    def learning_rate(self, step: int, global_batch: int | None = None) -> float:
        """Return the learning rate of optimizer step `step` (from 1); it depends on nothing else, so nothing compounds."""
        peak, warmup = self.peak_rate(global_batch), self.schedule.warmup_steps
        if step <= warmup:
            return peak * step / warmup
        progress = (step - warmup) / max(1, self.steps - warmup)
        lowest = peak * self.schedule.min_lr_ratio
        return lowest + (peak - lowest) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a recipe's file, for editors; what concerns two keys is only checked here."""
    schema = Recipe.model_json_schema()
    schema["required"].remove("resume")  # `r4090c launch` decides
    folder = {"type": "string", "minLength": 1, "description": "A model's folder: family, weights and config follow from it."}
    schema["properties"]["model"] = {"anyOf": [schema["properties"]["model"], folder]}  # launch/recipe.py reads it
    schema["title"] = "r4090c recipe"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def read_recipe(file: Path) -> Recipe:
    """Return the recipe in `file`. Raises Stop naming every wrong key."""
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix in {".yaml", ".yml"}:
            import yaml

            try:
                content = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(error) from None
        else:
            content = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise Stop(file, " ".join(reason(error).split()), "a readable recipe", "name the recipe with --recipe FILE") from None
    return check(content, file)


def check(content: Any, culprit: object) -> Recipe:
    """Return the recipe that `content` is. Raises Stop naming every wrong key."""
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        auto = any("micro_batch auto needs it" in str(one.get("ctx")) for one in error.errors())
        remedy = "--set global_batch=N, sequences of one step over all ranks" if auto else "correct it"
        raise Stop(culprit, " | ".join(map(_mistake, error.errors())), "keys and values of the schema", remedy) from None
    key, least, why = ("num_classes", 1, "") if recipe.unit == "images" else ("vocab_size", BYTE_VALUES, ", one for each byte")
    told = recipe.model.config.get(key)
    if not isinstance(told, int) or told < least:
        raise Stop(culprit, f"model.config.{key} is {told!r}", f"at least {least}{why}", "correct it")
    return recipe


def _mistake(error: Any) -> str:
    """Return one of pydantic's errors for people; our own name the key and the value themselves."""
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "value_error":
        return f"{key}: {error['ctx']['error']}".removeprefix(": ")
    if error["type"] in ("missing", "extra_forbidden"):
        return f"{key}: {'missing' if error['type'] == 'missing' else 'unknown'}"
    return f"{key}: {error['msg']} (got {error['input']!r:.60})"


def deepspeed_config(recipe: Recipe, file: Path, world_size: int, precision: str) -> dict[str, Any]:
    """Return DeepSpeed's configuration: `file` as the user wrote it, completed from the recipe.

    A key the recipe decides may stand in the file as "auto" or with the recipe's own value; another value is a mistake.
    """
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Stop(file, reason(error), "a DeepSpeed configuration in JSON", "correct ds_config in the recipe") from None
    if not isinstance(config, dict):
        raise Stop(file, f"a JSON {type(config).__name__}", "an object of DeepSpeed's keys", "correct the file")
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
    if zero_of(config).get("offload_optimizer"):  # torch's AdamW on the host; DeepSpeed's own needs a C++ compiler on every node
        config.setdefault("zero_force_ds_cpu_optimizer", False)
    return config


def zero_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the `zero_optimization` of a DeepSpeed configuration; nothing told is nothing."""
    zero = config.get("zero_optimization", {})
    return zero if isinstance(zero, dict) else {}


def main() -> int:
    """Print the schema, or check what is on standard input; return the exit code."""
    if sys.argv[1:] != ["--check"]:
        print(json.dumps(json_schema(), indent=2))
        return 0
    try:
        content = json.load(sys.stdin)
        check(content, f"recipe {content['name']}")
    except Stop as stop:
        print(json.dumps(stop.told))
        return stop.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
