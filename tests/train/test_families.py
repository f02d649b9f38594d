"""Families beyond the tested ones: those that train keep documents apart and their loss whole, others are told in one line."""

# ruff: noqa: E402  (skipped before the imports where the libraries lack)

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

if any(importlib.util.find_spec(name) is None for name in ("transformers", "deepspeed", "peft")):
    pytest.skip("needs the extra `train`", allow_module_level=True)
pytestmark = pytest.mark.train

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2PreTrainedModel, GemmaForCausalLM

from launch.recipe import model_in
from tests.train.toy_models import CPU, GOLDEN, SHAPE, tiny_recipe
from train.data import IGNORED
from train.device import Device
from train.errors import Stop
from train.loss import count_targets
from train.model import FLASH, build_model, choose_kernels
from train.recipe import Kernels, Recipe
from train.weights import find_weights

ROOT = Path(__file__).resolve().parents[2]
FOR_ALL = {**SHAPE, "initializer_range": 0.1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MORE: dict[str, dict[str, Any]] = {
    **{family: {"head_dim": 8} for family in ("gemma", "gemma2", "glm4")},
    "gemma3_text": {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "granite": {"logits_scaling": 8.0, "attention_multiplier": 0.35},
}
WHOLE = ("gemma", "gemma3_text", "phi3", "olmo2", "smollm3", "starcoder2", "stablelm", "glm4")
SCALED = ("cohere", "granite", "gemma2")
LENGTHS = ((5, 4, 3), (7, 5))


def save(family: str, folder: Path, **more: Any) -> Path:
    """Save a toy model of the family with random weights."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **FOR_ALL | MORE.get(family, {}) | more)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def recipe(model: Path | str, **changes: Any) -> Recipe:
    """Return a recipe on packed documents: of the model in a folder, as `model: FOLDER` has it, or of a family."""
    told = model_in(str(model), "model") if isinstance(model, Path) else {"family": model, "config": {"vocab_size": 256}}
    data = {"kind": "prepared", "path": "chat", "sequence_length": 12}
    return tiny_recipe(**{"model": told, "data": data, **changes})


def build(wanted: Recipe) -> Any:
    kernels = choose_kernels(wanted.kernels, CPU, "fp32", wanted.model.family)
    weights = find_weights(wanted.model, Path("/nowhere"))
    return build_model(wanted, weights, CPU, "fp32", kernels=kernels, sharded=False)


def step(model: Any, batches: list[dict[str, torch.Tensor]], targets: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss over `targets` tokens of all batches together, and the gradients."""
    model.zero_grad()
    loss = sum(model(**batch, num_items_in_batch=float(targets)).loss for batch in batches)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    return loss.item(), {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def require_alike(one: tuple[float, dict[str, torch.Tensor]], other: tuple[float, dict[str, torch.Tensor]]) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    assert one[1].keys() == other[1].keys() and one[1]
    largest = max(float(grad.abs().max()) for grad in other[1].values())
    for name, grad in one[1].items():
        assert float((grad - other[1][name]).abs().max()) <= 1e-5 * largest, name


@pytest.mark.parametrize("family", [*WHOLE, *SCALED])
def test_a_family_by_its_folder_trains_packed_documents_as_if_each_were_alone(family: str, tmp_path: Path) -> None:
    save(family, tmp_path)
    model = build(recipe(tmp_path))
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(model) is type(plain) and model.training
    ids = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(1))
    positions = torch.stack([torch.cat([torch.arange(one) for one in row]) for row in LENGTHS])
    labels = ids.masked_fill(positions == 0, IGNORED)
    packed, targets = {"input_ids": ids, "labels": labels, "position_ids": positions}, count_targets(labels)
    alone = []
    for row, lengths in zip(ids, LENGTHS, strict=True):
        for begin, end in pairwise([sum(lengths[:many]) for many in range(len(lengths) + 1)]):
            alone.append({"input_ids": row[None, begin:end], "labels": row[None, begin:end]})
    mine = step(model, [packed], targets)
    require_alike(mine, step(plain.train(), alone, targets))
    chunks = recipe(tmp_path, loss_chunk_tokens=5)
    if family in WHOLE:
        require_alike(step(build(chunks), [packed], targets), mine)
    else:
        with pytest.raises(Stop, match=rf"recipe loss_chunk_tokens: 5: .* {family} .*; expected 0; --set loss_chunk_tokens=0"):
            build(chunks)


@pytest.mark.parametrize(
    ("family", "more", "changes", "told"),
    [
        ("phi", {}, {"loss_chunk_tokens": 5}, "recipe loss_chunk_tokens: 5: between lm_head.weight and the logits of phi lies a"),
        ("gemma3_text", {"final_logit_softcapping": 5.0}, {"loss_chunk_tokens": 5}, "recipe loss_chunk_tokens: 5: between"),
        ("granite", {"logits_scaling": 1.0}, {"loss_chunk_tokens": 5}, ""),
        ("gemma3_text", {"final_logit_softcapping": None}, {"loss_chunk_tokens": 5}, ""),
    ],
)  # fmt: skip
def test_what_a_configuration_says_decides_not_the_familys_name(
    family: str, more: dict[str, Any], changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    wanted = recipe(save(family, tmp_path, **more), **changes)
    if not told:
        assert build(wanted).training
        return
    with pytest.raises(Stop) as caught:
        build(wanted)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("family", "told"),
    [
        ("gpt2", "recipe model.family: gpt2: GPT2LMHeadModel has no layers in model.layers; expected llama, mistral, qwen2, "),
        ("opt", "recipe model.family: opt: OPTForCausalLM has no layers in model.layers"),
        ("gpt_neox", "recipe model.family: gpt_neox: GPTNeoXForCausalLM has no layers in model.layers"),
        ("falcon", "recipe model.family: falcon: FalconForCausalLM has no layers in model.layers"),
        ("mamba", "recipe model.family: mamba: MambaForCausalLM has no layers in model.layers"),
        ("gemma9", "recipe model.family: gemma9 is no causal language model that transformers"),
        ("t5", "recipe model.family: t5 is no causal language model that transformers"),
    ],
)  # fmt: skip
def test_a_family_that_cannot_train_here_is_refused_before_its_weights_load(family: str, told: str) -> None:
    with pytest.raises(Stop) as caught:
        build(recipe(family))
    assert told in str(caught.value)


LINEAR = {
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention"],
}


def test_a_family_whose_documents_see_each_other_trains_on_one_text_only(tmp_path: Path) -> None:
    """Linear attention carries its state from a document into the next."""
    save("qwen3_5_text", tmp_path, **LINEAR)
    with pytest.raises(Stop, match=r"recipe model.family: qwen3_5_text: a document of a packed row sees the one before"):
        build(recipe(tmp_path))
    assert build(recipe(tmp_path, data=GOLDEN["data"])).training


def test_a_small_model_that_fails_is_told_with_what_may_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here sdpa, which cannot cap attention scores; transformers' class says so, unless it is forgotten."""
    wanted = recipe(save("gemma2", tmp_path, attn_logit_softcapping=1.0))
    assert build(wanted).config._attn_implementation == "eager"
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)
    with pytest.raises(Stop, match=r"gemma2: a small model of it.* fails: .*softcap.*; --set kernels.attention=eager, or take"):
        build(wanted)


def test_a_loss_that_is_not_divided_by_what_all_ranks_count_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mean(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].flatten())

    monkeypatch.setattr(GemmaForCausalLM, "loss_function", staticmethod(mean))
    with pytest.raises(Stop, match=r"recipe model.family: gemma: its loss is not the cross-entropy over num_items_in_batch"):
        build(recipe(save("gemma", tmp_path)))


