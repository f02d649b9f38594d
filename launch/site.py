"""Where a run would run, as far as memory and speed depend on it: from facts, or assumed in a few words. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from netcheck.nccl_expected import slowest_rate_gbit_s
from r4090c.errors import UsageError
from r4090c.model import Cluster, Gpu, Node, NodeFacts, P2pProof

MIB_PER_GIB = 1024
DRIVER_MIB = 24_564 - 24_092
"""What the driver keeps of a 4090: nvidia-smi tells 24564 MiB, torch 24092."""
HOST_GBYTE_S = 25.0
"""Between host and card over PCIe 4.0 x16 in practice: 25 to 26 GB/s."""


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU. `memory_gib` as torch tells it; dense peaks with FP32 accumulation, None = not in our table."""

    name: str
    memory_gib: float
    bf16_tflops: float | None
    fp32_tflops: float | None
    memory_gbyte_s: float | None
    host_gbyte_s: float = HOST_GBYTE_S
    """PCIe, one direction, pinned memory, in practice."""


CARDS: Mapping[str, Card] = {
    "4090": Card("RTX 4090", 24_092 / MIB_PER_GIB, 165.2, 82.6, 1008.0),
    "4090d": Card("RTX 4090 D", 24_092 / MIB_PER_GIB, 147.1, 73.5, 1008.0),
    "4090-48gb": Card("RTX 4090 48GB", (49_140 - DRIVER_MIB) / MIB_PER_GIB, 165.2, 82.6, 1008.0),
    "3090": Card("RTX 3090", (24_576 - DRIVER_MIB) / MIB_PER_GIB, 71.0, 35.6, 936.0),
}
"""Ada whitepaper appendix A (4090), scaled by SMs 114/128 (4090 D), Ampere GA102 whitepaper (3090); 48 GB: rebuilt 4090s."""


@dataclass(frozen=True, slots=True)
class Link:
    """What collectives go over. `busbw_gbyte_s`: bus bandwidth of large all_reduces, as nccl-tests defines it (1e9 bytes).

    All ranks of a node share it. None = nobody knows. `latency_us`: of one hop of a ring. `origin`: measured, or from what.
    """

    kind: str
    """roce, infiniband, tcp, loopback; inside a node: host (through its memory) or p2p."""
    rate_gbit_s: float | None
    busbw_gbyte_s: float | None
    latency_us: float
    origin: str


@dataclass(frozen=True, slots=True)
class Measured:
    """Bus bandwidths that a preflight measured, None = not. `when`: its date, for the reader."""

    between_gbyte_s: float | None = None
    inside_gbyte_s: float | None = None
    when: str = ""


@dataclass(frozen=True, slots=True)
class Site:
    """Nodes that are alike, or as the weakest of them. `card` None = ranks on CPUs.

    `between` None = one node; `inside` None = one rank a node. `host_gib`: a node's available memory, `cores`: physical ones.
    """

    name: str
    node_names: tuple[str, ...]
    ranks_per_node: int
    card: Card | None
    between: Link | None
    inside: Link | None
    host_gib: float | None
    cores: int | None
    origin: str

    @property
    def nodes(self) -> int:
        """How many nodes take part."""
        return len(self.node_names)

    @property
    def world(self) -> int:
        """How many ranks."""
        return self.nodes * self.ranks_per_node

    def with_nodes(self, number: int) -> Site:
        """Return the site with its first `number` nodes, or with more that are alike (named so), for a what-if."""
        named = self.node_names[:number]
        named += tuple(f"node{index:02d}" for index in range(len(named) + 1, number + 1))
        return replace(self, node_names=named)


