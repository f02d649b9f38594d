"""Whether the driver stays loaded between programs (persistence mode)."""

from __future__ import annotations

from collections.abc import Iterator

from netcheck.checks._wording import as_root, listed
from r4090c.model import Cluster, Finding, Gpu, Node, Status

ID, GROUP, NEEDS = "gpu-persistence", "gpu", ("gpus",)
ABSENT = Status.UNKNOWN
RULE = "persistence mode on"
SOURCE = "NVIDIA driver persistence documentation"


def applies(node: Node, cluster: Cluster) -> bool:
    """A node with `gpus: 0` has no driver to keep loaded."""
    return node.gpus > 0


def check(node: Node, gpus: tuple[Gpu, ...], cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding for the node."""
    told = [gpu for gpu in gpus if gpu.persistence is not None]
    off = [f"gpu{gpu.index}" for gpu in told if not gpu.persistence]
    remedy = as_root(node, "nvidia-smi -pm 1")
    if off:
        observed = "off" if len(off) == len(gpus) else f"off on {listed(off)}"
        why = (
            "each program then waits seconds for the cards to start up, and settings such as a power limit are lost in between;"
            " the command lasts until the next boot, the service nvidia-persistenced for good"
        )
        yield Finding(ID, node.name, Status.WARN, observed, "on", why, remedy)
    elif not told:
        yield Finding(ID, node.name, Status.UNKNOWN, "not read: no GPU tells its persistence mode", "on", "", remedy)
    else:
        yield Finding(ID, node.name, Status.PASS, "on", "on")
