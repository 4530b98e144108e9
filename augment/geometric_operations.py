"""Define the operations that crop, resize and flip images of any size, and compute their windows.

Names, meanings and formulas are torchvision's (transforms.py and _functional_tensor.py), for many
samples at once. Windows are integers inside the upright image. `draws` combines them, so that only
what the last window shows is decoded and resized; masks, boxes and keypoints follow all of them
(`image_moves`). Crops of a fixed size also crop arrays (`field_recipes`).
"""

from __future__ import annotations

import math
from abc import ABCMeta, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import numpy as np

from penstock.augment import argument_checks as arg
from penstock.augment.argument_checks import argument
from penstock.augment.dali_runs import fn
from penstock.augment.operation import Antialias, GeometricOperation, ImageShape, Size, operation
from penstock.cache import RecipeError
from penstock.readers import ANY_SIZE, ImageRange

if TYPE_CHECKING:
    from penstock.augment.draw_keys import Bools, Floats, Ints, Uniform
    from penstock.readers.fieldtypes import FieldType

RESIZED_CROP_ATTEMPTS = 10  # torchvision's RandomResizedCrop.get_params


_BILINEAR = arg.one_of("bilinear")


def _resize_size(what: str, value: Any) -> Size:
    height, width = arg.height_width(what, value)
    return (height, width) if len(arg.as_tuple(value)) == 2 else height


