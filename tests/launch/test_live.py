"""Samples to rates, GPUs and runs: what is not known is None, never 0."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from launch.live import (
    DataLinks,
    Heard,
    RunView,
    Snapshot,
    cpu_share,
    data_links,
    is_behind,
    parse_sample,
    silent,
    snapshot,
    taken,
    throttle_of,
)
from r4090c.cli.exporter import metrics_of
from r4090c.cli.top_view import frame
from r4090c.errors import ParseError
from r4090c.model import Fact
from tests.launch.facts_of import cluster_of, net_of, node_of, rdma_port
from tests.launch.live_samples import (
    AT_S,
    NOW_S,
    RUN,
    apps,
    cluster_of_three,
    gpu_row,
    heard,
    metrics,
    netdev,
    raw,
    smi,
    state,
)


def view(*nodes: Heard, later_s: float = 0.0) -> Snapshot:
    return snapshot("lab", nodes, 2.0, now_s=AT_S + later_s, time_s=NOW_S + later_s)


def run_of(*nodes: Heard, later_s: float = 0.0) -> RunView:
    (run,) = view(*nodes, later_s=later_s).runs
    return run


# ------------------------------------------------------------------------------------------ rates


def test_rates_come_from_two_samples_and_the_nodes_own_clock() -> None:
    (node,) = view(heard("node01")).nodes
    assert node.cpu == pytest.approx(0.25) and node.cores == 16 and node.load1 == 4.25
    assert node.memory_total_bytes == 128 << 30 and node.memory_available_bytes == 32 << 30
    links = {link.name: link for link in node.links}
    assert [link.name for link in node.links][:2] == ["eth0", "mlx5_0:1"], "the data network first"
    assert links["eth0"].rx_bytes_per_s == pytest.approx(125e6) and links["eth0"].tx_bytes_per_s == pytest.approx(250e6)
    assert links["eth0"].rate_bytes_per_s == 1.25e9 and links["lo"].rate_bytes_per_s is None
    assert links["mlx5_0:1"].rx_bytes_per_s == pytest.approx(1e9), "the counter counts words of four bytes"
    assert links["mlx5_0:1"].errors == {"symbol_error": 2} and links["mlx5_0:1"].new_errors == 0


def test_one_sample_gives_no_rates() -> None:
    (node,) = view(replace(heard("node01"), before=None)).nodes
    assert node.cpu is None
    assert all(link.rx_bytes_per_s is None and link.new_errors is None for link in node.links)
    assert all(link.rx_bytes is not None for link in node.links)


def test_a_counter_that_was_set_anew_says_nothing_and_grown_errors_are_told() -> None:
    before = parse_sample(json.dumps(raw("node01", 0.0, netdev=netdev(10**12, 5, errors=1))))
    last = parse_sample(json.dumps(raw("node01", 2.0, netdev=netdev(1000, 2_000_005, errors=4))))
    (node,) = view(Heard("node01", before, last, AT_S, DataLinks("eth0"), NOW_S, None)).nodes
    assert node.links[0].rx_bytes_per_s is None and node.links[0].tx_bytes_per_s == pytest.approx(1e6)
    assert node.links[0].new_errors == 3


def test_after_a_gap_or_a_reboot_there_is_nothing_to_compare_with() -> None:
    one = heard("node01")
    assert one.last is not None
    later = parse_sample(json.dumps(raw("node01", 4.0)))
    assert taken(one, later, AT_S + 2, NOW_S + 2).before == one.last
    rebooted = parse_sample(json.dumps({**raw("node01", 4.0), "monotonic": 3.0}))
    assert taken(one, rebooted, AT_S + 2, NOW_S + 2).before is None
    lost = silent(one, "refused", "ssh node01", NOW_S + 5)
    assert (lost.last, lost.since_s, lost.tries) == (None, NOW_S + 5, 1)
    assert silent(lost, "no route", "ssh node01", NOW_S + 9).since_s == NOW_S + 5
    back = taken(lost, later, AT_S + 20, NOW_S + 20)
    assert (back.why, back.before, back.since_s) == (None, None, NOW_S + 20)


@pytest.mark.parametrize(
    ("before", "after", "share"),
    [
        ("cpu  0 0 0 0 0 0 0 0 0 0", "cpu  50 10 20 10 10 0 0 0 0 0", 0.8),
        ("cpu  0 0 0 0", "cpu  1 0 0 3", 0.25),
        ("cpu  5 0 0 5 0 0 0 0", "cpu  5 0 0 5 0 0 0 0", None),
        ("", "cpu  5 0 0 5 0 0 0 0", None),
        ("cpu  1 x", "cpu  5 0 0 5 0 0 0 0", None),
    ],
)
def test_cpu_share(before: str, after: str, share: float | None) -> None:
    assert cpu_share(before, after) == (None if share is None else pytest.approx(share))


def test_which_links_carry_the_training_traffic() -> None:
    nodes = [node_of("node01", "10.0.0.1"), node_of("node02", "10.0.0.2")]
    net = net_of({"eth0": "192.168.0.1", "eth1": "10.0.0.1"}, {"10.0.0.2": "eth1"})
    rdma = Fact(value=(rdma_port("mlx5_0:1", netdev="eth1"), rdma_port("mlx5_1:1", netdev="eth0")))
    tcp = data_links(nodes[0], cluster_of(nodes), net, rdma)
    assert (tcp.iface, tcp.ports) == ("eth1", ()) and "node02" in tcp.why
    assert tcp.rates_gbit_s == {"eth0": 10.0, "eth1": 10.0, "mlx5_0:1": 100.0, "mlx5_1:1": 100.0}
    roce = data_links(nodes[0], cluster_of(nodes, "roce"), net, rdma)
    assert (roce.iface, roce.ports) == ("eth1", ("mlx5_0:1",))
    slow = cluster_of(nodes)
    slow = replace(slow, network=replace(slow.network, rate_gbit_s=2.5))
    assert dict(data_links(nodes[0], slow, net, rdma).rates_gbit_s or {})["eth1"] == 2.5, "what cluster.yaml states wins"
    dumb = data_links(nodes[0], cluster_of(nodes), Fact(error="no answer"), rdma)
    assert (dumb.iface, dumb.why) == (None, "no answer")
    (node,) = view(heard("node01", links=dumb)).nodes
    assert node.links_why == "no answer" and not [link for link in node.links if link.data]


# ------------------------------------------------------------------------------------------ GPUs


def test_gpus_with_what_slows_them_down() -> None:
    first, second, _ = view(*cluster_of_three()).nodes
    assert first.gpus is not None and second.gpus is not None
    busy = first.gpus[0]
    assert (busy.utilization, busy.memory_used_bytes, busy.power_w, busy.power_limit_w) == (0.97, 21_504 << 20, 449.6, 450.0)
    assert (busy.temperature_c, busy.sm_clock_hz, busy.pci) == (66, 2520e6, "0000:41:00.0")
    assert busy.throttle == ("sw_power_cap",) and first.gpus[1].throttle == ()
    assert [len(gpu.processes or ()) for gpu in first.gpus] == [1, 0]
    assert [gpu.lease and gpu.lease.run_id for gpu in first.gpus] == [None, RUN]
    assert second.gpus[0].throttle == (), "idle slows nothing down"
    assert second.gpus[1].throttle == ("hw_thermal_slowdown",), "the general bit adds nothing to the special one"
    assert second.gpus[1].processes is None, "nvidia-smi did not answer for the processes: not known, not none"


@pytest.mark.parametrize(
    ("cell", "names"),
    [
        ("0x0000000000000000", ()),
        ("0x0000000000000001", ()),
        ("0x0000000000000008", ("hw_slowdown",)),
        ("0x0000000000000068", ("sw_thermal_slowdown", "hw_thermal_slowdown")),
        ("0x0000000000001004", ("sw_power_cap", "0x1000")),
        ("[N/A]", None),
        (None, None),
    ],
)
def test_throttle_reasons(cell: str | None, names: tuple[str, ...] | None) -> None:
    assert throttle_of(cell) == names


GARBAGE: list[dict[str, Any] | None] = [
    {"error": "nvidia-smi has not answered for 12 s"},
    smi(gpu_row(0, 97, 21_504, 449.6, 66, 0x4, "x"), age_s=11.0),
    {
        "text": "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
        "fields": [],
        "rc": 9,
        "age_s": 0,
    },
    {"text": "", "fields": ["index"], "rc": 0, "age_s": 0},
    {},
]


@pytest.mark.parametrize("told", GARBAGE)
def test_what_nvidia_smi_does_not_tell_is_not_known(told: dict[str, Any]) -> None:
    (node,) = view(heard("node01", gpus=told, apps={"error": "x"})).nodes
    assert node.up and node.gpus is None and node.gpus_error


def test_a_lost_gpu_and_an_unreadable_cell_are_faults_not_zeros() -> None:
    row = gpu_row(0, 50, 100, 50.0, 40, 0, "x").replace("50.00 W", "[Unknown Error]").replace("50 %", "[N/A]")
    lost = "Unable to determine the device handle for GPU0000:42:00.0: GPU is lost.  Reboot the system to recover"
    (node,) = view(heard("node01", gpus=smi(row, lost), apps=apps())).nodes
    assert node.gpus is not None
    assert (node.gpus[0].power_w, node.gpus[0].utilization) == (None, None) and "power.draw" in node.gpus[0].faults[0]
    assert (node.gpus[1].index, node.gpus[1].pci, node.gpus[1].utilization) == (-1, "0000:42:00.0", None)


# ------------------------------------------------------------------------------------------ runs


def test_a_run_is_put_together_from_its_nodes() -> None:
    run = run_of(*cluster_of_three())
    assert (run.id, run.recipe, run.state, run.step, run.steps) == (RUN, "tiny", "running", 42, 200)
    assert (run.unit, run.rate_per_s, run.step_time_s) == ("tokens", 12_345.6, 1.4)
    assert run.loss == pytest.approx(9.58) and run.metrics_error is None
    assert run.left_s == pytest.approx(158 * 1.5 - 1.5), "1.5 s a step by the clock; the last one was three seconds ago"
    assert [rank.rank for rank in run.ranks] == [0, 1, 2, 3] and run.world_size == 4 and run.missing == ()
    assert run.slowest == 3 and is_behind(run)
    assert run.ranks[3].age_s == pytest.approx(14.0)


def test_a_rank_of_quick_steps_whose_beat_is_a_second_old_is_not_behind() -> None:
    quick = [{**line, "step_time_s": 0.05} for line in metrics(42)]
    beats = {0: ("train", 42, 0.4), 1: ("train", 20, 1.5)}
    run = run_of(heard("node01", runs=[state(RUN, "node01", 0, beats, metrics={"lines": quick})]))
    assert run.slowest == 1 and not is_behind(run)
    beats = {0: ("train", 420, 0.4), 1: ("train", 20, 1.5)}
    assert is_behind(run_of(heard("node01", runs=[state(RUN, "node01", 0, beats, metrics={"lines": quick})])))


def test_ages_go_on_between_two_samples() -> None:
    run = run_of(*cluster_of_three(), later_s=1.5)
    assert run.ranks[0].age_s == pytest.approx(1.9)


def test_a_run_whose_first_node_is_down_says_so_instead_of_an_old_step() -> None:
    first, second, _ = cluster_of_three()
    run = run_of(replace(first, why="refused", last=None), second)
    assert run.missing == ("node01",) and run.step is None and run.rate_per_s is None and run.left_s is None
    assert run.metrics_error == "its first node tells nothing"
    assert [rank.rank for rank in run.ranks] == [2, 3]


def test_an_old_sample_is_no_sample() -> None:
    found = view(*cluster_of_three(), later_s=11.0)
    assert [node.up for node in found.nodes] == [False, False, False]
    assert found.runs == () and "nothing heard for 11 s" in str(found.nodes[0].why)


def test_a_hung_file_system_hides_the_metrics_only() -> None:
    told = state(RUN, "node01", 0, {0: ("train", 42, 0.4)}, metrics={"error": "the file system has not answered for 12 s"})
    run = run_of(heard("node01", runs=[told]))
    assert run.metrics_error == "the file system has not answered for 12 s"
    assert run.step is None and run.ranks[0].step == 42


def test_a_run_that_stands_still_has_no_rate() -> None:
    old = [{**line, "time": line["time"] - 120} for line in metrics(42)]
    run = run_of(heard("node01", runs=[state(RUN, "node01", 0, {0: ("train", 42, 0.4)}, metrics={"lines": old})]))
    assert run.step == 42 and run.rate_per_s is None and run.left_s is None
    assert run.age_s == pytest.approx(123)


def test_lines_of_an_earlier_attempt_do_not_count() -> None:
    told = state(RUN, "node01", 0, {0: ("import", 0, 0.4)}, started=NOW_S - 1)
    run = run_of(heard("node01", runs=[told]))
    assert run.step is None and run.metrics_error is None and not is_behind(run)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([{}, {}], "running"),
        ([{"state": "starting"}, {"state": "starting"}], "starting"),
        ([{}, {"state": "ending"}], "ending"),
        ([{"state": "ended", "outcome": "done", "alive": False}] * 2, "done"),
        ([{"state": "ended", "outcome": "failed", "alive": False, "cause": "rank-failed"}, {}], "failed"),
        ([{"alive": False}, {}], "lost"),
    ],
)
def test_the_state_of_a_run_is_the_worst_of_its_agents(changes: list[dict[str, Any]], expected: str) -> None:
    parts = [
        heard(f"node0{number + 1}", runs=[state(RUN, f"node0{number + 1}", number, {}, **change)])
        for number, change in enumerate(changes)
    ]
    run = run_of(*parts)
    assert run.state == expected and run.cause == ("rank-failed" if expected == "failed" else None)


@pytest.mark.parametrize(("outcome", "expected"), [("failed", "waiting"), ("stopped", "waiting"), ("done", "done")])
def test_a_run_that_somebody_starts_again_waits(outcome: str, expected: str) -> None:
    ended: dict[str, Any] = {"state": "ended", "outcome": outcome, "alive": False, "cause": "rank-failed", "waits": "kim@here"}
    found = view(heard("node01", runs=[state(RUN, "node01", 0, {}, **ended)]))
    (run,) = found.runs
    assert (run.state, run.waits_for) == (expected, "kim@here" if expected == "waiting" else None)
    shown = "\n".join(line.plain for line in frame(found, 120))
    assert ("kim@here starts it again" in shown) == (expected == "waiting")


@pytest.mark.parametrize(
    ("change", "phase"),
    [
        ({}, "train"),
        ({"ranks": {"0": {"gone": NOW_S - 1, "exit": -9}}}, "gone"),
        ({"state": "ended", "outcome": "stopped", "alive": False}, "gone"),
        ({"alive": False}, "gone"),
        ({"beats": {}}, "starting"),
        ({"beats": {"0": {"phase": "done", "step": 9, "time": NOW_S}}, "outcome": "done", "alive": False}, "done"),
    ],
)
def test_the_phase_of_a_rank(change: dict[str, Any], phase: str) -> None:
    told = {**state(RUN, "node01", 0, {0: ("train", 42, 0.4)}), **change}
    assert run_of(heard("node01", runs=[told])).ranks[0].phase == phase


def test_images_are_counted_as_images() -> None:
    lines = [{key: value for key, value in line.items() if key != "tokens_per_s"} for line in metrics(5, images_per_s=99.0)]
    run = run_of(heard("node01", runs=[state(RUN, "node01", 0, {0: ("train", 5, 0.4)}, metrics={"lines": lines})]))
    assert (run.unit, run.rate_per_s) == ("images", 99.0)


# ------------------------------------------------------------------------------------------ whatever comes


@pytest.mark.parametrize("line", ["", "Welcome to node01!", "[]", "{}", '{"schema": "r4090c.sample/1"}', "{" * 100_000])
def test_what_is_no_sample_is_refused(line: str) -> None:
    with pytest.raises(ParseError):
        parse_sample(line)


ODD: list[object] = [5, True, 1.5, math.nan, "x", ["x"], [{}], {"a": 1}, {"0": [1]}, {"lines": 5}, {"lines": [{"step": 1e400}]}]
ODD += [
    {"nodes": 5},
    {"busy": [5, {"lease": [], "user": 4}]},
    {"nodes": [1], "ranks": 4, "steps": 1},
    {"error": 5},
    {"text": 5, "age_s": "x"},
    {"eth0": {"rx": -1}},
    None,
]
KEYS = ("stat", "loadavg", "meminfo", "netdev", "rdma", "gpus", "apps", "disks", "leases", "runs")
PARTS = ("run_id", "run_dir", "attempt", "ranks", "beats", "plan", "metrics", "node_rank", "started", "outcome", "state", "alive")


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_no_sample_breaks_the_view(value: object) -> None:
    before = parse_sample(json.dumps(raw("node01", 0.0)))
    good = raw("node01", 2.0, gpus=smi(gpu_row(0, 1, 1, 1.0, 1, 1, "x")), apps=apps())
    samples = [{**good, key: value} for key in KEYS]
    samples += [{**good, "runs": [{**state(RUN, "node01", 0, {0: ("train", 42, 0.4)}), part: value}]} for part in PARTS]
    for sample in samples:
        found = view(Heard("node01", before, parse_sample(json.dumps(sample)), AT_S, DataLinks("eth0"), NOW_S, None))
        assert found.nodes[0].up
        for width in (40, 160):
            assert frame(found, width)
        assert metrics_of(found)
