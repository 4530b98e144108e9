"""Move the masks, boxes, keypoints and rows of boxes of a batch with their images."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import DatasetError
from penstock.readers.fieldtypes import DenseColumn, RaggedColumn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from penstock.augment.checked_recipes import FieldRecipes
    from penstock.augment.image_moves import ImageMoves
    from penstock.readers.fieldtypes import Column

    Ints = NDArray[np.int64]


def follow(
    recipes: FieldRecipes, moves: Mapping[str, ImageMoves], columns: Mapping[str, Column]
) -> dict[str, DenseColumn | RaggedColumn]:
    """Return the moved followers of a batch by field, as their types' `follow` returns them, but
    without the boxes that a recipe drops and the rows that belong to these.

    moves: moves of each image in `recipes.followed`, from `draws.draw_with_moves` for the same
    samples. columns: the followers' columns as stored; masks are decoded, without pixels if
    missing. Raises DatasetError if a mask doesn't have its image's size, or an array doesn't have a
    row for each box.
    """
    found: dict[str, DenseColumn | RaggedColumn] = {}
    kept: dict[str, tuple[NDArray[np.bool_], Ints]] = {}  # which boxes, and all boxes' offsets
    for name, follower in recipes.followers.items():
        if follower.boxes is not None:
            continue
        moved = moves[follower.of] if follower.moves else None
        column = follower.type.follow(columns[name], moved, size=follower.shape)
        if follower.sanitize is not None:
            assert isinstance(column, RaggedColumn), name
            kept[name] = keep, offsets = follower.sanitize.keeps(column.values), column.offsets
            column = RaggedColumn(column.values[keep], _kept_offsets(keep, offsets))
        found[name] = column
    for name, follower in recipes.followers.items():
        if follower.boxes is not None:
            found[name] = _kept_rows(name, columns[name], *kept[follower.boxes])
    return found


def _kept_offsets(keep: NDArray[np.bool_], offsets: Ints) -> Ints:
    return np.append(0, np.cumsum(keep))[offsets]


def _kept_rows(name: str, column: Column, keep: NDArray[np.bool_], offsets: Ints) -> RaggedColumn:
    """Return an array's rows of the kept boxes. keep: bool, (total,). offsets: of all boxes."""
    if isinstance(column, DenseColumn):  # equally many rows in every sample
        count, rows = column.values.shape[:2]
        values = column.values.reshape(-1, *column.values.shape[2:])
        column = RaggedColumn(values, np.arange(count + 1) * rows)
    assert isinstance(column, RaggedColumn)
    counts, several = np.diff(offsets), column.shapes
    lengths = np.diff(column.offsets) if several is None else several[:, 0]
    if (wrong := np.flatnonzero(lengths != counts)).size:
        at = wrong[0]
        raise DatasetError(
            f'"{name}" has {lengths[at]} rows in a sample of {counts[at]} boxes: wanted a row for '
            "each box. Correct the data, or leave `of=` out of its type."
        )
    if several is None:
        return RaggedColumn(column.values[keep], _kept_offsets(keep, offsets))
    parts = enumerate(pairwise(offsets.tolist()))
    left = [column.sample(row)[keep[begin:end]] for row, (begin, end) in parts]
    return RaggedColumn.of(left, like=column)
