"""perftest (ib_write_bw, ib_send_lat and their siblings): the printed tables and the files of --out_json.

Columns are found by the names in the header that begins with #bytes; the unit stands there too. "MB/sec" (before August 2024)
and "MiB/sec" are both 2^20 bytes a second, "Gb/sec" (--report_gbits) is 1e9 bits a second: everything is turned into Gbit/s.
Peak is 0 where it is not measured (-D). "Conflicting CPU frequency values" between header and row is harmless. Server and client
in one log print one result twice: equal rows count once.

The JSON of perftest before January 2024 is no JSON (bare keys, trailing commas); it is read line by line then. Its unit is not
in the file: message rate times size tells Gbit/s from MiB/s, and where the rate is too small to tell, there is no bandwidth.

An error perftest reports is a value (`error`), for a check to judge; ParseError is for what is not perftest's output.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from netcheck.tools._reading import document, lines_of, not_output_of, number, whole
from r4090c.errors import ParseError

TOOL = "perftest"
COMMAND = "ib_write_bw --report_gbits ADDRESS"

MIB_S_IN_GBIT_S = 2**20 * 8 / 1e9
GBIT_S_OF = {"Gb/sec": 1.0, "Gbps": 1.0, "MB/sec": MIB_S_IN_GBIT_S, "MiB/sec": MIB_S_IN_GBIT_S}
"""Unit as printed -> Gbit/s (perftest man page; "MB/sec" was renamed to "MiB/sec" without a change of the figure)."""
MTU_OF_ENUM = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}
"""enum ibv_mtu (ibv_query_port(3))."""
COMPLETION = {
    4: "local protection error",
    5: "work request flushed",
    9: "remote invalid request",
    10: "remote access error",
    11: "remote operation error",
    12: "transport retry counter exceeded",
    13: "RNR retry counter exceeded",
}
"""enum ibv_wc_status (ibv_poll_cq(3)): those a broken path or peer gives."""
UNIT_TOLERANCE = 1.5
"""Factor by which the message rate may miss the bandwidth of its unit; the two units are 119 apart."""

TITLE = re.compile(
    r"\s*(RDMA_WriteIMM|RDMA_Write|RDMA_Read|Send|Atomic\w*(?: \w+)?)[ _]"
    r"(?:(?:Bidirectional|Post[ _]List)[ _])*(BW|Latency)[ _]Test"
)
VERBS = {"RDMA_Write": "write", "RDMA_WriteIMM": "write_imm", "RDMA_Read": "read", "Send": "send"}
COLUMN = re.compile(r"#\w+|[A-Za-z0-9_.]+%?(?: [A-Za-z]\w*)?(?:\[[^\]\s]{1,16}\])?")
PROGRAM = re.compile(r"\bib_(?:write|read|send|atomic)(?:_imm)?_(?:bw|lat):")
SETTING = re.compile(r"(Device|Number of qps|Mtu|Link type|GID index|Connection type)\s*:\s*([^\s\[]{1,64})")
ERRORS: tuple[tuple[str, str], ...] = (
    (
        "resolve",
        r"(?:Name or service not known|name resolution|No address associated with hostname) for \S{1,255}:\d{1,5}$"
        r"|Problem in resolving basic address and port",
    ),
    ("connect", r"Couldn't connect to \S|Unable to init the socket connection|accept\(\) failed|server accept"),
    ("port-taken", r"Couldn't listen to port \d|Address already in use"),
    (
        "device",
        r"Did not detect devices|IB device \S{1,64} not found|No IB devices found|Unable to find the Infiniband/RoCE device",
    ),
    ("port-down", r"Port number \d+ state is \w|Couldn't set the link layer"),
    (
        "gid",
        r"Found Incompatibility issue with GID types|[Ff]ailed to (?:query|get) (?:the )?GID|Can't read sgid of index",
    ),
    ("qp", r"Failed to modify (?:\w+ )?QP|Unable to Connect the HCA's through the link"),
    ("data-path", r"Failed status \d|Completion with error at \w"),
    ("memory", r"Couldn't allocate MR|[Ff]ailed to create mr|Couldn't create (?:QP|CQ|PD)|Cannot allocate memory"),
    ("mismatch", r"[Vv]ersions? (?:mismatch|differ)|different (?:MTU|connection type|link layer)"),
    ("closed", r"(?:server|client) read: |Couldn't read remote address|Failed to exchange data between server and client"),
    ("usage", r"Invalid Command line|unrecognized option|invalid option -- "),
)
"""Kind of error -> perftest's words. The more telling one first: resolve before connect, qp before closed.

