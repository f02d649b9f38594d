"""The kernel log in the shapes people send it: Xids, AER, OOM, NFS, slots."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netcheck.tools import kernel_log
from r4090c.errors import ParseError
from r4090c.model import AerEvent, KernelLog, Xid
from tests.tools.samples import expected, files

SEVERITY = {"Corrected": "corrected", "Uncorrectable (Non-Fatal)": "nonfatal", "Uncorrectable (Fatal)": "fatal"}


@pytest.mark.parametrize("file", files("kernel-log"), ids=lambda file: file.name)
def test_fixture(file: Path) -> None:
    expect, log = expected(file), kernel_log.parse(file.read_text())
    if "xids" in expect or "events" in expect:
        told = [{"xid": xid.xid, "pci": xid.pci, "pid": xid.pid} for xid in log.xids]
        wanted = [{key: xid[key] for key in ("xid", "pci", "pid")} for xid in expect.get("xids") or expect.get("events", [])]
        assert told == wanted
    if "root_xid" in expect:
        assert log.xids[0].xid == expect["root_xid"]
    if "aer" in expect:
        assert [(event.pci, event.severity, list(event.bits)) for event in log.aer] == [
            (event["bdf"], SEVERITY[event["severity"]], event["bits"]) for event in expect["aer"]
        ]
    for pci, counts in expect.get("aer_counts", {}).items():
        for severity, count in counts.items():
            assert sum((event.pci, event.severity) == (pci, SEVERITY[severity]) for event in log.aer) == count
    if "span_s" in expect:
        assert (log.aer[-1].time_s or 0) - (log.aer[0].time_s or 0) == pytest.approx(expect["span_s"])
        assert {bit for event in log.aer for bit in event.bits} == set(expect["bits"])
    if "oom_kills" in expect:
        assert log.oom_kills == tuple((kill["pid"], kill["comm"]) for kill in expect["oom_kills"])


FAULT = "NVRM: Xid (PCI:0000:81:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("stamp", "time_s"),
    [
        ("[481345.011879] ", 481345.011879),
        ("[    5.011879] ", 5.011879),
        ("[481345.011879] [ T1234] ", 481345.011879),
        ("[481345.011879][    C3] ", 481345.011879),
        ("<4>[481345.011879] ", 481345.011879),
        ("kern  :warn  : [481345.011879] ", 481345.011879),
        ("4,1203,481345011879,-;", 481345.011879),
        ("4,1203,481345011879,c,caller=T77;", 481345.011879),
        ("[481345.011879] node02 kernel: ", 481345.011879),
        ("Oct 03 17:20:08 node02 kernel: ", None),
        ("Oct  3 17:20:08 node02 kernel: [481345.011879] ", 481345.011879),
        ("Oct 03 17:20:08.123456 node02 kernel: ", None),
        ("[Thu Oct  1 18:30:14 2026] ", 1790879414.0),
        ("2026-10-01T18:30:14+0000 node02 kernel: ", 1790879414.0),
        ("2026-10-01T20:30:14.500000+0200 node02 kernel: ", 1790879414.5),
        ("2026-10-01T20:30:14.500000+02:00 node02 kernel: [481345.011879] ", 481345.011879),
        ("2026-10-01T18:30:14,500000+00:00 ", 1790879414.5),
        ("Thu 2026-10-01 18:30:14 UTC node02 kernel: ", 1790879414.0),
        ("1790879414.250000 node02 kernel: ", 1790879414.25),
        ("node02: [481345.011879] ", 481345.011879),
        ("[Mon Feb 31 18:30:14 2026] ", None),
    ],
)
def test_stamps(stamp: str, time_s: float | None) -> None:
    told = "GPU has fallen off the bus."
    assert kernel_log.parse(f"{stamp}{FAULT}\n") == KernelLog(xids=(Xid(79, "0000:81:00", None, time_s, told),))
    assert kernel_log.parse(f"{stamp}usb 1-1: new device\n") == KernelLog()


@pytest.mark.parametrize(
    ("words", "xid"),
    [
        (
            "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.",
            Xid(79, "0000:01:00", text="GPU has fallen off the bus."),
        ),
        ("NVRM: Xid (PCI:00000000:C1:00): 48, pid=7, name=python3, DBE", Xid(48, "0000:c1:00", 7, text="DBE")),
        ("NVRM: Xid (0000:01:00): 13, Graphics SM Warp Exception", Xid(13, "0000:01:00", text="Graphics SM Warp Exception")),
        (
            "NVRM: Xid (PCI:0000:01:00): 31, pid=9, Ch 00000010, MMU Fault",
            Xid(31, "0000:01:00", 9, text="Ch 00000010, MMU Fault"),
        ),
        (
            "NVRM: Xid (PCI:0000:41:00): 45, pid=90217, name=python3.11, Ch 00000008, caused by previous Xid 109",
            Xid(45, "0000:41:00", 90217, text="Ch 00000008, caused by previous Xid 109", caused_by=109),
        ),
        ("NVRM: Xid (PCI:0000:01:00): 62", Xid(62, "0000:01:00")),
    ],
)
def test_xids(words: str, xid: Xid) -> None:
    assert kernel_log.parse(f"[1.000000] {words}\n").xids == (Xid(xid.xid, xid.pci, xid.pid, 1.0, xid.text, xid.caused_by),)


def test_what_is_one_xid_and_what_is_two() -> None:
    def line(time: float, pci: str, xid: int, pid: int) -> str:
        return f"[{time:.6f}] NVRM: Xid (PCI:{pci}): {xid}, pid={pid}, name=python, x\n"

    burst = line(10, "0000:01:00", 13, 7) + line(10, "0000:02:00", 13, 7) + line(10, "0000:01:00", 13, 7)
    assert len(kernel_log.parse(burst).xids) == 2
    later = line(10, "0000:01:00", 13, 7) + line(400, "0000:01:00", 13, 7)
    assert len(kernel_log.parse(later).xids) == 2
    others = line(10, "0000:01:00", 13, 7) + line(10, "0000:01:00", 13, 8) + line(10, "0000:01:00", 31, 8)
    assert len(kernel_log.parse(others).xids) == 3
    back = line(10, "0000:01:00", 13, 7) + line(10, "0000:01:00", 43, 7) + line(10, "0000:01:00", 13, 7)
    assert [xid.xid for xid in kernel_log.parse(back).xids] == [13, 43, 13]


def aer(*lines: str) -> tuple[AerEvent, ...]:
    return kernel_log.parse("".join(f"[1.000000] {line}\n" for line in lines)).aer


def test_aer_of_old_kernels() -> None:
    """Before 4.19 the requester is a number, and the bits have long names."""
    (event,) = aer(
        "pcieport 0000:40:03.1: AER: Multiple Corrected error received: id=4100",
        "nvidia 0000:41:00.0: PCIe Bus Error: severity=Corrected, type=Data Link Layer, id=4100(Transmitter ID)",
        "nvidia 0000:41:00.0:   device [10de:2684] error status/mask=00001100/00002000",
        "nvidia 0000:41:00.0:    [ 8] RELAY_NUM Rollover    ",
        "nvidia 0000:41:00.0:    [12] Replay Timer Timeout  (First)",
    )
    assert event == AerEvent("0000:41:00.0", "corrected", ("Rollover", "Timeout"), 1.0)


@pytest.mark.parametrize(
    ("words", "severity", "bit"),
    [
        ("Uncorrected (Non-Fatal)", "nonfatal", "CmpltTO"),
        ("Uncorrectable (Non-Fatal)", "nonfatal", "CmpltTO"),
        ("Uncorrected (Fatal)", "fatal", "CmpltTO"),
        ("Uncorrectable (Fatal)", "fatal", "CmpltTO"),
    ],
)
def test_aer_severities_of_all_kernels(words: str, severity: str, bit: str) -> None:
    (event,) = aer(
        f"pcieport 0000:80:01.1: AER: {words} error message received from 0000:81:00.0",
        f"nvidia 0000:81:00.0: PCIe Bus Error: severity={words}, type=Transaction Layer, (Requester ID)",
        "nvidia 0000:81:00.0:   device [10de:2684] error status/mask=00004000/00000000",
        "nvidia 0000:81:00.0:    [14] CmpltTO                (First)",
    )
    assert (event.severity, event.bits) == (severity, (bit,))


def test_aer_whose_lines_are_missing() -> None:
    """The kernel limits their rate: the status register tells the bits as well, less those that are masked."""
    (alone,) = aer("pcieport 0000:c0:03.1: AER: Uncorrectable (Fatal) error message received from 0000:c0:03.1")
    assert alone == AerEvent("0000:c0:03.1", "fatal", (), 1.0)
    (event,) = aer(
        "nvidia 0000:41:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)",
        "nvidia 0000:41:00.0:   device [10de:2684] error status/mask=00002041/0000a000",
    )
    assert event.bits == ("RxErr", "BadTLP")
    assert aer("nvidia 0000:41:00.0:   device [10de:2684] error status/mask=00002041/0000a000") == ()


def test_aer_told_by_the_firmware() -> None:
    (event,) = aer(
        "{1}[Hardware Error]: Hardware error from APEI Generic Hardware Error Source: 514",
        "{1}[Hardware Error]: event severity: corrected",
        "{1}[Hardware Error]:   section_type: PCIe error",
        "{1}[Hardware Error]:   device_id: 0000:41:00.0",
        "nvidia 0000:41:00.0: AER: aer_status: 0x00000001, aer_mask: 0x00000000",
        "nvidia 0000:41:00.0: AER:    [ 0] RxErr                  (First)",
    )
    assert event == AerEvent("0000:41:00.0", "corrected", ("RxErr",), 1.0)


@pytest.mark.parametrize(
    ("words", "kill"),
    [
        ("Out of memory: Killed process 60233 (python) total-vm:124483532kB, anon-rss:1kB", (60233, "python")),
        ("Killed process 77 (ray::Worker), UID 1000, total-vm:1kB", (77, "ray::Worker")),
        ("Memory cgroup out of memory: Killed process 5 (pt_data (0)) total-vm:1kB", (5, "pt_data (0)")),
    ],
)
def test_oom(words: str, kill: tuple[int, str]) -> None:
    assert kernel_log.parse(f"[1.000000] {words}\n").oom_kills == (kill,)


def test_nfs_servers_that_came_back_are_not_silent() -> None:
    lines = [
        "nfs: server nas01 not responding, still trying",
        "nfs: server nas02 not responding, timed out",
        "nfs: server nas03 not responding, still trying",
        "nfs: server nas01 OK",
    ]
    log = kernel_log.parse("".join(f"[{second}.000000] {line}\n" for second, line in enumerate(lines)))
    assert log.nfs_silent == ("nas02", "nas03")


def test_slots_that_limit() -> None:
    limit = (
        "63.008 Gb/s available PCIe bandwidth, limited by 8.0 GT/s PCIe x8 link at 0000:40:03.1 "
        "(capable of 252.048 Gb/s with 16.0 GT/s PCIe x16 link)"
    )
    whole = "126.016 Gb/s available PCIe bandwidth (16.0 GT/s PCIe x8 link)"
    log = kernel_log.parse(f"[1.000000] mlx5_core 0000:41:00.0: {limit}\n[1.100000] mlx5_core 0000:61:00.0: {whole}\n")
    assert log.pcie_limited == (("0000:41:00.0", limit),)


@pytest.mark.parametrize(
    "boundary",
    [
        "-- Reboot --",
        "-- Boot 0a1b2c3d4e5f60718293a4b5c6d7e8f9 --",
        "[    0.000000] Linux version 6.8.0-45-generic (buildd@x)",
        "Oct 03 17:20:08 node02 kernel: Linux version 6.8.0-45-generic",
        "5,0,0,-;Linux version 6.8.0-45-generic",
    ],
)
def test_what_was_before_the_last_boot_does_not_count(boundary: str) -> None:
    assert kernel_log.parse(f"[9.000000] {FAULT}\n{boundary}\n[1.000000] usb 1-1: new device\n") == KernelLog()


@pytest.mark.parametrize(
    "odd",
    [
        "",
        "dmesg: read kernel buffer failed: Operation not permitted\n",
        "No journal files were opened due to insufficient permissions.\n",
        "-- No entries --\n",
        "2026-10-14 09:02:11 INFO step 1 loss 2.3\n",
        "{'loss': 1.7, 'epoch': 0.03}\n",
    ],
)
def test_what_cannot_be_read_is_not_a_log_without_faults(odd: str) -> None:
    with pytest.raises(ParseError):
        kernel_log.parse(odd)


@given(st.lists(st.sampled_from([line for file in files("kernel-log") for line in file.read_text().splitlines()]), max_size=30))
def test_lines_in_any_order_are_never_more_events_than_lines(lines: list[str]) -> None:
    log = kernel_log.scan(lines)
    assert len(log.xids) + len(log.aer) + len(log.oom_kills) <= len(lines)
