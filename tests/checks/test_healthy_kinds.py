"""Sound clusters of many kinds give no warning: what is normal in a container, a virtual machine or a desktop is no fault."""

from __future__ import annotations

import json
from typing import Any

import pytest

from netcheck.checks import REGISTRY
from netcheck.judge import judge
from r4090c.model import Status
from tests.checks.cases import HERE, build, healthy

FACTS = healthy(1)["facts"]
ROOT, SHARED = FACTS["mounts"]
IMAGE = {**ROOT, "source": "overlay", "fstype": "overlay"}
LO, MANAGEMENT, DATA, DOCKER = FACTS["net"]["ifaces"]
BOARD_NIC, GPU0, NIC, GPU1 = FACTS["pci"]
NO_PORT: dict[str, Any] = {"upstream_width_max": None, "upstream_speed_max_gt_s": None, "port_aer": {}}
NOT_ASKED = {"error": "not asked: cluster.yaml states no GPUs for this node"}
TCP = {"network": {"kind": "tcp", "rate_gbit_s": None, "mtu": None}}
NO_RDMA: dict[str, Any] = {"rdma": [], "rdma_mtu": [], "qos": []}


def wired(**change: Any) -> dict[str, Any]:
    """Return the net fact with a data interface that is otherwise."""
    return {"ifaces": [LO, MANAGEMENT, {**DATA, **change}, DOCKER]}


def ib(hca: str, state: str, netdev: str) -> dict[str, Any]:
    phys, lid = ("LinkUp", 1) if state == "ACTIVE" else ("Polling", 0)
    port = {"hca": hca, "port": 1, "state": state, "phys_state": phys, "link_layer": "InfiniBand", "rate_gbit_s": 100.0}
    return {**port, "netdev": netdev, "firmware": "16.35", "numa": 0, "gids": [], "sm_lid": lid}


