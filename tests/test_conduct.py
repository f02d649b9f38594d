"""Rounds of jobs on real nodes: who waits for whom, what is told of each end, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netcheck import conduct
from netcheck.conduct import READY_S, SERVER_ENDS_S, carry_out, run_round
from netcheck.measure import job, run_on_node
from netcheck.measure.job import NOT_INSTALLED, Job, Level, Part, Record, Round, Setting, Step, read_rounds
from netcheck.measure.schedule import all_pairs, ring_pairs
from r4090c.errors import ParseError
from r4090c.inventory import load_cluster
from r4090c.remote import EVENT_MARKER, Fleet
from tests.lab import Lab, LabError

GREETER = (
    "import socket,sys;s=socket.create_server(('',int(sys.argv[1])));c=s.accept()[0];"
    "c.sendall(b'hello');c.close();print('greeted')"
)
CALLER = "import socket,sys;c=socket.create_connection((sys.argv[1],int(sys.argv[2])),5);print(c.recv(9).decode())"
LEAVER = (  # leaves a grandchild in a session of its own that ignores TERM, as torchrun's workers may
    "import os,signal,time\n"
    "if os.fork()==0:\n"
    "    os.setsid()\n"
    "    if os.fork()==0:\n"
    "        signal.signal(signal.SIGTERM,signal.SIG_IGN)\n"
    "        time.sleep(600)\n"
    "    os._exit(0)\n"
    "print('left one',flush=True)\n"
)


# --------------------------------------------------------------------------- schedules


@given(st.integers(0, 40))
def test_every_two_meet_once_and_nobody_is_in_two_pairs_of_a_round(count: int) -> None:
    names = [f"n{number}" for number in range(count)]
    rounds = all_pairs(names)
    assert len(rounds) == (0 if count < 2 else count - 1 + count % 2)
    met = [frozenset(pair) for one in rounds for pair in one]
    assert len(met) == len(set(met)) == count * (count - 1) // 2
    for one in (*rounds, *ring_pairs(names)):
        assert len({name for pair in one for name in pair}) == 2 * len(one)


@pytest.mark.parametrize(("count", "rounds"), [(0, 0), (1, 0), (2, 1), (3, 3), (4, 2), (5, 3), (16, 2)])
def test_a_ring_is_two_rounds_or_three(count: int, rounds: int) -> None:
    names = [f"n{number}" for number in range(count)]
    ring = ring_pairs(names)
    assert len(ring) == rounds
    links = {frozenset(pair) for one in ring for pair in one}
    assert links == {frozenset((names[place - 1], names[place])) for place in range(count) if count > 1}


def test_sixteen_nodes_take_fifteen_rounds() -> None:
    assert [len(one) for one in all_pairs([f"node{number:02}" for number in range(16)])] == [8] * 15


def test_both_sides_spell_the_same_words() -> None:
    assert job.NOT_INSTALLED == run_on_node.NOT_INSTALLED
    assert run_on_node.EVENT.strip() + " " == EVENT_MARKER


# --------------------------------------------------------------------------- reading what was kept

GOOD: dict[str, Any] = {
    "level": "full",
    "rounds": [
        [
            {
                "name": "a->b",
                "data": {"sender": "a"},
                "parts": {
                    "a": {
                        "steps": [{"rc": 0, "stdout": "x", "stderr": "", "error": None, "duration_s": 1.5}],
                        "before": {"/c": "1"},
                        "after": {"/c": "2"},
                        "watched": {"log": ["was", "is"]},
                    },
                    "b": {"error": "lost", "next_command": "ssh b", "unreached": True},
                },
            }
        ]
    ],
}


def test_records_are_read_back() -> None:
    ((record,),) = read_rounds(GOOD)
    assert record.parts["a"].steps[0].rc == 0
    assert record.parts["a"].watched == {"log": ("was", "is")}
    assert record.parts["b"].error == "lost"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths_in(item, (*path, key))


@given(st.sampled_from(list(paths_in(GOOD))), JSON)
def test_a_damaged_bundle_is_a_parse_error_and_nothing_else(path: tuple[Any, ...], new: Any) -> None:
    def replaced(value: Any, rest: tuple[Any, ...]) -> Any:
        if not rest:
            return new
        copy = dict(value) if isinstance(value, dict) else list(value)
        copy[rest[0]] = replaced(value[rest[0]], rest[1:])
        return copy

    try:
        for one in read_rounds(replaced(GOOD, path)):
            assert all(isinstance(record, Record) for record in one)
    except ParseError:
        pass


# --------------------------------------------------------------------------- on real nodes


@pytest.fixture
def fleet(mended_lab4: Lab) -> Iterator[Fleet]:
    with Fleet(load_cluster(mended_lab4.cluster_file).nodes) as fleet:
        yield fleet


def python(*words: str, **how: Any) -> Step:
    return Step(("python3", "-c", *words), **{"timeout_s": 60.0, **how})


def only(records: list[dict[str, Any]]) -> Record:
    ((record,),) = read_rounds({"rounds": [records]})
    return record


def nothing_left(lab: Lab) -> bool:
    """Nothing of a measurement is on any node: no process, no folder."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        left = [text for name in lab.nodes for _, text in lab.processes(name)]
        if not left:
            break
        time.sleep(0.1)
    assert left == []
    for name in lab.nodes:
        assert lab.exec(name, "sh", "-c", "ls -d /tmp/r4090c-measure-* 2>/dev/null").stdout == ""
    return True


