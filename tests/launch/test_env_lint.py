"""Warnings about variables that people set: every rule fires where it should, is quiet where it should, and bears any text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from launch.env import environments
from launch.env_lint import INTERNAL, MANUAL, OLD, RULES, Doubt, lint
from netcheck.rank_env import computed_environment
from tests.launch.facts_of import cluster_of
from tests.launch.settings import SETTINGS, Setting, card, facts, nodes_of, office, roce

CASES: dict[str, dict[str, list[dict[str, Any]]]] = json.loads((Path(__file__).parent / "cases" / "env_lint.json").read_text())
FIRES = [(rule, case) for rule, own in CASES.items() for case in own["fires"]]
QUIET = [(rule, case) for rule, own in CASES.items() for case in own["quiet"]]


def look_alikes() -> Setting:
    """Interfaces eth1 and eth10, cards mlx5_1 and mlx5_10."""
    nodes = nodes_of(2)
    told = {}
    for node in nodes:
        ifaces = [office(node), card("eth1", f"{node.data_address}/24"), card("eth10", "10.77.0.1/24")]
        ports = [roce("mlx5_1", "eth1", node.data_address), roce("mlx5_10", "eth10", "10.77.0.1")]
        told[node.name] = facts(node, nodes, ifaces, "eth1", ports)
    return Setting(cluster_of(nodes, "roce"), told)


KINDS = {**SETTINGS, "look-alikes": look_alikes()}


def doubts(setting: Setting, user: Mapping[str, str], node_env: Mapping[str, str] | None = None) -> tuple[Doubt, ...]:
    """Return the warnings; `node_env` is cluster.yaml's of the first node."""
    first, *rest = setting.cluster.nodes
    cluster = replace(setting.cluster, nodes=(replace(first, env=node_env or {}), *rest))
    computed = computed_environment(cluster, cluster.nodes, setting.facts, setting.p2p, setting.port_tests)
    return lint(cluster, cluster.nodes, setting.facts, environments(cluster, cluster.nodes, computed, user), computed)


def test_every_rule_has_cases_and_every_case_its_rule() -> None:
    assert {rule.id for rule in RULES} == {*CASES}
    assert len({rule.id for rule in RULES}) == len(RULES)
    assert all(own["fires"] and own["quiet"] for own in CASES.values())
    assert all(rule.why and rule.remedy for rule in RULES)


@pytest.mark.parametrize(("rule", "case"), FIRES, ids=[f"{rule}-{place}" for place, (rule, _) in enumerate(FIRES)])
def test_a_rule_fires(rule: str, case: dict[str, Any]) -> None:
    found = [one for one in doubts(KINDS[case["on"]], case.get("env", {}), case.get("node_env")) if one.rule == rule]
    assert any(case["observed"] in one.observed for one in found), found
    if "nodes" in case:
        assert {node for one in found for node in one.nodes} == {*case["nodes"]}


@pytest.mark.parametrize(("rule", "case"), QUIET, ids=[f"{rule}-{place}" for place, (rule, _) in enumerate(QUIET)])
def test_a_rule_is_quiet(rule: str, case: dict[str, Any]) -> None:
    assert [one for one in doubts(KINDS[case["on"]], case.get("env", {}), case.get("node_env")) if one.rule == rule] == []


@pytest.mark.parametrize("name", SETTINGS)
def test_what_was_computed_raises_no_doubt_also_when_somebody_states_it(name: str) -> None:
    setting = SETTINGS[name]
    assert doubts(setting, {}) == ()
    computed = computed_environment(setting.cluster, setting.cluster.nodes, setting.facts, setting.p2p, setting.port_tests)
    own = {variable: var.value for variable, var in computed["node01"].items()}
    assert [one for one in doubts(setting, {}, own) if one.rule != "gid-index-new-nccl"] == []


def test_a_warning_names_nodes_origin_and_rule_in_one_line() -> None:
    (found,) = doubts(SETTINGS["roce"], {"NCCL_SHM_DISABLE": "1"})
    assert found.text == (
        "NCCL_SHM_DISABLE (--env), node01, node02: 1 takes away the only way between GPUs of a node without P2P:"
        " GPUs of one node then talk over the network card; leave it out [shm-off]"
    )
    assert replace(found, nodes=("a", "b", "c", "d", "e")).text.startswith("NCCL_SHM_DISABLE (--env), a, b, c and 2 more: ")
    (found,) = doubts(SETTINGS["roce"], {}, {"NCCL_SHM_DISABLE": "1"})
    assert (found.origin, found.nodes) == ("cluster.yaml nodes.node01.env", ("node01",))


def test_real_names_are_not_taken_for_misspelt_ones() -> None:
    env = dict.fromkeys((*MANUAL, *INTERNAL, *OLD), "0")
    assert [one for one in doubts(SETTINGS["roce"], env) if one.rule == "misspelt"] == []
    assert len(MANUAL) > 100


LOOKED_AT = sorted(
    {*MANUAL, *OLD, "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING"}
    | {"OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT", "NCCL_", "nccl_x"}
)
VALUES = st.one_of(st.text(max_size=80), st.from_regex(r"\A[\^=]{0,3}[a-z0-9_:,\-+x^=]{0,40}\Z"), st.integers().map(str))


@hypothesis_settings(max_examples=300, deadline=None)
@given(
    user=st.dictionaries(st.sampled_from(LOOKED_AT), VALUES, max_size=8),
    own=st.dictionaries(st.sampled_from(LOOKED_AT), VALUES, max_size=4),
    name=st.sampled_from(sorted(KINDS)),
)
def test_any_text_is_borne(user: dict[str, str], own: dict[str, str], name: str) -> None:
    for one in doubts(KINDS[name], user, own):
        assert one.nodes and one.variable in {*user, *own}
        assert len(one.text) < 4000
