"""`nvidia-smi --query-gpu=… --format=csv`, as a file or a paste of it; the table itself is read by netcheck.facts.gpus."""

from __future__ import annotations

import re

from netcheck.facts.gpus import FIELDS, PCI, parse_query, read_table
from netcheck.tools._reading import lines_of
from r4090c.errors import ParseError
from r4090c.model import Gpu

TOOL = "nvidia-smi-query"
COMMAND = f"nvidia-smi --query-gpu={','.join(FIELDS)} --format=csv"
MAX_GPUS = 256
"""est.: far above any machine; a damaged table must not hold thousands."""
MAX_NOTES = 1000
"""est.: a GPU that is lost repeats its complaint with every sample of a poll."""
_COMMAND_LINE = re.compile(r"--query-gpu=([\w.,]{1,4000})")


def parse(text: str) -> tuple[Gpu, ...]:
    """Return the GPUs by index; none when nvidia-smi says so. Without a header, the command line in the text tells the columns.

    A GPU that the driver cannot open comes last, with index -1 and the complaint in `faults`; of a poll the last sample counts.
    Raises ParseError for nvidia-smi's own errors (with its words), a cut table, and columns that nothing tells.
    """
    fields: tuple[str, ...] = FIELDS
    kept: dict[str, None] = {}
    rows = []
    for line in lines_of(text):
        asked = _COMMAND_LINE.search(line)
        if asked:
            fields = tuple(asked.group(1).split(","))
        elif "," in line:
            rows.append(line)
        elif line.strip():
            kept[line.strip()] = None
    table = read_table("\n".join(rows), fields)
    for column in ("index", "pci.bus_id"):
        if len({row.get(column) for row in table.rows}) > MAX_GPUS:
            raise ParseError(f"more than {MAX_GPUS} GPUs")
    notes = [*table.notes, *list(kept)[:MAX_NOTES]]
    if len(notes) > 2 * MAX_NOTES or len({match.group() for note in notes if (match := PCI.search(note))}) > MAX_GPUS:
        raise ParseError("more complaints than a machine has GPUs")
    return parse_query("\n".join(rows + list(kept)[:MAX_NOTES]), fields)
