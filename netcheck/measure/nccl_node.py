"""What all_reduce reaches between the GPUs of each node, with its data checked. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from netcheck import counters
from netcheck.measure.figure import Figure
from netcheck.measure.job import Level, Round, Setting, read_record, read_rounds
from netcheck.measure.schedule import pick_ports
from netcheck.measure.sweep import TORCH, Member, Run, Sweep, has_torch, make_job, members, program_for, read_run

NAME, TITLE, LEVEL = "nccl-node", "all_reduce inside the nodes", Level.DEFAULT

MIB = 1 << 20
SWEEP = Sweep(64 * MIB, 256 * MIB)
"""Up to 256 MiB: some driver and NCCL pairs are only wrong above a size (NVIDIA/nccl-tests issue 167)."""


def plan(setting: Setting, done: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[Round, ...]:
    """Return one round with all nodes of two or more GPUs; then one with torch where nccl-tests could not be started."""
    teams = {node.name: member for node in setting.nodes for member in members(setting, [node]) if len(member.gpus) > 1}
    if not done:
        return _round(setting, 0, [member for member in teams.values() if program_for([member])])
    if len(done) > 1:
        return ()
    broken = [run.nodes[0] for run in (read_run(read_record(record)) for record in done[0]) if not_started(run)]
    return _round(setting, 1, [teams[name] for name in broken if name in teams and has_torch(teams[name].facts)], TORCH)


def not_started(run: Run) -> bool:
    """Return whether nccl-tests did not even begin: a library is gone, mpirun reaches no node. The torch program may stand in."""
    return run.program != TORCH and run.ranks is None and not run.rows and not run.lost


def _round(setting: Setting, number: int, team: Sequence[Member], program: str | None = None) -> tuple[Round, ...]:
    ports = pick_ports(setting.seed, number, len(team))
    jobs = [
        make_job(member.node.name, [member], SWEEP, port, program=program, counters=(counters.GPUS,))
        for member, port in zip(team, ports, strict=True)
    ]
    return (tuple(jobs),) if jobs else ()


def read(measured: object) -> tuple[Run, ...]:
    """Return the last run of each node. Raises ParseError."""
    runs: dict[str, Run] = {}
    for record in (record for one in read_rounds(measured) for record in one):
        run = read_run(record)
        runs[run.nodes[0]] = run
    return tuple(runs.values())


def figures(measured: object) -> Iterable[Figure]:
    """Return the bus bandwidth of each node's largest size. Raises ParseError."""
    for run in read(measured):
        row = run.largest
        if row is not None and run.passed:
            yield Figure(NAME, run.nodes[0], f"all_reduce of {row.bytes // MIB} MiB", row.busbw_gbyte_s, "GB/s")
