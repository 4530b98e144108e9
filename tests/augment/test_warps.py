"""Rotations, affine maps and perspectives: torchvision's formulas for pixels, masks, boxes, points.

The references are torchvision's (transforms/v2/functional/_geometry.py), sample by sample, on
float64.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.augment import (
    CenterCrop,
    CropMove,
    FlipMove,
    Graph,
    GraphPlan,
    ImageMoves,
    ImageShape,
    RandomAffine,
    RandomHorizontalFlip,
    RandomPerspective,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Resize,
    ScaleMove,
    WarpMove,
    check_recipe,
    draw,
    draw_with_moves,
)
from penstock.cache import RecipeError
from penstock.readers import EncodedBatch, ImageRange
from tests.conftest import photograph
from tests.images import encoded_array

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

HEIGHT, WIDTH, COUNT, FILL = 60, 80, 24, 9
FIXED = ImageRange(min_height=HEIGHT, max_height=HEIGHT, min_width=WIDTH, max_width=WIDTH)
SHAPE = ImageShape(HEIGHT, WIDTH, 3)

OPERATIONS: dict[str, Callable[..., Any]] = {
    "rotation": lambda **options: RandomRotation(70, **options),
    "affine": lambda **options: RandomAffine(
        40, (0.2, 0.3), (0.6, 1.5), (-20, 20, -10, 15), **options
    ),
    "perspective": lambda **options: RandomPerspective(0.7, 0.8, **options),
}


def inverse_affine(
    angle: float, translate: Any, scale: float, shear: Any, *, inverted: bool = True
) -> NDArray[np.float64]:
    """torchvision's _get_inverse_affine_matrix about the middle of the image."""
    cx, cy, (tx, ty) = WIDTH * 0.5, HEIGHT * 0.5, translate
    rot, sx, sy = math.radians(angle), math.radians(shear[0]), math.radians(shear[1])
    a = math.cos(rot - sy) / math.cos(sy)
    b = -math.cos(rot - sy) * math.tan(sx) / math.cos(sy) - math.sin(rot)
    c = math.sin(rot - sy) / math.cos(sy)
    d = -math.sin(rot - sy) * math.tan(sx) / math.cos(sy) + math.cos(rot)
    if inverted:
        m = [x / scale for x in (d, -b, 0.0, -c, a, 0.0)]
        m[2] += m[0] * (-cx - tx) + m[1] * (-cy - ty) + cx
        m[5] += m[3] * (-cx - tx) + m[4] * (-cy - ty) + cy
    else:
        m = [x * scale for x in (a, b, 0.0, c, d, 0.0)]
        m[2] += m[0] * -cx + m[1] * -cy + cx + tx
        m[5] += m[3] * -cx + m[4] * -cy + cy + ty
    return np.array([*m, 0, 0, 1]).reshape(3, 3)


def perspective_coefficients(start: Any, end: Any) -> NDArray[np.float64]:
    """torchvision's _get_perspective_coeffs: from points of the result to points of the image."""
    a, b = np.zeros((8, 8)), np.array(start, float).reshape(8)
    for i, (p1, p2) in enumerate(zip(end, start, strict=True)):
        a[2 * i] = [p1[0], p1[1], 1, 0, 0, 0, -p2[0] * p1[0], -p2[0] * p1[1]]
        a[2 * i + 1] = [0, 0, 0, p1[0], p1[1], 1, -p2[1] * p1[0], -p2[1] * p1[1]]
    return np.append(np.linalg.solve(a, b), 1.0).reshape(3, 3)


def mapped(points: Any, matrix: Any) -> NDArray[np.float64]:
    moved = np.concatenate([points, np.ones((len(points), 1))], axis=1) @ matrix.T
    return np.asarray(moved[:, :2] / moved[:, 2:])


def sampled(image: Any, matrix: Any, how: str, fill: float) -> NDArray[np.float64]:
    """grid_sample of an image (h, w, c) at the mapped middles of pixels, padded with `fill`."""
    height, width = image.shape[:2]
    y, x = np.mgrid[:height, :width]
    x, y = mapped(np.stack([x.ravel() + 0.5, y.ravel() + 0.5], axis=1), matrix).T - 0.5
    padded = np.pad(image.astype(float), ((1, 1), (1, 1), (0, 0)), constant_values=fill)

    def at(rows: Any, columns: Any) -> Any:
        rows, columns = (np.clip(k + 1, 0, n + 1) for k, n in ((rows, height), (columns, width)))
        return padded[rows.astype(int), columns.astype(int)]

    if how == "nearest":
        return np.asarray(at(np.rint(y), np.rint(x)).reshape(image.shape))
    top, left = np.floor(y), np.floor(x)
    down, across = (y - top)[:, None], (x - left)[:, None]
    above = at(top, left) * (1 - across) + at(top, left + 1) * across
    below = at(top + 1, left) * (1 - across) + at(top + 1, left + 1) * across
    return np.asarray((above * (1 - down) + below * down).reshape(image.shape))


