"""Recipes and sites to forecasts: reads the DeepSpeed configurations that come with r4090c; all judgement is elsewhere, pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from launch.alternatives import Alternative, alternatives, merged_sets, smaller_batch, worth_showing
from launch.env import is_secret
from launch.forecast import Forecast, forecast
from launch.recipe import accumulation_of, ds_config_names, load_ds_config
from launch.site import Site
from launch.training import training_of
from r4090c.errors import UsageError


def foresee(recipe: Mapping[str, Any], site: Site) -> Forecast:
    """Return the forecast of a resolved recipe on `site`. Raises UsageError for what cannot be planned."""
    try:
        training = training_of(recipe, load_ds_config(recipe), on_gpu=site.card is not None)
    except UsageError as error:
        culprit = f"recipe {recipe['name']}: {error.culprit}"
        raise UsageError(culprit, error.observed, error.expected, error.next_command) from None
    found = forecast(replace(training, accumulation=accumulation_of(recipe, site.world)), site)
    longest = recipe["model"]["config"].get("max_position_embeddings")
    if isinstance(longest, int) and training.sequence_length > longest:
        told = f"sequences of {training.sequence_length} tokens, and the model was made for {longest} (max_position_embeddings)"
        found = replace(found, warnings=(told, *found.warnings))
    return found


def other_ways(recipe: Mapping[str, Any], one: Forecast) -> tuple[Alternative, ...]:
    """Return what else fits, the fastest first; of a run that is worth it only what is clearly faster."""
    own = {recipe["ds_config"]: load_ds_config(recipe)}
    if one.site.card is None:  # nobody chooses a method for the memory of ranks on CPUs
        smaller = None if one.worth_it else smaller_batch(recipe, one.training, one.site, own)
        return () if smaller is None else (smaller,)
    configs = own | {name: load_ds_config({"ds_config": name}) for name in ds_config_names()}
    found = alternatives(recipe, one.training, one.site, configs)
    return worth_showing(found, one.prediction if one.worth_it else None)


def told_options(nproc: int | None, env: Mapping[str, str] | None) -> list[str]:
    """Return the words by which a command gets the same ranks and variables; secrets are left out."""
    words = [] if nproc is None else ["--nproc-per-node", str(nproc)]
    for name, value in (env or {}).items():
        words += [] if is_secret(name, value) else ["--env", f"{name}={value}"]
    return words


def command_of(verb: str, target: str, sets: Sequence[str], more: Sequence[str] = (), where: Sequence[str] = ()) -> str:
    """Return the command that does `verb` to `target` with the user's `sets`, those of `more` in their place, and `where`."""
    words = ["r4090c", verb, target, *where]
    for word in merged_sets(sets, more):
        words += ["--set", word]
    return shlex.join(words)
