"""Name the first cause in the text of a training log, of whatever launcher; pure. Its sister `diagnose` reads our agents' events.

A log that ends in a thousand lines has one cause and many consequences: peers whose connection closed, watchdogs ten minutes
later, a launcher that ends the others. So every known cause says what it explains; of the causes found, those that another one
explains step back, and of the rest the earliest in the log wins. What was said where it may have been survived (a warning at the
start, an exception that somebody caught and printed) steps behind whatever ended a process. What no entry knows is told by the
first exception nobody caught, then by the rank that torchrun saw fail first; a log of consequences alone says that a peer went
first. Of several attempts in one text the last is told. A healthy log, or text of another kind, has no cause: None.

Before lines are read, one prefix that a launcher or logger put before each of them is taken off, and NCCL's reason, which torch
prints after "Last error:", is read as the WARN that it was.

Adding a cause: one entry in CAUSES, one log in tests/launch/fixtures/diagnose/ with its .expect.json.
"""

from __future__ import annotations

import bisect
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

from launch.causes import NOISE, OTHER_SERVICE, SIGNALS, blames_peer
from netcheck.data_network import unfit
from netcheck.tools import kernel_log, nccl_log
from r4090c.errors import ParseError
from r4090c.model import Xid

TOOL = "training-log"
COMMAND = "what a run printed, of any launcher"
"""As the modules of netcheck.tools have them: `r4090c parse` shows this one beside them."""

EVIDENCE_MOST = 500
"""Characters of the line shown: an exception may carry a whole tensor."""
LAST_LINES = 20
"""est.: an exception nobody caught stands at the end of the log of its process; one further up was survived. Lines of wandb's
summary are not counted."""
LINE_MOST = 4000
"""Characters of a line that are read: an allocator's longest message has a third of it."""
TRACEBACK_MOST = 200
"""est.: lines of the longest traceback."""
AROUND_FAILURE = 300
"""est.: lines between an uncaught exception without a rank in front and the first mark of failure; further up it was survived."""
KERNEL_EARLIER_D = 1.0
"""est.: days between an event of the kernel and the first line of the run that make it another run's; clocks and zones differ."""
MOST_EARLIER = 3
"""Attempts before the last one in the same text whose cause is told."""
LEAST_LOST_STEPS = 5
"""est.: steps to the end of a log whose gradients are no numbers; single ones are skipped."""
BUFFERED_STEPS = 100
"""est.: steps in the 8 KiB that Python holds back of what it prints into a file: they come out after what ended the process."""
CHAIN_MOST = 12
"""est.: lines that are kept of the exceptions that followed from one."""
MOST_XIDS = 8
MOST_MATCHES = 2000
"""Of a consequence that repeats in the log of a large run."""

FALLEN = frozenset({79})
HARDWARE = frozenset({48, 61, 62, 64, 74, 95, 109, 110, 119, 120})
PROGRAM = frozenset({13, 31})
"""Xids by meaning (NVIDIA Xid catalogue; the check gpu-xid judges the same numbers, but for 61, of the microcontroller as 62 is).
43, 45, 154 only follow from others."""

COMMUNICATION = frozenset({"nccl-error", "collective-timeout", "peer-gone", "rdma-path-broken"})
"""What a rank says when its peer went, or does not answer."""
DEATHS = frozenset({"rank-failed", "rank-killed", "checkpoint-not-written", "wrong-input"})
"""That a rank died, when nothing names why."""
INFERRED = frozenset({"false-p2p-grant", "ranks-out-of-step", "nan-loss"})
"""Causes read out of what the run did, not out of an error: any error that is named comes before them."""
LATER = COMMUNICATION | DEATHS | INFERRED
"""What every named cause may explain."""


@dataclass(frozen=True, slots=True)
class LogCause:
    """Why a run ended, as its log tells it. None = the log does not tell.

    `kind`: name of the entry in CAUSES; where launch.diagnose knows the same thing, by the same name. `evidence`: the line, and
    its number. `gpu`: CUDA index on the node. `consequences`: what else the log shows that this explains. `fix`: what to do,
    the likeliest first; a word of advice or a command. `details`: what the line told: port, path, pci, address, …
    `source`: the name of the text it stands in, "" where there is one only. `also`: what else the log shows that this does not
    explain.
    """

    kind: str
    summary: str
    evidence: str
    line_number: int
    node: str | None
    rank: int | None
    gpu: int | None
    consequences: tuple[str, ...]
    fix: tuple[str, ...]
    details: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    also: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """One text of several, as the log of a rank. `node`, `rank`: of whom it is, where that is known.

    `failed`: its process is known to have failed; `exit_code`: with what. `gap`: (line, lines): so many lines after that one were
    left out. `first`: lines of the same file that stand before it.
    """

    text: str
    name: str = ""
    node: str | None = None
    rank: int | None = None
    failed: bool = False
    exit_code: int | None = None
    gap: tuple[int, int] = (0, 0)
    first: int = 0

    def number(self, line: int) -> int:
        """Return which line of its file is that one of the text, both from 1."""
        return self.first + line + (self.gap[1] if line > self.gap[0] else 0)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What several texts of one run tell. `ended_well`: they bear a mark of a run that came to its end, and none of a failure.

    `earlier`: how the attempts before the last one ended that the same text holds.
    """

    cause: LogCause | None
    ended_well: bool
    earlier: tuple[str, ...] = ()


def parse(text: str) -> LogCause | None:
    """Return what `diagnose` does. Raises ParseError for an empty text, which says nothing of a run."""
    if not text.strip():
        raise ParseError("the log is empty")
    return diagnose(text)


def diagnose(text: str) -> LogCause | None:
    """Return the first cause, or None when the log holds none: it is healthy, was cut before the end, or is no log of a run."""
    return diagnose_all([Source(text)]).cause


def diagnose_all(sources: Sequence[Source]) -> Diagnosis:
    """Return the first cause over all texts: by what causes explain, then by time where all tell it, then by their order.

    Of a text that holds several attempts, one after the other, the last counts; the earlier ones are told aside.
    """
    last, earlier = list[Source](), list[Source]()
    for source in sources:
        *before, now = _attempts(source)
        last.append(now)
        earlier += before
    told = [_one_line(source, diagnose_attempt([source])) for source in earlier[-MOST_EARLIER:]]
    return replace(diagnose_attempt(last), earlier=tuple(told))


def _one_line(source: Source, found: Diagnosis) -> str:
    how = "ended well" if found.ended_well else "why is not known"
    if found.cause is not None:
        how = f"{found.cause.kind} (line {found.cause.line_number}): {found.cause.summary}"
    return f"an earlier attempt, from line {source.number(1)}{' of ' + source.name if source.name else ''}: {how}"


def diagnose_attempt(sources: Sequence[Source]) -> Diagnosis:
    """Return the first cause over all texts, each of one attempt."""
    log = _Log(sources)
    found: dict[str, _Found] = {}
    for cause in CAUSES:
        if cause.needs_failure and not log.failed:
            continue
        match = cause.find(log) if callable(cause.find) else _first(log, cause.find, uncaught=cause.survivable)
        if match is not None:
            found[cause.kind] = match
    well = log.succeeded and not log.failed
    if well:
        found = {kind: match for kind, match in found.items() if kind == "nan-loss" or not log.before_success(match.at)}
    if not well and not found.keys() - {"peer-gone"} and (failed := _first_block(log)) is not None:
        found["rank-failed"] = failed
    explained = {kind for kind in found for by in found if _explains(log, found, by, kind)}
    first = min((kind for kind in found if kind not in explained), key=lambda kind: log.order(found[kind].at), default=None)
    return Diagnosis(None if first is None else _told(log, _BY_KIND[first], found), well and not found)


def _explains(log: _Log, found: Mapping[str, _Found], by: str, kind: str) -> bool:
    """True when `kind` only follows from `by`. What may have been survived explains no death, unless it can have led to it."""
    if by == kind:
        return False
    cause = _BY_KIND[by]
    if found[by].survived != found[kind].survived:
        weak, strong = (by, kind) if found[by].survived else (kind, by)
        waited = strong in COMMUNICATION | {"stopped"} and not log.progressed(found[weak].at, found[strong].at)
        if not waited and strong not in _BY_KIND[weak].explains - LATER:
            return by == strong
    later = log.order(found[by].at) <= log.order(found[kind].at)
    return kind in cause.explains or (later and (kind in cause.explains_after or kind == "stopped"))


# --------------------------------------------------------------------------- the log


@dataclass(frozen=True, slots=True)
class _Found:
    """Where a cause was found, and what the place tells. `survived`: it was said where an exception may have been caught."""

    at: int
    details: Mapping[str, str] = field(default_factory=dict)
    rank: int | None = None
    node: str | None = None
    gpu: int | None = None
    survived: bool = False


_SHELL_KILLED = (
    r"^\S{1,300}: line \d{1,6}: {1,6}\d{1,9} (?P<shell>Killed|Segmentation fault|Bus error|Floating point exception|Aborted)\b"
)
"""bash's words for a command of a script that a signal ended."""
_FAILED = re.compile(
    r"ChildFailedError|exits with return code = -?[1-9]|failed \(exitcode: -?\d|terminate called after throwing|DistBackendError"
    r"|Watchdog caught collective|ssh exited with exit code [1-9]|^\[rank\d+\]: (?:Traceback|[\w.]{1,80}(?:Error|Exception): )"
    r"|SignalException|CalledProcessError"
    r"|srun: error: |CANCELLED AT|^mpirun (?:noticed|detected) that|^train: .{1,900}?; expected "
    r"|^Error out of memory at line \d+ in file|due to a collective timeout"
    r"|Heartbeat monitor timed out|^(?:\[rank\d+\]: ?)?KeyboardInterrupt$|process received SIGINT"
    r"|^\S{1,64} exited with code [1-9]|^(?:zsh: )?[Kk]illed(?:$| {2,})|" + _SHELL_KILLED.replace("?P<shell>", "?:"),
    re.MULTILINE,
)
"""Marks of a run that did not end well, of torchrun, DeepSpeed, torch, pdsh, Slurm, mpirun and our train/errors.py."""
_SUCCEEDED = re.compile(
    r"'train_runtime': |Process (?P<pid>\d+) exits successfully|Training completed\."
    r"|`Trainer\.fit` stopped: `max_(?:epochs|steps)=\d+` reached",
    re.MULTILINE,
)
"""Marks of a run that came to its end: Hugging Face's Trainer, DeepSpeed's launcher (of each rank), Lightning."""
_SPAWNED = re.compile(r"process (\d+) spawned with command")
"""What DeepSpeed's launcher says of each rank that it starts."""
_ENDED = re.compile(
    r"ChildFailedError|exits with return code = |'train_runtime': |Training completed\.|Process \d+ exits successfully"
    r"|`Trainer\.fit` stopped: |will restart worker group|^(?:zsh: )?[Kk]illed(?:$| {2,})"
    r"|CANCELLED AT |exited on signal \d|got signal: \d|SIGINT, exiting"
    r"|^(?P<raised>srun: error: \S{1,255}: tasks? \d|[A-Za-z_][\w.]{0,200}(?:Error|Exception|Interrupt)(?=: |$))|"
    + _SHELL_KILLED.replace("?P<shell>", "?:"),
    re.MULTILINE,
)
"""After it a new start is another attempt; after an exception without a mark of a rank, or a task that srun lost, only one that
was typed.
"""
_START = re.compile(
    r"Setting OMP_NUM_THREADS environment variable for each process|\[runner\.py:\d+:main\] cmd = "
    r"|^(?P<typed>nohup: ignoring input|(?:[^\n$#]{0,80}[$#]|\+{1,3}) (?:[A-Z_]{1,40}=\S{1,80} ){0,8}(?:\S{0,80}/)?"
    r"(?:torchrun|deepspeed|accelerate|srun|mpirun|nohup|python3?) )",
    re.MULTILINE,
)
"""How an attempt begins: torchrun's remark, DeepSpeed's runner, nohup's, or what was typed, or shown by `set -x`."""
_LAST_STEP = re.compile(r"^step (?P<step>\d{1,12})/(?P=step) loss ", re.MULTILINE)
"""The last step of a recipe of ours; these lines are not kept."""
_STAMPS = (
    re.compile(r"(?:^|[\[ ])20\d\d-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d(?:[.,]\d{1,9})?)"),
    re.compile(r"(?:^|\[)[IWEF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d(?:\.\d{1,9})?) "),
    re.compile(r"^(?:\[[A-Z][a-z]{2} )?([A-Z][a-z]{2}) {1,2}(\d{1,2}) (\d\d):(\d\d):(\d\d) "),
)
"""Times in a line: DeepSpeed, logging and journalctl -o short-iso; glog (torch); syslog and dmesg -T."""
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_STAMP_MOST = 200
"""Characters of a line in which its time is looked for."""
Stamp = tuple[float, ...]
_CLOCK = r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d"
_ISO = r"20\d\d-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
_NO_DAEMON = r"(?![\w.\-]{1,63} [\w.@/\-]{1,60}(?:\[\d{1,9}\])?: )"
"""Not a line of syslog: its host and program are read elsewhere."""
_PREFIXES = (
    ("]: ", re.compile(rf"(?:{_CLOCK}|{_ISO}) (?P<node>[\w.\-]{{1,63}}) [\w.@/\-]{{1,60}}\[\d{{1,9}}\]: "), True),
    (":", re.compile(rf"(?:{_ISO}|{_CLOCK}) {_NO_DAEMON}"), False),
    (" | ", re.compile(r"[A-Za-z0-9][\w.\-]{0,62}-\d{1,4} {1,40}\| ?"), True),
    ("[pod/", re.compile(r"\[pod/[\w.\-/]{1,200}\] "), True),
    (" pid=", re.compile(r"\(\w{1,60} pid=\d{1,9}(?:, ip=[\d.]{7,15})?\) ?"), True),
    ("]<std", re.compile(r"\[\d{1,4},(?P<rank>\d{1,6})\]<std(?:out|err)>: ?"), True),
    (": ", re.compile(r" {0,5}(?P<rank>\d{1,6}):(?: |$)"), False),
    ("[default", re.compile(r"\[default(?P<local>\d{1,6})\]: ?"), True),
)
"""What stands before each line of journalctl, ts, `logs --timestamps`, docker compose, kubectl, Ray, mpirun --tag-output, srun -l
and torchrun --tee, the outer ones first; in front a text that such a log holds. False: other lines may begin so too; then most
lines must, or one that begins a traceback."""
_BEGINS_TRACEBACK = re.compile(r"(?:\[rank\d+\]: ?)?Traceback \(most recent call last\)")
_NODE_PREFIX = re.compile(r"^([A-Za-z][\w.\-]{0,62}): (?=\[|\S{1,80}:\d+:\d+ \[|Traceback|\s{0,3}\d{1,3}%)", re.MULTILINE)
"""What pdsh and DeepSpeed put in front of a node's lines."""
_PDSH = re.compile(r"^pdsh@\S{1,255}: ([A-Za-z0-9][\w.\-]{0,62}): ssh exited", re.MULTILINE)
_SRUN_TASK = re.compile(r"srun: error: (?P<node>[\w.\-]{1,255}): tasks? (?P<rank>\d{1,6})[\d,\-]{0,200}: (?P<said>.{1,80})")
"""Slurm's words for tasks that ended badly: a task is a rank."""
_RANK = re.compile(r"\[rank(\d{1,6})\]:|\[[Rr]ank (\d{1,6})\]|\bRank (\d{1,6})\]")
_BLOCK = re.compile(
    r"^[ \t]*host[ \t]*: (?P<host>\S{1,255})[ \t]*\n"
    r"[ \t]*rank[ \t]*: (?P<rank>\d{1,6}) \(local_rank: (?P<local>\d{1,6})\)[ \t]*\n"
    r"[ \t]*exitcode[ \t]*: (?P<code>-?\d{1,6}) \(pid: (?P<pid>\d{1,9})\)",
    re.MULTILINE,
)
"""A failed rank in torchrun's summary."""
_INIT_RANK = re.compile(
    r"(?P<host>[A-Za-z0-9][\w.\-]{0,250}):(?P<pid>\d{1,9}):\d{1,9} \[\d+\] "
    r"NCCL INFO ncclCommInit.{0,200}? rank (?P<rank>\d{1,6}) "
)
_LAST_WORDS = re.compile(r"(?:[A-Za-z0-9][\w.\-]{0,62}: )?\[rank\d+\]: ?(?!\[)|train: |.{0,300}(?:fatal error: |/ld: )")
"""How a line begins that ends a process: torch marks the traceback of one; our training's refusal; what a compiler prints."""
_KERNEL = re.compile(r"NVRM: |Killed process \d|oom-kill|\bkernel: ")
"""A line of the kernel's."""
_PROGRAM_NAME = re.compile(r"python|pt_|torchrun|deepspeed|accelerate|ray|cuda-Ev|.*\.py$")
"""Names the kernel shows of processes of a training; torch calls its threads pt_…"""
_NO_HOST = re.compile(r"\w*(?:Error|Exception|Warning|Interrupt|Exit)|INFO|WARNING|ERROR|DEBUG|root|torch|python3?|bash|sh")


