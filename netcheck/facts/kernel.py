"""How the kernel was started and set (clock source, NUMA balancing, ASPM, IOMMU, SMT), and what logind does to shared memory."""

from __future__ import annotations

import re

from netcheck.facts.question import Question, Reply, as_int, as_list, as_mapping, as_str
from r4090c.model import Cluster, KernelFact, Node

NAME = "kernel"
CMDLINE = "/proc/cmdline"
CLOCKSOURCE = "/sys/devices/system/clocksource/clocksource0"
NUMA_BALANCING = "/proc/sys/kernel/numa_balancing"
ASPM_POLICY = "/sys/module/pcie_aspm/parameters/policy"
SMT = "/sys/devices/system/cpu/smt/control"
IOMMU_GROUPS = "/sys/kernel/iommu_groups"
LINGER = "/var/lib/systemd/linger"
LOGIND_RUNS = "/run/systemd/seats"
"""Of logind's RuntimeDirectory=: there while it runs."""
CONTAINER = "/run/systemd/container"
"""Written by the systemd of a container (systemd.io, CONTAINER_INTERFACE): what kind it runs in."""
LOGIND_MAIN = ("/etc/systemd/logind.conf", "/run/systemd/logind.conf", "/usr/lib/systemd/logind.conf")
"""logind.conf(5): the first that is there counts."""
LOGIND_DROP_INS = ("/etc/systemd/logind.conf.d", "/run/systemd/logind.conf.d", "/usr/lib/systemd/logind.conf.d")
"""logind.conf(5): read after the main file, by name; of two with one name the one in the first folder counts."""
YES, NO = frozenset(("1", "yes", "y", "true", "t", "on")), frozenset(("0", "no", "n", "false", "f", "off"))
"""systemd.syntax(7), booleans."""


def question(node: Node, cluster: Cluster) -> Question:
    """Return what to ask `node`."""
    files = (
        CMDLINE,
        f"{CLOCKSOURCE}/current_clocksource",
        f"{CLOCKSOURCE}/available_clocksource",
        NUMA_BALANCING,
        ASPM_POLICY,
        SMT,
        CONTAINER,
        *LOGIND_MAIN,
        *(f"{folder}/*.conf" for folder in LOGIND_DROP_INS),
    )
    return Question(files=files, natives={"access": [LOGIND_RUNS], "listdir": [IOMMU_GROUPS, LINGER]}, timeout_s=5)


def parse(reply: Reply) -> KernelFact:
    """Return the KernelFact. Raises ParseError without a command line; what a kernel does not have is None."""
    balancing = reply.line(NUMA_BALANCING)
    policy = reply.line(ASPM_POLICY)
    chosen = re.search(r"\[([a-z]+)\]", policy or "")
    folders = as_mapping(reply.natives.get("listdir", {}), "listdir")
    groups, lingering = folders.get(IOMMU_GROUPS), folders.get(LINGER, [])
    seats = as_mapping(reply.native("access"), "access").get(LOGIND_RUNS)
    return KernelFact(
        cmdline=reply.text(CMDLINE).strip(),
        clocksource=reply.line(f"{CLOCKSOURCE}/current_clocksource") or None,
        clocksources=tuple((reply.line(f"{CLOCKSOURCE}/available_clocksource") or "").split()),
        numa_balancing=None if balancing is None else as_int(balancing, NUMA_BALANCING),
        aspm_policy=chosen.group(1) if chosen else None,
        iommu_groups=None if groups is None else len(as_list(groups, IOMMU_GROUPS)),
        smt=reply.line(SMT) or None,
        logind=seats is not None,
        remove_ipc=_remove_ipc(reply),
        lingering=tuple(as_str(name, LINGER) for name in as_list(lingering, LINGER)) if "listdir" in reply.natives else None,
        container=reply.line(CONTAINER) or None,
    )


def _remove_ipc(reply: Reply) -> bool | None:
    """Return RemoveIPC as the files of logind.conf(5) state it together, None where none does."""
    drop_ins: dict[str, str] = {}
    for folder in reversed(LOGIND_DROP_INS):
        for path, text in reply.files.items():
            if path.rpartition("/")[0] == folder:
                drop_ins[path.rpartition("/")[2]] = text
    main = next((reply.files[path] for path in LOGIND_MAIN if path in reply.files), "")
    stated = None
    for text in (main, *(drop_ins[name] for name in sorted(drop_ins))):
        section = ""
        for line in text.splitlines():
            line = line.strip()
            if line.startswith("[") and line.endswith("]"):
                section = line[1:-1]
            key, equals, value = line.partition("=")
            if section == "Login" and equals and key.strip() == "RemoveIPC":
                word = value.strip().lower()
                stated = True if word in YES else False if word in NO else stated
    return stated
