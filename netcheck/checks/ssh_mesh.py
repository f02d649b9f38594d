"""Whether every node logs in to every node, itself included, without a password, a question, or a word on standard output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from netcheck.attribution import explain
from netcheck.checks._links import Blame, blames
from netcheck.checks._wording import as_root, listed, on
from netcheck.measure.ssh_mesh import Login, Mesh, read
from r4090c.model import Cluster, Finding, Node, Status

ID, GROUP, SCOPE, NEEDS = "ssh-mesh", "access", "measurement", ("ssh-mesh",)
RULE = "`ssh NODE true` in batch mode with known host keys ends with 0 and prints nothing, from every node to every node"
SOURCE = "DeepSpeed issue 4907, pull requests 1832 and 1957: launchers log in to all nodes, themselves included"

EXPECTED = "a login by name that asks nothing and prints nothing"
WHY = "mpirun, pdsh and deepspeed's own launcher log in from node to node (`r4090c launch` does not)"
WHY_NOISE = "what a login prints on standard output mixes with what launchers and rsync read from it"
WORKS, FAILS = 1.0, 0.0


def applies(node: Node, cluster: Cluster) -> bool:
    """Not where all nodes are one machine and one account (demo)."""
    return cluster.network.kind != "loopback"


def check(measured: Any, cluster: Cluster) -> Iterator[Finding]:
    """Yield a Finding for each node that logs in nowhere, lets nobody in or is noisy, for each lone login; else a pass per node.

    Raises ParseError when `measured` is not what `ssh_mesh.read` takes.
    """
    known = {node.name for node in cluster.nodes}
    mesh = read(measured)
    sound = known - {*mesh.failed}  # of a node that went away it is told once that it did
    logins = {(one.source, one.target): one for one in mesh.logins if {one.source, one.target} <= sound}
    noisy = sorted({one.target for one in logins.values() if one.noise})
    for name in noisy:
        yield _noise(next(one for one in logins.values() if one.noise and one.target == name), cluster)
    blamed = blames(explain({cell: FAILS if one.fault else WORKS for cell, one in logins.items()}, 0.5), cluster)
    for blame in blamed:
        yield _fault(blame, [logins[cell] for cell in blame.cells], cluster)
    yield from _not_measured(mesh, known, cluster)
    told = {blame.subject for blame in blamed} | {*noisy, *mesh.absent, *mesh.failed}
    for name in dict.fromkeys(source for source, _ in logins):
        own = [one for one in logins.values() if one.source == name]
        reached = sum(one.works for one in own)
        if name not in told and reached:
            yield Finding(ID, name, Status.PASS, f"logs in to {reached} of {len(own)} nodes tried", EXPECTED)


def _noise(login: Login, cluster: Cluster) -> Finding:
    remedy = on(cluster.node(login.target), "grep -n echo ~/.bashrc ~/.profile ~/.ssh/rc /etc/ssh/sshrc")
    return Finding(ID, login.target, Status.FAIL, f"a login prints {login.noise!r}", EXPECTED, WHY_NOISE, remedy)


def _fault(blame: Blame, logins: list[Login], cluster: Cluster) -> Finding:
    faults = listed(dict.fromkeys(one.fault for one in logins), 2)
    sources, targets = ([*dict.fromkeys(names)] for names in zip(*((one.source, one.target) for one in logins), strict=True))
    if not blame.nodes:
        observed = f"no node logs in to another: {faults}"
    elif len(blame.nodes) == 2:
        observed = f"login refused: {faults}" if sources != targets else f"cannot log in to itself: {faults}"
    elif blame.sends and blame.receives:
        observed = f"cannot log in to the others, nor they to it: {faults}"
    elif blame.sends:
        observed = f"cannot log in to {listed(targets)}: {faults}"
    else:
        observed = f"{listed(sources)} cannot log in to it: {faults}"
    return Finding(ID, blame.subject, Status.FAIL, observed, EXPECTED, WHY, "r4090c provision ssh-trust")


def _not_measured(mesh: Mesh, known: set[str], cluster: Cluster) -> Iterator[Finding]:
    for name in mesh.absent:
        if name in known:
            remedy = as_root(cluster.node(name), "apt-get install -y openssh-client")
            yield Finding(ID, name, Status.SKIP, "ssh is not installed", EXPECTED, WHY, remedy)
    for name, (error, command) in mesh.failed.items():
        if name in known:
            remedy = command or on(cluster.node(name), "command -v python3 ssh")
            yield Finding(ID, name, Status.UNKNOWN, f"not measured: {error}", EXPECTED, "", remedy)
