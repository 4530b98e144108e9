"""From draws to the arguments of each pixel operation: numpy only.

All randomness comes from the keyed hash, as in `draws`. Formulas and ranges are torchvision's
(transforms.py and _functional_tensor.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment import policies
from penstock.augment.ops import (
    Apply,
    AutoAugment,
    ColorJitter,
    GaussianBlur,
    RandAugment,
    RandomErasing,
    RandomGrayscale,
    RandomRotation,
    TrivialAugmentWide,
)
from penstock.augment.pixels import Mirror, jitters

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from penstock.augment.keyed import Uniform
    from penstock.augment.pixels import PlacedOperation, Shape

    Floats = NDArray[np.float64]
    Arrays = dict[str, NDArray[Any]]

ATTEMPTS = 10  # torchvision's RandomErasing.get_params
_BLUR_REACH = 4  # standard deviations; what lies beyond weighs 6e-5, 0.02 of 255


@dataclass(frozen=True, slots=True)
class Arguments:
    """How one type of operation gets its arguments.

    inputs: suffix, numpy dtype and dimensions of a sample, of each argument input. draw: their
    values, one row per sample.
    """

    inputs: Callable[[Any], list[tuple[str, str, int]]]
    draw: Callable[[Any, Uniform, Shape], Arrays]


def argument_inputs(operation: PlacedOperation | Mirror) -> list[tuple[str, str, int]]:
    """Name, numpy dtype and dimensions of a sample, of each argument input of an operation."""
    if isinstance(operation, Mirror):
        return [(operation.name, "int32", 0)]
    inputs = ARGUMENTS[type(operation.op)].inputs(operation.op)
    return [(operation.name(suffix), dtype, ndim) for suffix, dtype, ndim in inputs]


def argument_values(
    operation: PlacedOperation | Mirror,
    shape: Shape,
    *,
    flipped: NDArray[np.bool_],
    uniform: Callable[[int], Uniform],
) -> Arrays:
    """The argument inputs of an operation, by name, C-contiguous.

    flipped: whether the windows flip the sample. uniform: the draws of the operation at a place.
    """
    if isinstance(operation, Mirror):
        flip = flipped if operation.windows else np.zeros_like(flipped)
        for index, op in operation.flips:
            flip = flip ^ (uniform(index)(1)[0] < op.p)
        return {operation.name: flip.astype(np.int32)}
    arguments = ARGUMENTS[type(operation.op)]
    values = arguments.draw(operation.op, uniform(operation.index), shape)
    return {
        operation.name(suffix): np.ascontiguousarray(values[suffix], dtype)
        for suffix, dtype, _ in arguments.inputs(operation.op)
    }


def _between(pair: Any, draws: Floats) -> Floats:
    low, high = pair
    return np.asarray(low + (high - low) * draws)


def _jitter_inputs(op: ColorJitter) -> list[tuple[str, str, int]]:
    return [(name, "float32", 0) for name in jitters(op)]


def _jitter_draw(op: ColorJitter, uniform: Uniform, _: Shape) -> Arrays:
    # One draw for each, used or not: brightness stays the same when hue is switched on.
    draws = dict(zip(("brightness", "contrast", "saturation", "hue"), uniform(4), strict=True))
    return {name: _between(getattr(op, name), draws[name]) for name in jitters(op)}


def _blur_draw(op: GaussianBlur, uniform: Uniform, _: Shape) -> Arrays:
    on, width = uniform(2)
    sigma = _between(op.sigma, width)
    # DALI takes height first; torchvision's pairs are (horizontal, vertical). A kernel's far ends
    # weigh nothing where sigma is small, and the CPU's time is proportional to its size.
    kernel = np.array(op.kernel_size)[::-1]
    reach = 2 * np.ceil(_BLUR_REACH * sigma) + 1
    return {
        "on": on < op.p,
        "sigma": sigma,
        "window": np.minimum(kernel[None, :], reach[:, None]),
    }


def _erase_draw(op: RandomErasing, uniform: Uniform, shape: Shape) -> Arrays:
    """torchvision's RandomErasing.get_params: the first of 10 windows that is smaller than the
    image, at a random place; if there is none, nothing is erased."""
    on, top, left, *rest = uniform(3 + 2 * ATTEMPTS)
    areas, ratios = np.stack(rest[:ATTEMPTS]), np.stack(rest[ATTEMPTS:])
    area = shape.height * shape.width * _between(op.scale, areas)
    ratio = np.exp(_between([math.log(side) for side in op.ratio], ratios))
    rows, columns = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
    fits = (rows < shape.height) & (columns < shape.width)
    first, sample = fits.argmax(axis=0), np.arange(len(on))
    erases = (on < op.p) & fits.any(axis=0)
    size = np.stack([rows[first, sample], columns[first, sample]], axis=1) * erases[:, None]
    room = np.array([shape.height, shape.width]) - size + 1
    anchor = np.floor(np.stack([top, left], axis=1) * room) * erases[:, None]
    return {"anchor": anchor, "shape": size}


def _apply_draw(op: Apply, uniform: Uniform, _: Shape) -> Arrays:
    # Truncated to 24 bits: rounded to float32, the largest draws would be 1.
    return {"draws": np.floor(uniform(op.draws).T * 2**24) / 2**24}


def _policy_draw(op: Any, uniform: Uniform, shape: Shape) -> Arrays:
    return policies.policy_draws(op, uniform, shape.height, shape.width)


_POLICY = Arguments(policies.policy_inputs, _policy_draw)

# Where to add an operation: see `ops.Pixel`.
ARGUMENTS: dict[type, Arguments] = {
    ColorJitter: Arguments(_jitter_inputs, _jitter_draw),
    RandomGrayscale: Arguments(
        lambda _: [("on", "bool", 0)],
        lambda op, uniform, _: {"on": uniform(1)[0] < op.p},
    ),
    GaussianBlur: Arguments(
        lambda _: [("on", "bool", 0), ("sigma", "float32", 0), ("window", "int32", 1)],
        _blur_draw,
    ),
    RandomRotation: Arguments(
        lambda _: [("angle", "float32", 0)],
        lambda op, uniform, _: {"angle": _between(op.degrees, uniform(1)[0])},
    ),
    RandAugment: _POLICY,
    TrivialAugmentWide: _POLICY,
    AutoAugment: _POLICY,
    Apply: Arguments(lambda _: [("draws", "float32", 1)], _apply_draw),
    RandomErasing: Arguments(
        lambda _: [("anchor", "float32", 1), ("shape", "float32", 1)], _erase_draw
    ),
}
"""How each type of pixel operation, and RandomErasing, gets its arguments."""
