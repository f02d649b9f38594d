"""The torch program for real: its figures, its table, what it says when a rank does not come or stops."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from netcheck.measure import collectives, sweep
from netcheck.tools import nccl_tests

PROGRAM = Path(collectives.__file__)
torch_here = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import importlib.util as u; raise SystemExit(not u.find_spec('torch'))"]).returncode
    != 0,
    reason="needs torch",
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def ranks(count: int, *options: str, of: int | None = None) -> Iterator[list[subprocess.Popen[str]]]:
    """Start `count` of `of` ranks on this machine; what still runs at the end is killed."""
    world = {"WORLD_SIZE": str(of or count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = {**os.environ, **world, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), *options],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def document(stdout: str) -> dict[str, Any]:
    (line,) = [line for line in stdout.splitlines() if line.startswith(collectives.MARKER)]
    found: dict[str, Any] = json.loads(line.removeprefix(collectives.MARKER))
    return found


def test_both_sides_agree_on_the_words() -> None:
    assert sweep.MARKER == collectives.MARKER
    assert set(sweep.PROGRAMS) == set(collectives.OPS)
    assert all(sweep.parse_size(text) == collectives.size_of(text) for text in ("8", "64K", "16M", "1G"))
    for text in ("", "1X", "0", "-1", "1.5M"):
        with pytest.raises(ValueError, match="is not a size"):
            sweep.parse_size(text)


def test_it_stands_alone() -> None:
    lines = PROGRAM.read_text().splitlines()
    imported = [line.split()[1].partition(".")[0] for line in lines if line.strip().startswith(("import ", "from "))]
    assert {name for name in imported if name not in sys.stdlib_module_names} == {"torch"}


@torch_here
@pytest.mark.train
def test_every_collective_with_its_figures_and_its_table() -> None:
    ops = [word for op in collectives.OPS for word in ("--op", op)]
    with ranks(3, *ops, "--min-bytes", "64K", "--max-bytes", "1M", "--factor", "4", "--budget-s", "0.3") as (lead, *others):
        stdout, stderr = lead.communicate(timeout=120)
        assert [process.wait(30) for process in (lead, *others)] == [0, 0, 0], stderr
    told = document(stdout)
    assert (told["backend"], told["world_size"], told["error"], told["wrong_ranks"]) == ("gloo", 3, None, [])
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1, 2]
    assert [(one["op"], one["wrong"]) for one in told["results"]] == [(op, 0) for op in collectives.OPS for _ in range(3)]
    for one in told["results"]:
        factor = (4 / 3) if one["op"] == "all_reduce" else 2 / 3
        assert one["algbw_gbyte_s"] == pytest.approx(one["bytes"] / one["time_us"] / 1e3)
        assert one["busbw_gbyte_s"] == pytest.approx(one["algbw_gbyte_s"] * factor)
        assert one["bytes"] in (65536, 65532, 262144, 262140, 1048576, 1048572)  # gathers take whole shares
        assert bool(one["note"]) == (one["op"] == "reduce_scatter")
    first = "# nThread" + stderr.partition("# nThread")[2].partition("# Collective test starting: all_gather")[0]
    table = nccl_tests.parse(first)
    assert (table.test, table.ranks, table.complete, table.wrong_total) == ("all_reduce_perf", 3, True, 0)
    assert [row.bytes for row in table.rows] == [65536, 262144, 1048576]


@torch_here
@pytest.mark.train
def test_a_rank_that_never_comes_is_told_by_its_number() -> None:
    with ranks(2, "--join-s", "25", of=3) as (lead, other):
        stdout, _ = lead.communicate(timeout=240)
        assert lead.returncode == collectives.TIMED_OUT
        assert other.wait(120) in (collectives.FAILED, collectives.TIMED_OUT)  # told by rank 0, or tired of waiting itself
    error = document(stdout)["error"]
    assert (error["phase"], error["missing"]) == ("awaiting the other ranks", [2])


@torch_here
@pytest.mark.train
def test_a_rank_that_stops_does_not_keep_the_others() -> None:
    """The peer is frozen in the middle: every call of torch would wait; the program does not."""
    with ranks(2, "--min-bytes", "16M", "--max-bytes", "1G", "--iterations", "10000", "--timeout-s", "10") as (lead, other):
        assert lead.stderr is not None
        for line in lead.stderr:
            if "(us)" in line:
                break
        other.send_signal(signal.SIGSTOP)
        frozen_at = time.monotonic()
        stdout, _ = lead.communicate(timeout=240)
        assert time.monotonic() - frozen_at < 120
        assert lead.returncode in (collectives.FAILED, collectives.TIMED_OUT)
    told = document(stdout)
    assert told["error"]["phase"].startswith("all_reduce of ")
    assert len(told["ranks"]) == 2


@torch_here
@pytest.mark.train
def test_under_torchrun() -> None:
    port = free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--node-rank=0", "--nproc-per-node=2"]
    command += ["--rdzv-backend=static", "--master-addr=127.0.0.1", f"--master-port={port}", str(PROGRAM)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([*command, "--max-bytes", "1M"], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert document(done.stdout)["world_size"] == 2


@torch_here
@pytest.mark.train
def test_a_node_starts_its_own_ranks_and_ends_when_one_dies() -> None:
    """One of three ranks on this node is killed: the others tell that, and none is left."""
    world = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    words = ["--local-ranks", "3", "--min-bytes", "16M", "--max-bytes", "1G", "--iterations", "10000", "--timeout-s", "20"]
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), *words],
        env={**os.environ, **world},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None and process.stdout is not None
    for line in process.stderr:
        if "(us)" in line:
            break
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    pids = [int(pid) for pid in children.read_text().split()]
    assert len(pids) == 3
    os.kill(pids[2], signal.SIGKILL)
    stdout = process.stdout.read()
    process.stderr.close()
    assert process.wait(60) in (collectives.FAILED, collectives.TIMED_OUT)
    told = document(stdout)
    assert told["error"]["phase"].startswith("all_reduce of ") and told["world_size"] == 3
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@torch_here
@pytest.mark.train
def test_wrong_data_is_counted_where_it_is() -> None:
    """A backend that delivers a wrong element: the program's own check must see it, on that rank alone."""
    script = (
        "import runpy, sys, os, torch.distributed as dist\n"
        "real = dist.all_reduce\n"
        "def broken(tensor, *rest, **more):\n"
        "    done = real(tensor, *rest, **more)\n"
        "    if os.environ['RANK'] == '1': tensor[7] += 1\n"
        "    return done\n"
        "dist.all_reduce = broken\n"
        f"sys.argv = [{str(PROGRAM)!r}, '--min-bytes', '64K', '--max-bytes', '64K']\n"
        f"runpy.run_path({str(PROGRAM)!r}, run_name='__main__')\n"
    )
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in (0, 1)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert both[0].returncode == collectives.WRONG
    told = document(outputs[0])
    assert (told["wrong_ranks"], [one["wrong"] for one in told["results"]]) == ([1], [1])
