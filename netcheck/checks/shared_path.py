"""Whether the shared folder is one folder, and shows on every node in time what another one writes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from netcheck.checks._wording import listed, on, origin
from netcheck.measure.nonce import NonceAnswer, read
from r4090c.model import Cluster, Finding, Status

ID, GROUP, SCOPE, NEEDS = "shared-path", "storage", "measurement", ("nonce",)
RULE = "what one node writes all others read (fail), within {storage_visible_warn_s:g} s (warn)"
SOURCE = "nfs(5), close-to-open; est."

WHY = "code, data and checkpoints are handed over in this folder"


def check(measured: Any, cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding per node: pass; cannot write or read, is another folder (fail); shows files late (warn); unknown.

    Nodes that see each other's files form a group. The group of more than half is the shared folder, and a node outside it is
    named; without such a group all are. Raises ParseError when `measured` is not what `nonce.read` takes.
    """
    known = {node.name for node in cluster.nodes}
    answers = {name: answer for name, answer in read(measured).items() if name in known}
    wrote = [name for name, answer in answers.items() if not answer.write_error]
    views = {name: answers[name].waited_s for name in wrote if not answers[name].read_error}
    group = _largest_group(views)
    for name, answer in answers.items():
        yield _judged(name, answer, wrote, group, cluster)


def _judged(name: str, answer: NonceAnswer, wrote: list[str], group: frozenset[str], cluster: Cluster) -> Finding:
    node, warn_s = cluster.node(name), cluster.expect.storage_visible_warn_s
    folder = node.paths.shared
    within = f"every node's file within {warn_s:g} s{origin(cluster, 'storage_visible_warn_s')}"
    quoted = shlex.quote(folder)
    look = on(node, f"findmnt -T {quoted}; ls -ld {quoted}")
    if answer.unreached:
        observed = f"not measured: {answer.write_error or answer.read_error}"
        return Finding(ID, name, Status.UNKNOWN, observed, within, "", answer.next_command)
    if answer.write_error:
        why = "missing, read-only, hung, or not this user's to write (NFS root_squash)"
        return Finding(ID, name, Status.FAIL, f"cannot write into {folder}: {answer.write_error}", "a file written", why, look)
    if answer.read_error:
        return Finding(ID, name, Status.FAIL, f"cannot read {folder}: {answer.read_error}", within, WHY, look)
    blind = [other for other in wrote if other not in answer.waited_s and (other in group or name not in group)]
    if blind:
        instead = answer.faults.get(blind[0], "not there")
        observed = f"{folder} does not show what {listed(blind)} wrote ({instead})"
        expected = f"the same folder as on {listed(sorted(group))}" if group else "one folder on all nodes (no majority)"
        return Finding(ID, name, Status.FAIL, observed, within if name in group else expected, WHY, look)
    waited_s = max((answer.waited_s[other] for other in wrote if other in answer.waited_s), default=0.0)
    if waited_s > warn_s:
        why = "a rank that looks for a checkpoint or a marker file right away does not find it"
        remedy = on(node, f"findmnt -no OPTIONS -T {quoted}")
        return Finding(ID, name, Status.WARN, f"another node's file showed after {waited_s:.1f} s", within, why, remedy)
    if answer.remove_error:
        why = "one small file is left; a later preflight removes it"
        observed = f"its test file could not be removed: {answer.remove_error}"
        return Finding(ID, name, Status.WARN, observed, "nothing left behind", why, look)
    peers = sum(other != name and other in answer.waited_s for other in wrote)
    told = f"writes, and sees the files of {peers} peers after {waited_s:.1f} s" if len(wrote) > 1 else "writes and reads"
    return Finding(ID, name, Status.PASS, told, within)


def _largest_group(views: Mapping[str, Mapping[str, float]]) -> frozenset[str]:
    """Return the nodes that see each other, if they are more than half of those that answered; else empty."""
    best: frozenset[str] = frozenset()
    for name, view in views.items():
        group = frozenset(other for other in view if other in views and name in views[other])
        if len(group) > len(best):
            best = group
    return best if len(best) * 2 > len(views) else frozenset()
