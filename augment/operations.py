"""Define the operations on images as frozen values, and a few usual recipes.

An operation doesn't depend on DALI, torch or a dataset. It checks its own arguments when it is
created; `recipe.check_recipe` checks if several fit one another and their data. Names and meanings
are torchvision's, so that published recipes can be used.

Geometric operations (windows, resizes, flips) move pixels, and masks, boxes and keypoints follow
them (`image_followers`). Pixel operations change values and come after all geometric ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, cast, get_args

from penstock.augment.argument_checks import (
    MAX_SIZE_PX,
    as_tuple,
    axis_lengths,
    boolean,
    check_argument,
    enum_name,
    field_names,
    fill_value,
    height_width,
    integer,
    numbers,
    one_of,
    pixels,
    positive_range,
    probability,
    range_around,
    single_value,
    whole_number,
)
from penstock.augment.field_operations import Map, Pad, SanitizeBoxes, Unpack
from penstock.cache import RecipeError, explain_arguments

Size = int | tuple[int, int]


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class Resize:
    """Resize images bilinearly, as torchvision does.

    size: an int is the short side in pixels, and the long side is int(size * long / short); a pair
    is the exact (height, width). interpolation: only "bilinear". max_size: only None, as a batch
    has one size. antialias: filter when shrinking, as Pillow and torchvision do; without it
    shrinking saves a fifth of a training sample's CPU time, and causes aliasing. On the CPU pixels
    differ from torchvision's by at most 1 of 255. DALI's own operators (on a GPU, without numba, or
    if images keep different sizes) repeat the edge: the outermost pixels of an image or a window
    may differ by 20 of 255.
    """

    size: Size
    interpolation: str = "bilinear"
    max_size: None = None
    antialias: bool = True

    def __post_init__(self) -> None:
        check_argument(self, "interpolation", enum_name, allowed=("bilinear",))
        remedy = "crop or pad to one size instead"
        check_argument(self, "max_size", single_value, only=None, remedy=remedy)
        check_argument(self, "size", _resize_size)
        check_argument(self, "antialias", boolean)


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class CenterCrop:
    """Crop the middle of images or arrays.

    size: an int is a square, a pair is (height, width), in pixels. An image must be at least as
    large (torchvision would pad it with black). Only the middle part of an array is read; size and
    fields for arrays: as in `RandomCrop`.
    """

    size: int | Sequence[int | None]
    _: KW_ONLY
    fields: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_argument(self, "size", axis_lengths)
        check_argument(self, "fields", field_names)

    @property
    def lengths(self) -> tuple[int | None, ...]:
        """Lengths of the last axes of arrays, None for a full axis."""
        return cast("tuple[int | None, ...]", self.size)

    @property
    def height_width(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return height_width("CenterCrop(size=...)", self.size)


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class RandomCrop:
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

    size: int | Sequence[int | None]
    padding: int | Sequence[int] | None = 0
    pad_if_needed: bool = False
    fill: float = 0.0
    padding_mode: str = "constant"
    _: KW_ONLY
    mask_fill: int = 0
    fields: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_argument(self, "size", axis_lengths)
        check_argument(self, "padding", _padding)
        check_argument(self, "padding_mode", one_of, allowed=("constant",))
        check_argument(self, "pad_if_needed", boolean)
        check_argument(self, "fill", fill_value)
        check_argument(self, "mask_fill", whole_number, low=-(2**31), high=2**31 - 1)
        check_argument(self, "fields", field_names)

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
        return height_width("RandomCrop(size=...)", self.size)


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """Crop a window of random area and aspect ratio and resize it, as torchvision does.

    size: an int is a square, a pair is (height, width), in pixels. scale: range of the window's
    share of the image. ratio: range of width / height, uniform in its logarithm. interpolation:
    only "bilinear". antialias: filter when shrinking, as in `Resize` (torchvision's default is
    True); "auto" filters only windows that shrink by more than 2, from which on plain bilinear
    sampling skips pixels, and saves a fifth of the CPU time of photographs of ImageNet's size.
    """

    size: Size
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: str = "bilinear"
    antialias: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        check_argument(self, "size", height_width)
        check_argument(self, "scale", positive_range, most=1.0)
        check_argument(self, "ratio", positive_range, most=1e4)
        check_argument(self, "interpolation", enum_name, allowed=("bilinear",))
        if self.antialias != "auto":
            check_argument(self, "antialias", boolean)

    @property
    def height_width(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return cast("tuple[int, int]", self.size)


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class RandomHorizontalFlip:
    """Mirror images left to right with probability p, as torchvision does."""

    p: float = 0.5

    def __post_init__(self) -> None:
        check_argument(self, "p", probability)


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class RandomVerticalFlip:
    """Flip images upside down with probability p, as torchvision does."""

    p: float = 0.5

    def __post_init__(self) -> None:
        check_argument(self, "p", probability)


FlipOperation = RandomHorizontalFlip | RandomVerticalFlip
GeometricOperation = Resize | CenterCrop | RandomCrop | RandomResizedCrop | FlipOperation


def _resize_size(what: str, value: object) -> Size:
    sides = as_tuple(value)
    if len(sides) == 2:
        return height_width(what, value)
    return pixels(what, sides[0] if len(sides) == 1 else value)


def _padding(what: str, value: object) -> int:
    """Return the pixels of padding on each side; a list must have equal numbers."""
    sides = (0,) if value is None else as_tuple(value) or (value,)
    if len({integer(side) for side in sides}) == 1:
        return whole_number(what, sides[0], low=0, high=MAX_SIZE_PX)
    raise RecipeError(f"{what}: got {value!r}, wanted one number of pixels for all four sides.")


def _blur_kernel(what: str, value: object) -> tuple[int, int]:
    kernel = height_width(what, value)
    if not all(side % 2 for side in kernel):
        raise RecipeError(
            f"{what}: got {value!r}, wanted odd numbers of pixels, so that the kernel has a middle."
        )
    return kernel


def _blur_sigma(what: str, value: object) -> tuple[float, float]:
    sigma = numbers(what, value)
    return positive_range(what, sigma * 2 if len(sigma) == 1 else sigma, most=1e4)


IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Mean of ImageNet's training images, R, G, B, in units of 0..1."""

