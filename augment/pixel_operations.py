"""Define operations on images of one size, and those that every recipe has around them.

Names, meanings and formulas are torchvision's, so that published recipes can be used. The learnt
policies are in `policies`.

Rotations, affine maps and perspectives are matrices, which pixels, masks, boxes and keypoints
follow (formulas of transforms/v2/functional/_geometry.py). DALI moves the pixels, on the CPU and
the GPU. Milliseconds of a core for an image of 224 x 224, nearest and bilinear (DALI 2.4): 0.09 and
0.28; by DALI's operator for rotations 0.22 and 2.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np

from penstock.augment import argument_checks as arg
from penstock.augment import dali_nodes as nodes
from penstock.augment.argument_checks import argument
from penstock.augment.dali_runs import fn, types
from penstock.augment.operation import (
    DType,
    ImageOperation,
    ImageShape,
    Operation,
    Stage,
    Values,
    operation,
)
from penstock.cache import RecipeError

if TYPE_CHECKING:
    from penstock.augment.draw_keys import Uniform
    from penstock.readers import Floats, Numbers

Color = Literal["rgb", "gray"]
WindowMode = Literal["auto", "decoder", "slice"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Mean of ImageNet's training images, R, G, B, in units of 0..1."""

IMAGENET_STD = (0.229, 0.224, 0.225)
"""Standard deviation of ImageNet's training images, R, G, B, in units of 0..1."""

MAX_FACTOR = 100.0  # of brightness, contrast and saturation, which are computed in 16 bits
MAX_DRAWS = 1024


@operation
class Decode(Operation):
    """Decode encoded images: upright by EXIF, without alpha, 16 bits scaled to 8.

    color: "rgb" (3 channels) or "gray" (1 channel, luma). The other arguments change pixels on a
    GPU by rounding at most. windows: "decoder" decodes only the window of a crop; "slice" decodes
    the full image and crops it, which is slower, for GPUs on which the first doesn't work; "auto":
    "decoder" on the CPU and "slice" on a GPU. hw_decoder_load: share of a batch for the
    GPU's JPEG unit; None: DALI's default. preallocate: (height, width) of the largest image, for
    which the GPU's decoder allocates memory in advance; None: it grows with the images. The best
    values haven't been measured. device: "cpu" decodes and augments on the CPU and copies finished
    batches to the loader's device, for machines without DALI's operators for GPUs; None: the
    loader's device.
    """

    color: Color = argument(arg.one_of(*get_args(Color)), default="rgb")
    _: KW_ONLY
    windows: WindowMode = argument(arg.one_of(*get_args(WindowMode)), default="auto")
    hw_decoder_load: float | None = argument(arg.optional(arg.probability), default=None)
    preallocate: tuple[int, int] | None = argument(arg.optional(arg.height_width), default=None)
    device: Literal["cpu"] | None = argument(arg.optional(arg.one_of("cpu")), default=None)

    stage = Stage.DECODE
    is_single = True

    @property
    def channels(self) -> int:
        """The number of channels of an image: 3 or 1."""
        return 3 if self.color == "rgb" else 1


@operation
class Normalize(Operation):
    """Convert pixels to float32 (x / 255 - mean) / std by channel, as torchvision's ToTensor and
    Normalize do.

    mean, std: one number per channel, in units of 0..1; ImageNet's by default. inplace: has no
    effect; it exists for recipes that pass it to torchvision's.
    """

    mean: tuple[float, ...] = argument(arg.numbers, default=IMAGENET_MEAN)
    std: tuple[float, ...] = argument(arg.numbers, default=IMAGENET_STD)
    inplace: bool = False

    stage = Stage.NORMALIZE
    is_single = True

    def __post_init__(self) -> None:
        Operation.__post_init__(self)
        mean, std = self.mean, self.std
        is_scaled = max(map(abs, (*mean, *std))) <= 16
        if len(mean) != len(std) or min(std) <= 0 or not is_scaled:
            raise RecipeError(
                f"Normalize: got mean {mean} and std {std}, wanted one of each by channel, "
                "in units of 0..1 and stds above 0. Divide numbers in units of 0..255 by 255."
            )

    def check(self, shape: ImageShape, dtype: DType) -> None:
        """Raise RecipeError for another number of channels, and for whole numbers."""
        count = len(self.mean)
        if count != shape.channels:
            raise RecipeError(
                f"Normalize: got {count} means, wanted {shape.channels}, as Decode has."
            )
        if dtype == "uint8":
            raise RecipeError(
                'Cast("uint8") would round the numbers of Normalize, about -2 to 3, to whole '
                "numbers. Leave out one of the two."
            )


