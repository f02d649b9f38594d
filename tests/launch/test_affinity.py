"""Which CPUs each rank gets: recorded machines, and what must hold on any machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.affinity import RankOrder, cpu_sets, rank_numa, rank_order
from netcheck.facts.cpus import parse_cpu_list
from netcheck.tools import nvidia_smi_topo
from netcheck.topology import GpuPlace, NodeTopology, arrange
from r4090c.model import CpuFact, Gpu, NumaNode

RECORDED = Path(__file__).resolve().parents[1] / "tools" / "fixtures" / "nvidia-smi-topo"
CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "cases" / "affinity.json").read_text())


def machine(
    numa: dict[int, tuple[int, ...]],
    smt: int | None,
    online: tuple[int, ...] | None = None,
    allowed: tuple[int, ...] | None = None,
    memory_mib: dict[int, int] | None = None,
) -> CpuFact:
    """Return the facts of a machine. `smt`: the distance of two siblings, None = no hyper-threading."""
    present = tuple(sorted(cpu for cpus in numa.values() for cpu in cpus)) or online or ()
    alive = present if online is None else online
    cores: dict[int, list[int]] = {}
    for cpu in alive:
        cores.setdefault(cpu % smt if smt else cpu, []).append(cpu)
    nodes = tuple(NumaNode(index, cpus, (memory_mib or {}).get(index, 64_000)) for index, cpus in sorted(numa.items()))
    siblings = tuple(tuple(core) for _, core in sorted(cores.items()))
    return CpuFact("a CPU", present, alive, present if allowed is None else allowed, siblings, 1, nodes, None)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_recorded_machines(case: dict[str, Any]) -> None:
    numa = {int(index): parse_cpu_list(text) for index, text in case["numa"].items()}
    lists = {key: parse_cpu_list(case[key]) for key in ("online", "allowed") if key in case}
    memory = {int(index): mib for index, mib in case.get("memory_mib", {}).items()}
    gpu_numa = [place.numa for place in recorded(case["recorded"]).gpus] if "recorded" in case else case["gpu_numa"]
    found = cpu_sets(machine(numa, case["smt"], memory_mib=memory, **lists), gpu_numa, case.get("nic_numa", ()))
    expected = [(parse_cpu_list(one["cpus"]), one["memory_node"], one["threads"], one["workers"]) for one in case["expect"]]
    assert [(one.cpus, one.memory_node, one.threads, one.workers) for one in found] == expected
    assert {rank: found[int(rank)].reason for rank in case["reasons"]} == case["reasons"]


def recorded(name: str) -> NodeTopology:
    """Return the topology that a recorded matrix tells, of GPUs whose PCI order is that of their indices."""
    matrix = nvidia_smi_topo.parse((RECORDED / f"{name}.txt").read_text())
    return arrange([gpu(index, f"0000:{index + 1:02x}:00.0", None) for index in matrix.gpus], (), matrix)


@st.composite
def machines(draw: st.DrawFn) -> tuple[CpuFact, list[int | None], set[int]]:
    nodes = draw(st.integers(1, 4))
    per_node = draw(st.integers(1, 9))
    smt = draw(st.booleans())
    cores = nodes * per_node
    numa = {
        index: tuple(
            cpu + shift for shift in ((0, cores) if smt else (0,)) for cpu in range(index * per_node, (index + 1) * per_node)
        )
        for index in range(nodes)
    }
    everything = sorted(cpu for cpus in numa.values() for cpu in cpus)
    some = st.lists(st.sampled_from(everything), min_size=1, unique=True).map(lambda cpus: tuple(sorted(cpus)))
    online = draw(some)
    allowed = draw(some)
    gpu_numa = draw(st.lists(st.one_of(st.none(), st.integers(-1, nodes)), min_size=1, max_size=9))
    nic_numa = draw(st.sets(st.integers(0, nodes), max_size=2))
    return machine(numa, cores if smt else None, online, allowed), gpu_numa, nic_numa


@given(machines())
def test_what_holds_on_any_machine(drawn: tuple[CpuFact, list[int | None], set[int]]) -> None:
    cpus, gpu_numa, nic_numa = drawn
    usable = set(cpus.allowed) & set(cpus.online)
    found = cpu_sets(cpus, gpu_numa, nic_numa)
    assert len(found) == len(gpu_numa)
    cores = [set(core) & usable for core in cpus.cores if set(core) & usable]
    of_node = {node.index: set(node.cpus) for node in cpus.numa}
    for one, numa in zip(found, gpu_numa, strict=True):
        assert set(one.cpus) <= usable
        assert bool(one.cpus) == bool(usable)
        assert all(core <= set(one.cpus) or not core & set(one.cpus) for core in cores)  # siblings stay together
        assert 1 <= one.threads <= 8 and 0 <= one.workers <= 8
        assert one.threads + one.workers <= max(1, one.cores)
        if one.memory_node is not None:
            assert one.memory_node == numa
            assert set(one.cpus) <= of_node[one.memory_node]
    alone = [set(one.cpus) for one in found if "shared" not in one.reason]
    assert sum(map(len, alone)) == len(set().union(*alone))  # no CPU belongs to two ranks that need not share


def gpu(index: int, pci: str, numa: int | None, uuid: str = "") -> Gpu:
    nothing: dict[str, Any] = dict.fromkeys(
        ("memory_total_mib", "memory_used_mib", "pcie_gen", "pcie_gen_max", "pcie_width", "pcie_width_max", "temperature_c"), None
    )
    more: dict[str, Any] = dict.fromkeys(("power_w", "power_limit_w", "utilization_pct", "persistence"), None)
    return Gpu(index, "RTX 4090", uuid or f"GPU-{index}", pci, "570.1", **nothing, **more, numa=numa)


GPUS = (
    gpu(0, "0000:c1:00.0", 7, "GPU-aa11"),
    gpu(1, "0000:01:00.0", 3, "GPU-aa22"),
    gpu(2, "0000:41:00.0", 1, "GPU-bb33"),
)


@pytest.mark.parametrize(
    ("nproc", "visible", "expected"),
    [
        (3, None, (3, 1, 7)),  # PCI order, not nvidia-smi's
        (2, None, (3, 1)),
        (4, None, (3, 1, 7, None)),
        (2, ("2", "0"), (7, 3)),
        (2, ("GPU-bb", "GPU-aa11"), (1, 7)),
        (2, ("GPU-aa",), (None, None)),  # two GPUs begin so
        (3, ("1", "9", "0"), (1, None, None)),  # CUDA ends the list at the first that is none
        (1, (), (None,)),
    ],
)
def test_which_gpu_a_rank_drives(nproc: int, visible: tuple[str, ...] | None, expected: tuple[int | None, ...]) -> None:
    assert rank_numa(GPUS, nproc, visible) == expected


def test_a_node_without_gpus() -> None:
    assert rank_numa((), 2) == (None, None)


# ------------------------------------------------------------------------------------------ which GPU a rank drives


def box(*sockets: int, links: dict[tuple[int, int], str] | None = None, pci: dict[int, str] | None = None) -> NodeTopology:
    """Return GPUs of these sockets, by index: NODE within one, SYS between two; `links` and `pci` where they are otherwise."""
    gpus = tuple(
        GpuPlace(index, (pci or {}).get(index, f"0000:{index + 1:02x}:00.0"), socket, None, {})
        for index, socket in enumerate(sockets)
    )
    pairs: dict[tuple[int, int], str | None] = {
        (one, other): "NODE" if sockets[one] == sockets[other] else "SYS"
        for one in range(len(sockets))
        for other in range(one + 1, len(sockets))
    }
    return NodeTopology(gpus, (), {**pairs, **(links or {})})


def test_gpus_that_alternate_between_sockets_are_driven_socket_by_socket() -> None:
    assert rank_order(box(0, 1, 0, 1, 0, 1, 0, 1), 8) == RankOrder(
        (0, 2, 4, 6, 1, 3, 5, 7), "rank k drives the k-th: neighbours are 6 NODE, 2 SYS; in PCI order 8 SYS"
    )


def test_fewer_ranks_than_gpus_stay_on_one_socket() -> None:
    assert rank_order(box(0, 1, 0, 1, 0, 1, 0, 1), 4) == RankOrder(
        (0, 2, 4, 6), "rank k drives the k-th: neighbours are 4 NODE; of the first 4 in PCI order 4 SYS"
    )
    assert rank_order(box(1, 0, 0), 2) == RankOrder(
        (1, 2), "rank k drives the k-th: neighbours are 1 NODE; of the first 2 in PCI order 1 SYS"
    )


def test_places_are_counted_in_pci_order_whatever_the_driver_calls_the_gpus() -> None:
    # By address: GPU 3 (socket 1), GPU 1 (socket 0), GPU 2 (socket 1), GPU 0 (socket 0).
    swapped = box(0, 0, 1, 1, pci={0: "0000:d1:00.0", 1: "0000:41:00.0", 2: "0000:81:00.0", 3: "0000:01:00.0"})
    found = rank_order(swapped, 4)
    assert found is not None and found.places == (0, 2, 1, 3)  # GPUs 3, 2, 1, 0


@pytest.mark.parametrize(
    ("topology", "nproc"),
    [
        (box(0, 0, 0, 0, 1, 1, 1, 1), 8),
        (box(0, 0, 0, 0, 1, 1, 1, 1), 4),
        (box(0, 1), 2),  # two GPUs have one link
        (box(0, 1, 0), 3),  # three have one ring
        (box(0, 1, 0, 1), 1),
        (box(0, 1, 0, 1), 5),  # refused elsewhere
        (box(0, 1, 0, 1, links={(0, 3): None}), 4),  # type: ignore[dict-item]
        (box(), 1),
        (recorded("8gpu-2socket-node-sys-2nic-tabs"), 8),
        (recorded("8x4090-gpu0-on-numa3-one-gpu-near-nics"), 8),  # all SYS: nothing to gain
        (recorded("8x4090-gpu0-on-numa3-one-gpu-near-nics"), 4),
        (recorded("2gpu-numa-NA"), 2),
    ],
)
def test_pci_order_stays_where_it_is_as_good(topology: NodeTopology, nproc: int) -> None:
    assert rank_order(topology, nproc) is None


def test_fewer_ranks_take_the_first_gpus_unless_they_cross_sockets_more_often() -> None:
    """GPUs 2 and 3 share a switch, 0 and 1 only a socket: not reason enough to leave the first two."""
    assert rank_order(box(0, 0, 0, 0, links={(2, 3): "PIX"}), 2) is None
