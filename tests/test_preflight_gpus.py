"""The preflight of nodes with GPUs, over real SSH: stand-ins say what a box with eight cards says, healthy and not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from r4090c.errors import Exit
from tests.lab import Lab
from tests.lab.gpus import RECORDED, GpuBox, installed

pytestmark = pytest.mark.lab
REPOSITORY = Path(__file__).resolve().parents[1]
HEALTHY = GpuBox()
FELL_OFF = "[    0.000000] Linux version 6.8.0-45-generic\n" + (
    RECORDED / "kernel-log/aer-fatal-then-xid79.txt"
).read_text().replace("0000:81:00", "0000:83:00").replace("0000:80:01.1", "0000:82:01.1")


def quick(lab: Lab, *words: str, skip: str = "") -> tuple[int, list[dict[str, Any]], float]:
    """Return exit code, findings of the gpu, pcie and topology checks, and how long it took; every node states eight GPUs."""
    wish = yaml.safe_load(lab.cluster_file.read_text())
    for node in wish["nodes"]:
        node["gpus"] = 8
    file = lab.directory / "gpus.yaml"
    file.write_text(yaml.safe_dump(wish))
    argv = ["--cluster", str(file), "preflight", "--quick", "--only", "gpu,pcie,topology", "--json", *words]
    if skip:
        argv += ["--skip", skip]
    environment = {key: value for key, value in os.environ.items() if key != "R4090C_CLUSTER"}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", "from r4090c.cli import main; main()", *argv],
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
        env={**environment, "R4090C_STATE": "/dev/null", "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["findings"], time.monotonic() - started


def bad(findings: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    return {(one["check"], one["subject"], one["status"]) for one in findings if one["status"] not in ("pass", "skip")}


def one(findings: list[dict[str, Any]], check: str, subject: str) -> dict[str, Any]:
    (found,) = [finding for finding in findings if (finding["check"], finding["subject"]) == (check, subject)]
    return found


@pytest.fixture
def boxes(mended_lab4: Lab) -> Iterator[Any]:
    """Yield a function that makes the lab's nodes the boxes it is given, the healthy one where none is given."""
    with ExitStack() as stack:

        def make(**by_node: GpuBox) -> Lab:
            for name in mended_lab4.nodes:
                stack.enter_context(installed(mended_lab4, name, by_node.get(name, HEALTHY)))
            return mended_lab4

        yield make


def test_a_healthy_cluster_of_8x4090_gives_no_warning(boxes: Any) -> None:
    code, findings, _ = quick(boxes())
    told = [one for one in findings if one["status"] != "pass" and one["observed"] != "not measured"]
    assert told == []
    assert code == Exit.OK
    expected = {
        "gpu-count",
        "gpu-uniform",
        "gpu-driver",
        "gpu-faults",
        "gpu-xid",
        "gpu-processes",
        "gpu-throttle",
        "gpu-persistence",
    }
    expected |= {"gpu-power-limit", "gpu-pcie-width", "nic-pcie-link", "aer", "pcie-settings", "gpu-p2p-grant", "gpu-bar1"}
    assert expected | {"gpu-topology"} <= {one["check"] for one in findings if one["status"] == "pass"}
    assert one(findings, "gpu-count", "node01")["observed"] == "8 GPUs, 8 on the PCI bus"
    plan = one(findings, "gpu-topology", "node01")["observed"]
    assert plan == "gpu5 mlx5_0 (PHB); gpu0-4,6-7 mlx5_0 (SYS)"
    assert one(findings, "pcie-settings", "node01")["observed"] == "IOMMU pass-through, no ASPM"


