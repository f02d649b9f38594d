"""Replies built by hand for the tests of facts: what the probe would have answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from r4090c.model import Cluster, Expect, Network, Node, Paths, Ssh, Storage

HERE = Path(__file__).parent
FIXTURES = HERE / "fixtures"


def cluster_of(names: tuple[str, ...] = ("node01", "node02"), *, python: str = "/opt/r4090c/venv/bin/python") -> Cluster:
    """Return a cluster of nodes at 10.10.0.11, .12, … with 8 GPUs each."""
    paths = Paths(shared="/mnt/shared", runs="/mnt/shared/r4090c/runs", python=python)
    nodes = tuple(
        Node(name=name, ssh=Ssh(address=f"192.168.1.{11 + i}"), data_address=f"10.10.0.{11 + i}", gpus=8, paths=paths)
        for i, name in enumerate(names)
    )
    return Cluster(name="atelier", nodes=nodes, network=Network(), storage=Storage(), expect=Expect())


def probe_result(fact: str, answer: dict[str, Any], stamps: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a whole probe result that holds `answer` to `fact`; what `answer` leaves out is empty."""
    whole = {"files": {}, "errors": {}, "natives": {}, "command": None, **answer}
    times = {
        "sent_at_s": 1000.0,
        "time_ns_received": 1000_040_000_000,
        "time_ns_sent": 1000_050_000_000,
        "received_at_s": 1000.06,
    }
    return {**times, **(stamps or {}), "answers": {fact: whole}}


def csv_answer(stdout: str, *, rc: int | None = 0, stderr: str = "", files: dict[str, str] | None = None) -> dict[str, Any]:
    """Return the answer of a command."""
    return {"files": files or {}, "command": {"rc": rc, "stdout": stdout, "stderr": stderr, "error": None}}
