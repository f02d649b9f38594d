"""When a rank counts as hung, what its stack says, and that looking at it ends in time, whatever hangs."""

from __future__ import annotations

import os
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
from hypothesis import given
from hypothesis import strategies as st

from launch import hang
from launch.hang import STARTING, Beat, Hung, Limits, Look, Pulse, Target, Task, Thread, hung_ranks, standing, waits_for_peers

STACKS = Path(__file__).parent / "fixtures" / "stacks"
LIMITS = Limits(floor_s=120.0, factor=10.0, start_s=1800.0)


# ------------------------------------------------------------------------------------------ when a rank hangs


class Clock:
    """A rank that beats and an agent that looks twice a second."""

    def __init__(self, pulse: Pulse) -> None:
        self.pulse, self.now, self.beat = pulse, 1000.0, pulse.beat

    def look(self, seconds: float, every_s: float = 0.5) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += every_s
            self.pulse.take(self.beat, self.now)

    def tell(self, phase: str, step: int) -> None:
        self.beat = Beat(phase, step, self.now + 1e9)
        self.pulse.take(self.beat, self.now)

    def train(self, steps: range, step_s: float) -> None:
        for step in steps:
            self.tell("train", step)
            self.look(step_s)

    def hung(self) -> list[Hung]:
        return hung_ranks({7: self.pulse}, LIMITS)


@pytest.mark.parametrize(("step_s", "limit_s"), [(0.5, 120.0), (2.0, 120.0), (30.0, 300.0)])
def test_a_rank_that_trains_may_be_silent_for_ten_steps_or_the_floor(step_s: float, limit_s: float) -> None:
    clock = Clock(Pulse())
    clock.train(range(5), step_s)
    assert clock.pulse.limit_s(LIMITS) == pytest.approx(limit_s)
    assert not clock.hung()
    clock.look(limit_s - clock.pulse.silent_s - 1)
    assert not clock.hung()
    clock.look(2)
    assert [(one.rank, one.phase, one.step) for one in clock.hung()] == [(7, "train", 4)]
    clock.tell("train", 5)
    assert not clock.hung()


def test_one_slow_step_is_not_the_step_time() -> None:
    clock = Clock(Pulse())
    clock.train(range(1), 100)  # compiles
    clock.train(range(1, 9), 13)
    assert clock.pulse.limit_s(LIMITS) == pytest.approx(130.0)


def test_before_two_steps_and_in_other_phases_the_longer_time_holds() -> None:
    clock = Clock(Pulse())
    for phase, step in (("import", 0), ("init", 0), ("train", 40), ("train", 41)):
        clock.tell(phase, step)
        clock.look(200)
        assert clock.pulse.limit_s(LIMITS) == 1800.0 and not clock.hung()
    clock.train(range(42, 50), 1)
    assert clock.pulse.limit_s(LIMITS) == 120.0
    clock.tell("checkpoint", 50)
    clock.look(1799)
    assert not clock.hung()
    clock.look(2)
    assert [one.phase for one in clock.hung()] == ["checkpoint"]
    clock.tell("train", 51)
    assert clock.pulse.limit_s(LIMITS) == 120.0


def test_the_time_in_a_checkpoint_is_no_steps() -> None:
    clock = Clock(Pulse())
    clock.train(range(2), 1)
    clock.tell("checkpoint", 1)
    clock.look(500)
    clock.tell("train", 2)
    assert clock.pulse.step_time_s() == pytest.approx(1.0)


def test_a_rank_that_starts_over_is_new() -> None:
    clock = Clock(Pulse())
    clock.train(range(10), 1)
    clock.tell("import", 0)
    clock.tell("train", 0)
    assert clock.pulse.limit_s(LIMITS) == 1800.0


def test_who_never_beats_is_not_judged_unless_it_should() -> None:
    for pulse, phases in ((Pulse(), []), (Pulse(STARTING), ["start"])):
        clock = Clock(pulse)
        clock.beat = None
        clock.look(1900)
        assert [one.phase for one in clock.hung()] == phases


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """The agent was frozen itself, perhaps with the whole node: the rank must get the chance to beat again."""
    clock = Clock(Pulse())
    clock.train(range(5), 1)
    clock.now += 10_000
    clock.look(1)
    assert not clock.hung()
    clock.look(120)
    assert clock.hung()


