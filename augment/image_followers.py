"""Move the masks, boxes, keypoints and rows of boxes of an image as its recipe moves the pixels.

Each move is torchvision's operation of that name with the numbers of `draws`, in the order of the
recipe. It uses only numpy, and is cheap compared with decoding: a mask needs a look-up by an index
map for each axis, boxes and points need a few sums a batch.

The rules are those of torchvision.transforms.v2: a mask gets the nearest pixel by
floor(index * old / new), computed in float32 (never the neighbour with the largest weight of a
filter); a box is four edges between pixels, mirrored at the width, a point is the middle of a
pixel, mirrored at the width - 1; every crop clips boxes, and none clips points. Boxes are also
clipped at the end, so that they are inside their image even without a crop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import DatasetError, RecipeError
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
    from penstock.readers.fieldtypes import Column

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]
    Samples = Column | Sequence[NDArray[Any]]

OUTSIDE = -1
"""The index of positions outside the mask in an index map."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CropMove:
    """A crop of each image, int64, shape (n,); the window may reach outside. size: (height, width)
    of the images before it."""

    size: tuple[Ints, Ints]
    top: Ints
    left: Ints
    height: Ints
    width: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScaleMove:
    """A resize of each image. size, to: (height, width) before and after it, int64, (n,)."""

    size: tuple[Ints, Ints]
    to: tuple[Ints, Ints]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlipMove:
    """A flip of some images. size: (height, width). on: True for flipped images, bool, (n,).
    vertical: flip upside down, not left to right."""

    size: tuple[Ints, Ints]
    on: NDArray[np.bool_]
    vertical: bool = False


Move = CropMove | ScaleMove | FlipMove


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageMoves:
    """The moves of the n images of a batch, in order.

    size: heights and widths of the images as stored, upright, int64, (n,) each. shape: final height
    and width of all images. mask_fill: value of masks outside the image.
    """

    size: tuple[Ints, Ints]
    moves: tuple[Move, ...]
    shape: tuple[int, int]
    mask_fill: int = 0

    def __len__(self) -> int:
        return len(self.size[0])


def index_maps(moves: ImageMoves) -> tuple[Ints, Ints]:
    """Return the row and the column of the mask for each row and column of a sample.

    int64, shapes (n, height) and (n, width); OUTSIDE for positions outside the mask.
    """
    found = []
    for axis, length in enumerate(moves.shape):
        index = np.broadcast_to(np.arange(length), (len(moves), length)).copy()
        outside: NDArray[np.bool_] | None = None
        for move in reversed(moves.moves):
            side = move.size[axis][:, None]
            if isinstance(move, CropMove):
                index += (move.left if axis else move.top)[:, None]
                beyond = (index < 0) | (index >= side)
                outside = beyond if outside is None else outside | beyond
                np.clip(index, 0, np.maximum(side - 1, 0), out=index)
            elif isinstance(move, ScaleMove):
                index = _nearest(index, side, move.to[axis][:, None])
            elif move.vertical is not bool(axis):
                np.copyto(index, side - 1 - index, where=move.on[:, None])
        if outside is not None:
            index[outside] = OUTSIDE
        found.append(index)
    return found[0], found[1]


def _nearest(index: Ints, side: Ints, resized: Ints) -> Ints:
    """Return the source of each index by torch's and torchvision's "nearest", in float32; with more
    precision it would be another pixel for some sizes."""
    scale = side.astype(np.float32) / resized.astype(np.float32)
    return np.minimum((index.astype(np.float32) * scale).astype(np.int64), side - 1)


