"""Run the checks over what was read and measured. Pure: the same bundle gives the same findings anywhere.

What a check needs and what was not read becomes `unknown` here, so that no check can forget it; a missing tool becomes `skip`
unless the inventory demands what it would have shown. A check that raises is a bug, and is not caught.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from netcheck.checks import REGISTRY, Check
from netcheck.checks._reach import not_reached, verdict_of
from netcheck.checks._wording import PACKAGES, as_root, driver_package
from netcheck.measure.job import Level
from r4090c.errors import Exit, ParseError
from r4090c.model import Cluster, Fact, Finding, Node, NodeFacts, Status

if TYPE_CHECKING:
    from netcheck.raw import Raw


def judge(cluster: Cluster, raw: Raw, facts: Mapping[str, NodeFacts], checks: Iterable[Check] = REGISTRY) -> list[Finding]:
    """Return the findings of `checks` about the nodes in `raw.reach`, in the order of the registry and of cluster.yaml."""
    nodes = [node for node in cluster.nodes if node.name in raw.reach]
    findings: list[Finding] = []
    for check in checks:
        if check.scope == "measurement":
            findings += _measured(check, cluster, nodes, raw, facts)
        else:
            findings += _judged(check, cluster, nodes, raw, facts)
    return findings


def verdict(findings: Sequence[Finding]) -> str:
    """Return "fit", "not fit" (something failed) or "could not tell" (nothing failed, but not all could be told)."""
    statuses = {finding.status for finding in findings}
    if Status.FAIL in statuses:
        return "not fit"
    if Status.UNKNOWN in statuses or not statuses & {Status.PASS, Status.WARN}:
        return "could not tell"
    return "fit"


def exit_code(findings: Sequence[Finding]) -> Exit:
    """Return the exit code of the verdict: fit 0 (warnings allowed), not fit 1, could not tell 3."""
    return {"fit": Exit.OK, "not fit": Exit.FAILED, "could not tell": Exit.UNKNOWN}[verdict(findings)]


def reached(reach: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the nodes that answered."""
    return [name for name, answer in reach.items() if verdict_of(answer) == "ok"]


def _judged(check: Check, cluster: Cluster, nodes: Sequence[Node], raw: Raw, facts: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    """Yield the findings of a check over facts: what was not read first turns into a finding, the rest goes to the check."""
    ready: dict[str, list[Any]] = {}
    for node in nodes:
        if not check.applies(node, cluster):
            continue
        not_read = _not_read(check, node, raw, facts)
        if not_read is not None:
            yield not_read
            continue
        ready[node.name] = [_value(need, node, raw, facts) for need in (*check.needs, *check.optional)]
    if check.scope == "cluster":
        columns = [{name: values[place] for name, values in ready.items()} for place in range(len(check.needs + check.optional))]
        yield from check.judge(*columns, cluster)
        return
    for node in nodes:
        if node.name in ready:
            yield from check.judge(node, *ready[node.name], cluster)


def _measured(
    check: Check, cluster: Cluster, nodes: Sequence[Node], raw: Raw, facts: Mapping[str, NodeFacts]
) -> Iterator[Finding]:
    concerned = [node for node in nodes if check.applies(node, cluster)]
    again = f"r4090c preflight{' --full' if check.level is Level.FULL else ''} --only {check.id}"
    if not concerned:
        return
    there = {name: raw.measurements[name] for name in check.needs if name in raw.measurements}
    if not there:
        yield Finding(check.id, cluster.name, Status.SKIP, "not measured", "", "", again)
        return
    alive = [node for node in concerned if verdict_of(raw.reach[node.name]) == "ok"]
    for node in concerned:
        if node not in alive:
            yield not_reached(check.id, node, raw.reach[node.name])
    if not alive:
        return
    values = [{node.name: _value(need, node, raw, facts) for node in alive} for need in check.optional]
    try:
        found = list(check.judge(there if len(check.needs) > 1 else there[check.needs[0]], *values, cluster))
    except ParseError as error:  # an old or damaged bundle
        yield Finding(check.id, cluster.name, Status.UNKNOWN, f"not understood: {error}", "", "", again)
        return
    # What was measured may hold more nodes than are judged (--nodes with --from), or fewer.
    names = {node.name for node in alive}
    told = {subject for finding in found for subject in nodes_of(finding)}
    yield from (finding for finding in found if nodes_of(finding) <= names or finding.subject == cluster.name)
    if any(finding.subject == cluster.name for finding in found):
        return  # it speaks of all
    for node in alive:
        if node.name not in told:
            yield Finding(check.id, node.name, Status.UNKNOWN, "not measured: it took no part", "", "", again)


def nodes_of(finding: Finding) -> set[str]:
    """Return the nodes a finding is about: "node02", "node02/gpu3" or "node01->node02"."""
    return {end.split("/")[0] for end in finding.subject.split("->")}


def _value(need: str, node: Node, raw: Raw, facts: Mapping[str, NodeFacts]) -> Any:
    if need == "reach":
        return raw.reach[node.name]
    if need == "measurements":
        return raw.measurements
    return _fact(need, node, facts).value


def _fact(need: str, node: Node, facts: Mapping[str, NodeFacts]) -> Fact[Any]:
    if node.name not in facts:
        return Fact(error="not asked")
    fact: Fact[Any] = getattr(facts[node.name], need)
    return fact


def _not_read(check: Check, node: Node, raw: Raw, facts: Mapping[str, NodeFacts]) -> Finding | None:
    """Return the finding for the first need of `check` that was not read on `node`, None when all were."""
    for need in check.needs:
        if need == "reach":
            continue
        if verdict_of(raw.reach[node.name]) != "ok":
            return not_reached(check.id, node, raw.reach[node.name])
        fact = _fact(need, node, facts)
        if fact.absent is not None:
            package = PACKAGES.get(fact.absent, fact.absent)
            if fact.absent == "nvidia-smi":
                package = driver_package(_distribution(node, facts))
            remedy = as_root(node, f"apt-get install -y {package}")
            return Finding(
                check.id, node.name, check.absent, f"{fact.absent} is not installed", "", "the check reads its output", remedy
            )
        if fact.error is not None:
            own = check.unread(node, need, fact.error, facts)
            return own or Finding(
                check.id, node.name, Status.UNKNOWN, f"not read: {fact.error}", "", "", f"r4090c facts --nodes {node.name}"
            )
    return None


def _distribution(node: Node, facts: Mapping[str, NodeFacts]) -> str | None:
    system = facts[node.name].os.value
    return None if system is None else system.distribution
