"""Move the masks, boxes and keypoints of an image as its recipe moves the pixels.

Each move is torchvision's operation of that name with the numbers of `draws`, in the order of the
recipe. It uses only numpy, and is cheap compared with decoding: a mask needs a look-up by an index
map for each axis, boxes and points need a few sums a batch.

The rules are those of torchvision.transforms.v2: a mask gets the nearest pixel, after a resize by
floor(index * old / new), computed in float32 (never the neighbour with the largest weight of a
filter); a box is four edges between pixels, mirrored at the width, a point is mirrored at the
width - 1; a warp moves a point as a corner of a box, and a box to the bounding box of its moved
corners. Every crop and warp clips boxes, and none clips points. Boxes are also clipped at the end,
so that they are inside their image even without a crop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from penstock.cache import DatasetError, RecipeError
from penstock.readers.fieldtypes import common_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike, NDArray

    from penstock.readers import Bools, Floats, Ints, Numbers


OUTSIDE = -1
"""The index of positions outside the mask in an index map."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageMove(ABC):
    """One move of each image of a batch.

    size: heights and widths of the images before it, int64, (2, n).
    """

    size: Ints

    @property
    def mirrored(self) -> Bools:
        """Return which images this move mirrors, bool, (n,)."""
        return np.zeros(len(self.size[0]), np.bool_)

    @abstractmethod
    def masks(self, masks: Numbers) -> Numbers:
        """Return the moved masks of images of one size, shape (n, height, width)."""

    @abstractmethod
    def of_image(self, image: int, masks: Numbers) -> Numbers:
        """Return several masks of one image after the move, shape (masks, height, width), 0
        outside. All images have one size."""

    @abstractmethod
    def places(self, places: Floats, owner: Ints) -> None:
        """Move points, or the upper left and lower right corners of boxes, in place: x, y, shape
        (k, 1, 2) or (k, 2, 2). owner: row of each one's image."""


