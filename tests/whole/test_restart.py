"""A run goes on after its attempts fail: again, with a spare, under another supervisor; and ends where that does not help.

Real launches over SSH. The script needs no torch (tests/launch/scripts/quick_python), so an attempt costs a second or two.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.lab.lab import Lab
from tests.lab.toy import changed_cluster, toy_python
from tests.whole.following import QUICK_PYTHON, Process, nothing_runs, starter

pytestmark = [pytest.mark.lab, pytest.mark.slow]

COUNTS = """
import os, pathlib, sys, time

# counts.py STEPS [exit ATTEMPT,… RANK STEP]: saves every fifth step that both ranks reach, goes on from what was saved
run, rank = pathlib.Path(os.environ["R4090C_RUN_DIR"]), int(os.environ["RANK"])
attempt = len(list(run.glob("attempt_*")))
saved = sorted(run.glob("checkpoints/step_*/complete"))
first = int(saved[-1].parent.name[5:]) + 1 if saved else 1
dies = [int(one) for one in sys.argv[3].split(",")] if len(sys.argv) > 3 else []
for step in range(first, int(sys.argv[1]) + 1):
    time.sleep(0.1)
    print(f"attempt {attempt} step {step}", flush=True)
    if attempt in dies and rank == int(sys.argv[4]) and step == int(sys.argv[5]):
        sys.exit(7)
    if rank == 1:
        (run / f"at-{attempt}-{step}").touch()
    if rank == 0 and step % 5 == 0:
        while not (run / f"at-{attempt}-{step}").exists():
            time.sleep(0.01)  # as a collective does
        folder = run / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "complete").touch()
