"""Whether the driver reports a card as broken."""

from __future__ import annotations

from collections.abc import Iterator

from netcheck.checks._wording import as_root
from r4090c.model import Cluster, Finding, Gpu, Node, Status

ID, GROUP, NEEDS = "gpu-faults", "gpu", ("gpus",)
ABSENT = Status.UNKNOWN


def applies(node: Node, cluster: Cluster) -> bool:
    """A node with `gpus: 0` has no card that could be broken."""
    return node.gpus > 0


def check(node: Node, gpus: tuple[Gpu, ...], cluster: Cluster) -> Iterator[Finding]:
    """Yield one fail per GPU with an error cell (nvidia-smi may exit 0 with `ERR!`), else one pass."""
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
    if not broken:
        yield Finding(ID, node.name, Status.PASS, f"{len(gpus)} GPUs answer", "no ERR!, no lost GPU")
