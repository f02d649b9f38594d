"""Whether a GPU is slowed down by its hardware or by the driver while it works."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from netcheck.checks._gpu import reasons_of, throttling
from netcheck.checks._load import by_node, not_loaded
from netcheck.checks._wording import on
from netcheck.measure.gpu_load import read
from r4090c.model import Cluster, Finding, Gpu, Node, PythonFact, Status, Tool

ID, GROUP, SCOPE, NEEDS, OPTIONAL = "gpu-throttle-load", "gpu", "measurement", ("gpu-load",), ("gpus", "python", "tools")
RULE = "under load no slowdown by the hardware (fail) or the driver for heat (warn); the power cap is told"
SOURCE = "nvml.h (nvmlClocksEventReasons)"

POWER_CAP = "SW Power Cap"


def applies(node: Node, cluster: Cluster) -> bool:
    """A node with `gpus: 0` has no GPU to slow down."""
    return node.gpus > 0


def check(
    measured: Any,
    gpus: Mapping[str, Sequence[Gpu] | None],
    pythons: Mapping[str, PythonFact | None],
    tools: Mapping[str, Mapping[str, Tool] | None],
    cluster: Cluster,
) -> Iterator[Finding]:
    """Yield one Finding per GPU that is slowed down, else one pass per node. Raises ParseError."""
    loads = by_node(read(measured), gpus)
    expected = "no slowdown"
    silent = not_loaded(ID, loads, gpus, pythons, tools, expected, cluster)
    for name in gpus:
        if name in silent:
            yield silent[name]
            continue
        load = loads[name]
        known = {gpu.index: reasons_of(gpu.reasons) for gpu in load.gpus if gpu.reasons is not None}
        faults = 0
        for index, reasons in known.items():
            trouble = throttling(reasons)
            if trouble is not None:
                faults += 1
                remedy = on(cluster.node(name), f"nvidia-smi -i {index} -q -d PERFORMANCE,TEMPERATURE,POWER")
                observed = f"{trouble.observed} under load"
                yield Finding(ID, f"{name}/gpu{index}", trouble.status, observed, trouble.expected, trouble.why, remedy)
        if not known:
            again = f"r4090c preflight --full --only {ID}"
            yield Finding(ID, name, Status.UNKNOWN, "not read: nvidia-smi told no reasons under load", expected, "", again)
        elif not faults:
            capped = [index for index, reasons in known.items() if POWER_CAP in reasons]
            at_cap = f", {len(capped)} at their power limit" if capped else ""
            yield Finding(ID, name, Status.PASS, f"{len(known)} GPUs not slowed down{at_cap}", expected)
