"""Whether the driver reported faults of a GPU (Xids) since boot, and which came first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from netcheck.checks._wording import account, as_root, listed, on
from r4090c.model import AerEvent, Cluster, Finding, Gpu, KernelLog, Node, NodeFacts, OsFact, PciDevice, Status, Xid

ID, GROUP, NEEDS, OPTIONAL = "gpu-xid", "gpu", ("kernel_log",), ("gpus", "pci", "os")
RULE = "no Xid since boot; the card's own faults (48 62 64 74 79 95 109 110 119 120) fail, those of programs (13 31 43 45 …) warn"
SOURCE = "NVIDIA Xid catalogue"

CARD = {
    48: "memory error that ECC could not correct",
    62: "its microcontroller halted",
    64: "a broken memory row could not be retired",
    74: "link error between cards",
    79: "fallen off the bus",
    95: "memory error that hit all programs",
    109: "context switch timed out",
    110: "security fault",
    119: "its firmware (GSP) does not answer",
    120: "its firmware (GSP) failed",
}
"""Xid -> what happened, for those after which the card is not to be trusted: NVIDIA, Xid Errors (catalogue)."""
PROGRAM = {
    13: "a program's kernel failed",
    31: "a program touched memory that is not its own",
    43: "a program was stopped",
    45: "a program was cleaned away",
}
"""Xid -> what happened, for those that a faulty program causes on a sound card."""
CONSEQUENCE = 154
"""GPU recovery action changed: it follows the fault that made a recovery needed."""
OFF_THE_BUS = 79
A_MOMENT_S = 60.0
"""est.: a log that begins within this time of the boot is whole."""


def applies(node: Node, cluster: Cluster) -> bool:
    """A node with `gpus: 0` has no GPU that could report."""
    return node.gpus > 0


def unread(node: Node, need: str, error: str, facts: Mapping[str, NodeFacts]) -> Finding | None:
    """Return the finding for a log that this account may not see, with what opens it."""
    if "not readable" not in error:
        return None
    why = "a card that failed yesterday may look well today"
    if node.ssh.user == "root":
        why += "; in a container root needs the capability CAP_SYSLOG, or look at the host's log"
        opens = on(node, "dmesg | tail")
    else:
        why += "; members of the group may read the journal from their next login on"
        opens = as_root(node, f"usermod -aG systemd-journal {account(node)}")
    return Finding(ID, node.name, Status.UNKNOWN, f"not read: {error}", "no Xid since boot", why, opens)


def check(
    node: Node,
    log: KernelLog,
    gpus: tuple[Gpu, ...] | None,
    devices: tuple[PciDevice, ...] | None,
    system: OsFact | None,
    cluster: Cluster,
) -> Iterator[Finding]:
    """Yield one Finding per GPU with an Xid, else one pass. An Xid 45 that names an earlier one stands for that one."""
    by_card: dict[str, list[Xid]] = {}
    for xid in log.xids:
        by_card.setdefault(xid.pci, []).append(xid)
    whole = log.since_s is None or log.since_s <= A_MOMENT_S
    since = "since boot" if whole else f"since {log.since_s:.0f} s after boot, where the log begins"
    if not by_card:
        yield Finding(ID, node.name, Status.PASS, f"no Xid {since}", "no Xid since boot")
    for pci, xids in by_card.items():
        index = next((gpu.index for gpu in gpus or () if gpu.index >= 0 and gpu.pci.startswith(f"{pci}.")), None)
        subject = f"{node.name}/gpu{index}" if index is not None else f"{node.name}/{pci}"
        root = _root(xids)
        number = _meaning(root)
        before = _aer_before(root, pci, log, devices) if number == OFF_THE_BUS else []
        observed = _named(number) + _ago(root, system)
        if root.caused_by is not None:
            observed += f", told by Xid {root.xid}"
        if before:
            worst = max(before, key=lambda event: ("corrected", "nonfatal", "fatal").index(event.severity))
            bits = f" {'+'.join(worst.bits)}" if worst.bits else ""
            observed += f"; before it {len(before)} PCIe errors, {worst.severity}{bits} at {worst.pci}"
        also = Counter(xid.xid for xid in xids if xid is not root)
        if also:
            observed += "; also " + listed(f"{xid}" + (f" ({count} times)" if count > 1 else "") for xid, count in also.items())
        status = Status.FAIL if number in CARD else Status.WARN
        remedy = as_root(node, "dmesg | grep -E 'Xid|AER|PCIe Bus Error' | tail -n 40")
        yield Finding(ID, subject, status, observed, "no Xid since boot", _why(number, bool(before)), remedy)


def _meaning(xid: Xid) -> int:
    """Return the Xid that this one stands for."""
    return xid.caused_by if xid.caused_by is not None else xid.xid


def _root(xids: Sequence[Xid]) -> Xid:
    """Return what to report of a GPU: its first fault of the card, else the first that is no consequence."""
    first_of_card = next((xid for xid in xids if _meaning(xid) in CARD), None)
    return first_of_card or next((xid for xid in xids if xid.xid != CONSEQUENCE), xids[0])


def _aer_before(root: Xid, pci: str, log: KernelLog, devices: Sequence[PciDevice] | None) -> list[AerEvent]:
    """Return the PCIe errors of the card and of the bridges above it that came before `root`."""
    upstream = next((device.upstream for device in devices or () if device.pci.startswith(f"{pci}.")), ())
    return [
        event
        for event in log.aer
        if (event.pci.startswith(f"{pci}.") or event.pci in upstream)
        and (event.time_s is None or root.time_s is None or event.time_s <= root.time_s)
    ]


def _named(number: int) -> str:
    meaning = CARD.get(number) or PROGRAM.get(number)
    return f"Xid {number} ({meaning})" if meaning else f"Xid {number}"


def _ago(xid: Xid, system: OsFact | None) -> str:
    """Return " 2.5 h ago" where the log's times are seconds since boot and the uptime is known."""
    uptime_s = system.uptime_s if system is not None else None
    if xid.time_s is None or uptime_s is None or xid.time_s > uptime_s + A_MOMENT_S:
        return ""
    return f", {max(0.0, uptime_s - xid.time_s) / 3600:.1f} h ago"


def _why(number: int, link_errors: bool) -> str:
    if number == OFF_THE_BUS:
        cause = "link errors came first: riser, slot or contacts" if link_errors else "power cable, power supply, riser or heat"
        return f"the card no longer answers until the machine is switched off and on ({cause}); a rank on it hangs all the others"
    if number in CARD:
        return (
            "the card may compute wrong or hang: restart the machine; one that does it again needs other power, cooling or a swap"
        )
    if number in PROGRAM:
        return "mostly a bug in the program that ran; on a card where it comes with every program, its memory or its power is bad"
    return "not one of the usual faults: NVIDIA's Xid catalogue tells what it means"
