"""Processes that hang in NFS: what waits for a server that does not answer cannot be killed, and neither can its rank."""

from __future__ import annotations

from netcheck.facts.question import Question, Reply, as_int, as_list, as_str
from r4090c.errors import ParseError
from r4090c.model import BlockedProcess, Cluster, Node

NAME = "blocked"
WAITS = ("nfs", "rpc_", "nlm")
"""What the functions of the kernel's NFS client and of its RPC layer are called: nfs_start_io_read, rpc_wait_bit_killable …"""
PAUSES_S = (0.4, 4.6)
"""est.: together 5 s, as long as a folder may take to answer; the second look clears nearly all that was merely busy."""


def question(node: Node, cluster: Cluster) -> Question:
    """Return what to ask `node`. Only where a process hangs do the looks take their time."""
    return Question(
        natives={"blocked": {"waits": list(WAITS), "pauses_s": list(PAUSES_S), "in_nfs": True}}, timeout_s=sum(PAUSES_S) + 5
    )


def parse(reply: Reply) -> tuple[BlockedProcess, ...]:
    """Return the processes by number; nearly always none. Raises ParseError."""
    found = []
    for entry in as_list(reply.native("blocked"), "blocked"):
        fields = as_list(entry, "blocked")
        if len(fields) != 4:
            raise ParseError(f"blocked: expected [pid, name, uid, wait], got {len(fields)} values")
        pid, name, uid, wait = fields
        found.append(BlockedProcess(as_int(pid, "pid"), as_str(name, "name"), as_int(uid, "uid"), as_str(wait, "wait")))
    return tuple(sorted(found, key=lambda process: process.pid))
