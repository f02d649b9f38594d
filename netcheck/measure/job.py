"""What a measurement is made of: rounds of jobs that run at the same time, and what is kept of them. Pure.

A measurement module has
    NAME, TITLE   its name (a check names it in NEEDS) and a few words for the progress line
    LEVEL         the lowest level at which it runs
    plan          plan(setting, done) -> the next rounds, given the records of all rounds so far; empty: nothing more to run.
                  Suspects are tested again, and sets are halved, by looking at `done`.
    read          read(measured) -> typed values, or ParseError: the JSON may come from an old or damaged bundle
    figures       optional: figures(measured) -> Figures (netcheck.measure.figure), for reports, locks and comparisons

What is kept of a measurement is JSON: {"level": "full", "rounds": [[record, …], …]}, a record being
    {"name", "data": what the plan noted for the reader, "parts": {node: answer}}
and an answer what `run_on_node.main` returned, or {"error", "unreached": true, "next_command"} where the node did not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

from netcheck.facts.question import as_float, as_int, as_list, as_mapping, as_str
from r4090c.model import Cluster, Node, NodeFacts, PortTest

NOT_INSTALLED = "not installed"
"""`error` of a step whose program is not there (run_on_node.NOT_INSTALLED; a test compares them)."""
NOT_STARTED = "not started"
"""Begins the `error` of a part whose server did not come up, and of a step after one that failed."""


class Level(IntEnum):
    """How much a preflight does: facts (about a second), neighbours in the ring (a minute), everything (minutes)."""

    QUICK = 0
    DEFAULT = 1
    FULL = 2

    @property
    def word(self) -> str:
        """Return the name as options and reports spell it."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Step:
    """One program on one node.

    `argv`: each "{folder}" in a word becomes the part's own temporary folder. `listens_on`: a server; the other parts of the job
    start when it listens on this TCP port. `retry_on`: when one of these texts stands in the output of a failed try, it is
    started again for up to RETRY_FOR_S: the other side may not be ready yet.
    """

    argv: tuple[str, ...]
    timeout_s: float
    listens_on: int | None = None
    retry_on: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the step as `run_on_node` takes it."""
        return {
            "argv": list(self.argv),
            "timeout_s": self.timeout_s,
            "listens_on": self.listens_on,
            "retry_on": list(self.retry_on),
            "env": dict(self.env),
        }


@dataclass(frozen=True, slots=True)
class Part:
    """What one node does in a job: its steps one after the other, with counters read before and after.

    `files`: name -> text, written into the temporary folder. `counters`: globs of files to read before and after (every number
    that stands in them), `watch`: name -> command whose output is kept before and after.
    """

    node: str
    steps: tuple[Step, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    counters: tuple[str, ...] = ()
    watch: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def serves(self) -> bool:
        """True when the other parts wait until this one listens."""
        return bool(self.steps) and self.steps[0].listens_on is not None

    @property
    def limit_s(self) -> float:
        """The longest it may take."""
        return sum(step.timeout_s + (RETRY_FOR_S if step.retry_on else 0.0) for step in self.steps) + OVERHEAD_S

    def to_json(self) -> dict[str, Any]:
        """Return the part as `run_on_node` takes it."""
        return {
            "steps": [step.to_json() for step in self.steps],
            "files": dict(self.files),
            "counters": list(self.counters),
            "watch": {name: list(argv) for name, argv in self.watch.items()},
            "retry_for_s": RETRY_FOR_S,
            "limit_s": self.limit_s,
        }


@dataclass(frozen=True, slots=True)
class Job:
    """Parts that belong together, such as the two ends of a link. `data` is JSON for the reader and is kept in the record."""

    name: str
    parts: tuple[Part, ...]
    data: Mapping[str, Any] = field(default_factory=dict)


Round = tuple[Job, ...]
"""Jobs that run at the same time; no node is in two of them."""

RETRY_FOR_S = 4.0
"""est.: what a loaded node needs to start the next server."""
OVERHEAD_S = 5.0
"""est.: starting Python and reading counters on a loaded node."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a plan may look at. `nodes`: those that answered. `seed`: for ports that two preflights at once must not share.

    `port_tests`: node -> RDMA port -> what was measured before.
    """

    nodes: tuple[Node, ...]
    facts: Mapping[str, NodeFacts]
    cluster: Cluster
    level: Level
    seed: int = 0
    port_tests: Mapping[str, Mapping[str, PortTest]] = field(default_factory=dict)


class MeasurementModule(Protocol):
    """What every planned measurement offers."""

    NAME: str
    TITLE: str
    LEVEL: Level

    def plan(self, setting: Setting, done: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[Round, ...]:
        """Return the next rounds; `done` holds the records of all rounds so far."""
        ...


# --------------------------------------------------------------------------- what came back


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one program did. `rc` None: it did not run to its end, `error` says why (NOT_INSTALLED, a timeout, stopped)."""

    rc: int | None
    stdout: str
    stderr: str
    error: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class PartResult:
    """What one node did. `error`: it took no part, and the rest is empty.

    `before`, `after`: path -> text of the counters; `watched`: name -> (output before, output after).
    """

    error: str = ""
    next_command: str = ""
    steps: tuple[StepResult, ...] = ()
    before: Mapping[str, str] = field(default_factory=dict)
    after: Mapping[str, str] = field(default_factory=dict)
    watched: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Record:
    """One job that was run."""

    name: str
    data: Mapping[str, Any]
    parts: Mapping[str, PartResult]


def read_rounds(measured: object) -> tuple[tuple[Record, ...], ...]:
    """Return the records of every round from a measurement's JSON. Raises ParseError."""
    rounds = as_list(as_mapping(measured, "measurement").get("rounds"), "rounds")
    return tuple(tuple(read_record(record) for record in as_list(one, "round")) for one in rounds)


def read_record(value: object) -> Record:
    """Return one record from its JSON. Raises ParseError."""
    record = as_mapping(value, "record")
    parts = as_mapping(record.get("parts"), "parts")
    return Record(
        name=as_str(record.get("name"), "name"),
        data=as_mapping(record.get("data"), "data"),
        parts={node: read_part(part, node) for node, part in parts.items()},
    )


def read_part(value: object, what: str = "answer") -> PartResult:
    """Return what one node did from its JSON. Raises ParseError."""
    part = as_mapping(value, what)
    if "error" in part:
        return PartResult(as_str(part["error"], "error"), as_str(part.get("next_command", ""), "next_command"))
    watched = as_mapping(part.get("watched", {}), "watched")
    return PartResult(
        steps=tuple(_step(as_mapping(step, "step")) for step in as_list(part.get("steps"), "steps")),
        before=_texts(part.get("before", {}), "before"),
        after=_texts(part.get("after", {}), "after"),
        watched={name: _pair(as_list(texts, name), name) for name, texts in watched.items()},
    )


def _step(step: Mapping[str, Any]) -> StepResult:
    rc = step.get("rc")
    return StepResult(
        rc=None if rc is None else as_int(rc, "rc"),
        stdout=as_str(step.get("stdout"), "stdout"),
        stderr=as_str(step.get("stderr"), "stderr"),
        error=as_str(step.get("error") or "", "error"),
        duration_s=as_float(step.get("duration_s"), "duration_s"),
    )


def _texts(value: object, what: str) -> dict[str, str]:
    return {path: as_str(text, path) for path, text in as_mapping(value, what).items()}


def _pair(texts: list[Any], name: str) -> tuple[str, str]:
    both = [as_str(text, name) for text in texts]
    return both[0] if both else "", both[1] if len(both) > 1 else ""
