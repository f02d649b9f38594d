"""Ask all nodes for all facts: one SSH round trip a node (`gather`, I/O), then make facts of the answers (`parse_raw`, pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.resources import files
from typing import Any, Protocol, TypedDict, cast

from netcheck.facts import FACTS, observe, questions
from r4090c.errors import CouldNotTell
from r4090c.model import Cluster, Fact, Node, NodeFacts
from r4090c.remote import Answer, NodeError

PROBE_SOURCE = files("netcheck").joinpath("probe.py").read_text(encoding="utf-8")
"""What is sent to the nodes."""
ASK_S = 40.0
"""The slowest question (nvidia-smi) may take 20 s; the rest is for a busy node. est."""
NOISE_KEPT = 2000
"""Characters kept of what a login shell printed: enough to see where it comes from."""


class Reach(TypedDict):
    """How reaching one node went. `verdict`: "ok" or a remote.Verdict; `connect_s` None = no login."""

    verdict: str
    observed: str
    next_command: str
    connect_s: float | None
    noise: str


@dataclass(frozen=True, slots=True)
class Raw:
    """Everything the nodes said, before any judgement; JSON-able, and what a bundle keeps.

    `answers`: node -> result of netcheck/probe.py with "sent_at_s" and "received_at_s" of the controller.
    `measurements`: name of the measurement -> its JSON.
    """

    started_at: str
    reach: Mapping[str, Reach]
    answers: Mapping[str, Any]
    measurements: Mapping[str, Any] = field(default_factory=dict)


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


def parse_raw(raw: Raw, cluster: Cluster) -> dict[str, NodeFacts]:
    """Return the facts of every node that was asked, in the order of `cluster`. Pure; never raises for what a node said.

    A node that was not reached has every fact in error. A node of `raw` that is not in `cluster` is left out.
    """
    found = {}
    for node in cluster.nodes:
        if node.name not in raw.reach:
            continue
        reach = raw.reach[node.name]
        facts: dict[str, Fact[Any]]
        if reach["verdict"] != "ok":
            facts = {name: Fact(error=f"{node.name} did not answer ({reach['verdict']}): {reach['observed']}") for name in FACTS}
        else:
            facts = {name: observe(name, raw.answers.get(node.name), node, cluster) for name in FACTS}
        found[node.name] = NodeFacts(node=node.name, **facts)
    return found


def _not_reached(error: CouldNotTell) -> Reach:
    verdict = error.verdict.value if isinstance(error, NodeError) else "lost"
    observed = f"{error.observed}; expected {error.expected}" if error.expected else error.observed
    return Reach(verdict=verdict, observed=observed, next_command=error.next_command, connect_s=None, noise="")
