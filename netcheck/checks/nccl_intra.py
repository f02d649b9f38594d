"""Whether the GPUs of a node exchange right data, as fast as their PCIe links and host memory allow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from netcheck.checks._collective import WHOLE_RUN, failure, judged, look_into, run_again, told, took_no_part
from netcheck.checks._wording import on
from netcheck.measure.nccl_node import read
from netcheck.measure.sweep import Run
from netcheck.nccl_expected import across_sockets, intra_limits
from r4090c.model import Cluster, Finding, Gpu, Node, PythonFact, Status, Tool, TopologyMatrix

ID, GROUP, SCOPE, NEEDS = "nccl-intra", "nccl", "measurement", ("nccl-node",)
OPTIONAL = ("gpus", "gpu_topology", "python", "tools")
RULE = (
    "all_reduce over all GPUs of a node, 64M to 256M: no wrong value (fail), at 256M {nccl_intra_warn_gbyte_s:g} GB/s (warn), "
    "{nccl_intra_fail_gbyte_s:g} GB/s (fail); across sockets {nccl_sockets_warn_gbyte_s:g} and {nccl_sockets_fail_gbyte_s:g} GB/s"
)
SOURCE = "NVIDIA/nccl-tests issues 7, 117, 167, 269, 307; est."


def applies(node: Node, cluster: Cluster) -> bool:
    """A single GPU has nobody to talk to."""
    return node.gpus > 1


def check(
    measured: Any,
    gpus: Mapping[str, Sequence[Gpu] | None],
    topologies: Mapping[str, TopologyMatrix | None],
    pythons: Mapping[str, PythonFact | None],
    tools: Mapping[str, Mapping[str, Tool] | None],
    cluster: Cluster,
) -> Iterator[Finding]:
    """Yield one Finding per node. Raises ParseError."""
    runs = {run.nodes[0]: run for run in read(measured)}
    for name in gpus:
        if name in runs:
            across = across_sockets(gpus[name] or (), topologies[name])
            yield _judged(runs[name], cluster.node(name), cluster, across=across)
        else:
            yield took_no_part(ID, cluster.node(name), gpus[name], pythons[name], tools[name], least=2)


def _judged(run: Run, node: Node, cluster: Cluster, *, across: bool) -> Finding:
    failed = failure(run)
    if failed is not None:
        status, observed, why = failed
        remedy = run.next_commands.get(node.name) or (look_into(node) if run.wrong else run_again(run))
        return Finding(ID, node.name, status, observed, WHOLE_RUN, why, remedy)
    status, expected = judged(run, intra_limits(cluster.expect, across=across), cluster)
    if status is Status.PASS:
        return Finding(ID, node.name, status, told(run), expected)
    why = (
        "every gradient crosses these links, and the slowest bounds them all: a card in a slot with few lanes, host memory with"
        " empty channels, GPUs on both sockets of a node that could sit on one"
    )
    look = "nvidia-smi topo -m; nvidia-smi --query-gpu=index,pcie.link.gen.max,pcie.link.width.current --format=csv"
    return Finding(ID, node.name, status, told(run), expected, why, on(node, look))
