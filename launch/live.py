"""What the nodes do now: samples (launch/sampler.py) -> rates, GPUs, ranks and runs of one Snapshot; pure.

None is "not known" everywhere, never 0: a hung nvidia-smi, a rate that has only one sample, a counter that was set anew.
Times in samples are the node's own; what is compared is compared on one clock, so clocks that differ do no harm.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from netcheck.counters import LOSS_OF_RDMA
from netcheck.data_network import data_iface, peers_of, rdma_ports
from netcheck.facts.gpus import parse_query, read_table
from netcheck.tools import nvidia_smi_compute_apps
from r4090c.errors import ParseError
from r4090c.model import Cluster, Fact, Gpu, GpuProcess, NetFact, Node, RdmaPort

SCHEMA = "r4090c.sample/1"
SNAPSHOT = "r4090c.top/1"
WORD_BYTES = 4
"""InfiniBand counts data in words of four bytes (PortXmitData, IBTA 1.x, also on RoCE)."""
OLD_ANSWER_S = 10.0
"""est.: nvidia-smi without persistence mode takes some seconds; what is older says nothing about now."""
SILENT_S = 10.0
"""est.: a rank beats at most once a second; a step of some seconds is normal."""
LATE_S = 5.0
"""est.: a beat is up to 1 s old when its agent reads it, half a second later; that is saved within 1 s, and sampled 2 s later."""
STANDS_STILL_S = 60.0
"""est.: a checkpoint or an evaluation takes seconds to a minute; with more than ten steps' time without one a run stands."""

THROTTLE: Mapping[int, tuple[str, str]] = {
    0x2: ("applications_clocks", "clocks set by hand"),
    0x4: ("sw_power_cap", "power cap"),
    0x8: ("hw_slowdown", "hardware slowdown"),
    0x10: ("sync_boost", "sync boost"),
    0x20: ("sw_thermal_slowdown", "too hot (driver)"),
    0x40: ("hw_thermal_slowdown", "too hot (hardware)"),
    0x80: ("hw_power_brake_slowdown", "power brake"),
    0x100: ("display_clock", "display clock"),
}
"""Bit of clocks_event_reasons.active -> its name and what a person is told (nvml.h, NvmlClocksEventReasons, driver 610).

Bit 1, idle, slows nothing down that anybody waits for.
"""
WORDS = dict(THROTTLE.values())
_IDLE, _SLOWDOWN, _SPECIFIC = 0x1, 0x8, 0xC0


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a sampler. `time_s` is the node's clock, `monotonic_s` its clock for differences."""

    node: str
    time_s: float
    monotonic_s: float
    raw: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DataLinks:
    """Which links of a node carry the training traffic: `iface` and RDMA `ports`, and their rates in Gbit/s (None = not told)."""

    iface: str | None = None
    ports: tuple[str, ...] = ()
    rates_gbit_s: Mapping[str, float | None] | None = None
    why: str = "not asked yet"


@dataclass(frozen=True, slots=True)
class Heard:
    """What is known of one node. `at_s`: the controller's monotonic time of `last`; `since_s`: Unix time since it is up or down.

    `why` None = it is heard. `tries`: how often it was tried to reach it again.
    """

    node: str
    before: Sample | None = None
    last: Sample | None = None
    at_s: float = 0.0
    links: DataLinks = DataLinks()
    since_s: float = 0.0
    why: str | None = "not reached yet"
    next_command: str = ""
    tries: int = 0


@dataclass(frozen=True, slots=True)
class Lease:
    """Who uses a GPU, of any account (launch/leases.py); None = not told. `since_s`: Unix time of the node."""

    user: str | None
    run_id: str | None
    since_s: float | None


@dataclass(frozen=True, slots=True)
class GpuView:
    """One GPU. `utilization`: 0 to 1. `throttle`: names of THROTTLE that are active, None = not told. `faults`: complaints.

    `lease`: the run that holds it; None = free, or not known.
    """

    index: int
    name: str
    uuid: str
    pci: str
    utilization: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    power_w: float | None
    power_limit_w: float | None
    temperature_c: int | None
    sm_clock_hz: float | None
    throttle: tuple[str, ...] | None
    processes: tuple[GpuProcess, ...] | None
    faults: tuple[str, ...] = ()
    lease: Lease | None = None


