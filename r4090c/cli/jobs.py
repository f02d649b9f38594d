"""`r4090c jobs`: list runs and their state."""

from __future__ import annotations

import click

from r4090c.cli.common import cluster_option, json_option, load, out, print_json
from r4090c.errors import Exit


@click.command("jobs")
@click.option("--all", "everything", is_flag=True, help="Show more than the last 20.")
@cluster_option
@json_option
def command(cluster_file: str | None, everything: bool, as_json: bool) -> int:
    """List the runs in the cluster's run folder, the newest first.

    \b
    Examples:
      r4090c jobs
      r4090c jobs --json | jq '.[] | select(.state=="running").id'
    """
    from launch.jobs import list_runs
    from r4090c.remote import Fleet

    cluster = load(cluster_file)
    with Fleet(cluster.nodes) as fleet:
        runs = list_runs(fleet, cluster, limit=1000 if everything else 20)
    if as_json:
        keys = ("id", "state", "recipe", "nodes", "run_dir", "attempt", "step", "steps", "started_at", "cause", "placement")
        print_json([{key: getattr(run, key) for key in keys} for run in runs])
        return Exit.OK
    if not runs:
        click.echo("no runs yet; start one with: r4090c launch tiny", err=True)
        return Exit.OK
    from rich.markup import escape
    from rich.table import Table

    colours = {"running": "cyan", "waiting": "cyan", "done": "green", "failed": "red", "stopped": "yellow", "lost": "red"}
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("run", "state", "recipe", "nodes", "step", "started", "why"):
        table.add_column(name, overflow="fold", no_wrap=name in ("run", "state", "step", "started"))
    for run in runs:
        step = f"{run.step or 0}/{run.steps}" if run.steps else ""
        attempt = f" #{run.attempt}" if run.attempt > 1 else ""
        table.add_row(
            escape(run.id),
            f"[{colours.get(run.state, 'red')}]{run.state}[/]{attempt}",
            escape(run.recipe),
            escape(",".join(run.nodes)),
            escape(step),
            escape(run.started_at),
            escape(run.cause or ""),
        )
    out().print(table)
    return Exit.OK
