"""`r4090c facts`: show what is true on every node, without judging it."""

from __future__ import annotations

from collections import Counter
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
    out,
    print_json,
    tell_error,
)
from r4090c.errors import Exit, UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from netcheck.raw import Raw
    from r4090c.model import ClockFact, Cluster, CpuFact, Fact, Gpu, NetFact, Node, NodeFacts, PythonFact, RdmaPort


@click.command("facts")
@cluster_option
@nodes_option
@json_option
@click.option(
    "--save",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep every raw answer in a bundle (no secrets).",
)
@click.option(
    "--from",
    "bundle",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Show the facts of a bundle, offline.",
)
@click.pass_context
def command(
    ctx: click.Context, cluster_file: str | None, nodes: str | None, as_json: bool, save: Path | None, bundle: Path | None
) -> None:
    """Show what is true on every node: system, CPUs, memory, GPUs, network, RDMA, Python, clock.

    \b
    Examples:
      r4090c facts --nodes node[01-02] --json
      r4090c facts --save facts.tar.gz
      r4090c facts --from facts.tar.gz

    \b
    Exit codes: 0 every node answered; 2 FILE cannot be written; 3 a node did not answer (the others are shown all the same).
    """
    from netcheck.raw import parse_raw

    if bundle is not None and (save is not None or cluster_file is not None):
        raise UsageError("--from", "given together with " + ("--save" if save is not None else "--cluster"), "one of them")
    cluster, raw = ask_or_replay(cluster_file, nodes, bundle)
    chosen = [node for node in choose_nodes(cluster, nodes) if node.name in raw.reach]
    facts = parse_raw(raw, cluster)
    silent = [node for node in chosen if raw.reach[node.name]["verdict"] != "ok"]
    report = _report(cluster, raw, chosen, facts) if as_json else None
    told = on_stdout(lambda: print_json(report) if as_json else _show(cluster, raw, chosen, facts), "r4090c facts --save FILE")
    code = Exit.UNKNOWN if silent or not chosen else told
    if save is not None:  # after the facts were shown: a file that cannot be written must not lose them
        from netcheck.bundle import save_bundle

        try:
            save_bundle(save, cluster, raw)
            err().print(f"kept in {save}")
        except UsageError as error:
            tell_error(error)
            code = code or error.exit_code
    ctx.exit(int(code))


def _report(cluster: Cluster, raw: Raw, nodes: list[Node], facts: dict[str, NodeFacts]) -> dict[str, Any]:
    """Return the JSON document: each fact as {"value", "error", "absent"}, exactly one of which is not null."""
    shown = {}
    for node in nodes:
        shown[node.name] = {"reach": raw.reach[node.name], "facts": dict(_facts_of(facts[node.name]))}
    return {"schema": "r4090c.facts/1", "cluster": cluster.name, "started_at": raw.started_at, "nodes": shown}


# --------------------------------------------------------------------------- the table


def _show(cluster: Cluster, raw: Raw, nodes: list[Node], facts: dict[str, NodeFacts]) -> None:
    from rich.markup import escape

    console = out()
    table = _table(cluster, raw, nodes, facts)
    if not console.is_terminal:  # a file or a pipe has no width to fold to
        console.width = max(console.width, 4096)
        console.width = console.measure(table).maximum
    console.print(table)
    for node in nodes:
        reach = raw.reach[node.name]
        if reach["verdict"] != "ok":
            console.print(f"[red]{escape(node.name)}[/red] did not answer ({reach['verdict']}): {escape(reach['observed'])}")
            if reach["next_command"]:
                console.print(f"  next: {escape(reach['next_command'])}")
            continue
        if reach["noise"].strip():
            first = reach["noise"].strip().splitlines()[0][:100]
            console.print(f"[yellow]{escape(node.name)}[/yellow] its login shell prints: {escape(first)}")
        for name, fact in _facts_of(facts[node.name]):
            if fact.error is not None:
                console.print(f"[yellow]{escape(node.name)}[/yellow] {name} could not be read: {escape(fact.error)}")


def _facts_of(facts: NodeFacts) -> list[tuple[str, Fact[Any]]]:
    from netcheck.facts import FACTS

    return [(name, getattr(facts, name)) for name in FACTS]


def _table(cluster: Cluster, raw: Raw, nodes: list[Node], facts: dict[str, NodeFacts]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"{escape(cluster.name)}, {raw.started_at}", title_justify="left", pad_edge=False)
    for heading in ("node", "system", "CPUs", "memory", "GPUs", "data network", "RDMA", "Python", "clock"):
        table.add_column(heading, overflow="fold")
    for node in nodes:
        if raw.reach[node.name]["verdict"] == "ok":
            cells = _cells(cluster, node, facts[node.name])
        else:
            cells = [raw.reach[node.name]["verdict"], *[""] * 7]
        table.add_row(escape(node.name), *map(escape, cells))
    return table


