"""Which network card is near which GPU, the NUMA node of each, what shares a way, and in which order ranks are near. Pure.

The classes are those of `nvidia-smi topo -m`. They come from its matrix where it has the pair (it knows RDMA cards), else from
where both hang on the PCI bus (all cards). Where the two contradict each other, `disagreements` says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from netcheck.data_network import cards_of, chosen_iface, rdma_ports
from netcheck.facts.cpus import ranges
from r4090c.model import Cluster, Gpu, NetFact, Node, NodeFacts, PciDevice, RdmaPort, TopologyMatrix

CLASSES = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Nearest first: one switch, several, through the host bridge, between host bridges of a NUMA node, between NUMA nodes."""
OLD_NAMES = {"PSB": "PIX", "SOC": "SYS"}
"""Of drivers before 384."""


@dataclass(frozen=True, slots=True)
class NicPlace:
    """A network card's function. `name`: its RDMA device, else its interface. `numa` None = not known."""

    name: str
    pci: str
    numa: int | None
    netdevs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuPlace:
    """A GPU. `root`: domain and bus of its host bridge, "0000:40". `links`: name of a card -> class, None = not known."""

    index: int
    pci: str
    numa: int | None
    root: str | None
    links: Mapping[str, str | None]

    def nearest(self, usable: Collection[str] | None = None) -> tuple[str | None, tuple[str, ...]]:
        """Return the nearest class and the cards at that distance, of those named in `usable` (None = all)."""
        known = {name: link for name, link in self.links.items() if link in CLASSES and (usable is None or name in usable)}
        best = min(known.values(), key=lambda link: CLASSES.index(link or "SYS"), default=None)
        return best, tuple(name for name, link in known.items() if link == best)


@dataclass(frozen=True, slots=True)
class NodeTopology:
    """The GPUs by index and the network cards by PCI address. `gpu_links`: (index, index) -> class, lower index first."""

    gpus: tuple[GpuPlace, ...]
    nics: tuple[NicPlace, ...]
    gpu_links: Mapping[tuple[int, int], str | None]

    def link(self, one: int, other: int) -> str | None:
        """Return the class between two GPUs by index, in either order; None = not known."""
        return self.gpu_links.get((min(one, other), max(one, other)))


def node_topology(facts: NodeFacts) -> NodeTopology:
    """Return the topology of one node from what was read of it."""
    return arrange(facts.gpus.value or (), facts.pci.value or (), facts.gpu_topology.value)


def arrange(gpus: Sequence[Gpu], devices: Sequence[PciDevice], matrix: TopologyMatrix | None) -> NodeTopology:
    """Return who is how near to whom. A card that only the matrix or only the bus knows is there as well."""
    on_bus = {device.pci: device for device in devices}
    cards = {nic.name: nic for nic in (_nic(device) for device in devices if device.kind == "nic") if nic.name}
    columns = {device: column for column, device in (matrix.nics.items() if matrix else ()) if device}
    for name in columns:
        cards.setdefault(name, NicPlace(name, "", None))
    working = [gpu for gpu in gpus if gpu.index >= 0]

    def told(one: str, other: str | None) -> str | None:
        link = matrix.link(one, other) if matrix is not None and other is not None else None
        return OLD_NAMES.get(link, link) if link is not None else None

    places = []
    for gpu in working:
        device = on_bus.get(gpu.pci)
        links = {
            name: told(f"GPU{gpu.index}", columns.get(name)) or distance(device, on_bus.get(nic.pci))
            for name, nic in cards.items()
        }
        places.append(GpuPlace(gpu.index, gpu.pci, numa_of(gpu, device, matrix), _root(device) if device else None, links))
    pairs = {
        (one.index, other.index): told(f"GPU{one.index}", f"GPU{other.index}")
        or distance(on_bus.get(one.pci), on_bus.get(other.pci))
        for place, one in enumerate(working)
        for other in working[place + 1 :]
    }
    return NodeTopology(tuple(places), tuple(cards.values()), pairs)


def numa_of(gpu: Gpu, device: PciDevice | None, matrix: TopologyMatrix | None) -> int | None:
    """Return the NUMA node of a GPU: sysfs knows best, then the driver; None where the firmware is silent."""
    told = (device.numa if device else None, gpu.numa, matrix.numa.get(gpu.index) if matrix else None)
    return next((numa for numa in told if numa is not None and numa >= 0), None)


