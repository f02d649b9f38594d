"""What is started for a collective, and what is read of what came back; pure, against recorded shapes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netcheck.measure import gpu_load, nccl_all, nccl_node, nccl_pairs, p2p, power, storage_load
from netcheck.measure.job import Job, Level, Setting
from netcheck.measure.sweep import MPIRUN, NCCL_TESTS, TORCH, Sweep, fitted, make_job, members, program_for
from r4090c.errors import ParseError
from r4090c.model import Fact
from tests.checks.cases import HERE, build

NO_MPI = {"tools": {"all_reduce_perf": {"mpi": False}}}
NO_TESTS: Mapping[str, Any] = {"tools": {"=": {}}}
TORCH_PACKAGE = {"python": {"packages": {"torch": "2.13.0", "nvidia-nccl-cu12": "2.27.3"}}}
MODULES = (nccl_node, nccl_pairs, nccl_all, p2p, gpu_load, power, storage_load)


def setting(level: Level = Level.FULL, **case: Any) -> Setting:
    cluster, _, facts = build(case)
    return Setting(cluster.nodes, facts, cluster, level, seed=7)


def env_of(words: tuple[str, ...]) -> dict[str, str]:
    """Return the variables that stand behind `env` in a context of mpirun."""
    found = {}
    for word in words[words.index("env") + 1 :]:
        name, equals, value = word.partition("=")
        if not equals or "/" in name:
            break
        found[name] = value
    return found


# --------------------------------------------------------------------------- which program


@pytest.mark.parametrize(
    ("facts", "nodes", "program"),
    [
        ({}, 1, NCCL_TESTS),
        ({}, 3, MPIRUN),
        ({"node02": NO_MPI}, 3, TORCH),
        ({"node02": NO_MPI}, 1, NCCL_TESTS),
        ({"*": NO_TESTS}, 1, TORCH),
        ({"node01": {"tools": {"mpirun": {"real": "/usr/bin/mpiexec.hydra"}}}}, 3, TORCH),  # MPICH's
        ({"node02": {"tools": {"error": "no answer in 5 s"}}}, 3, TORCH),
        ({"*": {**NO_TESTS, "python": {"packages": {"=": {"numpy": "2.1.0"}}}}}, 1, None),
        ({"*": {**NO_TESTS, "python": {"error": "not there"}}}, 3, None),
    ],
)
def test_the_program_that_all_nodes_can_run(facts: dict[str, Any], nodes: int, program: str | None) -> None:
    wish = setting(facts=facts)
    assert program_for(members(wish, wish.nodes[:nodes])) == program


def test_mpirun_gives_every_node_its_own_environment() -> None:
    other = {"net": {"routes": {"10.10.0.11": ["eno1", "10.10.0.12"], "10.10.0.13": ["eno1", "10.10.0.12"]}}}
    wish = setting(facts={"node02": other}, cluster={"nodes": {"*": {"ssh": {"user": "root"}}}})
    job = make_job("all", members(wish, wish.nodes), Sweep(1 << 26, 1 << 28), 40_000, program=MPIRUN)
    (part,) = job.parts
    assert part.node == "node01"
    (step,) = part.steps
    assert step.argv[:4] == ("/usr/bin/mpirun", "--bind-to", "none", "--allow-run-as-root")
    contexts: list[tuple[str, ...]] = []
    words: list[str] = []
    for word in (*step.argv[4:], ":"):
        if word == ":":
            contexts.append(tuple(words))
            words = []
        else:
            words.append(word)
    assert [context[:4] for context in contexts] == [("-np", "2", "-H", f"node0{number}:2") for number in (1, 2, 3)]
    environments = [env_of(context) for context in contexts]
    assert [one["NCCL_SOCKET_IFNAME"] for one in environments] == ["=enp65s0f0", "=eno1", "=enp65s0f0"]
    assert all(one["NCCL_DEBUG"] == "INFO" and one["CUDA_VISIBLE_DEVICES"] == "0,1" for one in environments)
    sizes = ("-b", "67108864", "-e", "268435456", "-f", "2", "-g", "1", "-n", "20", "-w", "5", "-c", "1")
    assert all(context[-15:] == ("/opt/nccl-tests/build/all_reduce_perf", *sizes) for context in contexts)
    assert "40000-40064" in step.env["OMPI_MCA_oob_tcp_dynamic_ipv4_ports"]
    assert job.data["ranks"] == [2, 2, 2]


def test_an_ordinary_user_is_not_told_to_be_root() -> None:
    wish = setting()
    (step,) = make_job("all", members(wish, wish.nodes), Sweep(1, 1), 40_000, program=MPIRUN).parts[0].steps
    assert "--allow-run-as-root" not in step.argv


def test_nccl_tests_alone_takes_all_gpus_of_the_node() -> None:
    wish = setting()
    (part,) = make_job("one", members(wish, wish.nodes[:1]), nccl_node.SWEEP, 40_000).parts
    argv = part.steps[0].argv
    assert argv[0] == "/opt/nccl-tests/build/all_reduce_perf"
    assert argv[argv.index("-g") + 1] == "2"
    assert part.steps[0].env["NCCL_P2P_DISABLE"] == "1"


def test_every_node_starts_its_own_ranks() -> None:
    wish = setting(facts={"*": NO_TESTS}, cluster={"nodes": {"node02": {"env": {"CUDA_VISIBLE_DEVICES": "1"}}}})
    parts = make_job("all", members(wish, wish.nodes), Sweep(1 << 20, 1 << 24), 40_123).parts
    assert [part.node for part in parts] == ["node01", "node02", "node03"]
    argvs = [part.steps[0].argv for part in parts]
    assert all(argv[:2] == ("/opt/train/bin/python", "{folder}/collectives.py") for argv in argvs)
    assert [argv[2:6] for argv in argvs] == [
        ("--local-ranks", "2", "--first-rank", "0"),
        ("--local-ranks", "1", "--first-rank", "2"),
        ("--local-ranks", "2", "--first-rank", "3"),
    ]
    env = [part.steps[0].env for part in parts]
    assert {(one["WORLD_SIZE"], one["MASTER_ADDR"], one["MASTER_PORT"]) for one in env} == {("5", "10.10.0.11", "40123")}
    assert [one["CUDA_VISIBLE_DEVICES"] for one in env] == ["0,1", "1", "0,1"]
    assert all("collectives.py" in part.files for part in parts)


def test_without_gpus_gloo_has_one_rank_a_node() -> None:
    alone = setting(facts={"*": NO_TESTS}, cluster={"nodes": {"*": {"gpus": 0}}})
    parts = nccl_all.plan(alone, ())[0][0].parts
    assert all("gloo" in part.steps[0].argv and part.steps[0].env["WORLD_SIZE"] == "3" for part in parts)


def test_what_cluster_yaml_says_about_collectives_goes_along_and_nothing_else() -> None:
    secret = {"WANDB_API_KEY": "k", "NCCL_IB_TIMEOUT": "23", "CUDA_VISIBLE_DEVICES": "1"}
    wish = setting(cluster={"nodes": {"node01": {"env": secret}}}, facts={"*": NO_TESTS})
    (member,) = members(wish, wish.nodes[:1])
    assert member.gpus == ("1",)
    assert member.env["NCCL_IB_TIMEOUT"] == "23"
    assert "WANDB_API_KEY" not in json.dumps(dict(member.env))


# --------------------------------------------------------------------------- plans


def answer(job: Job, *, passed: bool = True, **document: Any) -> dict[str, Any]:
    """Return the record of a torch job that measured something, or whose lead says `document`."""
    ranks = sum(job.data["ranks"])
    row = {"op": "all_reduce", "bytes": 1 << 28, "time_us": 30_000.0, "algbw_gbyte_s": 9.0, "busbw_gbyte_s": 9.0, "wrong": 0}
    told = {
        "backend": job.data["backend"],
        "ranks": [{"name": "GPU"}] * ranks,
        "results": [row],
        "wrong_ranks": [],
        "error": None,
    }
    if not passed:
        error = {"phase": "all_reduce", "text": "no end within the time limit", "missing": []}
        told = {**told, "results": [], "error": error, **document}
    stdout = f"R4090C-COLLECTIVES {json.dumps({**told, **document})}\n"
    step = {"rc": 0 if passed else 4, "stdout": stdout, "stderr": "", "error": "", "duration_s": 1.0}
    return {"name": job.name, "data": dict(job.data), "parts": {part.node: {"steps": [step]} for part in job.parts}}


def test_pairs_use_one_gpu_each_near_the_network_card() -> None:
    """The card of enp65s0f0 hangs on NUMA node 0, as GPU 0 does; on node02 the GPUs are the other way round."""
    wish = setting(facts={"*": NO_TESTS})
    gpus = wish.facts["node02"].gpus.value
    assert gpus is not None
    turned = tuple(replace(gpu, numa=1 - (gpu.numa or 0)) for gpu in gpus)
    wish = replace(wish, facts={**wish.facts, "node02": replace(wish.facts["node02"], gpus=Fact(turned))})
    rounds = nccl_pairs.plan(wish, ())
    assert sorted(job.name for one in rounds for job in one) == ["node01-node02", "node01-node03", "node02-node03"]
    assert all(job.data["ranks"] == [1, 1] for one in rounds for job in one)
    parts = [part for one in rounds for job in one for part in job.parts]
    assert {(part.node, part.steps[0].env["CUDA_VISIBLE_DEVICES"]) for part in parts} == {
        ("node01", "0"),
        ("node02", "1"),
        ("node03", "0"),
    }


def test_a_slow_or_failed_pair_is_run_once_more() -> None:
    wish = setting(facts={"*": NO_TESTS})
    rounds = nccl_pairs.plan(wish, ())
    jobs = {job.name: job for one in rounds for job in one}
    slow = answer(jobs["node01-node02"])
    slow["parts"]["node01"]["steps"][0]["stdout"] = slow["parts"]["node01"]["steps"][0]["stdout"].replace("9.0", "2.0")
    done = [[slow], [answer(jobs["node01-node03"], passed=False)], [answer(jobs["node02-node03"])]]
    again = nccl_pairs.plan(wish, done)
    assert sorted(job.name for one in again for job in one) == ["node01-node02", "node01-node03"]
    assert all(job.data["again"] for one in again for job in one)
    assert nccl_pairs.plan(wish, [*done, *[[answer(job) for job in one] for one in again]]) == ()


def test_torch_stands_in_where_nccl_tests_cannot_be_started() -> None:
    wish = setting()
    (first,) = nccl_node.plan(wish, ())
    assert {job.data["program"] for job in first} == {NCCL_TESTS}
    broken = {"rc": 127, "stdout": "", "error": "", "duration_s": 0.1}
    broken["stderr"] = "all_reduce_perf: error while loading shared libraries: libnccl.so.2: cannot open shared object file\n"
    records = [{"name": job.name, "data": dict(job.data), "parts": {job.name: {"steps": [broken]}}} for job in first]
    (second,) = nccl_node.plan(wish, [records])
    assert {job.data["program"] for job in second} == {TORCH}
    done = [records, [answer(job) for job in second]]
    assert nccl_node.plan(wish, done) == ()
    assert [run.passed for run in nccl_node.read({"rounds": done})] == [True] * 3


def test_the_whole_is_halved_only_when_it_fails() -> None:
    wish = setting(facts={"*": NO_TESTS}, nodes=4)
    (whole,) = nccl_all.plan(wish, ())
    assert nccl_all.plan(wish, [[answer(whole[0])]]) == ()
    done = [[answer(whole[0], passed=False)]]
    bad = "node03"
    while rounds := nccl_all.plan(wish, done):
        done += [[answer(job, passed=bad not in job.data["nodes"]) for job in one] for one in rounds]
    verdict = nccl_all.read({"rounds": done}).verdict
    assert verdict is not None and verdict.culprits == (bad,)


def test_arms_come_one_after_the_other_and_end_with_the_first_failure() -> None:
    granted = {"*": {**NO_TESTS, "gpu_p2p": {"cells": {"0-1": "OK", "1-0": "OK"}}}}
    facts = {**granted, "node03": {"gpu_p2p": {"cells": {"0-1": "NS", "1-0": "NS"}}}}
    wish = setting(facts=facts)
    done: list[Any] = []
    seen = []
    while rounds := p2p.plan(wish, done):
        (one,) = rounds
        envs = [job.parts[0].steps[0].env for job in one]
        told = [(env["NCCL_P2P_DISABLE"], env.get("NCCL_P2P_LEVEL")) for env in envs]
        seen.append([(job.data["nodes"][0], job.data["arm"], *what) for job, what in zip(one, told, strict=True)])
        hangs = [job.data["nodes"][0] == "node02" and job.data["arm"] == p2p.ON for job in one]
        done.append([answer(job, passed=not hang) for job, hang in zip(one, hangs, strict=True)])
    assert seen == [
        [("node01", "off", "1", None), ("node02", "off", "1", None)],
        [("node01", "on", "0", "SYS"), ("node02", "on", "0", "SYS")],
        [("node01", "on", "0", "SYS")],
        [("node01", "off", "1", None)],
    ]


def test_p2p_reaches_as_far_as_somebody_stated_else_everywhere() -> None:
    """By itself NCCL keeps P2P below one switch: GPUs of two host bridges would be tested without it."""
    granted = {"*": {**NO_TESTS, "gpu_p2p": {"cells": {"0-1": "OK", "1-0": "OK"}}}}
    wish = setting(facts=granted)
    wish = replace(wish, cluster=replace(wish.cluster, env={"NCCL_P2P_LEVEL": "PHB"}))
    (off,) = p2p.plan(wish, [])
    (on,) = p2p.plan(wish, [[answer(job) for job in off]])
    assert {job.parts[0].steps[0].env["NCCL_P2P_LEVEL"] for job in on} == {"PHB"}


def test_gpu_load_takes_host_memory_near_each_card() -> None:
    numa = [{"index": 0, "cpus": [0, 1], "memory_mib": 1}, {"index": 1, "cpus": [2, 3], "memory_mib": 1}]
    wish = setting(facts={"node01": {"cpus": {"numa": numa}}})
    (jobs,) = gpu_load.plan(wish, ())
    argv = jobs[0].parts[0].steps[0].argv
    assert argv[argv.index("--cpus") + 1] == "0,1;2,3"
    assert sum(word == "--query" for word in argv) == 2
    assert jobs[0].parts[0].watch["kernel-log"][0] == "sh"
    (swings,) = power.plan(wish, ())
    assert "power" in swings[0].parts[0].steps[0].argv


def test_storage_is_loaded_by_one_and_then_by_all() -> None:
    alone, together = storage_load.plan(setting(), ())
    assert [job.parts[0].node for job in alone] == ["node01"]
    assert [job.parts[0].node for job in together] == ["node01", "node02", "node03"]
    assert alone[0].parts[0].steps[0].argv[4:6][0] == "/mnt/shared"


# --------------------------------------------------------------------------- anything may come back


@cache
def recorded(name: str) -> list[str]:
    """Return the measurements of all cases, as text."""
    cases = [json.loads(file.read_text()) for file in sorted(HERE.glob("*/*.json"))]
    return [json.dumps(case["measurements"][name]) for case in cases if name in case.get("measurements", {})]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of everything in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at] * bool(at) + [place for key, item in inner for place in places(item, (*at, key))]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.NAME)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_reader_gives_values_or_a_parse_error(module: Any, data: st.DataObject) -> None:
    value = json.loads(data.draw(st.sampled_from(recorded(module.NAME))))
    place = data.draw(st.sampled_from(places(value)))
    holder = value
    for key in place[:-1]:
        holder = holder[key]
    if isinstance(holder[place[-1]], str) and data.draw(st.booleans()):
        text = holder[place[-1]]
        holder[place[-1]] = text[: data.draw(st.integers(0, len(text)))]
    else:
        holder[place[-1]] = data.draw(JSON)
    with contextlib.suppress(ParseError):
        module.read(value)
    with contextlib.suppress(ParseError):
        list(getattr(module, "figures", list)(value))


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.NAME)
@given(JSON)
def test_a_reader_refuses_what_it_does_not_know(module: Any, value: Any) -> None:
    with contextlib.suppress(ParseError):
        module.read(value)


# --------------------------------------------------------------------------- how much


@pytest.mark.parametrize(
    ("rate_gbit_s", "largest_mib", "iterations"), [(None, 256, 20), (100, 256, 20), (25, 256, 20), (10, 256, 15), (1, 64, 6)]
)
def test_nccl_tests_is_given_no_more_than_the_network_carries_in_a_minute(
    rate_gbit_s: float | None, largest_mib: int, iterations: int
) -> None:
    sweep = fitted(nccl_all.SWEEP_NCCL, rate_gbit_s)
    assert sweep.max_bytes == largest_mib << 20
    assert abs(sweep.iterations - iterations) <= 2
    if rate_gbit_s is not None:
        gbyte = sum(sweep.min_bytes * sweep.factor**place for place in range(sweep.sizes)) / 1e9
        assert 2 * (sweep.iterations + sweep.warm_up) * 2 * gbyte / (rate_gbit_s / 8) < sweep.limit_s / 2