@dataclass(frozen=True, slots=True)
class LinkView:
    """An interface, or an RDMA port (`mlx5_0:1`). Totals count since boot; `rate_bytes_per_s`: what the link can do one way.

    `data`: it carries the training traffic. `errors`: counter -> total of those that mean loss. `new_errors`: grown since the
    last sample.
    """

    name: str
    kind: str
    data: bool
    rx_bytes: int | None
    tx_bytes: int | None
    rx_bytes_per_s: float | None
    tx_bytes_per_s: float | None
    rate_bytes_per_s: float | None
    errors: Mapping[str, int]
    new_errors: int | None


@dataclass(frozen=True, slots=True)
class DiskView:
    """The room of a file system; `error`: why it is not known, as when an NFS server hangs."""

    path: str
    size_bytes: int | None
    free_bytes: int | None
    error: str | None


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank as its node's agent knows it. `beat_s`: Unix time of its last beat; `age_s`: how long ago, on the node's clock.

    `phase`: of the last beat; "starting" before the first, "gone" once the process is.
    """

    rank: int
    node: str
    phase: str
    step: int | None
    beat_s: float | None
    age_s: float | None
    exit_code: int | None


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node. Not `up`: nothing is known of it but `why` and `since_s` (Unix time), and what to try next."""

    name: str
    up: bool
    since_s: float
    why: str | None
    next_command: str
    tries: int
    time_s: float | None = None
    cpu: float | None = None
    cores: int | None = None
    load1: float | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    gpus: tuple[GpuView, ...] | None = None
    gpus_error: str | None = None
    links: tuple[LinkView, ...] = ()
    links_why: str | None = None
    disks: tuple[DiskView, ...] = ()


