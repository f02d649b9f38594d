"""Processes as /proc of this machine shows them. Every pid here is a pid of this machine, unless it says `node_pid`.

A pid read inside a pid namespace means another process outside of it (1 is this machine's init), so signals are only
sent through a pidfd of a process whose command line was checked after the pidfd was opened.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Process:
    """One process. `node_pid` is its pid inside its innermost pid namespace."""

    pid: int
    node_pid: int
    name: str
    state: str
    argv: tuple[str, ...]


def read_process(pid: int) -> Process | None:
    """Return the process `pid`, or None when it is gone. A zombie and a kernel thread have an empty argv."""
    folder = Path("/proc") / str(pid)
    try:
        argv = (folder / "cmdline").read_bytes()
        status = (folder / "status").read_text(errors="replace")
    except OSError:
        return None
    fields = {name: value.strip() for name, _, value in (line.partition(":") for line in status.splitlines())}
    return Process(
        pid=pid,
        node_pid=int(fields.get("NSpid", str(pid)).split()[-1]),
        name=fields.get("Name", ""),
        state=fields.get("State", "?")[:1],
        argv=tuple(word.decode(errors="replace") for word in argv.rstrip(b"\0").split(b"\0")) if argv else (),
    )


def all_processes() -> Iterator[Process]:
    """Yield every process of this machine, those in other pid namespaces below ours included."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (process := read_process(int(entry.name))) is not None:
            yield process


def with_argument(argument: str, names: tuple[str, ...]) -> list[Process]:
    """Return the processes called one of `names` that have exactly `argument` among their arguments."""
    return [process for process in all_processes() if process.name in names and argument in process.argv]


def namespace_of(pid: int, kind: str) -> str | None:
    """Return the identity of a namespace like "pid:[4026532281]", or None when the process is gone."""
    try:
        return str((Path("/proc") / str(pid) / "ns" / kind).readlink())
    except OSError:
        return None


def in_pid_namespace(identity: str) -> list[Process]:
    """Return the live processes (no zombies) of one pid namespace."""
    found = [process for process in all_processes() if namespace_of(process.pid, "pid") == identity]
    return [process for process in found if process.state not in "ZX"]


def kill_all(processes: list[Process], still_ours: Callable[[Process], bool], timeout_s: float = 30.0) -> list[Process]:
    """SIGKILL each process that `still_ours` recognises after its pidfd was opened; return those alive after `timeout_s`."""
    waiting: dict[int, Process] = {}
    try:
        for process in processes:
            try:
                pidfd = os.pidfd_open(process.pid)
            except ProcessLookupError:
                continue
            waiting[pidfd] = process
            now = read_process(process.pid)
            if now is None or now.state in "ZX" or not still_ours(now):
                os.close(pidfd)
                del waiting[pidfd]
                continue
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        poller = select.poll()
        for pidfd in waiting:
            poller.register(pidfd, select.POLLIN)
        deadline = time.monotonic() + timeout_s
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for pidfd, _ in poller.poll(left_s * 1000):
                poller.unregister(pidfd)
                os.close(pidfd)
                del waiting[pidfd]
        return list(waiting.values())
    finally:
        for pidfd in waiting:
            os.close(pidfd)
