"""`r4090c logs`: show what the ranks of a run printed."""

from __future__ import annotations

import time
from pathlib import PurePosixPath

import click

from r4090c.cli.common import cluster_option, load
from r4090c.errors import Exit, UsageError

POLL_S = 0.5
"""How often a followed log is looked at."""


@click.command("logs")
@click.argument("run_id", metavar="RUN")
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends.")
@click.option("--rank", type=click.IntRange(0), help="Only this global rank [default: all, each line with its rank].")
@click.option("--attempt", type=click.IntRange(1), help="An earlier attempt [default: the last].")
@cluster_option
def command(run_id: str, follow: bool, rank: int | None, attempt: int | None, cluster_file: str | None) -> int:
    """Show the logs of RUN.

    \b
    Examples:
      r4090c logs tiny-20260131-120000-a1b2 -f
      r4090c logs tiny-20260131-120000-a1b2 --rank 1 | less
    """
    from launch.jobs import READ, ask_any, find_run
    from r4090c.paths import RunPaths
    from r4090c.remote import Fleet

    cluster = load(cluster_file)
    with Fleet(cluster.nodes) as fleet:
        run = find_run(fleet, cluster, run_id)
        world = int(run.plan["world_size"])
        if rank is not None and rank >= world:
            raise UsageError(f"--rank {rank}", f"{run.id} has {world} ranks", f"0 to {world - 1}", f"r4090c logs {run.id}")
        number = attempt or run.attempt
        if number > run.attempt:
            raise UsageError(
                f"--attempt {number}", f"{run.id} has {run.attempt} attempts", f"1 to {run.attempt}", f"r4090c logs {run.id}"
            )
        ranks = [rank] if rank is not None else list(range(world))
        paths = RunPaths(PurePosixPath(run.run_dir))
        offsets = dict.fromkeys(ranks, 0)
        halves = dict.fromkeys(ranks, "")
        missing: set[int] = set()
        while True:
            running = follow and find_run(fleet, cluster, run_id).state == "running"
            more = False
            for one in ranks:
                answer = ask_any(fleet, READ, {"path": str(paths.rank_log(number, one)), "offset": offsets[one]})
                if answer["error"]:
                    missing.add(one)
                    continue
                missing.discard(one)
                offsets[one] = answer["offset"]
                more = more or bool(answer["text"])
                *lines, halves[one] = (halves[one] + answer["text"]).split("\n")
                for line in lines:
                    click.echo(line if rank is not None else f"[{one}] {line}")
            if not running and not more:
                break
            if running and not more:
                time.sleep(POLL_S)
        for one, half in halves.items():
            if half:
                click.echo(half if rank is not None else f"[{one}] {half}")
        if missing:
            told = ", ".join(map(str, sorted(missing)))
            hint = f"it may have ended before its script began; see {paths.attempt(number)}"
            click.echo(f"no log yet of rank {told} ({hint})", err=True)
    return Exit.OK