WORDS = (
    "rror", "xception", "Exhausted", "Traceback", "WARN", "NCCL", "NVRM", "Xid", "Watchdog", "[PG ", "terminate called",
    "fail", "Fail", "illed", "signal", "Signal", "Interrupt", "CANCELLED", "exits with", "exit code", "exited", "imed out",
    "closed", "reset", "refused", "denied", "No space", "quota", "memory", "ssh", "srun: ", "mpirun ", "oom", "EADDRINUSE",
    "already in use", "nfs: server", "GPU is lost", "device handle", "off the bus", "not recei", "nccl", "Broken pipe",
    "Driver/library", "driver", "CUDA", "cuda", "CUBLAS", "mapping of buffer", "RTX 4000", "retrieved", "joined",
    "launcher", "loss scale", "oss is ", "OVERFLOW", "train_batch_size", "world size", "Ninja", "extension", "Mismatched",
    "mismatch", "ancdata", "'train_runtime'", "successfully", "completed", "exit barrier", "(local_rank:", "host  ",
    "exitcode", "aborted", "Assertion", "[Errno", "Too many open", "SO_ERROR", "forward compat", "`Trainer.fit`",
    "train: ", "Unable to find address", "blocked for more than", "nfs_", "nfs4_", "rpc_", "Out of bounds values",
    "errno: 98",
    "free()", "malloc()", "realloc()", "munmap_chunk()", "corrupted", "double free", "stack smashing",
    "not found", "No such file",
    "cannot find", "peer access", "process received", "Segmentation", "Aborted", "Floating point",
    "collective timeout", "spawned with",
)  # fmt: skip
"""One of them is in every line that is read: most lines of a long log are not. A test compares them with the patterns."""
_LOST_LOSS = re.compile(r"(?:loss|grad_norm)['\"]?\s{0,3}[:=]\s{0,3}['\"]?[+-]?(?:nan|inf)\b", re.IGNORECASE)
_STEP = re.compile(r"loss['\"]?(?:\s{0,3}[:=]\s{0,3}|\s{1,3})['\"]?[+-]?\d", re.IGNORECASE)
"""A step of a run: whatever was said before it was survived, as ranks step together."""


_QUOTED = re.compile(r"(?:\S{1,80}: ?){0,3}\s{3,}\S")
"""A line of the program that a traceback shows below its place: what stands in it was not said, only written there."""


def _stamp(line: str) -> Stamp | None:
    """Return the time a line begins with, from the month down to the second: a year is not in all of them."""
    for pattern in _STAMPS:
        match = pattern.search(line, 0, _STAMP_MOST)
        if match:
            month, *others = match.groups()
            if not month.isdecimal() and month not in _MONTHS:
                return None
            number = float(month) if month.isdecimal() else 1.0 + _MONTHS.index(month)
            return (number, *(float(one.replace(",", ".")) for one in others))
    return None


@dataclass(frozen=True, slots=True)
class _Part:
    """The lines of one source that may matter, their numbers in it (from 1) and their times, where asked for.

    `whose`: of each line what its prefix told. `raised`: indices of lines that end a traceback. `reasons`: of those into which
    "NCCL WARN " was put. `tail`: the number of the line after which only the last ones follow. `steps`: numbers of lines
    with a step. `well`: number of the last line that tells of a good end, 0 for none.
    """

    source: Source
    lines: Sequence[str]
    numbers: Sequence[int]
    stamps: Sequence[Stamp | None]
    whose: Sequence[_Whose | None]
    raised: frozenset[int]
    reasons: frozenset[int]
    tail: int
    steps: Sequence[int]
    well: int
    length: int
    stamped: bool
    """True when lines of it bear a time."""

    @property
    def trouble(self) -> Stamp:
        """When its first line was written that tells of a failure, else its last."""
        for line, stamp in zip(self.lines, self.stamps, strict=True):
            if stamp is not None and (_FAILED.search(line) or _RAISED.match(line)):
                return stamp
        return next((stamp for stamp in reversed(self.stamps) if stamp is not None), (99.0,))


_ANSI = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]")


def _attempts(source: Source) -> list[Source]:
    """Return the source cut where a new attempt begins: where something starts after something ended."""
    text, found, begin, line = source.text, list[Source](), 0, 0
    ended, raised = False, False
    starts = ((match.start(), match["typed"] is not None) for match in _START.finditer(text))
    ends = ((match.start(), match["raised"] is None) for match in _ENDED.finditer(text))
    start, end = next(starts, None), next(ends, None)
    while start is not None:
        if end is not None and end[0] < start[0]:
            ended, raised = ended or end[1], True
            end = next(ends, None)
            continue
        if ended or (raised and start[1]):
            cut = text.rfind("\n", 0, start[0]) + 1
            lines = line + text.count("\n", begin, cut)
            found.append(_cut(source, begin, cut, line, lines))
            begin, line, ended, raised = cut, lines, False, False
        start = next(starts, None)
    return [*found, _cut(source, begin, len(text), line, None)] if found else [source]


def _cut(source: Source, begin: int, end: int, first: int, last: int | None) -> Source:
    """Return the source from one place to another; `first`: lines before it, `last`: lines before its end, None at the end."""
    after, left_out = source.gap
    inside = first < after and (last is None or after < last)
    return replace(
        source,
        text=source.text[begin:end],
        gap=(after - first, left_out) if inside else (0, 0),
        first=source.first + first + (left_out if first >= after else 0),
        failed=source.failed and last is None,
        exit_code=source.exit_code if last is None else None,
    )


@dataclass(frozen=True, slots=True)
class _Whose:
    """Whose line it is, as its prefix tells. `local`: the rank on its node."""

    node: str | None = None
    rank: int | None = None
    local: int | None = None


def _unprefixed(text: str, lines: list[str]) -> tuple[list[str], list[_Whose | None]]:
    """Return the lines without what a launcher or a logger put before each of them, and what that told."""
    whose: list[_Whose | None] = [None] * len(lines)
    filled = sum(1 for line in lines if line.strip())
    for held, pattern, own in _PREFIXES:
        if held not in text:
            continue
        matches = [pattern.match(line) for line in lines]
        there = sum(1 for match in matches if match)
        if not there or not (
            own
            or there * 2 > filled
            or any(match and _BEGINS_TRACEBACK.match(line, match.end()) for match, line in zip(matches, lines, strict=True))
        ):
            continue
        lines = [line[match.end() :] if match else line for match, line in zip(matches, lines, strict=True)]
        for index, match in enumerate(matches):
            told = match.groupdict() if match else {}
            if match and told:
                before = whose[index] or _Whose()
                whose[index] = _Whose(
                    told.get("node") or before.node,
                    int(told["rank"]) if told.get("rank") else before.rank,
                    int(told["local"]) if told.get("local") else before.local,
                )
    return lines, whose


_LAST_ERROR = re.compile(r"(?:[A-Za-z][\w.\-]{0,62}: )?(?:\[rank\d+\]: ?)?Last error:\s*$")
_FRONT = re.compile(r"(?P<front>(?:^[A-Za-z0-9][\w.\-]{0,62}: )?(?:\[rank\d+\]: ?)?)Traceback \(most recent call last\)")
_ANY_RAISED = re.compile(r"(?:(?:[A-Za-z_]\w{0,60}\.){1,8}[A-Za-z_]\w{0,80}|[A-Z]\w{0,80})(?=: |:?$)")
"""The name of an exception, whatever it is called, in the line after a traceback."""


class _Tracebacks:
    """Tells which lines end a traceback: each process prints its own, those of several may run into each other."""

    def __init__(self) -> None:
        self.open: dict[str, int] = {}
        self.before = ""

    def ends(self, line: str, number: int) -> bool:
        """True when the line is the exception that a traceback led to, other than one that Python says was ignored."""
        before, self.before = self.before, line
        if "Traceback (most" in line:
            begins = _FRONT.search(line)
            if begins and not _IGNORED.search(before) and not _IGNORED.search(line):
                self.open[begins["front"].rstrip()] = number
            return False
        if not self.open:
            return False
        front = max((one for one in self.open if line.startswith(one)), key=len, default="")
        rest = line[len(front) :].removeprefix(" ") if front else line
        begun = self.open.get(front)
        if begun is None or not rest.strip() or rest.startswith("  ") or (not front and line.startswith("[rank")):
            return False
        if number - begun > TRACEBACK_MOST:
            del self.open[front]
            return False
        if _ANY_RAISED.match(rest) is None:
            return False
        del self.open[front]
        return True


_IGNORED = re.compile(r"exit barrier|Exception ignored in|Error in atexit")
"""What stands above a traceback at a normal end: torch's, and Python's of a clean-up that failed."""


def _part(source: Source, *, timed: bool) -> _Part:
    text = _ANSI.sub("", source.text).replace("\r\n", "\n")
    words = [word for word in WORDS if word in text] + (["loss", "grad_norm"] if _LOST_LOSS.search(text) else [])
    lines, numbers, stamps, kept_whose = list[str](), list[int](), list[Stamp | None](), list[_Whose | None]()
    raised, reasons, steps = set[int](), set[int](), list[int]()
    last: Stamp | None = None
    before, last_error, well = "", False, 0
    whole = text.rstrip().split("\n")
    bare, whose = _unprefixed(text, whole)
    tracebacks = _Tracebacks()
    for number, (raw, line) in enumerate(zip(whole, bare, strict=True), 1):
        if timed:
            last = _stamp(raw) or last
        quoted = 'File "' in before and '", line ' in before and _QUOTED.match(line) is not None
        before = line
        ends = tracebacks.ends(line[:LINE_MOST], number)
        if "loss" in line and _STEP.search(line, 0, LINE_MOST):
            steps.append(source.number(number))
        if line.startswith("step ") and _LAST_STEP.match(line):
            well = source.number(number)
        reason = _FRONT_OF_REASON.match(line) if last_error and line.strip() and "NCCL WARN" not in line else None
        if reason is not None:
            line = f"{reason.group()}NCCL WARN {line[reason.end() :]}"
            reasons.add(len(lines))
        last_error = "Last error:" in line and _LAST_ERROR.match(line) is not None
        if ends or reason is not None or (not quoted and any(word in line for word in words)):
            if ends:
                raised.add(len(lines))
            for piece in line.split("\r"):  # a progress bar overwrites itself: one line, as editors count
                lines.append(piece[:LINE_MOST])
                numbers.append(source.number(number))
                stamps.append(last)
                kept_whose.append(whose[number - 1])
    for index in range(len(lines) - 1, -1, -1):
        if _SUCCEEDED.search(lines[index]):
            well = max(well, numbers[index])
            break
    tail, counted = len(whole), 0
    while tail and counted < LAST_LINES:
        tail -= 1
        counted += bool(bare[tail].strip()) and not bare[tail].lstrip().startswith("wandb:")
    return _Part(
        source, lines, numbers, stamps, kept_whose, frozenset(raised), frozenset(reasons), source.number(tail), steps, well,
        source.number(len(whole)), last is not None,
    )  # fmt: skip


_FRONT_OF_REASON = re.compile(r"(?:[A-Za-z][\w.\-]{0,62}: (?=\[rank))?(?:\[rank\d+\]: ?)?")
"""What stands before NCCL's reason, in the line after "Last error:"."""


def _steps(part: _Part, first: int, last: int) -> int:
    """Return how many lines with a step stand between two lines."""
    return bisect.bisect_left(part.steps, last) - bisect.bisect_right(part.steps, first)


