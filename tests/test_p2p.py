"""P2P: a proof holds for the node as it was; launch turns P2P on where it holds, and says why."""

from __future__ import annotations

import json
import logging
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.env import environments
from launch.run import known_proofs
from netcheck.measure import p2p as arms_of
from netcheck.p2p import fingerprint, judge_arms, proofs
from netcheck.rank_env import computed_environment
from r4090c.cli.preflight import _remember_p2p
from r4090c.model import Cluster, Expect, Fact, NodeFacts, P2pProof
from r4090c.store import p2p_proofs, record_p2p
from tests.checks.cases import HERE, build

DATE = "2026-11-30"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("R4090C_STATE", str(tmp_path))
    return tmp_path


def case(name: str) -> tuple[Cluster, dict[str, NodeFacts], Any]:
    """Return cluster, facts and the measurement of one case of the check p2p-truth."""
    told = json.loads((HERE / "p2p-truth" / f"{name}.json").read_text())
    cluster, raw, facts = build(told)
    return cluster, facts, raw.measurements["p2p"]


def variable(cluster: Cluster, facts: dict[str, NodeFacts], node: str) -> tuple[str, str]:
    """Return value and reason of NCCL_P2P_DISABLE as a launch would set it."""
    computed = computed_environment(cluster, cluster.nodes, facts, known_proofs(cluster, cluster.nodes, facts))
    var = environments(cluster, cluster.nodes, computed, {})[node]["NCCL_P2P_DISABLE"]
    return var.value, var.reason


def remember(cluster: Cluster, facts: dict[str, NodeFacts], measured: Any) -> dict[str, P2pProof]:
    found = proofs(measured, facts, cluster.expect, DATE)
    for node, proof in found.items():
        record_p2p(cluster.name, node, proof)
    return found


def test_launch_turns_p2p_on_where_it_was_proven(state: Path) -> None:
    cluster, facts, measured = case("proven")
    assert variable(cluster, facts, "node01")[0] == "1"
    assert {proof.proven for proof in remember(cluster, facts, measured).values()} == {True}
    assert variable(cluster, facts, "node01") == ("0", f"two-arm test of {DATE}: 20.4 GB/s with P2P, 9.35 without")


def test_the_preflight_remembers_what_it_measured(state: Path) -> None:
    told = json.loads((HERE / "p2p-truth" / "false-grants.json").read_text())
    cluster, raw, facts = build(told)
    _remember_p2p(cluster, raw, facts)
    assert {node: (proof.proven, proof.date) for node, proof in p2p_proofs(cluster.name).items()} == dict.fromkeys(
        ("node01", "node02", "node03"), (False, raw.started_at[:10])
    )
    _remember_p2p(cluster, replace(raw, measurements={}), facts)
    _remember_p2p(cluster, replace(raw, measurements={"p2p": {"rounds": "damaged"}}), facts)
    assert len(p2p_proofs(cluster.name)) == 3


def test_what_was_refuted_stays_off_and_says_why(state: Path) -> None:
    cluster, facts, measured = case("false-grants")
    assert [proof.proven for proof in remember(cluster, facts, measured).values()] == [False] * 3
    value, reason = variable(cluster, facts, "node02")
    assert value == "1" and "wrong values with P2P" in reason


def changes(facts: NodeFacts) -> dict[str, NodeFacts]:
    """Return what may change on a node so that a proof no longer counts."""
    gpus, kernel, system, python = facts.gpus.value, facts.kernel.value, facts.os.value, facts.python.value
    assert gpus and kernel and system and python
    grown = {**python.packages, "nvidia-nccl-cu12": "2.99.0"}
    return {
        "driver": replace(facts, gpus=Fact(tuple(replace(gpu, driver="580.65.06") for gpu in gpus))),
        "card": replace(facts, gpus=Fact((replace(gpus[0], uuid="GPU-other"), *gpus[1:]))),
        "iommu": replace(facts, kernel=Fact(replace(kernel, cmdline=kernel.cmdline + " iommu=on"))),
        "kernel": replace(facts, os=Fact(replace(system, kernel="6.99.0"))),
        "nccl": replace(facts, python=Fact(replace(python, packages=grown))),
        "unread": replace(facts, kernel=Fact(error="no answer in 5 s")),
    }


@pytest.mark.parametrize("what", ["driver", "card", "iommu", "kernel", "nccl", "unread"])
def test_a_changed_node_voids_its_proof(state: Path, what: str) -> None:
    cluster, facts, measured = case("proven")
    remember(cluster, facts, measured)
    changed = {**facts, "node02": changes(facts["node02"])[what]}
    assert variable(cluster, changed, "node02")[0] == "1"
    assert variable(cluster, changed, "node01")[0] == "0"


def test_what_does_not_matter_keeps_it(state: Path) -> None:
    cluster, facts, measured = case("proven")
    remember(cluster, facts, measured)
    gpus = facts["node01"].gpus.value
    assert gpus is not None
    warm = replace(
        facts["node01"], gpus=Fact(tuple(replace(gpu, temperature_c=71, power_w=400.0, pcie_gen=4) for gpu in gpus[::-1]))
    )
    assert fingerprint(warm) == fingerprint(facts["node01"])


def test_the_last_test_counts_and_clusters_are_kept_apart(state: Path) -> None:
    first, second = P2pProof("f", True, "2026-01-01", "a"), P2pProof("f", False, "2026-02-01", "b")
    record_p2p("one", "node01", first)
    record_p2p("two", "node01", first)
    record_p2p("one", "node01", second)
    assert p2p_proofs("one") == {"node01": second}
    assert p2p_proofs("two") == {"node01": first}
    assert p2p_proofs("three") == {}


def test_a_user_has_the_last_word(state: Path) -> None:
    cluster, facts, measured = case("proven")
    remember(cluster, facts, measured)
    computed = computed_environment(cluster, cluster.nodes, facts, known_proofs(cluster, cluster.nodes, facts))
    assert computed["node01"]["NCCL_P2P_DISABLE"].value == "0"
    env = environments(cluster, cluster.nodes, computed, {"NCCL_P2P_DISABLE": "1"})["node01"]
    assert (env["NCCL_P2P_DISABLE"].value, env["NCCL_P2P_DISABLE"].origin) == ("1", "--env")


def test_history_that_cannot_be_read_is_no_reason_not_to_train(state: Path, caplog: pytest.LogCaptureFixture) -> None:
    cluster, facts, measured = case("proven")
    remember(cluster, facts, measured)
    with sqlite3.connect(state / "r4090c.db") as database:
        database.execute("DROP TABLE p2p")
        database.execute("CREATE TABLE p2p (empty TEXT)")
    database.close()
    with caplog.at_level(logging.WARNING):
        assert known_proofs(cluster, cluster.nodes, facts) == {}
    assert "cannot be read" in caplog.text


def test_without_gpus_nobody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R4090C_STATE", str(tmp_path / "state"))
    cluster, _, facts = build({"cluster": {"nodes": {"*": {"gpus": 0}}}})
    assert known_proofs(cluster, cluster.nodes, facts) == {}
    assert not (tmp_path / "state").exists()


def test_faster_means_by_more_than_noise() -> None:
    _, _, measured = case("proven")
    arms = arms_of.read(measured)[0]
    assert judge_arms(arms, Expect())[0] is True
    assert judge_arms(arms, Expect(p2p_faster_min=2.5))[0] is False
    assert judge_arms(replace(arms, on=arms.on[:1]), Expect())[0] is None
    assert judge_arms(replace(arms, off=()), Expect())[0] is None
