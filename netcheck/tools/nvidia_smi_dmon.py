"""`nvidia-smi dmon`: a running table of power, temperature, use and clocks; two header lines, repeated now and then."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from netcheck.tools._reading import plain
from r4090c.errors import ParseError

TOOL = "nvidia-smi-dmon"
COMMAND = "nvidia-smi dmon -s pucm -c 10"
MAX_COLUMNS = 100
"""est.: all selections together print about 40 (`-s pucvmet` and `--gpm-metrics`)."""
MAX_GPUS = 256
"""est.: far above any machine; keeps a damaged table from asking for thousands."""
_NUMBER = re.compile(r"-?[0-9]{1,12}(?:\.[0-9]{1,6})?")


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """What one GPU did. `mean`, `most`: column of dmon ("pwr", "sm", "pclk") -> value in its unit; None = never told.

    `unreadable`: not one value in all samples, the driver does not get through to this GPU.
    """

    index: int
    samples: int
    mean: Mapping[str, float | None]
    most: Mapping[str, float | None]
    unreadable: bool


@dataclass(frozen=True, slots=True)
class Dmon:
    """`samples`: rows in all; `units`: column -> unit as printed ("W", "C", "%", "MHz").

    `complete`: the last row is whole, and ends in a newline. `notes`: lines that are no rows, such as a complaint about a GPU.
    """

    samples: int
    units: Mapping[str, str]
    gpus: tuple[GpuLoad, ...]
    complete: bool
    notes: tuple[str, ...] = ()


def parse(text: str) -> Dmon:
    """Return what dmon saw, by GPU. Raises ParseError when there is no header or no whole row, and for rows of another width."""
    header: list[str] = []
    units: dict[str, str] = {}
    values: dict[int, dict[str, list[float]]] = {}
    samples: dict[int, int] = {}
    notes: dict[str, None] = {}
    text = plain(text)
    complete = text.endswith("\n")
    lines = [line for line in text.split("\n") if line.strip()]
    for number, line in enumerate(lines):
        marked = line.lstrip().startswith("#")
        words = line.replace(",", " ").strip().lstrip("#").split()
        if marked and "gpu" in words:
            header = _columns(words, header)
        elif marked and header and "Idx" in words:
            units = {name: unit for name, unit in zip(header, words, strict=False) if name not in _KEYS}
        elif not words or not header or not _is_row(words, header):
            if "nvidia-smi dmon" not in line:  # a prompt
                notes[line.strip()] = None
        elif len(words) != len(header):
            if number < len(lines) - 1 or len(words) > len(header):
                raise ParseError(f"a row of {len(words)} values under {len(header)} columns: {line.strip()[:120]!r}")
            complete = False
        else:
            _add(dict(zip(header, words, strict=True)), values, samples)
    if not samples:
        said = "; ".join(list(notes)[:3])[:300]
        raise ParseError(f"no row{' and no header' if not header else ''}{': ' + said if said else ''}")
    return Dmon(
        samples=sum(samples.values()),
        units=units,
        gpus=tuple(_load(index, samples[index], values[index], header) for index in sorted(samples)),
        complete=complete,
        notes=tuple(notes)[:20],
    )


_KEYS = ("gpu", "Date", "Time")


def _columns(words: list[str], before: list[str]) -> list[str]:
    if len(set(words)) != len(words) or len(words) > MAX_COLUMNS:
        raise ParseError(f"not a header: {' '.join(words)[:120]!r}")
    if before and words != before:
        raise ParseError("the columns change: more than one output")
    return words


def _is_row(words: list[str], header: list[str]) -> bool:
    """Return whether a line is a row, whole or cut: a number stands where the GPU's index belongs, or it ends before that."""
    place = header.index("gpu")
    return words[0][0].isdigit() if len(words) <= place else words[place].isdecimal()


def _add(row: Mapping[str, str], values: dict[int, dict[str, list[float]]], samples: dict[int, int]) -> None:
    """Add one sample: `values` is GPU -> column -> [how many, sum, largest], without what was not told."""
    index = int(row["gpu"]) if re.fullmatch(r"[0-9]{1,4}", row["gpu"]) else -1
    if index < 0 or (index not in samples and len(samples) >= MAX_GPUS):
        raise ParseError(f"not a GPU index, or too many: {row['gpu'][:20]!r}")
    samples[index] = samples.get(index, 0) + 1
    columns = values.setdefault(index, {})
    for name, cell in row.items():
        if name in _KEYS or not _NUMBER.fullmatch(cell):  # "-", "N/A", "ERR!"
            continue
        value = float(cell)
        count, total, largest = columns.get(name, (0, 0.0, value))
        columns[name] = [count + 1, total + value, max(largest, value)]


def _load(index: int, samples: int, columns: Mapping[str, list[float]], header: list[str]) -> GpuLoad:
    names = [name for name in header if name not in _KEYS]
    return GpuLoad(
        index=index,
        samples=samples,
        mean={name: columns[name][1] / columns[name][0] if name in columns else None for name in names},
        most={name: columns[name][2] if name in columns else None for name in names},
        unreadable=not columns,
    )