def distance(one: PciDevice | None, other: PciDevice | None) -> str | None:
    """Return the class between two devices by their bridges and NUMA nodes, None where these do not tell."""
    if one is None or other is None:
        return None
    shared = 0
    for mine, its in zip(one.upstream, other.upstream, strict=False):
        if mine != its:
            break
        shared += 1
    if shared:
        return "PIX" if max(len(one.upstream), len(other.upstream)) - shared <= 1 else "PXB"
    if _root(one) == _root(other):
        return "PHB"
    if one.numa is None or other.numa is None or min(one.numa, other.numa) < 0:
        return None
    return "NODE" if one.numa == other.numa else "SYS"


# --------------------------------------------------------------------------- what nvidia-smi and sysfs say differently

_ZONES = {
    "PIX": "below one switch",
    "PXB": "below one switch",
    "PHB": "one NUMA node",
    "NODE": "one NUMA node",
    "SYS": "NUMA nodes",
}
"""Classes that are told apart by naming only: how many bridges a switch is made of (PIX, PXB), and which roots of the bus are one
host bridge (PHB, NODE), is counted differently by driver, firmware and kernel. Neither changes a way or a rate."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """What nvidia-smi and sysfs (or two files of sysfs) say differently about one thing, which of them is used, and why.

    `about`: "gpu3", "gpu0-gpu1", "gpu5-mlx5_0", "mlx5_2" or a PCI address. `said`: (who, what), at least two.
    """

    about: str
    said: tuple[tuple[str, str], ...]
    used: str
    why: str

    @property
    def text(self) -> str:
        """The whole of it in a line."""
        return f"{self.about}: {', '.join(f'{what} ({who})' for who, what in self.said)}; used: {self.used}, {self.why}"


def disagreements(facts: NodeFacts) -> tuple[Disagreement, ...]:
    """Return where `nvidia-smi topo -m` contradicts sysfs; none where either was not read or is silent.

    Silence is no contradiction: NUMA -1 or N/A, a matrix without cards (nvidia-smi without libibverbs), a device straight on a
    root bus (a virtual machine hides the bridges), a card given to a virtual machine.
    """
    matrix, devices = facts.gpu_topology.value, facts.pci.value or ()
    if matrix is None:
        return ()
    on_bus = {device.pci: device for device in devices}
    working = [gpu for gpu in facts.gpus.value or () if gpu.index >= 0]
    found = [*_gpus_apart(facts, matrix, working), *_nics_apart(matrix, devices)]
    for gpu in working:
        differing = tuple(_numa_apart(facts, matrix, gpu, on_bus.get(gpu.pci)))
        found += differing
        if differing and gpu.pci in on_bus:  # said once: its NUMA node tells nothing about its ways any more
            on_bus[gpu.pci] = replace(on_bus[gpu.pci], numa=None)
    for place, one in enumerate(working):
        for other in working[place + 1 :]:
            told = matrix.link(f"GPU{one.index}", f"GPU{other.index}")
            found += _class_apart(f"gpu{one.index}-gpu{other.index}", told, on_bus.get(one.pci), on_bus.get(other.pci))
        for column, name in matrix.nics.items():
            card = next((device for device in devices if name and name in device.hcas), None)
            told = matrix.link(f"GPU{one.index}", column)
            found += _class_apart(f"gpu{one.index}-{name}", told, on_bus.get(one.pci), card)
    return tuple(found)


def _gpus_apart(facts: NodeFacts, matrix: TopologyMatrix, working: Sequence[Gpu]) -> Iterator[Disagreement]:
    """Yield the GPUs that only one of matrix, list and bus knows."""
    for index in sorted({gpu.index for gpu in working} ^ set(matrix.gpus)) if facts.gpus.known else ():
        listed = any(gpu.index == index for gpu in working)
        said = (("nvidia-smi topo -m", "missing" if listed else "there"), ("nvidia-smi", "there" if listed else "missing"))
        used = "it, with what sysfs tells" if listed else "not at all"
        yield Disagreement(f"gpu{index}", said, used, "a rank can only drive a GPU that the driver lists")
    known = {gpu.pci for gpu in facts.gpus.value or ()}
    for device in facts.pci.value or ():
        given_away = device.driver is not None and device.driver.startswith("vfio")
        if facts.gpus.known and device.kind == "gpu" and device.pci not in known and not given_away:
            said = (("sysfs", f"a GPU, driver {device.driver or 'none'}"), ("nvidia-smi", "missing"))
            yield Disagreement(device.pci, said, "not at all", "a rank can only drive a GPU that the driver lists")


def _nics_apart(matrix: TopologyMatrix, devices: Sequence[PciDevice]) -> Iterator[Disagreement]:
    """Yield the RDMA cards that only one of matrix and bus knows, where both know any."""
    hcas = {name for device in devices if device.kind == "nic" for name in device.hcas}
    told = {name for name in matrix.nics.values() if name}
    if not hcas or not told or "" in matrix.nics.values():
        return
    for name in sorted(hcas ^ told):
        said = (("sysfs", "there" if name in hcas else "missing"), ("nvidia-smi", "there" if name in told else "missing"))
        yield Disagreement(name, said, "sysfs" if name in hcas else "nvidia-smi", "it is the one that knows the card")


def _numa_apart(facts: NodeFacts, matrix: TopologyMatrix, gpu: Gpu, device: PciDevice | None) -> Iterator[Disagreement]:
    """Yield what is said differently about the NUMA node and the near CPUs of a GPU."""
    of_sysfs = next(
        (numa for numa in (device.numa if device else None, gpu.numa) if numa is not None and numa >= 0),
        None,
    )
    of_driver = matrix.numa.get(gpu.index)
    about = f"gpu{gpu.index}"
    if of_sysfs is not None and of_driver is not None and of_sysfs != of_driver:
        said = (("sysfs", f"NUMA {of_sysfs}"), ("nvidia-smi", f"NUMA {of_driver}"))
        yield Disagreement(about, said, f"NUMA {of_sysfs}", "the kernel places memory by it")
        return
    numa = of_sysfs if of_sysfs is not None else of_driver
    cpus = facts.cpus.value
    here = next((set(one.cpus) for one in cpus.numa if one.index == numa), set()) if cpus is not None else set()
    near = set(matrix.cpu_affinity.get(gpu.index) or ())
    if here and near and not here & near:
        said = (("sysfs", f"CPUs {ranges(here)} of NUMA {numa}"), ("nvidia-smi", f"CPUs {ranges(near)}"))
        yield Disagreement(about, said, f"CPUs {ranges(here)}", "the kernel schedules by it")


def _class_apart(about: str, told: str | None, one: PciDevice | None, other: PciDevice | None) -> Iterator[Disagreement]:
    """Yield what is said differently about the way between two devices."""
    if told is None or one is None or other is None or not one.upstream or not other.upstream:
        return
    told, found = OLD_NAMES.get(told, told), distance(one, other)
    if told not in _ZONES or found is None or _ZONES[told] == _ZONES[found]:
        return
    silent = [device for device in (one, other) if device.numa is None or device.numa < 0]
    if silent and "SYS" in (told, found):  # what tells these two classes apart is not told
        return
    sight = {
        "PHB": f"both below host bridge {_root(one)}",
        "NODE": f"NUMA {one.numa}, host bridges {_root(one)} and {_root(other)}",
        "SYS": f"NUMA {one.numa} and {other.numa}",
    }.get(found, f"both below bridge {one.upstream[0]}")
    said = (("nvidia-smi", told), ("sysfs", f"{found}: {sight}"))
    yield Disagreement(about, said, told, "as the driver also knows bridges that sysfs does not show; NCCL goes by sysfs")


# --------------------------------------------------------------------------- what shares a way to the processor

GEN_OF_GT_S = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""GT/s -> generation: PCI Express Base Specification 6.0, 8.3."""
PRACTICE = 0.8
"""Share of a link's rate after coding that copies reach: 25.2 of 31.5 GB/s for x16 of generation 4, where 25 to 26 are usual
between host and an RTX 4090 (see Expect.gpu_copy_warn_gbyte_s), and 12.6 of 15.8 for x8 or generation 3."""