def test_a_stopped_process_is_not_waited_for_until_a_checkpoint_could_be_done() -> None:
    clock = Clock(Pulse())
    clock.tell("train", 1)
    clock.tell("checkpoint", 1)
    clock.look(119)
    assert hung_ranks({7: clock.pulse}, LIMITS, stopped={7}) == []
    clock.look(2)
    assert clock.hung() == []
    assert [(one.rank, one.limit_s) for one in hung_ranks({7: clock.pulse}, LIMITS, stopped={7})] == [(7, 120.0)]


def test_the_most_silent_rank_comes_first() -> None:
    pulses = {}
    for rank, silent_s in ((0, 130.0), (1, 140.0), (2, 50.0)):
        clock = Clock(Pulse())
        clock.train(range(5), 1)
        clock.look(silent_s - clock.pulse.silent_s)
        pulses[rank] = clock.pulse
    assert [one.rank for one in hung_ranks(pulses, LIMITS)] == [1, 0]


@given(st.binary(max_size=60) | st.sampled_from([b'{"phase": "train", "step": true, "time": 1}', b'{"step": 1}', b"[" * 9999]))
def test_any_bytes_are_a_beat_or_none(text: bytes) -> None:
    beat = hang.parse_beat(text)
    assert beat is None or isinstance(beat, Beat)


def test_a_beat_is_read(tmp_path: Path) -> None:
    (tmp_path / "beat-3.json").write_text('{"rank": 3, "phase": "train", "step": 12, "time": 1.5, "mine": []}')
    assert hang.read_beat(str(tmp_path), 3) == Beat("train", 12, 1.5)
    assert hang.read_beat(str(tmp_path), 4) is None


def test_a_plan_of_old_has_no_limits() -> None:
    assert hang.limits_of({}) is None and hang.limits_of({"hang": None}) is None
    assert hang.limits_of({"hang": {"floor_s": 120, "factor": 10, "start_s": 1800}}) == LIMITS


# ------------------------------------------------------------------------------------------ what a stack says


@pytest.mark.parametrize("python", ["3.8", "3.13"])
def test_both_dumps_tell_the_same(python: str) -> None:
    folder = "" if python == "3.8" else "/srv/job/"  # since 3.9 a script's path is absolute
    fault = hang.parse_faulthandler((STACKS / f"faulthandler-python{python}.txt").read_text())
    spy = hang.parse_py_spy((STACKS / f"py-spy-python{python}.txt").read_text())
    for threads, name, qualified in ((fault, r"l\xe4uft_nicht_weiter", ""), (spy, "läuft_nicht_weiter", "Loader.")):
        read = "read" if python == "3.8" else f"{qualified}read"  # py-spy qualifies names since 3.11
        assert hang.main_frames(threads) == [
            f"{folder}job.py:15 {name}",
            f"{folder}job.py:20 {read}",
            f"{folder}job.py:24 <module>",
        ]
        assert [len(thread.frames) for thread in threads if not thread.main] == [4]
    assert [thread.name for thread in spy] == ["MainThread", "helper (1)"]


def test_a_rank_of_train_that_waits_in_a_collective_is_seen_to_wait() -> None:
    """Both dumps are of train/main.py on two ranks, of which the other was stopped."""
    fault = hang.parse_faulthandler((STACKS / "faulthandler-deepspeed.txt").read_text())
    spy = hang.parse_py_spy((STACKS / "py-spy-deepspeed.txt").read_text())
    for threads in (fault, spy):
        frames = hang.main_frames(threads)
        assert frames[0] == "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:3252 all_reduce"
        assert frames[-1].endswith("/train/main.py:246 <module>") and len(frames) == 24
        assert waits_for_peers(threads)
        assert len(threads) == 3
    places = [[frame.split()[0] for frame in hang.main_frames(threads)] for threads in (fault, spy)]
    assert places[0] == places[1]


def test_other_lines_of_the_log_do_not_matter_and_names_of_threads_may_come() -> None:
    """Python 3.14 tells the names of threads; other threads go on printing meanwhile."""
    text = (
        'loss 1.2\nThread 0x00007f06 [watchdog] (most recent call first):\n  File "/a.py", line 1 in wait\nstep 7\n\n'
        'Current thread 0x00007f07 [python] (most recent call first):\n  File "/b.py", line ??? in run\n  ...\n'
        'Traceback (most recent call last):\n  File "/c.py", line 3, in <module>\n'
    )
    assert hang.parse_faulthandler(text) == [Thread("watchdog", False, ["/a.py:1 wait"]), Thread("python", True, ["/b.py:? run"])]


