"""Collectives between real nodes: measured over shaped links, a node that fails the others is found, nothing is left behind."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from netcheck.checks import REGISTRY
from netcheck.conduct import carry_out
from netcheck.gather import gather
from netcheck.judge import judge
from netcheck.measure import nccl_all
from netcheck.measure.job import Level, Setting
from netcheck.measure.sweep import Sweep
from netcheck.raw import parse_raw
from r4090c.errors import Exit
from r4090c.inventory import load_cluster
from r4090c.remote import Fleet
from tests.lab import Lab
from tests.lab.gpus import GpuBox
from tests.lab.gpus import installed as gpus_installed
from tests.lab.nccl import installed
from tests.test_preflight import changed, r4090c

pytestmark = [pytest.mark.lab, pytest.mark.train, pytest.mark.slow]

QUICK = Sweep(1 << 20, 1 << 20, join_s=40.0, timeout_s=20.0, budget_s=0.3)
BUSY = ("collectives.py", "all_reduce_perf", "mpirun")


def leftovers(lab: Lab) -> list[str]:
    """Return what of ours still runs on any node."""
    deadline = time.monotonic() + 30
    while True:
        left = [line for name in lab.nodes for _, line in lab.processes(name) if any(word in line for word in BUSY)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def run_all(lab: Lab, file: Path | None = None, sweep: Sweep = QUICK) -> tuple[nccl_all.AllNodes, dict[str, str]]:
    """Return what nccl-all measured on the whole lab, and what its check says: subject -> status."""
    cluster = load_cluster(file or lab.cluster_file)
    module: Any = SimpleNamespace(
        NAME="nccl-all", TITLE="all", LEVEL=Level.FULL, plan=lambda wish, done: nccl_all.plan_with(wish, done, sweep, sweep)
    )
    with Fleet(cluster.nodes) as fleet:
        raw = gather(fleet, cluster, [node.name for node in cluster.nodes])
        facts = parse_raw(raw, cluster)
        measured = carry_out(module, fleet, Setting(cluster.nodes, facts, cluster, Level.FULL, seed=time.monotonic_ns()))
    raw = replace(raw, measurements={"nccl-all": json.loads(json.dumps(measured))})
    findings = judge(cluster, raw, facts, [check for check in REGISTRY if check.id == "nccl-all"])
    return nccl_all.read(measured), {finding.subject: finding.status.value for finding in findings}


@contextmanager
def deaf(lab: Lab, node: str, addresses: str) -> Iterator[None]:
    """Let a node drop whatever comes from some addresses."""
    chain = "add table inet t; add chain inet t i { type filter hook input priority 0; }"
    with changed(lab, node, f"nft '{chain}; add rule inet t i ip saddr {addresses} drop'", "nft delete table inet t"):
        yield


def test_all_reduce_over_four_nodes_comes_near_the_wire(mended_lab4: Lab, tmp_path: Path) -> None:
    """Gloo on CPUs over links shaped to 200 Mbit/s: judged against the rate that cluster.yaml states."""
    for name in mended_lab4.nodes:
        mended_lab4.shape(name, "200mbit")  # no more than busy cores move
    wish = yaml.safe_load(mended_lab4.cluster_file.read_text())
    wish["network"]["rate_gbit_s"] = 0.2
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(wish))
    done = r4090c("--cluster", str(file), "preflight", "--full", "--only", "nccl", "--json", timeout=600)
    assert done.returncode == Exit.OK, done.stdout + done.stderr
    found = {finding["subject"]: finding for finding in json.loads(done.stdout)["findings"] if finding["check"] == "nccl-all"}
    assert {name: finding["status"] for name, finding in found.items()} == dict.fromkeys(mended_lab4.nodes, "pass")
    figure = re.search(r"([\d.]+) GB/s at 16M, 4 ranks \(torch, gloo\)", found["node01"]["observed"])
    assert figure is not None and 0.0175 <= float(figure[1]) <= 0.0244
    assert leftovers(mended_lab4) == []


@pytest.mark.long
def test_a_node_that_reaches_nobody_is_found_and_the_others_are_cleared(mended_lab4: Lab) -> None:
    """SSH from the controller still works: only the collective knows."""
    lab = mended_lab4
    with deaf(lab, "node03", f"!= {lab.controller_address}"):
        found, told = run_all(lab)
    assert found.verdict is not None and found.verdict.culprits == ("node03",)
    assert told == {"node03": "fail", "node01": "pass", "node02": "pass", "node04": "pass"}
    assert leftovers(lab) == []


@pytest.mark.long
def test_two_nodes_that_only_fail_together_are_told_as_a_link(mended_lab4: Lab) -> None:
    lab = mended_lab4
    with deaf(lab, "node03", lab.address("node02")):
        found, told = run_all(lab)
    assert found.verdict is not None and [{*link} for link in found.verdict.links] == [{"node02", "node03"}]
    assert sorted(told.values()) == ["fail", "pass", "pass"]


# --------------------------------------------------------------------------- nccl-tests under mpirun


@contextmanager
def boxes(lab: Lab, tmp_path: Path, instead: str = "", mpi: bool = True) -> Iterator[Path]:
    """Make the lab's nodes boxes of two GPUs with nccl-tests; yield the cluster.yaml that states them."""
    wish = yaml.safe_load(lab.cluster_file.read_text())
    for node in wish["nodes"]:
        node["gpus"] = 2
    file = tmp_path / "gpus.yaml"
    file.write_text(yaml.safe_dump(wish))
    whole = GpuBox()
    with ExitStack() as stack:
        for name in lab.nodes:
            stack.enter_context(gpus_installed(lab, name, replace(whole, cards=whole.cards[:2])))
            stack.enter_context(installed(lab, name, mpi=mpi, instead=instead))
        yield file


