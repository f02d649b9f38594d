"""Real perftest over soft-RoCE: what it prints when all is well, and when the usual mistakes are made.

Figures mean nothing here: the processors are emulated.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from netcheck.tools import ibv_devinfo, perftest
from tests.vmlab import VmLab
from tests.vmlab.two_ends import TIMED_OUT, both, facts, preflight, worst

pytestmark = pytest.mark.vm

FLAGS = "-d rxe0 -F"
V4 = "-x 1"
"""The RoCE v2 IPv4 GID of rxe; index 0 is link-local IPv6, from 2 on the table is empty."""


ROUNDED = 0.006
"""perftest prints two decimals, or six where the figure is small."""

PORTS = itertools.count(18_600)


@pytest.fixture
def port() -> int:
    return next(PORTS)


@pytest.fixture
def healed(vmlab: VmLab) -> Iterator[VmLab]:
    """The lab of the session; cables are plugged in again after the test."""
    yield vmlab
    for name in vmlab.machines:
        vmlab.heal(name)
    for name in vmlab.machines:
        vmlab.sh(name, "timeout 30 sh -c 'until grep -q ACTIVE /sys/class/infiniband/rxe0/ports/1/state; do sleep 0.1; done'")
        vmlab.sh(name, "timeout 30 sh -c 'until ping -c 1 -W 1 node01 && ping -c 1 -W 1 node02; do :; done'")
    vmlab.sh("node02", "timeout 60 stat -f /mnt/shared")


# --------------------------------------------------------------------------- all is well


@pytest.mark.parametrize("size", [65_536, 1_048_576])
def test_write_bandwidth(vmlab: VmLab, port: int, size: int) -> None:
    command = f"ib_write_bw {FLAGS} {V4} --report_gbits -n 20 -s {size}"
    server, client = both(vmlab, command, command, port)
    for end in (server, client):
        assert end.rc == 0, end.text
        told = perftest.parse(end.text)
        assert (told.test, told.device, told.gid_index, told.mtu_bytes, told.link) == ("ib_write_bw", "rxe0", 1, 4096, "Ethernet")
        assert told.error is None
        assert [(row.bytes, row.iterations) for row in told.rows] == [(size, 20)]
        assert told.rows[0].bw_average_gbit_s > 0
    assert perftest.parse(server.text).rows == perftest.parse(client.text).rows


def test_send_latency(vmlab: VmLab, port: int) -> None:
    command = f"ib_send_lat {FLAGS} {V4} -n 100 -s 2"
    server, client = both(vmlab, command, command, port)
    for end in (server, client):
        assert end.rc == 0, end.text
        row = perftest.parse(end.text).latency_rows[0]
        assert (row.bytes, row.iterations) == (2, 100)
        assert row.t_min_us is not None and row.t_typical_us is not None and row.t_max_us is not None
        assert 0 < row.t_min_us <= row.t_typical_us <= row.t_max_us


@pytest.mark.parametrize("program", ["ib_write_bw --report_gbits -s 65536", "ib_send_lat -s 2"])
def test_the_json_file_is_json_and_says_what_was_printed(vmlab: VmLab, port: int, program: str) -> None:
    file = f"/tmp/out-{port}.json"
    command = f"{program} {FLAGS} {V4} -n 50"
    _, client = both(vmlab, command, f"{command} --out_json --out_json_file={file}", port)
    assert client.rc == 0, client.text
    text = vmlab.sh("node02", f"cat {file}").stdout
    json.loads(text)
    printed, written = perftest.parse(client.text), perftest.parse(text)
    assert (written.test, written.device, written.mtu_bytes) == (printed.test, printed.device, printed.mtu_bytes)
    if written.latency_rows:
        assert written.latency_rows[0].t_typical_us == printed.latency_rows[0].t_typical_us
    else:  # the file has no unit; the printed table has it
        assert json.loads(text)["results"]["BW_average"] == pytest.approx(printed.rows[0].bw_average_gbit_s, abs=ROUNDED)


def test_a_server_prints_the_figure_of_its_client_under_a_unit_of_its_own(vmlab: VmLab, port: int) -> None:
    """Both ends need --report_gbits, or the server's table is off by a factor of 119."""
    command = f"ib_write_bw {FLAGS} {V4} -n 20 -s 65536"
    server, client = both(vmlab, command, f"{command} --report_gbits", port)
    rows = [next(line for line in end.text.splitlines() if line.startswith(" 65536")).split() for end in (server, client)]
    assert float(rows[0][3]) == pytest.approx(float(rows[1][3]), abs=ROUNDED)
    assert (perftest.parse(server.text).unit, perftest.parse(client.text).unit) == ("MiB/sec", "Gb/sec")


