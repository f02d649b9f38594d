"""What is different from an earlier preflight: findings, figures beyond their noise, and what the nodes are. Pure.

A preflight is remembered as a record, JSON:
    {"started_at", "level", "nodes", "verdict", "findings": {check: {status: [subject]}}, "figures": netcheck.figures.to_json,
     "items": netcheck.lock.items_json, "seconds": {measurement: how long it took}}
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from netcheck import figures as figures_module
from netcheck import lock as locks
from netcheck.facts.question import as_list, as_mapping, as_str
from netcheck.figures import nodes_of, number, seconds_of
from netcheck.judge import verdict
from netcheck.measure.figure import Figure
from netcheck.measure.job import Level
from netcheck.raw import Raw
from r4090c.errors import ParseError
from r4090c.model import Cluster, Finding, NodeFacts, Status

HISTORY_MIN = 4
"""est.: so many earlier figures tell how much one differs by itself; with fewer its `noise` does."""
TOLD_MAX = 12
"""est.: changes of one kind that a person reads; the rest is counted, and stands in the JSON."""
SPREAD = 3 * 1.4826
"""Three standard deviations of normally distributed values, from their median absolute deviation (Rousseeuw and Croux 1993)."""


@dataclass(frozen=True, slots=True)
class FindingChange:
    """A finding whose status changed; `was` or `now` "" = there was none about this subject."""

    check: str
    subject: str
    was: str
    now: str

    @property
    def worse(self) -> bool:
        """True when something good was lost, or something bad came."""
        good = ("", Status.PASS.value, Status.SKIP.value)
        return self.now not in good or (self.now == "" and self.was == Status.PASS.value)


@dataclass(frozen=True, slots=True)
class FigureChange:
    """A figure that changed by more than its noise. `change`: 0.12 = 12 % more."""

    measurement: str
    subject: str
    name: str
    unit: str
    was: float
    now: float
    change: float
    worse: bool


@dataclass(frozen=True, slots=True)
class ItemChange:
    """Something a node is (netcheck.lock) that changed; None: not there."""

    node: str
    item: str
    was: locks.Value | None
    now: locks.Value | None


@dataclass(frozen=True, slots=True)
class Diff:
    """What changed since the preflight of `started_at`. `not_compared`: checks only one of the two has looked at."""

    started_at: str
    level: str
    verdict: str
    nodes_added: tuple[str, ...]
    nodes_removed: tuple[str, ...]
    findings: tuple[FindingChange, ...]
    figures: tuple[FigureChange, ...]
    items: tuple[ItemChange, ...]
    not_compared: tuple[str, ...]

    @property
    def empty(self) -> bool:
        """True when nothing changed."""
        return not (self.nodes_added or self.nodes_removed or self.findings or self.figures or self.items)


def record_of(
    cluster: Cluster,
    raw: Raw,
    facts: Mapping[str, NodeFacts],
    findings: Sequence[Finding],
    figures: Sequence[Figure],
    level: str,
) -> dict[str, Any]:
    """Return the record of a preflight: what later ones are compared with."""
    told: dict[str, dict[str, list[str]]] = {}
    for finding in findings:
        told.setdefault(finding.check, {}).setdefault(finding.status.value, []).append(finding.subject)
    nodes = [node for node in cluster.nodes if node.name in raw.reach]
    items = {node.name: locks.items_of(node, cluster, facts[node.name]) for node in nodes if node.name in facts}
    return {
        "started_at": raw.started_at,
        "level": level,
        "nodes": [node.name for node in nodes],
        "verdict": verdict(findings),
        "findings": told,
        "figures": figures_module.to_json(figures),
        "items": locks.items_json({node: own for node, own in items.items() if own}),
        "seconds": {name: round(seconds_of(value), 1) for name, value in raw.measurements.items() if seconds_of(value)},
    }


def last_good(records: Sequence[Mapping[str, Any]], level: str) -> Mapping[str, Any] | None:
    """Return the one of `records` (newest first) to compare a preflight of `level` with: the last fit one that looked as deep.

    Where there is none, the last fit one that did not; None where none was fit.
    """
    fit = [record for record in records if record.get("verdict") == "fit"]
    deep = [record for record in fit if _depth(record.get("level")) >= _depth(level)]
    return next(iter(deep or fit), None)


def _depth(level: object) -> int:
    words = [one.word for one in Level]
    return words.index(level) if isinstance(level, str) and level in words else -1


def compare(before: object, now: object, history: Iterable[object], cluster: Cluster) -> Diff:
    """Return what changed from record `before` to record `now`; `history`: earlier records, which tell the noise of a figure.

    Only nodes and checks that both looked at are compared. Raises ParseError for what is no record.
    """
    old, new = as_mapping(before, "record"), as_mapping(now, "record")
    nodes_old, nodes_new = (_names(one.get("nodes"), "nodes") for one in (old, new))
    both = {*nodes_old} & {*nodes_new}
    findings_old, findings_new = _statuses(old), _statuses(new)
    compared = {check for check, _ in findings_old} & {check for check, _ in findings_new}
    changed = []
    for check, subject in {**findings_old, **findings_new}:
        was, is_now = findings_old.get((check, subject), ""), findings_new.get((check, subject), "")
        if check in compared and was != is_now and _is_about(subject, both, nodes_old, nodes_new):
            changed.append(FindingChange(check, subject, was, is_now))
    return Diff(
        started_at=as_str(old.get("started_at"), "started_at"),
        level=as_str(old.get("level"), "level"),
        verdict=as_str(old.get("verdict"), "verdict"),
        nodes_added=tuple(name for name in nodes_new if name not in both),
        nodes_removed=tuple(name for name in nodes_old if name not in both),
        findings=tuple(changed),
        figures=tuple(_figures(old, new, history, both)),
        items=tuple(_items(old, new, both, cluster)),
        not_compared=tuple(sorted({check for check, _ in findings_old} ^ {check for check, _ in findings_new})),
    )


def _is_about(subject: str, both: set[str], *nodes: Sequence[str]) -> bool:
    """Return whether a subject concerns nodes that both preflights looked at, or no node in particular."""
    concerned = nodes_of(subject) & {name for names in nodes for name in names}
    return concerned <= both


def _statuses(record: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """Return (check, subject) -> status; checks that only said "not measured" about the cluster are left out."""
    return {
        (check, as_str(subject, check)): status
        for check, by_status in as_mapping(record.get("findings"), "findings").items()
        if [*as_mapping(by_status, check)] != [Status.SKIP.value]
        for status, subjects in by_status.items()
        for subject in as_list(subjects, check)
    }


def _names(value: object, what: str) -> list[str]:
    return [as_str(name, what) for name in as_list(value, what)]


def _figures(old: Mapping[str, Any], new: Mapping[str, Any], history: Iterable[object], both: set[str]) -> Iterator[FigureChange]:
    earlier: dict[tuple[str, str, str], list[float]] = {}
    for record in history:
        for one in _figures_in(record):
            earlier.setdefault((one.measurement, one.name, one.subject), []).append(one.value)
    was = {(one.measurement, one.name, one.subject, one.unit): one for one in figures_module.from_json(old.get("figures"))}
    for one in figures_module.from_json(new.get("figures")):
        before = was.get((one.measurement, one.name, one.subject, one.unit))
        if before is None or before.value == 0 or not nodes_of(one.subject) <= both:
            continue
        change = one.value / before.value - 1
        if abs(change) > noise(before, earlier.get((one.measurement, one.name, one.subject), [])):
            worse = (change < 0) == one.higher_is_better
            yield FigureChange(one.measurement, one.subject, one.name, one.unit, before.value, one.value, round(change, 4), worse)


def _figures_in(record: object) -> tuple[Figure, ...]:
    try:
        return figures_module.from_json(as_mapping(record, "record").get("figures"))
    except ParseError:
        return ()  # a damaged older record tells nothing about noise


def noise(figure: Figure, earlier: Sequence[float]) -> float:
    """Return by which share a figure differs when nothing has changed: at least its own noise, more when it was seen to."""
    middle = statistics.median(earlier) if len(earlier) >= HISTORY_MIN else 0.0
    if middle <= 0:
        return figure.noise
    return max(figure.noise, SPREAD * statistics.median(abs(value - middle) for value in earlier) / middle)


def _items(old: Mapping[str, Any], new: Mapping[str, Any], both: set[str], cluster: Cluster) -> Iterator[ItemChange]:
    was, now = (locks.read_items(as_mapping(one.get("items"), "items")) for one in (old, new))
    for node in (node.name for node in cluster.nodes if node.name in both):
        before, after = was.get(node, {}), now.get(node, {})
        # What could not be read this time or that time is a finding, not a change of every item.
        read = {item.partition(".")[0] for item in before} & {item.partition(".")[0] for item in after}
        old_items, new_items = (_of(items, read) for items in (before, after))
        for change in locks.changes(old_items, new_items, cluster.expect):
            yield ItemChange(node, locks.label(change.item), change.was, change.now)


def _of(items: Mapping[str, locks.Value], facts: set[str]) -> dict[str, locks.Value]:
    """Return those items that come from `facts`."""
    return {item: value for item, value in items.items() if item.partition(".")[0] in facts}


def told(diff: Diff) -> list[tuple[str, str]]:
    """Return (colour or "", text) of each line for a person: what is worse first."""
    since = f"since the preflight of {diff.started_at or 'an unknown time'} ({diff.level}, {diff.verdict})"
    if diff.empty:
        return [("green", f"{since}: nothing changed")]
    lines = [("", f"{since}:")]
    for names, word in ((diff.nodes_added, "new"), (diff.nodes_removed, "gone")):
        if names:
            lines.append(("", f"  nodes    {word}: {', '.join(names)}"))
    findings, figures, items = [], [], []
    for one in sorted(diff.findings, key=lambda change: not change.worse):
        words = f"{one.was or 'not there'} → {one.now or 'not there'}"
        findings.append(("yellow" if one.worse else "green", f"  finding  {one.subject}  {one.check}: {words}"))
    for figure in sorted(diff.figures, key=lambda change: (not change.worse, -abs(change.change))):
        words = f"{number(figure.was)} → {number(figure.now)} {figure.unit} ({figure.change:+.0%})"
        what = f"{figure.measurement} {figure.name}".strip()
        figures.append(("yellow" if figure.worse else "green", f"  figure   {figure.subject}  {what}: {words}"))
    by_change: dict[tuple[Any, ...], list[str]] = {}
    for item in diff.items:
        by_change.setdefault((item.item, item.was, item.now), []).append(item.node)
    for (what, was, now), nodes in by_change.items():
        words = " → ".join(map(locks.told, (was, now)))
        items.append(("yellow", f"  changed  {', '.join(nodes)}  {what}: {words}"))
    for kind in (findings, figures, items):
        lines += kind[:TOLD_MAX]
        if len(kind) > TOLD_MAX:
            lines.append(("", f"           and {len(kind) - TOLD_MAX} more (--json tells all)"))
    if diff.not_compared:
        lines.append(("", f"  not compared, as only one of the two looked at it: {', '.join(diff.not_compared)}"))
    return lines
