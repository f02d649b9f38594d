"""How a plan looks on the screen: memory, traffic, speed, alternatives; and environment and CPU set of every rank."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from launch.alternatives import Alternative
    from launch.forecast import Forecast, Point
    from launch.perf import Help
    from launch.site import Site

GB = 1e9
WIDTH_MAX = 120
"""Columns of what is folded where the output is wider, or no terminal: longer lines are hard to read."""
HELPS_SHOWN = 3
ALIKE = 1.05
"""Rates nearer to each other than this are the same: a prediction is not more exact."""
OF_A_RUN = ("PYTHONPATH", "R4090C_RUN_DIR")
"""Variables that only a run has; a plan shows the others."""
KIND_NAMES = {"roce": "RoCE", "infiniband": "InfiniBand", "tcp": "TCP"}
SMALL_MIN = 0.015
"""Parts of the memory below this share are told together."""
SHARE_MIN = 0.01
"""Parts of a step below this are told together."""


def show_forecast(console: Console, one: Forecast, points: Sequence[Point], found: Sequence[Help]) -> None:
    """Print verdict, memory, where the time goes, traffic, scaling and what would help."""
    _headline(console, one)
    _memory(console, one)
    if one.fit.fits:
        _time(console, one)
        _traffic(console, one)
        _scaling(console, points, one.training.unit)
    for number, text in enumerate(one.warnings if one.fit.fits else ()):
        _fold(console, text, "\nwarning: " if number == 0 else "warning: ", style="yellow")
    _helps(console, found, one.training.unit)


def show_summary(console: Console, one: Forecast) -> None:
    """Print verdict, memory and speed in a few lines."""
    _headline(console, one)
    memory = one.fit.memory
    where = "GPU" if one.site.card is not None else "rank"
    room = f" of {one.fit.room_gib:.1f}" if one.fit.room_gib is not None else ""
    host_room = f" of {one.fit.host_room_gib:.1f}" if one.fit.host_room_gib is not None else ""
    text = f"memory: {memory.total_gib:.1f}{room} GiB a {where}, {memory.host_total_gib:.1f}{host_room} GiB of host RAM a node"
    _fold(console, text, "  ")
    traffic_s = one.prediction.traffic_s
    speed = [speed_text(one), f"{seconds(traffic_s)} of traffic a step" if traffic_s else ""]
    _fold(console, ", ".join(text for text in speed if text), "  ")


def told_site(site: Site) -> str:
    """Return in a few words where the run would run."""
    what = site.card.name if site.card is not None else "CPU rank" if site.ranks_per_node == 1 else "CPU ranks"
    what = f"{site.ranks_per_node} {what}"
    nodes = f"{site.nodes} nodes of {what}" if site.nodes > 1 else f"one node of {what}"
    if site.between is None or site.nodes == 1:
        return nodes
    rate = f"{site.between.rate_gbit_s:g} Gbit/s " if site.between.rate_gbit_s is not None else ""
    return f"{nodes}, {rate}{KIND_NAMES.get(site.between.kind, site.between.kind)}"


def _headline(console: Console, one: Forecast) -> None:
    from rich.text import Text

    from launch.forecast import told_pointless, told_training

    verdict, style = ("fits", "green") if one.worth_it else ("pointless", "yellow") if one.fit.fits else ("does not fit", "red")
    line = Text.assemble((_plain(f"{one.training.name} on {one.site.name}: "), "bold"), (verdict, f"bold {style}"))
    console.print(line, soft_wrap=True)
    _fold(console, told_training(one.training), "  ", style="dim")
    _fold(console, told_site(one.site), "  ", style="dim")
    for reason in one.fit.reasons if not one.fit.fits else ():
        _fold(console, reason, "  ", style=style)
    if one.fit.fits and one.pointless:
        _fold(console, told_pointless(one), "  ", style=style)


def speed_text(one: Forecast) -> str:
    """Return step time, rate, MFU and scaling efficiency as far as they can be told, "" for nothing."""
    told = one.prediction
    parts = []
    if told.step_s is not None:
        parts.append(f"{seconds(told.step_s)} a step")
    if told.units_per_s is not None:
        parts.append(f"{told.units_per_s:,.0f} {told.unit}/s")
    if told.mfu is not None:
        parts.append(f"MFU {told.mfu:.0%}")
    if told.scaling_efficiency is not None and one.site.nodes > 1:
        parts.append(f"scaling efficiency {told.scaling_efficiency:.2f}")
    return ", ".join(parts)


def _memory(console: Console, one: Forecast) -> None:
    memory = one.fit.memory
    where = "GPU" if one.site.card is not None else "rank"
    table = _table("", ">", "")
    small = {part: gib for part, gib in memory.per_gpu_gib.items() if 0 < gib < SMALL_MIN * memory.total_gib}
    for part, gib in memory.per_gpu_gib.items():
        if gib > 0 and (part not in small or len(small) == 1):
            table.add_row(f"  {part}", f"{gib:.2f}", _cell(memory.arithmetic.get(part, "")))
    if len(small) > 1:
        told = ", ".join(f"{part} {gib:.2f}" for part, gib in small.items())
        table.add_row("  small parts", f"{sum(small.values()):.2f}", _cell(f"{told} (--json has their arithmetic)"))
    room = f"of {one.fit.room_gib:.2f} GiB" if one.fit.room_gib is not None else ""
    style = "bold" if one.fit.room_gib is None or memory.total_gib <= one.fit.room_gib else "bold red"
    if memory.per_gpu_gib:
        table.add_row("  total", f"{memory.total_gib:.2f}", room, style=style)
    console.print(f"\n[bold]memory a {where}, GiB[/bold]")
    console.print(table)
    host = ", ".join(f"{part} {gib:.1f}" for part, gib in memory.host_gib.items() if gib >= 0.05)
    host_room = f" of {one.fit.host_room_gib:.0f} available" if one.fit.host_room_gib is not None else ""
    told = f"host RAM a node: {memory.host_total_gib:.1f} GiB{host_room}" + (f" ({host})" if host else "")
    _fold(console, told, "  ")
    largest = one.largest_micro_batch
    _fold(console, f"largest micro-batch that fits: {largest if largest is not None else 'none, not even 1'}", "  ")


def _time(console: Console, one: Forecast) -> None:
    told = one.prediction
    if told.step_s is None:
        return
    console.print(f"\n[bold]speed[/bold]: {speed_text(one)}", soft_wrap=True)
    table = _table("", ">", ">", "")
    rest = 0.0
    for what, part_s in told.parts:
        if part_s < SHARE_MIN * told.step_s:
            rest += part_s
            continue
        share = part_s / told.step_s
        table.add_row(f"  {what}", seconds(part_s), f"{share:.0%}", "█" * max(1, round(24 * share)))
    if rest:
        table.add_row("  the rest", seconds(rest), f"{rest / told.step_s:.0%}")
    console.print(table)


def _traffic(console: Console, one: Forecast) -> None:
    told = one.prediction.traffic
    if not told:
        return
    console.print("\n[bold]traffic of a step[/bold]")
    table = _table("  what", "over", ">GB a rank", ">times", ">seconds", ">hidden")
    for each in told:
        took = seconds(each.seconds_per_step, unit=False) if each.seconds_per_step is not None else "?"
        hidden = seconds(each.hidden_s, unit=False) if each.hidden_s else "0"
        size = f"{each.bytes_per_rank / GB:.3g}"
        table.add_row(f"  {each.what} ({each.collective})", each.link, size, str(each.times_per_step), took, hidden)
    console.print(table)


def _scaling(console: Console, points: Sequence[Point], unit: str) -> None:
    if len(points) < 2 or all(point.units_per_s is None for point in points):
        return
    console.print("\n[bold]scaling[/bold] (the batch grows with the nodes)")
    table = _table(">  nodes", f">{unit}/s", ">efficiency", "")
    for point in points:
        rate = f"{point.units_per_s:,.0f}" if point.units_per_s is not None else "?"
        share = f"{point.scaling_efficiency:.2f}" if point.scaling_efficiency is not None else "?"
        table.add_row(str(point.nodes), rate, share, "" if point.fits else "does not fit on so few")
    console.print(table)


def _helps(console: Console, found: Sequence[Help], unit: str) -> None:
    if not found:
        return
    console.print("\n[bold]what would help most[/bold]")
    for one in found[:HELPS_SHOWN]:
        words = f" (--set {' --set '.join(one.sets)})" if one.sets else ""
        _fold(console, f"{one.gain:.2f} × as fast: {one.change}{words}", "  ")


def show_alternatives(console: Console, found: Sequence[tuple[Alternative, str]], *, worth_it: bool) -> None:
    """Print (alternative, its command) pairs, the fastest first."""
    from launch.forecast import told_training

    if not found:
        if not worth_it:
            console.print("\n[bold]nothing else fits here[/bold]: more nodes, more host RAM, or a smaller model")
        return
    console.print("\n[bold]faster, and fits[/bold]" if worth_it else "\n[bold]what fits, the fastest first[/bold]")
    for one, command in found:
        rate = f"{one.prediction.units_per_s:,.0f} {one.prediction.unit}/s" if one.prediction.units_per_s is not None else "?"
        memory = f"{one.fit.memory.total_gib:.1f} GiB a GPU"
        host = f", {one.fit.memory.host_total_gib:.0f} GiB of host RAM a node" if one.fit.memory.host_total_gib >= 1 else ""
        console.print(f"  {command}", style="bold", soft_wrap=True, markup=False)
        changes = f"; {'; '.join(one.changes)}" if one.changes else ""
        _fold(console, f"{rate}, {memory}{host}: {told_training(one.training)}{changes}", "      ", style="dim")


def show_elsewhere(console: Console, one: Forecast, fewer: Point, command: str) -> None:
    """Print on how many nodes the same training does as much, or more."""
    gain = (fewer.units_per_s or 0.0) / (one.prediction.units_per_s or 1.0)
    where = "one node" if fewer.nodes == 1 else f"{fewer.nodes} nodes"
    more = f"{gain:.2g} × as much" if gain >= ALIKE else "as much"
    console.print(f"\n[bold]the same training on {where} does {more}[/bold]")
    console.print(f"  {command}", style="bold", soft_wrap=True, markup=False)


def show_warning(console: Console, text: str) -> None:
    """Print a warning, folded."""
    _fold(console, text, "\nwarning: ", style="yellow")


def show_assumptions(console: Console, told: Iterable[str]) -> None:
    """Print what was measured and what is assumed."""
    console.print("\n[bold]measured and assumed[/bold]")
    for text in told:
        _fold(console, text, "  ", style="dim")


# --------------------------------------------------------------------------- environment and CPUs


def layers(nodes: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return (the variables with the same value on all `nodes` of a plan's JSON, node name -> the others)."""
    first = nodes[0]["env"] if nodes else {}
    common = {
        name: var for name, var in first.items() if all(node["env"].get(name, {}).get("value") == var["value"] for node in nodes)
    }
    return common, {node["name"]: {k: var for k, var in node["env"].items() if k not in common} for node in nodes}


