"""Hangs and leases in real attempts on lab nodes: who hangs is seen and named, and two runs do not share a GPU.

Limits are seconds here, not minutes; the gloo job apart, ranks and torchrun are stand-ins without torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch import leases
from launch.holders import GpusTaken
from launch.plan import Hang, Plan
from launch.supervise import Outcome, Supervisor, stop_run
from tests.lab import Lab
from tests.launch.attempts import Attempt, Bench, assert_nothing_left, kill, pids, until

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]

ENDS_WITHIN_S = 90.0
"""Silent for 6 s, looked at for 3 s, then TERM, 2 s and KILL; on a machine that is busy."""
SOON = Hang(floor_s=6.0, factor=3.0, start_s=20.0)
LEASES = Path(leases.__file__).read_text()


def hung_events(attempt: Attempt) -> dict[int, dict[str, Any]]:
    """Return the rank-hung event of each rank; there is one a rank."""
    events = [event for event in attempt.events() if event["kind"] == "rank-hung"]
    found = {event["rank"]: event for event in events}
    assert len(found) == len(events), events
    return found


def phases_told(attempt: Attempt) -> dict[str, str]:
    """Return what the run folder says of each rank's phase."""
    states = [Path(attempt.paths.agent(node.name)) for node in attempt.plan.nodes]
    told = [json.loads(state.read_text()) for state in states if state.exists()]
    return {rank: beat["phase"] for state in told for rank, beat in state["beats"].items()}


def freeze(lab: Lab, node: str, rank_index: int = 0) -> None:
    lab.kill(node, pids(lab, node, "rank")[rank_index], "STOP")


def causes(attempt: Attempt) -> list[tuple[str, str, int]]:
    """Return what each agent took for the cause."""
    ends = [attempt.agent(node.name)["end"]["cause"] for node in attempt.plan.nodes]
    return [(end["kind"], end["node"], end["rank"]) for end in ends]


def test_a_frozen_rank_ends_the_attempt_everywhere_and_is_named(bench: Bench) -> None:
    lab = bench.lab
    attempt = bench.start(replace(bench.plan("beating.py", "9999", nproc=2, real=False), hang=SOON))
    attempt.wait_for("step 5")
    until(lambda: phases_told(attempt) == dict.fromkeys("0123", "train"), "the agents do not tell the beats")
    freeze(lab, "node02", 1)
    outcome = attempt.outcome(ENDS_WITHIN_S)
    assert outcome.outcome == "failed" and not outcome.left
    assert outcome.cause is not None and (outcome.cause.kind, outcome.cause.rank) == ("rank-frozen", 3)
    assert_nothing_left(lab)
    assert causes(attempt) == [("rank-hung", "node02", 3)] * 2
    found = hung_events(attempt)
    assert sorted(found) == [0, 1, 2, 3]  # also of the ranks that did not hang: it shows where they wait
    frozen = found[3]
    assert (frozen["node"], frozen["process"], frozen["phase"], frozen["waits_for_peers"]) == ("node02", "T", "train", False)
    assert frozen["silent_s"] >= frozen["limit_s"] == SOON.floor_s and frozen["step"] >= 5
    assert "rank 3 has told nothing for" in frozen["detail"] and "state T" in frozen["detail"]
    assert "process" in Path(frozen["stacks"]).read_text()
    for rank in (0, 1, 2):
        assert found[rank]["process"] != "T" and found[rank]["frames"][-1].endswith(" <module>"), found[rank]
        assert found[rank]["silent_s"] < frozen["silent_s"]
        assert found[rank]["stacks"] == f"{attempt.plan.run_dir}/attempt_1/stacks-{rank}.txt"
        assert "<module>" in Path(found[rank]["stacks"]).read_text()


def test_a_rank_that_forgets_the_others_is_told_from_those_that_wait_for_it(bench: Bench) -> None:
    attempt = bench.start(replace(bench.plan("beating_ring.py", "1"), hang=SOON))
    attempt.wait_for("step 5", 240)
    outcome = attempt.outcome(ENDS_WITHIN_S)
    assert outcome.cause is not None and (outcome.cause.kind, outcome.cause.rank) == ("rank-stuck", 1)
    assert_nothing_left(bench.lab)
    found = hung_events(attempt)
    assert (found[1]["waits_for_peers"], found[0]["waits_for_peers"]) == (False, True), found
    assert found[1]["frames"][0].endswith(" reads_data_for_ever") and "all_reduce" in " ".join(found[0]["frames"])
    assert found[1]["process"] in "SR" and found[0]["node"] == "node01"


def test_a_shared_folder_that_hangs_does_not_keep_a_hang_from_being_ended(bench: Bench) -> None:
    plan = replace(bench.plan("beating.py", "9999", "quiet", real=False), hang=SOON)
    stacks = Path(plan.run_dir, "attempt_1", "stacks-1.txt")
    stacks.parent.mkdir(parents=True)
    bench.lab.exec("node02", "mkfifo", str(stacks))  # opening it for writing hangs, as on an NFS whose server is gone
    attempt = bench.start(plan)
    attempt.wait_for("step 5")
    freeze(bench.lab, "node02")
    assert attempt.outcome(ENDS_WITHIN_S).outcome == "failed"
    assert_nothing_left(bench.lab)
    found = hung_events(attempt)[1]
    assert found["process"] == "T" and found["stacks"].startswith("/tmp/r4090c-")
    assert "state T" in bench.lab.exec("node02", "cat", found["stacks"]).stdout


