"""Draw the random numbers of a batch of images, and compute windows and arguments in numpy.

A draw is a keyed hash (see `draw_keys`): the same sample gets the same window in any batch, on any
rank, after any restart. DALI gets windows, and the arguments of pixel operations, as inputs and
keeps no random state. Formulas and ranges are torchvision's (transforms.py and
_functional_tensor.py), for many samples at once.

Windows are integers inside the upright image. If a crop follows a resize, the graph resizes only
the region that the crop will show, and decodes that region plus the filter's reach. The pixels are
those of the whole image resized and then cropped, except for float32 rounding of the region's
corners (7 of 100,000 values differ, by 1 of 255).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment import policies
from penstock.augment.draw_keys import draw_base, keyed_draws
from penstock.augment.image_followers import CropMove, FlipMove, ImageMoves, Move, ScaleMove
from penstock.augment.operations import (
    Apply,
    AutoAugment,
    CenterCrop,
    ColorJitter,
    GaussianBlur,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomRotation,
    RandomVerticalFlip,
    TrivialAugmentWide,
)
from penstock.augment.recipe import Mirror, active_jitters

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from penstock.augment.draw_keys import Uniform
    from penstock.augment.operations import RandomResizedCrop
    from penstock.augment.recipe import (
        CheckedRecipe,
        GeometryStage,
        ImageShape,
        PlacedOperation,
        Window,
    )

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]
    Arrays = dict[str, NDArray[Any]]

RESIZED_CROP_ATTEMPTS = 10  # torchvision's RandomResizedCrop.get_params


def center_windows(op: CenterCrop, height: Ints, width: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return top, left, height and width of torchvision's center_crop, which rounds half to even,
    as Python's round()."""
    rows, columns = op.height_width
    top = np.rint((height - rows) / 2).astype(np.int64)
    left = np.rint((width - columns) / 2).astype(np.int64)
    return top, left, np.full_like(height, rows), np.full_like(width, columns)


def place_windows(
    op: RandomCrop, height: Ints, width: Ints, base: NDArray[np.uint64], *, index: int
) -> tuple[Ints, Ints, Ints, Ints]:
    """Return top, left, height and width of torchvision's RandomCrop, placed by draws 0 and 1. With
    padding a window may reach outside the image, so top and left may be negative."""
    places = keyed_draws(base, index, [0, 1])
    rows, columns = op.height_width
    top = _placed(op, places[0], height, rows)
    left = _placed(op, places[1], width, columns)
    return top, left, np.full_like(height, rows), np.full_like(width, columns)


def _placed(op: RandomCrop, place: Floats, side: Ints, length: int) -> Ints:
    """Return the first pixel of a window on one side of each image. place: a draw in [0, 1)."""
    padding = np.full_like(side, op.padding)
    if op.pad_if_needed:
        padding += np.maximum(length - side - 2 * padding, 0)
    return (place * (side + 2 * padding - length + 1)).astype(np.int64) - padding


def random_windows(
    op: RandomResizedCrop, height: Ints, width: Ints, base: NDArray[np.uint64], *, index: int
) -> tuple[Ints, Ints, Ints, Ints]:
    """Return top, left, height and width of torchvision's RandomResizedCrop, for many samples.

    Up to 10 attempts draw an area and a log-uniform ratio. The first window that fits the image is
    placed at random; if none fits, it is the middle of the image with the nearest allowed ratio.
    Attempt k uses draws 2k and 2k + 1, the place draws 20 and 21.
    height, width: sizes of the images, shape (n,). base: from `draw_base`, shape (n,).
    """
    area, ratio, *place = keyed_draws(
        base, index, [0, 1, 2 * RESIZED_CROP_ATTEMPTS, 2 * RESIZED_CROP_ATTEMPTS + 1]
    )
    rows, columns = _attempted_windows(op, height, width, area, ratio)
    fits = _fits(rows, columns, height, width)
    if not fits.all():
        failed = np.flatnonzero(~fits)
        draws = keyed_draws(
            base[failed],
            index,
            [*range(2, 2 * RESIZED_CROP_ATTEMPTS, 2), *range(3, 2 * RESIZED_CROP_ATTEMPTS, 2)],
        )
        rows[failed], columns[failed], fits[failed] = _first_fit(
            op, height[failed], width[failed], draws
        )
    room_y, room_x = height - rows, width - columns
    top = np.where(fits, (place[0] * (room_y + 1)).astype(np.int64), room_y >> 1)
    left = np.where(fits, (place[1] * (room_x + 1)).astype(np.int64), room_x >> 1)
    return top, left, rows, columns


