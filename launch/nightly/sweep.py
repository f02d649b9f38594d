"""The sweep of a night: which runs in which order (pure), and running them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from launch.nightly.statistics import Sample
from launch.run import Wish, start
from launch.supervise import Outcome, Supervisor, failure
from r4090c.errors import R4090cError
from r4090c.model import Cluster, Node
from r4090c.remote import Fleet

WARM_UP_STEPS = 3
"""est.: steps left out of a run's rate; the first ones allocate and fill caches."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One run to measure."""

    repeat: int
    nodes: tuple[Node, ...]


def schedule(nodes: Sequence[Node], sizes: Sequence[int], repeats: int, seed: int = 0) -> tuple[Turn, ...]:
    """Return the runs of a night: in each repeat every node alone and every size once, in an order shuffled per repeat.

    Interleaving spreads a drift of the machines over all sizes. T(1) is measured on every node that takes part in the largest.
    """
    largest = max(sizes)
    sets = [(node,) for node in nodes[:largest]] + [tuple(nodes[:size]) for size in sorted(set(sizes)) if size > 1]
    turns = []
    for repeat in range(1, repeats + 1):
        order = list(sets)
        random.Random(seed * 1000 + repeat).shuffle(order)
        turns += [Turn(repeat, chosen) for chosen in order]
    return tuple(turns)


class _Rates:
    """A Watcher that keeps the rates."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def metrics(self, line: Mapping[str, Any]) -> None:
        self.rates.append(float(line["images_per_s"] if "images_per_s" in line else line["tokens_per_s"]))

    def log(self, line: str) -> None:
        return

    def event(self, event: Mapping[str, Any]) -> None:
        return

    def note(self, text: str) -> None:
        return


def _followed(supervisor: Supervisor, rates: _Rates) -> Outcome:
    """Follow the attempt to its end; whatever interrupts that stops it on every node. Raises CouldNotTell."""
    try:
        return supervisor.follow(rates)
    except BaseException:
        supervisor.stop("the night (it could not follow this run)")
        raise


def measure(
    fleet: Fleet,
    cluster: Cluster,
    wish: Wish,
    turns: Sequence[Turn],
    say: Callable[[str], None],
    samples: list[Sample],
    failed: list[str],
) -> None:
    """Run every turn, adding to `samples` and to `failed`: a run that cannot start or is lost costs its own sample only.

    Nothing is gated here: the caller has judged the nodes, and a night measures also what a plan calls pointless. Ctrl-C stops
    the running attempt everywhere before it goes on up.
    """
    for number, turn in enumerate(turns, 1):
        names = tuple(node.name for node in turn.nodes)
        say(f"run {number}/{len(turns)}: repeat {turn.repeat} on {', '.join(names)}")
        rates = _Rates()
        try:
            supervisor = start(fleet, cluster, replace(wish, nodes=turn.nodes, gate=False, anyway=True), lambda _: None)
            outcome = _followed(supervisor, rates)
        except R4090cError as error:
            failed.append(str(error))
            say(failed[-1])
            continue
        if outcome.outcome != "done":
            failed.append(str(failure(outcome, supervisor.plan.run_id)))
            say(failed[-1])
            continue
        counted = rates.rates[WARM_UP_STEPS:] or rates.rates
        if counted:
            samples.append(Sample(names, turn.repeat, supervisor.plan.world_size, median(counted)))
            say(f"  {samples[-1].tokens_per_s:,.0f} tokens/s")
        else:
            failed.append(f"{supervisor.plan.run_id}: no step was reported")
