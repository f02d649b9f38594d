"""The data network as one node sees it: which interface leads to the peers, and which RDMA ports serve it. Pure.

The one place that decides it: the checks judge, `launch` sets the environment and `r4090c facts` shows by the same answer.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from netcheck.facts.rdma import ipv4_of, roce_v2_ipv4
from r4090c.model import Cluster, Iface, NetFact, Node, RdmaPort

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


def peers_of(node: Node, cluster: Cluster) -> dict[str, str]:
    """Return name -> data address of the other nodes of `cluster`."""
    return {peer.name: peer.data_address for peer in cluster.nodes if peer.name != node.name}


def data_iface(net: NetFact, node: Node, peers: Mapping[str, str], *, loopback: bool = False) -> tuple[str | None, str]:
    """Return (interface, reason) for traffic from `node` to its peers (node name -> data address); None = none is fit.

    The interface most peers are reached over; where no route tells, the one that holds the data address. Never lo, a container
    bridge or a VPN: training over one is worse than none stated. `loopback`: all nodes are on one machine (demo), so lo is right.
    """
    names = {address: name for name, address in peers.items() if name != node.name}
    over = towards(net, [address for name, address in peers.items() if name != node.name])
    refused = ""
    for iface, reached in sorted(over.items(), key=lambda item: -len(item[1])):
        kind = None if loopback else unfit(iface)
        if kind is None:
            return iface, f"route to {names[reached[0]]} ({reached[0]})"
        refused = refused or f"{iface} leads to {names[reached[0]]} but is {kind}"
    for found in net.ifaces:
        holds = any(address.partition("/")[0] == node.data_address for address in found.addresses)
        if holds and (loopback or unfit(found.name) is None):
            return found.name, f"holds the data address {node.data_address}"
    return None, refused or "no interface towards the peers is known"


def chosen_iface(net: NetFact, node: Node, cluster: Cluster) -> Iface | None:
    """Return the interface that the training traffic of `node` takes, None = none is fit."""
    name, _ = data_iface(net, node, peers_of(node, cluster))
    return next((iface for iface in net.ifaces if iface.name == name), None)


def cards_of(iface: Iface, net: NetFact) -> tuple[Iface, ...]:
    """Return the cards below an interface: itself, or what its bond, bridge or VLAN is made of; none below a virtual one."""
    by_name = {one.name: one for one in net.ifaces}
    found: dict[str, Iface] = {}
    waiting, seen = [iface], set()
    while waiting:
        one = waiting.pop(0)
        if one.name in seen:
            continue
        seen.add(one.name)
        if not one.virtual:
            found[one.name] = one
        else:
            waiting += [by_name[name] for name in one.lower if name in by_name]
    return tuple(found.values())


LINK_LAYERS = {"roce": "ethernet", "infiniband": "infiniband"}
"""network.kind -> link_layer of sysfs, in small letters."""


def rdma_ports(
    node: Node, ports: Iterable[RdmaPort], net: NetFact | None, iface: str | None, cluster: Cluster
) -> tuple[RdmaPort, ...]:
    """Return the RDMA ports of `node`, ACTIVE or not, that serve the data network; none unless network.kind is RDMA.

    `iface`: what `data_iface` chose. InfiniBand: all InfiniBand ports. RoCE: a port belongs by its net device, by that of any of
    its GIDs (a bond or VLAN has GIDs of the port on a device of its own), or by a GID that is an address of the data network.
    """
    layer = LINK_LAYERS.get(cluster.network.kind)
    fitting = tuple(port for port in ports if port.link_layer.lower() == layer)
    if cluster.network.kind != "roce":
        return fitting

    def serves(port: RdmaPort) -> bool:
        netdevs = {port.netdev, *(gid.netdev for gid in port.gids)}
        addresses = [address for gid in port.gids if (address := ipv4_of(gid)) is not None]
        by_name = iface is not None and iface in netdevs
        return by_name or any(in_data_network(address, node, net, iface, cluster) for address in addresses)

    return tuple(filter(serves, fitting))


def in_data_network(address: str, node: Node, net: NetFact | None, iface: str | None, cluster: Cluster) -> bool:
    """Return whether an address of `node` is one of the data network: in its stated subnet, else in one of `iface`."""
    if address == node.data_address:
        return True
    if cluster.network.subnet is not None:
        return ipaddress.ip_address(address) in ipaddress.ip_network(cluster.network.subnet, strict=False)
    subnets = [own.network for one in (net.ifaces if net else ()) if one.name == iface for own in networks(one)]
    return any(ipaddress.ip_address(address) in subnet for subnet in subnets)


def gid_index(
    node: Node, ports: Sequence[RdmaPort], net: NetFact | None, iface: str | None, cluster: Cluster
) -> tuple[int | None, tuple[RdmaPort, ...]]:
    """Return the index of the RoCE v2 IPv4 GID on the data network, and those of `ports` that have one there.

    NCCL takes one index for all ports of a node: the one most of them share. (None, ()) where no port has such a GID.
    """
    indices = {
        port.name: [gid.index for gid, address in roce_v2_ipv4(port) if in_data_network(address, node, net, iface, cluster)]
        for port in ports
    }
    votes = Counter(index for own in indices.values() for index in own)
    if not votes:
        return None, ()
    index = min(votes, key=lambda one: (-votes[one], one))
    return index, tuple(port for port in ports if index in indices[port.name])
