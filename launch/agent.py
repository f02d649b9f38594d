"""The agent: runs on every node of an attempt, starts torchrun there, and answers for what becomes of it.

Standard library only, Python >= 3.8: it is run by the node's own python3. One process a node, detached from SSH. It

- starts torchrun in a session of its own and is its *subreaper*, so that every process below it stays below it, whatever dies;
- keeps a gang with the agents of the other nodes over one TCP connection each to the lead (node rank 0): whoever fails tells
  the lead, the lead tells all; a peer that is silent for `lease_s` is lost; so an attempt ends everywhere also when the
  controller is gone;
- reads back from /proc what the kernel says of each rank once it is the script, and tells where that is not the plan;
- holds the leases of its ranks' GPUs from before anything starts until nothing of it is left (leases.py beside this file);
- sees when a rank beats no more, looks at where the ranks here stand, and ends the attempt (hang.py beside this file);
- ends what it started by TERM, a grace, then KILL: by descent, never by name; torchrun and the ranks carry PR_SET_PDEATHSIG,
  so that a killed agent takes them along;
- reads and writes the shared run folder from threads only: a hung NFS must not stop it (once torchrun, whose program may lie
  there, is started). Its own state is in a node-local folder.

Commands: `start` (request on stdin; daemonizes, answers its pid) and `follow` (prints state changes and new lines as JSON).
`main(request)` serves what the controller asks over `Shell.ask`: `prepare`, `stop`, `state`. `follow` and `state` read shared
files from threads only. `start` writes the run's files itself and hangs while NFS does: so the last thing it does before there is
an agent is to look whether it was stopped, and `stop` does not wait for it to say so.

Events, each with time, attempt and node: started, finished, rank-failed, rank-hung (one a rank), torchrun-killed,
torchrun-failed, start-failed, agent-error, agent-terminated, agent-lost, node-lost, stopped, left-running; placement-differs,
which ends nothing. launch/diagnose.py names the first cause from them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import queue
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import traceback
from typing import Any, Callable, Dict, Generic, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple, TypeVar

Json = Dict[str, Any]
T = TypeVar("T")

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # include/uapi/linux/prctl.h
PIDFD_OPEN = 434  # system call number, the same on every architecture; Linux >= 5.3
TICK_S = 0.1
BEAT_S = 1.0
SHARED_WRITE_S = 2.0
KILL_WAIT_S = 5.0  # est.: SIGKILL takes effect at once except in uninterruptible sleep, which nothing ends
CONNECT_S = 1.0  # est.: one try to reach the lead; the next follows at once
LINGER_S = 5.0  # est.: what an ending lead waits for members that have not told their end
STRANGER_S = 5.0  # est.: what a connection to the gang port gets to say who it is
MOST_STRANGERS = 64  # keeps a port scanner from using up our descriptors
MOST_UNSENT = MOST_LINE = 1 << 20  # bytes; an event with its log lines has 10 KB
SHARED_READ_S = 3.0  # est.: reading the end of a log from an NFS that works
START_S = 14.0  # est.: a loaded node starts python in a second or two
LOCK_S = 15.0  # a `start` going on takes at most START_S, unless shared storage hangs; both within STALE_S of launch/jobs.py
START_WAIT_S = 60.0  # est.: leases, NFS and SSH may hold up the start of an attempt that is followed already
GAP_S = 2.0  # est.: an agent that has not looked for longer stood still itself, perhaps with its whole machine
GONE_S = 1.0  # est.: an agent that ends writes its end before it goes; a second look costs little
NAMED_S = 5.0  # est.: who starts an attempt follows it a second later; so long nobody else takes the lock
SUPERVISOR_SILENT_S = 15.0  # est.: a controller beats once a second, over SSH
STUCK_S = 60  # a follower whose reader takes nothing for this long ends
LOG_TAIL = 4000  # bytes of a log that go into an event
SCRIPT_S = 30.0  # est.: the wrapper becomes the script in milliseconds, a Python on a slow NFS takes longer
SETTLED_S = 1.0  # est.: what a wrapper around paths.python (conda run, taskset, sh) gets to become it
MOST_DIFFERENCES = 8  # events of one rank about its placement
MOST_SHOWN = 200  # letters of a variable's value in an event
LOST_ROUTE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
SUPERVISOR_LOCK, SUPERVISOR, START = "supervisor.lock", "supervisor.json", "start.json"
LOOK_S = 0.5  # between two looks at the beats of the ranks
YOUNG_S = 3600.0  # between two touches of the leases' files; what clears /tmp looks once a day
MARK_RUN, MARK_NODE, MARK_START = "R4090C_RUN", "R4090C_NODE", "R4090C_START"
KEPT_VARIABLES = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TMPDIR")


def beside(name: str) -> Any:
    """Return the module in the file `name`.py beside this one; python3 -I knows no way there. Not for what `main` serves."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name + ".py")
    spec = importlib.util.spec_from_file_location("r4090c_" + name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ----------------------------------------------------------------------------- files on the node


def local_path(run_id: str, node: str) -> str:
    """Return the node-local state folder `/tmp/r4090c-<uid>/<run>/<node>`."""
    return os.path.join("/tmp/r4090c-%d" % os.getuid(), run_id, node)


def local_folder(run_id: str, node: str) -> str:
    """Return `local_path`, made, and private to this account. Raises OSError, also when somebody else owns the top folder."""
    top = "/tmp/r4090c-%d" % os.getuid()
    os.makedirs(top, mode=0o700, exist_ok=True)
    info = os.lstat(top)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise OSError(errno.EPERM, "belongs to somebody else", top)
    os.chmod(top, 0o700)
    folder = local_path(run_id, node)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return folder


def write_text(path: str, text: str) -> None:
    """Write `text` to `path`, aside first, then renamed: a reader never sees half. Raises OSError that names the path."""
    aside = path + ".tmp"
    try:
        with open(aside, "w", encoding="utf-8") as handle:
            handle.write(text)
        os.replace(aside, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def read_json(path: str) -> Optional[Json]:
    """Return the JSON object in `path`, None when it is absent or not whole."""
    try:
        with open(path, encoding="utf-8") as handle:
            found = json.load(handle)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def tail(path: str, limit: int) -> str:
    """Return the last `limit` bytes of a text file, "" when it cannot be read."""
    try:
        with open(path, "rb") as handle:
            handle.seek(0, os.SEEK_END)
            handle.seek(max(0, handle.tell() - limit))
            return handle.read().decode("utf-8", "replace")
    except OSError:
        return ""


def free_bytes(folder: str) -> Optional[int]:
    """Return how much may be written to a folder's file system, None when it cannot be told."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def within(seconds: float, work: Callable[[], T], otherwise: T) -> T:
    """Return `work()`, or `otherwise` when it takes longer: how to touch a file system that may hang."""
    answers: List[T] = []
    thread = threading.Thread(target=lambda: answers.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else otherwise


class Aside(Generic[T]):
    """Does one thing after the other in a thread of its own: where one hangs, whoever asked does not."""

    def __init__(self) -> None:
        self.busy = False
        self._asked: queue.Queue[Callable[[], T]] = queue.Queue()
        self._answers: queue.Queue[T] = queue.Queue()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._answers.put(self._asked.get()())

    def ask(self, work: Callable[[], T]) -> None:
        """Have `work` done; only while not `busy`. It raises nothing."""
        self.busy = True
        self._asked.put(work)

    def answer(self) -> Optional[T]:
        """Return what `work` returned, once; None while there is nothing."""
        try:
            found = self._answers.get_nowait()
        except queue.Empty:
            return None
        self.busy = False
        return found


@contextlib.contextmanager
def held(path: str, patience_s: float) -> Iterator[None]:
    """Hold the lock file `path`. Raises TimeoutError when another process has it for longer than `patience_s`, OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(errno.ETIMEDOUT, "another start or stop of this run is going on", path) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


def tree_digest(root: str, names: Optional[Iterable[str]] = None) -> Optional[str]:
    """Return the sha256 over names and contents of the files below `root` (hex), None when it, or one of them, cannot be read.

    `names` None = all files but byte code. With names, files that a script left in the tree do not count. launch/sync.py
    computes the same over what it sends. Bytes throughout: file names need not be text, and locales differ.
    """
    top = os.fsencode(root)
    if not os.path.isdir(top):
        return None
    if names is None:
        found = []
        for folder, folders, files in os.walk(top):
            folders[:] = [name for name in folders if name != b"__pycache__"]
            found += [os.path.relpath(os.path.join(folder, name), top) for name in files]
    else:
        found = [name.encode("utf-8", "surrogateescape") for name in names]
    total = hashlib.sha256()
    for path in sorted(found):
        try:
            with open(os.path.join(top, path), "rb") as handle:
                content = hashlib.sha256(handle.read()).hexdigest()
        except OSError:
            return None
        total.update(path + b"\0" + content.encode() + b"\n")
    return total.hexdigest()


# ----------------------------------------------------------------------------- processes


class Stat(NamedTuple):
    """The fields of /proc/<pid>/stat we need. `start`: ticks since boot; `exit_status`: as of wait(2), of a zombie."""

    state: str
    parent: int
    start: int
    exit_status: int


def stat_of(pid: int) -> Optional[Stat]:
    """Return the Stat of `pid`, None when it is gone."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as handle:
            fields = handle.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return Stat(fields[0].decode(), int(fields[1]), int(fields[19]), int(fields[49]))


def living(found: Optional[Stat]) -> bool:
    """True when there is a process and it is not a zombie."""
    return found is not None and found.state not in "ZX"


def all_pids() -> List[int]:
    """Return the pids of this pid namespace."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def descendants(root: int) -> List[int]:
    """Return the living (not zombie) pids below `root`."""
    stats = {}
    for pid in all_pids():
        found = stat_of(pid)
        if found is not None:
            stats[pid] = found
    below, grown = {root}, True
    while grown:
        more = {pid for pid, found in stats.items() if found.parent in below and pid not in below}
        grown = bool(more)
        below |= more
    return sorted(pid for pid in below - {root} if living(stats.get(pid)))


def marked(run_id: str, node: Optional[str] = None, start_name: Optional[str] = None) -> List[int]:
    """Return the living pids of this account whose environment says they belong to `run_id` (and `node`).

    `start_name`: those that say they are of another start are left out; agents before this one said nothing.
    """
    want = {os.fsencode("%s=%s" % (MARK_RUN, run_id))}
    if node:
        want.add(os.fsencode("%s=%s" % (MARK_NODE, node)))
    found = []
    for pid in all_pids():
        if pid == os.getpid():
            continue
        try:
            with open("/proc/%d/environ" % pid, "rb") as handle:
                environment = set(handle.read().split(b"\0"))
        except OSError:
            continue
        starts = {entry for entry in environment if entry.startswith(MARK_START.encode() + b"=")}
        foreign = start_name is not None and starts and os.fsencode("%s=%s" % (MARK_START, start_name)) not in starts
        if want <= environment and not foreign and living(stat_of(pid)):
            found.append(pid)
    return found


def marks(run_id: str, node: str, start_name: str) -> Dict[str, str]:
    """Return the variables by which `marked` finds what a start has started."""
    return {MARK_RUN: run_id, MARK_NODE: node, MARK_START: start_name}


def send_signal(pids: Iterable[int], number: int) -> None:
    """Send a signal to each of `pids` that is still there."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            pass


def exit_code(status: int) -> int:
    """Return the exit code of a wait(2) status; negative = the signal that ended it."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def reap() -> Dict[int, int]:
    """Collect every dead child and return pid -> exit code."""
    ended: Dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = exit_code(status)


def end_all(find: Callable[[], List[int]], grace_s: float, pause: Callable[[float], None] = time.sleep) -> List[int]:
    """End every process `find()` returns: TERM, `grace_s`, then KILL until none is left. Return the pids that would not go."""
    send_signal(find(), signal.SIGTERM)
    grace_until = time.monotonic() + grace_s
    give_up_at = grace_until + KILL_WAIT_S
    while True:
        reap()
        left = find()
        now = time.monotonic()
        if left and now > grace_until:
            send_signal(left, signal.SIGKILL)
        if not left or now > give_up_at:
            return left
        pause(0.05)


def pidfd(pid: int) -> Optional[int]:
    """Return a descriptor that becomes readable when `pid` ends, None where the kernel has none. Closed on exec."""
    found = int(LIBC.syscall(PIDFD_OPEN, pid, 0))
    return found if found >= 0 else None


def oom_kills() -> Optional[int]:
    """Return how many processes the kernel has ended for want of memory since boot, None when it does not say."""
    text = head("/proc/vmstat", 1 << 16).decode("ascii", "replace")  # it cannot be read from its end
    match = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(match.group(1)) if match else None


FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
CLOSING = "closing signal SIG"
SIGNALLED = re.compile(r"SignalException: Process \d+ got signal: (\d+)")
"""What torchrun logs: its first failed rank; that it ends the other ranks; that it was itself asked to end.

torch/distributed/elastic/multiprocessing/api.py, torch 2.4 to 2.13.
"""


def failed_rank(text: str) -> Optional[Tuple[int, int, int]]:
    """Return (local_rank, pid, exit code) of the first failure torchrun's log tells; a negative code is a signal."""
    match = FAILED.search(text)
    return (int(match.group(2)), int(match.group(3)), int(match.group(1))) if match else None


# ----------------------------------------------------------------------------- what became of the plan

HIDDEN = "***"
URL_PASSWORD = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/@]*:[^\s/@]+@")
"""As in launch/env.py: a value with a password in it is never shown, whatever its variable is called."""


class Seen(NamedTuple):
    """What the kernel says of a process; None = it cannot be read.

    `cpus`, `memory_nodes`: lists like "0-3,8"; `policy`: the memory policy of its first mapping, "default" or "prefer:1".
    """

    environ: Optional[Dict[str, str]]
    cpus: Optional[str]
    memory_nodes: Optional[str]
    policy: Optional[str]


def look_at(pid: int, proc: str = "/proc") -> Seen:
    """Return what the kernel says of `pid`. May take long when its memory is being rearranged: not for the main thread."""
    folder = os.path.join(proc, str(pid))
    status = head(os.path.join(folder, "status"), 1 << 16).decode("ascii", "replace")
    variables = head(os.path.join(folder, "environ"), 1 << 22)
    pairs = [entry.partition(b"=") for entry in variables.split(b"\0") if b"=" in entry]
    mapping = head(os.path.join(folder, "numa_maps"), 4096).split(b"\n")[0].split()  # the whole of it takes seconds
    found = {key: re.search(r"^%s:[ \t]*(\S*)" % key, status, re.MULTILINE) for key in ("Cpus_allowed_list", "Mems_allowed_list")}
    cpus, memory_nodes = [match.group(1) if match else None for match in found.values()]
    return Seen(
        {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs} if variables else None,
        cpus,
        memory_nodes,
        mapping[1].decode("ascii", "replace") if len(mapping) > 1 else None,
    )


def head(path: str, limit: int) -> bytes:
    """Return the first `limit` bytes of a file, b"" when it cannot be read."""
    try:
        with open(path, "rb") as handle:
            return handle.read(limit)
    except OSError:
        return b""


def numbers(text: str) -> Set[int]:
    """Return the numbers of a kernel list like "0-3,8"."""
    found: Set[int] = set()
    for part in filter(None, text.split(",")):
        low, _, high = part.partition("-")
        found.update(range(int(low), int(high or low) + 1))
    return found


def ranges(found: Iterable[int]) -> str:
    """Return numbers as the kernel writes them: "0-3,8"."""
    parts: List[List[int]] = []
    for number in sorted(found):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join("%d" % low if low == high else "%d-%d" % (low, high) for low, high in parts)


def shown(value: Optional[str], hidden: bool) -> str:
    """Return the value of a variable as an event may tell it."""
    if value is None:
        return "not set"
    return HIDDEN if hidden or URL_PASSWORD.search(value) else value[:MOST_SHOWN]


def differences(rank: Json, environ: Dict[str, str], secret: Iterable[str], seen: Seen) -> List[Json]:
    """Return what the kernel says otherwise than the plan: {"what", "planned", "actual"} each; what is unknown is none.

    `rank`: its entry in the plan. `environ`: the variables it must have; those named in `secret` are compared and not told.
    """
    found = []
    if rank["cpus"] and seen.cpus is not None and numbers(seen.cpus) != set(rank["cpus"]):
        found.append({"what": "CPUs", "planned": ranges(rank["cpus"]), "actual": seen.cpus})
    node = rank["memory_node"]
    if node is not None and seen.memory_nodes is not None and node not in numbers(seen.memory_nodes):
        found.append({"what": "NUMA nodes it may have memory of", "planned": "%d among them" % node, "actual": seen.memory_nodes})
    elif node is not None and seen.policy is not None and seen.policy != "prefer:%d" % node:
        found.append({"what": "memory policy", "planned": "prefer:%d" % node, "actual": seen.policy})
    for name, value in sorted(environ.items()):
        if seen.environ is not None and seen.environ.get(name) != value:
            hidden = name in secret
            actual = shown(seen.environ.get(name), hidden)
            found.append({"what": name, "planned": shown(value, hidden), "actual": actual})
    return found


def look_at_script(pid: int, start: int, wrapper: str) -> Optional[Seen]:
    """Wait until the rank `pid` is no longer `wrapper` (a path) and return what the kernel says of it then.

    None when it ended before, or did not become the script in SCRIPT_S. `start`: ticks; a pid may be another process's by now.
    """
    since = time.monotonic()
    until, last, waiting = since + SCRIPT_S, [b""], True
    while time.monotonic() < until:
        words = head("/proc/%d/cmdline" % pid, 1 << 20).split(b"\0")
        if words != last:
            last, since = words, time.monotonic()
        waiting = last == [b""] or os.fsencode(wrapper) in last
        if not waiting and time.monotonic() - since > SETTLED_S:
            break
        found = stat_of(pid)
        if found is None or not living(found) or found.start != start:
            return None
        time.sleep(TICK_S)
    if waiting:
        return None
    seen, found = look_at(pid), stat_of(pid)
    return seen if found is not None and living(found) and found.start == start else None


# ----------------------------------------------------------------------------- the gang


class Peer:
    """One TCP connection of the gang, speaking JSON lines; never blocks."""

    def __init__(self, connection: socket.socket, name: str = "") -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.name = name
        self.since = self.heard = time.monotonic()
        self.closed = False  # the other side will say no more
        self.mute = False  # the network took it away: silence, so the lease decides
        self.finished = False  # we will say no more
        self._in = self._out = b""

    @property
    def unsent(self) -> bool:
        """True when something waits to be sent."""
        return bool(self._out) and not self.mute

    def send(self, message: Json) -> None:
        """Send one message, what the socket does not take now later."""
        if not self.finished and len(self._out) < MOST_UNSENT:
            self._out += json.dumps(message).encode() + b"\n"
            self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it. An error is left to `receive`, after what came in before it."""
        while self._out:
            try:
                sent = self.connection.send(self._out)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.mute = self.mute or error.errno in LOST_ROUTE
                self._out = b""
                return
            self._out = self._out[sent:]

    def finish(self) -> None:
        """Tell the other side that nothing more comes."""
        if not self.finished:
            self.finished = True
            try:
                self.connection.shutdown(socket.SHUT_WR)
            except OSError:
                pass

    def receive(self) -> List[Json]:
        """Return the messages that came in; sets `closed` at end of file. What is not a JSON object is {}."""
        if self.closed or self.mute:
            return []
        try:
            chunk = self.connection.recv(65536)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            # A lost route is silence; a reset is the peer's kernel saying that the process is gone.
            if error.errno in LOST_ROUTE:
                self.mute = True
            else:
                self.closed = True
            return []
        if not chunk:
            self.closed = True
            return []
        self.heard = time.monotonic()
        lines = (self._in + chunk).split(b"\n")
        self._in = lines.pop()
        if len(self._in) > MOST_LINE:
            self._in = b""
            lines.append(b"")
        messages = []
        for line in lines:
            try:
                message = json.loads(line.decode())
            except (ValueError, RecursionError):
                message = {}
            messages.append(message if isinstance(message, dict) else {})
        return messages

    def close(self) -> None:
        """Close the connection."""
        self.closed = True
        try:
            self.connection.close()
        except OSError:
            pass


class Loss(NamedTuple):
    """A broken gang: kind agent-lost or node-lost, which peer, and what was seen."""

    kind: str
    peer: str
    detail: str


class StartError(Exception):
    """The attempt cannot start here; the text says why."""


class Gang:
    """The bond between the agents of one attempt: a star of connections with the lead in its middle.

    A member says {"hello", "token", "attempt"} first. Then both sides: {"beat", "done"} every second, {"ending": cause} when
    the attempt is to end; members {"event"}; the lead {"all_done"}. A node alone has no gang.
    """

    def __init__(self, plan: Json, name: str, token: str, on_event: Callable[[Json], None]) -> None:
        self.names: List[str] = [node["name"] for node in plan["nodes"]]
        self.name = name
        self.leads = name == self.names[0]
        self.done: Set[str] = set()  # nodes whose torchrun ended well
        self.all_done = len(self.names) == 1
        self.ending: Optional[Json] = None  # the cause another agent told
        self._attempt, self._token = plan["attempt"], token
        self._address, self._port = plan["gang"]["address"], plan["gang"]["port"]
        self._lease_s, self._start_timeout_s = plan["gang"]["lease_s"], plan["gang"]["start_timeout_s"]
        self._start_until = time.monotonic() + self._start_timeout_s
        self._judged = time.monotonic()
        self._on_event = on_event
        self._listener: Optional[socket.socket] = None
        self._strangers: List[Peer] = []
        self._peers: Dict[str, Peer] = {}  # of a member: the lead only
        self._early: List[Json] = []  # what a member has to say before it reached the lead
        self._why_unreached = "not tried yet"
        self._told_ending: Optional[Json] = None
        self._last_beat = 0.0
        self._closing = False
        self._await_late = True

    def open(self) -> None:
        """On the lead, listen. Raises StartError."""
        if len(self.names) == 1 or not self.leads:
            return
        listener = socket.socket(socket.AF_INET6 if ":" in self._address else socket.AF_INET)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self._address, self._port))
            listener.listen(128)
        except OSError as error:
            listener.close()
            where = "%s:%d" % (self._address, self._port)
            if error.errno == errno.EADDRINUSE:
                raise StartError("port %s, where the agents meet, was taken by another process meanwhile" % where) from error
            if error.errno == errno.EADDRNOTAVAIL:
                raise StartError("the data address %s is not an address of %s" % (self._address, self.name)) from error
            raise StartError("cannot listen on %s: %s" % (where, error.strerror)) from error
        listener.setblocking(False)
        self._listener = listener

    # ------------------------------------------------------------------ talking

    def tell(self, message: Json) -> None:
        """Send `message` to all members, or to the lead."""
        if "ending" in message:
            self._told_ending = message
        for peer in self._peers.values():
            peer.send(message)
        if not self.leads and not self._peers:
            self._early.append(message)

    def tell_lead(self, message: Json) -> None:
        """Send `message` to the lead; the lead itself has nobody to tell."""
        if not self.leads:
            self.tell(message)

    def exchange(self, wait_s: float, watch: Iterable[int] = ()) -> None:
        """Send and take in what there is, after waiting up to `wait_s` for it or for a descriptor of `watch`.

        Only a member that has not reached the lead yet may take CONNECT_S more.
        """
        if not self.leads and not self._peers:
            self._connect()
        everyone = [peer for peer in [*self._peers.values(), *self._strangers] if not peer.closed and not peer.mute]
        readable: List[Any] = [peer.connection for peer in everyone] + list(watch)
        if self._listener is not None:
            readable.append(self._listener)
        select.select(readable, [peer.connection for peer in everyone if peer.unsent], [], wait_s)
        if self._listener is not None:
            self._accept(self._listener)
        for peer in list(self._peers.values()):
            peer.flush()
            for message in peer.receive():
                self._take(peer, message)
        if time.monotonic() - self._last_beat >= BEAT_S and not self._closing:
            self._last_beat = time.monotonic()
            for peer in self._peers.values():
                peer.send({"beat": time.time(), "done": self.name in self.done})

    def _accept(self, listener: socket.socket) -> None:
        while len(self._strangers) < MOST_STRANGERS:
            try:
                self._strangers.append(Peer(listener.accept()[0]))
            except OSError:  # nobody waits, or who waited has gone, or no descriptor is left
                break
        for stranger in list(self._strangers):
            messages = stranger.receive()
            name = str(messages[0].get("hello")) if messages else ""
            if messages and self._is_ours(name, messages[0]):
                stranger.name = name
                self._strangers.remove(stranger)
                self._peers[name] = stranger
                if self._told_ending is not None:
                    stranger.send(self._told_ending)
                for message in messages[1:]:
                    self._take(stranger, message)
            elif messages or stranger.closed or stranger.mute or time.monotonic() - stranger.since > STRANGER_S:
                stranger.close()
                self._strangers.remove(stranger)

    def _is_ours(self, name: str, hello: Json) -> bool:
        return (
            name in self.names[1:]
            and name not in self._peers
            and hello.get("token") == self._token
            and hello.get("attempt") == self._attempt
        )

    def _connect(self) -> None:
        try:
            connection = socket.create_connection((self._address, self._port), timeout=CONNECT_S)
        except OSError as error:
            self._why_unreached = error.strerror or str(error)
            return
        if connection.getsockname() == connection.getpeername():  # on one machine TCP can meet itself before the lead listens
            connection.close()
            return
        lead = Peer(connection, self.names[0])
        self._peers[lead.name] = lead
        lead.send({"hello": self.name, "token": self._token, "attempt": self._attempt})
        for message in self._early:
            lead.send(message)
        self._early = []

    def _take(self, peer: Peer, message: Json) -> None:
        if isinstance(message.get("event"), dict) and self.leads:
            self._on_event(dict(message["event"], received=time.time()))
        if message.get("done"):
            self.done.add(peer.name)
        if message.get("all_done") and not self.leads:
            self.all_done = True
        if isinstance(message.get("ending"), dict) and self.ending is None:
            self.ending = message["ending"]

    # ------------------------------------------------------------------ judging

    def loss(self) -> Optional[Loss]:
        """Return who is lost, None while the gang is whole. Nobody who is done, and nobody after the end, can be lost.

        Asked at every tick: the time between two questions tells whether we stood still.
        """
        if self.all_done:
            return None
        now = time.monotonic()
        stood_s, self._judged = now - self._judged, now
        if stood_s > GAP_S:  # what the others said meanwhile may not have come in yet, and they may have stood still as well
            for other in self._peers.values():
                other.heard = min(now, other.heard + stood_s)
        for name in self.names[1:] if self.leads else self.names[:1]:
            peer = self._peers.get(name)
            if name in self.done and self.leads:
                continue
            if peer is None:
                if now < self._start_until:
                    continue
                if self.leads:
                    detail = "its agent did not reach the lead in %g s" % self._start_timeout_s
                else:
                    where = (self._address, self._port, self._start_timeout_s, self._why_unreached)
                    detail = "its agent could not be reached at %s:%d in %g s: %s" % where
                return Loss("node-lost", name, detail)
            if peer.closed:
                return Loss("agent-lost", name, "the agent of %s closed its connection" % name)
            if now - peer.heard > self._lease_s:
                return Loss("node-lost", name, "nothing heard of %s for %g s" % (name, self._lease_s))
        return None

    def close(self, patience_s: float, await_late: bool = True) -> None:
        """Send what is left, say that nothing more comes, and wait at most `patience_s` for the others to do the same.

        An ending lead so hears the members' last events and tells the end to those that come late (`await_late`); a member
        that fails at once still reaches a lead that starts later.
        """
        self._closing = True
        self._await_late = await_late
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and self._awaited():
            for peer in self._peers.values():
                if not peer.unsent:
                    peer.finish()
            self.exchange(0.05)
        for peer in [*self._peers.values(), *self._strangers]:
            peer.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _awaited(self) -> bool:
        """True while somebody has more to say to us, or something from us to hear."""
        now = time.monotonic()
        may_come = (self._listener is not None or not self.leads) and not self.all_done and now < self._start_until
        late = may_come and self._await_late
        for name in self.names[1:] if self.leads else self.names[:1]:
            peer = self._peers.get(name)
            if peer is None and late:
                return True
            if peer is not None and not peer.closed and not peer.mute and now - peer.heard < self._lease_s:
                return True
        return False


# ----------------------------------------------------------------------------- the shared run folder


class SharedCopy:
    """Copies state, events and torchrun's log to the run folder, from a thread of its own: a hung NFS hangs only that."""

    def __init__(self, run_root: str, node: str, attempt: int, log: str) -> None:
        self._state = os.path.join(run_root, "agents", node + ".json")
        self._events = os.path.join(run_root, "events.jsonl")
        self._log = os.path.join(run_root, "attempt_%d" % attempt, "torchrun-%s.log" % node)
        self._local_log = log
        self._copied = 0  # bytes of the log
        self._lock = threading.Lock()
        self._text = ""
        self._lines: List[str] = []
        self._last = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def put(self, text: str, events: Iterable[Json] = (), now: bool = True, last: bool = False) -> None:
        """Have `text` written as the state and `events` appended; `now` False = within two seconds. `last` ends the thread."""
        with self._lock:
            self._text = text
            self._lines += [json.dumps(event) + "\n" for event in events]
            self._last = self._last or last
        if now or last:
            self._wake.set()

    def join(self, patience_s: float) -> None:
        """Wait for the last write."""
        self._thread.join(patience_s)

    def _work(self) -> None:
        while True:
            self._wake.wait(SHARED_WRITE_S)
            self._wake.clear()
            with self._lock:
                text, lines, last = self._text, list(self._lines), self._last
            try:
                self._write(text, lines)
            except OSError:
                time.sleep(0.2)  # the next round tries again; what was to be written is kept
                continue
            if last:
                return

    def _write(self, text: str, lines: List[str]) -> None:
        """Write all that is new; the state last, so that whoever reads an end in it finds the rest."""
        for folder in (os.path.dirname(self._state), os.path.dirname(self._log)):
            os.makedirs(folder, exist_ok=True)
        if lines:
            with open(self._events, "a", encoding="utf-8") as handle:
                handle.write("".join(lines))
            with self._lock:
                del self._lines[: len(lines)]
        if os.path.exists(self._local_log) and os.path.getsize(self._local_log) > self._copied:
            with open(self._local_log, "rb") as source, open(self._log, "ab") as copy:
                source.seek(self._copied)
                data = source.read()
                copy.write(data)
            self._copied += len(data)
        if text:
            write_text(self._state, text)


# ----------------------------------------------------------------------------- the agent


def unread_exit(ranks: Dict[str, Json], text: str) -> Optional[Tuple[str, Json]]:
    """Return (rank, record) of the rank that went by itself, and whose exit code torchrun took and tells in its log, `text`."""
    told = failed_rank(text)
    if told is None:
        return None
    _, pid, code = told
    for rank, record in ranks.items():
        if record["pid"] == pid and record["gone"] is not None and record["exit"] is None:
            return rank, dict(record, exit=code)
    return None


class Agent:
    """The agent of one node in one attempt.

    In its state, `ranks`: global rank -> pid, start (ticks), gone (time), exit (code). `placement`: global rank -> what the
    kernel said of it (see Seen; `variables`: how many were compared, None = unreadable) and `differs`: what is not as planned.
    `beats`: global rank -> phase, step and time, as it told last.
    """

    def __init__(self, request: Json) -> None:
        self.plan: Json = request["plan"]
        self.name: str = request["node"]
        self.mine: Json = next(node for node in self.plan["nodes"] if node["name"] == self.name)
        self.secrets: Dict[str, str] = request.get("secrets", {}).get(self.name, {})
        self.gang = Gang(self.plan, self.name, request["token"], self.keep)
        self.folder = local_folder(self.plan["run_id"], self.name)
        self.log = os.path.join(self.folder, "torchrun.log")
        self.shared = SharedCopy(self.plan["run_dir"], self.name, self.plan["attempt"], self.log)
        self.torchrun_pid = 0
        self.watched: Dict[str, int] = {}  # rank -> pidfd
        self.told: Set[str] = set()  # ranks whose failure is an event
        self.asked_to_stop: Optional[str] = None
        self.last_save = 0.0
        self.oom_kills = oom_kills()
        self.ranks: Dict[str, Json] = {}
        self.seen: List[Tuple[str, Seen]] = []  # by other threads
        self.placement: Dict[str, Json] = {}
        self.beats: Dict[str, Json] = {}
        self.events: List[Json] = []
        self.hang = beside("hang")
        self.limits = self.hang.limits_of(self.plan)
        told = self.hang.STARTING if str(self.plan.get("script", ("",))[0]).startswith("train/") else None  # ours do beat
        self.pulses = {entry["rank"]: self.hang.Pulse(told) for entry in self.mine["ranks"]}
        self.last_look = 0.0
        self.leases = beside("leases")
        self.held: List[int] = request.get("held", [])  # descriptors that `start` locked
        for descriptor in self.held:
            os.set_inheritable(descriptor, False)
        self.leases.tell_holder(self.held, self.leases.holder(self.plan["run_id"], self.name))
        self.last_touch = time.monotonic()
        me = stat_of(os.getpid())
        self.state: Json = {
            "schema": "r4090c.agent/1",
            "run_id": self.plan["run_id"],
            "run_dir": self.plan["run_dir"],
            "attempt": self.plan["attempt"],
            "node": self.name,
            "pid": os.getpid(),
            "start": me.start if me else None,
            "start_name": name_of(request["token"]),
            "process_group": os.getpgid(0),
            "started": time.time(),
            "heartbeat": time.time(),
            "state": "starting",
            "torchrun_pid": None,
            "ranks": self.ranks,
            "placement": self.placement,
            "beats": self.beats,
            "end": None,
            "events": self.events,
        }

    # ------------------------------------------------------------------ telling

    def save(self, new: Iterable[Json] = (), now: bool = True, last: bool = False) -> None:
        """Write the state locally and have it copied to the run folder; the lead has `new` events added to events.jsonl."""
        self.last_save = time.monotonic()
        if self.last_save - self.last_touch > YOUNG_S:
            self.last_touch = self.last_save
            self.leases.keep_young(self.held)
        self.state["heartbeat"] = time.time()
        text = json.dumps(self.state)
        try:
            write_text(os.path.join(self.folder, "state.json"), text)
        except OSError:
            pass  # a full /tmp must not end the training; the shared copy still tells
        self.shared.put(text, new if self.gang.leads else (), now=now, last=last)

    def event(self, kind: str, **more: Any) -> Json:
        """Record an event of this node; a member's also goes to the lead, whose clock then orders it."""
        event = dict({"time": time.time(), "attempt": self.plan["attempt"], "node": self.name, "kind": kind}, **more)
        self.keep(event)
        self.gang.tell_lead({"event": event})
        return event

    def keep(self, event: Json) -> None:
        """Record an event, of this node or of another."""
        self.events.append(event)
        self.save([event])

    # ------------------------------------------------------------------ torchrun and its ranks

    def environment(self) -> Dict[str, str]:
        """Return the variables that all ranks here must have, the secret ones too."""
        planned = {name: str(var["value"]) for name, var in self.mine["env"].items()}
        ours = dict(marks(self.plan["run_id"], self.name, self.state["start_name"]), R4090C_LOCAL=self.folder)
        return {**planned, **self.secrets, **ours}

    def start_torchrun(self) -> None:
        """Start torchrun with the planned environment. Raises StartError."""
        environment = {key: value for key, value in os.environ.items() if key in KEPT_VARIABLES}
        environment.update(self.environment())
        told = {"node": self.mine, "attempt": self.plan["attempt"], "run_dir": self.plan["run_dir"]}
        parent = os.getpid()

        def in_child() -> None:  # our other thread may hold locks at the fork: nothing here takes one
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:  # the agent died between fork and prctl
                os._exit(1)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored signals stay ignored over exec
            signal.signal(signal.SIGHUP, signal.SIG_DFL)

        try:
            write_text(os.path.join(self.folder, "node.json"), json.dumps(told))
            output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        except OSError as error:
            raise StartError("cannot write %s: %s" % (error.filename, error.strerror)) from error
        try:
            child = subprocess.Popen(
                self.mine["torchrun"], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment,
                cwd=self.mine["cwd"], start_new_session=True, close_fds=True, preexec_fn=in_child,  # noqa: PLW1509
            )  # fmt: skip
        except OSError as error:
            program = self.mine["torchrun"][0]
            what = "the training Python %s (paths.python)" % program if error.filename == program else error.filename
            raise StartError("cannot start torchrun: %s: %s" % (what, error.strerror)) from error
        finally:
            os.close(output)
        self.torchrun_pid = child.pid
        child.returncode = 0  # we wait for it ourselves: Popen must not
        self.state["torchrun_pid"] = child.pid
        self.state["state"] = "running"
        self.event("started", torchrun_pid=child.pid)

    def watch_ranks(self) -> None:
        """Note the ranks that came and those that went: when, and how where a zombie still tells."""
        changed = False
        for entry in self.mine["ranks"]:
            rank = str(entry["rank"])
            record = self.ranks.get(rank)
            if record is None:
                seen = read_json(os.path.join(self.folder, "rank-%s.json" % rank))
                if seen is None:
                    continue
                record = self.ranks[rank] = {"pid": seen["pid"], "start": seen["start"], "gone": None, "exit": None}
                descriptor = pidfd(record["pid"])
                if descriptor is not None:
                    self.watched[rank] = descriptor
                threading.Thread(target=self.look, args=(rank, record), daemon=True).start()
                changed = True
            if record["gone"] is None:
                found = stat_of(record["pid"])
                same = found is not None and found.start == record["start"]  # else the pid is another process's by now
                if found is None or not same or not living(found):
                    record["gone"] = time.time()
                    record["exit"] = exit_code(found.exit_status) if found is not None and same else None
                    if rank in self.watched:
                        os.close(self.watched.pop(rank))
                    changed = True
        if changed:
            self.save()

    def look(self, rank: str, record: Json) -> None:
        """Look at a rank once it is the script; in a thread of its own, as reading /proc may take long."""
        torchrun = self.mine["torchrun"]
        seen = look_at_script(record["pid"], record["start"], torchrun[torchrun.index("--") - 1])
        if seen is not None:
            self.seen.append((rank, seen))

    def check_placement(self) -> None:
        """Compare the ranks that have been looked at with the plan, and tell each difference; none ends the attempt."""
        while self.seen:
            rank, seen = self.seen.pop(0)
            planned = next(entry for entry in self.mine["ranks"] if str(entry["rank"]) == rank)
            environ = self.environment()
            environ.update({name: var["value"] for name, var in planned["env"].items()})
            environ.update({"RANK": rank, "LOCAL_RANK": str(planned["local_rank"])})
            found = differences(planned, environ, self.secrets, seen)
            self.placement[rank] = {
                "cpus": seen.cpus,
                "memory_nodes": seen.memory_nodes,
                "memory_policy": seen.policy,
                "variables": None if seen.environ is None else len(environ),
                "differs": [one["what"] for one in found],
            }
            for one in found[:MOST_DIFFERENCES]:
                told = "rank %s: %s: planned %s, but it is %s" % (rank, one["what"], one["planned"], one["actual"])
                self.event("placement-differs", rank=int(rank), detail=told, **one)
            if len(found) > MOST_DIFFERENCES:
                rest = [one["what"] for one in found[MOST_DIFFERENCES:]]
                told = "rank %s: %d more are not as planned: %s" % (rank, len(rest), ", ".join(rest)[:MOST_SHOWN])
                self.event("placement-differs", rank=int(rank), detail=told, what="more", planned="", actual="")
            self.save()

    def failed_here(self) -> Optional[Tuple[str, Json]]:
        """Return (rank, record) of the first rank that is known to have ended badly and is not yet an event."""
        bad = [(rank, record) for rank, record in self.ranks.items() if record["exit"] and rank not in self.told]
        return min(bad, key=lambda item: float(item[1]["gone"])) if bad else None

    def rank_failed(self, rank: str, record: Json) -> Json:
        """Record that `rank` failed, with the end of its log and whether the kernel ran out of memory meanwhile."""
        self.told.add(rank)
        log = os.path.join(self.plan["run_dir"], "attempt_%d" % self.plan["attempt"], rank + ".log")
        text = within(SHARED_READ_S, lambda: tail(log, LOG_TAIL), "") or tail(self.log, LOG_TAIL)
        kills = oom_kills()
        killed = kills - self.oom_kills if kills is not None and self.oom_kills is not None else None
        return self.event(
            "rank-failed",
            rank=int(rank),
            pid=record["pid"],
            exit_code=record["exit"],
            gone=record["gone"],
            oom_kills=killed,
            detail="rank %s ended, exit code %s" % (rank, record["exit"]),
            log_tail=text,
            free_bytes=within(SHARED_READ_S, lambda: free_bytes(self.plan["run_dir"]), None),
        )

    def torchrun_failed(self, code: Optional[int]) -> Json:
        """Record why torchrun ended with `code`, or is about to end (None)."""
        text = tail(self.log, 1 << 16)
        asked = SIGNALLED.search(text)
        if code is not None and (code < 0 or asked):
            number = -code if code < 0 else int(asked.group(1)) if asked else 0
            return self.event("torchrun-killed", signal=number, detail="torchrun was ended by signal %d" % number)
        found = self.failed_here()
        if found is None:
            told = failed_rank(text)
            if told is not None:
                local_rank, pid, rank_code = told
                rank = next((str(one["rank"]) for one in self.mine["ranks"] if one["local_rank"] == local_rank), str(local_rank))
                found = rank, {"pid": pid, "gone": self.ranks.get(rank, {}).get("gone"), "exit": rank_code}
        if found is None and code is None:
            gone = [(rank, record) for rank, record in self.ranks.items() if record["gone"] is not None]
            found = min(gone, key=lambda item: float(item[1]["gone"])) if gone else None
        if found is not None:
            return self.rank_failed(*found)
        return self.event(
            "torchrun-failed", exit_code=code, detail="torchrun ended, exit code %s" % code, log_tail=text[-LOG_TAIL:]
        )

    def frozen_at_its_end(self) -> bool:
        """True when all ranks here have ended well and torchrun, which was stopped (SIGSTOP), will never say so."""
        ended = [record["gone"] is not None and record["exit"] == 0 for record in self.ranks.values()]
        found = stat_of(self.torchrun_pid)
        return len(ended) == len(self.mine["ranks"]) and all(ended) and found is not None and found.state in "Tt"

    def hopeless(self) -> bool:
        """True when a rank has failed although torchrun is still there: it ends the others first, which may take long.

        Not at once for a rank ended by SIGTERM: torchrun may have sent it, having been asked to end itself. Nor while torchrun
        is dying: its ranks go as soon as its first thread has gone, its exit code comes after the last.
        """
        long_ago = time.time() - self.plan["gang"]["rank_grace_s"]
        gone = [record for record in self.ranks.values() if record["gone"] is not None]
        dying = not living(stat_of(self.torchrun_pid))
        if any(
            record["exit"] and (record["gone"] < long_ago or not (dying or record["exit"] == -signal.SIGTERM)) for record in gone
        ):
            return True
        if not any(record["exit"] is None and record["gone"] < long_ago for record in gone):
            return False
        text = tail(self.log, 1 << 16)  # torchrun was quicker than we to take the exit code
        return CLOSING in text or failed_rank(text) is not None

    # ------------------------------------------------------------------ hangs

    def watch_beats(self) -> None:
        """Take in what the ranks here told last."""
        if time.monotonic() - self.last_look < LOOK_S:
            return
        self.last_look = time.monotonic()
        for rank, pulse in self.pulses.items():
            beat = self.hang.read_beat(self.folder, rank)
            pulse.take(beat, self.last_look)
            if beat is not None:
                self.beats[str(rank)] = beat._asdict()

    def hung(self) -> Optional[Json]:
        """Return, as a cause, the rank here that has been silent for longest of those that are silent for too long."""
        if self.limits is None or self.name in self.gang.done:
            return None
        gone = {rank for rank, record in self.ranks.items() if record["gone"] is not None}
        stopped = set()
        for rank, record in self.ranks.items():
            seen = stat_of(record["pid"]) if record["gone"] is None else None
            if seen is not None and seen.start == record["start"] and seen.state in "Tt":
                stopped.add(int(rank))
        pulses = {rank: pulse for rank, pulse in self.pulses.items() if str(rank) not in gone}
        found = self.hang.hung_ranks(pulses, self.limits, stopped)
        if not found:
            return None
        place = {"time": time.time(), "attempt": self.plan["attempt"], "node": self.name, "kind": "rank-hung"}
        detail = "rank %d has told nothing for %.0f s" % (found[0].rank, found[0].silent_s)
        return dict(place, detail=detail, **found[0]._asdict())

    def look_at_hung(self, cause: Json) -> Json:
        """Look at the ranks here and record where each stands; return the event of the rank that `cause` names, else `cause`.

        Every node looks for the whole window, so that none ends its ranks while another still looks at those that wait for them.
        """
        look = self.hang.Look(self.targets(), self.mine["torchrun"][0], bool(self.held))
        until = time.monotonic() + self.hang.WINDOW_S
        while not look.over() or (len(self.gang.names) > 1 and time.monotonic() < until):
            self.gang.exchange(0.05)
        for rank, seen in look.result().items():
            pulse = self.pulses[rank]
            beat, limit_s = pulse.beat or self.hang.STARTING, pulse.limit_s(self.limits) if self.limits else 0.0
            event = self.event("rank-hung", **seen.event(self.hang.Hung(rank, beat.phase, beat.step, pulse.silent_s, limit_s)))
            if (cause["node"], cause["rank"]) == (self.name, rank):
                cause = event
        return cause

    def targets(self) -> List[Any]:
        """Return what to look at: the ranks that are there; torchrun for one that it has not started."""
        found = []
        log_folder = os.path.join(self.plan["run_dir"], "attempt_%d" % self.plan["attempt"])
        for entry in self.mine["ranks"]:
            rank = entry["rank"]
            record = self.ranks.get(str(rank), {"pid": self.torchrun_pid, "start": None, "gone": None})
            if record["gone"] is None:
                environ = dict(self.environment(), **{name: str(var["value"]) for name, var in entry["env"].items()})
                name = "stacks-%d.txt" % rank
                found.append(
                    self.hang.Target(
                        rank=rank,
                        pid=record["pid"],
                        start=record["start"],
                        log=os.path.join(log_folder, "%d.log" % rank),
                        environ=environ,
                        stacks=os.path.join(log_folder, name),
                        stacks_here=os.path.join(self.folder, name),
                        flight=os.path.join(log_folder, "flight-%d" % rank),
                    )
                )
        return found

    # ------------------------------------------------------------------ the attempt

    def run(self) -> None:
        """Run the attempt on this node to its end; return when nothing of it is left."""
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.signal(signal.SIGTERM, self.on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self.save()
        cause: Optional[Json] = None
        try:
            self.gang.open()
            self.start_torchrun()
            outcome, cause = self.attempt()
        except StartError as error:
            outcome, cause = "failed", self.event("start-failed", detail=str(error))
        except Exception as error:
            traceback.print_exc()  # into agent.log
            outcome, cause = "failed", self.event("agent-error", detail="%s: %s" % (type(error).__name__, error))
        if cause is None:
            end_all(lambda: descendants(os.getpid()), 0.5)  # what the script left behind, detached or not
            self.gang.close(LINGER_S)
        else:
            cause = self.end(cause)
        if not descendants(os.getpid()):  # else our own end, later, frees them
            self.leases.give_back(self.held)
            self.held = []
        self.state["state"] = "ended"
        self.state["end"] = {"outcome": outcome, "cause": cause, "time": time.time()}
        self.save(last=True)
        self.shared.join(SHARED_WRITE_S * 2)
        while self.held and descendants(os.getpid()):  # what would not go still has its GPU
            time.sleep(BEAT_S)
            reap()

    def on_signal(self, number: int, frame: object) -> None:
        """Note that somebody wants the end."""
        self.asked_to_stop = self.asked_to_stop or "signal %d" % number

    def attempt(self) -> Tuple[str, Optional[Json]]:
        """Return ("done", None), ("failed", cause) or ("stopped", cause); nothing is ended yet then."""
        while True:
            self.gang.exchange(TICK_S, self.watched.values())
            self.watch_ranks()
            self.check_placement()
            self.watch_beats()
            code = reap().get(self.torchrun_pid)
            if time.monotonic() - self.last_save > BEAT_S:
                self.save(now=False)
            if self.asked_to_stop:
                asked = read_json(os.path.join(self.folder, "stop.json"))
                meant = asked is not None and asked.get("start") in (None, self.state["start_name"])
                if asked is None or not meant:  # the node shuts down, or somebody ended us by hand: nobody wants the run to end
                    return "failed", self.event(
                        "agent-terminated", detail="the agent was asked to end by %s" % self.asked_to_stop
                    )
                by, follows = asked.get("by"), bool(asked.get("follows"))
                return "stopped", self.event("stopped", by=by, follows=follows, detail="asked to stop")
            if self.name in self.gang.done:
                code = None
            elif code is None and self.frozen_at_its_end():
                send_signal([self.torchrun_pid], signal.SIGKILL)
                code = 0
            if code == 0:
                self.gang.done.add(self.name)
                self.event("finished")
                self.gang.tell({"done": True})
            elif code is not None:
                return "failed", self.torchrun_failed(code)
            elif self.name not in self.gang.done and self.hopeless():
                return "failed", self.torchrun_failed(None)
            hung = self.hung() if self.gang.ending is None else None
            if hung is not None:
                return "failed", hung
            if self.gang.ending is not None:
                return ("stopped" if self.gang.ending.get("kind") == "stopped" else "failed"), self.gang.ending
            loss = self.gang.loss()
            if loss is not None:
                return "failed", self.event(loss.kind, peer=loss.peer, detail=loss.detail)
            if self.gang.leads and self.gang.done.issuperset(self.gang.names):
                self.gang.all_done = True
                self.gang.tell({"all_done": True})
            if self.gang.all_done and self.name in self.gang.done:
                return "done", None

    def end(self, cause: Json) -> Json:
        """End all that runs here for `cause` and see to it that the others do; what failed here before is told first.

        Return the cause, with what was seen where a rank hung.
        """
        self.state["state"] = "ending"
        self.gang.tell({"ending": cause})
        self.save()
        found = self.failed_here()
        if found is not None and cause["node"] != self.name:  # it may be the first cause: others noticed sooner
            self.rank_failed(*found)
        if cause["kind"] == "rank-hung":
            try:
                cause = self.look_at_hung(cause)
            except Exception:
                traceback.print_exc()  # into agent.log; what hangs is ended all the same
                if cause["node"] == self.name:
                    self.keep(cause)
        left = end_all(lambda: descendants(os.getpid()), self.plan["grace_s"], self.gang.exchange)
        unread = unread_exit(self.ranks, tail(self.log, 1 << 16)) if cause["node"] != self.name and not self.told else None
        if unread is not None:  # torchrun, which knew how it had ended, has written so by now
            self.rank_failed(*unread)
        if left:
            self.event("left-running", pids=left, detail="would not go, even by SIGKILL")
        self.gang.close(LINGER_S, await_late=cause["kind"] != "stopped")  # who stops us stops the others as well
        return cause


# ----------------------------------------------------------------------------- commands


def is_alive(found: Optional[Json]) -> bool:
    """True when the process that wrote the agent state `found` lives."""
    if found is None:
        return False
    now = stat_of(int(found["pid"]))
    return now is not None and living(now) and now.start == found.get("start")


def name_of(token: str) -> str:
    """Return what a start may be called in a file: its token is a secret."""
    return hashlib.sha256(token.encode()).hexdigest()[:16]


def start(request: Json) -> Json:
    """Take the leases, write the run's files (on the lead), start the agent, and return {"pid", "state"} or {"error"}.

    {"error", "busy"} when another run has one of the GPUs (leases.py); then nothing was written or started.
    """
    try:
        folder = local_folder(request["plan"]["run_id"], request["node"])
        with held(os.path.join(folder, "lock"), LOCK_S):
            return start_held(request, folder)
    except OSError as error:
        return {"error": "%s: %s" % (error.filename, error.strerror)}


def stop_file(start_name: str) -> str:
    """Return the name of the file that keeps the start `start_name` from happening; being of one start, it needs no lock."""
    return "stop-%s.json" % start_name


def stopped_before(folder: str, start_name: str) -> Optional[Json]:
    """Return the answer of a start that was stopped before there was an agent, None while nobody has."""
    told = read_json(os.path.join(folder, stop_file(start_name)))
    return None if told is None else {"error": "stopped by %s before it started" % told.get("by")}


def start_held(request: Json, folder: str) -> Json:
    """Do what `start` does while no other start or stop of this run goes on here."""
    plan, node, start_name = request["plan"], request["node"], name_of(request["token"])
    other = read_json(os.path.join(folder, "state.json"))
    if other is not None and is_alive(other):
        return {"error": "attempt %s of this run still goes on here (pid %d)" % (other["attempt"], other["pid"])}
    refused = stopped_before(folder, start_name)
    if refused is not None:
        return refused
    # Before anything that may hang: a stop that names no start means this one too.
    write_text(os.path.join(folder, START), json.dumps({"start_name": start_name}))
    stopped = read_json(request["unless"]) if request.get("unless") else None
    if stopped is not None:
        return {"error": "stopped by %s before it started" % stopped.get("by")}
    wanted = next(one for one in plan["nodes"] if one["name"] == node).get("leases") or []
    if not wanted:
        return start_daemon(request, folder, [])
    leases = beside("leases")
    taken, busy = leases.take(wanted, leases.holder(plan["run_id"], node))
    if busy:
        return {"error": leases.tell(busy, time.time()), "busy": busy}
    try:
        return start_daemon(dict(request, held=taken), folder, taken)
    finally:
        leases.give_back(taken)  # the agent has them too by now, or is not there


def start_daemon(request: Json, folder: str, leases: List[int]) -> Json:
    """Do what `start` does once nothing forbids it; the agent gets the descriptors `leases`. Hangs while shared storage does."""
    plan, node, start_name = request["plan"], request["node"], name_of(request["token"])
    for name in os.listdir(folder):
        if name not in ("lock", SUPERVISOR_LOCK, SUPERVISOR, START) and not name.startswith(stop_file(start_name)):
            with contextlib.suppress(FileNotFoundError):  # a stop, which does not wait for us, has just renamed it
                os.unlink(os.path.join(folder, name))
    if request.get("supervisor"):  # whose follower takes the lock in a moment
        write_text(os.path.join(folder, SUPERVISOR), json.dumps(dict(request["supervisor"], expected=True)))
    try:
        for path in request.pop("folders", ()):
            os.makedirs(path, exist_ok=True)
        for path in request.pop("outdated", ()):
            if os.path.exists(path):
                os.unlink(path)
        for path, text in request.pop("files", {}).items():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            write_text(path, text)
    except OSError as error:
        return {"error": "cannot write the run folder: %s: %s" % (error.filename, error.strerror)}
    log = os.path.join(folder, "agent.log")
    refused = stopped_before(folder, start_name)  # the last thing: whatever hung above, who asked has gone long ago
    if refused is not None:
        return refused
    with open(log, "wb") as output:
        # The marks must stand in /proc/<pid>/environ, which only an exec sets.
        environment = dict(os.environ, **marks(plan["run_id"], node, start_name))
        argv = [sys.executable, "-I", "-S", os.path.abspath(__file__), "daemon"]
        daemon = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment, cwd="/", start_new_session=True,
            pass_fds=leases,
        )  # fmt: skip
    assert daemon.stdin is not None
    try:
        with daemon.stdin as pipe:
            pipe.write(json.dumps(request).encode())
    except BrokenPipeError:
        pass  # it died: told below
    deadline = time.monotonic() + START_S
    over = False
    while not over:
        over = daemon.poll() is not None or time.monotonic() > deadline  # then one last look: it may have failed, and said so
        found = read_json(os.path.join(folder, "state.json"))
        if found is not None:
            return {"pid": daemon.pid, "state": found["state"]}
        time.sleep(0.01)
    said = tail(log, LOG_TAIL).strip().splitlines()
    how = "did not come up within %g s" % START_S if daemon.poll() is None else "ended at once"
    return {"error": "the agent %s%s" % (how, ": " + said[-1] if said else "")}


def daemon() -> None:
    """Be the agent: the request comes on stdin."""
    request = json.load(sys.stdin)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    Agent(request).run()


def state(run_id: str, node: str) -> Optional[Json]:
    """Return the agent's last state with `alive`: whether its process is there. None when there never was one."""
    found = read_json(os.path.join(local_path(run_id, node), "state.json"))
    if found is None:
        return None
    alive = is_alive(found)
    if not alive:
        found = whole_state(found)
    return dict(found, alive=alive)


def whole_state(found: Json) -> Json:
    """Return the state of an agent that is gone: the copy in the run folder when only that tells the end (/tmp was full)."""
    if found.get("end") is None:
        return ending_of(found, within(SHARED_READ_S, lambda: read_json(copy_path(found)), None))
    return found


def copy_path(found: Json) -> str:
    """Return where the run folder has the copy of an agent's state."""
    return os.path.join(found["run_dir"], "agents", found["node"] + ".json")


def ending_of(found: Json, copy: Optional[Json]) -> Json:
    """Return the copy of an agent's state where that is of the same agent and tells its end, else the state."""
    if copy is not None and (copy.get("pid"), copy.get("start")) == (found["pid"], found["start"]) and copy.get("end"):
        return copy
    return found


def prepare(tree: str, names: Optional[List[str]], ports: int) -> Json:
    """Return the digest of the code tree here, and `ports` TCP ports that are free now."""
    opened = [socket.socket() for _ in range(ports)]
    for one in opened:
        one.bind(("", 0))
    free = [one.getsockname()[1] for one in opened]
    for one in opened:
        one.close()
    return {"digest": tree_digest(tree, names), "ports": free}


def stop(request: Json) -> Json:
    """Ask the agent to end the attempt, wait for it, then end whatever still carries the run's mark. Return what was done.

    `token`, or `start_name`, what files call it: the start this stop is for, None = whatever there is of the run; when it comes
    later, or hangs and goes on later, it is refused, and what another start has started is left alone. `follows`: the attempt has
    failed already elsewhere, so this stop is not its cause.
    """
    run_id, node, token = request["run_id"], request["node"], request.get("token")
    folder = local_path(run_id, node)
    start_name = name_of(token) if token else request.get("start_name")
    told = json.dumps({"by": request["by"], "follows": bool(request.get("follows")), "start": start_name})
    found = None
    if start_name or os.path.isdir(folder):
        folder = local_folder(run_id, node)
        if start_name:  # before the lock: a start that hangs has that
            note(os.path.join(folder, stop_file(start_name)), told)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(held(os.path.join(folder, "lock"), LOCK_S))
            except OSError:  # a start that hangs, or a full /tmp, must not keep us from ending what there is
                hangs = read_json(os.path.join(folder, START))
                if not start_name and hangs is not None:
                    note(os.path.join(folder, stop_file(str(hangs.get("start_name")))), told)
            found = read_json(os.path.join(folder, "state.json"))
            if start_name and found is not None and is_alive(found) and found.get("start_name") != start_name:
                return {"had_agent": False, "swept": [], "left": [], "state": None}  # another attempt is none of its business
            note(os.path.join(folder, "stop.json"), told)
        if found is not None and is_alive(found):
            send_signal([found["pid"]], signal.SIGTERM)
            deadline = time.monotonic() + request["grace_s"] + KILL_WAIT_S + LINGER_S
            while time.monotonic() < deadline and is_alive(found):
                time.sleep(0.05)
    before = marked(run_id, node, start_name)
    left = end_all(lambda: marked(run_id, node, start_name), 0.5) if before else []
    return {"had_agent": found is not None, "swept": before, "left": left, "state": state(run_id, node)}


def note(path: str, text: str) -> None:
    """Write `text` to `path` where that can be written: a full /tmp must not keep a stop from ending what there is."""
    with contextlib.suppress(OSError):
        write_text(path, text)


# ----------------------------------------------------------------------------- following


def new_lines(
    path: str, offset: int, whole: bool = False, inode: Optional[int] = None
) -> Tuple[List[Tuple[str, int]], int, Optional[int]]:
    """Return ([(line, offset after it)], new offset, inode) of a growing file, at most 1 MiB at a time.

    A line without its end is left for later, unless it fills all of that, or `whole` says that nothing more comes. `inode`: what
    the offset belongs to, None = not known: a run that is resumed puts a shorter metrics.jsonl in the place of the old one.
    """
    try:
        with open(path, "rb") as handle:
            found = os.fstat(handle.fileno())
            if found.st_size < offset or inode not in (None, found.st_ino):
                offset = 0  # it was written anew
            handle.seek(offset)
            data = handle.read(MOST_LINE)
    except OSError:
        return [], offset, inode
    pieces = data.split(b"\n")
    rest = pieces.pop()
    lines = []
    for piece in pieces:
        offset += len(piece) + 1
        lines.append((piece.decode("utf-8", "replace"), offset))
    if rest and (len(rest) == MOST_LINE or (whole and len(data) < MOST_LINE)):
        offset += len(rest)
        lines.append((rest.decode("utf-8", "replace"), offset))
    return lines, offset, found.st_ino


class Claim:
    """A controller's claim to supervise a run: a kernel lock on the lead, held by its follower, and so free when that is gone.

    The controller says something on standard input at least once a second: a machine that fell off the network says nothing.
    """

    def __init__(self, folder: str, me: Json) -> None:
        self.folder, self.me = folder, me
        self._lock: Optional[int] = None
        self._told = False  # the file says that it is ours
        self._heard = time.monotonic()

    def silent(self) -> bool:
        """True when the controller has gone, or has not been heard for SUPERVISOR_SILENT_S."""
        while select.select([0], [], [], 0)[0]:
            if not os.read(0, 4096):
                return True
            self._heard = time.monotonic()
        return time.monotonic() - self._heard > SUPERVISOR_SILENT_S

    def named(self) -> Optional[Json]:
        """Return who the start named, and is still expected to take the lock; None when nobody is.

        Who has had the lock is expected no longer: its follower took it, and where that is gone the lock is free.
        """
        path = os.path.join(self.folder, SUPERVISOR)
        try:
            age_s = time.time() - os.stat(path).st_mtime
        except OSError:
            return None
        told = read_json(path) if abs(age_s) < NAMED_S else None
        return told if told is not None and told.get("expected") else None

    def holder(self, begun: bool = True) -> Optional[Json]:
        """Return who supervises: `me`, taking the lock when it is free, or who has it; None when that cannot be told.

        `begun` False: the attempt has not begun here. Then the lock is for whom its start has named, and for nobody else yet.
        """
        if self._lock is None:
            named = self.named()
            ours = named is not None and named.get("id") == self.me.get("id")
            if not ours and (named is not None or not begun):
                return named
            try:
                lock = os.open(os.path.join(self.folder, SUPERVISOR_LOCK), os.O_RDWR | os.O_CREAT, 0o600)
            except OSError:
                return None
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(lock)
                return read_json(os.path.join(self.folder, SUPERVISOR)) if error.errno == errno.EWOULDBLOCK else None
            self._lock = lock
        if not self._told:  # a full /tmp takes the name later; the lock is ours all the same
            with contextlib.suppress(OSError):
                write_text(os.path.join(self.folder, SUPERVISOR), json.dumps(self.me))
                self._told = True
        return self.me

    def let_go(self) -> None:
        """Free the lock: a thread that hangs in the kernel may keep this process, and all that it has open, for long."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class Lines:
    """The new lines of one growing file on storage that may hang."""

    def __init__(self, name: str, path: str, offset: int) -> None:
        self.name = name
        self.over = False  # nothing more comes, and all was told
        self._path, self._offset = path, offset
        self._inode: Optional[int] = None
        self._whole = False
        self._aside: Aside[Tuple[List[Tuple[str, int]], int, Optional[int]]] = Aside()

    def take(self, whole: bool = False) -> List[Tuple[str, int]]:
        """Return the lines (see `new_lines`) that have been read by now, and have more read; `whole`: nothing more comes."""
        lines: List[Tuple[str, int]] = []
        answer = self._aside.answer()
        if answer is not None:
            lines, self._offset, self._inode = answer
            self.over = self._whole and not lines
        if not self._aside.busy and not self.over:
            self._whole = whole
            path, offset, inode = self._path, self._offset, self._inode
            self._aside.ask(lambda: new_lines(path, offset, whole, inode))
        return lines


class Look(NamedTuple):
    """What there is of the attempt that is followed. `unseen`: it has not begun here; `gone`: its agent told no end."""

    state: Optional[Json]
    unseen: bool
    ended: bool
    gone: bool


def of_attempt(attempt: Optional[int], begun: bool, seen: Optional[Json], found: Optional[Json]) -> Tuple[Optional[Json], bool]:
    """Return (the state of `attempt`, whether another attempt has taken its place), as the state file says `found`.

    `seen`: its last state so far; `begun`: it has begun here for certain. `attempt` None: whatever is there is followed.
    """
    if attempt is None or (found is not None and found["attempt"] == attempt):
        return found, False
    return seen, found is not None and (begun or seen is not None or found["attempt"] > attempt)


class Unread(Exception):
    """Nobody reads what a follower tells."""


class Follower:
    """Tells a controller what is new of an attempt here; see `follow`."""

    def __init__(self, run_id: str, node: str, files: List[List[Any]], me: Optional[Json], attempt: Optional[int], begun: bool):
        folder = local_path(run_id, node)
        self._path = os.path.join(folder, "state.json")
        self._attempt, self._begun = attempt, begun
        self._lines = [Lines(name, path, offset) for name, path, offset in files]
        self._claim = Claim(folder, me) if me is not None else None
        self._supervisor: Optional[Json] = None
        self._seen: Optional[Json] = None
        self._told: Optional[Json] = None
        self._since = time.monotonic()
        self._missing_since: Optional[float] = None
        self._copy: Aside[List[Optional[Json]]] = Aside()
        self._copies: List[Optional[Json]] = []  # the run folder's, of an agent that is gone, as read last
        self._beat = 0.0

    def run(self) -> None:
        """Tell what is new until the agent has ended, or nobody listens."""
        try:
            while self._claim is None or not self._claim.silent():
                if self._step():
                    return
                time.sleep(TICK_S)
        except Unread:
            return
        finally:
            if self._claim is not None:
                self._claim.let_go()

    def _look(self) -> Look:
        state, replaced = of_attempt(self._attempt, self._begun, self._seen, read_json(self._path))
        if self._attempt is not None:
            self._seen = state
        now = time.monotonic()
        if replaced:
            return Look(state, False, False, True)
        if self._attempt is not None and state is None and not self._begun:
            return Look(None, True, False, now - self._since > START_WAIT_S)
        if is_alive(state):
            self._missing_since, self._copies = None, []
            return Look(state, False, state is not None and state["state"] == "ended", False)
        if self._missing_since is None:
            self._missing_since = now
        missing_s = now - self._missing_since
        if state is not None and state.get("end") is None and missing_s > GONE_S / 2:
            state = self._as_copied(state)
        patience_s = GONE_S if state is None or self._copies else GONE_S + SHARED_READ_S
        ended = state is not None and state["state"] == "ended"
        return Look(state, False, ended, not ended and missing_s > patience_s)

    def _as_copied(self, state: Json) -> Json:
        """Return `whole_state(state)` as far as the run folder has told by now."""
        self._copies = self._copy.answer() or self._copies
        if not self._copy.busy:
            self._copy.ask(lambda: [read_json(copy_path(state))])
        return ending_of(state, self._copies[0]) if self._copies else state

    def _step(self) -> bool:
        """Tell what is new; return True when there was an end."""
        look = self._look()
        # Whoever supervised to the end decides what follows it, although its own follower, with the lock, has gone by now.
        holder = self._claim.holder(not look.unseen) if self._claim is not None and not look.ended and not look.gone else None
        if holder is not None and holder != self._supervisor:
            self._supervisor = holder
            emit({"supervisor": holder})
        if look.ended or look.gone:
            self._tell_last_lines()
            self._tell_state(look.state)
            if look.gone:
                emit({"agent_gone": True, "state": look.state})
            return True
        self._tell_state(look.state)
        for lines in self._lines:
            self._tell_lines(lines)
        self._tell_beat()
        return False

    def _tell_state(self, state: Optional[Json]) -> None:
        core = None if state is None else {key: value for key, value in state.items() if key != "heartbeat"}
        if core != self._told:
            self._told = core
            emit({"state": state})

    def _tell_lines(self, lines: Lines, whole: bool = False) -> bool:
        """Tell what has come of a file; return whether anything has."""
        found = lines.take(whole)
        for line, offset in found:
            emit({"line": [lines.name, line], "offset": offset})
        return bool(found)

    def _tell_last_lines(self) -> None:
        """Tell what there still is, the state having been read before; what hangs for SHARED_READ_S is left out."""
        until = time.monotonic() + SHARED_READ_S
        while time.monotonic() < until and not all(lines.over for lines in self._lines):
            for lines in self._lines:
                if self._tell_lines(lines, whole=True):
                    until = time.monotonic() + SHARED_READ_S
            self._tell_beat()
            time.sleep(0.01)

    def _tell_beat(self) -> None:
        if time.monotonic() - self._beat > BEAT_S:
            self._beat = time.monotonic()
            emit({"beat": time.time()})


def follow(
    run_id: str,
    node: str,
    files: List[List[Any]],
    me: Optional[Json] = None,
    attempt: Optional[int] = None,
    begun: bool = False,
) -> None:
    """Print what is new as JSON lines until the agent has ended.

    `me`: the controller that wants to supervise the run. Then {"supervisor"} first, and when it changes: who does.
    {"line": [name, text], "offset"} of the `files`, [[name, path, offset]]; {"state"} when it changed, before the lines that
    came with it but after the last ones; those are left out where the files' storage hangs.
    {"beat"} every second, whatever hangs; {"agent_gone", "state"} when the agent is not there and told no end. Ends when
    nobody reads any more, and with `me` when that says nothing any more.

    `attempt`: the one that is followed, None = whatever is there. The state of an earlier one counts as none; it may begin within
    START_WAIT_S, unless it is known to have `begun` here. A later one says that it is over.
    """
    Follower(run_id, node, files, me, attempt, begun).run()


def emit(value: Json) -> None:
    """Print one JSON line at once. Raises Unread when the reader is gone; one that takes nothing for STUCK_S ends us."""
    signal.alarm(STUCK_S)
    try:
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()
    except OSError as error:
        raise Unread from error


def main(request: Json) -> Optional[Json]:
    """Serve one question of the controller (through `Shell.ask`)."""
    do = request["do"]
    if do == "stop":
        return stop(request)
    if do == "state":
        return state(request["run_id"], request["node"])
    if do == "prepare":
        return prepare(request["tree"], request.get("names"), request["ports"])
    raise ValueError("unknown request %r" % do)


if __name__ == "__main__" and len(sys.argv) > 1:
    if sys.argv[1] == "start":
        print(json.dumps(start(json.load(sys.stdin))))
    elif sys.argv[1] == "daemon":
        daemon()
    elif sys.argv[1] == "follow":
        what = json.loads(sys.argv[2])
        follow(what["run_id"], what["node"], what["files"], what.get("supervisor"), what.get("attempt"), bool(what.get("begun")))
        os._exit(0)  # neither a reader that has gone nor a thread that hangs keeps us