"""


@pytest.fixture
def cluster(lab4: Lab, tmp_path: Path) -> Iterator[Path]:
    """Yield a cluster.yaml of the lab with a Python without torch; node03 and node04 are spares. Faults are undone after."""
    quick = lab4.shared / "quick_python"
    shutil.copy(QUICK_PYTHON, quick)
    told = yaml.safe_load(lab4.cluster_file.read_text())
    told["paths"]["python"] = str(quick)
    for node in told["nodes"][2:]:
        node["spare"] = True
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(told))
    yield path
    lab4.mend()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    path = tmp_path / "code" / "counts.py"
    path.write_text(COUNTS)
    return path


@pytest.fixture
def start(tmp_path: Path, cluster: Path) -> Iterator[Callable[..., Process]]:
    """Yield a function that starts `r4090c COMMAND …`; the gate would miss torch."""
    with starter(tmp_path, cluster) as begin:
        yield lambda command, *words: begin(command, *(["--no-gate"] if command == "launch" else []), *words)


def test_a_run_goes_on_from_its_last_checkpoint(start: Callable[..., Process], script: Path, lab4: Lab) -> None:
    process = start("launch", "--restart", "--json", str(script), "--", "20", "exit", "1,2", "1", "8")
    assert process.end() == 0, process.text
    told = json.loads(process.lines[-1] if process.lines[-1].startswith("{") else next(x for x in process.lines if x[:1] == "{"))
    assert (told["outcome"], told["attempts"], told["attempt"]) == ("done", 3, 3)
    assert "rank 1 on node02 exited with code 7" in process.text
    log = (Path(told["run_dir"]) / "attempt_3" / "0.log").read_text()
    assert next(line for line in log.splitlines() if line.startswith("attempt")) == "attempt 3 step 6"
    causes = [json.loads((Path(told["run_dir"]) / f"attempt_{n}" / "diagnosis.json").read_text()) for n in (1, 2)]
    assert [(cause["attempt"], cause["node"], cause["rank"]) for cause in causes] == [(1, "node02", 1), (2, "node02", 1)]
    assert not (Path(told["run_dir"]) / "diagnosis.json").exists()
    assert nothing_runs(lab4)


@pytest.mark.long
def test_logs_are_followed_from_one_attempt_to_the_next(start: Callable[..., Process], script: Path) -> None:
    process = start("launch", "--restart", str(script), "--", "20", "exit", "1", "1", "8")
    process.wait_for("attempt 1 step 2")
    logs = start("logs", process.run_id, "-f", "--rank", "0")
    assert logs.end() == 0, logs.text
    assert "attempt 1 step 1" in logs.text and "attempt 2 step 6" in logs.text and "attempt 2 step 20" in logs.text
    assert process.end() == 0


@pytest.mark.long
def test_a_run_that_dies_at_the_same_place_is_given_up(start: Callable[..., Process], script: Path, lab4: Lab) -> None:
    """Node02 is blamed after two attempts and replaced; the third one fails as well: it was the script."""
    process = start("launch", "--restart", "--attempts", "3", str(script), "--", "20", "exit", "1,2,3,4,5", "1", "3")
    assert process.end() == 1
    assert "node02 is left out for 30 min: 2 attempts in a row failed there" in process.text
    assert "starting again with node03 for node02" in process.text
    assert "not started again: 3 attempts in a row saved no new checkpoint (no checkpoint)" in process.text
    assert nothing_runs(lab4)


@pytest.mark.long
def test_a_script_is_not_started_again_unless_that_is_asked_for(start: Callable[..., Process], script: Path) -> None:
    process = start("launch", str(script), "--", "20", "exit", "1", "0", "2")
    assert process.end() == 1
    assert "starting again" not in process.text


def test_a_spare_takes_the_place_of_a_node_without_power(start: Callable[..., Process], script: Path, lab4: Lab) -> None:
    process = start("launch", "--restart", "--json", str(script), "--", "90")
    process.wait_for("attempt 1 step 7")
    lab4.power_off("node02")
    process.wait_for("starting again with node03 for node02")
    assert process.end() == 0, process.text
    told = json.loads(next(line for line in process.lines if line.startswith("{")))
    assert told["nodes"] == ["node01", "node03"]
    first = (Path(told["run_dir"]) / "attempt_2" / "1.log").read_text().split("\n")[0]
    assert first.startswith("attempt 2 step ") and int(first.split()[-1]) % 5 == 1 and int(first.split()[-1]) > 5, first


@pytest.mark.long
def test_stopping_between_two_attempts_ends_the_run(start: Callable[..., Process], script: Path, lab4: Lab) -> None:
    process = start("launch", "--restart", str(script), "--", "20", "exit", "1,2,3", "0", "3")
    process.wait_for("starting again in 10 s")  # after the second failure
    (note,) = (lab4.shared / "r4090c" / "runs").glob(f"{process.run_id}")
    (note / "stop.json").mkdir()  # so it cannot be written
    stop = start("stop", process.run_id)
    assert stop.end() == 3 and "cannot be written (Is a directory)" in stop.text and "starts it again" in stop.text, stop.text
    (note / "stop.json").rmdir()
    stop = start("stop", process.run_id)
    assert stop.end() == 0, stop.text
    assert process.end() == 1
    assert "not started again: stopped by " in process.text
    assert "attempt 3" not in process.text
    assert nothing_runs(lab4)


def test_a_supervisor_that_is_killed_leaves_the_run_going_and_another_takes_over(
    start: Callable[..., Process], script: Path, lab4: Lab
) -> None:
    launch = start("launch", "--restart", str(script), "--", "3000")
    launch.wait_for("attempt 1 step 3")
    run_id = launch.run_id
    looker = start("attach", run_id)
    looker.wait_for("supervises this run; looking on only")
    launch.popen.kill()
    looker.wait_for("is gone; supervising from here on")
    second = start("attach", run_id)
    second.wait_for("supervises this run; looking on only")
    second.popen.terminate()
    assert second.end() == 130, second.text
    assert f"left; {run_id} goes on" in second.text
    kill_rank(lab4, "node02", "counts.py")
    assert looker.end() == 1  # it is of a script: nobody but the launch knows the code
    assert "rank 1 on node02 was killed by SIGKILL" in looker.text
    assert nothing_runs(lab4)


@pytest.mark.long
def test_nobody_attaches_to_what_has_ended(start: Callable[..., Process], script: Path) -> None:
    process = start("launch", str(script), "--", "1")
    assert process.end() == 0, process.text
    attach = start("attach", process.run_id)
    assert attach.end() == 2
    assert "has ended: done" in attach.text


# --------------------------------------------------------------------------- recipes, under a stand-in for torch


@pytest.fixture
def recipe(lab4: Lab, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Yield a function that starts `r4090c COMMAND …` on a cluster where `tiny` trains without torch."""
    path = changed_cluster(lab4, "restart", python=toy_python(lab4))
    with starter(tmp_path, path) as begin:
        yield lambda command, *words: begin(command, *(["--no-gate", "--nodes", "2"] if command == "launch" else []), *words)
    lab4.mend()


