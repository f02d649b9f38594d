"""The agent: runs on every node of an attempt, starts torchrun there, and answers for what becomes of it.

Standard library only, Python >= 3.8: it is run by the node's own python3. One process a node, detached from SSH. It

- starts torchrun in a session of its own and is its *subreaper*, so that every process below it stays below it, whatever dies;
- keeps a gang with the agents of the other nodes over one TCP connection each to the lead (node rank 0): whoever fails tells
  the lead, the lead tells all; a peer that is silent for `lease_s` is lost; so an attempt ends everywhere also when the
  controller is gone;
- ends what it started by TERM, a grace, then KILL: by descent, never by name; torchrun and the ranks carry PR_SET_PDEATHSIG,
  so that a killed agent takes them along;
- writes its state to a node-local folder first (a hung NFS must not stop it) and from a thread to the shared run folder.

Commands: `start` (request on stdin; daemonizes, answers its pid) and `follow` (prints state changes and new lines as JSON).
`main(request)` serves what the controller asks over `Shell.ask`: `prepare`, `stop`, `state`.
"""

import ctypes
import errno
import getpass
import hashlib
import json
import os
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # include/uapi/linux/prctl.h
TICK_S = 0.1
BEAT_S = 1.0
SHARED_WRITE_S = 2.0
KILL_WAIT_S = 5.0  # est.: SIGKILL takes effect at once except in uninterruptible sleep, which nothing ends
MARK_RUN, MARK_NODE = "R4090C_RUN", "R4090C_NODE"

# ----------------------------------------------------------------------------- files on the node


def local_folder(run_id, node):
    """Return the node-local state folder `/tmp/r4090c-<uid>/<run>/<node>`, made private to this account.

    Raises OSError when somebody else owns the top folder.
    """
    top = "/tmp/r4090c-%d" % os.getuid()
    os.makedirs(top, mode=0o700, exist_ok=True)
    info = os.lstat(top)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise OSError(errno.EPERM, "%s belongs to somebody else" % top)
    os.chmod(top, 0o700)
    folder = os.path.join(top, run_id, node)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return folder


def write_json(path, value):
    """Write `value` to `path`, aside first, then renamed: a reader never sees half."""
    aside = "%s.tmp%d" % (path, os.getpid())
    with open(aside, "w") as handle:
        json.dump(value, handle)
    os.replace(aside, path)


def read_json(path):
    """Return the JSON in `path`, None when it is absent or not whole."""
    try:
        with open(path) as handle:
            return json.load(handle)
    except (OSError, ValueError):
        return None


def tree_digest(root):
    """Return the sha256 over names and contents of all files below `root` (hex), None when it is not there.

    launch/sync.py computes the same over what it sends.
    """
    if not os.path.isdir(root):
        return None
    total = hashlib.sha256()
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name != "__pycache__"]
        names += [os.path.relpath(os.path.join(folder, name), root) for name in files]
    for name in sorted(names):
        with open(os.path.join(root, name), "rb") as handle:
            content = hashlib.sha256(handle.read()).hexdigest()
        total.update(("%s\0%s\n" % (name, content)).encode())
    return total.hexdigest()


# ----------------------------------------------------------------------------- processes


def prctl(option, value):
    """Call prctl(2); Linux only. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(%d, %d)" % (option, value))


def stat_fields(pid):
    """Return (state, parent pid, start time in ticks) of `pid`, None when it is gone."""
    try:
        with open("/proc/%d/stat" % pid) as handle:
            fields = handle.read().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1]), int(fields[19])


def all_pids():
    """Return the pids of this pid namespace."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def descendants(root):
    """Return the living (not zombie) pids below `root`."""
    parents = {}
    for pid in all_pids():
        fields = stat_fields(pid)
        if fields is not None:
            parents[pid] = fields
    below, grown = {root}, True
    while grown:
        more = {pid for pid, fields in parents.items() if fields[1] in below and pid not in below}
        grown = bool(more)
        below |= more
    return sorted(pid for pid in below - {root} if parents.get(pid, ("Z",))[0] not in "ZX")


