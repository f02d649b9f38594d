"""lspci, lspci -t, numactl and lscpu: the fixtures, and the kind each stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from netcheck.tools import lscpu, lspci, lspci_tree, numactl
from netcheck.tools._cpu_list import cpu_list
from r4090c.errors import ParseError
from tests.tools.samples import expected, files, text


def cases(tool: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("file", files(tool), ids=lambda file: str(file.stem))


# --------------------------------------------------------------------------- lspci -vvv

SIZE_MIB = {"256M": 256, "32G": 32768}


@cases("lspci")
def test_lspci(file: Path) -> None:
    expect, seen = expected(file), lspci.parse(file.read_text())
    assert [device.pci for device in seen.devices] == list(expect["devices"])
    assert seen.needs_root is expect.get("needs_root", False)
    fields = {"speed_gt_s": "speed_gt_s", "speed_cap_gt_s": "speed_cap_gt_s", "width": "width", "width_cap": "width_cap"}
    for pci, values in expect["devices"].items():
        device = seen.device(pci)
        assert device is not None
        for key, field in {**fields, "numa_node": "numa"}.items():
            if key in values:
                assert getattr(device, field) == values[key], key
        if "bar1" in values:
            assert device.bar1_mib == SIZE_MIB[values["bar1"]]
        if "correctable_errors_seen" in values:
            assert device.seen["CorrErr"] is values["correctable_errors_seen"]
    if "limit_is_slot" in expect:
        assert seen.slot_limits("0000:04:00.0") is expect["limit_is_slot"]


ROOT_PORT = """\
c0:01.1 PCI bridge: Advanced Micro Devices, Inc. [AMD] Device 14ab (rev 01) (prog-if 00 [Normal decode])
\tBus: primary=c0, secondary=c1, subordinate=c3, sec-latency=0
\tPhysical Slot: 7
\tCapabilities: [58] Express (v2) Root Port (Slot+), IntMsgNum 0
\t\tDevSta:\tCorrErr+ NonFatalErr- FatalErr- UnsupReq- AuxPwr- TransPend-
\t\tLnkCap:\tPort #1, Speed 32GT/s, Width x16, ASPM L1, Exit Latency L1 <64us
\t\tLnkCtl:\tASPM L1 Enabled; RCB 64 bytes, LnkDisable- CommClk+
\t\tLnkSta:\tSpeed 16GT/s (downgraded), Width x8 (downgraded)
\t\tLnkCap2: Supported Link Speeds: 2.5-32GT/s
\tCapabilities: [100 v2] Advanced Error Reporting
\t\tUESta:\tDLP- SDES- TLP- FCP- CmpltTO+ CmpltAbrt- UnxCmplt- RxOF- MalfTLP- ECRC- UnsupReq- ACSViol-
\t\t\tUncorrIntErr- BlockedTLP- PoisonTLPBlocked+
\t\tUEMsk:\tDLP+ SDES+
\t\tCESta:\tRxErr+ BadTLP- BadDLLP- Rollover- Timeout+ AdvNonFatalErr-
\t\tCEMsk:\tRxErr- BadTLP+
\tCapabilities: [2a0 v1] Access Control Services
\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans+
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-
\tKernel driver in use: pcieport

