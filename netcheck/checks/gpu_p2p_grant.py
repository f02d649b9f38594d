"""Whether the driver grants P2P alike to all GPUs of all nodes; none is normal for a 4090."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from netcheck.checks._gpu import p2p_demanded
from netcheck.checks._majority import majority, others
from netcheck.checks._wording import on
from r4090c.model import Cluster, Finding, Node, P2pMatrix, Status

ID, GROUP, SCOPE, NEEDS = "gpu-p2p-grant", "gpu", "cluster", ("gpu_p2p",)
ABSENT = Status.UNKNOWN
RULE = "the same answer for all pairs on all nodes; not supported (NS, CNS, GNS, TNS, DR) is normal, a grant is no delivery"
SOURCE = "nccl-tests issue 117, open-gpu-kernel-modules issues 17, 42; a grant without delivery was reported for virtual machines"
COMMAND = "nvidia-smi topo -p2p r"


def applies(node: Node, cluster: Cluster) -> bool:
    """A node with `gpus: 0` has no pair of GPUs."""
    return node.gpus > 0


def check(matrices: Mapping[str, P2pMatrix], cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding per node: pairs that differ, a node that differs from the others, a demand without a grant, or a pass."""
    answers = {name: Counter(matrix.cells.values()) for name, matrix in matrices.items()}
    kinds = {
        name: "granted" if set(counts) == {"OK"} else "granted to some pairs" if "OK" in counts else "not granted"
        for name, counts in answers.items()
        if counts and set(counts) != {"U"}
    }
    agreed = majority(kinds)
    for name, counts in answers.items():
        node = cluster.node(name)
        observed = ", ".join(f"{cell} for {count // 2} of {counts.total() // 2} pairs" for cell, count in counts.most_common())
        demanded = p2p_demanded(node, cluster)
        look = on(node, COMMAND)
        if not counts:
            yield Finding(ID, name, Status.PASS, "one GPU: no pair", "the same for all pairs")
        elif set(counts) == {"U"}:
            yield Finding(ID, name, Status.UNKNOWN, observed, "a grant or none", "", look)
        elif demanded and "OK" not in counts:
            why = (
                f"{demanded} turns P2P on, which the driver does not grant: NCCL goes through host memory all the same, or hangs"
            )
            yield Finding(ID, name, Status.FAIL, observed, "P2P granted to all pairs", why, look)
        elif kinds[name] == "granted to some pairs":
            why = (
                "a ring over all GPUs is as fast as its slowest pair, and a grant for some pairs only often means cards behind"
                " different sockets or of different generations"
            )
            yield Finding(ID, name, Status.WARN, observed, "the same for all pairs", why, look)
        elif name in agreed.odd:
            right = (
                f"{agreed.value}, as on most nodes"
                if agreed.value
                else f"the same on all nodes; {others(kinds, name)} (no majority)"
            )
            why = "nodes with and without P2P run at different speeds, or have different drivers"
            yield Finding(ID, name, Status.WARN, f"{kinds[name]} ({observed})", right, why, look)
        elif kinds[name] == "granted":
            words = f"granted ({observed}); a grant is no delivery: the two-arm collective test decides, P2P stays off till then"
            yield Finding(ID, name, Status.PASS, words, "the same for all pairs and nodes")
        else:
            yield Finding(
                ID, name, Status.PASS, f"not granted ({observed}), normal for a 4090", "the same for all pairs and nodes"
            )
