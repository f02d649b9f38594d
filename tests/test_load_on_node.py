"""The programs that load a node's GPUs and its storage, for real: the first on the processor, the second on a disk."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from netcheck.measure import gpu_load, gpu_on_node, storage_load, storage_on_node
from netcheck.measure.gpu_load import NodeLoad
from tests.lab import Lab
from tests.test_preflight import REPOSITORY, ask

MIB = 1 << 20
torch_here = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")


# --------------------------------------------------------------------------- GPUs


def loaded(*options: str) -> tuple[int, NodeLoad]:
    """Run the program here and return how it ended and what its reader makes of it."""
    done = subprocess.run([sys.executable, gpu_on_node.__file__, *options], capture_output=True, text=True, timeout=120)
    step = {"rc": done.returncode, "stdout": done.stdout, "stderr": done.stderr, "error": "", "duration_s": 1.0}
    record = {"name": "n1", "data": {"indices": [0]}, "parts": {"n1": {"steps": [step]}}}
    (load,) = gpu_load.read({"rounds": [[record]]})
    return done.returncode, load


def test_both_sides_agree_on_the_words() -> None:
    assert gpu_load.MARKER == gpu_on_node.MARKER
    for module, more in ((gpu_on_node, {"torch"}), (storage_on_node, set())):
        lines = Path(str(module.__file__)).read_text().splitlines()
        imported = [line.split()[1].partition(".")[0] for line in lines if line.strip().startswith(("import ", "from "))]
        assert {name for name in imported if name not in sys.stdlib_module_names} == more


@torch_here
@pytest.mark.train
def test_the_path_of_the_gpus_on_the_processor() -> None:
    code, load = loaded("--device", "cpu", "--size", "64", "--copy-mib", "2", "--seconds", "0.3")
    assert (code, load.error, len(load.gpus)) == (0, "", 1)
    (gpu,) = load.gpus
    assert all(rate is not None and rate > 0 for rate in (gpu.h2d_gbyte_s, gpu.d2h_gbyte_s, gpu.together_gbyte_s, gpu.tflops))
    code, load = loaded("--device", "cpu", "--mode", "power", "--size", "64", "--seconds", "4", "--period-s", "1.3")
    assert (code, load.error) == (0, "") and 2 <= load.cycles <= 4


@torch_here
@pytest.mark.train
@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a GPU")
def test_no_gpu_is_an_answer() -> None:
    code, load = loaded()
    assert (code, load.error) == (1, "importing torch: torch sees no GPU")


def test_cpus_near_each_card() -> None:
    assert gpu_on_node.cpus_of("0-3,8;4-7;") == [{0, 1, 2, 3, 8}, {4, 5, 6, 7}, set()]
    assert gpu_on_node.cpus_of("") == []


# --------------------------------------------------------------------------- storage


def storage_argv(folder: Path, name: str, size: int, seconds: float = 10.0) -> list[str]:
    return [sys.executable, "-I", "-S", storage_on_node.__file__, str(folder), name, str(size), str(seconds), "1"]


def run_storage(folder: Path, name: str, size: int, seconds: float = 10.0) -> dict[str, Any]:
    done = subprocess.run(storage_argv(folder, name, size, seconds), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_what_is_written_is_read_and_removed(tmp_path: Path) -> None:
    told = run_storage(tmp_path, "n1", 32 * MIB)
    assert (told["bytes"], told["wrong"], told["error"]) == (32 * MIB, 0, "")
    assert told["write_mbyte_s"] > 0 and told["read_mbyte_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_slow_storage_is_left_in_time(tmp_path: Path) -> None:
    told = run_storage(tmp_path, "n1", 1 << 40, seconds=0.0)
    assert storage_on_node.LEAST_BYTES <= told["bytes"] < 1 << 32
    assert list(tmp_path.iterdir()) == []


def test_what_an_earlier_run_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    old, young, own, other = (tmp_path / name for name in (".r4090c-load-a", ".r4090c-load-b", ".r4090c-load-n1", "data"))
    for file in (old, young, own, other):
        file.write_text("x")
    os.utime(old, (time.time() - 7200,) * 2)
    os.utime(other, (time.time() - 7200,) * 2)
    assert run_storage(tmp_path, "n1", 16 * MIB)["removed"] == 2
    assert sorted(file.name for file in tmp_path.iterdir()) == [young.name, other.name]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stopped_run_removes_its_file(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(storage_argv(tmp_path, "n1", 1 << 40, 60.0), stdout=subprocess.PIPE, text=True)
    while not list(tmp_path.iterdir()):
        time.sleep(0.01)
    process.send_signal(number)
    stdout, _ = process.communicate(timeout=60)
    assert json.loads(stdout)["error"] == "stopped"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert run_storage(tmp_path / "no", "n1", MIB)["error"] == "No such file or directory"


@pytest.mark.lab
def test_storage_of_the_lab_is_measured_and_left_as_it_was(mended_lab4: Lab) -> None:
    before = sorted(mended_lab4.shared.iterdir())
    code, answer = ask(mended_lab4, "--full", "--only", "storage-throughput")
    assert code == 0
    assert {one["subject"]: one["status"] for one in answer["findings"]} == dict.fromkeys(mended_lab4.nodes, "pass")
    assert sorted(mended_lab4.shared.iterdir()) == before


@pytest.mark.lab
@pytest.mark.parametrize("after_s", [0.2, 1.0])
def test_ctrl_c_leaves_no_file_in_the_shared_folder(mended_lab4: Lab, after_s: float) -> None:
    lab = mended_lab4
    words = ("--cluster", str(lab.cluster_file), "preflight", "--full", "--only", "storage-throughput")
    environment = {**os.environ, "R4090C_STATE": "/dev/null", "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [sys.executable, "-c", "from r4090c.cli import main; main()", *words],
        env=environment,
        cwd="/",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (seen := list(lab.shared.glob(f"{storage_on_node.PREFIX}*"))) and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    # A run that has just ended has no handlers any more; a shell calls that 130, too.
    assert seen and process.returncode in (130, 0, -signal.SIGINT) and "Traceback" not in said, said
    deadline = time.monotonic() + 60
    while list(lab.shared.glob(f"{storage_on_node.PREFIX}*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(lab.shared.glob(f"{storage_on_node.PREFIX}*")) == []


def test_the_nodes_run_this_very_program() -> None:
    text = Path(str(storage_on_node.__file__)).read_text()
    assert text == storage_load.SOURCE
