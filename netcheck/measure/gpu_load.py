"""What the GPUs of every node do under load: copies, matrix products, and what nvidia-smi and the kernel say meanwhile. Pure.

All nodes at once: the power and heat of a real run. The program is `gpu_on_node.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from netcheck import counters
from netcheck.counters import Growth, Kind, growth
from netcheck.facts import kernel_log as kernel_log_fact
from netcheck.facts.gpus import FIELDS, normalize_pci, parse_query, read_table
from netcheck.facts.question import as_float, as_int, as_list, as_mapping, as_str
from netcheck.measure.figure import Figure
from netcheck.measure.job import NOT_INSTALLED, Job, Level, Part, PartResult, Record, Round, Setting, Step, read_rounds
from netcheck.measure.sweep import Member, has_torch, members
from netcheck.tools import kernel_log
from r4090c.errors import ParseError
from r4090c.model import CpuFact, Gpu, KernelLog, Xid

NAME, TITLE, LEVEL = "gpu-load", "GPUs under load", Level.FULL

SOURCE = files("netcheck.measure").joinpath("gpu_on_node.py").read_text(encoding="utf-8")
MARKER = "R4090C-GPU "
"""Begins the line of its document (gpu_on_node.MARKER; a test compares)."""
SCRIPT = "gpu_on_node.py"
SECONDS = 5.0
"""est.: of products; heat takes minutes to settle, a loose card or a weak supply shows at once."""
START_S = 60.0
"""est.: Python, torch and eight contexts of CUDA on a node that loads them from shared storage."""
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The same field by its new and its old name (before driver 535)."""
SM_CLOCK = "clocks.current.sm"
COPYING = ("copy", "copy together")
WORKING = (*COPYING, "products", "on and off")
"""Phases of the program in which the cards work."""


@dataclass(frozen=True, slots=True)
class LoadedGpu:
    """One GPU under load; None = not told. `loaded`: what nvidia-smi said of it, one Gpu a sample, those while copying first.

    `reasons`: bits of clocks_event_reasons.active that were set in any sample. `together_gbyte_s`: to it, all cards at once.
    """

    index: int
    name: str
    pci: str
    h2d_gbyte_s: float | None
    d2h_gbyte_s: float | None
    together_gbyte_s: float | None
    tflops: float | None
    loaded: tuple[Gpu, ...] = ()
    reasons: int | None = None
    sm_mhz: int | None = None


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """One node under load. `error`: why it is no whole run; `lost`: the node itself stopped answering.

    `grew`: error counters of the PCIe links that grew. `xids`: new ones in the kernel's log, None = it could not be read.
    """

    node: str
    gpus: tuple[LoadedGpu, ...] = ()
    error: str = ""
    lost: bool = False
    next_command: str = ""
    absent: bool = False
    cycles: int = 0
    grew: tuple[Growth, ...] = ()
    counted: int = 0
    xids: tuple[Xid, ...] | None = None
    device: str = "cuda"


