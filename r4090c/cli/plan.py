"""`r4090c plan`: what a recipe needs, whether it fits, how fast it should be, and what else would: before anything runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from r4090c.cli.common import (
    choose_nodes,
    cluster_option,
    json_option,
    load,
    nodes_option,
    on_stdout,
    out,
    pasteable,
    print_json,
    tell_error,
)
from r4090c.errors import CouldNotTell, UsageError

if TYPE_CHECKING:
    from launch.alternatives import Alternative
    from launch.forecast import Forecast, Point
    from launch.measured import Known
    from launch.perf import Help
    from launch.plan import Plan
    from launch.site import Site
    from r4090c.model import Cluster, Node, NodeFacts

SCHEMA = "r4090c.plan-answer/1"


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asked for."""

    target: str
    sets: tuple[str, ...]
    nodes: str | None
    nproc: int | None
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Place:
    """Where it would run: the site and, where there are facts, the plan of every rank; `notes`: what was taken for granted."""

    site: Site
    plan: Plan | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """All there is to tell; commands beside what they plan. `elsewhere`: fewer nodes that do as much.

    `untrainable`: what of the recipe this version plans, but does not train.
    """

    forecast: Forecast
    place: Place
    alternatives: Sequence[tuple[Alternative, str]]
    elsewhere: tuple[Point, str] | None
    untrainable: tuple[str, ...]


@click.command("plan")
@click.argument("target", metavar="RECIPE")
@cluster_option
@nodes_option
@click.option(
    "--nproc-per-node", "nproc", type=click.IntRange(1, 64), help="Ranks on each node [default: its GPUs; 1 without GPUs]."
)
@click.option(
    "--assume",
    metavar="SITE",
    help="Plan for machines that are not there: nodes × GPUs × card @ network, e.g. 4x8x4090@100gbe-roce.",
)
@click.option(
    "--from",
    "bundle",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Plan from a bundle (`r4090c facts --save`, `preflight --save`), offline.",
)
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Change a key of the recipe, e.g. --set method=lora.")
@click.option("--env", "env", multiple=True, metavar="NAME=VALUE", help="A variable for every rank, as `launch` takes it.")
@click.option("--ranks", is_flag=True, help="Show argv, environment and CPU set of every rank, each with its reason.")
@json_option
def command(
    target: str,
    cluster_file: str | None,
    nodes: str | None,
    nproc: int | None,
    assume: str | None,
    bundle: Path | None,
    sets: tuple[str, ...],
    env: tuple[str, ...],
    ranks: bool,
    as_json: bool,
) -> int:
    """Tell what RECIPE (a name, or a .yaml file) needs: memory, traffic, time; whether it fits; what would be better.

    Facts are read from the nodes, from a bundle, or assumed; nothing is started or changed.

    \b
    Examples:
      r4090c plan llama13b
      r4090c plan llama13b --assume 2x8x4090@100gbe-roce
      r4090c plan llama13b --assume 2x8x4090@100gbe-roce --set method=lora
      r4090c plan llama7b --nodes 2 --ranks
      r4090c plan llama7b --from facts.tar.gz --json

    \b
    Exit codes: 0 it fits; 1 it does not fit, or is pointless (the answer is printed all the same); 2 wrong usage or recipe;
    3 could not tell (a node did not answer; nobody told the memory of nodes whose ranks are on CPUs).
    """
    from launch.forecast import fewer_nodes
    from launch.planning import foresee, other_ways
    from launch.recipe import is_script, load_recipe, untrainable

    if is_script(target):
        own = "a script of your own: nobody knows what it needs"
        raise UsageError(target, own, "a recipe", f"r4090c launch {target} --dry-run")
    _refuse_contradictions(assume, bundle, cluster_file, env, ranks)
    asked = Asked(target, sets, nodes, nproc, _variables(env))
    recipe = load_recipe(target, sets)
    if assume is not None:
        place = Place(_assumed(assume, nodes, nproc))
    elif bundle is not None:
        place = _from_bundle(bundle, asked)
    else:
        place = _from_nodes(load(cluster_file), asked)
    _known_memory(place.site, target, assume)
    one = foresee(recipe, place.site)
    found = [(other, _command(asked, assume, bundle, other.sets)) for other in other_ways(recipe, one)]
    fewer = fewer_nodes(one)
    elsewhere = None
    if fewer is not None:
        elsewhere = (fewer, _command(replace(asked, nodes=_first(one, fewer.nodes, assume)), assume, bundle, ()))
    mend = elsewhere[1] if elsewhere else found[0][1] if found else "r4090c recipes"
    answer = Answer(one, place, found, elsewhere, untrainable(recipe))
    told = on_stdout(lambda: _tell(answer, ranks, as_json), "r4090c plan --help")
    return int(told) if one.worth_it else _refused(one, mend)


