"""Which GPU each rank of a node drives, and which CPUs and memory it gets; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from netcheck.topology import NodeTopology, ring, ring_cost
from r4090c.model import CpuFact, Gpu

RESERVED_CORES = 2
"""est.: whole cores the NUMA node of the data NIC keeps for its interrupts, where it has at least four more a rank."""
PROXY_CORES = 1
"""est.: cores of a rank's own set that stay free for NCCL: its proxy thread inherits the set and polls during a collective."""
PROXY_FROM_CORES = 4
"""est.: below this a core for the proxy costs more than it brings."""
MAX_OMP_THREADS = 8
"""est.: on a GPU rank the CPU work is data loading and optimizer glue; more OpenMP threads only contend."""
MAX_DATA_WORKERS = 8
"""est.: eight processes feed any recipe here; each also costs memory."""


@dataclass(frozen=True, slots=True)
class CpuSet:
    """The CPUs of one rank, the NUMA node it prefers memory from (None = no policy), and why.

    `cores`: physical ones, of which a GPU rank's OpenMP gets `threads` and its data loaders `workers`.
    """

    cpus: tuple[int, ...]
    memory_node: int | None
    cores: int
    threads: int
    workers: int
    reason: str


def cpu_sets(cpus: CpuFact, gpu_numa: Sequence[int | None], nic_numa: Collection[int] = ()) -> tuple[CpuSet, ...]:
    """Return one CpuSet per rank of a node; `gpu_numa[k]` is the NUMA node of rank k's GPU (-1 or None = unknown).

    CPUs are those of the GPU's NUMA node that are allowed and online (isolated ones are not allowed), as whole physical cores
    with their SMT siblings, divided among the ranks of that NUMA node. Where any rank's NUMA node is unknown or has no allowed
    CPU, the allowed cores are split evenly among all ranks instead. Ranks share when there are fewer cores than ranks. Cores are
    kept for interrupts on `nic_numa`, the NUMA nodes of the data NICs; where these are not known, on every NUMA node.
    """
    allowed = set(cpus.allowed) & set(cpus.online)
    cores = [tuple(cpu for cpu in core if cpu in allowed) for core in cpus.cores]
    cores = [core for core in cores if core] or [(cpu,) for cpu in sorted(allowed)]
    of_node = {node.index: set(node.cpus) for node in cpus.numa}
    memory_mib = {node.index: node.memory_mib for node in cpus.numa}

    def on(numa: int) -> list[tuple[int, ...]]:
        return [core for core in cores if of_node.get(numa, set()) & set(core)]

    empty = sorted({numa for numa in gpu_numa if numa is not None and numa in of_node and not on(numa)})
    known = bool(of_node) and not empty and all(numa in of_node for numa in gpu_numa)
    near_nic = {core for numa in nic_numa for core in on(numa)}
    groups: dict[int, list[int]] = {}
    for rank, numa in enumerate(gpu_numa):
        groups.setdefault(numa if known and numa is not None else -1, []).append(rank)
    sets: dict[int, CpuSet] = {}
    for numa, ranks in groups.items():
        here = on(numa) if numa >= 0 else cores
        enough = len(here) >= 4 * len(ranks) + RESERVED_CORES
        kept = [core for core in here if core in near_nic or not nic_numa][:RESERVED_CORES] if enough else []
        usable = [core for core in here if core not in kept]
        where = f"NUMA {numa} of its GPU" if numa >= 0 else _everywhere(len(of_node), empty)
        memory_node = numa if numa >= 0 and len(of_node) > 1 and memory_mib[numa] else None
        told = [_interrupts(len(kept), sorted(nic_numa), numa)]
        if len(of_node) > 1 and numa >= 0 and memory_node is None:
            told.append(f"no memory policy: NUMA {numa} has no memory of its own")
        if len(usable) < len(ranks):
            told.append("shared: fewer cores than ranks")
        for position, rank in enumerate(ranks):
            mine = _share(usable, position, len(ranks))
            threads, workers = _threads_and_workers(len(mine))
            sets[rank] = CpuSet(
                cpus=tuple(sorted(cpu for core in mine for cpu in core)),
                memory_node=memory_node,
                cores=len(mine),
                threads=threads,
                workers=workers,
                reason=", ".join([f"part {position + 1} of {len(ranks)} of {where}", *filter(None, told)]),
            )
    return tuple(sets[rank] for rank in range(len(gpu_numa)))


def _everywhere(numa_nodes: int, empty: Sequence[int]) -> str:
    """Return what is split evenly, and why it is not the NUMA node of the GPU."""
    if numa_nodes <= 1:
        return "all allowed CPUs"
    if empty:
        return f"all allowed CPUs (none of NUMA {', '.join(map(str, empty))}, where a GPU is, may be used)"
    return "all allowed CPUs (NUMA node unknown)"


