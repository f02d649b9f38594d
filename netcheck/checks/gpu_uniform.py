"""Whether all GPUs of the cluster are the same model with the same memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from netcheck.checks._wording import as_root, on, origin
from r4090c.model import Cluster, Finding, Gpu, Node, Status

ID, GROUP, SCOPE, NEEDS = "gpu-uniform", "gpu", "cluster", ("gpus",)
RULE = "one model with one memory size (fail); an RTX 4090 with less than {gpu_memory_mib} MiB is a warning"
SOURCE = "nvidia-smi of an RTX 4090; cards rebuilt with 48 GB are sold"

MODEL = re.compile(r"\bRTX 4090$")
"""Not the 4090 D, not the 4090 Laptop GPU."""
TOLERANCE = 0.02
"""est.: what drivers differ by; ECC takes 1/16."""
ABSENT = Status.UNKNOWN


def applies(node: Node, cluster: Cluster) -> bool:
    """A node with `gpus: 0` has no GPU to compare."""
    return node.gpus > 0


def check(gpus: Mapping[str, tuple[Gpu, ...]], cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding per odd GPU (subject node/gpuN), else one pass per node. Most cards decide, not most nodes."""
    models = Counter(
        (gpu.name, gpu.memory_total_mib) for cards in gpus.values() for gpu in cards if gpu.memory_total_mib is not None
    )
    common, count = models.most_common(1)[0] if models else (None, 0)
    clear = count * 2 > sum(models.values())
    for name, cards in gpus.items():
        working = [gpu for gpu in cards if not gpu.faults]
        if not any(gpu.memory_total_mib is not None for gpu in cards) and not working:
            continue  # gpu-count and gpu-faults say it
        unread = [gpu for gpu in cards if gpu.memory_total_mib is None and not gpu.faults]  # gpu-faults names the broken ones
        odd = [
            gpu for gpu in cards if gpu.memory_total_mib is not None and (not clear or (gpu.name, gpu.memory_total_mib) != common)
        ]
        for gpu in odd:
            expected = (
                f"{common[0]} {common[1]} MiB, as most cards"
                if clear and common
                else f"one model: {_listed(models)} (no majority)"
            )
            why = "all ranks take the same share: the smallest card runs out of memory, the slowest sets the pace"
            remedy = on(cluster.node(name), "nvidia-smi -L")
            observed = f"{gpu.name} {gpu.memory_total_mib} MiB"
            yield Finding(ID, f"{name}/gpu{gpu.index}", Status.FAIL, observed, expected, why, remedy)
        for gpu in unread:
            remedy = on(cluster.node(name), f"nvidia-smi -i {gpu.index}")
            yield Finding(ID, f"{name}/gpu{gpu.index}", Status.UNKNOWN, f"not read: the memory of {gpu.name}", "", "", remedy)
        told = [gpu for gpu in cards if gpu.memory_total_mib is not None]
        stock = cluster.expect.gpu_memory_mib
        small = [gpu for gpu in told if MODEL.search(gpu.name) and (gpu.memory_total_mib or 0) < stock * (1 - TOLERANCE)]
        if not odd and not unread and small:
            why = "ECC takes a sixteenth of the memory, and some speed; the plan counts on all of it. Off after a reboot"
            expected = f"{stock} MiB{origin(cluster, 'gpu_memory_mib')}"
            observed = f"{len(small)} × {small[0].name} with {small[0].memory_total_mib} MiB"
            yield Finding(ID, name, Status.WARN, observed, expected, why, as_root(cluster.node(name), "nvidia-smi -e 0"))
        elif not odd and not unread:
            rebuilt = MODEL.search(told[0].name) and (told[0].memory_total_mib or 0) > stock * (1 + TOLERANCE)
            note = f" rebuilt with {told[0].memory_total_mib} MiB" if rebuilt else ""
            yield Finding(ID, name, Status.PASS, f"{len(told)} × {told[0].name}{note}", "one model, one memory size")


def _listed(models: Counter[tuple[str, int]]) -> str:
    return ", ".join(f"{count} × {name} {mib} MiB" for (name, mib), count in models.most_common())