@given(
    st.text(max_size=300)
    | st.lists(st.sampled_from(['  File "', '", line 3 in f', "Thread 1", "    f (x:1)", "\n"])).map("".join)
)
def test_any_text_is_threads_or_none(text: str) -> None:
    for threads in (hang.parse_faulthandler(text), hang.parse_py_spy(text)):
        assert isinstance(waits_for_peers(threads), bool)


@pytest.mark.parametrize(
    ("frames", "line", "waits"),
    [
        (
            ["/v/torch/distributed/distributed_c10d.py:3219 all_reduce", "/v/torch/distributed/c10d_logger.py:83 wrapper"],
            "",
            True,
        ),
        (["/v/torch/distributed/rendezvous.py:280 _create_c10d_store"], "", True),
        (["/v/torch/cuda/__init__.py:1100 synchronize", "/t/train/timing.py:9 stop"], "", True),
        (["/v/torch/autograd/graph.py:825 _engine_run_backward", "/v/torch/_tensor.py:648 backward"], "", True),
        (["/v/deepspeed/comm/torch.py:160 all_reduce"], "", True),
        (["/t/train/loop.py:240 train"], "value = loss.item()", True),
        (["/t/train/loop.py:240 train"], "work.wait()", True),
        (["/t/train/loop.py:240 train"], "time.sleep(60)  # not work.wait()", False),
        (["/t/train/loop.py:240 train"], "", False),
        (["/v/torch/utils/data/dataloader.py:1285 _try_get_data"], "data = self._data_queue.get(timeout=timeout)", False),
        (["/usr/lib/python3.12/threading.py:359 wait", "/t/job.py:3 main"], "waiter.acquire()", False),
        (["/t/job.py:3 reads", "/v/torch/distributed/distributed_c10d.py:3219 all_reduce"], "data = handle.read()", False),
        ([], "", False),
    ],
)
def test_who_waits_for_peers(frames: list[str], line: str, waits: bool) -> None:
    threads = [Thread("other", False, ["/t/x.py:1 f"]), Thread("main", True, frames)]
    assert waits_for_peers(threads, line) is waits


def test_a_thread_that_waits_for_a_device_both_times_tells_for_the_process() -> None:
    main, writer = Task(5, "python", "S", "futex_wait"), Task(6, "writer", "D", "nfs_wait_on_request")
    assert standing([main, writer], [main, writer]) == ("D", "nfs_wait_on_request")
    assert standing([main, writer], [main, writer._replace(state="S", wchan="")]) == ("S", "futex_wait")
    assert standing([main, writer._replace(state="S")], [main, writer]) == ("S", "futex_wait")
    assert standing([main._replace(state="D", wchan="x")], [main]) == ("S", "futex_wait")
    assert standing([], []) == ("", "")


# ------------------------------------------------------------------------------------------ looking at real processes

READY = (
    "import faulthandler, signal, time\n{}\nprint('ready', flush=True)\ndef stands_here():\n    time.sleep(60)\nstands_here()\n"
)


def state(pid: int) -> str:
    """Return the state letter of a process, X when it is gone."""
    task = hang.task_of(f"/proc/{pid}")
    return task.state if task is not None else "X"


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Callable[..., Target]]:
    """Yield a function that starts a Python process and returns it as what to look at."""
    started = []

    def start(setup: str = "faulthandler.register(signal.SIGUSR1)", rank: int = 0, **environ: str) -> Target:
        log = tmp_path / f"{rank}.log"
        script = tmp_path / f"job{rank}.py"
        script.write_text(READY.format(setup))
        with log.open("wb") as output:
            process = subprocess.Popen([sys.executable, "-S", str(script)], stdout=output, stderr=output)
        started.append(process)
        until(lambda: "ready" in log.read_text() and state(process.pid) in "SD")
        here, there = str(tmp_path / f"here-{rank}.txt"), str(tmp_path / f"stacks-{rank}.txt")
        start_ticks = hang.start_of(process.pid)
        return Target(rank, process.pid, start_ticks, str(log), environ, there, here, str(tmp_path / f"flight-{rank}"))

    yield start
    for process in started:
        process.kill()
        process.wait()


