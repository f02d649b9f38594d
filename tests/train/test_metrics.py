"""metrics.jsonl and heartbeats: what is written, what survives a kill, what the golden files pin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from train.metrics import Heartbeat, Metrics, keep_until, metrics_line

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def test_lines_have_the_golden_keys_in_the_golden_order() -> None:
    for name, memory_gib in (("metrics.jsonl", None), ("metrics-gpu.jsonl", 17.25)):
        for line in (GOLDEN / name).read_text().splitlines():
            golden = json.loads(line)
            made = metrics_line(
                golden["step"],
                golden["tokens"] // golden["step"],
                golden["loss"],
                golden["grad_norm"],
                golden["lr"],
                golden["step_time_s"],
                golden["data_time_s"],
                memory_gib,
            )
            assert list(made) == list(golden)
            assert {key: made[key] for key in made if key != "time"} == {key: golden[key] for key in golden if key != "time"}
            assert abs(type(golden["time"])(made["time"]) - made["time"]) < 1e-6


def test_heartbeat_has_the_golden_keys_and_phases(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, rank=3)
    golden = json.loads((GOLDEN / "heartbeat.json").read_text())
    heartbeat.beat(golden["phase"], golden["step"])
    written = json.loads((tmp_path / "heartbeats" / "3.json").read_text())
    assert list(written) == list(golden)
    assert {**written, "time": 0} == {**golden, "time": 0}
    assert [path.name for path in (tmp_path / "heartbeats").iterdir()] == ["3.json"]


def test_heartbeat_is_written_on_a_new_phase_and_else_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("time.time", lambda: now_s)
    heartbeat = Heartbeat(tmp_path, rank=0)

    def told() -> tuple[str, int]:
        beat = json.loads(heartbeat.file.read_text())
        return beat["phase"], beat["step"]

    heartbeat.beat("train", 1)
    now_s += 0.5
    heartbeat.beat("train", 2)
    assert told() == ("train", 1)
    heartbeat.beat("checkpoint")
    assert told() == ("checkpoint", 2)
    now_s += 0.1
    heartbeat.beat("train", 3)
    now_s += 1.0
    heartbeat.beat("train", 4)
    assert told() == ("train", 4)
    now_s -= 3600  # a clock that was set back must not silence it
    heartbeat.beat("train", 5)
    assert told() == ("train", 5)


def test_a_resumed_run_drops_later_and_torn_lines(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step}) + "\n" for step in range(1, 6)]
    file.write_text("".join(lines) + '{"step": 3, "lo')
    Metrics(tmp_path, resumed_at=3).write({"step": 4, "again": True})
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"step": 1},
        {"step": 2},
        {"step": 3},
        {"step": 4, "again": True},
    ]


@pytest.mark.parametrize("text", ["", "\n", "null\n", "[]\n", "{}\n", '{"step": "x"}\n', '{"step": 1}', "\x00\x00\n"])
def test_nothing_that_is_no_line_is_kept(text: str) -> None:
    assert keep_until(text, 100) == ""


def test_a_line_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    written = Metrics(tmp_path, resumed_at=0)
    written.write({"step": 1})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
