"""Images and what follows them, decoded by the graph: masks and boxes stay with their pixels."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from penstock.augment import (
    CIFAR_MEAN,
    CIFAR_STD,
    Cast,
    CenterCrop,
    ColorJitter,
    CropMove,
    Decode,
    FlipMove,
    Graph,
    ImageMoves,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Resize,
    check_recipe,
    cifar_train,
    draw_with_moves,
    move_boxes,
    move_masks,
    move_points,
)
from penstock.cache import RecipeError
from penstock.readers import EncodedBatch, ImageRange

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


def png(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return np.frombuffer(buffer.getvalue(), np.uint8)


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
        encoded=[png(picture) for picture in pictures],
        dims=np.array([picture.shape[:2] for picture in pictures], np.int32),
    )


def decoded(
    recipe: Any, batch: EncodedBatch, *, images: ImageRange = SIZES, size: int | None = None
) -> tuple[NDArray[Any], ImageMoves]:
    """All images of a batch, decoded by so many at a time, and their moves."""
    checked = check_recipe(recipe, images=images)
    graph = Graph(checked, batch_size=size or len(batch.ids), threads=2)
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
    np.testing.assert_array_equal(as_numbers(images), move_masks(moves, masks))


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
    moved = move_masks(moves, masks)
    corners = move_boxes(moves, np.array(boxes), np.arange(24))
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
    assert (crop.top.min(), crop.top.max()) == (-4, 4)
    assert (crop.left.min(), crop.left.max()) == (-4, 4)
    assert 16 < flip.on.sum() < 48
    mean, std = (np.array(each)[:, None, None] for each in (CIFAR_MEAN, CIFAR_STD))
    for row, picture in enumerate(pictures):
        top, left = crop.top[row] + 4, crop.left[row] + 4
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
        wanted = reference.crop(wanted, int(crop.top[row]) + 4, int(crop.left[row]) + 4, 32, 32)
        wanted = reference.horizontal_flip(wanted) if flip.on[row] else wanted
        wanted = reference.to_dtype(wanted, torch.float32, scale=True)
        wanted = reference.normalize(wanted, list(CIFAR_MEAN), list(CIFAR_STD))
        np.testing.assert_allclose(images[row], wanted.numpy(), atol=2e-6)


def test_what_is_padded_has_the_colour_that_was_asked_for() -> None:
    recipe = (RandomCrop(32, padding=8, fill=77, mask_fill=255), Cast("float16"))
    masks = [np.ones((32, 32), np.uint8)] * 16
    batch = batch_of([np.full((32, 32, 3), 200, np.uint8)] * 16)
    images, moves = decoded(recipe, batch, images=SAME)
    moved = move_masks(moves, masks)
    assert set(np.unique(moved)) == {1, 255}
    np.testing.assert_array_equal(images, np.where(moved[:, None] == 1, 200, 77) + 0 * images)
    with pytest.raises(RecipeError, match=r"mask_fill=.*-1.*uint8"):
        move_masks(replace(moves, mask_fill=-1), masks)


def test_what_a_small_image_lacks_is_put_on_both_of_its_sides() -> None:
    checked = check_recipe((RandomCrop((50, 30), padding=1, pad_if_needed=True),), images=SAME)
    dims = np.full((500, 2), 32, np.int32)
    _, moves = draw_with_moves(checked, ids=np.arange(500), dims=dims, seed=1, epoch=1)
    (crop,) = moves.moves
    assert isinstance(crop, CropMove)
    # 32 + 2 and 16 more on each side for 50; the width is enough
    assert np.unique(crop.top).tolist() == list(range(-17, 0))
    assert np.unique(crop.left).tolist() == list(range(-1, 4))


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
    for start in (crop.top, crop.left):
        counts = np.bincount(start + 1, minlength=6)
        assert len(counts) == 6
        assert (np.abs(counts - 1000) < 5 * np.sqrt(1000)).all()


def test_points_are_turned_as_pixels_are() -> None:
    recipe = (*FLIPS, RandomCrop((40, 48), padding=8), *FLIPS)
    masks = [numbered(45, 50)] * 12
    _, moves = decoded(recipe, batch_of([as_colours(mask) for mask in masks]))
    owner = np.arange(12)
    x, y = move_points(moves, np.full((12, 2), (20, 22)), owner).T.astype(int)
    assert (move_masks(moves, masks)[owner, y, x] == masks[0][22, 20]).all()


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ((RandomCrop(33),), "RandomCrop: wanted 33 x 33.*pad_if_needed=True"),
        ((RandomCrop((32, 41), padding=4),), "RandomCrop: wanted 32 x 41"),
        ((RandomCrop(32, padding=4), RandomCrop(32, padding=4)), "Two RandomCrop that pad"),
        ((Normalize(), RandomCrop(32)), "stands after Normalize"),
        ((RandomRotation(1), RandomCrop(32)), "put what crops and resizes first"),
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
