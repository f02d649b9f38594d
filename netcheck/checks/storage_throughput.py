"""Whether the shared folder takes and gives data fast enough, for one node alone and for all nodes at once."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from netcheck.checks._wording import on, origin
from netcheck.measure.storage_load import ALONE, TOGETHER, StorageRun, read
from r4090c.model import Cluster, Finding, Status

ID, GROUP, SCOPE, NEEDS = "storage-throughput", "storage", "measurement", ("storage-load",)
RULE = (
    "write and read past the page cache, one node and all together: {storage_warn_mbyte_s:g} MB/s (warn), "
    "{storage_fail_mbyte_s:g} MB/s (fail) on 10 GbE, less on a slower network; no error, no byte changed (fail)"
)
SOURCE = "est."

FULL_RATE_GBIT_S = 10.0
"""What the thresholds are about; on a slower network they shrink with it."""
WHY = "code, data and checkpoints go through it, and all ranks wait while one writes"


def check(measured: Any, cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding per node: its own errors; the rate alone on the node that ran alone, that of all on the cluster.

    Raises ParseError.
    """
    known = {node.name for node in cluster.nodes}
    runs = [run for run in read(measured) if run.node in known]
    failed = {run.node: run for run in runs if run.error or run.wrong}
    for name, run in failed.items():
        yield _failed(name, run, cluster)
    slow = _slow([run for run in runs if run.node not in failed], cluster)
    yield from slow
    named = {finding.subject for finding in slow}
    for name in dict.fromkeys(run.node for run in runs):
        if name not in failed and name not in named and cluster.name not in named:
            own = [run for run in runs if run.node == name]
            told = "; ".join(f"{_told(run)} {run.stage}" for run in own)
            yield Finding(ID, name, Status.PASS, told, _expected("warn", cluster))


def _failed(name: str, run: StorageRun, cluster: Cluster) -> Finding:
    node = cluster.node(name)
    folder = shlex.quote(node.paths.shared)
    if run.lost:
        return Finding(ID, name, Status.UNKNOWN, f"not measured: {run.error}", _expected("warn", cluster), "", run.next_command)
    if run.wrong:
        observed = f"{run.wrong} bytes in blocks that were not read as they were written"
        why = "a checkpoint that was written here cannot be trusted: memory, network card or the storage itself"
        return Finding(ID, name, Status.FAIL, observed, "what was written", why, on(node, f"findmnt -T {folder}; dmesg | tail"))
    if "room" in run.error:
        return Finding(
            ID, name, Status.UNKNOWN, f"not measured: {run.error}", _expected("warn", cluster), "", on(node, f"df -h {folder}")
        )
    why = (
        "hung, read-only, full, or not this user's to write"
        if "no end within" not in run.error
        else "it hangs: so would training"
    )
    return Finding(
        ID,
        name,
        Status.FAIL,
        f"{run.stage}: {run.error}",
        "a file written and read",
        why,
        on(node, f"findmnt -T {folder}; df -h {folder}"),
    )


def _slow(runs: Sequence[StorageRun], cluster: Cluster) -> list[Finding]:
    """Return what is too slow: the node that ran alone, and all of them together. One machine's own disk is not judged."""
    if cluster.storage.kind == "local":
        return []
    found = []
    alone = [run for run in runs if run.stage == ALONE]
    together = [run for run in runs if run.stage == TOGETHER]
    for subject, own in ((alone[0].node if alone else "", alone), (cluster.name, together)):
        if not own:
            continue
        rates = {
            "write": sum(run.write_mbyte_s or 0.0 for run in own),
            "read": sum(run.read_mbyte_s or 0.0 for run in own),
        }
        way = min(rates, key=lambda name: rates[name])
        scale = _scale(cluster)
        if rates[way] >= cluster.expect.storage_warn_mbyte_s * scale:
            continue
        fails = rates[way] < cluster.expect.storage_fail_mbyte_s * scale
        who = "one node alone" if own is alone else f"{len(own)} nodes together"
        observed = f"{who}: write {rates['write']:.0f}, read {rates['read']:.0f} MB/s"
        node = cluster.node(own[0].node)
        remedy = on(node, f"nfsstat -m; findmnt -T {shlex.quote(node.paths.shared)}")
        status = Status.FAIL if fails else Status.WARN
        found.append(Finding(ID, subject, status, observed, _expected("fail" if fails else "warn", cluster), WHY, remedy))
    return found


def _scale(cluster: Cluster) -> float:
    rate = cluster.network.rate_gbit_s
    return 1.0 if rate is None else min(1.0, rate / FULL_RATE_GBIT_S)


def _expected(kind: str, cluster: Cluster) -> str:
    if cluster.storage.kind == "local":
        return "no error; the speed of one machine's own disk is not judged"
    field = f"storage_{kind}_mbyte_s"
    limit: float = getattr(cluster.expect, field) * _scale(cluster)
    return f"at least {limit:.0f} MB/s each way{origin(cluster, field)}"


def _told(run: StorageRun) -> str:
    cached = "" if run.direct else " (through the cache)"
    return f"write {run.write_mbyte_s or 0:.0f}, read {run.read_mbyte_s or 0:.0f} MB/s{cached}"
