"""What was measured, as plain numbers: for reports, locks and comparisons; and the matrix of a figure of links. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from netcheck.facts.question import as_float, as_mapping, as_str
from netcheck.measure import MEASUREMENTS
from netcheck.measure.figure import Figure
from netcheck.measure.job import Level
from r4090c.errors import ParseError

ARROW = "->"


@dataclass(frozen=True, slots=True)
class Matrix:
    """One figure of links. `cells`: (sender, receiver) -> value; a pair that was not measured has none."""

    measurement: str
    name: str
    unit: str
    nodes: tuple[str, ...]
    cells: Mapping[tuple[str, str], float]
    higher_is_better: bool = True

    @property
    def title(self) -> str:
        """Return what it is called, with its unit."""
        return f"{self.measurement} {self.name}, {self.unit}" if self.name else f"{self.measurement}, {self.unit}"

    def sending(self, node: str) -> list[float]:
        """Return the values of the links `node` sends on."""
        return [value for (sender, _), value in self.cells.items() if sender == node]

    def receiving(self, node: str) -> list[float]:
        """Return the values of the links `node` receives on."""
        return [value for (_, receiver), value in self.cells.items() if receiver == node]

    def worst_first(self) -> list[tuple[tuple[str, str], float]]:
        """Return ((sender, receiver), value), the worst link first."""
        return sorted(self.cells.items(), key=lambda item: (item[1] if self.higher_is_better else -item[1], item[0]))


def figures_of(measurements: Mapping[str, Any], names: Iterable[str]) -> tuple[Figure, ...]:
    """Return the figures of everything measured between the nodes `names`; what cannot be read gives none (its checks say so)."""
    nodes = {*names}
    found: list[Figure] = []
    for name, module in MEASUREMENTS.items():
        read = getattr(module, "figures", None)
        if read is None or name not in measurements:
            continue
        try:
            own = list(read(measurements[name]))
        except ParseError:
            continue
        found += [figure for figure in own if nodes_of(figure.subject) <= nodes]
    return tuple(found)


def nodes_of(subject: str) -> set[str]:
    """Return the nodes a subject names: "node02/gpu3" one, "node01->node02" two."""
    return {end.split("/")[0] for end in subject.split(ARROW)}


def matrices(figures: Sequence[Figure], order: Sequence[str]) -> list[Matrix]:
    """Return one Matrix for each figure that links have, its nodes in the order of `order`."""
    kinds: dict[tuple[str, str, str, bool], dict[tuple[str, str], float]] = {}
    for figure in figures:
        sender, arrow, receiver = figure.subject.partition(ARROW)
        if arrow:
            kind = (figure.measurement, figure.name, figure.unit, figure.higher_is_better)
            kinds.setdefault(kind, {})[sender, receiver] = figure.value
    found = []
    for (measurement, name, unit, higher), cells in kinds.items():
        nodes = tuple(node for node in order if any(node in pair for pair in cells))
        found.append(Matrix(measurement, name, unit, nodes, cells, higher))
    return found


@dataclass(frozen=True, slots=True)
class Summary:
    """One kind of figure over all its subjects. `worst`, `best`: (subject, value)."""

    measurement: str
    name: str
    unit: str
    count: int
    median: float
    worst: tuple[str, float]
    best: tuple[str, float]


def summaries(figures: Sequence[Figure]) -> list[Summary]:
    """Return one Summary for each kind of figure, in the order of the figures."""
    kinds: dict[tuple[str, str, str, bool], list[tuple[str, float]]] = {}
    for figure in figures:
        kind = (figure.measurement, figure.name, figure.unit, figure.higher_is_better)
        kinds.setdefault(kind, []).append((figure.subject, figure.value))
    found = []
    for (measurement, name, unit, higher), values in kinds.items():
        ranked = sorted(values, key=lambda item: item[1] if higher else -item[1])
        median = statistics.median(value for _, value in values)
        found.append(Summary(measurement, name, unit, len(values), median, ranked[0], ranked[-1]))
    return found


def number(value: float) -> str:
    """Return a figure as a person reads it, of one length for one size: 0.95, 9.41, 24.6, 1,240."""
    if value != value or value in (float("inf"), float("-inf")):
        return "–"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.2g}"


def level_of(measurements: Mapping[str, Any]) -> str:
    """Return the level of a preflight by what it measured, as a bundle tells it: the word of a netcheck.measure.job.Level."""
    words = [one.word for one in Level]
    told = [value.get("level") for value in measurements.values() if isinstance(value, Mapping)]
    depths = [words.index(word) for word in told if isinstance(word, str) and word in words]
    least = Level.DEFAULT if measurements else Level.QUICK
    return words[max([least, *depths])]


def seconds_of(measured: object) -> float:
    """Return how long a planned measurement ran: of each round the job that took longest. 0 for what has no rounds."""
    total = 0.0
    rounds = measured.get("rounds") if isinstance(measured, Mapping) else None
    for one in rounds if isinstance(rounds, Sequence) else ():
        longest = 0.0
        for record in one if isinstance(one, Sequence) else ():
            parts = record.get("parts") if isinstance(record, Mapping) else None
            for part in parts.values() if isinstance(parts, Mapping) else ():
                steps = part.get("steps") if isinstance(part, Mapping) else None
                took = [step.get("duration_s") for step in steps if isinstance(step, Mapping)] if isinstance(steps, list) else []
                longest = max(longest, sum(value for value in took if isinstance(value, (int, float))))
        total += longest
    return total


# --------------------------------------------------------------------------- as JSON, in locks and in the history

DIGITS = 4
"""Significant digits that are kept: far more than any measurement repeats."""


def to_json(figures: Iterable[Figure]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return measurement -> name -> {"unit", "higher_is_better", "noise", "values": {subject: value}}, sorted."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for one in sorted(figures, key=lambda figure: (figure.measurement, figure.name, figure.subject)):
        head = {"unit": one.unit, "higher_is_better": one.higher_is_better, "noise": one.noise, "values": {}}
        kind = found.setdefault(one.measurement, {}).setdefault(one.name, head)
        kind["values"][one.subject] = float(f"{one.value:.{DIGITS}g}")
    return found


def from_json(value: object) -> tuple[Figure, ...]:
    """Return the figures `to_json` wrote. Raises ParseError."""
    return tuple(
        Figure(
            measurement,
            subject,
            name,
            as_float(number, subject),
            as_str(kind.get("unit"), "unit"),
            kind.get("higher_is_better") is not False,
            as_float(kind.get("noise"), "noise"),
        )
        for measurement, names in as_mapping(value, "figures").items()
        for name, kind in ((name, as_mapping(kind, name)) for name, kind in as_mapping(names, measurement).items())
        for subject, number in as_mapping(kind.get("values"), name).items()
    )
