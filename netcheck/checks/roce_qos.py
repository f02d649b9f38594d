"""Whether all nodes treat RoCE traffic alike: priority flow control (PFC), DSCP priorities, congestion control (ECN).

Without PFC, or with ECN alone, RoCE can work; what cannot work is a network whose ends disagree. So the nodes are compared with
each other and nothing more is demanded.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from netcheck.checks._majority import majority, others
from netcheck.checks._wording import as_root, on, sudo
from netcheck.data_network import cards_of, chosen_iface
from r4090c.model import Cluster, Finding, IfaceQos, NetFact, Node, Status

ID, GROUP, SCOPE, NEEDS = "roce-qos", "rdma", "cluster", ("qos", "net")
RULE = "PFC, DSCP and ECN priorities of the data interface the same on all nodes (warn)"
SOURCE = "IEEE 802.1Qbb and 802.1Qaz; dcb(8)"

EXPECTED = "the same flow and congestion control on all nodes"
WHY = {
    "pfc": "a switch pauses one node's priority and drops another's: the nodes that do not pause lose packets under load",
    "dscp": "the switch sorts packets by DSCP: this node's land in another queue, without its flow control",
    "ecn": "a sender that does not slow down when the switch asks fills the queues of all others",
}
NOT_TOLD = "not told"


def applies(node: Node, cluster: Cluster) -> bool:
    """Only a cluster whose network is stated to be RoCE needs it; InfiniBand has credits of its own."""
    return cluster.network.kind == "roce"


def check(qos: Mapping[str, tuple[IfaceQos, ...]], nets: Mapping[str, NetFact], cluster: Cluster) -> Iterator[Finding]:
    """Yield one warning per setting that differs from most nodes', else one pass or skip per node."""
    settings = {name: _settings(cluster.node(name), qos[name], nets[name], cluster) for name in qos}
    faults: dict[str, list[Finding]] = {name: [] for name in qos}
    for what, why in WHY.items():
        values = {name: own[1][what] for name, own in settings.items()}
        agreed = majority(values)
        for name in agreed.odd:
            right = f"{agreed.value}, as on most nodes" if agreed.value else f"one setting; {others(values, name)} (no majority)"
            node, (iface, _) = cluster.node(name), settings[name]
            remedy = _set(node, iface, what, agreed.value if values[name] != NOT_TOLD else None)
            faults[name].append(Finding(ID, f"{name}/{what}", Status.WARN, f"{what} {values[name]}", right, why, remedy))
    for name, (iface, own) in settings.items():
        told = ", ".join(f"{what} {value}" for what, value in own.items() if value != NOT_TOLD)
        one = (
            Finding(ID, name, Status.PASS, f"{iface}: {told}", EXPECTED)
            if told
            else Finding(ID, name, Status.SKIP, "not told: the driver shows neither PFC nor ECN", EXPECTED)
        )
        yield from faults[name] or [one]


def _settings(node: Node, qos: tuple[IfaceQos, ...], net: NetFact, cluster: Cluster) -> tuple[str, dict[str, str]]:
    """Return (interface, what -> setting as text) of the card under the data interface."""
    iface = chosen_iface(net, node, cluster)
    names = [iface.name, *(card.name for card in cards_of(iface, net))] if iface is not None else []
    found = next((one for wanted in names for one in qos if one.iface == wanted), None)
    if found is None:
        return iface.name if iface is not None else "", dict.fromkeys(WHY, NOT_TOLD)
    pairs = None if found.dscp is None else [f"{point}:{priority}" for point, priority in found.dscp]
    return found.iface, {"pfc": _text(found.pfc), "dscp": _text(pairs), "ecn": _text(found.ecn)}


def _text(values: object) -> str:
    if values is None:
        return NOT_TOLD
    assert isinstance(values, (list, tuple))
    return "on " + " ".join(map(str, values)) if values else "off"


def _set(node: Node, iface: str, what: str, wanted: str | None) -> str:
    """Return the command that sets what most nodes have; where nobody knows what is right, the one that shows it."""
    device = shlex.quote(iface)
    priorities = (wanted or "").removeprefix("on ").split() if (wanted or "").startswith("on ") else []
    if wanted in (None, NOT_TOLD):
        return on(node, f"dcb pfc show dev {device}; dcb app show dev {device}")
    if what == "pfc":
        return as_root(node, f"dcb pfc set dev {device} prio-pfc all:off {' '.join(f'{one}:on' for one in priorities)}".rstrip())
    if what == "dscp":
        flush = f"dcb app flush dev {device} dscp-prio"
        return (
            as_root(node, flush, f"dcb app add dev {device} dscp-prio {' '.join(priorities)}")
            if priorities
            else as_root(node, flush)
        )
    switches = f"/sys/class/net/{device}/ecn/roce_*/enable"
    write = f"{sudo(node)}tee {switches}"
    commands = [f"printf 0 | {write}/*", *(f"printf 1 | {write}/{one}" for one in priorities)]
    return on(node, " && ".join(commands))
