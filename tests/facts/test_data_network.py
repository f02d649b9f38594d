"""The data network is decided in one place: what the preflight accepts is what launch uses."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from netcheck.checks import REGISTRY
from netcheck.data_network import data_iface, gid_index, peers_of, rdma_ports
from netcheck.judge import judge
from netcheck.rank_env import Var, computed_environment, nccl_version
from r4090c.cli.facts import _data_network_text
from r4090c.model import Cluster, Node, NodeFacts, RdmaGid, RdmaPort, Status
from tests.checks.cases import HERE, build

FILES = sorted((HERE / "rdma-port").glob("*.json"))
PORT = RdmaPort("mlx5_0", 1, "ACTIVE", "LinkUp", "Ethernet", 100.0, "enp65s0f0", None, 0, ())


def environment(cluster: Cluster, node: Node, facts: Mapping[str, NodeFacts]) -> dict[str, Var]:
    return computed_environment(cluster, cluster.nodes, facts)[node.name]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_launch_uses_the_ports_that_the_preflight_passes(file: Any) -> None:
    cluster, raw, facts = build(json.loads(file.read_text()))
    findings = judge(cluster, raw, facts, [check for check in REGISTRY if check.id == "rdma-port"])
    fit = [node for node in cluster.nodes if any(one.subject == node.name and one.status is Status.PASS for one in findings)]
    off = {env["NCCL_IB_DISABLE"].value for env in computed_environment(cluster, cluster.nodes, facts).values()}
    assert len(off) == 1  # one transport for all
    if len(fit) == len(cluster.nodes) > 1:
        assert off == {"0"}
    for finding in findings:
        if finding.status is Status.PASS and len(fit) > 1:
            env = computed_environment(cluster, fit, facts)[finding.subject]
            assert env["NCCL_IB_DISABLE"].value == "0"
            ports = re.sub(r" \(GID index \d+\)", "", finding.observed)
            assert env["NCCL_IB_HCA"].value == "=" + ports.replace(", ", ",")


@pytest.mark.parametrize("name", ["data-interface", "rdma-port"])
def test_preflight_launch_and_facts_name_one_interface(name: str) -> None:
    for file in sorted((HERE / name).glob("*.json")):
        cluster, _, facts = build(json.loads(file.read_text()))
        loopback = cluster.network.kind == "loopback"
        for node in cluster.nodes:
            net = facts[node.name].net.value
            if net is None:
                continue
            iface, _ = data_iface(net, node, peers_of(node, cluster), loopback=loopback)
            env = environment(cluster, node, facts)
            assert (env["GLOO_SOCKET_IFNAME"].value if "GLOO_SOCKET_IFNAME" in env else None) == iface
            assert iface is None or _data_network_text(cluster, node, net).startswith(iface)


def gids(*entries: tuple[int, str, str]) -> tuple[RdmaGid, ...]:
    return tuple(RdmaGid(index, address, kind, "enp65s0f0") for index, address, kind in entries)


@pytest.mark.parametrize(
    ("nccl", "index"),
    [("2.18.6", "3"), ("2.20.5", "3"), ("2.21.5", None), ("2.27.3", None), (None, None), ("2.21.5, 2.19.3", "3")],
)
def test_an_nccl_that_does_not_look_for_the_gid_is_told_its_index(nccl: str | None, index: str | None) -> None:
    packages = {"torch": "2.2.0"} if nccl is None else {"torch": "2.2.0", "nvidia-nccl-cu12": nccl}
    cluster, _, facts = build({"facts": {"*": {"python": {"packages": {"=": packages}}}}})
    var = environment(cluster, cluster.nodes[0], facts).get("NCCL_IB_GID_INDEX")
    assert (None if var is None else var.value) == index
    if var is not None:
        assert "RoCE v2 IPv4 GID of mlx5_0:1" in var.reason


def test_the_index_is_that_of_the_node() -> None:
    cluster, _, facts = build({"facts": {"*": {"python": {"packages": {"nvidia-nccl-cu12": "2.18.6"}}}}})
    ports = (replace(PORT, gids=gids((0, "fe80::2", "v1"), (2, "::ffff:10.10.0.12", "v1"), (7, "::ffff:10.10.0.12", "v2"))),)
    changed = replace(facts["node02"], rdma=replace(facts["node02"].rdma, value=ports))
    assert environment(cluster, cluster.nodes[0], facts)["NCCL_IB_GID_INDEX"].value == "3"
    assert environment(cluster, cluster.nodes[1], {**facts, "node02": changed})["NCCL_IB_GID_INDEX"].value == "7"


def test_no_index_without_rdma_or_on_infiniband() -> None:
    old = {"python": {"packages": {"nvidia-nccl-cu12": "2.18.6"}}}
    for kind in ("tcp", "infiniband"):
        cluster, _, facts = build({"facts": {"*": old}, "cluster": {"network": {"kind": kind}}})
        assert "NCCL_IB_GID_INDEX" not in environment(cluster, cluster.nodes[0], facts)


def test_one_index_for_all_ports_leaves_out_the_port_that_has_another_one() -> None:
    cluster, _, facts = build({})
    node, net = cluster.nodes[0], facts["node01"].net.value
    first = replace(PORT, gids=gids((3, "::ffff:10.10.0.11", "v2")))
    second = replace(PORT, hca="mlx5_1", gids=gids((5, "::ffff:10.10.0.111", "v2")))
    third = replace(PORT, hca="mlx5_2", gids=gids((3, "::ffff:10.10.0.112", "v2"), (9, "::ffff:10.99.0.1", "v2")))
    index, ports = gid_index(node, (second, first, third), net, "enp65s0f0", cluster)
    assert (index, [port.hca for port in ports]) == (3, ["mlx5_0", "mlx5_2"])
    assert gid_index(node, (PORT,), net, "enp65s0f0", cluster) == (None, ())


@pytest.mark.parametrize(
    ("subnet", "address", "serves"),
    [
        ("10.10.0.0/24", "10.10.0.111", True),  # a second card in the stated subnet
        ("10.10.0.0/24", "192.168.1.11", False),
        (None, "10.10.0.111", True),  # the subnet of the data interface
        (None, "192.168.1.111", False),  # that of another one
        (None, "10.10.0.11", True),  # the data address itself
    ],
)
def test_a_port_belongs_by_a_gid_address_of_the_data_subnet(subnet: str | None, address: str, serves: bool) -> None:
    cluster, _, facts = build({"cluster": {"network": {"subnet": subnet}}})
    port = replace(PORT, netdev=None, gids=(RdmaGid(3, f"::ffff:{address}", "v2", None),))
    node, net = cluster.nodes[0], facts["node01"].net.value
    assert bool(rdma_ports(node, (port,), net, "enp65s0f0", cluster)) is serves


def test_the_oldest_nccl_counts_and_odd_versions_do_not() -> None:
    _, _, facts = build(
        {"facts": {"node01": {"python": {"packages": {"=": {"nvidia-nccl-cu12": "2.19.3", "nvidia-nccl-cu13": "x.y"}}}}}}
    )
    assert nccl_version(facts["node01"]) == (2, 19, 3)
