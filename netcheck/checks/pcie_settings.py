"""Whether IOMMU, power saving (ASPM) and, where P2P is wanted, access control (ACS) stand out of the GPUs' way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from netcheck.checks._gpu import p2p_demanded
from netcheck.checks._wording import as_root, listed
from r4090c.model import Cluster, Finding, KernelFact, Node, P2pMatrix, PciDevice, Status

ID, GROUP, NEEDS, OPTIONAL = "pcie-settings", "pcie", ("pci",), ("kernel", "gpu_p2p")
RULE = "IOMMU off or pass-through, no power saving on the links, no ACS redirect above the GPUs where P2P is wanted or granted"
SOURCE = "NCCL issues 257, 631; Documentation/admin-guide/kernel-parameters (iommu, pcie_aspm.policy)"
PASS_THROUGH = "identity"
"""Domain type of an IOMMU group that is not translated: Documentation/ABI/testing/sysfs-kernel-iommu_groups."""


def applies(node: Node, cluster: Cluster) -> bool:
    """A node with `gpus: 0` has no GPU that these settings slow down."""
    return node.gpus > 0


def check(
    node: Node,
    devices: tuple[PciDevice, ...],
    kernel: KernelFact | None,
    p2p: P2pMatrix | None,
    cluster: Cluster,
) -> Iterator[Finding]:
    """Yield one Finding per setting in the way, else one pass. What stands on the devices counts, then the kernel's settings."""
    gpus = [device for device in devices if device.kind == "gpu"]
    cards = gpus + [device for device in devices if device.hcas]
    demanded = p2p_demanded(node, cluster)
    wanted = demanded is not None or (p2p is not None and p2p.granted)
    iommu = _iommu(gpus, kernel)
    findings = []
    if iommu is not None and iommu not in ("off", "pass-through"):
        why = (
            "every copy between card and memory is translated, and P2P through an IOMMU hangs or is slow."
            " The command sets it for the next boot"
        )
        grub = "sed -i 's/^GRUB_CMDLINE_LINUX=\"/&iommu=pt /' /etc/default/grub"
        remedy = as_root(node, grub, "update-grub")
        findings.append(Finding(ID, node.name, Status.WARN, f"IOMMU {iommu}", "off or pass-through (iommu=pt)", why, remedy))
    saving = [device.pci for device in cards if device.aspm]
    policy = kernel.aspm_policy if kernel is not None else None
    if saving or policy in ("powersave", "powersupersave"):
        on_which = f" on {listed(saving, 3)}" if saving else f": policy {policy}"
        why = "a link that saves power wakes up late, and on some risers not at all; the command lasts until the next boot"
        policy_file = "/sys/module/pcie_aspm/parameters/policy"
        remedy = as_root(node, f"sh -c 'echo performance > {policy_file}'")
        findings.append(Finding(ID, node.name, Status.WARN, f"ASPM{on_which}", "off (policy performance)", why, remedy))
    redirecting = sorted({bridge for device in gpus for bridge in device.acs or ()})
    unread = [device.pci for device in gpus if device.acs is None]
    if wanted and redirecting:
        why = (
            "P2P is wanted, and these bridges send it up to the processor and back: slow, or it hangs. Switch ACS off in the"
            " firmware; the command does it until the next boot"
        )
        remedy = as_root(node, *(f"setpci -s {bridge} ECAP_ACS+6.w=0000" for bridge in redirecting))
        observed = f"ACS redirects at {listed(redirecting)}"
        findings.append(Finding(ID, node.name, Status.WARN, observed, "no ACS redirect above the GPUs", why, remedy))
    elif demanded and unread:
        remedy = as_root(node, "lspci -vvv | grep -E '^[0-9a-f].*bridge|ACSCtl'")
        expected = "no ACS redirect above the GPUs"
        findings.append(Finding(ID, node.name, Status.UNKNOWN, "not read: ACS, which only root sees", expected, "", remedy))
    if iommu is None and not gpus and not findings:
        remedy = f"r4090c facts --nodes {node.name}"
        findings.append(Finding(ID, node.name, Status.UNKNOWN, "not read: no GPU on the PCI bus", "", "", remedy))
    yield from findings
    if not findings:
        acs = ", no ACS redirect" if wanted and not unread else ""
        observed = f"IOMMU {iommu or 'not told'}, no ASPM{acs}"
        yield Finding(ID, node.name, Status.PASS, observed, "IOMMU off or pass-through, no ASPM")


def _iommu(gpus: Sequence[PciDevice], kernel: KernelFact | None) -> str | None:
    """Return "off", "pass-through" or "translates …"; None when neither the devices nor the kernel tell."""
    kinds = {device.iommu for device in gpus}
    if kinds and None not in kinds:
        if kinds <= {"off", PASS_THROUGH}:
            return "off" if kinds == {"off"} else "pass-through"
        return f"translates ({', '.join(sorted(kind for kind in kinds if kind not in (None, 'off', PASS_THROUGH)))})"
    if kernel is None or kernel.iommu_groups is None:
        return None
    if kernel.iommu_groups == 0:
        return "off"
    passing = kernel.argument("iommu") == "pt" or kernel.argument("iommu.passthrough") == "1"
    return "pass-through" if passing else "translates (the kernel was not started with iommu=pt)"
