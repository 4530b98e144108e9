"""Define the checked operations on each field of a sample, move what follows images with them, and
draw the parts of arrays.

A crop of arrays is drawn before its samples are read, so that only that part of them is read. So it
precedes all other operations on them, and its arrays have their stored shapes. The draws are those
of images: if one operation of a list, or of a tuple's entry, crops an array and an image of equal
height and width, both have the same window.

A job without images loads these classes and none of the code that checks recipes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import DatasetError
from penstock.readers.fieldtypes import ColumnCrop, DenseColumn, ListColumn, RaggedColumn, cropped

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.augment.field_operations import ColumnOperation, SanitizeBoxes
    from penstock.augment.geometric_operations import FixedCrop
    from penstock.augment.image_moves import ImageMoves
    from penstock.augment.recipe import CheckedRecipe
    from penstock.readers import Bools, Ints, Numbers
    from penstock.readers.fieldtypes import Column, FieldType, SampleBatch

    _Keys = tuple[int | Ints, Ints | None]
    """Epochs and occurrences of samples, as in `draw_base`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Follower:
    """A field that follows the moves of its image. Only `check_recipes` creates it.

    type: type of the field. of: its image; if that isn't selected, the field is delivered as
    stored. sanitize: the operation that drops boxes, for Boxes and for fields `of` them. boxes: for
    such a field, its boxes, for each of which it has a row, if some are dropped. shape: (height,
    width) of the image if its size is known.
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
    def mixed(self) -> str | None:
        """The name of the image field whose samples are mixed with one another."""
        return next((name for name, recipe in self.images.items() if recipe.mixing), None)

    def boxes_of(
        self, image: str, columns: Mapping[str, Column], dims: NDArray[np.int32]
    ) -> tuple[Numbers, Ints]:
        """Return the boxes of the images of a field as x1, y1, x2, y2 in pixels, (k, 4), and the
        row of each one's image. dims: heights and widths of the images, (n, 2)."""
        found = [
            follower.type.in_pixels(columns[name], dims.T)  # type: ignore[attr-defined]
            for name, follower in self.followers.items()
            if follower.of == image and follower.type.is_boxes
        ]
        boxes, owners = zip(*found, strict=True)
        return np.concatenate(boxes), np.concatenate(owners)

    def follow(
        self, moves: Mapping[str, ImageMoves], columns: Mapping[str, Column]
    ) -> dict[str, DenseColumn | RaggedColumn]:
        """Return the moved followers of a batch by field, as their types' `follow` returns them,
        but without the boxes that a recipe drops and the rows that belong to these.

        moves: moves of each image, from `draws.draw_with_moves` for the same samples.
        columns: the followers' columns as stored; masks are decoded, without pixels if missing.
        Raises DatasetError if a mask doesn't have its image's size, or an array doesn't have a row
        for each box.
        """
        found: dict[str, DenseColumn | RaggedColumn] = {}
        kept: dict[str, tuple[Bools, Ints]] = {}  # which boxes, and all boxes' offsets
        boxes_first = sorted(self.followers.items(), key=lambda each: each[1].boxes is not None)
        for name, follower in boxes_first:
            column: Column = columns[name]
            if follower.boxes is not None:
                column = _kept_rows(name, column, *kept[follower.boxes])
            if follower.type.follows:
                column = follower.type.follow(column, moves.get(follower.of), size=follower.shape)
            assert isinstance(column, DenseColumn | RaggedColumn), name
            if follower.type.is_boxes and follower.sanitize is not None:
                assert isinstance(column, RaggedColumn), name
                kept[name] = keep, offsets = follower.sanitize.keeps(column.values), column.offsets
                column = RaggedColumn(column.values[keep], _kept_offsets(keep, offsets))
            found[name] = column
        return found


def _kept_offsets(keep: Bools, offsets: Ints) -> Ints:
    return np.append(0, np.cumsum(keep))[offsets]