def _cells(cluster: Cluster, node: Node, facts: NodeFacts) -> list[str]:
    """Return one row; "?" stands for what could not be read, "no <tool>" for a tool that is not installed."""

    def cell(fact: Fact[Any], text: Any) -> str:
        if fact.absent is not None:
            return f"no {fact.absent}"
        return "?" if fact.error is not None else str(text(fact.value))

    return [
        cell(facts.os, lambda os: f"{os.distribution}\n{os.kernel}"),
        cell(facts.cpus, _cpus_text),
        cell(facts.memory, lambda memory: f"{memory.total_mib / 1024:.0f} GiB\nshm {(memory.shm_total_mib or 0) / 1024:.1f} GiB"),
        cell(facts.gpus, lambda gpus: _gpus_text(gpus, node.gpus)),
        cell(facts.net, lambda net: _data_network_text(cluster, node, net)),
        cell(facts.rdma, _rdma_text),
        cell(facts.python, _python_text),
        cell(facts.clock, _clock_text),
    ]


def _cpus_text(cpus: CpuFact) -> str:
    counts = ((len(cpus.cores), "core"), (len(cpus.online), "CPU"), (cpus.sockets, "socket"), (len(cpus.numa), "NUMA node"))
    lines = [cpus.model, ", ".join(f"{number} {noun}{'' if number == 1 else 's'}" for number, noun in counts)]
    if len(cpus.allowed) < len(cpus.online):
        lines.append(f"only {len(cpus.allowed)} CPUs allowed")
    if len(cpus.online) < len(cpus.present):
        lines.append(f"{len(cpus.present) - len(cpus.online)} CPUs offline")
    return "\n".join(lines)


def _gpus_text(gpus: tuple[Gpu, ...], wanted: int) -> str:
    if not gpus:
        return f"none of {wanted}" if wanted else "none"
    names = Counter(gpu.name.removeprefix("NVIDIA ").removeprefix("GeForce ") or "?" for gpu in gpus if gpu.index >= 0)
    lines = [f"{count} × {name}" for name, count in names.items()]
    if names.total() != wanted:
        lines.append(f"{wanted} wanted")
    lines += [f"driver {driver}" for driver in sorted({gpu.driver for gpu in gpus if gpu.driver})]
    faulty = sum(bool(gpu.faults) for gpu in gpus)
    return "\n".join([*lines, f"{faulty} with faults"] if faulty else lines)


def _data_network_text(cluster: Cluster, node: Node, net: NetFact) -> str:
    """Return the interface for traffic to the peers (or why none is fit), its MTU and speed, and the peers it does not reach."""
    from netcheck.data_network import data_iface, peers_of, towards

    peers = peers_of(node, cluster)
    name, reason = data_iface(net, node, peers, loopback=cluster.network.kind == "loopback")
    lines = [] if name else [reason]
    for iface in (iface for iface in net.ifaces if iface.name == name):
        lines.append(f"{iface.name} {next((a for a in iface.addresses if ':' not in a), '')}".rstrip())
        speed = "" if iface.speed_mbit_s is None else f", {iface.speed_mbit_s / 1000:g} Gbit/s"
        lines.append(f"mtu {iface.mtu}{speed}")
    lines += [f"{len(reached)} peers over {other}" for other, reached in towards(net, peers.values()).items() if other != name]
    unreachable = sum(iface is None for iface, _ in net.routes.values())
    if unreachable:
        lines.append(f"no route to {unreachable} of {len(net.routes)} peers")
    return "\n".join(lines)


def _rdma_text(ports: tuple[RdmaPort, ...]) -> str:
    rates = {port.name: "" if port.rate_gbit_s is None else f" {port.rate_gbit_s:g} Gbit/s" for port in ports}
    return "\n".join(f"{port.name} {port.state}{rates[port.name]}" for port in ports) or "none"


def _python_text(python: PythonFact) -> str:
    packages = [f"{name} {python.packages[name]}" for name in ("torch", "deepspeed") if name in python.packages]
    return "\n".join([python.version, *(packages or ["no torch"])])


def _clock_text(clock: ClockFact) -> str:
    return f"{clock.offset_s * 1000:+.0f} ± {clock.error_bound_s * 1000:.0f} ms\n{clock.daemon or 'no time daemon'}"