@dataclass(frozen=True, slots=True)
class RunView:
    """One run that goes on (or has just ended), put together from its nodes.

    `unit`: what the rate counts, tokens or images. `metrics_error`: why step, loss and rate are not known. `slowest`: the rank
    with the lowest step, of those the one that has been silent for longest. `missing`: nodes of the run that tell nothing.
    `waits_for`: who starts the next attempt, where `state` is waiting.
    """

    id: str
    recipe: str | None
    attempt: int | None
    state: str
    cause: str | None
    step: int | None
    steps: int | None
    loss: float | None
    unit: str
    rate_per_s: float | None
    step_time_s: float | None
    left_s: float | None
    last_step_s: float | None
    age_s: float | None
    metrics_error: str | None
    nodes: tuple[str, ...]
    missing: tuple[str, ...]
    world_size: int | None
    ranks: tuple[RankView, ...]
    slowest: int | None
    waits_for: str | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything at one moment. `time_s`: Unix time of the controller."""

    schema: str
    cluster: str
    time_s: float
    nodes: tuple[NodeView, ...]
    runs: tuple[RunView, ...]


# ----------------------------------------------------------------------------- reading


def parse_sample(line: str) -> Sample:
    """Return the sample a line holds. Raises ParseError: a login shell prints other things, and a line may be cut."""
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ParseError("not JSON") from error
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        raise ParseError("not a sample")
    time_s, monotonic_s = _number(raw.get("time")), _number(raw.get("monotonic"))
    if time_s is None or monotonic_s is None or not isinstance(raw.get("node"), str):
        raise ParseError("a sample without node or time")
    return Sample(raw["node"], time_s, monotonic_s, raw)


def data_links(node: Node, cluster: Cluster, net: Fact[Any], rdma: Fact[Any]) -> DataLinks:
    """Return which links of `node` carry the training traffic, by its facts."""
    facts: NetFact | None = net.value
    if facts is None:
        return DataLinks(why=net.error or net.absent or "not told")
    ports: tuple[RdmaPort, ...] = rdma.value or ()
    name, why = data_iface(facts, node, peers_of(node, cluster), loopback=cluster.network.kind == "loopback")
    serving = rdma_ports(node, ports, facts, name, cluster)
    rates: dict[str, float | None] = {port.name: port.rate_gbit_s for port in ports}
    for iface in facts.ifaces:
        stated = cluster.network.rate_gbit_s if iface.name == name and not cluster.network.rdma else None
        told = None if iface.speed_mbit_s is None else iface.speed_mbit_s / 1000
        rates[iface.name] = stated if stated is not None else told
    return DataLinks(name, tuple(port.name for port in serving), rates, why)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(raw: Mapping[str, Any], key: str) -> str:
    value = raw.get(key)
    return value if isinstance(value, str) else ""


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


# ----------------------------------------------------------------------------- the node


def cpu_share(before: str, after: str) -> float | None:
    """Return the share of CPU time that was used between two readings of /proc/stat, 0 to 1. Waiting for disks is not use."""
    times = [_cpu_times(text) for text in (before, after)]
    if times[0] is None or times[1] is None:
        return None
    grown = [new - old for old, new in zip(times[0], times[1], strict=False)]
    total = sum(grown)
    idle = grown[3] + (grown[4] if len(grown) > 4 else 0)
    return None if total <= 0 else min(1.0, max(0.0, 1 - idle / total))


def _cpu_times(text: str) -> list[int] | None:
    match = re.search(r"^cpu +([\d ]+)$", text, re.MULTILINE | re.ASCII)
    words = match.group(1).split()[:8] if match else []  # guest time is in user time already
    return [int(word) for word in words] if len(words) >= 4 else None


def _memory(text: str, name: str) -> int | None:
    match = re.search(rf"^{name}: +(\d{{1,15}}) kB$", text, re.MULTILINE | re.ASCII)
    return int(match.group(1)) * 1024 if match else None


def net_counters(raw: object) -> dict[str, dict[str, int]]:
    """Return interface -> {"rx_bytes", "rx_errors", "tx_bytes", "tx_errors"} of /proc/net/dev."""
    found = {}
    for line in (raw if isinstance(raw, str) else "").split("\n"):
        name, colon, rest = line.rpartition(":")
        words = rest.split()
        if colon and len(words) == 16 and all(word.isascii() and word.isdigit() for word in words):
            values = [int(word) for word in words]
            found[name.strip()] = {"rx_bytes": values[0], "rx_errors": values[2], "tx_bytes": values[8], "tx_errors": values[10]}
    return found


def rdma_counters(raw: object) -> dict[str, dict[str, int]]:
    """Return port -> counter -> value; bytes as "rx_bytes" and "tx_bytes"."""
    found = {}
    for port, texts in _mapping(raw).items():
        values = {name: int(text) for name, text in _mapping(texts).items() if re.fullmatch(r"\d{1,20}", str(text), re.ASCII)}
        for name, counter in (("rx_bytes", "port_rcv_data"), ("tx_bytes", "port_xmit_data")):
            if counter in values:
                values[name] = values.pop(counter) * WORD_BYTES
        found[port] = values
    return found


def _growth(before: Mapping[str, int] | None, after: Mapping[str, int], name: str, seconds: float) -> float | None:
    """Return how fast a counter grew; None with one reading, and when it was set anew."""
    if before is None or name not in before or name not in after or seconds <= 0 or after[name] < before[name]:
        return None
    return (after[name] - before[name]) / seconds


def _means_loss(counter: str) -> bool:
    return counter in LOSS_OF_RDMA or counter in ("rx_errors", "tx_errors")


def links_of(before: Sample | None, last: Sample, data: DataLinks) -> tuple[LinkView, ...]:
    """Return the links of a node: those of the data network first."""
    seconds = 0.0 if before is None else last.monotonic_s - before.monotonic_s
    found = []
    for kind, read, key, ours in (
        ("ethernet", net_counters, "netdev", (data.iface,)),
        ("rdma", rdma_counters, "rdma", data.ports),
    ):
        older = read(before.raw.get(key)) if before else {}
        for name, values in read(last.raw.get(key)).items():
            old = older.get(name)
            errors = {counter: value for counter, value in values.items() if _means_loss(counter)}
            grown = [_growth(old, errors, counter, 1.0) for counter in errors]
            rate = (data.rates_gbit_s or {}).get(name)
            found.append(
                LinkView(
                    name=name,
                    kind=kind,
                    data=name in ours,
                    rx_bytes=values.get("rx_bytes"),
                    tx_bytes=values.get("tx_bytes"),
                    rx_bytes_per_s=_growth(old, values, "rx_bytes", seconds),
                    tx_bytes_per_s=_growth(old, values, "tx_bytes", seconds),
                    rate_bytes_per_s=None if rate is None else rate * 1e9 / 8,
                    errors=errors,
                    new_errors=None if old is None else round(sum(one for one in grown if one is not None)),
                )
            )
    return tuple(sorted(found, key=lambda link: not link.data))


def throttle_of(cell: str | None) -> tuple[str, ...] | None:
    """Return the names of what slows a GPU down from `clocks_event_reasons.active` ("0x…04"); None = not told."""
    if cell is None or not re.fullmatch(r"0x[0-9a-fA-F]{1,16}", cell):
        return None
    bits = int(cell, 16) & ~_IDLE
    if bits & _SPECIFIC:
        bits &= ~_SLOWDOWN  # the sum of the two, and of nothing else on a GeForce
    named = tuple(name for bit, (name, _) in THROTTLE.items() if bits & bit)
    rest = bits & ~sum(THROTTLE)
    return (*named, hex(rest)) if rest else named


def gpus_of(raw: Mapping[str, Any], interval_s: float) -> tuple[tuple[GpuView, ...] | None, str | None]:
    """Return (GPUs by index, None), or (None, why they are not known). A node that should have none is (None, None)."""
    told, apps = raw.get("gpus"), _mapping(raw.get("apps"))
    if told is None:
        return None, None
    answer = _mapping(told)
    age_s = _number(answer.get("age_s"))
    if "error" in answer or age_s is None:
        return None, str(answer.get("error") or "nvidia-smi was not asked")
    if age_s > max(OLD_ANSWER_S, 2 * interval_s):
        return None, f"nvidia-smi has not answered for {age_s:.0f} s"
    text = _text(answer, "text")
    fields = tuple(str(field) for field in _items(answer.get("fields")))
    try:
        gpus = parse_query(text, fields)
        rows = {row.get("index"): row for row in read_table(text, fields).rows}
    except ParseError as error:
        return None, str(error)
    try:
        processes: tuple[GpuProcess, ...] | None = nvidia_smi_compute_apps.parse(_text(apps, "text"))
    except ParseError:
        processes = None
    leases = leases_of(raw.get("leases"))
    return tuple(_gpu(gpu, rows.get(str(gpu.index), {}), processes, leases.get(gpu.pci)) for gpu in gpus), None


def leases_of(raw: object) -> dict[str, Lease]:
    """Return lease (a PCI address) -> who holds it, of those that are held."""
    held = [_mapping(one) for one in _items(_mapping(raw).get("busy"))]
    return {
        str(one.get("lease")): Lease(_text(one, "user") or None, _text(one, "run_id") or None, _number(one.get("since")))
        for one in held
    }


def _gpu(gpu: Gpu, row: Mapping[str, str], processes: Sequence[GpuProcess] | None, lease: Lease | None) -> GpuView:
    clock = re.fullmatch(r"(\d{1,6}) MHz", row.get("clocks.current.sm", ""), re.ASCII)
    reasons = row.get("clocks_event_reasons.active", row.get("clocks_throttle_reasons.active"))
    mib = 1 << 20
    return GpuView(
        index=gpu.index,
        name=gpu.name,
        uuid=gpu.uuid,
        pci=gpu.pci,
        utilization=None if gpu.utilization_pct is None else gpu.utilization_pct / 100,
        memory_used_bytes=None if gpu.memory_used_mib is None else gpu.memory_used_mib * mib,
        memory_total_bytes=None if gpu.memory_total_mib is None else gpu.memory_total_mib * mib,
        power_w=gpu.power_w,
        power_limit_w=gpu.power_limit_w,
        temperature_c=gpu.temperature_c,
        sm_clock_hz=int(clock.group(1)) * 1e6 if clock else None,
        throttle=throttle_of(reasons),
        processes=None if processes is None else tuple(one for one in processes if one.gpu_uuid == gpu.uuid),
        faults=gpu.faults,
        lease=lease,
    )


def disks_of(raw: object) -> tuple[DiskView, ...]:
    """Return the file systems of a sample."""
    found = []
    for path, told in _mapping(raw).items():
        one = _mapping(told)
        size, free = _whole(one.get("size")), _whole(one.get("free"))
        known = size is not None and free is not None and size > 0
        error = None if known else str(one.get("error") or "its size is not told")
        found.append(DiskView(str(path), size if known else None, free if known else None, error))
    return tuple(found)


def node_view(heard: Heard, interval_s: float, now_s: float) -> NodeView:
    """Return what a node does now. `now_s`: the controller's monotonic time; an old sample is none."""
    last = heard.last
    why = heard.why
    if why is None and (last is None or now_s - heard.at_s > stale_after_s(interval_s)):
        why = f"nothing heard for {now_s - heard.at_s:.0f} s"
    if why is not None or last is None:
        return NodeView(heard.node, False, heard.since_s, why or "nothing heard yet", heard.next_command, heard.tries)
    stat, memory = _text(last.raw, "stat"), _text(last.raw, "meminfo")
    load = re.match(r"(\d{1,6}\.\d{1,2}) ", _text(last.raw, "loadavg"), re.ASCII)
    gpus, gpus_error = gpus_of(last.raw, interval_s)
    return NodeView(
        name=heard.node,
        up=True,
        since_s=heard.since_s,
        why=None,
        next_command="",
        tries=0,
        time_s=last.time_s,
        cpu=cpu_share(_text(heard.before.raw, "stat"), stat) if heard.before else None,
        cores=len(re.findall(r"^cpu\d+ ", stat, re.MULTILINE)) or None,
        load1=float(load.group(1)) if load else None,
        memory_total_bytes=_memory(memory, "MemTotal"),
        memory_available_bytes=_memory(memory, "MemAvailable"),
        gpus=gpus,
        gpus_error=gpus_error,
        links=links_of(heard.before, last, heard.links),
        links_why=None if heard.links.iface else heard.links.why,
        disks=disks_of(last.raw.get("disks")),
    )


