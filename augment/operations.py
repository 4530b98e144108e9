"""Define the operations on images as frozen values, and the recipes that have a name.

An operation knows nothing of DALI, of torch or of a dataset. It checks its own arguments when it is
made; `recipe.check_recipe` checks whether several fit one another and their data. Names and
meanings are torchvision's, so that published recipes carry over.

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
    check_bool,
    check_one_of,
    check_single_value,
    field_names,
    fill_value,
    height_width,
    integer,
    interpolation_name,
    numbers,
    pixels,
    positive_range,
    probability,
    range_around,
    whole_number,
)
from penstock.augment.field_operations import Map, Pad, SanitizeBoxes, Unpack
from penstock.cache import RecipeError, explain_arguments

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
        check_single_value(
            "Resize(max_size=...)", self.max_size, None, "crop or pad to one size instead"
        )
        sides = as_tuple(self.size)
        check = height_width if len(sides) == 2 else pixels
        size = check("Resize(size=...)", sides[0] if len(sides) == 1 else self.size)
        object.__setattr__(self, "size", size)
        check_bool("Resize(antialias=...)", self.antialias)


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
        object.__setattr__(self, "size", axis_lengths("CenterCrop(size=...)", self.size))
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
        object.__setattr__(self, "size", axis_lengths(f"{name}(size=...)", self.size))
        object.__setattr__(self, "padding", _padding(f"{name}(padding=...)", self.padding))
        check_one_of(f"{name}(padding_mode=...)", self.padding_mode, ("constant",))
        check_bool(f"{name}(pad_if_needed=...)", self.pad_if_needed)
        object.__setattr__(self, "fill", fill_value(f"{name}(fill=...)", self.fill))
        what = f"{name}(mask_fill=...)"
        mask_fill = whole_number(what, self.mask_fill, low=-(2**31), high=2**31 - 1)
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
            check_bool(f"{name}(antialias=...)", self.antialias)

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


FlipOperation = RandomHorizontalFlip | RandomVerticalFlip
GeometricOperation = Resize | CenterCrop | RandomCrop | RandomResizedCrop | FlipOperation


def _padding(what: str, value: object) -> int:
    """Return the pixels of padding on each side; torchvision's lists are equal on all of them."""
    sides = (0,) if value is None else as_tuple(value) or (value,)
    if len({integer(side) for side in sides}) == 1:
        return whole_number(what, sides[0], low=0, high=MAX_SIZE_PX)
    raise RecipeError(f"{what}: got {value!r}, wanted one number of pixels for all four sides.")


def _height_width(name: str, size: tuple[int | None, ...]) -> tuple[int, int]:
    """Return height and width in pixels of a crop of images; a single length is used for both."""
    return height_width(f"{name}(size=...)", size)


IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Mean of ImageNet's training images, R, G, B, in units of 0..1."""

IMAGENET_STD = (0.229, 0.224, 0.225)
"""Standard deviation of ImageNet's training images, R, G, B, in units of 0..1."""

Color = Literal["rgb", "gray"]
WindowMode = Literal["auto", "decoder", "slice"]
DType = Literal["float32", "float16", "uint8"]
LearntPolicy = Literal["imagenet", "cifar10", "svhn"]

