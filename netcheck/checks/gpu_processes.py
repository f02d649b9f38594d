"""Whether other programs hold memory of the GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from netcheck.checks._wording import on, origin
from r4090c.model import Cluster, Finding, Gpu, GpuProcess, Node, Status, UserFact

ID, GROUP, NEEDS = "gpu-processes", "gpu", ("gpu_processes", "gpus", "user")
ABSENT = Status.UNKNOWN
RULE = (
    "nobody else's program on a GPU (fail), none of our own (warn), at most {gpu_memory_used_warn_mib} MiB held without a program"
    " (warn)"
)
SOURCE = "est."


def applies(node: Node, cluster: Cluster) -> bool:
    """A node with `gpus: 0` has no GPU to share."""
    return node.gpus > 0


def check(
    node: Node, processes: tuple[GpuProcess, ...], gpus: tuple[Gpu, ...], user: UserFact, cluster: Cluster
) -> Iterator[Finding]:
    """Yield one Finding per GPU with other people's programs, with our own, or with memory that nobody owns; else one pass."""
    limit = cluster.expect.gpu_memory_used_warn_mib
    expected = f"no program, at most {limit} MiB used{origin(cluster, 'gpu_memory_used_warn_mib')}"
    found = False
    places = [(f"{node.name}/gpu{gpu.index}", gpu.uuid, gpu.memory_used_mib) for gpu in gpus if gpu.index >= 0]
    unplaced = {process.gpu_uuid for process in processes} - {uuid for _, uuid, _ in places}
    for subject, uuid, used_mib in [*places, *((node.name, uuid, None) for uuid in sorted(unplaced))]:
        here = [process for process in processes if process.gpu_uuid == uuid]
        foreign = [process for process in here if process.uid != user.uid]
        own = [process for process in here if process.uid == user.uid]
        if foreign:
            why = "a rank there runs out of memory, or at half speed while all others wait; ask its owner, or leave the node out"
            yield Finding(ID, subject, Status.FAIL, _told(foreign), expected, why, on(node, _shown(foreign)))
        if own:
            why = "left over from an earlier run, or a run that is still at work: a new one finds less memory and shares the card"
            remedy = on(node, _shown(own))
            yield Finding(ID, subject, Status.WARN, _told(own), expected, why, remedy)
        if not here and used_mib is not None and used_mib > limit:
            why = "a desktop, a program in another container, or what a dead program left behind: a rank finds that much less"
            remedy = on(node, "nvidia-smi")
            yield Finding(ID, subject, Status.WARN, f"{used_mib} MiB used, no program", expected, why, remedy)
        found = found or bool(here) or (used_mib or 0) > limit
    if not found:
        yield Finding(ID, node.name, Status.PASS, "no program on any GPU", expected)


def _told(processes: Sequence[GpuProcess]) -> str:
    """Return who it is, the biggest first."""
    ranked = sorted(processes, key=lambda process: -(process.memory_mib or 0))
    words = []
    for process in ranked[:3]:
        owner = f"user {process.uid}" if process.uid is not None else "owner not told"
        held = f", {process.memory_mib} MiB" if process.memory_mib is not None else ""
        words.append(f"{process.name.rpartition('/')[2] or 'a program'} (pid {process.pid}, {owner}{held})")
    return "; ".join(words) + (f" and {len(ranked) - 3} more" if len(ranked) > 3 else "")


def _shown(processes: Sequence[GpuProcess]) -> str:
    return f"ps -o pid,user,lstart,args -p {','.join(str(process.pid) for process in processes[:8])}"
