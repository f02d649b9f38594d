"""Answer questions about this machine in one go. Runs on the node (Python >= 3.8, standard library, one file); judges nothing.

`main(request)` takes and returns what JSON can carry:

    request = {"questions": {name: {"files": [glob, ...], "natives": {native: arguments}, "command": [argv, ...] or None,
                                    "timeout_s": 10}}}
    result  = {"time_ns_received", "time_ns_sent", "answers": {name: {"files": {path: text}, "errors": {path or native: text},
               "natives": {native: value}, "command": {"rc", "stdout", "stderr", "error"} or None}}}

Nothing here may hang or take another answer along:
- files of the kernel and of /etc are read in this process; what could live on a network file system is read in a forked child;
- children and commands have a process group of their own, which is killed at the timeout. A child in uninterruptible sleep
  (hung NFS) outlives SIGKILL: it is left behind with none of our descriptors, and is never waited for;
- names are looked up in threads that are left behind at the timeout.

Forked, not executed, children: this process has one thread until all of them are started, and an exec costs 8 ms of CPU more.
The modules imported at the top are the cheap ones: `socket`, `threading`, `subprocess` and `typing` cost 3 to 12 ms each.
"""

from __future__ import annotations

import _socket
import _thread
import errno
import json
import os
import select
import signal
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

FILE_CAP_BYTES = 262_144
"""Longer files are cut here, and the cut is told in `errors`."""
OUTPUT_CAP_BYTES = 4_194_304
"""Longer output of a command or child is read and thrown away."""
FILES_CAP = 8192
"""Files per question; 2 RDMA ports with 256 GIDs each are 1536."""
NOT_INSTALLED = "not installed"
NEVER_HANGS = ("/proc/", "/sys/", "/etc/", "/run/", "/dev/shm", "/usr/lib/", "/var/lib/systemd/")
TOOL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Appended to PATH: a non-interactive shell often lacks the sbin folders."""
ASK_PYTHON = (
    "import json,os,sys\n"
    "print(json.dumps({'version':'%d.%d.%d'%sys.version_info[:3],'distributions':[[n for n in os.listdir(p)"
    " if n.endswith(('.dist-info','.egg-info'))] for p in sys.path if p and os.path.isdir(p)]}))"
)
"""What a Python is asked whose folder layout is not understood: its version and the distributions on its path."""


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Return the answers to `request` (shapes: see the module). One that fails is told in its own `errors`."""
    received = process_start_ns()
    os.environ["PATH"] = ":".join(filter(None, (os.environ.get("PATH"), TOOL_PATH)))
    answers = {}  # type: dict[str, dict[str, Any]]
    jobs = []  # type: list[Job]
    inline = []  # type: list[Callable[[], None]]
    threads = []  # type: list[Thread]
    for name, question in request["questions"].items():
        answers[name] = {"files": {}, "errors": {}, "natives": {}, "command": None}
        try:
            prepare(question, answers[name], jobs, inline, threads)
        except Exception as error:
            answers[name]["errors"]["probe"] = describe(error)
    parts = [*jobs, *threads]  # type: list[Job | Thread]
    for part in parts:
        try:
            part.start()
        except Exception as error:  # no more processes allowed, a NUL in argv, …
            part.failed = describe(error)
    for work in inline:
        work()
    wait_for(jobs)
    for thread in threads:
        thread.finish()
    return {"time_ns_received": received, "time_ns_sent": time.time_ns(), "answers": answers}


def process_start_ns() -> int:
    """Return when this process was started, in ns of the node's clock; the present where /proc does not tell.

    That is when sshd took the request, since a login shell turns into its command: the time its start-up files and Python took
    (0.03 to 1 s) then belongs to the node and not to the way there. One clock tick is added: field 22 of proc(5) is rounded down.
    """
    now_ns = time.time_ns()
    try:
        age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        ticks = int(read_file("/proc/self/stat")[0].rpartition(")")[2].split()[19])
        age_ns -= (ticks + 1) * 1000000000 // os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return now_ns
    return now_ns - age_ns if 0 <= age_ns < 120 * 1000000000 else now_ns


def prepare(
    question: dict[str, Any],
    answer: dict[str, Any],
    jobs: list[Job],
    inline: list[Callable[[], None]],
    threads: list[Thread],
) -> None:
    """Sort the parts of one question into children and commands, work done here, and threads."""
    timeout_s = float(question.get("timeout_s") or 10)
    errors, natives = answer["errors"], answer["natives"]

    def keep_files(result: Any) -> None:
        answer["files"].update(result["files"])
        errors.update(result["errors"])

    def keep_native(native: str) -> Callable[[Any], None]:
        return lambda value: natives.update({native: value})

    def keep_item(native: str, item: str) -> Callable[[Any], None]:
        return lambda value: natives.setdefault(native, {}).update({item: value})

    def refuse(key: str) -> Callable[[str], None]:
        return lambda text: errors.update({key: text})

    def refuse_item(native: str, item: str) -> Callable[[str], None]:
        return lambda text: natives.setdefault(native, {}).update({item: {"error": text}})

    files = question.get("files") or []
    for patterns in ([p for p in files if not may_hang(p)], [p for p in files if may_hang(p)]):
        if patterns and may_hang(patterns):
            jobs.append(Child(read_files, patterns, timeout_s, keep_files, refuse(patterns[0])))
        elif patterns:
            inline.append(guarded(read_files, patterns, keep_files, refuse(patterns[0])))
    for native, arguments in (question.get("natives") or {}).items():
        if native in CHILD_PER_ITEM:
            natives[native] = {}
            for item in arguments:
                if native in WORTH_A_CHILD and not WORTH_A_CHILD[native](item):
                    natives[native][item] = []
                    continue
                jobs.append(Child(CHILD_PER_ITEM[native], item, timeout_s, keep_item(native, item), refuse_item(native, item)))
        elif native in THREAD_PER_ITEM:
            natives[native] = {}
            for item in arguments:
                threads.append(
                    Thread(THREAD_PER_ITEM[native], item, timeout_s, keep_item(native, item), refuse_item(native, item))
                )
        elif native in THREAD:
            threads.append(Thread(THREAD[native], arguments, timeout_s, keep_native(native), refuse(native)))
        elif native not in INLINE:
            errors[native] = "this probe has no native " + native
        elif may_hang(arguments):
            jobs.append(Child(INLINE[native], arguments, timeout_s, keep_native(native), refuse(native)))
        else:
            inline.append(guarded(INLINE[native], arguments, keep_native(native), refuse(native)))
    if question.get("command"):
        jobs.append(Command(question["command"], timeout_s, lambda result: answer.update(command=result)))


