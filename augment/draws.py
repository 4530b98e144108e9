"""Draw the random numbers of a batch of images, and compute windows and arguments in numpy.

A draw is a keyed hash (see `draw_keys`): the same sample gets the same window in any batch, on any
rank, after any restart. DALI gets windows, and the arguments of pixel operations, as inputs and
keeps no random state.

Windows are integers inside the upright image. If a crop follows a resize, the graph resizes only
the region that the crop will show, and decodes that region plus the filter's reach. The pixels are
those of the whole image resized and then cropped, except for float32 rounding of the region's
corners (7 of 100,000 values differ, by 1 of 255).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment.draw_keys import Uniform, draw_base
from penstock.augment.geometric_operations import FlipOperation
from penstock.augment.image_moves import CropMove, FlipMove, ImageMove, ImageMoves, ScaleMove

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.augment.recipe import CheckedRecipe, GeometryStage, Window

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

# Bilinear sampling reads 2 pixels a side: shrinking by more than that skips some.
UNFILTERED_SHRINK = 2

# Pixels decoded beyond a bilinear filter's support (1 pixel, or the scale when antialiased): for
# half a pixel of centre offset, and float32 rounding of the region's corners.
_SPARE_PX = 2

_NO_DRAWS = Uniform(np.zeros(0, np.uint64), 0)  # of a recipe without random operations

Draws = dict[str, "NDArray[Any]"]
"""Argument inputs of the graph, by name: one C-contiguous row per sample.

