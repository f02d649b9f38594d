"""Whether every node shows the GPUs it should have."""

from __future__ import annotations

from collections.abc import Iterator

from netcheck.checks._wording import on
from r4090c.model import Cluster, Finding, Gpu, Node, Status

ID, GROUP, NEEDS = "gpu-count", "gpu", ("gpus",)
ABSENT = Status.UNKNOWN
"""cluster.yaml demands GPUs: without nvidia-smi nobody can say whether they are there."""


def applies(node: Node, cluster: Cluster) -> bool:
    """A node with `gpus: 0` is a CPU node: nothing to count."""
    return node.gpus > 0


def check(node: Node, gpus: tuple[Gpu, ...], cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding: the number seen against the number stated. A card the driver could not open (index -1) is none."""
    count, lost = sum(gpu.index >= 0 for gpu in gpus), [gpu.pci for gpu in gpus if gpu.index < 0]
    observed, expected = f"{count} GPU{'s' * (count != 1)}", f"{node.gpus} (cluster.yaml)"
    if lost:
        observed += f", {len(lost)} lost ({', '.join(lost)})"
    if count == node.gpus:
        yield Finding(ID, node.name, Status.PASS, observed, expected)
    elif count < node.gpus:
        why = "a card that is missing fell off the bus, lost its power cable, or was never seen by the firmware"
        remedy = on(node, 'lspci -d 10de: -nn; sudo dmesg | grep -iE "xid|nvrm|pcie" | tail')
        yield Finding(ID, node.name, Status.FAIL, observed, expected, why, remedy)
    else:
        why = (
            "the plan would leave cards idle, or this is not the machine that cluster.yaml means;"
            f" if it is, state gpus: {count} for {node.name} there"
        )
        yield Finding(ID, node.name, Status.FAIL, observed, expected, why, on(node, "nvidia-smi -L"))
