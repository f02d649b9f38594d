"""What the measurements between nodes plan, and that no answer breaks their readers and checks."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from netcheck.checks import REGISTRY
from netcheck.measure import commands_on_node, path_mtu, rdma, ssh_mesh, tcp
from netcheck.measure.figure import Figure
from netcheck.measure.job import NOT_INSTALLED, Job, Level, Round, Setting
from netcheck.measure.ports import HIGH_PORTS
from netcheck.measure.schedule import disjoint, pick_ports
from r4090c.errors import ParseError
from r4090c.model import Fact
from tests.checks.cases import HERE, build

CHECKS = ("tcp-bandwidth", "rdma-bandwidth", "rdma-latency", "path-mtu", "ssh-mesh", "loss-counters")
CASES = [
    case
    for check in CHECKS
    for file in sorted((HERE / check).glob("*.json"))
    if (case := json.loads(file.read_text()))["measurements"]
]


def setting_of(case: Mapping[str, Any], level: Level = Level.DEFAULT, seed: int = 1) -> Setting:
    cluster, _, facts = build(case)
    return Setting(cluster.nodes, facts, cluster, level, seed)


def cells_of(rounds: tuple[Round, ...]) -> list[tuple[str, str]]:
    return [(test["sender"], test["receiver"]) for one in rounds for job in one for test in job.data["tests"]]


def argvs(job: Job, node: str) -> list[tuple[str, ...]]:
    return [step.argv for part in job.parts if part.node == node for step in part.steps]


def word_after(argv: Sequence[str], option: str) -> str:
    return argv[argv.index(option) + 1]


# --------------------------------------------------------------------------- rounds


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("abcdefgh")).filter(lambda link: link[0] != link[1])))
def test_every_link_has_its_turn_and_nobody_two_at_once(links: list[tuple[str, str]]) -> None:
    rounds = disjoint(links)
    assert sorted(link for one in rounds for link in one) == sorted(links)
    for one in rounds:
        assert len({name for link in one for name in link}) == 2 * len(one)


def test_ports_are_high_and_differ_between_preflights_and_rounds() -> None:
    ports = pick_ports(1, 2, 64)
    assert len(set(ports)) == 64
    assert all(HIGH_PORTS[0] <= port <= HIGH_PORTS[1] for port in ports)
    assert ports == pick_ports(1, 2, 64) != pick_ports(1, 3, 64)
    assert ports != pick_ports(2, 2, 64)


# --------------------------------------------------------------------------- tcp


def test_neighbours_by_default_and_all_pairs_in_full() -> None:
    assert len(tcp.plan(setting_of({"nodes": 9}), [])) == 3
    full = tcp.plan(setting_of({"nodes": 8}, Level.FULL), [])
    assert len(full) == 7
    assert len({*cells_of(full)}) == 8 * 7
    assert tcp.plan(setting_of({"nodes": 1}), []) == ()


def test_each_pair_is_tested_both_ways_with_one_and_four_streams_on_ports_of_its_own() -> None:
    one, *_ = tcp.plan(setting_of({"nodes": 4}, Level.FULL), [])
    ports = []
    for job in one:
        client, server = job.data["client"], job.data["server"]
        calls, serves = argvs(job, client), argvs(job, server)
        assert [(("-R" in argv), word_after(argv, "-P")) for argv in calls] == [
            (False, "1"),
            (False, "4"),
            (True, "1"),
            (True, "4"),
        ]
        assert [test["sender"] for test in job.data["tests"]] == [client, client, server, server]
        assert [word_after(argv, "-p") for argv in calls] == [word_after(argv, "-p") for argv in serves]
        assert all("-1" in argv and "-s" in argv for argv in serves)
        number = {name: int(name[-1]) for name in (client, server)}
        assert all(word_after(argv, "-c") == f"10.10.0.1{number[server]}" for argv in calls)
        assert all(word_after(argv, "-B") == f"10.10.0.1{number[client]}" for argv in calls)
        assert all(word_after(argv, "-B") == f"10.10.0.1{number[server]}" for argv in serves)
        ports += [word_after(argv, "-p") for argv in calls]
        assert job.parts[0].serves and job.parts[0].node == server
        assert all(
            "/sys/class/net/enp65s0f0/device/net/enp65s0f0/statistics/[rt]x_*errors" in part.counters for part in job.parts
        )
    assert len(set(ports)) == len(ports) == 8


def test_a_name_is_not_bound_to() -> None:
    case = {"nodes": 2, "cluster": {"nodes": {"node01": {"data_address": "fast1"}}}}
    ((job,),) = tcp.plan(setting_of(case), [])
    assert "-B" not in argvs(job, "node01")[0] and "-B" in argvs(job, "node02")[0]


def test_the_streams_are_those_of_cluster_yaml() -> None:
    case = {"nodes": 2, "cluster": {"expect": {"tcp_streams": 8}}}
    ((job,),) = tcp.plan(setting_of(case), [])
    assert [word_after(argv, "-P") for argv in argvs(job, "node01")] == ["1", "8", "1", "8"]
    ((job,),) = tcp.plan(setting_of({"nodes": 2, "cluster": {"expect": {"tcp_streams": 1}}}), [])
    assert [word_after(argv, "-P") for argv in argvs(job, "node01")] == ["1", "1"]


def done_with(case: str, check: str) -> tuple[dict[str, Any], list[Any]]:
    """A recorded case of a check and the rounds of its screening."""
    read = json.loads((HERE / check / f"{case}.json").read_text())
    (measured,) = read["measurements"].values()
    return read, [one for one in measured["rounds"] if one[0]["data"]["stage"] == "screening"]


def test_suspects_are_tested_again_with_good_nodes_and_only_once() -> None:
    case, screening = done_with("receives-slowly", "tcp-bandwidth")
    setting = setting_of(case, Level.FULL)
    again = tcp.plan(setting, screening)
    assert {receiver for _, receiver in cells_of(again)} == {"node03"}
    assert {job.data["stage"] for one in again for job in one} == {"again"}
    assert all(word_after(argv, "-t") == "3" for one in again for job in one for argv in argvs(job, job.data["client"]))
    assert len(again) == 2  # node03 can be tested with one at a time
    job = again[0][0]
    record = {"name": "x", "data": {**job.data}, "parts": {job.data[end]: {"error": "lost"} for end in ("client", "server")}}
    assert tcp.plan(setting, [*screening, [record]]) == ()
    well, screening = done_with("all-well", "tcp-bandwidth")
    assert tcp.plan(setting_of(well), screening) == ()


def test_a_pair_whose_port_is_taken_is_tried_on_others_and_what_it_finds_then_counts() -> None:
    case, (first, *others) = done_with("all-well", "tcp-bandwidth")
    setting = setting_of(case, Level.FULL)
    sound = next(record for record in first)
    client, server = sound["data"]["client"], sound["data"]["server"]
    steps = [{**step, "stdout": ""} for step in sound["parts"][client]["steps"]]
    says = {"rc": 1, "stdout": "", "stderr": "iperf3: error - unable to start listener: Address already in use\n", "error": ""}
    taken = {client: {"steps": steps}, server: {"steps": [{**says, "duration_s": 0.1} for _ in steps]}}
    squatted = {**sound, "parts": taken}
    done = [[squatted, *first[1:]], *others]
    ((again,),) = tcp.plan(setting, done)
    assert {again.data["client"], again.data["server"], again.data["stage"]} == {client, server, "screening"}
    before = tcp.plan(setting, [])
    ports = {word_after(argv, "-p") for one in before for job in one for argv in argvs(job, job.data["client"])}
    assert not {word_after(argv, "-p") for argv in argvs(again, client)} & ports
    assert not tcp.read({"rounds": done}).cells().keys() & {(client, server)}
    assert tcp.read({"rounds": [*done, [sound]]}).cells() == tcp.read({"rounds": [first, *others]}).cells()
    assert not any(job.data["stage"] == "screening" for one in tcp.plan(setting, [*done, [squatted], [squatted]]) for job in one)


def test_lost_segments_make_a_suspect_too() -> None:
    case, screening = done_with("segments-sent-again", "tcp-bandwidth")
    again = tcp.plan(setting_of(case, Level.FULL), screening)
    assert {sender for sender, _ in cells_of(again)} == {"node02"}


def test_a_cluster_of_suspects_is_not_tested_for_ever() -> None:
    """Half of the links slow at random, in sixteen nodes."""
    dice = random.Random(1)
    setting = setting_of({"nodes": 9, "cluster": {"network": {"rate_gbit_s": 10, "mtu": 1500}}}, Level.FULL)
    done = []
    for one in tcp.plan(setting, []):
        records = []
        for job in one:
            steps = []
            for _ in job.data["tests"]:
                bits = dice.choice([9.4e9, 1e9])
                sums = {name: {"seconds": 1, "bits_per_second": bits, "retransmits": 0} for name in ("sum_sent", "sum_received")}
                steps.append({"rc": 0, "stdout": json.dumps({"end": sums}), "stderr": "", "error": "", "duration_s": 1})
            records.append(
                {"name": job.name, "data": dict(job.data), "parts": {part.node: {"steps": steps} for part in job.parts}}
            )
        done.append(records)
    assert 0 < len(tcp.plan(setting, done)) <= tcp.ROUNDS_AGAIN_MAX


def test_figures_of_every_link() -> None:
    case = json.loads((HERE / "tcp-bandwidth" / "one-link.json").read_text())
    figures = [*tcp.figures(case["measurements"]["tcp"])]
    assert Figure("tcp", "node01->node04", "1 stream", 9.1, "Gbit/s") in figures
    assert Figure("tcp", "node04->node01", "4 streams", 23.0, "Gbit/s") in figures
    assert len(figures) == 24
    both = [*rdma.figures(json.loads((HERE / "rdma-bandwidth" / "warn-one-link.json").read_text())["measurements"]["rdma-pairs"])]
    assert Figure("rdma-pairs", "node01->node04", "ib_write_bw", 85.0, "Gbit/s") in both
    latency = [figure for figure in both if figure.unit == "us"]
    assert len(latency) == 6 and not latency[0].higher_is_better


# --------------------------------------------------------------------------- rdma


def test_both_ends_name_their_own_device_and_gid_and_run_the_same_program() -> None:
    other_gid = {
        "node02": {"rdma": [{**rdma_port(), "hca": "mlx5_1", "gids": [{**GID, "index": 5, "address": "::ffff:10.10.0.12"}]}]}
    }
    setting = setting_of({"nodes": 2, "facts": other_gid})
    ((job,),) = rdma.plan(setting, [])
    one, other = argvs(job, "node01"), argvs(job, "node02")
    assert [argv[0] for argv in one] == [argv[0] for argv in other] == ["ib_write_bw", "ib_send_lat", "ib_write_bw"]
    assert all((word_after(argv, "-d"), word_after(argv, "-x")) == ("mlx5_0", "3") for argv in one)
    assert all((word_after(argv, "-d"), word_after(argv, "-x")) == ("mlx5_1", "5") for argv in other)
    assert [word_after(argv, "-p") for argv in one] == [word_after(argv, "-p") for argv in other]
    assert [argv[-1] for argv in one][:2] == ["10.10.0.12"] * 2 and other[2][-1] == "10.10.0.11"  # then the other way round
    assert all("--report_gbits" in argv for argv in (*one, *other) if argv[0] == "ib_write_bw")
    assert [test["sender"] for test in job.data["tests"]] == ["node01", "node01", "node02"]
    assert any("/mlx5_1/" in path for path in job.parts[0].counters)


GID = {"index": 3, "address": "::ffff:10.10.0.11", "kind": "v2", "netdev": "enp65s0f0"}


def rdma_port(**changes: Any) -> dict[str, Any]:
    port = {"hca": "mlx5_0", "port": 1, "state": "ACTIVE", "phys_state": "LinkUp", "link_layer": "Ethernet", "rate_gbit_s": 100}
    return {**port, "netdev": "enp65s0f0", "firmware": None, "numa": 0, "gids": [GID], **changes}


def test_a_node_without_an_active_port_is_left_out() -> None:
    down = {"node02": {"rdma": [rdma_port(state="DOWN", gids=[{**GID, "address": "::ffff:10.10.0.12"}])]}}
    rounds = rdma.plan(setting_of({"nodes": 3, "facts": down}), [])
    assert {name for cell in cells_of(rounds) for name in cell} == {"node01", "node03"}
    setting = setting_of({"nodes": 3})
    unread = replace(setting.facts["node03"], rdma=Fact(error="Input/output error"))
    rounds = rdma.plan(replace(setting, facts={**setting.facts, "node03": unread}), [])
    assert {name for cell in cells_of(rounds) for name in cell} == {"node01", "node02"}
    assert rdma.plan(setting_of({"nodes": 3, "cluster": {"network": {"kind": "tcp"}}}), []) == ()


def test_iterations_are_those_of_cluster_yaml() -> None:
    case = {"nodes": 2, "cluster": {"expect": {"rdma_iterations": 20, "rdma_latency_iterations": 30}}}
    ((job,),) = rdma.plan(setting_of(case), [])
    assert [word_after(argv, "-n") for argv in argvs(job, "node01")] == ["20", "30", "20"]


def test_an_rdma_suspect_is_tested_again_pair_by_pair() -> None:
    case, screening = done_with("sends-slowly", "rdma-bandwidth")
    again = rdma.plan(setting_of(case, Level.FULL), screening)
    assert all("node02" in cell for cell in cells_of(again)) and len(again) == 2
    case, screening = done_with("node-late", "rdma-latency")
    assert all("node02" in cell for cell in cells_of(rdma.plan(setting_of(case, Level.FULL), screening)))
    case, screening = done_with("all-well", "rdma-bandwidth")
    assert rdma.plan(setting_of(case), screening) == ()


# --------------------------------------------------------------------------- pings and logins


def asked(job: Job) -> list[list[str]]:
    (part,) = job.parts
    return [command["argv"] for command in json.loads(part.files["request.json"])["commands"]]


def test_pings_are_as_large_as_the_mtu() -> None:
    (one,) = path_mtu.plan(setting_of({"nodes": 4}), [])
    assert [job.name for job in one] == ["node01", "node02", "node03", "node04"]
    assert sorted(job.data["pings"][0][1] for job in one) == [9000] * 4
    assert all(word_after(argv, "-s") == "8972" for job in one for argv in asked(job))
    assert [len(job.data["pings"]) for job in one] == [2] * 4
    (full,) = path_mtu.plan(setting_of({"nodes": 4}, Level.FULL), [])
    assert [len(job.data["pings"]) for job in full] == [3] * 4
    six = {"nodes": 2, "cluster": {"nodes": {"node02": {"data_address": "fd00::2"}}, "network": {"mtu": 1500}}}
    ((first, _),) = path_mtu.plan(setting_of(six), [])
    assert [word_after(argv, "-s") for argv in asked(first)] == ["1452"]


def test_what_does_not_pass_is_tried_again_beside_smaller_ones() -> None:
    case = json.loads((HERE / "path-mtu" / "one-pair.json").read_text())
    first = case["measurements"]["path-mtu"]["rounds"][:1]
    (again,) = path_mtu.plan(setting_of(case), first)
    assert {(job.name, peer) for job in again for peer, _ in job.data["pings"]} == {("node01", "node04"), ("node04", "node01")}
    assert [word_after(argv, "-s") for argv in asked(again[0])] == ["8972", "4172", "1472", "1422", "1372", "1252", "56"]
    assert path_mtu.plan(setting_of(case), case["measurements"]["path-mtu"]["rounds"]) == ()


def test_every_node_logs_in_to_itself_and_its_neighbours_or_to_all() -> None:
    (one,) = ssh_mesh.plan(setting_of({"nodes": 5}), [])
    assert next(job.data["targets"] for job in one) == ["node01", "node02", "node05"]
    (full,) = ssh_mesh.plan(setting_of({"nodes": 5}, Level.FULL), [])
    assert all(len(job.data["targets"]) == 5 for job in full)
    assert len({job.data["targets"][0] for job in full}) == 5  # each begins with another
    ((alone,),) = ssh_mesh.plan(setting_of({"nodes": 1}), [])
    assert alone.data["targets"] == ["node01"]
    (argv,) = asked(alone)
    assert argv[-2:] == ["node01", "true"] and "BatchMode=yes" in argv and "StrictHostKeyChecking=yes" in argv


def test_commands_run_a_few_at_a_time_each_with_its_own_end() -> None:
    def command(*argv: str, timeout_s: float = 60.0, retry_on: tuple[str, ...] = ()) -> dict[str, Any]:
        return {"argv": argv, "timeout_s": timeout_s, "retry_on": retry_on}

    assert commands_on_node.NOT_INSTALLED == NOT_INSTALLED
    echo, slow, missing, bad = commands_on_node.run_all(
        [
            command("sh", "-c", "echo out; echo err >&2"),
            command("sleep", "60", timeout_s=0.2),
            command("no-such-program"),
            command("sh", "-c", "echo Connection reset >&2; exit 255", retry_on=("Connection reset",)),
        ],
        2,
    )
    assert echo == {"rc": 0, "stdout": "out\n", "stderr": "err\n", "error": ""}
    assert (slow["rc"], slow["error"]) == (None, "no end within 0.2 s")
    assert (missing["rc"], missing["error"]) == (None, NOT_INSTALLED)
    assert bad["rc"] == 255


def test_a_command_without_end_or_with_a_daemon_takes_neither_memory_nor_time() -> None:
    began = time.monotonic()
    endless, daemon = commands_on_node.run_all(
        [
            {"argv": ("sh", "-c", "exec cat /dev/zero"), "timeout_s": 1.0, "retry_on": ()},
            {"argv": ("sh", "-c", "echo said; setsid sleep 30 & exit 0"), "timeout_s": 30.0, "retry_on": ()},
        ],
        2,
    )
    assert time.monotonic() - began < 25
    assert (endless["rc"], endless["error"], len(endless["stdout"])) == (None, "no end within 1 s", commands_on_node.KEPT_BYTES)
    assert (daemon["rc"], daemon["stdout"], daemon["error"]) == (0, "said\n", "")


# --------------------------------------------------------------------------- damaged answers


def damaged(value: Any, draw: Callable[..., Any]) -> Any:
    """`value` with one thing in it replaced by any JSON."""
    junk = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8), st.just([]), st.just({})
    )
    if isinstance(value, dict) and value and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(value)))
        return {**value, key: damaged(value[key], draw)}
    if isinstance(value, list) and value and draw(st.integers(0, 5)):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], damaged(value[place], draw), *value[place + 1 :]]
    return draw(junk)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None)
@given(st.data())
def test_no_answer_breaks_a_check(data: st.DataObject) -> None:
    """Whatever a bundle holds, there are findings: `unknown` where it is not understood."""
    case = data.draw(st.sampled_from(CASES))
    measurements = damaged(case["measurements"], data.draw)
    if not isinstance(measurements, dict):
        return
    cluster, _, facts = build(case)
    nets = {name: one.net.value for name, one in facts.items()}
    for check in REGISTRY:
        if check.id in CHECKS and {*check.needs} & {*measurements}:
            given_ = {need: measurements[need] for need in check.needs if need in measurements}
            try:
                findings = [
                    *check.judge(
                        given_ if len(check.needs) > 1 else given_[check.needs[0]], *([nets] * len(check.optional)), cluster
                    )
                ]
            except ParseError:
                continue
            assert all(finding.check == check.id and finding.observed for finding in findings)


@pytest.mark.parametrize("module", [tcp, rdma, path_mtu, ssh_mesh], ids=lambda module: module.NAME)
def test_nothing_measured_is_read_as_nothing(module: Any) -> None:
    module.read({"rounds": []})
    broken: Any
    for broken in ({}, [], None, {"rounds": [[{}]]}, {"rounds": [[{"name": "x", "data": {}, "parts": {"node01": {}}}]]}):
        with pytest.raises(ParseError):
            module.read(broken)
