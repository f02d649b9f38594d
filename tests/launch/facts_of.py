"""Facts of nodes that do not exist, from a few words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from r4090c.model import (
    Cluster,
    CpuFact,
    Expect,
    Fact,
    Gpu,
    Iface,
    NetFact,
    Network,
    Node,
    NodeFacts,
    NumaNode,
    Paths,
    RdmaPort,
    Ssh,
    Storage,
)

UNKNOWN: Fact[Any] = Fact(error="not asked")


def node_of(name: str, data_address: str, gpus: int = 0, env: Mapping[str, str] | None = None) -> Node:
    paths = Paths("/mnt/shared", "/mnt/shared/r4090c/runs", "/opt/venv/bin/python")
    return Node(name, Ssh(address=data_address), data_address, gpus, paths, env or {})


def cluster_of(nodes: Sequence[Node], kind: str = "tcp", env: Mapping[str, str] | None = None) -> Cluster:
    return Cluster("atelier", tuple(nodes), Network(kind=kind), Storage(), Expect(), env or {})


def iface(name: str, address: str) -> Iface:
    return Iface(name, "up", 1500, 10_000, "02:00:00:00:00:01", (f"{address}/24",), False)


def net_of(ifaces: Mapping[str, str], routes: Mapping[str, str | None]) -> Fact[NetFact]:
    """`ifaces`: name -> address; `routes`: peer address -> interface."""
    return Fact(NetFact(tuple(iface(*pair) for pair in ifaces.items()), {peer: (via, None) for peer, via in routes.items()}, {}))


def rdma_port(name: str, state: str = "ACTIVE", link_layer: str = "Ethernet", netdev: str | None = None) -> RdmaPort:
    hca, _, port = name.partition(":")
    return RdmaPort(hca, int(port), state, "LinkUp", link_layer, 100.0, netdev, None, None, ())


def cpus_of(numa: Mapping[int, Sequence[int]], cores: Sequence[Sequence[int]]) -> Fact[CpuFact]:
    everything = tuple(sorted(cpu for core in cores for cpu in core))
    nodes = tuple(NumaNode(index, tuple(cpus), 64_000) for index, cpus in numa.items())
    return Fact(CpuFact("a CPU", everything, everything, everything, tuple(map(tuple, cores)), 1, nodes, None))


def gpu_of(index: int, pci: str, numa: int | None) -> Gpu:
    return Gpu(
        index=index,
        name="NVIDIA GeForce RTX 4090",
        uuid=f"GPU-{index}",
        pci=pci,
        driver="570.1",
        memory_total_mib=24_564,
        memory_used_mib=1,
        pcie_gen=4,
        pcie_gen_max=4,
        pcie_width=16,
        pcie_width_max=16,
        temperature_c=40,
        power_w=20.0,
        power_limit_w=450.0,
        utilization_pct=0,
        persistence=True,
        numa=numa,
    )


def facts_of(
    node: str,
    net: Fact[NetFact] = UNKNOWN,
    cpus: Fact[CpuFact] = UNKNOWN,
    rdma: Fact[tuple[RdmaPort, ...]] = UNKNOWN,
    gpus: Fact[tuple[Gpu, ...]] = UNKNOWN,
) -> NodeFacts:
    unknown = {name: UNKNOWN for name in NodeFacts.__dataclass_fields__ if name != "node"}
    return NodeFacts(node=node, **{**unknown, "net": net, "cpus": cpus, "rdma": rdma, "gpus": gpus})
