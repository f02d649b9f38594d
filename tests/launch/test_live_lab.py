"""The live view on lab nodes: GPUs by stand-ins, a run of ranks that beat, a node that goes and comes back, a real scrape."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from launch import leases
from tests.cli import PROGRAM, environment, run, start
from tests.lab import Lab
from tests.lab.gpus import GpuBox, installed

pytestmark = [pytest.mark.lab, pytest.mark.slow]
SCRIPTS = Path(__file__).parent / "scripts"
BOUND_S = 60.0
"""A bound for what takes seconds."""


@dataclass(frozen=True)
class Scene:
    """A lab with a run on both nodes. `view`: cluster.yaml that says they have GPUs."""

    lab: Lab
    state: Path
    view: str
    run_id: str


@pytest.fixture(scope="module")
def scene(needs_lab: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    state = tmp_path_factory.mktemp("state")
    two = GpuBox().cards[:2]
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab.up(tmp_path_factory.mktemp("live"), 2))
        quick = lab.shared / "quick_python"
        quick.write_bytes((SCRIPTS / "quick_python").read_bytes())
        quick.chmod(0o755)
        text = lab.cluster_file.read_text()
        plain, view = lab.directory / "launch.yaml", lab.directory / "view.yaml"
        plain.write_text(text.replace(next(line for line in text.splitlines() if " python:" in line), f"  python: {quick}"))
        view.write_text(text.replace("gpus: 0", "gpus: 2"))
        stack.enter_context(installed(lab, "node01", GpuBox(cards=two, throttle=("SW Power Cap",))))
        stack.enter_context(installed(lab, "node02", GpuBox(hangs=True)))
        words = (
            "--cluster",
            str(plain),
            "launch",
            str(SCRIPTS / "measured.py"),
            "--code",
            str(SCRIPTS),
            "--nproc-per-node",
            "2",
            "--no-gate",
        )
        code, output, errors = run(*words, "--env", "R4090C_WORLD=4", "--detach", "--", "600", state=state)
        assert code == 0, errors
        run_id = output.strip()
        stack.callback(run, "--cluster", str(plain), "stop", run_id, state=state)
        yield Scene(lab, state, str(view), run_id)


def once(scene: Scene, *words: str) -> dict[str, Any]:
    code, output, errors = run("--cluster", scene.view, "top", *words, "--once", "--json", state=scene.state)
    assert code == 0, errors
    found: dict[str, Any] = json.loads(output)
    return found


def until(look: Callable[[], Any], otherwise: str) -> Any:
    deadline = time.monotonic() + BOUND_S
    while not (found := look()):
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.2)
    return found


def test_once_as_json(scene: Scene) -> None:
    def with_beats() -> dict[str, Any] | None:
        found = once(scene)
        runs = found["runs"]
        return found if runs and runs[0]["step"] and len([one for one in runs[0]["ranks"] if one["step"]]) == 4 else None

    found = until(with_beats, "no beats of all ranks")
    first, second = found["nodes"]
    assert [gpu["throttle"] for gpu in first["gpus"]] == [["sw_power_cap"]] * 2
    assert [gpu["uuid"][-2:] for gpu in first["gpus"]] == ["00", "01"] and first["gpus"][0]["power_limit_w"] == 450.0
    assert second["up"] and second["gpus"] is None and "nvidia-smi has not answered" in second["gpus_error"]
    for node in (first, second):
        assert 0 <= node["cpu"] <= 1 and node["memory_total_bytes"] > 0
        data = [link for link in node["links"] if link["data"]]
        assert [link["name"] for link in data] == ["eth0"] and data[0]["rx_bytes_per_s"] > 0
        assert all(disk["error"] is None for disk in node["disks"]) and len(node["disks"]) == 2
    (told,) = found["runs"]
    assert (told["id"], told["state"], told["world_size"]) == (scene.run_id, "running", 4)
    assert [rank["node"] for rank in told["ranks"]] == ["node01", "node01", "node02", "node02"]
    assert {rank["phase"] for rank in told["ranks"]} == {"train"} and told["slowest"] == 3
    assert (told["loss"], told["rate_per_s"], told["metrics_error"], told["missing"]) == (5.5, 1000.0, None, [])


HOLD = """
import sys, time
sys.path.insert(0, sys.argv[1])
import leases
held, _ = leases.take(["0000:1c:00.0"], {"user": "alice", "run_id": "other-1", "node": "node01", "pid": 1, "since": time.time()})
print(len(held), flush=True)
time.sleep(600)
"""


def test_a_gpu_that_another_account_uses(scene: Scene) -> None:
    argv = scene.lab.exec_argv("node01", "python3", "-c", HOLD, str(Path(leases.__file__).parent))
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "1\n"
        first, second = once(scene, "--nodes", "node01")["nodes"][0]["gpus"]
        assert first["lease"] is None and (second["lease"]["user"], second["lease"]["run_id"]) == ("alice", "other-1")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_one_run_as_a_picture(scene: Scene) -> None:
    code, output, errors = run("--cluster", scene.view, "top", scene.run_id, state=scene.state)  # no terminal: once
    assert code == 0, errors
    assert f"run {scene.run_id}  running" in output and "power cap" in output and "GPUs: not known" in output
    code, _, errors = run("--cluster", scene.view, "top", "no-such-run", "--once", state=scene.state)
    assert code == 2 and "no-such-run" in errors


@pytest.mark.parametrize("end", [b"q", b"\x03"], ids=["q", "ctrl-c"])
def test_a_terminal_is_left_as_it_was(scene: Scene, end: bytes) -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(slave)
    env = {**environment(scene.state), "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [*PROGRAM, "--cluster", scene.view, "top"], stdin=slave, stdout=slave, stderr=slave, env=env, cwd=scene.state,
        preexec_fn=lambda: _own_terminal(slave), start_new_session=True,
    )  # fmt: skip
    try:
        said = Said(master)
        until(lambda: b"node02" in said.text() and b"cpu" in said.text(), "no picture")
        assert termios.tcgetattr(slave) != before
        os.write(master, end)
        until(lambda: said.text() and process.poll() is not None, "it does not end")
        assert process.returncode == 0
        assert said.text().count(b"\x1b[?1049h") == said.text().count(b"\x1b[?1049l") == 1, "the other screen was left"
        assert termios.tcgetattr(slave) == before
    finally:
        process.kill()
        process.wait()
        os.close(master)
        os.close(slave)


class Said:
    """What came on a terminal so far."""

    def __init__(self, master: int) -> None:
        self._master, self._all = master, b""

    def text(self) -> bytes:
        """Return all of it, without waiting for more."""
        while select.select([self._master], [], [], 0)[0]:
            self._all += os.read(self._master, 65536)
        return self._all


def _own_terminal(slave: int) -> None:
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)  # so that Ctrl-C becomes a signal


def scrape(url: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return name -> [(labels, value)] of the page at `url`."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_a_node_goes_and_comes_back_in_the_exporter(scene: Scene) -> None:
    process = start("--cluster", scene.view, "exporter", "--listen", "127.0.0.1:0", "--interval", "0.5", state=scene.state)
    assert process.stderr is not None
    try:
        url = process.stderr.readline().strip()
        assert url.startswith("http://127.0.0.1:") and url.endswith("/metrics")

        def up(node: str) -> float:
            return {told["node"]: value for told, value in scrape(url)["r4090c_node_up"]}[node]

        until(lambda: up("node01") and up("node02"), "the nodes are not up")
        found = until(lambda: (one := scrape(url)) and "r4090c_run_loss" in one and one, "no run")
        assert found["r4090c_run_loss"] == [({"run": scene.run_id}, 5.5)]
        assert {told["node"] for told, _ in found["r4090c_gpu_utilization_ratio"]} == {"node01"}
        assert ({"node": "node02"}, 0.0) in found["r4090c_gpu_query_up"]
        assert len(found["r4090c_rank_last_beat_timestamp_seconds"]) == 4
        assert all(abs(value - time.time()) < BOUND_S for _, value in found["r4090c_rank_last_beat_timestamp_seconds"])
        scene.lab.cut("node02")
        until(lambda: not up("node02"), "a cut node stays up")
        found = scrape(url)
        for name, series in found.items():
            assert name == "r4090c_node_up" or not [told for told, _ in series if told.get("node") == "node02"], name
        scene.lab.heal("node02")
        until(lambda: up("node02"), "the node does not come back")
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND_S) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()
        scene.lab.mend()


def test_nothing_of_it_is_left_on_the_nodes(scene: Scene) -> None:
    once(scene)

    def samplers() -> list[str]:
        return [line for node in scene.lab.nodes for _, line in scene.lab.processes(node) if "zlib.decompress" in line]

    until(lambda: not samplers(), f"left: {samplers()}")
