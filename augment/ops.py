"""Operations as frozen values: what a recipe says, in pure data.

An operation knows nothing of DALI, of torch or of a dataset. It checks itself at birth; whether
several fit one another and their data is `recipe.check_recipe`'s question. Names and meanings are
torchvision's, so that published recipes carry over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal, cast, get_args

from cache.errors import RecipeError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Mean of ImageNet's training images, R, G, B, in units of 0..1."""

IMAGENET_STD = (0.229, 0.224, 0.225)
"""Standard deviation of ImageNet's training images, R, G, B, in units of 0..1."""

Color = Literal["rgb", "gray"]
DType = Literal["float32", "float16", "uint8"]
Size = int | tuple[int, int]

# libjpeg's own limit; a larger output is a slip of the keyboard, not a training image.
MAX_SIZE_PX = 65_535


@dataclass(frozen=True, slots=True)
class Decode:
    """Encoded bytes to pixels, turned upright by EXIF, alpha dropped, 16 bit scaled to 8.

    color: "rgb" (3 channels) or "gray" (1 channel, luma).
    """

    color: Color = "rgb"

    def __post_init__(self) -> None:
        _one_of("Decode(color=...)", self.color, get_args(Color))

    @property
    def channels(self) -> int:
        """3 or 1."""
        return 3 if self.color == "rgb" else 1


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
            object.__setattr__(self, "size", _height_width("Resize(size=...)", self.size))
        else:
            object.__setattr__(self, "size", _pixels("Resize(size=...)", self.size))
        _flag("Resize(antialias=...)", self.antialias)


@dataclass(frozen=True, slots=True)
class CenterCrop:
    """The middle window. size: an int is a square, a pair is (height, width), in pixels.

    An image must be at least as large (torchvision would pad it with black).
    """

    size: Size

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", _height_width("CenterCrop(size=...)", self.size))

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
        object.__setattr__(self, "size", _height_width(f"{name}(size=...)", self.size))
        object.__setattr__(self, "area", _range(f"{name}(area=...)", self.area, most=1.0))
        object.__setattr__(self, "ratio", _range(f"{name}(ratio=...)", self.ratio, most=1e4))
        if self.antialias != "auto":
            _flag(f"{name}(antialias=...)", self.antialias)

    @property
    def height_width(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return cast("tuple[int, int]", self.size)


@dataclass(frozen=True, slots=True)
class RandomHorizontalFlip:
    """Mirrors left and right with probability p."""

    p: float = 0.5

    def __post_init__(self) -> None:
        if not _is_number(self.p) or not 0 <= self.p <= 1:
            raise RecipeError(
                f"RandomHorizontalFlip(p=...): got {self.p!r}, wanted a probability from 0 to 1."
            )


@dataclass(frozen=True, slots=True)
class Normalize:
    """(x / 255 - mean) / std per channel, to float32: torchvision's Normalize after its ToTensor.

    mean, std: one number per channel, in units of 0..1. Without arguments: ImageNet's.
    """

    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    def __post_init__(self) -> None:
        mean = _numbers("Normalize(mean=...)", self.mean)
        std = _numbers("Normalize(std=...)", self.std)
        if len(mean) != len(std):
            raise RecipeError(
                f"Normalize: got {len(mean)} means and {len(std)} standard deviations, wanted as "
                "many of one as of the other, one per channel."
            )
        if min(std) <= 0:
            raise RecipeError(f"Normalize(std=...): got {std}, wanted numbers above 0.")
        if max(map(abs, (*mean, *std))) > 16:
            raise RecipeError(
                f"Normalize: got mean {mean} and std {std}, which look like units of 0..255; "
                "wanted units of 0..1. Divide them by 255."
            )
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "std", std)


@dataclass(frozen=True, slots=True)
class Cast:
    """The dtype of the batch. It changes the type, never the scale: pixels stay 0..255."""

    dtype: DType

    def __post_init__(self) -> None:
        _one_of("Cast(dtype=...)", self.dtype, get_args(DType))


Operation = (
    Decode | Resize | CenterCrop | RandomResizedCrop | RandomHorizontalFlip | Normalize | Cast
)
Recipe = Sequence[Operation]


def imagenet_train(size: Size = 224) -> tuple[Operation, ...]:
    """The usual training recipe: decode, random window to `size`, flip, normalise. float32, CHW."""
    return (Decode(), RandomResizedCrop(size), RandomHorizontalFlip(), Normalize())


def imagenet_eval(size: Size = 224, resize: Size = 256) -> tuple[Operation, ...]:
    """The usual evaluation recipe: decode, short side to `resize`, middle `size`, normalise."""
    return (Decode(), Resize(resize), CenterCrop(size), Normalize())


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _one_of(what: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        names = ", ".join(f'"{name}"' for name in allowed)
        raise RecipeError(f"{what}: got {value!r}, wanted one of {names}.")


def _flag(what: str, value: object) -> None:
    if not isinstance(value, bool):
        raise RecipeError(f"{what}: got {value!r}, wanted True or False.")


def _pixels(what: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_SIZE_PX:
        return value
    raise RecipeError(
        f"{what}: got {value!r}, wanted pixels as a whole number from 1 to {MAX_SIZE_PX}, or a "
        "pair of them: (height, width)."
    )


def _height_width(what: str, value: object) -> tuple[int, int]:
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
        return _pixels(what, value[0]), _pixels(what, value[1])
    side = _pixels(what, value)
    return side, side


def _range(what: str, value: object, *, most: float) -> tuple[float, float]:
    pair = _numbers(what, value)
    if len(pair) == 2 and 0 < pair[0] <= pair[1] <= most:
        return pair[0], pair[1]
    raise RecipeError(f"{what}: got {value!r}, wanted a pair 0 < low <= high <= {most:g}.")


def _numbers(what: str, value: object) -> tuple[float, ...]:
    if isinstance(value, Iterable):
        numbers = tuple(value)
        if numbers and all(_is_number(number) for number in numbers):
            return tuple(float(number) for number in numbers)
    elif _is_number(value):
        return (float(cast("float", value)),)
    raise RecipeError(f"{what}: got {value!r}, wanted a number per channel.")