def test_ibv_devinfo_and_sysfs_agree(vmlab: VmLab, tmp_path: Path) -> None:
    told = facts(vmlab.cluster_file, tmp_path)
    for number, name in enumerate(vmlab.machines, 1):
        device = ibv_devinfo.parse(vmlab.sh(name, "ibv_devinfo").stdout).devices[0]
        assert (device.hca, device.board_id) == ("rxe0", None)
        assert device.ports[0].active
        assert device.ports[0].active_mtu_bytes == 4096
        (port,) = told["nodes"][name]["facts"]["rdma"]["value"]
        assert (port["hca"], port["port"], port["netdev"]) == ("rxe0", 1, "eth0")
        assert (port["state"], port["phys_state"]) == ("ACTIVE", "LinkUp")
        assert port["rate_gbit_s"] is None, "the rate of a soft device is a dummy"
        assert [(gid["index"], gid["kind"], gid["netdev"]) for gid in port["gids"]] == [(0, "v2", "eth0"), (1, "v2", "eth0")]
        assert port["gids"][1]["address"] == f"::ffff:10.77.0.{number}"


# --------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize("client", ["ib_send_bw", "ib_send_lat"])
def test_write_server_and_send_client_hang_silently(vmlab: VmLab, port: int, client: str) -> None:
    """Nobody posts a receive, and the sender waits for one for ever: every run needs a timeout of its own."""
    options = f"{FLAGS} {V4} -n 20 -s 4096"
    ends = both(vmlab, f"ib_write_bw {options}", f"{client} {options}", port, timeout_s=6)
    for end in ends:
        assert end.rc == TIMED_OUT, end.text
        if "#bytes" in end.text:
            assert perftest.parse(end.text).rows == ()
    left = vmlab.sh("node02", "ps -eo comm= | grep ^ib_", check=False).stdout
    assert left == ""


def test_send_server_and_write_client_fail_at_once(vmlab: VmLab, port: int) -> None:
    options = f"{FLAGS} {V4} -n 20 -s 4096"
    _, client = both(vmlab, f"ib_send_bw {options}", f"ib_write_bw {options}", port, timeout_s=20)
    told = perftest.parse(client.text)
    assert client.rc == 1
    assert told.error is not None
    assert told.error.kind == "data-path"
    assert "remote access error" in told.error.text
    assert told.rows == ()


def test_empty_gid(vmlab: VmLab, port: int) -> None:
    command = f"ib_write_bw {FLAGS} -x 5 -n 20 -s 4096"
    for end in both(vmlab, command, command, port, timeout_s=20):
        told = perftest.parse(end.text)
        assert end.rc == 1
        assert told.error is not None
        assert told.error.kind == "qp"
        assert "to RTR" in told.error.text


@pytest.mark.parametrize("wrong", [0, 5], ids=["link-local", "empty"])
def test_two_kinds_of_gid(vmlab: VmLab, port: int, wrong: int) -> None:
    options = f"{FLAGS} -n 20 -s 4096"
    for end in both(vmlab, f"ib_write_bw {options} {V4}", f"ib_write_bw {options} -x {wrong}", port, timeout_s=20):
        told = perftest.parse(end.text)
        assert end.rc == 1
        assert told.error is not None
        assert (told.error.kind, told.error.text) == ("gid", "Found Incompatibility issue with GID types.")


def test_no_server_and_no_device(vmlab: VmLab, port: int) -> None:
    for options, kind in ((f"{FLAGS} {V4}", "connect"), ("-d mlx5_0 -F", "device")):
        done = vmlab.sh("node02", f"timeout 20 ib_write_bw {options} -p {port} 10.77.0.1 2>&1", check=False)
        told = perftest.parse(done.stdout)
        assert done.returncode == 1
        assert told.error is not None
        assert told.error.kind == kind


def test_the_smaller_mtu_is_taken_silently(vmlab: VmLab, port: int) -> None:
    """Only the table tells: nothing warns of a node whose net device still has 1500."""
    command = f"ib_write_bw {FLAGS} {V4} --report_gbits -n 20 -s 65536"
    settle = "timeout 20 sh -c 'until ibv_devinfo | grep -q \"active_mtu:.*{}\"; do sleep 0.2; done'"
    vmlab.sh("node02", f"ip link set eth0 mtu 1500; {settle.format(1024)}")
    try:
        server, client = both(vmlab, command, command, port)
    finally:
        vmlab.sh("node02", f"ip link set eth0 mtu 9000; {settle.format(4096)}")
    assert (server.rc, client.rc) == (0, 0), client.text
    assert perftest.parse(client.text).mtu_bytes == 1024
    assert perftest.parse(client.text).error is None


def test_port_down(healed: VmLab, port: int, tmp_path: Path) -> None:
    healed.cut("node02")
    healed.sh("node02", "timeout 20 sh -c 'until grep -q DOWN /sys/class/infiniband/rxe0/ports/1/state; do sleep 0.1; done'")
    command = f"ib_write_bw {FLAGS} {V4} -n 20 -s 4096"
    _, client = both(healed, command, command, port, timeout_s=8)
    told = perftest.parse(client.text)
    assert client.rc == 1
    assert told.error is not None
    assert (told.error.kind, told.error.text) == ("port-down", "Port number 1 state is Down")
    assert ibv_devinfo.parse(healed.sh("node02", "ibv_devinfo").stdout).devices[0].ports[0].state == "PORT_DOWN"
    code, findings = preflight(healed.cluster_file, tmp_path, "--quick", "--only", "rdma-port")
    assert code == 1
    assert worst(findings, "rdma-port", "node02")["status"] == "fail"
    assert worst(findings, "rdma-port", "node02")["observed"].startswith("DOWN")
