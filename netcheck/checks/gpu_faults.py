"""Whether the driver reports a card as broken."""

from __future__ import annotations

from collections.abc import Iterator

from netcheck.checks._wording import as_root, on
from r4090c.model import Cluster, Finding, Gpu, GpuDetail, Node, Status

ID, GROUP, NEEDS, OPTIONAL = "gpu-faults", "gpu", ("gpus",), ("gpu_detail",)
RULE = "no ERR!, no lost GPU (fail), no memory repair that waits for a reset (warn)"
SOURCE = "nvidia-smi manual (remapped rows), FIELDS of netcheck/facts/gpus.py"
ABSENT = Status.UNKNOWN


def applies(node: Node, cluster: Cluster) -> bool:
    """A node with `gpus: 0` has no card that could be broken."""
    return node.gpus > 0


def check(node: Node, gpus: tuple[Gpu, ...], details: tuple[GpuDetail, ...] | None, cluster: Cluster) -> Iterator[Finding]:
    """Yield one fail per GPU with an error cell (nvidia-smi may exit 0 with `ERR!`), one warning per repair, else one pass."""
    if not gpus:
        yield Finding(
            ID, node.name, Status.UNKNOWN, "not read: no GPU answered", "no error cells", "", f"r4090c facts --nodes {node.name}"
        )
        return
    broken = [gpu for gpu in gpus if gpu.faults]
    for gpu in broken:
        yield Finding(
            ID,
            f"{node.name}/gpu{gpu.index}" if gpu.index >= 0 else f"{node.name}/{gpu.pci}",
            Status.FAIL,
            "; ".join(gpu.faults)[:160],
            "no ERR!, no lost GPU",
            f"the card at {gpu.pci} no longer answers its driver; a rank on it hangs all the others."
            " A cold restart mends it once; a card that does it again needs other power or another slot",
            as_root(node, "dmesg | grep -i xid | tail"),
        )
    worn = [(gpu, detail) for detail in details or () for gpu in gpus if gpu.pci == detail.pci and detail.memory_faults]
    for gpu, detail in worn:
        why = "a row of its memory failed and is replaced when the card starts anew: restart it; if it repeats, swap the card"
        observed = "; ".join(detail.memory_faults)
        remedy = on(node, f"nvidia-smi -i {gpu.index} -q -d ROW_REMAPPER,PAGE_RETIREMENT")
        yield Finding(ID, f"{node.name}/gpu{gpu.index}", Status.WARN, observed, "no pending repair", why, remedy)
    if not broken and not worn:
        yield Finding(ID, node.name, Status.PASS, f"{len(gpus)} GPUs answer", "no ERR!, no lost GPU")
