"""Operations as frozen values: what a recipe says, in pure data.

An operation knows nothing of DALI, of torch or of a dataset. It checks itself at birth; whether
several fit one another and their data is `recipe.check_recipe`'s question. Names and meanings are
torchvision's, so that published recipes carry over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

from penstock.augment.checks import (
    fill_value,
    flag,
    height_width,
    interpolation_name,
    numbers,
    one_of,
    positive_range,
    probability,
    spread,
    unsupported,
    whole,
)
from penstock.augment.geometric_ops import Geometric
from penstock.augment.map import Map
from penstock.augment.pad import Pad
from penstock.augment.sanitize import SanitizeBoxes
from penstock.augment.unpack import Unpack
from penstock.cache.errors import RecipeError, explain_arguments

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Mean of ImageNet's training images, R, G, B, in units of 0..1."""

IMAGENET_STD = (0.229, 0.224, 0.225)
"""Standard deviation of ImageNet's training images, R, G, B, in units of 0..1."""

Color = Literal["rgb", "gray"]
Windows = Literal["auto", "decoder", "slice"]
DType = Literal["float32", "float16", "uint8"]
Policy = Literal["imagenet", "cifar10", "svhn"]

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
    windows: Windows = "auto"
    hw_decoder_load: float | None = None
    preallocate: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        one_of("Decode(color=...)", self.color, get_args(Color))
        one_of("Decode(windows=...)", self.windows, get_args(Windows))
        if self.hw_decoder_load is not None:
            load = probability("Decode(hw_decoder_load=...)", self.hw_decoder_load)
            object.__setattr__(self, "hw_decoder_load", load)
        if self.preallocate is not None:
            size = height_width("Decode(preallocate=...)", self.preallocate)
            object.__setattr__(self, "preallocate", size)

    @property
    def channels(self) -> int:
        """How many channels an image has: 3 or 1."""
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
            pair = spread(what, getattr(self, name), around=1.0, low=0.0, high=MAX_FACTOR)
            object.__setattr__(self, name, pair)
        hue = spread("ColorJitter(hue=...)", self.hue, around=0.0, low=-0.5, high=0.5)
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
        unsupported("RandomRotation(expand=...)", self.expand, False, "a batch has one size")
        unsupported("RandomRotation(center=...)", self.center, None, "images turn by their middle")
        what = "RandomRotation(degrees=...)"
        pair = spread(what, self.degrees, around=0.0, low=-36_000.0, high=36_000.0)
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
        count = whole(f"{name}(num_ops=...)", self.num_ops, low=1, high=16)
        bins = whole(f"{name}(num_magnitude_bins=...)", self.num_magnitude_bins, low=2, high=1000)
        magnitude = whole(f"{name}(magnitude=...)", self.magnitude, low=0, high=bins - 1)
        object.__setattr__(self, "num_ops", count)
        object.__setattr__(self, "num_magnitude_bins", bins)
        object.__setattr__(self, "magnitude", magnitude)
        _warps(name, self)


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
        bins = whole(f"{name}(num_magnitude_bins=...)", self.num_magnitude_bins, low=2, high=1000)
        object.__setattr__(self, "num_magnitude_bins", bins)
        _warps(name, self)


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class AutoAugment:
    """A random pair of operations of a learnt policy: Cubuk et al. 2018, torchvision's tables.

    policy: the data set that it was learnt on. interpolation, fill: as in `RandAugment`.
    """

    policy: Policy = "imagenet"
    interpolation: str = "nearest"
    fill: float | None = None

    def __post_init__(self) -> None:
        policy = getattr(self.policy, "value", self.policy)  # of torchvision's AutoAugmentPolicy
        one_of("AutoAugment(policy=...)", policy, get_args(Policy))
        object.__setattr__(self, "policy", policy)
        _warps("AutoAugment", self)


def _warps(name: str, op: RandAugment | TrivialAugmentWide | AutoAugment) -> None:
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
        flag("Apply(moves=...)", self.moves)
        if not callable(self.fn):
            raise RecipeError(
                f"Apply(fn=...): got {self.fn!r}, wanted a function of DALI nodes (images, draws)."
            )
        draws = whole("Apply(draws=...)", self.draws, low=1, high=MAX_DRAWS)
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
        flag("Normalize(inplace=...)", self.inplace)
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
        flag(f"{name}(inplace=...)", self.inplace)
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
        one_of("Cast(dtype=...)", self.dtype, get_args(DType))


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
        _mixes("MixUp", self)


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class CutMix:
    """Puts a window of a partner into each image, labels by area: Yun et al. 2019.

    Last in a recipe. alpha, num_classes: as in `MixUp`.
    """

    alpha: float = 1.0
    num_classes: int | None = None

    def __post_init__(self) -> None:
        _mixes("CutMix", self)


def _mixes(name: str, op: MixUp | CutMix) -> None:
    alpha = positive_range(f"{name}(alpha=...)", (op.alpha, op.alpha), most=1e4)[0]
    object.__setattr__(op, "alpha", alpha)
    if op.num_classes is not None:
        classes = whole(f"{name}(num_classes=...)", op.num_classes, low=1, high=MAX_CLASSES)
        object.__setattr__(op, "num_classes", classes)


# Where to add an operation that changes pixels: its value here and in `Pixel` (and in `__init__`);
# how its draws become arguments in `pixel_draws.ARGUMENTS`; what it does to pixels in
# `operation_nodes.NODES`; in `pixels` whether flips commute with it and whether it needs colours.
# tests/augment/test_tables.py holds that each has all of these. Windows and resizes: `draws`.
Pixel = (
    ColorJitter
    | RandomGrayscale
    | GaussianBlur
    | RandomRotation
    | RandAugment
    | TrivialAugmentWide
    | AutoAugment
    | Apply
)
Mixing = MixUp | CutMix
OfFields = SanitizeBoxes | Pad | Unpack
Operation = Decode | Geometric | Pixel | Normalize | RandomErasing | Cast | Mixing | OfFields | Map
Recipe = Sequence[Operation]
