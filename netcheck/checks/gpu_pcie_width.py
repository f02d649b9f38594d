"""Whether every GPU has all lanes of its link, in a slot of its generation."""

from __future__ import annotations

from collections.abc import Iterator

from netcheck.checks._gpu import device_of, lanes, narrow_link, slow_link, subject
from netcheck.checks._wording import listed, on, sudo
from r4090c.model import Cluster, Finding, Gpu, Node, PciDevice, Status

ID, GROUP, NEEDS, OPTIONAL = "gpu-pcie-width", "pcie", ("gpus",), ("pci",)
ABSENT = Status.UNKNOWN
RULE = (
    "x{gpu_pcie_width_min} in a slot of generation {gpu_pcie_gen_min}; fewer lanes are a warning where the link may be resting,"
    " and generation 1 at rest is no fault"
)
SOURCE = "PCIe 4.0, nvidia-smi manual (link width and generation), open-gpu-kernel-modules issue 17"


def applies(node: Node, cluster: Cluster) -> bool:
    """A node with `gpus: 0` has no GPU with a link."""
    return node.gpus > 0


def check(node: Node, gpus: tuple[Gpu, ...], devices: tuple[PciDevice, ...] | None, cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding per GPU with a fault, else one pass; facts are read at rest, `narrow_link` also judges under load."""
    alive = [gpu for gpu in gpus if gpu.index >= 0]  # gpu-count and gpu-faults name the lost ones
    expected = f"x{cluster.expect.gpu_pcie_width_min}, slots of generation {cluster.expect.gpu_pcie_gen_min}"
    faults, untold = 0, []
    for gpu in alive:
        device = device_of(gpu, devices)
        for trouble in (narrow_link(gpu, device, cluster, loaded=False), slow_link(gpu, device, cluster, loaded=False)):
            if trouble is not None:
                faults += 1
                remedy = on(node, link_command(node, gpu.pci, device))
                yield Finding(ID, subject(node, gpu), trouble.status, trouble.observed, trouble.expected, trouble.why, remedy)
        if lanes(gpu, device) is None and not gpu.faults:
            untold.append(f"gpu{gpu.index}")
    if untold or not alive:
        what = f"the link width of {listed(untold)}" if untold else "no GPU answered"
        yield Finding(ID, node.name, Status.UNKNOWN, f"not read: {what}", expected, "", on(node, "nvidia-smi -q -d PERFORMANCE"))
    elif not faults:
        widths = sorted({lanes(gpu, device_of(gpu, devices)) or 0 for gpu in alive})
        told = "/".join(f"x{width}" for width in widths if width)
        yield Finding(ID, node.name, Status.PASS, f"{len(alive)} GPUs at {told}", expected)


def link_command(node: Node, pci: str, device: PciDevice | None) -> str:
    """Return the command that shows what the card and the port above it can do (LnkCap) and do (LnkSta)."""
    addresses = [*(device.upstream[-1:] if device else ()), pci]
    return " ; ".join(f"{sudo(node)}lspci -vv -s {address} | grep -E 'LnkCap:|LnkSta:'" for address in addresses)