def move_masks(
    moves: ImageMoves, masks: Sequence[NDArray[Any]], *, dtype: DTypeLike | None = None
) -> NDArray[Any]:
    """Return the moved masks, shape (n, height, width).

    masks: mask of each image, shape (its height, its width), integers; a missing one has no pixels
    and becomes zeros. dtype: dtype of the result; None: the common one of these masks. Raises
    DatasetError for a mask of another size, RecipeError if the dtype can't hold `mask_fill`.
    """
    if len(masks) != len(moves):
        raise ValueError(f"got {len(masks)} masks of {len(moves)} images")
    out = np.zeros((len(masks), *moves.shape), dtype or common_dtype(masks))
    fill = moves.mask_fill
    if not np.iinfo(out.dtype).min <= fill <= np.iinfo(out.dtype).max:
        raise RecipeError(
            f"RandomCrop(mask_fill=...): got {fill}, and the masks are {out.dtype}, which can't "
            "hold it. Choose another number, or store the masks in a wider type."
        )
    rows, columns = index_maps(moves)
    is_outside: list[Any] = [(index < 0).any(axis=1) for index in (rows, columns)]
    heights, widths = (side.tolist() for side in moves.size)
    for place, mask in enumerate(masks):
        if not mask.size:
            continue
        if mask.shape != (heights[place], widths[place]):
            raise DatasetError(
                f"A mask of shape {mask.shape} belongs to an image of {heights[place]} x "
                f"{widths[place]} (height x width): wanted the same size. Index the dataset again."
            )
        # Rows first: full lines are copied, and fewer pixels are gathered by column.
        shown = mask.take(rows[place], axis=0, mode="clip")
        out[place] = shown.take(columns[place], axis=1, mode="clip")
        if is_outside[0][place]:
            out[place][rows[place] < 0] = fill
        if is_outside[1][place]:
            out[place][:, columns[place] < 0] = fill
    return out


def common_dtype(masks: Sequence[NDArray[Any]]) -> np.dtype[Any]:
    """Return the dtype that holds the values of all masks of a batch; uint8 without any mask."""
    kinds = {mask.dtype for mask in masks if mask.size}
    return np.result_type(*kinds) if kinds else np.dtype(np.uint8)


def move_boxes(moves: ImageMoves, boxes: NDArray[Any], owner: Ints) -> NDArray[np.float32]:
    """Return the moved boxes, clipped to their images: float32, shape (k, 4).

    boxes: x1, y1, x2, y2, shape (k, 4). owner: row of each box's image, int64, (k,).
    """
    moved = np.array(boxes, np.float64).reshape(-1, 4)
    for move in moves.moves:
        for axis, edges in ((0, moved[:, 1::2]), (1, moved[:, 0::2])):
            if isinstance(move, CropMove):
                edges -= (move.left if axis else move.top)[owner, None]
                side = (move.width if axis else move.height)[owner, None]
                np.clip(edges, 0, side, out=edges)
            elif isinstance(move, ScaleMove):
                edges *= _ratio(move, axis)[owner, None]
            elif move.vertical is not bool(axis):
                mirrored = move.size[axis][owner, None] - edges[:, ::-1]
                np.copyto(edges, mirrored, where=move.on[owner, None])
    height, width = moves.shape
    np.clip(moved, 0, [width, height, width, height], out=moved)
    return moved.astype(np.float32)


def move_points(moves: ImageMoves, points: NDArray[Any], owner: Ints) -> NDArray[np.float32]:
    """Return the moved points, which may be outside their images: float32, shape (k, 2).

    points: x, y, shape (k, 2). owner: row of each point's image, int64, (k,).
    """
    moved = np.array(points, np.float64).reshape(-1, 2)
    for move in moves.moves:
        for axis, places in ((0, moved[:, 1]), (1, moved[:, 0])):
            if isinstance(move, CropMove):
                places -= (move.left if axis else move.top)[owner]
            elif isinstance(move, ScaleMove):
                places *= _ratio(move, axis)[owner]
            elif move.vertical is not bool(axis):
                mirrored = move.size[axis][owner] - 1 - places
                np.copyto(places, mirrored, where=move.on[owner])
    return moved.astype(np.float32)


def _ratio(move: ScaleMove, axis: int) -> Floats:
    return np.asarray(move.to[axis] / np.maximum(move.size[axis], 1))


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
        return move_masks(moves, masks, dtype=dtype)
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
        boxes = move_boxes(moves, boxes, _owners(counts))
    if follower.sanitize is None:
        kept = _KeptBoxes(np.ones(len(boxes), np.bool_), counts)
        return RaggedColumn(boxes, _offsets(counts)), kept
    kept = _KeptBoxes(follower.sanitize.keeps(boxes), counts)
    return RaggedColumn(boxes[kept.keep], kept.offsets), kept


def _points(column: Samples, moves: ImageMoves | None) -> DenseColumn | RaggedColumn:
    stored, counts = _rows(column, 2)
    points = (
        stored.astype(np.float32) if moves is None else move_points(moves, stored, _owners(counts))
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
