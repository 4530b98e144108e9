"""Define the checked operations on each field of a sample, and move what follows images with them.

A job without images loads these classes and none of the code that checks recipes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import DatasetError
from penstock.readers.fieldtypes import DenseColumn, RaggedColumn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.augment.draw_keys import Bools, Ints
    from penstock.augment.field_operations import ColumnOperation, SanitizeBoxes
    from penstock.augment.image_moves import ImageMoves
    from penstock.augment.recipe import CheckedRecipe
    from penstock.readers.fieldtypes import Column, FieldType


@dataclass(frozen=True, slots=True, kw_only=True)
class Follower:
    """A field that follows the moves of its image. Only `check_recipes` creates it.

    type: type of the field. of: its image; if that isn't selected, the field is delivered as
    stored. sanitize: the operation that drops boxes, for
    Boxes and for arrays `of` them. boxes: for an Array, the field of boxes for each of which it has
    a row. shape: (height, width) of the image if its size is known.
    """

    type: FieldType
    of: str
    sanitize: SanitizeBoxes | None = None
    boxes: str | None = None
    shape: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRecipes:
    """The checked operations on each selected field. Only `check_recipes` creates it.

    fields: names of a batch's values, in order. images: recipe of each image field. followers:
    masks, boxes, keypoints, and arrays that lose rows with boxes. columns: operations on the
    form of a field's column, by field. A field in none of these is delivered as stored.
    """

    fields: tuple[str, ...]
    images: Mapping[str, CheckedRecipe]
    followers: Mapping[str, Follower]
    columns: Mapping[str, ColumnOperation]

    @property
    def followed(self) -> frozenset[str]:
        """The images that have followers, which need `draws.draw_with_moves`."""
        return frozenset(each.of for each in self.followers.values() if each.of in self.images)

    @property
    def mixed(self) -> str | None:
        """The name of the image field whose samples are mixed with one another."""
        return next((name for name, recipe in self.images.items() if recipe.mixing), None)

    def follow(
        self, moves: Mapping[str, ImageMoves], columns: Mapping[str, Column]
    ) -> dict[str, DenseColumn | RaggedColumn]:
        """Return the moved followers of a batch by field, as their types' `follow` returns them,
        but without the boxes that a recipe drops and the rows that belong to these.

        moves: moves of each image in `followed`, from `draws.draw_with_moves` for the same samples.
        columns: the followers' columns as stored; masks are decoded, without pixels if missing.
        Raises DatasetError if a mask doesn't have its image's size, or an array doesn't have a row
        for each box.
        """
        found: dict[str, DenseColumn | RaggedColumn] = {}
        kept: dict[str, tuple[Bools, Ints]] = {}  # which boxes, and all boxes' offsets
        for name, follower in self.followers.items():
            if follower.boxes is not None:
                continue
            moved = moves[follower.of] if follower.of in self.images else None
            column = follower.type.follow(columns[name], moved, size=follower.shape)
            if follower.sanitize is not None:
                assert isinstance(column, RaggedColumn), name
                kept[name] = keep, offsets = follower.sanitize.keeps(column.values), column.offsets
                column = RaggedColumn(column.values[keep], _kept_offsets(keep, offsets))
            found[name] = column
        for name, follower in self.followers.items():
            if follower.boxes is not None:
                found[name] = _kept_rows(name, columns[name], *kept[follower.boxes])
        return found


def _kept_offsets(keep: Bools, offsets: Ints) -> Ints:
    return np.append(0, np.cumsum(keep))[offsets]


def _kept_rows(name: str, column: Column, keep: Bools, offsets: Ints) -> RaggedColumn:
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
