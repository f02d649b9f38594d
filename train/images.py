"""Images instead of text: synthetic ones, or a folder with a folder of pictures for each class.

The order is the one of train/data.py: a permutation an epoch from the seed alone. Pixels travel as bytes; the model turns them
into numbers on the GPU (train/resnet.py).
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from train.data import Order
from train.errors import FAILED, Stop
from train.recipe import Data

if TYPE_CHECKING:
    import torch

SYNTHETIC = "synthetic"
SYNTHETIC_IMAGES = 256
"""So many are made at the start, 38 MB of 224 × 224 pixels: making more would take longer than a GPU takes to train on them."""
ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm"}
CROP_AREA, CROP_RATIO, CENTRE = (0.08, 1.0), (3 / 4, 4 / 3), 0.875
"""Of the usual recipe for ImageNet: a crop of random area and ratio, mirrored half of the time; the centre to evaluate
(Szegedy et al. 2015, arXiv 1409.4842; torchvision's reference scripts)."""
CROP_TRIES = 10


@dataclass(frozen=True)
class ImageSet:
    """Pictures and their classes. `folder` is None for synthetic ones, whose `names` are empty."""

    folder: Path | None
    names: tuple[str, ...]
    labels: tuple[int, ...]
    sha256: str

    def __str__(self) -> str:
        return f"{len(self.labels):,} images, sha256 {self.sha256[:12]}, {self.folder or SYNTHETIC}"


def open_images(data: Data, data_dir: Path, classes: int, named: str = "data.path in the recipe") -> ImageSet:
    """Return the pictures of `data`. Raises Stop when the folder is not what it should be, or has more than `classes` classes.

    The hash is over names and sizes: nobody reads 150 GB at each start.
    """
    if data.path == SYNTHETIC:
        labels = tuple(index % classes for index in range(SYNTHETIC_IMAGES))
        told = f"{SYNTHETIC} {data.image_size} {classes}"
        return ImageSet(None, (), labels, hashlib.sha256(told.encode()).hexdigest())
    folder = data_dir / data.path
    remedy = f"correct {named}"
    try:
        kinds = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        found = [
            (f"{kind}/{entry.name}", number, entry.stat().st_size)
            for number, kind in enumerate(kinds)
            for entry in sorted(os.scandir(folder / kind), key=lambda entry: entry.name)
            if Path(entry.name).suffix.lower() in ENDINGS
        ]
    except OSError as error:
        raise Stop(folder, f"{error.strerror}", "a folder with a folder of images for each class", remedy) from None
    if not found:
        raise Stop(folder, f"{len(kinds)} folders, no image", "a folder of images for each class", remedy)
    if len(kinds) > classes:
        remedy = f"set model.config.num_classes to {len(kinds)}"
        raise Stop(folder, f"{len(kinds)} classes", f"at most {classes}, the model's", remedy)
    names, labels, sizes = zip(*found, strict=True)
    digest = hashlib.sha256(repr((names, sizes)).encode()).hexdigest()
    return ImageSet(folder, names, labels, digest)


class Images:
    """The images of a set, in an order that is a function of the seed alone. `augment`: crops and mirrors at random, to train."""

    def __init__(self, images: ImageSet, image_size: int, seed: int, *, augment: bool = True) -> None:
        self.images, self.image_size, self.seed, self.augment = images, image_size, seed, augment
        self.count = len(images.labels)
        self.sequence_at = Order(self.count, seed).at
        if images.folder is None:
            self._made = make_images(images.labels, image_size)
        else:
            self._readers = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "images")

    def batch(self, first_position: int, size: int) -> dict[str, torch.Tensor]:
        """Return the `size` images from `first_position` on: pixel_values, uint8 [size, 3, height, width], and labels, int64."""
        positions = range(first_position, first_position + size)
        return self.take([self.sequence_at(position) for position in positions], positions)

    def take(self, numbers: Sequence[int], positions: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the images `numbers` of the set, each augmented as its position in the run says."""
        import torch

        labels = torch.tensor([self.images.labels[number] for number in numbers])
        if self.images.folder is None:
            return {"pixel_values": self._made[list(numbers)], "labels": labels}
        pixels = torch.stack(list(self._readers.map(self._read, numbers, positions)))
        return {"pixel_values": pixels, "labels": labels}

    def _read(self, number: int, position: int) -> torch.Tensor:
        import numpy as np
        import torch
        from PIL import Image

        file = (self.images.folder or Path()) / self.images.names[number]
        side = self.image_size
        try:
            with Image.open(file) as opened:
                chance = random.Random(f"{self.seed} {position}")
                width, height = opened.size
                box = random_box(width, height, chance) if self.augment else centre_box(width, height)
                made = opened.convert("RGB").resize((side, side), Image.Resampling.BILINEAR, box=box)
        except (OSError, ValueError, SyntaxError) as error:  # of Pillow's readers
            raise Stop(file, f"{error}", "a picture", "remove it, or copy it again", FAILED) from None
        if self.augment and chance.random() < 0.5:
            made = made.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(made)).permute(2, 0, 1)


def make_images(labels: Sequence[int], image_size: int) -> torch.Tensor:
    """Return noise over a pattern of each class, so that there is something to learn; uint8 [images, 3, size, size]."""
    import torch

    generator = torch.Generator().manual_seed(SYNTHETIC_IMAGES)
    patches = torch.randint(0, 128, (max(labels) + 1, 3, 4, 4), dtype=torch.uint8, generator=generator)
    side = -(-image_size // 4)
    patterns = patches.repeat_interleave(side, 2).repeat_interleave(side, 3)[:, :, :image_size, :image_size]
    noise = torch.randint(0, 128, (len(labels), 3, image_size, image_size), dtype=torch.uint8, generator=generator)
    return noise + patterns[list(labels)]


def random_box(width: int, height: int, chance: random.Random) -> tuple[float, float, float, float]:
    """Return a crop of a picture: left, upper, right, lower; the centre where no crop fits."""
    for _ in range(CROP_TRIES):
        area = width * height * chance.uniform(*CROP_AREA)
        ratio = chance.uniform(*CROP_RATIO)
        wide, high = (area * ratio) ** 0.5, (area / ratio) ** 0.5
        if wide <= width and high <= height:
            left, upper = chance.uniform(0, width - wide), chance.uniform(0, height - high)
            return left, upper, left + wide, upper + high
    return centre_box(width, height)


def centre_box(width: int, height: int) -> tuple[float, float, float, float]:
    """Return the square in the middle of a picture, a little smaller than it."""
    side = min(width, height) * CENTRE
    return (width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2
