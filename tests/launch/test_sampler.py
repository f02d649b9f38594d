"""The sampler itself, run as a node runs it: stand-ins of nvidia-smi that answer, refuse and hang, and a path that hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launch import sampler
from launch.live import gpus_of
from launch.watch import sampler_argv
from tests.lab.gpus import GpuBox

HANG_S = 30.0
"""A bound, not a duration: nothing here takes seconds."""


@contextmanager
def sampling(tmp_path: Path, smi: str | None = None, **request: Any) -> Iterator[Iterator[dict[str, Any]]]:
    """Run the sampler as launch/watch.py does; yield its samples."""
    folder = tmp_path / "bin"
    folder.mkdir()
    if smi is not None:
        (folder / "nvidia-smi").write_text(smi)
        (folder / "nvidia-smi").chmod(0o755)
    asked = {"node": "node01", "interval_s": 0.2, "gpus": smi is not None, "shared": [], "top": str(tmp_path / "top"), **request}
    argv = [sys.executable, *sampler_argv(asked)[1:]]
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    assert process.stdout is not None and process.stdin is not None
    try:
        yield (json.loads(line) for line in process.stdout)
        process.stdin.close()  # whoever reads is gone
        assert process.wait(HANG_S) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def first(samples: Iterator[dict[str, Any]], wanted: Any) -> dict[str, Any]:
    """Return the first sample that is as wanted."""
    deadline = time.monotonic() + HANG_S
    for sample in samples:
        if wanted(sample):
            return sample
        assert time.monotonic() < deadline, sample
    raise AssertionError("no more samples")


def test_the_kernels_files_and_the_room_on_disks(tmp_path: Path) -> None:
    with sampling(tmp_path, shared=[str(tmp_path), str(tmp_path / "missing")]) as samples:
        sample = first(samples, lambda one: "age_s" in one["disks"][str(tmp_path)])
    assert sample["schema"] == "r4090c.sample/1" and sample["stat"].startswith("cpu ") and "lo:" in sample["netdev"]
    assert sample["gpus"] is None and sample["runs"] == [] and isinstance(sample["leases"]["busy"], list)
    assert 0 < sample["disks"][str(tmp_path)]["free"] <= sample["disks"][str(tmp_path)]["size"]
    assert sample["disks"]["/tmp"]["size"] > 0
    assert "No such file" in sample["disks"][str(tmp_path / "missing")]["error"]


@pytest.mark.parametrize("old", [False, True])
def test_gpus_by_the_names_that_the_driver_knows(tmp_path: Path, old: bool) -> None:
    box = GpuBox(old=old, throttle=("SW Power Cap", "HW Slowdown", "HW Thermal Slowdown"), processes=((77, 1, "python", 900),))
    with sampling(tmp_path, box.smi()) as samples:
        sample = first(samples, lambda one: "text" in one["gpus"] and one["gpus"]["rc"] == 0 and "text" in one["apps"])
    gpus, error = gpus_of(sample, 0.2)
    assert error is None and gpus is not None and len(gpus) == 8
    assert {gpu.throttle for gpu in gpus} == {("sw_power_cap", "hw_thermal_slowdown")}
    assert (gpus[1].sm_clock_hz, gpus[1].power_limit_w) == (210e6, 450.0)
    assert [len(gpu.processes or ()) for gpu in gpus] == [0, 1, 0, 0, 0, 0, 0, 0]


def test_a_driver_that_knows_neither_name_still_tells_the_rest(tmp_path: Path) -> None:
    smi = GpuBox().smi().replace("clocks_event_reasons.active", "something.else")
    with sampling(tmp_path, smi) as samples:
        sample = first(samples, lambda one: "text" in one["gpus"] and one["gpus"]["rc"] == 0)
    gpus, _ = gpus_of(sample, 0.2)
    assert gpus is not None and gpus[0].utilization == 0.0 and gpus[0].throttle is None


def test_a_hung_nvidia_smi_is_told_and_holds_up_nothing(tmp_path: Path) -> None:
    with sampling(tmp_path, GpuBox(hangs=True).smi()) as samples:
        sample = first(samples, lambda one: "for 1 s" in one["gpus"].get("error", ""))
    assert sample["gpus"]["error"] == "nvidia-smi has not answered for 1 s" and sample["stat"]


def test_one_that_hangs_is_killed_and_asked_again() -> None:
    query = sampler.Query(0.2)
    query.ask(["sleep", "60"])
    assert query.child is not None
    pid = query.child.pid
    deadline = time.monotonic() + HANG_S
    while not query.poll():
        query.ask(["sleep", "60"])  # no second one beside it
        assert query.child.pid == pid and time.monotonic() < deadline
        time.sleep(0.01)
    assert query.told([]) == {"error": "nvidia-smi has not answered for 0 s"}
    query.ask(["printf", "fine"])
    while not query.poll():
        time.sleep(0.01)
    assert query.told(["index"])["text"] == "fine"


def test_a_node_without_nvidia_smi_says_so(tmp_path: Path) -> None:
    query = sampler.Query(1.0)
    query.ask([str(tmp_path / "nvidia-smi")])
    assert query.told([]) == {"error": "not installed"}


def test_a_path_that_hangs_is_not_known_and_then_known_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Opening a pipe that nobody writes to waits for ever, as a file on a hung NFS does."""
    monkeypatch.setattr(sampler, "SHARED_LIMIT_S", 0.3)
    os.mkfifo(tmp_path / "metrics.jsonl")
    shared = sampler.Shared()
    asked = {"disks": [str(tmp_path)], "plans": [], "metrics": [str(tmp_path)], "ended": []}
    deadline = time.monotonic() + HANG_S
    try:
        while not shared.error:
            shared.ask(asked)
            shared.poll()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert "has not answered" in shared.found("metrics", str(tmp_path))["error"]
        assert "has not answered" in shared.found("disks", str(tmp_path))["error"]
        (tmp_path / "metrics.jsonl").unlink()
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5, "note": "x"}\n{"step": 2')
        while shared.answer is None:
            shared.ask(asked)
            shared.poll()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert shared.found("metrics", str(tmp_path))["lines"] == [{"step": 1, "loss": 2.5}]
    finally:
        shared.end()


def test_only_the_last_lines_of_a_long_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "pad": 1.0}) + "\n" for step in range(100_000)) + "not json\n[1]\n")
    lines, error = sampler.last_lines(str(path))
    assert error is None and lines[-1]["step"] == 99_999 and len(lines) == sampler.MOST_METRICS - 2


