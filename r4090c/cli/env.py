"""`r4090c env`: show the environment that the ranks of a run get, with the reason of each variable."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import click

from r4090c.cli.common import (
    ask_or_replay,
    choose_nodes,
    cluster_option,
    json_option,
    nodes_option,
    on_stdout,
    pasteable,
    print_json,
    styled,
)
from r4090c.errors import CouldNotTell, Exit, UsageError

if TYPE_CHECKING:
    from launch.env_lint import Doubt
    from netcheck.rank_env import Var
    from netcheck.raw import Raw
    from r4090c.model import Cluster, Node, NodeFacts, P2pProof, PortTest

SCHEMA = "r4090c.env/1"
OF_A_RUN = ("PYTHONPATH", "R4090C_RUN_DIR")
"""Variables that depend on the run: its code, its folder."""


@dataclass(frozen=True, slots=True)
class Known:
    """Of which nodes, and what is known of them: facts, and what measurements showed."""

    cluster: Cluster
    nodes: tuple[Node, ...]
    facts: Mapping[str, NodeFacts]
    p2p: Mapping[str, P2pProof]
    port_tests: Mapping[str, Mapping[str, PortTest]]


@dataclass(frozen=True, slots=True)
class Shown:
    """What is told: the variables that all nodes share, each node's own, and those of single ranks (by local rank)."""

    common: Mapping[str, Var]
    own: Mapping[str, Mapping[str, Var]]
    ranks: Mapping[str, Sequence[Mapping[str, Var]]]
    doubts: tuple[Doubt, ...]


@click.command("env")
@cluster_option
@nodes_option
@click.option(
    "--node", metavar="NAME", help="All that the ranks of this node get [default: what all nodes share, then each one's own]."
)
@click.option(
    "--env", "env", multiple=True, metavar="NAME=VALUE", help="As for launch: what it would change, and whether it is wise."
)
@click.option("--explain", is_flag=True, help="Tell the reason and the origin of every variable.")
@click.option(
    "--from",
    "bundle",
    metavar="BUNDLE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="From the facts and measurements of a bundle (preflight --save), offline.",
)
@json_option
def command(
    cluster_file: str | None,
    nodes: str | None,
    node: str | None,
    env: tuple[str, ...],
    explain: bool,
    bundle: Path | None,
    as_json: bool,
) -> int:
    """Show the environment of the ranks of a run: NCCL, gloo, CUDA, OpenMP, and what cluster.yaml and --env set.

    Lines for a shell on stdout; doubts about variables that somebody set on stderr, each with what to do. It depends on which
    nodes take part (--nodes): NCCL takes one transport for all of them. PYTHONPATH and R4090C_RUN_DIR are left out: they are a
    run's own. Values of secrets are never shown.

    \b
    Examples:
      r4090c env --explain
      r4090c env --node node02 --explain
      r4090c env --nodes node01,node02 --env NCCL_SOCKET_IFNAME=^docker0
      r4090c env --from preflight.tar.gz --json
      source <(r4090c env --node node01)        run nccl-tests by hand as training would

    \b
    Exit codes: 0 told, doubts or not; 2 wrong usage; 3 a node did not answer (the others are told as a run without it).
    """
    from launch.env import environments, layers, visible_devices
    from launch.env_lint import lint
    from netcheck.rank_env import computed_environment
    from r4090c.cli.launch import variables

    if bundle is not None and cluster_file is not None:
        raise UsageError(
            "--from", "given together with --cluster", "one of them", f"r4090c env --from {shlex.quote(str(bundle))}"
        )
    user = variables(env)
    cluster, raw = ask_or_replay(cluster_file, nodes, bundle)
    chosen = choose_nodes(cluster, nodes, spares=False)
    if bundle is not None and nodes is None:
        chosen = tuple(one for one in chosen if one.name in raw.reach)  # a bundle may be of some nodes only
    if node is not None and node not in [one.name for one in chosen]:
        names = ", ".join(one.name for one in chosen[:8])
        raise UsageError("--node", f"{node} is not among the nodes of the run", f"one of {names}", "r4090c nodes")
    known, silent = _known(cluster, raw, chosen, from_bundle=bundle is not None)
    if node in silent or not known.nodes:
        name = node or ", ".join(silent)
        raise CouldNotTell(
            name, silent.get(name, "no node answered"), "facts of the node", f"r4090c facts --nodes {node or name}"
        )
    computed = computed_environment(known.cluster, known.nodes, known.facts, known.p2p, known.port_tests)
    envs = environments(known.cluster, known.nodes, computed, user)
    doubts = lint(known.cluster, known.nodes, known.facts, envs, computed)
    places = {one.name: visible_devices(envs[one.name]) for one in known.nodes}
    planned = _planned(known, user, places)
    common, own = layers({name: shared for name, (shared, _) in planned.items()})
    shown = Shown(common, own, {name: ranks for name, (_, ranks) in planned.items()}, doubts)
    _warn(shown, node)
    told = on_stdout(lambda: _tell(known, shown, node, explain, as_json), "r4090c env --help")
    return Exit.UNKNOWN if silent else told


