"""Pixel operations in a recipe: what comes after the windows, on images that all have one size.

Here stands what a recipe must know of them to be checked: where they are placed, which need
colours, and where flips are made. Flips are folded into the last pass over the pixels, which
mirrors for nothing, as long as no operation stands between that sees left and right differently;
else they happen in their place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from penstock.augment.geometric_ops import Flipping, RandomHorizontalFlip, RandomVerticalFlip
from penstock.augment.ops import (
    AutoAugment,
    ColorJitter,
    GaussianBlur,
    Pixel,
    RandAugment,
    RandomErasing,
    RandomGrayscale,
    TrivialAugmentWide,
)
from penstock.cache.errors import RecipeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PIXELS: tuple[type, ...] = get_args(Pixel)
"""The types of pixel operations."""

SYMMETRIC = (ColorJitter, RandomGrayscale, GaussianBlur)
"""Those that give the same whether the image is flipped before or after."""

_NEED_COLOURS = (RandomGrayscale, RandAugment, TrivialAugmentWide, AutoAugment)


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of the images that an operation gets, in pixels."""

    height: int
    width: int
    channels: int


@dataclass(frozen=True, slots=True)
class PlacedOperation:
    """A pixel operation, or RandomErasing, from place `index` of the recipe."""

    index: int
    op: Any

    def name(self, suffix: str) -> str:
        """The name of one of its argument inputs."""
        return f"{type(self.op).__name__}{self.index}.{suffix}"


@dataclass(frozen=True, slots=True)
class Mirror:
    """Flips that are made here, as one. windows: those among the windows too. vertical: top and
    bottom change places, not left and right."""

    name: str
    flips: tuple[tuple[int, Flipping], ...]
    windows: bool
    vertical: bool = False


def jitters(op: ColorJitter) -> list[str]:
    """Which of the four an operation changes, in the order in which it does."""
    still = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0}
    return [name for name, value in still.items() if getattr(op, name) != (value, value)]


def needs_colours(op: Any) -> bool:
    """Whether an operation means nothing for images of one channel."""
    if isinstance(op, ColorJitter):
        return not {"saturation", "hue"}.isdisjoint(jitters(op))
    return isinstance(op, _NEED_COLOURS)


def check_pixels(placed: Iterable[PlacedOperation], shape: Shape) -> None:
    """Raises RecipeError where an operation can't work on images of this shape."""
    for each in placed:
        op = each.op
        if shape.channels == 1 and needs_colours(op):
            raise RecipeError(
                f'{op} stands in a recipe of Decode("gray") and works on colours. Leave it out, or '
                'decode to "rgb"; of ColorJitter, brightness= and contrast= work on grey images.'
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
    flips: bool, operations: Sequence[PlacedOperation], *, upends: bool = False
) -> tuple[tuple[PlacedOperation | Mirror, ...], Mirror | None]:
    """The operations with their flips put where they are to be made, and the flip of the last pass.

    flips, upends: whether the windows before may flip, left to right and upside down. The last pass
    does only the first.
    """
    placed: list[PlacedOperation | Mirror] = []
    if upends:
        placed.append(Mirror("upend", (), windows=True, vertical=True))
    waiting: list[tuple[int, RandomHorizontalFlip]] = []
    windows = flips
    for operation in operations:
        if isinstance(operation.op, RandomHorizontalFlip):
            waiting.append((operation.index, operation.op))
            continue
        if isinstance(operation.op, RandomVerticalFlip):
            flip = ((operation.index, operation.op),)
            placed.append(Mirror(f"upend{operation.index}", flip, windows=False, vertical=True))
            continue
        if not isinstance(operation.op, SYMMETRIC) and (waiting or windows):
            placed.append(Mirror(f"mirror{operation.index}", tuple(waiting), windows))
            waiting, windows = [], False
        placed.append(operation)
    last = Mirror("mirror", tuple(waiting), windows) if waiting or windows else None
    return tuple(placed), last
