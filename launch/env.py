"""The environment of every rank, each variable with its reason and origin; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from r4090c.model import Cluster, NetFact, Node, NodeFacts, RdmaPort

SECRET_MARKS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
"""A variable whose name has one of these is never written to a plan, a log or a bundle."""


@dataclass(frozen=True, slots=True)
class Var:
    """One environment variable: why it is set, and who said so (computed, cluster.yaml, recipe, user)."""

    value: str
    reason: str
    origin: str = "computed"


def is_secret(name: str) -> bool:
    """True when the variable's value must not be shown."""
    return any(mark in name.upper() for mark in SECRET_MARKS)


def data_iface(net: NetFact, node: Node, peers: Mapping[str, str]) -> tuple[str | None, str]:
    """Return (interface, reason) for traffic from `node` to its peers (node name -> data address)."""
    for name, address in peers.items():
        if name != node.name and address in net.routes:
            iface, _ = net.routes[address]
            if iface:
                return iface, f"route to {name} ({address})"
    for iface_fact in net.ifaces:
        if any(address.partition("/")[0] == node.data_address for address in iface_fact.addresses):
            return iface_fact.name, f"holds the data address {node.data_address}"
    return None, "no interface towards the peers is known"


def rdma_ports(facts: NodeFacts, iface: str | None, kind: str) -> tuple[RdmaPort, ...]:
    """Return the ACTIVE RDMA ports that serve the data network of `kind` (roce: those of `iface`)."""
    if not facts.rdma.known or facts.rdma.value is None or kind not in ("roce", "infiniband"):
        return ()
    active = [port for port in facts.rdma.value if "ACTIVE" in port.state]
    if kind == "infiniband":
        return tuple(port for port in active if port.link_layer == "InfiniBand")
    return tuple(port for port in active if port.link_layer == "Ethernet" and (iface is None or port.netdev == iface))


def node_environment(
    cluster: Cluster, node: Node, facts: NodeFacts, peers: Mapping[str, str], user: Mapping[str, str]
) -> dict[str, Var]:
    """Return the environment of the ranks on `node`: computed, then cluster.yaml's layers, then the user's, later ones winning."""
    env: dict[str, Var] = {}
    net = facts.net.value
    iface, why = data_iface(net, node, peers) if net is not None else (None, "addresses unknown")
    if iface:
        env["NCCL_SOCKET_IFNAME"] = Var(f"={iface}", f"{why}; exact match, a bare prefix takes look-alikes")
        env["GLOO_SOCKET_IFNAME"] = Var(iface, why)
        env["TP_SOCKET_IFNAME"] = Var(iface, why)
    if node.gpus:
        env["CUDA_DEVICE_ORDER"] = Var("PCI_BUS_ID", "rank k drives GPU k in PCI order, as the CPU plan assumes")
        env["NCCL_P2P_DISABLE"] = Var("1", "no P2P on a 4090 with the stock driver; off unless a two-arm test proved it")
        ports = rdma_ports(facts, iface, cluster.network.kind)
        if ports:
            env["NCCL_IB_DISABLE"] = Var(
                "0", f"network.kind {cluster.network.kind}; stated, since accelerate may turn it off for RTX 40"
            )
            env["NCCL_IB_HCA"] = Var("=" + ",".join(port.name for port in ports), "ACTIVE ports of the data network; exact names")
        else:
            env["NCCL_IB_DISABLE"] = Var("1", f"network.kind {cluster.network.kind}: no active RDMA port on the data network")
        env["NCCL_NET_GDR_LEVEL"] = Var("LOC", "no GPUDirect RDMA on GeForce")
    env["PYTHONUNBUFFERED"] = Var("1", "rank logs show lines when they are written")
    for layer, origin in ((cluster.env, "cluster.yaml env"), (node.env, f"cluster.yaml nodes.{node.name}.env"), (user, "--env")):
        for name, value in layer.items():
            over = f"; replaces the computed {env[name].value}" if name in env and env[name].origin == "computed" else ""
            env[name] = Var(value, f"set by {origin}{over}", origin)
    return env
