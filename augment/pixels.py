"""Pixel operations: what comes after the windows, on images that all have one size.

Each kind is a row of `KINDS`: which argument inputs it has, how its draws become them (numpy, here)
and what is done to the pixels (`pixel_nodes`). All randomness comes from the keyed hash, as in
`draws`. Formulas and ranges are torchvision's (transforms.py and _functional_tensor.py).

Flips are folded into the last pass over the pixels, which mirrors for nothing, as long as no
operation stands between that sees left and right differently; else they happen in their place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment import pixel_nodes, policies, policy_nodes
from penstock.augment.ops import (
    Apply,
    AutoAugment,
    ColorJitter,
    GaussianBlur,
    Pixel,
    RandAugment,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomRotation,
    TrivialAugmentWide,
)
from penstock.cache.errors import RecipeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from penstock.augment.policies import Uniform

    Floats = NDArray[np.float64]
    Arrays = dict[str, NDArray[Any]]

ATTEMPTS = 10  # torchvision's RandomErasing.get_params
_BLUR_REACH = 4  # standard deviations; what lies beyond weighs 6e-5, 0.02 of 255


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the images that an operation gets, in pixels."""

    height: int
    width: int
    channels: int


@dataclass(frozen=True, slots=True)
class Step:
    """A pixel operation, or RandomErasing, from place `index` of the recipe."""

    index: int
    op: Any

    def name(self, suffix: str) -> str:
        """Of one of its argument inputs."""
        return f"{type(self.op).__name__}{self.index}.{suffix}"


