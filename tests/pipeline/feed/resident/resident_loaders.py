"""Loaders with resident=, and their datasets."""

from __future__ import annotations

import functools
import io
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.augment import (
    CenterCrop,
    Decode,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    imagenet_eval,
    imagenet_train,
)
from penstock.pipeline import DataLoader, World
from penstock.readers import Dataset, ImageFacts, Rejection
from penstock.readers.fieldtypes import SampleBatch
from tests.conftest import SAMPLES, photograph

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from PIL import Image

    from penstock.readers.fieldtypes import SampleBatch
from penstock.readers import Encoded

FIELDS = ("image", "label", "id")


SIZE = 24


GREY = (Decode("gray"), Resize(28), CenterCrop(SIZE), Normalize((0.5,), (0.2,)))


GREY_TRAIN = (
    Decode("gray"),
    RandomResizedCrop(SIZE),
    RandomHorizontalFlip(),
    Normalize((0.5,), (0.2,)),
)


RECIPES = {
    "train": imagenet_train(SIZE),
    "eval": imagenet_eval(SIZE, resize=28),
    "grey": GREY,
    "grey train": GREY_TRAIN,
}


def make(path: Path, **options: Any) -> DataLoader:
    given: dict[str, Any] = {
        "batch_size": 1 if "global_batch_size" in options else 16,
        "shuffle": True,
        "seed": 7,
        "augment": RECIPES["train"],
        "num_workers": 2,
        **options,
    }
    return DataLoader(Dataset(str(path), fields=FIELDS), **given)


def bits(batches: Iterable[Any]) -> list[list[bytes]]:
    return [[tensor.numpy().tobytes() for tensor in batch] for batch in batches]


def epochs(path: Path, count: int, **options: Any) -> tuple[list[Any], list[Any]]:
    """All batches of some epochs; the state after each epoch, and the bad samples till then."""
    with make(path, **options) as loader:
        found = [
            (bits(loader), (loader.state_dict(), loader.statistics().bad)) for _ in range(count)
        ]
    return [batches for batches, _ in found], [told for _, told in found]


def read_batch(path: Path, ids: Sequence[int]) -> SampleBatch:
    dataset = Dataset(str(path), fields=FIELDS)
    starts, wanted = dataset.index.starts, np.array(ids, np.int64)
    shards = np.searchsorted(starts, wanted, side="right") - 1
    return dataset.read(np.stack([shards, wanted - starts[shards]], axis=1))


def reading(path: Path) -> Callable[..., SampleBatch]:
    return lambda ids, _: read_batch(path, ids.tolist())


def credulous(samples: Sequence[Encoded]) -> list[ImageFacts | Rejection]:
    """Believes anything to be an image of 200 x 240."""
    return [ImageFacts(height=200, width=240, channels=3, codec="jpeg") for _ in samples]


def encoded(image: Image.Image, codec: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, codec)
    return buffer.getvalue()


@functools.cache
def pixels_of_all() -> int:
    """Bytes of all photographs, RGB."""
    return sum(photograph(number).size for number in range(SAMPLES))


def room_options(
    mode: Any, *, device: str = "cpu", per_rank: int = 8, depth: int = 1, world: World | None = None
) -> Any:
    """Return the options of a loader that decide how much memory images may take."""
    return SimpleNamespace(
        resident=mode,
        device=torch.device(device),
        depth=depth,
        per_rank=per_rank,
        world=world or World(0, 1),
    )
