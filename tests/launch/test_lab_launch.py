"""Real attempts on lab nodes: every way to fail ends everywhere, is rightly named, and leaves nothing behind.

The faults of ranks, torchrun and links run under the real torchrun. What only concerns the agents runs under a stand-in
for it that needs no torch (scripts/quick_python) and so costs a second, not six.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from launch.jobs import find_run, list_runs
from launch.supervise import Outcome, Supervisor, stop_run
from launch.sync import our_files, sync
from netcheck.facts.cpus import parse_cpu_list, ranges
from r4090c.errors import TrainingFailed
from r4090c.remote import Fleet, NodeError
from tests.lab import Lab
from tests.launch.attempts import Bench, assert_nothing_left, kill, pids, until

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]

ENDS_WITHIN_S = 60.0
LOST_WITHIN_S = 90.0


# ------------------------------------------------------------------------------------------ it ends well


def test_a_real_gloo_job_on_two_nodes(bench: Bench) -> None:
    attempt = bench.start(bench.plan("ring.py", "4"))
    assert attempt.outcome(60) == Outcome("done", None)
    assert "step 3" in attempt.watcher.lines
    allowed = bench.facts["node01"].cpus.value
    assert allowed is not None
    assert f"rank 0 of 2 on node01, CPUs {list(attempt.plan.nodes[0].ranks[0].cpus)}: grüß Gott ✓" in attempt.watcher.lines
    assert set(attempt.plan.nodes[0].ranks[0].cpus) <= set(allowed.allowed)
    for node in ("node01", "node02"):
        state = attempt.agent(node)
        assert (state["end"]["outcome"], state["end"]["cause"]) == ("done", None)
        for placed in state["placement"].values():  # torchrun changes nothing that was planned
            assert placed["differs"] == [] and placed["variables"] > 10
        assert len(state["placement"]) == 1
        assert [event["kind"] for event in state["events"] if event["node"] == node] == ["started", "finished"]
    assert sorted((event["node"], event["kind"]) for event in attempt.events()) == [
        ("node01", "finished"),
        ("node01", "started"),
        ("node02", "finished"),
        ("node02", "started"),
    ]
    plan = json.loads(Path(attempt.paths.plan).read_text())
    assert plan["nodes"][0]["torchrun"] == list(attempt.plan.nodes[0].torchrun)
    assert not Path(attempt.paths.diagnosis).exists()
    run = find_run(bench.fleet, bench.cluster, attempt.plan.run_id)
    assert (run.state, run.cause, run.nodes) == ("done", None, ("node01", "node02"))


def test_ranks_have_the_planned_cpus_and_environment_and_the_agents_say_so(bench: Bench) -> None:
    attempt = bench.start(bench.plan("wait.py", "8", nproc=2, real=False, env={"HF_TOKEN": "hf_secret", "WORDS": "a b=c"}))
    attempt.wait_for("waits")
    for node in attempt.plan.nodes:
        found = {}
        for pid in pids(bench.lab, node.name, "rank"):
            text = bench.lab.exec(node.name, "cat", f"/proc/{pid}/environ").stdout
            variables = dict(entry.partition("=")[::2] for entry in text.split("\0") if entry)
            status = bench.lab.exec(node.name, "cat", f"/proc/{pid}/status").stdout
            allowed = next(line.split()[1] for line in status.splitlines() if line.startswith("Cpus_allowed_list:"))
            found[variables["RANK"]] = variables, parse_cpu_list(allowed)
        assert sorted(found) == [str(rank.rank) for rank in node.ranks]
        for rank in node.ranks:
            variables, cpus = found[str(rank.rank)]
            planned = {name: var.value for name, var in {**node.env, **rank.env}.items()}
            assert {name: variables.get(name) for name in planned} == planned
            assert cpus == rank.cpus
    # Two ranks on the machine's cores: each has its own, where there are two.
    assert len({rank.cpus for rank in attempt.plan.nodes[0].ranks}) == min(2, len(os.sched_getaffinity(0)))
    assert attempt.outcome(240) == Outcome("done", None)
    assert {event["kind"] for event in attempt.watcher.events} == {"started", "finished"}
    for node in attempt.plan.nodes:
        placement = attempt.agent(node.name)["placement"]
        for rank in node.ranks:
            assert parse_cpu_list(placement[str(rank.rank)]["cpus"]) == rank.cpus
            assert placement[str(rank.rank)]["differs"] == []
            assert placement[str(rank.rank)]["variables"] >= len({*node.env, *rank.env})
    assert find_run(bench.fleet, bench.cluster, attempt.plan.run_id).placement == "4 of 4 ranks read back are as planned"


def test_what_is_not_as_planned_is_a_warning_and_the_run_goes_on(bench: Bench) -> None:
    """A training Python that is a script of the site's, as conda's and containers' are: it changes the ranks of one node."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one CPU: nothing to bind elsewhere")
    first = min(os.sched_getaffinity(0))
    wrapper = bench.lab.shared / "site_python"
    lines = (
        "#!/bin/sh",
        f'case "$1" in -*) exec {bench.lab.shared}/quick_python "$@";; esac',  # torchrun and the rank wrapper
        "unset HF_TOKEN; export OMP_NUM_THREADS=7 WORDS=http://me:word@proxy",
        f'exec taskset -c {first} {bench.lab.shared}/quick_python "$@"',
    )
    wrapper.write_text("\n".join(lines) + "\n")
    wrapper.chmod(0o755)
    env = {"HF_TOKEN": "hf_secret", "WORDS": "a b=c"}
    attempt = bench.start(bench.plan("wait.py", "8", nproc=2, real=False, env=env, python={"node02": str(wrapper)}))
    assert attempt.outcome(240) == Outcome("done", None)
    told = [
        (event["node"], event["rank"], event["what"], event["planned"], event["actual"])
        for event in attempt.watcher.events
        if event["kind"] == "placement-differs"
    ]
    variables = {
        (rank, *what)
        for rank in (2, 3)
        for what in (("HF_TOKEN", "***", "not set"), ("OMP_NUM_THREADS", "1", "7"), ("WORDS", "a b=c", "***"))
    }
    elsewhere = ranges(attempt.plan.nodes[1].ranks[1].cpus)
    assert sorted(told) == sorted(("node02", *one) for one in {*variables, (3, "CPUs", elsewhere, str(first))})
    assert sorted(event["kind"] for event in attempt.events()).count("placement-differs") == len(told)
    written = "".join(path.read_text() for path in Path(attempt.plan.run_dir).rglob("*") if path.is_file())
    assert "hf_secret" not in written and "me:word" not in written
    run = find_run(bench.fleet, bench.cluster, attempt.plan.run_id)
    assert run.placement == "2 of 4 ranks read back are as planned; ranks 2, 3 differ"


