"""The fault matrix: every fault is seen, named rightly, cleaned up everywhere and answered. How long each took is printed.

Most run under the stand-in for torch (tests/lab/toy.py), as what sees, names, ends and starts again is the same. Those with
`long` train for real, where torch has a say: who notices a killed peer, what a rank that waits looks like, what a full disk does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import cli
from tests.lab import memory
from tests.lab.faults import FAULTS, Fault
from tests.lab.lab import Lab
from tests.lab.trial import STRIKE_AT, Trial, half_checkpoints, left_behind, steps_for, trial, wrong_with

pytestmark = [pytest.mark.lab, pytest.mark.slow]

BY_ID = {fault.id: fault for fault in FAULTS}


@pytest.fixture
def lab(lab4: Lab) -> Iterator[Lab]:
    """The lab of the session, empty before and after, and with every fault undone."""
    lab4.mend()
    yield lab4
    lab4.mend()


def jobs(one: Trial) -> dict[str, Any]:
    """Return the run as `r4090c jobs` tells it."""
    listed = cli.run_json("jobs", "--cluster", str(one.scene.cluster), state=one.state)
    found: dict[str, Any] = next(job for job in listed if job["id"] == one.scene.run_id)
    return found


def check(one: Trial) -> None:
    """Play the trial and hold what came of it against the table."""
    found = one.play()
    told = {name: getattr(found, name) for name in ("noticed_s", "told_s", "peers_s", "all_s", "resumed_s")}
    print(f"{one.fault.id}: " + ", ".join(f"{name} {value:.2f}" for name, value in told.items() if value is not None))
    said = one.told()
    one.mend()
    assert wrong_with(one) == [], said
    if one.run_dir is not None:
        assert jobs(one)["state"] == ("failed" if one.fault.answer.then == "given-up" else "done")


def steps(one: Trial) -> list[int]:
    assert one.run_dir is not None
    return [json.loads(line)["step"] for line in (one.run_dir / "metrics.jsonl").read_text().splitlines()]


QUICK = ("rank", "link", "full-disk")
"""Faults of the default test run; all take eight minutes, and run with `make traintest`."""


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, id=fault.id, marks=() if fault.id in QUICK else pytest.mark.long) for fault in FAULTS]
)
def test_a_fault_is_seen_named_cleaned_up_and_answered(lab: Lab, tmp_path: Path, fault: Fault) -> None:
    if fault.id == "out-of-memory" and (why := memory.why_not()):
        pytest.skip(why)
    with trial(lab, fault, tmp_path, steps=steps_for(fault)) as one:
        check(one)
        if fault.id == "supervisor":
            assert one.killed_code == -9
        if fault.answer.then == "given-up":
            resumed_after_room_is_made(one)
    assert left_behind(lab) == []


def resumed_after_room_is_made(one: Trial) -> None:
    """The run that was given up goes on from its last whole checkpoint."""
    assert "df -h" in "\n".join(one.errors)
    words = ("launch", "tiny", "--resume", one.scene.run_id, "--cluster", str(one.scene.cluster))
    code, output, errors = cli.run(*words, state=one.state)
    assert code == 0, errors
    assert "step 6/" in output and "step 5/" not in output
    assert one.run_dir is not None
    assert half_checkpoints(one.run_dir, done=True) == []
    assert steps(one) == list(range(1, one.steps + 1))


@pytest.mark.long
@pytest.mark.train
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.torch_has_a_say], ids=lambda fault: fault.id)
def test_with_real_training(lab: Lab, tmp_path: Path, fault: Fault) -> None:
    with trial(lab, fault, tmp_path, toy=False, steps=steps_for(fault, toy=False)) as one:
        check(one)
        if fault.id == "full-disk":
            resumed_after_room_is_made(one)
    assert left_behind(lab) == []


@pytest.mark.long
@pytest.mark.parametrize(("name", "away_s"), [("link", 8), ("power", 15)])
def test_without_a_spare_the_run_waits_for_its_node(lab: Lab, tmp_path: Path, name: str, away_s: float) -> None:
    with trial(lab, BY_ID[name], tmp_path, spare=None) as one:
        one.launch()
        one.wait_for_step(STRIKE_AT)
        one.strike()
        back = threading.Timer(away_s, one.mend)
        back.start()
        found = one.wait(600)
        back.join()
        said = one.told()
        assert (found.exit_code, found.attempts) == (0, 2), said
        assert found.cause is not None and (found.cause["kind"], found.cause["node"]) == ("node-lost", "node02"), said
        assert steps(one) == list(range(1, one.steps + 1)), said
        assert jobs(one)["nodes"] == ["node01", "node02"]
        assert left_behind(lab) == []


@pytest.mark.long
def test_who_attaches_takes_over_restarts_included(lab: Lab, tmp_path: Path) -> None:
    with trial(lab, BY_ID["supervisor"], tmp_path, steps=150) as one:
        one.launch()
        one.wait_for_step(STRIKE_AT)
        one.strike()
        assert one.scene.launcher is not None
        one.scene.launcher.wait(60)
        one.start("attach", one.scene.run_id)
        one.wait_for_step(STRIKE_AT + 5)
        one.strike(BY_ID["rank"].strike)
        found = one.wait(600)
        assert (found.exit_code, found.attempts) == (0, 2), one.told()
        assert found.cause is not None and (found.cause["kind"], found.cause["rank"]) == ("rank-killed", 1), one.told()
        assert steps(one) == list(range(1, one.steps + 1))
        assert left_behind(lab) == []


@pytest.mark.long
@pytest.mark.parametrize("wakes", ["while it goes on", "when it is over"])
def test_who_looks_on_decides_when_the_supervisor_is_frozen(lab: Lab, tmp_path: Path, wakes: str) -> None:
    """A laptop that sleeps: its launch says nothing of what follows, and when it wakes finds the next attempt, or the end."""
    with trial(lab, BY_ID["rank"], tmp_path, steps=150) as one, contextlib.ExitStack() as waking:
        one.launch()
        one.wait_for_step(STRIKE_AT)
        sleeper, told = one.scene.launcher, one.errors
        assert sleeper is not None
        os.kill(sleeper.pid, signal.SIGSTOP)
        waking.callback(sleeper.kill)
        one.errors = []
        one.start("attach", one.scene.run_id)
        one.wait_for_step(STRIKE_AT + 5)
        one.strike()
        if wakes == "while it goes on":
            one.wait_for(lambda: one.found.resumed_s is not None, "step of a second attempt", 600)
            os.kill(sleeper.pid, signal.SIGCONT)
        found = one.wait(600)
        said = one.told()
        assert (found.exit_code, found.attempts) == (0, 2), said
        assert "supervises this run; looking on only" in said and "deciding that here" in said
        assert found.cause is not None and (found.cause["kind"], found.cause["rank"]) == ("rank-killed", 1), said
        os.kill(sleeper.pid, signal.SIGCONT)
        assert sleeper.wait(60) in (0, 1), told
        assert one._cause() == found.cause, "what was found out meanwhile stays"
        assert jobs(one)["state"] == "done"
        assert one.finish().attempts == 2, told
        assert steps(one) == list(range(1, one.steps + 1))
        assert left_behind(lab) == []


HOLDER = """
import fcntl, os, socket, time
os.makedirs("/tmp/r4090c-0/run/node01")
lock = open("/tmp/r4090c-0/run/node01/lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
listener = socket.create_server(("", 45678))
print("holds", flush=True)
time.sleep(60)
"""


@pytest.mark.long
def test_what_is_left_is_found(lab: Lab, tmp_path: Path) -> None:
    """The matrix and bench/chaos.py are worth what this sees."""
    holder = subprocess.Popen(lab.exec_argv("node01", "python3", "-c", HOLDER), stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "holds\n"
        left = left_behind(lab, within_s=0)
        assert [line.partition(" ")[2].partition(" python3")[0] for line in left] == [
            "process",
            "port 45678",
            "held: /tmp/r4090c-0/run/node01/lock",
        ]
    finally:
        for pid in (pid for pid, line in lab.processes("node01") if "45678" in line):
            lab.kill("node01", pid)
        holder.communicate(timeout=10)
        lab.exec("node01", "rm", "-r", "/tmp/r4090c-0/run")
    assert left_behind(lab, within_s=0) == []
    checkpoints = tmp_path / "checkpoints"
    for name in ("step_00000005.partial", "step_00000005.odd", "step_00000010"):
        (checkpoints / name).mkdir(parents=True)
    damaged = "step_00000010: complete: No such file or directory"
    assert half_checkpoints(tmp_path, done=False) == ["step_00000005.odd", damaged]
    assert half_checkpoints(tmp_path, done=True) == ["step_00000005.odd", "step_00000005.partial", damaged]
