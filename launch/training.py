"""What is trained and how, as far as memory, traffic and time depend on it: a recipe with its DeepSpeed configuration. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from launch.shape import MOST, RESNET_IMAGE, Shape, Transformer, shape_of, shown
from r4090c.errors import UsageError

METHODS = ("full", "lora", "int8", "qlora")
"""All weights; adapters beside weights of 16 bits, of 8 (LLM.int8), of 4 (nf4 with double quantization)."""
OPTIMIZERS = ("adamw", "adamw8bit")
PRECISIONS = ("bf16", "fp16", "fp32")
MOST_BATCH = 10**6
"""est.: sequences or images a rank takes at once, and micro-steps of a step: more than anybody ever took."""
NOT_PLANNED: Mapping[str, Any] = {
    "cpu_offload": False,  # old names of offload_optimizer and offload_param, which DeepSpeed still takes
    "cpu_offload_param": False,
    "mics_shard_size": -1,
    "zero_hpz_partition_size": 1,
    "zero_quantized_weights": False,
    "zero_quantized_gradients": False,
}
"""Keys that change memory or traffic in ways nobody works out here, with DeepSpeed's defaults (its configuration reference)."""
ZERO_BUCKET = 500_000_000
"""DeepSpeed's default of reduce_bucket_size and allgather_bucket_size, elements (its configuration reference)."""


@dataclass(frozen=True, slots=True)
class Training:
    """One run's work. `sequence_length` is 1 for images, `micro_batch` sequences or images a rank takes at once.

    `loss_chunk_tokens`: tokens whose logits exist at once, 0 = those of the whole micro-batch. Buckets are in elements.
    """

    name: str
    shape: Shape
    method: str
    lora_rank: int
    lora_targets: tuple[str, ...]
    stage: int
    offload_optimizer: bool
    offload_parameters: bool
    micro_batch: int
    accumulation: int
    sequence_length: int
    precision: str
    optimizer: str
    activation_checkpointing: bool
    loss_chunk_tokens: int
    reduce_bucket_elements: int = ZERO_BUCKET
    allgather_bucket_elements: int = ZERO_BUCKET
    overlap_comm: bool = False

    @property
    def trainable_parameters(self) -> int:
        """Elements that get gradients: all, or those of the adapters (rank × (inputs + outputs) of each matrix)."""
        if self.method == "full" or not isinstance(self.shape, Transformer):
            return self.shape.parameters
        linears = self.shape.linears
        return self.shape.layers * sum(self.lora_rank * sum(linears[name]) for name in self.lora_targets)

    @property
    def frozen_parameters(self) -> int:
        """Elements of the model that get no gradients."""
        return 0 if self.method == "full" else self.shape.parameters

    @property
    def unit(self) -> str:
        """What the rate counts: tokens or images."""
        return "tokens" if isinstance(self.shape, Transformer) else "images"

    @property
    def units_per_micro_batch(self) -> int:
        """Tokens or images a rank works on in one micro-step."""
        return self.micro_batch * self.sequence_length

    @property
    def parameter_bytes(self) -> int:
        """Bytes of an unquantized parameter while it computes."""
        return 4 if self.precision == "fp32" else 2