def guarded(
    function: Callable[[Any], Any], arguments: Any, keep: Callable[[Any], None], refuse: Callable[[str], None]
) -> Callable[[], None]:
    """Return a function that hands the result of `function(arguments)` to `keep`, or what went wrong to `refuse`."""

    def work() -> None:
        try:
            keep(function(arguments))
        except Exception as error:
            refuse(describe(error))

    return work


def describe(error: BaseException) -> str:
    """Return one line for `error`: the system's own words where there are any."""
    text = error.strerror if isinstance(error, OSError) else ""
    return text or "{}: {}".format(type(error).__name__, error)


def may_hang(arguments: Any) -> bool:
    """Return whether `arguments` name a path (or a list or mapping of paths) that could be on a network file system."""
    if isinstance(arguments, str):
        return arguments.startswith(("/", "~")) and not arguments.startswith(NEVER_HANGS)
    if isinstance(arguments, dict):
        return any(may_hang(key) or may_hang(value) for key, value in arguments.items())
    return isinstance(arguments, list) and any(may_hang(item) for item in arguments)


# ---------------------------------------------------------------------------------------------- children, commands, threads


class Job:
    """A process of ours with pipes to read and a deadline."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.deadline = 0.0
        self.exited_at = 0.0
        self.pid = 0
        self.status = None  # type: int | None
        self.output = {}  # type: dict[int, bytearray]
        self.open = set()  # type: set[int]
        self.timed_out = False
        self.failed = ""

    def start(self) -> None:
        """Start the process. Raises what the system raises."""
        raise NotImplementedError

    def finish(self) -> None:
        """Hand over the answer."""
        raise NotImplementedError

    def started(self, pid: int, descriptors: list[int]) -> None:
        """Take note of the process and of the read ends of its pipes."""
        self.pid = pid
        self.deadline = time.monotonic() + self.timeout_s
        self.output = {fd: bytearray() for fd in descriptors}
        self.open = set(descriptors)

    def reap(self) -> bool:
        """Return whether the process has ended, without waiting for it."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = status
                self.exited_at = time.monotonic()
        return self.status is not None

    def read(self, fd: int) -> None:
        """Read what is there; at the end close the descriptor."""
        data = os.read(fd, 65536)
        if not data:
            self.open.discard(fd)
            os.close(fd)
        elif len(self.output[fd]) < OUTPUT_CAP_BYTES:
            self.output[fd] += data

    def kill(self) -> None:
        """Kill the process group. What is in uninterruptible sleep stays; its pipes are closed here all the same."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except OSError:
            pass
        for fd in self.open:
            os.close(fd)
        self.open.clear()


class Child(Job):
    """`function(argument)` in a forked child that answers JSON through a pipe."""

    def __init__(
        self,
        function: Callable[[Any], Any],
        argument: Any,
        timeout_s: float,
        keep: Callable[[Any], None],
        refuse: Callable[[str], None],
    ) -> None:
        super().__init__(timeout_s)
        self.function, self.argument, self.keep, self.refuse = function, argument, keep, refuse

    def start(self) -> None:
        """Fork; the child gives up our standard streams, so that a hung one cannot keep the SSH channel open."""
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setpgid(0, 0)
                null = os.open("/dev/null", os.O_RDWR)
                os.dup2(null, 0)
                os.dup2(write_end, 1)
                os.dup2(null, 2)
                result = json.dumps({"value": self.function(self.argument)})
            except BaseException as error:
                result = json.dumps({"error": describe(error)})
            try:
                data = result.encode()
                while data:
                    data = data[os.write(1, data) :]
            finally:
                os._exit(0)
        os.close(write_end)
        try:
            os.setpgid(pid, pid)  # here as well: whoever comes first, kill() must find the group
        except OSError:
            pass
        self.started(pid, [read_end])

    def finish(self) -> None:
        """Hand over the value, or why there is none."""
        if self.failed or self.timed_out:
            self.refuse(self.failed or "no answer in {:g} s".format(self.timeout_s))
            return
        text = bytes(next(iter(self.output.values()))).decode("utf-8", "replace").strip()
        try:
            result = json.loads(text)
            if "error" in result:
                self.refuse(result["error"])
            else:
                self.keep(result.get("value", result))
        except (ValueError, TypeError, AttributeError):
            self.refuse("no answer: " + (text.splitlines() or ["nothing was printed"])[-1][:300])


class Command(Job):
    """A program with its standard output and error."""

    def __init__(self, argv: list[str], timeout_s: float, keep: Callable[[Any], None]) -> None:
        super().__init__(timeout_s)
        self.argv, self.keep = argv, keep

    def start(self) -> None:
        """Spawn the program in a process group of its own, with LC_ALL=C and no input."""
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        try:
            pid = os.posix_spawnp(
                self.argv[0],
                self.argv,
                dict(os.environ, LC_ALL="C"),
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, out_write, 1),
                    (os.POSIX_SPAWN_DUP2, err_write, 2),
                ],
                setpgroup=0,
            )
        except FileNotFoundError:
            self.failed = NOT_INSTALLED
        else:
            self.started(pid, [out_read, err_read])
        os.close(out_write)
        os.close(err_write)

    def finish(self) -> None:
        """Hand over exit status and output; the status is negative for a signal, None when it did not end in time."""
        texts = [bytes(data).decode("utf-8", "replace") for data in self.output.values()] or ["", ""]
        error = self.failed
        if self.timed_out:
            error = "no answer in {:g} s".format(self.timeout_s)
        rc = None
        if self.status is not None and not self.timed_out:
            rc = -os.WTERMSIG(self.status) if os.WIFSIGNALED(self.status) else os.WEXITSTATUS(self.status)
        self.keep({"rc": rc, "stdout": texts[0], "stderr": texts[1], "error": error or None})


def wait_for(jobs: list[Job]) -> None:
    """Read from all jobs until each has ended or passed its deadline, then hand over their answers."""
    poller = select.poll()
    owner = {}  # type: dict[int, Job]
    for job in jobs:
        for fd in job.open:
            poller.register(fd, select.POLLIN | select.POLLHUP | select.POLLERR)
            owner[fd] = job
    running = [job for job in jobs if job.pid]
    while running:
        now = time.monotonic()
        # A job whose pipes are closed is only waited for, in short steps; the others wake us up. 0.1 s bounds how late an
        # end is noticed when something that the job left behind keeps its pipes open.
        pause_s = 0.002 if any(not job.open for job in running) else 0.1
        pause_s = min([pause_s] + [max(0.0, job.deadline - now) for job in running])
        for fd, _ in poller.poll(pause_s * 1000):
            job = owner[fd]
            job.read(fd)
            if fd not in job.open:
                poller.unregister(fd)
        now = time.monotonic()
        for job in list(running):
            ended = job.reap()
            if ended and (not job.open or now - job.exited_at > 0.3):
                pass
            elif now < job.deadline:
                continue
            else:
                job.timed_out = not ended
            for fd in job.open:
                poller.unregister(fd)
            job.kill()
            running.remove(job)
    for job in jobs:
        if job.pid:
            job.reap()  # an attempt, so that a killed child does not stay a zombie for the rest of this run
        job.finish()


class Thread:
    """`function(argument)` in a thread that may be left behind: nothing else interrupts a name look-up."""

    def __init__(
        self,
        function: Callable[[Any], Any],
        argument: Any,
        timeout_s: float,
        keep: Callable[[Any], None],
        refuse: Callable[[str], None],
    ) -> None:
        self.outcome = ("", None)  # type: tuple[str, Any]
        self.work = guarded(function, argument, self._value, self._error)
        self.timeout_s, self.keep, self.refuse = timeout_s, keep, refuse
        self.deadline = 0.0
        self.failed = ""
        self.done = _thread.allocate_lock()

    def _value(self, value: Any) -> None:
        self.outcome = ("value", value)

    def _error(self, text: str) -> None:
        self.outcome = ("error", text)

    def _run(self) -> None:
        try:
            self.work()
        finally:
            self.done.release()

    def start(self) -> None:
        """Start the thread; it is never joined."""
        self.deadline = time.monotonic() + self.timeout_s
        self.done.acquire()
        _thread.start_new_thread(self._run, ())

    def finish(self) -> None:
        """Hand over the value, waiting until the deadline."""
        if self.failed:
            self.refuse(self.failed)
            return
        ended = self.done.acquire(timeout=max(0.0, self.deadline - time.monotonic()))
        kind, value = self.outcome if ended else ("error", "no answer in {:g} s".format(self.timeout_s))
        if kind == "value":
            self.keep(value)
        else:
            self.refuse(value or "no answer")


# ---------------------------------------------------------------------------------------------- files


def expand(pattern: str) -> list[str]:
    """Return the paths `pattern` stands for; one `*` a component, which matches any name. The last component is not looked up."""
    paths = [""]
    for part in pattern.split("/")[1:]:
        if "*" not in part:
            paths = [path + "/" + part for path in paths]
            continue
        head, _, tail = part.partition("*")
        found = []
        for path in paths:
            try:
                names = os.listdir(path or "/")
            except OSError:
                continue
            wanted = [n for n in names if n.startswith(head) and n.endswith(tail) and len(n) >= len(part) - 1]
            found += [path + "/" + name for name in wanted]
        paths = found
    return paths


def read_file(path: str, cap: int = FILE_CAP_BYTES) -> tuple[str, bool]:
    """Return the text of a regular file, up to `cap` bytes, and whether it was cut. A FIFO or a device is refused."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if os.fstat(fd).st_mode & 0o170000 != 0o100000:
            raise OSError(errno.EINVAL, "not a regular file")
        parts = []
        left = cap
        while left > 0:
            data = os.read(fd, min(left, 65536))
            if not data:
                break
            parts.append(data)
            left -= len(data)
        cut = left <= 0 and bool(os.read(fd, 1))
        return b"".join(parts).decode("utf-8", "replace"), cut
    finally:
        os.close(fd)