def test_without_affinity_the_ranks_may_run_everywhere(bench: Bench) -> None:
    attempt = bench.start(bench.plan("wait.py", "6", nodes=1, nproc=2, real=False, affinity=False))
    assert attempt.outcome(240) == Outcome("done", None)
    placement = attempt.agent("node01")["placement"]
    assert [parse_cpu_list(placement[rank]["cpus"]) for rank in ("0", "1")] == [tuple(sorted(os.sched_getaffinity(0)))] * 2
    assert [placement[rank]["differs"] for rank in ("0", "1")] == [[], []]


def test_ranks_of_one_node_alone_that_leave_one_after_the_other(bench: Bench) -> None:
    attempt = bench.start(bench.plan("wait.py", "6", "exit", "1", "0", nodes=1, nproc=2, real=False))
    assert attempt.outcome(240) == Outcome("done", None)
    assert attempt.watcher.lines == [f"rank 0 waits in {attempt.plan.code.tree}/user"]
    ranks = attempt.agent("node01")["ranks"]
    assert all(record["gone"] and record["exit"] in (0, None) for record in ranks.values())  # None: torchrun took it first
    assert ranks["1"]["gone"] < ranks["0"]["gone"]


def test_a_torchrun_that_is_stopped_does_not_keep_a_run_that_is_done_from_ending(bench: Bench) -> None:
    attempt = bench.start(bench.plan("wait.py", "8", real=False))
    attempt.wait_for("waits in")
    kill(bench.lab, "node02", "torchrun", signal_name="STOP")
    assert attempt.outcome(120) == Outcome("done", None)
    assert sorted(event["kind"] for event in attempt.events()) == ["finished", "finished", "started", "started"]


