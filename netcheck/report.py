"""Tell findings: the JSON report (its keys are API) and the screen. Pure: text out, nothing printed."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from netcheck import report_matrix
from netcheck.checks import REGISTRY
from netcheck.figures import Matrix
from netcheck.judge import verdict
from netcheck.measure.figure import Figure
from netcheck.raw import Raw
from r4090c.model import Cluster, Finding, NodeFacts, Status

if TYPE_CHECKING:
    from netcheck.diff import Diff

SCHEMA = "r4090c.preflight/1"
ORDER = (Status.FAIL, Status.UNKNOWN, Status.WARN)
"""What a reader must see first. Passes and skips are counted, and listed only on request."""
COLOURS = {Status.FAIL: "red", Status.UNKNOWN: "magenta", Status.WARN: "yellow", Status.PASS: "green", Status.SKIP: ""}
VERDICT_COLOURS = {"fit": "green", "not fit": "red", "could not tell": "magenta"}
NOT_MEASURED = "not measured"
"""What judge.py says of a check over a measurement that was not taken."""
NAMES_SHOWN = 6
"""Nodes or checks named in one line; more are counted."""
WIDTH_MIN = 60
"""Below it wrapping makes columns of single words; the terminal may break lines itself then."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the screen. `colour` "" is the terminal's own; `strength` is "bold", "dim" or ""."""

    text: str
    colour: str = ""
    strength: str = ""

    @property
    def style(self) -> str:
        """Return both as rich spells them."""
        return f"{self.strength} {self.colour}".strip()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything one preflight found out, as its reports tell it. `diff`: what changed, None when that was not asked."""

    cluster: Cluster
    raw: Raw
    facts: Mapping[str, NodeFacts]
    findings: Sequence[Finding]
    figures: Sequence[Figure]
    level: str
    duration_s: float
    diff: Diff | None = None


def report(
    cluster_name: str,
    started_at: str,
    duration_s: float,
    findings: Sequence[Finding],
    facts_file: str | None,
    *,
    level: str = "",
    figures: Sequence[Figure] = (),
    **more: Any,
) -> dict[str, Any]:
    """Return the JSON report, schema r4090c.preflight/1; `more` are keys that only some reports have ("diff")."""
    return {
        "schema": SCHEMA,
        "cluster": cluster_name,
        "started_at": started_at,
        "duration_s": round(duration_s, 3),
        "verdict": verdict(findings),
        "findings": [{**asdict(finding), "status": finding.status.value} for finding in findings],
        "facts_file": facts_file,
        "level": level,
        "figures": [
            {key: getattr(figure, key) for key in ("measurement", "subject", "name", "value", "unit")} for figure in figures
        ],
        **more,
    }


def screen(
    cluster_name: str,
    node_names: Sequence[str],
    duration_s: float,
    findings: Sequence[Finding],
    *,
    width: int | None,
    verbose: bool = False,
    matrices: Sequence[Matrix] = (),
) -> list[Line]:
    """Return the lines for a person: the verdict, what is not a pass, the bandwidths, and the counts of what is a pass.

    `width` None: no wrapping (the output is not a terminal). `verbose`: passes and skips are listed as well.
    """
    lines = [_headline(cluster_name, node_names, duration_s, findings), Line("")]
    shown = [*ORDER, Status.SKIP, Status.PASS] if verbose else list(ORDER)
    rows = [row for status in shown for row in drawn_together([finding for finding in findings if finding.status is status])]
    if rows:
        lines += [*_table(rows, width), Line("")]
    for matrix in report_matrix.shown(matrices):
        lines += [*map(Line, report_matrix.table(matrix, width)), Line("")]
    return [*lines, *_counts(findings)]


def _headline(cluster_name: str, node_names: Sequence[str], duration_s: float, findings: Sequence[Finding]) -> Line:
    word = verdict(findings)
    nodes = f"{len(node_names)} node{'s' if len(node_names) != 1 else ''}"
    size = f"({nodes}, {len(findings)} finding{'s' if len(findings) != 1 else ''}, {duration_s:.1f} s)"
    return Line(f"{cluster_name}: {word}   {in_words(findings)}   {size}", VERDICT_COLOURS[word], "bold")


def in_words(findings: Sequence[Finding]) -> str:
    """Return how much is wrong and where, in one line."""
    counts = Counter(finding.status for finding in findings)
    culprits = {
        status: list(dict.fromkeys(finding.subject.split("/")[0] for finding in findings if finding.status is status))
        for status in ORDER
    }
    told = []
    if culprits[Status.FAIL]:
        told.append(f"{counts[Status.FAIL]} failed on {_named(culprits[Status.FAIL])}")
    if culprits[Status.UNKNOWN]:
        told.append(f"could not tell about {_named(culprits[Status.UNKNOWN])}" if told else _named(culprits[Status.UNKNOWN]))
    if culprits[Status.WARN]:
        told.append(f"{counts[Status.WARN]} warning{'s' if counts[Status.WARN] > 1 else ''} on {_named(culprits[Status.WARN])}")
    if told:
        return "; ".join(told)
    if verdict(findings) == "fit":
        return "nothing to mend"
    if not findings:
        return "none of these checks concerns this cluster: see network.kind, and gpus of the nodes"
    measured = any(finding.observed == NOT_MEASURED for finding in findings)
    return "nothing was measured: try without --quick, or with --full" if measured else "all was skipped: -v lists why"


@dataclass(frozen=True, slots=True)
class Row:
    """What is told as one: the subjects and checks that say the same."""

    status: Status
    subjects: tuple[str, ...]
    checks: tuple[str, ...]
    finding: Finding
    """The first of the findings that were drawn together."""


def drawn_together(findings: Sequence[Finding]) -> list[Row]:
    """Return what says the same as one row each: many checks unknown on a node that was not reached, one fault on many nodes."""
    by_subject: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        # Only what nobody could read is worth drawing together over checks: then it is the node that matters.
        key = (
            (finding.subject, finding.observed, finding.remedy)
            if finding.status is Status.UNKNOWN
            else (finding.subject, finding.check, str(id(finding)))
        )
        by_subject.setdefault(key, []).append(finding)
    rows: dict[tuple[Any, ...], list[list[Finding]]] = {}
    for same in by_subject.values():
        first = same[0]
        checks = tuple(finding.check for finding in same)
        expected = first.expected if len(same) == 1 else ""
        rows.setdefault((checks, first.observed, expected, first.why), []).append(same)
    return [
        Row(groups[0][0].status, tuple(same[0].subject for same in groups), checks, groups[0][0])
        for (checks, *_), groups in rows.items()
    ]


def _table(rows: Sequence[Row], width: int | None) -> Iterator[Line]:
    cells = [(row.status.value, _named(row.subjects), _named(row.checks, 2)) for row in rows]
    widths = [max(len(cell[column]) for cell in cells) for column in range(3)]
    indent = " " * (widths[0] + 2)
    for row, cell in zip(rows, cells, strict=True):
        finding = row.finding
        start = "  ".join(text.ljust(size) for text, size in zip(cell, widths, strict=True)) + "  "
        good = row.status in (Status.PASS, Status.SKIP)
        expected = f"   expected: {finding.expected}" if finding.expected and len(row.checks) == 1 and not good else ""
        yield from _wrapped(
            start + finding.observed + expected, " " * len(start), width, COLOURS[row.status], "dim" if good else ""
        )
        if good:
            continue
        if finding.why:
            yield from _wrapped(f"{indent}why: {finding.why}", indent + "     ", width, "", "dim")
        if finding.remedy:
            rest = "" if len(row.subjects) == 1 else f"   (likewise: {_named(row.subjects[1:])})"
            yield Line(f"{indent}fix: {finding.remedy}{rest}", "cyan")  # never wrapped: it is to be copied


def _wrapped(text: str, indent: str, width: int | None, colour: str, strength: str) -> Iterator[Line]:
    if width is None or width < WIDTH_MIN:
        yield Line(text, colour, strength)
        return
    if len(indent) > width // 2:
        indent = " " * 8
    for line in textwrap.wrap(text, width, subsequent_indent=indent, drop_whitespace=True, break_on_hyphens=False) or [""]:
        yield Line(line, colour, strength)


def _counts(findings: Sequence[Finding]) -> Iterator[Line]:
    group_of: Mapping[str, str] = {check.id: check.group for check in REGISTRY}
    passed = Counter(group_of.get(finding.check, "other") for finding in findings if finding.status is Status.PASS)
    if passed:
        yield Line(f"passed   {', '.join(f'{group} {count}' for group, count in passed.items())}", COLOURS[Status.PASS])
    skipped: dict[tuple[str, str], int] = Counter(
        (finding.check, finding.observed) for finding in findings if finding.status is Status.SKIP
    )
    if skipped:
        by_reason: dict[str, list[str]] = {}
        for check, reason in skipped:
            by_reason.setdefault(reason, []).append(check)
        told = "; ".join(f"{', '.join(checks)} ({reason})" for reason, checks in by_reason.items())
        yield Line(f"skipped  {told}", "", "dim")


def _named(names: Sequence[str], at_most: int = NAMES_SHOWN) -> str:
    if len(names) <= at_most:
        return ", ".join(names)
    return f"{', '.join(names[: at_most - 1])} +{len(names) - at_most + 1} more"