def marked(run_id, node=None):
    """Return the living pids of this account whose environment says they belong to `run_id` (and `node`)."""
    want = ("%s=%s" % (MARK_RUN, run_id)).encode()
    want_node = ("%s=%s" % (MARK_NODE, node)).encode() if node else None
    found = []
    for pid in all_pids():
        if pid == os.getpid():
            continue
        try:
            with open("/proc/%d/environ" % pid, "rb") as handle:
                environment = handle.read().split(b"\0")
        except OSError:
            continue
        if want in environment and (want_node is None or want_node in environment):
            fields = stat_fields(pid)
            if fields is not None and fields[0] not in "ZX":
                found.append(pid)
    return found


def send_signal(pids, number):
    """Send a signal to each of `pids` that is still there."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            pass


def end_all(find, grace_s, kill_wait_s=KILL_WAIT_S):
    """End every process `find()` returns: TERM, `grace_s`, then KILL until none is left. Return the pids that would not go."""
    send_signal(find(), signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        reap()
        if not find():
            return []
        time.sleep(0.05)
    deadline = time.monotonic() + kill_wait_s
    left = find()
    while left and time.monotonic() < deadline:
        send_signal(left, signal.SIGKILL)
        time.sleep(0.05)
        reap()
        left = find()
    return left


def reap(keep=()):
    """Collect dead children that nobody waits for, except those in `keep`."""
    for pid in all_pids():
        fields = stat_fields(pid)
        if fields is not None and fields[0] == "Z" and fields[1] == os.getpid() and pid not in keep:
            try:
                os.waitpid(pid, os.WNOHANG)
            except OSError:
                pass


FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")


def failed_ranks(text):
    """Return [(local_rank, pid, exit code)] of the first failure torchrun's log tells; a negative code is a signal."""
    found = []
    for code, local_rank, pid in FAILED.findall(text):
        found.append((int(local_rank), int(pid), int(code)))
    return found


def tail(path, limit=8192):
    """Return the last `limit` bytes of a text file, "" when it cannot be read."""
    try:
        with open(path, "rb") as handle:
            handle.seek(0, os.SEEK_END)
            handle.seek(max(0, handle.tell() - limit))
            return handle.read().decode(errors="replace")
    except OSError:
        return ""


# ----------------------------------------------------------------------------- the gang


class Peer:
    """One TCP connection of the gang, speaking JSON lines; never blocks."""

    def __init__(self, connection, name=None):
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.name = name
        self.heard = time.monotonic()
        self.closed = False
        self._in = b""

    def send(self, message):
        """Send one message; a connection that cannot take it is as good as closed."""
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EWOULDBLOCK):
                self.closed = True

    def receive(self):
        """Return the messages that came in; sets `closed` at end of file."""
        try:
            chunk = self.connection.recv(65536)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            # ETIMEDOUT and unreachable are silence (the lease decides); a reset is the peer's kernel saying the process is gone.
            if error.errno not in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH):
                self.closed = True
            return []
        if not chunk:
            self.closed = True
            return []
        self.heard = time.monotonic()
        lines = (self._in + chunk).split(b"\n")
        self._in = lines.pop()
        if len(self._in) > 1 << 20:
            self.closed = True
        messages = []
        for line in lines:
            try:
                message = json.loads(line.decode())
            except ValueError:
                continue
            if isinstance(message, dict):
                messages.append(message)
        return messages

    def close(self):
        """Close the connection."""
        try:
            self.connection.close()
        except OSError:
            pass


