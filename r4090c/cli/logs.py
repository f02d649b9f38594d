"""`r4090c logs`: show what the ranks of a run printed."""

from __future__ import annotations

import time
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import click

from r4090c.cli.common import cluster_option, load
from r4090c.errors import Exit, UsageError

if TYPE_CHECKING:
    from launch.jobs import Run
    from r4090c.model import Cluster
    from r4090c.remote import Fleet

POLL_S = 0.5
"""How often a followed log is looked at."""
NEXT_S = 15.0
"""est.: a supervisor starts the next attempt within three seconds, or ten later where the last one brought nothing."""


def _next_attempt(fleet: Fleet, cluster: Cluster, run: Run, number: int) -> Run:
    """Return the run as it stands when attempt `number` is over: a supervisor starts the next one within seconds, or does not."""
    from launch.jobs import find_run

    until = time.monotonic() + NEXT_S
    while run.attempt == number and (run.state == "waiting" or (run.state == "failed" and time.monotonic() < until)):
        time.sleep(POLL_S)
        run = find_run(fleet, cluster, run.id)
    return run


@click.command("logs")
@click.argument("run_id", metavar="RUN")
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends.")
@click.option("--rank", type=click.IntRange(0), help="Only this global rank [default: all, each line with its rank].")
@click.option(
    "--torchrun", "torchrun_node", metavar="NODE", help="What torchrun itself printed on NODE, instead of the ranks' logs."
)
@click.option("--attempt", type=click.IntRange(1), help="An earlier attempt [default: the last].")
@cluster_option
def command(
    run_id: str, follow: bool, rank: int | None, torchrun_node: str | None, attempt: int | None, cluster_file: str | None
) -> int:
    """Show the logs of RUN.

    \b
    Examples:
      r4090c logs tiny-20260131-120000-a1b2 -f
      r4090c logs tiny-20260131-120000-a1b2 --rank 1 | less
      r4090c logs tiny-20260131-120000-a1b2 --torchrun node02
    """
    from launch.jobs import READ, ask_any, find_run
    from r4090c.paths import RunPaths
    from r4090c.remote import Fleet

    cluster = load(cluster_file)
    with Fleet(cluster.nodes) as fleet:
        run = find_run(fleet, cluster, run_id)
        world = int(run.plan["world_size"])
        if rank is not None and rank >= world and attempt in (None, run.attempt):
            raise UsageError(f"--rank {rank}", f"{run.id} has {world} ranks", f"0 to {world - 1}", f"r4090c logs {run.id}")
        if torchrun_node is not None and torchrun_node not in run.nodes:
            raise UsageError(f"--torchrun {torchrun_node}", f"{run.id} ran on {', '.join(run.nodes)}", "one of them")
        number = attempt or run.attempt
        if number > run.attempt:
            raise UsageError(
                f"--attempt {number}", f"{run.id} has {run.attempt} attempts", f"1 to {run.attempt}", f"r4090c logs {run.id}"
            )
        paths = RunPaths(PurePosixPath(run.run_dir))

        def logs_of(run: Run, number: int) -> dict[str, str]:
            if torchrun_node is not None:
                return {torchrun_node: str(paths.torchrun_log(number, torchrun_node))}
            ranks = [rank] if rank is not None else range(int(run.plan["world_size"]))
            return {str(one): str(paths.rank_log(number, one)) for one in ranks}

        logs = logs_of(run, number)
        bare = len(logs) == 1
        offsets = dict.fromkeys(logs, 0)
        halves = dict.fromkeys(logs, "")
        missing: set[str] = set()
        while True:
            run = find_run(fleet, cluster, run_id) if follow else run
            running = follow and run.state == "running" and run.attempt == number
            more = False
            for name, path in logs.items():
                answer = ask_any(fleet, READ, {"path": path, "offset": offsets[name]})
                if answer["error"]:
                    missing.add(name)
                    continue
                missing.discard(name)
                offsets[name] = answer["offset"]
                more = more or bool(answer["text"])
                *lines, halves[name] = (halves[name] + answer["text"]).split("\n")
                for line in lines:
                    click.echo(line if bare else f"[{name}] {line}")
            if not running and not more:
                run = _next_attempt(fleet, cluster, run, number) if follow and attempt is None else run
                if run.attempt == number:
                    break
                number, logs = run.attempt, logs_of(run, run.attempt)
                offsets, halves, missing = dict.fromkeys(logs, 0), dict.fromkeys(logs, ""), set()
                click.echo(f"attempt {number}", err=True)
            if running and not more:
                time.sleep(POLL_S)
        for name, half in halves.items():
            if half:
                click.echo(half if bare else f"[{name}] {half}")
        if missing:
            told = ", ".join(sorted(missing, key=lambda name: (len(name), name)))
            hint = f"it may have ended before its script began; see {paths.attempt(number)}"
            click.echo(f"no log yet of {told} ({hint})", err=True)
    return Exit.OK
