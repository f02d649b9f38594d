"""Namespaces, links and addresses: batches for `ip` and the choice of a free subnet.

this machine          switch namespace              node namespaces
r4l-<token> 10.a.b.1 -- controller [bridge br0] node01 -- eth0 10.a.b.11
                                                node02 -- eth0 10.a.b.12
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
"""All that a node's sshd and our own tools get: nothing of the caller's environment leaks into a node."""

FIRST_HOST = 11
"""node01 has the address .11 of the subnet; the controller has .1."""

MOST_NODES = 200
"""Keeps the last address below .255."""


class LabError(RuntimeError):
    """The lab could not do what was asked."""


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold an exclusive lock on `path`; yields its descriptor. Children that inherit it hold the lock on until they end."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def allocation_lock() -> Path:
    """Return the lock file that labs take while they choose a subnet."""
    folder = Path("/run/lock")
    return (folder if folder.is_dir() else Path(tempfile.gettempdir())) / "r4090c-lab.lock"


def tool(*argv: str, stdin: str = "", keep_open: Sequence[int] = ()) -> str:
    """Run one short tool to its end and return its output; raises LabError with what it said.

    `keep_open`: descriptors it inherits. With the lab's lock among them nobody tears down while a killed `up`'s last
    `ip` is still adding links.
    """
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, env=ENVIRONMENT, pass_fds=tuple(keep_open))
    if done.returncode != 0:
        raise LabError(f"`{' '.join(argv)}` ended with {done.returncode}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def taken_networks() -> list[ipaddress.IPv4Network]:
    """Return every IPv4 network this machine has an address in or a route to, the default route left out."""
    texts = [
        f"{address['local']}/{address['prefixlen']}"
        for link in json.loads(tool("ip", "-json", "-4", "address", "show") or "[]")
        for address in link.get("addr_info", ())
    ]
    routes = json.loads(tool("ip", "-json", "-4", "route", "show", "table", "all") or "[]")
    texts += [route["dst"] for route in routes if route.get("dst", "default") != "default"]
    return [ipaddress.IPv4Network(text, strict=False) for text in texts]


def free_subnet() -> ipaddress.IPv4Network:
    """Return a /24 that overlaps nothing known to this machine; the caller holds the allocation lock.

    From 10.77.0.0/16 to 10.99.0.0/16, then 198.18.0.0/16 (RFC 2544, meant for benchmarks) where a route covers 10.0.0.0/8.
    """
    taken = taken_networks()
    for first_two in [*(f"10.{second}" for second in range(77, 100)), "198.18"]:
        for third in range(256):
            subnet = ipaddress.IPv4Network(f"{first_two}.{third}.0/24")
            if not any(subnet.overlaps(network) for network in taken):
                return subnet
    raise LabError("no free /24 in 10.77.0.0 to 10.99.255.0 nor in 198.18.0.0/16")


def existing_namespaces(prefix: str) -> list[str]:
    """Return the named network namespaces that start with `prefix`."""
    folder = Path("/run/netns")
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(prefix)) if folder.is_dir() else []


def link_exists(name: str) -> bool:
    """Return whether this machine's own network has the link."""
    return (Path("/sys/class/net") / name).exists()


def shaping(rate: str) -> list[str]:
    """Return the words of a tbf qdisc for a rate like 100mbit; raises LabError for anything else.

    The burst is 4 ms of traffic and at least 64 KiB: below one GSO packet tbf splits packets, below rate/HZ it falls
    short of the rate (tc-tbf(8)). Measured on veth: 100mbit gives 96 Mbit/s of payload, 1gbit 954.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g)bit", rate.lower())
    if not match or float(match[1]) == 0:
        raise LabError(f"rate {rate!r} is not like 100mbit or 1gbit")
    bit_s = float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]
    burst = max(65_536, int(bit_s / 8 * 0.004))
    return ["tbf", "rate", f"{int(bit_s)}bit", "burst", f"{burst}b", "latency", "50ms"]
