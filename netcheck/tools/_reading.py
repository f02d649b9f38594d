"""What several parsers share: lines as a terminal shows them, numbers that are finite, JSON documents. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from r4090c.errors import ParseError

LARGEST = 2**63 - 1
"""Above it a number is no count of anything, and many readers of JSON lose digits or fail."""
_NUMBER = re.compile(r"[+-]?\d{1,20}(?:\.\d{0,30})?(?:[eE][+-]?\d{1,3})?", re.ASCII)
_ESCAPES = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # a window title
    r"|\x1b\[[0-?]*[ -/]*[@-~]"  # colour, cursor (ECMA-48, control sequences)
    r"|(?:\^\[|\N{SYMBOL FOR ESCAPE})?\[\d{1,2}(?:;\d{1,2})*m"  # colour that lost its escape character on the way
    r"|\x1b[@-Z\\-_]?"
    r"|\x00|\ufeff"
)
"""What terminals, editors and browsers add to a tool's output."""


def plain(text: str) -> str:
    """Return `text` without escape sequences, with newlines for line ends and blanks for blanks of any kind; tabs stay.

    A lone carriage return (a progress bar) ends a line too.
    """
    return _ESCAPES.sub("", text.replace("\r\n", "\n").replace("\r", "\n").replace("\xa0", " "))


def lines_of(text: str) -> list[str]:
    """Return the lines of `plain` text; the last one is empty where it ends as a text should."""
    return plain(text).split("\n")


def not_output_of(tool: str, lines: Iterable[str]) -> ParseError:
    """Return the error for lines that are not what `tool` prints: its own words mostly stand in the first."""
    first = next((line.strip() for line in lines if line.strip()), "")
    return ParseError(f"not the output of {tool}: {first[:120]!r}" if first else f"{tool}: no output")


def number(value: object) -> float | None:
    """Return a finite number of JSON or of text ("12.5", "1.2e+07"), None for all else: "N/A", "-nan", "inf", a truth value."""
    if isinstance(value, str):
        value = float(value) if _NUMBER.fullmatch(value) else None
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST:
        value = float(value)
    return value if isinstance(value, float) and abs(value) <= LARGEST else None


def whole(value: object) -> int | None:
    """Return a whole number of JSON or of decimal text, None for all else."""
    found = number(value)
    if found is None or not found.is_integer():
        return None
    return int(value) if isinstance(value, (int, str)) and str(value).lstrip("+-").isdigit() else int(found)


def document(text: str) -> Any:
    """Return the JSON document `text` holds. Raises ParseError, which never quotes the text: it may hold an environment."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        where = f" at character {error.pos} of {len(text)}" if isinstance(error, json.JSONDecodeError) else ""
        raise ParseError(f"invalid JSON{where}") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")
