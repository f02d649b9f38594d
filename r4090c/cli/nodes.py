"""`r4090c nodes`: show the cluster as it was understood, or turn a hostfile into a cluster.yaml."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from r4090c.cli.common import choose_nodes, cluster_option, json_option, load, nodes_option, out, print_json
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
@json_option
def command(cluster_file: str | None, nodes: str | None, hostfile: str | None, as_json: bool) -> None:
    """Show the nodes of cluster.yaml with every range and default filled in. Nothing is contacted.

    \b
    Examples:
      r4090c nodes
      r4090c nodes --nodes node[01-02] --json
      r4090c nodes --import /job/hostfile > cluster.yaml
    """
    if hostfile is not None:
        if as_json or nodes:
            raise UsageError("--import", "used with --json or --nodes", "--import alone", f"r4090c nodes --import {hostfile}")
        click.echo(_import(hostfile), nl=False)
        return
    cluster = load(cluster_file)
    chosen = choose_nodes(cluster, nodes)
    if as_json:
        print_json(nodes_report(cluster, chosen))
    else:
        _print_table(cluster, chosen)


def _import(hostfile: str) -> str:
    """Return the cluster.yaml text for the hostfile named on the command line. Raises UsageError."""
    from r4090c.inventory import MAX_FILE_BYTES, decode, parse_hostfile, read_text

    if hostfile == "-":
        text = decode(sys.stdin.buffer.read(MAX_FILE_BYTES + 1), "standard input")
        return parse_hostfile(text, "standard input")
    return parse_hostfile(read_text(Path(hostfile)), hostfile)


def nodes_report(cluster: Cluster, nodes: tuple[Node, ...]) -> dict[str, Any]:
    """Return what `--json` prints. Of the environment only the names: values may be secrets, and output is pasted."""
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
        cells = (node.name, ssh_text(node.ssh), node.data_address, str(node.gpus), node.paths.python)
        table.add_row(*(Text(cell) for cell in cells))  # Text: a path may hold what rich takes for markup
    console = out()
    if not console.is_terminal:
        console.width = max(console.width, 4096)
        console.width = console.measure(table).maximum
    console.print(table)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
