"""`r4090c diagnose`: every recorded log through the command line, several logs at once, large and odd ones, and runs of ours."""

from __future__ import annotations

import gzip
import io
import json
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.log_files import read_bounded, share_of, whose
from launch.plan import SCHEMA
from provision.loopback import LoopbackCluster
from r4090c.cli import cli
from r4090c.errors import R4090cError
from tests.cli import PROGRAM, environment
from tests.launch.test_diagnose_log import FIXTURES, HEALTHY, KIND, RANK0, REPORTED, TORCHRUN, TRAINER, expected
from tests.test_loopback import needs_sshd

Told = tuple[int, str, str]


def diagnose(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Told:
    """Return (exit code, stdout, stderr) of `r4090c diagnose WORDS`, run in this process."""
    try:
        code = cli(["diagnose", *map(str, words)], standalone_mode=False)
        error = ""
    except R4090cError as raised:
        code, error = raised.exit_code, str(raised)
    output, errors = capsys.readouterr()
    return int(code), output, errors + error


def told_json(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 1) -> dict[str, Any]:
    done, output, errors = diagnose(capsys, *words, "--json")
    assert done == code, output + errors
    told: dict[str, Any] = json.loads(output)
    assert told["schema"] == "r4090c.diagnose/1"
    return told


# --------------------------------------------------------------------------- one log


@pytest.mark.parametrize("file", FIXTURES, ids=lambda file: file.stem)
def test_every_recorded_log_gets_its_cause(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expect, lines = expected(file), file.read_text().split("\n")
    told = told_json(capsys, file)
    assert told["kind"] == KIND[expect["root_cause"]]
    assert told["file"] == str(file)
    assert lines[told["line"] - 1].strip().startswith(told["evidence"])
    rank = expect.get("rank", expect.get("odd_rank", expect.get("first_error_rank", told["rank"])))
    assert told["rank"] == rank
    assert told["node"] == expect.get("host", expect.get("first_error_host", told["node"]))
    assert any(word.lower() in " ".join(told["fix"]).lower() for word in expect["fix_any"])
    for other in expect.get("consequence_ranks", ()):
        assert any(re.search(rf"rank.*\b{other}\b", line) for line in told["explains"])
    assert told["mends"] in ("again", "other-node", "never")
    code, output, _ = diagnose(capsys, file)
    assert code == 1
    assert output.startswith(f"cause     {told['kind']}: {told['summary']}\n")
    assert f"{file}:{told['line']}\n" in output
    assert all(fix in output for fix in told["fix"])


@pytest.mark.parametrize("file", FIXTURES, ids=lambda file: file.stem)
def test_packed_by_gzip_it_is_the_same(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = tmp_path / (file.name + ".gz")
    packed.write_bytes(gzip.compress(file.read_bytes()))
    plain, other = told_json(capsys, file), told_json(capsys, packed)
    assert {**other, "file": "", "logs": []} == {**plain, "file": "", "logs": []}


def test_reported_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, case in enumerate(REPORTED):
        file = tmp_path / f"{number:03}-{case['kind']}.txt"
        file.write_text("\n".join(case["log"]) + "\n")
        assert told_json(capsys, file)["kind"] == case["kind"]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_log_has_no_cause(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.log").write_text(TRAINER + HEALTHY[name])
    code, output, _ = diagnose(capsys, tmp_path / "a.log")
    assert (code, output.partition(":")[0]) in ((0, "no cause"), (3, "not known"))
    (tmp_path / "a.log").write_text(TRAINER + HEALTHY[name] + "\n{'train_runtime': 9.0, 'epoch': 1.0}\n")
    code, output, _ = diagnose(capsys, tmp_path / "a.log")
    assert (code, output.partition("\n")[0]) == (0, "no cause: it ended well")


def test_earlier_attempts_in_the_same_log_are_told_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = RANK0.format("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB.") + TORCHRUN
    again = "$ torchrun train.py --micro 1\n" + TRAINER
    (tmp_path / "a.log").write_text(memory + again + "{'train_runtime': 9.0}\n")
    code, output, _ = diagnose(capsys, tmp_path / "a.log")
    assert code == 0
    assert output.startswith(
        f"no cause: it ended well\nearlier   an earlier attempt, from line 1 of {tmp_path / 'a.log'}: cuda-out-of-"
    )
    (tmp_path / "a.log").write_text(memory + again)
    assert diagnose(capsys, tmp_path / "a.log")[0] == 3
    (tmp_path / "a.log").write_text(memory + again + RANK0.format("KeyError: 'labels'"))
    told = told_json(capsys, tmp_path / "a.log")
    assert (told["kind"], told["line"], told["explains"]) == ("rank-failed", memory.count("\n") + 54, [])
    assert "cuda-out-of-memory" in told["earlier"][0]


def test_what_a_cause_does_not_explain_is_not_said_to_follow_from_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warned = "[WARNING] no flash_attn, using sdpa: ModuleNotFoundError: No module named 'flash_attn'\n"
    (tmp_path / "a.log").write_text(warned + TRAINER + RANK0.format("KeyError: 'labels'") + PEER.format(rank=1) + TORCHRUN)
    told = told_json(capsys, tmp_path / "a.log")
    assert (told["kind"], told["explains"], told["also"]) == ("rank-failed", ["peer-gone: rank 1"], ["module-missing (line 1)"])
    assert "\nalso      module-missing (line 1)\n" in diagnose(capsys, tmp_path / "a.log")[1]


def test_our_own_first_rank_tells_its_last_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "step {}/40 loss 0.500000 grad_norm 1.000 lr 1.00e-03 0.100 s 5,000 tokens/s\n"
    (tmp_path / "0.log").write_text(line.format(39) + line.format(40))
    assert diagnose(capsys, tmp_path / "0.log")[0] == 0
    (tmp_path / "0.log").write_text(line.format(38) + line.format(39))
    assert diagnose(capsys, tmp_path / "0.log")[0] == 3
    (tmp_path / "0.log").write_text(
        line.format(39) + line.format(40) + RANK0.format("OSError: [Errno 28] No space left on device")
    )
    assert told_json(capsys, tmp_path / "0.log")["kind"] == "disk-full"


def test_a_program_reads_standard_input(tmp_path: Path) -> None:
    def of(data: bytes) -> tuple[int, str]:
        done = subprocess.run(
            [*PROGRAM, "diagnose", "-"], input=data, capture_output=True, env=environment(tmp_path), cwd=tmp_path, timeout=60
        )
        assert b"Traceback" not in done.stderr
        return done.returncode, done.stdout.decode()

    text = next(file for file in FIXTURES if "xid79" in file.name).read_bytes()
    assert of(text)[0] == 1
    assert "standard input:13\n" in of(text)[1]
    assert of(gzip.compress(text)) == of(text)
    assert of(b"")[0] == 3


def test_what_a_log_holds_reaches_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.log").write_text(RANK0.format("ValueError: \x1b]0;owned\x07[red]bold[/red]\x9b31m") + TORCHRUN)
    code, output, _ = diagnose(capsys, tmp_path / "a.log")
    assert code == 1
    assert "[red]bold[/red]" in output
    assert output.replace("\n", "").isprintable()


# --------------------------------------------------------------------------- noise


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=600) | st.text(max_size=300).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_noise_is_not_known(data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "noise"
    file.write_bytes(data)
    if data[:2] == b"\x1f\x8b":
        return
    code, output, _ = diagnose(capsys, file)
    assert (code, output.partition(":")[0]) == (3, "not known")


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_noise_around_a_log_changes_no_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str], data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(FIXTURES))
    noise = data.draw(st.lists(st.text(st.characters(codec="utf-8"), max_size=40), max_size=5))
    lines = "\n".join(noise)
    (tmp_path / "a.log").write_text(f"{lines}\n{file.read_text()}\n", encoding="utf-8")
    assert told_json(capsys, tmp_path / "a.log")["kind"] == KIND[expected(file)["root_cause"]]


# --------------------------------------------------------------------------- several logs

PEER = "[rank{rank}]: Traceback (most recent call last):\n[rank{rank}]: RuntimeError: [pair.cc:553] Connection closed by peer\n"
MEMORY = (
    "Traceback (most recent call last):\n  File 'x.py', line 3\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.\n"
)


def test_of_the_logs_of_all_ranks_the_one_with_the_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1, 3):
        (tmp_path / f"node0{rank // 2 + 1}-rank{rank}.log").write_text(TRAINER + PEER.format(rank=rank))
    (tmp_path / "node02-rank2.log").write_text(TRAINER + MEMORY)
    told = told_json(capsys, *sorted(tmp_path.glob("*.log")))
    assert (told["kind"], told["node"], told["rank"]) == ("cuda-out-of-memory", "node02", 2)
    assert told["file"].endswith("node02-rank2.log")
    assert told["line"] == 53
    assert told["explains"] == ["peer-gone: rank 0, 1, 3"]
    assert told_json(capsys, tmp_path) == told  # a folder is the logs in it


