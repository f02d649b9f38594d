"""Name the first cause of an attempt's end from the events its agents recorded; pure.

A rank that is killed makes its peers fail within 0.3 s with connection errors: those are consequences, whatever order the
clocks of several nodes put them in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CONSEQUENCE = re.compile(
    r"Connection closed by (remote )?peer|Connection reset by peer|Broken pipe|Socket Timeout|recvValue failed|sendBytes failed|recvBytes failed"
    r"|Timed out waiting \d+ms for (recv|send)|Connection refused|DistNetworkError|ncclRemoteError|remote process exited|NCCL watchdog|Watchdog caught"
    r"|failed to recv, got 0 bytes|SIGTERM|exit code 143",
    re.IGNORECASE,
)
"""Texts a rank prints when its *peer* went: from torch's gloo, TCPStore and NCCL sources as seen in killed runs."""
SIGNALS = {
    1: "SIGHUP",
    2: "SIGINT",
    4: "SIGILL",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    11: "SIGSEGV",
    13: "SIGPIPE",
    15: "SIGTERM",
}
LAST_LINES = 12


@dataclass(frozen=True, slots=True)
class Cause:
    """Why an attempt ended: which node and rank, what was seen, what to do next."""

    kind: str
    node: str
    rank: int | None
    summary: str
    evidence: str
    next_command: str
    time: float | None = None


def first_cause(events: Sequence[Mapping[str, Any]], unreachable: Mapping[str, str], run_id: str) -> Cause:
    """Return the first cause.

    `events` are agents' events in any order, duplicates allowed. `unreachable`: node -> why the controller lost it. Events that a stronger
    cause explains (a peer's connection error, "agent lost" seen by the others) never win over it.
    """
    unique = {(event.get("node"), event.get("kind"), event.get("rank"), event.get("time")): event for event in events}
    ordered = sorted(unique.values(), key=lambda event: (_weight(event, unreachable), _when(event)))
    if ordered and _weight(ordered[0], unreachable) < 90:
        return _cause(ordered[0], unreachable, run_id)
    for node, why in unreachable.items():
        return Cause("node-lost", node, None, f"{node} stopped answering: {why}", why, f"r4090c preflight --nodes {node}")
    return Cause("unknown", "?", None, "the attempt ended and no agent told why", "", f"r4090c logs {run_id}")


def _when(event: Mapping[str, Any]) -> float:
    """Return when it happened; a rank's own death time is nearer the truth than the time it was reported."""
    return float(event.get("gone") or event.get("received") or event.get("time") or 0.0)


def _weight(event: Mapping[str, Any], unreachable: Mapping[str, str]) -> int:
    """Return how far the event is from a first cause: 0 = somebody stopped it, 90 and more = it explains nothing."""
    kind = event.get("kind")
    if kind == "stopped":
        return 0
    if kind in ("agent-error", "torchrun-killed"):
        return 10
    if kind == "rank-failed":
        code = event.get("exit_code")
        if isinstance(code, int) and code < 0 and code != -15:
            return 10
        return 40 if code == -15 or CONSEQUENCE.search(_last(str(event.get("log_tail", "")))) else 10
    if kind == "torchrun-failed":
        return 40 if CONSEQUENCE.search(_last(str(event.get("log_tail", "")))) else 20
    if kind in ("node-lost", "agent-lost"):
        return 30 if event.get("peer") in unreachable or kind == "agent-lost" else 31
    return 99


def _cause(event: Mapping[str, Any], unreachable: Mapping[str, str], run_id: str) -> Cause:
    kind, node = str(event.get("kind")), str(event.get("node"))
    rank = event.get("rank")
    log = f"r4090c logs {run_id}" + (f" --rank {rank}" if rank is not None else "")
    if kind == "stopped":
        return Cause(
            kind, node, None, f"stopped by {event.get('by')}", "", f"r4090c launch RECIPE --resume {run_id}", _when(event)
        )
    if kind == "torchrun-killed":
        return Cause(
            kind,
            node,
            None,
            f"torchrun on {node} was killed by {_signal(event.get('signal'))}",
            "",
            f"ssh {node} journalctl -k -n 50",
            _when(event),
        )
    if kind == "agent-error":
        return Cause(
            kind, node, None, f"the agent on {node} failed: {event.get('detail')}", str(event.get("detail")), log, _when(event)
        )
    if kind == "rank-failed":
        code = event.get("exit_code")
        tail = _last(str(event.get("log_tail", "")))
        how = f"was killed by {_signal(-code)}" if isinstance(code, int) and code < 0 else f"exited with code {code}"
        said = _error_line(tail)
        summary = f"rank {rank} on {node} {how}" + (f": {said}" if said else "")
        return Cause(kind, node, rank if isinstance(rank, int) else None, summary, tail, log, _when(event))
    if kind == "torchrun-failed":
        tail = _last(str(event.get("log_tail", "")))
        said = _error_line(tail)
        return Cause(kind, node, None, f"torchrun on {node} failed" + (f": {said}" if said else ""), tail, log, _when(event))
    lost = str(event.get("peer"))
    if kind == "agent-lost" and lost not in unreachable:
        return Cause(
            "agent-killed",
            lost,
            None,
            f"the agent on {lost} died (its node still answers)",
            str(event.get("detail")),
            f"ssh {lost} journalctl -k -n 50",
            _when(event),
        )
    if lost not in unreachable and node in unreachable:
        lost, node = node, lost
    why = unreachable.get(lost, str(event.get("detail")))
    return Cause(
        "node-lost",
        lost,
        None,
        f"{lost} was lost: {why}",
        str(event.get("detail")),
        f"r4090c preflight --nodes {lost}",
        _when(event),
    )


def _signal(number: object) -> str:
    return SIGNALS.get(number, f"signal {number}") if isinstance(number, int) else "a signal"


def _last(text: str) -> str:
    """Return the last lines of a log that say something."""
    return "\n".join([line for line in text.splitlines() if line.strip()][-LAST_LINES:])


def _error_line(text: str) -> str:
    """Return the line that names the error, "" when none does."""
    lines = [line.strip() for line in text.splitlines() if re.search(r"(Error|Exception|error)\b.*:|^error", line)]
    return lines[-1][:300] if lines else ""
