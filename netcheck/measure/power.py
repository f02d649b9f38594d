"""Load on and off on all GPUs of all nodes in the same moment: what weak supplies and connectors do not survive. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from netcheck.measure.gpu_load import NodeLoad, load_round
from netcheck.measure.gpu_load import read as read_load
from netcheck.measure.job import Level, Round, Setting

NAME, TITLE, LEVEL = "power", "all GPUs on and off at once", Level.DEFAULT
"""The check that needs it runs only when it is asked for by name."""
SECONDS = 40.0
"""est.: twenty swings between rest and full power."""
PERIOD_S = 2.0
"""est.: a second is longer than capacitors of a supply last; the clocks of the nodes agree far better."""


def plan(setting: Setting, done: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[Round, ...]:
    """Return one round: all nodes with GPUs."""
    words = ("--mode", "power", "--seconds", f"{SECONDS:g}", "--period-s", f"{PERIOD_S:g}")
    return () if done else load_round(setting, words, SECONDS)


def read(measured: object) -> tuple[NodeLoad, ...]:
    """Return what every node did. Raises ParseError."""
    return read_load(measured)