class _Log:
    """The lines of the texts that may matter, and what is read from them once. A place (`at`) is an offset in `text`."""

    def __init__(self, sources: Sequence[Source]) -> None:
        parts = [_part(source, timed=len(sources) > 1) for source in sources]
        self.timed = len(parts) > 1 and all(part.stamped for part in parts)
        """True when places can be ordered by time."""
        self.parts = sorted(parts, key=lambda part: part.trouble) if self.timed else parts
        self.lines = [line for part in self.parts for line in part.lines]
        self.numbers = [number for part in self.parts for number in part.numbers]
        self.stamps = [stamp for part in self.parts for stamp in part.stamps]
        self.of = [part for part in self.parts for _ in part.lines]
        self.whose = [one for part in self.parts for one in part.whose]
        first = 0
        raised, reasons = set[int](), set[int]()
        for part in self.parts:
            raised |= {first + index for index in part.raised}
            reasons |= {first + index for index in part.reasons}
            first += len(part.lines)
        self.raised = frozenset(raised)
        """Indices of lines that end a traceback."""
        self.reasons = frozenset(reasons)
        """Indices of lines with NCCL's reason, which torch printed without "NCCL WARN"."""
        self.text = "\n".join(self.lines)
        self.starts = [0, *(match.end() for match in re.finditer("\n", self.text))]

    @cached_property
    def failed(self) -> bool:
        """True when a process is known to have failed, or a text bears a mark of failure or ends in an exception."""
        return any(part.source.failed for part in self.parts) or bool(self.first_failures) or bool(self.last_exceptions)

    @cached_property
    def first_failures(self) -> dict[int, int]:
        """Id of a part -> the number of its first line with a mark of failure."""
        found: dict[int, int] = {}
        for match in _FAILED.finditer(self.text):
            index = self.index(match.start())
            found.setdefault(id(self.of[index]), self.numbers[index])
        return found

    @cached_property
    def last_exceptions(self) -> frozenset[int]:
        """Indices of lines with an exception among the last ones of a text: that of a process without a launcher."""
        found: set[int] = set()
        first = 0
        for part in self.parts:
            for index in range(first + len(part.lines) - 1, first - 1, -1):
                if self.numbers[index] <= part.tail:
                    break
                if (index in self.raised or _RAISED.match(self.lines[index])) and self.has_traceback(index):
                    found.add(index)
                    break
            first += len(part.lines)
        return frozenset(found)

    def near_failure(self, index: int) -> bool:
        """True when the line is not far from the first mark of failure of its text, or from the end of a process that failed."""
        part, number = self.of[index], self.numbers[index]
        marks = [self.first_failures[id(part)]] if id(part) in self.first_failures else []
        return any(abs(number - mark) <= AROUND_FAILURE for mark in [*marks, *([part.length] if part.source.failed else [])])

    def has_traceback(self, index: int) -> bool:
        """True when a traceback leads to the exception in this line, other than torch's at a normal end (its exit barrier)."""
        part, number = self.of[index], self.numbers[index]
        for above in range(index, -1, -1):
            if self.of[above] is not part or self.numbers[above] < number - TRACEBACK_MOST:
                return False
            if "Traceback (most recent call last)" in self.lines[above]:
                return not any(_IGNORED.search(line) for line in self.lines[max(0, above - 1) : above + 1])
        return False

    def uncaught(self, index: int) -> bool:
        """True when the line is an exception that ended its process: torch's mark of a rank says so, or where it stands."""
        line = self.lines[index]
        if _LAST_WORDS.match(line) or index in self.reasons or ("NCCL WARN" in line and self.near_failure(index)):
            return True
        led_to = index in self.raised or (_RAISED.match(line) is not None and self.has_traceback(index))
        if not led_to or not (index in self.last_exceptions or self.near_failure(index)):
            return False
        mark = self.first_failures.get(id(self.of[index]))
        return index in self.last_exceptions or mark is None or not _steps(self.of[index], self.numbers[index], mark)

    def progressed(self, at: int, until: int) -> bool:
        """True when so many steps stand between two places of one text that they were made between them."""
        one, other = self.index(at), self.index(until)
        same = self.of[one] is self.of[other]
        return same and _steps(self.of[one], self.numbers[one], self.numbers[other]) > BUFFERED_STEPS

    @cached_property
    def succeeded(self) -> bool:
        """True when a run came to its end; of our own ranks only the first tells its steps, of DeepSpeed's each says it."""
        well = list(_SUCCEEDED.finditer(self.text))
        exits = {match["pid"] for match in well if match["pid"]}
        if exits and len(exits) == len(well) and set(_SPAWNED.findall(self.text)) - exits:
            return False
        return any(part.well for part in self.parts)

    def before_success(self, at: int) -> bool:
        """True when the text came to a good end after this place, or only another text tells of one."""
        index = self.index(at)
        return not self.of[index].well or self.numbers[index] <= self.of[index].well

    @cached_property
    def hosts(self) -> frozenset[str]:
        """Names of nodes the log is sure of."""
        return frozenset(name for names in self.hosts_of.values() for name in names)

    @cached_property
    def hosts_of(self) -> dict[int, set[str]]:
        """Id of a part -> the names of nodes it is sure of."""
        found: dict[int, set[str]] = {id(part): set() for part in self.parts}
        for part in self.parts:
            found[id(part)].update(match["host"] for match in nccl_log.debug_lines(part.lines))
        sure = [(block.start(), block["host"]) for block in self.blocks]
        sure += [(match.start(), match.group(1)) for match in _NODE_PREFIX.finditer(self.text)]
        sure += [(match.start(), match.group(1)) for match in _PDSH.finditer(self.text)]
        for at, name in sure:
            if not _NO_HOST.fullmatch(name):
                found[id(self.of[self.index(at)])].add(name)
        return found

    @cached_property
    def node_of_rank(self) -> dict[int, str]:
        """Rank -> its node, from torchrun's and Slurm's words on those that failed."""
        pairs = [(int(match["rank"]), match["node"]) for match in _SRUN_TASK.finditer(self.text)]
        return {**dict(reversed(pairs)), **{int(block["rank"]): block["host"] for block in reversed(self.blocks)}}

    @cached_property
    def blocks(self) -> list[re.Match[str]]:
        """Torchrun's summary, the rank it saw fail first (printed last) in front."""
        blocks = list(_BLOCK.finditer(self.text))
        root = self.text.find("Root Cause (first observed failure)")
        return sorted(blocks, key=lambda block: block.start() < root)

    @cached_property
    def rank_of_pid(self) -> dict[str, int]:
        """Process id -> rank, from NCCL's and torchrun's words."""
        pairs = [(match["pid"], int(match["rank"])) for match in (*_INIT_RANK.finditer(self.text), *self.blocks)]
        seen = Counter(pid for pid, _ in set(pairs))
        return {pid: rank for pid, rank in pairs if seen[pid] == 1}  # two nodes may have the same pid

    @cached_property
    def nccl(self) -> nccl_log.NcclLog | None:
        try:
            return nccl_log.read(self.lines)
        except ParseError:
            return None

    @cached_property
    def xids(self) -> list[tuple[int, Xid]]:
        """(place, Xid) of every line with one."""
        lines = [(start, line) for start, line in zip(self.starts, self.lines, strict=False) if "NVRM: Xid" in line]
        return [
            (start, xid)
            for start, line in lines[:MOST_MATCHES]
            if not self.of_an_earlier_run(start)
            for xid in kernel_log.scan([line]).xids
        ]

    @cached_property
    def begins(self) -> Stamp | None:
        """The first time in the texts that are not the kernel's, None where they tell none."""
        if not self.timed:
            return None
        kernel = {id(part) for part, line in zip(self.of, self.lines, strict=True) if _KERNEL.search(line)}
        stamps = [next(filter(None, part.stamps), None) for part in self.parts if id(part) not in kernel]
        return min((stamp for stamp in stamps if stamp), default=None)

    def of_an_earlier_run(self, at: int) -> bool:
        """True when an event of the kernel is days older than the run."""
        stamp = self.stamps[self.index(at)]
        if stamp is None or self.begins is None:
            return False
        day, first = (sum(_DAYS[: int(one[0]) - 1]) + one[1] + one[2] / 24 for one in (stamp, self.begins))
        return first - day > KERNEL_EARLIER_D

    def is_ours(self, pid: int | None, name: str | None) -> bool:
        """True when a process that the kernel names may be one of a training."""
        return str(pid) in self.pids or not name or name.startswith("<") or _PROGRAM_NAME.match(name) is not None

    @cached_property
    def pids(self) -> frozenset[str]:
        """Numbers of processes that others than the kernel name."""
        told = (line for line in self.lines if ("pid" in line or "rocess" in line) and not _KERNEL.search(line))
        return frozenset(number for line in told for number in re.findall(r"\b\d{2,9}\b", line))

    @cached_property
    def timeouts(self) -> list[_Timeout]:
        """The first timeout of every rank, in the order of the log."""
        groups = {int(match["rank"]): match["group"] for match in _STATUS.finditer(self.text)}
        found: dict[int, _Timeout] = {}
        for match in islice(_WATCHDOG.finditer(self.text), MOST_MATCHES):
            told = dict(re.findall(r"(SeqNum|OpType)=(\w{1,40})", match.group()))
            rank, number = int(match["rank"]), told.get("SeqNum", "")
            if rank not in found and number.isdecimal():
                found[rank] = _Timeout(match.start(), rank, int(number), told.get("OpType", "?"), groups.get(rank, ""))
        return list(found.values())

    def index(self, at: int) -> int:
        """Return the index in `lines` of the line around `at`."""
        return bisect.bisect_right(self.starts, at) - 1

    def number(self, at: int) -> int:
        """Return the line number in the whole text it stands in, from 1."""
        return self.numbers[self.index(at)]

    def line(self, at: int) -> str:
        """Return the line around `at`."""
        return self.lines[self.index(at)]

    def source(self, at: int) -> Source:
        """Return the text the place is of."""
        return self.of[self.index(at)].source

    def order(self, at: int) -> tuple[Stamp, int]:
        """Return what orders places: time where all texts tell it, then where they stand."""
        return (self.stamps[self.index(at)] or ()) if self.timed else (), at

    def rank_at(self, at: int) -> int | None:
        """Return the rank a place is of: its line or its text says so, or its process is known."""
        rank, whose = self.rank(self.line(at)), self.whose[self.index(at)]
        if rank is None and whose is not None:
            of_local = {int(block["rank"]) for block in self.blocks if int(block["local"]) == whose.local}
            rank = whose.rank if whose.rank is not None else of_local.pop() if len(of_local) == 1 else None
        return self.source(at).rank if rank is None else rank

    def rank(self, line: str) -> int | None:
        """Return the rank a line is of: it says so, or its process is known."""
        match = _RANK.search(line)
        if match:
            return int(next(group for group in match.groups() if group is not None))
        debug = nccl_log.DEBUG_LINE.search(line) if "NCCL" in line else None
        return self.rank_of_pid.get(debug["pid"]) if debug else None

    def node(self, line: str) -> str | None:
        """Return the node a line is of."""
        prefix = re.match(r"([A-Za-z0-9][\w.\-]{0,62}): ", line)
        if prefix and prefix.group(1) in self.hosts:
            return prefix.group(1)
        debug = nccl_log.DEBUG_LINE.search(line) if "NCCL" in line else None
        if debug:
            return debug["host"]
        kernel = re.search(r"\d\d:\d\d:\d\d(?:[.,]\d+)?\S{0,6} ([\w.\-]{1,255}) kernel: ", line)
        return kernel.group(1) if kernel else None


def _first(log: _Log, patterns: tuple[re.Pattern[str], ...], *, uncaught: bool = False) -> _Found | None:
    """Return the earliest match of the patterns, less torch's idle remarks; its named groups are the details.

    `uncaught`: an exception that ended its process goes before one that may have been caught, or was a warning only.
    """
    if uncaught:
        found = _earliest(log, patterns, lambda match: log.uncaught(log.index(match.start())))
        if found is not None:
            return found
    found = _earliest(log, patterns, lambda match: True)
    return found if found is None else replace(found, survived=uncaught)


def _earliest(log: _Log, patterns: tuple[re.Pattern[str], ...], accept: Callable[[re.Match[str]], bool]) -> _Found | None:
    best: re.Match[str] | None = None
    for pattern in patterns:
        for match in islice(pattern.finditer(log.text, 0, best.start() if best else len(log.text)), MOST_MATCHES):
            line = log.line(match.start())
            if not NOISE.search(line) and "exit barrier" not in line and accept(match):
                best = match
                break
    if best is None:
        return None
    details = {name: value.strip() for name, value in best.groupdict().items() if value and value.strip()}
    gpu, rank, node = (details.pop(name, None) for name in ("gpu", "rank", "node"))
    return _Found(best.start(), details, int(rank) if rank else None, node, int(gpu) if gpu else None)


def _told(log: _Log, cause: Cause, found: Mapping[str, _Found]) -> LogCause:
    match = found[cause.kind]
    line, index = log.line(match.at), log.index(match.at)
    source, whose = log.source(match.at), log.whose[index] or _Whose()
    node = match.node or log.node(line) or whose.node or source.node
    rank = match.rank if match.rank is not None or not cause.of_a_rank else log.rank_at(match.at)
    blocks = [block for block in log.blocks if log.of[log.index(block.start())] is log.of[index]]
    if match.gpu is not None:
        blocks = [block for block in blocks if int(block["local"]) == match.gpu]
    block = next(iter(blocks), None)
    if block is not None and cause.of_a_rank and rank is None and node in (None, block["host"]):
        rank = int(block["rank"])
    node = node or (log.node_of_rank.get(rank) if rank is not None else None)
    if node is None and len(log.hosts_of[id(log.of[index])]) == 1:
        (node,) = log.hosts_of[id(log.of[index])]
    if index in log.reasons:
        line = line.replace("NCCL WARN ", "", 1)
    where = {"node": node, "rank": rank, "gpu": match.gpu}
    instead = (fix for (name, value), fix in cause.fix_if.items() if match.details.get(name) == value)
    consequences, also = _others(log, cause, found)
    known = {**match.details, **{name: str(value) for name, value in where.items() if value is not None}}
    summary = next((text for template in cause.summary if (text := _filled(template, known)) is not None), cause.kind)
    quoted = {name: shlex.quote(value) for name, value in known.items()}
    return LogCause(
        kind=cause.kind,
        summary=summary,
        evidence=line.strip()[:EVIDENCE_MOST],
        line_number=log.number(match.at),
        node=node,
        rank=rank,
        gpu=match.gpu,
        consequences=consequences,
        also=also,
        fix=tuple(text for template in next(instead, cause.fix) if (text := _filled(template, quoted)) is not None),
        details=dict(match.details),
        source=source.name,
    )


