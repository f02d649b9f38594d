"""The variables that NCCL and gloo need on a node, each with its reason. Pure.

The one place that computes them: `launch` gives them to the ranks of a run, and the measurements run under the same, so that what
was measured is what training gets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from netcheck.data_network import data_iface, gid_index, rdma_ports
from r4090c.model import Cluster, Node, NodeFacts, P2pProof

NCCL_FINDS_GID = (2, 21)
"""From this version NCCL chooses the RoCE GID by itself (its release notes); older ones take index 0, a link-local v1 one."""
STATED = ("NCCL_", "GLOO_", "TP_", "CUDA_", "TORCH_", "UCX_", "OMPI_", "LD_LIBRARY_PATH")
"""Beginnings of the variables of cluster.yaml that decide how collectives run; no others go along on a measurement."""


@dataclass(frozen=True, slots=True)
class Var:
    """One environment variable: why it is set, and who said so (computed, cluster.yaml, recipe, user)."""

    value: str
    reason: str
    origin: str = "computed"


def nccl_version(facts: NodeFacts) -> tuple[int, ...] | None:
    """Return the version of NCCL in the node's training Python, the oldest of several; None where no wheel tells."""
    if facts.python.value is None:
        return None
    found = [
        text for name, told in facts.python.value.packages.items() if name.startswith("nvidia-nccl-") for text in told.split(", ")
    ]
    versions = [tuple(map(int, text.split("."))) for text in found if re.fullmatch(r"\d{1,6}(\.\d{1,6})+", text)]
    return min(versions, default=None)


def computed_environment(
    cluster: Cluster, node: Node, facts: NodeFacts, peers: Mapping[str, str], p2p: P2pProof | None = None
) -> dict[str, Var]:
    """Return what NCCL, gloo and CUDA are to be told on `node`; `peers`: node name -> data address of all that take part.

    `p2p`: what a two-arm test of this node as it stands showed, None = there was none.
    """
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
        env["NCCL_P2P_DISABLE"] = _p2p(p2p)
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
    return env


def _p2p(proof: P2pProof | None) -> Var:
    if proof is None:
        return Var("1", "no P2P on a 4090 with the stock driver; off unless a two-arm test proved it")
    return Var("0" if proof.proven else "1", f"two-arm test of {proof.date}: {proof.reason}")


def measured_environment(cluster: Cluster, node: Node, facts: NodeFacts, peers: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a measurement on `node`: computed, then those of cluster.yaml that decide how collectives run."""
    env = {name: var.value for name, var in computed_environment(cluster, node, facts, peers).items()}
    for layer in (cluster.env, node.env):
        env |= {name: value for name, value in layer.items() if name.startswith(STATED)}
    return env


def visible_gpus(node: Node, facts: NodeFacts, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return how CUDA calls the GPUs of `node` that ranks may have: indices in PCI order, or what CUDA_VISIBLE_DEVICES lists.

    No more than cluster.yaml states; none where the driver shows none.
    """
    gpus = facts.gpus.value if facts.gpus.value is not None else ()
    working = [gpu for gpu in gpus if gpu.index >= 0]
    stated = env.get("CUDA_VISIBLE_DEVICES")
    if stated is not None:
        listed = tuple(part.strip() for part in stated.split(",") if part.strip())
        return listed[: min(node.gpus, len(working))]
    return tuple(str(index) for index in range(min(node.gpus, len(working))))
