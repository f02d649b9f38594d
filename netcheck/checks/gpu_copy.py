"""Whether every GPU exchanges data with the host as fast as its PCIe link allows, measured with pinned memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from netcheck.checks._load import by_node, not_loaded, usable
from netcheck.checks._wording import as_root, origin
from netcheck.measure.gpu_load import LoadedGpu, read
from r4090c.model import Cluster, Finding, Gpu, Node, PythonFact, Status, Tool

ID, GROUP, SCOPE, NEEDS, OPTIONAL = "gpu-copy", "bandwidth", "measurement", ("gpu-load",), ("gpus", "python", "tools")
RULE = "both ways, each card alone: {gpu_copy_warn_gbyte_s:g} GB/s (warn), {gpu_copy_fail_gbyte_s:g} GB/s (fail)"
SOURCE = "PCIe 4.0 x16: 25 to 26 GB/s in practice; est."

WHY = (
    "without P2P all traffic between GPUs goes through the host: a slot or riser with fewer lanes or a lower generation, a card"
    " behind the chipset, host memory with empty channels"
)


def applies(node: Node, cluster: Cluster) -> bool:
    """A node with `gpus: 0` has no such link."""
    return node.gpus > 0


def check(
    measured: Any,
    gpus: Mapping[str, Sequence[Gpu] | None],
    pythons: Mapping[str, PythonFact | None],
    tools: Mapping[str, Mapping[str, Tool] | None],
    cluster: Cluster,
) -> Iterator[Finding]:
    """Yield one Finding per slow GPU, else one pass per node. Raises ParseError."""
    loads = by_node(read(measured), gpus)
    expect = cluster.expect
    expected = f"at least {expect.gpu_copy_warn_gbyte_s:g} GB/s both ways{origin(cluster, 'gpu_copy_warn_gbyte_s')}"
    silent = not_loaded(ID, loads, gpus, pythons, tools, expected, cluster)
    for name in gpus:
        if name in silent:
            yield silent[name]
            continue
        load = loads[name]
        node, known = cluster.node(name), [gpu for gpu in usable(load) if _slower(gpu) is not None]
        slow = [gpu for gpu in known if (_slower(gpu) or 0.0) < expect.gpu_copy_warn_gbyte_s]
        for gpu in slow:
            fails = (_slower(gpu) or 0.0) < expect.gpu_copy_fail_gbyte_s
            limit = expect.gpu_copy_fail_gbyte_s if fails else expect.gpu_copy_warn_gbyte_s
            field = "gpu_copy_fail_gbyte_s" if fails else "gpu_copy_warn_gbyte_s"
            remedy = as_root(node, f"lspci -vv -s {gpu.pci} | grep -E 'LnkCap:|LnkSta:'")
            status = Status.FAIL if fails else Status.WARN
            wanted = f"at least {limit:g} GB/s both ways{origin(cluster, field)}"
            yield Finding(ID, f"{name}/gpu{gpu.index}", status, _told(gpu), wanted, WHY, remedy)
        if not known:
            again = f"r4090c preflight --full --only {ID}"
            yield Finding(ID, name, Status.UNKNOWN, f"not measured: {load.error or 'no copy'}", expected, "", again)
        elif not slow:
            worst = min(known, key=lambda gpu: _slower(gpu) or 0.0)
            yield Finding(ID, name, Status.PASS, f"{len(known)} GPUs, slowest gpu{worst.index}: {_told(worst)}", expected)


def _slower(gpu: LoadedGpu) -> float | None:
    """Return the rate of the slower direction."""
    return min((rate for rate in (gpu.h2d_gbyte_s, gpu.d2h_gbyte_s) if rate is not None), default=None)


def _told(gpu: LoadedGpu) -> str:
    ways = [
        f"{name} {rate:.1f}" for name, rate in (("to the card", gpu.h2d_gbyte_s), ("back", gpu.d2h_gbyte_s)) if rate is not None
    ]
    if gpu.together_gbyte_s is not None:
        ways.append(f"all cards at once {gpu.together_gbyte_s:.1f}")
    return ", ".join(ways) + " GB/s"