def training_of(recipe: Mapping[str, Any], ds_config: Mapping[str, Any], *, on_gpu: bool = True) -> Training:
    """Return what `recipe` trains under `ds_config`; `on_gpu` decides what `precision: auto` means.

    Raises UsageError naming the key whose value cannot be planned.
    """
    data = recipe["data"]
    image_size = data.get("image_size", RESNET_IMAGE)
    shape = shape_of(recipe["model"], _whole("data.image_size", image_size, 32))
    language = isinstance(shape, Transformer)
    method = _one_of("method", recipe.get("method", "full"), METHODS)
    if method != "full" and not language:
        raise UsageError("method", repr(method), "full: adapters are for language models", "--set method=full")
    rank, targets = _adapters(recipe, shape) if method != "full" else (0, ())
    precision = recipe["precision"]
    if precision == "auto":
        precision = "bf16" if on_gpu else "fp32"
    zero = ds_config.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise UsageError("ds_config: zero_optimization", repr(zero), "a mapping")
    for key, usual in NOT_PLANNED.items():
        if zero.get(key, usual) != usual:
            raise UsageError(f"ds_config: zero_optimization.{key}", f"{zero[key]!r} cannot be planned", f"{usual!r}, or none")
    stage = zero.get("stage", 0)
    if type(stage) is not int or stage not in (0, 1, 2, 3):
        raise UsageError("ds_config: zero_optimization.stage", repr(stage), "0, 1, 2 or 3")
    return Training(
        name=str(recipe["name"]),
        shape=shape,
        method=method,
        lora_rank=rank,
        lora_targets=targets,
        stage=stage,
        offload_optimizer=_offloaded(zero, "offload_optimizer") and stage >= 1,
        offload_parameters=_offloaded(zero, "offload_param") and stage == 3,
        # auto: one sequence is what must fit
        micro_batch=1 if recipe["micro_batch"] == "auto" else _whole("micro_batch", recipe["micro_batch"], most=MOST_BATCH),
        accumulation=_whole("gradient_accumulation", recipe["gradient_accumulation"], most=MOST_BATCH),
        sequence_length=_whole("data.sequence_length", data.get("sequence_length")) if language else 1,
        precision=_one_of("precision", precision, PRECISIONS),
        optimizer=_one_of("optimizer.name", recipe["optimizer"].get("name"), OPTIMIZERS),
        activation_checkpointing=recipe.get("activation_checkpointing") is True,
        loss_chunk_tokens=_whole("loss_chunk_tokens", recipe.get("loss_chunk_tokens", 0), 0),
        reduce_bucket_elements=_bucket(zero, "reduce_bucket_size"),
        allgather_bucket_elements=_bucket(zero, "allgather_bucket_size"),
        overlap_comm=_overlaps(zero, stage),
    )


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number of at least 1, in their order; a second at most for MOST_BATCH squared."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}))


def _adapters(recipe: Mapping[str, Any], shape: Shape) -> tuple[int, tuple[str, ...]]:
    lora = recipe.get("lora")
    if not isinstance(lora, Mapping):
        raise UsageError("lora", repr(lora), "rank, alpha, dropout and targets, as in llama7b", "r4090c plan llama7b --json")
    known = tuple(shape.linears) if isinstance(shape, Transformer) else ()
    targets = lora.get("targets")
    if not isinstance(targets, list) or not targets:
        raise UsageError("lora.targets", repr(targets), f"a list of {', '.join(known)}")
    for target in targets:
        _one_of("lora.targets", target, known)
    return _whole("lora.rank", lora.get("rank")), tuple(dict.fromkeys(targets))


def _offloaded(zero: Mapping[str, Any], key: str) -> bool:
    """Return whether a part of the model states is to lie in host memory. NVMe is refused: its speed is not planned.

    DeepSpeed takes heed of it from stage 1 on (optimizer), under stage 3 (weights).
    """
    told = zero.get(key)
    if told is not None and not isinstance(told, Mapping):
        raise UsageError(f"ds_config: zero_optimization.{key}", repr(told), 'a mapping like {"device": "cpu"}')
    device = "none" if told is None else told.get("device", "none")
    return _one_of(f"ds_config: zero_optimization.{key}.device", device, ("none", "cpu")) == "cpu"


def _overlaps(zero: Mapping[str, Any], stage: int) -> bool:
    """Return whether gradients travel while others are computed; DeepSpeed's default is to do so under stage 3."""
    told = zero.get("overlap_comm")
    if told is not None and not isinstance(told, bool):
        raise UsageError("ds_config: zero_optimization.overlap_comm", repr(told), "true or false")
    return stage == 3 if told is None else told


def _bucket(zero: Mapping[str, Any], key: str) -> int:
    value = zero.get(key, ZERO_BUCKET)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return ZERO_BUCKET if value == "auto" else _whole(f"ds_config: zero_optimization.{key}", value)


def _one_of(key: str, value: object, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise UsageError(key, repr(value), f"one of {', '.join(allowed)}")
    return value


def _whole(key: str, value: object, least: int = 1, most: int = MOST) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise UsageError(key, "missing" if value is None else shown(value), f"a whole number from {least} to {most:g}")
    return value
