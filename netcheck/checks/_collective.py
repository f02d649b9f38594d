"""How findings speak about a run of a collective: what its failure is worth, and why a node took no part. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from netcheck.checks._wording import as_root, listed, on, origin
from netcheck.measure.sweep import PROGRAMS, TORCH, Run
from netcheck.nccl_expected import BusLimits
from r4090c.model import Cluster, Finding, Gpu, Node, PythonFact, Status, Tool

WHOLE_RUN = "all ranks take part and every value is right"
MIB = 1 << 20


def failure(run: Run) -> tuple[Status, str, str] | None:
    """Return (status, observed, why) of a run that is not whole, None for one that is.

    Without a rank that was heard of, and without a row, nothing was measured: that is `unknown`, whatever the reason. So is
    nccl-tests that prints its head and no more: it does not tell whether it hangs or only starts slowly.
    """
    if run.lost:
        node, error = next(iter(run.lost.items()))
        return Status.UNKNOWN, f"not measured: {node}: {error}", ""
    if run.absent:
        program = "its Python" if run.program == TORCH else PROGRAMS[run.op]
        return Status.UNKNOWN, f"not measured: {program} is not there on {listed(run.absent)}", ""
    if run.each_alone:
        observed = f"{run.asked} ranks were asked for, every process was a world of its own"
        return Status.FAIL, observed, f"{PROGRAMS[run.op]} was built without MPI: its figures mean nothing"
    if run.wrong:
        where = f" on {listed(run.wrong_nodes)}" if run.wrong_nodes else ""
        why = "sums that are wrong train a wrong model without any other sign: P2P that only pretends to work, memory, a bad link"
        return Status.FAIL, f"{run.wrong} wrong values{where} in {run.op} of {_sizes(run)}", why
    if run.error:
        cause = run.log.cause.text if run.log is not None and run.log.cause is not None else ""
        told = f"{run.error}{f' (NCCL: {cause})' if cause and cause not in run.error else ''}"[:300]
        reached = run.program == TORCH and (run.ranks is not None or run.missing)
        if reached or run.rows or cause or (run.ranks is not None and "no end within" not in run.error):
            return Status.FAIL, told, "training runs the same collective, and would fail or hang in it"
        return Status.UNKNOWN, f"not measured: {told}", ""
    if run.ranks != run.asked:
        told = "none" if run.ranks is None else str(run.ranks)
        return (
            Status.FAIL,
            f"{told} of {run.asked} ranks took part",
            "the rest was left out without a word: the figures are of another world",
        )
    if run.largest is None:
        return Status.UNKNOWN, "not measured: no row", ""
    return None


def _sizes(run: Run) -> str:
    bad = [row.bytes for row in run.rows if row.wrong]
    return f"{size_of(min(bad))} and more" if bad else "some size"


def size_of(size: int) -> str:
    """Return a message size as nccl-tests' options have it: 256M."""
    return f"{size // MIB}M" if size >= MIB else f"{size}"


def told(run: Run) -> str:
    """Return what a whole run reached: "14.6 GB/s at 256M, 8 ranks (nccl-tests)"."""
    row = run.largest
    if row is None:
        return "nothing"
    by = f"torch, {run.backend}" if run.program == TORCH else "nccl-tests"
    return f"{row.busbw_gbyte_s:.3g} GB/s at {size_of(row.bytes)}, {run.asked} ranks ({by})"


def judged(run: Run, limits: BusLimits, cluster: Cluster) -> tuple[Status, str]:
    """Return (status, expected) of a whole run by its largest size; the printed average of all sizes says nothing."""
    row = run.largest
    value = row.busbw_gbyte_s if row is not None else 0.0
    fails = value < limits.fail_gbyte_s
    limit, field = (limits.fail_gbyte_s, limits.fields[1]) if fails else (limits.warn_gbyte_s, limits.fields[0])
    expected = f"at least {limit:.3g} GB/s ({limits.how}){origin(cluster, field)}"
    return Status.FAIL if fails else Status.WARN if value < limits.warn_gbyte_s else Status.PASS, expected


def took_no_part(
    check_id: str,
    node: Node,
    gpus: Sequence[Gpu] | None,
    python: PythonFact | None,
    tools: Mapping[str, Tool] | None,
    *,
    least: int,
) -> Finding:
    """Return the finding about a node that has GPUs by cluster.yaml and was in no run: too few answer, or it has no program."""
    working = None if gpus is None else sum(gpu.index >= 0 for gpu in gpus)
    if working is None or working < least:
        observed = "not measured: the driver does not answer" if working is None else f"not measured: {working} GPUs answer"
        return Finding(check_id, node.name, Status.UNKNOWN, observed, WHOLE_RUN, "", f"r4090c facts --nodes {node.name}")
    return no_program(check_id, node, python)


def no_program(check_id: str, node: Node, python: PythonFact | None) -> Finding:
    """Return the finding about a node without a program that runs collectives: no torch in its Python, no nccl-tests."""
    if python is None:
        observed, remedy = f"not measured: {node.paths.python} does not answer", f"r4090c facts --nodes {node.name}"
        return Finding(check_id, node.name, Status.UNKNOWN, observed, WHOLE_RUN, "", remedy)
    if "torch" in python.packages:
        observed = "not measured: no other node to measure with, or the driver shows no GPU"
        return Finding(check_id, node.name, Status.SKIP, observed, WHOLE_RUN)
    remedy = on(node, f"{shlex.quote(node.paths.python)} -m pip install torch")
    return Finding(
        check_id, node.name, Status.SKIP, f"torch is not in {node.paths.python}", WHOLE_RUN, "it runs the collective", remedy
    )


def look_into(node: Node) -> str:
    """Return the command that shows what the kernel has to say about the GPUs and links of a node."""
    return as_root(node, "dmesg | grep -iE 'xid|aer|nvrm' | tail -n 20")


def run_again(run: Run) -> str:
    """Return the command that runs the collective again on the same nodes, with all there is to see."""
    return f"r4090c bench collectives --nodes {','.join(run.nodes)}"
