"""What people see of an attempt while it runs: a bar or lines, its end, and what Ctrl-C does."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from netcheck.report_text import printable
from r4090c.cli.common import err, pasteable, tell, tell_error
from r4090c.errors import CouldNotTell, Exit, R4090cError, UsageError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from launch.attempts import Attempts
    from launch.jobs import Run
    from launch.plan import Plan
    from launch.restart import Policy
    from launch.run import Wish
    from launch.supervise import Outcome, Supervisor

ABANDONED_S = 45.0
"""est.: a supervisor says within two seconds that it is about to start the next attempt, and says so anew every ten."""
UNHEARD_S = 5.0
"""est.: how often nodes that do not answer are asked how a run stands."""
UNTRUE_S = 15.0
"""est.: an attempt that ended is no longer told as running by any node so long after."""
SAID = ("profile  ", "notice   ", "resume   ", "left ", "removed ")
"""How lines of rank 0's log begin that are for whoever looks on (train/main.py, train/profiling.py)."""


def restart_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say what follows an attempt that fails."""
    wait = click.option(
        "--node-wait",
        type=click.FloatRange(min=0),
        metavar="SECONDS",
        help="How long a node that does not answer is waited for before the run goes on with fewer [default: 300].",
    )
    many = click.option(
        "--attempts",
        type=click.IntRange(1),
        metavar="N",
        help="How many attempts in a row may save no new checkpoint before the run is given up [default: 6].",
    )
    again = click.option(
        "--restart/--no-restart",
        default=None,
        help="Start again from the last checkpoint when an attempt fails [default: recipes yes, scripts no].",
    )
    return again(many(wait(command)))


def policy_of(node_wait_s: float | None, attempts: int | None) -> Policy:
    """Return how patient a run is."""
    from launch.restart import RETURN_S, WITHOUT_PROGRESS, Policy

    if node_wait_s is not None and not math.isfinite(node_wait_s):
        raise UsageError(f"--node-wait {node_wait_s}", "no number of seconds", "seconds")
    return Policy(attempts or WITHOUT_PROGRESS, RETURN_S if node_wait_s is None else node_wait_s)


def options_of(restart: bool | None, node_wait_s: float | None, attempts: int | None) -> tuple[str, ...]:
    """Return what was said of what follows a failed attempt, as options, for the run's plan."""
    return (
        *(() if restart is None else ("--restart" if restart else "--no-restart",)),
        *(() if node_wait_s is None else (f"--node-wait={node_wait_s:g}",)),
        *(() if attempts is None else (f"--attempts={attempts}",)),
    )


def told_in_options(options: Sequence[str]) -> tuple[bool | None, float | None, int | None]:
    """Return (restart, node_wait_s, attempts) as `options_of` wrote them into a plan; None = nothing was said."""
    told = dict(option.partition("=")[::2] for option in options)
    restart = True if "--restart" in told else False if "--no-restart" in told else None
    wait, attempts = told.get("--node-wait"), told.get("--attempts")
    return restart, None if wait is None else float(wait), None if attempts is None else int(attempts)


@dataclass
class Followed:
    """An attempt that was followed to its end. `told`: what is printed of it as JSON. `outcome` None: Ctrl-C ended it.

    `first`: the first line of metrics of the run, as far as it was followed here.
    """

    told: dict[str, Any]
    code: int
    supervisor: Supervisor
    outcome: Outcome | None
    first: Mapping[str, Any]


