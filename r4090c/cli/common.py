"""What several commands share: options, loading the cluster, JSON on stdout, the console on stderr."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from r4090c.errors import Exit, R4090cError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from netcheck.raw import Raw
    from r4090c.model import Cluster, Node

F = TypeVar("F", bound=Callable[..., Any])

PIPE_WIDTH = 200
"""Columns of a table that is not shown on a terminal."""


def configure_logging(verbose: int) -> None:
    """Send logs to stderr: warnings by default, info with -v, debug with -vv."""
    level = {0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG)
    logging.basicConfig(stream=sys.stderr, level=level, format="%(levelname)s %(name)s: %(message)s")
    if verbose < 2:
        logging.getLogger("paramiko").setLevel(logging.CRITICAL)


def cluster_option(function: F) -> F:
    """Add `--cluster FILE`, also accepted before the command's name."""
    return click.option("--cluster", "cluster_file", metavar="FILE", help="cluster.yaml to use.")(function)


def json_option(function: F) -> F:
    """Add `--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")(function)


def nodes_option(function: F) -> F:
    """Add `--nodes N|name,name`."""
    return click.option("--nodes", metavar="N|NAME,…", help="Only the first N nodes, or these (ranges like node[01-04] work).")(
        function
    )


def styled(text: str, **style: Any) -> str:
    """Return `text` with click's style, or as it is when NO_COLOR says so."""
    return text if os.environ.get("NO_COLOR") else click.style(text, **style)


TAKE_CLUSTER = (
    *("attach", "bench", "checks", "diagnose", "env", "eval", "export", "exporter", "facts", "jobs", "launch", "lock", "logs"),
    *("nightly", "nodes", "plan", "preflight", "provision", "stop", "top", "topology"),
)
_given: list[str] = []
"""The `--cluster FILE` of this process, once it was asked for."""


def pasteable(text: str) -> str:
    """Return `text` with this process's `--cluster FILE` in the r4090c commands it proposes: they are about this cluster."""
    if not _given:
        return text
    return re.sub(rf"\br4090c (?!\w+\))(?=(?:{'|'.join(TAKE_CLUSTER)})\b)", f"r4090c --cluster {shlex.quote(_given[0])} ", text)


def tell_error(error: R4090cError) -> None:
    """Print an error on stderr the way all commands do; a reader that went away does not change the exit code."""
    with contextlib.suppress(BrokenPipeError):
        click.echo(f"{styled('error:', fg='red', bold=True)} {pasteable(str(error))}", err=True)


def on_stdout(say: Callable[[], None], otherwise: str) -> Exit:
    """Call `say`, which prints on standard output; return Exit.OK, or Exit.USAGE where it could not and `otherwise` was proposed.

    For commands that go on to write files: neither a reader that went away (`| head`) nor a full disk may keep them from it.
    """
    try:
        say()
    except BrokenPipeError:
        pass
    except OSError as error:
        tell_error(stdout_error(error, otherwise))
        return Exit.USAGE
    return Exit.OK


def stdout_error(error: OSError, otherwise: str) -> UsageError:
    """Return what to tell when standard output took no more, as when it is a file on a full disk."""
    return UsageError("standard output", f"cannot be written: {error.strerror or error}", "room for what is printed", otherwise)


def remember(record: Callable[..., None], *what: Any) -> None:
    """Call a `record_…` function of the store; history that cannot be kept is a warning, never the end of a command."""
    try:
        record(*what)
    except UsageError as error:
        click.echo(f"{styled('warning:', fg='yellow')} {error}", err=True)


def find_cluster_file(cluster_file: str | None) -> str:
    """Return the inventory to read: the option (here or before the command), then ./cluster.yaml, then $R4090C_CLUSTER.

    Raises UsageError when there is none.
    """
    _given.clear()
    context = click.get_current_context(silent=True)
    from_group = context.find_root().obj if context else None
    explicit = (
        context is not None and context.find_root().get_parameter_source("cluster_file") == click.core.ParameterSource.COMMANDLINE
    )
    if cluster_file or (explicit and from_group):
        _given[:] = [str(cluster_file or from_group)]
        return _given[0]
    from_environment = os.environ.get("R4090C_CLUSTER")
    if Path("cluster.yaml").exists():
        if from_environment and Path(from_environment).resolve() != Path("cluster.yaml").resolve():
            click.echo(f"using ./cluster.yaml; $R4090C_CLUSTER ({from_environment}) is for folders without one", err=True)
        return "cluster.yaml"
    if from_environment:
        return from_environment
    raise UsageError(
        "cluster.yaml",
        f"not found in {Path.cwd()}, and $R4090C_CLUSTER is not set",
        "an inventory of your nodes",
        "r4090c nodes --import HOSTFILE > cluster.yaml   (or: r4090c demo, to see it work without one)",
    )


def load(cluster_file: str | None) -> Cluster:
    """Read and check the inventory. Raises UsageError with every mistake in it."""
    from r4090c.inventory import load_cluster

    return load_cluster(Path(find_cluster_file(cluster_file)))


def choose_nodes(cluster: Cluster, wanted: str | None, *, spares: bool = True) -> tuple[Node, ...]:
    """Return the nodes `--nodes` asks for: None = all, "2" = the first two, else names with ranges.

    Without `spares` (to train on), all and a count mean those that are no spare. Raises UsageError for a number out of range,
    an unknown or a repeated name.
    """
    from r4090c.inventory import select_nodes

    return select_nodes(cluster, wanted, spares=spares)


def ask_or_replay(cluster_file: str | None, wanted: str | None, bundle: Path | None) -> tuple[Cluster, Raw]:
    """Return the cluster and what its wanted nodes say: all that a bundle holds, or what they answer now.

    On a terminal it is told that asking takes a moment.
    """
    if bundle is not None:
        from netcheck.bundle import load_bundle

        return load_bundle(bundle)
    from netcheck.gather import gather
    from r4090c.remote import Fleet

    cluster = load(cluster_file)
    nodes = choose_nodes(cluster, wanted)
    with Fleet(nodes) as fleet:
        if not sys.stderr.isatty():
            return cluster, gather(fleet, cluster, nodes)
        with err().status(f"asking {len(nodes)} nodes …"):
            return cluster, gather(fleet, cluster, nodes)


def to_jsonable(value: object) -> Any:
    """Return `value` with dataclasses, enums and tuples turned into what json can write."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_jsonable(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_jsonable(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


def print_json(value: object) -> None:
    """Print `value` as JSON on stdout: indented for a person, on one line for a program."""
    click.echo(json.dumps(to_jsonable(value), indent=2 if sys.stdout.isatty() else None, ensure_ascii=False))


def tell(console: Console, text: str) -> None:
    """Print `text`, where somebody reads: what is done next must be done also after `2>&1 | tee` or the terminal has gone."""
    with contextlib.suppress(OSError, SystemExit):  # rich ends the process when a pipe breaks
        console.print(text, soft_wrap=True, markup=False)


def out() -> Console:
    """Return a console on stdout, for data. Like click.echo it raises BrokenPipeError when nobody reads (`| head`)."""
    from rich.console import Console

    class OnStdout(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich would end the process with 1, whatever the verdict  # noqa: PLE0704 -- called while it is handled

    # A pipe has no width: a table there must not be folded to 80 columns.
    return OnStdout(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def err() -> Console:
    """Return a console on stderr, for progress and notices."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else PIPE_WIDTH)
