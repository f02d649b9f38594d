"""What a link can carry, derived from its rate and its MTU, and below what it is not as it should be. Pure.

TCP over Ethernet: of every MTU + 38 bytes on the wire (header 14, FCS 4, preamble 8, gap 12: IEEE 802.3) MTU − 52 are payload
(IPv4 20, TCP 20, timestamps 12: RFC 791, 9293, 7323; IPv6 takes 20 more). 25 GbE carries 23.5 Gbit/s at MTU 1500, 24.8 at 9000.

RDMA: a packet holds 256 to 4096 bytes of payload, the largest that fits the MTU. RoCE v2 adds 82 bytes to each (Ethernet 38,
IPv4 20, UDP 8, BTH 12, ICRC 4: InfiniBand Architecture Specification, annex A17), InfiniBand 26 (LRH 8, BTH 12, ICRC 4, VCRC 2).
100 Gbit/s carry 98.0 at 4096 and 92.6 at 1024, 25 Gbit/s carry 24.5 and 23.1.

Where no rate is known (virtual interfaces tell none) the links are compared with each other.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from netcheck.data_network import data_iface, peers_of
from r4090c.model import Cluster, Expect, Iface, NetFact, Node

Cell = tuple[str, str]
"""One direction of one link: sender, receiver."""

FRAME_BYTES = 38
TCP_HEADER_BYTES, TCP6_HEADER_BYTES = 52, 72
ROCE_HEADER_BYTES, INFINIBAND_HEADER_BYTES = 82, 26
ROCE_IN_MTU_BYTES = 96
"""What the kernel sets aside of an interface's MTU for the headers of a RoCE packet (iboe_get_mtu in include/rdma/ib_addr.h)."""
RDMA_MTUS = (4096, 2048, 1024, 512, 256)
"""enum ibv_mtu (ibv_query_port(3))."""
MTU_USUAL = 1500
SLOW_NIC_GBIT_S = 10.0
"""Up to this rate one core carries all that TCP can; above it the share that is asked for is lower."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one link should carry. `ceiling_gbit_s`: all it can carry; None = its rate is not known.

    `how`: where the figures come from, in words. `fields`: the thresholds of Expect that went into them.
    """

    ceiling_gbit_s: float | None
    warn_gbit_s: float
    fail_gbit_s: float
    how: str
    fields: tuple[str, ...]


def tcp_limits(rate_gbit_s: float, mtu: int, expect: Expect, *, ipv6: bool = False) -> Limits:
    """Return what TCP should get of a link of `rate_gbit_s`.

    A slow NIC (up to 10 Gbit/s) must reach tcp_slow_nic_warn of its rate, 9.2 of 10, a fast one tcp_fast_nic_warn, 20 of 25:
    there the sender's core begins to count. No more than tcp_one_core_gbit_s is asked for, whatever the rate. Where an odd MTU
    leaves less than that, the same share of its ceiling is taken as of the one at MTU 1500.
    """
    slow = rate_gbit_s <= SLOW_NIC_GBIT_S
    share = expect.tcp_slow_nic_warn if slow else expect.tcp_fast_nic_warn
    ceiling = rate_gbit_s * _tcp_share(mtu, ipv6)
    at_most = math.inf if slow else expect.tcp_one_core_gbit_s
    warn = min(share * rate_gbit_s, share / _tcp_share(MTU_USUAL, False) * ceiling, at_most)
    how = f"{rate_gbit_s:g} Gbit/s at MTU {mtu} carry {ceiling:.3g}"
    if slow:
        fail = min(expect.tcp_slow_nic_fail * rate_gbit_s, warn)
        return Limits(ceiling, warn, fail, how, ("tcp_slow_nic_warn", "tcp_slow_nic_fail"))
    return Limits(ceiling, warn, expect.tcp_fail * warn, how, ("tcp_fast_nic_warn", "tcp_one_core_gbit_s", "tcp_fail"))


def _tcp_share(mtu: int, ipv6: bool) -> float:
    headers = TCP6_HEADER_BYTES if ipv6 else TCP_HEADER_BYTES
    return max(0.0, (mtu - headers) / (mtu + FRAME_BYTES))