def follow_attempt(
    begin: Callable[[], Supervisor],
    began: float,
    quiet: bool = False,
    *,
    resumable: bool = True,
    leaves: bool = False,
    first: Mapping[str, Any] | None = None,
) -> Followed:
    """Start an attempt with `begin`, follow it to its end, showing progress, and tell how it ended.

    `quiet`: stdout is kept free. Ctrl-C stops every rank on every node and gives exit code 130; so does anything else that
    keeps us from following: what runs in the foreground does not go on unseen. `leaves`: then the attempt goes on instead.
    `resumable`: say how, after Ctrl-C. `first`: the first line of metrics of the attempts before.
    """
    from launch.run import counted
    from launch.supervise import account, failure, told_of_stop, uninterrupted

    console = err()
    supervisor: Supervisor | None = None
    first = first or {}
    try:
        supervisor = begin()
        plan = supervisor.plan
        view = _Bar(plan, began) if console.is_terminal and plan.steps else _Plain(plan, began, quiet)
        view.first = dict(first)
        with view:
            outcome = supervisor.follow(view)
    except KeyboardInterrupt:
        if supervisor is None:
            raise  # the start has cleaned up
        plan = supervisor.plan
        ended: dict[str, Any] = {"run_id": plan.run_id, "run_dir": plan.run_dir, "outcome": "left" if leaves else "stopped"}
        if leaves:
            supervisor.leave()
            alone = ", and NOBODY supervises it any more" if supervisor.supervises else ""
            left = f"left; {plan.run_id} goes on{alone}: r4090c attach {plan.run_id}, r4090c stop {plan.run_id}"
            tell(console, f"\n{pasteable(left)}")
            return Followed(ended, Exit.INTERRUPTED, supervisor, None, first)
        with uninterrupted():
            tell(console, "\ninterrupted: stopping every rank on every node …")
            stopped = supervisor.stop(f"{account()} (Ctrl-C)")
        again = pasteable(f"r4090c launch --resume {plan.run_id}")
        resume = f"\n  resume (from its last checkpoint, once it has saved one): {again}" if plan.steps and resumable else ""
        tell(console, f"{told_of_stop(stopped, supervisor.names)}{resume}")
        return Followed(ended, Exit.INTERRUPTED, supervisor, None, first)
    except BaseException:
        if supervisor is not None and leaves:
            supervisor.leave()
        elif supervisor is not None:
            supervisor.stop("the controller (it could not follow any more)")
        raise
    told = {
        "run_id": plan.run_id,
        "run_dir": plan.run_dir,
        "attempt": plan.attempt,
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
        return Followed(told, error.exit_code, supervisor, outcome, view.first)
    if view.last:
        console.print(
            f"[green]done[/green] in {time.time() - began:.1f} s: {counted(view.last['step'], 'step')}, "
            f"{view.change()} on {counted(len(supervisor.names), 'node')}",
            soft_wrap=True,
        )
    else:
        console.print(f"[green]done[/green] in {time.time() - began:.1f} s")
    return Followed(told, Exit.OK, supervisor, outcome, view.first)


def follow_run(
    begin: Callable[[], Supervisor],
    start_again: Callable[[Wish], Supervisor],
    attempts: Attempts | None,
    began: float,
    quiet: bool = False,
    *,
    leaves: bool = False,
    onlooker: Onlooker | None = None,
) -> tuple[dict[str, Any], int]:
    """Follow a run through its attempts to its end; return (what came of it, exit code).

    `attempts`: decides what follows a failed one; None = nothing does. `onlooker`: how to go on where another supervises. The
    rest is as in `follow_attempt`.
    """
    followed: Followed | None = follow_attempt(begin, began, quiet, leaves=leaves)
    many = 0
    while followed is not None:
        last, many = followed, many + 1
        followed = _follow_next(last, attempts, start_again, onlooker, began, quiet, leaves)
    return {**last.told, "attempts": many}, last.code


def _follow_next(
    last: Followed,
    attempts: Attempts | None,
    start_again: Callable[[Wish], Supervisor],
    onlooker: Onlooker | None,
    began: float,
    quiet: bool,
    leaves: bool,
) -> Followed | None:
    """Decide what follows an attempt, and follow that to its end; None = nothing does."""
    from launch.jobs import give_up

    outcome = last.outcome
    if outcome is None or outcome.cause is None:
        return None
    console, plan = err(), last.supervisor.plan
    if not last.supervisor.supervises:
        following = _look_on(last, onlooker) if onlooker is not None else None
        if following is not None:
            return follow_attempt(partial(_begun, following), began, quiet, leaves=leaves, first=last.first)
        if onlooker is None or not onlooker.abandoned:
            if onlooker is None:
                console.print("what follows is decided there", soft_wrap=True)
            return None
        outcome = last.supervisor.take_over(outcome)
    if attempts is None:
        with contextlib.suppress(R4090cError):
            give_up(last.supervisor.fleet, plan.run_dir, "it is not to be: --no-restart, or a script of one's own")
        return None
    failed: R4090cError | None = None
    while True:
        try:
            decided = attempts.after(plan, outcome) if failed is None else attempts.after_no_start(plan, failed)
            if decided.wish is None:
                console.print(f"not started again: {decided.why}", soft_wrap=True, markup=False)
                return None
            console.print(f"starting again {decided.why}", soft_wrap=True, markup=False)
            supervisor = start_again(decided.wish)
        except R4090cError as error:
            tell_error(error)
            failed = error
        except KeyboardInterrupt:
            attempts.let_go(plan, "interrupted")
            again = pasteable(f"\n  resume: r4090c launch --resume {plan.run_id}") if plan.steps else ""
            tell(console, f"\ninterrupted; nothing is running{again}")
            raise
        else:
            return follow_attempt(partial(_begun, supervisor), began, quiet, leaves=leaves, first=last.first)


def patiently(find: Callable[[], Run], say: Callable[[str], None], patient_s: float) -> Run:
    """Return how the run stands, trying for `patient_s` seconds while no node answers. Raises CouldNotTell then."""
    until, told = time.monotonic() + patient_s, ""
    while True:
        try:
            return find()
        except CouldNotTell as error:
            if time.monotonic() > until:
                raise
            if told != error.observed:
                told = error.observed
                say(f"{told}; trying again")
            time.sleep(UNHEARD_S)


@dataclass
class Onlooker:
    """How who does not supervise goes on: `find` tells how the run stands, `attach` follows its last attempt. Both may take long.

    `abandoned`: set when its supervisor has said nothing about what follows, and so is gone.
    """

    find: Callable[[], Run]
    attach: Callable[[Run], Supervisor]
    abandoned: bool = False


def _look_on(last: Followed, onlooker: Onlooker) -> Supervisor | None:
    """Return who follows the next attempt, once the run's supervisor has started it; None when there is none."""
    console, told = err(), ""
    began = time.monotonic()
    until = began + ABANDONED_S
    while time.monotonic() < until:
        asked = time.monotonic()
        run = onlooker.find()
        until += time.monotonic() - asked  # a network that is silent does not make its supervisor so
        if run.attempt > last.supervisor.plan.attempt:
            console.print(f"attempt {run.attempt}", soft_wrap=True)
            return onlooker.attach(run)
        if run.state == "running" and time.monotonic() - began > UNTRUE_S:
            console.print(f"attempt {run.attempt} goes on after all", soft_wrap=True)
            return onlooker.attach(run)
        over = run.given_up or (f"stopped by {run.stopped_by}" if run.stopped_by else "")
        if over or run.state in ("done", "stopped"):
            console.print(f"not started again: {over or run.state}", soft_wrap=True, markup=False)
            return None
        if run.between is not None:
            until = time.monotonic() + ABANDONED_S
            if told != run.between.get("who"):
                told = str(run.between.get("who"))
                console.print(f"{told} decides what follows", soft_wrap=True, markup=False)
        time.sleep(1.0)
    console.print("its supervisor has said nothing about what follows; deciding that here", soft_wrap=True)
    onlooker.abandoned = True
    return None


def _begun(supervisor: Supervisor) -> Supervisor:
    return supervisor


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
    return printable(f"{warning}{event.get('node')}: {event.get('kind')}: {event.get('detail', '')}")


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
        if self.plan.steps is None:  # what a script of one's own prints is its own affair
            click.echo(line, err=self._err)
        elif line.startswith(SAID):
            click.echo(printable(line), err=self._err)

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
        if line.startswith(SAID):
            self._bar.console.print(printable(line), soft_wrap=True, markup=False)

    def event(self, event: Mapping[str, Any]) -> None:
        self.note_start(event)
        if event.get("kind") not in ("started", "finished"):
            self._bar.console.print(told_of(event), soft_wrap=True, markup=False)

    def note(self, text: str) -> None:
        self._bar.console.print(text, soft_wrap=True, markup=False)