@pytest.mark.lab
def test_a_client_starts_when_its_server_listens(fleet: Fleet, mended_lab4: Lab) -> None:
    slow = f"import time;time.sleep(1);{GREETER}"
    parts = (
        Part("node01", (python(CALLER, mended_lab4.address("node02"), "41001"),)),
        Part("node02", (python(slow, "41001", listens_on=41001),), counters=("/sys/class/net/*/statistics/tx_packets",)),
    )
    record = only(run_round(fleet, (Job("a", parts, {"sender": "node01"}),), {}))
    assert record.data == {"sender": "node01"}
    (called,), (served,) = record.parts["node01"].steps, record.parts["node02"].steps
    assert (called.rc, called.stdout.strip()) == (0, "hello"), called
    assert (served.rc, served.stdout.strip()) == (0, "greeted")
    packets = "/sys/class/net/eth0/statistics/tx_packets"
    assert int(record.parts["node02"].after[packets]) > int(record.parts["node02"].before[packets])
    assert nothing_left(mended_lab4)


@pytest.mark.lab
def test_a_client_tries_again_while_the_other_side_is_not_ready(fleet: Fleet, mended_lab4: Lab) -> None:
    two = (python(GREETER, "41001", listens_on=41001), python(f"import time;time.sleep(1);{GREETER}", "41002"))
    call = [python(CALLER, mended_lab4.address("node02"), port, retry_on=("Connection refused",)) for port in ("41001", "41002")]
    record = only(run_round(fleet, (Job("a", (Part("node01", tuple(call)), Part("node02", two))),), {}))
    assert [step.rc for step in record.parts["node01"].steps] == [0, 0]
    assert [step.rc for step in record.parts["node02"].steps] == [0, 0]


@pytest.mark.lab
def test_a_server_nobody_calls_is_told_to_end(fleet: Fleet, mended_lab4: Lab) -> None:
    server = python(f"print('waiting',flush=True);{GREETER}", "41001", listens_on=41001, timeout_s=60)
    began = time.monotonic()
    record = only(
        run_round(fleet, (Job("a", (Part("node01", (python("raise SystemExit(7)"),)), Part("node02", (server,)))),), {})
    )
    assert SERVER_ENDS_S <= time.monotonic() - began < 20
    assert record.parts["node01"].steps[0].rc == 7
    (stopped,) = record.parts["node02"].steps
    assert (stopped.rc, stopped.error, stopped.stdout.strip()) == (None, "stopped", "waiting")
    assert nothing_left(mended_lab4)


@pytest.mark.lab
def test_what_is_not_installed_is_told_and_the_rest_is_not_started(fleet: Fleet, mended_lab4: Lab) -> None:
    server = Step(("no-such-tool", "-s"), 5, listens_on=41001)
    record = only(run_round(fleet, (Job("a", (Part("node01", (python("print(1)"),)), Part("node02", (server, server)))),), {}))
    assert [step.error for step in record.parts["node02"].steps] == [NOT_INSTALLED, "not started"]
    assert record.parts["node01"].error == f"not started: node02 {NOT_INSTALLED}"


@pytest.mark.lab
def test_what_a_program_leaves_behind_is_ended(fleet: Fleet, mended_lab4: Lab) -> None:
    record = only(run_round(fleet, (Job("a", (Part("node01", (python(LEAVER), python("print('next')"))),)),), {}))
    first, second = record.parts["node01"].steps
    assert first.stdout.strip() == "left one"
    assert second.stdout.strip() == "next"
    assert nothing_left(mended_lab4)


