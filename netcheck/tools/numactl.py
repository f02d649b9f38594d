"""`numactl -H`: NUMA nodes, their CPUs and memory, and how far they are from each other.

A long CPU list is often pasted from a terminal that broke it in the middle of a number: what continues it is joined again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from netcheck.tools._cpu_list import MAX_CPUS, cpu_list
from netcheck.tools._reading import lines_of
from r4090c.errors import ParseError

TOOL = "numactl"
COMMAND = "numactl -H"
REMOTE_DISTANCE = 20
"""From here on another node is on another socket, where all are equally far: Linux's own default (include/linux/topology.h)."""
_LINE = re.compile(r"\s*node ([0-9]{1,4}) (cpus|size|free):(.*)")
_AMOUNT = re.compile(r"\s*([0-9]{1,12}) MB\s*")
_K = TypeVar("_K")
_V = TypeVar("_V")
_ANNOUNCED = re.compile(r"available: ([0-9]{1,4}) nodes? \(([0-9,-]{1,4000})\)")


@dataclass(frozen=True, slots=True)
class NumactlNode:
    """One NUMA node; MiB (numactl says MB), None = not told."""

    index: int
    cpus: tuple[int, ...]
    size_mib: int | None
    free_mib: int | None


@dataclass(frozen=True, slots=True)
class Numactl:
    """`distances`: one row a node, in their order; empty = not told. `memoryless`: nodes with CPUs whose memory is missing.

    `cpuless`: nodes of memory only. `nodes_per_socket`: None when the distances do not tell.
    """

    nodes: tuple[NumactlNode, ...]
    distances: tuple[tuple[int, ...], ...]
    memoryless: tuple[int, ...]
    cpuless: tuple[int, ...]
    nodes_per_socket: int | None


def parse(text: str) -> Numactl:
    """Return the nodes. Raises ParseError when nodes are missing, a CPU is on two nodes, or numactl says there is no NUMA."""
    lines = lines_of(text)
    announced = next((match for line in lines if (match := _ANNOUNCED.search(line))), None)
    if announced is None:
        said = [line.strip() for line in lines if line.strip() and "numactl" not in line]
        raise ParseError("; ".join(said[:3])[:300] or "no output")
    cpus: dict[int, tuple[int, ...]] = {}
    amounts: dict[tuple[int, str], int | None] = {}
    place = 0
    while place < len(lines):
        match = _LINE.fullmatch(lines[place])
        start, place = place, place + 1
        if not match:
            continue
        index, what = int(match.group(1)), match.group(2)
        if what == "cpus":
            while place < len(lines) and lines[place].strip() and not lines[place].strip("0123456789 "):
                place += 1
            pieces = [match.group(3), *lines[start + 1 : place]]
            _set(cpus, index, _joined(pieces, [len(line) for line in lines[start:place]]))
        else:
            amount = _AMOUNT.fullmatch(match.group(3))
            _set(amounts, (index, what), int(amount.group(1)) if amount else None)
    indices = sorted(cpus)
    if indices != list(cpu_list(announced.group(2))) or any((index, "size") not in amounts for index in indices):
        raise ParseError(f"{announced.group(0)}, but {len(indices)} are listed, or without a size: incomplete")
    if len({cpu for node in cpus.values() for cpu in node}) != sum(map(len, cpus.values())):
        raise ParseError("a CPU is on two nodes")
    nodes = tuple(NumactlNode(i, cpus[i], amounts.get((i, "size")), amounts.get((i, "free"))) for i in indices)
    distances = _distances(lines, indices)
    return Numactl(
        nodes=nodes,
        distances=distances,
        memoryless=tuple(node.index for node in nodes if node.cpus and node.size_mib == 0),
        cpuless=tuple(node.index for node in nodes if not node.cpus),
        nodes_per_socket=_per_socket(distances),
    )


def _set(values: dict[_K, _V], key: _K, value: _V) -> None:
    if values.setdefault(key, value) != value:
        raise ParseError(f"node {key}: told twice, and differently: more than one output?")


def _joined(pieces: list[str], widths: list[int]) -> tuple[int, ...]:
    """Return the CPUs of a list that a terminal broke into `pieces`; numactl lists them in ascending order.

    A line as wide as the widest was broken at the terminal's edge, maybe within a number; a shorter one lost a blank at its end.
    Where the order allows one reading only, that one is right.
    """
    edge = max(widths[:-1], default=0)
    found: list[int] = []
    rest = ""
    for place, piece in enumerate(pieces):
        words = piece.split()
        if rest:
            glued = rest + words[0]
            as_one = not piece[0].isspace() and _ascend([*found[-1:], glued, *words[1:2]])
            as_two = _ascend([*found[-1:], rest, *words[:2]])
            words = [glued, *words[1:]] if as_one and (not as_two or widths[place - 1] == edge) else [rest, *words]
        # A number at the end of a line may go on in the next one.
        goes_on = bool(words) and place < len(pieces) - 1 and not piece[-1].isspace()
        rest = words.pop() if goes_on else ""
        if not _ascend([*found[-1:], *words]):
            raise ParseError(f"not a list of CPUs: {piece.strip()[:120]!r}")
        found += map(int, words)
    return tuple(found)


def _ascend(numbers: list[int | str]) -> bool:
    """Return whether `numbers` are CPUs in ascending order."""
    if not all(isinstance(number, int) or re.fullmatch(r"[0-9]{1,4}", number) for number in numbers):
        return False
    cpus = [int(number) for number in numbers]
    return all(cpu < MAX_CPUS for cpu in cpus) and all(one < other for one, other in pairwise(cpus))


def _distances(lines: list[str], indices: list[int]) -> tuple[tuple[int, ...], ...]:
    """Return the matrix below "node distances:", none when there is no such line. Raises ParseError when it is cut."""
    start = next((place + 1 for place, line in enumerate(lines) if line.strip() == "node distances:"), None)
    if start is None:
        return ()
    # Word by word: a long row may have been broken, too.
    words = " ".join(lines[start : start + 4 * len(indices) + 4]).split()
    wanted = ["node", *(str(index) for index in indices)]
    if words[: len(wanted)] != wanted:
        raise ParseError("node distances: not one column a node")
    rows = []
    for place, index in enumerate(indices):
        row = words[(place + 1) * len(wanted) :][: len(wanted)]
        if len(row) != len(wanted) or row[0] != f"{index}:" or not all(re.fullmatch(r"[0-9]{1,3}", cell) for cell in row[1:]):
            raise ParseError(f"node distances: row {index} is incomplete")
        rows.append(tuple(int(cell) for cell in row[1:]))
        if rows[-1][place] != 10:  # ACPI, SLIT: a node is 10 from itself
            raise ParseError(f"node distances: row {index} is damaged or cut")
    return tuple(rows)


def _per_socket(distances: tuple[tuple[int, ...], ...]) -> int | None:
    """Return how many nodes each socket has: those on the near side of the widest gap between the distances.

    Their scale differs by vendor (12 and 32, 21 and 31, 20 and 40), so there is no fixed limit. None when the nodes do not fall
    into groups of one size, as four sockets in a ring.
    """
    apart = sorted({distance for place, row in enumerate(distances) for distance in row[:place] + row[place + 1 :]})
    widest = max(pairwise(apart), key=lambda pair: pair[1] / max(pair[0], 1), default=(0, REMOTE_DISTANCE))
    limit = widest[1]
    groups = {frozenset(other for other, distance in enumerate(row) if distance < limit) for row in distances}
    sizes = {len(group) for group in groups}
    size = sizes.pop() if len(sizes) == 1 else 0
    return size if size and len(groups) * size == len(distances) else None