# Of a jitter's brightness, contrast and saturation, which are computed in 16 bits.
MAX_FACTOR = 100.0
MAX_DRAWS = 1024
MAX_CLASSES = 2**24


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class Decode:
    """Encoded bytes to pixels, turned upright by EXIF, alpha dropped, 16 bit scaled to 8.

    color: "rgb" (3 channels) or "gray" (1 channel, luma). The others don't change what is shown,
    and pixels on a GPU by rounding at most. windows: "decoder" decodes a crop's window alone,
    "slice" the whole image and crops it: slower, for GPUs where the first doesn't work; "auto"
    tries it out in a process of its own, once for each GPU. hw_decoder_load: share of a batch for
    the GPU's JPEG unit, None: DALI's own. preallocate: (height, width) of the largest image, which
    its decoder makes room for beforehand; None: as images come. What is best was not measured yet.
    """

    color: Color = "rgb"
    _: KW_ONLY
    windows: WindowMode = "auto"
    hw_decoder_load: float | None = None
    preallocate: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        check_one_of("Decode(color=...)", self.color, get_args(Color))
        check_one_of("Decode(windows=...)", self.windows, get_args(WindowMode))
        if self.hw_decoder_load is not None:
            load = probability("Decode(hw_decoder_load=...)", self.hw_decoder_load)
            object.__setattr__(self, "hw_decoder_load", load)
        if self.preallocate is not None:
            size = height_width("Decode(preallocate=...)", self.preallocate)
            object.__setattr__(self, "preallocate", size)

    @property
    def channels(self) -> int:
        """The number of channels of an image: 3 or 1."""
        return 3 if self.color == "rgb" else 1


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class ColorJitter:
    """Random brightness, contrast, saturation and hue: torchvision's operation and its formulas.

    brightness, contrast, saturation: a number x draws a factor from max(0, 1 - x) to 1 + x, a pair
    draws from low to high; 1 changes nothing. hue: a number x, at most 0.5, draws a shift of the
    hue's circle from -x to x, a pair from low to high; 0 and None change nothing. They are applied
    in this order; torchvision shuffles it for each image. Grey recipes take brightness and contrast
    only.
    """

    brightness: float | tuple[float, float] | None = None
    contrast: float | tuple[float, float] | None = None
    saturation: float | tuple[float, float] | None = None
    hue: float | tuple[float, float] | None = None

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            what = f"ColorJitter({name}=...)"
            pair = range_around(what, getattr(self, name), around=1.0, low=0.0, high=MAX_FACTOR)
            object.__setattr__(self, name, pair)
        hue = range_around("ColorJitter(hue=...)", self.hue, around=0.0, low=-0.5, high=0.5)
        object.__setattr__(self, "hue", hue)


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class RandomGrayscale:
    """Takes the colour away with probability p; the image keeps its 3 channels."""

    p: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", probability("RandomGrayscale(p=...)", self.p))


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class GaussianBlur:
    """Blurs with probability p, by a Gaussian of random width: torchvision's operation.

    kernel_size: odd, in pixels; an int is a square, a pair is (horizontal, vertical), as in
    torchvision. sigma: standard deviation in pixels, one number or a range that is drawn from
    uniformly. p: torchvision's always blurs (1.0).
    """

    kernel_size: int | tuple[int, int]
    sigma: float | tuple[float, float] = (0.1, 2.0)
    p: float = 1.0

    def __post_init__(self) -> None:
        kernel = height_width("GaussianBlur(kernel_size=...)", self.kernel_size)
        if not all(side % 2 for side in kernel):
            raise RecipeError(
                f"GaussianBlur(kernel_size=...): got {self.kernel_size!r}, wanted odd numbers of "
                "pixels, so that a kernel has a middle."
            )
        sigma = numbers("GaussianBlur(sigma=...)", self.sigma)
        pair = sigma * 2 if len(sigma) == 1 else sigma
        object.__setattr__(self, "kernel_size", kernel)
        checked = positive_range("GaussianBlur(sigma=...)", pair, most=1e4)
        object.__setattr__(self, "sigma", checked)
        object.__setattr__(self, "p", probability("GaussianBlur(p=...)", self.p))


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class RandomRotation:
    """Turns the image about its middle, keeping its size: torchvision's operation.

    degrees: a number x draws an angle from -x to x, a pair from low to high; counter-clockwise.
    interpolation: "nearest" or "bilinear". expand, center: False and None are the only values.
    fill: of what the image doesn't reach, 0..255, for all channels.
    """

    degrees: float | tuple[float, float]
    interpolation: str = "nearest"
    expand: bool = False
    center: None = None
    fill: float | None = 0.0

    def __post_init__(self) -> None:
        check_single_value("RandomRotation(expand=...)", self.expand, False, "a batch has one size")
        check_single_value(
            "RandomRotation(center=...)", self.center, None, "images turn by their middle"
        )
        what = "RandomRotation(degrees=...)"
        pair = range_around(what, self.degrees, around=0.0, low=-36_000.0, high=36_000.0)
        object.__setattr__(self, "degrees", pair)
        object.__setattr__(self, "fill", fill_value("RandomRotation(fill=...)", self.fill))
        kinds, where = ("nearest", "bilinear"), "RandomRotation(interpolation=...)"
        name = interpolation_name(where, self.interpolation, kinds)
        object.__setattr__(self, "interpolation", name)


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class RandAugment:
    """num_ops random operations of one magnitude each: Cubuk et al. 2019, torchvision's table.

    magnitude: from 0 to num_magnitude_bins - 1. interpolation: "nearest" is the only one. fill: as
    in `RandomRotation`.
    """

    num_ops: int = 2
    magnitude: int = 9
    num_magnitude_bins: int = 31
    interpolation: str = "nearest"
    fill: float | None = None

    def __post_init__(self) -> None:
        name = "RandAugment"
        count = whole_number(f"{name}(num_ops=...)", self.num_ops, low=1, high=16)
        bins = whole_number(
            f"{name}(num_magnitude_bins=...)", self.num_magnitude_bins, low=2, high=1000
        )
        magnitude = whole_number(f"{name}(magnitude=...)", self.magnitude, low=0, high=bins - 1)
        object.__setattr__(self, "num_ops", count)
        object.__setattr__(self, "num_magnitude_bins", bins)
        object.__setattr__(self, "magnitude", magnitude)
        _check_policy_warp(name, self)


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class TrivialAugmentWide:
    """One random operation of a random magnitude: Müller and Hutter 2021, torchvision's table.

    interpolation, fill: as in `RandAugment`.
    """

    num_magnitude_bins: int = 31
    interpolation: str = "nearest"
    fill: float | None = None

    def __post_init__(self) -> None:
        name = "TrivialAugmentWide"
        bins = whole_number(
            f"{name}(num_magnitude_bins=...)", self.num_magnitude_bins, low=2, high=1000
        )
        object.__setattr__(self, "num_magnitude_bins", bins)
        _check_policy_warp(name, self)


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class AutoAugment:
    """A random pair of operations of a learnt policy: Cubuk et al. 2018, torchvision's tables.

    policy: the data set that it was learnt on. interpolation, fill: as in `RandAugment`.
    """

    policy: LearntPolicy = "imagenet"
    interpolation: str = "nearest"
    fill: float | None = None

    def __post_init__(self) -> None:
        policy = getattr(self.policy, "value", self.policy)  # of torchvision's AutoAugmentPolicy
        check_one_of("AutoAugment(policy=...)", policy, get_args(LearntPolicy))
        object.__setattr__(self, "policy", policy)
        _check_policy_warp("AutoAugment", self)


