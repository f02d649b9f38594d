"""What all_reduce reaches over all nodes at once, with its data checked; when that fails, who makes it fail. Pure.

All GPUs of all nodes that have any, with NCCL; on a cluster without GPUs one rank a node with gloo. A failure is followed by runs
on halves of the nodes, and smaller, until the node or link is found (netcheck.measure.halving).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from netcheck import counters
from netcheck.expected import interface
from netcheck.measure.figure import Figure
from netcheck.measure.halving import Verdict, search
from netcheck.measure.job import Job, Level, Round, Setting, read_record, read_rounds
from netcheck.measure.nccl_node import MIB, not_started
from netcheck.measure.nccl_pairs import rate_of
from netcheck.measure.schedule import pick_ports
from netcheck.measure.sweep import (
    TORCH,
    Member,
    Run,
    Sweep,
    can_take_part,
    fitted,
    has_torch,
    make_job,
    members,
    program_for,
    read_run,
)

NAME, TITLE, LEVEL = "nccl-all", "all_reduce over all nodes", Level.FULL

SWEEP_NCCL = Sweep(64 * MIB, 256 * MIB)
SWEEP_GLOO = Sweep(1 * MIB, 16 * MIB, join_s=120.0)
"""gloo reaches its bandwidth at 16 MiB (measured on a shaped 1 Gbit/s link); larger ones only take longer on CPUs.

join_s, est.: virtual nodes that share the cores of one machine need long to import torch all at once.
"""
SEARCH_S = 600.0
"""est.: looking for the culprit of a failure ends then, with what is known."""


@dataclass(frozen=True, slots=True)
class AllNodes:
    """What was measured. `whole` None: nothing was run. `verdict`: who makes it fail, where it failed and was looked for.

    `tests`: the runs on parts of the nodes, in their order.
    """

    whole: Run | None
    tests: tuple[Run, ...]
    verdict: Verdict | None


def plan(setting: Setting, done: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[Round, ...]:
    """Return the run of all; when it failed, the next runs on parts of the nodes, until the culprit is found."""
    return plan_with(setting, done)


def plan_with(
    setting: Setting, done: Sequence[Sequence[Mapping[str, Any]]], gloo: Sweep = SWEEP_GLOO, nccl: Sweep = SWEEP_NCCL
) -> tuple[Round, ...]:
    """Return what `plan` does, with other sizes and times."""
    team = taking_part(setting)
    if len(team) < 2:
        return ()
    names = [member.node.name for member in team]
    sweep = fitted(nccl, rate_of(names, setting)) if all(member.gpus for member in team) else gloo
    program = program_for(team)
    runs = [read_run(read_record(record)) for one in done for record in one]
    if any(not_started(run) for run in runs) and all(has_torch(member.facts) for member in team):
        program, runs = TORCH, [run for run in runs if run.program == TORCH]
    if program is None:
        return ()
    if not runs:
        return ((_job(setting, len(done), "all", team, sweep, program),),)
    asked = Verdict() if runs[0].passed else _next(runs)
    if isinstance(asked, Verdict) or _took_s(done) > SEARCH_S:
        return ()
    by_name = {member.node.name: member for member in team}
    ports = pick_ports(setting.seed, len(done), len(asked))
    return (
        tuple(
            _job(setting, len(done), "+".join(part), [by_name[name] for name in part], sweep, program, port)
            for part, port in zip(asked, ports, strict=True)
        ),
    )


def _took_s(done: Sequence[Sequence[Mapping[str, Any]]]) -> float:
    """Return how long the rounds took."""
    parts = [[part for record in one for part in read_record(record).parts.values()] for one in done]
    return sum(max((step.duration_s for part in one for step in part.steps), default=0.0) for one in parts)


def _next(runs: Sequence[Run]) -> tuple[tuple[str, ...], ...] | Verdict:
    """Return the sets of nodes to run next after a run of all that failed, or who is to blame."""
    whole, *tests = runs
    lost = {node for run in runs for node in run.lost}
    return search(whole.nodes, {frozenset(run.nodes): run.passed for run in tests}, whole.suspects, lost)


def taking_part(setting: Setting) -> tuple[Member, ...]:
    """Return the nodes that take part: those with GPUs where there are two such, else all, with one rank on their CPUs."""
    team = [member for member in members(setting, setting.nodes) if can_take_part(member)]
    with_gpus = [member for member in team if member.gpus]
    if len(with_gpus) > 1:
        return tuple(with_gpus)
    if any(member.node.gpus for member in team):
        return ()  # GPUs are wished, and the driver shows too few: the gpu checks tell that
    return tuple(replace(member, gpus=()) for member in team if has_torch(member.facts))


def _job(
    setting: Setting,
    number: int,
    name: str,
    team: Sequence[Member],
    sweep: Sweep,
    program: str,
    port: int | None = None,
) -> Job:
    ifaces = {interface(member.node, member.facts.net.value, setting.cluster) for member in team}
    files = counters.globs(tuple(sorted({iface.name for iface in ifaces if iface is not None})) or ("*",), ())
    port = port or pick_ports(setting.seed, number, 1)[0]
    return make_job(name, team, sweep, port, program=program, counters=files)


def read(measured: object) -> AllNodes:
    """Return what was measured. Raises ParseError."""
    runs = [read_run(record) for one in read_rounds(measured) for record in one]
    if any(not_started(run) for run in runs):
        runs = [run for run in runs if run.program == TORCH] or runs
    if not runs:
        return AllNodes(None, (), None)
    whole, *tests = runs
    if whole.passed:
        return AllNodes(whole, tuple(tests), None)
    asked = _next(runs)
    return AllNodes(whole, tuple(tests), asked if isinstance(asked, Verdict) else None)


def figures(measured: object) -> Iterable[Figure]:
    """Return the bus bandwidth of the largest size, told of the node that led. Raises ParseError."""
    whole = read(measured).whole
    row = whole.largest if whole is not None and whole.passed else None
    if whole is not None and row is not None:
        name = f"all_reduce of {row.bytes // MIB} MiB, {whole.asked} ranks"
        yield Figure(NAME, whole.nodes[0], name, row.busbw_gbyte_s, "GB/s")
