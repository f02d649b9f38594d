"""Whether every GPU multiplies matrices as fast as the other GPUs of the cluster do at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from netcheck.checks._load import by_node, not_loaded
from netcheck.checks._wording import on, origin
from netcheck.measure.gpu_load import read
from r4090c.model import Cluster, Finding, Gpu, Node, PythonFact, Status, Tool

ID, GROUP, SCOPE, NEEDS, OPTIONAL = "gpu-compute", "compute", "measurement", ("gpu-load",), ("gpus", "python", "tools")
RULE = "bf16 products on all GPUs at once: each at least {gpu_compute_warn:.0%} of the median of its model (warn)"
SOURCE = "est.; DLRover calls a node a straggler from twice the median time"


def applies(node: Node, cluster: Cluster) -> bool:
    """A node with `gpus: 0` computes on its CPUs, which nobody compares."""
    return node.gpus > 0


def check(
    measured: Any,
    gpus: Mapping[str, Sequence[Gpu] | None],
    pythons: Mapping[str, PythonFact | None],
    tools: Mapping[str, Mapping[str, Tool] | None],
    cluster: Cluster,
) -> Iterator[Finding]:
    """Yield one Finding per straggler, else one pass per node. Raises ParseError."""
    loads = by_node(read(measured), gpus)
    rates: dict[str, list[float]] = {}
    for gpu in (gpu for load in loads.values() for gpu in load.gpus):
        if gpu.tflops is not None:
            rates.setdefault(gpu.name, []).append(gpu.tflops)
    share = cluster.expect.gpu_compute_warn
    expected = f"at least {share:.0%} of the median{origin(cluster, 'gpu_compute_warn')}"
    silent = not_loaded(ID, loads, gpus, pythons, tools, expected, cluster)
    for name in gpus:
        if name in silent:
            yield silent[name]
            continue
        load = loads[name]
        known = [gpu for gpu in load.gpus if gpu.tflops is not None]
        if not known:
            again = f"r4090c preflight --full --only {ID}"
            yield Finding(ID, name, Status.UNKNOWN, f"not measured: {load.error or 'no product'}", expected, "", again)
            continue
        slow = [gpu for gpu in known if (gpu.tflops or 0.0) < share * median(rates[gpu.name])]
        for gpu in slow:
            middle = median(rates[gpu.name])
            clock = f" at {gpu.sm_mhz} MHz" if gpu.sm_mhz is not None else ""
            observed = f"{gpu.tflops:.1f} TFLOP/s{clock}, {(gpu.tflops or 0.0) / middle:.0%} of the median"
            why = "all ranks wait for it at every step: a lower power limit, heat, another program on the card, another make"
            remedy = on(cluster.node(name), f"nvidia-smi -i {gpu.index} -q -d POWER,CLOCK,PERFORMANCE,TEMPERATURE,PIDS")
            wanted = f"{share * middle:.1f} TFLOP/s, {expected.removeprefix('at least ')}"
            yield Finding(ID, f"{name}/gpu{gpu.index}", Status.WARN, observed, f"at least {wanted}", why, remedy)
        if not slow:
            worst = min(known, key=lambda gpu: gpu.tflops or 0.0)
            observed = f"{len(known)} GPUs, slowest gpu{worst.index}: {worst.tflops:.1f} TFLOP/s"
            yield Finding(ID, name, Status.PASS, observed, expected)
