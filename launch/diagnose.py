"""Name the first cause of an attempt's end from the events its agents recorded; pure.

A rank that is killed makes its peers fail within 0.3 s with connection errors: those are consequences, whatever order the
clocks of several nodes put them in. So events are first weighed by what they can explain, then ordered in time. What a process
said at its end is read with `diagnose_log`, so that a rank that ran out of memory is called so, and not only "failed".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from launch.causes import MENDS, NOISE, SIGNALS, Mends, blames_peer

if TYPE_CHECKING:
    from launch.diagnose_log import LogCause

_UNREACHED = re.compile(
    r"could not be reached at (\S+):\d+ in .*: (Network is unreachable|No route to host|(?:Connection )?timed out)"
)
"""What an agent tells of a lead that it never reached, where the network and not the agent is missing (launch/agent.py)."""
FULL_BYTES = 64 * 1024
"""est.: of a disk that is full some KiB may be free: less than a write takes."""
SIGABRT, SIGTERM = 6, 15
LAST_LINES = 12

STOPPED, STRONG, TORCHRUN, LOST, TERMINATED, NETWORK, WEAK, NOTHING = 0, 10, 20, 30, 35, 38, 40, 90
"""How far an event is from a first cause.

STOPPED: somebody ended the attempt. STRONG: a process failed by itself, was killed, or stood still. TORCHRUN: torchrun failed and
named no rank. LOST: an agent or node went silent. TERMINATED: a rank was asked to end, by whom is not known. NETWORK: a process
could not reach a peer, which may have gone. WEAK: a process failed with what it says when a peer went, or was stopped because the
attempt had failed. NOTHING: explains nothing.
"""
UNNAMED = frozenset({"rank-failed", "rank-killed", "peer-gone", "collective-timeout", "stopped"})
"""What a log tells no better than the event it came with."""
UNREACHED = frozenset(
    {"firewall-blocks-ports", "master-unreachable", "peers-did-not-join", "name-not-resolved", "rdma-path-broken", "nccl-error"}
)
"""What a rank says whose peer cannot be reached: also of a node whose link was cut."""
STORAGE = re.compile(r"nfs|rpc_|^io_schedule|folio_wait|wait_on_page|jbd2|ext4|xfs|btrfs|fuse|ceph|lustre|ll_|blk_|wb_")
"""Where the kernel waits for storage: names of functions in /proc/PID/wchan."""
FRAMES_SHOWN = 6
_PORT_TAKEN = re.compile(r"port \S+, where \w+ \w+ meet, was taken")
"""launch/agent.py's words."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why an attempt ended: which node and rank, what was seen, what to do next. `time`: the lead's clock where it is known.

    `kind` is API: see launch.causes.MENDS. `fix`: more of what mends it, the likeliest first.
    """

    kind: str
    node: str
    rank: int | None
    summary: str
    evidence: str
    next_command: str
    time: float | None = None
    fix: tuple[str, ...] = ()


def mends(cause: Cause) -> Mends:
    """Return what can help after this cause: the same again, the same without its node, or nothing but a person."""
    return why_mends(cause.kind)[0]


def why_mends(kind: str) -> tuple[Mends, str]:
    """Return what can help after a cause of this kind, and why. A kind nobody thought of: again."""
    return MENDS.get(kind, ("again", "nothing is known against it"))


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
    cause = _first_cause(events, unreachable, _Next(run_id, recipe, ssh or {}))
    return replace(
        cause,
        summary=_printable(cause.summary),
        evidence=_printable(cause.evidence),
        next_command=_printable(cause.next_command),
        fix=tuple(map(_printable, cause.fix)),
    )


def _printable(text: str) -> str:
    """Return text of a log as a terminal may show it: a rank may print anything."""
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)


def _first_cause(events: Sequence[Mapping[str, Any]], unreachable: Mapping[str, str], next_commands: _Next) -> Cause:
    ordered = sorted(_unique(events), key=lambda event: (_weight(event, unreachable), *_order(event)))
    if ordered and _weight(ordered[0], unreachable) <= LOST:
        return _cause(ordered[0], ordered, unreachable, next_commands)
    for node, why in sorted(unreachable.items()):
        return Cause("node-lost", node, None, f"{node} stopped answering: {why}", why, f"r4090c preflight --nodes {node}")
    if ordered and _weight(ordered[0], unreachable) < NOTHING:
        return _cause(ordered[0], ordered, unreachable, next_commands)
    said = "the attempt ended and no agent told why"
    return Cause("unknown", "?", None, said, "", f"r4090c diagnose {next_commands.run_id}")


def said_by(events: Sequence[Mapping[str, Any]], cause: Cause) -> Iterator[str]:
    """Yield what the other processes that failed said, in order of time: it follows from `cause`."""
    for event in sorted(_unique(events), key=_order):
        node, rank, code = event.get("node"), event.get("rank"), event.get("exit_code")
        if event.get("kind") == "rank-failed" and (node, rank) != (cause.node, cause.rank):
            text = _log(event)
            said = _error_line(text) or (text.splitlines() or [""])[-1].strip()[:300]
            how = f"was ended by {_signal(-code)}" if isinstance(code, int) and code < 0 else f"ended, exit code {code}"
            yield f"rank {rank} on {node} {how}" + (f": {said}" if said else "")
        elif event.get("kind") in ("agent-lost", "node-lost") and event.get("peer") != cause.node:
            yield f"{node}: {event.get('detail', '')}"


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
        return f"r4090c launch --resume {self.run_id}" if self.recipe else self.logs()

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
    if kind in ("agent-error", "agent-terminated", "start-failed", "torchrun-killed", "lease-taken", "rank-hung"):
        return STRONG
    if kind == "rank-failed":
        code = event.get("exit_code")
        if code in (-SIGTERM, 128 + SIGTERM):
            return TERMINATED
        if isinstance(code, int) and code < 0 and code != -SIGABRT:  # NCCL's watchdog aborts a rank whose peer went
            return STRONG
        return _weight_of_log(event, otherwise=STRONG)
    if kind == "torchrun-failed":
        return _weight_of_log(event, otherwise=TORCHRUN)
    if kind in ("node-lost", "agent-lost"):
        return LOST
    return NOTHING


def _log(event: Mapping[str, Any]) -> str:
    """Return the last lines of the event's log that say something."""
    told = (line for line in str(event.get("log_tail", "")).splitlines() if line.strip() and not line.startswith("wandb:"))
    lines = [line for line in told if not NOISE.search(line)]
    return "\n".join(lines[-LAST_LINES:])


