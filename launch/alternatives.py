"""What else fits, or is faster: other methods, ZeRO stages and batches of a recipe, each as the words that make it. Pure."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from launch.memory import Fit, fit, largest_micro_batch
from launch.perf import Prediction, pointless, predict
from launch.site import Site
from launch.training import METHODS, MOST_BATCH, Training, divisors, training_of
from r4090c.errors import UsageError

LOSS_CHUNK_TOKENS = 1024
"""est.: of a vocabulary of 32,000 the loss then takes 0.4 GB (LOGITS_BYTES of launch/memory.py); still a large multiplication."""
FASTER_MIN = 1.05
"""est.: predictions of two ways to train differ by less than this only by chance."""
ALIKE = 1.02
"""est.: not worth a further change of the recipe."""
SHOWN = 6
"""est.: what a person compares."""
LEARNED = {
    "full": "trains all weights, not adapters",
    "lora": "LoRA trains adapters, not all weights",
    "int8": "LoRA trains adapters, not all weights; the frozen weights have 8 bits",
    "qlora": "QLoRA trains adapters, not all weights; the frozen weights have 4 bits",
}
"""What another method changes in what is learned, seen from a full training."""
FROZEN = {"lora": "16 bits", "int8": "8 bits", "qlora": "4 bits"}


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another way to train a recipe, that fits.

    `sets`: the `--set` words that make it of the recipe. `changes`: what is learned otherwise.
    """

    sets: tuple[str, ...]
    training: Training
    fit: Fit
    prediction: Prediction
    changes: tuple[str, ...] = ()


def alternatives(
    recipe: Mapping[str, Any], training: Training, site: Site, ds_configs: Mapping[str, Mapping[str, Any]]
) -> tuple[Alternative, ...]:
    """Return the other ways to train `recipe` that fit on `site` and are not pointless there, the fastest first.

    `training`: what `recipe` (resolved, with the user's --set) trains now. `ds_configs`: file name -> DeepSpeed configuration.
    The global batch and the sequence length stay. Of each kind (method, and where weights and optimizer lie as far as it matters)
    one is told, so that the list shows what there is to choose from: of the fastest the one that changes least.
    """
    kinds: dict[tuple[object, ...], list[Alternative]] = {}
    for changed in _candidates(recipe, training, ds_configs):
        found = _fitting(recipe, changed, training, site, ds_configs)
        if found is not None and found.training != training:
            kinds.setdefault(_kind(found.training), []).append(found)
    return tuple(sorted(map(_plainest, kinds.values()), key=lambda one: -_rate(one.prediction)))


def smaller_batch(
    recipe: Mapping[str, Any], training: Training, site: Site, ds_configs: Mapping[str, Mapping[str, Any]]
) -> Alternative | None:
    """Return the recipe with the largest micro-batch that fits, its global batch kept; None when not even 1 fits."""
    return _fitting(recipe, {}, training, site, ds_configs)


def worth_showing(
    found: Sequence[Alternative], faster_than: Prediction | None = None, limit: int = SHOWN
) -> tuple[Alternative, ...]:
    """Return at most `limit` of the alternatives, the best of every method among them, in their order.

    `faster_than`: only those clearly faster than this.
    """
    if faster_than is not None:
        found = [one for one in found if _rate(one.prediction) > FASTER_MIN * _rate(faster_than)]
    first: list[Alternative] = []
    for one in found:
        if all(one.training.method != other.training.method for other in first):
            first.append(one)
    chosen = [*first, *(one for one in found if one not in first)][:limit]
    return tuple(one for one in found if one in chosen)


def _kind(training: Training) -> tuple[object, ...]:
    """Return what makes two ways differ for a person: quantized weights are never divided, adapters have a small optimizer."""
    if training.method in ("int8", "qlora"):
        return (training.method,)
    if training.method == "lora":
        return training.method, training.stage == 3, training.offload_parameters
    return training.method, training.stage == 3, training.offload_optimizer, training.offload_parameters


def _plainest(found: Sequence[Alternative]) -> Alternative:
    """Return, of those about as fast as the fastest, the one that changes least."""
    enough = max(_rate(one.prediction) for one in found) / ALIKE
    fast = [one for one in found if _rate(one.prediction) >= enough]
    return min(fast, key=lambda one: (len(one.changes), len(one.sets), -_rate(one.prediction)))