def test_a_narrow_slot_a_lost_card_and_an_old_driver(boxes: Any) -> None:
    """Three nodes of four have a fault each; each is named where it is, and nothing else is."""
    lab = boxes(
        node02=HEALTHY.with_card(3, width=8, width_max=8, slot_width=8).with_card(6, width=8),
        node03=replace(HEALTHY, lost=(4,), kernel_log=FELL_OFF).with_card(
            4, aer={"aer_dev_fatal": "SDES 1\nTOTAL_ERR_FATAL 1\n"}
        ),
        node04=replace(HEALTHY, driver="525.60.13", old=True),
    )
    code, findings, _ = quick(lab)
    assert code == Exit.FAILED
    assert bad(findings) == {
        ("gpu-pcie-width", "node02/gpu3", "fail"),
        ("gpu-pcie-width", "node02/gpu6", "warn"),
        ("gpu-count", "node03", "fail"),
        ("gpu-faults", "node03/0000:83:00.0", "fail"),
        ("gpu-xid", "node03/0000:83:00", "fail"),
        ("gpu-processes", "node03", "unknown"),  # nobody can say what runs on the lost card
        ("aer", "node03/0000:83:00.0", "fail"),
        ("gpu-driver", "node04", "fail"),
    }
    slot = one(findings, "gpu-pcie-width", "node02/gpu3")
    assert "the slot itself (0000:5a:01.1) has 8 lanes" in slot["why"]
    assert "0000:5a:01.1" in slot["remedy"]
    xid = one(findings, "gpu-xid", "node03/0000:83:00")
    assert "Xid 79 (fallen off the bus)" in xid["observed"]
    assert "fatal SDES at 0000:82:01.1" in xid["observed"]
    assert "riser" in xid["why"]
    assert one(findings, "gpu-count", "node03")["observed"] == "7 GPUs, 1 lost (0000:83:00.0), 8 on the PCI bus"


def test_settings_programs_and_grants(boxes: Any) -> None:
    lab = boxes(
        node01=replace(HEALTHY, processes=((1, 2, "python", 21000), (999999, 5, "python", 4000))).with_card(2, used_mib=21010),
        node02=replace(HEALTHY, p2p="OK", throttle=("HW Slowdown", "HW Power Brake Slowdown")),
        node03=HEALTHY.with_card(7, persistence=False, power_limit_w=300.0, memory_mib=49140),
        node04=replace(HEALTHY.with_card(1, driver=None), cards=HEALTHY.cards[:7]),
    )
    _, findings, _ = quick(lab)
    assert bad(findings) == {
        ("gpu-processes", "node01/gpu2", "warn"),
        ("gpu-processes", "node01/gpu5", "fail"),
        ("gpu-p2p-grant", "node02", "warn"),
        *(("gpu-throttle", f"node02/gpu{index}", "fail") for index in range(8)),
        ("gpu-persistence", "node03", "warn"),
        ("gpu-power-limit", "node03/gpu7", "warn"),
        ("gpu-uniform", "node03/gpu7", "fail"),
        ("gpu-count", "node04", "fail"),
    }
    assert one(findings, "gpu-count", "node04")["why"].startswith("the PCI bus does not have it either")
    assert "owner not told" in one(findings, "gpu-processes", "node01/gpu5")["observed"]


@pytest.mark.slow
def test_nvidia_smi_that_hangs_or_prints_garbage_is_unknown_and_holds_nobody_up(boxes: Any) -> None:
    lab = boxes(node02=replace(HEALTHY, hangs=True), node03=replace(HEALTHY, garbage="Segmentation fault (core dumped)"))
    code, findings, took_s = quick(lab, skip="nic-pcie-link")
    assert code == Exit.UNKNOWN
    assert took_s < 80  # five questions to the hung one, all at the same time
    found = bad(findings)
    assert {subject for _, subject, _ in found} == {"node02", "node03"}
    assert {status for _, _, status in found} == {"unknown"}
    driver = {"gpu-count", "gpu-uniform", "gpu-driver", "gpu-faults", "gpu-processes", "gpu-throttle", "gpu-persistence"}
    driver |= {"gpu-power-limit", "gpu-pcie-width", "gpu-p2p-grant", "gpu-bar1", "gpu-topology"}
    assert {check for check, subject, _ in found if subject == "node02"} == driver
    assert "no answer in 20 s" in one(findings, "gpu-count", "node02")["observed"]
    assert "Segmentation fault" in one(findings, "gpu-count", "node03")["observed"]
    assert one(findings, "aer", "node02")["status"] == "pass"  # sysfs and kernel log still tell
    assert lab.processes("node02") == []


def test_a_log_that_nobody_may_read_is_told_with_what_opens_it(boxes: Any) -> None:
    lab = boxes()
    for program in ("dmesg", "journalctl"):
        lab.stand_in("node03", program, "#!/bin/sh\necho 'read kernel buffer failed: Operation not permitted' >&2\nexit 1\n")
    try:
        code, findings, _ = quick(lab)
    finally:
        (lab.bin("node03") / "journalctl").unlink()
    assert bad(findings) == {("gpu-xid", "node03", "unknown")}
    assert code == Exit.UNKNOWN
    told = one(findings, "gpu-xid", "node03")
    assert "kernel log not readable as this user" in told["observed"]
    assert "CAP_SYSLOG" in told["why"] and "dmesg" in told["remedy"]  # the login of the lab is root's
