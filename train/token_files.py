"""The folder of token files while it is written: it survives a kill at any moment, and is whole when it gets its name.

manifest.json       what it is: see `prepare.manifest_of`; with the sizes and hashes of the files
tokens.bin          all documents' tokens, one after the other: uint8, uint16 or uint32, little endian
documents.bin       uint64: where each document begins, and where the last one ends
loss.bin            a byte a token: 1 counts toward the loss, 0 is a prompt; not there when all count
bad_records.jsonl   file, line and reason of each record that could not be used
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from train.blocks import BLOCK, Found, Source
from train.metrics import replace_file
from train.storage import hash_of_hashes

FILES = ("tokens.bin", "documents.bin", "loss.bin")
BAD_RECORDS = "bad_records.jsonl"
SHOWN_REASONS, SHOWN_PLACES = 20, 3
MOST_REASONS = 1000
"""est.: reasons that are told apart; they may hold words of the data, and memory must not grow with it."""
_NUMBERS = re.compile(r"\d+")
JOURNAL_EVERY_S = 2.0
STATE = ("block", "tokens", "documents", "largest", "masked", "bad", "bad_bytes", "records", "line", "last_source")


class Folder:
    """The folder that is being written: tokens.bin, documents.bin, loss.bin, bad_records.jsonl and a journal of how far it is.

    What the journal says has reached the disk; whatever is behind that is cut off when the work goes on.
    """

    def __init__(self, path: Path, plan: dict[str, Any], dtype: str) -> None:
        """Go on with what `path` holds when it was begun by the same plan, else begin anew."""
        self.path, self.dtype = path, np.dtype(dtype)
        self.block = self.tokens = self.documents = self.largest = self.bad = self.bad_bytes = 0
        self.masked = False
        self.records: Counter[str] = Counter()
        self.line = [-1, 0]
        self.last_source: int | None = None
        self.saved_s = time.monotonic()
        if not self._restore(plan):
            for file in path.iterdir():
                if file.name != "lock":
                    file.unlink()
            replace_file(path / "plan.json", json.dumps(plan, indent=1))
        names = [*FILES[:2], BAD_RECORDS, *(FILES[2:] if self.masked else ())]
        self.files = {name: (path / name).open("ab") for name in names}
        self.hashes = {name: hash_file(path / name) for name in names}

    def _restore(self, plan: dict[str, Any]) -> bool:
        """Return whether the folder could be brought back to what its journal says."""
        try:
            if json.loads((self.path / "plan.json").read_text(encoding="utf-8")) != plan:
                return False
            told = json.loads((self.path / "journal.json").read_text(encoding="utf-8"))
            sizes = {
                "tokens.bin": told["tokens"] * self.dtype.itemsize,
                "documents.bin": told["documents"] * 8,
                BAD_RECORDS: told["bad_bytes"],
                **({"loss.bin": told["tokens"]} if told["masked"] else {}),
            }
            if any((self.path / name).stat().st_size < size for name, size in sizes.items()):
                return False
            for name, size in sizes.items():
                os.truncate(self.path / name, size)
            if not told["masked"]:
                (self.path / "loss.bin").unlink(missing_ok=True)
        except (OSError, ValueError, KeyError):
            return False
        for key in STATE:
            setattr(self, key, Counter(told[key]) if key == "records" else told[key])
        return True

    def append(self, found: Found, sources: Sequence[Source]) -> None:
        """Write what was found in the next block."""
        first_lines = {source: self.line[1] if source == self.line[0] else 0 for source, _ in found.lines}
        for source, line, why in found.bad:
            told = {"file": str(sources[source].path), "line": first_lines[source] + line, "why": why}
            self.bad_bytes += self._write(BAD_RECORDS, (json.dumps(told, ensure_ascii=False) + "\n").encode())
            self.bad += 1
        if found.lines:
            source, lines = found.lines[-1]
            self.line = [source, first_lines[source] + lines]
        self.records.update(found.records)
        if found.ids is not None and len(found.ids):
            self._append_tokens(found)
        self.block += 1
        if time.monotonic() - self.saved_s > JOURNAL_EVERY_S:
            self.journal()

    def _append_tokens(self, found: Found) -> None:
        if found.loss is not None and not self.masked:
            self.masked = True
            self.files["loss.bin"], self.hashes["loss.bin"] = (self.path / "loss.bin").open("wb"), hashlib.sha256()
            for start in range(0, self.tokens, BLOCK):
                self._write("loss.bin", b"\1" * min(BLOCK, self.tokens - start))
        if self.masked:
            self._write("loss.bin", b"\1" * len(found.ids) if found.loss is None else found.loss.tobytes())
        starts = self.tokens + np.cumsum(found.lengths) - found.lengths
        if found.continues is not None and found.continues == self.last_source:
            starts = starts[1:]
        self._write("documents.bin", starts.astype("<u8").tobytes())
        self._write("tokens.bin", found.ids.astype(self.dtype.newbyteorder("<")).tobytes())
        self.tokens += len(found.ids)
        self.largest = max(self.largest, int(found.ids.max()))
        self.documents += len(starts)
        self.last_source = found.last

    def _write(self, name: str, content: bytes) -> int:
        self.hashes[name].update(content)
        return self.files[name].write(content)

    def reasons(self) -> Reasons:
        """Return why records were bad, those of earlier attempts too. What was appended must be in the journal."""
        reasons = Reasons()
        with (self.path / BAD_RECORDS).open(encoding="utf-8") as lines:
            for line in lines:
                told = json.loads(line)
                reasons.add(told["file"], told["line"], told["why"])
        return reasons

    def journal(self) -> None:
        """Make everything so far survive whatever comes."""
        for file in self.files.values():
            file.flush()
            os.fdatasync(file.fileno())
        replace_file(self.path / "journal.json", json.dumps({key: getattr(self, key) for key in STATE}))
        self.saved_s = time.monotonic()

    def finish(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Complete the files and write the manifest; return it, with their sizes and hashes."""
        self._write("documents.bin", np.array([self.tokens], "<u8").tobytes())
        self.journal()
        files = {}
        for name in FILES:
            if name in self.files:
                files[name] = {"bytes": (self.path / name).stat().st_size, "sha256": self.hashes[name].hexdigest()}
        manifest |= {"files": files, "sha256": hash_of_hashes(files)}
        replace_file(self.path / "manifest.json", json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
        for file in self.files.values():
            file.close()
        for name in ("journal.json", "plan.json"):
            (self.path / name).unlink()
        return manifest


class Reasons:
    """Why records were bad: how many for each reason, and where the first ones are. Reasons that differ in numbers are one."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[str, list[tuple[str, int]]]] = {}
        self.counts: Counter[str] = Counter()
        self.others = 0

    def add(self, file: str, line: int, why: str) -> None:
        """Count one bad record."""
        key = _NUMBERS.sub("0", why)
        if key not in self.known and len(self.known) == MOST_REASONS:
            self.others += 1
            return
        _, places = self.known.setdefault(key, (why, []))
        if len(places) < SHOWN_PLACES:
            places.append((file, line))
        self.counts[key] += 1

    def lines(self) -> Iterator[str]:
        """Yield a line for each reason, at most SHOWN_REASONS."""
        for key, (why, places) in list(self.known.items())[:SHOWN_REASONS]:
            many, (file, line) = self.counts[key], places[0]
            more = "".join(f", {one if other == file else f'{other}:{one}'}" for other, one in places[1:])
            more += ", …" if many > SHOWN_PLACES else ""
            told = f"{file}:{line}: {why}" if many == 1 else f"{many:,} records: {why} ({file}:{line}{more})"
            yield "".join(one if one.isprintable() else "\ufffd" for one in told)  # keys of the data: no escapes for a terminal
        left = self.others + sum(self.counts[key] for key in list(self.known)[SHOWN_REASONS:])
        if left:
            yield f"{left:,} more for other reasons"


def document_lengths(folder: Path) -> dict[str, int]:
    """Return the longest document of a folder in tokens, and the length that 50, 90 and 99 % of them do not exceed.

    Exact, and in bounded memory: lengths are counted, a part of the file after the other.
    """
    starts: Any = np.memmap(folder / FILES[1], "<u8", "r")
    counts: Counter[int] = Counter()
    for begin in range(0, len(starts) - 1, BLOCK):
        lengths, many = np.unique(np.diff(starts[begin : begin + BLOCK + 1]), return_counts=True)
        counts.update(dict(zip(lengths.tolist(), many.tolist(), strict=True)))
    total, below, told = counts.total(), 0, dict[str, int]()
    wanted = [(part, -(-total * part // 100)) for part in (50, 90, 99)]
    for length, many in sorted(counts.items()):
        below += many
        while wanted and below >= wanted[0][1]:
            told[f"p{wanted.pop(0)[0]}"] = length
    return {**told, "longest": max(counts)}


def hash_file(file: Path) -> Any:
    """Return the SHA-256 of what `file` holds, to go on with."""
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while part := content.read(BLOCK):
            digest.update(part)
    return digest
