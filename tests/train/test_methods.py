"""Every method really trains: two ranks over gloo, one after the other in one process group (method_session.py)."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if any(importlib.util.find_spec(name) is None for name in ("deepspeed", "peft", "bitsandbytes")):
    pytest.skip("needs the extra `train`", allow_module_level=True)
pytestmark = [pytest.mark.train, pytest.mark.long, pytest.mark.timeout(2400)]

ROOT = Path(__file__).resolve().parents[2]
GOLDEN: dict[str, Any] = json.loads((ROOT / "tests" / "golden" / "recipe-tiny.json").read_text())
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")} | {
    "R4090C_DEVICE": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
METHODS = ("lora", "int8", "qlora")
STAGES = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
STEPS, LONG_STEPS, STOP_AFTER = 8, 30, 4


def small(**changes: Any) -> dict[str, Any]:
    """Return `tiny` with a model of 0.1 M parameters, without checkpoints before the last step."""
    recipe = copy.deepcopy(GOLDEN)
    recipe["model"]["config"] |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    recipe["model"]["config"] |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    recipe["data"] |= {"sequence_length": 64, "max_mib": 1}
    recipe["checkpoint"] |= {"every_steps": 1000, "keep": 2}
    recipe["lora"] = {"rank": 8, "alpha": 32, "dropout": 0.1, "targets": TARGETS}
    return recipe | {"steps": STEPS} | changes


def optimizer(**changes: Any) -> dict[str, Any]:
    return {"optimizer": GOLDEN["optimizer"] | changes}


def family(name: str) -> dict[str, Any]:
    recipe = small(method="qlora", **optimizer(lr=0.02))
    recipe["model"] |= {"family": name}
    return recipe


THRIFTY = {"loss_chunk_tokens": 48, "activation_checkpointing": True}
CASES: dict[str, dict[str, Any]] = {
    **{stage: {"recipe": small(ds_config=f"{stage}.json")} for stage in STAGES},
    "ddp": {"recipe": small(steps=LONG_STEPS), "plain_ddp": True},
    "zero2-long": {"recipe": small(steps=LONG_STEPS)},
    "chunked": {"recipe": small(loss_chunk_tokens=48)},
    "checkpointing": {"recipe": small(activation_checkpointing=True)},
    "zero3-thrifty": {"recipe": small(ds_config="zero3.json", **THRIFTY)},
    "zero0-bf16": {"recipe": small(ds_config="zero0.json", precision="bf16")},
    "zero2-bf16": {"recipe": small(precision="bf16", **THRIFTY)},
    **{method: {"recipe": small(method=method, **THRIFTY, **optimizer(lr=0.02)), "stop_after": STOP_AFTER} for method in METHODS},
    "lora-zero3": {"recipe": small(method="lora", ds_config="zero3.json", **optimizer(lr=0.02)), "stop_after": STOP_AFTER},
    "qlora-bf16": {"recipe": small(method="qlora", precision="bf16", **THRIFTY, **optimizer(lr=0.02)), "stop_after": STOP_AFTER},
    "qlora-zero3": {"recipe": small(method="qlora", ds_config="zero3.json")},
    "adamw8bit": {"recipe": small(**optimizer(name="adamw8bit")), "stop_after": STOP_AFTER},
    "full": {"recipe": small(), "stop_after": STOP_AFTER},
    "mistral": {"recipe": family("mistral")},
    "qwen2": {"recipe": family("qwen2")},
    "qwen3": {"recipe": family("qwen3")},
    "auto": {"recipe": small(micro_batch="auto", global_batch=8)},
    "small-micro-batch": {"recipe": small(micro_batch=1, gradient_accumulation=1, global_batch=8)},
    "indivisible": {"recipe": small(global_batch=7)},
    "reference": {"recipe": small(**optimizer(lr_reference_batch=2))},
    "no-clipping": {"recipe": small(ds_config="zero0.json", gradient_clipping=0.0)},
    "spike": {"recipe": small(loss_spike=1.5, schedule=GOLDEN["schedule"] | {"warmup_steps": 7}), "poison_step": 7},
    "no-number": {"recipe": small(), "poison_step": 3},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("methods")
    (folder / "cases.json").write_text(json.dumps(CASES))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launcher, str(Path(__file__).with_name("method_session.py")), str(folder / "cases.json"), str(folder)]
    ran = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=2000)
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-5000:]
    found: dict[str, dict[str, Any]] = json.loads((folder / "results.json").read_text())
    return found


def same(one: dict[str, Any], other: dict[str, Any], within: float, norms_within: float = 1e-3) -> None:
    assert len(one["losses"]) == len(other["losses"])
    assert one["losses"] == pytest.approx(other["losses"], abs=within)
    assert one["norms"] == pytest.approx(other["norms"], rel=norms_within)


def test_every_zero_stage_gives_the_same_losses_and_norms(results: dict[str, dict[str, Any]]) -> None:
    for stage in STAGES:
        same(results[stage], results["zero2"], 1e-4)
    assert results["zero2"]["losses"][-1] < results["zero2"]["losses"][0] - 0.5
    assert results["zero3"]["parameters"] == results["zero2"]["parameters"]


def test_zero2_is_plain_ddp_over_30_steps(results: dict[str, dict[str, Any]]) -> None:
    assert len(results["ddp"]["losses"]) == LONG_STEPS
    same(results["zero2-long"], results["ddp"], 1e-4)


def test_what_saves_memory_changes_nothing(results: dict[str, dict[str, Any]]) -> None:
    for case in ("chunked", "checkpointing", "zero3-thrifty", "auto", "small-micro-batch"):
        same(results[case], results["zero2"], 2e-5)
    assert (results["auto"]["micro_batch"], results["auto"]["gradient_accumulation"]) == (4, 1)
    assert (results["small-micro-batch"]["micro_batch"], results["small-micro-batch"]["gradient_accumulation"]) == (1, 4)
    same(results["zero0-bf16"], results["zero2-bf16"], 2e-3, norms_within=5e-3)
    assert results["zero2-bf16"]["losses"] == pytest.approx(results["zero2"]["losses"], abs=0.02)


def test_one_rank_and_two_take_the_same_steps(results: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """The same command as on a cluster, alone: the global batch stays, and with it the order of the data and the losses."""
    (tmp_path / "recipe.json").write_text(json.dumps(CASES["auto"]["recipe"]))
    places = ["--run-dir", str(tmp_path / "run"), "--data-dir", str(tmp_path / "data")]
    command = [sys.executable, str(ROOT / "train" / "main.py"), "--recipe", str(tmp_path / "recipe.json"), *places]
    ran = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "512 tokens = 8 sequences x 64 x 1 accumulated x 1 rank" in ran.stdout
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == pytest.approx(results["auto"]["losses"], abs=1e-4)


def test_missing_weights_are_told_before_anything_is_loaded(tmp_path: Path) -> None:
    recipe = small(method="qlora")
    recipe["model"]["weights"] = "llama-2-7b"
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    places = ["--run-dir", str(tmp_path / "run"), "--data-dir", str(tmp_path / "data")]
    command = [sys.executable, "-X", "importtime", str(ROOT / "train" / "main.py"), "--recipe", str(tmp_path / "recipe.json")]
    ran = subprocess.run([*command, *places], env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    told = [line for line in ran.stderr.splitlines() if not line.startswith("import time:")]
    assert told == [
        f"train: {tmp_path}/models/llama-2-7b: there is no such folder; expected a model: config.json and *.safetensors; "
        "copy the model there, or correct model.weights in the recipe"
    ]
    assert ran.returncode == 2
    assert " torch\n" not in ran.stderr


@pytest.mark.parametrize("case", [*METHODS, "lora-zero3", "qlora-bf16", "adamw8bit", "full"])
def test_each_method_learns_and_resumes_to_the_same_losses(case: str, results: dict[str, dict[str, Any]]) -> None:
    found = results[case]
    assert len(found["losses"]) == STEPS
    assert sum(found["losses"][-2:]) / 2 < found["losses"][0] - 0.2
    assert found["resumed_losses"] == found["losses"]
    assert found["ranks_agree"]


@pytest.mark.parametrize("case", [*METHODS, "qlora-bf16", "mistral", "qwen2", "qwen3"])
def test_adapters_train_and_the_rest_keeps_every_bit(case: str, results: dict[str, dict[str, Any]]) -> None:
    found = results[case]
    assert len(found["trains"]) == 2 * len(TARGETS) * 2
    assert all(".lora_A." in name or ".lora_B." in name for name in found["trains"])
    assert found["frozen_unchanged"] and found["ranks_agree"]
    precision = "torch.bfloat16" if case == "qlora-bf16" else "torch.float32"
    packed = {"lora": [], "int8": ["torch.int8"]}.get(case, ["torch.uint8"])
    assert found["frozen_dtypes"] == sorted([precision, *packed])
    assert found["losses"][-1] < found["losses"][0] - 0.1
    names = {"mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    assert found["class"] == names.get(case, "LlamaForCausalLM")


def test_quantized_weights_are_in_no_checkpoint(results: dict[str, dict[str, Any]]) -> None:
    sizes = {method: results[method]["model_states_bytes"] for method in METHODS}
    assert max(sizes.values()) < 1.1 * min(sizes.values())
    assert sizes["qlora"] < results["full"]["model_states_bytes"] / 2


def test_optimizers_and_their_learning_rate(results: dict[str, dict[str, Any]]) -> None:
    assert results["adamw8bit"]["optimizer"] == "AdamW8bit" and results["full"]["optimizer"] == "AdamW"
    assert results["adamw8bit"]["losses"] == pytest.approx(results["full"]["losses"], abs=0.01)
    twice = [rate * 2 for rate in results["zero2"]["rates"]]  # 8 sequences a step, the rate is meant for 2
    assert results["reference"]["rates"] == pytest.approx(twice)
    assert results["no-clipping"]["norms"][0] == pytest.approx(results["zero2"]["norms"][0], rel=1e-5)
    assert results["no-clipping"]["losses"] != results["zero2"]["losses"]


def test_what_cannot_be_is_told_in_one_line_and_the_next_one_runs(results: dict[str, dict[str, Any]]) -> None:
    assert results["qlora-zero3"]["stop"].startswith("recipe method qlora: ZeRO stage 3; expected stage 0, 1 or 2")
    assert results["indivisible"]["stop"].startswith("recipe global_batch: 7 sequences a step cannot be divided")


def test_no_numbers_and_spikes_stop_with_the_step_and_the_sequences(results: dict[str, dict[str, Any]]) -> None:
    """The session makes the weights wrong just before the step; of its 8 sequences, rank 1 gets the ones told."""
    spike, number = results["spike"], results["no-number"]
    assert spike["exit_code"] == number["exit_code"] == 1
    assert spike["stop"].startswith("step 7: loss is ") and "over 1.5 times" in spike["stop"]
    assert number["stop"].startswith("step 3: loss is nan at learning rate")
    for told, first in ((spike["stop"], 48), (number["stop"], 16)):
        start, end = (int(told.split(" positions ")[1].split()[index]) for index in (0, 2))
        assert first <= start < end == start + 1 < first + 8
    assert "positions 18 to 19 of the data's order (rank 1; sequences " in number["stop"]