def _weight_of_log(event: Mapping[str, Any], otherwise: int) -> int:
    """Return the weight of a failed process by what it said; `otherwise`: of one that neither names a cause nor blames a peer."""
    named = _named(event)
    if named is not None:
        return NETWORK if named.kind in UNREACHED else STRONG
    return WEAK if _is_consequence(event) else otherwise


def _named(event: Mapping[str, Any]) -> LogCause | None:
    """Return the cause that the end of the event's log names, None when it names none that the event does not tell as well."""
    rank, code = event.get("rank"), event.get("exit_code")
    text = str(event.get("log_tail") or "")
    where = (str(event.get("node")), rank if isinstance(rank, int) else None, code if isinstance(code, int) else None)
    found = _read_log(text, *where) if text.strip() else None
    return None if found is None or found.kind in UNNAMED else found


@lru_cache(maxsize=256)
def _read_log(text: str, node: str, rank: int | None, exit_code: int | None) -> LogCause | None:
    from launch.diagnose_log import Source, diagnose_all  # 90 ms, which commands that read no log need not wait

    return diagnose_all([Source(text, node=node, rank=rank, failed=True, exit_code=exit_code)]).cause


def _is_consequence(event: Mapping[str, Any]) -> bool:
    """True when the process says that a peer went: in the line that names its error, else anywhere at the end of its log."""
    text = _log(event)
    return any(blames_peer(line) for line in (_error_line(text) or text).splitlines())


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
    if kind == "start-failed" and _PORT_TAKEN.search(detail):
        return Cause("port-taken", node, None, f"{node} could not start: {detail}", detail, next_commands.again(), when)
    if kind in ("start-failed", "lease-taken"):
        return Cause(kind, node, None, f"{node} could not start: {detail}", detail, f"r4090c preflight --nodes {node}", when)
    if kind == "rank-hung":
        return _hang_cause([one for one in ordered if one.get("kind") == kind], next_commands)
    if kind == "agent-terminated":
        summary = f"{detail} on {node}: the node shut down, or somebody ended it by hand"
        return Cause("agent-killed", node, None, summary, detail, next_commands.kernel_log(node), when)
    if kind == "agent-error":
        return Cause(kind, node, None, f"the agent on {node} failed: {detail}", detail, logs, when)
    if kind == "rank-failed":
        return _rank_cause(event, node, rank if isinstance(rank, int) else None, next_commands)
    if kind == "torchrun-failed":
        named = _named(event)
        if named is not None:
            return _log_cause(named, event, node, None, next_commands)
        text = _log(event)
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


