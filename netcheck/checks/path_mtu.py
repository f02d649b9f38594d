"""Whether packets of the MTU get through between the nodes, and if not, which size does and whose path is too narrow."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from netcheck.attribution import explain
from netcheck.checks._links import Blame, blames
from netcheck.checks._wording import as_root, listed, on
from netcheck.expected import interface
from netcheck.measure.path_mtu import SMALL_BYTES, Path, read
from r4090c.model import Cluster, Finding, NetFact, Node, Status

ID, GROUP, SCOPE, NEEDS, OPTIONAL = "path-mtu", "nic", "measurement", ("path-mtu",), ("net",)
RULE = "pings as large as the MTU come back unfragmented from every peer"
SOURCE = "RFC 1191; ping -M do -s MTU-28 (IPv6: MTU-48)"

WHY = "packets larger than the smallest MTU on the way are dropped without a word: connections open, then stall"
PASSES, FAILS = 1.0, 0.0
"""Shares for netcheck.attribution: a ping comes back or it does not."""


def applies(node: Node, cluster: Cluster) -> bool:
    """Not where all nodes are one machine."""
    return cluster.network.kind != "loopback"


def check(measured: Any, nets: Mapping[str, NetFact | None], cluster: Cluster) -> Iterator[Finding]:
    """Yield a Finding for each node or link that the largest packets do not pass, else a pass per node.

    Raises ParseError when `measured` is not what `path_mtu.read` takes.
    """
    found = read(measured).between([node.name for node in cluster.nodes])
    if not (found.paths or found.absent or found.failed):
        for node in cluster.nodes:
            yield Finding(ID, node.name, Status.SKIP, "not applicable: no other node to measure with")
        return
    paths = {(path.sender, path.receiver): path for path in found.paths}
    there = {cell: path for cell, path in paths.items() if path.passed is not None}
    blamed = blames(explain({cell: FAILS if path.said else PASSES for cell, path in there.items()}, 0.5), cluster)
    for blame in blamed:
        yield _narrow(blame, [paths[cell] for cell in blame.cells], nets, cluster)
    mute = {cell: PASSES if path.passed is not None else FAILS for cell, path in paths.items()}
    silent = blames(explain(mute, 0.5), cluster)
    for blame in silent:
        yield _silent(blame, [paths[cell] for cell in blame.cells], cluster)
    for name in found.absent:
        remedy = as_root(cluster.node(name), "apt-get install -y iputils-ping")
        yield Finding(ID, name, Status.SKIP, "ping is not installed", "", "it sends packets that must not be fragmented", remedy)
    for name, (error, command) in found.failed.items():
        remedy = command or on(cluster.node(name), "command -v python3 ping")
        yield Finding(ID, name, Status.UNKNOWN, f"not measured: {error}", "", "", remedy)
    told = {blame.subject for blame in (*blamed, *silent)}
    for name in dict.fromkeys(path.sender for path in found.paths):
        own = [path for path in found.paths if path.sender == name and not path.said]
        if name not in told and own:
            mtus = listed(sorted({str(path.mtu) for path in own}))
            yield Finding(ID, name, Status.PASS, f"packets of {mtus} bytes reach {len(own)} peer{'s' if len(own) > 1 else ''}")


def _narrow(blame: Blame, paths: list[Path], nets: Mapping[str, NetFact | None], cluster: Cluster) -> Finding:
    path = paths[0]
    sizes = sorted({one.passed for one in paths if one.passed is not None})
    passes = f"{sizes[0]} pass" if sizes[0] else f"only small ones ({SMALL_BYTES} bytes of data) pass"
    where = f" between {blame.subject} and {listed(_peers(blame))}" if len(blame.nodes) == 1 else ""
    observed = f"packets of {path.mtu} bytes do not get through{where}, {passes}: {path.said}"
    stated = " (cluster.yaml)" if cluster.network.mtu is not None else ", as the interface has it"
    first = blame.nodes[0] if blame.nodes else path.sender
    iface = interface(cluster.node(first), nets.get(first), cluster)
    if iface is None or iface.mtu >= path.mtu:
        why = f"{WHY}; its own interface takes them: the MTU of its switch port, or of what lies between"
        address = shlex.quote(cluster.node(path.receiver if path.sender == first else path.sender).data_address)
        remedy = on(cluster.node(first), f"ip route get {address}; ip -d link")
    else:
        why, remedy = WHY, as_root(cluster.node(first), f"ip link set {shlex.quote(iface.name)} mtu {path.mtu}")
    return Finding(ID, blame.subject, Status.FAIL, observed, f"{path.mtu}{stated}", why, remedy)


def _silent(blame: Blame, paths: list[Path], cluster: Cluster) -> Finding:
    """Return the finding for a peer that answers no ping at all: nothing is known of its MTU."""
    path = paths[0]
    where = f" between {blame.subject} and {listed(_peers(blame))}" if len(blame.nodes) == 1 else ""
    observed = f"not measured: no ping comes back{where}: {path.said}"
    remedy = on(cluster.node(path.sender), f"ping -c 3 {shlex.quote(cluster.node(path.receiver).data_address)}")
    return Finding(ID, blame.subject, Status.UNKNOWN, observed, f"packets of {path.mtu} bytes", "", remedy)


def _peers(blame: Blame) -> list[str]:
    """Return the other ends of a node's links."""
    return sorted({name for cell in blame.cells for name in cell} - {*blame.nodes})
