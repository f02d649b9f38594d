"""Models: weights from a folder, what is wrong with a folder in one line, what trains under each method, kernels that lack."""

# ruff: noqa: E402  (skipped before the imports where the libraries lack)

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

if any(importlib.util.find_spec(name) is None for name in ("transformers", "deepspeed", "peft", "bitsandbytes")):
    pytest.skip("needs the extra `train`", allow_module_level=True)
pytestmark = pytest.mark.train

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.train.toy_models import CPU, LORA, SHAPE, tiny_recipe
from train.batch import candidates, engine_bytes, largest_that_fits
from train.device import Device
from train.errors import Stop
from train.model import Chosen, build_model, build_optimizer, choose_kernels, configuration, count_parameters, drawn_on
from train.recipe import Kernels, Recipe
from train.weights import find_weights

SDPA = Chosen("sdpa", False, False)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def recipe(family: str = "llama", weights: str | None = None, **changes: Any) -> Recipe:
    config = SHAPE | ({"head_dim": 8} if family == "qwen3" else {})
    return tiny_recipe(**{"model": {"family": family, "weights": weights, "config": config}, "lora": LORA, **changes})


def build(
    wanted: Recipe, models_dir: Path = Path("/nowhere"), precision: str = "fp32", kernels: Chosen = SDPA, sharded: bool = False
) -> Any:
    return build_model(wanted, find_weights(wanted.model, models_dir), CPU, precision, kernels=kernels, sharded=sharded)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.arange(20).reshape(1, 20)).logits
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder models/ with one saved model of each family, Llama in two files as well."""
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        torch.manual_seed(3)
        config = AutoConfig.for_model(family, **recipe(family).model.config)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / family)
    torch.manual_seed(3)
    llama = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE))
    llama.save_pretrained(folder / "parts", max_shard_size="60KB")
    llama.half().save_pretrained(folder / "half")
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_random_and_loaded_weights_of_each_family(family: str, saved: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(saved / family)
    loaded = build(recipe(family, family), saved)
    assert loaded.training and type(loaded) is type(plain)
    assert torch.equal(logits(loaded), logits(plain))
    one, same, other = build(recipe(family)), build(recipe(family)), build(recipe(family, seed=99))
    assert torch.equal(logits(one), logits(same)) and not torch.equal(logits(one), logits(other))
    assert not torch.equal(logits(one), logits(loaded))


def test_weights_come_in_parts_in_half_precision_and_from_an_absolute_path(saved: Path) -> None:
    assert len(list((saved / "parts").glob("*.safetensors"))) > 1
    assert torch.equal(logits(build(recipe(weights="parts"), saved)), logits(build(recipe(weights=str(saved / "llama")))))
    found = find_weights(recipe(weights="half").model, saved)
    assert found is not None and found.dtype == "float16"
    half = build(recipe(weights="half"), saved)
    assert {one.dtype for one in half.parameters()} == {torch.float32}
    assert torch.allclose(logits(half), logits(build(recipe(weights="llama"), saved)), atol=1e-3)


def test_buffers_that_older_files_hold_are_no_mistake(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "llama", tmp_path / "llama")
    _edit_tensors(lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))(
        tmp_path / "llama"
    )
    assert torch.equal(logits(build(recipe(weights="llama"), tmp_path)), logits(build(recipe(weights="llama"), saved)))


def _edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


def _edit_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return edit


def _rename(old: str, new: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / old).rename(folder / new)


def _write(name: str, content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(content)


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("name", "spoil", "told"),
    [
        ("gone", None, "gone: there is no such folder; expected a model: config.json and *.safetensors; copy the model there"),
        ("llama", lambda folder: (folder / "config.json").unlink(), "config.json: No such file"),
        ("llama", _write("config.json", b"[]"), "config.json: not a model's configuration (TypeError"),
        ("mistral", None, "mistral/config.json: model_type mistral; expected llama, as the recipe says"),
        ("llama", _edit_config(hidden_size=48), "config.json: hidden_size 48; expected hidden_size 32, as the recipe says"),
        ("llama", _edit_config(max_position_embeddings=32), "max_position_embeddings 32; expected max_position_embeddings 64"),
        ("llama", _rename("model.safetensors", "pytorch_model.bin"), "holds pytorch_model.bin; expected model.safetensors"),
        ("parts", _rename("model-00001-of-00003.safetensors", "x"), "model-00001-of-00003.safetensors: is not there; expected"),
        ("parts", _write("model.safetensors.index.json", b"{}"), "index.json: KeyError: 'weight_map'"),
        ("llama", _cut, "as its header says; copy the file again: it is cut off"),
        ("llama", _write("model.safetensors", b"\xff" * 64), "expected a safetensors file"),
        ("llama", _write("model.safetensors", struct.pack("<Q", 2) + b"{}"), "expected a safetensors file"),
        ("llama", _write("model.safetensors", b""), "expected a safetensors file"),
        (
            "llama",
            _edit_tensors(lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].to(torch.int8)})),
            "lm_head.weight has numbers of kind I8; expected float32, bfloat16, float16 (quantized by method",
        ),
        (
            "llama",
            _edit_tensors(lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight")),
            "1 tensors are missing, unknown or of another shape: model.layers.1.mlp.up_proj.weight",
        ),
        (
            "llama",
            _edit_tensors(lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)})),
            "1 tensors are missing, unknown or of another shape: model.norm.weight",
        ),
    ],
)  # fmt: skip
def test_a_wrong_folder_is_told_in_one_line(name: str, spoil: Any, told: str, saved: Path, tmp_path: Path) -> None:
    if (saved / name).exists():
        (tmp_path / name).mkdir()
        for file in (saved / name).iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
    if spoil:
        spoil(tmp_path / name)
    with pytest.raises(Stop) as caught:
        build(recipe(weights=name), tmp_path)
    assert told in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / name))
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_the_rotary_base_is_taken_from_the_recipe() -> None:
    """As config.json files of older transformers have it."""
    config = configuration(recipe(model={"family": "llama", "config": SHAPE | {"rope_theta": 5e5}}), None)
    assert config.rope_parameters["rope_theta"] == 5e5


OF_LLAMA2 = {
    **SHAPE,
    "model_type": "llama",
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "use_cache": True,
}
OF_LLAMA3 = {**SHAPE, "model_type": "llama", "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0}}


@pytest.mark.parametrize(
    ("config", "told", "wrong"),
    [
        (OF_LLAMA2, {"rope_theta": 10000, "use_cache": False, "attention_bias": True}, ""),
        (OF_LLAMA2, {"rms_norm_eps": 1e-6}, "rms_norm_eps 1e-05; expected rms_norm_eps 1e-06"),
        (OF_LLAMA2, {"rope_theta": 5e5}, "rope_parameters.rope_theta 10000.0; expected rope_parameters.rope_theta 500000.0"),
        (OF_LLAMA2, {"rope_parameters": {"rope_theta": 10000, "rope_type": "default"}}, ""),
        (OF_LLAMA2, {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type default; expected rope_parameters.rope_type"),
        (OF_LLAMA3, {"rope_theta": 500000}, ""),
        (OF_LLAMA3, {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "rope_parameters.factor 8.0; expected"),
        (OF_LLAMA3, {"rope_scaling": None}, "rope_parameters.rope_type llama3; expected rope_parameters.rope_type default"),
        ({**OF_LLAMA3, "rope_parameters": 7}, {"rope_theta": 1}, ""),
        ({**OF_LLAMA3, "dtype": "bfloat16"}, {"torch_dtype": "float32"}, "dtype bfloat16; expected dtype float32"),
    ],
)  # fmt: skip
def test_no_field_of_the_recipe_may_contradict_the_folders(
    config: dict[str, Any], told: dict[str, Any], wrong: str, tmp_path: Path
) -> None:
    save_file({"one": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = recipe(model={"family": "llama", "weights": str(tmp_path), "config": SHAPE | told}).model
    if not wrong:
        assert find_weights(model, tmp_path) is not None
        return
    with pytest.raises(Stop, match=re.escape(f"{tmp_path / 'config.json'}: ")) as caught:
        find_weights(model, tmp_path)
    assert wrong in str(caught.value)


def test_only_random_weights_that_no_checkpoint_holds_depend_on_who_draws_them(saved: Path) -> None:
    assert drawn_on(recipe(method="lora"), CPU) == "a CPU"
    assert drawn_on(recipe(method="lora"), Device("cuda", "cuda:0", "nccl"), sharded=True) == "a CPU"
    assert drawn_on(recipe(), CPU) is drawn_on(recipe(weights="llama", method="qlora"), CPU) is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hidden_sise": 32}, "recipe model.config: unknown: hidden_sise; expected fields of transformers.LlamaConfig"),
        ({"num_attention_heads": 5}, "recipe model.config: "),
        ({"hidden_act": "nonsense"}, "recipe model.config: "),
    ],
)
def test_a_wrong_configuration_is_told(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(Stop, match=told):
        build(recipe(model={"family": "llama", "weights": None, "config": SHAPE | changes}))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", ["lora", "int8", "qlora"])
def test_adapters_train_and_nothing_else(method: str, precision: str, saved: Path) -> None:
    wanted = recipe(weights="llama", method=method, activation_checkpointing=True, loss_chunk_tokens=7)
    model, again = (build(wanted, saved, precision) for _ in range(2))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    trains = {name: one for name, one in model.named_parameters() if one.requires_grad}
    places = [f"{layer}.{place}" for layer in range(2) for place in ("self_attn.q_proj", "mlp.down_proj")]
    assert sorted(trains) == sorted(
        f"base_model.model.model.layers.{place}.lora_{side}.default.weight" for place in places for side in "AB"
    )
    assert all(torch.equal(one, dict(again.named_parameters())[name]) for name, one in trains.items())
    assert {one.dtype for one in trains.values()} == {dtype}
    packed = {"lora": dtype, "int8": torch.int8, "qlora": torch.uint8}[method]
    for name, one in model.named_parameters():
        if name not in trains:
            matrix = any(f".{part}." in name for part in MATRICES)
            assert one.dtype == (packed if matrix else dtype), name
    full = sum(one.numel() for one in build(recipe(weights="llama"), saved).parameters())
    adapters = 2 * 4 * ((32 + 32) + (64 + 32))
    assert count_parameters(model) == (full + adapters, adapters)

    ids = torch.arange(24).reshape(2, 12)
    before = {name: one.detach().clone() for name, one in model.named_parameters() if one.grad is None and name not in trains}
    optimizer = build_optimizer(model, wanted)
    losses = []
    for _ in range(30):
        for group in optimizer.param_groups:
            group["lr"] = 0.02
        result = model(input_ids=ids, labels=ids).loss
        result.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(result.item())
    assert losses[-1] < losses[0] - 0.4
    assert all(torch.equal(one, dict(model.named_parameters())[name]) for name, one in before.items())
    plain = AutoModelForCausalLM.from_pretrained(saved / "llama")
    whole = plain(input_ids=ids, labels=ids).loss.item()
    assert losses[0] == pytest.approx(whole, abs={"lora": 0.02, "int8": 0.02, "qlora": 0.1}[method])
    kept = {name for name in model.state_dict() if any(f".{part}." in name for part in MATRICES) and ".lora_" not in name}
    assert bool(kept) == (method == "lora")  # what is quantized anew at each start is in no checkpoint


def test_what_adapters_cannot_be_is_told(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Stop, match=r"recipe lora.targets: q_prj not in the model; expected some of down_proj, gate_proj, k_proj"):
        build(recipe(weights="llama", method="lora", lora=LORA | {"targets": ["q_proj", "q_prj"]}), saved)
    with pytest.raises(Stop, match=r"recipe method qlora: ZeRO stage 3; expected stage 0, 1 or 2"):
        build(recipe(method="qlora"), sharded=True)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(Stop, match=r"recipe method: cannot import peft: .*; pip install peft") as caught:
        build(recipe(weights="llama", method="lora"), saved)
    assert caught.value.exit_code == 1


def test_kernels_that_this_machine_lacks_are_left_out_with_a_notice() -> None:
    chosen = choose_kernels(Kernels(attention="flash", liger=True), CPU, "fp32", "llama")
    assert (chosen.attention, chosen.liger, chosen.compile) == ("sdpa", False, False)
    assert [notice.split(":")[0] for notice in chosen.notices] == ["kernels.attention flash", "kernels.liger"]
    assert choose_kernels(Kernels(), CPU, "fp32", "llama") == SDPA
    assert choose_kernels(Kernels(attention="eager"), CPU, "bf16", "llama") == Chosen("eager", False, False)
    eager = build(recipe(), kernels=Chosen("eager", False, False))
    assert eager.config._attn_implementation == "eager"
    assert torch.allclose(logits(eager), logits(build(recipe())), atol=1e-5)


def test_the_micro_batch_divides_a_ranks_share_and_is_the_largest_that_fits() -> None:
    wanted = recipe(micro_batch="auto", global_batch=48)
    sizes = candidates(wanted, 4)
    assert sizes == [12, 6, 4, 3, 2, 1]
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= 4

    assert largest_that_fits(sizes, fits) == 4
    assert len(asked) <= 3
    for most, largest in ((0, 0), (1, 1), (5, 4), (11, 6), (12, 12)):
        assert largest_that_fits(sizes, most.__ge__) == largest
    divided = wanted.divided(4, 4)
    assert (divided.micro_batch, divided.gradient_accumulation, divided.samples_per_step(4)) == (4, 3, 48)


def test_what_deepspeed_keeps_on_a_gpu_follows_its_estimator() -> None:
    """HARDWARE: ZeRO-2 in 16 bits 2P + 18P/N, of which 2P are the weights; buckets come on top."""
    parameters, buckets = 7_000_000_000, {"reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000}

    def kept(stage: int, ranks: int = 8, precision: str = "bf16", **more: Any) -> int:
        return engine_bytes(parameters, {"zero_optimization": {"stage": stage, **buckets, **more}}, ranks, precision)

    assert kept(2) == 18 * parameters // 8 + 2 * 100_000_000
    assert kept(1) == 2 * parameters + 16 * parameters // 8 + 2 * 100_000_000
    assert kept(0) == 18 * parameters
    assert kept(2, offload_optimizer={"device": "cpu"}) == 2 * parameters // 8 + 2 * 100_000_000
    assert kept(2, precision="fp32") == 12 * parameters // 8 + 4 * 100_000_000
    assert engine_bytes(1000, {"zero_optimization": {"stage": 2}}, 1, "bf16") == 22_000  # a bucket is no larger than what trains