def test_agents_are_told_while_they_live_and_a_moment_longer(tmp_path: Path) -> None:
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    now = time.time()
    ended = {"outcome": "failed", "time": now - 5, "cause": {"kind": "rank-failed", "log_tail": "secret"}}
    states: dict[str, dict[str, Any]] = {
        "alive": {"pid": os.getpid(), "start": start, "heartbeat": now},
        "just-ended": {"pid": 1, "start": -1, "end": ended},
        "ended": {"pid": 1, "start": -1, "end": {**ended, "time": now - 300}},
        "long-ended": {"pid": 1, "start": -1, "end": {**ended, "time": now - 3601}},
        "crashed": {"pid": 1, "start": -1, "heartbeat": now - 5},
        "other-node": {"pid": os.getpid(), "start": start},
        "not-ours": {"pid": os.getpid(), "start": start, "run_dir": 5},
    }
    for name, told in states.items():
        folder = tmp_path / name / ("node02" if name == "other-node" else "node01")
        folder.mkdir(parents=True)
        text = {"run_id": name, "run_dir": f"/runs/{name}", "attempt": 1, "state": "running", "secrets": "x", **told}
        (folder / "state.json").write_text(json.dumps(text))
        (folder / "node.json").write_text(json.dumps({"node": {"node_rank": 3}}))
    over: dict[str, int] = {}
    found = {one["run_id"]: one for one in sampler.agent_states("node01", str(tmp_path), over)}
    assert sorted(found) == ["alive", "crashed", "ended", "just-ended"]
    assert {name for name, one in found.items() if one["lately"]} == {"alive", "crashed", "just-ended"}
    assert (found["alive"]["alive"], found["alive"]["node_rank"], found["alive"]["outcome"]) == (True, 3, None)
    assert (found["just-ended"]["alive"], found["just-ended"]["outcome"]) == (False, "failed")
    assert found["just-ended"]["cause"] == "rank-failed" and "secret" not in json.dumps(found)
    assert (found["crashed"]["alive"], found["crashed"]["outcome"]) == (False, None)
    assert [Path(path).parts[-3] for path in over] == ["long-ended"], "what is long over is not read again"
    path = tmp_path / "long-ended" / "node01" / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pid": os.getpid(), "start": start, "end": None}))
    os.utime(path, (now, now + 60))
    again = sampler.agent_states("node01", str(tmp_path), over)
    assert {one["run_id"] for one in again} == {*found, "long-ended"}, "it was started again"


def test_who_starts_a_run_again_is_told_as_long_as_it_waits(tmp_path: Path) -> None:
    now, top = time.time(), tmp_path / "top"
    for name, ended_s in (("waits", 300), ("waited", 300), ("given-up", 5)):
        for folder in (tmp_path / name, top / name / "node01"):
            folder.mkdir(parents=True)
        end = {"outcome": "failed", "time": now - ended_s, "cause": {"kind": "rank-failed"}}
        told = {"run_id": name, "run_dir": str(tmp_path / name), "attempt": 1, "pid": 1, "start": -1, "end": end}
        (top / name / "node01" / "state.json").write_text(json.dumps(told))
    for name, between in (
        ("waits", {"who": "kim@here, process 5", "until": now + 600}),
        ("waited", {"who": "sam@there, process 6", "until": now - 1}),
        ("given-up", {"given_up": "enough"}),
    ):
        (tmp_path / name / "between.json").write_text(json.dumps(between))
    with sampling(tmp_path, top=str(top)) as samples:
        sample = first(samples, lambda one: any(run["waits"] for run in one["runs"]))
    assert {run["run_id"]: run["waits"] for run in sample["runs"]} == {"waits": "kim@here, process 5", "given-up": None}


def test_it_ends_with_its_children_when_it_is_told_to(tmp_path: Path) -> None:
    argv = [sys.executable, *sampler_argv({"node": "x", "interval_s": 60, "gpus": False, "shared": [str(tmp_path)]})[1:]]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 1
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_S) == 0
    deadline = time.monotonic() + HANG_S
    while Path(f"/proc/{children[0]}").exists() and Path(f"/proc/{children[0]}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_source_is_python_3_8() -> None:
    import ast

    ast.parse(Path(sampler.__file__).read_text(encoding="utf-8"), feature_version=(3, 8))
