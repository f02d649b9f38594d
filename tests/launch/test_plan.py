"""The plan of an attempt. After a wanted change `python -m tests.launch.test_plan` writes the golden files; read the diff."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from launch.plan import Code, Job, Plan, Ports, make_plan, plan_from, plan_json, secrets_of
from r4090c.errors import UsageError
from r4090c.model import Cluster, Fact, Node, NodeFacts, PciDevice, RdmaPort
from r4090c.paths import RunPaths
from tests.launch.facts_of import cluster_of, cpus_of, facts_of, gpu_of, net_of, node_of, rdma_port

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
RUN = RunPaths(PurePosixPath("/mnt/shared/r4090c/runs/tiny-20261130-014212-a3f1"))
TREE = "/mnt/shared/r4090c/code/0123456789abcdef"
RECIPE_ARGS = ("--recipe", str(RUN.recipe), "--run-dir", str(RUN.root), "--data-dir", "/mnt/shared/r4090c/data")


def planned(cluster: Cluster, facts: Mapping[str, NodeFacts], job: Job, *, nodes: tuple[Node, ...] | None = None) -> Plan:
    return make_plan(
        cluster,
        nodes or cluster.nodes,
        facts,
        job,
        run=RUN,
        attempt=1,
        code=Code(TREE, "0123456789abcdef" * 4),
        ports=Ports(41001, 41002),
        created_at="2026-11-30T01:42:12Z",
    )


def cpu_nodes() -> tuple[Cluster, dict[str, NodeFacts]]:
    nodes = [node_of("node01", "10.10.0.11"), node_of("node02", "10.10.0.12", env={"LOCAL": "2"})]
    facts = {}
    for node, peer in zip(nodes, reversed(nodes), strict=True):
        net = net_of({"eth0": node.data_address}, {peer.data_address: "eth0"})
        facts[node.name] = facts_of(node.name, net=net, cpus=cpus_of({}, [[0], [1]]))
    return cluster_of(nodes, env={"HF_TOKEN": "hf_secret"}), facts


def gpu_nodes() -> tuple[Cluster, dict[str, NodeFacts]]:
    """Two machines with eight GPUs on two sockets, GPU 0 on the second; RoCE."""
    nodes = [node_of("node01", "10.10.0.11", 8), node_of("node02", "10.10.0.12", 8)]
    buses = ("01", "21", "41", "61", "81", "a1", "c1", "e1")
    gpus = Fact(tuple(gpu_of(index, f"0000:{bus}:00.0", 1 if index < 4 else 0) for index, bus in enumerate(buses)))
    cpus = cpus_of(
        {0: [*range(16), *range(32, 48)], 1: [*range(16, 32), *range(48, 64)]}, [[core, core + 32] for core in range(32)]
    )
    facts = {}
    for node, peer in zip(nodes, reversed(nodes), strict=True):
        net = net_of({"eno1": "192.168.1.1", "enp65s0f0": node.data_address}, {peer.data_address: "enp65s0f0"})
        rdma: Fact[tuple[RdmaPort, ...]] = Fact((rdma_port("mlx5_0:1", netdev="enp65s0f0"),))
        facts[node.name] = facts_of(node.name, net=net, cpus=cpus, gpus=gpus, rdma=rdma)
    return cluster_of(nodes, "roce"), facts


TINY = Job("tiny", "train/main.py", RECIPE_ARGS, steps=40)


def golden() -> dict[str, Any]:
    return {
        "plan-cpu.json": plan_json(planned(*cpu_nodes(), replace(TINY, nproc=2, env={"NCCL_DEBUG": "INFO"}))),
        "plan-gpu.json": plan_json(planned(*gpu_nodes(), TINY)),
    }


@pytest.mark.parametrize("name", ["plan-cpu.json", "plan-gpu.json"])
def test_golden(name: str) -> None:
    assert json.loads(json.dumps(golden()[name])) == json.loads((GOLDEN / name).read_text())


def test_secrets_are_in_no_plan_and_yet_reach_the_nodes() -> None:
    plan = planned(*cpu_nodes(), replace(TINY, env={"WANDB_API_KEY": "w_secret"}))
    text = json.dumps(plan_json(plan))
    assert "hf_secret" not in text and "w_secret" not in text
    assert plan_json(plan)["nodes"][0]["env"]["HF_TOKEN"]["value"] == "***"
    assert secrets_of(plan) == {name: {"HF_TOKEN": "hf_secret", "WANDB_API_KEY": "w_secret"} for name in ("node01", "node02")}


def test_the_plan_is_json_and_changes_nothing_on_the_way() -> None:
    told = plan_json(planned(*gpu_nodes(), TINY))
    assert json.loads(json.dumps(told)).keys() == told.keys()
    assert [rank["rank"] for node in told["nodes"] for rank in node["ranks"]] == list(range(16))
    assert told["world_size"] == 16


def test_every_cpu_belongs_to_one_rank_at_most() -> None:
    for node in planned(*gpu_nodes(), TINY).nodes:
        cpus = [cpu for rank in node.ranks for cpu in rank.cpus]
        assert len(cpus) == len(set(cpus))
    ranks = planned(*gpu_nodes(), TINY).nodes[0].ranks
    assert [rank.memory_node for rank in ranks] == [1, 1, 1, 1, 0, 0, 0, 0]


def test_nodes_with_different_numbers_of_gpus_are_refused_with_the_way_out() -> None:
    cluster, facts = gpu_nodes()
    nodes = (cluster.nodes[0], replace(cluster.nodes[1], gpus=4))
    with pytest.raises(UsageError) as caught:
        planned(cluster, facts, TINY, nodes=nodes)
    assert caught.value.observed == "they differ (node01: 8, node02: 4)"
    assert "--nproc-per-node 4" in caught.value.expected and caught.value.next_command == "r4090c nodes"
    assert planned(cluster, facts, replace(TINY, nproc=4), nodes=nodes).world_size == 8


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(UsageError, match="node01 has 8 GPUs"):
        planned(*gpu_nodes(), replace(TINY, nproc=9))
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES leaves 2 GPUs on node01"):
        planned(*gpu_nodes(), replace(TINY, nproc=4, env={"CUDA_VISIBLE_DEVICES": "6,7"}))


def test_visible_devices_decide_how_many_ranks_and_where() -> None:
    plan = planned(*gpu_nodes(), replace(TINY, env={"CUDA_VISIBLE_DEVICES": "3,4"}))
    assert [rank.memory_node for rank in plan.nodes[0].ranks] == [1, 0]
    assert plan.nodes[0].ranks[0].cpus[:3] == (18, 19, 20)


def test_another_device_order_makes_the_place_of_a_gpu_unknown() -> None:
    plan = planned(*gpu_nodes(), replace(TINY, env={"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}))
    assert {rank.memory_node for rank in plan.nodes[0].ranks} == {None}


def test_omp_threads_are_the_users_when_he_sets_them() -> None:
    plan = planned(*gpu_nodes(), replace(TINY, env={"OMP_NUM_THREADS": "3"}))
    assert plan.nodes[0].env["OMP_NUM_THREADS"].value == "3"
    assert all("OMP_NUM_THREADS" not in rank.env for rank in plan.nodes[0].ranks)
    # Four cores a rank: one for NCCL's proxy, one for a data worker.
    assert {rank.env["OMP_NUM_THREADS"].value for rank in planned(*gpu_nodes(), TINY).nodes[0].ranks} == {"2"}


def test_data_workers_have_a_share_of_the_cores_and_are_the_users_when_he_sets_them() -> None:
    rank = planned(*gpu_nodes(), TINY).nodes[0].ranks[0]
    assert rank.env["R4090C_DATA_WORKERS"].value == "1"
    assert rank.env["OMP_NUM_THREADS"].reason == "2 of 4 physical cores of this rank: 1 for data workers, 1 left to NCCL's proxy"
    own = planned(*gpu_nodes(), replace(TINY, env={"R4090C_DATA_WORKERS": "6"})).nodes[0]
    assert own.env["R4090C_DATA_WORKERS"].origin == "--env"
    assert all("R4090C_DATA_WORKERS" not in rank.env for rank in own.ranks)
    assert planned(*cpu_nodes(), TINY).nodes[0].ranks[0].env["R4090C_DATA_WORKERS"].value == "0"


# ------------------------------------------------------------------------------------------ GPUs and their neighbourhood


def alternating() -> tuple[Cluster, dict[str, NodeFacts]]:
    """The machines of gpu_nodes, as a board wires them that gives every other slot to the second socket."""
    cluster, facts = gpu_nodes()
    devices = tuple(
        PciDevice(gpu.pci, "gpu", "10de", 16, 16, 16.0, 16.0, place % 2, (f"0000:{gpu.pci[5:6]}0:01.1",))
        for place, gpu in enumerate(facts["node01"].gpus.value or ())
    )
    nic = PciDevice("0000:42:00.0", "nic", "15b3", 16, 16, 16.0, 16.0, 1, ("0000:40:03.1",), hcas=("mlx5_0",))
    return cluster, {name: replace(fact, pci=Fact((*devices, nic))) for name, fact in facts.items()}


def test_ranks_follow_the_ring_and_their_cpus_follow_the_gpus() -> None:
    for node in planned(*alternating(), TINY).nodes:
        var = node.env["CUDA_VISIBLE_DEVICES"]
        assert (var.value, var.origin) == ("0,2,4,6,1,3,5,7", "computed")
        assert var.reason == "rank k drives the k-th: neighbours are 6 NODE, 2 SYS; in PCI order 8 SYS"
        assert [rank.memory_node for rank in node.ranks] == [0, 0, 0, 0, 1, 1, 1, 1]  # sysfs' word, not the driver's
        assert all((rank.cpus[0] < 16) == (rank.memory_node == 0) for rank in node.ranks)
        assert node.ranks[0].reason == "part 1 of 4 of NUMA 0 of its GPU, NIC interrupts belong on NUMA 1"


def test_fewer_ranks_take_gpus_of_one_socket() -> None:
    node = planned(*alternating(), replace(TINY, nproc=4)).nodes[0]
    assert node.env["CUDA_VISIBLE_DEVICES"].value == "0,2,4,6"
    assert [rank.memory_node for rank in node.ranks] == [0, 0, 0, 0]


def test_only_gpus_that_the_inventory_states_are_driven() -> None:
    cluster, facts = alternating()
    nodes = tuple(replace(node, gpus=4) for node in cluster.nodes)
    assert planned(cluster, facts, TINY, nodes=nodes).nodes[0].env["CUDA_VISIBLE_DEVICES"].value == "0,2,1,3"


@pytest.mark.parametrize(
    ("env", "memory_nodes"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, [0, 1, 0, 1, 0, 1, 0, 1]),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [0, 1, 0, 1, 0, 1, 0, 1]),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, [None] * 8),
    ],
)
def test_what_the_user_says_of_devices_is_left_alone(env: dict[str, str], memory_nodes: list[int | None]) -> None:
    node = planned(*alternating(), replace(TINY, env=env)).nodes[0]
    assert {name: var.value for name, var in node.env.items() if name in env} == env
    assert "CUDA_VISIBLE_DEVICES" not in node.env or node.env["CUDA_VISIBLE_DEVICES"].origin == "--env"
    assert [rank.memory_node for rank in node.ranks] == memory_nodes


def test_a_box_whose_pci_order_is_as_good_is_left_alone() -> None:
    assert "CUDA_VISIBLE_DEVICES" not in planned(*gpu_nodes(), TINY).nodes[0].env


def test_without_affinity_nobody_is_bound_and_the_cores_are_shared_in_number() -> None:
    plan = planned(*alternating(), replace(TINY, affinity=False))
    for node in plan.nodes:
        assert "CUDA_VISIBLE_DEVICES" not in node.env
        assert {(rank.cpus, rank.memory_node, rank.reason) for rank in node.ranks} == {((), None, "not bound: --no-affinity")}
        assert {rank.env["OMP_NUM_THREADS"].value for rank in node.ranks} == {"2"}


def test_a_script_of_the_users_own_runs_in_its_folder_and_finds_its_modules() -> None:
    node = planned(*cpu_nodes(), Job("mine", "user/src/train.py", ("--epochs", "3"))).nodes[0]
    assert node.cwd == f"{TREE}/user"
    assert node.env["PYTHONPATH"].value == f"{TREE}/user"
    assert node.torchrun[-4:] == ("/opt/venv/bin/python", f"{TREE}/user/src/train.py", "--epochs", "3")


def test_a_python_path_of_the_users_comes_after_the_synced_code() -> None:
    node = planned(*cpu_nodes(), replace(TINY, env={"PYTHONPATH": "/data/lib"})).nodes[0]
    assert node.env["PYTHONPATH"].value == f"{TREE}:/data/lib"
    assert "then what was set by --env" in node.env["PYTHONPATH"].reason


# ------------------------------------------------------------------------------------------ leases, hangs, and reading it again

PCI = (
    "0000:01:00.0",
    "0000:21:00.0",
    "0000:41:00.0",
    "0000:61:00.0",
    "0000:81:00.0",
    "0000:a1:00.0",
    "0000:c1:00.0",
    "0000:e1:00.0",
)


@pytest.mark.parametrize(
    ("job", "leases"),
    [
        (TINY, PCI),
        (replace(TINY, nproc=2), PCI[:2]),
        (replace(TINY, env={"CUDA_VISIBLE_DEVICES": "3,4"}), PCI[3:5]),
        (replace(TINY, nproc=1, env={"CUDA_VISIBLE_DEVICES": "6,2"}), (PCI[6],)),
        (replace(TINY, nproc=2, env={"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}), PCI),  # nobody knows which two
    ],
)
def test_the_gpus_of_its_ranks_are_leased(job: Job, leases: tuple[str, ...]) -> None:
    assert {node.leases for node in planned(*gpu_nodes(), job).nodes} == {leases}


def test_ranks_without_gpus_lease_nothing_and_gpus_that_were_not_told_are_leased_by_number() -> None:
    assert {node.leases for node in planned(*cpu_nodes(), TINY).nodes} == {()}
    cluster, facts = gpu_nodes()
    silent = {name: replace(fact, gpus=facts_of(name).gpus) for name, fact in facts.items()}
    assert planned(cluster, silent, TINY).nodes[0].leases == tuple(f"gpu{index}" for index in range(8))


@pytest.mark.parametrize("setting", [gpu_nodes, alternating])
def test_a_plan_is_read_as_it_was_written(setting: Callable[[], tuple[Cluster, dict[str, NodeFacts]]]) -> None:
    plan = planned(*setting(), TINY)
    assert plan_from(json.loads(json.dumps(plan_json(plan)))) == plan


def test_a_plan_of_before_there_were_leases_is_read_too() -> None:
    told = plan_json(planned(*gpu_nodes(), replace(TINY, hang=None)))
    del told["hang"]
    for node in told["nodes"]:
        del node["leases"]
    plan = plan_from(json.loads(json.dumps(told)))
    assert plan.hang is None and plan.nodes[0].leases == ()


def test_unknown_cpus_leave_the_ranks_unbound_and_say_so() -> None:
    cluster, _ = cpu_nodes()
    rank = planned(cluster, {name: facts_of(name) for name in ("node01", "node02")}, TINY).nodes[0].ranks[0]
    assert (rank.cpus, rank.memory_node, rank.reason) == ((), None, "CPUs unknown: not bound")


if __name__ == "__main__":
    for file, content in golden().items():
        (GOLDEN / file).write_text(json.dumps(content, indent=1) + "\n")
