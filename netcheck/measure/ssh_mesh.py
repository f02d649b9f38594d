"""Does every node log in to every node, itself included, by its name and without a question, as launchers do. Pure.

By name alone, as mpirun, pdsh and deepspeed's launcher do: where the name is not enough (another port, another user),
`provision ssh-trust` has written it into ~/.ssh/config. No agent is used, and host keys must be known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from netcheck.facts.question import as_list, as_str
from netcheck.measure.commands import Command, CommandResult, failure, part, results
from netcheck.measure.job import NOT_INSTALLED, Job, Level, Record, Round, Setting, read_rounds
from netcheck.measure.schedule import ring_pairs
from r4090c.errors import ParseError

NAME, TITLE, LEVEL = "ssh-mesh", "logins from node to node", Level.DEFAULT

# fmt: off
SSH = (
    "ssh", "-n", "-T", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "StrictHostKeyChecking=yes",
    "-o", "UpdateHostKeys=no", "-o", "ControlMaster=no", "-o", "ControlPath=none",
)
# fmt: on
"""UpdateHostKeys=no: else ssh itself would write into known_hosts. No ControlPath: a connection kept from before hides what is
wrong now."""
TIMEOUT_S = 10.0
"""ssh gives up connecting after 5 s; est.: PAM and LDAP may take as long again."""
AT_ONCE = 4
"""A node starts this many logins at a time, each node beginning with another peer: sshd drops some beyond 10 (MaxStartups)."""
DROPPED = ("kex_exchange_identification", "Connection reset", "Connection closed by")
"""What ssh says when sshd dropped it before the login, as it does beyond MaxStartups: worth another try."""


@dataclass(frozen=True, slots=True)
class Login:
    """One login from `source` to `target`. `fault`: why it does not work, "" when it does. `noise`: what it printed on stdout."""

    source: str
    target: str
    fault: str
    noise: str

    @property
    def works(self) -> bool:
        """True when a launcher can use it."""
        return not self.fault and not self.noise


@dataclass(frozen=True, slots=True)
class Mesh:
    """All logins. `absent`: nodes without an ssh client. `failed`: node -> why it told nothing, with the command to look."""

    logins: tuple[Login, ...]
    absent: tuple[str, ...]
    failed: Mapping[str, tuple[str, str]]


def plan(setting: Setting, done: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[Round, ...]:
    """Return one round: every node logs in to itself and to its neighbours in the ring, or to all at Level.FULL."""
    names = [node.name for node in setting.nodes]
    if done or not names:
        return ()
    neighbours = {name: {name} for name in names}
    for one, other in (pair for pairs in ring_pairs(names) for pair in pairs):
        neighbours[one].add(other)
        neighbours[other].add(one)
    jobs = []
    for place, name in enumerate(names):
        turned = names[place:] + names[:place]
        targets = [peer for peer in turned if setting.level >= Level.FULL or peer in neighbours[name]]
        commands = [Command((*SSH, peer, "true"), TIMEOUT_S, DROPPED) for peer in targets]
        jobs.append(Job(name, (part(name, commands, AT_ONCE),), {"targets": targets}))
    return (tuple(jobs),)


def read(measured: object) -> Mesh:
    """Return what came of the logins. Raises ParseError."""
    logins: list[Login] = []
    absent: list[str] = []
    failed: dict[str, tuple[str, str]] = {}
    for record in (record for one in read_rounds(measured) for record in one):
        for node, done in record.parts.items():
            tried = results(done)
            if not tried:
                failed[node] = failure(done)
            elif tried[0].error == NOT_INSTALLED:
                absent.append(node)
            else:
                logins += _logins(node, record, tried)
    return Mesh(tuple(logins), tuple(absent), failed)


def _logins(node: str, record: Record, tried: Sequence[CommandResult]) -> Iterator[Login]:
    targets = [as_str(target, "target") for target in as_list(record.data.get("targets"), "targets")]
    if len(targets) != len(tried):
        raise ParseError(f"{NAME}: {len(tried)} answers to {len(targets)} logins")
    for target, one in zip(targets, tried, strict=True):
        fault = "" if one.rc == 0 else (_last(one.stderr) or one.error or f"exit status {one.rc}")
        yield Login(node, target, fault, _last(one.stdout) if not fault else "")


def _last(text: str) -> str:
    return next((line.strip()[-200:] for line in reversed(text.splitlines()) if line.strip()), "")
