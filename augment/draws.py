"""Every random number of a batch, and every window that follows from it, in numpy.

A draw is a keyed hash (see `keyed`): the same sample gets the same window in any batch, on any
rank, after any restart. DALI gets windows as arguments and keeps no random state.

Windows are integers inside the upright image. Where a resize is followed by a crop, the graph
resizes only the region that the crop will show, and decodes that region plus the filter's reach.
The pixels are those of the whole image resized and then cropped, but for float32 rounding of the
region's corners (7 of 100,000 values differ, by 1 of 255).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment.crops import center_windows, place_windows, random_windows
from penstock.augment.geometric_ops import (
    CenterCrop,
    RandomCrop,
    RandomHorizontalFlip,
    RandomVerticalFlip,
)
from penstock.augment.keyed import draw_base, keyed_draws
from penstock.augment.moves import Crop, Flip, Move, Moves, Scale
from penstock.augment.pixel_draws import argument_inputs, argument_values
from penstock.augment.pixels import Mirror

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from penstock.augment.geometry import Geometry, Window
    from penstock.augment.pixels import PlacedOperation
    from penstock.augment.recipe import CheckedRecipe

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

# Bilinear sampling reads 2 pixels a side: shrinking by more than that skips some.
UNFILTERED_SHRINK = 2

# Decoded beyond a bilinear filter's support (1 pixel, or the scale when antialiased): half a pixel
# of centre offset, and float32 rounding of the region's corners.
_SPARE_PX = 2

Draws = dict[str, "NDArray[Any]"]
"""Argument inputs of the graph, by name: one C-contiguous row per sample.

start, shape: window to decode, (y, x) and (height, width), int32, (n, 2), inside the upright
image. mirror: int32, (n,). lowK, highK: region that geometry K resizes, (y, x) in pixels of its
input, float32, (n, 2). sizeK: height and width it gets, float32, (n, 2). filterK: whether it is
antialiased, bool, (n,). anchorK, extentK: (y, x) and (height, width) of a window that may reach
outside of geometry K's input, int32, (n, 2). Of pixel operations: see `pixel_draws`. Only what
`input_names` lists.
"""


@dataclass(slots=True)
class _View:
    """A window on one image per sample, while the operations are walked through.

    top, left, height, width: the window, relative to `image`. image: its heights and widths.
    flip, upend: whether what the next operation sees is the window mirrored left to right, and
    upside down; upend is None where no operation of the recipe does that.
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
        """What the window shows, as an image of its own."""
        return _View.whole(self.height, self.width, self.flip, self.upend)

    def crop(self, top: Ints, left: Ints, height: Ints, width: Ints) -> None:
        """A window relative to what the operation sees, which may be mirrored."""
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
) -> Draws:
    """The graph's argument inputs for one batch; a pure function of each sample.

    ids: sample ids, shape (n,). dims: upright height and width, shape (n, 2). occurrences: as in
    `draw_base`.
    """
    return _draw(recipe, ids, dims, seed=seed, epoch=epoch, occurrences=occurrences)


def draw_with_moves(
    recipe: CheckedRecipe,
    *,
    ids: NDArray[np.int64],
    dims: NDArray[np.int32],
    seed: int,
    epoch: int,
) -> tuple[Draws, Moves]:
    """What `draw` gives, and what the same numbers do to masks, boxes and points of the images.

    For images that something follows: the moves take some microseconds a batch.
    """
    moves: list[Move] = []
    inputs = _draw(recipe, ids, dims, seed=seed, epoch=epoch, moves=moves)
    height, width = dims[:, 0].astype(np.int64), dims[:, 1].astype(np.int64)
    found = [geometry.padding for geometry in recipe.geometries if geometry.padding]
    return inputs, Moves(
        size=(height, width),
        moves=tuple(moves),
        shape=(recipe.shape[1], recipe.shape[2]),
        mask_fill=found[0].mask_fill if found else 0,
    )


