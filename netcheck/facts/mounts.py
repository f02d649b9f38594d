"""Mounts from /proc/mounts (fstab(5) fields with octal escapes)."""

from __future__ import annotations

import re

from netcheck.facts.question import Question, Reply
from r4090c.errors import ParseError
from r4090c.model import Cluster, Mount, Node

NAME = "mounts"
PROC_MOUNTS = "/proc/mounts"


def question(node: Node, cluster: Cluster) -> Question:
    """Return what to ask `node`."""
    return Question(files=(PROC_MOUNTS,))


def parse(reply: Reply) -> tuple[Mount, ...]:
    """Return every mount in the kernel's order: of two on the same target the later one is seen. Raises ParseError."""
    return parse_proc_mounts(reply.text(PROC_MOUNTS))


def parse_proc_mounts(text: str) -> tuple[Mount, ...]:
    """Return the mounts of the text of /proc/mounts. Raises ParseError on an empty text or a line of too few fields."""
    mounts = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        fields = [unescape(field) for field in line.split(" ")]
        if len(fields) < 4 or not fields[1].startswith("/"):
            raise ParseError(f"{PROC_MOUNTS} line {number}: {line[:80]!r}")
        mounts.append(Mount(source=fields[0], target=fields[1], fstype=fields[2], options=tuple(fields[3].split(","))))
    if not mounts:
        raise ParseError(f"{PROC_MOUNTS} is empty")
    return tuple(mounts)


def unescape(field: str) -> str:
    r"""Return `field` with the kernel's octal escapes decoded: \040 blank, \011 tab, \012 newline, \134 backslash."""
    if "\\" not in field:
        return field
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), field)


def option(mount: Mount, name: str) -> str | None:
    """Return the value of option `name`: "" for a bare one such as `hard`, None when it is not there."""
    for text in mount.options:
        key, _, value = text.partition("=")
        if key == name:
            return value
    return None


def split_source(source: str) -> tuple[str, str]:
    """Return (server, export) of an NFS source "server:/export". An IPv6 server loses its brackets."""
    if source.startswith("["):
        server, _, export = source[1:].partition("]:")
    else:
        server, _, export = source.partition(":")
    return server, export