"""


def test_a_port_with_errors_and_access_control() -> None:
    (port,) = lspci.parse(ROOT_PORT).devices
    assert (port.port, port.slot, port.buses, port.driver, port.aspm) == (
        "Root Port (Slot+)",
        "7",
        (0xC1, 0xC3),
        "pcieport",
        "L1 Enabled",
    )
    assert (port.speed_gt_s, port.speed_cap_gt_s, port.width, port.width_cap) == (16.0, 32.0, 8, 16)
    assert port.aer_uncorrectable == ("CmpltTO", "PoisonTLPBlocked")
    assert port.aer_correctable == ("RxErr", "Timeout")
    assert port.seen["CorrErr"] and not port.seen["FatalErr"]
    assert port.acs["SrcValid"] and port.acs["ReqRedir"] and not port.acs["DirectTrans"]


def test_a_paste_that_broke_the_long_lines() -> None:
    broken = ROOT_PORT.replace("UpstreamFwd+ EgressCtrl-", "UpstreamFwd+\nEgressCtrl-").replace(
        "(downgraded), Width", "(downgraded),\nWidth"
    )
    assert lspci.parse(broken) == lspci.parse(ROOT_PORT)


def test_a_wide_slot_is_not_what_limits() -> None:
    card = text("lspci", "rtx4090-x8-width-downgraded.txt")
    seen = lspci.parse(ROOT_PORT + card)
    port = seen.slot_of("0000:c1:00.0")
    assert port is not None
    assert port.pci == "0000:c0:01.1"
    assert seen.slot_limits("0000:c1:00.0") is False
    assert seen.slot_limits("0000:e1:00.0") is None  # its port is not in the output


@pytest.mark.parametrize(
    ("status", "speed_gt_s", "width"),
    [
        ("Speed 16GT/s, Width x16", 16.0, 16),
        ("Speed 8GT/s, Width x4, TrErr- Train- SlotClk+ DLActive-", 8.0, 4),
        ("Speed 64GT/s (overdriven), Width x16 (ok)", 64.0, 16),
        ("Speed unknown, Width x0 (downgraded)", None, 0),
    ],
)
def test_link_status_of_every_lspci(status: str, speed_gt_s: float | None, width: int) -> None:
    (device,) = lspci.parse(
        f"0001:01:00.0 3D controller: NVIDIA\n\tCapabilities: [78] Express Endpoint, MSI 00\n\t\tLnkSta:\t{status}\n"
    ).devices
    assert (device.pci, device.speed_gt_s, device.width, device.width_cap) == ("0001:01:00.0", speed_gt_s, width, None)


def test_a_card_that_fell_off_the_bus() -> None:
    title = "41:00.0 VGA compatible controller: NVIDIA Corporation AD102 [GeForce RTX 4090] (rev ff) (prog-if ff)"
    (device,) = lspci.parse(f"{title}\n\t!!! Unknown header type 7f\n").devices
    assert device.unreadable


def test_plain_lspci_tells_no_links() -> None:
    bridge = "00:00.0 Host bridge: AMD [1022:14a4] (rev 01)"
    card = "41:00.0 VGA compatible controller [0300]: NVIDIA Corporation AD102 [10de:2684] (rev a1)"
    seen = lspci.parse(f"{bridge}\n{card}\n")
    assert [(device.pci, device.width, device.denied) for device in seen.devices] == [
        ("0000:00:00.0", None, False),
        ("0000:41:00.0", None, False),
    ]


@pytest.mark.parametrize(
    "output",
    [
        "",
        "bash: lspci: command not found\n",
        "pcilib: Cannot open /proc/bus/pci\nlspci: Cannot find any working access method.\n",
        "Slot:\tc1:00.0\nClass:\tVGA compatible controller\n",
        ROOT_PORT + ROOT_PORT,
    ],
)
def test_lspci_refuses(output: str) -> None:
    with pytest.raises(ParseError):
        lspci.parse(output)


@cases("lspci")
def test_lspci_cut_anywhere_never_changes_a_value(file: Path) -> None:
    output = file.read_text()
    whole = lspci.parse(output)
    for end in range(0, len(output), 7):
        try:
            part = lspci.parse(output[:end])
        except ParseError:
            continue
        for device in part.devices:
            same = whole.device(device.pci)
            assert same is not None
            for field in ("speed_gt_s", "speed_cap_gt_s", "width", "width_cap", "numa", "iommu_group", "driver", "title"):
                assert getattr(device, field) in (None, getattr(same, field))
            assert device.seen in ({}, same.seen)


# --------------------------------------------------------------------------- lspci -t


@cases("lspci-tree")
def test_tree(file: Path) -> None:
    expect, tree = expected(file), lspci_tree.parse(file.read_text())
    assert tree.roots == tuple(f"0000:{bus}" for bus in expect["root_buses"])
    for bus, root in expect.get("parent_root_of_bus", {}).items():
        assert tree.root_of(f"0000:{bus}") == f"0000:{root}"
    for bus, port in expect.get("parent_port", {}).items():
        assert tree.port_of(f"0000:{bus}") == port
        assert tree.switch_of(f"0000:{bus}") is None
    for bus, switch in expect.get("switch_of_bus", {}).items():
        assert tree.switch_of(f"0000:{bus}") == switch
    assert tree.empty == tuple(f"0000:{bus}" for bus in expect.get("empty_buses", ()))
    for one, other in expect.get("siblings", ()):
        assert tree.switch_of(f"0000:{one}") == tree.switch_of(f"0000:{other}") is not None


def test_which_root_complexes_are_shared() -> None:
    tree = lspci_tree.parse(text("lspci-tree", "epyc-4-root-complexes.txt"))
    assert tree.root_of("0000:c1") == tree.root_of("0000:c2")
    assert len({tree.root_of(f"0000:{bus}") for bus in ("c1", "81", "41", "01")}) == 4


VERBOSE = r"""
-+-[10000:e0]---06.0-[e1]----00.0  Intel Corporation NVMe [Optane] - [not a bus]
 +-[0000:80]---00.0-[81-82]----01.0-[82]--
 \-[0000:00]-+-00.0  Advanced Micro Devices, Inc. [AMD] Root Complex
             +-01.1-[01-09]----00.0-[02-09]--+-00.0-[03-05]----00.0-[04-05]----08.0-[05]--+-00.0  NVIDIA Corporation AD102
             |                               |                                            \-00.1  NVIDIA Corporation AD102 Audio
             |                               \-01.0-[09]----00.0  Mellanox Technologies MT2892
             \-14.3  AMD FCH LPC Bridge
