"""`nvidia-smi --query-compute-apps=… --format=csv`: the programs that hold GPU memory."""

from __future__ import annotations

import re

from netcheck.facts.gpus import NOT_TOLD, without_unit
from netcheck.tools._reading import lines_of
from r4090c.errors import ParseError
from r4090c.model import GpuProcess

TOOL = "nvidia-smi-compute-apps"
FIELDS = ("pid", "process_name", "used_memory", "gpu_uuid")
COMMAND = f"nvidia-smi --query-compute-apps={','.join(FIELDS)} --format=csv"
_ALIASES = {"used_gpu_memory": "used_memory", "name": "process_name"}
"""The header prints other names than the query takes."""
_UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z-]{8,60}-[0-9a-f]{12}(?:/\d{1,3}/\d{1,3})?")
_COMMAND_LINE = re.compile(r"--query-compute-apps=([\w.,]{1,1000})")


def parse(text: str) -> tuple[GpuProcess, ...]:
    """Return the processes, one for each GPU they are on; none when only the header is there, or nvidia-smi says that none runs.

    Raises ParseError for nvidia-smi's own errors, for a cut row, and for an empty text: nothing told is not "nothing runs".
    """
    columns: tuple[str, ...] = ()
    fields: tuple[str, ...] = FIELDS
    found: dict[GpuProcess, None] = {}
    notes = []
    none = False
    for line in lines_of(text):
        asked = _COMMAND_LINE.search(line)
        cells = [cell.strip() for cell in line.split(",")]
        names = tuple(_ALIASES.get(name, name) for name in map(without_unit, cells))
        if asked:
            fields = tuple(_ALIASES.get(name, name) for name in asked.group(1).split(","))
        elif "pid" in names and ("used_memory" in names or "gpu_uuid" in names or "process_name" in names):
            columns = names
        elif re.search(r"No running (compute )?processes found|No devices (were )?found", line):
            none = True
        elif len(cells) > 1:
            found[_process(cells, columns or fields)] = None
        elif line.strip():
            notes.append(line.strip())
    if notes:
        raise ParseError("; ".join(notes[:3])[:300])
    if not columns and not found and not none:
        raise ParseError("no table: the output is empty")
    return tuple(found)


def _process(cells: list[str], columns: tuple[str, ...]) -> GpuProcess:
    """Return the process of a row. A name may hold commas: what is too much belongs to it."""
    shown = ", ".join(cells)[:120]
    surplus = len(cells) - len(columns)
    if surplus > 0 and "process_name" in columns:
        start = columns.index("process_name")
        cells = [*cells[:start], ", ".join(cells[start : start + surplus + 1]), *cells[start + surplus + 1 :]]
    if len(cells) != len(columns):
        raise ParseError(f"a row of {len(cells)} cells under {len(columns)} columns: {shown!r}")
    row = dict(zip(columns, ("" if _not_told(cell) else cell for cell in cells), strict=True))
    memory = re.fullmatch(r"([0-9]{1,9})(?: MiB)?", row.get("used_memory", ""))
    uuid = row.get("gpu_uuid", "")
    if not re.fullmatch(r"[0-9]{1,9}", row.get("pid", "")):
        raise ParseError(f"a row without a process id: {shown!r}")
    if uuid and not _UUID.fullmatch(uuid):
        raise ParseError(f"not the UUID of a GPU (cut?): {shown!r}")
    if row.get("used_memory") and not memory:
        raise ParseError(f"not an amount of memory: {shown!r}")
    return GpuProcess(
        pid=int(row["pid"]),
        gpu_uuid=uuid,
        name=row.get("process_name", ""),
        memory_mib=int(memory.group(1)) if memory else None,
    )


def _not_told(cell: str) -> bool:
    return cell.strip("[]").strip().lower() in NOT_TOLD | {"not found"}