def _rate(prediction: Prediction) -> float:
    """Return the units/s, 0 where they cannot be told."""
    return prediction.units_per_s or 0.0


def _candidates(
    recipe: Mapping[str, Any], training: Training, ds_configs: Mapping[str, Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the values to set, by dotted key, but for the batch: only keys that `recipe` has, as --set demands."""
    levers: dict[str, tuple[Any, ...]] = {}
    if "method" in recipe:
        levers["method"] = METHODS
    levers["ds_config"] = (recipe["ds_config"], *(name for name in ds_configs if name != recipe["ds_config"]))
    if "activation_checkpointing" in recipe:
        levers["activation_checkpointing"] = (training.activation_checkpointing, not training.activation_checkpointing)
    if recipe["optimizer"].get("name") in ("adamw", "adamw8bit"):
        levers["optimizer.name"] = ("adamw", "adamw8bit")
    if "loss_chunk_tokens" in recipe and training.loss_chunk_tokens == 0:
        levers["loss_chunk_tokens"] = (0, LOSS_CHUNK_TOKENS)
    for values in product(*levers.values()):
        yield {key: value for key, value in zip(levers, values, strict=True) if value != _at(recipe, key)}


def _fitting(
    recipe: Mapping[str, Any],
    changed: Mapping[str, Any],
    training: Training,
    site: Site,
    ds_configs: Mapping[str, Mapping[str, Any]],
) -> Alternative | None:
    """Return the recipe so changed, with the largest micro-batch that fits and keeps the global batch; None when none does."""
    name = changed.get("ds_config", recipe["ds_config"])
    if name not in ds_configs:
        return None
    try:
        on_gpu = site.card is not None
        one = training_of(_with(recipe, {**changed, "micro_batch": 1}), ds_configs[name], on_gpu=on_gpu)
        largest = largest_micro_batch(one, site)
        if largest is None:
            return None
        batch = training.micro_batch * training.accumulation
        micro = largest_divisor(batch, min(largest, MOST_BATCH))
        own = {"micro_batch": micro, "gradient_accumulation": batch // micro}
        changed = {**changed, **{key: value for key, value in own.items() if value != recipe[key]}}
        one = training_of(_with(recipe, changed), ds_configs[name], on_gpu=on_gpu)
    except UsageError:
        return None  # these do not go together
    its_fit = fit(one, site)
    if not its_fit.fits or pointless(one, site) is not None:
        return None
    return Alternative(
        tuple(f"{key}={_word(value)}" for key, value in changed.items()),
        one,
        its_fit,
        predict(one, site),
        tuple(_changes(training, one)),
    )


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` that is not above `limit`, both at least 1."""
    return max(size for size in divisors(number) if size <= limit)


def _changes(now: Training, then: Training) -> Iterator[str]:
    """Yield what is learned otherwise."""
    if now.method != then.method:
        if "full" in (now.method, then.method):
            yield LEARNED[then.method]
        else:
            yield f"the frozen weights have {FROZEN[then.method]}, not {FROZEN[now.method]}"
    if now.optimizer != then.optimizer:
        yield "optimizer states in 8 bits" if then.optimizer == "adamw8bit" else "optimizer states in 32 bits"


def _at(recipe: Mapping[str, Any], key: str) -> Any:
    value: Any = recipe
    for part in key.split("."):
        value = value[part]
    return value


def _with(recipe: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe with the values of dotted keys changed."""
    told = copy.deepcopy(dict(recipe))
    for key, value in changed.items():
        *folders, last = key.split(".")
        at = told
        for part in folders:
            at = at[part]
        at[last] = value
    return told


def _word(value: object) -> str:
    """Return a value as --set takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def merged_sets(sets: Iterable[str], more: Iterable[str]) -> tuple[str, ...]:
    """Return the words of `sets` but for keys that `more` sets, and then those of `more`."""
    more = tuple(more)
    keys = {word.partition("=")[0] for word in more}
    return (*(word for word in sets if word.partition("=")[0] not in keys), *more)
