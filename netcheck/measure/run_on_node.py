"""Runs on a node: start programs one after the other, read counters before and after. Python >= 3.8, standard library only.

    request = {"steps": [{"argv", "timeout_s", "listens_on", "retry_on", "env"}], "files": {name: text}, "counters": [glob],
               "watch": {name: argv}, "retry_for_s", "limit_s"}
    result  = {"steps": [{"rc", "stdout", "stderr", "error", "duration_s"}], "before", "after": {path: text},
               "watched": {name: [before, after]}}, or {"error": text} when nothing could be begun

Nothing is left behind: every program has a process group of its own and dies with us, we adopt what it leaves (a daemon's child,
torchrun's workers have sessions of their own) and end that too, and the temporary folder is removed. The end of standard input
means stop: the controller asks for it, or is gone. Then what runs is ended and what is known is answered.
"""

from __future__ import annotations

import ctypes
import glob
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

NOT_INSTALLED = "not installed"
EVENT = "\nR4090C-EVENT "
OUTPUT_CAP_BYTES = 1048576
"""Of each stream; of longer ones the beginning and the end are kept."""
PART_CAP_BYTES = 4194304
"""Of all steps together: bytes that are no text take six times as much on their way."""
LEAST_CAP_BYTES = 65536
"""Of a stream, whatever was said before."""
CUT = b"\n[...]\n"
"""Stands where output was cut out."""
COUNTERS_CAP = 4096
GRACE_S = 2.0
"""est.: between TERM and KILL."""
LAST_WORDS_S = 2.0
"""est.: how long what a program leaves behind may go on holding its output once it has ended itself."""
ANSWER_S = 60
"""est.: sending an answer of some MiB over a slow line."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
TOOL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Appended to PATH: a non-interactive shell often lacks the sbin folders."""

libc = ctypes.CDLL(None)
running = []  # type: list[subprocess.Popen[bytes]]
"""What we started and have not heard the end of."""
folders = []  # type: list[str]
"""Temporary folders that we made."""


class StopError(Exception):
    """The controller wants an end, or is gone."""


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Return what the steps did (shapes: see the module)."""
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, stop)
    os.environ["PATH"] = ":".join(part for part in (os.environ.get("PATH"), TOOL_PATH) if part)
    deadline = time.monotonic() + float(request["limit_s"])
    results = []  # type: list[dict[str, Any]]
    before = after = {}  # type: dict[str, str]
    watched = {}  # type: dict[str, list[str]]
    try:
        try:
            folder = prepare(request["files"])
        except OSError as problem:
            return {"error": "no room for temporary files: " + (problem.strerror or str(problem))}
        before = read_counters(request["counters"])
        look(request["watch"], watched, folder)
        for step in request["steps"]:
            room = PART_CAP_BYTES - sum(len(one["stdout"]) + len(one["stderr"]) for one in results)
            step["cap_bytes"] = max(LEAST_CAP_BYTES, min(OUTPUT_CAP_BYTES, room // 2))
            result = run_with_retries(step, folder, float(request["retry_for_s"]), deadline)
            results.append(result)
            if result["error"]:
                break
        after = read_counters(request["counters"])
        look(request["watch"], watched, folder)
    except StopError:
        pass
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)  # a second one must not keep us from cleaning up, which is bounded
        end_everything()
        for path in folders:
            shutil.rmtree(path, ignore_errors=True)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(ANSWER_S)  # a controller that went without a word reads nothing, and writing to it would wait for ever
    while len(results) < len(request["steps"]):
        results.append({"rc": None, "stdout": "", "stderr": "", "error": "not started", "duration_s": 0.0})
    return {"steps": results, "before": before, "after": after, "watched": watched}


def prepare(files: dict[str, str]) -> str:
    """Return a new temporary folder with `files` in it."""
    folder = tempfile.mkdtemp(prefix="r4090c-measure-")
    folders.append(folder)
    for name, text in files.items():
        with open(os.path.join(folder, os.path.basename(name)), "w", encoding="utf-8") as file:
            file.write(text)
    return folder


def stop(number: int, frame: object) -> None:
    """Turn a signal into an orderly end."""
    raise StopError


def tell(event: dict[str, Any]) -> None:
    """Tell the controller something while we go on."""
    sys.stdout.write(EVENT + json.dumps(event) + "\n")
    sys.stdout.flush()


def run_with_retries(step: dict[str, Any], folder: str, retry_for_s: float, deadline: float) -> dict[str, Any]:
    """Run a step again while the other side may not be ready; return what the last try did."""
    until = min(deadline, time.monotonic() + retry_for_s)
    while True:
        result = run(step, folder, deadline)
        said = result["stdout"] + result["stderr"]
        # Whatever the exit status: iperf3 -J ends with 0 also when it could not connect.
        again = result["rc"] is not None and any(text in said for text in step["retry_on"])
        if not again or time.monotonic() >= until:
            return result
        time.sleep(0.05)


def run(step: dict[str, Any], folder: str, deadline: float) -> dict[str, Any]:
    """Run one program to its end, its timeout, or until we are told to stop."""
    started = time.monotonic()
    deadline = min(deadline, started + float(step["timeout_s"]))
    argv = [word.replace("{folder}", folder) for word in step["argv"]]
    env = dict(os.environ, LC_ALL="C", TMPDIR=folder)  # where there is room, and from where it goes again
    env.update(step["env"])
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            cwd=folder,
            preexec_fn=die_with_parent,
            start_new_session=True,
        )
    except FileNotFoundError:
        return {"rc": None, "stdout": "", "stderr": "", "error": NOT_INSTALLED, "duration_s": 0.0}
    except (OSError, subprocess.SubprocessError) as problem:
        text = getattr(problem, "strerror", None) or str(problem)
        return {"rc": None, "stdout": "", "stderr": "", "error": "cannot be started: " + text, "duration_s": 0.0}
    running.append(process)
    assert process.stdout is not None and process.stderr is not None
    texts = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    open_fds = set(texts)
    waits_for = step["listens_on"]
    cap_bytes = step.get("cap_bytes", OUTPUT_CAP_BYTES)
    error = ""
    ended = 0.0
    try:
        while process.poll() is None or open_fds:
            now = time.monotonic()
            if process.poll() is not None:
                ended = ended or now
                if now > ended + LAST_WORDS_S:
                    break  # something it left behind keeps its output open
            elif now >= deadline:
                error = "no end within {:g} s".format(float(step["timeout_s"]))
                break
            if waits_for is not None and listens(waits_for):
                tell({"listens_on": waits_for})
                waits_for = None
            wanted = list(open_fds) + [0]
            ready, _, _ = select.select(wanted, [], [], 0.02 if waits_for is not None or not open_fds else 0.1)
            if 0 in ready and not os.read(0, 4096):
                error = "stopped"
                break
            for fd in ready:
                if fd:
                    data = os.read(fd, 65536)
                    if data:
                        keep(texts[fd], data, cap_bytes)
                    else:
                        open_fds.discard(fd)
    finally:
        end_everything()
        for fd in open_fds:  # what it said before it was ended
            os.set_blocking(fd, False)
            try:
                keep(texts[fd], os.read(fd, 65536), cap_bytes)
            except OSError:
                pass
        process.stdout.close()
        process.stderr.close()
        running.remove(process)
        rc = process.poll()
    out, err = (bytes(cut(data, cap_bytes)).decode("utf-8", "replace") for data in texts.values())
    if waits_for is not None and error != "stopped":
        said = [line.strip() for line in (out + "\n" + err).splitlines() if line.strip()]
        tell({"listens_on": None, "said": said[-1][:300] if said else ""})
    duration_s = time.monotonic() - started
    return {"rc": None if error else rc, "stdout": out, "stderr": err, "error": error, "duration_s": duration_s}


def keep(text: bytearray, data: bytes, cap_bytes: int) -> None:
    """Append, and cut what gets far too long: not at every turn, which would move a MiB each time."""
    text += data
    if len(text) > 4 * cap_bytes:
        cut(text, cap_bytes)


def cut(text: bytearray, cap_bytes: int) -> bytearray:
    """Take the middle out of what is longer than `cap_bytes`, and return it."""
    if len(text) > cap_bytes + len(CUT):
        half = cap_bytes // 2
        text[half : len(text) - half] = CUT
    return text


def die_with_parent() -> None:
    """In the child: be killed when we are."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def listens(port: int) -> bool:
    """Return whether somebody listens on this TCP port (state 0A of proc_net_tcp(5))."""
    wanted = f":{port:04X}"
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(path) as file:
                for line in file:
                    fields = line.split()
                    if len(fields) > 3 and fields[3] == "0A" and fields[1].endswith(wanted):
                        return True
        except OSError:
            pass
    return False


