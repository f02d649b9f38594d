"""bench/gpu_check: its whole path at toy size on the CPU, and what it says where there is no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "gpu_check.sh"

if importlib.util.find_spec("deepspeed") is None or not SCRIPT.exists():
    pytest.skip("needs the extra `train`, and bench/", allow_module_level=True)
pytestmark = [pytest.mark.train, pytest.mark.long]


def check(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "TMPDIR": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
        "OUT": str(tmp_path),
    }
    return subprocess.run([str(SCRIPT), *options], env=environment, capture_output=True, text=True, timeout=240)


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    ran = check(tmp_path)
    assert (ran.returncode, ran.stdout) == (3, "")
    assert ran.stderr == "gpu_check: no CUDA device; --dry-run proves the path on a CPU\n"


def test_a_dry_run_goes_the_whole_way(tmp_path: Path) -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("needs bitsandbytes")
    ran = check(tmp_path, "--dry-run", "--cases", "llama7b-qlora,llama1b-lora-flash")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / "gpu_check.md").read_text() == ran.stdout
    header, rule, row, packed = [line.strip("|").split("|") for line in ran.stdout.splitlines() if line.startswith("|")]
    assert len(header) == len(rule) == len(row) == len(packed) == 12
    assert (packed[0].strip(), float(packed[3]) > 0) == ("llama1b-lora-flash", True)
    name, attention, size, step_s, _, rate, mfu, peak_gib, *_ = (cell.strip() for cell in row)
    assert (name, attention, size, mfu) == ("llama7b-qlora", "sdpa", "2 × 64", "–")
    assert float(rate.replace(",", "")) == pytest.approx(2 * 64 / float(step_s), rel=0.02)
    assert 0.2 < float(peak_gib) < 4
    assert "says nothing about speed" in ran.stdout.splitlines()[0]
    assert not list(tmp_path.glob("gpu_check_*.json"))
