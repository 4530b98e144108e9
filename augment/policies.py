"""Define the learnt policies: operations that give each sample operations of a table.

The tables are torchvision's (transforms/autoaugment.py, v0.13 and later), which follow RandAugment
(Cubuk et al. 2019), TrivialAugment (Müller and Hutter 2021) and AutoAugment (Cubuk et al. 2018).
A policy has *rounds*, one after the other; in each a sample gets one operation.

Strengths are float64 and torchvision's are float32, so a translation by nearly a whole number of
pixels may differ by one pixel.

Each sample passes only the operators of its own operation: a round splits the batch by kind in a
binary tree and merges it again, without copying pixels. Milliseconds of a core for a 224 x 224
image (DALI 2.4, CPU): color 2.0, autocontrast 0.9, affine and solarize 0.5, the others 0.1 to 0.2.

Differences of the pixels from torchvision's on Pillow images, in units of 0..255:
- affine: nearest neighbours at float32 points, Pillow's at 16.16 fixed point: at most 1 % of the
  pixels come from the neighbour.
- brightness, contrast, color, autocontrast: rounded, torchvision truncates: by 1 at most (color 2,
  since Pillow also rounds the grey image).
- sharpness: by 1 at most, except for the outermost pixels, which torchvision doesn't change; this
  filter mirrors the image at its edge.
- equalize is OpenCV's: level v becomes 255 (c(v) - c(first)) / (n - c(first)), c counting pixels up
  to v, whereas Pillow counts those below v and steps in whole pixels: on photographs by 2 on
  average, and by more if few levels have most pixels.
- posterize, solarize, invert: none.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from penstock.augment import argument_checks as arg
from penstock.augment import dali_nodes as nodes
from penstock.augment.argument_checks import argument
from penstock.augment.dali_runs import fn
from penstock.augment.operation import ImageOperation, ImageShape, Values, operation
from penstock.augment.pixel_operations import matrices, rotation

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.augment.draw_keys import Uniform
    from penstock.readers import Floats, Ints, Numbers

    Choice = tuple[Ints, Ints, Ints]

LearntPolicy = Literal["imagenet", "cifar10", "svhn"]

_TRANSLATE = 150 / 331  # share of the image's side, in AutoAugment and RandAugment
_FIRST = {"Posterize": 8.0, "Solarize": 255.0}  # strengths without a sign, in the first bin
_IDENTITY = 0  # its place in every space


def _space(
    *, shear: float, across: float, down: float, angle: float, enhance: float, bits: int
) -> dict[str, float]:
    """Return the operations in torchvision's order with their strengths in the last bin.

    across, down: translations in pixels. angle: degrees. bits: bits that posterize keeps.
    """
    moved = {"ShearX": shear, "ShearY": shear, "TranslateX": across, "TranslateY": down}
    enhanced = dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), enhance)
    others = {"Posterize": bits, "Solarize": 0.0, "AutoContrast": 0.0, "Equalize": 0.0}
    return {"Identity": 0.0, **moved, "Rotate": angle, **enhanced, **others}


def strengths(name: str, last: float, bins: int) -> Floats:
    """Return the strengths of an operation in evenly spaced bins, (bins, 2): positive, and negated
    if it has a sign. last: in the last bin. It multiplies first, so that 32 * 15 / 30 is 16."""
    first = _FIRST.get(name, 0.0)
    value = first + (last - first) * np.arange(bins) / (bins - 1)
    value = np.rint(value) if name == "Posterize" else value
    return np.stack([value, -value if last and name not in _FIRST else value], axis=-1)


def _kind(name: str) -> str:
    """Return the kind of an operation of a space. An inversion is a solarization from 0 on."""
    if name.startswith(("Shear", "Translate", "Rotate")):
        return "affine"
    return "solarize" if name == "Invert" else name.lower()


class Policy(ImageOperation):
    """Base class of learnt policies. num_ops: operations that each sample gets, one after the
    other. num_magnitude_bins: strengths of an operation."""

    __slots__ = ()

    moves = True
    needs_colours = True
    num_ops: int = 1
    num_magnitude_bins: int
    interpolation: str
    fill: Any

    def space(self, height: int, width: int) -> dict[str, float]:
        """Return the operations that it chooses from, for images of this size, with their strengths
        in the last bin."""
        across, down = _TRANSLATE * width, _TRANSLATE * height
        return _space(shear=0.3, across=across, down=down, angle=30, enhance=0.9, bits=4)

    @abstractmethod
    def choose(self, uniform: Uniform, shape: ImageShape, /) -> list[Choice]:
        """Choose for each round each sample's operation, its place in the space; the bin of the
        strength; and 1 to negate it, if it has a sign. Shape (n,) each."""

    def draw(self, uniform: Uniform, shape: ImageShape) -> Values:
        """Return for each round K the operation's index in KINDS, kindK; its matrix from output to
        input points, matrixK, (3, 3); and its value, valueK (see `_KINDS`)."""
        tables = _tables(self, shape.height, shape.width)
        values: Values = {}
        for number, cell in enumerate(self.choose(uniform, shape)):
            for name, table in tables.items():
                values[f"{name}{number}"] = table[cell[: table.ndim]]
        return values

    def node(self, images: Any, inputs: dict[str, Any], _shape: ImageShape) -> Any:
        """Apply each round's operations."""
        for number in range(self.num_ops):
            given = {name: inputs[f"{name}{number}"] for name in ("kind", "matrix", "value")}
            images = self._split({"images": images, **given}, 0, len(KINDS))
        return images

    def _split(self, given: dict[str, Any], low: int, high: int) -> Any:
        """Apply to each sample its operation, which is one of KINDS[low:high]."""
        if high - low == 1:
            node, _ = _KINDS[KINDS[low]]
            return node(given["images"], given["matrix"], given["value"], self.fill)
        middle = (low + high) // 2
        return nodes.if_else(
            given,
            given["kind"] < middle,
            lambda some: self._split(some, low, middle),
            lambda some: self._split(some, middle, high),
        )


