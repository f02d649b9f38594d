"""The environment of every rank, each variable with its reason and origin; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from netcheck.data_network import data_iface, gid_index, rdma_ports
from r4090c.model import Cluster, Node, NodeFacts

SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|PASS|PWD|CREDENTIAL|AUTH|COOKIE|(?<![A-Z])PAT)S?(_|\d|$)")
"""A variable with such a word at the end of a part of its name is never written to a plan, a log or a bundle.

At the end: WANDB_API_KEY and HF_TOKEN are secrets, TOKENIZERS_PARALLELISM is not.
"""
PUBLIC = ("PWD", "OLDPWD", "NCCL_IB_PKEY")
URL_PASSWORD = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/@]*:[^\s/@]+@")
"""A proxy or a database address that carries its password."""
HIDDEN = "***"
NCCL_FINDS_GID = (2, 21)
"""From this version NCCL chooses the RoCE GID by itself (its release notes); older ones take index 0, a link-local v1 one."""


@dataclass(frozen=True, slots=True)
class Var:
    """One environment variable: why it is set, and who said so (computed, cluster.yaml, recipe, user)."""

    value: str
    reason: str
    origin: str = "computed"


def is_secret(name: str, value: str) -> bool:
    """True when the variable's value must not be shown: by its name, or because it is an address with a password in it."""
    by_name = name.upper() not in PUBLIC and SECRET.search(name.upper()) is not None
    return by_name or URL_PASSWORD.search(value) is not None


def shown(name: str, value: str) -> str:
    """Return the value of variable `name` as a person may see it."""
    return HIDDEN if is_secret(name, value) else value


def nccl_version(facts: NodeFacts) -> tuple[int, ...] | None:
    """Return the version of NCCL in the node's training Python, the oldest of several; None where no wheel tells."""
    if facts.python.value is None:
        return None
    found = [
        text for name, told in facts.python.value.packages.items() if name.startswith("nvidia-nccl-") for text in told.split(", ")
    ]
    versions = [tuple(map(int, text.split("."))) for text in found if re.fullmatch(r"\d{1,6}(\.\d{1,6})+", text)]
    return min(versions, default=None)


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
        ports = tuple(port for port in rdma_ports(node, facts.rdma.value or (), net, iface, cluster) if "ACTIVE" in port.state)
        nccl = nccl_version(facts)
        if ports and cluster.network.kind == "roce" and nccl is not None and nccl < NCCL_FINDS_GID:
            index, having = gid_index(node, ports, net, iface, cluster)
            if index is not None:
                ports = having
                told = ".".join(map(str, nccl))
                env["NCCL_IB_GID_INDEX"] = Var(
                    str(index), f"RoCE v2 IPv4 GID of {ports[0].name}; NCCL {told} does not look for it"
                )
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
