"""Operations that move pixels: windows, resizes and flips, as frozen values.

Masks, boxes and keypoints follow each of them (`moves`).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Literal, cast

from penstock.augment.checks import (
    MAX_SIZE_PX,
    as_tuple,
    field_names,
    fill_value,
    flag,
    height_width,
    integer,
    interpolation_name,
    lengths,
    one_of,
    pixels,
    positive_range,
    probability,
    unsupported,
    whole,
)
from penstock.cache.errors import RecipeError, explain_arguments

if TYPE_CHECKING:
    from collections.abc import Sequence

Size = int | tuple[int, int]


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class Resize:
    """Bilinear resize, as torchvision's.

    size: an int is the short side in pixels, the long side being int(size * long / short); a pair
    is the exact (height, width). interpolation: "bilinear" is the only one. max_size: None is the
    only value, as a batch has one size. antialias: filter when shrinking, as Pillow and
    torchvision do; without it shrinking costs less CPU (a fifth of a training sample's) and
    aliases. On the CPU pixels are torchvision's to 1 of 255. DALI's own operators (on a GPU, or
    without numba, or where images leave in sizes of their own) repeat the edge: the outermost
    pixels of an image or a window may differ by 20 of 255.
    """

    size: Size
    interpolation: str = "bilinear"
    max_size: None = None
    antialias: bool = True

    def __post_init__(self) -> None:
        what = "Resize(interpolation=...)"
        name = interpolation_name(what, self.interpolation, ("bilinear",))
        object.__setattr__(self, "interpolation", name)
        unsupported("Resize(max_size=...)", self.max_size, None, "crop or pad to one size instead")
        sides = as_tuple(self.size)
        check = height_width if len(sides) == 2 else pixels
        size = check("Resize(size=...)", sides[0] if len(sides) == 1 else self.size)
        object.__setattr__(self, "size", size)
        flag("Resize(antialias=...)", self.antialias)


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class CenterCrop:
    """The middle window. size: an int is a square, a pair is (height, width), in pixels.

    An image must be at least as large (torchvision would pad it with black). Of arrays it takes the
    middle part, and no more is read of them: size, fields: as in `RandomCrop`.
    """

    size: int | Sequence[int | None]
    _: KW_ONLY
    fields: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", lengths("CenterCrop(size=...)", self.size))
        object.__setattr__(self, "fields", field_names("CenterCrop(fields=...)", self.fields))

    @property
    def lengths(self) -> tuple[int | None, ...]:
        """Lengths of the last axes of arrays, None for all of one."""
        return cast("tuple[int | None, ...]", self.size)

    @property
    def height_width(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return _height_width("CenterCrop", self.lengths)


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class RandomCrop:
    """A window of a fixed size at a random place: torchvision's operation.

    size: an int is a square, a pair is (height, width), in pixels. padding: pixels that are put
    around the image on all four sides first; None: none. pad_if_needed: where an image is still
    smaller than the window, what it lacks is put on both of its sides, so that it may lie anywhere
    in the window; else such images are an error. fill: what is put there, 0..255, for all channels.
    padding_mode: "constant" is the only one. mask_fill: likewise in the masks of the image, such
    as 255 for what no loss counts. fields:
    names of the images that it crops, with what is of them; None: all of its recipe.

    Arrays are cropped before they are read, so that of chunked ones only what the part touches is
    fetched and decoded: RandomCrop((64, 128, 128), fields=("x", "y")). size is then the lengths of
    the last axes of a sample, None for all of one; axes in front of them stay whole. All fields of
    one operation have the same corner. Without fields=, a recipe that has no images crops all
    arrays of as many axes. It stands before Maps of these fields.
    """

    size: int | Sequence[int | None]
    padding: int | Sequence[int] | None = 0
    pad_if_needed: bool = False
    fill: float = 0.0
    padding_mode: str = "constant"
    _: KW_ONLY
    mask_fill: int = 0
    fields: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        name = "RandomCrop"
        object.__setattr__(self, "size", lengths(f"{name}(size=...)", self.size))
        object.__setattr__(self, "padding", _padding(f"{name}(padding=...)", self.padding))
        one_of(f"{name}(padding_mode=...)", self.padding_mode, ("constant",))
        flag(f"{name}(pad_if_needed=...)", self.pad_if_needed)
        object.__setattr__(self, "fill", fill_value(f"{name}(fill=...)", self.fill))
        what = f"{name}(mask_fill=...)"
        mask_fill = whole(what, self.mask_fill, low=-(2**31), high=2**31 - 1)
        object.__setattr__(self, "mask_fill", mask_fill)
        object.__setattr__(self, "fields", field_names(f"{name}(fields=...)", self.fields))

    @property
    def padding_px(self) -> int:
        """Pixels of padding on each side."""
        return cast("int", self.padding)

    @property
    def lengths(self) -> tuple[int | None, ...]:
        """Lengths of the last axes of arrays, None for all of one."""
        return cast("tuple[int | None, ...]", self.size)

    @property
    def height_width(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return _height_width("RandomCrop", self.lengths)


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """A random window of random area and aspect ratio, resized: torchvision's operation.

    size: an int is a square, a pair is (height, width), in pixels. scale: range of the window's
    share of the image. ratio: range of width / height, uniform in its logarithm. interpolation:
    "bilinear" is the only one. antialias: filter when shrinking, as in `Resize` (torchvision's
    default is True); "auto" filters the windows that shrink by more than 2, where
    plain bilinear sampling begins to skip pixels, and saves a fifth of the CPU time of photographs
    of ImageNet's size.
    """

    size: Size
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: str = "bilinear"
    antialias: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        name = "RandomResizedCrop"
        object.__setattr__(self, "size", height_width(f"{name}(size=...)", self.size))
        scale = positive_range(f"{name}(scale=...)", self.scale, most=1.0)
        object.__setattr__(self, "scale", scale)
        object.__setattr__(
            self, "ratio", positive_range(f"{name}(ratio=...)", self.ratio, most=1e4)
        )
        what = f"{name}(interpolation=...)"
        kind = interpolation_name(what, self.interpolation, ("bilinear",))
        object.__setattr__(self, "interpolation", kind)
        if self.antialias != "auto":
            flag(f"{name}(antialias=...)", self.antialias)

    @property
    def height_width(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return cast("tuple[int, int]", self.size)


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class RandomHorizontalFlip:
    """Mirrors left and right with probability p."""

    p: float = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", probability("RandomHorizontalFlip(p=...)", self.p))


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class RandomVerticalFlip:
    """Turns top and bottom round with probability p: torchvision's operation."""

    p: float = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", probability("RandomVerticalFlip(p=...)", self.p))


Flipping = RandomHorizontalFlip | RandomVerticalFlip
Geometric = Resize | CenterCrop | RandomCrop | RandomResizedCrop | Flipping


def _padding(what: str, value: object) -> int:
    """Return the pixels of padding on each side; torchvision's lists are equal on all of them."""
    sides = (0,) if value is None else as_tuple(value) or (value,)
    if len({integer(side) for side in sides}) == 1:
        return whole(what, sides[0], low=0, high=MAX_SIZE_PX)
    raise RecipeError(f"{what}: got {value!r}, wanted one number of pixels for all four sides.")


def _height_width(name: str, size: tuple[int | None, ...]) -> tuple[int, int]:
    """Return height and width in pixels of a crop of images; one length stands for both."""
    return height_width(f"{name}(size=...)", size)
