"""The variables that NCCL and gloo need on a node, each with its reason. Pure.

The one place that computes them: `launch` gives them to the ranks of a run, and the measurements run under the same, so that what
was measured is what training gets.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from netcheck.data_network import cards_of, data_iface, gid_index, in_data_network, networks, rdma_ports
from netcheck.expected import interface, is_ipv6
from netcheck.facts.rdma import roce_v2_ipv4
from r4090c.model import Cluster, IfaceQos, NetFact, Node, NodeFacts, P2pProof, PortTest, RdmaPort

NCCL_FINDS_GID = (2, 21)
"""From this version NCCL chooses the RoCE GID by itself (its release notes); older ones take index 0, a link-local v1 one."""
P2P_LEVEL = "SYS"
"""How far P2P reaches where it is on. By itself NCCL keeps to PXB, but on AMD with one or two GPUs (ncclTopoCheckP2p), and the
GPUs of 4090 boxes are PHB, NODE or SYS from each other; who patches drivers sets SYS (tinygrad/open-gpu-kernel-modules#22)."""
SOCKET_THREADS_MAX = 4
"""Helper threads of a connection, and sockets of each: the NCCL manual's hint for 100 Gbit/s (its limits: 16, and 64 in all)."""
DSCP_USUAL = 26
"""The code point of RoCE guides for priority 3 (NVIDIA, "Recommended Network Configuration Examples for RoCE Deployment")."""
LACKING_MAX = 3
"""Nodes named in a reason; the others are counted."""
STATED = ("NCCL_", "GLOO_", "TP_", "CUDA_", "TORCH_", "UCX_", "OMPI_", "LD_LIBRARY_PATH")
"""Beginnings of the variables of cluster.yaml that decide how collectives run; no others go along on a measurement."""


@dataclass(frozen=True, slots=True)
class Var:
    """One environment variable: why it is set, and who said so (computed, cluster.yaml, recipe, user)."""

    value: str
    reason: str
    origin: str = "computed"


def nccl_version(facts: NodeFacts) -> tuple[int, ...] | None:
    """Return the version of NCCL in the node's training Python, the oldest of several; None where no wheel tells."""
    if facts.python.value is None:
        return None
    found = [
        text for name, told in facts.python.value.packages.items() if name.startswith("nvidia-nccl-") for text in told.split(", ")
    ]
    versions = [tuple(map(int, text.split("."))) for text in found if re.fullmatch(r"\d{1,6}(\.\d{1,6})+", text)]
    return min(versions, default=None)


def computed_environment(
    cluster: Cluster,
    nodes: Sequence[Node],
    facts: Mapping[str, NodeFacts],
    p2p: Mapping[str, P2pProof] | None = None,
    tests: Mapping[str, Mapping[str, PortTest]] | None = None,
) -> dict[str, dict[str, Var]]:
    """Return node name -> what NCCL, gloo and CUDA are to be told there, for a run on exactly `nodes`.

    All of them are looked at together: NCCL takes one transport for the whole run. `p2p`: node -> what a two-arm test of it as it
    stands showed. `tests`: node -> RDMA port -> what the last bandwidth test showed. None = there was none.
    """
    peers = {node.name: node.data_address for node in nodes}
    ends = [_end(cluster, node, facts[node.name], peers) for node in nodes]
    wire = _wire(cluster, ends, tests or {})
    found = {}
    for end in ends:
        env = _interfaces(end)
        if all(is_ipv6(address) for address in peers.values()):
            env["NCCL_SOCKET_FAMILY"] = Var(
                "AF_INET6", "the data addresses are IPv6; otherwise an interface's IPv4 address comes first"
            )
        if end.node.gpus:
            env["CUDA_DEVICE_ORDER"] = Var("PCI_BUS_ID", "rank k drives GPU k in PCI order, as the CPU plan assumes")
            env |= _p2p((p2p or {}).get(end.node.name))
            env |= {**wire.common, **wire.own[end.node.name]}
            env["NCCL_NET_GDR_LEVEL"] = Var(
                "LOC", "no GPUDirect RDMA on GeForce, also with a patched driver: through host memory"
            )
            env["NCCL_DEBUG"] = Var("WARN", "NCCL's first warning names the cause of a failure; it tells none by default")
        found[end.node.name] = env
    return found


def measured_environment(
    cluster: Cluster,
    nodes: Sequence[Node],
    facts: Mapping[str, NodeFacts],
    tests: Mapping[str, Mapping[str, PortTest]] | None = None,
) -> dict[str, dict[str, str]]:
    """Return node name -> the variables for a measurement over `nodes`, as a run on exactly these gets.

    Computed, then those of cluster.yaml that decide how collectives run. P2P is off but in the test that is to prove it.
    """
    found = {}
    computed = computed_environment(cluster, nodes, facts, tests=tests)
    for node in nodes:
        found[node.name] = {name: var.value for name, var in computed[node.name].items()}
        for layer in (cluster.env, node.env):
            found[node.name] |= {name: value for name, value in layer.items() if name.startswith(STATED)}
    return found


# --------------------------------------------------------------------------- one node's end of the data network


@dataclass(frozen=True, slots=True)
class _End:
    """How one node takes part: the interface to its peers and why that one, its ACTIVE RDMA ports on the data network.

    `lacking`: why there is no port, "" where there is one. `out`: why some of its ports were left out. `kept`: why one was not.
    """

    node: Node
    facts: NodeFacts
    iface: str | None
    why: str
    ports: tuple[RdmaPort, ...] = ()
    lacking: str = ""
    out: tuple[str, ...] = ()
    kept: str = ""

    @property
    def net(self) -> NetFact | None:
        """What is known of its interfaces."""
        return self.facts.net.value


def _end(cluster: Cluster, node: Node, facts: NodeFacts, peers: Mapping[str, str]) -> _End:
    net = facts.net.value
    loopback = cluster.network.kind == "loopback"
    iface, why = data_iface(net, node, peers, loopback=loopback) if net is not None else (None, "addresses unknown")
    if not cluster.network.rdma:
        return _End(node, facts, iface, why, lacking=f"network.kind {cluster.network.kind}")
    if facts.rdma.value is None:
        return _End(node, facts, iface, why, lacking=f"RDMA ports unknown ({facts.rdma.error or facts.rdma.absent})")
    serving = rdma_ports(node, facts.rdma.value, net, iface, cluster)
    active = tuple(port for port in serving if "ACTIVE" in port.state)
    lame = [port for port in active if cluster.network.kind == "roce" and _no_gid(port, node, net, iface, cluster)]
    ports = tuple(port for port in active if port not in lame)
    notes = [f"{port.name} is {port.state}" for port in serving if port not in active]
    notes += [f"{port.name} has no RoCE v2 IPv4 GID of the data network" for port in lame]
    lacking = "" if ports else f"no active RDMA port on the data network{f' ({_listed(notes)})' if notes else ''}"
    return _End(node, facts, iface, why, ports, lacking, tuple(notes))


def _no_gid(port: RdmaPort, node: Node, net: NetFact | None, iface: str | None, cluster: Cluster) -> bool:
    """Return whether the GID table is known, and holds nothing that NCCL could take on this network."""
    if not port.gids or is_ipv6(node.data_address):
        return False
    return not any(in_data_network(address, node, net, iface, cluster) for _, address in roce_v2_ipv4(port))


def _interfaces(end: _End) -> dict[str, Var]:
    if not end.iface:
        return {}
    return {
        "NCCL_SOCKET_IFNAME": Var(f"={end.iface}", f"{end.why}; exact match, a bare prefix takes look-alikes"),
        "GLOO_SOCKET_IFNAME": Var(end.iface, end.why),
        "TP_SOCKET_IFNAME": Var(end.iface, end.why),
    }


def _p2p(proof: P2pProof | None) -> dict[str, Var]:
    """Nodes may differ: P2P is a matter between GPUs of one node, and NCCL's ranks agree on the paths they found."""
    if proof is None:
        told = "no P2P on a 4090 with the stock driver; off unless a two-arm test proved it"
        return {"NCCL_P2P_DISABLE": Var("1", told)}
    told = f"two-arm test of {proof.date}: {proof.reason}"
    if not proof.proven:
        return {"NCCL_P2P_DISABLE": Var("1", told)}
    level = Var(P2P_LEVEL, "as in that test; by itself NCCL uses P2P below one switch only (PXB)")
    return {"NCCL_P2P_DISABLE": Var("0", told), "NCCL_P2P_LEVEL": level}


# --------------------------------------------------------------------------- one transport for all nodes


@dataclass(frozen=True, slots=True)
class _Wire:
    """The variables of the way between the nodes: the same on all, and each node's own."""

    common: Mapping[str, Var]
    own: Mapping[str, Mapping[str, Var]]


def _wire(cluster: Cluster, ends: Sequence[_End], tests: Mapping[str, Mapping[str, PortTest]]) -> _Wire:
    ends = [end for end in ends if end.node.gpus]
    nothing: dict[str, dict[str, Var]] = {end.node.name: {} for end in ends}
    if len(ends) < 2:
        return _Wire({"NCCL_IB_DISABLE": Var("1", "one node: nothing goes over the network, so no RDMA card is opened")}, nothing)
    if not cluster.network.rdma:
        told = (
            f"network.kind {cluster.network.kind}: TCP sockets; stated, so that NCCL takes no RDMA card that it happens to find"
        )
        return _Wire({"NCCL_IB_DISABLE": Var("1", told), **_sockets(cluster, ends)}, nothing)
    ends, rails = _on_common_rails([_tested(end, tests.get(end.node.name, {})) for end in ends])
    ends = [_with_index(cluster, end) for end in ends]
    lacking = [f"{end.node.name}: {end.lacking}" for end in ends if end.lacking]
    if lacking:
        told = (
            f"network.kind {cluster.network.kind}, but {'; '.join(lacking[:LACKING_MAX])}"
            f"{f'; and {len(lacking) - LACKING_MAX} more nodes' if len(lacking) > LACKING_MAX else ''}."
            " NCCL takes one transport for the whole run (NCCL issue 234): TCP sockets on all nodes"
        )
        return _Wire({"NCCL_IB_DISABLE": Var("1", told), **_sockets(cluster, ends)}, nothing)
    told = (
        f"network.kind {cluster.network.kind}, an active port on every node; stated, since accelerate may turn it off for RTX 40"
    )
    common = {"NCCL_IB_DISABLE": Var("0", told)}
    if len(rails) > 1:
        why = (
            f"separate rails ({_listed(rails)}): a ring keeps to its own; NCCL does not see whether rails meet (NCCL issue 1933),"
            " and promises nothing (issue 836)"
        )
        common["NCCL_CROSS_NIC"] = Var("0", why)
    if cluster.network.kind == "roce":
        if all(is_ipv6(end.node.data_address) for end in ends):
            common["NCCL_IB_ADDR_FAMILY"] = Var("AF_INET6", "the data addresses are IPv6; otherwise NCCL looks for an IPv4 GID")
        traffic_class = _traffic_class(ends)
        if traffic_class is not None:
            common["NCCL_IB_TC"] = traffic_class
    return _Wire(common, {end.node.name: _ports(cluster, end, tests.get(end.node.name, {})) for end in ends})


def _sockets(cluster: Cluster, ends: Sequence[_End]) -> dict[str, Var]:
    """Return threads and sockets of a connection: more than one where one core cannot fill the wire. The same on all nodes."""
    rate = cluster.network.rate_gbit_s
    if rate is None:
        told = [iface.speed_mbit_s for end in ends if (iface := interface(end.node, end.net, cluster)) is not None]
        known = [speed for speed in told if speed]
        rate = min(known) / 1000 if len(known) == len(ends) else None
    one_core = cluster.expect.tcp_one_core_gbit_s
    if rate is None or rate <= one_core or cluster.network.kind == "loopback":
        return {}
    count = str(min(SOCKET_THREADS_MAX, math.ceil(rate / one_core)))
    why = f"{rate:g} Gbit/s over TCP, of which one core moves about {one_core:g}"
    whole = f"{count} × {count} sockets; NCCL takes at most 64, its manual has 4 × 4 for 100 Gbit/s"
    return {
        "NCCL_SOCKET_NTHREADS": Var(count, f"{why}; {whole}"),
        "NCCL_NSOCKS_PERTHREAD": Var(count, f"sockets of each of these threads: {whole}"),
    }


def _tested(end: _End, tests: Mapping[str, PortTest]) -> _End:
    """Return `end` without the ports that failed their test; the last one stays while it carries anything at all.

    Slow RDMA is still faster than the TCP that all nodes would fall back to; RDMA that carries nothing is not.
    """
    failed = [port for port in end.ports if port.name in tests and not tests[port.name].passed]
    rest = tuple(port for port in end.ports if port not in failed)
    said = {
        port: f"{port.name} failed the bandwidth test of {tests[port.name].date}: {tests[port.name].reason}" for port in failed
    }
    if failed and not rest:
        working = [port for port in failed if tests[port.name].carries]
        if working:
            kept = "; ".join(said[port] for port in working) + "; kept: there is no other, and TCP is slower yet"
            out = tuple(said[port] for port in failed if port not in working)
            return replace(end, ports=tuple(working), out=(*end.out, *out), kept=kept)
        return replace(end, ports=(), lacking=_listed(said.values()), out=(*end.out, *said.values()))
    return replace(end, ports=rest, out=(*end.out, *said.values()))


def _on_common_rails(ends: Sequence[_End]) -> tuple[list[_End], tuple[str, ...]]:
    """Return `ends` with the ports of the rails that all nodes have, and the rails when there are several.

    A rail is an IP subnet (RoCE) or a subnet prefix (InfiniBand). NCCL connects the k-th port of one node with the k-th of
    another: a port whose rail another node lacks waits for ever, and so do rails in another order. One rail
    stays in that case: that of the data interface, else the first common one.
    """
    rails = {end.node.name: tuple(_rail(port, end.net) for port in _in_order(end.ports)) for end in ends}
    known = {rail for own in rails.values() for rail in own}
    if "" in known or len(known) < 2 or any(end.lacking for end in ends):
        return list(ends), ()
    if all(len({*own}) == 1 for own in rails.values()):
        return list(ends), ()  # one subnet a node: it is routed between them
    common = set.intersection(*({*own} for own in rails.values()))
    if not common:
        return list(ends), ()  # every node has subnets of its own: they are routed
    orders = {tuple(rail for rail in own if rail in common) for own in rails.values()}
    if len(orders) > 1:
        preferred = [rail for end in ends for rail in common if rail == _rail_of_iface(end)]
        common = {*preferred[:1]} or {*sorted(common)[:1]}
    found = []
    for end in ends:
        ports = tuple(port for port in end.ports if _rail(port, end.net) in common)
        out = [port for port in end.ports if port not in ports]
        why = "other nodes have no port on its rail, or their rails are in another order"
        notes = [f"{port.name} ({_rail(port, end.net)}): {why}" for port in out]
        lacking = "" if ports else f"no rail that all nodes have ({_listed(notes)})"
        found.append(replace(end, ports=ports, lacking=lacking, out=(*end.out, *notes)))
    kept = tuple(rail for rail in dict.fromkeys(next(iter(rails.values()))) if rail in common)
    return found, kept if len(kept) > 1 else ()


def _in_order(ports: Iterable[RdmaPort]) -> list[RdmaPort]:
    """Return ports as NCCL counts them: mlx5_2 before mlx5_10."""
    return sorted(ports, key=lambda port: ([int(part) if part.isdecimal() else part for part in _parts(port.hca)], port.port))


def _parts(hca: str) -> list[str]:
    return ["", *re.split(r"([0-9]+)", hca)]


def _rail(port: RdmaPort, net: NetFact | None) -> str:
    """Return the subnet a port is in, "" where nothing tells it."""
    if port.link_layer.lower() == "infiniband":
        first = next((gid.address for gid in port.gids if gid.index == 0), None)
        return "" if first is None else f"prefix {ipaddress.IPv6Address(int(ipaddress.IPv6Address(first)) >> 64 << 64)}"
    own = {address for _, address in roce_v2_ipv4(port)}
    subnets = [found.network for iface in (net.ifaces if net else ()) for found in networks(iface) if str(found.ip) in own]
    return str(subnets[0]) if len({*subnets}) == 1 else ""


def _rail_of_iface(end: _End) -> str:
    subnets = [
        str(found.network)
        for iface in (end.net.ifaces if end.net else ())
        if iface.name == end.iface
        for found in networks(iface)
    ]
    return subnets[0] if subnets else ""


def _with_index(cluster: Cluster, end: _End) -> _End:
    """Return `end` with the ports that have the one GID index that an old NCCL takes for all ports of a node."""
    if not _needs_index(cluster, end):
        return end
    index, having = gid_index(end.node, end.ports, end.net, end.iface, cluster)
    if index is None:
        return end
    notes = [f"{port.name} has no GID with index {index}, and NCCL takes one for all" for port in end.ports if port not in having]
    return replace(end, ports=having, out=(*end.out, *notes))


def _needs_index(cluster: Cluster, end: _End) -> bool:
    """Return whether NCCL must be told a GID index: it does not look for one, or (its version unknown) may find another one."""
    if cluster.network.kind != "roce" or not end.ports or is_ipv6(end.node.data_address):
        return False
    version = nccl_version(end.facts)
    return _finds_another(cluster, end) if version is None else version < NCCL_FINDS_GID


def _finds_another(cluster: Cluster, end: _End) -> bool:
    """Return whether a port's first RoCE v2 IPv4 GID, the one NCCL takes, is of another network: a VLAN's comes later."""
    first = [next(iter(roce_v2_ipv4(port)), None) for port in end.ports]
    return any(one is not None and not in_data_network(one[1], end.node, end.net, end.iface, cluster) for one in first)


def _ports(cluster: Cluster, end: _End, tests: Mapping[str, PortTest]) -> dict[str, Var]:
    """Return which ports of a node NCCL is to use, and by which GID."""
    passed = [port for port in end.ports if port.name in tests and tests[port.name].passed]
    measured = [f"{port.name} {tests[port.name].reason} ({tests[port.name].date})" for port in passed]
    unmeasured = [port.name for port in end.ports if port.name not in tests]
    told = ["ACTIVE ports of the data network; exact names, a bare mlx5_1 takes mlx5_10 too"]
    told += [f"measured: {_listed(measured)}"] if measured else []
    told += [f"not measured: {_listed(unmeasured)} (r4090c preflight --only rdma-bandwidth)"] if unmeasured else []
    told += [end.kept] if end.kept else []
    told += [f"left out: {_listed(end.out)}"] if end.out else []
    env = {"NCCL_IB_HCA": Var("=" + ",".join(port.name for port in end.ports), "; ".join(told))}
    if _needs_index(cluster, end):
        index, _ = gid_index(end.node, end.ports, end.net, end.iface, cluster)
        if index is not None:
            version = nccl_version(end.facts)
            why = (
                "NCCL's version is unknown, and it may find another one"
                if version is None
                else f"NCCL {dotted(version)} does not look for it"
            )
            env["NCCL_IB_GID_INDEX"] = Var(str(index), f"RoCE v2 IPv4 GID of {end.ports[0].name}; {why}")
    elif cluster.network.kind == "roce" and not is_ipv6(end.node.data_address) and _finds_another(cluster, end):
        subnet = cluster.network.subnet or _rail_of_iface(end)
        if subnet:
            why = (
                f"{_listed(port.name for port in end.ports)}: the first RoCE v2 IPv4 GID, which NCCL takes, is of another network"
            )
            env["NCCL_IB_ADDR_RANGE"] = Var(subnet, why)
    return env


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words)


