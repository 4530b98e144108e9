"""Samples as they are delivered, and draws of augmentation seen through them.

Where an operation moves pixels, keypoints tell its draws exactly: three corners of each image say
what became of it, in arithmetic that no decoder takes part in. Pixels are recorded as means over a
grid of 3 x 3, and compared within 2 of 255: which SIMD instructions decode and resize depends on
the processor, and the last bit follows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
import torch.utils.data

import penstock
from tests.goldens.material import SOURCES, Case, Material, digest, loader, plain, spaced

USUAL: dict[str, Any] = {"shuffle": True, "seed": 3, "batch_size": 6, "drop_last": True}
STREET = "id image mask points boxes corners score caption caption.present"
FOLLOWED = "id image mask boxes corners"
SQUARE, CROP = penstock.Resize((16, 16)), penstock.RandomResizedCrop(12, scale=(0.2, 0.9))
FLIPS = [penstock.RandomHorizontalFlip(), penstock.RandomVerticalFlip(p=0.3)]
CIFAR = [penstock.Decode(), penstock.Resize((32, 32)), *penstock.cifar_train()[1:-1]]
FLOAT, ARRAYS = penstock.Cast("float32"), penstock.RandomCrop((3, 4))


def draw(number: Any, *, rng: np.random.Generator) -> Any:
    """Draw as a function of the user's does; refuse some samples."""
    if int(number) % 9 == 4:
        raise penstock.BadSampleError("recorded")
    return np.int64(rng.integers(10**9))


def _map(name: str) -> penstock.Map:
    return penstock.Map(draw, fields="id", returns={name: penstock.Value("int64")})


# By name: a source, its fields, a recipe.
RECIPES: dict[str, tuple[str, str, Any]] = {
    "random resized crop": ("table", FOLLOWED, [CROP]),
    "crop and flips": ("table", FOLLOWED, [penstock.RandomCrop(14, padding=3), *FLIPS]),
    "resize": ("table", FOLLOWED, [penstock.Resize(14), penstock.CenterCrop(12)]),
    "sanitized": ("table", FOLLOWED, [CROP, penstock.SanitizeBoxes(min_area=30)]),
    "cifar": ("table", FOLLOWED, CIFAR),
    "jitter": ("table", "id image", [SQUARE, penstock.ColorJitter(0.5, 0.5, 0.5, 0.2)]),
    "grayscale": ("table", "id image", [SQUARE, penstock.RandomGrayscale(0.5)]),
    "blur": ("table", "id image", [SQUARE, penstock.GaussianBlur(5, p=0.7)]),
    "erasing": ("table", "id image", [SQUARE, penstock.RandomErasing(p=0.8)]),
    "rotation": ("table", "id image", [SQUARE, penstock.RandomRotation(40)]),
    "rand augment": ("table", "id image", [SQUARE, penstock.RandAugment()]),
    "trivial augment": ("table", "id image", [SQUARE, penstock.TrivialAugmentWide()]),
    "auto augment": ("table", "id image", [SQUARE, penstock.AutoAugment("imagenet")]),
    "mix-up": ("folder", "id image label", [SQUARE, FLOAT, penstock.MixUp(num_classes=3)]),
    "cut-mix": ("folder", "id image label", [SQUARE, FLOAT, penstock.CutMix(num_classes=3)]),
    "two fields together": ("pair", "id a b", [CROP]),
    "two entries": ("pair", "id a b", {"a": [CROP], "b": [CROP]}),
    "one entry of both": ("pair", "id a b", {("b", "a"): [CROP]}),
    "crops of chunks": ("zarr", "id image", [ARRAYS]),
    "crops of arrays": ("npy", "id x", [ARRAYS]),
    "map": ("parquet", "id", [_map("first"), _map("second")]),
}
CACHED = ("tar", "parquet", "npz", "zarr", "tokens", "table-pack", "wide-pack")
"""Sources whose cached form is kept."""


def grid(images: Any) -> list[str]:
    """Return means over 3 x 3 parts of each image, channel by channel, a line an image."""
    rows = np.array_split(np.asarray(images, np.float64), 3, axis=-2)
    parts = [[part.mean((-2, -1)) for part in np.array_split(row, 3, axis=-1)] for row in rows]
    means = np.moveaxis(np.rint(np.array(parts)).astype(int), (0, 1), (-2, -1))
    return [spaced(image) for image in means]


def described(batch: Any) -> dict[str, Any]:
    """Describe the fields of a batch: images by their grids, others as they are."""
    images = [name for name in ("image", "a", "b") if name in batch and batch[name].ndim == 4]
    rest = {name: _line(plain(value)) for name, value in batch.items() if name not in images}
    return rest | {f"{name}, pixels": grid(batch[name]) for name in images}


def _line(value: Any) -> str:
    text = str(value)
    return text if len(text) < 240 else f"{text[:200]} … {digest(value)}"


def drawn(name: str, material: Material) -> Any:
    """Record the first batch of two epochs, on a rank alone and on the second of two."""
    source, fields, recipe = RECIPES[name]
    found: dict[str, Any] = {}
    for epoch, rank, size in ((0, 0, 1), (4, 0, 1), (4, 1, 2)):
        settings = {**USUAL, "batch_size": 6 // size, "world": (rank, size), "max_bad": 0.9}
        opened = material.open(source, *fields.split())
        with loader(opened, augment=recipe, as_dict=True, **settings) as each:
            each.set_epoch(epoch)
            found[f"epoch {epoch}, rank {rank} of {size}"] = described(next(iter(each)))
    return found


class Pictures(torch.utils.data.Dataset[Any]):
    """A torch dataset of pictures whose colours identify their place."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, Any]:
        y, x = np.mgrid[0:20, 0:24]
        return index, np.stack([x * 8, y * 10, x * 0 + 30 * index], axis=-1).astype(np.uint8)


def occurrences(_: Material) -> Any:
    """Record repeats of a sample within an epoch: each has draws of its own."""
    torch.manual_seed(5)
    with loader(Pictures(), batch_size=6, augment=[CROP], sampler=[0, 0, 5, 0, 5, 3]) as each:
        return [described({"id": ids, "image": images}) for ids, images in each]


DRAWS: dict[str, Case] = {name: partial(drawn, name) for name in RECIPES}
DRAWS["occurrences"] = occurrences


def fields_of(name: str) -> list[str]:
    """Return the fields to select; none for all."""
    return STREET.split() if name in ("table", "table-pack") else []


def read(dataset: Any) -> dict[str, Any]:
    """Read all samples in the order of the index; describe each field, and bytes from a store."""
    has_images = any(isinstance(type, penstock.Image) for type in dataset.schema.values())
    recipe = [penstock.Resize((8, 8))] if has_images else None
    with loader(dataset, batch_size=99, augment=recipe, as_dict=True, seed=0) as each:
        found = [described(batch) for batch in each]
        return {"batches": found, "from the store": each.statistics().bytes_remote}


def contents(name: str, material: Material) -> dict[str, Any]:
    with material.open(name, *fields_of(name)) as dataset:
        return read(dataset)


CONTENTS: dict[str, Case] = {name: partial(contents, name) for name in SOURCES}
