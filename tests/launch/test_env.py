"""The environment of the ranks: each variable, its reason and its origin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch.env import is_secret, node_environment, shown, visible_devices
from netcheck.rank_env import Var
from r4090c.model import Fact
from tests.launch.facts_of import cluster_of, facts_of, net_of, node_of, rdma_port

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "cases" / "env.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_cases(case: dict[str, Any]) -> None:
    address = "127.0.0.1" if case["kind"] == "loopback" else "10.10.0.11"
    node = node_of("node01", address, case["gpus"], case.get("node_env"))
    peers = {"node01": address, **{f"node{index:02d}": peer for index, peer in enumerate(case["routes"], start=2)}}
    net = net_of(case["ifaces"], case["routes"]) if case["ifaces"] is not None else Fact(error="no answer")
    rdma = Fact(tuple(rdma_port(*port) for port in case["rdma"])) if case["rdma"] is not None else Fact(error="no answer")
    cluster = cluster_of([node], case["kind"], case.get("cluster_env"))
    found = node_environment(cluster, node, facts_of("node01", net=net, rdma=rdma), peers, case.get("user_env", {}))
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
