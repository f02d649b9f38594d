"""What changed since the last fit preflight: findings, figures beyond their noise, what the nodes are; and what is remembered."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netcheck.bundle import save_bundle
from netcheck.diff import Diff, compare, last_good, noise, record_of, told
from netcheck.figures import figures_of
from netcheck.judge import judge
from netcheck.measure.figure import Figure
from netcheck.raw import parse_raw
from r4090c import store
from r4090c.errors import Exit, ParseError
from r4090c.model import Cluster, Status
from tests.checks.cases import build
from tests.cli import run
from tests.reports import machine

ARROWS = [("node01", "node02"), ("node02", "node01"), ("node01", "node03"), ("node03", "node01")]


def figures(gbit_s: float = 24.0, **odd: float) -> list[Figure]:
    return [
        Figure("tcp", f"{a}->{b}", "4 streams", odd.get(f"{a}_{b}", gbit_s), "Gbit/s", higher_is_better=True) for a, b in ARROWS
    ]


def record(
    case: Mapping[str, Any] | None = None, own: Sequence[Figure] = (), level: str = "full"
) -> tuple[dict[str, Any], Cluster]:
    cluster, raw, facts = build(case or {})
    made = record_of(cluster, raw, facts, judge(cluster, raw, facts), own, level)
    again: dict[str, Any] = json.loads(json.dumps(made))
    assert again == made, "a record is JSON"
    return made, cluster


def difference(before: Mapping[str, Any], now: Mapping[str, Any], history: Sequence[Mapping[str, Any]] = ()) -> Diff:
    (old, _), (new, cluster) = (record(one.get("case"), one.get("figures", ())) for one in (before, now))
    return compare(old, new, [record(one.get("case"), one.get("figures", ()))[0] for one in history], cluster)


# --------------------------------------------------------------------------- what changed


def test_the_same_cluster_has_not_changed() -> None:
    same = {"figures": figures()}
    diff = difference(same, same)
    assert diff.empty
    assert told(diff) == [("green", "since the preflight of 2026-11-30T01:00:00+00:00 (full, fit): nothing changed")]


def test_findings_that_came_went_and_changed() -> None:
    worse = {"facts": {"node02": {"clock": {"offset_s": 6.0}}, "node03": {"os": {"kernel": "6.8.0-49-generic"}}}}
    diff = difference({}, {"case": worse})
    changed = {(one.check, one.subject): (one.was, one.now, one.worse) for one in diff.findings}
    assert changed["clock-skew", "node02"] == ("pass", "fail", True)
    assert changed["version-agreement", "node03/kernel"] == ("", "warn", True)
    assert changed["version-agreement", "node03"] == ("pass", "", True)
    assert [(one.node, one.item, one.was, one.now) for one in diff.items] == [
        ("node03", "kernel", "6.8.0-45-generic", "6.8.0-49-generic")
    ]
    back = difference({"case": worse}, {})
    assert not any(one.worse for one in back.findings)
    assert {(one.check, one.subject, one.was, one.now) for one in back.findings} == {
        (one.check, one.subject, one.now, one.was) for one in diff.findings
    }


def test_figures_change_by_more_than_their_noise() -> None:
    diff = difference({"figures": figures()}, {"figures": figures(node01_node03=18.0, node03_node01=26.0, node01_node02=23.1)})
    assert [(one.subject, one.was, one.now, one.change, one.worse) for one in diff.figures] == [
        ("node01->node03", 24.0, 18.0, -0.25, True),
        ("node03->node01", 24.0, 26.0, 0.0833, False),
    ]
    assert [text for colour, text in told(diff) if colour == "yellow"] == [
        "  figure   node01->node03  tcp 4 streams: 24.0 → 18.0 Gbit/s (-25%)"
    ]


def test_a_figure_that_always_scatters_is_no_change() -> None:
    dice = random.Random(1)
    history = [{"figures": figures(24.0 * dice.uniform(0.8, 1.2))} for _ in range(8)]
    assert difference({"figures": figures(24.0)}, {"figures": figures(19.5)}).figures
    assert not difference({"figures": figures(24.0)}, {"figures": figures(19.5)}, history).figures


@pytest.mark.parametrize(
    ("earlier", "share"),
    [([], 0.05), ([10.0, 20.0], 0.05), ([10.0] * 6, 0.05), ([9.0, 10.0, 11.0, 10.0, 8.0], 0.4448), ([0.0] * 5, 0.05)],
)
def test_noise_is_learnt_from_history(earlier: list[float], share: float) -> None:
    assert noise(Figure("tcp", "a->b", "", 10.0, "Gbit/s"), earlier) == pytest.approx(share, rel=1e-3)


def test_times_get_worse_upwards() -> None:
    slow = [Figure("rdma", "node01->node02", "latency", value, "us", False, 0.2) for value in (2.0, 3.0)]
    (change,) = difference({"figures": slow[:1]}, {"figures": slow[1:]}).figures
    assert change.worse and change.change == 0.5


def test_only_what_both_looked_at_is_compared() -> None:
    old, cluster = record({"nodes": 3}, figures())
    new = json.loads(json.dumps(old))
    new["nodes"] = ["node01", "node02", "node04"]
    for by_status in new["findings"].values():
        for subjects in by_status.values():
            subjects[:] = [subject.replace("node03", "node04") for subject in subjects]
    del new["findings"]["mount"]
    new["findings"]["tcp-bandwidth"] = {"fail": ["node01->node02"]}
    diff = compare(old, new, [], cluster)
    assert (diff.nodes_added, diff.nodes_removed, diff.findings) == (("node04",), ("node03",), ())
    assert diff.not_compared == ("mount", "tcp-bandwidth")
    assert all("node03" not in one.subject for one in diff.figures)


def test_what_could_not_be_read_is_a_finding_and_no_change_of_versions() -> None:
    silent = {
        "facts": {"node02": {"python": {"error": "timed out"}}},
        "reach": {"node03": {"verdict": "lost", "observed": "gone"}},
    }
    diff = difference({}, {"case": silent})
    assert diff.items == ()
    assert ("version-agreement", "node02", "pass", "unknown") in {
        (one.check, one.subject, one.was, one.now) for one in diff.findings
    }


JSON = st.recursive(
    st.none() | st.integers(-3, 3) | st.text(max_size=4) | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "findings",
                    "figures",
                    "items",
                    "nodes",
                    "common",
                    "values",
                    "unit",
                    "noise",
                    "limits",
                    "fail",
                    "node01",
                    "level",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=14,
)


@given(JSON, JSON)
def test_a_damaged_record_is_refused(value: Any, other: Any) -> None:
    good, cluster = record()
    for before, now in ((value, good), ({**good, **value} if isinstance(value, dict) else value, good)):
        try:
            compare(before, now, [other], cluster)
        except ParseError:
            continue


# --------------------------------------------------------------------------- which one is compared with


def test_the_last_fit_one_that_looked_as_deep() -> None:
    records = [
        {"verdict": "not fit", "level": "full", "n": 0},
        {"verdict": "fit", "level": "quick", "n": 1},
        {"verdict": "fit", "level": "full", "n": 2},
        {"verdict": "fit", "level": "default", "n": 3},
    ]
    chosen = {level: (last_good(records, level) or {}).get("n") for level in ("quick", "default", "full")}
    assert chosen == {"quick": 1, "default": 2, "full": 2}
    assert (last_good(records[:2], "full") or {})["n"] == 1
    assert last_good(records[:1], "quick") is None
    assert last_good([{"verdict": "fit", "level": 7}], "quick") == {"verdict": "fit", "level": 7}


# --------------------------------------------------------------------------- what is remembered


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("R4090C_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def rows(state: Path, question: str) -> list[Any]:
    with closing(sqlite3.connect(state / "r4090c.db")) as database:
        return database.execute(question).fetchall()


def test_a_history_of_an_older_version_keeps_working(state: Path) -> None:
    state.mkdir()
    with closing(sqlite3.connect(state / "r4090c.db")) as database, database:
        database.execute("CREATE TABLE preflight (at REAL, cluster TEXT, nodes TEXT, verdict TEXT, findings TEXT)")
        database.execute("INSERT INTO preflight VALUES (1.0, 'atelier', '[]', 'fit', '[]')")
    assert store.preflight_records("atelier") == []
    made, _ = record()
    store.record_preflight("atelier", ["node01"], "fit", [], made)
    assert store.preflight_records("atelier") == [made]
    assert len(rows(state, "SELECT * FROM preflight")) == 2
    with closing(sqlite3.connect(state / "r4090c.db")) as database, database:  # the older version again
        database.execute("INSERT INTO preflight VALUES (?,?,?,?,?)", (2.0, "atelier", "[]", "fit", "[]"))


def test_old_records_go_and_the_last_fit_ones_stay(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "RECORDS_KEPT", 5)
    monkeypatch.setattr(store, "VERDICTS_KEPT", 8)
    for number in range(12):
        level = "full" if number == 1 else "quick"
        verdict = "fit" if number in (0, 1, 2) else "not fit"
        made = {"level": level, "verdict": verdict, "n": number, "started_at": f"2026-11-{number + 1:02}"}
        store.record_preflight("atelier", [], verdict, [], made)
    store.record_preflight("other", [], "fit", [], {"level": "quick", "verdict": "fit", "started_at": ""})
    assert [one["n"] for one in store.preflight_records("atelier")] == [11, 10, 9, 8, 7, 2, 1]
    assert [one["n"] for one in store.preflight_records("atelier", before="2026-11-09")] == [7, 2, 1]
    assert rows(state, "SELECT count(*) FROM preflight WHERE cluster='atelier'") == [(8,)]
    assert rows(state, "SELECT count(*) FROM preflight WHERE cluster='other'") == [(1,)]


def test_a_damaged_record_is_left_out(state: Path) -> None:
    store.record_preflight("atelier", [], "fit", [], {"level": "quick", "verdict": "fit"})
    with closing(sqlite3.connect(state / "r4090c.db")) as database, database:
        for damaged in (b"nonsense", None, "text"):
            database.execute("INSERT INTO preflight_record VALUES (9e9, 'atelier', 'quick', 'fit', ?)", (damaged,))
    assert store.preflight_records("atelier") == [{"level": "quick", "verdict": "fit"}]


def test_a_record_of_sixteen_nodes_is_small(state: Path) -> None:
    case = {"nodes": 9}
    cluster, raw, facts = build(case)
    names = [f"n{number:02}" for number in range(16)]
    many = [Figure(kind, f"{a}->{b}", "x", random.random() * 99, "u") for kind in "abcd" for a in names for b in names if a != b]
    made = record_of(cluster, raw, facts, judge(cluster, raw, facts), many, "full")
    store.record_preflight("atelier", names, "fit", [], made)
    ((size,),) = rows(state, "SELECT length(record) FROM preflight_record")
    assert size < 40_000


# --------------------------------------------------------------------------- the command


def remembered(cluster: Cluster, raw: Any, started_at: str, **change: Any) -> dict[str, Any]:
    """Remember a fit preflight that said what `raw` says, at another time."""
    facts = parse_raw(raw, cluster)
    findings = judge(cluster, raw, facts)
    made = record_of(
        cluster, replace(raw, started_at=started_at), facts, findings, figures_of(raw.measurements, raw.reach), "full"
    )
    made |= {"verdict": "fit", **change}
    store.record_preflight(cluster.name, list(raw.reach), "fit", [], made)
    return made


def test_the_command_tells_what_changed(state: Path, tmp_path: Path) -> None:
    cluster, raw = machine(tmp_path, "n1", "n2", rate=lambda sender, receiver: 9.4)
    before = remembered(cluster, raw, "2026-01-01T00:00:00+00:00")
    before["items"]["common"]["os.kernel"] = "5.10.0-1-amd64"
    store.record_preflight(cluster.name, list(raw.reach), "fit", [], before)
    remembered(cluster, raw, "2999-01-01T00:00:00+00:00", figures={})  # later than the bundle: not looked at
    _, slower = machine(tmp_path, "n1", "n2", rate=lambda sender, receiver: 9.4 if sender == "n1" else 5.0)
    save_bundle(tmp_path / "b.tar.gz", cluster, slower)
    words = ("preflight", "--from", str(tmp_path / "b.tar.gz"), "--diff")
    code, output, errors = run(*words, state=state)
    assert code in (Exit.OK, Exit.FAILED) and errors == ""
    assert "since the preflight of 2026-01-01T00:00:00+00:00 (full, fit):" in output
    assert "  figure   n2->n1  tcp 4 streams: 9.40 → 5.00 Gbit/s (-47%)" in output
    assert "  changed  n1, n2  kernel: 5.10.0-1-amd64 → " in output
    code, output, errors = run(*words, "--json", "--html", str(tmp_path / "r.html"), state=state)
    diff = json.loads(output)["diff"]
    assert [(one["subject"], one["was"], one["now"], one["worse"]) for one in diff["figures"]] == [("n2->n1", 9.4, 5.0, True)]
    assert {one["item"] for one in diff["items"]} == {"kernel"}
    assert "n2-&gt;n1  tcp 4 streams: 9.40 → 5.00" in (tmp_path / "r.html").read_text()


def test_nothing_to_compare_with_is_said_and_is_no_fault(state: Path, tmp_path: Path) -> None:
    save_bundle(tmp_path / "b.tar.gz", *machine(tmp_path, "n1"))
    words = ("preflight", "--from", str(tmp_path / "b.tar.gz"), "--only", "time", "--diff")
    code, output, errors = run(*words, state=tmp_path)
    assert (code, errors) == (Exit.OK, "")
    assert "no earlier preflight that found local fit is remembered here" in output
    code, output, errors = run(*words, "--json", state=tmp_path)
    assert json.loads(output)["diff"] is None and "no earlier preflight" in errors
    code, output, _ = run(*words, state=Path("/dev/null"), cwd=tmp_path)
    assert code == Exit.OK and "cannot be compared" in output


def test_statuses_of_the_model_are_those_of_records() -> None:
    made, _ = record({"facts": {"node02": {"clock": {"offset_s": 6.0}}}})
    assert {status for by_status in made["findings"].values() for status in by_status} <= {status.value for status in Status}
