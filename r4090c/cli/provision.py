"""`r4090c provision`: make the nodes fit, one procedure at a time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from provision.steps import CONTROLLER, PROCEDURES
from r4090c.cli.common import choose_nodes, cluster_option, json_option, load, nodes_option, print_json, styled
from r4090c.errors import UsageError

if TYPE_CHECKING:
    from provision.apply import Done, Outcome

SCHEMA = "r4090c.provision/1"
MATRIX_MOST_NODES = 24
"""Above, the table is wider than a terminal; the failed logins are listed all the same."""


class ProcedureGroup(click.Group):
    """A group that knows its procedures from their list and imports a planner only for its own help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the procedures in the order in which a new cluster needs them."""
        return list(PROCEDURES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of one procedure; None when there is none."""
        return _command(cmd_name) if cmd_name in PROCEDURES else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of procedures without importing any."""
        with formatter.section("Procedures"):
            formatter.write_dl([(name, row.title) for name, row in PROCEDURES.items()])


@click.group(cls=ProcedureGroup)
def command() -> None:
    """Make the nodes fit. Each procedure looks first, changes only what differs, verifies, and can be undone.

    \b
    Examples:
      r4090c provision ssh-trust --dry-run     what would be changed, and nothing is
      r4090c provision ssh-trust               do it; a second time there is nothing to do
      r4090c provision ssh-trust --undo        take exactly that away again
    """


def _command(name: str) -> click.Command:
    """Return the click command of the procedure `name`; all procedures have the same options."""

    @click.command(name, short_help=PROCEDURES[name].title, help=_help(name))
    @cluster_option
    @nodes_option
    @click.option("--dry-run", is_flag=True, help="Tell what would be changed; change nothing.")
    @click.option("--undo", is_flag=True, help="Take away exactly what was added.")
    @click.option("--yes", is_flag=True, help="Ask nothing: accept what would be asked about.")
    @json_option
    def run(cluster_file: str | None, nodes: str | None, dry_run: bool, undo: bool, yes: bool, as_json: bool) -> int:
        from provision import apply

        cluster = load(cluster_file)
        chosen = choose_nodes(cluster, nodes)
        runner: apply.Runner = getattr(apply, PROCEDURES[name].runner)
        outcome = runner(cluster, chosen, apply.Options(dry_run, undo), Terminal(name, yes))
        if as_json:
            print_json(_report(name, cluster.name, dry_run, undo, outcome))
        else:
            _show([node.name for node in chosen], dry_run, undo, outcome)
        return int(outcome.exit_code)

    return run


def _help(name: str) -> str:
    about = str(import_module(PROCEDURES[name].planner).ABOUT)
    examples = f"\b\nExamples:\n  r4090c provision {name} --dry-run\n  r4090c provision {name} --nodes node[01-02] --yes --json\n"
    codes = "\b\nExit codes: 0 done, or nothing to do; 1 something failed; 2 usage; 3 a node could not be reached.\n"
    return f"{about}\n{examples}\n{codes}"


class Terminal:
    """The person at the terminal: told on stderr, asked only where there is one to answer."""

    def __init__(self, procedure: str, yes: bool) -> None:
        self.procedure = procedure
        self.yes = yes

    def tell(self, text: str) -> None:
        """Say what is going on."""
        click.echo(f"{text} …", err=True)

    def confirm(self, lines: Sequence[str], question: str) -> bool:
        """Show `lines` and return the answer, yes with --yes. Raises UsageError when stdin is no terminal."""
        for line in lines:
            click.echo(f"  {line}", err=True)
        if self.yes:
            return True
        if not sys.stdin.isatty():
            raise UsageError(
                f"provision {self.procedure}",
                f"it has to ask ({question}), and standard input is no terminal",
                "--yes, once the keys above were compared",
                f"r4090c provision {self.procedure} --yes",
            )
        return click.confirm(question, err=True)


# --------------------------------------------------------------------------- output


def _report(name: str, cluster: str, dry_run: bool, undo: bool, outcome: Outcome) -> dict[str, Any]:
    """Return the JSON document. File contents are told as added and removed lines only."""
    return {
        "schema": SCHEMA,
        "procedure": name,
        "cluster": cluster,
        "dry_run": dry_run,
        "undo": undo,
        "exit_code": int(outcome.exit_code),
        "steps": [
            {
                "node": done.step.node,
                "id": done.step.id,
                "what": done.step.what,
                "why": done.step.why,
                "lines": done.step.lines,
                "state": done.state,
                "observed": done.observed,
                "expected": done.expected,
                "next_command": done.next_command,
            }
            for done in outcome.steps
        ],
        "troubles": outcome.troubles,
        "waiting": outcome.waiting,
        "logins": [
            {
                "source": login.source,
                "peer": login.peer,
                "ok": login.cause is None,
                "cause": login.cause.word if login.cause else "",
                "observed": login.cause.observed if login.cause else "",
                "next_command": login.next_command,
            }
            for login in outcome.logins
        ],
    }


def _show(nodes: list[str], dry_run: bool, undo: bool, outcome: Outcome) -> None:
    """Print what was (or would be) done, what failed and why, and the table of logins, on stdout."""
    fine = [done for done in outcome.steps if done.state in ("planned", "done", "unchanged")]  # unchanged: a home is shared
    for group in _alike(fine):
        _show_group(group, dry_run)
    for done in outcome.steps:
        if done.state in ("failed", "unknown"):
            _show_failure(done.step.node, f"{done.step.what}: {done.observed}", done.expected, done.next_command)
    for trouble in outcome.troubles:
        _show_failure(trouble.node, trouble.observed, trouble.expected, trouble.next_command)
    for name in outcome.waiting:
        click.echo(f"{name}: what is to be done there can be told once its host key is accepted")
    if not outcome.steps and not outcome.troubles:
        click.echo(f"{', '.join(nodes)}: nothing to {'undo' if undo else 'do'}")
    if outcome.logins:
        _show_logins(outcome)


def _alike(steps: list[Done]) -> list[list[Done]]:
    """Return the steps grouped: those that do the same on several nodes are told once."""
    groups: dict[object, list[Done]] = {}
    for done in steps:
        groups.setdefault((done.step.node == CONTROLLER, done.step.what, done.step.lines), []).append(done)
    return list(groups.values())


def _show_group(group: list[Done], dry_run: bool) -> None:
    step = group[0].step
    names = ", ".join(done.step.node for done in group)
    click.echo(f"{styled(names, bold=True)}: {'would ' if dry_run else ''}{step.what}")
    click.echo(f"    because: {step.why}")
    if dry_run:
        for line in step.lines:
            click.echo(f"    {line}")


def _show_failure(name: str, observed: str, expected: str, next_command: str) -> None:
    click.echo(f"{styled(name, fg='red', bold=True)}: {observed}")
    if expected:
        click.echo(f"    expected: {expected}")
    if next_command:
        click.echo(f"    next:     {next_command}")


def _show_logins(outcome: Outcome) -> None:
    """Print the table source × peer, then every login that fails with its cause."""
    sources = list(dict.fromkeys(login.source for login in outcome.logins))
    peers = list(dict.fromkeys(login.peer for login in outcome.logins))
    failed = [login for login in outcome.logins if login.cause]
    if len(peers) <= MATRIX_MOST_NODES:
        words = {(login.source, login.peer): login.cause.word if login.cause else "ok" for login in outcome.logins}
        first = max(len(name) for name in ("from \\ to", *sources))
        widths = {peer: max(len(peer), *(len(words[source, peer]) for source in sources)) for peer in peers}
        click.echo("  ".join(["from \\ to".ljust(first), *(peer.ljust(widths[peer]) for peer in peers)]).rstrip())
        for source in sources:
            cells = [_cell(words[source, peer], widths[peer] if peer != peers[-1] else 0) for peer in peers]
            click.echo("  ".join([source.ljust(first), *cells]))
    for login in failed:
        assert login.cause is not None
        _show_failure(f"{login.source} -> {login.peer}", login.cause.observed, "", login.next_command)
    good = len(outcome.logins) - len(failed)
    click.echo(f"{good} of {len(outcome.logins)} logins work without a password")


def _cell(word: str, width: int) -> str:
    return styled(word.ljust(width), fg="green" if word == "ok" else "red")