def plan(setting: Setting, done: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[Round, ...]:
    """Return one round: all nodes whose driver shows GPUs and whose Python has torch, at the same time."""
    return () if done else load_round(setting, ("--mode", "load", "--seconds", f"{SECONDS:g}"), SECONDS)


def load_round(setting: Setting, words: Sequence[str], seconds: float) -> tuple[Round, ...]:
    """Return the round that loads all nodes with the program's options `words`."""
    jobs = []
    for node in setting.nodes:
        (member,) = members(setting, [node])
        if member.gpus and has_torch(member.facts):
            jobs.append(_job(member, words, seconds))
    return (tuple(jobs),) if jobs else ()


def _job(member: Member, words: Sequence[str], seconds: float) -> Job:
    facts = member.facts
    gpus = {str(gpu.index): gpu for gpu in facts.gpus.value or ()}
    chosen = [gpus.get(name) for name in member.gpus]
    options = [*words, "--limit-s", f"{seconds + START_S + 30:g}"]
    if facts.cpus.value is not None and all(chosen):
        options += ["--cpus", ";".join(_near(gpu, facts.cpus.value) for gpu in chosen if gpu is not None)]
    for reason in REASONS:
        options += ["--query", ",".join((*FIELDS, reason, SM_CLOCK))]
    env = {**member.env, "CUDA_VISIBLE_DEVICES": ",".join(member.gpus), "PYTHONDONTWRITEBYTECODE": ""}
    step = Step((member.node.paths.python, f"{{folder}}/{SCRIPT}", *options), seconds + START_S + 40, env=env)
    part = Part(
        member.node.name,
        (step,),
        files={SCRIPT: SOURCE},
        counters=(counters.GPUS, f"{counters.PCI}/drivers/nvidia/0000:*/../aer_dev_*"),
        watch={"kernel-log": ("sh", "-c", kernel_log_fact.SCRIPT)},
    )
    indices = [gpu.index if gpu is not None else place for place, gpu in enumerate(chosen)]
    return Job(member.node.name, (part,), {"indices": indices})


def _near(gpu: Gpu, cpus: CpuFact) -> str:
    """Return the CPUs of the GPU's NUMA node, "" where it is not known."""
    found = next((numa.cpus for numa in cpus.numa if numa.index == gpu.numa), ())
    return ",".join(map(str, found))


def read(measured: object) -> tuple[NodeLoad, ...]:
    """Return what every node did. Raises ParseError."""
    return tuple(_node(record) for one in read_rounds(measured) for record in one)


def _node(record: Record) -> NodeLoad:
    if len(record.parts) != 1:
        raise ParseError(f"{record.name}: not a load of one node")
    node, part = next(iter(record.parts.items()))
    if part.error:
        return NodeLoad(node, error=part.error, lost=True, next_command=part.next_command)
    told = NodeLoad(
        node,
        grew=tuple(one for one in growth(part.before, part.after) if one.kind in (Kind.CORRECTED, Kind.UNCORRECTED)),
        counted=sum("/aer_dev_" in path for path in part.after),
        xids=_new_xids(part),
    )
    step = part.steps[0] if part.steps else None
    if step is None or step.error == NOT_INSTALLED:
        return replace(told, error=step.error if step else "not started", absent=step is not None)
    document = _document(step.stdout)
    if document is None:
        lines = [line for line in step.stderr.splitlines() if line.strip()]
        return replace(told, error=step.error or (lines[-1][:300] if lines else "nothing was printed"))
    error = document.get("error")
    failure = as_mapping(error, "error") if error is not None else {}
    text = f"{as_str(failure.get('phase'), 'phase')}: {as_str(failure.get('text'), 'text')}" if failure else step.error
    indices = [as_int(index, "index") for index in as_list(record.data.get("indices"), "indices")]
    samples = _samples(document)
    gpus = [as_mapping(gpu, "gpu") for gpu in as_list(document.get("gpus"), "gpus")]
    return replace(
        told,
        gpus=tuple(_gpu(gpu, indices, samples) for gpu in gpus),
        error=text,
        cycles=as_int(document.get("cycles") or 0, "cycles"),
        device=as_str(document.get("device"), "device"),
    )


def _document(stdout: str) -> Mapping[str, Any] | None:
    texts = [line.partition(MARKER)[2] for line in stdout.splitlines() if MARKER in line]
    if not texts:
        return None
    try:
        return as_mapping(json.loads(texts[-1]), "document")
    except (ValueError, RecursionError) as error:
        raise ParseError(f"the document of {SCRIPT} is not JSON") from error


@dataclass(frozen=True, slots=True)
class _Sample:
    """What nvidia-smi said once: the cards, and the reasons and clocks by index."""

    phase: str
    gpus: tuple[Gpu, ...]
    reasons: Mapping[int, int]
    sm_mhz: Mapping[int, int]


def _samples(document: Mapping[str, Any]) -> list[_Sample]:
    """Return the samples taken under load, those while copying first; what nvidia-smi did not answer is left out."""
    found = []
    for value in as_list(document.get("samples"), "samples"):
        sample = as_mapping(value, "sample")
        phase, text = as_str(sample.get("phase"), "phase"), as_str(sample.get("text"), "text")
        if phase not in WORKING:
            continue
        try:
            gpus = parse_query(text, (*FIELDS, REASONS[0], SM_CLOCK))
            rows = read_table(text, (*FIELDS, REASONS[0], SM_CLOCK)).rows
        except ParseError:
            continue
        reasons, clocks = {}, {}
        for row in rows:
            index = row.get("index", "")
            bits = next((row[name] for name in REASONS if name in row), "")
            clock = row.get(SM_CLOCK, "").partition(" ")[0]
            if index.isascii() and index.isdigit():
                if _is_hex(bits):
                    reasons[int(index)] = int(bits, 16)
                if clock.isascii() and clock.isdigit() and len(clock) < 6:
                    clocks[int(index)] = int(clock)
        found.append(_Sample(phase, gpus, reasons, clocks))
    return sorted(found, key=lambda one: one.phase not in COPYING)


def _is_hex(text: str) -> bool:
    digits = text.removeprefix("0x")
    return text.startswith("0x") and 0 < len(digits) <= 16 and all(digit in "0123456789abcdefABCDEF" for digit in digits)


def _gpu(gpu: Mapping[str, Any], indices: Sequence[int], samples: Sequence[_Sample]) -> LoadedGpu:
    place = as_int(gpu.get("place"), "place")
    pci = as_str(gpu.get("pci") or "", "pci")
    pci = normalize_pci(pci) if pci else ""
    index = indices[place] if 0 <= place < len(indices) else place
    for known in (known for sample in samples for known in sample.gpus):
        if pci and known.pci == pci:  # what torch calls place 0 need not be nvidia-smi's 0
            index = known.index
            break
    own = [known for sample in samples for known in sample.gpus if known.index == index]
    bits = [sample.reasons[index] for sample in samples if index in sample.reasons]
    clocks = [sample.sm_mhz[index] for sample in samples if index in sample.sm_mhz and sample.phase == "products"]

    def figure(key: str) -> float | None:
        return None if gpu.get(key) is None else as_float(gpu[key], key)

    total = 0
    for one in bits:
        total |= one
    return LoadedGpu(
        index=index,
        name=as_str(gpu.get("name"), "name"),
        pci=pci or (own[0].pci if own else ""),
        h2d_gbyte_s=figure("h2d_gbyte_s"),
        d2h_gbyte_s=figure("d2h_gbyte_s"),
        together_gbyte_s=figure("together_gbyte_s"),
        tflops=figure("tflops"),
        loaded=tuple(own),
        reasons=total if bits else None,
        sm_mhz=min(clocks, default=None),
    )


def _new_xids(part: PartResult) -> tuple[Xid, ...] | None:
    """Return the Xids that the kernel's log has more of after the load, None where the log could not be read."""
    before, after = (_log(text) for text in part.watched.get("kernel-log", ("", "")))
    if after is None:
        return None
    known = Counter(before.xids if before is not None else ())
    new = []
    for xid in after.xids:
        if known[xid]:
            known[xid] -= 1
        else:
            new.append(xid)
    return tuple(new)


def _log(text: str) -> KernelLog | None:
    try:
        return kernel_log.parse(text) if text.strip() else None
    except ParseError:
        return None


def figures(measured: object) -> Iterable[Figure]:
    """Return copy and product rates of every GPU. Raises ParseError."""
    for load in read(measured):
        for gpu in load.gpus:
            subject = f"{load.node}/gpu{gpu.index}"
            for name, value, unit in (
                ("host to device", gpu.h2d_gbyte_s, "GB/s"),
                ("device to host", gpu.d2h_gbyte_s, "GB/s"),
                ("bf16 products", gpu.tflops, "TFLOP/s"),
            ):
                if value is not None:
                    yield Figure(NAME, subject, name, value, unit)
