"""Whether every node can open connections to every other, on high ports as launch, NCCL and gloo take them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from netcheck.checks._wording import as_root, listed, on
from netcheck.measure.ports import PortsAnswer, read
from r4090c.model import Cluster, Finding, Status

ID, GROUP, SCOPE, NEEDS = "free-ports", "ports", "measurement", ("ports",)
RULE = "every node connects to a sample of high ports on every other (fail)"
SOURCE = "nccl-tests issue 15; ColossalAI issue 4343"

OVERLAP_MIN_S = 2.0
"""est.: two nodes must have listened and called together for at least two SYNs (0 and 1 s) before a failure is believed."""
EXPECTED = "every node connects to every other on high ports"
WHY = "the ranks meet on a free high port, NCCL and gloo connect to ports the kernel picks: where they are blocked, ranks hang"

Blocked = Mapping[tuple[str, str], Mapping[int, str]]
"""(listener, caller) -> port the listener had open and the caller did not reach -> reason."""


def check(measured: Any, cluster: Cluster) -> Iterator[Finding]:
    """Yield findings whose subject is the node that cannot be reached, or that reaches nobody; else one pass per node.

    Raises ParseError when `measured` is not what `ports.read` takes.
    """
    known = {node.name for node in cluster.nodes}
    answers = {name: answer for name, answer in read(measured).items() if name in known}
    took_part = {name: answer for name, answer in answers.items() if not answer.error}
    blocked = _blocked(took_part)
    mute = frozenset(name for name in took_part if _is_mute(name, took_part, blocked))
    for name, answer in answers.items():
        if answer.error:
            yield Finding(ID, name, Status.UNKNOWN, f"not measured: {answer.error}", EXPECTED, "", answer.next_command)
            continue
        found = list(_faults(name, took_part, blocked, mute, cluster))
        if found:
            yield from found
        elif len(answers) == 1:
            yield Finding(ID, name, Status.SKIP, "not applicable: one node has no peers", EXPECTED)
        elif not answer.bound:
            remedy = on(cluster.node(name), "ss -ltn")
            yield Finding(ID, name, Status.UNKNOWN, "not measured: no port could be opened", EXPECTED, "", remedy)
        else:
            told = f"{len(took_part) - 1} peers connect to {listed(map(str, answer.bound))}"
            yield Finding(ID, name, Status.PASS, told, EXPECTED)


def _faults(
    name: str, took_part: Mapping[str, PortsAnswer], blocked: Blocked, mute: frozenset[str], cluster: Cluster
) -> Iterator[Finding]:
    node, answer = cluster.node(name), took_part[name]
    if name in mute:
        reasons = listed(sorted({text for (_, caller), ports in blocked.items() if caller == name for text in ports.values()}), 2)
        remedy = as_root(node, "nft list ruleset")
        yield Finding(
            ID, name, Status.FAIL, f"connects to no other node: {reasons}", EXPECTED, f"{WHY}; here it is what goes out", remedy
        )
    callers = {caller: ports for (listener, caller), ports in blocked.items() if listener == name and caller not in mute}
    sure = {caller: ports for caller, ports in callers.items() if _overlap_s(answer, took_part[caller]) >= OVERLAP_MIN_S}
    if sure:
        ports = sorted({port for reasons in sure.values() for port in reasons})
        reasons = listed(sorted({text for texts in sure.values() for text in texts.values()}), 2)
        who = "no other node connects" if len(sure) == len(took_part) - 1 > 1 else f"{listed(sure)} cannot connect"
        sources = (
            [cluster.network.subnet] if cluster.network.subnet else sorted(cluster.node(caller).data_address for caller in sure)
        )
        remedy = as_root(node, *(f"ufw allow from {source}" for source in sources))
        yield Finding(ID, name, Status.FAIL, f"{who} to port {listed(map(str, ports))}: {reasons}", EXPECTED, WHY, remedy)
    elif callers:
        observed = f"not measured: {listed(callers)} and this node were not running at the same time"
        yield Finding(ID, name, Status.UNKNOWN, observed, EXPECTED, "", f"r4090c preflight --only {GROUP}")


def _blocked(took_part: Mapping[str, PortsAnswer]) -> Blocked:
    found: dict[tuple[str, str], dict[int, str]] = {}
    for listener, answer in took_part.items():
        for caller, other in took_part.items():
            if caller != listener:
                reached = other.reached.get(listener, {})
                reasons = {port: reached.get(port, "not tried") for port in answer.bound}
                reasons = {port: reason for port, reason in reasons.items() if reason}
                if reasons:
                    found[listener, caller] = reasons
    return found


def _is_mute(caller: str, took_part: Mapping[str, PortsAnswer], blocked: Blocked) -> bool:
    """Return whether `caller` reaches nothing on any of two or more nodes that others do reach: then it is the one at fault."""
    listeners = [name for name in took_part if name != caller and took_part[name].bound]
    if len(listeners) < 2:
        return False
    for listener in listeners:
        if len(blocked.get((listener, caller), {})) < len(took_part[listener].bound):
            return False
        if all((listener, other) in blocked for other in took_part if other not in (listener, caller)):
            return False
        if _overlap_s(took_part[listener], took_part[caller]) < OVERLAP_MIN_S:
            return False
    return True


def _overlap_s(one: PortsAnswer, other: PortsAnswer) -> float:
    """Return how long two nodes were at it at the same time, on the controller's clock."""
    return min(one.ended_s, other.ended_s) - max(one.started_s, other.started_s)
