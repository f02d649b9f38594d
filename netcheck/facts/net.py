"""Interfaces from sysfs, addresses and routes from rtnetlink, and what the node makes of every node's name."""

from __future__ import annotations

import ipaddress
import re

from netcheck.facts.question import Question, Reply, as_int, as_list, as_mapping, as_str
from r4090c.errors import ParseError
from r4090c.model import Cluster, Iface, NetFact, Node

NAME = "net"
NET = "/sys/class/net"
ATTRIBUTES = ("operstate", "mtu", "speed", "address", "duplex", "carrier_down_count")
SPEED_UNKNOWN = 0xFFFFFFFF
"""SPEED_UNKNOWN of linux/ethtool.h; older kernels print it unsigned, newer ones -1."""


def question(node: Node, cluster: Cluster) -> Question:
    """Return what to ask `node`: about itself, the data addresses of its peers and the names of all nodes."""
    peers = [peer.data_address for peer in cluster.nodes if peer.name != node.name]
    return Question(
        files=tuple(f"{NET}/*/{attribute}" for attribute in ATTRIBUTES),
        natives={
            "addresses": {},
            "readlink": [f"{NET}/*", f"{NET}/*/lower_*"],
            "route": list(dict.fromkeys(peers)),
            "resolve": list(dict.fromkeys(peer.name for peer in cluster.nodes)),
        },
        timeout_s=6,
    )


def parse(reply: Reply) -> NetFact:
    """Return the NetFact. A peer without a route is (None, None); a name whose look-up failed or timed out has no addresses.

    Raises ParseError when addresses could not be listed. An interface that vanished half-way is left out.
    """
    addresses: dict[str, list[str]] = {}
    for pair in as_list(reply.native("addresses"), "addresses"):
        if not isinstance(pair, list) or len(pair) != 2:
            raise ParseError(f"addresses: {pair!r:.80}")
        addresses.setdefault(as_str(pair[0], "addresses"), []).append(as_str(pair[1], "addresses"))
    links = as_mapping(reply.native("readlink"), "readlink")
    ifaces = []
    for path in sorted(reply.files):
        match = re.fullmatch(rf"{NET}/([^/]+)/operstate", path)
        mtu = reply.line(f"{NET}/{match.group(1)}/mtu") if match else None
        if match and mtu is not None:
            name = match.group(1)
            losses = reply.line(f"{NET}/{name}/carrier_down_count")
            duplex = reply.line(f"{NET}/{name}/duplex")
            lower = [link.rpartition("/lower_")[2] for link in links if link.startswith(f"{NET}/{name}/lower_")]
            found = Iface(
                name=name,
                operstate=reply.text(path).strip(),
                mtu=as_int(mtu, f"mtu of {name}"),
                speed_mbit_s=_speed(reply.line(f"{NET}/{name}/speed"), name),
                mac=reply.line(f"{NET}/{name}/address") or "",
                addresses=tuple(addresses.get(name, ())),
                virtual="/virtual/" in as_str(links.get(f"{NET}/{name}", ""), "readlink"),
                duplex=duplex if duplex in ("full", "half") else None,
                link_losses=None if losses is None else as_int(losses, f"carrier_down_count of {name}"),
                lower=tuple(sorted(lower)),
            )
            ifaces.append(found)
    if not ifaces:
        raise ParseError(f"{NET} shows no interface")
    routes = {}
    for peer, value in as_mapping(reply.native("route"), "route").items():
        route = as_mapping(value, f"route to {peer}")
        iface, source = route.get("iface"), route.get("source")
        if source is not None and not _is_address(as_str(source, f"route to {peer}")):
            raise ParseError(f"route to {peer}: {source!r:.80} is no address")
        routes[peer] = (
            None if iface is None else as_str(iface, f"route to {peer}"),
            None if source is None else as_str(source, f"route to {peer}"),
        )
    names = {}
    for name, value in as_mapping(reply.native("resolve"), "resolve").items():
        names[name] = () if isinstance(value, dict) else tuple(as_str(item, name) for item in as_list(value, name))
    return NetFact(ifaces=tuple(ifaces), routes=routes, names=names)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _speed(text: str | None, name: str) -> int | None:
    """Return Mbit/s; None for what the driver does not tell (down: an error; virtual: -1)."""
    if not text:
        return None
    speed = as_int(text, f"speed of {name}")
    return None if speed <= 0 or speed == SPEED_UNKNOWN else speed
