"""timedatectl (status): whether systemd takes the clock for synchronised, and its NTP service. Three generations of wording."""

from __future__ import annotations

import re
from dataclasses import dataclass

from netcheck.tools._reading import lines_of
from r4090c.errors import ParseError

TOOL = "timedatectl"
COMMAND = "timedatectl"

SYNCHRONISED = ("System clock synchronized", "NTP synchronized")
SERVICE = ("NTP service", "systemd-timesyncd.service active", "Network time on", "NTP enabled")
"""systemd >= 239, 235-238, and two older ones: the last three say yes or no."""


@dataclass(frozen=True, slots=True)
class TimedatectlStatus:
    """`ntp_service`: active, inactive or n/a; None = not told. A time daemon systemd does not know (chronyd) may show as n/a."""

    synchronised: bool
    ntp_service: str | None
    time_zone: str | None


def parse(text: str) -> TimedatectlStatus:
    """Return the state. Raises ParseError when the text does not tell whether the clock is synchronised."""
    told: dict[str, str] = {}
    for line in lines_of(text):
        if match := re.match(r"\s*([A-Za-z][\w. \-]{1,40}): (\S.{0,80}?)\s*$", line):
            told.setdefault(match.group(1), match.group(2))
    synchronised = next((told[key] for key in SYNCHRONISED if key in told), None)
    if synchronised not in ("yes", "no"):
        raise ParseError("not the output of timedatectl: it does not tell whether the clock is synchronised")
    service = next((told[key] for key in SERVICE if key in told), None)
    zone = told.get("Time zone") or told.get("Timezone")
    return TimedatectlStatus(
        synchronised=synchronised == "yes",
        ntp_service={"yes": "active", "no": "inactive"}.get(service, service) if service else None,
        time_zone=zone.split(" ")[0] if zone else None,
    )