def read_files(patterns: list[str]) -> dict[str, dict[str, str]]:
    """Return {"files": {path: text}, "errors": {path: text}}. What a `*` matched and is not there is no error."""
    files = {}  # type: dict[str, str]
    errors = {}  # type: dict[str, str]
    for pattern in patterns:
        for path in expand(pattern):
            if len(files) + len(errors) >= FILES_CAP:
                errors[pattern] = "more than {} files".format(FILES_CAP)
                break
            try:
                files[path], cut = read_file(path)
                if cut:
                    errors[path] = "cut at {} bytes".format(FILE_CAP_BYTES)
            except OSError as error:
                if "*" not in pattern or error.errno not in (errno.ENOENT, errno.ENOTDIR):
                    errors[path] = describe(error)
    return {"files": files, "errors": errors}


# ---------------------------------------------------------------------------------------------- natives: files and system calls


def native_head(sizes: dict[str, int]) -> dict[str, str]:
    """Return {path: first bytes}: one read, as /proc/cpuinfo of a large machine costs a call to every CPU."""
    result = {}
    for path, size in sizes.items():
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            result[path] = os.read(fd, size).decode("utf-8", "replace")
        finally:
            os.close(fd)
    return result


def native_listdir(patterns: list[str]) -> dict[str, list[str]]:
    """Return {folder: sorted names} for the folders that are there."""
    result = {}
    for pattern in patterns:
        for path in expand(pattern):
            try:
                result[path] = sorted(os.listdir(path))
            except (FileNotFoundError, NotADirectoryError):
                pass
    return result


