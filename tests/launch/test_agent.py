"""The parts of the agent, with real sockets, files and processes of this machine; whole attempts are in test_lab_launch.py."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch import agent
from launch.agent import Gang, Peer, StartError

LAUNCH = Path(agent.__file__).parent
TOKEN = "the token"


@pytest.mark.parametrize("name", ["agent.py", "hang.py", "leases.py", "rank.py"])
def test_what_runs_on_the_nodes_is_python_3_8_and_imports_the_standard_library_only(name: str) -> None:
    tree = ast.parse((LAUNCH / name).read_text(), feature_version=(3, 8))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module.partition(".")[0] for module in imported} <= set(sys.stdlib_module_names)


def test_the_agent_can_be_asked_without_being_there() -> None:
    """`Shell.ask` runs the source in a bare namespace, without a file and without a module."""
    space: dict[str, Any] = {"__name__": "r4090c_node"}
    exec(compile((LAUNCH / "agent.py").read_text(), "r4090c", "exec"), space)
    assert space["main"]({"do": "prepare", "tree": "/nonexistent", "ports": 1})["digest"] is None
    assert space["main"]({"do": "state", "run_id": "none", "node": "none"}) is None
    with pytest.raises(ValueError, match="unknown request"):
        space["main"]({"do": "dance"})


# ------------------------------------------------------------------------------------------ processes


@pytest.fixture
def sleeper() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Yield a function that starts a process of ours; all are gone after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str = "import time; time.sleep(60)", **options: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", code], **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def until(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_zombie_tells_how_it_ended(sleeper: Callable[..., subprocess.Popen[bytes]]) -> None:
    killed, left = sleeper(), sleeper("import sys; sys.exit(7)")
    killed.kill()
    for process, code in ((killed, -9), (left, 7)):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended and stays a zombie
        found = agent.stat_of(process.pid)
        assert found is not None and found.parent == os.getpid() and found.state == "Z" and not agent.living(found)
        assert agent.exit_code(found.exit_status) == code
    assert agent.stat_of(2**22 + 1) is None


def test_a_pidfd_wakes_when_the_process_ends(sleeper: Callable[..., subprocess.Popen[bytes]]) -> None:
    process = sleeper()
    descriptor = agent.pidfd(process.pid)
    assert descriptor is not None and not os.get_inheritable(descriptor)
    assert select.select([descriptor], [], [], 0)[0] == []
    process.kill()
    assert select.select([descriptor], [], [], 10)[0] == [descriptor]
    os.close(descriptor)
    assert agent.pidfd(2**22 + 1) is None


def test_marked_finds_by_environment_and_account(sleeper: Callable[..., subprocess.Popen[bytes]]) -> None:
    run = f"run-{os.getpid()}"
    one = sleeper(env={**os.environ, agent.MARK_RUN: run, agent.MARK_NODE: "node01"})
    two = sleeper(env={**os.environ, agent.MARK_RUN: run, agent.MARK_NODE: "node02"})
    sleeper(env={**os.environ, agent.MARK_RUN: run + "0", agent.MARK_NODE: "node01"})
    until(lambda: sorted(agent.marked(run)) == sorted([one.pid, two.pid]))
    assert agent.marked(run, "node02") == [two.pid]
    assert agent.marked(run, "node03") == []


def test_end_all_is_polite_first_and_then_not(sleeper: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    stubborn = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open(%r, 'a').close(); time.sleep(60)"
    hard, soft = sleeper(stubborn % str(ready)), sleeper()
    until(ready.exists)
    pids = [hard.pid, soft.pid]
    began = time.monotonic()
    left = agent.end_all(lambda: [pid for pid in pids if agent.living(agent.stat_of(pid))], 0.5)
    assert left == []
    assert 0.4 < time.monotonic() - began < 30
    assert agent.end_all(list, 60) == []


def test_a_reused_pid_is_not_the_agent() -> None:
    me = agent.stat_of(os.getpid())
    assert me is not None
    assert agent.is_alive({"pid": os.getpid(), "start": me.start})
    assert not agent.is_alive({"pid": os.getpid(), "start": me.start - 1})
    assert not agent.is_alive({"pid": os.getpid()})
    assert not agent.is_alive(None)


TORCHRUN_LOG = """
W1130 02:27:59.1 4242 torch/distributed/elastic/multiprocessing/api.py:1027] Sending process 57 closing signal SIGTERM
E1130 02:27:59.4 4242 torch/distributed/elastic/api.py:1001] failed (exitcode: -9) local_rank: 3 (pid: 56) of binary: /v/python
E1130 02:28:00.0 4242 failed (exitcode: 1) local_rank: 0 (pid: 53) of binary: /v/python
"""


def test_what_torchrun_logs() -> None:
    assert agent.failed_rank(TORCHRUN_LOG) == (3, 56, -9)
    assert agent.failed_rank("all is well") is None
    assert agent.CLOSING in TORCHRUN_LOG
    match = agent.SIGNALLED.search("torch.distributed.elastic.multiprocessing.api.SignalException: Process 12 got signal: 15")
    assert match is not None and match.group(1) == "15"


# ------------------------------------------------------------------------------------------ files


def test_a_lock_is_for_one(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    with agent.held(path, 1):
        with pytest.raises(TimeoutError, match="another start or stop"), agent.held(path, 0.1):
            pass
        freed: list[float] = []

        def wait() -> None:
            with agent.held(path, 10):
                freed.append(time.monotonic())

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.1)
        assert not freed
    thread.join(10)
    assert freed


def test_what_hangs_is_given_up(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # opening it waits for a writer
    assert agent.within(0.2, lambda: agent.tail(str(pipe), 10), "nothing") == "nothing"
    assert agent.within(5, lambda: 7, 0) == 7
    os.close(os.open(pipe, os.O_WRONLY))  # lets the thread end


def test_files_that_are_not_whole(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    for text in ("", "{", "[1]", "\xff", "null"):
        path.write_text(text)
        assert agent.read_json(str(path)) is None
    agent.write_text(str(path), '{"a": "ü"}')
    assert agent.read_json(str(path)) == {"a": "ü"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]
    with pytest.raises(OSError, match="nowhere"):
        agent.write_text(str(tmp_path / "nowhere" / "x"), "")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=12), max_size=6))
def test_lines_of_a_growing_file_come_once_and_whole(tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("log") / "0.log"
    got, offset = [], 0
    with path.open("wb", buffering=0) as log:
        for chunk in chunks:
            log.write(chunk)
            lines, offset, _ = agent.new_lines(str(path), offset)
            got += lines
    lines, offset, _ = agent.new_lines(str(path), offset, whole=True)
    got += lines
    whole = b"".join(chunks)
    expected = whole.decode(errors="replace").split("\n") if whole.isascii() else [
        piece.decode(errors="replace") for piece in whole.split(b"\n")
    ]  # fmt: skip
    assert [line for line, _ in got] == (expected[:-1] if expected[-1] == "" else expected)
    assert offset == len(whole)
    for index, (_, after) in enumerate(got):  # a follower that comes back with any offset misses nothing and gets nothing twice
        again, *_ = agent.new_lines(str(path), after, whole=True)
        assert again == got[index + 1 :]


def test_a_line_without_end_does_not_block_what_follows(tmp_path: Path) -> None:
    path = tmp_path / "0.log"
    path.write_bytes(b"x" * (2 * agent.MOST_LINE + 10) + b"\nnext\n")
    got, offset, more = [], 0, True
    while more:
        lines, offset, _ = agent.new_lines(str(path), offset)
        got += [line for line, _ in lines]
        more = bool(lines)
    assert [len(line) for line in got] == [agent.MOST_LINE, agent.MOST_LINE, 10, 4]
    path.write_bytes(b"anew\n")  # shorter than before
    assert agent.new_lines(str(path), offset)[0] == [("anew", 5)]
    assert agent.new_lines(str(tmp_path / "none"), 3) == ([], 3, None)


def test_a_file_in_the_place_of_another_is_read_from_its_beginning_however_long_it_is(tmp_path: Path) -> None:
    """A resumed run drops the steps behind its checkpoint, and has written the first anew before anybody looks."""
    path, anew = tmp_path / "metrics.jsonl", tmp_path / "metrics.jsonl.tmp"
    path.write_bytes(b"1\n2 old\n")
    _, offset, inode = agent.new_lines(str(path), 0)
    anew.write_bytes(b"1\n2 new\n3\n")
    anew.replace(path)
    lines, offset, inode = agent.new_lines(str(path), offset, inode=inode)
    assert [line for line, _ in lines] == ["1", "2 new", "3"]
    assert agent.new_lines(str(path), offset, inode=inode)[0] == []


# ------------------------------------------------------------------------------------------ the gang


def plan_of(*names: str, start_timeout_s: float = 60.0, lease_s: float = 60.0) -> dict[str, Any]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    gang = {"address": "127.0.0.1", "port": port, "lease_s": lease_s, "start_timeout_s": start_timeout_s}
    return {"nodes": [{"name": name} for name in names], "attempt": 1, "gang": gang}


class Gangs:
    """The gangs of several nodes in one process, and the events each was told."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.events: dict[str, list[dict[str, Any]]] = {}
        self.all: dict[str, Gang] = {}

    def add(self, name: str, token: str = TOKEN) -> Gang:
        self.events[name] = []
        self.all[name] = Gang(self.plan, name, token, self.events[name].append)
        self.all[name].open()
        return self.all[name]

    def step(self, until_: Callable[[], Any], timeout_s: float = 60.0) -> None:
        """Let all of them talk until the condition holds."""
        deadline = time.monotonic() + timeout_s
        while not until_():
            assert time.monotonic() < deadline
            for gang in self.all.values():
                gang.exchange(0.005)


