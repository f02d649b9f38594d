"""`nvidia-smi topo -m`: how GPUs and NICs hang together, and which CPUs are near."""

from __future__ import annotations

import re
from collections.abc import Mapping

from netcheck.tools._cpu_list import cpu_list
from netcheck.tools._matrix import gpu_index, read_matrix
from netcheck.tools._reading import plain
from r4090c.errors import ParseError
from r4090c.model import TopologyMatrix

TOOL = "nvidia-smi-topo"
COMMAND = "nvidia-smi topo -m"
LINK = re.compile(r"SYS|SOC|NODE|PHB|PXB|PIX|PSB|NV\d{1,3}")
"""The classes of its legend; SOC and PSB are those of drivers before 384."""
_NIC = re.compile(r"^\s*(NIC\d{1,3})\s*:\s*([\w.:/-]+)\s*$", re.MULTILINE)


def parse(text: str) -> TopologyMatrix:
    """Return the matrix. A NIC whose legend is missing has the device "".

    Raises ParseError for a matrix that is incomplete, flattened, or not the same on both sides of its diagonal.
    """
    matrix = read_matrix(text, LINK)
    links = {}
    for place, one in enumerate(matrix.names):
        for other in matrix.names[place + 1 :]:
            link = matrix.cells[one, other]
            if link == "X" or link != matrix.cells[other, one]:
                raise ParseError(f"{one}-{other} is {link}, {other}-{one} is {matrix.cells[other, one]}: a damaged matrix")
            links[f"{one}-{other}"] = link
    gpus = {index: name for name in matrix.names if (index := gpu_index(name)) is not None}
    sure = {
        name: {title: cell for title, cell in matrix.tails[name].items() if (name, title) != matrix.unsure}
        for name in gpus.values()
    }
    return TopologyMatrix(
        gpus=tuple(gpus),
        nics=_nics(text, [name for name in matrix.names if gpu_index(name) is None]),
        links=links,
        cpu_affinity={index: _cpus(_under("CPU AFFINITY", sure[name])) for index, name in gpus.items()},
        numa={index: _node(_under("NUMA AFFINITY", sure[name])) for index, name in gpus.items()},
    )


def _nics(text: str, columns: list[str]) -> dict[str, str]:
    """Return column -> device: from the legend, or the column's own name (old drivers)."""
    legend: dict[str, str] = {}
    for column, device in _NIC.findall(plain(text)):
        if legend.setdefault(column, device) != device:
            raise ParseError(f"NIC legend: {column} is {legend[column]} and {device}")
    devices = [device for column, device in legend.items() if column in columns]
    if len(set(devices)) != len(devices):
        raise ParseError("NIC legend: one device twice, it may be cut")
    return {column: legend.get(column, "") if re.fullmatch(r"NIC\d+", column) else column for column in columns}


def _under(title: str, cells: Mapping[str, str]) -> str:
    """Return the cell under `title`, which may be cut; "" when there is none."""
    return next((cell for name, cell in cells.items() if title.startswith(name.upper()) or name.upper().startswith(title)), "")


def _cpus(cell: str) -> tuple[int, ...] | None:
    try:
        return cpu_list(cell) or None
    except ParseError:  # N/A, or cut by the driver
        return None


def _node(cell: str) -> int | None:
    """Return the NUMA node; None for N/A, and for a range: near to two nodes is near to none."""
    return int(cell) if re.fullmatch(r"[0-9]{1,4}", cell) else None
