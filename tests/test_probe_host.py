"""The probe's answers about the host's settings, leftovers and caches, against this very machine."""

from __future__ import annotations

import _socket
import contextlib
import errno
import mmap
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from netcheck import probe
from tests.facts.local import run_probe

root_only = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv")


def ask(question: dict[str, Any], **options: Any) -> dict[str, Any]:
    answer: dict[str, Any] = run_probe({"q": question}, **options)["answers"]["q"]
    return answer


@contextmanager
def running(*argv: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


# --------------------------------------------------------------------------- /dev/shm


@contextmanager
def mapped(path: Path) -> Iterator[int]:
    """Another process that maps `path`."""
    hold = (
        "import mmap,sys,time;f=open(sys.argv[1],'r+b');m=mmap.mmap(f.fileno(),0);f.close();print('on',flush=True);time.sleep(60)"
    )
    with running(sys.executable, "-c", hold, str(path)) as process:
        assert process.stdout is not None and process.stdout.readline() == "on\n"
        yield process.pid


def shm_of(folder: Path, **options: Any) -> dict[str, dict[str, Any]]:
    return {file["name"]: file for file in ask({"natives": {"shm": [str(folder)]}}, **options)["natives"]["shm"][str(folder)]}


def test_leftovers_are_told_from_what_is_in_use(tmp_path: Path) -> None:
    for name in ("nccl-used", "nccl-left", f"torch_{os.getpid()}_1_0", "torch_4194304_1_0", "other"):
        (tmp_path / name).write_bytes(bytes(mmap.PAGESIZE))
    os.utime(tmp_path / "nccl-left", (time.time() - 7200, time.time() - 7200))
    with mapped(tmp_path / "nccl-used"):
        found = shm_of(tmp_path)
    # 4194304 is PID_MAX_LIMIT: no process has that number
    used = {"nccl-used": True, "nccl-left": False, f"torch_{os.getpid()}_1_0": True, "torch_4194304_1_0": False}
    assert {name: file["used"] for name, file in found.items()} == used
    assert found["nccl-left"]["age_s"] == pytest.approx(7200, abs=60)
    assert {file["uid"] for file in found.values()} == {os.geteuid()}


def test_no_leftovers_and_no_folder(tmp_path: Path) -> None:
    assert shm_of(tmp_path) == shm_of(tmp_path / "none") == {}


@root_only
def test_another_accounts_files_are_not_called_unused(tmp_path: Path) -> None:
    """Whether a process of root maps root's file cannot be seen by an ordinary account."""
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o005)
    (tmp_path / "nccl-root").write_bytes(b"x")
    (tmp_path / "nccl-own").write_bytes(b"x")
    os.chown(tmp_path / "nccl-own", 65534, 65534)
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    found = shm_of(tmp_path, prefix=nobody, python=shutil.which("python3", path="/usr/bin:/bin") or sys.executable)
    assert {name: file["used"] for name, file in found.items()} == {"nccl-root": None, "nccl-own": False}


# --------------------------------------------------------------------------- what hangs


SPAWN = """
import os, sys
while True:
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)]), 0)
"""
"""A process that waits, as vfork(2) does, until its child starts, in uninterruptible sleep; the child waits for a writer."""


@contextmanager
def waiting(fifo: Path) -> Iterator[tuple[int, str]]:
    """(pid, what it waits for) of a process in uninterruptible sleep."""
    os.mkfifo(fifo)
    process = subprocess.Popen([sys.executable, "-c", SPAWN, str(fifo)])
    stat, state, wait = Path(f"/proc/{process.pid}/stat"), "", ""
    deadline = time.monotonic() + 10
    while state != "D" and time.monotonic() < deadline:
        time.sleep(0.02)
        state = stat.read_text().rpartition(")")[2].split()[0]
        wait = Path(f"/proc/{process.pid}/wchan").read_text()
    try:
        if state != "D" or wait in ("", "0"):
            pytest.skip("this kernel does not tell what a process waits for")
        yield process.pid, wait
    finally:
        process.kill()
        writer = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)  # what it started goes on as well
        process.wait(timeout=10)
        os.close(writer)


def blocked(**request: Any) -> list[list[Any]]:
    found: list[list[Any]] = ask({"natives": {"blocked": request}})["natives"]["blocked"]
    return found


def test_a_process_that_does_not_get_on_is_found_and_named(tmp_path: Path) -> None:
    with waiting(tmp_path / "fifo") as (pid, wait):
        found = blocked(waits=[wait[:6]], pauses_s=[0.05, 0.1])
    assert [pid, os.geteuid(), wait] in [[row[0], row[2], row[3]] for row in found]


def test_what_waits_for_something_else_costs_no_time(tmp_path: Path) -> None:
    with waiting(tmp_path / "fifo"):
        started = time.monotonic()
        assert blocked(waits=["nfs"], pauses_s=[30.0]) == []
        assert time.monotonic() - started < 25


def test_where_there_is_no_nfs_nobody_is_looked_at(tmp_path: Path) -> None:
    if probe.has_nfs():
        pytest.skip("this machine mounts NFS")
    with waiting(tmp_path / "fifo") as (_, wait):
        assert blocked(waits=[wait[:6]], pauses_s=[0.05], in_nfs=True) == []


