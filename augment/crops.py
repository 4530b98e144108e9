"""Which window of each image a crop shows: torchvision's formulas, for many samples at once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from penstock.augment.keyed import keyed_draws

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.augment.geometric_ops import CenterCrop, RandomCrop, RandomResizedCrop

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

ATTEMPTS = 10  # torchvision's RandomResizedCrop.get_params


def center_windows(op: CenterCrop, height: Ints, width: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """torchvision.transforms.functional.center_crop: half to even, as Python's round()."""
    rows, columns = op.height_width
    top = np.rint((height - rows) / 2).astype(np.int64)
    left = np.rint((width - columns) / 2).astype(np.int64)
    return top, left, np.full_like(height, rows), np.full_like(width, columns)


def place_windows(
    op: RandomCrop, height: Ints, width: Ints, base: NDArray[np.uint64], *, index: int
) -> tuple[Ints, Ints, Ints, Ints]:
    """Top, left, height, width of torchvision's RandomCrop: draws 0 and 1 place it. With padding a
    window may reach outside, so that top and left may be negative."""
    places = keyed_draws(base, index, [0, 1])
    rows, columns = op.height_width
    top = _place(op, places[0], height, rows)
    left = _place(op, places[1], width, columns)
    return top, left, np.full_like(height, rows), np.full_like(width, columns)


def _place(op: RandomCrop, place: Floats, side: Ints, length: int) -> Ints:
    """The first pixel of a window on one side of each image. place: a draw in [0, 1)."""
    padding = np.full_like(side, op.padding)
    if op.pad_if_needed:
        padding += np.maximum(length - side - 2 * padding, 0)
    return (place * (side + 2 * padding - length + 1)).astype(np.int64) - padding


def random_windows(
    op: RandomResizedCrop,
    height: Ints,
    width: Ints,
    base: NDArray[np.uint64],
    *,
    index: int,
) -> tuple[Ints, Ints, Ints, Ints]:
    """Top, left, height, width of torchvision's RandomResizedCrop.get_params, vectorised.

    Up to 10 attempts draw an area and a log-uniform ratio; the first window that fits the image is
    placed at random; if none fits, the middle of the image with the nearest ratio that is allowed.
    Attempt k uses draws 2k and 2k + 1, the place draws 20 and 21.
    height, width: of the images, shape (n,). base: from `draw_base`, shape (n,).
    """
    area, ratio, *place = keyed_draws(base, index, [0, 1, 2 * ATTEMPTS, 2 * ATTEMPTS + 1])
    rows, columns = _attempt(op, height, width, area, ratio)
    fits = _fits(rows, columns, height, width)
    if not fits.all():
        failed = np.flatnonzero(~fits)
        draws = keyed_draws(
            base[failed], index, [*range(2, 2 * ATTEMPTS, 2), *range(3, 2 * ATTEMPTS, 2)]
        )
        again = _first_fit(op, height[failed], width[failed], draws)
        rows[failed], columns[failed], fits[failed] = again
    room_y, room_x = height - rows, width - columns
    top = np.where(fits, (place[0] * (room_y + 1)).astype(np.int64), room_y >> 1)
    left = np.where(fits, (place[1] * (room_x + 1)).astype(np.int64), room_x >> 1)
    return top, left, rows, columns


def _attempt(
    op: RandomResizedCrop, height: Ints, width: Ints, area: Floats, ratio: Floats
) -> tuple[Ints, Ints]:
    """Heights and widths of windows that may not fit, from draws in [0, 1)."""
    low, high = math.log(op.ratio[0]), math.log(op.ratio[1])
    side = np.sqrt((op.scale[0] + (op.scale[1] - op.scale[0]) * area) * (height * width))
    # sqrt(pixels * ratio) and sqrt(pixels / ratio) with one exp: the root of the ratio.
    root = np.exp(low / 2 + (high - low) / 2 * ratio)
    return np.rint(side / root).astype(np.int64), np.rint(side * root).astype(np.int64)


def _fits(rows: Ints, columns: Ints, height: Ints, width: Ints) -> NDArray[np.bool_]:
    # One comparison for both bounds: as unsigned, 0 - 1 is larger than any image.
    most_y, most_x = (height - 1).view(np.uint64), (width - 1).view(np.uint64)
    inside = (rows - 1).view(np.uint64) <= most_y
    inside &= (columns - 1).view(np.uint64) <= most_x
    return inside


def _first_fit(
    op: RandomResizedCrop, height: Ints, width: Ints, draws: Floats
) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """The first fitting window of several attempts, else the middle one; and whether one fitted.

    draws: shape (2 * attempts, n), the areas' first.
    """
    attempts = len(draws) // 2
    rows, columns = _attempt(op, height, width, draws[:attempts], draws[attempts:])
    fits = _fits(rows, columns, height, width)
    first, found = fits.argmax(axis=0), np.logical_or.reduce(fits)
    sample = np.arange(len(height))
    middle = _middle(op, height, width)
    return (
        np.where(found, rows[first, sample], middle[0]),
        np.where(found, columns[first, sample], middle[1]),
        found,
    )


def _middle(op: RandomResizedCrop, height: Ints, width: Ints) -> tuple[Ints, Ints]:
    """The largest window of the image whose ratio is allowed, of one pixel at least."""
    ratio = width / height
    tall, wide = ratio < op.ratio[0], ratio > op.ratio[1]
    rows = np.where(tall, np.rint(width / op.ratio[0]).astype(np.int64), height)
    columns = np.where(wide, np.rint(height * op.ratio[1]).astype(np.int64), width)
    return np.clip(rows, 1, height), np.clip(columns, 1, width)
