"""Operations that move pixels: windows, resizes and flips, as frozen values.

Masks, boxes and keypoints follow each of them (`moves`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal, cast

from penstock.augment.checks import (
    MAX_SIZE_PX,
    field_names,
    fill_value,
    flag,
    height_width,
    lengths,
    pixels,
    positive_range,
    probability,
    whole,
)

Size = int | tuple[int, int]


@dataclass(frozen=True, slots=True)
class Resize:
    """Bilinear resize, as torchvision's.

    size: an int is the short side in pixels, the long side being int(size * long / short); a pair
    is the exact (height, width). antialias: filter when shrinking, as Pillow and torchvision do;
    without it shrinking costs less CPU (a fifth of a training sample's) and aliases. With it pixels
    are Pillow's to 0.16 of 255 on average, 1 at most, but for the outermost pixels of an image or a
    window: there the edge is repeated, and up to 10 of 255 were seen.
    """

    size: Size
    antialias: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.size, Sequence):
            object.__setattr__(self, "size", height_width("Resize(size=...)", self.size))
        else:
            object.__setattr__(self, "size", pixels("Resize(size=...)", self.size))
        flag("Resize(antialias=...)", self.antialias)


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
        return cast("tuple[int, int]", self.size)


@dataclass(frozen=True, slots=True)
class RandomCrop:
    """A window of a fixed size at a random place: torchvision's operation.

    size: an int is a square, a pair is (height, width), in pixels. padding: pixels that are put
    around the image on all four sides first. pad_if_needed: where an image is still smaller than
    the window, what it lacks is put on both of its sides, so that it may lie anywhere in the
    window; else such images are an error. fill: what is put there, 0..255, for all channels;
    mask_fill: likewise in the masks of the image, such as 255 for what no loss counts. fields:
    names of the images that it crops, with what is of them; None: all of its recipe.

    Arrays are cropped before they are read, so that of chunked ones only what the part touches is
    fetched and decoded: RandomCrop((64, 128, 128), fields=("x", "y")). size is then the lengths of
    the last axes of a sample, None for all of one; axes in front of them stay whole. All fields of
    one operation have the same corner. Without fields=, a recipe that has no images crops all
    arrays of as many axes. It stands before Maps of these fields.
    """

    size: int | Sequence[int | None]
    _: KW_ONLY
    padding: int = 0
    pad_if_needed: bool = False
    fill: float = 0.0
    mask_fill: int = 0
    fields: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        name = "RandomCrop"
        object.__setattr__(self, "size", lengths(f"{name}(size=...)", self.size))
        whole(f"{name}(padding=...)", self.padding, low=0, high=MAX_SIZE_PX)
        flag(f"{name}(pad_if_needed=...)", self.pad_if_needed)
        object.__setattr__(self, "fill", fill_value(f"{name}(fill=...)", self.fill))
        whole(f"{name}(mask_fill=...)", self.mask_fill, low=-(2**31), high=2**31 - 1)
        object.__setattr__(self, "fields", field_names(f"{name}(fields=...)", self.fields))

    @property
    def lengths(self) -> tuple[int | None, ...]:
        """Lengths of the last axes of arrays, None for all of one."""
        return cast("tuple[int | None, ...]", self.size)

    @property
    def height_width(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return cast("tuple[int, int]", self.size)


@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """A random window of random area and aspect ratio, resized: torchvision's operation.

    size: an int is a square, a pair is (height, width), in pixels. area: range of the window's
    share of the image. ratio: range of width / height, uniform in its logarithm. antialias: filter
    when shrinking, as in `Resize`; "auto" filters the windows that shrink by more than 2, where
    plain bilinear sampling begins to skip pixels, and saves a fifth of the CPU time of photographs
    of ImageNet's size.
    """

    size: Size
    area: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    antialias: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        name = "RandomResizedCrop"
        object.__setattr__(self, "size", height_width(f"{name}(size=...)", self.size))
        object.__setattr__(self, "area", positive_range(f"{name}(area=...)", self.area, most=1.0))
        object.__setattr__(
            self, "ratio", positive_range(f"{name}(ratio=...)", self.ratio, most=1e4)
        )
        if self.antialias != "auto":
            flag(f"{name}(antialias=...)", self.antialias)

    @property
    def height_width(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return cast("tuple[int, int]", self.size)


@dataclass(frozen=True, slots=True)
class RandomHorizontalFlip:
    """Mirrors left and right with probability p."""

    p: float = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", probability("RandomHorizontalFlip(p=...)", self.p))


@dataclass(frozen=True, slots=True)
class RandomVerticalFlip:
    """Turns top and bottom round with probability p: torchvision's operation."""

    p: float = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", probability("RandomVerticalFlip(p=...)", self.p))


Flipping = RandomHorizontalFlip | RandomVerticalFlip
Geometric = Resize | CenterCrop | RandomCrop | RandomResizedCrop | Flipping
