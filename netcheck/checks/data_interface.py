"""Whether traffic between nodes leaves over the right interface, in the right network, at the right MTU and speed."""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Iterator, Mapping

from netcheck.checks._majority import Majority, majority, others
from netcheck.checks._wording import as_root, listed, on
from netcheck.data_network import chosen_iface, is_address, is_up, peers_of, towards, unfit
from r4090c.model import Cluster, Finding, Iface, NetFact, Node, Status

ID, GROUP, SCOPE, NEEDS = "data-interface", "nic", "cluster", ("net",)
RULE = (
    "every peer reached over one real interface that is up (no lo, container bridge, VPN or overlay), from an address of the"
    " stated subnet, data addresses on an interface of their node, at the stated rate, with one MTU on all nodes (fail)"
)
SOURCE = "NCCL issues 286, 1581, 1637; LlamaFactory issue 5014; horovod issue 584"

OVERLAY_MTU = 1450
"""1500 less the VXLAN header: what Docker Swarm, flannel and most cloud overlays give (LlamaFactory issue 5014)."""


def check(nets: Mapping[str, NetFact], cluster: Cluster) -> Iterator[Finding]:
    """Yield one Finding per fault of a node's data interface (subject node), else one pass. Skipped on a loopback network."""
    alone = (
        "all nodes are on one machine"
        if cluster.network.kind == "loopback"
        else "one node has no peers"
        if len(cluster.nodes) == 1
        else ""
    )
    if alone:
        for name in nets:
            yield Finding(ID, name, Status.SKIP, f"not applicable: {alone}", "the data interface")
        return
    chosen = {name: chosen_iface(net, cluster.node(name), cluster) for name, net in nets.items()}
    mtus = {name: iface.mtu for name, iface in chosen.items() if iface is not None}
    agreed = majority(mtus)
    for name, net in nets.items():
        node, iface = cluster.node(name), chosen[name]
        faults = list(_route_faults(node, net, cluster))
        if iface is not None:
            faults += _iface_faults(node, iface, mtus, agreed, cluster)
        elif not faults:
            remedy = f"r4090c facts --nodes {name}"
            faults = [
                Finding(ID, name, Status.UNKNOWN, "not read: no route to a peer was looked up", "the data interface", "", remedy)
            ]
        if faults:
            yield from faults
        elif iface is not None:
            rate = f", {iface.speed_mbit_s / 1000:g} Gbit/s" if iface.speed_mbit_s else ""
            yield Finding(ID, name, Status.PASS, f"{iface.name}: MTU {iface.mtu}{rate}", "a real interface towards the peers")


def _route_faults(node: Node, net: NetFact, cluster: Cluster) -> Iterator[Finding]:
    peers = {address: name for name, address in peers_of(node, cluster).items()}
    over = towards(net, peers)
    lost = [name for address, name in peers.items() if address in net.routes and net.routes[address][0] is None]
    unasked = [name for address, name in peers.items() if address not in net.routes]
    if lost:
        address = next(address for address, name in peers.items() if name == lost[0])
        why = "NCCL and gloo connect to the peers' data addresses"
        expected = "a route to every peer's data address"
        yield Finding(
            ID,
            node.name,
            Status.FAIL,
            f"no route to {listed(lost)}",
            expected,
            why,
            on(node, f"ip route get {shlex.quote(address)}"),
        )
    if unasked and not lost:
        remedy = f"r4090c facts --nodes {node.name}"
        yield Finding(
            ID, node.name, Status.UNKNOWN, f"not read: the route to {listed(unasked)}", "a route to every peer", "", remedy
        )
    for iface, reached in over.items():
        kind = unfit(iface)
        if kind is not None:
            why = "training traffic over it is slow, or ends in the machine itself"
            observed = f"{listed(peers[address] for address in reached)} reached over {iface}: {kind}"
            remedy = on(node, f"ip route get {shlex.quote(reached[0])}; ip -br address")
            yield Finding(ID, node.name, Status.FAIL, observed, "a real interface on the data network", why, remedy)
    if len(over) > 1 and not any(unfit(iface) for iface in over):
        observed = "; ".join(f"{listed(peers[address] for address in reached)} over {iface}" for iface, reached in over.items())
        why = "NCCL is told one interface: traffic to some peers would take a way that was not meant"
        yield Finding(ID, node.name, Status.WARN, observed, "all peers over one interface", why, on(node, "ip route"))
    sources = {source for address in peers if (source := net.routes.get(address, (None, None))[1]) is not None}
    subnet = ipaddress.ip_network(cluster.network.subnet, strict=False) if cluster.network.subnet else None
    stray = sorted(source for source in sources if subnet is not None and ipaddress.ip_address(source) not in subnet)
    if stray:
        why = "the peers are reached by another network than the one stated: mostly the slow management network"
        observed, expected = f"peers are reached from {listed(stray)}", f"an address in {subnet} (cluster.yaml)"
        yield Finding(ID, node.name, Status.FAIL, observed, expected, why, on(node, "ip -br address; ip route"))
    elif sources and is_address(node.data_address) and node.data_address not in sources:
        expected, remedy = f"{node.data_address} (cluster.yaml)", on(node, "ip -br address; ip route")
        if node.data_address in {address.partition("/")[0] for one in net.ifaces for address in one.addresses}:
            why = "peers answer to the address the packets come from, not to the one in cluster.yaml"
            yield Finding(ID, node.name, Status.WARN, f"peers are reached from {listed(sorted(sources))}", expected, why, remedy)
        else:
            why = "nobody reaches the node there: ranks that are to meet on it wait until they give up"
            observed = f"no interface has the address {node.data_address}; peers are reached from {listed(sorted(sources))}"
            yield Finding(ID, node.name, Status.FAIL, observed, expected, why, remedy)


