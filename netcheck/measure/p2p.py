"""Does P2P between GPUs deliver what the driver grants: the same all_reduce with P2P and without, its values checked. Pure.

With the torch of the training environment: the proof is about the NCCL that training uses. The way through host memory comes
first, since a hang of the other may take the card with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from netcheck.measure.job import Level, Round, Setting, read_record, read_rounds
from netcheck.measure.nccl_node import MIB
from netcheck.measure.schedule import pick_ports
from netcheck.measure.sweep import TORCH, Run, Sweep, has_torch, make_job, members, read_run
from netcheck.rank_env import P2P_LEVEL
from r4090c.errors import ParseError

NAME, TITLE, LEVEL = "p2p", "GPU to GPU, with P2P and without", Level.DEFAULT

SWEEP = Sweep(8 * MIB, 128 * MIB, factor=4)
OFF, ON = "off", "on"
ARMS = (OFF, ON, ON, OFF)
"""One after the other, so that what drifts hits both."""


@dataclass(frozen=True, slots=True)
class Arms:
    """The runs of one node, without P2P and with it."""

    node: str
    off: tuple[Run, ...]
    on: tuple[Run, ...]


def plan(setting: Setting, done: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[Round, ...]:
    """Return the next arm on every node that is granted P2P and has not failed so far."""
    if len(done) >= len(ARMS):
        return ()
    failed = {run.nodes[0] for run in (read_run(read_record(record)) for one in done for record in one) if not run.passed}
    jobs = []
    arm = ARMS[len(done)]
    ports = iter(pick_ports(setting.seed, len(done), len(setting.nodes)))
    for node in setting.nodes:
        (member,) = members(setting, [node])
        grant = member.facts.gpu_p2p.value
        if node.name in failed or grant is None or not grant.granted or len(member.gpus) < 2 or not has_torch(member.facts):
            continue
        env = {"NCCL_P2P_DISABLE": "1"} if arm == OFF else {"NCCL_P2P_LEVEL": P2P_LEVEL, **member.env, "NCCL_P2P_DISABLE": "0"}
        jobs.append(make_job(f"{node.name} {arm}", [member], SWEEP, next(ports), program=TORCH, env=env, data={"arm": arm}))
    return (tuple(jobs),) if jobs else ()


def read(measured: object) -> tuple[Arms, ...]:
    """Return the arms of every node. Raises ParseError."""
    runs: dict[str, dict[str, list[Run]]] = {}
    for record in (record for one in read_rounds(measured) for record in one):
        run, arm = read_run(record), record.data.get("arm")
        if arm not in (OFF, ON):
            raise ParseError(f"{record.name}: not an arm of the test")
        runs.setdefault(run.nodes[0], {OFF: [], ON: []})[arm].append(run)
    return tuple(Arms(node, tuple(arms[OFF]), tuple(arms[ON])) for node, arms in runs.items())
