"""Whether all_reduce over all nodes at once delivers right data at the speed of the network, and if not, who makes it fail."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from netcheck.checks._collective import WHOLE_RUN, failure, judged, no_program, run_again, told, took_no_part
from netcheck.checks._wording import listed
from netcheck.measure.nccl_all import AllNodes, read
from netcheck.measure.sweep import Run
from netcheck.nccl_expected import inter_limits, slowest_rate_gbit_s
from r4090c.model import Cluster, Finding, Gpu, NetFact, PythonFact, RdmaPort, Status, Tool

ID, GROUP, SCOPE, NEEDS = "nccl-all", "nccl", "measurement", ("nccl-all",)
OPTIONAL = ("net", "rdma", "gpus", "python", "tools")
RULE = (
    "all ranks take part, no wrong value (fail); the rates of nccl-inter at 256M; gloo between CPUs, where cluster.yaml states "
    "the rate: {gloo_warn:.0%} of it (warn), {gloo_fail:.0%} (fail)"
)
SOURCE = "as nccl-inter; gloo measured: 0.98 of iperf3 on a shaped link"


def check(
    measured: Any,
    nets: Mapping[str, NetFact | None],
    rdma: Mapping[str, Sequence[RdmaPort] | None],
    gpus: Mapping[str, Sequence[Gpu] | None],
    pythons: Mapping[str, PythonFact | None],
    tools: Mapping[str, Mapping[str, Tool] | None],
    cluster: Cluster,
) -> Iterator[Finding]:
    """Yield one Finding about the whole when it passes, else one about each culprit; and one per node that took no part.

    Raises ParseError.
    """
    found = read(measured)
    whole = found.whole
    for name in nets:
        if whole is None or name not in whole.nodes:
            node = cluster.node(name)
            if len(nets) == 1:
                yield Finding(ID, name, Status.SKIP, "not applicable: no other node to measure with", WHOLE_RUN)
            elif not node.gpus and whole is not None and whole.backend == "nccl":
                yield Finding(
                    ID, name, Status.SKIP, "not applicable: it has no GPU, and NCCL runs on those of the others", WHOLE_RUN
                )
            elif node.gpus:
                yield took_no_part(ID, node, gpus[name], pythons[name], tools[name], least=1)
            else:
                yield no_program(ID, node, pythons[name])
    if whole is None:
        return
    if failure(whole) is None:
        yield from _whole(whole, nets, rdma, cluster)
    else:
        yield from _failed(whole, found, cluster)


def _whole(
    whole: Run,
    nets: Mapping[str, NetFact | None],
    rdma: Mapping[str, Sequence[RdmaPort] | None],
    cluster: Cluster,
) -> Iterator[Finding]:
    rate = cluster.network.rate_gbit_s if whole.backend == "gloo" else slowest_rate_gbit_s(whole.nodes, nets, rdma, cluster)
    observed = f"{len(whole.nodes)} nodes: {told(whole)}"
    if rate is None or cluster.network.kind == "loopback":
        for name in whole.nodes:
            yield Finding(ID, name, Status.PASS, observed, f"{WHOLE_RUN}; the network's rate is not known")
        return
    status, expected = judged(whole, inter_limits(rate, cluster.expect, backend=whole.backend), cluster)
    if status is Status.PASS:
        for name in whole.nodes:
            yield Finding(ID, name, status, observed, expected)
        return
    why = (
        "every step waits for this: the slowest node or link bounds all; where all pairs are fast, the switch or its uplinks"
        " cannot carry all of them at once"
    )
    yield Finding(ID, cluster.name, status, observed, expected, why, "r4090c preflight --full --only bandwidth,nccl")


def _failed(whole: Run, found: AllNodes, cluster: Cluster) -> Iterator[Finding]:
    problem = failure(whole)
    assert problem is not None
    status, observed, why = problem
    verdict = found.verdict
    if verdict is None or verdict.empty:
        only = "" if verdict is None else f"; no part of them fails ({len(found.tests)} tried)"
        also = "" if verdict is None else ": limits on processes, ports or memory, or a switch that cannot carry all at once"
        remedy = next(filter(None, whole.next_commands.values()), run_again(whole))
        yield Finding(ID, cluster.name, status, f"{len(whole.nodes)} nodes: {observed}{only}", WHOLE_RUN, f"{why}{also}", remedy)
        return
    named: set[str] = set()
    for name in verdict.culprits:
        named.add(name)
        yield _culprit(name, whole, found, cluster)
    for one, other in verdict.links:
        named |= {one, other}
        pair = next((run for run in found.tests if {*run.nodes} == {one, other}), whole)
        said = failure(pair) or problem
        text = f"these two fail together, and each is well with others: {said[1]}"
        yield Finding(ID, f"{one}->{other}", Status.FAIL, text, WHOLE_RUN, said[2] or why, run_again(pair))
    if verdict.undecided:
        named.update(verdict.undecided)
        text = f"{listed(verdict.undecided)} fail together, and nobody is left to tell which: {observed}"
        subject = "->".join(verdict.undecided) if len(verdict.undecided) == 2 else cluster.name
        yield Finding(ID, subject, status, text, WHOLE_RUN, why, run_again(whole))
    for name in whole.nodes:
        if name in named:
            continue
        passed = [run for run in found.tests if run.passed and name in run.nodes]
        if passed:
            largest = max(passed, key=lambda run: len(run.nodes))
            with_whom = listed(node for node in largest.nodes if node != name)
            yield Finding(ID, name, Status.PASS, f"well with {with_whom}: {told(largest)}", WHOLE_RUN)
        else:
            observed = f"not measured apart from {listed(sorted(named))}"
            yield Finding(ID, name, Status.UNKNOWN, observed, WHOLE_RUN, "", run_again(whole))


def _culprit(name: str, whole: Run, found: AllNodes, cluster: Cluster) -> Finding:
    """Return the finding about a node that fails with nodes that do not: in the words of the smallest run it was in."""
    own = [run for run in (*found.tests, whole) if name in run.nodes and failure(run) is not None]
    smallest = min(own, key=lambda run: len(run.nodes), default=whole)
    _, observed, why = failure(smallest) or (Status.FAIL, smallest.error, "")
    for run in own:
        if name in run.lost:
            return Finding(ID, name, Status.UNKNOWN, f"not measured: {run.lost[name]}", WHOLE_RUN, "", run.next_commands[name])
    said = next((run.said[name] for run in own if name in run.said), "")
    others = listed(node for node in smallest.nodes if node != name)
    text = f"fails with {others}: {observed}" + (f"; it says: {said}" if said and said not in observed else "")
    because = f"{why or 'a collective needs every rank'}; the others are well without it"
    return Finding(ID, name, Status.FAIL, text[:400], WHOLE_RUN, because, run_again(smallest))
