"""Whether all CPUs and their memory are in use, and the nodes are built alike: sockets, cores, NUMA nodes per socket (NPS).

CPUs that are off because SMT is (smt/control) were meant to be, and so are those that a container was not given (lxcfs shows it
only its own as online). Nodes with `gpus: 0` are not compared with others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from netcheck.checks._machine import in_container
from netcheck.checks._majority import majority, others
from netcheck.checks._wording import as_root, listed, on
from netcheck.facts.cpus import ranges
from r4090c.model import Cluster, CpuFact, Finding, KernelFact, Node, Status

ID, GROUP, SCOPE, NEEDS = "cpu-topology", "cpu", "cluster", ("cpus", "kernel")
RULE = "no CPU offline, no CPUs without memory of their own, the same CPUs and NUMA nodes per socket as on most nodes (all warn)"
SOURCE = "cputopology and numaperf of the Linux kernel's documentation; nccl-tests issue 74"

SMT_OFF = ("off", "forceoff")


def check(cpus: Mapping[str, CpuFact], kernels: Mapping[str, KernelFact], cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding per fault of a node, else one pass that tells its topology."""
    off = {name: list(_off(cluster.node(name), fact, kernels[name])) for name, fact in cpus.items()}
    built: dict[int, dict[str, str]] = {}
    for name, fact in cpus.items():
        if not off[name]:  # what is built in can be counted only where all of it is on
            built.setdefault(cluster.node(name).gpus, {})[name] = told(fact)
    for name, fact in cpus.items():
        node = cluster.node(name)
        faults = [*off[name], *_without_memory(node, fact)]
        alike = built.get(node.gpus, {})
        agreed = majority(alike)
        if node.gpus and name in agreed.odd:
            right = f"{agreed.value}, as on most nodes" if agreed.value else f"one kind; {others(alike, name)} (no majority)"
            why = "the slowest node sets the pace, and a plan that fits one does not fit the other; NPS is set in the firmware"
            faults.append(Finding(ID, name, Status.WARN, told(fact), right, why, on(node, "lscpu")))
        yield from faults or [Finding(ID, name, Status.PASS, told(fact), "all CPUs online, as on the other nodes")]


def told(fact: CpuFact) -> str:
    """Return what a node is built of, e.g. "2 × AMD EPYC 7542, 64 cores, 128 CPUs, NPS4"."""
    nodes = sum(1 for numa in fact.numa if numa.cpus)
    per_socket = f"NPS{nodes // fact.sockets}" if nodes and nodes % fact.sockets == 0 else f"{nodes or 'no'} NUMA nodes"
    return f"{fact.sockets} × {fact.model}, {len(fact.cores)} cores, {len(fact.online)} CPUs, {per_socket}"


def _off(node: Node, fact: CpuFact, kernel: KernelFact) -> Iterator[Finding]:
    off = sorted(set(fact.present) - set(fact.online))
    if off and kernel.smt not in SMT_OFF and not in_container(kernel):
        why = "they were switched off by hand, by maxcpus= on the kernel's command line, or after an error; ranks cannot use them"
        remedy = as_root(node, f"chcpu -e {ranges(off)}")
        yield Finding(ID, node.name, Status.WARN, f"CPUs {ranges(off)} are offline", "all CPUs online", why, remedy)


def _without_memory(node: Node, fact: CpuFact) -> Iterator[Finding]:
    bare = [numa for numa in fact.numa if numa.cpus and numa.memory_mib == 0]
    if bare:
        observed = listed(f"NUMA node {numa.index} has {len(numa.cpus)} CPUs and no memory" for numa in bare)
        why = "its memory modules are missing or switched off: every access of these CPUs crosses to another node"
        remedy = as_root(node, 'dmidecode -t memory | grep -E "Locator|Size"')
        yield Finding(ID, node.name, Status.WARN, observed, "memory at every NUMA node that has CPUs", why, remedy)
