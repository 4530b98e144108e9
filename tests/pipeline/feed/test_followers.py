"""Masks, boxes and their rows beside images, through the loader: exact at any batch, world, number
of threads and after a resume, and always where their pixels are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock import DataLoader, Order, World
from penstock.augment import (
    ColorJitter,
    Normalize,
    Pad,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    SanitizeBoxes,
)
from penstock.cache import RecipeError
from penstock.readers.fieldtypes import Array, Boxes, FieldType, Image, Keypoints, Mask
from tests.pipeline.feed.memory import Memory

N, SIDE = 24, 32
TYPES: dict[str, FieldType] = {
    "image": Image(),
    "right": Image(),
    "mask": Mask(of="image", dtype="uint8"),
    "boxes": Boxes(of="image"),
    "classes": Array("int64", (None,), of="boxes"),
    "points": Keypoints(of="image"),
}
FIELDS = ("id", "boxes", "mask", "image", "right", "points", "classes")
# Bright rectangles of 4 to 14 pixels a side, whose number is their brightness; some have none.
PLACES = np.random.default_rng(2).integers(0, SIDE - 14, (N, 2, 2))
SIDES = np.random.default_rng(3).integers(4, 14, (N, 2, 2))
COUNTS = np.arange(N) % 3
WINDOWS: list[Any] = [RandomCrop(SIDE, padding=6), RandomHorizontalFlip(), RandomVerticalFlip()]
EXACT: list[Any] = [*WINDOWS, SanitizeBoxes(min_area=40)]
BLENDED: list[Any] = [
    RandomResizedCrop(20, scale=(0.3, 1)),
    RandomHorizontalFlip(),
    ColorJitter(0.1),
    RandomVerticalFlip(),
    Normalize(),
    RandomErasing(),
    SanitizeBoxes(),
]


def picture(i: int) -> np.ndarray[Any, Any]:
    shown = np.full((SIDE, SIDE), 1, np.uint8)
    for box in range(COUNTS[i]):
        (y, x), (height, width) = PLACES[i, box], SIDES[i, box]
        shown[y : y + height, x : x + width] = 100 + 50 * box
    return shown


def corners(i: int) -> np.ndarray[Any, Any]:
    ends = PLACES[i] + SIDES[i]
    return np.concatenate([PLACES[i, :, ::-1], ends[:, ::-1]], axis=1)[: COUNTS[i]].astype(float)


COLUMNS: dict[str, list[Any]] = {
    "image": [np.stack([picture(i)] * 3, axis=2) for i in range(N)],
    "right": [np.stack([255 - picture(i)] * 3, axis=2) for i in range(N)],
    "mask": [picture(i) for i in range(N)],
    "boxes": [corners(i).astype(np.float32) for i in range(N)],
    "classes": [np.arange(COUNTS[i]) * 50 + 100 for i in range(N)],
    "points": [corners(i)[:, :2].astype(np.float32) for i in range(N)],
}


def memory(*fields: str) -> Memory:
    return Memory(TYPES, COLUMNS, fields=fields or FIELDS)


def samples(batches: list[Any], *fields: str) -> dict[int, list[Any]]:
    """Return the output of each sample, by id."""
    fields = fields or FIELDS
    found = {}
    for batch in batches:
        values = [list(value) for value in batch]
        for row, sample_id in enumerate(values[fields.index("id")]):
            found[int(sample_id)] = [value[row] for value in values]
    return found


def seen(augment: Any, *, world: int = 1, **options: Any) -> dict[int, list[Any]]:
    """An epoch of all ranks."""
    found: dict[int, list[Any]] = {}
    for rank in range(world):
        arguments = {
            "batch_size": 4,
            "shuffle": True,
            "seed": 5,
            "order": Order(lanes=12),
            **options,
        }
        if world > 1:
            arguments |= {"world": World(rank, world), "drop_last": True}
        with DataLoader(memory(), augment=augment, **arguments) as loader:
            found |= samples(list(loader))
    return found


def assert_same(ours: dict[int, list[Any]], theirs: dict[int, list[Any]]) -> None:
    assert sorted(ours) == sorted(theirs) == list(range(N))
    for sample_id, values in ours.items():
        for a, b in zip(values, theirs[sample_id], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("augment", [EXACT, BLENDED], ids=["exact", "blended"])
def test_a_sample_is_the_same_however_it_is_loaded(augment: Any) -> None:
    one = seen(augment)
    assert_same(one, seen(augment, batch_size=7, num_workers=3))
    assert_same(one, seen(augment, batch_size=1, prefetch_factor=1))
    assert_same(one, seen(augment, world=3))
    other = seen(augment, seed=6)
    assert any(not torch.equal(one[i][3], other[i][3]) for i in range(N))


@pytest.mark.parametrize("step", [0, 1, 4])
def test_a_resumed_epoch_goes_on_with_the_same(step: int) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 5, "augment": EXACT}
    with DataLoader(memory(), **options) as loader:
        walk = iter(loader)
        for _ in range(step):
            next(walk)
        state = loader.state_dict()
        rest = samples(list(walk))
    with DataLoader(memory(), **options) as loader:
        loader.load_state_dict(state)
        again = samples(list(loader))
    assert again.keys() == rest.keys()
    for sample_id, values in rest.items():
        for a, b in zip(values, again[sample_id], strict=True):
            assert torch.equal(a, b)


def test_they_are_where_their_pixels_are() -> None:
    dropped = 0
    for sample_id, values in seen(EXACT).items():
        _, boxes, mask, image, right, points, classes = values
        assert torch.equal(image[0], mask)
        # a window of the other image as well, which shows black beside itself too
        assert torch.equal(torch.where(mask > 0, 255 - right[0], 0), mask)
        assert len(points) == COUNTS[sample_id]
        assert len(boxes) == len(classes) <= COUNTS[sample_id]
        dropped += int(COUNTS[sample_id]) - len(boxes)
        for (left, top, end, bottom), number in zip(boxes.tolist(), classes, strict=True):
            assert (end - left) * (bottom - top) >= 40
            rows, columns = np.nonzero((mask == number).numpy())
            if number == 150 or COUNTS[sample_id] == 1:  # no other one lies over it
                found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
                assert found == [left, top, end, bottom]
    assert dropped


def test_boxes_may_be_padded_to_a_tensor() -> None:
    recipe = [*EXACT, Pad("boxes", to=3, value=-1), Pad("classes", to=3, value=-100)]
    options: dict[str, Any] = {"batch_size": 6, "shuffle": True, "seed": 5, "augment": recipe}
    ragged = seen(EXACT)
    fields = ("id", "boxes", "classes", "image")
    with DataLoader(memory(*fields), **options) as loader:
        for ids, boxes, classes, _ in loader:
            assert boxes.shape == (6, 3, 4)
            for row, sample_id in enumerate(ids.tolist()):
                count = len(ragged[sample_id][1])
                assert torch.equal(boxes[row, :count], ragged[sample_id][1])
                assert (boxes[row, count:] == -1).all()
                assert classes[row].tolist()[count:] == [-100] * (3 - count)


@pytest.mark.parametrize("field", ["mask", "boxes", "points"])
def test_what_cannot_follow_is_said_when_the_loader_is_made(field: str) -> None:
    with pytest.raises(RecipeError, match=rf'RandAugment.*"{field}".*can\'t follow'):
        DataLoader(memory("image", field), batch_size=4, augment=[*WINDOWS, RandAugment()])
