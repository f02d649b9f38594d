"""Which CPUs each rank gets: recorded machines, and what must hold on any machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.affinity import cpu_sets, rank_numa
from netcheck.facts.cpus import parse_cpu_list
from r4090c.model import CpuFact, Gpu, NumaNode

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "cases" / "affinity.json").read_text())


def machine(
    numa: dict[int, tuple[int, ...]],
    smt: int | None,
    online: tuple[int, ...] | None = None,
    allowed: tuple[int, ...] | None = None,
) -> CpuFact:
    """Return the facts of a machine. `smt`: the distance of two siblings, None = no hyper-threading."""
    present = tuple(sorted(cpu for cpus in numa.values() for cpu in cpus)) or online or ()
    alive = present if online is None else online
    cores: dict[int, list[int]] = {}
    for cpu in alive:
        cores.setdefault(cpu % smt if smt else cpu, []).append(cpu)
    nodes = tuple(NumaNode(index, cpus, 64_000) for index, cpus in sorted(numa.items()))
    siblings = tuple(tuple(core) for _, core in sorted(cores.items()))
    return CpuFact("a CPU", present, alive, present if allowed is None else allowed, siblings, 1, nodes, None)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_recorded_machines(case: dict[str, Any]) -> None:
    numa = {int(index): parse_cpu_list(text) for index, text in case["numa"].items()}
    lists = {key: parse_cpu_list(case[key]) for key in ("online", "allowed") if key in case}
    found = cpu_sets(machine(numa, case["smt"], **lists), case["gpu_numa"])
    expected = [(parse_cpu_list(one["cpus"]), one["memory_node"], one["threads"]) for one in case["expect"]]
    assert [(one.cpus, one.memory_node, one.threads) for one in found] == expected
    assert found[0].reason == case["reason"]


@st.composite
def machines(draw: st.DrawFn) -> tuple[CpuFact, list[int | None]]:
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
    return machine(numa, cores if smt else None, online, allowed), gpu_numa


@given(machines())
def test_what_holds_on_any_machine(drawn: tuple[CpuFact, list[int | None]]) -> None:
    cpus, gpu_numa = drawn
    usable = set(cpus.allowed) & set(cpus.online)
    found = cpu_sets(cpus, gpu_numa)
    assert len(found) == len(gpu_numa)
    cores = [set(core) & usable for core in cpus.cores if set(core) & usable]
    of_node = {node.index: set(node.cpus) for node in cpus.numa}
    for one, numa in zip(found, gpu_numa, strict=True):
        assert set(one.cpus) <= usable
        assert bool(one.cpus) == bool(usable)
        assert all(core <= set(one.cpus) or not core & set(one.cpus) for core in cores)  # siblings stay together
        assert 1 <= one.threads <= 8
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
