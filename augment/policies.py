"""Choose the operation and strength that a learnt policy gives each sample; numpy only.

The tables are torchvision's (transforms/autoaugment.py, v0.13 and later), which follow RandAugment
(Cubuk et al. 2019), TrivialAugment (Müller and Hutter 2021) and AutoAugment (Cubuk et al. 2018).
A policy has *rounds*, one after the other; in each a sample gets one operation. `graph_definition`
applies the chosen operations to the pixels.

Strengths are float64 and torchvision's are float32, so a translation by nearly a whole number of
pixels may differ by one pixel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment.operations import AutoAugment, RandAugment, TrivialAugmentWide

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from penstock.augment.draw_keys import Uniform

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
"""The kinds of pixel operations. Shears, translations and rotations are "affine"; an inversion is a
solarization from 0 on."""


@dataclass(frozen=True, slots=True)
class SpaceEntry:
    """One operation that a policy chooses from.

    low, high: its strength in the first and the last bin. signed: the strength is negated for half
    of the samples. whole: the strength is rounded to a whole number.
    """

    kind: str
    name: str
    low: float = 0.0
    high: float = 0.0
    signed: bool = False
    whole: bool = False

    def strength(self, bins: NDArray[np.int64], count: int) -> Floats:
        """Return the strengths of these bins out of `count` evenly spaced ones. It multiplies
        first, so that 32 * 15 / 30 is 16."""
        value: Floats = self.low + (self.high - self.low) * bins / (count - 1)
        return np.rint(value) if self.whole else value


_ENHANCE = {"Brightness": "brightness", "Color": "color", "Contrast": "contrast"}
_ENHANCE |= {"Sharpness": "sharpness"}


def _space(
    *, shear: float, across: float, down: float, angle: float, enhance: float, bits: int
) -> tuple[SpaceEntry, ...]:
    """Return the operations in torchvision's order, with these largest strengths.

    across, down: translations in pixels. angle: degrees. bits: bits that posterize keeps in the
    last bin.
    """
    return (
        SpaceEntry("identity", "Identity"),
        SpaceEntry("affine", "ShearX", high=shear, signed=True),
        SpaceEntry("affine", "ShearY", high=shear, signed=True),
        SpaceEntry("affine", "TranslateX", high=across, signed=True),
        SpaceEntry("affine", "TranslateY", high=down, signed=True),
        SpaceEntry("affine", "Rotate", high=angle, signed=True),
        *(SpaceEntry(kind, name, high=enhance, signed=True) for name, kind in _ENHANCE.items()),
        SpaceEntry("posterize", "Posterize", low=8, high=bits, whole=True),
        SpaceEntry("solarize", "Solarize", low=255),
        SpaceEntry("autocontrast", "AutoContrast"),
        SpaceEntry("equalize", "Equalize"),
    )


_INVERT = SpaceEntry("solarize", "Invert")
_TRANSLATE = 150 / 331  # share of the image's side, in AutoAugment and RandAugment
_AUTO_BINS = 10
_IDENTITY = 0  # its place in every space


def operation_space(op: Policy, height: int, width: int) -> tuple[SpaceEntry, ...]:
    """Return the operations that a policy chooses from, for images of this size."""
    if isinstance(op, TrivialAugmentWide):
        return _space(shear=0.99, across=32, down=32, angle=135, enhance=0.99, bits=2)
    across, down = _TRANSLATE * width, _TRANSLATE * height
    usual = _space(shear=0.3, across=across, down=down, angle=30, enhance=0.9, bits=4)
    return (*usual, _INVERT) if isinstance(op, AutoAugment) else usual


# Pairs of operation, probability and bin of ten ("-": no strength), as printed in the papers.
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


def learnt_pairs(policy: str) -> tuple[tuple[tuple[str, float, int], ...], ...]:
    """Return the pairs of an AutoAugment policy: each has (operation, probability, bin) twice."""

    def rule(text: str) -> tuple[str, float, int]:
        name, probability, at = text.split()
        return name, float(probability), 0 if at == "-" else int(at)

    pairs = _LEARNT[policy].strip().replace("\n", "|").split("|")
    return tuple(tuple(rule(text) for text in pair.split(",")) for pair in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChoice:
    """The choices of one round for each sample, shape (n,) each.

    entry: index of the operation in the space. at: bin of the strength. negated: True if the
    strength is negated, if it has a sign.
    """

    entry: NDArray[np.int64]
    at: NDArray[np.int64]
    negated: NDArray[np.bool_]


def round_count(op: Policy) -> int:
    """Return the number of operations that each sample gets, one after the other."""
    if isinstance(op, RandAugment):
        return op.num_ops
    return 2 if isinstance(op, AutoAugment) else 1


def bin_count(op: Policy) -> int:
    """Return the number of strengths of an operation."""
    return _AUTO_BINS if isinstance(op, AutoAugment) else op.num_magnitude_bins


def choose(op: Policy, uniform: Uniform, height: int, width: int) -> list[PolicyChoice]:
    """Choose each sample's operation in each round, for images of this size.

    Draws, in their order: RandAugment uses an operation and a sign for each round;
    TrivialAugmentWide an operation, a bin and a sign; AutoAugment a pair, then for each of its two
    rounds one for its probability and a sign.
    """
    if isinstance(op, AutoAugment):
        return _learnt_choices(op, uniform)
    count = len(operation_space(op, height, width))
    if isinstance(op, TrivialAugmentWide):
        which, at, sign = uniform(3)
        return [
            PolicyChoice(entry=_pick(which, count), at=_pick(at, bin_count(op)), negated=sign < 0.5)
        ]
    draws = uniform(2 * op.num_ops)
    at = np.full(draws.shape[1], op.magnitude)
    return [
        PolicyChoice(entry=_pick(which, count), at=at, negated=sign < 0.5)
        for which, sign in zip(draws[::2], draws[1::2], strict=True)
    ]


def _learnt_choices(op: AutoAugment, uniform: Uniform) -> list[PolicyChoice]:
    entry, probability, at = _learnt_table(op)
    pair, *rest = uniform(1 + 2 * round_count(op))
    number = _pick(pair, len(entry))
    return [
        PolicyChoice(
            entry=np.where(happens < probability[number, k], entry[number, k], _IDENTITY),
            at=at[number, k],
            negated=sign < 0.5,
        )
        for k, (happens, sign) in enumerate(zip(rest[::2], rest[1::2], strict=True))
    ]


@lru_cache(maxsize=8)
def _learnt_table(op: AutoAugment) -> tuple[NDArray[np.int64], Floats, NDArray[np.int64]]:
    """Return index in the space, probability and bin, shape (pairs, 2) each."""
    place = {entry.name: number for number, entry in enumerate(operation_space(op, 1, 1))}
    pairs = learnt_pairs(op.policy)
    entry = np.array([[place[name] for name, _, _ in pair] for pair in pairs])
    probability = np.array([[share for _, share, _ in pair] for pair in pairs])
    return entry, probability, np.array([[at for _, _, at in pair] for pair in pairs])


def _pick(draws: Floats, count: int) -> NDArray[np.int64]:
    return (draws * count).astype(np.int64)


def policy_inputs(op: Policy) -> list[tuple[str, str, int]]:
    """Return suffix, dtype and a sample's number of dimensions for each argument input of a policy.

    kindK: index in KINDS of round K's operation, int32. matrixK: matrix from output pixels to input
    pixels, float32, (2, 3). valueK: value of the operation, float32; see `_VALUES`.
    """
    return [
        (f"{name}{number}", dtype, dimensions)
        for number in range(round_count(op))
        for name, dtype, dimensions in (
            ("kind", "int32", 0),
            ("matrix", "float32", 2),
            ("value", "float32", 0),
        )
    ]


def policy_draws(op: Policy, uniform: Uniform, height: int, width: int) -> dict[str, NDArray[Any]]:
    """Return the argument inputs that `policy_inputs` lists, one row per sample.

    uniform: keyed draws. height, width: size in pixels of all images that the policy gets.
    """
    table = tabulate(op, height, width)
    inputs: dict[str, NDArray[Any]] = {}
    for number, choice in enumerate(choose(op, uniform, height, width)):
        cell = choice.entry, choice.at, choice.negated.astype(np.int64)
        inputs[f"kind{number}"] = table.kind[choice.entry]
        inputs[f"matrix{number}"] = table.matrix[cell]
        inputs[f"value{number}"] = table.value[cell]
    return inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTable:
    """The arguments for each (operation, bin, negated). A look-up takes 1 us per sample.

    kind: int32, (entries,). strength: float64, (entries, bins, 2). value: the graph's argument,
    float32, of the same shape. matrix: float32, (entries, bins, 2, 2, 3).
    """

    kind: NDArray[np.int32]
    strength: Floats
    value: NDArray[np.float32]
    matrix: NDArray[np.float32]


@lru_cache(maxsize=32)
def tabulate(op: Policy, height: int, width: int) -> PolicyTable:
    """Return a policy's table for images of this size."""
    entries = operation_space(op, height, width)
    strengths = [_strengths(entry, bin_count(op)) for entry in entries]
    pairs = list(zip(entries, strengths, strict=True))
    return PolicyTable(
        kind=np.array([KINDS.index(entry.kind) for entry in entries], np.int32),
        strength=np.array(strengths),
        value=np.array([_value(entry, strength) for entry, strength in pairs], np.float32),
        matrix=np.array(
            [_matrices(entry.name, strength, height, width) for entry, strength in pairs],
            np.float32,
        ),
    )


