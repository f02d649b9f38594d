"""How the nodes are built, drawn as plain text and as SVG: NUMA nodes, host bridges, switches, GPUs and network cards. Pure.

`picture_of` gathers what is drawn of one node, `kinds` puts nodes that are alike into one picture, `text` and `svg` draw it.
Links are told at their best (card and slot): an idle link falls to generation 1, which is no fault. Lost lanes are marked.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from netcheck.data_network import chosen_iface
from netcheck.facts.cpus import ranges
from netcheck.report_drawing import CHARACTER, e
from netcheck.report_text import printable
from netcheck.topology import (
    CLASSES,
    Disagreement,
    GpuPlace,
    Link,
    NodeTopology,
    Share,
    data_cards,
    disagreements,
    node_topology,
    numa_of,
    ring,
    ring_cost,
    shared,
    slots,
)
from r4090c.model import Cluster, Gpu, Node, NodeFacts

MEANING = {
    "PIX": "below one switch",
    "PXB": "below several bridges",
    "PHB": "through one host bridge (the processor)",
    "NODE": "between host bridges of a NUMA node",
    "SYS": "between NUMA nodes",
}
"""The legend of `nvidia-smi topo -m`, in short."""


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU or a network card as it is drawn. `key`: "gpu0" or its functions "mlx5_0+mlx5_1"; `index` None: a network card.

    `root`: domain and bus of its host bridge, `upstream`: the bridges above it; both empty where the bus does not know it.
    `words`: what it is, the pieces in order. `data`: it carries the data network.
    """

    key: str
    index: int | None
    words: tuple[str, ...]
    pci: str
    link: Link | None
    root: str = ""
    upstream: tuple[str, ...] = ()
    data: bool = False

    @property
    def name(self) -> str:
        """What it is called in the drawing: "GPU0", "mlx5_0+mlx5_1"."""
        return f"GPU{self.index}" if self.index is not None else self.key

    @property
    def facts(self) -> tuple[str, ...]:
        """Return all that is told of it, the fault last."""
        link = self.link.text if self.link is not None else ""
        lost = "LANES LOST" if self.link is not None and self.link.lanes_lost else ""
        return tuple(filter(None, (*self.words, self.pci, link, "data network" if self.data else "", lost)))


@dataclass(frozen=True, slots=True)
class Numa:
    """One NUMA node and its cards. `index` None: no NUMA node is told for them. `memory_mib` may differ between equal nodes."""

    index: int | None
    cpus: tuple[int, ...]
    cards: tuple[Card, ...]
    memory_mib: int | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """The heading of its box."""
        return "NUMA node not told" if self.index is None else f"NUMA {self.index}"

    @property
    def words(self) -> tuple[str, ...]:
        """Return its CPUs and memory in words."""
        cpus = f"CPUs {ranges(self.cpus)}" if self.cpus else ""
        return tuple(filter(None, (cpus, f"{self.memory_mib / 1024:.0f} GiB" if self.memory_mib else "")))


@dataclass(frozen=True, slots=True)
class Picture:
    """All that is drawn of one kind of node. `nodes`: the names of those that are so. `missing`: what could not be read."""

    nodes: tuple[str, ...]
    processor: str
    numas: tuple[Numa, ...]
    topology: NodeTopology
    shares: tuple[Share, ...]
    disagreements: tuple[Disagreement, ...]
    order: tuple[int, ...]
    missing: tuple[str, ...]

    @property
    def cards(self) -> tuple[Card, ...]:
        """All cards, NUMA node by NUMA node."""
        return tuple(card for numa in self.numas for card in numa.cards)


# --------------------------------------------------------------------------- what is drawn


