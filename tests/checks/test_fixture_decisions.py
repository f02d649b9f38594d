"""From what a tool prints to the decision: the recorded and authored outputs of tests/tools/fixtures through facts and checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from netcheck.expected import Limits, rdma_limits, tcp_limits
from netcheck.tools import (
    chronyc,
    ethtool,
    findmnt,
    gids,
    ibv_devinfo,
    iperf3,
    lscpu,
    numactl,
    perftest,
    proc_mounts,
    timedatectl,
)
from r4090c.cli.common import to_jsonable
from r4090c.model import Expect
from tests.checks.cases import found

FIXTURES = Path(__file__).parents[1] / "tools" / "fixtures"


def text(name: str) -> str:
    return (FIXTURES / name).read_text()


def decided(check: str, facts: dict[str, Any], nodes: int = 1, **cluster: Any) -> list[tuple[str, str, str]]:
    """Return (subject, status, observed) of what a check says when node01 has these facts."""
    findings = found({"nodes": nodes, "facts": {"node01": facts}, "cluster": cluster}, check)
    return [(finding["subject"], finding["status"], finding["observed"]) for finding in findings]


def port_with(name: str) -> dict[str, Any]:
    """Return the rdma fact of an active port with the GIDs of a fixture, on the interface of its first one."""
    (port, *_) = gids.parse(text(f"gids/{name}.txt"))
    told = {
        "state": "ACTIVE",
        "phys_state": "LinkUp",
        "link_layer": "Ethernet",
        "rate_gbit_s": 100.0,
        "firmware": None,
        "numa": 0,
    }
    entries = [to_jsonable(gid) for gid in port.gids]
    return {"rdma": [{"hca": port.hca, "port": port.port, "netdev": "enp65s0f0", "gids": entries, **told}]}


@pytest.mark.parametrize(
    ("name", "subnet", "status", "observed"),
    [
        ("two-nics-v1-v2", "10.31.4.0/24", "pass", "mlx5_0:1 (GID index 3)"),
        ("vlan-second-ipv4", "10.31.4.0/24", "pass", "mlx5_0:1 (GID index 3)"),
        ("vlan-second-ipv4", "10.90.4.0/24", "pass", "mlx5_0:1 (GID index 5)"),
        ("vlan-second-ipv4", "10.10.0.0/24", "fail", ""),
        ("only-link-local", "10.31.4.0/24", "fail", ""),
    ],
)
def test_the_gid_of_the_clusters_subnet_and_never_always_3(name: str, subnet: str, status: str, observed: str) -> None:
    ((subject, decision, told),) = decided("rdma-port", port_with(name), network={"subnet": subnet})
    assert (decision, subject) == (status, "node01" if status == "pass" else "node01/mlx5_0:1")
    assert observed in told


def test_small_packets_of_one_port_and_a_second_one_that_is_down() -> None:
    told = ibv_devinfo.parse(text("ibv_devinfo/roce-dual-one-down-mtu1024.txt"))
    mtus = [
        {"hca": device.hca, "port": port.port, "active_bytes": port.active_mtu_bytes, "max_bytes": port.max_mtu_bytes}
        for device in told.devices
        for port in device.ports
    ]
    assert decided("rdma-mtu", {"rdma_mtu": mtus}) == [("node01/mlx5_0:1", "warn", "active MTU 1024")]


def iface_of(name: str) -> dict[str, Any]:
    """Return the net fact of a node whose data interface is what ethtool shows."""
    (link,) = ethtool.parse(text(f"ethtool/{name}.txt"))
    card = {
        "name": "enp65s0f0",
        "operstate": "up" if link.link else "down",
        "mtu": 9000,
        "speed_mbit_s": link.speed_mbit_s,
        "mac": "",
        "addresses": ["10.10.0.11/24"],
        "virtual": False,
        "duplex": link.duplex.lower() if link.duplex else None,
    }
    return {"net": {"ifaces": [card]}}


def test_a_link_that_negotiated_down() -> None:
    """The fastest mode in ethtool's list is not the speed; with a stated rate or beside faster nodes it is a fault."""
    slow = iface_of("1g-negotiated-down-to-100m")
    assert ("node01", "fail", "enp65s0f0: 0.1 Gbit/s") in decided("data-interface", slow, 3, network={"rate_gbit_s": 1.0})
    assert ("node01", "fail", "enp65s0f0: 0.1 Gbit/s") in decided("nic-link", slow, 3, network={"rate_gbit_s": None})
    assert decided("nic-link", iface_of("100g-ok"), 3)[0][1] == "pass"
    assert ("node01", "fail", "enp65s0f0 is down") in decided("data-interface", iface_of("unknown-speed-no-link"), 3)