connect, resolve, port-taken, closed: the TCP exchange before the test. It tells nothing about RDMA. data-path: TCP worked, the
packets did not: GID, MTU, VLAN, PFC. qp: mostly a wrong or empty GID.
"""
_ERRORS = tuple((kind, re.compile(words)) for kind, words in ERRORS)
OTHERS_SAY_IT_TOO = ("usage", "memory", "closed", "port-taken", "mismatch")
"""Kinds whose words are not perftest's own: they are its errors only beside its title, its header or its name."""
WEAK = ("Unable to init the socket connection", "Completion with error", "Problem in resolving", "Couldn't read remote address")
"""Lines that only say that there was an error; a more telling line of the same kind is shown instead."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """One row of a bandwidth test. `bw_peak_gbit_s` None: not measured. `msg_rate_mpps`: million messages a second."""

    bytes: int
    iterations: int | None
    bw_average_gbit_s: float
    bw_peak_gbit_s: float | None
    msg_rate_mpps: float | None


@dataclass(frozen=True, slots=True)
class Latency:
    """One row of a latency test: half a round trip (a whole one for read, atomic). t_stdev is cut: do not judge it."""

    bytes: int
    iterations: int | None
    t_typical_us: float | None
    t_min_us: float | None
    t_max_us: float | None
    t_avg_us: float | None
    t_stdev_us: float | None
    p99_us: float | None
    p999_us: float | None


@dataclass(frozen=True, slots=True)
class Failure:
    """An error perftest reported. `kind`: see ERRORS; `text`: its words."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Perftest:
    """One test. None = the text does not tell.

    `test`: "ib_write_bw". `unit`: as printed, "Gb/sec"; of JSON the one the message rate proves. `rows` of a bandwidth test,
    `latency_rows` of a latency test, equal ones once. `notes`: remarks that explain a figure (MTU below the one asked for).
    """

    test: str | None
    device: str | None
    qps: int | None
    connection: str | None
    mtu_bytes: int | None
    gid_index: int | None
    link: str | None
    unit: str | None
    rows: tuple[Bandwidth, ...]
    latency_rows: tuple[Latency, ...]
    error: Failure | None
    bidirectional: bool = False
    notes: tuple[str, ...] = ()

    def largest(self) -> Bandwidth | None:
        """Return the bandwidth row of the largest message, the slowest one if there are several; None when there is none."""
        return max(self.rows, key=lambda row: (row.bytes, -row.bw_average_gbit_s), default=None)

    def smallest(self) -> Latency | None:
        """Return the latency row of the smallest message, the slowest one if there are several; None when there is none."""
        return min(self.latency_rows, key=lambda row: (row.bytes, -(row.t_typical_us or row.t_avg_us or 0.0)), default=None)


def parse(text: str) -> Perftest:
    """Return the test of what perftest printed, or of its JSON file. Raises ParseError when it is neither."""
    if re.match(r"\s*\{\s*\"?test_info\"?\s*:", text):
        return _from_json(text)
    return _from_table(text)


# --------------------------------------------------------------------------- the table


