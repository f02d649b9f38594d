"""What an all_reduce should reach, inside a node and between nodes, and below what it is not as it should be. Pure.

Figures are bus bandwidth (GB/s, 1e9 bytes) of the largest messages, as nccl-tests prints it: comparable between numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from netcheck.expected import interface, link_rate_gbit_s
from r4090c.model import Cluster, Expect, Gpu, NetFact, RdmaPort, TopologyMatrix

GLOO_GBIT_S_MAX = 10.0
"""est.: from here on the core that copies bounds gloo, not the wire."""
SAME_RATE = 0.1
"""A rate within a tenth of 10, 25 or 100 Gbit/s is that one."""


@dataclass(frozen=True, slots=True)
class BusLimits:
    """Limits in GB/s; `how`: where they come from; `fields`: the thresholds of Expect that went into them, warn first."""

    warn_gbyte_s: float
    fail_gbyte_s: float
    how: str
    fields: tuple[str, str]


def intra_limits(expect: Expect, *, across: bool) -> BusLimits:
    """Return the limits inside a node; `across`: its GPUs hang on different sockets or NUMA nodes."""
    if across:
        fields = ("nccl_sockets_warn_gbyte_s", "nccl_sockets_fail_gbyte_s")
        return BusLimits(expect.nccl_sockets_warn_gbyte_s, expect.nccl_sockets_fail_gbyte_s, "across sockets", fields)
    fields = ("nccl_intra_warn_gbyte_s", "nccl_intra_fail_gbyte_s")
    return BusLimits(expect.nccl_intra_warn_gbyte_s, expect.nccl_intra_fail_gbyte_s, "through host memory", fields)


def inter_limits(rate_gbit_s: float, expect: Expect, *, backend: str) -> BusLimits:
    """Return the limits between nodes over links of `rate_gbit_s`."""
    how = f"{rate_gbit_s:g} Gbit/s"
    if backend == "gloo":
        bounded = min(rate_gbit_s, GLOO_GBIT_S_MAX) / 8
        told = how if rate_gbit_s <= GLOO_GBIT_S_MAX else f"{how}, of which gloo is asked for {GLOO_GBIT_S_MAX:g}"
        return BusLimits(expect.gloo_warn * bounded, expect.gloo_fail * bounded, told, ("gloo_warn", "gloo_fail"))
    for known in (10, 25, 100):
        if abs(rate_gbit_s - known) <= SAME_RATE * known:
            fields = (f"nccl_{known}g_warn_gbyte_s", f"nccl_{known}g_fail_gbyte_s")
            return BusLimits(getattr(expect, fields[0]), getattr(expect, fields[1]), how, fields)
    whole = rate_gbit_s / 8
    return BusLimits(expect.nccl_other_warn * whole, expect.nccl_other_fail * whole, how, ("nccl_other_warn", "nccl_other_fail"))


def slowest_rate_gbit_s(
    names: Sequence[str],
    nets: Mapping[str, NetFact | None],
    rdma: Mapping[str, Sequence[RdmaPort] | None],
    cluster: Cluster,
) -> float | None:
    """Return the rate of the slowest node's data network among `names`; None where it is not known of all of them.

    As cluster.yaml states it, else that of the interface, else that of an InfiniBand port, which has no Ethernet rate.
    """
    rates, known = [], {node.name for node in cluster.nodes}
    for name in names:
        if name not in known:  # a bundle of another cluster
            return None
        ifaces = {name: interface(cluster.node(name), nets.get(name), cluster)}
        rate = link_rate_gbit_s((name, name), ifaces, cluster)
        if rate is None and cluster.network.kind == "infiniband":
            rate = max((port.rate_gbit_s for port in rdma.get(name) or () if port.rate_gbit_s), default=None)
        if rate is None:
            return None
        rates.append(rate)
    return min(rates, default=None)


def across_sockets(gpus: Sequence[Gpu], topology: TopologyMatrix | None) -> bool:
    """Return whether traffic between the GPUs of a node crosses sockets or NUMA nodes (SYS in nvidia-smi's matrix)."""
    if topology is not None and topology.links:
        return any(kind == "SYS" for pair, kind in topology.links.items() if pair.count("GPU") == 2)
    return len({gpu.numa for gpu in gpus if gpu.numa is not None and gpu.numa >= 0}) > 1
