"""Who is to blame when links are slow: a node that sends slowly, one that receives slowly, or a single link. Pure.

What a link carries is bounded by its sender, its receiver and what lies between. So a node is a slow sender when (nearly) all
that it sends is slow, a slow receiver when all that it receives is, and what neither explains is the link's own. The fewest
causes that explain all slow links are named. A share is what a link carries, divided by what it should carry.

    >>> explain({("a", "b"): 1.0, ("a", "c"): 0.1, ("b", "a"): 1.0, ("b", "c"): 0.1, ("c", "a"): 1.0, ("c", "b"): 1.0})
    (Receiver(node='c', share=0.1, cells=(('a', 'c'), ('b', 'c'))),)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from netcheck.expected import Cell, usual_gbit_s

SLOW = 0.7
"""Share below which a link is slow when nothing else is said: midway (in ratios) between sound and half as fast."""
NEARLY_ALL = 0.75
"""est.: share of a node's links that must be slow before the node is blamed and not the links."""
WITNESSES_MIN = 2
"""One slow link cannot tell a node from a link."""
LEFT_OVER = 0.6
"""est.: a link this much slower than slow links are has a fault of its own."""
LEFT_OVER_OF_A_NODE = 0.33
"""est.: so has one this much slower than the slow node at its end explains; short tests of slow links scatter by two."""
AGAIN_WITH = 2
"""Known-good nodes that a suspect is tested again with."""


@dataclass(frozen=True, slots=True)
class Sender:
    """A node that sends slowly. `share`: median over `cells`, the slow links that prove it."""

    node: str
    share: float
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Receiver:
    """A node that receives slowly, as `Sender`."""

    node: str
    share: float
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of one link. `certain` False: too few links were measured to tell it from its ends."""

    sender: str
    receiver: str
    share: float
    certain: bool

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The link itself."""
        return ((self.sender, self.receiver),)


@dataclass(frozen=True, slots=True)
class Everything:
    """(Nearly) all links are slow: what they have in common is to blame, or too much is expected."""

    share: float
    cells: tuple[Cell, ...]


Suspect = Sender | Receiver | Link | Everything


def shares_of(cells: Mapping[Cell, float]) -> dict[Cell, float]:
    """Return the share of every link in what the links mostly carry; empty when they carry nothing."""
    usual = usual_gbit_s(cells)
    return {cell: value / usual for cell, value in cells.items()} if usual > 0 else {}


def explain(shares: Mapping[Cell, float], slow: float = SLOW) -> tuple[Suspect, ...]:
    """Return who is to blame for the links whose share is below `slow`, the heaviest cause first; () when there are none.

    Links that were not measured are left out. A node needs two slow links to be blamed, so with two nodes only the link is named.
    """
    bad = {cell for cell, share in shares.items() if share < slow}
    if not bad:
        return ()
    if len(bad) >= max(WITNESSES_MIN, NEARLY_ALL * len(shares)):
        everything = Everything(median(shares[cell] for cell in bad), tuple(sorted(bad)))
        return (everything, *explain(shares_of(shares), LEFT_OVER))  # and who is slow even among the slow
    names = sorted({name for cell in shares for name in cell})
    suspects: list[Suspect] = []
    explained: dict[Cell, float] = {}
    while True:
        best: Sender | Receiver | None = None
        for kind, end in ((Sender, 0), (Receiver, 1)):
            for name in names:
                found = _blamed(kind, name, end, shares, bad, explained)
                if found is not None and (best is None or _weight(found, explained) > _weight(best, explained)):
                    best = found
        if best is None:
            break
        suspects.append(best)
        explained.update((cell, min(best.share, explained.get(cell, best.share))) for cell in best.cells)
    left = [cell for cell in sorted(bad) if cell not in explained or shares[cell] < LEFT_OVER_OF_A_NODE * explained[cell]]
    return (*suspects, *(Link(*cell, shares[cell], _is_certain(cell, shares, bad)) for cell in left))


