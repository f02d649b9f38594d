"""Ask all nodes for all facts: one SSH round trip a node."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from importlib.resources import files
from typing import Any, Protocol, cast

from netcheck.facts import questions
from netcheck.raw import Raw, Reach
from r4090c.errors import CouldNotTell
from r4090c.model import Cluster, Node
from r4090c.remote import Answer, NodeError

PROBE_SOURCE = files("netcheck").joinpath("probe.py").read_text(encoding="utf-8")
"""What is sent to the nodes."""
ASK_S = 40.0
"""The slowest question (nvidia-smi) may take 20 s; the rest is for a busy node. est."""
NOISE_KEPT = 2000
"""Characters kept of what a login shell printed: enough to see where it comes from."""


class AsksNodes(Protocol):
    """The part of remote.Shell that is needed here."""

    @property
    def node(self) -> Node:
        """The node at the other end."""
        ...

    @property
    def connect_s(self) -> float:
        """How long the login took."""
        ...

    def ask(self, source: str, request: object, *, timeout_s: float = ..., python: str = ...) -> Answer:
        """Run `source` on the node and return what its main(request) answers."""
        ...


class MapsNodes(Protocol):
    """The part of remote.Fleet that is needed here."""

    def map(self, function: Callable[[Any], Any], nodes: Iterable[str] | None = None) -> dict[str, Any]:
        """Return function(shell), or the NodeError, of each node."""
        ...


def gather(fleet: MapsNodes, cluster: Cluster, nodes: Iterable[Node | str] | None = None) -> Raw:
    """Return what `nodes` (None = all of `cluster`) answer to all facts. A node that does not answer is told in `reach`."""
    names = [node if isinstance(node, str) else node.name for node in (cluster.nodes if nodes is None else nodes)]
    started_at = datetime.now(timezone.utc).isoformat(timespec="seconds")

    def ask(shell: AsksNodes) -> tuple[float, Answer]:
        request = {"questions": {name: question.to_json() for name, question in questions(shell.node, cluster).items()}}
        return shell.connect_s, shell.ask(PROBE_SOURCE, request, timeout_s=ASK_S)

    reach: dict[str, Reach] = {}
    answers: dict[str, Any] = {}
    for name, result in fleet.map(ask, names).items():
        if isinstance(result, CouldNotTell):
            reach[name] = _not_reached(result)
            continue
        connect_s, answer = cast(tuple[float, Answer], result)
        duration_s = answer.received_at_s - answer.sent_at_s
        if not isinstance(answer.value, dict):
            observed = f"the probe answered {type(answer.value).__name__}, not an object"
            reach[name] = Reach(
                verdict="lost", observed=observed, next_command="", connect_s=connect_s, noise=answer.noise[:NOISE_KEPT]
            )
            continue
        observed = f"answered in {duration_s:.2f} s"
        reach[name] = Reach(
            verdict="ok", observed=observed, next_command="", connect_s=connect_s, noise=answer.noise[:NOISE_KEPT]
        )
        answers[name] = {**answer.value, "sent_at_s": answer.sent_at_s, "received_at_s": answer.received_at_s}
    return Raw(started_at=started_at, reach=reach, answers=answers)


def _not_reached(error: CouldNotTell) -> Reach:
    verdict = error.verdict.value if isinstance(error, NodeError) else "lost"
    observed = f"{error.observed}; expected {error.expected}" if error.expected else error.observed
    return Reach(verdict=verdict, observed=observed, next_command=error.next_command, connect_s=None, noise="")
