"""nvidia-smi: the fixtures, and the kind each stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from netcheck.facts.gpus import is_fault, read_table
from netcheck.tools import (
    nvidia_smi_compute_apps,
    nvidia_smi_dmon,
    nvidia_smi_p2p,
    nvidia_smi_q,
    nvidia_smi_query,
    nvidia_smi_topo,
)
from netcheck.tools._cpu_list import cpu_list
from r4090c.errors import ParseError
from tests.tools.samples import expected, files, text


def cases(tool: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("file", files(tool), ids=lambda file: str(file.stem))


# --------------------------------------------------------------------------- topo -m


@cases("nvidia-smi-topo")
def test_topo(file: Path) -> None:
    expect = expected(file)
    if "error" in expect:
        with pytest.raises(ParseError, match=expect["error"]):
            nvidia_smi_topo.parse(file.read_text())
        return
    matrix = nvidia_smi_topo.parse(file.read_text())
    assert len(matrix.gpus) == expect["gpus"]
    assert matrix.nics == expect["nics"]
    assert matrix.links == expect["links"]
    assert matrix.cpu_affinity == {index: cpu_list(expect["cpu_affinity"][f"GPU{index}"]) for index in matrix.gpus}
    numa = {index: expect["numa"][f"GPU{index}"] for index in matrix.gpus}
    assert matrix.numa == {index: None if node is None else int(node) for index, node in numa.items()}
    for name in expect.get("near_nic_gpus", ()):
        assert {matrix.link(name, nic) for nic in matrix.nics} <= {"PHB", "NODE"}
    if "numa_nodes_with_gpu" in expect:
        assert sorted(node for node in matrix.numa.values() if node is not None) == expect["numa_nodes_with_gpu"]


def test_a_cut_matrix_says_how_much_is_there() -> None:
    expect = expected(files("nvidia-smi-topo")[0].parent / "8gpu-cut-after-gpu4.txt")
    with pytest.raises(ParseError) as refused:
        nvidia_smi_topo.parse(text("nvidia-smi-topo", "8gpu-cut-after-gpu4.txt"))
    assert f"{expect['columns']} devices" in str(refused.value)
    assert f"{expect['rows_complete']} full rows" in str(refused.value)


HEADER = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"


def rows(*tails: str) -> str:
    return f"GPU0\t X \tPHB\t{tails[0]}\nGPU1\tPHB\t X \t{tails[-1]}\n\n"


@pytest.mark.parametrize("expand", [False, True], ids=["tabs", "blanks"])
@pytest.mark.parametrize(
    ("tail", "cpus", "numa"),
    [
        ("0-7\t1\t\tN/A", (0, 1, 2, 3, 4, 5, 6, 7), 1),
        ("0-3,32-35,64-67\t12\t\tN/A", (0, 1, 2, 3, 32, 33, 34, 35, 64, 65, 66, 67), 12),
        ("\t1\t\tN/A", None, 1),  # CPU Affinity is empty in some containers
        ("0-7\t\tN/A\t\tN/A", tuple(range(8)), None),  # NUMA Affinity N/A is set a tab too far as well
        ("N/A\tN/A\t\tN/A", None, None),
        ("0-7\t0-1\t\tN/A", tuple(range(8)), None),  # near to two nodes
        ("0,2,4,6,8,10,12...\t0\t\tN/A", None, 0),  # cut by the driver
        ("0-4294967295\t0\t\tN/A", None, 0),
        ("7\t-1\t\tN/A", (7,), None),
        ("", None, None),
    ],
)
def test_columns_behind_the_matrix(tail: str, cpus: tuple[int, ...] | None, numa: int | None, expand: bool) -> None:
    output = HEADER + rows(tail)
    matrix = nvidia_smi_topo.parse(output.expandtabs(8) if expand else output)
    assert matrix.cpu_affinity == {0: cpus, 1: cpus}
    assert matrix.numa == {0: numa, 1: numa}


@pytest.mark.parametrize(
    ("titles", "tail", "cpus", "numa"),
    [
        ("", "", None, None),
        ("\tCPU Affinity", "4-5", (4, 5), None),
        ("\tNUMA Affinity", "1", None, 1),
        ("\tNUMA Affinity\tCPU Affinity", "1\t4-5", (4, 5), 1),
        ("\tCPU Affinity\tNUMA Aff", "4-5\t1", (4, 5), 1),  # a header cut by a narrow window
        ("\tSomething New\tCPU Affinity\tNUMA Affinity", "9-9\t4-5\t1", (4, 5), 1),
    ],
)
def test_columns_are_found_by_title(titles: str, tail: str, cpus: tuple[int, ...] | None, numa: int | None) -> None:
    matrix = nvidia_smi_topo.parse(f"\tGPU0\tGPU1{titles}\n" + rows(tail))
    assert (matrix.cpu_affinity[0], matrix.numa[1]) == (cpus, numa)


def test_single_blanks_between_all_columns() -> None:
    matrix = nvidia_smi_topo.parse(
        "GPU0 GPU1 CPU Affinity NUMA Affinity GPU NUMA ID\nGPU0 X NV12 4-5 1 N/A\nGPU1 NV12 X 4-5 1 N/A\n"
    )
    assert (matrix.links, matrix.cpu_affinity[1], matrix.numa[1]) == ({"GPU0-GPU1": "NV12"}, (4, 5), 1)


def test_devices_in_another_order() -> None:
    output = (
        "\tNIC0\tGPU1\tGPU0\nNIC0\t X \tPIX\tSYS\nGPU0\tSYS\tNODE\t X \nGPU1\tPIX\t X \tNODE\n\nNIC Legend:\n\n  NIC0: mlx5_3\n"
    )
    matrix = nvidia_smi_topo.parse(output)
    assert (matrix.link("GPU0", "NIC0"), matrix.link("GPU1", "NIC0"), matrix.link("GPU0", "GPU1")) == ("SYS", "PIX", "NODE")
    assert (matrix.gpus, matrix.nics) == ((1, 0), {"NIC0": "mlx5_3"})


def test_a_nic_without_legend_has_no_device() -> None:
    assert nvidia_smi_topo.parse("\tGPU0\tNIC0\nGPU0\t X \tPIX\nNIC0\tPIX\t X \n").nics == {"NIC0": ""}


def test_a_legend_that_breaks_after_the_column() -> None:
    output = "\tGPU0\tNIC0\nGPU0\t X \tPIX\nNIC0\tPIX\t X \n\nNIC Legend:\n\n  NIC0:\n mlx5_0\n"
    assert nvidia_smi_topo.parse(output).nics == {"NIC0": "mlx5_0"}


@pytest.mark.parametrize(
    "output",
    [
        "",
        HEADER,
        HEADER + rows("0-7\t0\t\tN/A").partition("GPU1\tPHB")[0],
        HEADER + rows("0").replace("GPU0\t X \tPHB", "GPU0\t X \tSYS"),  # not the same on both sides
        HEADER + rows("0").replace("GPU0\t X ", "GPU0\tPHB"),
        HEADER + rows("0").replace("PHB", "OK"),  # topo -p2p
        HEADER + rows("0").replace("PHB", "PH"),
        HEADER + rows("0") + rows("1"),  # of two nodes
        (HEADER + rows("0")).replace("\n", " "),
        "\tGPU0\tNIC0\tNIC1\nGPU0\t X \tPIX\tPIX\nNIC0\tPIX\t X \tPIX\nNIC1\tPIX\tPIX\t X \n NIC0: mlx5_1\n NIC1: mlx5_1\n",
        "Failed to initialize NVML: Driver/library version mismatch\n",
    ],
)
def test_topo_refuses(output: str) -> None:
    with pytest.raises(ParseError):
        nvidia_smi_topo.parse(output)


@cases("nvidia-smi-topo")
def test_a_cut_topology_is_never_another_topology(file: Path) -> None:
    """What is left after a cut anywhere agrees with the whole, or is refused, or is unknown."""
    if "error" in expected(file):
        return
    whole = nvidia_smi_topo.parse(file.read_text())
    output = file.read_text()
    last = output.index("Legend") if "Legend" in output else len(output)
    for end in range(last):
        try:
            part = nvidia_smi_topo.parse(output[:end])
        except ParseError:
            continue
        assert (part.gpus, part.links) == (whole.gpus, whole.links)
        for index in whole.gpus:
            assert part.cpu_affinity[index] in (None, whole.cpu_affinity[index])
            assert part.numa[index] in (None, whole.numa[index])


# --------------------------------------------------------------------------- topo -p2p


@cases("nvidia-smi-p2p")
def test_p2p(file: Path) -> None:
    expect = expected(file)
    if "error" in expect:
        with pytest.raises(ParseError) as refused:
            nvidia_smi_p2p.parse(file.read_text())
        assert expect["error"] in str(refused.value)
        return
    matrix = nvidia_smi_p2p.parse(file.read_text())
    assert len(matrix.gpus) == expect["gpus"]
    status = {f"GPU{i}-GPU{k}": matrix.cells[f"{i}-{k}"] for i in matrix.gpus for k in matrix.gpus if i < k}
    assert status == expect["status"]
    assert all(matrix.cells[f"{k}-{i}"] == matrix.cells[f"{i}-{k}"] for i in matrix.gpus for k in matrix.gpus if i < k)
    assert matrix.granted is expect["p2p_all_ok"]


def test_one_granted_pair_is_a_grant() -> None:
    matrix = nvidia_smi_p2p.parse(" \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n GPU1\tTNS\tX\t\n")
    assert matrix.granted
    assert matrix.cells == {"0-1": "OK", "1-0": "TNS"}


@pytest.mark.parametrize(
    "output",
    [
        "",
        " \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n",
        " \tGPU0\tGPU1\t\n GPU0\tX\tX\t\n GPU1\tX\tX\t\n",
        " \tGPU0\tGPU1\t\n GPU0\tX\tPHB\t\n GPU1\tPHB\tX\t\n",  # topo -m
        " \tGPU0\tNIC0\t\n GPU0\tX\tOK\t\n NIC0\tOK\tX\t\n",
    ],
)
def test_p2p_refuses(output: str) -> None:
    with pytest.raises(ParseError):
        nvidia_smi_p2p.parse(output)


# --------------------------------------------------------------------------- --query-gpu


def test_query_idle_and_loaded() -> None:
    idle, expect = nvidia_smi_query.parse(text("nvidia-smi-query", "8x4090-idle-gen1.csv")), "0000:03:00.0"
    assert (len(idle), idle[0].pci, idle[0].pcie_gen, idle[0].pcie_gen_max, idle[0].utilization_pct) == (8, expect, 1, 4, 0)
    loaded = nvidia_smi_query.parse(text("nvidia-smi-query", "8x4090-load-gpu6-x8.csv"))
    assert [gpu.index for gpu in loaded if gpu.pcie_width != gpu.pcie_width_max] == [6]


def test_query_lost_gpu() -> None:
    output = text("nvidia-smi-query", "gpu-is-lost-while-polling.csv")
    expect = expected(files("nvidia-smi-query")[0].parent / "gpu-is-lost-while-polling.csv")
    lost = [gpu for gpu in nvidia_smi_query.parse(output) if gpu.faults]
    assert [{"index": gpu.index, "bus_id": gpu.pci} for gpu in lost] == expect["lost_gpus"]
    faulty = [row for row in read_table(output).rows if any(is_fault(field, cell) for field, cell in row.items())]
    assert faulty[0]["timestamp"] == expect["first_lost_at"]


def test_query_without_header_needs_the_command_line() -> None:
    output = text("nvidia-smi-query", "noheader-nounits.csv")
    expect = expected(files("nvidia-smi-query")[0].parent / "noheader-nounits.csv")
    with pytest.raises(ParseError):
        nvidia_smi_query.parse(output)
    asked = ",".join(expect["fields_given_by_caller"])
    prompt = f"root@node01:~# nvidia-smi --query-gpu={asked} --format=csv,noheader,nounits\n"
    found = nvidia_smi_query.parse(prompt + output)
    assert [gpu.memory_used_mib for gpu in found] == expect["memory_used_mib"]


@cases("nvidia-smi-query")
def test_query_fixtures(file: Path) -> None:
    expect = expected(file)
    if "error" in expect or "fields_given_by_caller" in expect:
        with pytest.raises(ParseError, match=expect.get("error", "6 cells, 16 columns")):
            nvidia_smi_query.parse(file.read_text())
        return
    found = nvidia_smi_query.parse(file.read_text())
    assert len(found) == expect.get("gpus", 2)
    assert {gpu.index for gpu in found if gpu.faults} == (
        {entry["index"] for entry in expect.get("lost_gpus", ())} | {cell["gpu"] for cell in expect.get("error_cells", ())}
    )


def test_a_complaint_repeated_all_night_is_one() -> None:
    output = text("nvidia-smi-query", "gpu-is-lost-while-polling.csv")
    again = output + output.splitlines(keepends=True)[-1] * 100_000
    assert nvidia_smi_query.parse(again) == nvidia_smi_query.parse(output)


# --------------------------------------------------------------------------- -q


def test_q_fixture() -> None:
    (file,) = files("nvidia-smi-q")
    expect, log = expected(file), nvidia_smi_q.parse(file.read_text())
    assert (len(log.gpus), log.attached) == (expect["gpus"], expect["gpus"])
    assert (log.driver, log.cuda_max) == (expect["driver"], expect["cuda_max"])
    assert [gpu.bar1_total_mib for gpu in log.gpus] == expect["bar1_total_mib"]
    assert [gpu.memory_total_mib for gpu in log.gpus] == expect["fb_total_mib"]
    assert [gpu.pcie_gen for gpu in log.gpus] == expect["pcie_gen_current"]
    assert [gpu.replays for gpu in log.gpus] == expect["replays"]
    assert [gpu.remapped_rows for gpu in log.gpus] == expect["remapped_rows"]
    processes = [
        {"gpu": index, "pid": process.pid, "used_mib": process.memory_mib}
        for index, gpu in enumerate(log.gpus)
        for process in gpu.processes or ()
    ]
    assert processes == expect["processes"]
    assert log.gpus[0].processes == ()
    assert (log.gpus[1].pci, log.gpus[1].pcie_width, log.gpus[1].temperature_left_c) == ("0000:a9:00.0", 16, 15)
    assert (log.gpus[1].power_w, log.gpus[1].power_limit_w, log.gpus[0].pstate) == (421.88, 450.0, "P8")
    assert log.gpus[0].clock_reasons["Idle"] and not any(log.gpus[1].clock_reasons.values())


def q(**changes: str) -> nvidia_smi_q.SmiLog:
    output = text("nvidia-smi-q", "2gpu-bar1-256-one-busy.txt")
    for old, new in changes.items():
        output = output.replace(old.replace("_", " "), new)
    return nvidia_smi_q.parse(output)


def test_q_old_names() -> None:
    log = q(
        Clocks_Event_Reasons="Clocks Throttle Reasons",
        GPU_Power_Readings="Power Readings",
        Average_Power_Draw="Power Draw",
        Current_Power_Limit="Power Limit",
        HW_Power_Brake_Slowdown="HW Power Brake Slowdown",
    )
    assert log == q()


def test_q_reason_that_is_active() -> None:
    output = text("nvidia-smi-q", "2gpu-bar1-256-one-busy.txt")
    line = "        HW Slowdown                                    : Not Active"
    log = nvidia_smi_q.parse(output.replace(line, line.replace("Not Active", "Active")))
    assert [gpu.clock_reasons["HW Slowdown"] for gpu in log.gpus] == [True, True]
    assert not log.gpus[0].clock_reasons["HW Thermal Slowdown"]


def test_q_values_that_failed_and_gpus_that_are_gone() -> None:
    note = "Unable to determine the device handle for GPU 0000:C1:00.0: Unknown Error\n"
    output = text("nvidia-smi-q", "2gpu-bar1-256-one-busy.txt").replace("33 C", "ERR!")
    log = nvidia_smi_q.parse(note + output)
    assert [gpu.pci for gpu in log.gpus] == ["0000:27:00.0", "0000:a9:00.0", "0000:c1:00.0"]
    assert [gpu.faults for gpu in log.gpus] == [("GPU Current Temp: ERR!",), (), (note.strip(),)]
    assert log.gpus[0].temperature_c is None
    assert log.gpus[2].processes is None


def test_q_of_a_virtual_machine_has_no_fault() -> None:
    output = text("nvidia-smi-q", "2gpu-bar1-256-one-busy.txt")
    line = "                Host Max                               : "
    assert not any(gpu.faults for gpu in nvidia_smi_q.parse(output.replace(f"{line}4", f"{line}Unknown Error")).gpus)


def test_q_part_of_a_log() -> None:
    """`nvidia-smi -q -d PCI,…` or a cut: what is not there is not told, and no process is not "no processes"."""
    output = text("nvidia-smi-q", "2gpu-bar1-256-one-busy.txt")
    log = nvidia_smi_q.parse(output[: output.index("    FB Memory Usage")])
    assert (log.attached, len(log.gpus)) == (2, 1)
    (gpu,) = log.gpus
    assert (gpu.pcie_gen, gpu.replays, gpu.bar1_total_mib, gpu.memory_total_mib, gpu.processes) == (1, 0, None, None, None)


def test_q_cut_anywhere_never_changes_a_value() -> None:
    output = text("nvidia-smi-q", "2gpu-bar1-256-one-busy.txt")
    whole = {gpu.pci: gpu for gpu in nvidia_smi_q.parse(output).gpus}
    for end in range(0, len(output), 3):
        try:
            log = nvidia_smi_q.parse(output[:end])
        except ParseError:
            continue
        for gpu in log.gpus:
            for field in ("name", "uuid", "replays", "pcie_gen", "pcie_width", "memory_used_mib", "power_w", "temperature_c"):
                assert getattr(gpu, field) in (None, "", getattr(whole[gpu.pci], field)), (end, field)
            assert not gpu.processes or [process.pid for process in gpu.processes] == [88412]


@pytest.mark.parametrize(
    "output",
    [
        "",
        "==============NVSMI LOG==============\n\nDriver Version : 565.57.01\nAttached GPUs : 2\n",
        "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 575.57\n",
        '<?xml version="1.0" ?>\n<nvidia_smi_log>\n',
        "\n".join(line.strip() for line in text("nvidia-smi-q", "2gpu-bar1-256-one-busy.txt").splitlines()),
    ],
)
def test_q_refuses(output: str) -> None:
    with pytest.raises(ParseError):
        nvidia_smi_q.parse(output)


def test_q_without_gpus() -> None:
    assert nvidia_smi_q.parse("No devices were found\n").gpus == ()


# --------------------------------------------------------------------------- dmon


@cases("nvidia-smi-dmon")
def test_dmon(file: Path) -> None:
    expect, seen = expected(file), nvidia_smi_dmon.parse(file.read_text())
    assert (seen.samples, seen.complete) == (expect["samples"], True)
    for key, column in (("mean_power_w", "pwr"), ("mean_sm_pct", "sm"), ("mtemp_c", "mtemp"), ("mean_pclk_mhz", "pclk")):
        if key in expect:
            assert {str(gpu.index): gpu.mean[column] for gpu in seen.gpus} == expect[key]
    assert [gpu.index for gpu in seen.gpus if gpu.unreadable] == expect.get("unreadable_gpus", [])
    assert seen.units["pwr"] == "W"


def test_dmon_other_columns_dates_and_marks() -> None:
    output = (
        "#Date       Time        gpu    sm   mem    fb  pviol tviol\n#YYYYMMDD   HH:MM:SS   Idx     %     %    MB      %  bool\n"
        " 20260918   03:41:10     0     97    61 22310      0     0\n#20260918   03:41:11     0     99    63 22310      4     1\n"
    )
    seen = nvidia_smi_dmon.parse(output)
    (gpu,) = seen.gpus
    assert (gpu.samples, gpu.mean["sm"], gpu.most["pviol"], seen.units["fb"]) == (2, 98.0, 4.0, "MB")


def test_dmon_lost_gpu_and_cut_row() -> None:
    head = "# gpu   pwr    sm\n# Idx     W     %\n"
    note = "Unable to determine the device handle for GPU 0000:41:00.0: GPU is lost."
    output = f"{head}    0   287    94\n    1  ERR!     -\n{note}\n    0   2"
    seen = nvidia_smi_dmon.parse(output)
    assert (seen.samples, seen.complete) == (2, False)
    assert [gpu.unreadable for gpu in seen.gpus] == [False, True]
    assert "GPU is lost" in seen.notes[0]


@pytest.mark.parametrize(
    "output",
    [
        "",
        "# gpu   pwr    sm\n# Idx     W     %\n",
        "    0   287    94\n",
        "# gpu   pwr    sm\n    0   287    94    12\n",
        "# gpu   pwr    sm\n    0   287\n    0   287    94\n",
        "# gpu   pwr   pwr\n    0   287    94\n",
        "# gpu   pwr    sm\n    0   287    94\n# gpu   pwr    mem\n    0   287    94\n",
        "Failed to initialize NVML: Unknown Error\n",
    ],
)
def test_dmon_refuses(output: str) -> None:
    with pytest.raises(ParseError):
        nvidia_smi_dmon.parse(output)


# --------------------------------------------------------------------------- --query-compute-apps


@cases("nvidia-smi-compute-apps")
def test_compute_apps(file: Path) -> None:
    expect = expected(file)
    if "error" in expect:
        with pytest.raises(ParseError, match=expect["error"]):
            nvidia_smi_compute_apps.parse(file.read_text())
        return
    found = [
        {"pid": process.pid, "name": process.name, "used_mib": process.memory_mib, "gpu_uuid": process.gpu_uuid}
        for process in nvidia_smi_compute_apps.parse(file.read_text())
    ]
    assert found == expect["processes"]


UUID = "GPU-e80f7d12-31c5-4d90-a2be-95f46b07c622"


@pytest.mark.parametrize(
    ("output", "pid", "name", "memory_mib"),
    [
        (f"gpu_uuid, pid, used_gpu_memory [MiB]\n{UUID}, 7, 412 MiB\n", 7, "", 412),
        (f"gpu_uuid, used_memory [MiB], pid, name\n{UUID}, 412, 7, python\n", 7, "python", 412),
        (f"7, python, 412 MiB, {UUID}\n", 7, "python", 412),  # noheader, in the order of the query
        (f"$ nvidia-smi --query-compute-apps=gpu_uuid,pid --format=csv,noheader\n{UUID}, 7\n", 7, "", None),
        (
            f"pid, process_name, used_gpu_memory [MiB], gpu_uuid\n7, python, -c, 'import torch', 412 MiB, {UUID}\n",
            7,
            "python, -c, 'import torch'",
            412,
        ),
    ],
)
def test_compute_apps_columns(output: str, pid: int, name: str, memory_mib: int | None) -> None:
    (process,) = nvidia_smi_compute_apps.parse(output)
    assert (process.pid, process.name, process.memory_mib, process.gpu_uuid) == (pid, name, memory_mib, UUID)


@pytest.mark.parametrize(
    "output",
    [
        "",
        f"pid, process_name, used_gpu_memory [MiB], gpu_uuid\n7, python, 412 MiB, {UUID[:-3]}\n",
        "pid, process_name, used_gpu_memory [MiB], gpu_uuid\n7, python, 412 MiB\n",
        f"pid, process_name, used_gpu_memory [MiB], gpu_uuid\n[N/A], python, 412 MiB, {UUID}\n",
        f"pid, process_name, used_gpu_memory [MiB], gpu_uuid\n7, python, ERR!, {UUID}\n",
        f"process_name, used_gpu_memory [MiB], gpu_uuid\npython, 412 MiB, {UUID}\n",
        'Field "used_memroy" is not a valid field to query.\n',
    ],
)
def test_compute_apps_refuses(output: str) -> None:
    with pytest.raises(ParseError):
        nvidia_smi_compute_apps.parse(output)


def test_compute_apps_without_gpus() -> None:
    assert nvidia_smi_compute_apps.parse("No devices were found\n") == ()