@dataclass(frozen=True, slots=True)
class Link:
    """A PCIe link at its best: what card and slot can do, not what an idle link does. None = not told.

    `width`: lanes it has now; `width_max`: those that card and slot have.
    """

    gen: int | None
    width: int | None
    width_max: int | None

    @property
    def text(self) -> str:
        """The link in words: "gen 4 x16", "gen 4 x8 of x16", "" when nothing is told."""
        lost = f" of x{self.width_max}" if self.lanes_lost else ""
        words = [f"gen {self.gen}" if self.gen else "", f"x{self.width}{lost}" if self.width else ""]
        return " ".join(filter(None, words))

    @property
    def lanes_lost(self) -> bool:
        """True when the link has fewer lanes than card and slot have."""
        return self.width is not None and self.width_max is not None and self.width < self.width_max

    @property
    def rate_gbyte_s(self) -> float | None:
        """What copies over it reach one way, GB/s; None when it is not told."""
        return practice_gbyte_s(self.gen, self.width)


def practice_gbyte_s(gen: int | None, width: int | None) -> float | None:
    """Return what copies over a PCIe link reach one way, GB/s; 25.2 for x16 of generation 4."""
    speed = next((speed for speed, number in GEN_OF_GT_S.items() if number == gen), None)
    if speed is None or width is None:
        return None
    coding = 8 / 10 if speed <= 5 else 128 / 130 if speed <= 32 else 242 / 256
    return width * speed * coding / 8 * PRACTICE


