"""Decide what follows an attempt that failed: again on the same nodes, on others, on fewer, later, or not at all; pure.

The budget is progress, not a count: an attempt that saved a new checkpoint earns all of it back, so a run that a flaky cable
interrupts every hour goes on all night, and one that dies at the same place each time ends after a few minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from launch.causes import Mends
from launch.diagnose import Cause, why_mends

WITHOUT_PROGRESS = 6
"""est.: with the waits between them six attempts take some seven minutes: longer than a server or a switch needs to boot."""
BLAMED_TWICE = 2
"""est.: a rank that dies on the same node twice without a checkpoint between dies of the node as likely as of the script."""
FIRST_WAIT_S, GROWTH, LONGEST_WAIT_S = 10.0, 3.0, 300.0
"""est.: waits between attempts without progress: none, 10 s, 30 s, …: a driver reloads, a port is freed, a server comes back."""
POLL_S = 10.0
"""est.: how often a node that does not answer is asked again."""
RETURN_S = 300.0
"""est.: a box with eight GPUs boots in three to five minutes; so long fewer nodes do not go on without it."""
GIVE_UP_S = 1800.0
"""est.: a node that has not come back after half an hour needs a person."""
REST_S = 1800.0
"""est.: how long a node that failed a run is left out as a spare, and warned about when it is launched on."""


NO_CULPRIT = frozenset({"collective-hung", "collective-timeout", "nccl-error", "peer-gone", "ranks-out-of-step", "unknown"})
"""Causes that name a node only because something must stand there."""


@dataclass(frozen=True, slots=True)
class Ended:
    """One attempt that failed. `saved_step`: of the last complete checkpoint there was at its end, None = none.

    `left`: nodes where something of it would not end.
    """

    nodes: tuple[str, ...]
    cause: Cause
    mends: Mends
    saved_step: int | None
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Policy:
    """How patient a run is."""

    without_progress: int = WITHOUT_PROGRESS
    return_s: float = RETURN_S
    give_up_s: float = GIVE_UP_S


@dataclass(frozen=True, slots=True)
class Stock:
    """What there is to run on. `answering`: nodes that answer now. `spares`: in order. `resting`: node -> why it is left out.

    `waited_s`: how long nodes have been waited for since the attempt ended.
    """

    answering: frozenset[str]
    spares: tuple[str, ...] = ()
    resting: Mapping[str, str] = field(default_factory=dict)
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do next. `go` "wait": ask again in `wait_s`. `rest`: node -> why it is to be left out for REST_S."""

    go: Literal["again", "wait", "give-up"]
    why: str
    nodes: tuple[str, ...] = ()
    wait_s: float = 0.0
    rest: Mapping[str, str] = field(default_factory=dict)


def decide(history: Sequence[Ended], stock: Stock, refuses: Callable[[int], str | None], policy: Policy) -> Decision:
    """Return what follows the last of `history`, the attempts of a run in order, none of which ended well.

    `refuses(n)`: why the run cannot go on with n nodes, None when it can.
    """
    last = history[-1]
    if last.cause.kind == "stopped":
        return Decision("give-up", last.cause.summary)
    if last.mends == "never":
        return Decision("give-up", f"that would not help: {why_mends(last.cause.kind)[1]}")
    fruitless = without_progress(history)
    if fruitless >= policy.without_progress:
        held = "no checkpoint" if last.saved_step is None else f"none after step {last.saved_step}"
        return Decision("give-up", f"{fruitless} attempts in a row saved no new checkpoint ({held})")
    rest = _blamed(history, fruitless)
    wait_s = 0.0 if fruitless <= 1 else min(LONGEST_WAIT_S, FIRST_WAIT_S * GROWTH ** (fruitless - 2))
    out = {**stock.resting, **rest}  # for spares; a node that somebody chose is used although it failed another run
    kept = [name for name in last.nodes if name in stock.answering and name not in rest]
    missing = [name for name in last.nodes if name not in kept]
    if not missing:
        return Decision("again", "on the same nodes", last.nodes, wait_s, rest)
    why = "; ".join(f"{name}: {rest.get(name, 'does not answer')}" for name in missing)
    spares = [name for name in stock.spares if name in stock.answering and name not in out and name not in last.nodes]
    if len(spares) >= len(missing):
        instead = dict(zip(missing, spares, strict=False))
        told = ", ".join(f"{spare} for {name}" for name, spare in instead.items())
        return Decision("again", f"with {told} ({why})", tuple(instead.get(name, name) for name in last.nodes), wait_s, rest)
    may_return = [name for name in missing if name not in rest]
    if may_return and stock.waited_s < policy.return_s:
        return Decision("wait", f"{', '.join(may_return)} may come back", wait_s=POLL_S, rest=rest)
    for many in range(len(kept), 0, -1):
        if refuses(many) is None:
            return Decision("again", f"on {many} of {len(last.nodes)} nodes ({why})", tuple(kept[:many]), wait_s, rest)
    if may_return and stock.waited_s < policy.give_up_s:
        return Decision("wait", f"{', '.join(may_return)} may come back", wait_s=POLL_S, rest=rest)
    fewer = f"; on {len(kept)} nodes: {refuses(len(kept))}" if kept else ""
    return Decision("give-up", f"nothing takes the place of {', '.join(missing)} ({why}{fewer})", rest=rest)


def without_progress(history: Sequence[Ended]) -> int:
    """Return how many of the last attempts ended with no newer checkpoint than the attempts before them had.

    The first attempt counts as well unless it saved one.
    """
    many, reached = 0, -1
    for one in history:
        saved = -1 if one.saved_step is None else one.saved_step
        many = 0 if saved > reached else many + 1
        reached = max(reached, saved)
    return many


def _blamed(history: Sequence[Ended], fruitless: int) -> dict[str, str]:
    """Return the nodes that are to be left out from now on, with the reason."""
    last = history[-1]
    stuck = {name: "what ran there would not end, even by SIGKILL" for name in last.left if name in last.nodes}
    if stuck:
        return stuck
    if last.cause.node not in last.nodes or last.cause.kind in NO_CULPRIT:
        return {}
    if last.mends == "other-node":
        return {last.cause.node: last.cause.summary}
    recent = history[len(history) - min(fruitless, BLAMED_TWICE) :]
    if len(recent) >= BLAMED_TWICE and len(last.nodes) > 1 and all(one.cause.node == last.cause.node for one in recent):
        return {last.cause.node: f"{len(recent)} attempts in a row failed there: {last.cause.summary}"}
    return {}
