"""Whether the PCIe link of every GPU has all its lanes and its full generation while data crosses it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from netcheck.checks._gpu import device_of, narrow_link, slow_link
from netcheck.checks._load import by_node, not_loaded
from netcheck.checks._wording import as_root
from netcheck.measure.gpu_load import LoadedGpu, read
from r4090c.model import Cluster, Finding, Gpu, Node, PciDevice, PythonFact, Status, Tool

ID, GROUP, SCOPE, NEEDS = "gpu-pcie-load", "pcie", "measurement", ("gpu-load",)
OPTIONAL = ("gpus", "python", "tools", "pci")
RULE = "x{gpu_pcie_width_min} and generation {gpu_pcie_gen_min} while copying (fail)"
SOURCE = "Ada whitepaper; PCIe 4.0; at rest links fall to generation 1, under load they must not"


def applies(node: Node, cluster: Cluster) -> bool:
    """A node with `gpus: 0` has no such link."""
    return node.gpus > 0


def check(
    measured: Any,
    gpus: Mapping[str, Sequence[Gpu] | None],
    pythons: Mapping[str, PythonFact | None],
    tools: Mapping[str, Mapping[str, Tool] | None],
    devices: Mapping[str, Sequence[PciDevice] | None],
    cluster: Cluster,
) -> Iterator[Finding]:
    """Yield one Finding per faulty link, else one pass per node. Raises ParseError."""
    loads = by_node(read(measured), gpus)
    expected = f"x{cluster.expect.gpu_pcie_width_min}, generation {cluster.expect.gpu_pcie_gen_min}"
    silent = not_loaded(ID, loads, gpus, pythons, tools, expected, cluster)
    for name in gpus:
        if name in silent:
            yield silent[name]
            continue
        load = loads[name]
        node, faults, told = cluster.node(name), 0, []
        for gpu in load.gpus:
            best = _best(gpu)
            if best is None:
                continue
            told.append(f"x{best.pcie_width} gen {best.pcie_gen}")
            device = device_of(best, devices[name])
            for trouble in (narrow_link(best, device, cluster, loaded=True), slow_link(best, device, cluster, loaded=True)):
                if trouble is not None:
                    faults += 1
                    remedy = as_root(node, f"lspci -vv -s {best.pci} | grep -E 'LnkCap:|LnkSta:'")
                    subject = f"{name}/gpu{gpu.index}"
                    yield Finding(ID, subject, trouble.status, trouble.observed, trouble.expected, trouble.why, remedy)
        if not told:
            again = f"r4090c preflight --full --only {ID}"
            yield Finding(ID, name, Status.UNKNOWN, "not read: nvidia-smi told no link under load", expected, "", again)
        elif not faults:
            yield Finding(ID, name, Status.PASS, f"{len(told)} GPUs: {', '.join(dict.fromkeys(told))} under load", expected)


def _best(gpu: LoadedGpu) -> Gpu | None:
    """Return the sample with the fastest link: while one card copies, the others rest, and a link that was fast can be fast."""
    known = [one for one in gpu.loaded if one.pcie_width is not None and one.pcie_gen is not None]
    return max(known, key=lambda one: (one.pcie_width or 0) * 2 ** (one.pcie_gen or 0), default=None)