def _draw(
    recipe: CheckedRecipe,
    ids: NDArray[np.int64],
    dims: NDArray[np.int32],
    *,
    seed: int,
    epoch: int,
    occurrences: NDArray[np.int64] | None = None,
    moves: list[Move] | None = None,
) -> Draws:
    """moves: where each window, resize and flip is noted; None: nowhere."""
    base = None
    if recipe.random:
        base = draw_base(seed, epoch, ids, salt=recipe.salt, occurrences=occurrences)
    height, width = dims[:, 0].astype(np.int64), dims[:, 1].astype(np.int64)
    view = _View.whole(height, width, np.zeros(len(ids), np.bool_))
    inputs: Draws = {}
    for number, geometry in enumerate(recipe.geometries):
        if number:  # its input is what the one before it has cropped
            view = view.alone()
        _apply(view, geometry.before, base, moves)
        if geometry.padding is not None:
            _pad_inputs(inputs, number, view)
            view = view.alone()
        if geometry.size is None:
            if geometry.padding is None and decodes_window(recipe):
                _set_window(inputs, view.top, view.left, view.height, view.width)
            continue
        source = view
        view = _View.whole(*_resized(geometry, source), source.flip, source.upend)
        if moves is not None:
            moves.append(Scale(size=(source.height, source.width), to=view.image))
        _apply(view, geometry.after, base, moves)
        _resize_inputs(inputs, recipe, number, source, view)
    for operation in drawn_operations(recipe):
        inputs |= argument_values(
            operation,
            recipe.image,
            flipped=_windows_flip(view, operation),
            uniform=lambda index: _uniform(base, index),
        )
    if moves is not None:
        _note_late_flips(recipe, inputs, view, moves)
    return inputs


def _windows_flip(view: _View, operation: PlacedOperation | Mirror) -> NDArray[np.bool_]:
    """Whether the windows flip a sample the way that a mirror does."""
    if isinstance(operation, Mirror) and operation.vertical:
        return np.zeros_like(view.flip) if view.upend is None else view.upend
    return view.flip


def _note_late_flips(recipe: CheckedRecipe, inputs: Draws, view: _View, moves: list[Move]) -> None:
    """Note the flips behind the windows: all that are made in the end, without the windows' own."""
    mirrors = [each for each in drawn_operations(recipe) if isinstance(each, Mirror)]
    for vertical in (False, True):
        some = [mirror for mirror in mirrors if mirror.vertical is vertical]
        if any(mirror.flips for mirror in some):
            on = _windows_flip(view, some[0])
            for mirror in some:
                on = on ^ inputs[mirror.name].astype(np.bool_)
            moves.append(Flip(size=(view.height, view.width), on=on, vertical=vertical))


def input_names(recipe: CheckedRecipe) -> list[str]:
    """The names of the argument inputs that `draw` gives and the graph takes."""
    names = ["start", "shape"] if decodes_window(recipe) else []
    for number, geometry in enumerate(recipe.geometries):
        names += [f"anchor{number}", f"extent{number}"] if geometry.padding else []
        if geometry.size is not None:
            names += [f"low{number}", f"high{number}"] if _crops(geometry.after) else []
            names += [] if geometry.out else [f"size{number}"]
            names += [f"filter{number}"] if geometry.antialias == "auto" else []
    operations = drawn_operations(recipe)
    return [*names, *(name for each in operations for name, _, _ in argument_inputs(each))]


def drawn_operations(recipe: CheckedRecipe) -> list[PlacedOperation | Mirror]:
    """What has draws, behind the geometries."""
    last = [recipe.mirror] if recipe.mirror else []
    return [*recipe.pixels, *last, *recipe.erasing]


def _uniform(base: NDArray[np.uint64] | None, index: int) -> Callable[[int], Floats]:
    assert base is not None  # recipe.random is true: an operation that draws is here
    return lambda count: keyed_draws(base, index, list(range(count)))


def decodes_window(recipe: CheckedRecipe) -> bool:
    """Whether a part of each image is enough to decode."""
    first = recipe.geometries[0]
    return _crops(first.before) or _crops(first.after)


