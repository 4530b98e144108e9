"""Move the masks, boxes, keypoints and rows of boxes of a batch with their images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment.image_moves import common_dtype
from penstock.cache import DatasetError
from penstock.readers.fieldtypes import (
    Boxes,
    DenseColumn,
    EncodedColumn,
    Keypoints,
    ListColumn,
    Mask,
    RaggedColumn,
    to_xyxy,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import DTypeLike, NDArray

    from penstock.augment.checked_recipes import FieldRecipes, Follower
    from penstock.augment.image_moves import ImageMoves
    from penstock.readers.fieldtypes import Column

    Ints = NDArray[np.int64]
    Samples = Column | Sequence[NDArray[Any]]


def follow(
    recipes: FieldRecipes,
    moves: Mapping[str, ImageMoves],
    columns: Mapping[str, Samples],
    *,
    dtypes: Mapping[str, DTypeLike | None] | None = None,
) -> dict[str, DenseColumn | RaggedColumn]:
    """Return the moved followers of a batch by field: masks as (n, height, width), boxes as x1, y1,
    x2, y2, float32, keypoints as x, y, float32.

    moves: moves of each image in `recipes.followed`, from `draws.draw_with_moves` for the same
    samples. columns: the followers' columns as stored (boxes in the format of their type); masks
    are decoded, (height, width) each, without pixels if missing. dtypes: dtypes of masks, so that
    they don't depend on the rest of the batch; None: the widest of the batch. Raises DatasetError
    if a mask doesn't have its image's size, or an array doesn't have a row for each box.
    """
    found: dict[str, DenseColumn | RaggedColumn] = {}
    kept: dict[str, _KeptBoxes] = {}
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


def _masks(
    masks: Sequence[NDArray[Any]],
    follower: Follower,
    moves: ImageMoves | None,
    dtype: DTypeLike | None,
) -> NDArray[Any]:
    if moves is not None:
        return moves.move_masks(masks, dtype=dtype)
    assert follower.shape is not None
    out = np.zeros((len(masks), *follower.shape), dtype or common_dtype(masks))
    for place, mask in enumerate(masks):
        if not mask.size:
            continue
        if mask.shape != follower.shape:
            raise DatasetError(
                f"A mask of shape {mask.shape} in a dataset of {follower.shape} (height, width). "
                "Index the dataset again."
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
    column: Samples, follower: Follower, type: Boxes, moves: ImageMoves | None
) -> tuple[RaggedColumn, _KeptBoxes]:
    stored, counts = _rows(column, 4)
    boxes = to_xyxy(stored, type.format)
    if type.is_normalised:
        if moves is None:
            assert follower.shape is not None  # checked by `check_recipes`
            boxes *= np.array([*follower.shape[::-1]] * 2, np.float32)
        else:
            sides = np.stack([moves.size[1], moves.size[0]] * 2, axis=1)
            boxes = (boxes * sides[_owners(counts)]).astype(np.float32)
    if moves is not None:
        boxes = moves.move_boxes(boxes, _owners(counts))
    if follower.sanitize is None:
        kept = _KeptBoxes(np.ones(len(boxes), np.bool_), counts)
        return RaggedColumn(boxes, _offsets(counts)), kept
    kept = _KeptBoxes(follower.sanitize.keeps(boxes), counts)
    return RaggedColumn(boxes[kept.keep], kept.offsets), kept


def _points(column: Samples, moves: ImageMoves | None) -> DenseColumn | RaggedColumn:
    stored, counts = _rows(column, 2)
    points = (
        stored.astype(np.float32) if moves is None else moves.move_points(stored, _owners(counts))
    )
    if isinstance(column, DenseColumn):
        return DenseColumn(points.reshape(column.values.shape))
    return RaggedColumn(points, _offsets(counts))


def _rows(column: Samples, width: int) -> tuple[NDArray[Any], Ints]:
    """Return all rows, (total, width), and the number of rows of each sample, (n,)."""
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


def _kept_rows(name: str, column: Samples, kept: _KeptBoxes) -> RaggedColumn:
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
