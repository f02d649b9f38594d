"""The drawings of nodes: what they say, that they are no wider than they may be, and that nothing in them overlaps."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from netcheck.report_drawing import CHARACTER
from netcheck.topology_drawing import (
    BOLD,
    SMALL,
    Picture,
    differences,
    host_bridges,
    kinds,
    legend,
    matrix,
    names_in_short,
    picture_of,
    summary,
    svg,
    text,
)
from r4090c.model import Fact, Gpu, NumaNode
from tests.launch.facts_of import gpu_of
from tests.topology_nodes import GOLDEN, NODES, box, cluster, cpus, device, make, picture, recorded, ten_cards

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", NODES)
def test_text_is_what_was_looked_at(name: str) -> None:
    assert text([picture(name)]) == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize("width", [60, 80, 120])
def test_text_keeps_within_its_width_and_its_boxes_are_whole(name: str, width: int) -> None:
    lines = text([picture(name)], width).splitlines()
    assert max(map(len, lines)) <= width
    boxed = [line for line in lines if line.startswith(("┌", "│", "└"))]
    assert {(len(line), line[-1]) for line in boxed} <= {(width, end) for end in "┐│┘"}


def test_numa_node_3_holds_gpu_0_and_the_data_network_is_marked() -> None:
    found = picture("box")
    seats = {numa.index: [card.name for card in numa.cards] for numa in found.numas}
    assert seats == {
        0: ["GPU2"],
        1: ["GPU3"],
        2: ["GPU1"],
        3: ["GPU0"],
        4: ["GPU6"],
        5: ["GPU7"],
        6: ["GPU5", "mlx5_0+mlx5_1", "mlx5_2+mlx5_3"],
        7: ["GPU4"],
    }
    assert [card.name for card in found.cards if card.data] == ["mlx5_0+mlx5_1"]
    assert found.numas[3].words == ("CPUs 36-47,132-143", "62 GiB")


def test_an_idle_link_is_drawn_at_its_best_and_lost_lanes_are_marked() -> None:
    """GpuBox idles at generation 1, which must not be seen."""
    drawn = text([picture("box")])
    assert "gen 1" not in drawn
    assert drawn.count("gen 4 x16") == 10
    assert "GPU2  RTX 4090 24 GiB, 0000:06:00.0, gen 4 x8 of x16, LANES LOST" in text([picture("switch")])


def test_where_the_firmware_is_silent_one_numa_node_holds_all_and_several_hold_none() -> None:
    assert [numa.name for numa in picture("silent").numas] == ["NUMA 0"]
    wish = cluster()
    two = replace(NODES["silent"](), cpus=cpus([range(4), range(4, 8)], 2))
    drawn = picture_of(wish.nodes[0], wish, two)
    assert [(numa.name, len(numa.cards)) for numa in drawn.numas] == [("NUMA 0", 0), ("NUMA 1", 0), ("NUMA node not told", 3)]


def test_a_switch_is_drawn_only_where_cards_meet() -> None:
    (bridge,) = host_bridges(picture("switch").cards)
    assert (bridge.bridge, [card.name for card in bridge.cards]) == ("0000:00", ["GPU2"])
    (below,) = bridge.branches
    assert (below.bridge, [card.name for card in below.cards], below.branches) == (
        "0000:01:00.0",
        ["GPU0", "GPU1", "mlx5_0"],
        (),
    )
    assert all(not bridge.branches for bridge in host_bridges(picture("two-sockets").cards))


def test_the_matrix_joins_the_ports_of_a_card_and_leaves_out_what_nobody_knows() -> None:
    headings, rows = matrix(picture("two-sockets"))
    assert headings == tuple(f"GPU{index}" for index in range(8))
    assert [name for name, _ in rows][8:] == ["rocep152s0f0+rocep152s0f1"]
    assert rows[8][1] == ("SYS",) * 4 + ("NODE",) * 4
    assert legend(rows) == "NODE between host bridges of a NUMA node; SYS between NUMA nodes"
    assert [name for name, _ in matrix(picture("silent"))[1]] == ["GPU0", "GPU1"]


def test_sentences_about_ring_switch_and_what_is_missing() -> None:
    assert summary(picture("interleaved"))[0] == (
        "ring: GPUs 0 2 4 6 1 3 5 7 (6 × NODE, 2 × SYS); in the order of their indices 8 × SYS"
    )
    assert summary(picture("switch"))[0] == (
        "switch 0000:01:00.0, all at once: gpu0, gpu1 8.4 GB/s each instead of 25.2; mlx5_0 8.4 GB/s instead of 12.5"
        " (uplink taken for gen 4 x16: not told)"
    )
    assert summary(picture("cut-matrix"))[-1] == (
        "! gpu_topology not read (row GPU5 has 3 of 8 cells: cut): classes are those of the PCI bus"
    )
    assert summary(picture("without-gpus")) == (), "a node of CPUs misses nothing"


def test_a_lost_gpu_and_a_contradiction_are_told() -> None:
    wish, facts = cluster(), box()
    gpus = tuple(gone(gpu) if gpu.index == 3 else gpu for gpu in facts.gpus.value or ())
    sentences = summary(picture_of(wish.nodes[0], wish, replace(facts, gpus=Fact(gpus))))
    assert "! the GPU at 0000:5b:00.0 is not drawn, the driver cannot open it: GPU is lost" in sentences
    assert any(line.startswith("! gpu3: there (nvidia-smi topo -m), missing (nvidia-smi)") for line in sentences)


def gone(gpu: Gpu) -> Gpu:
    return replace(gpu, index=-1, faults=("GPU is lost",))


# --------------------------------------------------------------------------- nodes that are alike


def with_memory(name: str, mib: int) -> Picture:
    wish, facts = cluster(), box(name=name)
    found = facts.cpus.value
    assert found is not None
    numas = tuple(NumaNode(one.index, one.cpus, mib) for one in found.numa)
    return picture_of(replace(wish.nodes[0], name=name), wish, replace(facts, cpus=Fact(replace(found, numa=numas))))


def test_a_little_less_memory_is_no_other_kind_and_half_of_it_is() -> None:
    pictures = [with_memory("node01", 64_000), with_memory("node02", 63_000), with_memory("node03", 32_000)]
    found = kinds(pictures, 0.05)
    assert [one.nodes for one in found] == [("node01", "node02"), ("node03",)]
    assert differences(found[0], found[1])[0] == "NUMA 0: CPUs 0-11,96-107, 31 GiB (not CPUs 0-11,96-107, 62 GiB)"
    assert text(found).count("node03\n") == 1
    assert "unlike node01, node02: NUMA 0: " in text(found)


def test_the_commonest_kind_comes_first() -> None:
    pictures = [with_memory("node01", 32_000), with_memory("node02", 64_000), with_memory("node03", 64_000)]
    assert [one.nodes for one in kinds(pictures, 0.05)] == [("node02", "node03"), ("node01",)]


def test_a_gpu_less_is_another_kind_and_named() -> None:
    wish, facts = cluster(), box()
    fewer = replace(facts, gpus=Fact((facts.gpus.value or ())[:7]))
    one, other = (picture_of(node, wish, said) for node, said in zip(wish.nodes, (facts, fewer), strict=True))
    assert len(kinds([one, other], 0.05)) == 2
    assert differences(one, other) == ("GPU7: none (not NUMA 5, RTX 4090 24 GiB, 0000:db:00.0, gen 4 x16)",)


def test_names_in_short() -> None:
    assert names_in_short(["node01", "node02", "node03", "node05", "a"]) == "node[01-03], node05, a"
    assert names_in_short(["n9", "n10", "n11"]) == "n[9-11]"
    assert names_in_short(["node01", "node02"]) == "node01, node02"
    assert names_in_short(["01", "02", "03"]) == "[01-03]"


# --------------------------------------------------------------------------- SVG


@dataclass(frozen=True)
class Seen:
    """One element with its absolute place."""

    kind: str
    x: float
    y: float
    wide: float
    high: float
    words: str = ""

    def within(self, other: Seen) -> bool:
        return (
            other.x <= self.x
            and other.y <= self.y
            and self.x + self.wide <= other.x + other.wide + 0.2
            and self.y + self.high <= other.y + other.high + 0.2
        )

    def touches(self, other: Seen) -> bool:
        return (
            self.x < other.x + other.wide - 0.2
            and other.x < self.x + self.wide - 0.2
            and self.y < other.y + other.high - 0.2
            and other.y < self.y + self.high - 0.2
        )


def seen(drawing: str) -> tuple[float, float, list[Seen]]:
    """Return width, height and all rectangles and texts of a drawing."""
    root = ET.fromstring(drawing)

    def walk(element: ET.Element, x: float, y: float) -> Iterator[Seen]:
        for child in element:
            moved = re.fullmatch(r"translate\((\S+) (\S+)\)", child.get("transform", ""))
            dx, dy = (x + float(moved.group(1)), y + float(moved.group(2))) if moved else (x, y)
            kind = child.get("class", "")
            if child.tag == f"{SVG}rect" and kind != "page":
                yield Seen(kind, dx, dy, float(child.get("width", 0)), float(child.get("height", 0)))
            elif child.tag == f"{SVG}text":
                words = child.text or ""
                wide = len(words) * (BOLD if kind == "title" else SMALL if "small" in kind else CHARACTER)
                left = dx + float(child.get("x", 0)) - {"middle": wide / 2, "end": wide}.get(child.get("text-anchor", ""), 0)
                yield Seen("text", left, dy + float(child.get("y", 0)) - 9, wide, 11, words)
            yield from walk(child, dx, dy)

    return float(root.get("width", 0)), float(root.get("height", 0)), list(walk(root, 0, 0))


@pytest.mark.parametrize("name", NODES)
def test_nothing_overlaps_and_everything_is_on_the_page(name: str) -> None:
    wide, high, found = seen(svg([picture(name)]))
    page = Seen("page", 0, 0, wide, high)
    texts = [one for one in found if one.kind == "text"]
    frames = [one for one in found if one.kind != "text"]
    assert all(one.within(page) for one in found)
    for place, one in enumerate(texts):
        assert not [other.words for other in texts[place + 1 :] if one.touches(other)], one.words
        for frame in frames:
            assert one.within(frame) or not one.touches(frame), (one, frame)
    for place, one in enumerate(frames):
        for other in frames[place + 1 :]:
            assert one.within(other) or other.within(one) or not one.touches(other), (one, other)


@pytest.mark.parametrize("gpus", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("nics", [0, 1, 2, 10])
def test_any_number_of_gpus_and_cards_fits(gpus: int, nics: int) -> None:
    devices = [device(f"0000:{bus + 1:02x}:00.0", f"0000:00:{bus:02x}.1", numa=0) for bus in range(gpus)]
    devices += [
        device(f"0000:{bus:02x}:00.0", f"0000:40:{bus:02x}.0", numa=0, kind="nic", netdevs=(f"enp{bus}s0f0np0",))
        for bus in range(0x41, 0x41 + nics)
    ]
    cards = [gpu_of(index, f"0000:{index + 1:02x}:00.0", 0) for index in range(gpus)]
    wish = cluster()
    drawn = picture_of(wish.nodes[0], wish, make(cards, devices, None, cpus([range(32)], 1)))
    wide, high, found = seen(svg([drawn]))
    frames = [one for one in found if one.kind.startswith("chip")]
    assert len(frames) == gpus + nics + 1  # the data network's interface is none of these cards
    assert not [one for place, one in enumerate(frames) for other in frames[place + 1 :] if one.touches(other)]
    assert all(one.within(Seen("page", 0, 0, wide, high)) for one in found)
    assert max(map(len, text([drawn]).splitlines())) <= 80


def test_svg_needs_nothing_else_and_is_read_in_the_dark() -> None:
    drawing = svg([picture("box"), picture("switch")])
    assert "prefers-color-scheme: dark" in drawing
    assert not re.search(r"(href|src|url\(|@import|<script|<image)", drawing)
    kinds_drawn = {one.kind for one in seen(drawing)[2]}
    assert {"box", "bridge", "switch", "chip", "chip data", "chip lost", "s0", "s2", "s4", "own"} <= kinds_drawn


def test_what_a_node_says_cannot_break_the_drawing() -> None:
    facts = ten_cards()
    evil = tuple(replace(gpu, name='</text><script>"&\x1b[31m') for gpu in facts.gpus.value or ())
    wish = cluster()
    drawn = picture_of(wish.nodes[0], wish, replace(facts, gpus=Fact(evil)))
    ET.fromstring(svg([drawn]))
    assert "<script" not in svg([drawn])
    assert "\x1b" not in svg([drawn]) + text([drawn])


def test_cards_that_only_the_matrix_knows_have_a_row() -> None:
    """No sysfs: GPUs are drawn from nvidia-smi, and its cards stand in the matrix."""
    wish = cluster()
    facts = make([gpu_of(index, f"0000:{index:02x}:00.0", None) for index in range(8)], (), recorded(TEN), cpus([[0]], 1))
    drawn = picture_of(wish.nodes[0], wish, facts)
    assert [name for name, _ in matrix(drawn)[1]][8:] == [f"mlx5_{number}" for number in range(8)] + [
        "mlx5_bond_0",
        "mlx5_bond_1",
    ]
    assert {card.root for card in drawn.cards} == {""}


TEN = "8gpu-10nic-tabs-trailing.txt"
