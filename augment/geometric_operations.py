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
from penstock.augment.operation import Antialias, GeometricOperation, Per, Size, operation
from penstock.cache import RecipeError
from penstock.readers import ANY_SIZE, ImageRange

if TYPE_CHECKING:
    from penstock.augment.draw_keys import Uniform
    from penstock.augment.operation import ImageShape
    from penstock.readers import Bools, Floats, Ints
    from penstock.readers.fieldtypes import FieldType

RESIZED_CROP_ATTEMPTS = 10  # torchvision's RandomResizedCrop.get_params


_INTERPOLATION = arg.one_of("bilinear", "bicubic")


def _resize_size(what: str, value: Any) -> Size:
    height, width = arg.height_width(what, value)
    return (height, width) if len(arg.as_tuple(value)) == 2 else height


def _several_sides(value: Any) -> tuple[int, ...]:
    sides = tuple(arg.whole(each, 1, arg.MAX_SIZE_PX) for each in arg.as_tuple(value) or (value,))
    if len(sides) > _MOST_SIZES or len({*sides}) < len(sides):
        raise ValueError(value)
    return sides


_MOST_SIZES = 1024
_SIDES = arg.expect(
    _several_sides,
    f"pixels as a whole number from 1 to {arg.MAX_SIZE_PX}, or different ones, of which one is "
    "drawn",
)
_SIDE = arg.whole_number(1, arg.MAX_SIZE_PX)
_PER: Any = arg.one_of("sample", "batch")


class _SizedOperation(GeometricOperation, metaclass=ABCMeta):
    """Base class of resizes that keep the aspect ratio, to one size or to one drawn from several.

    antialias: filter when shrinking, as in `Resize`.
    """

    __slots__ = ()

    gives_lists = True
    antialias: bool = True
    resizes = True

    @property
    @abstractmethod
    def choices(self) -> int:
        """The number of sizes of which one is drawn."""

    @abstractmethod
    def chosen(self, height: Ints, width: Ints, choice: Ints, /) -> tuple[Ints, Ints]:
        """Return heights and widths after a resize to the size of a number."""

    @property
    def is_random(self) -> bool:  # type: ignore[override]  # by its arguments
        """True if it draws a size."""
        return self.choices > 1

    @property
    def filters(self) -> Antialias:
        return self.antialias

    def choice(self, uniform: Uniform) -> Ints:
        """Return the number of the size of each image, int64, (n,)."""
        if not self.is_random:
            return np.zeros(1, np.int64)
        return np.asarray(uniform(1)[0] * self.choices).astype(np.int64)

    def resized(self, height: Ints, width: Ints, uniform: Uniform) -> tuple[Ints, Ints]:
        rows, columns = self.chosen(height, width, self.choice(uniform))
        return np.maximum(rows, 1), np.maximum(columns, 1)

    def sizes(self, sizes: ImageRange) -> ImageRange:
        # Heights grow with the quotient of height and width, and widths fall.
        height = np.array([sizes.min_height, sizes.max_height], np.int64)
        width = np.array([sizes.max_width, sizes.min_width], np.int64)
        numbers = np.arange(self.choices)
        heights, widths = np.repeat([height, width], self.choices, axis=1)
        rows, columns = self.chosen(heights, widths, np.tile(numbers, 2))
        return ImageRange.of(np.maximum(rows, 1).tolist(), np.maximum(columns, 1).tolist())

    def is_even(self, before: bool, after: ImageRange) -> bool:
        return after.fixed is not None or (before and (self.per == "batch" or not self.is_random))


def _by_sides(height: Ints, short: Ints, long: Ints, width: Ints) -> tuple[Ints, Ints]:
    """Return heights and widths of images from their short and long sides."""
    is_wide = height <= width
    return np.where(is_wide, short, long), np.where(is_wide, long, short)