def test_of_a_runs_folder_the_logs_of_the_last_attempt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for attempt, text in ((2, TRAINER), (10, MEMORY), (9, TRAINER)):
        (tmp_path / f"attempt_{attempt}").mkdir()
        (tmp_path / f"attempt_{attempt}" / "3.log").write_text(text)
    told = told_json(capsys, tmp_path)
    assert (told["kind"], told["rank"], told["file"]) == ("cuda-out-of-memory", 3, str(tmp_path / "attempt_10" / "3.log"))


def test_the_earlier_of_two_by_the_times_in_their_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = "[2026-10-18 04:5{minute}:41,128] [INFO] saving\nTraceback (most recent call last):\n  File 'x.py'\n{error}\n"
    memory, full = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate",
        "OSError: [Errno 28] No space left on device: '/a/b'",
    )
    one, two = tmp_path / "rank0.log", tmp_path / "rank1.log"
    one.write_text(disk.format(minute=5, error=memory))
    two.write_text(disk.format(minute=2, error=full))
    assert told_json(capsys, one, two)["kind"] == told_json(capsys, two, one)["kind"] == "disk-full"
    two.write_text(disk.format(minute=7, error=full))
    assert told_json(capsys, one, two)["kind"] == told_json(capsys, two, one)["kind"] == "cuda-out-of-memory"
    two.write_text(full + "\n")  # no times there: the order given
    assert told_json(capsys, one, two)["kind"] == "cuda-out-of-memory"


