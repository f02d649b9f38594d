"""What grew between two readings, and whether it means loss."""

from __future__ import annotations

from glob import glob
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netcheck.counters import GPUS, NET, RDMA, SNMP, Growth, Kind, globs, growth, judged

NIC = f"{NET}/eth0/device/net/eth0/statistics"
AER = f"{NET}/eth0/device/aer_dev_"
SNMP_TEXT = "Ip: Forwarding\nIp: 1\nTcp: RtoAlgorithm RetransSegs InErrs\nTcp: 1 {} {}\nUdp: InErrors\nUdp: 5\n"


@pytest.mark.parametrize(
    ("path", "before", "after", "grew"),
    [
        (f"{NIC}/rx_crc_errors", "0\n", "12\n", Growth("eth0", "rx_crc_errors", 12, Kind.LOSS)),
        (f"{NIC}/rx_errors", "3\n", "5\n", Growth("eth0", "rx_errors", 2, Kind.LOSS)),
        (f"{NIC}/rx_missed_errors", "0", "1", Growth("eth0", "rx_missed_errors", 1, Kind.LOSS)),
        (f"{NIC}/rx_dropped", "0\n", "9\n", Growth("eth0", "rx_dropped", 9, Kind.INFO)),
        (f"{NIC}/tx_dropped", "0\n", "9\n", Growth("eth0", "tx_dropped", 9, Kind.INFO)),
        (
            f"{NET}/bond0/lower_eth1/device/net/eth1/statistics/tx_carrier_errors",
            "0",
            "1",
            Growth("eth1", "tx_carrier_errors", 1, Kind.LOSS),
        ),
        (f"{NIC}/rx_crc_errors", "7\n", "7\n", None),
        (f"{NIC}/rx_crc_errors", "7\n", "0\n", None),  # the driver was loaded anew
        (f"{NIC}/rx_crc_errors", "n/a\n", "3\n", None),
        (
            f"{RDMA}/mlx5_0/device/infiniband/mlx5_0/ports/1/hw_counters/out_of_sequence",
            "4",
            "6",
            Growth("mlx5_0:1", "out_of_sequence", 2, Kind.LOSS),
        ),
        (
            f"{RDMA}/mlx5_0/device/infiniband/mlx5_0/ports/1/hw_counters/np_cnp_sent",
            "4",
            "600",
            Growth("mlx5_0:1", "np_cnp_sent", 596, Kind.INFO),
        ),
        (
            f"{RDMA}/mlx5_0/device/infiniband/mlx5_0/ports/2/counters/symbol_error",
            "0",
            "1",
            Growth("mlx5_0:2", "symbol_error", 1, Kind.LOSS),
        ),
        (
            f"{AER}correctable",
            "RxErr 0\nBadTLP 2\nTOTAL_ERR_COR 2\n",
            "RxErr 3\nBadTLP 2\nTOTAL_ERR_COR 5\n",
            Growth("card of eth0", "correctable/RxErr", 3, Kind.CORRECTED),
        ),
        (f"{AER}nonfatal", "CmpltTO 0\n", "CmpltTO 1\n", Growth("card of eth0", "nonfatal/CmpltTO", 1, Kind.UNCORRECTED)),
        (
            f"{NET}/eth0/device/../aer_dev_fatal",
            "DLP 0\n",
            "DLP 1\n",
            Growth("slot of eth0", "fatal/DLP", 1, Kind.UNCORRECTED),
        ),
        (
            "/sys/bus/pci/drivers/nvidia/0000:41:00.0/aer_dev_fatal",
            "DLP 0\n",
            "DLP 1\n",
            Growth("0000:41:00.0", "fatal/DLP", 1, Kind.UNCORRECTED),
        ),
        (SNMP, SNMP_TEXT.format(5, 0), SNMP_TEXT.format(25, 0), Growth("tcp", "RetransSegs", 20, Kind.INFO)),
    ],
)
def test_what_grew(path: str, before: str, after: str, grew: Growth | None) -> None:
    assert growth({path: before}, {path: after}) == (() if grew is None else (grew,))


def test_what_is_there_in_only_one_reading_says_nothing() -> None:
    assert growth({}, {f"{NIC}/rx_errors": "5"}) == ()
    assert growth({f"{NIC}/rx_errors": "5"}, {}) == ()


def test_one_device_over_two_paths_counts_once() -> None:
    other = f"{NET}/bond0/lower_eth0/device/net/eth0/statistics/rx_errors"
    before, after = {f"{NIC}/rx_errors": "1", other: "1"}, {f"{NIC}/rx_errors": "4", other: "4"}
    assert growth(before, after) == (Growth("eth0", "rx_errors", 3, Kind.LOSS),)


def test_what_no_real_hardware_counts_is_not_judged() -> None:
    assert judged({SNMP: SNMP_TEXT.format(1, 2), f"{NIC}/rx_dropped": "3"}) == 0
    assert judged({f"{NIC}/rx_errors": "3", f"{AER}fatal": "DLP 0\nSDES 0\nTOTAL_ERR_FATAL 0\n"}) == 3


def test_the_globs_find_real_cards_and_nothing_virtual(tmp_path: Path) -> None:
    """sysfs as the kernel lays it out: a card, a bond of cards, a veth."""
    root, pci = tmp_path / "sys", tmp_path / "sys" / "devices" / "pci" / "0000:41:00.0"
    for path in (pci / "net" / "eth0" / "statistics", root / "devices" / "virtual" / "net" / "veth0" / "statistics"):
        path.mkdir(parents=True)
        for name in ("rx_errors", "rx_crc_errors", "tx_dropped", "rx_bytes"):
            (path / name).write_text("0\n")
    (pci / "aer_dev_fatal").write_text("DLP 0\n")
    (pci.parent / "aer_dev_fatal").write_text("DLP 0\n")
    bond = root / "devices" / "virtual" / "net" / "bond0"
    bond.mkdir(parents=True)
    (pci / "net" / "eth0" / "device").symlink_to(pci)
    (bond / "lower_eth0").symlink_to(pci / "net" / "eth0")
    (root / "class" / "net").mkdir(parents=True)
    for where in (pci / "net" / "eth0", root / "devices" / "virtual" / "net" / "veth0", bond):
        (root / "class" / "net" / where.name).symlink_to(where)

    def found(*ifaces: str) -> set[str]:
        patterns = [f"{tmp_path}{each}" for each in globs(ifaces, ())]
        return {path.removeprefix(str(tmp_path)) for each in patterns for path in glob(each)}  # noqa: PTH207 -- as on the node

    own = {f"{NIC}/{name}" for name in ("rx_errors", "rx_crc_errors", "tx_dropped")}
    assert found("eth0") == {*own, f"{AER}fatal", f"{NET}/eth0/device/../aer_dev_fatal"}
    assert found("veth0") == set()
    assert {path for path in found("bond0") if "statistics" in path} == {
        path.replace("/eth0/device", "/bond0/lower_eth0/device") for path in own
    }
    assert found("*") > own
    assert all(path.startswith((NET, RDMA, GPUS, SNMP)) for path in globs(["eth0"], ["mlx5_0"]))


@given(st.dictionaries(st.sampled_from([f"{NIC}/rx_errors", f"{AER}fatal", SNMP, "/x"]), st.text(max_size=60)))
def test_any_text_is_taken(readings: dict[str, str]) -> None:
    assert growth(readings, readings) == ()
    assert judged(readings) >= 0
