"""Whether P2P between GPUs delivers what the driver grants: right values, and faster than through host memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from netcheck.checks._gpu import p2p_demanded
from netcheck.checks._wording import as_root, origin
from netcheck.measure.p2p import read
from netcheck.p2p import judge_arms
from r4090c.model import Cluster, Finding, Node, P2pMatrix, Status

ID, GROUP, SCOPE, NEEDS, OPTIONAL = "p2p-truth", "gpu", "measurement", ("p2p",), ("gpu_p2p",)
RULE = (
    "where P2P is granted: all_reduce with it has right values (warn), and is {p2p_faster_min:g} times as fast, or it stays off"
)
SOURCE = "NVIDIA/nccl-tests issue 117; NVIDIA/nccl issues 631, 1438; tinygrad/open-gpu-kernel-modules issue 17; est."


def applies(node: Node, cluster: Cluster) -> bool:
    """A single GPU has no peer."""
    return node.gpus > 1


def check(measured: Any, grants: Mapping[str, P2pMatrix | None], cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding per node. Raises ParseError."""
    arms = {one.node: one for one in read(measured)}
    expected = f"right values, {cluster.expect.p2p_faster_min:g} times as fast{origin(cluster, 'p2p_faster_min')}"
    for name, grant in grants.items():
        node = cluster.node(name)
        if name not in arms:
            yield _not_run(node, grant, expected)
            continue
        proven, told = judge_arms(arms[name], cluster.expect)
        demanded = p2p_demanded(node, cluster)
        lost = next((run for run in (*arms[name].off, *arms[name].on) if run.lost), None)
        if proven is None:
            remedy = lost.next_commands[name] if lost is not None else f"r4090c preflight --only {ID} --nodes {name}"
            yield Finding(ID, name, Status.UNKNOWN, told, expected, "", remedy)
        elif proven:
            yield Finding(ID, name, Status.PASS, f"proven, launch uses it: {told}", expected)
        elif any(not run.passed for run in arms[name].on):
            why = "the driver grants P2P that does not work; launch leaves it off" + (
                f", but {demanded} turns it on" if demanded else ", other programs do not"
            )
            status = Status.FAIL if demanded else Status.WARN
            yield Finding(
                ID, name, status, told, expected, why, as_root(node, "sh -c 'echo NCCL_P2P_DISABLE=1 >> /etc/nccl.conf'")
            )
        else:
            yield Finding(ID, name, Status.PASS, f"left off: {told}", expected)


def _not_run(node: Node, grant: P2pMatrix | None, expected: str) -> Finding:
    if grant is None:
        return Finding(
            ID,
            node.name,
            Status.UNKNOWN,
            "not measured: the grant is not known",
            expected,
            "",
            f"r4090c facts --nodes {node.name}",
        )
    if not grant.granted:
        return Finding(ID, node.name, Status.SKIP, "the driver grants no P2P, as is right for a stock driver", expected)
    return Finding(ID, node.name, Status.SKIP, f"granted, but torch is not in {node.paths.python}: P2P stays off", expected)
