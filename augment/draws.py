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

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment.draw_keys import Uniform, draw_base, view_salts
from penstock.augment.geometric_operations import FlipOperation
from penstock.augment.image_moves import BoxedCropMove, CropMove, FlipMove, ImageMoves, ScaleMove

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.augment.image_moves import ImageMove
    from penstock.augment.operation import GeometricOperation
    from penstock.augment.recipe import CheckedRecipe, GeometryStage, PlacedWindow
    from penstock.readers import Bools, Floats, Ints, Numbers

# Bilinear sampling reads 2 pixels a side: shrinking by more than that skips some.
UNFILTERED_SHRINK = 2

# Pixels decoded beyond a filter's support (bilinear: 1 pixel, or the scale when antialiased): for
# half a pixel of centre offset, and float32 rounding of the region's corners.
_SPARE_PX = 2

FLIPS = ("upend", "mirror")
"""The inputs that flip the results of the geometry stages, by axis."""

Draws = dict[str, "Numbers"]
"""Argument inputs of the graph, by name: one C-contiguous row per sample.

start, shape: window to decode, (y, x) and (height, width), int32, (n, 2), inside the upright image.
upend, mirror: 1 to flip the image upside down, or left to right, int32, (n,). lowK, highK: region
that geometry K resizes, (y, x) in pixels of its input, float32, (n, 2). sizeK: height and width
after the resize, float32, (n, 2). filterK: True if it is antialiased, bool, (n,). anchorK, extentK:
(y, x) and (height, width) of a window that may reach outside geometry K's input, int32, (n, 2).
insetK, frameK: (y, x) of what it resizes in a window around it, and that window's (height, width),
int32, (n, 2). canvas: height and width of the padded result, int32, (n, 2), unless all images have
one size without padding. Operations on pixels add theirs: <class><place>.<name>.
"""


@dataclass(slots=True)
class _View:
    """The current window on the image of each sample, while operations are applied one by one.

    image: heights and widths of the images, int64, (2, n). start: top and left of the window,
    relative to `image`. length: its height and width. flips: by axis that an operation flips, True
    if the next operation gets the window upside down (0), or mirrored left to right (1), bool,
    (n,).
    """

    image: Ints
    start: Ints
    length: Ints
    flips: dict[int, Bools]

    @classmethod
    def whole(cls, image: Ints, flips: dict[int, Bools]) -> _View:
        """Return the view of full images."""
        return cls(image, np.zeros(image.shape, np.int64), image, flips)

    def apply(self, move: CropMove | FlipMove) -> None:
        """Crop the windows, by coordinates in the mirrored windows that the operation gets, or flip
        some of them."""
        if isinstance(move, FlipMove):
            flipped = self.flips.get(move.axis)
            self.flips[move.axis] = move.on if flipped is None else flipped ^ move.on
            return
        start = self.start + move.start
        for axis, on in self.flips.items():
            end = self.start + self.length - move.start
            start[axis] = np.where(on, (end - move.length)[axis], start[axis])
        self.start, self.length = start, move.length


