"""Test that masks, boxes and points follow their image: same pixels in the graph, same numbers as
torchvision.transforms.v2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.augment import (
    CIFAR_MEAN,
    CIFAR_STD,
    OUTSIDE,
    Cast,
    CenterCrop,
    ColorJitter,
    CropMove,
    Decode,
    FlipMove,
    Graph,
    GraphPlan,
    ImageMoves,
    Letterbox,
    LongestSide,
    Normalize,
    Pad,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Resize,
    ScaleJitter,
    ScaleMove,
    check_recipe,
    cifar_train,
    draw,
    draw_with_moves,
    imagenet_eval,
    imagenet_train,
)
from penstock.cache import DatasetError, RecipeError
from penstock.readers import EncodedBatch, ImageRange
from tests.images import encoded_array
from tests.properties import examples

if TYPE_CHECKING:
    from numpy.typing import NDArray


SIZES = ImageRange(min_height=40, max_height=120, min_width=40, max_width=120)


SAME = ImageRange(min_height=32, max_height=32, min_width=32, max_width=32)


FLIPS = (RandomHorizontalFlip(), RandomVerticalFlip())


STILL = ColorJitter()


"""Changes nothing, but what stands behind it is behind the windows."""


LOSSLESS: dict[str, Any] = {
    "crop": (RandomCrop((37, 29)),),
    "padded": (RandomCrop(44, padding=9, fill=0),),
    "far outside": (RandomCrop((9, 7), padding=30),),
    "as needed": (RandomCrop((100, 64), pad_if_needed=True), *FLIPS),
    "as needed and more": (*FLIPS, RandomCrop((100, 64), padding=5, pad_if_needed=True), *FLIPS),
    "not needed": (RandomCrop((40, 33), pad_if_needed=True), RandomCrop(42, padding=5)),
    "flipped": (*FLIPS, RandomCrop((40, 48), padding=8), *FLIPS),
    "cropped twice": (RandomCrop(40, padding=3), *FLIPS, CenterCrop((21, 33)), RandomCrop(17)),
    "padded again": (CenterCrop((38, 40)), *FLIPS, RandomCrop((48, 44), padding=7), *FLIPS),
    "behind a resize": (Resize((40, 44)), RandomCrop(50, padding=9), *FLIPS, CenterCrop(45)),
    "late flips": (RandomCrop(32), *FLIPS, STILL, *FLIPS),
    "turned": (*FLIPS, RandomCrop(32), RandomRotation((0, 0)), *FLIPS, STILL, *FLIPS),
}


def numbered(height: int, width: int) -> NDArray[np.int32]:
    """Every pixel another number, from 1."""
    return np.arange(1, 1 + height * width, dtype=np.int32).reshape(height, width)


def as_colours(numbers: NDArray[Any]) -> NDArray[np.uint8]:
    parts = [numbers & 255, numbers >> 8, numbers % 97]
    return np.stack(parts, axis=-1).astype(np.uint8)


def as_numbers(images: NDArray[Any]) -> NDArray[np.int32]:
    """The other way round. images: (n, 3, height, width)."""
    return images[:, 0].astype(np.int32) + 256 * images[:, 1].astype(np.int32)


def batch_of(pictures: list[NDArray[np.uint8]], ids: Any = None) -> EncodedBatch:
    return EncodedBatch(
        ids=np.arange(len(pictures)) if ids is None else np.asarray(ids),
        encoded=[encoded_array(picture) for picture in pictures],
        dims=np.array([picture.shape[:2] for picture in pictures], np.int32),
    )


def decoded(
    recipe: Any, batch: EncodedBatch, *, images: ImageRange = SIZES, size: int | None = None
) -> tuple[NDArray[Any], ImageMoves]:
    """All images of a batch, decoded by so many at a time, and their moves."""
    checked = check_recipe(recipe, images=images)
    graph = Graph(GraphPlan(checked, batch_size=size or len(batch.ids), threads=2))
    found = []
    try:
        for rows in np.split(np.arange(len(batch.ids)), len(batch.ids) // (size or len(batch.ids))):
            part = EncodedBatch(
                ids=batch.ids[rows],
                encoded=[batch.encoded[row] for row in rows],
                dims=batch.dims[rows],
            )
            draws, _ = draw_with_moves(checked, ids=part.ids, dims=part.dims, seed=4, epoch=1)
            graph.feed(part, draws)
            found.append(graph.outputs().numpy().copy())
    finally:
        graph.close()
    _, moves = draw_with_moves(checked, ids=batch.ids, dims=batch.dims, seed=4, epoch=1)
    return np.concatenate(found), moves


def sizes_of(name: str, count: int) -> list[tuple[int, int]]:
    if name == "behind a resize":  # to the size that they have: no pixel is mixed
        return [(40, 44)] * count
    rng = np.random.default_rng(0)
    return [(int(h), int(w)) for h, w in rng.integers(40, 120, (count, 2))]


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_mask_of_the_pixels_numbers_stays_with_them(name: str) -> None:
    masks = [numbered(*size) for size in sizes_of(name, 24)]
    batch = batch_of([as_colours(mask) for mask in masks])
    images, moves = decoded(LOSSLESS[name], batch)
    assert images.dtype == np.uint8
    np.testing.assert_array_equal(as_numbers(images), moves.move_masks(masks))


@pytest.mark.parametrize("name", LOSSLESS)
def test_the_same_bits_in_any_batch(name: str) -> None:
    masks = [numbered(*size) for size in sizes_of(name, 12)]
    batch = batch_of([as_colours(mask) for mask in masks], ids=np.arange(12) * 77)
    whole, _ = decoded(LOSSLESS[name], batch)
    parts, _ = decoded(LOSSLESS[name], batch, size=3)
    np.testing.assert_array_equal(whole, parts)


RESIZING: dict[str, Any] = {
    "train": (RandomResizedCrop(48, scale=(0.3, 1)), *FLIPS),
    "short side": (*FLIPS, Resize(50), RandomCrop(48, padding=4), *FLIPS),
    "padded and resized": (RandomCrop(44, padding=9), *FLIPS, Resize((64, 80)), CenterCrop(60)),
    "padded and cropped": (
        RandomCrop(44, padding=9),
        RandomResizedCrop(40, scale=(0.4, 1)),
        *FLIPS,
    ),
    "chain": (
        Resize(90),
        RandomResizedCrop(64, scale=(0.4, 1)),
        *FLIPS,
        CenterCrop(48),
        Resize((60, 44)),
    ),
}


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("name", RESIZING)
def test_masks_and_boxes_stay_with_what_they_are_around(name: str, antialias: bool) -> None:
    rng = np.random.default_rng(5)
    masks, boxes = [], []
    for _ in range(24):
        height, width = rng.integers(60, 120, 2)
        top, left = rng.integers(0, 30, 2)
        bottom, right = top + rng.integers(20, 60), left + rng.integers(20, 60)
        mask = np.zeros((height, width), np.uint8)
        mask[top:bottom, left:right] = 1
        masks.append(mask)
        boxes.append((left, top, min(right, width), min(bottom, height)))
    recipe = [
        Resize(op.size, antialias=antialias) if isinstance(op, Resize) else op
        for op in RESIZING[name]
    ]
    images, moves = decoded(recipe, batch_of([np.stack([mask * 200] * 3, -1) for mask in masks]))
    moved = moves.move_masks(masks)
    corners = moves.move_boxes(np.array(boxes), np.arange(24))
    seen = 0
    for image, mask, (left, top, right, bottom) in zip(images[:, 0], moved, corners, strict=True):
        # a border may lie a pixel off: a mask takes the nearest pixel, an image blends
        inside, outside = eroded(mask == 1), eroded(mask == 0)
        assert (image[inside] >= 199).all()
        assert (image[outside] == 0).all()
        rows, columns = np.nonzero(image > 100)
        if inside.any():
            seen += 1
            found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            np.testing.assert_allclose(found, [left, top, right, bottom], atol=1.01)
    assert seen > 8


@pytest.mark.parametrize("name", ["padded and resized", "padded and cropped", "short side"])
def test_the_last_pass_shows_the_same_pixels(name: str) -> None:
    rng = np.random.default_rng(6)
    pictures = [rng.integers(0, 256, (70, 90, 3), dtype=np.uint8) for _ in range(12)]
    rounded, _ = decoded(RESIZING[name], batch_of(pictures))
    exact, _ = decoded((*RESIZING[name], Cast("float32")), batch_of(pictures))
    np.testing.assert_allclose(rounded, exact, atol=0.501)


def eroded(area: NDArray[np.bool_], by: int = 5) -> NDArray[np.bool_]:
    """Pixels whose neighbours all lie in the area; beyond the edge is nothing."""
    height, width = area.shape
    padded = np.pad(area, by)
    shifts = range(2 * by + 1)
    shown = [padded[y : y + height, x : x + width] for y in shifts for x in shifts]
    return np.asarray(np.stack(shown).all(axis=0))


def test_cifar_is_torchvisions() -> None:
    rng = np.random.default_rng(1)
    pictures = [rng.integers(0, 256, (32, 32, 3), dtype=np.uint8) for _ in range(64)]
    images, moves = decoded(cifar_train(), batch_of(pictures), images=SAME)
    crop, flip = moves.moves
    assert isinstance(crop, CropMove)
    assert isinstance(flip, FlipMove)
    assert (crop.start.min(axis=1) == -4).all()
    assert (crop.start.max(axis=1) == 4).all()
    assert 16 < flip.on.sum() < 48
    mean, std = (np.array(each)[:, None, None] for each in (CIFAR_MEAN, CIFAR_STD))
    for row, picture in enumerate(pictures):
        top, left = crop.start[:, row] + 4
        wanted = np.pad(picture, ((4, 4), (4, 4), (0, 0)))[top : top + 32, left : left + 32]
        wanted = wanted[:, ::-1] if flip.on[row] else wanted
        wanted = (wanted.transpose(2, 0, 1) / 255 - mean) / std
        np.testing.assert_allclose(images[row], wanted, atol=2e-6)


def test_cifar_is_what_torchvision_makes_of_the_same_numbers() -> None:
    torch = pytest.importorskip("torch")
    reference: Any = pytest.importorskip("torchvision.transforms.v2.functional")
    rng = np.random.default_rng(2)
    pictures = [rng.integers(0, 256, (32, 32, 3), dtype=np.uint8) for _ in range(64)]
    images, moves = decoded(cifar_train(), batch_of(pictures), images=SAME)
    crop, flip = moves.moves
    assert isinstance(crop, CropMove)
    assert isinstance(flip, FlipMove)
    for row, picture in enumerate(pictures):
        wanted = reference.pad(torch.from_numpy(picture).permute(2, 0, 1), [4])
        top, left = (crop.start[:, row] + 4).tolist()
        wanted = reference.crop(wanted, top, left, 32, 32)
        wanted = reference.horizontal_flip(wanted) if flip.on[row] else wanted
        wanted = reference.to_dtype(wanted, torch.float32, scale=True)
        wanted = reference.normalize(wanted, list(CIFAR_MEAN), list(CIFAR_STD))
        np.testing.assert_allclose(images[row], wanted.numpy(), atol=2e-6)


def test_what_is_padded_has_the_colour_that_was_asked_for() -> None:
    recipe = (RandomCrop(32, padding=8, fill=77, mask_fill=255), Cast("float16"))
    masks = [np.ones((32, 32), np.uint8)] * 16
    batch = batch_of([np.full((32, 32, 3), 200, np.uint8)] * 16)
    images, moves = decoded(recipe, batch, images=SAME)
    moved = moves.move_masks(masks)
    assert set(np.unique(moved)) == {1, 255}
    np.testing.assert_array_equal(images, np.where(moved[:, None] == 1, 200, 77) + 0 * images)
    with pytest.raises(RecipeError, match=r"mask_fill=.*-1.*uint8"):
        replace(moves, mask_fill=-1).move_masks(masks)


def test_what_a_small_image_lacks_is_put_on_both_of_its_sides() -> None:
    checked = check_recipe((RandomCrop((50, 30), padding=1, pad_if_needed=True),), images=SAME)
    dims = np.full((500, 2), 32, np.int32)
    _, moves = draw_with_moves(checked, ids=np.arange(500), dims=dims, seed=1, epoch=1)
    (crop,) = moves.moves
    assert isinstance(crop, CropMove)
    # 32 + 2 and 16 more on each side for 50; the width is enough
    assert np.unique(crop.start[0]).tolist() == list(range(-17, 0))
    assert np.unique(crop.start[1]).tolist() == list(range(-1, 4))


def test_grey_images_are_padded_too() -> None:
    recipe = (Decode("gray"), RandomCrop(32, padding=8, fill=50))
    batch = batch_of([np.full((32, 32, 3), 200, np.uint8)] * 16)
    images, _ = decoded(recipe, batch, images=SAME)
    assert images.shape == (16, 1, 32, 32)
    assert set(np.unique(images)) == {50, 200}


def test_every_place_of_a_window_is_as_likely() -> None:
    checked = check_recipe((RandomCrop(29, padding=1),), images=SAME)
    dims = np.full((6000, 2), 32, np.int32)
    _, moves = draw_with_moves(checked, ids=np.arange(6000), dims=dims, seed=1, epoch=1)
    (crop,) = moves.moves
    assert isinstance(crop, CropMove)
    for start in crop.start:
        counts = np.bincount(start + 1, minlength=6)
        assert len(counts) == 6
        assert (np.abs(counts - 1000) < 5 * np.sqrt(1000)).all()


def test_points_are_turned_as_pixels_are() -> None:
    recipe = (*FLIPS, RandomCrop((40, 48), padding=8), *FLIPS)
    masks = [numbered(45, 50)] * 12
    _, moves = decoded(recipe, batch_of([as_colours(mask) for mask in masks]))
    owner = np.arange(12)
    x, y = moves.move_points(np.full((12, 2), (20, 22)), owner).T.astype(int)
    assert (moves.move_masks(masks)[owner, y, x] == masks[0][22, 20]).all()


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ((RandomCrop(33),), "RandomCrop: wanted 33 x 33.*pad_if_needed=True"),
        ((RandomCrop((32, 41), padding=4),), "RandomCrop: wanted 32 x 41"),
        ((RandomCrop(32, padding=4), RandomCrop(32, padding=4)), "second crop that pads"),
        ((Normalize(), RandomCrop(32)), "comes after Normalize"),
        ((RandomRotation(1), RandomCrop(32)), "The order of a recipe is"),
    ],
)
def test_windows_that_cannot_be(recipe: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check_recipe(recipe, images=SAME)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomCrop(0), r"RandomCrop\(size="),
        (lambda: RandomCrop(8, padding=-1), r"RandomCrop\(padding="),
        (lambda: RandomCrop(8, padding=(1, 2)), r"RandomCrop\(padding="),  # type: ignore[arg-type]
        (lambda: RandomCrop(8, pad_if_needed=1), r"pad_if_needed="),  # type: ignore[arg-type]
        (lambda: RandomCrop(8, fill=256), r"RandomCrop\(fill="),
        (lambda: RandomCrop(8, mask_fill=0.5), r"RandomCrop\(mask_fill="),  # type: ignore[arg-type]
        (lambda: RandomCrop(8, fields=()), r"RandomCrop\(fields="),
        (lambda: RandomVerticalFlip(2), r"RandomVerticalFlip\(p="),
    ],
)
def test_they_check_themselves(make: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make()


MOVED_SIZES = ImageRange(min_height=5, max_height=90, min_width=5, max_width=90)


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
    checked = check_recipe(recipe, images=MOVED_SIZES, lists=True)
    return draw_with_moves(checked, ids=ids, dims=dims, seed=seed, epoch=epoch)


def masks_of(dims: Any) -> list[NDArray[np.int32]]:
    """Every pixel another number."""
    return [np.arange(h * w, dtype=np.int32).reshape(h, w) for h, w in dims]


KINDS = ("resize", "short", "center", "random", "padded", "window", "flip", "turn")
SIZED = ("shorter", "longest", "letterbox", "jitter", "filled")


@st.composite
def recipes(draw: st.DrawFn) -> tuple[Any, ...]:
    """Crops, resizes and flips in any order that fits images of 5 pixels and more."""
    ops: list[Any] = []
    known: tuple[int, int] | None = None  # height and width, once they are the same for all
    is_padded = is_thin = False  # thin: an image may have fewer pixels than a crop
    for _ in range(draw(st.integers(0, 6))):
        height, width = (max(side, 4) for side in known or (5, 5))
        # Not less than 4 pixels: torchvision counts in float32, and enlarges its rounding.
        size = draw(st.integers(4, height)), draw(st.integers(4, width))
        other = draw(st.integers(5, 60)), draw(st.integers(5, 60))
        kind = draw(st.sampled_from([*KINDS, *SIZED]))
        if kind == "resize":
            ops.append(Resize(other))
            known = other
        elif kind == "short":
            ops.append(Resize(draw(st.integers(5, 60))))
            known = None
        elif kind == "window":
            ops.append(RandomResizedCrop(other))
            known = other
        elif kind in ("center", "random") and not is_thin:
            ops.append(CenterCrop(size) if kind == "center" else RandomCrop(size))
            known = size
        elif kind == "padded" and not is_padded and not is_thin:
            padding = draw(st.integers(1, 9))
            known = size[0] + 2 * padding - 1, size[1] + padding
            ops.append(RandomCrop(known, padding=padding))
            is_padded = True
        elif kind in ("flip", "turn"):
            flip = RandomHorizontalFlip if kind == "flip" else RandomVerticalFlip
            ops.append(flip(draw(st.sampled_from([0.5, 1.0]))))
        elif kind in ("shorter", "longest", "jitter"):
            made = {
                "shorter": Resize(shorter=sorted({*other}), max_size=max(other) + 9),
                "longest": LongestSide(sorted({*other})),
                "jitter": ScaleJitter(other, (0.5, 1.5)),
            }
            ops.append(made[kind])
            known, is_thin = None, True
            continue
        elif kind in ("letterbox", "filled") and not is_padded:
            filled = RandomCrop(other, pad_if_needed=True)
            ops.append(Letterbox(other) if kind == "letterbox" else filled)
            known, is_padded = other, True
        is_thin = is_thin and known is None
    return (*ops, *draw(st.sampled_from([(), (Pad(to_multiple=8),)])))


any_images = st.lists(sides, min_size=1, max_size=6)


seeds = st.integers(0, 2**40)


@pytest.mark.parametrize("name", RECIPES)
@given(dims=any_images, seed=seeds)
@examples(20)
def test_they_go_where_torchvision_takes_them(
    name: str, dims: list[tuple[int, int]], seed: int
) -> None:
    _as_torchvision_moves(RECIPES[name], dims, seed)


@given(recipe=recipes(), dims=any_images, seed=seeds)
@examples(100)
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
        moves.move_masks(masks_of(dims)),
        moves.move_boxes(boxes, owners[0]).reshape(-1, 7, 4),
        moves.move_points(points, owners[1]).reshape(-1, 5, 2),
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
        sides = tuple(map(slice, moves.sizes[:, row]))  # without padding
        np.testing.assert_array_equal(found[0][row][sides], wanted[0].numpy())
        for ours, theirs in zip(found[1:], wanted[1:], strict=True):
            np.testing.assert_allclose(ours[row], theirs.numpy(), atol=1e-3, rtol=1e-6)


def _by_torchvision(reference: Any, value: Any, moves: ImageMoves, row: int) -> Any:
    for move in moves.moves:
        if isinstance(move, CropMove):
            window = (*move.start[:, row].tolist(), *move.length[:, row].tolist())
            value = reference.crop(value, *window)
        elif isinstance(move, ScaleMove):
            value = reference.resize(value, move.to[:, row].tolist())
        elif isinstance(move, FlipMove) and move.on[row]:
            flip = reference.horizontal_flip if move.axis else reference.vertical_flip
            value = flip(value)
    return value


@pytest.mark.parametrize("name", RECIPES)
def test_the_images_draw_the_same_numbers(name: str) -> None:
    dims = [(40, 50), (33, 71), (90, 5)]
    inputs, moves = moves_of(RECIPES[name], dims)
    checked = check_recipe(RECIPES[name], images=MOVED_SIZES)
    alone = draw(checked, ids=np.arange(3), dims=np.array(dims, np.int32), seed=3, epoch=5)
    assert inputs.keys() == alone.keys()
    for key, values in inputs.items():
        np.testing.assert_array_equal(values, alone[key])
    assert moves.canvas == checked.shape[1:]


@pytest.mark.parametrize("name", RECIPES)
@given(data=st.data(), dims=st.lists(sides, min_size=1, max_size=9))
@examples(15)
def test_a_sample_moves_the_same_in_any_batch(
    name: str, data: st.DataObject, dims: list[tuple[int, int]]
) -> None:
    count = len(dims)
    ids = np.array(data.draw(st.lists(st.integers(0, 2**62), min_size=count, max_size=count)))
    keep = np.array(data.draw(st.permutations(range(count))))
    keep = keep[: data.draw(st.integers(1, count))]
    whole = moves_of(RECIPES[name], dims, ids=ids)[1].move_masks(masks_of(dims))
    some = [dims[row] for row in keep]
    part = moves_of(RECIPES[name], some, ids=ids[keep])[1].move_masks(masks_of(some))
    np.testing.assert_array_equal(whole[keep], part)


def one_image(*moves: Any, size: tuple[int, int], shape: tuple[int, int]) -> ImageMoves:
    return ImageMoves(size=tuple(ints(*size)), moves=moves, sizes=ints(*shape), canvas=shape)


def ints(*values: int) -> Any:
    return np.array(values)[:, None]


def test_a_window_that_reaches_outside_shows_nothing_there() -> None:
    crop = CropMove(size=ints(2, 3), start=ints(-1, 1), length=ints(4, 3))
    flip = FlipMove(size=ints(4, 3), on=np.array([True]), axis=0)
    moves = one_image(crop, flip, size=(2, 3), shape=(4, 3))
    moves = replace(moves, mask_fill=9)
    rows, columns = moves.index_maps()
    assert rows.tolist() == [[OUTSIDE, 1, 0, OUTSIDE]]
    assert columns.tolist() == [[1, 2, OUTSIDE]]
    mask = np.array([[1, 2, 3], [4, 5, 6]], np.uint8)
    assert moves.move_masks([mask]).tolist() == [[[9, 9, 9], [5, 6, 9], [2, 3, 9], [9, 9, 9]]]
    boxes = moves.move_boxes(np.array([[1, 0, 3, 2], [-5, -5, 9, 9]]), np.zeros(2, np.int64))
    assert boxes.tolist() == [[0, 1, 2, 3], [0, 0, 3, 4]]
    assert moves.move_points(np.array([[1, 0]]), np.zeros(1, np.int64)).tolist() == [[0, 2]]


def test_nothing_to_move_is_fine() -> None:
    _, moves = moves_of(RECIPES["train"], [(40, 50), (33, 71)])
    none = np.zeros(0, np.int64)
    assert moves.move_boxes(np.zeros((0, 4)), none).shape == (0, 4)
    assert moves.move_points(np.zeros((0, 2)), none).shape == (0, 2)
    missing = np.zeros((0, 0), np.uint8)
    mask = np.full((40, 50), 7, np.uint8)
    found = moves.move_masks([mask, missing])
    assert found.dtype == np.uint8
    assert (found[0] == 7).all()
    assert not found[1].any()
    _, nothing = moves_of(RECIPES["train"], np.zeros((0, 2)))
    assert nothing.move_masks([]).shape == (0, 32, 32)


def test_a_mask_of_another_size_is_an_error() -> None:
    _, moves = moves_of(RECIPES["train"], [(40, 50)])
    with pytest.raises(DatasetError, match=r"\(40, 51\).*40 x 50"):
        moves.move_masks([np.zeros((40, 51), np.uint8)])


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_masks_keep_their_numbers(dtype: Any) -> None:
    _, moves = moves_of(RECIPES["resize"], [(40, 50)] * 2)
    masks = [np.full((40, 50), np.iinfo(dtype).max, dtype), np.zeros((40, 50), np.uint8)]
    found = moves.move_masks(masks)
    assert found.dtype == dtype
    assert (found[0] == np.iinfo(dtype).max).all()
    assert moves.move_masks(masks[1:] * 2, dtype=np.int64).dtype == np.int64


def _sizes_after(op: Any, dims: list[tuple[int, int]]) -> list[list[int]]:
    sizes: list[list[int]] = moves_of([op], dims)[1].sizes.T.tolist()
    return sizes


@given(dims=any_images, short=st.integers(1, 60), more=st.integers(0, 40))
def test_sizes_are_those_of_torchvision(dims: list[tuple[int, int]], short: int, more: int) -> None:
    most = short + more
    for (height, width), size in zip(dims, _sizes_after(LongestSide(most), dims), strict=True):
        long = max(height, width)
        assert size == [max(1, most * height // long), max(1, most * width // long)]
    resized = _sizes_after(Resize(short, max_size=most), dims)
    for (height, width), size in zip(dims, resized, strict=True):
        low, high = min(height, width), max(height, width)
        sides = [short, short * high // low]
        if sides[1] > most:
            sides = [max(1, most * short // sides[1]), most]
        assert size == (sides if height <= width else sides[::-1])


def test_each_of_several_sizes_is_drawn() -> None:
    dims = [(50, 50)] * 300
    for op in (Resize(shorter=(20, 30, 40)), LongestSide((20, 30, 40)), Letterbox([20, 30, 40])):
        sides = np.array(_sizes_after(op, dims))[:, 0]
        assert {*sides.tolist()} == {20, 30, 40}
        assert (np.bincount(sides)[[20, 30, 40]] > 70).all()
    scaled = np.array(_sizes_after(ScaleJitter((100, 200), (0.1, 2.0)), dims))
    assert (scaled[:, 0] == scaled[:, 1]).all()
    assert scaled.min() < 20
    assert scaled.max() > 190