def _rank_cause(event: Mapping[str, Any], node: str, rank: int | None, next_commands: _Next) -> Cause:
    code, when = event.get("exit_code"), _when(event)
    code = -SIGTERM if code == 128 + SIGTERM else code  # train/main.py's, as of every shell
    text, logs, kernel_log = _log(event), next_commands.logs(), next_commands.kernel_log(node)
    killed = isinstance(code, int) and code < 0
    named = _named(event)
    if named is not None and not (code == -9 and named.kind != "host-out-of-memory"):
        return _log_cause(named, event, node, rank, next_commands)
    kills = event.get("oom_kills")
    if code == -9 and isinstance(kills, int) and kills > 0:
        said = f"rank {rank} on {node} was killed by SIGKILL; meanwhile the kernel ended a process for want of memory"
        proof = f"oom_kill of /proc/vmstat rose by {kills} during the attempt"
        advice = ("offload less to host RAM", "fewer workers of the data loader", "r4090c plan RECIPE tells the host memory")
        return Cause("host-out-of-memory", node, rank, said, proof, kernel_log, when, advice)
    room = event.get("free_bytes")
    if not killed and isinstance(room, int) and room < FULL_BYTES and not text.strip():
        said = f"rank {rank} on {node} ended without a word, and the disk of the run folder is full"
        mend = ("df -h of the run folder: make room", "checkpoint.keep: fewer checkpoints")
        return Cause("disk-full", node, rank, said, f"{room} bytes are free, and its log is empty", logs, when, mend)
    said = _error_line(text)
    how = f"was killed by {_signal(-code)}" if killed and isinstance(code, int) else f"exited with code {code}"
    summary = f"rank {rank} on {node} {'ended' if code is None else how}" + (f": {said}" if said and not killed else "")
    next_command = kernel_log if code in (-7, -9) else logs + (f" --rank {rank}" if rank is not None else "")
    return Cause("rank-killed" if killed else "rank-failed", node, rank, summary, text, next_command, when)


def _log_cause(named: LogCause, event: Mapping[str, Any], node: str, rank: int | None, next_commands: _Next) -> Cause:
    """Return the cause that a process named at the end of its log; what it said of a rank or node is of its own."""
    when = _when(event)
    if named.kind == "port-taken":  # every attempt takes ports anew
        said = f"{node} could not start: {named.summary}"
        return Cause(named.kind, node, rank, said, named.evidence, next_commands.again(), when, named.fix)
    where = f"rank {rank} on {node}" if rank is not None and f"rank {rank}" not in named.summary else node
    next_command = named.fix[0] if named.fix else next_commands.logs()
    return Cause(named.kind, node, rank, f"{where}: {named.summary}", named.evidence, next_command, when, named.fix)


