"""Logs as files: how much of one is read, and of which node and rank its name says it is."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import BinaryIO

READ_MOST = 32 * 2**20
"""est.: bytes of all logs together; reading them for causes takes some seconds and a few times their size of memory."""
LEAST_SHARE = 256 * 2**10
"""est.: bytes of each of very many logs: the last minutes of a rank."""
HEAD_SHARE = 4
"""The first quarter is of the beginning (versions, interfaces, ranks and their nodes), the rest of the end."""
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Bounded:
    """The beginning and the end of a text. `gap`: (line, lines), so many lines after that one were left out."""

    text: str
    gap: tuple[int, int]
    skipped_bytes: int


def share_of(files: int) -> int:
    """Return how many bytes of each of so many logs are read."""
    return max(LEAST_SHARE, READ_MOST // max(1, files))


def read_bounded(stream: BinaryIO, most: int) -> Bounded:
    """Return the beginning and the end of `stream`, `most` bytes or about, cut at lines; it is read to its end, in little memory.

    Raises what reading raises.
    """
    head = bytearray()
    while len(head) < most // HEAD_SHARE:
        chunk = stream.read(min(CHUNK_BYTES, most // HEAD_SHARE - len(head)))
        if not chunk:
            return Bounded(head.decode("utf-8", "replace"), (0, 0), 0)
        head += chunk
    tail: deque[bytes] = deque()
    held = passed = passed_lines = 0
    while chunk := stream.read(CHUNK_BYTES):
        tail.append(chunk)
        held += len(chunk)
        while len(tail) > 1 and held - len(tail[0]) >= most - most // HEAD_SHARE:
            gone = tail.popleft()
            held -= len(gone)
            passed += len(gone)
            passed_lines += gone.count(b"\n")
    end = b"".join(tail)
    if not passed:
        return Bounded((bytes(head) + end).decode("utf-8", "replace"), (0, 0), 0)
    whole = head.rfind(b"\n") + 1 or len(head)  # the line that was cut is left out, unless it is all there is
    start = end.find(b"\n") + 1
    before = head.count(b"\n") + passed_lines + end.count(b"\n", 0, start)  # lines that end before the end's first one
    kept = head[:whole] if head[:whole].endswith(b"\n") else head[:whole] + b"\n"
    lines = kept.count(b"\n")
    text = (bytes(kept) + end[start:]).decode("utf-8", "replace")
    return Bounded(text, (lines, max(0, before - lines)), len(head) - whole + passed + start)


_SUFFIX = re.compile(r"(?:\.(?:log|out|err|txt|stdout|stderr|gz|\d{1,3}))+$", re.IGNORECASE)
_RANK = re.compile(r"(?:^|[^A-Za-z])rank[-_.= ]?(\d{1,6})(?![0-9])", re.IGNORECASE)
_NODE = re.compile(r"(?:^|[._\-/])((?:node|host|machine|server|box)[-_]?\d{1,5})(?![0-9])", re.IGNORECASE)
_TORCHRUN = re.compile(r"torchrun-([A-Za-z0-9][\w.\-]{0,62})")
_ATTEMPT = re.compile(r"attempt_\d{1,6}")


def whose(path: str) -> tuple[str | None, int | None]:
    """Return (node, rank) as the name of a log and its folder say it, None for what they do not say.

    Of ours: attempt_2/13.log (a rank), torchrun-node02.log. Of others: rank_3.out, node07-rank12.log, node07/rank3.log.
    """
    folder, _, name = path.replace("\\", "/").rpartition("/")
    stem, parent = _SUFFIX.sub("", name), folder.rpartition("/")[2]
    torchrun = _TORCHRUN.fullmatch(stem)
    if torchrun:
        return torchrun.group(1), None
    node = _NODE.search(stem) or _NODE.search(parent)
    rank = _RANK.search(stem) or _RANK.search(parent)
    if rank is None and stem.isdecimal() and stem.isascii() and _ATTEMPT.fullmatch(parent):
        return None, int(stem)
    return node.group(1) if node else None, int(rank.group(1)) if rank else None