NETWORK_SHARE = 0.88
"""Share of the rate that a large all_reduce gets: 1.1, 2.75 and 11 GB/s of 10, 25 and 100 Gbit/s. est., between what the wire
carries (0.98) and the limit below which preflight warns."""
TCP_BUSBW_MAX_GBYTE_S = 5.0
"""est.: NCCL's sockets move 40 Gbit/s with 4 × 4 connections before the cores that copy are full."""
LATENCY_US: Mapping[str, float] = {"roce": 10.0, "infiniband": 8.0, "tcp": 40.0, "loopback": 30.0, "host": 3.0, "p2p": 2.0}
"""One hop of NCCL's ring through host memory; 43 us for a small all_reduce of 8 4090s are 14 hops of 3. Between nodes est."""
INSIDE_GBYTE_S = 14.7
"""8 stock RTX 4090 on two EPYC 7542, large messages: 14.4 to 15.0 (NVIDIA/nccl-tests issues 269, 307)."""
INSIDE_P2P_GBYTE_S = 20.6
"""The same machine with patched P2P."""
ASSUMED = re.compile(
    r"(?P<nodes>\d{1,9})x(?P<gpus>\d{1,9})x(?P<card>[a-z0-9]+(?:-[a-z0-9]+)?)(?P<p2p>\+p2p)?"
    r"(?:@(?P<rate>\d{1,4}(?:\.\d{1,3})?)(?:gbe|gb|g)(?:-(?P<kind>roce|ib|infiniband|tcp))?)?(?:,ram=(?P<ram>\d{1,5})(?:gib|gb|g)?)?",
    re.ASCII,
)
ASSUMED_EXAMPLE = (
    "4x8x4090@100gbe-roce (nodes × GPUs × card @ network: roce, ib or tcp; `,ram=256gib` for the host memory of a node)"
)
MOST_ASSUMED = 1024


def assume(text: str) -> Site:
    """Return the site that `text` tells, like "4x8x4090@100gbe-roce". Raises UsageError."""
    told = ASSUMED.fullmatch(text.strip().lower())
    culprit = f"--assume {text}"
    if told is None:
        raise UsageError(culprit, "not understood", ASSUMED_EXAMPLE, "r4090c plan llama13b --assume 2x8x4090@100gbe-roce")
    nodes, gpus = int(told["nodes"]), int(told["gpus"])
    if not 1 <= nodes * gpus <= MOST_ASSUMED:
        raise UsageError(culprit, f"{nodes} × {gpus} = {nodes * gpus} GPUs", f"1 to {MOST_ASSUMED}")
    if told["card"] != "cpu" and told["card"] not in CARDS:
        raise UsageError(culprit, f"no card {told['card']!r} is known", f"one of {', '.join((*CARDS, 'cpu'))}")
    if nodes > 1 and told["rate"] is None:
        raise UsageError(
            culprit, f"{nodes} nodes and no network", ASSUMED_EXAMPLE, "r4090c plan llama13b --assume 2x8x4090@100gbe-roce"
        )
    rate = float(told["rate"]) if told["rate"] is not None else None
    if rate == 0:
        raise UsageError(culprit, "a network of 0 Gbit/s", ASSUMED_EXAMPLE)
    kind = {"ib": "infiniband", None: "tcp"}.get(told["kind"], told["kind"])
    assert kind is not None
    card = CARDS.get(told["card"])
    return Site(
        name=text,
        node_names=tuple(f"node{index:02d}" for index in range(1, nodes + 1)),
        ranks_per_node=gpus,
        card=card,
        between=between_nodes(kind, rate) if nodes > 1 else None,
        inside=inside_node(p2p=told["p2p"] is not None) if gpus > 1 and card is not None else None,
        host_gib=float(told["ram"]) if told["ram"] is not None else None,
        cores=None,
        origin=f"assumed: {text}",
    )


def between_nodes(kind: str, rate_gbit_s: float | None, measured_gbyte_s: float | None = None, when: str = "") -> Link:
    """Return the link between nodes; where nothing was measured, what a sound network of this rate gives."""
    latency = LATENCY_US.get(kind, LATENCY_US["tcp"])
    if measured_gbyte_s is not None:
        return Link(kind, rate_gbit_s, measured_gbyte_s, latency, f"measured by preflight {when}".strip())
    if rate_gbit_s is None:
        return Link(kind, None, None, latency, "its rate is not known")
    whole = NETWORK_SHARE * rate_gbit_s / 8
    if kind == "tcp" and whole > TCP_BUSBW_MAX_GBYTE_S:
        return Link(kind, rate_gbit_s, TCP_BUSBW_MAX_GBYTE_S, latency, f"assumed: {rate_gbit_s:g} Gbit/s, sockets bound by cores")
    return Link(kind, rate_gbit_s, whole, latency, f"assumed: {NETWORK_SHARE:.0%} of {rate_gbit_s:g} Gbit/s")


