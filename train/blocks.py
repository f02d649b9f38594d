"""The input in blocks -> tokens, by a process a core: reading lines and long texts in pieces, encoding, masks.

Memory is bounded whatever the input: a worker holds one block until it is written, and a line has a largest length.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from train.errors import FAILED, Stop
from train.records import Bad, Record, Writer, check_text, parse
from train.tokens import CLOSE, OPEN, Tokens

JSON_LINES = (".jsonl", ".ndjson", ".jsonlines")
"""Endings of files with a record a line; any other file is plain text."""
BLOCK = 4 << 20
"""Bytes of input a worker takes at once. Measured: 95 MiB of a worker are libraries, 50 its block and what is made of it."""
AHEAD = 2
"""Blocks of each worker that may wait for the one that is to be written next."""
LINE_END_WITHIN = 1 << 20
"""A long plain text is cut at the first line end after each block; where none comes so soon, between two characters."""
SAMPLE_BYTES, SAMPLE_PLACES = 128 << 10, 16
"""Of the input, on which the fast engine must give the ids of the model's own tokenizer: a tenth of a second's work."""
_CONTROL_STAND_IN = re.compile(f"{OPEN}\\d+{CLOSE}")


@dataclass(frozen=True)
class Source:
    """One input file."""

    path: Path
    size: int
    modified_ns: int

    @property
    def is_json(self) -> bool:
        """True for a record a line, False for plain text."""
        return self.path.suffix.lower() in JSON_LINES


@dataclass(frozen=True)
class Slice:
    """Bytes `start` to `end` of source number `source`: the lines that begin there, or that part of a plain text."""

    source: int
    start: int
    end: int


@dataclass(frozen=True)
class Piece:
    """A text to be encoded; `begins` and `ends` are False for the inner parts of a long plain text."""

    source: int
    line: int
    text: str
    kind: str
    begins: bool
    ends: bool


@dataclass
class Found:
    """What a worker made of one block. `loss`: 1 where a token counts, None when all do. `bad`: (source, line, why)."""

    size: int = 0
    ids: Any = None
    lengths: Any = None
    loss: Any = None
    continues: int | None = None
    """The source whose document of the block before the first one here continues."""
    last: int | None = None
    """The source of the last document."""
    records: Counter[str] = field(default_factory=Counter)
    bad: list[tuple[int, int, str]] = field(default_factory=list)
    lines: list[tuple[int, int]] = field(default_factory=list)
    """(source, lines of it) in the order of the input."""


@dataclass(frozen=True)
class Work:
    """Everything a worker needs; it gets it by the fork. Without `encode` records are only counted."""

    sources: list[Source]
    writer: Writer
    max_record: int
    encode: bool = True


def cut(sources: Sequence[Source]) -> Iterator[list[Slice]]:
    """Yield blocks: slices of about BLOCK bytes together. A slice of a long file is a block of its own."""
    block: list[Slice] = []
    size = 0
    for index, source in enumerate(sources):
        for start in range(0, source.size, BLOCK):
            end = min(start + BLOCK, source.size)
            if size + end - start > BLOCK and block:
                yield block
                block, size = [], 0
            block.append(Slice(index, start, end))
            size += end - start
    if block:
        yield block


def in_order(work: Work, blocks: Sequence[list[Slice]], workers: int) -> Iterator[Found]:
    """Yield what `workers` processes make of `blocks`, in their order. Raises Stop when one of them dies.

    Each takes every n-th block and has a pipe of its own. (concurrent.futures has one pipe for all: a worker that is
    killed within a message, as when memory runs out, leaves its reader waiting for the rest for ever.)
    """
    context = multiprocessing.get_context("fork")
    pipes: list[Any] = []
    processes: list[Any] = []
    try:
        for index in range(min(workers, len(blocks))):
            reader, writer = context.Pipe(duplex=False)
            processes.append(context.Process(target=_work_through, args=(work, blocks[index::workers], writer, os.getpid())))
            processes[-1].start()
            writer.close()  # only the worker holds it: its end is the end of the pipe
            pipes.append(reader)
        come: dict[int, Found] = {}
        following = list(range(len(pipes)))  # the block that each worker sends next
        for index in range(len(blocks)):
            while index not in come:  # meanwhile the others may get ahead of the one that is waited for
                within = [one for one, block in enumerate(following) if block < min(len(blocks), index + AHEAD * len(pipes))]
                for pipe in wait([pipes[one] for one in within]):
                    one = pipes.index(pipe)
                    come[following[one]] = _receive(pipe, processes[one])
                    following[one] += len(pipes)
            yield come.pop(index)
    finally:
        for process in processes:  # after an error or a signal nobody wants what they are working on
            process.kill()
            process.join()


def _receive(pipe: Any, process: Any) -> Found:
    """Return the next message of a worker. Raises the OSError it met, or Stop when it is dead."""
    try:
        message: Found | OSError = pipe.recv()
    except (EOFError, OSError):
        raise _death(process) from None
    if isinstance(message, OSError):
        raise message
    return message


def _death(process: Any) -> Stop:
    """Return what to tell of a worker that ended without a result."""
    process.join()
    if process.exitcode < 0:
        remedy = "start the same command again with fewer --workers: it goes on from here"
        return Stop(
            "a worker process", f"was killed by {signal.Signals(-process.exitcode).name}", "memory for it", remedy, FAILED
        )
    return Stop("a worker process", f"ended with {process.exitcode}", "0", "report this with the lines above", FAILED)


def _work_through(work: Work, blocks: Sequence[list[Slice]], pipe: Any, parent: int) -> None:
    """Be a worker: send what was found in each of `blocks`. It is killed when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, prctl(2)
    if os.getppid() != parent:
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal's signals are the parent's business
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for block in blocks:
        try:
            pipe.send(work_on(work, block))
        except OSError as error:
            pipe.send(error)


