"""`r4090c checks`: what the preflight looks at, what it expects, and where each rule comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from r4090c.cli.common import cluster_option, find_cluster_file, json_option, load, out, print_json
from r4090c.errors import UsageError

if TYPE_CHECKING:
    from netcheck.catalogue import Entry
    from r4090c.model import Cluster

SCHEMA = "r4090c.checks/1"
WIDTH_MAX = 100
"""Columns of the table where the output is wider, or no terminal: longer lines are hard to read."""


@click.command()
@click.argument("names", metavar="[ID|GROUP]…", nargs=-1)
@cluster_option
@click.option("--markdown", is_flag=True, help="Print docs/checks.md, with the defaults.")
@json_option
def command(names: tuple[str, ...], cluster_file: str | None, markdown: bool, as_json: bool) -> None:
    """Show every check: what it tells, at which level it runs, what is expected and where the rule comes from.

    With the thresholds of cluster.yaml where there is one, else with the defaults. An ID shows one check in full: thresholds with
    their sources, and the remedies it proposes. Nothing is contacted.

    \b
    Examples:
      r4090c checks
      r4090c checks clock-skew
      r4090c checks gpu nic --json
    """
    from netcheck.catalogue import catalogue
    from netcheck.catalogue import markdown as markdown_of
    from r4090c.model import Expect

    if markdown:
        if names or as_json or cluster_file:
            raise UsageError("--markdown", "given with something else", "--markdown alone", "r4090c checks --markdown")
        click.echo(markdown_of(catalogue(Expect(), {})), nl=False)
        return
    cluster = _cluster(cluster_file)
    expect, origins = (cluster.expect, cluster.expect_origin) if cluster else (Expect(), {})
    entries = _chosen(catalogue(expect, origins), names)
    if as_json:
        print_json({"schema": SCHEMA, "cluster": cluster.name if cluster else None, "checks": entries})
    elif len(names) == 1 and len(entries) == 1:
        _show_one(entries[0])
    else:
        _show(entries, cluster)


def _cluster(cluster_file: str | None) -> Cluster | None:
    """Return the cluster that commands here would take, None when there is none."""
    try:
        found = find_cluster_file(cluster_file)
    except UsageError:
        return None
    return load(found)


def _chosen(entries: tuple[Entry, ...], names: Sequence[str]) -> list[Entry]:
    """Return the entries of these ids and groups, all when none is named. Raises UsageError for an unknown name."""
    from difflib import get_close_matches

    known = {name for entry in entries for name in (entry.id, entry.group)}
    for name in names:
        if name not in known:
            near = get_close_matches(name, sorted(known), n=1, cutoff=0.5)
            raise UsageError(
                name,
                "no check or group is called so",
                "an id or a group",
                f"r4090c checks {near[0]}" if near else "r4090c checks",
            )
    return [entry for entry in entries if not names or {entry.id, entry.group} & {*names}]


def _show(entries: Sequence[Entry], cluster: Cluster | None) -> None:
    """Print one row a check, a section a group."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from netcheck.catalogue import grouped

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("level")
    table.add_column("what it tells · what is expected · source", ratio=1)
    for group, members in grouped(entries).items():
        table.add_row(Text(group, style="bold"))
        for entry in members:
            told = Text(entry.what)
            told.append(f"\n{entry.rule}", style="cyan")
            told.append(f"  [{entry.source}]", style="dim")
            overridden = [one.name for one in entry.thresholds if one.origin != "default"]
            if overridden:
                told.append(f"\ncluster.yaml: expect.{', expect.'.join(overridden)}", style="yellow")
            table.add_row(Text(f"  {entry.id}"), Text(entry.level), told)
    console = out()
    console.width = min(console.width, WIDTH_MAX)
    console.print(table)
    whose = f"thresholds of {cluster.file or cluster.name}" if cluster else "default thresholds (no cluster.yaml)"
    console.print(Text(f"\n{len(entries)} checks, {whose}. One in full: r4090c checks ID", style="dim"))


def _show_one(entry: Entry) -> None:
    """Print everything that is known of one check."""
    from rich.text import Text

    from netcheck.catalogue import shown

    console = out()
    console.width = min(console.width, WIDTH_MAX)
    measured = f", measured by {entry.measurement}" if entry.measurement else ""
    console.print(Text(f"{entry.id}   group {entry.group}, level {entry.level}{measured}", style="bold"))
    for heading, text in (("tells", entry.what), ("expected", entry.rule), ("source", entry.source)):
        console.print(Text(_hanging(f"{heading:<10}", text, console.width)), soft_wrap=True)
    if entry.thresholds:
        console.print("\nthresholds (expect: in cluster.yaml overrides them)")
    for one in entry.thresholds:
        console.print(
            _hanging(f"  {one.name}: {shown(one.value)} ({one.origin})  ", one.source, console.width, 4), soft_wrap=True
        )
    if entry.remedies:
        console.print("\nremedies it proposes ({…}: filled in by the finding)")
    for remedy in entry.remedies:
        console.print(Text(f"  {remedy}", style="cyan"), soft_wrap=True)
    console.print(Text(f"\nrun it alone: r4090c preflight --only {entry.id}", style="dim"), soft_wrap=True)


def _hanging(head: str, text: str, width: int, indent: int | None = None) -> str:
    """Return `head` and `text`, wrapped with the following lines under the text."""
    import textwrap

    return textwrap.fill(head + text, max(width, 40), subsequent_indent=" " * (len(head) if indent is None else indent))
