"""What the agent reads back of its ranks, and what it says of the differences; in real attempts: test_lab_launch.py."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch import agent, env
from launch.agent import Seen, differences, look_at, look_at_script, numbers, ranges, stat_of
from launch.diagnose import first_cause
from netcheck.facts.cpus import parse_cpu_list
from r4090c.cli.follow import told_of

STATUS = """Name:\tpython
Umask:\t0022
Cpus_allowed:\tff00ff
Cpus_allowed_list:\t0-7,16-23
Mems_allowed:\t00000000,00000003
Mems_allowed_list:\t0-1
"""
NUMA_MAPS = """00400000 prefer:1 file=/usr/bin/python3.11 mapped=2 N0=2 kernelpagesize_kB=4
00600000 default anon=1 dirty=1 N0=1 kernelpagesize_kB=4
"""


def process(proc: Path, pid: int, **files: bytes) -> None:
    folder = proc / str(pid)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def test_what_the_kernel_says_of_a_rank(tmp_path: Path) -> None:
    variables = b"RANK=3\0WORDS=a b=c\0EMPTY=\0\xff=\xe9\0NOT A VARIABLE\0"
    process(tmp_path, 41, status=STATUS.encode(), environ=variables, numa_maps=NUMA_MAPS.encode())
    seen = look_at(41, str(tmp_path))
    assert seen == Seen({"RANK": "3", "WORDS": "a b=c", "EMPTY": "", "\udcff": "\udce9"}, "0-7,16-23", "0-1", "prefer:1")


def test_what_cannot_be_read_is_unknown_and_not_a_difference(tmp_path: Path) -> None:
    process(tmp_path, 41, status=b"Name:\tpython\n")  # a kernel without NUMA and CPU sets, a process that hides its memory
    seen = look_at(41, str(tmp_path))
    assert seen == look_at(42, str(tmp_path)) == Seen(None, None, None, None)
    assert differences({"cpus": [0], "memory_node": 1}, {"RANK": "3"}, (), seen) == []


def test_this_very_process() -> None:
    seen = look_at(os.getpid())
    assert seen.cpus is not None and numbers(seen.cpus) == os.sched_getaffinity(0)
    assert seen.environ is not None and seen.environ["PATH"] == os.environ["PATH"]


SEEN = Seen({"RANK": "3", "LOCAL_RANK": "1", "HF_TOKEN": "hf_one"}, "0-7,16-23", "0-1", "prefer:1")
RANK: dict[str, Any] = {"cpus": [0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23], "memory_node": 1}
ENVIRON = {"RANK": "3", "HF_TOKEN": "hf_one"}


def test_a_rank_that_is_as_planned() -> None:
    assert differences(RANK, ENVIRON, ("HF_TOKEN",), SEEN) == []
    unbound: dict[str, Any] = {"cpus": [], "memory_node": None}
    assert differences(unbound, ENVIRON, ("HF_TOKEN",), SEEN) == []  # --no-affinity: whatever it has


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"cpus": "0-3"}, ("CPUs", "0-7,16-23", "0-3")),
        ({"cpus": "0-31"}, ("CPUs", "0-7,16-23", "0-31")),  # not bound at all
        ({"policy": "default"}, ("memory policy", "prefer:1", "default")),
        ({"policy": "bind:1"}, ("memory policy", "prefer:1", "bind:1")),
        ({"memory_nodes": "0", "policy": "default"}, ("NUMA nodes it may have memory of", "1 among them", "0")),
        ({"environ": {**ENVIRON, "RANK": "4"}}, ("RANK", "3", "4")),
        ({"environ": {"RANK": "3"}}, ("HF_TOKEN", "***", "not set")),
        ({"environ": {**ENVIRON, "HF_TOKEN": "hf_two"}}, ("HF_TOKEN", "***", "***")),
        ({"environ": {**ENVIRON, "RANK": "http://me:word@proxy"}}, ("RANK", "3", "***")),
        ({"environ": {**ENVIRON, "RANK": "9" * 300}}, ("RANK", "3", "9" * 200)),
    ],
)
def test_each_difference_is_told_once_and_no_secret_is(change: dict[str, Any], difference: tuple[str, str, str]) -> None:
    found = differences(RANK, ENVIRON, ("HF_TOKEN",), SEEN._replace(**change))
    assert [(one["what"], one["planned"], one["actual"]) for one in found] == [difference]


def test_what_is_a_secret_is_the_same_here_and_in_the_plan() -> None:
    assert agent.URL_PASSWORD.pattern == env.URL_PASSWORD.pattern
    assert agent.HIDDEN == env.HIDDEN


@given(st.sets(st.integers(0, 500)))
def test_lists_as_the_kernel_writes_them(found: set[int]) -> None:
    assert numbers(ranges(found)) == found == set(parse_cpu_list(ranges(found)))


def test_a_difference_is_no_cause_of_an_end() -> None:
    differs = {"time": 1.0, "attempt": 1, "node": "node01", "kind": "placement-differs", "rank": 0, "detail": "rank 0: CPUs"}
    failed = {"time": 9.0, "attempt": 1, "node": "node02", "kind": "rank-failed", "rank": 1, "exit_code": 1, "log_tail": "no"}
    assert first_cause([differs, failed], {}, "run").node == "node02"
    assert first_cause([differs], {}, "run").kind == "unknown"


def test_a_difference_is_shown_as_a_warning() -> None:
    event = {"node": "node01", "kind": "placement-differs", "detail": "rank 0: CPUs: planned 0-3, but it is 0"}
    assert told_of(event) == "warning: node01: placement-differs: rank 0: CPUs: planned 0-3, but it is 0"
    assert told_of({"node": "node01", "kind": "stopped", "detail": "asked to stop"}) == "node01: stopped: asked to stop"


# ------------------------------------------------------------------------------------------ when to look


WRAPPER = "/tree/launch/rank.py"


@pytest.fixture
def becoming() -> Iterator[Callable[[str], tuple[int, int]]]:
    """Yield a function that starts a shell, called like the rank wrapper, with a script; it returns pid and start."""
    started: list[subprocess.Popen[bytes]] = []

    def start(script: str) -> tuple[int, int]:
        started.append(subprocess.Popen(["/bin/sh", "-c", script, WRAPPER], env={**os.environ, "WHO": "the wrapper"}))
        found = stat_of(started[-1].pid)
        assert found is not None
        return started[-1].pid, found.start

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_rank_is_looked_at_once_it_is_the_script(becoming: Callable[[str], tuple[int, int]]) -> None:
    seen = look_at_script(*becoming("sleep 0.3; exec env WHO=script sleep 60"), WRAPPER)
    assert seen is not None and seen.environ is not None
    assert seen.environ["WHO"] == "script"


def test_a_wrapper_around_python_is_given_time_to_become_it(becoming: Callable[[str], tuple[int, int]]) -> None:
    seen = look_at_script(*becoming("exec sh -c 'sleep 0.5; exec env WHO=script sleep 60' sh"), WRAPPER)
    assert seen is not None and seen.environ is not None
    assert seen.environ["WHO"] == "script"


def test_a_script_that_keeps_renaming_itself_is_looked_at_all_the_same(
    becoming: Callable[[str], tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "SCRIPT_S", 1.5)
    script = tmp_path / "renaming"
    script.write_text('#!/bin/sh\nsleep 0.05\nexec "$0" $(($1 + 1))\n')
    script.chmod(0o755)
    seen = look_at_script(*becoming(f"exec env WHO=script {script} 0"), WRAPPER)
    assert seen is not None and seen.environ is not None
    assert seen.environ["WHO"] == "script"


def test_a_rank_that_ends_before_is_not_told_of(becoming: Callable[[str], tuple[int, int]]) -> None:
    pid, start = becoming("sleep 0.1; exec sleep 0.2")
    began = time.monotonic()
    assert look_at_script(pid, start, WRAPPER) is None
    assert time.monotonic() - began < 5
    assert look_at_script(os.getpid(), start - 10**6, WRAPPER) is None  # another process has its pid


def test_a_wrapper_that_never_becomes_the_script_is_given_up(
    becoming: Callable[[str], tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "SETTLED_S", 0.2)
    monkeypatch.setattr(agent, "SCRIPT_S", 1.0)
    pid, start = becoming("sleep 60; true")
    assert look_at_script(pid, start, WRAPPER) is None
