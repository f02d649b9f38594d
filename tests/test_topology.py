"""Who is near whom: from the matrix, from the bus, from both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from netcheck.checks.gpu_topology import plan
from netcheck.tools import nvidia_smi_topo
from netcheck.topology import arrange, data_cards, distance, node_topology
from r4090c.model import Cluster, Expect, Fact, Gpu, Iface, NetFact, Network, Node, Paths, PciDevice, RdmaPort, Ssh, Storage
from tests.launch.facts_of import facts_of, gpu_of

RECORDED = Path(__file__).parent / "tools" / "fixtures" / "nvidia-smi-topo"
SERVER = nvidia_smi_topo.parse((RECORDED / "8x4090-gpu0-on-numa3-one-gpu-near-nics.txt").read_text())
GPUS = tuple(gpu_of(index, f"0000:{index + 1:02x}:00.0", None) for index in range(8))


def device(pci: str, *upstream: str, numa: int | None = 0, kind: str = "gpu", **more: object) -> PciDevice:
    return PciDevice(pci, kind, "10de", 16, 16, 16.0, 16.0, numa, upstream, **more)  # type: ignore[arg-type]


def test_the_server_whose_gpu_0_is_on_numa_node_3() -> None:
    found = arrange(GPUS, (), SERVER)
    assert [place.numa for place in found.gpus] == [3, 2, 0, 1, 7, 6, 4, 5]
    assert [nic.name for nic in found.nics] == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]
    assert found.gpus[5].nearest() == ("PHB", ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"))
    assert found.gpus[0].nearest({"mlx5_1"}) == ("SYS", ("mlx5_1",))
    assert found.gpu_links[0, 7] == "SYS"
    assert plan(found, {"mlx5_1"}) == "gpu5 mlx5_1 (PHB); gpu0-4,6-7 mlx5_1 (SYS)"
    assert plan(found, set()) == "8 GPUs; no distance to a card of the data network is told"


def test_sysfs_knows_better_than_the_driver_and_the_driver_better_than_nobody() -> None:
    bus = (device(GPUS[0].pci, "0000:00:01.1", numa=1), device(GPUS[1].pci, "0000:00:02.1", numa=-1))
    found = arrange(GPUS, bus, SERVER)
    assert [place.numa for place in found.gpus][:3] == [1, 2, 0]
    assert found.gpus[0].root == "0000:00"
    assert arrange(GPUS[:1], (device(GPUS[0].pci, numa=-1),), None).gpus[0].numa is None


@pytest.mark.parametrize(
    ("one", "other", "link"),
    [
        (
            device("0000:c3:00.0", "0000:c0:01.1", "0000:c1:00.0", "0000:c2:00.0"),
            device("0000:c4:00.0", "0000:c0:01.1", "0000:c1:00.0", "0000:c2:04.0"),
            "PIX",
        ),
        (device("0000:65:00.0", "0000:60:03.1"), device("0000:65:00.1", "0000:60:03.1"), "PIX"),
        (
            device("0000:c4:00.0", "0000:c0:01.1", "0000:c1:00.0", "0000:c2:00.0", "0000:c3:00.0"),
            device("0000:d4:00.0", "0000:c0:01.1", "0000:c1:00.0", "0000:c2:04.0", "0000:d3:00.0"),
            "PXB",
        ),
        (device("0000:41:00.0", "0000:40:01.1"), device("0000:42:00.0", "0000:40:03.1"), "PHB"),
        (device("0000:41:00.0", "0000:40:01.1", numa=0), device("0000:81:00.0", "0000:80:03.1", numa=0), "NODE"),
        (device("0000:41:00.0", "0000:40:01.1", numa=0), device("0000:81:00.0", "0000:80:03.1", numa=1), "SYS"),
        (device("0000:41:00.0", "0000:40:01.1", numa=0), device("0000:81:00.0", "0000:80:03.1", numa=-1), None),
        (device("0000:41:00.0", "0000:40:01.1", numa=None), device("0000:81:00.0", "0000:80:03.1"), None),
        (device("0000:00:03.0"), device("0000:00:04.0"), "PHB"),
        (None, device("0000:00:04.0"), None),
    ],
)
def test_distance_on_the_bus(one: PciDevice | None, other: PciDevice | None, link: str | None) -> None:
    assert distance(one, other) == link == distance(other, one)


def test_a_card_without_rdma_is_only_on_the_bus() -> None:
    nic = device("0000:42:00.0", "0000:40:03.1", kind="nic", netdevs=("enp66s0",))
    gpus: tuple[Gpu, ...] = (replace(gpu_of(0, "0000:41:00.0", 0)),)
    found = arrange(gpus, (device("0000:41:00.0", "0000:40:01.1"), nic), None)
    assert found.gpus[0].links == {"enp66s0": "PHB"}
    assert node_topology(facts_of("node01", gpus=Fact(gpus))).gpus[0].links == {}


def test_what_an_old_driver_calls_its_classes() -> None:
    text = "\tGPU0\tmlx5_0\tCPU Affinity\nGPU0\t X \tSOC\t0-3\nmlx5_0\tSOC\t X \t\n"
    assert arrange(GPUS[:1], (), nvidia_smi_topo.parse(text)).gpus[0].links == {"mlx5_0": "SYS"}


# --------------------------------------------------------------------------- which cards carry the traffic

PATHS = Paths("/mnt/shared", "/mnt/shared/runs", "/usr/bin/python3")
NODES = tuple(Node(f"node0{n}", Ssh(f"192.168.1.1{n}"), f"10.0.0.1{n}", 8, PATHS) for n in (1, 2))
CARDS = (
    device("0000:04:00.0", kind="nic", netdevs=("eno1",)),
    device("0000:42:00.0", kind="nic", netdevs=("enp66s0f0",), hcas=("mlx5_0",)),
    device("0000:42:00.1", kind="nic", netdevs=("enp66s0f1",), hcas=("mlx5_1",)),
)


def port(hca: str, netdev: str) -> RdmaPort:
    return RdmaPort(hca, 1, "ACTIVE", "LinkUp", "Ethernet", 100.0, netdev, None, None, ())


@pytest.mark.parametrize(
    ("kind", "iface", "expected"),
    [
        ("tcp", "eno1", ["0000:04:00.0"]),
        ("tcp", "enp66s0f1", ["0000:42:00.1"]),
        ("tcp", "enp66s0f0.100", ["0000:42:00.0"]),
        ("tcp", "bond0", ["0000:42:00.0", "0000:42:00.1"]),
        ("tcp", "eth0", []),  # of a container
        ("roce", "enp66s0f0", ["0000:42:00.0"]),
    ],
)
def test_cards_of_the_data_network(kind: str, iface: str, expected: list[str]) -> None:
    cluster = Cluster("c", NODES, Network(kind), Storage(), Expect())
    made_of = {"enp66s0f0.100": ("enp66s0f0",), "bond0": ("enp66s0f0", "enp66s0f1"), "eth0": ()}
    ifaces = [Iface(name, "up", 1500, 10_000, "", (), False) for name in ("eno1", "enp66s0f0", "enp66s0f1")]
    ifaces += [Iface(name, "up", 1500, None, "", (), True, lower=lower) for name, lower in made_of.items()]
    net = NetFact(tuple(ifaces), {"10.0.0.12": (iface, "10.0.0.11")}, {})
    ports = (port("mlx5_0", "enp66s0f0"), port("mlx5_1", "enp66s0f1"))
    assert [card.pci for card in data_cards(NODES[0], cluster, CARDS, net, ports)] == expected
    assert data_cards(NODES[0], cluster, CARDS, None, ()) == ()
