"""nccl-tests (all_reduce_perf and its siblings): the printed table in every layout since 2019, and the file of -J.

Columns are found by the names in the header: `error` (a float, until mid-2022) or `#wrong` (a count), with or without `root`,
`cputime` for `time` (-C 1), per-iteration columns (-I 1), `timestamp` (-S 1, two words). A launcher's prefix is removed, and a
row that NCCL's own log broke in two is joined. Rows that are not whole are not used.

An error nccl-tests reports is a value (`error`), and so is a run without rows or cut short (`complete` false): both are for a
check to judge. ParseError is for what is not nccl-tests' output, or for several different runs in one text.
The JSON holds the whole environment of the process: it is never kept, nor quoted in a message.
Units: bytes, microseconds, GB/s = 1e9 bytes a second (nccl-tests doc/PERFORMANCE.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from netcheck.tools._reading import LARGEST, document, lines_of, not_output_of, number, whole
from netcheck.tools.nccl_log import DEBUG_LINE, warnings_of
from r4090c.errors import ParseError

TOOL = "nccl-tests"
COMMAND = "all_reduce_perf -b 8 -e 256M -f 2 -g 8"

LAUNCHER = re.compile(
    r"[^\[\]<>]{0,40}\[[^\[\]<>]{0,80}\d,\s?\d+\]<std(?:out|err|diag)>:\s?"  # mpirun --tag-output, old and new
    r"|\s{0,4}\d{1,5}: (?=#|\s{2})"  # srun --label
    r"|[\w.\-]{1,64}: (?=#|\s{2,}\d)"  # pdsh
)
DEVICE = re.compile(r"#\s+Rank\s+(\d{1,6})\s+(?:Group\s+\d+\s+)?Pid\s+(\d{1,9})\s+on\s+(\S{1,255})\s+device\s")
PARAMETERS = re.compile(r"#\s*nThread\s+\d+\s+nGpus\s+\d+\s+minBytes\s")
STARTING = re.compile(r"#\s*Collective test starting:\s+(\S{1,64})")
VERSION = re.compile(r"#\s*nccl-tests version (\S{1,32})(?:.*nccl-library=(\d{1,9}))?")
OUT_OF_BOUNDS = re.compile(r"#\s*Out of bounds values\s*:\s*(\d{1,18})\b")
AVERAGE = re.compile(r"#\s*Avg bus bandwidth\s*:\s*(\S{1,32})\s*(\w*)")
BROKEN_ROW = re.compile(
    r"\s*\d{1,20}\s+\d{1,20}\s+[a-z][\w.]{0,20}\s+[a-z]{1,20}\s+-?\d{1,6}(?=[A-Za-z][\w.\-]{0,250}:\d{1,9}:\d{1,9} \[)"
)
"""A row with NCCL's log glued to it: the rest of the row follows on a later line."""
ROW = re.compile(r"\s*\d{1,20}\s+\d{1,20}\s+[a-z][\w.]{0,20}(?:\s|$)")
FAILURE = re.compile(r"(?:(?P<host>[\w.\-]{1,255}): ?)?Test (?:NCCL|CUDA) failure \S{1,200} '(?P<said>.*)")
FAILED_IN = re.compile(r"\.\. (?:(?P<host>[\w.\-]{1,255}) )?pid (?P<pid>\d{1,9}): Test failure")
REFUSED = re.compile(r"(?:(?P<host>[\w.\-]{1,255}): ?)?(?P<said>Test timeout.{0,80}|Invalid number of GPUs.{0,120})")
LAST_ERROR = re.compile(r"#\s*error:\s*(\S.{0,300})")
MOST_NOTES = 20


@dataclass(frozen=True, slots=True)
class Row:
    """One size in one placement. `wrong` None: not checked (N/A, or the old column `error`)."""

    bytes: int
    time_us: float
    algbw_gbyte_s: float
    busbw_gbyte_s: float
    wrong: int | None
    in_place: bool


