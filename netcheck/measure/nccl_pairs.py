"""What all_reduce reaches between one GPU each of every two nodes, with its data checked: the links as NCCL uses them. Pure.

One GPU a node, near the network card: so that what limits is the link, and not the way between the GPUs of a node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from netcheck.expected import interface
from netcheck.measure.figure import Figure
from netcheck.measure.job import Level, Round, Setting, read_record, read_rounds
from netcheck.measure.nccl_node import MIB, not_started
from netcheck.measure.schedule import all_pairs, disjoint, pick_ports
from netcheck.measure.sweep import TORCH, Member, Run, Sweep, fitted, has_torch, make_job, members, program_for, read_run
from netcheck.nccl_expected import inter_limits, slowest_rate_gbit_s

NAME, TITLE, LEVEL = "nccl-pairs", "all_reduce between pairs", Level.FULL

SWEEP = Sweep(32 * MIB, 128 * MIB)
AGAIN_MAX = 6
"""est.: rounds of pairs that are tried again; more are no longer single faults."""


def plan(setting: Setting, done: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[Round, ...]:
    """Return rounds of all pairs of nodes with GPUs; then the pairs that failed or were slow once more, which then counts."""
    team = {member.node.name: near_the_card(member, setting) for member in members(setting, setting.nodes) if member.gpus}
    if not done:
        first = [_round(setting, number, pairs, team) for number, pairs in enumerate(all_pairs(list(team)))]
        return tuple(one for one in first if one)
    records = [record for one in done for record in one]
    if any(record["data"].get("again") for record in records):
        return ()
    wanted: dict[tuple[str, str], str | None] = {}
    for run in (read_run(read_record(record)) for record in records):
        one, other = run.nodes
        if not_started(run) and all(has_torch(team[name].facts) for name in run.nodes):
            wanted[one, other] = TORCH
        elif not run.passed or _slow(run, setting):
            wanted[one, other] = run.program
    rounds = disjoint(list(wanted))[:AGAIN_MAX]
    return tuple(_round(setting, len(done) + number, pairs, team, wanted) for number, pairs in enumerate(rounds))


def rate_of(names: Sequence[str], setting: Setting) -> float | None:
    """Return the rate of the slowest of `names`, None where it is not known."""
    nets = {name: setting.facts[name].net.value for name in names}
    rdma = {name: setting.facts[name].rdma.value for name in names}
    return slowest_rate_gbit_s(names, nets, rdma, setting.cluster)


def _slow(run: Run, setting: Setting) -> bool:
    rate, row = rate_of(run.nodes, setting), run.largest
    if rate is None or row is None:
        return False
    return row.busbw_gbyte_s < inter_limits(rate, setting.cluster.expect, backend=run.backend).warn_gbyte_s


def _round(
    setting: Setting,
    number: int,
    pairs: Sequence[tuple[str, str]],
    team: Mapping[str, Member],
    again: Mapping[tuple[str, str], str | None] | None = None,
) -> Round:
    jobs = []
    for (one, other), port in zip(pairs, pick_ports(setting.seed, number, len(pairs)), strict=True):
        program = (again or {}).get((one, other)) or program_for([team[one], team[other]])
        if program is not None:
            data = {"again": again is not None}
            sweep = fitted(SWEEP, rate_of((one, other), setting))
            jobs.append(make_job(f"{one}-{other}", [team[one], team[other]], sweep, port, program=program, data=data))
    return tuple(jobs)


def near_the_card(member: Member, setting: Setting) -> Member:
    """Return `member` with one GPU: one on the NUMA node of its network card, the first where that is not known."""
    iface = interface(member.node, member.facts.net.value, setting.cluster)
    cards = [device for device in member.facts.pci.value or () if iface is not None and iface.name in device.netdevs]
    places = {card.numa for card in cards if card.numa is not None and card.numa >= 0}
    near = {str(gpu.index) for gpu in member.facts.gpus.value or () if gpu.numa in places}
    return replace(member, gpus=(next((gpu for gpu in member.gpus if gpu in near), member.gpus[0]),))


def read(measured: object) -> tuple[Run, ...]:
    """Return the last run of every pair. Raises ParseError."""
    runs: dict[tuple[str, ...], Run] = {}
    for record in (record for one in read_rounds(measured) for record in one):
        run = read_run(record)
        runs[run.nodes] = run
    return tuple(runs.values())


def figures(measured: object) -> Iterable[Figure]:
    """Return the bus bandwidth of each pair's largest size. Raises ParseError."""
    for run in read(measured):
        row = run.largest
        if row is not None and run.passed:
            yield Figure(NAME, "->".join(run.nodes), f"all_reduce of {row.bytes // MIB} MiB", row.busbw_gbyte_s, "GB/s")