def _filled(template: str, known: Mapping[str, str]) -> str | None:
    """Return the template with its names filled in, None when one of them is not known."""
    names = re.findall(r"\{(\w+)\}", template)
    if any(name not in known for name in names):
        return None
    return re.sub(r"\{(\w+)\}", lambda match: known[match.group(1)], template)


def _others(log: _Log, cause: Cause, found: Mapping[str, _Found]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what else the log shows, in its order: what this explains ("collective-timeout: rank 0, 5"), and the rest."""
    ranks = {"collective-timeout": {one.rank for one in log.timeouts}, "peer-gone": set(_left_alone(log))}
    own = found[cause.kind]
    explained = {kind for kind, one in found.items() if _explains(log, found, cause.kind, kind) and one.survived <= own.survived}
    told = [(match.at, kind) for kind, match in found.items() if log.index(match.at) != log.index(own.at) or kind in ranks]
    told += [(at, f"Xid {xid.xid} on {xid.pci}") for at, xid in log.xids if at != own.at][:MOST_XIDS]
    several = len(log.parts) > 1
    consequences, also = list[str](), list[str]()
    for at, what in sorted(told, key=lambda one: (log.order(one[0]), one[1])):
        if what != cause.kind:
            named = sorted(ranks.get(what, ()))
            place = f"{log.source(at).name}:{log.number(at)}" if several else f"line {log.number(at)}"
            of_gpu = what.startswith("Xid") and cause.kind.startswith(("gpu-", "cuda-"))
            row = f"{what}: rank {', '.join(map(str, named))}" if named else f"{what} ({place})"
            (consequences if what in explained or of_gpu else also).append(row)
    return tuple(consequences), tuple(also)


# --------------------------------------------------------------------------- causes that need more than a pattern


_HANDLE = re.compile(
    r"Unable to determine the device handle for GPU ?(?:(?P<gpu>\d{1,3}): ?)?"
    r"(?P<pci>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})"
)
_LOST = re.compile(r"GPU is lost\.|GPU has fallen off the bus")


def _fallen(log: _Log) -> _Found | None:
    found = _xid(log, FALLEN)
    handle = _HANDLE.search(log.text)
    told = handle or _LOST.search(log.text)
    if found is None and told is None:
        return None
    at, details = (found.at, dict(found.details)) if found else (told.start() if told else 0, {})
    gpu = None
    if handle is not None:
        pci = handle["pci"].lower()[-10:]
        gpu = int(handle["gpu"]) if handle["gpu"] and details.setdefault("pci", f"0000:{pci[-5:]}")[-5:] == pci[-5:] else None
    crashed = _first(log, _BY_KIND["cuda-launch-failure"].patterns)
    return _Found(at, details, log.rank_at(crashed.at) if crashed else None, gpu=gpu)


_XID_NAME = re.compile(r"\bname='?(?P<name>[^,']{1,64})")


def _xid(log: _Log, numbers: frozenset[int], *, ours: bool = False) -> _Found | None:
    """Return the first Xid of these numbers; one that names an earlier Xid counts as that one. `ours`: of no other program."""
    for at, xid in log.xids:
        name = _XID_NAME.search(log.line(at))
        if (xid.caused_by or xid.xid) in numbers and (not ours or log.is_ours(xid.pid, name["name"] if name else None)):
            details = {"xid": str(xid.caused_by or xid.xid), "pci": xid.pci}
            rank = log.rank_of_pid.get(str(xid.pid)) if xid.pid is not None else None
            return _Found(at, details, rank)
    return None


_ECC = (re.compile(r"uncorrectable ECC error encountered"),)
_ILLEGAL = (
    re.compile(
        r"(?:CUDA error: |[Cc]uda failure (?:\d{1,4} )?')(?P<error>an illegal memory access was encountered|misaligned address"
        r"|an illegal instruction was encountered|operation not supported on global/shared address space)"
    ),
)


def _hardware(log: _Log) -> _Found | None:
    return _xid(log, HARDWARE) or _first(log, _ECC)


def _program(log: _Log) -> _Found | None:
    return (_first(log, _ILLEGAL) if log.failed else None) or _xid(log, PROGRAM, ours=True)


def _host_memory(log: _Log) -> _Found | None:
    for match in re.finditer(r"Killed process \d", log.text):
        line = log.line(match.start())
        for pid, name in kernel_log.scan([line]).oom_kills:
            if log.of_an_earlier_run(match.start()) or not log.is_ours(pid, name):
                continue
            size = re.search(r"anon-rss:(\d{1,15})kB", line)
            details = {"pid": str(pid), "process": name, **({"rss": f"{int(size.group(1)) / 2**20:.1f} GiB"} if size else {})}
            return _Found(match.start(), details, log.rank_of_pid.get(str(pid)))
    return _first(log, (_SRUN_MEMORY,)) or _first(log, _HOST_MEMORY)


_SRUN_MEMORY = re.compile(r"srun: error: (?P<node>[\w.\-]{1,255}): tasks? (?P<rank>\d{1,6})[\d,\-]{0,200}: Out Of Memory")
_HOST_MEMORY = (
    re.compile(r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory).{0,80}"),
    re.compile(r"(?:OSError|MemoryError|RuntimeError): \[Errno 12\] Cannot allocate memory"),
    re.compile(r"^(?:\[rank\d+\]: )?(?:numpy\.\S*)?MemoryError\b", re.MULTILINE),
    re.compile(r"DataLoader worker \(pid(?:\(s\))? (?P<pid>\d+)[^)]{0,80}\) (?:is|are) killed by signal: Killed"),
    re.compile(r"[Dd]etected \d+ oom[-_]kill event"),
    re.compile(r"^terminate called after throwing an instance of 'std::bad_alloc'", re.MULTILINE),
    re.compile(r"unable to mmap \d{1,20} bytes from file <.{0,200}?>: Cannot allocate memory \(12\)"),
)

_CONNECT = re.compile(
    r"NCCL WARN .{0,80}?[Cc]onnect (?:to )?(?P<address>[0-9A-Fa-f.:%\w]{3,60}?)<(?P<port>\d{1,5})> (?:failed|returned)"
    r".{0,20}?(?P<error>Connection timed out|No route to host|Connection refused|Network is unreachable|Host is unreachable"
    r"|Software caused connection abort)"
)
_CONNECT_OLD = re.compile(
    r"NCCL WARN Call to connect (?:timeout|failed) ?:? (?P<error>Connection timed out|No route to host|Connection refused)"
)
_GLOO = re.compile(
    r"(?:connectFullMesh failed|timed out connecting|SO_ERROR).{0,200}?"
    r"(?P<error>Connection timed out|No route to host|Connection refused|Connect timeout|timed out connecting(?!: SO_ERROR))"
    r"(?:.{0,80}?remote=\[(?P<address>[0-9a-fA-F.:]{3,45})\]:(?P<port>\d{1,5}))?"
)


_IN_USE = re.compile(r"EADDRINUSE|[Aa]ddress already in use|\(errno: 98\b")
_LISTENING = re.compile(r"failed to (?:bind|listen)|[Ee]rrno:? 98\b|Error: ")
_OF_STORE = re.compile(r"server socket|TCPStore|DistNetworkError|init_process_group|rendezvous")
_PORT = re.compile(r"\bport: (\d{2,5})\b|failed to bind to \S{0,64}:(\d{2,5})\b")


def _port_taken(log: _Log) -> _Found | None:
    """Return the first try to listen at a port that another process has: torch's, else of whatever else ended a process."""
    found = None
    for match in islice(_IN_USE.finditer(log.text), MOST_MATCHES):
        line, index = log.line(match.start()), log.index(match.start())
        if _LISTENING.search(line):
            port = _PORT.search(line)
            told = _Found(match.start(), {"port": port.group(1) or port.group(2)} if port else {})
            if _OF_STORE.search(line) or (log.failed and log.uncaught(index)):
                return told
            found = found or (replace(told, survived=True) if log.failed else None)
    return found


_NO_SPACE = re.compile(
    r"(?:No space left on device|Disk quota exceeded)(?:: '(?P<path>/[^']{1,300})')?"
    r"|^train: (?P<culprit>/[^:\n]{1,300}): [^;\n]{1,300}; expected room (?:on the disk|in the quota)",
    re.MULTILINE,
)
_OF_SHM = re.compile(r"/dev/shm|shared memory|posix_fallocate|torch_shm|/torch_\d")


def _disk_full(log: _Log) -> _Found | None:
    """Return the first write that found no space, other than in /dev/shm: the errno is the same."""
    caught = None
    for match in islice(_NO_SPACE.finditer(log.text), MOST_MATCHES):
        line = log.line(match.start())
        if not _OF_SHM.search(line):
            _, ours = next(_refusals(line), (0, {"culprit": ""}))
            path = match["path"] or match["culprit"] or (ours["culprit"] if ours["culprit"].startswith("/") else None)
            told = _Found(match.start(), {"path": path} if path else {})
            if log.uncaught(log.index(match.start())):
                return told
            caught = caught or replace(told, survived=True)
    return caught


_NAMES = (
    re.compile(r"IPv4 network addresses of \((?P<name>[^,()]{1,255}), ?\d+\) cannot be retrieved \(gai error"),
    re.compile(r"ssh: Could not resolve hostname (?P<name>\S{1,255}):"),
    re.compile(r"socket\.gaierror: \[Errno -\d+\]|Call to getaddrinfo .{0,40}failed"),
)
"""torch's, ssh's and Python's words for a name without an address."""


def _no_name(log: _Log) -> _Found | None:
    """Return the first name of a node that did not resolve: not that of a web server, which the next exceptions tell."""

    def of_a_node(match: re.Match[str]) -> bool:
        index = log.index(match.start())
        followed = log.lines[index : index + CHAIN_MOST] if "gaierror" in match.group() else ()
        return not any(OTHER_SERVICE.search(line) for line in followed)

    found = _earliest(log, _NAMES, lambda match: of_a_node(match) and log.uncaught(log.index(match.start())))
    if found is None and (found := _earliest(log, _NAMES, of_a_node)) is not None:
        return replace(found, survived=True)
    return found


_HUNG_TASK = re.compile(r"INFO: task (?P<process>\S{1,64}):(?P<pid>\d{1,9}) blocked for more than \d{1,6} seconds")
_ON_STORAGE = re.compile(r"\b(?:nfs_|nfs4_|rpc_|__rpc_)")
_SLOW_WRITE = re.compile(
    r"^(?:\[rank\d+\]: ?)?train: (?P<path>/.{1,300}?): (?P<error>.{1,80} has not ended within [\d.]{1,9} s); expected storage",
    re.MULTILINE,
)
STACK_MOST = 60
"""est.: lines of the kernel's stack of a hung task."""


def _storage_hung(log: _Log) -> _Found | None:
    """Return the process that the kernel saw wait for NFS, or the write that our training gave up waiting for."""
    on_storage = [log.index(match.start()) for match in islice(_ON_STORAGE.finditer(log.text), MOST_MATCHES)]
    for match in islice(_HUNG_TASK.finditer(log.text), MOST_MATCHES):
        index = log.index(match.start())
        stack = bisect.bisect_left(on_storage, index)
        if stack < len(on_storage) and on_storage[stack] < index + STACK_MOST:
            return _Found(match.start(), {"process": match["process"], "pid": match["pid"]}, log.rank_of_pid.get(match["pid"]))
    return _first(log, (_SLOW_WRITE,))


_REFUSED = re.compile(r"^(?:\[rank\d+\]: ?)?train: (?P<said>.{1,3900})$", re.MULTILINE)


def _refusals(text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (offset, what it tells) of the one line with which train/main.py ends for what it can name.

    It says "train: CULPRIT: OBSERVED; expected EXPECTED; REMEDY", as train/errors.py has it.
    """
    for match in islice(_REFUSED.finditer(text), MOST_MATCHES):
        said, _, more = match["said"].partition("; expected ")
        culprit, _, observed = said.partition(": ")
        expected, _, remedy = more.partition("; ")
        if culprit and observed and expected and remedy:
            yield match.start(), {"culprit": culprit, "observed": observed, "expected": expected, "remedy": remedy}


_USAGE = re.compile(
    r"^(?P<culprit>\S{1,200}): error: "
    r"(?P<observed>(?:the following arguments are required|unrecognized arguments|argument \S{1,80}): .{1,300})$",
    re.MULTILINE,
)
WRONG_INPUT = 2
"""Exit code of train/main.py for a wrong recipe, wrong data or a checkpoint that does not fit, and argparse's."""


def _wrong_input(log: _Log) -> _Found | None:
    """Return where our training, or argparse, refused what it was given; not what ended with another exit code."""
    for at, told in _refusals(log.text):
        if _exit_code(log, at) in (None, WRONG_INPUT):
            return _Found(at, {name: value.strip()[:EVIDENCE_MOST] for name, value in told.items()})
    return _first(log, (_USAGE,))


def _exit_code(log: _Log, at: int) -> int | None:
    """Return with what the process ended whose text this is, None where neither its agent nor torchrun tells."""
    known = log.source(at).exit_code
    codes = {int(block["code"]) for block in log.blocks}
    return known if known is not None else codes.pop() if len(codes) == 1 else None


def _storage_silent(log: _Log) -> _Found | None:
    """Return the NFS server that stopped answering and did not come back."""
    lines = [line for line in log.lines if "nfs: server" in line][:MOST_MATCHES]
    server = next(iter(kernel_log.scan(lines).nfs_silent), None)
    return None if server is None else _Found(log.text.find(f"nfs: server {server} not responding"), {"server": server})


_NO_INTERFACE = (
    re.compile(r"NCCL WARN (?:(?:Bootstrap|NET/Socket) ?: )?[Nn]o socket interface found.{0,80}"),
    re.compile(r"(?:ifa != nullptr\. |\] )?Unable to find address for: ?(?P<interface>\S{1,64})"),
)
"""NCCL's and gloo's words for an interface the node does not have."""
_GLOO_LOOP = re.compile(r"timed out connecting: SO_ERROR: .{1,60}?, remote=\[(?P<address>127\.[\d.]{5,11}|::1)\]:\d{1,5}")
"""gloo's contact over the loopback: the node's name resolves to it, or GLOO_SOCKET_IFNAME=lo."""
_NCCL_LOOP = re.compile(
    r"NCCL WARN .{0,80}?[Cc]onnect (?:to )?(?P<address>127\.[\d.]{5,11}|::1|172\.17\.0\.1)<\d{1,5}> (?:failed|returned)"
)
"""NCCL's over the loopback, or over the address that Docker gives its bridge on every node."""


def _wrong_interface(log: _Log) -> _Found | None:
    """Return the failed contact over an interface no peer is behind (lo, a container bridge, a VPN), or that there was none."""
    none = _first(log, _NO_INTERFACE)
    if none is not None:
        return none
    unfit_one = _unfit_interface(log)
    if unfit_one is not None:
        return unfit_one
    looped = _first(log, (_GLOO_LOOP,)) or _first(log, (_NCCL_LOOP,))
    if looped is not None:  # within one node it is a peer that died, which that peer's own log tells
        return looped if _raised(log) is None and _killed(log) is None else None
    return None


def _unfit_interface(log: _Log) -> _Found | None:
    """Return NCCL's failed contact over an interface that its own log names."""
    if log.nccl is None:
        return None
    addresses: dict[str, set[str]] = {}
    for match in nccl_log.debug_lines(log.lines):
        for name, address in nccl_log.FOUND.findall(match["text"]) or re.findall(
            r"Bootstrap ?: Using (\S{1,64}?):(\S{1,100}?)<", match["text"]
        ):
            addresses.setdefault(address, set()).add(name)
    used = log.nccl.unfit_interfaces
    for match in (*_CONNECT.finditer(log.text), *_CONNECT_OLD.finditer(log.text)):
        address = match.groupdict().get("address")
        over = addresses.get(address or "", set()) & used.keys()
        first = next(iter(log.nccl.bootstrap), None)
        name = next(iter(sorted(over)), first if address is None and first in used else None)
        if name is not None:
            told = {**log.nccl.bootstrap, **log.nccl.interfaces}.get(name, "")
            return _Found(match.start(), {"interface": name, "address": address or told, "what": unfit(name) or ""})
    return None


def _firewall(log: _Log) -> _Found | None:
    """Return the first contact that timed out: what refuses is a dead peer, what is silent is a firewall or a dead node."""
    matches = [*_CONNECT.finditer(log.text), *_CONNECT_OLD.finditer(log.text), *_GLOO.finditer(log.text)]
    silent = [match for match in matches if match["error"] not in ("Connection refused", "Software caused connection abort")]
    if not silent:
        return None
    first = min(silent, key=lambda match: match.start())
    ports = dict.fromkeys(port for match in silent if (port := match.groupdict().get("port")))
    details = {name: value for name, value in first.groupdict().items() if value}
    return _Found(first.start(), {**details, **({"ports": ", ".join(list(ports)[:8])} if ports else {})})


def _qp(log: _Log, *, link_local: bool, errors: str) -> _Found | None:
    """Return the first queue pair that could not be connected, with this kind of GID and error."""
    for match in re.finditer(r"NCCL WARN .{0,40}?ibv_modify_qp failed", log.text):
        error = nccl_log.qp_error(log.line(match.start()))
        if error is None or not re.search(errors, error.error) or (link_local and not error.link_local):
            continue
        details = {"error": error.error, "gid_index": error.gid_index, "gid": error.local_gid, "hca": error.hca}
        forced = log.nccl.env.get("NCCL_IB_GID_INDEX") if log.nccl else None
        known = {name: str(value) for name, value in details.items() if value is not None}
        return _Found(match.start(), {**known, **({"forced": forced} if forced is not None else {})})
    return None


def _rdma_path(log: _Log) -> _Found | None:
    asked = _qp(log, link_local=False, errors="timed out|Invalid argument|Remote I/O")
    done = _first(log, (re.compile(r"NCCL WARN NET/IB ?: Got completion .{0,80}?(?:error |status[= ])(?P<status>12)\b"),))
    return asked or done


@dataclass(frozen=True, slots=True)
class _Timeout:
    """A collective a rank waited for in vain. `group`: its process group, "" where torch does not tell."""

    at: int
    rank: int
    sequence: int
    operation: str
    group: str


_WATCHDOG = re.compile(
    r"\[Rank (?P<rank>\d{1,6})\] Watchdog caught collective operation timeout: "
    r"WorkNCCL\((?:SeqNum|OpType)=.{0,200}?ran for \d+ milliseconds"
)
_STATUS = re.compile(
    r"\[PG (?:ID )?(?P<group>\d{1,6})\b.{0,80}?Rank (?P<rank>\d{1,6})\]"
    r".{0,120}?last completed (?:NCCL )?work: (?P<completed>-?\d{1,18})"
)


def _false_p2p(log: _Log) -> _Found | None:
    """Return the hang of a false grant: GPUs of one node talk by peer access, and no collective of theirs ever completes."""
    timeouts = log.timeouts
    channels = log.nccl.channels if log.nccl else {}
    transport = next((name for name in channels if name.startswith("P2P")), None)
    if not timeouts or transport is None or any(name.startswith("NET/") for name in channels):
        return None
    completed = [int(match["completed"]) for match in _STATUS.finditer(log.text)]
    if (
        any(one.sequence > 1 for one in timeouts)
        or len({one.operation for one in timeouts}) > 1
        or any(work > 0 for work in completed)
    ):
        return None
    return _Found(timeouts[0].at, {"transport": transport, "sequence": str(timeouts[0].sequence)})


def _out_of_step(log: _Log) -> _Found | None:
    """Return the ranks that waited in different collectives of one group."""
    told = _first(log, (re.compile(r"Detected mismatch between collectives on ranks"),))
    by_group: dict[str, list[_Timeout]] = {}
    for one in log.timeouts:
        by_group.setdefault(one.group, []).append(one)
    for group in by_group.values():
        where = Counter((one.sequence, one.operation) for one in group)
        if len(where) < 2:
            continue
        (usual, _), *others = where.most_common()
        odd = [one for one in group if (one.sequence, one.operation) != usual]
        sure = len(others) == 1 and where[usual] > 1
        details = {
            "odd_ranks": ", ".join(str(one.rank) for one in odd[:8]),
            "sequence": str(odd[0].sequence),
            "odd_operation": odd[0].operation,
            "operation": usual[1],
        }
        return _Found(odd[0].at, details, odd[0].rank if sure and len(odd) == 1 else None)
    return told


_LOSS = re.compile(
    r"(?<![\w.])(?<!best )(?<!min )(?<!lowest )"
    r"(?:train[_ ])?loss['\"]?\s{0,3}[:=]\s{0,3}['\"]?(?P<loss>[+-]?(?:nan|inf|\d[\d.]{0,20}(?:e[+-]?\d+)?))(?![\w])",
    re.IGNORECASE,
)
_SCALE = re.compile(
    r"Current loss scale already at minimum|Minimum loss scale reached \([\d.e-]+\)"
    r"|[Ll]oss is (?:nan|NaN|inf), (?:stopping|aborting)"
)


_GRADIENT = re.compile(r"grad_norm['\"]?\s{0,3}[:=]\s{0,3}['\"]?(?P<norm>[+-]?(?:nan|inf|\d))", re.IGNORECASE)


_NOT_FINITE = re.compile(
    r"^(?:\[rank\d+\]: ?)?train: step \d{1,12}: (?P<observed>.{1,600}?); expected a finite loss", re.MULTILINE
)
"""train/loop.py's words."""


def _nan_loss(log: _Log) -> _Found | None:
    """Return where the loss left the numbers for good, or a trainer gave up for it: single steps that are skipped are normal."""
    refused = _NOT_FINITE.search(log.text)
    if refused is not None:
        return _Found(refused.start(), {"observed": refused["observed"]})
    said = _SCALE.search(log.text)
    first = None
    for match in _LOSS.finditer(log.text):
        lost = match["loss"].lower().lstrip("+-") in ("nan", "inf")
        first = (first or match) if lost else None
    gradient, steps = None, 0
    for match in _GRADIENT.finditer(log.text):
        steps = steps + 1 if match["norm"].lower().lstrip("+-") in ("nan", "inf") else 0
        gradient = (gradient or match) if steps else None
    if steps < LEAST_LOST_STEPS:
        gradient = None
    places = [match.start() for match in (said, first, gradient) if match is not None]
    if not places:
        return None
    precision = "fp16" if re.search(r"loss scale|OVERFLOW!", log.text) else None
    of_gradients = {"gradients": "gradients"} if said is None and first is None else {}
    return _Found(min(places), {**of_gradients, **({"precision": precision} if precision else {})})


_RAISED = re.compile(
    r"^(?P<prefix>(?:[A-Za-z][\w.\-]{0,62}: )?(?:\[rank\d+\]: ?)?)"
    r"(?P<error>(?:[A-Za-z_]\w{0,60}\.){0,8}[A-Z]\w{0,60}(?:Error|Exception|Exhausted))(?P<said>: .{0,4000}|)$",
    re.MULTILINE,
)
_ANY_NAME = re.compile(
    r"(?P<prefix>(?:[A-Za-z0-9][\w.\-]{0,62}: (?=\[rank|[\w.]{1,200}(?:: |$)))?(?:\[rank\d+\]: ?)?)"
    r"(?P<error>[A-Za-z_][\w.]{0,300})(?P<said>:.{0,4000}|)$"
)
"""An exception of whatever name, in a line that ends a traceback."""
_NOT_ITS_OWN = ("ChildFailedError", "DistBackendError", "SignalException", "KeyboardInterrupt", "SystemExit", "GeneratorExit")
_OF_LAUNCHER = re.compile(
    r"CalledProcessError: Command .{0,400}?(?:python|torchrun|deepspeed|accelerate|\bssh |hostname|\bbash\b|\bsh\b)"
)
"""What a launcher says whose program failed."""


def _raised(log: _Log) -> _Found | None:
    """Return the first exception that nobody caught and that does not only say that a peer went, or our training's last word."""
    for at, told in _refusals(log.text):
        if _exit_code(log, at) not in (None, WRONG_INPUT) and not _NOT_FINITE.match(log.line(at)):
            return _Found(at, {"error": f"{told['culprit']}: {told['observed']}"[:300], "remedy": told["remedy"][:300]})
    named = {log.index(match.start()) for match in islice(_RAISED.finditer(log.text), MOST_MATCHES)}
    perhaps = None
    for index in sorted(named | log.raised):
        line = log.lines[index]
        match = _RAISED.match(line) or _ANY_NAME.match(line)
        if match is None or _not_why(line, match["error"].rpartition(".")[2]):
            continue
        if index in log.raised or log.has_traceback(index):
            found = _Found(log.starts[index], {"error": f"{match['error'].rpartition('.')[2]}{match['said']}"[:200]})
            if log.uncaught(index):
                return found
            if perhaps is None and log.near_failure(index):
                perhaps = replace(found, survived=True)
    return perhaps


def _not_why(line: str, name: str) -> bool:
    """True when an exception only says that another process failed, or that somebody ended it."""
    return name in _NOT_ITS_OWN or _OF_LAUNCHER.search(line) is not None or blames_peer(line) or NOISE.search(line) is not None


_GLIBC = re.compile(
    r"^(?:(?:free|malloc|realloc|munmap_chunk)\(\): .{1,80}|double free or corruption.{0,40}|corrupted .{1,60}"
    r"|\*\*\* stack smashing detected \*\*\*|terminate called after throwing an instance of '[^']{1,200}')",
    re.MULTILINE,
)
"""Why a program aborted, in the words of the C and C++ libraries."""


def _first_block(log: _Log) -> _Found | None:
    """Return the rank that torchrun saw fail first, unless it is, or may be, one that says itself that its peer went."""
    block, gone = next(iter(log.blocks), None), _peer_gone(log)
    if block is None or int(block["rank"]) in set(_left_alone(log)) or (gone is not None and gone.rank is None):
        return None
    code = int(block["code"])
    said = _GLIBC.search(log.text) if code == -6 else None
    error = said.group() if said else f"exit code {code}" + (f" ({SIGNALS[-code]})" if -code in SIGNALS else "")
    return _Found(said.start() if said else block.start(), {"error": error[:200]}, int(block["rank"]), block["host"])


_KILLED = re.compile(
    r"failed \(exitcode: -(?P<a>\d{1,2})\) local_rank: (?P<local>\d+)|exits with return code = -(?P<b>\d{1,2})\b"
    r"|Signal (?P<c>\d{1,2}) \(SIG\w+\) received by PID|died with <Signals\.SIG\w+: (?P<d>\d{1,2})>"
    r"|mpirun noticed that process rank (?P<rank>\d{1,6}) with PID \d{1,9} on node (?P<node>\S{1,255}) exited on signal"
    r" (?P<e>\d{1,2})"
    r"|^\S{1,64} exited with code (?P<f>1[3-5]\d)\b"
    r"|^(?:zsh: )?(?P<said>[Kk]illed)(?:$| {2,})|" + _SHELL_KILLED,
    re.MULTILINE,
)
_SAID = {"killed": 9, "segmentation fault": 11, "bus error": 7, "floating point exception": 8, "aborted": 6, "terminated": 15}
"""What shells and srun call the end by a signal."""
_SHELL_BASE = 128
"""A shell's, and Docker's, exit code of a process that a signal ended is this and the signal."""


def _killed(log: _Log) -> _Found | None:
    """Return the first rank a signal ended, other than what follows from a failure: ABRT (a watchdog), TERM (the launcher)."""
    found = None
    for match in (*_KILLED.finditer(log.text), *_SRUN_TASK.finditer(log.text)):
        number, told = _signal(match), match.groupdict()
        if number is None or number in (6, 15) or (found is not None and match.start() > found.at):
            continue
        block = next((one for one in log.blocks if int(one["code"]) == -number), None)
        rank, node = (int(block["rank"]), block["host"]) if block is not None else (log.rank_at(match.start()), None)
        rank, node = int(told["rank"]) if told.get("rank") else rank, told.get("node") or node
        found = _Found(match.start(), {"signal": SIGNALS.get(number, f"signal {number}")}, rank, node)
    return found


def _signal(match: re.Match[str]) -> int | None:
    """Return the signal that a launcher, a shell or srun tells, None for another end."""
    told = {name: value for name, value in match.groupdict().items() if value and name not in ("local", "rank", "node")}
    name, value = next(iter(told.items()), ("", ""))
    if name == "f":
        return int(value) - _SHELL_BASE if int(value) - _SHELL_BASE in SIGNALS else None
    return int(value) if value.isdecimal() else _SAID.get(value.lower().removesuffix(" (core dumped)").strip())


def _timed_out(log: _Log) -> _Found | None:
    timeouts = log.timeouts
    if not timeouts:
        return _first(log, (_DUMPED, _NO_ID))
    ranks = [one.rank for one in timeouts]
    world = log.nccl.nranks if log.nccl else None
    silent = sorted(set(range(world)) - set(ranks)) if world and world <= MOST_MATCHES and len(ranks) > 1 else []
    first = timeouts[0]
    details = {"operation": first.operation, "sequence": str(first.sequence), "ranks": ", ".join(map(str, sorted(ranks)[:16]))}
    transports = log.nccl.transports if log.nccl else {}
    if len(timeouts) > 1 and all(one.sequence == 1 for one in timeouts):
        details["never"] = "without P2P" if transports and "P2P" not in transports else "perhaps P2P"
    return _Found(first.at, {**details, **({"silent": ", ".join(map(str, silent[:8]))} if silent else {})})


_DUMPED = re.compile(
    r"[Rr]eceived a dump signal due to a collective timeout from {1,2}(?:rank (?P<ranks>\d{1,6})|this local rank)"
    r"|Heartbeat monitor timed out"
)
"""What torch says of a timeout whose own line is of another process, or never came: its watchdog itself hung."""
_NO_ID = re.compile(
    r"\[(?P<ranks>\d{1,6})\] is setting up NCCL communicator and retrieving ncclUniqueId from \[(?P<silent>\d{1,6})\]"
    r".{0,200}?wait timeout after"
)
"""A rank that waited for the first one, which never came to this collective."""


_PEER = re.compile(
    r"(?:ncclRemoteError|remote process exited or there was a network error|Connection (?:closed|reset) by (?:remote )?peer"
    r"|NCCL communicator was aborted|SO_ERROR: Connection refused"
    r"|Broken pipe|failed to recv, got 0 bytes|Timed out waiting \d+ms for (?:recv|send))"
)


def _complaints(log: _Log) -> Iterator[int]:
    """Yield the places where somebody says that its peer went."""
    for match in islice(_PEER.finditer(log.text), MOST_MATCHES):
        if not OTHER_SERVICE.search(log.line(match.start())):
            yield match.start()


def _left_alone(log: _Log) -> Iterator[int]:
    """Yield the ranks that say their peer went."""
    return (rank for at in _complaints(log) if (rank := log.rank_at(at)) is not None)


def _peer_gone(log: _Log) -> _Found | None:
    at = next(_complaints(log), None)
    return None if at is None else _Found(at, rank=log.rank_at(at))


_HARMLESS = re.compile(
    r"Failed to open libibverbs|nvmlDeviceSetCpuAffinity|NET/Plugin|libnccl-net|CollNetPlugin|numa_balancing|NUMA auto balancing"
    r"|iommu=pt"
)
"""What NCCL warns of at the start of runs that work."""
_REASON_OF_NCCL = re.compile(r"NCCL WARN (?P<error>.{0,3900})")


def _nccl_error(log: _Log) -> _Found | None:
    """Return NCCL's first warning that is no consequence, else torch's words about NCCL."""
    for match in islice(_REASON_OF_NCCL.finditer(log.text), MOST_MATCHES):
        error = match["error"].strip()
        near = log.near_failure(log.index(match.start())) or not log.first_failures
        if error and near and not blames_peer(error) and not _HARMLESS.search(error):
            return _Found(match.start(), {"error": error[:200]})
    return _first(
        log,
        (
            re.compile(
                r"NCCL error in: .{1,200}?, (?P<error>unhandled (?:system|cuda) error|internal error|invalid (?:usage|argument))"
            ),
        ),
    )


# --------------------------------------------------------------------------- the registry


@dataclass(frozen=True, slots=True)
class Cause:
    """One known cause.

    `find`: patterns, whose named groups become details, or a function of the log. `summary`: templates, the first whose names
    are all known is used, so the last has none. `fix`: templates; one whose names are not known is left out. `explains`: kinds
    that only follow from it; `explains_after`: when they come later in the log, too. `needs_failure`: means nothing in a log
    without a mark of failure: it may have been survived. `survivable`: its words are an exception's, or a warning's: where it did
    not end a process it steps behind what did. `of_a_rank`: torchrun's first failed rank is the one it happened to.
    `fix_if`: (detail, value) -> the fix where that detail has that value. `source`: where it was seen.
    """

    kind: str
    find: tuple[re.Pattern[str], ...] | Callable[[_Log], _Found | None]
    summary: tuple[str, ...]
    fix: tuple[str, ...]
    source: str
    explains: frozenset[str] = LATER
    needs_failure: bool = False
    of_a_rank: bool = True
    explains_after: frozenset[str] = frozenset()
    survivable: bool = False
    fix_if: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)

    @property
    def patterns(self) -> tuple[re.Pattern[str], ...]:
        """The patterns, none when a function looks."""
        return () if callable(self.find) else self.find


def _words(*patterns: str) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern, re.MULTILINE) for pattern in patterns)


