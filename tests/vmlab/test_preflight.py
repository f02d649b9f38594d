"""`r4090c preflight` as a whole before two nodes with RDMA: healthy, then with the faults that people have."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.vmlab import VmLab
from tests.vmlab.two_ends import of, preflight, worst

pytestmark = pytest.mark.vm

RDMA = ("--only", "rdma,rdma-bandwidth,rdma-latency")
ROCE_PORT = 4791
"""UDP port of RoCE v2 (InfiniBand Architecture Specification, annex A17)."""

Findings = list[dict[str, str]]


def links(findings: Findings, check: str) -> dict[str, dict[str, str]]:
    """Return subject -> finding of one check."""
    return {each["subject"]: each for each in findings if each["check"] == check}


def test_healthy_nodes_are_fit(vmlab: VmLab, tmp_path: Path) -> None:
    """Two things are left out: `software`, as the nodes have no torch and the preflight rightly says so, and `ssh-mesh`, as four
    logins at once take two emulated processors on a busy machine longer than the 10 s it allows for one.
    """
    code, findings = preflight(vmlab.cluster_file, tmp_path, "--skip", "software,ssh-mesh")
    assert code == 0, [each for each in findings if each["status"] not in ("pass", "skip")]
    assert not [each for each in findings if each["status"] in ("fail", "unknown")]
    for check in ("rdma-port", "rdma-mtu", "rdma-bandwidth", "rdma-latency", "mount", "shared-path", "tcp-bandwidth"):
        for name in vmlab.machines:
            assert worst(findings, check, name)["status"] == "pass", check
    assert worst(findings, "rdma-bandwidth", "node01")["observed"].count("Gbit/s") == 2, "sends and receives"


def test_what_an_emulated_processor_carries_is_not_enough_for_a_real_network(vmlab: VmLab, tmp_path: Path) -> None:
    """The same measurement before the thresholds of a 100 Gbit/s network: real figures, judged."""
    expect = {"rdma_latency_warn_us": 3.0, "rdma_latency_fail_us": 5.0}
    cluster = vmlab.write_cluster(tmp_path / "cluster.yaml", expect=expect)
    wish = yaml.safe_load(cluster.read_text())
    wish["network"]["rate_gbit_s"] = 100
    cluster.write_text(yaml.safe_dump(wish))
    code, findings = preflight(cluster, tmp_path, *RDMA)
    assert code == 1
    slow = [each for each in findings if each["check"] == "rdma-bandwidth"]
    assert {each["status"] for each in slow} == {"fail"}
    assert "all links are slow" in slow[0]["observed"]
    assert "packets of 4096 bytes" in slow[0]["observed"]
    assert "98" in slow[0]["expected"], "100 Gbit/s less the headers"
    late = [each for each in findings if each["check"] == "rdma-latency"]
    assert {each["status"] for each in late} == {"fail"}
    assert "expect.rdma_latency_warn_us" in late[0]["expected"]


def test_each_node_has_a_gid_index_of_its_own(fresh_vmlab: VmLab, tmp_path: Path) -> None:
    """Addresses that came and went leave the data network's GID at another index: never "always 3", never the same everywhere."""
    fresh_vmlab.sh(
        "node02",
        "ip address add 10.99.0.2/24 dev eth0; ip address delete 10.77.0.2/24 dev eth0; ip address add 10.88.0.2/24 dev eth0;"
        "ip address add 10.77.0.2/24 dev eth0",
    )
    code, findings = preflight(fresh_vmlab.cluster_file, tmp_path, *RDMA)
    assert code == 0, findings
    assert "GID index 1" in worst(findings, "rdma-port", "node01")["observed"]
    assert "GID index 3" in worst(findings, "rdma-port", "node02")["observed"]
    assert worst(findings, "rdma-bandwidth", "node02")["status"] == "pass"


def test_a_node_whose_gid_is_of_another_network(fresh_vmlab: VmLab, tmp_path: Path) -> None:
    fresh_vmlab.sh("node02", "ip address add 10.99.0.2/24 dev eth0; ip address delete 10.77.0.2/24 dev eth0")
    code, findings = preflight(fresh_vmlab.cluster_file, tmp_path, "--quick", "--only", "nic,rdma-port")
    assert code == 1
    assert worst(findings, "rdma-port", "node02")["status"] == "fail"
    assert worst(findings, "data-interface", "node02")["status"] == "fail"
    assert worst(findings, "rdma-port", "node01")["status"] == "pass"


def test_an_rdma_device_over_the_wrong_card(fresh_vmlab: VmLab, tmp_path: Path) -> None:
    fresh_vmlab.sh("node02", "rdma link delete rxe0; rdma link add rxe0 type rxe netdev eth1")
    code, findings = preflight(fresh_vmlab.cluster_file, tmp_path, *RDMA)
    assert code == 1
    found = worst(findings, "rdma-port", "node02")
    assert found["status"] == "fail"
    assert "eth1" in found["observed"]
    assert {each["status"] for each in of(findings, "rdma-bandwidth", "node02")} <= {"skip"}, "nothing to measure with"


def test_rdma_that_does_not_get_through_while_tcp_does(fresh_vmlab: VmLab, tmp_path: Path) -> None:
    """What a firewall, a VLAN or a switch does that knows nothing of RoCE: the ports are ACTIVE, the GIDs are right.

    A real card gives up after seven tries ("Failed status 12"). rxe takes seven for "for ever", and perftest waits in silence:
    the measurement's own limit ends it.
    """
    chain = "add table inet f; add chain inet f in { type filter hook input priority 0; }"
    fresh_vmlab.sh("node02", f"nft '{chain}; add rule inet f in udp dport {ROCE_PORT} drop'")
    code, findings = preflight(fresh_vmlab.cluster_file, tmp_path, "--only", "rdma,bandwidth")
    assert code in (1, 3)
    for name in fresh_vmlab.machines:
        assert worst(findings, "rdma-port", name)["status"] == "pass"
        assert worst(findings, "tcp-bandwidth", name)["status"] == "pass"
    link = links(findings, "rdma-bandwidth")["node01->node02"]
    assert link["status"] in ("fail", "unknown")
    assert link["remedy"]
    assert not [each for each in findings if each["check"].startswith("rdma-b") and each["status"] == "pass"]
    assert running(fresh_vmlab, "ib_") == []


def running(lab: VmLab, prefix: str) -> list[str]:
    """Return the programs called so that run on any node."""
    names = [line for name in lab.machines for line in lab.sh(name, "ps -eo comm=").stdout.splitlines()]
    return [name for name in names if name.startswith(prefix)]


def test_small_packets(fresh_vmlab: VmLab, tmp_path: Path) -> None:
    """Net devices left at 1500: RDMA takes 1024 bytes in silence."""
    for name in fresh_vmlab.machines:
        fresh_vmlab.sh(name, "ip link set eth0 mtu 1500")
        fresh_vmlab.sh(name, "timeout 20 sh -c 'until ibv_devinfo | grep -q active_mtu:.*1024; do sleep 0.2; done'")
    _, findings = preflight(fresh_vmlab.cluster_file, tmp_path, *RDMA)
    for name in fresh_vmlab.machines:
        found = worst(findings, "rdma-mtu", name)
        assert found["status"] == "warn"
        assert "1024" in found["observed"]
        assert worst(findings, "rdma-bandwidth", name)["status"] == "pass", "it works all the same"