def test_what_only_all_logs_together_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = next(file for file in FIXTURES if "uneven" in file.name)
    for number, line in enumerate(file.read_text().splitlines()):
        rank = re.search(r"[Rr]ank ?(\d+)\]", line)
        with (tmp_path / f"rank{rank.group(1) if rank else 0}.log").open("a") as log:
            log.write(line + "\n")
        assert number < 1000
    told = told_json(capsys, tmp_path)
    assert (told["kind"], told["rank"]) == ("ranks-out-of-step", 5)
    assert told["file"].endswith("rank5.log")


@pytest.mark.parametrize(
    ("name", "node", "rank"),
    [
        ("/s/runs/a/attempt_2/13.log", None, 13),
        ("/s/runs/a/attempt_2/torchrun-node02.log", "node02", None),
        ("logs/rank_3.out", None, 3),
        ("logs/rank-12.log.gz", None, 12),
        ("node07-rank12.log", "node07", 12),
        ("host3/rank0/stderr.log", None, 0),
        ("node07/train.log", "node07", None),
        ("slurm-12345.out", None, None),
        ("12.log", None, None),
        ("franklin3.log", None, None),
        ("2026-11-30.log", None, None),
        ("", None, None),
    ],
)
def test_a_name_tells_node_and_rank(name: str, node: str | None, rank: int | None) -> None:
    assert whose(name) == (node, rank)


@given(st.text(max_size=80))
def test_any_name_is_a_name(name: str) -> None:
    node, rank = whose(name)
    assert node is None or node in name
    assert rank is None or str(rank) in name or rank >= 0


# --------------------------------------------------------------------------- large logs