def read_counters(patterns: list[str]) -> dict[str, str]:
    """Return path -> text of the files that match, as far as they can be read."""
    found = {}  # type: dict[str, str]
    for pattern in patterns:
        for path in sorted(glob.glob(pattern)):
            if len(found) >= COUNTERS_CAP:
                return found
            try:
                with open(path, encoding="utf-8", errors="replace") as file:
                    found[path] = file.read(16384)
            except OSError:
                pass
    return found


def look(commands: dict[str, list[str]], watched: dict[str, list[str]], folder: str) -> None:
    """Run each command that shows a state, and append what it printed."""
    for name, argv in commands.items():
        step = {"argv": argv, "timeout_s": 10, "listens_on": None, "env": {}}
        result = run(step, folder, time.monotonic() + 10)
        watched.setdefault(name, []).append(result["stdout"] if not result["error"] else "")


def end_everything() -> None:
    """End all processes below us: TERM, then KILL; what they leave becomes our child, so look until there is none."""
    patience = time.monotonic() + GRACE_S
    last = patience + GRACE_S  # what is in uninterruptible sleep outlives KILL: it is left, and dies with its sleep
    while time.monotonic() < last:
        reap()
        below = children()
        if not below:
            return
        for pid in below:
            try:
                os.kill(pid, signal.SIGTERM if time.monotonic() < patience else signal.SIGKILL)
                os.kill(pid, signal.SIGCONT)
            except OSError:
                pass
        time.sleep(0.02)


def reap() -> None:
    """Collect those that have ended; the exit status of what we started ourselves stays with its Popen."""
    for process in running:
        process.poll()
    for pid in children(ended=True):
        try:
            os.waitpid(pid, os.WNOHANG)
        except OSError:
            pass


def children(ended: bool = False) -> list[int]:
    """Return the pids below us (not only direct ones) that run, or those of our direct children that have ended."""
    parent_of = {}  # type: dict[int, int]
    gone = set()  # type: set[int]
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/" + name + "/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            parent_of[int(name)] = int(fields[1])
            if fields[0] == "Z":
                gone.add(int(name))
    me = os.getpid()
    if ended:
        return [pid for pid in gone if parent_of[pid] == me]
    found = []
    for pid in parent_of:
        above = pid
        while above in parent_of and above != me:
            above = parent_of[above]
        if above == me and pid != me and pid not in gone:
            found.append(pid)
    return found