# --------------------------------------------------------------------------- what is known


def _known(cluster: Cluster, raw: Raw, chosen: Sequence[Node], *, from_bundle: bool) -> tuple[Known, dict[str, str]]:
    """Return what is known of the nodes that answered, and node -> why it did not."""
    from netcheck.raw import parse_raw

    facts = parse_raw(raw, cluster)
    silent = {}
    for node in chosen:
        if node.name not in raw.reach:
            silent[node.name] = "is not in the bundle"
        elif raw.reach[node.name]["verdict"] != "ok":
            silent[node.name] = f"did not answer ({raw.reach[node.name]['verdict']}): {raw.reach[node.name]['observed']}"
    for name, why in silent.items():
        click.echo(f"{styled('warning:', fg='yellow')} {name} {why}; told is a run without it", err=True)
    nodes = tuple(node for node in chosen if node.name not in silent)
    if from_bundle:
        return _known_from_bundle(cluster, raw, facts, [node.name for node in nodes]), silent
    from launch.run import known_port_tests, known_proofs

    return Known(cluster, nodes, facts, known_proofs(cluster, nodes, facts), known_port_tests(cluster)), silent


def _known_from_bundle(cluster: Cluster, raw: Raw, facts: Mapping[str, NodeFacts], names: Sequence[str]) -> Known:
    """Return what a bundle tells of the nodes `names`; tell on stderr what it does not hold, or what is not understood."""
    from launch.measured import known_from
    from netcheck.bundle import without_stand_ins

    cluster, dropped = without_stand_ins(cluster)
    if dropped:
        told = ", ".join(dropped[:6]) + (f" and {len(dropped) - 6} more" if len(dropped) > 6 else "")
        click.echo(f"a bundle holds no values of cluster.yaml's variables; left out: {told}", err=True)
    known, doubts = known_from(raw, cluster, facts, names)
    for text in doubts:
        click.echo(f"{styled('warning:', fg='yellow')} {text}", err=True)
    return Known(cluster, tuple(node for node in cluster.nodes if node.name in names), facts, known.p2p, known.port_tests)


def _planned(
    known: Known, user: Mapping[str, str], places: Mapping[str, tuple[str, ...] | None]
) -> dict[str, tuple[dict[str, Var], tuple[dict[str, Var], ...]]]:
    """Return node -> (variables of all its ranks, those of each rank), as a launch plans them. Raises UsageError as it does."""
    from launch.plan import Code, Job, Ports, make_plan, ranks_on
    from launch.run import GANG_PORT_DRY, MASTER_PORT_DRY
    from r4090c.paths import RunPaths, SharedPaths

    job = Job("env", "train/main.py", (), env=user)
    job = replace(job, nproc=min(ranks_on(node, job, places[node.name]) for node in known.nodes))
    first = known.nodes[0].paths
    plan = make_plan(
        known.cluster,
        known.nodes,
        known.facts,
        job,
        run=RunPaths(PurePosixPath(first.runs) / "RUN"),
        attempt=1,
        code=Code(str(SharedPaths(PurePosixPath(first.shared)).code_tree("0" * 64)), "0" * 64),
        ports=Ports(MASTER_PORT_DRY, GANG_PORT_DRY),
        created_at="",
        p2p=known.p2p,
        port_tests=known.port_tests,
    )
    found = {}
    for node in plan.nodes:
        shared = {name: var for name, var in node.env.items() if name not in OF_A_RUN}
        every = [rank.env for rank in node.ranks]
        alike = {name for name, var in every[0].items() if all(env.get(name) == var for env in every)}
        shared |= {name: every[0][name] for name in every[0] if name in alike}
        found[node.name] = (shared, tuple({name: var for name, var in env.items() if name not in alike} for env in every))
    return found


