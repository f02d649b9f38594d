"""Whether there is an active RDMA port on the data network, with a GID that NCCL can use."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from netcheck.checks._wording import as_root, listed, on
from netcheck.data_network import data_iface, peers_of, rdma_ports
from netcheck.facts.rdma import roce_v2_ipv4
from r4090c.model import Cluster, Finding, NetFact, Node, RdmaPort, Status

ID, GROUP, NEEDS = "rdma-port", "rdma", ("rdma", "net")
ABSENT = Status.UNKNOWN


def applies(node: Node, cluster: Cluster) -> bool:
    """Only a cluster whose network is stated to be RoCE or InfiniBand needs RDMA."""
    return cluster.network.kind in ("roce", "infiniband")


def check(node: Node, ports: tuple[RdmaPort, ...], net: NetFact, cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding per fault of the ports on the data network, else one pass naming them."""
    kind = cluster.network.kind
    expected = f"an ACTIVE {'RoCE' if kind == 'roce' else 'InfiniBand'} port on the data network"
    if not ports:
        why = "no driver claims an RDMA device: NCCL falls back to TCP in silence"
        remedy = as_root(node, "modprobe mlx5_ib", "rdma link")
        yield Finding(ID, node.name, Status.FAIL, "no RDMA device", expected, why, remedy)
        return
    iface, _ = data_iface(net, node, peers_of(node, cluster))
    fitting = rdma_ports(node, ports, net, iface, cluster)
    if not fitting:
        seen = listed(f"{port.name} ({port.link_layer}, {port.netdev or 'no interface'})" for port in ports)
        why = "the data interface has no RDMA port of that kind: NCCL falls back to TCP in silence"
        yield Finding(ID, node.name, Status.FAIL, f"only {seen}", expected, why, on(node, "rdma link"))
        return
    faults = [finding for port in fitting for finding in _faults(node, port, expected, cluster)]
    yield from faults or [Finding(ID, node.name, Status.PASS, listed(port.name for port in fitting), expected)]


def _faults(node: Node, port: RdmaPort, expected: str, cluster: Cluster) -> Iterator[Finding]:
    subject = f"{node.name}/{port.name}"
    if port.state != "ACTIVE":
        why = "NCCL leaves out a port that is not ACTIVE: traffic falls back to another card or to TCP"
        observed = f"{port.state}, physically {port.phys_state}"
        remedy = as_root(node, f"ip link set {shlex.quote(port.netdev)} up") if port.netdev else on(node, "rdma link; ibstat")
        yield Finding(ID, subject, Status.FAIL, observed, expected, why, remedy)
        return
    if cluster.network.kind == "roce" and not roce_v2_ipv4(port):
        kinds = listed(sorted({f"{gid.kind} {gid.address}" for gid in port.gids})) or "none"
        why = "without it NCCL connects by a link-local or v1 GID, which no router passes: 'modify_qp failed', error 12"
        remedy = on(node, f"ip -br address show {shlex.quote(port.netdev)}" if port.netdev else "show_gids")
        yield Finding(ID, subject, Status.FAIL, f"GIDs: {kinds}", "a RoCE v2 GID with an IPv4 address", why, remedy)
    rate = cluster.network.rate_gbit_s
    if rate is not None and port.rate_gbit_s is not None and port.rate_gbit_s < rate:
        why = "the link trained down: cable, transceiver or switch port"
        stated = f"at least {rate:g} Gbit/s (cluster.yaml)"
        yield Finding(ID, subject, Status.FAIL, f"{port.rate_gbit_s:g} Gbit/s", stated, why, on(node, "rdma link; ibstat"))