def test_offline_cpus_and_cpus_without_memory() -> None:
    cpu = lscpu.parse(text("lscpu/old-flat-offline-cpus.txt"))
    fact: dict[str, Any] = {
        "model": cpu.model,
        "present": sorted({*cpu.online, *cpu.offline}),
        "online": list(cpu.online),
        "allowed": list(cpu.online),
        "cores": [[one] for one in cpu.online],
        "sockets": cpu.sockets,
        "numa": [{"index": index, "cpus": list(own), "memory_mib": 64_000} for index, own in cpu.numa.items()],
    }
    assert decided("cpu-topology", {"cpus": fact}) == [("node01", "warn", "CPUs 32-47 are offline")]
    bare = numactl.parse(text("numactl/memoryless-and-cpuless-node.txt"))
    nodes = [{"index": node.index, "cpus": list(node.cpus), "memory_mib": node.size_mib} for node in bare.nodes]
    everything = sorted(one for node in bare.nodes for one in node.cpus)
    fact |= {"present": everything, "online": everything, "sockets": 2, "numa": nodes}
    assert decided("cpu-topology", {"cpus": fact}) == [("node01", "warn", "NUMA node 1 has 32 CPUs and no memory")]
    nps4 = numactl.parse(text("numactl/8-nodes-nps4-two-sockets.txt"))
    fact |= {"numa": [{"index": node.index, "cpus": list(node.cpus), "memory_mib": node.size_mib} for node in nps4.nodes]}
    ((_, status, told),) = decided("cpu-topology", {"cpus": fact})
    assert status == "pass" and told.endswith("NPS4")


@pytest.mark.parametrize(("name", "status"), [("chronyc-tracking-normal", "pass"), ("chronyc-tracking-slow-seconds", "fail")])
def test_what_chrony_knows_is_what_two_way_stamps_would_show(name: str, status: str) -> None:
    """7.4 s behind is a fault although chrony's leap status is normal: the clock itself is judged, not the daemon's words."""
    offset_s = chronyc.parse(text(f"chronyc/{name}.txt")).offset_s
    assert decided("clock-skew", {"clock": {"offset_s": offset_s, "error_bound_s": 0.01}}, 3)[0][1] == status


def mounted(mounts: Any, target: str) -> dict[str, Any]:
    """Return the mounts fact of a node whose shared folder is one of the mounts of a fixture."""
    (mount,) = [to_jsonable(mount) for mount in mounts if mount.target == target]
    root = {"source": "/dev/sda1", "target": "/", "fstype": "ext4", "options": ["rw"]}
    return {"mounts": [root, {**mount, "source": "nas:/export/shared", "target": "/mnt/shared"}]}


def test_a_soft_mount_beside_the_shared_folder() -> None:
    """Of the shared folder it is a fault (checkpoints), anywhere else a warning."""
    root = {"source": "nas:/export/shared", "target": "/mnt/shared", "fstype": "nfs4", "options": ["rw", "hard", "nconnect=8"]}
    own = proc_mounts.parse(text("proc-mounts/proc-mounts-nfs3-soft-small-rsize.txt"))
    table = {"mounts": [root, *(to_jsonable(mount) for mount in own)]}
    assert decided("mount", table) == [("node01", "warn", "/home/shared data is mounted soft")]


def test_nobody_keeps_the_clock() -> None:
    told = timedatectl.parse(text("timedatectl/timedatectl-ntp-inactive.txt"))
    assert not told.synchronised and told.ntp_service == "inactive"
    assert {status for _, status, _ in decided("time-daemon", {"clock": {"daemon": None}})} == {"warn"}


def test_soft_read_only_and_good_mounts() -> None:
    soft = decided(
        "mount", mounted(proc_mounts.parse(text("proc-mounts/proc-mounts-nfs3-soft-small-rsize.txt")), "/home/shared data")
    )
    assert {(status, observed.partition(": ")[2] or observed) for _, status, observed in soft} == {
        ("fail", "NFS version 3"),
        ("fail", "/mnt/shared is mounted soft"),
        ("warn", "rsize=32768, wsize=32768"),
        ("warn", "no nconnect"),
    }
    read_only = decided("mount", mounted(proc_mounts.parse(text("proc-mounts/proc-mounts-ipv6-ro.txt")), "/mnt/data"))
    assert ("node01", "fail", "/mnt/shared is mounted read-only") in read_only
    good = decided("mount", mounted(findmnt.parse(text("findmnt/findmnt-nfs4-hard.json")), "/mnt/ckpt"))
    assert [status for _, status, _ in good] == ["pass"]


def decision(value: float, limits: Limits) -> str:
    return "fail" if value < limits.fail_gbit_s else "warn" if value < limits.warn_gbit_s else "pass"


@pytest.mark.parametrize(
    ("name", "rate_gbit_s", "status"), [("10g-many-retransmits", 10.0, "warn"), ("25g-4-streams-good", 25.0, "pass")]
)
def test_what_was_received_over_tcp(name: str, rate_gbit_s: float, status: str) -> None:
    found = iperf3.parse(text(f"iperf3/{name}.json"))
    assert found.received_gbit_s is not None
    assert decision(found.received_gbit_s, tcp_limits(rate_gbit_s, 1500, Expect())) == status


@pytest.mark.parametrize(
    ("name", "rate_gbit_s"),
    [("write_bw-gbsec-100g-freq-line", 100.0), ("write_bw-mbsec-old-all-sizes-25g", 25.0), ("write_bw-mibsec-new-25g", 25.0)],
)
def test_what_rdma_wrote(name: str, rate_gbit_s: float) -> None:
    """Whatever unit was printed: against the ceiling of its own packet size."""
    found = perftest.parse(text(f"perftest/{name}.txt"))
    largest = found.largest()
    assert largest is not None and found.mtu_bytes is not None
    assert decision(largest.bw_average_gbit_s, rdma_limits(rate_gbit_s, found.mtu_bytes, Expect())) == "pass"


def test_a_short_way_there_and_back() -> None:
    (row,) = perftest.parse(text("perftest/send_lat-two-freq-lines.txt")).latency_rows
    assert row.t_typical_us is not None and row.t_typical_us < Expect().rdma_latency_warn_us
