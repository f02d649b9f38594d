"""Whether RDMA packets are as large as they can be."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from netcheck.checks._wording import as_root, on, origin
from netcheck.data_network import data_iface, peers_of, rdma_ports
from r4090c.model import Cluster, Finding, NetFact, Node, RdmaMtu, RdmaPort, Status

ID, GROUP, NEEDS = "rdma-mtu", "rdma", ("rdma_mtu", "rdma", "net")
RULE = "active MTU of the RDMA ports on the data network at least {rdma_mtu_min} (warn)"
SOURCE = "ibv_query_port(3); ceilings of 100 Gbit/s RoCE by MTU"

NETDEV_MTU = 4200
"""For a RoCE MTU of 4096: that, and the headers of GRH or IP, UDP, BTH and the longest extension (iboe_get_mtu of the kernel)."""
JUMBO = 9000
"""What cards and switches of this class take, and what the field calls jumbo frames."""


def applies(node: Node, cluster: Cluster) -> bool:
    """Only a cluster whose network is stated to be RoCE or InfiniBand has RDMA packets."""
    return cluster.network.rdma


def check(
    node: Node, mtus: tuple[RdmaMtu, ...], ports: tuple[RdmaPort, ...], net: NetFact, cluster: Cluster
) -> Iterator[Finding]:
    """Yield one warning per active port with smaller packets (subject node/port), else one pass."""
    least = cluster.expect.rdma_mtu_min
    expected = f"at least {least}{origin(cluster, 'rdma_mtu_min')}"
    iface, _ = data_iface(net, node, peers_of(node, cluster))
    told = {mtu.name: mtu.active_bytes for mtu in mtus}
    wanted = [port for port in rdma_ports(node, ports, net, iface, cluster) if port.state == "ACTIVE"]
    if not wanted:
        remedy = f"r4090c preflight --only rdma-port --nodes {node.name}"
        yield Finding(ID, node.name, Status.SKIP, "not applicable: no active RDMA port on the data network", expected, "", remedy)
        return
    faults = 0
    for port in wanted:
        active = told.get(port.name)
        if active is None:
            faults += 1
            remedy = on(node, f"ibv_devinfo -d {shlex.quote(port.hca)}")
            yield Finding(ID, f"{node.name}/{port.name}", Status.UNKNOWN, "not read: active_mtu", expected, "", remedy)
        elif active < least:
            faults += 1
            why = f"every packet has its headers: with 1024 bytes they take 7 % of the line; {_cause(cluster)}"
            yield Finding(
                ID, f"{node.name}/{port.name}", Status.WARN, f"active MTU {active}", expected, why, _mended(node, port, cluster)
            )
    if not faults:
        yield Finding(ID, node.name, Status.PASS, f"active MTU {min(told[port.name] or 0 for port in wanted)}", expected)


def _cause(cluster: Cluster) -> str:
    if cluster.network.kind == "infiniband":
        return "the subnet manager sets it for the whole fabric"
    stated = cluster.network.mtu
    also = f" and in cluster.yaml (mtu: {stated})" if stated is not None and stated < NETDEV_MTU else ""
    return f"RoCE takes what fits its interface: raise the MTU to {NETDEV_MTU} or more, on the switch, then on all nodes{also}"


def _mended(node: Node, port: RdmaPort, cluster: Cluster) -> str:
    """Return the command that raises the MTU of the port's interface; where that is not what limits it, the one that shows it."""
    if cluster.network.kind == "infiniband" or port.netdev is None:
        return on(node, f"ibv_devinfo -d {shlex.quote(port.hca)}")
    return as_root(node, f"ip link set {shlex.quote(port.netdev)} mtu {max(cluster.network.mtu or 0, JUMBO)}")
