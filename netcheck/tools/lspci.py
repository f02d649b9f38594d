"""`lspci -vvv`: PCIe links, error bits, access control and BARs of the devices.

Everything is found by its label; what is not printed is None. Without root lspci hides the capabilities ("<access denied>"): the
link is then unknown, not x0. A width that reads x8 of x16 is a slot or a riser; the port above says which (`slot_of`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from netcheck.tools._reading import lines_of
from r4090c.errors import ParseError

TOOL = "lspci"
COMMAND = "sudo lspci -vvv"
MAX_DEVICES = 10_000
"""est.: a server has hundreds of functions, thousands with SR-IOV."""
_DEVICE = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([01][0-9a-f])\.([0-7]) (\S.*)")
_LABEL = re.compile(r"([A-Z][A-Za-z0-9 /.-]{1,30}):(?:\s|$)")
_FLAG = re.compile(r"([A-Za-z0-9_]{2,30})([+-])")
_SPEED = re.compile(r"\bSpeed ([0-9]{1,3}(?:\.[0-9])?)GT/s")
_WIDTH = re.compile(r"\bWidth x([0-9]{1,2})(?![0-9])")
_MEMORY = re.compile(r"Memory at .*\[size=([0-9]{1,6})([KMGT]?)\]")
_MIB = {"": 1 / 2**20, "K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}


@dataclass(frozen=True, slots=True)
class LspciDevice:
    """One function; None = not told. Speeds in GT/s, widths in lanes; `width_cap` and `speed_cap_gt_s` are what it can do.

    `seen`: error kind of DevSta ("CorrErr", "NonFatalErr", "FatalErr", "UnsupReq") -> seen since boot; empty = not told.
    `aer_correctable`, `aer_uncorrectable`: bits set in the AER status (CESta, UESta). `acs`: flag of ACSCtl ("SrcValid") -> on.
    `buses`: (secondary, subordinate) of a bridge. `slot`: the number printed on the board. `port`: "Root Port (Slot+)" ….
    `unreadable`: every register reads ff: it fell off the bus. `denied`: lspci was not root.
    """

    pci: str
    title: str
    speed_gt_s: float | None = None
    speed_cap_gt_s: float | None = None
    width: int | None = None
    width_cap: int | None = None
    numa: int | None = None
    iommu_group: int | None = None
    bars_mib: Mapping[int, float] = field(default_factory=dict)
    seen: Mapping[str, bool] = field(default_factory=dict)
    aer_correctable: tuple[str, ...] | None = None
    aer_uncorrectable: tuple[str, ...] | None = None
    acs: Mapping[str, bool] = field(default_factory=dict)
    aspm: str | None = None
    port: str | None = None
    slot: str | None = None
    buses: tuple[int, int] | None = None
    driver: str | None = None
    denied: bool = False
    unreadable: bool = False

    @property
    def bar1_mib(self) -> float | None:
        """The window through which others reach a GPU's memory: 256, or 32768 with Resizable BAR."""
        return self.bars_mib.get(1)


@dataclass(frozen=True, slots=True)
class Lspci:
    """The devices in the order of the output. `needs_root`: capabilities were hidden."""

    devices: tuple[LspciDevice, ...]
    needs_root: bool

    def device(self, pci: str) -> LspciDevice | None:
        """Return the device at `pci` (sysfs form), None when it was not listed."""
        return next((device for device in self.devices if device.pci == pci), None)

    def slot_of(self, pci: str) -> LspciDevice | None:
        """Return the port right above `pci`, None when it was not listed."""
        domain, bus, _ = pci.split(":")
        above = [device for device in self.devices if device.buses and device.pci.startswith(f"{domain}:")]
        return next((device for device in above if device.buses and device.buses[0] == int(bus, 16)), None)

    def slot_limits(self, pci: str) -> bool | None:
        """Return whether `pci` is narrower than it can be because its slot is; None when that is not told."""
        device, port = self.device(pci), self.slot_of(pci)
        if device is None or port is None or device.width is None or device.width_cap is None or port.width_cap is None:
            return None
        return device.width < device.width_cap and port.width_cap <= device.width


