"""The first cause in a log: recorded shapes of failures, the causes people reported, and logs that have none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch import diagnose_log
from launch.diagnose_log import CAUSES, WORDS, LogCause, Source, diagnose, diagnose_all
from r4090c.cli.common import to_jsonable

FIXTURES = sorted((Path(__file__).parent / "fixtures" / "diagnose").glob("*.log"))
KIND = {
    "port_in_use": "port-taken",
    "cuda_out_of_memory": "cuda-out-of-memory",
    "dev_shm_too_small": "dev-shm-too-small",
    "disk_full": "disk-full",
    "false_p2p_grant": "false-p2p-grant",
    "firewall_blocks_random_ports": "firewall-blocks-ports",
    "host_out_of_memory": "host-out-of-memory",
    "nan_loss": "nan-loss",
    "roce_wrong_gid": "roce-wrong-gid",
    "ranks_out_of_step": "ranks-out-of-step",
    "wrong_network_interface": "wrong-network-interface",
    "gpu_fallen_off_bus": "gpu-fallen-off-bus",
}
"""Neutral name in the fixtures -> kind."""


def expected(file: Path) -> dict[str, Any]:
    expect: dict[str, Any] = json.loads(file.with_suffix(".expect.json").read_text())
    return expect


def gib(text: str) -> float:
    number, unit = text.split()
    return float(number) / {"MiB": 1024, "GiB": 1}[unit]


def of(text: str) -> LogCause:
    cause = diagnose(text)
    assert cause is not None
    return cause


@pytest.mark.parametrize("file", FIXTURES, ids=lambda file: file.stem)
def test_fixture(file: Path) -> None:
    expect, text = expected(file), file.read_text()
    cause = of(text)
    assert cause.kind == KIND[expect["root_cause"]]
    assert text.split("\n")[cause.line_number - 1].strip().startswith(cause.evidence)
    advice = " ".join(cause.fix).lower()
    assert any(word.lower() in advice for word in expect["fix_any"])
    details = cause.details
    for key, told in {
        "rank": cause.rank,
        "odd_rank": cause.rank,
        "first_error_rank": cause.rank,
        "gpu": cause.gpu,
        "host": cause.node,
        "first_error_host": cause.node,
        "interface": details.get("interface"),
        "transport": details.get("transport"),
        "pci": details.get("pci"),
        "op_of_odd_rank": details.get("odd_operation"),
        "op_of_others": details.get("operation"),
    }.items():
        if key in expect:
            assert told == expect[key], key
    for key in ("port", "xid", "gid_index", "pid"):
        if key in expect:
            assert details[key] == str(expect[key])
    if "seq_num" in expect:
        assert details["sequence"] == str(expect["seq_num"])
    if "path" in expect:
        assert details["path"].startswith(expect["path"])
    if "ports" in expect:
        assert details["ports"] == ", ".join(map(str, expect["ports"]))
    if "tried_mib" in expect:
        assert gib(details["tried"]) * 1024 == pytest.approx(expect["tried_mib"])
        assert gib(details["free"]) == expect["free_gib"]
        assert gib(details["total"]) == expect["total_gib"]
    if "peer" in expect or "address" in expect:
        assert details["address"] == expect.get("peer", expect.get("address"))
    for rank in expect.get("consequence_ranks", ()):
        assert any(re.search(rf"rank.*\b{rank}\b", line) for line in cause.consequences)
    for xid in expect.get("secondary_xids", ()):
        assert any(f"Xid {xid} " in line for line in cause.consequences)
    assert not {KIND.get(kind, kind) for kind in expect.get("not_causes", ())} & {cause.kind}


# --------------------------------------------------------------------------- what people reported

TORCHRUN = """W1014 09:03:15.047000 4089 torch/distributed/elastic/api.py:897] Sending process 4121 closing signal SIGTERM
E1014 09:03:15.090000 4089 torch/distributed/elastic/api.py:869] failed (exitcode: 1) local_rank: 0 (pid: 4120) of binary: python
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""
RANK0 = '[rank0]: Traceback (most recent call last):\n[rank0]:   File "train.py", line 3, in <module>\n[rank0]: {}\n'

