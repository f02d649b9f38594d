"""Hangs: when a rank counts as hung, and what is seen of it then. Used by the agent, beside which this file lies.

Standard library only, Python >= 3.8; runs on the node. Judging (`Pulse`, `hung_ranks`) and reading stacks (`parse_faulthandler`,
`parse_py_spy`, `waits_for_peers`) are pure. `Look` gathers what there is to see of the ranks of this node, in threads of its own
and in bounded time: a hang may well be that of the shared folder, so nothing here is waited for without end.

A rank beats by replacing `beat-<rank>.json` in the node-local folder: {"rank", "phase", "step", "time"}. train/metrics.py does;
a script of the user's own may.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import re
import shutil
import signal
import socket
import stat
import statistics
import subprocess
import threading
import time
from typing import Any, Callable, Deque, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

Json = Dict[str, Any]

MOST_GAP_S = 5.0  # the agent looks twice a second; when it did not, it was frozen itself, perhaps with the whole node
KEPT_STEPS = 64  # whose median is the step time
SETTLED_STEPS = 2  # the first step compiles, allocates, and opens connections
MOST_BEAT = 4096  # bytes; a beat has 70
MOST_STEP = 10**15  # a float tells one from the next
MOST_FRAMES = 12
MOST_SHOWN = 200  # letters of a frame
MOST_TEXT = 1 << 18  # bytes of one stack dump: 100 threads of 100 frames
WINDOW_S = 3.0  # est.: py-spy takes 0.1 s a rank on an idle node; what stands still can be looked at later no better
LAST_S = 0.4  # of the window, for writing down what was seen
PY_SPY_S = 1.2  # est.
FAULTHANDLER_S = 1.0  # est.: a process that runs any code prints at once
QUIET_S = 0.15  # a dump that has not grown for this long is whole
AGAIN_S = 0.3  # between two looks at a thread: a disk answers sooner, a server that is gone does not
RAS_PORT = 28028  # NCCL >= 2.24, src/ras/ras_internal.h: NCCL_RAS_CLIENT_PORT
MOST_DUMP = 64 << 20  # bytes; a flight recorder of 2000 entries with stacks has some MB

# ----------------------------------------------------------------------------- judging


class Limits(NamedTuple):
    """How long a rank may be silent: max(factor × median step, floor_s) while it trains, else start_s."""

    floor_s: float
    factor: float
    start_s: float


class Beat(NamedTuple):
    """What a rank last told; `time`: its clock, seconds since the epoch."""

    phase: str
    step: int
    time: float


STARTING = Beat("start", 0, 0.0)
"""What counts as told by a rank that has not beaten yet, of a script that does beat."""


class Hung(NamedTuple):
    """A rank that was silent for longer than it may be."""

    rank: int
    phase: str
    step: int
    silent_s: float
    limit_s: float


class Pulse:
    """The beats of one rank as they were seen. Silence is only counted while somebody looks."""

    def __init__(self, beat: Optional[Beat] = None) -> None:
        self.beat = beat
        self.silent_s = 0.0
        self._looked: Optional[float] = None
        self._first: Optional[int] = None  # step of the first beat while training
        self._step_times_s: Deque[float] = collections.deque(maxlen=KEPT_STEPS)

    def take(self, beat: Optional[Beat], now: float) -> None:
        """Take in the beat that is there at `now` (monotonic seconds)."""
        gap_s = 0.0 if self._looked is None else min(max(0.0, now - self._looked), MOST_GAP_S)
        self._looked = now
        if beat is None or beat == self.beat:
            self.silent_s += gap_s
            return
        before, self.beat, self.silent_s = self.beat, beat, 0.0
        if before is not None and beat.step < before.step:  # it started over
            self._first = None
            self._step_times_s.clear()
        if beat.phase != "train":
            return
        if self._first is None:
            self._first = beat.step
        elif before is not None and before.phase == "train" and beat.step > before.step and beat.time > before.time:
            self._step_times_s.append((beat.time - before.time) / (beat.step - before.step))

    def step_time_s(self) -> Optional[float]:
        """Return the median step time, None before two steps are done."""
        settled = self.beat is not None and self._first is not None and self.beat.step - self._first >= SETTLED_STEPS
        return statistics.median(self._step_times_s) if settled and self._step_times_s else None

    def limit_s(self, limits: Limits) -> float:
        """Return how long this rank may be silent now."""
        step_s = self.step_time_s()
        if step_s is None or self.beat is None or self.beat.phase != "train":
            return limits.start_s
        return max(limits.factor * step_s, limits.floor_s)


def hung_ranks(pulses: Mapping[int, Pulse], limits: Limits, stopped: Iterable[int] = ()) -> List[Hung]:
    """Return the ranks that are silent for too long, the most silent first; one that has never beaten is not judged.

    `stopped`: ranks whose process is stopped (SIGSTOP); whatever they were doing, they do it no more.
    """
    found = []
    for rank, pulse in pulses.items():
        limit_s = min(pulse.limit_s(limits), limits.floor_s) if rank in stopped else pulse.limit_s(limits)
        if pulse.beat is not None and pulse.silent_s > limit_s:
            found.append(Hung(rank, pulse.beat.phase, pulse.beat.step, pulse.silent_s, limit_s))
    return sorted(found, key=lambda hung: (-hung.silent_s, hung.rank))


def parse_beat(text: bytes) -> Optional[Beat]:
    """Return the beat that a file's bytes tell, None when they tell none."""
    try:
        told = json.loads(text.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(told, dict):
        return None
    phase, step, when = told.get("phase"), told.get("step"), told.get("time")
    if not isinstance(phase, str) or isinstance(step, bool) or not isinstance(step, int) or abs(step) > MOST_STEP:
        return None
    if isinstance(when, bool) or not isinstance(when, (int, float)) or not math.isfinite(when):
        return None
    return Beat(phase[:MOST_SHOWN], step, float(when))


def read_beat(folder: str, rank: int) -> Optional[Beat]:
    """Return the last beat of `rank` in the node-local folder, None when there is none, or no plain file."""
    try:
        descriptor = os.open(
            os.path.join(folder, "beat-%d.json" % rank), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        )
    except OSError:
        return None
    try:
        return parse_beat(os.read(descriptor, MOST_BEAT)) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    except OSError:
        return None
    finally:
        os.close(descriptor)


def limits_of(plan: Json) -> Optional[Limits]:
    """Return the plan's limits, None when hangs are not looked for (plans of old have none)."""
    told = plan.get("hang")
    return Limits(float(told["floor_s"]), float(told["factor"]), float(told["start_s"])) if told else None


# ----------------------------------------------------------------------------- stacks


class Thread(NamedTuple):
    """A thread's Python stack: frames innermost first, each "file:line function"."""

    name: str
    main: bool
    frames: List[str]


FAULT_THREAD = re.compile(r"^(Current thread|Thread) 0x([0-9a-fA-F]+)(?: \[(.*)\])? \(most recent call first\):")
FAULT_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
"""As CPython's Python/traceback.c writes them (3.8 to 3.14; a name in brackets since 3.14)."""
SPY_THREAD = re.compile(r'^Thread (0x[0-9a-fA-F]+|\d+)(?: \(([^)]*)\))?(?:: "(.*)")?$')
SPY_FRAME = re.compile(r"^    (.+) \((.+?)(?::(\d+))?\)$")
"""As py-spy 0.3 and 0.4 print them."""


def parse_faulthandler(text: str) -> List[Thread]:
    """Return the threads of faulthandler's dump; other lines of the log in between do not matter.

    The main thread is the one that the signal interrupted: the kernel gives a signal for the process to the main thread first.
    """
    threads: List[Thread] = []
    for line in text.splitlines():
        head_line = FAULT_THREAD.match(line)
        if head_line:
            name = head_line.group(3) or "0x" + head_line.group(2)
            threads.append(Thread(name, head_line.group(1) == "Current thread", []))
            continue
        frame = FAULT_FRAME.match(line)
        if frame and threads:
            threads[-1].frames.append(_frame(*frame.groups()))
    return threads


def parse_py_spy(text: str) -> List[Thread]:
    """Return the threads of `py-spy dump`; the first is the main one where none has the name."""
    threads: List[Thread] = []
    for line in text.splitlines():
        head_line = SPY_THREAD.match(line)
        if head_line:
            name = head_line.group(3) or head_line.group(1)
            threads.append(Thread(name, name == "MainThread", []))
            continue
        frame = SPY_FRAME.match(line)
        if frame and threads:
            threads[-1].frames.append(_frame(frame.group(2), frame.group(3) or "?", frame.group(1)))
    if threads and not any(thread.main for thread in threads):
        threads[0] = threads[0]._replace(main=True)
    return threads


def _frame(file: str, line: str, function: str) -> str:
    return ("%s:%s %s" % (file[-MOST_SHOWN:], line.replace("???", "?"), function))[: 2 * MOST_SHOWN]


def main_frames(threads: Sequence[Thread]) -> List[str]:
    """Return the frames of the main thread, [] when there is no stack."""
    mains = [thread for thread in threads if thread.main] or list(threads)[-1:]
    return mains[-1].frames if mains else []


PEERS = re.compile(
    r"/torch/distributed/(distributed_c10d|c10d_logger|rendezvous|_functional_collectives|nn/functional)\.py:"
    r"|/torch/distributed/elastic/utils/store\.py:|/torch/cuda/(__init__|streams)\.py:\S+ (synchronize|wait)"
    r"|/torch/autograd/graph\.py:\S+ _engine_run_backward|/deepspeed/comm/"
)
"""Where a rank stands that waits for others, by its innermost frame: a collective, the store, or the GPU that does a collective.

In the middle of a backward pass the hooks of C++ wait; computing that long is not what a backward pass does.
"""
WAITS = re.compile(r"\.(item|cpu|tolist|synchronize|wait|to)\(|\bstore\.get\(|\b(all_reduce|all_gather|reduce_scatter|barrier)\(")
"""Calls into C that wait for the GPU, for a collective or for the store; a wait written in Python would be a frame of its own."""
SLEEPS = re.compile(r"\bsleep\(")


def waits_for_peers(threads: Sequence[Thread], line: str = "") -> bool:
    """True when the main thread stands where the other ranks decide how long; `line`: the source of its innermost frame.

    False also when nothing is known.
    """
    frames = main_frames(threads)
    if not frames or SLEEPS.search(line):
        return False
    return PEERS.search(frames[0]) is not None or WAITS.search(line) is not None


def source_line(frame: str) -> str:
    """Return the source line of a frame, "" when it cannot be read. May hang, as every file may."""
    match = re.match(r"(/.+):(\d+) ", frame)
    if not match:
        return ""
    try:
        with open(match.group(1), encoding="utf-8", errors="replace") as handle:
            for number, line in enumerate(handle, 1):
                if number == int(match.group(2)):
                    return line.strip()[:MOST_SHOWN]
    except OSError:
        pass
    return ""


# ----------------------------------------------------------------------------- processes


def head(path: str, limit: int) -> bytes:
    """Return the first `limit` bytes of a file, b"" when it cannot be read."""
    try:
        with open(path, "rb") as handle:
            return handle.read(limit)
    except OSError:
        return b""


class Task(NamedTuple):
    """A thread as the kernel sees it; `wchan`: where in the kernel it waits, "" when it runs or the kernel does not say."""

    tid: int
    name: str
    state: str
    wchan: str


def task_of(folder: str) -> Optional[Task]:
    """Return what /proc/<pid> or /proc/<pid>/task/<tid> says, None when it is gone."""
    before, found, after = head(folder + "/stat", 4096).rpartition(b")")
    fields = after.split()
    if not found or not fields:
        return None
    number, _, name = before.partition(b" (")
    wchan = head(folder + "/wchan", 256).decode("ascii", "replace").strip()
    return Task(int(number), name.decode("utf-8", "replace"), fields[0].decode().upper(), "" if wchan == "0" else wchan)


def tasks_of(pid: int) -> List[Task]:
    """Return the threads of a process, the main one first."""
    try:
        names = sorted(os.listdir("/proc/%d/task" % pid), key=int)
    except OSError:
        return []
    found = [task_of("/proc/%d/task/%s" % (pid, name)) for name in names]
    return sorted((task for task in found if task is not None), key=lambda task: task.tid != pid)


def standing(first: Sequence[Task], later: Sequence[Task]) -> Tuple[str, str]:
    """Return (state, wchan) of a process that was looked at twice: of a thread in D both times, else of the main thread later."""
    before = {task.tid: task for task in first}
    for task in later:
        if task.state == "D" and before.get(task.tid) == task:
            return task.state, task.wchan
    return (later[0].state, later[0].wchan) if later else ("", "")


def start_of(pid: int) -> Optional[int]:
    """Return when a process started (ticks since boot), None when it is gone."""
    fields = head("/proc/%d/stat" % pid, 4096).rpartition(b")")[2].split()
    return int(fields[19]) if len(fields) > 19 else None


def catches(pid: int, number: int) -> bool:
    """True when the process has a handler for the signal: without one, SIGUSR1 would end it."""
    match = re.search(rb"^SigCgt:\s*([0-9a-f]+)", head("/proc/%d/status" % pid, 1 << 16), re.MULTILINE)
    return match is not None and bool(int(match.group(1), 16) >> (number - 1) & 1)


# ----------------------------------------------------------------------------- looking


class Target(NamedTuple):
    """What to look at: a process (`start` in ticks), the log it writes, the variables it has, where its own files are to go."""

    rank: int
    pid: int
    start: Optional[int]
    log: str
    environ: Mapping[str, str]
    stacks: str
    stacks_here: str
    flight: str


class Seen:
    """What was seen of one rank so far."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.process, self.wchan, self.line = "", "", ""
        self.threads: List[Thread] = []
        self.parts: List[Tuple[str, str]] = []  # (heading, text)
        self.nccl: Optional[str] = None  # what NCCL says, "" while it is asked, None = it is not
        self.stacks = ""  # the file it was written to

    def text(self) -> str:
        """Return it all for people."""
        about = "rank %d, process %d: state %s" % (self.target.rank, self.target.pid, self.process or "unknown")
        about += ", in the kernel at %s" % self.wchan if self.wchan else ""
        return about + "\n" + "".join("\n--- %s\n%s\n" % (heading, text.rstrip()) for heading, text in self.parts)

    def event(self, hung: Hung) -> Json:
        """Return the fields of the event that tells it."""
        frames = main_frames(self.threads)[:MOST_FRAMES]
        detail = "rank %d has told nothing for %.0f s" % (hung.rank, hung.silent_s)
        detail += " (at most %.0f s in phase %s after step %d)" % (hung.limit_s, hung.phase, hung.step)
        if self.process:
            detail += "; its process is in state %s" % self.process + (" at %s" % self.wchan if self.wchan else "")
        if frames:
            detail += "; it stands in %s" % frames[0] + (": %s" % self.line if self.line else "")
        return {
            "rank": hung.rank,
            "phase": hung.phase,
            "step": hung.step,
            "silent_s": round(hung.silent_s, 1),
            "limit_s": round(hung.limit_s, 1),
            "process": self.process,
            "wchan": self.wchan,
            "frames": frames,
            "waits_for_peers": waits_for_peers(self.threads, self.line),
            "stacks": self.stacks,
            "detail": detail,
        }


class Look:
    """A look at the ranks of this node, going on in threads; over after `window_s` at the latest, whatever hangs.

    `python`: the training Python, beside which py-spy may lie. `nccl`: whether to ask NCCL as well.
    """

    def __init__(self, targets: Iterable[Target], python: str, nccl: bool, window_s: float = WINDOW_S) -> None:
        self._until = time.monotonic() + window_s
        self._python = python
        self.seen = {target.rank: Seen(target) for target in targets}
        self._threads = [threading.Thread(target=self._look, args=(seen,), daemon=True) for seen in self.seen.values()]
        for seen in list(self.seen.values())[: int(nccl)]:  # NCCL answers for the whole job: once is enough
            seen.nccl = ""
            self._threads.append(threading.Thread(target=self._ask_nccl, args=(seen,), daemon=True))
        for thread in self._threads:
            thread.start()

    def over(self) -> bool:
        """True when all is seen, or time is up."""
        return time.monotonic() > self._until or not any(thread.is_alive() for thread in self._threads)

    def result(self) -> Dict[int, Seen]:
        """Return what was seen; what could not be put into the run folder is in the node-local one."""
        for seen in self.seen.values():
            if not seen.stacks and write(seen.target.stacks_here, seen.text()):
                seen.stacks = seen.target.stacks_here
        return self.seen

    def _ask_nccl(self, seen: Seen) -> None:
        seen.nccl = ask_ras(seen.target.environ.get("NCCL_RAS_ADDR", ""), self._until - LAST_S)

    def _look(self, seen: Seen) -> None:
        target, until = seen.target, self._until - LAST_S
        first = tasks_of(target.pid)
        seen.process, seen.wchan = standing(first, first)  # what comes next may hang
        seen.parts.append(("threads in the kernel", "\n".join("%d %s %s %s" % task for task in first)))
        kernel = head("/proc/%d/stack" % target.pid, MOST_TEXT).decode("ascii", "replace")
        if kernel:
            seen.parts.append(("kernel stack of the main thread", kernel))
        began = time.monotonic()
        dumped = ask_flight_recorder(target)
        how, text, threads = self._stacks(target, seen.process, until)
        seen.threads = threads
        seen.parts.append((how, text))
        frames = main_frames(threads)
        seen.line = source_line(frames[0]) if frames else ""
        if seen.process == "D":
            time.sleep(max(0.0, AGAIN_S - (time.monotonic() - began)))
            seen.process, seen.wchan = standing(first, tasks_of(target.pid))
        while seen.nccl == "" and time.monotonic() < until:
            time.sleep(0.03)
        if seen.nccl:
            seen.parts.append(("NCCL RAS", seen.nccl))
        if dumped is not None:
            seen.parts.append(("torch's flight recorder", dumped(until)))
        if write(target.stacks, seen.text()):
            seen.stacks = target.stacks

    def _stacks(self, target: Target, process: str, until: float) -> Tuple[str, str, List[Thread]]:
        """Return (how they were had, the text, the threads)."""
        said = "no stacks"
        py_spy = find_py_spy(self._python)
        if py_spy is not None:
            text = run_py_spy(py_spy, target.pid, min(PY_SPY_S, until - time.monotonic()))
            threads = parse_py_spy(text)
            if any(thread.frames for thread in threads):
                return "Python stacks (py-spy)", text, threads
            said = text or "py-spy said nothing"
        if process == "T":
            return "Python stacks", said + "\na stopped process prints none itself", []
        if not catches(target.pid, signal.SIGUSR1):
            return "Python stacks", said + "\nno handler for SIGUSR1 (faulthandler.register(signal.SIGUSR1) is one)", []
        text = ask_faulthandler(target, min(time.monotonic() + FAULTHANDLER_S, until))
        return "Python stacks (faulthandler)", text or said + "\nSIGUSR1 was not answered", parse_faulthandler(text)


def write(path: str, text: str) -> bool:
    """Write a file; True when it stands there."""
    try:
        with open(path, "w", encoding="utf-8", errors="replace") as handle:
            handle.write(text)
    except OSError:
        return False
    return True


def find_py_spy(python: str) -> Optional[str]:
    """Return py-spy beside the training Python, or in PATH; None when there is none."""
    beside = os.path.join(os.path.dirname(python), "py-spy")
    return beside if os.path.dirname(python) and os.access(beside, os.X_OK) else shutil.which("py-spy")


def run_py_spy(program: str, pid: int, seconds: float) -> str:
    """Return what `py-spy dump` prints, or why it failed. Not pausing the process: one that is stopped cannot be paused.

    By way of a shell: until a child has become its program, which may lie on a storage that hangs, all our threads stand still
    (subprocess holds the interpreter's lock over vfork).
    """
    argv = ["/bin/sh", "-c", 'exec "$0" "$@"', program, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=max(0.1, seconds))
    except subprocess.TimeoutExpired:
        return "py-spy took longer than %.1f s" % seconds
    except OSError as error:
        return "py-spy: %s" % error.strerror
    return (done.stdout or done.stderr)[:MOST_TEXT].decode("utf-8", "replace")


def ask_faulthandler(target: Target, until: float) -> str:
    """Send SIGUSR1 and return what the process printed into its log since; "" when nothing came."""
    try:
        offset = os.path.getsize(target.log)
    except OSError:
        return ""
    if target.start is not None and start_of(target.pid) != target.start:
        return ""
    with contextlib.suppress(OSError):
        os.kill(target.pid, signal.SIGUSR1)
    text, grown = b"", time.monotonic()
    while time.monotonic() < until:
        time.sleep(0.03)
        with contextlib.suppress(OSError), open(target.log, "rb") as handle:
            handle.seek(offset)
            now = handle.read(MOST_TEXT)
            if now != text:
                text, grown = now, time.monotonic()
        if b"(most recent call first)" in text and time.monotonic() - grown > QUIET_S:
            break
    return text.decode("utf-8", "replace")


def ask_flight_recorder(target: Target) -> Optional[Callable[[float], str]]:
    """Have torch dump its flight recorder where it listens for that; return what waits for the dump and copies it, or None.

    TORCH_NCCL_DEBUG_INFO_PIPE_FILE with TORCH_NCCL_TRACE_BUFFER_SIZE (or TORCH_FR_BUFFER_SIZE) > 0 makes the pipe
    `<value><rank>.pipe`; any byte in it makes the rank write `<TORCH_NCCL_DEBUG_INFO_TEMP_FILE><rank>`
    (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, torch 2.3 to 2.13).
    """
    stem = target.environ.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
    if not stem:
        return None
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    stems = [target.environ[name] for name in names if target.environ.get(name)]
    stems += ["/tmp/nccl_trace_rank_", os.path.expanduser("~/.cache/torch/comm_lib_trace_rank_")]
    files = ["%s%d" % (one, target.rank) for one in stems]
    before = {file: _changed(file) for file in files}
    try:
        pipe = os.open("%s%d.pipe" % (stem, target.rank), os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISFIFO(os.fstat(pipe).st_mode):
            return None
        os.write(pipe, b"1\n")
    except OSError:
        return None
    finally:
        os.close(pipe)

    def wait(until: float) -> str:
        while time.monotonic() < until:
            for file in files:
                changed = _changed(file)
                if changed is not None and changed != before[file] and time.time_ns() - changed[0] > QUIET_S * 1e9:
                    copied = _copy(file, target.flight)
                    return "%s (torchfrtrace reads it)" % target.flight if copied else "%s, which could not be copied" % file
            time.sleep(0.05)
        return "asked for, and not written in time"

    return wait


def _changed(file: str) -> Optional[Tuple[int, int]]:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _copy(file: str, to: str) -> bool:
    try:
        with open(file, "rb") as source, open(to, "wb") as copy:
            copy.write(source.read(MOST_DUMP))
    except OSError:
        return False
    return True


RAS_DIALOGUE = ((b"CLIENT PROTOCOL 2\n", b"SERVER PROTOCOL"), (b"TIMEOUT 1\n", b"OK"), (b"VERBOSE STATUS\n", b""))
"""What `ncclras -t 1 -v` says, and how the answers begin; the last ends the connection (NCCL 2.24 to 2.30, src/ras/client.cc)."""


def ask_ras(address: str, until: float) -> str:
    """Return what NCCL's RAS threads say of the job, or why they say nothing.

    `address`: the rank's NCCL_RAS_ADDR, "" = NCCL's default. Two jobs on a node share the default port: the first answers.
    """
    host, _, port = address.rpartition(":")
    where = (host.strip("[]") or "localhost", int(port) if port.isdigit() else RAS_PORT)
    said = b""
    try:
        with socket.create_connection(where, timeout=_left_s(until)) as connection:
            for request, answer in RAS_DIALOGUE:
                connection.sendall(request)
                said = b""
                while len(said) < MOST_TEXT and (not answer or not said.endswith(b"\n")):
                    connection.settimeout(_left_s(until))
                    more = connection.recv(65536)
                    if not more:
                        break
                    said += more
                if not said.startswith(answer):
                    return "what listens at %s:%d is not NCCL" % where
    except OSError as error:
        if not said:
            return "%s:%d: %s" % (where[0], where[1], error.strerror or error)
    return said[:MOST_TEXT].decode("utf-8", "replace")


def _left_s(until: float) -> float:
    return max(0.05, until - time.monotonic())
