"""The command line: a lazy click group. A command's module is imported only when that command runs.

This package's import stays far below 0.4 s (bench/startup.py): no torch, no paramiko, no pydantic, no rich at the top of any
module reached from here.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import signal
import sys
import tempfile
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from r4090c import __version__
from r4090c.errors import Exit, R4090cError

COMMANDS: dict[str, str] = {
    "attach": "follow a run that goes on; supervise it when nobody does",
    "bench": "measure collectives by themselves",
    "checks": "show every check, what it expects and why",
    "data": "prepare text for training",
    "demo": "train on two nodes on this machine, without root or GPU",
    "diagnose": "name the first cause of a failure, in any log or of a run",
    "env": "show the environment of the ranks, and why",
    "eval": "tell a run's loss on held-out data",
    "export": "turn a run's checkpoint into a folder that transformers or peft loads",
    "exporter": "serve what GPUs, network and runs do now to Prometheus",
    "facts": "show what is true on every node",
    "jobs": "list runs and their state",
    "launch": "train a recipe or your own script on the cluster",
    "lock": "record a cluster known to be good, to be told what drifts from it",
    "logs": "show the logs of a run",
    "nightly": "measure scaling efficiency and keep its history",
    "nodes": "show the cluster, or import a hostfile",
    "parse": "read the output of a tool and print what it says as JSON",
    "plan": "say what a recipe needs, whether it fits, how fast it should be",
    "preflight": "say whether the nodes are fit, and if not what mends them",
    "provision": "make the nodes fit",
    "recipes": "list the recipes, or print one",
    "schema": "print the JSON Schema of cluster.yaml",
    "stop": "stop a run on every node",
    "top": "show what GPUs, network and runs do now",
    "topology": "show how the nodes are built and who is near whom",
}
"""Command name -> one line of help. Each lives in `r4090c/cli/<name>.py` as `command`."""


PRINTERS = ("click.utils", "rich.console")
"""Modules through which everything is printed."""


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one only to run it or to show its own help."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. A reader that went away (`r4090c logs … | head`) is no failure; click would end with 1."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            return Exit.OK  # nothing more to say, and nobody to say it to

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the command names, sorted."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command called `cmd_name`, importing its module; None when there is none."""
        if cmd_name not in COMMANDS:
            return None
        command = import_module(f"r4090c.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve the command; an unknown name is answered with the nearest one."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            ctx.fail(f"No such command '{args[0]}'.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--cluster",
    "cluster_file",
    metavar="FILE",
    envvar="R4090C_CLUSTER",
    help="cluster.yaml to use [default: ./cluster.yaml, then $R4090C_CLUSTER]",
)
@click.option("-v", "--verbose", count=True, help="Tell more on stderr; twice for debug.")
@click.version_option(__version__, prog_name="r4090c")
@click.pass_context
def cli(ctx: click.Context, cluster_file: str | None, verbose: int) -> None:
    """Turn a handful of machines with RTX 4090 cards into a training cluster.

    \b
    Start here:
      r4090c demo                 see it work on this machine
      r4090c nodes                what cluster.yaml says
      r4090c preflight            are the nodes fit?
      r4090c launch tiny          train
    """
    from r4090c.cli.common import configure_logging

    configure_logging(verbose)
    ctx.obj = cluster_file


def program() -> None:
    """Be the program `r4090c`: run the command line and end the process at once with the documented code (see `Exit`).

    Whatever needs an orderly end (fleets, clusters, files) is a context manager; neither threads that wait for a silent node nor
    40 ms of interpreter teardown are worth anybody's time.
    """
    sys.unraisablehook = _tell_unraisable
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us (`>&-`)
            setattr(sys, name, Path(os.devnull).open("r" if name == "stdin" else "w"))  # noqa: SIM115 -- lives as long as we
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":  # a terminal that knows no × shows a ?
            stream.reconfigure(errors="replace")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays nohup
            signal.signal(number, _interrupt)
    gc.set_threshold(50_000, 20, 50)  # short-lived: the default makes dozens of passes over imported modules
    code = _run()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # told already, or nobody is left to be told
            stream.flush()
    os._exit(code)


def _interrupt(number: int, frame: object) -> None:
    """Treat SIGTERM and SIGHUP like Ctrl-C: what runs in the foreground is ended in good order."""
    raise KeyboardInterrupt


def _tell_unraisable(found: sys.UnraisableHookArgs) -> None:
    """Tell what a finalizer raised, as Python does, but no Ctrl-C that happened to meet one: the command ends all the same."""
    if not isinstance(found.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(found)


def main() -> None:
    """Run the command line and raise SystemExit with the documented code."""
    sys.exit(_run())


def _run() -> int:
    """Run the command line; return the exit code, whatever happens."""
    try:
        code = cli(standalone_mode=False)
        return code if isinstance(code, int) else Exit.OK
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return Exit.USAGE
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return Exit.INTERRUPTED
    except R4090cError as error:
        from r4090c.cli.common import tell_error

        tell_error(error)
        return error.exit_code
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else Exit.OK
    except OSError as error:
        if not _printing(error):
            return _report_bug()
        from r4090c.cli.common import stdout_error, tell_error

        tell_error(stdout_error(error, "df -h"))
        return Exit.USAGE
    except Exception:  # noqa: BLE001 -- the last resort: any other exception is a bug of ours
        return _report_bug()


def _printing(error: BaseException) -> bool:
    """Return whether `error` was raised by printing: standard output is a file on a full disk."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__") in PRINTERS for frame in frames)


def _report_bug() -> int:
    """Write the traceback to a log file, name it on stderr, and return the exit code for a bug."""
    handle, name = tempfile.mkstemp(prefix="r4090c-bug-", suffix=".log")
    with os.fdopen(handle, "w") as log:
        # The log is meant to be sent to us: what --env carries may be a secret.
        words = [re.sub(r"^((?:--env=)?[A-Za-z_][A-Za-z0-9_]*=).*", r"\1***", word, flags=re.DOTALL) for word in sys.argv]
        log.write(f"r4090c {__version__}, Python {sys.version}\nargv: {words}\n\n{traceback.format_exc()}")
    click.echo(f"bug: {sys.exc_info()[1]!r}\n  This is a fault in r4090c. Please report it with {Path(name)}", err=True)
    return Exit.BUG
