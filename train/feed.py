"""Whatever the recipe's data is: found, and read in order. Text in train/data.py, images in train/images.py."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from train import data, images
from train.errors import Stop, counted
from train.recipe import Data, Model
from train.weights import Weights

Found = data.Prepared | images.ImageSet
Samples = data.Samples | images.Images


def find_data(
    wanted: Data, model: Model, data_dir: Path, *, prepares: bool, timeout_s: float, named: str = "data.path in the recipe"
) -> Found:
    """Return the data that a recipe names, made or verified by the one rank that `prepares`; the others wait for that.

    `named`: where its folder was written. Raises Stop when it is not there, damaged, or not for this model.
    """
    if wanted.kind == "images":
        return images.open_images(wanted, data_dir, int(model.config.get("num_classes", 0)), named)
    found = data.prepare(wanted, data_dir, named) if prepares else data.wait_until_prepared(wanted, data_dir, timeout_s, named)
    data.require_vocabulary(found, int(model.config["vocab_size"]))
    return found


def require_same_tokenizer(found: Found, weights: Weights | None) -> str:
    """Return a notice when the weights' tokenizer could not be compared with the data's, else "".

    Raises Stop when it is another one: every token would be a wrong one.
    """
    if isinstance(found, images.ImageSet) or weights is None:
        return ""
    file = weights.folder / "tokenizer.json"
    manifest, prepared_with = found.folder / "manifest.json", _tokenizer_of(found.folder)
    if not file.exists():
        return f"{weights.folder} has no tokenizer.json: whether {manifest.parent} is of its tokenizer was not compared"
    if hashlib.sha256(file.read_text(encoding="utf-8").encode()).hexdigest() != prepared_with["sha256"]:
        raise Stop(
            manifest,
            f"its tokenizer, {prepared_with['name']}, is not {file}",
            "the tokenizer of the weights",
            f"r4090c data prepare … --tokenizer {file.parent}, or copy the data's tokenizer.json there if both give the same ids",
        )
    return ""


def require_tokenizer_of_training(found: Found, training: Found | Path) -> str:
    """Return a notice when the held-out data `found` could not be compared with what was trained on, or its folder, else "".

    Raises Stop when it is of another tokenizer: the model knows none of its tokens.
    """
    if isinstance(found, images.ImageSet) or isinstance(training, images.ImageSet):
        return ""
    trained_on = training if isinstance(training, Path) else training.folder
    try:
        wanted = _tokenizer_of(trained_on)
    except (OSError, ValueError):
        return f"{trained_on} is not there any more: whether {found.folder} is of the same tokenizer was not compared"
    given = _tokenizer_of(found.folder)
    if given["sha256"] == wanted["sha256"]:
        return ""
    observed = f"its tokenizer is {given['name']}, that of the data trained on ({trained_on}) is {wanted['name']}"
    if given["name"] == wanted["name"]:
        observed = f"its tokenizer, {given['name']}, is not the one of that name in the data trained on ({trained_on})"
    remedy = "prepare it with the same: r4090c data prepare … --tokenizer"
    raise Stop(found.folder / "manifest.json", observed, "one tokenizer for both", remedy)


def _tokenizer_of(folder: Path) -> dict[str, str]:
    """Return name and sha256 of the tokenizer of a data set; `text` is bytes. Raises OSError, ValueError."""
    told = json.loads((folder / "manifest.json").read_text(encoding="utf-8")).get("tokenizer")
    return told or {"name": "bytes", "sha256": hashlib.sha256(b"bytes").hexdigest()}


def told_of(samples: Samples, steps: int, samples_per_step: int) -> list[str]:
    """Return what the data has become, in lines for people, with a notice where most of it is cut or counts for nothing."""
    epochs = f"{counted(steps, 'step')} = {steps * samples_per_step / samples.count:.3g} epochs"
    if isinstance(samples, images.Images):
        return [f"data     {counted(samples.count, 'image')}; {epochs}"]
    laid, length = samples.laid, samples.sequence_length
    what = f"{counted(laid.documents, 'document')} in " if laid.documents else ""
    cut = f", {laid.cut:,} cut" if laid.cut else ""
    left = f", {counted(laid.left_out, 'piece')} left out: nothing counts toward the loss" if laid.left_out else ""
    lines = [f"data     {what}{counted(laid.sequences, 'sequence')} of {length:,} tokens{cut}{left}; {epochs}"]
    if laid.cut * 2 > laid.documents:
        lines.append(
            f"notice   {laid.cut:,} of {counted(laid.documents, 'document')} are longer than data.sequence_length {length:,} and "
            "cut: their later parts are learnt without what stands before; `r4090c data prepare` tells the lengths"
        )
    if laid.left_out * 2 > laid.pieces:
        lines.append(
            f"notice   {laid.left_out:,} of {counted(laid.pieces, 'piece')} have no token that counts toward the loss and are "
            "left out: raise data.sequence_length, or see `r4090c data prepare --dry-run`"
        )
    return lines


def samples_of(found: Found, wanted: Data, seed: int, *, augment: bool = True) -> Samples:
    """Return the samples of data that was found. `augment`: pictures are cropped and mirrored at random, to train."""
    if isinstance(found, images.ImageSet):
        return images.Images(found, wanted.image_size, seed, augment=augment)
    return data.Samples(found, wanted.sequence_length, seed)
