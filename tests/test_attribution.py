"""Who is blamed for slow links: by hand, and for any planted fault in any cluster."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netcheck.attribution import (
    AGAIN_WITH,
    Everything,
    Link,
    Receiver,
    Sender,
    Suspect,
    after_again,
    explain,
    retests,
    shares_of,
)
from netcheck.expected import Cell
from netcheck.measure.schedule import ring_pairs

NOISE = 0.05


def names(count: int) -> list[str]:
    return [f"n{number:02d}" for number in range(1, count + 1)]


def all_links(count: int, **slow: float) -> dict[Cell, float]:
    """Every link carries 1, but for those named like n01_n02=0.1; n01_=… is all that n01 sends, _n01 all that it receives."""
    cells = dict.fromkeys(permutations(names(count), 2), 1.0)
    for name, share in slow.items():
        sender, _, receiver = name.partition("_")
        for cell in cells:
            if sender in ("", cell[0]) and receiver in ("", cell[1]):
                cells[cell] = share
    return cells


def ring_links(count: int, cells: Mapping[Cell, float]) -> dict[Cell, float]:
    pairs = [pair for one in ring_pairs(names(count)) for pair in one]
    return {cell: cells[cell] for a, b in pairs for cell in ((a, b), (b, a))}


def told(suspects: Iterable[Suspect]) -> list[str]:
    """What is blamed, in short: "n01 sends", "n02 receives", "n01->n02"."""
    words = {Sender: "sends", Receiver: "receives"}
    return sorted(
        "all"
        if isinstance(one, Everything)
        else f"{one.sender}->{one.receiver}"
        if isinstance(one, Link)
        else f"{one.node} {words[type(one)]}"
        for one in suspects
    )


# --------------------------------------------------------------------------- by hand


@pytest.mark.parametrize(
    ("cells", "blamed"),
    [
        (all_links(4), []),
        (all_links(4, n02_=0.1), ["n02 sends"]),
        (all_links(4, _n03=0.1), ["n03 receives"]),
        (all_links(4, n01_n02=0.1), ["n01->n02"]),
        (all_links(3, n01_n02=0.1), ["n01->n02"]),
        (all_links(3, n01_=0.1), ["n01 sends"]),
        (all_links(3, n01_=0.1, _n01=0.1), ["n01 receives", "n01 sends"]),  # four of six links: its cable
        (all_links(4, n02_=0.2, _n02=0.1), ["n02 receives", "n02 sends"]),
        (all_links(4, n01_=0.3, _n04=0.3), ["n01 sends", "n04 receives"]),  # their own link is no slower
        (all_links(5, n01_=0.5, n01_n03=0.05), ["n01 sends", "n01->n03"]),
        (all_links(6, n01_n02=0.1, n03_n02=0.2), ["n01->n02", "n03->n02"]),  # two of five: others reach n02 well
        (all_links(2, n01_n02=0.1), ["n01->n02"]),  # with two nodes nobody is blamed alone
        (all_links(2, n01_n02=0.1, n02_n01=0.1), []),  # equal: nothing to compare with
        ({}, []),
        ({("n01", "n02"): 1.0}, []),
        ({("n01", "n02"): 0.0, ("n02", "n01"): 0.0}, []),
    ],
)
def test_who_is_blamed(cells: dict[Cell, float], blamed: list[str]) -> None:
    assert told(explain(shares_of(cells))) == blamed


def test_all_slow_is_told_once_when_the_expectation_is_known() -> None:
    (found,) = explain(all_links(4, _=0.5), slow=0.9)
    assert isinstance(found, Everything)
    assert (found.share, len(found.cells)) == (0.5, 12)
    assert told(explain(all_links(2, _=0.5), slow=0.9)) == ["all"]


def test_who_is_slow_even_among_the_slow_is_told_too() -> None:
    assert told(explain(all_links(5, _=0.5, n03_=0.1), slow=0.9)) == ["all", "n03 sends"]


def test_a_link_is_certain_when_both_ends_do_well_with_others() -> None:
    (sure,) = explain(all_links(3, n01_n02=0.1))
    assert isinstance(sure, Link) and sure.certain
    (unsure,) = explain(all_links(2, n01_n02=0.1), slow=0.7)
    assert isinstance(unsure, Link) and not unsure.certain
    lone = {cell: share for cell, share in all_links(4, n01_n02=0.1).items() if cell[0] != "n01" or cell[1] == "n02"}
    (half,) = explain(lone)  # n01 sent to nobody else
    assert isinstance(half, Link) and not half.certain


def test_the_cells_that_prove_it_and_the_share() -> None:
    (found,) = explain(all_links(4, n02_=0.25))
    assert found == Sender("n02", 0.25, (("n02", "n01"), ("n02", "n03"), ("n02", "n04")))


def test_nearly_all_is_enough_and_a_minority_is_not() -> None:
    cells = all_links(6, n02_=0.2)
    cells["n02", "n05"] = 1.0  # four of five
    assert told(explain(cells)) == ["n02 sends"]
    cells["n02", "n04"] = 1.0  # three of five: some get all of it, so it can send
    assert told(explain(cells)) == ["n02->n01", "n02->n03", "n02->n06"]


# --------------------------------------------------------------------------- any planted fault


@st.composite
def planted(draw: st.DrawFn) -> tuple[int, str, str, str, float, random.Random]:
    count = draw(st.integers(3, 16))
    one = draw(st.sampled_from(names(count)))
    other = draw(st.sampled_from([name for name in names(count) if name != one]))
    kind = draw(st.sampled_from(["sends", "receives", "link"]))
    return count, kind, one, other, draw(st.floats(0.001, 0.5)), random.Random(draw(st.integers(0, 2**32)))


def noisy(cells: Mapping[Cell, float], dice: random.Random) -> dict[Cell, float]:
    return {cell: 25.0 * share * max(0.01, dice.gauss(1.0, NOISE)) for cell, share in cells.items()}


@settings(max_examples=400)
@given(planted(), st.booleans())
def test_one_planted_fault_is_found_and_nothing_else(fault: tuple[int, str, str, str, float, random.Random], ring: bool) -> None:
    count, kind, one, other, share, dice = fault
    if ring and kind == "link":
        other = names(count)[names(count).index(one) - 1]  # a link that the ring has
    slow = {"sends": {f"{one}_": share}, "receives": {f"_{one}": share}, "link": {f"{one}_{other}": share}}[kind]
    cells = noisy(all_links(count, **slow), dice)
    if ring:
        cells = ring_links(count, cells)
    expected = f"{one}->{other}" if kind == "link" else f"{one} {kind}"
    assert told(explain(shares_of(cells))) == [expected]


@settings(max_examples=200)
@given(planted(), st.data())
def test_a_planted_node_is_found_with_missing_cells(
    fault: tuple[int, str, str, str, float, random.Random], data: st.DataObject
) -> None:
    """A third of the links was not measured; the node is found as long as two of its own were."""
    count, kind, one, _, share, dice = fault
    kind = "sends" if kind == "link" else kind
    cells = noisy(all_links(count, **({f"{one}_": share} if kind == "sends" else {f"_{one}": share})), dice)
    own = [cell for cell in cells if cell[0 if kind == "sends" else 1] == one]
    missing = {cell for cell in cells if dice.random() < 0.33} - {*data.draw(st.permutations(own))[:2]}
    kept = {cell: value for cell, value in cells.items() if cell not in missing}
    slow = [cell for cell in own if cell in kept]
    if len(kept) - len(slow) >= len(slow):  # else the slow links are what is usual
        assert f"{one} {kind}" in told(explain(shares_of(kept)))


@settings(max_examples=200)
@given(st.dictionaries(st.tuples(st.sampled_from("abcde"), st.sampled_from("abcde")), st.floats(0, 1e9)), st.floats(0.01, 10))
def test_every_slow_link_is_explained_and_no_other_one(cells: dict[Cell, float], slow: float) -> None:
    suspects = explain(cells, slow)
    assert {cell for suspect in suspects for cell in suspect.cells} == {cell for cell, share in cells.items() if share < slow}


# --------------------------------------------------------------------------- testing suspects again


def test_a_slow_node_is_tested_again_with_known_good_ones() -> None:
    shares = all_links(5, n02_=0.1)
    again = retests(explain(shares), names(5))
    assert len(again) == AGAIN_WITH
    assert all(sender == "n02" and receiver != "n02" for sender, receiver in again)
    both = retests(explain(all_links(6, n02_=0.1, _n05=0.1)), names(6))
    partners = [cell[1] if cell[0] == "n02" else cell[0] for cell in both]
    assert len(both) == 2 * AGAIN_WITH and not {"n02", "n05"} & {*partners}


def test_a_link_is_tested_by_itself_and_its_ends_with_others_where_unclear() -> None:
    assert retests(explain(all_links(4, n01_n02=0.1)), names(4)) == (("n01", "n02"),)
    lone = {cell: share for cell, share in all_links(4, n01_n02=0.1).items() if cell[0] != "n01" or cell[1] == "n02"}
    assert {*retests(explain(lone), names(4))} == {("n01", "n02"), ("n01", "n03"), ("n04", "n02")}
    assert retests(explain(all_links(2, n01_n02=0.1)), names(2)) == (("n01", "n02"),)


def test_of_all_links_a_sample_is_tested_again() -> None:
    again = retests(explain(all_links(6, _=0.5), 0.9), names(6))
    assert len(again) == 3
    assert len({name for cell in again for name in cell}) == 6


def test_a_node_that_is_gone_is_not_tested_again() -> None:
    assert all("n03" not in cell for cell in retests(explain(all_links(4, n02_=0.1)), ["n01", "n02", "n04"]))


def test_what_was_only_disturbed_is_forgotten() -> None:
    shares = all_links(5, n02_=0.1)
    sound = dict.fromkeys(retests(explain(shares), names(5)), 1.0)
    assert explain(after_again(shares, sound)) == ()
    assert told(explain(after_again(shares, dict.fromkeys(sound, 0.1)))) == ["n02 sends"]
    link = all_links(4, n01_n02=0.1)
    assert explain(after_again(link, {("n01", "n02"): 0.95})) == ()


def test_an_unclear_link_is_cleared_up_by_the_second_test() -> None:
    lone = {cell: share for cell, share in all_links(4, n01_n02=0.1).items() if cell[0] != "n01" or cell[1] == "n02"}
    again = {("n01", "n02"): 0.1, ("n01", "n03"): 0.1, ("n04", "n02"): 1.0}
    assert told(explain(after_again(lone, again))) == ["n01 sends"]