def parse(text: str) -> Lspci:
    """Return the devices. Raises ParseError when the text names none (with the words of lspci)."""
    found: dict[str, _Body] = {}
    body: _Body | None = None
    said: list[str] = []
    # Without a newline the last line may be cut, in the middle of a number: it is left out.
    for line in lines_of(text)[:-1]:
        words = " ".join(line.split())
        start = _DEVICE.fullmatch(words)
        label = _LABEL.match(words)
        if start:
            pci = f"{int(start.group(1) or '0', 16):04x}:{start.group(2)}:{start.group(3)}.{start.group(4)}"
            if pci in found or len(found) >= MAX_DEVICES:
                raise ParseError(f"{pci} twice, or too many devices: more than one output?")
            body = found.setdefault(pci, _Body(start.group(5)))
        elif body is None:
            said.append(words)
        elif label:
            body.open(label.group(1), words[label.end(1) + 1 :].strip())
        elif words:  # goes on with what the label before it began, or has no label
            body.add(words)
    if not found:
        raise ParseError("; ".join([line for line in said if line][:3])[:300] or "no device in it (is the last line cut?)")
    devices = tuple(_device(pci, body) for pci, body in found.items())
    return Lspci(devices, any(device.denied for device in devices))


class _Body:
    """What stands below one device: label -> its texts, each with the lines it goes on in; and the lines without a label."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.labels: dict[str, list[list[str]]] = {}
        self.unlabeled: list[str] = []
        self._last: list[str] = []

    def open(self, label: str, text: str) -> None:
        self._last = [text]
        self.labels.setdefault(label, []).append(self._last)

    def add(self, line: str) -> None:
        self._last.append(line)
        self.unlabeled.append(line)

    def all(self, label: str) -> list[str]:
        return [" ".join(lines) for lines in self.labels.get(label, ())]

    def first(self, label: str) -> str:
        return " ".join(self.labels.get(label, [[]])[0])


def _device(pci: str, body: _Body) -> LspciDevice:
    first = body.first
    port = next((match.group(1) for text in body.all("Capabilities") if (match := _EXPRESS.search(text))), None)
    buses = re.search(r"secondary=([0-9a-f]{2}), subordinate=([0-9a-f]{2})", first("Bus"))
    aspm = re.match(r"ASPM ([^;]{1,40})", first("LnkCtl"))
    return LspciDevice(
        pci=pci,
        title=body.title,
        speed_gt_s=_number(_SPEED, first("LnkSta")),
        speed_cap_gt_s=_number(_SPEED, first("LnkCap")),
        width=_whole(_WIDTH, first("LnkSta")),
        width_cap=_whole(_WIDTH, first("LnkCap")),
        numa=_whole(_INTEGER, first("NUMA node")),
        iommu_group=_whole(_INTEGER, first("IOMMU group")),
        bars_mib=_bars(body),
        seen={name: on for name, on in _flags(first("DevSta")).items() if name.endswith("Err") or name == "UnsupReq"},
        aer_correctable=_set(body, "CESta"),
        aer_uncorrectable=_set(body, "UESta"),
        acs=_flags(first("ACSCtl")),
        aspm=aspm.group(1) if aspm else None,
        port=port,
        slot=first("Physical Slot") or None,
        buses=(int(buses.group(1), 16), int(buses.group(2), 16)) if buses else None,
        driver=first("Kernel driver in use") or None,
        denied=any("<access denied>" in text for text in body.all("Capabilities")),
        unreadable="(rev ff)" in body.title or any("Unknown header type 7f" in line for line in body.unlabeled),
    )


_EXPRESS = re.compile(r"\] Express (?:\(v\d\) )?([^,]{1,60})")
_INTEGER = re.compile(r"([0-9]{1,6})(?![0-9])")


def _number(pattern: re.Pattern[str], text: str) -> float | None:
    match = pattern.search(text)
    return float(match.group(1)) if match else None


def _whole(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    return int(match.group(1)) if match else None


def _flags(text: str) -> dict[str, bool]:
    return {name: sign == "+" for name, sign in _FLAG.findall(text)}


def _set(body: _Body, label: str) -> tuple[str, ...] | None:
    return tuple(name for name, on in _flags(body.first(label)).items() if on) if label in body.labels else None


def _bars(body: _Body) -> dict[int, float]:
    """Return BAR -> size in MiB. `lspci -v` prints no numbers: the BARs are then counted, as those of a GPU are in order."""
    bars: dict[int, float] = {}
    for number in range(6):
        match = _MEMORY.match(body.first(f"Region {number}"))
        if match:
            bars[number] = _size_mib(match)
    if any(label.startswith("Region ") for label in body.labels):
        return bars
    for line in body.unlabeled:
        match = _MEMORY.match(line)
        if match and len(bars) < 6:
            # The parts of a 64-bit BAR count twice; a GPU's windows are 0 (registers), 1 (memory), 3.
            bars[(0, 1, 3, 5)[min(len(bars), 3)]] = _size_mib(match)
    return bars


def _size_mib(match: re.Match[str]) -> float:
    return int(match.group(1)) * _MIB[match.group(2)]
