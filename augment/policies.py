"""Which operation with which strength a learnt policy gives each sample: numpy only.

The tables are torchvision's (transforms/autoaugment.py, v0.13 and later), which follow RandAugment
(Cubuk et al. 2019), TrivialAugment (Müller and Hutter 2021) and AutoAugment (Cubuk et al. 2018).
A policy applies *steps* one after the other; in each step a sample gets one operation. What is
decided here, `policy_nodes` does to the pixels.

Strengths are computed in float64, where torchvision's are float32, so a translation by what is
nearly a whole number of pixels may differ by one pixel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from augment.ops import AutoAugment, RandAugment, TrivialAugmentWide

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

Policy = RandAugment | TrivialAugmentWide | AutoAugment

KINDS = (
    "identity",
    "affine",
    "brightness",
    "contrast",
    "color",
    "sharpness",
    "posterize",
    "solarize",
    "autocontrast",
    "equalize",
)
"""What is done to pixels. Shears, translations and rotations are all "affine", and an inversion is
a solarization from 0 on."""


class Uniform(Protocol):
    """uniform(count): keyed draws in [0, 1), float64, shape (count, n); always the same ones."""

    def __call__(self, count: int, /) -> Floats: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One operation of a space. low, high: its strength in the first and the last bin.

    signed: the strength is negated for half of the samples. whole: rounded to a whole number.
    """

    kind: str
    name: str
    low: float = 0.0
    high: float = 0.0
    signed: bool = False
    whole: bool = False

    def strength(self, bins: NDArray[np.int64], count: int) -> Floats:
        """Of these bins out of `count` evenly spaced ones; multiplied first: 32 * 15 / 30 is 16."""
        value: Floats = self.low + (self.high - self.low) * bins / (count - 1)
        return np.rint(value) if self.whole else value


_ENHANCE = {"Brightness": "brightness", "Color": "color", "Contrast": "contrast"}
_ENHANCE |= {"Sharpness": "sharpness"}


def _space(
    *, shear: float, across: float, down: float, angle: float, enhance: float, bits: int
) -> tuple[Entry, ...]:
    """A space in torchvision's order, by the largest strengths.

    across, down: of the translations, in pixels. angle: in degrees. bits: that posterize keeps in
    the last bin.
    """
    return (
        Entry("identity", "Identity"),
        Entry("affine", "ShearX", high=shear, signed=True),
        Entry("affine", "ShearY", high=shear, signed=True),
        Entry("affine", "TranslateX", high=across, signed=True),
        Entry("affine", "TranslateY", high=down, signed=True),
        Entry("affine", "Rotate", high=angle, signed=True),
        *(Entry(kind, name, high=enhance, signed=True) for name, kind in _ENHANCE.items()),
        Entry("posterize", "Posterize", low=8, high=bits, whole=True),
        Entry("solarize", "Solarize", low=255),
        Entry("autocontrast", "AutoContrast"),
        Entry("equalize", "Equalize"),
    )


_INVERT = Entry("solarize", "Invert")
_TRANSLATE = 150 / 331  # of the image's side, in AutoAugment and RandAugment
_AUTO_BINS = 10


def space(op: Policy, height: int, width: int) -> tuple[Entry, ...]:
    """The operations that a policy chooses from, for images of this size."""
    if isinstance(op, TrivialAugmentWide):
        return _space(shear=0.99, across=32, down=32, angle=135, enhance=0.99, bits=2)
    across, down = _TRANSLATE * width, _TRANSLATE * height
    usual = _space(shear=0.3, across=across, down=down, angle=30, enhance=0.9, bits=4)
    return (*usual, _INVERT) if isinstance(op, AutoAugment) else usual


