"""The checks: pure judgements over facts and measurements, one file each, named after its id.

A check module has
    ID, GROUP   its name (API: users and tests hold it) and the group it is counted in
    NEEDS       names of NodeFacts fields, or "reach"; a node where one was not read is `unknown` and not handed to the check
    SCOPE       "node" (default): check(node, <values in NEEDS order>, cluster)
                "cluster":        check(<{node: value} per need>, cluster)
                "measurement":    check(<what was measured>, cluster), NEEDS names the one measurement
    OPTIONAL    like NEEDS, but handed over as None where it was not read
    ABSENT      what a missing tool is worth: `skip` (default), or more where the inventory demands what the tool shows
    applies     applies(node, cluster) -> bool; False: the node yields no finding at all
    unread      unread(node, need, error, facts) -> Finding or None: what an unread fact is worth, where that is more than
                `unknown`; `facts` are those of all nodes
    check       yields Findings

To add one: write the file, add its line below, add a folder of cases under tests/checks/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType

from netcheck.checks import (
    clock_skew,
    data_interface,
    disk_space,
    free_ports,
    gpu_count,
    gpu_driver,
    gpu_faults,
    gpu_uniform,
    host_key,
    limits,
    memory_size,
    mount,
    name_resolution,
    rdma_port,
    remote_shell,
    shared_path,
    shm_size,
    ssh_reach,
    subnet_twice,
    time_daemon,
    version_agreement,
)
from r4090c.model import Cluster, Finding, Node, NodeFacts, Status


def _always(node: Node, cluster: Cluster) -> bool:
    return True


def _unknown(node: Node, need: str, error: str, facts: Mapping[str, NodeFacts]) -> Finding | None:
    return None


@dataclass(frozen=True, slots=True)
class Check:
    """One registered check; the fields are those of its module."""

    id: str
    group: str
    scope: str
    needs: tuple[str, ...]
    optional: tuple[str, ...]
    absent: Status
    applies: Callable[[Node, Cluster], bool]
    unread: Callable[[Node, str, str, Mapping[str, NodeFacts]], Finding | None]
    judge: Callable[..., Iterator[Finding]]


def _registered(module: ModuleType) -> Check:
    return Check(
        id=module.ID,
        group=module.GROUP,
        scope=getattr(module, "SCOPE", "node"),
        needs=module.NEEDS,
        optional=getattr(module, "OPTIONAL", ()),
        absent=getattr(module, "ABSENT", Status.SKIP),
        applies=getattr(module, "applies", _always),
        unread=getattr(module, "unread", _unknown),
        judge=module.check,
    )


REGISTRY: tuple[Check, ...] = tuple(
    _registered(module)
    for module in (
        ssh_reach,
        host_key,
        remote_shell,
        name_resolution,
        clock_skew,
        time_daemon,
        limits,
        shm_size,
        memory_size,
        version_agreement,
        gpu_count,
        gpu_uniform,
        gpu_driver,
        gpu_faults,
        data_interface,
        subnet_twice,
        rdma_port,
        free_ports,
        mount,
        disk_space,
        shared_path,
    )
)
"""All checks, in the order of the report: what must work first comes first."""
