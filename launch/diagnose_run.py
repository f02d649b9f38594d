"""Name the first cause of one attempt of a run of ours: its agents' events first, then what the ends of its logs add."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from launch.diagnose import Cause, first_cause, said_by
from launch.diagnose_log import LogCause, Source, diagnose_all
from launch.jobs import Run, ask_any
from r4090c.paths import RunPaths
from r4090c.remote import Fleet, ssh_command

TAIL_BYTES = 64 * 2**10
"""est.: the last minutes of a rank, and every traceback."""
MOST_LOGS = 64
"""est.: 4 MiB in one answer; the logs of the ranks that failed come first."""
COUNT_S = 5.0
"""est.: seconds that the node may count lines, so that a place can be named; then only the file is."""
GENERIC = frozenset({"unknown", "rank-failed", "torchrun-failed"})
"""Causes that a log may name better."""

GATHER = r"""
import json, os, time

def load(path):
    try:
        with open(path) as handle:
            return json.load(handle)
    except (OSError, ValueError):
        return None

def events_of(folder, attempt, nodes):
    found = []
    try:
        with open(os.path.join(folder, "events.jsonl"), "rb") as handle:
            handle.seek(0, 2)
            handle.seek(max(0, handle.tell() - (8 << 20)))
            lines = handle.read().decode("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue  # half a line, at the beginning or of a node that went
        if isinstance(event, dict) and event.get("attempt") == attempt:
            found.append(event)
    ends = {}
    for name in nodes:
        agent = load(os.path.join(folder, "agents", name + ".json"))
        if isinstance(agent, dict) and agent.get("attempt") == attempt:
            ends[name] = agent.get("end")
            found += [event for event in agent.get("events") or [] if isinstance(event, dict)]
    return found, ends

def end_of(path, most, until):
    with open(path, "rb") as handle:
        size = os.fstat(handle.fileno()).st_size
        start, lines = max(0, size - most), 0
        while handle.tell() < start:
            if time.monotonic() > until:
                lines = None
                handle.seek(start)
                break
            chunk = handle.read(min(1 << 20, start - handle.tell()))
            if not chunk:
                break
            lines += chunk.count(b"\n")
        data = handle.read(most)
    if start:
        first = data.find(b"\n") + 1
        lines = lines if lines is None else lines + data.count(b"\n", 0, first)
        data = data[first:]
    return {"text": data.decode("utf-8", "replace"), "before": lines}

def main(request):
    folder, attempt, nodes = request["folder"], request["attempt"], request["nodes"]
    events, ends = events_of(folder, attempt, nodes)
    logs = os.path.join(folder, "attempt_%d" % attempt)
    bad = [str(event.get("rank")) for event in events if event.get("kind") in ("rank-failed", "rank-hung")]
    names = [rank + ".log" for rank in bad] + ["torchrun-%s.log" % node for node in nodes]
    names += ["%d.log" % rank for rank in range(request["world"])]
    until, found = time.monotonic() + request["count_s"], {}
    for name in dict.fromkeys(names):
        if len(found) >= request["most"]:
            break
        try:
            found[name] = end_of(os.path.join(logs, name), request["bytes"], until)
        except OSError:
            continue
    told = load(os.path.join(logs, "diagnosis.json")) or load(os.path.join(folder, "diagnosis.json"))
    return {"events": events, "ends": ends, "logs": found, "told": told}
"""


@dataclass(frozen=True, slots=True)
class Proof:
    """The line that proves a cause. `line_number`: from 1, None where it could not be counted."""

    file: str
    line_number: int | None
    text: str


@dataclass(frozen=True, slots=True)
class RunDiagnosis:
    """How an attempt ended. `state`: as launch.jobs has it. `cause`: None when it ended well, goes on, or nobody knows why."""

    attempt: int
    state: str
    cause: Cause | None
    proof: Proof | None = None
    consequences: tuple[str, ...] = ()


def diagnose_run(fleet: Fleet, run: Run, attempt: int) -> RunDiagnosis:
    """Return the first cause of an attempt. Raises CouldNotTell when no node answers."""
    last = attempt == run.attempt
    if last and run.state in ("done", "running"):
        return RunDiagnosis(attempt, run.state, None)
    request = {
        "folder": run.run_dir,
        "attempt": attempt,
        "nodes": list(run.nodes),
        "world": int(run.plan["world_size"]),
        "bytes": TAIL_BYTES,
        "most": MOST_LOGS,
        "count_s": COUNT_S,
    }
    ssh = {name: ssh_command(fleet.nodes[name]) for name in run.nodes if name in fleet.nodes}
    return judge(run, attempt, ask_any(fleet, GATHER, request), ssh)


def judge(run: Run, attempt: int, told: Mapping[str, Any], ssh: Mapping[str, str]) -> RunDiagnosis:
    """Return the first cause by what GATHER found; pure."""
    state = run.state if attempt == run.attempt else "ended"
    events: Sequence[Mapping[str, Any]] = told["events"]
    cause = _written(told["told"], attempt) or first_cause(
        events, _silent(run, attempt, told["ends"]), run.id, recipe=run.recipe if run.plan.get("steps") else None, ssh=ssh
    )
    logs: Mapping[str, Mapping[str, Any]] = told["logs"]
    folder = str(RunPaths(PurePosixPath(run.run_dir)).attempt(attempt))
    by_log = diagnose_all(list(_sources(run, events, logs))).cause if logs else None
    consequences = tuple(said_by(events, cause))
    if by_log is not None and _better(cause, by_log):
        node, rank = by_log.node or cause.node, by_log.rank if by_log.rank is not None else cause.rank
        advice = by_log.fix[0] if by_log.fix else cause.next_command
        cause = replace(
            cause, kind=by_log.kind, node=node, rank=rank, summary=by_log.summary, evidence=by_log.evidence,
            next_command=advice, fix=by_log.fix,
        )  # fmt: skip
        number = None if logs[by_log.source]["before"] is None else by_log.line_number
        proof: Proof | None = Proof(f"{folder}/{by_log.source}", number, by_log.evidence)
        return RunDiagnosis(attempt, state, cause, proof, (*consequences, *by_log.consequences))
    if cause.kind == "unknown":
        return RunDiagnosis(attempt, state, None)
    return RunDiagnosis(attempt, state, cause, _proof(cause, logs, folder), consequences)


def _written(told: object, attempt: int) -> Cause | None:
    """Return the cause that a supervisor wrote down, which also knew whom it could not reach; None when it wrote none."""
    if not isinstance(told, dict) or told.get("attempt") != attempt or not told.get("kind"):
        return None
    rank, when = told.get("rank"), told.get("time")
    fix = told.get("fix")
    return Cause(
        str(told["kind"]),
        str(told.get("node", "?")),
        rank if isinstance(rank, int) else None,
        str(told.get("summary", "")),
        str(told.get("evidence", "")),
        str(told.get("next_command", "")),
        float(when) if isinstance(when, (int, float)) else None,
        tuple(str(one) for one in fix) if isinstance(fix, list) else (),
    )


def _silent(run: Run, attempt: int, ends: Mapping[str, Any]) -> dict[str, str]:
    """Return the nodes whose agents told no end though others did: when none did, nothing is known of any of them."""
    if attempt != run.attempt or not any(ends.values()):
        return {}
    return {name: "its agent told no end" for name in run.nodes if not ends.get(name)}


def _sources(run: Run, events: Sequence[Mapping[str, Any]], logs: Mapping[str, Mapping[str, Any]]) -> Iterator[Source]:
    """Yield the logs, those of the ranks that failed first by their death."""
    node_of = {str(rank["rank"]): str(node["name"]) for node in run.plan["nodes"] for rank in node.get("ranks", [])}
    failed = {str(event.get("rank")): event for event in events if event.get("kind") == "rank-failed"}
    for name, log in logs.items():
        stem = name.removesuffix(".log")
        rank = int(stem) if stem.isdecimal() else None
        node = node_of.get(stem) if rank is not None else stem.removeprefix("torchrun-")
        code = failed.get(stem, {}).get("exit_code")
        yield Source(
            str(log["text"]),
            name=name,
            node=node,
            rank=rank,
            failed=stem in failed,
            exit_code=code if isinstance(code, int) else None,
            gap=(0, int(log["before"] or 0)),
        )


def _better(cause: Cause, by_log: LogCause) -> bool:
    """True when the logs name what the events do not."""
    if cause.kind not in GENERIC or by_log.kind in ("stopped", "peer-gone", "collective-timeout"):
        return False
    if cause.kind == "unknown":
        return True
    return by_log.kind not in ("rank-failed", "rank-killed") and by_log.rank in (None, cause.rank)


def _proof(cause: Cause, logs: Mapping[str, Mapping[str, Any]], folder: str) -> Proof | None:
    """Return where the line stands that says most of the cause; None when no log has it."""
    names = [f"{cause.rank}.log", f"torchrun-{cause.node}.log"] if cause.rank is not None else [f"torchrun-{cause.node}.log"]
    lines = [line.strip() for line in cause.evidence.splitlines() if line.strip()]
    lines.sort(key=lambda line: line not in cause.summary)  # the line that the summary quotes
    for name in names:
        text = str(logs.get(name, {}).get("text", ""))
        for wanted in lines:
            for number, line in reversed(list(enumerate(text.split("\n"), 1))):
                if wanted in line:
                    before = logs[name]["before"]
                    return Proof(f"{folder}/{name}", None if before is None else number + int(before), wanted)
    return None
