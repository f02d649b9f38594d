"""The sampler: prints what a node does now, as one JSON line every `interval_s`, until nobody reads any more.

Standard library only, Python >= 3.8; sent in argv by launch/watch.py, so a node needs nothing of ours. One thread that waits for
descriptors, and two kinds of children, since what they do may hang for ever:

- `nvidia-smi`, one query at a time with a limit; one that will not even die is waited for, and no second one is started;
- a reader of what may lie on NFS (metrics.jsonl, plan.json, statvfs): a fork that answers over a pipe and is killed when it
  does not.

Text of the kernel and of tools is sent as it is and parsed by launch/live.py. Whatever could not be read says so ({"error"}) and
is never a number.

A line: {"schema", "node", "time", "monotonic", "stat", "loadavg", "meminfo", "netdev" (texts), "rdma": {"mlx5_0:1": {counter:
text}}, "gpus", "apps": null (not asked) or {"text", "fields", "rc", "age_s"} or {"error"}, "disks": {path: {"size", "free"} or
{"error"}}, "leases": what launch/leases.py tells of who holds GPUs, "runs": [the agents' states, shortened, with "plan", "waits"
(who starts the next attempt, after an end) and, on the lead, "metrics"]}.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Dict, NoReturn

Json = Dict[str, Any]

SCHEMA = "r4090c.sample/1"
STUCK_S = 60  # nobody takes a line for this long: the end
SMI_LIMIT_S = 20.0  # as in netcheck.facts.gpus: 8 GPUs without persistence mode take several seconds
SHARED_LIMIT_S = 10.0  # est.: an NFS that works answers within a second
PATIENCE, PATIENCE_S = 0.5, 2.0  # a line waits for its answers so long: share of the interval, at most
APPS_EVERY_S = 10.0  # est.: processes come and go rarely, and asking for them costs another nvidia-smi
ENDED_SHOWN_S = 60.0  # est.: how long a run that has ended is still told
WAITS_S = 3600.0  # est.: within this after an attempt's end the next one is there, or nobody waits to start it
MOST_TEXT = 1 << 17  # bytes of one tool's answer: 32 GPUs have 6 KB
TAIL = 1 << 15  # bytes of metrics.jsonl that are read: about 80 steps
MOST_METRICS = 32  # lines that are sent: enough for a median
FIELDS = (
    "index", "name", "uuid", "pci.bus_id", "utilization.gpu", "memory.used", "memory.total", "power.draw", "power.limit",
    "temperature.gpu", "clocks.current.sm",
)  # fmt: skip
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active", "")
"""The name since driver 535, the one before, none. One unknown field makes nvidia-smi refuse the whole query."""
APPS = ("pid", "process_name", "used_memory", "gpu_uuid")
RDMA_COUNTERS = (
    "port_rcv_data", "port_xmit_data", "symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors",
    "port_rcv_remote_physical_errors", "port_xmit_discards", "local_link_integrity_errors", "excessive_buffer_overrun_errors",
    "out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "implied_nak_seq_err", "rx_icrc_encapsulated", "out_of_buffer",
    "retry_exceeded_err", "rnr_nak_retry_err", "np_cnp_sent", "rp_cnp_handled",
)  # fmt: skip
"""Documentation/ABI/stable/sysfs-class-infiniband and NVIDIA's "Understanding mlx5 Linux Counters"; as netcheck/counters.py."""
LOCAL = "/tmp"
"""Where the agents keep their states; on a disk of the node."""
STATE_KEYS = ("run_id", "run_dir", "attempt", "node", "state", "started", "heartbeat", "ranks", "beats")


def text_of(path: str, limit: int = MOST_TEXT) -> str:
    """Return the text of a file of the kernel, "" when it cannot be read."""
    try:
        with open(path, "rb") as handle:
            return handle.read(limit).decode("utf-8", "replace")
    except OSError:
        return ""


def json_of(path: str) -> Json | None:
    """Return the JSON object in `path`, None when there is none."""
    try:
        found = json.loads(text_of(path, 1 << 24))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


# ----------------------------------------------------------------------------- nvidia-smi