def _from_table(text: str) -> Perftest:
    lines = lines_of(text)
    test = columns = unit = None
    bidirectional = False
    settings: dict[str, str] = {}
    notes: dict[str, None] = {}
    rows: dict[Bandwidth, None] = {}
    latency_rows: dict[Latency, None] = {}
    for line in lines:
        if (match := TITLE.match(line)) and test is None:
            test, bidirectional = _test(match), "Bidirectional" in line
        elif "#bytes" in line:
            columns = _columns(line[line.index("#bytes") :])
            unit = unit or _unit(columns)
        elif columns is not None and (words := line.split()) and words[0].isdecimal() and number(words[-1]) is not None:
            if len(words) != len(columns):
                notes["a row of the table is cut"] = None
                continue
            row = dict(zip(columns, words, strict=True))
            if any(name.startswith("t_") for name in columns):
                if found := _latency(row):
                    latency_rows[found] = None
            elif bandwidth := _bandwidth(row):
                rows[bandwidth] = None
        else:
            settings |= {key: value for key, value in SETTING.findall(line) if key not in settings}
            notes.update(dict.fromkeys(_notes(line)))
    error = _failure(lines)
    if test is None and columns is None and (error is None or (error.kind in OTHERS_SAY_IT_TOO and not PROGRAM.search(text))):
        raise not_output_of(TOOL, lines)
    return Perftest(
        test=test,
        device=settings.get("Device"),
        qps=whole(settings.get("Number of qps")),
        connection=settings.get("Connection type"),
        mtu_bytes=whole(settings.get("Mtu")),
        gid_index=whole(settings.get("GID index")),
        link=settings.get("Link type"),
        unit=unit,
        rows=tuple(rows),
        latency_rows=tuple(latency_rows),
        error=error,
        bidirectional=bidirectional,
        notes=tuple(notes),
    )


def _test(match: re.Match[str]) -> str:
    return f"ib_{VERBS.get(match.group(1), 'atomic')}_{'bw' if match.group(2) == 'BW' else 'lat'}"


def _columns(header: str) -> list[str]:
    return [name for match in COLUMN.finditer(header) if (name := match.group().strip())]


def _unit(columns: Iterable[str]) -> str | None:
    return next((name.partition("[")[2].rstrip("]") for name in columns if name.startswith("BW average[")), None)


def _cell(row: Mapping[str, str], name: str) -> float | None:
    """Return the cell of the column whose name, without its unit, is `name`."""
    return next((number(value) for key, value in row.items() if key.partition("[")[0] == name), None)


def _bandwidth(row: Mapping[str, str]) -> Bandwidth | None:
    size, average, peak = whole(row.get("#bytes")), _cell(row, "BW average"), _cell(row, "BW peak")
    factor = GBIT_S_OF.get(_unit(row) or "")
    if size is None or average is None or factor is None:
        return None
    peak = peak * factor if peak else None
    return Bandwidth(size, whole(row.get("#iterations")), average * factor, peak, _cell(row, "MsgRate"))


def _latency(row: Mapping[str, str]) -> Latency | None:
    size = whole(row.get("#bytes"))
    if size is None:
        return None
    return Latency(
        bytes=size,
        iterations=whole(row.get("#iterations")),
        t_typical_us=_cell(row, "t_typical"),
        t_min_us=_cell(row, "t_min"),
        t_max_us=_cell(row, "t_max"),
        t_avg_us=_cell(row, "t_avg"),
        t_stdev_us=_cell(row, "t_stdev"),
        p99_us=_cell(row, "99% percentile"),
        p999_us=_cell(row, "99.9% percentile"),
    )


def _notes(line: str) -> Iterator[str]:
    if "Requested mtu is higher than active mtu" in line:
        yield "the MTU asked for is above the port's active MTU"
    elif match := re.search(r"Changing to active mtu - (\d{1,2})", line):
        size = MTU_OF_ENUM.get(int(match.group(1)))
        if size is not None:
            yield f"ran with the active MTU, {size} bytes"
    elif "Conflicting CPU frequency values" in line:
        yield "CPU frequency is not constant (harmless)"
    elif "BW peak won't be measured" in line:
        yield "peak not measured"


