"""The picture of `r4090c top`: one Snapshot -> lines of text that fit a terminal; pure.

All text that a node, a run or a user wrote goes through `clean`: no escape sequence and no markup of it reaches the terminal.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from launch.live import WORDS, DiskView, GpuView, LinkView, NodeView, RunView, Snapshot, is_behind

WIDE = 120
"""Columns from which on a GPU's memory bar, clock and processes have room."""
MOST_NAME, MOST_PATH = 24, 20
"""Columns of a node's name, of which the longest are 200 letters, and of a path."""
GIB = 1 << 30
HOT_C = 84
"""NVIDIA's GeForce RTX 4090 slows down at 84 °C by default (target temperature, nvidia-smi -q -d TEMPERATURE)."""
FULL_SHARE, FULLER_SHARE = 0.90, 0.97
"""est.: when memory and disks turn yellow and red."""
STATES = {
    "running": "cyan",
    "starting": "cyan",
    "waiting": "yellow",
    "ending": "yellow",
    "done": "green",
    "stopped": "yellow",
}
LEVELS = "▁▂▃▄▅▆▇█"
KEYS = "q quit  ↑↓ scroll  d detail"


def clean(text: str) -> str:
    """Return `text` on one line, without control characters, escape sequences and invisible letters."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def frame(view: Snapshot, width: int, height: int | None = None, *, detail: bool | None = None, offset: int = 0) -> list[Text]:
    """Return the lines of the picture, each at most `width` columns.

    `height` None = as many as there are. `detail`: GPU by GPU (True), a line a node (False), or what fits (None). `offset`: the
    first line that is shown below the header.
    """
    if detail is None:
        detail = height is None or fits(view, width, height)
    header = _header(view, width, keys=height is not None)
    body = _body(view, width, detail)
    if height is not None and len(body) > height - 1:
        offset = max(0, min(offset, len(body) - (height - 2)))
        shown = body[offset : offset + height - 2]
        rest = len(body) - offset - len(shown)
        body = [*shown, Text(f"… {offset} lines above, {rest} below (↑↓)" if offset or rest else "", style="dim")]
    lines = [header, *body]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
        line.no_wrap = True
    return lines


def fits(view: Snapshot, width: int, height: int) -> bool:
    """Return whether the picture fits GPU by GPU."""
    return len(_body(view, width, detail=True)) < height


def _body(view: Snapshot, width: int, detail: bool) -> list[Text]:
    runs = [line for run in view.runs for line in _run(run, width)]
    runs = runs or [Text("no run of this account is going on", style="dim")]
    if detail:
        return [*runs, Text(""), *(line for node in view.nodes for line in _node(node, view, width))]
    return [*runs, Text(""), *(_compact(node, view, width) for node in view.nodes)]


# ----------------------------------------------------------------------------- words and bars


def bar(share: float | None, cells: int, style: str) -> Text:
    """Return a bar of `cells` columns; dots where the share is not known."""
    if share is None:
        return Text("·" * cells, style="dim")
    filled = round(min(1.0, max(0.0, share)) * cells)
    return Text.assemble(("█" * filled, style), ("░" * (cells - filled), "dim"))


def percent(share: float | None) -> str:
    """Return "87%", three to four columns; "  ?%" where it is not known."""
    return "  ?%" if share is None else f"{share * 100:3.0f}%"


def number(value: float | None, digits: int = 0) -> str:
    """Return a number, "?" where it is not known."""
    return "?" if value is None else f"{value:,.{digits}f}"


def duration(seconds: float | None) -> str:
    """Return "12 s", "3 m 12 s", "2 h 05 m", "3 d 4 h"."""
    if seconds is None:
        return "?"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} m"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def _full_style(share: float | None) -> str:
    return "" if share is None or share < FULL_SHARE else "yellow" if share < FULLER_SHARE else "red"


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def throttle_words(gpus: Iterable[GpuView]) -> str:
    """Return what slows GPUs down, in words, each once."""
    names = dict.fromkeys(name for gpu in gpus for name in gpu.throttle or ())
    return ", ".join(WORDS.get(name, f"reason {name}") for name in names)


def _name_width(view: Snapshot) -> int:
    return min(MOST_NAME, max((cell_len(clean(node.name)) for node in view.nodes), default=0))


def _name(node: NodeView, view: Snapshot) -> str:
    return set_cell_size(clean(node.name), _name_width(view))


# ----------------------------------------------------------------------------- header and runs


def _header(view: Snapshot, width: int, keys: bool) -> Text:
    gpus = [gpu for node in view.nodes for gpu in node.gpus or ()]
    up = sum(node.up for node in view.nodes)
    line = Text.assemble(("r4090c top", "bold"), f"  {clean(view.cluster)}  ")
    line.append(f"{up} of {len(view.nodes)} nodes up", style="" if up == len(view.nodes) else "red")
    if gpus:
        line.append(f"  {len(gpus)} GPUs {percent(_mean(gpu.utilization for gpu in gpus)).strip()}")
    right = time.strftime("%H:%M:%S", time.localtime(view.time_s))
    told = KEYS if width >= line.cell_len + len(KEYS) + len(right) + 4 else KEYS.partition("  ")[0]
    if keys:
        right = f"{told}  {right}"
    line.append(" " * max(2, width - line.cell_len - len(right)))
    line.append(right, style="dim")
    return line


def _run(run: RunView, width: int) -> list[Text]:
    first = Text.assemble(("run ", "dim"), (clean(run.id), "bold"), "  ", (run.state, STATES.get(run.state, "red")))
    if run.cause and run.cause != run.state:
        first.append(f" ({clean(run.cause)})")
    if (run.attempt or 1) > 1:
        first.append(f"  attempt {run.attempt}")
    if run.waits_for:
        first.append(f"  {clean(run.waits_for)} starts it again", style="dim")
    where = ",".join(run.nodes) if len(run.nodes) <= 3 else f"{len(run.nodes)} nodes"
    first.append(f"  {clean(run.recipe or '?')} on {clean(where)}", style="dim")
    second = Text("    ")
    if run.metrics_error:
        second.append(f"step not known: {clean(run.metrics_error)}  ", style="yellow")
    elif run.step is None:
        second.append("no step yet  ")
    else:
        of = f"/{run.steps}" if run.steps else ""
        second.append(f"step {run.step}{of} ")
        if run.steps:
            second.append_text(bar(run.step / run.steps, 10, "cyan"))
            second.append(f" {percent(run.step / run.steps).strip()}")
        second.append(f"  loss {number(run.loss, 4)}")
        if run.rate_per_s is not None:
            second.append(f"  {number(run.rate_per_s)} {run.unit}/s")
        if run.left_s is not None:
            second.append(f"  {duration(run.left_s)} left")
    third = _ranks(run)
    if width >= WIDE:
        second.append("   ")
        second.append_text(Text(third.plain.strip()) if not third.spans else _stripped(third))
        return [first, second]
    return [first, second, third]


def _stripped(line: Text) -> Text:
    """Return the line without its indent."""
    return line[4:] if line.plain.startswith("    ") else line


def _ranks(run: RunView) -> Text:
    line = Text("    ")
    phases = Counter(clean(rank.phase) for rank in run.ranks)
    world = run.world_size if run.world_size is not None else len(run.ranks)
    line.append(f"{world} ranks")
    if phases:
        line.append(": " + ", ".join(f"{count} {phase}" for phase, count in phases.most_common()))
    ages = [rank.age_s for rank in run.ranks if rank.age_s is not None and rank.phase != "gone"]
    if is_behind(run):
        slow = next(rank for rank in run.ranks if rank.rank == run.slowest)
        told = f"  rank {slow.rank} on {clean(slow.node)} is behind: step {slow.step}, silent {duration(slow.age_s)}"
        line.append(told, style="yellow")
    elif ages and run.state == "running":
        line.append(f"  beat {duration(max(ages))} ago")
    if run.missing:
        line.append(f"  nothing from {clean(','.join(run.missing))}", style="red")
    return line


# ----------------------------------------------------------------------------- nodes


def _down(node: NodeView, view: Snapshot) -> Text:
    line = Text.assemble((_name(node, view), "bold red"), "  ")
    if not node.tries:
        line.append("connecting …", style="dim")
        return line
    line.append(f"no answer for {duration(view.time_s - node.since_s)}", style="red")
    line.append(f", tried {node.tries} times: {clean(node.why or '')}")
    return line


def _node(node: NodeView, view: Snapshot, width: int) -> list[Text]:
    if not node.up:
        lines = [_down(node, view)]
        if node.tries and node.next_command:
            lines.append(Text(f"    next: {clean(node.next_command)}", style="dim"))
        return lines
    wide = width >= WIDE
    used = None
    if node.memory_total_bytes is not None and node.memory_available_bytes is not None:
        used = node.memory_total_bytes - node.memory_available_bytes
    memory = _share(used, node.memory_total_bytes)
    line = Text.assemble((_name(node, view), "bold"), "  cpu ")
    if wide:
        line.append_text(bar(node.cpu, 10, "green"))
        line.append(" ")
    line.append(f"{percent(node.cpu)} of {node.cores or '?'}  load {number(node.load1, 1)}  ")
    line.append(f"mem {number(_gib(used), 1)}/{number(_gib(node.memory_total_bytes), 1)} GiB", style=_full_style(memory))
    disks = [(disk, _disk(disk)) for disk in node.disks]
    lines = [line]
    for disk, told in disks:
        if wide and disk.error is None:
            line.append("  ")
            line.append_text(told)
        elif disk.error is not None or told.style:
            lines.append(Text.assemble("    ", told))
    if node.gpus_error:
        lines.append(Text(f"    GPUs: not known: {clean(node.gpus_error)}", style="yellow"))
    lines += [_gpu(gpu, wide) for gpu in node.gpus or ()]
    links = [link for link in node.links if link.data]
    if links:
        told = Text("    ")
        for place, link in enumerate(links):
            told.append("   " if place else "")
            told.append_text(_link(link))
        lines.append(told)
    elif node.links_why:
        lines.append(Text(f"    data network: not known: {clean(node.links_why)}", style="yellow"))
    return lines


def _gib(value: float | None) -> float | None:
    return None if value is None else value / GIB


def _disk(disk: DiskView) -> Text:
    name = clean(disk.path) if cell_len(clean(disk.path)) <= MOST_PATH else "…" + clean(disk.path)[1 - MOST_PATH :]
    if disk.error is not None or disk.size_bytes is None or disk.free_bytes is None:
        return Text(f"{name}: not known: {clean(disk.error or '')}", style="yellow")
    free = disk.free_bytes / disk.size_bytes
    return Text(f"{name} {percent(free).strip()} free", style=_full_style(1 - free))


def _gpu(gpu: GpuView, wide: bool) -> Text:
    memory = _share(gpu.memory_used_bytes, gpu.memory_total_bytes)
    power = _share(gpu.power_w, gpu.power_limit_w)
    line = Text(f"{'?' if gpu.index < 0 else gpu.index:>4} ")
    line.append_text(bar(gpu.utilization, 20 if wide else 10, "green"))
    line.append(f" {percent(gpu.utilization)}  ")
    if wide:
        line.append("mem ")
        line.append_text(bar(memory, 10, "blue"))
        line.append(" ")
    line.append(f"{number(_gib(gpu.memory_used_bytes), 1):>4}/{number(_gib(gpu.memory_total_bytes), 1)} GiB", _full_style(memory))
    line.append(f"  {number(gpu.power_w):>3}/{number(gpu.power_limit_w)} W", style="yellow" if (power or 0) > 0.98 else "")
    hot = gpu.temperature_c is not None and gpu.temperature_c >= HOT_C
    line.append(f"  {number(gpu.temperature_c):>2} °C", style="red" if hot else "")
    if wide:
        clock = None if gpu.sm_clock_hz is None else gpu.sm_clock_hz / 1e6
        line.append(f"  {number(clock).replace(',', ''):>4} MHz")
        line.append(f"  {'?' if gpu.processes is None else len(gpu.processes)} proc")
    words = "throttle not told" if gpu.throttle is None else throttle_words([gpu])
    line.append(f"  {words}" if words else "", style="dim" if gpu.throttle is None else "yellow")
    if gpu.lease is not None and wide:
        line.append(f"  {clean(gpu.lease.run_id or 'a run')} of {clean(gpu.lease.user or 'somebody')}", style="dim")
    for fault in gpu.faults:
        line.append(f"  {clean(fault)}", style="red")
    return line


def _rate(link: LinkView) -> tuple[float | None, str]:
    """Return (share of the link's rate of the busier way, its rates in words)."""
    rates = [link.rx_bytes_per_s, link.tx_bytes_per_s]
    known = [one for one in rates if one is not None]
    unit, size = ("Mbit/s", 1e6) if known and max(known) * 8 < 1e8 else ("Gbit/s", 1e9)
    words = [number(None if one is None else one * 8 / size, 2) for one in rates]
    return _share(max(known), link.rate_bytes_per_s) if known else None, f"↓ {words[0]}  ↑ {words[1]} {unit}"


def _link(link: LinkView) -> Text:
    share, told = _rate(link)
    line = Text(f"{clean(link.name)} {told}")
    line.append(f" {percent(share).strip()}" if link.rate_bytes_per_s else " of ?", style="")
    if link.new_errors:
        line.append(f"  {link.new_errors} new errors", style="red")
    return line


def _compact(node: NodeView, view: Snapshot, width: int) -> Text:
    """Return a node on one line; where that is short, its memory only when it is nearly full, and no words for slow GPUs."""
    if not node.up:
        return _down(node, view)
    used = None
    if node.memory_total_bytes is not None and node.memory_available_bytes is not None:
        used = 1 - node.memory_available_bytes / node.memory_total_bytes
    line = Text.assemble((_name(node, view), "bold"), f" cpu {percent(node.cpu)} ")
    if width >= WIDE or _full_style(used):
        line.append(f"mem {percent(used)}", style=_full_style(used))
    if node.gpus_error:
        line.append(" GPUs not known", style="yellow")
    if node.gpus:
        line.append(" gpu ")
        line.append_text(_levels(node.gpus))
        line.append(f" {percent(_mean(gpu.utilization for gpu in node.gpus))}")
        line.append(f" {number(_gib(max((gpu.memory_used_bytes or 0 for gpu in node.gpus), default=None)), 1)} GiB")
        line.append(f" {sum(gpu.power_w or 0 for gpu in node.gpus):.0f} W")
        hottest = max((gpu.temperature_c for gpu in node.gpus if gpu.temperature_c is not None), default=None)
        line.append(f" {number(hottest)} °C", style="red" if (hottest or 0) >= HOT_C else "")
    links = [link for link in node.links if link.data]
    busiest = max(links, key=lambda link: max(link.rx_bytes_per_s or 0, link.tx_bytes_per_s or 0), default=None)
    if busiest is not None:
        fastest = max(busiest.rx_bytes_per_s or 0, busiest.tx_bytes_per_s or 0)
        line.append(f" net {fastest * 8 / 1e9:.1f} Gbit/s")
        errors = sum(link.new_errors or 0 for link in links)
        line.append(f"  {errors} new errors" if errors else "", style="red")
    slow = [gpu for gpu in node.gpus or () if gpu.throttle]
    if slow:
        line.append(f"  {len(slow)} slow" + (f": {throttle_words(slow)}" if width >= WIDE else ""), style="yellow")
    return line


def _levels(gpus: Sequence[GpuView]) -> Text:
    """Return one column a GPU: how busy it is."""
    line = Text()
    for gpu in gpus:
        if gpu.utilization is None:
            line.append("?", style="yellow")
        else:
            place = min(len(LEVELS) - 1, int(gpu.utilization * len(LEVELS)))
            line.append(LEVELS[place], style="yellow" if gpu.throttle else "green")
    return line