@operation
class Cast(Operation):
    """Convert the batch to a dtype. It changes the type, never the scale: pixels stay 0..255."""

    dtype: DType = argument(arg.one_of(*get_args(DType)))

    stage = Stage.CAST
    is_single = True


def between(pair: Any, draws: Floats) -> Floats:
    """Return uniform draws from low to high. pair: (low, high). draws: in [0, 1)."""
    low, high = pair
    return np.asarray(low + (high - low) * draws)


_NEUTRAL = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0}
_FACTOR = arg.range_around(1.0, low=0.0, high=MAX_FACTOR)
_HUE = arg.range_around(0.0, low=-0.5, high=0.5)
_SEXTANTS = (5.0, 3.0, 1.0)  # of red, green and blue on the circle of hues, whose length is 6


class _LevelOperation(ImageOperation):
    """Changes the levels of pixels, alike in images of any size and in mirrored ones."""

    __slots__ = ()

    needs_size = False
    commutes_with_flips = True


@operation
class ColorJitter(_LevelOperation):
    """Change brightness, contrast, saturation and hue randomly, by torchvision's formulas.

    brightness, contrast, saturation: a number x draws a factor from max(0, 1 - x) to 1 + x, a pair
    draws from low to high; 1 changes nothing. hue: a number x, at most 0.5, draws a shift from -x
    to x of the circle of hues, a pair from low to high; 0 and None change nothing. They are applied
    in this order; torchvision shuffles it for each image. Grey recipes support only brightness and
    contrast. p: probability with which an image is changed, as RandomApply([ColorJitter(...)], p)
    in torchvision.
    """

    brightness: float | tuple[float, float] | None = argument(_FACTOR, default=None)
    contrast: float | tuple[float, float] | None = argument(_FACTOR, default=None)
    saturation: float | tuple[float, float] | None = argument(_FACTOR, default=None)
    hue: float | tuple[float, float] | None = argument(_HUE, default=None)
    _: KW_ONLY
    p: float = 1.0

    compiled = "jitter"

    @property
    def needs_colours(self) -> bool:  # type: ignore[override]  # by its arguments
        """True if it changes saturation or hue."""
        return not {"saturation", "hue"}.isdisjoint(self._active())

    def _active(self) -> list[str]:
        """Return the names of the arguments that change anything, in order."""
        return [name for name, value in _NEUTRAL.items() if getattr(self, name) != (value, value)]

    def draw(self, uniform: Uniform, _shape: ImageShape) -> Values:
        """Return the factors and the shift of the hue, and the samples to change."""
        # One draw for each, used or not: so brightness stays the same if hue is added.
        *numbers, on = uniform(5)
        draws = dict(zip(_NEUTRAL, numbers, strict=True))
        found = {name: between(getattr(self, name), draws[name]) for name in self._active()}
        return found | ({"on": on < self.p} if self.p < 1 else {})

    def arguments(self, values: Values) -> tuple[Any, ...]:
        """Return the factors and the shift of the hue, neutral ones included."""
        return tuple(values.get(name, neutral) for name, neutral in _NEUTRAL.items())

    def node(self, images: Any, inputs: dict[str, Any], shape: ImageShape) -> Any:
        """Adjust brightness, contrast, saturation and hue, in this order."""
        if "brightness" in inputs:
            images = fn.brightness_contrast(images, brightness=inputs["brightness"])
        if "contrast" in inputs:
            gray = nodes.luma(images) if shape.channels == 3 else images
            images = nodes.contrast(images, inputs["contrast"], gray)
        if "saturation" in inputs:
            # By arithmetic it is no slower than fn.saturation. The factors have opposite signs, or
            # are small: the sum can't overflow.
            factor, gray = inputs["saturation"], nodes.as_rgb(nodes.luma(images))
            images = nodes.uint8(nodes.int16(images, factor) + nodes.int16(gray, 1.0 - factor))
        return _shift_hue(images, inputs["hue"]) if "hue" in inputs else images


