"""Who measures with whom, and when: disjoint pairs in as few rounds as possible; on which ports. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence

from netcheck.measure.ports import HIGH_PORTS

Pair = tuple[str, str]


def all_pairs(names: Sequence[str]) -> tuple[tuple[Pair, ...], ...]:
    """Return rounds of disjoint pairs in which every two of `names` meet once: N−1 rounds for an even N, N for an odd one.

    The circle method (Kirkman 1847, as in round-robin tournaments): the first stays, the others turn by one place a round.
    """
    seats: list[str | None] = [*names]
    if len(seats) < 2:
        return ()
    if len(seats) % 2:
        seats.append(None)  # who meets it has a break
    half = len(seats) // 2
    rounds = []
    for _ in range(len(seats) - 1):
        met = ((seats[place], seats[-1 - place]) for place in range(half))
        rounds.append(tuple((one, other) for one, other in met if one is not None and other is not None))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return tuple(rounds)


def ring_pairs(names: Sequence[str]) -> tuple[tuple[Pair, ...], ...]:
    """Return rounds of disjoint pairs of neighbours in the ring of `names`: one round for two, two for an even N, else three."""
    count = len(names)
    if count < 2:
        return ()
    if count == 2:
        return (((names[0], names[1]),),)
    links = [(names[place], names[(place + 1) % count]) for place in range(count)]
    even = tuple(links[0 : count - 1 : 2])
    odd = tuple(links[1::2]) if count % 2 == 0 else tuple(links[1 : count - 1 : 2])
    return (even, odd) if count % 2 == 0 else (even, odd, (links[-1],))


def disjoint(links: Sequence[Pair]) -> tuple[tuple[Pair, ...], ...]:
    """Return `links` in as few rounds as a greedy choice needs: no node is in two links of a round. Both directions may occur."""
    rounds: list[list[Pair]] = []
    for link in links:
        free = next((one for one in rounds if not any({*link} & {*other} for other in one)), None)
        if free is None:
            rounds.append([link])
        else:
            free.append(link)
    return tuple(map(tuple, rounds))


def pick_ports(seed: int, number: int, count: int) -> list[int]:
    """Return `count` different high ports for round `number`: those that the check of free ports samples.

    Nodes may be on one machine, and two preflights may run at once: `seed` keeps them apart.
    """
    return random.Random(f"{seed} {number}").sample(range(HIGH_PORTS[0], HIGH_PORTS[1] + 1), count)
