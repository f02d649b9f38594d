"""Boxes with GPUs that are not there: what nvidia-smi, dmesg and sysfs say on a node of the lab.

`with installed(lab, "node02", box):` puts stand-ins of nvidia-smi and dmesg into the node's /usr/local/bin and binds a tree of
its own over the node's /sys/bus/pci/devices. The stand-in answers by its arguments as the real one does: a query with the fields
it was asked for (and refuses one it does not know), `topo -m`, `topo -p2p`, `-q`, `--query-compute-apps`, `dmon`, `-L`.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.lab.lab import Lab, LabError

RECORDED = Path(__file__).resolve().parents[1] / "tools" / "fixtures"
DEVICES = "/sys/bus/pci/devices"


@dataclass(frozen=True)
class Card:
    """One RTX 4090: where it is, and what its link and its slot can do."""

    index: int
    pci: str
    numa: int
    width: int = 16
    width_max: int = 16
    slot_width: int = 16
    gen: int = 1
    driver: str | None = "nvidia"
    memory_mib: int = 24564
    used_mib: int = 2
    persistence: bool = True
    power_limit_w: float = 450.0
    aer: dict[str, str] = field(default_factory=dict)

    @property
    def bus_id(self) -> str:
        """As nvidia-smi writes it: 00000000:1C:00.0."""
        return f"0000{self.pci.upper()}"

    @property
    def uuid(self) -> str:
        """Of the right shape, and another for each index."""
        return f"GPU-5c1b0a37-92de-4b18-8f07-0a6d3c94e5{self.index:02x}"

    @property
    def port(self) -> str:
        """The root port above it, alone on its host bridge as on this board."""
        return f"0000:{int(self.pci[5:7], 16) - 1:02x}:01.1"


REASON_BITS = {
    "Idle": 0x1,
    "SW Power Cap": 0x4,
    "HW Slowdown": 0x8,
    "SW Thermal Slowdown": 0x20,
    "HW Thermal Slowdown": 0x40,
    "HW Power Brake Slowdown": 0x80,
}
"""The words of `nvidia-smi -q` -> the bits of clocks_event_reasons.active (nvml.h)."""
ADDRESSES = (("03", 3), ("1c", 2), ("43", 0), ("5b", 1), ("83", 7), ("9c", 6), ("c3", 4), ("db", 5))
"""Bus and NUMA node of the eight GPUs in the recorded matrix: the index of a GPU is not its NUMA node."""


@dataclass(frozen=True)
class GpuBox:
    """What a node with GPUs says. The default is healthy: two sockets, NPS4, eight cards, a network card near GPU 5.

    `lost`: indices the driver cannot open. `processes`: (pid, index, name, MiB). `hangs`: nvidia-smi never answers.
    `garbage`: what it prints instead of any answer. `old`: the words and fields of a driver before 535.
    """

    cards: tuple[Card, ...] = tuple(Card(index, f"0000:{bus}:00.0", numa) for index, (bus, numa) in enumerate(ADDRESSES))
    driver: str = "570.124.06"
    lost: tuple[int, ...] = ()
    processes: tuple[tuple[int, int, str, int], ...] = ()
    p2p: str = "NS"
    bar1_mib: int = 256
    throttle: tuple[str, ...] = ("Idle",)
    hangs: bool = False
    garbage: str = ""
    old: bool = False
    kernel_log: str = ""
    topology: str = "nvidia-smi-topo/8x4090-gpu0-on-numa3-one-gpu-near-nics.txt"

    def with_card(self, index: int, **changes: Any) -> GpuBox:
        """Return the box with one card changed."""
        return replace(self, cards=tuple(replace(card, **changes) if card.index == index else card for card in self.cards))

    # ------------------------------------------------------------------------------------------ what nvidia-smi says

    @property
    def working(self) -> tuple[Card, ...]:
        """The cards that the driver can open."""
        return tuple(card for card in self.cards if card.index not in self.lost)

    @property
    def complaints(self) -> str:
        """What every call prints about the lost cards."""
        return "".join(
            f"Unable to determine the device handle for GPU{card.index}: {card.pci}: GPU is lost.  Reboot the system to recover\n"
            for card in self.cards
            if card.index in self.lost
        )

    @property
    def reasons(self) -> int:
        """What slows the cards down, as the bits of nvml.h."""
        return sum(bit for reason, bit in REASON_BITS.items() if reason in self.throttle)

    def rows(self) -> list[dict[str, str]]:
        """Return field -> text with unit for each working card."""
        return [
            {
                "index": str(card.index),
                "name": "NVIDIA GeForce RTX 4090",
                "uuid": card.uuid,
                "pci.bus_id": card.bus_id,
                "driver_version": self.driver,
                "memory.total": f"{card.memory_mib} MiB",
                "memory.used": f"{card.used_mib} MiB",
                "pcie.link.gen.current": str(card.gen),
                "pcie.link.gen.max": "4",
                "pcie.link.width.current": str(card.width),
                "pcie.link.width.max": str(card.width_max),
                "temperature.gpu": str(31 + card.index),
                "power.draw": f"{18.5 + card.index:.2f} W",
                "power.limit": f"{card.power_limit_w:.2f} W",
                "utilization.gpu": "0 %",
                "persistence_mode": "Enabled" if card.persistence else "Disabled",
                "pstate": "P8",
                "clocks.current.sm": "210 MHz",
                f"clocks_{'throttle' if self.old else 'event'}_reasons.active": f"0x{self.reasons:016x}",
            }
            for card in self.working
        ]

    def log(self) -> str:
        """Return what `nvidia-smi -q` prints."""
        lines = ["", "==============NVSMI LOG==============", ""]
        lines += [_line(0, "Driver Version", self.driver), _line(0, "CUDA Version", "12.0" if self.old else "12.8"), ""]
        lines.append(_line(0, "Attached GPUs", str(len(self.working))))
        for card in self.working:
            lines.append(f"GPU {card.bus_id}")
            for depth, name, value in self._fields(card):
                lines.append(_line(depth, name, value))
        return "\n".join(lines) + "\n\n"

    def _fields(self, card: Card) -> Iterator[tuple[int, str, str | None]]:
        yield 1, "Product Name", "NVIDIA GeForce RTX 4090"
        yield 1, "Persistence Mode", "Enabled" if card.persistence else "Disabled"
        yield 1, "GPU UUID", card.uuid
        yield 1, "PCI", None
        yield 2, "Bus Id", card.bus_id
        yield 2, "Replays Since Reset", "0"
        yield 1, "Clocks Throttle Reasons" if self.old else "Clocks Event Reasons", None
        for reason, depth in (
            ("Idle", 2),
            ("SW Power Cap", 2),
            ("HW Slowdown", 2),
            ("HW Thermal Slowdown", 3),
            ("HW Power Brake Slowdown", 3),
            ("SW Thermal Slowdown", 2),
        ):
            yield depth, reason, "Active" if reason in self.throttle else "Not Active"
        yield 1, "FB Memory Usage", None
        yield 2, "Total", f"{card.memory_mib} MiB"
        yield 1, "BAR1 Memory Usage", None
        yield 2, "Total", f"{self.bar1_mib} MiB"
        yield 1, "ECC Mode", None
        yield 2, "Current", "Disabled"
        yield 1, "Remapped Rows", "N/A"
        yield 1, "Temperature", None
        yield 2, "GPU Current Temp", f"{31 + card.index} C"
        if self.old:
            yield 2, "GPU Slowdown Temp", "95 C"
        else:
            yield 2, "GPU T.Limit Temp", f"{53 - card.index} C"
        yield 1, "Processes", "None"

    def grants(self) -> str:
        """Return what `nvidia-smi topo -p2p r` prints."""
        names = [f"GPU{card.index}" for card in self.working]
        rows = [f" {one}\t" + "\t".join("X" if one == other else self.p2p for other in names) + "\t" for one in names]
        return " \t" + "\t".join(names) + "\t\n" + "\n".join(rows) + "\n\nLegend:\n\n  X    = Self\n  NS   = Not supported\n"

    def smi(self) -> str:
        """Return the stand-in of nvidia-smi: a program that answers by its arguments."""
        used = "".join(f"{pid}, {name}, {mib} MiB, {self.cards[index].uuid}\n" for pid, index, name, mib in self.processes)
        data = {
            "hangs": self.hangs,
            "garbage": self.garbage,
            "rows": self.rows(),
            "complaints": self.complaints,
            "topo -m": (RECORDED / self.topology).read_text(),
            "topo -p2p": self.grants(),
            "-q": self.log(),
            "apps": f"pid, process_name, used_gpu_memory [MiB], gpu_uuid\n{used}",
            "dmon": _dmon(self.working),
        }
        return f"#!/usr/bin/env python3\nDATA = {json.dumps(data)!r}\n{_STAND_IN}"

    # ------------------------------------------------------------------------------------------ what sysfs says

    def write_pci(self, folder: Path) -> Path:
        """Write the PCI bus below `folder` and return what stands for /sys/bus/pci/devices."""
        devices = folder / "devices"
        devices.mkdir(parents=True)
        zero = {"aer_dev_correctable": "RxErr 0\nTOTAL_ERR_COR 0\n", "aer_dev_fatal": "SDES 0\nTOTAL_ERR_FATAL 0\n"}
        zero["aer_dev_nonfatal"] = "CmpltTO 0\nTOTAL_ERR_NONFATAL 0\n"

        def add(pci: str, port: str, own: dict[str, str], above: dict[str, str], driver: str | None) -> Path:
            bridge = folder / f"pci{port[:7]}" / port
            here = bridge / pci
            (here / "link").mkdir(parents=True)
            for place, texts in ((bridge, {"class": "0x060400", "vendor": "0x1022", **zero, **above}), (here, {**zero, **own})):
                for name, text in texts.items():
                    (place / name).write_text(text if text.endswith("\n") else f"{text}\n")
            (here / "link" / "l1_aspm").write_text("0\n")
            (here / "iommu_group").mkdir()
            (here / "iommu_group" / "type").write_text("identity\n")
            (bridge / "config").write_bytes(bytes(4096))  # as root sees it: no access control capability
            if driver:
                (folder / "drivers" / driver).mkdir(parents=True, exist_ok=True)
                (here / "driver").symlink_to(folder / "drivers" / driver)
            for path in (bridge, here):
                if not (devices / path.name).is_symlink():  # the functions of one card share a port
                    (devices / path.name).symlink_to(path)
            return here

        for card in self.cards:
            speed = {1: "2.5 GT/s PCIe", 3: "8.0 GT/s PCIe", 4: "16.0 GT/s PCIe"}
            lost = card.index in self.lost
            own = {
                "class": "0x030000",
                "vendor": "0x10de",
                "current_link_width": "63" if lost else str(card.width),
                "max_link_width": "63" if lost else "16",
                "current_link_speed": "Unknown" if lost else speed[card.gen],
                "max_link_speed": "Unknown" if lost else speed[4],
                "numa_node": str(card.numa),
                **card.aer,
            }
            add(card.pci, card.port, own, {"max_link_width": str(card.slot_width), "max_link_speed": speed[4]}, card.driver)
        for number in range(4):
            own = {
                "class": "0x020000",
                "vendor": "0x15b3",
                "current_link_width": "16",
                "max_link_width": "16",
                "current_link_speed": "16.0 GT/s PCIe",
                "max_link_speed": "16.0 GT/s PCIe",
                "numa_node": "6",
            }
            port = f"0000:9b:0{2 + number // 2}.1"
            nic = add(
                f"0000:a{number // 2}:00.{number % 2}",
                port,
                own,
                {"max_link_width": "16", "max_link_speed": "16.0 GT/s PCIe"},
                "mlx5_core",
            )
            (nic / "infiniband" / f"mlx5_{number}").mkdir(parents=True)
            (nic / "net" / ("eth0" if number == 0 else f"enp160s0f{number}")).mkdir(parents=True)
        return devices


@contextmanager
def installed(lab: Lab, name: str, box: GpuBox) -> Iterator[None]:
    """Make a node of the lab the box, until the end of the block."""
    folder = lab.node(name).folder / "gpus"
    shutil.rmtree(folder, ignore_errors=True)
    devices = box.write_pci(folder)
    log = box.kernel_log or "[    0.000000] Linux version 6.8.0-45-generic\n[    9.100000] nvidia 0000:03:00.0: enabling device\n"
    programs = [
        lab.stand_in(name, "nvidia-smi", box.smi()),
        lab.stand_in(name, "dmesg", f"#!/bin/sh\nprintf %s {shlex.quote(log)}\n"),
    ]
    _inside(lab, name, f"mount -n --bind {shlex.quote(str(devices))} {DEVICES}")
    try:
        yield
    finally:
        for program in programs:
            program.unlink(missing_ok=True)
        _inside(lab, name, f"umount -n {DEVICES}")


def _inside(lab: Lab, name: str, command: str) -> None:
    done = lab.exec(name, "/bin/sh", "-c", command)
    if done.returncode != 0:
        raise LabError(f"{command} on {name}: {done.stderr.strip()}")


def _line(depth: int, name: str, value: str | None) -> str:
    return f"{'    ' * depth}{name}" if value is None else f"{'    ' * depth}{name:<{51 - 4 * depth}}: {value}"


def _dmon(cards: tuple[Card, ...]) -> str:
    header = "# gpu    pwr  gtemp  mtemp     sm    mem    enc    dec    jpg    ofa   mclk   pclk \n"
    units = "# Idx      W      C      C      %      %      %      %      %      %    MHz    MHz \n"
    rows = "".join(
        f"{card.index:>5}{19:>7}{31:>7}      -      0      0      0      0      0      0    405    210 \n" for card in cards
    )
    return header + units + rows


_STAND_IN = """
import json
import sys
import time

