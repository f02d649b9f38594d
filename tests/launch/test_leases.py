"""Leases between real processes and real accounts: one holder each, freed by any death, whatever lies in the folder."""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch import leases

GPUS = ("0000:41:00.0", "0000:61:00.0", "0000:81:00.0")
SOURCE = Path(leases.__file__)
HOLDER = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
import leases
held, busy = leases.take(json.loads(sys.argv[3]), leases.holder(sys.argv[4], "node01"), sys.argv[2])
print(json.dumps(busy), flush=True)
if held:
    time.sleep(60)
"""
OTHERS = (65534, 1)
"""Accounts that every Linux has: nobody, daemon."""


class Runs:
    """Runs that hold leases, each a process of its own."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.folder = folder
        self.python = python
        self.code = folder.with_name("code")
        self.code.mkdir()
        (self.code / "leases.py").write_bytes(SOURCE.read_bytes())
        self.code.chmod(0o755)
        self.started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started:
            process.kill()
            process.communicate()

    def take(self, run_id: str, *wanted: str, account: int | None = None, umask: int = 0o077) -> tuple[int, list[dict[str, Any]]]:
        """Return (pid, what was busy) of a process that tries to take the leases, and holds them if it can."""
        argv = [self.python, "-I", "-S", "-B", "-c", HOLDER, str(self.code), str(self.folder), json.dumps(wanted), run_id]
        if account is not None:
            argv = ["setpriv", f"--reuid={account}", f"--regid={account}", "--clear-groups", *argv]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, umask=umask)
        self.started.append(process)
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        return process.pid, json.loads(line)

    def kill(self, pid: int) -> None:
        process = next(process for process in self.started if process.pid == pid)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def who(self, *wanted: str) -> dict[str, str | None]:
        """Return lease -> run of those that are held."""
        return {one["lease"]: one["run_id"] for one in leases.who(wanted or None, str(self.folder))}


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    with Runs(tmp_path / "leases") as made:
        yield made