IMAGENET_STD = (0.229, 0.224, 0.225)
"""Standard deviation of ImageNet's training images, R, G, B, in units of 0..1."""

Color = Literal["rgb", "gray"]
WindowMode = Literal["auto", "decoder", "slice"]
DType = Literal["float32", "float16", "uint8"]
LearntPolicy = Literal["imagenet", "cifar10", "svhn"]

# Limit of a jitter's brightness, contrast and saturation, which are computed in 16 bits.
MAX_FACTOR = 100.0
MAX_DRAWS = 1024
MAX_CLASSES = 2**24


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class Decode:
    """Decode encoded images: upright by EXIF, without alpha, 16 bits scaled to 8.

    color: "rgb" (3 channels) or "gray" (1 channel, luma). The other arguments change pixels on a
    GPU by rounding at most. windows: "decoder" decodes only the window of a crop; "slice" decodes
    the full image and crops it, which is slower, for GPUs on which the first doesn't work; "auto"
    tries it in a process of its own, once for each GPU. hw_decoder_load: share of a batch for the
    GPU's JPEG unit; None: DALI's default. preallocate: (height, width) of the largest image, for
    which the GPU's decoder allocates memory in advance; None: it grows with the images. The best
    values haven't been measured.
    """

    color: Color = "rgb"
    _: KW_ONLY
    windows: WindowMode = "auto"
    hw_decoder_load: float | None = None
    preallocate: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        check_argument(self, "color", one_of, allowed=get_args(Color))
        check_argument(self, "windows", one_of, allowed=get_args(WindowMode))
        if self.hw_decoder_load is not None:
            check_argument(self, "hw_decoder_load", probability)
        if self.preallocate is not None:
            check_argument(self, "preallocate", height_width)

    @property
    def channels(self) -> int:
        """The number of channels of an image: 3 or 1."""
        return 3 if self.color == "rgb" else 1


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class ColorJitter:
    """Change brightness, contrast, saturation and hue randomly, by torchvision's formulas.

    brightness, contrast, saturation: a number x draws a factor from max(0, 1 - x) to 1 + x, a pair
    draws from low to high; 1 changes nothing. hue: a number x, at most 0.5, draws a shift from -x
    to x of the circle of hues, a pair from low to high; 0 and None change nothing. They are applied
    in this order; torchvision shuffles it for each image. Grey recipes support only brightness and
    contrast.
    """

    brightness: float | tuple[float, float] | None = None
    contrast: float | tuple[float, float] | None = None
    saturation: float | tuple[float, float] | None = None
    hue: float | tuple[float, float] | None = None

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            check_argument(self, name, range_around, around=1.0, low=0.0, high=MAX_FACTOR)
        check_argument(self, "hue", range_around, around=0.0, low=-0.5, high=0.5)


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class RandomGrayscale:
    """Turn images grey with probability p; they keep their 3 channels."""

    p: float = 0.1

    def __post_init__(self) -> None:
        check_argument(self, "p", probability)


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class GaussianBlur:
    """Blur images with probability p, by a Gaussian of random width, as torchvision does.

    kernel_size: odd, in pixels; an int is a square, a pair is (horizontal, vertical), as in
    torchvision. sigma: standard deviation in pixels, one number or the range of a uniform draw.
    p: 1.0 by default, as torchvision always blurs.
    """

    kernel_size: int | tuple[int, int]
    sigma: float | tuple[float, float] = (0.1, 2.0)
    p: float = 1.0

    def __post_init__(self) -> None:
        check_argument(self, "kernel_size", _blur_kernel)
        check_argument(self, "sigma", _blur_sigma)
        check_argument(self, "p", probability)


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class RandomRotation:
    """Rotate images about their middle, in their size, as torchvision does.

    degrees: a number x draws an angle from -x to x, a pair from low to high; counter-clockwise.
    interpolation: "nearest" or "bilinear". expand, center: only False and None. fill: value of
    pixels outside the rotated image, 0..255, for all channels.
    """

    degrees: float | tuple[float, float]
    interpolation: str = "nearest"
    expand: bool = False
    center: None = None
    fill: float | None = 0.0

    def __post_init__(self) -> None:
        check_argument(self, "expand", single_value, only=False, remedy="a batch has one size")
        remedy = "images turn about their middle"
        check_argument(self, "center", single_value, only=None, remedy=remedy)
        check_argument(self, "degrees", range_around, around=0.0, low=-36_000.0, high=36_000.0)
        check_argument(self, "fill", fill_value)
        check_argument(self, "interpolation", enum_name, allowed=("nearest", "bilinear"))


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class RandAugment:
    """Apply `num_ops` random operations of the same magnitude (Cubuk et al. 2019), from
    torchvision's table.

    magnitude: from 0 to num_magnitude_bins - 1. interpolation: only "nearest". fill: as in
    `RandomRotation`.
    """

    num_ops: int = 2
    magnitude: int = 9
    num_magnitude_bins: int = 31
    interpolation: str = "nearest"
    fill: float | None = None

    def __post_init__(self) -> None:
        check_argument(self, "num_ops", whole_number, low=1, high=16)
        check_argument(self, "num_magnitude_bins", whole_number, low=2, high=1000)
        check_argument(self, "magnitude", whole_number, low=0, high=self.num_magnitude_bins - 1)
        _check_policy_warp(self)


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class TrivialAugmentWide:
    """Apply one random operation of a random magnitude (Müller and Hutter 2021), from torchvision's
    table.

    interpolation, fill: as in `RandAugment`.
    """

    num_magnitude_bins: int = 31
    interpolation: str = "nearest"
    fill: float | None = None

    def __post_init__(self) -> None:
        check_argument(self, "num_magnitude_bins", whole_number, low=2, high=1000)
        _check_policy_warp(self)


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class AutoAugment:
    """Apply a random pair of operations of a learnt policy (Cubuk et al. 2018), from torchvision's
    tables.

    policy: the dataset on which it was learnt. interpolation, fill: as in `RandAugment`.
    """

    policy: LearntPolicy = "imagenet"
    interpolation: str = "nearest"
    fill: float | None = None

    def __post_init__(self) -> None:
        check_argument(self, "policy", enum_name, allowed=get_args(LearntPolicy))
        _check_policy_warp(self)


