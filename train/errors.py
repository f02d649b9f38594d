"""The one error a user is meant to read."""

from __future__ import annotations

WRONG_INPUT, FAILED = 2, 1


def reason(error: Exception) -> str:
    """Return what `error` says: of one of the system's without its number and the file, which the culprit names already."""
    return str(getattr(error, "strerror", None) or error)


def counted(count: int, noun: str) -> str:
    """Return "1 rank", "2,000 ranks"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


class Stop(Exception):
    """Ends this rank with one line: the culprit, what was observed, what was expected, and what to do."""

    def __init__(self, culprit: object, observed: str, expected: str, remedy: str, exit_code: int = WRONG_INPUT) -> None:
        super().__init__(f"{culprit}: {observed}; expected {expected}; {remedy}".replace("\n", " "))
        self.told = (str(culprit), observed, expected, remedy)
        self.exit_code = exit_code
