"""`lspci -t`: which device hangs below which bridge.

    -+-[0000:c0]-+-00.0                          a root bus and its first device
     |           +-01.1-[c1]--+-00.0             a bridge, the bus behind it, that bus's devices
     |           |            \\-00.1
     \\-[0000:00]---01.0-[01-05]----00.0-[02-05]--+-08.0-[03]--

The drawing is read by columns: what starts with + or \\ belongs to the bus whose first + stood in that column. A list that
never came to its \\ is a cut tree and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from netcheck.tools._reading import lines_of
from r4090c.errors import ParseError

TOOL = "lspci-tree"
COMMAND = "lspci -t"
MAX_DEPTH = 32
"""est.: bridges above one another; two switches make 5."""
_TREE_LINE = re.compile(r"[ |]*(?:[+\\]-|-\[|-\+-)")
_TOKEN = re.compile(
    r"\[(?:(?P<domain>[0-9a-f]{4,8}):)?(?P<bus>[0-9a-f]{2})(?:-[0-9a-f]{2})?\]"
    r"|(?P<device>[01][0-9a-f]\.[0-7])(?=-|\s|$)"
    r"|(?P<branch>[+\\])"
    r"|(?P<dashes>-+)"
)


@dataclass(frozen=True, slots=True)
class PciTree:
    """`roots`: root buses, "0000:c0". `buses`: bus -> the bridges above it, root port first; a root bus has none.

    `devices`: PCI address -> its bus. `empty`: buses behind a bridge with nothing on them: empty slots.
    """

    roots: tuple[str, ...]
    buses: Mapping[str, tuple[str, ...]]
    devices: Mapping[str, str]
    empty: tuple[str, ...]

    def root_of(self, bus: str) -> str:
        """Return the root bus above `bus`, itself for a root: devices below one root meet in one root complex."""
        bridges = self.buses[bus]
        return self.devices[bridges[0]] if bridges else bus

    def port_of(self, bus: str) -> str | None:
        """Return the bridge right above `bus`: its slot. None for a root bus."""
        bridges = self.buses[bus]
        return bridges[-1] if bridges else None

    def switch_of(self, bus: str) -> str | None:
        """Return the upstream port of the PCIe switch that `bus` hangs on, None when it hangs on a root port."""
        bridges = self.buses[bus]
        return bridges[-2] if len(bridges) > 2 else None


def parse(text: str) -> PciTree:
    """Return the tree; names behind the devices (`lspci -tv`) are skipped. Raises ParseError for no tree, or a cut one."""
    reader = _Reader()
    for line in lines_of(text):
        if _TREE_LINE.match(line):
            reader.read(line.rstrip())
    if not reader.roots:
        raise ParseError(f"no tree: {' '.join(text[:1000].split())[:200]!r}")
    if reader.lists:
        raise ParseError("the tree is cut: a list of devices has no end")
    inhabited = set(reader.devices.values())
    empty = tuple(bus for bus, bridges in reader.buses.items() if bridges and bus not in inhabited)
    return PciTree(tuple(reader.roots), reader.buses, reader.devices, empty)


class _Reader:
    """The tree so far. `lists`: column of a + -> the bus whose devices go on below it, "" for the list of root buses."""

    def __init__(self) -> None:
        self.roots: list[str] = []
        self.buses: dict[str, tuple[str, ...]] = {}
        self.devices: dict[str, str] = {}
        self.lists: dict[int, str] = {}

    def read(self, line: str) -> None:
        """Add one line of the drawing."""
        bus, device = "", ""
        place = len(line) - len(line.lstrip(" |"))
        last = None
        while place < len(line) and not line[place].isspace():
            token = _TOKEN.match(line, place)
            if token is None:
                raise ParseError(f"not a tree: {line.strip()[:120]!r}")
            if token["branch"]:
                bus = self._branch(place, line, bus)
            elif token["device"]:
                device = self._device(bus, token["device"])
            elif token["bus"]:
                bus, device = self._bus(bus, device, token["domain"], token["bus"]), ""
            last, place = token, token.end()
        if not device and not (bus and last is not None and last["dashes"] and len(last["dashes"]) > 1):
            raise ParseError(f"the tree is cut: {line.strip()[:120]!r}")  # a bus ends in a device, or in "--" when it is empty

    def _branch(self, column: int, line: str, bus: str) -> str:
        """Return the bus that a + or \\ at `column` belongs to; a + behind a dash begins a list there."""
        if column and line[column - 1] == "-":
            if line[column] == "\\" or column in self.lists:
                raise ParseError(f"not a tree: {line.strip()[:120]!r}")
            self.lists[column] = bus
            return bus
        if column not in self.lists or column < max(self.lists):
            raise ParseError(f"a branch that hangs on nothing: a line is lost before {line.strip()[:120]!r}")
        return self.lists[column] if line[column] == "+" else self.lists.pop(column)

    def _device(self, bus: str, function: str) -> str:
        device = f"{bus}:{function}"
        if not bus or device in self.devices or len(self.devices) > 65_536:
            raise ParseError(f"{device} hangs on no bus, or is there twice")
        self.devices[device] = bus
        return device

    def _bus(self, bus: str, device: str, domain: str | None, number: str) -> str:
        if not device and bus:
            raise ParseError(f"bus {number} hangs on no bridge")
        bridges = (*self.buses[bus], device) if device else ()
        found = f"{int(domain, 16):04x}:{number}" if domain else f"{device[:-8] or '0000'}:{number}"
        if found in self.buses or len(bridges) > MAX_DEPTH:
            raise ParseError(f"bus {found} is there twice, or hangs too deep")
        if not device:
            self.roots.append(found)
        self.buses[found] = bridges
        return found