def _kept_rows(name: str, column: Column, keep: Bools, offsets: Ints) -> RaggedColumn | ListColumn:
    """Return a field's rows of the kept boxes. keep: bool, (total,). offsets: of all boxes."""
    if isinstance(column, DenseColumn):  # equally many rows in every sample
        count, rows = column.values.shape[:2]
        values = column.values.reshape(-1, *column.values.shape[2:])
        column = RaggedColumn(values, np.arange(count + 1) * rows)
    assert isinstance(column, RaggedColumn | ListColumn), name
    counts = np.diff(offsets)
    if isinstance(column, ListColumn):
        lengths = np.array([len(each) for each in column.samples], np.int64)
    else:
        lengths = column.first_lengths
    if (wrong := np.flatnonzero(lengths != counts)).size:
        at = wrong[0]
        raise DatasetError(
            f'"{name}" has {lengths[at]} rows in a sample of {counts[at]} boxes: wanted a row for '
            "each box. Correct the data, or leave `of=` out of its type."
        )
    if isinstance(column, RaggedColumn) and column.shapes is None:
        return RaggedColumn(column.values[keep], _kept_offsets(keep, offsets))
    parts = enumerate(pairwise(offsets.tolist()))
    left = [column.sample(row)[keep[begin:end]] for row, (begin, end) in parts]
    return (
        ListColumn(left) if isinstance(column, ListColumn) else RaggedColumn.of(left, like=column)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayCrop:
    """A crop of one array field. Only `check_array_crops` creates it.

    op: the operation. index: its place in the recipe. sides: lengths of the field's samples, None
    if they differ. shape: shape of the cropped part. salt: part of the key of its draws.
    """

    op: FixedCrop
    index: int
    sides: tuple[int | None, ...]
    shape: tuple[int, ...]
    salt: int = 0

    @property
    def axes(self) -> range:
        """The axes that have a length in the operation's size: the last ones."""
        return range(len(self.sides) - len(self.op.lengths), len(self.sides))


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayDraws:
    """The draws of the parts of arrays: pure functions of (seed, epoch, sample id), on any
    thread."""

    crops: Mapping[str, ArrayCrop]
    seed: int

    @property
    def is_random(self) -> bool:
        """True if a sample's crop differs from epoch to epoch."""
        return any(crop.op.is_random for crop in self.crops.values())

    def before(
        self, ids: Ints, epoch: int | Ints, occurrences: Ints | None = None
    ) -> dict[str, ColumnCrop]:
        """Return the crops of fields whose samples have the same shape; only these parts are read.

        epoch, occurrences: as in `draw_base`.
        """
        return {
            name: ColumnCrop(self._corners(crop, ids, (epoch, occurrences), crop.sides), crop.shape)
            for name, crop in self.crops.items()
            if None not in crop.sides
        }

    def after(
        self,
        content: SampleBatch,
        epoch: int | Ints,
        bad: dict[int, str],
        occurrences: Ints | None = None,
    ) -> SampleBatch:
        """Return the batch with the cropped parts of fields whose samples differ in shape, which is
        known after they were read.

        bad: rows that are known to be bad; rows of samples that are too small are added, with
        reasons.
        """
        columns: dict[str, Column] = {}
        for name, crop in self.crops.items():
            if None in crop.sides:
                columns[name] = self._cropped(name, content, crop, (epoch, occurrences), bad)
        return content.with_columns(columns) if columns else content

    def _cropped(
        self, name: str, content: SampleBatch, crop: ArrayCrop, keys: _Keys, bad: dict[int, str]
    ) -> DenseColumn:
        column = content.columns[name]
        assert isinstance(column, DenseColumn | RaggedColumn)
        shapes = _shapes(column, len(crop.shape))
        is_small = (shapes < crop.shape).any(axis=1)
        present = content.present.get(name)
        for row in np.flatnonzero(is_small).tolist():
            if row not in bad and (present is None or present[row]):
                bad[row] = (
                    f'"{name}" has the shape {tuple(shapes[row].tolist())}, and the recipe crops '
                    f"parts of shape {crop.shape}"
                )
        corners = self._corners(crop, content.ids, keys, shapes)
        parts = ColumnCrop(corners, crop.shape)
        return cropped(column, parts, rows=np.flatnonzero(~is_small))

    def _corners(
        self, crop: ArrayCrop, ids: Ints, keys: _Keys, sides: Ints | Sequence[int | None]
    ) -> Ints:
        """Return the first index along each axis, int64, shape (n, dimensions)."""
        found = np.zeros((len(ids), len(crop.shape)), np.int64)
        whole = np.broadcast_to(np.asarray(sides, np.int64), found.shape)
        places = np.zeros((len(crop.axes), 1))
        if crop.op.is_random:
            from penstock.augment.draw_keys import Uniform, draw_base  # needed for crops only

            base = draw_base(self.seed, keys[0], ids, salt=crop.salt, occurrences=keys[1])
            places = Uniform(base, crop.index)(len(crop.axes))
        for number, axis in enumerate(crop.axes):
            length = crop.shape[axis]
            side = np.maximum(whole[:, axis], length)  # of a sample that is too small: any index
            found[:, axis] = crop.op.corner(side, length, places[number])
        return found


def _shapes(column: DenseColumn | RaggedColumn, dimensions: int) -> Ints:
    if isinstance(column, RaggedColumn) and column.shapes is not None:
        return column.shapes
    samples = map(column.sample, range(len(column)))
    return np.array([each.shape for each in samples], np.int64).reshape(-1, dimensions)
