"""nccl-tests: every layout, and what a check must be able to tell apart."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netcheck.tools import nccl_tests
from netcheck.tools.nccl_tests import NcclTests, Row
from r4090c.cli.common import to_jsonable
from r4090c.errors import ParseError
from tests.tools.samples import expected, files, text

FILES = files("nccl-tests")


def out_of_place(run: NcclTests) -> list[Row]:
    return [row for row in run.rows if not row.in_place]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_fixture(file: Path) -> None:
    expect, run = expected(file), nccl_tests.parse(file.read_text())
    largest, in_place = run.largest(), run.largest(in_place=True)
    assert run.complete == expect["complete"]
    if "ranks" in expect:
        assert run.ranks == expect["ranks"]
    if "hosts" in expect:
        assert list(run.hosts) == expect["hosts"]
        assert run.nodes == len(expect["hosts"])
    if "rows" in expect:
        assert len(out_of_place(run)) == expect["rows"]
    if "wrong" in expect:
        assert run.wrong_total == expect["wrong"]
    for key, told in {
        "out_of_bounds": run.out_of_bounds,
        "avg_busbw_gbyte_s": run.avg_busbw_gbyte_s,
        "max_error": run.max_error,
        "nccl_version_code": run.nccl_version_code,
        "nccl_tests_version": run.version,
        "timestamp_last": run.last_time,
        "error_host": run.error_host,
        "error_pid": run.error_pid,
        "size_largest_bytes": largest and largest.bytes,
        "busbw_out_of_place_gbyte_s_at_largest": largest and largest.busbw_gbyte_s,
        "algbw_out_of_place_gbyte_s_at_largest": largest and largest.algbw_gbyte_s,
        "time_out_of_place_us_at_largest": largest and largest.time_us,
        "busbw_in_place_gbyte_s_at_largest": in_place and in_place.busbw_gbyte_s,
    }.items():
        if key in expect:
            assert told == pytest.approx(expect[key]), key
    if "error" in expect:
        assert run.error is not None
        assert expect["error"] in run.error
    else:
        assert run.error is None


def test_a_build_without_mpi_ran_alone() -> None:
    assert nccl_tests.parse(text("nccl-tests", "mpirun-without-mpi-build-avg-0.txt")).each_alone
    others = [file for file in FILES if "without-mpi" not in file.name]
    assert not any(nccl_tests.parse(file.read_text()).each_alone for file in others)


def test_two_worlds_of_several_gpus_at_once_ran_alone_too() -> None:
    one = text("nccl-tests", "wrong-values-FAILED.txt")
    other = one.replace("812 on     node08", "977 on     node09")
    lines = [line for pair in zip(one.split("\n"), other.split("\n"), strict=True) for line in pair]
    for both in (one + other, "\n".join(lines)):
        run = nccl_tests.parse(both)
        assert run.each_alone
        assert run.ranks == 2


def test_the_cause_of_a_failure_is_the_first_warning() -> None:
    run = nccl_tests.parse(text("nccl-tests", "test-nccl-failure-system-error.txt"))
    assert run.cause is not None
    assert "failed to extend /dev/shm" in run.cause


def test_the_environment_in_the_json_is_never_kept() -> None:
    whole = text("nccl-tests", "json-v2-string-booleans-16rank.json").replace("LANG=C.UTF-8", "HF_TOKEN=hunter2")
    for cut in (len(whole), 3000, 400, whole.index("hunter2") + 3):
        try:
            told = json.dumps(to_jsonable(nccl_tests.parse(whole[:cut])))
        except ParseError as error:
            told = str(error)
        assert "hunt" not in told


# --------------------------------------------------------------------------- variants of our own

HEAD = """# nThread 1 nGpus 2 minBytes 8 maxBytes 16 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid    812 on     node08 device  0 [0000:41:00] NVIDIA GeForce RTX 4090
#  Rank  1 Group  0 Pid    812 on     node08 device  1 [0000:61:00] NVIDIA GeForce RTX 4090
#
"""
FOOT = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 1.5\n#\n"
COLUMNS = "#       size         count      type   redop    root"
ONE = "     time   algbw   busbw  #wrong"


def run(columns: str, *rows: str, foot: str = FOOT) -> NcclTests:
    return nccl_tests.parse(HEAD + columns + "\n" + "".join(row + "\n" for row in rows) + foot)


def test_per_iteration_columns() -> None:
    """-I 1: four more columns in each half, 21 words a row; busbw is not where it was."""
    half = ONE + "    i_min    i_max    i_p99    i_cv%"
    row = "16 4 float sum -1  19.0 0.5 1.25 0 18.0 21.0 20.9 3.1  19.2 0.4 1.125 3 18.1 21.4 21.0 3.3"
    seen = run(COLUMNS + half + half, row)
    assert seen.rows == (Row(16, 19.0, 0.5, 1.25, 0, False), Row(16, 19.2, 0.4, 1.125, 3, True))
    assert seen.complete
    assert seen.wrong_total == 3


def test_bitwise_columns_and_a_timestamp() -> None:
    half = ONE + " #bitdiff"
    row = "16 4 float sum -1  19.0 0.5 1.25 0 0  19.2 0.4 1.125 0 0  2026-10-07 19:42:11"
    seen = run(COLUMNS + half + half + "           timestamp", row)
    assert [row.busbw_gbyte_s for row in seen.rows] == [1.25, 1.125]
    assert seen.last_time == "2026-10-07 19:42:11"


def test_cpu_time_is_said_to_be_no_latency() -> None:
    cpu = ONE.replace("   time", "cputime")
    seen = run(COLUMNS + cpu + cpu, "16 4 float sum -1 9.0 0.5 1.25 0 9.1 0.5 1.25 0")
    assert seen.cpu_time
    assert seen.complete
    assert len(seen.rows) == 2


def test_old_broadcast_has_a_root_and_no_operation() -> None:
    columns = "#  size  count  type  root  time  algbw  busbw  error  time  algbw  busbw  error"
    seen = run(columns, "16 4 float 0 24.7 0.5 1.25 0e+00 24.8 0.4 1.5 0e+00")
    assert [row.busbw_gbyte_s for row in seen.rows] == [1.25, 1.5]
    assert (seen.wrong_total, seen.max_error) == (0, 0.0)


def test_old_errors_out_of_bounds_are_wrong() -> None:
    columns = "#  size  count  type  redop  time  algbw  busbw  error  time  algbw  busbw  error"
    seen = run(columns, "16 4 float sum 24.7 0.5 1.25 3e+02 24.8 0.4 1.5 0e+00", foot=FOOT.replace("0 OK", "1 FAILED"))
    assert seen.wrong_total == 1
    assert seen.max_error == 300


@pytest.mark.parametrize("word", ["inf", "-nan", "nan", "1e999", "0x1p3", "1_0"])
def test_what_is_no_number_is_no_measurement(word: str) -> None:
    seen = run(COLUMNS + ONE + ONE, f"16 4 float sum -1 19.0 {word} 1.25 0 19.2 0.4 1.125 0")
    assert [row.in_place for row in seen.rows] == [True]
    assert not seen.complete


def test_a_row_broken_by_nccls_log_is_joined() -> None:
    log = "node08:812:930 [1] NCCL INFO Channel 00/0 : 1[1] -> 0[0] via SHM/direct/direct"
    begin, rest = "          16             4     float     sum      -1", "    19.0   0.50   1.25   0    19.2   0.40   1.12   0"
    broken = f"{begin}{log}\n{log}\n{rest}"
    seen = run(COLUMNS + ONE + ONE, broken)
    assert [row.busbw_gbyte_s for row in seen.rows] == [1.25, 1.12]
    assert seen.complete
    lost = run(COLUMNS + ONE + ONE, f"{begin}{log}")
    assert not lost.rows
    assert not lost.complete


@pytest.mark.parametrize(
    "prefix", ["[1,0]<stdout>:", "[1,0]<stdout>: ", "[prterun-node01-4711@1,0]<stdout>: ", "0: ", " 3: ", "node08: "]
)
def test_a_launchers_prefix(prefix: str) -> None:
    plain = text("nccl-tests", "wrong-values-FAILED.txt")
    assert nccl_tests.parse("".join(f"{prefix}{line}\n" for line in plain.splitlines())) == nccl_tests.parse(plain)


def test_windows_line_ends_and_colours() -> None:
    plain = text("nccl-tests", "no-validation-NA.txt")
    assert nccl_tests.parse(plain.replace("\n", "\r\n").replace("# Using", "\x1b[1m# Using\x1b[0m")) == nccl_tests.parse(plain)


@pytest.mark.parametrize(
    ("line", "error", "host"),
    [
        ("node03: Test CUDA failure common.cu:292 'out of memory'", "out of memory", "node03"),
        ("node03: Test timeout (60s) common.cu:333", "Test timeout (60s) common.cu:333", "node03"),
        (
            "Invalid number of GPUs: 8 requested but only 7 were found.",
            "Invalid number of GPUs: 8 requested but only 7 were found.",
            None,
        ),
        (
            "node03: Test NCCL failure common.cu:958 'internal error / Last error text'",
            "internal error / Last error text",
            "node03",
        ),
        (" .. node03 pid 99: Test failure common.cu:892", "test failure", "node03"),
    ],
)
def test_errors_are_values(line: str, error: str, host: str | None) -> None:
    seen = run(COLUMNS + ONE + ONE, line, foot="")
    assert (seen.error, seen.error_host, seen.complete) == (error, host, False)


def test_the_last_line_without_newline_may_be_cut() -> None:
    """A word of the last row that was cut in the middle is still a number, and a wrong one."""
    whole = HEAD + COLUMNS + ONE + ONE + "\n16 4 float sum -1 19.0 0.5 1.25 0 19.2 0.4 1.125 131072"
    assert nccl_tests.parse(whole + "\n").wrong_total == 131072
    seen = nccl_tests.parse(whole[:-4])
    assert not seen.rows
    assert not seen.complete


def test_a_nccl_warning_in_the_footer_is_no_error_of_a_whole_run() -> None:
    columns, row = COLUMNS + ONE + ONE, "16 4 float sum -1 19.0 0.5 1.25 0 19.2 0.4 1.125 0"
    said = "# error: NET/Plugin: could not find libnccl-net.so\n"
    seen = run(columns, row, foot=FOOT + said)
    assert seen.complete
    assert seen.error is None
    assert "libnccl-net.so" in seen.notes[0]
    cut = run(columns, row, foot=said)
    assert not cut.complete
    assert cut.error is not None


@pytest.mark.parametrize(
    "odd",
    [
        "",
        "bash: line 1: all_reduce_perf: command not found\n",
        "    8    2    float    sum    -1    19.08    0.00    0.00    0    19.41    0.00    0.00    0\n",
        '{"a": 1}',
        "{",
        "[]",
        "There are not enough slots available in the system to satisfy the 16 slots\n",
    ],
)
def test_what_is_not_nccl_tests(odd: str) -> None:
    with pytest.raises(ParseError):
        nccl_tests.parse(odd)


def test_different_runs_in_one_text_are_refused() -> None:
    one = text("nccl-tests", "new-219-unalign-patched-p2p.txt")
    with pytest.raises(ParseError, match="several runs"):
        nccl_tests.parse(one + one.replace("all_reduce_perf", "all_gather_perf"))


# --------------------------------------------------------------------------- properties


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_cut_anywhere_it_is_never_complete_before_its_end(data: st.DataObject) -> None:
    """However a run was cut: a value or ParseError, no row that the whole run does not have, no number JSON cannot hold."""
    one_run = [file for file in FILES if expected(file)["complete"] and "sections" not in expected(file)]
    whole = data.draw(st.sampled_from(one_run)).read_text()
    everything = nccl_tests.parse(whole)
    end = max(whole.rfind("Avg bus bandwidth"), whole.rfind('"errors"'))
    cut = data.draw(st.integers(0, end))
    try:
        seen = nccl_tests.parse(whole[:cut])
    except ParseError:
        return
    assert set(seen.rows) <= set(everything.rows)
    assert not seen.complete
    json.dumps(to_jsonable(seen), allow_nan=False)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_damaged_anywhere_it_stays_json(data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(FILES))
    whole = file.read_text()
    words = list(re.finditer(r"[\w.\-]+", whole))
    word = data.draw(st.sampled_from(words))
    odd = st.sampled_from(["nan", "-inf", "1e308", "1e+400", "9" * 400, "-1", "NaN", "Infinity", '"', "{", "null", "٣", "\x00"])
    new = data.draw(odd | st.text(max_size=8))
    try:
        seen = nccl_tests.parse(whole[: word.start()] + new + whole[word.end() :])
    except ParseError:
        return
    json.dumps(to_jsonable(seen), allow_nan=False)
