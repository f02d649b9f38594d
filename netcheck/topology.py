"""Which network card is near which GPU, and the NUMA node of each. Pure.

The classes are those of `nvidia-smi topo -m`. They come from its matrix where it has the pair (it knows RDMA cards), else from
where both hang on the PCI bus (all cards).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from netcheck.data_network import cards_of, chosen_iface, rdma_ports
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
