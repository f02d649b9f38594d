"""`agent.py follow` as a process: which attempt it follows, and what it tells while storage hangs (a pipe nobody writes to)."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch import agent

FOLLOW = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import agent
agent.START_WAIT_S = float(sys.argv[3])
agent.NAMED_S = 60.0
what = json.loads(sys.argv[2])
agent.follow(what["run_id"], what["node"], what["files"], what.get("supervisor"), what.get("attempt"), what.get("begun", False))
os._exit(0)
"""
HANG_S = 30.0
"""No test waits so long for anything that works."""


class Following:
    """A follower, and what it has told so far. Its standard input is said something every half second, as a controller does."""

    def __init__(self, what: dict[str, Any], wait_s: float = HANG_S) -> None:
        argv = [sys.executable, "-I", "-S", "-c", FOLLOW, str(Path(agent.__file__).parent), json.dumps(what), str(wait_s)]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.told: list[dict[str, Any]] = []
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._say, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(json.loads(line))
        self._queue.put(None)

    def _say(self) -> None:
        assert self.process.stdin is not None
        while self.process.poll() is None:
            try:
                self.process.stdin.write("\n")
                self.process.stdin.flush()
            except (OSError, ValueError):
                return
            time.sleep(0.5)

    def next(self) -> dict[str, Any] | None:
        """Return the next message, None at the end."""
        message = self._queue.get(timeout=HANG_S)
        if message is not None:
            self.told.append(message)
        return message

    def until(self, wanted: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """Return the first message from here on that is `wanted`."""
        while True:
            message = self.next()
            assert message is not None, self.told
            if wanted(message):
                return message

    def beats(self, count: int) -> None:
        """Wait for so many beats."""
        for _ in range(count):
            self.until(lambda message: "beat" in message)

    def rest(self) -> list[dict[str, Any]]:
        """Return all messages but beats, from the first to the end."""
        while self.next() is not None:
            pass
        return [message for message in self.told if "beat" not in message]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Node:
    """The folder of a run on this node, and an "agent" that lives."""

    def __init__(self, run_dir: Path) -> None:
        self.run_id = f"follow-{os.getpid()}-{time.monotonic_ns()}"
        self.folder = Path(agent.local_folder(self.run_id, "node01"))
        self.run_dir = run_dir
        self.followers: list[Following] = []
        self.agent = subprocess.Popen(["sleep", "600"])

    def write(self, attempt: int, state: str = "running", *, alive: bool = True) -> dict[str, Any]:
        """Write the state of an agent, and return it."""
        pid = self.agent.pid
        found = agent.stat_of(pid)
        assert found is not None
        told = {
            "run_id": self.run_id, "run_dir": str(self.run_dir), "node": "node01", "attempt": attempt, "pid": pid,
            "start": found.start if alive else found.start - 1, "state": state, "heartbeat": time.time(), "events": [],
            "end": {"outcome": "done"} if state == "ended" else None,
        }  # fmt: skip
        agent.write_text(str(self.folder / "state.json"), json.dumps(told))
        return told

    def follow(self, attempt: int | None = None, wait_s: float = HANG_S, **more: Any) -> Following:
        what = {"run_id": self.run_id, "node": "node01", "files": [], "attempt": attempt, **more}
        self.followers.append(Following(what, wait_s))
        return self.followers[-1]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    for follower in made.followers:
        follower.close()
    made.agent.kill()
    made.agent.wait()
    shutil.rmtree(made.folder.parent)


# ------------------------------------------------------------------------------------------ which attempt


def test_the_end_of_the_attempt_before_is_not_that_of_the_one_that_is_followed(node: Node) -> None:
    node.write(1, "ended", alive=False)
    follower = node.follow(2)
    follower.beats(3)
    assert all("beat" in message for message in follower.told)
    state = node.write(2)
    assert follower.until(lambda message: "state" in message)["state"] == state
    ended = node.write(2, "ended")
    assert follower.rest() == [{"state": state}, {"state": ended}]


def test_an_attempt_that_never_begins_is_given_up(node: Node) -> None:
    node.write(1, "ended", alive=False)
    assert node.follow(2, wait_s=1.5).rest() == [{"agent_gone": True, "state": None}]


def test_of_an_attempt_that_has_begun_nobody_waits_for_the_start(node: Node) -> None:
    """The node was rebooted: its /tmp is empty."""
    assert node.follow(2, begun=True).rest() == [{"agent_gone": True, "state": None}]


def test_a_later_attempt_says_that_the_followed_one_is_over(node: Node) -> None:
    node.write(3)
    assert node.follow(2).rest() == [{"agent_gone": True, "state": None}]
    follower = node.follow(3)
    state = follower.until(lambda message: "state" in message)["state"]
    node.write(4)
    assert follower.rest() == [{"state": state}, {"agent_gone": True, "state": state}]


def test_what_was_told_last_is_told_again_when_the_next_start_clears_the_folder(node: Node) -> None:
    state = node.write(2, alive=False)
    follower = node.follow(2)
    follower.until(lambda message: "state" in message)
    (node.folder / "state.json").unlink()
    assert follower.rest() == [{"state": state}, {"agent_gone": True, "state": state}]


def test_without_an_attempt_whatever_is_there_is_followed(node: Node) -> None:
    first, follower = node.write(1), node.follow()
    assert follower.until(lambda message: "state" in message)["state"] == first
    second = node.write(2, "ended")
    assert follower.rest() == [{"state": first}, {"state": second}]


def test_who_looks_on_leaves_the_lock_of_the_next_attempt_to_whom_its_start_names(node: Node) -> None:
    node.write(1, "ended", alive=False)
    me, other = {"id": "a", "who": "kim"}, {"id": "b", "who": "sam"}
    looker = node.follow(2, supervisor=other)
    looker.beats(2)
    assert not any("supervisor" in message for message in looker.told)
    agent.write_text(str(node.folder / agent.SUPERVISOR), json.dumps({**me, "expected": True}))
    assert looker.until(lambda message: "supervisor" in message)["supervisor"]["who"] == "kim"
    first = node.follow(2, supervisor=me)
    assert first.next() == {"supervisor": me}, "before its first state"
    node.write(2)
    looker.until(lambda message: "state" in message)
    looker.beats(2)
    assert {message["supervisor"]["who"] for message in looker.told if "supervisor" in message} == {"kim"}
    first.close()
    assert looker.until(lambda message: "supervisor" in message)["supervisor"] == other


STATES = st.none() | st.builds(lambda number: {"attempt": number}, st.integers(1, 4))


@given(st.integers(1, 4), st.booleans(), st.lists(STATES, max_size=8))
def test_no_state_of_another_attempt_is_ever_told(attempt: int, begun: bool, found: list[dict[str, int] | None]) -> None:
    seen: dict[str, Any] | None = None
    for state in found:
        before = seen
        seen, replaced = agent.of_attempt(attempt, begun, seen, state)
        assert seen is None or seen["attempt"] == attempt
        assert seen is not None or before is None
        if replaced:
            assert state is not None and state["attempt"] != attempt
        elif state is not None and state["attempt"] > attempt:
            pytest.fail("a later attempt ends it")
        assert agent.of_attempt(None, begun, before, state) == (state, False)


# ------------------------------------------------------------------------------------------ storage that hangs


def test_the_last_lines_come_before_the_end(node: Node, tmp_path: Path) -> None:
    log = tmp_path / "0.log"
    text = "".join(f"line {number} {'x' * 1000}\n" for number in range(3000))
    log.write_text(text)
    node.write(1, "ended")
    told = node.follow(1, files=[["log", str(log), 0]]).rest()
    assert "state" in told[-1]
    assert "".join(message["line"][1] + "\n" for message in told[:-1]) == text
    assert told[-2]["offset"] == len(text)


def test_a_file_that_hangs_keeps_neither_beats_nor_the_end_from_being_told(node: Node, tmp_path: Path) -> None:
    hangs, log = tmp_path / "metrics.jsonl", tmp_path / "0.log"
    os.mkfifo(hangs)
    log.write_text("one\n")
    node.write(1)
    follower = node.follow(1, files=[["metrics", str(hangs), 0], ["log", str(log), 0]])
    follower.until(lambda message: message.get("line") == ["log", "one"])
    follower.beats(5)
    with log.open("a") as more:
        more.write("two")
    ended = node.write(1, "ended")
    told = follower.rest()
    assert told[-2:] == [{"line": ["log", "two"], "offset": 7}, {"state": ended}]
    assert follower.process.wait(HANG_S) == 0, "the thread that hangs does not keep it"


def test_a_run_folder_that_hangs_does_not_silence_what_is_told_of_an_agent_that_is_gone(node: Node, tmp_path: Path) -> None:
    (tmp_path / "agents").mkdir()
    os.mkfifo(tmp_path / "agents" / "node01.json")
    state = node.write(1, alive=False)
    follower = node.follow(1)
    assert follower.rest() == [{"state": state}, {"agent_gone": True, "state": state}]
    beats = [message["beat"] for message in follower.told if "beat" in message]
    assert len(beats) >= 3, "they came while the copy was waited for"


def test_the_copy_in_the_run_folder_tells_the_end_that_a_full_tmp_did_not(node: Node, tmp_path: Path) -> None:
    state = node.write(1, alive=False)
    ended = {**state, "state": "ended", "end": {"outcome": "failed"}}
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "node01.json").write_text(json.dumps(ended))
    assert node.follow(1).rest() == [{"state": state}, {"state": ended}]
