"""Whether every node is the machine it was the last time."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from netcheck.checks._reach import AUTH_FAILED, LOGGED_IN, not_reached, observed_expected, verdict_of
from r4090c.model import Cluster, Finding, Node, Status

ID, GROUP, NEEDS = "host-key", "access", ("reach",)
RULE = "the key in known_hosts, and none that nobody vouched for (fail)"
SOURCE = "sshd(8), SSH_KNOWN_HOSTS FILE FORMAT"


def check(node: Node, reach: Mapping[str, Any], cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding: pass, an unknown or changed key (fail), or not seen (unknown)."""
    verdict, (observed, instead) = verdict_of(reach), observed_expected(reach)
    # The key is verified before the login: whoever got that far has shown a known one.
    known_as = node.ssh.address if node.ssh.port == 22 else f"[{node.ssh.address}]:{node.ssh.port}"
    if verdict in (*LOGGED_IN, AUTH_FAILED):
        yield Finding(ID, node.name, Status.PASS, "the key in known_hosts", "a known host key")
    elif verdict == "host-key-changed":
        yield Finding(
            ID,
            node.name,
            Status.FAIL,
            observed,
            instead or "the key in known_hosts",
            "the node was reinstalled, the address now belongs to another machine, or somebody listens in between",
            str(reach.get("next_command", "")) or f"ssh-keygen -R {shlex.quote(known_as)}",
        )
    elif verdict == "unknown-host-key":
        port = "" if node.ssh.port == 22 else f"-p {node.ssh.port} "
        yield Finding(
            ID,
            node.name,
            Status.FAIL,
            observed,
            instead or "a key listed in known_hosts",
            "a key nobody has vouched for is not trusted by itself: compare the fingerprint with the node's console first",
            str(reach.get("next_command", "")) or f"ssh-keyscan {port}{shlex.quote(node.ssh.address)} >> ~/.ssh/known_hosts",
        )
    else:
        yield not_reached(ID, node, reach)
