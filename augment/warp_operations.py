"""Define operations that move the pixels of images of one size: rotations, affine maps, and
perspectives.

Each declares its geometry, matrices that masks, boxes and keypoints follow. Formulas are
torchvision's (transforms/v2/functional/_geometry.py). DALI moves the pixels, on the CPU and the
GPU. Milliseconds of a core for an image of 224 x 224, nearest and bilinear (DALI 2.4): rotation
0.22 and 2.2, affine and perspective 0.09 and 0.28.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from penstock.augment import argument_checks as arg
from penstock.augment.argument_checks import argument
from penstock.augment.dali_library import fn
from penstock.augment.dali_nodes import interpolation_type, warp
from penstock.augment.operation import ImageOperation, ImageShape, Values, operation
from penstock.augment.pixel_operations import between

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.augment.draw_keys import Floats, Uniform

_DEGREES = arg.range_around(0.0, low=-36_000.0, high=36_000.0)
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
        return warp(images, inputs["matrix"], fill=fill, interpolation=self.interpolation)

    def geometry(self, values: Values, _shape: ImageShape) -> NDArray[Any]:
        """Return the matrices."""
        return values["matrix"]


@operation
class RandomRotation(ImageOperation):
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

    def draw(self, uniform: Uniform, _shape: ImageShape) -> Values:
        """Return the angles in degrees."""
        return {"angle": between(self.degrees, uniform(1)[0])}

    def node(self, images: Any, inputs: dict[str, Any], _shape: ImageShape) -> Any:
        """Rotate images."""
        kind = interpolation_type(self.interpolation)
        options = {"keep_size": True, "fill_value": self.fill, "interp_type": kind}
        return fn.rotate(images, angle=inputs["angle"], **options)

    def geometry(self, values: Values, shape: ImageShape) -> NDArray[Any]:
        """Return rotations about the middle."""
        return rotation(values["angle"].astype(np.float64), shape.height, shape.width)


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
        across, down = (
            (2 * across - 1) * share_x * shape.width,
            (2 * down - 1) * share_y * shape.height,
        )
        low_x, high_x, low_y, high_y = (*cast("Any", self.shear or (0.0, 0.0)), 0.0, 0.0)[:4]
        matrix = affine(
            between(self.degrees, angle),
            translate=(np.rint(across), np.rint(down)),
            scale=between(self.scale or (1.0, 1.0), factor),
            shear=(between((low_x, high_x), shear_x), between((low_y, high_y), shear_y)),
            height=shape.height,
            width=shape.width,
        )
        return {"matrix": matrix}


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
    radians = degrees * (math.pi / 180)
    cos, sin = np.cos(radians), np.sin(radians)
    x, y = width / 2, height / 2
    return matrices([[cos, -sin, x - cos * x + sin * y], [sin, cos, y - sin * x - cos * y]])


def affine(
    degrees: Floats,
    *,
    translate: tuple[Floats, Floats],
    scale: Floats,
    shear: tuple[Floats, Floats],
    height: int,
    width: int,
) -> Floats:
    """Return torchvision's matrices of RandomAffine from output to input points, about the middle,
    shape (n, 3, 3). translate: in pixels. shear: in degrees."""
    turn, shear_x, shear_y = (each * (math.pi / 180) for each in (degrees, *shear))
    a = np.cos(turn - shear_y) / np.cos(shear_y)
    b = -np.cos(turn - shear_y) * np.tan(shear_x) / np.cos(shear_y) - np.sin(turn)
    c = np.sin(turn - shear_y) / np.cos(shear_y)
    d = -np.sin(turn - shear_y) * np.tan(shear_x) / np.cos(shear_y) + np.cos(turn)
    x, y = width / 2, height / 2
    right, down = x + translate[0], y + translate[1]
    a, b, c, d = d / scale, -b / scale, -c / scale, a / scale  # the inverse: ad - bc is 1
    return matrices([[a, b, x - a * right - b * down], [c, d, y - c * right - d * down]])


def perspective(shown: Floats, corners: NDArray[Any]) -> Floats:
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