def _attempted_windows(
    op: RandomResizedCrop, height: Ints, width: Ints, area: Floats, ratio: Floats
) -> tuple[Ints, Ints]:
    """Return heights and widths of windows that may not fit, from draws in [0, 1)."""
    low, high = math.log(op.ratio[0]), math.log(op.ratio[1])
    side = np.sqrt((op.scale[0] + (op.scale[1] - op.scale[0]) * area) * (height * width))
    # sqrt(pixels * ratio) and sqrt(pixels / ratio) with one exp: the root of the ratio.
    root = np.exp(low / 2 + (high - low) / 2 * ratio)
    return np.rint(side / root).astype(np.int64), np.rint(side * root).astype(np.int64)


def _fits(rows: Ints, columns: Ints, height: Ints, width: Ints) -> NDArray[np.bool_]:
    # One comparison for both bounds: as unsigned, 0 - 1 is larger than any image.
    most_y, most_x = (height - 1).view(np.uint64), (width - 1).view(np.uint64)
    inside = (rows - 1).view(np.uint64) <= most_y
    inside &= (columns - 1).view(np.uint64) <= most_x
    return inside


def _first_fit(
    op: RandomResizedCrop, height: Ints, width: Ints, draws: Floats
) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Return the height and width of the first fitting window of several attempts, or of the middle
    one, and True if one fitted.

    draws: shape (2 * attempts, n); first those of the areas.
    """
    attempts = len(draws) // 2
    rows, columns = _attempted_windows(op, height, width, draws[:attempts], draws[attempts:])
    fits = _fits(rows, columns, height, width)
    first, found = fits.argmax(axis=0), np.logical_or.reduce(fits)
    sample = np.arange(len(height))
    middle = _middle_window(op, height, width)
    return (
        np.where(found, rows[first, sample], middle[0]),
        np.where(found, columns[first, sample], middle[1]),
        found,
    )


def _middle_window(op: RandomResizedCrop, height: Ints, width: Ints) -> tuple[Ints, Ints]:
    """Return the largest window of the image with an allowed ratio, at least one pixel."""
    ratio = width / height
    tall, wide = ratio < op.ratio[0], ratio > op.ratio[1]
    rows = np.where(tall, np.rint(width / op.ratio[0]).astype(np.int64), height)
    columns = np.where(wide, np.rint(height * op.ratio[1]).astype(np.int64), width)
    return np.clip(rows, 1, height), np.clip(columns, 1, width)


ERASING_ATTEMPTS = 10  # torchvision's RandomErasing.get_params
_BLUR_REACH = 4  # standard deviations; what lies beyond weighs 6e-5, 0.02 of 255


@dataclass(frozen=True, slots=True)
class DrawRule:
    """The argument inputs of one type of operation, and the function that draws their values.

    inputs: returns the suffix, the numpy dtype and a sample's number of dimensions for each
    argument input. draw: returns their values by suffix, one row per sample.
    """

    inputs: Callable[[Any], list[tuple[str, str, int]]]
    draw: Callable[[Any, Uniform, ImageShape], Arrays]


def argument_inputs(operation: PlacedOperation | Mirror) -> list[tuple[str, str, int]]:
    """Return the name, the numpy dtype and a sample's number of dimensions for each argument input
    of an operation."""
    if isinstance(operation, Mirror):
        return [(operation.name, "int32", 0)]
    inputs = DRAW_RULES[type(operation.op)].inputs(operation.op)
    return [(operation.name(suffix), dtype, ndim) for suffix, dtype, ndim in inputs]


def argument_values(
    operation: PlacedOperation | Mirror,
    shape: ImageShape,
    *,
    flipped: NDArray[np.bool_],
    uniform: Callable[[int], Uniform],
) -> Arrays:
    """Return the argument inputs of an operation by name, C-contiguous.

    flipped: True for samples that the windows flip. uniform: returns the draws of the operation at
    a place.
    """
    if isinstance(operation, Mirror):
        flip = flipped if operation.windows else np.zeros_like(flipped)
        for index, op in operation.flips:
            flip = flip ^ (uniform(index)(1)[0] < op.p)
        return {operation.name: flip.astype(np.int32)}
    rule = DRAW_RULES[type(operation.op)]
    values = rule.draw(operation.op, uniform(operation.index), shape)
    return {
        operation.name(suffix): np.ascontiguousarray(values[suffix], dtype)
        for suffix, dtype, _ in rule.inputs(operation.op)
    }


def _between(pair: Any, draws: Floats) -> Floats:
    low, high = pair
    return np.asarray(low + (high - low) * draws)


def _jitter_draw(op: ColorJitter, uniform: Uniform, _: ImageShape) -> Arrays:
    # One draw for each, used or not: so brightness stays the same if hue is added.
    draws = dict(zip(("brightness", "contrast", "saturation", "hue"), uniform(4), strict=True))
    return {name: _between(getattr(op, name), draws[name]) for name in active_jitters(op)}


def _blur_draw(op: GaussianBlur, uniform: Uniform, _: ImageShape) -> Arrays:
    on, width = uniform(2)
    sigma = _between(op.sigma, width)
    # DALI's kernels are (height, width), torchvision's (width, height). The ends of a kernel weigh
    # nothing if sigma is small, and the CPU time is proportional to its size.
    kernel = np.array(op.kernel_size)[::-1]
    reach = 2 * np.ceil(_BLUR_REACH * sigma) + 1
    return {"on": on < op.p, "sigma": sigma, "window": np.minimum(kernel[None, :], reach[:, None])}


def _erase_draw(op: RandomErasing, uniform: Uniform, shape: ImageShape) -> Arrays:
    """Return the windows of torchvision's RandomErasing: the first of 10 that is smaller than the
    image, at a random place; if there is none, an empty one."""
    on, top, left, *rest = uniform(3 + 2 * ERASING_ATTEMPTS)
    areas, ratios = np.stack(rest[:ERASING_ATTEMPTS]), np.stack(rest[ERASING_ATTEMPTS:])
    area = shape.height * shape.width * _between(op.scale, areas)
    ratio = np.exp(_between([math.log(side) for side in op.ratio], ratios))
    rows, columns = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
    fits = (rows < shape.height) & (columns < shape.width)
    first, sample = fits.argmax(axis=0), np.arange(len(on))
    erases = (on < op.p) & fits.any(axis=0)
    size = np.stack([rows[first, sample], columns[first, sample]], axis=1) * erases[:, None]
    room = np.array([shape.height, shape.width]) - size + 1
    anchor = np.floor(np.stack([top, left], axis=1) * room) * erases[:, None]
    return {"anchor": anchor, "shape": size}


def _apply_draw(op: Apply, uniform: Uniform, _: ImageShape) -> Arrays:
    # Truncated to 24 bits: rounded to float32, the largest draws would be 1.
    return {"draws": np.floor(uniform(op.draws).T * 2**24) / 2**24}


_POLICY = DrawRule(
    policies.policy_inputs,
    lambda op, uniform, shape: policies.policy_draws(op, uniform, shape.height, shape.width),
)

# To add an operation, see `operations.PixelOperation`.
DRAW_RULES: dict[type, DrawRule] = {
    ColorJitter: DrawRule(
        lambda op: [(name, "float32", 0) for name in active_jitters(op)], _jitter_draw
    ),
    RandomGrayscale: DrawRule(
        lambda _: [("on", "bool", 0)], lambda op, uniform, _: {"on": uniform(1)[0] < op.p}
    ),
    GaussianBlur: DrawRule(
        lambda _: [("on", "bool", 0), ("sigma", "float32", 0), ("window", "int32", 1)], _blur_draw
    ),
    RandomRotation: DrawRule(
        lambda _: [("angle", "float32", 0)],
        lambda op, uniform, _: {"angle": _between(op.degrees, uniform(1)[0])},
    ),
    RandAugment: _POLICY,
    TrivialAugmentWide: _POLICY,
    AutoAugment: _POLICY,
    Apply: DrawRule(lambda _: [("draws", "float32", 1)], _apply_draw),
    RandomErasing: DrawRule(
        lambda _: [("anchor", "float32", 1), ("shape", "float32", 1)], _erase_draw
    ),
}
"""The rule for the arguments of each type of pixel operation, and of RandomErasing."""

# Bilinear sampling reads 2 pixels a side: shrinking by more than that skips some.
UNFILTERED_SHRINK = 2

# Pixels decoded beyond a bilinear filter's support (1 pixel, or the scale when antialiased): for
# half a pixel of centre offset, and float32 rounding of the region's corners.
_SPARE_PX = 2

Draws = dict[str, "NDArray[Any]"]
"""Argument inputs of the graph, by name: one C-contiguous row per sample.

