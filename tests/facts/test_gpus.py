"""The kind, not the instance: what nvidia-smi also prints."""

from __future__ import annotations

import pytest

from netcheck.facts import gpus
from netcheck.facts.gpus import normalize_pci, parse_query
from r4090c.errors import ParseError

HEADER = "index, name, pci.bus_id, temperature.gpu, power.draw [W], memory.used [MiB]\n"
ROW0 = "0, NVIDIA GeForce RTX 4090, 00000000:03:00.0, 31, 25.85 W, 2 MiB\n"
ROW1 = "1, NVIDIA GeForce RTX 4090, 00000000:41:00.0, 33, 21.00 W, 2 MiB\n"


@pytest.mark.parametrize(
    ("note", "pci"),
    [
        ("Unable to determine the device handle for GPU 0000:81:00.0: Unknown Error", "0000:81:00.0"),
        ("Unable to determine the device handle for GPU1: 0000:81:00.0: GPU is lost.  Reboot the system", "0000:81:00.0"),
        ("Unable to determine the device handle for GPU0000:81:00.0: Unknown Error", "0000:81:00.0"),
        ("Unable to determine the device handle for gpu 00010000:01:00.0: Not Found", "10000:01:00.0"),
    ],
)
@pytest.mark.parametrize("table", ["", HEADER, HEADER + ROW0 + ROW1])
def test_gpu_without_a_row_is_a_gpu_with_a_fault(table: str, note: str, pci: str) -> None:
    *healthy, lost = parse_query(table + note + "\n")
    assert len(healthy) == table.count("GeForce")
    assert not any(gpu.faults for gpu in healthy)
    assert (lost.index, lost.pci, lost.faults) == (-1, pci, (note,))
    assert lost.memory_total_mib is None


def test_complaint_about_a_listed_gpu_is_its_fault() -> None:
    note = "WARNING: infoROM is corrupted at gpu 0000:41:00.0"
    found = parse_query(HEADER + ROW0 + ROW1 + note + "\n")
    assert [gpu.faults for gpu in found] == [(), (note,)]
    assert found[1].temperature_c == 33


def test_columns_are_found_by_name_in_any_order() -> None:
    text = "power.draw [W], pci.bus_id, memory.used [MiB], name, index\n25.85 W, 00000000:03:00.0, 2 MiB, Card, 7\n"
    (gpu,) = parse_query(text)
    assert (gpu.index, gpu.pci, gpu.power_w, gpu.memory_used_mib, gpu.name) == (7, "0000:03:00.0", 25.85, 2, "Card")


def test_repeated_header_and_blank_lines_are_skipped() -> None:
    found = parse_query(HEADER + ROW0 + "\n" + HEADER + ROW0.replace("31", "35"))
    assert [(gpu.index, gpu.temperature_c) for gpu in found] == [(0, 35)]


def test_without_an_index_column_the_address_tells_gpus_apart() -> None:
    text = "pci.bus_id, temperature.gpu\n0000:03:00.0, 30\n0000:41:00.0, 40\n0000:03:00.0, 31\n"
    assert [(gpu.index, gpu.pci, gpu.temperature_c) for gpu in parse_query(text)] == [
        (0, "0000:03:00.0", 31),
        (1, "0000:41:00.0", 40),
    ]


@pytest.mark.parametrize(
    "cell", ["ERR!", "[Unknown Error]", "Unknown Error", "[GPU is lost]", "[GPU requires reset]", "fast", "٣٤"]
)
def test_cells_that_failed(cell: str) -> None:
    (gpu,) = parse_query(f"index, temperature.gpu\n0, {cell}\n")
    assert gpu.temperature_c is None
    assert gpu.faults == (f"temperature.gpu: {cell}",)


@pytest.mark.parametrize("cell", ["[GPU is lost]", "[GPU requires reset]", "[Unknown Error]", "ERR!"])
def test_a_failed_cell_of_text_is_a_fault_and_no_text(cell: str) -> None:
    (gpu,) = parse_query(f"index, name, persistence_mode\n0, {cell}, {cell}\n")
    assert (gpu.name, gpu.persistence) == ("", None)
    assert gpu.faults == (f"name: {cell}", f"persistence_mode: {cell}")


@pytest.mark.parametrize(
    "cell", ["[N/A]", "N/A", "[Not Supported]", "Not Supported", "[Requested functionality has been deprecated]", ""]
)
def test_cells_that_are_not_told(cell: str) -> None:
    (gpu,) = parse_query(f"index, temperature.gpu\n0, {cell}\n")
    assert (gpu.temperature_c, gpu.faults) == (None, ())


@pytest.mark.parametrize(
    "text",
    [
        HEADER + ROW0 + "1, NVIDIA GeForce RTX 4090, 00000000:41:0",  # cut
        HEADER + ROW0.rstrip() + ", 17\n",  # a cell too many
        HEADER + "zero, NVIDIA GeForce RTX 4090, 00000000:03:00.0, 31, 25.85 W, 2 MiB\n",
        HEADER,  # no rows: inconclusive, not zero GPUs
        "",
        'Field "persistance_mode" is not a valid field to query.\n',
        "Failed to initialize NVML: Unknown Error\n",
        "Failed to initialize NVML: GPU access blocked by the operating system\n",
    ],
)
def test_refused(text: str) -> None:
    with pytest.raises(ParseError):
        parse_query(text)


def test_a_cut_row_is_refused_whatever_was_cut() -> None:
    """Cutting the table anywhere either loses whole rows only, or is refused, or leaves a cell short: never a wrong GPU count."""
    whole = HEADER + ROW0 + ROW1
    for end in range(len(HEADER), len(whole)):
        try:
            found = parse_query(whole[:end])
        except ParseError:
            continue
        assert len(found) <= 2
        assert [gpu.index for gpu in found] == list(range(len(found)))


@pytest.mark.parametrize(
    ("text", "sysfs"),
    [
        ("00000000:41:00.0", "0000:41:00.0"),
        ("0000:C3:00.0", "0000:c3:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
        (" 0000:0a:1F.7 ", "0000:0a:1f.7"),
    ],
)
def test_normalize_pci(text: str, sysfs: str) -> None:
    assert normalize_pci(text) == sysfs


@pytest.mark.parametrize("text", ["", "41:00.0", "0000:41:00", "0000:41:00.8", "000000000:41:00.0"])
def test_normalize_pci_refuses(text: str) -> None:
    with pytest.raises(ParseError):
        normalize_pci(text)


def test_the_query_asks_what_the_parser_reads() -> None:
    header = ", ".join(gpus.FIELDS) + "\n"
    cells = ["0", "Card", "GPU-1", "00000000:03:00.0", "570.1", *["1"] * 10, "Enabled"]
    (gpu,) = parse_query(header + ", ".join(cells) + "\n")
    assert not gpu.faults
    unset = {name for name in gpu.__dataclass_fields__ if getattr(gpu, name) in (None, "") and name != "numa"}
    assert unset == set()
