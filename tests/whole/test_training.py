"""Train `tiny` on lab nodes through the real command line: placement, faults and resume change no loss."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import cli
from tests.lab.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.train, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
STEPS = 8
SETS = ("--set", f"steps={STEPS}", "--set", "checkpoint.every_steps=3")
OURS = re.compile(r"agent\.py|torch\.distributed\.run|train/main\.py|rank\.py")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


def launched(lab: Lab, state: Path, *words: str) -> dict[str, Any]:
    found = cli.run_json("launch", "tiny", "--cluster", str(lab.cluster_file), *words, state=state)
    assert isinstance(found, dict)
    return found


def losses(run_dir: str) -> list[float]:
    lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def left_running(lab: Lab) -> list[str]:
    return [f"{node}: {cmdline}" for node in lab.nodes for _, cmdline in lab.processes(node) if OURS.search(cmdline)]


@pytest.fixture(scope="module")
def two_nodes(lab4: Lab, state: Path) -> dict[str, Any]:
    """One uninterrupted run on two nodes with one rank each."""
    return launched(lab4, state, "--nodes", "2", *SETS)


def test_the_loss_falls_over_two_nodes_and_nothing_is_left(lab4: Lab, two_nodes: dict[str, Any]) -> None:
    assert two_nodes["outcome"] == "done" and two_nodes["last_step"] == STEPS
    assert two_nodes["nodes"] == ["node01", "node02"]
    assert two_nodes["last_loss"] < two_nodes["first_loss"] - 1
    assert two_nodes["tokens_per_s"] > 0
    run = Path(two_nodes["run_dir"])
    plan = json.loads((run / "plan.json").read_text())
    assert [node["name"] for node in plan["nodes"]] == ["node01", "node02"] and plan["world_size"] == 2
    log = (run / "attempt_1" / "0.log").read_text()
    assert re.search(r"2 x CPU.*gloo, ZeRO stage 2", log), log[:1000]
    assert {path.name for path in (run / "heartbeats").glob("*.json")} == {"0.json", "1.json"}
    assert all(
        json.loads((run / "agents" / f"{node}.json").read_text())["end"]["outcome"] == "done" for node in two_nodes["nodes"]
    )
    assert left_running(lab4) == []


def test_what_was_trained_is_exported_on_a_node(lab4: Lab, state: Path, two_nodes: dict[str, Any]) -> None:
    cluster = ("--cluster", str(lab4.cluster_file))
    told = cli.run_json("export", two_nodes["run_id"], *cluster, state=state)
    assert isinstance(told, dict)
    assert (told["kind"], told["step"], told["out"]) == ("model", STEPS, f"{two_nodes['run_dir']}/export")
    assert told["node"] in two_nodes["nodes"] and f"from_pretrained('{told['out']}')" in told["load"]
    assert {"config.json", "model.safetensors", "r4090c.json"} <= {path.name for path in Path(told["out"]).iterdir()}
    code, _, errors = cli.run("export", two_nodes["run_id"], *cluster, state=state)
    assert code == 2
    assert f"{told['out']}: is there already" in errors
    assert "Traceback" not in errors
    assert left_running(lab4) == []


def test_two_ranks_on_one_node_give_the_same_losses(lab4: Lab, state: Path, two_nodes: dict[str, Any]) -> None:
    alone = launched(lab4, state, "--nodes", "node03", "--nproc-per-node", "2", *SETS)
    assert losses(alone["run_dir"]) == losses(two_nodes["run_dir"])


def test_a_killed_run_is_named_listed_and_resumed_exactly(lab4: Lab, state: Path, two_nodes: dict[str, Any]) -> None:
    cluster = ("--cluster", str(lab4.cluster_file))
    process = cli.start("launch", "tiny", "--nodes", "2", "--no-restart", *SETS, *cluster, state=state)
    assert process.stdout is not None and process.stderr is not None
    for line in process.stdout:
        if line.startswith("step 5/"):
            break
    ranks = [
        pid for pid, cmdline in lab4.processes("node02") if "train/main.py" in cmdline and "torch.distributed" not in cmdline
    ]
    assert len(ranks) == 1
    lab4.kill("node02", ranks[0], "KILL")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    assert "node02" in errors and "rank 1" in errors and "SIGKILL" in errors
    assert left_running(lab4) == []

    jobs = cli.run_json("jobs", *cluster, state=state)
    assert jobs[0]["state"] == "failed" and "SIGKILL" in jobs[0]["cause"] and jobs[0]["nodes"] == ["node01", "node02"]
    assert [job["state"] for job in jobs if job["id"] == two_nodes["run_id"]] == ["done"]
    code, log, errors = cli.run("logs", jobs[0]["id"], "--rank", "0", *cluster, state=state)
    assert code == 0 and "step 5" in log, errors

    code, output, errors = cli.run("launch", "tiny", "--resume", *cluster, state=state)
    assert code == 0, errors
    assert [line.split("/")[0] for line in output.splitlines() if line.startswith("step")] == [
        f"step {n}" for n in range(4, STEPS + 1)
    ]
    resumed = next(job for job in cli.run_json("jobs", *cluster, state=state) if job["id"] == jobs[0]["id"])
    assert resumed["state"] == "done" and resumed["attempt"] == 2
    assert losses(resumed["run_dir"]) == losses(two_nodes["run_dir"])
    first_of_second_attempt = (Path(resumed["run_dir"]) / "attempt_2" / "0.log").read_text()
    assert re.search(r"step 4\b", first_of_second_attempt) and not re.search(r"step 3/", first_of_second_attempt)


def test_a_run_that_is_done_is_not_resumed_and_the_hint_is_about_this_cluster(
    lab4: Lab, state: Path, two_nodes: dict[str, Any]
) -> None:
    words = ("launch", "tiny", "--resume", two_nodes["run_id"], "--cluster", str(lab4.cluster_file))
    code, _, errors = cli.run(*words, state=state)
    assert code == 2 and f"is done: step {STEPS} of {STEPS}" in errors
    assert f"r4090c --cluster {lab4.cluster_file} launch --resume {two_nodes['run_id']} --set steps={2 * STEPS}" in errors


def test_another_world_size_cannot_resume_where_the_recipe_says_so(lab4: Lab, state: Path, two_nodes: dict[str, Any]) -> None:
    words = ("launch", "--resume", two_nodes["run_id"], "--nodes", "1", "--nproc-per-node", "1", "--set", "steps=99")
    code, _, errors = cli.run(*words, "--set", "elastic=false", "--cluster", str(lab4.cluster_file), state=state)
    assert code == 2 and "its checkpoint is of 2 ranks, and the recipe says elastic: false" in errors


def test_a_resume_that_the_ranks_refuse_does_not_change_the_run(lab4: Lab, state: Path, two_nodes: dict[str, Any]) -> None:
    """On a copy of the run: the other tests of this file, in any order, see it as it was."""
    run_id = f"{two_nodes['run_id']}0"
    folder = Path(two_nodes["run_dir"]).with_name(run_id)
    shutil.copytree(two_nodes["run_dir"], folder)
    plan = folder / "plan.json"
    plan.write_text(plan.read_text().replace(two_nodes["run_id"], run_id))
    kept = (folder / "recipe.json").read_text()
    words = ("launch", "--resume", run_id, "--set", "steps=99", "--set", "data.max_mib=0.05")
    code, _, errors = cli.run(*words, "--cluster", str(lab4.cluster_file), state=state)
    assert code == 1 and "this run has data" in errors
    assert "not started again: that would not help" in errors
    assert (folder / "recipe.json").read_text() == kept
    tried = json.loads((folder / "attempt_2" / "recipe.json").read_text())
    assert (tried["steps"], tried["data"]["max_mib"]) == (99, 0.05)


def test_what_a_recipe_file_says_otherwise_than_the_run_is_told(lab4: Lab, state: Path, two_nodes: dict[str, Any]) -> None:
    recipe = yaml.safe_load((ROOT / "train" / "recipes" / "tiny.yaml").read_text())
    (state / "tiny.yaml").write_text(yaml.safe_dump({**recipe, "gradient_clipping": 0.5, "steps": STEPS}))
    words = ("launch", str(state / "tiny.yaml"), "--resume", two_nodes["run_id"], "--set", f"steps={STEPS + 1}", "--dry-run")
    code, _, errors = cli.run(*words, "--cluster", str(lab4.cluster_file), state=state)
    assert code == 0, errors
    assert "not taken from " in errors and "gradient_clipping (0.5 there, 1.0 in the run)" in errors


def test_a_detached_run_is_seen_stopped_and_leaves_nothing(lab4: Lab, state: Path) -> None:
    cluster = ("--cluster", str(lab4.cluster_file))
    told = cli.run_json("launch", "tiny", "--nodes", "2", "--set", "steps=100000", "--detach", *cluster, state=state)
    seen = {job["id"]: job["state"] for job in cli.run_json("jobs", *cluster, state=state)}
    assert seen[told["run_id"]] == "running"
    deadline = time.monotonic() + 60
    while not (Path(told["run_dir"]) / "metrics.jsonl").exists():
        assert time.monotonic() < deadline, "the detached run makes no step"
        time.sleep(0.2)
    code, output, errors = cli.run("stop", told["run_id"], *cluster, state=state)
    assert code == 0 and "nothing of it is left" in output, errors
    deadline = time.monotonic() + 10
    while left_running(lab4) and time.monotonic() < deadline:  # its supervisor's follower sees the end a moment later
        time.sleep(0.1)
    assert left_running(lab4) == []
    again = cli.run("stop", told["run_id"], *cluster, state=state)
    assert again[0] == 0 and "had ended" in again[1]
    seen = {job["id"]: job["state"] for job in cli.run_json("jobs", *cluster, state=state)}
    assert seen[told["run_id"]] == "stopped"
    code, _, errors = cli.run("launch", "tiny", "--resume", told["run_id"], *cluster, state=state)
    assert code == 2 and "has no complete checkpoint" in errors
