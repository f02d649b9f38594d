"""What a preflight would measure, without doing it: the first rounds of every plan, and how long they may take. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from netcheck.measure import MEASUREMENTS, PLANNED, nonce, ports
from netcheck.measure.job import Level, Round, Setting

SHORT_S = 20.0
"""est.: within the rounding of what takes minutes."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """One measurement. `rounds`: names of the jobs that run at the same time, round by round; suspects may add more.

    `at_most_s`: the sum of the time limits. `last_s`: how long it took the last time at this level, None = not known.
    """

    name: str
    title: str
    rounds: tuple[tuple[str, ...], ...]
    at_most_s: float
    last_s: float | None = None

    @property
    def about_s(self) -> float | None:
        """How long it is going to take, as far as that can be told: what is short anyway counts with its limit."""
        if self.last_s is None and self.at_most_s <= SHORT_S:
            return self.at_most_s
        return self.last_s


def rehearse(setting: Setting, wanted: Collection[str], records: Sequence[Mapping[str, Any]]) -> Iterator[Rehearsal]:
    """Yield what is run for the measurements `wanted`, in this order. `records` (netcheck.diff, newest first) tell how long."""
    names = tuple(node.name for node in setting.nodes)
    for name, module in MEASUREMENTS.items():
        if name not in wanted:
            continue
        if name in PLANNED:
            planned = PLANNED[name].plan(setting, ())
            rounds = tuple(tuple(job.name for job in one) for one in planned)
            at_most_s = sum(map(_limit_s, planned))
        else:
            rounds = (names,)
            at_most_s = ports.WINDOW_S if name == ports.NAME else 3 * nonce.ANSWER_WITHIN_S + nonce.GRACE_S
        yield Rehearsal(name, module.TITLE, rounds, at_most_s, _last_s(name, setting.level, len(names), records))


def _limit_s(one: Round) -> float:
    """Return the longest a round may take: its jobs run side by side, and so do their parts once the servers listen."""
    return max((part.limit_s for job in one for part in job.parts), default=0.0)


def _last_s(name: str, level: Level, count: int, records: Sequence[Mapping[str, Any]]) -> float | None:
    for record in records:
        seconds, nodes = record.get("seconds"), record.get("nodes")
        same = record.get("level") == level.word and isinstance(nodes, Sequence) and len(nodes) == count
        if same and isinstance(seconds, Mapping) and isinstance(seconds.get(name), (int, float)):
            return float(seconds[name])
    return None


def lasts(seconds: float) -> str:
    """Return a duration as people say it: "8 s", "3 min", "1 h 20 min"."""
    if seconds < 90:
        return f"{max(1.0, seconds):.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
