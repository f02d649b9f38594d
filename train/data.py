"""Text files -> one file of tokens (bytes) -> samples, in an order that any number of ranks agrees on."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.errors import Stop
from train.recipe import Data, Recipe

if TYPE_CHECKING:
    import torch

DOCUMENT_END = b"\0"
"""Stands between two files; text does not contain it."""


@dataclass(frozen=True)
class Prepared:
    """A folder with `tokens.bin` (one byte a token) and `manifest.json`."""

    folder: Path
    tokens: int
    sha256: str


def folder_name(data: Data) -> str:
    """Return the folder's name below the data folder: the same on every node, wherever its Python library lies."""
    key = json.dumps([data.kind, data.sources, data.max_mib])
    return f"{data.kind}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def prepare(data: Data, data_dir: Path) -> Prepared:
    """Return the prepared data, making it first when it is not there. For one rank only.

    Sorted files, cut at the byte budget: the same files give the same tokens. The folder appears in one rename, so
    nobody meets a half one; when somebody else was faster, theirs is taken.
    """
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


def wait_until_prepared(data: Data, data_dir: Path, timeout_s: float) -> Prepared:
    """Return the data that rank 0 prepares, as soon as it can be seen from here."""
    folder = data_dir / folder_name(data)
    deadline_s = time.monotonic() + timeout_s
    while not (folder / "manifest.json").exists():
        if time.monotonic() > deadline_s:
            expected = f"the data rank 0 prepared within {timeout_s:.0f} s"
            raise Stop(folder, "not there", expected, "see rank 0's log; is --data-dir on storage that all nodes share?")
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
    return [pattern.replace("{stdlib}", sysconfig.get_path("stdlib")) for pattern in data.sources]


class Samples:
    """The sequences of a data set, in an order that is a function of the seed alone.

    A run reads positions 0, 1, 2, …: step s takes `samples_per_step` of them, whatever the number of ranks. Each epoch
    visits every sequence once, in a permutation of its own.
    """

    def __init__(self, prepared: Prepared, sequence_length: int, seed: int) -> None:
        import torch

        file = str(prepared.folder / "tokens.bin")
        self.tokens = torch.from_file(file, shared=False, size=prepared.tokens, dtype=torch.uint8)  # memory-mapped
        self.sequence_length, self.seed = sequence_length, seed
        self.count = prepared.tokens // sequence_length
        self._epoch, self._order = -1, torch.empty(0)

    def sequence_at(self, position: int) -> int:
        """Return which sequence stands at `position` of the run."""
        import torch

        epoch, index = divmod(position, self.count)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._epoch, self._order = epoch, torch.randperm(self.count, generator=generator)
        return int(self._order[index])

    def batch(self, first_position: int, size: int) -> torch.Tensor:
        """Return the `size` sequences from `first_position` on: int64 [size, sequence_length], on the CPU."""
        import torch

        starts = [self.sequence_at(first_position + index) * self.sequence_length for index in range(size)]
        return torch.stack([self.tokens[start : start + self.sequence_length] for start in starts]).long()


def first_position(recipe: Recipe, step: int, micro_step: int, rank: int, world_size: int) -> int:
    """Return where in the run's order the micro-batch of `rank` begins; `step` from 1, `micro_step` and `rank` from 0."""
    micro_batches = ((step - 1) * recipe.gradient_accumulation + micro_step) * world_size + rank
    return micro_batches * recipe.micro_batch
