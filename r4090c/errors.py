"""The error tree and the exit codes of the command line.

Every error tells four things: the culprit, what was observed, what was expected, and one next command.
Errors are raised at the edge (input, network, files); only the click group catches them.
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of every command (documented contract)."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNKNOWN = 3
    BUG = 70
    INTERRUPTED = 130


class R4090cError(Exception):
    """Base of all errors a user can meet; `exit_code` decides how the command ends."""

    exit_code = Exit.FAILED

    def __init__(self, culprit: str, observed: str, expected: str = "", next_command: str = "") -> None:
        super().__init__(culprit, observed, expected, next_command)
        self.culprit = culprit
        self.observed = observed
        self.expected = expected
        self.next_command = next_command

    def __str__(self) -> str:
        lines = [f"{self.culprit}: {self.observed}"]
        if self.expected:
            lines.append(f"  expected: {self.expected}")
        if self.next_command:
            lines.append(f"  next:     {self.next_command}")
        return "\n".join(lines)


class UsageError(R4090cError):
    """The command line, cluster.yaml or a recipe is wrong."""

    exit_code = Exit.USAGE


class InputErrors(UsageError):
    """Several mistakes of one input, all told at once."""

    def __init__(self, errors: list[UsageError]) -> None:
        super().__init__(f"{len(errors)} mistakes", "")
        self.errors = errors

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)


class CheckFailed(R4090cError):
    """A check failed, a regression was found."""


class TrainingFailed(R4090cError):
    """A run ended without reaching its last step."""


class CouldNotTell(R4090cError):
    """Neither yes nor no: a node is unreachable or an answer is inconclusive."""

    exit_code = Exit.UNKNOWN


class ParseError(ValueError):
    """A tool's output was refused; the message says why. Raised by pure parsers only."""
