"""`r4090c bench`: measure one thing by itself, with all there is to see."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from r4090c.cli.common import choose_nodes, cluster_option, err, json_option, load, nodes_option, out, print_json
from r4090c.errors import CheckFailed, CouldNotTell, Exit, UsageError

if TYPE_CHECKING:
    from netcheck.measure.sweep import Member, Run, Sweep
    from r4090c.model import Cluster, Node, NodeFacts
    from r4090c.remote import Fleet

SCHEMA = "r4090c.bench-collectives/1"
OPS = ("all_reduce", "all_gather", "reduce_scatter")
ALONE_RANKS = 2
"""Ranks on a single node without GPUs: one would have nobody to talk to."""
GPU_SIZES, CPU_SIZES = ("1M", "256M"), ("1M", "16M")
BAR_COLUMNS = 24


@click.group("bench")
def command() -> None:
    """Measure one thing by itself."""


def _size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    from netcheck.measure.sweep import parse_size

    try:
        return None if value is None else parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@command.command("collectives")
@cluster_option
@nodes_option
@click.option("--op", "ops", type=click.Choice(OPS), multiple=True, help="Which; may be repeated [default: all_reduce].")
@click.option("--min-bytes", metavar="SIZE", callback=_size, help="The smallest message, like 64K [default: 1M].")
@click.option("--max-bytes", metavar="SIZE", callback=_size, help="The largest [default: 256M on GPUs, 16M on CPUs].")
@click.option("--factor", type=click.IntRange(2, 1024), default=2, show_default=True, help="From one size to the next.")
@click.option("--iterations", type=click.IntRange(1, 10_000), default=20, show_default=True, help="Of each size, at most.")
@click.option("--backend", type=click.Choice(("auto", "nccl", "gloo")), default="auto", show_default=True)
@click.option("--ranks-per-node", type=click.IntRange(1, 64), help="On each node [default: one a GPU; on CPUs 1, on one node 2].")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(1, 600), default=30.0, show_default=True, help="Seconds for each size."
)
@click.option("--svg", "svg_file", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="Plot into FILE.")
@json_option
def collectives(
    cluster_file: str | None,
    nodes: str | None,
    ops: tuple[str, ...],
    min_bytes: int | None,
    max_bytes: int | None,
    factor: int,
    iterations: int,
    backend: str,
    ranks_per_node: int | None,
    timeout_s: float,
    svg_file: Path | None,
    as_json: bool,
) -> int:
    """Sweep all_reduce, all_gather and reduce_scatter over message sizes with the nodes' own torch, as nccl-tests does.

    NCCL on GPUs, gloo on CPUs, under the environment that `launch` gives the ranks. Every value is checked. The figures are
    nccl-tests': GB/s = 1e9 bytes a second, bus bandwidth does not depend on the number of ranks.

    \b
    Examples:
      r4090c bench collectives --nodes 2
      r4090c bench collectives --op all_gather --op reduce_scatter --max-bytes 64M
      r4090c bench collectives --nodes node03,node07 --json
      r4090c bench collectives --svg bandwidth.svg

    \b
    Exit codes: 0 measured, all values right; 1 wrong values, or a collective that fails or hangs; 3 could not be measured.
    """
    from netcheck.measure.sweep import Sweep, parse_size
    from r4090c.cli.preflight import progress
    from r4090c.remote import Fleet

    cluster = load(cluster_file)
    chosen = choose_nodes(cluster, nodes)
    runs: list[Run] = []
    with progress() as told, Fleet(chosen) as fleet:
        facts = _facts(fleet, cluster, chosen, told)
        team = _team(cluster, chosen, facts, backend, ranks_per_node)
        sizes = GPU_SIZES if team[0].gpus else CPU_SIZES
        least = min_bytes or min(parse_size(sizes[0]), max_bytes or parse_size(sizes[0]))
        most = max_bytes or max(parse_size(sizes[1]), least)
        if least > most:
            raise UsageError("--min-bytes", f"{least} is more than --max-bytes {most}", "the other way round")
        for op in ops or ("all_reduce",):
            sweep = Sweep(least, most, op=op, factor=factor, iterations=iterations, timeout_s=timeout_s)
            told(f"{op}: {sum(member.ranks for member in team)} ranks on {len(team)} nodes")
            runs.append(_run(fleet, cluster, team, sweep, len(runs)))
    if as_json:
        print_json(_document(cluster, team, runs))
    else:
        _print(cluster, team, runs)
    if svg_file is not None:
        _write_svg(svg_file, cluster, team, runs)
    for run in runs:
        _complain(run, as_json)
    return int(Exit.FAILED if any(run.wrong for run in runs) else Exit.OK)


def _facts(fleet: Fleet, cluster: Cluster, chosen: Sequence[Node], told: Any) -> dict[str, NodeFacts]:
    """Return the facts of all chosen nodes. Raises CouldNotTell about the first that was not reached."""
    from netcheck.preflight import read_nodes

    raw, facts = read_nodes(fleet, cluster, chosen, told)
    for name, reach in raw.reach.items():
        if reach["verdict"] != "ok":
            raise CouldNotTell(name, reach["observed"], "a node that answers", reach["next_command"])
    return facts


def _team(
    cluster: Cluster, chosen: Sequence[Node], facts: dict[str, NodeFacts], backend: str, ranks: int | None
) -> tuple[Member, ...]:
    """Return who takes part, with which GPUs. Raises UsageError when a node cannot do what was asked."""
    from dataclasses import replace

    from netcheck.measure.job import Level, Setting
    from netcheck.measure.sweep import has_torch, members

    team = members(Setting(tuple(chosen), facts, cluster, Level.FULL), chosen)
    for member in team:
        if not has_torch(member.facts):
            python = member.node.paths.python
            observed = f"{python}: " + (member.facts.python.error or "torch is not installed in it")
            raise UsageError(member.node.name, observed, "torch in paths.python", "r4090c preflight --only software")
    bare = [member.node.name for member in team if not member.gpus]
    if backend == "nccl" and bare:
        observed = f"no GPU answers on {', '.join(bare)}"
        raise UsageError("--backend nccl", observed, "GPUs on every node, or --backend gloo", "r4090c facts")
    if backend == "gloo" or bare:
        cpu_ranks = ranks or (ALONE_RANKS if len(team) == 1 else 1)
        return tuple(replace(member, gpus=(), cpu_ranks=cpu_ranks) for member in team)
    if ranks is not None:
        few = next((member for member in team if len(member.gpus) < ranks), None)
        if few is not None:
            observed = f"{few.node.name} has {len(few.gpus)} GPUs"
            raise UsageError(f"--ranks-per-node {ranks}", observed, f"at most {len(few.gpus)}", "r4090c nodes")
        team = tuple(replace(member, gpus=member.gpus[:ranks]) for member in team)
    return team


def _run(fleet: Fleet, cluster: Cluster, team: Sequence[Member], sweep: Sweep, number: int) -> Run:
    """Return what came of one sweep."""
    import secrets

    from netcheck.conduct import run_round
    from netcheck.measure.job import read_record
    from netcheck.measure.schedule import pick_ports
    from netcheck.measure.sweep import TORCH, make_job, read_run

    (port,) = pick_ports(secrets.randbits(64), number, 1)
    (record,) = run_round(fleet, (make_job(sweep.op, team, sweep, port, program=TORCH),), {})
    return read_run(read_record(record))


def _document(cluster: Cluster, team: Sequence[Member], runs: Sequence[Run]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "cluster": cluster.name,
        "nodes": [member.node.name for member in team],
        "ranks_per_node": [member.ranks for member in team],
        "backend": runs[0].backend,
        "devices": list(runs[0].devices),
        "results": [
            {
                "op": run.op,
                "ranks": run.ranks,
                "error": run.error or None,
                "wrong_nodes": list(run.wrong_nodes),
                "network": run.log.network if run.log else None,
                "transports": dict(run.log.transports) if run.log else None,
                "note": run.note or None,
                "rows": list(run.rows),
            }
            for run in runs
        ],
    }


def _print(cluster: Cluster, team: Sequence[Member], runs: Sequence[Run]) -> None:
    from rich.table import Table

    from r4090c.plot import bar, size_text

    console = out()
    most = max((row.busbw_gbyte_s for run in runs for row in run.rows), default=0.0)
    for run in runs:
        if not run.rows:
            continue
        network = f", {run.log.network} ({', '.join(run.log.transports)})" if run.log and run.log.network else ""
        title = f"{cluster.name}: {run.op}, {run.ranks} ranks on {len(team)} nodes, {run.backend}{network}"
        grid = Table(box=None, header_style="bold", pad_edge=False, title=title, title_justify="left", title_style="")
        for name in ("size", "time", "algbw", "busbw", "#wrong"):
            grid.add_column(name, justify="right")
        grid.add_column("busbw, GB/s")
        for row in run.rows:
            wrong = f"[red]{row.wrong}[/red]" if row.wrong and not os.environ.get("NO_COLOR") else str(row.wrong)
            time = f"{row.time_us:.1f} us" if row.time_us < 10_000 else f"{row.time_us / 1000:.1f} ms"
            figures = (time, f"{row.algbw_gbyte_s:.2f}", f"{row.busbw_gbyte_s:.2f}", wrong)
            grid.add_row(size_text(row.bytes), *figures, bar(row.busbw_gbyte_s, most, BAR_COLUMNS))
        console.print(grid)
        if run.note:
            err().print(f"note: {run.note}", style="dim", markup=False, soft_wrap=True)
        if sys.stdout.isatty():
            console.print()


def _write_svg(path: Path, cluster: Cluster, team: Sequence[Member], runs: Sequence[Run]) -> None:
    from r4090c.plot import svg

    series = {run.op: [(row.bytes, row.busbw_gbyte_s) for row in run.rows] for run in runs if run.rows}
    title = f"{cluster.name}: {runs[0].asked} ranks on {', '.join(member.node.name for member in team)}, {runs[0].backend}"
    try:
        path.write_text(svg(title, series), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            str(path), f"cannot be written: {error.strerror}", "a writable file name", f"ls -ld {path.parent}"
        ) from error
    click.echo(f"written: {path}", err=True)


def _complain(run: Run, as_json: bool) -> None:
    """Raise what a run that is not whole is worth, as an error with a next command."""
    from netcheck.checks._collective import failure
    from r4090c.model import Status

    failed = failure(run)
    if failed is None:
        return
    status, observed, why = failed
    said = "".join(f"\n  {node}: {words}" for node, words in run.said.items())
    again = next(filter(None, run.next_commands.values()), "r4090c preflight --only ports,bandwidth")
    kind = CheckFailed if status is Status.FAIL else CouldNotTell
    raise kind(run.op, f"{observed}{said}", why and f"all ranks take part and every value is right ({why})", again)