class Query:
    """A program that is asked again and again, never twice at the same time. `poll` and `ask` do not wait."""

    def __init__(self, limit_s: float) -> None:
        self.answer: tuple[str, float] | None = None  # text, monotonic seconds
        self.error = "not asked yet"
        self.rc: int | None = None
        self.limit_s = limit_s
        self.child: subprocess.Popen[bytes] | None = None
        self.began = 0.0
        self.silent_since: float | None = None  # monotonic seconds; over all tries since the last answer
        self.read = b""

    @property
    def descriptor(self) -> int | None:
        """Return what becomes readable when there is something to poll."""
        return self.child.stdout.fileno() if self.child is not None and self.child.stdout is not None else None

    def ask(self, argv: list[str]) -> None:
        """Start the program, unless the last one is still there."""
        if self.child is not None:
            return
        self.began, self.read = time.monotonic(), b""
        self.silent_since = self.silent_since or self.began
        try:
            self.child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, close_fds=True,
                env=dict(os.environ, LC_ALL="C"),
            )  # fmt: skip
        except OSError as error:
            self.answer, self.rc, self.silent_since = None, None, None
            self.error = "not installed" if error.errno == errno.ENOENT else "%s: %s" % (argv[0], error.strerror)
            return
        os.set_blocking(self.child.stdout.fileno(), False)  # type: ignore[union-attr]

    def poll(self) -> bool:
        """Take in what it printed; return whether it has just ended."""
        if self.child is None or self.child.stdout is None:
            return False
        over = False
        try:
            while not over:
                piece = os.read(self.child.stdout.fileno(), 65536)
                over = not piece
                if len(self.read) < MOST_TEXT:
                    self.read += piece
        except BlockingIOError:
            pass
        except OSError:
            over = True
        waited = time.monotonic() - self.began
        if waited > self.limit_s:
            self.answer = None
            self.child.kill()
        if not over or self.child.poll() is None:  # one in uninterruptible sleep stays: nothing ends it
            return False
        self.child.stdout.close()
        self.rc = self.child.returncode
        self.child = None
        if waited <= self.limit_s:
            self.answer = (self.read.decode("utf-8", "replace"), time.monotonic())
            self.silent_since = None
        return True

    def told(self, fields: list[str]) -> Json:
        """Return the last answer, or why there is none."""
        if self.answer is None and self.silent_since is not None:
            return {"error": "nvidia-smi has not answered for %d s" % (time.monotonic() - self.silent_since)}
        if self.answer is None:
            return {"error": self.error}
        return {"text": self.answer[0], "fields": fields, "rc": self.rc, "age_s": round(time.monotonic() - self.answer[1], 3)}

    def end(self) -> None:
        """Kill what is left."""
        if self.child is not None:
            self.child.kill()


class Gpus:
    """The GPUs, by nvidia-smi."""

    def __init__(self) -> None:
        self.main, self.apps = Query(SMI_LIMIT_S), Query(SMI_LIMIT_S)
        self.reasons = 0  # which of REASONS this driver takes
        self.apps_at = -APPS_EVERY_S

    @property
    def fields(self) -> list[str]:
        """Return the columns that are asked for."""
        return [*FIELDS, REASONS[self.reasons]] if REASONS[self.reasons] else list(FIELDS)

    def ask(self) -> None:
        """Ask for the GPUs, and at times for who uses them."""
        self.main.ask(["nvidia-smi", "--query-gpu=" + ",".join(self.fields), "--format=csv"])
        if time.monotonic() - self.apps_at >= APPS_EVERY_S:
            self.apps_at = time.monotonic()
            self.apps.ask(["nvidia-smi", "--query-compute-apps=" + ",".join(APPS), "--format=csv"])

    def poll(self) -> bool:
        """Take in answers; return whether none is awaited. A refused field is asked for by its other name at once."""
        self.apps.poll()
        if self.main.poll() and self.main.answer is not None and self.main.rc != 0:
            if "is not a valid field" in self.main.answer[0] and self.reasons + 1 < len(REASONS):
                self.reasons += 1
                self.ask()
        return self.main.child is None and self.apps.child is None


# ----------------------------------------------------------------------------- what may lie on a hung file system


def last_lines(path: str) -> tuple[list[Json], str | None]:
    """Return the last whole lines of a metrics.jsonl, and why there are none (None: there is no such file yet)."""
    try:
        with open(path, "rb") as handle:
            handle.seek(0, os.SEEK_END)
            size = handle.tell()
            handle.seek(max(0, size - TAIL))
            pieces = handle.read(TAIL).split(b"\n")
    except FileNotFoundError:
        return [], None
    except OSError as error:
        return [], error.strerror
    found = []
    for piece in pieces[1 if size > TAIL else 0 : -1][-MOST_METRICS:]:
        try:
            line = json.loads(piece.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict):
            found.append({key: value for key, value in line.items() if isinstance(value, (int, float))})
    return found, None


