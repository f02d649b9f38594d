"""Whether every node shows the GPUs it should have."""

from __future__ import annotations

from collections.abc import Iterator

from netcheck.checks._machine import in_container
from netcheck.checks._wording import as_root, listed, on, sudo
from r4090c.model import Cluster, Finding, Gpu, KernelFact, Mount, Node, PciDevice, Status

ID, GROUP, NEEDS, OPTIONAL = "gpu-count", "gpu", ("gpus",), ("pci", "kernel", "mounts")
RULE = "as many as cluster.yaml states, on the PCI bus and in the driver"
SOURCE = "cluster.yaml, nodes: gpus"
ABSENT = Status.UNKNOWN
"""cluster.yaml demands GPUs: without nvidia-smi nobody can say whether they are there."""


def applies(node: Node, cluster: Cluster) -> bool:
    """A node with `gpus: 0` is a CPU node: nothing to count."""
    return node.gpus > 0


def check(
    node: Node,
    gpus: tuple[Gpu, ...],
    devices: tuple[PciDevice, ...] | None,
    kernel: KernelFact | None,
    mounts: tuple[Mount, ...] | None,
    cluster: Cluster,
) -> Iterator[Finding]:
    """Yield one Finding: the number seen against the number stated. A card the driver could not open (index -1) is none.

    What the PCI bus shows tells a card that is not there from one that the driver does not start. A card kept for virtual
    machines (vfio-pci) does not count, and where sysfs shows fewer than the driver (no real sysfs) the driver is right. A
    container sees the whole bus, and of the cards only those it was given.
    """
    count, lost = sum(gpu.index >= 0 for gpu in gpus), [gpu.pci for gpu in gpus if gpu.index < 0]
    on_bus = [device for device in devices or () if device.kind == "gpu" and device.driver != "vfio-pci"]
    hidden = [device for device in on_bus if device.pci not in {gpu.pci for gpu in gpus}]
    observed, expected = f"{count} GPU{'s' * (count != 1)}", f"{node.gpus} (cluster.yaml)"
    if lost:
        observed += f", {len(lost)} lost ({', '.join(lost)})"
    if len(on_bus) >= max(count, 1):
        observed += f", {len(on_bus)} on the PCI bus"
    named = listed(f"{device.pci} (kernel driver: {device.driver or 'none'})" for device in hidden)
    logged = as_root(node, "dmesg | grep -iE 'nvrm|nouveau' | tail")
    if count == node.gpus and hidden and not in_container(kernel, mounts):
        why = f"the driver does not show {named}: a dead card, or one that this driver does not know"
        yield Finding(ID, node.name, Status.WARN, observed, f"{expected}, as many on the PCI bus", why, logged)
    elif count == node.gpus:
        yield Finding(ID, node.name, Status.PASS, observed, expected)
    elif count < node.gpus and hidden:
        why = f"on the bus and not in the driver: {named}: the start of the card failed, or another driver holds it"
        yield Finding(ID, node.name, Status.FAIL, observed, expected, why, logged)
    elif count < node.gpus:
        why = "a card that is missing fell off the bus, lost its power cable, or was never seen by the firmware"
        if on_bus and not lost:
            why = (
                "the PCI bus does not have it either: power cable, seat or riser of the card, or its slot is off in the firmware"
            )
        remedy = on(node, f'lspci -d 10de: -nn; {sudo(node)}dmesg | grep -iE "xid|nvrm|pcie" | tail')
        yield Finding(ID, node.name, Status.FAIL, observed, expected, why, remedy)
    else:
        why = (
            "the plan would leave cards idle, or this is not the machine that cluster.yaml means;"
            f" if it is, state gpus: {count} for {node.name} there"
        )
        yield Finding(ID, node.name, Status.FAIL, observed, expected, why, on(node, "nvidia-smi -L"))
