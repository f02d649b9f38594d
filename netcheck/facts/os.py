"""Operating system: uname(2), os-release(5), boot id, uptime, and the version of its own python3."""

from __future__ import annotations

import shlex

from netcheck.facts.question import Question, Reply, as_float, as_mapping, as_str
from r4090c.errors import ParseError
from r4090c.model import Cluster, Node, OsFact

NAME = "os"
OS_RELEASE = ("/etc/os-release", "/usr/lib/os-release")
BOOT_ID = "/proc/sys/kernel/random/boot_id"
UPTIME = "/proc/uptime"


def question(node: Node, cluster: Cluster) -> Question:
    """Return what to ask `node`."""
    return Question(files=(*OS_RELEASE, BOOT_ID, UPTIME), natives={"uname": {}, "interpreter": {}})


def parse(reply: Reply) -> OsFact:
    """Return the OsFact. Raises ParseError without uname or os-release; boot id and uptime may be missing (containers)."""
    uname = as_mapping(reply.native("uname"), "uname")
    release = next((reply.files[path] for path in OS_RELEASE if path in reply.files), None)
    if release is None:
        release = reply.text(OS_RELEASE[0])
    uptime = (reply.line(UPTIME) or "").split()
    return OsFact(
        hostname=as_str(uname.get("nodename"), "nodename"),
        kernel=as_str(uname.get("release"), "release"),
        machine=as_str(uname.get("machine"), "machine"),
        distribution=distribution(release),
        boot_id=reply.line(BOOT_ID) or "",
        uptime_s=as_float(uptime[0], UPTIME) if uptime else None,
        python3=as_str(reply.natives["interpreter"], "interpreter") if "interpreter" in reply.natives else None,
    )


def distribution(os_release: str) -> str:
    """Return "debian 12" from the text of os-release, "arch" where there is no version. Raises ParseError without an ID."""
    fields: dict[str, str] = {}
    for line in os_release.splitlines():
        key, equals, value = line.strip().partition("=")
        if not equals or key.startswith("#"):
            continue
        try:
            words = shlex.split(value)
        except ValueError as error:
            raise ParseError(f"os-release: {line!r}: {error}") from error
        fields[key] = " ".join(words)
    if not fields.get("ID"):
        raise ParseError("os-release has no ID")
    return f"{fields['ID']} {fields.get('VERSION_ID', '')}".strip()
