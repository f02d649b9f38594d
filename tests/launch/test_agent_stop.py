"""Stops that come while a start hangs, and stops that come late: real starts, real processes, a pipe as storage that hangs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launch import agent, supervise
from launch.jobs import STALE_S

WAIT_S = 30.0
"""No test waits so long for anything that works."""


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Run:
    """A run of one node, this machine."""

    def __init__(self) -> None:
        self.id = f"stop-{os.getpid()}-{time.monotonic_ns()}"
        self.folder = Path(agent.local_folder(self.id, "node01"))
        self.started: list[subprocess.Popen[bytes]] = []

    def begin(self, token: str, files: dict[str, str]) -> subprocess.Popen[bytes]:
        """Begin `agent.py start`, which writes `files` first."""
        plan = {"run_id": self.id, "nodes": [{"name": "node01", "leases": []}]}
        request = {"plan": plan, "node": "node01", "token": token, "secrets": {}, "files": files}
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", agent.__file__, "start"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.started.append(process)
        assert process.stdin is not None
        process.stdin.write(json.dumps(request).encode())
        process.stdin.close()
        process.stdin = None
        return process

    def process(self, start_name: str | None = None) -> subprocess.Popen[bytes]:
        """Return a process that carries the run's mark; `start_name` None = of an agent that marked no start."""
        marks = {agent.MARK_RUN: self.id, agent.MARK_NODE: "node01"}
        marks.update({agent.MARK_START: start_name} if start_name else {})
        process = subprocess.Popen(["sleep", "600"], env={**os.environ, **marks})
        self.started.append(process)
        until(lambda: process.pid in agent.marked(self.id))
        return process

    def write_state(self, process: subprocess.Popen[bytes], start_name: str) -> None:
        """Let `process` be the agent of the start called so."""
        found = agent.stat_of(process.pid)
        assert found is not None
        state = {"pid": process.pid, "start": found.start, "start_name": start_name, "end": {}, "attempt": 1}
        agent.write_text(str(self.folder / "state.json"), json.dumps(state))

    def stop(self, **whom: str) -> dict[str, Any]:
        return agent.stop({"run_id": self.id, "node": "node01", "by": "kim", "grace_s": 1.0, **whom})


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run()
    yield made
    for process in made.started:
        process.kill()
        process.communicate()
    agent.end_all(lambda: agent.marked(made.id), 0.1)
    shutil.rmtree(made.folder.parent)


def hanging(folder: Path) -> Path:
    """Return a path where writing a file hangs until somebody opens the pipe for reading."""
    path = folder / "plan.json"
    os.mkfifo(f"{path}.tmp")
    return path


@pytest.mark.parametrize("whom", [{"token": "one"}, {"start_name": agent.name_of("one")}, {}], ids=["token", "name", "nobody"])
def test_a_start_that_hangs_is_stopped_and_never_happens(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whom: dict[str, str]
) -> None:
    path = hanging(tmp_path)
    start = run.begin("one", {str(path): "{}"})
    until(lambda: (run.folder / agent.START).exists())
    monkeypatch.setattr(agent, "LOCK_S", 0.3)
    assert run.stop(**whom) == {"had_agent": False, "swept": [], "left": [], "state": None}
    assert start.poll() is None, "it hangs"
    with Path(f"{path}.tmp").open("rb"):  # the storage answers again
        answer, _ = start.communicate(timeout=WAIT_S)
    assert json.loads(answer) == {"error": "stopped by kim before it started"}
    assert agent.marked(run.id) == []


def test_a_stop_of_another_start_does_not_keep_one_from_happening(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent comes, and fails, as its plan is none; what counts here is that it was let."""
    path = hanging(tmp_path)
    start = run.begin("two", {str(path): "{}"})
    until(lambda: (run.folder / agent.START).exists())
    monkeypatch.setattr(agent, "LOCK_S", 0.3)
    run.stop(token="one")
    with Path(f"{path}.tmp").open("rb"):
        answer, _ = start.communicate(timeout=WAIT_S)
    assert "the agent ended at once" in json.loads(answer)["error"]


def test_who_was_stopped_before_is_refused(run: Run, tmp_path: Path) -> None:
    run.stop(token="one")
    run.stop(token="two")
    answer, _ = run.begin("one", {str(tmp_path / "plan.json"): "{}"}).communicate(timeout=WAIT_S)
    assert json.loads(answer) == {"error": "stopped by kim before it started"}
    assert not (tmp_path / "plan.json").exists()


def test_a_stop_that_could_not_wait_still_leaves_the_next_attempt_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "LOCK_S", 0.1)
    newer = run.process("two")
    run.write_state(newer, "two")
    with agent.held(str(run.folder / "lock"), 1.0):
        assert run.stop(start_name="one") == {"had_agent": False, "swept": [], "left": [], "state": None}
    assert newer.poll() is None
    assert not (run.folder / "stop.json").exists()


def test_a_late_stop_sweeps_what_its_own_start_left_and_nothing_newer(run: Run) -> None:
    """The next attempt's agent has not written its state yet."""
    ours, unmarked, newer = run.process("one"), run.process(), run.process("two")
    done = run.stop(start_name="one")
    assert (sorted(done["swept"]), done["left"]) == (sorted([ours.pid, unmarked.pid]), [])
    assert not any(agent.living(agent.stat_of(process.pid)) for process in (ours, unmarked))
    assert newer.poll() is None
    assert run.stop()["swept"] == [newer.pid], "who names no start means all of the run"


def test_a_stop_tells_the_agent_who_stops_it_though_a_start_holds_the_lock(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "LOCK_S", 0.1)
    running = run.process("one")
    run.write_state(running, "one")
    with agent.held(str(run.folder / "lock"), 1.0):
        assert run.stop(start_name="one")["had_agent"]
    assert running.wait(WAIT_S) == -signal.SIGTERM
    assert json.loads((run.folder / "stop.json").read_text())["by"] == "kim"


def test_a_start_and_a_stop_fit_into_what_others_wait_for_them() -> None:
    longest_s = agent.LOCK_S + agent.START_S
    assert agent.START_S < agent.LOCK_S, "who waits for a start outlasts it"
    assert longest_s < STALE_S, "a run that starts slowly counts as running all the while"
    assert longest_s < supervise.START_ANSWER_S
    agent_ends_s = supervise.STOP_GRACE_S + agent.KILL_WAIT_S + agent.LINGER_S
    swept_s = 0.5 + agent.KILL_WAIT_S
    assert agent.LOCK_S + agent_ends_s + swept_s < supervise.STOP_ANSWER_S