def picture_of(node: Node, cluster: Cluster, facts: NodeFacts) -> Picture:
    """Return what is drawn of `node`."""
    found = node_topology(facts)
    cpus = facts.cpus.value
    numas = {numa.index: numa for numa in cpus.numa} if cpus is not None else {}
    only = next(iter(numas)) if len(numas) == 1 else None  # where there is one NUMA node, all is on it
    seats: dict[int | None, list[Card]] = {index: [] for index in numas}
    for numa, card in _cards(node, cluster, facts):
        seats.setdefault(only if numa is None else numa, []).append(card)
    boxes = tuple(
        Numa(
            index,
            tuple(cpu for cpu in numas[index].cpus) if index in numas else (),
            tuple(sorted(cards, key=lambda card: (not card.root, card.root, card.upstream, card.pci))),
            numas[index].memory_mib if index in numas else None,
        )
        for index, cards in sorted(seats.items(), key=lambda item: (item[0] is None, item[0] or 0))
    )
    return Picture(
        (node.name,),
        _processor(facts),
        boxes,
        found,
        shared(facts),
        disagreements(facts),
        ring(found),
        _missing(node, facts),
    )


def _processor(facts: NodeFacts) -> str:
    cpus = facts.cpus.value
    if cpus is None:
        return ""
    counts = (
        (cpus.sockets, "socket"),
        (len(cpus.numa), "NUMA node"),
        (len(cpus.cores), "core"),
        (len(cpus.online), "CPU"),
    )
    return ", ".join([cpus.model or "processor", *(f"{number} {noun}{'' if number == 1 else 's'}" for number, noun in counts)])


def _cards(node: Node, cluster: Cluster, facts: NodeFacts) -> list[tuple[int | None, Card]]:
    """Return (NUMA node, card): those on the bus, then what only nvidia-smi or only the network knows."""
    devices, net = facts.pci.value or (), facts.net.value
    carrying = {card.pci for card in data_cards(node, cluster, devices, net, facts.rdma.value or ())}
    gpus = {gpu.index: gpu for gpu in facts.gpus.value or () if gpu.index >= 0}
    functions = {device.pci: device for device in devices}
    found: list[tuple[int | None, Card]] = []
    for slot in slots(facts):
        if slot.index is not None:
            words, data = _gpu_words(gpus[slot.index]), False
        else:
            mine = [
                device
                for device in functions.values()
                if device.kind == "nic" and next(iter((*device.hcas, *device.netdevs)), "") in slot.names
            ]
            netdevs = [name for device in mine if device.hcas for name in device.netdevs]
            rate = f"{slot.rate_gbit_s:g} Gbit/s" if slot.rate_gbit_s else "no rate told"
            words = tuple(filter(None, (_few(netdevs), rate)))
            data = any(device.pci in carrying for device in mine)
        card = Card(slot.name, slot.index, words, slot.pci, slot.link, slot.root, slot.upstream, data)
        found.append((slot.numa, card))
    on_bus = {card.index for _, card in found}
    for gpu in gpus.values():
        if gpu.index not in on_bus:
            link = Link(gpu.pcie_gen_max, gpu.pcie_width, gpu.pcie_width_max)
            numa = numa_of(gpu, None, facts.gpu_topology.value)
            found.append((numa, Card(f"gpu{gpu.index}", gpu.index, _gpu_words(gpu), gpu.pci, link)))
    iface = chosen_iface(net, node, cluster) if net is not None else None
    if iface is not None and not carrying:
        rate = f"{iface.speed_mbit_s / 1000:g} Gbit/s" if iface.speed_mbit_s else ""
        words = tuple(filter(None, ("no card on the PCI bus", rate)))
        found.append((None, Card(iface.name, None, words, "", None, data=True)))
    return found


def _gpu_words(gpu: Gpu) -> tuple[str, ...]:
    name = gpu.name.removeprefix("NVIDIA ").removeprefix("GeForce ")
    memory = f"{gpu.memory_total_mib / 1024:.0f} GiB" if gpu.memory_total_mib else ""
    return (" ".join(filter(None, (name, memory))),)


