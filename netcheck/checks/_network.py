"""What addresses and interface names mean, and which interface of a node leads to its peers. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator

from r4090c.model import Iface, NetFact

UNFIT = (
    (re.compile(r"lo\d*"), "loopback"),
    (
        re.compile(r"docker\d*|docker_gwbridge|br-.*|virbr.*|lxcbr.*|lxdbr.*|podman.*|cni.*|cbr\d*"),
        "a bridge for containers or virtual machines",
    ),
    (re.compile(r"veth.*|vnet\d+|cali.*|lxc.*|vmnet.*"), "one end of a container's or virtual machine's cable"),
    (re.compile(r"tun.*|tap.*|wg.*|tailscale.*|zt.*|ppp\d*|utun.*|nordlynx.*|proton.*|CloudflareWARP|warp.*|ipsec.*"), "a VPN"),
    (re.compile(r"vxlan.*|flannel.*|weave.*|genev.*|ovs.*|nebula.*|gre.*|ip6?tnl.*|sit\d*"), "an overlay or tunnel"),
    (re.compile(r"dummy.*|ifb\d*"), "no wire at all"),
)
"""Names of interfaces no training traffic belongs on -> what they are (NCCL issues 286, 1581, 1637; horovod 584)."""


def unfit(iface: str) -> str | None:
    """Return what kind of unfit interface this is by its name, None when it may be a real one."""
    return next((meaning for pattern, meaning in UNFIT if pattern.fullmatch(iface)), None)


def is_up(iface: Iface) -> bool:
    """Return whether the interface carries traffic; virtual ones (bonds, tunnels) often say "unknown"."""
    return iface.operstate in ("up", "unknown")


def towards(net: NetFact, peers: Iterable[str]) -> dict[str, list[str]]:
    """Return interface name -> those of `peers` (data addresses) the kernel reaches over it; unreachable ones are left out."""
    found: dict[str, list[str]] = {}
    for peer in peers:
        iface, _ = net.routes.get(peer, (None, None))
        if iface is not None:
            found.setdefault(iface, []).append(peer)
    return found


def networks(iface: Iface) -> Iterator[ipaddress.IPv4Interface | ipaddress.IPv6Interface]:
    """Yield the addresses of an interface that are more than link-local."""
    for text in iface.addresses:
        try:
            address = ipaddress.ip_interface(text)
        except ValueError:
            continue
        if not (address.ip.is_link_local or address.ip.is_loopback):
            yield address


def is_address(text: str) -> bool:
    """Return whether `text` is an IP address and not a name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
