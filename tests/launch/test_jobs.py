"""How a run stands, from its agents' files; and the two programs that read them on a node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launch.jobs import HOLD, HOLD_S, LIST, NOTE, READ, SETTLES_S, STALE_S, run_state, runs_of
from launch.plan import SCHEMA

NOW = 1_796_000_000.0
PLAN: dict[str, Any] = {
    "schema": SCHEMA,
    "run_id": "tiny-20261130-014212-a3f1",
    "recipe": "tiny",
    "attempt": 1,
    "nodes": [{"name": "node01"}, {"name": "node02"}],
    "created_at": "2026-01-01T00:00:00Z",
}
KILLED = {"node": "node02", "kind": "rank-failed", "rank": 1, "exit_code": -9, "time": NOW - 3}


def agent(outcome: str | None = None, age_s: float = 1.0, *events: dict[str, Any]) -> dict[str, Any]:
    return {"heartbeat": NOW - age_s, "end": {"outcome": outcome} if outcome else None, "events": list(events), "attempt": 1}


STOPPED = {"node": "node01", "kind": "stopped", "by": "kim", "time": NOW - 2}


@pytest.mark.parametrize(
    ("agents", "expected"),
    [
        ({"node01": agent("done"), "node02": agent("done", 9999)}, ("done", None)),
        ({"node01": agent(), "node02": agent()}, ("running", None)),
        ({"node01": agent()}, ("running", None)),
        ({"node01": agent("done"), "node02": agent()}, ("running", None)),
        ({"node01": agent("failed", 1, KILLED), "node02": agent()}, ("failed", "rank 1 on node02 was killed by SIGKILL")),
        ({"node01": agent("stopped", 1, STOPPED), "node02": agent("stopped", 1)}, ("stopped", "stopped by kim")),
        ({"node01": agent("done"), "node02": agent(None, STALE_S + 1)}, ("done", None)),  # it was reached too late, or not at all
        ({"node01": agent("failed", 1)}, ("failed", "node02 stopped answering: its agent told no end")),
        ({"node01": agent(None, STALE_S + 1)}, ("lost", "no agent has been heard and none told an end")),
        ({}, ("lost", "no agent has been heard and none told an end")),
    ],
)
def test_run_state(agents: dict[str, Any], expected: tuple[str, str | None]) -> None:
    assert run_state(PLAN, agents, NOW) == expected


def test_a_run_that_starts_is_running_before_any_agent_has_written() -> None:
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(NOW - 3))
    assert run_state({**PLAN, "created_at": created}, {}, NOW)[0] == "running"
    assert run_state({**PLAN, "created_at": created}, {}, NOW + STALE_S)[0] == "lost"
    assert run_state({**PLAN, "created_at": "yesterday"}, {}, NOW)[0] == "lost"


def program(source: str) -> Any:
    space: dict[str, Any] = {}
    exec(compile(source, "node", "exec"), space)
    return space["main"]


def make_run(top: Path, name: str, **plan: Any) -> Path:
    folder = top / name
    (folder / "agents").mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps({**PLAN, "run_id": name, **plan}))
    return folder


def test_list_tells_the_last_started_first_so_that_a_resumed_run_is_seen(tmp_path: Path) -> None:
    names = ("zebra-20260101-000000-aaaa", "tiny-20260201-000000-cccc", "ant-20260301-000000-bbbb")
    for when, name in enumerate(names):
        os.utime(make_run(tmp_path, name) / "plan.json", (when, when))
    request = {"runs": str(tmp_path), "only": None, "limit": 2, "schema": SCHEMA}
    found = program(LIST)(request)
    assert [Path(run["folder"]).name for run in found["runs"]] == ["ant-20260301-000000-bbbb", "tiny-20260201-000000-cccc"]
    assert abs(found["now"] - time.time()) < 5
    only = program(LIST)({**request, "only": "zebra-20260101-000000-aaaa"})
    assert [run["plan"]["run_id"] for run in only["runs"]] == ["zebra-20260101-000000-aaaa"]


def test_list_passes_over_what_is_no_run_and_agents_of_earlier_attempts(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "tiny-20260101-000000-aaaa", attempt=2)
    (folder / "agents" / "node01.json").write_text(json.dumps({"attempt": 2}))
    (folder / "agents" / "node02.json").write_text(json.dumps({"attempt": 1}))
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"ste')
    make_run(tmp_path, "x-1", schema="somebody's/1")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "plan.json").write_text("[1, 2")
    (tmp_path / "a file").write_text("")
    found = program(LIST)({"runs": str(tmp_path), "only": None, "limit": 9, "schema": SCHEMA})["runs"]
    assert [(run["plan"]["run_id"], list(run["agents"]), run["last"]) for run in found] == [
        ("tiny-20260101-000000-aaaa", ["node01"], {"step": 2})
    ]
    assert program(LIST)({"runs": str(tmp_path / "nothing"), "only": None, "limit": 9, "schema": SCHEMA})["runs"] == []


def test_read_goes_on_where_it_was_and_cuts_no_letter_in_two(tmp_path: Path) -> None:
    log = tmp_path / "0.log"
    whole = "grüß Gott ✓ 🏖️\n".encode()
    read, offset, text = program(READ), 0, ""
    for end in range(1, len(whole) + 1):  # the writer is a byte further each time
        log.write_bytes(whole[:end])
        answer = read({"path": str(log), "offset": offset})
        offset, text = answer["offset"], text + answer["text"]
    assert text == whole.decode()
    assert read({"path": str(log), "offset": offset}) == {"error": None, "text": "", "offset": offset}
    log.write_bytes(b"anew\n")
    assert read({"path": str(log), "offset": offset})["text"] == "anew\n"
    assert read({"path": str(tmp_path / "none"), "offset": 7}) == {"error": "No such file or directory", "text": "", "offset": 7}


@pytest.mark.parametrize(
    "damage",
    [
        {"nodes": None},
        {"nodes": "text"},
        {"nodes": ["a", "b"]},
        {"created_at": None},
        {"attempt": "x"},
        {"recipe": None, "run_id": None},
    ],
)
def test_one_odd_run_folder_does_not_hide_the_others(tmp_path: Path, damage: dict[str, Any]) -> None:
    make_run(tmp_path, "odd-20260301-000000-aaaa", **damage)
    make_run(tmp_path, "tiny-20260101-000000-bbbb")
    answer = program(LIST)({"runs": str(tmp_path), "only": None, "limit": 9, "schema": SCHEMA})
    runs = {run.run_dir.rpartition("/")[2]: run for run in runs_of(answer)}
    assert set(runs) == {"odd-20260301-000000-aaaa", "tiny-20260101-000000-bbbb"}
    assert runs["tiny-20260101-000000-bbbb"].state == "lost"


@pytest.mark.parametrize("agent", [{"end": "x"}, {"heartbeat": None}, {"events": 7, "end": {}}])
def test_an_odd_agent_file_does_not_hide_the_other_runs(tmp_path: Path, agent: dict[str, Any]) -> None:
    folder = make_run(tmp_path, "odd-20260301-000000-aaaa", attempt=1)
    (folder / "agents" / "node01.json").write_text(json.dumps({"attempt": 1, **agent}))
    make_run(tmp_path, "tiny-20260101-000000-bbbb")
    answer = program(LIST)({"runs": str(tmp_path), "only": None, "limit": 9, "schema": SCHEMA})
    assert len(runs_of(answer)) == 2


def test_the_supervisors_diagnosis_of_this_attempt_wins(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "tiny-20260101-000000-bbbb", attempt=2)
    end = {"outcome": "failed", "cause": {}, "time": 1.0}
    for node in ("node01", "node02"):
        (folder / "agents" / f"{node}.json").write_text(json.dumps({"attempt": 2, "end": end, "events": [], "heartbeat": 1.0}))
    for attempt, expected in ((1, "the attempt ended and no agent told why"), (2, "node02 was lost")):
        (folder / "diagnosis.json").write_text(json.dumps({"attempt": attempt, "summary": "node02 was lost"}))
        answer = program(LIST)({"runs": str(tmp_path), "only": None, "limit": 9, "schema": SCHEMA})
        assert [(run.state, run.cause) for run in runs_of(answer)] == [("failed", expected)]


def hold(path: Path, name: str, for_s: float = HOLD_S, settles_s: float = SETTLES_S) -> dict[str, Any]:
    return {"path": str(path), "me": {"id": name, "who": name}, "for_s": for_s, "settles_s": settles_s}


def test_who_holds_a_run_between_two_attempts_keeps_it_and_others_are_told(tmp_path: Path) -> None:
    ask, path = program(HOLD), tmp_path / "between.json"
    assert ask(hold(path, "kim")) is None
    began = time.monotonic()
    assert ask(hold(path, "kim", settles_s=3600)) is None, "who holds it already need not wait"
    assert time.monotonic() - began < 1800
    assert ask(hold(path, "sam"))["who"] == "kim"
    assert program(NOTE)({"path": str(path), "told": {"given_up": "enough"}}) is None
    assert ask(hold(path, "sam", for_s=-1)) is None, "nobody holds what was given up"
    assert ask(hold(path, "kim")) is None, "a hold ends"
    assert [one.name for one in tmp_path.iterdir()] == ["between.json"]


def test_one_of_two_that_ask_at_the_same_moment_holds(tmp_path: Path) -> None:
    """Both find nobody's note; the one whose note is replaced sees it."""
    path, later = tmp_path / "between.json", time.time() + 3.0
    source = (
        HOLD + f"\nimport sys\ntime.sleep(max(0.0, {later!r} - time.time()))\nprint(json.dumps(main(json.loads(sys.argv[1]))))"
    )
    asking = [
        subprocess.Popen([sys.executable, "-c", source, json.dumps(hold(path, name, settles_s=2.0))], stdout=subprocess.PIPE)
        for name in ("kim", "sam")
    ]
    answers = [json.loads(one.communicate(timeout=60)[0]) for one in asking]
    (winner,) = [answer for answer in answers if answer is not None]
    assert answers.count(None) == 1 and winner == json.loads(path.read_text())


def test_a_note_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    told = {"path": str(tmp_path / "gone" / "stop.json"), "told": {"by": "kim", "time": 1.0}}
    assert program(NOTE)(told) == "No such file or directory"
    assert program(HOLD)(hold(tmp_path / "gone" / "between.json", "kim")) is None, "it keeps nobody from going on"
