"""`r4090c top`: what the nodes and the runs do now, on the whole screen."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from r4090c.cli.common import choose_nodes, cluster_option, json_option, load, nodes_option, out, to_jsonable
from r4090c.errors import Exit, UsageError

if TYPE_CHECKING:
    from launch.watch import Watch
    from r4090c.model import Cluster, Node

ONCE_S = 20.0
"""est.: connecting takes up to ssh.connect_timeout_s (5 s by default), the facts 1 s, two samples 2 s."""
REDRAW_S = 1.0
"""Ages and clocks go on between two samples."""
KEYS = {"\x1b[A": "up", "k": "up", "\x1b[B": "down", "j": "down", "\x1b[5~": "page up", "\x1b[6~": "page down", " ": "page down"}
"""What arrow and page keys send (ECMA-48, as xterm and all that follow it)."""


@click.command("top")
@click.argument("run_id", metavar="[RUN]", required=False)
@cluster_option
@nodes_option
@click.option("--interval", type=click.FloatRange(0.5, 60), default=2.0, show_default=True, help="Seconds between two looks.")
@click.option("--once", is_flag=True, help="Print one picture and end. The default where standard output is no terminal.")
@json_option
def command(run_id: str | None, cluster_file: str | None, nodes: str | None, interval: float, once: bool, as_json: bool) -> int:
    """Show GPUs, network, runs and ranks of all nodes as they are now.

    With RUN, only that run and its nodes. On the screen: q or Ctrl-C leaves, arrows scroll, d shows more or less. `--json` prints
    one object an interval, or one with --once. Ends with 3 when no node answers --once.

    \b
    Examples:
      r4090c top
      r4090c top tiny-20260131-120000-a1b2
      r4090c top --once --json | jq '.nodes[].gpus[]?.utilization'
    """
    from launch.watch import Watch
    from r4090c.remote import Fleet

    cluster = load(cluster_file)
    chosen = choose_nodes(cluster, nodes)
    if run_id is not None:
        chosen = _nodes_of(run_id, cluster, chosen)
    on_screen = sys.stdout.isatty() and sys.stdin.isatty() and not once and not as_json
    one = once or not (on_screen or as_json)
    with Fleet(chosen) as fleet, Watch(fleet, cluster, chosen, min(interval, 1.0) if one else interval) as watch:
        if on_screen:
            _screen(watch, run_id)
            return Exit.OK
        watch.settle(ONCE_S)
        while True:
            found = watch.snapshot(run_id)
            if as_json:
                _print_line(found)
            else:
                _print_frame(found)
            if one:
                return Exit.OK if any(node.up for node in found.nodes) else Exit.UNKNOWN
            time.sleep(interval)


def _nodes_of(run_id: str, cluster: Cluster, chosen: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return those of `chosen` that the run is on. Raises UsageError when there is no such run, or none is left."""
    from launch.jobs import find_run
    from r4090c.remote import Fleet

    with Fleet(cluster.nodes) as fleet:
        run = find_run(fleet, cluster, run_id)
    if run.state != "running":
        click.echo(f"{run.id} is not running: {run.state}", err=True)
    ours = tuple(node for node in chosen if node.name in run.nodes)
    if not ours:
        told = f"{run.id} is on {', '.join(run.nodes)}"
        raise UsageError("--nodes", told, "nodes of that run that cluster.yaml has", f"r4090c top {run.id}")
    return ours


def _print_line(found: Any) -> None:
    """Print a snapshot as one line of JSON."""
    import json

    click.echo(json.dumps(to_jsonable(found), ensure_ascii=False))


def _print_frame(found: Any) -> None:
    from r4090c.cli.top_view import frame

    console = out()
    for line in frame(found, console.width):
        console.print(line, soft_wrap=True)


# ----------------------------------------------------------------------------- the screen


def _screen(watch: Watch, run_id: str | None) -> None:
    """Show the picture until q or Ctrl-C; the terminal is as it was afterwards, whatever ends this."""
    from rich.console import Console, Group
    from rich.live import Live

    from r4090c.cli.top_view import fits, frame

    console = Console(highlight=False)
    detail: bool | None = None
    offset = 0
    with (
        contextlib.suppress(KeyboardInterrupt),
        _single_keys(),
        Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        while True:
            width, height = console.size
            found = watch.snapshot(run_id)
            lines = frame(found, width, height, detail=detail, offset=offset)
            live.update(Group(*lines), refresh=True)
            key = _key(REDRAW_S)
            if key == "q":
                return
            if key == "d":
                detail, offset = not (fits(found, width, height) if detail is None else detail), 0
            step = {"up": -1, "down": 1, "page up": 2 - height, "page down": height - 2}.get(KEYS.get(key, ""), 0)
            offset = max(0, min(offset + step, 10_000))


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """Have keys come one by one and unseen, until the end of the block."""
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _key(wait_s: float) -> str:
    """Return the key that was pressed, "" after `wait_s`. A closed terminal counts as q."""
    descriptor = sys.stdin.fileno()
    if not select.select([descriptor], [], [], wait_s)[0]:
        return ""
    return os.read(descriptor, 16).decode(errors="replace") or "q"