def _shift_hue(images: Any, shift: Any) -> Any:
    """Add to the hue in HSV (1 is the full circle), exact to rounding. DALI's own hue operator
    rotates the colours in YIQ, which changes value and saturation.

    With c = max - min and a hue H on a circle of length 6, a channel is
    max - c * clamp(|distance of H + n from 3 on the circle| - 1, 0, 1); everything is computed
    times c, so that no division is needed and int16 is enough.
    """
    from nvidia.dali import math

    planes = fn.transpose(images, perm=[2, 0, 1])
    # Each channel as rows of one image, whose values no operator takes for colours.
    red, green, blue = (fn.reshape(planes[k : k + 1], layout="HWC") for k in range(3))
    high = math.max(math.max(red, green), blue)
    chroma = high - math.min(math.min(red, green), blue)
    r, g, b, twice = (*map(nodes.int16, (red, green, blue)), nodes.int16(chroma, 2.0))
    # (hue - 2) * chroma, for a hue of -1 to 5. DALI's arithmetic has no `where`.
    is_blue, is_green, is_red = r - g + twice, b - r, g - b - twice
    hue = is_blue + (green == high) * (is_green - is_blue)
    hue = hue + (red == high) * (is_red - hue)
    most, c, c3 = nodes.int16(high), nodes.int16(chroma), nodes.int16(chroma, 3.0)
    zero = types.Constant(0, dtype=types.INT16)
    shifted = []
    for sextant in _SEXTANTS:
        turn = shift * 6.0 + sextant
        turn = turn - 6.0 * math.floor(turn * (1 / 6) + 0.5)  # -3 to 3
        away = math.abs(math.abs(hue + nodes.int16(chroma, turn)) - c3) - c
        # math.clamp takes three times as long.
        shifted.append(most - math.min(math.max(away, zero), c))
    whole = fn.reshape(fn.cat(*shifted, axis=0), layout="CHW")
    return fn.crop_mirror_normalize(whole, dtype=types.UINT8, output_layout="HWC")


@operation
class RandomGrayscale(_LevelOperation):
    """Turn images grey with probability p; they keep their 3 channels."""

    p: float = 0.1

    needs_colours = True
    compiled = "gray"

    def node(self, images: Any, _inputs: dict[str, Any], _shape: ImageShape) -> Any:
        """Put the luma into all three channels."""
        return nodes.as_rgb(nodes.luma(images))


_BLUR_REACH = 4  # standard deviations; what lies beyond weighs 6e-5, 0.02 of 255


def _odd_sides(value: Any) -> tuple[int, int]:
    kernel = arg.sides_px(value)
    if not all(side % 2 for side in kernel):
        raise ValueError(value)
    return kernel


_KERNEL = arg.expect(_odd_sides, "odd numbers of pixels, so that the kernel has a middle")


def _blur_sigma(what: str, value: object) -> tuple[float, float]:
    sigma = arg.numbers(what, value)
    low, high = arg.positive_range(1e4)(what, sigma * 2 if len(sigma) == 1 else sigma)
    return low, high