def stale_after_s(interval_s: float) -> float:
    """Return after how long without a sample a node is not heard any more; est.: three lines may be late."""
    return max(10.0, 3 * interval_s)


# ----------------------------------------------------------------------------- the runs


def ranks_of(state: Mapping[str, Any], node: str, node_time_s: float, since_s: float) -> tuple[RankView, ...]:
    """Return the ranks of one agent's state. `since_s`: how long ago, on our clock, the node's clock said `node_time_s`."""
    plan, records, beats = (_mapping(state.get(key)) for key in ("plan", "ranks", "beats"))
    planned = [rank for rank, where in _mapping(plan.get("ranks")).items() if where == node]
    found = []
    for rank in sorted({*planned, *records, *beats}, key=lambda one: (len(one), one)):
        if not re.fullmatch(r"\d{1,6}", rank, re.ASCII):
            continue
        record, beat = _mapping(records.get(rank)), _mapping(beats.get(rank))
        beat_s = _number(beat.get("time"))
        phase = str(beat.get("phase") or "starting")[:20]
        over = state.get("outcome") is not None or state.get("alive") is False  # ranks do not outlive their agent
        if record.get("gone") is not None or (over and phase != "done"):
            phase = "gone"
        found.append(
            RankView(
                rank=int(rank),
                node=node,
                phase=phase,
                step=_whole(beat.get("step")),
                beat_s=beat_s,
                age_s=None if beat_s is None else max(0.0, node_time_s - beat_s + since_s),
                exit_code=_whole(record.get("exit")),
            )
        )
    return tuple(found)


