"""The forecast as a gate of launch, and what of earlier measurements goes into it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.alternatives import merged_sets
from launch.forecast import fewer_nodes, forecast_json, refusal, scaling, useful
from launch.measured import Known, measured_of, remembered
from launch.planning import foresee, other_ways
from launch.recipe import ds_config_names, load_recipe, recipe_names
from launch.run import Wish, paper_plan, prepare, refuse
from launch.site import Measured, Site, assume
from launch.training import METHODS, OPTIMIZERS, PRECISIONS
from netcheck import figures as figures_module
from netcheck.measure.figure import Figure
from r4090c.errors import CheckFailed, Exit, UsageError
from r4090c.model import Cluster, Fact, MemoryFact, NodeFacts, P2pProof
from tests.launch.test_plan import gpu_nodes

ROCE = assume("2x8x4090@100gbe-roce")
SLOW = assume("2x8x4090@10gbe")


def wish_of(target: str, *sets: str, **more: Any) -> Wish:
    cluster, _ = gpu_nodes()
    return Wish(target, sets, cluster.nodes, False, **more)


def refused(target: str, *sets: str, site: Site = ROCE, **more: Any) -> CheckFailed | None:
    recipe = load_recipe(target, sets)
    return refuse(wish_of(target, *sets, **more), recipe, foresee(recipe, site))


# --------------------------------------------------------------------------- the gate


def test_what_fits_is_let_through() -> None:
    assert refused("llama13b") is None
    assert refused("llama7b", site=SLOW) is None  # adapters are small: 10 GbE is enough for them


def test_what_does_not_fit_is_refused_with_the_arithmetic_and_a_way_out() -> None:
    error = refused("llama13b", "method=lora", "steps=5")
    assert error is not None and error.exit_code == Exit.FAILED
    assert "13.02e9 parameters × 2 bytes = 26.0 GB" in str(error)
    assert error.next_command.startswith("r4090c launch llama13b --set steps=5 --set method=qlora")
    assert "r4090c plan llama13b --set method=lora --set steps=5 shows all" in error.next_command
    assert "--anyway" in error.next_command


def test_what_is_pointless_is_sent_to_fewer_nodes() -> None:
    """57.5 s of traffic a step; one node alone does more than twice as much (docs/planning.md)."""
    error = refused("llama7b-full", site=SLOW)
    assert error is not None and "pointless over 10 Gbit/s: 57.5 s of traffic per step" in str(error)
    assert error.next_command.startswith("r4090c launch llama7b-full --nodes node01 ")


def test_what_is_offered_has_the_ranks_and_variables_that_were_asked_for() -> None:
    """With three visible GPUs on a node something else fits than with eight. A token is nobody's business."""
    env = {"CUDA_VISIBLE_DEVICES": "2,0,1", "HF_TOKEN": "hf_secret", "NOTE": "it's $(mine)"}
    error = refused("llama13b", "method=lora", env=env, nproc=3, affinity=False)
    assert error is not None and "hf_secret" not in str(error)
    asked = "--nproc-per-node 3 --env CUDA_VISIBLE_DEVICES=2,0,1 --env 'NOTE=it'\"'\"'s $(mine)'"
    assert error.next_command.startswith(f"r4090c launch llama13b {asked} --no-affinity --set ")
    assert f"r4090c plan llama13b {asked} --set method=lora shows all" in error.next_command


def test_a_resumed_run_is_not_sent_elsewhere() -> None:
    """Its checkpoint loads into nothing else: neither other methods nor other nodes are offered."""
    for error in (refused("llama13b", "method=full", resume=""), refused("llama7b-full", site=SLOW, resume="")):
        assert error is not None and "r4090c launch" not in error.next_command
        assert error.next_command.startswith("r4090c plan llama") and "--anyway" in error.next_command


def test_anyway_and_scripts_pass() -> None:
    assert refused("llama13b", "method=full", anyway=True) is None
    assert refuse(wish_of("mine.py"), None, None) is None


def test_nothing_fits() -> None:
    error = refused("llama13b", "method=full", site=assume("1x1x4090,ram=1"))
    assert error is not None and error.next_command.startswith("r4090c plan llama13b --set method=full ")


def test_fewer_nodes_only_of_what_is_pointless() -> None:
    assert fewer_nodes(foresee(load_recipe("llama13b"), ROCE)) is None
    point = fewer_nodes(foresee(load_recipe("llama7b-full"), assume("4x8x4090@10gbe")))
    assert point is not None and (point.nodes, point.fits) == (1, True)


