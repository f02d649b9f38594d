"""Whether a node has two interfaces in one subnet, so that the order of routes decides where traffic goes."""

from __future__ import annotations

from collections.abc import Iterator

from netcheck.checks._wording import on
from netcheck.data_network import is_up, networks, unfit
from r4090c.model import Cluster, Finding, NetFact, Node, Status

ID, GROUP, NEEDS = "subnet-twice", "nic", ("net",)
RULE = "no two interfaces that are up in one subnet (warn)"
SOURCE = "NCCL issue 1581"


def check(node: Node, net: NetFact, cluster: Cluster) -> Iterator[Finding]:
    """Yield one warning per subnet that two or more UP interfaces share, else one pass.

    IPv4 only, unless the data address is IPv6: two cards on one wire both take a global IPv6 address by themselves. Interfaces
    without a wire of their own (containers' cables, bridges, VPNs) do not count.
    """
    version = 6 if ":" in node.data_address else 4
    holders: dict[str, list[str]] = {}
    for iface in net.ifaces:
        if not is_up(iface) or unfit(iface.name):
            continue
        subnets = {str(address.network) for address in networks(iface) if address.version == version}
        for subnet in sorted(subnets):
            if not subnet.endswith(("/32", "/128")):
                holders.setdefault(subnet, []).append(iface.name)
    twice = {subnet: names for subnet, names in holders.items() if len(names) > 1}
    for subnet, names in twice.items():
        yield Finding(
            ID,
            node.name,
            Status.WARN,
            f"{' and '.join(names)} are both in {subnet}",
            "one interface per subnet",
            "the order of routes decides which of them carries traffic, whatever NCCL_SOCKET_IFNAME says",
            on(node, f"ip route show {subnet}"),
        )
    if not twice:
        yield Finding(
            ID,
            node.name,
            Status.PASS,
            f"{len(holders)} subnet{'s' * (len(holders) != 1)}, one interface each",
            "one interface per subnet",
        )