@pytest.fixture
def gangs() -> Iterator[Callable[..., Gangs]]:
    made: list[Gangs] = []

    def make(*names: str, **times: float) -> Gangs:
        made.append(Gangs(plan_of(*names, **times)))
        return made[-1]

    yield make
    for each in made:
        for gang in each.all.values():
            gang.close(0)


def met(group: Gangs) -> bool:
    return set(group.all["a"]._peers) == set(group.all) - {"a"}


def test_what_a_member_says_before_it_reaches_the_lead_is_not_lost(gangs: Callable[..., Gangs]) -> None:
    group = gangs("a", "b")
    member = group.add("b")
    member.tell_lead({"event": {"kind": "started"}})
    member.exchange(0)  # nobody listens yet
    member.tell({"done": True})
    group.add("a")
    group.step(lambda: "b" in group.all["a"].done)
    assert [event["kind"] for event in group.events["a"]] == ["started"]
    assert group.events["a"][0]["received"] > 0


def test_a_long_event_arrives_although_the_network_takes_it_in_pieces(gangs: Callable[..., Gangs]) -> None:
    group = gangs("a", "b")
    group.add("a")
    member = group.add("b")
    group.step(lambda: met(group))
    member._peers["a"].connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    member.tell_lead({"event": {"log_tail": "x" * 900_000}})
    assert member._peers["a"].unsent
    member.tell_lead({"event": {"log_tail": "y"}})
    group.step(lambda: len(group.events["a"]) == 2)
    assert [len(event["log_tail"]) for event in group.events["a"]] == [900_000, 1]