def _check_policy_warp(op: RandAugment | TrivialAugmentWide | AutoAugment) -> None:
    check_argument(op, "interpolation", enum_name, allowed=("nearest",))
    check_argument(op, "fill", fill_value)


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class Apply:
    """Apply a DALI function of yours, so that all of DALI's operators can be used.

    fn: called a few times when a graph is built, as fn(images, draws) with DALI nodes: the images,
    uint8, (height, width, channels), layout "HWC"; and for each sample `draws` numbers, float32, in
    [0, 1), which depend only on (seed, epoch, sample id). It returns images of the same shape and
    layout; any type but uint8 is rounded and clipped to 0..255. It may be a lambda and is never
    pickled. draws: how many numbers a sample gets. Random operators of DALI don't repeat their
    numbers after a restart, so use `draws` instead. moves: True if fn may move pixels, which masks,
    boxes and keypoints can't follow; False: it leaves them in place.
    """

    fn: Callable[[Any, Any], Any]
    draws: int = 1
    _: KW_ONLY
    moves: bool = True

    def __post_init__(self) -> None:
        check_argument(self, "moves", boolean)
        if not callable(self.fn):
            raise RecipeError(
                f"Apply(fn=...): got {self.fn!r}, wanted a function of DALI nodes (images, draws)."
            )
        check_argument(self, "draws", whole_number, low=1, high=MAX_DRAWS)


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class Normalize:
    """Convert pixels to float32 (x / 255 - mean) / std by channel, as torchvision's ToTensor and
    Normalize do.

    mean, std: one number per channel, in units of 0..1; ImageNet's by default. inplace: has no
    effect; it exists for recipes that pass it to torchvision's.
    """

    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    inplace: bool = False

    def __post_init__(self) -> None:
        check_argument(self, "mean", numbers)
        check_argument(self, "std", numbers)
        mean, std = self.mean, self.std
        if len(mean) != len(std):
            raise RecipeError(
                f"Normalize: got {len(mean)} means and {len(std)} standard deviations, wanted "
                "the same number of both, one per channel."
            )
        if min(std) <= 0:
            raise RecipeError(f"Normalize(std=...): got {std}, wanted numbers above 0.")
        if max(map(abs, (*mean, *std))) > 16:
            raise RecipeError(
                f"Normalize: got mean {mean} and std {std}, which look like units of 0..255; "
                "wanted units of 0..1. Divide them by 255."
            )
        check_argument(self, "inplace", boolean)


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class RandomErasing:
    """Fill a random window with `value`, with probability p, as torchvision does.

    It comes after Normalize, if the recipe has one. scale: range of the window's share of the
    image. ratio: range of height / width, uniform in its logarithm. value: one number, or one per
    channel, in the units of the batch; torchvision's "random" isn't supported. inplace: as in
    `Normalize`.
    """

    p: float = 0.5
    scale: tuple[float, float] = (0.02, 0.33)
    ratio: tuple[float, float] = (0.3, 3.3)
    value: float | tuple[float, ...] = 0.0
    inplace: bool = False

    def __post_init__(self) -> None:
        check_argument(self, "inplace", boolean)
        check_argument(self, "p", probability)
        check_argument(self, "scale", positive_range, most=1)
        check_argument(self, "ratio", positive_range, most=1e4)
        if isinstance(self.value, str):
            raise RecipeError(
                f"RandomErasing(value=...): got {self.value!r}, wanted a number, or one per "
                "channel: noise that DALI draws itself would not repeat after a restart."
            )
        check_argument(self, "value", numbers)


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class Cast:
    """Convert the batch to a dtype. It changes the type, never the scale: pixels stay 0..255."""

    dtype: DType

    def __post_init__(self) -> None:
        check_argument(self, "dtype", one_of, allowed=get_args(DType))


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class MixUp:
    """Blend each image and label with a partner's (Zhang et al. 2017). It comes last in a recipe.

    alpha: parameter of the distribution of the shares, Beta(alpha, alpha). num_classes: number of
    classes, for labels that are class numbers; None: the dataset's number.
    """

    alpha: float = 1.0
    num_classes: int | None = None

    def __post_init__(self) -> None:
        _check_mixing(self)


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class CutMix:
    """Replace a window of each image by its partner's, and blend labels by area (Yun et al. 2019).

    It comes last in a recipe. alpha, num_classes: as in `MixUp`.
    """

    alpha: float = 1.0
    num_classes: int | None = None

    def __post_init__(self) -> None:
        _check_mixing(self)


