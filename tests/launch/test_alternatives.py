"""What else fits: each alternative is what its words make of the recipe, and fits; the list is varied and in order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from launch.alternatives import Alternative, alternatives, largest_divisor, merged_sets, worth_showing
from launch.forecast import forecast
from launch.memory import fit
from launch.perf import pointless
from launch.planning import command_of, foresee, other_ways
from launch.recipe import ds_config_names, load_ds_config, load_recipe
from launch.site import Site, assume
from launch.training import Training, training_of

CONFIGS = {name: load_ds_config({"ds_config": name}) for name in ds_config_names()}
SITE = assume("2x8x4090@100gbe-roce")


def found_for(target: str, sets: Sequence[str] = (), site: Site = SITE) -> tuple[Training, tuple[Alternative, ...]]:
    recipe = load_recipe(target, sets)
    training = training_of(recipe, load_ds_config(recipe))
    return training, alternatives(recipe, training, site, CONFIGS)


@pytest.mark.parametrize(
    ("target", "sets", "text"),
    [
        ("llama13b", ["method=lora"], "2x8x4090@100gbe-roce"),
        ("llama13b", ["method=full"], "2x8x4090@100gbe-roce"),
        ("llama13b", [], "4x8x4090@25gbe-roce"),
        ("llama7b-full", [], "2x8x4090@10gbe"),
        ("llama7b", ["optimizer.name=adamw8bit", "loss_chunk_tokens=0"], "1x2x4090,ram=64"),
        ("resnet50", ["micro_batch=4096"], "2x8x4090@10gbe"),
        ("tiny", [], "1x1x4090"),
    ],
)
def test_the_words_make_what_was_promised(target: str, sets: list[str], text: str) -> None:
    site = assume(text)
    now, found = found_for(target, sets, site)
    assert found
    for one in found:
        recipe = load_recipe(target, merged_sets(sets, one.sets))
        assert training_of(recipe, load_ds_config(recipe)) == one.training != now
        assert fit(one.training, site).fits and pointless(one.training, site) is None
        assert one.training.micro_batch * one.training.accumulation == now.micro_batch * now.accumulation
        assert one.training.sequence_length == now.sequence_length
        told = any("weights" in change for change in one.changes)
        assert told == (one.training.method != now.method)
    rates = [one.prediction.units_per_s or 0 for one in found]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_13b_on_two_nodes_has_three_ways_that_fit(method: str) -> None:
    """HARDWARE.md: 13B in 16 bits under ZeRO-2 never fits 24 GB; QLoRA, 8-bit LoRA and ZeRO-3 with offload do."""
    recipe = load_recipe("llama13b", [f"method={method}"])
    one = foresee(recipe, SITE)
    assert not one.fit.fits
    found = other_ways(recipe, one)
    assert len(found) >= 3
    assert {"qlora", "int8", "full"} <= {each.training.method for each in found}
    (qlora,) = [each for each in found if each.training.method == "qlora"]
    assert ("QLoRA trains adapters, not all weights; the frozen weights have 4 bits" in qlora.changes) == (method == "full")


def test_no_weights_of_16_bits_on_every_card() -> None:
    """26.0 GB are more than a card has, whatever else is saved: what is offered divides or quantizes the weights."""
    _, found = found_for("llama13b", ["method=full"])
    assert all(each.training.stage == 3 or each.training.method in ("int8", "qlora") for each in found)


def test_nothing_pointless_is_offered() -> None:
    """Over 10 GbE no full training of 7B on two nodes is worth it (9 s of gradients a micro-step); adapters are."""
    now, found = found_for("llama7b-full", site=assume("2x8x4090@10gbe"))
    assert pointless(now, assume("2x8x4090@10gbe")) is not None
    assert found and all(each.training.method != "full" for each in found)


def test_host_memory_is_respected() -> None:
    """18 bytes × 13.02e9 / 2 nodes are 109 GiB a node: 64 cannot hold the optimizer."""
    _, plenty = found_for("llama13b", ["method=full"], assume("2x8x4090@100gbe-roce,ram=512"))
    _, little = found_for("llama13b", ["method=full"], assume("2x8x4090@100gbe-roce,ram=64"))
    assert any(each.training.method == "full" for each in plenty)
    assert any(each.training.method == "full" and each.training.offload_optimizer for each in plenty)
    assert not any(each.training.method == "full" and each.training.offload_optimizer for each in little)


def test_of_what_is_about_as_fast_the_plainest_is_told() -> None:
    """llama13b with 16-bit LoRA: back to QLoRA is one word (and the batch); 8-bit optimizer states of adapters change nothing."""
    _, found = found_for("llama13b", ["method=lora"])
    (qlora,) = [each for each in found if each.training.method == "qlora"]
    assert qlora.training.optimizer == "adamw"
    assert len([each for each in found if each.training.method == "qlora"]) == 1


def test_of_a_run_that_is_worth_it_only_the_faster_is_shown() -> None:
    recipe = load_recipe("llama7b")
    one = foresee(recipe, SITE)
    assert one.worth_it and one.prediction.units_per_s is not None
    for each in other_ways(recipe, one):
        assert each.prediction.units_per_s is not None and each.prediction.units_per_s > 1.05 * one.prediction.units_per_s
    best = alternatives(recipe, one.training, SITE, CONFIGS)[0]
    assert worth_showing([best], best.prediction) == ()


def test_ranks_on_cpus_have_no_alternatives() -> None:
    recipe = load_recipe("tiny")
    assert other_ways(recipe, forecast(training_of(recipe, load_ds_config(recipe), on_gpu=False), assume("2x1xcpu@10gbe"))) == ()


def test_the_list_is_cut_but_keeps_every_method() -> None:
    _, found = found_for("llama13b", ["method=lora"], assume("4x8x4090@100gbe-roce"))
    shown = worth_showing(found, limit=4)
    assert len(shown) == 4 and {each.training.method for each in shown} == {each.training.method for each in found}
    assert [each for each in found if each in shown] == [*shown]


def test_divisors() -> None:
    assert [largest_divisor(12, limit) for limit in (1, 2, 3, 4, 5, 6, 7, 11, 12, 99)] == [1, 2, 3, 4, 4, 6, 6, 6, 12, 12]
    assert largest_divisor(13, 12) == 1


def test_commands_can_be_pasted() -> None:
    sets = ("method=lora", "optimizer.betas=[0.9, 0.99]", "steps=5")
    assert merged_sets(sets, ("method=qlora",)) == ("optimizer.betas=[0.9, 0.99]", "steps=5", "method=qlora")
    told = command_of("plan", "llama13b", sets, ("method=qlora",), ("--nodes", "2"))
    assert told == "r4090c plan llama13b --nodes 2 --set 'optimizer.betas=[0.9, 0.99]' --set steps=5 --set method=qlora"
