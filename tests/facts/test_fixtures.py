"""The recorded and authored outputs of tests/facts/fixtures: what a right parser extracts stands in each .expect.json."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from netcheck.facts import gpus, mounts, rdma
from netcheck.facts.question import Reply
from r4090c.errors import ParseError
from r4090c.model import Mount, RdmaPort
from tests.facts.samples import FIXTURES

B = "/sys/class/infiniband"


def fixture(name: str) -> tuple[str, dict[str, Any]]:
    path = FIXTURES / name
    return path.read_text(), json.loads((path.parent / f"{path.name.rsplit('.', 1)[0]}.expect.json").read_text())


# --------------------------------------------------------------------------- query-gpu


def test_idle_generation_1_is_no_fault() -> None:
    text, expect = fixture("query-gpu/8x4090-idle-gen1.csv")
    found = gpus.parse_query(text)
    assert len(found) == expect["gpus"]
    assert {gpu.driver for gpu in found} == {expect["driver"]}
    assert {gpu.pcie_gen for gpu in found} == {expect["pcie_gen_current"]}
    assert {gpu.pcie_gen_max for gpu in found} == {expect["pcie_gen_max"]}
    assert {gpu.pcie_width for gpu in found} == {expect["pcie_width_current"]}
    assert {gpu.memory_total_mib for gpu in found} == {expect["memory_total_mib"]}
    assert all(gpu.utilization_pct == 0 for gpu in found) is expect["gpu_idle"]
    assert [gpu.pci for gpu in found] == [bus[4:].lower() for bus in expect["bus_ids"]]
    assert {row["pstate"] for row in gpus.read_table(text).rows} == {expect["pstate"]}
    assert not any(gpu.faults for gpu in found)


def test_one_gpu_at_x8_under_load() -> None:
    text, expect = fixture("query-gpu/8x4090-load-gpu6-x8.csv")
    found = gpus.parse_query(text)
    assert len(found) == expect["gpus"]
    degraded = {str(gpu.index): gpu for gpu in found if gpu.pcie_width != gpu.pcie_width_max}
    assert {
        index: {"current": gpu.pcie_width, "max": gpu.pcie_width_max, "bus_id": f"0000{gpu.pci}".upper()}
        for index, gpu in degraded.items()
    } == expect["width_degraded"]
    assert {gpu.index for gpu in found if gpu.pcie_gen != gpu.pcie_gen_max} == set(expect["gen_degraded"])


def test_gpu_lost_while_polling() -> None:
    text, expect = fixture("query-gpu/gpu-is-lost-while-polling.csv")
    found = gpus.parse_query(text)
    lost = [gpu for gpu in found if gpu.faults]
    assert [{"index": gpu.index, "bus_id": gpu.pci} for gpu in lost] == expect["lost_gpus"]
    assert "temperature.gpu: [GPU is lost]" in lost[0].faults
    assert any(fault.startswith("Unable to determine the device handle") for fault in lost[0].faults)
    assert (lost[0].temperature_c, lost[0].power_w, lost[0].memory_used_mib) == (None, None, None)
    assert found[0].temperature_c == 70  # the last sample counts
    rows = gpus.read_table(text).rows
    bad = [row for row in rows if any(gpus.is_fault(field, cell) for field, cell in row.items())]
    assert bad[0]["timestamp"] == expect["first_lost_at"]
    assert len(rows) - len(bad) == expect["good_samples"]


def test_mixed_models() -> None:
    text, expect = fixture("query-gpu/mixed-models.csv")
    found = gpus.parse_query(text)
    assert [gpu.name for gpu in found] == expect["names"]
    assert (len({gpu.name for gpu in found}) == 1) is expect["homogeneous"]
    limits = [float(row["power.default_limit"].split()[0]) for row in gpus.read_table(text).rows]
    capped = [gpu.index for gpu, normal in zip(found, limits, strict=True) if (gpu.power_limit_w or 0) < normal]
    assert capped == expect["power_limited"]


def test_cells_that_are_not_told_and_cells_that_failed() -> None:
    text, expect = fixture("query-gpu/na-notsupported-err-cells.csv")
    found = gpus.parse_query(text)
    assert len(found) == expect["gpus"]
    assert [gpu.power_w for gpu in found] == expect["power_draw_w"]
    assert [gpu.power_limit_w for gpu in found] == expect["power_limit_w"]
    faults = [(gpu.index, *fault.split(": ", 1)) for gpu in found for fault in gpu.faults]
    assert faults == [(cell["gpu"], cell["field"], cell["text"]) for cell in expect["error_cells"]]


def test_no_header_and_no_units() -> None:
    text, expect = fixture("query-gpu/noheader-nounits.csv")
    found = gpus.parse_query(text, expect["fields_given_by_caller"])
    assert len(found) == expect["gpus"]
    assert [gpu.memory_total_mib for gpu in found] == expect["memory_total_mib"]
    assert [gpu.memory_used_mib for gpu in found] == expect["memory_used_mib"]
    assert [gpu.index for gpu in found if (gpu.memory_used_mib or 0) > 600] == expect["busy_gpus"]
    assert not any(gpu.faults for gpu in found)


def test_nvml_version_mismatch_is_told_in_its_own_words() -> None:
    text, expect = fixture("query-gpu/nvml-version-mismatch.txt")
    with pytest.raises(ParseError) as refused:
        gpus.parse_query(text)
    assert expect["error"] in str(refused.value)
    assert expect["nvml_library"] in str(refused.value)


# --------------------------------------------------------------------------- mounts


def nfs_of(found: tuple[Mount, ...], target: str) -> dict[str, Any]:
    mount = next(mount for mount in found if mount.target == target)
    server, export = mounts.split_source(mount.source)
    sizes = {key: int(mounts.option(mount, key) or 0) for key in ("rsize", "wsize", "nconnect", "timeo")}
    return {
        "target": mount.target,
        "source": mount.source,
        "server": server,
        "export": export,
        "fstype": mount.fstype,
        "vers": mounts.option(mount, "vers"),
        "hard": mounts.option(mount, "hard") == "",
        "soft": mounts.option(mount, "soft") == "",
        "ro": mounts.option(mount, "ro") == "",
        **sizes,
        "timeo_ds": sizes["timeo"],
    }


@pytest.mark.parametrize("name", ["proc-mounts-ipv6-ro", "proc-mounts-nfs3-soft-small-rsize"])
def test_proc_mounts(name: str) -> None:
    text, expect = fixture(f"mounts/{name}.txt")
    found = mounts.parse_proc_mounts(text)
    nfs = [mount for mount in found if mount.fstype in ("nfs", "nfs4")]
    assert [mount.target for mount in nfs] == [entry["target"] for entry in expect["nfs"]]
    for entry in expect["nfs"]:
        seen = nfs_of(found, entry["target"])
        assert {key: seen[key] for key in entry} == entry
    if "dev_shm_size_kib" in expect:
        shm = next(mount for mount in found if mount.target == "/dev/shm")
        assert mounts.option(shm, "size") == f"{expect['dev_shm_size_kib']}k"


def as_proc_mounts(findmnt: str) -> str:
    lines = [f"{m['source']} {m['target']} {m['fstype']} {m['options']} 0 0\n" for m in json.loads(findmnt)["filesystems"]]
    return "".join(lines)


def test_findmnt_nfs4_hard_told_by_proc_mounts() -> None:
    text, expect = fixture("mounts/findmnt-nfs4-hard.json")
    found = mounts.parse_proc_mounts(as_proc_mounts(text))
    for entry in expect["mounts"]:
        seen = nfs_of(found, entry["target"])
        assert {key: seen[key] for key in entry} == entry


def test_five_real_nfs_mounts_told_by_proc_mounts() -> None:
    text, expect = fixture("mounts/own-real-findmnt-five-nfs.json")
    found = mounts.parse_proc_mounts(as_proc_mounts(text))
    assert [mount.target for mount in found] == expect["targets"]
    assert [mount.target for mount in found if mounts.option(mount, "soft") == ""] == expect["soft"]
    assert {mount.target: mounts.option(mount, "vers") for mount in found} == expect["vers"]
    assert [mount.target for mount in found if mount.source == found[0].source] == expect["same_source"]
    assert mounts.option(next(m for m in found if m.target == "/m/ro"), "ro") is None


# --------------------------------------------------------------------------- sysfs-gid


def reply_of_dump(text: str) -> Reply:
    """Turn `grep -r . /sys/class/infiniband` into what the probe would have read."""
    files = {m[1]: f"{m[2]}\n" for m in re.finditer(rf"^({B}/\S+?):((?!.*Invalid argument).*)$", text, re.MULTILINE)}
    errors = {m[1]: "Invalid argument" for m in re.finditer(rf"({B}/\S+): Invalid argument", text)}
    return Reply(files=files, errors=errors, natives={"gids": {}, "readlink": {}})


def reply_of_rxe(text: str) -> Reply:
    """Turn the recorded walk through a soft-RoCE device into what the probe would have read."""
    files = {f"{B}/rxe0/ports/1/{m[1]}": f"{m[2]}\n" for m in re.finditer(r"^ports/1/(\w+): (.*)$", text, re.MULTILINE)}
    files.update({f"{B}/rxe0/{m[1]}": f"{m[2]}\n" for m in re.finditer(r"^(fw_ver|parent): (.*)$", text, re.MULTILINE)})
    gids = {}
    for index, gid, kind, netdev in re.findall(r"^gid(\d+)=(\S+) type=(.*) ndev=(.*)$", text, re.MULTILINE):
        gids[f"{B}/rxe0/ports/1/gids/{index}"] = f"{gid}\n"
        if "Invalid argument" not in kind:
            gids[f"{B}/rxe0/ports/1/gid_attrs/types/{index}"] = f"{kind}\n"
            gids[f"{B}/rxe0/ports/1/gid_attrs/ndevs/{index}"] = f"{netdev}\n"
    link = re.search(r"^/sys/devices/virtual/infiniband/rxe0$", text, re.MULTILINE)
    assert link
    return Reply(files=files, natives={"gids": gids, "readlink": {f"{B}/rxe0": f"../..{link[0].removeprefix('/sys')}"}})


def best(port: RdmaPort) -> dict[str, Any]:
    gid, address = rdma.roce_v2_ipv4(port)[0]
    return {"index": gid.index, "ip": address, "netdev": gid.netdev}


def test_mlx5_gid_table() -> None:
    text, expect = fixture("sysfs-gid/grep-dump-mlx5.txt")
    (port,) = rdma.parse(reply_of_dump(text))
    assert (port.hca, port.state, port.rate_gbit_s) == (expect["device"], expect["state"], expect["rate_gbit_s"])
    assert len(port.gids) == expect["used_entries"]
    assert [gid.kind for gid in port.gids] == ["v1", "v2", "v1", "v2"]
    assert len(rdma.roce_v2_ipv4(port)) == 1
    assert best(port) == expect["best"]
    assert port.netdev == expect["best"]["netdev"]


def test_real_soft_roce_device() -> None:
    text, expect = fixture("sysfs-gid/own-real-rxe-sysfs.txt")
    (port,) = rdma.parse(reply_of_rxe(text))
    assert (port.hca, port.state, port.phys_state) == (expect["device"], expect["state"], expect["phys_state"])
    assert port.rate_gbit_s is None, "the rate of a soft device is a dummy"
    assert port.firmware is None
    assert port.numa is None
    assert [gid.index for gid in port.gids] == [0, 1]
    assert best(port) == expect["best"]
