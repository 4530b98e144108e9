"""Each operation that changes pixels has all that one needs: a value, arguments from its draws, a
node, and its name in public.

Who adds an operation to `ops.Pixel` and forgets one of them fails here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pytest

import penstock
from penstock import augment
from penstock.augment import (
    DRAW_RULES,
    FLIP_INVARIANT,
    OPERATION_NODES,
    PIXEL_OPERATIONS,
    Apply,
    AutoAugment,
    ColorJitter,
    FieldOperation,
    GaussianBlur,
    GeometricOperation,
    GraphPlan,
    ImageShape,
    MixingOperation,
    Operation,
    PlacedOperation,
    RandAugment,
    RandomErasing,
    RandomGrayscale,
    RandomRotation,
    Resize,
    TrivialAugmentWide,
    argument_inputs,
    argument_values,
    check_recipe,
    define_outputs,
    load_dali,
    needs_colours,
)
from penstock.readers import ImageRange

if TYPE_CHECKING:
    from numpy.typing import NDArray

ONE_OF_EACH: dict[type, Any] = {
    ColorJitter: ColorJitter(0.4, 0.4, 0.4, 0.1),
    RandomGrayscale: RandomGrayscale(),
    GaussianBlur: GaussianBlur(3),
    RandomRotation: RandomRotation(10),
    RandAugment: RandAugment(),
    TrivialAugmentWide: TrivialAugmentWide(),
    AutoAugment: AutoAugment(),
    Apply: Apply(lambda images, _: images),
    RandomErasing: RandomErasing(),
}
# Operations on windows (`draws`) or on whole batches (`mixing`), or without draws (`nodes`).
ELSEWHERE = {
    *get_args(GeometricOperation),
    *get_args(MixingOperation),
    augment.Decode,
    augment.Normalize,
}
ELSEWHERE |= {augment.Cast, *get_args(FieldOperation), augment.Map}
SHAPE = ImageShape(24, 32, 3)
SIZES = ImageRange(min_height=40, max_height=120, min_width=40, max_width=120)


def uniform(count: int) -> NDArray[np.float64]:
    return np.random.default_rng(count).random((count, 5))


def test_each_operation_stands_in_each_table() -> None:
    wanted = {*PIXEL_OPERATIONS, RandomErasing}
    assert set(DRAW_RULES) == wanted
    assert set(OPERATION_NODES) == wanted
    assert set(ONE_OF_EACH) == wanted
    assert set(get_args(Operation)) == wanted | ELSEWHERE
    assert set(FLIP_INVARIANT) <= wanted


@pytest.mark.parametrize("kind", get_args(Operation))
def test_each_operation_is_public(kind: type) -> None:
    assert kind.__name__ in dir(augment)
    assert getattr(penstock, kind.__name__) is kind


@pytest.mark.parametrize("kind", DRAW_RULES)
def test_the_values_are_those_that_the_graph_expects(kind: type) -> None:
    placed = PlacedOperation(7, ONE_OF_EACH[kind])
    flipped = np.zeros(5, np.bool_)
    values = argument_values(placed, SHAPE, flipped=flipped, uniform=lambda _: uniform)
    inputs = argument_inputs(placed)
    assert inputs
    assert [name for name, _, _ in inputs] == list(values)
    for name, dtype, dimensions in inputs:
        assert name.startswith(f"{kind.__name__}7.")
        assert values[name].dtype == dtype
        assert values[name].ndim == 1 + dimensions
        assert len(values[name]) == 5
        assert values[name].flags.c_contiguous


@pytest.mark.parametrize("kind", OPERATION_NODES)
@pytest.mark.parametrize("color", ["rgb", "gray"])
def test_each_operation_has_a_graph(kind: type, color: Any) -> None:
    op = ONE_OF_EACH[kind]
    if color == "gray" and needs_colours(op):
        op = ColorJitter(0.4, 0.4) if kind is ColorJitter else None
    if op is None:
        assert needs_colours(ONE_OF_EACH[kind])
        return
    recipe = check_recipe((augment.Decode(color), Resize((24, 32)), op), images=SIZES)
    plan = GraphPlan(
        recipe=recipe,
        batch_size=2,
        threads=1,
        device="cpu",
        device_id=None,
        deterministic=False,
        check_headers=False,
        constant=False,
    )
    pipe = load_dali().Pipeline(
        batch_size=2, num_threads=1, device_id=None, prefetch_queue_depth=1, exec_dynamic=True
    )
    with pipe:
        pipe.set_outputs(*define_outputs(plan))
    pipe.build()
    operators = {operator.name for operator in pipe._ops}
    assert {name for name, _, _ in argument_inputs(PlacedOperation(2, op))} <= operators
