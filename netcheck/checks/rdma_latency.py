"""Whether small RDMA messages arrive as soon as one switch lets them, and if not, between which nodes they are late."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from netcheck.checks._links import Blame, blames, partners, span
from netcheck.checks._rdma import not_measured, of_cluster
from netcheck.checks._wording import on, origin
from netcheck.checks.cpu_settings import GOVERNOR
from netcheck.measure.rdma import LATENCY, Rdma, late_suspects
from r4090c.model import Cluster, Finding, Node, Status

ID, GROUP, SCOPE, NEEDS = "rdma-latency", "bandwidth", "measurement", ("rdma-pairs",)
RULE = "t_typical of ib_send_lat at most {rdma_latency_warn_us:g} us (warn), {rdma_latency_fail_us:g} us (fail)"
SOURCE = "est.; t_stdev is cut by perftest and not judged"

WHY = "small collectives cost their latency, once a hop: sleeping cores, a card on the other socket, a detour over switches"


def applies(node: Node, cluster: Cluster) -> bool:
    """Only where the network is stated to be RoCE or InfiniBand."""
    return cluster.network.kind in ("roce", "infiniband")


def check(measured: Any, cluster: Cluster) -> Iterator[Finding]:
    """Yield a Finding for each node or pair that is late, each that could not be measured, and a pass for every other node.

    Raises ParseError when `measured` is not what `rdma.read` takes.
    """
    rdma = of_cluster(measured, cluster)
    expect = cluster.expect
    expected = f"at most {expect.rdma_latency_warn_us:g} us typically{origin(cluster, 'rdma_latency_warn_us')}"
    late = blames(late_suspects(rdma, cluster), cluster)
    once = {frozenset(blame.nodes) if len(blame.nodes) == 2 else blame.subject: blame for blame in reversed(late)}
    for blame in reversed(once.values()):  # a pair is as late in one direction as in the other
        yield _late(blame, rdma, expected, cluster)
    told = {blame.subject for blame in late}
    yield from not_measured(ID, rdma, LATENCY, expected, cluster)
    values = rdma.typical_us()
    bad = {cell for blame in late for cell in blame.cells}
    for name in dict.fromkeys(name for cell in values for name in cell):
        own = [value for cell, value in values.items() if cell[0] == name and cell not in bad]
        if name not in told and name not in rdma.failed and own:
            yield Finding(ID, name, Status.PASS, f"{span(own, 'us')} to {len(own)} peer{'s' if len(own) > 1 else ''}", expected)


def _late(blame: Blame, rdma: Rdma, expected: str, cluster: Cluster) -> Finding:
    values = [rdma.typical_us()[cell] for cell in blame.cells]
    status = Status.FAIL if median(values) > cluster.expect.rdma_latency_fail_us else Status.WARN
    where = f" {partners(blame).partition(';')[0]}" if len(blame.nodes) == 1 else "" if blame.nodes else " between all nodes"
    first = blame.nodes[0] if blame.nodes else blame.cells[0][0]
    node = cluster.node(first)
    remedy = on(node, f"printf performance | {'' if node.ssh.user == 'root' else 'sudo '}tee {GOVERNOR}")
    return Finding(ID, blame.subject, status, f"{span(values, 'us')} typically{where}", expected, WHY, remedy)