# Pairs of operation, probability, bin of ten ("-": it has no strength), as the papers print them.
_LEARNT = {
    "imagenet": """
        Posterize 0.4 8, Rotate 0.6 9 | Solarize 0.6 5, AutoContrast 0.6 -
        Equalize 0.8 -, Equalize 0.6 - | Posterize 0.6 7, Posterize 0.6 6
        Equalize 0.4 -, Solarize 0.2 4 | Equalize 0.4 -, Rotate 0.8 8
        Solarize 0.6 3, Equalize 0.6 - | Posterize 0.8 5, Equalize 1.0 -
        Rotate 0.2 3, Solarize 0.6 8 | Equalize 0.6 -, Posterize 0.4 6
        Rotate 0.8 8, Color 0.4 0 | Rotate 0.4 9, Equalize 0.6 -
        Equalize 0.0 -, Equalize 0.8 - | Invert 0.6 -, Equalize 1.0 -
        Color 0.6 4, Contrast 1.0 8 | Rotate 0.8 8, Color 1.0 2
        Color 0.8 8, Solarize 0.8 7 | Sharpness 0.4 7, Invert 0.6 -
        ShearX 0.6 5, Equalize 1.0 - | Color 0.4 0, Equalize 0.6 -
        Equalize 0.4 -, Solarize 0.2 4 | Solarize 0.6 5, AutoContrast 0.6 -
        Invert 0.6 -, Equalize 1.0 - | Color 0.6 4, Contrast 1.0 8
        Equalize 0.8 -, Equalize 0.6 -""",
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
        ShearX 0.9 4, Invert 0.2 - | ShearY 0.9 8, Invert 0.7 -
        Equalize 0.6 -, Solarize 0.6 6 | Invert 0.9 -, Equalize 0.6 -
        Equalize 0.6 -, Rotate 0.9 3 | ShearX 0.9 4, AutoContrast 0.8 -
        ShearY 0.9 8, Invert 0.4 - | ShearY 0.9 5, Solarize 0.2 6
        Invert 0.9 -, AutoContrast 0.8 - | Equalize 0.6 -, Rotate 0.9 3
        ShearX 0.9 4, Solarize 0.3 3 | ShearY 0.8 8, Invert 0.7 -
        Equalize 0.9 -, TranslateY 0.6 6 | Invert 0.9 -, Equalize 0.6 -
        Contrast 0.3 3, Rotate 0.8 4 | Invert 0.8 -, TranslateY 0.0 2
        ShearY 0.7 6, Solarize 0.4 8 | Invert 0.6 -, Rotate 0.8 4
        ShearY 0.3 7, TranslateX 0.9 3 | ShearX 0.1 6, Invert 0.6 -
        Solarize 0.7 2, TranslateY 0.6 7 | ShearY 0.8 4, Invert 0.8 -
        ShearX 0.7 9, TranslateY 0.8 3 | ShearY 0.8 5, AutoContrast 0.7 -
        ShearX 0.7 2, Invert 0.1 -""",
}


def learnt(policy: str) -> tuple[tuple[tuple[str, float, int], ...], ...]:
    """The pairs of an AutoAugment policy: (operation, probability, bin) twice each."""
    pairs = _LEARNT[policy].strip().replace("\n", "|").split("|")
    return tuple(tuple(_step(text) for text in pair.split(",")) for pair in pairs)


def _step(text: str) -> tuple[str, float, int]:
    name, probability, at = text.split()
    return name, float(probability), 0 if at == "-" else int(at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step's choice per sample, (n,) each. entry: place in the space. strength: signed."""

    entry: NDArray[np.int64]
    strength: Floats


def steps(op: Policy) -> int:
    """How many operations a sample gets, one after the other."""
    if isinstance(op, RandAugment):
        return op.num_ops
    return 2 if isinstance(op, AutoAugment) else 1


def choose(op: Policy, uniform: Uniform, height: int, width: int) -> list[Step]:
    """Operation and strength of each step, for images of this size.

    Draws, in their order: RandAugment takes an operation and a sign for each step;
    TrivialAugmentWide an operation, a bin and a sign; AutoAugment a pair, then for each of its two
    steps whether it happens and a sign.
    """
    entries = space(op, height, width)
    if isinstance(op, RandAugment):
        draws = uniform(2 * op.num_ops)
        magnitude = np.full(draws.shape[1], op.magnitude)
        return [
            _chosen(entries, _pick(which, len(entries)), magnitude, sign, op.num_magnitude_bins)
            for which, sign in zip(draws[::2], draws[1::2], strict=True)
        ]
    if isinstance(op, TrivialAugmentWide):
        which, at, sign = uniform(3)
        bins = op.num_magnitude_bins
        return [_chosen(entries, _pick(which, len(entries)), _pick(at, bins), sign, bins)]
    place = {entry.name: number for number, entry in enumerate(entries)}
    pairs = learnt(op.policy)
    pair, *rest = uniform(1 + 2 * 2)
    number = _pick(pair, len(pairs))
    chosen = []
    for step, (happens, sign) in enumerate(zip(rest[::2], rest[1::2], strict=True)):
        column = [pair[step] for pair in pairs]
        entry = np.array([place[name] for name, _, _ in column])[number]
        taken = happens < np.array([probability for _, probability, _ in column])[number]
        at = np.array([at for _, _, at in column])[number]
        entry = np.where(taken, entry, place["Identity"])
        chosen.append(_chosen(entries, entry, at, sign, _AUTO_BINS))
    return chosen


def _pick(draws: Floats, count: int) -> NDArray[np.int64]:
    return (draws * count).astype(np.int64)


def _chosen(
    entries: tuple[Entry, ...],
    which: NDArray[np.int64],
    bins: NDArray[np.int64],
    sign: Floats,
    count: int,
) -> Step:
    strength = np.zeros(len(which))
    for number, entry in enumerate(entries):
        rows = which == number
        values = entry.strength(bins[rows], count)
        strength[rows] = np.where(sign[rows] < 0.5, -values, values) if entry.signed else values
    return Step(entry=which, strength=strength)


# -- arguments of the graph


def policy_inputs(op: Policy) -> list[tuple[str, str, int]]:
    """Suffix, dtype and dimensions of a sample, for each argument input of a policy.

    kindK: place in KINDS of step K's operation, int32. matrixK: output pixels to input pixels,
    float32, (2, 3). valueK: of the operation, float32; see `_VALUES`.
    """
    return [
        (f"{name}{number}", dtype, dimensions)
        for number in range(steps(op))
        for name, dtype, dimensions in (
            ("kind", "int32", 0),
            ("matrix", "float32", 2),
            ("value", "float32", 0),
        )
    ]


def policy_draws(op: Policy, uniform: Uniform, height: int, width: int) -> dict[str, NDArray[Any]]:
    """The argument inputs that `policy_inputs` lists, one row per sample.

    uniform: keyed draws. height, width: of all images that the policy sees, in pixels.
    """
    entries = space(op, height, width)
    kinds = np.array([KINDS.index(entry.kind) for entry in entries], np.int32)
    inputs: dict[str, NDArray[Any]] = {}
    for number, step in enumerate(choose(op, uniform, height, width)):
        inputs[f"kind{number}"] = kinds[step.entry]
        inputs[f"matrix{number}"] = _matrices(entries, step, height, width)
        inputs[f"value{number}"] = _values(entries, step)
    return inputs


_VALUES: Mapping[str, Callable[[Floats], Floats]] = {
    # Factors of torchvision's adjust_* functions: 1 leaves the image as it is.
    **dict.fromkeys(_ENHANCE.values(), lambda strength: 1 + strength),
    # The mask that keeps the upper bits.
    "posterize": lambda bits: 256 - 2.0 ** (8 - bits),
    # What is at least the threshold is inverted: the smallest whole number that is.
    "solarize": np.ceil,
}


def _values(entries: tuple[Entry, ...], step: Step) -> NDArray[np.float32]:
    value = np.zeros(len(step.entry), np.float32)
    for number, entry in enumerate(entries):
        if entry.kind in _VALUES:
            rows = step.entry == number
            value[rows] = _VALUES[entry.kind](step.strength[rows])
    return value


def _matrices(
    entries: tuple[Entry, ...], step: Step, height: int, width: int
) -> NDArray[np.float32]:
    """(x, y, 1) of an output point to (x, y) of the input; pixel k covers [k, k + 1).

    As torchvision's affine and rotate: shears about the upper left corner, translations by whole
    pixels towards 0, rotations counterclockwise about the middle of the image.
    """
    matrix = np.zeros((len(step.entry), 2, 3))
    matrix[:, 0, 0] = matrix[:, 1, 1] = 1
    for number, entry in enumerate(entries):
        rows = step.entry == number
        strength = step.strength[rows]
        if entry.name == "ShearX":
            matrix[rows, 0, 1] = strength
        elif entry.name == "ShearY":
            matrix[rows, 1, 0] = strength
        elif entry.name == "TranslateX":
            matrix[rows, 0, 2] = -np.trunc(strength)
        elif entry.name == "TranslateY":
            matrix[rows, 1, 2] = -np.trunc(strength)
        elif entry.name == "Rotate":
            matrix[rows] = rotation(strength, height, width)
    return matrix.astype(np.float32)


def rotation(degrees: Floats, height: int, width: int) -> Floats:
    """Output to input points for counterclockwise turns about the middle, shape (n, 2, 3)."""
    radians = degrees * (math.pi / 180)
    cos, sin = np.cos(radians), np.sin(radians)
    x, y = width / 2, height / 2
    rows = [[cos, -sin, x - cos * x + sin * y], [sin, cos, y - sin * x - cos * y]]
    return np.moveaxis(np.array(rows), -1, 0)
