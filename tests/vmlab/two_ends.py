"""Run a perftest program at both ends of the wire, and look at the nodes with r4090c itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cli import run
from tests.vmlab import VmLab

TIMED_OUT = 124
"""timeout(1)'s exit code for a program it had to end."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How one end ended. `text`: its standard output and error."""

    rc: int
    text: str


def both(lab: VmLab, server: str, client: str, port: int, *, timeout_s: float = 40.0) -> tuple[Ended, Ended]:
    """Run `server` on node01 and, once it listens on `port`, `client` on node02; return how both ended.

    Port and peer are added to the command lines.
    """
    limited = f"timeout -k 3 {timeout_s:g}"
    serving = lab.start("node01", f"{limited} {server} -p {port}")
    # A server that ends at once (port down) never listens: then the client is to find nobody.
    lab.sh("node01", f"timeout 10 sh -c 'until ss -Hltn sport = :{port} | grep -q .; do sleep 0.05; done'", check=False)
    done = lab.sh("node02", f"{limited} {client} -p {port} 10.77.0.1 2>&1", timeout_s=timeout_s + 20, check=False)
    text, _ = serving.communicate(timeout=timeout_s + 20)
    return Ended(serving.returncode, text), Ended(done.returncode, done.stdout)


def preflight(cluster: Path, state: Path, *words: str, timeout_s: float = 200.0) -> tuple[int, list[dict[str, str]]]:
    """Run `r4090c preflight --json`; return its exit code and the findings."""
    code, output, errors = run("preflight", "--cluster", str(cluster), "--json", *words, state=state, timeout_s=timeout_s)
    assert output, errors
    findings: list[dict[str, str]] = json.loads(output)["findings"]
    return code, findings


def facts(cluster: Path, state: Path) -> dict[str, Any]:
    """Run `r4090c facts --json`; return node -> facts."""
    code, output, errors = run("facts", "--cluster", str(cluster), "--json", state=state)
    assert code == 0, errors
    told: dict[str, Any] = json.loads(output)
    return told


def of(findings: list[dict[str, str]], check: str, subject: str) -> list[dict[str, str]]:
    """Return the findings of one check about one node (or what belongs to it)."""
    return [each for each in findings if each["check"] == check and each["subject"].partition("/")[0] == subject]


def worst(findings: list[dict[str, str]], check: str, subject: str) -> dict[str, str]:
    """Return the worst finding of one check about one node."""
    order = ("fail", "unknown", "warn", "skip", "pass")
    return min(of(findings, check, subject), key=lambda each: order.index(each["status"]))