def _check_mixing(op: MixUp | CutMix) -> None:
    check_argument(op, "alpha", lambda what, x: positive_range(what, (x, x), most=1e4)[0])
    if op.num_classes is not None:
        check_argument(op, "num_classes", whole_number, low=1, high=MAX_CLASSES)


# To add an operation that changes pixels: add its class here, to `PixelOperation` and to
# `__init__.pyi`; its draws to `draws.DRAW_RULES`; its DALI nodes to
# `graph_definition.OPERATION_NODES`; and to `recipe` if it commutes with flips or needs colours.
# tests/augment/test_tables.py checks that each has all of these. For windows and resizes see
# `draws`.
PixelOperation = (
    ColorJitter
    | RandomGrayscale
    | GaussianBlur
    | RandomRotation
    | RandAugment
    | TrivialAugmentWide
    | AutoAugment
    | Apply
)
MixingOperation = MixUp | CutMix
FieldOperation = SanitizeBoxes | Pad | Unpack
Operation = (
    Decode
    | GeometricOperation
    | PixelOperation
    | Normalize
    | RandomErasing
    | Cast
    | MixingOperation
    | FieldOperation
    | Map
)
Recipe = Sequence[Operation]

CIFAR_MEAN = (0.4914, 0.4822, 0.4465)
"""Mean of CIFAR-10's training images, R, G, B, in units of 0..1."""

CIFAR_STD = (0.2470, 0.2435, 0.2616)
"""Standard deviation of CIFAR-10's training images, R, G, B, in units of 0..1."""


@explain_arguments(RecipeError)
def imagenet_train(size: Size = 224) -> tuple[Operation, ...]:
    """Return the usual training recipe: decode, random window of `size`, flip, normalise. float32,
    CHW."""
    return (Decode(), RandomResizedCrop(size), RandomHorizontalFlip(), Normalize())


@explain_arguments(RecipeError)
def imagenet_eval(size: Size = 224, resize: Size = 256) -> tuple[Operation, ...]:
    """Return the usual evaluation recipe: decode, short side to `resize`, middle of `size`,
    normalise."""
    return (Decode(), Resize(resize), CenterCrop(size), Normalize())


@explain_arguments(RecipeError)
def cifar_train(size: Size = 32, *, padding: int = 4) -> tuple[Operation, ...]:
    """Return the usual recipe for CIFAR: decode, random window of the padded image, flip,
    normalise."""
    crop = RandomCrop(size, padding=padding)
    return (Decode(), crop, RandomHorizontalFlip(), Normalize(CIFAR_MEAN, CIFAR_STD))
