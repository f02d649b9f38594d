"""What the checks over the RDMA measurement have in common: what could not be measured. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from netcheck.checks._wording import as_root, listed, on
from netcheck.measure.job import NOT_STARTED
from netcheck.measure.rdma import Rdma, read
from r4090c.model import Cluster, Finding, Status

WHY_NOT = {
    "data-path": "the two met over TCP, but no packet of RDMA came through: a wrong GID, MTU, VLAN or PFC setting",
    "qp": "the two met over TCP, but not over RDMA: mostly a wrong or empty GID",
    "gid": "the two ends have GIDs of different kinds",
    "port-down": "the port went down",
}
"""Kind of perftest's error (netcheck.tools.perftest.ERRORS) that is a fault of RDMA itself -> what it means. Others say nothing
about RDMA: they are `unknown`."""


def of_cluster(measured: Any, cluster: Cluster) -> Rdma:
    """Return what was measured between nodes of `cluster`. Raises ParseError."""
    return read(measured).between([node.name for node in cluster.nodes])


def not_measured(check_id: str, rdma: Rdma, program: str, expected: str, cluster: Cluster) -> Iterator[Finding]:
    """Yield a Finding for each link and node that `program` could not measure: broken RDMA fails, the rest is not known."""
    for name, (error, command) in rdma.failed.items():
        remedy = command or "r4090c preflight --only access"
        yield Finding(check_id, name, Status.UNKNOWN, f"not measured: {error}", expected, "", remedy)
    absent = sorted({test.absent for test in rdma.tests if test.absent})
    measured = {name for cell in rdma.last(program) for name in cell}
    for name in absent:
        remedy = as_root(cluster.node(name), "apt-get install -y perftest")
        yield Finding(check_id, name, Status.SKIP, "perftest is not installed", expected, "it measures RDMA", remedy)
    for name in (node.name for node in cluster.nodes):
        own = [test for test in rdma.tests if name in (test.sender, test.receiver)]
        if name in (*measured, *absent, *rdma.failed):
            continue
        if not own:
            observed = "not applicable: no other node" if len(cluster.nodes) == 1 else "no active RDMA port on the data network"
            yield Finding(check_id, name, Status.SKIP, observed, expected, "", "r4090c preflight --only rdma-port")
        elif all(test.absent for test in own):
            observed, remedy = f"perftest is not installed on {listed(absent)}", "apt-get install -y perftest"
            yield Finding(check_id, name, Status.SKIP, observed, expected, "", as_root(cluster.node(absent[0]), remedy))
    for (one, other), test in rdma.silent(program).items():
        if {one, other} & {*rdma.failed} or (test.error.startswith(NOT_STARTED) and (other, one) in rdma.silent(program)):
            continue  # what came before it is told
        command = f"{program} -F {shlex.quote(cluster.node(other).data_address)}"
        look = on(cluster.node(one), "rdma link; ibv_devinfo -v | grep -E 'active_mtu|GID'")
        why = WHY_NOT.get(test.kind)
        subject = f"{one}->{other}"
        if why is not None:
            yield Finding(check_id, subject, Status.FAIL, test.error, expected, why, look)
        else:
            remedy = on(cluster.node(one), command)
            yield Finding(check_id, subject, Status.UNKNOWN, f"not measured: {test.error}", expected, "", remedy)
