"""Whether power supplies, connectors and cards survive all GPUs of the cluster switching between rest and full load at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from netcheck.checks._collective import took_no_part
from netcheck.checks._faults import EXPECTED, faults, quiet
from netcheck.checks._load import by_node
from netcheck.measure.power import PERIOD_S, read
from r4090c.model import Cluster, Finding, Gpu, Node, PythonFact, Status, Tool

ID, GROUP, SCOPE, NEEDS, OPTIONAL = "power", "power", "measurement", ("power",), ("gpus", "python", "tools")
ASKED = True
RULE = "twenty swings of all GPUs at once: no node lost, no Xid, no uncorrected PCIe error (fail); no corrected error (warn)"
SOURCE = "NVIDIA's Xid catalogue (79); Documentation/PCI/pcieaer-howto; est."


def applies(node: Node, cluster: Cluster) -> bool:
    """A node with `gpus: 0` has nothing to switch."""
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
        found = [] if load.absent else list(faults(ID, load, cluster))
        yield from found
        if load.absent or (not found and not load.cycles):
            remedy = f"r4090c preflight --only {ID} --nodes {name}"
            yield Finding(ID, name, Status.UNKNOWN, f"not measured: {load.error or 'no swing'}", EXPECTED, "", remedy)
        elif not found:
            observed = f"{load.cycles} swings of {PERIOD_S:g} s: {quiet(load)}"
            yield Finding(ID, name, Status.PASS, observed, EXPECTED)
