"""Drawings for the HTML report, as SVG text: a matrix as a heat map, and who sits where on which node. Pure.

Colours are classes of report.css (light, dark, print), never attributes, so that a strict Content-Security-Policy lets them be.
How far a cell is from the best is told by lightness (one hue, darker is worse) and by its number: colour-blind readers see both.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from netcheck.data_network import data_iface, peers_of, rdma_ports
from netcheck.figures import ARROW, Matrix, number
from netcheck.report_text import printable
from netcheck.topology import node_topology
from r4090c.model import Cluster, Iface, Node, NodeFacts

SHORTFALL = (0.05, 0.10, 0.15, 0.20, 0.30, 0.45)
"""Upper bounds of the shades s0 … s5, as shares of the best value; beyond the last it is s6. est."""
ON_DARK = 5
"""The first shade that white text is read on."""
CHARACTER = 6.7
"""Width of a character at 11 px, rounded up."""
NAME_MAX = 22
"""Characters of a name that are drawn; the whole one is in the tooltip."""
DRAWING_WIDTH = 1180
BEST_QUANTILE = {True: 0.9, False: 0.5}
"""Which of the values, the worst first, counts as the best: one outlier must not make all others look bad. Times scatter more."""


def e(text: object) -> str:
    """Return text that is safe anywhere in HTML or SVG, also within quotes."""
    return escape(printable(str(text)), quote=True)


def cut(text: str, at_most: int = NAME_MAX) -> str:
    """Return `text`, shortened in the middle when it is long: both ends of a name tell."""
    if len(text) <= at_most:
        return text
    half = (at_most - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


# --------------------------------------------------------------------------- heat map


def best_of(matrix: Matrix) -> float:
    """Return the value that the shades compare with."""
    ranked = sorted(matrix.cells.values(), reverse=not matrix.higher_is_better)
    return ranked[min(len(ranked) - 1, int(len(ranked) * BEST_QUANTILE[matrix.higher_is_better]))] if ranked else 0.0


def shade(value: float, best: float, higher_is_better: bool) -> int:
    """Return the number of the shade: 0 as good as the best, 6 far from it."""
    low, high = (value, best) if higher_is_better else (best, value)
    lost = 0.0 if high <= 0 else 1 - low / high
    return next((place for place, bound in enumerate(SHORTFALL) if lost < bound), len(SHORTFALL))


def heat_map(matrix: Matrix) -> str:
    """Return the matrix as SVG: rows send, columns receive, with the median of each at the ends."""
    nodes = matrix.nodes
    best = best_of(matrix)
    widest = max((len(number(value)) for value in matrix.cells.values()), default=3)
    wide, high = max(34.0, widest * CHARACTER + 10), 22.0
    names = [cut(node) for node in nodes]
    side = max(map(len, names)) * CHARACTER + 12
    slanted = max(map(len, names)) * CHARACTER > wide - 4
    top = (max(map(len, names)) * CHARACTER * 0.72 + 14) if slanted else 20.0
    left, right = side, side + len(nodes) * wide
    bottom = top + len(nodes) * high
    room = max(map(len, names)) * CHARACTER * 0.72 if slanted else 0.0
    legend = _legend(left, bottom + high + 24, best, matrix)
    width, height = max(right + 16 + max(wide, room), legend[0]), bottom + high + 34
    parts = [f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" role="img">']
    parts.append(f"<title>{e(matrix.title)}: rows send, columns receive</title>")
    for place, name in enumerate(names):
        x, y = left + (place + 0.5) * wide, top + (place + 0.5) * high
        if slanted:
            parts.append(f'<text transform="translate({x - 2:.1f} {top - 6:.1f}) rotate(-45)">{e(name)}</text>')
        else:
            parts.append(f'<text x="{x:.1f}" y="{top - 6:.1f}" text-anchor="middle">{e(name)}</text>')
        parts.append(f'<text x="{left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{e(name)}</text>')
    for row, sender in enumerate(nodes):
        for column, receiver in enumerate(nodes):
            x, y = left + column * wide, top + row * high
            value = matrix.cells.get((sender, receiver))
            tip = f"{sender}{ARROW}{receiver}: " + ("not measured" if value is None else f"{number(value)} {matrix.unit}")
            if value is not None:
                parts.append(_cell(x, y, wide, high, value, shade(value, best, matrix.higher_is_better), tip))
            elif sender != receiver:
                parts.append(f"<g><title>{e(tip)}</title>{_rect('missing', x + 1, y + 1, wide - 2, high - 2, 2)}</g>")
    gap = 8.0
    parts.append(f'<text class="small" x="{right + gap:.1f}" y="{bottom + high - 2:.1f}">median</text>')
    for place, node in enumerate(nodes):
        for values, x, y, word in (
            (matrix.sending(node), right + gap, top + place * high, "sends"),
            (matrix.receiving(node), left + place * wide, bottom + gap, "receives"),
        ):
            if values:
                middle = statistics.median(values)
                tip = f"{node} {word} {number(middle)} {matrix.unit} (median)"
                parts.append(_cell(x, y, wide, high, middle, shade(middle, best, matrix.higher_is_better), tip))
    parts += legend[1]
    return "".join(parts) + "</svg>"


def _cell(x: float, y: float, wide: float, high: float, value: float, tone: int, tip: str) -> str:
    text = "on-dark" if tone >= ON_DARK else "on-light" if tone == ON_DARK - 1 else ""
    return (
        f"<g><title>{e(tip)}</title>{_rect(f's{tone}', x + 1, y + 1, wide - 2, high - 2, 2)}"
        f"{_text(number(value), x + wide / 2, y + high / 2 + 4, text, 'middle')}</g>"
    )


def _rect(kind: str, x: float, y: float, wide: float, high: float, round_: float, more: str = "") -> str:
    box = f'x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" rx="{round_:g}"'
    return f'<rect class="{kind}" {box}{more}/>'


def _text(text: object, x: float, y: float, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{e(text)}</text>'


def _legend(x: float, y: float, best: float, matrix: Matrix) -> tuple[float, list[str]]:
    """Return (where it ends, its parts): what each shade stands for."""
    words = f"{'below' if matrix.higher_is_better else 'above'} {number(best)} by"
    parts = [f'<text class="small" x="{x:.1f}" y="{y:.1f}">{e(words)}</text>']
    x += len(words) * 6.1 + 8
    for tone in range(len(SHORTFALL) + 1):
        label = f"≥{SHORTFALL[-1]:.0%}" if tone == len(SHORTFALL) else f"<{SHORTFALL[tone]:.0%}"
        parts.append(f'<rect class="s{tone}" x="{x:.1f}" y="{y - 9:.1f}" width="12" height="11" rx="2"/>')
        parts.append(f'<text class="small" x="{x + 15:.1f}" y="{y:.1f}">{label}</text>')
        x += 18 + len(label) * 6.1 + 5
    return x, parts


# --------------------------------------------------------------------------- topology

CHIP, GAP, PAD = 24.0, 4.0, 8.0
GPUS_A_ROW = 4
BUS_HIGH, DROP = 18.0, 26.0


@dataclass(frozen=True, slots=True)
class _Nic:
    name: str
    label: str
    tip: str
    data: bool


@dataclass(frozen=True, slots=True)
class _Numa:
    """What one NUMA node holds. `index` None: no NUMA node is known for it."""

    index: int | None
    cpus: int
    gpus: tuple[int, ...]
    nics: tuple[_Nic, ...]

    @property
    def size(self) -> tuple[float, float]:
        columns = min(GPUS_A_ROW, max(1, len(self.gpus)))
        rows = -(-len(self.gpus) // GPUS_A_ROW)
        nic = max((len(nic.label) * CHARACTER + 12 for nic in self.nics), default=0.0)
        words = max(len(_numa_words(self)) * 6.0, 0.0)
        wide = max(columns * (CHIP + GAP) - GAP if self.gpus else 0.0, nic, words) + 2 * PAD
        return wide, 20.0 + rows * (CHIP + GAP) + len(self.nics) * (20.0 + GAP) + GAP


def _numa_words(numa: _Numa) -> str:
    name = "NUMA not known" if numa.index is None else f"NUMA {numa.index}"
    return f"{name} · {numa.cpus} CPUs" if numa.cpus else name


def topology(cluster: Cluster, facts: Mapping[str, NodeFacts], worst: Mapping[str, str]) -> str:
    """Return the nodes as SVG: NUMA nodes with GPUs and network cards, and the data network above them.

    `worst`: node or node/gpuN -> status of its worst finding ("fail", "warn", "unknown"); others are drawn plainly.
    """
    cards = [_Card(node, cluster, facts.get(node.name), worst) for node in cluster.nodes if node.name in facts]
    rows: list[list[_Card]] = [[]]
    x = 0.0
    for card in cards:
        if rows[-1] and x + card.wide > DRAWING_WIDTH:
            rows.append([])
            x = 0.0
        rows[-1].append(card)
        x += card.wide + 14
    words = f"data network: {cluster.network.kind}"
    if cluster.network.rate_gbit_s:
        words += f", {cluster.network.rate_gbit_s:g} Gbit/s"
    if cluster.network.subnet:
        words += f", {cluster.network.subnet}"
    parts: list[str] = []
    y, widest = 0.0, 0.0
    for row in rows:
        wide = sum(card.wide + 14 for card in row) - 14
        widest = max(widest, wide, len(words) * 7.0 + 20)
        length = max(wide, len(words) * 7.0 + 20)
        parts.append(_rect("net", 0, y, length, BUS_HIGH, 3) + _text(words, 10, y + 13, "net-text"))
        x = 0.0
        for card in row:
            parts += card.drawn(x, y + BUS_HIGH, DROP)
            x += card.wide + 14
        y += BUS_HIGH + DROP + max((card.high for card in row), default=0.0) + 16
    head = f'<svg viewBox="-2 -2 {widest + 4:.0f} {y:.0f}" width="{widest + 4:.0f}" height="{y:.0f}" role="img">'
    return head + "<title>nodes, GPUs and network cards</title>" + "".join(parts) + "</svg>"


class _Card:
    """One node, measured out first and drawn later."""

    def __init__(self, node: Node, cluster: Cluster, facts: NodeFacts | None, worst: Mapping[str, str]) -> None:
        self.node, self.worst = node, worst
        numas = _numas(node, cluster, facts) if facts is not None else []
        self.title = cut(node.name)
        self.seats: list[tuple[_Numa, float, float]] = []
        columns = -(-len(numas) // (1 if len(numas) <= 2 else 2 if len(numas) <= 6 else 3))
        below = 26.0
        self.box = max((numa.size[0] for numa in numas), default=0.0)
        for start in range(0, len(numas), max(1, columns)):
            for place, numa in enumerate(numas[start : start + columns]):
                self.seats.append((numa, PAD + place * (self.box + GAP * 1.5), below))
            below += max(numa.size[1] for numa in numas[start : start + columns]) + GAP * 1.5
        self.wide = max(columns * (self.box + GAP * 1.5) - GAP * 1.5 + 2 * PAD, len(self.title) * 7.5 + 2 * PAD, 106.0)
        self.high = max(below - GAP * 1.5, 46.0) + PAD

    def drawn(self, x: float, y: float, drop: float) -> Iterator[str]:
        """Yield the card with its upper left corner at (x, y + drop), wired to what is above."""
        status = self.worst.get(self.node.name, "")
        top = y + drop
        mark = f" mark-{status}" if status in ("fail", "unknown", "warn") else ""
        parts: list[str] = []
        ends: list[float] = []
        for numa, across, below in self.seats:
            left, line = x + across, top + below
            parts.append(_rect("numa", left, line, self.box, numa.size[1], 4))
            parts.append(_text(_numa_words(numa), left + PAD, line + 14, "small"))
            line += 20
            for place, gpu in enumerate(numa.gpus):
                column, row = place % GPUS_A_ROW, place // GPUS_A_ROW
                own = self.worst.get(f"{self.node.name}/gpu{gpu}", "")
                chip = f" mark-{own}" if own in ("fail", "unknown", "warn") else ""
                cx, cy = left + PAD + column * (CHIP + GAP), line + row * (CHIP + GAP)
                tip = f"{self.node.name} GPU {gpu}" + (f": {own}" if own else "")
                drawn = _rect(f"chip{chip}", cx, cy, CHIP, CHIP, 3) + _text(gpu, cx + CHIP / 2, cy + 16, anchor="middle")
                parts.append(f"<g><title>{e(tip)}</title>{drawn}</g>")
            line += -(-len(numa.gpus) // GPUS_A_ROW) * (CHIP + GAP)
            for nic in numa.nics:
                wide_nic = len(nic.label) * CHARACTER + 12
                drawn = _rect(f"chip{' data' if nic.data else ''}", left + PAD, line, wide_nic, 20, 10) + _text(
                    nic.label, left + PAD + 6, line + 14
                )
                parts.append(f"<g><title>{e(nic.tip)}</title>{drawn}</g>")
                if nic.data:
                    ends.append(left + PAD + wide_nic / 2)
                line += 20 + GAP
        for end in ends or ([x + self.wide / 2] if self.seats else []):
            dashed = "" if ends else ' stroke-dasharray="3 3"'
            yield f'<path class="wire"{dashed} d="M{end:.1f} {y:.1f} V{top:.1f}"/>'
        dash = "" if self.seats else ' stroke-dasharray="4 3"'
        yield f"<g><title>{e(self.node.name)}</title>{_rect(f'box{mark}', x, top, self.wide, self.high, 6, dash)}</g>"
        yield _text(self.title, x + PAD, top + 17, "title")
        if not self.seats:
            yield _text("not read", x + PAD, top + 36, "small")
        yield from parts


def _numas(node: Node, cluster: Cluster, facts: NodeFacts) -> list[_Numa]:
    """Return what each NUMA node of `node` holds, in the order of their numbers."""
    found = node_topology(facts)
    cpus = facts.cpus.value
    sizes = {numa.index: len(numa.cpus) for numa in cpus.numa} if cpus is not None else {}
    only = next(iter(sizes)) if len(sizes) == 1 else None  # where there is one NUMA node, all is on it
    nics = [(only if numa is None else numa, nic) for numa, nic in _nics(node, cluster, facts)]
    gpus = [(only if gpu.numa is None else gpu.numa, gpu.index) for gpu in found.gpus]
    seats: set[int | None] = {*sizes, *(numa for numa, _ in gpus), *(numa for numa, _ in nics)}
    numas = [
        _Numa(
            index,
            sizes.get(index, 0) if index is not None else 0,
            tuple(gpu for numa, gpu in gpus if numa == index),
            tuple(nic for numa, nic in nics if numa == index),
        )
        for index in sorted(seats, key=lambda index: (index is None, index))
    ]
    return numas or ([_Numa(None, len(cpus.online), (), ())] if cpus is not None else [])


def _nics(node: Node, cluster: Cluster, facts: NodeFacts) -> Iterator[tuple[int | None, _Nic]]:
    """Yield (NUMA node, card) of RDMA ports and of what else has a wire that is up."""
    net, ports = facts.net.value, facts.rdma.value or ()
    iface = data_iface(net, node, peers_of(node, cluster))[0] if net is not None else None
    serving = {port.name for port in rdma_ports(node, ports, net, iface, cluster)}
    numa_of = {name: nic.numa for nic in node_topology(facts).nics for name in (nic.name, *nic.netdevs)}
    shown = set()
    for port in ports:
        shown.add(port.netdev)
        numa = port.numa if port.numa is not None and port.numa >= 0 else numa_of.get(port.hca)
        rate = f" {port.rate_gbit_s:g}G" if port.rate_gbit_s else ""
        tip = f"{node.name} {port.name} ({port.netdev or 'no interface'}): {port.state}{rate}"
        yield numa, _Nic(port.name, cut(f"{port.name}{rate}"), tip, port.name in serving)
    for one in net.ifaces if net is not None else ():
        if one.name not in shown and ((not one.virtual and one.operstate == "up") or one.name == iface):
            tip = f"{node.name} {one.name}: MTU {one.mtu}{_speed(one, ', ')}"
            yield numa_of.get(one.name), _Nic(one.name, cut(f"{one.name}{_speed(one, ' ', 'G')}"), tip, one.name == iface)


def _speed(iface: Iface, before: str, unit: str = " Gbit/s") -> str:
    return f"{before}{iface.speed_mbit_s / 1000:g}{unit}" if iface.speed_mbit_s else ""


def worst_of(statuses: Sequence[str]) -> str:
    """Return the worst of some statuses, "" for none."""
    order = ("fail", "unknown", "warn", "skip", "pass")
    return min(statuses, key=order.index, default="")
