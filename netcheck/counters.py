"""What counters on a node say about a measurement that ran between two readings of them: which files, and what grew. Pure.

Only what means loss is worth a warning. Counted by real hardware alone: the paths go through `device`, which neither veth,
bridges, tunnels nor soft RDMA devices have: what those drop is a queue that was full for a moment, and TCP is made for that.
Drops of a real interface (rx_dropped: also packets of protocols nobody listens to) and TCP's own retransmissions are told, not
judged: the bandwidth checks judge what they cost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

NET, RDMA, PCI = "/sys/class/net", "/sys/class/infiniband", "/sys/bus/pci"
SNMP = "/proc/net/snmp"
GPUS = f"{PCI}/drivers/nvidia/0000:*/aer_dev_*"


class Kind(str, Enum):
    """What growth of a counter means."""

    LOSS = "loss"
    CORRECTED = "corrected"
    UNCORRECTED = "uncorrected"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Growth:
    """One counter that grew by `by`. `device`: "eth0", "mlx5_0:1", "card of eth0", a PCI address, or "tcp"."""

    device: str
    counter: str
    by: int
    kind: Kind


LOSS_OF_NIC = re.compile(r"(rx|tx)_(crc|frame|length|fifo|missed|over|carrier|aborted|heartbeat|window)?_?errors|collisions")
"""Documentation/ABI/testing/sysfs-class-net-statistics: a bad cable or port, or a ring that overran."""
LOSS_OF_RDMA = frozenset(
    (
        *("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "port_rcv_remote_physical_errors"),
        *("port_xmit_discards", "local_link_integrity_errors", "excessive_buffer_overrun_errors"),
        *("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "implied_nak_seq_err", "rx_icrc_encapsulated"),
        *("out_of_buffer", "retry_exceeded_err", "rnr_nak_retry_err"),
    )
)
"""Documentation/ABI/stable/sysfs-class-infiniband and NVIDIA's "Understanding mlx5 Linux Counters": packets that were lost or
came too late. Congestion marks (np_cnp_sent, rp_cnp_handled, np_ecn_marked_roce_packets) are no loss: they prevent it."""
AER = {"aer_dev_correctable": Kind.CORRECTED, "aer_dev_nonfatal": Kind.UNCORRECTED, "aer_dev_fatal": Kind.UNCORRECTED}
"""Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats."""
TCP_TOLD = ("RetransSegs", "InErrs")


def globs(ifaces: Iterable[str] = ("*",), hcas: Iterable[str] = ("*",)) -> tuple[str, ...]:
    """Return the files to read for the interfaces and RDMA devices of the data network; "*" where they are not known.

    What a bond or VLAN stands on is read with it (`lower_*`).
    """
    found: list[str] = []
    for iface in ifaces:
        for base in (f"{NET}/{iface}", f"{NET}/{iface}/lower_*", f"{NET}/{iface}/lower_*/lower_*"):
            net = f"{base}/device/net/{iface if base.endswith(iface) else '*'}/statistics"
            found += [f"{net}/[rt]x_*errors", f"{net}/[rt]x_dropped", f"{net}/collisions"]
            found += [f"{base}/device/aer_dev_*", f"{base}/device/../aer_dev_*"]
    for hca in hcas:
        found += [f"{RDMA}/{hca}/device/infiniband/{hca}/ports/*/{folder}/*" for folder in ("counters", "hw_counters")]
    return (*found, GPUS, SNMP)


def growth(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Growth, ...]:
    """Return what grew between two readings (path -> text), in a fixed order. What cannot be read counts as not there.

    A counter that went down was set anew (a driver was loaded): it says nothing.
    """
    grew: dict[tuple[str, str], Growth] = {}
    for path, text in after.items():
        if path not in before:
            continue
        old = _values(path, before[path])
        for (device, counter), (value, kind) in _values(path, text).items():
            by = value - old.get((device, counter), (value, kind))[0]
            if by > 0:
                # The same device may be reached over several paths.
                known = grew.get((device, counter))
                grew[device, counter] = Growth(device, counter, max(by, known.by if known else 0), kind)
    return tuple(grew[key] for key in sorted(grew))


def judged(readings: Mapping[str, str]) -> int:
    """Return how many counters among the readings would be worth a warning if they grew."""
    found = {key: kind for path, text in readings.items() for key, (_, kind) in _values(path, text).items()}
    return sum(kind is not Kind.INFO for kind in found.values())


def _values(path: str, text: str) -> dict[tuple[str, str], tuple[int, Kind]]:
    """Return (device, counter) -> (value, what its growth means) of one file."""
    if path == SNMP:
        return {("tcp", name): (value, Kind.INFO) for name, value in _snmp(text).items() if name in TCP_TOLD}
    folder, _, name = path.rpartition("/")
    if name in AER:
        return {
            (_card(folder), f"{name.removeprefix('aer_dev_')}/{words[0]}"): (int(words[1]), AER[name])
            for line in text.splitlines()
            if len(words := line.split()) == 2 and _is_count(words[1]) and not words[0].startswith("TOTAL_")
        }
    value = text.strip()
    if not _is_count(value):
        return {}
    if match := re.search(r"/net/([^/]+)/statistics$", folder):
        kind = Kind.LOSS if LOSS_OF_NIC.fullmatch(name) else Kind.INFO
        return {(match.group(1), name): (int(value), kind)}
    if match := re.search(r"/infiniband/([^/]+)/ports/(\d+)/(?:hw_)?counters$", folder):
        kind = Kind.LOSS if name in LOSS_OF_RDMA else Kind.INFO
        return {(f"{match.group(1)}:{match.group(2)}", name): (int(value), kind)}
    return {}


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 20


def _card(folder: str) -> str:
    """Return what AER files of a folder are about: a PCI address, "card of eth0", "slot of eth0" (the port above the card)."""
    match = re.match(rf"{NET}/([^/]+)((?:/lower_[^/]+)*)/device(/\.\.)?$", folder)
    if match is None:
        return folder.rpartition("/")[2]
    iface = match.group(2).rpartition("/lower_")[2] or match.group(1)
    return f"{'slot' if match.group(3) else 'card'} of {iface}"


def _snmp(text: str) -> dict[str, int]:
    """Return the Tcp line of /proc/net/snmp (proc_net_snmp: a line of names, then one of values)."""
    lines = [line.split()[1:] for line in text.splitlines() if line.startswith("Tcp:")]
    if len(lines) != 2:
        return {}
    return {name: int(value) for name, value in zip(*lines, strict=False) if _is_count(value)}
