"""perftest: units, both sides in one log, errors as values, the JSON that is none."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netcheck.tools import perftest
from netcheck.tools.perftest import GBIT_S_OF, Perftest
from r4090c.cli.common import to_jsonable
from r4090c.errors import ParseError
from tests.tools.samples import expected, files, text

FILES = files("perftest")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_fixture(file: Path) -> None:
    expect, seen = expected(file), perftest.parse(file.read_text())
    row, lat = seen.largest(), seen.smallest()
    factor = GBIT_S_OF.get(seen.unit or "", 1.0)
    assert row is None or lat is None
    for key, told in {
        "test": seen.test,
        "unit_printed": seen.unit,
        "unit_by_cross_check": seen.unit,
        "device": seen.device,
        "gid_index": seen.gid_index,
        "mtu_bytes": seen.mtu_bytes,
        "link": seen.link,
        "qps": seen.qps,
        "rows": len(seen.rows),
        "distinct_results": len(seen.rows),
        "bytes": row.bytes if row else lat and lat.bytes,
        "iterations": row.iterations if row else lat and lat.iterations,
        "bw_average_printed": row and row.bw_average_gbit_s / factor,
        "bw_average_number": row and row.bw_average_gbit_s / factor,
        "bw_average_gbit_s": row and row.bw_average_gbit_s,
        "bw_peak_printed": row and (row.bw_peak_gbit_s or 0.0) / factor,
        "bw_peak_number": row and (row.bw_peak_gbit_s or 0.0) / factor,
        "msg_rate_mpps": row and row.msg_rate_mpps,
        "peak_measured": row is not None and row.bw_peak_gbit_s is not None,
        **{key: getattr(lat, key) for key in ("t_min_us", "t_max_us", "t_typical_us", "t_avg_us", "p99_us", "p999_us") if lat},
        "t_stdev_us": lat and lat.t_stdev_us,
    }.items():
        if key in expect:
            assert told == pytest.approx(expect[key], rel=1e-3) if isinstance(told, float) else told == expect[key], key
    if "error" in expect:
        assert seen.error is not None
        assert expect["error"] in seen.error.text
    else:
        assert seen.error is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("completion-error-12.txt", "data-path"),
        ("couldnt-connect.txt", "connect"),
        ("own-real-name-not-resolved.txt", "resolve"),
    ],
)
def test_kinds_of_errors_of_the_fixtures(name: str, kind: str) -> None:
    error = perftest.parse(text("perftest", name)).error
    assert error is not None
    assert error.kind == kind


def test_the_mtu_remark_gives_bytes_and_not_the_enum() -> None:
    notes = perftest.parse(text("perftest", "requested-mtu-higher.txt")).notes
    assert any("1024 bytes" in note for note in notes)


def test_a_frequency_warning_is_a_note() -> None:
    assert perftest.parse(text("perftest", "write_bw-gbsec-100g-freq-line.txt")).notes == (
        "CPU frequency is not constant (harmless)",
    )


HEAD = "                    {} Test\n Device         : mlx5_0\n Mtu             : 4096[B]\n"


@pytest.mark.parametrize(
    ("title", "test", "bidirectional"),
    [
        ("RDMA_Read BW", "ib_read_bw", False),
        ("Send Bidirectional BW", "ib_send_bw", True),
        ("RDMA_Write Bidirectional Post List BW", "ib_write_bw", True),
        ("RDMA_WriteIMM BW", "ib_write_imm_bw", False),
        ("RDMA_Read Latency", "ib_read_lat", False),
        ("Atomic FETCH_AND_ADD BW", "ib_atomic_bw", False),
        ("Atomic_Cmp_And_Swap Latency", "ib_atomic_lat", False),
    ],
)
def test_titles(title: str, test: str, bidirectional: bool) -> None:
    in_json = f'{{"test_info": {{"test": "{title.replace(" ", "_")}_Test"}}, "results": {{}}}}'
    for told in (HEAD.format(title), in_json):
        seen = perftest.parse(told)
        assert (seen.test, seen.bidirectional) == (test, bidirectional)


def table(header: str, *rows: str) -> Perftest:
    return perftest.parse(HEAD.format("RDMA_Write BW") + f" {header}\n" + "".join(f" {row}\n" for row in rows))


@pytest.mark.parametrize(("unit", "gbit_s"), [("Gb/sec", 100.0), ("MB/sec", 0.8388608), ("MiB/sec", 0.8388608), ("Gbps", 100.0)])
def test_units(unit: str, gbit_s: float) -> None:
    header = f"#bytes     #iterations    BW peak[{unit}]    BW average[{unit}]   MsgRate[Mpps]"
    row = table(header, "65536 5000 100.00 100.00 0.19").largest()
    assert row is not None
    assert row.bw_average_gbit_s == pytest.approx(gbit_s)


def test_more_columns_than_usual() -> None:
    header = "#bytes    #sl      #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]    CPU_Util[%]"
    row = table(header, "65536 3 5000 98.00 97.00 0.19 12.5").largest()
    assert row is not None
    assert (row.bw_average_gbit_s, row.bw_peak_gbit_s, row.iterations) == (97.0, 98.0, 5000)
    per_port = "#bytes #iterations BW peak[Gb/sec]  BW average[Gb/sec]  MsgRate[Mpps]  BW Port1[Gb/sec]  MsgRate Port1[Mpps]"
    row = table(per_port.replace(" #iterations ", "     #iterations    "), "65536 5000 98.00 97.00 0.19 48.5 0.09").largest()
    assert row is not None
    assert row.bw_average_gbit_s == 97.0


def test_the_old_latency_table_and_the_one_of_a_duration() -> None:
    old = table("#bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]", "2 1000 1.71 9.36 1.78").smallest()
    assert old is not None
    assert (old.t_typical_us, old.t_avg_us) == (1.78, None)
    duration = table("#bytes        #iterations       t_avg[usec]    tps average", "2 100000 1.81 552486.19").smallest()
    assert duration is not None
    assert (duration.t_typical_us, duration.t_avg_us) == (None, 1.81)


def test_a_cut_row_is_no_result() -> None:
    header = "#bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]"
    seen = table(header, "65536 5000 98.00")
    assert not seen.rows
    assert seen.notes == ("a row of the table is cut",)
    assert seen.error is None


def test_of_different_results_the_slowest_counts() -> None:
    header = "#bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]"
    row = table(header, "65536 1 98.0 97.0 0.1", "65536 1 98.0 44.0 0.1", "2 1 98.0 1.0 0.1").largest()
    assert row is not None
    assert row.bw_average_gbit_s == 44.0


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (" Port number 1 state is Down\n Couldn't set the link layer\n Couldn't get context for the device", "port-down"),
        (" Did not detect devices \n If device exists, check if driver is up", "device"),
        (" IB device mlx5_9 not found\n Unable to find the Infiniband/RoCE device", "device"),
        ("Failed to modify QP 0x0123 to RTR\n Unable to Connect the HCA's through the link", "qp"),
        (" Found Incompatibility issue with GID types.\n Please Try to use a different IP version.", "gid"),
        (" Completion with error at client\n Failed status 5: wr_id 0 syndrom 0xf9", "data-path"),
        ("Couldn't connect to node02:18515\nUnable to open file descriptor for socket connection", "connect"),
        ("Name or service not known for node99:18515", "resolve"),
        ("ib_write_bw: invalid option -- 'Z'", "usage"),
        (HEAD.format("Send BW") + "Couldn't allocate MR\n", "memory"),
        (HEAD.format("Send BW") + "client read: Connection reset by peer\nCouldn't read remote address", "closed"),
    ],
)
def test_errors_are_values(words: str, kind: str) -> None:
    seen = perftest.parse(words + "\n")
    assert seen.error is not None
    assert seen.error.kind == kind
    assert not seen.rows


def test_a_status_is_named() -> None:
    error = perftest.parse(" Completion with error at client\n Failed status 13: wr_id 0 syndrom 0x87\n").error
    assert error is not None
    assert error.text.endswith("(RNR retry counter exceeded)")


@pytest.mark.parametrize(
    "odd",
    [
        "",
        "bash: ib_write_bw: command not found\n",
        "Cannot allocate memory\n",
        "{}",
        '{"test_info": 1}',
        "some text\n65536 1 2 3\n",
    ],
)
def test_what_is_not_perftest(odd: str) -> None:
    with pytest.raises(ParseError):
        perftest.parse(odd)


def test_json_without_a_rate_has_no_unit_and_no_bandwidth() -> None:
    whole = text("perftest", "out_json-valid-write_bw.json").replace("0.186733", "0.000000")
    seen = perftest.parse(whole)
    assert not seen.rows
    assert seen.unit is None
    assert "unit" in seen.notes[0]


def test_json_of_a_latency_test() -> None:
    seen = perftest.parse(
        '{"test_info": {"test": "Send_Latency_Test", "Mtu": 4096}, "results": {"MsgSize": 2, "n_iterations": 1000, "t_min": 1.7,'
        ' "t_max": 9.4, "t_typical": 1.78, "t_avg": 1.81, "t_stdev": 0.1, "t_99_percentile": 2.3, "t_99.9_percentile": 9.4}}'
    )
    lat = seen.smallest()
    assert lat is not None
    assert (seen.test, lat.t_typical_us, lat.p99_us, lat.p999_us) == ("ib_send_lat", 1.78, 2.3, 9.4)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_cut_or_damaged_it_is_a_value_or_refused(data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(FILES))
    whole = file.read_text()
    word = data.draw(st.sampled_from(list(re.finditer(r"[\w.]+", whole))))
    odd = st.sampled_from(["nan", "-inf", "1e308", "9" * 400, "NaN", "{", '"', "[", "٣"])
    damaged = whole[: word.start()] + data.draw(odd | st.text(max_size=8)) + whole[word.end() :]
    for broken in (damaged, whole[: word.start()]):
        try:
            seen = perftest.parse(broken)
        except ParseError:
            continue
        json.dumps(to_jsonable(seen), allow_nan=False)