def native_readlink(patterns: list[str]) -> dict[str, str]:
    """Return {path: target} for the links among the matches."""
    result = {}
    for pattern in patterns:
        for path in expand(pattern):
            try:
                result[path] = os.readlink(path)
            except OSError:
                pass
    return result


def native_access(paths: list[str]) -> dict[str, str | None]:
    """Return {path: "rwx" as far as this account may}; None = not there."""
    modes = (("r", os.R_OK), ("w", os.W_OK), ("x", os.X_OK))
    return {p: "".join(m for m, flag in modes if os.access(p, flag)) if os.access(p, os.F_OK) else None for p in paths}


def native_statvfs(paths: list[str]) -> dict[str, dict[str, int] | None]:
    """Return {path: sizes in bytes, counts of inodes}; None = not there."""
    result = {}  # type: dict[str, dict[str, int] | None]
    for path in paths:
        try:
            result[path] = sizes_of(path)
        except FileNotFoundError:
            result[path] = None
    return result


def sizes_of(path: str) -> dict[str, int]:
    """Return size and free space (for this account) of the file system below `path`, in bytes, and its inodes."""
    stat = os.statvfs(path)
    unit = stat.f_frsize or stat.f_bsize
    return {
        "total_bytes": stat.f_blocks * unit,
        "free_bytes": stat.f_bavail * unit,
        "inodes": stat.f_files,
        "free_inodes": stat.f_favail,
    }


def native_uname(_: Any) -> dict[str, str]:
    """Return the fields of uname(2)."""
    u = os.uname()
    return {"sysname": u.sysname, "nodename": u.nodename, "release": u.release, "version": u.version, "machine": u.machine}


def native_interpreter(_: Any) -> str:
    """Return the version of the Python that runs this: the node's own python3."""
    return "{}.{}.{}".format(*sys.version_info[:3])


def native_rlimits(names: list[str]) -> dict[str, list[int | None]]:
    """Return {name: [soft, hard]} of this process, so of a non-interactive login; None = unlimited."""
    import resource

    def plain(value: int) -> int | None:
        return None if value == resource.RLIM_INFINITY else value

    return {n: [plain(v) for v in resource.getrlimit(getattr(resource, "RLIMIT_" + n.upper()))] for n in names}


def native_affinity(_: Any) -> list[int]:
    """Return the CPUs this process may run on."""
    return sorted(os.sched_getaffinity(0))


def native_processes(names: list[str]) -> dict[str, Any]:
    """Return which of `names` run (the kernel's 15 characters) and whether /proc hides other people's processes."""
    wanted = {name.encode()[:15] for name in names}
    found = set()  # type: set[bytes]
    pids = sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    for pid in pids:
        try:
            fd = os.open("/proc/{}/comm".format(pid), os.O_RDONLY)
        except OSError:
            continue
        try:
            comm = os.read(fd, 32).rstrip(b"\n")
        except OSError:
            comm = b""
        os.close(fd)
        if comm in wanted:
            found.add(comm)
    return {"found": sorted(name.decode() for name in found), "hidden": 1 not in pids}


def native_blocked(request: dict[str, Any]) -> list[list[Any]]:
    """Return [pid, name, uid, what it waits for] of the processes that cannot even be killed and do not get on.

    A process that reads from a busy server sleeps so as well, but wakes up in between. So it must have waited in one function of
    the kernel whose name starts with one of `waits`, without having run, at looks `pauses_s` apart; mostly one look is all. What
    another account's process waits for only root may see. `in_nfs`: not even one look where there is no NFS.
    """
    if request.get("in_nfs") and not has_nfs():
        return []

    def look(pids: list[str]) -> dict[str, list[Any]]:
        found = {}
        for pid in pids:
            try:
                head, _, tail = read_file("/proc/{}/stat".format(pid))[0].rpartition(")")
                if tail[1:2] != "D":
                    continue
                wait = read_file("/proc/{}/wchan".format(pid))[0].strip()
                if wait.startswith(tuple(request["waits"])):
                    status = read_file("/proc/{}/status".format(pid))[0]
                    runs = [line for line in status.splitlines() if "ctxt_switches" in line]
                    found[pid] = [int(pid), head.partition("(")[2], os.stat("/proc/{}".format(pid)).st_uid, wait, runs]
            except OSError:
                pass  # it ended, or is another account's
        return found

    stuck = look([entry for entry in os.listdir("/proc") if entry.isdigit()])
    for pause_s in request["pauses_s"]:
        if not stuck:
            break
        time.sleep(pause_s)
        again = look(list(stuck))
        stuck = {pid: seen for pid, seen in stuck.items() if again.get(pid) == seen}
    return [seen[:4] for _, seen in sorted(stuck.items())]


