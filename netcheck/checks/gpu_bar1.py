"""Whether the GPUs' BAR1 is large enough for P2P, where cluster.yaml turns P2P on; else only how large it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from netcheck.checks._gpu import p2p_demanded
from netcheck.checks._wording import on, origin
from r4090c.model import Cluster, Finding, GpuDetail, Node, Status

ID, GROUP, NEEDS = "gpu-bar1", "gpu", ("gpu_detail",)
ABSENT = Status.UNKNOWN
RULE = "at least {p2p_bar1_min_gib:g} GiB where NCCL_P2P_DISABLE is 0 in cluster.yaml; any size without P2P"
SOURCE = "open-gpu-kernel-modules issues 28, 42, 44"


def applies(node: Node, cluster: Cluster) -> bool:
    """A node with `gpus: 0` has no GPU with a BAR1."""
    return node.gpus > 0


def check(node: Node, details: tuple[GpuDetail, ...], cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding for the node."""
    demanded = p2p_demanded(node, cluster)
    sizes = Counter(detail.bar1_mib for detail in details if detail.bar1_mib is not None)
    observed = ", ".join(f"{count} × {_size(mib)}" for mib, count in sorted(sizes.items()))
    if not demanded:
        told = observed or "not told"
        yield Finding(ID, node.name, Status.PASS if observed else Status.SKIP, told, "any size: P2P is not demanded")
        return
    least = cluster.expect.p2p_bar1_min_gib
    expected = f"at least {least:g} GiB{origin(cluster, 'p2p_bar1_min_gib')}"
    remedy = on(node, "nvidia-smi -q -d MEMORY")
    if sum(sizes.values()) < len(details) or not details:
        yield Finding(ID, node.name, Status.UNKNOWN, f"not read: BAR1 ({observed or 'none told'})", expected, "", remedy)
    elif min(sizes) < least * 1024:
        why = (
            f"{demanded} turns P2P on, and the patched driver maps a card's whole memory through BAR1: switch on"
            " Above 4G Decoding and Resizable BAR in the firmware, or leave P2P off"
        )
        yield Finding(ID, node.name, Status.FAIL, observed, expected, why, remedy)
    else:
        yield Finding(ID, node.name, Status.PASS, observed, expected)


def _size(mib: int) -> str:
    return f"{mib // 1024} GiB" if mib >= 1024 and mib % 1024 == 0 else f"{mib} MiB"
