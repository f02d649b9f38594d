"""Whether counters of lost packets and bad frames stood still while the links were measured."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from netcheck.checks._wording import as_root, listed, on
from netcheck.counters import Growth, Kind, growth, judged
from netcheck.measure.job import read_rounds
from r4090c.model import Cluster, Finding, Node, Status

ID, GROUP, SCOPE, NEEDS = "loss-counters", "bandwidth", "measurement", ("tcp", "rdma-pairs")
RULE = "while TCP and RDMA are measured: no uncorrected PCIe error (fail); no lost packet, bad frame, corrected PCIe error (warn)"
SOURCE = "sysfs-class-net-statistics, sysfs-class-infiniband and sysfs-bus-pci-devices-aer_stats of the kernel's ABI documents"

EXPECTED = "counters of loss stand still"
WHY = "packets are lost and sent again, which hurts most when all nodes talk at once"
WHY_UNCORRECTED = "PCIe transfers of a card failed: it may fall off the bus; reseat it, or try another slot or riser"
WHY_CORRECTED = "PCIe transfers of a card are repeated: reseat it, or try another slot or riser"
WHY_RING = f"{WHY}: the card's ring of buffers was full; a longer one helps (ethtool -G), or its interrupts on more cores"
WHY_WIRE = f"{WHY}: the cable, the transceiver or the switch port"
OVERRUN = ("rx_missed_errors", "rx_fifo_errors", "rx_over_errors", "out_of_buffer")
SHOWN = 5


def applies(node: Node, cluster: Cluster) -> bool:
    """Not where all nodes are one machine."""
    return cluster.network.kind != "loopback"


def check(measured: Mapping[str, Any], cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding per node that took part. Raises ParseError when a measurement is not rounds of jobs."""
    grew: dict[str, dict[tuple[str, str], Growth]] = {}
    watched: dict[str, int] = {}
    told = False
    for name in NEEDS:
        for record in (record for one in read_rounds(measured.get(name, {"rounds": []})) for record in one):
            for place, part in record.parts.items():
                told = True
                own = grew.setdefault(place, {})
                watched[place] = max(watched.get(place, 0), judged(part.after))
                for one in growth(part.before, part.after):
                    before = own.get((one.device, one.counter))
                    by = one.by + (before.by if before else 0)
                    own[one.device, one.counter] = Growth(one.device, one.counter, by, one.kind)
    for node in cluster.nodes:
        if node.name in grew:
            yield _judged(node, list(grew[node.name].values()), watched[node.name])
        elif not told:
            yield Finding(ID, node.name, Status.SKIP, "not applicable: nothing was measured between nodes", EXPECTED)


def _judged(node: Node, grew: list[Growth], watched: int) -> Finding:
    broken = [one for one in grew if one.kind is Kind.UNCORRECTED]
    lost = [one for one in grew if one.kind in (Kind.LOSS, Kind.CORRECTED)]
    if broken or lost:
        observed = listed((f"{one.device} {one.counter} +{one.by}" for one in (*broken, *lost)), SHOWN)
        status = Status.FAIL if broken else Status.WARN
        why, remedy = _advice(node, (broken or lost)[0])
        return Finding(ID, node.name, status, observed, EXPECTED, why, remedy)
    if not watched:
        return Finding(ID, node.name, Status.SKIP, "not applicable: its interfaces are virtual and count no loss", EXPECTED)
    again = next((one.by for one in grew if (one.device, one.counter) == ("tcp", "RetransSegs")), 0)
    return Finding(ID, node.name, Status.PASS, f"{watched} counters stood still; TCP sent {again} segments again", EXPECTED)


def _advice(node: Node, grew: Growth) -> tuple[str, str]:
    """Return why it matters that a counter grew, and the command that shows more."""
    if grew.kind in (Kind.CORRECTED, Kind.UNCORRECTED):
        why = WHY_UNCORRECTED if grew.kind is Kind.UNCORRECTED else WHY_CORRECTED
        return why, as_root(node, "dmesg -T | grep -iE 'AER|PCIe Bus Error' | tail -20")
    if ":" in grew.device:
        why = WHY_RING if grew.counter in OVERRUN else WHY
        return why, on(node, f"rdma statistic show link {shlex.quote(grew.device.replace(':', '/'))}")
    device = shlex.quote(grew.device)
    if grew.counter in OVERRUN:
        return WHY_RING, on(node, f"ethtool -g {device}; ip -s -s link show dev {device}")
    return WHY_WIRE, on(node, f"ethtool {device}; ip -s -s link show dev {device}")
