"""What links should carry: the figures people know, from rate and MTU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netcheck.expected import (
    compared_limits,
    interface,
    is_ipv6,
    link_mtu,
    link_rate_gbit_s,
    rdma_limits,
    rdma_mtu,
    tcp_limits,
    usual_gbit_s,
)
from r4090c.model import Cluster, Expect, Iface, NetFact, Network, Node, Paths, Ssh, Storage

EXPECT = Expect()


@pytest.mark.parametrize(
    ("rate", "mtu", "ceiling", "warn"),
    [
        (1, 1500, 0.941, 0.92),
        (10, 1500, 9.41, 9.2),
        (10, 9000, 9.90, 9.2),
        (25, 1500, 23.5, 20.0),
        (25, 9000, 24.8, 20.0),
        (40, 9000, 39.6, 20.0),  # one core
        (100, 9000, 99.0, 20.0),
        (10, 1280, 9.32, 9.105),  # the least of IPv6: less than 9.2 is all there is
    ],
)
def test_tcp(rate: float, mtu: int, ceiling: float, warn: float) -> None:
    limits = tcp_limits(rate, mtu, EXPECT)
    assert limits.ceiling_gbit_s == pytest.approx(ceiling, rel=2e-3)
    assert limits.warn_gbit_s == pytest.approx(warn, rel=2e-3)
    assert limits.fail_gbit_s == pytest.approx(0.5 * warn if rate > 10 else 0.35 * rate, rel=2e-3)


@pytest.mark.parametrize(("rate", "mtu", "ceiling"), [(100, 4096, 98.0), (100, 1024, 92.6), (25, 4096, 24.5), (25, 1024, 23.1)])
def test_rdma(rate: float, mtu: int, ceiling: float) -> None:
    limits = rdma_limits(rate, mtu, EXPECT)
    assert limits.ceiling_gbit_s == pytest.approx(ceiling, abs=0.06)
    assert limits.warn_gbit_s == pytest.approx(0.9 * ceiling, abs=0.06)
    assert limits.fail_gbit_s == pytest.approx(0.8 * ceiling, abs=0.06)
    assert (rdma_limits(rate, mtu, EXPECT, infiniband=True).ceiling_gbit_s or 0) > ceiling


@pytest.mark.parametrize(
    ("mtu", "packet"), [(9000, 4096), (4200, 4096), (4096, 2048), (1500, 1024), (1120, 1024), (576, 256), (68, 256)]
)
def test_the_packets_of_roce(mtu: int, packet: int) -> None:
    assert rdma_mtu(mtu) == packet


@given(st.floats(0.1, 800), st.integers(576, 9216), st.booleans())
def test_limits_are_in_order(rate: float, mtu: int, ipv6: bool) -> None:
    limits = tcp_limits(rate, mtu, EXPECT, ipv6=ipv6)
    assert limits.ceiling_gbit_s is not None
    assert 0 < limits.fail_gbit_s < limits.warn_gbit_s < limits.ceiling_gbit_s < rate


def test_without_a_rate_the_links_are_compared() -> None:
    cells = {(a, b): 9.0 for a in "abcd" for b in "abcd" if a != b}
    assert compared_limits(cells, EXPECT).warn_gbit_s == 4.5
    assert compared_limits(cells, EXPECT).ceiling_gbit_s is None
    assert usual_gbit_s({}) == 0.0


@pytest.mark.parametrize("nodes", ["ab", "abc", "abcd", "abcde"])
def test_one_bad_node_does_not_spoil_what_is_usual(nodes: str) -> None:
    cells = {(a, b): 1.0 if "a" in (a, b) and nodes != "ab" else 9.0 for a in nodes for b in nodes if a != b}
    assert usual_gbit_s(cells) == 9.0
    assert usual_gbit_s({("a", "b"): 1.0, ("b", "a"): 9.0}) == 9.0


# --------------------------------------------------------------------------- what is known of the ends


def cluster_of(**network: object) -> Cluster:
    paths = Paths("/s", "/s/r", "/usr/bin/python3")
    nodes = tuple(Node(name, Ssh(name), f"10.0.0.{number}", 0, paths) for number, name in enumerate(("a", "b"), 1))
    return Cluster("c", nodes, Network(**{"kind": "tcp", **network}), Storage("local"), EXPECT)  # type: ignore[arg-type]


def iface(name: str, speed: int | None, virtual: bool = False, lower: tuple[str, ...] = (), mtu: int = 1500) -> Iface:
    return Iface(name, "up", mtu, speed, "", ("10.0.0.1/24",) if not lower or name == "bond0" else (), virtual, lower=lower)


def net(*ifaces: Iface, over: str) -> NetFact:
    return NetFact(ifaces, {"10.0.0.2": (over, "10.0.0.1")}, {})


def test_a_virtual_interface_has_no_rate_whatever_it_says() -> None:
    cluster = cluster_of()
    found = interface(cluster.nodes[0], net(iface("eth0", 10_000, virtual=True), over="eth0"), cluster)
    assert found is not None and found.speed_mbit_s is None
    real = interface(cluster.nodes[0], net(iface("eth0", 25_000), over="eth0"), cluster)
    assert real is not None and real.speed_mbit_s == 25_000
    assert interface(cluster.nodes[0], None, cluster) is None


def test_a_bond_of_cards_has_their_rate() -> None:
    cluster = cluster_of()
    bond = iface("bond0", 50_000, virtual=True, lower=("e1", "e2"))
    found = interface(cluster.nodes[0], net(bond, iface("e1", 25_000), iface("e2", 25_000), over="bond0"), cluster)
    assert found is not None and found.speed_mbit_s == 50_000
    of_veth = net(bond, iface("e1", 10_000, virtual=True), iface("e2", 25_000), over="bond0")
    found = interface(cluster.nodes[0], of_veth, cluster)
    assert found is not None and found.speed_mbit_s is None


def test_a_link_is_as_good_as_its_worse_end_unless_cluster_yaml_says() -> None:
    ends = {"a": iface("e", 25_000, mtu=9000), "b": iface("e", 10_000), "c": None}
    assert link_rate_gbit_s(("a", "b"), ends, cluster_of()) == 10
    assert link_rate_gbit_s(("a", "c"), ends, cluster_of()) == 25
    assert link_rate_gbit_s(("c", "d"), ends, cluster_of()) is None
    assert link_rate_gbit_s(("a", "b"), ends, cluster_of(rate_gbit_s=100)) == 100
    assert link_mtu(("a", "b"), ends, cluster_of()) == 1500
    assert link_mtu(("c", "d"), ends, cluster_of()) == 1500
    assert link_mtu(("a", "b"), ends, cluster_of(mtu=9000)) == 9000


def test_addresses() -> None:
    assert is_ipv6("fd00::1") and is_ipv6("fe80::1%eth0")
    assert not is_ipv6("10.0.0.1") and not is_ipv6("node01")
