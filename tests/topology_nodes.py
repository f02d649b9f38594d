"""Nodes whose topology is known: what their facts say, from recorded matrices and buses made of a few words.

`python -m tests.topology_nodes` writes the golden drawings in tests/golden/topology; read their diff before it is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from netcheck import probe
from netcheck.facts import pci
from netcheck.facts.question import Reply
from netcheck.tools import nvidia_smi_topo
from netcheck.topology_drawing import Picture, picture_of, text
from r4090c.model import Cluster, CpuFact, Fact, Gpu, Iface, NetFact, NodeFacts, NumaNode, PciDevice, TopologyMatrix
from tests.lab.gpus import GpuBox
from tests.launch.facts_of import cluster_of, facts_of, gpu_of, node_of

GOLDEN = Path(__file__).parent / "golden" / "topology"
RECORDED = Path(__file__).parent / "tools" / "fixtures" / "nvidia-smi-topo"
NPS4 = "8x4090-gpu0-on-numa3-one-gpu-near-nics.txt"
TWO_SOCKETS = "8gpu-2socket-node-sys-2nic-tabs.txt"
SWITCHES = "8gpu-10nic-tabs-trailing.txt"
WHOLE = (NPS4, TWO_SOCKETS, SWITCHES, "1gpu-ansi-header.txt", "2gpu-numa-NA.txt", "4gpu-indented-legend-wrapped.txt")
OLD_DRIVER = "4gpu-old-driver-nic-names-in-header.txt"


def recorded(name: str) -> TopologyMatrix:
    return nvidia_smi_topo.parse((RECORDED / name).read_text())


def device(pci_: str, *upstream: str, numa: int | None = 0, kind: str = "gpu", width: int = 16, **more: object) -> PciDevice:
    """A card at x16 of generation 4 in such a slot; idle, so at generation 1 now."""
    vendor = "10de" if kind == "gpu" else "15b3"
    slot = {"upstream_width_max": 16, "upstream_speed_max_gt_s": 16.0} if upstream else {}
    return PciDevice(pci_, kind, vendor, width, 16, 2.5, 16.0, numa, upstream, **{**slot, **more})  # type: ignore[arg-type]


def cpus(numa: Sequence[Sequence[int]], sockets: int, memory_mib: int = 64_000) -> Fact[CpuFact]:
    """`numa`: the first of the two threads of each core, by NUMA node; the second is as many further on as there are cores."""
    cores = sum(map(len, numa))
    threads = [tuple(sorted((*mine, *(cpu + cores for cpu in mine)))) for mine in numa]
    everything = tuple(range(2 * cores))
    pairs = tuple((cpu, cpu + cores) for cpu in range(cores))
    nodes = tuple(NumaNode(index, mine, memory_mib) for index, mine in enumerate(threads))
    return Fact(CpuFact("AMD EPYC 7402", everything, everything, everything, pairs, sockets, nodes, None))


def net(data: str | None = "eth0", *others: str, mbit_s: int = 100_000) -> Fact[NetFact]:
    names = [name for name in (data, *others) if name]
    ifaces = tuple(Iface(name, "up", 9000, mbit_s, "02:00:00:00:00:01", (), False) for name in names)
    return Fact(NetFact(ifaces, {f"10.0.0.{n}": (data, None) for n in (1, 2)} if data else {}, {}))


def make(
    gpus: Sequence[Gpu],
    devices: Sequence[PciDevice],
    matrix: TopologyMatrix | None,
    processors: Fact[CpuFact],
    network: Fact[NetFact] | None = None,
    name: str = "node01",
) -> NodeFacts:
    told: Fact[TopologyMatrix] = Fact(matrix) if matrix is not None else Fact(error="not a matrix: it is cut")
    base = facts_of(name, net=network or net(), cpus=processors, gpus=Fact(tuple(gpus)))
    return replace(base, pci=Fact(tuple(devices)), gpu_topology=told)


def cluster(kind: str = "tcp", gpus: int = 8) -> Cluster:
    return cluster_of([node_of(f"node{n:02d}", f"10.0.0.{n}", gpus) for n in (1, 2)], kind)


def box(changed: GpuBox | None = None, name: str = "node01") -> NodeFacts:
    """The lab's box: two sockets, NPS4, GPU 0 on NUMA node 3, four ports of two cards near GPU 5."""
    made = changed or GpuBox()
    with TemporaryDirectory() as folder:
        said = probe.native_pci(str(made.write_pci(Path(folder))))
    gpus = [gpu_of(card.index, card.pci, card.numa) for card in made.working]
    twelve = [list(range(start, start + 12)) for start in range(0, 96, 12)]
    return make(gpus, pci.parse(Reply(natives={"pci": said})), recorded(NPS4), cpus(twelve, 2), name=name)


