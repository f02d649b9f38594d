"""Whether the PCIe links of GPUs and network cards counted errors since boot (AER)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from netcheck.checks._wording import as_root, origin
from netcheck.topology import data_cards
from r4090c.model import Cluster, Finding, Gpu, KernelLog, NetFact, Node, OsFact, PciDevice, RdmaPort, Status

ID, GROUP, NEEDS, OPTIONAL = "aer", "pcie", ("pci",), ("gpus", "os", "kernel_log", "net", "rdma")
RULE = "no fatal error since boot (fail), no nonfatal one, under {aer_corrected_per_hour_warn:g} corrected an hour (warn)"
SOURCE = "Documentation/PCI/pcieaer-howto; est."

TOTALS = {"fatal": "fatal/TOTAL_ERR_FATAL", "nonfatal": "nonfatal/TOTAL_ERR_NONFATAL", "corrected": "correctable/TOTAL_ERR_COR"}
STORM_EVENTS, STORM_S = 10, 60.0
"""est.: so many corrected errors of one device within this time are a storm, whatever the average since boot."""


def applies(node: Node, cluster: Cluster) -> bool:
    """A node with `gpus: 0` has no link whose errors would hurt."""
    return node.gpus > 0


def check(
    node: Node,
    devices: tuple[PciDevice, ...],
    gpus: tuple[Gpu, ...] | None,
    system: OsFact | None,
    log: KernelLog | None,
    net: NetFact | None,
    rdma: tuple[RdmaPort, ...] | None,
    cluster: Cluster,
) -> Iterator[Finding]:
    """Yield one Finding per device with errors, else one pass; `skip` where the kernel counts none.

    The counters are since boot, so that one of an earlier day is told as well; whether they grow is measured under load. Of the
    network cards only those of the data network are judged, where they can be told: boards' own ones and wireless ones count
    corrected errors by the hour.
    """
    cards = data_cards(node, cluster, devices, net, rdma or ())
    devices = tuple(one for one in devices if one.kind == "gpu" or one in cards or (not cards and not _wireless(one)))
    rate_limit = cluster.expect.aer_corrected_per_hour_warn
    uptime_h = max(1.0, system.uptime_s / 3600) if system is not None and system.uptime_s else None
    seen_ports: set[str] = set()
    counting = faults = 0
    for device in devices:
        counts = [("", device.aer)]
        port = device.upstream[-1] if device.upstream else ""
        if port and port not in seen_ports:  # the functions of one card share it
            seen_ports.add(port)
            counts.append((f" at its port {port}", device.port_aer))
        counting += any(name in own for _, own in counts for name in TOTALS.values())
        for where, own in counts:
            found = _judged(own, uptime_h, rate_limit)
            if not found and not where and log is not None and _storm(log, device.pci):
                found = (Status.WARN, f"{_storm(log, device.pci)} corrected within {STORM_S:g} s", "now and then at most")
            if found:
                faults += 1
                status, observed, expected = found
                expected += origin(cluster, "aer_corrected_per_hour_warn") if "an hour" in expected else ""
                lines = f"{device.pci}|{port}" if port else device.pci
                remedy = as_root(node, f"dmesg | grep -E 'AER|PCIe Bus Error' | grep -E '{lines}' | tail")
                yield Finding(ID, _subject(node, device, gpus), status, observed + where, expected, _why(status, own), remedy)
    if not devices or not counting:
        told = "no GPU or network card on a PCI bus" if not devices else "the kernel counts no PCIe errors here"
        yield Finding(ID, node.name, Status.SKIP, told)
    elif not faults:
        yield Finding(ID, node.name, Status.PASS, f"no errors at {counting} of {len(devices)} cards", "none since boot")


def _judged(counts: Mapping[str, int], uptime_h: float | None, rate_limit: float) -> tuple[Status, str, str] | None:
    """Return (status, observed, expected) for the counters of one device, None when they are fine."""
    for kind, status in (("fatal", Status.FAIL), ("nonfatal", Status.WARN)):
        if counts.get(TOTALS[kind], 0):
            return status, f"{counts[TOTALS[kind]]} {kind} ({_bits(counts, kind)})", "none since boot"
    corrected = counts.get(TOTALS["corrected"], 0)
    if corrected and uptime_h is not None and corrected / uptime_h >= rate_limit:
        observed = f"{corrected / uptime_h:.0f} corrected an hour ({_bits(counts, 'correctable')})"
        return Status.WARN, observed, f"under {rate_limit:g} an hour"
    return None


def _bits(counts: Mapping[str, int], kind: str) -> str:
    own = {name.partition("/")[2]: count for name, count in counts.items() if name.startswith(f"{kind}/") and "TOTAL" not in name}
    ranked = sorted(own, key=lambda name: -own[name])
    return ", ".join(f"{name} {own[name]}" for name in ranked[:3]) or "of a kind not told"


def _storm(log: KernelLog, pci: str) -> int:
    """Return the most corrected errors of a device within STORM_S, 0 when they are fewer than STORM_EVENTS."""
    times = sorted(
        event.time_s for event in log.aer if event.pci == pci and event.severity == "corrected" and event.time_s is not None
    )
    most = start = 0
    for end, time_s in enumerate(times):
        while time_s - times[start] > STORM_S:
            start += 1
        most = max(most, end - start + 1)
    return most if most >= STORM_EVENTS else 0


def _wireless(device: PciDevice) -> bool:
    return any(name.startswith("wl") for name in device.netdevs)


def _subject(node: Node, device: PciDevice, gpus: Sequence[Gpu] | None) -> str:
    index = next((gpu.index for gpu in gpus or () if gpu.index >= 0 and gpu.pci == device.pci), None)
    name = f"gpu{index}" if index is not None else next(iter((*device.hcas, *device.netdevs)), device.pci)
    return f"{node.name}/{name}"


def _why(status: Status, counts: Mapping[str, int]) -> str:
    if status is Status.FAIL:
        return "the link broke down: riser, slot, contacts or power; the next time the card is gone in the middle of a run"
    if counts.get(TOTALS["nonfatal"], 0):
        return "packets were lost; a few at start-up may come from the firmware's search for cards, more are a riser or a slot"
    return "each is a packet sent again: a riser, cable or slot at its limit, and the first sign of a card that will be lost"