def test_nccl_tests_under_mpirun_moves_bytes_over_the_shaped_link(lab: Any, tmp_path: Path) -> None:
    two = lab(2)
    for name in two.nodes:
        two.shape(name, "200mbit")
    with boxes(two, tmp_path) as file:
        found, told = run_all(two, file, Sweep(1 << 22, 1 << 24, budget_s=4.0))
    whole = found.whole
    assert whole is not None and whole.passed, whole
    assert (whole.program, whole.ranks, whole.wrong) == ("mpirun", 4, 0)
    assert whole.largest is not None and whole.largest.bytes == 1 << 24
    assert 0.01 <= whole.largest.busbw_gbyte_s <= 0.04  # two ranks a node: the loopback carries a part of the ring
    assert whole.log is not None and whole.log.network == "Socket" and list(whole.log.interfaces) == ["eth0"]
    assert {*told.values()} == {"pass"}
    assert leftovers(two) == []


def test_nccl_tests_that_hangs_after_its_head_ends_as_unknown(lab: Any, tmp_path: Path) -> None:
    head = (Path(__file__).parent / "tools" / "fixtures" / "nccl-tests" / "header-only-hang.txt").read_text()
    two = lab(2)
    text = two.shared / "head.txt"
    text.write_text(head)
    with boxes(two, tmp_path, instead=f"cat {text}; exec sleep 1000") as file:
        started = time.monotonic()
        found, told = run_all(two, file, Sweep(1 << 20, 1 << 20, join_s=-25.0, timeout_s=1.0, budget_s=0.1))  # 6.4 s in all
    assert time.monotonic() - started < 60
    assert found.whole is not None and "no end within" in found.whole.error
    assert told == {"node01->node02": "unknown"}
    assert leftovers(two) == []


# --------------------------------------------------------------------------- the command


def test_bench_collectives(lab: Any, tmp_path: Path) -> None:
    two = lab(2)
    svg = tmp_path / "bandwidth.svg"
    words = ("--cluster", str(two.cluster_file), "bench", "collectives", "--op", "all_reduce", "--op", "reduce_scatter")
    done = r4090c(*words, "--max-bytes", "2M", "--svg", str(svg), "--json", timeout=600)
    assert done.returncode == Exit.OK, done.stderr
    told = json.loads(done.stdout)
    assert (told["schema"], told["nodes"], told["backend"]) == ("r4090c.bench-collectives/1", ["node01", "node02"], "gloo")
    assert [(one["op"], one["ranks"], [row["wrong"] for row in one["rows"]]) for one in told["results"]] == [
        ("all_reduce", 2, [0, 0]),
        ("reduce_scatter", 2, [0, 0]),
    ]
    assert [row["bytes"] for row in told["results"][0]["rows"]] == [1 << 20, 1 << 21]
    assert svg.read_text().count("<polyline") == 2
    alone = r4090c("--cluster", str(two.cluster_file), "bench", "collectives", "--nodes", "1", "--max-bytes", "1M", timeout=120)
    assert alone.returncode == Exit.OK, alone.stderr
    assert alone.stdout.startswith("lab: all_reduce, 2 ranks on 1 nodes, gloo") and "█" in alone.stdout
    assert leftovers(two) == []


def test_bench_collectives_says_what_is_in_its_way(mended_lab4: Lab) -> None:
    base = ("--cluster", str(mended_lab4.cluster_file), "bench", "collectives")
    for words, code, text in (
        (("--backend", "nccl"), Exit.USAGE, "no GPU answers on node01"),
        (("--min-bytes", "2M", "--max-bytes", "1M"), Exit.USAGE, "is more than --max-bytes"),
        (("--min-bytes", "many"), Exit.USAGE, "is not a size like"),
        (("--nodes", "node09"), Exit.USAGE, "node09"),
    ):
        done = r4090c(*base, *words)
        assert (done.returncode, text in done.stderr) == (code, True), done.stderr
        assert done.stdout == ""
    mended_lab4.stop_sshd("node02")
    done = r4090c(*base, "--nodes", "node01,node02")
    assert done.returncode == Exit.UNKNOWN and done.stderr.startswith("error: node02:")
