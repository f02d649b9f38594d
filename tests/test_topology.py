"""Who is near whom: from the matrix, from the bus, from both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netcheck.checks.gpu_topology import plan
from netcheck.tools import lspci, lspci_tree, nvidia_smi_topo
from netcheck.topology import (
    CLASSES,
    GpuPlace,
    Link,
    NodeTopology,
    arrange,
    data_cards,
    disagreements,
    distance,
    fair,
    link_of,
    node_topology,
    practice_gbyte_s,
    ring,
    ring_cost,
    shared,
)
from r4090c.model import (
    Cluster,
    Expect,
    Fact,
    Gpu,
    Iface,
    NetFact,
    Network,
    Node,
    NodeFacts,
    Paths,
    PciDevice,
    RdmaPort,
    Ssh,
    Storage,
    TopologyMatrix,
)
from tests.launch.facts_of import facts_of, gpu_of
from tests.topology_nodes import NODES as KNOWN
from tests.topology_nodes import (
    NPS4,
    OLD_DRIVER,
    WHOLE,
    box,
    cpus,
    interleaved,
    recorded,
    switch,
    two_sockets,
)
from tests.topology_nodes import make as in_box

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


# --------------------------------------------------------------------------- the order of the ring


def topology_of(*rows: str) -> NodeTopology:
    """A topology from the lower triangle of its matrix: row k holds the classes of GPU k to GPUs 0 … k-1."""
    links = {
        (other, one): None if word == "?" else word for one, row in enumerate(rows, 1) for other, word in enumerate(row.split())
    }
    places = tuple(GpuPlace(index, f"0000:{index:02x}:00.0", None, None, {}) for index in range(len(rows) + 1))
    return NodeTopology(places, (), links)


def test_pairs_below_switches_whose_indices_are_mixed() -> None:
    """GPUs 0 and 3 are below one switch, 1 and 2 below another: 0-1-2-3 has two PIX and two SYS, and so has the ring that keeps
    each pair together; 0 and 2 with 1 and 3 have none as they are, four SYS, and two PIX when put in order."""
    assert ring(topology_of("SYS", "SYS PIX", "PIX SYS SYS")) == (0, 1, 2, 3)
    mixed = topology_of("SYS", "PIX SYS", "SYS PIX SYS")
    assert ring(mixed) == (0, 2, 1, 3)
    assert ring_cost(mixed, (0, 1, 2, 3)) == 4 * 16
    assert ring_cost(mixed, (0, 2, 1, 3)) == 2 * 1 + 2 * 16


def test_sockets_that_alternate_are_put_together_with_the_far_link_at_the_end() -> None:
    """Two of eight links must cross. The last one does: between nodes the network takes its place."""
    found = node_topology(interleaved())
    assert ring(found) == (0, 2, 4, 6, 1, 3, 5, 7)
    assert ring_cost(found, ring(found)) == 6 * 8 + 2 * 16
    assert ring_cost(found, range(8)) == 8 * 16


@pytest.mark.parametrize("name", WHOLE)
def test_where_nothing_is_gained_ranks_stay_in_the_order_of_the_bus(name: str) -> None:
    matrix = recorded(name)
    found = arrange([gpu_of(index, f"0000:{index + 1:02x}:00.0", None) for index in matrix.gpus], (), matrix)
    assert ring(found) == matrix.gpus


def test_one_far_gpu_costs_two_links_wherever_it_is() -> None:
    """GPU 1 is on the other socket: every ring crosses twice, the order of the indices too."""
    assert ring(topology_of("SYS", "PHB SYS", "PHB SYS PHB", "PHB SYS PHB PHB")) == (0, 1, 2, 3, 4)


def test_a_pair_that_is_not_known_counts_as_the_farthest() -> None:
    found = topology_of("?", "PHB ?", "? PHB ?")
    assert ring(found) == (0, 2, 1, 3)
    assert ring_cost(found, ring(found)) == 2 * 4 + 2 * 16
    assert ring(topology_of("?", "? ?", "? ? ?")) == (0, 1, 2, 3)


def test_rings_of_no_one_two_and_three() -> None:
    assert ring(NodeTopology((), (), {})) == ()
    assert ring(topology_of()) == (0,)
    assert ring(topology_of("SYS")) == (0, 1)
    assert ring(topology_of("SYS", "PIX SYS")) == (0, 1, 2)
    assert ring_cost(topology_of(), (0,)) == 0


@given(st.lists(st.sampled_from((*CLASSES, "?")), min_size=15, max_size=15))
def test_no_ring_of_six_is_better(words: list[str]) -> None:
    found = topology_of(*(" ".join(words[start : start + size]) for size, start in enumerate((0, 1, 3, 6, 10), 1)))
    best = min(ring_cost(found, (0, *rest)) for rest in permutations(range(1, 6)))
    assert ring_cost(found, ring(found)) == best
    if ring_cost(found, range(6)) == best:
        assert ring(found) == (0, 1, 2, 3, 4, 5)


def test_many_gpus_get_a_good_ring() -> None:
    """Sixteen GPUs that alternate between four NUMA nodes: four links must cross, as many as there are nodes."""
    sixteen = topology_of(*(" ".join("NODE" if one % 4 == other % 4 else "SYS" for other in range(one)) for one in range(1, 16)))
    assert ring_cost(sixteen, ring(sixteen)) == 12 * 8 + 4 * 16
    assert sorted(ring(sixteen)) == list(range(16))


# --------------------------------------------------------------------------- what nvidia-smi and sysfs say differently


@pytest.mark.parametrize("make", KNOWN.values(), ids=KNOWN)
def test_no_false_alarm(make: Callable[[], NodeFacts]) -> None:
    assert disagreements(make()) == ()


def test_every_recorded_matrix_agrees_with_itself_and_with_a_bus_that_is_silent() -> None:
    for name in (*WHOLE, OLD_DRIVER):
        matrix = recorded(name)
        gpus = [gpu_of(index, f"0000:{index + 1:02x}:00.0", -1) for index in matrix.gpus]
        bus = [device(gpu.pci, numa=-1) for gpu in gpus]
        assert disagreements(in_box(gpus, bus, matrix, cpus([range(4)], 1))) == (), name


LSPCI = RECORDED.parent / "lspci"
TREES = RECORDED.parent / "lspci-tree"


def bus_of(tree: str, *cards: str) -> list[PciDevice]:
    found = lspci_tree.parse((TREES / f"{tree}.txt").read_text())
    return [device(card, *found.buses[found.devices[card]]) for card in cards]


@pytest.mark.parametrize(
    ("tree", "cards", "words", "apart"),
    [
        ("switch-two-gpus", ("0000:03:00.0", "0000:04:00.0"), "PIX", False),
        ("switch-two-gpus", ("0000:03:00.0", "0000:04:00.0"), "PXB", False),
        ("switch-two-gpus", ("0000:03:00.0", "0000:04:00.0"), "NODE", True),
        ("switch-two-gpus", ("0000:03:00.0", "0000:06:00.0"), "PHB", False),
        ("epyc-4-root-complexes", ("0000:c1:00.0", "0000:c2:00.0"), "PHB", False),
        ("epyc-4-root-complexes", ("0000:c1:00.0", "0000:c2:00.0"), "NODE", False),
        ("epyc-4-root-complexes", ("0000:c1:00.0", "0000:81:00.0"), "NODE", False),
        ("epyc-4-root-complexes", ("0000:c1:00.0", "0000:81:00.0"), "SYS", True),
    ],
)
def test_trees_of_lspci_against_what_a_driver_would_say(tree: str, cards: tuple[str, str], words: str, apart: bool) -> None:
    matrix = TopologyMatrix((0, 1), {}, {"GPU0-GPU1": words}, {}, {})
    gpus = [gpu_of(index, pci, 0) for index, pci in enumerate(cards)]
    found = disagreements(in_box(gpus, bus_of(tree, *cards), matrix, cpus([range(4)], 1)))
    assert [one.about for one in found] == (["gpu0-gpu1"] if apart else [])


@pytest.mark.parametrize(
    ("name", "card", "port", "words"),
    [
        ("rtx4090-idle-2.5GT-downgraded", "0000:21:00.0", None, "gen 4 x16"),
        ("rtx4090-x8-width-downgraded", "0000:c1:00.0", None, "gen 4 x8 of x16"),
        ("rtx4090-x8-width-downgraded", "0000:e1:00.0", None, "gen 4 x16"),
        ("root-port-limits-to-x4", "0000:04:00.0", "0000:00:02.1", "gen 4 x4"),
    ],
)
def test_links_that_lspci_recorded(name: str, card: str, port: str | None, words: str) -> None:
    """A slot of four lanes has lost none: it never had more."""
    by_pci = {one.pci: one for one in lspci.parse((LSPCI / f"{name}.txt").read_text()).devices}
    gpu, above = by_pci[card], by_pci[port] if port else None
    link = link_of(
        PciDevice(
            *(card, "gpu", "10de", gpu.width, gpu.width_cap, gpu.speed_gt_s, gpu.speed_cap_gt_s, gpu.numa),
            upstream_width_max=above.width_cap if above else None,
            upstream_speed_max_gt_s=above.speed_cap_gt_s if above else None,
        )
    )
    assert link.text == words


def test_naming_only_is_no_disagreement() -> None:
    """PIX or PXB: how many bridges a switch is made of. PHB or NODE: what counts as one host bridge."""
    gpus = [gpu_of(index, f"0000:0{index + 3}:00.0", 0) for index in (0, 1)]
    below = [device(gpu.pci, "0000:00:01.0", "0000:01:00.0", f"0000:02:0{gpu.index}.0") for gpu in gpus]
    roots = [device(gpu.pci, f"0000:00:0{gpu.index + 1}.0") for gpu in gpus]
    for bus, words, alarm in ((below, "PXB", False), (roots, "NODE", False), (below, "PHB", True), (roots, "PIX", True)):
        matrix = TopologyMatrix((0, 1), {}, {"GPU0-GPU1": words}, {}, {0: 0, 1: 0})
        assert bool(disagreements(in_box(gpus, bus, matrix, cpus([range(4)], 1)))) is alarm, words


@pytest.mark.parametrize("words", ["PIX", "PHB", "SYS"])
def test_a_virtual_machine_that_hides_bridges_or_numa_nodes_raises_no_alarm(words: str) -> None:
    """Straight on a root bus any class may be true; with bridges but NUMA -1, only SYS may be."""
    gpus = [gpu_of(index, f"0000:0{index + 3}:00.0", None) for index in (0, 1)]
    matrix = TopologyMatrix((0, 1), {}, {"GPU0-GPU1": words}, {}, {})
    hidden = [device(gpu.pci, numa=0) for gpu in gpus]
    assert disagreements(in_box(gpus, hidden, matrix, cpus([range(4)], 1))) == ()
    for numa, alarm in ((-1, words == "PIX"), (0, words in ("PIX", "SYS"))):
        ports = [device(gpu.pci, f"0000:00:0{gpu.index + 1}.0", numa=numa) for gpu in gpus]
        assert bool(disagreements(in_box(gpus, ports, matrix, cpus([range(4)], 1)))) is alarm


def test_numa_node_class_and_cpus_that_differ_are_named_with_what_is_used() -> None:
    """The recorded box with GPU 2 on NUMA node 5 by sysfs, and GPU 5's host bridge elsewhere than its cards'."""
    facts = numa_moved(box())
    assert [one.text for one in disagreements(facts)] == [
        "gpu2: NUMA 5 (sysfs), NUMA 0 (nvidia-smi); used: NUMA 5, the kernel places memory by it",
    ]
    matrix = recorded(NPS4)
    why = "as the driver also knows bridges that sysfs does not show; NCCL goes by sysfs"
    moved = replace(matrix, links={**matrix.links, "GPU5-NIC0": "SYS", "GPU0-GPU1": "PIX"})
    assert [one.text for one in disagreements(replace(box(), gpu_topology=Fact(moved)))] == [
        f"gpu0-gpu1: PIX (nvidia-smi), SYS: NUMA 3 and 2 (sysfs); used: PIX, {why}",
        f"gpu5-mlx5_0: SYS (nvidia-smi), PHB: both below host bridge 0000:9b (sysfs); used: SYS, {why}",
    ]
    elsewhere = replace(matrix, cpu_affinity={**matrix.cpu_affinity, 7: (0, 1)})
    assert [one.text for one in disagreements(replace(box(), gpu_topology=Fact(elsewhere)))] == [
        "gpu7: CPUs 60-71,156-167 of NUMA 5 (sysfs), CPUs 0-1 (nvidia-smi); used: CPUs 60-71,156-167, the kernel schedules by it"
    ]


def numa_moved(facts: NodeFacts) -> NodeFacts:
    bus = tuple(replace(one, numa=5) if one.pci == "0000:43:00.0" else one for one in facts.pci.value or ())
    return replace(facts, pci=Fact(bus))


def test_a_gpu_or_card_that_only_one_knows() -> None:
    facts = box()
    without = replace(facts, gpus=Fact(tuple(gpu for gpu in facts.gpus.value or () if gpu.index != 3)))
    assert [one.about for one in disagreements(without)] == ["gpu3", "0000:5b:00.0"]
    given = tuple(replace(one, driver="vfio-pci") if one.pci == "0000:5b:00.0" else one for one in facts.pci.value or ())
    assert [one.about for one in disagreements(replace(without, pci=Fact(given)))] == ["gpu3"]
    matrix = recorded(NPS4)
    renamed = replace(matrix, nics={**matrix.nics, "NIC3": "mlx5_9"})
    found = disagreements(replace(facts, gpu_topology=Fact(renamed)))
    assert [(one.about, one.used) for one in found] == [("mlx5_3", "sysfs"), ("mlx5_9", "nvidia-smi")]
    assert disagreements(replace(facts, gpu_topology=Fact(replace(matrix, nics={})))) == (), "nvidia-smi without libibverbs"


def test_a_lost_gpu_is_no_disagreement_about_the_bus() -> None:
    facts = box()
    lost = tuple(replace(gpu, index=-1, faults=("GPU is lost",)) if gpu.index == 3 else gpu for gpu in facts.gpus.value or ())
    assert [one.about for one in disagreements(replace(facts, gpus=Fact(lost)))] == ["gpu3"]


# --------------------------------------------------------------------------- what shares a way


def test_two_gpus_and_a_card_below_one_switch() -> None:
    """16 lanes at 16 GT/s, 128 of 130 bits, 0.8 in practice: 25.2 GB/s, a third of it for each; 100 Gbit/s are 12.5."""
    (below, host) = shared(switch())
    assert (below.kind, below.at, below.gpus, below.nics) == ("switch", "0000:01:00.0", (0, 1), ("mlx5_0",))
    assert below.uplink == Link(4, 16, 16)
    each = 16 * 16 * 128 / 130 / 8 * 0.8 / 3
    assert below.each_gbyte_s == {
        "gpu0": pytest.approx((3 * each, each)),
        "gpu1": pytest.approx((3 * each, each)),
        "mlx5_0": pytest.approx((12.5, each)),
    }
    assert (host.kind, host.at, host.gpus) == ("host bridge", "0000:00", (0, 1, 2))
    assert host.each_gbyte_s["gpu2"] == pytest.approx((12.6, 12.6), abs=0.01), "eight lanes of its own"


def test_who_needs_less_leaves_the_rest_to_the_others() -> None:
    assert fair({"gpu0": 25.2, "gpu1": 25.2, "nic": 1.2}, 25.2) == {"gpu0": 12.0, "gpu1": 12.0, "nic": 1.2}
    assert fair({"gpu0": 10.0, "nic": 5.0}, 25.2) == {"gpu0": 10.0, "nic": 5.0}
    assert fair({}, 25.2) == {}


def test_cards_on_host_bridges_of_their_own_share_nothing() -> None:
    assert shared(two_sockets()) == ()
    (bridge,) = shared(box())
    assert (bridge.kind, bridge.at, bridge.gpus, bridge.nics) == (
        "host bridge",
        "0000:9b",
        (5,),
        ("mlx5_0+mlx5_1", "mlx5_2+mlx5_3"),
    )
    assert bridge.each_gbyte_s == {
        "gpu5": pytest.approx((25.2, 25.2), abs=0.01),
        "mlx5_0+mlx5_1": pytest.approx((12.5, 12.5)),
    }, "a card without a rate moves nothing"


@pytest.mark.parametrize(
    ("gen", "width", "gbyte_s"),
    [(4, 16, 25.2), (4, 8, 12.6), (3, 16, 12.6), (4, 4, 6.3), (1, 16, 3.2), (5, 16, 50.4), (None, 16, None), (4, None, None)],
)
def test_what_a_link_carries(gen: int | None, width: int | None, gbyte_s: float | None) -> None:
    assert practice_gbyte_s(gen, width) == (None if gbyte_s is None else pytest.approx(gbyte_s, abs=0.02))


def test_a_link_is_told_at_its_best_and_lost_lanes_are_marked() -> None:
    idle = PciDevice("0000:01:00.0", "gpu", "10de", 16, 16, 2.5, 16.0, 0, ("0000:00:01.1",), 16, 16.0)
    assert link_of(idle).text == "gen 4 x16"
    assert link_of(replace(idle, width=8)).text == "gen 4 x8 of x16"
    narrow_slot = link_of(replace(idle, width=4, upstream_width_max=4, upstream_speed_max_gt_s=8.0))
    assert (narrow_slot.text, narrow_slot.lanes_lost) == ("gen 3 x4", False)
    assert Link(None, None, None).text == ""
