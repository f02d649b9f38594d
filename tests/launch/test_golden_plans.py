"""Whole plans of every kind of cluster, and by hand the variables that decide: a rewrite must not hide a fault.

After a wanted change `python -m tests.launch.test_golden_plans` writes tests/golden/plans/; read the diff.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from launch.env import layers
from launch.plan import Code, Job, Plan, Ports, make_plan, plan_json
from netcheck.rank_env import computed_environment
from r4090c.model import PortTest, RdmaGid
from r4090c.paths import RunPaths
from tests.launch.facts_of import cluster_of
from tests.launch.settings import (
    DATE,
    SETTINGS,
    Setting,
    card,
    facts,
    infiniband,
    measured_roce,
    nodes_of,
    office,
    rails,
    roce,
    roce_nodes,
    tcp_nodes,
    vlan,
    with_network,
)

FOLDER = Path(__file__).resolve().parents[1] / "golden" / "plans"
TREE = "/mnt/shared/r4090c/code/0123456789abcdef"


def planned(setting: Setting) -> Plan:
    run = RunPaths(PurePosixPath("/mnt/shared/r4090c/runs/tiny-20261130-014212-a3f1"))
    return make_plan(
        setting.cluster,
        setting.cluster.nodes,
        setting.facts,
        Job("tiny", "train/main.py", ("--recipe", str(run.recipe)), steps=40),
        run=run,
        attempt=1,
        code=Code(TREE, "0123456789abcdef" * 4),
        ports=Ports(41001, 41002),
        created_at="2026-11-30T01:42:12Z",
        p2p=setting.p2p,
        port_tests=setting.port_tests,
    )


def variables(setting: Setting, node: str) -> dict[str, str]:
    """Return NCCL's and gloo's variables of a node's ranks, without those that are the same in every setting."""
    env = next(one.env for one in planned(setting).nodes if one.name == node)
    assert (env["NCCL_NET_GDR_LEVEL"].value, env["NCCL_DEBUG"].value, env["CUDA_DEVICE_ORDER"].value) == (
        "LOC",
        "WARN",
        "PCI_BUS_ID",
    )
    assert "NCCL_SHM_DISABLE" not in env
    assert env["GLOO_SOCKET_IFNAME"].value == env["TP_SOCKET_IFNAME"].value == env["NCCL_SOCKET_IFNAME"].value.removeprefix("=")
    left_out = ("NCCL_NET_GDR_LEVEL", "NCCL_DEBUG")
    return {name: var.value for name, var in env.items() if name.startswith("NCCL_") and name not in left_out}


def reason(setting: Setting, node: str, name: str) -> str:
    return next(one.env[name].reason for one in planned(setting).nodes if one.name == node)


@pytest.mark.parametrize("name", SETTINGS)
def test_golden(name: str) -> None:
    told: dict[str, Any] = json.loads(json.dumps(plan_json(planned(SETTINGS[name]))))
    assert told == json.loads((FOLDER / f"{name}.json").read_text())


def test_every_golden_file_has_its_setting() -> None:
    assert {file.stem for file in FOLDER.glob("*.json")} == {*SETTINGS}


