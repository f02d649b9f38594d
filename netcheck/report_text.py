"""What a node said, made fit to be shown: nothing in it may move a cursor, turn a line around or end a page. Pure."""

from __future__ import annotations

import re

_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff\ufffe\uffff]")
"""Control characters but tab and line feed, what has no width or turns the direction of reading, halves of pairs."""


def printable(text: str) -> str:
    """Return `text` with a visible mark in place of each character that cannot be seen."""
    return _UNSEEN.sub("\ufffd", text)
