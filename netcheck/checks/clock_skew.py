"""Whether the nodes' clocks agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from netcheck.checks._wording import as_root, origin
from r4090c.model import ClockFact, Cluster, Finding, Status

ID, GROUP, SCOPE, NEEDS = "clock-skew", "time", "cluster", ("clock",)
RULE = "clocks within {clock_skew_warn_s:g} s of their median (warn), within {clock_skew_fail_s:g} s (fail)"
SOURCE = "RFC 5905, section 8; est."


def check(clocks: Mapping[str, ClockFact], cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding per node, against the median clock; and one for the controller when it is the one that is off."""
    if not clocks:
        return
    expect = cluster.expect
    warn_s, fail_s = expect.clock_skew_warn_s, expect.clock_skew_fail_s
    reference_s, reference_bound_s = reference(clocks)
    skew = skews(clocks)
    limits = (
        f"within {warn_s:g} s{origin(cluster, 'clock_skew_warn_s')}; {fail_s:g} s fails{origin(cluster, 'clock_skew_fail_s')}"
    )
    why = "time stamps of logs, leases and files of two nodes can no longer be ordered"
    for name, fact in clocks.items():
        skew_s, bound_s = skew[name]
        status = judge_skew(skew_s, bound_s, warn_s, fail_s)
        if status is Status.PASS:
            yield Finding(ID, name, status, _told(skew_s, bound_s), limits)
            continue
        node = cluster.node(name)
        if status is Status.UNKNOWN:
            yield Finding(
                ID,
                name,
                status,
                f"{_told(skew_s, bound_s)}: known too coarsely",
                limits,
                "the answer took so long to come that the skew cannot be bounded",
                f"r4090c preflight --nodes {name}",
            )
            continue
        step = "timedatectl set-ntp true"
        if fact.daemon and "chrony" in fact.daemon:
            step = "chronyc makestep"
        elif fact.daemon:
            step = f"systemctl restart {fact.daemon}"
        yield Finding(ID, name, status, _told(skew_s, bound_s), limits, why, as_root(node, step))
    controller_s = -reference_s
    if abs(controller_s) - reference_bound_s > warn_s:
        observed = f"against the nodes, which agree, this machine is {_told(controller_s, reference_bound_s)}"
        remedy = "sudo timedatectl set-ntp true"
        yield Finding(ID, "controller", Status.WARN, observed, limits, "ages and durations shown here will be wrong", remedy)


def reference(clocks: Mapping[str, ClockFact]) -> tuple[float, float]:
    """Return (offset, error bound) of the clock the nodes are compared with, seconds against the controller's.

    Offsets are measured against the controller, yet it is the nodes that must agree with each other: it is their median. With
    an even number of nodes the controller is one more voter, so that two nodes that differ can be told apart; one node alone
    is compared with the controller.
    """
    voters = [(fact.offset_s, fact.error_bound_s) for fact in clocks.values()]
    if len(voters) < 2:
        return 0.0, 0.0
    if len(voters) % 2 == 0:
        voters.append((0.0, 0.0))
    return sorted(voters)[len(voters) // 2]


def skews(clocks: Mapping[str, ClockFact]) -> dict[str, tuple[float, float]]:
    """Return node -> (seconds ahead of the reference clock, error bound of that)."""
    middle_s, middle_bound_s = reference(clocks)
    return {
        name: (fact.offset_s - middle_s, fact.error_bound_s + (0.0 if fact.offset_s == middle_s else middle_bound_s))
        for name, fact in clocks.items()
    }


def judge_skew(skew_s: float, bound_s: float, warn_s: float, fail_s: float) -> Status:
    """Return the status of a skew known to ± bound_s; a bound wider than the threshold may leave it unknown."""
    least, most = max(0.0, abs(skew_s) - bound_s), abs(skew_s) + bound_s
    if least > fail_s:
        return Status.FAIL
    if least > warn_s:
        return Status.WARN
    if most <= warn_s:
        return Status.PASS
    if bound_s > warn_s:
        return Status.UNKNOWN
    return Status.WARN if abs(skew_s) > warn_s else Status.PASS


def _told(skew_s: float, bound_s: float) -> str:
    side = "ahead" if skew_s > 0 else "behind"
    return f"{abs(skew_s):.3f} s {side} (± {bound_s:.3f} s)"