def _sharpness(images: Any, _matrix: Any, factor: Any, _fill: float) -> Any:
    """Blend with the image smoothed by [1 1 1; 1 5 1; 1 1 1] / 13, or away from it."""
    # From numbers, since an array has the batch size, and this is a part of the batch.
    around = (1 - factor) / 13.0
    middle = factor + 5 * around
    kernel = fn.stack(*[around] * 4, middle, *[around] * 4)
    kernel = nodes.on_device_of(images, fn.reshape(kernel, shape=[3, 3]))
    return fn.filter(images, kernel)


def _factor(strength: Floats) -> Floats:
    """Return the factor of torchvision's adjust_* functions: 1 leaves the image as it is."""
    return 1 + strength


_KINDS: dict[str, tuple[Callable[[Any, Any, Any, float], Any], Callable[[Floats], Floats]]] = {
    "identity": (lambda x, *_: x, np.zeros_like),
    "affine": (lambda x, matrix, _, fill: nodes.warp(x, matrix, fill=fill), np.zeros_like),
    "brightness": (lambda x, _, value, __: fn.brightness_contrast(x, brightness=value), _factor),
    "contrast": (lambda x, _, value, __: nodes.contrast(x, value, nodes.luma(x)), _factor),
    "color": (lambda x, _, value, __: fn.saturation(x, saturation=value), _factor),
    "sharpness": (_sharpness, _factor),
    # The mask that keeps the upper bits.
    "posterize": (lambda x, _, mask, __: x & nodes.level(x, mask), lambda n: 256 - 2.0 ** (8 - n)),
    # Values of at least the threshold are inverted, so it is rounded up.
    "solarize": (lambda x, _, value, __: nodes.solarize(x, nodes.level(x, value)), np.ceil),
    "autocontrast": (lambda x, *_: nodes.autocontrast(x), np.zeros_like),
    "equalize": (lambda x, *_: fn.equalize(x), np.zeros_like),
}
"""By kind the node of (images, matrix, value, fill), and the value of a strength."""

KINDS = tuple(_KINDS)
"""The kinds of pixel operations. Shears, translations and rotations are "affine"."""

_NEAREST = arg.one_of("nearest")
_BINS = arg.whole_number(2, 1000)


@operation
class RandAugment(Policy):
    """Apply `num_ops` random operations of the same magnitude (Cubuk et al. 2019), from
    torchvision's table.

    magnitude: from 0 to num_magnitude_bins - 1. interpolation: only "nearest". fill: as in
    `RandomRotation`.
    """

    num_ops: int = argument(arg.whole_number(1, 16), default=2)
    magnitude: int = 9
    num_magnitude_bins: int = argument(_BINS, default=31)
    interpolation: str = argument(_NEAREST, default="nearest")
    fill: float | None = None

    def __post_init__(self) -> None:
        Policy.__post_init__(self)
        within = arg.whole_number(0, self.num_magnitude_bins - 1)
        object.__setattr__(self, "magnitude", within("RandAugment(magnitude=...)", self.magnitude))

    def choose(self, uniform: Uniform, shape: ImageShape) -> list[Choice]:
        """Choose an operation and a sign for each round."""
        count = len(self.space(shape.height, shape.width))
        draws = uniform(2 * self.num_ops)
        at = np.full(draws.shape[1], self.magnitude)
        return [
            (_pick(which, count), at, (sign < 0.5).astype(np.int64))
            for which, sign in zip(draws[::2], draws[1::2], strict=True)
        ]