def has_nfs() -> bool:
    """Return whether NFS is mounted here, or a lazy unmount has left a server behind. A container may see only the mount."""
    try:
        servers = read_file("/proc/fs/nfsfs/servers")[0]
    except OSError:
        servers = ""
    return servers.count("\n") > 1 or " nfs" in read_file("/proc/self/mounts", OUTPUT_CAP_BYTES)[0]


def native_gids(patterns: list[str]) -> dict[str, str]:
    """Return {path: text} of the GIDs in use below port folders, with their types and net devices.

    A table has up to 256 entries, nearly all of them zero; reading type or device of an empty one fails with EINVAL.
    """
    result = {}
    for pattern in patterns:
        for path in expand(pattern + "/gids/*"):
            try:
                gid = read_file(path)[0]
            except OSError:
                continue
            if not gid.strip(" \n0:"):
                continue
            result[path] = gid
            port, index = path.rsplit("/gids/", 1)
            for kind in ("types", "ndevs"):
                attribute = "{}/gid_attrs/{}/{}".format(port, kind, index)
                try:
                    result[attribute] = read_file(attribute)[0]
                except OSError:
                    pass
    return result


def native_owners(_: Any) -> dict[str, list[int]]:
    """Return {user id: its processes}. Whose process a driver's list names can only be asked while it runs."""
    owners = {}  # type: dict[str, list[int]]
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                owners.setdefault(str(os.stat("/proc/" + entry).st_uid), []).append(int(entry))
            except OSError:
                pass
    return owners


PCI_OF_DEVICE = ("current_link_width", "max_link_width", "current_link_speed", "max_link_speed", "numa_node")
PCI_OF_PORT = ("vendor", "max_link_width", "max_link_speed")
PCI_OF_BOTH = ("aer_dev_correctable", "aer_dev_nonfatal", "aer_dev_fatal")
PCI_ASPM = ("link/l0s_aspm", "link/l1_aspm")


def native_pci(root: str) -> list[dict[str, Any]]:
    """Return what sysfs says about the NVIDIA display controllers and the network controllers below `root`; none without PCI.

    Each has "pci", "class", "vendor", "upstream" (the bridges from the root port down), the texts of its attributes in "device"
    and those of the port right above it in "port", what "driver" is bound to it, the domain type of its "iommu" group ("off" when
    it is in none), "netdevs" and "hcas", and in "acs" the control register of each bridge above a GPU (null: only root may read).
    """
    try:
        names = sorted(os.listdir(root))
    except (FileNotFoundError, NotADirectoryError):
        return []
    devices = []
    acs = {}  # type: dict[str, int | None]
    for name in names:
        here = root + "/" + name
        kind = line_of(here + "/class")  # one read for each of some hundred functions, more for a few of them only
        display = kind.startswith(("0x0300", "0x0302"))
        vendor = line_of(here + "/vendor") if display or kind.startswith("0x02") else ""
        if not vendor or (display and vendor != "0x10de"):
            continue
        try:
            path = os.path.normpath(os.path.join(root, os.readlink(here)))
        except OSError:
            path = here
        above = os.path.dirname(path)
        bridges = []  # type: list[str]
        while above.count(":") and is_pci_address(os.path.basename(above)):
            bridges.insert(0, above)
            above = os.path.dirname(above)
        for bridge in bridges:
            if display and os.path.basename(bridge) not in acs:
                acs[os.path.basename(bridge)] = acs_control(bridge + "/config")
        upstream = [os.path.basename(bridge) for bridge in bridges]
        devices.append(
            {
                "pci": name,
                "class": kind,
                "vendor": vendor,
                "upstream": upstream,
                "device": attributes(path, PCI_OF_DEVICE + PCI_OF_BOTH + PCI_ASPM),
                "port": attributes(bridges[-1], PCI_OF_PORT + PCI_OF_BOTH) if bridges else {},
                "driver": link_name(path + "/driver"),
                "iommu": line_of(path + "/iommu_group/type") if os.path.exists(path + "/iommu_group") else "off",
                "netdevs": names_in(path + "/net"),
                "hcas": names_in(path + "/infiniband"),
                "acs": {bridge: acs[bridge] for bridge in upstream if bridge in acs},
            }
        )
    return devices


def line_of(path: str) -> str:
    """Return the stripped text of a small file, "" when it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return ""
    try:
        return os.read(fd, 4096).decode("utf-8", "replace").strip()
    except OSError:
        return ""
    finally:
        os.close(fd)


def link_name(path: str) -> str | None:
    """Return the last part of a link's target, None when there is no link."""
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return None


