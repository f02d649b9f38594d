"""Whether most of the memory is free before a run. Nodes with `gpus: 0` are not judged."""

from __future__ import annotations

from collections.abc import Iterator

from netcheck.checks._wording import on, origin, size
from r4090c.model import Cluster, Finding, MemoryFact, Node, Status

ID, GROUP, NEEDS = "memory-free", "memory", ("memory",)
RULE = "at least {memory_available_min_pct:g} % of the memory available (warn)"
SOURCE = "MemAvailable of proc_meminfo(5); est."


def check(node: Node, memory: MemoryFact, cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding: pass, or too much is taken (warn)."""
    least_pct = cluster.expect.memory_available_min_pct
    expected = f"at least {least_pct:g} % available{origin(cluster, 'memory_available_min_pct')}"
    if node.gpus == 0:
        yield Finding(ID, node.name, Status.SKIP, "not applicable: no GPUs", expected)
        return
    available_pct = 100 * memory.available_mib / max(1, memory.total_mib)
    observed = f"{size(memory.available_mib / 1024)} of {size(memory.total_mib / 1024)} available"
    if available_pct < least_pct:
        why = (
            "something else runs on the node, or a killed run left its processes: optimizer states and data workers will not fit"
        )
        remedy = on(node, "ps -eo pid,user,rss,args --sort=-rss | head")
        yield Finding(ID, node.name, Status.WARN, f"{observed} ({available_pct:.0f} %)", expected, why, remedy)
    else:
        yield Finding(ID, node.name, Status.PASS, observed, expected)
