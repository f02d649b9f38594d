"""What the verdicts of the remote layer say about a node. Pure; the words are those of `r4090c.remote.Verdict`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from r4090c.model import Finding, Node, Status

OK = "ok"
NO_PYTHON3 = "no-python3"
NOISY_SHELL = "noisy-shell"
AUTH_FAILED = "auth-failed"
HOST_KEY = ("host-key-changed", "unknown-host-key")
LOGGED_IN = (OK, NOISY_SHELL, NO_PYTHON3)
"""The node let us in; whether its answer was of use is another matter."""


def verdict_of(answer: Mapping[str, Any]) -> str:
    """Return the verdict of one node's entry in Raw.reach.

    A Python before 3.7 answers our program with a SyntaxError, which the remote layer can only see as a broken answer: that
    is a node without a usable python3.
    """
    verdict = str(answer["verdict"])
    if verdict == "lost" and "SyntaxError" in str(answer.get("observed", "")):
        return NO_PYTHON3
    return verdict


def observed_expected(answer: Mapping[str, Any]) -> tuple[str, str]:
    """Return what was seen and what was expected instead ("" when not told), from one node's entry in Raw.reach."""
    observed, _, expected = str(answer.get("observed", "") or answer["verdict"]).partition("; expected ")
    return observed, expected


def not_reached(check_id: str, node: Node, answer: Mapping[str, Any]) -> Finding:
    """Return the finding of a check that needed an answer of `node` and got none: the same words for all, to be told once."""
    did = "gave no usable answer" if verdict_of(answer) in LOGGED_IN else "was not reached"
    remedy = str(answer.get("next_command", ""))
    return Finding(check_id, node.name, Status.UNKNOWN, f"not read: the node {did}", "", "", remedy)