def _variables(env: tuple[str, ...]) -> Mapping[str, str]:
    if not env:
        return {}
    from r4090c.cli.launch import variables

    return variables(env)


def _refuse_contradictions(
    assume: str | None, bundle: Path | None, cluster_file: str | None, env: tuple[str, ...], ranks: bool
) -> None:
    """Raise UsageError for options that cannot both be meant."""
    given = {"--assume": assume, "--from": bundle, "--cluster": cluster_file}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise UsageError(" and ".join(named), "given together", "one of them", "r4090c plan --help")
    for name, value in (("--env", env), ("--ranks", ranks)):
        if assume is not None and value:
            raise UsageError(name, "means nothing with --assume: ranks that are not there have no environment", "facts of nodes")


def _assumed(text: str, nodes: str | None, nproc: int | None) -> Site:
    """Return the assumed site, with another number of nodes or ranks a node if so asked. Raises UsageError."""
    from launch.site import assume

    site = assume(text)
    if nodes is not None:
        if not nodes.isdecimal():
            raise UsageError(f"--nodes {nodes}", "no number, and with --assume nodes have no names", "a number like --nodes 4")
        site = assume(f"{int(nodes)}x{text.strip().partition('x')[2]}")
    if nproc is not None:
        if nproc > site.ranks_per_node and site.card is not None:
            has = f"{site.name} has {site.ranks_per_node} GPUs a node"
            raise UsageError(f"--nproc-per-node {nproc}", has, f"at most {site.ranks_per_node}")
        site = replace(site, ranks_per_node=nproc)
    return site


def _known_memory(site: Site, target: str, assumed: str | None) -> None:
    """Raise CouldNotTell where nobody knows what memory there is."""
    if site.card is None and site.host_gib is None:
        mend = "r4090c facts" if assumed is None else shlex.join(["r4090c", "plan", target, "--assume", f"{assumed},ram=64gib"])
        expected = "how much a node has: ranks on CPUs live in it"
        raise CouldNotTell(f"memory of the nodes of {site.name}", "not told", expected, mend)


# --------------------------------------------------------------------------- from facts


def _from_nodes(cluster: Cluster, asked: Asked) -> Place:
    """Ask the nodes over SSH."""
    from netcheck.preflight import read_nodes
    from r4090c.cli.preflight import progress
    from r4090c.remote import Fleet

    chosen = choose_nodes(cluster, asked.nodes, spares=False)
    with progress() as say, Fleet(chosen) as fleet:
        raw, facts = read_nodes(fleet, cluster, chosen, say)
    for node in chosen:
        reach = raw.reach[node.name]
        if reach["verdict"] != "ok":
            mend = reach["next_command"] or f"r4090c facts --nodes {node.name}"
            raise CouldNotTell(node.name, f"did not answer ({reach['verdict']}): {reach['observed']}", "", mend)
    from launch.run import what_is_known

    return _place(cluster, chosen, facts, asked, what_is_known(cluster, chosen, facts))


def _from_bundle(bundle: Path, asked: Asked) -> Place:
    """Take what a bundle holds; of the variables of cluster.yaml it has the names only."""
    from launch.measured import known_from
    from netcheck.bundle import load_bundle, without_stand_ins
    from netcheck.raw import parse_raw

    cluster, raw = load_bundle(bundle)
    asked_of = tuple(node for node in cluster.nodes if node.name in raw.reach)
    chosen = choose_nodes(cluster, asked.nodes, spares=False) if asked.nodes is not None else asked_of
    missing = [node.name for node in chosen if node not in asked_of or raw.reach[node.name]["verdict"] != "ok"]
    if missing or not chosen:
        observed = f"holds no answer of {', '.join(missing) or 'any node'}"
        raise CouldNotTell(str(bundle), observed, "nodes that answered", f"r4090c facts --from {shlex.quote(str(bundle))}")
    facts = parse_raw(raw, cluster)
    names = [node.name for node in chosen]
    cluster, dropped = without_stand_ins(cluster)
    notes = [f"a bundle holds no values of variables: {', '.join(dropped)} of cluster.yaml left out"] if dropped else []
    chosen = tuple(node for node in cluster.nodes if node.name in names)
    known, doubts = known_from(raw, cluster, facts, names)
    place = _place(cluster, chosen, facts, asked, known)
    return replace(place, notes=(*notes, *doubts, *place.notes))