_SIZE = r"[\d.]{1,12} (?:bytes|[KMGT]iB)"
_PREFLIGHT = "r4090c preflight --nodes {node}"
_GPU_MEMORY = _words(
    rf"CUDA out of memory\. Tried to allocate (?P<tried>{_SIZE})\. GPU (?P<gpu>\d+) has a total capaci?ty of"
    rf" (?P<total>{_SIZE}) of which (?P<free>{_SIZE}) is free"
    rf"(?:.*?Of the allocated memory (?P<allocated>{_SIZE}) is allocated by PyTorch,"
    rf" and (?P<reserved>{_SIZE}) is reserved)?",
    rf"CUDA out of memory\. Tried to allocate (?P<tried>{_SIZE}) \(GPU (?P<gpu>\d+); (?P<total>{_SIZE}) total capacity;"
    rf" (?P<allocated>{_SIZE}) already allocated; (?P<free>{_SIZE}) free",
    r"(?:OutOfMemoryError|RuntimeError|AcceleratorError): CUDA (?:out of memory|(?:driver )?error: out of memory)",
    r"CUBLAS_STATUS_ALLOC_FAILED|[Cc]uda failure (?:2 )?'out of memory'|Failed to CUDA (?:malloc|calloc) (?:async )?\d+ bytes",
    r"^Error out of memory at line \d+ in file \S{1,200}",
    r"^(?:\[rank\d+\]: ?)?train: .{1,300}?: auto: not even one sequence of \d{1,9} fits",
)
_HOLDER = re.compile(rf"Process (?P<holder>\d{{1,9}}) has (?P<held>{_SIZE}) memory in use")
_OWN = re.compile(rf"this process has (?P<own>{_SIZE}) memory in use")