def link_of(device: PciDevice) -> Link:
    """Return the link of a card at its best: the lanes it has, the generation that card and slot have."""
    speeds = [speed for speed in (device.speed_max_gt_s, device.upstream_speed_max_gt_s) if speed is not None]
    widths = [width for width in (device.width_max, device.upstream_width_max) if width is not None]
    widest = min(widths, default=None)
    return Link(GEN_OF_GT_S.get(min(speeds)) if speeds else None, device.width or widest, widest)


@dataclass(frozen=True, slots=True)
class Share:
    """What several cards have in common on their way to the processor.

    `kind`: "switch" (they share its uplink), "host bridge" (each has a root port of its own, so nothing is shared but the
    processor). `at`: PCI address of the switch's uppermost bridge, or domain and bus of the host bridge. `gpus`: indices;
    `nics`: names, those of one card joined by "+". `uplink`: the link in common, None for a host bridge; what is read of a node
    does not tell it, so it is taken for as good as the best link below. `each_gbyte_s`: member ("gpu0", "mlx5_0+mlx5_1") -> what
    it moves one way (alone, all at once).
    """

    kind: str
    at: str
    gpus: tuple[int, ...]
    nics: tuple[str, ...]
    uplink: Link | None
    each_gbyte_s: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Slot:
    """One card in one slot: a GPU or a network card with all its functions. `index` None: a network card.

    `rate_gbit_s`: of the ports of a network card together, None = not told.
    """

    pci: str
    index: int | None
    names: tuple[str, ...]
    numa: int | None
    upstream: tuple[str, ...]
    root: str
    link: Link
    rate_gbit_s: float | None = None

    @property
    def name(self) -> str:
        """What the card is called: "gpu0", or its functions "mlx5_0+mlx5_1", the first three."""
        if self.index is not None:
            return f"gpu{self.index}"
        return "+".join(self.names[:3]) + (f"+{len(self.names) - 3}" if len(self.names) > 3 else "")

    @property
    def needs_gbyte_s(self) -> float | None:
        """What it moves when nothing is in its way: its link's rate, a network card at most its ports'; None = not told."""
        if self.index is None and not self.rate_gbit_s:
            return None
        rates = [self.link.rate_gbyte_s, self.rate_gbit_s / 8 if self.rate_gbit_s else None]
        return min((rate for rate in rates if rate is not None), default=None)


def slots(facts: NodeFacts) -> tuple[Slot, ...]:
    """Return the GPUs by index and the network cards by address that are on the bus; a card without a name is left out."""
    devices = facts.pci.value or ()
    on_bus = {device.pci: device for device in devices}
    found = []
    for gpu in sorted(facts.gpus.value or (), key=lambda gpu: gpu.index):
        device = on_bus.get(gpu.pci)
        if gpu.index >= 0 and device is not None:
            numa = numa_of(gpu, device, facts.gpu_topology.value)
            found.append(Slot(gpu.pci, gpu.index, (), numa, device.upstream, _root(device), link_of(device)))
    cards: dict[tuple[str, ...], list[PciDevice]] = {}
    for device in devices:
        if device.kind == "nic" and (device.hcas or device.netdevs):
            # functions of one card, virtual ones too, are on the bus below its port
            place = (*device.upstream, device.pci.rpartition(":")[0] if device.upstream else device.pci.rpartition(".")[0])
            cards.setdefault(place, []).append(device)
    for functions in cards.values():
        first = functions[0]
        names = tuple(dict.fromkeys(next(iter((*one.hcas, *one.netdevs))) for one in functions))
        rates = [rate for one in functions if (rate := rate_gbit_s(one, facts.net.value, facts.rdma.value or ())) is not None]
        numa = first.numa if first.numa is not None and first.numa >= 0 else None
        rate = sum(rates) if rates else None
        found.append(Slot(first.pci, None, names, numa, first.upstream, _root(first), link_of(first), rate))
    return tuple(found)


