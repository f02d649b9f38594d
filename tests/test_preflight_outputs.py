"""What `r4090c preflight` gives out: several files at once, after the report; what it would do; how it tells that it works."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from netcheck.bundle import save_bundle
from netcheck.figures import Matrix, figures_of, level_of, matrices, number, seconds_of, summaries
from netcheck.measure.job import Level, Setting
from netcheck.rehearsal import lasts, rehearse
from netcheck.report import screen
from netcheck.report_matrix import shown, table
from r4090c.cli import preflight as command
from r4090c.errors import Exit
from tests.checks.cases import build
from tests.cli import PROGRAM, environment, run
from tests.reports import machine, pairs_of, tcp_measured
from tests.terminal import on_terminal

NODES = ("n1", "n2", "n3")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    cluster, raw = machine(tmp_path, *NODES, rate=lambda sender, receiver: 9.4 if receiver != "n2" else 4.7)
    save_bundle(tmp_path / "b.tar.gz", cluster, raw)
    return tmp_path / "b.tar.gz"


def replay(bundle: Path, *words: str, **how: Any) -> tuple[int, str, str]:
    return run("preflight", "--from", str(bundle), "--only", "time", *words, state=bundle.parent, **how)


# --------------------------------------------------------------------------- files


def test_several_outputs_at_once(bundle: Path) -> None:
    code, output, errors = replay(bundle, "--html", "r.html", "--junit", "r.xml", "--diff", "--json")
    assert code == Exit.OK
    answer = json.loads(output)
    assert (answer["level"], answer["diff"]) == ("full", None)
    assert {(one["measurement"], one["unit"]) for one in answer["figures"]} == {("tcp", "Gbit/s")}
    assert list(answer["figures"][0]) == ["measurement", "subject", "name", "value", "unit"]
    assert errors.splitlines()[1:] == ["written: r.html", "written: r.xml"]
    assert all((bundle.parent / name).stat().st_size > 100 for name in ("r.html", "r.xml"))


def test_a_file_that_cannot_be_written_loses_neither_the_report_nor_the_others(bundle: Path) -> None:
    code, output, errors = replay(bundle, "--html", "no/such/folder/r.html", "--junit", "r.xml")
    assert code == Exit.USAGE, "all is fit, but a file is missing"
    assert output.startswith("local: fit")
    assert "r.html: cannot be written" in errors and "written: r.xml" in errors
    assert (bundle.parent / "r.xml").exists()


def test_a_report_into_a_pipe(bundle: Path) -> None:
    code, output, errors = replay(bundle, "--junit", "/dev/stdout")
    assert code == Exit.OK and output.startswith("local: fit") and "<?xml" in output and "written: /dev/stdout" in errors


@pytest.mark.parametrize(
    "words",
    [
        ("--html", "x", "--junit", "x"),
        ("--html", "x", "--junit", "./x"),
        ("--html", "b.tar.gz"),
        ("--html", "x", "--dry-run"),
        ("--diff", "--dry-run"),
        ("--save", "x"),
        ("--full",),
    ],
)
def test_contradictions(bundle: Path, words: tuple[str, ...]) -> None:
    before = bundle.read_bytes()
    code, output, errors = replay(bundle, *words)
    assert (code, output) == (Exit.USAGE, "") and errors.startswith("error: --")
    assert bundle.read_bytes() == before


# --------------------------------------------------------------------------- bandwidth on the terminal


def test_the_bandwidths_stand_in_the_report(bundle: Path) -> None:
    _, output, _ = replay(bundle)
    lines = output.splitlines()
    start = lines.index("tcp 4 streams, Gbit/s   rows send, columns receive   * more than 10% below the best quarter")
    assert [line.split() for line in lines[start + 1 : start + 5]] == [
        ["n1", "n2", "n3"],
        ["n1", "4.70*", "9.40"],
        ["n2", "9.40", "9.40"],
        ["n3", "9.40", "4.70*"],
    ]


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_report_fits_the_terminal(bundle: Path, columns: int) -> None:
    _, text = on_terminal("preflight", "--from", str(bundle), "--only", "time", columns=columns, state=bundle.parent)
    lines = text.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("tcp 4 streams"))
    assert max(map(len, lines[start : lines.index("", start)])) <= columns


def matrix(count: int, name: str = "node{:02}", **odd: float) -> Matrix:
    names = tuple(name.format(place) for place in range(count))
    cells = {(a, b): odd.get(b.replace("-", "_"), 24.0) for a in names for b in names if a != b}
    return Matrix("tcp", "4 streams", "Gbit/s", names, cells)


@pytest.mark.parametrize("count", [2, 3, 8, 9, 16])
@pytest.mark.parametrize("name", ["n{}", "node{:02}", "gpu-server-in-rack-{:02}"])
def test_a_matrix_fits_eighty_columns(count: int, name: str) -> None:
    lines = table(matrix(count, name), 80)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert all(one in text for one in matrix(count, name).nodes)


def test_one_slow_node_is_marked_though_half_of_a_ring_is_slow() -> None:
    ring = [(f"n{a}", f"n{b}") for a, b in ((1, 2), (2, 3), (3, 4), (4, 1))]
    cells = {pair: 0.3 if "n4" in pair else 9.0 for one in ring for pair in (one, one[::-1])}
    lines = table(Matrix("tcp", "", "Gbit/s", ("n1", "n2", "n3", "n4"), cells), 80)
    assert "\n".join(lines).count("0.30*") == 4 and "9.00*" not in "\n".join(lines)


def test_of_many_nodes_the_slowest_links_and_the_medians_are_told() -> None:
    lines = table(matrix(12, node07=12.0), 100)
    assert lines[0] == "tcp 4 streams, Gbit/s   132 links, median 24.0"
    assert lines[1].startswith("slowest  node00->node07 12.0   node01->node07 12.0")
    assert "node07 24.0/12.0" in "\n".join(lines)


def test_of_each_measurement_one_bandwidth_is_shown_the_best_of_every_link() -> None:
    four = matrix(3, node02=9.0)
    one = Matrix("tcp", "1 stream", "Gbit/s", four.nodes, dict.fromkeys(four.cells, 20.0))
    late = Matrix("rdma", "latency", "us", one.nodes, one.cells, False)
    (best,) = shown([one, four, late])
    assert best.title == "tcp (best of 1 stream, 4 streams), Gbit/s"
    assert (best.cells["node00", "node01"], best.cells["node00", "node02"]) == (24.0, 20.0)
    assert shown([four]) == [four]
    assert shown([Matrix("tcp", "", "Gbit/s", (), {})]) == []
    lines = [line.text for line in screen("atelier", ["node00"], 1.0, [], width=None, matrices=[one, four])]
    assert sum("rows send" in line for line in lines) == 1


def test_links_that_were_not_measured_are_dots() -> None:
    ring = matrix(4)
    cells = {pair: value for pair, value in ring.cells.items() if pair != ("node00", "node02")}
    assert "·" in table(Matrix("tcp", "", "Gbit/s", ring.nodes, cells), 80)[2]


# --------------------------------------------------------------------------- figures


def test_figures_are_those_of_the_nodes_at_hand() -> None:
    measured = {"tcp": tcp_measured(pairs_of(NODES), lambda a, b: 9.4), "ports": {}, "gone": 7}
    assert len(figures_of(measured, NODES)) == 6
    assert {one.subject for one in figures_of(measured, ("n1", "n2"))} == {"n1->n2", "n2->n1"}
    assert figures_of({"tcp": {"rounds": "damaged"}}, NODES) == ()
    (found,) = matrices(figures_of(measured, NODES), ["n3", "n1", "n2"])
    assert found.nodes == ("n3", "n1", "n2") and found.cells["n1", "n2"] == 9.4
    (summary,) = summaries(figures_of(measured, NODES))
    assert (summary.count, summary.median, summary.unit) == (6, 9.4, "Gbit/s")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.00"), (0.012, "0.012"), (0.5, "0.50"), (2.0, "2.00"), (9.413, "9.41"), (24.04, "24.0"), (1240.4, "1,240")],
)
def test_numbers_for_people(value: float, text: str) -> None:
    assert number(value) == text
    assert number(float("nan")) == number(float("inf")) == "–"


@pytest.mark.parametrize(
    ("measurements", "level"),
    [
        ({}, "quick"),
        ({"ports": {}}, "default"),
        ({"tcp": {"level": "full"}, "ports": {}}, "full"),
        ({"tcp": {"level": "default"}}, "default"),
        ({"tcp": {"level": 7}, "x": 1}, "default"),
    ],
)
def test_a_bundle_tells_its_level(measurements: dict[str, Any], level: str) -> None:
    assert level_of(measurements) == level


def test_how_long_a_measurement_took() -> None:
    assert seconds_of(tcp_measured(pairs_of(NODES), lambda a, b: 1.0)) == pytest.approx(3 * 2.2)
    for damaged in (
        None,
        {},
        {"rounds": [[{"parts": 1}, 7], "x"]},
        {"rounds": [[{"parts": {"a": {"steps": [{"duration_s": "x"}]}}}]]},
    ):
        assert seconds_of(damaged) == 0.0


# --------------------------------------------------------------------------- --dry-run


def test_a_dry_run_tells_what_would_be_measured(bundle: Path) -> None:
    words = ("preflight", "--from", str(bundle), "--dry-run", "--full")
    code, output, errors = run(*words, "--only", "ports,storage", state=bundle.parent)
    assert (code, errors) == (Exit.OK, "")
    assert re.match(r"local, level full, 3 nodes: \d+ checks over facts\n", output)
    assert re.search(r"^  ports +high ports between nodes +1 round, 3 jobs +at most 6 s$", output, re.MULTILINE)
    code, output, _ = run(*words, "--json", state=bundle.parent)
    plan = json.loads(output)
    assert (plan["schema"], plan["level"], plan["nodes"], plan["not_reached"]) == (
        "r4090c.preflight-plan/1",
        "full",
        ["n1", "n2", "n3"],
        [],
    )
    assert {"ports", "nonce"} <= {one["name"] for one in plan["measurements"]}
    assert all(one["rounds"] and one["at_most_s"] > 0 for one in plan["measurements"])
    code, output, _ = run("preflight", "--from", str(bundle), "--dry-run", "--quick", state=bundle.parent)
    assert output.endswith("  nothing is measured\n")


def test_a_plan_of_all_pairs_and_the_last_time() -> None:
    cluster, _, facts = build({"nodes": 4})
    setting = Setting(tuple(cluster.nodes), facts, cluster, Level.FULL)
    (plan,) = rehearse(setting, ["tcp"], [{"level": "full", "nodes": [1, 2, 3, 4], "seconds": {"tcp": 12.5}}])
    assert (len(plan.rounds), sum(map(len, plan.rounds)), plan.last_s) == (3, 6, 12.5)
    assert plan.at_most_s > 12.5
    for record in ({"level": "quick", "nodes": [1, 2, 3, 4], "seconds": {"tcp": 1}}, {"level": "full", "nodes": [1]}, {}):
        assert next(iter(rehearse(setting, ["tcp"], [record]))).last_s is None


@pytest.mark.parametrize(("seconds", "text"), [(4.2, "4 s"), (89, "89 s"), (95, "2 min"), (3600, "60 min"), (7300, "2 h 2 min")])
def test_durations_for_people(seconds: float, text: str) -> None:
    assert lasts(seconds) == text


# --------------------------------------------------------------------------- progress


def test_a_log_hears_of_long_work_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = [0.0]
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with command.progress() as tell:
        for second in range(60):
            clock[0] = float(second)
            tell(f"round {second}")
    assert capsys.readouterr().err.split("\n")[:-1] == ["round 10", "round 25", "round 40", "round 55"]


def test_quick_work_is_silent(bundle: Path) -> None:
    started = time.monotonic()
    assert replay(bundle)[2] == ""
    assert time.monotonic() - started < command.FIRST_WORD_S


def into(bundle: Path, where: str, *words: str) -> tuple[int, str]:
    """Run the program with standard output going `where`; return (exit code, standard error)."""
    line = f"{shlex.join([*PROGRAM, 'preflight', '--from', str(bundle), *words])}; echo code $? >&2"
    shell = subprocess.run(
        ["sh", "-c", f"({line}) {where}"],
        capture_output=True,
        text=True,
        cwd=bundle.parent,
        env=environment(bundle.parent),
        timeout=60,
    )
    return int(shell.stderr.rpartition("code ")[2]), shell.stderr


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_a_reader_that_went_away_changes_neither_the_verdict_nor_the_files(bundle: Path, words: tuple[str, ...]) -> None:
    code, errors = into(bundle, "| true", "--html", "r.html", "--only", "time", *words)
    assert code == Exit.OK and "written: r.html" in errors
    assert (bundle.parent / "r.html").stat().st_size > 100
    (bundle.parent / "r.html").unlink()
    code, errors = into(bundle, "| true", "--html", "r.html", "--only", "free-ports", *words)
    assert code == Exit.UNKNOWN and "written: r.html" in errors, "nothing of it was measured"


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full here")
def test_a_full_disk_behind_standard_output_is_told_and_loses_no_file(bundle: Path) -> None:
    code, errors = into(bundle, "> /dev/full", "--html", "r.html", "--only", "time", "-v")
    assert code == Exit.USAGE
    assert "standard output: cannot be written: No space left on device" in errors and "written: r.html" in errors
    assert "Traceback" not in errors and "bug:" not in errors
