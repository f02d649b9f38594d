"""The statistics of scaling; pure.

E(n) = T(n) / (the sum of T(1) over the n nodes), T = tokens/s, T(1) measured the same night on every node. With equal nodes
that is T(n) / (n · T(1)). Medians over repeats, and a percentile bootstrap interval over the raw samples.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from r4090c.model import NodeFacts

ENOUGH = 5
"""est.: repeats below which a night is a look and not a judgement: a median of fewer moves with one bad run."""
RESAMPLES = 2000
"""est.: the 95 % bounds of a percentile bootstrap settle well below 0.01 at this number."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured run. `tokens_per_s` is the whole cluster's, the median over its steps after warm-up."""

    nodes: tuple[str, ...]
    repeat: int
    ranks: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Scaling:
    """Scaling at `n` nodes. `low`, `high`: 95 % bootstrap interval of the efficiency; None with a single sample."""

    n: int
    nodes: tuple[str, ...]
    samples: int
    tokens_per_s: float
    single_tokens_per_s: Mapping[str, float]
    efficiency: float
    low: float | None
    high: float | None


def scaling(samples: Sequence[Sample], seed: int = 0) -> tuple[Scaling, ...]:
    """Return one Scaling per measured set of nodes, the smallest first; sets without T(1) of all their nodes are left out."""
    groups: dict[tuple[str, ...], list[float]] = {}
    for sample in samples:
        groups.setdefault(sample.nodes, []).append(sample.tokens_per_s)
    singles = {nodes[0]: rates for nodes, rates in groups.items() if len(nodes) == 1}
    found = []
    for nodes, rates in sorted(groups.items(), key=lambda item: (len(item[0]), item[0])):
        if any(node not in singles for node in nodes):
            continue
        base = {node: median(singles[node]) for node in nodes}
        low, high = _interval(rates, [singles[node] for node in nodes], random.Random(seed)) if len(nodes) > 1 else (None, None)
        found.append(Scaling(len(nodes), nodes, len(rates), median(rates), base, median(rates) / sum(base.values()), low, high))
    return tuple(found)


def _interval(
    together: Sequence[float], alone: Sequence[Sequence[float]], generator: random.Random
) -> tuple[float | None, float | None]:
    """Return the 95 % percentile bootstrap interval of median(together) / sum of median(alone)."""
    if len(together) < 2 or any(len(one) < 2 for one in alone):
        return None, None
    drawn = sorted(
        median(generator.choices(together, k=len(together))) / sum(median(generator.choices(one, k=len(one))) for one in alone)
        for _ in range(RESAMPLES)
    )
    return drawn[int(0.025 * RESAMPLES)], drawn[int(0.975 * RESAMPLES) - 1]


def verdict(table: Sequence[Scaling], sizes: Iterable[int], floor: float | None, failed: int = 0) -> str:
    """Return "below the floor", "could not tell" (a wanted size has no result, or runs `failed`), or "measured"."""
    if floor is not None and any(one.n > 1 and one.efficiency < floor for one in table):
        return "below the floor"
    return "measured" if not failed and {one.n for one in table} >= set(sizes) else "could not tell"


def fingerprint(facts: Mapping[str, NodeFacts]) -> str:
    """Return what must not change between two nights that are compared: kernels, drivers, GPUs and the training packages.

    One line of "name=value", sorted; nodes that differ are all told, joined by "|".
    """
    told: dict[str, set[str]] = {}
    for node in facts.values():
        if node.os.value is not None:
            told.setdefault("kernel", set()).add(node.os.value.kernel)
        for gpu in node.gpus.value or ():
            told.setdefault("gpu", set()).add(f"{gpu.name} {gpu.power_limit_w or '?'} W")
            told.setdefault("driver", set()).add(gpu.driver)
        packages = node.python.value.packages if node.python.value is not None else {}
        for name, version in packages.items():
            if name in ("torch", "deepspeed", "transformers") or name.startswith("nvidia-nccl"):
                told.setdefault(name, set()).add(version)
    return ", ".join(f"{name}={'|'.join(sorted(values))}" for name, values in sorted(told.items()))


def slow_nodes(samples: Sequence[Sample], tolerance: float = 0.1) -> tuple[tuple[str, float], ...]:
    """Return (node, share of the median) of each node whose T(1) lies more than `tolerance` (est.) below the nodes' median."""
    singles: dict[str, list[float]] = {}
    for sample in samples:
        if len(sample.nodes) == 1:
            singles.setdefault(sample.nodes[0], []).append(sample.tokens_per_s)
    rates = {node: median(values) for node, values in singles.items()}
    if len(rates) < 2:
        return ()
    middle = median(rates.values())
    return tuple((node, rate / middle) for node, rate in sorted(rates.items()) if rate < (1 - tolerance) * middle)
