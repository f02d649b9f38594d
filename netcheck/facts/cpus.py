"""CPUs, cores and NUMA nodes from sysfs; what this account may use from its affinity."""

from __future__ import annotations

import re
from collections.abc import Iterable

from netcheck.facts.question import Question, Reply, as_int, as_list
from r4090c.errors import ParseError
from r4090c.model import Cluster, CpuFact, Node, NumaNode

NAME = "cpus"
CPU = "/sys/devices/system/cpu"
NUMA = "/sys/devices/system/node"
CPUINFO = "/proc/cpuinfo"
MAX_CPU = 65_535
"""No Linux is built for more (NR_CPUS <= 8192); keeps a damaged list from filling the memory."""


def question(node: Node, cluster: Cluster) -> Question:
    """Return what to ask `node`. Only the head of cpuinfo: the whole of it disturbs every CPU of a large machine."""
    return Question(
        files=(
            f"{CPU}/present",
            f"{CPU}/online",
            f"{CPU}/cpu*/topology/thread_siblings_list",
            f"{CPU}/cpu*/topology/physical_package_id",
            f"{CPU}/cpufreq/policy*/scaling_governor",
            f"{NUMA}/node*/cpulist",
            f"{NUMA}/node*/meminfo",
        ),
        natives={"affinity": {}, "head": {CPUINFO: 4096}},
    )


def parse(reply: Reply) -> CpuFact:
    """Return the CpuFact; offline CPUs are in `present` only. `numa` is empty when the kernel knows of no nodes.

    A CPU whose siblings are not told is a core of its own. `governor` joins several with commas.
    """
    online = parse_cpu_list(reply.text(f"{CPU}/online"))
    if not online:
        raise ParseError("no CPU is online")
    present_text = reply.line(f"{CPU}/present")
    cores: dict[int, tuple[int, ...]] = {}
    packages = set()
    for cpu in online:
        siblings = reply.line(f"{CPU}/cpu{cpu}/topology/thread_siblings_list")
        core = tuple(sibling for sibling in parse_cpu_list(siblings or "") if sibling in set(online)) or (cpu,)
        cores.setdefault(core[0], core)
        package = reply.line(f"{CPU}/cpu{cpu}/topology/physical_package_id")
        if package is not None:
            packages.add(as_int(package, "physical_package_id"))
    governors = sorted({text.strip() for path, text in reply.files.items() if path.endswith("/scaling_governor")})
    return CpuFact(
        model=_model(reply),
        present=parse_cpu_list(present_text) if present_text else online,
        online=online,
        allowed=tuple(sorted(as_int(cpu, "affinity") for cpu in as_list(reply.native("affinity"), "affinity"))),
        cores=tuple(cores[first] for first in sorted(cores)),
        sockets=max(1, len(packages)),
        numa=_numa(reply),
        governor=",".join(governors) or None,
    )


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers the way the kernel writes them: 0-3,8."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Return the CPUs of a kernel list like "0-3,8,10-11" (cpuset(7)), ascending; empty text = none. Raises ParseError."""
    cpus: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.strip().split(","))):
        first, dash, last = part.partition("-")
        low = as_int(first, "CPU list")
        high = as_int(last, "CPU list") if dash else low
        if not 0 <= low <= high <= MAX_CPU:
            raise ParseError(f"CPU list: {part!r}")
        cpus.update(range(low, high + 1))
    return tuple(sorted(cpus))


def _model(reply: Reply) -> str:
    """Return the model name; cpuinfo of Arm has none, then "unknown"."""
    heads = reply.natives.get("head")
    head = heads.get(CPUINFO) if isinstance(heads, dict) else None
    match = re.search(r"^model name\s*:[ \t]*(.+)$", head, re.MULTILINE) if isinstance(head, str) else None
    return " ".join(match.group(1).split()) if match else "unknown"


def _numa(reply: Reply) -> tuple[NumaNode, ...]:
    nodes = {}
    for path, text in reply.files.items():
        match = re.fullmatch(rf"{NUMA}/node(\d{{1,5}})/cpulist", path)
        if match:
            index = int(match.group(1))
            total = re.search(r"MemTotal:\s*(\d{1,18}) kB", reply.text(f"{NUMA}/node{match.group(1)}/meminfo"))
            if not total:
                raise ParseError(f"node{index}/meminfo has no MemTotal")
            nodes[index] = NumaNode(index=index, cpus=parse_cpu_list(text), memory_mib=int(total.group(1)) // 1024)
    return tuple(nodes[index] for index in sorted(nodes))
