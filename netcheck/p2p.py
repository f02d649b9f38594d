"""Whether GPUs of a node may talk to each other directly: what the two-arm test showed, and for which state of the node. Pure.

A driver's grant is no proof: patched drivers and some virtual machines grant P2P that hangs, or delivers wrong data. So the same
all_reduce is run with P2P and without, its values are checked, and only right answers that come faster prove it. The proof holds
for this driver, these cards, this kernel and this NCCL only: `fingerprint` tells them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from statistics import median

from netcheck.measure.p2p import Arms, read
from netcheck.rank_env import P2P_LEVEL
from r4090c.model import Expect, NodeFacts, P2pProof


def fingerprint(facts: NodeFacts) -> str | None:
    """Return what a proof is bound to, None where the node does not tell it: then no proof counts.

    Driver, cards and their places, kernel and its command line (IOMMU), what the driver grants, NCCL and torch, and how far P2P
    reached in the test.
    """
    gpus, kernel, system, python = facts.gpus.value, facts.kernel.value, facts.os.value, facts.python.value
    if not gpus or kernel is None or system is None or python is None:
        return None
    packages = {name: version for name, version in python.packages.items() if name == "torch" or name.startswith("nvidia-nccl-")}
    matrix = facts.gpu_p2p.value
    told = {
        "gpus": sorted([gpu.pci, gpu.uuid, gpu.driver] for gpu in gpus),
        "kernel": [system.kernel, kernel.cmdline, kernel.iommu_groups],
        "granted": sorted(matrix.cells.items()) if matrix is not None else None,
        "packages": sorted(packages.items()),
        "level": P2P_LEVEL,
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]


def judge_arms(arms: Arms, expect: Expect) -> tuple[bool | None, str]:
    """Return (proven, in words) of one node's test; None = it does not tell.

    Proven: every run with P2P has right values, NCCL's log says that P2P carried them, and at the largest size the median with
    P2P is at least p2p_faster_min times that without.
    """
    off = [run.largest.busbw_gbyte_s for run in arms.off if run.passed and run.largest is not None]
    bad = next((run for run in arms.on if not run.passed), None)
    if any(run.lost for run in (*arms.off, *arms.on)) or not off or not arms.on:
        failed = next((run for run in (*arms.off, *arms.on) if not run.passed), None)
        return None, f"not measured: {failed.error if failed is not None and failed.error else 'an arm is missing'}"
    if bad is not None:
        if bad.wrong:
            return False, f"{bad.wrong} wrong values with P2P, none without"
        if bad.ranks is None and not bad.rows:
            return None, f"not measured: {bad.error}"
        return False, f"with P2P: {bad.error or 'not a whole run'}; without it is well"
    on = [run.largest.busbw_gbyte_s for run in arms.on if run.largest is not None]
    with_p2p, without = median(on), median(off)
    figures = f"{with_p2p:.3g} GB/s with P2P, {without:.3g} without"
    if any(run.log is not None and not run.log.p2p for run in arms.on):
        return False, f"NCCL does not use it ({figures})"
    if len(arms.on) < 2 or len(off) < 2:
        return None, "not measured: an arm is missing"
    return with_p2p >= expect.p2p_faster_min * without, figures


def proofs(measured: object, facts: Mapping[str, NodeFacts], expect: Expect, date: str) -> dict[str, P2pProof]:
    """Return node -> what its test showed, to be remembered; without nodes where it told nothing or that are not known.

    Raises ParseError when `measured` is not what measure.p2p takes.
    """
    found = {}
    for arms in read(measured):
        proven, told = judge_arms(arms, expect)
        print_of = fingerprint(facts[arms.node]) if arms.node in facts else None
        if proven is not None and print_of is not None:
            found[arms.node] = P2pProof(print_of, proven, date, told)
    return found