def _blamed(
    kind: type[Sender] | type[Receiver],
    name: str,
    end: int,
    shares: Mapping[Cell, float],
    bad: set[Cell],
    explained: Mapping[Cell, float],
) -> Sender | Receiver | None:
    own = [cell for cell in shares if cell[end] == name]
    slow = tuple(sorted(cell for cell in own if cell in bad))
    if len(slow) < WITNESSES_MIN or len(slow) < NEARLY_ALL * len(own) or all(cell in explained for cell in slow):
        return None
    return kind(name, median(shares[cell] for cell in slow), slow)


def _weight(suspect: Sender | Receiver, explained: Mapping[Cell, float]) -> tuple[int, float]:
    """Return by what one cause is preferred to another: how many links it newly explains, then how slow they are."""
    return sum(cell not in explained for cell in suspect.cells), -suspect.share


def _is_certain(cell: Cell, shares: Mapping[Cell, float], bad: set[Cell]) -> bool:
    """Return whether both ends do well with others in the same role."""
    others = [other for other in shares if other != cell and other not in bad]
    return any(other[0] == cell[0] for other in others) and any(other[1] == cell[1] for other in others)


# --------------------------------------------------------------------------- testing suspects again


def retests(suspects: Iterable[Suspect], names: Sequence[str]) -> tuple[Cell, ...]:
    """Return the links to test again: a slow node with good ones, a link by itself, and its ends with good ones where unclear.

    `names`: the nodes at hand. Good nodes are those that no suspect names.
    """
    suspects = tuple(suspects)
    named = {name for suspect in suspects for name in _named(suspect)}
    good = [name for name in names if name not in named]
    wanted: dict[Cell, None] = {}
    turn = 0
    for suspect in suspects:
        if isinstance(suspect, Everything):
            wanted.update(dict.fromkeys(_sample(suspect.cells)))
            continue
        if isinstance(suspect, Link):
            wanted[suspect.sender, suspect.receiver] = None
            if not suspect.certain and good:
                wanted[suspect.sender, good[0]] = wanted[good[-1], suspect.receiver] = None
            continue
        partners = good or [name for name in names if name != suspect.node]
        for step in range(min(AGAIN_WITH, len(partners))):
            partner = partners[(turn + step) % len(partners)]
            wanted[(suspect.node, partner) if isinstance(suspect, Sender) else (partner, suspect.node)] = None
        turn += AGAIN_WITH  # the next suspect takes others, so that both are tested at the same time
    return tuple(cell for cell in wanted if cell[0] in names and cell[1] in names and cell[0] != cell[1])


def _sample(cells: Iterable[Cell]) -> Iterator[Cell]:
    """Yield some links that can all be tested at the same time."""
    busy: set[str] = set()
    for cell in cells:
        if not busy & {*cell}:
            busy.update(cell)
            yield cell


def _named(suspect: Suspect) -> tuple[str, ...]:
    if isinstance(suspect, Link):
        return suspect.sender, suspect.receiver
    return tuple(name for cell in suspect.cells for name in cell) if isinstance(suspect, Everything) else (suspect.node,)


def after_again(shares: Mapping[Cell, float], again: Mapping[Cell, float], slow: float = SLOW) -> dict[Cell, float]:
    """Return the shares with what the second test says in place of the first.

    A node that does well in all its second tests was only disturbed in the first one: its other slow links are left out.
    """
    merged = {**shares, **again}
    for suspect in explain(shares, slow):
        if isinstance(suspect, Link):
            continue
        ends = {Sender: (0,), Receiver: (1,)}.get(type(suspect), (0, 1))
        names = set(_named(suspect))
        tested = [share for cell, share in again.items() if any(cell[end] in names for end in ends)]
        if tested and min(tested) >= slow:
            for cell in suspect.cells:
                if cell not in again:
                    merged.pop(cell, None)
    return merged