def shared(facts: NodeFacts) -> tuple[Share, ...]:
    """Return what cards share on their way to the processor where a GPU is among them: switches first, then host bridges.

    All members move data one way at once; the uplink of a switch is divided fairly: who needs less than an equal part leaves the
    rest to the others (max-min). The processor itself is not counted, nor what a virtual machine hides.
    """
    cards = slots(facts)
    found = []
    for bridge in dict.fromkeys(bridge for card in cards for bridge in card.upstream):
        below = [card for card in cards if bridge in card.upstream]
        branches = {card.upstream[card.upstream.index(bridge) + 1 :][:1] or (card.pci,) for card in below}
        if len(branches) > 1 and any(card.index is not None for card in below):
            found.append(_switch(bridge, below))
    for root in dict.fromkeys(card.root for card in cards):
        here = [card for card in cards if card.root == root]
        ports = {card.upstream[:1] for card in here}
        if len(ports) > 1 and () not in ports and any(card.index is not None for card in here):
            each = {card.name: (need, need) for card in here if (need := card.needs_gbyte_s) is not None}
            found.append(Share("host bridge", root, _gpus(here), _nics(here), None, each))
    return tuple(found)


def _switch(bridge: str, below: Sequence[Slot]) -> Share:
    links = [card.link for card in below if card.link.rate_gbyte_s is not None]
    best = max(links, key=lambda link: practice_gbyte_s(link.gen, link.width_max) or 0.0, default=None)
    uplink = Link(best.gen, best.width_max, best.width_max) if best is not None else None
    needs = {card.name: need for card in below if (need := card.needs_gbyte_s) is not None}
    parts = fair(needs, (uplink.rate_gbyte_s if uplink else None) or 0.0)
    each = {name: (needs[name], part) for name, part in parts.items()}
    return Share("switch", bridge, _gpus(below), _nics(below), uplink, each)


def fair(needs: Mapping[str, float], room: float) -> dict[str, float]:
    """Return what each gets of `room` when all want their `needs` at once: max-min fairness."""
    parts: dict[str, float] = {}
    for place, name in enumerate(sorted(needs, key=lambda name: needs[name])):
        parts[name] = min(needs[name], room / (len(needs) - place))
        room -= parts[name]
    return {name: parts[name] for name in needs}


def _gpus(cards: Sequence[Slot]) -> tuple[int, ...]:
    return tuple(card.index for card in cards if card.index is not None)


def _nics(cards: Sequence[Slot]) -> tuple[str, ...]:
    return tuple(card.name for card in cards if card.index is None)


# --------------------------------------------------------------------------- in which order

COSTS = {"PIX": 1, "PXB": 2, "PHB": 4, "NODE": 8, "SYS": 16}
"""est.: what a link costs a ring. Only the order matters where the classes nest, as on all boxes seen; each doubles, as a ring is
as fast as its slowest link and many links share the way between NUMA nodes."""
EXACT_RING_GPUS = 10
"""Up to here every ring is considered: 9 · 8 · 2^7 steps, 5 ms, and 0.6 ms for 8 GPUs (measured 2026-11-30)."""


def ring(topology: NodeTopology) -> tuple[int, ...]:
    """Return the GPU indices in an order in which neighbours, the last and the first too, are as near as possible.

    It has the least sum of COSTS (a pair whose class is not known counts as SYS, NVLink nothing). The order of the indices where
    no other is better: an order of ranks that is not that of the bus must have a reason. Else it begins at the lowest index and
    has its farthest link at the end, as between several nodes the network takes that one's place. Beyond EXACT_RING_GPUS a good
    ring, not always the best.
    """
    indices = tuple(sorted(place.index for place in topology.gpus))
    if len(indices) <= 3:  # all rings are one
        return indices
    cost = [[_cost(topology.link(one, other)) for other in indices] for one in indices]
    order = _best_ring(cost) if len(indices) <= EXACT_RING_GPUS else _good_ring(cost)
    best = tuple(indices[place] for place in order)
    return best if ring_cost(topology, best) < ring_cost(topology, indices) else indices