def test_a_detached_run_ends_well_by_itself(bench: Bench) -> None:
    plan = bench.plan("wait.py", "2", real=False)
    with Fleet(bench.cluster.nodes) as fleet:
        supervisor = Supervisor(fleet, plan, "token")
        supervisor.start({})
        assert find_run(fleet, bench.cluster, plan.run_id).state == "running"
    del supervisor
    until(lambda: find_run(bench.fleet, bench.cluster, plan.run_id).state == "done", "it did not end by itself", 15)
    ends = [json.loads(path.read_text())["end"]["outcome"] for path in sorted(Path(plan.run_dir, "agents").glob("*.json"))]
    assert ends == ["done", "done"]
    assert plan.run_id in [run.id for run in list_runs(bench.fleet, bench.cluster)]


# ------------------------------------------------------------------------------------------ it fails


@dataclass(frozen=True)
class Fault:
    """What is done to a running attempt, and what must be said of it."""

    name: str
    script: tuple[str, ...]
    strike: Callable[[Lab], None]
    node: str
    rank: int | None
    kind: str
    says: str
    real: bool = True
    within_s: float = ENDS_WITHIN_S


def killing(node: str, *whats: str, signal_name: str = "KILL") -> Callable[[Lab], None]:
    return lambda lab: kill(lab, node, *whats, signal_name=signal_name)


def cutting(node: str) -> Callable[[Lab], None]:
    return lambda lab: lab.cut(node)


def nothing(lab: Lab) -> None:
    """The script does it itself."""


