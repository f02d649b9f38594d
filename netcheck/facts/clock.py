"""The node's clock against the controller's, and the time daemon that keeps it.

Offset and bound are NTP's (RFC 5905, section 8): with the request sent at t1 and the answer got at t4 by the controller's
clock, got at t2 and sent at t3 by the node's, offset = ((t2 - t1) + (t3 - t4)) / 2, and it is off by at most half of
(t4 - t1) - (t3 - t2). t2 is when the node started the probe's process, so slow start-up files there do not count.
"""

from __future__ import annotations

from dataclasses import astuple

from netcheck.facts.question import Question, Reply, as_list, as_mapping, as_str
from r4090c.errors import ParseError
from r4090c.model import ClockFact, Cluster, Node

NAME = "clock"
DAEMONS = {
    "chronyd": "chronyd",
    "ntpd": "ntpd",  # NTP, ntpsec and OpenNTPD all call it so
    "openntpd": "openntpd",
    "systemd-timesyn": "systemd-timesyncd",  # the kernel keeps 15 characters
    "ptp4l": "ptp4l",
    "phc2sys": "phc2sys",
}
"""Name in /proc/<pid>/comm -> daemon. phc2sys or ptp4l beside another one: the other one is named first."""
UNITS = {
    "chrony": "chronyd",
    "chronyd": "chronyd",
    "ntp": "ntpd",
    "ntpd": "ntpd",
    "ntpsec": "ntpd",
    "openntpd": "openntpd",
    "systemd-timesyncd": "systemd-timesyncd",
}
"""systemd unit -> daemon. A running unit has a control group: the evidence left when /proc hides other people's processes."""
LATEST_S = 1e11
"""In the year 5138; a clock beyond it is a damaged answer."""
CGROUPS = ("/sys/fs/cgroup/system.slice", "/sys/fs/cgroup/systemd/system.slice")


def question(node: Node, cluster: Cluster) -> Question:
    """Return what to ask `node`; the times come with every answer."""
    groups = [f"{root}/{unit}.service" for root in CGROUPS for unit in UNITS]
    return Question(natives={"processes": list(DAEMONS), "access": groups})


def parse(reply: Reply) -> ClockFact:
    """Return the ClockFact. Raises ParseError without the four times, or when they cannot be of one round trip."""
    stamps = reply.stamps
    if stamps is None:
        raise ParseError("the times of the round trip are missing")
    if not all(0 <= time_s < LATEST_S for time_s in astuple(stamps)):
        raise ParseError(f"impossible times: {stamps}")
    round_trip_s = stamps.received_at_s - stamps.sent_at_s
    node_s = stamps.node_sent_s - stamps.node_received_s
    if round_trip_s < 0 or node_s < 0:
        raise ParseError(f"a clock was set during the round trip: {round_trip_s:.3f} s here, {node_s:.3f} s on the node")
    return ClockFact(
        offset_s=((stamps.node_received_s - stamps.sent_at_s) + (stamps.node_sent_s - stamps.received_at_s)) / 2,
        error_bound_s=max(0.0, round_trip_s - node_s) / 2,
        daemon=_daemon(reply),
    )


def _daemon(reply: Reply) -> str | None:
    found = as_list(as_mapping(reply.native("processes"), "processes").get("found"), "processes")
    running = {as_str(name, "processes") for name in found}
    for comm, daemon in DAEMONS.items():
        if comm in running:
            return daemon
    groups = as_mapping(reply.native("access"), "access")
    for path, access in groups.items():
        unit = path.rsplit("/", 1)[-1].removesuffix(".service")
        if access is not None and unit in UNITS:
            return UNITS[unit]
    return None
