"""The square matrices of `nvidia-smi topo`: a header of devices, one row for each, more columns behind it.

Columns are found by the header's names. A matrix that lost its line structure, a row or a cell is refused: half a topology
looks like a topology. The columns behind the matrix are the driver's weak spot: they may be missing or empty, and the last one is
set one tab too far ("0-31<tab>0<tab><tab>N/A" under three titles).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile

from netcheck.tools._reading import lines_of
from r4090c.errors import ParseError

MAX_COLUMNS = 256
"""est.: far above any machine (16 GPUs, 32 NICs); a damaged header must not ask for millions of pairs."""
_NAME = re.compile(r"[A-Za-z][\w.-]*\d[\w.-]*")
_GPU = re.compile(r"GPU(\d{1,3})")
_WORD = re.compile(r"\S+")
_TITLE = re.compile(r"(?:CPU|NUMA) Affin\w*|GPU NUMA(?: ID)?|\S+(?: \S+)*")
_TAB = 8
"""Columns of a tab stop: what `expand`, terminals and the driver's authors take for granted."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """`cells`: (row, column) -> text, "X" on the diagonal. `tails`: row -> text by title of the columns behind the matrix.

    `unsure`: the (row, title) that may be cut, because the text ends in it without a newline.
    """

    names: tuple[str, ...]
    cells: Mapping[tuple[str, str], str]
    tails: Mapping[str, Mapping[str, str]]
    unsure: tuple[str, str] | None = None


def gpu_index(name: str) -> int | None:
    """Return 3 for "GPU3", None for any other name."""
    match = _GPU.fullmatch(name)
    return int(match.group(1)) if match else None


def read_matrix(text: str, cell: re.Pattern[str]) -> Matrix:
    """Return the one matrix in `text`, whose cells match `cell` ("X" aside). Raises ParseError: the text, when there is none."""
    lines = lines_of(text)
    header: tuple[str, ...] = ()
    titles: tuple[str, ...] = ()
    rows: dict[str, tuple[tuple[str, ...], Mapping[str, str]]] = {}
    unsure = None
    for number, line in enumerate(lines):
        names, rest = _names(line)
        if (not header or names == header) and _is_header(names, rest, cell):  # some loops repeat it
            header, titles = names, _titles(rest)
            continue
        words = list(_WORD.finditer(line))
        if not words or words[0].group() not in header:
            continue
        label, links = words[0].group(), tuple(word.group() for word in words[1 : len(header) + 1])
        if len(links) < len(header):
            continue  # cut: told below, as a missing row
        wrong = [link for link in links if link != "X" and not cell.fullmatch(link)]
        if wrong or (links[header.index(label)] != "X"):
            raise ParseError(f"row {label}: {(wrong or ['no X where it meets itself'])[0]!r}: {line.strip()[:120]!r}")
        tail = _tail(line, words[len(header)].end(), words[0].start() + _TAB * (len(header) + 1), titles)
        if rows.setdefault(label, (links, tail)) != (links, tail):
            raise ParseError(f"two different rows {label}: more than one matrix?")
        if number == len(lines) - 1 and any(tail.values()):  # no newline after it
            unsure = label, next(title for title in reversed(titles) if tail.get(title))
    if not header:
        raise ParseError(_why_none(text, cell))
    missing = [name for name in header if name not in rows]
    if missing:
        raise ParseError(
            f"incomplete matrix: the header announces {len(header)} devices, {len(rows)} full rows; {missing[0]} is missing"
        )
    cells = {(row, column): link for row in header for column, link in zip(header, rows[row][0], strict=True)}
    return Matrix(header, cells, {row: tail for row, (_, tail) in rows.items()}, unsure)


def _names(line: str) -> tuple[tuple[str, ...], str]:
    """Return the device names a line begins with, and what follows them."""
    names = tuple(takewhile(lambda word: _NAME.fullmatch(word.group()), _WORD.finditer(line)))
    return tuple(name.group() for name in names), line[names[-1].end() :] if names else line


def _is_header(names: tuple[str, ...], rest: str, cell: re.Pattern[str]) -> bool:
    if not any(_GPU.fullmatch(name) for name in names) or len(set(names)) != len(names) or any(map(cell.fullmatch, names)):
        return False
    if len(names) > MAX_COLUMNS:
        raise ParseError(f"{len(names)} columns")
    titles = [word for word in rest.split() if word[0].isupper() and word != "X" and not _NAME.fullmatch(word)]
    return titles == rest.split() and not any(map(cell.fullmatch, titles))


def _titles(rest: str) -> tuple[str, ...]:
    """Return the titles behind the device names; a tab or two blanks end one, known ones also end at a single blank."""
    parts = re.split(r"\t|  +", rest)
    return tuple(title for part in parts for title in _TITLE.findall(part.strip()))


def _tail(line: str, end: int, first_stop: int, titles: tuple[str, ...]) -> dict[str, str]:
    """Return the cells behind the matrix, by title; its last cell ends at `end`, the next tab stop is `first_stop`."""
    rest = line[end:]
    if "\t" in rest:
        cells: list[str] | None = [part.strip() for part in rest.split("\t")[1:]]
    else:
        cells = rest.split()
        if len(cells) < len(titles):
            cells = _tab_stops(line, end, first_stop)
    if cells is None:  # which of the columns are empty cannot be told
        first = rest.split()[0]
        return {titles[0]: first} if re.search(r"\d[-,]", first) else {}
    for place in range(len(cells) - 1, -1, -1):
        if len(cells) > len(titles) and not cells[place]:
            del cells[place]
    return dict(zip(titles, cells, strict=False))


def _tab_stops(line: str, end: int, stop: int) -> list[str] | None:
    """Return the cells of a row whose tabs were expanded, empty ones included; None when the words are not at tab stops."""
    cells: list[str] = []
    for word in _WORD.finditer(line, end):
        gap = word.start() - stop
        if gap < 0 or gap % _TAB:
            return None
        cells += [""] * min(gap // _TAB, MAX_COLUMNS) + [word.group()]
        stop = word.start() + _TAB * (len(word.group()) // _TAB + 1)
    return cells


def _why_none(text: str, cell: re.Pattern[str]) -> str:
    lines = [line.strip() for line in lines_of(text)]
    for line in lines:
        words = line.split()
        if words.count("GPU0") > 1 and any(word == "X" or cell.fullmatch(word) for word in words):
            return "flattened matrix: its lines were joined, give the raw output"
    said = [line for line in lines if line and "nvidia-smi" not in line]
    return f"no matrix: {'; '.join(said[:3])[:300]}" if said else "no matrix: the output is empty"
