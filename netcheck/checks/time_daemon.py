"""Whether something keeps each node's clock right.

A missing daemon is a fault where others have one, and a warning where none has. Inside a container none can be seen, and the
clock is the machine's: where all clocks agree and nothing of systemd runs either, or it says that it runs in a container (LXC),
the answer is `skip`: not seen, not claimed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from netcheck.checks._machine import in_container
from netcheck.checks._wording import as_root
from netcheck.checks.clock_skew import skews
from r4090c.model import ClockFact, Cluster, Finding, KernelFact, Status

ID, GROUP, SCOPE, NEEDS = "time-daemon", "time", "cluster", ("clock",)
OPTIONAL = ("kernel",)
RULE = "a running time daemon: fail where other nodes have one, else warn; skip in containers whose clocks agree"
SOURCE = "RFC 5905; est."


def check(clocks: Mapping[str, ClockFact], kernels: Mapping[str, KernelFact | None], cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding per node: its daemon (pass), none but others have one (fail), none anywhere (warn), or skip."""
    anywhere = any(fact.daemon for fact in clocks.values())
    warn_s = cluster.expect.clock_skew_warn_s
    skew = skews(clocks)
    for name, fact in clocks.items():
        if fact.daemon:
            yield Finding(ID, name, Status.PASS, fact.daemon, "a running time daemon")
            continue
        if cluster.network.kind == "loopback":
            yield Finding(ID, name, Status.SKIP, "not applicable: all nodes are on one machine", "a running time daemon")
            continue
        small = abs(skew[name][0]) + skew[name][1] <= warn_s
        kernel = kernels.get(name)
        contained = in_container(kernel)
        if small and (contained or not (anywhere or (kernel is not None and kernel.logind))):
            why = "a container's clock is kept by its host; the clocks agree now"
            seen = "no time daemon in a container" if contained else "no time daemon seen on any node"
            yield Finding(ID, name, Status.SKIP, seen, "a running time daemon", why)
            continue
        observed = "no time daemon" + (", other nodes have one" if anywhere else " on any node")
        why = "a clock that nobody corrects drifts by about a second a day"
        remedy = as_root(cluster.node(name), "apt-get install -y chrony")
        yield Finding(ID, name, Status.FAIL if anywhere else Status.WARN, observed, "a running time daemon", why, remedy)