def draw_with_moves(
    recipe: CheckedRecipe,
    *,
    ids: Ints,
    dims: NDArray[np.int32],
    seed: int,
    epoch: int | Ints,
    occurrences: Ints | None = None,
    batch: tuple[int, int] = (0, 0),
    missing: Bools | None = None,
    boxes: tuple[Numbers, Ints] | None = None,
) -> tuple[Draws, ImageMoves]:
    """Return the graph's argument inputs for one batch, and the moves of the images' masks, boxes
    and points by the same numbers; a pure function of each sample, and of `batch`.

    ids: sample ids, shape (n,). dims: upright height and width, shape (n, 2). epoch,
    occurrences: as in `draw_base`. batch: epoch and first position of the global batch, the key of
    what is drawn once for all its images. missing: True for samples without an image, whose result
    is empty unless all images have one size. boxes: for operations that need them: x1, y1, x2, y2
    in pixels of the stored images, (k, 4), and the row of each one's image.
    """
    base = np.zeros(0, np.uint64)
    if recipe.random:
        base = draw_base(seed, epoch, ids, salt=recipe.salt, occurrences=occurrences)
    keys = _Keys(base, seed, recipe.salt, batch)
    images = np.ascontiguousarray(dims.T, np.int64)
    moves = _Moves(images, boxes)
    view = _View.whole(images, {})
    inputs: Draws = {}
    for number, geometry in enumerate(recipe.geometries):
        if number:  # its input is the output of the stage before it
            view = _View.whole(view.length, view.flips)
        _apply_windows(view, geometry.before, keys, moves)
        if geometry.padding is not None:
            _pad_inputs(inputs, number, view)
            view = _View.whole(view.length, view.flips)
        # A padded window is complete already, and `_pad_inputs` sets what is decoded.
        decodes = number == 0 and geometry.padding is None
        start, length = view.start, view.length
        if geometry.resize is not None:
            source, (index, op) = view, geometry.resize
            to = np.array(op.resized(length[0], length[1], keys.uniform(index, op)))
            view = _View.whole(to, source.flips)
            moves.append(ScaleMove(size=length, to=to))
            _apply_windows(view, geometry.after, keys, moves)
            first, shown = view.start, view.length  # the part of the resized image
            if geometry.frame is not None:
                first = np.clip(view.start, 0, to - 1)
                shown = np.clip(view.start + view.length, first + 1, to) - first
                inputs[f"inset{number}"] = _rows(first - view.start, np.int32)
                inputs[f"frame{number}"] = _rows(view.length, np.int32)
            if geometry.sized is None:
                inputs[f"size{number}"] = _rows(shown, np.float32)
            if geometry.antialias == "auto":
                shrinks = length > UNFILTERED_SHRINK * to
                inputs[f"filter{number}"] = shrinks[0] | shrinks[1]
            if geometry.crops_after:  # the part of the source that the last window shows
                scale = length / to
                low, high = start + first * scale, start + (first + shown) * scale
                if decodes:
                    start, length = _reach(geometry, source, scale, low, high)
                    low, high = low - start, high - start
                inputs[f"low{number}"] = _rows(low, np.float32)
                inputs[f"high{number}"] = _rows(high, np.float32)
        if decodes and recipe.decodes_window:
            inputs["start"], inputs["shape"] = _rows(start, np.int32), _rows(length, np.int32)
    for axis, on in view.flips.items():
        inputs[FLIPS[axis]] = on.astype(np.int32)
    sizes, shape = view.length, recipe.image
    if recipe.is_even and len(ids):  # another size in another batch
        shape = replace(shape, height=int(sizes[0, 0]), width=int(sizes[1, 0]))
    for placed in (*recipe.pixels, *recipe.erasing):
        values = placed.values(keys.samples, shape)
        inputs |= values
        moves += placed.moves(values, shape, sizes)
    if missing is not None and not recipe.is_fixed:
        sizes = np.where(missing, 0, sizes)
    canvas = recipe.canvas(sizes)
    if recipe.has_canvas:
        whole = sizes if canvas is None else np.broadcast_to(canvas, (len(ids), 2)).T
        inputs["canvas"] = _rows(whole, np.int32)
    pads = (pad for each in recipe.geometries for pad in (each.padding, each.frame) if pad)
    return inputs, ImageMoves(
        size=(images[0], images[1]),
        moves=tuple(moves),
        sizes=sizes,
        canvas=canvas,
        mask_fill=next((op.mask_fill for op in pads), 0),
        pad_fill=0 if recipe.pad is None else recipe.pad.mask_fill,
    )


def draw(recipe: CheckedRecipe, **samples: Any) -> Draws:
    """Return the graph's argument inputs alone, or those of an image's views (`draw_views`).
    samples: arguments of `draw_with_moves`."""
    return draw_views(recipe, **samples) if recipe.views else draw_with_moves(recipe, **samples)[0]


def draw_views(recipe: CheckedRecipe, *, ids: Ints, **samples: Any) -> Draws:
    """Return the argument inputs of all views of a batch of images, by "<field>.<part>.<name>" with
    the numbers of both, shape (n, views of the part, …). ids, samples: arguments of
    `draw_with_moves`."""
    found: Draws = {}
    for place, field in enumerate(recipe.views):
        salts = view_salts(field.name, field.count, salt=recipe.salt)
        for number, (count, own) in enumerate(field.parts):
            mine, salts = salts[:count], salts[count:]
            every: dict[str, Any] = {
                name: np.repeat(each, count, axis=0) if isinstance(each, np.ndarray) else each
                for name, each in {"ids": ids, **samples}.items()
            }
            part = replace(own, salt=np.tile(mine, len(ids)))
            for name, values in draw_with_moves(part, **every)[0].items():
                shape = (len(ids), count, *values.shape[1:])
                found[f"{place}.{number}.{name}"] = values.reshape(shape)
    return found


