"""`nvidia-smi -q`: what only the long form tells: BAR1, replays of the link, why the clocks are held back, who uses the GPU.

A tree by indentation, whose sections come and go with the driver: "Clocks Throttle Reasons" became "Clocks Event Reasons",
"Power Readings" became "GPU Power Readings". What a driver does not print is None.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from netcheck.facts.gpus import NOT_TOLD, PCI, normalize_pci
from netcheck.tools._reading import lines_of
from r4090c.errors import ParseError
from r4090c.model import GpuProcess

TOOL = "nvidia-smi-q"
COMMAND = "nvidia-smi -q"
MAX_GPUS = 256
"""est.: far above any machine; keeps a damaged log from asking for thousands."""
MAX_NOTES = 1000
"""est.: complaints of a log."""
MAX_DEPTH = 12
"""est.: the deepest path of driver 575 has 5 levels."""
_GPU = re.compile(r"GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])")
_WHOLE = re.compile(r" : (?:.* (?:MiB|W|C)|\d+x|None|N/A|Active|Not Active|Enabled|Disabled)$")
"""A last line without a newline counts only when it shows that its value is not cut."""
_FAULT = re.compile(r"ERR!|GPU is lost|Unknown Error|GPU requires reset")


@dataclass(frozen=True, slots=True)
class SmiGpu:
    """One GPU; None = not told. `pci` in sysfs form. `replays`: link packets sent again since the last reset.

    `bar1_total_mib`: 256 is the small window of a board without Resizable BAR. `temperature_left_c`: degrees until the GPU
    slows down (T.Limit). `clock_reasons`: reason -> active. `remapped_rows`: None on a GeForce. `processes`: None = not told,
    () = none. `faults`: "field: text" of values that report an error.
    """

    pci: str
    name: str
    uuid: str
    vbios: str
    persistence: bool | None
    pstate: str | None
    pcie_gen: int | None
    pcie_gen_max: int | None
    pcie_width: int | None
    pcie_width_max: int | None
    replays: int | None
    replay_rollovers: int | None
    memory_total_mib: int | None
    memory_used_mib: int | None
    bar1_total_mib: int | None
    bar1_used_mib: int | None
    ecc: bool | None
    remapped_rows: Mapping[str, str] | None
    temperature_c: int | None
    temperature_left_c: int | None
    temperature_slowdown_c: int | None
    power_w: float | None
    power_limit_w: float | None
    power_limit_default_w: float | None
    clock_reasons: Mapping[str, bool]
    processes: tuple[GpuProcess, ...] | None
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SmiLog:
    """`cuda_max`: the newest CUDA the driver can run. `attached`: GPUs the driver has; `gpus` has fewer if the log is cut."""

    driver: str | None
    cuda_max: str | None
    attached: int | None
    gpus: tuple[SmiGpu, ...]


Path = tuple[str, ...]


def parse(text: str) -> SmiLog:
    """Return the log. Raises ParseError when it holds no GPU (with the words of nvidia-smi) or lost its indentation."""
    head: dict[str, str] = {}
    gpus: dict[str, list[tuple[Path, str]]] = {}
    notes: dict[str, None] = {}
    entries: list[tuple[Path, str]] | None = None
    sections: list[tuple[int, str]] = []
    lines = lines_of(text)
    if lines[-1] and not _WHOLE.search(lines[-1]):
        del lines[-1]
    for line in lines:
        words = line.strip()
        start = _GPU.fullmatch(words)
        key, colon, value = (part.strip() for part in words.partition(":"))
        if start:
            pci = normalize_pci(start.group(1))
            if pci in gpus or len(gpus) >= MAX_GPUS:
                raise ParseError(f"GPU {pci} twice, or too many: more than one log?")
            entries, sections = gpus.setdefault(pci, []), []
        elif "determine the device handle" in words or words.startswith(("Failed to", "No devices", "<?xml")):
            if len(notes) < MAX_NOTES:
                notes[words[:300]] = None
        elif not words or words.startswith("=") or (colon and value and not words[words.index(":") + 1].isspace()):
            continue  # a rule, a prompt, a time of day
        elif entries is None:
            if colon:
                head.setdefault(key, value)
            elif len(notes) < MAX_NOTES:
                notes[words[:300]] = None
        else:
            indent = len(line.expandtabs()) - len(line.expandtabs().lstrip())
            while sections and sections[-1][0] >= indent:
                sections.pop()
            sections.append((indent, key))
            if len(sections) > MAX_DEPTH:
                raise ParseError(f"nested deeper than {MAX_DEPTH} levels: {words[:80]!r}")
            entries.append((tuple(name for _, name in sections), value if colon else "\n"))
    if not gpus and not any(note.startswith("No devices") or PCI.search(note) for note in notes):
        raise ParseError("; ".join(list(notes)[:3])[:300] or "no GPU in it")
    if any(len(entries) > 5 and max(len(path) for path, _ in entries) == 1 for entries in gpus.values()):
        raise ParseError("the indentation is lost: whose Total or Current a line tells cannot be said")
    found = [_gpu(pci, entries, _about(pci, notes)) for pci, entries in gpus.items()]
    lost = {normalize_pci(match.group()) for note in notes if (match := PCI.search(note))} - set(gpus)
    if len(lost) > MAX_GPUS:
        raise ParseError("more complaints than a machine has GPUs")
    found += [_gpu(pci, [], _about(pci, notes)) for pci in sorted(lost)]
    return SmiLog(
        driver=_told(head.get("Driver Version", "")),
        cuda_max=_told(head.get("CUDA Version", "")),
        attached=_whole(head.get("Attached GPUs", "")),
        gpus=tuple(found),
    )


def _about(pci: str, notes: Iterable[str]) -> tuple[str, ...]:
    return tuple(note for note in notes if (match := PCI.search(note)) and normalize_pci(match.group()) == pci)


def _gpu(pci: str, entries: list[tuple[Path, str]], complaints: tuple[str, ...]) -> SmiGpu:
    values: dict[Path, str] = {}
    for path, value in entries:
        values.setdefault(path, value.strip())

    def first(*paths: Path) -> str:
        return next((values[path] for path in paths if _told(values.get(path, ""))), "")

    def under(*sections: str) -> Iterator[tuple[Path, str]]:
        return ((path, value) for path, value in values.items() if path[0] in sections and len(path) > 1)

    link = ("PCI", "GPU Link Info")
    power = ("GPU Power Readings", "Power Readings")
    # A virtual machine's bridge does not tell what it can do at most: no fault of the GPU.
    faults = tuple(f"{path[-1]}: {value}" for path, value in values.items() if _FAULT.search(value) and path[-1] != "Host Max")
    remapped = {path[-1]: value for path, value in under("Remapped Rows")}
    uuid = _told(first(("GPU UUID",))) or ""
    return SmiGpu(
        pci=pci,
        name=_told(first(("Product Name",))) or "",
        uuid=uuid,
        vbios=_told(first(("VBIOS Version",))) or "",
        persistence=_switch(first(("Persistence Mode",))),
        pstate=_told(first(("Performance State",))),
        pcie_gen=_whole(first((*link, "PCIe Generation", "Current"), (*link, "PCIe Generation", "Device Current"))),
        pcie_gen_max=_whole(first((*link, "PCIe Generation", "Max"), (*link, "PCIe Generation", "Device Max"))),
        pcie_width=_whole(first((*link, "Link Width", "Current")), "x"),
        pcie_width_max=_whole(first((*link, "Link Width", "Max")), "x"),
        replays=_whole(first(("PCI", "Replays Since Reset"), ("PCI", "Replays since reset"))),
        replay_rollovers=_whole(first(("PCI", "Replay Number Rollovers"))),
        memory_total_mib=_whole(first(("FB Memory Usage", "Total")), " MiB"),
        memory_used_mib=_whole(first(("FB Memory Usage", "Used")), " MiB"),
        bar1_total_mib=_whole(first(("BAR1 Memory Usage", "Total")), " MiB"),
        bar1_used_mib=_whole(first(("BAR1 Memory Usage", "Used")), " MiB"),
        ecc=_switch(first(("ECC Mode", "Current"), ("Ecc Mode", "Current"))),
        remapped_rows=remapped or None,
        temperature_c=_whole(first(("Temperature", "GPU Current Temp")), " C"),
        temperature_left_c=_whole(first(("Temperature", "GPU T.Limit Temp")), " C"),
        temperature_slowdown_c=_whole(first(("Temperature", "GPU Slowdown Temp")), " C"),
        power_w=_watts(
            first(*((section, f"{kind}Power Draw") for section in power for kind in ("Average ", "", "Instantaneous ")))
        ),
        power_limit_w=_watts(
            first(*((section, f"{kind}Power Limit") for section in power for kind in ("Current ", "Enforced ", "")))
        ),
        power_limit_default_w=_watts(first(*((section, "Default Power Limit") for section in power))),
        clock_reasons={
            path[-1]: value == "Active"
            for path, value in under("Clocks Event Reasons", "Clocks Throttle Reasons")
            if value in ("Active", "Not Active")
        },
        processes=_processes(entries, uuid),
        faults=faults + complaints,
    )


def _processes(entries: list[tuple[Path, str]], uuid: str) -> tuple[GpuProcess, ...] | None:
    """Return the processes; None when the section is missing, N/A, or empty without saying "None"."""
    found: list[dict[str, str]] = []
    none = False
    for path, value in entries:
        if path[0] != "Processes":
            continue
        none = none or (len(path) == 1 and value == "None")
        if path[-1] == "Process ID":
            found.append({})
        if found:
            found[-1].setdefault(path[-1], value)
    if not found:
        return () if none else None
    return tuple(
        GpuProcess(
            pid=pid,
            gpu_uuid=uuid,
            name=_told(process.get("Name", "")) or "",
            memory_mib=_whole(process.get("Used GPU Memory", ""), " MiB"),
        )
        for process in found
        if (pid := _whole(process["Process ID"])) is not None
    )


def _told(value: str) -> str | None:
    value = value.strip()
    return None if value.strip("[]").lower() in NOT_TOLD or _FAULT.search(value) else value


def _whole(value: str, unit: str = "") -> int | None:
    """Return the number in front of `unit`, which must be there: a cut value has lost it."""
    number = value.removesuffix(unit)
    return int(number) if (number != value or not unit) and re.fullmatch(r"-?[0-9]{1,12}", number) else None


def _watts(value: str) -> float | None:
    return float(value[:-2]) if re.fullmatch(r"[0-9]{1,6}(?:\.[0-9]{1,4})? W", value) else None


def _switch(value: str) -> bool | None:
    return {"Enabled": True, "Disabled": False}.get(value)
