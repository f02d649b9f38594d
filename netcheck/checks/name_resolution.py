"""Whether every node resolves every node's name to the same, reachable address.

`launch` hands out addresses, but torchrun, gloo and tools that users run look up host names: a name that leads to 127.0.1.1
makes a rank wait for itself. So a name that does not resolve is a fault also where cluster.yaml holds addresses only.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping

from netcheck.checks._majority import majority
from netcheck.checks._wording import listed, on, sudo
from netcheck.data_network import is_address
from r4090c.model import Cluster, Finding, NetFact, Node, Status

ID, GROUP, SCOPE, NEEDS = "name-resolution", "access", "cluster", ("net",)
RULE = "every node resolves every node's name to one address, the same everywhere and not loopback (fail)"
SOURCE = "PyTorch issues 73656, 150532; Debian Reference, 5.1.1 (127.0.1.1)"

EXPECTED = "every node's name leads to the same non-loopback address everywhere"


def check(nets: Mapping[str, NetFact], cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding per node that asks: pass, or one per kind of wrong answer it gets. Skipped on a loopback network."""
    if cluster.network.kind == "loopback":
        for name in nets:
            yield Finding(ID, name, Status.SKIP, "not applicable: all nodes are on one machine", EXPECTED)
        return
    agreed = {node.name: _agreed(node.name, nets) for node in cluster.nodes}
    for asker, net in nets.items():
        if not net.names:
            yield Finding(
                ID, asker, Status.UNKNOWN, "not read: no name was looked up", EXPECTED, "", f"r4090c facts --nodes {asker}"
            )
            continue
        found = list(_faults(cluster.node(asker), net, agreed, cluster))
        yield from found or [Finding(ID, asker, Status.PASS, f"resolves {len(agreed)} of {len(agreed)} names", EXPECTED)]


def _faults(asker: Node, net: NetFact, agreed: Mapping[str, frozenset[str] | None], cluster: Cluster) -> Iterator[Finding]:
    silent, loops, differing, elsewhere = [], [], [], []
    root = sudo(asker)
    for target, common in agreed.items():
        answers = [answer for answer in net.names.get(target, ()) if not _link_local(answer)]
        if not answers:
            silent.append(target)
        elif any(_loopback(answer) for answer in answers):
            loops.append((target, next(answer for answer in answers if _loopback(answer))))
        elif common is None or common.isdisjoint(answers):
            differing.append((target, answers[0], common))
        else:
            known = _addresses(cluster.node(target))
            if known and known.isdisjoint(answers):
                elsewhere.append((target, answers[0], known))
    if silent:
        lines = "\\n".join(f"{_address(cluster.node(target))} {target}" for target in silent)
        yield Finding(
            ID,
            asker.name,
            Status.FAIL,
            f"does not resolve {listed(silent)}",
            EXPECTED,
            "torchrun and gloo look up host names, and wait or fail when there is no answer",
            on(asker, f'printf "{lines}\\n" | {root}tee -a /etc/hosts'),
        )
    if loops:
        trap = loops[0][1].startswith("127.0.1.")
        cause = (
            "the Debian installer maps a machine's own name to 127.0.1.1"
            if trap
            else "the name leads back to the machine that asks"
        )
        lines = "\\n".join(f"{_address(cluster.node(target))} {target}" for target, _ in loops)
        # The name is taken out of the loopback lines, which may hold others (localhost), and written anew at the end.
        takes = "; ".join(f"s/[[:space:]]{target}\\([[:space:]]\\|$\\)/\\1/g" for target, _ in loops)
        drop = f'{root}sed -i "/^127\\.\\|^::1/{{ {takes} }}" /etc/hosts'
        yield Finding(
            ID,
            asker.name,
            Status.FAIL,
            listed(f"{name} -> {where}" for name, where in loops),
            EXPECTED,
            f"{cause}: ranks then listen where no other node can reach them",
            on(asker, f'{drop} && printf "{lines}\\n" | {root}tee -a /etc/hosts'),
        )
    for target, answer, common in differing:
        right = f"{target} -> {listed(sorted(common))}, as on most nodes" if common else f"one address for {target} (no majority)"
        why = "nodes that disagree about an address talk past each other"
        yield Finding(ID, asker.name, Status.FAIL, f"{target} -> {answer}", right, why, on(asker, f"grep -n {target} /etc/hosts"))
    for target, answer, known in elsewhere:
        right = f"{target} -> {' or '.join(sorted(known))} (cluster.yaml)"
        why = "all nodes agree on an address that the inventory does not know: a stale entry, or a third network"
        yield Finding(ID, asker.name, Status.WARN, f"{target} -> {answer}", right, why, on(asker, f"grep -n {target} /etc/hosts"))


def _agreed(target: str, nets: Mapping[str, NetFact]) -> frozenset[str] | None:
    """Return the addresses most nodes get for `target`, None without a majority. Empty and loopback answers do not vote."""
    votes = {}
    for asker, net in nets.items():
        answers = frozenset(answer for answer in net.names.get(target, ()) if not _link_local(answer))
        if answers and not any(_loopback(answer) for answer in answers):
            votes[asker] = answers
    if not votes:
        return frozenset()
    found = majority(votes).value
    if found is not None:
        return found
    # A node may list all its own addresses for its own name (nss-myhostname): what all answers share is agreement enough.
    shared = frozenset.intersection(*votes.values())
    return shared or None


def _addresses(node: Node) -> frozenset[str]:
    """Return the addresses cluster.yaml states for `node`; empty when one of them is a name (then nothing can be compared)."""
    stated = (node.ssh.address, node.data_address)
    return frozenset(stated) if all(is_address(text) for text in stated) else frozenset()


def _address(node: Node) -> str:
    """Return the address to write into /etc/hosts for `node`."""
    return node.data_address if is_address(node.data_address) else node.ssh.address


def _loopback(text: str) -> bool:
    return is_address(text) and ipaddress.ip_address(text).is_loopback


def _link_local(text: str) -> bool:
    """Link-local answers (fe80::…%eth0, from mDNS) are no address for a peer, nor a fault."""
    text = text.split("%", 1)[0]
    return is_address(text) and ipaddress.ip_address(text).is_link_local