def test_attention_of_a_family_without_sdpa() -> None:
    auto = choose_kernels(Kernels(), CPU, "fp32", "gemma2")
    assert (auto.attention, [notice.partition(":")[0] for notice in auto.notices]) == ("eager", ["kernels.attention auto"])
    assert choose_kernels(Kernels(attention="eager"), CPU, "fp32", "gemma2").notices == ()
    flash = choose_kernels(Kernels(attention="flash"), CPU, "fp32", "gemma2")
    assert flash.attention == "eager" and flash.notices[0].endswith("; eager is used")
    assert choose_kernels(Kernels(), CPU, "fp32", "gemma").attention == "sdpa"
    with pytest.raises(Stop, match=r"kernels.attention: sdpa: .*gemma2; expected auto or eager; --set kernels.attention=eager"):
        choose_kernels(Kernels(attention="sdpa"), CPU, "fp32", "gemma2")


def test_flash_attention_is_for_families_it_was_checked_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody tried whether others hand it the positions that keep documents apart."""
    package, gpu = ModuleType("flash_attn"), Device("cuda", "cuda:0", "nccl")
    package.__spec__ = ModuleSpec("flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    assert choose_kernels(Kernels(), gpu, "bf16", "llama").attention == FLASH
    assert choose_kernels(Kernels(), gpu, "bf16", "gemma").attention == "sdpa"
    assert "a family of llama, mistral" in choose_kernels(Kernels(attention="flash"), gpu, "bf16", "gemma").notices[0]


def test_the_trial_changes_no_random_numbers(tmp_path: Path) -> None:
    """Else adapters, and what is drawn after them, would depend on whether a trial came before."""
    wanted = recipe(save("gemma", tmp_path))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build(wanted)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.slow
def test_adapters_of_a_new_family_train_and_are_exported(tmp_path: Path) -> None:
    """A whole run by train/main.py, and what train/export.py makes of it, which transformers loads."""
    lora = {"rank": 4, "alpha": 8, "dropout": 0.0, "targets": ["q_proj", "down_proj"]}
    told = json.loads(recipe(save("gemma3_text", tmp_path / "gemma"), method="lora", lora=lora, steps=4).model_dump_json())
    told |= {"data": GOLDEN["data"] | {"sequence_length": 32, "max_mib": 0.1}, "loss_chunk_tokens": 48}
    told["checkpoint"]["every_steps"] = 4
    told["optimizer"]["lr"] = 0.01
    (tmp_path / "recipe.json").write_text(json.dumps(told))
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    environment |= {"R4090C_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    run = tmp_path / "run"
    places = ["--run-dir", str(run), "--data-dir", str(tmp_path / "data")]
    train = [sys.executable, str(ROOT / "train" / "main.py"), "--recipe", str(tmp_path / "recipe.json"), *places]
    trained = subprocess.run(train, env=environment, capture_output=True, text=True, timeout=300)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert "gemma3_text" in trained.stdout
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 4 and losses[-1] < losses[0]

    command = [sys.executable, str(ROOT / "train" / "export.py"), str(run), "--merged", "--json"]
    exported = subprocess.run(
        [*command, "--data-dir", str(tmp_path / "data")], env=environment, capture_output=True, text=True, timeout=300
    )
    assert exported.returncode == 0, exported.stdout + exported.stderr
    merged, base = (AutoModelForCausalLM.from_pretrained(folder) for folder in (run / "export-merged", tmp_path / "gemma"))
    assert type(merged).__name__ == "Gemma3ForCausalLM"
    ids = torch.arange(32, 64).unsqueeze(0)
    with torch.no_grad():
        before, after = (model(input_ids=ids, labels=ids).loss.item() for model in (base, merged))
    assert after != before
