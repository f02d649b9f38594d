"""ethtool IFACE: what the link negotiated. The speeds in the lists of modes are not the link's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from netcheck.tools._reading import lines_of, not_output_of
from r4090c.errors import ParseError

TOOL = "ethtool"
COMMAND = "ethtool IFACE"

SETTINGS = re.compile(r"Settings for (\S{1,64}):\s*$")
LINE = re.compile(r"\s+(Speed|Duplex|Port|Auto-negotiation|Link detected):\s*(\S.{0,80}?)\s*$")
REFUSED = re.compile(r"((?:netlink error|Cannot get (?:device|link) (?:settings|status)): .{1,120}?|No data available)\s*$")


@dataclass(frozen=True, slots=True)
class EthtoolLink:
    """One interface. None = not told: a link that is down has no speed. `error`: what ethtool could not get."""

    iface: str
    speed_mbit_s: int | None
    duplex: str | None
    link: bool | None
    autoneg: bool | None
    port: str | None
    error: str | None = None


def parse(text: str) -> tuple[EthtoolLink, ...]:
    """Return every interface the text has settings for. Raises ParseError when it has none, or none of what is asked for."""
    found: list[tuple[str, dict[str, str]]] = []
    for line in lines_of(text):
        if match := SETTINGS.match(line.strip()):
            found.append((match.group(1), {}))
        elif found and (match := LINE.match(line)):
            found[-1][1].setdefault(match.group(1), match.group(2))
        elif found and (match := REFUSED.match(line.strip())):
            found[-1][1].setdefault("error", match.group(1))
    if not found:
        raise not_output_of(TOOL, lines_of(text))
    return tuple(_link(iface, told) for iface, told in found)


def _link(iface: str, told: Mapping[str, str]) -> EthtoolLink:
    speed = re.fullmatch(r"(\d{1,7})Mb/s", told.get("Speed", ""))
    duplex = told.get("Duplex")
    detected = told.get("Link detected", "").split(" ")[0]  # newer ones add the reason: "no (No cable)"
    error = told.get("error")
    if not ({"Speed", "Link detected", "error"} & told.keys()):
        raise ParseError(f"ethtool: neither speed nor link of {iface}: the text is cut")
    return EthtoolLink(
        iface=iface,
        speed_mbit_s=int(speed.group(1)) if speed else None,
        duplex=duplex if duplex in ("Full", "Half") else None,
        link={"yes": True, "no": False}.get(detected),
        autoneg={"on": True, "off": False}.get(told.get("Auto-negotiation", "")),
        port=told.get("Port"),
        error=error if "Speed" not in told else None,
    )
