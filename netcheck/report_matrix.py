"""A matrix of links as lines of text: all cells where they fit, else the slowest links and the medians of each node. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from netcheck.figures import ARROW, Matrix, number

WHOLE_MAX = 8
"""Nodes whose matrix is shown whole: 8 columns fit 80 characters."""
SLOWEST = 5
"""Links that are named of a larger one."""
ODD = 0.9
"""est.: cells below this share of what the best quarter has (for times: above its inverse) are marked."""
BEST = 0.75
"""Not the median: of four nodes in a ring one slow node makes half of the links slow."""
WIDTH = 100
"""Columns where the output is no terminal."""


def shown(matrices: Sequence[Matrix]) -> list[Matrix]:
    """Return those a terminal has room for: one of each measurement's bandwidths, of each link the best of them."""
    found: dict[str, list[Matrix]] = {}
    for one in matrices:
        if one.unit == "Gbit/s" and one.cells:
            found.setdefault(one.measurement, []).append(one)
    return [_best(own) for own in found.values()]


def _best(matrices: Sequence[Matrix]) -> Matrix:
    """Return the one matrix, or of several the best value of every link."""
    first = matrices[0]
    if len(matrices) == 1:
        return first
    pairs = dict.fromkeys(pair for one in matrices for pair in one.cells)
    cells = {pair: max(one.cells[pair] for one in matrices if pair in one.cells) for pair in pairs}
    nodes = tuple(dict.fromkeys(node for one in matrices for node in one.nodes))
    return Matrix(first.measurement, f"(best of {', '.join(one.name for one in matrices)})", first.unit, nodes, cells)


def table(matrix: Matrix, width: int | None) -> list[str]:
    """Return the lines that show `matrix` within `width` columns (None = no terminal)."""
    width = WIDTH if width is None else width
    return list(_whole(matrix, width) if len(matrix.nodes) <= WHOLE_MAX else _summary(matrix, width))


def is_odd(matrix: Matrix, value: float) -> bool:
    """Return whether a cell stands out: clearly worse than the best quarter."""
    ranked = sorted(matrix.cells.values(), reverse=not matrix.higher_is_better)
    good = ranked[min(len(ranked) - 1, int(len(ranked) * BEST))]
    return value < good * ODD if matrix.higher_is_better else value * ODD > good


def _median(matrix: Matrix) -> float:
    return statistics.median(matrix.cells.values())


def _cell(matrix: Matrix, sender: str, receiver: str) -> str:
    value = matrix.cells.get((sender, receiver))
    if value is None:
        return " " if sender == receiver else "·"
    return number(value) + ("*" if is_odd(matrix, value) else " ")


def _whole(matrix: Matrix, width: int) -> Iterator[str]:
    nodes = matrix.nodes
    cells = {(a, b): _cell(matrix, a, b) for a in nodes for b in nodes}
    widest = max(map(len, cells.values()))
    side = max(map(len, nodes))
    heads = {node: node for node in nodes}
    if side + len(nodes) * (max(widest, side) + 2) > width:  # long names: columns carry numbers
        heads = {node: str(place) for place, node in enumerate(nodes, 1)}
    rows = {node: node if heads[node] == node else f"{heads[node]} {node}" for node in nodes}
    side = max(map(len, rows.values()))
    column = max(widest, *(len(head) for head in heads.values()))
    odd = any(text.endswith("*") for text in cells.values())
    note = f"* more than {1 - ODD:.0%} {'below' if matrix.higher_is_better else 'above'} the best quarter" if odd else ""
    yield from _folded("", [matrix.title, "rows send, columns receive", *([note] if note else [])], width)
    yield f"{'':{side}}  " + "  ".join(f"{heads[node]:>{column}}" for node in nodes)
    for sender in nodes:
        yield (f"{rows[sender]:{side}}  " + "  ".join(f"{cells[sender, receiver]:>{column}}" for receiver in nodes)).rstrip()


def _summary(matrix: Matrix, width: int) -> Iterator[str]:
    yield f"{matrix.title}   {len(matrix.cells)} links, median {number(_median(matrix))}"
    slowest = [f"{a}{ARROW}{b} {number(value)}" for (a, b), value in matrix.worst_first()[:SLOWEST]]
    yield from _folded("slowest  ", slowest, width)
    medians = []
    for node in matrix.nodes:
        both = [number(statistics.median(values)) if values else "–" for values in (matrix.sending(node), matrix.receiving(node))]
        medians.append(f"{node} {both[0]}/{both[1]}")
    yield from _folded("median   ", medians, width, "node sends/receives: ")


def _folded(head: str, words: Sequence[str], width: int, lead: str = "") -> Iterator[str]:
    line = head + lead
    empty = True
    for word in words:
        if not empty and len(line) + len(word) + 3 > width:
            yield line.rstrip()
            line, empty = " " * len(head), True
        line += word if empty else f"   {word}"
        empty = False
    yield line.rstrip()