def slowest_of(ranks: Iterable[RankView]) -> int | None:
    """Return the rank that is furthest behind: the lowest step, then the oldest beat; None while none trains."""
    training = [one for one in ranks if one.phase in ("train", "checkpoint") and one.step is not None and one.age_s is not None]
    if not training:
        return None
    return min(training, key=lambda one: (one.step or 0, -(one.age_s or 0.0), one.rank)).rank


def is_behind(run: RunView) -> bool:
    """Return whether the slowest rank of a run is worth a word: others are steps ahead, or it has been silent for long."""
    steps = {one.rank: one.step for one in run.ranks if one.step is not None and one.phase != "gone"}
    slowest = next((one for one in run.ranks if one.rank == run.slowest), None)
    if slowest is None or slowest.step is None:
        return False
    step_s = run.step_time_s or SILENT_S
    return max(steps.values()) - slowest.step > 1 + LATE_S / step_s or (slowest.age_s or 0.0) > max(SILENT_S, 5 * step_s)


def _progress(lines: Sequence[Mapping[str, Any]], started_s: float | None) -> dict[str, Any]:
    """Return step, loss, rate, unit, step time and pace of the last lines of metrics.jsonl of this attempt."""
    ours = [
        line
        for line in lines
        if _whole(line.get("step")) is not None and (started_s is None or (_number(line.get("time")) or math.inf) >= started_s)
    ]
    if not ours:
        return {**dict.fromkeys(("step", "loss", "rate", "step_time", "pace", "time")), "unit": "tokens"}
    last = ours[-1]
    unit = "images" if "images_per_s" in last else "tokens"
    rates = [rate for line in ours if (rate := _number(line.get(f"{unit}_per_s"))) is not None]
    times = [taken for line in ours if (taken := _number(line.get("step_time_s"))) is not None]
    stamps = [(step, at) for line in ours if (at := _number(line.get("time"))) is not None and (step := line["step"]) > 0]
    steps_done = stamps[-1][0] - stamps[0][0] if len(stamps) > 1 else 0
    # Checkpoints and evaluations are not in step_time_s, but they take time; the first steps are slower.
    pace = (stamps[-1][1] - stamps[0][1]) / steps_done if steps_done > 0 else (median(times) if times else None)
    pace = pace if pace is not None and pace > 0 else None
    return {
        "unit": unit,
        "step": last["step"],
        "loss": _number(last.get("loss")),
        "rate": median(rates[1:] or rates) if rates else None,
        "step_time": median(times[1:] or times) if times else None,
        "pace": pace,
        "time": _number(last.get("time")),
    }


