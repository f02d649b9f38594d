"""What a Step is, how a managed block in somebody's file is edited, and which procedures there are.

Pure. A procedure is a planner (observation + wish -> Steps), a runner in `provision.apply`, and one line in PROCEDURES below.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Row(NamedTuple):
    """One procedure: what it does in a few words, its planner's module (with ABOUT, its help), its runner in provision.apply."""

    title: str
    planner: str
    runner: str


PROCEDURES: dict[str, Row] = {
    "ssh-trust": Row("let every node log in to every node without a password", "provision.ssh_trust", "trust_nodes"),
}
"""In the order in which a new cluster needs them."""

CONTROLLER = "this machine"
"""Stands for a node's name in the Steps that concern the machine r4090c runs on."""

# --------------------------------------------------------------------------- steps


@dataclass(frozen=True, slots=True)
class WriteFile:
    """Give `path` this content. `before`: sha256 (hex) of the content it was planned for, "" = there was no file.

    An existing file keeps its mode and owner; a new one gets 0600, and its folder, where there was none, 0700.
    """

    path: str
    content: bytes
    before: str


@dataclass(frozen=True, slots=True)
class RemoveFile:
    """Remove `path`, which we made and whose content has the sha256 `before`."""

    path: str
    before: str


@dataclass(frozen=True, slots=True)
class RemoveFolder:
    """Remove the folder `path`, which we made, unless something is in it."""

    path: str


@dataclass(frozen=True, slots=True)
class MakeKey:
    """Make an SSH key pair at `path` and `path`.pub, marked by `comment`. The private key never leaves the node."""

    path: str
    comment: str


@dataclass(frozen=True, slots=True)
class RemoveKey:
    """Remove the key pair at `path`, provided that it is whole and carries `comment`."""

    path: str
    comment: str


Action = WriteFile | RemoveFile | RemoveFolder | MakeKey | RemoveKey


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a step cannot be carried out. `command`: one command that helps, to be run where the step is."""

    observed: str
    expected: str
    command: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do on one node, or the `problem` that keeps it from being done.

    `id` is unique on the node. `what` and `why` are for people; `lines` are what is added ("+ …") and taken away ("- …").
    `needs`: steps, as "node:id", after which this one has to be planned again, because they change what it does. Such a step
    is never carried out as it is, and it may have no `action` yet.
    """

    node: str
    id: str
    what: str
    why: str
    action: Action | None = None
    problem: Problem | None = None
    lines: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


def sha256_of(content: bytes | None) -> str:
    """Return the sha256 (hex) of a file's content, "" for no file."""
    return "" if content is None else hashlib.sha256(content).hexdigest()


# --------------------------------------------------------------------------- managed blocks

NEWLINE_ADDED, FILE_MADE, FOLDER_MADE = "newline-added", "file-made", "folder-made"
"""What a block remembers of its making, so that it can be undone byte for byte: the file's last line had no end; there was
no file; there was no folder."""
_NOTE = "# note:"
_ANY_BLOCK = re.compile(rb"^# r4090c begin ([^\r\n]*)\r?\n(?:.*\n)*?# r4090c end \1\r?(?:\n|\Z)", re.MULTILINE)


class BlockError(ValueError):
    """A begin line without its end line: nobody can tell where the block ends."""


@dataclass(frozen=True, slots=True)
class Block:
    """A managed block as it stands in a file: its bytes [start, end), its lines without the markers, and its notes."""

    start: int
    end: int
    body: tuple[str, ...]
    notes: frozenset[str]


def begin_line(title: str) -> str:
    """Return the line that begins the block `title`, like "ssh-trust (cluster atelier)"."""
    return f"# r4090c begin {title}"


def end_line(title: str) -> str:
    """Return the line that ends it."""
    return f"# r4090c end {title}"


def find_blocks(content: bytes, title: str) -> list[Block]:
    """Return the blocks called `title`, in the file's order. Raises BlockError when one is not closed.

    An end line without a begin line is somebody else's text. Line ends may be LF or CRLF.
    """
    begin, end = begin_line(title).encode(), end_line(title).encode()
    blocks: list[Block] = []
    start: int | None = None
    body: list[bytes] = []
    offset = 0
    for number, line in enumerate(content.split(b"\n"), start=1):
        text = line.removesuffix(b"\r")
        after = min(offset + len(line) + 1, len(content))
        if text == begin:
            if start is not None:
                raise BlockError(f"line {number} begins {title!r} again before the line {end_line(title)!r}")
            start, body = offset, []
        elif text == end and start is not None:
            lines = [each.decode("utf-8", "surrogateescape") for each in body]
            notes = frozenset(word for each in lines if each.startswith(_NOTE) for word in each[len(_NOTE) :].split())
            blocks.append(Block(start, after, tuple(each for each in lines if not each.startswith(_NOTE)), notes))
            start = None
        elif start is not None:
            body.append(text)
        offset += len(line) + 1
    if start is not None:
        raise BlockError(f"{begin_line(title)!r} has no line {end_line(title)!r}")
    return blocks


def without_any_block(content: bytes) -> bytes:
    """Return what is not in a managed block of any title: what people wrote themselves."""
    return _ANY_BLOCK.sub(b"", content)


def other_titles(content: bytes, title: str) -> list[str]:
    """Return the titles of the managed blocks in `content` that are not `title`."""
    found = [match[1].decode("utf-8", "surrogateescape") for match in _ANY_BLOCK.finditer(content)]
    return [each for each in found if each != title]


def put_block(content: bytes | None, title: str, body: Iterable[str], *, top: bool = False, folder_made: bool = False) -> bytes:
    """Return `content` (None: no file) with the block `title` holding `body`: where it stood, else at the top or the end.

    Everything outside of the block stays as it is. `folder_made` is remembered by a new block only. Raises BlockError.
    """
    text = content or b""
    blocks = find_blocks(text, title)
    for extra in reversed(blocks[1:]):
        text = _cut(text, extra)
    if blocks:
        first = blocks[0]
        return text[: first.start] + _render(title, body, first.notes) + text[first.end :]
    notes = {FILE_MADE} if content is None else set()
    notes |= {FOLDER_MADE} if folder_made else set()
    if top or not text or text.endswith(b"\n"):
        block = _render(title, body, notes)
        return block + text if top else text + block
    return text + b"\n" + _render(title, body, {*notes, NEWLINE_ADDED})


def drop_block(content: bytes, title: str) -> bytes | None:
    """Return `content` as it was before `put_block`; None: the file was made for the block and has nothing else in it.

    Raises BlockError.
    """
    blocks = find_blocks(content, title)
    for block in reversed(blocks):
        content = _cut(content, block)
    return None if not content and any(FILE_MADE in block.notes for block in blocks) else content


def _cut(content: bytes, block: Block) -> bytes:
    """Return `content` without `block`, and without the newline added for it where nothing has been written after it."""
    before, after = content[: block.start], content[block.end :]
    if NEWLINE_ADDED in block.notes and not after:
        before = before.removesuffix(b"\n")
    return before + after


def _render(title: str, body: Iterable[str], notes: Iterable[str]) -> bytes:
    note = [f"{_NOTE} {' '.join(sorted(notes))}"] if notes else []
    lines = [begin_line(title), *note, *body, end_line(title)]
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