start, shape: window to decode, (y, x) and (height, width), int32, (n, 2), inside the upright image.
mirror: int32, (n,). lowK, highK: region that geometry K resizes, (y, x) in pixels of its input,
float32, (n, 2). sizeK: height and width after the resize, float32, (n, 2). filterK: True if it is
antialiased, bool, (n,). anchorK, extentK: (y, x) and (height, width) of a window that may reach
outside geometry K's input, int32, (n, 2). Operations on pixels add theirs: <class><place>.<name>.
"""


@dataclass(slots=True)
class _View:
    """The current window on the image of each sample, while operations are applied one by one.

    image: heights and widths of the images. top, left, height, width: the window, relative to
    `image`. flip, upend: True if the next operation gets the window mirrored left to right, and
    upside down; upend is None if no operation of the recipe flips upside down.
    """

    image: tuple[Ints, Ints]
    top: Ints
    left: Ints
    height: Ints
    width: Ints
    flip: NDArray[np.bool_]
    upend: NDArray[np.bool_] | None

    @classmethod
    def whole(
        cls,
        height: Ints,
        width: Ints,
        flip: NDArray[np.bool_],
        upend: NDArray[np.bool_] | None = None,
    ) -> _View:
        zero = np.zeros_like(height)
        return cls((height, width), zero, zero, height, width, flip, upend)

    def alone(self) -> _View:
        """Return the view of the full window, as an image of its own."""
        return _View.whole(self.height, self.width, self.flip, self.upend)

    def crop(self, top: Ints, left: Ints, height: Ints, width: Ints) -> None:
        """Crop the window, by coordinates in the mirrored window that the operation gets."""
        left = np.where(self.flip, self.width - left - width, left)
        if self.upend is not None:
            top = np.where(self.upend, self.height - top - height, top)
        self.top, self.left = self.top + top, self.left + left
        self.height, self.width = height, width


def draw(
    recipe: CheckedRecipe,
    *,
    ids: NDArray[np.int64],
    dims: NDArray[np.int32],
    seed: int,
    epoch: int,
    occurrences: NDArray[np.int64] | None = None,
    moves: list[ImageMove] | None = None,
) -> Draws:
    """Return the graph's argument inputs for one batch; a pure function of each sample.

    ids: sample ids, shape (n,). dims: upright height and width, shape (n, 2). occurrences: as in
    `draw_base`. moves: each window, resize, flip and warp is appended to it.
    """
    base = None
    if recipe.random:
        base = draw_base(seed, epoch, ids, salt=recipe.salt, occurrences=occurrences)
    height, width = dims[:, 0].astype(np.int64), dims[:, 1].astype(np.int64)
    view = _View.whole(height, width, np.zeros(len(ids), np.bool_))
    inputs: Draws = {}
    for number, geometry in enumerate(recipe.geometries):
        if number:  # its input is the output of the stage before it
            view = view.alone()
        _apply_windows(view, geometry.before, base, moves)
        if geometry.padding is not None:
            _pad_inputs(inputs, number, view)
            view = view.alone()
        if geometry.size is None:
            if geometry.padding is None and recipe.decodes_window:
                _set_window(inputs, view.top, view.left, view.height, view.width)
            continue
        source = view
        view = _View.whole(*_resized(geometry, source), source.flip, source.upend)
        if moves is not None:
            moves.append(ScaleMove(size=(source.height, source.width), to=view.image))
        _apply_windows(view, geometry.after, base, moves)
        _resize_inputs(inputs, recipe, number, source, view)
    flipped = view.flip, view.upend
    for step in recipe.steps:
        assert base is not None  # recipe.random is true: it draws
        values = step.values(base, recipe.image, flipped)
        inputs |= values
        if moves is not None:
            moves += step.moves(values, recipe.image, flipped)
    return inputs


def draw_with_moves(
    recipe: CheckedRecipe, *, ids: NDArray[np.int64], dims: NDArray[np.int32], seed: int, epoch: int
) -> tuple[Draws, ImageMoves]:
    """Return the draws of `draw`, and the moves of the images' masks, boxes and points by the same
    numbers.

    For images with followers: the moves take some microseconds a batch.
    """
    moves: list[ImageMove] = []
    inputs = draw(recipe, ids=ids, dims=dims, seed=seed, epoch=epoch, moves=moves)
    height, width = dims[:, 0].astype(np.int64), dims[:, 1].astype(np.int64)
    return inputs, ImageMoves(
        size=(height, width),
        moves=tuple(moves),
        shape=(recipe.shape[1], recipe.shape[2]),
        mask_fill=next((each.padding.mask_fill for each in recipe.geometries if each.padding), 0),
    )


def input_kinds(recipe: CheckedRecipe) -> dict[str, tuple[str, int]]:
    """Return by name the dtype, and a sample's number of dimensions, of each argument input that
    `draw` returns and the graph needs."""
    dims = np.array([recipe.shape[1:]], np.int32)
    inputs = draw(recipe, ids=np.zeros(1, np.int64), dims=dims, seed=0, epoch=0)
    return {name: (values.dtype.name, values.ndim - 1) for name, values in inputs.items()}


def _apply_windows(
    view: _View,
    windows: tuple[Window, ...],
    base: NDArray[np.uint64] | None,
    moves: list[ImageMove] | None,
) -> None:
    for window in windows:
        op, size = window.op, (view.height, view.width)
        uniform = _NO_DRAWS if base is None else Uniform(base, window.index)
        if isinstance(op, FlipOperation):
            on = op.on(uniform)
            if op.is_vertical:
                view.upend = on if view.upend is None else view.upend ^ on
            else:
                view.flip = view.flip ^ on
            if moves is not None:
                moves.append(FlipMove(size=size, on=on, vertical=op.is_vertical))
            continue
        top, left, height, width = op.window(*size, uniform)
        view.crop(top, left, height, width)
        if moves is not None:
            moves.append(CropMove(size=size, top=top, left=left, height=height, width=width))


def _resized(geometry: GeometryStage, source: _View) -> tuple[Ints, Ints]:
    """Return heights and widths after the geometry's resize, before its `after` windows."""
    size = geometry.size
    assert size is not None
    if isinstance(size, tuple):
        return np.full_like(source.height, size[0]), np.full_like(source.width, size[1])
    short = np.minimum(source.height, source.width)
    return size * source.height // short, size * source.width // short


