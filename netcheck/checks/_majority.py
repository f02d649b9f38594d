"""Whom to blame when nodes differ: the majority is right, the odd node is named; without a majority all are named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

V = TypeVar("V", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Majority(Generic[V]):
    """The value more than half of the nodes share (None when there is none), and the nodes to name."""

    value: V | None
    odd: tuple[str, ...]


def majority(values: Mapping[str, V]) -> Majority[V]:
    """Return what more than half of the nodes have and who has something else.

    Two nodes that differ 1:1 (or any set without a majority) are all odd: nothing says which of them is right.
    """
    if not values:
        return Majority(None, ())
    value, count = Counter(values.values()).most_common(1)[0]
    if count * 2 > len(values):
        return Majority(value, tuple(node for node, own in values.items() if own != value))
    return Majority(None, tuple(values))


def others(values: Mapping[str, V], node: str) -> str:
    """Return what the other nodes have, as text: "2.6.0 on node01, node02"; the wording used when there is no majority."""
    groups: dict[V, list[str]] = {}
    for name, value in values.items():
        if name != node and value != values[node]:
            groups.setdefault(value, []).append(name)
    return "; ".join(f"{value} on {', '.join(names)}" for value, names in groups.items())