def test_the_end_reaches_all_and_also_who_comes_late(gangs: Callable[..., Gangs]) -> None:
    group = gangs("a", "b", "c")
    lead, first = group.add("a"), group.add("b")
    group.step(lambda: "b" in lead._peers)
    cause = {"kind": "rank-failed", "node": "b"}
    first.tell({"ending": cause})
    group.step(lambda: lead.ending == cause)
    lead.tell({"ending": cause})
    late = group.add("c")
    group.step(lambda: late.ending == cause)


def test_a_lead_that_ends_waits_for_who_is_late_and_a_member_that_fails_early_is_heard(gangs: Callable[..., Gangs]) -> None:
    group = gangs("a", "b")
    member = group.add("b")
    cause = {"kind": "start-failed", "node": "b"}
    member.tell_lead({"event": cause})
    member.tell({"ending": cause})
    closing = threading.Thread(target=member.close, args=(10,))
    closing.start()
    time.sleep(0.2)  # the lead's agent starts later
    lead = Gang(group.plan, "a", TOKEN, group.events.setdefault("a", []).append)
    lead.open()
    group.all = {"a": lead}
    group.step(lambda: lead.ending == cause)
    lead.tell({"ending": cause})
    began = time.monotonic()
    lead.close(10)
    closing.join(10)
    assert not closing.is_alive()
    assert time.monotonic() - began < 9
    assert [event["kind"] for event in group.events["a"]] == ["start-failed"]


def test_a_member_that_goes_is_lost_and_one_that_was_done_is_not(gangs: Callable[..., Gangs]) -> None:
    group = gangs("a", "b", "c")
    lead, one, two = (group.add(name) for name in "abc")
    group.step(lambda: met(group))
    assert lead.loss() is None
    one.tell({"done": True})
    group.step(lambda: "b" in lead.done)
    one.close(0)
    del group.all["b"]
    group.step(lambda: lead._peers["b"].closed)
    assert lead.loss() is None
    two.close(0)
    del group.all["c"]
    group.step(lambda: lead._peers["c"].closed)
    loss = lead.loss()
    assert loss is not None and (loss.kind, loss.peer) == ("agent-lost", "c")