start, shape: window to decode, (y, x) and (height, width), int32, (n, 2), inside the upright image.
mirror: int32, (n,). lowK, highK: region that geometry K resizes, (y, x) in pixels of its input,
float32, (n, 2). sizeK: height and width after the resize, float32, (n, 2). filterK: True if it is
antialiased, bool, (n,). anchorK, extentK: (y, x) and (height, width) of a window that may reach
outside geometry K's input, int32, (n, 2). For pixel operations see `DRAW_RULES`. `input_names`
lists the inputs of a recipe.
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
) -> Draws:
    """Return the graph's argument inputs for one batch; a pure function of each sample.

    ids: sample ids, shape (n,). dims: upright height and width, shape (n, 2). occurrences: as in
    `draw_base`.
    """
    return _draw(recipe, ids, dims, seed=seed, epoch=epoch, occurrences=occurrences)


def draw_with_moves(
    recipe: CheckedRecipe, *, ids: NDArray[np.int64], dims: NDArray[np.int32], seed: int, epoch: int
) -> tuple[Draws, ImageMoves]:
    """Return the draws of `draw`, and the moves of the images' masks, boxes and points by the same
    numbers.

    For images with followers: the moves take some microseconds a batch.
    """
    moves: list[Move] = []
    inputs = _draw(recipe, ids, dims, seed=seed, epoch=epoch, moves=moves)
    height, width = dims[:, 0].astype(np.int64), dims[:, 1].astype(np.int64)
    found = [geometry.padding for geometry in recipe.geometries if geometry.padding]
    return inputs, ImageMoves(
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
    """Return the argument inputs as `draw`; append each window, resize and flip to `moves`."""
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
            if geometry.padding is None and decodes_window(recipe):
                _set_window(inputs, view.top, view.left, view.height, view.width)
            continue
        source = view
        view = _View.whole(*_resized(geometry, source), source.flip, source.upend)
        if moves is not None:
            moves.append(ScaleMove(size=(source.height, source.width), to=view.image))
        _apply_windows(view, geometry.after, base, moves)
        _resize_inputs(inputs, recipe, number, source, view)
    for operation in drawn_operations(recipe):
        inputs |= argument_values(
            operation,
            recipe.image,
            flipped=_windows_flip(view, operation),
            uniform=lambda index: _uniform(base, index),
        )
    if moves is not None:
        _add_late_flips(recipe, inputs, view, moves)
    return inputs


def _windows_flip(view: _View, operation: PlacedOperation | Mirror) -> NDArray[np.bool_]:
    """Return True if the windows flip a sample in the direction of a mirror."""
    if isinstance(operation, Mirror) and operation.vertical:
        return np.zeros_like(view.flip) if view.upend is None else view.upend
    return view.flip


def _add_late_flips(recipe: CheckedRecipe, inputs: Draws, view: _View, moves: list[Move]) -> None:
    """Append the flips after the windows: all mirrors, without the flips of the windows."""
    mirrors = [each for each in drawn_operations(recipe) if isinstance(each, Mirror)]
    for vertical in (False, True):
        some = [mirror for mirror in mirrors if mirror.vertical is vertical]
        if any(mirror.flips for mirror in some):
            on = _windows_flip(view, some[0])
            for mirror in some:
                on = on ^ inputs[mirror.name].astype(np.bool_)
            moves.append(FlipMove(size=(view.height, view.width), on=on, vertical=vertical))


def input_names(recipe: CheckedRecipe) -> list[str]:
    """Return the names of the argument inputs that `draw` returns and the graph needs."""
    names = ["start", "shape"] if decodes_window(recipe) else []
    for number, geometry in enumerate(recipe.geometries):
        names += [f"anchor{number}", f"extent{number}"] if geometry.padding else []
        if geometry.size is not None:
            names += [f"low{number}", f"high{number}"] if _has_crop(geometry.after) else []
            names += [] if geometry.out else [f"size{number}"]
            names += [f"filter{number}"] if geometry.antialias == "auto" else []
    operations = drawn_operations(recipe)
    return [*names, *(name for each in operations for name, _, _ in argument_inputs(each))]


def drawn_operations(recipe: CheckedRecipe) -> list[PlacedOperation | Mirror]:
    """Return the operations with draws that follow the geometry stages."""
    last = [recipe.mirror] if recipe.mirror else []
    return [*recipe.pixels, *last, *recipe.erasing]


def _uniform(base: NDArray[np.uint64] | None, index: int) -> Callable[[int], Floats]:
    assert base is not None  # recipe.random is true: this operation draws
    return lambda count: keyed_draws(base, index, list(range(count)))


def decodes_window(recipe: CheckedRecipe) -> bool:
    """Return True if decoding a part of each image is enough."""
    first = recipe.geometries[0]
    return _has_crop(first.before) or _has_crop(first.after)


def resizes_region(geometry: GeometryStage) -> bool:
    """Return True if the geometry resizes only a region of its input."""
    return _has_crop(geometry.after)


def _has_crop(windows: tuple[Window, ...]) -> bool:
    flips = RandomHorizontalFlip, RandomVerticalFlip
    return any(not isinstance(window.op, flips) for window in windows)


def _apply_windows(
    view: _View,
    windows: tuple[Window, ...],
    base: NDArray[np.uint64] | None,
    moves: list[Move] | None,
) -> None:
    for window in windows:
        op, size = window.op, (view.height, view.width)
        if isinstance(op, RandomHorizontalFlip | RandomVerticalFlip):
            assert base is not None  # recipe.random is true: this operation draws
            on = keyed_draws(base, window.index, [0])[0] < op.p
            vertical = isinstance(op, RandomVerticalFlip)
            if vertical:
                view.upend = on if view.upend is None else view.upend ^ on
            else:
                view.flip = view.flip ^ on
            if moves is not None:
                moves.append(FlipMove(size=size, on=on, vertical=vertical))
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
