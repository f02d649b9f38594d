"""bench/train.py: what it reads from its contenders, how it holds their losses against ours, and what it concludes."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path

import pytest

if importlib.util.find_spec("bench") is None:
    pytest.skip("needs bench/", allow_module_level=True)

from bench import train
from bench.record import BenchError, Record

OURS_SAYS = "ranks    2 x CPU, 1 thread(s) a rank, gloo, ZeRO stage 2"
STEP = "step 3/40 loss 5.512345 grad_norm 1.200 lr 5.00e-04 0.412 s 2,485 tokens/s"


def test_engines_are_read_as_they_are_told() -> None:
    assert train.read_engine(OURS_SAYS) == train.ZERO2
    told = "ENGINE DistributedDataParallel zero 0 world 2 backend gloo optimizer AdamW fused True"
    assert train.read_engine(told) == train.PLAIN_DDP
    assert train.read_engine("ENGINE DeepSpeedEngine zero 2 world 2 backend gloo") == train.ZERO2
    world_of_one = train.read_engine("ENGINE DeepSpeedEngine zero 2 world 1 backend gloo")
    assert world_of_one is not None and world_of_one != train.ZERO2
    assert train.read_engine(STEP) is None


def test_steps_are_read_from_both_kinds_of_lines() -> None:
    assert train.read_step(STEP) == (3, 5.512345)
    assert train.read_step("STEP 12 loss 4.25") == (12, 4.25)
    assert train.read_step(OURS_SAYS) is None


def test_only_early_steps_that_both_have_are_compared() -> None:
    ours = {1: 5.0, 2: 4.5, train.COMPARED_STEPS: 3.0, train.COMPARED_STEPS + 1: 2.0}
    theirs = {2: 4.50025, train.COMPARED_STEPS: 3.0, train.COMPARED_STEPS + 1: 9.0}
    many, difference = train.largest_difference(theirs, ours)
    assert many == 2
    assert difference == pytest.approx(0.00025)


SAYS = """
import os, sys, time
if os.environ["RANK"] == "0":
    print(sys.argv[1], flush=True)
    step = 0
    while True:
        step += 1
        print("STEP", step, "loss", 1 / step, flush=True)
        time.sleep(0.02)
time.sleep(600)
"""


def ranks_that_say(engine: str, folder: Path) -> train.Ranks:
    contender = train.Contender("it", (sys.executable, "-c", SAYS, engine), train.ZERO2)
    return train.Ranks(contender, folder / "ranks")


def test_ranks_train_only_when_it_is_their_turn(tmp_path: Path) -> None:
    ranks = ranks_that_say("ENGINE DeepSpeedEngine zero 2 world 2 backend gloo", tmp_path)
    try:
        ranks.start()
        took_s, _ = ranks.turn(5)
        assert took_s > 3 * 0.02  # its beginning may find a step on the way
        while ranks.read(0.0):
            continue
        time.sleep(3)
        assert ranks.read(0.0) == 0, "a step was trained out of turn"
        assert ranks.losses[4] == 0.25
        assert ranks.turn(2)[0] < 3, "the pause was counted"
    finally:
        ranks.close()
    for process in ranks.processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


def test_what_runs_on_something_else_is_refused(tmp_path: Path) -> None:
    ranks = ranks_that_say("ENGINE DistributedDataParallel zero 0 world 2 backend gloo", tmp_path)
    try:
        with pytest.raises(BenchError, match="runs on DistributedDataParallel, ZeRO 0, 2 ranks, gloo, not on DeepSpeedEngine"):
            ranks.start()
    finally:
        ranks.close()


def test_what_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    contender = train.Contender("it", (sys.executable, "-c", "raise SystemExit('no such module')"), train.ZERO2)
    ranks = train.Ranks(contender, tmp_path / "ranks")
    try:
        with pytest.raises(BenchError, match="it ended: no such module"):
            ranks.start()
    finally:
        ranks.close()


def test_the_report_holds_the_fastest_peer_against_ours_and_leaves_out_other_losses(tmp_path: Path) -> None:
    absent = {"HF Trainer": "not installed: x"}
    record = Record(tmp_path, "train", versions={}, rounds=2, steps=4, starts=1, tokens_per_step=100, set=[], absent=absent)
    chosen = [
        train.Contender(train.OURS, (), train.ZERO2, peer=False),
        train.Contender(train.DDP, (), train.PLAIN_DDP),
        train.Contender(train.BY_HAND, (), train.ZERO2, peer=False),
        train.Contender(train.ACCELERATE, (), train.ZERO2),
    ]
    started = {one.name: train.Ranks(one, tmp_path, one.wanted, {1: 5.0, 2: 4.0}) for one in chosen}
    started[train.ACCELERATE].losses[2] = 4.1
    for number in range(2):
        for name, rate in ((train.OURS, 100.0), (train.DDP, 102.0), (train.BY_HAND, 200.0), (train.ACCELERATE, 300.0)):
            run = {"contender": name, "round": number, "tokens_s": rate * (1 + number), "cpu_s_step": 1.0, "load_1min": 2.0}
            record.add(run)
    train.leave_out_others_losses(record, started)
    body, goals = train.report(record, chosen, started, [0.4, 0.5, 3.0])
    assert [goal.text for goal in goals] == [f"tokens/s, {train.DDP} / {train.OURS}", "the loop's own share of a step, %"]
    assert [goal.measured for goal in goals] == [pytest.approx(1.02), 0.5]
    assert f"| {train.ACCELERATE} | DeepSpeedEngine, ZeRO 2, 2 ranks, gloo | 0 | – |" in body
    assert "0.100000 in 2" in body
    assert "Not measured: HF Trainer, not installed: x" in body
