"""`r4090c stop`: end a run on every node of it."""

from __future__ import annotations

import click

from r4090c.cli.common import cluster_option, json_option, load, print_json
from r4090c.errors import CouldNotTell, Exit


@click.command("stop")
@click.argument("run_id", metavar="RUN")
@click.option("--dry-run", is_flag=True, help="Tell what would be stopped where; stop nothing.")
@cluster_option
@json_option
def command(run_id: str, dry_run: bool, cluster_file: str | None, as_json: bool) -> int:
    """End RUN on every node: TERM, a grace, KILL. Only processes that RUN started are touched.

    \b
    Example:
      r4090c stop tiny-20260131-120000-a1b2
    """
    from launch.jobs import find_run, note_stop
    from launch.supervise import account, stop_run, what_follows_there
    from r4090c.remote import Fleet

    cluster = load(cluster_file)
    with Fleet(cluster.nodes) as fleet:
        run = find_run(fleet, cluster, run_id)
        known = [name for name in (*run.nodes, *run.earlier_nodes) if name in fleet.nodes]
        if dry_run:
            if as_json:
                print_json({"run_id": run.id, "was": run.state, "nodes": known, "dry_run": True})
            else:
                click.echo(f"{run.id} ({run.state}): would be stopped on {', '.join(known)}")
            return Exit.OK
        by = f"{account()} (r4090c stop)"
        unwritten = note_stop(fleet, run, by)  # first: a supervisor between two attempts must not start the next one
        result = stop_run(fleet, run.id, known, by)
    missing = sorted((set(run.nodes) - set(known)) | (set(run.nodes) & set(result.unreachable)))
    if as_json:
        print_json({"run_id": run.id, "was": run.state, "left": result.left, "unreachable": missing})
    elif not result.left and not missing:
        click.echo(
            f"{run.id}: stopped; nothing of it is left running"
            if run.state == "running"
            else f"{run.id}: stopped; it is not started again, and nothing of it is left running"
            if run.state == "waiting"
            else f"{run.id}: had ended ({run.state}); nothing of it is left running"
        )
    if result.left:
        raise CouldNotTell(
            run.id,
            f"processes that would not go: {dict(result.left)}",
            "none",
            "ps -o pid,stat,wchan:32,cmd -p PID   (D = waiting for storage)",
        )
    if unwritten and run.state == "waiting":
        raise CouldNotTell(
            run.id,
            f"{run.run_dir} cannot be written ({unwritten}), so {(run.between or {}).get('who')} starts it again",
            "a run folder that can be written",
            f"df -h {run.run_dir}; then r4090c stop {run.id}",
        )
    if missing:
        raise CouldNotTell(
            run.id,
            f"no answer from {', '.join(missing)}: {what_follows_there(missing, run.nodes)}",
            "every node of the run",
            f"r4090c preflight --nodes {','.join(missing)}",
        )
    return Exit.OK