def _failure(lines: Sequence[str]) -> Failure | None:
    """Return the first error, told by the most telling line of its kind."""
    said = [
        (kind, line[max(0, match.start() - 80) : match.start() + 160].strip())
        for line in lines
        for kind, pattern in _ERRORS
        if (match := pattern.search(line))
    ]
    if not said:
        return None
    kinds = [kind for kind, _ in said]
    kind = next(kind for kind in (name for name, _ in ERRORS) if kind in kinds)
    telling = [text for of, text in said if of == kind]
    text = next((text for text in telling if not any(weak in text for weak in WEAK)), telling[0])
    status = re.search(r"Failed status (\d{1,3})\b", text)
    meaning = COMPLETION.get(int(status.group(1))) if status else None
    return Failure(kind, f"{text} ({meaning})" if meaning else text)


# --------------------------------------------------------------------------- the JSON file


def _from_json(text: str) -> Perftest:
    try:
        whole_document = document(text)
        info, results = _part(whole_document, "test_info"), _part(whole_document, "results")
    except ParseError:
        info, results = _tolerated(text)
    title = _text(info.get("test")) or ""
    match = TITLE.match(title)
    size, iterations = whole(results.get("MsgSize")), whole(results.get("n_iterations"))
    average, peak = number(results.get("BW_average")), number(results.get("BW_peak"))
    rate = number(results.get("MsgRate"))
    notes: list[str] = []
    rows: list[Bandwidth] = []
    unit = None
    if size is not None and average is not None:
        unit = _proven_unit(average, rate, size)
        if unit is None:
            notes.append("the file does not tell the unit, and its message rate is too small to prove one")
        else:
            factor = GBIT_S_OF[unit]
            rows.append(Bandwidth(size, iterations, average * factor, peak * factor if peak else None, rate))
    latency_rows: list[Latency] = []
    if size is not None and ("t_avg" in results or "t_typical" in results):
        t = {name: number(results.get(name)) for name in ("t_typical", "t_min", "t_max", "t_avg", "t_stdev")}
        percentile = ("percentile_{}", "t_{}_percentile", "{}_percentile")  # the first one is that of 25.01
        p99, p999 = (
            next((number(results[key.format(name)]) for key in percentile if key.format(name) in results), None)
            for name in ("99", "99.9")
        )
        latency_rows.append(
            Latency(size, iterations, t["t_typical"], t["t_min"], t["t_max"], t["t_avg"], t["t_stdev"], p99, p999)
        )
    if match is None and not rows and not latency_rows:
        raise ParseError("JSON, but not of perftest")
    return Perftest(
        test=_test(match) if match else None,
        device=_text(info.get("Device")),
        qps=whole(info.get("Number_of_qps")),
        connection=_text(info.get("Connection_type")),
        mtu_bytes=whole(info.get("Mtu")),
        gid_index=whole(info.get("GID_index")),
        link=_text(info.get("Link_type")),
        unit=unit,
        rows=tuple(rows),
        latency_rows=tuple(latency_rows),
        error=None,
        bidirectional="Bidirectional" in title,
        notes=tuple(notes),
    )


def _part(value: object, key: str) -> Mapping[str, Any]:
    part = value.get(key) if isinstance(value, dict) else None
    return part if isinstance(part, dict) else {}


def _text(value: object) -> str | None:
    return value[:64] if isinstance(value, str) and value else None


def _tolerated(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return test_info and results of what is no JSON: one `key: value,` a line."""
    parts: dict[str, dict[str, str]] = {"test_info": {}, "results": {}}
    part = ""
    for line in lines_of(text):
        match = re.match(r'\s*"?([\w.%]{1,40})"?\s*:\s*(.{0,120}?)\s*,?\s*$', line)
        if match and match.group(2) == "{":
            part = match.group(1)
        elif match and part in parts:
            parts[part][match.group(1)] = match.group(2).strip('"')
    return parts["test_info"], parts["results"]


def _proven_unit(average: float, rate_mpps: float | None, size: int) -> str | None:
    """Return the unit in which the bandwidth agrees with the message rate, None when neither does."""
    if not rate_mpps or average <= 0 or size <= 0:
        return None
    gbit_s = rate_mpps * 1e6 * size * 8 / 1e9
    for unit in ("Gb/sec", "MiB/sec"):
        if 1 / UNIT_TOLERANCE < average * GBIT_S_OF[unit] / gbit_s < UNIT_TOLERANCE:
            return unit
    return None