def test_a_busy_process_is_not_stuck(tmp_path: Path) -> None:
    """It is in the same wait at every look, and has run in between: a busy server, not a silent one."""
    fifo, stop = tmp_path / "fifo", threading.Event()

    def serve() -> None:
        while not stop.wait(0.03):
            with contextlib.suppress(OSError):
                os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))

    with waiting(fifo) as (pid, wait):
        server = threading.Thread(target=serve)
        server.start()
        try:
            found = [blocked(waits=[wait[:6]], pauses_s=[1.5]) for _ in range(2)]
        finally:
            stop.set()
            server.join()
    assert not any(row[0] == pid for rows in found for row in rows)


# --------------------------------------------------------------------------- caches and compilers


def test_caches_their_file_system_and_their_locks(tmp_path: Path) -> None:
    folder = tmp_path / "extensions" / "py312_cu124" / "cpu_adam"
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    os.utime(folder / "lock", (time.time() - 9000, time.time() - 9000))
    wanted = [["TORCH_EXTENSIONS_DIR", "~/extensions", True], ["TRITON_CACHE_DIR", "~/extensions", False]]
    wanted.append(["HF_HOME", str(tmp_path / "not" / "made" / "yet"), True])
    answer = ask({"natives": {"caches": wanted}}, env={**os.environ, "HOME": str(tmp_path)})["natives"]["caches"]
    assert answer["TORCH_EXTENSIONS_DIR"]["path"] == str(tmp_path / "extensions")
    ((path, age_s),) = answer["TORCH_EXTENSIONS_DIR"]["locks"]
    assert path == str(folder / "lock") and age_s == pytest.approx(9000, abs=60)
    assert answer["TRITON_CACHE_DIR"]["locks"] == []
    assert (answer["HF_HOME"]["path"], answer["HF_HOME"]["locks"]) == (str(tmp_path / "not" / "made" / "yet"), [])
    if shutil.which("findmnt"):
        told = subprocess.run(
            ["findmnt", "-nro", "FSTYPE,TARGET", "-T", str(tmp_path)], capture_output=True, text=True, check=True
        )
        for cache in answer.values():
            assert f"{cache['fstype']} {cache['target']}" == told.stdout.strip().splitlines()[-1]


# --------------------------------------------------------------------------- kernel and interfaces


def test_the_kernels_own_words() -> None:
    from netcheck.facts import kernel, observe
    from r4090c.model import KernelFact
    from tests.facts.samples import cluster_of, probe_result

    cluster = cluster_of()
    question = kernel.question(cluster.nodes[0], cluster).to_json()
    fact = observe("kernel", probe_result("kernel", ask(question)), cluster.nodes[0], cluster)
    assert isinstance(fact.value, KernelFact)
    assert fact.value.cmdline == Path("/proc/cmdline").read_text().strip()
    clock = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    assert fact.value.clocksource == (clock.read_text().strip() if clock.exists() else None)
    assert fact.value.logind == Path("/run/systemd/seats").exists()


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


class Kernel:
    """Stands where the kernel would answer on a netlink socket: one card has priorities, no other interface has."""

    def __init__(self, ieee: bytes) -> None:
        self.ieee = ieee
        self.asked: list[bytes] = []

    def __call__(self, *_: int) -> Kernel:
        return self

    def settimeout(self, _: float) -> None:
        """Nothing takes time."""

    def close(self) -> None:
        """Nothing is open."""

    def sendto(self, data: bytes, _: object) -> None:
        self.asked.append(data)

    def recv(self, _: int) -> bytes:
        if b"ens5f0np0\0" not in self.asked[-1]:
            return struct.pack("=LHHLLl", 36, 2, 0, 1, 0, -errno.EOPNOTSUPP) + self.asked[-1][:16]
        body = struct.pack("=BBH", 0, 21, 0) + attribute(1, b"ens5f0np0\0") + attribute(13, self.ieee)
        return struct.pack("=LHHLL", 16 + len(body), 78, 0, 1, 0) + body


def test_priorities_out_of_the_kernels_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An answer built after linux/dcbnl.h; nested attributes carry a flag in their kind, or do not."""
    pfc = struct.pack("=BBBxH2x16Q", 8, 0b0001_1000, 0, 0, *range(16))
    applications = b"".join(attribute(1, struct.pack("=BBH", *entry)) for entry in ((5, 3, 26), (1, 4, 0x8906), (5, 3, 24)))
    kernel = Kernel(attribute(1, bytes(60)) + attribute(2, pfc) + attribute(3 | 0x8000, applications))
    monkeypatch.setattr(_socket, "socket", kernel)
    for name in ("ens5f0np0", "lo"):
        (tmp_path / name).mkdir()
    answer = probe.native_dcb([f"{tmp_path}/*"])
    assert answer == {"ens5f0np0": {"pfc": 24, "dscp": [[24, 3], [26, 3]]}, "lo": None}
    assert {request[16:20] for request in kernel.asked} == {struct.pack("=BBH", 0, 21, 0)}


def test_the_kernel_understands_the_question_about_priorities() -> None:
    """Loopback has none: the kernel got as far as its driver, which it would not for a malformed request."""
    assert ask({"natives": {"dcb": ["/sys/class/net/lo"]}})["natives"]["dcb"] == {"lo": None}
    body = struct.pack("=BBH", 0, 21, 0) + attribute(1, b"lo\0")
    with pytest.raises(OSError) as refused:
        probe.netlink(78, 0, body)
    assert refused.value.errno == errno.EOPNOTSUPP
