"""Clusters of every kind that the NCCL environment is decided for, with facts as real nodes of that kind tell them.

The shapes are those of the recorded texts: GID tables of tests/tools/fixtures (two NICs with v1 and v2, a VLAN's second IPv4
address), of an mlx5 card's sysfs, interfaces of healthy nodes (tests/checks/healthy.json). Addresses are invented.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from r4090c.model import (
    Cluster,
    CpuFact,
    Fact,
    Gpu,
    Iface,
    IfaceQos,
    NetFact,
    Node,
    NodeFacts,
    P2pProof,
    PortTest,
    PythonFact,
    RdmaGid,
    RdmaPort,
)
from tests.launch.facts_of import cluster_of, cpus_of, facts_of, gpu_of, node_of

DATE = "2026-11-29"


@dataclass(frozen=True)
class Setting:
    """A cluster, what is true of it, and what measurements showed."""

    cluster: Cluster
    facts: Mapping[str, NodeFacts]
    p2p: Mapping[str, P2pProof] = field(default_factory=dict)
    port_tests: Mapping[str, Mapping[str, PortTest]] = field(default_factory=dict)


def card(name: str, *addresses: str, speed_gbit_s: int = 100, virtual: bool = False, lower: tuple[str, ...] = ()) -> Iface:
    return Iface(name, "up", 9000, speed_gbit_s * 1000, "0c:42:a1:79:5e:1a", addresses, virtual, "full", 1, lower)


LO = Iface("lo", "unknown", 65_536, None, "", ("127.0.0.1/8", "::1/128"), True)
DOCKER = (
    Iface("docker0", "up", 1500, None, "02:42:1f:00:00:01", ("172.17.0.1/16",), True),
    Iface("br-5e1f0c2ab9d4", "up", 1500, None, "02:42:1f:00:00:02", ("172.18.0.1/16",), True),
    Iface("veth3f1a2b4", "up", 1500, 10_000, "02:42:1f:00:00:03", (), True),
    Iface("virbr0", "down", 1500, None, "52:54:00:00:00:01", ("192.168.122.1/24",), True),
    Iface("wg0", "unknown", 1420, None, "", ("10.99.0.1/24",), True),
)


def roce(
    hca: str, netdev: str, *addresses: str, state: str = "ACTIVE", on: Mapping[str, str] | None = None, rate_gbit_s: float = 100
) -> RdmaPort:
    """Return a RoCE port whose GID table is as mlx5 fills it: link-local v1, v2, then v1 and v2 of every IPv4 address.

    `on`: address -> interface it is on, where that is not `netdev`.
    """
    entries = [(0, "fe80::e42:a1ff:fe79:5e1a", "v1", netdev), (1, "fe80::e42:a1ff:fe79:5e1a", "v2", netdev)]
    for place, address in enumerate(addresses):
        where = (on or {}).get(address, netdev)
        entries += [(2 + 2 * place, f"::ffff:{address}", "v1", where), (3 + 2 * place, f"::ffff:{address}", "v2", where)]
    gids = tuple(RdmaGid(*entry) for entry in entries)
    physical = "LinkUp" if state == "ACTIVE" else "Disabled"
    return RdmaPort(hca, 1, state, physical, "Ethernet", rate_gbit_s, netdev, "16.35.3006", 0, gids, "MT_0000000011", 0)


def infiniband(hca: str, netdev: str | None, prefix: str = "fe80::", state: str = "ACTIVE") -> RdmaPort:
    gids = (RdmaGid(0, f"{prefix}e41d:2d03:67:{hca[-1]}", "ib", None),)
    return RdmaPort(hca, 1, state, "LinkUp", "InfiniBand", 100.0, netdev, "12.28.2006", 0, gids, "MT_2190110032", 1)


def gpus_of(count: int) -> Fact[tuple[Gpu, ...]]:
    return Fact(tuple(gpu_of(index, f"0000:{0x21 + 0x20 * index:02x}:00.0", 0) for index in range(count)))


CPUS: Fact[CpuFact] = cpus_of({0: range(16)}, [[core] for core in range(16)])


def python_of(nccl: str) -> Fact[PythonFact]:
    return Fact(PythonFact("/opt/venv/bin/python", "3.12.3", {"torch": "2.9.1", "nvidia-nccl-cu12": nccl}))


def facts(
    node: Node,
    peers: Sequence[Node],
    ifaces: Sequence[Iface],
    via: str,
    rdma: Sequence[RdmaPort] = (),
    *,
    nccl: str = "2.27.5",
    qos: tuple[IfaceQos, ...] = (),
) -> NodeFacts:
    """Return the facts of `node`, which reaches its peers over the interface `via`."""
    routes = {peer.data_address: (via, node.data_address) for peer in peers if peer.name != node.name}
    told = facts_of(
        node.name, net=Fact(NetFact((LO, *ifaces), routes, {})), cpus=CPUS, rdma=Fact(tuple(rdma)), gpus=gpus_of(node.gpus)
    )
    return replace(told, python=python_of(nccl), qos=Fact(qos))


def nodes_of(count: int, network: str = "10.31.4", gpus: int = 4) -> list[Node]:
    return [node_of(f"node{index:02d}", f"{network}.{10 + index}", gpus) for index in range(1, count + 1)]


def office(node: Node) -> Iface:
    return card("eno1", f"192.168.1.{node.data_address.rpartition('.')[2]}/24", speed_gbit_s=1)


def with_network(cluster: Cluster, subnet: str | None = None, rate_gbit_s: float | None = None) -> Cluster:
    return replace(cluster, network=replace(cluster.network, subnet=subnet, rate_gbit_s=rate_gbit_s))


def roce_nodes(count: int = 2, *, nccl: str = "2.27.5", extra: tuple[Iface, ...] = ()) -> Setting:
    nodes = nodes_of(count)
    told = {}
    for node in nodes:
        ifaces = [*extra, office(node), card("ens5f0np0", f"{node.data_address}/24")]
        told[node.name] = facts(node, nodes, ifaces, "ens5f0np0", [roce("mlx5_0", "ens5f0np0", node.data_address)], nccl=nccl)
    return Setting(cluster_of(nodes, "roce"), told)


def measured_roce() -> Setting:
    """RoCE with PFC on priority 3, two ports in one subnet; the second of node02 failed its test."""
    nodes = nodes_of(2)
    told = {}
    for node in nodes:
        second = f"10.31.4.1{node.data_address.rpartition('.')[2]}"
        ifaces = [office(node), card("ens5f0np0", f"{node.data_address}/24"), card("ens5f1np1", f"{second}/24")]
        ports = [roce("mlx5_0", "ens5f0np0", node.data_address), roce("mlx5_1", "ens5f1np1", second)]
        dscp = tuple((point, point // 8) for point in range(64))
        qos = (IfaceQos("ens5f0np0", (3,), dscp, (3,)), IfaceQos("ens5f1np1", (3,), dscp, (3,)))
        told[node.name] = facts(node, nodes, ifaces, "ens5f0np0", ports, qos=qos)
    good = PortTest("mlx5_0:1", True, True, DATE, "carries 97.1 Gbit/s")
    bad = PortTest("mlx5_1:1", False, True, DATE, "receives 11.2 Gbit/s")
    tests = {"node01": {"mlx5_0:1": good}, "node02": {"mlx5_0:1": good, "mlx5_1:1": bad}}
    return Setting(cluster_of(nodes, "roce"), told, port_tests=tests)


def infiniband_nodes() -> Setting:
    nodes = nodes_of(2)
    told = {}
    for node in nodes:
        ifaces = [office(node), replace(card("ib0", f"{node.data_address}/24"), mtu=2044, speed_mbit_s=None)]
        ports = [infiniband("mlx5_0", "ib0"), infiniband("mlx5_1", None, state="DOWN"), roce("mlx5_2", "eno1", "192.168.1.11")]
        told[node.name] = facts(node, nodes, ifaces, "ib0", ports)
    return Setting(cluster_of(nodes, "infiniband"), told)


def tcp_nodes(speed_gbit_s: int = 25) -> Setting:
    """Fast Ethernet; the cards could do RDMA, but nobody wishes it."""
    nodes = nodes_of(2)
    told = {}
    for node in nodes:
        ifaces = [office(node), card("enp1s0f0np0", f"{node.data_address}/24", speed_gbit_s=speed_gbit_s)]
        told[node.name] = facts(node, nodes, ifaces, "enp1s0f0np0", [roce("mlx5_0", "enp1s0f0np0", node.data_address)])
    return Setting(cluster_of(nodes, "tcp"), told)


def patched(proven: bool | None) -> Setting:
    """A patched driver grants P2P on node01; None: nothing has tested it."""
    setting = roce_nodes()
    if proven is None:
        return setting
    words = "20.4 GB/s with P2P, 9.35 without" if proven else "3 wrong values with P2P, none without"
    return replace(setting, p2p={"node01": P2pProof("f" * 32, proven, DATE, words)})


def mixed() -> Setting:
    """Two nodes with RoCE, one with another card and another name of its interface, one with an older NCCL."""
    setting = roce_nodes(3)
    nodes = setting.cluster.nodes
    third = nodes[2]
    plain = facts(third, nodes, [office(third), card("enp3s0", f"{third.data_address}/24", speed_gbit_s=100)], "enp3s0")
    second = replace(setting.facts["node02"], python=python_of("2.20.5"))
    proof = {"node01": P2pProof("f" * 32, True, DATE, "20.4 GB/s with P2P, 9.35 without")}
    return replace(setting, facts={**setting.facts, "node02": second, "node03": plain}, p2p=proof)


def bond() -> Setting:
    """Two ports in one RoCE LAG: the card shows one RDMA device, whose GIDs are the bond's."""
    nodes = nodes_of(2)
    told = {}
    for node in nodes:
        slaves = [card("ens1f0np0", speed_gbit_s=25), card("ens1f1np1", speed_gbit_s=25)]
        master = card("bond0", f"{node.data_address}/24", speed_gbit_s=50, virtual=True, lower=("ens1f0np0", "ens1f1np1"))
        ports = [roce("mlx5_bond_0", "bond0", node.data_address, rate_gbit_s=50)]
        told[node.name] = facts(node, nodes, [office(node), *slaves, master], "bond0", ports)
    return Setting(cluster_of(nodes, "roce"), told)


