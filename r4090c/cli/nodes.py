"""`r4090c nodes`: show the cluster as it was understood, or turn a hostfile into a cluster.yaml."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from r4090c.cli.common import (
    choose_nodes,
    cluster_option,
    json_option,
    load,
    nodes_option,
    out,
    pasteable,
    print_json,
    styled,
)
from r4090c.errors import UsageError

if TYPE_CHECKING:
    from r4090c.model import Cluster, Node, Ssh

SCHEMA = "r4090c.nodes/1"


@click.command()
@cluster_option
@nodes_option
@click.option(
    "--import", "hostfile", metavar="HOSTFILE|-", help="Print a cluster.yaml made from a DeepSpeed or MPI hostfile (- = stdin)."
)
@click.option("--wake", metavar="NODE", help="Forget that NODE failed a run lately: it may be taken as a spare again.")
@json_option
def command(cluster_file: str | None, nodes: str | None, hostfile: str | None, wake: str | None, as_json: bool) -> None:
    """Show the nodes of cluster.yaml with every range and default filled in. Nothing is contacted.

    A node that failed a run is left out as a spare for half an hour; why is shown below the table.

    \b
    Examples:
      r4090c nodes
      r4090c nodes --nodes node[01-02] --json
      r4090c nodes --import /job/hostfile > cluster.yaml
      r4090c nodes --wake node03
    """
    if hostfile is not None:
        if as_json or nodes:
            raise UsageError("--import", "used with --json or --nodes", "--import alone", f"r4090c nodes --import {hostfile}")
        click.echo(_import(hostfile), nl=False)
        return
    cluster = load(cluster_file)
    chosen = choose_nodes(cluster, nodes)
    if wake is not None:
        _wake(cluster, wake)
        return
    resting = _resting(cluster)
    if as_json:
        print_json(nodes_report(cluster, chosen, resting))
        return
    _print_table(cluster, chosen)
    for name, why in resting.items():
        click.echo(pasteable(f"{name} failed a run lately: {why}\n  forget it: r4090c nodes --wake {name}"), err=True)


def _resting(cluster: Cluster) -> dict[str, str]:
    """Return the nodes that failed a run lately; a history that cannot be read is a warning."""
    from r4090c.store import resting_nodes

    try:
        return resting_nodes(cluster.name)
    except UsageError as error:
        click.echo(f"{styled('warning:', fg='yellow')} {error}", err=True)
        return {}


def _wake(cluster: Cluster, name: str) -> None:
    """Forget that a node failed. Raises UsageError when it is none of the cluster."""
    from r4090c.store import wake_node

    if name not in {node.name for node in cluster.nodes}:
        raise UsageError(f"--wake {name}", f"no node of {cluster.name}", "a node of cluster.yaml", "r4090c nodes")
    click.echo(f"{name}: forgotten" if wake_node(cluster.name, name) else f"{name}: nothing was remembered of it")


def _import(hostfile: str) -> str:
    """Return the cluster.yaml text for the hostfile named on the command line. Raises UsageError."""
    from r4090c.inventory import MAX_FILE_BYTES, decode, parse_hostfile, read_text

    if hostfile == "-":
        text = decode(sys.stdin.buffer.read(MAX_FILE_BYTES + 1), "standard input")
        return parse_hostfile(text, "standard input")
    return parse_hostfile(read_text(Path(hostfile)), hostfile)


def nodes_report(cluster: Cluster, nodes: tuple[Node, ...], resting: Mapping[str, str]) -> dict[str, Any]:
    """Return what `--json` prints; `resting`: node -> why it failed a run lately.

    Of the environment only the names: values may be secrets, and output is pasted.
    """
    return {
        "schema": SCHEMA,
        "cluster": cluster.name,
        "file": cluster.file,
        "env": sorted(cluster.env),
        "nodes": [
            {
                "name": node.name,
                "ssh": {"address": node.ssh.address, "port": node.ssh.port, "user": node.ssh.user, "jump": node.ssh.jump},
                "data_address": node.data_address,
                "gpus": node.gpus,
                "spare": node.spare,
                "resting": resting.get(node.name),
                "paths": node.paths,
                "env": sorted(node.env),
            }
            for node in nodes
        ],
    }


def ssh_text(ssh: Ssh) -> str:
    """Return `ssh` as people write it: user@address:port via jump; what is not stated is left out."""
    address = f"[{ssh.address}]" if ":" in ssh.address and ssh.port != 22 else ssh.address
    user = f"{ssh.user}@" if ssh.user else ""
    port = f":{ssh.port}" if ssh.port != 22 else ""
    return f"{user}{address}{port}" + (f" via {ssh.jump}" if ssh.jump else "")


def _print_table(cluster: Cluster, nodes: tuple[Node, ...]) -> None:
    """Print one row a node on stdout; where that is no terminal nothing is cut to a width."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"{cluster.name}: {_count(len(nodes), 'node')}, {_count(sum(node.gpus for node in nodes), 'GPU')}"))
    for heading in ("node", "ssh", "data address"):
        table.add_column(heading, overflow="fold")
    table.add_column("GPUs", justify="right")
    table.add_column("python", overflow="fold")
    for node in nodes:
        cells = (
            f"{node.name} (spare)" if node.spare else node.name,
            ssh_text(node.ssh),
            node.data_address,
            str(node.gpus),
            node.paths.python,
        )
        table.add_row(*(Text(cell) for cell in cells))  # Text: a path may hold what rich takes for markup
    console = out()
    if not console.is_terminal:
        console.width = max(console.width, 4096)
        console.width = console.measure(table).maximum
    console.print(table)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
