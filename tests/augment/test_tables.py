"""Test that each operation is one class: public, checked, drawn and built by its own methods."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import augment
from penstock.augment import (
    Apply,
    AutoAugment,
    ColorJitter,
    GaussianBlur,
    Graph,
    GraphPlan,
    ImageOperation,
    ImageShape,
    Operation,
    RandAugment,
    RandomAffine,
    RandomAutocontrast,
    RandomEqualize,
    RandomErasing,
    RandomGrayscale,
    RandomPerspective,
    RandomPosterize,
    RandomRotation,
    Resize,
    Solarize,
    TrivialAugmentWide,
    check_recipe,
    input_kinds,
)
from penstock.cache import RecipeError
from penstock.readers import EncodedBatch, ImageRange
from tests.images import encoded_array

ONE_OF_EACH: list[ImageOperation] = [
    ColorJitter(0.4, 0.4, 0.4, 0.1),
    RandomGrayscale(),
    GaussianBlur(3),
    RandomPosterize(3),
    Solarize(99.5),
    RandomEqualize(),
    RandomAutocontrast(),
    RandomRotation(10),
    RandomAffine(10, (0.1, 0.2), (0.8, 1.2), (-5, 5, -3, 3)),
    RandomPerspective(),
    RandAugment(),
    TrivialAugmentWide(),
    AutoAugment(),
    Apply(lambda images, _: images),
    RandomErasing(),
]
COLOURED = (ColorJitter, RandomGrayscale, RandAugment, TrivialAugmentWide, AutoAugment)
SIZES = ImageRange(min_height=40, max_height=120, min_width=40, max_width=120)


def classes(of: type) -> dict[str, type]:
    """Return the classes of Penstock's operations by name, without base classes."""
    found = {of.__name__: of} if dataclasses.is_dataclass(of) else {}
    for each in list[type](of.__subclasses__()):
        found |= {name: kind for name, kind in classes(each).items() if hasattr(penstock, name)}
    return found


def test_there_is_one_of_each() -> None:
    assert {type(op).__name__ for op in ONE_OF_EACH} == set(classes(ImageOperation))


@pytest.mark.parametrize("name", sorted(classes(Operation)))
def test_each_operation_is_public(name: str) -> None:
    assert getattr(augment, name) is getattr(penstock, name)


@pytest.mark.parametrize("op", ONE_OF_EACH, ids=lambda op: type(op).__name__)
@pytest.mark.parametrize("color", ["rgb", "gray"])
@pytest.mark.parametrize("size", [1, 3])
def test_each_operation_works_on_colours_or_refuses_grey(
    op: ImageOperation, color: Any, size: int
) -> None:
    if color == "gray" and isinstance(op, COLOURED):
        with pytest.raises(RecipeError, match="needs colours"):
            op.check(ImageShape(24, 32, 1), "uint8")
        return
    recipe = check_recipe((augment.Decode(color), Resize((24, 32)), op), images=SIZES)
    picture = np.random.default_rng(0).integers(0, 256, (50, 60, 3), np.uint8)
    batch = EncodedBatch(
        ids=np.arange(size),
        encoded=[encoded_array(picture)] * size,
        dims=np.full((size, 2), (50, 60), np.int32),
    )
    draws = augment.draw(recipe, ids=batch.ids, dims=batch.dims, seed=1, epoch=0)
    for name, (dtype, dimensions) in input_kinds(recipe).items():
        assert draws[name].dtype == dtype
        assert draws[name].ndim == 1 + dimensions
        assert len(draws[name]) == size
        assert draws[name].flags.c_contiguous
    graph = Graph(GraphPlan(recipe, batch_size=size, threads=1))
    try:
        graph.feed(batch, draws)
        assert graph.outputs().shape == (size, 3 if color == "rgb" else 1, 24, 32)
    finally:
        graph.close()
