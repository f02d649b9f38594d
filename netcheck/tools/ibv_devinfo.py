"""ibv_devinfo: RDMA devices, their ports and the MTU they agreed on. Lines may be missing: soft devices have no board_id."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from netcheck.tools._reading import lines_of, not_output_of, whole
from r4090c.errors import ParseError

TOOL = "ibv_devinfo"
COMMAND = "ibv_devinfo"

LINE = re.compile(r"\s*([A-Za-z_]{1,40}):\s*(.{0,120}?)\s*$")
NO_DEVICES = re.compile(r"\s*(No IB devices found|Failed to get IB devices list.{0,80}|IB device '?\S{1,64}'? wasn't found)")


@dataclass(frozen=True, slots=True)
class IbvPort:
    """One port. `state` in ibv's words, "PORT_ACTIVE"; `active_mtu_bytes` is what the packets have. None = not told."""

    port: int
    state: str
    max_mtu_bytes: int | None
    active_mtu_bytes: int | None
    sm_lid: int | None
    port_lid: int | None
    link_layer: str | None

    @property
    def active(self) -> bool:
        """True when the port carries traffic."""
        return self.state == "PORT_ACTIVE"


@dataclass(frozen=True, slots=True)
class IbvDevice:
    """One device ("hca_id") and its ports."""

    hca: str
    firmware: str | None
    vendor_id: str | None
    board_id: str | None
    ports: tuple[IbvPort, ...]


@dataclass(frozen=True, slots=True)
class IbvDevinfo:
    """All devices; none of them with `error` in the tool's words: then there is no RDMA, and NCCL takes TCP."""

    devices: tuple[IbvDevice, ...]
    error: str | None = None


def parse(text: str) -> IbvDevinfo:
    """Return the devices. Raises ParseError when the text is not of ibv_devinfo, or ends before a port's state."""
    devices: list[tuple[dict[str, str], list[dict[str, str]]]] = []
    error = None
    for line in lines_of(text):
        match = LINE.match(line)
        if refused := NO_DEVICES.match(line):
            error = refused.group(1)
        elif match is None:
            continue
        elif match.group(1) == "hca_id":
            devices.append(({"hca_id": match.group(2)}, []))
        elif devices and match.group(1) == "port":
            devices[-1][1].append({"port": match.group(2)})
        elif devices:
            device, ports = devices[-1]
            (ports[-1] if ports else device).setdefault(match.group(1), match.group(2))
    if not devices and error is None:
        raise not_output_of(TOOL, lines_of(text))
    return IbvDevinfo(tuple(_device(device, ports) for device, ports in devices), error)


def _device(device: Mapping[str, str], ports: list[dict[str, str]]) -> IbvDevice:
    hca = device["hca_id"]
    count = whole(device.get("phys_port_cnt"))
    if not hca or not ports or (count is not None and len(ports) > count):
        raise ParseError(f"ibv_devinfo: {hca or 'a device'}: {len(ports)} ports, phys_port_cnt {device.get('phys_port_cnt')}")
    return IbvDevice(hca, device.get("fw_ver"), device.get("vendor_id"), device.get("board_id"), tuple(map(_port, ports)))


def _port(port: Mapping[str, str]) -> IbvPort:
    number, state = whole(port["port"]), re.match(r"PORT_\w{1,20}", port.get("state", ""))
    if number is None or state is None:
        raise ParseError(f"ibv_devinfo: port {port['port'][:20]!r} has no state: the text is cut")
    return IbvPort(
        port=number,
        state=state.group(),
        max_mtu_bytes=_first(port.get("max_mtu")),
        active_mtu_bytes=_first(port.get("active_mtu")),
        sm_lid=_first(port.get("sm_lid")),
        port_lid=_first(port.get("port_lid")),
        link_layer=port.get("link_layer") or None,
    )


def _first(text: str | None) -> int | None:
    """Return the number of "4096 (5)"."""
    return whole((text or "").split(" ")[0])