def kill_rank(lab: Lab, node: str, script: str = "toy_train.py") -> None:
    """Kill the rank on a node once there is one."""
    deadline = time.monotonic() + 120
    while True:
        ranks = [pid for pid, line in lab.processes(node) if script in line and "torch.distributed" not in line]
        if ranks:
            lab.kill(node, ranks[0])
            return
        assert time.monotonic() < deadline, lab.processes(node)
        time.sleep(0.05)


def test_who_looks_on_starts_no_attempt_of_its_own(recipe: Callable[..., Process], lab4: Lab) -> None:
    launch = recipe("launch", "tiny", "--set", "steps=100", "--set", "checkpoint.every_steps=10", "--json")
    launch.wait_for("step 12/100")
    looker = recipe("attach", launch.run_id)
    looker.wait_for("looking on only")
    kill_rank(lab4, "node02")
    assert launch.end() == 0, launch.text
    assert looker.end() == 0, looker.text
    assert "supervising from here on" not in looker.text and "starting again" not in looker.text
    assert "attempt 2" in looker.text
    told = json.loads(next(line for line in launch.lines if line.startswith("{")))
    assert (told["outcome"], told["attempts"], told["attempt"]) == ("done", 2, 2)


@pytest.mark.long
def test_who_looks_on_takes_over_from_a_supervisor_that_says_nothing_any_more(recipe: Callable[..., Process], lab4: Lab) -> None:
    launch = recipe("launch", "tiny", "--set", "steps=600", "--set", "checkpoint.every_steps=10")
    launch.wait_for("step 12/600")
    looker = recipe("attach", launch.run_id)
    looker.wait_for("looking on only")
    launch.popen.send_signal(signal.SIGSTOP)  # as a machine that fell off the network
    looker.wait_for("is gone; supervising from here on")
    kill_rank(lab4, "node02")
    looker.wait_for("starting 2 ranks")
    launch.popen.kill()
    stop = recipe("stop", looker.run_id)
    assert stop.end() == 0, stop.text
    assert looker.end() == 1, looker.text
    assert nothing_runs(lab4)


def test_a_stop_while_the_next_attempt_starts_ends_the_run(recipe: Callable[..., Process], lab4: Lab) -> None:
    launch = recipe("launch", "tiny", "--set", "steps=500", "--set", "checkpoint.every_steps=10")
    launch.wait_for("step 12/500")
    kill_rank(lab4, "node02")
    launch.wait_for("starting again on the same nodes")
    stop = recipe("stop", launch.run_id)
    assert stop.end() == 0, stop.text
    assert launch.end() == 1, launch.text
    assert "stopped by " in launch.text
    assert nothing_runs(lab4)


@pytest.mark.long
def test_a_run_that_is_about_to_go_on_is_not_resumed_by_somebody_else(recipe: Callable[..., Process], lab4: Lab) -> None:
    launch = recipe("launch", "tiny", "--set", "steps=300", "--set", "checkpoint.every_steps=10", "--env", "TOY_STEP_S=0.3")
    launch.wait_for("step 12/300")
    run_id = launch.run_id
    kill_rank(lab4, "node02")
    for attempt, node in ((2, "node01"), (3, "node02")):  # neither lives to save a checkpoint
        launch.wait_for(f"attempt {attempt} ")
        kill_rank(lab4, node)
    launch.wait_for("starting again in 10 s")
    other = recipe("launch", "--resume", run_id)
    assert other.end() == 2, other.text
    assert "is about to start its next attempt" in other.text
    launch.popen.terminate()
    assert launch.end() == 130
    assert "nothing is running" in launch.text
    third = recipe("launch", "--resume", run_id, "--set", "steps=15")
    assert third.end() == 0, third.text
    assert nothing_runs(lab4)