def test_scaling_goes_by_doubling_to_all_nodes() -> None:
    one = foresee(load_recipe("llama13b"), ROCE)
    for number, counts in ((1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])):
        assert [point.nodes for point in scaling(one.training, ROCE.with_nodes(number))] == counts
    first, second = scaling(one.training, ROCE)
    assert first.units_per_s is not None and second.units_per_s is not None
    assert second.scaling_efficiency == pytest.approx(second.units_per_s / (2 * first.units_per_s))


def test_a_refusal_is_none_of_what_is_worth_it() -> None:
    assert refusal(foresee(load_recipe("llama13b"), ROCE), "") is None


def test_the_json_has_every_part_and_no_model() -> None:
    told = forecast_json(foresee(load_recipe("llama13b"), ROCE))
    assert told["training"]["parameters"] == 13_015_864_320  # of Llama 2 13B, as its checkpoint has them
    assert "shape" not in told["training"]
    assert set(told["arithmetic"]) <= set(told["per_gpu_gib"])


# --------------------------------------------------------------------------- the site of facts


def facts_with_memory() -> tuple[Cluster, dict[str, NodeFacts]]:
    cluster, facts = gpu_nodes()
    memory = Fact(MemoryFact(515_000, 500_000, 0, None, None))
    return cluster, {name: replace(own, memory=memory) for name, own in facts.items()}


def site_for(
    cluster: Cluster, facts: dict[str, NodeFacts], known: Known | None = None, env: dict[str, str] | None = None
) -> Site:
    wish = Wish("llama13b", (), cluster.nodes, env=env or {})
    _, site = paper_plan(cluster, prepare(None, cluster, wish), facts, known or Known())
    return site


def test_a_site_counts_what_the_plan_uses() -> None:
    cluster, facts = facts_with_memory()
    site = site_for(cluster, facts, Known(measured=Measured(9.5, 14.1, "2026-11-30")))
    assert (site.ranks_per_node, site.between and site.between.kind, site.between and site.between.busbw_gbyte_s) == (
        8,
        "roce",
        9.5,
    )


def test_rdma_that_cannot_be_used_is_not_counted_on() -> None:
    """One node without an active port: all go over sockets, and what was measured over RDMA says nothing."""
    cluster, facts = facts_with_memory()
    facts["node02"] = replace(facts["node02"], rdma=Fact(()))
    site = site_for(cluster, facts, Known(measured=Measured(9.5, 14.1, "2026-11-30")))
    assert site.between is not None and site.between.kind == "tcp"
    assert site.between.busbw_gbyte_s != 9.5
    assert "node02: no active RDMA port on the data network" in site.between.origin  # which `plan` shows


def test_p2p_is_counted_on_where_it_is_proven_and_nobody_turns_it_off() -> None:
    cluster, facts = facts_with_memory()
    proof = P2pProof("f" * 32, True, "2026-11-29", "20.4 GB/s with P2P, 9.35 without")
    known = Known(p2p={node.name: proof for node in cluster.nodes})
    kinds = [site_for(cluster, facts, known, env).inside for env in ({}, {"NCCL_P2P_DISABLE": "1"})]
    assert [link.kind if link is not None else "" for link in kinds] == ["p2p", "host"]


# --------------------------------------------------------------------------- what was measured


def figure(measurement: str, subject: str, value: float) -> Figure:
    return Figure(measurement, subject, "all_reduce of 256 MiB", value, "GB/s")


NODES = ("node01", "node02", "node03")
INSIDE = [figure("nccl-node", name, value) for name, value in zip(NODES, (14.2, 13.9, 14.4), strict=True)]
PAIRS = [figure("nccl-pairs", "node01->node02", 10.1), figure("nccl-pairs", "node01->node03", 6.2)]
WHOLE = figure("nccl-all", "node01", 8.8)


def test_the_slowest_of_each_kind_counts() -> None:
    assert measured_of([*INSIDE, *PAIRS], NODES, "d") == Measured(6.2, 13.9, "d")
    assert measured_of([*INSIDE, *PAIRS, WHOLE], NODES, "d") == Measured(8.8, 13.9, "d")
    assert measured_of([figure("tcp", "node01->node02", 1.1)], NODES, "d") == Measured(None, None, "d")


def test_links_of_other_nodes_do_not_count() -> None:
    assert measured_of([*INSIDE, *PAIRS], NODES[:2], "d") == Measured(10.1, 13.9, "d")
    assert measured_of(INSIDE[:2], NODES, "d").inside_gbyte_s is None  # node03 may be slower


