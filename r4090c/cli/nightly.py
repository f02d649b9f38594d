"""`r4090c nightly`: measure scaling efficiency, keep its history."""

from __future__ import annotations

import time
from dataclasses import asdict

import click

from r4090c.cli.common import cluster_option, err, json_option, load, out, print_json, remember
from r4090c.errors import Exit, UsageError


@click.group("nightly")
def command() -> None:
    """Measure how well the cluster scales, with history."""


def _sizes(text: str, limit: int) -> list[int]:
    """Return the node counts of "1,2,4". Raises UsageError."""
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(f"--nodes {text}", "not numbers", "numbers of nodes like 1,2,4") from None
    if not sizes or sizes[0] < 1 or sizes[-1] > limit:
        raise UsageError(f"--nodes {text}", f"the cluster has {limit} nodes", f"numbers from 1 to {limit}", "r4090c nodes")
    return sizes


@command.command("run")
@click.option("--recipe", default="tiny", show_default=True, help="What to train for the measurement.")
@click.option(
    "--nodes",
    "sizes",
    default="1,2",
    show_default=True,
    metavar="N,…",
    help="Numbers of nodes to measure; T(1) is measured on every node.",
)
@click.option("--repeats", type=click.IntRange(1, 100), default=5, show_default=True, help="How often each is run, interleaved.")
@click.option("--floor", type=click.FloatRange(0, 1), help="Exit 1 when E(n) is below this for any n > 1.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Change a key of the recipe.")
@click.option("--nproc-per-node", "nproc", type=click.IntRange(1, 64), help="Ranks on each node.")
@click.option("--no-affinity", is_flag=True, help="Bind no rank to CPUs or memory, and leave the GPUs in PCI order.")
@click.option("--dry-run", is_flag=True, help="Show the runs; start nothing.")
@cluster_option
@json_option
def run(
    recipe: str,
    sizes: str,
    repeats: int,
    floor: float | None,
    sets: tuple[str, ...],
    nproc: int | None,
    no_affinity: bool,
    dry_run: bool,
    cluster_file: str | None,
    as_json: bool,
) -> int:
    """Measure E(n) = T(n) / (n · T(1)) and remember every raw sample.

    \b
    Examples:
      r4090c nightly run --recipe tiny --nodes 1,2 --repeats 3
      r4090c nightly run --nodes 1,2,4 --floor 0.85     exits 1 below it
    """
    from launch.nightly.statistics import ENOUGH, Sample, fingerprint, scaling, slow_nodes, verdict
    from launch.nightly.sweep import measure, schedule
    from launch.recipe import load_recipe
    from launch.run import Wish, gate
    from netcheck.measure.job import Level
    from netcheck.preflight import run_preflight
    from r4090c.remote import Fleet
    from r4090c.store import record_night

    cluster = load(cluster_file)
    label = f"nightly-{load_recipe(recipe, sets)['name']}"
    turns = schedule(cluster.nodes, _sizes(sizes, len(cluster.nodes)), repeats)
    if dry_run:
        plan = [{"repeat": turn.repeat, "nodes": [node.name for node in turn.nodes]} for turn in turns]
        if as_json:
            print_json(plan)
        else:
            for turn in turns:
                click.echo(f"repeat {turn.repeat}: {', '.join(node.name for node in turn.nodes)}")
        return Exit.OK
    night = time.strftime("night-%Y%m%d-%H%M%S", time.gmtime())
    console = err()

    def say(text: str) -> None:
        console.print(text, style="dim", soft_wrap=True, markup=False)

    part = cluster.nodes[: max(len(turn.nodes) for turn in turns)]
    with Fleet(part) as fleet:
        _, facts, findings = run_preflight(fleet, cluster, part, level=Level.QUICK)
        gate(findings)
        samples: list[Sample] = []
        failed: list[str] = []
        interrupted = False
        try:
            wish = Wish(recipe, sets, nproc=nproc, label=label, affinity=not no_affinity)
            measure(fleet, cluster, wish, turns, say, samples, failed)
        except KeyboardInterrupt:  # what was measured is kept
            interrupted = True
    table = scaling(samples)
    told = "interrupted" if interrupted else verdict(table, {len(turn.nodes) for turn in turns}, floor, len(failed))
    summary = {
        "schema": "r4090c.nightly/1",
        "id": night,
        "cluster": cluster.name,
        "recipe": recipe,
        "repeats": repeats,
        "floor": floor,
        "verdict": told,
        "scaling": [asdict(one) for one in table],
        "slow_nodes": [{"node": node, "share": share} for node, share in slow_nodes(samples)],
        "failed_runs": failed,
        "fingerprint": fingerprint(facts),
    }
    raw = [asdict(sample) for sample in samples]
    remember(record_night, night, cluster.name, recipe, summary["fingerprint"], raw, summary)
    if as_json:
        print_json({**summary, "samples": raw})
    else:
        _print(table, summary)
        if repeats < ENOUGH:
            console.print(f"{repeats} repeats: enough for a look; {ENOUGH} or more for a judgement", style="dim")
    codes = {"measured": Exit.OK, "below the floor": Exit.FAILED, "could not tell": Exit.UNKNOWN, "interrupted": Exit.INTERRUPTED}
    return codes[told]


def _print(table: tuple[object, ...], summary: dict[str, object]) -> None:
    from rich.table import Table

    from launch.nightly.statistics import Scaling

    grid = Table(
        box=None,
        header_style="bold",
        pad_edge=False,
        title=f"{summary['cluster']}: {summary['recipe']}, {summary['id']}",
        title_justify="left",
    )
    for name in ("nodes", "which", "tokens/s", "per node alone", "E(n)", "95 % interval", "samples"):
        grid.add_column(name, justify="left" if name == "which" else "right")
    for one in table:
        assert isinstance(one, Scaling)
        interval = f"{one.low:.3f} – {one.high:.3f}" if one.low is not None and one.high is not None else ""
        alone = " + ".join(f"{rate:,.0f}" for rate in one.single_tokens_per_s.values())
        efficiency = f"{one.efficiency:.3f}" if one.n > 1 else ""
        grid.add_row(
            str(one.n),
            ",".join(one.nodes),
            f"{one.tokens_per_s:,.0f}",
            alone if one.n > 1 else "",
            efficiency,
            interval,
            str(one.samples),
        )
    console = out()
    console.print(grid)
    for slow in summary["slow_nodes"]:  # type: ignore[attr-defined]
        console.print(f"{slow['node']} alone reaches only {slow['share']:.0%} of the nodes' median")
    for text in summary["failed_runs"]:  # type: ignore[attr-defined]
        console.print(f"failed: {text}", markup=False)
    floor = f" (floor {summary['floor']})" if summary["floor"] is not None else ""
    console.print(f"{summary['verdict']}{floor}")


@command.command("history")
@click.option("--recipe", default="tiny", show_default=True)
@cluster_option
@json_option
def history(recipe: str, cluster_file: str | None, as_json: bool) -> int:
    """Show the nights that were measured, the newest first."""
    from r4090c.store import nights

    cluster = load(cluster_file)
    found = nights(cluster.name, recipe)
    if as_json:
        print_json(found)
        return Exit.OK
    for night in found:
        told = "  ".join(f"E({one['n']}) {one['efficiency']:.3f}" for one in night["scaling"] if one["n"] > 1)
        click.echo(f"{night['id']}  {told}  {night['verdict']}")
    if not found:
        click.echo("no nights yet; measure one with: r4090c nightly run", err=True)
    return Exit.OK