def plan_of(path: str) -> Json | None:
    """Return what a plan.json says of the run as a whole, None when it is not there."""
    plan = json_of(path)
    if plan is None:
        return None
    nodes = [node for node in plan.get("nodes", []) if isinstance(node, dict)]
    return {
        "recipe": plan.get("recipe"),
        "steps": plan.get("steps"),
        "attempt": plan.get("attempt"),
        "world_size": plan.get("world_size"),
        "nodes": [str(node.get("name")) for node in nodes],
        "ranks": {str(one["rank"]): str(node.get("name")) for node in nodes for one in node.get("ranks", []) if "rank" in one},
    }


def room(path: str) -> Json:
    """Return {"size", "free"} of the file system of `path` in bytes, or {"error"}."""
    try:
        found = os.statvfs(path)
    except OSError as error:
        return {"error": error.strerror}
    return {"size": found.f_blocks * found.f_frsize, "free": found.f_bavail * found.f_frsize}


def who_waits(folder: str) -> str | None:
    """Return who is about to start the run's next attempt (launch/jobs.py, hold_between), None when nobody is."""
    told = json_of(os.path.join(folder, "between.json")) or {}
    until = told.get("until")
    return str(told.get("who")) if isinstance(until, (int, float)) and until >= time.time() else None


def look_at_shared(request: Json) -> Json:
    """Return {"disks", "plans", "metrics", "ended"} for the paths asked about. Runs in the child: each of these may hang."""
    disks = {path: room(path) for path in request["disks"]}
    plans = {folder: plan_of(os.path.join(folder, "plan.json")) for folder in request["plans"]}
    metrics = {}
    for folder in request["metrics"]:
        lines, why = last_lines(os.path.join(folder, "metrics.jsonl"))
        metrics[folder] = {"lines": lines} if why is None else {"error": why}
    ended = {folder: {"waits": who_waits(folder)} for folder in request["ended"]}
    return {"disks": disks, "plans": plans, "metrics": metrics, "ended": ended}


class Shared:
    """A child that looks at paths for us; when it hangs it is killed, and what it was to find out is not known."""

    def __init__(self, look: Callable[[Json], Json] = look_at_shared) -> None:
        self.look = look
        self.pid = 0
        self.to_child = self.from_child = -1
        self.asked_at: float | None = None
        self.answer: tuple[Json, float] | None = None
        self.error = ""
        self.read = b""

    def start(self) -> None:
        """Fork the child."""
        here_in, there_out = os.pipe()
        there_in, here_out = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(here_in)
                os.close(here_out)
                self.serve(there_in, there_out)
            finally:
                os._exit(0)
        os.close(there_in)
        os.close(there_out)
        os.set_blocking(here_in, False)
        self.pid, self.from_child, self.to_child = pid, here_in, here_out

    def serve(self, requests: int, answers: int) -> None:
        """Be the child: answer one line with one line until the parent is gone."""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):  # a child that hangs must not keep the SSH channel open
            os.dup2(null, descriptor)
        with os.fdopen(requests, "rb") as lines, os.fdopen(answers, "wb") as out:
            for line in lines:
                out.write(json.dumps(self.look(json.loads(line.decode()))).encode() + b"\n")
                out.flush()

    @property
    def descriptor(self) -> int | None:
        """Return what becomes readable when there is an answer."""
        return self.from_child if self.pid and self.asked_at is not None else None

    def ask(self, request: Json) -> None:
        """Have the child look, unless it still looks."""
        if self.asked_at is not None:
            return
        if not self.pid:
            self.start()
        self.read, self.asked_at = b"", time.monotonic()
        try:
            os.write(self.to_child, json.dumps(request).encode() + b"\n")
        except OSError:
            self.drop()

    def poll(self) -> bool:
        """Take in the answer; return whether none is awaited."""
        if self.asked_at is None:
            return True
        try:
            while True:
                piece = os.read(self.from_child, 65536)
                if not piece:
                    self.error = self.error or "its reader ended"
                    self.drop()
                    return True
                self.read += piece
        except BlockingIOError:
            pass
        if self.read.endswith(b"\n"):
            self.answer, self.error, self.asked_at = (json.loads(self.read.decode()), time.monotonic()), "", None
            return True
        waited = time.monotonic() - self.asked_at
        if waited > SHARED_LIMIT_S:
            self.error = "the file system has not answered for %d s" % waited
            self.answer = None
            self.drop(keep_waiting=True)
        return False

    def drop(self, keep_waiting: bool = False) -> None:
        """Kill the child. It may not die while its file system hangs: with `keep_waiting` no other is started until it has."""
        if self.pid:
            try:
                os.kill(self.pid, signal.SIGKILL)
                gone = os.waitpid(self.pid, os.WNOHANG)[0] != 0 or not keep_waiting
            except OSError:
                gone = True
            if not gone:
                return
            os.close(self.to_child)
            os.close(self.from_child)
        self.pid, self.asked_at, self.read = 0, None, b""

    def found(self, kind: str, name: str) -> Json:
        """Return what was found for one path with its age, or {"error"}."""
        if self.answer is None:
            return {"error": self.error or "not looked at yet"}
        value, at = self.answer
        one = value[kind].get(name)
        if one is None:
            return {"error": "not looked at yet"}
        return dict(one, age_s=round(time.monotonic() - at, 3))

    def end(self) -> None:
        """Kill the child and go."""
        if self.pid:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except OSError:
                pass