"""


def test_names_domains_and_switches_below_switches() -> None:
    tree = lspci_tree.parse("root@node:~# lspci -tv" + VERBOSE)
    assert tree.roots == ("10000:e0", "0000:80", "0000:00")
    assert tree.buses["10000:e1"] == ("10000:e0:06.0",)
    assert tree.empty == ("0000:82",)
    assert tree.buses["0000:05"] == ("0000:00:01.1", "0000:01:00.0", "0000:02:00.0", "0000:03:00.0", "0000:04:08.0")
    assert tree.switch_of("0000:05") == "0000:03:00.0"
    assert tree.switch_of("0000:09") == "0000:01:00.0"
    assert tree.devices["0000:00:14.3"] == "0000:00"


def test_one_root_without_domain() -> None:
    tree = lspci_tree.parse("-[00]-+-00.0\n      \\-01.0-[01]----00.0\n")
    assert tree.buses == {"0000:00": (), "0000:01": ("0000:00:01.0",)}


@pytest.mark.parametrize("name", ["epyc-4-root-complexes.txt", "switch-two-gpus.txt"])
def test_a_cut_tree_is_refused(name: str) -> None:
    output = text("lspci-tree", name).rstrip()
    for end in range(len(output)):
        if output[:end].endswith("14.3") or output[end - 4 : end] == "1f.0":
            continue
        with pytest.raises(ParseError):
            lspci_tree.parse(output[:end])


@pytest.mark.parametrize(
    "lost", ["+-01.0-[01-05]", "\\-18.0-[05]--", "\\-1f.0"], ids=["holds others", "ends a list", "ends the tree"]
)
def test_a_lost_line_that_others_hang_on_is_noticed(lost: str) -> None:
    lines = text("lspci-tree", "switch-two-gpus.txt").splitlines(keepends=True)
    kept = [line for line in lines if lost not in line]
    assert len(kept) == len(lines) - 1
    with pytest.raises(ParseError):
        lspci_tree.parse("".join(kept))


@pytest.mark.parametrize(
    "output",
    [
        "",
        "00:00.0 Host bridge: AMD\n",
        "-[0000:00]-+-00.0\n           \\-00.0\n",  # one device twice
        "-[0000:00]-+-01.0-[01]----00.0\n           \\-02.0-[01]----00.0\n",  # one bus twice
        "           \\-02.0-[01]----00.0\n",
        "-[0000:00]----" + "00.0-[01]----" * 40 + "00.0\n",
        "-[0000:00]-+-00.0\n        \\-02.0\n",  # columns lost
    ],
)
def test_tree_refuses(output: str) -> None:
    with pytest.raises(ParseError):
        lspci_tree.parse(output)


# --------------------------------------------------------------------------- numactl -H


@cases("numactl")
def test_numactl(file: Path) -> None:
    expect, seen = expected(file), numactl.parse(file.read_text())
    assert [node.index for node in seen.nodes] == expect["nodes"]
    assert {str(node.index): list(node.cpus) for node in seen.nodes} == expect["cpus"]
    assert {str(node.index): node.size_mib for node in seen.nodes} == expect["size_mb"]
    assert {str(node.index): node.free_mib for node in seen.nodes} == expect["free_mb"]
    assert [list(row) for row in seen.distances] == expect["distances"]
    assert list(seen.memoryless) == expect.get("memoryless", [])
    assert list(seen.cpuless) == expect.get("cpuless", [])
    if "nodes_per_socket" in expect:
        assert seen.nodes_per_socket == expect["nodes_per_socket"]
    if "cpus_total" in expect:
        assert sum(len(node.cpus) for node in seen.nodes) == expect["cpus_total"]


def numa_text(cpus: range = range(256)) -> str:
    return f"available: 1 nodes (0)\nnode 0 cpus: {' '.join(map(str, cpus))}\nnode 0 size: 64000 MB\nnode 0 free: 9 MB\n"


@pytest.mark.parametrize("width", [*range(60, 133), 200, 400])
@pytest.mark.parametrize("stripped", [False, True], ids=["as printed", "blanks at line ends lost"])
def test_a_list_broken_at_any_width(width: int, stripped: bool) -> None:
    lines = [line[start : start + width] for line in numa_text().splitlines() for start in range(0, len(line), width)]
    broken = "".join(f"{line.rstrip() if stripped else line}\n" for line in lines)
    assert numactl.parse(broken) == numactl.parse(numa_text())


def test_nodes_that_are_not_numbered_in_a_row() -> None:
    nodes = "available: 2 nodes (0,8)\nnode 0 cpus: 0 1\nnode 0 size: 9 MB\nnode 8 cpus: 2 3\nnode 8 size: 9 MB\n"
    output = nodes + "node distances:\nnode   0   8 \n  0:  10  40 \n  8:  40  10 \n"
    seen = numactl.parse(output)
    assert [(node.index, node.cpus, node.free_mib) for node in seen.nodes] == [(0, (0, 1), None), (8, (2, 3), None)]
    assert (seen.distances, seen.nodes_per_socket) == (((10, 40), (40, 10)), 1)


@pytest.mark.parametrize(
    ("rows", "nodes_per_socket"),
    [
        (("10",), 1),
        (("10 11", "11 10"), 2),
        (("10 21", "21 10"), 1),
        (("10 21 31 31", "21 10 31 31", "31 31 10 21", "31 31 21 10"), 2),  # cluster on die
        (("10 11 32 32", "11 10 32 32", "32 32 10 12", "32 32 12 10"), 2),
        (("10 21 31 21", "21 10 21 31", "31 21 10 21", "21 31 21 10"), None),  # four sockets in a ring
        (("10 21 21 21", "21 10 21 21", "21 21 10 21", "21 21 21 10"), 1),
    ],
)
def test_nodes_per_socket(rows: tuple[str, ...], nodes_per_socket: int | None) -> None:
    count = len(rows)
    listed = "".join(f"node {i} cpus: {i}\nnode {i} size: 9 MB\n" for i in range(count))
    matrix = "".join(f"  {i}:  {row}\n" for i, row in enumerate(rows))
    head = f"available: {count} nodes (0-{count - 1})\n" if count > 1 else "available: 1 nodes (0)\n"
    output = f"{head}{listed}node distances:\nnode {' '.join(map(str, range(count)))}\n{matrix}"
    assert numactl.parse(output).nodes_per_socket == nodes_per_socket


def test_distances_that_are_not_told() -> None:
    seen = numactl.parse(numa_text() + "No distance information available.\n")
    assert (seen.distances, seen.nodes_per_socket) == ((), None)


@pytest.mark.parametrize(
    "output",
    [
        "",
        "No NUMA support available on this system.\n",
        numa_text().replace("1 nodes (0)", "2 nodes (0-1)"),
        numa_text().partition("node 0 size")[0],
        numa_text().replace(" 200 ", " 20 "),  # not ascending
        numa_text().replace(" 255", " 0-4294967295"),
        numa_text(range(9000)),
        numa_text() + numa_text(range(8)),
        numa_text() + "node distances:\nnode   0 \n  0:  1",
        "available: 2 nodes (0-1)\nnode 0 cpus: 0\nnode 0 size: 1 MB\nnode 1 cpus: 0\nnode 1 size: 1 MB\n",
        "available: 9999 nodes (0-9998)\n",
    ],
)
def test_numactl_refuses(output: str) -> None:
    with pytest.raises(ParseError):
        numactl.parse(output)


@cases("numactl")
def test_numactl_cut_anywhere_never_changes_a_value(file: Path) -> None:
    output = file.read_text()
    whole = {node.index: node for node in numactl.parse(output).nodes}
    for end in range(len(output)):
        try:
            part = numactl.parse(output[:end])
        except ParseError:
            continue
        assert {node.index: node.cpus for node in part.nodes} == {index: node.cpus for index, node in whole.items()}
        assert all(node.free_mib in (None, whole[node.index].free_mib) for node in part.nodes)
        assert part.distances in ((), numactl.parse(output).distances)


# --------------------------------------------------------------------------- lscpu


@cases("lscpu")
def test_lscpu(file: Path) -> None:
    expect, seen = expected(file), lscpu.parse(file.read_text())
    assert (seen.cpus, seen.sockets) == (expect["cpus"], expect["sockets"])
    assert seen.online == cpu_list(expect["online"])
    assert seen.offline == cpu_list(expect.get("offline", ""))
    assert seen.numa == {int(node): cpu_list(cpus) for node, cpus in expect["numa_cpus"].items()}
    for key in ("threads_per_core", "cores_per_socket", "nodes_per_socket", "model"):
        if key in expect:
            assert getattr(seen, key) == expect[key]
    if "numa_nodes" in expect:
        assert len(seen.numa) == expect["numa_nodes"]


def test_arm_without_sockets_and_numa() -> None:
    seen = lscpu.parse(
        "Architecture: aarch64\nCPU(s): 4\nOn-line CPU(s) list: 0-3\nModel name: -\nSocket(s): -\nCore(s) per cluster: 4\n"
    )
    assert (seen.sockets, seen.numa, seen.nodes_per_socket) == (None, {}, None)


OLD = text("lscpu", "old-flat-offline-cpus.txt")


@pytest.mark.parametrize(
    "output",
    [
        "",
        OLD.replace("CPU(s):                64", "CPU(s):                63"),
        OLD.replace("32-47", "30-47"),  # online and offline
        OLD.replace("NUMA node1 CPU(s):     16-31,48-63", "NUMA node1 CPU(s):     16-31,48-62"),
        OLD.replace("NUMA node1 CPU(s):     16-31,48-63\n", ""),
        OLD.replace("0-31,48-63", "0-4294967295"),
        OLD + OLD.replace("Socket(s):             2", "Socket(s):             1"),
        "CPU(s):                  8\n  Liste der Online-CPU(s):  0-7\n",
    ],
)
def test_lscpu_refuses(output: str) -> None:
    assert output != OLD
    with pytest.raises(ParseError):
        lscpu.parse(output)


@cases("lscpu")
def test_lscpu_cut_anywhere_never_changes_a_value(file: Path) -> None:
    output = file.read_text()
    whole = lscpu.parse(output)
    for end in range(len(output)):
        try:
            part = lscpu.parse(output[:end])
        except ParseError:
            continue
        assert (part.cpus, part.online, part.offline) == (whole.cpus, whole.online, whole.offline)
        assert part.sockets in (None, whole.sockets)
        assert part.cores_per_socket in (None, whole.cores_per_socket)
        assert part.model in ("unknown", whole.model)
        assert part.numa in ({}, whole.numa)