def runs_of(heard: Iterable[Heard], interval_s: float, now_s: float) -> tuple[RunView, ...]:
    """Return the runs that the nodes tell of, those that go on first, then by id. A node that is not heard tells nothing."""
    told: dict[str, list[tuple[Heard, Mapping[str, Any]]]] = {}
    for one in heard:
        if one.why is not None or one.last is None or now_s - one.at_s > stale_after_s(interval_s):
            continue
        for state in _items(one.last.raw.get("runs")):
            if isinstance(state, dict) and isinstance(state.get("run_id"), str):
                told.setdefault(state["run_id"], []).append((one, state))
    runs = [_run(run_id, parts, now_s) for run_id, parts in told.items()]
    return tuple(sorted(runs, key=lambda run: (run.state not in ("running", "starting", "waiting"), run.id)))


def _run(run_id: str, parts: Sequence[tuple[Heard, Mapping[str, Any]]], now_s: float) -> RunView:
    attempt = max((_whole(told.get("attempt")) or 0 for _, told in parts), default=0)
    parts = [(one, told) for one, told in parts if (_whole(told.get("attempt")) or 0) == attempt]
    plan = next((_mapping(told["plan"]) for _, told in parts if told.get("plan")), {})
    lead = next(((one, told) for one, told in parts if told.get("node_rank") == 0), None)
    ranks: list[RankView] = []
    for one, told in parts:
        assert one.last is not None
        ranks += ranks_of(told, one.node, one.last.time_s, now_s - one.at_s)
    ranks.sort(key=lambda rank: rank.rank)
    nodes = tuple(str(name) for name in _items(plan.get("nodes"))) or tuple(one.node for one, _ in parts)
    missing = tuple(name for name in nodes if name not in {one.node for one, _ in parts})
    metrics = _mapping(lead[1].get("metrics")) if lead else {}
    lines = [line for line in _items(metrics.get("lines")) if isinstance(line, dict)]
    error = str(metrics["error"]) if "error" in metrics else None if lead else "its first node tells nothing"
    started_s = _number(lead[1].get("started")) if lead else None
    progress = _progress(lines, started_s)
    age_s = None
    if lead and lead[0].last is not None and progress["time"] is not None:
        age_s = max(0.0, lead[0].last.time_s - progress["time"] + now_s - lead[0].at_s)
    waits_for = next((str(told["waits"]) for _, told in parts if told.get("waits")), None)
    steps, state, pace_s = _whole(plan.get("steps")), _state(parts), progress["pace"]
    if state in ("failed", "stopped", "lost") and waits_for is not None:  # as launch/jobs.py has it
        state = "waiting"
    # A rate of a run that stands still says nothing about now.
    moves = state == "running" and pace_s is not None and (age_s or 0.0) < max(STANDS_STILL_S, 10 * pace_s)
    left_s = None
    if moves and steps is not None:
        left_s = max(0.0, (steps - progress["step"]) * pace_s - min(age_s or 0.0, pace_s))
    causes = [str(one["cause"]) for _, one in parts if one.get("cause")]
    return RunView(
        id=run_id,
        recipe=None if plan.get("recipe") is None else str(plan["recipe"]),
        attempt=attempt or None,
        state=state,
        cause=causes[0] if causes else None,
        step=progress["step"],
        steps=steps,
        loss=progress["loss"],
        unit=progress["unit"],
        rate_per_s=progress["rate"] if moves else None,
        step_time_s=progress["step_time"],
        left_s=left_s,
        last_step_s=progress["time"],
        age_s=age_s,
        metrics_error=error,
        nodes=nodes,
        missing=missing,
        world_size=_whole(plan.get("world_size")),
        ranks=tuple(ranks),
        slowest=slowest_of(ranks),
        waits_for=waits_for if state == "waiting" else None,
    )


