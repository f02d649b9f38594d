"""What ends the command ends the ranks: signals, closed pipes, odd metrics; and nothing of a good run stays either."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests import cli
from tests.lab.lab import Lab
from tests.lab.processes import all_processes

pytestmark = [pytest.mark.lab, pytest.mark.slow]

SLOW = """
import json, os, sys, time
with open(os.path.join(os.environ["R4090C_RUN_DIR"], "metrics.jsonl"), "a") as metrics:
    metrics.write("null\\n" + json.dumps({"step": 0, "time": time.time(), "accuracy": 0.5}) + "\\n")
for number in range(600):
    print("line", number, flush=True)
    time.sleep(0.1)
"""
LEAVES_DAEMONS = """
import os, subprocess
for words in (["setsid", "sleep", "3771"], ["env", "-i", "setsid", "sleep", "3772"],
              ["setsid", "bash", "-c", 'trap "" TERM; sleep 3773']):
    if os.fork() == 0:
        subprocess.Popen(words)
        os._exit(0)
print("done")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    path = tmp_path / "code" / "slow.py"
    path.write_text(SLOW)
    return path


def left(lab: Lab) -> list[str]:
    words = ("agent.py", "torch.distributed.run", "rank.py", "user/", "sleep 377")
    return [f"{node}: {line}" for node in lab.nodes for _, line in lab.processes(node) if any(word in line for word in words)]


def gone(lab: Lab, within_s: float = 10) -> bool:
    deadline = time.monotonic() + within_s
    while left(lab) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left(lab) == []


def launched(lab: Lab, script: Path, state: Path, *words: str) -> Any:
    return cli.start("launch", str(script), "--nodes", "2", "--cluster", str(lab.cluster_file), *words, state=state)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_every_rank_and_a_second_one_does_not_break_that(
    lab4: Lab, script: Path, tmp_path: Path, number: signal.Signals
) -> None:
    process = launched(lab4, script, tmp_path)
    for line in process.stdout:
        if line.startswith("line 3"):
            break
    process.send_signal(number)
    time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "nothing is left running" in errors
    assert gone(lab4, 0)


def test_a_signal_ends_every_rank_although_nobody_reads_what_is_said(lab4: Lab, script: Path, tmp_path: Path) -> None:
    """`launch … 2>&1 | tee log`, whose tee dies of the same Ctrl-C; or a terminal that is closed."""
    process = launched(lab4, script, tmp_path)
    for line in process.stdout:
        if line.startswith("line 3"):
            break
    process.stderr.close()
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert gone(lab4, 0)


def test_a_detached_run_is_supervised_although_nobody_reads_its_id(lab4: Lab, script: Path, tmp_path: Path) -> None:
    """`launch --detach | true`."""
    process = launched(lab4, script, tmp_path, "--detach")
    process.stdout.close()
    assert process.wait(60) == 0
    (run,) = cli.run_json("jobs", "--cluster", str(lab4.cluster_file), state=tmp_path)[:1]
    try:
        assert run["state"] == "running"
        assert [one for one in all_processes() if {"--successor", run["id"], str(lab4.cluster_file)} <= {*one.argv}]
    finally:
        cli.run("stop", run["id"], "--cluster", str(lab4.cluster_file), state=tmp_path)
    assert gone(lab4)


def test_two_signals_during_the_start_leave_nothing(lab4: Lab, script: Path, tmp_path: Path) -> None:
    process = launched(lab4, script, tmp_path)
    for line in process.stderr:
        if line.startswith("starting"):
            break
    process.send_signal(signal.SIGINT)
    time.sleep(0.03)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert gone(lab4)


def test_a_reader_that_goes_away_ends_the_run(lab4: Lab, script: Path, tmp_path: Path) -> None:
    process = launched(lab4, script, tmp_path)
    for line in process.stdout:
        if line.startswith("line 3"):
            break
    process.stdout.close()  # `r4090c launch … | head`
    process.wait(timeout=60)
    assert gone(lab4, 0)


def test_metrics_of_a_script_of_ones_own_may_hold_anything(lab4: Lab, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    short = tmp_path / "code" / "short.py"
    short.write_text(SLOW.replace("range(600)", "range(3)"))
    words = ("launch", str(short), "--nodes", "1", "--cluster", str(lab4.cluster_file), "--json")
    code, output, errors = cli.run(*words, state=tmp_path)
    assert code == 0, errors
    assert json.loads(output)["outcome"] == "done"
    assert "not a JSON object" in errors


def test_what_a_good_script_leaves_behind_is_ended(lab4: Lab, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    leaver = tmp_path / "code" / "leaver.py"
    leaver.write_text(LEAVES_DAEMONS)
    code, _, errors = cli.run("launch", str(leaver), "--nodes", "1", "--cluster", str(lab4.cluster_file), state=tmp_path)
    assert code == 0, errors
    assert gone(lab4, 0)