def _few(names: Sequence[str], at_most: int = 3) -> str:
    return "+".join(names[:at_most]) + (f"+{len(names) - at_most}" if len(names) > at_most else "")


def _missing(node: Node, facts: NodeFacts) -> tuple[str, ...]:
    """Return what could not be read of a node, and what is drawn instead."""
    instead = {
        "cpus": "its NUMA nodes are not known",
        "gpus": "its GPUs are not known",
        "pci": "bridges and links are not known",
        "gpu_topology": "classes are those of the PCI bus",
        "net": "the data network is not known",
    }
    found = []
    for name, words in instead.items():
        fact = getattr(facts, name)
        if fact.known or (fact.absent is not None and node.gpus == 0):
            continue
        if name == "gpu_topology" and (facts.gpus.absent or (facts.gpus.known and not facts.gpus.value)):
            continue  # said already, or nothing to tell
        found.append(f"{name} not read ({fact.error or f'no {fact.absent}'}): {words}")
    for gpu in facts.gpus.value or ():
        if gpu.index < 0:
            reason = "; ".join(gpu.faults) or "no reason told"
            found.append(f"the GPU at {gpu.pci} is not drawn, the driver cannot open it: {reason}")
    return tuple(found)


# --------------------------------------------------------------------------- nodes that are alike


def kinds(pictures: Iterable[Picture], memory_tolerance: float) -> tuple[Picture, ...]:
    """Return one picture for each kind of node, the commonest first; `memory_tolerance`: share by which memory may differ."""
    found: list[Picture] = []
    for picture in pictures:
        for place, one in enumerate(found):
            same_memory = all(
                abs((mine.memory_mib or 0) - (its.memory_mib or 0)) <= memory_tolerance * (its.memory_mib or 0)
                for mine, its in zip(picture.numas, one.numas, strict=False)
            )
            if replace(picture, nodes=one.nodes) == one and same_memory:
                found[place] = replace(one, nodes=(*one.nodes, *picture.nodes))
                break
        else:
            found.append(picture)
    return tuple(sorted(found, key=lambda one: -len(one.nodes)))


def differences(one: Picture, other: Picture) -> tuple[str, ...]:
    """Return in what `other` differs from `one`, a text for each thing."""
    first, second = _statements(one), _statements(other)
    found = []
    for key in dict.fromkeys((*first, *second)):
        here, there = second.get(key, "none"), first.get(key, "none")
        if here != there:
            found.append(f"{key}: {here} (not {there})")
    if one.topology.gpu_links != other.topology.gpu_links and not found:
        found.append("the classes between its GPUs")
    return tuple(found)


def _statements(picture: Picture) -> dict[str, str]:
    said = {"processor": picture.processor or "not read"}
    for numa in picture.numas:
        if numa.index is not None:
            said[numa.name] = ", ".join(numa.words) or "nothing told"
        said.update({card.name: ", ".join((numa.name, *card.facts)) for card in numa.cards})
    return said


# --------------------------------------------------------------------------- a tree of bridges


@dataclass(frozen=True, slots=True)
class Branch:
    """A host bridge or a switch and what is below it. `bridge`: of a switch, its uppermost bridge; "" is not on the bus."""

    bridge: str
    cards: tuple[Card, ...]
    branches: tuple[Branch, ...] = ()


def host_bridges(cards: Sequence[Card]) -> tuple[Branch, ...]:
    """Return the host bridges of some cards with the switches below each; a bridge with one card below it is no switch."""
    roots = dict.fromkeys(card.root for card in cards)
    return tuple(_branch(root, [card for card in cards if card.root == root], 0) for root in roots)


def _branch(bridge: str, cards: Sequence[Card], depth: int) -> Branch:
    groups: dict[str, list[Card]] = {}
    for card in cards:
        groups.setdefault(card.upstream[depth] if len(card.upstream) > depth else card.key, []).append(card)
    single, branches = [], []
    for mine in groups.values():
        if len(mine) == 1:
            single += mine
            continue
        below = depth + 1
        while len({card.upstream[below : below + 1] for card in mine}) == 1 and len(mine[0].upstream) > below:
            below += 1
        branches.append(_branch(mine[0].upstream[below - 1], mine, below))
    return Branch(bridge, tuple(single), tuple(branches))


