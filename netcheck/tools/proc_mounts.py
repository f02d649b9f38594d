"""/proc/mounts as a file someone sends. The reading is that of the fact `mounts`."""

from __future__ import annotations

from netcheck.facts.mounts import parse_proc_mounts
from r4090c.model import Mount

TOOL = "proc-mounts"
COMMAND = "cat /proc/mounts"


def parse(text: str) -> tuple[Mount, ...]:
    """Return the mounts, octal escapes decoded. Raises ParseError on an empty text or a line of too few fields."""
    return parse_proc_mounts(text)