def two_sockets() -> NodeFacts:
    """Four GPUs a socket, each below a host bridge of its own; a card with two ports on the second socket."""
    buses = ("01", "21", "41", "61", "81", "a1", "c1", "e1")
    devices = [
        device(f"0000:{bus}:00.0", f"0000:{int(bus, 16) - 1:02x}:01.1", numa=number // 4) for number, bus in enumerate(buses)
    ]
    devices += [
        device(f"0000:98:00.{function}", "0000:97:01.1", numa=1, kind="nic", hcas=(f"rocep152s0f{function}",), netdevs=(name,))
        for function, name in enumerate(("eth0", "enp152s0f1"))
    ]
    gpus = [gpu_of(number, f"0000:{bus}:00.0", number // 4) for number, bus in enumerate(buses)]
    return make(gpus, devices, recorded(TWO_SOCKETS), cpus([range(26), range(26, 52)], 2))


def interleaved() -> NodeFacts:
    """Eight GPUs whose order on the bus changes sockets at every step: 0, 2, 4, 6 on socket 0, the others on socket 1."""
    gpus = [gpu_of(number, f"0000:{number:02x}:00.0", number % 2) for number in range(1, 9)]
    gpus = [replace(gpu, index=number) for number, gpu in enumerate(gpus)]
    devices = [device(gpu.pci, f"0000:f{gpu.index}:01.1", numa=gpu.index % 2) for gpu in gpus]
    return replace(
        make(gpus, devices, None, cpus([range(16), range(16, 32)], 2), net(None)),
        gpu_topology=Fact(absent="nvidia-smi"),
    )


def silent() -> NodeFacts:
    """Two GPUs whose firmware tells no NUMA node (-1) and a driver that says N/A, on a board with one NUMA node."""
    devices = [device(f"0000:0{bus}:00.0", f"0000:00:0{bus}.1", numa=-1) for bus in (1, 2)]
    gpus = [gpu_of(number, f"0000:0{number + 1}:00.0", -1) for number in (0, 1)]
    return make(gpus, devices, recorded("2gpu-numa-NA.txt"), cpus([range(10)], 1), net("enp5s0"))


def switch() -> NodeFacts:
    """Two GPUs and a card of 100 Gbit/s below one switch of four ports, a third GPU on a root port of the same host bridge."""
    above = ("0000:00:01.0", "0000:01:00.0")
    devices = [
        device("0000:03:00.0", *above, "0000:02:08.0"),
        device("0000:04:00.0", *above, "0000:02:10.0"),
        device("0000:05:00.0", *above, "0000:02:18.0", kind="nic", hcas=("mlx5_0",), netdevs=("eth0",)),
        device("0000:06:00.0", "0000:00:1c.4", width=8),
    ]
    gpus = [gpu_of(number, pci_, 0) for number, pci_ in enumerate(("0000:03:00.0", "0000:04:00.0", "0000:06:00.0"))]
    return make(gpus, devices, None, cpus([range(16)], 1))


def one_gpu() -> NodeFacts:
    devices = [
        device("0000:01:00.0", "0000:00:01.1"),
        device("0000:05:00.0", "0000:00:1c.0", kind="nic", netdevs=("eth0",)),
    ]
    return make([gpu_of(0, "0000:01:00.0", 0)], devices, recorded("1gpu-ansi-header.txt"), cpus([range(16)], 1))


def ten_cards() -> NodeFacts:
    """Four pairs of GPUs, each below a switch with two cards, and a card with two ports elsewhere: ten NICs in the matrix."""
    devices: list[PciDevice] = []
    gpus: list[Gpu] = []
    for pair in range(4):
        root, numa = 0x10 + 0x40 * pair, 2 * pair + 1
        above = (f"0000:{root:02x}:01.1", f"0000:{root + 1:02x}:00.0")
        for place in range(4):
            bus = f"0000:{root + 3 + place:02x}:00.0"
            port = f"0000:{root + 2:02x}:{place:02x}.0"
            if place < 2:
                devices.append(device(bus, *above, port, numa=numa))
                gpus.append(gpu_of(len(gpus), bus, numa))
            else:
                number = 2 * pair + place - 2
                devices.append(
                    device(bus, *above, port, numa=numa, kind="nic", hcas=(f"mlx5_{number}",), netdevs=(f"ib{number}",))
                )
    for number in (0, 1):
        hcas = (f"mlx5_bond_{number}",)
        devices.append(device(f"0000:09:00.{number}", "0000:08:01.1", numa=0, kind="nic", hcas=hcas, netdevs=(f"eth{number}",)))
    fourteen = [list(range(start, start + 14)) for start in range(0, 112, 14)]
    return make(gpus, devices, recorded(SWITCHES), cpus(fourteen, 2))


def cut_matrix() -> NodeFacts:
    """A box whose matrix is cut: the bus tells the classes."""
    return replace(two_sockets(), gpu_topology=Fact(error="row GPU5 has 3 of 8 cells: cut"))


def without_gpus() -> NodeFacts:
    """A node of CPUs: two NUMA nodes and one card."""
    devices = [device("0000:41:00.0", "0000:40:01.1", numa=1, kind="nic", netdevs=("eth0",))]
    base = make((), devices, None, cpus([range(8), range(8, 16)], 2))
    return replace(base, gpus=Fact(absent="nvidia-smi"), gpu_topology=Fact(absent="nvidia-smi"))


NODES: dict[str, Callable[[], NodeFacts]] = {
    "box": box,
    "two-sockets": two_sockets,
    "interleaved": interleaved,
    "silent": silent,
    "switch": switch,
    "one-gpu": one_gpu,
    "ten-cards": ten_cards,
    "cut-matrix": cut_matrix,
    "without-gpus": without_gpus,
}


def picture(name: str) -> Picture:
    """What is drawn of one of NODES, as the first node of a cluster."""
    wish = cluster(gpus=0 if name == "without-gpus" else 8)
    return picture_of(wish.nodes[0], wish, NODES[name]())


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in NODES:
        (GOLDEN / f"{name}.txt").write_text(text([picture(name)]))
