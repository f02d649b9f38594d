"""chronyc tracking: how far the clock is off. "Leap status: Normal" says only that chrony runs: a clock can be seconds behind."""

from __future__ import annotations

import re
from dataclasses import dataclass

from netcheck.tools._reading import lines_of, number, whole
from r4090c.errors import ParseError

TOOL = "chronyc"
COMMAND = "chronyc tracking"

LINE = re.compile(r"\s*([A-Z][A-Za-z ()]{1,30}?)\s*:\s*(\S.{0,120}?)\s*$")
REPLY = re.compile(r"\s*(50\d .{1,120}?)\s*$")
"""chronyd's own errors: "506 Cannot talk to daemon"."""


@dataclass(frozen=True, slots=True)
class ChronyTracking:
    """The clock as chrony sees it. `offset_s`: clock minus true time, positive when it is fast. None = not told."""

    synchronised: bool
    offset_s: float | None
    last_offset_s: float | None
    rms_offset_s: float | None
    stratum: int | None
    reference: str | None
    leap: str | None
    error: str | None = None


def parse(text: str) -> ChronyTracking:
    """Return what chrony tells; its own error is a value. Raises ParseError when the text is not chronyc's, or has no offset."""
    told: dict[str, str] = {}
    for line in lines_of(text):
        if match := REPLY.match(line):
            return ChronyTracking(False, None, None, None, None, None, None, match.group(1))
        if match := LINE.match(line):
            told.setdefault(match.group(1), match.group(2))
    system = re.match(r"(\d{1,12}\.\d{1,12}) seconds (fast|slow) of NTP time", told.get("System time", ""))
    leap = told.get("Leap status")
    if system is None or leap is None:
        raise ParseError("not the whole output of `chronyc tracking`: no system time or no leap status")
    offset = number(system.group(1))
    reference = told.get("Reference ID", "")
    return ChronyTracking(
        synchronised=leap != "Not synchronised" and not reference.startswith("00000000"),
        offset_s=offset if offset is None or system.group(2) == "fast" else -offset,
        last_offset_s=number(told.get("Last offset", "").split(" ")[0]),
        rms_offset_s=number(told.get("RMS offset", "").split(" ")[0]),
        stratum=whole(told.get("Stratum")),
        reference=reference or None,
        leap=leap,
    )