@pytest.mark.lab
def test_a_program_that_hangs_is_ended_at_its_timeout_with_what_it_said(fleet: Fleet, mended_lab4: Lab) -> None:
    hang = "import signal,time;signal.signal(signal.SIGTERM,signal.SIG_IGN);print('so far',flush=True);time.sleep(99)"
    record = only(run_round(fleet, (Job("a", (Part("node01", (python(hang, timeout_s=5), python("print(1)"))),)),), {}))
    first, second = record.parts["node01"].steps
    assert (first.rc, first.error, first.stdout.strip()) == (None, "no end within 5 s", "so far")
    assert second.error == "not started"
    assert nothing_left(mended_lab4)


@pytest.mark.lab
def test_long_output_keeps_its_beginning_and_its_end(fleet: Fleet) -> None:
    talk = "print('first');[print('x'*1000) for _ in range(3000)];print('last')"
    record = only(run_round(fleet, (Job("a", (Part("node01", (python(talk),)),)),), {}))
    said = record.parts["node01"].steps[0].stdout
    assert said.startswith("first\n")
    assert said.endswith("last\n")
    assert len(said) < 1_100_000


@pytest.mark.lab
def test_files_travel_into_a_folder_that_goes_again(fleet: Fleet, mended_lab4: Lab) -> None:
    part = Part("node01", (Step(("python3", "{folder}/hi.py"), 10),), files={"hi.py": "print('hi', __file__)"})
    record = only(run_round(fleet, (Job("a", (part,)),), {}))
    assert record.parts["node01"].steps[0].stdout.startswith("hi /tmp/r4090c-measure-")
    assert nothing_left(mended_lab4)


@pytest.mark.lab
def test_a_node_that_dies_is_told_and_asked_no_more_and_the_others_go_on(fleet: Fleet, mended_lab4: Lab, tmp_path: Path) -> None:
    cluster = load_cluster(mended_lab4.cluster_file)
    began = time.monotonic()

    class Sleeping:
        NAME, TITLE, LEVEL = "sleeping", "sleeping", Level.FULL

        def plan(self, setting: Setting, done: Any) -> tuple[Round, ...]:
            if not done:
                return (tuple(Job(name, (Part(name, (python("import time;time.sleep(4)"),)),)) for name in ("node01", "node02")),)
            if len(done) == 1:
                mended_lab4.exec("node01", "true")
                return (tuple(Job(name, (Part(name, (python("print('again')"),)),)) for name in ("node01", "node02")),)
            return ()

    def cut(words: str) -> None:
        if "round 1" in words:
            mended_lab4.cut("node02")

    fleet.map(lambda shell: None)  # connected before the cable is pulled
    measured = carry_out(Sleeping(), fleet, Setting(cluster.nodes, {}, cluster, Level.FULL), cut)
    assert time.monotonic() - began < 30
    first, second = read_rounds(measured)
    assert [record.parts[record.name].error == "" for record in first] == [True, False]
    assert "broke" in first[1].parts["node02"].error
    assert second[0].parts["node01"].steps[0].stdout.strip() == "again"
    assert second[1].parts["node02"].error == first[1].parts["node02"].error
    mended_lab4.heal("node02")
    assert nothing_left(mended_lab4)  # the node noticed that its controller was gone


# --------------------------------------------------------------------------- what goes wrong on the nodes


@pytest.mark.lab
def test_a_server_that_ends_without_listening_is_told_at_once_and_why(fleet: Fleet, mended_lab4: Lab) -> None:
    server = python("import sys;sys.exit('unable to listen: Address already in use')", listens_on=41001)
    began = time.monotonic()
    record = only(run_round(fleet, (Job("a", (Part("node01", (python("print(1)"),)), Part("node02", (server,)))),), {}))
    assert time.monotonic() - began < READY_S
    told = "node02 did not listen: unable to listen: Address already in use"
    assert record.parts["node01"].error == f"not started: {told}"
    assert record.parts["node02"].steps[0].rc == 1


