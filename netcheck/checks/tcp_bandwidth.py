"""Whether TCP carries between the nodes what their network cards and MTU allow, and if not, which node or link is slow."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import Any

from netcheck.attribution import Suspect
from netcheck.checks._links import Blame, blames, look_at, partners, passes, roles, span, wanted, why_slow
from netcheck.checks._wording import as_root, listed, on, origin
from netcheck.expected import Cell, Limits, interface, link_mtu
from netcheck.measure.tcp import AGAIN, Tcp, limits_of, lost_share, read, suspects_of
from r4090c.model import Cluster, Finding, Iface, NetFact, Node, Status

ID, GROUP, SCOPE, NEEDS, OPTIONAL = "tcp-bandwidth", "bandwidth", "measurement", ("tcp",), ("net",)
RULE = (
    "both ways, with one or several streams: {tcp_slow_nic_warn:.0%} of the rate up to 10 Gbit/s (warn; {tcp_slow_nic_fail:.0%}: "
    "fail), {tcp_fast_nic_warn:.0%} above it but no more than {tcp_one_core_gbit_s:g} Gbit/s (warn), {tcp_fail:.0%} of that "
    "(fail); without a known rate "
    "{link_median_warn:.0%} (warn) and {link_median_fail:.0%} (fail) of what the links mostly carry; "
    "at most {tcp_sent_again_warn:.1%} of segments sent again (warn)"
)
SOURCE = "headers of TCP, IP and Ethernet (RFC 791, 9293, 7323; IEEE 802.3); shares est."

EXPECTED = "what the network cards and the MTU allow"


def applies(node: Node, cluster: Cluster) -> bool:
    """Not where all nodes are one machine."""
    return cluster.network.kind != "loopback"


def check(measured: Any, nets: Mapping[str, NetFact | None], cluster: Cluster) -> Iterator[Finding]:
    """Yield a Finding for each slow node or link, each that could not be measured, and a pass for every other node.

    Raises ParseError when `measured` is not what `tcp.read` takes.
    """
    whole = read(measured)
    if not whole.nodes:
        for node in cluster.nodes:
            yield Finding(ID, node.name, Status.SKIP, "not applicable: no other node to measure with", EXPECTED)
        return
    tcp = whole.between([node.name for node in cluster.nodes])
    limits = limits_of(tcp, nets, cluster)
    ifaces = {node.name: interface(node, nets.get(node.name), cluster) for node in cluster.nodes}
    cells = tcp.cells()
    suspects = suspects_of(tcp, limits, nets, cluster)
    slow = blames(suspects.slow, cluster)
    yield from (_slow(blame, tcp, limits, ifaces, cluster) for blame in slow)
    odd = [
        *(_lossy(blame, tcp, ifaces, cluster) for blame in _others(suspects.lossy, slow, cluster)),
        *(_uneven(blame, tcp, ifaces, cluster) for blame in _others(suspects.uneven, slow, cluster)),
    ]
    yield from odd
    yield from _not_measured(tcp, cluster)
    named = {finding.subject for finding in odd}
    for name, told in passes(cells, slow):
        if name not in named and name not in tcp.failed:
            yield Finding(ID, name, Status.PASS, told, EXPECTED)


def _slow(blame: Blame, tcp: Tcp, limits: Mapping[Cell, Limits], ifaces: Mapping[str, Iface | None], cluster: Cluster) -> Finding:
    cells = tcp.cells()
    values = [cells[cell] for cell in blame.cells if cell in cells]
    limit = min((limits[cell] for cell in blame.cells), key=lambda one: one.warn_gbit_s)
    status = Status.FAIL if median(values) < limit.fail_gbit_s else Status.WARN
    if not blame.nodes:
        observed = f"all links are slow: {span(values)} ({len(values)} of {len(cells)})"
    elif len(blame.nodes) == 1:
        observed = f"{roles(blame)}: {span(values)} {partners(blame)}"
    else:
        observed = _streams_told(tcp, blame.cells[0])
    if not {*blame.cells} & {*tcp.cells(AGAIN)}:
        observed += "; not tested again"
    first = blame.nodes[0] if blame.nodes else blame.cells[0][0]
    return Finding(
        ID, blame.subject, status, observed, wanted(limit, cluster), why_slow(blame), look_at(first, ifaces.get(first), cluster)
    )


def _streams_told(tcp: Tcp, cell: Cell) -> str:
    told = [
        f"{test.gbit_s:.3g} with {test.streams} stream{'s' if test.streams > 1 else ''}"
        for test in tcp.last(cell)
        if test.gbit_s is not None
    ]
    return f"{tcp.cells()[cell]:.3g} Gbit/s ({', '.join(told)})"


def _others(suspects: Iterable[Suspect], slow: Iterable[Blame], cluster: Cluster) -> list[Blame]:
    """Return those that the slow ones do not explain."""
    explained = {cell for blame in slow for cell in blame.cells}
    return [blame for blame in blames(suspects, cluster) if not {*blame.cells} <= explained]


def _lossy(blame: Blame, tcp: Tcp, ifaces: Mapping[str, Iface | None], cluster: Cluster) -> Finding:
    """Return the warning about a node or link that is not slow, but loses segments."""
    shares = [lost_share(tcp.last(cell), link_mtu(cell, ifaces, cluster)) or 0.0 for cell in blame.cells]
    where = f" {partners(blame)}" if len(blame.nodes) == 1 else ""
    observed = f"{max(shares):.2%} of TCP's segments are sent again{where}"
    expected = f"at most {cluster.expect.tcp_sent_again_warn:.2%}{origin(cluster, 'tcp_sent_again_warn')}"
    why = "packets are lost on the way, which hurts a collective over many links more than one test: cable, port, duplex"
    first = blame.nodes[0] if blame.nodes else blame.cells[0][0]
    return Finding(ID, blame.subject, Status.WARN, observed, expected, why, look_at(first, ifaces.get(first), cluster))


def _uneven(blame: Blame, tcp: Tcp, ifaces: Mapping[str, Iface | None], cluster: Cluster) -> Finding:
    """Return the warning about a node or link that is not slow, but where several streams carry much less than one."""
    cell = blame.cells[0]
    expected = f"several streams carry at least {cluster.expect.tcp_streams_warn:.0%} of what one carries"
    expected += origin(cluster, "tcp_streams_warn")
    why = "NCCL opens several sockets: streams that disturb each other point at short queues or at interrupts on one core"
    observed = f"{'->'.join(cell)}: {_streams_told(tcp, cell)}" if len(blame.nodes) != 2 else _streams_told(tcp, cell)
    first = blame.nodes[0] if blame.nodes else cell[0]
    return Finding(ID, blame.subject, Status.WARN, observed, expected, why, look_at(first, ifaces.get(first), cluster))


def _not_measured(tcp: Tcp, cluster: Cluster) -> Iterator[Finding]:
    for name, (error, command) in tcp.failed.items():
        remedy = command or "r4090c preflight --only access"
        yield Finding(ID, name, Status.UNKNOWN, f"not measured: {error}", EXPECTED, "", remedy)
    absent = sorted({test.absent for test in tcp.tests if test.absent})
    for name in absent:
        remedy = as_root(cluster.node(name), "apt-get install -y iperf3")
        yield Finding(ID, name, Status.SKIP, "iperf3 is not installed", EXPECTED, "it measures what TCP carries", remedy)
    measured = {name for cell in tcp.cells() for name in cell}
    for name in tcp.nodes:
        own = [test for test in tcp.tests if name in (test.sender, test.receiver)]
        if name not in (*measured, *absent, *tcp.failed) and own and all(test.absent for test in own):
            observed = f"not measured: iperf3 is not installed on {listed(absent)}"
            remedy = as_root(cluster.node(absent[0]), "apt-get install -y iperf3")
            yield Finding(ID, name, Status.SKIP, observed, EXPECTED, "", remedy)
    for (one, other), error in tcp.silent.items():
        if not {one, other} & {*tcp.failed}:
            dry = on(cluster.node(one), f"iperf3 -c {shlex.quote(cluster.node(other).data_address)}")
            remedy = "r4090c preflight --only ports" if "onnect" in error or "route" in error else dry
            yield Finding(ID, f"{one}->{other}", Status.UNKNOWN, f"not measured: {error}", EXPECTED, "", remedy)
