"""Move the masks, boxes, keypoints and rows of boxes of a batch with their images."""

from __future__ import annotations

from dataclasses import dataclass
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
    kept: dict[str, _KeptBoxes] = {}
    for name, follower in recipes.followers.items():
        if follower.boxes is not None:
            continue
        moved = moves[follower.of] if follower.moves else None
        column = follower.type.follow(columns[name], moved, size=follower.shape)
        if follower.sanitize is not None:
            assert isinstance(column, RaggedColumn), name
            boxes = _KeptBoxes(follower.sanitize.keeps(column.values), np.diff(column.offsets))
            column, kept[name] = RaggedColumn(column.values[boxes.keep], boxes.offsets), boxes
        found[name] = column
    for name, follower in recipes.followers.items():
        if follower.boxes is not None:
            found[name] = _kept_rows(name, columns[name], kept[follower.boxes])
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _KeptBoxes:
    """The kept boxes of a batch. keep: bool, (total,). counts: boxes of each sample, (n,)."""

    keep: NDArray[np.bool_]
    counts: Ints

    @property
    def offsets(self) -> Ints:
        """The offsets of each sample's kept boxes, shape (n + 1,)."""
        owners = _owners(self.counts)[self.keep]
        return _offsets(np.bincount(owners, minlength=len(self.counts)))


def _owners(counts: Ints) -> Ints:
    return np.repeat(np.arange(len(counts)), counts)


def _offsets(counts: Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def _kept_rows(name: str, column: Column, kept: _KeptBoxes) -> RaggedColumn:
    """Return an array's rows of the kept boxes."""
    if isinstance(column, DenseColumn):  # equally many rows in every sample
        values = column.values.reshape(-1, *column.values.shape[2:])
        lengths = np.full(len(column), column.values.shape[1], np.int64)
        column = RaggedColumn(values, _offsets(lengths))
    assert isinstance(column, RaggedColumn)
    counts, several = kept.counts, column.shapes
    lengths = np.diff(column.offsets) if several is None else several[:, 0]
    if (wrong := np.flatnonzero(lengths != counts)).size:
        at = wrong[0]
        raise DatasetError(
            f'"{name}" has {lengths[at]} rows in a sample of {counts[at]} boxes: wanted a row for '
            "each box. Correct the data, or leave `of=` out of its type."
        )
    if several is None:
        return RaggedColumn(column.values[kept.keep], kept.offsets)
    ends = np.cumsum(counts)
    left = [
        column.sample(row)[kept.keep[end - count : end]]
        for row, (count, end) in enumerate(zip(counts.tolist(), ends.tolist(), strict=True))
    ]
    return RaggedColumn.of(left, like=column)
