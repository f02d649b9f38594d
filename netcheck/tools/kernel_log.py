"""The kernel log, from dmesg (-T, -x, -r, --time-format iso), journalctl -k (-o short…), /var/log/kern.log or /dev/kmsg.

Read are NVIDIA's Xids, PCIe AER, the OOM killer, NFS servers that do not answer, and devices whose PCIe slot limits them. Lines
of one fault are one event: an Xid 13 comes as several lines, an AER error as four. A line that begins a new boot begins anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

from netcheck.tools._reading import lines_of
from r4090c.errors import ParseError
from r4090c.model import AerEvent, KernelLog, Xid

TOOL = "kernel-log"
COMMAND = "dmesg (or journalctl -k -b -o short-monotonic)"

XID_BURST_S = 5.0
"""est.: lines of the same Xid, GPU and process this close to each other are one fault."""

CORRECTABLE = {
    0: "RxErr",
    6: "BadTLP",
    7: "BadDLLP",
    8: "Rollover",
    12: "Timeout",
    13: "NonFatalErr",
    14: "CorrIntErr",
    15: "HeaderOF",
}
UNCORRECTABLE = {
    0: "Undefined",
    4: "DLP",
    5: "SDES",
    12: "TLP",
    13: "FCP",
    14: "CmpltTO",
    15: "CmpltAbrt",
    16: "UnxCmplt",
    17: "RxOF",
    18: "MalfTLP",
    19: "ECRC",
    20: "UnsupReq",
    21: "ACSViol",
    22: "UncorrIntErr",
    23: "BlockedTLP",
    24: "AtomicOpBlocked",
    25: "TLPBlockedErr",
    26: "PoisonTLPBlocked",
}
"""Bit of the AER status -> the kernel's word for it (drivers/pci/pcie/aer.c since 5.7; PCIe base specification 7.8.4).