@pytest.fixture
def everybody() -> Iterator[Runs]:
    """Yield runs of several accounts, in a place like /tmp: who owns files there matters (fs.protected_regular)."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, and setpriv (package util-linux), to be several accounts")
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        Path(place).chmod(0o1777)
        with Runs(Path(place) / "leases", shutil.which("python3", path="/usr/bin") or sys.executable) as made:
            yield made


def test_a_lease_has_one_holder_and_who_dies_gives_it_back(runs: Runs) -> None:
    assert runs.who() == {}  # nobody has ever taken one
    began = time.time()
    pid, busy = runs.take("first", *GPUS[:2])
    assert busy == []
    assert runs.who(*GPUS) == {GPUS[0]: "first", GPUS[1]: "first"}
    _, busy = runs.take("second", *GPUS[1:])
    assert [(one["lease"], one["run_id"], one["node"], one["pid"]) for one in busy] == [(GPUS[1], "first", "node01", pid)]
    assert began - 1 <= busy[0]["since"] <= time.time()
    assert [one["lease"] for one in leases.take(GPUS, {}, str(runs.folder))[1]] == list(GPUS[:2])
    assert runs.who(*GPUS) == {GPUS[0]: "first", GPUS[1]: "first"}  # all or none
    assert runs.take("third", GPUS[2])[1] == []
    runs.kill(pid)
    assert runs.who() == {GPUS[2]: "third"}
    assert [one["lease"] for one in leases.take(GPUS, {}, str(runs.folder))[1]] == [GPUS[2]]  # the other two are given back
    assert runs.take("fourth", *GPUS[:2])[1] == []
    assert runs.who() == {GPUS[0]: "fourth", GPUS[1]: "fourth", GPUS[2]: "third"}


def test_of_two_that_want_the_same_one_gets_it_all(runs: Runs) -> None:
    for attempt in range(3):
        one, two = runs.take(f"one-{attempt}", *GPUS), runs.take(f"two-{attempt}", *reversed(GPUS))
        assert sorted([one[1] == [], two[1] == []]) == [False, True]
        runs.kill(one[0])
        runs.kill(two[0])


def test_who_looks_does_not_disturb_who_takes(runs: Runs) -> None:
    held, _ = leases.take(GPUS[:1], leases.holder("mine", "node01"), str(runs.folder))
    leases.give_back(held)
    looker = os.open(runs.folder / (GPUS[0] + ".lock"), os.O_RDONLY)
    fcntl.flock(looker, fcntl.LOCK_SH)
    signal.signal(signal.SIGALRM, lambda *_: os.close(looker))
    signal.setitimer(signal.ITIMER_REAL, leases.PATIENCE_S / 5)
    held, busy = leases.take(GPUS[:1], leases.holder("mine", "node01"), str(runs.folder))
    assert (len(held), busy) == (1, [])
    assert runs.who() == {GPUS[0]: "mine"}
    leases.give_back(held)


def test_children_do_not_inherit_it_unless_they_are_to(runs: Runs) -> None:
    held, _ = leases.take(GPUS[:1], leases.holder("mine", "node01"), str(runs.folder))
    with subprocess.Popen(["sleep", "60"], close_fds=False) as plain:
        with subprocess.Popen(["sleep", "60"], pass_fds=held) as given:
            leases.give_back(held)
            assert runs.who() == {GPUS[0]: "mine"}
            given.kill()
            given.wait()
        assert runs.who() == {}
        plain.kill()


def test_two_accounts_take_turns(everybody: Runs) -> None:
    runs = everybody
    for account in (*OTHERS, None):  # each finds the files that another one made
        run = f"run-of-{account}"
        pid, busy = runs.take(run, *GPUS[:2], account=account)
        assert busy == []
        for other in OTHERS:
            told = runs.take("other", GPUS[1], account=other)[1]
            assert [(one["run_id"], one["pid"]) for one in told] == [(run, pid)]
            assert told[0]["user"] == ("root" if account is None else pwd.getpwuid(account).pw_name)
        runs.kill(pid)
    assert oct(runs.folder.stat().st_mode & 0o7777) == "0o1777"


def test_a_file_that_is_closed_to_others_is_told(everybody: Runs) -> None:
    pid, _ = everybody.take("first", GPUS[0], account=OTHERS[0])
    lock = everybody.folder / (GPUS[0] + ".lock")
    lock.chmod(0o644)  # still good enough
    assert [one["run_id"] for one in everybody.take("second", GPUS[0], account=OTHERS[1])[1]] == ["first"]
    everybody.kill(pid)
    assert everybody.take("second", GPUS[0], account=OTHERS[1])[1] == []  # cannot write its name, and holds it all the same
    assert list(everybody.who()) == [GPUS[0]]
    lock.chmod(0o600)
    with pytest.raises(AssertionError, match=f"Permission denied: '{lock}'"):
        everybody.take("third", GPUS[0], account=1 if lock.stat().st_uid == OTHERS[0] else OTHERS[0])


# ------------------------------------------------------------------------------------------ what may lie there


def take_here(folder: Path, *wanted: str) -> list[dict[str, Any]]:
    """Take leases and give them back; return what was busy."""
    held, busy = leases.take(wanted, leases.holder("mine", "node01"), str(folder))
    leases.give_back(held)
    assert bool(held) != bool(busy)
    return busy


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"\xff\xfe", b"null", b"[1]", b"[" * 9000, b'{"user": 1, "run_id": null, "pid": "x", "since": 1e999}',
        b'{"user": "\x1b[31mroot", "run_id": "' + b"x" * 9000 + b'"}', json.dumps({"user": "\x1b\n", "pid": -1}).encode(),
    ],
)  # fmt: skip
def test_garbage_in_a_lock_file_is_nobody_and_holds_nothing(runs: Runs, content: bytes) -> None:
    assert take_here(runs.folder, GPUS[0]) == []
    (runs.folder / (GPUS[0] + ".lock")).write_bytes(content)
    assert runs.who() == {}  # stale: nobody holds the lock
    held, _ = leases.take(GPUS[:1], {}, str(runs.folder))
    (runs.folder / (GPUS[0] + ".lock")).write_bytes(content)
    (told,) = leases.who(None, str(runs.folder))
    assert told == {"lease": GPUS[0], "user": None, "run_id": None, "node": None, "pid": None, "since": None}
    assert leases.tell([told], time.time()) == f"GPU {GPUS[0]} is used by a run that does not tell its name"
    leases.give_back(held)
    assert take_here(runs.folder, GPUS[0]) == []


@given(st.binary(max_size=80))
def test_any_bytes_are_a_holder(content: bytes) -> None:
    holder = leases.parse_holder(content)
    assert all(word is None or word.isprintable() for word in holder[:3])


def test_links_and_pipes_lead_nowhere(runs: Runs, tmp_path: Path) -> None:
    assert take_here(runs.folder, GPUS[0]) == []
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (runs.folder / (GPUS[1] + ".lock")).symlink_to(victim)
    os.mkfifo(runs.folder / (GPUS[2] + ".lock"))
    for gpu in GPUS[1:]:
        with pytest.raises(OSError, match=re.escape(str(runs.folder / gpu))):
            take_here(runs.folder, GPUS[0], gpu)
        assert runs.who() == {}  # what was taken before is given back
    assert victim.read_text() == "precious"
    assert take_here(runs.folder, GPUS[0]) == []


def test_a_folder_that_is_a_link_or_closed_is_told(runs: Runs, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    runs.folder.symlink_to(elsewhere)
    with pytest.raises(OSError, match="leases"):
        take_here(runs.folder, GPUS[0])
    assert list(elsewhere.iterdir()) == []
    runs.folder.unlink()
    runs.folder.mkdir(mode=0o755)
    with pytest.raises(OSError, match="sudo chmod 1777"):
        take_here(runs.folder, GPUS[0])


def test_who_holds_a_file_that_was_removed_holds_nothing_new(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody clears /tmp between our opening the file and locking it."""
    real = leases.try_lock

    def removed_first(lock: int, how: int, patience_s: float) -> bool:
        monkeypatch.setattr(leases, "try_lock", real)
        (runs.folder / (GPUS[0] + ".lock")).unlink()
        return real(lock, how, patience_s)

    monkeypatch.setattr(leases, "try_lock", removed_first)
    held, _ = leases.take(GPUS[:1], leases.holder("mine", "node01"), str(runs.folder))
    assert runs.who() == {GPUS[0]: "mine"}
    leases.give_back(held)


