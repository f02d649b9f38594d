"""The environment of the ranks: each variable, its reason and its origin."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from launch.env import environments, is_secret, layers, shown, visible_devices
from netcheck.rank_env import Var, computed_environment
from r4090c.model import Fact, Node, NodeFacts, RdmaPort
from tests.launch.facts_of import cluster_of, facts_of, net_of, node_of, rdma_port

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "cases" / "env.json").read_text())


def _facts(case: dict[str, Any], node: Node, addresses: Sequence[str]) -> NodeFacts:
    """Return what is true of one node: all have the same interfaces and cards; the case states the routes of the first."""
    rdma: Fact[tuple[RdmaPort, ...]] = Fact(error="no answer")
    if case["rdma"] is not None:
        rdma = Fact(tuple(rdma_port(*port) for port in case["rdma"]))
    if case["ifaces"] is None:
        return facts_of(node.name, net=Fact(error="no answer"), rdma=rdma)
    own = {name: node.data_address if address == addresses[0] else address for name, address in case["ifaces"].items()}
    vias = [*case["routes"].values()]
    routes = case["routes"] if node.name == "node01" else {peer: vias[0] for peer in addresses if peer != node.data_address}
    return facts_of(node.name, net=net_of(own, routes), rdma=rdma)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_cases(case: dict[str, Any]) -> None:
    loopback = case["kind"] == "loopback"
    first = "127.0.0.1" if loopback else "10.10.0.11"
    addresses = [first, *case["routes"]]
    nodes = [node_of(f"node{index:02d}", own, case["gpus"]) for index, own in enumerate(addresses, start=1)]
    nodes[0] = node_of("node01", first, case["gpus"], case.get("node_env"))
    facts = {node.name: _facts(case, node, addresses) for node in nodes}
    cluster = cluster_of(nodes, case["kind"], case.get("cluster_env"))
    computed = computed_environment(cluster, nodes, facts)
    found = environments(cluster, nodes, computed, case.get("user_env", {}))["node01"]
    assert {name: found[name].value if name in found else None for name in case["expect"]} == case["expect"]
    for name, text in case.get("why", {}).items():
        assert found[name].reason.startswith(text)
    assert {name: found[name].origin for name in case.get("origin", {})} == case.get("origin", {})
    assert all(var.reason for var in found.values())


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY",
        "HF_TOKEN",
        "aws_secret_access_key",
        "DB_PASSWORD",
        "MYSQL_PWD",
        "KEY",
        "S3_TOKENS",
        "HTTP_AUTH",
        "API_KEY_2",
        "GITHUB_PAT",
    ],
)
def test_secret_names(name: str) -> None:
    assert is_secret(name, "x")
    assert shown(name, "x") == "***"


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "PWD", "KEYBOARD", "AUTHOR", "PASSENGER", "NCCL_IB_PKEY", "PATH", "COMPAT"]
)
def test_names_that_only_look_like_secrets(name: str) -> None:
    assert not is_secret(name, "x")
    assert shown(name, "x") == "x"


@pytest.mark.parametrize(("value", "expected"), [(None, None), ("", ()), ("0,2", ("0", "2")), (" 1 , GPU-ab ,", ("1", "GPU-ab"))])
def test_visible_devices(value: str | None, expected: tuple[str, ...] | None) -> None:
    assert visible_devices({} if value is None else {"CUDA_VISIBLE_DEVICES": Var(value, "a test")}) == expected


def test_an_address_with_a_password_in_it_is_a_secret_whatever_its_name() -> None:
    assert shown("HTTP_PROXY", "http://user:word@proxy:3128") == "***"
    assert shown("DATABASE_URL", "postgresql://u:p@db/x") == "***"
    assert shown("HTTP_PROXY", "http://proxy:3128") == "http://proxy:3128"
    assert shown("REMOTE", "git@host:path/x") == "git@host:path/x"


def test_layers_part_what_all_nodes_share_from_what_is_a_nodes_own() -> None:
    shared, here, there = Var("0", "shared"), Var("=eth0", "route"), Var("=eth1", "route")
    common, own = layers(
        {"node01": {"A": shared, "B": here}, "node02": {"A": Var("0", "in other words"), "B": there, "C": shared}}
    )
    assert common == {"A": shared}
    assert own == {"node01": {"B": here}, "node02": {"B": there, "C": shared}}
    assert layers({"node01": {"A": shared}}) == ({"A": shared}, {"node01": {}})
    assert layers({"node01": {"A": shared}, "node02": {"A": Var("0", "x", "--env")}})[0] == {}  # another origin is another layer
    assert layers({}) == ({}, {})