@operation
class Resize(GeometricOperation):
    """Resize images bilinearly, as torchvision does.

    size: an int is the short side in pixels, and the long side is int(size * long / short); a pair
    is the exact (height, width). interpolation: only "bilinear". max_size: only None, as a batch
    has one size. antialias: filter when shrinking, as Pillow and torchvision do; without it
    shrinking saves a fifth of a training sample's CPU time, and causes aliasing. On the CPU pixels
    differ from torchvision's by at most 1 of 255. DALI's own operators (on a GPU, without numba, or
    if images keep different sizes) repeat the edge: the outermost pixels of an image or a window
    may differ by 20 of 255.
    """

    size: Size = argument(_resize_size)
    interpolation: str = argument(_BILINEAR, default="bilinear")
    max_size: None = argument(arg.only(None, "crop or pad to one size instead"), default=None)
    antialias: bool = argument(arg.boolean, default=True)

    @property
    def resize(self) -> tuple[Size, Antialias]:
        return self.size, self.antialias

    def sizes(self, sizes: ImageRange) -> ImageRange:
        if isinstance(self.size, tuple):
            return fixed_size(self.size)
        short = self.size
        return ImageRange(
            min_height=max(short, short * sizes.min_height // sizes.max_width),
            max_height=max(short, short * sizes.max_height // sizes.min_width),
            min_width=max(short, short * sizes.min_width // sizes.max_height),
            max_width=max(short, short * sizes.max_width // sizes.min_height),
        )


def fixed_size(size: tuple[int, int]) -> ImageRange:
    """Return the sizes of images that are all (height, width)."""
    height, width = size
    return ImageRange(min_height=height, max_height=height, min_width=width, max_width=width)


def size_text(sizes: ImageRange) -> str:
    """Return words for the sizes of images, for messages."""
    if sizes == ANY_SIZE:
        return "of sizes that aren't known before they are read"
    low, high = (sizes.min_height, sizes.min_width), (sizes.max_height, sizes.max_width)
    return f"of different sizes, from {low[0]} x {low[1]} to {high[0]} x {high[1]}"


class FixedCrop(GeometricOperation, metaclass=ABCMeta):
    """Base class of crops of a fixed size, which crop images or arrays.

    An operation has the arguments `size` and `fields`. Without `padding_px` and `pad_if_needed` a
    window is always inside the image.
    """

    __slots__ = ()

    crops = True
    pad_if_needed: bool = False
    size: int | Sequence[int | None]
    padding: int | Sequence[int] | None = 0
    fields: str | Sequence[str] | None

    @property
    def padding_px(self) -> int:
        """Pixels of padding on each side."""
        return cast("int", self.padding)

    @property
    def lengths(self) -> tuple[int | None, ...]:
        """Lengths of the last axes of arrays, None for a full axis."""
        return cast("tuple[int | None, ...]", self.size)

    @property
    def height_width(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return arg.height_width(f"{type(self).__name__}(size=...)", self.size)

    @abstractmethod
    def corner(self, side: Ints, length: int, place: Floats, /) -> Ints:
        """Return the first index of the part on one axis, int64, (n,). place: draws in [0, 1)."""

    def window(self, height: Ints, width: Ints, uniform: Uniform) -> tuple[Ints, Ints, Ints, Ints]:
        """Return the windows; with padding top and left may be negative."""
        rows, columns = self.height_width
        places = uniform(2) if self.is_random else np.zeros((2, 1))
        top = self.corner(height, rows, places[0])
        left = self.corner(width, columns, places[1])
        return top, left, np.full_like(height, rows), np.full_like(width, columns)

    def sizes(self, sizes: ImageRange) -> ImageRange:
        """Return the size of the window. Raises RecipeError if an image may be smaller."""
        if self.pad_if_needed or self._is_inside(sizes):
            return fixed_size(self.height_width)
        height, width = self.height_width
        raise RecipeError(
            f"{type(self).__name__}: wanted {height} x {width} (height x width) of images "
            f"{size_text(sizes)}. Put a Resize in front of it, crop less, or use "
            "RandomCrop(pad_if_needed=True)."
        )

    def pads(self, sizes: ImageRange) -> bool:
        return bool(self.padding_px) or (self.pad_if_needed and not self._is_inside(sizes))

    def _is_inside(self, sizes: ImageRange) -> bool:
        """Return True if the smallest image, padding included, is as large as a window."""
        (height, width), padding = self.height_width, 2 * self.padding_px
        return height <= sizes.min_height + padding and width <= sizes.min_width + padding

    def selects(self, name: str) -> bool:
        return not self.fields or name in self.fields

    def fits_field(self, name: str, type: FieldType) -> bool:
        return type.can_crop and self.fields in (None, (name,))


@operation
class CenterCrop(FixedCrop):
    """Crop the middle of images or arrays.

    size: an int is a square, a pair is (height, width), in pixels. An image must be at least as
    large (torchvision would pad it with black). Only the middle part of an array is read; size and
    fields for arrays: as in `RandomCrop`.
    """

    size: int | Sequence[int | None] = argument(arg.axis_lengths)
    _: KW_ONLY
    fields: str | Sequence[str] | None = None

    def corner(self, side: Ints, length: int, _place: Floats) -> Ints:
        """Return the first index of torchvision's center_crop, which rounds half to even, as
        Python's round()."""
        return np.rint((side - length) / 2).astype(np.int64)


def _equal_padding(value: Any) -> int:
    sides = arg.as_tuple(value) or (value or 0,)
    (padding,) = {arg.whole(side, 0, arg.MAX_SIZE_PX) for side in sides}
    return padding


_PADDING = arg.expect(
    _equal_padding, "a whole number from 0 on, one number of pixels for all four sides"
)


@operation
class RandomCrop(FixedCrop):
    """Crop a window of a fixed size at a random position, as torchvision does.

    size: an int is a square, a pair is (height, width), in pixels. padding: pixels that are added
    to all four sides of the image first; None: none. pad_if_needed: add the missing pixels to both
    sides of an image that is still smaller than the window, so that it may be anywhere in the
    window; otherwise such images are an error. fill: value of added pixels, 0..255, for all
    channels. padding_mode: only "constant". mask_fill: value of added pixels in the masks of the
    image, such as 255 for pixels that the loss ignores. fields: names of the images to crop, whose
    masks, boxes and keypoints follow; None: all images of the recipe.

    Arrays are cropped before they are read, so that only the chunks of that part are fetched and
    decoded: RandomCrop((64, 128, 128), fields=("x", "y")). size then has the lengths of the last
    axes of a sample, None for a full axis; the axes before them aren't cropped. All fields of one
    operation have the same corner. Without fields=, a recipe without images crops all arrays that
    have enough axes. The operation must come before Maps of these fields.
    """

    size: int | Sequence[int | None] = argument(arg.axis_lengths)
    padding: int | Sequence[int] | None = argument(_PADDING, default=0)
    pad_if_needed: bool = argument(arg.boolean, default=False)
    fill: float = 0.0
    padding_mode: str = argument(arg.one_of("constant"), default="constant")
    _: KW_ONLY
    mask_fill: int = 0
    fields: str | Sequence[str] | None = None

    is_random = True

    def corner(self, side: Ints, length: int, place: Floats) -> Ints:
        padding = np.full_like(side, self.padding_px)
        if self.pad_if_needed:
            padding += np.maximum(length - side - 2 * padding, 0)
        return (place * (side + 2 * padding - length + 1)).astype(np.int64) - padding


_ANTIALIAS = arg.expect_that(
    lambda value: value == "auto" or isinstance(value, bool), 'True, False or "auto"'
)


@operation
class RandomResizedCrop(GeometricOperation):
    """Crop a window of random area and aspect ratio and resize it, as torchvision does.

    size: an int is a square, a pair is (height, width), in pixels. scale: range of the window's
    share of the image. ratio: range of width / height, uniform in its logarithm. interpolation:
    only "bilinear". antialias: filter when shrinking, as in `Resize` (torchvision's default is
    True); "auto" filters only windows that shrink by more than 2, from which on plain bilinear
    sampling skips pixels, and saves a fifth of the CPU time of photographs of ImageNet's size.
    """

    size: Size = argument(arg.height_width)
    scale: tuple[float, float] = argument(arg.positive_range(1.0), default=(0.08, 1.0))
    ratio: tuple[float, float] = argument(arg.positive_range(1e4), default=(3 / 4, 4 / 3))
    interpolation: str = argument(_BILINEAR, default="bilinear")
    antialias: bool | Literal["auto"] = argument(_ANTIALIAS, default="auto")

    is_random = True
    crops = True

    @property
    def height_width(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return cast("tuple[int, int]", self.size)

    @property
    def resize(self) -> tuple[Size, Antialias]:
        return self.size, self.antialias

    def sizes(self, _sizes: ImageRange) -> ImageRange:
        return fixed_size(self.height_width)

    def window(self, height: Ints, width: Ints, uniform: Uniform) -> tuple[Ints, Ints, Ints, Ints]:
        """Return the windows.

        Up to 10 attempts draw an area and a log-uniform ratio. The first window that fits the image
        is placed at random; if none fits, it is the middle of the image with the nearest allowed
        ratio. Attempt k uses draws 2k and 2k + 1, the place draws 20 and 21.
        """
        size, last = np.array((height, width)), 2 * RESIZED_CROP_ATTEMPTS
        draws = uniform.numbered((0, 1, last, last + 1))
        window = self._attempts(size, draws[0], draws[1])
        fits = _fits(window, size)
        if not fits.all():
            failed = np.flatnonzero(~fits)
            others = replace(uniform, base=uniform.base[failed])
            more = others.numbered([*range(2, last, 2), *range(3, last, 2)])
            window[:, failed], fits[failed] = self._first_fit(size[:, failed], more)
        room = size - window
        start = (draws[2:] * (room + 1)).astype(np.int64)
        if not fits.all():
            start = np.where(fits, start, room >> 1)
        return start[0], start[1], window[0], window[1]

    def _attempts(self, size: Ints, area: Floats, ratio: Floats) -> Ints:
        """Return heights and widths of windows that may not fit, from draws in [0, 1)."""
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        share = self.scale[0] + (self.scale[1] - self.scale[0]) * area
        side = np.sqrt(share * (size[0] * size[1]))
        # sqrt(pixels * ratio) and sqrt(pixels / ratio) with one exp: the root of the ratio.
        root = np.exp(low / 2 + (high - low) / 2 * ratio)
        return np.rint([side / root, side * root]).astype(np.int64)

    def _first_fit(self, size: Ints, draws: Floats) -> tuple[Ints, Bools]:
        """Return the height and width of the first fitting window of several attempts, or of the
        middle one, and True if one fitted.

        draws: shape (2 * attempts, n); first those of the areas.
        """
        attempts, (height, width) = len(draws) // 2, size
        windows = self._attempts(size[:, None], draws[:attempts], draws[attempts:])
        fits = _fits(windows, size[:, None])
        chosen = windows[:, fits.argmax(axis=0), np.arange(len(height))]
        # The largest window of the image with an allowed ratio, at least one pixel.
        (least, most), whole = self.ratio, width / height
        tall = np.where(whole < least, np.rint(width / least), height)
        wide = np.where(whole > most, np.rint(height * most), width)
        found = np.logical_or.reduce(fits)
        return np.where(found, chosen, np.clip([tall, wide], 1, size).astype(np.int64)), found


def _fits(window: Ints, size: Ints) -> Bools:
    # One comparison for both bounds: as unsigned, 0 - 1 is larger than any image.
    inside = (window - 1).view(np.uint64) <= (size - 1).view(np.uint64)
    return np.asarray(inside[0] & inside[1])


class FlipOperation(GeometricOperation):
    """Base class of flips with probability p. axis: 0 flips upside down, 1 left to right.

    A flip is done with the windows, or, after an operation that treats the sides differently, in
    its own place, by `draw` and `node` as those of an `ImageOperation`.
    """

    __slots__ = ()

    is_random = True
    commutes_with_flips = True
    axis: ClassVar[Literal[0, 1]]
    p: float

    def draw(self, uniform: Uniform, _shape: ImageShape | None = None) -> dict[str, Bools]:
        """Return the samples to flip."""
        return {"on": np.asarray(uniform(1)[0] < self.p)}

    def node(self, images: Any, _inputs: dict[str, Any], _shape: ImageShape) -> Any:
        """Flip all images."""
        return fn.flip(images, horizontal=self.axis, vertical=1 - self.axis)


@operation
class RandomHorizontalFlip(FlipOperation):
    """Mirror images left to right with probability p, as torchvision does."""

    p: float = 0.5

    axis = 1


@operation
class RandomVerticalFlip(FlipOperation):
    """Flip images upside down with probability p, as torchvision does."""

    p: float = 0.5

    axis = 0