@operation
class TrivialAugmentWide(Policy):
    """Apply one random operation of a random magnitude (Müller and Hutter 2021), from torchvision's
    table.

    interpolation, fill: as in `RandAugment`.
    """

    num_magnitude_bins: int = argument(_BINS, default=31)
    interpolation: str = argument(_NEAREST, default="nearest")
    fill: float | None = None

    def space(self, _height: int, _width: int) -> dict[str, float]:
        return _space(shear=0.99, across=32, down=32, angle=135, enhance=0.99, bits=2)

    def choose(self, uniform: Uniform, shape: ImageShape) -> list[Choice]:
        """Choose an operation, a bin and a sign."""
        which, at, sign = uniform(3)
        entry = _pick(which, len(self.space(shape.height, shape.width)))
        return [(entry, _pick(at, self.num_magnitude_bins), (sign < 0.5).astype(np.int64))]


@operation
class AutoAugment(Policy):
    """Apply a random pair of operations of a learnt policy (Cubuk et al. 2018), from torchvision's
    tables.

    policy: the dataset on which it was learnt. interpolation, fill: as in `RandAugment`.
    """

    policy: LearntPolicy = argument(arg.one_of(*get_args(LearntPolicy)), default="imagenet")
    interpolation: str = argument(_NEAREST, default="nearest")
    fill: float | None = None

    num_ops = 2
    num_magnitude_bins = 10

    def space(self, height: int, width: int) -> dict[str, float]:
        return Policy.space(self, height, width) | {"Invert": 0.0}

    def choose(self, uniform: Uniform, _shape: ImageShape) -> list[Choice]:
        """Choose a pair, and for each round by its probability if it happens, and a sign."""
        rules = _learnt_rules(self)
        pair, *rest = uniform(1 + 2 * self.num_ops)
        chosen = rules[_pick(pair, len(rules))]
        found = []
        for number, (happens, sign) in enumerate(zip(rest[::2], rest[1::2], strict=True)):
            entry, probability, at = chosen[:, number].T
            entry = np.where(happens < probability, entry, _IDENTITY).astype(np.int64)
            found.append((entry, at.astype(np.int64), (sign < 0.5).astype(np.int64)))
        return found


@lru_cache(maxsize=8)
def _learnt_rules(op: AutoAugment) -> Floats:
    """Return place in the space, probability and bin of both operations of each pair, (pairs, 2,
    3)."""
    places = [*op.space(1, 1)]
    pairs = learnt_pairs(op.policy)
    return np.array([[(places.index(name), *rest) for name, *rest in pair] for pair in pairs])


def _pick(draws: Floats, count: int) -> Ints:
    return (draws * count).astype(np.int64)


