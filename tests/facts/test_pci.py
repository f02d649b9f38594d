"""The PCI bus as the probe reads it from a folder that looks like sysfs."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import pytest

from netcheck import probe
from netcheck.facts import pci
from netcheck.facts.question import Reply
from r4090c.model import PciDevice
from tests.lab.gpus import GpuBox


def read(devices: Path) -> dict[str, PciDevice]:
    answer = probe.native_pci(str(devices))
    return {device.pci: device for device in pci.parse(Reply(natives={"pci": answer}))}


def test_a_box_with_eight_gpus_and_two_network_cards(tmp_path: Path) -> None:
    box = GpuBox().with_card(3, width=8, slot_width=8, gen=4, aer={"aer_dev_fatal": "Undefined 0\nSDES 2\nTOTAL_ERR_FATAL 2\n"})
    found = read(box.write_pci(tmp_path))
    assert [device.pci for device in found.values() if device.kind == "gpu"] == [card.pci for card in box.cards]
    assert [device.hcas for device in found.values() if device.kind == "nic"] == [(f"mlx5_{number}",) for number in range(4)]
    first, narrow, nic = found["0000:03:00.0"], found["0000:5b:00.0"], found["0000:a0:00.0"]
    assert (first.width, first.width_max, first.speed_gt_s, first.speed_max_gt_s, first.numa) == (16, 16, 2.5, 16.0, 3)
    assert (first.upstream, first.upstream_width_max, first.driver, first.iommu) == (("0000:02:01.1",), 16, "nvidia", "identity")
    assert (first.acs, first.aspm) == ((), ())
    assert (narrow.width, narrow.speed_gt_s, narrow.upstream_width_max) == (8, 16.0, 8)
    assert narrow.aer == {
        "correctable/TOTAL_ERR_COR": 0,
        "nonfatal/TOTAL_ERR_NONFATAL": 0,
        "fatal/SDES": 2,
        "fatal/TOTAL_ERR_FATAL": 2,
    }
    assert (nic.netdevs, nic.vendor, nic.driver) == (("eth0",), "15b3", "mlx5_core")


def test_what_is_neither_a_gpu_nor_a_network_card_is_left_out(tmp_path: Path) -> None:
    for name, (kind, vendor) in {
        "0000:00:00.0": ("0x060000", "0x8086"),
        "0000:01:00.0": ("0x030000", "0x1a03"),  # the board's own display
        "0000:03:00.1": ("0x040300", "0x10de"),  # the sound of a GPU
        "0000:41:00.0": ("0x030200", "0x10de"),
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "class").write_text(f"{kind}\n")
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
    assert list(read(tmp_path)) == ["0000:41:00.0"]
    assert read(tmp_path / "not-there") == {}


def capability(kind: int, version: int, following: int, *registers: int) -> bytes:
    return struct.pack("<L", kind | version << 16 | following << 20) + struct.pack(f"<{len(registers)}L", *registers)


@pytest.mark.parametrize(
    ("extended", "control"),
    [
        (capability(0x0001, 1, 0x140) + bytes(60) + capability(0x000D, 1, 0, 0x001D_003F), 0x001D),
        (capability(0x000D, 1, 0, 0x0000_003F), 0),
        (capability(0x0001, 1, 0), 0),
        (bytes(64), 0),
        (b"\xff" * 64, None),  # a bridge that no longer answers
        (b"", 0),  # 256 bytes: conventional PCI
    ],
)
def test_the_access_control_of_a_bridge(tmp_path: Path, extended: bytes, control: int | None) -> None:
    config = tmp_path / "config"
    config.write_bytes(bytes(0x100) + extended)
    if extended and extended[0] != 0xFF:
        config.write_bytes((bytes(0x100) + extended).ljust(4096, b"\0"))
    assert probe.acs_control(str(config)) == control


def test_another_account_than_root_sees_no_access_control(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_bytes(bytes(64))
    assert probe.acs_control(str(config)) is None
    assert probe.acs_control(str(tmp_path / "none")) is None


def test_a_server_full_of_other_functions_is_read_in_milliseconds(tmp_path: Path) -> None:
    devices = GpuBox().write_pci(tmp_path)
    for number in range(300):
        (tmp_path / "other" / str(number)).mkdir(parents=True)
        (tmp_path / "other" / str(number) / "class").write_text("0x088000\n")
        (devices / f"0000:{0x10 + number // 8:02x}:1f.{number % 8}").symlink_to(tmp_path / "other" / str(number))
    took_s = []
    for _ in range(5):
        started = time.process_time()
        assert len(probe.native_pci(str(devices))) == 12
        took_s.append(time.process_time() - started)
    assert min(took_s) < 0.05  # 4 ms where it was written; this one notices a walk that has gone quadratic


def test_who_owns_this_process() -> None:
    import os

    owners = probe.native_owners(None)
    assert os.getpid() in owners[str(os.getuid())]
