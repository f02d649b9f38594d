"""Whether there is an active RDMA port on the data network, with a GID that NCCL can use."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from netcheck.checks._wording import as_root, listed, on
from netcheck.data_network import data_iface, in_data_network, networks, peers_of, rdma_ports
from netcheck.facts.rdma import roce_v2_ipv4
from r4090c.model import Cluster, Finding, NetFact, Node, RdmaGid, RdmaPort, Status

ID, GROUP, NEEDS = "rdma-port", "rdma", ("rdma", "net")
ABSENT = Status.UNKNOWN
RULE = (
    "an ACTIVE port on the data network, at network.rate_gbit_s of cluster.yaml or more; RoCE: a v2 GID with an IPv4 address of"
    " the data network; InfiniBand: a subnet manager (sm_lid is not 0); all fail"
)
SOURCE = "NCCL issues 426, 769, 925; sysfs-class-infiniband of the Linux kernel's documentation"


def applies(node: Node, cluster: Cluster) -> bool:
    """Only a cluster whose network is stated to be RoCE or InfiniBand needs RDMA."""
    return cluster.network.rdma


def check(node: Node, ports: tuple[RdmaPort, ...], net: NetFact, cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding per fault of the ports on the data network, else one pass naming them and the index of their GID.

    An InfiniBand port that nobody gave an address may stay without a cable beside an ACTIVE one: cards have two.
    """
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
    working = [port for port in fitting if port.state == "ACTIVE"]
    if kind == "infiniband" and working:
        fitting = tuple(port for port in fitting if port in working or _has_address(port, net))
    gids = {port.name: _gids(node, port, net, iface, cluster) for port in fitting}
    faults = [finding for port in fitting for finding in _faults(node, port, gids[port.name], expected, cluster)]
    told = listed(f"{port.name} (GID index {gids[port.name][0].index})" if gids[port.name] else port.name for port in fitting)
    yield from faults or [Finding(ID, node.name, Status.PASS, told, expected)]


def _has_address(port: RdmaPort, net: NetFact) -> bool:
    return any(iface.name == port.netdev and list(networks(iface)) for iface in net.ifaces)


def _gids(node: Node, port: RdmaPort, net: NetFact, iface: str | None, cluster: Cluster) -> list[RdmaGid]:
    """Return the RoCE v2 GIDs that are IPv4 addresses of the data network: with VLANs a port has others besides."""
    return [gid for gid, address in roce_v2_ipv4(port) if in_data_network(address, node, net, iface, cluster)]


def _faults(node: Node, port: RdmaPort, gids: list[RdmaGid], expected: str, cluster: Cluster) -> Iterator[Finding]:
    subject = f"{node.name}/{port.name}"
    if cluster.network.kind == "infiniband" and port.sm_lid == 0 and port.phys_state in ("LinkUp", ""):
        why = "the subnet manager gives out the addresses: no port becomes ACTIVE until one runs, on a switch or on a node"
        remedy = as_root(node, "apt-get install -y opensm", "systemctl enable --now opensm")
        yield Finding(ID, subject, Status.FAIL, f"{port.state}, sm_lid 0", "a subnet manager on the fabric", why, remedy)
        return
    if port.state != "ACTIVE":
        why = "NCCL leaves out a port that is not ACTIVE: traffic falls back to another card or to TCP"
        observed = f"{port.state}, physically {port.phys_state}"
        remedy = as_root(node, f"ip link set {shlex.quote(port.netdev)} up") if port.netdev else on(node, "rdma link; ibstat")
        yield Finding(ID, subject, Status.FAIL, observed, expected, why, remedy)
        return
    if cluster.network.kind == "roce" and not gids:
        kinds = listed(sorted({f"{gid.kind} {gid.address}" for gid in port.gids})) or "none"
        why = (
            "without it NCCL connects by a link-local or v1 GID, or by one of another network: 'modify_qp failed', error 12;"
            " give the interface an address of the data network"
        )
        remedy = on(node, f"ip -br address show {shlex.quote(port.netdev)}" if port.netdev else "show_gids")
        yield Finding(ID, subject, Status.FAIL, f"GIDs: {kinds}", _wanted_gid(cluster), why, remedy)
    rate = cluster.network.rate_gbit_s
    if rate is not None and port.rate_gbit_s is not None and port.rate_gbit_s < rate:
        why = "the link trained down: cable, transceiver or switch port"
        stated = f"at least {rate:g} Gbit/s (cluster.yaml)"
        yield Finding(ID, subject, Status.FAIL, f"{port.rate_gbit_s:g} Gbit/s", stated, why, on(node, "rdma link; ibstat"))


def _wanted_gid(cluster: Cluster) -> str:
    where = f" in {cluster.network.subnet} (cluster.yaml)" if cluster.network.subnet else " of the data network"
    return f"a RoCE v2 GID with an IPv4 address{where}"