def rdma_limits(rate_gbit_s: float, rdma_mtu: int, expect: Expect, *, infiniband: bool = False) -> Limits:
    """Return what ib_write_bw should get of a link of `rate_gbit_s` with packets of `rdma_mtu` bytes of payload."""
    ceiling = rate_gbit_s * rdma_mtu / (rdma_mtu + (INFINIBAND_HEADER_BYTES if infiniband else ROCE_HEADER_BYTES))
    how = f"{rate_gbit_s:g} Gbit/s with packets of {rdma_mtu} bytes carry {ceiling:.3g}"
    return Limits(ceiling, expect.rdma_warn * ceiling, expect.rdma_fail * ceiling, how, ("rdma_warn", "rdma_fail"))


def rdma_mtu(mtu: int) -> int:
    """Return the packet size RoCE takes on an interface of this MTU: 1024 at 1500, 4096 from about 4200 on."""
    return next((size for size in RDMA_MTUS if size + ROCE_IN_MTU_BYTES <= mtu), RDMA_MTUS[-1])


def compared_limits(cells: Mapping[Cell, float], expect: Expect) -> Limits:
    """Return what a link of unknown rate should carry: a share of what the links of this cluster mostly carry."""
    usual = usual_gbit_s(cells)
    how = f"the links here mostly carry {usual:.3g}; est.: the interfaces tell no rate"
    fields = ("link_median_warn", "link_median_fail")
    return Limits(None, expect.link_median_warn * usual, expect.link_median_fail * usual, how, fields)


def usual_gbit_s(cells: Mapping[Cell, float]) -> float:
    """Return the median of the links; of few nodes the value above those that a single bad node can spoil.

    A node that is slow in both directions spoils 2/N of all links: all of two nodes', two thirds of three nodes'. 0 for none.
    """
    if not cells:
        return 0.0
    nodes = len({name for cell in cells for name in cell})
    ordered = sorted(cells.values())
    return ordered[min(len(ordered) - 1, int(len(ordered) * max(0.5, 2 / nodes)))]


# --------------------------------------------------------------------------- what is known of the ends


def interface(node: Node, net: NetFact | None, cluster: Cluster) -> Iface | None:
    """Return the interface of `node` on the data network, None when it is not known.

    Its speed is left out where no real card stands behind it: veth calls itself a 10 Gbit/s card, and is none.
    """
    if net is None:
        return None
    name, _ = data_iface(net, node, peers_of(node, cluster))
    by_name = {iface.name: iface for iface in net.ifaces}
    if name is None or name not in by_name:
        return None
    iface = by_name[name]
    return iface if _is_real(iface, by_name) else replace(iface, speed_mbit_s=None)


def _is_real(iface: Iface, by_name: Mapping[str, Iface], depth: int = 4) -> bool:
    """Return whether it is a card, or a bond, VLAN or bridge that stands on cards."""
    lower = [by_name[name] for name in iface.lower if name in by_name]
    return not iface.virtual or (depth > 0 and bool(lower) and all(_is_real(one, by_name, depth - 1) for one in lower))


def link_rate_gbit_s(cell: Cell, ifaces: Mapping[str, Iface | None], cluster: Cluster) -> float | None:
    """Return the rate of a link: as cluster.yaml states it, else that of its slower end as far as the ends tell."""
    if cluster.network.rate_gbit_s is not None:
        return cluster.network.rate_gbit_s
    ends = (ifaces.get(name) for name in cell)
    rates = [iface.speed_mbit_s / 1000 for iface in ends if iface is not None and iface.speed_mbit_s]
    return min(rates, default=None)


def link_mtu(cell: Cell, ifaces: Mapping[str, Iface | None], cluster: Cluster) -> int:
    """Return the MTU of a link: as cluster.yaml states it, else the smaller one of its ends; 1500 where neither tells."""
    if cluster.network.mtu is not None:
        return cluster.network.mtu
    ends = (ifaces.get(name) for name in cell)
    return min((iface.mtu for iface in ends if iface is not None), default=MTU_USUAL)


def is_ipv6(address: str) -> bool:
    """Return whether `address` is an IPv6 address; a name is not."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).version == 6
    except ValueError:
        return False
