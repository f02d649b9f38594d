"""Whether something keeps each node's clock right.

A daemon cannot be seen from inside a container, nor where the hypervisor keeps the time. So a missing daemon is a warning
only where there is evidence that it matters: other nodes have one and this node has none, or the node's skew cannot be
shown to be small. Where no node shows a daemon and all clocks agree, the answer is `skip`: not seen, and not claimed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from netcheck.checks._wording import as_root
from netcheck.checks.clock_skew import skews
from r4090c.model import ClockFact, Cluster, Finding, Status

ID, GROUP, SCOPE, NEEDS = "time-daemon", "time", "cluster", ("clock",)


def check(clocks: Mapping[str, ClockFact], cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding per node: its daemon (pass), none although others have one or the skew is not small (warn), or skip."""
    anywhere = any(fact.daemon for fact in clocks.values())
    warn_s = cluster.expect.clock_skew_warn_s
    skew = skews(clocks)
    for name, fact in clocks.items():
        if fact.daemon:
            yield Finding(ID, name, Status.PASS, fact.daemon, "a running time daemon")
            continue
        small = abs(skew[name][0]) + skew[name][1] <= warn_s
        if not anywhere and small:
            why = "a container's or virtual machine's clock may be kept by its host; the clocks agree now"
            yield Finding(ID, name, Status.SKIP, "no time daemon seen on any node", "a running time daemon", why)
            continue
        observed = "no time daemon" + (", other nodes have one" if anywhere else ", and the skew is not known to be small")
        why = "a clock that nobody corrects drifts by about a second a day"
        remedy = as_root(cluster.node(name), "apt-get install -y chrony")
        yield Finding(ID, name, Status.WARN, observed, "a running time daemon", why, remedy)