@operation
class GaussianBlur(_LevelOperation):
    """Blur images with probability p, by a Gaussian of random width, as torchvision does.

    kernel_size: odd, in pixels; an int is a square, a pair is (horizontal, vertical), as in
    torchvision. sigma: standard deviation in pixels, one number or the range of a uniform draw.
    p: 1.0 by default, as torchvision always blurs.
    """

    kernel_size: int | tuple[int, int] = argument(_KERNEL)
    sigma: float | tuple[float, float] = argument(_blur_sigma, default=(0.1, 2.0))
    p: float = 1.0

    compiled = "blur"

    def check(self, shape: ImageShape, _dtype: DType) -> None:
        """Raise RecipeError for too small images."""
        columns, rows = self.kernel_size  # type: ignore[misc]  # checked when it was created
        if rows // 2 >= shape.height or columns // 2 >= shape.width:
            raise RecipeError(
                f"GaussianBlur(kernel_size=...): got {columns} x {rows} (width x height) for "
                f"images of {shape.width} x {shape.height}, wanted less than twice their size."
            )

    def draw(self, uniform: Uniform, _shape: ImageShape) -> Values:
        """Return the samples to blur, with standard deviations and sizes of kernels."""
        on, width = uniform(2)
        sigma = between(self.sigma, width)
        # DALI's kernels are (height, width), torchvision's (width, height). The ends of a kernel
        # weigh nothing if sigma is small, and the CPU time is proportional to its size.
        kernel = np.array(self.kernel_size)[::-1]
        reach = 2 * np.ceil(_BLUR_REACH * sigma).astype(np.int32) + 1
        window = np.minimum(kernel[None, :], reach[:, None])
        return {"on": on < self.p, "sigma": sigma, "window": window}

    def arguments(self, values: Values) -> tuple[Any, ...]:
        """Return the standard deviations, and the heights and widths of the kernels."""
        return values["sigma"], values["window"][..., 0], values["window"][..., 1]

    def node(self, images: Any, inputs: dict[str, Any], _shape: ImageShape) -> Any:
        """Blur; the image is mirrored at its edge without repeating the edge."""
        return fn.gaussian_blur(images, sigma=inputs["sigma"], window_size=inputs["window"])


@operation
class RandomPosterize(_LevelOperation):
    """Keep the upper bits of each value, with probability p, as torchvision does.

    bits: how many of 8 bits to keep, from 0 to 8.
    """

    bits: int = argument(arg.whole_number(0, 8))
    p: float = 0.5

    compiled = "posterize"

    def arguments(self, _values: Values) -> tuple[Any, ...]:
        """Return the distance of two levels."""
        return (2 ** (8 - self.bits),)

    def node(self, images: Any, _inputs: dict[str, Any], _shape: ImageShape) -> Any:
        """Keep the upper bits."""
        return images & types.Constant(256 - 2 ** (8 - self.bits), dtype=types.UINT8)


@operation
class Solarize(_LevelOperation):
    """Invert values of at least the threshold, with probability p, as torchvision's RandomSolarize
    does.

    threshold: from 0 to 255, in units of stored pixels.
    """

    threshold: float = argument(arg.number(0, 255))
    p: float = 0.5

    compiled = "solarize"

    def arguments(self, _values: Values) -> tuple[Any, ...]:
        """Return the least level that is inverted."""
        return (math.ceil(self.threshold),)

    def node(self, images: Any, _inputs: dict[str, Any], _shape: ImageShape) -> Any:
        """Invert values."""
        return nodes.solarize(images, types.Constant(math.ceil(self.threshold), dtype=types.UINT8))


@operation
class RandomEqualize(_LevelOperation):
    """Equalize the histogram of each channel, with probability p, as torchvision does.

    On a GPU and without numba it is DALI's, which is OpenCV's: level v becomes
    255 (c(v) - c(first)) / (n - c(first)), c counting pixels up to v. torchvision counts those
    below v and steps in whole pixels: photographs differ by 2 of 255 on average, small images more.
    """

    p: float = 0.5

    compiled = "equalize"

    def node(self, images: Any, _inputs: dict[str, Any], _shape: ImageShape) -> Any:
        if images.device == "cpu" and nodes.is_compiled():
            return nodes.compiled_equalize(images)
        return fn.equalize(images)


@operation
class RandomAutocontrast(_LevelOperation):
    """Stretch each channel to 0..255, with probability p, as torchvision does; rounded, where
    torchvision truncates."""

    p: float = 0.5

    compiled = "autocontrast"

    def node(self, images: Any, _inputs: dict[str, Any], _shape: ImageShape) -> Any:
        """Stretch channels."""
        return nodes.autocontrast(images)


_DEGREES = arg.range_around(0.0, low=-36_000.0, high=36_000.0)
_RADIANS = math.pi / 180  # in one degree
_INTERPOLATION = arg.one_of("nearest", "bilinear")
_CENTER = arg.only(None, "images turn about their middle")


