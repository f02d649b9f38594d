"""Whether loading all GPUs brings out errors: new Xids, PCIe errors that grow, cards or nodes that stop answering."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from netcheck.checks._collective import took_no_part
from netcheck.checks._faults import EXPECTED, faults, quiet
from netcheck.checks._load import by_node
from netcheck.measure.gpu_load import read
from r4090c.model import Cluster, Finding, Gpu, Node, PythonFact, Status, Tool

ID, GROUP, SCOPE, NEEDS, OPTIONAL = "gpu-load-errors", "gpu", "measurement", ("gpu-load",), ("gpus", "python", "tools")
RULE = "while all GPUs copy and compute: no new Xid, no uncorrected PCIe error, no failure (fail); no corrected error (warn)"
SOURCE = "NVIDIA's Xid catalogue; Documentation/PCI/pcieaer-howto"


def applies(node: Node, cluster: Cluster) -> bool:
    """A node with `gpus: 0` has nothing to load."""
    return node.gpus > 0


def check(
    measured: Any,
    gpus: Mapping[str, Sequence[Gpu] | None],
    pythons: Mapping[str, PythonFact | None],
    tools: Mapping[str, Mapping[str, Tool] | None],
    cluster: Cluster,
) -> Iterator[Finding]:
    """Yield one Finding per fault, else one per node. Raises ParseError."""
    loads = by_node(read(measured), gpus)
    for name in gpus:
        node = cluster.node(name)
        if name not in loads:
            yield took_no_part(ID, node, gpus[name], pythons[name], tools[name], least=1)
            continue
        load = loads[name]
        if load.absent or (load.error and not load.gpus and not load.lost):
            remedy = f"r4090c facts --nodes {name}"
            yield Finding(ID, name, Status.UNKNOWN, f"not measured: {load.error}", EXPECTED, "", remedy)
            continue
        found = list(faults(ID, load, cluster))
        yield from found
        if not found:
            yield Finding(ID, name, Status.PASS, quiet(load), EXPECTED)