class Endless(io.RawIOBase):
    """So many lines of 100 bytes, of which the last is another; takes no memory."""

    def __init__(self, lines: int, last: bytes) -> None:
        self.left, self.end = lines * 100, io.BytesIO(last)

    def read(self, size: int = -1) -> bytes:
        if not self.left:
            return self.end.read(size)
        take = min(size, self.left, (1 << 20) // 100 * 100)
        self.left -= take
        return (b"x" * 99 + b"\n") * (take // 100) if take % 100 == 0 else self._odd(take)

    def _odd(self, take: int) -> bytes:
        self.left += take % 100
        whole = take - take % 100
        return (b"x" * 99 + b"\n") * (whole // 100) if whole else self._raise()

    def _raise(self) -> bytes:
        raise AssertionError("asked for less than a line")


def test_a_gigabyte_is_read_in_little_memory_and_its_lines_are_counted() -> None:
    tracemalloc.start()
    read = read_bounded(cast(BinaryIO, Endless(10_737_418, b"the end\n")), 1_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * 2**20
    first, gap = read.gap
    assert read.text.endswith("x\nthe end\n")
    assert read.text.count("\n") + gap == 10_737_419
    assert set(read.text[: first * 100].splitlines()) == {"x" * 99}
    assert read.skipped_bytes + len(read.text) == 1_073_741_808


@given(st.lists(st.binary(max_size=30), max_size=40), st.integers(0, 200))
def test_what_is_left_out_is_whole_lines_and_all_else_stays(lines: list[bytes], most: int) -> None:
    data = b"\n".join(lines)
    read = read_bounded(io.BytesIO(data), most)
    assert read.gap[1] >= 0
    if not read.skipped_bytes:
        assert read.text == data.decode("utf-8", "replace")


def test_a_large_log_says_what_was_not_looked_at_and_where_its_cause_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.log_files.READ_MOST", 4 << 20)
    lines = 120_000
    (tmp_path / "a.log").write_text(("x" * 99 + "\n") * lines + RANK0.format("ModuleNotFoundError: No module named 'deepspeed'"))
    told = told_json(capsys, tmp_path / "a.log")
    assert told["line"] == lines + 3
    code, _, errors = diagnose(capsys, tmp_path / "a.log")
    assert code == 1
    assert "in the middle were not looked at" in errors
    assert share_of(10_000) < 1 << 20


# --------------------------------------------------------------------------- what is no log


def test_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("R4090C_CLUSTER", raising=False)
    (tmp_path / "a.log").write_text("x\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"x" * 9999)[:-9])
    for words, said in (
        (("nope.log",), "no such file"),
        (("a.log", "nope.log"), "no such file"),
        (("x" * 9999 + "\n",), "no such file"),
        (("empty",), "a folder without logs"),
        (("cut.gz",), "zcat"),
        (("a.log", "--attempt", "2"), "given with a log"),
    ):
        code, output, errors = diagnose(capsys, *words)
        assert (code, output) == (2, ""), words
        assert said in errors


# --------------------------------------------------------------------------- a run of ours

RUN = "tiny-20261130-014212-a3f1"
PLAN: dict[str, Any] = {
    "schema": SCHEMA,
    "run_id": RUN,
    "recipe": "tiny",
    "attempt": 2,
    "steps": 40,
    "world_size": 2,
    "nodes": [{"name": "demo01", "ranks": [{"rank": 0}]}, {"name": "demo02", "ranks": [{"rank": 1}]}],
    "created_at": "2026-01-01T00:00:00Z",
}
LOST_PEER = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:63699."


def failed(node: str, rank: int, time: float, tail: str, code: int = 1, attempt: int = 2) -> dict[str, Any]:
    told = {"node": node, "kind": "rank-failed", "rank": rank, "exit_code": code, "time": time, "gone": time, "log_tail": tail}
    return {**told, "attempt": attempt}


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[Path, Path]]:
    """The inventory of a loopback cluster, and where its runs lie."""
    with LoopbackCluster(nodes=2) as file:
        wish = yaml.safe_load(file.read_text())
        runs = Path(wish["paths"].get("runs") or Path(wish["paths"]["shared"]) / "r4090c" / "runs")
        runs.mkdir(parents=True, exist_ok=True)
        yield file, runs


class Folder:
    """A run's folder, as agents leave it."""

    def __init__(self, runs: Path, name: str = RUN, **plan: Any) -> None:
        self.path = runs / name
        for folder in ("agents", "attempt_1", "attempt_2"):
            (self.path / folder).mkdir(parents=True, exist_ok=True)
        (self.path / "plan.json").write_text(json.dumps({**PLAN, "run_id": name, **plan}))

    def agent(self, node: str, outcome: str | None, *events: dict[str, Any]) -> None:
        state = {"attempt": 2, "heartbeat": 1.0, "end": {"outcome": outcome} if outcome else None, "events": list(events)}
        (self.path / "agents" / f"{node}.json").write_text(json.dumps(state))

    def log(self, name: str, text: str, attempt: int = 2) -> None:
        (self.path / f"attempt_{attempt}" / name).write_text(text)


@needs_sshd
def test_a_run_that_failed_its_cause_and_the_line_in_the_rank_log(
    cluster: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file, runs = cluster
    folder = Folder(runs)
    tail = (
        "Traceback (most recent call last):\n  File 'x.py', line 3\nOSError: [Errno 28] No space left on device: '/scratch/a'\n"
    )
    folder.agent("demo01", "failed", failed("demo01", 0, 9.3, LOST_PEER))
    folder.agent("demo02", "failed", failed("demo02", 1, 9.0, tail))
    folder.log("1.log", "step 7\n" * 30_000 + tail)
    folder.log("0.log", LOST_PEER)
    told = told_json(capsys, RUN, "--cluster", file)
    assert (told["kind"], told["node"], told["rank"], told["attempt"]) == ("disk-full", "demo02", 1, 2)
    assert (told["file"], told["line"]) == (str(folder.path / "attempt_2" / "1.log"), 30_003)
    assert told["explains"] == [f"rank 0 on demo01 ended, exit code 1: {LOST_PEER}"]
    assert told["mends"] == "never"
    code, output, _ = diagnose(capsys, RUN, "--cluster", file)
    assert code == 1
    assert f"proof     {folder.path}/attempt_2/1.log:30003\n" in output


@needs_sshd
def test_earlier_attempts_from_the_events_of_all(cluster: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    file, runs = cluster
    folder = Folder(runs, "tiny-20261130-014212-bbbb")
    folder.agent("demo01", "done")
    folder.agent("demo02", "done")
    events = [failed("demo02", 1, 5.0, "ValueError: x", attempt=1), failed("demo01", 0, 6.0, "KeyError: 2", attempt=3)]
    (folder.path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + '{"half')
    folder.log("1.log", "Traceback (most recent call last):\nValueError: x\n", attempt=1)
    assert diagnose(capsys, folder.path.name, "--cluster", file)[:2] == (0, "no cause: it ended well\n")
    told = told_json(capsys, folder.path.name, "--attempt", "1", "--cluster", file)
    assert (told["kind"], told["rank"], told["line"]) == ("rank-failed", 1, 2)
    code, _, errors = diagnose(capsys, folder.path.name, "--attempt", "3", "--cluster", file)
    assert code == 2
    assert "has 2 attempts" in errors


@needs_sshd
def test_what_the_supervisor_wrote_and_what_a_log_adds(cluster: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    file, runs = cluster
    folder = Folder(runs, "tiny-20261130-014212-cccc")
    folder.agent("demo01", "failed", failed("demo01", 0, 9.0, LOST_PEER))
    folder.agent("demo02", None)
    written = {
        "attempt": 2,
        "kind": "node-lost",
        "node": "demo02",
        "rank": None,
        "summary": "demo02 was lost",
        "evidence": "no route",
    }
    (folder.path / "attempt_2" / "diagnosis.json").write_text(json.dumps(written))
    told = told_json(capsys, folder.path.name, "--cluster", file)
    assert (told["kind"], told["node"], told["mends"]) == ("node-lost", "demo02", "again")
    # A generic failure that the whole log explains better than the end of it that the event has.
    (folder.path / "attempt_2" / "diagnosis.json").unlink()
    folder.agent("demo01", "failed", failed("demo01", 0, 9.0, "leaving"))
    folder.agent("demo02", "failed")
    folder.log("0.log", MEMORY + "leaving\n" * 600)
    told = told_json(capsys, folder.path.name, "--cluster", file)
    assert (told["kind"], told["node"], told["rank"], told["line"]) == ("cuda-out-of-memory", "demo01", 0, 3)


@needs_sshd
def test_runs_without_a_cause(cluster: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    file, runs = cluster
    folder = Folder(runs, "tiny-20261130-014212-dddd")
    code, output, _ = diagnose(capsys, folder.path.name, "--cluster", file)
    assert (code, output.partition(":")[0]) == (3, "not known")
    code, _, errors = diagnose(capsys, "tiny-20990101-000000-ffff", "--cluster", file)
    assert code == 2
    assert "no such file" in errors
    assert "there is none in" in errors


def test_help_is_quick_and_tells_the_exit_codes(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "r4090c", "diagnose", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "3 not known" in done.stdout


def test_the_line_of_an_uncaught_exception_alone_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "end.log"
    said = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 3 has a total of 23.53 GiB"
    log.write_text(f"[rank3]: {said}\n")
    assert told_json(capsys, log)["kind"] == "cuda-out-of-memory"


def test_a_device_is_no_log(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = diagnose(capsys, "/dev/zero")
    assert code == 2 and "/dev/zero: a device" in errors
