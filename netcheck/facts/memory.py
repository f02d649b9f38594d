"""Host memory from meminfo and the size of /dev/shm."""

from __future__ import annotations

import re

from netcheck.facts.question import Question, Reply, as_int, as_mapping
from r4090c.errors import ParseError
from r4090c.model import Cluster, MemoryFact, Node

NAME = "memory"
MEMINFO = "/proc/meminfo"
SHM = "/dev/shm"
MIB = 1 << 20


def question(node: Node, cluster: Cluster) -> Question:
    """Return what to ask `node`."""
    return Question(files=(MEMINFO,), natives={"statvfs": [SHM]})


def parse(reply: Reply) -> MemoryFact:
    """Return the MemoryFact; the sizes of /dev/shm are None when it is not mounted. Raises ParseError on a strange meminfo."""
    text = reply.text(MEMINFO)
    kib: dict[str, int] = {}
    for line in text.splitlines():
        match = re.fullmatch(r"(\w+):\s+(\d{1,18}) kB", line.strip())
        if match:
            kib[match.group(1)] = int(match.group(2))
    for key in ("MemTotal", "MemAvailable"):
        if key not in kib:
            raise ParseError(f"{MEMINFO} has no {key}")
    shm = as_mapping(reply.native("statvfs"), "statvfs").get(SHM)
    sizes = None if shm is None else as_mapping(shm, SHM)
    return MemoryFact(
        total_mib=kib["MemTotal"] // 1024,
        available_mib=kib["MemAvailable"] // 1024,
        swap_mib=kib.get("SwapTotal", 0) // 1024,
        shm_total_mib=None if sizes is None else as_int(sizes.get("total_bytes"), SHM) // MIB,
        shm_free_mib=None if sizes is None else as_int(sizes.get("free_bytes"), SHM) // MIB,
    )
