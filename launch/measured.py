"""What a preflight measured of the nodes of a run: the links that it uses, their RDMA ports, P2P; pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from launch.site import Measured
from netcheck import figures as figures_module
from netcheck.figures import figures_of, nodes_of
from netcheck.measure import p2p, rdma
from netcheck.measure.figure import Figure
from netcheck.measure.nccl_all import NAME as ALL
from netcheck.measure.nccl_node import NAME as INSIDE
from netcheck.measure.nccl_pairs import NAME as PAIRS
from netcheck.p2p import proofs
from netcheck.port_tests import port_tests
from netcheck.raw import Raw
from r4090c.errors import ParseError
from r4090c.model import Cluster, NodeFacts, P2pProof, PortTest


@dataclass(frozen=True, slots=True)
class Known:
    """What measurements showed of the nodes as they are: P2P (by node), RDMA ports (by node and port), bus bandwidths."""

    p2p: Mapping[str, P2pProof] = field(default_factory=dict)
    port_tests: Mapping[str, Mapping[str, PortTest]] = field(default_factory=dict)
    measured: Measured = field(default_factory=Measured)


def known_from(
    raw: Raw, cluster: Cluster, facts: Mapping[str, NodeFacts], names: Collection[str]
) -> tuple[Known, tuple[str, ...]]:
    """Return what the measurements in a bundle show of the nodes `names`, and a line for each that is not understood."""
    date, doubts = raw.started_at[:10], []
    known = Known(measured=measured_of(figures_of(raw.measurements, names), names, date))
    if p2p.NAME in raw.measurements:
        try:
            known = replace(known, p2p=proofs(raw.measurements[p2p.NAME], facts, cluster.expect, date))
        except ParseError as error:
            doubts.append(f"the measurement {p2p.NAME} is not understood: {error}")
    if rdma.NAME in raw.measurements:
        nets = {name: own.net.value for name, own in facts.items()}
        try:
            known = replace(known, port_tests=port_tests(raw.measurements[rdma.NAME], nets, cluster, date))
        except ParseError as error:
            doubts.append(f"the measurement {rdma.NAME} is not understood: {error}")
    return known, tuple(doubts)


def measured_of(figures: Iterable[Figure], names: Collection[str], when: str) -> Measured:
    """Return the bus bandwidths (GB/s) of links of the nodes `names`, the slowest of each kind; None where none was measured.

    Between nodes: that of all nodes together where there is one, since it is what training does; else of the slowest pair.
    """
    told: dict[str, list[float]] = {ALL: [], PAIRS: [], INSIDE: []}
    seen: set[str] = set()
    for figure in figures:
        if figure.measurement in told and nodes_of(figure.subject) <= {*names}:
            told[figure.measurement].append(figure.value)
            seen |= nodes_of(figure.subject) if figure.measurement == INSIDE else set()
    between = told[ALL] or told[PAIRS]
    inside = told[INSIDE] if seen == {*names} else []
    return Measured(min(between, default=None), min(inside, default=None), when)


def remembered(records: Sequence[Mapping[str, Any]], names: Collection[str]) -> Measured:
    """Return what the newest of `records` (r4090c.store, newest first) that measured any link of `names` tells."""
    for record in records:
        try:
            figures = figures_module.from_json(record.get("figures"))
        except ParseError:
            continue  # a damaged record tells nothing
        found = measured_of(figures, names, str(record.get("started_at", ""))[:10])
        if found.between_gbyte_s is not None or found.inside_gbyte_s is not None:
            return found
    return Measured()