def test_files_of_a_long_run_are_kept_young(runs: Runs) -> None:
    held, _ = leases.take(GPUS[:1], leases.holder("mine", "node01"), str(runs.folder))
    lock = runs.folder / (GPUS[0] + ".lock")
    os.utime(lock, (0, 0))
    leases.keep_young(held)
    assert time.time() - lock.stat().st_mtime < 60 and time.time() - lock.stat().st_atime < 60
    leases.give_back(held)


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".hidden", "x\n", "x" * 101])
def test_what_is_no_name_is_refused(runs: Runs, name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a lease"):
        take_here(runs.folder, name)


def test_what_is_told() -> None:
    one = {"lease": GPUS[0], "user": "alice", "run_id": "llama-1", "node": "node01", "pid": 1, "since": 1_000_000_000.0}
    two = {**one, "lease": GPUS[1]}
    there = time.strftime("%H:%M", time.localtime(1_000_000_000))
    assert leases.tell([one], 1_000_000_060.0) == f"GPU {GPUS[0]} is used by run llama-1 of alice since {there}"
    told = leases.tell([one, two, {**one, "user": None, "since": None}], 1_000_500_000.0)
    assert told == (
        f"GPUs {GPUS[0]}, {GPUS[1]} are used by run llama-1 of alice since 2001-09-{time.localtime(1e9).tm_mday:02} {there}; "
        f"GPU {GPUS[0]} is used by run llama-1"
    )


def test_the_controller_can_ask_without_a_file(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Shell.ask` runs the source in a bare namespace."""
    space: dict[str, Any] = {"__name__": "r4090c_node"}
    source = SOURCE.read_text().replace('FOLDER = "/tmp/r4090c-leases"', f"FOLDER = {str(runs.folder)!r}")
    exec(compile(source, "r4090c", "exec"), space)
    main: Callable[[Any], Any] = space["main"]
    assert main({"do": "who", "leases": list(GPUS)}) == {"busy": []}
    runs.take("first", GPUS[1])
    for asked in (list(GPUS), None):
        (told,) = main({"do": "who", "leases": asked})["busy"]
        assert (told["lease"], told["run_id"]) == (GPUS[1], "first")
    with pytest.raises(ValueError, match="unknown request"):
        main({"do": "dance"})
