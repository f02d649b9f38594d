"""Who makes the whole fail: every single node, every link, two nodes, only the whole; against nodes that fail by a rule."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netcheck.measure.halving import Verdict, search

Rule = Callable[[frozenset[str]], bool]


def names(count: int) -> list[str]:
    return [f"node{number:02d}" for number in range(1, count + 1)]


def play(nodes: Sequence[str], fails: Rule, suspects: Sequence[str] = (), lost: Sequence[str] = ()) -> tuple[Verdict, int]:
    """Return the verdict and how many rounds it took."""
    passed: dict[frozenset[str], bool] = {}
    for rounds in itertools.count():
        asked = search(nodes, passed, suspects, lost)
        if isinstance(asked, Verdict):
            return asked, rounds
        flat = [node for names in asked for node in names]
        assert len(flat) == len(set(flat)), "the sets of one round are disjoint"
        assert all(len(names) > 1 and not {*names} & {*lost} for names in asked)
        assert not any(frozenset(names) in passed for names in asked), "nothing is tested twice"
        assert rounds < 30
        passed |= {frozenset(names): not fails(frozenset(names)) for names in asked}
    raise AssertionError


@pytest.mark.parametrize("count", [3, 4, 5, 8, 13, 16])
def test_one_bad_node_is_found_in_few_rounds(count: int) -> None:
    nodes = names(count)
    for bad in nodes:
        verdict, rounds = play(nodes, lambda group, bad=bad: bad in group)  # type: ignore[misc]
        assert verdict == Verdict(culprits=(bad,))
        assert rounds <= 4


@pytest.mark.parametrize("count", [3, 4, 7, 16])
def test_a_bad_link_is_told_from_its_ends(count: int) -> None:
    nodes = names(count)
    for one, other in itertools.combinations(nodes, 2):
        verdict, rounds = play(nodes, lambda group, link={one, other}: link <= group)  # type: ignore[misc]
        assert ({*verdict.links[0]}, len(verdict.links), verdict.culprits, verdict.undecided) == ({one, other}, 1, (), ())
        assert rounds <= 9


@pytest.mark.parametrize("count", [4, 9, 16])
def test_two_bad_nodes_are_found(count: int) -> None:
    nodes = names(count)
    for pair in itertools.combinations(nodes, 2):
        verdict, _ = play(nodes, lambda group, pair=pair: bool(group & {*pair}))  # type: ignore[misc]
        assert {*verdict.culprits} == {*pair}


def test_what_the_failure_itself_names_saves_rounds() -> None:
    nodes = names(16)
    verdict, rounds = play(nodes, lambda group: "node07" in group, suspects=["node07"])
    assert (verdict, rounds) == (Verdict(culprits=("node07",)), 2)
    verdict, _ = play(nodes, lambda group: "node07" in group, suspects=["node02"])  # it named the wrong one
    assert verdict == Verdict(culprits=("node07",))


def test_nobody_is_blamed_when_only_the_whole_fails() -> None:
    nodes = names(8)
    verdict, _ = play(nodes, lambda group: len(group) == 8)
    assert verdict.empty


def test_without_a_good_node_nobody_is_blamed() -> None:
    assert play(names(2), lambda group: True)[0] == Verdict(undecided=("node01", "node02"))
    verdict, rounds = play(names(8), lambda group: True)
    assert (verdict.culprits, verdict.links) == ((), ())
    assert {*verdict.undecided} == {*names(8)} and rounds <= 6


def test_a_lost_node_needs_no_tests() -> None:
    verdict, rounds = play(names(8), lambda group: False, lost=["node03"])
    assert verdict == Verdict(culprits=("node03",))
    assert rounds <= 3


@given(st.integers(3, 16), st.data())
def test_only_the_guilty_are_blamed(count: int, data: st.DataObject) -> None:
    nodes = names(count)
    bad = {*data.draw(st.lists(st.sampled_from(nodes), max_size=count))}
    suspects = data.draw(st.lists(st.sampled_from(nodes), max_size=2, unique=True))
    if not bad:
        return
    verdict, _ = play(nodes, lambda group: bool(group & bad), suspects)
    assert {*verdict.culprits} <= bad
    assert not verdict.links
    assert not verdict.empty
