"""The checks: pure judgements over facts and measurements, one file each, named after its id.

A check module has
    ID, GROUP   its name (API: users and tests hold it) and the group it is counted in
    RULE        one line: what is expected; {field} stands for a threshold of Expect
    SOURCE      where the rule comes from
    NEEDS       names of NodeFacts fields, or "reach"; a node where one was not read is `unknown` and not handed to the check
    SCOPE       "node" (default): check(node, <values in NEEDS order>, cluster)
                "cluster":        check(<{node: value} per need>, cluster)
                "measurement":    check(<what was measured>, <{node: value} per OPTIONAL>, cluster), NEEDS names the one
                                  measurement; of several, check({name: what was measured, as far as it was}, …). A finding
                                  about a link has the subject "node01->node02" (sender, receiver)
    OPTIONAL    like NEEDS, but handed over as None where it was not read; "measurements": all that was measured
    ASKED       True: only on request (`--only` names the check or its group)
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
    aer,
    caches,
    clock_skew,
    compiler,
    cpu_settings,
    cpu_topology,
    data_interface,
    disk_space,
    drift,
    free_ports,
    gpu_bar1,
    gpu_compute,
    gpu_copy,
    gpu_count,
    gpu_driver,
    gpu_faults,
    gpu_heat,
    gpu_load_errors,
    gpu_p2p_grant,
    gpu_pcie_load,
    gpu_pcie_width,
    gpu_persistence,
    gpu_power_limit,
    gpu_processes,
    gpu_throttle,
    gpu_throttle_load,
    gpu_topology,
    gpu_uniform,
    gpu_xid,
    host_key,
    limits,
    loss_counters,
    memory_errors,
    memory_free,
    memory_size,
    mount,
    name_resolution,
    nccl_all,
    nccl_inter,
    nccl_intra,
    nccl_transport,
    nic_link,
    nic_pcie_link,
    p2p_truth,
    path_mtu,
    pcie_settings,
    power,
    rdma_bandwidth,
    rdma_firmware,
    rdma_latency,
    rdma_mtu,
    rdma_port,
    remote_shell,
    remove_ipc,
    roce_qos,
    shared_path,
    shm_size,
    shm_stale,
    ssh_mesh,
    ssh_reach,
    storage_answers,
    storage_throughput,
    subnet_twice,
    tcp_bandwidth,
    time_daemon,
    version_agreement,
)
from netcheck.measure import MEASUREMENTS
from netcheck.measure.job import Level
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
    what: str = ""
    rule: str = ""
    source: str = ""
    asked: bool = False

    @property
    def level(self) -> Level:
        """The lowest level of a preflight at which the check can tell."""
        return MEASUREMENTS[self.needs[0]].LEVEL if self.scope == "measurement" else Level.QUICK


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
        what=(module.__doc__ or "").partition("\n")[0].removesuffix("."),
        rule=getattr(module, "RULE", ""),
        source=getattr(module, "SOURCE", ""),
        asked=getattr(module, "ASKED", False),
    )


REGISTRY: tuple[Check, ...] = tuple(
    _registered(module)
    for module in (
        ssh_reach,
        host_key,
        remote_shell,
        name_resolution,
        ssh_mesh,
        clock_skew,
        time_daemon,
        limits,
        shm_size,
        shm_stale,
        cpu_settings,
        remove_ipc,
        cpu_topology,
        memory_size,
        memory_free,
        memory_errors,
        version_agreement,
        compiler,
        drift,
        gpu_count,
        gpu_uniform,
        gpu_driver,
        gpu_faults,
        gpu_xid,
        gpu_processes,
        gpu_throttle,
        gpu_throttle_load,
        gpu_heat,
        gpu_load_errors,
        gpu_persistence,
        gpu_power_limit,
        gpu_pcie_width,
        gpu_pcie_load,
        nic_pcie_link,
        aer,
        pcie_settings,
        gpu_p2p_grant,
        p2p_truth,
        gpu_bar1,
        gpu_topology,
        data_interface,
        subnet_twice,
        nic_link,
        rdma_port,
        rdma_mtu,
        rdma_firmware,
        roce_qos,
        free_ports,
        path_mtu,
        tcp_bandwidth,
        rdma_bandwidth,
        rdma_latency,
        loss_counters,
        gpu_copy,
        mount,
        storage_answers,
        disk_space,
        shared_path,
        storage_throughput,
        caches,
        nccl_intra,
        nccl_inter,
        nccl_all,
        nccl_transport,
        gpu_compute,
        power,
    )
)
"""All checks, in the order of the report: what must work first comes first."""