KINDS: dict[str, dict[str, Any]] = {
    "containers of docker": {
        "cluster": {"nodes": {"*": {"ssh": {"user": "root", "port": 2222}}}},
        "facts": {
            "mounts": [IMAGE, SHARED],
            "kernel": {"logind": False, "remove_ipc": None, "lingering": []},
            "clock": {"daemon": None},
            "user": {"uid": 0, "gid": 0, "name": "root", "home": "/root"},
            "pci": [*FACTS["pci"], {**GPU1, "pci": "0000:c1:00.0", "upstream": ["0000:c0:01.1"]}],
            "edac": [],
        },
    },
    "containers of LXC": {
        "facts": {
            "kernel": {"container": "lxc"},
            "clock": {"daemon": None},
            "cpus": {"present": list(range(8)), "online": [0, 1], "cores": [[0], [1]]},
        },
    },
    "virtual machines with GPUs handed through": {
        "cluster": TCP,
        "facts": {
            "cpus": {"model": "QEMU Virtual CPU", "governor": None},
            "kernel": {"clocksource": "kvm-clock", "aspm_policy": None, "iommu_groups": 0, "smt": "notsupported"},
            "edac": [],
            "net": wired(speed_mbit_s=None, duplex=None),
            "pci": [
                {**BOARD_NIC, "vendor": "1af4", "width": None, "width_max": None, **NO_PORT, "iommu": "off"},
                {**GPU0, **NO_PORT, "iommu": "off", "numa": -1},
                {**GPU1, **NO_PORT, "iommu": "off", "numa": -1},
            ],
            "gpu_topology": {
                "nics": {"=": {}},
                "links": {"=": {"GPU0-GPU1": "PHB"}},
                "numa": {"=": {"0": None, "1": None}},
                "cpu_affinity": {"=": {"0": None, "1": None}},
            },
            **NO_RDMA,
        },
    },
    "one machine alone": {
        "nodes": 1,
        "cluster": {**TCP, "storage": {"kind": "local", "source": None, "mount": None}},
        "facts": {"mounts": [ROOT], "disks": [{**disk, "fstype": "ext4"} for disk in FACTS["disks"]], **NO_RDMA},
    },
    "nodes without GPUs": {
        "cluster": {**TCP, "nodes": {"*": {"gpus": 0}}},
        "facts": {
            "gpus": {"absent": "nvidia-smi"},
            **dict.fromkeys(("gpu_topology", "gpu_p2p", "gpu_detail", "gpu_processes", "kernel_log"), NOT_ASKED),
            "pci": [BOARD_NIC],
            "cpus": {"governor": "powersave", "online": [0]},
            "kernel": {"clocksource": "hpet", "numa_balancing": 1, "aspm_policy": "powersave", "remove_ipc": None, "smt": "off"},
            "limits": {"nofile": 1024},
            "memory": {"shm_total_mib": 64, "shm_free_mib": 60, "available_mib": 100_000},
            "toolchain": {"programs": {"nvcc": None, "ninja": None, "c++": None}, "cuda": None},
            **NO_RDMA,
        },
    },
    "desktop boards with 10GBASE-T, a wireless card and a VPN": {
        "cluster": {**TCP, "network": {**TCP["network"], "rate_gbit_s": 10}},
        "facts": {
            "cpus": {"model": "AMD Ryzen 9 7950X"},
            "kernel": {"numa_balancing": 0, "iommu_groups": 30},
            "edac": [],
            "net": {
                "ifaces": [
                    LO,
                    {**MANAGEMENT, "operstate": "down", "speed_mbit_s": None, "duplex": None, "addresses": []},
                    {**DATA, "mtu": 1500, "speed_mbit_s": 10_000, "link_losses": 3},
                    {"name": "wlp5s0", "operstate": "up", "mtu": 1500, "speed_mbit_s": None, "mac": "", "virtual": False}
                    | {"addresses": ["192.168.7.20/24"], "link_losses": 90},
                    {"name": "tailscale0", "operstate": "unknown", "mtu": 1280, "speed_mbit_s": None, "mac": "", "virtual": True}
                    | {"addresses": ["100.64.0.9/32"]},
                    DOCKER,
                ]
            },
            "pci": [
                {**BOARD_NIC, "netdevs": ["wlp5s0"], "aer": {"correctable/TOTAL_ERR_COR": 90_000}},
                {**GPU0, "numa": -1},
                {**NIC, "hcas": [], "width": 4, "width_max": 4, "upstream_width_max": 4, "numa": -1},
                {**GPU1, "numa": -1},
            ],
            "gpu_topology": {"numa": {"=": {"0": None, "1": None}}},
            **NO_RDMA,
        },
    },
    "a bond of two cards over TCP": {
        "cluster": {**TCP, "network": {**TCP["network"], "rate_gbit_s": 25, "mtu": 9000}},
        "facts": {
            "net": {
                "ifaces": [
                    LO,
                    MANAGEMENT,
                    {**DATA, "addresses": [], "speed_mbit_s": 25_000},
                    {**DATA, "name": "enp65s0f1", "addresses": [], "speed_mbit_s": 25_000},
                    {**DATA, "name": "bond0", "virtual": True, "speed_mbit_s": 50_000, "lower": ["enp65s0f0", "enp65s0f1"]},
                ],
                "routes": {f"10.10.0.1{number}": ["bond0", None] for number in range(1, 5)},
            },
            **NO_RDMA,
        },
    },
    "InfiniBand, one of two ports in use": {
        "cluster": {"network": {"kind": "infiniband", "mtu": None}},
        "facts": {"rdma": [ib("mlx5_0", "ACTIVE", "enp65s0f0"), ib("mlx5_1", "DOWN", "ib1")], "qos": []},
    },
    "cards rebuilt with 48 GB": {
        "facts": {"gpus": [{**gpu, "memory_total_mib": 49_140} for gpu in FACTS["gpus"]]},
    },
    "an account that may not see the kernel log": {
        "facts": {"pci": [{**device, "acs": None} for device in FACTS["pci"]]},
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_sound_cluster_gives_no_warning(kind: str) -> None:
    case = {"nodes": 2, **KINDS[kind]}
    case["facts"] = {"*": json.loads(json.dumps(case["facts"]))}
    findings = judge(*build(case), [check for check in REGISTRY if check.scope != "measurement"])
    odd = [one for one in findings if one.status not in (Status.PASS, Status.SKIP)]
    assert odd == []
    assert len({one.check for one in findings}) > 20


def test_the_kinds_are_laid_over_the_healthy_node() -> None:
    """A slip in a name would leave the healthy value in place and prove nothing."""
    for case in KINDS.values():
        assert set(case["facts"]) <= set(FACTS)
    assert (HERE / "healthy.json").exists()