@pytest.mark.long
def test_a_rank_that_never_trains_gets_the_longer_time_and_then_is_named(bench: Bench) -> None:
    attempt = bench.start(replace(bench.plan("beating.py", "2", real=False), hang=Hang(0.5, 1.0, 4.0)))
    assert attempt.outcome(20) == Outcome("done", None)  # two steps, and gone
    attempt = bench.start(replace(bench.plan("beating.py", "9999", real=False), hang=Hang(9.0, 1.0, 1.0)))
    attempt.wait_for("step 5")
    freeze(bench.lab, "node01")
    assert attempt.outcome(9 + ENDS_WITHIN_S).outcome == "failed"
    assert hung_events(attempt)[0]["silent_s"] > 9


@pytest.mark.long
def test_without_limits_nobody_hangs(bench: Bench) -> None:
    attempt = bench.start(replace(bench.plan("beating.py", "60", nodes=1, nproc=2, real=False), hang=None))
    attempt.wait_for("step 5")
    freeze(bench.lab, "node01", 0)
    until(lambda: not attempt.outcomes and len(pids(bench.lab, "node01", "rank")) == 1, "the other rank does not end", 20)
    assert attempt.supervisor.stop("the test").left == {}


# ------------------------------------------------------------------------------------------ leases

GPUS = ("0000:41:00.0", "0000:61:00.0")


def leased(plan: Plan, **of_node: tuple[str, ...]) -> Plan:
    return replace(plan, nodes=tuple(replace(node, leases=of_node.get(node.name, ())) for node in plan.nodes))


def busy(bench: Bench, node: str) -> list[Mapping[str, Any]]:
    answer = bench.fleet.shell(node).ask(LEASES, {"do": "who", "leases": list(GPUS)}).value
    assert isinstance(answer, dict)
    found: list[Mapping[str, Any]] = answer["busy"]
    return found


def test_two_runs_do_not_share_a_gpu_and_a_killed_one_gives_it_back(bench: Bench) -> None:
    first = bench.start(leased(bench.plan("wait.py", "300", real=False), node01=GPUS[:1], node02=GPUS))
    first.wait_for("waits")
    found = busy(bench, "node02")
    agent = pids(bench.lab, "node02", "agent")
    assert [(one["lease"], one["run_id"], one["user"], one["pid"]) for one in found] == [
        (gpu, first.plan.run_id, "root", agent[0]) for gpu in GPUS
    ]
    second = leased(bench.plan("wait.py", "300", real=False), node02=GPUS[1:])
    with pytest.raises(GpusTaken, match=f"run {first.plan.run_id} of root") as told:
        bench.start(second)
    assert [(one.node, one.lease, one.run_id) for one in told.value.holders] == [("node02", GPUS[1], first.plan.run_id)]
    assert not first.outcomes and len(pids(bench.lab, "node02", "rank")) == 1  # and the first was not disturbed
    other = bench.start(leased(bench.plan("wait.py", "300", real=False), node01=GPUS[1:]))  # another GPU of the same node
    other.wait_for("waits")
    kill(bench.lab, "node02", "agent")  # of both; whatever ends it frees the leases
    assert busy(bench, "node02") == []
    assert first.outcome(ENDS_WITHIN_S).outcome == "failed"
    assert other.outcome(ENDS_WITHIN_S).outcome == "failed"
    third = bench.start(second)
    third.wait_for("waits")
    assert [one["run_id"] for one in busy(bench, "node02")] == [second.run_id]
    third.supervisor.stop("the test")
    assert busy(bench, "node01") == busy(bench, "node02") == []


def test_stop_of_one_run_leaves_the_other_and_its_lease(bench: Bench) -> None:
    runs = [bench.start(leased(bench.plan("wait.py", "300", nodes=1, real=False), node01=(gpu,))) for gpu in GPUS]
    for run in runs:
        run.wait_for("waits")
    assert stop_run(bench.fleet, runs[0].plan.run_id, ["node01"], "the test").left == {}
    assert [one["run_id"] for one in busy(bench, "node01")] == [runs[1].plan.run_id]
    assert len(pids(bench.lab, "node01", "rank")) == 1 and not runs[1].outcomes
    stop_run(bench.fleet, runs[1].plan.run_id, ["node01"], "the test")


def test_a_refused_start_answers_who_has_it_and_writes_nothing(bench: Bench) -> None:
    first = bench.start(leased(bench.plan("wait.py", "300", nodes=1, real=False), node01=GPUS))
    first.wait_for("waits")
    plan = leased(bench.plan("wait.py", "300", nodes=1, real=False), node01=GPUS)
    with pytest.raises(GpusTaken) as told:
        Supervisor(bench.fleet, plan, "token").start({})
    assert [(one.lease, one.run_id, one.user) for one in told.value.holders] == [(gpu, first.plan.run_id, "root") for gpu in GPUS]
    assert not Path(plan.run_dir).exists()
    first.supervisor.stop("the test")
    assert json.loads(Path(first.paths.agent("node01")).read_text())["state"] == "ended"