@dataclass(frozen=True, slots=True)
class NcclTests:
    """One run. None = the text does not tell.

    `test`: the program, "all_reduce_perf". `ranks` of one world; `hosts` in the order of the ranks, `nodes` how many.
    `wrong_total`: wrong elements of all rows; None when nothing was checked: then the bandwidth counts, correctness is unknown.
    `complete`: the run came to its end, has rows, and says no error. `each_alone`: every process was a world of its own (a build
    without MPI under mpirun, or a single GPU): no bandwidth in it means anything. `cpu_time`: of -C 1, no latency either.
    `avg_busbw_gbyte_s` averages ALL sizes and placements: judge `largest()` instead. `cause`: NCCL's first warning.
    """

    test: str | None
    ranks: int | None
    hosts: tuple[str, ...]
    nodes: int
    rows: tuple[Row, ...]
    wrong_total: int | None
    out_of_bounds: int | None
    max_error: float | None
    avg_busbw_gbyte_s: float | None
    complete: bool
    each_alone: bool
    error: str | None
    error_host: str | None = None
    error_pid: int | None = None
    cause: str | None = None
    cpu_time: bool = False
    version: str | None = None
    nccl_version_code: int | None = None
    last_time: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """The message sizes in bytes, ascending."""
        return tuple(sorted({row.bytes for row in self.rows}))

    def largest(self, *, in_place: bool = False) -> Row | None:
        """Return the row of the largest size, the slowest one if there are several; None when there is none."""
        rows = [row for row in self.rows if row.in_place == in_place]
        return max(rows, key=lambda row: (row.bytes, -row.busbw_gbyte_s), default=None)

    @property
    def busbw_gbyte_s(self) -> float | None:
        """The bus bandwidth to judge: out of place at the largest size (in place where only that was run)."""
        row = self.largest() or self.largest(in_place=True)
        return None if row is None else row.busbw_gbyte_s


def parse(text: str) -> NcclTests:
    """Return the run of the printed table or of the JSON file. Raises ParseError as the module says."""
    return _from_json(text) if text.lstrip("\ufeff \t\r\n").startswith("{") else _from_table(text)


# --------------------------------------------------------------------------- the table


@dataclass(slots=True)
class _Columns:
    """Where the header puts what: the column of time, algbw, busbw and wrong of each half; `width` in words."""

    width: int
    halves: tuple[Mapping[str, int], ...]
    cpu_time: bool
    timestamp: int | None


@dataclass(slots=True)
class _Seen:
    """What was read so far."""

    columns: _Columns | None = None
    starts: int = 0
    headers: int = 0
    ends: int = 0
    cut: bool = False
    rows: list[Row] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    devices: list[tuple[int, int, str]] = field(default_factory=list)
    tests: dict[str, None] = field(default_factory=dict)
    parameters: dict[str, None] = field(default_factory=dict)
    out_of_bounds: list[int] = field(default_factory=list)
    averages: list[float] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    error: str | None = None
    error_host: str | None = None
    error_pid: int | None = None
    version: str | None = None
    nccl_version_code: int | None = None
    last_time: str | None = None
    cpu_time: bool = False


def _from_table(text: str) -> NcclTests:
    lines = lines_of(text)
    seen = _Seen()
    unfinished = lines[-1]  # without a newline: the last word may be cut
    for line in _whole_lines(lines[:-1]):
        _read_line(line, seen)
    if ROW.match(_without_launcher(unfinished)):
        seen.cut = True
    else:
        _read_line(_without_launcher(unfinished), seen)
    if not (seen.headers or seen.parameters or seen.devices or seen.tests or seen.error):
        raise not_output_of(TOOL, lines)
    if len(seen.tests) > 1 or len(seen.parameters) > 1:
        what = ", ".join(seen.tests) if len(seen.tests) > 1 else "different parameters"
        raise ParseError(f"nccl-tests: several runs in one text ({what}): parse each by itself")
    ranks = len({rank for rank, _, _ in seen.devices}) or None
    hosts = tuple(dict.fromkeys(host for _, _, host in seen.devices))
    zeros = {(pid, host) for rank, pid, host in seen.devices if rank == 0}
    last = next(iter(reversed(seen.notes)), None)
    whole_run = bool(seen.rows) and seen.ends >= max(seen.starts, seen.headers) > 0 and not seen.cut
    error = seen.error or (last if not whole_run and last and last.startswith("error: ") else None)
    out_of_bounds = sum(seen.out_of_bounds) if seen.out_of_bounds else None
    return NcclTests(
        test=next(iter(seen.tests), None),
        ranks=ranks,
        hosts=hosts,
        nodes=len(hosts),
        rows=tuple(seen.rows),
        wrong_total=_wrong_total(seen.rows, out_of_bounds, by_error=bool(seen.errors)),
        out_of_bounds=out_of_bounds,
        max_error=max(seen.errors, default=None),
        avg_busbw_gbyte_s=seen.averages[-1] if seen.averages else None,
        complete=whole_run and error is None,
        each_alone=ranks == 1 or len(zeros) > 1,
        error=error,
        error_host=seen.error_host,
        error_pid=seen.error_pid,
        cause=next((warning.text for warning in warnings_of(lines)), None),
        cpu_time=seen.cpu_time,
        version=seen.version,
        nccl_version_code=seen.nccl_version_code,
        last_time=seen.last_time,
        notes=tuple(seen.notes)[:MOST_NOTES],
    )


def _without_launcher(line: str) -> str:
    match = LAUNCHER.match(line)
    return line[match.end() :] if match else line