# ----------------------------------------------------------------------------- the node itself


def rdma_counters(root: str = "/sys/class/infiniband") -> dict[str, dict[str, str]]:
    """Return port (`mlx5_0:1`) -> counter -> text, of the counters that are there."""
    found: dict[str, dict[str, str]] = {}
    for folder in sorted(glob.glob(os.path.join(glob.escape(root), "*", "ports", "*"))):
        hca, number = folder.split(os.sep)[-3], folder.split(os.sep)[-1]
        texts = {}
        for name in RDMA_COUNTERS:
            for where in ("counters", "hw_counters"):
                text = text_of(os.path.join(folder, where, name), 64).strip()
                if text:
                    texts[name] = text
                    break
        found["%s:%s" % (hca, number)] = texts
    return found


def agent_states(node: str, top: str, over: dict[str, int]) -> list[Json]:
    """Return the states of this account's agents on `node` that are there, or ended so lately that a next attempt may come.

    "lately": it goes on, or ended within ENDED_SHOWN_S. `over`: path -> time of writing of those that need not be read again,
    kept by the caller: there may be hundreds of old runs.
    """
    found = []
    for path in sorted(glob.glob(os.path.join(glob.escape(top), "*", glob.escape(node), "state.json"))):
        try:
            written = os.stat(path).st_mtime_ns
        except OSError:
            continue
        if over.get(path) == written:
            continue
        state = json_of(path)
        if state is None or not isinstance(state.get("run_dir"), str):
            continue
        end = state.get("end")
        alive = starts_at(state.get("pid")) == state.get("start") is not None
        last = end.get("time") if isinstance(end, dict) else state.get("heartbeat")
        ended_s = 0.0 if alive else time.time() - last if isinstance(last, (int, float)) else WAITS_S
        if ended_s >= WAITS_S:
            over[path] = written
            continue
        told = {key: state.get(key) for key in STATE_KEYS}
        told["lately"] = ended_s <= ENDED_SHOWN_S
        cause = end.get("cause") if isinstance(end, dict) else None
        told["alive"] = alive
        told["outcome"] = end.get("outcome") if isinstance(end, dict) else None
        told["cause"] = cause.get("kind") if isinstance(cause, dict) else None
        mine = (json_of(os.path.join(os.path.dirname(path), "node.json")) or {}).get("node")
        told["node_rank"] = mine.get("node_rank") if isinstance(mine, dict) else None
        found.append(told)
    return found


def starts_at(pid: Any) -> int | None:
    """Return when `pid` started (ticks since boot), None when it is not there or a zombie."""
    fields = text_of("/proc/%s/stat" % pid, 4096).rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 and fields[0] not in "ZX" else None


def first_lines(text: str, pattern: str) -> str:
    """Return the lines of `text` that match."""
    return "\n".join(line for line in text.split("\n") if re.match(pattern, line))