@pytest.mark.parametrize("said", [False, True])
def test_a_lead_that_goes_is_lost_but_not_after_it_said_that_all_are_done(gangs: Callable[..., Gangs], said: bool) -> None:
    group = gangs("a", "b")
    lead, member = group.add("a"), group.add("b")
    group.step(lambda: met(group))
    if said:
        lead.all_done = True
        lead.tell({"all_done": True})
    del group.all["a"]
    closing = threading.Thread(target=lead.close, args=(5,))
    closing.start()
    group.step(lambda: member._peers["a"].closed)
    assert (member.loss() is None) == said
    assert member.all_done == said
    member.close(1)
    closing.join(6)
    assert not closing.is_alive()


def test_silence_is_a_lost_node(gangs: Callable[..., Gangs]) -> None:
    group = gangs("a", "b", lease_s=0.3)
    lead, member = group.add("a"), group.add("b")
    group.step(lambda: met(group))
    time.sleep(0.35)  # neither speaks
    member_loss, lead_loss = member.loss(), lead.loss()
    assert member_loss is not None and (member_loss.kind, member_loss.peer) == ("node-lost", "a")
    assert lead_loss is not None and (lead_loss.kind, lead_loss.peer) == ("node-lost", "b")


def test_who_stood_still_itself_hears_the_others_before_it_judges_them(
    gangs: Callable[..., Gangs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual machine that was paused, or both of them: on waking, nothing has come in yet."""
    group = gangs("a", "b", lease_s=5.0)
    lead, member = group.add("a"), group.add("b")
    group.step(lambda: met(group))
    assert lead.loss() is None and member.loss() is None
    now, slept_s = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now() + slept_s)
    slept_s = 60.0
    assert lead.loss() is None and member.loss() is None
    for _ in range(4):  # the lead goes on looking, the member has gone
        slept_s += 1.5
        loss = lead.loss()
    assert loss is not None and (loss.kind, loss.peer) == ("node-lost", "b")


def test_who_never_comes_is_lost(gangs: Callable[..., Gangs]) -> None:
    group = gangs("a", "b", start_timeout_s=0.2)
    lead = group.add("a")
    lead.exchange(0)
    assert lead.loss() is None
    time.sleep(0.25)
    loss = lead.loss()
    assert loss is not None and (loss.kind, loss.peer) == ("node-lost", "b")
    assert "did not reach the lead in 0.2 s" in loss.detail
    other = gangs("a", "b", start_timeout_s=0.2)
    member = other.add("b")
    member.exchange(0)
    time.sleep(0.25)
    loss = member.loss()
    assert loss is not None and (loss.kind, loss.peer) == ("node-lost", "a")
    assert "Connection refused" in loss.detail


def test_strangers_are_shown_the_door(gangs: Callable[..., Gangs], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "STRANGER_S", 0.3)
    group = gangs("a", "b", "c")
    lead = group.add("a")
    hello = {"hello": "b", "token": TOKEN, "attempt": 1}
    wrong = [
        b"",  # says nothing: is let go after a while
        b"\x00\xff\n",
        b"x" * (agent.MOST_LINE + 70_000),
        *(json.dumps(each).encode() + b"\n" for each in (
            [hello], {}, {**hello, "token": "x"}, {**hello, "attempt": 2}, {**hello, "hello": "z"}, {**hello, "hello": "a"},
            {**hello, "token": None}, {"ending": {"kind": "stopped"}}, {"done": True},
        )),
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        strangers = []
        for greeting in wrong:
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", group.plan["gang"]["port"])))
            stranger.setblocking(False)
            strangers.append(stranger)
            sent = 0
            while sent < len(greeting):
                with contextlib.suppress(BlockingIOError):
                    sent += stranger.send(greeting[sent:])
                lead.exchange(0.001)
        group.step(lambda: not lead._strangers)
        assert (lead._peers, lead.done, lead.ending) == ({}, set(), None)
        for stranger in strangers:
            stranger.settimeout(5)
            assert ends(stranger)
    member = group.add("b")
    group.step(lambda: "b" in lead._peers)
    with socket.create_connection(("127.0.0.1", group.plan["gang"]["port"])) as double:
        double.sendall(json.dumps(hello).encode() + b"\n")
        double.settimeout(0.01)
        group.step(lambda: ends(double))
    assert not lead._peers["b"].closed and not member._peers["a"].closed


def ends(connection: socket.socket) -> bool:
    try:
        return connection.recv(4096) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def test_a_port_that_is_taken_or_an_address_that_is_not_ours_is_told(gangs: Callable[..., Gangs]) -> None:
    group = gangs("a", "b")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        group.plan["gang"]["port"] = taken.getsockname()[1]
        with pytest.raises(StartError, match=r"port 127\.0\.0\.1:\d+, where the agents meet, was taken"):
            group.add("a")
    group.plan["gang"]["address"] = "192.0.2.1"
    with pytest.raises(StartError, match=r"192\.0\.2\.1 is not an address of a"):
        group.add("a")
    group.all.clear()


def test_a_node_alone_has_no_gang(gangs: Callable[..., Gangs]) -> None:
    group = gangs("a")
    alone = group.add("a")
    began = time.monotonic()
    alone.exchange(0.05)
    assert time.monotonic() - began >= 0.05
    assert alone.loss() is None and alone.all_done
    alone.close(60)
    assert time.monotonic() - began < 50


# ------------------------------------------------------------------------------------------ one connection


def pair() -> tuple[Peer, Peer]:
    left, right = tcp_pair()
    for each in (left, right):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return Peer(left, "left"), Peer(right, "right")


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        return left, server.accept()[0]


def heard(by: Peer, *, flushing: Peer | None = None, count: int | None = None) -> list[dict[str, Any]]:
    """Return what comes in: `count` messages, or all until the other side has ended."""
    got: list[dict[str, Any]] = []

    def enough() -> bool:
        if flushing is not None:
            flushing.flush()
        got.extend(by.receive())
        return by.closed if count is None else len(got) >= count

    until(enough)
    return got


def test_a_message_that_the_socket_takes_in_pieces_arrives_whole() -> None:
    left, right = pair()
    sent = [{"event": {"log_tail": letter * 200_000}} for letter in "abc"]
    for message in sent:
        left.send(message)
    assert left.unsent  # the buffers are small
    assert heard(right, flushing=left, count=3) == sent
    assert not left.unsent
    left.close()
    right.close()


def test_a_peer_that_reads_nothing_does_not_fill_our_memory() -> None:
    left, right = pair()
    for _ in range(50):
        left.send({"event": "x" * 100_000})
    assert len(left._out) < agent.MOST_UNSENT + 200_000
    left.close()
    right.close()


def test_what_was_said_before_a_reset_is_heard_even_when_we_tried_to_answer() -> None:
    left, right = pair()
    right.send({"ending": {"kind": "rank-failed"}})
    time.sleep(0.05)
    right.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    right.close()  # a reset, as when a process dies with something unread
    time.sleep(0.05)
    left.send({"beat": 1})
    left.send({"beat": 2})
    assert heard(left) == [{"ending": {"kind": "rank-failed"}}]
    left.close()


def test_end_of_file_after_messages() -> None:
    left, right = pair()
    left.send({"a": 1})
    left.finish()
    left.send({"b": 2})  # too late
    assert heard(right) == [{"a": 1}]
    left.close()
    right.close()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=8))
def test_any_bytes_are_messages_or_nothing(chunks: list[bytes]) -> None:
    left, right = tcp_pair()
    peer = Peer(right)
    for chunk in chunks:
        left.sendall(chunk)
    left.close()
    messages = heard(peer)
    assert all(isinstance(message, dict) for message in messages)
    assert len(messages) == b"".join(chunks).count(b"\n")
    peer.close()


# ------------------------------------------------------------------------------------------ the shared copy


def test_what_could_not_be_written_is_written_later(tmp_path: Path) -> None:
    log = tmp_path / "torchrun.log"
    log.write_bytes(b"first\n")
    run = tmp_path / "run"
    run.write_text("in the way")  # a file where the folder should be
    copy = agent.SharedCopy(str(run), "node01", 2, str(log))
    copy.put('{"n": 1}', [{"kind": "started"}])
    time.sleep(0.3)
    run.unlink()
    with log.open("ab") as handle:
        handle.write(b"second\n")
    copy.put('{"n": 2}', [{"kind": "finished"}])
    until(lambda: (run / "events.jsonl").exists())
    copy.put('{"n": 3}', last=True)
    copy.join(30)
    assert (run / "agents" / "node01.json").read_text() == '{"n": 3}'
    assert [json.loads(line)["kind"] for line in (run / "events.jsonl").read_text().splitlines()] == ["started", "finished"]
    assert (run / "attempt_2" / "torchrun-node01.log").read_bytes() == b"first\nsecond\n"


def test_signals_have_the_numbers_we_think() -> None:
    assert (signal.SIGKILL, signal.SIGTERM, signal.SIGABRT) == (9, 15, 6)


def test_who_was_named_at_the_start_supervises_though_another_asks_first(tmp_path: Path) -> None:
    """The lead's start names the supervisor; its follower takes the lock a second later, and nobody else meanwhile."""
    named, other = {"id": "a", "who": "kim"}, {"id": "b", "who": "sam"}
    (tmp_path / agent.SUPERVISOR).write_text(json.dumps({**named, "expected": True}))
    looker = agent.Claim(str(tmp_path), other)
    seen = looker.holder()
    assert seen is not None and seen["who"] == "kim"
    first = agent.Claim(str(tmp_path), named)
    assert first.holder() == named
    assert looker.holder() == named, "its lock is held"
    assert first._lock is not None
    os.close(first._lock)
    assert looker.holder() == other, "it came, and has gone: nobody waits for it"


TOLD_BY_TORCHRUN = "E1130 18:07:29.300 1113 api.py:1002] failed (exitcode: -9) local_rank: 0 (pid: 1117) of binary: python\n"


@pytest.mark.parametrize(
    ("changes", "text", "expected"),
    [
        ({}, TOLD_BY_TORCHRUN, -9),
        ({}, "nothing yet", None),
        ({"gone": None}, TOLD_BY_TORCHRUN, None),  # we have ended it
        ({"exit": 1}, TOLD_BY_TORCHRUN, None),  # that is told already
        ({"pid": 7}, TOLD_BY_TORCHRUN, None),
    ],
)
def test_a_rank_whose_exit_code_torchrun_took_is_told_when_others_noticed_sooner(
    changes: dict[str, Any], text: str, expected: int | None
) -> None:
    """Else a peer's "Connection reset by peer" was named, and not the kill that it came of."""
    found = agent.unread_exit({"1": {"pid": 1117, "start": 1, "gone": 49.2, "exit": None, **changes}}, text)
    assert (found and (found[0], found[1]["exit"])) == (expected and ("1", expected))


def test_who_was_named_and_never_came_is_not_waited_for(tmp_path: Path) -> None:
    """A controller that died between its start and its follower."""
    path = tmp_path / agent.SUPERVISOR
    path.write_text(json.dumps({"id": "a", "who": "kim", "expected": True}))
    os.utime(path, (time.time() - agent.NAMED_S - 1,) * 2)
    other = {"id": "b", "who": "sam"}
    assert agent.Claim(str(tmp_path), other).holder() == other


def test_who_cannot_write_its_name_has_the_lock_all_the_same(tmp_path: Path) -> None:
    """A full /tmp: whoever supervised before is gone, though its name still stands there."""
    path = tmp_path / agent.SUPERVISOR
    path.write_text(json.dumps({"id": "a", "who": "kim"}))
    in_the_way = tmp_path / (agent.SUPERVISOR + ".tmp")
    in_the_way.mkdir()
    me = {"id": "b", "who": "sam"}
    claim, other = agent.Claim(str(tmp_path), me), agent.Claim(str(tmp_path), {"id": "c", "who": "lee"})
    assert claim.holder() == me
    assert other.holder() != {"id": "c", "who": "lee"}, "the lock is held"
    in_the_way.rmdir()
    assert claim.holder() == me and json.loads(path.read_text()) == me, "it is told as soon as there is room"
    assert other.holder() == me
    claim.let_go()
    assert other.holder() == {"id": "c", "who": "lee"}


def test_the_lock_of_an_attempt_that_has_not_begun_is_for_whom_its_start_names(tmp_path: Path) -> None:
    me, other = {"id": "a", "who": "kim"}, {"id": "b", "who": "sam"}
    looker, first = agent.Claim(str(tmp_path), other), agent.Claim(str(tmp_path), me)
    assert looker.holder(begun=False) is None, "nobody is named yet"
    (tmp_path / agent.SUPERVISOR).write_text(json.dumps({**me, "expected": True}))
    named = looker.holder(begun=False)
    assert named is not None and named["who"] == "kim"
    assert first.holder(begun=False) == me
    assert looker.holder() == me
    first.let_go()