def run(recipe: Any, pictures: Any) -> tuple[NDArray[Any], ImageMoves]:
    checked = check_recipe(recipe, images=FIXED)
    count = len(pictures)
    dims = np.full((count, 2), (HEIGHT, WIDTH), np.int32)
    draws, moves = draw_with_moves(checked, ids=np.arange(count), dims=dims, seed=3, epoch=1)
    graph = Graph(GraphPlan(checked, batch_size=count, threads=2))
    try:
        encoded = [encoded_array(picture) for picture in pictures]
        graph.feed(EncodedBatch(ids=np.arange(count), encoded=encoded, dims=dims), draws)
        return graph.outputs().numpy().transpose(0, 2, 3, 1), moves
    finally:
        graph.close()


def pictures() -> list[Any]:
    from PIL import Image

    found = [Image.fromarray(photograph(k)).resize((WIDTH, HEIGHT)) for k in range(COUNT)]
    return [np.asarray(each) for each in found]


@pytest.mark.parametrize("how", ["nearest", "bilinear"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_pixels_are_torchvisions(name: str, how: str) -> None:
    images = pictures()
    done, moves = run((OPERATIONS[name](interpolation=how, fill=FILL),), images)
    (warp,) = moves.moves
    assert isinstance(warp, WarpMove)
    for row, image in enumerate(images):
        gap = np.abs(done[row] - sampled(image, warp.matrix[row], how, FILL)).max(axis=-1)
        if how == "nearest":  # pixels whose source lies between two may come from the neighbour
            assert (gap > 0).mean() < 0.005
        else:  # DALI's weights have 5 bits in perspectives
            assert gap.max() <= 12
            assert (gap > 4).mean() < 0.02


def test_affine_matrices_are_torchvisions() -> None:
    op = RandomAffine((-170, 170), (0.3, 0.2), (0.5, 2), (-30, 30, -20, 20))
    numbers = np.random.default_rng(1).random((6, 50))
    found = op.draw(lambda _: numbers, SHAPE)["matrix"]
    for row in range(50):
        angle, x, y, scale, shear_x, shear_y = numbers[:, row]
        wanted = inverse_affine(
            -170 + 340 * angle,
            (round((2 * x - 1) * 0.3 * WIDTH), round((2 * y - 1) * 0.2 * HEIGHT)),
            0.5 + 1.5 * scale,
            (-30 + 60 * shear_x, -20 + 40 * shear_y),
        )
        np.testing.assert_allclose(found[row], wanted, rtol=1e-9, atol=1e-9)


def test_an_affine_map_without_ranges_is_a_rotation() -> None:
    numbers = np.random.default_rng(1).random((6, 50))
    turned = RandomAffine(30).draw(lambda _: numbers, SHAPE)["matrix"]
    angle = RandomRotation(30).draw(lambda _: -1 * numbers + 1, SHAPE)
    wanted = RandomRotation(30).geometry(angle, SHAPE)
    np.testing.assert_allclose(turned, wanted, atol=1e-9)
    still = RandomAffine((0, 0)).draw(lambda _: numbers, SHAPE)["matrix"]
    np.testing.assert_array_equal(still, np.broadcast_to(np.eye(3), still.shape))


def test_perspectives_are_torchvisions() -> None:
    op = RandomPerspective(0.4, 0.5)
    numbers = np.random.default_rng(1).random((9, 400))
    values = op.draw(lambda _: numbers, SHAPE)
    np.testing.assert_array_equal(values["on"], numbers[0] < 0.5)
    w, h = int(0.4 * (WIDTH // 2)) + 1, int(0.4 * (HEIGHT // 2)) + 1
    start = [[0, 0], [WIDTH - 1, 0], [WIDTH - 1, HEIGHT - 1], [0, HEIGHT - 1]]
    low = np.array([[0, 0], [WIDTH - w, 0], [WIDTH - w, HEIGHT - h], [0, HEIGHT - h]])
    for row in range(400):
        end = low + np.floor(numbers[1:, row].reshape(4, 2) * (w, h))
        wanted = perspective_coefficients(start, end)
        np.testing.assert_allclose(values["matrix"][row], wanted, rtol=1e-6, atol=1e-6)


def test_corners_that_coincide_are_no_error() -> None:
    op = RandomPerspective(1.0, 1.0)
    shape = ImageShape(2, 2, 3)
    values = op.draw(lambda count: np.full((count, 3), 0.99), shape)
    assert np.isfinite(values["matrix"]).all()
    size = np.full((2, 3), 2)
    moves = ImageMoves(
        size=(size[0], size[1]),
        moves=(WarpMove(size=size, matrix=values["matrix"]),),
        sizes=size,
        canvas=(2, 2),
    )
    assert np.isfinite(moves.move_boxes(np.ones((3, 4)), np.arange(3))).all()


@pytest.mark.parametrize("name", OPERATIONS)
def test_masks_boxes_and_points_are_torchvisions(name: str) -> None:
    recipe = check_recipe((OPERATIONS[name](mask_fill=255),), images=FIXED)
    dims = np.full((COUNT, 2), (HEIGHT, WIDTH), np.int32)
    _, moves = draw_with_moves(recipe, ids=np.arange(COUNT), dims=dims, seed=5, epoch=0)
    (warp,) = moves.moves
    assert isinstance(warp, WarpMove)
    rng = np.random.default_rng(2)
    masks = list(rng.integers(0, 200, (COUNT, HEIGHT, WIDTH), dtype=np.uint8))
    corners = np.sort(rng.uniform(0, 1, (COUNT, 2, 2)), axis=1) * (WIDTH, HEIGHT)
    points = rng.uniform(0, 1, (COUNT, 2)) * (WIDTH, HEIGHT)
    owner = np.arange(COUNT)
    moved = (
        moves.move_masks(masks),
        moves.move_boxes(corners, owner),
        moves.move_points(points, owner),
    )
    for row in range(COUNT):
        matrix = warp.matrix[row]
        wanted = sampled(masks[row][..., None], matrix, "nearest", 255)[..., 0]
        assert (moved[0][row] == wanted).mean() > 0.999  # sources between two pixels
        (left, top), (right, bottom) = corners[row]
        box = [[left, top], [right, top], [right, bottom], [left, bottom]]
        forward = np.linalg.inv(matrix)
        around = mapped(box, forward)
        clipped = np.clip([*around.min(axis=0), *around.max(axis=0)], 0, [WIDTH, HEIGHT] * 2)
        np.testing.assert_allclose(moved[1][row], clipped, atol=1e-3)
        np.testing.assert_allclose(
            moved[2][row], mapped(points[row : row + 1], forward)[0], rtol=1e-4
        )


def test_boxes_of_an_affine_map_are_moved_by_torchvisions_forward_matrix() -> None:
    arguments: Any = (25.0, (7, -4), 1.3, (10.0, -5.0))
    forward, back = inverse_affine(*arguments, inverted=False), inverse_affine(*arguments)
    np.testing.assert_allclose(forward @ back, np.eye(3), atol=1e-12)


@pytest.mark.parametrize("name", OPERATIONS)
def test_masks_stay_with_the_pixels_among_crops_resizes_and_flips(name: str) -> None:
    flips = RandomHorizontalFlip(), RandomVerticalFlip()
    warp = OPERATIONS[name](interpolation="nearest")
    recipe = (CenterCrop((50, 64)), *flips, warp, *flips, warp)
    rng = np.random.default_rng(4)
    masks = list(rng.integers(1, 250, (COUNT, HEIGHT, WIDTH), dtype=np.uint8))
    done, moves = run(recipe, [np.stack([mask] * 3, axis=-1) for mask in masks])
    kinds = [CropMove, FlipMove, FlipMove, WarpMove, FlipMove, FlipMove, WarpMove]
    assert sorted(kind.__name__ for kind in kinds) == sorted(type(m).__name__ for m in moves.moves)
    assert (moves.move_masks(masks) == done[..., 0]).mean() > 0.99


@pytest.mark.parametrize("name", OPERATIONS)
def test_boxes_and_points_stay_with_the_pixels(name: str) -> None:
    """Of a white square on black: its box is around it, and its middle is in it."""
    recipe = (
        RandomResizedCrop((70, 90), scale=(0.5, 1)),
        RandomHorizontalFlip(),
        OPERATIONS[name](interpolation="bilinear"),
        RandomVerticalFlip(),
    )
    picture = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    picture[22:38, 30:50] = 255
    done, moves = run(recipe, [picture] * COUNT)
    assert [type(each) for each in moves.moves][:2] == [CropMove, ScaleMove]
    owner = np.arange(COUNT)
    boxes = moves.move_boxes(np.array([[30, 22, 50, 38]] * COUNT), owner)
    points = moves.move_points(np.array([[40, 30]] * COUNT), owner)
    seen = 0
    for image, box, (x, y) in zip(done[..., 0], boxes, points, strict=True):
        rows, columns = np.nonzero(image > 127)
        if len(rows) < 100:
            continue
        seen += 1
        found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert (box[:2] <= np.add(found[:2], 1.5)).all()
        assert (box[2:] >= np.subtract(found[2:], 1.5)).all()
        if (box[:2] > 1).all() and (box[2:] < (89, 69)).all():  # no corner was clipped
            np.testing.assert_allclose(box, found, atol=2.5)
        if 2 < x < 88 and 2 < y < 68:
            assert image[int(y), int(x)] > 127
    assert seen > COUNT / 2


def test_a_missing_mask_stays_zero() -> None:
    recipe = check_recipe((RandomRotation((45, 45), mask_fill=7),), images=FIXED)
    dims = np.full((2, 2), (HEIGHT, WIDTH), np.int32)
    _, moves = draw_with_moves(recipe, ids=np.arange(2), dims=dims, seed=5, epoch=0)
    mask = np.ones((HEIGHT, WIDTH), np.uint8)
    moved = moves.move_masks([mask, np.zeros((0, 0), np.uint8)])
    assert set(np.unique(moved[0])) == {1, 7}
    assert not moved[1].any()


def test_what_is_not_on_stays_where_it_is() -> None:
    recipe = check_recipe((RandomPerspective(p=0.5),), images=FIXED)
    dims = np.full((COUNT, 2), (HEIGHT, WIDTH), np.int32)
    draws, moves = draw_with_moves(recipe, ids=np.arange(COUNT), dims=dims, seed=5, epoch=0)
    (warp,) = moves.moves
    assert isinstance(warp, WarpMove)
    still = (warp.matrix == np.eye(3)).all(axis=(1, 2))
    np.testing.assert_array_equal(still, ~draws["RandomPerspective1.on"])
    assert 0 < still.sum() < COUNT


def test_a_sample_draws_the_same_in_any_batch() -> None:
    recipe = check_recipe([op(fill=1) for op in OPERATIONS.values()], images=FIXED)
    dims = np.full((COUNT, 2), (HEIGHT, WIDTH), np.int32)
    whole = draw(recipe, ids=np.arange(COUNT), dims=dims, seed=5, epoch=0)
    part = draw(recipe, ids=np.arange(COUNT)[7:9], dims=dims[7:9], seed=5, epoch=0)
    for name, values in whole.items():
        np.testing.assert_array_equal(values[7:9], part[name])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomAffine(-3), r"RandomAffine\(degrees=...\): got -3"),
        (
            lambda: RandomAffine(3, translate=(0.1, 1.1)),
            r"translate=...\): .*2 numbers from 0 to 1",
        ),
        (lambda: RandomAffine(3, translate=0.1), r"translate="),
        (lambda: RandomAffine(3, scale=(0, 1)), r"scale="),
        (lambda: RandomAffine(3, shear=(1, 2, 3)), r"shear=.*2 or 4 numbers"),
        (lambda: RandomAffine(3, shear=95), r"shear="),
        (lambda: RandomAffine(3, center=(1, 2)), "only None is supported"),
        (lambda: RandomAffine(3, interpolation="bicubic"), r"interpolation="),
        (lambda: RandomPerspective(1.5), r"distortion_scale="),
        (lambda: RandomPerspective(p=2), r"p=...\): got 2, wanted a probability"),
        (lambda: RandomPerspective(fill=(1, 2, 3)), r"fill="),
        (lambda: RandomRotation(3, mask_fill=0.5), r"mask_fill="),
    ],
)
def test_arguments_are_checked(make: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make()


def test_torchvisions_ways_to_write_ranges() -> None:
    assert RandomAffine(30) == RandomAffine((-30, 30))
    assert RandomAffine(0, shear=10) == RandomAffine((0, 0), shear=(-10, 10))
    assert RandomAffine(0, shear=(1, 2, 3, 4)).shear == (1, 2, 3, 4)
    assert check_recipe((Resize((8, 8)), RandomAffine(0, fill=None)), images=FIXED).random
