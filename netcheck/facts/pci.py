"""The GPUs and network cards on the PCI bus from sysfs (Documentation/ABI/testing/sysfs-bus-pci).

The bus knows of a card that the driver does not. Not told and no fault: a width of 0 or 255 and "Unknown" speeds (virtual
functions, devices inside the processor), and 63 lanes: that is how a card that no longer answers reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from netcheck.facts.question import Question, Reply, as_int, as_list, as_mapping, as_str
from r4090c.errors import ParseError
from r4090c.model import Cluster, Node, PciDevice

NAME = "pci"
DEVICES = "/sys/bus/pci/devices"
ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
WIDTHS = frozenset((1, 2, 4, 8, 12, 16, 32))
"""Lanes a link can have: PCI Express Base Specification, 7.5.3.6 (Maximum Link Width)."""
AER_FILES = {"aer_dev_correctable": "correctable", "aer_dev_nonfatal": "nonfatal", "aer_dev_fatal": "fatal"}
"""Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats."""
EMULATED = ("0x1b36", "0x15ad", "0x1414")
"""Vendors of the bridges a virtual machine sees (pci.ids: Red Hat for QEMU, VMware, Microsoft). What they say of lanes and speed
is made up: older machine types of QEMU tell x1 at 2.5 GT/s above a card that has all its lanes."""
ACS_REDIRECTS = 0b1100
"""P2P Request Redirect and P2P Completion Redirect of the ACS control register: PCI Express Base Specification, 7.7.11.3."""


def question(node: Node, cluster: Cluster) -> Question:
    """Return what to ask `node`."""
    return Question(natives={"pci": DEVICES}, timeout_s=10)


def parse(reply: Reply) -> tuple[PciDevice, ...]:
    """Return the devices by address; none on a machine without PCI. Raises ParseError."""
    return tuple(_device(as_mapping(entry, "PCI device")) for entry in as_list(reply.native("pci"), "pci"))


def _device(entry: Mapping[str, Any]) -> PciDevice:
    pci = _address(entry.get("pci"))
    own, port = as_mapping(entry.get("device"), f"device of {pci}"), as_mapping(entry.get("port"), f"port of {pci}")
    if port.get("vendor") in EMULATED:
        port = {}
    numa, driver, iommu = own.get("numa_node"), entry.get("driver"), entry.get("iommu")
    registers = as_mapping(entry.get("acs"), f"acs of {pci}")
    read = {_address(bridge): None if value is None else as_int(value, f"acs of {bridge}") for bridge, value in registers.items()}
    redirecting = tuple(bridge for bridge, value in read.items() if (value or 0) & ACS_REDIRECTS)
    return PciDevice(
        pci=pci,
        kind="nic" if as_str(entry.get("class"), f"class of {pci}").startswith("0x02") else "gpu",
        vendor=as_str(entry.get("vendor"), f"vendor of {pci}").removeprefix("0x"),
        width=_lanes(own.get("current_link_width")),
        width_max=_lanes(own.get("max_link_width")),
        speed_gt_s=_speed(own.get("current_link_speed")),
        speed_max_gt_s=_speed(own.get("max_link_speed")),
        numa=None if numa is None else as_int(numa, f"numa_node of {pci}"),
        upstream=tuple(_address(bridge) for bridge in as_list(entry.get("upstream"), f"upstream of {pci}")),
        upstream_width_max=_lanes(port.get("max_link_width")),
        upstream_speed_max_gt_s=_speed(port.get("max_link_speed")),
        aer=_counters(own),
        netdevs=_names(entry.get("netdevs"), f"netdevs of {pci}"),
        hcas=_names(entry.get("hcas"), f"hcas of {pci}"),
        port_aer=_counters(port),
        driver=None if driver is None else as_str(driver, f"driver of {pci}"),
        iommu=None if iommu is None else as_str(iommu, f"iommu of {pci}").strip() or None,
        aspm=tuple(state for state in ("l0s", "l1") if own.get(f"link/{state}_aspm") == "1"),
        acs=None if None in read.values() or (not read and entry.get("upstream")) else redirecting,
    )


def _address(value: object) -> str:
    text = as_str(value, "PCI address").lower()
    if not ADDRESS.fullmatch(text):
        raise ParseError(f"not a PCI address: {text[:80]!r}")
    return text


def _names(value: object, what: str) -> tuple[str, ...]:
    return tuple(as_str(name, what) for name in as_list(value, what))


def _lanes(value: object) -> int | None:
    """Return the lanes of "16", None when the text is no width: see the module."""
    text = value.strip() if isinstance(value, str) else ""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 3 and int(text) in WIDTHS else None


def _speed(value: object) -> float | None:
    """Return GT/s of "16.0 GT/s PCIe" or "8 GT/s", None for "Unknown"."""
    match = re.match(r"(\d{1,3}(?:\.\d{1,2})?) GT/s", value.strip(), re.ASCII) if isinstance(value, str) else None
    return float(match.group(1)) if match else None


def _counters(texts: Mapping[str, Any]) -> dict[str, int]:
    """Return "fatal/TOTAL_ERR_FATAL" -> count. Older kernels write names of several words. Raises ParseError."""
    found: dict[str, int] = {}
    for file, kind in AER_FILES.items():
        for line in as_str(texts.get(file, ""), file).splitlines():
            name, _, count = line.strip().rpartition(" ")
            if name:
                found[f"{kind}/{name}"] = as_int(count, f"{file}: {name}")
    return found
