"""Name the first cause of an attempt's end from the events its agents recorded; pure.

A rank that is killed makes its peers fail within 0.3 s with connection errors: those are consequences, whatever order the
clocks of several nodes put them in. So events are first weighed by what they can explain, then ordered in time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CONSEQUENCE = re.compile(
    r"Connection closed by (remote )?peer|Connection reset by peer|Broken pipe|Socket Timeout|recvValue failed|sendBytes failed"
    r"|recvBytes failed|Timed out waiting \d+ms for (recv|send)|Connection refused|DistNetworkError|ncclRemoteError"
    r"|remote process exited|NCCL watchdog|Watchdog caught|failed to recv, got 0 bytes|SIGTERM|exit code 143",
    re.IGNORECASE,
)
"""Texts a rank prints when its *peer* went: from torch's gloo, TCPStore and NCCL sources as seen in killed runs."""
PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
PORT = re.compile(r"(?:port: |\[::\]:|0\.0\.0\.0:|--master-port=)(\d{2,5})")
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
SIGABRT, SIGTERM = 6, 15
NOISE = re.compile(r"\[c10d\] The hostname of the client socket cannot be retrieved")
"""torch's remark on every address without a reverse name; it explains nothing."""
LAST_LINES = 12

STOPPED, STRONG, TORCHRUN, LOST, TERMINATED, WEAK, NOTHING = 0, 10, 20, 30, 35, 40, 90
"""How far an event is from a first cause.

STOPPED: somebody ended the attempt. STRONG: a process failed by itself or was killed. TORCHRUN: torchrun failed and named no
rank. LOST: an agent or node went silent. TERMINATED: a rank was asked to end, by whom is not known. WEAK: a process failed
with what it says when a peer went, or was stopped because the attempt had failed. NOTHING: explains nothing.
"""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why an attempt ended: which node and rank, what was seen, what to do next. `time`: the lead's clock where it is known."""

    kind: str
    node: str
    rank: int | None
    summary: str
    evidence: str
    next_command: str
    time: float | None = None


def first_cause(
    events: Sequence[Mapping[str, Any]],
    unreachable: Mapping[str, str],
    run_id: str,
    *,
    recipe: str | None = None,
    ssh: Mapping[str, str] | None = None,
) -> Cause:
    """Return the first cause.

    `events` are agents' events in any order, duplicates allowed; the order does not matter. `unreachable`: node -> why the
    controller lost it. Events that a stronger cause explains (a peer's connection error, "agent lost" seen by the others) never
    win over it. `recipe`: what `launch --resume` takes, None for a script of the user's own. `ssh`: node -> the ssh command that
    reaches it.
    """
    next_commands = _Next(run_id, recipe, ssh or {})
    ordered = sorted(_unique(events), key=lambda event: (_weight(event, unreachable), *_order(event)))
    if ordered and _weight(ordered[0], unreachable) <= LOST:
        return _cause(ordered[0], ordered, unreachable, next_commands)
    for node, why in sorted(unreachable.items()):
        return Cause("node-lost", node, None, f"{node} stopped answering: {why}", why, f"r4090c preflight --nodes {node}")
    if ordered and _weight(ordered[0], unreachable) < NOTHING:
        return _cause(ordered[0], ordered, unreachable, next_commands)
    return Cause("unknown", "?", None, "the attempt ended and no agent told why", "", f"r4090c logs {run_id}")


@dataclass(frozen=True, slots=True)
class _Next:
    """What a person types next."""

    run_id: str
    recipe: str | None
    ssh: Mapping[str, str]

    def logs(self) -> str:
        return f"r4090c logs {self.run_id}"

    def torchrun_log(self, node: str) -> str:
        return f"{self.logs()} --torchrun {node}"

    def again(self) -> str:
        """Return how the run goes on; a script of the user's own knows no resume."""
        return f"r4090c launch {self.recipe} --resume {self.run_id}" if self.recipe else self.logs()

    def kernel_log(self, node: str) -> str:
        return f"{self.ssh.get(node, f'ssh {node}')} journalctl -k -n 50"