def inside_node(*, p2p: bool = False, measured_gbyte_s: float | None = None, when: str = "", share: float = 1.0) -> Link:
    """Return the link between the GPUs of a node. `share`: of a PCIe 4.0 x16 link that the narrowest card has."""
    kind = "p2p" if p2p else "host"
    if measured_gbyte_s is not None:
        return Link(kind, None, measured_gbyte_s, LATENCY_US[kind], f"measured by preflight {when}".strip())
    usual = INSIDE_P2P_GBYTE_S if p2p else INSIDE_GBYTE_S
    how = "proven P2P" if p2p else "stock driver, through host memory"
    return Link(kind, None, usual * share, LATENCY_US[kind], f"assumed: what 8 RTX 4090 reach ({how})")


def site_of(
    cluster: Cluster,
    nodes: Sequence[Node],
    facts: Mapping[str, NodeFacts],
    ranks_per_node: int,
    measured: Measured | None = None,
    p2p: Mapping[str, P2pProof] | None = None,
) -> Site:
    """Return the site that `nodes` are: of every figure the weakest node's, since all ranks wait for the slowest.

    `p2p`: node -> what a two-arm test showed. Unknown facts leave None.
    """
    measured = measured or Measured()
    names = [node.name for node in nodes]
    on_gpus = all(node.gpus for node in nodes)
    gpus = [gpu for name in names for gpu in facts[name].gpus.value or () if gpu.index >= 0] if on_gpus else []
    rate = slowest_rate_gbit_s(
        names, {name: facts[name].net.value for name in names}, {name: facts[name].rdma.value for name in names}, cluster
    )
    inside = None
    if on_gpus and ranks_per_node > 1:
        proven = all((p2p or {}).get(name) is not None and (p2p or {})[name].proven for name in names)
        share = min((_lanes_share(gpu) for gpu in gpus), default=1.0)
        inside = inside_node(p2p=proven, measured_gbyte_s=measured.inside_gbyte_s, when=measured.when, share=share)
    memory = [told.available_mib / MIB_PER_GIB for name in names if (told := facts[name].memory.value) is not None]
    cores = [_cores(cpus.cores, cpus.allowed) for name in names if (cpus := facts[name].cpus.value) is not None]
    return Site(
        name=cluster.name,
        node_names=tuple(names),
        ranks_per_node=ranks_per_node,
        card=_card(gpus) if on_gpus else None,
        between=between_nodes(cluster.network.kind, rate, measured.between_gbyte_s, measured.when) if len(names) > 1 else None,
        inside=inside,
        host_gib=min(memory) if len(memory) == len(names) else None,
        cores=min(cores) if len(cores) == len(names) else None,
        origin=f"facts of {names[0]}" if len(names) == 1 else f"facts of {len(names)} nodes",
    )


def _card(gpus: Sequence[Gpu]) -> Card:
    """Return the weakest card: the least memory, and the lowest peaks of those in our table. No GPU told: a stock 4090."""
    if not gpus:
        return CARDS["4090"]
    memory = min((gpu.memory_total_mib for gpu in gpus if gpu.memory_total_mib), default=24_564)
    known = [_peaks(gpu.name) for gpu in gpus]
    weakest = min((card for card in known if card is not None), key=lambda card: card.bf16_tflops or 0.0, default=None)
    sure = weakest if None not in known else None
    return Card(
        name=sure.name if sure is not None else next(gpu.name for gpu, card in zip(gpus, known, strict=True) if card is None),
        memory_gib=(memory - DRIVER_MIB) / MIB_PER_GIB,
        bf16_tflops=sure.bf16_tflops if sure else None,
        fp32_tflops=sure.fp32_tflops if sure else None,
        memory_gbyte_s=sure.memory_gbyte_s if sure else None,
        host_gbyte_s=HOST_GBYTE_S * min((_lanes_share(gpu) for gpu in gpus), default=1.0),
    )


def _peaks(name: str) -> Card | None:
    """Return the card of our table that the driver calls `name`, like "NVIDIA GeForce RTX 4090 D"."""
    called = name.removeprefix("NVIDIA ").removeprefix("GeForce ").strip()
    return next((card for card in CARDS.values() if card.name == called), None)


def _lanes_share(gpu: Gpu) -> float:
    """Return what a card's link can carry, as a share of PCIe 4.0 x16. The current generation falls to 1 when idle: no matter."""
    width = min((gpu.pcie_width or 16), 16) / 16
    return width * 2.0 ** (min(gpu.pcie_gen_max or 4, 4) - 4)


def _cores(cores: Sequence[Sequence[int]], allowed: Sequence[int]) -> int:
    usable = set(allowed)
    return sum(1 for core in cores if usable.intersection(core)) or len(usable)