def resizes_region(geometry: Geometry) -> bool:
    """Whether the geometry resizes a region of its input only."""
    return _crops(geometry.after)


def _crops(windows: tuple[Window, ...]) -> bool:
    flips = RandomHorizontalFlip, RandomVerticalFlip
    return any(not isinstance(window.op, flips) for window in windows)


def _apply(
    view: _View,
    windows: tuple[Window, ...],
    base: NDArray[np.uint64] | None,
    moves: list[Move] | None,
) -> None:
    for window in windows:
        op, size = window.op, (view.height, view.width)
        if isinstance(op, RandomHorizontalFlip | RandomVerticalFlip):
            assert base is not None  # recipe.random is true: an operation that draws is here
            on = keyed_draws(base, window.index, [0])[0] < op.p
            vertical = isinstance(op, RandomVerticalFlip)
            if vertical:
                view.upend = on if view.upend is None else view.upend ^ on
            else:
                view.flip = view.flip ^ on
            if moves is not None:
                moves.append(Flip(size=size, on=on, vertical=vertical))
            continue
        if isinstance(op, CenterCrop):
            crop = center_windows(op, *size)
        else:
            assert base is not None
            if isinstance(op, RandomCrop):
                crop = place_windows(op, *size, base, index=window.index)
            else:
                crop = random_windows(op, *size, base, index=window.index)
        view.crop(*crop)
        if moves is not None:
            top, left, height, width = crop
            moves.append(Crop(size=size, top=top, left=left, height=height, width=width))


def _resized(geometry: Geometry, source: _View) -> tuple[Ints, Ints]:
    """Heights and widths after the geometry's resize, before its `after` windows."""
    size = geometry.size
    assert size is not None
    if isinstance(size, tuple):
        return np.full_like(source.height, size[0]), np.full_like(source.width, size[1])
    short = np.minimum(source.height, source.width)
    return size * source.height // short, size * source.width // short


def _resize_inputs(
    inputs: Draws, recipe: CheckedRecipe, number: int, source: _View, view: _View
) -> None:
    """The arguments of one geometry's resize, and of the decoding in front of the first."""
    geometry = recipe.geometries[number]
    if geometry.out is None:
        inputs[f"size{number}"] = _pairs(view.height, view.width, np.float32)
    if geometry.antialias == "auto":
        rows, columns = (UNFILTERED_SHRINK * side for side in view.image)
        inputs[f"filter{number}"] = (source.height > rows) | (source.width > columns)
    # What is padded is whole already; only its windows are decoded.
    first = number == 0 and geometry.padding is None
    if not resizes_region(geometry):
        if first and decodes_window(recipe):
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
    """The arguments of a crop that may reach outside, and of the decoding in front of the first."""
    top, left, height, width = view.top, view.left, view.height, view.width
    inputs[f"extent{number}"] = _pairs(height, width, np.int32)
    if number == 0:  # decoded is what lies inside, and one pixel at least
        first_y, rows = _inside(top, height, view.image[0])
        first_x, columns = _inside(left, width, view.image[1])
        _set_window(inputs, first_y, first_x, rows, columns)
        top, left = top - first_y, left - first_x
    inputs[f"anchor{number}"] = _pairs(top, left, np.int32)


def _inside(start: Ints, length: Ints, side: Ints) -> tuple[Ints, Ints]:
    """First pixel and number of pixels of a window that lie on a side."""
    first = np.clip(start, 0, side - 1)
    return first, np.clip(start + length, first + 1, side) - first


def _region(
    start: Ints, length: Ints, resized: Ints, offset: Ints, shown: Ints
) -> tuple[Floats, Floats]:
    """Where [offset, offset + shown) of a side resized to `resized` lies on its source."""
    scale = length / resized
    return start + offset * scale, start + (offset + shown) * scale


def _reach(
    geometry: Geometry, start: Ints, length: Ints, resized: Ints, low: Floats, high: Floats
) -> tuple[Ints, Ints]:
    """First pixel and number of pixels that resizing [low, high) of one side reads."""
    # With "auto" some are filtered; decoding a little more for the others does no harm.
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
