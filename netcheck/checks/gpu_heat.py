"""Whether a GPU stays away from the temperature at which it slows itself down, while all of them work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from netcheck.checks._gpu import heat
from netcheck.checks._load import by_node, not_loaded
from netcheck.checks._wording import on
from netcheck.measure.gpu_load import LoadedGpu, read
from r4090c.model import Cluster, Finding, Gpu, GpuDetail, Node, PythonFact, Status, Tool

ID, GROUP, SCOPE, NEEDS = "gpu-heat", "gpu", "measurement", ("gpu-load",)
OPTIONAL = ("gpus", "python", "tools", "gpu_detail")
RULE = "under load more than {gpu_heat_warn_c} °C (warn), {gpu_heat_fail_c} °C (fail) below the slowdown temperature"
SOURCE = "nvidia-smi -q (GPU Slowdown Temp, T.Limit); est."


def applies(node: Node, cluster: Cluster) -> bool:
    """A node with `gpus: 0` has no GPU to get hot."""
    return node.gpus > 0


def check(
    measured: Any,
    gpus: Mapping[str, Sequence[Gpu] | None],
    pythons: Mapping[str, PythonFact | None],
    tools: Mapping[str, Mapping[str, Tool] | None],
    details: Mapping[str, Sequence[GpuDetail] | None],
    cluster: Cluster,
) -> Iterator[Finding]:
    """Yield one Finding per hot GPU, else one pass per node. Raises ParseError."""
    loads = by_node(read(measured), gpus)
    expected = f"more than {cluster.expect.gpu_heat_warn_c} °C below slowing down"
    silent = not_loaded(ID, loads, gpus, pythons, tools, expected, cluster)
    for name in gpus:
        if name in silent:
            yield silent[name]
            continue
        load = loads[name]
        limits = {detail.pci: _slowdown_c(detail) for detail in details[name] or ()}
        known = {gpu: (warmest, limits.get(gpu.pci)) for gpu in load.gpus if (warmest := _warmest_c(gpu)) is not None}
        faults = 0
        for gpu, (warmest, limit) in known.items():
            trouble = heat(warmest, limit, None, cluster)
            if trouble is not None:
                faults += 1
                remedy = on(cluster.node(name), f"nvidia-smi -i {gpu.index} -q -d TEMPERATURE,POWER")
                observed = f"{trouble.observed} after seconds of load"
                yield Finding(ID, f"{name}/gpu{gpu.index}", trouble.status, observed, trouble.expected, trouble.why, remedy)
        if not known or all(limit is None for _, limit in known.values()):
            what = "no temperature under load" if not known else "no slowdown temperature"
            remedy = on(cluster.node(name), "nvidia-smi -q -d TEMPERATURE")
            yield Finding(ID, name, Status.UNKNOWN, f"not read: nvidia-smi told {what}", expected, "", remedy)
        elif not faults:
            hottest = max(warmest for warmest, _ in known.values())
            yield Finding(ID, name, Status.PASS, f"{len(known)} GPUs, {hottest} °C at most under load", expected)


def _warmest_c(gpu: LoadedGpu) -> int | None:
    return max((one.temperature_c for one in gpu.loaded if one.temperature_c is not None), default=None)


def _slowdown_c(detail: GpuDetail) -> int | None:
    """Return the temperature at which the card slows down: as told, or where the degrees left to it end (T.Limit)."""
    if detail.slowdown_c is not None:
        return detail.slowdown_c
    told = detail.temperature_c is not None and detail.headroom_c is not None
    return (detail.temperature_c or 0) + (detail.headroom_c or 0) if told else None