@operation
class Resize(_SizedOperation):
    """Resize images, as torchvision does.

    size: an int is the short side in pixels, and the long side is int(size * long / short); a pair
    is the exact (height, width). interpolation: "bilinear", or "bicubic", which keeps edges sharper
    and takes more time. max_size: the most pixels of the long side; if it would be longer, it gets
    max_size, and the short side fewer. antialias: filter when shrinking, as Pillow and torchvision
    do; without it shrinking takes less CPU time, and causes aliasing.
    shorter: in place of size, the short side in pixels, or several of which one is drawn, such as
    shorter=(480, 512, 544, ..., 800), max_size=1333. per: "sample" draws for each image, "batch"
    one size for each global batch, the same on all ranks.

    On the CPU pixels differ from torchvision's by at most 1 of 255. DALI's own operators (on a GPU,
    without numba, or before a second resize) repeat the edge: the outermost pixels of an image or a
    window may differ by 20 of 255.
    """

    size: Size | None = argument(arg.optional(_resize_size), default=None)
    interpolation: str = argument(_INTERPOLATION, default="bilinear")
    max_size: int | None = argument(arg.optional(_SIDE), default=None)
    antialias: bool = argument(arg.boolean, default=True)
    _: KW_ONLY
    shorter: int | tuple[int, ...] | None = argument(arg.optional(_SIDES), default=None)
    per: Per = argument(_PER, default="sample")

    def __post_init__(self) -> None:
        _SizedOperation.__post_init__(self)
        if (self.size is None) == (self.shorter is None):
            raise RecipeError(
                f"Resize: got size={self.size} and shorter={self.shorter}, wanted one of them: "
                "Resize((height, width)), Resize(short side), or Resize(shorter=(480, 800))."
            )
        if self.max_size is not None and (
            isinstance(self.size, tuple) or self.max_size < max(self._shorts)
        ):
            raise RecipeError(
                f"Resize: got max_size={self.max_size} for "
                f"{self.size if self.shorter is None else self.shorter}, wanted a short side, and "
                "at least as many pixels for the long side."
            )

    @property
    def gives_lists(self) -> bool:  # type: ignore[override]  # by its arguments
        """False for Resize(256) alone, whose user has more likely forgotten a crop."""
        return self.shorter is not None or self.max_size is not None

    @property
    def _shorts(self) -> tuple[int, ...]:
        given = self.size if self.shorter is None else self.shorter
        return cast("tuple[int, ...]", given if isinstance(given, tuple) else (given,))

    @property
    def _is_exact(self) -> bool:
        return isinstance(self.size, tuple)

    @property
    def choices(self) -> int:
        return 1 if self._is_exact else len(self._shorts)

    @property
    def resize(self) -> tuple[Size, Antialias] | None:
        size = self.size if self.max_size is None else None
        return None if size is None else (size, self.antialias)

    def chosen(self, height: Ints, width: Ints, choice: Ints) -> tuple[Ints, Ints]:
        if self._is_exact:
            rows, columns = self._shorts
            return np.full_like(height, rows), np.full_like(width, columns)
        short, long = np.minimum(height, width), np.maximum(height, width)
        new_short = np.broadcast_to(np.array(self._shorts)[choice], short.shape)
        new_long = new_short * long // short
        if self.max_size is not None:
            capped = np.maximum(self.max_size * new_short // new_long, 1)
            new_short = np.where(new_long > self.max_size, capped, new_short)
            new_long = np.minimum(new_long, self.max_size)
        return _by_sides(height, new_short, new_long, width)


@operation
class LongestSide(_SizedOperation):
    """Resize images so that their long side has `size` pixels; the short side has
    int(size * short / long).

    size: pixels, or several of which one is drawn. antialias: as in `Resize`. per: "sample" draws
    for each image, "batch" one size for each global batch, the same on all ranks. torchvision calls
    it Resize(None, max_size=size).
    """

    size: int | tuple[int, ...] = argument(_SIDES)
    _: KW_ONLY
    antialias: bool = argument(arg.boolean, default=True)
    per: Per = argument(_PER, default="sample")

    @property
    def choices(self) -> int:
        return len(cast("tuple[int, ...]", self.size))

    def chosen(self, height: Ints, width: Ints, choice: Ints) -> tuple[Ints, Ints]:
        short, long = np.minimum(height, width), np.maximum(height, width)
        new_long = np.broadcast_to(np.array(self.size)[choice], long.shape)
        return _by_sides(height, new_long * short // long, new_long, width)


@operation
class ScaleJitter(_SizedOperation):
    """Resize images by a random factor, and keep their aspect ratio, as torchvision does.

    target_size: (height, width) in pixels; an int is a square. scale_range: range of the factor; at
    1 the image is as large as fits into target_size. interpolation, antialias: as in `Resize`. A
    crop such as RandomCrop(target_size, pad_if_needed=True) gives all images one size.
    """

    target_size: int | tuple[int, int] = argument(arg.height_width)
    scale_range: tuple[float, float] = argument(arg.positive_range(100.0), default=(0.1, 2.0))
    interpolation: str = argument(_INTERPOLATION, default="bilinear")
    antialias: bool = argument(arg.boolean, default=True)
    _: KW_ONLY
    per: Per = argument(_PER, default="sample")
    choices = 2  # the ends of the range, for `sizes`

    def resized(self, height: Ints, width: Ints, uniform: Uniform) -> tuple[Ints, Ints]:
        low, high = self.scale_range
        rows, columns = self._scaled(height, width, low + uniform(1)[0] * (high - low))
        return np.maximum(rows, 1), np.maximum(columns, 1)

    def chosen(self, height: Ints, width: Ints, choice: Ints) -> tuple[Ints, Ints]:
        # One pixel more: of two images of one aspect, the product may be rounded differently.
        rows, columns = self._scaled(height, width, np.array(self.scale_range)[choice])
        return rows - 1 + 2 * choice, columns - 1 + 2 * choice

    def _scaled(self, height: Ints, width: Ints, scale: Floats) -> tuple[Ints, Ints]:
        rows, columns = cast("tuple[int, int]", self.target_size)
        factor = np.minimum(rows / height, columns / width) * scale
        return (height * factor).astype(np.int64), (width * factor).astype(np.int64)


def _sizes_px(value: Any) -> tuple[tuple[int, int], ...]:
    several = arg.as_tuple(value)
    is_one = len(several) < 3 and not any(map(arg.as_tuple, several))
    sizes = tuple(arg.sides_px(each) for each in ((value,) if is_one else several))
    if len(sizes) > _MOST_SIZES or len({*sizes}) < len(sizes):
        raise ValueError(value)
    return sizes


_letterbox_sizes = arg.expect(
    _sizes_px,
    "pixels as a whole number, a pair (height, width), or several sizes: more than two whole "
    "numbers, or pairs",
)


@operation
class Letterbox(_SizedOperation):
    """Resize images, with their aspect ratio, to fill `size` as far as it fits; pad both sides.

    size: an int is a square, a pair is (height, width), in pixels; a list, a tuple of more than
    two, or a tuple of pairs has several sizes, of which one is drawn. fill: value of added pixels,
    0..255, for all channels. mask_fill: value of added pixels in the masks of the image. antialias:
    as in `Resize`.
    per: "sample" draws for each image, "batch" one size for each global batch, the same on all
    ranks. Sides are rounded, and the image is in the middle, as in YOLO's loaders.
    """

    size: Any = argument(_letterbox_sizes)
    _: KW_ONLY
    fill: float = 114.0
    mask_fill: int = 0
    antialias: bool = argument(arg.boolean, default=True)
    per: Per = argument(_PER, default="sample")

    def __post_init__(self) -> None:
        _SizedOperation.__post_init__(self)
        height, width = self.size[0]
        if self.per == "batch" and len(self.size) == 1 and height != width:
            raise RecipeError(
                f'Letterbox: got size=({height}, {width}) and per="batch", but a pair of numbers '
                "is one size, (height, width), and nothing is drawn. For two squares pass "
                f"[({height}, {height}), ({width}, {width})]; for one size leave per= out."
            )

    @property
    def parts(self) -> tuple[GeometricOperation, ...]:
        return self, _Frame(self)

    @property
    def choices(self) -> int:
        return len(self.size)

    def canvas(self, uniform: Uniform) -> Ints:
        """Return the heights and widths of the results, int64, (2, n)."""
        return np.array(self.size).T[:, self.choice(uniform)]

    def chosen(self, height: Ints, width: Ints, choice: Ints) -> tuple[Ints, Ints]:
        rows, columns = np.array(self.size).T[:, choice]
        scale = np.minimum(rows / height, columns / width)
        fit = np.rint(height * scale).astype(np.int64), np.rint(width * scale).astype(np.int64)
        return np.minimum(fit[0], rows), np.minimum(fit[1], columns)


class _Frame(GeometricOperation):
    """The second part of a `Letterbox`: a window around the resized image."""

    __slots__ = ("_op", "fill", "mask_fill", "per")

    crops = True

    def __init__(self, op: Letterbox) -> None:
        self._op = op
        self.fill, self.mask_fill, self.per = op.fill, op.mask_fill, op.per

    def __repr__(self) -> str:
        return repr(self._op)

    def sizes(self, _sizes: ImageRange) -> ImageRange:
        return ImageRange.of(*zip(*self._op.size, strict=True))

    def is_even(self, _before: bool, after: ImageRange) -> bool:
        return after.fixed is not None or self.per == "batch"

    def pads(self, _sizes: ImageRange) -> bool:
        return True

    def window(self, height: Ints, width: Ints, uniform: Uniform) -> tuple[Ints, Ints, Ints, Ints]:
        rows, columns = np.broadcast_to(self._op.canvas(uniform), (2, len(height)))
        return -((rows - height) // 2), -((columns - width) // 2), rows, columns


def fixed_size(size: tuple[int, int]) -> ImageRange:
    """Return the sizes of images that are all (height, width)."""
    return ImageRange.of(size[:1], size[1:])


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


_PADDING = arg.expect(_equal_padding, "a whole number from 0 on, the same for all four sides")


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
    share of the image. ratio: range of width / height, uniform in its logarithm. interpolation: as
    in `Resize`. antialias: filter when shrinking, as in `Resize` (torchvision's default is True);
    "auto" filters only windows that shrink by a factor of more than 2, above which plain bilinear
    sampling skips pixels.
    """

    size: Size = argument(arg.height_width)
    scale: tuple[float, float] = argument(arg.positive_range(1.0), default=(0.08, 1.0))
    ratio: tuple[float, float] = argument(arg.positive_range(1e4), default=(3 / 4, 4 / 3))
    interpolation: str = argument(_INTERPOLATION, default="bilinear")
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


def _overlaps(value: Any) -> tuple[float, ...]:
    found = tuple(arg.real(each, 0, 1e3) for each in arg.as_tuple(value))
    if not found:
        raise ValueError(value)
    return found


_OVERLAPS = arg.expect(_overlaps, "least overlaps, numbers from 0 on; 1 or more keeps the image")


@operation
class RandomIoUCrop(GeometricOperation):
    """Crop a window that overlaps a box by at least a drawn amount, as torchvision does.

    It needs the boxes of the image. min_scale, max_scale: range of the shares of height and width.
    min_aspect_ratio, max_aspect_ratio: range of width / height of the window. sampler_options: the
    least intersections over union, of which one is drawn; from 1.0 on the image stays as it is.
    trials: windows that are tried before another least intersection is drawn. Boxes whose middle
    isn't in the window become empty: add SanitizeBoxes. An image without boxes stays as it is.
    """

    min_scale: float = argument(arg.number(0.0, 1.0), default=0.3)
    max_scale: float = argument(arg.number(0.0, 1.0), default=1.0)
    min_aspect_ratio: float = argument(arg.number(0.0, 1e4), default=0.5)
    max_aspect_ratio: float = argument(arg.number(0.0, 1e4), default=2.0)
    sampler_options: Sequence[float] | None = argument(arg.optional(_OVERLAPS), default=None)
    trials: int = argument(arg.whole_number(1, 1000), default=40)

    is_random = True
    crops = True
    gives_lists = True
    needs_boxes = True

    def __post_init__(self) -> None:
        GeometricOperation.__post_init__(self)
        scales = self.min_scale, self.max_scale
        ratios = self.min_aspect_ratio, self.max_aspect_ratio
        if scales[0] > scales[1] or ratios[0] > ratios[1]:
            raise RecipeError(
                f"RandomIoUCrop: got scales {scales} and aspect ratios {ratios}, wanted the "
                "smaller number first."
            )

    def sizes(self, sizes: ImageRange) -> ImageRange:
        low = max(1, int(sizes.min_height * self.min_scale))
        left = max(1, int(sizes.min_width * self.min_scale))
        return replace(sizes, min_height=low, min_width=left)

    def window(self, height: Ints, width: Ints, uniform: Uniform) -> tuple[Ints, Ints, Ints, Ints]:
        """Return the full images: those without boxes."""
        return GeometricOperation.window(self, height, width, uniform)

    def boxed_window(
        self, height: Ints, width: Ints, uniform: Uniform, boxes: Floats, owner: Ints
    ) -> tuple[Ints, Ints, Ints, Ints]:
        """Return the windows of images with boxes, x1, y1, x2, y2, (k, 4). owner: the image of
        each."""
        windows = np.array(self.window(height, width, uniform))
        for row in np.unique(owner).tolist():
            own = replace(uniform, base=uniform.base[row : row + 1])
            found = self._window_of(int(height[row]), int(width[row]), own, boxes[owner == row])
            if found is not None:
                windows[:, row] = found
        top, left, rows, columns = windows
        return top, left, rows, columns

    def _window_of(self, height: int, width: int, uniform: Uniform, boxes: Floats) -> Ints | None:
        """Return the window of one image, top, left, height, width; None for the full image."""
        options = self.sampler_options or _IOU_OPTIONS
        count = 1 + 4 * self.trials
        for attempt in range(_IOU_ATTEMPTS):
            draws = uniform.numbered(range(attempt * count, (attempt + 1) * count))[:, 0]
            least = options[int(draws[0] * len(options))]
            if least >= 1:
                return None
            draws = draws[1:].reshape(self.trials, 4)
            tried, fits = self._tried(height, width, draws, boxes, least)
            if fits.any():
                return np.asarray(tried[fits.argmax()])
        return None  # practically never, unless no window is allowed

    def _tried(
        self, height: int, width: int, draws: Floats, boxes: Floats, least: float
    ) -> tuple[Ints, Bools]:
        """Return windows, (trials, 4), and which of them are allowed."""
        shares = self.min_scale + (self.max_scale - self.min_scale) * draws[:, :2]
        columns, rows = (shares * (width, height)).astype(np.int64).T
        left, top = (draws[:, 2:] * np.array([width - columns, height - rows]).T).astype(np.int64).T
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = columns / rows
        fits = (rows > 0) & (columns > 0)
        fits &= (self.min_aspect_ratio <= ratio) & (ratio <= self.max_aspect_ratio)
        start = np.stack([left, top], axis=1)[:, None]
        end = start + np.stack([columns, rows], axis=1)[:, None]
        middle = (boxes[:, :2] + boxes[:, 2:]) / 2
        inside = ((start < middle) & (middle < end)).all(axis=2)
        shared = np.minimum(boxes[:, 2:], end) - np.maximum(boxes[:, :2], start)
        shared = shared.clip(0).prod(axis=2)
        union = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1) + (rows * columns)[:, None] - shared
        overlap = np.where(inside, shared / np.maximum(union, 1e-9), -1.0)
        fits &= inside.any(axis=1) & (overlap.max(axis=1) >= least)
        return np.stack([top, left, rows, columns], axis=1), fits


_IOU_OPTIONS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
_IOU_ATTEMPTS = 100


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
