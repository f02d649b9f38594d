"""`r4090c launch`: train a recipe or the user's own script on the cluster, and follow it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from r4090c.errors import Exit, UsageError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from launch.forecast import Forecast
    from launch.plan import Plan
    from launch.supervise import Supervisor

PROFILE = "profile  "
"""Rank 0 begins with it what `--profile` is to tell (train/profiling.py)."""


@click.command("launch", context_settings={"ignore_unknown_options": False})
@click.argument("target")
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
@click.option("--detach", is_flag=True, help="Return once the ranks are started; see `r4090c jobs`.")
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
    dry_run: bool,
    no_gate: bool,
    anyway: bool,
    no_affinity: bool,
    as_json: bool,
) -> int:
    """Train TARGET (a recipe's name, a recipe .yaml, or your own script .py) on the nodes.

    Arguments after -- go to the script.

    \b
    Examples:
      r4090c launch tiny
      r4090c launch tiny --nodes 2 --set steps=100
      r4090c launch tiny --resume
      r4090c launch ./my_script.py --nodes node01,node03 -- --epochs 3
      r4090c launch tiny --dry-run
    """
    from launch.recipe import is_script
    from launch.run import Wish, dry_plan, start
    from r4090c.remote import Fleet

    if profile:
        if is_script(target):
            raise UsageError("--profile", f"{target} is a script of your own", "a recipe", "torch.profiler in your script")
        args = (*args, "--profile")
    cluster = load(cluster_file)
    chosen = choose_nodes(cluster, nodes)
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
    )
    console = err()
    began = time.time()
    with Fleet(cluster.nodes if resume is not None else chosen) as fleet:
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
            remember(record_run, plan.run_id, cluster.name, plan.recipe, names, plan.run_dir)
            console.print(f"run [bold]{plan.run_id}[/bold]  {plan.run_dir}", soft_wrap=True)

        if detach:
            supervisor = start(fleet, cluster, wish, say, announce)
            plan = supervisor.plan
            if as_json:
                print_json({"run_id": plan.run_id, "run_dir": plan.run_dir, "nodes": supervisor.names, "state": "running"})
            else:
                click.echo(plan.run_id)
            console.print(pasteable(f"detached; follow with: r4090c logs {plan.run_id} -f"), soft_wrap=True)
            return Exit.OK
        result, ended = follow_attempt(lambda: start(fleet, cluster, wish, say, announce), began, as_json)
        if as_json:
            print_json(result)
        return ended


def tell_doubts(plan: Plan) -> None:
    """Print on stderr what is doubtful about the variables that people set themselves; they win all the same."""
    for text in plan.warnings:
        click.echo(f"{styled('warning:', fg='yellow')} {pasteable(text)}", err=True)


def follow_attempt(
    begin: Callable[[], Supervisor], began: float, quiet: bool = False, *, resumable: bool = True
) -> tuple[dict[str, Any], int]:
    """Start an attempt with `begin`, follow it to its end, showing progress; return (what came of it, exit code).

    `quiet`: stdout is kept free. Ctrl-C stops every rank on every node and gives exit code 130; so does anything else that
    keeps us from following: what runs in the foreground does not go on unseen. `resumable`: say how, after Ctrl-C.
    """
    from launch.supervise import failure

    console = err()
    supervisor: Supervisor | None = None
    try:
        supervisor = begin()
        plan = supervisor.plan
        view = _Bar(plan, began) if console.is_terminal and plan.steps else _Plain(plan, began, quiet)
        with view:
            outcome = supervisor.follow(view)
    except KeyboardInterrupt:
        if supervisor is None:
            raise  # the start has cleaned up
        plan = supervisor.plan
        console.print("\ninterrupted: stopping every rank on every node …")
        stopped = supervisor.stop(f"{os.environ.get('USER') or 'the user'} (Ctrl-C)")
        told = "; nothing is left running" if not stopped.left else f"; still running: {dict(stopped.left)}"
        if stopped.unreachable:
            told = f"; {', '.join(stopped.unreachable)} did not answer: its agent ends by itself when it loses the others"
        again = pasteable(f"r4090c launch {plan.recipe} --resume {plan.run_id}")
        resume = f"\n  resume (from its last checkpoint, once it has saved one): {again}" if plan.steps and resumable else ""
        console.print(f"stopped{told}{resume}", soft_wrap=True, markup=False)
        return {"run_id": plan.run_id, "run_dir": plan.run_dir, "outcome": "stopped"}, Exit.INTERRUPTED
    except BaseException:
        if supervisor is not None:
            supervisor.stop("the controller (it could not follow any more)")
        raise
    result = {
        "run_id": plan.run_id,
        "run_dir": plan.run_dir,
        "nodes": supervisor.names,
        "outcome": outcome.outcome,
        "duration_s": round(time.time() - began, 3),
        "first_loss": view.first.get("loss"),
        "last_loss": view.last.get("loss"),
        "last_step": view.last.get("step"),
        f"{unit_of(view.last)}_per_s": view.rate(),
        "cause": None if outcome.cause is None else asdict(outcome.cause),
    }
    if outcome.outcome != "done":
        error = failure(outcome, plan.run_id)
        tell_error(error)
        return result, error.exit_code
    if view.last:
        console.print(
            f"[green]done[/green] in {time.time() - began:.1f} s: {view.last['step']} steps, "
            f"{view.change()} on {len(supervisor.names)} nodes",
            soft_wrap=True,
        )
    else:
        console.print(f"[green]done[/green] in {time.time() - began:.1f} s")
    return result, Exit.OK


def variables(env: tuple[str, ...]) -> dict[str, str]:
    """Return the `--env` variables. Raises UsageError for what is not NAME=VALUE."""
    found = {}
    for text in env:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"--env {name}", "not NAME=VALUE", "a variable like --env NCCL_DEBUG=INFO")
        found[name] = value
    return found


def number_in(line: Mapping[str, Any], name: str) -> float | None:
    """Return a number of a metrics line, None when there is none: a script of the user's own writes what it likes."""
    value = line.get(name)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def unit_of(line: Mapping[str, Any]) -> str:
    """Return what the rate of a metrics line counts."""
    return "images" if "images_per_s" in line else "tokens"


def told_in(line: Mapping[str, Any]) -> str:
    """Return loss, rate and held-out loss of a metrics line, as far as it has them."""
    unit = unit_of(line)
    loss, rate, held_out = number_in(line, "loss"), number_in(line, f"{unit}_per_s"), number_in(line, "eval_loss")
    told = [f"loss {loss:.4f}"] if loss is not None else []
    told += [f"{rate:,.0f} {unit}/s"] if rate is not None else []
    return "  ".join([*told, *([f"eval_loss {held_out:.4f}"] if held_out is not None else [])])


def told_of(event: Mapping[str, Any]) -> str:
    """Return the line that tells of an agent's event; one that ends nothing is a warning."""
    warning = "warning: " if event.get("kind") == "placement-differs" else ""
    return f"{warning}{event.get('node')}: {event.get('kind')}: {event.get('detail', '')}"


class _View:
    """Follows the metrics; knows the first, the last and the median rate."""

    def __init__(self, plan: Plan, began: float) -> None:
        self.plan, self.began = plan, began
        self._since: float | None = None
        """When the lead's agent started, by the lead's clock, which also stamps the metrics."""
        self.first: dict[str, Any] = {}
        self.last: dict[str, Any] = {}
        self._rates: list[float] = []

    def __enter__(self) -> _View:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def rate(self) -> float | None:
        """Return the median tokens/s (or images/s), the first step left out when there are others."""
        rates = sorted(self._rates[1:] or self._rates)
        return rates[len(rates) // 2] if rates else None

    def fresh(self, line: Mapping[str, Any]) -> bool:
        """Take a metrics line; False for one of an earlier attempt, which a resumed run writes again."""
        when = number_in(line, "time")
        if not isinstance(line.get("step"), int) or (self._since is not None and when is not None and when < self._since):
            return False
        self.first = self.first or dict(line)
        self.last = dict(line)
        rate = number_in(line, f"{unit_of(line)}_per_s")
        if rate is not None:
            self._rates.append(rate)
        return True

    def change(self) -> str:
        """Return how the loss went and the rate; a script of the user's own may tell neither."""
        first, last, rate = number_in(self.first, "loss"), number_in(self.last, "loss"), self.rate()
        told = [f"loss {first:.4f} → {last:.4f}"] if first is not None and last is not None else []
        return ", ".join([*told, *([f"{rate:,.0f} {unit_of(self.last)}/s"] if rate is not None else [])]) or "no loss told"

    def note_start(self, event: Mapping[str, Any]) -> None:
        """Take the lead's start as the beginning of this attempt."""
        if event.get("kind") == "started" and event.get("node") == self.plan.nodes[0].name:
            self._since = float(event["time"])

    def left_s(self) -> float | None:
        """Return the estimated seconds to the last step."""
        rate = self.rate()
        tokens = number_in(self.last, unit_of(self.last))
        if not rate or not self.plan.steps or tokens is None:
            return None
        per_step = tokens / max(1, int(self.last["step"]))
        return (self.plan.steps - int(self.last["step"])) * per_step / rate


class _Plain(_View):
    """One line a step (or the script's own lines) for logs and pipes; on stderr when stdout carries JSON."""

    def __init__(self, plan: Plan, began: float, to_stderr: bool) -> None:
        super().__init__(plan, began)
        self._err = to_stderr

    def metrics(self, line: Mapping[str, Any]) -> None:
        if self.fresh(line):
            left = self.left_s()
            rest = f"  {left:.0f} s left" if left is not None else ""
            of = f"/{self.plan.steps}" if self.plan.steps else ""
            click.echo(f"step {line['step']}{of}  {told_in(line)}{rest}", err=self._err)

    def log(self, line: str) -> None:
        if self.plan.steps is None or line.startswith(PROFILE):
            click.echo(line, err=self._err)

    def event(self, event: Mapping[str, Any]) -> None:
        self.note_start(event)
        if event.get("kind") not in ("started", "finished"):
            click.echo(told_of(event), err=True)

    def note(self, text: str) -> None:
        click.echo(text, err=True)


class _Bar(_View):
    """A progress bar with step, loss, tokens/s and time left."""

    def __init__(self, plan: Plan, began: float) -> None:
        super().__init__(plan, began)
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar: Progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}"),
            TimeElapsedColumn(),
            console=err(),
        )
        self._task: TaskID = self._bar.add_task(plan.recipe, total=plan.steps, told="starting: importing torch and deepspeed")

    def __enter__(self) -> _View:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def metrics(self, line: Mapping[str, Any]) -> None:
        if self.fresh(line):
            left = self.left_s()
            rest = f"  {left:.0f} s left" if left is not None else ""
            self._bar.update(self._task, completed=line["step"], told=f"{told_in(line)}{rest}")

    def log(self, line: str) -> None:
        if line.startswith(PROFILE):
            self._bar.console.print(line, soft_wrap=True, markup=False)

    def event(self, event: Mapping[str, Any]) -> None:
        self.note_start(event)
        if event.get("kind") not in ("started", "finished"):
            self._bar.console.print(told_of(event), soft_wrap=True, markup=False)

    def note(self, text: str) -> None:
        self._bar.console.print(text, soft_wrap=True, markup=False)


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