def dotted(version: Iterable[int]) -> str:
    """Return a version as people write it."""
    return ".".join(map(str, version))


def _traffic_class(ends: Sequence[_End]) -> Var | None:
    """Return the traffic class whose DSCP leads to the one priority that PFC guards on all nodes, None where nothing tells it."""
    guarded: set[int] = set()
    points: set[int] | None = None
    for end in ends:
        qos = _qos(end)
        if qos is None or qos.pfc is None or len(qos.pfc) != 1 or not qos.dscp:
            return None
        (priority,) = qos.pfc
        guarded.add(priority)
        own = {point for point, to in qos.dscp if to == priority}
        points = own if points is None else points & own
    if len(guarded) != 1 or not points or 0 in points:  # 0: what is sent without a class is guarded already
        return None
    point = DSCP_USUAL if DSCP_USUAL in points else min(points)
    (priority,) = guarded
    why = f"DSCP {point} × 4: on all nodes it leads to priority {priority}, the one PFC guards; without it RoCE goes unguarded"
    return Var(str(point << 2), why)


def _qos(end: _End) -> IfaceQos | None:
    """Return how the card below the data interface treats RDMA traffic."""
    iface = next((one for one in (end.net.ifaces if end.net else ()) if one.name == end.iface), None)
    names = [iface.name, *(card.name for card in cards_of(iface, end.net))] if iface is not None and end.net is not None else []
    return next((one for name in names for one in end.facts.qos.value or () if one.iface == name), None)


def visible_gpus(node: Node, facts: NodeFacts, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return how CUDA calls the GPUs of `node` that ranks may have: indices in PCI order, or what CUDA_VISIBLE_DEVICES lists.

    No more than cluster.yaml states; none where the driver shows none.
    """
    gpus = facts.gpus.value if facts.gpus.value is not None else ()
    working = [gpu for gpu in gpus if gpu.index >= 0]
    stated = env.get("CUDA_VISIBLE_DEVICES")
    if stated is not None:
        listed = tuple(part.strip() for part in stated.split(",") if part.strip())
        return listed[: min(node.gpus, len(working))]
    return tuple(str(index) for index in range(min(node.gpus, len(working))))
