"""Where the pixels of each image go, and what is fastened to them: masks, boxes, points.

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

from penstock.cache.errors import DatasetError, RecipeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike, NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

OUTSIDE = -1
"""In an index map: nothing of the mask is shown there."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Crop:
    """A window of each image, int64, shape (n,); it may reach outside. size: (height, width)
    that the window lies on."""

    size: tuple[Ints, Ints]
    top: Ints
    left: Ints
    height: Ints
    width: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scale:
    """A resize of each image. size, to: (height, width) before and behind it, int64, (n,)."""

    size: tuple[Ints, Ints]
    to: tuple[Ints, Ints]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flip:
    """Mirrors some images. size: (height, width). on: which ones, bool, (n,). vertical: top and
    bottom change places, not left and right."""

    size: tuple[Ints, Ints]
    on: NDArray[np.bool_]
    vertical: bool = False


Move = Crop | Scale | Flip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moves:
    """What happens to the n images of a batch, in order.

    size: heights and widths of the images as stored, upright, int64, (n,) each. shape: height and
    width of all of them in the end. mask_fill: what masks show where a window reaches outside.
    """

    size: tuple[Ints, Ints]
    moves: tuple[Move, ...]
    shape: tuple[int, int]
    mask_fill: int = 0

    def __len__(self) -> int:
        return len(self.size[0])


def index_maps(moves: Moves) -> tuple[Ints, Ints]:
    """Which row and which column of its mask each row and column of a sample shows.

    int64, shapes (n, height) and (n, width); OUTSIDE where there is none.
    """
    found = []
    for axis, length in enumerate(moves.shape):
        index = np.broadcast_to(np.arange(length), (len(moves), length)).copy()
        outside: NDArray[np.bool_] | None = None
        for move in reversed(moves.moves):
            side = move.size[axis][:, None]
            if isinstance(move, Crop):
                index += (move.left if axis else move.top)[:, None]
                beyond = (index < 0) | (index >= side)
                outside = beyond if outside is None else outside | beyond
                np.clip(index, 0, np.maximum(side - 1, 0), out=index)
            elif isinstance(move, Scale):
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
    moves: Moves,
    masks: Sequence[NDArray[Any]],
    *,
    dtype: DTypeLike | None = None,
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
    """What holds the numbers of all masks of a batch; uint8 where there are none."""
    kinds = {mask.dtype for mask in masks if mask.size}
    return np.result_type(*kinds) if kinds else np.dtype(np.uint8)


def move_boxes(moves: Moves, boxes: NDArray[Any], owner: Ints) -> NDArray[np.float32]:
    """Boxes where their pixels are now, clipped to their images: float32, shape (k, 4).

    boxes: x1, y1, x2, y2, shape (k, 4). owner: the row of each one's image, int64, (k,).
    """
    moved = np.array(boxes, np.float64).reshape(-1, 4)
    for move in moves.moves:
        for axis, edges in ((0, moved[:, 1::2]), (1, moved[:, 0::2])):
            if isinstance(move, Crop):
                edges -= (move.left if axis else move.top)[owner, None]
                side = (move.width if axis else move.height)[owner, None]
                np.clip(edges, 0, side, out=edges)
            elif isinstance(move, Scale):
                edges *= _ratio(move, axis)[owner, None]
            elif move.vertical is not bool(axis):
                mirrored = move.size[axis][owner, None] - edges[:, ::-1]
                np.copyto(edges, mirrored, where=move.on[owner, None])
    height, width = moves.shape
    np.clip(moved, 0, [width, height, width, height], out=moved)
    return moved.astype(np.float32)


def move_points(moves: Moves, points: NDArray[Any], owner: Ints) -> NDArray[np.float32]:
    """Points where their pixels are now, outside of their images too: float32, shape (k, 2).

    points: x, y, shape (k, 2). owner: the row of each one's image, int64, (k,).
    """
    moved = np.array(points, np.float64).reshape(-1, 2)
    for move in moves.moves:
        for axis, places in ((0, moved[:, 1]), (1, moved[:, 0])):
            if isinstance(move, Crop):
                places -= (move.left if axis else move.top)[owner]
            elif isinstance(move, Scale):
                places *= _ratio(move, axis)[owner]
            elif move.vertical is not bool(axis):
                mirrored = move.size[axis][owner] - 1 - places
                np.copyto(places, mirrored, where=move.on[owner])
    return moved.astype(np.float32)


def _ratio(move: Scale, axis: int) -> Floats:
    return np.asarray(move.to[axis] / np.maximum(move.size[axis], 1))