FRAMES = ("Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "    trainer.train()")
LOST = (
    "torch.distributed.DistBackendError: NCCL error in: x.cpp:2251, remote process exited or there was a network error,"
    " NCCL version 2.21.5",
    "ncclRemoteError: A call failed possibly due to a network error.",
    "Last error:",
    "socketProgress: Connection closed by remote peer node02<43210>",
)
SUMMARY = """E1130 09:03:15.390000 4089 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: {code}) \
local_rank: {local} (pid: 4121) of binary: python
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\x20
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_09:03:15
  host      : node02
  rank      : {rank} (local_rank: {local})
  exitcode  : {code} (pid: 4121)
  error_file: <N/A>"""
SHORT = re.compile(
    r"<(?:(?P<frames>traceback)(?: of rank (?P<of>\d+))?|peer of rank (?P<peer>\d+) went"
    r"|torchrun: rank (?P<rank>\d+) local (?P<local>\d+) exit (?P<code>-?\d+))>"
)


def lines_of(one: str | list[Any]) -> list[str]:
    """Return what an entry of a case stands for: a line, one so many times, or what many logs have."""
    if not isinstance(one, str):
        return [one[0]] * one[1]
    short = SHORT.fullmatch(one)
    if short is None:
        return [one]
    if short["code"]:
        return SUMMARY.format(**short.groupdict()).split("\n")
    rank = short["of"] or short["peer"]
    return [f"[rank{rank}]: {line}" if rank else line for line in (*FRAMES, *(LOST if short["peer"] else ()))]


REPORTED: list[dict[str, Any]] = [
    {**case, "log": [line for one in case["log"] for line in lines_of(one)]}
    for case in json.loads((Path(__file__).parent / "cases" / "diagnose_log.json").read_text())
]
"""Our own short logs in the shapes of public issue threads: the kind, a word of the advice, what else is asked of some."""


@pytest.mark.parametrize("case", REPORTED, ids=[f"{number}-{case['kind']}" for number, case in enumerate(REPORTED)])
def test_reported(case: dict[str, Any]) -> None:
    found = diagnose_all([Source("\n".join(case["log"]) + "\n")])
    cause = found.cause
    assert cause is not None
    assert cause.kind == case["kind"], cause
    assert case["fix"] in " ".join(cause.fix)
    assert "{" not in cause.summary.split(": ")[0] + "".join(cause.fix)
    told = {
        "node": cause.node,
        "rank": cause.rank,
        "gpu": cause.gpu,
        "line": cause.line_number,
        "proof": cause.evidence,
        "explains": list(cause.consequences),
        "also": list(cause.also),
        "earlier": list(found.earlier),
        "error": cause.details.get("error", "")[: len(case.get("error", ""))],
        "first_fix": cause.fix[0][: len(case.get("first_fix", ""))],
    }
    assert {name: told[name] for name in case if name in told} == {name: case[name] for name in case if name in told}


def test_every_cause_has_a_log() -> None:
    shown = {KIND[expected(file)["root_cause"]] for file in FIXTURES} | {case["kind"] for case in REPORTED}
    assert {cause.kind for cause in CAUSES} == shown


FIELD_REPORTS = {
    "nccl-tests 117, NCCL 631, 257, 1438, club-3090": "false-p2p-grant",
    "accelerate pull request 2195, Qwen-VL 447": "rtx40-refused",
    "tinygrad/open-gpu-kernel-modules 42, 44": "p2p-mapping-failed",
    "nccl-tests 7, 167": "collective-wrong-data",
    "horovod 584, 700, NCCL 1581, 286, 1637, nccl-tests 9": "wrong-network-interface",
    "nccl-tests 15": "firewall-blocks-ports",
    "ColossalAI 4343": "master-unreachable",
    "pytorch 150532, 73656": "name-not-resolved",
    "NCCL 426": "rdma-path-broken",
    "NCCL 769": "roce-wrong-gid",
    "nccl-tests 185": "rdma-no-route",
    "NCCL 925": "hca-missing",
    "NCCL 290, 342, 525, 1518": "dev-shm-too-small",
    "DeepSpeed 4907, 579": "ssh-refused",
    "DeepSpeed 1603": "launcher-missing",
    "accelerate 1795": "batch-size-mismatch",
    "DeepSpeed 6705": "ranks-out-of-step",
    "DeepSpeed 5205": "no-file-locks",
    "DeepSpeed pull request 4536": "checkpoint-folder-race",
    "NeMo-RL pull request 3504, tt-metal 42404": "storage-hung",
    "DeepSpeed pull request 2881": "numactl-conflict",
    "xtuner 88": "cuda-out-of-memory",
}
"""What people reported that ends or hangs a run -> its cause. Other reports are of speed, or of what is checked before a run."""


def test_every_field_report_that_ends_a_run_has_a_log() -> None:
    shown = {KIND[expected(file)["root_cause"]] for file in FIXTURES} | {case["kind"] for case in REPORTED}
    assert set(FIELD_REPORTS.values()) <= shown


WATCHDOG = (
    "[rank{rank}]:[E1021 07:28:40.1 ProcessGroupNCCL.cpp:629] [Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={sequence}, OpType={operation}, NumelIn=9, NumelOut=9, Timeout(ms)=600000) ran for 600007 milliseconds\n"
    "[rank{rank}]:[E1021 07:28:40.1 ProcessGroupNCCL.cpp:2271] [PG ID {group} PG GUID {group} Rank {rank}]  failure detected by "
    "watchdog at work sequence id: {sequence} PG status: last enqueued work: {sequence}, last completed work: {completed}\n"
)


def watchdog(rank: int, sequence: int = 880, operation: str = "ALLREDUCE", group: int = 0, completed: int | None = None) -> str:
    done = sequence - 1 if completed is None else completed
    return WATCHDOG.format(rank=rank, sequence=sequence, operation=operation, group=group, completed=done)


def test_timeouts_alone_do_not_tell_why() -> None:
    cause = of(watchdog(0) + watchdog(1) + watchdog(3))
    assert (cause.kind, cause.rank) == ("collective-timeout", None)
    assert "does not tell" in cause.summary


def test_the_rank_that_never_complained_is_the_one_waited_for() -> None:
    init = "node01:1{r}:1{r} [0] NCCL INFO ncclCommInitRank comm 0x1 rank {r} nranks 4 cudaDev 0 - Init COMPLETE\n"
    cause = of("".join(init.format(r=rank) for rank in range(4)) + watchdog(0) + watchdog(1) + watchdog(3))
    assert cause.kind == "collective-timeout"
    assert cause.details["silent"] == "2"


def test_another_number_is_out_of_step() -> None:
    cause = of(watchdog(0) + watchdog(1, sequence=879) + watchdog(2))
    assert (cause.kind, cause.rank, cause.details["sequence"]) == ("ranks-out-of-step", 1, "879")


def test_other_numbers_of_other_groups_are_not() -> None:
    """Every process group counts by itself."""
    assert of(watchdog(0, group=0) + watchdog(1, sequence=12, group=1)).kind == "collective-timeout"


def test_a_first_collective_that_hangs_is_a_false_grant_only_with_p2p_within_one_node() -> None:
    p2p = "node04:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC\n"
    hang = watchdog(0, sequence=1, completed=-1) + watchdog(1, sequence=1, completed=-1)
    assert of(p2p + hang).kind == "false-p2p-grant"
    assert of(p2p.replace("P2P/IPC", "SHM/direct/direct") + hang).kind == "collective-timeout"
    net = "node04:7:9 [0] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0\n"
    assert of(p2p + net + hang).kind == "collective-timeout"
    assert of(p2p + watchdog(0) + watchdog(1)).kind == "collective-timeout"


def test_an_error_comes_before_what_is_only_inferred() -> None:
    p2p = "node04:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC\n"
    hang = watchdog(0, sequence=1, completed=-1)
    assert of(p2p + RANK0.replace("rank0", "rank1").format("ValueError: bad batch") + hang).kind == "rank-failed"
    assert of(p2p + hang + RANK0.format("torch.OutOfMemoryError: CUDA out of memory. Tried")).kind == "cuda-out-of-memory"
    odd = watchdog(1, sequence=7) + watchdog(2)
    assert of(odd).kind == "ranks-out-of-step"
    assert of(RANK0.format("torch.OutOfMemoryError: CUDA out of memory. Tried") + odd).kind == "cuda-out-of-memory"


def test_a_hang_that_somebody_ended() -> None:
    """What timed out before Ctrl-C does not follow from it; what broke after it does."""
    stop = 'Traceback (most recent call last):\n  File "train.py", line 3\nKeyboardInterrupt\n'
    gone = RANK0.format("RuntimeError: [1] Connection reset by peer")
    assert of(watchdog(0) + watchdog(1) + stop + TORCHRUN).kind == "collective-timeout"
    assert of(stop + gone + TORCHRUN).kind == "stopped"


@pytest.mark.parametrize("front", ["", "[rank0]: ", "node02: [rank0]: "])
def test_what_a_traceback_quotes_was_not_said(front: str) -> None:
    lines = (
        "Traceback (most recent call last):",
        '  File "train.py", line 9, in <module>',
        '    raise OSError(28, "No space left on device", path) if full else MemoryError("CUDA out of memory. Tried")',
        "OSError: [Errno 28] No space left on device: '/scratch/a'",
    )
    cause = of("".join(f"{front}{line}\n" for line in lines))
    assert (cause.kind, cause.line_number, cause.details["path"]) == ("disk-full", 4, "/scratch/a")


def test_of_two_named_causes_the_earlier() -> None:
    memory = RANK0.replace("rank0", "rank3").format("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB.")
    disk = RANK0.format("OSError: [Errno 28] No space left on device: '/scratch/a.pt'")
    assert (of(memory + disk).kind, of(disk + memory).kind) == ("cuda-out-of-memory", "disk-full")
    assert of(memory + disk).rank == 3


def test_the_node_of_a_line_is_told_by_its_prefix_and_not_by_an_exceptions_name() -> None:
    text = "".join(
        f"node07: {line}\n" for line in RANK0.format("OSError: [Errno 28] No space left on device: '/x/y'").splitlines()
    )
    assert of(text).node == "node07"
    assert of(RANK0.replace("[rank0]: ", "").format("RuntimeError: CUDA error: unknown error") + TORCHRUN).node is None


# --------------------------------------------------------------------------- several texts, several attempts

KILLED = "[{day} 02:00:10 2026] Out of memory: Killed process 999 ({name}) total-vm:90000kB, anon-rss:50000kB, file-rss:0kB\n"
RUN = "[2026-11-30 09:03:14,100] [INFO] [stage_1_and_2.py:150] step\n" + RANK0.format("KeyError: 'labels'")
BLOCK = "  host      : node02\n  rank      : 0 (local_rank: 0)\n  exitcode  : 1 (pid: 4121)\n"


@pytest.mark.parametrize(
    ("day", "name", "kind"),
    [
        ("Mon Nov 30", "python", "host-out-of-memory"),
        ("Mon Nov 30", "pt_main_thread", "host-out-of-memory"),
        ("Mon Nov 30", "chrome", "rank-failed"),
        ("Fri Nov 27", "python", "rank-failed"),
    ],
)
def test_what_the_kernel_says_of_another_day_or_program_is_no_cause(day: str, name: str, kind: str) -> None:
    cause = diagnose_all([Source(RUN + TORCHRUN + BLOCK, "train.log"), Source(KILLED.format(day=day, name=name), "dmesg")]).cause
    assert cause is not None
    assert cause.kind == kind
    assert (cause.node, cause.rank) == ((None, None) if kind == "host-out-of-memory" else ("node02", 0))  # dmesg tells neither


def test_an_xid_of_another_day_is_no_cause() -> None:
    xid = "[{} 02:00:10 2026] NVRM: Xid (PCI:0000:41:00): 48, pid=4121, name=python, DBE\n"
    kinds = [
        getattr(diagnose_all([Source(RUN + TORCHRUN, "train.log"), Source(xid.format(day), "dmesg")]).cause, "kind", None)
        for day in ("Fri Nov 27", "Mon Nov 30")
    ]
    assert kinds == ["rank-failed", "gpu-hardware-fault"]


def test_the_day_before_the_first_of_a_month_is_a_day_before() -> None:
    xid = "[Mon Nov 30 23:59:10 2026] NVRM: Xid (PCI:0000:41:00): 48, pid=4121, name=python, DBE\n"
    run = RUN.replace("2026-11-30 09:03:14", "2026-12-01 00:10:14")
    cause = diagnose_all([Source(run + TORCHRUN, "train.log"), Source(xid, "dmesg")]).cause
    assert cause is not None and cause.kind == "gpu-hardware-fault"


def test_a_crash_that_the_shell_told_ends_an_attempt() -> None:
    crash = "run.sh: line 3:  4121 Segmentation fault      (core dumped) torchrun train.py\n$ torchrun train.py\n"
    found = diagnose_all([Source(crash + "{'train_runtime': 12.5, 'train_loss': 1.25}\n")])
    assert found.cause is None and found.ended_well and len(found.earlier) == 1


def test_all_ranks_of_deepspeed_must_have_ended_well() -> None:
    spawned = "".join(
        f"[2026-11-30 09:00:02,987] [INFO] [launch.py] process {pid} spawned with command: ['python']\n" for pid in (7, 8)
    )
    ended = "[2026-11-30 09:03:18,987] [INFO] [launch.py:351:main] Process {} exits successfully.\n"
    assert not diagnose_all([Source(spawned + ended.format(7))]).ended_well
    assert diagnose_all([Source(spawned + ended.format(7) + ended.format(8))]).ended_well


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 5))
def test_lines_of_the_last_attempt_have_the_numbers_of_the_file(before: int, between: int, gap: int) -> None:
    """Whether what was left out of the file stands before the last attempt or in it."""
    start = "$ torchrun train.py\n"
    kept = ["x\n"] * before + ["torch.ChildFailedError:\n", start] + ["x\n"] * between
    text = "".join(kept) + RANK0.format("KeyError: 'labels'")
    for after in {0, before, len(kept)}:
        found = diagnose_all([Source(text, gap=(after, gap))])
        assert found.cause is not None
        assert found.cause.line_number == len(kept) + 3 + gap
        assert found.earlier == (f"an earlier attempt, from line {1 + (gap if after == 0 else 0)}: why is not known",)