def attributes(folder: str, names: tuple[str, ...]) -> dict[str, str]:
    """Return {name: text} of the attributes that can be read; of error counters only the totals and what is not zero."""
    found = {}
    for name in names:
        text = line_of(folder + "/" + name)
        if name.startswith("aer_"):
            text = "\n".join(line for line in text.splitlines() if line.startswith("TOTAL") or not line.endswith(" 0"))
        if text:
            found[name] = text
    return found


def names_in(folder: str) -> list[str]:
    """Return the sorted names in a folder, none when it is not there."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def is_pci_address(name: str) -> bool:
    """Return whether `name` is like 0000:41:00.0; a host bridge's folder is like pci0000:40."""
    parts = name.split(":")
    return len(parts) == 3 and len(parts[2]) == 4 and parts[2][2] == "."


def acs_control(path: str) -> int | None:
    """Return the Access Control Services control register of a bridge, 0 when it has none, None when it cannot be read.

    PCIe extended capabilities (PCI Express Base Specification, 7.6): a list from 0x100 on; others than root see 64 bytes.
    """
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        place = 0x100
        for _ in range(64):
            data = os.pread(fd, 8, place)
            if len(data) < 8:
                return 0 if place == 0x100 and os.pread(fd, 4, 0x40) else None  # 256 bytes: no extended capabilities
            header, registers = struct.unpack("<LL", data)
            if header & 0xFFFF == 0x000D:
                return int(registers >> 16)
            place = header >> 20 & 0xFFC
            if place < 0x100:
                return 0
    except OSError:
        pass
    finally:
        os.close(fd)
    return None


# ---------------------------------------------------------------------------------------------- natives: network


def netlink(kind: int, flags: int, body: bytes) -> list[tuple[bytes, dict[int, bytes]]]:
    """Return (whole message body, attributes) of each answer to one rtnetlink request. Nothing leaves the machine.

    rtnetlink(7): exact where SIOCGIFCONF and a connected UDP socket guess (secondary addresses, one address on two interfaces).
    Raises OSError with the kernel's errno, e.g. ENETUNREACH.
    """
    answers = []  # type: list[tuple[bytes, dict[int, bytes]]]
    header_bytes = {20: 8, 24: 12, 78: 4}  # RTM_NEWADDR: struct ifaddrmsg; RTM_NEWROUTE: struct rtmsg; RTM_GETDCB: struct dcbmsg
    channel = _socket.socket(_socket.AF_NETLINK, _socket.SOCK_RAW, 0)
    try:
        channel.settimeout(5)
        channel.sendto(struct.pack("=LHHLL", 16 + len(body), kind, flags | 1, 1, 0) + body, (0, 0))
        while True:
            data = channel.recv(262_144)
            while len(data) >= 16:
                size, type_, reply_flags = struct.unpack_from("=LHH", data)
                message, data = data[16:size], data[(size + 3) & ~3 :]
                if type_ == 2:  # NLMSG_ERROR
                    code = -struct.unpack_from("=l", message)[0]
                    raise OSError(code, os.strerror(code))
                if type_ == 3:  # NLMSG_DONE
                    return answers
                attributes = dict(attributes_of(message[header_bytes.get(type_, len(message)) :]))
                answers.append((message, attributes))
                if not reply_flags & 2:  # NLM_F_MULTI: more to come
                    return answers
    finally:
        channel.close()


def attributes_of(data: bytes) -> list[tuple[int, bytes]]:
    """Return (kind, value) of each netlink attribute in `data`, which may be the value of a nested one."""
    found = []
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        found.append((kind & 0x3FFF, data[4:length]))  # without NLA_F_NESTED and NLA_F_NET_BYTEORDER
        data = data[max(4, (length + 3) & ~3) :]
    return found


def native_dcb(patterns: list[str]) -> dict[str, dict[str, Any] | None]:
    """Return {iface: {"pfc": bit mask of priorities, "dscp": [[code point, priority], ...]}}; None = the driver knows no DCB.

    `patterns` are folders below /sys/class/net. The IEEE 802.1Qaz part of linux/dcbnl.h, which `dcb pfc show` and `dcb app show`
    print; reading it takes no privilege.
    """
    result = {}  # type: dict[str, dict[str, Any] | None]
    for iface in [path.rsplit("/", 1)[1] for pattern in patterns for path in expand(pattern)]:
        name = iface.encode() + b"\0"
        body = struct.pack("=BBH", 0, 21, 0)  # DCB_CMD_IEEE_GET
        body += struct.pack("=HH", 4 + len(name), 1) + name + b"\0" * (-len(name) % 4)  # DCB_ATTR_IFNAME
        try:
            ieee = dict(attributes_of(netlink(78, 0, body)[0][1].get(13, b"")))  # DCB_ATTR_IEEE
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENODEV):
                raise
            result[iface] = None
            continue
        pfc, applications = ieee.get(2, b""), attributes_of(ieee.get(3, b""))  # DCB_ATTR_IEEE_PFC, DCB_ATTR_IEEE_APP_TABLE
        entries = [struct.unpack_from("=BBH", value) for _, value in applications if len(value) >= 4]  # struct dcb_app
        result[iface] = {
            "pfc": pfc[1] if len(pfc) > 1 else None,  # struct ieee_pfc: pfc_cap, pfc_en, ...
            "dscp": sorted([point, priority] for selector, priority, point in entries if selector == 5),
        }
    return result


