"""Whether RDMA carries between the nodes what the link's rate and packet size allow, and if not, which node or link is slow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from netcheck.checks._links import Blame, blames, look_at, partners, passes, roles, span, wanted, why_slow
from netcheck.checks._rdma import not_measured, of_cluster
from netcheck.checks._wording import listed
from netcheck.expected import Cell, Limits, interface
from netcheck.measure.rdma import AGAIN, BANDWIDTH, Rdma, limits_of, slow_suspects
from r4090c.model import Cluster, Finding, Iface, NetFact, Node, Status

ID, GROUP, SCOPE, NEEDS, OPTIONAL = "rdma-bandwidth", "bandwidth", "measurement", ("rdma-pairs",), ("net",)
RULE = (
    "ib_write_bw, both ways: {rdma_warn:.0%} (warn) and {rdma_fail:.0%} (fail) of what the rate carries in packets "
    "of the RDMA MTU; without a known rate {link_median_warn:.0%} (warn) and {link_median_fail:.0%} (fail) of what the links "
    "mostly carry"
)
SOURCE = "headers of RoCE v2 and InfiniBand (InfiniBand Architecture Specification, annex A17); shares est."

EXPECTED = "what the link's rate carries in packets of its RDMA MTU"


def applies(node: Node, cluster: Cluster) -> bool:
    """Only where the network is stated to be RoCE or InfiniBand."""
    return cluster.network.kind in ("roce", "infiniband")


def check(measured: Any, nets: Mapping[str, NetFact | None], cluster: Cluster) -> Iterator[Finding]:
    """Yield a Finding for each slow node or link, each that could not be measured, and a pass for every other node.

    Raises ParseError when `measured` is not what `rdma.read` takes.
    """
    rdma = of_cluster(measured, cluster)
    limits = limits_of(rdma, nets, cluster)
    ifaces = {node.name: interface(node, nets.get(node.name), cluster) for node in cluster.nodes}
    slow = blames(slow_suspects(rdma, limits), cluster)
    yield from (_slow(blame, rdma, limits, ifaces, cluster) for blame in slow)
    yield from not_measured(ID, rdma, BANDWIDTH, EXPECTED, cluster)
    for name, told in passes(rdma.cells(), slow):
        if name not in rdma.failed:
            yield Finding(ID, name, Status.PASS, told, EXPECTED)


def _slow(
    blame: Blame, rdma: Rdma, limits: Mapping[Cell, Limits], ifaces: Mapping[str, Iface | None], cluster: Cluster
) -> Finding:
    cells, tests = rdma.cells(), rdma.last(BANDWIDTH)
    values = [cells[cell] for cell in blame.cells]
    limit = min((limits[cell] for cell in blame.cells), key=lambda one: one.warn_gbit_s)
    status = Status.FAIL if median(values) < limit.fail_gbit_s else Status.WARN
    packets = listed(sorted({f"packets of {tests[cell].mtu_bytes} bytes" for cell in blame.cells if tests[cell].mtu_bytes}))
    if len(blame.nodes) == 1:
        observed = f"{roles(blame)}: {span(values)} {partners(blame)}"
    else:
        observed = span(values) if blame.nodes else f"all links are slow: {span(values)} ({len(values)} of {len(cells)})"
    observed += f" in {packets}" if packets else ""
    observed += "" if {*blame.cells} & {*rdma.cells((AGAIN,))} else "; not tested again"
    first = blame.nodes[0] if blame.nodes else blame.cells[0][0]
    remedy = look_at(first, ifaces.get(first), cluster)
    return Finding(ID, blame.subject, status, observed, wanted(limit, cluster), why_slow(blame), remedy)