def _strengths(entry: SpaceEntry, count: int) -> Floats:
    """Return the strengths, (bins, 2): positive, and negated if the entry has a sign."""
    strength = entry.strength(np.arange(count), count)
    return np.stack([strength, -strength if entry.signed else strength], axis=-1)


_VALUES: Mapping[str, Callable[[Floats], Floats]] = {
    # Factors of torchvision's adjust_* functions: 1 leaves the image as it is.
    **dict.fromkeys(_ENHANCE.values(), lambda strength: 1 + strength),
    # The mask that keeps the upper bits.
    "posterize": lambda bits: 256 - 2.0 ** (8 - bits),
    # Values of at least the threshold are inverted, so it is rounded up.
    "solarize": np.ceil,
}


def _value(entry: SpaceEntry, strength: Floats) -> Floats:
    value = _VALUES.get(entry.kind)
    return value(strength) if value else np.zeros_like(strength)


def _matrices(name: str, strength: Floats, height: int, width: int) -> Floats:
    """Return matrices from (x, y, 1) of an output point to (x, y) of the input; pixel k covers
    [k, k + 1).

    As in torchvision's affine and rotate: shears about the upper left corner, translations by whole
    pixels (rounded towards 0), counterclockwise rotations about the middle of the image.
    """
    if name == "Rotate":
        return rotation(strength, height, width)
    matrix = np.zeros((*strength.shape, 2, 3))
    matrix[..., 0, 0] = matrix[..., 1, 1] = 1
    if name == "ShearX":
        matrix[..., 0, 1] = strength
    elif name == "ShearY":
        matrix[..., 1, 0] = strength
    elif name == "TranslateX":
        matrix[..., 0, 2] = -np.trunc(strength)
    elif name == "TranslateY":
        matrix[..., 1, 2] = -np.trunc(strength)
    return matrix


def rotation(degrees: Floats, height: int, width: int) -> Floats:
    """Return matrices from output to input points for counterclockwise rotations about the middle,
    shape (..., 2, 3)."""
    radians = degrees * (math.pi / 180)
    cos, sin = np.cos(radians), np.sin(radians)
    x, y = width / 2, height / 2
    rows = [[cos, -sin, x - cos * x + sin * y], [sin, cos, y - sin * x - cos * y]]
    return np.moveaxis(np.array(rows), (0, 1), (-2, -1))
