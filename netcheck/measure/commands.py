"""Many short commands on one node as a single part of a job, and what came of them: for pings and logins. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from netcheck.facts.question import as_int, as_list, as_mapping, as_str
from netcheck.measure.job import Part, PartResult, Step
from r4090c.errors import ParseError

SOURCE = files("netcheck.measure").joinpath("commands_on_node.py").read_text(encoding="utf-8")
"""The program a node runs."""


@dataclass(frozen=True, slots=True)
class Command:
    """One short program. `retry_on`: output that says it was not its fault; it is run once more then."""

    argv: tuple[str, ...]
    timeout_s: float
    retry_on: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What one command did. `rc` None: it did not run to its end, `error` says why (NOT_INSTALLED, no end in time)."""

    rc: int | None
    stdout: str
    stderr: str
    error: str

    @property
    def last_line(self) -> str:
        """What it said last, or why it did not run; "" when it said nothing."""
        said = [line.strip() for line in (*self.stdout.splitlines(), *self.stderr.splitlines()) if line.strip()]
        return self.error or (said[-1][-300:] if said else "")


def part(node: str, commands: Sequence[Command], at_once: int) -> Part:
    """Return the part that runs `commands` on `node`, at most `at_once` at a time."""
    asked = [{"argv": list(one.argv), "timeout_s": one.timeout_s, "retry_on": list(one.retry_on)} for one in commands]
    waves = -(-len(commands) // at_once)
    longest_s = max((one.timeout_s for one in commands), default=0.0)
    request = json.dumps({"commands": asked, "at_once": at_once})
    argv = ("python3", "-I", "-S", "{folder}/commands.py", "{folder}/request.json")
    return Part(node, (Step(argv, 2 * waves * longest_s + 5.0),), {"commands.py": SOURCE, "request.json": request})


def failure(done: PartResult) -> tuple[str, str]:
    """Return why a part has no results, and the command to look; for one that has none."""
    return done.error or (done.steps[0].error if done.steps else "") or "it gave no answer", done.next_command


def results(done: PartResult) -> tuple[CommandResult, ...]:
    """Return the results in the order of the commands; () when the part was ended before. Raises ParseError."""
    if not done.steps or done.steps[0].rc is None:
        return ()
    try:
        found = json.loads(done.steps[0].stdout)
    except (ValueError, RecursionError):
        raise ParseError("commands: no JSON") from None
    return tuple(_result(one) for one in as_list(found, "commands"))


def _result(value: object) -> CommandResult:
    one = as_mapping(value, "command")
    rc = one.get("rc")
    return CommandResult(
        None if rc is None else as_int(rc, "rc"),
        as_str(one.get("stdout"), "stdout"),
        as_str(one.get("stderr"), "stderr"),
        as_str(one.get("error"), "error"),
    )
