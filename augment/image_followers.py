"""Move the masks, boxes, keypoints and rows of boxes of an image as its recipe moves the pixels.

Every move is torchvision's operation of that name with numbers that `draws` has drawn, one after
the other as the recipe has them. Numpy only, and cheap beside decoding: a mask is looked up by two
index maps, one an axis; boxes and points are a few sums a batch.

The rules are those of torchvision.transforms.v2: a mask takes the nearest pixel by
floor(index * old / new), computed in float32 (never the neighbour that a filter would weigh most);
a box is four edges between pixels, mirrored at the width, a point is the middle of a pixel,
mirrored at the width - 1; boxes are clipped by every crop and points never. Boxes are clipped at
the end too, so that none leaves its image even where nothing is cropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import DatasetError, RecipeError
from penstock.readers.fields import (
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
    from penstock.readers.fields import Column

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]
    Samples = Column | Sequence[NDArray[Any]]

OUTSIDE = -1
"""In an index map: nothing of the mask is shown there."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CropMove:
    """A window of each image, int64, shape (n,); it may reach outside. size: (height, width)
    that the window lies on."""

    size: tuple[Ints, Ints]
    top: Ints
    left: Ints
    height: Ints
    width: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScaleMove:
    """A resize of each image. size, to: (height, width) before and behind it, int64, (n,)."""

    size: tuple[Ints, Ints]
    to: tuple[Ints, Ints]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlipMove:
    """Mirrors some images. size: (height, width). on: which ones, bool, (n,). vertical: top and
    bottom change places, not left and right."""

    size: tuple[Ints, Ints]
    on: NDArray[np.bool_]
    vertical: bool = False


Move = CropMove | ScaleMove | FlipMove


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageMoves:
    """The moves of the n images of a batch, in order.

    size: heights and widths of the images as stored, upright, int64, (n,) each. shape: height and
    width of all of them in the end. mask_fill: what masks show where a window reaches outside.
    """

    size: tuple[Ints, Ints]
    moves: tuple[Move, ...]
    shape: tuple[int, int]
    mask_fill: int = 0

    def __len__(self) -> int:
        return len(self.size[0])


def index_maps(moves: ImageMoves) -> tuple[Ints, Ints]:
    """Which row and which column of its mask each row and column of a sample shows.

    int64, shapes (n, height) and (n, width); OUTSIDE where there is none.
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
    """torchvision's and torch's "nearest": in float32, else another pixel for some sizes."""
    scale = side.astype(np.float32) / resized.astype(np.float32)
    return np.minimum((index.astype(np.float32) * scale).astype(np.int64), side - 1)


def move_masks(
    moves: ImageMoves, masks: Sequence[NDArray[Any]], *, dtype: DTypeLike | None = None
) -> NDArray[Any]:
    """The masks as their images look now: shape (n, height, width).

    masks: of each image, (its height, its width), integers; one without any pixel is a missing one
    and becomes zeros. dtype: of the result; None: of all these masks together. Raises DatasetError
    for a mask of another size, RecipeError where masks can't hold `mask_fill`.
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
    beside: list[Any] = [(index < 0).any(axis=1) for index in (rows, columns)]
    heights, widths = (side.tolist() for side in moves.size)
    for place, mask in enumerate(masks):
        if not mask.size:
            continue
        if mask.shape != (heights[place], widths[place]):
            raise DatasetError(
                f"A mask of shape {mask.shape} belongs to an image of {heights[place]} x "
                f"{widths[place]} (height x width): wanted the same size. Index the dataset anew."
            )
        # Rows first: whole lines are copied, and what is gathered then is small.
        shown = mask.take(rows[place], axis=0, mode="clip")
        out[place] = shown.take(columns[place], axis=1, mode="clip")
        if beside[0][place]:
            out[place][rows[place] < 0] = fill
        if beside[1][place]:
            out[place][:, columns[place] < 0] = fill
    return out


def common_dtype(masks: Sequence[NDArray[Any]]) -> np.dtype[Any]:
    """Return the dtype that holds the values of all masks of a batch; uint8 without any mask."""
    kinds = {mask.dtype for mask in masks if mask.size}
    return np.result_type(*kinds) if kinds else np.dtype(np.uint8)


def move_boxes(moves: ImageMoves, boxes: NDArray[Any], owner: Ints) -> NDArray[np.float32]:
    """Boxes where their pixels are now, clipped to their images: float32, shape (k, 4).

    boxes: x1, y1, x2, y2, shape (k, 4). owner: the row of each one's image, int64, (k,).
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
    """Points where their pixels are now, outside of their images too: float32, shape (k, 2).

    points: x, y, shape (k, 2). owner: the row of each one's image, int64, (k,).
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
    """All followers of a batch, by field.

    moves: of each image in `recipes.followed`, by `draws.draw_with_moves` for the same samples.
    columns: the followers' columns as stored (boxes in the format of their type); masks decoded,
    (height, width) each, one of no pixels where it is missing. dtypes: of masks, so that they don't
    depend on what else is in a batch; None: the widest of the batch.
    Masks come as (n, height, width), boxes as x1, y1, x2, y2, float32, keypoints as x, y, float32.
    Raises DatasetError where a mask isn't of its image's size, or an array hasn't a row a box.
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
    """The kept boxes, bool, (total,), and the number of boxes that each sample had, (n,)."""

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
    column: Samples, follower: Follower, type: Boxes, moves: ImageMoves | None
) -> tuple[RaggedColumn, _KeptBoxes]:
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


def _kept_rows(name: str, column: Samples, kept: _KeptBoxes) -> RaggedColumn:
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
