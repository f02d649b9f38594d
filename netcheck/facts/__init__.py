"""Facts: what is true on a node. One module each: NAME, `question(node, cluster)`, and a pure `parse(reply)`.

Adding a fact: one file here, one line in FACTS, one field of the same name in r4090c.model.NodeFacts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from netcheck.facts import (
    blocked,
    caches,
    clock,
    cpus,
    disks,
    edac,
    gpu_detail,
    gpu_p2p,
    gpu_processes,
    gpu_topology,
    gpus,
    kernel,
    kernel_log,
    limits,
    memory,
    mounts,
    net,
    os,
    pci,
    python,
    qos,
    rdma,
    rdma_mtu,
    shm_files,
    toolchain,
    tools,
    user,
)
from netcheck.facts.question import NOT_INSTALLED, Question, Reply, reply_of
from r4090c.errors import ParseError
from r4090c.model import Cluster, Fact, Node


class FactModule(Protocol):
    """What every module of this package offers."""

    NAME: str

    def question(self, node: Node, cluster: Cluster) -> Question:
        """Return what to ask `node`."""
        ...

    def parse(self, reply: Reply) -> object:
        """Return the value. Raises ParseError, and nothing else, whatever the reply holds."""
        ...


_MODULES: tuple[FactModule, ...] = (
    os,
    user,
    cpus,
    memory,
    limits,
    net,
    mounts,
    disks,
    clock,
    python,
    rdma,
    gpus,
    kernel,
    shm_files,
    blocked,
    edac,
    caches,
    toolchain,
    tools,
    qos,
    rdma_mtu,
    pci,
    gpu_topology,
    gpu_p2p,
    gpu_detail,
    gpu_processes,
    kernel_log,
)
FACTS: Mapping[str, FactModule] = {module.NAME: module for module in _MODULES}
"""Name of the fact (its field in NodeFacts) -> its module."""


def questions(node: Node, cluster: Cluster) -> dict[str, Question]:
    """Return what to ask `node`, by fact."""
    return {name: module.question(node, cluster) for name, module in FACTS.items()}


def observe(name: str, result: object, node: Node, cluster: Cluster) -> Fact[object]:
    """Return fact `name` from one node's probe result: its value, the tool that is not installed, or why it is not known."""
    module = FACTS[name]
    try:
        reply = reply_of(result, name)
        command = module.question(node, cluster).command
        if command and reply.command is not None and reply.command.error == NOT_INSTALLED:
            return Fact(absent=command[0])
        return Fact(value=module.parse(reply))
    except ParseError as error:
        return Fact(error=str(error))
