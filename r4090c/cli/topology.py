"""`r4090c topology`: show how the nodes are built: NUMA nodes, bridges, GPUs and network cards, and who is near whom."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from r4090c.cli.common import (
    ask_or_replay,
    choose_nodes,
    cluster_option,
    err,
    json_option,
    nodes_option,
    on_stdout,
    pasteable,
    print_json,
    tell_error,
)
from r4090c.errors import Exit, UsageError

if TYPE_CHECKING:
    from netcheck.raw import Raw
    from netcheck.topology_drawing import Card, Picture
    from r4090c.model import Cluster, Node, NodeFacts

WIDTH_MAX = 120
"""Columns beyond which a drawing only gets emptier."""


@click.command("topology")
@cluster_option
@nodes_option
@json_option
@click.option(
    "--from",
    "bundle",
    metavar="BUNDLE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the nodes of a bundle of preflight or facts --save, offline.",
)
@click.option(
    "--svg",
    "svg_file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also draw all kinds of nodes in one SVG file.",
)
@click.pass_context
def command(
    ctx: click.Context, cluster_file: str | None, nodes: str | None, as_json: bool, bundle: Path | None, svg_file: Path | None
) -> None:
    """Show how the nodes are built: NUMA nodes, host bridges, switches, GPUs, network cards, and how near they are.

    Nodes that are alike are drawn once. Links are those of card and slot, not of an idle link. Where nvidia-smi and sysfs
    contradict each other it is told, with which of them is used.

    \b
    Examples:
      r4090c topology
      r4090c topology --nodes node01 --svg node01.svg
      r4090c preflight --save bundle.tar.gz ; r4090c topology --from bundle.tar.gz
      r4090c topology --json | jq '.kinds[].ring'

    \b
    Exit codes: 0 at least one node was read (the others are named on stderr);
      2 FILE cannot be written; 3 no node could be read.
    """
    from netcheck.raw import parse_raw
    from netcheck.topology_drawing import kinds, picture_of, svg, text

    if bundle is not None and cluster_file is not None:
        raise UsageError(
            "--from", "given together with --cluster", "one of them", f"r4090c topology --from {shlex.quote(str(bundle))}"
        )
    if svg_file is not None and svg_file.exists() and not svg_file.is_file():
        raise UsageError("--svg", f"{svg_file} is no file", "the name of a file", f"r4090c topology --svg {svg_file.name}.svg")
    cluster, raw = ask_or_replay(cluster_file, nodes, bundle)
    chosen = [node for node in choose_nodes(cluster, nodes) if node.name in raw.reach]
    facts = parse_raw(raw, cluster)
    silent = _not_read(raw, chosen, facts)
    read = [node for node in chosen if node.name not in silent]
    found = kinds([picture_of(node, cluster, facts[node.name]) for node in read], cluster.expect.memory_tolerance)
    document = _document(cluster, raw, found, silent) if as_json else None
    width = min(WIDTH_MAX, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 80
    told = on_stdout(
        lambda: print_json(document) if as_json else click.echo(text(found, width), nl=False), "r4090c topology --svg FILE"
    )
    for name, (reason, remedy) in silent.items():
        click.echo(f"{name} could not be read: {reason}" + (f"\n  next: {pasteable(remedy)}" if remedy else ""), err=True)
    code = told if read else Exit.UNKNOWN
    if svg_file is not None and found:  # after the text was shown: a file that cannot be written must not lose it
        from r4090c.files import write_whole

        try:
            write_whole(svg_file, svg(found).encode("utf-8", "replace"))
            err().print(f"drawn in {svg_file}", markup=False)
        except UsageError as error:
            tell_error(error)
            code = code or error.exit_code
    ctx.exit(int(code))


def _not_read(raw: Raw, nodes: Sequence[Node], facts: dict[str, NodeFacts]) -> dict[str, tuple[str, str]]:
    """Return node -> (why nothing is known of how it is built, the next command)."""
    found = {}
    for node in nodes:
        reach, one = raw.reach[node.name], facts[node.name]
        if reach["verdict"] != "ok":
            found[node.name] = (f"{reach['verdict']}: {reach['observed']}", reach["next_command"])
        elif not (one.cpus.known or one.pci.known or one.gpus.known):
            found[node.name] = (one.cpus.error or "no answer", f"r4090c facts --nodes {node.name}")
    return found


# --------------------------------------------------------------------------- JSON


def _document(cluster: Cluster, raw: Raw, found: Sequence[Picture], silent: dict[str, tuple[str, str]]) -> dict[str, Any]:
    return {
        "schema": "r4090c.topology/1",
        "cluster": cluster.name,
        "started_at": raw.started_at,
        "kinds": [_kind(picture) for picture in found],
        "not_read": {name: reason for name, (reason, _) in silent.items()},
    }


def _kind(picture: Picture) -> dict[str, Any]:
    """Return the JSON of one kind of node. `links`: pair -> class, null = not known."""
    from netcheck.topology_drawing import class_pairs

    numas = [
        {
            "index": numa.index,
            "cpus": list(numa.cpus),
            "memory_mib": numa.memory_mib,
            "gpus": [_card(card) for card in numa.cards if card.index is not None],
            "nics": [_card(card) for card in numa.cards if card.index is None],
        }
        for numa in picture.numas
    ]
    shares = [
        {
            "kind": share.kind,
            "at": share.at,
            "uplink_assumed": share.uplink.text if share.uplink is not None else None,
            "gbyte_s": {name: {"alone": alone, "all_at_once": all_} for name, (alone, all_) in share.each_gbyte_s.items()},
        }
        for share in picture.shares
    ]
    contradictions = [
        {"about": one.about, "said": dict(one.said), "used": one.used, "why": one.why} for one in picture.disagreements
    ]
    return {
        "nodes": list(picture.nodes),
        "processor": picture.processor,
        "numa": numas,
        "links": class_pairs(picture.topology),
        "shared": shares,
        "disagreements": contradictions,
        "ring": list(picture.order),
        "not_read": list(picture.missing),
    }


def _card(card: Card) -> dict[str, Any]:
    link = card.link
    return {
        **({"index": card.index} if card.index is not None else {"name": card.key, "data_network": card.data}),
        "what": ", ".join(card.words),
        "pci": card.pci or None,
        "host_bridge": card.root or None,
        "bridges": list(card.upstream),
        "pcie_gen_max": link.gen if link else None,
        "pcie_width": link.width if link else None,
        "pcie_width_max": link.width_max if link else None,
        "pcie_gbyte_s": link.rate_gbyte_s if link else None,
    }
