"""Whether every node has the memory its equals have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from netcheck.checks._wording import as_root, origin
from r4090c.model import Cluster, Finding, MemoryFact, Status

ID, GROUP, SCOPE, NEEDS = "memory-size", "memory", "cluster", ("memory",)
RULE = "the memory of most nodes with as many GPUs, ± {memory_tolerance:.0%} (fail)"
SOURCE = "est."


def check(memories: Mapping[str, MemoryFact], cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding per node, compared with the majority of the nodes that have as many GPUs."""
    tolerance = cluster.expect.memory_tolerance
    classes: dict[int, dict[str, int]] = {}
    for name, memory in memories.items():
        classes.setdefault(cluster.node(name).gpus, {})[name] = memory.total_mib
    usual: dict[str, float | None] = {}
    for sizes in classes.values():
        near = {name: [other for other in sizes.values() if _near(other, own, tolerance)] for name, own in sizes.items()}
        largest = max(near.values(), key=len)
        common = median(largest) if len(largest) * 2 > len(sizes) else None
        usual |= dict.fromkeys(sizes, common)
    for name, memory in memories.items():
        common, total_gib = usual[name], memory.total_mib / 1024
        within = f"± {tolerance:.0%}{origin(cluster, 'memory_tolerance')}"
        if common is not None and _near(memory.total_mib, common, tolerance):
            yield Finding(ID, name, Status.PASS, f"{total_gib:.4g} GiB", f"{common / 1024:.4g} GiB {within}")
            continue
        sizes = classes[cluster.node(name).gpus]
        told = ", ".join(f"{other} {mib / 1024:.4g}" for other, mib in sizes.items() if other != name)
        expected = (
            f"{common / 1024:.4g} GiB {within}, as most nodes"
            if common is not None
            else f"one size {within}; {told} (no majority)"
        )
        why = "a memory module is missing, disabled or of another size: plans count on what the others have"
        remedy = as_root(cluster.node(name), 'dmidecode -t memory | grep -E "Locator|Size"')
        yield Finding(ID, name, Status.FAIL, f"{total_gib:.4g} GiB", expected, why, remedy)


def _near(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) <= tolerance * max(one, other)
