"""Which node, or which link, makes the whole set fail when every pair alone is well: tests on halves, then smaller. Pure.

`search` is asked again with the outcome of every test so far, and answers with the sets to test next (all of one round are
disjoint and run at the same time) or with its verdict. It halves the failing set; the half that passes is known to be good, and a
single suspect is tested again together with a node from there. When both halves pass and only the whole fails, it is something
between them: then one side is shortened by halves until one link is left, or nothing smaller than the whole fails.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass

from netcheck.measure.schedule import all_pairs

Names = tuple[str, ...]
Asking = Generator[tuple[Names, ...], None, "Verdict"]

FRESH_PAIRS_ROUNDS = 3
"""est.: so many rounds of other pairs are tried for one that passes, when no half does; each costs a time limit."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found. All empty: nothing smaller than the whole fails.

    `culprits`: nodes that fail with nodes that are known to be good. `links`: two nodes, well elsewhere, that fail together.
    `undecided`: nodes among which somebody fails, without a good node to tell who.
    """

    culprits: Names = ()
    links: tuple[tuple[str, str], ...] = ()
    undecided: Names = ()

    @property
    def empty(self) -> bool:
        """True when nothing smaller than the whole fails."""
        return not (self.culprits or self.links or self.undecided)


def search(
    nodes: Sequence[str], passed: Mapping[frozenset[str], bool], suspects: Sequence[str] = (), lost: Collection[str] = ()
) -> tuple[Names, ...] | Verdict:
    """Return the sets to test next, or the verdict. The whole of `nodes` has failed.

    `passed`: set -> whether it passed, of all tests so far. `suspects`: nodes that the failure itself names; they save rounds
    when the rest passes without them. `lost`: nodes that no longer answer: a set with one of them fails without a test.
    The same arguments give the same answer.
    """

    def outcome(names: frozenset[str]) -> bool:
        return passed.get(names, False)

    asking = _search(tuple(nodes), outcome, tuple(suspects))
    try:
        while True:
            wanted = next(asking)
            unknown = tuple(one for one in wanted if frozenset(one) not in passed and not {*one} & {*lost})
            if unknown:
                return unknown
    except StopIteration as end:
        verdict: Verdict = end.value
        return verdict


def _search(nodes: Names, outcome: Callable[[frozenset[str]], bool], suspects: Names) -> Asking:
    """Yield rounds of sets; go on once `outcome` knows all of them; return the verdict."""
    if len(nodes) < 3:
        return Verdict(undecided=nodes)
    rest = tuple(node for node in nodes if node not in suspects)
    if suspects and len(suspects) * 2 < len(nodes) and len(rest) > 1:
        yield (rest,)
        if outcome(frozenset(rest)):
            guilty = yield from _confirm(tuple(suspects), rest, outcome)
            if guilty:
                return Verdict(culprits=guilty)
    return (yield from _halve(nodes, outcome))


def _confirm(
    suspects: Names, good: Names, outcome: Callable[[frozenset[str]], bool]
) -> Generator[tuple[Names, ...], None, Names]:
    """Return those of `suspects` that fail together with a node of `good`, each with one of its own."""
    guilty: list[str] = []
    for start in range(0, len(suspects), len(good)):
        pairs = tuple(zip(good, suspects[start : start + len(good)], strict=False))
        yield pairs
        guilty += [suspect for helper, suspect in pairs if not outcome(frozenset((helper, suspect)))]
    return tuple(guilty)


@dataclass(slots=True)
class _Failing:
    """A set that failed. `parts`: the suspects in it, halved; `open`: parts that were not tested yet; `blamed`: a part failed."""

    whole: Names
    parts: tuple[Names, ...]
    open: list[Names]
    blamed: bool = False


def _split(whole: Names, good: Sequence[str]) -> _Failing:
    """Return `whole`, its members that are not known to be good halved: two of them are suspects each for itself."""
    suspects = tuple(node for node in whole if node not in good)
    middle = (len(suspects) + 1) // 2
    parts = tuple(part for part in (suspects[:middle], suspects[middle:]) if part)
    return _Failing(whole, parts, list(parts))


def _halve(nodes: Names, outcome: Callable[[frozenset[str]], bool]) -> Asking:
    good: list[str] = []
    culprits: list[str] = []
    undecided: Names = ()
    doubted: list[tuple[str, str]] = []
    failing, explained = [_split(nodes, good)], list[_Failing]()
    while failing:
        helpers = list(good)
        tests: list[tuple[_Failing, Names, Names]] = []  # what failed, the part of it, what is tested for the part
        for group in failing:
            for part in group.open:
                if len(part) > 1:
                    tests.append((group, part, part))
                elif helpers:
                    helper = next((node for node in helpers if node not in group.whole), helpers[0])
                    helpers.remove(helper)
                    tests.append((group, part, (helper, *part)))
        if not tests:
            fresh = yield from _find_good(nodes, outcome)
            if not fresh:
                undecided = tuple(node for node in nodes if any((node,) in group.open for group in failing))
                break
            good += fresh
            for group in failing:
                group.open = [part for part in group.open if part[0] not in good]
        else:
            yield tuple(tested for _, _, tested in tests)
        for group, part, tested in tests:
            group.open.remove(part)
            if outcome(frozenset(tested)):
                good += [node for node in part if node not in good]
                continue
            group.blamed = True
            if len(part) > 1:
                failing.append(_split(part, good))
            elif tested[0] in group.whole:  # perhaps it is only the link between these two that makes the whole fail
                doubted.append((tested[0], part[0]))
            else:
                culprits.append(part[0])
        explained += [group for group in failing if not group.open]  # single ones wait until there is a good node for each
        failing = [group for group in failing if group.open]
    links = []
    for helper, node in doubted:
        other = next((one for one in good if one != helper), None)
        if other is not None:
            yield ((other, node),)
        if other is not None and outcome(frozenset((other, node))):
            links.append((helper, node))
        else:
            culprits.append(node)
    for group in explained:
        if not group.blamed:  # every part passes: it is something between them
            one = group.parts[0] if group.parts else group.whole[:1]
            link = yield from _narrow(one, tuple(node for node in group.whole if node not in one), outcome)
            if link is not None:
                links.append(link)
    return Verdict(tuple(culprits), tuple(links), undecided)


def _find_good(nodes: Names, outcome: Callable[[frozenset[str]], bool]) -> Generator[tuple[Names, ...], None, Names]:
    """Return the nodes of pairs that pass, where no part of any failing set did; empty when none is found."""
    for pairs in all_pairs(nodes)[:FRESH_PAIRS_ROUNDS]:
        yield pairs
        fine = tuple(node for pair in pairs if outcome(frozenset(pair)) for node in pair)
        if fine:
            return fine
    return ()


def _narrow(
    one: Names, other: Names, outcome: Callable[[frozenset[str]], bool]
) -> Generator[tuple[Names, ...], None, tuple[str, str] | None]:
    """Return the link that fails where `one` and `other` pass alone and fail together; None when it takes more than two nodes."""
    end = yield from _shortest(other, one, outcome)
    far = other[end - 1]
    if len(one) > 1:
        yield ((*one, far),)
        if outcome(frozenset((*one, far))):
            return None
    start = yield from _shortest(one, (far,), outcome)
    near = one[start - 1]
    yield ((near, far),)
    return None if outcome(frozenset((near, far))) else (near, far)


def _shortest(side: Names, fixed: Names, outcome: Callable[[frozenset[str]], bool]) -> Generator[tuple[Names, ...], None, int]:
    """Return how many of `side` it takes, from its beginning, to fail together with `fixed`; all of them do."""
    low, high = 0, len(side)  # with `low` of them it passes, with `high` it fails
    while high - low > 1:
        middle = (low + high) // 2
        tested = (*fixed, *side[:middle])
        yield (tested,)
        if outcome(frozenset(tested)):
            low = middle
        else:
            high = middle
    return high
