"""Recipes and sites to forecasts: reads the DeepSpeed configurations that come with r4090c; all judgement is elsewhere, pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from launch.alternatives import Alternative, alternatives, merged_sets, worth_showing
from launch.forecast import Forecast, forecast
from launch.recipe import ds_config_names, load_ds_config
from launch.site import Site
from launch.training import training_of


def foresee(recipe: Mapping[str, Any], site: Site) -> Forecast:
    """Return the forecast of a resolved recipe on `site`. Raises UsageError for what cannot be planned."""
    return forecast(training_of(recipe, load_ds_config(recipe), on_gpu=site.card is not None), site)


def other_ways(recipe: Mapping[str, Any], one: Forecast) -> tuple[Alternative, ...]:
    """Return what else fits, the fastest first; of a run that is worth it only what is clearly faster."""
    if one.site.card is None:
        return ()  # ranks on CPUs: nobody chooses a method for their memory
    configs = {name: load_ds_config({"ds_config": name}) for name in (recipe["ds_config"], *ds_config_names())}
    found = alternatives(recipe, one.training, one.site, configs)
    return worth_showing(found, one.prediction if one.worth_it else None)


def command_of(verb: str, target: str, sets: Sequence[str], more: Sequence[str] = (), where: Sequence[str] = ()) -> str:
    """Return the command that does `verb` to `target` with the user's `sets`, those of `more` in their place, and `where`."""
    words = ["r4090c", verb, target, *where]
    for word in merged_sets(sets, more):
        words += ["--set", word]
    return shlex.join(words)