# --------------------------------------------------------------------------- telling


def _warn(shown: Shown, node: str | None) -> None:
    for doubt in shown.doubts:
        if node is None or node in doubt.nodes:
            click.echo(f"{styled('warning:', fg='yellow')} {pasteable(doubt.text)}", err=True)


def _tell(known: Known, shown: Shown, node: str | None, explain: bool, as_json: bool) -> None:
    names = [one.name for one in known.nodes]
    if as_json:
        wanted = names if node is None else [node]
        print_json(
            {
                "schema": SCHEMA,
                "cluster": known.cluster.name,
                "nodes": names,
                "common": _public(shown.common),
                "own": {name: _public(shown.own[name]) for name in wanted},
                "ranks": {name: [_public(env) for env in shown.ranks[name]] for name in wanted},
                "warnings": [asdict(doubt) for doubt in shown.doubts if node is None or node in doubt.nodes],
            }
        )
        return
    if node is not None:
        lines = [*_lines({**shown.common, **shown.own[node]}, explain), *_rank_lines(shown.ranks[node], explain)]
    elif len(names) == 1:
        lines = [*_lines(shown.common, explain), *_rank_lines(shown.ranks[names[0]], explain)]
    else:
        lines = [f"# all of {len(names)} nodes", *_lines(shown.common, explain)]
        for name in names:
            own = [*_lines(shown.own[name], explain), *_rank_lines(shown.ranks[name], explain)]
            lines += ["", f"# {name}{'' if own else ': nothing of its own'}", *own]
    click.echo("\n".join(lines))


def _public(env: Mapping[str, Var]) -> dict[str, dict[str, str]]:
    from launch.env import shown

    return {name: {"value": shown(name, var.value), "reason": var.reason, "origin": var.origin} for name, var in env.items()}


def _lines(env: Mapping[str, Var], explain: bool) -> Iterator[str]:
    """Yield a line a variable that a shell takes; a secret is a comment."""
    from launch.env import is_secret

    for name, var in sorted(env.items()):
        why = f"   # {_one_line(var.reason)} [{var.origin}]" if explain else ""
        if is_secret(name, var.value):
            yield f"# {name}: a secret, not shown{why}"
        else:
            yield f"export {name}={_quoted(var.value)}{why}"


def _quoted(value: str) -> str:
    """Return `value` as bash takes it, in one line; what a terminal might take for orders is spelt out ($'\\x1b')."""
    if value.isprintable():
        return shlex.quote(value)
    spelt = (sign if sign.isprintable() else "".join(f"\\x{byte:02x}" for byte in os.fsencode(sign)) for sign in value)
    return "$'" + "".join("\\" + sign if sign in "\\'" else sign for sign in spelt) + "'"


def _rank_lines(ranks: Sequence[Mapping[str, Var]], explain: bool) -> Iterator[str]:
    """Yield, as comments, what only single ranks have."""
    for local_rank, env in enumerate(ranks):
        for line in _lines(env, explain):
            yield f"# local rank {local_rank}: {_one_line(line)}"


def _one_line(text: str) -> str:
    """Return `text` without line breaks, which would end a comment, and other signs that a terminal takes for orders."""
    return "".join(sign if sign.isprintable() else " " for sign in text)