def native_addresses(_: Any) -> list[list[str]]:
    """Return [iface, "address/prefix length"] for every IPv4 and IPv6 address."""
    result = []
    for message, attributes in netlink(22, 0x300, struct.pack("=BBBBL", 0, 0, 0, 0, 0)):  # RTM_GETADDR, NLM_F_DUMP
        family, prefix, _flags, _scope, index = struct.unpack_from("=BBBBL", message)
        raw = attributes.get(2) or attributes.get(1)  # IFA_LOCAL: on a point-to-point link IFA_ADDRESS is the peer's
        if raw:
            result.append([_socket.if_indextoname(index), "{}/{}".format(_socket.inet_ntop(family, raw), prefix)])
    return result


def route_to(target: str) -> dict[str, Any]:
    """Return {"address", "iface", "source"} that the kernel would use towards a name or address."""
    address = target if is_address(target) else (resolve(target) or [""])[0]
    if not address:
        raise OSError(errno.EADDRNOTAVAIL, "does not resolve")
    family = _socket.AF_INET6 if ":" in address else _socket.AF_INET
    raw = _socket.inet_pton(family, address)
    body = struct.pack("=BBBBBBBBL", family, len(raw) * 8, 0, 0, 0, 0, 0, 0, 0) + struct.pack("=HH", 4 + len(raw), 1) + raw
    attributes = netlink(26, 0, body)[0][1]  # RTM_GETROUTE with RTA_DST: what `ip route get` asks
    out = attributes.get(4)  # RTA_OIF
    source = attributes.get(7)  # RTA_PREFSRC
    return {
        "address": address,
        "iface": _socket.if_indextoname(struct.unpack("=L", out)[0]) if out else None,
        "source": _socket.inet_ntop(family, source) if source else None,
    }


def is_address(text: str) -> bool:
    """Return whether `text` is an IPv4 or IPv6 address rather than a name."""
    for family in (_socket.AF_INET, _socket.AF_INET6):
        try:
            _socket.inet_pton(family, text)
            return True
        except (OSError, ValueError):
            pass
    return False


def resolve(name: str) -> list[str]:
    """Return the addresses this machine resolves `name` to, in its order of preference; empty = it does not resolve."""
    try:
        found = _socket.getaddrinfo(name, None, 0, _socket.SOCK_STREAM)
    except _socket.gaierror:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def native_passwd(_: Any) -> dict[str, Any]:
    """Return this account's entry; in a thread, as it may come from a directory server."""
    import pwd

    entry = pwd.getpwuid(os.getuid())
    return {"uid": os.getuid(), "gid": os.getgid(), "name": entry.pw_name, "home": entry.pw_dir, "shell": entry.pw_shell}


# ---------------------------------------------------------------------------------------------- natives: in a child each


def disk(path: str) -> dict[str, Any]:
    """Return what the file system says below `path` ("~" = home), or below its nearest existing parent.

    `writable` asks access(2): on NFS the server answers, and knows better than the mount options.
    """
    path = os.path.expanduser(path)
    probed = path
    while True:
        try:
            os.stat(probed)
            break
        except FileNotFoundError:
            if os.path.dirname(probed) == probed:
                raise
            probed = os.path.dirname(probed)
    result = {"path": path, "exists": probed == path, "probed": probed, "writable": os.access(probed, os.W_OK | os.X_OK)}
    result.update(sizes_of(probed))
    result.update(mount_of(probed))  # read last: the stat above may have made an automounter mount it
    return result


def mount_of(path: str) -> dict[str, str]:
    """Return {"source", "target", "fstype"} of what holds an existing path. The last matching line hides the ones before it."""
    real = os.path.realpath(path)
    target, result = "", {}  # type: str, dict[str, str]
    for line in read_file("/proc/self/mounts")[0].splitlines():
        fields = line.split(" ", 3)
        mounted = unescape(fields[1]) if len(fields) == 4 else ""
        if mounted and len(mounted) >= len(target) and (real + "/").startswith(mounted.rstrip("/") + "/"):
            target = mounted
            result = {"source": unescape(fields[0]), "target": target, "fstype": fields[2]}
    return result


def native_caches(wanted: list[list[Any]]) -> dict[str, dict[str, Any]]:
    """Return {variable: {"path", "source", "target", "fstype", "locks": [[path, age in seconds], ...]}}.

    `wanted`: [variable, path, whether to look for locks] each. `locks` are the files called `lock` one and two folders down:
    torch's extension builder waits for such a file for ever.
    """
    result = {}  # type: dict[str, dict[str, Any]]
    for variable, path, lockable in wanted:
        path = os.path.abspath(os.path.expanduser(path))
        probed = path
        while not os.path.lexists(probed):
            probed = os.path.dirname(probed)
        locks = []
        for found in expand(path + "/*/lock") + expand(path + "/*/*/lock") if lockable else ():
            try:
                locks.append([found, time.time() - os.lstat(found).st_mtime])
            except OSError:
                pass
        result[variable] = {"path": path, "locks": locks, **mount_of(probed)}
    return result


