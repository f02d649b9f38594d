"""Who listens where and who connects to whom, to see whether every node reaches every other: the schedule.

Pure. On random high ports, where `launch` lets the ranks meet and where the kernel lets NCCL and gloo listen. One SSH round
trip runs it on all nodes at once (`ports_on_node`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from netcheck.facts.question import as_float, as_int, as_list, as_mapping, as_str
from netcheck.measure.job import Level
from r4090c.model import Node

NAME, TITLE, LEVEL = "ports", "high ports between nodes", Level.DEFAULT
SOURCE = files("netcheck.measure").joinpath("ports_on_node.py").read_text(encoding="utf-8")
"""The program a node runs."""

HIGH_PORTS = (32_768, 60_999)
"""Linux's default ip_local_port_range: launch, NCCL and gloo listen where the kernel puts them."""
HIGH_PORTS_A_NODE = 3
"""A sample: a firewall that opens one range shows as one blocked port."""
WINDOW_S = 6.0
"""est.: a lost first SYN is sent again after 1 and 3 s (Linux), plus what a loaded node needs to start Python."""


def schedule(nodes: Sequence[Node], seed: int) -> dict[str, dict[str, Any]]:
    """Return node name -> request for `ports_on_node.main`. All ports differ: nodes may be on one machine."""
    dice = random.Random(seed)
    sample = dice.sample(range(HIGH_PORTS[0], HIGH_PORTS[1] + 1), HIGH_PORTS_A_NODE * len(nodes))
    token = f"{dice.getrandbits(64):016x}"
    listen = {node.name: sample[place * HIGH_PORTS_A_NODE : (place + 1) * HIGH_PORTS_A_NODE] for place, node in enumerate(nodes)}
    return {
        node.name: {
            "node": node.name,
            "token": token,
            "address": node.data_address,
            "listen": listen[node.name],
            "peers": {
                peer.name: {"address": peer.data_address, "ports": listen[peer.name]} for peer in nodes if peer.name != node.name
            },
            "window_s": WINDOW_S,
        }
        for node in nodes
    }


@dataclass(frozen=True, slots=True)
class PortsAnswer:
    """What one node found. `error` set: it did not take part, and the rest is empty.

    `reached`: peer -> port -> "" or why it was not reached. The times are the controller's clock.
    """

    error: str = ""
    next_command: str = ""
    bound: tuple[int, ...] = ()
    busy: Mapping[int, str] = field(default_factory=dict)
    reached: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    started_s: float = 0.0
    ended_s: float = 0.0


def record(answer: object, received_at_s: float) -> dict[str, Any]:
    """Return the JSON kept of one node's answer that came at `received_at_s`. Raises ParseError."""
    value = dict(as_mapping(answer, "answer to the ports measurement"))
    duration_s = as_float(value.get("duration_s"), "duration_s")
    return {**value, "started_s": received_at_s - duration_s, "ended_s": received_at_s}


def read(measured: object) -> dict[str, PortsAnswer]:
    """Return node -> answer from the JSON {"answers": {node: record or {"error", "next_command"}}}. Raises ParseError."""
    return {
        name: _answer(as_mapping(value, name))
        for name, value in as_mapping(as_mapping(measured, NAME).get("answers"), NAME).items()
    }


def _answer(value: Mapping[str, Any]) -> PortsAnswer:
    if "error" in value:
        return PortsAnswer(
            error=as_str(value["error"], "error"), next_command=as_str(value.get("next_command", ""), "next_command")
        )
    return PortsAnswer(
        bound=tuple(as_int(port, "bound") for port in as_list(value.get("bound"), "bound")),
        busy={as_int(port, "busy"): as_str(reason, "busy") for port, reason in as_mapping(value.get("busy"), "busy").items()},
        reached={
            peer: {
                as_int(port, peer): "" if reason is None else as_str(reason, peer)
                for port, reason in as_mapping(ports, peer).items()
            }
            for peer, ports in as_mapping(value.get("reached"), "reached").items()
        },
        started_s=as_float(value.get("started_s"), "started_s"),
        ended_s=as_float(value.get("ended_s"), "ended_s"),
    )
