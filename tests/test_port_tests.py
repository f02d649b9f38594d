"""What the RDMA measurement says of a port, how it is remembered, and that it reaches the ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from netcheck.port_tests import port_tests
from netcheck.rank_env import computed_environment, measured_environment
from r4090c.cli.preflight import _remember_ports
from r4090c.errors import ParseError
from r4090c.model import Cluster, NodeFacts, PortTest
from r4090c.store import port_tests as remembered
from r4090c.store import record_ports
from tests.checks.cases import HERE, build

DATE = "2026-11-30"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("R4090C_STATE", str(tmp_path))
    return tmp_path


def case(name: str, change: dict[str, Any] | None = None) -> tuple[Cluster, Any, dict[str, NodeFacts]]:
    told = json.loads((HERE / "rdma-bandwidth" / f"{name}.json").read_text())
    return build({**told, **(change or {})})


def found_in(name: str) -> dict[str, dict[str, PortTest]]:
    cluster, raw, facts = case(name)
    return port_tests(raw.measurements["rdma-pairs"], {node: own.net.value for node, own in facts.items()}, cluster, DATE)


def test_a_slow_node_fails_and_its_partners_do_not() -> None:
    found = found_in("sends-slowly")
    assert {node: own["mlx5_0:1"].passed for node, own in found.items()} == {
        "node01": True,
        "node02": False,
        "node03": True,
        "node04": True,
    }
    slow = found["node02"]["mlx5_0:1"]
    assert (slow.carries, slow.date) == (True, DATE) and slow.reason.startswith("sends slowly: 60 Gbit/s")


def test_a_warning_is_a_pass_and_what_was_not_measured_says_nothing() -> None:
    assert found_in("all-well")["node01"]["mlx5_0:1"] == PortTest("mlx5_0:1", True, True, DATE, "carries 97.8 Gbit/s")
    assert all(test.passed for own in found_in("warn-one-link").values() for test in own.values())
    assert {*found_in("no-port")} == {"node01", "node02"}
    assert {*found_in("not-installed")} == {"node01", "node03"}


def test_a_node_through_which_nothing_comes_carries_nothing() -> None:
    """All of node02's links fail over RDMA; those between the others are well."""
    cluster, raw, facts = case("no-packet-comes-through")
    measured = json.loads(json.dumps(raw.measurements["rdma-pairs"]))
    dead = next(
        step
        for one in measured["rounds"]
        for record in one
        for part in record["parts"].values()
        for step in part.get("steps", [])
        if "Completion with error" in step.get("stdout", "") + step.get("stderr", "")
    )
    for one in measured["rounds"]:
        for record in one:
            if "node02" in record["parts"]:
                for part in record["parts"].values():
                    part["steps"] = [dead for _ in part["steps"]]
    found = port_tests(measured, {node: own.net.value for node, own in facts.items()}, cluster, DATE)
    broken = found["node02"]["mlx5_0:1"]
    assert (broken.passed, broken.carries) == (False, False) and broken.reason.startswith("nothing came through: ")
    assert found["node01"]["mlx5_0:1"].passed and found["node03"]["mlx5_0:1"].passed
    env = computed_environment(cluster, cluster.nodes, facts, tests=found)
    assert {one["NCCL_IB_DISABLE"].value for one in env.values()} == {"1"}
    assert "node02: mlx5_0:1 failed the bandwidth test" in env["node01"]["NCCL_IB_DISABLE"].reason
    # What is measured after it runs over what a run would use.
    assert measured_environment(cluster, cluster.nodes, facts, found)["node03"]["NCCL_IB_DISABLE"] == "1"
    assert measured_environment(cluster, cluster.nodes, facts)["node03"]["NCCL_IB_DISABLE"] == "0"


def test_a_preflight_remembers_and_the_last_test_counts(state: Path) -> None:
    cluster, raw, facts = case("sends-slowly")
    _remember_ports(cluster, raw, facts)
    assert remembered(cluster.name)["node02"]["mlx5_0:1"].passed is False
    mended = PortTest("mlx5_0:1", True, True, "2026-12-01", "carries 97.8 Gbit/s")
    record_ports(cluster.name, {"node02": {"mlx5_0:1": mended}})
    assert remembered(cluster.name)["node02"] == {"mlx5_0:1": mended}
    assert remembered(cluster.name)["node01"]["mlx5_0:1"].date == raw.started_at[:10]
    assert remembered("another") == {}


def test_what_is_no_measurement_is_told() -> None:
    cluster, _, facts = case("all-well")
    with pytest.raises(ParseError):
        port_tests({"rounds": 7}, {node: own.net.value for node, own in facts.items()}, cluster, DATE)