def _unique(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return each event once: the lead has those of its members too, with the time it received them."""
    found: dict[str, Mapping[str, Any]] = {}
    for event in events:
        key = json.dumps({name: value for name, value in event.items() if name != "received"}, sort_keys=True, default=str)
        known = found.get(key)
        if known is None or _received(event) < _received(known):
            found[key] = event
    return list(found.values())


def _received(event: Mapping[str, Any]) -> float:
    received = event.get("received")
    return float(received) if isinstance(received, (int, float)) else float("inf")


def _when(event: Mapping[str, Any]) -> float:
    """Return when it happened, by the lead's clock where the lead received it.

    A rank's own death time is nearer the truth than the time of the event, and the difference of the two clocks is about that
    of `time` and `received`: the way took a few milliseconds.
    """
    told = float(event.get("time") or 0.0)
    skew = _received(event) - told if _received(event) != float("inf") else 0.0
    return float(event.get("gone") or told) + skew


def _order(event: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a total order: time, then what is stable."""
    return (
        _when(event),
        str(event.get("node")),
        str(event.get("kind")),
        str(event.get("rank")),
        json.dumps(event, sort_keys=True, default=str),
    )


def _weight(event: Mapping[str, Any], unreachable: Mapping[str, str]) -> int:
    """Return how far the event is from a first cause; see STOPPED and the others."""
    kind = event.get("kind")
    if kind == "stopped":
        return WEAK if event.get("follows") else STOPPED
    if kind in ("agent-error", "start-failed", "torchrun-killed"):
        return STRONG
    if kind == "rank-failed":
        code = event.get("exit_code")
        if code in (-SIGTERM, 128 + SIGTERM):
            return TERMINATED
        if isinstance(code, int) and code < 0 and code != -SIGABRT:  # NCCL's watchdog aborts a rank whose peer went
            return STRONG
        return WEAK if _is_consequence(event) else STRONG
    if kind == "torchrun-failed":
        return STRONG if _port_taken(event) else WEAK if _is_consequence(event) else TORCHRUN
    if kind in ("node-lost", "agent-lost"):
        return LOST
    return NOTHING


def _log(event: Mapping[str, Any]) -> str:
    """Return the last lines of the event's log that say something."""
    lines = [line for line in str(event.get("log_tail", "")).splitlines() if line.strip() and not NOISE.search(line)]
    return "\n".join(lines[-LAST_LINES:])


def _is_consequence(event: Mapping[str, Any]) -> bool:
    """True when the process says that a peer went: in the line that names its error, else anywhere at the end of its log."""
    text = _log(event)
    return not _port_taken(event) and CONSEQUENCE.search(_error_line(text) or text) is not None


def _port_taken(event: Mapping[str, Any]) -> bool:
    return PORT_TAKEN.search(_log(event)) is not None


def _cause(
    event: Mapping[str, Any], ordered: Sequence[Mapping[str, Any]], unreachable: Mapping[str, str], next_commands: _Next
) -> Cause:
    kind, node, when = str(event.get("kind")), str(event.get("node")), _when(event)
    rank = event.get("rank")
    logs = next_commands.logs()
    kernel_log = next_commands.kernel_log(node)
    detail = str(event.get("detail", ""))
    if kind == "stopped":
        return Cause(kind, node, None, f"stopped by {event.get('by')}", "", next_commands.again(), when)
    if kind == "torchrun-killed":
        return Cause(
            kind, node, None, f"torchrun on {node} was ended by {_signal(event.get('signal'))}", detail, kernel_log, when
        )
    if kind == "start-failed":
        return Cause(kind, node, None, f"{node} could not start: {detail}", detail, f"r4090c preflight --nodes {node}", when)
    if kind == "agent-error":
        return Cause(kind, node, None, f"the agent on {node} failed: {detail}", detail, logs, when)
    if kind == "rank-failed":
        return _rank_cause(event, node, rank if isinstance(rank, int) else None, logs, kernel_log)
    if kind == "torchrun-failed":
        text = _log(event)
        if _port_taken(event):
            port = PORT.search(text)
            which = f"port {port.group(1)}" if port else "its port"
            said = f"{which}, where the ranks meet, was taken by another process"
            return Cause("port-taken", node, None, f"{node} could not start: {said}", text, next_commands.again(), when)
        said = _error_line(text)
        return Cause(
            kind,
            node,
            None,
            f"torchrun on {node} failed" + (f": {said}" if said else ""),
            text,
            next_commands.torchrun_log(node),
            when,
        )
    return _loss_cause(event, ordered, unreachable, next_commands)


def _rank_cause(event: Mapping[str, Any], node: str, rank: int | None, logs: str, kernel_log: str) -> Cause:
    code = event.get("exit_code")
    text = _log(event)
    said = _error_line(text)
    if isinstance(code, int) and code < 0:
        how = f"was killed by {_signal(-code)}"
        kills = event.get("oom_kills")
        if code == -9 and isinstance(kills, int) and kills > 0:
            how += "; meanwhile the kernel ended a process for want of memory"
    else:
        how = f"exited with code {code}" if code is not None else "ended"
    summary = f"rank {rank} on {node} {how}" + (f": {said}" if said and not (isinstance(code, int) and code < 0) else "")
    next_command = kernel_log if code in (-7, -9) else logs + (f" --rank {rank}" if rank is not None else "")
    return Cause("rank-failed", node, rank, summary, text, next_command, _when(event))


def _loss_cause(
    event: Mapping[str, Any], ordered: Sequence[Mapping[str, Any]], unreachable: Mapping[str, str], next_commands: _Next
) -> Cause:
    """Return the cause for a silent agent or node: whom most accuse, and among equals one that the controller lost as well."""
    losses = [one for one in ordered if one.get("kind") in ("node-lost", "agent-lost")]
    accused: dict[str, set[str]] = {}
    for one in losses:
        accused.setdefault(str(one.get("peer")), set()).add(str(one.get("node")))
    firm = {str(one.get("peer")) for one in losses if one.get("kind") == "agent-lost"}  # its kernel closed the connection
    first = {name: index for index, one in reversed(list(enumerate(losses))) for name in (str(one.get("peer")),)}
    lost = min(accused, key=lambda name: (name not in unreachable, name not in firm, -len(accused[name]), first[name]))
    shown = next(one for one in losses if str(one.get("peer")) == lost)
    detail, when = str(shown.get("detail", "")), _when(event)
    if lost not in unreachable and lost in firm:
        summary = f"the agent on {lost} died (its node still answers)"
        return Cause("agent-killed", lost, None, summary, detail, next_commands.kernel_log(lost), when)
    accuser = str(shown.get("node"))
    if lost not in unreachable and accused.get(accuser) == {lost} and len(accused[lost]) == 1:
        summary = f"{accuser} and {lost} lost each other on the data network, though both answer over SSH"
        return Cause("node-lost", lost, None, summary, detail, f"r4090c preflight --nodes {accuser},{lost}", when)
    summary = f"{lost} was lost: {unreachable.get(lost, detail)}"
    return Cause("node-lost", lost, None, summary, detail, f"r4090c preflight --nodes {lost}", when)


def _signal(number: object) -> str:
    return SIGNALS.get(number, f"signal {number}") if isinstance(number, int) else "a signal"


def _error_line(text: str) -> str:
    """Return the line that names the error, "" when none does: a Python traceback's last, else the last that looks like one."""
    lines = [line.strip() for line in text.splitlines()]
    raised = [
        line
        for line in lines
        if re.match(r"(\[rank\d+\]: ?)?([A-Za-z_]\w*\.)*[A-Z]\w*(Error|Exception|Exit|Interrupt)(:|$)", line)
    ]
    like = [line for line in lines if re.search(r"(Error|Exception|error)\b.*:|^error", line)]
    return (raised or like or [""])[-1][:300]