@pytest.mark.lab
def test_what_awaits_a_lost_node_is_ended(fleet: Fleet, mended_lab4: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks await the others for a minute or more."""
    waits = python("import time;print('so far',flush=True);time.sleep(60)", timeout_s=90)
    fleet.shell("node01")  # it is to have started when it is told to stop
    monkeypatch.setattr(conduct, "SERVER_ENDS_S", 10.0)
    mended_lab4.stop_sshd("node02")
    began = time.monotonic()
    record = only(run_round(fleet, (Job("a", (Part("node01", (waits,)), Part("node02", (waits,)))),), {}))
    assert time.monotonic() - began < 50
    assert "refused" in record.parts["node02"].error
    assert (record.parts["node01"].steps[0].error, record.parts["node01"].steps[0].stdout) == ("stopped", "so far\n")
    assert nothing_left(mended_lab4)


@pytest.mark.lab
def test_a_node_that_froze_is_given_up_when_the_others_are_done(
    fleet: Fleet, mended_lab4: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conduct, "STOPPED_S", 2.0)
    freeze = "import os,time;os.kill(os.getppid(),19);time.sleep(90)"  # the program that serves stops its own keeper
    server = python(f"import socket,os;s=socket.create_server(('',41001));{freeze}", listens_on=41001, timeout_s=90)
    began = time.monotonic()
    record = only(run_round(fleet, (Job("a", (Part("node01", (python("print(1)"),)), Part("node02", (server,)))),), {}))
    assert time.monotonic() - began < 60
    assert "broke" in record.parts["node02"].error
    for pid, _ in mended_lab4.processes("node02"):
        with contextlib.suppress(LabError):
            mended_lab4.kill("node02", pid, "CONT")
    assert nothing_left(mended_lab4)


@pytest.mark.lab
@pytest.mark.parametrize("says", ["{}", "7", '{"steps": [7]}', '{"steps": [{"rc": 0}]}'])
def test_an_answer_that_is_none_is_told_of_its_node(fleet: Fleet, mended_lab4: Lab, says: str) -> None:
    # It answers when it has read what is sent to it: an end before that would be a broken connection.
    text = f"#!/bin/sh\nhead -n 1 >/dev/null\necho\necho 'R4090C-ANSWER {says}'\n"
    stand_in = mended_lab4.stand_in("node02", "python3", text)
    lost: dict[str, dict[str, Any]] = {}
    try:
        server = python("print(1)", listens_on=41001)
        record = only(run_round(fleet, (Job("a", (Part("node01", (python("print(1)"),)), Part("node02", (server,)))),), lost))
    finally:
        stand_in.unlink()
    assert record.parts["node02"].error.startswith("the node's answer is not understood")
    assert record.parts["node01"].error == "not started: node02 did not listen"
    assert [*lost] == ["node02"]


@pytest.mark.lab
def test_a_daemon_that_holds_the_output_does_not_hold_us(fleet: Fleet, mended_lab4: Lab) -> None:
    daemon = Step(("sh", "-c", "echo said; setsid sh -c 'trap \"\" TERM; sleep 60' & exit 0"), 40)
    began = time.monotonic()
    record = only(run_round(fleet, (Job("a", (Part("node01", (daemon, python("print('next')"))),)),), {}))
    assert time.monotonic() - began < 50
    assert [step.stdout for step in record.parts["node01"].steps] == ["said\n", "next\n"]
    assert nothing_left(mended_lab4)


@pytest.mark.lab
def test_megabytes_of_anything_are_cut_on_the_node(fleet: Fleet) -> None:
    loud = tuple(Step(("head", "-c", "20000000", "/dev/urandom"), 20) for _ in range(8))
    began = time.monotonic()
    record = only(run_round(fleet, (Job("a", (Part("node01", loud),)),), {}))
    assert time.monotonic() - began < 150
    kept = [len(step.stdout) for step in record.parts["node01"].steps]
    assert sum(kept) < 1.5 * run_on_node.PART_CAP_BYTES and min(kept) > 10_000


@pytest.mark.lab
def test_a_node_without_room_for_temporary_files_is_told_once(fleet: Fleet, mended_lab4: Lab) -> None:
    """A name that no file system takes stands for a full one."""
    lost: dict[str, dict[str, Any]] = {}
    part = Part("node01", (python("print(1)"),), files={"x" * 300: ""})
    record = only(run_round(fleet, (Job("a", (part,)),), lost))
    assert record.parts["node01"].error == "no room for temporary files: File name too long"
    assert record.parts["node01"].next_command.endswith("df -h /tmp /var/tmp .")
    assert [*lost] == ["node01"]
    assert nothing_left(mended_lab4)


@pytest.mark.lab
def test_tools_find_their_temporary_files_where_ours_are(fleet: Fleet) -> None:
    record = only(run_round(fleet, (Job("a", (Part("node01", (Step(("sh", "-c", "echo $TMPDIR; pwd"), 5),)),)),), {}))
    told, here = record.parts["node01"].steps[0].stdout.splitlines()
    assert told == here and told.startswith("/tmp/r4090c-measure-")