class AxisMove(ImageMove):
    """A move along rows (axis 0) and columns (axis 1), each for itself."""

    __slots__ = ()

    @abstractmethod
    def source(self, index: Ints, axis: int) -> Bools | None:
        """Replace the indexes of the moved image by those of the image before, in place, shape
        (n, length). Return True for positions outside, where the index is that of the edge."""

    @abstractmethod
    def along(self, places: Floats, axis: int, owner: Ints) -> None:
        """Move places along an axis in place: both edges of boxes, shape (k, 2), or points, shape
        (k, 1)."""

    def masks(self, masks: Numbers) -> Numbers:
        sides = np.full((2, len(masks)), np.array(masks.shape[1:])[:, None])
        size, canvas = (self.size[0], self.size[1]), masks.shape[1:]
        moves = ImageMoves(size=size, moves=(self,), sizes=sides, canvas=canvas)
        return np.asarray(moves.move_masks([*masks], dtype=masks.dtype))

    def of_image(self, image: int, masks: Numbers) -> Numbers:
        for axis in (0, 1):
            index = np.arange(masks.shape[axis + 1])[None].repeat(self.size.shape[1], axis=0)
            self.source(index, axis)
            masks = masks.take(index[image], axis=axis + 1)
        return masks

    def places(self, places: Floats, owner: Ints) -> None:
        self.along(places[..., 1], 0, owner)
        self.along(places[..., 0], 1, owner)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CropMove(AxisMove):
    """A crop of each image, which may reach outside. start: top and left, length: height and width
    of the window, int64, (2, n)."""

    start: Ints
    length: Ints

    def source(self, index: Ints, axis: int) -> Bools:
        side = self.size[axis][:, None]
        index += self.start[axis][:, None]
        outside: Bools = (index < 0) | (index >= side)
        np.clip(index, 0, np.maximum(side - 1, 0), out=index)
        return outside

    def along(self, places: Floats, axis: int, owner: Ints) -> None:
        places -= self.start[axis][owner, None]
        if places.shape[1] == 2:  # boxes
            np.clip(places, 0, self.length[axis][owner, None], out=places)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoxedCropMove(CropMove):
    """A crop that makes boxes empty if their middle isn't in the window. on: True for images that
    have such a window, bool, (n,)."""

    on: Bools

    def places(self, places: Floats, owner: Ints) -> None:
        middle = places.mean(axis=1)
        start = self.start[::-1, owner].T
        inside = ((start < middle) & (middle < start + self.length[::-1, owner].T)).all(axis=1)
        CropMove.places(self, places, owner)
        if places.shape[1] == 2:  # boxes
            places[~inside & self.on[owner]] = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScaleMove(AxisMove):
    """A resize of each image. to: heights and widths after it, int64, (2, n)."""

    to: Ints

    def source(self, index: Ints, axis: int) -> None:
        # In float32, as torch and torchvision: with more precision it would be another pixel for
        # some sizes.
        side = self.size[axis][:, None]
        scale = side.astype(np.float32) / self.to[axis][:, None].astype(np.float32)
        np.minimum((index.astype(np.float32) * scale).astype(np.int64), side - 1, out=index)

    def along(self, places: Floats, axis: int, owner: Ints) -> None:
        places *= (self.to[axis] / np.maximum(self.size[axis], 1))[owner, None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlipMove(AxisMove):
    """A flip of some images. on: True for flipped images, bool, (n,). axis: 0 flips upside down, 1
    left to right."""

    on: Bools
    axis: Literal[0, 1] = 1

    @property
    def mirrored(self) -> Bools:
        return self.on

    def source(self, index: Ints, axis: int) -> None:
        if axis == self.axis:
            np.copyto(index, self.size[axis][:, None] - 1 - index, where=self.on[:, None])

    def along(self, places: Floats, axis: int, owner: Ints) -> None:
        if axis == self.axis:
            last = self.size[axis][owner, None] - (places.shape[1] == 1)
            np.copyto(places, last - places[:, ::-1], where=self.on[owner, None])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WarpMove(ImageMove):
    """A move of images of one size by matrices, as `ImageOperation.geometry` returns them.

    matrix: float64, (n, 3, 3). fill: value of masks where the result shows nothing.
    """

    matrix: Floats
    fill: int = 0

    @property
    def mirrored(self) -> Bools:
        mirrored: Bools = np.linalg.det(self.matrix[:, :2, :2]) < 0
        return mirrored

    def masks(self, masks: Numbers) -> Numbers:
        """Return the moved masks: the nearest pixel."""
        out = np.empty_like(masks)
        for image, (mask, moved) in enumerate(zip(masks, out, strict=True)):
            places, inside = self._places(image, mask.shape)
            np.copyto(moved, np.where(inside, mask.take(places), self.fill))
        return out

    def of_image(self, image: int, masks: Numbers) -> Numbers:
        from penstock.readers.fieldtypes import warp_masks  # needs numba, as these masks do

        out = np.zeros_like(masks, order="C")
        warp_masks(masks, self.matrix[image], out)
        return out

    def _places(self, image: int, shape: tuple[int, ...]) -> tuple[Ints, Bools]:
        """Return the nearest pixel of an image for each of the result, by its place in the flat
        image, int64, and where it is inside; both of this shape."""
        height, width = shape
        y, x = np.arange(height)[:, None] + 0.5, np.arange(width)[None, :] + 0.5
        matrix = self.matrix[image]
        column, row, depth = (a * x + c + b * y for a, b, c in matrix)
        if (matrix[2] != (0, 0, 1)).any():
            with np.errstate(divide="ignore", invalid="ignore"):
                column, row = column / depth, row / depth
        inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
        places = np.where(inside, np.floor(row) * width + np.floor(column), 0)
        return places.astype(np.int64), inside

    def places(self, places: Floats, owner: Ints) -> None:
        if places.shape[1] == 1:
            places[:] = self._transformed(places, owner)
            return
        x, y = places[..., 0], places[..., 1]
        corners = np.stack([x[:, [0, 1, 1, 0]], y[:, [0, 0, 1, 1]]], axis=-1)
        moved = self._transformed(corners, owner)
        places[:, 0], places[:, 1] = moved.min(axis=1), moved.max(axis=1)
        np.clip(places, 0, self.size[::-1, owner].T[:, None], out=places)

    def _transformed(self, points: Floats, owner: Ints) -> Floats:
        """Return moved points, shape (k, points, 2)."""
        try:
            matrix = np.linalg.inv(self.matrix)[owner]
        except np.linalg.LinAlgError:  # the corners of an image coincide
            matrix = np.linalg.pinv(self.matrix)[owner]
        moved = points @ np.swapaxes(matrix[..., :2], -1, -2) + matrix[..., None, :, 2]
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.nan_to_num(moved[..., :2] / moved[..., 2:]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageMoves:
    """The moves of the n images of a batch, in order.

    size: heights and widths of the images as stored, upright, int64, (n,) each. sizes: those of the
    results, int64, (2, n). canvas: height and width of the padded batch, in which the results lie
    at the upper left; None: each has its own size. mask_fill: value of masks outside the image
    after a crop. pad_fill: their value in the padding.
    """

    size: tuple[Ints, Ints]
    moves: tuple[ImageMove, ...]
    sizes: Ints
    canvas: tuple[int, ...] | None
    mask_fill: int = 0
    pad_fill: int = 0

    def __len__(self) -> int:
        return len(self.size[0])

    @property
    def mirrored(self) -> Bools:
        """Return which images are mirrored, bool, (n,): by an odd number of flips."""
        mirrored = np.zeros(len(self), np.bool_)
        for move in self.moves:
            mirrored ^= move.mirrored
        return mirrored

    @property
    def _straight(self) -> list[AxisMove]:
        """The moves before the first warp."""
        isnt_warp = takewhile(lambda move: isinstance(move, AxisMove), self.moves)
        return cast("list[AxisMove]", list(isnt_warp))

    def index_maps(self) -> tuple[Any, Any]:
        """Return the row and the column of the mask for each row and column of the results, before
        the first warp.

        int64, shapes (n, height) and (n, width) of the canvas; without one, lists with an array for
        each image. OUTSIDE for positions outside the mask and for padding.
        """
        found: list[Any] = []
        for axis, own in enumerate(self.sizes):
            length = int(own.max(initial=0)) if self.canvas is None else self.canvas[axis]
            index = np.broadcast_to(np.arange(length), (len(self), length)).copy()
            outside = np.zeros(index.shape, np.bool_)
            if own.size and own.min() < length:
                np.greater_equal(index, own[:, None], out=outside)
            for move in reversed(self._straight):
                beyond = move.source(index, axis)
                if beyond is not None:
                    outside |= beyond
            index[outside] = OUTSIDE
            if self.canvas is None:
                lines = zip(index, own.tolist(), strict=True)
                found.append([line[:length] for line, length in lines])
            else:
                found.append(index)
        return found[0], found[1]

    @property
    def shown_sizes(self) -> Ints:
        """Heights and widths of what the results show of the images, without padding: int64,
        (n, 2)."""
        counts = [[np.count_nonzero(line >= 0) for line in lines] for lines in self.index_maps()]
        return np.array(counts, np.int64).T

    def shown_masks(self) -> Any:
        """Return which pixels of the results show the image and are no padding: bool, (n, height,
        width) of the canvas; without one, a list."""
        pairs = zip(*self.index_maps(), strict=True)
        found = [(rows[:, None] >= 0) & (columns >= 0) for rows, columns in pairs]
        return found if self.canvas is None else np.reshape(found, (len(self), *self.canvas))

    def move_masks(self, masks: Sequence[Numbers], *, dtype: DTypeLike | None = None) -> Any:
        """Return the moved masks, an array, shape (n, height, width); without a canvas a list.

        masks: mask of each image, shape (its height, its width), integers; a missing one has no
        pixels and becomes zeros. dtype: dtype of the result; None: the common one of these masks.
        Raises DatasetError for a mask of another size, RecipeError if the dtype can't hold a
        `mask_fill`.
        """
        dtype = np.dtype(dtype or common_dtype(masks))
        sizes: list[tuple[int, int]] = list(zip(*self.sizes.tolist(), strict=True))
        warps = self.moves[len(self._straight) :]
        self._check_fills(dtype, [each.fill for each in warps if isinstance(each, WarpMove)])
        out: Any
        if warps and self.canvas != (inner := tuple(self.sizes.max(axis=1, initial=0).tolist())):
            out = np.full((len(masks), *(self.canvas or inner)), self.pad_fill, dtype)
            out[:, : inner[0], : inner[1]] = replace(self, canvas=inner).move_masks(
                masks, dtype=dtype
            )
            return np.asarray(out)
        if self.canvas is None:
            out = shown = [np.zeros(size, dtype) for size in sizes]
        else:
            out = np.zeros((len(masks), *self.canvas), dtype)
            if self.pad_fill:
                out[...] = self.pad_fill
            shown = [
                each[:rows, :columns] for each, (rows, columns) in zip(out, sizes, strict=True)
            ]
        maps = self.index_maps()
        sides = zip(*(side.tolist() for side in self.size), strict=True)
        for place, (mask, side) in enumerate(zip(masks, sides, strict=True)):
            if not mask.size:
                shown[place][...] = 0
                continue
            if mask.shape != side:
                raise DatasetError(
                    f"A mask of shape {mask.shape} belongs to an image of {side[0]} x {side[1]} "
                    "(height x width): wanted the same size. Index the dataset again."
                )
            at = [lines[place][:end] for lines, end in zip(maps, sizes[place], strict=True)]
            # Rows first: full lines are copied, and fewer pixels are gathered by column.
            lines = mask.take(at[0], axis=0, mode="clip")
            shown[place][...] = lines.take(at[1], axis=1, mode="clip")
            for line, axis in zip(at, (0, 1), strict=True):
                if (line < 0).any():
                    np.moveaxis(shown[place], axis, 0)[line < 0] = self.mask_fill
        for move in warps:  # of images of one size
            out = move.masks(out)
        if warps:  # a missing mask has no pixels
            out[[not mask.size for mask in masks]] = 0
        return out

    def warp(self, row: int, masks: Numbers) -> None:
        """Move several masks of one image in place by the moves from the first warp on, with 0
        outside. row: of the image. masks: shape (masks, height, width)."""
        warps = self.moves[len(self._straight) :]
        if not warps:
            return
        height, width = self.sizes[:, row]
        warped = masks[:, :height, :width]  # without padding
        for move in warps:
            warped = move.of_image(row, warped)
        masks[:, :height, :width] = warped

    def _check_fills(self, dtype: np.dtype[Any], fills: Sequence[int]) -> None:
        """Raise RecipeError if the dtype of masks can't hold a `mask_fill`."""
        limits = np.iinfo(dtype) if dtype.kind in "iu" else None
        for fill in (self.mask_fill, self.pad_fill, *fills):
            if limits is not None and not limits.min <= fill <= limits.max:
                raise RecipeError(
                    f"mask_fill=: got {fill}, and the masks are {dtype}, which can't hold it. "
                    "Choose another number, or store the masks in a wider type."
                )

    def move_boxes(self, boxes: Numbers, owner: Ints) -> NDArray[np.float32]:
        """Return the moved boxes, clipped to their images: float32, shape (k, 4).

        boxes: x1, y1, x2, y2, shape (k, 4). owner: row of each box's image, int64, (k,).
        """
        moved = self._moved(boxes, 2, owner)
        limits = self.sizes[::-1, owner].T[:, None]
        return np.clip(moved, 0, limits).reshape(-1, 4).astype(np.float32)

    def move_points(self, points: Numbers, owner: Ints) -> NDArray[np.float32]:
        """Return the moved points, which may be outside their images: float32, shape (k, 2).

        points: x, y, shape (k, 2). owner: row of each point's image, int64, (k,).
        """
        return self._moved(points, 1, owner)[:, 0].astype(np.float32)

    def _moved(self, places: Numbers, corners: int, owner: Ints) -> Floats:
        moved = np.array(places, np.float64).reshape(-1, corners, 2)
        for move in self.moves:
            move.places(moved, owner)
        return moved