class Sampler:
    """Collects one sample after the other. `request`: {"node", "interval_s", "gpus": bool, "shared": [paths that may hang]}."""

    def __init__(self, request: Json, leases: Callable[[Json], Json] | None = None) -> None:
        self.leases = leases
        self.node: str = request["node"]
        self.interval_s: float = request["interval_s"]
        self.paths: list[str] = request["shared"]
        self.top: str = request.get("top") or "/tmp/r4090c-%d" % os.getuid()
        self.gpus = Gpus() if request["gpus"] else None
        self.over: dict[str, int] = {}
        self.shared = Shared()
        self.plans: dict[tuple[str, Any], Json] = {}

    def ask(self) -> list[Json]:
        """Ask all that may take time; return the agents' states."""
        if self.gpus is not None:
            self.gpus.ask()
        states = agent_states(self.node, self.top, self.over)
        unknown = [state["run_dir"] for state in states if (state["run_dir"], state["attempt"]) not in self.plans]
        leads = [state["run_dir"] for state in states if state["node_rank"] == 0]
        ended = [state["run_dir"] for state in states if not state["alive"]]
        self.shared.ask({"disks": self.paths, "plans": unknown, "metrics": leads, "ended": ended})
        return states

    def poll(self) -> bool:
        """Take in answers; return whether none is awaited any more."""
        gpus = self.gpus is None or self.gpus.poll()
        return self.shared.poll() and gpus

    def descriptors(self) -> list[int]:
        """Return what becomes readable when there is something to poll."""
        queries = [] if self.gpus is None else [self.gpus.main.descriptor, self.gpus.apps.descriptor]
        return [one for one in [*queries, self.shared.descriptor] if one is not None]

    def sample(self, states: list[Json]) -> Json:
        """Return one sample."""
        for state in states:
            key = (state["run_dir"], state["attempt"])
            plan = self.shared.answer[0]["plans"].get(state["run_dir"]) if self.shared.answer is not None else None
            if plan is not None and plan.get("attempt") == state["attempt"]:
                self.plans[key] = plan
            state["plan"] = self.plans.get(key)
            state["metrics"] = self.shared.found("metrics", state["run_dir"]) if state["node_rank"] == 0 else None
            state["waits"] = None if state["alive"] else self.shared.found("ended", state["run_dir"]).get("waits")
        states = [state for state in states if state.pop("lately") or state["waits"]]
        asked = self.gpus
        return {
            "schema": SCHEMA,
            "node": self.node,
            "time": time.time(),
            "monotonic": time.monotonic(),
            "stat": first_lines(text_of("/proc/stat"), r"cpu\d* "),
            "loadavg": text_of("/proc/loadavg"),
            "meminfo": first_lines(text_of("/proc/meminfo"), r"Mem(Total|Available):"),
            "netdev": text_of("/proc/net/dev"),
            "rdma": rdma_counters(),
            "gpus": None if asked is None else asked.main.told(asked.fields),
            "apps": None if asked is None else asked.apps.told(list(APPS)),
            "disks": {LOCAL: room(LOCAL), **{path: self.shared.found("disks", path) for path in self.paths}},
            "leases": self.holders(),
            "runs": states,
        }

    def holders(self) -> Json:
        """Return who holds GPUs here, of all accounts, or {"error"}."""
        if self.leases is None:
            return {"error": "not asked"}
        try:
            return self.leases({"do": "who", "leases": None})
        except OSError as error:
            return {"error": error.strerror or str(error)}

    def run(self, stdin: int, say: Callable[[Json], None]) -> None:
        """Say one sample every interval, until standard input ends."""
        watch_stdin = True
        due = time.monotonic()
        while True:
            states = self.ask()
            answer_by = time.monotonic() + min(self.interval_s * PATIENCE, PATIENCE_S)
            over = False
            while not over:  # the answers, as far as they come in time
                over = self.poll() or time.monotonic() >= answer_by
                if not over:
                    select.select(self.descriptors(), [], [], max(0.0, min(0.2, answer_by - time.monotonic())))
            say(self.sample(states))
            due = max(due + self.interval_s, time.monotonic() + 0.05)
            while time.monotonic() < due:  # who is gone is noticed here, and late answers are taken in
                self.poll()
                wait = max(0.0, min(1.0, due - time.monotonic()))
                if not watch_stdin:
                    time.sleep(wait)
                    continue
                if select.select([stdin], [], [], wait)[0] and not os.read(stdin, 4096):
                    return

    def end(self) -> None:
        """Leave no child behind."""
        self.shared.end()
        if self.gpus is not None:
            self.gpus.main.end()
            self.gpus.apps.end()


def say(value: Json) -> None:
    """Print one JSON line at once; end quietly when the reader is gone, or takes nothing for STUCK_S."""
    signal.alarm(STUCK_S)
    try:
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()
        signal.alarm(0)
    except OSError:
        raise SystemExit(0) from None


def end_now(number: int, frame: object) -> NoReturn:
    """Turn a signal into an orderly end."""
    raise SystemExit(0)


def main(request: Json, leases: Callable[[Json], Json] | None = None) -> None:
    """Sample until nobody reads any more. `leases`: main of launch/leases.py."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, end_now)
    sampler = Sampler(request, leases)
    try:
        sampler.run(sys.stdin.fileno(), say)
    finally:
        sampler.end()
        os._exit(0)  # what hangs in a child must not hold us


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
