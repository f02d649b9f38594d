"""Run one contender as a user's shell would, and tell wall time, CPU time of all it started, and that nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

LEFT_S = 5.0
"""How long processes may take to go after SIGKILL."""


@dataclass(frozen=True)
class Done:
    """One finished run. `rc` None: it did not end in time and was killed."""

    rc: int | None
    wall_s: float
    cpu_s: float
    stdout: str
    stderr: str


class CpuAccount:
    """CPU time of everything that joins and of all its descendants, also those that became daemons.

    By a control group of its own (cpuacct of version 1, or cpu.stat of version 2). Where none can be made, only children
    that were waited for count (getrusage), and `how` says so.
    """

    def __init__(self, label: str) -> None:
        self.group: Path | None = None
        self.how = "getrusage of children, daemons not counted"
        for mount, version in _control_groups():
            group = mount / f"r4090c-bench-{os.getpid()}-{label}"
            try:
                group.mkdir()
                _usage_s(group)
            except OSError:
                continue
            self.group, self.how = group, version
            return

    def __enter__(self) -> CpuAccount:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def join(self) -> None:
        """Move the calling process into the account."""
        if self.group is not None:
            (self.group / "cgroup.procs").write_text("0")  # 0 = whoever writes

    def leave(self) -> None:
        """Move the calling process back to where its account lies."""
        if self.group is not None:
            (self.group.parent / "cgroup.procs").write_text("0")

    def used_s(self) -> float:
        """Return the CPU seconds so far, user and system."""
        if self.group is not None:
            return _usage_s(self.group)
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return children.ru_utime + children.ru_stime

    def members(self) -> list[int]:
        """Return the pids in the account."""
        return [] if self.group is None else [int(pid) for pid in (self.group / "cgroup.procs").read_text().split()]

    def kill_left(self) -> list[int]:
        """SIGKILL what is left in the account and return the pids; all of it was started by us."""
        left = self.members()
        deadline = time.monotonic() + LEFT_S
        while (members := self.members()) and time.monotonic() < deadline:
            for pid in members:
                if pid != os.getpid():
                    _kill(pid)
            time.sleep(0.02)
        return left

    def close(self) -> None:
        """End what is left and remove the group."""
        if self.group is not None:
            self.kill_left()
            self.group.rmdir()
            self.group = None


def _control_groups() -> list[tuple[Path, str]]:
    """Return (mount point, how) of the control groups that count CPU time, the exact one of version 1 first."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    found = [
        (Path(where), "cpuacct (cgroup v1)")
        for _, where, kind, flags, *_ in mounts
        if kind == "cgroup" and "cpuacct" in flags.split(",")
    ]
    return found + [(Path(where), "cpu.stat (cgroup v2)") for _, where, kind, *_ in mounts if kind == "cgroup2"]


def _usage_s(group: Path) -> float:
    nanoseconds = group / "cpuacct.usage"
    if nanoseconds.exists():
        return int(nanoseconds.read_text()) / 1e9
    stat = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
    return int(stat["usage_usec"]) / 1e6


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def run(argv: Sequence[str], account: CpuAccount, *, folder: Path, environment: Mapping[str, str], timeout_s: float) -> Done:
    """Run `argv` to its end in a session of its own, which is killed at the timeout and when we are interrupted.

    Output goes to files in `folder`, as a pipe that we drain would cost time of the contender's.
    """
    out, err = folder / "stdout", folder / "stderr"
    before_s = account.used_s()
    began = time.perf_counter()
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=folder,
            env=dict(environment),
            start_new_session=True,
            preexec_fn=account.join,  # safe: we have no threads while we measure
        )
        try:
            rc: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            kill_group(process)
            rc = None
        except BaseException:
            kill_group(process)
            raise
    wall_s = time.perf_counter() - began
    return Done(rc, wall_s, account.used_s() - before_s, out.read_text(errors="replace"), err.read_text(errors="replace"))


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL the session that `process` leads, and reap it; nothing when it was reaped: its number may be another's by now.

    Not SIGTERM: `deepspeed` answers that with a `pkill` of its own.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def end_on_sigterm() -> None:
    """Turn SIGTERM into an exception, so that labs and contenders are ended as after Ctrl-C."""

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, leave)
    # A shell that starts us in the background has us ignore Ctrl-C, and all that we start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