def _check_policy_warp(name: str, op: RandAugment | TrivialAugmentWide | AutoAugment) -> None:
    kind = interpolation_name(f"{name}(interpolation=...)", op.interpolation, ("nearest",))
    object.__setattr__(op, "interpolation", kind)
    object.__setattr__(op, "fill", fill_value(f"{name}(fill=...)", op.fill))


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class Apply:
    """Your own DALI function: everything that DALI can do stays reachable.

    fn: called when a graph is built, a few times, as fn(images, draws) with DALI nodes: the images,
    uint8, (height, width, channels), layout "HWC"; and per sample `draws` numbers, float32, in
    [0, 1), that depend on (seed, epoch, sample id) only. It returns images of the same shape and
    layout; another type than uint8 is rounded and clipped to 0..255. It may have no name and is
    never pickled. draws: how many numbers a sample gets. An operator of DALI that draws by itself
    would not repeat after a restart: use `draws`. moves: whether fn may move pixels, which masks,
    boxes and keypoints beside the image couldn't follow: False says that it leaves them in place.
    """

    fn: Callable[[Any, Any], Any]
    draws: int = 1
    _: KW_ONLY
    moves: bool = True

    def __post_init__(self) -> None:
        check_bool("Apply(moves=...)", self.moves)
        if not callable(self.fn):
            raise RecipeError(
                f"Apply(fn=...): got {self.fn!r}, wanted a function of DALI nodes (images, draws)."
            )
        draws = whole_number("Apply(draws=...)", self.draws, low=1, high=MAX_DRAWS)
        object.__setattr__(self, "draws", draws)


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class Normalize:
    """(x / 255 - mean) / std per channel, to float32: torchvision's Normalize after its ToTensor.

    mean, std: one number per channel, in units of 0..1. Without arguments: ImageNet's. inplace: no
    difference here; it is there for recipes that pass it to torchvision's.
    """

    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    inplace: bool = False

    def __post_init__(self) -> None:
        mean = numbers("Normalize(mean=...)", self.mean)
        std = numbers("Normalize(std=...)", self.std)
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
        check_bool("Normalize(inplace=...)", self.inplace)
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "std", std)


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class RandomErasing:
    """Fills a random window with `value`, with probability p: torchvision's operation.

    It stands after Normalize where there is one, and `value` is in the units of the batch: one
    number, or one per channel. scale: range of the window's share of the image. ratio: range of
    height / width, uniform in its logarithm. torchvision's value="random" doesn't exist here.
    inplace: as in `Normalize`.
    """

    p: float = 0.5
    scale: tuple[float, float] = (0.02, 0.33)
    ratio: tuple[float, float] = (0.3, 3.3)
    value: float | tuple[float, ...] = 0.0
    inplace: bool = False

    def __post_init__(self) -> None:
        name = "RandomErasing"
        check_bool(f"{name}(inplace=...)", self.inplace)
        object.__setattr__(self, "p", probability(f"{name}(p=...)", self.p))
        object.__setattr__(self, "scale", positive_range(f"{name}(scale=...)", self.scale, most=1))
        object.__setattr__(
            self, "ratio", positive_range(f"{name}(ratio=...)", self.ratio, most=1e4)
        )
        if isinstance(self.value, str):
            raise RecipeError(
                f"RandomErasing(value=...): got {self.value!r}, wanted a number, or one per "
                "channel: noise that DALI draws by itself would not repeat after a restart."
            )
        object.__setattr__(self, "value", numbers(f"{name}(value=...)", self.value))


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class Cast:
    """The dtype of the batch. It changes the type, never the scale: pixels stay 0..255."""

    dtype: DType

    def __post_init__(self) -> None:
        check_one_of("Cast(dtype=...)", self.dtype, get_args(DType))


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class MixUp:
    """Blends each image and label with a partner's: Zhang et al. 2017. Last in a recipe.

    alpha: of the Beta(alpha, alpha) that the shares come from. num_classes: how many there are, for
    labels that are class numbers; None: as many as the dataset names.
    """

    alpha: float = 1.0
    num_classes: int | None = None

    def __post_init__(self) -> None:
        _check_mixing("MixUp", self)


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class CutMix:
    """Puts a window of a partner into each image, labels by area: Yun et al. 2019.

    Last in a recipe. alpha, num_classes: as in `MixUp`.
    """

    alpha: float = 1.0
    num_classes: int | None = None

    def __post_init__(self) -> None:
        _check_mixing("CutMix", self)


