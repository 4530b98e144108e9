"""Samples of torch datasets keep their form around the images that DALI decodes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image as Picture

from penstock import DataLoader
from penstock.augment import LongestSide, Resize
from penstock.cache import ConfigError


class Pair(NamedTuple):
    label: int
    image: Any


class Grown(torch.utils.data.Dataset[Any]):
    """Two images a sample, each higher than the one before."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        shapes = (20 + index, 10, 3), (40 + index, 10, 3)
        pictures = [Picture.fromarray(np.full(shape, index, np.uint8)) for shape in shapes]
        return {"image": pictures[0], "other": pictures[1], "y": index}


class Samples(torch.utils.data.Dataset[Any]):
    def __init__(self, make: Any) -> None:
        self._make = make

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        pixels = np.full((12, 10, 3), index, np.uint8)
        return self._make(index, Picture.fromarray(pixels))


def pair(index: int, image: Any) -> Any:
    return Pair(index, image)


def ordered(index: int, image: Any) -> Any:
    return {"first": index, "image": image, "x": image, "last": index}


def first_batch(make: Any, **options: Any) -> Any:
    with DataLoader(Samples(make), augment=[Resize((8, 8))], **options) as loader:
        return next(iter(loader))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batch_size", [2, None])
def test_a_named_tuple_stays_one(batch_size: int | None, workers: int) -> None:
    found = first_batch(pair, batch_size=batch_size, num_workers=workers)
    assert isinstance(found, Pair)
    assert found.image.shape[-3:] == (3, 8, 8)
    assert torch.equal(
        torch.as_tensor(found.label).reshape(-1)[:1], torch.zeros(1, dtype=torch.int64)
    )


def test_a_collate_function_of_the_users_gives_what_it_wants() -> None:
    found = first_batch(pair, batch_size=2, collate_fn=lambda rest: [rest, rest])
    assert type(found) is list
    assert found[1].shape == (2, 3, 8, 8)


@pytest.mark.parametrize("seed", [None, 3])
def test_images_of_different_sizes_come_as_lists(seed: int | None) -> None:
    options: Any = {} if seed is None else {"seed": seed}
    with DataLoader(Grown(), 2, augment=[Resize(shorter=5, max_size=99)], **options) as loader:
        for batch in loader:
            for name, least in (("image", 20), ("other", 40)):
                found = batch[name]
                wanted = [(3, (least + y) // 2, 5) for y in batch["y"].tolist()]
                assert type(found) is list
                assert [tuple(image.shape) for image in found] == wanted
                assert [image.unique().tolist() for image in found] == batch["y"][:, None].tolist()
    with DataLoader(Grown(), batch_size=None, augment=[LongestSide(20)]) as loader:
        assert next(iter(loader))["other"].shape == (3, 20, 5)


def test_a_size_for_each_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="works on native datasets"):
        DataLoader(Grown(), 2, augment=[LongestSide((8, 16), per="batch")])


def test_a_dict_keeps_the_order_of_its_keys() -> None:
    assert list(first_batch(ordered, batch_size=2)) == ["first", "image", "x", "last"]


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda i, image: {"inputs": {"image": image}, "y": i}, "inside 'inputs', a dict"),
        (lambda i, image: {"views": [image, image], "y": i}, "inside 'views', a list"),
        (lambda i, image: (i, ({"a": [image]},)), "inside 1, a tuple"),
    ],
)
def test_an_image_inside_of_another_container_is_named(make: Any, where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        first_batch(make, batch_size=2)
