"""Resource limits as a non-interactive login gets them: the probe is started by one, and asks for its own."""

from __future__ import annotations

from netcheck.facts.question import Question, Reply, as_int, as_list, as_mapping
from r4090c.errors import ParseError
from r4090c.model import Cluster, LimitsFact, Node

NAME = "limits"
LIMITS = ("memlock", "nofile", "stack", "nproc")


def question(node: Node, cluster: Cluster) -> Question:
    """Return what to ask `node`."""
    return Question(natives={"rlimits": list(LIMITS)})


def parse(reply: Reply) -> LimitsFact:
    """Return the soft limits. Raises ParseError when one is missing."""
    limits = as_mapping(reply.native("rlimits"), "rlimits")

    def soft(name: str) -> int | None:
        pair = as_list(limits.get(name), name)
        if len(pair) != 2:
            raise ParseError(f"{name}: expected [soft, hard], got {len(pair)} values")
        return None if pair[0] is None else as_int(pair[0], name)

    return LimitsFact(memlock_bytes=soft("memlock"), nofile=soft("nofile"), stack_bytes=soft("stack"), nproc=soft("nproc"))