def ring_cost(topology: NodeTopology, order: Sequence[int]) -> int:
    """Return the sum of COSTS over the links of a ring, the one from the last GPU to the first too; 0 for fewer than two GPUs."""
    if len(order) < 2:
        return 0
    return sum(_cost(topology.link(one, other)) for one, other in zip(order, (*order[1:], order[0]), strict=True))


def _cost(link: str | None) -> int:
    return 0 if link is not None and link.startswith("NV") else COSTS.get(link or "SYS", COSTS["SYS"])


def _best_ring(cost: Sequence[Sequence[int]]) -> list[int]:
    """Return the cheapest ring that begins at 0, by dynamic programming over subsets (Held and Karp, 1962).

    Among equals the one whose last link is the farthest, then the first in order.
    """
    count = len(cost)
    everyone = (1 << count) - 1
    much = 1 + max(map(max, cost))  # a cheaper ring counts more than any last link
    # rest[seen][last]: the least cost of visiting all who are not in `seen`, coming from `last`, and returning to 0
    rest: list[list[int]] = [[]] * (everyone + 1)
    rest[everyone] = [row[0] * much - row[0] for row in cost]
    for seen in range(everyone - 2, 0, -2):
        ways = [(place, rest[seen | 1 << place][place]) for place in range(count) if not seen >> place & 1]
        rest[seen] = [
            min(row[place] * much + way for place, way in ways) if seen >> last & 1 else 0 for last, row in enumerate(cost)
        ]
    order, seen = [0], 1
    while seen != everyone:
        last = order[-1]
        left = [place for place in range(count) if not seen >> place & 1]
        order.append(min(left, key=lambda place: (cost[last][place] * much + rest[seen | 1 << place][place], place)))
        seen |= 1 << order[-1]
    return order


def _good_ring(cost: Sequence[Sequence[int]]) -> list[int]:
    """Return the ring of going to the nearest next, each part of it turned round where that is cheaper (2-opt)."""
    count = len(cost)
    order, left = [0], list(range(1, count))
    while left:
        order.append(min(left, key=lambda place: (cost[order[-1]][place], place)))
        left.remove(order[-1])
    better = True
    while better:
        better = False
        for start in range(1, count - 1):
            for end in range(start + 1, count):
                before, after = order[start - 1], order[(end + 1) % count]
                gain = cost[before][order[start]] + cost[order[end]][after] - cost[before][order[end]] - cost[order[start]][after]
                if gain > 0:
                    order[start : end + 1] = reversed(order[start : end + 1])
                    better = True
    return order


# --------------------------------------------------------------------------- the data network


def data_cards(
    node: Node, cluster: Cluster, devices: Sequence[PciDevice], net: NetFact | None, ports: Sequence[RdmaPort]
) -> tuple[PciDevice, ...]:
    """Return the network cards that carry the training traffic of `node`; none where that cannot be told."""
    iface = chosen_iface(net, node, cluster) if net is not None else None
    hcas = {port.hca for port in rdma_ports(node, ports, net, iface.name if iface else None, cluster)}
    names = {iface.name, *(card.name for card in cards_of(iface, net))} if iface is not None and net is not None else set()
    return tuple(
        device
        for device in devices
        if device.kind == "nic" and (hcas.intersection(device.hcas) or names.intersection(device.netdevs))
    )


def rate_gbit_s(card: PciDevice, net: NetFact | None, ports: Sequence[RdmaPort]) -> float | None:
    """Return the rate of the fastest port of a card's function that is in use, None when none tells it."""
    rates = [port.rate_gbit_s for port in ports if port.hca in card.hcas and "ACTIVE" in port.state]
    ifaces = net.ifaces if net is not None else ()
    rates += [iface.speed_mbit_s / 1000 for iface in ifaces if iface.name in card.netdevs and iface.speed_mbit_s]
    return max((rate for rate in rates if rate is not None), default=None)


def _nic(device: PciDevice) -> NicPlace:
    name = next(iter((*device.hcas, *device.netdevs)), "")
    numa = device.numa if device.numa is not None and device.numa >= 0 else None
    return NicPlace(name, device.pci, numa, device.netdevs)


def _root(device: PciDevice) -> str:
    return (device.upstream[0] if device.upstream else device.pci).rpartition(":")[0]