ROCE = {"NCCL_SOCKET_IFNAME": "=ens5f0np0", "NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "0", "NCCL_IB_HCA": "=mlx5_0:1"}

DECIDED: dict[str, dict[str, dict[str, str]]] = {
    "roce": {"node01": ROCE, "node02": ROCE},
    # PFC guards priority 3, to which DSCP 24 to 31 lead: 26 × 4. The second port of node02 was slow, that of node01 untested.
    "roce-measured": {
        "node01": {**ROCE, "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1", "NCCL_IB_TC": "104"},
        "node02": {**ROCE, "NCCL_IB_TC": "104"},
    },
    "infiniband": {"node01": {**ROCE, "NCCL_SOCKET_IFNAME": "=ib0"}, "node02": {**ROCE, "NCCL_SOCKET_IFNAME": "=ib0"}},
    # 25 Gbit/s are two cores' work of 20.
    "tcp": {
        "node01": {
            "NCCL_SOCKET_IFNAME": "=enp1s0f0np0",
            "NCCL_P2P_DISABLE": "1",
            "NCCL_IB_DISABLE": "1",
            "NCCL_SOCKET_NTHREADS": "2",
            "NCCL_NSOCKS_PERTHREAD": "2",
        }
    },
    "one-node": {"node01": {"NCCL_SOCKET_IFNAME": "=ens5f0np0", "NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}},
    # NCCL keeps P2P below one switch, unless it is told how far it reaches.
    "patched-p2p-proven": {"node01": {**ROCE, "NCCL_P2P_DISABLE": "0", "NCCL_P2P_LEVEL": "SYS"}, "node02": ROCE},
    "patched-p2p-refuted": {"node01": ROCE, "node02": ROCE},
    "patched-p2p-untested": {"node01": ROCE, "node02": ROCE},
    # node03 has no RDMA card: sockets everywhere, P2P where it was proven, each node's own interface.
    "mixed": {
        "node01": {
            "NCCL_SOCKET_IFNAME": "=ens5f0np0",
            "NCCL_P2P_DISABLE": "0",
            "NCCL_P2P_LEVEL": "SYS",
            "NCCL_IB_DISABLE": "1",
            "NCCL_SOCKET_NTHREADS": "4",
            "NCCL_NSOCKS_PERTHREAD": "4",
        },
        "node03": {
            "NCCL_SOCKET_IFNAME": "=enp3s0",
            "NCCL_P2P_DISABLE": "1",
            "NCCL_IB_DISABLE": "1",
            "NCCL_SOCKET_NTHREADS": "4",
            "NCCL_NSOCKS_PERTHREAD": "4",
        },
    },
    "docker": {"node01": ROCE, "node02": ROCE},
    "bond": {"node01": {**ROCE, "NCCL_SOCKET_IFNAME": "=bond0", "NCCL_IB_HCA": "=mlx5_bond_0:1"}},
    # NCCL >= 2.21 takes the first v2 IPv4 GID, that of the untagged network: the range leads it to the VLAN's.
    "vlan": {
        "node01": {**ROCE, "NCCL_SOCKET_IFNAME": "=ens6f0.90", "NCCL_IB_ADDR_RANGE": "10.90.4.0/24"},
        "node02": {**ROCE, "NCCL_SOCKET_IFNAME": "=ens6f0.90", "NCCL_IB_ADDR_RANGE": "10.90.4.0/24"},
    },
    # Index 5 as in the fixture; node02 has one more address before it.
    "vlan-old-nccl": {
        "node01": {**ROCE, "NCCL_SOCKET_IFNAME": "=ens6f0.90", "NCCL_IB_GID_INDEX": "5"},
        "node02": {**ROCE, "NCCL_SOCKET_IFNAME": "=ens6f0.90", "NCCL_IB_GID_INDEX": "7"},
    },
    "isolated-rails": {
        "node01": {**ROCE, "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1", "NCCL_CROSS_NIC": "0"},
        "node02": {**ROCE, "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1", "NCCL_CROSS_NIC": "0"},
    },
    # mlx5_0 of one node and mlx5_1 of the other are on one switch: only the rail of the data addresses is left.
    "crossed-rails": {
        "node01": ROCE,
        "node02": {**ROCE, "NCCL_SOCKET_IFNAME": "=ens5f1np1", "NCCL_IB_HCA": "=mlx5_1:1"},
    },
    "old-nccl": {"node01": {**ROCE, "NCCL_IB_GID_INDEX": "3"}, "node02": {**ROCE, "NCCL_IB_GID_INDEX": "3"}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_decides(name: str) -> None:
    for node, expected in DECIDED[name].items():
        assert variables(SETTINGS[name], node) == expected


@pytest.mark.parametrize("name", SETTINGS)
def test_nccl_takes_one_transport_everywhere_and_never_an_unfit_interface(name: str) -> None:
    plan = planned(SETTINGS[name])
    assert len({node.env["NCCL_IB_DISABLE"].value for node in plan.nodes}) == 1
    for node in plan.nodes:
        assert not re.match(r"=(lo|docker|br-|veth|virbr|wg)", node.env["NCCL_SOCKET_IFNAME"].value)
        threads, sockets = (
            int(node.env[one].value) if one in node.env else 1 for one in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")
        )
        assert threads <= 16 and threads * sockets <= 64
        assert all(var.reason and var.origin for var in node.env.values())
    assert plan.warnings == ()  # nobody set anything


def test_the_node_without_rdma_is_named_on_all_nodes() -> None:
    for node in ("node01", "node02", "node03"):
        told = reason(SETTINGS["mixed"], node, "NCCL_IB_DISABLE")
        assert "node03: no active RDMA port on the data network" in told and "node01:" not in told
    assert (
        computed_environment(SETTINGS["mixed"].cluster, SETTINGS["mixed"].cluster.nodes[:2], SETTINGS["mixed"].facts)["node01"][
            "NCCL_IB_DISABLE"
        ].value
        == "0"
    )  # a run without that node has RDMA


def test_a_node_whose_rdma_is_unknown_counts_as_one_without() -> None:
    setting = roce_nodes()
    unknown = replace(setting.facts["node02"], rdma=replace(setting.facts["node02"].rdma, value=None, error="timed out"))
    told = computed_environment(setting.cluster, setting.cluster.nodes, {**setting.facts, "node02": unknown})["node01"][
        "NCCL_IB_DISABLE"
    ]
    assert told.value == "1" and "node02: RDMA ports unknown (timed out)" in told.reason


def test_the_reason_says_what_was_measured_and_what_was_left_out() -> None:
    told = reason(SETTINGS["roce-measured"], "node02", "NCCL_IB_HCA")
    assert f"mlx5_0:1 carries 97.1 Gbit/s ({DATE})" in told
    assert f"left out: mlx5_1:1 failed the bandwidth test of {DATE}: receives 11.2 Gbit/s" in told
    assert "not measured: mlx5_1:1 (r4090c preflight --only rdma-bandwidth)" in reason(
        SETTINGS["roce-measured"], "node01", "NCCL_IB_HCA"
    )
    assert "mlx5_1:1 (10.31.5.0/24): other nodes" in reason(SETTINGS["crossed-rails"], "node01", "NCCL_IB_HCA")


def failing(carries: bool) -> Setting:
    setting = roce_nodes()
    return replace(setting, port_tests={"node02": {"mlx5_0:1": PortTest("mlx5_0:1", False, carries, DATE, "because")}})


def test_a_last_port_stays_while_it_carries_anything() -> None:
    assert variables(failing(carries=True), "node02") == ROCE
    assert "kept: there is no other, and TCP is slower yet" in reason(failing(carries=True), "node02", "NCCL_IB_HCA")


def test_a_last_port_that_carries_nothing_takes_all_nodes_to_tcp() -> None:
    setting = failing(carries=False)
    assert {variables(setting, node)["NCCL_IB_DISABLE"] for node in ("node01", "node02")} == {"1"}
    assert f"node02: mlx5_0:1 failed the bandwidth test of {DATE}: because" in reason(setting, "node01", "NCCL_IB_DISABLE")


@pytest.mark.parametrize(
    ("rate_gbit_s", "threads"), [(1, None), (10, None), (20, None), (25, "2"), (50, "3"), (100, "4"), (200, "4")]
)
def test_socket_threads_by_the_rate(rate_gbit_s: int, threads: str | None) -> None:
    for setting in (tcp_nodes(rate_gbit_s), replace(tcp_nodes(1), cluster=with_network(tcp_nodes(1).cluster, None, rate_gbit_s))):
        found = variables(setting, "node01")
        assert found.get("NCCL_SOCKET_NTHREADS") == found.get("NCCL_NSOCKS_PERTHREAD") == threads


def test_a_range_is_set_only_where_nccl_would_find_another_gid() -> None:
    assert "NCCL_IB_ADDR_RANGE" not in variables(SETTINGS["isolated-rails"], "node01")
    assert "NCCL_IB_ADDR_RANGE" not in variables(SETTINGS["bond"], "node01")
    unknown = vlan()
    nameless = {
        name: replace(own, python=replace(own.python, value=None, error="no answer")) for name, own in unknown.facts.items()
    }
    assert variables(replace(unknown, facts=nameless), "node02")["NCCL_IB_GID_INDEX"] == "7"  # an index works with every version


def test_a_port_without_a_gid_of_the_data_network_is_left_out() -> None:
    setting = roce_nodes()
    node = setting.cluster.nodes[1]
    bare = facts(node, setting.cluster.nodes, [office(node)], "eno1", [roce("mlx5_0", "eno1")])
    told = computed_environment(setting.cluster, setting.cluster.nodes, {**setting.facts, "node02": bare})["node01"][
        "NCCL_IB_DISABLE"
    ]
    assert told.value == "1" and "mlx5_0:1 has no RoCE v2 IPv4 GID of the data network" in told.reason


def test_rails_that_one_node_lacks_are_left_out_everywhere() -> None:
    setting = rails()
    second = setting.facts["node02"]
    single = replace(second, rdma=replace(second.rdma, value=(second.rdma.value or ())[:1]))
    found = computed_environment(setting.cluster, setting.cluster.nodes, {**setting.facts, "node02": single})
    assert {env["NCCL_IB_HCA"].value for env in found.values()} == {"=mlx5_0:1"}
    assert "NCCL_CROSS_NIC" not in found["node01"]


def test_subnets_that_no_two_nodes_share_are_routed_and_no_rails() -> None:
    nodes = nodes_of(2)
    told = {}
    for place, node in enumerate(nodes):
        own = [f"10.31.{20 + place}.1", f"10.31.{30 + place}.1"]
        ifaces = [card("ens5f0np0", f"{own[0]}/24"), card("ens5f1np1", f"{own[1]}/24")]
        ports = [roce("mlx5_0", "ens5f0np0", own[0]), roce("mlx5_1", "ens5f1np1", own[1])]
        told[node.name] = facts(node, nodes, ifaces, "ens5f0np0", ports)
    cluster = with_network(cluster_of(nodes, "roce"), subnet="10.31.0.0/16")
    for env in computed_environment(cluster, nodes, told).values():
        assert env["NCCL_IB_HCA"].value == "=mlx5_0:1,mlx5_1:1"
        assert "NCCL_CROSS_NIC" not in env


def test_a_data_network_of_ipv6() -> None:
    nodes = [replace(node, data_address=f"fd00:31::{place}") for place, node in enumerate(nodes_of(2), start=1)]
    told = {}
    for node in nodes:
        port = replace(
            roce("mlx5_0", "ens5f0np0"),
            gids=(RdmaGid(0, "fe80::1", "v2", "ens5f0np0"), RdmaGid(1, node.data_address, "v2", "ens5f0np0")),
        )
        told[node.name] = facts(node, nodes, [card("ens5f0np0", f"{node.data_address}/64")], "ens5f0np0", [port])
    env = computed_environment(cluster_of(nodes, "roce"), nodes, told)["node01"]
    assert (env["NCCL_SOCKET_FAMILY"].value, env["NCCL_IB_ADDR_FAMILY"].value) == ("AF_INET6", "AF_INET6")
    assert (env["NCCL_IB_DISABLE"].value, env["NCCL_IB_HCA"].value) == ("0", "=mlx5_0:1")
    assert "NCCL_IB_ADDR_RANGE" not in env and "NCCL_IB_GID_INDEX" not in env


def test_infiniband_rails_are_told_by_their_subnet_prefix() -> None:
    setting = SETTINGS["infiniband"]
    ports = (infiniband("mlx5_0", "ib0"), infiniband("mlx5_1", "ib1", "fec0::"))
    told = {name: replace(own, rdma=replace(own.rdma, value=ports)) for name, own in setting.facts.items()}
    env = computed_environment(setting.cluster, setting.cluster.nodes, told)["node02"]
    assert (env["NCCL_CROSS_NIC"].value, env["NCCL_IB_HCA"].value) == ("0", "=mlx5_0:1,mlx5_1:1")
    assert "prefix fe80::, prefix fec0::" in env["NCCL_CROSS_NIC"].reason


def test_no_traffic_class_where_the_nodes_disagree() -> None:
    setting = measured_roce()
    other = tuple(replace(one, pfc=(4,)) for one in setting.facts["node02"].qos.value or ())
    changed = replace(setting.facts["node02"], qos=replace(setting.facts["node02"].qos, value=other))
    found = computed_environment(setting.cluster, setting.cluster.nodes, {**setting.facts, "node02": changed})
    assert all("NCCL_IB_TC" not in env for env in found.values())


def test_the_layers_of_a_mixed_cluster() -> None:
    plan = planned(SETTINGS["mixed"])
    common, own = layers({node.name: node.env for node in plan.nodes})
    assert {"NCCL_IB_DISABLE", "NCCL_SOCKET_NTHREADS", "NCCL_NET_GDR_LEVEL"} <= {*common}
    assert {name for name in own["node03"] if name.startswith("NCCL_")} == {"NCCL_SOCKET_IFNAME", "NCCL_P2P_DISABLE"}
    assert "NCCL_P2P_LEVEL" in own["node01"]


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, setting in SETTINGS.items():
        (FOLDER / f"{name}.json").write_text(json.dumps(plan_json(planned(setting)), indent=1) + "\n")
