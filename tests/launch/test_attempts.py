"""What follows an attempt that could not start, on the nodes of a lab; and how who looks on waits for the next one."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import launch.run
from launch.attempts import Attempts, wish_of
from launch.jobs import STALE_S, find_run
from launch.plan import Plan, plan_json
from launch.restart import Policy
from launch.run import held, require_next
from launch.supervise import Stopped, told_of_stop, who_i_am
from r4090c.cli import follow
from r4090c.cli.follow import Onlooker, options_of, patiently, told_in_options
from r4090c.errors import CouldNotTell, TrainingFailed
from tests.launch.attempts import Bench, kill, until


@pytest.fixture
def failed(bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Plan:
    """A run whose only attempt has failed."""
    monkeypatch.setenv("R4090C_STATE", str(tmp_path))
    attempt = bench.start(bench.plan("wait.py", "600", real=False))
    attempt.wait_for("waits")
    kill(bench.lab, "node02", "rank")
    assert attempt.outcome(30).outcome == "failed"
    return attempt.plan


def half_started(plan: Plan) -> Plan:
    """Return attempt 2 as its plan.json tells it, which no agent has written anything about; it is half of STALE_S old."""
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - STALE_S / 2))
    second = replace(plan, attempt=2, created_at=created)
    Path(plan.run_dir, "plan.json").write_text(json.dumps(plan_json(second)))
    return second


NO_START = TrainingFailed("node01", "the agent did not start: it did not come up within 14 s", "", "r4090c preflight")


@pytest.mark.lab
@pytest.mark.slow
def test_an_attempt_that_started_by_half_is_ones_own(bench: Bench, failed: Plan) -> None:
    """Its plan.json is young, so it counts as running; it is stopped, and the run goes on."""
    said: list[str] = []
    attempts = Attempts(bench.fleet, bench.cluster, wish_of(failed, bench.cluster.nodes[:2]), said.append, Policy(), who_i_am())
    second = half_started(failed)
    attempts.announcing(lambda plan: None)(second)
    decided = attempts.after_no_start(failed, NO_START)
    assert decided.wish is not None and decided.wish.again and decided.wish.resume == failed.run_id, decided.why


@pytest.mark.lab
@pytest.mark.slow
def test_an_attempt_that_another_started_is_left_to_it(bench: Bench, failed: Plan) -> None:
    attempts = Attempts(bench.fleet, bench.cluster, wish_of(failed, bench.cluster.nodes[:2]), print, Policy(), who_i_am())
    half_started(failed)
    attempts.announcing(lambda plan: None)(replace(failed, attempt=2, created_at="2026-01-01T00:00:00Z"))
    decided = attempts.after_no_start(failed, NO_START)
    assert decided.wish is None and decided.why == "it is running: somebody else has started attempt 2"


@pytest.mark.lab
@pytest.mark.slow
def test_others_know_who_starts_the_next_attempt_as_long_as_that_takes(
    bench: Bench, failed: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.run, "HOLD_S", 0.3)
    me, path = who_i_am(), Path(failed.run_dir, "between.json")

    def until_s() -> float:
        return float(json.loads(path.read_text())["until"]) if path.exists() else 0.0

    with held(bench.fleet, failed.run_dir, me):
        until(lambda: until_s() > 0, "no note")
        first = until_s()
        until(lambda: until_s() > first, "the note is not renewed")
    run = find_run(bench.fleet, bench.cluster, failed.run_id)
    with pytest.raises(TrainingFailed, match="starts its next attempt"):
        require_next(bench.fleet, run, who_i_am())
    require_next(bench.fleet, run, me)


ODD = """
if sys.argv[1:2] == ["follow"] and not os.path.exists({marker!r}):
    open({marker!r}, "w").close()
    print('{{"line": ["nobody asked for it", "x"], "offset": 1}}', flush=True)
"""


@pytest.mark.lab
@pytest.mark.slow
def test_a_node_that_says_something_odd_is_asked_again(bench: Bench) -> None:
    plan = bench.plan("wait.py", "3", nodes=1, real=False)
    tree, marker = bench.lab.shared / "odd_tree", bench.lab.shared / "odd_was_said"
    shutil.copytree(plan.code.tree, tree)
    agent = tree / "launch" / "agent.py"
    agent.chmod(0o644)
    agent.write_text(
        agent.read_text().replace('\nif __name__ == "__main__"', ODD.format(marker=str(marker)) + '\nif __name__ == "__main__"')
    )
    attempt = bench.start(replace(plan, code=replace(plan.code, tree=str(tree))))
    assert attempt.outcome(60).outcome == "done"
    assert marker.exists() and any("cannot be read (KeyError: 'nobody" in note for note in attempt.watcher.notes)


# ------------------------------------------------------------------------------------------ who looks on


def run(attempt: int, state: str, **more: Any) -> Any:
    return SimpleNamespace(attempt=attempt, state=state, **{"given_up": None, "stopped_by": None, "between": None, **more})


class Clock(SimpleNamespace):
    """Takes the place of module time in r4090c.cli.follow: sleeping costs nothing."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(time=time.time, monotonic=lambda: self.now_s, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(follow, "time", found)
    return found