def _iface_faults(
    node: Node, iface: Iface, mtus: Mapping[str, int], agreed: Majority[int], cluster: Cluster
) -> Iterator[Finding]:
    network = cluster.network
    if not is_up(iface):
        why, remedy = (
            "the link is down: cable, switch port or transceiver",
            as_root(node, f"ip link set {shlex.quote(iface.name)} up"),
        )
        yield Finding(ID, node.name, Status.FAIL, f"{iface.name} is {iface.operstate}", "up", why, remedy)
    why_mtu = "packets larger than the smallest MTU on the way are dropped or cut: connections open, then stall"
    if network.mtu is not None:
        if iface.mtu != network.mtu:
            remedy = as_root(node, f"ip link set {shlex.quote(iface.name)} mtu {network.mtu}")
            expected = f"{network.mtu} (cluster.yaml)"
            yield Finding(ID, node.name, Status.FAIL, f"{iface.name}: MTU {iface.mtu}", expected, why_mtu, remedy)
    elif node.name in agreed.odd:
        right = (
            f"{agreed.value}, as on most nodes"
            if agreed.value is not None
            else f"one MTU on all; {others(mtus, node.name)} (no majority)"
        )
        remedy = as_root(node, f"ip link set {shlex.quote(iface.name)} mtu {agreed.value or max(mtus.values())}")
        yield Finding(ID, node.name, Status.FAIL, f"{iface.name}: MTU {iface.mtu}", right, why_mtu, remedy)
    elif iface.mtu == OVERLAY_MTU:
        why = (
            "that is the MTU of an overlay network (VXLAN): all-reduce over one was 20 times slower than over the host's network"
        )
        observed, expected = f"{iface.name}: MTU {iface.mtu}", "1500 or more; or state mtu: 1450 under network in cluster.yaml"
        yield Finding(ID, node.name, Status.WARN, observed, expected, why, on(node, f"ip -d link show {shlex.quote(iface.name)}"))
    if network.rate_gbit_s is None:
        return
    expected = f"at least {network.rate_gbit_s:g} Gbit/s (cluster.yaml)"
    if iface.speed_mbit_s is None:
        observed = f"not read: the speed of {iface.name}" + (" (virtual)" if iface.virtual else "")
        yield Finding(ID, node.name, Status.UNKNOWN, observed, expected, "", on(node, f"ethtool {shlex.quote(iface.name)}"))
    elif iface.speed_mbit_s < network.rate_gbit_s * 1000:
        why = "a cable, transceiver or switch port negotiated down, or this is the wrong card"
        observed = f"{iface.name}: {iface.speed_mbit_s / 1000:g} Gbit/s"
        yield Finding(ID, node.name, Status.FAIL, observed, expected, why, on(node, f"ethtool {shlex.quote(iface.name)}"))
