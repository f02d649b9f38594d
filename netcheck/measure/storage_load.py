"""How fast the shared folder takes and gives data: one node alone, then all at once, past the page cache. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from netcheck.facts.question import as_float, as_int, as_mapping, as_str
from netcheck.measure.figure import Figure
from netcheck.measure.job import Job, Level, Part, Record, Round, Setting, Step, read_rounds
from r4090c.errors import ParseError
from r4090c.model import Node

NAME, TITLE, LEVEL = "storage-load", "shared storage under load", Level.FULL

SOURCE = files("netcheck.measure").joinpath("storage_on_node.py").read_text(encoding="utf-8")
SCRIPT = "storage_on_node.py"
ALONE, TOGETHER = "alone", "together"
BYTES = 1 << 30
"""Beyond what a server's write cache hides (NVRAM cards hold some hundred MiB); a slow storage is left after SECONDS."""
LOCAL_BYTES = 64 << 20
"""On one machine's own disk, whose speed nobody judges."""
SECONDS = 15.0
"""est.: of each direction; 50 MB/s write 750 MB meanwhile."""
SLACK_S = 25.0
"""est.: what fsync, and a server that several nodes write to, take on top."""
NOISE = 0.15
"""est.: share by which storage differs between two measurements; others use it as well."""


@dataclass(frozen=True, slots=True)
class StorageRun:
    """What one node did, `stage` ALONE or TOGETHER. Rates in MB/s (1e6 bytes), None = not measured, then `error` says why.

    `direct`: past the page cache. `wrong`: bytes that were not read as they were written. `lost`: the node did not answer.
    """

    node: str
    stage: str
    size: int = 0
    direct: bool = False
    write_mbyte_s: float | None = None
    read_mbyte_s: float | None = None
    wrong: int = 0
    error: str = ""
    lost: bool = False
    next_command: str = ""


def plan(setting: Setting, done: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[Round, ...]:
    """Return two rounds: the first node alone, then all nodes at once."""
    if done or not setting.nodes:
        return ()
    alone = _round(setting, ALONE, setting.nodes[:1])
    return (alone, _round(setting, TOGETHER, setting.nodes)) if len(setting.nodes) > 1 else (alone,)


def _round(setting: Setting, stage: str, nodes: Sequence[Node]) -> Round:
    size = LOCAL_BYTES if setting.cluster.storage.kind == "local" else BYTES
    jobs = []
    for node in nodes:
        name = re.sub(r"[^\w.-]", "_", f"{setting.seed % (1 << 64):016x}-{node.name}")
        words = (node.paths.shared, name, str(size), f"{SECONDS:g}", str(len(nodes)))
        step = Step(("python3", "-I", "-S", f"{{folder}}/{SCRIPT}", *words), 2 * SECONDS + SLACK_S)
        jobs.append(Job(f"{node.name} {stage}", (Part(node.name, (step,), files={SCRIPT: SOURCE}),), {"stage": stage}))
    return tuple(jobs)


def read(measured: object) -> tuple[StorageRun, ...]:
    """Return what every node did. Raises ParseError."""
    return tuple(_run(record) for one in read_rounds(measured) for record in one)


def _run(record: Record) -> StorageRun:
    stage = record.data.get("stage")
    if stage not in (ALONE, TOGETHER) or len(record.parts) != 1:
        raise ParseError(f"{record.name}: not a run of one node")
    node, part = next(iter(record.parts.items()))
    if part.error:
        return StorageRun(node, stage, error=part.error, lost=True, next_command=part.next_command)
    step = part.steps[0] if part.steps else None
    if step is None:
        return StorageRun(node, stage, error="not started")
    lines = [line for line in step.stdout.splitlines() if line.startswith("{")]
    if not lines:
        last = [line for line in step.stderr.splitlines() if line.strip()]
        return StorageRun(node, stage, error=step.error or (last[-1][:300] if last else "nothing was printed"))
    try:
        told = as_mapping(json.loads(lines[-1]), "answer")
    except (ValueError, RecursionError) as error:
        raise ParseError(f"the answer of {SCRIPT} is not JSON") from error
    rates = [None if told.get(key) is None else as_float(told[key], key) for key in ("write_mbyte_s", "read_mbyte_s")]
    return StorageRun(
        node=node,
        stage=stage,
        size=as_int(told.get("bytes"), "bytes"),
        direct=told.get("direct") is True,
        write_mbyte_s=rates[0],
        read_mbyte_s=rates[1],
        wrong=as_int(told.get("wrong"), "wrong"),
        error=step.error or as_str(told.get("error"), "error"),
    )


def figures(measured: object) -> Iterable[Figure]:
    """Return the rates of the node alone and of each one beside the others. Raises ParseError."""
    for run in read(measured):
        for way, value in (("write", run.write_mbyte_s), ("read", run.read_mbyte_s)):
            if value is not None and not run.error:
                yield Figure(NAME, run.node, f"{way} {run.stage}", value, "MB/s", noise=NOISE)