# --------------------------------------------------------------------------- sentences


def summary(picture: Picture) -> tuple[str, ...]:
    """Return what is said below a drawing: the ring, shared ways, contradictions, what could not be read."""
    return tuple(filter(None, (ring_words(picture.topology, picture.order), *map(share_words, picture.shares)))) + tuple(
        f"! {text}" for text in (*(one.text for one in picture.disagreements), *picture.missing)
    )


def ring_words(topology: NodeTopology, order: Sequence[int]) -> str:
    """Return which order of GPUs has near neighbours and what is gained by it; "" where there is no choice."""
    if len(order) <= 3:
        return ""
    same = tuple(sorted(order))
    words = f"ring: GPUs {' '.join(map(str, order))}"
    if ring_cost(topology, order) == ring_cost(topology, same):
        return f"{words}, the order of their indices: no other has nearer neighbours"
    return f"{words} ({_links(topology, order)}); in the order of their indices {_links(topology, same)}"


def _links(topology: NodeTopology, order: Sequence[int]) -> str:
    counts = Counter(topology.link(one, other) or "SYS" for one, other in zip(order, (*order[1:], order[0]), strict=True))
    known = sorted(counts, key=lambda link: CLASSES.index(link) if link in CLASSES else -1)
    return ", ".join(f"{counts[link]} × {link}" for link in known)


def share_words(share: Share) -> str:
    """Return what a shared way leaves to each; "" for a host bridge, where each card has a root port of its own."""
    slower = {name: (alone, all_) for name, (alone, all_) in share.each_gbyte_s.items() if all_ < alone - 0.05}
    if share.kind != "switch" or not slower:
        return ""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, (alone, all_) in slower.items():
        groups.setdefault((f"{all_:.1f}", f"{alone:.1f}"), []).append(name)
    each = "; ".join(
        f"{', '.join(names)} {all_} GB/s{' each' if len(names) > 1 else ''} instead of {alone}"
        for (all_, alone), names in groups.items()
    )
    uplink = f" (uplink taken for {share.uplink.text}: not told)" if share.uplink is not None else ""
    return f"switch {share.at}, all at once: {each}{uplink}"


def title(picture: Picture) -> str:
    """Return the names of the nodes that are so."""
    alike = f" ({len(picture.nodes)} nodes alike)" if len(picture.nodes) > 1 else ""
    return f"{names_in_short(picture.nodes)}{alike}"


def names_in_short(names: Sequence[str]) -> str:
    """Return node names in short: runs of numbers as node[01-04]."""
    parts: list[str] = []
    place = 0
    while place < len(names):
        last = place
        while last + 1 < len(names) and _next_name(names[last]) == names[last + 1]:
            last += 1
        first, end = names[place], names[last]
        if last - place < 2:
            parts += names[place : last + 1]
        else:
            stem = first.rstrip("0123456789")
            parts.append(f"{stem}[{first[len(stem) :]}-{end[len(stem) :]}]")
        place = last + 1
    return ", ".join(parts)


def _next_name(name: str) -> str:
    stem = name.rstrip("0123456789")
    digits = name[len(stem) :]
    return f"{stem}{int(digits) + 1:0{len(digits)}d}" if digits and digits.isascii() else ""


# --------------------------------------------------------------------------- the matrix