def _place(cluster: Cluster, chosen: Sequence[Node], facts: Mapping[str, NodeFacts], asked: Asked, known: Known) -> Place:
    """Return site and plan of the chosen nodes."""
    from launch.run import Wish, paper_plan, prepare

    wish = Wish(asked.target, asked.sets, tuple(chosen), asked.nodes is not None, asked.nproc, env=asked.env)
    plan, site = paper_plan(cluster, prepare(None, cluster, wish), facts, known)
    mute = [node.name for node in chosen if node.gpus and not facts[node.name].gpus.value]
    notes = (f"{', '.join(mute)}: no GPU was told, stock RTX 4090 taken for granted",) if mute else ()
    return Place(site, plan, notes)


# --------------------------------------------------------------------------- the answer


def _command(asked: Asked, assume: str | None, bundle: Path | None, sets: Sequence[str]) -> str:
    """Return the command that plans the recipe with `sets` at the same place."""
    from launch.planning import command_of, told_options

    where = [] if assume is None else ["--assume", assume]
    where += [] if bundle is None else ["--from", str(bundle)]
    where += [] if asked.nodes is None else ["--nodes", asked.nodes]
    where += told_options(asked.nproc, asked.env)
    return pasteable(command_of("plan", asked.target, asked.sets, sets, where))


def _first(one: Forecast, number: int, assumed: str | None) -> str:
    """Return how `--nodes` names the first nodes."""
    return str(number) if assumed is not None else ",".join(one.site.node_names[:number])


def _tell(answer: Answer, ranks: bool, as_json: bool) -> None:
    from launch.forecast import scaling, useful

    one, place = answer.forecast, answer.place
    points, best = scaling(one.training, one.site), useful(one)
    if as_json:
        print_json(_document(answer, points, best))
        return
    from r4090c.cli import plan_view as view

    console = out()
    console.width = min(console.width, view.WIDTH_MAX)
    view.show_forecast(console, one, points, best)
    if answer.untrainable:
        view.show_warning(console, f"this version plans it, but does not train: {'; '.join(answer.untrainable)}")
    if answer.elsewhere is not None:
        view.show_elsewhere(console, one, *answer.elsewhere)
    view.show_alternatives(console, answer.alternatives, worth_it=one.worth_it)
    if place.plan is not None:
        from launch.plan import plan_json
        from r4090c.cli.launch import tell_doubts

        nodes = plan_json(place.plan)["nodes"]
        (view.show_ranks if ranks else view.show_placement)(console, nodes)
        tell_doubts(place.plan)
    view.show_assumptions(console, (*place.notes, *one.prediction.assumptions))


def _document(answer: Answer, points: Sequence[Point], best: Sequence[Help]) -> dict[str, Any]:
    """Return the JSON document; the keys are API."""
    from launch.forecast import alternative_json, forecast_json, help_json, scaling_json

    one, place = answer.forecast, answer.place
    unit = one.training.unit
    told = forecast_json(one)
    told["assumptions"] = [*place.notes, *told["assumptions"]]
    plan = None
    if place.plan is not None:
        from launch.plan import plan_json

        plan = plan_json(place.plan)
    return {
        "schema": SCHEMA,
        "recipe": one.training.name,
        **told,
        "scaling": scaling_json(points, unit),
        "helps": [help_json(each, unit) for each in best],
        "alternatives": [alternative_json(other, command) for other, command in answer.alternatives],
        "untrainable": list(answer.untrainable),
        "nodes": None if plan is None else plan["nodes"],
        "environment_warnings": [] if plan is None else plan["warnings"],
    }


def _refused(one: Forecast, mend: str) -> int:
    """Tell on stderr why the run is not to be started; return the exit code."""
    from launch.forecast import refusal

    error = refusal(one, mend)
    assert error is not None
    tell_error(error)
    return int(error.exit_code)
