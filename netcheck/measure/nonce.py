"""Is the shared folder one folder on all nodes, and how soon does a file written by one show on the others: the schedule.

Pure: every node writes a file of its own and holds it, then every node reads all of them, then each removes its own: also when
the controller is gone. The reading waits for all: a reader that looks before the file is there would have the file's absence
cached by NFS, and measure that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from netcheck.facts.question import as_float, as_mapping, as_str
from netcheck.measure.job import Level
from r4090c.model import Expect, Node

NAME, TITLE, LEVEL = "nonce", "shared folder", Level.DEFAULT
SOURCE = files("netcheck.measure").joinpath("nonce_on_node.py").read_text(encoding="utf-8")
"""The program a node runs."""
PREFIX = ".r4090c-nonce-"

ANSWER_WITHIN_S = 5.0
"""A file system that takes longer for one small file does not answer. est."""
GRACE_S = 3.0
"""est.: how much longer than the warning threshold a reader waits before it says "not there"."""
BEGIN_S = 20.0
"""est.: by then every node has written, a loaded one too, or does not answer."""
SLACK_S = 10.0
"""est.: what a loaded node may need on top of its own limits."""


def requests(
    action: str, nodes: Sequence[Node], token: str, expect: Expect, written: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Return node -> request for `nonce_on_node.main`: "hold", "read" what the nodes `written` wrote, "remove" it for them."""
    wanted: dict[str, dict[str, Any]] = {}
    limit_s = expect.storage_visible_warn_s + GRACE_S
    for node in nodes:
        request = {"action": action, "folder": node.paths.shared, "answer_within_s": ANSWER_WITHIN_S}
        if action == "read":
            files = {name: [f"{PREFIX}{token}-{name}", f"{token} {name}\n"] for name in written}
            request |= {"files": files, "limit_s": limit_s}
            request["answer_within_s"] = limit_s + ANSWER_WITHIN_S
        elif action == "remove":
            request |= {"names": [f"{PREFIX}{token}-{name}" for name in written]}
        else:
            own, content = f"{PREFIX}{token}-{node.name}", f"{token} {node.name}\n"
            request |= {"file": own, "prefix": PREFIX, "content": content}
            # Until the slowest has written and the slowest has read, though nobody tells it to end.
            request["hold_s"] = BEGIN_S + limit_s + ANSWER_WITHIN_S + SLACK_S
        wanted[node.name] = request
    return wanted


@dataclass(frozen=True, slots=True)
class NonceAnswer:
    """What one node did. `unreached`: it did not take part, for the reason in `write_error`.

    `waited_s`: node -> seconds until its file showed with the right content. `faults`: node -> what was there instead.
    """

    write_error: str = ""
    unreached: bool = False
    next_command: str = ""
    read_error: str = ""
    waited_s: Mapping[str, float] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)
    remove_error: str = ""


def read(measured: object) -> dict[str, NonceAnswer]:
    """Return node -> answer from the JSON {"write" | "read" | "remove": {node: answer of the node}}. Raises ParseError."""
    actions = as_mapping(measured, NAME)
    wrote, seen, removed = (as_mapping(actions.get(action), action) for action in ("write", "read", "remove"))
    return {
        name: _answer(as_mapping(value, name), as_mapping(seen.get(name, {}), name), as_mapping(removed.get(name, {}), name))
        for name, value in wrote.items()
    }


def _answer(wrote: Mapping[str, Any], seen: Mapping[str, Any], removed: Mapping[str, Any]) -> NonceAnswer:
    if "error" in wrote:
        unreached = wrote.get("unreached") is True
        command = as_str(wrote.get("next_command", ""), "next_command")
        return NonceAnswer(write_error=as_str(wrote["error"], "error"), unreached=unreached, next_command=command)
    entries = {node: as_mapping(entry, node) for node, entry in as_mapping(seen.get("seen", {}), "seen").items()}
    return NonceAnswer(
        read_error="" if "seen" in seen else as_str(seen.get("error", "no answer"), "error"),
        next_command=as_str(seen.get("next_command", ""), "next_command"),
        unreached=seen.get("unreached") is True,
        waited_s={node: as_float(entry["waited_s"], node) for node, entry in entries.items() if "waited_s" in entry},
        faults={
            node: as_str(entry.get("error", "not there"), node) for node, entry in entries.items() if "waited_s" not in entry
        },
        remove_error=as_str(removed.get("error", ""), "error"),
    )
