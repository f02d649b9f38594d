"""Who holds the GPUs of a run's nodes: asked before a launch, told where it is refused, waited for with --queue."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.sync import LEASES
from r4090c.errors import CheckFailed
from r4090c.remote import Fleet, NodeError, Shell

POLL_S = 5.0
"""est.: how often a queued launch asks whether the GPUs are free; a question takes some 50 ms."""
TOLD_EVERY_S = 300.0
"""est.: how often a queued launch says that it still waits."""


@dataclass(frozen=True, slots=True)
class Holder:
    """One GPU in use. `lease`: its PCI address. `since`: seconds since the epoch by the node's clock, 0 = not known."""

    node: str
    lease: str
    user: str
    run_id: str
    since: float

    @property
    def who(self) -> str:
        """Which run of whom holds it, and since when."""
        when = f" since {time.strftime('%H:%M', time.localtime(self.since))}" if self.since else ""
        return f"run {self.run_id} of {self.user}{when}"


class GpusTaken(CheckFailed):
    """Another run holds GPUs that this one wants."""

    def __init__(self, holders: Sequence[Holder]) -> None:
        told = ", ".join(sorted({one.who for one in holders}))
        nodes = ", ".join(sorted({one.node for one in holders}))
        many = f"{len(holders)} GPU{'s' if len(holders) > 1 else ''}"
        command = "the same with --queue waits for them   (r4090c jobs shows the runs; --nodes takes other nodes)"
        super().__init__(f"{many} of {nodes}", f"in use by {told}", "GPUs that no other run holds", command)
        self.holders = tuple(holders)


def holders_of(node: str, busy: Sequence[Mapping[str, Any]]) -> list[Holder]:
    """Return what a node told of leases that are held."""
    found = []
    for one in busy:
        since = one.get("since")
        user, run = str(one.get("user") or "somebody"), str(one.get("run_id") or "unknown")
        found.append(Holder(node, str(one.get("lease")), user, run, float(since) if isinstance(since, (int, float)) else 0.0))
    return found


def holders(fleet: Fleet, wanted: Mapping[str, Sequence[str]], silent: Sequence[Holder] = ()) -> list[Holder]:
    """Return who holds any of the `wanted` leases (node -> leases).

    Of a node that does not answer, what was known of it (`silent`): without that the gate finds it.
    """
    asked = {name: list(leases) for name, leases in wanted.items() if leases}

    def one(shell: Shell) -> Any:
        return shell.ask(LEASES, {"do": "who", "leases": asked[shell.node.name]}).value

    answers = fleet.map(one, asked)
    return [
        holder
        for name, answer in answers.items()
        for holder in (
            [one for one in silent if one.node == name] if isinstance(answer, NodeError) else holders_of(name, answer["busy"])
        )
    ]


def wait_until_free(fleet: Fleet, taken: GpusTaken, say: Callable[[str], None], require_wanted: Callable[[], None]) -> None:
    """Return once nobody holds the GPUs that `taken` tells of; `require_wanted` raises when they are wanted no more."""
    wanted: dict[str, list[str]] = {}
    for one in taken.holders:
        wanted.setdefault(one.node, []).append(one.lease)
    told_at, last = 0.0, ""
    while True:
        require_wanted()
        left = holders(fleet, wanted, taken.holders)
        if not left:
            return
        text = "; ".join(sorted({f"{one.who} on {one.node}" for one in left}))
        if text != last or time.monotonic() - told_at > TOLD_EVERY_S:
            say(f"queued: waiting for {text}")
            told_at, last = time.monotonic(), text
        time.sleep(POLL_S)
