"""Masks, boxes, keypoints and rows of boxes as the recipes of their images leave them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment.moves import common_dtype, move_boxes, move_masks, move_points
from penstock.cache.errors import DatasetError
from penstock.readers.fields.boxes import to_xyxy
from penstock.readers.fields.columns import DenseColumn, EncodedColumn, ListColumn, RaggedColumn
from penstock.readers.fields.field_types import Boxes, Keypoints, Mask

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import DTypeLike, NDArray

    from penstock.augment.field_recipes import FieldRecipes, Follower
    from penstock.augment.moves import Moves
    from penstock.readers.fields.columns import Column

    Ints = NDArray[np.int64]
    Samples = Column | Sequence[NDArray[Any]]


def follow(
    recipes: FieldRecipes,
    moves: Mapping[str, Moves],
    columns: Mapping[str, Samples],
    *,
    dtypes: Mapping[str, DTypeLike | None] | None = None,
) -> dict[str, DenseColumn | RaggedColumn]:
    """All followers of a batch, by field.

    moves: of each image in `recipes.followed`, by `draws.draw_with_moves` for the same samples.
    columns: the followers' columns as stored (boxes in the format of their type); masks decoded,
    (height, width) each, one of no pixels where it is missing. dtypes: of masks, so that they don't
    depend on what else is in a batch; None: the widest of the batch.
    Masks come as (n, height, width), boxes as x1, y1, x2, y2, float32, keypoints as x, y, float32.
    Raises DatasetError where a mask isn't of its image's size, or an array hasn't a row a box.
    """
    found: dict[str, DenseColumn | RaggedColumn] = {}
    kept: dict[str, _Kept] = {}
    for name, follower in recipes.followers.items():
        moved = moves[follower.of] if follower.moves else None
        column = columns[name]
        if isinstance(follower.type, Mask):
            dtype = (dtypes or {}).get(name)
            found[name] = DenseColumn(_masks(_samples(column), follower, moved, dtype))
        elif isinstance(follower.type, Boxes):
            found[name], kept[name] = _boxes(column, follower, follower.type, moved)
        elif isinstance(follower.type, Keypoints):
            found[name] = _points(column, moved)
    for name, follower in recipes.followers.items():
        if follower.boxes is not None:
            found[name] = _rows_left(name, columns[name], kept[follower.boxes])
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """Which boxes stay, bool, (total,), and how many there were in each sample, (n,)."""

    keep: NDArray[np.bool_]
    counts: Ints

    @property
    def offsets(self) -> Ints:
        """Of the samples in what stays."""
        owners = _owners(self.counts)[self.keep]
        return _offsets(np.bincount(owners, minlength=len(self.counts)))


def _masks(
    masks: Sequence[NDArray[Any]], follower: Follower, moves: Moves | None, dtype: DTypeLike | None
) -> NDArray[Any]:
    if moves is not None:
        return move_masks(moves, masks, dtype=dtype)
    assert follower.shape is not None
    out = np.zeros((len(masks), *follower.shape), dtype or common_dtype(masks))
    for place, mask in enumerate(masks):
        if not mask.size:
            continue
        if mask.shape != follower.shape:
            raise DatasetError(
                f"A mask of shape {mask.shape} in a dataset of {follower.shape} (height, width). "
                "Index the dataset anew."
            )
        out[place] = mask
    return out


def _samples(column: Samples) -> Sequence[NDArray[Any]]:
    if isinstance(column, RaggedColumn):
        return [column.sample(row) for row in range(len(column))]
    if isinstance(column, DenseColumn):
        return list(column.values)
    assert not isinstance(column, EncodedColumn | ListColumn), "masks come decoded"
    return column


def _boxes(
    column: Samples, follower: Follower, type: Boxes, moves: Moves | None
) -> tuple[RaggedColumn, _Kept]:
    stored, counts = _rows(column, 4)
    boxes = to_xyxy(stored, type.format)
    if type.is_normalised:
        if moves is None:
            assert follower.shape is not None  # `check_recipes` refuses an unknown one
            boxes *= np.array([*follower.shape[::-1]] * 2, np.float32)
        else:
            sides = np.stack([moves.size[1], moves.size[0]] * 2, axis=1)
            boxes = (boxes * sides[_owners(counts)]).astype(np.float32)
    if moves is not None:
        boxes = move_boxes(moves, boxes, _owners(counts))
    if follower.sanitize is None:
        kept = _Kept(np.ones(len(boxes), np.bool_), counts)
        return RaggedColumn(boxes, _offsets(counts)), kept
    kept = _Kept(follower.sanitize.keeps(boxes), counts)
    return RaggedColumn(boxes[kept.keep], kept.offsets), kept


def _points(column: Samples, moves: Moves | None) -> DenseColumn | RaggedColumn:
    stored, counts = _rows(column, 2)
    points = (
        stored.astype(np.float32) if moves is None else move_points(moves, stored, _owners(counts))
    )
    if isinstance(column, DenseColumn):
        return DenseColumn(points.reshape(column.values.shape))
    return RaggedColumn(points, _offsets(counts))


def _rows(column: Samples, width: int) -> tuple[NDArray[Any], Ints]:
    """All rows of so many numbers, (total, width), and how many each sample has, (n,)."""
    if isinstance(column, DenseColumn):
        counts = np.full(len(column), column.values[:1].size // width, np.int64)
        return column.values.reshape(-1, width), counts
    assert isinstance(column, RaggedColumn)
    per_row = width if column.values.ndim == 1 else 1
    return column.values.reshape(-1, width), np.diff(column.offsets) // per_row


def _owners(counts: Ints) -> Ints:
    return np.repeat(np.arange(len(counts)), counts)


def _offsets(counts: Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def _rows_left(name: str, column: Samples, kept: _Kept) -> RaggedColumn:
    """An array's rows of those boxes that stay."""
    if isinstance(column, DenseColumn):  # of as many rows in every sample
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
            "each box. Mend the data, or leave `of=` out of its type."
        )
    if several is None:
        return RaggedColumn(column.values[kept.keep], kept.offsets)
    ends = np.cumsum(counts)
    left = [
        column.sample(row)[kept.keep[end - count : end]]
        for row, (count, end) in enumerate(zip(counts.tolist(), ends.tolist(), strict=True))
    ]
    return RaggedColumn.of(left, like=column)