def input_kinds(recipe: CheckedRecipe) -> dict[str, tuple[str, int]]:
    """Return by name the dtype, and a sample's number of dimensions, of each argument input that
    `draw` returns and the graph needs."""
    dims = np.array([[recipe.sizes.max_height, recipe.sizes.max_width]], np.int32)
    inputs = draw(recipe, ids=np.zeros(1, np.int64), dims=dims, seed=0, epoch=0)
    return {name: (values.dtype.name, values.ndim - 1) for name, values in inputs.items()}


_BATCH = np.uint64(0x6261746368)  # keeps keys of batches apart from those of samples


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys of all draws. samples: of each sample, uint64, (n,). seed, salt, batch: of the key
    that all samples of the batch share."""

    samples: NDArray[np.uint64]
    seed: int
    salt: int | NDArray[np.uint64]
    batch: tuple[int, int]

    def uniform(self, index: int, op: GeometricOperation) -> Uniform:
        """Return the draws of an operation at a place of the recipe."""
        if op.per != "batch":
            return Uniform(self.samples, index)
        (epoch, first), salt = self.batch, np.asarray(self.salt, np.uint64) ^ _BATCH
        same = draw_base(self.seed, epoch, np.full(1, first, np.int64), salt=salt)
        return Uniform(np.broadcast_to(same, self.samples.shape), index)


class _Moves(list["ImageMove"]):
    """The moves so far. boxes: of the stored images, with the row of each one's image, or None."""

    def __init__(self, images: Ints, boxes: tuple[Numbers, Ints] | None) -> None:
        super().__init__()
        self._images, self.boxes = images, boxes

    def moved_boxes(self, sizes: Ints) -> tuple[Floats, Ints]:
        """Return the boxes where they are now. sizes: of the images now."""
        assert self.boxes is not None
        size, (boxes, owner) = (self._images[0], self._images[1]), self.boxes
        moves = ImageMoves(size=size, moves=tuple(self), sizes=sizes, canvas=None)
        return moves.move_boxes(boxes, owner).astype(np.float64), owner


def _apply_windows(
    view: _View, windows: tuple[PlacedWindow, ...], keys: _Keys, moves: _Moves
) -> None:
    move: CropMove | FlipMove
    for index, op in windows:
        size = view.length
        uniform = keys.uniform(index, op)
        if isinstance(op, FlipOperation):
            move = FlipMove(size=size, on=op.draw(uniform)["on"], axis=op.axis)
        elif op.needs_boxes and moves.boxes is not None:
            places, owner = moves.moved_boxes(size)
            window = np.array(op.boxed_window(size[0], size[1], uniform, places, owner))
            on = (window[2:] != size).any(axis=0)
            move = BoxedCropMove(size=size, start=window[:2], length=window[2:], on=on)
        else:
            window = np.array(op.window(size[0], size[1], uniform))
            move = CropMove(size=size, start=window[:2], length=window[2:])
        view.apply(move)
        moves.append(move)


def _pad_inputs(inputs: Draws, number: int, view: _View) -> None:
    """Add the arguments of a crop that may reach outside, and of decoding before the first
    geometry."""
    start = view.start
    inputs[f"extent{number}"] = _rows(view.length, np.int32)
    if number == 0:  # decode the part inside the image, at least one pixel
        first = np.clip(start, 0, view.image - 1)
        length = np.clip(start + view.length, first + 1, view.image) - first
        inputs["start"], inputs["shape"] = _rows(first, np.int32), _rows(length, np.int32)
        start = start - first
    inputs[f"anchor{number}"] = _rows(start, np.int32)


def _reach(
    geometry: GeometryStage, source: _View, scale: Floats, low: Floats, high: Floats
) -> tuple[Ints, Ints]:
    """Return the first pixels and the numbers of pixels that resizing [low, high) reads."""
    # With "auto" only some samples are filtered, and others decode a few pixels more than needed.
    support = np.ceil(np.maximum(scale, 1.0)) if geometry.antialias else 1.0
    support = support * (2 if geometry.cubic else 1)
    first = np.maximum(np.floor(low) - support - _SPARE_PX, source.start).astype(np.int64)
    most = source.start + source.length
    end = np.minimum(np.ceil(high) + support + _SPARE_PX, most).astype(np.int64)
    return first, end - first


def _rows(values: Numbers, dtype: type[np.generic]) -> Numbers:
    """Return (2, n) values as an input of the graph, (n, 2)."""
    return np.ascontiguousarray(values.T, dtype)
