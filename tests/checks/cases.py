"""Build what `judge` takes from a JSON case.

A case is {"about", "nodes": how many (default 3), "cluster", "reach", "facts", "measurements", "findings"}. Everything but the
findings is merged over a healthy cluster (healthy.json; {n} is the node's number): objects are merged key by key, anything else
is replaced, and a fact {"error": …} or {"absent": …} takes the place of its value. `facts` is by node; "*" means every node.
With a "lock" the cluster was locked when it was healthy; what stands there is merged over that lock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from netcheck import lock as locks
from netcheck.checks import REGISTRY
from netcheck.judge import judge
from netcheck.raw import Raw
from r4090c import model
from r4090c.model import Cluster, Expect, Fact, Network, Node, NodeFacts, Paths, Ssh, Storage

HERE = Path(__file__).parent
TYPES: Mapping[str, Any] = {
    "os": model.OsFact,
    "user": model.UserFact,
    "cpus": model.CpuFact,
    "memory": model.MemoryFact,
    "limits": model.LimitsFact,
    "net": model.NetFact,
    "mounts": tuple[model.Mount, ...],
    "disks": tuple[model.DiskFact, ...],
    "clock": model.ClockFact,
    "python": model.PythonFact,
    "rdma": tuple[model.RdmaPort, ...],
    "gpus": tuple[model.Gpu, ...],
    "kernel": model.KernelFact,
    "shm_files": tuple[model.ShmFile, ...],
    "blocked": tuple[model.BlockedProcess, ...],
    "edac": tuple[model.MemoryController, ...],
    "caches": tuple[model.CacheFolder, ...],
    "toolchain": model.ToolchainFact,
    "tools": dict[str, model.Tool],
    "qos": tuple[model.IfaceQos, ...],
    "rdma_mtu": tuple[model.RdmaMtu, ...],
    "pci": tuple[model.PciDevice, ...],
    "gpu_topology": model.TopologyMatrix,
    "gpu_p2p": model.P2pMatrix,
    "gpu_detail": tuple[model.GpuDetail, ...],
    "gpu_processes": tuple[model.GpuProcess, ...],
    "kernel_log": model.KernelLog,
}
READERS = {name: TypeAdapter(kind) for name, kind in TYPES.items()}


def merged(base: Any, change: Any) -> Any:
    """Return `change` over `base`: objects key by key, anything else replaced; {"=": value} replaces an object as well."""
    if isinstance(change, dict) and set(change) == {"="}:
        return change["="]
    if isinstance(base, dict) and isinstance(change, dict):
        return {**base, **{key: merged(base.get(key), value) for key, value in change.items()}}
    return change


@cache
def healthy(number: int) -> dict[str, Any]:
    """Return reach and facts of the healthy node `number`."""
    text = (HERE / "healthy.json").read_text().replace("{n}", str(number))
    node: dict[str, Any] = json.loads(text)
    return node


def build_cluster(case: Mapping[str, Any]) -> Cluster:
    """Return the cluster of a case; case["cluster"] = {"nodes": {name: fields}, "network", "storage", "expect"}."""
    change = case.get("cluster", {})
    nodes = []
    for number in range(1, int(case.get("nodes", 3)) + 1):
        name = f"node0{number}"
        own = change.get("nodes", {}).get(name, {}) | change.get("nodes", {}).get("*", {})
        ssh = Ssh(**{"address": f"192.168.1.1{number}", "user": "train", **own.get("ssh", {})})
        paths = Paths(
            **{
                "shared": "/mnt/shared",
                "runs": "/mnt/shared/r4090c/runs",
                "python": "/opt/train/bin/python",
                **own.get("paths", {}),
            }
        )
        nodes.append(
            Node(
                name=name,
                ssh=ssh,
                data_address=own.get("data_address", f"10.10.0.1{number}"),
                gpus=own.get("gpus", 2),
                paths=paths,
                env=own.get("env", {}),
            )
        )
    network = Network(**{"kind": "roce", "subnet": "10.10.0.0/24", "rate_gbit_s": 100, "mtu": 9000, **change.get("network", {})})
    storage = Storage(**{"kind": "nfs4", "source": "nas:/export/shared", "mount": "/mnt/shared", **change.get("storage", {})})
    expect: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in change.get("expect", {}).items()
    }
    return Cluster(
        name="atelier",
        nodes=tuple(nodes),
        network=network,
        storage=storage,
        expect=replace(Expect(), **expect),
        expect_origin=dict.fromkeys(expect, "cluster.yaml"),
    )


def build(case: Mapping[str, Any]) -> tuple[Cluster, Raw, dict[str, NodeFacts]]:
    """Return (cluster, raw, facts) of a case."""
    cluster = build_cluster(case)
    reach, facts = {}, {}
    for number, node in enumerate(cluster.nodes, start=1):
        base = healthy(number)
        reach[node.name] = merged(base["reach"], case.get("reach", {}).get(node.name, {}))
        values: dict[str, Any] = {}
        for change in (case.get("facts", {}).get("*", {}), case.get("facts", {}).get(node.name, {})):
            values |= {name: merged(values.get(name, base["facts"][name]), value) for name, value in change.items()}
        changed = {name: _fact(name, value) for name, value in values.items()}
        facts[node.name] = replace(_healthy_facts(number), node=node.name, **changed)
    raw = Raw(started_at="2026-11-30T01:00:00+00:00", reach=reach, answers={}, measurements=case.get("measurements", {}))
    if "lock" in case:
        _, _, sound = build({key: value for key, value in case.items() if key in ("nodes", "cluster")})
        cluster = replace(cluster, lock=merged(locks.make(cluster, "full", sound, ()), case["lock"]))
    return cluster, raw, facts


@cache
def _healthy_facts(number: int) -> NodeFacts:
    """Return the facts of `healthy`, read once: most cases change one of them."""
    values = healthy(number)["facts"]
    assert set(TYPES) == set(values) == {field.name for field in fields(NodeFacts)} - {"node"}
    return NodeFacts(node=f"node0{number}", **{name: _fact(name, value) for name, value in values.items()})


def _fact(name: str, value: Any) -> Fact[Any]:
    if isinstance(value, dict) and "error" in value:
        return Fact(error=value["error"])
    if isinstance(value, dict) and "absent" in value:
        return Fact(absent=value["absent"])
    return Fact(value=READERS[name].validate_python(value))


def found(case: Mapping[str, Any], check_id: str) -> list[dict[str, str]]:
    """Return the findings of one check about a case, as JSON."""
    cluster, raw, facts = build(case)
    checks = [check for check in REGISTRY if check.id == check_id]
    findings = judge(cluster, raw, facts, checks)
    return [{**asdict(finding), "status": finding.status.value} for finding in findings]