def _hang_cause(hung: Sequence[Mapping[str, Any]], next_commands: _Next) -> Cause:
    """Return the cause among ranks that stood still: the one that keeps the others waiting, where one does.

    In this order: a process somebody stopped, one that waits for storage in the kernel, one that does not wait for its peers,
    else all wait for each other.
    """
    ranks = list({(str(one.get("node")), one.get("rank")): one for one in reversed(hung)}.values())[::-1]  # the first of each
    ranks.sort(key=lambda one: (_number(one.get("step")), -_number(one.get("silent_s"))))  # the furthest behind in front
    for one in ranks:
        if str(one.get("process", ""))[:1] in ("T", "t"):
            return _hung(
                "rank-frozen",
                one,
                "was stopped (SIGSTOP, a debugger or Ctrl-Z) and did not run",
                next_commands,
                ("who stopped it? a debugger, `kill -STOP`, Ctrl-Z in a terminal, a batch system that suspends",),
            )
    for one in ranks:
        if one.get("process") == "D":
            wchan, phase = str(one.get("wchan") or ""), one.get("phase")
            if STORAGE.search(wchan) or (phase == "checkpoint" and not re.search(r"nv|uvm|os_", wchan)):
                said = "waits in the kernel for storage that does not answer"
                nfs = ("look at the NFS server and the way to it: nfsstat -m; dmesg", "r4090c preflight")
                return _hung("storage-hung", one, said, next_commands, nfs)
    busy = [one for one in ranks if not one.get("waits_for_peers")]
    if busy:
        one, others = busy[0], len(ranks) - len(busy)
        said = f"does not step, while {others} wait{'s' * (others == 1)} for it" if others else "does not step"
        also = f" (nor do {len(busy) - 1} more)" if len(busy) > 1 else ""
        stacks = (f"read its stacks: {one['stacks']}",) if one.get("stacks") else ()
        return _hung("rank-stuck", one, said + also, next_commands, stacks)
    one = ranks[0]
    steps = sorted({int(_number(rank.get("step"))) for rank in ranks})
    parted = f"; they are at steps {', '.join(map(str, steps[:8]))}" if len(steps) > 1 else ""
    summary = (
        f"all {len(ranks)} ranks that were looked at wait for each other in {_stands(one) or 'a collective'}"
        f" ({_lasted(one)}){parted}: their collectives do not match, or the data network lost them"
    )
    advice = (
        "r4090c preflight tests the data network between all nodes",
        "no collective (saving, logging, evaluation) inside `if rank == 0`; the same number of batches for every rank",
        "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 tells the next time which collective each was in",
    )
    return Cause("collective-hung", str(one.get("node")), None, summary, _proof(one), "r4090c preflight", _when(one), advice)


def _hung(kind: str, event: Mapping[str, Any], said: str, next_commands: _Next, advice: tuple[str, ...]) -> Cause:
    node, rank = str(event.get("node")), event.get("rank")
    known = rank if isinstance(rank, int) else None
    stands = _stands(event)
    summary = f"rank {rank} on {node} {said}, {_lasted(event)}" + (f"; it stands in {stands}" if stands else "")
    next_command = f"{next_commands.logs()}{'' if known is None else f' --rank {known}'}"
    return Cause(kind, node, known, summary, _proof(event), next_command, _when(event), advice)


def _lasted(event: Mapping[str, Any]) -> str:
    return f"silent for {_number(event.get('silent_s')):.0f} s at step {event.get('step', '?')} ({event.get('phase', '?')})"


def _stands(event: Mapping[str, Any]) -> str:
    """Return where a rank stands, "" when it is not known: its innermost frame, else the kernel's function."""
    frames, wchan = event.get("frames"), str(event.get("wchan") or "")
    if isinstance(frames, list) and frames:
        return str(frames[0])[:200]
    return wchan[:80] if wchan not in ("", "0") else ""


def _proof(event: Mapping[str, Any]) -> str:
    """Return what was read of a rank that stands still."""
    frames = event.get("frames")
    shown = [str(frame)[:200] for frame in frames[:FRAMES_SHOWN]] if isinstance(frames, list) else []
    state = f"/proc: state {event.get('process', '?')}, wchan {event.get('wchan') or '?'}"
    return "\n".join([state, *shown])


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


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
    for one in losses:
        unreached = _UNREACHED.search(str(one.get("detail")))
        if unreached and not unreachable and not firm:  # both say it of each other; the one that tried knows the way is missing
            accuser, lead = str(one.get("node")), str(one.get("peer"))
            told = f"{lead} is not reached at its data address {unreached.group(1)} from {accuser}: {unreached.group(2)}"
            command = f"r4090c preflight --nodes {lead},{accuser}"
            return Cause("node-lost", lead, None, told, str(one["detail"]), command, _when(event))
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
    ours = [line for line in lines if re.match(r"train: .+: .+; expected ", line)]  # train/errors.py
    like = [line for line in lines if re.search(r"(Error|Exception|error)\b.*:|^error", line)]
    return (raised or ours or like or [""])[-1][:300]
