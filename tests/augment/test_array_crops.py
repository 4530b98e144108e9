"""Test crops of arrays: valid recipes, and where the crops begin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.augment import (
    ArrayDraws,
    CenterCrop,
    RandomCrop,
    Uniform,
    check_array_crops,
    cropped_schema,
    is_array_crop,
)
from penstock.cache import RecipeError
from penstock.cache.base import keyed_hash
from penstock.readers.fieldtypes import (
    Array,
    Boxes,
    ColumnCrop,
    DenseColumn,
    FieldType,
    Image,
    RaggedColumn,
    SampleBatch,
    Schema,
    Value,
    cropped,
)

SCHEMA = Schema(
    {
        "x": Array("float32", (2, 12, 10)),
        "y": Array("uint8", (12, 10)),
        "r": Array("int32", (None, 10)),
        "n": Value("int64"),
    }
)
IMAGES = Schema({"image": Image(), "depth": Array("float32", (12, 10))})


def crops(recipe: Any, schema: Schema = SCHEMA, fields: Any = None) -> dict[str, Any]:
    return check_array_crops(recipe, schema, tuple(schema) if fields is None else fields)


def test_a_crop_has_lengths_of_the_last_axes() -> None:
    found = crops([RandomCrop((8, None), fields=("x", "y"))])
    assert {name: crop.shape for name, crop in found.items()} == {"x": (2, 8, 10), "y": (8, 10)}
    schema = cropped_schema(SCHEMA, found)
    assert schema["x"] == Array("float32", (2, 8, 10))
    assert schema["r"] == SCHEMA["r"]
    assert {name: each.shape for name, each in crops([RandomCrop(4)]).items()} == {
        "x": (2, 4, 4),
        "y": (4, 4),
        "r": (4, 4),
    }
    assert list(crops([CenterCrop((1, 4, 4))])) == ["x"]
    assert list(crops({"y": [RandomCrop(3)], "x": [CenterCrop(2, fields="x")]})) == ["y", "x"]


def test_images_are_cropped_where_there_are_some() -> None:
    assert crops([RandomCrop(8)], IMAGES) == {}
    assert list(crops([RandomCrop(8, fields=("image", "depth"))], IMAGES)) == ["depth"]
    assert is_array_crop(RandomCrop(8, fields="depth"), None, IMAGES, tuple(IMAGES))
    for op in (RandomCrop(8), RandomCrop(8, fields=("image", "depth")), "else"):
        assert not is_array_crop(op, None, IMAGES, tuple(IMAGES))


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ([RandomCrop((2, 13, 5), fields="x")], 'can\'t crop "x".*smaller shape'),
        ([RandomCrop((8, 8, 8, 8), fields="x")], "4 lengths for the last axes"),
        ([RandomCrop(4), CenterCrop(4, fields="y")], 'both crop "y"'),
        ([RandomCrop(4, padding=1, fields="x")], "only images can be padded"),
        ([RandomCrop((None, 4), fields="r")], "differ in length along axis 0.*pass a length"),
        ([RandomCrop((1, 1, 1, 1))], "no selected array has 4 axes"),
    ],
)
def test_crops_that_dont_fit_are_refused(recipe: Any, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        crops(recipe)


def test_fields_of_one_crop_have_one_corner() -> None:
    types: dict[str, FieldType] = {"a": Array("uint8", (8, 6)), "b": Array("uint8", (8, 7))}
    with pytest.raises(RecipeError, match="crops the same part of all its fields"):
        crops([RandomCrop(4)], Schema(types))
    assert list(crops([RandomCrop((4, None))], Schema(types))) == ["a", "b"]
    rows: dict[str, FieldType] = {
        "image": Image(),
        "boxes": Boxes(of="image", format="xyxy"),
        "kept": Array("int64", (None,), of="boxes"),
    }
    with pytest.raises(RecipeError, match="follows them"):
        crops([RandomCrop((1,), fields="kept")], Schema(rows))


@pytest.mark.parametrize(
    "size", [0, (), (0, 4), (4, -1), "ab", (1.5, 2), True, (None, True), [[1]]]
)
@pytest.mark.parametrize("kind", [RandomCrop, CenterCrop])
def test_a_size_is_checked_at_birth(kind: Any, size: Any) -> None:
    with pytest.raises(RecipeError, match=rf"{kind.__name__}\(size=\.\.\.\)"):
        kind(size)


@given(
    ids=st.lists(st.integers(0, 2**40), min_size=1, max_size=9),
    seed=st.integers(0, 2**32),
    epoch=st.integers(0, 99),
)
def test_a_draw_is_the_samples_own_and_all_fields(ids: list[int], seed: int, epoch: int) -> None:
    draws = ArrayDraws(crops=crops([RandomCrop((7, 4), fields=("x", "y"))]), seed=seed)
    whole = draws.before(np.array(ids), epoch)
    assert (whole["x"].corners[:, 1:] == whole["y"].corners).all()
    assert (whole["x"].corners[:, 0] == 0).all()
    assert (whole["y"].corners >= 0).all()
    assert (whole["y"].corners <= (5, 6)).all()
    alone = [draws.before(np.array([sample]), epoch)["y"].corners[0].tolist() for sample in ids]
    assert whole["y"].corners.tolist() == alone
    # The window of an image of that size.
    size, base = np.full(len(ids), 12), keyed_hash(seed, epoch, np.array(ids))
    op = RandomCrop((7, 4))
    top, left, _, _ = op.window(size, np.full(len(ids), 10), Uniform(base, 1))
    assert whole["y"].corners.tolist() == np.stack([top, left], axis=1).tolist()


def test_every_place_is_drawn_and_none_more_often() -> None:
    draws = ArrayDraws(crops=crops([RandomCrop((9, 10), fields="y")]), seed=1)
    corners = draws.before(np.arange(8000), 3)["y"].corners
    counts = np.bincount(corners[:, 0], minlength=4)
    assert len(counts) == 4
    assert (np.abs(counts - 2000) < 200).all()
    assert (draws.before(np.arange(8000), 4)["y"].corners != corners).any()
    middle = ArrayDraws(crops=crops([CenterCrop((9, 5), fields="y")]), seed=1)
    assert not middle.is_random
    assert middle.before(np.arange(3), 0)["y"].corners.tolist() == [[2, 2]] * 3  # as torchvision


def test_arrays_of_several_shapes_are_cropped_once_they_are_read() -> None:
    samples = [np.arange(rows * 10, dtype=np.int32).reshape(rows, 10) for rows in (9, 4, 7, 3, 0)]
    offsets = np.cumsum([0, *map(len, samples)])
    column = RaggedColumn(np.concatenate(samples), offsets)
    content = SampleBatch(
        ids=np.arange(5),
        columns={"r": column},
        present={"r": np.array([True, True, True, True, False])},
    )
    draws = ArrayDraws(crops=crops([RandomCrop((4, 6), fields="r")]), seed=2)
    assert draws.before(content.ids, 0) == {}
    bad: dict[int, str] = {}
    found = draws.after(content, 0, bad).columns["r"]
    assert isinstance(found, DenseColumn)
    assert bad == {3: '"r" has the shape (3, 10), and the recipe crops parts of shape (4, 6)'}
    for row in range(3):
        top, left = found.values[row, 0, 0] // 10, found.values[row, 0, 0] % 10
        assert (found.values[row] == samples[row][top : top + 4, left : left + 6]).all()
    assert not found.values[3:].any()


def test_a_part_is_taken_of_each_sample_of_a_column() -> None:
    values = np.arange(60).reshape(3, 4, 5)
    crop = ColumnCrop(np.array([[0, 0], [1, 2], [2, 3]]), (2, 2))
    found = cropped(DenseColumn(values), crop).values
    for row, (top, left) in enumerate(crop.corners.tolist()):
        assert (found[row] == values[row, top : top + 2, left : left + 2]).all()
    assert crop.take(np.array([2])).corners.tolist() == [[2, 3]]
