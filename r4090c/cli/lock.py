"""`r4090c lock`: record a cluster that is known to be good, so that later preflights tell what drifts from it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from r4090c.cli.common import cluster_option, find_cluster_file, json_option, load, on_stdout, print_json
from r4090c.cli.preflight import level_options, print_lines, progress
from r4090c.errors import UsageError

if TYPE_CHECKING:
    from netcheck.raw import Raw
    from r4090c.model import Cluster, Finding, NodeFacts


@click.command()
@cluster_option
@level_options
@click.option("--show", is_flag=True, help="Show the lock that is there; nothing is contacted.")
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the lock to FILE [default: beside cluster.yaml, where preflight finds it].",
)
@click.option("--allow-unfit", is_flag=True, help="Lock a cluster that is not fit, or about which not all could be told.")
@click.option(
    "--from",
    "from_file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Lock what a saved preflight holds instead of asking the nodes; wants --output.",
)
@json_option
def command(
    cluster_file: str | None,
    level: str | None,
    show: bool,
    output: Path | None,
    allow_unfit: bool,
    from_file: Path | None,
    as_json: bool,
) -> int:
    """Record versions, topology, speeds and measured figures of a cluster known to be good, in a file beside cluster.yaml.

    A preflight runs first, and only a fit cluster is locked. From then on every preflight warns of what is not as it was locked
    (the check `drift`); when a change is meant, lock again. The file holds no secret and no time: commit it with cluster.yaml.

    \b
    Examples:
      r4090c lock --full              with all figures as baselines
      r4090c lock --show
      r4090c lock --from preflight.tar.gz --output cluster.lock.json

    \b
    Exit codes: 0 locked; 1 or 3 not fit, or could not tell, and nothing was written; 2 wrong usage or FILE cannot be written.
    """
    if show:
        return _show(find_cluster_file(cluster_file), output, as_json)
    from netcheck.figures import figures_of, level_of
    from netcheck.judge import exit_code
    from netcheck.lock import make
    from netcheck.report import screen
    from r4090c.lockfile import lock_path, read_lock, write_lock

    started = time.monotonic()
    cluster, raw, facts, findings = (
        _replay(from_file, level, cluster_file) if from_file else _ask(cluster_file, level or "default")
    )
    if output is None and not cluster.file:
        raise UsageError(
            "--from", "does not tell where cluster.yaml is", "--output FILE", f"r4090c lock --from {from_file} --output FILE"
        )
    path = output or lock_path(cluster.file)
    code = int(exit_code(findings))
    if code or not as_json:
        lines = screen(cluster.name, list(raw.reach), time.monotonic() - started, findings, width=None)
        on_stdout(lambda: print_lines(lines, to_stderr=as_json), "r4090c lock --json")
    if code and not allow_unfit:
        click.echo(
            f"not locked: a lock is what a fit cluster was like. Mend it, or say --allow-unfit.  ({path} is as it was)", err=True
        )
        return code
    figures = figures_of(raw.measurements, raw.reach)
    lock = make(cluster, level_of(raw.measurements), facts, figures)
    before = read_lock(path) if path.exists() else None
    write_lock(path, lock)
    if as_json:
        print_json(lock)
    else:
        click.echo(f"\nlocked: {path}   {_size(lock)}")
        if output is not None and cluster.file and output.absolute() != lock_path(cluster.file).absolute():
            click.echo(f"  preflight looks for it at {lock_path(cluster.file)}")
        if before is not None:
            click.echo(f"  {'as before' if before == lock else 'it replaces an older one that was different'}")
            if before.get("figures") and not lock["figures"]:
                click.echo("  the older one held measured figures, this one has none: r4090c lock --full")
    return 0


def _ask(cluster_file: str | None, level: str) -> tuple[Cluster, Raw, Mapping[str, NodeFacts], list[Finding]]:
    """Run a preflight of all nodes, without an older lock: what is to be locked is what is there now."""
    from netcheck.measure.job import Level
    from netcheck.preflight import run_preflight
    from r4090c.remote import Fleet

    cluster = load(cluster_file)
    with progress() as told, Fleet(cluster.nodes) as fleet:
        raw, facts, findings = run_preflight(fleet, cluster, cluster.nodes, level=Level[level.upper()], progress=told)
    return cluster, raw, facts, findings


def _replay(
    bundle: Path, level: str | None, cluster_file: str | None
) -> tuple[Cluster, Raw, Mapping[str, NodeFacts], list[Finding]]:
    """Judge a saved preflight, without the lock in it."""
    from netcheck.bundle import load_bundle
    from netcheck.judge import judge
    from netcheck.raw import parse_raw

    for option, given in ((f"--{level}", level), ("--cluster", cluster_file)):
        if given:
            raise UsageError(option, "means nothing with --from", "one of the two", f"r4090c lock --from {bundle} --output FILE")
    cluster, raw = load_bundle(bundle)
    cluster = replace(cluster, lock=None)
    facts = parse_raw(raw, cluster)
    return cluster, raw, facts, judge(cluster, raw, facts)


def _size(lock: Mapping[str, Any]) -> str:
    """Return how much a lock holds."""
    figures = sum(len(kind["values"]) for names in lock["figures"].values() for kind in names.values())
    items = len(lock["common"])
    own = sum(map(len, lock["nodes"].values()))
    return f"{len(lock['nodes'])} nodes, {items} items all share, {own} of single nodes, {figures} figures"


def _show(cluster_file: str, output: Path | None, as_json: bool) -> int:
    """Print the lock that is there. Raises UsageError when there is none, or it is none."""
    from netcheck.figures import number, summaries
    from netcheck.lock import label, read, told
    from r4090c.errors import ParseError
    from r4090c.lockfile import lock_path, read_lock

    path = output or lock_path(cluster_file)
    lock = read_lock(path)
    if lock is None:
        raise UsageError(str(path), "there is no lock", "a cluster that was locked", "r4090c lock")
    try:
        known = read(lock)
    except ParseError as error:
        raise UsageError(str(path), str(error), "a lock as `r4090c lock` writes", "r4090c lock") from error
    if as_json:
        print_json(lock)
        return 0
    click.echo(f"{known.cluster}   {path}   level {known.level}, {_size(lock)}")
    width = max((len(label(item)) for own in known.items.values() for item in own), default=0)
    common = Counter((item, value) for own in known.items.values() for item, value in own.items())
    for (item, value), count in common.items():
        if count == len(known.items):
            click.echo(f"  {label(item):<{width}}  {told(value)}")
    for node, own in known.items.items():
        for item, value in own.items():
            if common[item, value] < len(known.items):
                click.echo(f"  {label(item):<{width}}  {told(value)}   {node}")
    for one in summaries(known.figures):
        what, many = f"{one.measurement} {one.name}".strip(), f"{one.count} figure{'s' if one.count != 1 else ''}"
        click.echo(f"  {what:<{width}}  {many}, {number(one.worst[1])} … {number(one.best[1])} {one.unit}")
    return 0
