"""A CPU list out of a tool's output.

Not the one of netcheck.facts.cpus, which reads what a kernel wrote: a pasted or forged list may ask for a billion CPUs, or for
the same thousand a million times. (And facts import tools: what tools share must not import facts.)
"""

from __future__ import annotations

import re

from r4090c.errors import ParseError

MAX_CPUS = 8192
"""The most an x86 Linux can be built for (NR_CPUS, arch/x86/Kconfig)."""
_SPAN = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


def cpu_list(text: str) -> tuple[int, ...]:
    """Return the CPUs of "0-3,8", ascending; empty text = none. Raises ParseError, also for more than MAX_CPUS."""
    cpus: set[int] = set()
    listed = 0
    for part in text.split(",") if text.strip() else ():
        span = _SPAN.fullmatch(part.strip())
        first, last = (int(span.group(1)), int(span.group(2) or span.group(1))) if span else (1, 0)
        listed += last - first + 1
        if last < first or listed > MAX_CPUS:
            raise ParseError(f"not a list of CPUs: {text[:80]!r}")
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))
