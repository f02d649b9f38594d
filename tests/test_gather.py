"""Gathering from nodes that answer, stay silent or talk nonsense; this machine plays the nodes that answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from netcheck.gather import NOISE_KEPT, PROBE_SOURCE, gather
from netcheck.raw import Raw, parse_raw
from r4090c.model import Cluster, NodeFacts
from r4090c.remote import Answer, NodeError, Verdict
from tests.facts.local import LocalShell
from tests.facts.samples import FIXTURES, cluster_of


class ScriptedFleet:
    """A remote.Fleet whose nodes are this machine, or fail to be reached as told."""

    def __init__(self, shells: dict[str, Any]) -> None:
        self.shells = shells

    def map(self, function: Callable[[Any], Any], nodes: Iterable[str] | None = None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in self.shells if nodes is None else nodes:
            shell = self.shells[name]
            found[name] = shell if isinstance(shell, NodeError) else function(shell)
        return found


class NonsenseShell(LocalShell):
    def ask(self, source: str, request: object, *, timeout_s: float = 30.0, python: str = "python3") -> Answer:
        return Answer([1, 2], "", 0.0, 1.0)


def known(facts: NodeFacts) -> set[str]:
    return {field.name for field in fields(facts) if field.name != "node" and getattr(facts, field.name).known}


def test_every_node_gets_its_facts_or_its_verdict(tmp_path: Path) -> None:
    cluster = cluster_of(("near", "silent", "odd", "not-asked"), python=str(tmp_path / "no/bin/python"))
    refused = NodeError("silent", Verdict.REFUSED, "10.0.0.2:22 refused the connection", "an sshd listening there", "ssh silent")
    fleet = ScriptedFleet(
        {
            "near": LocalShell(cluster.node("near"), noise="Welcome!" * 1000),
            "silent": refused,
            "odd": NonsenseShell(cluster.node("odd")),
        }
    )
    raw = gather(fleet, cluster, ["near", "silent", "odd"])

    assert json.loads(json.dumps(raw.answers)) == raw.answers
    near, silent, odd = (raw.reach[name] for name in ("near", "silent", "odd"))
    assert (near["verdict"], near["connect_s"], len(near["noise"])) == ("ok", 0.01, NOISE_KEPT)
    assert silent == {
        "verdict": "refused",
        "observed": "10.0.0.2:22 refused the connection; expected an sshd listening there",
        "next_command": "ssh silent",
        "connect_s": None,
        "noise": "",
    }
    assert odd["verdict"] == "lost"

    facts = parse_raw(raw, cluster)
    assert list(facts) == ["near", "silent", "odd"]
    assert known(facts["silent"]) == known(facts["odd"]) == set()
    assert facts["silent"].cpus.error is not None
    assert "refused the connection" in facts["silent"].cpus.error
    assert known(facts["near"]) >= {"os", "user", "cpus", "memory", "limits", "net", "mounts", "disks", "clock", "rdma"}
    assert facts["near"].python.error == f"{tmp_path}/no/bin/python: not there"
    net = facts["near"].net.value
    assert net is not None
    assert set(net.routes) == {"10.10.0.12", "10.10.0.13", "10.10.0.14"}
    assert set(net.names) == {"near", "silent", "odd", "not-asked"}


def test_all_nodes_by_default_and_nodes_given_as_nodes() -> None:
    cluster = cluster_of()
    silence = {name: NodeError(name, Verdict.TIMEOUT, "no answer", "", "") for name in ("node01", "node02")}
    assert list(gather(ScriptedFleet(silence), cluster).reach) == ["node01", "node02"]
    assert list(gather(ScriptedFleet(silence), cluster, cluster.nodes[1:]).reach) == ["node02"]


@pytest.mark.parametrize("shift_s", [-7.25, 0.0, 3600.0])
def test_the_offset_of_a_clock_is_seen_within_its_bound(shift_s: float) -> None:
    cluster = cluster_of(("near",))
    shell = LocalShell(cluster.nodes[0], clock_s=-shift_s)  # the controller's clock is behind by as much
    clock = parse_raw(gather(ScriptedFleet({"near": shell}), cluster), cluster)["near"].clock.value
    assert clock is not None
    assert abs(clock.offset_s - shift_s) <= clock.error_bound_s
    assert 0 < clock.error_bound_s < 5


def test_slow_start_up_files_of_the_login_shell_do_not_blur_the_clock(tmp_path: Path) -> None:
    slow = tmp_path / "python3"
    slow.write_text(f'#!/bin/sh\nsleep 4\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    cluster = cluster_of(("near",))

    class SlowShell(LocalShell):
        def ask(self, source: str, request: object, *, timeout_s: float = 30.0, python: str = "python3") -> Answer:
            return super().ask(source, request, timeout_s=timeout_s, python=str(slow))

    raw = gather(ScriptedFleet({"near": SlowShell(cluster.nodes[0])}), cluster)
    clock = parse_raw(raw, cluster)["near"].clock.value
    assert clock is not None
    assert raw.answers["near"]["received_at_s"] - raw.answers["near"]["sent_at_s"] > 4
    assert abs(clock.offset_s) <= clock.error_bound_s < 2.0


def stand_in(folder: Path, body: str) -> str:
    """Put a program called nvidia-smi into `folder` and return a PATH that finds it first."""
    import os

    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{body}\n")
    tool.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def near_facts(cluster: Cluster) -> NodeFacts:
    return parse_raw(gather(ScriptedFleet({"near": LocalShell(cluster.nodes[0])}), cluster), cluster)["near"]


def test_gpus_of_a_stand_in_for_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    csv = FIXTURES / "query-gpu" / "8x4090-idle-gen1.csv"
    monkeypatch.setenv(
        "PATH", stand_in(tmp_path, f'case $1 in --query-gpu=index*) echo "$@" > {tmp_path}/argv; cat {csv};; *) exit 1;; esac')
    )
    gpus = near_facts(cluster_of(("near",))).gpus.value
    assert gpus is not None
    assert [gpu.pci for gpu in gpus][:2] == ["0000:03:00.0", "0000:1c:00.0"]
    assert (tmp_path / "argv").read_text().startswith("--query-gpu=index,name,uuid,pci.bus_id,")


def test_a_broken_driver_is_an_error_and_a_missing_tool_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (FIXTURES / "query-gpu" / "nvml-version-mismatch.txt").read_text()
    (tmp_path / "said").write_text(text)
    monkeypatch.setenv("PATH", stand_in(tmp_path, f"cat {tmp_path}/said; exit 18"))
    broken = near_facts(cluster_of(("near",))).gpus
    assert (broken.value, broken.absent) == (None, None)
    assert broken.error is not None
    assert "Driver/library version mismatch" in broken.error

    (tmp_path / "nvidia-smi").unlink()
    absent = near_facts(cluster_of(("near",))).gpus
    assert (absent.value, absent.error, absent.absent) == (None, None, "nvidia-smi")


def test_parse_raw_never_raises_for_what_a_node_said() -> None:
    cluster = cluster_of(("a", "b", "c", "d"))
    ok: Any = {"verdict": "ok", "observed": "", "next_command": "", "connect_s": 0.1, "noise": ""}
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    answers = {"a": "garbage", "b": {"answers": 7}, "c": {"answers": {"os": deep, "net": {"files": deep}}}, "stranger": {}}
    raw = Raw("2026-11-30T00:00:00+00:00", dict.fromkeys(("a", "b", "c", "d", "stranger"), ok), answers)
    facts = parse_raw(raw, cluster)
    assert list(facts) == ["a", "b", "c", "d"]
    assert not any(known(node) for node in facts.values())


def test_the_clusters_order_wins_and_strangers_are_left_out() -> None:
    cluster = cluster_of(("a", "b"))
    lost: Any = {"verdict": "lost", "observed": "gone", "next_command": "", "connect_s": None, "noise": ""}
    raw = Raw("", {"b": lost, "z": lost, "a": lost}, {})
    assert list(parse_raw(raw, cluster)) == ["a", "b"]
    assert list(parse_raw(raw, replace(cluster, nodes=cluster.nodes[::-1]))) == ["b", "a"]


def test_the_probe_travels_as_its_file_says() -> None:
    assert Path(__file__).resolve().parents[1].joinpath("netcheck/probe.py").read_text() == PROBE_SOURCE
