"""A recipe's data -> samples, in an order that any number of ranks agrees on.

`text`: files of this machine, read as bytes, for trying things out; made here. `prepared`: the folder that train/prepare.py wrote
(train/token_files.py says what lies in it).
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import queue
import shutil
import sysconfig
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from train.errors import Stop
from train.recipe import BYTE_VALUES, Data, Recipe
from train.storage import DATA_SCHEMA, hash_of_hashes, sha256_of

if TYPE_CHECKING:
    import torch

DOCUMENT_END = b"\0"
"""Stands between two files of `text`; text does not contain it."""
HASHED_BYTES = 2 << 30
"""Folders up to this size are hashed by rank 0 at every start, some 2 s; of larger ones only the sizes are compared."""
IGNORED = -100
"""A label that does not count toward the loss: what transformers and torch mean by it."""
AHEAD = 2
"""Batches that are made while the GPU works."""


@dataclass(frozen=True)
class Prepared:
    """A folder with `tokens.bin` and `manifest.json`. `documents`: how many documents.bin tells apart, 0 where there is none.

    `packing`: "stream" cuts the documents, one after the other, into sequences; "whole" cuts none that fits into a sequence.
    """

    folder: Path
    tokens: int
    sha256: str
    dtype: str = "uint8"
    largest_token: int = BYTE_VALUES - 1
    documents: int = 0
    packing: str = "stream"

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens, sha256 {self.sha256[:12]}, {self.folder}"


def folder_name(data: Data) -> str:
    """Return the folder's name below the data folder: the same on every node, wherever its Python library lies."""
    key = json.dumps([data.kind, data.sources, data.max_mib])
    return f"{data.kind}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def prepare(data: Data, data_dir: Path, named: str = "data.path in the recipe") -> Prepared:
    """Return the prepared data: `text` is made when it is not there, `prepared` is verified. For one rank only.

    Sorted files, cut at the byte budget: the same files give the same tokens. The folder appears in one rename, so
    nobody meets a half one; when somebody else was faster, theirs is taken.
    """
    if data.kind == "prepared":
        return open_prepared(data_dir / data.path, data.sequence_length, verify=True, named=named)
    folder = data_dir / folder_name(data)
    if not (folder / "manifest.json").exists():
        files, content = collect(data)
        aside = data_dir / f".{folder.name}.{os.uname().nodename}.{os.getpid()}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        (aside / "tokens.bin").write_bytes(content)
        manifest = {"kind": data.kind, "tokens": len(content), "sha256": hashlib.sha256(content).hexdigest(), "files": files}
        (aside / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        try:
            aside.rename(folder)
        except OSError:
            shutil.rmtree(aside)
    return read_manifest(folder, data.sequence_length)


def collect(data: Data) -> tuple[list[str], bytes]:
    """Return the names of the files taken and their bytes, at most `max_mib`. Files that are not text are left out."""
    budget = int(data.max_mib * 2**20)
    names = sorted({name for pattern in _globs(data) for name in glob.glob(pattern, recursive=True)})  # noqa: PTH207
    taken, content = [], bytearray()
    for name in names:
        try:
            text = Path(name).read_bytes()
        except OSError:  # a folder, a dangling link, no permission
            continue
        if DOCUMENT_END in text:
            continue
        taken.append(name)
        content += text + DOCUMENT_END
        if len(content) >= budget:
            break
    if not content:
        raise Stop("recipe data.sources", f"no text file matches {_globs(data)}", "at least one", "correct the globs")
    return taken, bytes(content[:budget])


def wait_until_prepared(data: Data, data_dir: Path, timeout_s: float, named: str = "data.path in the recipe") -> Prepared:
    """Return the data that rank 0 prepares, as soon as it can be seen from here."""
    if data.kind == "prepared":
        return open_prepared(data_dir / data.path, data.sequence_length, named=named)
    folder = data_dir / folder_name(data)
    deadline_s = time.monotonic() + timeout_s
    while not (folder / "manifest.json").exists():
        if time.monotonic() > deadline_s:
            expected = f"the data rank 0 prepared within {timeout_s:.0f} s"
            raise Stop(folder, "not there", expected, "see rank 0's log; is this folder on storage that all nodes share?")
        time.sleep(0.05)
    return read_manifest(folder, data.sequence_length)


def read_manifest(folder: Path, sequence_length: int) -> Prepared:
    """Return what `folder` holds. Raises Stop when the tokens do not fit the manifest or are too few."""
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    tokens = folder / "tokens.bin"
    size = tokens.stat().st_size if tokens.exists() else 0
    if size != manifest["tokens"]:
        raise Stop(tokens, f"{size} bytes", f"{manifest['tokens']}, as its manifest says", f"remove {folder} to prepare it again")
    if size < sequence_length:
        raise Stop(tokens, f"{size} tokens", f"at least one sequence of {sequence_length}", "give data.sources more text")
    return Prepared(folder, manifest["tokens"], manifest["sha256"])


def _globs(data: Data) -> list[str]:
    return [pattern.replace("{stdlib}", sysconfig.get_path("stdlib")) for pattern in data.sources or []]


def open_prepared(folder: Path, sequence_length: int, verify: bool = False, named: str = "data.path in the recipe") -> Prepared:
    """Return what lies in a folder of `r4090c data prepare`. Raises Stop where that is not what its manifest says.

    Sizes always; hashes as well with `verify`, up to HASHED_BYTES. `named`: where somebody wrote the folder's name.
    """
    file, remedy = folder / "manifest.json", f"prepare it again: r4090c data prepare … --out {folder}"
    try:
        manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if manifest["schema"] != DATA_SCHEMA:
            raise Stop(file, f"schema {manifest['schema']}", DATA_SCHEMA, remedy)
        files = {name: (told["bytes"], told["sha256"]) for name, told in manifest["files"].items()}
        whole = hash_of_hashes(manifest["files"])
        known = ("tokens", "sha256", "dtype", "largest_token", "documents", "packing")
        prepared = Prepared(folder, **{key: manifest[key] for key in known})
        width = {"uint8": 1, "uint16": 2, "uint32": 4}[prepared.dtype]
        tokens, documents = prepared.tokens, prepared.documents
        sizes = {"tokens.bin": tokens * width, "documents.bin": 8 * (documents + 1), "loss.bin": tokens}
        fits = {"tokens.bin", "documents.bin"} <= set(files) <= set(sizes) and prepared.packing in ("stream", "whole")
        if not fits or any(sizes[name] != size for name, (size, _) in files.items()) or prepared.sha256 != whole:
            raise Stop(file, "it contradicts itself", "a manifest as it was written", remedy)
    except OSError as error:
        expected = "a folder that `r4090c data prepare` wrote"
        raise Stop(file, str(error.strerror), expected, f"correct {named}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Stop(file, f"no manifest of ours: {error!r}", f"schema {DATA_SCHEMA}", remedy) from None
    hashed = verify and sum(size for size, _ in files.values()) <= HASHED_BYTES
    for name, (size, digest) in files.items():
        path = folder / name
        found = path.stat().st_size if path.exists() else 0
        if found != size:
            raise Stop(path, f"{found} bytes", f"{size}, as its manifest says", remedy)
        if hashed and sha256_of(path) != digest:
            raise Stop(path, "its bytes are not those that were written", f"sha256 {digest[:12]}", remedy)
    if prepared.packing == "stream" and prepared.tokens < sequence_length:
        expected = f"at least one sequence of {sequence_length}"
        raise Stop(folder / "tokens.bin", f"{prepared.tokens} tokens", expected, "prepare more, or lower its sequence_length")
    return prepared


def require_vocabulary(prepared: Prepared, vocab_size: int) -> None:
    """Raise Stop when the data has tokens that a model of `vocab_size` does not know: its tokenizer is another one's."""
    if prepared.largest_token >= vocab_size:
        observed = f"it has token {prepared.largest_token:,}, the model knows {vocab_size:,}"
        remedy = "prepare the data with the model's own tokenizer, or train the tokenizer's model"
        raise Stop(prepared.folder / "manifest.json", observed, f"tokens below {vocab_size:,}", remedy)


@dataclass(frozen=True)
class Laid:
    """How documents became sequences. Of documents that are not told apart (`text`) there are none.

    `cut`: documents longer than a sequence, where whole ones are wanted. `left_out`: pieces without a token that counts.
    """

    documents: int
    cut: int
    pieces: int
    left_out: int
    sequences: int


class Order:
    """Which of `count` samples stands at each position of a run: a permutation for each epoch, from the seed alone."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed
        self._epoch = -1
        self._permutation: Any = None

    def at(self, position: int) -> int:
        """Return the number of the sample."""
        import torch

        epoch, index = divmod(position, self.count)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._epoch, self._permutation = epoch, torch.randperm(self.count, generator=generator)
        return int(self._permutation[index])


class Samples:
    """The sequences of a data set, in an order that is a function of the seed alone.

    A run reads positions 0, 1, 2, …: step s takes `samples_per_step` of them, whatever the number of ranks. Each epoch
    visits every sequence once, in a permutation of its own. What has no token that counts is left out.
    """

    def __init__(self, prepared: Prepared, sequence_length: int, seed: int) -> None:
        """Map the files into memory, and lay out the sequences. Raises Stop when there are none."""
        import numpy as np

        self.prepared, self.sequence_length = prepared, sequence_length
        dtype = np.dtype(prepared.dtype).newbyteorder("<")
        self.tokens = np.memmap(prepared.folder / "tokens.bin", dtype, "r")
        documents = prepared.folder / "documents.bin"
        self.documents: Any = np.memmap(documents, "<i8", "r") if prepared.documents else None  # offsets stay below 2**63
        loss = prepared.folder / "loss.bin"
        self.loss = np.memmap(loss, np.uint8, "r") if prepared.documents and loss.exists() else None
        self.pieces, self.first_piece, self.laid = self._lay_out()
        self.count = self.laid.sequences
        self.sequence_at = Order(self.count, seed).at

    def _lay_out(self) -> tuple[Any, Any, Laid]:
        """Return pieces [n, 2] (begin and end in tokens.bin), the first of each sequence (and one past the last), and figures."""
        import numpy as np

        length, total, long = self.sequence_length, self.prepared.tokens, 0
        if self.prepared.packing == "stream":
            many = total // length
            begins: Any = np.arange(many, dtype=np.int64) * length
            ends: Any = begins + length
            counts = None if self.loss is None else self.loss[: many * length].reshape(many, length)[:, 1:].any(axis=1)
        else:
            begins, ends = cut_long(self.documents, length)
            long = int((np.diff(self.documents) > length).sum())
            counts = ends - begins > 1  # the first token of a piece has nothing to be predicted from
            if self.loss is not None:
                counts &= np.add.reduceat(self.loss, begins, dtype=np.int64) > self.loss[begins]
        many = len(begins)
        if counts is not None:
            begins, ends = begins[counts], ends[counts]
        if not len(begins):
            remedy = "raise data.sequence_length, or look at the data with `r4090c data prepare --dry-run`"
            raise Stop(self.prepared.folder, "no sequence has a token that counts toward the loss", "responses", remedy)
        pieces = np.stack((begins, ends), axis=1)
        if self.prepared.packing == "stream":
            first_piece: Any = np.arange(len(pieces) + 1)
        else:
            sequence = pack((ends - begins).tolist(), length)
            pieces = pieces[np.argsort(sequence, kind="stable")]
            first_piece = np.concatenate(([0], np.cumsum(np.bincount(sequence))))
        laid = Laid(self.prepared.documents, long, many, many - len(pieces), len(first_piece) - 1)
        return pieces, first_piece, laid

    def batch(self, first_position: int, size: int) -> dict[str, torch.Tensor]:
        """Return the `size` sequences from `first_position` on: input_ids, labels, position_ids; int64 [size, sequence_length].

        Positions begin anew at each document: without an attention mask transformers then lets no document see another. Where all
        rows are one document each they are left out: the model then makes them once for all rows.
        """
        import numpy as np
        import torch

        ids: Any = np.zeros((size, self.sequence_length), np.int64)
        labels = np.full_like(ids, IGNORED)
        positions = np.empty_like(ids)
        for row in range(size):
            self._fill(self.sequence_at(first_position + row), ids[row], labels[row], positions[row])
        largest = int(ids.max())
        if largest > self.prepared.largest_token:
            file, expected = (
                self.prepared.folder / "tokens.bin",
                f"none above {self.prepared.largest_token}, as its manifest says",
            )
            raise Stop(file, f"damaged: it has token {largest}", expected, "prepare the data again")
        made = {"input_ids": ids, "labels": labels}
        if (positions != np.arange(self.sequence_length)).any():
            made["position_ids"] = positions
        return {name: torch.from_numpy(array) for name, array in made.items()}

    def _fill(self, sequence: int, ids: Any, labels: Any, positions: Any) -> None:
        """Write one sequence into a row of each."""
        import numpy as np

        at, begun = 0, []
        for begin, end in self.pieces[self.first_piece[sequence] : self.first_piece[sequence + 1]].tolist():
            here = slice(at, at + end - begin)
            ids[here] = labels[here] = self.tokens[begin:end]
            if self.loss is not None:
                labels[here][self.loss[begin:end] == 0] = IGNORED
            begun.append(at)
            if self.documents is not None:
                first, past = (int(np.searchsorted(self.documents, place)) for place in (begin, end))
                begun += (at + self.documents[first:past] - begin).tolist()
            at = here.stop
        if at < len(ids):
            begun.append(at)  # padding sees itself only
        if self.documents is not None:
            labels[begun] = IGNORED
        origin = np.zeros_like(positions)
        origin[begun] = begun
        positions[:] = np.arange(len(ids)) - np.maximum.accumulate(origin)


def cut_long(documents: Any, length: int) -> tuple[Any, Any]:
    """Return begin and end of every document; one that is longer than `length` is cut into pieces of it."""
    import numpy as np

    many = -(-np.diff(documents) // length)
    first = np.cumsum(many) - many
    begins = np.repeat(documents[:-1], many) + length * (np.arange(many.sum()) - np.repeat(first, many))
    return begins, np.minimum(begins + length, np.repeat(documents[1:], many))


def pack(lengths: Sequence[int], capacity: int) -> list[int]:
    """Return for each length in which sequence of `capacity` it lies: longest first, each where it leaves the least room.

    Best fit decreasing; needs at most 11/9 of the fewest sequences and a microsecond a piece. `rooms` has a bit for every room
    that some sequence has left.
    """
    chosen = [0] * len(lengths)
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = sequences = 0
    for index in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        length = lengths[index]
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            sequence = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, sequence, sequences = capacity, sequences, sequences + 1
        chosen[index] = sequence
        with_room[room - length].append(sequence)
        rooms |= 1 << (room - length)
    return chosen


class Batches(Protocol):
    """Samples of any kind, in an order of their own."""

    def batch(self, first_position: int, size: int) -> dict[str, torch.Tensor]:
        """Return the `size` samples from `first_position` on."""


def prefetch(
    samples: Batches, positions: Iterable[tuple[int, int]], pin: bool = False, ahead: int = AHEAD
) -> Generator[dict[str, torch.Tensor], None, None]:
    """Yield the batch for each (first position, size), made in a thread, `ahead` of its use; `pin` for copies that do not block.

    Closing the iterator ends the thread. What the thread raises is raised here.
    """
    made: queue.Queue[dict[str, torch.Tensor] | BaseException | None] = queue.Queue(ahead)
    closed = threading.Event()

    def put(one: dict[str, torch.Tensor] | BaseException | None) -> None:
        while not closed.is_set():
            with contextlib.suppress(queue.Full):
                made.put(one, timeout=0.1)
                return

    def work() -> None:
        try:
            for first, size in positions:
                batch = samples.batch(first, size)
                put({name: tensor.pin_memory() for name, tensor in batch.items()} if pin else batch)
                if closed.is_set():
                    return
            put(None)
        except BaseException as error:  # noqa: BLE001 -- it is raised where the batch is asked for
            put(error)

    threading.Thread(target=work, name="prefetch", daemon=True).start()
    try:
        while (one := made.get()) is not None:
            if isinstance(one, BaseException):
                raise one
            yield one
    finally:
        closed.set()


def first_position(recipe: Recipe, step: int, micro_step: int, rank: int, world_size: int) -> int:
    """Return where in the run's order the micro-batch of `rank` begins; `step` from 1, `micro_step` and `rank` from 0."""
    micro_batches = ((step - 1) * recipe.gradient_accumulation + micro_step) * world_size + rank
    return micro_batches * recipe.micro_batch