def work_on(work: Work, block: Sequence[Slice]) -> Found:
    """Return the tokens of `block`."""
    found = Found(size=sum(part.end - part.start for part in block))
    pieces: list[Piece] = []
    for part in block:
        for line, record, begins, ends in read(work, part, found):
            try:
                text = work.writer.text_of(record)
            except Bad as error:
                found.bad.append((part.source, line, str(error)))
                continue
            found.records[record.kind] += begins
            if work.encode:
                pieces.append(Piece(part.source, line, text, record.kind, begins, ends))
    if pieces:
        encode(work.writer.tokens, pieces, found)
    return found


def read(work: Work, part: Slice, found: Found) -> Iterator[tuple[int, Record, bool, bool]]:
    """Yield (line in the slice, record, it begins here, it ends here) of the records in `part`; bad ones go to `found`."""
    return (_read_lines if work.sources[part.source].is_json else _read_text)(work, part, found)


def _read_lines(work: Work, part: Slice, found: Found) -> Iterator[tuple[int, Record, bool, bool]]:
    """Yield the records of the lines that begin in `part`."""
    with work.sources[part.source].path.open("rb", buffering=1 << 20) as file:
        at, number = part.start, 0
        if at:
            file.seek(at - 1)
            at += _skip_line(file) - 1
        while at < part.end and (line := file.readline(work.max_record + 1)):
            at += len(line)
            number += 1
            if len(line) > work.max_record:
                at += 0 if line.endswith(b"\n") else _skip_line(file)
                found.bad.append((part.source, number, f"longer than {work.max_record / 2**20:g} MiB (--max-record-mib)"))
                continue
            line = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
            if line:
                try:
                    yield number, parse(line), True, True
                except Bad as error:
                    found.bad.append((part.source, number, str(error)))
    found.lines.append((part.source, number))


def _skip_line(file: BinaryIO) -> int:
    """Go behind the next line end; return how many bytes that were. A line may be longer than memory."""
    skipped = 0
    while part := file.readline(1 << 20):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def _read_text(work: Work, part: Slice, found: Found) -> Iterator[tuple[int, Record, bool, bool]]:
    """Yield the plain text of `part`, nothing where it is bad."""
    source = work.sources[part.source]
    with source.path.open("rb") as file:
        begin, end = (cut_at(file, place, source.size) for place in (part.start, part.end))
        file.seek(begin)
        content = file.read(end - begin)
    begins, ends = begin == 0, end == source.size
    try:
        text = content.removeprefix(b"\xef\xbb\xbf" if begins else b"").decode()
        if content:
            yield 1, Record("text", check_text("the text", text, empty=not (begins and ends))), begins, ends
    except UnicodeDecodeError as error:
        line = 1 + content.count(b"\n", 0, error.start)
        found.bad.append((part.source, line, f"not UTF-8: {error.reason}; this part of the file is left out"))
    except Bad as error:
        found.bad.append((part.source, 1, str(error)))
    found.lines.append((part.source, content.count(b"\n")))