def _state(parts: Sequence[tuple[Heard, Mapping[str, Any]]]) -> str:
    """Return the state of a run from those of its agents: the worst that any tells."""
    outcomes = {str(state["outcome"]) for _, state in parts if state.get("outcome")}
    for bad in ("failed", "stopped"):
        if bad in outcomes:
            return bad
    states = {str(state.get("state")) for _, state in parts}
    if any(not state.get("alive") and not state.get("outcome") for _, state in parts):
        return "lost"
    for word in ("ending", "running", "starting"):
        if word in states:
            return word
    return "done" if outcomes == {"done"} else "unknown"


def snapshot(
    cluster: str, heard: Sequence[Heard], interval_s: float, *, now_s: float, time_s: float, only: str | None = None
) -> Snapshot:
    """Return everything at one moment: `now_s` monotonic, `time_s` Unix time, both of the controller. `only`: one run."""
    runs = runs_of(heard, interval_s, now_s)
    return Snapshot(
        schema=SNAPSHOT,
        cluster=cluster,
        time_s=time_s,
        nodes=tuple(node_view(one, interval_s, now_s) for one in heard),
        runs=tuple(run for run in runs if only is None or run.id == only),
    )


# ----------------------------------------------------------------------------- what a node's watcher changes


def taken(heard: Heard, sample: Sample, at_s: float, time_s: float) -> Heard:
    """Return `heard` with one more sample. After a gap or a reboot there is no sample to compare with."""
    before = heard.last if heard.why is None and heard.last and sample.monotonic_s > heard.last.monotonic_s else None
    since = heard.since_s if heard.why is None else time_s
    return replace(heard, before=before, last=sample, at_s=at_s, since_s=since, why=None, next_command="", tries=0)


def silent(heard: Heard, why: str, next_command: str, time_s: float) -> Heard:
    """Return `heard` of a node that does not answer; `since_s` stays from the first time it did not."""
    since = heard.since_s if heard.why is not None and heard.tries else time_s
    return replace(heard, before=None, last=None, since_s=since, why=why, next_command=next_command, tries=heard.tries + 1)
