"""The judgement that facts at rest and samples under load share, and the remedy that changes a file."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from netcheck.checks._gpu import heat, narrow_link, p2p_demanded, reasons_of, slow_link, throttling
from netcheck.tools import nvidia_smi_query
from r4090c.model import Cluster, Expect, Network, Node, Paths, Ssh, Status, Storage
from tests.checks.cases import HERE

NODE = Node("node01", Ssh("10.0.0.11"), "10.0.0.11", 8, Paths("/s", "/s/runs", "/p"))
CLUSTER = Cluster("c", (NODE,), Network(), Storage(), Expect())
LOADED = nvidia_smi_query.parse((HERE.parent / "tools/fixtures/nvidia-smi-query/8x4090-load-gpu6-x8.csv").read_text())
IDLE = nvidia_smi_query.parse((HERE.parent / "tools/fixtures/nvidia-smi-query/8x4090-idle-gen1.csv").read_text())


def test_a_sample_under_load_finds_the_one_narrow_link() -> None:
    found = {gpu.index: narrow_link(gpu, None, CLUSTER, loaded=True) for gpu in LOADED}
    assert [index for index, trouble in found.items() if trouble] == [6]
    trouble = found[6]
    assert trouble is not None and (trouble.status, trouble.observed, trouble.expected) == (Status.FAIL, "x8 of x16", "x16")
    assert not any(slow_link(gpu, None, CLUSTER, loaded=True) for gpu in LOADED)


def test_generation_1_is_a_fault_only_under_load() -> None:
    assert not any(slow_link(gpu, None, CLUSTER, loaded=False) or narrow_link(gpu, None, CLUSTER, loaded=False) for gpu in IDLE)
    trouble = slow_link(IDLE[0], None, CLUSTER, loaded=True)
    assert trouble is not None and (trouble.status, trouble.observed) == (Status.FAIL, "generation 1 under load")


@pytest.mark.parametrize(
    ("bits", "status"),
    [
        (0x0, None),
        (0x1, None),  # idle
        (0x4, None),  # power cap: a lower limit may be meant
        (0x20, Status.WARN),
        (0x8, Status.FAIL),
        (0x48, Status.FAIL),
        (0x88 | 0x4, Status.FAIL),
    ],
)
def test_throttle_reasons(bits: int, status: Status | None) -> None:
    trouble = throttling(reasons_of(bits))
    assert (trouble.status if trouble else None) == status


@pytest.mark.parametrize(
    ("temperature_c", "slowdown_c", "headroom_c", "status"),
    [
        (70, 95, None, None),
        (85, 95, None, Status.WARN),
        (92, 95, None, Status.FAIL),
        (97, 95, None, Status.FAIL),
        (70, None, 11, None),
        (70, None, 10, Status.WARN),
        (None, None, 3, Status.FAIL),
        (90, None, None, None),
    ],
)
def test_heat(temperature_c: int | None, slowdown_c: int | None, headroom_c: int | None, status: Status | None) -> None:
    trouble = heat(temperature_c, slowdown_c, headroom_c, CLUSTER)
    assert (trouble.status if trouble else None) == status


@pytest.mark.parametrize(
    ("node", "common", "demanded"),
    [({}, {}, False), ({}, {"NCCL_P2P_DISABLE": "0"}, True), ({"NCCL_P2P_DISABLE": "1"}, {"NCCL_P2P_DISABLE": "0"}, False)],
)
def test_p2p_is_demanded_by_the_layer_that_wins(node: dict[str, str], common: dict[str, str], demanded: bool) -> None:
    one = Node("node01", NODE.ssh, "10.0.0.11", 8, NODE.paths, node)
    assert bool(p2p_demanded(one, Cluster("c", (one,), Network(), Storage(), Expect(), common))) == demanded


def test_the_kernel_s_command_line_is_changed_once(tmp_path: Path) -> None:
    """Run what the remedy would run as root, on a copy of /etc/default/grub."""
    findings = json.loads((HERE / "pcie-settings/iommu-translates.json").read_text())["findings"]
    (line,) = [finding["remedy"] for finding in findings if finding["status"] == "warn"]
    grub = tmp_path / "grub"
    grub.write_text('GRUB_DEFAULT=0\nGRUB_CMDLINE_LINUX_DEFAULT="quiet"\nGRUB_CMDLINE_LINUX="nomodeset"\n')
    command = shlex.split(line)[-1].replace("sudo ", "").replace("/etc/default/grub", str(grub)).replace("update-grub", "true")
    subprocess.run(["sh", "-c", command], check=True)
    assert grub.read_text() == 'GRUB_DEFAULT=0\nGRUB_CMDLINE_LINUX_DEFAULT="quiet"\nGRUB_CMDLINE_LINUX="iommu=pt nomodeset"\n'