def cut_at(file: BinaryIO, place: int, size: int) -> int:
    """Return where a long text is cut near `place`: the same for the slice before and for the one behind."""
    if place in (0, size):
        return place
    file.seek(place)
    ahead = file.read(LINE_END_WITHIN)
    line_end = ahead.find(b"\n") + 1
    if line_end:
        return place + line_end
    return place + next((index for index, byte in enumerate(ahead[:4]) if byte & 0xC0 != 0x80), 0)


def encode(tokens: Tokens, pieces: Sequence[Piece], found: Found) -> None:
    """Fill in `found` with the tokens of `pieces`."""
    ids, lengths = tokens.encode([piece.text for piece in pieces])
    forged = _forged(tokens, pieces, ids, lengths)
    if forged.any():
        for piece in (piece for piece, bad in zip(pieces, forged, strict=True) if bad):
            found.bad.append((piece.source, piece.line, "this tokenizer makes a control token of its text"))
            found.records[piece.kind] -= piece.begins
        ids, lengths = ids[np.repeat(~forged, lengths)], lengths[~forged]
        pieces = [piece for piece, bad in zip(pieces, forged, strict=True) if not bad]
    counts = None
    plain = np.array([piece.kind == "text" for piece in pieces], bool)
    if not plain.all():
        begins, ends = ids == tokens.response_mark, ids == tokens.prompt_mark
        counts = (np.cumsum(begins, dtype=np.int32) > np.cumsum(ends, dtype=np.int32)) | np.repeat(plain, lengths)
        kept = ~(begins | ends)
        lengths = np.diff(np.concatenate(([0], np.cumsum(kept)))[np.concatenate(([0], np.cumsum(lengths)))])
        ids, counts = ids[kept], counts[kept]
    opened = plain & np.array([piece.begins for piece in pieces], bool)
    closed = plain & np.array([piece.ends for piece in pieces], bool)
    ends_at = np.cumsum(lengths)
    at = np.concatenate((ends_at[closed], np.repeat((ends_at - lengths)[opened], len(tokens.begin))))
    added = np.concatenate((np.full(closed.sum(), tokens.end), np.tile(tokens.begin, opened.sum()))).astype(ids.dtype)
    found.ids = np.insert(ids, at, added).astype(tokens.dtype)
    found.loss = None if counts is None else np.insert(counts, at, True).astype(np.uint8)
    found.lengths = lengths + closed + len(tokens.begin) * opened
    found.continues = None if not pieces or pieces[0].begins else pieces[0].source
    found.last = pieces[-1].source if pieces else None


def _forged(tokens: Tokens, pieces: Sequence[Piece], ids: Any, lengths: Any) -> Any:
    """Return which pieces have more control tokens than stand-ins for them: their text became one through the vocabulary."""
    wanted = [0 if one.kind == "text" else len(_CONTROL_STAND_IN.findall(one.text)) for one in pieces]
    control = tokens.is_control[ids]
    if control.sum() == sum(wanted):
        return np.zeros(len(pieces), bool)
    before = np.concatenate(([0], np.cumsum(control)))
    ends = np.cumsum(lengths)
    return before[ends] - before[ends - lengths] != wanted


def first_texts(work: Work, parts: Sequence[Slice], count: int) -> Iterator[tuple[Record, str]]:
    """Yield the first `count` good records of `parts`, with the text to be encoded."""
    for part in parts:
        for _, record, *_ in read(work, part, Found()):
            try:
                text = work.writer.text_of(record)
            except Bad:
                continue
            yield record, text
            count -= 1
            if not count:
                return


def sample(work: Work) -> list[str]:
    """Return texts to be encoded from SAMPLE_PLACES places of the input, about SAMPLE_BYTES in all."""
    total = sum(source.size for source in work.sources)
    each = SAMPLE_BYTES // SAMPLE_PLACES
    texts, before = [], 0
    for index, source in enumerate(work.sources):
        for place in range(SAMPLE_PLACES):
            start = total * place // SAMPLE_PLACES - before
            if 0 <= start < source.size:
                size = 0
                for record, text in first_texts(work, [Slice(index, start, min(start + each, source.size))], each):
                    texts.append(text[:SAMPLE_BYTES] if record.kind == "text" else text)
                    size += len(text)
                    if size > each:
                        break
        before += source.size
    return [text for text in texts if len(text) <= SAMPLE_BYTES]
