"""The environment of every rank, each variable with its reason and origin; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from netcheck.checks._network import unfit
from r4090c.model import Cluster, NetFact, Node, NodeFacts, RdmaPort

SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|PASS|PWD|CREDENTIAL|AUTH|COOKIE)S?(_|\d|$)")
"""A variable with such a word at the end of a part of its name is never written to a plan, a log or a bundle.

At the end: WANDB_API_KEY and HF_TOKEN are secrets, TOKENIZERS_PARALLELISM is not.
"""
PUBLIC = ("PWD", "OLDPWD")
HIDDEN = "***"


@dataclass(frozen=True, slots=True)
class Var:
    """One environment variable: why it is set, and who said so (computed, cluster.yaml, recipe, user)."""

    value: str
    reason: str
    origin: str = "computed"


def is_secret(name: str) -> bool:
    """True when the variable's value must not be shown."""
    return name.upper() not in PUBLIC and SECRET.search(name.upper()) is not None


def shown(name: str, value: str) -> str:
    """Return the value of variable `name` as a person may see it."""
    return HIDDEN if is_secret(name) else value


def data_iface(net: NetFact, node: Node, peers: Mapping[str, str], *, loopback: bool = False) -> tuple[str | None, str]:
    """Return (interface, reason) for traffic from `node` to its peers (node name -> data address); None = leave it to NCCL.

    The interface most peers are reached over. Never lo, a container bridge or a VPN: training over one is worse than none
    stated, and the preflight tells. `loopback`: all nodes are on one machine (demo), so lo is right.
    """
    over: dict[str, list[str]] = {}
    for name, address in peers.items():
        iface = net.routes.get(address, (None, None))[0] if name != node.name else None
        if iface:
            over.setdefault(iface, []).append(name)
    refused = ""
    for iface, names in sorted(over.items(), key=lambda item: -len(item[1])):
        kind = None if loopback else unfit(iface)
        if kind is None:
            return iface, f"route to {names[0]} ({peers[names[0]]})"
        refused = refused or f"{iface} leads to {names[0]} but is {kind}"
    for found in net.ifaces:
        holds = any(address.partition("/")[0] == node.data_address for address in found.addresses)
        if holds and (loopback or unfit(found.name) is None):
            return found.name, f"holds the data address {node.data_address}"
    return None, refused or "no interface towards the peers is known"


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
    """Return the environment of the ranks on `node`: computed, then cluster.yaml's layers, then the user's; later ones win."""
    env: dict[str, Var] = {}
    net = facts.net.value
    loopback = cluster.network.kind == "loopback"
    iface, why = data_iface(net, node, peers, loopback=loopback) if net is not None else (None, "addresses unknown")
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
            before = env.get(name)
            over = f"; replaces {shown(name, before.value)} ({before.origin})" if before is not None else ""
            env[name] = Var(value, f"set by {origin}{over}", origin)
    return env


def visible_devices(env: Mapping[str, Var]) -> tuple[str, ...] | None:
    """Return what CUDA_VISIBLE_DEVICES lists (indices, UUIDs), None when it is not set: then all GPUs are visible."""
    var = env.get("CUDA_VISIBLE_DEVICES")
    return None if var is None else tuple(part.strip() for part in var.value.split(",") if part.strip())