def vlan(nccl: str = "2.27.5") -> Setting:
    """The data network is VLAN 90 of a card that is also in another network, whose GIDs come first (show_gids of the fixture).

    The GID of the VLAN has another index on node02.
    """
    nodes = nodes_of(2, "10.90.4")
    told = {}
    for node in nodes:
        host = node.data_address.rpartition(".")[2]
        below = [f"10.31.4.{host}"] if node.name == "node01" else [f"10.31.4.{host}", f"10.32.4.{host}"]
        ifaces = [office(node), card("ens6f0", *(f"{address}/24" for address in below))]
        ifaces.append(card("ens6f0.90", f"{node.data_address}/24", virtual=True, lower=("ens6f0",)))
        port = roce("mlx5_0", "ens6f0", *below, node.data_address, on={node.data_address: "ens6f0.90"})
        told[node.name] = facts(node, nodes, ifaces, "ens6f0.90", [port], nccl=nccl)
    return Setting(cluster_of(nodes, "roce"), told)


def rails(swapped: bool = False) -> Setting:
    """Two NICs a node, each in the subnet of its own switch (show_gids of the fixture); `swapped`: node02's are crossed."""
    nodes = nodes_of(2)
    told = {}
    for node in nodes:
        host = node.data_address.rpartition(".")[2]
        names = [("mlx5_0", "ens5f0np0"), ("mlx5_1", "ens5f1np1")]
        if swapped and node.name == "node02":
            names.reverse()
        (first, first_dev), (second, second_dev) = names
        ifaces = [office(node), card(first_dev, f"10.31.4.{host}/24"), card(second_dev, f"10.31.5.{host}/24")]
        ports = sorted(
            [roce(first, first_dev, f"10.31.4.{host}"), roce(second, second_dev, f"10.31.5.{host}")], key=lambda one: one.hca
        )
        told[node.name] = facts(node, nodes, ifaces, first_dev, ports)
    return Setting(with_network(cluster_of(nodes, "roce"), subnet="10.31.4.0/23"), told)


def one_node() -> Setting:
    setting = roce_nodes(2)
    return Setting(replace(setting.cluster, nodes=setting.cluster.nodes[:1]), {"node01": setting.facts["node01"]})


SETTINGS = {
    "roce": roce_nodes(),
    "roce-measured": measured_roce(),
    "infiniband": infiniband_nodes(),
    "tcp": tcp_nodes(),
    "one-node": one_node(),
    "patched-p2p-proven": patched(True),
    "patched-p2p-refuted": patched(False),
    "patched-p2p-untested": patched(None),
    "mixed": mixed(),
    "docker": roce_nodes(extra=DOCKER),
    "bond": bond(),
    "vlan": vlan(),
    "vlan-old-nccl": vlan("2.20.5"),
    "isolated-rails": rails(),
    "crossed-rails": rails(swapped=True),
    "old-nccl": roce_nodes(nccl="2.18.6"),
}
"""Name -> what is to be decided."""
