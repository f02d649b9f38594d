"""What happened to a node while its GPUs were loaded: lost nodes and cards, new Xids, PCIe errors that grew. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from netcheck.checks._wording import as_root, listed
from netcheck.counters import Kind
from netcheck.measure.gpu_load import NodeLoad
from r4090c.model import Cluster, Finding, Status

XID_LOST = 79
"""GPU has fallen off the bus (NVIDIA's Xid catalogue)."""
EXPECTED = "no new Xid, no PCIe error, no lost card"


def faults(check_id: str, load: NodeLoad, cluster: Cluster) -> Iterator[Finding]:
    """Yield what went wrong on one node; nothing when nothing did."""
    node = cluster.node(load.node)
    look = as_root(node, "dmesg | grep -iE 'xid|aer|nvrm|pcieport' | tail -n 30")
    if load.lost:
        why = "it was there before the load: power that gives in, or a reset; a network that fails at the same time is rare"
        remedy = load.next_command or look
        yield Finding(check_id, load.node, Status.FAIL, f"stopped answering under load: {load.error}", EXPECTED, why, remedy)
        return
    if load.xids:
        told = listed(dict.fromkeys(f"Xid {xid.xid} of {xid.pci}" for xid in load.xids))
        lost = any(xid.xid == XID_LOST for xid in load.xids)
        why = (
            "the card fell off the bus: its power connector, the supply, a riser"
            if lost
            else "the driver reports a fault of a card"
        )
        yield Finding(check_id, load.node, Status.FAIL, f"{told}, new under load", EXPECTED, why, look)
    elif load.error:
        why = "the same program runs on the other cards: the card, its driver or its memory fails under load"
        yield Finding(check_id, load.node, Status.FAIL, load.error, EXPECTED, why, look)
    bad = [one for one in load.grew if one.kind is Kind.UNCORRECTED]
    corrected = [one for one in load.grew if one.kind is Kind.CORRECTED]
    if bad or corrected:
        told = listed(f"{one.counter} +{one.by} at {one.device}" for one in (*bad, *corrected))
        why = (
            "packets on the PCIe link were lost or sent again: a riser, cable or slot at its limit; the next step is a lost card"
        )
        yield Finding(check_id, load.node, Status.FAIL if bad else Status.WARN, f"{told} under load", EXPECTED, why, look)


def quiet(load: NodeLoad) -> str:
    """Return what was watched on a node where nothing went wrong."""
    log = "no new Xid" if load.xids is not None else "the kernel log is not readable"
    errors = f"no PCIe error at {load.counted} counters" if load.counted else "no PCIe counters here"
    return f"{log}, {errors}"
