"""Whether all_reduce between one GPU each of two nodes delivers right data at the speed of the network, for every pair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from netcheck.attribution import explain
from netcheck.checks._collective import WHOLE_RUN, failure, judged, run_again, told, took_no_part
from netcheck.checks._links import Blame, blames, span
from netcheck.checks._wording import listed, origin
from netcheck.expected import Cell
from netcheck.measure.nccl_pairs import read
from netcheck.measure.sweep import Run
from netcheck.nccl_expected import BusLimits, inter_limits, slowest_rate_gbit_s
from r4090c.model import Cluster, Finding, Gpu, NetFact, Node, PythonFact, RdmaPort, Status, Tool

ID, GROUP, SCOPE, NEEDS = "nccl-inter", "nccl", "measurement", ("nccl-pairs",)
OPTIONAL = ("net", "rdma", "gpus", "python", "tools")
RULE = (
    "all_reduce of 128M: no wrong value (fail); over 100 Gbit/s {nccl_100g_warn_gbyte_s:g} GB/s (warn), "
    "{nccl_100g_fail_gbyte_s:g} (fail), over 25 {nccl_25g_warn_gbyte_s:g} and {nccl_25g_fail_gbyte_s:g}, over 10 "
    "{nccl_10g_warn_gbyte_s:g} and {nccl_10g_fail_gbyte_s:g}, else {nccl_other_warn:.0%} and {nccl_other_fail:.0%} of the rate"
)
SOURCE = "without GPUDirect RDMA, which a GeForce never has; est."

WHY = (
    "all gradients cross this link: if TCP and RDMA are as fast as they should be, it is NCCL's choice of network or its settings"
)


def applies(node: Node, cluster: Cluster) -> bool:
    """Where there are GPUs; gloo between CPUs is measured over all nodes (nccl-all)."""
    return node.gpus > 0


def check(
    measured: Any,
    nets: Mapping[str, NetFact | None],
    rdma: Mapping[str, Sequence[RdmaPort] | None],
    gpus: Mapping[str, Sequence[Gpu] | None],
    pythons: Mapping[str, PythonFact | None],
    tools: Mapping[str, Mapping[str, Tool] | None],
    cluster: Cluster,
) -> Iterator[Finding]:
    """Yield a Finding for each pair that fails, each slow node or link, and a pass for every other node. Raises ParseError."""
    runs = [run for run in read(measured) if {*run.nodes} <= {*nets}]
    in_runs = {node for run in runs for node in run.nodes}
    for name in nets:
        if len(nets) == 1:
            yield Finding(ID, name, Status.SKIP, "not applicable: no other node to measure with", WHOLE_RUN)
        elif name not in in_runs:
            yield took_no_part(ID, cluster.node(name), gpus[name], pythons[name], tools[name], least=1)
    named: set[str] = set()
    limits: dict[Cell, BusLimits] = {}
    for run in runs:
        failed = failure(run)
        if failed is not None:
            status, observed, why = failed
            remedy = next(filter(None, run.next_commands.values()), run_again(run))
            named.update(run.nodes)
            yield Finding(ID, "->".join(run.nodes), status, observed, WHOLE_RUN, why, remedy)
            continue
        rate = slowest_rate_gbit_s(run.nodes, nets, rdma, cluster)
        if rate is not None:
            one, other = run.nodes
            limits[one, other] = limits[other, one] = inter_limits(rate, cluster.expect, backend=run.backend)
    slow = list(_slow(runs, limits, cluster))
    yield from slow
    named.update(name for finding in slow for name in finding.subject.split("->"))
    guilty = {finding.subject for finding in slow}
    for name in nets:
        own = [run for run in runs if name in run.nodes and failure(run) is None and not ({*run.nodes} - {name}) & guilty]
        if own and not {name, cluster.name} & named:
            observed = told(min(own, key=_busbw)) + (f" at worst, with {len(own)} nodes" if len(own) > 1 else "")
            yield Finding(ID, name, Status.PASS, observed, _expected(limits, name, cluster))


def _busbw(run: Run) -> float:
    return run.largest.busbw_gbyte_s if run.largest is not None else 0.0


def _expected(limits: Mapping[Cell, BusLimits], name: str, cluster: Cluster) -> str:
    own = next((limit for cell, limit in limits.items() if name in cell), None)
    if own is None:
        return f"{WHOLE_RUN}; the network's rate is not known"
    return f"at least {own.warn_gbyte_s:.3g} GB/s ({own.how}){origin(cluster, own.fields[0])}"


def _slow(runs: Sequence[Run], limits: Mapping[Cell, BusLimits], cluster: Cluster) -> Iterator[Finding]:
    by_cell: dict[Cell, Run] = {}
    for run in runs:
        one, other = run.nodes
        if (one, other) in limits:
            by_cell[one, other] = by_cell[other, one] = run
    shares = {cell: _busbw(run) / limits[cell].warn_gbyte_s for cell, run in by_cell.items()}
    pairs = {run.nodes for run in by_cell.values()}
    for blame in blames(explain(shares, 1.0), cluster):
        if len(pairs) == 1:  # of two nodes there is one link, whatever it has in common
            (ends,) = pairs
            blame = Blame("->".join(ends), (ends[0], ends[1]), blame.cells)
        if len(blame.nodes) == 2 and blame.nodes not in pairs:
            continue  # the other direction of a pair is the same run
        own = sorted({by_cell[cell].nodes: by_cell[cell] for cell in blame.cells}.values(), key=_busbw)
        rates, middle = [_busbw(run) for run in own], own[len(own) // 2]
        status, expected = judged(middle, limits[blame.cells[0]], cluster)
        if len(blame.nodes) == 2:
            observed = told(middle)
        elif blame.nodes:
            others = listed(name for run in own for name in run.nodes if name != blame.nodes[0])
            observed = f"{span(rates, 'GB/s')} with {others}"
        else:
            observed = f"all pairs are slow: {span(rates, 'GB/s')}"
        names = ",".join(dict.fromkeys(name for run in own for name in run.nodes))
        remedy = f"r4090c preflight --full --only bandwidth --nodes {names}"
        yield Finding(ID, blame.subject, max(status, Status.WARN, key=_weight), observed, expected, WHY, remedy)


def _weight(status: Status) -> int:
    return [Status.PASS, Status.WARN, Status.FAIL].index(status)
