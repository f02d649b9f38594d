"""`r4090c launch`: train a recipe or the user's own script on the cluster, and follow it."""

from __future__ import annotations

import errno
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
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
    out,
    pasteable,
    print_json,
    remember,
    styled,
    tell_error,
)
from r4090c.cli.follow import follow_run, options_of, policy_of, restart_options
from r4090c.errors import Exit, UsageError

if TYPE_CHECKING:
    from launch.forecast import Forecast
    from launch.plan import Hang, Plan


@click.command("launch", context_settings={"ignore_unknown_options": False})
@click.argument("target", default="")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@cluster_option
@nodes_option
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a key of the recipe, e.g. --set steps=20 --set optimizer.lr=1e-3.",
)
@click.option(
    "--nproc-per-node", "nproc", type=click.IntRange(1, 64), help="Ranks on each node [default: its GPUs; 1 without GPUs]."
)
@click.option("--env", "env", multiple=True, metavar="NAME=VALUE", help="Set a variable for every rank; wins over everything.")
@click.option(
    "--code",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="Folder to sync for your own script [default: its folder].",
)
@click.option(
    "--resume",
    is_flag=False,
    flag_value="",
    metavar="[RUN]",
    help="Continue from the last complete checkpoint of RUN [default: the recipe's last run].",
)
@click.option("--profile", is_flag=True, help="Trace some steps, and tell what share of the communication is hidden (recipes).")
@click.option("--detach", is_flag=True, help="Return once the ranks are started; a process of its own supervises the run.")
@restart_options
@click.option("--queue", is_flag=True, help="Wait for GPUs that another run holds, instead of being refused.")
@click.option(
    "--hang-after",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="End an attempt when a rank makes no step for so long, or 10 × its median step [default: 120; 0: never].",
)
@click.option("--dry-run", is_flag=True, help="Print the exact argv, environment and CPU set of every rank; start nothing.")
@click.option("--no-gate", is_flag=True, help="Launch although the quick preflight says the nodes are not fit.")
@click.option("--anyway", is_flag=True, help="Launch although the plan says that it does not fit, or is pointless.")
@click.option("--no-affinity", is_flag=True, help="Bind no rank to CPUs or memory, and leave the GPUs in PCI order.")
@json_option
def command(
    target: str,
    args: tuple[str, ...],
    cluster_file: str | None,
    nodes: str | None,
    sets: tuple[str, ...],
    nproc: int | None,
    env: tuple[str, ...],
    code: Path | None,
    resume: str | None,
    profile: bool,
    detach: bool,
    restart: bool | None,
    node_wait: float | None,
    attempts: int | None,
    queue: bool,
    hang_after: float | None,
    dry_run: bool,
    no_gate: bool,
    anyway: bool,
    no_affinity: bool,
    as_json: bool,
) -> int:
    """Train TARGET (a recipe's name, a recipe .yaml, or your own script .py) on the nodes; --resume RUN needs none.

    Arguments after -- go to the script.

    \b
    Examples:
      r4090c launch tiny
      r4090c launch tiny --nodes 2 --set steps=100
      r4090c launch tiny --resume                                    (its last run)
      r4090c launch --resume tiny-20260131-120000-a1b2 --set steps=100
      r4090c launch ./my_script.py --nodes node01,node03 -- --epochs 3
      r4090c launch llama13b --detach --queue
      r4090c launch tiny --dry-run
    """
    from launch.attempts import Attempts
    from launch.env import is_secret
    from launch.recipe import is_script
    from launch.run import Wish, dry_plan, start
    from launch.supervise import NOBODY_S, PATIENT_S, who_i_am
    from r4090c.remote import Fleet

    if not target and not resume:
        raise UsageError("TARGET", "none", "a recipe, a script, or --resume RUN", "r4090c recipes")
    if profile:
        if is_script(target):
            raise UsageError("--profile", f"{target} is a script of your own", "a recipe", "torch.profiler in your script")
        args = (*args, "--profile")
    cluster = load(cluster_file)
    chosen = choose_nodes(cluster, nodes, spares=False)
    named = nodes is not None
    wish = Wish(
        target,
        sets,
        chosen,
        named,
        nproc,
        args,
        variables(env),
        code,
        resume,
        not no_gate,
        affinity=not no_affinity,
        anyway=anyway,
        queue=queue,
        hang=_hang(hang_after),
        policy=options_of(restart, node_wait, attempts),
    )
    restarts = not is_script(target) if restart is None else restart
    if detach and restart and is_script(target):
        expected = "a recipe, or a launch that stays (in tmux, with nohup): only that has the script"
        raise UsageError("--detach --restart", f"{target} is a script of your own", expected)
    console = err()
    began = time.time()
    with Fleet(cluster.nodes) as fleet:
        if dry_run:
            plan, foreseen, refused = dry_plan(fleet, cluster, wish)
            tell_doubts(plan)
            _show_plan(plan, foreseen, as_json)
            if refused is not None:
                tell_error(refused)
                return refused.exit_code
            return Exit.OK

        def say(text: str) -> None:
            console.print(text, style="dim", markup=False)

        def announce(plan: Plan) -> None:
            from r4090c.store import record_run

            tell_doubts(plan)
            names = [node.name for node in plan.nodes]
            tell_resting(cluster.name, names)
            remember(record_run, plan.run_id, cluster.name, plan.recipe, names, plan.run_dir)
            which = f", attempt {plan.attempt}" if plan.attempt > 1 else ""
            console.print(f"run [bold]{plan.run_id}[/bold]{which}  {plan.run_dir}", soft_wrap=True)

        if detach:
            logs = _log_folder()  # before anything starts
            supervisor = start(fleet, cluster, wish, say, announce)
            plan = supervisor.plan
            log = logs / f"{plan.run_id}.log"
            try:
                supervise_apart(plan.run_id, supervisor.me["id"], log, cluster.file, restarts, node_wait, attempts)
            except BaseException:  # before anything is printed: from here on somebody follows it, or nothing runs
                supervisor.stop("the controller (nobody would have supervised it)")
                raise
            if as_json:
                print_json({"run_id": plan.run_id, "run_dir": plan.run_dir, "nodes": supervisor.names, "state": "running"})
            else:
                click.echo(plan.run_id)
            secret = sorted(name for name, value in (wish.env or {}).items() if is_secret(name, value))
            if restarts and secret:
                told = f"--env {', '.join(secret)}: secret, kept nowhere, so the run is not started again; cluster.yaml's env is"
                click.echo(f"{styled('warning:', fg='yellow')} {told}", err=True)
            console.print(f"detached; supervised by a process of its own: {log}", soft_wrap=True, markup=False)
            console.print(pasteable(f"  follow with: r4090c attach {plan.run_id}"), soft_wrap=True, markup=False)
            return Exit.OK
        me, nobody_s = who_i_am(), PATIENT_S if restarts else NOBODY_S
        history = Attempts(fleet, cluster, wish, say, policy_of(node_wait, attempts), me)
        result, ended = follow_run(
            lambda: start(fleet, cluster, wish, say, announce, me, nobody_s),
            lambda again: start(fleet, cluster, again, say, history.announcing(announce), me, nobody_s),
            history if restarts else None,
            began,
            as_json,
        )
        if as_json:
            print_json(result)
        return ended


