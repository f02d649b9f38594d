"""findmnt -J: mounts as JSON, as a list or as a tree. What a mount is and means: netcheck.facts.mounts."""

from __future__ import annotations

from collections.abc import Iterator

from netcheck.tools._reading import document
from r4090c.errors import ParseError
from r4090c.model import Mount

TOOL = "findmnt"
COMMAND = "findmnt -J -t nfs,nfs4"


def parse(text: str) -> tuple[Mount, ...]:
    """Return the mounts in the order of the text, parents before what is below them.

    Raises ParseError when there is none (findmnt prints nothing then), and for a mount without target, type or options.
    """
    if not text.strip():
        raise ParseError("findmnt: no output: nothing is mounted that fits")
    whole = document(text)
    mounts = tuple(_mounts(whole.get("filesystems") if isinstance(whole, dict) else None))
    if not mounts:
        raise ParseError("findmnt: no file system listed")
    return mounts


def _mounts(items: object) -> Iterator[Mount]:
    """Yield the mounts of a list and of all lists below it; without recursion, as deep as a forged text may be."""
    waiting = [items]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += reversed(one)
            continue
        if not isinstance(one, dict):
            raise ParseError("findmnt: not the JSON of findmnt -J")
        source, target, fstype, options = (one.get(key) for key in ("source", "target", "fstype", "options"))
        if not (isinstance(target, str) and isinstance(fstype, str) and isinstance(options, str)):
            raise ParseError("findmnt: a mount without target, fstype or options")
        yield Mount(source if isinstance(source, str) else "", target, fstype, tuple(options.split(",")))
        if one.get("children"):
            waiting.append(one["children"])
