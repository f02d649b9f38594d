"""The recipe: reading, mistakes, learning rate, and the DeepSpeed configuration made from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from train.errors import Stop
from train.recipe import AUTO, Recipe, deepspeed_config, json_schema, read_recipe

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "train" / "recipes" / "tiny.yaml"
GOLDEN = ROOT / "tests" / "golden" / "recipe-tiny.json"
ZERO2 = ROOT / "ds_configs" / "zero2.json"


@pytest.fixture
def recipe() -> Recipe:
    return read_recipe(TINY)


def test_tiny_resolves_to_the_golden_json(recipe: Recipe) -> None:
    assert yaml.safe_load(TINY.read_text()) == json.loads(GOLDEN.read_text())
    assert read_recipe(GOLDEN) == recipe
    assert list(json.loads(GOLDEN.read_text())) == list(Recipe.model_fields)


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("stepz", 3, "stepz: unknown"),
        ("steps", 0, "steps: Input should be greater than 0 (got 0)"),
        ("optimizer.lr", "fast", "optimizer.lr: Input should be a valid number"),
        ("optimizer.name", "muon", "optimizer.name: Input should be 'adamw' or 'adamw8bit' (got 'muon')"),
        ("precision", "fp8", "precision: Input should be 'auto', 'fp32', 'bf16' or 'fp16' (got 'fp8')"),
        ("data.sources", [], "data.sources: List should have at least 1 item"),
        ("method", "dora", "method: Input should be 'full', 'lora', 'int8' or 'qlora' (got 'dora')"),
        ("micro_batch", "many", "micro_batch: Input should be a valid integer"),
        ("micro_batch", -1, "micro_batch: Input should be greater than or equal to 0"),
        ("micro_batch", "auto", "global_batch: micro_batch auto needs it"),
        ("loss_spike", 0.5, "loss_spike: 0.5 stops every run; give more than 1"),
        ("kernels.attention", "fast", "kernels.attention: Input should be 'auto', 'sdpa', 'flash' or 'eager'"),
        ("optimizer.lr_reference_batch", 0, "optimizer.lr_reference_batch: Input should be greater than 0"),
        ("model.config.vocab_size", 100, "model.config.vocab_size is 100; expected at least 256"),
        ("model.config.vocab_size", "many", "model.config.vocab_size is 'many'; expected at least 256"),
        ("optimizer.betas", [0.9, 1.0], "optimizer.betas.1: Input should be less than 1"),
        ("loss_spike", float("inf"), "loss_spike: Input should be a finite number"),
        ("seed", 10**30, "seed: Input should be less than or equal to 9007199254740992"),
    ],
)
def test_a_mistake_is_one_line_naming_file_key_and_value(tmp_path: Path, path: str, value: Any, told: str) -> None:
    content = json.loads(GOLDEN.read_text())
    *parents, key = path.split(".")
    place = content
    for parent in parents:
        place = place[parent]
    place[key] = value
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(content))
    with pytest.raises(Stop) as caught:
        read_recipe(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_missing_file_and_broken_json_are_told(tmp_path: Path) -> None:
    with pytest.raises(Stop, match="No such file"):
        read_recipe(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(Stop, match=r"broken.json: Expecting"):
        read_recipe(tmp_path / "broken.json")
    (tmp_path / "broken.yaml").write_text("steps: [1,\nname: x")
    with pytest.raises(Stop, match=r"broken.yaml: while parsing a flow sequence") as told:
        read_recipe(tmp_path / "broken.yaml")
    assert "\n" not in str(told.value)


def test_learning_rate_warms_up_to_the_peak_and_ends_at_its_ratio(recipe: Recipe) -> None:
    rates = [recipe.learning_rate(step) for step in range(1, recipe.steps + 1)]
    warmup, peak = recipe.schedule.warmup_steps, recipe.optimizer.lr
    assert rates[:warmup] == pytest.approx([peak * step / warmup for step in range(1, warmup + 1)])
    assert rates[warmup - 1] == peak == max(rates)
    assert all(later < earlier for earlier, later in zip(rates[warmup - 1 :], rates[warmup:], strict=False))
    assert rates[-1] == pytest.approx(peak * recipe.schedule.min_lr_ratio)
    middle = warmup + (recipe.steps - warmup) / 2
    halfway = (recipe.learning_rate(int(middle)) + recipe.learning_rate(int(middle) + 1)) / 2
    assert halfway == pytest.approx(peak * (1 + recipe.schedule.min_lr_ratio) / 2, rel=1e-6)


def test_no_warmup_starts_at_the_peak_side(recipe: Recipe) -> None:
    schedule = recipe.schedule.model_copy(update={"warmup_steps": 0})
    rate = recipe.model_copy(update={"schedule": schedule}).learning_rate(1)
    assert 0.99 * recipe.optimizer.lr < rate < recipe.optimizer.lr


def test_adapters_without_lora_are_a_mistake(tmp_path: Path) -> None:
    content = json.loads(GOLDEN.read_text())
    content |= {"method": "qlora", "lora": None}
    (tmp_path / "wrong.json").write_text(json.dumps(content))
    with pytest.raises(Stop, match=r"wrong.json: .*lora: method qlora needs it"):
        read_recipe(tmp_path / "wrong.json")


def test_the_learning_rate_grows_with_the_root_of_the_global_batch_once(recipe: Recipe) -> None:
    scaled = recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"lr_reference_batch": 8})})
    for step in (1, 5, 20, 40):
        plain = recipe.learning_rate(step)
        assert recipe.learning_rate(step, global_batch=32) == plain  # no reference: as it stands
        assert scaled.learning_rate(step, global_batch=8) == plain
        assert [scaled.learning_rate(step, global_batch=32) for _ in range(3)] == [pytest.approx(2 * plain)] * 3
        assert scaled.learning_rate(step, global_batch=2) == pytest.approx(plain / 2)
    batch, lr = recipe.samples_per_step(4), recipe.optimizer.lr
    told = "as the recipe says, whatever the global batch (optimizer.lr_reference_batch: null)"
    assert recipe.told_rate(4) == f"{lr:.2e} at a global batch of {batch}: {told}"
    peak = f"{scaled.learning_rate(scaled.schedule.warmup_steps, batch):.2e} at a global batch of {batch}: {lr:.2e}"
    assert scaled.told_rate(4) == f"{peak} x sqrt({batch} / 8) (optimizer.lr_reference_batch: 8)"


def test_the_global_batch_stays_whatever_the_ranks_and_the_micro_batch(recipe: Recipe) -> None:
    assert recipe.divided(4) == recipe and recipe.samples_per_step(4) == 16
    fixed = recipe.model_copy(update={"global_batch": 24})
    told = {(ranks, size): fixed.divided(ranks, size) for ranks, size in ((1, 2), (2, 0), (4, 3), (12, 2), (2, 12))}
    assert {key: (one.micro_batch, one.gradient_accumulation) for key, one in told.items()} == {
        (1, 2): (2, 12),
        (2, 0): (2, 6),
        (4, 3): (3, 2),
        (12, 2): (2, 1),
        (2, 12): (12, 1),
    }
    assert all(one.samples_per_step(ranks) == 24 for (ranks, _), one in told.items())
    with pytest.raises(Stop, match=r"recipe global_batch: 24 .* micro-batches of 2 on 5 ranks; expected a multiple of 10"):
        fixed.divided(5)
    auto = Recipe.model_validate(json.loads(GOLDEN.read_text()) | {"micro_batch": "auto", "global_batch": 24})
    assert auto.micro_batch == AUTO and auto.divided(4) == auto
    with pytest.raises(Stop, match=r"24 sequences a step cannot be divided into micro-batches of any size on 7 ranks"):
        auto.divided(7)


def test_offloaded_optimizers_are_torchs_unless_the_file_says_otherwise(recipe: Recipe, tmp_path: Path) -> None:
    for name in ("zero2_offload", "zero3_offload"):
        assert deepspeed_config(recipe, ZERO2.with_name(f"{name}.json"), 2, "bf16")["zero_force_ds_cpu_optimizer"] is False
    own = json.loads(ZERO2.with_name("zero2_offload.json").read_text()) | {"zero_force_ds_cpu_optimizer": True}
    (tmp_path / "own.json").write_text(json.dumps(own))
    assert deepspeed_config(recipe, tmp_path / "own.json", 2, "bf16")["zero_force_ds_cpu_optimizer"] is True


def test_deepspeed_config_is_the_file_plus_what_the_recipe_decides(recipe: Recipe) -> None:
    config = deepspeed_config(recipe, ZERO2, world_size=8, precision="bf16")
    written = json.loads(ZERO2.read_text())
    assert {key: config[key] for key in written} == written
    assert {key: config[key] for key in config if key not in written} == {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "train_batch_size": 32,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
    }
    assert config["zero_optimization"]["stage"] == 2
    assert config["zero_optimization"]["reduce_bucket_size"] == config["zero_optimization"]["allgather_bucket_size"] == 50_000_000


def test_deepspeed_file_may_leave_it_to_the_recipe_but_not_contradict_it(recipe: Recipe, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"gradient_clipping": "auto", "fp16": {"enabled": "auto", "initial_scale_power": 8}}))
    config = deepspeed_config(recipe, file, 2, "fp16")
    assert config["gradient_clipping"] == 1.0
    assert config["fp16"] == {"enabled": True, "initial_scale_power": 8}
    for wrong in ({"gradient_clipping": 5.0}, {"train_batch_size": 7}, {"bf16": {"enabled": True}}, {"fp16": True}):
        file.write_text(json.dumps(wrong))
        with pytest.raises(Stop, match=rf"mine.json: {next(iter(wrong))} is .* as the recipe says"):
            deepspeed_config(recipe, file, 2, "fp32")
    with pytest.raises(Stop, match=r"none.json"):
        deepspeed_config(recipe, tmp_path / "none.json", 2, "fp32")
    file.write_text("[]")
    with pytest.raises(Stop, match=r"mine.json: a JSON list; expected an object"):
        deepspeed_config(recipe, file, 2, "fp32")


def test_the_docs_have_every_key() -> None:
    text = (ROOT / "docs" / "training.md").read_text()
    schema = json_schema()
    parts = {"lora": "Lora", "data": "Data", "kernels": "Kernels", "optimizer": "Optimizer", "schedule": "Schedule"}
    parts |= {"model": "Model", "checkpoint": "Checkpoint", "eval": "Evaluation"}
    keys = set(schema["properties"]) - set(parts)
    keys |= {f"{name}.{key}" for name, part in parts.items() for key in schema["$defs"][part]["properties"]}
    assert sorted(key for key in keys if f"`{key}`" not in text) == []
