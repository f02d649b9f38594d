"""The rank wrapper as torchrun starts it: bound, logged, recorded, and then it is the script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launch import agent, rank

RANK = Path(rank.__file__)
TELL = (
    "import json,os,sys;"
    "print(json.dumps([sorted(os.sched_getaffinity(0)), os.getpid(), os.environ['OMP_NUM_THREADS'], sys.argv[1:]]))"
)


def run_rank(tmp_path: Path, *command: str, **changes: Any) -> subprocess.CompletedProcess[str]:
    """Run the wrapper for global rank 3."""
    entry = {"rank": 3, "cpus": [], "memory_node": None, "env": {"OMP_NUM_THREADS": {"value": "5"}}, **changes}
    local = tmp_path / "local"
    local.mkdir(exist_ok=True)
    told = {"run_dir": str(tmp_path / "run"), "attempt": 2, "node": {"ranks": [{"rank": 2}, entry]}}
    (local / "node.json").write_text(json.dumps(told))
    return subprocess.run(
        [sys.executable, "-I", "-S", str(RANK), "--", *command],
        env={**os.environ, "RANK": "3", "R4090C_LOCAL": str(local)},
        capture_output=True,
        text=True,
        timeout=30,
    )


def log(tmp_path: Path) -> str:
    return (tmp_path / "run" / "attempt_2" / "3.log").read_text()


def test_the_rank_becomes_the_script_bound_and_recorded(tmp_path: Path) -> None:
    cpu = max(os.sched_getaffinity(0))
    done = run_rank(tmp_path, sys.executable, "-c", TELL, "--", "-x", "a b", cpus=[cpu])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    cpus, pid, threads, words = json.loads(log(tmp_path))
    assert (cpus, threads, words) == ([cpu], "5", ["--", "-x", "a b"])
    record = json.loads((tmp_path / "local" / "rank-3.json").read_text())
    assert record["pid"] == pid  # exec keeps the pid
    assert agent.stat_of(os.getpid()).start < record["start"]  # type: ignore[union-attr]


def test_cpus_and_memory_are_bound_without_numactl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # neither numactl nor taskset nor anything else
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cpu = max(os.sched_getaffinity(0))
    tell = "import os; print(os.sched_getaffinity(0), open('/proc/self/numa_maps').readline().split()[1])"
    assert run_rank(tmp_path, sys.executable, "-c", tell, cpus=[cpu], memory_node=0).returncode == 0
    if "Operation not permitted" in log(tmp_path) or "No such file" in log(tmp_path):
        pytest.skip("no memory policies here: a container's filter, or a kernel without NUMA")
    assert log(tmp_path) == f"{{{cpu}}} prefer:0\n"


def test_the_exit_code_is_the_scripts(tmp_path: Path) -> None:
    assert run_rank(tmp_path, sys.executable, "-c", "import sys; sys.exit(41)").returncode == 41


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cpus": [4000]}, "rank 3 runs unbound: "),
        ({"memory_node": 5000}, "rank 3 has no memory policy: no NUMA node 5000"),
        ({"memory_node": 900}, "rank 3 has no memory policy: "),
    ],
)
def test_what_cannot_be_bound_is_told_and_the_script_runs(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    assert run_rank(tmp_path, sys.executable, "-c", "print('ran')", **changes).returncode == 0
    assert says in log(tmp_path)
    assert log(tmp_path).endswith("ran\n")


def test_a_record_that_cannot_be_written_is_told_and_the_script_runs(tmp_path: Path) -> None:
    (tmp_path / "local" / "rank-3.json").mkdir(parents=True)
    assert run_rank(tmp_path, sys.executable, "-c", "print('ran')").returncode == 0
    assert "rank 3 is not watched by its agent: " in log(tmp_path)
    assert log(tmp_path).endswith("ran\n")


def test_a_program_that_is_not_there_is_told_in_the_ranks_log(tmp_path: Path) -> None:
    assert run_rank(tmp_path, "/nowhere/python", "x.py").returncode == 127
    assert log(tmp_path) == "r4090c: rank 3: cannot run /nowhere/python: No such file or directory\n"


def test_the_users_modules_do_not_reach_the_wrapper(tmp_path: Path) -> None:
    """PYTHONPATH may hold a json.py; the plan starts the wrapper with -I."""
    (tmp_path / "json.py").write_text("raise RuntimeError('not yours')")
    old = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(tmp_path)
    try:
        assert run_rank(tmp_path, "/bin/echo", "ran").returncode == 0
    finally:
        if old is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = old
    assert log(tmp_path) == "ran\n"


def test_a_rank_dies_with_torchrun(tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.mkdir()
    entry = {"rank": 3, "cpus": [], "memory_node": None, "env": {}}
    (local / "node.json").write_text(json.dumps({"run_dir": str(tmp_path), "attempt": 2, "node": {"ranks": [entry]}}))
    parent = (
        f"import subprocess; subprocess.Popen([{sys.executable!r}, '-I', '-S', {str(RANK)!r}, '--', '/bin/sleep', '60']).wait()"
    )
    torchrun = subprocess.Popen(
        [sys.executable, "-c", parent], env={**os.environ, "RANK": "3", "R4090C_LOCAL": str(local)}, start_new_session=True
    )
    try:
        wait_until(lambda: (local / "rank-3.json").exists())
        pid = json.loads((local / "rank-3.json").read_text())["pid"]
        assert agent.living(agent.stat_of(pid))
    finally:
        torchrun.kill()
        torchrun.wait()
    wait_until(lambda: not agent.living(agent.stat_of(pid)))


def wait_until(condition: Any, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
