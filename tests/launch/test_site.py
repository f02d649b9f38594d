"""Where a run would run: assumed in a few words, or the weakest of what the facts say."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.site import Measured, Site, assume, site_of
from r4090c.errors import UsageError
from r4090c.model import Cluster, Fact, Gpu, MemoryFact, NodeFacts, P2pProof
from tests.launch.facts_of import cluster_of, cpus_of, facts_of, gpu_of, net_of, node_of


def test_the_example() -> None:
    site = assume("4x8x4090@100gbe-roce")
    assert (site.nodes, site.ranks_per_node, site.world, site.host_gib) == (4, 8, 32, None)
    assert site.card is not None and (site.card.bf16_tflops, round(site.card.memory_gib, 2)) == (165.2, 23.53)
    assert site.between is not None and (site.between.kind, site.between.rate_gbit_s) == ("roce", 100.0)
    assert site.between.busbw_gbyte_s == pytest.approx(11.0)
    assert site.inside is not None and (site.inside.kind, site.inside.busbw_gbyte_s) == ("host", 14.7)


@pytest.mark.parametrize(
    ("text", "kind", "rate", "busbw"),
    [
        ("2x8x4090@10gbe", "tcp", 10.0, 1.1),
        ("2x8x4090@10gbe-tcp", "tcp", 10.0, 1.1),
        ("2x8x4090@25GbE-RoCE", "roce", 25.0, 2.75),
        ("2x8x4090@200gb-ib", "infiniband", 200.0, 22.0),
        ("2x8x4090@100g", "tcp", 100.0, 5.0),  # sockets are bound by cores
        ("2x1xcpu@2.5gbe", "tcp", 2.5, 0.275),
    ],
)
def test_networks(text: str, kind: str, rate: float, busbw: float) -> None:
    link = assume(text).between
    assert link is not None and (link.kind, link.rate_gbit_s) == (kind, rate)
    assert link.busbw_gbyte_s == pytest.approx(busbw)


def test_one_node_needs_no_network_and_one_gpu_no_link() -> None:
    assert assume("1x8x4090").between is None
    assert assume("2x1x4090@25gbe").inside is None
    assert assume("1x8x4090+p2p,ram=512gib").host_gib == 512
    inside = assume("1x8x4090+p2p").inside
    assert inside is not None and (inside.kind, inside.busbw_gbyte_s) == ("p2p", 20.6)


@pytest.mark.parametrize(
    ("text", "observed"),
    [
        ("", "not understood"),
        ("8x4090", "not understood"),
        ("2x8x4090@fast", "not understood"),
        ("2x8x4090", "2 nodes and no network"),
        ("0x8x4090", "0 × 8 = 0 GPUs"),
        ("999x99x4090@10gbe", "999 × 99 = 98901 GPUs"),
        ("1025x1x4090@10gbe", "1025 × 1 = 1025 GPUs"),
        ("1x1000000x4090", "1 × 1000000 = 1000000 GPUs"),
        ("\u0662x8x4090@10gbe", "not understood"),
        ("2x8x6090@10gbe", "no card '6090' is known"),
        ("2x8x4090@0gbe", "a network of 0 Gbit/s"),
    ],
)
def test_what_is_not_understood(text: str, observed: str) -> None:
    with pytest.raises(UsageError) as caught:
        assume(text)
    assert caught.value.observed == observed


@given(st.text(max_size=40))
def test_any_text_is_a_site_or_a_usage_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert assume(text).world >= 1


def test_more_nodes_for_a_what_if() -> None:
    site = assume("2x8x4090@25gbe")
    assert site.with_nodes(1).node_names == ("node01",)
    assert site.with_nodes(4).node_names == ("node01", "node02", "node03", "node04")


def two_nodes(**of_second: object) -> tuple[Cluster, dict[str, NodeFacts]]:
    nodes = [node_of("node01", "10.10.0.11", 2), node_of("node02", "10.10.0.12", 2)]
    facts = {}
    for node, peer, memory in zip(nodes, reversed(nodes), (256_000, 128_000), strict=True):
        facts[node.name] = replace(
            facts_of(
                node.name,
                net=net_of({"eth0": node.data_address}, {peer.data_address: "eth0"}),
                cpus=cpus_of({}, [[core, core + 16] for core in range(16)]),
                gpus=Fact((gpu_of(0, "0000:01:00.0", 0), gpu_of(1, "0000:41:00.0", 0))),
            ),
            memory=Fact(MemoryFact(memory, memory - 1024, 0, None, None)),
        )
    return cluster_of(nodes), facts


def seen(cluster: Cluster, facts: dict[str, NodeFacts], measured: Measured | None = None, **more: P2pProof) -> Site:
    return site_of(cluster, cluster.nodes, facts, 2, measured, more)


def test_facts_make_a_site_of_the_weakest_node() -> None:
    site = seen(*two_nodes())
    assert (site.nodes, site.world, site.cores) == (2, 4, 16)
    assert site.host_gib == pytest.approx((128_000 - 1024) / 1024)
    assert site.card is not None and (site.card.name, site.card.bf16_tflops) == ("RTX 4090", 165.2)
    assert site.card.memory_gib == pytest.approx(24_092 / 1024)
    assert site.between is not None and site.between.rate_gbit_s == 10.0  # of the interfaces
    assert site.inside is not None and site.inside.kind == "host"


def test_an_idle_link_counts_by_its_generation_under_load_and_a_narrow_one_by_its_width() -> None:
    cluster, facts = two_nodes()
    idle = tuple(replace(gpu, pcie_gen=1) for gpu in facts["node02"].gpus.value or ())
    facts["node02"] = replace(facts["node02"], gpus=Fact(idle))
    card = seen(cluster, facts).card
    assert card is not None and card.host_gbyte_s == 25.0
    facts["node02"] = replace(facts["node02"], gpus=Fact((idle[0], replace(idle[1], pcie_width=8))))
    site = seen(cluster, facts)
    assert site.card is not None and site.card.host_gbyte_s == 12.5
    assert site.inside is not None and site.inside.busbw_gbyte_s == pytest.approx(7.35)


def test_the_card_is_the_weakest_and_an_unknown_one_has_no_peaks() -> None:
    cluster, facts = two_nodes()
    gpus = facts["node02"].gpus.value or ()
    older = replace(gpus[0], name="NVIDIA GeForce RTX 3090", memory_total_mib=24_576)
    facts["node02"] = replace(facts["node02"], gpus=Fact((older, gpus[1])))
    card = seen(cluster, facts).card
    assert card is not None and (card.name, card.bf16_tflops) == ("RTX 3090", 71.0)
    facts["node02"] = replace(
        facts["node02"], gpus=Fact((replace(older, name="NVIDIA Quantum 9", memory_total_mib=8192), gpus[1]))
    )
    card = seen(cluster, facts).card
    assert card is not None and (card.name, card.bf16_tflops) == ("NVIDIA Quantum 9", None)
    assert card.memory_gib == pytest.approx((8192 - 472) / 1024)


def test_measured_bandwidths_go_before_assumed_ones() -> None:
    site = seen(*two_nodes(), Measured(0.9, 12.5, "2026-11-30"))
    assert site.between is not None and (site.between.busbw_gbyte_s, site.between.origin) == (
        0.9,
        "measured by preflight 2026-11-30",
    )
    assert site.inside is not None and site.inside.busbw_gbyte_s == 12.5


def test_nodes_without_gpus_have_no_card_and_unknown_facts_stay_unknown() -> None:
    nodes = [node_of("node01", "10.10.0.11"), node_of("node02", "10.10.0.12")]
    site = site_of(cluster_of(nodes), nodes, {node.name: facts_of(node.name) for node in nodes}, 1)
    assert (site.card, site.inside, site.host_gib, site.cores) == (None, None, None, None)
    assert site.between is not None and site.between.busbw_gbyte_s is None


def test_where_one_node_has_no_gpu_all_wait_for_its_cpus() -> None:
    nodes = [node_of("node01", "10.10.0.11", 1), node_of("node02", "10.10.0.12")]
    gpus: Fact[tuple[Gpu, ...]] = Fact((gpu_of(0, "0000:01:00.0", 0),))
    told = {"node01": facts_of("node01", gpus=gpus), "node02": facts_of("node02")}
    assert site_of(cluster_of(nodes), nodes, told, 1).card is None
    alone = site_of(cluster_of(nodes), nodes[:1], told, 1).card
    assert alone is not None and alone.name == "RTX 4090"
