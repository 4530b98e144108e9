"""Masks, boxes and points go where torchvision.transforms.v2 takes them, with the same numbers.

Torchvision's functions get the windows and flips that were drawn here, one sample at a time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.augment import (
    OUTSIDE,
    CenterCrop,
    ColorJitter,
    CropMove,
    FlipMove,
    ImageMoves,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Resize,
    ScaleMove,
    check_recipe,
    draw,
    draw_with_moves,
    imagenet_eval,
    imagenet_train,
    index_maps,
    move_boxes,
    move_masks,
    move_points,
)
from penstock.cache import DatasetError
from penstock.readers import ImageRange

if TYPE_CHECKING:
    from numpy.typing import NDArray

SIZES = ImageRange(min_height=5, max_height=90, min_width=5, max_width=90)
RECIPES: dict[str, Any] = {
    "train": imagenet_train(32),
    "eval": imagenet_eval(24, resize=30),
    "resize": (Resize((17, 31)),),
    "short side": (Resize(20), CenterCrop((20, 19))),
    "flip first": (RandomHorizontalFlip(), RandomResizedCrop((30, 40)), Normalize()),
    "flip and resize": (RandomHorizontalFlip(), Resize((13, 29)), RandomHorizontalFlip()),
    "long": (Resize(64), RandomResizedCrop(32), RandomHorizontalFlip(), CenterCrop(20), Resize(9)),
    "padded": (RandomCrop((48, 44), padding=25), RandomVerticalFlip(), Normalize()),
    "padded again": (
        RandomHorizontalFlip(),
        CenterCrop(5),
        RandomVerticalFlip(),
        RandomCrop((9, 8), padding=3),
        RandomHorizontalFlip(),
        Resize(31),
    ),
    "late flips": (
        RandomVerticalFlip(),
        RandomResizedCrop(16),
        RandomHorizontalFlip(),
        ColorJitter(0.2),
        RandomHorizontalFlip(),
        RandomRotation(0),
        RandomHorizontalFlip(0.7),
        RandomVerticalFlip(0.7),
    ),
}
sides = st.tuples(st.integers(5, 90), st.integers(5, 90))


def moves_of(
    recipe: Any, dims: Any, *, ids: Any = None, seed: int = 3, epoch: int = 5
) -> tuple[dict[str, NDArray[Any]], ImageMoves]:
    dims = np.asarray(dims, np.int32).reshape(-1, 2)
    ids = np.arange(len(dims)) if ids is None else np.asarray(ids)
    checked = check_recipe(recipe, images=SIZES)
    return draw_with_moves(checked, ids=ids, dims=dims, seed=seed, epoch=epoch)


def masks_of(dims: Any) -> list[NDArray[np.int32]]:
    """Every pixel another number."""
    return [np.arange(h * w, dtype=np.int32).reshape(h, w) for h, w in dims]


KINDS = ("resize", "short", "center", "random", "padded", "window", "flip", "turn")


@st.composite
def recipes(draw: st.DrawFn) -> tuple[Any, ...]:
    """Crops, resizes and flips in any order that fits images of 5 pixels and more."""
    ops: list[Any] = []
    known: tuple[int, int] | None = None  # height and width, once they are the same for all
    is_padded = False
    for _ in range(draw(st.integers(0, 6))):
        height, width = (max(side, 4) for side in known or (5, 5))
        # Not less than 4 pixels: torchvision counts in float32, and enlarges its rounding.
        size = draw(st.integers(4, height)), draw(st.integers(4, width))
        other = draw(st.integers(5, 60)), draw(st.integers(5, 60))
        kind = draw(
            st.sampled_from(
                ["resize", "short", "center", "random", "padded", "window", "flip", "turn"]
            )
        )
        if kind == "resize":
            ops.append(Resize(other))
            known = other
        elif kind == "short":
            ops.append(Resize(draw(st.integers(5, 60))))
            known = None
        elif kind == "window":
            ops.append(RandomResizedCrop(other))
            known = other
        elif kind in ("center", "random"):
            ops.append(CenterCrop(size) if kind == "center" else RandomCrop(size))
            known = size
        elif kind == "padded" and not is_padded:
            padding = draw(st.integers(1, 9))
            known = size[0] + 2 * padding - 1, size[1] + padding
            ops.append(RandomCrop(known, padding=padding))
            is_padded = True
        else:
            flip = RandomHorizontalFlip if kind == "flip" else RandomVerticalFlip
            ops.append(flip(draw(st.sampled_from([0.5, 1.0]))))
    return tuple(ops) if known else (*ops, Resize(draw(sides)))


any_images = st.lists(sides, min_size=1, max_size=6)
seeds = st.integers(0, 2**40)


@pytest.mark.parametrize("name", RECIPES)
@given(dims=any_images, seed=seeds)
@settings(max_examples=20, deadline=None)
def test_they_go_where_torchvision_takes_them(
    name: str, dims: list[tuple[int, int]], seed: int
) -> None:
    _as_torchvision_moves(RECIPES[name], dims, seed)


@given(recipe=recipes(), dims=any_images, seed=seeds)
@settings(max_examples=100, deadline=None)
def test_any_recipe_goes_where_torchvision_takes_it(
    recipe: Any, dims: list[tuple[int, int]], seed: int
) -> None:
    _as_torchvision_moves(recipe, dims, seed)


def _as_torchvision_moves(recipe: Any, dims: list[tuple[int, int]], seed: int) -> None:
    torch = pytest.importorskip("torch")
    tv_tensors: Any = pytest.importorskip("torchvision.tv_tensors")
    reference: Any = pytest.importorskip("torchvision.transforms.v2.functional")
    _, moves = moves_of(recipe, dims, seed=seed)
    rng = np.random.default_rng(seed)
    boxes = np.sort(rng.uniform(-0.1, 1.1, (len(dims), 7, 2, 2)), axis=2)
    points = rng.uniform(-0.1, 1.1, (len(dims), 5, 2))
    scales = np.array(dims)[:, None, ::-1]
    boxes = (boxes * scales[:, None]).reshape(-1, 4).astype(np.float32)
    points = (points * scales).reshape(-1, 2).astype(np.float32)
    owners = [np.repeat(np.arange(len(dims)), count) for count in (7, 5)]
    found = (
        move_masks(moves, masks_of(dims)),
        move_boxes(moves, boxes, owners[0]).reshape(-1, 7, 4),
        move_points(moves, points, owners[1]).reshape(-1, 5, 2),
    )
    for row, (height, width) in enumerate(dims):
        values = (
            tv_tensors.Mask(torch.from_numpy(masks_of(dims)[row])),
            tv_tensors.BoundingBoxes(
                torch.from_numpy(boxes.reshape(-1, 7, 4)[row]),
                format="XYXY",
                canvas_size=(height, width),
            ),
            tv_tensors.KeyPoints(
                torch.from_numpy(points.reshape(-1, 5, 2)[row]), canvas_size=(height, width)
            ),
        )
        wanted = [_by_torchvision(reference, value, moves, row) for value in values]
        wanted[1] = reference.clamp_bounding_boxes(wanted[1])  # where nothing has cropped
        np.testing.assert_array_equal(found[0][row], wanted[0].numpy())
        for ours, theirs in zip(found[1:], wanted[1:], strict=True):
            np.testing.assert_allclose(ours[row], theirs.numpy(), atol=1e-3, rtol=1e-6)


def _by_torchvision(reference: Any, value: Any, moves: ImageMoves, row: int) -> Any:
    for move in moves.moves:
        if isinstance(move, CropMove):
            window = (move.top, move.left, move.height, move.width)
            value = reference.crop(value, *(int(each[row]) for each in window))
        elif isinstance(move, ScaleMove):
            value = reference.resize(value, [int(side[row]) for side in move.to])
        elif move.on[row]:
            flip = reference.vertical_flip if move.vertical else reference.horizontal_flip
            value = flip(value)
    return value


@pytest.mark.parametrize("name", RECIPES)
def test_the_images_draw_the_same_numbers(name: str) -> None:
    dims = [(40, 50), (33, 71), (90, 5)]
    inputs, moves = moves_of(RECIPES[name], dims)
    checked = check_recipe(RECIPES[name], images=SIZES)
    alone = draw(checked, ids=np.arange(3), dims=np.array(dims, np.int32), seed=3, epoch=5)
    assert inputs.keys() == alone.keys()
    for key, values in inputs.items():
        np.testing.assert_array_equal(values, alone[key])
    assert moves.shape == checked.shape[1:]


@pytest.mark.parametrize("name", RECIPES)
@given(data=st.data(), dims=st.lists(sides, min_size=1, max_size=9))
@settings(max_examples=15, deadline=None)
def test_a_sample_moves_the_same_in_any_batch(
    name: str, data: st.DataObject, dims: list[tuple[int, int]]
) -> None:
    count = len(dims)
    ids = np.array(data.draw(st.lists(st.integers(0, 2**62), min_size=count, max_size=count)))
    keep = np.array(data.draw(st.permutations(range(count))))
    keep = keep[: data.draw(st.integers(1, count))]
    whole = move_masks(moves_of(RECIPES[name], dims, ids=ids)[1], masks_of(dims))
    some = [dims[row] for row in keep]
    part = move_masks(moves_of(RECIPES[name], some, ids=ids[keep])[1], masks_of(some))
    np.testing.assert_array_equal(whole[keep], part)


def one_image(*moves: Any, size: tuple[int, int], shape: tuple[int, int]) -> ImageMoves:
    return ImageMoves(size=ints(*size), moves=moves, shape=shape)


def ints(*values: int) -> Any:
    return tuple(np.array([value]) for value in values)


def test_a_window_that_reaches_outside_shows_nothing_there() -> None:
    top, left, height, width = ints(-1, 1, 4, 3)
    crop = CropMove(size=ints(2, 3), top=top, left=left, height=height, width=width)
    flip = FlipMove(size=ints(4, 3), on=np.array([True]), vertical=True)
    moves = one_image(crop, flip, size=(2, 3), shape=(4, 3))
    moves = replace(moves, mask_fill=9)
    rows, columns = index_maps(moves)
    assert rows.tolist() == [[OUTSIDE, 1, 0, OUTSIDE]]
    assert columns.tolist() == [[1, 2, OUTSIDE]]
    mask = np.array([[1, 2, 3], [4, 5, 6]], np.uint8)
    assert move_masks(moves, [mask]).tolist() == [[[9, 9, 9], [5, 6, 9], [2, 3, 9], [9, 9, 9]]]
    boxes = move_boxes(moves, np.array([[1, 0, 3, 2], [-5, -5, 9, 9]]), np.zeros(2, np.int64))
    assert boxes.tolist() == [[0, 1, 2, 3], [0, 0, 3, 4]]
    assert move_points(moves, np.array([[1, 0]]), np.zeros(1, np.int64)).tolist() == [[0, 2]]


def test_nothing_to_move_is_fine() -> None:
    _, moves = moves_of(RECIPES["train"], [(40, 50), (33, 71)])
    none = np.zeros(0, np.int64)
    assert move_boxes(moves, np.zeros((0, 4)), none).shape == (0, 4)
    assert move_points(moves, np.zeros((0, 2)), none).shape == (0, 2)
    missing = np.zeros((0, 0), np.uint8)
    mask = np.full((40, 50), 7, np.uint8)
    found = move_masks(moves, [mask, missing])
    assert found.dtype == np.uint8
    assert (found[0] == 7).all()
    assert not found[1].any()
    _, nothing = moves_of(RECIPES["train"], np.zeros((0, 2)))
    assert move_masks(nothing, []).shape == (0, 32, 32)


def test_a_mask_of_another_size_is_an_error() -> None:
    _, moves = moves_of(RECIPES["train"], [(40, 50)])
    with pytest.raises(DatasetError, match=r"\(40, 51\).*40 x 50"):
        move_masks(moves, [np.zeros((40, 51), np.uint8)])


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_masks_keep_their_numbers(dtype: Any) -> None:
    _, moves = moves_of(RECIPES["resize"], [(40, 50)] * 2)
    masks = [np.full((40, 50), np.iinfo(dtype).max, dtype), np.zeros((40, 50), np.uint8)]
    found = move_masks(moves, masks)
    assert found.dtype == dtype
    assert (found[0] == np.iinfo(dtype).max).all()
    assert move_masks(moves, masks[1:] * 2, dtype=np.int64).dtype == np.int64