def _interrupts(kept: int, nic_numa: Sequence[int], numa: int) -> str:
    """Return what is said of NIC interrupts, "" = nothing. `numa` -1: the cores are not of one NUMA node."""
    nodes = ", ".join(map(str, nic_numa))
    if kept:
        return f"{kept} cores kept for NIC interrupts" + (f" (data NIC on NUMA {nodes})" if nodes else "")
    return f"NIC interrupts belong on NUMA {nodes}" if nodes and numa >= 0 and numa not in nic_numa else ""


def _share(cores: Sequence[tuple[int, ...]], position: int, parts: int) -> Sequence[tuple[int, ...]]:
    """Return part `position` of `parts` of the cores, contiguous; with fewer cores than parts, one core by turns."""
    if len(cores) < parts:
        return [cores[position % len(cores)]] if cores else []
    start, end = position * len(cores) // parts, (position + 1) * len(cores) // parts
    return cores[start:end]


def _threads_and_workers(cores: int) -> tuple[int, int]:
    """Return (OpenMP threads, data workers) of a GPU rank: what the proxy leaves, halved; with one core it loads by itself."""
    left = cores - (PROXY_CORES if cores >= PROXY_FROM_CORES else 0)
    workers = min(MAX_DATA_WORKERS, left // 2)
    return max(1, min(MAX_OMP_THREADS, left - workers)), workers


def rank_gpus(gpus: Sequence[Gpu], nproc: int, visible: Sequence[str] | None = None) -> tuple[Gpu | None, ...]:
    """Return each rank's GPU; None where it is not known. Rank k drives the k-th visible GPU in PCI order.

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
    return tuple(by_pci[rank] if rank < len(by_pci) else None for rank in range(nproc))


def rank_numa(gpus: Sequence[Gpu], nproc: int, visible: Sequence[str] | None = None) -> tuple[int | None, ...]:
    """Return the NUMA node of each rank's GPU (see `rank_gpus`); None where it is not known."""
    return tuple(None if gpu is None else gpu.numa for gpu in rank_gpus(gpus, nproc, visible))


@dataclass(frozen=True, slots=True)
class RankOrder:
    """Which GPU each rank drives, by place in PCI order as CUDA_VISIBLE_DEVICES counts, and why."""

    places: tuple[int, ...]
    reason: str


def rank_order(topology: NodeTopology, nproc: int) -> RankOrder | None:
    """Return an order of GPUs in which neighbouring ranks are nearer than in PCI order; None where PCI order is as good.

    With fewer ranks than GPUs, others than the first are chosen only where fewer neighbours are SYS from each other. None too
    where a distance is not known: nobody is surprised for nothing.
    """
    by_pci = [place.index for place in sorted(topology.gpus, key=lambda place: place.pci)]
    if nproc > len(by_pci) or any(topology.link(*pair) is None for pair in combinations(by_pci, 2)):
        return None
    plain = by_pci[:nproc]
    tours = (_by_socket(topology, by_pci), ring(topology))  # of equals the first, which reads best
    ways = [(*tour, *tour)[start : start + nproc] for tour in tours for start in range(len(by_pci))]
    best = min(ways, key=lambda way: ring_cost(topology, way))
    part = nproc < len(by_pci)
    if ring_cost(topology, best) >= ring_cost(topology, plain):
        return None
    if part and _neighbours(topology, best)["SYS"] >= _neighbours(topology, plain)["SYS"]:
        return None
    order = f"of the first {nproc} in PCI order" if part else "in PCI order"
    reason = f"rank k drives the k-th: neighbours are {_told(topology, best)}; {order} {_told(topology, plain)}"
    return RankOrder(tuple(by_pci.index(index) for index in best), reason)


def _by_socket(topology: NodeTopology, by_pci: Sequence[int]) -> tuple[int, ...]:
    """Return the GPUs, those together that are nearer than SYS to the first of theirs, else in PCI order."""
    order: list[int] = []
    for first in by_pci:
        if first not in order:
            order += [
                other for other in by_pci if other not in order and (other == first or topology.link(first, other) != "SYS")
            ]
    return tuple(order)


def _neighbours(topology: NodeTopology, order: Sequence[int]) -> Counter[str]:
    """Return class -> how many neighbours in the ring are so far from each other; two GPUs have one link."""
    pairs = pairwise(order) if len(order) == 2 else zip(order, (*order[1:], *order[:1]), strict=True)
    return Counter(topology.link(*pair) or "SYS" for pair in pairs)


def _told(topology: NodeTopology, order: Sequence[int]) -> str:
    return ", ".join(f"{count} {link}" for link, count in sorted(_neighbours(topology, order).items()))
