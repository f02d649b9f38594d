"""What the nodes said, before any judgement (`Raw`), and the facts in it (`parse_raw`); pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from netcheck.facts import FACTS, observe
from r4090c.model import Cluster, Fact, NodeFacts


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
