"""Whether each GPU's NUMA node is known and its traffic takes the nearest network card, and which card that is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from netcheck.checks._wording import listed, on
from netcheck.facts.cpus import ranges
from netcheck.topology import CLASSES, NodeTopology, arrange, data_cards, rate_gbit_s
from r4090c.model import Cluster, CpuFact, Finding, Gpu, NetFact, Node, PciDevice, RdmaPort, Status, TopologyMatrix

ID, GROUP, NEEDS = "gpu-topology", "topology", ("gpu_topology", "gpus")
OPTIONAL = ("pci", "cpus", "net", "rdma")
ABSENT = Status.UNKNOWN
RULE = (
    "the firmware tells each GPU's NUMA node, sysfs and driver agree on it, and no GPU reaches the data network across NUMA nodes"
    " (SYS) while an equal card is nearer"
)
SOURCE = "nvidia-smi topo -m; SYS alone is normal on two sockets, with or without a card on each"


def applies(node: Node, cluster: Cluster) -> bool:
    """A node with `gpus: 0` has no GPU to place."""
    return node.gpus > 0


def check(
    node: Node,
    matrix: TopologyMatrix,
    gpus: tuple[Gpu, ...],
    devices: tuple[PciDevice, ...] | None,
    cpus: CpuFact | None,
    net: NetFact | None,
    rdma: tuple[RdmaPort, ...] | None,
    cluster: Cluster,
) -> Iterator[Finding]:
    """Yield one Finding per fault, else one pass with the plan: which card serves which GPU."""
    topology = arrange(gpus, devices or (), matrix)
    several = cpus is not None and sum(bool(one.cpus) for one in cpus.numa) > 1
    used = data_cards(node, cluster, devices or (), net, rdma or ())
    names = {nic.name for nic in topology.nics if any(nic.pci == card.pci for card in used)}
    faults = 0
    silent = [f"gpu{place.index}" for place in topology.gpus if place.numa is None]
    if several and silent:
        faults += 1
        why = "its ranks cannot be put on the near CPUs. The firmware does not tell: update it, or look for its NUMA setting"
        remedy = on(node, "grep . /sys/bus/pci/drivers/nvidia/*/numa_node")
        yield Finding(
            ID, node.name, Status.WARN, f"NUMA node of {listed(silent)} not told (-1)", "the NUMA node of each", why, remedy
        )
    differing = list(_differing(gpus, devices or (), matrix))
    if differing:
        faults += 1
        why = "the CPU plan goes by sysfs; one of the two is wrong, and ranks on the far CPUs run slower"
        expected = "sysfs and driver agree"
        remedy = on(node, "nvidia-smi topo -m ; grep . /sys/bus/pci/drivers/nvidia/*/numa_node")
        yield Finding(ID, node.name, Status.WARN, listed(differing), expected, why, remedy)
    nearer = _nearer(topology, names, _equals(used, devices or (), net, rdma or ()))
    if nearer:
        faults += 1
        near = listed(f"gpu{index} is {link} to {nic}" for index, link, nic in nearer)
        observed = f"SYS to {listed(sorted(names))}, but {near}"
        why = "gradients cross between NUMA nodes, and a card as fast is on the near side: put that one on the data network too"
        remedy = on(node, "nvidia-smi topo -m ; ip -br addr")
        yield Finding(ID, node.name, Status.WARN, observed, "the nearest card carries the data network", why, remedy)
    if not faults:
        yield Finding(ID, node.name, Status.PASS, plan(topology, names), "NUMA nodes known, the nearest card in use")


def plan(topology: NodeTopology, used: set[str]) -> str:
    """Return which of the cards in `used` serves which GPU, and how near: "gpu5 mlx5_0 (PHB); gpu0-4,6,7 mlx5_0 (SYS)"."""
    groups: dict[str, list[int]] = {}
    for place in topology.gpus:
        link, cards = place.nearest(used)
        groups.setdefault(f"{cards[0]} ({link})" if cards else "", []).append(place.index)
    if set(groups) <= {""}:
        return f"{len(topology.gpus)} GPUs; no distance to a card of the data network is told"
    order = sorted(groups, key=lambda words: (len(CLASSES) if not words else CLASSES.index(words.rpartition("(")[2][:-1]), words))
    return "; ".join(f"gpu{ranges(groups[words])} {words or 'distance not told'}" for words in order)


def _equals(used: Sequence[PciDevice], devices: Sequence[PciDevice], net: NetFact | None, rdma: Sequence[RdmaPort]) -> set[str]:
    """Return the cards outside `used` that work and are as fast as the slowest of them, by name."""
    rates = {device.pci: rate_gbit_s(device, net, rdma) for device in devices if device.kind == "nic"}
    needed = min((rate for device in used if (rate := rates.get(device.pci)) is not None), default=None)
    if needed is None:
        return set()
    pcis = {device.pci for device in used}
    return {
        next(iter((*device.hcas, *device.netdevs)), "")
        for device in devices
        if device.pci not in pcis and (rates.get(device.pci) or 0) >= needed
    }


def _nearer(topology: NodeTopology, used: set[str], equals: set[str]) -> list[tuple[int, str, str]]:
    """Return (index, class, card) of the GPUs that cross NUMA nodes to the data network while one of `equals` is nearer."""
    found = []
    for place in topology.gpus:
        link, cards = place.nearest(equals)
        if place.nearest(used)[0] == "SYS" and link is not None and link != "SYS":
            found.append((place.index, link, cards[0]))
    return found


def _differing(gpus: Sequence[Gpu], devices: Sequence[PciDevice], matrix: TopologyMatrix) -> Iterator[str]:
    for gpu in gpus:
        of_bus = next((device.numa for device in devices if device.pci == gpu.pci), gpu.numa)
        of_driver = matrix.numa.get(gpu.index)
        if of_bus is not None and of_bus >= 0 and of_driver is not None and of_bus != of_driver:
            yield f"gpu{gpu.index}: NUMA node {of_bus} (sysfs), {of_driver} (nvidia-smi)"
