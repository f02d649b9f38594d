"""Whether the controller can log in to every node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from netcheck.checks._reach import AUTH_FAILED, HOST_KEY, LOGGED_IN, observed_expected, verdict_of
from netcheck.checks._wording import on, origin
from r4090c.model import Cluster, Finding, Node, Status

ID, GROUP, NEEDS = "ssh-reach", "access", ("reach",)
RULE = "a login over SSH (fail when refused, unknown when not reached), within {ssh_slow_warn_s:g} s (warn)"
SOURCE = "ssh(1); est."

MEANING = {
    "dns": ("an address that resolves here", "the name in cluster.yaml means nothing to this machine"),
    "refused": ("an sshd that listens", "the machine is up, but nothing listens on its SSH port"),
    "timeout": ("an answer within the connect timeout", "the node is down, or something on the way drops the packets"),
    "no-route": ("a route to the node", "this machine has no way to that network, or the node is off"),
    "banner-timeout": ("an SSH banner", "sshd took the connection and froze: out of memory, processes or disk"),
    "auth-failed": ("a login with the key", "sshd answers but does not accept the key or the user"),
    "lost": ("a connection that lasts", "the connection broke before the node had answered"),
}
"""Verdict of the remote layer -> (what was expected, why it matters)."""


def check(node: Node, reach: Mapping[str, Any], cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding: pass, slow (warn), login refused (fail), or not reached (unknown).

    A node that says no has a fault. A node that says nothing could not be asked, and the exit code keeps the two apart.
    """
    verdict, (observed, instead) = verdict_of(reach), observed_expected(reach)
    if verdict in LOGGED_IN:
        seconds, limit_s = reach.get("connect_s"), cluster.expect.ssh_slow_warn_s
        told = f"logged in after {seconds:.1f} s" if seconds is not None else "logged in"
        if seconds is not None and seconds > limit_s:
            yield Finding(
                ID,
                node.name,
                Status.WARN,
                told,
                f"within {limit_s:g} s{origin(cluster, 'ssh_slow_warn_s')}",
                "a slow login is mostly DNS or PAM waiting for a timeout, and every command pays it",
                on(node, 'sudo sshd -T | grep -iE "usedns|gssapiauthentication"'),
            )
            return
        yield Finding(ID, node.name, Status.PASS, told, "a login over SSH")
        return
    if verdict in HOST_KEY:
        remedy = f"r4090c preflight --only host-key --nodes {node.name}"
        yield Finding(ID, node.name, Status.SKIP, "not tried: its host key is not trusted", "a login over SSH", "", remedy)
        return
    expected, why = MEANING.get(verdict, ("a login over SSH", "without SSH nothing can be read or started"))
    status = Status.FAIL if verdict == AUTH_FAILED else Status.UNKNOWN
    remedy = str(reach.get("next_command", "")) or on(node, "true")
    yield Finding(ID, node.name, status, observed, instead or expected, why, remedy)
