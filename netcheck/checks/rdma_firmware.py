"""Whether RDMA cards of one kind run one firmware on all nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from netcheck.checks._majority import majority, others
from netcheck.checks._wording import as_root
from netcheck.data_network import data_iface, peers_of, rdma_ports
from r4090c.model import Cluster, Finding, NetFact, Node, RdmaPort, Status

ID, GROUP, SCOPE, NEEDS = "rdma-firmware", "rdma", "cluster", ("rdma", "net")
RULE = "one firmware on all RDMA cards of one kind on the data network (warn)"
SOURCE = "est."

EXPECTED = "one firmware on all cards of one kind"


def applies(node: Node, cluster: Cluster) -> bool:
    """Only a cluster whose network is stated to be RoCE or InfiniBand has RDMA cards that matter."""
    return cluster.network.rdma


def check(ports: Mapping[str, tuple[RdmaPort, ...]], nets: Mapping[str, NetFact], cluster: Cluster) -> Iterator[Finding]:
    """Yield one warning per node and kind of card that differs, else one pass or skip per node."""
    firmware = {name: _firmware(cluster.node(name), ports[name], nets[name], cluster) for name in ports}
    boards = sorted({board for own in firmware.values() for board in own})
    faults: dict[str, list[Finding]] = {name: [] for name in ports}
    for board in boards:
        versions = {name: own[board] for name, own in firmware.items() if board in own}
        agreed = majority(versions)
        for name in agreed.odd:
            right = (
                f"{agreed.value}, as on most nodes"
                if agreed.value
                else f"one firmware on all; {others(versions, name)} (no majority)"
            )
            newest = max(versions.values(), key=lambda text: [int(number) for number in re.findall(r"\d{1,9}", text)])
            why = f"cards that differ answer loss and congestion in different ways; bring all to one version, {newest} or newer"
            kind = f" ({board})" if board else ""
            remedy = as_root(cluster.node(name), "devlink dev info")
            faults[name].append(Finding(ID, name, Status.WARN, f"firmware {versions[name]}{kind}", right, why, remedy))
    for name, own in firmware.items():
        told = ", ".join(dict.fromkeys(own.values()))
        one = (
            Finding(ID, name, Status.PASS, f"firmware {told}", EXPECTED)
            if told
            else Finding(ID, name, Status.SKIP, "not told: no RDMA card on the data network with a firmware of its own", EXPECTED)
        )
        yield from faults[name] or [one]


def _firmware(node: Node, ports: tuple[RdmaPort, ...], net: NetFact, cluster: Cluster) -> dict[str, str]:
    """Return kind of card -> its firmware, or all of them where a node has several."""
    iface, _ = data_iface(net, node, peers_of(node, cluster))
    found: dict[str, set[str]] = {}
    for port in rdma_ports(node, ports, net, iface, cluster):
        if port.firmware:
            found.setdefault(port.board or "", set()).add(port.firmware)
    return {board: ", ".join(sorted(versions)) for board, versions in found.items()}
