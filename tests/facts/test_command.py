"""`r4090c facts` as a person runs it: against real SSH on this machine, against a node that refuses, and from a bundle."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from netcheck.bundle import save_bundle
from netcheck.facts import FACTS
from netcheck.raw import Raw
from r4090c.errors import Exit
from tests.facts.samples import HERE, cluster_of, csv_answer, probe_result

RUN = "from r4090c.cli import main; main()"
SSHD = shutil.which("sshd", path="/usr/sbin:/sbin:/usr/bin:/bin")


def facts(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    plain = {key: value for key, value in os.environ.items() if key not in ("R4090C_CLUSTER", "COLUMNS", "FORCE_COLOR")}
    root = str(Path(__file__).resolve().parents[2])
    return subprocess.run(
        [sys.executable, "-c", RUN, "facts", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
        env={**plain, "PYTHONPATH": root, **env},
    )


def golden(fact: str, case: str) -> Any:
    return json.loads((HERE / fact / f"{case}.json").read_text())["answer"]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle of three nodes: one with everything, one that refused, one whose driver and Python are broken."""
    cluster = cluster_of(("node01", "node02", "node03"))
    good = {
        "os": golden("os", "debian"),
        "user": golden("user", "plain"),
        "cpus": golden("cpus", "offline-and-cpuset"),
        "memory": golden("memory", "server"),
        "limits": golden("limits", "unlimited-and-finite"),
        "net": golden("net", "data-and-management"),
        "mounts": golden("mounts", "escapes-and-order"),
        "disks": golden("disks", "nfs-not-made-yet-and-hung"),
        "clock": golden("clock", "timesyncd-90-ms-ahead"),
        "python": golden("python", "venv"),
        "rdma": golden("rdma", "two-roce-ports-one-down"),
        "gpus": golden("gpus", "two-with-numa"),
        "kernel": golden("kernel", "ubuntu-server"),
        "shm_files": golden("shm_files", "none"),
        "blocked": golden("blocked", "none"),
        "edac": golden("edac", "two-controllers"),
        "caches": golden("caches", "nfs-home"),
        "toolchain": golden("toolchain", "cuda-12.4"),
        "qos": golden("qos", "not-asked"),
        "rdma_mtu": golden("rdma_mtu", "not-asked"),
        "pci": golden("pci", "server"),
        "gpu_topology": golden("gpu_topology", "numa-not-told"),
        "gpu_p2p": golden("gpu_p2p", "stock"),
        "gpu_detail": golden("gpu_detail", "one-busy"),
        "gpu_processes": golden("gpu_processes", "none"),
        "kernel_log": golden("kernel_log", "fell-off-the-bus"),
    }
    whole = probe_result("os", {}, {"time_ns_received": 1000_130_000_000, "time_ns_sent": 1000_150_000_000})
    complete = {name: {"files": {}, "errors": {}, "natives": {}, "command": None, **answer} for name, answer in good.items()}
    odd = {**complete, "gpus": {**complete["gpus"], **csv_answer("Failed to initialize NVML: Unknown Error\n", rc=255)}}
    odd["python"] = {**complete["python"], **golden("python", "missing")}
    ok: Any = {"verdict": "ok", "observed": "answered in 0.1 s", "next_command": "", "connect_s": 0.1, "noise": ""}
    refused = {**ok, "verdict": "refused", "observed": "refused [it]", "next_command": "ssh node02", "connect_s": None}
    reach: Any = {"node01": ok, "node02": refused, "node03": {**ok, "noise": "Welcome [bold]back\n"}}
    answers = {"node01": {**whole, "answers": complete}, "node03": {**whole, "answers": odd}}
    save_bundle(tmp_path / "b.tar.gz", cluster, Raw("2026-11-30T00:00:00+00:00", reach, answers))
    return tmp_path / "b.tar.gz"


