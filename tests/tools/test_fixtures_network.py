"""iperf3, ibv_devinfo, ethtool, chronyc, timedatectl, mounts and GID tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netcheck.facts.mounts import option, split_source
from netcheck.facts.rdma import roce_v2_ipv4
from netcheck.tools import (
    TOOLS,
    chronyc,
    ethtool,
    findmnt,
    gids,
    ibv_devinfo,
    iperf3,
    proc_mounts,
    sysfs_gid,
    timedatectl,
)
from netcheck.tools._reading import document, number, whole
from r4090c.cli.common import to_jsonable
from r4090c.errors import ParseError
from r4090c.model import Mount
from tests.tools.samples import expected, files, text

OURS = (
    "chronyc",
    "ethtool",
    "findmnt",
    "gids",
    "ibv_devinfo",
    "iperf3",
    "kernel-log",
    "nccl-log",
    "nccl-tests",
    "perftest",
    "proc-mounts",
    "sysfs-gid",
    "timedatectl",
)


def of(tool: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("file", files(tool), ids=lambda file: file.name)


# --------------------------------------------------------------------------- iperf3


@of("iperf3")
def test_iperf3(file: Path) -> None:
    expect, test = expected(file), iperf3.parse(file.read_text())
    for key in ("sent_gbit_s", "received_gbit_s", "retransmits", "streams", "seconds"):
        if key in expect:
            told = getattr(test, key)
            assert told == (None if expect[key] is None else pytest.approx(expect[key], abs=6e-4)), key
    assert (test.error is None) == ("error" not in expect)
    assert expect.get("error", "") in (test.error or "")


def test_iperf3_says_it_plainly_too() -> None:
    assert iperf3.parse("iperf3: error - unable to connect to server: Connection refused\n").error == (
        "unable to connect to server: Connection refused"
    )


def test_iperf3_udp_reverse_and_the_event_stream() -> None:
    total = {"seconds": 10.0, "bits_per_second": 1e9, "lost_percent": 0.5}
    start = {"version": "iperf 3.18", "test_start": {"protocol": "UDP", "num_streams": 2, "reverse": 1}}
    udp = {"start": start, "intervals": [], "end": {"streams": [], "sum": total}}
    events = "".join(json.dumps({"event": key, "data": udp[key]}) + "\n" for key in ("start", "end"))
    for told in (json.dumps(udp), "warning: UDP block size too large\n" + json.dumps(udp), events):
        test = iperf3.parse(told)
        assert (test.received_gbit_s, test.lost_pct, test.reverse, test.streams, test.retransmits) == (1.0, 0.5, True, 2, None)


def test_iperf3_error_after_a_part_of_the_test() -> None:
    document = json.loads(text("iperf3", "25g-4-streams-good.json"))
    document["error"] = "control socket has closed unexpectedly"
    test = iperf3.parse(json.dumps(document))
    assert test.error == "control socket has closed unexpectedly"


@pytest.mark.parametrize(
    "odd",
    [
        "",
        "[  5] local 10.31.4.11 port 40110 connected to 10.31.4.12 port 5201\n",
        "{}",
        '{"a": 1}',
        '{"start": {}, "intervals": [], "end": {}}',
        '{"start": {}, "end": {"sum_sent": {"bits_per_second": NaN}}}',
        text("iperf3", "own-real-vm-3-18.json")[:-300],
    ],
)
def test_iperf3_refused(odd: str) -> None:
    with pytest.raises(ParseError):
        iperf3.parse(odd)


# --------------------------------------------------------------------------- devices and links


@of("ibv_devinfo")
def test_ibv_devinfo(file: Path) -> None:
    expect, info = expected(file), ibv_devinfo.parse(file.read_text())
    assert info.error == expect.get("error")
    assert {device.hca for device in info.devices} == set(expect["devices"])
    for device in info.devices:
        wanted = expect["devices"][device.hca]
        (port,) = device.ports
        told = {
            "state": port.state,
            "active_mtu_bytes": port.active_mtu_bytes,
            "max_mtu_bytes": port.max_mtu_bytes,
            "link_layer": port.link_layer,
            "fw": device.firmware,
            "vendor_id": device.vendor_id,
        }
        assert {key: told[key] for key in wanted} == wanted
        assert port.active == (wanted["state"] == "PORT_ACTIVE")


def test_ibv_devinfo_dual_port_and_noise() -> None:
    port = "\t\tport:\t{}\n\t\t\tstate:\t\t\t{}\n\t\t\tactive_mtu:\t\t4096 (5)\n\t\t\tsm_lid:\t\t\t7\n"
    told = (
        "libibverbs: Warning: couldn't load driver\nhca_id:\tibp1s0\n\tphys_port_cnt:\t2\n"
        + port.format(1, "PORT_INIT (2)")
        + port.format(2, "PORT_ACTIVE (4)")
    )
    (device,) = ibv_devinfo.parse(told).devices
    assert [(one.port, one.state, one.sm_lid) for one in device.ports] == [(1, "PORT_INIT", 7), (2, "PORT_ACTIVE", 7)]


@pytest.mark.parametrize(
    "odd", ["", "bash: ibv_devinfo: command not found", "hca_id:\tmlx5_0\n", "hca_id:\tmlx5_0\n\t\tport:\t1\n\t\t\tsta"]
)
def test_ibv_devinfo_refused(odd: str) -> None:
    with pytest.raises(ParseError):
        ibv_devinfo.parse(odd)


@of("ethtool")
def test_ethtool(file: Path) -> None:
    expect, (link,) = expected(file), ethtool.parse(file.read_text())
    told = {"interface": link.iface, "speed_mbit_s": link.speed_mbit_s, "duplex": link.duplex, "link": link.link}
    assert told == {key: expect[key] for key in told}


def test_ethtool_reason_and_refusal() -> None:
    down = "Settings for eno1:\n\tSpeed: Unknown!\n\tDuplex: Unknown! (255)\n\tLink detected: no (No cable)\n"
    gone = "Settings for eth9:\nCannot get device settings: No such device\nNo data available\n"
    first, second = ethtool.parse(down + gone)
    assert (first.link, first.speed_mbit_s, first.error) == (False, None, None)
    assert (second.link, second.error) == (None, "Cannot get device settings: No such device")


@pytest.mark.parametrize("odd", ["", "netlink error: No such device\n", "Settings for eno1:\n\tSupported ports: [ TP ]\n"])
def test_ethtool_refused(odd: str) -> None:
    with pytest.raises(ParseError):
        ethtool.parse(odd)


# --------------------------------------------------------------------------- time


@of("chronyc")
def test_chronyc(file: Path) -> None:
    expect, clock = expected(file), chronyc.parse(file.read_text())
    assert (clock.synchronised, clock.offset_s, clock.stratum) == (expect["synchronised"], expect["offset_s"], expect["stratum"])


def test_chronyc_without_a_source_and_without_a_daemon() -> None:
    lost = (
        text("chronyc", "chronyc-tracking-normal.txt").replace(": Normal", ": Not synchronised").replace("0A1F04FE", "00000000")
    )
    assert not chronyc.parse(lost).synchronised
    silent = chronyc.parse("506 Cannot talk to daemon\n")
    assert (silent.synchronised, silent.offset_s, silent.error) == (False, None, "506 Cannot talk to daemon")


@of("timedatectl")
def test_timedatectl(file: Path) -> None:
    expect, status = expected(file), timedatectl.parse(file.read_text())
    assert (status.synchronised, status.ntp_service) == (expect["synchronised"], expect["ntp_service"])


@pytest.mark.parametrize(
    ("words", "synchronised", "service"),
    [
        ("System clock synchronized: yes\n              NTP service: active\n", True, "active"),
        ("     System clock synchronized: yes\nsystemd-timesyncd.service active: yes\n", True, "active"),
        (" Network time on: no\nNTP synchronized: no\n", False, "inactive"),
        ("     NTP enabled: yes\nNTP synchronized: yes\n", True, "active"),
        ("System clock synchronized: yes\n              NTP service: n/a\n", True, "n/a"),
    ],
)
def test_timedatectl_of_all_generations(words: str, synchronised: bool, service: str) -> None:
    status = timedatectl.parse(words)
    assert (status.synchronised, status.ntp_service) == (synchronised, service)


@pytest.mark.parametrize("parse", [chronyc.parse, timedatectl.parse])
@pytest.mark.parametrize("odd", ["", "bash: not found\n", "System time     : 0.0000"])
def test_time_refused(parse: object, odd: str) -> None:
    with pytest.raises(ParseError):
        parse(odd)  # type: ignore[operator]


# --------------------------------------------------------------------------- mounts


def facts_of(mount: Mount) -> dict[str, object]:
    server, export = split_source(mount.source)

    def size(name: str) -> int | None:
        value = option(mount, name)
        return int(value) if value else None

    return {
        "target": mount.target,
        "source": mount.source,
        "server": server,
        "export": export,
        "fstype": mount.fstype,
        "vers": option(mount, "vers"),
        "hard": "hard" in mount.options,
        "soft": "soft" in mount.options,
        "ro": "ro" in mount.options,
        "rsize": size("rsize"),
        "wsize": size("wsize"),
        "nconnect": size("nconnect"),
        "timeo_ds": size("timeo"),
    }


@of("findmnt")
def test_findmnt(file: Path) -> None:
    expect, mounts = expected(file), findmnt.parse(file.read_text())
    for wanted, mount in zip(expect.get("mounts", ()), mounts, strict=False):
        assert wanted.items() <= facts_of(mount).items()
    if "targets" in expect:
        assert [mount.target for mount in mounts] == expect["targets"]
        assert len(mounts) == expect["count"]
        assert [mount.target for mount in mounts if "soft" in mount.options] == expect["soft"]
        assert {mount.target: option(mount, "vers") for mount in mounts} == expect["vers"]
        assert [mount.target for mount in mounts if mount.source == mounts[0].source] == expect["same_source"]


@of("proc-mounts")
def test_proc_mounts(file: Path) -> None:
    expect, mounts = expected(file), proc_mounts.parse(file.read_text())
    for wanted, mount in zip(expect["nfs"], [mount for mount in mounts if mount.fstype.startswith("nfs")], strict=True):
        assert wanted.items() <= facts_of(mount).items()
    if "dev_shm_size_kib" in expect:
        (shm,) = [mount for mount in mounts if mount.target == "/dev/shm"]
        assert option(shm, "size") == f"{expect['dev_shm_size_kib']}k"


def test_findmnt_as_a_tree() -> None:
    leaf = {"target": "/a/b", "source": None, "fstype": "tmpfs", "options": "rw"}
    tree = {
        "filesystems": [{"target": "/", "source": "/dev/sda", "fstype": "ext4", "options": "rw,relatime", "children": [leaf]}]
    }
    assert findmnt.parse(json.dumps(tree)) == (
        Mount("/dev/sda", "/", "ext4", ("rw", "relatime")),
        Mount("", "/a/b", "tmpfs", ("rw",)),
    )


@pytest.mark.parametrize(
    "odd",
    [
        "",
        "{}",
        '{"filesystems": []}',
        '{"filesystems": [{"target": "/"}]}',
        "[" * 100_000,
        '{"filesystems": "x"}',
        "TARGET SOURCE\n",
    ],
)
def test_findmnt_refused(odd: str) -> None:
    with pytest.raises(ParseError):
        findmnt.parse(odd)


# --------------------------------------------------------------------------- GIDs


@of("gids")
def test_gids(file: Path) -> None:
    expect, ports = expected(file), gids.parse(file.read_text())
    assert sum(len(port.gids) for port in ports) == expect["count"]
    for hca, wanted in expect.get("best", {}).items():
        (port,) = [port for port in ports if port.hca == hca]
        told = [{"port": port.port, "index": gid.index, "ip": address, "netdev": gid.netdev} for gid, address in port.usable()]
        assert told == ([] if wanted is None else [wanted])
    for subnet, wanted in expect.get("best_by_subnet", {}).items():
        told = [{"dev": port.hca, "index": gid.index} for port in ports for gid, _ in port.usable(subnet)]
        assert told == [wanted]


def test_gids_cut_by_one_row_are_refused() -> None:
    lines = text("gids", "two-nics-v1-v2.txt").splitlines(keepends=True)
    assert gids.parse("".join(lines[:2]) + "n_gids_found=0\n") == ()
    for broken in (lines[:4] + lines[5:], lines[:2]):
        with pytest.raises(ParseError):
            gids.parse("".join(broken))


@of("sysfs-gid")
def test_sysfs_gid(file: Path) -> None:
    expect, (port,) = expected(file), sysfs_gid.parse(file.read_text())
    assert (port.hca, port.state) == (expect["device"], expect["state"])
    best = [{"index": gid.index, "ip": address, "netdev": gid.netdev} for gid, address in roce_v2_ipv4(port)]
    assert best == [expect["best"]]
    assert port.phys_state == expect.get("phys_state", "")
    if "used_entries" in expect:
        assert len(port.gids) == expect["used_entries"]
    assert port.rate_gbit_s == expect.get("rate_gbit_s")


def test_sysfs_dump_from_within_the_folder() -> None:
    """`cd /sys/class/infiniband/mlx5_0; grep -r .`: no device in the paths."""
    whole = text("sysfs-gid", "grep-dump-mlx5.txt").replace("/sys/class/infiniband/mlx5_0/", "./")
    with pytest.raises(ParseError, match="name"):
        sysfs_gid.parse(whole)
    (port,) = sysfs_gid.parse("+ cd /sys/class/infiniband/mlx5_7\n" + whole)
    assert port.name == "mlx5_7:1"
    assert len(port.gids) == 4


# --------------------------------------------------------------------------- all of ours


@pytest.mark.parametrize("tool", OURS)
def test_registered(tool: str) -> None:
    module = TOOLS[tool]
    assert tool == module.TOOL
    assert module.COMMAND


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_tool_takes_any_other_tools_output(data: st.DataObject) -> None:
    """A text given to the wrong parser is a value or ParseError, and JSON always."""
    tool = TOOLS[data.draw(st.sampled_from(OURS))]
    told = data.draw(st.sampled_from(files(data.draw(st.sampled_from(OURS))))).read_text()
    cut = data.draw(st.integers(0, len(told)))
    for one in (told, told[:cut], told[cut:]):
        try:
            json.dumps(to_jsonable(tool.parse(one)), allow_nan=False)
        except ParseError as error:
            assert len(str(error)) < 400


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1.5", 1.5),
        ("1e3", 1000.0),
        (7, 7.0),
        ("nan", None),
        ("1_0", None),
        (True, None),
        ("", None),
        (10**400, None),
        ("1e999", None),
    ],
)
def test_numbers(value: object, expected: float | None) -> None:
    assert number(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [("7", 7), (7.0, 7), ("7.5", None), ("9" * 30, None), (2**62 + 1, 2**62 + 1), (None, None)]
)
def test_whole_numbers(value: object, expected: int | None) -> None:
    assert whole(value) == expected


@pytest.mark.parametrize("odd", ["", "{", '{"a": NaN}', "[" * 200_000, "1" * 5000, "\ud800"])
def test_what_is_no_document(odd: str) -> None:
    with pytest.raises(ParseError):
        document(odd)
