"""What the RDMA measurement showed of each port, to be remembered: `launch` leaves out a port that failed. Pure.

The verdict is that of the check `rdma-bandwidth`: what it passes, or warns of, passed. A link that is slow while its two ends are
well is no fault of a port.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from netcheck.checks import rdma_bandwidth
from netcheck.checks._rdma import WHY_NOT, of_cluster
from netcheck.facts.question import as_mapping, as_str
from netcheck.measure.job import read_rounds
from netcheck.measure.rdma import BANDWIDTH
from r4090c.model import Cluster, NetFact, PortTest, Status


def port_tests(measured: Any, nets: Mapping[str, NetFact | None], cluster: Cluster, date: str) -> dict[str, dict[str, PortTest]]:
    """Return node -> port -> what the measurement showed; without what was not measured. `date` like "2026-03-01".

    Raises ParseError when `measured` is not what measure.rdma takes.
    """
    rdma = of_cluster(measured, cluster)
    cells = rdma.cells()
    findings = list(rdma_bandwidth.check(measured, nets, cluster))
    failed = {one.subject: one.observed for one in findings if one.status is Status.FAIL}
    found: dict[str, dict[str, PortTest]] = {}
    for name, port in _tested(measured).items():
        own = [gbit_s for cell, gbit_s in cells.items() if name in cell]
        dead = [test.error for cell, test in rdma.silent(BANDWIDTH).items() if name in cell and test.kind in WHY_NOT]
        if name in failed:
            test = PortTest(port, False, bool(own), date, failed[name])
        elif own:
            test = PortTest(port, True, True, date, f"carries {max(own):.3g} Gbit/s")
        elif dead:
            test = PortTest(port, False, False, date, f"nothing came through: {dead[0]}")
        else:
            continue
        found[name] = {port: test}
    return found


def _tested(measured: Any) -> dict[str, str]:
    """Return node -> the port that was tested."""
    ports: dict[str, str] = {}
    for record in (record for one in read_rounds(measured) for record in one):
        told = as_mapping(record.data.get("ports", {}), "ports")
        ports |= {as_str(name, "node"): as_str(port, name) for name, port in told.items()}
    return ports