def _check_mixing(name: str, op: MixUp | CutMix) -> None:
    alpha = positive_range(f"{name}(alpha=...)", (op.alpha, op.alpha), most=1e4)[0]
    object.__setattr__(op, "alpha", alpha)
    if op.num_classes is not None:
        classes = whole_number(f"{name}(num_classes=...)", op.num_classes, low=1, high=MAX_CLASSES)
        object.__setattr__(op, "num_classes", classes)


# Where to add an operation that changes pixels: its value here and in `PixelOperation` (and in
# `__init__`);
# how its draws become arguments in `pixel_draws.ARGUMENTS`; what it does to pixels in
# `operation_nodes.NODES`; in `pixels` whether flips commute with it and whether it needs colours.
# tests/augment/test_tables.py holds that each has all of these. WindowMode and resizes: `draws`.
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
    """The usual training recipe: decode, random window to `size`, flip, normalise. float32, CHW."""
    return (Decode(), RandomResizedCrop(size), RandomHorizontalFlip(), Normalize())


@explain_arguments(RecipeError)
def imagenet_eval(size: Size = 224, resize: Size = 256) -> tuple[Operation, ...]:
    """The usual evaluation recipe: decode, short side to `resize`, middle `size`, normalise."""
    return (Decode(), Resize(resize), CenterCrop(size), Normalize())


@explain_arguments(RecipeError)
def cifar_train(size: Size = 32, *, padding: int = 4) -> tuple[Operation, ...]:
    """The usual recipe for CIFAR: decode, random window of the padded image, flip, normalise."""
    crop = RandomCrop(size, padding=padding)
    return (Decode(), crop, RandomHorizontalFlip(), Normalize(CIFAR_MEAN, CIFAR_STD))