def until(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def no_py_spy(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a training Python beside which there is none, and leave none in PATH."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(hang, "FAULTHANDLER_S", 4.0)  # this machine may be busy
    return "/nowhere/python"


def look(*targets: Target, python: str, window_s: float = 5.0, nccl: bool = False) -> dict[int, hang.Seen]:
    found = Look(targets, python, nccl, window_s)
    until(found.over, window_s + 30)
    return found.result()


def living(target: Target) -> bool:
    return state(target.pid) not in "ZX"


def test_faulthandler_is_asked_where_there_is_no_py_spy(target: Callable[..., Target], no_py_spy: str, tmp_path: Path) -> None:
    targets = [target(rank=0), target(rank=1)]
    found = look(*targets, python=no_py_spy)
    for rank in (0, 1):
        event = found[rank].event(Hung(rank, "train", 5, 130.04, 120.0))
        assert event["frames"] == [f"{tmp_path}/job{rank}.py:5 stands_here", f"{tmp_path}/job{rank}.py:6 <module>"]
        assert (event["process"], event["waits_for_peers"], event["stacks"]) == ("S", False, str(tmp_path / f"stacks-{rank}.txt"))
        assert event["wchan"] and event["wchan"] in event["detail"]
        assert event["detail"].endswith(f"it stands in {event['frames'][0]}: time.sleep(60)")
        assert "stands_here" in (tmp_path / f"stacks-{rank}.txt").read_text()
        assert set(event) == {
            "rank", "phase", "step", "silent_s", "limit_s", "process", "wchan", "frames", "waits_for_peers", "stacks", "detail",
        }  # fmt: skip
    assert all(living(one) for one in targets)


def test_a_process_without_a_handler_is_not_signalled(target: Callable[..., Target], no_py_spy: str) -> None:
    one = target(setup="")
    seen = look(one, python=no_py_spy)[0]
    assert seen.process == "S" and seen.threads == [] and "no handler for SIGUSR1" in seen.text()
    assert living(one)


def test_a_stopped_process_is_seen_to_be_stopped(target: Callable[..., Target], no_py_spy: str) -> None:
    one = target()
    os.kill(one.pid, signal.SIGSTOP)
    until(lambda: state(one.pid) == "T")
    seen = look(one, python=no_py_spy)[0]
    assert (seen.process, seen.threads) == ("T", []) and "a stopped process prints none" in seen.text()
    assert "state T" in seen.event(Hung(0, "train", 5, 130.0, 120.0))["detail"]


@pytest.mark.skipif(hang.find_py_spy(sys.executable) is None, reason="py-spy is not installed")
def test_py_spy_tells_also_where_a_stopped_process_stands(target: Callable[..., Target]) -> None:
    one = target(setup="")
    os.kill(one.pid, signal.SIGSTOP)
    until(lambda: state(one.pid) == "T")
    seen = look(one, python=sys.executable)[0]
    if "Permission" in seen.text():
        pytest.skip("this account may not look into other processes")
    assert seen.process == "T" and hang.main_frames(seen.threads)[0].endswith("job0.py:5 stands_here")


def test_a_process_in_uninterruptible_sleep_is_seen_to_be(target: Callable[..., Target], no_py_spy: str) -> None:
    """Until its child execs, the parent of a vfork waits as one does whose NFS server is gone."""
    one = target(setup="faulthandler.register(signal.SIGUSR1); import ctypes; ctypes.CDLL(None).vfork()")
    (child,) = Path(f"/proc/{one.pid}/task/{one.pid}/children").read_text().split()
    try:
        seen = look(one, python=no_py_spy)[0]
        assert (seen.process, seen.threads) == ("D", []) and seen.wchan
        assert "SIGUSR1 was not answered" in seen.text()
    finally:
        os.kill(one.pid, signal.SIGKILL)
        os.kill(int(child), signal.SIGKILL)


def test_a_process_that_is_gone_is_no_harm(target: Callable[..., Target], no_py_spy: str) -> None:
    one = target()._replace(pid=2**22 + 1)
    seen = look(one, python=no_py_spy)[0]
    assert (seen.process, seen.wchan, seen.threads) == ("", "", [])


def test_a_shared_folder_that_hangs_is_not_waited_for(target: Callable[..., Target], no_py_spy: str, tmp_path: Path) -> None:
    for name in ("hangs.log", "hangs.txt"):
        os.mkfifo(tmp_path / name)  # opening it waits for the other end, as an NFS does for its server
    first = target(rank=0)._replace(log=str(tmp_path / "hangs.log"))
    second = target(rank=1)._replace(stacks=str(tmp_path / "hangs.txt"))
    found = look(first, second, python=no_py_spy)
    assert found[0].process == "S" and found[1].threads
    assert [seen.stacks for seen in found.values()] == [str(tmp_path / "here-0.txt"), str(tmp_path / "here-1.txt")]
    for name in ("hangs.log", "hangs.txt"):  # lets the threads end
        os.close(os.open(tmp_path / name, os.O_RDWR))


# ------------------------------------------------------------------------------------------ NCCL and torch


def serve(answers: list[bytes]) -> str:
    """Serve one connection: an answer to each line; the last one ends it. Return the address."""
    server = socket.create_server(("127.0.0.1", 0))

    def work() -> None:
        with server, server.accept()[0] as connection, connection.makefile("rb") as lines:
            for answer in answers:
                heard.append(lines.readline())
                connection.sendall(answer)

    threading.Thread(target=work, daemon=True).start()
    return "127.0.0.1:%d" % server.getsockname()[1]  # noqa: UP031


heard: list[bytes] = []


def test_ras_is_asked_as_ncclras_does() -> None:
    heard.clear()
    report = b"NCCL version 2.28.9\nJob summary\n===\n" + b"x" * 100_000
    said = hang.ask_ras(serve([b"SERVER PROTOCOL 2\n", b"OK\n", report]), time.monotonic() + 5)
    assert said.encode() == report
    assert heard == [b"CLIENT PROTOCOL 2\n", b"TIMEOUT 1\n", b"VERBOSE STATUS\n"]


def test_nccl_is_asked_once_and_its_answer_kept(target: Callable[..., Target], no_py_spy: str, tmp_path: Path) -> None:
    address = serve([b"SERVER PROTOCOL 2\n", b"OK\n", b"all is well\n"])
    look(target(rank=0, NCCL_RAS_ADDR=address), target(rank=1, NCCL_RAS_ADDR=address), python=no_py_spy, nccl=True)
    texts = [(tmp_path / f"stacks-{rank}.txt").read_text() for rank in (0, 1)]
    assert "--- NCCL RAS\nall is well\n" in texts[0] and "NCCL" not in texts[1]


def test_what_is_not_ras_is_said() -> None:
    assert "is not NCCL" in hang.ask_ras(serve([b"HTTP/1.0 400 Bad Request\n"]), time.monotonic() + 5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "127.0.0.1:%d" % silent.getsockname()[1]  # noqa: UP031
        assert "timed out" in hang.ask_ras(address, time.monotonic() + 0.2)
    assert "refused" in hang.ask_ras(address, time.monotonic() + 5)


def test_the_flight_recorder_is_asked_and_its_dump_kept(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe2.pipe")
    environ = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/pipe", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{tmp_path}/dump"}
    target = Target(2, os.getpid(), None, "", environ, "", "", str(tmp_path / "flight-2"))
    assert hang.ask_flight_recorder(target) is None  # nobody listens
    reader = os.open(tmp_path / "pipe2.pipe", os.O_RDONLY | os.O_NONBLOCK)
    wait = hang.ask_flight_recorder(target)
    assert wait is not None and os.read(reader, 10) == b"1\n"
    (tmp_path / "dump2").write_bytes(b"pickled")
    assert str(tmp_path / "flight-2") in wait(time.monotonic() + 5)
    assert (tmp_path / "flight-2").read_bytes() == b"pickled"
    again = hang.ask_flight_recorder(target)
    assert again is not None and "not written in time" in again(time.monotonic() + 0.2)  # the old dump is not taken for a new one
    os.close(reader)
    (tmp_path / "pipe2.pipe").unlink()
    (tmp_path / "pipe2.pipe").write_text("")
    assert hang.ask_flight_recorder(target) is None and (tmp_path / "pipe2.pipe").read_text() == ""
    assert hang.ask_flight_recorder(target._replace(environ={})) is None