def _resize_inputs(
    inputs: Draws, recipe: CheckedRecipe, number: int, source: _View, view: _View
) -> None:
    """Add the arguments of one geometry's resize, and of decoding before the first one."""
    geometry = recipe.geometries[number]
    if geometry.out is None:
        inputs[f"size{number}"] = _pairs(view.height, view.width, np.float32)
    if geometry.antialias == "auto":
        rows, columns = (UNFILTERED_SHRINK * side for side in view.image)
        inputs[f"filter{number}"] = (source.height > rows) | (source.width > columns)
    # A padded window is complete already, and `_pad_inputs` sets what is decoded.
    first = number == 0 and geometry.padding is None
    if not geometry.crops_after:
        if first and recipe.decodes_window:
            _set_window(inputs, source.top, source.left, source.height, source.width)
        return
    top, bottom = _region(source.top, source.height, view.image[0], view.top, view.height)
    left, right = _region(source.left, source.width, view.image[1], view.left, view.width)
    if first:
        first_y, rows = _reach(geometry, source.top, source.height, view.image[0], top, bottom)
        first_x, columns = _reach(geometry, source.left, source.width, view.image[1], left, right)
        _set_window(inputs, first_y, first_x, rows, columns)
        top, bottom, left, right = top - first_y, bottom - first_y, left - first_x, right - first_x
    inputs[f"low{number}"] = _pairs(top, left, np.float32)
    inputs[f"high{number}"] = _pairs(bottom, right, np.float32)


def _pad_inputs(inputs: Draws, number: int, view: _View) -> None:
    """Add the arguments of a crop that may reach outside, and of decoding before the first
    geometry."""
    top, left, height, width = view.top, view.left, view.height, view.width
    inputs[f"extent{number}"] = _pairs(height, width, np.int32)
    if number == 0:  # decode the part inside the image, at least one pixel
        first_y, rows = _inside(top, height, view.image[0])
        first_x, columns = _inside(left, width, view.image[1])
        _set_window(inputs, first_y, first_x, rows, columns)
        top, left = top - first_y, left - first_x
    inputs[f"anchor{number}"] = _pairs(top, left, np.int32)


def _inside(start: Ints, length: Ints, side: Ints) -> tuple[Ints, Ints]:
    """Return the first pixel and the number of pixels of a window that are on a side."""
    first = np.clip(start, 0, side - 1)
    return first, np.clip(start + length, first + 1, side) - first


def _region(
    start: Ints, length: Ints, resized: Ints, offset: Ints, shown: Ints
) -> tuple[Floats, Floats]:
    """Return the part of the source that [offset, offset + shown) of a side resized to `resized`
    shows."""
    scale = length / resized
    return start + offset * scale, start + (offset + shown) * scale


def _reach(
    geometry: GeometryStage, start: Ints, length: Ints, resized: Ints, low: Floats, high: Floats
) -> tuple[Ints, Ints]:
    """Return the first pixel and the number of pixels that resizing [low, high) of a side reads."""
    # With "auto" only some samples are filtered, and others decode a few pixels more than needed.
    support = np.ceil(np.maximum(length / resized, 1.0)) if geometry.antialias else 1.0
    first = np.maximum(np.floor(low) - support - _SPARE_PX, start).astype(np.int64)
    end = np.minimum(np.ceil(high) + support + _SPARE_PX, start + length).astype(np.int64)
    return first, end - first


def _set_window(inputs: Draws, top: Ints, left: Ints, height: Ints, width: Ints) -> None:
    inputs["start"] = _pairs(top, left, np.int32)
    inputs["shape"] = _pairs(height, width, np.int32)


def _pairs(first: NDArray[Any], second: NDArray[Any], dtype: type[np.generic]) -> NDArray[Any]:
    pairs = np.empty((len(first), 2), dtype)
    pairs[:, 0], pairs[:, 1] = first, second
    return pairs
