"""Whatever the recipe's data is: found, and read in order. Text in train/data.py, images in train/images.py."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from train import data, images
from train.errors import Stop
from train.recipe import Data, Model
from train.weights import Weights

Found = data.Prepared | images.ImageSet
Samples = data.Samples | images.Images


def find_data(wanted: Data, model: Model, data_dir: Path, *, prepares: bool, timeout_s: float) -> Found:
    """Return the data that a recipe names, made or verified by the one rank that `prepares`; the others wait for that.

    Raises Stop when it is not there, damaged, or not for this model.
    """
    if wanted.kind == "images":
        return images.open_images(wanted, data_dir, int(model.config.get("num_classes", 0)))
    found = data.prepare(wanted, data_dir) if prepares else data.wait_until_prepared(wanted, data_dir, timeout_s)
    data.require_vocabulary(found, int(model.config["vocab_size"]))
    return found


def require_same_tokenizer(found: Found, weights: Weights | None) -> None:
    """Raise Stop when beside the weights lies another tokenizer than the data's: every token would be a wrong one."""
    file = weights.folder / "tokenizer.json" if weights else None
    if isinstance(found, images.ImageSet) or file is None or not file.exists():
        return
    manifest = found.folder / "manifest.json"
    prepared_with = json.loads(manifest.read_text(encoding="utf-8")).get("tokenizer") or {"name": "bytes", "sha256": ""}
    if hashlib.sha256(file.read_text(encoding="utf-8").encode()).hexdigest() != prepared_with["sha256"]:
        raise Stop(
            manifest,
            f"its tokenizer, {prepared_with['name']}, is not {file}",
            "the tokenizer of the weights",
            f"r4090c data prepare … --tokenizer {file.parent}, or copy the data's tokenizer.json there if both give the same ids",
        )


def samples_of(found: Found, wanted: Data, seed: int, *, augment: bool = True) -> Samples:
    """Return the samples of data that was found. `augment`: pictures are cropped and mirrored at random, to train."""
    if isinstance(found, images.ImageSet):
        return images.Images(found, wanted.image_size, seed, augment=augment)
    return data.Samples(found, wanted.sequence_length, seed)
