"""From recipe and DeepSpeed configuration to what is trained."""

from __future__ import annotations

from typing import Any

import pytest

from launch.recipe import ds_config_names, load_ds_config, load_recipe, recipe_names, require_trainable, untrainable
from launch.training import METHODS, Training, training_of
from r4090c.errors import UsageError


def training(name: str, *sets: str, on_gpu: bool = True) -> Training:
    recipe = load_recipe(name, sets)
    return training_of(recipe, load_ds_config(recipe), on_gpu=on_gpu)


@pytest.mark.parametrize("config", ds_config_names())
@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_can_be_planned_under_every_configuration(name: str, config: str) -> None:
    found = training(name, f"ds_config={config}")
    assert found.stage == int(config[4])
    assert found.offload_optimizer == ("offload" in config)
    assert found.offload_parameters == (config == "zero3_offload.json")


def test_adapters_counted_by_hand() -> None:
    """Rank 16 on all matrices of a 7B: q, k, v, o of 4096 × 4096, gate, up and down between 4096 and 11008."""
    found = training("llama7b")
    assert found.trainable_parameters == 32 * 16 * (4 * (4096 + 4096) + 3 * (4096 + 11008)) == 39_976_960
    assert found.frozen_parameters == 6_738_415_616
    assert training("llama7b", "method=full").trainable_parameters == 6_738_415_616
    assert training("llama7b", "method=full").frozen_parameters == 0
    assert training("tiny", "method=lora").trainable_parameters == 4 * 8 * 2 * (320 + 320)


def test_what_a_micro_batch_holds() -> None:
    assert (training("llama13b").unit, training("llama13b").units_per_micro_batch) == ("tokens", 4 * 2048)
    assert (training("resnet50").unit, training("resnet50").units_per_micro_batch) == ("images", 128)


def test_precision_auto_depends_on_where_it_runs() -> None:
    assert (training("tiny").precision, training("tiny").parameter_bytes) == ("bf16", 2)
    assert (training("tiny", on_gpu=False).precision, training("tiny", on_gpu=False).parameter_bytes) == ("fp32", 4)


@pytest.mark.parametrize(
    ("sets", "culprit"),
    [
        (["method=dora"], "method"),
        (["method=lora", "lora.targets=[]"], "lora.targets"),
        (["method=lora", "lora.targets=[q_prj]"], "lora.targets"),
        (["method=lora", "lora.rank=0"], "lora.rank"),
        (["precision=fp8"], "precision"),
        (["optimizer.name=muon"], "optimizer.name"),
        (["data.sequence_length=0"], "data.sequence_length"),
        ([f"micro_batch={10**6 + 1}"], "micro_batch"),
        (["method=lora", f"lora.rank={10**400}"], "lora.rank"),
        (["model.family=mamba"], "model.family"),
    ],
)
def test_mistakes_in_the_recipe(sets: list[str], culprit: str) -> None:
    with pytest.raises(UsageError) as caught:
        training("tiny", *sets)
    assert caught.value.culprit == culprit


def test_adapters_are_for_language_models() -> None:
    with pytest.raises(UsageError, match="adapters are for language models"):
        training("resnet50", "method=lora")


@pytest.mark.parametrize(
    ("zero", "culprit"),
    [
        (3, "ds_config: zero_optimization"),
        ({"stage": 4}, "ds_config: zero_optimization.stage"),
        ({"stage": True}, "ds_config: zero_optimization.stage"),
        ({"stage": 2.0}, "ds_config: zero_optimization.stage"),
        ({"stage": 2, "offload_optimizer": "cpu"}, "ds_config: zero_optimization.offload_optimizer"),
        ({"stage": 2, "overlap_comm": "auto"}, "ds_config: zero_optimization.overlap_comm"),
        ({"stage": 2, "cpu_offload": True}, "ds_config: zero_optimization.cpu_offload"),
        ({"stage": 3, "zero_hpz_partition_size": 8}, "ds_config: zero_optimization.zero_hpz_partition_size"),
        ({"stage": 2, "reduce_bucket_size": 10**400}, "ds_config: zero_optimization.reduce_bucket_size"),
        ({"stage": 2, "offload_optimizer": {"device": "nvme"}}, "ds_config: zero_optimization.offload_optimizer.device"),
        ({"stage": 2, "reduce_bucket_size": "big"}, "ds_config: zero_optimization.reduce_bucket_size"),
    ],
)
def test_mistakes_in_the_configuration(zero: Any, culprit: str) -> None:
    with pytest.raises(UsageError) as caught:
        training_of(load_recipe("tiny"), {"zero_optimization": zero})
    assert caught.value.culprit == culprit


def test_what_a_configuration_leaves_open_is_deepspeeds_default() -> None:
    found = training_of(load_recipe("tiny"), {})
    assert (found.stage, found.reduce_bucket_elements, found.overlap_comm) == (0, 500_000_000, False)
    told = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 5e7, "allgather_bucket_size": "auto"}}
    found = training_of(load_recipe("tiny"), told)
    assert (found.reduce_bucket_elements, found.allgather_bucket_elements, found.overlap_comm) == (50_000_000, 500_000_000, True)


def test_offload_counts_where_deepspeed_takes_heed_of_it() -> None:
    """offload_optimizer from stage 1 on, offload_param under stage 3 (DeepSpeed's configuration reference)."""
    cpu = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    found = [training_of(load_recipe("tiny"), {"zero_optimization": {"stage": stage, **cpu}}) for stage in range(4)]
    assert [one.offload_optimizer for one in found] == [False, True, True, True]
    assert [one.offload_parameters for one in found] == [False, False, False, True]


def test_what_cannot_be_trained_yet_is_said_with_what_can_be_done() -> None:
    for method in METHODS:
        for config in (*ds_config_names(), "/etc/ds/own.json"):
            assert untrainable(load_recipe("tiny", [f"method={method}", f"ds_config={config}", "loss_chunk_tokens=64"])) == ()
    assert [name for name in recipe_names() if untrainable(load_recipe(name))] == []
    with pytest.raises(UsageError) as told:
        require_trainable(load_recipe("resnet50", ["data.kind=sounds", "optimizer.name=adam"]))
    assert (told.value.culprit, told.value.next_command) == ("recipe resnet50", "r4090c recipes")
    for part in ("data.kind sounds (only text or prepared or images)", "optimizer.name adam (only adamw or adamw8bit)"):
        assert part in told.value.observed
