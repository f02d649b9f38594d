"""The ends of export and eval: Ctrl-C, and what they refuse before anything is imported."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.export import _follow
from tests.train.test_checkpoint import write
from train import checkpoint
from train.checkpoint import ALONE
from train.errors import Stop
from train.export import export
from train.recipe import Checkpoint

ROOT = Path(__file__).resolve().parents[2]
GOLDEN: dict[str, Any] = json.loads((ROOT / "tests" / "golden" / "recipe-tiny.json").read_text())
LORA = {"method": "lora", "lora": {"rank": 4, "alpha": 8, "dropout": 0.0, "targets": ["q_proj"]}}


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("program", ["export", "evaluate"])
def test_ctrl_c_is_one_line_and_130(program: str, as_json: bool, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one" / "checkpoints" / "step_00000002"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "complete")  # it stands there, reading
    script = str(ROOT / "train" / f"{program}.py")
    words = [str(folder.parents[1]), "--data-dir", str(tmp_path), *(["--json"] if as_json else [])]
    process = subprocess.Popen(
        [sys.executable, script, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    opened = os.open(folder / "complete", os.O_WRONLY)
    process.send_signal(signal.SIGINT)
    said, complained = process.communicate(timeout=60)
    os.close(opened)
    assert process.returncode == 130
    if as_json:
        (line,) = said.splitlines()
        told = json.loads(line)
        assert (told["error"][1], told["exit_code"], complained) == ("interrupted (Ctrl-C)", 130, "")
        with pytest.raises(KeyboardInterrupt):  # who started it ends likewise
            _follow([line], lambda: 130, lambda _: None, "here")
    else:
        assert (said, complained.count("\n")) == ("", 1)
        assert complained.startswith(f"train: {script}: interrupted (Ctrl-C); ")


def saved_on(device: str, run: Path, **changes: Any) -> Path:
    """Save a checkpoint whose random base was drawn on `device`, and return the run's folder."""
    recipe = copy.deepcopy(GOLDEN) | LORA | changes
    manifest = {"world_size": 1, "data_sha256": "d1", "recipe": recipe, "precision": "bf16", "drawn_on": device}
    rotation = Checkpoint(every_steps=1, keep=0)
    checkpoint.save(run / "checkpoints", 1, lambda partial: write(partial, model=b"weights"), ALONE, manifest, rotation)
    return run


def test_adapters_beside_weights_that_a_gpu_drew_are_not_merged_into_others(tmp_path: Path) -> None:
    run, said = saved_on("NVIDIA GeForce RTX 4090", tmp_path / "run"), list[str]()
    told = "complete: its adapters trained beside random weights that NVIDIA GeForce RTX 4090 drew, and a CPU draws others"
    with pytest.raises(Stop, match=told):
        export(run, tmp_path / "models", tmp_path, tmp_path / "out", merged=True, step=None, say=said.append)
    assert not list(tmp_path.glob("out*"))
    assert said == [f"reading step_00000001, {len(b'weights')} bytes"]  # nothing was imported for it


@pytest.mark.train
def test_nor_evaluated_beside_others(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("deepspeed")
    (tmp_path / "a.txt").write_text("words that are read as bytes " * 100)
    text = {"kind": "text", "sources": [str(tmp_path / "a.txt")], "sequence_length": 64, "max_mib": 1}
    held_out = {"every_steps": 1, "sequences": 2, "data": text}
    run = saved_on("NVIDIA GeForce RTX 4090", tmp_path / "runs" / "run", data=text, eval=held_out)
    words = [sys.executable, str(ROOT / "train" / "evaluate.py"), str(run), "--data-dir", str(tmp_path / "data")]
    environment = {**os.environ, "R4090C_DEVICE": "cpu"}
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 2, ran.stderr
    assert "random weights that NVIDIA GeForce RTX 4090 drew, and a CPU draws others; expected NVIDIA" in ran.stderr
    assert ran.stderr.count("\n") == 1