def tell_doubts(plan: Plan) -> None:
    """Print on stderr what is doubtful about the variables that people set themselves; they win all the same."""
    for text in plan.warnings:
        click.echo(f"{styled('warning:', fg='yellow')} {pasteable(text)}", err=True)


def tell_resting(cluster: str, names: Sequence[str]) -> None:
    """Warn of nodes that failed a run lately; who names them, or has no others, takes them all the same."""
    from r4090c.store import resting_nodes

    def warn() -> None:
        for name, why in resting_nodes(cluster).items():
            if name in names:
                told = f"{name} failed a run lately: {why}"
                click.echo(f"{styled('warning:', fg='yellow')} {told}", err=True)

    remember(warn)


def _hang(after_s: float | None) -> Hang | None:
    """Return what `--hang-after` says: None = the default, 0 = never."""
    from launch.plan import HANG

    if after_s is None:
        return HANG
    if not math.isfinite(after_s):
        raise UsageError(f"--hang-after {after_s}", "no number of seconds", "seconds, 0 = never")
    return replace(HANG, floor_s=after_s, start_s=max(HANG.start_s, after_s)) if after_s else None


def _log_folder() -> Path:
    """Return the folder of the supervisors' logs, made. Raises UsageError when it cannot be had."""
    from r4090c.store import state_folder

    folder = state_folder() / "supervisors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        told = f"the supervisor's log cannot be written there: {error.strerror}"
        raise UsageError(str(folder), told, "a writable folder", "export R4090C_STATE=FOLDER") from None
    return folder


def supervise_apart(
    run_id: str, heir_of: str, log: Path, cluster_file: str, restarts: bool, node_wait: float | None, attempts: int | None
) -> None:
    """Start a process that supervises a run when nobody follows it, and writes into `log`. It ends with the run."""
    argv = [
        sys.executable,
        "-m",
        "r4090c",
        "attach",
        run_id,
        "--successor",
        heir_of,
        "--cluster",
        str(Path(cluster_file).resolve()),
    ]
    argv += [] if restarts else ["--no-restart"]
    argv += [] if node_wait is None else ["--node-wait", str(node_wait)]
    argv += [] if attempts is None else ["--attempts", str(attempts)]
    with log.open("ab") as output:
        subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, cwd="/")


def variables(env: tuple[str, ...]) -> dict[str, str]:
    """Return the `--env` variables. Raises UsageError for what is not NAME=VALUE."""
    found = {}
    for text in env:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"--env {name}", "not NAME=VALUE", "a variable like --env NCCL_DEBUG=INFO")
        found[name] = value
    return found


def _show_plan(plan: Plan, foreseen: Forecast | None, as_json: bool) -> None:
    from launch.plan import plan_json
    from r4090c.cli.plan_view import show_ranks, show_summary

    told = plan_json(plan)
    if as_json:
        print_json(told)
        return
    console = out()
    console.print(
        f"run {plan.run_id} in {plan.run_dir}: {plan.world_size} ranks on {len(plan.nodes)} nodes "
        "(dry run: nothing was started; ports are examples)",
        soft_wrap=True,
    )
    if foreseen is not None:
        show_summary(console, foreseen)
    show_ranks(console, told["nodes"])
