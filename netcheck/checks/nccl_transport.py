"""Whether NCCL really used the network that is wished: RDMA without a silent fallback, and the data network's interface."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from netcheck.checks._wording import listed
from netcheck.expected import interface
from netcheck.measure.nccl_all import read
from netcheck.measure.sweep import Run
from netcheck.tools.nccl_log import NcclLog
from r4090c.model import Cluster, Finding, NetFact, Node, Status

ID, GROUP, SCOPE, NEEDS, OPTIONAL = "nccl-transport", "nccl", "measurement", ("nccl-all",), ("net",)
RULE = "NCCL's own log: NET/IB where network.kind is roce or infiniband, else NET/Socket over the data network's interface (fail)"
SOURCE = "NVIDIA/nccl issues 286, 1581, 1637; horovod issues 584, 700; accelerate pull request 2195"

EXPECTED = "the data network, as cluster.yaml wishes it"
RDMA = ("roce", "infiniband")


def applies(node: Node, cluster: Cluster) -> bool:
    """Where there are GPUs: gloo between CPUs has no NCCL in it."""
    return node.gpus > 0


def check(measured: Any, nets: Mapping[str, NetFact | None], cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding per node: pass, a network that is not the wished one (fail), no log (unknown). Raises ParseError."""
    whole = read(measured).whole
    again = "r4090c preflight --full --only nccl"
    for name in nets:
        if whole is None or name not in whole.nodes or whole.backend != "nccl":
            yield Finding(ID, name, Status.SKIP, "NCCL was not run here: see nccl-all", EXPECTED)
            continue
        log = whole.logs.get(name) if len(whole.logs) > 1 else whole.log  # mpirun gathers all on the first node
        if log is None or (log.network is None and not log.transports):
            yield Finding(ID, name, Status.UNKNOWN, "not read: NCCL's log tells no network", EXPECTED, "", again)
        else:
            yield _judged(cluster.node(name), whole, log, nets[name], cluster)


def _judged(node: Node, whole: Run, log: NcclLog, net: NetFact | None, cluster: Cluster) -> Finding:
    transports = ", ".join(f"{kind} {count}" for kind, count in sorted(log.transports.items())) or "no channel told"
    over = listed((*log.hcas, *log.interfaces))
    observed = f"{log.network or 'no network'} over {over or 'nothing told'}; channels: {transports}"
    again = f"r4090c launch tiny --dry-run --nodes {','.join(whole.nodes)}"
    if cluster.network.kind != "loopback" and log.unfit_interfaces:
        told = ", ".join(f"{name} ({kind})" for name, kind in log.unfit_interfaces.items())
        why = "NCCL took an interface that carries no training: it hangs, or creeps, as soon as peers cannot reach it there"
        return Finding(ID, node.name, Status.FAIL, f"{told}: {observed}", EXPECTED, why, again)
    fell_back = "NET/Socket" in log.transports or (log.network == "Socket" and "NET/IB" not in log.transports)
    if cluster.network.kind in RDMA and fell_back:
        why = "NCCL fell back to TCP without a word, and all of the RDMA network is idle: no HCA it may use, or NCCL_IB_DISABLE=1"
        remedy = "r4090c preflight --only rdma"
        return Finding(ID, node.name, Status.FAIL, observed, f"NET/IB (network.kind {cluster.network.kind})", why, remedy)
    own = interface(node, net, cluster)
    alone = len(whole.logs) > 1  # else the log is of all nodes, whose interfaces may be called differently
    if alone and own is not None and log.network == "Socket" and log.interfaces and own.name not in log.interfaces:
        why = "two ways lead to the peers, and NCCL took the other one"
        return Finding(ID, node.name, Status.FAIL, observed, f"NET/Socket over {own.name}", why, again)
    return Finding(ID, node.name, Status.PASS, observed, EXPECTED)