@pytest.mark.parametrize("letters", ["a.", "a: ", "A", "/a", "1 ", "(", "Error", "Traceback (most recent call last): ", "loss "])
def test_long_lines_are_read_in_their_time(letters: str) -> None:
    """A pattern that tries all ways to match would read these for hours."""
    diagnose("\n".join([letters * (4000 // len(letters)) + " Error"] * 40) + "\n" + RANK0.format("KeyError: 'labels'"))


# --------------------------------------------------------------------------- no cause

CASES = Path(__file__).parent / "cases"
HEALTHY: dict[str, str] = {
    name: "\n".join(lines) for name, lines in json.loads((CASES / "diagnose_log_healthy.json").read_text()).items()
}
TRAINER = "".join(f"{{'loss': {2 - step / 99:.4f}, 'grad_norm': 0.5, 'epoch': 0.{step}}}\n" for step in range(50))


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy(name: str) -> None:
    assert diagnose(HEALTHY[name]) is None
    assert diagnose(TRAINER + HEALTHY[name]) is None


def test_a_run_that_ended_well_after_all() -> None:
    assert (
        diagnose(
            "node01:1:2 [0] a.cc:1 NCCL WARN Call to connect to 10.1.3.9<41> failed : Connection timed out\n{'train_runtime': 9}"
        )
        is None
    )
    assert of("{'loss': nan}\n{'loss': nan}\n{'train_runtime': 9.0}\n").kind == "nan-loss"


# --------------------------------------------------------------------------- properties

NOISE = st.text(max_size=300) | st.binary(max_size=300).map(lambda data: data.decode("utf-8", "replace"))
LINES = [line for file in FIXTURES for line in file.read_text().splitlines()]
quick = settings(max_examples=60, deadline=None)


def check(cause: LogCause | None) -> None:
    if cause is not None:
        assert cause.kind in {known.kind for known in CAUSES}
        assert cause.summary
        assert cause.fix
        json.dumps(to_jsonable(cause), allow_nan=False)


@quick
@given(NOISE)
def test_noise_has_no_cause(text: str) -> None:
    assert diagnose(text) is None


@quick
@given(st.lists(st.sampled_from(LINES) | st.text(max_size=40), max_size=40))
def test_any_lines_in_any_order(lines: list[str]) -> None:
    check(diagnose("\n".join(lines)))


@quick
@given(st.sampled_from(FIXTURES), st.floats(0, 1))
def test_cut_anywhere(file: Path, share: float) -> None:
    text = file.read_text()
    check(diagnose(text[: int(len(text) * share)]))
    check(diagnose(text[int(len(text) * share) :]))


@quick
@given(st.sampled_from(FIXTURES), st.data())
def test_damaged_anywhere(file: Path, data: st.DataObject) -> None:
    text = file.read_text()
    word = data.draw(st.sampled_from(list(re.finditer(r"\w+", text))))
    new = data.draw(st.sampled_from(["9" * 400, "nan", "{", "{rank}", "-1", "٣", "\x00", "\\1"]) | st.text(max_size=8))
    check(diagnose(text[: word.start()] + new + text[word.end() :]))


@quick
@given(st.sampled_from(FIXTURES), st.integers(0, 3), st.sampled_from(["\r\n", "\n"]))
def test_healthy_lines_around_change_nothing(file: Path, times: int, end: str) -> None:
    before, text = TRAINER * times, file.read_text()
    plain, framed = of(text), of((before + text).replace("\n", end))
    assert (framed.kind, framed.rank, framed.node, framed.evidence) == (plain.kind, plain.rank, plain.node, plain.evidence)
    assert framed.line_number == plain.line_number + before.count("\n")


# --------------------------------------------------------------------------- only lines that may matter are read

STRUCTURE = {
    "_NODE_PREFIX",
    "_BLOCK",
    "_RANK",
    "_NO_HOST",
    "_INIT_RANK",
    "_LOSS",
    "_LOST_LOSS",
    "_LAST_STEP",
    "_QUOTED",
    "_LISTENING",
    "_PORT",
    "_OF_SHM",
    "NOISE",
    "OTHER_SERVICE",
    "_ENDED",
    "_START",
    "_STEP",
    "_ANSI",
    "_FRONT_OF_REASON",
    "_LAST_WORDS",
    "_PROGRAM_NAME",
    "_ANY_RAISED",
    "_ANY_NAME",
    "_XID_NAME",
    "_KERNEL",
    "_OF_STORE",
    "_GRADIENT",
    "_HARMLESS",
}
"""Patterns that do not look for a line: they read one that was found, or have a gate of their own."""
PATTERNS = [
    *(pattern for name, pattern in vars(diagnose_log).items() if isinstance(pattern, re.Pattern) and name not in STRUCTURE),
    *(pattern for cause in CAUSES for pattern in cause.patterns),
    *diagnose_log._HOST_MEMORY,
    *diagnose_log._ILLEGAL,
    *diagnose_log._ECC,
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.pattern[:30])
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_pattern_reads_lines_that_are_kept(pattern: re.Pattern[str], data: st.DataObject) -> None:
    line = data.draw(st.from_regex(pattern.pattern, alphabet=st.characters(max_codepoint=126)))
    assert any(word in line for word in WORDS)


def test_reading_all_lines_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [file.read_text() for file in FIXTURES] + ["\n".join(case["log"]) for case in REPORTED] + [*HEALTHY.values(), TRAINER]
    some = [diagnose(text) for text in texts]
    monkeypatch.setattr(diagnose_log, "WORDS", ("",))
    assert [diagnose(text) for text in texts] == some