class Agent:
    """The agent of one node in one attempt."""

    def __init__(self, request):
        plan = self.plan = request["plan"]
        self.name = request["node"]
        self.token = request["token"]
        self.mine = next(node for node in plan["nodes"] if node["name"] == self.name)
        self.secrets = request.get("secrets", {}).get(self.name, {})
        self.lead = self.mine["node_rank"] == 0
        self.gang = plan["gang"]
        self.run_root = plan["run_dir"]
        self.folder = local_folder(plan["run_id"], self.name)
        self.log = os.path.join(self.run_root, "attempt_%d" % plan["attempt"], "torchrun-%s.log" % self.name)
        self.torchrun = None
        self.listener = None
        self.peers = {}
        self.strangers = []
        self.uplink = None
        self.done = set()  # nodes whose torchrun ended well
        self.ending = None  # the cause, once the attempt is being ended
        self.asked_to_stop = None
        self.last_beat = 0.0
        self.events = []
        self.ranks = {}
        self.changed = threading.Event()
        self.lock = threading.Lock()
        self.state = {
            "schema": "r4090c.agent/1",
            "run_id": plan["run_id"],
            "attempt": plan["attempt"],
            "node": self.name,
            "pid": os.getpid(),
            "process_group": os.getpgid(0),
            "started": time.time(),
            "heartbeat": time.time(),
            "state": "starting",
            "torchrun_pid": None,
            "ranks": {},
            "end": None,
            "events": self.events,
        }

    # ------------------------------------------------------------------ telling

    def save(self, now=True):
        """Write the state locally, and wake the thread that writes it to the shared folder."""
        self.state["heartbeat"] = time.time()
        self.state["ranks"] = self.ranks
        with self.lock:
            text = json.dumps(self.state)
            self.shared_text = text
        try:
            aside = os.path.join(self.folder, "state.json.tmp")
            with open(aside, "w") as handle:
                handle.write(text)
            os.replace(aside, os.path.join(self.folder, "state.json"))
        except OSError:
            pass  # a full /tmp must not end the training; the shared copy still tells
        if now:
            self.changed.set()

    def write_shared(self):
        """Copy state and events to the run folder; the thread's loop. A hung NFS hangs only this."""
        written = 0
        while True:
            self.changed.wait(SHARED_WRITE_S)
            self.changed.clear()
            with self.lock:
                text = self.shared_text
                events = self.events[written:] if self.lead else []
                last = self.state["state"] == "ended"
            try:
                path = os.path.join(self.run_root, "agents", self.name + ".json")
                with open(path + ".tmp", "w") as handle:
                    handle.write(text)
                os.replace(path + ".tmp", path)
                if events:
                    with open(os.path.join(self.run_root, "events.jsonl"), "a") as handle:
                        handle.write("".join(json.dumps(event) + "\n" for event in events))
                    written += len(events)
            except OSError:
                pass
            if last:
                return

    def event(self, kind, **more):
        """Record an event; a member also sends it to the lead, whose clock then orders it."""
        event = dict({"time": time.time(), "attempt": self.plan["attempt"], "node": self.name, "kind": kind}, **more)
        self.keep(event)
        if self.uplink is not None:
            self.uplink.send({"event": event})
        return event

    def keep(self, event):
        with self.lock:
            self.events.append(event)
        self.save()

    # ------------------------------------------------------------------ torchrun

    def start_torchrun(self):
        environment = {
            key: value
            for key, value in os.environ.items()
            if key in ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TMPDIR")
        }
        environment.update({name: var["value"] for name, var in self.mine["env"].items()})
        environment.update(self.secrets)
        environment.update({MARK_RUN: self.plan["run_id"], MARK_NODE: self.name, "R4090C_LOCAL": self.folder})
        write_json(
            os.path.join(self.folder, "node.json"), {"node": self.mine, "attempt": self.plan["attempt"], "run_dir": self.run_root}
        )
        os.makedirs(os.path.dirname(self.log), exist_ok=True)
        output = open(self.log, "ab")
        parent = os.getpid()

        def in_child():
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # the agent died between fork and prctl
                os._exit(1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        self.torchrun = subprocess.Popen(
            self.mine["torchrun"], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment,
            cwd=self.mine["cwd"], start_new_session=True, close_fds=True, preexec_fn=in_child,
        )  # fmt: skip
        output.close()
        self.state["torchrun_pid"] = self.torchrun.pid
        self.state["state"] = "running"
        self.event("started", torchrun_pid=self.torchrun.pid)

    def watch_ranks(self):
        """Note ranks that came and ranks that went; return the ranks newly gone while torchrun still runs."""
        gone = []
        for rank in self.mine["ranks"]:
            key = str(rank["rank"])
            record = self.ranks.get(key)
            if record is None:
                seen = read_json(os.path.join(self.folder, "rank-%s-%d.json" % (key, self.plan["attempt"])))
                if seen is not None:
                    self.ranks[key] = {"pid": seen["pid"], "start": seen["start"], "gone": None, "exit": None}
                    self.save()
            elif record["gone"] is None:
                fields = stat_fields(record["pid"])
                if fields is None or fields[0] in "ZX" or fields[2] != record["start"]:
                    record["gone"] = time.time()
                    gone.append(key)
        return gone

    def failure(self, code):
        """Return the events for torchrun having ended with `code` (not 0)."""
        if code < 0:
            return [self.event("torchrun-killed", signal=-code, detail="torchrun was ended by signal %d" % -code)]
        causes = failed_ranks(tail(self.log, 65536))
        ranks = {rank["local_rank"]: rank["rank"] for rank in self.mine["ranks"]}
        events = []
        for local_rank, pid, exit_code in causes[:1]:
            rank = ranks.get(local_rank)
            record = self.ranks.get(str(rank), {})
            record["exit"] = exit_code
            log = os.path.join(os.path.dirname(self.log), "%s.log" % rank)
            events.append(
                self.event(
                    "rank-failed", rank=rank, pid=pid, exit_code=exit_code, gone=record.get("gone"), log_tail=tail(log)[-4000:]
                )
            )
        if not events:
            events.append(self.event("torchrun-failed", exit_code=code, log_tail=tail(self.log)[-4000:]))
        return events

    # ------------------------------------------------------------------ gang

    def open_gang(self):
        if len(self.plan["nodes"]) == 1:
            return
        if self.lead:
            self.listener = socket.socket(socket.AF_INET6 if ":" in self.gang["address"] else socket.AF_INET)
            self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.listener.bind((self.gang["address"], self.gang["port"]))
            self.listener.listen(128)
            self.listener.setblocking(False)
            self.awaited_until = time.monotonic() + self.gang["start_timeout_s"]
        else:
            self.uplink_until = time.monotonic() + self.gang["start_timeout_s"]

    def connect_uplink(self):
        """Try to reach the lead; return True when connected."""
        try:
            connection = socket.create_connection((self.gang["address"], self.gang["port"]), timeout=1.0)
        except OSError as error:
            self.uplink_error = str(error)
            return False
        self.uplink = Peer(connection, self.plan["nodes"][0]["name"])
        self.uplink.send({"hello": self.name, "token": self.token, "attempt": self.plan["attempt"]})
        for event in self.events:
            self.uplink.send({"event": event})
        return True

    def gang_step(self):
        """Read what came in and send what is due; return a cause when the gang is broken."""
        sockets = [peer.connection for peer in list(self.peers.values()) + self.strangers]
        sockets += [self.listener] if self.listener else []
        sockets += [self.uplink.connection] if self.uplink else []
        if sockets:
            select.select(sockets, [], [], TICK_S)
        else:
            time.sleep(TICK_S)
        cause = None
        if self.lead:
            cause = self.lead_step()
        elif len(self.plan["nodes"]) > 1:
            cause = self.member_step()
        if time.monotonic() - self.last_beat >= BEAT_S:
            self.last_beat = time.monotonic()
            beat = {"beat": time.time(), "done": self.name in self.done}
            for peer in self.peers.values():
                peer.send(beat)
            if self.uplink is not None:
                self.uplink.send(beat)
            self.save(now=False)
        return cause

    def lead_step(self):
        if self.listener is not None:
            try:
                connection, _ = self.listener.accept()
                self.strangers.append(Peer(connection))
            except (BlockingIOError, InterruptedError):
                pass
        for stranger in list(self.strangers):
            for message in stranger.receive():
                name = message.get("hello")
                known = any(node["name"] == name for node in self.plan["nodes"])
                if known and message.get("token") == self.token and message.get("attempt") == self.plan["attempt"]:
                    stranger.name = name
                    self.peers[name] = stranger
                    self.strangers.remove(stranger)
                    break
                stranger.closed = True
            if (
                (stranger.closed
                and stranger in self.strangers)
                or (stranger in self.strangers and time.monotonic() - stranger.heard > 5)
            ):
                stranger.close()
                self.strangers.remove(stranger)
        for name, peer in list(self.peers.items()):
            for message in peer.receive():
                if "event" in message:
                    event = dict(message["event"], received=time.time())
                    self.keep(event)
                if message.get("done"):
                    self.done.add(name)
                if "ending" in message and self.ending is None:
                    return message["ending"]
            if name in self.done:
                continue
            if peer.closed:
                del self.peers[name]
                return self.event("agent-lost", peer=name, detail="the agent of %s closed its connection" % name)
            if time.monotonic() - peer.heard > self.gang["lease_s"]:
                del self.peers[name]
                return self.event("node-lost", peer=name, detail="nothing heard of %s for %g s" % (name, self.gang["lease_s"]))
        if self.listener is not None and time.monotonic() > self.awaited_until:
            for node in self.plan["nodes"][1:]:
                if node["name"] not in self.peers and node["name"] not in self.done:
                    return self.event("node-lost", peer=node["name"], detail="its agent never reached the lead")
        return None

    def member_step(self):
        lead = self.plan["nodes"][0]["name"]
        if self.uplink is None:
            if not self.connect_uplink() and time.monotonic() > self.uplink_until:
                detail = "cannot reach the lead's agent at %s:%d: %s" % (
                    self.gang["address"],
                    self.gang["port"],
                    self.uplink_error,
                )
                return self.event("node-lost", peer=lead, detail=detail)
            return None
        for message in self.uplink.receive():
            if "ending" in message:
                return message["ending"]
            if message.get("all_done"):
                self.done.add("*")
        if "*" in self.done:
            return None
        if self.uplink.closed:
            self.uplink.close()
            self.uplink = None
            self.uplink_until = float("inf")
            return self.event("agent-lost", peer=lead, detail="the agent of %s closed its connection" % lead)
        if time.monotonic() - self.uplink.heard > self.gang["lease_s"]:
            return self.event("node-lost", peer=lead, detail="nothing heard of %s for %g s" % (lead, self.gang["lease_s"]))
        return None

    def tell_gang(self, message):
        for peer in self.peers.values():
            peer.send(message)
        if self.uplink is not None:
            self.uplink.send(message)

    # ------------------------------------------------------------------ the loop

    def run(self):
        """Run the attempt on this node to its end; return when nothing of it is left."""
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        signal.signal(signal.SIGTERM, self.on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.makedirs(os.path.join(self.run_root, "agents"), exist_ok=True)
        self.save()
        writer = threading.Thread(target=self.write_shared, daemon=True)
        writer.start()
        try:
            self.open_gang()
            self.start_torchrun()
            outcome, cause = self.loop()
        except Exception as error:
            outcome, cause = "failed", self.event("agent-error", detail="%s: %s" % (type(error).__name__, error))
        if outcome != "done":
            self.ending = cause
            self.state["state"] = "ending"
            self.save()
            self.tell_gang({"ending": cause})
            left = end_all(lambda: descendants(os.getpid()), self.plan["grace_s"])
            if left:
                self.event("left-running", pids=left, detail="would not go, even by SIGKILL")
        self.state["state"] = "ended"
        self.state["end"] = {"outcome": outcome, "cause": cause, "time": time.time()}
        self.save()
        writer.join(SHARED_WRITE_S * 2)

    def on_signal(self, number, frame):
        self.asked_to_stop = self.asked_to_stop or "signal %d" % number

    def loop(self):
        """Return ("done", None), ("failed", event) or ("stopped", event)."""
        doomed = None  # when a rank is gone: the time until which torchrun may explain it
        while True:
            broken = self.gang_step()
            if broken is not None:
                return ("stopped" if broken.get("kind") == "stopped" else "failed"), broken
            if self.asked_to_stop:
                asked = read_json(os.path.join(self.folder, "stop.json")) or {}
                return "stopped", self.event("stopped", by=asked.get("by", self.asked_to_stop), detail="asked to stop")
            code = self.torchrun.poll() if self.name not in self.done else 0
            gone = self.watch_ranks()
            if self.name not in self.done:
                if code is not None:
                    if code != 0:
                        return "failed", self.failure(code)[0]
                    self.done.add(self.name)
                    self.event("finished")
                    self.tell_gang({"done": True})
                elif gone and doomed is None:
                    # A rank went. It may have finished (its peers will too) or died: torchrun knows within a second or two.
                    doomed = time.monotonic() + self.gang["rank_grace_s"]
                    self.state["state"] = "rank-gone"
                    self.save()
                elif doomed is not None and time.monotonic() > doomed and self.ended_unwell():
                    return "failed", self.event(
                        "rank-failed",
                        rank=int(gone[0]) if gone else None,
                        exit_code=None,
                        detail="a rank ended, torchrun said nothing",
                    )
            reap(keep=(self.torchrun.pid,))
            if self.name in self.done:
                if not self.lead:
                    if "*" in self.done or self.uplink is None:
                        return "done", None
                elif self.done >= {node["name"] for node in self.plan["nodes"]}:
                    self.tell_gang({"all_done": True})
                    return "done", None

    def ended_unwell(self):
        """True when torchrun's log already says that a rank failed."""
        return bool(failed_ranks(tail(self.log, 65536)))


# ----------------------------------------------------------------------------- commands


def daemonize(work):
    """Run `work()` in a process of its own session, detached from every standard stream; return its pid to the caller."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() > 0:
            os._exit(0)
        os.close(reader)
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        os.write(writer, str(os.getpid()).encode())
        os.close(writer)
        code = 0
        try:
            work()
        except BaseException:
            code = 1
        os._exit(code)
    os.close(writer)
    os.waitpid(child, 0)
    answer = b""
    while True:
        chunk = os.read(reader, 64)
        if not chunk:
            break
        answer += chunk
    os.close(reader)
    return int(answer)


def start(request):
    """Write the run's files (on the lead), start the agent, and return {"pid"} or {"error"}."""
    try:
        for path, text in request.pop("files", {}).items():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path + ".tmp", "w") as handle:
                handle.write(text)
            os.replace(path + ".tmp", path)
        for path in request.pop("folders", ()):
            os.makedirs(path, exist_ok=True)
    except OSError as error:
        return {"error": "cannot write the run folder: %s" % error}
    os.environ[MARK_RUN] = request["plan"]["run_id"]
    os.environ[MARK_NODE] = request["node"]
    folder = local_folder(request["plan"]["run_id"], request["node"])
    for name in os.listdir(folder):
        if name.startswith(("state.json", "stop.json")):
            os.unlink(os.path.join(folder, name))
    # The marks must stand in /proc/<pid>/environ, which only an exec sets: so the daemon is a fresh process.
    encoded = json.dumps(request).encode()
    reader, writer = os.pipe()

    def work():
        os.close(writer)
        os.dup2(reader, 0)
        os.execv(sys.executable, [sys.executable, "-I", "-S", os.path.abspath(__file__), "daemon"])

    pid = daemonize(work)
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        pipe.write(encoded)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        state = read_json(os.path.join(folder, "state.json"))
        if state is not None:
            return {"pid": pid, "state": state["state"]}
        time.sleep(0.01)
    return {"error": "the agent did not come up within 10 s"}


def daemon():
    """Be the agent: the request comes on stdin."""
    request = json.load(sys.stdin)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    Agent(request).run()


def state(run_id, node):
    """Return the agent's local state with `alive`: whether its process is there."""
    found = read_json(os.path.join("/tmp/r4090c-%d" % os.getuid(), run_id, node, "state.json"))
    if found is None:
        return None
    found["alive"] = found["pid"] in marked(run_id, node)
    return found


def prepare(tree, ports):
    """Return the digest of the code tree here, and `ports` TCP ports that are free now."""
    held = [socket.socket() for _ in range(ports)]
    for one in held:
        one.bind(("", 0))
    free = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return {"digest": tree_digest(tree), "ports": free}


def stop(run_id, node, by, grace_s):
    """Ask the agent to end the attempt, wait for it, then end whatever still carries the run's mark. Return what was done."""
    found = state(run_id, node)
    if found is not None and found["alive"]:
        write_json(os.path.join(local_folder(run_id, node), "stop.json"), {"by": by})
        send_signal([found["pid"]], signal.SIGTERM)
        deadline = time.monotonic() + grace_s + KILL_WAIT_S + 3
        while time.monotonic() < deadline and found["pid"] in marked(run_id, node):
            time.sleep(0.05)
    before = marked(run_id, node)
    left = end_all(lambda: marked(run_id, node), 0.5) if before else []
    return {"had_agent": found is not None, "swept": before, "left": left, "state": state(run_id, node)}


def read_new(path, offset):
    """Return (whole new lines, new offset) of a growing file."""
    try:
        with open(path, "rb") as handle:
            if os.fstat(handle.fileno()).st_size < offset:
                offset = 0  # it was rewritten
            handle.seek(offset)
            data = handle.read(1 << 20)
    except OSError:
        return [], offset
    whole = data.rpartition(b"\n")[0]
    if not whole:
        return [], offset
    return whole.decode(errors="replace").split("\n"), offset + len(whole) + 1


def follow(run_id, node, files):
    """Print what is new as JSON lines until the agent has ended: {"state"}, {"line": [name, text]}, {"beat"}.

    `files`: [[name, path, offset]] to tail. Ends when nobody reads any more.
    """
    offsets = {}
    for name, path, offset in files:
        if offset < 0:  # only what comes from now on
            offset = os.path.getsize(path) if os.path.exists(path) else 0
        offsets[name] = [path, offset]
    last, beat, missing_since = None, 0.0, None
    while True:
        found = read_json(os.path.join("/tmp/r4090c-%d" % os.getuid(), run_id, node, "state.json"))
        fresh = found is not None and (stat_fields(found["pid"]) or "Z")[0] not in "ZX"  # nobody may have reaped it
        ended = found is not None and found["state"] == "ended"
        for name, entry in offsets.items():
            lines, entry[1] = read_new(entry[0], entry[1])
            for line in lines:
                emit({"line": [name, line], "offset": entry[1]})
        core = None if found is None else {key: value for key, value in found.items() if key != "heartbeat"}
        if core != last:
            last = core
            emit({"state": found})
        if ended:
            return
        if not fresh:
            missing_since = missing_since or time.monotonic()
            if time.monotonic() - missing_since > 1.0:
                emit({"agent_gone": True, "state": found})
                return
        else:
            missing_since = None
        if time.monotonic() - beat > 1.0:
            beat = time.monotonic()
            emit({"beat": time.time()})
        time.sleep(0.1)


def emit(value):
    """Print one JSON line at once; end quietly when the reader is gone."""
    try:
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()
    except OSError:
        os._exit(0)


def whoami():
    """Return the account's name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def main(request):
    """Serve one question of the controller (through `Shell.ask`)."""
    do = request["do"]
    if do == "stop":
        return stop(request["run_id"], request["node"], request["by"], request["grace_s"])
    if do == "state":
        return state(request["run_id"], request["node"])
    if do == "prepare":
        return prepare(request["tree"], request["ports"])
    raise ValueError("unknown request %r" % do)


if __name__ == "__main__" and len(sys.argv) > 1:
    if sys.argv[1] == "start":
        print(json.dumps(start(json.load(sys.stdin))))
    elif sys.argv[1] == "daemon":
        daemon()
    elif sys.argv[1] == "follow":
        what = json.loads(sys.argv[2])
        follow(what["run_id"], what["node"], what["files"])