def _several(*counts: int, low: float, high: float) -> arg.Check:
    """Return the check of so many numbers from low to high, or None."""

    def convert(value: Any) -> tuple[float, ...]:
        found = tuple(arg.real(each, low, high) for each in value)
        if len(found) not in counts:
            raise ValueError(value)
        return found

    wanted = f"{' or '.join(map(str, counts))} numbers from {low:g} to {high:g}"
    return arg.optional(arg.expect(convert, wanted))


def _shears(what: str, value: Any) -> tuple[float, ...]:
    """Return (low, high) along x, or along x and y, of degrees."""
    value = arg.python_value(value)
    if arg.is_finite_number(value) and value >= 0:
        value = (-value, value)
    return tuple(_several(2, 4, low=-89.0, high=89.0)(what, value))


class _Warp(ImageOperation):
    """Base class of operations that move pixels by a drawn matrix."""

    __slots__ = ()

    interpolation: str
    fill: float | None

    def node(self, images: Any, inputs: dict[str, Any], _shape: ImageShape) -> Any:
        """Move pixels."""
        fill = self.fill or 0.0
        return nodes.warp(images, inputs["matrix"], fill=fill, interpolation=self.interpolation)

    def geometry(self, values: Values, _shape: ImageShape) -> Numbers:
        """Return the matrices."""
        return values["matrix"]


@operation
class RandomRotation(_Warp):
    """Rotate images about their middle, in their size, as torchvision does.

    degrees: a number x draws an angle from -x to x, a pair from low to high; counter-clockwise.
    interpolation: "nearest" or "bilinear". expand, center: only False and None. fill: value of
    pixels outside the rotated image, 0..255, for all channels. mask_fill: value of masks there.
    """

    degrees: float | tuple[float, float] = argument(_DEGREES)
    interpolation: str = argument(_INTERPOLATION, default="nearest")
    expand: bool = argument(arg.only(False, "a batch has one size"), default=False)
    center: None = argument(_CENTER, default=None)
    fill: float | None = 0.0
    _: KW_ONLY
    mask_fill: int = 0

    def draw(self, uniform: Uniform, shape: ImageShape) -> Values:
        """Return the matrices from output to input."""
        return {"matrix": rotation(between(self.degrees, uniform(1)[0]), shape.height, shape.width)}


@operation
class RandomAffine(_Warp):
    """Rotate, shift, scale and shear images about their middle, in their size, as torchvision does.

    degrees: a number x draws an angle from -x to x, a pair from low to high; clockwise. translate:
    largest shares of width and height by which an image is shifted, in whole pixels; None: none.
    scale: range of the factor; None: 1. shear: degrees along x, a number or a pair, or four
    numbers: (low, high) along x and along y; None: none. interpolation, fill, center, mask_fill: as
    in `RandomRotation`.
    """

    degrees: float | tuple[float, float] = argument(_DEGREES)
    translate: tuple[float, float] | None = argument(_several(2, low=0.0, high=1.0), default=None)
    scale: tuple[float, float] | None = argument(_several(2, low=1e-4, high=1e4), default=None)
    shear: float | tuple[float, ...] | None = argument(arg.optional(_shears), default=None)
    interpolation: str = argument(_INTERPOLATION, default="nearest")
    fill: float | None = 0.0
    center: None = argument(_CENTER, default=None)
    _: KW_ONLY
    mask_fill: int = 0

    def draw(self, uniform: Uniform, shape: ImageShape) -> Values:
        """Return the matrices from output to input."""
        # One draw for each number, used or not: so the angle stays the same if scale= is added.
        angle, across, down, factor, shear_x, shear_y = uniform(6)
        share_x, share_y = self.translate or (0.0, 0.0)
        low_x, high_x, low_y, high_y = (*cast("Any", self.shear or (0.0, 0.0)), 0.0, 0.0)[:4]
        scale = between(self.scale or (1.0, 1.0), factor)
        turn = between(self.degrees, angle) * _RADIANS
        shear_x = between((low_x, high_x), shear_x) * _RADIANS
        shear_y = between((low_y, high_y), shear_y) * _RADIANS
        sin, cos = np.sin(turn - shear_y), np.cos(turn - shear_y)
        # The inverse of torchvision's matrix, whose determinant is scale squared.
        a = (np.cos(turn) - sin * np.tan(shear_x) / np.cos(shear_y)) / scale
        b = (np.sin(turn) + cos * np.tan(shear_x) / np.cos(shear_y)) / scale
        c, d = -sin / np.cos(shear_y) / scale, cos / np.cos(shear_y) / scale
        x, y = shape.width / 2, shape.height / 2
        right = x + np.rint((2 * across - 1) * share_x * shape.width)
        below = y + np.rint((2 * down - 1) * share_y * shape.height)
        upper, lower = [a, b, x - a * right - b * below], [c, d, y - c * right - d * below]
        return {"matrix": matrices([upper, lower])}