def matrix(picture: Picture) -> tuple[tuple[str, ...], tuple[tuple[str, tuple[str, ...]], ...]]:
    """Return (headings, (name, classes) of each row): GPUs and network cards against GPUs; "X" itself, "?" not known.

    The functions of one card are one row where they are as near; cards whose distance to no GPU is known are left out.
    """
    gpus = picture.topology.gpus
    headings = tuple(f"GPU{gpu.index}" for gpu in gpus)
    rows = [
        (
            f"GPU{one.index}",
            tuple("X" if one is other else picture.topology.link(one.index, other.index) or "?" for other in gpus),
        )
        for one in gpus
    ]
    merged: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    where = {nic.name: nic.pci.rpartition(".")[0] for nic in picture.topology.nics}
    for nic in picture.topology.nics:
        cells = tuple(_told(gpu, nic.name) for gpu in gpus)
        if set(cells) - {"?"}:
            merged.setdefault((where[nic.name] or nic.name, cells), []).append(nic.name)
    rows += [(_few(names), cells) for (_, cells), names in merged.items()]
    return headings, tuple(rows) if gpus else ()


def _told(gpu: GpuPlace, nic: str) -> str:
    return gpu.links.get(nic) or "?"


def legend(rows: Sequence[tuple[str, tuple[str, ...]]]) -> str:
    """Return what the classes in a matrix mean, nearest first."""
    used = {cell for _, cells in rows for cell in cells}
    known = [f"{link} {words}" for link, words in MEANING.items() if link in used]
    return "; ".join([*known, *(["? not known"] if "?" in used else [])])


# --------------------------------------------------------------------------- as text

WIDTH = 80
LABEL_MAX = 24
"""Characters of a name beside the matrix, where the matrix leaves no room for more."""
_GLUE = "\x1f"
"""Stands for a space within a piece of text that must not be broken."""


def text(pictures: Sequence[Picture], width: int = WIDTH) -> str:
    """Return the drawings one below the other, no line longer than `width` (60 at least), without colour."""
    width = max(width, 60)
    drawn = []
    for picture in pictures:
        lines = _folded(printable(title(picture)), width)
        lines += _folded(printable(picture.processor), width)
        if picture is not pictures[0]:
            lines += _folded(printable(_unlike(pictures[0], picture)), width)
        for numa in picture.numas:
            lines += _box(numa, width)
        lines += ["", *matrix_lines(picture, width)] if picture.topology.gpus else []
        sentences = summary(picture)
        lines += [""] if sentences else []
        for sentence in sentences:
            lines += _folded(printable(sentence), width, "  ")
        drawn.append("\n".join(lines))
    return "\n\n".join(drawn) + "\n" if drawn else ""


def _unlike(first: Picture, other: Picture, at_most: int = 4) -> str:
    found = differences(first, other)
    more = f"; and {len(found) - at_most} more" if len(found) > at_most else ""
    return f"unlike {names_in_short(first.nodes)}: {'; '.join(found[:at_most])}{more}" if found else ""


def _folded(words: str, width: int, indent: str = "", first: str = "") -> list[str]:
    return textwrap.wrap(words, width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)


def _box(numa: Numa, width: int) -> list[str]:
    inner = width - 4
    heading = printable(" · ".join((numa.name, *numa.words)))
    inside: list[str] = []
    if len(heading) > width - 6:
        inside += _folded(printable(", ".join(numa.words)), inner, "  ")
        heading = numa.name
    for branch in host_bridges(numa.cards):
        inside += _branch_lines(branch, inner)
    lines = [f"┌─ {heading} {'─' * (width - len(heading) - 5)}┐"]
    lines += [f"│ {line:<{inner}} │" for line in inside]
    return [*lines, f"└{'─' * (width - 2)}┘"]


def _branch_lines(branch: Branch, width: int) -> list[str]:
    name = f"host bridge {branch.bridge}" if branch.bridge else ""
    if len(branch.cards) == 1 and not branch.branches:
        return _leaf(branch.cards[0], width, f"{name} ── " if name else "", " " * 6)
    lines = [name] if name else []
    return lines + _below(branch, width, "")


