"""Held-out loss: the same by any number of ranks, at its intervals, and of a checkpoint."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from train.errors import Stop
from train.evaluate import held_out_data
from train.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("needs the extra `train`", allow_module_level=True)

from tests.train.test_training import TORCHRUN, finish, metrics, small_recipe  # noqa: E402

HELD_OUT = {"kind": "text", "sources": ["/usr/share/common-licenses/GPL-3"], "sequence_length": 64, "max_mib": 1}


def test_the_data_is_named_by_the_recipe_or_the_user() -> None:
    recipe = Recipe.model_validate(small_recipe())
    with pytest.raises(Stop, match=r"recipe eval.data: the recipe has none; .* --data PATH"):
        held_out_data(recipe, None)
    named = held_out_data(recipe, "chat-held-out")
    assert (named.kind, named.path, named.sequence_length) == ("prepared", "chat-held-out", 64)
    own = Recipe.model_validate(small_recipe(eval={"every_steps": 0, "data": HELD_OUT}))
    assert held_out_data(own, None).sources == HELD_OUT["sources"]


@pytest.mark.train
@pytest.mark.long
def test_any_number_of_ranks_gives_the_same_loss_to_the_last_digit(tmp_path: Path) -> None:
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(small_recipe(data=HELD_OUT)))
    three = [word if word != "2" else "3" for word in TORCHRUN]
    ran = finish([*three, str(ROOT / "tests" / "train" / "evaluate_session.py"), str(file), str(tmp_path / "data")])
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (line,) = (line for line in ran.stdout.splitlines() if line.startswith("TOLD "))
    told = json.loads(line.removeprefix("TOLD "))
    for together, alone, by_hand, perplexity in told["told"]:
        assert together == alone
        assert together == pytest.approx(by_hand, rel=1e-6)
        assert perplexity == math.exp(together)
    assert told["everyones"] == [[row[0] for row in told["told"]]] * 3
    assert told["beats"] == 2 + 3 + 1  # of 4, 7 and 1 micro-batches, on 3 ranks
    assert told["training"] is True


@pytest.mark.train
@pytest.mark.long
def test_a_run_tells_its_held_out_loss_and_eval_finds_the_same_one(tmp_path: Path) -> None:
    """With --profile, so that a real trace of two ranks is read as well."""
    recipe = copy.deepcopy(small_recipe(eval={"every_steps": 3, "sequences": 10, "data": HELD_OUT}))
    file, run = tmp_path / "recipe.json", tmp_path / "runs" / "small"
    places = ["--run-dir", str(run), "--data-dir", str(tmp_path / "data")]

    def train() -> str:
        file.write_text(json.dumps(recipe))
        ran = finish([*TORCHRUN, str(ROOT / "train" / "main.py"), "--recipe", str(file), *places, "--profile"])
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    said = train()
    assert "profile  steps 3 to 5 of this attempt: " in said and "% of the communication is hidden behind computation" in said
    assert (run / "profile" / "rank0.json.gz").exists()
    lines = metrics(tmp_path / "runs", "small")
    told = {line["step"]: line for line in lines if "eval_loss" in line}
    assert sorted(told) == [3, 6, 8]
    assert told[8]["eval_loss"] < told[3]["eval_loss"]
    assert told[8]["eval_perplexity"] == math.exp(told[8]["eval_loss"])
    assert "step 8/8 loss " in said and f" eval_loss {told[8]['eval_loss']:.6f}" in said
    assert all(0 < line["comm_time_s"] < line["step_time_s"] for line in lines)
    parts = ("data", "forward", "backward", "comm", "optimizer")
    for line in lines:
        assert sum(line[f"{part}_time_s"] for part in parts) == pytest.approx(line["step_time_s"], rel=0.02, abs=0.002)

    def evaluate(*options: str) -> subprocess.CompletedProcess[str]:
        return finish([sys.executable, "-m", "r4090c", "eval", str(run), "--json", *options])

    for step in (8, 6):
        answer = json.loads(evaluate("--step", str(step)).stdout)
        assert (answer["run"], answer["step"], answer["samples"]) == ("small", step, 10)
        assert answer["eval_loss"] == told[step]["eval_loss"]  # one process instead of two, to the last digit
    refused = evaluate("--step", "5")
    assert refused.returncode == 2 and "no whole checkpoint of step 5" in refused.stderr
    refused = evaluate("--data", "nothing-here")
    assert refused.returncode == 2 and "correct --data nothing-here" in refused.stderr and "--data-dir" not in refused.stderr
    (tmp_path / "a.txt").write_text("words that were not trained on " * 20)
    other = tmp_path / "data" / "other"
    words = [str(tmp_path / "a.txt"), "--tokenizer", "bytes", "--out", str(other)]
    subprocess.run([sys.executable, str(ROOT / "train" / "prepare.py"), *words], check=True, capture_output=True)
    answer = json.loads(evaluate("--data", "other", "--sequences", "0").stdout)
    assert (answer["samples"], "notice" in answer) == (31 * 20 // 64, False)
    manifest = other / "manifest.json"
    told = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(told | {"tokenizer": {"kind": "hf", "name": "toy", "sha256": "12"}}))
    refused = evaluate("--data", "other")
    assert refused.returncode == 2 and "its tokenizer is toy, that of the data trained on" in refused.stderr