def test_the_newest_record_that_measured_counts() -> None:
    records: list[dict[str, Any]] = [
        {"started_at": "2026-11-30T08:00:00", "figures": figures_module.to_json([figure("tcp", "node01->node02", 9.4)])},
        {"started_at": "2026-11-29T08:00:00", "figures": "damaged"},
        {"started_at": "2026-11-28T08:00:00", "figures": figures_module.to_json([WHOLE, *INSIDE])},
        {"started_at": "2026-11-27T08:00:00", "figures": figures_module.to_json(PAIRS)},
    ]
    assert remembered(records, NODES) == Measured(8.8, 13.9, "2026-11-28")
    assert remembered([], NODES) == Measured()


# --------------------------------------------------------------------------- whatever somebody sets

KEYS = (
    *("micro_batch", "gradient_accumulation", "loss_chunk_tokens", "lora.rank", "data.sequence_length", "steps"),
    *(f"model.config.{key}" for key in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")),
    *("model.config.num_attention_heads", "model.config.num_key_value_heads"),
)
WORDS = {
    "method": METHODS,
    "ds_config": ds_config_names(),
    "precision": PRECISIONS,
    "optimizer.name": OPTIMIZERS,
    "activation_checkpointing": ("true", "false"),
}
SITES = (
    *("1x1x4090", "2x8x4090@100gbe-roce", "16x8x4090-48gb@0.001gbe", "3x4x3090+p2p@9999gbe-ib,ram=1"),
    *("64x1x4090d@25gbe", "1x1xcpu,ram=64", "4x2xcpu@1gbe,ram=99999"),
)


@pytest.mark.parametrize("zero", [{"stage": 2}, {"stage": 3}, {"stage": 3, "offload_optimizer": {"device": "cpu"}}])
@pytest.mark.parametrize("overlap", [True, False])
def test_what_is_said_to_help_does_so_when_it_is_set(zero: dict[str, Any], overlap: bool, tmp_path: Path) -> None:
    """Under a DeepSpeed configuration of one's own: what another one of ours has besides counts as well."""
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"zero_optimization": {**zero, "overlap_comm": overlap, "reduce_bucket_size": 500_000_000}}))
    sets = [f"ds_config={own}"]
    found = useful(foresee(load_recipe("llama1b-pretrain", sets), ROCE))
    told = any(word.startswith("ds_config=") for one in found for word in one.sets)
    assert told is not (zero["stage"] == 2 and overlap)  # ours do not overlap: nothing of theirs is faster
    for one in found:
        if one.sets:
            again = foresee(load_recipe("llama1b-pretrain", merged_sets(sets, one.sets)), ROCE)
            assert again.fit.fits and again.prediction.units_per_s == pytest.approx(one.units_per_s, rel=1e-9)


def test_a_batch_whose_divisors_are_far_apart_is_planned_at_once() -> None:
    """999983 is a prime: the smallest model that there can be takes any batch, and every way to split it is looked for."""
    shape = (
        *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size"),
        "num_hidden_layers",
    )
    sets = [
        *(f"model.config.{key}=1" for key in shape),
        "data.sequence_length=1",
        "micro_batch=1",
        "gradient_accumulation=999983",
    ]
    recipe = load_recipe("tiny", sets)
    one = foresee(recipe, ROCE)
    found = {(other.training.micro_batch, other.training.accumulation) for other in other_ways(recipe, one)}
    assert one.fit.fits and (999983, 1) in found


@settings(max_examples=40)
@given(
    st.sampled_from([name for name in recipe_names() if name != "resnet50"]),
    st.dictionaries(
        st.sampled_from(KEYS), st.one_of(st.integers(1, 4096), st.integers(-1, 10**15), st.just(10**400)), max_size=3
    ),
    st.fixed_dictionaries({}, optional={key: st.sampled_from(list(values)) for key, values in WORDS.items()}),
    st.sampled_from(SITES),
)
def test_what_may_be_set_is_planned_in_finite_numbers_or_refused(
    name: str, numbers: dict[str, int], words: dict[str, str], site: str
) -> None:
    sets = [f"{key}={value}" for key, value in {**numbers, **words}.items()]
    try:
        recipe = load_recipe(name, sets)
        one = foresee(recipe, assume(site))
    except UsageError:
        return
    json.dumps(forecast_json(one), allow_nan=False)
    for other in other_ways(recipe, one):
        its = load_recipe(name, merged_sets(sets, other.sets))
        again = foresee(its, assume(site))
        assert again.worth_it and again.prediction == other.prediction
        assert its["micro_batch"] * its["gradient_accumulation"] == recipe["micro_batch"] * recipe["gradient_accumulation"]