def _below(branch: Branch, width: int, before: str) -> list[str]:
    lines = []
    members: list[Card | Branch] = [*branch.cards, *branch.branches]
    for place, member in enumerate(members):
        last = place == len(members) - 1
        mine, rest = before + ("└─ " if last else "├─ "), before + ("   " if last else "│  ")
        if isinstance(member, Branch):
            lines.append(f"{mine}switch {member.bridge}")
            lines += _below(member, width, rest)
        else:
            lines += _leaf(member, width, mine, rest + "      ")
    return lines


def _leaf(card: Card, width: int, before: str, rest: str) -> list[str]:
    pieces = [printable(piece).replace(" ", _GLUE) for piece in card.facts]  # a line is broken between the pieces only
    words = f"{printable(card.name)}{_GLUE * 2}{', '.join(pieces)}"
    return [line.replace(_GLUE, " ") for line in _folded(words, width, rest, before)]


def matrix_lines(picture: Picture, width: int) -> list[str]:
    """Return the matrix with its legend; in several blocks of columns where the GPUs are too many for the width."""
    headings, rows = matrix(picture)
    wide = max([len(heading) for heading in headings] + [4]) + 1
    side = min(max(LABEL_MAX, width - wide * len(headings)), max((len(name) for name, _ in rows), default=0))
    a_block = max(1, (width - side) // wide)
    lines = []
    for start in range(0, len(headings), a_block):
        part = slice(start, start + a_block)
        lines.append(" " * side + "".join(f"{heading:>{wide}}" for heading in headings[part]))
        for name, cells in rows:
            shown = printable(name if len(name) <= side else f"{name[: side - 1]}…")
            lines.append(f"{shown:<{side}}" + "".join(f"{cell:>{wide}}" for cell in cells[part]))
    return lines + _folded(legend(rows), width)


# --------------------------------------------------------------------------- as SVG

PAGE_WIDTH = 1180
BOX_WIDTH = 640
"""Widest a NUMA node is drawn before its host bridges go to the next row."""
PAD, GAP, LINE = 10.0, 8.0, 14.0
SMALL = 6.2
"""Width of a character at 10 px, rounded up; CHARACTER is that at 11 px."""
BOLD = 7.6
"""Width of a bold character at 12 px, rounded up."""
CELL_WIDE, CELL_HIGH = 42.0, 20.0
SHADES = {"X": "own", "?": "missing", "PIX": "s0", "PXB": "s1", "PHB": "s2", "NODE": "s3", "SYS": "s4"}
STYLE = """
svg { --page: #f6f7f8; --card: #fff; --ink: #1b2127; --soft: #5b6672; --line: #c9d0d7; --code: #f0f2f4; --link: #20578f;
  --fail: #b3261e; --s0: #f3f1ec; --s1: #fbe6d0; --s2: #f8cfa5; --s3: #f2ae72; --s4: #e1833f; color-scheme: light dark;
  font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
@media (prefers-color-scheme: dark) { svg { --page: #14181c; --card: #1c2126; --ink: #e3e7ea; --soft: #a4aeb8; --line: #3c454d;
  --code: #262d33; --link: #86b7e8; --fail: #ff8a80; --s0: #2a3036; --s1: #47382b; --s2: #67482c; --s3: #8c5b2c;
  --s4: #b8722f; } }
text { fill: var(--ink); font-size: 11px; }
.small { font-size: 10px; fill: var(--soft); } .title { font-size: 12px; font-weight: 600; } .alarm { fill: var(--fail); }
.strong { font-weight: 600; } .page { fill: var(--page); } .box { fill: var(--card); stroke: var(--line); }
.bridge { fill: none; stroke: var(--line); } .switch { fill: none; stroke: var(--soft); stroke-dasharray: 4 3; }
.chip { fill: var(--code); stroke: var(--soft); stroke-width: .75; } .data { stroke: var(--link); stroke-width: 2; }
.lost { stroke: var(--fail); stroke-width: 2; } .own { fill: none; } .missing { fill: none; stroke: var(--line); }
.s0 { fill: var(--s0); } .s1 { fill: var(--s1); } .s2 { fill: var(--s2); } .s3 { fill: var(--s3); } .s4 { fill: var(--s4); }
@media (prefers-color-scheme: dark) { text.on4 { fill: #14181c; } }
"""
"""Colours as in report.css; in the file itself, as an SVG is often shown by itself."""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of the drawing, measured: `drawn` has its upper left corner at (0, 0)."""

    wide: float
    high: float
    drawn: str


def svg(pictures: Sequence[Picture]) -> str:
    """Return the drawings one below the other as one SVG file that needs nothing else."""
    blocks = []
    for picture in pictures:
        unlike = _unlike(pictures[0], picture) if picture is not pictures[0] else ""
        head = [(title(picture), "title", BOLD), (picture.processor, "small", SMALL), (unlike, "", CHARACTER)]
        parts = [*_paragraphs(head), _flow([_numa_block(numa) for numa in picture.numas], PAGE_WIDTH)]
        parts += [_matrix_block(picture)] if picture.topology.gpus else []
        parts += _paragraphs([(line, "alarm" if line.startswith("!") else "", CHARACTER) for line in summary(picture)])
        blocks.append(_stack(parts, GAP))
    whole = _stack(blocks, 4 * GAP)
    wide, high = whole.wide + 4 * PAD, whole.high + 4 * PAD
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high:.0f}" width="{wide:.0f}" height="{high:.0f}"'
        f' role="img"><title>GPUs, network cards and NUMA nodes</title><style>{STYLE}</style>'
        f'<rect class="page" width="100%" height="100%"/>{_at(whole, 2 * PAD, 2 * PAD)}</svg>\n'
    )


def _paragraphs(lines: Iterable[tuple[str, str, float]]) -> list[Block]:
    """Return a block for each (text, class, width of a character), folded to the page; none for an empty text."""
    found = []
    for words, kind, wide in lines:
        folded = _folded(words, int(PAGE_WIDTH / wide), "  ")
        if folded:
            drawn = "".join(_text(line, 0, 11 + place * LINE, kind) for place, line in enumerate(folded))
            found.append(Block(max(map(len, folded)) * wide, len(folded) * LINE, drawn))
    return found


def _numa_block(numa: Numa) -> Block:
    inside = _flow([_branch_block(branch, top=True) for branch in host_bridges(numa.cards)], BOX_WIDTH)
    words = [line for word in numa.words for line in _folded(word, int(BOX_WIDTH / SMALL), "  ")]
    return _framed("box", numa.name, words, inside, 150.0)


def _branch_block(branch: Branch, *, top: bool) -> Block:
    parts = [*map(_chip, branch.cards), *(_branch_block(below, top=False) for below in branch.branches)]
    inside = _flow(parts, BOX_WIDTH - 2 * PAD)
    if top and not branch.bridge:
        return inside
    return _framed("bridge" if top else "switch", f"{'host bridge' if top else 'switch'} {branch.bridge}", [], inside)


def _framed(kind: str, heading: str, words: Sequence[str], inside: Block, at_least: float = 0.0) -> Block:
    """Return a frame with its heading, lines of small text, and what is inside."""
    strong = kind == "box"
    top = LINE + 4 + len(words) * 13
    wide = max([len(heading) * (BOLD if strong else SMALL), inside.wide, at_least] + [len(line) * SMALL for line in words])
    high = PAD / 2 + top + inside.high + PAD * (1 if inside.high else 0.5)
    drawn = _rect(kind, wide + 2 * PAD, high) + _text(heading, PAD, 16, "title" if strong else "small")
    drawn += "".join(_text(line, PAD, 16 + 13 * (place + 1), "small") for place, line in enumerate(words))
    return Block(wide + 2 * PAD, high, drawn + _at(inside, PAD, PAD / 2 + top))


def _chip(card: Card) -> Block:
    lost = card.link is not None and card.link.lanes_lost
    lines = card.facts
    wide = max([len(card.name) * CHARACTER] + [len(line) * SMALL for line in lines]) + 2 * PAD
    high = 20.0 + 13 * len(lines) + 4
    kind = f"chip{' data' if card.data else ''}{' lost' if lost else ''}"
    drawn = _rect(kind, wide, high) + _text(card.name, PAD, 15, "strong")
    for place, line in enumerate(lines):
        alarm = " alarm" if lost and place == len(lines) - 1 else ""
        drawn += _text(line, PAD, 15 + 13 * (place + 1), f"small{alarm}")
    tip = e(f"{card.name}: {', '.join(lines)}")
    return Block(wide, high, f"<g><title>{tip}</title>{drawn}</g>")


def _matrix_block(picture: Picture) -> Block:
    headings, rows = matrix(picture)
    side = max(len(name) for name, _ in rows) * CHARACTER + GAP
    parts = [_text(heading, side + (place + 0.5) * CELL_WIDE, 14, "small", "middle") for place, heading in enumerate(headings)]
    for row, (name, cells) in enumerate(rows):
        y = CELL_HIGH * (row + 1)
        parts.append(_text(name, side - GAP, y + 14, "", "end"))
        for column, cell in enumerate(cells):
            shade = SHADES.get(cell, "s0")
            frame = _rect(shade, CELL_WIDE - 2, CELL_HIGH - 2, 2)
            words = "" if cell == "X" else _text(cell, CELL_WIDE / 2 - 1, 13, f"on{shade[-1]}", "middle")
            tip = e(f"{name}, {headings[column]}: {MEANING.get(cell, cell)}")
            group = f"<g><title>{tip}</title>{frame}{words}</g>"
            parts.append(_at(Block(0, 0, group), side + column * CELL_WIDE, y))
    table = Block(side + len(headings) * CELL_WIDE, CELL_HIGH * (len(rows) + 1), "".join(parts))
    return _stack([table, *_paragraphs([(legend(rows), "small", SMALL)])], GAP / 2)


def _flow(blocks: Sequence[Block], widest: float) -> Block:
    """Return the blocks side by side, in as many rows as they need to be no wider than `widest` (one alone may be)."""
    x = y = wide = high = 0.0
    parts = []
    for block in blocks:
        if x and x + block.wide > widest:
            x, y, high = 0.0, y + high + GAP, 0.0
        parts.append(_at(block, x, y))
        wide, high = max(wide, x + block.wide), max(high, block.high)
        x += block.wide + GAP
    return Block(wide, y + high, "".join(parts))


def _stack(blocks: Sequence[Block], gap: float) -> Block:
    """Return the blocks one below the other."""
    y = 0.0
    parts = []
    for block in blocks:
        parts.append(_at(block, 0, y))
        y += block.high + gap
    return Block(max((block.wide for block in blocks), default=0.0), max(0.0, y - gap), "".join(parts))


def _at(block: Block, x: float, y: float) -> str:
    return f'<g transform="translate({x:.1f} {y:.1f})">{block.drawn}</g>' if block.drawn else ""


def _rect(kind: str, wide: float, high: float, round_: float = 4) -> str:
    return f'<rect class="{kind}" width="{wide:.1f}" height="{high:.1f}" rx="{round_:g}"/>'


def _text(words: str, x: float, y: float, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" xml:space="preserve">{e(words)}</text>'


def class_pairs(topology: NodeTopology) -> Mapping[str, str | None]:
    """Return the classes of all pairs, "gpu0-gpu1" and "gpu0-mlx5_0", for programs; None = not known."""
    pairs = {f"gpu{one}-gpu{other}": link for (one, other), link in topology.gpu_links.items()}
    pairs.update({f"gpu{gpu.index}-{name}": link for gpu in topology.gpus for name, link in gpu.links.items()})
    return pairs
