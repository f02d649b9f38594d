"""A night for real, and the statistics of scaling on numbers whose answer is known."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from launch.nightly.statistics import Sample, scaling, slow_nodes, verdict
from launch.nightly.sweep import schedule
from r4090c.inventory import load_cluster_text
from tests import cli
from tests.lab.lab import Lab

CLUSTER = """
name: c
nodes: [{name: "n[1-4]", address: "192.0.2.[1-4]", gpus: 0}]
paths: {shared: /mnt/shared, python: /opt/python}
"""


def samples(together: list[float], first: list[float], second: list[float]) -> list[Sample]:
    rows = [(("a", "b"), together), (("a",), first), (("b",), second)]
    return [Sample(nodes, repeat, len(nodes), rate) for nodes, rates in rows for repeat, rate in enumerate(rates, 1)]


def test_efficiency_divides_by_what_each_node_does_alone() -> None:
    one, other, two = scaling(samples([160.0, 170.0, 150.0], [100.0, 100.0, 100.0], [60.0, 100.0, 110.0]))
    assert (one.n, other.n, two.n) == (1, 1, 2)
    assert two.efficiency == pytest.approx(160 / (100 + 100))
    assert two.low is not None and two.high is not None
    assert 150 / 210 <= two.low <= two.efficiency <= two.high <= 170 / 160


def test_one_sample_has_no_interval_and_a_missing_single_no_row() -> None:
    (*_, two) = scaling(samples([160.0], [100.0], [100.0]))
    assert two.efficiency == pytest.approx(0.8) and two.low is None and two.high is None
    assert [row.nodes for row in scaling(samples([160.0], [100.0], []))] == [("a",)]


def test_the_floor_decides_and_a_missing_size_is_not_a_pass() -> None:
    table = scaling(samples([160.0], [100.0], [100.0]))
    assert verdict(table, [1, 2], 0.85) == "below the floor"
    assert verdict(table, [1, 2], 0.80) == "measured"
    assert verdict(table, [1, 2, 4], 0.80) == "could not tell"
    assert verdict((), [1, 2], None) == "could not tell"
    assert verdict(table, [1, 2], 0.80, failed=1) == "could not tell"
    assert verdict(table, [1, 2], 0.85, failed=1) == "below the floor"


def test_a_slow_node_is_named() -> None:
    rows = [Sample((node,), 1, 1, rate) for node, rate in (("a", 100.0), ("b", 101.0), ("c", 70.0))]
    ((node, share),) = slow_nodes(rows)
    assert node == "c" and share == pytest.approx(0.7)
    assert slow_nodes(rows[:2]) == ()


def test_every_repeat_measures_each_node_alone_and_every_size_once() -> None:
    cluster = load_cluster_text(CLUSTER, "cluster.yaml")
    turns = schedule(cluster.nodes, [1, 2, 4], 3)
    for repeat in (1, 2, 3):
        sets = sorted(tuple(node.name for node in turn.nodes) for turn in turns if turn.repeat == repeat)
        assert sets == [("n1",), ("n1", "n2"), ("n1", "n2", "n3", "n4"), ("n2",), ("n3",), ("n4",)]
    orders = {tuple(tuple(node.name for node in turn.nodes) for turn in turns if turn.repeat == repeat) for repeat in (1, 2, 3)}
    assert len(orders) > 1, "the order is shuffled from repeat to repeat"


@pytest.mark.lab
@pytest.mark.train
@pytest.mark.slow
def test_a_night_measures_stores_and_prints(lab4: Lab, tmp_path: Path) -> None:
    words = ("nightly", "run", "--nodes", "1,2", "--repeats", "1", "--set", "steps=6", "--floor", "0.05", "--json")
    code, output, errors = cli.run(*words, "--cluster", str(lab4.cluster_file), state=tmp_path, timeout_s=800)
    assert code == 0, errors
    night = json.loads(output)
    assert [row["nodes"] for row in night["scaling"]] == [["node01"], ["node02"], ["node01", "node02"]]
    assert "torch=" in night["fingerprint"] and "kernel=" in night["fingerprint"]
    assert night["verdict"] == "measured" and night["scaling"][2]["efficiency"] > 0.05
    with sqlite3.connect(tmp_path / "r4090c.db") as database:
        stored = database.execute("SELECT nodes, tokens_per_s FROM sample WHERE night=?", (night["id"],)).fetchall()
    assert sorted((json.loads(nodes), rate) for nodes, rate in stored) == sorted(
        (sample["nodes"], sample["tokens_per_s"]) for sample in night["samples"]
    )
    jobs = cli.run_json("jobs", "--cluster", str(lab4.cluster_file), state=tmp_path)
    assert sum(job["recipe"] == "nightly-tiny" for job in jobs) == 3, "a later `launch tiny --resume` must not take them"
    code, listed, _ = cli.run("nightly", "history", "--cluster", str(lab4.cluster_file), state=tmp_path)
    assert code == 0 and night["id"] in listed and "E(2)" in listed
