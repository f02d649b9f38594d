"""Runs on a node: hold, read or remove nonce files in the shared folder. Python >= 3.8, standard library only.

The file system may hang for ever (a hard NFS mount whose server is gone): a child does the work and is killed when it does
not answer in time. Who holds a file removes it at the end of standard input: the controller is done, or is gone.
"""

# pathlib costs more to import than all this does.
# ruff: noqa: PTH105, PTH108, PTH116, PTH118, PTH123

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from typing import Any

EVENT = "\nR4090C-EVENT "
STALE_S = 3600.0
"""A file this old was left by a node that lost its power or its file server; the next writer removes it."""
LOOK_AGAIN_S = 0.05


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Return what the action gives, {"error": text} when the folder says no, or nothing in time.

    request: {"action": "hold", "folder", "file", "content", "prefix", "hold_s"} -> {"write", "remove"}; "write" is told before
             {"action": "write", "folder", "file", "content", "prefix"} -> {"seconds"}
             {"action": "read", "folder", "files": {node: [file, content]}, "limit_s"}
                 -> {"seen": {node: {"waited_s"} or {"error"}}}
             {"action": "remove", "folder", "names": [file]} -> {"removed"}
    each with "answer_within_s".
    """
    return hold(request) if request["action"] == "hold" else act(request)


def hold(request: dict[str, Any]) -> dict[str, Any]:
    """Write the file, tell so, and remove it when standard input ends, at the latest after "hold_s"; also what failed."""
    removed = {}  # type: dict[str, Any]
    wrote = act(dict(request, action="write"))
    try:
        sys.stdout.write(EVENT + json.dumps(wrote) + "\n")
        sys.stdout.flush()
        deadline = time.monotonic() + float(request["hold_s"])
        while time.monotonic() < deadline and not abandoned():
            if select.select([0], [], [], 0.2)[0] and not os.read(0, 4096):
                break
    except OSError:
        pass  # nobody hears us
    finally:
        removed = act(dict(request, action="remove", names=[request["file"]], heard=False))
    return {"write": wrote, "remove": removed}


def act(request: dict[str, Any]) -> dict[str, Any]:
    """Return what a child makes of "write", "read" or "remove". With "heard" False also when nobody reads our answer any more."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        work(request, writer)
    os.close(writer)
    try:
        text = read_all(reader, time.monotonic() + float(request["answer_within_s"]), request.get("heard", True))
    finally:
        os.close(reader)
        end(child)
    if text is None:
        return {"error": "no answer in {:g} s".format(request["answer_within_s"])}
    result: dict[str, Any] = json.loads(text)
    return result


def work(request: dict[str, Any], writer: int) -> None:
    """Act and answer in the child, which never returns. It lets go of the standard streams: stuck, it holds no SSH channel."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        try:
            answer = {"write": write, "read": read, "remove": remove}[request["action"]](request)
        except OSError as error:
            answer = {"error": error.strerror or str(error)}
        os.write(writer, json.dumps(answer).encode())
    finally:
        os._exit(0)


def write(request: dict[str, Any]) -> dict[str, Any]:
    """Write the file aside and rename it, as checkpoints are."""
    started = time.monotonic()
    path = os.path.join(request["folder"], request["file"])
    aside = path + ".tmp"
    with open(aside, "w") as file:
        file.write(request["content"])
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    remove_stale(request["folder"], request["prefix"], os.stat(path).st_mtime)
    return {"seconds": time.monotonic() - started}


def read(request: dict[str, Any]) -> dict[str, Any]:
    """Look for all files until each shows with its content, or the time is over."""
    started = time.monotonic()
    missing = dict(request["files"])
    seen: dict[str, dict[str, Any]] = {}
    while missing:
        for node, (name, content) in list(missing.items()):
            try:
                with open(os.path.join(request["folder"], name)) as file:
                    found = file.read(1000)
            except OSError as error:
                seen[node] = {"error": error.strerror or str(error)}
                continue
            if found == content:
                seen[node] = {"waited_s": time.monotonic() - started}
                del missing[node]
            else:
                seen[node] = {"error": f"other content: {found[:40]!r}"}
        if time.monotonic() - started > request["limit_s"]:
            break
        if missing:
            time.sleep(LOOK_AGAIN_S)
    return {"seen": seen}


def remove(request: dict[str, Any]) -> dict[str, Any]:
    """Remove the files, and what interrupted writes left aside."""
    removed = False
    for name in request["names"]:
        path = os.path.join(request["folder"], name)
        for one in (path, path + ".tmp"):
            try:
                os.unlink(one)
                removed = True
            except FileNotFoundError:
                pass
    return {"removed": removed}


def remove_stale(folder: str, prefix: str, now: float) -> None:
    """Remove old nonce files; `now` is the file server's clock. Another user's files may refuse, and are left."""
    for entry in os.scandir(folder):
        if entry.name.startswith(prefix):
            try:
                if now - entry.stat().st_mtime > STALE_S:
                    os.unlink(entry.path)
            except OSError:
                pass


def read_all(reader: int, deadline: float, heard: bool) -> str | None:
    """Return what the child wrote until it closed its end, None when it did not in time."""
    data = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or (heard and abandoned()):
            return None
        if not select.select([reader], [], [], min(left, 0.2))[0]:
            continue
        chunk = os.read(reader, 65536)
        if not chunk:
            return data.decode() or None
        data += chunk


def abandoned() -> bool:
    """Return whether nobody reads our answer any more: the controller was interrupted, or the connection broke.

    Asked for no event, poll(2) tells only of a hang-up; the end of standard input, which always comes, is none.
    """
    poll = select.poll()
    poll.register(1, 0)
    return bool(poll.poll(0))


def end(child: int) -> None:
    """Kill the child and reap it if it dies; one that is stuck in the kernel is left to it."""
    try:
        os.kill(child, signal.SIGKILL)
        for _ in range(20):
            if os.waitpid(child, os.WNOHANG)[0]:
                return
            time.sleep(0.01)
    except OSError:
        pass
