"""`r4090c parse`: read the output of a tool, as a file or piped, and print what it says as JSON."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from r4090c.cli.common import json_option, print_json
from r4090c.errors import ParseError, R4090cError, UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from netcheck.tools import ToolModule

TRAINING_LOG = "training-log"
"""launch.diagnose_log: it knows of launchers, so netcheck cannot have it. It prints null for a log without a cause."""
MAX_BYTES = 32 * 2**20
"""est.: the log of a long NCCL run; the whole is held in memory several times over."""


def tool_names() -> list[str]:
    """Return the names of all parsers."""
    from netcheck.tools import TOOLS

    return sorted([*TOOLS, TRAINING_LOG])


def tool_module(name: str) -> ToolModule:
    """Return the parser called `name`. KeyError when there is none."""
    if name == TRAINING_LOG:
        from launch import diagnose_log

        return diagnose_log
    from netcheck.tools import TOOLS

    return TOOLS[name]


def _complete_tool(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the tools whose names begin with what was typed."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(name) for name in tool_names() if name.startswith(incomplete)]


@click.command()
@click.argument("tool", required=False, shell_complete=_complete_tool)
@click.argument("file", required=False, type=click.Path(path_type=Path, allow_dash=True))
@click.option("--list", "as_list", is_flag=True, help="List the tools, and the command line whose output each takes.")
@json_option
def command(tool: str | None, file: Path | None, as_list: bool, as_json: bool) -> None:
    """Print as JSON what the parser of TOOL makes of FILE (default, or "-": standard input).

    These are the parsers that facts and measurements are read with: output of any machine, also pasted, can be looked at offline.

    \b
    Examples:
      r4090c parse --list
      nvidia-smi topo -m | r4090c parse nvidia-smi-topo
      r4090c parse nccl-tests all_reduce.log

    \b
    Exit codes: 0 read; 1 refused: it is cut, damaged or not what TOOL prints; 2 no such TOOL, or FILE cannot be read.
    """
    if as_list:
        if tool is not None:
            raise UsageError("--list", f"given together with {tool}", "one of them", "r4090c parse --list")
        _list(as_json)
        return
    if tool is None or tool not in tool_names():
        raise _no_such_tool(tool)
    name = "standard input" if file is None or str(file) == "-" else str(file)
    text = _read(file, tool).decode("utf-8", "replace")
    module = tool_module(tool)
    try:
        value = module.parse(text)
    except ParseError as error:
        said = "".join(letter if letter.isprintable() else " " for letter in str(error))  # of a file from anywhere
        raise R4090cError(
            name, said, f"the whole output of: {module.COMMAND}", f"r4090c parse {tool} FILE   (FILE: that output, as printed)"
        ) from None
    print_json(value)


def _list(as_json: bool) -> None:
    commands = {name: tool_module(name).COMMAND for name in tool_names()}
    if as_json:
        print_json(commands)
        return
    width = max(map(len, commands))
    for name, line in commands.items():
        click.echo(f"{name:<{width}}  {line}")


def _no_such_tool(tool: str | None) -> UsageError:
    from difflib import get_close_matches

    if tool is None:
        return UsageError("TOOL", "not given", "the name of a tool", "r4090c parse --list")
    near = get_close_matches(tool, tool_names(), n=1, cutoff=0.4)
    return UsageError(tool[:80], "no parser is called so", "a tool of the list", f"r4090c parse {near[0] if near else '--list'}")


def _read(file: Path | None, tool: str) -> bytes:
    """Return the bytes of `file`. Raises UsageError when it cannot be read, or is larger than MAX_BYTES."""
    try:
        if file is None or str(file) == "-":
            if sys.stdin.isatty():
                click.echo("reading from the terminal; end with Ctrl-D", err=True)
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with file.open("rb") as stream:
                data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(
            str(file or "standard input"), error.strerror or str(error), "a file", f"r4090c parse {tool} FILE"
        ) from None
    if len(data) > MAX_BYTES:
        limit = f"{MAX_BYTES // 2**20} MiB"
        raise UsageError(
            str(file or "standard input"),
            f"larger than {limit}",
            f"at most {limit}",
            f"tail -c {MAX_BYTES // 2**20}M FILE | r4090c parse {tool}",
        )
    return data
