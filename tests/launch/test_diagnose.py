"""The first cause: recorded ends of attempts, and that neither order nor repetition of the events matters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.causes import MENDS
from launch.diagnose import Cause, first_cause, mends, why_mends
from launch.diagnose_log import CAUSES

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "cases" / "diagnose.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_cases(case: dict[str, Any]) -> None:
    cause = first_cause(case["events"], case.get("unreachable", {}), "RUN")
    expect = case["expect"]
    assert (cause.kind, cause.node, cause.rank) == (expect["kind"], expect["node"], expect["rank"]), cause
    assert expect["says"] in cause.summary
    if "next" in expect:
        assert cause.next_command == expect["next"]


@given(st.data())
def test_neither_order_nor_repetition_matters(data: st.DataObject) -> None:
    case = data.draw(st.sampled_from(CASES))
    unreachable = case.get("unreachable", {})
    expected = first_cause(case["events"], unreachable, "RUN")
    # Every node's own file has its events without `received`, the lead's has those of all.
    copies = [{key: value for key, value in event.items() if key != "received"} for event in case["events"]]
    some = data.draw(st.lists(st.sampled_from(copies), max_size=4))
    shuffled = data.draw(st.permutations([*case["events"], *some]))
    assert first_cause(shuffled, unreachable, "RUN") == expected


EVENT_KINDS = {
    *("stopped", "unknown", "rank-failed", "rank-killed", "torchrun-failed", "torchrun-killed", "agent-error", "agent-killed"),
    *("node-lost", "start-failed", "lease-taken", "rank-frozen", "rank-stuck", "storage-hung", "collective-hung"),
}
"""Kinds of causes that come from events alone."""


def of_kind(kind: str) -> Cause:
    return Cause(kind, "node01", 0, "said", "proof", "next")


def test_what_mends_is_told_of_every_kind_and_of_no_other() -> None:
    assert {cause.kind for cause in CAUSES} | EVENT_KINDS == MENDS.keys()
    assert all(mends(of_kind(kind)) in ("again", "other-node", "never") and why_mends(kind)[1] for kind in MENDS)
    assert mends(of_kind("what nobody thought of")) == "again"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("wrong-input", "never"),
        ("cuda-out-of-memory", "never"),
        ("disk-full", "never"),
        ("nan-loss", "never"),
        ("module-missing", "never"),
        ("wrong-network-interface", "never"),
        ("stopped", "never"),
        ("node-lost", "again"),
        ("gpu-fallen-off-bus", "other-node"),
        ("gpu-hardware-fault", "other-node"),
        ("rank-failed", "again"),
        ("rank-frozen", "again"),
        ("collective-hung", "again"),
        ("port-taken", "again"),
        ("host-out-of-memory", "again"),
    ],
)
def test_mends(kind: str, expected: str) -> None:
    assert mends(of_kind(kind)) == expected


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_every_kind_a_case_has_is_known(case: dict[str, Any]) -> None:
    assert case["expect"]["kind"] in MENDS


KINDS = (
    "stopped",
    "rank-failed",
    "torchrun-killed",
    "torchrun-failed",
    "start-failed",
    "agent-error",
    "agent-lost",
    "node-lost",
    "rank-hung",
    "lease-taken",
)
WEAK = "RuntimeError: [pair.cc] Connection closed by peer [10.0.0.12]"
events = st.fixed_dictionaries(
    {"node": st.sampled_from(["node01", "node02", "node03"]), "kind": st.sampled_from(KINDS), "time": st.floats(0, 100)},
    optional={
        "received": st.floats(0, 100),
        "gone": st.none() | st.floats(0, 100),
        "rank": st.integers(0, 3),
        "exit_code": st.sampled_from([None, 1, 3, -6, -9, -15]),
        "peer": st.sampled_from(["node01", "node02", "node03"]),
        "log_tail": st.sampled_from(["", WEAK, "ValueError: x", "grüß ✓", "torch.OutOfMemoryError: CUDA out of memory. Tried"]),
        "process": st.sampled_from(["T", "D", "S", "R", None]),
        "wchan": st.sampled_from(["nfs_wait_bit_killable", "0", None, "nv_wait"]),
        "step": st.none() | st.integers(0, 9),
        "silent_s": st.none() | st.floats(0, 999),
        "frames": st.sampled_from([None, [], ["a.py:1 f"], [7], "x"]),
        "waits_for_peers": st.booleans(),
        "follows": st.booleans(),
    },
)


@given(st.lists(events, max_size=6), st.dictionaries(st.sampled_from(["node01", "node02"]), st.just("no route")), st.randoms())
def test_any_events_have_one_cause(told: list[dict[str, Any]], unreachable: dict[str, str], random: Any) -> None:
    cause = first_cause(told, unreachable, "RUN")
    assert cause.summary and cause.next_command
    shuffled = list(told)
    random.shuffle(shuffled)
    assert first_cause(shuffled, unreachable, "RUN") == cause


def test_what_a_rank_printed_reaches_no_terminal() -> None:
    event = {
        "node": "node01",
        "kind": "rank-failed",
        "time": 1.0,
        "rank": 0,
        "exit_code": 1,
        "log_tail": "ValueError: \x1b]0;x\x07",
    }
    cause = first_cause([event], {}, "RUN")
    assert (cause.summary + cause.evidence.replace("\n", "")).isprintable()


@given(st.lists(events, max_size=6))
def test_a_consequence_never_wins_over_a_rank_that_was_killed(told: list[dict[str, Any]]) -> None:
    weak = [{**event, "kind": "rank-failed", "exit_code": 1, "log_tail": WEAK} for event in told]
    killed = {"node": "node09", "kind": "rank-failed", "rank": 9, "exit_code": -9, "time": 1000.0}
    assert first_cause([*weak, killed], {}, "RUN").node == "node09"