def test_the_table_shows_every_node_and_what_could_not_be_read(bundle: Path) -> None:
    done = facts("--from", str(bundle), cwd=bundle.parent)
    assert done.returncode == Exit.UNKNOWN
    text = done.stdout
    for words in (
        "debian 12",
        "6.1.0-18-amd64",
        "AMD EPYC 9474F",
        "4 cores, 6 CPUs, 1 socket, 1 NUMA node",
        "only 2 CPUs allowed",
        "2 CPUs offline",
        "504 GiB",
        "2 × RTX 4090",
        "8 wanted",
        "driver 570.124.06",
        "ens5f0np0 10.10.0.11/24",
        "mtu 9000, 100 Gbit/s",
        "no route to 1 of 2 peers",
        "mlx5_10:1 ACTIVE 25 Gbit/s",
        "torch 2.13.0+cu126",
        "deepspeed 0.19.8",
        "+110 ± 20 ms",
        "systemd-timesyncd",
        "node02 did not answer (refused): refused [it]",
        "next: ssh node02",
        "node03 gpus could not be read: Failed to initialize NVML: Unknown Error",
        "node03 python could not be read: /opt/r4090c/venv/bin/python: not there",
        "node03 its login shell prints: Welcome [bold]back",
    ):
        assert words in text, words
    assert "\x1b" not in text, "colour although nobody looks"
    assert done.stderr == ""


def test_json_has_every_fact_of_every_node(bundle: Path) -> None:
    done = facts("--from", str(bundle), "--json", cwd=bundle.parent)
    assert done.returncode == Exit.UNKNOWN
    report = json.loads(done.stdout)
    assert set(report) == {"schema", "cluster", "started_at", "nodes"}
    assert report["schema"] == "r4090c.facts/1"
    assert list(report["nodes"]) == ["node01", "node02", "node03"]
    for name, node in report["nodes"].items():
        assert list(node["facts"]) == list(FACTS), name
        for fact in node["facts"].values():
            assert set(fact) == {"value", "error", "absent"}
            assert sum(part is not None for part in fact.values()) == 1
    assert report["nodes"]["node01"]["facts"]["gpus"]["value"][1]["pci"] == "0000:c1:00.0"
    assert all("refused" in fact["error"] for fact in report["nodes"]["node02"]["facts"].values())


def test_chosen_nodes_decide_the_exit_code(bundle: Path) -> None:
    done = facts("--from", str(bundle), "--nodes", "node01,node03", cwd=bundle.parent)
    assert done.returncode == Exit.OK
    assert "node02" not in done.stdout


@pytest.mark.parametrize(
    "arguments", [["--from", "none.tar.gz"], ["--from", "b.tar.gz", "--save", "c.tar.gz"], ["--nodes", "no"], []]
)
def test_usage_errors(arguments: list[str], bundle: Path) -> None:
    done = facts(*arguments, cwd=bundle.parent)
    assert done.returncode == Exit.USAGE
    assert done.stdout == ""
    assert done.stderr.startswith("error:")


def test_nodes_that_refuse_are_told_and_exit_3(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(
        "name: here\n"
        "ssh: {port: 1, user: nobody, config: '', known_hosts: []}\n"
        "nodes:\n"
        "  - {name: node01, address: 127.0.0.1, gpus: 0}\n"
        "network: {kind: loopback}\n"
        f"paths: {{shared: {tmp_path}, python: {sys.executable}}}\n"
    )
    done = facts("--json", "--save", "b.tar.gz", cwd=tmp_path)
    assert done.returncode == Exit.UNKNOWN, done.stderr
    report = json.loads(done.stdout)
    assert report["nodes"]["node01"]["reach"]["verdict"] == "refused"
    assert "kept in b.tar.gz" in done.stderr
    again = facts("--json", "--from", "b.tar.gz", cwd=tmp_path)
    assert (again.returncode, json.loads(again.stdout)) == (Exit.UNKNOWN, report)


@pytest.fixture
def loopback() -> Iterator[Path]:
    if SSHD is None:
        pytest.skip("openssh-server is not installed")
    from provision.loopback import LoopbackCluster

    with LoopbackCluster(nodes=2) as cluster_file:
        yield Path(cluster_file)


def test_real_ssh_to_two_nodes_on_this_machine(loopback: Path, tmp_path: Path) -> None:
    done = facts("--cluster", str(loopback), "--json", "--save", str(tmp_path / "b.tar.gz"), cwd=tmp_path)
    assert done.returncode == Exit.OK, done.stderr
    report = json.loads(done.stdout)
    assert [node["reach"]["verdict"] for node in report["nodes"].values()] == ["ok", "ok"]
    for node in report["nodes"].values():
        assert node["facts"]["os"]["value"]["kernel"] == os.uname().release
        clock = node["facts"]["clock"]["value"]
        assert abs(clock["offset_s"]) <= clock["error_bound_s"], "one machine has one clock"
    again = facts("--from", str(tmp_path / "b.tar.gz"), "--json", cwd=tmp_path)
    assert json.loads(again.stdout) == report
