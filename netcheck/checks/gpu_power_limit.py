"""Whether all GPUs may draw the same power."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from netcheck.checks._wording import as_root, on
from r4090c.model import Cluster, Finding, Gpu, Node, Status

ID, GROUP, SCOPE, NEEDS = "gpu-power-limit", "gpu", "cluster", ("gpus",)
ABSENT = Status.UNKNOWN
RULE = "one power limit on all GPUs of one model; a lower one may be meant"
SOURCE = "est."


def applies(node: Node, cluster: Cluster) -> bool:
    """A node with `gpus: 0` has no GPU to limit."""
    return node.gpus > 0


def check(gpus: Mapping[str, tuple[Gpu, ...]], cluster: Cluster) -> Iterator[Finding]:
    """Yield one warning per odd GPU, else one pass per node. Most cards of a model decide, not most nodes."""
    limits: dict[str, Counter[int]] = {}
    for gpu in (gpu for cards in gpus.values() for gpu in cards):
        if gpu.power_limit_w is not None:
            limits.setdefault(gpu.name, Counter())[round(gpu.power_limit_w)] += 1
    for name, cards in gpus.items():
        node = cluster.node(name)
        told = [(gpu, round(gpu.power_limit_w)) for gpu in cards if gpu.power_limit_w is not None]
        odd = 0
        for gpu, limit in told:
            common, count = limits[gpu.name].most_common(1)[0]
            clear = count * 2 > limits[gpu.name].total()
            if (clear and limit == common) or len(limits[gpu.name]) == 1:
                continue
            odd += 1
            others = ", ".join(f"{count} × {watts} W" for watts, count in limits[gpu.name].most_common())
            expected = f"{common} W, as most cards" if clear else f"one limit: {others} (no majority)"
            why = "all ranks wait for the slowest card; where a lower limit is meant, give it to all; back after a reboot"
            remedy = as_root(node, f"nvidia-smi -i {gpu.index} -pl {common}")
            yield Finding(ID, f"{name}/gpu{gpu.index}", Status.WARN, f"{limit} W", expected, why, remedy)
        if not told:
            remedy = on(node, "nvidia-smi -q -d POWER")
            yield Finding(ID, name, Status.UNKNOWN, "not read: no GPU tells its power limit", "one limit", "", remedy)
        elif not odd:
            yield Finding(
                ID, name, Status.PASS, " and ".join(f"{watts} W" for watts in sorted({w for _, w in told})), "one limit"
            )
