"""Whether a GPU is slowed down by its hardware or near its limit of heat, as it stands now."""

from __future__ import annotations

from collections.abc import Iterator

from netcheck.checks._gpu import heat, throttling
from netcheck.checks._wording import on
from r4090c.model import Cluster, Finding, Gpu, GpuDetail, Node, Status

ID, GROUP, NEEDS, OPTIONAL = "gpu-throttle", "gpu", ("gpu_detail",), ("gpus",)
ABSENT = Status.UNKNOWN
RULE = (
    "no slowdown by the hardware (fail) or the driver (warn); more than {gpu_heat_warn_c} °C (warn), {gpu_heat_fail_c} °C (fail)"
    " below the slowdown temperature"
)
SOURCE = "nvml.h (nvmlClocksEventReasons); est."


def applies(node: Node, cluster: Cluster) -> bool:
    """A node with `gpus: 0` has no GPU to slow down."""
    return node.gpus > 0


def check(node: Node, details: tuple[GpuDetail, ...], gpus: tuple[Gpu, ...] | None, cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding per GPU and fault, else one pass. A power cap is no fault."""
    index = {gpu.pci: gpu.index for gpu in gpus or ()}
    faults, told = 0, 0
    for detail in details:
        told += bool(detail.throttle or detail.headroom_c is not None or detail.slowdown_c is not None)
        for trouble in (
            throttling(detail.throttle),
            heat(detail.temperature_c, detail.slowdown_c, detail.headroom_c, cluster),
        ):
            if trouble is not None:
                faults += 1
                name = f"gpu{index[detail.pci]}" if index.get(detail.pci, -1) >= 0 else detail.pci
                remedy = on(node, f"nvidia-smi -i {detail.pci} -q -d PERFORMANCE,TEMPERATURE,POWER")
                yield Finding(ID, f"{node.name}/{name}", trouble.status, trouble.observed, trouble.expected, trouble.why, remedy)
    if faults:
        return
    if not told:
        remedy = on(node, "nvidia-smi -q -d PERFORMANCE,TEMPERATURE")
        yield Finding(ID, node.name, Status.UNKNOWN, "not read: no GPU tells why its clocks are as they are", "", "", remedy)
        return
    warmest = max((detail.temperature_c for detail in details if detail.temperature_c is not None), default=None)
    observed = f"{len(details)} GPUs not slowed down" + (f", {warmest} °C at most" if warmest is not None else "")
    yield Finding(ID, node.name, Status.PASS, observed, "no slowdown, away from the limit of heat")