def native_tools(wanted: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return {program: [path, real path, whether its file holds the text]} of those that are there.

    `wanted`: {program: [[further paths, with at most one * a component], text or ""]}. The PATH of this login comes first.
    """
    found = {}
    folders = [folder for folder in os.environ.get("PATH", "").split(":") if folder]
    for program, (further, text) in wanted.items():
        places = [folder + "/" + program for folder in folders]
        places += [path for pattern in further for path in expand(os.path.expanduser(pattern))]
        path = next((p for p in places if os.path.isfile(p) and os.access(p, os.X_OK)), None)
        if path is not None:
            found[program] = [path, os.path.realpath(path), holds(path, text.encode()) if text else None]
    return found


def holds(path: str, text: bytes) -> bool:
    """Return whether `text`, the name of a library, stands in the file of a program.

    The names of all its libraries stand together, mostly at its beginning: what comes far behind that of libc is not read.
    """
    before, near = b"", False
    with open(path, "rb") as file:
        while True:
            data = file.read(1048576)
            if text in before + data:
                return True
            if near or not data:
                return False
            near = b"libc.so." in before + data
            before = data[-len(text) :]


def shm_names(folder: str) -> list[str]:
    """Return what NCCL and torch call their files, of those in `folder`: mostly none, and then nothing is looked into."""
    return [name for name in names_in(folder) if name.startswith(("nccl-", "torch_"))][:1000]


def shm(folder: str) -> list[dict[str, Any]]:
    """Return {"name", "uid", "bytes", "age_s", "used"} of what NCCL and torch left in `folder` (/dev/shm).

    `used`: a process maps it or, by the number in torch's names, made it and lives. None = not told: a process of its owner could
    not be looked into.
    """
    names = shm_names(folder)
    mapped = set()  # type: set[str]
    unseen = set()  # type: set[int]
    for pid in [entry for entry in os.listdir("/proc") if entry.isdigit()]:
        try:
            uid = os.stat("/proc/{}".format(pid)).st_uid
            try:
                text = read_file("/proc/{}/maps".format(pid), OUTPUT_CAP_BYTES)[0]
            except PermissionError:
                unseen.update([uid] if pid != "1" else [])  # init trains nothing
                continue
        except OSError:
            continue  # it ended
        mapped.update(line.rpartition(folder + "/")[2] for line in text.splitlines() if folder + "/" in line)
    result = []
    for name in names:
        try:
            stat = os.lstat(folder + "/" + name)
        except OSError:
            continue
        maker = name.split("_")[1] if name.startswith("torch_") and name.count("_") > 1 else ""
        used = name in mapped or (maker.isdigit() and os.path.exists("/proc/" + maker))
        result.append(
            {
                "name": name,
                "uid": stat.st_uid,
                "bytes": stat.st_blocks * 512,
                "age_s": time.time() - stat.st_mtime,
                "used": True if used else None if stat.st_uid in unseen else False,
            }
        )
    return result


def unescape(field: str) -> str:
    r"""Return a field of /proc/mounts with its octal escapes (\040 = blank) decoded."""
    if "\\" not in field:
        return field
    head, *rest = field.split("\\")
    return head + "".join(chr(int(part[:3], 8)) + part[3:] for part in rest)


def python(executable: str) -> dict[str, Any]:
    """Return {"version", "distributions": [names of *.dist-info, a list a folder], "told_by"} of a Python.

    A virtual environment and a conda environment are read from their folders; any other layout is asked by running it.
    """
    if not os.path.exists(executable):
        dangling = os.path.islink(executable)
        raise OSError(
            errno.ENOENT, "a link to {}, which is not there".format(os.readlink(executable)) if dangling else "not there"
        )
    if not os.access(executable, os.X_OK) or os.path.isdir(executable):
        raise OSError(errno.EACCES, "not executable by this account")
    prefix = os.path.dirname(os.path.dirname(os.path.abspath(executable)))
    version, told_by = "", ""
    try:
        lines = [line.partition("=") for line in read_file(prefix + "/pyvenv.cfg")[0].splitlines()]
        settings = {key.strip().lower(): value.strip() for key, _, value in lines}
        told_by = "pyvenv.cfg"
        if settings.get("include-system-site-packages", "").lower() != "true":
            version = settings.get("version_info") or settings.get("version") or ""
    except OSError:
        for path in expand(prefix + "/conda-meta/python-3.*.json"):
            told_by = "conda-meta"
            version = os.path.basename(path).split("-")[1]
    numbers = version.split(".")[:3]
    if len(numbers) == 3 and all(number.isdigit() for number in numbers):
        folders = [f"{prefix}/{lib}/python{numbers[0]}.{numbers[1]}/site-packages" for lib in ("lib", "lib64")]
        found = []
        for folder in dict.fromkeys(os.path.realpath(folder) for folder in folders):
            try:
                found.append([name for name in os.listdir(folder) if name.endswith((".dist-info", ".egg-info"))])
            except FileNotFoundError:
                pass
        if found:
            return {"version": ".".join(numbers), "distributions": found, "told_by": told_by}
    os.dup2(1, 2)
    os.chdir("/")
    return os.execv(executable, [executable, "-c", ASK_PYTHON])  # it answers through the same pipe, under the same timeout


INLINE = {
    "access": native_access,
    "addresses": native_addresses,
    "affinity": native_affinity,
    "caches": native_caches,
    "dcb": native_dcb,
    "gids": native_gids,
    "head": native_head,
    "interpreter": native_interpreter,
    "listdir": native_listdir,
    "owners": native_owners,
    "pci": native_pci,
    "processes": native_processes,
    "readlink": native_readlink,
    "rlimits": native_rlimits,
    "statvfs": native_statvfs,
    "tools": native_tools,
    "uname": native_uname,
}  # type: dict[str, Callable[[Any], Any]]
THREAD = {"blocked": native_blocked, "passwd": native_passwd}  # type: dict[str, Callable[[Any], Any]]
THREAD_PER_ITEM = {"resolve": resolve, "route": route_to}  # type: dict[str, Callable[[Any], Any]]
CHILD_PER_ITEM = {"disk": disk, "python": python, "shm": shm}  # type: dict[str, Callable[[Any], Any]]
WORTH_A_CHILD = {"shm": shm_names}  # type: dict[str, Callable[[Any], Any]]
