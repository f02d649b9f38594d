"""`lscpu`: CPUs, sockets and NUMA nodes; flat (util-linux before 2.37) or indented."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from netcheck.tools._cpu_list import cpu_list
from netcheck.tools._reading import lines_of
from r4090c.errors import ParseError

TOOL = "lscpu"
COMMAND = "LC_ALL=C lscpu"


@dataclass(frozen=True, slots=True)
class Lscpu:
    """None = not told. `offline` CPUs must never be in an affinity mask. `numa`: node -> its online CPUs."""

    cpus: int
    online: tuple[int, ...]
    offline: tuple[int, ...]
    model: str
    sockets: int | None
    cores_per_socket: int | None
    threads_per_core: int | None
    numa: Mapping[int, tuple[int, ...]]
    nodes_per_socket: int | None
    """NPS of an EPYC, SNC of a Xeon."""


def parse(text: str) -> Lscpu:
    """Return what lscpu says. Raises ParseError when its counts and lists do not fit each other: something is missing or cut."""
    values: dict[str, str] = {}
    lines = lines_of(text)
    if not re.match(r"\s*NUMA node\d", lines[-1]):  # without a newline a count may be cut; these lists are checked below
        del lines[-1]
    for line in lines:
        key, colon, value = line.partition(":")
        if colon and values.setdefault(" ".join(key.split()), value.strip()) != value.strip() and key.strip() in _KEYS:
            raise ParseError(f"{key.strip()!r} twice: more than one output?")
    cpus = _count(values, "CPU(s)")
    if cpus is None or "On-line CPU(s) list" not in values:
        raise ParseError("no CPUs in it: lscpu in another language, or not lscpu")
    online = cpu_list(values["On-line CPU(s) list"])
    offline = cpu_list(values.get("Off-line CPU(s) list", ""))
    if not online or len(online) + len(offline) != cpus or set(online) & set(offline):
        raise ParseError(f"{cpus} CPUs, but {len(online)} online and {len(offline)} offline are listed")
    numa = {
        int(match.group(1)): cpu_list(value)
        for key, value in values.items()
        if (match := re.fullmatch(r"NUMA node([0-9]{1,4}) CPU\(s\)", key))
    }
    nodes = _count(values, "NUMA node(s)")
    listed = sorted(cpu for node in numa.values() for cpu in node)
    if len(numa) != (nodes or 0) or (numa and listed != list(online)):
        raise ParseError(f"{nodes or 0} NUMA nodes, but {len(numa)} with {len(listed)} of {len(online)} CPUs are listed")
    sockets = _count(values, "Socket(s)")
    return Lscpu(
        cpus=cpus,
        online=online,
        offline=offline,
        model=values.get("Model name", "unknown"),
        sockets=sockets,
        cores_per_socket=_count(values, "Core(s) per socket"),
        threads_per_core=_count(values, "Thread(s) per core"),
        numa=dict(sorted(numa.items())),
        nodes_per_socket=nodes // sockets if nodes and sockets and nodes % sockets == 0 else None,
    )


_KEYS = frozenset(("CPU(s)", "On-line CPU(s) list", "Off-line CPU(s) list", "Socket(s)", "NUMA node(s)"))


def _count(values: Mapping[str, str], key: str) -> int | None:
    """Return a count; None when it is not told, as the sockets of some Arm machines ("-")."""
    value = values.get(key, "")
    return int(value) if re.fullmatch(r"[0-9]{1,5}", value) else None