@operation
class RandomPerspective(_Warp):
    """Move the corners of images inwards at random with probability p, as torchvision does.

    distortion_scale: largest share of half a side by which a corner moves, from 0 to 1.
    interpolation: "bilinear" or "nearest". fill, mask_fill: as in `RandomRotation`.
    """

    distortion_scale: float = argument(arg.probability, default=0.5)
    p: float = 0.5
    interpolation: str = argument(_INTERPOLATION, default="bilinear")
    fill: float | None = 0.0
    _: KW_ONLY
    mask_fill: int = 0

    def draw(self, uniform: Uniform, shape: ImageShape) -> Values:
        """Return the samples to change, and matrices from output to input."""
        on, *places = uniform(9)
        height, width = shape.height, shape.width
        # torchvision's ranges of whole pixels: 0 to the bound, and from the last less the bound.
        rows, columns = (int(self.distortion_scale * (side // 2)) + 1 for side in (height, width))
        x, y = (np.floor(np.stack(places[k::2]) * side) for k, side in enumerate((columns, rows)))
        x[1:3] += width - columns
        y[2:4] += height - rows
        corners = np.array([[0, 0], [width - 1, 0], [width - 1, height - 1], [0, height - 1]])
        return {"on": on < self.p, "matrix": perspective(np.stack([x, y], axis=-1), corners)}


def rotation(degrees: Floats, height: int, width: int) -> Floats:
    """Return matrices from output to input points for counterclockwise rotations about the middle,
    shape (..., 3, 3)."""
    radians = degrees * _RADIANS
    cos, sin = np.cos(radians), np.sin(radians)
    x, y = width / 2, height / 2
    return matrices([[cos, -sin, x - cos * x + sin * y], [sin, cos, y - sin * x - cos * y]])


def perspective(shown: Floats, corners: Numbers) -> Floats:
    """Return matrices of the perspective that shows `corners` of an image at the points `shown`.

    shown: x, y of points of the result, shape (4, n, 2). corners: of the image, shape (4, 2).
    """
    count = shown.shape[1]
    equations = np.zeros((count, 8, 8))
    for row, (point, (x, y)) in enumerate(zip(shown, corners, strict=True)):
        for axis, value in enumerate((x, y)):
            equation = equations[:, 2 * row + axis]
            equation[:, 3 * axis : 3 * axis + 2] = point
            equation[:, 3 * axis + 2] = 1
            equation[:, 6:] = -value * point
    right = np.broadcast_to(corners.reshape(8, 1).astype(np.float64), (count, 8, 1))
    try:
        found = np.linalg.solve(equations, right)[..., 0]
    except np.linalg.LinAlgError:  # corners of a sample coincide
        found = (np.linalg.pinv(equations) @ right)[..., 0]
    return np.concatenate([found, np.ones((count, 1))], axis=1).reshape(count, 3, 3)


def matrices(rows: list[list[Any]]) -> Floats:
    """Return matrices (..., 3, 3) of two upper rows of three numbers or arrays (...) each."""
    found = np.broadcast_arrays(*rows[0], *rows[1], 0.0, 0.0, 1.0)
    return np.stack(found, axis=-1).astype(np.float64).reshape(*found[0].shape, 3, 3)


ERASING_ATTEMPTS = 10  # torchvision's RandomErasing.get_params


@operation
class RandomErasing(ImageOperation):
    """Fill a random window with `value`, with probability p, as torchvision does.

    It comes after Normalize, if the recipe has one. scale: range of the window's share of the
    image. ratio: range of height / width, uniform in its logarithm. value: one number, or one per
    channel, in the units of the batch; torchvision's "random" isn't supported, as noise that DALI
    draws itself would not repeat after a restart. inplace: as in `Normalize`.
    """

    p: float = 0.5
    scale: tuple[float, float] = argument(arg.positive_range(1.0), default=(0.02, 0.33))
    ratio: tuple[float, float] = argument(arg.positive_range(1e4), default=(0.3, 3.3))
    value: float | tuple[float, ...] = argument(arg.numbers, default=0.0)
    inplace: bool = False

    stage = Stage.ERASE

    def check(self, shape: ImageShape, dtype: DType) -> None:
        """Raise RecipeError for values that don't fit the channels, or bytes."""
        values: Any = self.value  # one, or one per channel
        fits = len(values) in (1, shape.channels)
        if not fits or (dtype == "uint8" and not {*values} <= {*range(256)}):
            raise RecipeError(
                f"RandomErasing(value=...): got {values} for images of {dtype}, wanted 1 or "
                f"{shape.channels} numbers, for uint8 whole numbers from 0 to 255."
            )

    def draw(self, uniform: Uniform, shape: ImageShape) -> Values:
        """Return the windows of torchvision's RandomErasing: the first of 10 that is smaller than
        the image, at a random place; if there is none, an empty one."""
        on, top, left, *rest = uniform(3 + 2 * ERASING_ATTEMPTS)
        areas, ratios = np.stack(rest[:ERASING_ATTEMPTS]), np.stack(rest[ERASING_ATTEMPTS:])
        area = shape.height * shape.width * between(self.scale, areas)
        ratio = np.exp(between([math.log(side) for side in self.ratio], ratios))
        rows, columns = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
        fits = (rows < shape.height) & (columns < shape.width)
        first, sample = fits.argmax(axis=0), np.arange(len(on))
        erases = (on < self.p) & fits.any(axis=0)
        size = np.stack([rows[first, sample], columns[first, sample]], axis=1) * erases[:, None]
        room = np.array([shape.height, shape.width]) - size + 1
        anchor = np.floor(np.stack([top, left], axis=1) * room) * erases[:, None]
        return {"anchor": anchor, "shape": size}

    def node(self, images: Any, inputs: dict[str, Any], _shape: ImageShape) -> Any:
        """Fill windows; CHW in and out, any dtype. A window of no size erases nothing."""
        return fn.erase(images, axis_names="HW", fill_value=[*cast("Any", self.value)], **inputs)


@operation
class Apply(ImageOperation):
    """Apply a DALI function of yours, so that all of DALI's operators can be used.

    fn: called a few times when a graph is built, as fn(images, draws) with DALI nodes: the images,
    uint8, (height, width, channels), layout "HWC"; and for each sample `draws` numbers, float32, in
    [0, 1), which depend only on (seed, epoch, sample id). It returns images of the same shape and
    layout; any type but uint8 is rounded and clipped to 0..255. It may be a lambda and is never
    pickled. draws: how many numbers a sample gets. Random operators of DALI don't repeat their
    numbers after a restart, so use `draws` instead. moves: True if fn may move pixels, which masks,
    boxes and keypoints can't follow; False: it leaves them in place.
    """

    fn: Callable[[Any, Any], Any] = argument(arg.function)
    draws: int = argument(arg.whole_number(1, MAX_DRAWS), default=1)
    _: KW_ONLY
    moves: bool = argument(arg.boolean, default=True)

    or_else = ", or pass Apply(..., moves=False) if its function leaves them in place"
    is_foreign = True

    def draw(self, uniform: Uniform, _shape: ImageShape) -> Values:
        """Return the numbers, truncated to 24 bits: rounded to float32, the largest would be 1."""
        return {"draws": np.floor(uniform(self.draws).T * 2**24) / 2**24}

    def node(self, images: Any, inputs: dict[str, Any], _shape: ImageShape) -> Any:
        return self.fn(images, inputs["draws"])
