"""The ports measurement: real processes that listen and call each other, as `Shell.ask` would start them."""

from __future__ import annotations

import ast
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from netcheck.measure import nonce, ports
from r4090c.errors import ParseError
from r4090c.model import Node, Paths, Ssh
from tests.facts.local import BOOTSTRAP

WINDOW_S = 5.0
"""Long enough here, where nobody is far away; blocked cases take all of it."""


def nodes(count: int) -> list[Node]:
    return [Node(f"n{i}", Ssh("127.0.0.1"), "127.0.0.1", 0, Paths("/tmp", "/tmp", "python3")) for i in range(count)]


def requests(count: int, seed: int = 7) -> dict[str, dict[str, Any]]:
    """A schedule whose ports are free now: those of a seed may be in use on the machine that runs the tests."""
    for other in range(seed, seed + 100):
        planned = ports.schedule(nodes(count), other)
        if all(is_free(port) for request in planned.values() for port in request["listen"]):
            return {name: {**request, "window_s": WINDOW_S} for name, request in planned.items()}
    raise AssertionError("no free ports")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def start(request: Mapping[str, Any]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", BOOTSTRAP, ports.SOURCE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(request))
    process.stdin.close()
    return process


def run(planned: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Run all nodes at the same time and return their answers."""
    processes = {name: start(request) for name, request in planned.items()}
    answers = {}
    for name, process in processes.items():
        assert process.stdout is not None
        with process.stdout:
            answers[name] = json.loads(process.stdout.read())
        assert process.wait(timeout=60) == 0
    return answers


@contextmanager
def listener(port: int, greeting: bytes = b"") -> Iterator[None]:
    """Hold a port as a foreign program does; it takes connections in its backlog and, unless it greets, says nothing."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", port))
        held.listen(16)
        yield


def not_reached(answers: Mapping[str, Mapping[str, Any]]) -> set[tuple[str, str, int]]:
    return {
        (caller, peer, int(port))
        for caller, answer in answers.items()
        for peer, reached in answer["reached"].items()
        for port, reason in reached.items()
        if reason
    }


def test_everybody_reaches_everybody_and_nobody_waits_for_the_window() -> None:
    planned = requests(3)
    answers = run(planned)
    assert not_reached(answers) == set()
    for name, answer in answers.items():
        assert sorted(answer["bound"]) == sorted(planned[name]["listen"])
        assert {peer: sorted(heard) for peer, heard in answer["heard"].items()} == {
            peer: sorted(planned[name]["listen"]) for peer in planned if peer != name
        }
        assert answer["duration_s"] < WINDOW_S


def test_a_node_that_does_not_listen_is_found_by_all_others() -> None:
    planned = requests(3)
    del planned["n2"]
    answers = run(planned)
    assert {(caller, peer) for caller, peer, _ in not_reached(answers)} == {("n0", "n2"), ("n1", "n2")}
    assert set(answers["n0"]["reached"]["n2"].values()) == {"Connection refused"}


def test_a_port_in_use_is_told_and_does_not_hold_the_others_up() -> None:
    planned = requests(2)
    taken = planned["n0"]["listen"][0]
    with listener(taken):
        answers = run(planned)
    assert list(answers["n0"]["busy"]) == [str(taken)]
    assert answers["n0"]["busy"][str(taken)] == "Address already in use"
    assert not_reached(answers) == {("n1", "n0", taken)}
    assert answers["n1"]["reached"]["n0"][str(taken)] == "not opened there"
    assert all(answer["duration_s"] < WINDOW_S + 1 for answer in answers.values())


def test_another_program_behind_a_port_is_not_taken_for_the_peer() -> None:
    planned = requests(2)
    other = {**planned["n1"], "token": "another"}
    answers = run({"n0": planned["n0"], "n1": other})
    assert {(caller, peer) for caller, peer, _ in not_reached(answers)} == {("n0", "n1"), ("n1", "n0")}


def test_a_node_ends_when_nobody_reads_its_answer() -> None:
    """What Ctrl-C on the controller does: the SSH channel closes, and the ports must be free again soon."""
    planned = requests(2)
    process = start({**planned["n0"], "window_s": 60})
    port = planned["n0"]["listen"][0]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    assert process.stdout is not None
    process.stdout.close()
    process.wait(timeout=60)


@pytest.mark.parametrize("seed", range(5))
def test_high_ports_are_the_kernels_and_all_differ(seed: int) -> None:
    planned = ports.schedule(nodes(16), seed)
    high = [port for request in planned.values() for port in request["listen"]]
    assert len(high) == len(set(high)) == 16 * ports.HIGH_PORTS_A_NODE
    assert all(ports.HIGH_PORTS[0] <= port <= ports.HIGH_PORTS[1] for port in high)
    for name, request in planned.items():
        assert set(request["peers"]) == set(planned) - {name}
        assert all(there["ports"] == planned[peer]["listen"] for peer, there in request["peers"].items())


def test_what_is_kept_is_what_is_read() -> None:
    answers = run(requests(2))
    kept = {"answers": {name: ports.record(answer, 1000.0) for name, answer in answers.items()}}
    read = ports.read(json.loads(json.dumps(kept)))
    assert read["n0"].reached["n1"] == dict.fromkeys(read["n1"].bound, "")
    assert read["n0"].ended_s == 1000.0
    assert 0 < read["n0"].ended_s - read["n0"].started_s < WINDOW_S
    with pytest.raises(ParseError):
        ports.record(["no answer"], 1000.0)


@pytest.mark.parametrize("source", [ports.SOURCE, nonce.SOURCE], ids=["ports", "nonce"])
def test_what_runs_on_a_node_is_python_3_8_and_the_standard_library(source: str) -> None:
    tree = ast.parse(source, feature_version=(3, 8))
    imported = set()
    for item in ast.walk(tree):
        if isinstance(item, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in item.names}
        elif isinstance(item, ast.ImportFrom):
            imported.add((item.module or "").split(".")[0])
    assert imported <= sys.stdlib_module_names
