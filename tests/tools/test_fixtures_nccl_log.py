"""NCCL's debug log: what was really used, and what went wrong first."""

from __future__ import annotations

from pathlib import Path

import pytest

from netcheck.tools import nccl_log
from r4090c.errors import ParseError
from tests.tools.samples import expected, files, text


@pytest.mark.parametrize("file", files("nccl-log"), ids=lambda file: file.name)
def test_fixture(file: Path) -> None:
    expect, log = expected(file), nccl_log.parse(file.read_text())
    qp = log.qp_error
    for key, told in {
        "nccl_version": log.version,
        "cuda_driver": log.cuda_driver,
        "network": log.network,
        "interfaces": log.interfaces,
        "bad_interfaces": list(log.unfit_interfaces),
        "hcas": list(log.hcas),
        "transports": log.transports,
        "gdrdma": log.gdrdma,
        "nranks": log.nranks,
        "nranks_seen": log.ranks_seen,
        "init_complete": log.init_complete,
        "env": log.env,
        "errno": qp and qp.errno,
        "gid_index": qp and qp.gid_index,
        "local_gid": qp and qp.local_gid,
        "gid_is_link_local": qp and qp.link_local,
        "device": qp and (qp.hca or "").split(":")[0],
    }.items():
        if key in expect:
            assert told == expect[key], key
    if "error" in expect:
        assert log.cause is not None
        assert expect["error"] in log.cause.text
    else:
        assert log.cause is None


def test_a_grant_of_p2p_is_seen() -> None:
    assert nccl_log.parse(text("nccl-log", "p2p-direct-pointer-granted.txt")).p2p
    assert not nccl_log.parse(text("nccl-log", "roce-ib-used-two-nics.txt")).p2p


def log(*lines: str) -> nccl_log.NcclLog:
    return nccl_log.parse("".join(f"node01:10:20 [0] {line}\n" for line in lines))


@pytest.mark.parametrize(
    ("line", "transport", "gdrdma"),
    [
        ("Channel 00 : 0[1a000] -> 8[1a000] [send] via NET/IB/0", "NET/IB", False),
        ("Channel 01/0 : 0[0] -> 8[0] [send] via NET/IB/3(1)/GDRDMA/Shared", "NET/IB", True),
        ("Channel 01/0 : 0[0] -> 8[0] [receive] via NET/Socket/1", "NET/Socket", False),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read", "P2P", None),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/IPC", "P2P", None),
        ("Channel 00 : 0[0] -> 1[1] via direct shared memory", "direct", None),
        ("Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct", "SHM", None),
    ],
)
def test_channels_of_several_generations(line: str, transport: str, gdrdma: bool | None) -> None:
    seen = log(f"NCCL INFO {line}")
    assert (dict(seen.transports), seen.gdrdma) == ({transport: 1}, gdrdma)


def test_gdr_in_the_ring_line_is_no_proof() -> None:
    assert log("NCCL INFO Connected all rings, use ring PXN 0 GDR 1").gdrdma is None


def test_ipv6_and_the_older_prefixes() -> None:
    seen = nccl_log.parse(
        "node06: node06.example.org:28114:28204 [3] NCCL INFO NET/Socket : Using [0]eno1:fe80::3eec:efff:fe1a:2b3c%eno1<0>\n"
        "[1,0]<stdout>:gpu-7:1:2 [0] NCCL INFO NET/Socket : Using [0]docker0:172.17.0.1<0>\n"
    )
    assert seen.interfaces == {"eno1": "fe80::3eec:efff:fe1a:2b3c%eno1", "docker0": "172.17.0.1"}
    assert seen.hosts == ("node06.example.org", "gpu-7")
    assert list(seen.unfit_interfaces) == ["docker0"]
    assert seen.network == "Socket"


def test_the_first_warning_is_the_cause() -> None:
    seen = nccl_log.parse(
        "[2026-10-15 12:44:09] node12:882:941 [0] misc/ibvwrap.cc:299 NCCL WARN Call to ibv_modify_qp failed with error "
        "Network is unreachable\n"
        "node11:881:930 [1] misc/socket.cc:64 NCCL WARN socketProgress: Connection closed by remote peer node12<52077>\n"
    )
    assert seen.cause == nccl_log.Warn(
        "node12", 882, 0, "misc/ibvwrap.cc:299", "Call to ibv_modify_qp failed with error Network is unreachable"
    )
    assert seen.qp_error is not None
    assert (seen.qp_error.errno, seen.qp_error.error, seen.qp_error.link_local) == (None, "Network is unreachable", False)


def test_a_storm_of_warnings_is_bounded() -> None:
    assert len(log(*["net.cc:1 NCCL WARN again"] * 1000).warnings) == nccl_log.MOST_WARNINGS


@pytest.mark.parametrize("odd", ["", "NCCL INFO", "{'loss': 1.2}\n", "NCCL version unknown"])
def test_what_is_no_nccl_log(odd: str) -> None:
    with pytest.raises(ParseError):
        nccl_log.parse(odd)