RING, WAIT = ("ring.py", "9999"), ("wait.py", "300")
FAULTS = (
    Fault("kill-rank", RING, killing("node02", "rank"), "node02", 1, "rank-killed", "was killed by SIGKILL"),
    Fault("rank-raises", (*RING, "raise", "1"), nothing, "node02", 1, "rank-failed", "ValueError: the test asked for it"),
    Fault("terminate-rank", WAIT, killing("node02", "rank", signal_name="TERM"), "node02", 1, "rank-killed", "by SIGTERM"),
    Fault("kill-torchrun", WAIT, killing("node02", "torchrun"), "node02", None, "torchrun-killed", "ended by SIGKILL"),
    Fault(
        "terminate-torchrun", WAIT, killing("node01", "torchrun", signal_name="TERM"), "node01", None, "torchrun-killed", "TERM"
    ),
    Fault("kill-all", WAIT, killing("node02", "agent", "torchrun", "rank"), "node02", None, "agent-killed", "on node02 died"),
    Fault("rank-exits-3", (*WAIT, "exit", "0", "3"), nothing, "node01", 0, "rank-failed", "exited with code 3", real=False),
    Fault("kill-lead-agent", WAIT, killing("node01", "agent"), "node01", None, "agent-killed", "on node01 died", real=False),
    Fault("kill-member-agent", WAIT, killing("node02", "agent"), "node02", None, "agent-killed", "on node02 died", real=False),
    Fault("cut-lead", WAIT, cutting("node01"), "node01", None, "node-lost", "node01 was lost", False, LOST_WITHIN_S),
    Fault("cut-member", WAIT, cutting("node02"), "node02", None, "node-lost", "node02 was lost", False, LOST_WITHIN_S),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_ends_the_attempt_everywhere_and_is_named(bench: Bench, fault: Fault) -> None:
    lab = bench.lab
    attempt = bench.start(bench.plan(*fault.script, real=fault.real))
    attempt.wait_for("step 2" if fault.script[0] == "ring.py" else "waits")
    struck = time.monotonic()
    fault.strike(lab)
    try:
        outcome = attempt.outcome(fault.within_s)
        took_s = time.monotonic() - struck
        cause = outcome.cause
        assert cause is not None and outcome.outcome == "failed"
        assert (cause.node, cause.rank, cause.kind) == (fault.node, fault.rank, fault.kind), (cause, attempt.watcher.events)
        assert fault.says in cause.summary
        assert not outcome.left
        # On a node that is cut off, too, nothing of it goes on: its own agent's lease has ended it.
        assert_nothing_left(lab, fault.within_s - took_s + 5)
        assert attempt.diagnosis()["summary"] == cause.summary
    finally:
        lab.heal(fault.node)
    both = ["node01", "node02"]
    stopped = stop_run(bench.fleet, attempt.plan.run_id, both, "the test")
    assert (dict(stopped.left), list(stopped.unreachable)) == ({}, [])
    assert stop_run(bench.fleet, attempt.plan.run_id, both, "the test") == stopped
    run = find_run(bench.fleet, bench.cluster, attempt.plan.run_id)
    assert run.state == "failed"
    assert run.cause is not None and fault.node in run.cause


def test_a_port_for_the_ranks_that_is_taken_is_told(bench: Bench) -> None:
    _, free = sync(bench.fleet, ["node01"], str(bench.lab.shared), our_files())
    with holding(bench.lab, "node01", free.master):
        attempt = bench.start(bench.plan("wait.py", "300", ports=free))
        cause = attempt.outcome(240).cause
    assert cause is not None
    assert (cause.node, cause.kind) == ("node01", "port-taken")
    assert f"port {free.master}" in cause.summary


def test_a_port_for_the_agents_that_is_taken_is_told(bench: Bench) -> None:
    _, free = sync(bench.fleet, ["node01"], str(bench.lab.shared), our_files())
    with holding(bench.lab, "node01", free.gang):
        attempt = bench.start(bench.plan("wait.py", "300", real=False, ports=free))
        cause = attempt.outcome(120).cause
    assert cause is not None
    assert (cause.node, cause.kind) == ("node01", "port-taken")
    assert f":{free.gang}, where the agents meet, was taken" in cause.summary


@pytest.mark.parametrize("node", ["node01", "node02"])
def test_a_training_python_that_is_missing_is_told(bench: Bench, node: str) -> None:
    attempt = bench.start(bench.plan("wait.py", "300", real=False, python={node: "/nowhere/python"}))
    cause = attempt.outcome(ENDS_WITHIN_S).cause
    assert cause is not None
    assert (cause.node, cause.kind) == (node, "start-failed")
    assert "/nowhere/python (paths.python): No such file or directory" in cause.summary


def test_a_rank_that_fails_before_it_is_known_is_named_by_torchruns_log(bench: Bench) -> None:
    plan = bench.plan("wait.py", "300", real=False)
    Path(plan.run_dir, "attempt_1", "1.log").mkdir(parents=True)  # the wrapper cannot open the rank's log
    attempt = bench.start(plan)
    cause = attempt.outcome(ENDS_WITHIN_S).cause
    assert cause is not None
    assert (cause.node, cause.rank, cause.kind) == ("node02", 1, "rank-failed")
    assert "IsADirectoryError" in cause.summary
    assert attempt.agent("node02")["ranks"] == {}
    until(lambda: "IsADirectoryError" in Path(attempt.paths.torchrun_log(1, "node02")).read_text(), "torchrun's log is not kept")


def test_a_training_python_without_torch_is_told(bench: Bench) -> None:
    attempt = bench.start(bench.plan("wait.py", "300", real=False, python={"node02": "/usr/bin/env"}))
    cause = attempt.outcome(ENDS_WITHIN_S).cause
    assert cause is not None
    assert (cause.node, cause.kind) == ("node02", "torchrun-failed")


# ------------------------------------------------------------------------------------------ it is stopped


def test_stop_while_it_runs_leaves_nothing(bench: Bench) -> None:
    attempt = bench.start(bench.plan("wait.py", "300", real=False))
    attempt.wait_for("waits")
    began = time.monotonic()
    assert attempt.supervisor.stop("somebody (Ctrl-C)").left == {}
    assert time.monotonic() - began < ENDS_WITHIN_S
    assert_nothing_left(bench.lab)
    run = find_run(bench.fleet, bench.cluster, attempt.plan.run_id)
    assert (run.state, run.cause) == ("stopped", "stopped by somebody (Ctrl-C)")


def test_stop_by_another_controller_is_told_to_the_one_that_follows(bench: Bench) -> None:
    attempt = bench.start(bench.plan("wait.py", "300", real=False))
    attempt.wait_for("waits")
    with Fleet(bench.cluster.nodes) as other:
        assert stop_run(other, attempt.plan.run_id, ["node01", "node02"], "a colleague").left == {}
    outcome = attempt.outcome(60)
    assert outcome.outcome == "stopped"
    assert outcome.cause is not None and outcome.cause.summary == "stopped by a colleague"


def test_stop_right_after_the_start_leaves_nothing(bench: Bench) -> None:
    supervisor = Supervisor(bench.fleet, bench.plan("wait.py", "300"), "token")
    supervisor.start({})
    assert supervisor.stop("somebody").left == {}  # torchrun is still importing
    assert_nothing_left(bench.lab)


def test_a_start_that_comes_after_its_stop_is_refused(bench: Bench) -> None:
    plan = bench.plan("wait.py", "300", real=False)
    supervisor = Supervisor(bench.fleet, plan, "token")
    supervisor.stop("somebody impatient")
    with pytest.raises(TrainingFailed, match="stopped by somebody impatient before it started"):
        supervisor.start({})
    assert_nothing_left(bench.lab)
    with pytest.raises(TrainingFailed):  # said twice, too
        supervisor.start({})


def test_a_second_start_of_a_running_run_is_refused_and_does_not_disturb_it(bench: Bench) -> None:
    attempt = bench.start(bench.plan("wait.py", "8", real=False))
    attempt.wait_for("waits")
    with pytest.raises(TrainingFailed, match="attempt 1 of this run still goes on here"):
        Supervisor(bench.fleet, replace(attempt.plan, attempt=2), "another token").start({})
    assert attempt.outcome(120) == Outcome("done", None)


def test_ctrl_c_while_the_agents_are_being_started_leaves_nothing(bench: Bench) -> None:
    plan = bench.plan("wait.py", "300", real=False)
    profiles = [bench.lab.home(node) / ".bashrc" for node in ("node01", "node02")]
    try:
        for profile in profiles:
            profile.write_text("sleep 1\n")  # so that there is time to interrupt the start
        threading.Timer(0.5, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            Supervisor(bench.fleet, plan, "token").start({})
    finally:
        for profile in profiles:
            profile.unlink()
    assert_nothing_left(bench.lab)


# ------------------------------------------------------------------------------------------ the surroundings misbehave


def test_a_lost_ssh_connection_is_not_a_lost_node(bench: Bench) -> None:
    attempt = bench.start(bench.plan("wait.py", "6", real=False))
    attempt.wait_for("waits")
    with pytest.raises(NodeError):
        bench.fleet.shell("node01").run(["sh", "-c", "kill -9 $PPID; sleep 5"])  # the sshd that serves us and the follower
    assert attempt.outcome(240) == Outcome("done", None)
    assert [note for note in attempt.watcher.notes if note.startswith("node01: the connection to it broke")]
    assert "node01: answers again" in attempt.watcher.notes
    assert attempt.watcher.lines == [f"rank 0 waits in {attempt.plan.code.tree}/user"]  # no line twice


def test_strangers_at_the_gang_port_do_not_matter(bench: Bench) -> None:
    attempt = bench.start(bench.plan("wait.py", "6", real=False))
    attempt.wait_for("waits")
    greetings = [
        b"",
        b"\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b"\xff" * 100_000,
        b"[" * 100_000 + b"\n",
        b'{"ending": {"kind": "stopped", "node": "node02", "by": "a stranger"}}\n',
        b'{"hello": "node02", "token": "wrong", "attempt": 1}\n{"ending": {"kind": "stopped", "node": "x"}}\n',
        b'{"hello": "node01", "token": null, "attempt": 1}\n',
        *[b""] * 70,
    ]
    with contextlib.ExitStack() as stack:
        for greeting in greetings:
            stranger = stack.enter_context(
                socket.create_connection((attempt.plan.gang.address, attempt.plan.gang.port), timeout=5)
            )
            with contextlib.suppress(ConnectionError):
                stranger.sendall(greeting)
        assert attempt.outcome(120) == Outcome("done", None)
    assert {event["node"] for event in attempt.events()} == {"node01", "node02"}


def test_a_shared_folder_that_hangs_does_not_keep_the_agent_from_ending(bench: Bench) -> None:
    plan = bench.plan("wait.py", "2", real=False)
    agents = Path(plan.run_dir, "agents")
    agents.mkdir(parents=True)
    hanging = agents / "node02.json.tmp"
    bench.lab.exec("node02", "mkfifo", str(hanging))  # opening it for writing hangs, as on an NFS whose server is gone
    attempt = bench.start(plan)
    assert attempt.outcome(240) == Outcome("done", None)
    assert not (agents / "node02.json").exists()


def test_a_full_tmp_does_not_end_the_training(bench: Bench) -> None:
    lab = bench.lab
    attempt = bench.start(bench.plan("wait.py", "8", real=False))
    attempt.wait_for("waits")
    fill = "mount -o remount,size=1m /tmp && ! cat /dev/zero > /tmp/full 2>/dev/null"
    try:
        assert lab.exec("node02", "sh", "-c", fill).returncode == 0
        assert lab.exec("node02", "sh", "-c", "echo x > /tmp/another").returncode != 0
        assert attempt.outcome(240) == Outcome("done", None)
    finally:
        lab.exec("node02", "sh", "-c", "rm -f /tmp/full /tmp/another; mount -o remount,size=16g /tmp")


def test_a_full_tmp_at_the_start_is_told(bench: Bench) -> None:
    lab = bench.lab
    fill = "mount -o remount,size=1m /tmp && ! cat /dev/zero > /tmp/full 2>/dev/null"
    try:
        assert lab.exec("node02", "sh", "-c", fill).returncode == 0
        with pytest.raises(TrainingFailed, match="No space left on device") as caught:
            bench.start(bench.plan("wait.py", "300", real=False))
        assert caught.value.culprit == "node02"
    finally:
        lab.exec("node02", "sh", "-c", "rm -f /tmp/full; mount -o remount,size=16g /tmp")
    assert_nothing_left(lab, 2)


def test_a_login_shell_that_talks_does_not_matter(bench: Bench) -> None:
    profile = bench.lab.home("node02") / ".bashrc"
    profile.write_text("echo 'Welcome to node02!'; echo '{\"line\"'\n")
    try:
        attempt = bench.start(bench.plan("wait.py", "1", real=False))
        assert attempt.outcome(120) == Outcome("done", None)
    finally:
        profile.unlink()


@contextlib.contextmanager
def holding(lab: Lab, node: str, port: int) -> Iterator[None]:
    """Hold a TCP port of a node."""
    script = f"import socket,time; s=socket.create_server(('', {port})); print('held', flush=True); time.sleep(120)"
    holder = subprocess.Popen(lab.exec_argv(node, "python3", "-c", script), stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    try:
        yield
    finally:
        for pid in (pid for pid, line in lab.processes(node) if "create_server" in line):
            lab.kill(node, pid)
        holder.communicate(timeout=10)