def _whole_lines(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines without a launcher's prefix and without NCCL's log, which may come in the middle of a row."""
    begun = ""
    for line in lines:
        line = _without_launcher(line)
        if "NCCL" in line:
            log = BROKEN_ROW.match(line) or DEBUG_LINE.search(line)
            if log is not None:
                begun = (log.group() if log.re is BROKEN_ROW else line[: log.start()].rstrip()) or begun
                continue
        if begun and line.startswith("#"):
            yield begun
        elif begun and line.strip():
            line = f"{begun} {line}"
        elif begun:
            continue
        yield line
        begun = ""
    if begun:
        yield begun


def _read_line(line: str, seen: _Seen) -> None:
    if ROW.match(line):
        _read_row(line, seen)
    elif line.lstrip().startswith("#"):
        _read_comment(line, seen)
    elif "Test " not in line and "Invalid number" not in line:
        return
    elif match := FAILURE.search(line):
        if seen.error is None:
            seen.error = match["said"].rstrip().rstrip("'").strip().removesuffix("/").strip()[:300] or "failure"
            seen.error_host = match["host"]
    elif match := FAILED_IN.search(line):
        seen.error = seen.error or "test failure"
        seen.error_host = seen.error_host or match["host"]
        seen.error_pid = seen.error_pid or int(match["pid"])
    elif (match := REFUSED.search(line)) and seen.error is None:
        seen.error, seen.error_host = match["said"].strip(), match["host"]


def _read_comment(line: str, seen: _Seen) -> None:
    if "algbw" in line and "busbw" in line:
        seen.columns = _columns(line.lstrip().lstrip("#").split())
        seen.headers += 1
    elif match := DEVICE.search(line):
        seen.devices.append((int(match.group(1)), int(match.group(2)), match.group(3)))
    elif match := PARAMETERS.search(line):
        seen.starts += 1
        seen.parameters[" ".join(line[match.start() :].split())] = None
    elif match := STARTING.search(line):
        seen.tests[match.group(1).rpartition("/")[2]] = None
    elif match := VERSION.search(line):
        seen.version, seen.nccl_version_code = match.group(1), whole(match.group(2))
    elif match := OUT_OF_BOUNDS.search(line):
        seen.out_of_bounds.append(int(match.group(1)))
    elif match := AVERAGE.search(line):
        seen.ends += 1
        average = number(match.group(1))
        if average is not None:
            seen.averages.append(average)
        if match.group(2) == "FAILED":
            seen.notes["average bus bandwidth is below what NCCL_TESTS_MIN_BW asks"] = None
    elif match := LAST_ERROR.search(line):
        seen.notes[f"error: {match.group(1).strip()}"] = None


def _columns(names: Sequence[str]) -> _Columns:
    """Return where the columns are: each half begins at its time."""
    starts = [index for index, name in enumerate(names) if name in ("time", "cputime")]
    halves = []
    for start, end in zip(starts, [*starts, len(names)][1:], strict=True):
        at = {name: start + offset for offset, name in reversed(list(enumerate(names[start:end])))}
        half = {"time": start, "algbw": at.get("algbw", -1), "busbw": at.get("busbw", -1)}
        halves.append({**half, "wrong": at.get("#wrong", -1), "error": at.get("error", -1)})
    timestamp = names.index("timestamp") if "timestamp" in names else None
    return _Columns(
        width=len(names) + (timestamp is not None),
        halves=tuple(halves[:2]),
        cpu_time="cputime" in names,
        timestamp=timestamp,
    )


def _read_row(line: str, seen: _Seen) -> None:
    columns, words = seen.columns, line.split()
    if columns is None or len(words) != columns.width or not columns.halves:
        seen.cut = True
        return
    size = whole(words[0])
    if size is None:
        seen.cut = True
        return
    for in_place, half in enumerate(columns.halves):
        row = _row(
            size,
            number(words[half["time"]]),
            number(words[half["algbw"]]),
            number(words[half["busbw"]]),
            _count(number(words[half["wrong"]])) if half["wrong"] >= 0 else None,
            in_place=bool(in_place),
        )
        if row is None:  # "inf", "-nan"
            seen.cut = True
        else:
            seen.rows.append(row)
        if half["error"] >= 0 and (error := number(words[half["error"]])) is not None:
            seen.errors.append(error)
    seen.cpu_time |= columns.cpu_time
    if columns.timestamp is not None:
        seen.last_time = " ".join(words[columns.timestamp : columns.timestamp + 2])


def _row(
    size: int, time_us: float | None, algbw: float | None, busbw: float | None, wrong: int | None, *, in_place: bool
) -> Row | None:
    if time_us is None or algbw is None or busbw is None or min(size, time_us, algbw, busbw) < 0:
        return None
    return Row(size, time_us, algbw, busbw, wrong, in_place)


def _count(value: float | None) -> int | None:
    """Return "#wrong" as a count: it may print as 1.04858e+06."""
    return None if value is None or value < 0 else min(round(value), LARGEST)


def _wrong_total(rows: Sequence[Row], out_of_bounds: int | None, *, by_error: bool) -> int | None:
    """Return the wrong elements; None when nothing was checked, whatever the footer says.

    The old column `error` is no count: there the footer's number of rows out of bounds stands for it.
    """
    known = [row.wrong for row in rows if row.wrong is not None]
    if known or by_error or out_of_bounds:
        return sum(known) or out_of_bounds or (0 if known or out_of_bounds == 0 else None)
    return None


# --------------------------------------------------------------------------- the JSON file


def _from_json(text: str) -> NcclTests:
    text = re.sub(r":\s*-?(?:inf|nan)(?=\s*[,}\]])", ": null", text)  # printf's, which JSON does not know
    error = None
    try:
        whole_document = document(text)
    except ParseError as refused:
        whole_document, error = _recovered(text), str(refused)
    if not isinstance(whole_document, dict) or not ({"nccl_version", "config", "results"} & whole_document.keys()):
        raise ParseError(error or "JSON, but not of nccl-tests -J")
    return _run_of(whole_document, error)


def _recovered(text: str) -> dict[str, Any]:
    """Return what is whole in a document that was cut: the keys before the cut, and the first results."""
    decoder = json.JSONDecoder(parse_constant=lambda name: None)
    found: dict[str, Any] = {}
    try:
        at = text.index("{") + 1
        while match := re.compile(r'\s*,?\s*"(\w{1,64})"\s*:\s*').match(text, at):
            key, at = match.group(1), match.end()
            if key == "results" and text[at : at + 1] == "[":
                found[key] = results = []
                at += 1
                while True:
                    item, at = decoder.raw_decode(text, re.compile(r"[\s,]*").match(text, at).end())  # type: ignore[union-attr]
                    results.append(item)
            found[key], at = decoder.raw_decode(text, at)
    except (ValueError, RecursionError):
        pass
    return found


def _run_of(whole_document: Mapping[str, Any], error: str | None) -> NcclTests:
    config = _mapping(whole_document.get("config"))
    devices = [device for device in _list(config.get("devices")) if isinstance(device, dict)]
    hosts = tuple(dict.fromkeys(name for device in devices if isinstance(name := device.get("hostname"), str)))
    rows, cut, cpu_time = [], False, False
    for result in _list(whole_document.get("results")):
        result = _mapping(result)
        size = whole(result.get("size"))
        for in_place, key in ((False, "out_of_place"), (True, "in_place")):
            if result.get(key) is None:
                continue
            half = _mapping(result[key])
            cpu_time |= "cpu_time" in half
            row = _row(
                -1 if size is None else size,
                number(half.get("time", half.get("cpu_time"))),
                number(half.get("alg_bw")),
                number(half.get("bus_bw")),
                _count(number(half.get("nwrong"))),
                in_place=in_place,
            )
            if row is None:
                cut = True
            else:
                rows.append(row)
    out_of_bounds = whole(_mapping(whole_document.get("out_of_bounds")).get("count"))
    average = _mapping(whole_document.get("average_bus_bandwidth") or whole_document.get("average_bus_bandwidith"))
    told = [text for text in _list(whole_document.get("errors")) if isinstance(text, str) and text.strip()]
    ended = bool(average) and out_of_bounds is not None and not cut
    if error is None and not ended and told:
        error = told[0][:300]
    threads, gpus = whole(config.get("nthreads")) or 1, whole(config.get("ngpus")) or 1
    ranks = len(devices) * threads * gpus or None  # one device is listed per process
    arguments = _list(whole_document.get("args"))
    program = arguments[0].rpartition("/")[2] if arguments and isinstance(arguments[0], str) else None
    end_time = whole_document.get("end_time")
    return NcclTests(
        test=program[:64] if program else None,
        ranks=None if ranks is None else min(ranks, LARGEST),
        hosts=hosts,
        nodes=len(hosts),
        rows=tuple(rows),
        wrong_total=_wrong_total(rows, out_of_bounds, by_error=False),
        out_of_bounds=out_of_bounds,
        max_error=None,
        avg_busbw_gbyte_s=number(average.get("bandwidth", average.get("bandwidith"))),
        complete=bool(rows) and ended and error is None,
        each_alone=ranks == 1,
        error=error,
        cpu_time=cpu_time,
        nccl_version_code=whole(whole_document.get("nccl_version")),
        last_time=end_time if isinstance(end_time, str) else None,
        notes=tuple(text[:300] for text in told[:MOST_NOTES]),
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