def show_placement(console: Console, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Print environment and CPU sets of a plan's JSON in few lines: what is the same on several nodes once."""
    from netcheck.facts.cpus import ranges

    common, own = layers(nodes)
    common = {name: var for name, var in common.items() if name not in OF_A_RUN}
    console.print("\n[bold]environment[/bold] (--ranks tells every variable's reason)")
    _fold(console, "  ".join(f"{name}={var['value']}" for name, var in common.items()), "  ")
    for names, text in _together((name, "  ".join(f"{k}={var['value']}" for k, var in env.items())) for name, env in own.items()):
        if text:
            _fold(console, text, f"  {names}: ")
    console.print("\n[bold]CPUs[/bold], by local rank (0: its CPUs)")
    for names, text in _together(
        (node["name"], "  ".join(f"{one['local_rank']}: {ranges(one['cpus']) or 'not bound'}" for one in node["ranks"]))
        for node in nodes
    ):
        _fold(console, text, f"  {names}: ")
    for names, text in _together((node["name"], _why_cpus(node["ranks"])) for node in nodes):
        _fold(console, text, f"  {names}: ", style="dim")


def _why_cpus(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Return the reasons of CPU sets, each with the local ranks it is about."""
    by_reason: dict[str, list[str]] = {}
    for one in ranks:
        by_reason.setdefault(re.sub(r"^part \d+ of \d+ of ", "", one["reason"]), []).append(str(one["local_rank"]))
    return "; ".join(f"{','.join(who)}: {reason}" if len(by_reason) > 1 else reason for reason, who in by_reason.items())


def _together(told: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return (names, text): nodes of which the same is told are one."""
    by_text: dict[str, list[str]] = {}
    for name, text in told:
        by_text.setdefault(text, []).append(name)
    return [(", ".join(names), text) for text, names in by_text.items()]


def show_ranks(console: Console, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Print argv, environment and CPU set of every rank of a plan's JSON, each with its reason."""
    import shlex

    from netcheck.facts.cpus import ranges

    for node in nodes:
        console.print(f"\n[bold]{node['name']}[/bold]  node rank {node['node_rank']}", markup=True)
        console.print(f"  {_plain(shlex.join(node['torchrun']))}", markup=False, soft_wrap=True)
        for name, var in node["env"].items():
            console.print(f"  {name}={_plain(var['value'])}", markup=False, end="")
            console.print(f"   # {_plain(var['reason'])} [{var['origin']}]", markup=False, style="dim")
        for rank in node["ranks"]:
            cpus = ranges(rank["cpus"])
            memory = f", memory of NUMA {rank['memory_node']} preferred" if rank["memory_node"] is not None else ""
            console.print(f"  rank {rank['rank']}: CPUs {cpus or 'not bound'}{memory}   # {rank['reason']}", markup=False)
            for name, var in rank["env"].items():
                console.print(f"    {name}={_plain(var['value'])}   # {_plain(var['reason'])}", markup=False)


# --------------------------------------------------------------------------- small parts


def seconds(value_s: float, *, unit: bool = True) -> str:
    """Return seconds with three digits that mean something."""
    text = f"{value_s:.0f}" if value_s >= 100 else f"{value_s:.3g}" if value_s >= 0.001 or not value_s else "<0.001"
    return f"{text} s" if unit else text


def _table(*heads: str) -> Table:
    """Return a table without lines; a head that begins with > is one of numbers, all empty ones are not shown.

    Where the terminal is narrow, words fold; numbers never do.
    """
    from rich.table import Table

    table = Table(box=None, show_header=any(head.strip("> ") for head in heads), pad_edge=False, header_style="dim")
    for head in heads:
        side: Literal["left", "right"] = "right" if head.startswith(">") else "left"
        table.add_column(head.lstrip(">"), justify=side, no_wrap=side == "right", overflow="fold")
    return table


def _cell(text: str) -> Any:
    from rich.text import Text

    return Text(text, style="dim")


def _plain(text: str) -> str:
    """Return `text` without line breaks and other signs that a terminal takes for orders: names of cards come from anywhere."""
    return "".join(sign if sign.isprintable() else " " for sign in text)


def _fold(console: Console, text: str, prefix: str, style: str = "") -> None:
    """Print `text` after `prefix`, folded at words; what follows stands below the first word."""
    width = min(console.width, WIDTH_MAX)
    console.print("\n" * prefix.count("\n"), end="")
    prefix = prefix.lstrip("\n")
    indent = " " * (len(prefix) if len(prefix) <= 12 else 4)
    wrapper = textwrap.TextWrapper(width, prefix, indent, break_long_words=False, break_on_hyphens=False)
    for line in wrapper.wrap(_plain(text)):
        console.print(line, style=style or None, markup=False, highlight=False, soft_wrap=True)
