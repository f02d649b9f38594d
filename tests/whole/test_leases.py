"""Several users on the same GPUs: who has them keeps them, the others are told who, or wait; whoever dies frees them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.lab.gpus import GpuBox, installed
from tests.lab.lab import Lab
from tests.whole.following import QUICK_PYTHON, Process, nothing_runs, starter

pytestmark = [pytest.mark.lab, pytest.mark.slow]

WAITS = """
import sys, time
print("waiting", flush=True)
time.sleep(float(sys.argv[1]))
"""
WHOLE = GpuBox()
BOX = replace(WHOLE, cards=WHOLE.cards[:2])


@pytest.fixture
def cluster(mended_lab4: Lab, tmp_path: Path) -> Iterator[Path]:
    """Yield a cluster.yaml of two nodes with two GPUs each."""
    shutil.copy(QUICK_PYTHON, mended_lab4.shared / "quick_python")
    told = yaml.safe_load(mended_lab4.cluster_file.read_text())
    told["paths"]["python"] = str(mended_lab4.shared / "quick_python")
    told["nodes"] = [{**node, "gpus": 2} for node in told["nodes"][:2]]
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(told))
    with ExitStack() as stack:
        for name in ("node01", "node02"):
            stack.enter_context(installed(mended_lab4, name, BOX))
        yield path


@pytest.fixture
def launch(tmp_path: Path, cluster: Path) -> Iterator[Callable[..., Process]]:
    """Yield a function that launches a script that waits, on the nodes it is given."""
    (tmp_path / "code").mkdir()
    script = tmp_path / "code" / "waits.py"
    script.write_text(WAITS)
    with starter(tmp_path, cluster) as start:
        yield lambda *words, seconds="600": start("launch", "--no-gate", *words, str(script), "--", seconds)


def test_the_second_launch_on_the_same_gpus_is_refused_with_the_owners_name(
    launch: Callable[..., Process], mended_lab4: Lab
) -> None:
    first = launch("--nodes", "node01,node02")
    first.wait_for("waiting")
    second = launch("--nodes", "node02")
    assert second.end() == 1
    assert "2 GPUs of node02: in use by run waits-" in second.text and " of root" in second.text
    assert first.run_id in second.text
    assert first.popen.poll() is None
    first.popen.terminate()
    assert first.end() == 130
    third = launch("--nodes", "node02", seconds="0.2")
    assert third.end() == 0, third.text
    assert nothing_runs(mended_lab4)


def test_other_gpus_of_the_same_node_are_free(launch: Callable[..., Process]) -> None:
    first = launch("--nodes", "node01", "--env", "CUDA_VISIBLE_DEVICES=0")
    first.wait_for("waiting")
    second = launch("--nodes", "node01", "--env", "CUDA_VISIBLE_DEVICES=1", seconds="0.2")
    assert second.end() == 0, second.text
    third = launch("--nodes", "node01", "--env", "CUDA_VISIBLE_DEVICES=1,0")
    assert third.end() == 1
    assert "1 GPU of node01: in use by" in third.text


def test_a_queued_launch_waits_for_a_run_that_ends(launch: Callable[..., Process]) -> None:
    first = launch("--nodes", "node01")
    first.wait_for("waiting")
    queued = launch("--nodes", "node01,node02", "--queue", seconds="0.2")
    queued.wait_for("queued: waiting for run waits-")
    assert first.popen.poll() is None
    first.popen.terminate()
    assert first.end() == 130, first.text
    assert queued.end() == 0, queued.text


def test_killing_what_runs_frees_the_gpus(launch: Callable[..., Process], mended_lab4: Lab) -> None:
    """Kill -9 of the launch leaves the run going, so its GPUs stay taken; kill -9 of the agent ends it and frees them."""
    first = launch("--nodes", "node01")
    first.wait_for("waiting")
    first.popen.kill()
    second = launch("--nodes", "node01")
    assert second.end() == 1
    (agent,) = (pid for pid, line in mended_lab4.processes("node01") if "agent.py daemon" in line)
    mended_lab4.exec("node01", "kill", "-9", str(agent))
    third = launch("--nodes", "node01", "--queue", seconds="0.2")
    assert third.end() == 0, third.text
    assert nothing_runs(mended_lab4)


def test_stopping_one_run_leaves_the_other(launch: Callable[..., Process], tmp_path: Path, cluster: Path) -> None:
    first, second = launch("--nodes", "node01"), launch("--nodes", "node02")
    for one in (first, second):
        one.wait_for("waiting")
    with starter(tmp_path, cluster) as start:
        assert start("stop", first.run_id).end() == 0
    assert first.end() == 1
    assert second.popen.poll() is None
    refused = launch("--nodes", "node02")
    assert refused.end() == 1 and second.run_id in refused.text