def looked_on(*answers: Any) -> tuple[str, int, bool]:
    """Return (how who looks on after attempt 1 goes on, questions asked, whether it counts the supervisor as gone)."""
    told: Iterator[Any] = iter(answers)
    asked = 0

    def find() -> Any:
        nonlocal asked
        asked += 1
        answer = next(told, answers[-1])
        return answer() if callable(answer) else answer

    onlooker = Onlooker(find, lambda run: f"attempt {run.attempt}")  # type: ignore[arg-type, return-value]
    last: Any = SimpleNamespace(supervisor=SimpleNamespace(plan=SimpleNamespace(attempt=1)))
    return str(follow._look_on(last, onlooker)), asked, onlooker.abandoned


NOBODY = CouldNotTell("every node", "none answers", "at least one reachable node", "r4090c preflight --quick")


@pytest.mark.usefixtures("clock")
def test_a_silent_network_is_outlasted() -> None:
    answers: Iterator[Any] = iter([NOBODY] * 5 + [run(1, "running")])
    said: list[str] = []

    def find() -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert patiently(find, said.append, math.inf).attempt == 1
    assert said == ["none answers; trying again"]
    answers = iter([NOBODY] * 5)
    with pytest.raises(CouldNotTell):
        patiently(find, said.append, 0.0)


def test_a_silent_network_does_not_make_the_supervisor_silent(clock: Clock) -> None:
    def late() -> Any:
        clock.sleep(follow.ABANDONED_S + 1)
        return run(1, "failed")

    assert looked_on(late, run(2, "running")) == ("attempt 2", 2, False)


@pytest.mark.usefixtures("clock")
def test_an_attempt_that_goes_on_after_all_is_followed_again() -> None:
    assert looked_on(run(1, "running"))[::2] == ("attempt 1", False)


def test_a_supervisor_that_says_nothing_is_gone(clock: Clock) -> None:
    assert looked_on(run(1, "failed"))[::2] == ("None", True)
    assert clock.now_s >= follow.ABANDONED_S


@pytest.mark.usefixtures("clock")
def test_one_that_has_given_up_is_believed() -> None:
    assert looked_on(run(1, "failed", given_up="enough")) == ("None", 1, False)


# ------------------------------------------------------------------------------------------ what is told, and kept


@pytest.mark.parametrize(
    ("stopped", "expected"),
    [
        (Stopped({}, []), "stopped; nothing is left running"),
        (Stopped({"n1": [7]}, []), "stopped; still running: {'n1': [7]}"),
        (Stopped({}, ["n2"]), "stopped; no answer from n2: its agent ends by itself, as it loses the others"),
        (
            Stopped({"n1": [7]}, ["n2"]),
            "stopped; still running: {'n1': [7]}; no answer from n2: its agent ends by itself, as it loses the others",
        ),
        (
            Stopped({}, ["n1", "n2"]),
            "stopped; no answer from n1, n2: IT GOES ON THERE, as no node of it has stopped; say it again once one answers",
        ),
    ],
)
def test_a_stop_says_what_may_go_on(stopped: Stopped, expected: str) -> None:
    assert told_of_stop(stopped, ["n1", "n2"]) == expected


@pytest.mark.parametrize(
    "said", [(None, None, None), (True, None, 3), (False, 0.0, None), (None, 12.5, 1)], ids=["nothing", "yes", "no", "how"]
)
def test_who_takes_over_does_as_the_launch_was_told(said: tuple[bool | None, float | None, int | None]) -> None:
    assert told_in_options(("--no-gate", *options_of(*said), "--anyway")) == said


def test_the_policy_of_a_launch_stays_with_the_run(bench: Bench) -> None:
    plan = replace(bench.plan("wait.py", "1", real=False), options=("--anyway", "--attempts=3"))
    wish = wish_of(plan, bench.cluster.nodes[:2])
    assert (wish.anyway, wish.gate, wish.policy, wish.options) == (True, True, ("--attempts=3",), ("--anyway", "--attempts=3"))
