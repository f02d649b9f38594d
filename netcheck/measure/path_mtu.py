"""Do the largest packets get through between the nodes: pings that must not be fragmented, from every node to its peers. Pure.

The request and its echo are equally large, so a ping tells about a pair, and about its direction only where the sender itself
refuses. Where the largest packet does not come back, it is tried again beside smaller ones: what is too large is mostly dropped
without a word.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from netcheck.expected import Cell, interface, is_ipv6, link_mtu
from netcheck.facts.question import as_int, as_list, as_str
from netcheck.measure.commands import Command, CommandResult, failure, part, results
from netcheck.measure.job import NOT_INSTALLED, Job, Level, Record, Round, Setting, read_rounds
from netcheck.measure.schedule import all_pairs, ring_pairs
from r4090c.errors import ParseError

NAME, TITLE, LEVEL = "path-mtu", "largest packets between nodes", Level.DEFAULT

HEADERS, HEADERS6 = 28, 48
"""IP and ICMP in front of ping's data (RFC 791, 792; RFC 8200, 4443)."""
MTUS_TRIED = (9000, 4200, 1500, 1450, 1400, 1280)
"""Usual MTUs, looked for below the one that should pass: jumbo frames, the least for RDMA packets of 4096, Ethernet, VXLAN,
tunnels, the least of IPv6."""
SMALL_BYTES = 56
"""ping's own default: what passes when the peer is there at all."""
COUNT_AGAIN, INTERVAL_S, WAIT_S = 3, 0.2, 1
"""Pings of each size in the second try; an answer to one is enough: a lost packet is not a question of its size. 0.2 s is what an
ordinary user may ask for (ping(8))."""
TIMEOUT_S = 6.0
AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Path:
    """What one node found out about one peer. `passed`: the largest MTU whose packets came back, None = not even a small one.

    `said`: ping's words about the MTU that should pass, "" when it passed.
    """

    sender: str
    receiver: str
    mtu: int
    passed: int | None
    said: str


@dataclass(frozen=True, slots=True)
class PathMtus:
    """All that was measured. `absent`: nodes without ping. `failed`: node -> why it told nothing, with the command to look."""

    paths: tuple[Path, ...]
    absent: tuple[str, ...]
    failed: Mapping[str, tuple[str, str]]

    def between(self, names: Collection[str]) -> PathMtus:
        """Return only what concerns `names`: a bundle may be judged for fewer nodes, or be forged."""
        paths = tuple(path for path in self.paths if path.sender in names and path.receiver in names)
        failed = {name: why for name, why in self.failed.items() if name in names}
        return PathMtus(paths, tuple(name for name in self.absent if name in names), failed)


def plan(setting: Setting, done: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[Round, ...]:
    """Return one round: every node pings its neighbours in the ring, or all others at Level.FULL; then one for what failed."""
    names = [node.name for node in setting.nodes]
    if len(names) < 2 or len(done) > 1:
        return ()
    if done:
        failed = [path for path in read({"rounds": list(done)}).paths if path.said]
        wanted = [((path.sender, path.receiver), mtu) for path in failed for mtu in sizes(path.mtu)]
        return (_round(setting, wanted, COUNT_AGAIN),) if wanted else ()
    pairs = all_pairs(names) if setting.level >= Level.FULL else ring_pairs(names)
    ifaces = {node.name: interface(node, setting.facts[node.name].net.value, setting.cluster) for node in setting.nodes}
    cells = [cell for one in pairs for a, b in one for cell in ((a, b), (b, a))]
    return (_round(setting, [(cell, link_mtu(cell, ifaces, setting.cluster)) for cell in cells], 1),)


def _round(setting: Setting, wanted: Sequence[tuple[Cell, int]], count: int) -> Round:
    jobs = []
    for name in dict.fromkeys(sender for (sender, _), _ in wanted):
        own = [(peer, mtu) for (sender, peer), mtu in wanted if sender == name]
        commands = [Command(_argv(setting.cluster.node(peer).data_address, mtu, count), TIMEOUT_S) for peer, mtu in own]
        jobs.append(Job(name, (part(name, commands, AT_ONCE),), {"pings": [list(one) for one in own]}))
    return tuple(jobs)


def _argv(address: str, mtu: int, count: int) -> tuple[str, ...]:
    size = mtu - (HEADERS6 if is_ipv6(address) else HEADERS) if mtu else SMALL_BYTES
    return ("ping", "-n", "-M", "do", "-c", str(count), "-i", f"{INTERVAL_S:g}", "-W", str(WAIT_S), "-s", str(size), address)


def sizes(mtu: int) -> tuple[int, ...]:
    """Return the MTUs to try, the one that should pass first; 0 stands for a small packet."""
    return (mtu, *(smaller for smaller in MTUS_TRIED if smaller < mtu), 0)


def read(measured: object) -> PathMtus:
    """Return what was found out. Raises ParseError."""
    pings: dict[Cell, dict[int, CommandResult]] = {}
    absent: dict[str, None] = {}
    failed: dict[str, tuple[str, str]] = {}
    for record in (record for one in read_rounds(measured) for record in one):
        for node, done in record.parts.items():
            tried = results(done)
            if not tried:
                failed[node] = failure(done)
            elif tried[0].error == NOT_INSTALLED:
                absent[node] = None
            else:
                for peer, mtu, ping in _pings(record, tried):
                    sizes_seen = pings.setdefault((node, peer), {})
                    if mtu not in sizes_seen or not came_back(sizes_seen[mtu]):
                        sizes_seen[mtu] = ping
    paths = tuple(_path(cell, seen) for cell, seen in pings.items())
    return PathMtus(paths, tuple(absent), failed)


def _pings(record: Record, tried: Sequence[CommandResult]) -> list[tuple[str, int, CommandResult]]:
    asked = [as_list(one, "ping") for one in as_list(record.data.get("pings"), "pings")]
    if len(asked) != len(tried) or any(len(one) != 2 for one in asked):
        raise ParseError(f"{NAME}: {len(tried)} answers to {len(asked)} pings")
    return [(as_str(peer, "peer"), as_int(mtu, "mtu"), ping) for (peer, mtu), ping in zip(asked, tried, strict=True)]


def _path(cell: Cell, seen: Mapping[int, CommandResult]) -> Path:
    wanted = max(seen)
    passed = max((mtu for mtu, ping in seen.items() if came_back(ping)), default=None)
    return Path(*cell, wanted, passed, "" if came_back(seen[wanted]) else said(seen[wanted]))


def came_back(ping: CommandResult) -> bool:
    """Return whether ping ended well and tells of an answer: one that ends well without a word has shown nothing."""
    return ping.rc == 0 and re.search(r"[1-9][0-9]* (?:packets )?received", ping.stdout) is not None


def said(ping: CommandResult) -> str:
    """Return ping's words about packets that did not come back."""
    lines = [line.strip() for line in (ping.stdout + "\n" + ping.stderr).splitlines()]
    telling = (line for line in lines if any(words in line for words in ("too long", "ping:", "Frag needed", "nreachable")))
    return ping.error or next(telling, "") or next((line for line in lines if "packet loss" in line), "no answer")
