"""A memory control group around processes of a node: too little memory for them, so that the kernel's own OOM killer strikes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.lab.wiring import LabError

EMPTY_WITHIN_S = 20.0


def _mounts() -> list[tuple[Path, str, str]]:
    """Return (mount point, kind, name of the limit) of the control groups that limit memory."""
    lines = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    first = [(Path(where), kind, "memory.limit_in_bytes") for _, where, kind, flags, *_ in lines if "memory" in flags.split(",")]
    return [one for one in first if one[1] == "cgroup"] + [
        (Path(where), kind, "memory.max") for _, where, kind, *_ in lines if kind == "cgroup2"
    ]


@contextlib.contextmanager
def limited_to(mib: int) -> Iterator[Path]:
    """Make a group that may hold `mib` MiB more than its processes have now, and remove it once it is empty.

    Raises LabError where none can be made. What a process has when it joins is not counted (version 1 and 2 alike).
    """
    told = "no memory control group is mounted"
    for mount, _, limit in _mounts():
        group = mount / f"r4090c-lab-{os.getpid()}-{time.monotonic_ns()}"
        try:
            group.mkdir()
        except OSError as error:
            told = str(error)
            continue
        try:
            (group / limit).write_text(str(mib << 20))
            with contextlib.suppress(OSError):  # there is none where the kernel counts no swap
                (group / limit.replace("limit_in_bytes", "memsw.limit_in_bytes").replace("max", "swap.max")).write_text(
                    "0" if limit == "memory.max" else str(mib << 20)
                )
        except OSError as error:  # version 2 without the memory controller
            group.rmdir()
            told = str(error)
            continue
        try:
            yield group
        finally:
            _remove(group)
        return
    raise LabError(f"no memory limit can be set here: {told}")


def why_not() -> str | None:
    """Return why no memory limit can be set here, None where it can."""
    try:
        with limited_to(64):
            return None
    except LabError as error:
        return str(error)


def join(group: Path, pids: Iterable[int]) -> None:
    """Move processes, by this machine's pids, into the group; one that is gone meanwhile is left out."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(pid))


def _remove(group: Path) -> None:
    deadline = time.monotonic() + EMPTY_WITHIN_S
    while True:
        try:
            group.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
