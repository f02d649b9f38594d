"""GPUs from `nvidia-smi --query-gpu=… --format=csv`, and their NUMA nodes from sysfs.

Columns are found by header name. `[N/A]`, `N/A`, `[Not Supported]` and `[Requested functionality has been deprecated]` mean "not
told" and are normal on a GeForce; any other bracketed text, `ERR!`, and any text where a number belongs is a fault of that GPU.
nvidia-smi may exit 0 with such cells, and prints complaints among the rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from netcheck.facts.question import Question, Reply
from r4090c.errors import ParseError
from r4090c.model import Cluster, Gpu, Node

NAME = "gpus"
FIELDS = (
    "index",
    "name",
    "uuid",
    "pci.bus_id",
    "driver_version",
    "memory.total",
    "memory.used",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "temperature.gpu",
    "power.draw",
    "power.limit",
    "utilization.gpu",
    "persistence_mode",
)
"""All of them known to drivers since 2014: one unknown field makes nvidia-smi refuse the whole query."""
NUMA_OF_DEVICE = "/sys/bus/pci/drivers/nvidia/*/numa_node"
"""Through the driver's folder: the devices' own one has hundreds of entries on a server."""
NOT_TOLD = frozenset(
    ("", "n/a", "not supported", "not available", "requested functionality has been deprecated", "insufficient permissions")
)
PCI = re.compile(r"(?<![0-9A-Fa-f])([0-9A-Fa-f]{4,8}):([0-9A-Fa-f]{2}):([0-9A-Fa-f]{2})\.([0-7])(?![0-9A-Fa-f])")
NUMERIC = frozenset(
    field for field in FIELDS if field.startswith(("memory.", "pcie.", "temperature.", "power.", "utilization.", "index"))
)


def question(node: Node, cluster: Cluster) -> Question:
    """Return what to ask `node`. 20 s (est.): 8 GPUs without persistence mode take several to answer."""
    command = ("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv")
    return Question(files=(NUMA_OF_DEVICE,), command=command, timeout_s=20)


def smi_text(reply: Reply) -> str:
    """Return what nvidia-smi printed for a fact that is only asked of nodes with GPUs. Raises ParseError: why there is none."""
    if reply.command is None and not reply.errors:
        raise ParseError("not asked: cluster.yaml states no GPUs for this node")
    output = reply.output()
    text = output.stdout if output.stdout.strip() else output.stderr
    if not text.strip():
        raise ParseError(f"nvidia-smi printed nothing and ended with {output.rc}")
    return text


def parse(reply: Reply) -> tuple[Gpu, ...]:
    """Return the GPUs by index; none when the driver sees none.

    A GPU the driver could not open comes last, with index -1 and the complaint in `faults`. Raises ParseError when the driver
    does not answer (with its words, e.g. "Driver/library version mismatch") or the table is cut.
    """
    output = reply.output()
    numa = {}
    for path, text in reply.files.items():
        match = PCI.search(path)
        if match and path.endswith("/numa_node") and re.fullmatch(r"-?\d{1,4}", text.strip()):
            numa[normalize_pci(match.group(0))] = int(text)
    return parse_query(output.stdout + "\n" + output.stderr, numa=numa)


@dataclass(frozen=True, slots=True)
class Table:
    """What nvidia-smi printed: the rows (field name without unit -> text) and the lines that are no rows."""

    rows: tuple[Mapping[str, str], ...]
    notes: tuple[str, ...]


def read_table(text: str, fields: Sequence[str] = FIELDS) -> Table:
    """Return the rows and notes of nvidia-smi's CSV. Without a header the columns are `fields`, the order of the query.

    Raises ParseError for a row with too few or too many cells.
    """
    header: list[str] | None = None
    rows: list[Mapping[str, str]] = []
    notes: list[str] = []
    for line in text.splitlines():
        if not line.strip():
            continue
        cells = [cell.strip() for cell in line.split(",")]
        names = [without_unit(cell) for cell in cells]
        if header is None and len(set(names)) == len(names) and ("index" in names or "pci.bus_id" in names):
            header = names
        elif names == header:
            continue  # some loops repeat it
        elif len(cells) == len(header or fields) and len(cells) > 1:
            rows.append(dict(zip(header or fields, cells, strict=True)))
        elif len(cells) > 2 and not PCI.search(cells[0]):
            raise ParseError(f"nvidia-smi: a row of {len(cells)} cells, {len(header or fields)} columns: {line[:120]!r}")
        else:
            notes.append(line.strip())
    return Table(tuple(rows), tuple(notes))


def parse_query(text: str, fields: Sequence[str] = FIELDS, numa: Mapping[str, int] | None = None) -> tuple[Gpu, ...]:
    """Return the GPUs of nvidia-smi's CSV; of several rows for one GPU the last values and all faults count.

    `numa`: PCI address -> NUMA node. Raises ParseError as `parse` does: no rows are no GPUs only if nvidia-smi says so.
    """
    table = read_table(text, fields)
    values: dict[int, dict[str, str]] = {}
    faults: dict[int, dict[str, None]] = {}
    for row in table.rows:
        index = _index(row, values)
        values[index] = {**values.get(index, {}), **row}
        for field, cell in row.items():
            if is_fault(field, cell):
                faults.setdefault(index, {})[f"{field}: {cell}"] = None
    gpus = [_gpu(index, values[index], tuple(faults.get(index, ())), numa or {}) for index in sorted(values)]
    lost: dict[str, Gpu] = {}
    unplaced = []
    for note in table.notes:
        match = PCI.search(note)
        if not match:
            unplaced.append(note)
            continue
        pci = normalize_pci(match.group(0))
        known = next((position for position, gpu in enumerate(gpus) if gpu.pci == pci), None)
        if known is not None:
            gpus[known] = _with_fault(gpus[known], note)
        else:
            lost[pci] = _with_fault(lost.get(pci) or _gpu(-1, {"pci.bus_id": pci}, (), numa or {}), note)
    if not gpus and not lost and not re.search(r"No devices (were )?found", text):
        raise ParseError("; ".join(unplaced[:3])[:300] or "nvidia-smi shows no GPU and does not say why")
    return (*gpus, *lost.values())


def without_unit(title: str) -> str:
    """Return "memory.total" for the title "memory.total [MiB]"."""
    name, bracket, _ = title.partition("[")
    return name.rstrip() if bracket and title.endswith("]") else title


def is_fault(field: str, cell: str) -> bool:
    """Return whether `cell` says that reading failed, rather than a value or "not told"."""
    bare = cell.strip("[]").strip().lower()
    if bare in NOT_TOLD:
        return False
    if cell.startswith("[") or "ERR!" in cell or "GPU is lost" in cell or bare == "unknown error":
        return True
    return field in NUMERIC and _number(cell) is None


def normalize_pci(text: str) -> str:
    """Return the sysfs form `0000:41:00.0` of a PCI address such as `00000000:41:00.0`. Raises ParseError."""
    match = PCI.fullmatch(text.strip())
    if not match:
        raise ParseError(f"not a PCI address: {text[:80]!r}")
    domain, bus, device, function = match.groups()
    return f"{int(domain, 16):04x}:{bus}:{device}.{function}".lower()


def _index(row: Mapping[str, str], known: Mapping[int, Mapping[str, str]]) -> int:
    """Return the GPU index of a row; where it was not asked for, the position of its PCI address."""
    text = row.get("index")
    if text is not None:
        if not re.fullmatch(r"\d{1,4}", text):
            raise ParseError(f"nvidia-smi: not a GPU index: {text[:80]!r}")
        return int(text)
    if "pci.bus_id" not in row:
        raise ParseError("nvidia-smi: neither index nor pci.bus_id was asked for")
    same = (index for index, values in known.items() if values.get("pci.bus_id") == row["pci.bus_id"])
    return next(same, len(known))


def _gpu(index: int, row: Mapping[str, str], faults: tuple[str, ...], numa: Mapping[str, int]) -> Gpu:
    def word(field: str) -> str:
        cell = row.get(field, "")
        return "" if cell.strip("[]").lower() in NOT_TOLD or is_fault(field, cell) else cell

    def number(field: str) -> float | None:
        return _number(row.get(field, ""))

    def whole(field: str) -> int | None:
        value = number(field)
        return None if value is None else round(value)

    pci = normalize_pci(word("pci.bus_id")) if word("pci.bus_id") else ""
    return Gpu(
        index=index,
        name=word("name"),
        uuid=word("uuid"),
        pci=pci,
        driver=word("driver_version"),
        memory_total_mib=whole("memory.total"),
        memory_used_mib=whole("memory.used"),
        pcie_gen=whole("pcie.link.gen.current"),
        pcie_gen_max=whole("pcie.link.gen.max"),
        pcie_width=whole("pcie.link.width.current"),
        pcie_width_max=whole("pcie.link.width.max"),
        temperature_c=whole("temperature.gpu"),
        power_w=number("power.draw"),
        power_limit_w=number("power.limit"),
        utilization_pct=whole("utilization.gpu"),
        persistence={"enabled": True, "disabled": False}.get(word("persistence_mode").lower()),
        numa=numa.get(pci),
        faults=faults,
    )


def _with_fault(gpu: Gpu, note: str) -> Gpu:
    return replace(gpu, faults=(*gpu.faults, note))


def _number(cell: str) -> float | None:
    """Return the number of "24564 MiB", "450.00 W", "97 %" or "16"; None for anything else."""
    match = re.fullmatch(r"(-?\d{1,12}(?:\.\d{1,6})?)(?: (?:MiB|W|%|C|MHz))?", cell, re.ASCII)
    return float(match.group(1)) if match else None