# Pairs of operation, probability and bin of ten ("-": no strength), as printed in the papers.
_LEARNT = {
    "imagenet": """
        Posterize 0.4 8, Rotate 0.6 9 | Solarize 0.6 5, AutoContrast 0.6 -
        Equalize 0.8 -, Equalize 0.6 - | Posterize 0.6 7, Posterize 0.6 6
        Equalize 0.4 -, Solarize 0.2 4 | Equalize 0.4 -, Rotate 0.8 8
        Solarize 0.6 3, Equalize 0.6 - | Posterize 0.8 5, Equalize 1.0 -
        Rotate 0.2 3, Solarize 0.6 8 | Equalize 0.6 -, Posterize 0.4 6 | Rotate 0.8 8, Color 0.4 0
        Rotate 0.4 9, Equalize 0.6 - | Equalize 0.0 -, Equalize 0.8 -
        Invert 0.6 -, Equalize 1.0 - | Color 0.6 4, Contrast 1.0 8 | Rotate 0.8 8, Color 1.0 2
        Color 0.8 8, Solarize 0.8 7 | Sharpness 0.4 7, Invert 0.6 - | ShearX 0.6 5, Equalize 1.0 -
        Color 0.4 0, Equalize 0.6 - | Equalize 0.4 -, Solarize 0.2 4
        Solarize 0.6 5, AutoContrast 0.6 - | Invert 0.6 -, Equalize 1.0 -
        Color 0.6 4, Contrast 1.0 8 | Equalize 0.8 -, Equalize 0.6 -""",
    "cifar10": """
        Invert 0.1 -, Contrast 0.2 6 | Rotate 0.7 2, TranslateX 0.3 9
        Sharpness 0.8 1, Sharpness 0.9 3 | ShearY 0.5 8, TranslateY 0.7 9
        AutoContrast 0.5 -, Equalize 0.9 - | ShearY 0.2 7, Posterize 0.3 7
        Color 0.4 3, Brightness 0.6 7 | Sharpness 0.3 9, Brightness 0.7 9
        Equalize 0.6 -, Equalize 0.5 - | Contrast 0.6 7, Sharpness 0.6 5
        Color 0.7 7, TranslateX 0.5 8 | Equalize 0.3 -, AutoContrast 0.4 -
        TranslateY 0.4 3, Sharpness 0.2 6 | Brightness 0.9 6, Color 0.2 8
        Solarize 0.5 2, Invert 0.0 - | Equalize 0.2 -, AutoContrast 0.6 -
        Equalize 0.2 -, Equalize 0.6 - | Color 0.9 9, Equalize 0.6 -
        AutoContrast 0.8 -, Solarize 0.2 8 | Brightness 0.1 3, Color 0.7 0
        Solarize 0.4 5, AutoContrast 0.9 - | TranslateY 0.9 9, TranslateY 0.7 9
        AutoContrast 0.9 -, Solarize 0.8 3 | Equalize 0.8 -, Invert 0.1 -
        TranslateY 0.7 9, AutoContrast 0.9 -""",
    "svhn": """
        ShearX 0.9 4, Invert 0.2 - | ShearY 0.9 8, Invert 0.7 - | Equalize 0.6 -, Solarize 0.6 6
        Invert 0.9 -, Equalize 0.6 - | Equalize 0.6 -, Rotate 0.9 3
        ShearX 0.9 4, AutoContrast 0.8 - | ShearY 0.9 8, Invert 0.4 -
        ShearY 0.9 5, Solarize 0.2 6 | Invert 0.9 -, AutoContrast 0.8 -
        Equalize 0.6 -, Rotate 0.9 3 | ShearX 0.9 4, Solarize 0.3 3 | ShearY 0.8 8, Invert 0.7 -
        Equalize 0.9 -, TranslateY 0.6 6 | Invert 0.9 -, Equalize 0.6 -
        Contrast 0.3 3, Rotate 0.8 4 | Invert 0.8 -, TranslateY 0.0 2
        ShearY 0.7 6, Solarize 0.4 8 | Invert 0.6 -, Rotate 0.8 4 | ShearY 0.3 7, TranslateX 0.9 3
        ShearX 0.1 6, Invert 0.6 - | Solarize 0.7 2, TranslateY 0.6 7 | ShearY 0.8 4, Invert 0.8 -
        ShearX 0.7 9, TranslateY 0.8 3 | ShearY 0.8 5, AutoContrast 0.7 -
        ShearX 0.7 2, Invert 0.1 -""",
}


def learnt_pairs(policy: str) -> tuple[tuple[tuple[str, float, int], ...], ...]:
    """Return the pairs of an AutoAugment policy: each has (operation, probability, bin) twice."""

    def rule(text: str) -> tuple[str, float, int]:
        name, probability, at = text.split()
        return name, float(probability), 0 if at == "-" else int(at)

    pairs = _LEARNT[policy].strip().replace("\n", "|").split("|")
    return tuple(tuple(rule(text) for text in pair.split(",")) for pair in pairs)


@lru_cache(maxsize=32)
def _tables(op: Policy, height: int, width: int) -> dict[str, Numbers]:
    """Return a policy's arguments for images of this size. A look-up takes 1 us per sample.

    kind: by operation, int32. matrix, value: by (operation, bin, negated), float32.
    """
    space, bins = op.space(height, width), op.num_magnitude_bins
    given = [(name, _kind(name), strengths(name, last, bins)) for name, last in space.items()]
    matrix = [_matrices(name, strength, height, width) for name, _, strength in given]
    values = [_KINDS[kind][1](strength) for _, kind, strength in given]
    return {
        "kind": np.array([KINDS.index(kind) for _, kind, _ in given], np.int32),
        "matrix": np.array(matrix, np.float32),
        "value": np.array(values, np.float32),
    }


def _matrices(name: str, strength: Floats, height: int, width: int) -> Floats:
    """Return matrices from output to input points.

    As in torchvision's affine and rotate: shears about the upper left corner, translations by whole
    pixels (rounded towards 0), counterclockwise rotations about the middle of the image.
    """
    if name == "Rotate":
        return rotation(strength, height, width)
    moved: dict[str, list[list[Any]]] = {
        "ShearX": [[1, strength, 0], [0, 1, 0]],
        "ShearY": [[1, 0, 0], [strength, 1, 0]],
        "TranslateX": [[1, 0, -np.trunc(strength)], [0, 1, 0]],
        "TranslateY": [[1, 0, 0], [0, 1, -np.trunc(strength)]],
    }
    return matrices(moved.get(name, [[1 + 0 * strength, 0, 0], [0, 1, 0]]))