@dataclass(frozen=True, slots=True)
class Mirror:
    """Flips that are made here, as one. stages: those among the windows too."""

    name: str
    flips: tuple[tuple[int, RandomHorizontalFlip], ...]
    stages: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How one type of operation works.

    inputs: suffix, numpy dtype and dimensions of a sample, of each argument input. draw: their
    values, one row per sample. nodes: the operation in a DALI graph, uint8 HWC in and out (but for
    RandomErasing: CHW of the batch's dtype). mirrors: whether flipping before or after gives the
    same. gray: what to do instead, where it can't be applied to images of one channel.
    """

    inputs: Callable[[Any], list[tuple[str, str, int]]]
    draw: Callable[[Any, Uniform, Shape], Arrays]
    nodes: Callable[[Any, Any, dict[str, Any], Shape], Any]
    mirrors: bool = False
    gray: Callable[[Any], bool] = lambda _: True


def kind_of(op: Any) -> Kind:
    """The row of the table."""
    return KINDS[type(op)]


def check_pixels(steps: Iterable[Step], shape: Shape) -> None:
    """Raises RecipeError where an operation can't work on images of this shape."""
    for step in steps:
        op = step.op
        if shape.channels == 1 and not kind_of(op).gray(op):
            raise RecipeError(
                f'{op} stands in a recipe of Decode("gray") and works on colours. Leave it out, or '
                'decode to "rgb"; of ColorJitter grey images take brightness= and contrast=.'
            )
        if isinstance(op, GaussianBlur):
            _check_kernel(op, shape)
        if isinstance(op, RandomErasing):
            count = len(op.value) if isinstance(op.value, tuple) else 1
            if count not in (1, shape.channels):
                raise RecipeError(
                    f"RandomErasing(value=...): got {count} numbers, wanted 1 or "
                    f"{shape.channels}, one per channel."
                )


def _check_kernel(op: GaussianBlur, shape: Shape) -> None:
    columns, rows = op.kernel_size  # type: ignore[misc]  # a pair since its birth
    if rows // 2 >= shape.height or columns // 2 >= shape.width:
        raise RecipeError(
            f"GaussianBlur(kernel_size=...): got {columns} x {rows} (width x height) for images of "
            f"{shape.width} x {shape.height}, wanted less than twice their size: beyond the edge "
            "the image is mirrored once."
        )


def place_mirrors(
    flips: bool, steps: Sequence[Step]
) -> tuple[tuple[Step | Mirror, ...], Mirror | None]:
    """The steps with their flips put where they are to be made, and the flip of the last pass.

    flips: whether the stages before may flip.
    """
    placed: list[Step | Mirror] = []
    waiting: list[tuple[int, RandomHorizontalFlip]] = []
    stages = flips
    for step in steps:
        if isinstance(step.op, RandomHorizontalFlip):
            waiting.append((step.index, step.op))
            continue
        if not kind_of(step.op).mirrors and (waiting or stages):
            placed.append(Mirror(f"mirror{step.index}", tuple(waiting), stages))
            waiting, stages = [], False
        placed.append(step)
    last = Mirror("mirror", tuple(waiting), stages) if waiting or stages else None
    return tuple(placed), last


def step_inputs(step: Step | Mirror) -> list[tuple[str, str, int]]:
    """Name, numpy dtype and dimensions of a sample, of each argument input of a step."""
    if isinstance(step, Mirror):
        return [(step.name, "int32", 0)]
    inputs = kind_of(step.op).inputs(step.op)
    return [(step.name(suffix), dtype, ndim) for suffix, dtype, ndim in inputs]


def step_draws(
    step: Step | Mirror,
    shape: Shape,
    *,
    flipped: NDArray[np.bool_],
    uniform: Callable[[int], Uniform],
) -> Arrays:
    """The argument inputs of a step, by name, C-contiguous.

    flipped: whether the stages flip the sample. uniform: the draws of the operation at a place.
    """
    if isinstance(step, Mirror):
        flip = flipped if step.stages else np.zeros_like(flipped)
        for index, op in step.flips:
            flip = flip ^ (uniform(index)(1)[0] < op.p)
        return {step.name: flip.astype(np.int32)}
    drawn = kind_of(step.op).draw(step.op, uniform(step.index), shape)
    return {
        step.name(suffix): np.ascontiguousarray(drawn[suffix], dtype)
        for suffix, dtype, _ in kind_of(step.op).inputs(step.op)
    }


def step_nodes(step: Step | Mirror, images: Any, inputs: dict[str, Any], shape: Shape) -> Any:
    """The images after a step. inputs: of the whole graph, by name."""
    if isinstance(step, Mirror):
        return pixel_nodes.flip(images, inputs[step.name])
    kind = kind_of(step.op)
    own = {suffix: inputs[step.name(suffix)] for suffix, _, _ in kind.inputs(step.op)}
    return kind.nodes(step.op, images, own, shape)


# -- the draws of each kind


def _between(pair: Any, draws: Floats) -> Floats:
    low, high = pair
    return np.asarray(low + (high - low) * draws)


def _jitter_inputs(op: ColorJitter) -> list[tuple[str, str, int]]:
    return [(name, "float32", 0) for name in pixel_nodes.jitters(op)]


def _jitter_draw(op: ColorJitter, uniform: Uniform, _: Shape) -> Arrays:
    # One draw for each, used or not: brightness stays the same when hue is switched on.
    draws = dict(zip(("brightness", "contrast", "saturation", "hue"), uniform(4), strict=True))
    return {name: _between(getattr(op, name), draws[name]) for name in pixel_nodes.jitters(op)}


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
    # Cut to 24 bits: rounded to float32, the largest draws would be 1.
    return {"draws": np.floor(uniform(op.draws).T * 2**24) / 2**24}


def _policy_nodes(op: Any, images: Any, inputs: dict[str, Any], _: Shape) -> Any:
    return policy_nodes.policy_nodes(op, images, inputs)


def _policy_draws(op: Any, uniform: Uniform, shape: Shape) -> Arrays:
    return policies.policy_draws(op, uniform, shape.height, shape.width)


_POLICY = Kind(
    inputs=policies.policy_inputs,
    draw=_policy_draws,
    nodes=_policy_nodes,
    gray=lambda _: False,
)

KINDS: dict[type, Kind] = {
    ColorJitter: Kind(
        inputs=_jitter_inputs,
        draw=_jitter_draw,
        nodes=pixel_nodes.jitter,
        mirrors=True,
        gray=lambda op: not {"saturation", "hue"} & set(pixel_nodes.jitters(op)),
    ),
    RandomGrayscale: Kind(
        inputs=lambda _: [("on", "bool", 0)],
        draw=lambda op, uniform, _: {"on": uniform(1)[0] < op.p},
        nodes=pixel_nodes.grayscale,
        mirrors=True,
        gray=lambda _: False,
    ),
    GaussianBlur: Kind(
        inputs=lambda _: [("on", "bool", 0), ("sigma", "float32", 0), ("window", "int32", 1)],
        draw=_blur_draw,
        nodes=pixel_nodes.blur,
        mirrors=True,
    ),
    RandomRotation: Kind(
        inputs=lambda _: [("angle", "float32", 0)],
        draw=lambda op, uniform, _: {"angle": _between(op.degrees, uniform(1)[0])},
        nodes=pixel_nodes.rotate,
    ),
    RandAugment: _POLICY,
    TrivialAugmentWide: _POLICY,
    AutoAugment: _POLICY,
    Apply: Kind(
        inputs=lambda _: [("draws", "float32", 1)],
        draw=_apply_draw,
        nodes=pixel_nodes.apply,
    ),
    RandomErasing: Kind(
        inputs=lambda _: [("anchor", "float32", 1), ("shape", "float32", 1)],
        draw=_erase_draw,
        nodes=pixel_nodes.erase,
    ),
}
PIXELS = tuple(kind for kind in KINDS if issubclass(kind, Pixel))
