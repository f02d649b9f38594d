"""Whether /dev/shm is large enough for NCCL."""

from __future__ import annotations

from collections.abc import Iterator

from netcheck.checks._wording import as_root, on, origin, size
from r4090c.model import Cluster, Finding, MemoryFact, Node, Status

ID, GROUP, NEEDS = "shm-size", "os", ("memory",)
RULE = "/dev/shm at least {shm_min_gib:g} GiB (fail), and free (warn)"
SOURCE = "NCCL issues 290, 342, 525"


def check(node: Node, memory: MemoryFact, cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding: pass, too small (fail), full (warn), unknown. A node without GPUs runs no NCCL and is not judged.

    Only a threshold stated in cluster.yaml makes a node without GPUs be judged as well.
    """
    needed_gib, stated = cluster.expect.shm_min_gib, origin(cluster, "shm_min_gib")
    expected = f"at least {needed_gib:g} GiB{stated}"
    if node.gpus == 0 and not stated:
        yield Finding(ID, node.name, Status.SKIP, "not applicable: no GPUs, so no NCCL", expected)
        return
    if memory.shm_total_mib is None:
        remedy = on(node, "df -h /dev/shm")
        yield Finding(ID, node.name, Status.UNKNOWN, "not read: the size of /dev/shm", expected, "", remedy)
        return
    total_gib = memory.shm_total_mib / 1024
    free_gib = None if memory.shm_free_mib is None else memory.shm_free_mib / 1024
    why = "NCCL takes about 10 MB of it per connection and fails with 'No space left on device'"
    if total_gib < needed_gib:
        remedy = as_root(node, f"mount -o remount,size={max(1, round(needed_gib + 0.499))}G /dev/shm")
        hint = why + "; a container gets it from --shm-size or --ipc=host"
        yield Finding(ID, node.name, Status.FAIL, f"/dev/shm {size(total_gib)}", expected, hint, remedy)
    elif free_gib is not None and free_gib < needed_gib:
        remedy = on(node, "ls -lS /dev/shm | head")
        observed = f"/dev/shm has {size(free_gib)} free of {size(total_gib)}"
        yield Finding(ID, node.name, Status.WARN, observed, f"{expected} free", f"{why}; files of killed runs stay there", remedy)
    else:
        yield Finding(ID, node.name, Status.PASS, f"/dev/shm {size(total_gib)}", expected)