def _gpu_memory(log: _Log) -> _Found | None:
    """Return where a GPU ran out of memory, with the other process that holds more of it than this one, if there is one."""
    found = _first(log, _GPU_MEMORY)
    if found is None:
        return None
    line = log.line(found.at)
    own = _OWN.search(line)  # torch that cannot tell its own pid, in a container, names itself as another
    held = [(_gib(match["held"]), match) for match in _HOLDER.finditer(line)]
    if own is None or not held:
        return found
    most, holder = max(held, key=lambda one: one[0])
    return replace(found, details={**found.details, **holder.groupdict()}) if most > _gib(own["own"]) else found


def _gib(size: str) -> float:
    number, unit = size.split()
    return float(number) * {"KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0, "TiB": 2.0**10}.get(unit, 2**-30)


_GSP = (
    "another driver, or NVreg_EnableGpuFirmware=0 with the proprietary one: its GSP firmware does not answer, mostly a bug",
    "reboot the node: the card does not answer before that",
    "when it is always the same card, under any driver: replace the card",
    _PREFLIGHT,
)
"""open-gpu-kernel-modules 446: release notes of driver 525.105 name such a bug."""

CAUSES: tuple[Cause, ...] = (
    Cause(
        "gpu-fallen-off-bus",
        _fallen,
        (
            "the GPU at {pci} (GPU {gpu}) fell off the PCIe bus",
            "the GPU at {pci} fell off the PCIe bus",
            "a GPU fell off the PCIe bus",
        ),
        (
            "reseat the card, its riser and its power cables; another riser or slot tells which of them it is",
            "reboot the node: the driver cannot bring the card back",
            "lower the power limit (nvidia-smi -pl 350): a power supply at its edge shows like this",
            _PREFLIGHT,
        ),
        "Xid 79, NVIDIA Xid catalogue",
        LATER | {"gpu-hardware-fault", "cuda-launch-failure", "cuda-illegal-access", "cuda-assert", "gpu-not-found"},
    ),
    Cause(
        "gpu-hardware-fault",
        _hardware,
        ("the GPU at {pci} had a hardware fault (Xid {xid})", "a GPU had an uncorrectable memory error"),
        (
            "reboot the node, or reset the card: nvidia-smi --gpu-reset -i INDEX with no program on it",
            "when it comes back on the same card: replace the card",
            _PREFLIGHT,
        ),
        "NVIDIA Xid catalogue",
        LATER | {"cuda-launch-failure", "cuda-illegal-access"},
        fix_if={("xid", number): _GSP for number in ("119", "120")},
    ),
    Cause(
        "host-out-of-memory",
        _host_memory,
        (
            "the kernel of {node} killed {process} (pid {pid}, {rss}): the host's memory was used up, not the GPU's",
            "the kernel killed {process} (pid {pid}): the host's memory was used up, not the GPU's",
            "the host's memory was used up, not the GPU's",
        ),
        (
            "offload less to host RAM (an offloaded optimizer takes about 18 bytes a parameter, divided among the nodes)",
            "add host RAM or swap",
            "fewer workers of the data loader, a smaller prefetch",
            "r4090c plan RECIPE tells the host memory before a run",
        ),
        "kernel OOM killer; DeepSpeed offload",
    ),
    Cause(
        "cuda-out-of-memory",
        _gpu_memory,
        (
            "GPU {gpu} ran out of memory: process {holder} holds {held} of its {total}, {tried} were asked for",
            "rank {rank} ran out of GPU memory on GPU {gpu}: it asked for {tried}, {free} of {total} were free",
            "GPU {gpu} ran out of memory: {tried} were asked for, {free} of {total} were free",
            "a GPU ran out of memory",
        ),
        (
            "nvidia-smi on the node: process {holder} is on that GPU as well; end it by its pid if an earlier run left it",
            "a smaller micro batch, with gradient accumulation",
            "gradient checkpointing; a chunked cross-entropy where the logits are the peak",
            "a higher ZeRO stage or offload; r4090c plan RECIPE tells what fits in 24 GB",
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True when much is reserved and not allocated",
        ),
        "torch.OutOfMemoryError, both wordings",
        needs_failure=True,
    ),
    Cause(
        "dev-shm-too-small",
        _words(
            r"NCCL WARN .{0,40}failed to extend (?P<path>/dev/shm)/\S+ to (?P<needed>\d+) bytes",
            r"NCCL WARN .{0,60}shared memory segment (?P<path>/dev/shm)/\S+ \(size (?P<needed>\d+)\)",
            r"posix_fallocate failed ?: No space left on device",
            r"unable to (?:open|write to|allocate) (?:shared memory|file </torch_).{0,120}No space left on device",
            r"workers are out of shared memory|killed by signal: Bus error",
            r"No space left on device(?: \(28\))?:? '?(?P<path>/dev/shm)/",
        ),
        ("/dev/shm is too small: {needed} bytes more were asked for", "/dev/shm is too small"),
        (
            "in a container: --shm-size=16g, or --ipc=host",
            "on the node: mount -o remount,size=16G /dev/shm",
            "rm -f /dev/shm/nccl-* left by dead processes, when no run is on",
            _PREFLIGHT,
        ),
        "NCCL issues 290, 342, 525, 1518",
    ),
    Cause(
        "disk-full",
        _disk_full,
        ("no space was left for {path}", "a disk was full, or a quota used up"),
        ("free space on that disk (df -h, df -i), or write the checkpoint elsewhere", "keep fewer checkpoints", _PREFLIGHT),
        "errno 28 and 122; torch writes it as `unexpected pos`",
        needs_failure=True,
    ),
    Cause(
        "checkpoint-not-written",
        _words(r"enforce fail at inline_container\.cc.{0,40}unexpected pos", r"PytorchStreamWriter failed writing file"),
        ("a file of a checkpoint could not be written whole",),
        ("look whether the disk is full or its quota used up (df -h, quota)", "look at the storage: r4090c preflight"),
        "torch's serialization",
        COMMUNICATION | {"rank-failed", "rank-killed"},
        needs_failure=True,
    ),
    Cause(
        "storage-silent",
        _storage_silent,
        ("the NFS server {server} stopped answering",),
        ("look at the server and the way to it", "r4090c preflight"),
        "kernel NFS client",
        LATER | {"storage-failed"},
    ),
    Cause(
        "storage-failed",
        _words(
            r"\[Errno (?:116|5|30|107)\] (?P<error>Stale file handle|Input/output error|Read-only file system"
            r"|Transport endpoint is not connected)(?:: '(?P<path>/[^']{1,300})')?",
            r"^train: (?P<path>/.{1,300}?): (?P<error>Stale file handle|Input/output error|Read-only file system)\b",
        ),
        ("{error} on {path}", "the storage failed: {error}"),
        ("mount it anew (umount -l, mount), after the server exports it again", "r4090c preflight"),
        "errno 5, 30, 107, 116",
        needs_failure=True,
        survivable=True,
    ),
    Cause(
        "no-permission",
        _words(
            r"PermissionError: \[Errno 13\] Permission denied: '(?P<path>/[^']{1,300})'",
            r"^train: (?P<path>/.{1,300}?): (?:Permission denied|Operation not permitted).{0,80}; expected permission",
        ),
        ("this account may not write or read {path}", "this account lacks a permission"),
        ("chown or chmod it for the training user; over NFS root is mapped to nobody (root_squash)", _PREFLIGHT),
        "errno 13",
        needs_failure=True,
        survivable=True,
    ),
    Cause(
        "port-taken",
        _port_taken,
        (
            "port {port}, where the ranks meet, was taken by another process",
            "the port where the ranks meet was taken by another process",
        ),
        (
            "an old process of an earlier job may hold it: ss -ltnp | grep {port}; kill it by its pid",
            "another port: --master_port (torchrun: --master-port)",
        ),
        "errno 98; as launch.diagnose names it",
        of_a_rank=False,
    ),
    Cause(
        "name-not-resolved",
        _no_name,
        ("the name {name} does not resolve", "a node's name does not resolve"),
        ("put every node's name into /etc/hosts of every node, with its address on the data network", "r4090c preflight"),
        "pytorch issues 150532, 73656",
        LATER | {"peers-did-not-join", "master-unreachable"},
        of_a_rank=False,
        needs_failure=True,
    ),
    Cause(
        "wrong-network-interface",
        _wrong_interface,
        (
            "NCCL talked over {interface} ({what}, {address}): no other node is behind it",
            "the node has no interface {interface} with an address",
            "the ranks talked over {address}: no other node is behind it",
            "NCCL found no interface by that name on {node}",
            "NCCL found no network interface it may use",
        ),
        (
            "NCCL_SOCKET_IFNAME==IFACE with the node's own interface on the data network, exact with =;"
            " without GPUs GLOO_SOCKET_IFNAME=IFACE, one name only",
            "r4090c preflight",
        ),
        "horovod 584, 700; NCCL 286, 1581, 1637",
        LATER | {"firewall-blocks-ports", "peers-did-not-join"},
    ),
    Cause(
        "firewall-blocks-ports",
        _firewall,
        (
            "{node} could not reach {address} at the random ports {ports}: {error}",
            "a node could not reach {address} at port {port}: {error}",
            "a node could not reach another one: {error}",
        ),
        (
            "open all TCP ports between the nodes in their firewalls, NCCL takes random ones: ufw allow from SUBNET",
            "r4090c preflight tries ports between all nodes",
        ),
        "nccl-tests 15, ColossalAI 4343",
        LATER | {"peers-did-not-join"},
        of_a_rank=False,
    ),
    Cause(
        "roce-wrong-gid",
        lambda log: _qp(log, link_local=True, errors=""),
        (
            "NCCL_IB_GID_INDEX={forced} forces GID {gid} of {hca}, a link-local address that reaches no other node",
            "GID index {gid_index} of {hca} is {gid}, a link-local address that reaches no other node",
            "a link-local GID was used, which reaches no other node",
        ),
        (
            "unset NCCL_IB_GID_INDEX: NCCL >= 2.21 finds the right GID by itself",
            "with an older NCCL set it to the RoCE v2 entry with the IPv4 address (show_gids), on each node its own",
            "give the RoCE interface an IPv4 address where there is no such entry",
        ),
        "NCCL 426, 769",
    ),
    Cause(
        "rdma-no-route",
        lambda log: _qp(log, link_local=False, errors="Network is unreachable|No route to host"),
        ("no route from the RoCE interface of {hca} to its peer", "no route from a RoCE interface to its peer"),
        ("give the RoCE interface an address in the peers' subnet, or a route: ip route get PEER", "r4090c preflight"),
        "nccl-tests 185",
    ),
    Cause(
        "hca-missing",
        lambda log: (
            _qp(log, link_local=False, errors="No such device") or _first(log, _words(r"NCCL WARN .{0,40}NCCL_IB_HCA.{0,80}"))
        ),
        ("the RDMA device {hca} is not there", "an RDMA device NCCL was told to use is not there"),
        ("NCCL_IB_HCA must name devices of that node that are ACTIVE, exact with =: ibv_devinfo", "r4090c preflight"),
        "NCCL 925",
    ),
    Cause(
        "rdma-path-broken",
        _rdma_path,
        (
            "RDMA packets do not arrive (completion status {status}, retries used up)",
            "the RDMA connection of {hca} timed out: {error}",
            "RDMA packets do not arrive",
        ),
        (
            "ib_write_bw with the same GID index between the two nodes: it must work before NCCL can",
            "check GID (NCCL_IB_GID_INDEX), MTU, VLAN and PFC on both ends and the switch",
        ),
        "NCCL 426, perftest status 12",
        frozenset({"nccl-error", "collective-timeout", "peer-gone"}),
        needs_failure=True,
    ),
    Cause(
        "memlock-too-low",
        _words(r"NCCL WARN .{0,40}ibv_(?:reg_mr|create_cq|create_qp)\w* failed with error.{0,20}Cannot allocate memory"),
        ("memory could not be locked for RDMA: the limit memlock is too low",),
        ("ulimit -l unlimited for the training user (/etc/security/limits.d), also for non-interactive logins", _PREFLIGHT),
        "NCCL documentation, RDMA",
    ),
    Cause(
        "too-many-open-files",
        _words(r"Too many open files|received 0 items of ancdata"),
        ("the limit of open files was reached",),
        ("ulimit -n 1048576 for the training user (/etc/security/limits.d)", _PREFLIGHT),
        "errno 24; torch's data loader",
        needs_failure=True,
        survivable=True,
    ),
    Cause(
        "master-unreachable",
        _words(
            r"client socket has (?:timed out after \d+ ?m?s(?:econds)? while trying to connect to |failed to connect to any"
            r" network address of )\((?P<address>[^,()]{1,255}), ?(?P<port>\d+)\)"
        ),
        ("{address}:{port}, where the ranks meet, did not answer", "the node where the ranks meet did not answer"),
        (
            "is the job started on {address}, and is that its address on the data network?",
            "nc -vz {address} {port} from every node; open it in the firewall",
            "r4090c preflight",
        ),
        "ColossalAI 4343",
        of_a_rank=False,
    ),
    Cause(
        "peers-did-not-join",
        _words(
            r"Timed out after \d+ seconds waiting for (?:clients|workers)\. (?P<joined>\d+/\d+) (?:clients|workers) joined",
            r"RendezvousTimeoutError|RendezvousConnectionError",
        ),
        ("only {joined} took part in the rendezvous in time", "not all nodes took part in the rendezvous in time"),
        (
            "start it on the missing nodes as well, with the same master address and port",
            "r4090c preflight tries names and ports",
        ),
        "torch DistStoreError",
        of_a_rank=False,
    ),
    Cause(
        "ssh-refused",
        _words(
            r"Command '.{0,20}ssh .{0,200}hostname.{0,20}' returned non-zero exit status 255",
            r"(?<![\w.@\-])(?P<host>[\w.@\-]{1,255}): Permission denied \((?:publickey|gssapi)",
            r"^(?:\S{1,64}: )?Host key verification failed",
            r"ssh: connect to host (?P<host>\S{1,255}) port \d+: .{1,60}",
        ),
        ("ssh to {host} was refused", "ssh between the nodes was refused"),
        (
            "every node must reach every node by ssh without a password, the first one itself as well",
            "r4090c provision",
            "r4090c preflight",
        ),
        "DeepSpeed 4907, 579",
        of_a_rank=False,
        needs_failure=True,
    ),
    Cause(
        "rtx40-refused",
        _words(r"NotImplementedError: Using RTX 4000 series doesn't support faster communication broadband via P2P or IB"),
        ("accelerate refused to start: the driver is older than 550.40.07 and neither P2P nor IB is stated",),
        (
            "a driver >= 550.40.07",
            "or state both variables: NCCL_P2P_DISABLE=1 NCCL_IB_DISABLE=0 (0 keeps RoCE; only their presence is looked at)",
        ),
        "accelerate pull request 2195",
    ),
    Cause(
        "p2p-mapping-failed",
        _words(
            r"mapping of buffer object failed|cudaErrorMapBufferObjectFailed",
            r"(?P<error>peer access is not supported between these two devices)",
        ),
        ("NCCL was told to use peer access: {error}", "peer access could not map the other GPU's memory: its BAR1 is too small"),
        ("NCCL_P2P_DISABLE=1", "or in the BIOS: Above 4G Decoding and Resizable BAR, then nvidia-smi -q shows BAR1 >= 32 GiB"),
        "tinygrad/open-gpu-kernel-modules 42, 44",
    ),
    Cause(
        "duplicate-gpu",
        _words(r"Duplicate GPU detected ?: rank (?P<one>\d+) and rank (?P<other>\d+) both on CUDA device (?P<pci>\w+)"),
        ("ranks {one} and {other} were given the same GPU", "two ranks were given the same GPU"),
        ("set the device from LOCAL_RANK (torch.cuda.set_device), and check CUDA_VISIBLE_DEVICES",),
        "NCCL invalid usage",
    ),
    Cause(
        "gpu-not-found",
        _words(r"CUDA error: invalid device ordinal|No CUDA GPUs are available|no CUDA-capable device is detected"),
        ("a rank found no GPU of its own",),
        ("are there as many GPUs as ranks on the node? nvidia-smi -L; CUDA_VISIBLE_DEVICES", _PREFLIGHT),
        "CUDA runtime",
        needs_failure=True,
        survivable=True,
    ),
    Cause(
        "driver-mismatch",
        _words(r"Driver/library version mismatch|Error 803: system has unsupported display driver"),
        ("the loaded NVIDIA kernel module and the installed library differ",),
        ("reboot the node, or reload the module: rmmod nvidia_uvm nvidia && modprobe nvidia", _PREFLIGHT),
        "NVML",
        LATER | {"gpu-not-found"},
    ),
    Cause(
        "driver-too-old",
        _words(
            r"CUDA driver version is insufficient for CUDA runtime version|The NVIDIA driver on your system is too old"
            r"|forward compatibility was attempted on non supported HW"
        ),
        ("the NVIDIA driver is too old for this CUDA runtime",),
        ("a newer driver, or a torch built for an older CUDA", _PREFLIGHT),
        "CUDA runtime",
        LATER | {"gpu-not-found"},
    ),
    Cause(
        "torch-without-this-gpu",
        _words(
            r"CUDA error: no kernel image is available for execution on the device",
            r"(?P<built>Torch not compiled with CUDA enabled)",
        ),
        ("this torch was built without CUDA: {built}", "this torch, or an extension, was not built for this GPU (sm_89)"),
        ("a torch whose torch.cuda.get_arch_list() has sm_89; extensions built anew with TORCH_CUDA_ARCH_LIST=8.9",),
        "CUDA runtime",
        needs_failure=True,
        survivable=True,
    ),
    Cause(
        "cuda-assert",
        _words(r"(?:CUDA error: |[Cc]uda failure (?:\d{1,4} )?')device-side assert triggered", r"Assertion `.{1,80}` failed\.$"),
        ("an index was out of range on a GPU of rank {rank}", "an index was out of range on a GPU"),
        (
            "token ids, labels or positions beyond the model's size: compare the tokenizer's length with the embedding's",
            "CUDA_LAUNCH_BLOCKING=1 shows the line",
        ),
        "CUDA device-side assert",
        LATER | {"cuda-launch-failure"},
        needs_failure=True,
    ),
    Cause(
        "cuda-illegal-access",
        _program,
        (
            "a program on the GPU at {pci} touched memory it does not own (Xid {xid})",
            "a program on a GPU of rank {rank} touched memory it does not own",
            "a program on a GPU touched memory it does not own",
        ),
        (
            "CUDA_LAUNCH_BLOCKING=1 shows the line; a kernel of an extension is the likeliest",
            "when it is always the same card: look at its kernel log for other Xids, exchange it with another",
        ),
        "Xid 13 and 31, CUDA error 700",
        LATER | {"cuda-launch-failure"},
    ),
    Cause(
        "cuda-launch-failure",
        _words(
            r"(?:CUDA error: |[Cc]uda failure (?:\d{1,4} )?')"
            r"(?P<error>unspecified launch failure|unknown error|the launch timed out and was terminated"
            r"|CUDA-capable device\(s\) is/are busy or unavailable)",
            r"Error: (?P<error>CUDA unknown error) - this may be due to",
        ),
        ("a GPU of rank {rank} stopped working: {error}", "a GPU stopped working: {error}"),
        ("look for an Xid at that time: dmesg -T | grep -i xid", _PREFLIGHT),
        "CUDA error 719, 999; 46",
        fix_if={
            ("error", "CUDA-capable device(s) is/are busy or unavailable"): (
                "nvidia-smi -q -d COMPUTE: in mode Exclusive_Process one program has the card; nvidia-smi shows which",
                "when no program is on it: reset it or reboot the node",
                _PREFLIGHT,
            )
        },
    ),
    Cause(
        "nccl-version-mismatch",
        _words(r"Mismatched NCCL version detected.{0,120}"),
        ("the nodes have different versions of NCCL",),
        ("the same Python environment on all nodes: r4090c provision", "r4090c preflight"),
        "NCCL bootstrap",
    ),
    Cause(
        "batch-size-mismatch",
        _words(r"train_batch_size is not equal to micro_batch_per_gpu \* gradient_acc_step \* world_size"),
        ("the batch sizes of the DeepSpeed configuration do not fit the number of ranks",),
        (
            "is the number of ranks the one you meant? a missing hostfile starts on one node only, silently",
            "set train_batch_size to auto",
        ),
        "accelerate 1795",
    ),
    Cause(
        "checkpoint-other-world-size",
        _words(r"checkpoint being loaded used a DP world size of (?P<then>\d+) but the current world size is (?P<now>\d+)"),
        (
            "the checkpoint is of {then} ranks, the run has {now}: ZeRO cannot load it",
            "the checkpoint is of another number of ranks",
        ),
        ("the same number of ranks, or turn it into a universal checkpoint: python -m deepspeed.checkpoint.ds_to_universal",),
        "DeepSpeed ZeRO",
    ),
    Cause(
        "cuda-toolkit-mismatch",
        _words(r"CUDAMismatchException|Installed CUDA version \S+ does not match the version torch was compiled with"),
        ("the CUDA toolkit on the node is of another version than torch's",),
        (
            "a toolkit of torch's version (nvcc --version), CUDA_HOME set to it",
            "or an optimizer that compiles nothing: torch_adam",
        ),
        "DeepSpeed op builder",
        needs_failure=True,
        survivable=True,
    ),
    Cause(
        "compiler-missing",
        _words(
            r"CUDA_HOME (?:environment variable is not set|does not exist)|Ninja is required to load C\+\+ extensions"
            r"|Error building extension '(?P<name>\w+)'|Failed to find C compiler",
            r"fatal error: Python\.h: No such file or directory|/ld: cannot find -l\S{1,80}",
        ),
        ("the extension {name} could not be compiled", "an extension of torch or DeepSpeed could not be compiled"),
        (
            "install nvcc of torch's CUDA version, g++ and ninja on every node",
            "Triton needs gcc, Python.h (python3-dev) and libcuda.so where the linker looks (ldconfig -p | grep libcuda)",
            _PREFLIGHT,
        ),
        "DeepSpeed op builder",
        needs_failure=True,
        survivable=True,
    ),
    Cause(
        "launcher-missing",
        _words(
            r"launcher '(?P<name>\w+)' not installed",
            r"FileNotFoundError: \[Errno 2\] No such file or directory: '(?P<name>numactl|pdsh|ssh|mpirun|nvcc|ninja)'",
            r"^(?:\S{1,64}: )?(?:ba)?sh: (?:line \d{1,6}: )?(?P<name>"
            r"(?:/\S{0,300}/)?(?:python[\d.]{0,6}|torchrun|deepspeed|numactl)): (?:No such file or directory|command not found)",
        ),
        (
            "the program {name} is not there on {node}",
            "the program {name} is not installed",
            "a program of the launcher is not installed",
        ),
        (
            "install it on the node you start from, or start with r4090c launch, which needs none",
            "the same Python environment at the same path on all nodes: r4090c provision",
        ),
        "DeepSpeed 1603",
    ),
    Cause(
        "module-missing",
        _words(
            r"ModuleNotFoundError: No module named '(?P<name>[\w.]{1,100})'",
            r"^(?:\[rank\d+\]: ?)?train: .{1,300}?: cannot import (?P<name>[\w.]{1,100})\b",
            r"ImportError: (?P<name>lib[\w.+\-]{1,80}): cannot open shared object file",
            r"ImportError: .{1,200}? the package (?P<name>\w{1,60}) seems to be not installed",
        ),
        (
            "the library {name} is missing on {node}",
            "the library {name} is missing",
            "a library is missing",
        ),
        ("the same Python environment on all nodes: r4090c provision", "pip install the package that has {name}, on every node"),
        "Python",
        needs_failure=True,
        survivable=True,
    ),
    Cause(
        "library-mismatch",
        _words(
            r"ImportError: (?P<name>/\S{1,300}?\.so\S{0,20}): undefined symbol: \S{1,300}",
            r"ImportError: .{0,300}?(?P<version>(?:GLIBCXX|GLIBC|CXXABI)_[\d.]{1,12})' not found"
            r"(?: \(required by (?P<name>/\S{1,300})\))?",
        ),
        (
            "{name} needs {version}, which the C or C++ library of {node} does not have",
            "{name} was built for another torch than the one that is there",
            "a library was built for another one than is there",
        ),
        (
            "install or compile it anew with the torch that is there: pip install --force-reinstall --no-build-isolation",
            "of torch's and DeepSpeed's own: rm -r ~/.cache/torch_extensions, so that they are compiled again on that node",
            "the same Python environment on all nodes: r4090c provision",
        ),
        "flash-attention; torch's extensions",
        needs_failure=True,
        survivable=True,
    ),
    Cause(
        "wrong-input",
        _wrong_input,
        ("{culprit}: {observed} (expected {expected})", "{culprit}: {observed}"),
        ("{remedy}", "correct what was given, and start again"),
        "train/errors.py; argparse",
        COMMUNICATION | {"rank-failed", "rank-killed"},
    ),
    Cause(
        "script-missing",
        _words(r"can't open file '(?P<path>[^']{1,300})': \[Errno 2\] No such file or directory"),
        ("there is no script {path}", "the script is not there"),
        ("give the path of the script as the nodes see it, on the shared folder",),
        "Python",
    ),
    Cause(
        "model-missing",
        _words(
            r"OSError: (?P<name>\S{1,200}) is not a local folder and is not a valid model identifier",
            r"OSError: (?P<name>\S{1,200}) does not appear to have (?:a file|files) named .{1,200}",
            r"OSError: Error no file named .{1,200} found in directory (?P<name>/\S{1,300}?)\.?$",
            r"OSError: We couldn't connect to 'https://huggingface\.co' to load th.{1,200}",
            r"SafetensorError: Error while deserializing header: .{1,60}",
            r"OSError: You are trying to access a (?P<access>gated) repo|GatedRepoError",
            r"OSError: Incorrect path_or_model_id: '(?P<name>[^']{1,300})'",
            r"HFValidationError: .{1,120}?: '(?P<name>/[^']{1,300})'",
            r"PytorchStreamReader failed .{1,100}",
        ),
        (
            "the model is {access}: this account has not been given access to it",
            "the files of the model {name} are not there",
            "the files of the model are not there, or damaged",
        ),
        (
            "of a {access} model: accept its licence on its page, and HF_TOKEN of that account on every node",
            "copy the model to the shared folder, and give its path; a file of some bytes is a git-lfs pointer, no weights",
            "offline nodes: HF_HUB_OFFLINE=1, with the model in HF_HOME",
        ),
        "transformers, safetensors",
        needs_failure=True,
        survivable=True,
    ),
    Cause(
        "no-file-locks",
        _words(r"OSError: \[Errno 37\] No locks available.{0,80}"),
        ("the file system has no file locks, or its lock server does not answer",),
        (
            "put caches on a local disk: HF_HOME, HF_DATASETS_CACHE, TRITON_CACHE_DIR, TORCH_EXTENSIONS_DIR",
            "NFS v3: rpc.statd on client and server; v4 needs none",
        ),
        "datasets 2618, 1672; errno 37",
        needs_failure=True,
        survivable=True,
    ),
    Cause(
        "checkpoint-folder-race",
        _words(
            r"FileExistsError: \[Errno 17\] File exists: "
            r"'(?P<path>/?[^']{0,300}(?:checkpoint|ckpt|global_step|step[_-]?\d|save)[^']{0,200})'"
        ),
        (
            "several ranks made {path} at once, and not all saw it",
            "several ranks made a folder at once",
        ),
        ("let rank 0 make the folder, and the others wait (a barrier)", "make the folder before the run begins"),
        "DeepSpeed pull request 4536; OLMo 894",
        needs_failure=True,
        survivable=True,
    ),
    Cause(
        "storage-hung",
        _storage_hung,
        (
            "{error}: {path}",
            "{process} (pid {pid}) waited in the kernel for storage that did not answer",
            "a process waited for storage that did not answer",
        ),
        (
            "look at the NFS server and the way to it: nfsstat -m, dmesg; ps -eo pid,stat,wchan:32,cmd shows D and nfs_*",
            "let only rank 0 write files that all ranks have",
            _PREFLIGHT,
        ),
        "NeMo-RL pull request 3504; kernel hung task; as launch.diagnose names it",
        LATER | {"storage-silent"},
    ),
    Cause(
        "collective-wrong-data",
        _words(r"# Out of bounds values : (?P<count>[1-9]\d{0,11}) FAILED"),
        ("{count} numbers of a collective were wrong", "numbers of a collective were wrong"),
        (
            "NCCL_P2P_DISABLE=1 and NCCL_NET_GDR_LEVEL=LOC, then test again: peer access or GPUDirect may lose data",
            "another NCCL or driver where it stays",
        ),
        "nccl-tests 7, 167",
        of_a_rank=False,
    ),
    Cause(
        "numactl-conflict",
        _words(r"ValueError: Environment variable KMP_AFFINITY conflicts with numactl"),
        ("KMP_AFFINITY is set, which DeepSpeed's --bind_cores_to_rank does not allow",),
        ("unset KMP_AFFINITY", "r4090c launch sets the CPUs of each rank by itself"),
        "DeepSpeed pull request 2881",
    ),
    Cause(
        "slurm-ended",
        _words(r"CANCELLED AT \S{1,40} DUE TO (?P<why>[A-Z][A-Z -]{2,40})"),
        ("Slurm ended the job: {why}", "Slurm ended the job"),
        ("scontrol show job JOB tells more; go on from the last checkpoint",),
        "Slurm",
        frozenset(),
        fix_if={
            ("why", "TIME LIMIT"): (
                "a longer sbatch --time, up to the partition's (sinfo -o '%P %l'), and checkpoints to go on from",
            ),
            ("why", "PREEMPTION"): ("sbatch --requeue, and go on from the last checkpoint",),
            ("why", "NODE FAILURE"): ("sinfo -R tells which node, and why",),
        },
        of_a_rank=False,
        explains_after=LATER,
        needs_failure=True,
    ),
    Cause(
        "stopped",
        _words(
            r"SignalException: Process \d+ got signal: (?P<signal>\d+)",
            r"CANCELLED AT \S{1,40} \*\*\*",
            r"^(?:\[rank\d+\]: ?)?KeyboardInterrupt$|process received (?P<name>SIGINT), exiting",
        ),
        ("the run was ended from outside (signal {signal})", "the run was ended from outside"),
        ("who ended it: Ctrl-C, kill, scancel or a node that shut down; journalctl of that time",),
        "torchrun, Slurm; as launch.diagnose names it",
        frozenset(),
        of_a_rank=False,
        explains_after=LATER,
        needs_failure=True,
        fix_if={("signal", "1"): ("signal 1 is a closed terminal: start it detached (r4090c launch, tmux, nohup)",)},
    ),
    Cause(
        "false-p2p-grant",
        _false_p2p,
        (
            "the GPUs talk by peer access ({transport}) and no collective completes: the driver grants P2P that does not work",
            "the driver grants P2P that does not work",
        ),
        (
            "NCCL_P2P_DISABLE=1 (leave NCCL_SHM_DISABLE alone)",
            "a driver that does not grant P2P on this card, or IOMMU and ACS off where a patched one is meant",
        ),
        "nccl-tests 117, NCCL 631, club-3090",
        COMMUNICATION | {"ranks-out-of-step", "rank-killed"},
        of_a_rank=False,
    ),
    Cause(
        "ranks-out-of-step",
        _out_of_step,
        (
            "rank {rank} left the loop, or took another branch: at number {sequence} it called {odd_operation}, the others"
            " {operation}",
            "ranks {odd_ranks} were in another collective than the others ({odd_operation}, they in {operation})",
            "the ranks called different collectives",
        ),
        (
            "give every rank the same number of batches: drop_last=True, or an even split of the data",
            "torch's Join context where the numbers must differ",
            "no collective (saving, logging, evaluation) inside `if rank == 0`",
        ),
        "DeepSpeed 6705",
        COMMUNICATION | {"rank-killed"},
        of_a_rank=False,
    ),
    Cause(
        "nan-loss",
        _nan_loss,
        (
            "{observed}",
            "the {gradients} left the numbers (NaN or infinity) and never came back",
            "the loss left the numbers (NaN or infinity) in {precision}",
            "the loss left the numbers (NaN or infinity)",
        ),
        (
            "bf16 instead of fp16: the 4090 has it",
            "a lower learning rate, a longer warmup, gradient clipping",
            "look at the data of the step before",
        ),
        "DeepSpeed loss scaler",
        DEATHS | COMMUNICATION,
        of_a_rank=False,
    ),
    Cause(
        "rank-failed",
        _raised,
        ("rank {rank} failed: {error}", "a process failed: {error}"),
        ("{remedy}", "read the traceback of rank {rank}", "read the traceback above that line"),
        "Python; as launch.diagnose names it",
        COMMUNICATION | {"rank-killed"},
        explains_after=INFERRED,
    ),
    Cause(
        "rank-killed",
        _killed,
        (
            "rank {rank} on {node} was killed by {signal}",
            "rank {rank} was killed by {signal}",
            "a rank was killed by {signal}",
        ),
        ("the kernel log tells whether it was for want of memory: journalctl -k -n 50", _PREFLIGHT),
        "torchrun, DeepSpeed; shells, docker, mpirun, srun",
        COMMUNICATION,
        needs_failure=True,
        fix_if={
            ("signal", "SIGSEGV"): (
                "python -X faulthandler shows where: mostly native code, an extension built for another torch",
                "when it is another place or node each time: test the memory of the node; look at its kernel log",
                _PREFLIGHT,
            ),
            ("signal", "SIGBUS"): (
                "/dev/shm is full (df -h /dev/shm), or a file that is mapped was cut, or its storage failed",
                "in a container: --shm-size=16g, or --ipc=host",
                _PREFLIGHT,
            ),
        },
    ),
    Cause(
        "nccl-error",
        _nccl_error,
        ("NCCL failed: {error}",),
        ("run with NCCL_DEBUG=INFO: its first WARN is the cause", "r4090c preflight"),
        "NCCL",
        frozenset({"peer-gone", "collective-timeout"}),
        needs_failure=True,
    ),
    Cause(
        "collective-timeout",
        _timed_out,
        (
            "ranks {ranks} waited in vain for rank {silent} in {operation} (number {sequence})",
            "ranks {ranks} waited in vain in {operation} (number {sequence}); which one kept them waiting the log does not tell",
            "rank {ranks} waited in vain for rank {silent} to set up a communicator",
            "rank {ranks} waited in vain in a collective; which one kept it waiting the log does not tell",
            "a collective timed out, or the watchdog of torch hung; which rank kept the others waiting the log does not tell",
        ),
        (
            "which rank is stuck: py-spy dump on each, or NCCL's RAS (echo status | nc localhost 28028)",
            "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 tells more the next time",
        ),
        "torch ProcessGroupNCCL",
        frozenset({"peer-gone"}),
        needs_failure=True,
        of_a_rank=False,
        fix_if={
            ("never", "perhaps P2P"): (
                "NCCL_P2P_DISABLE=1: no collective ever completed, as with a driver that grants P2P which does not work",
                "r4090c preflight tests peer access between the GPUs, and ports between the nodes",
                "NCCL_DEBUG=INFO tells the interface and the transports",
            ),
            ("never", "without P2P"): (
                "r4090c preflight tests ports between the nodes and peer access: no collective ever completed",
                "NCCL_DEBUG=INFO tells the interface and the transports",
            ),
        },
    ),
    Cause(
        "peer-gone",
        _peer_gone,
        ("a peer of rank {rank} went first: this log does not tell why", "a peer went first: this log does not tell why"),
        ("look into the logs of the other ranks and nodes for the first error",),
        "launch.causes.blames_peer",
        frozenset(),
        needs_failure=True,
        of_a_rank=False,
    ),
)
"""Every known cause. The order means nothing: `explains` and the place in the log decide."""
_BY_KIND: Mapping[str, Cause] = {cause.kind: cause for cause in CAUSES}
