"""`r4090c preflight`: are the nodes fit, and if not: which node, what, why, and the command that mends it."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from r4090c.cli.common import (
    choose_nodes,
    cluster_option,
    err,
    json_option,
    load,
    nodes_option,
    pasteable,
    print_json,
    remember,
    tell_error,
)
from r4090c.errors import UsageError

if TYPE_CHECKING:
    from netcheck.checks import Check
    from netcheck.raw import Raw
    from r4090c.model import Cluster, Finding


def _words(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word for value in values for word in value.replace(",", " ").split())


@click.command()
@cluster_option
@nodes_option
@click.option("--quick", is_flag=True, help="Facts only (about a second): measure nothing between the nodes.")
@click.option(
    "--only",
    metavar="GROUP|CHECK",
    multiple=True,
    callback=_words,
    help="Only these groups or checks; repeat or separate by commas.",
)
@click.option("--skip", metavar="CHECK|GROUP", multiple=True, callback=_words, help="Not these.")
@click.option(
    "--save",
    "save_file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep every raw answer in FILE (tar.gz, without secrets).",
)
@click.option(
    "--from",
    "from_file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Judge a saved FILE offline instead of asking the nodes.",
)
@click.option("-v", "--verbose", is_flag=True, help="List the passes and skips as well.")
@json_option
def command(
    cluster_file: str | None,
    nodes: str | None,
    quick: bool,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    save_file: Path | None,
    from_file: Path | None,
    verbose: bool,
    as_json: bool,
) -> int:
    """Say whether the nodes are fit to train, and if not which node, what, why, and the command that mends it.

    Changes nothing on a node. The exit code is 0 when all are fit (warnings allowed), 1 when a check failed, 3 when something
    could not be told (a node was not reached, a fact not read); 2 when all are fit but FILE of --save cannot be written.
    """
    from netcheck.judge import exit_code, verdict
    from netcheck.preflight import select_checks
    from netcheck.report import report, screen

    checks = select_checks(only, skip)
    started = time.monotonic()
    if from_file is not None:
        for option, given in (("--save", save_file), ("--quick", quick), ("--cluster", cluster_file)):
            if given:
                raise UsageError(option, "means nothing with --from", "one of the two", f"r4090c preflight --from {from_file}")
        cluster, raw, findings = _replay(from_file, nodes, checks)
    else:
        cluster, raw, findings = _ask(load(cluster_file), nodes, checks, measure=not quick)
    duration_s = time.monotonic() - started
    facts_file = save_file or from_file
    if as_json:
        print_json(report(cluster.name, raw.started_at, duration_s, findings, str(facts_file) if facts_file else None))
    else:
        terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if terminal else None
        for line in screen(cluster.name, list(raw.reach), duration_s, findings, width=width, verbose=verbose):
            styled = click.style(
                pasteable(line.text),
                fg=line.colour or None,
                bold=line.strength == "bold" or None,
                dim=line.strength == "dim" or None,
            )
            click.echo(styled, color=terminal and not os.environ.get("NO_COLOR"))
    code = exit_code(findings)
    if save_file is not None:  # after the report: a file that cannot be written must not lose it
        from netcheck.bundle import save_bundle

        try:
            save_bundle(save_file, cluster, raw)
            click.echo(f"saved: {save_file}", err=True)
        except UsageError as error:
            tell_error(error)
            code = code or error.exit_code
    if from_file is None:
        from r4090c.store import record_preflight

        kept = [{**asdict(finding), "status": finding.status.value} for finding in findings]
        remember(record_preflight, cluster.name, list(raw.reach), verdict(findings), kept)
    return int(code)


def _ask(cluster: Cluster, nodes: str | None, checks: Sequence[Check], *, measure: bool) -> tuple[Cluster, Raw, list[Finding]]:
    """Ask the nodes over SSH."""
    from netcheck.preflight import run_preflight
    from r4090c.remote import Fleet

    chosen = choose_nodes(cluster, nodes)
    with _progress() as progress, Fleet(chosen) as fleet:
        raw, _, findings = run_preflight(fleet, cluster, chosen, measure=measure, checks=checks, progress=progress)
    return cluster, raw, findings


def _replay(bundle: Path, nodes: str | None, checks: Sequence[Check]) -> tuple[Cluster, Raw, list[Finding]]:
    """Judge what a bundle holds."""
    from netcheck.bundle import load_bundle
    from netcheck.judge import judge
    from netcheck.raw import parse_raw

    cluster, raw = load_bundle(bundle)
    if nodes is not None:
        names = {node.name for node in choose_nodes(cluster, nodes)}
        raw = replace(raw, reach={name: answer for name, answer in raw.reach.items() if name in names})
    return cluster, raw, judge(cluster, raw, parse_raw(raw, cluster), checks)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Give a function that shows a few words on stderr while work goes on; silent when stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda words: None
        return
    with err().status("connecting") as status:
        yield status.update
