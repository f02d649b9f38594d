"""launch/restart.py: what follows a failed attempt, worked out by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.causes import Mends
from launch.diagnose import Cause
from launch.restart import (
    FIRST_WAIT_S,
    LONGEST_WAIT_S,
    WITHOUT_PROGRESS,
    Decision,
    Ended,
    Policy,
    Stock,
    decide,
    without_progress,
)

POLICY = Policy(without_progress=3, return_s=300, give_up_s=1800)
TWO = ("node01", "node02")


def ended(
    node: str = "node01",
    saved: int | None = None,
    mends: Mends = "again",
    nodes: tuple[str, ...] = TWO,
    kind: str = "rank-failed",
) -> Ended:
    return Ended(nodes, Cause(kind, node, 0, f"{kind} on {node}", "", "look"), mends, saved)


def any_number(nodes: int) -> str | None:
    return None


def only(*allowed: int) -> Callable[[int], str | None]:
    return lambda nodes: None if nodes in allowed else f"not with {nodes}"


def answering(*names: str, waited_s: float = 0.0, spares: tuple[str, ...] = (), resting: dict[str, str] | None = None) -> Stock:
    return Stock(frozenset(names), spares, resting or {}, waited_s)


def test_a_rank_that_fails_is_started_again_on_the_same_nodes_at_once() -> None:
    decision = decide([ended()], answering(*TWO), any_number, POLICY)
    assert (decision.go, decision.nodes, decision.wait_s, dict(decision.rest)) == ("again", TWO, 0.0, {})


def test_who_stops_a_run_ends_it() -> None:
    decision = decide([ended(kind="stopped")], answering(*TWO), any_number, POLICY)
    assert decision == Decision("give-up", "stopped on node01")


def test_what_starting_again_does_not_mend_ends_it() -> None:
    decision = decide([ended(mends="never")], answering(*TWO), any_number, POLICY)
    assert decision.go == "give-up"


def test_three_attempts_without_a_new_checkpoint_are_enough() -> None:
    history = [ended("node01", 20), ended("node02", 20), ended("node01", 20)]
    assert decide(history, answering(*TWO), any_number, POLICY).go == "again"
    told = decide([*history, ended("node02", 20)], answering(*TWO), any_number, POLICY)
    assert told.go == "give-up"
    assert "3 attempts in a row saved no new checkpoint (none after step 20)" in told.why


def test_a_run_that_never_saved_one_ends_too() -> None:
    told = decide([ended("node01"), ended("node02"), ended("node01")], answering(*TWO), any_number, POLICY)
    assert (told.go, told.why) == ("give-up", "3 attempts in a row saved no new checkpoint (no checkpoint)")


def test_progress_earns_the_budget_back() -> None:
    history = [ended("node01"), ended("node02"), ended("node01", 20), ended("node02", 40), ended("node01", 60)]
    assert without_progress(history) == 0
    assert decide(history, answering(*TWO), any_number, POLICY).go == "again"
    assert without_progress([*history, ended("node02", 60), ended("node01", 60)]) == 2


def test_an_older_checkpoint_is_no_progress() -> None:
    """The newest was damaged, say, and the attempt before it stands again."""
    assert without_progress([ended(saved=40), ended(saved=20), ended(saved=30)]) == 2


def test_waits_grow_without_progress() -> None:
    patient = Policy(without_progress=100)
    nodes = ("node01", "node02", "node03")
    turns = [ended(nodes[number % 3], nodes=nodes) for number in range(20)]
    waits = [decide(turns[: many + 1], answering(*nodes), any_number, patient).wait_s for many in range(20)]
    assert waits[:4] == [0.0, FIRST_WAIT_S, 3 * FIRST_WAIT_S, 9 * FIRST_WAIT_S]
    assert waits[-1] == LONGEST_WAIT_S


def test_a_broken_node_is_left_out_and_a_spare_takes_its_place_and_rank() -> None:
    stock = answering("node01", "node02", "node04", spares=("node03", "node04"))
    decision = decide([ended("node01", mends="other-node", kind="gpu-fell-off")], stock, any_number, POLICY)
    assert decision.nodes == ("node04", "node02")  # node03 does not answer
    assert dict(decision.rest) == {"node01": "gpu-fell-off on node01"}
    assert "node04 for node01" in decision.why


def test_a_spare_that_rests_is_not_taken() -> None:
    stock = answering(*TWO, "node03", spares=("node03",), resting={"node03": "fell off the bus"})
    decision = decide([ended("node02", mends="other-node")], stock, any_number, POLICY)
    assert (decision.go, decision.nodes) == ("again", ("node01",))


def test_a_node_that_somebody_chose_is_not_thrown_out_for_what_it_did_to_another_run() -> None:
    stock = answering(*TWO, resting={"node02": "fell off the bus yesterday"})
    decision = decide([ended("node01", 20)], stock, any_number, POLICY)
    assert (decision.go, decision.nodes) == ("again", TWO)


@pytest.mark.parametrize("kind", ["collective-hung", "peer-gone", "unknown"])
def test_a_cause_without_a_culprit_blames_nobody(kind: str) -> None:
    history = [ended("node02", 20, kind=kind)] * 3
    decision = decide(history, answering(*TWO), any_number, Policy(without_progress=9))
    assert (decision.nodes, dict(decision.rest)) == (TWO, {})


def test_a_node_where_something_would_not_end_is_left_out() -> None:
    last = Ended(TWO, Cause("rank-failed", "node01", 0, "", "", ""), "again", 20, left=("node02",))
    decision = decide([last], answering(*TWO, "node03", spares=("node03",)), any_number, POLICY)
    assert decision.nodes == ("node01", "node03")
    assert list(decision.rest) == ["node02"]


def test_a_node_that_fails_twice_in_a_row_is_left_out() -> None:
    decision = decide([ended("node02", 20), ended("node02", 20), ended("node02", 20)], answering(*TWO), any_number, POLICY)
    assert decision.nodes == ("node01",)
    assert list(decision.rest) == ["node02"]


def test_a_run_on_one_node_has_nobody_to_blame() -> None:
    alone = [ended("node01", nodes=("node01",)), ended("node01", nodes=("node01",))]
    decision = decide(alone, answering("node01"), any_number, POLICY)
    assert (decision.go, decision.nodes, dict(decision.rest)) == ("again", ("node01",), {})


def test_a_node_that_is_gone_is_waited_for_then_done_without() -> None:
    history = [ended("node02", 20, kind="node-lost")]
    assert decide(history, answering("node01"), any_number, POLICY).go == "wait"
    assert decide(history, answering("node01", waited_s=299), any_number, POLICY).go == "wait"
    later = decide(history, answering("node01", waited_s=300), any_number, POLICY)
    assert (later.go, later.nodes) == ("again", ("node01",))
    assert decide(history, answering(*TWO, waited_s=299), any_number, POLICY).nodes == TWO


def test_where_fewer_nodes_cannot_go_on_it_waits_longer_then_gives_up() -> None:
    history = [ended("node02", 20, kind="node-lost")]
    assert decide(history, answering("node01", waited_s=1000), only(2), POLICY).go == "wait"
    told = decide(history, answering("node01", waited_s=1800), only(2), POLICY)
    assert told.go == "give-up"
    assert "node02: does not answer; on 1 nodes: not with 1" in told.why


def test_a_broken_node_is_not_waited_for() -> None:
    told = decide([ended("node02", mends="other-node")], answering(*TWO), only(2), POLICY)
    assert told.go == "give-up"
    assert "nothing takes the place of node02" in told.why


def test_the_largest_number_of_nodes_that_divides_is_taken() -> None:
    nodes = ("node01", "node02", "node03", "node04")
    stock = answering("node01", "node03", "node04", waited_s=300)
    decision = decide([ended("node02", nodes=nodes, kind="node-lost")], stock, only(1, 2, 4), POLICY)
    assert decision.nodes == ("node01", "node03")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["node01", "node02", "?"]),
            st.none() | st.integers(0, 100),
            st.sampled_from(["again", "other-node", "never"]),
        ),
        min_size=1,
        max_size=8,
    ),
    st.frozensets(st.sampled_from(["node01", "node02", "node03"])),
    st.floats(0, 4000),
    st.frozensets(st.integers(1, 2)),
)
def test_any_history_has_an_answer(
    turns: list[tuple[str, int | None, Mends]], names: frozenset[str], waited_s: float, sizes: frozenset[int]
) -> None:
    """Only nodes that answer and do not rest are started on; waiting ends; what never saves is not repeated for ever."""
    history = [ended(node, saved, mends) for node, saved, mends in turns]
    decision = decide(history, Stock(names, ("node03",), {}, waited_s), only(*sizes), POLICY)
    if decision.go == "again":
        assert decision.nodes and set(decision.nodes) <= names - set(decision.rest)
        assert len(decision.nodes) == 2 or len(decision.nodes) in sizes
        assert without_progress(history) < WITHOUT_PROGRESS
    elif decision.go == "wait":
        assert waited_s < POLICY.give_up_s and decision.wait_s > 0
    else:
        assert decision.why


@pytest.mark.parametrize("number", [1, 5])
def test_the_budget_is_the_policys(number: int) -> None:
    history = [ended(("node01", "node02")[turn % 2]) for turn in range(number)]
    assert decide(history, answering(*TWO), any_number, Policy(without_progress=number)).go == "give-up"
