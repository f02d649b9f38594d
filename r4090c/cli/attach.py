"""`r4090c attach`: follow a run that goes on, and supervise it when nobody else does."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import click

from r4090c.cli.common import cluster_option, err, json_option, load, print_json
from r4090c.cli.follow import Onlooker, follow_run, patiently, policy_of, restart_options, told_in_options
from r4090c.errors import Exit, UsageError

if TYPE_CHECKING:
    from launch.jobs import Run
    from launch.supervise import Supervisor


@click.command("attach")
@click.argument("run_id", metavar="RUN")
@restart_options
@click.option("--successor", metavar="ID", hidden=True, help="The launch that started RUN hands it over (launch --detach).")
@cluster_option
@json_option
def command(
    run_id: str,
    restart: bool | None,
    node_wait: float | None,
    attempts: int | None,
    successor: str | None,
    cluster_file: str | None,
    as_json: bool,
) -> int:
    """Follow RUN until it ends. Where its supervisor is gone (its terminal was closed, its machine rebooted), take over.

    Ctrl-C leaves: the run goes on. While another supervises the run, this one only looks on, and takes over when that is gone.

    \b
    Example:
      r4090c attach llama13b-20260131-120000-a1b2
    """
    from launch.attempts import Attempts, wish_of
    from launch.jobs import find_run
    from launch.plan import plan_from
    from launch.run import start
    from launch.supervise import PATIENT_S, Supervisor, who_i_am
    from r4090c.remote import Fleet

    cluster = load(cluster_file)
    console, began = err(), time.time()

    def say(text: str) -> None:
        console.print(text, style="dim", markup=False)

    with Fleet(cluster.nodes) as fleet:

        def find() -> Run:
            return find_run(fleet, cluster, run_id)

        run = patiently(find, say, PATIENT_S if successor else 0.0)
        waited = False
        while run.state == "waiting" and not successor:
            if not waited:
                say(f"between two attempts: {run.cause}")
                waited = True
            time.sleep(1.0)
            run = patiently(find, say, math.inf)
        if run.state != "running" and (not successor or run.state in ("done", "stopped")):
            again = f"r4090c launch --resume {run.id}" if run.steps else f"r4090c logs {run.id}"
            told = f"has ended: {run.state}" + (f": {run.cause}" if run.cause else "")
            raise UsageError(f"run {run.id}", told, "a run that goes on", again)
        missing = [name for name in run.nodes if name not in fleet.nodes]
        if missing:
            raise UsageError(f"run {run.id}", f"{', '.join(missing)} is not in {cluster.file}", "the cluster it runs on")
        plan = plan_from(run.plan)
        asked, (told_restart, told_wait, told_attempts) = restart, told_in_options(plan.options)
        restart = told_restart if restart is None else restart
        node_wait = told_wait if node_wait is None else node_wait
        attempts = told_attempts if attempts is None else attempts
        restarts = plan.steps is not None and restart is not False
        if asked and plan.steps is None:
            raise UsageError("--restart", f"run {run.id} is of a script, which is not kept here", "the launch that started it")
        me, wish = who_i_am(successor), wish_of(plan, [fleet.nodes[name] for name in run.nodes])

        def attached(run: Run) -> Supervisor:
            return Supervisor(fleet, plan_from(run.plan), None, me=me, nobody_s=math.inf)

        def begin() -> Supervisor:
            console.print(f"run [bold]{plan.run_id}[/bold]  {plan.run_dir}", soft_wrap=True)
            return Supervisor(fleet, plan, None, me=me, nobody_s=math.inf, successor=successor is not None)

        history = Attempts(fleet, cluster, wish, say, policy_of(node_wait, attempts), me)
        announce = history.announcing(lambda plan: None)
        result, code = follow_run(
            begin,
            lambda again: start(fleet, cluster, again, say, announce, me=me, nobody_s=math.inf),
            history if restarts else None,
            began,
            as_json,
            leaves=True,
            onlooker=Onlooker(lambda: patiently(find, say, math.inf), attached),
        )
    if as_json:
        print_json(result)
    return code or Exit.OK
