"""Which CPUs and which memory each rank of a node gets; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from r4090c.model import CpuFact, Gpu

RESERVED_CORES = 2
"""est.: whole cores a NUMA node keeps for NIC interrupts, where it has at least four a rank."""
MAX_OMP_THREADS = 8
"""est.: on a GPU rank the CPU work is data loading and optimizer glue; more OpenMP threads only contend."""


@dataclass(frozen=True, slots=True)
class CpuSet:
    """The CPUs of one rank, the NUMA node it prefers memory from (None = no policy), and why."""

    cpus: tuple[int, ...]
    memory_node: int | None
    threads: int
    reason: str


def cpu_sets(cpus: CpuFact, gpu_numa: Sequence[int | None]) -> tuple[CpuSet, ...]:
    """Return one CpuSet per rank of a node; `gpu_numa[k]` is the NUMA node of rank k's GPU (-1 or None = unknown).

    CPUs are those of the GPU's NUMA node that are allowed and online, as whole physical cores with their SMT siblings, divided
    among the ranks of that NUMA node. Where any rank's NUMA node is unknown or has no allowed CPU, the allowed cores are
    split evenly among all ranks instead. Ranks share when there are fewer cores than ranks.
    """
    allowed = set(cpus.allowed) & set(cpus.online)
    cores = [tuple(cpu for cpu in core if cpu in allowed) for core in cpus.cores]
    cores = [core for core in cores if core] or [(cpu,) for cpu in sorted(allowed)]
    of_node = {node.index: set(node.cpus) for node in cpus.numa}
    known = len(of_node) > 0 and all(
        numa is not None and numa in of_node and any(of_node[numa] & set(core) for core in cores) for numa in gpu_numa
    )
    groups: dict[int, list[int]] = {}
    for rank, numa in enumerate(gpu_numa):
        groups.setdefault(numa if known and numa is not None else -1, []).append(rank)
    sets: dict[int, CpuSet] = {}
    for numa, ranks in groups.items():
        here = [core for core in cores if numa < 0 or of_node[numa] & set(core)]
        spare = RESERVED_CORES if len(here) >= 4 * len(ranks) + RESERVED_CORES else 0
        usable = here[spare:]
        for position, rank in enumerate(ranks):
            mine = _share(usable, position, len(ranks))
            where = (
                f"NUMA {numa} of its GPU"
                if numa >= 0
                else "all allowed CPUs (NUMA node unknown)"
                if len(of_node) > 1
                else "all allowed CPUs"
            )
            kept = f", {spare} cores kept for NIC interrupts" if spare else ""
            shared = ", shared: fewer cores than ranks" if len(usable) < len(ranks) else ""
            sets[rank] = CpuSet(
                cpus=tuple(sorted(cpu for core in mine for cpu in core)),
                memory_node=numa if numa >= 0 and len(of_node) > 1 else None,
                threads=max(1, min(MAX_OMP_THREADS, len(mine))),
                reason=f"part {position + 1} of {len(ranks)} of {where}{kept}{shared}",
            )
    return tuple(sets[rank] for rank in range(len(gpu_numa)))


def _share(cores: Sequence[tuple[int, ...]], position: int, parts: int) -> Sequence[tuple[int, ...]]:
    """Return part `position` of `parts` of the cores, contiguous; with fewer cores than parts, one core by turns."""
    if len(cores) < parts:
        return [cores[position % len(cores)]] if cores else []
    start, end = position * len(cores) // parts, (position + 1) * len(cores) // parts
    return cores[start:end]


def rank_numa(gpus: Sequence[Gpu], nproc: int, visible: Sequence[str] | None = None) -> tuple[int | None, ...]:
    """Return the NUMA node of each rank's GPU; None where it is not known. Rank k drives the k-th visible GPU in PCI order.

    `visible`: what CUDA_VISIBLE_DEVICES lists, indices in PCI order or beginnings of UUIDs; None = all. As CUDA does, the
    list ends at the first entry that is no GPU.
    """
    by_pci = sorted(gpus, key=lambda gpu: gpu.pci)
    if visible is not None:
        chosen: list[Gpu] = []
        for entry in visible:
            found = [
                gpu
                for place, gpu in enumerate(by_pci)
                if entry == str(place) or (entry[:1] == "G" and gpu.uuid.startswith(entry))
            ]
            if len(found) != 1:
                break
            chosen += found
        by_pci = chosen
    return tuple(by_pci[rank].numa if rank < len(by_pci) else None for rank in range(nproc))
