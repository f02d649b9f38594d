"""Whether a command over SSH comes back clean, from a usable Python, under the same user id everywhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from netcheck.checks._majority import majority, others
from netcheck.checks._reach import LOGGED_IN, NO_PYTHON3, NOISY_SHELL, not_reached, observed_expected, verdict_of
from netcheck.checks._wording import as_root, on, origin
from r4090c.model import Cluster, Finding, Node, OsFact, Status, UserFact

ID, GROUP, SCOPE, NEEDS, OPTIONAL = "remote-shell", "access", "cluster", ("reach",), ("user", "os")
RULE = "nothing on standard output before a command, python3 >= {python_min}, one user id on all nodes (fail)"
SOURCE = "rsync(1) and scp(1) on shells that print; est."


WHY_USER = "files on shared storage belong to numbers: a rank with another id cannot write its checkpoint"


def check(
    reach: Mapping[str, Mapping[str, Any]],
    users: Mapping[str, UserFact | None],
    systems: Mapping[str, OsFact | None],
    cluster: Cluster,
) -> Iterator[Finding]:
    """Yield one Finding per node and fault: noise on stdout, no Python or one too old, a user id other than the others'."""
    uids = {name: user.uid for name, user in users.items() if user is not None}
    common = majority(uids)
    for node in cluster.nodes:
        if node.name not in reach:
            continue
        answer = reach[node.name]
        verdict, noise = verdict_of(answer), str(answer.get("noise", "") or "").strip()
        if verdict not in LOGGED_IN:
            yield not_reached(ID, node, answer)
            continue
        found = list(_faults(node.name, verdict, noise, answer, cluster))
        user, system = users.get(node.name), systems.get(node.name)
        python3 = system.python3 if system is not None else None
        if verdict != NO_PYTHON3:
            found += _python_faults(node, python3, cluster)
        if user is not None and node.name in common.odd:
            found.append(_other_user(node, user, common.value, users, uids))
        if not found and user is None:
            observed, remedy = "not read: the user id", f"r4090c facts --nodes {node.name}"
            found = [Finding(ID, node.name, Status.UNKNOWN, observed, "the same user id on all nodes", "", remedy)]
        told = f"clean, python3 {python3}, user id {uids.get(node.name)}"
        yield from found or [Finding(ID, node.name, Status.PASS, told, "a quiet shell")]


def _faults(name: str, verdict: str, noise: str, answer: Mapping[str, Any], cluster: Cluster) -> Iterator[Finding]:
    node = cluster.node(name)
    if noise or verdict == NOISY_SHELL:
        told = (
            f"the login shell prints {noise.splitlines()[0][:60]!r} before any command" if noise else observed_expected(answer)[0]
        )
        yield Finding(
            ID,
            name,
            Status.FAIL,
            told,
            "nothing on standard output of a non-interactive shell",
            "scp, rsync and every launcher read that text as data",
            on(node, 'grep -nE "echo|printf|neofetch|fortune" ~/.bashrc ~/.profile ~/.bash_profile /etc/profile.d/*.sh'),
        )
    if verdict == NO_PYTHON3:
        yield Finding(
            ID,
            name,
            Status.FAIL,
            observed_expected(answer)[0],
            _python_wanted(cluster),
            "the node side of this tool is a Python program",
            (answer["verdict"] == NO_PYTHON3 and str(answer.get("next_command", "")))
            or as_root(node, "apt-get install -y python3"),
        )


def _python_wanted(cluster: Cluster) -> str:
    return f"python3 >= {'.'.join(map(str, cluster.expect.python_min))}{origin(cluster, 'python_min')}"


def _python_faults(node: Node, python3: str | None, cluster: Cluster) -> Iterator[Finding]:
    """Yield a finding when the node's own python3 is older than `expect.python_min`, or was not told."""
    wanted = _python_wanted(cluster)
    if python3 is None or not re.fullmatch(r"\d{1,3}(\.\d{1,3})+", python3):
        observed, remedy = "not read: the version of python3", f"r4090c facts --nodes {node.name}"
        yield Finding(ID, node.name, Status.UNKNOWN, observed, wanted, "", remedy)
    elif tuple(map(int, python3.split(".")[:2])) < cluster.expect.python_min:
        why = "the node side of this tool is a Python program; where the distribution has nothing newer, upgrade it"
        remedy = as_root(node, "apt-get install -y python3")
        yield Finding(ID, node.name, Status.FAIL, f"python3 is {python3}", wanted, why, remedy)


def _other_user(
    node: Node, user: UserFact, common: int | None, users: Mapping[str, UserFact | None], uids: Mapping[str, int]
) -> Finding:
    """Return the finding for a user id that most nodes do not have (`common` None: no majority)."""
    expected = f"{common}, as on most nodes" if common is not None else f"one id on all; {others(uids, node.name)} (no majority)"
    names = {other.name for other in users.values() if other is not None and other.uid in (common, user.uid)}
    if len(names) > 1:  # another account altogether: the wish is wrong, not the node
        right = next((other.name for other in users.values() if other is not None and other.uid == common), "NAME")
        why = f"{WHY_USER}. These are different accounts: state ssh: {{user: {right}}} for {node.name} in cluster.yaml"
        remedy = on(node, "id")
    else:
        wanted = common if common is not None else min(uids.values())
        why = f"{WHY_USER}. usermod refuses while anything of {user.name} runs: hence as root"
        root = replace(node, ssh=replace(node.ssh, user="root"))
        remedy = on(root, f"usermod -u {wanted} {shlex.quote(user.name)}")
    return Finding(ID, node.name, Status.FAIL, f"user id {user.uid} ({user.name})", expected, why, remedy)