Older kernels print "Receiver Error", "Replay Timer Timeout", "Surprise Down Error": the number of the bit is the same.
"""

_PCI = r"(?:[0-9a-fA-F]{4,8}):[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]"
XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?(?P<pci>(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.\d)?\): "
    r"(?P<xid>\d{1,4})(?:, ?(?P<text>.*))?$"
)
CAUSED_BY = re.compile(r"caused by (?:the )?previous Xid:? ?(\d{1,4})", re.IGNORECASE)
PROCESS = re.compile(r"pid='?(?P<pid>\d{1,9}|<unknown>)'?,?(?: name='?[^,]{0,64}'?,)? ?")
RECEIVED = re.compile(
    rf"(?P<reporter>{_PCI}): AER: (?:Multiple )?(?P<severity>Correct\w+|Uncorrect\w+(?: \((?:Non-)?Fatal\))?) error (?:message )?"
    rf"received(?: from)?:? (?:(?P<pci>{_PCI})|id=(?P<id>[0-9a-fA-F]{{4}}))"
)
BUS_ERROR = re.compile(
    rf"(?P<pci>{_PCI}): (?:AER: )?PCIe Bus Error: severity=(?P<severity>Correct\w+|Uncorrect\w+ \((?:Non-)?Fatal\))"
)
STATUS = re.compile(
    rf"(?P<pci>{_PCI}):\s+(?:device \[[0-9a-f:]{{9}}\] error status/mask=|AER: aer_status: 0x)"
    r"(?P<status>[0-9a-fA-F]{8})(?:/|, aer_mask: 0x)?(?P<mask>[0-9a-fA-F]{8})?"
)
BIT = re.compile(
    rf"(?P<pci>{_PCI}):\s+(?:AER: )?\s*\[ ?(?P<bit>\d{{1,2}})\]\s*(?P<word>[A-Za-z][\w \-/]{{1,40}}?)\s*(?:\(First\))?\s*$"
)
FIRMWARE = re.compile(r"\[Hardware Error\]:\s+(?:event severity|Error \d+, type): (?P<severity>corrected|recoverable|fatal)")
OOM = re.compile(r"\bKilled process (?P<pid>\d{1,9}) \((?P<name>.{1,64}?)\)(?:,|\s|$)")
NFS = re.compile(r"nfs: server (?P<server>\S{1,255}) (?P<state>not responding|OK)")
LIMITED = re.compile(rf"(?P<pci>{_PCI}): (?P<words>[\d.]{{1,12}} Gb/s available PCIe bandwidth, limited by .{{1,200}})")
NEW_BOOT = re.compile(r"-- (?:Reboot|Boot [0-9a-f]{32}) --\s*$")
FIRST_LINE = re.compile(r"(?:\[ *0\.0{6}\] ?|kernel: |;)Linux version \d")

_MONTHS = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
_CLOCK = r"\d\d:\d\d:\d\d"
_HOST = r"(?:[\w.\-]{1,255} kernel: )"
_SINCE_BOOT = r"\[ {0,12}(?P<boot>\d{1,12}\.\d{1,9})\]"
STAMPS = (
    re.compile(r"\d{1,4},\d{1,20},(?P<us>\d{1,18}),[^;]{0,40};"),  # /dev/kmsg
    re.compile(  # dmesg, -r and -x; what pdsh puts in front
        r"(?:[\w.\-]{1,64}: )?(?:<\d{1,3}>|[a-z0-9]{1,8} {0,4}:[a-z]{1,8} {0,4}: ?)?"
        rf"{_SINCE_BOOT}(?: ?\[ {{0,12}}[TC]\d{{1,9}}\])? {_HOST}?"
    ),
    re.compile(rf"\[\w{{3}} (?P<month>{_MONTHS}) [ \d]\d {_CLOCK} \d{{4}}\] "),  # dmesg -T
    re.compile(  # short-iso
        rf"(?P<iso>\d{{4}}-\d\d-\d\d[T ]{_CLOCK}(?:[.,]\d{{1,9}})?(?:[+-]\d\d:?\d\d|Z)?) {_HOST}(?:{_SINCE_BOOT} )?"
    ),
    re.compile(rf"(?P<iso>\d{{4}}-\d\d-\d\dT{_CLOCK},\d{{6}}[+-]\d\d:\d\d) "),  # dmesg --time-format iso
    re.compile(rf"\w{{3}} (?P<full>\d{{4}}-\d\d-\d\d {_CLOCK})(?:\.\d{{1,9}})? \w{{1,6}} {_HOST}"),  # short-full
    re.compile(rf"(?P<unix>\d{{9,11}}\.\d{{1,9}}) {_HOST}"),  # short-unix
    re.compile(rf"(?:{_MONTHS}) [ \d]\d {_CLOCK}(?:\.\d{{1,9}})? {_HOST}(?:{_SINCE_BOOT} )?"),  # short, short-precise, kern.log
)
"""What stands before the text of a line; the group that holds a time names its kind."""


@dataclass(slots=True)
class _Aer:
    """An AER error while its lines come in."""

    event: AerEvent
    detailed: bool = False
    decoded: bool = False


@dataclass(slots=True)
class _Seen:
    """What was found since the last boot."""

    xids: list[Xid] = field(default_factory=list)
    last: dict[str, tuple[int, float | None]] = field(default_factory=dict)
    """GPU -> (index in xids, time) of its latest Xid line."""
    aer: list[_Aer] = field(default_factory=list)
    open: dict[str, int] = field(default_factory=dict)
    """PCI address -> index in aer of its latest error."""
    firmware: str | None = None
    oom: dict[tuple[int, str], None] = field(default_factory=dict)
    nfs: dict[str, None] = field(default_factory=dict)
    limited: dict[str, str] = field(default_factory=dict)

    def log(self) -> KernelLog:
        return KernelLog(
            xids=tuple(self.xids),
            aer=tuple(one.event for one in self.aer),
            oom_kills=tuple(self.oom),
            nfs_silent=tuple(self.nfs),
            pcie_limited=tuple(self.limited.items()),
        )


def parse(text: str) -> KernelLog:
    """Return what matters of the log since its last boot.

    Times are seconds since boot where the log has them, else Unix time, else None (journalctl's short format has no year).
    Raises ParseError when no line is one of a kernel log: an empty text or "Operation not permitted" does not say "no faults".
    """
    lines = lines_of(text)
    log = scan(lines)
    if log == KernelLog() and not any(stamp(line)[0] for line in lines):
        first = next((line.strip() for line in lines if line.strip()), "")
        raise ParseError(f"not a kernel log: {first[:120]!r}" if first else "the kernel log is empty")
    return log


def scan(lines: Iterable[str]) -> KernelLog:
    """Return what matters of lines some of which are the kernel's, as in the log of a run; nothing is no error here."""
    seen = _Seen()
    for line in lines:
        if NEW_BOOT.match(line):
            seen = _Seen()
            continue
        if not _MATTERS.search(line):
            continue
        if FIRST_LINE.search(line):
            seen = _Seen()
            continue
        _read(line, seen)
    return seen.log()


_MATTERS = re.compile(
    r"NVRM: Xid|AER|PCIe Bus Error|error status/mask|\[ ?\d{1,2}\]|Hardware Error|Killed process|nfs: server|available PCIe"
    r"|Linux version"
)
"""One of them is in every line that is read further: most lines are not."""


def stamp(line: str) -> tuple[str, float | None, str]:
    """Return (the stamp a kernel log's line begins with, its time, the text after it); ("", None, line) where there is none."""
    for pattern in STAMPS:
        match = pattern.match(line)
        if match:
            return match.group(), _time_s(match), line[match.end() :]
    return "", None, line


def _time_s(match: re.Match[str]) -> float | None:
    told = match.groupdict()
    if told.get("boot"):
        return float(told["boot"])
    if told.get("us"):
        return int(told["us"]) / 1e6
    if told.get("unix"):
        return float(told["unix"])
    try:
        if told.get("iso"):
            return _unix(datetime.fromisoformat(_iso(told["iso"])))
        if told.get("full"):
            return _unix(datetime.fromisoformat(told["full"]))
        if told.get("month"):
            return _unix(datetime.strptime(match.group()[5:-2], "%b %d %H:%M:%S %Y"))
    except ValueError:  # the 31st of February
        pass
    return None


def _iso(text: str) -> str:
    """Return the time as Python 3.10 reads it: a dot and six digits, a colon in the offset."""
    match = re.fullmatch(r"(.{19})(?:[.,](\d{1,9}))?(?:([+-]\d\d):?(\d\d)|Z)?", text)
    if match is None:
        return text
    whole, fraction, hours, minutes = match.groups()
    zone = f"{hours}:{minutes}" if hours else "+00:00" if text.endswith("Z") else ""
    return f"{whole}.{(fraction or '0')[:6]:0<6}{zone}"


def _unix(when: datetime) -> float:
    """Return Unix time; a time without a zone is taken for UTC: differences are right, whatever the zone."""
    return (when if when.tzinfo else when.replace(tzinfo=timezone.utc)).timestamp()


def _read(line: str, seen: _Seen) -> None:
    if match := XID.search(line):
        _read_xid(match, stamp(line)[1], seen)
    elif match := RECEIVED.search(line):
        pci = match["pci"] or _of_id(match["reporter"], match["id"])
        _begin(seen, pci, _severity(match["severity"]), stamp(line)[1], detailed=False)
    elif match := BUS_ERROR.search(line):
        _begin(seen, match["pci"], _severity(match["severity"]), stamp(line)[1], detailed=True)
    elif match := STATUS.search(line):
        _read_status(match, stamp(line)[1], seen)
    elif match := BIT.search(line):
        _read_bit(match, seen)
    elif match := FIRMWARE.search(line):
        seen.firmware = {"corrected": "corrected", "recoverable": "nonfatal", "fatal": "fatal"}[match["severity"]]
    elif match := OOM.search(line):
        seen.oom[int(match["pid"]), match["name"]] = None
    elif match := NFS.search(line):
        if match["state"] == "OK":
            seen.nfs.pop(match["server"], None)
        else:
            seen.nfs[match["server"]] = None
    elif match := LIMITED.search(line):
        seen.limited[_address(match["pci"])] = match["words"].strip()


def _read_xid(match: re.Match[str], time_s: float | None, seen: _Seen) -> None:
    pci, number = _address(match["pci"]), int(match["xid"])
    text = (match["text"] or "").strip()
    process = PROCESS.match(text)
    pid = int(process["pid"]) if process and process["pid"].isdecimal() else None
    if process:
        text = text[process.end() :]
    before = seen.last.get(pci)
    if before is not None:
        index, last_s = before
        known = seen.xids[index]
        near = time_s is None or last_s is None or 0 <= time_s - last_s <= XID_BURST_S
        if (known.xid, known.pid) == (number, pid) and near:
            seen.last[pci] = (index, time_s)
            return
    caused_by = CAUSED_BY.search(text)
    seen.last[pci] = (len(seen.xids), time_s)
    seen.xids.append(Xid(number, pci, pid, time_s, text[:300], int(caused_by.group(1)) if caused_by else None))


def _begin(seen: _Seen, pci: str, severity: str, time_s: float | None, *, detailed: bool) -> None:
    """Note an AER error; "PCIe Bus Error" after "error received" tells more of the same one."""
    pci = _address(pci)
    if detailed:
        index = seen.open.get(pci)
        if index is not None and not seen.aer[index].detailed and seen.aer[index].event.severity == severity:
            seen.aer[index].detailed = True
            return
    seen.open[pci] = len(seen.aer)
    seen.aer.append(_Aer(AerEvent(pci, severity, (), time_s), detailed))


def _read_status(match: re.Match[str], time_s: float | None, seen: _Seen) -> None:
    """Take the bits from the status register; the lines that name them may be missing (rate limit)."""
    pci = _address(match["pci"])
    if "aer_status" in match.group():  # told by the firmware (ACPI APEI): its own lines give the severity
        if seen.firmware is None:
            return
        _begin(seen, pci, seen.firmware, time_s, detailed=True)
    index = seen.open.get(pci)
    if index is None or seen.aer[index].decoded:
        return
    one = seen.aer[index]
    status = int(match["status"], 16) & ~int(match["mask"] or "0", 16)
    names = CORRECTABLE if one.event.severity == "corrected" else UNCORRECTABLE
    bits = tuple(names.get(bit, f"bit {bit}") for bit in range(32) if status >> bit & 1)
    one.event = replace(one.event, bits=bits)


def _read_bit(match: re.Match[str], seen: _Seen) -> None:
    index = seen.open.get(_address(match["pci"]))
    if index is None:
        return
    one = seen.aer[index]
    names = CORRECTABLE if one.event.severity == "corrected" else UNCORRECTABLE
    bit = names.get(int(match["bit"]), match["word"])
    known = one.event.bits if one.decoded else ()
    one.decoded = True
    if bit not in known:
        one.event = replace(one.event, bits=(*known, bit))


def _severity(text: str) -> str:
    """Return corrected, nonfatal or fatal: old kernels say Uncorrected, newer ones Uncorrectable."""
    if not text.startswith("Uncorrect"):
        return "corrected"
    return "nonfatal" if "Non-Fatal" in text else "fatal"


def _of_id(reporter: str, requester: str) -> str:
    """Return the address of kernels before 4.19's "id=00e0" (bus, device, function), in the reporter's domain."""
    number = int(requester, 16)
    return f"{reporter.split(':')[0]}:{number >> 8:02x}:{number >> 3 & 31:02x}.{number & 7}"


def _address(pci: str) -> str:
    """Return the address in sysfs form: lower case, a domain of four digits (0000 where the log has none)."""
    parts = pci.lower().split(":")
    return ":".join([parts[0][-4:] if len(parts) == 3 else "0000", *parts[-2:]])