box, words = json.loads(DATA), sys.argv[1:]
if box["hangs"]:
    time.sleep(600)
if box["garbage"]:
    sys.exit(print(box["garbage"]))
UNITS = {"memory": "[MiB]", "power": "[W]", "utilization": "[%]", "clocks": "[MHz]"}
query = next((word.partition("=")[2] for word in words if word.startswith("--query-gpu=")), "")
table = next((word.partition("=")[2] for word in words if word.startswith("--format=")), "").split(",")
if query:
    fields = query.split(",")
    known = {field for row in box["rows"] for field in row}
    for field in fields:
        if known and field not in known:
            print('Field "%s" is not a valid field to query.\\n' % field)
            sys.exit(2)
    if "noheader" not in table:
        units = [(field, UNITS.get(field.split(".")[0], "") if "reasons" not in field else "") for field in fields]
        print(", ".join(" ".join(filter(None, pair)) for pair in units))
    for row in box["rows"]:
        cells = [row[field] for field in fields]
        print(", ".join(cell.split(" ")[0] if "nounits" in table and cell[:1].isdigit() else cell for cell in cells))
elif words[:2] in (["topo", "-m"], ["topo", "-p2p"]):
    print(box[" ".join(words[:2])], end="")
elif any(word.startswith("--query-compute-apps=") for word in words):
    print(box["apps"], end="")
elif words[:1] == ["dmon"]:
    print(box["dmon"], end="")
elif words[:1] == ["-L"]:
    for row in box["rows"]:
        print("GPU %(index)s: %(name)s (UUID: %(uuid)s)" % row)
elif words[:1] == ["-q"]:
    print(box["-q"], end="")
else:
    print("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\\n")
    sys.exit(1)
print(box["complaints"], end="")
"""
