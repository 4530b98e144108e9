"""Where the windows and resizes of a recipe lie, and which sizes leave them.

All sizes follow from the stored height and width, so numpy computes every window before a byte is
decoded, and the graph decodes only what the last window will show (see `draws`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from penstock.augment.geometric_ops import (
    CenterCrop,
    Flipping,
    Geometric,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    Size,
)
from penstock.cache.errors import RecipeError
from penstock.readers.types import ANY_SIZE, ImageRange

Antialias = bool | Literal["auto"]


@dataclass(frozen=True, slots=True)
class Window:
    """A window or a flip, from the operation at `index` of the recipe."""

    index: int
    op: CenterCrop | RandomCrop | RandomResizedCrop | Flipping


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Windows of an image, then one resize, then windows of its result.

    antialias: "auto": per sample, where it shrinks by more than 2. size: as in `Resize`; None: no
    resize (then `after` is empty). out: height and width that leave it, None if they differ
    between samples. padding: the crop of `before` that may reach outside, if any; then what all of
    `before` show is padded before it is resized.
    """

    before: tuple[Window, ...] = ()
    size: Size | None = None
    antialias: Antialias = True
    after: tuple[Window, ...] = ()
    out: tuple[int, int] | None = None
    padding: RandomCrop | None = None

    @property
    def crops(self) -> bool:
        """Whether less than the whole input, or another size of it, leaves it."""
        crop = CenterCrop, RandomCrop, RandomResizedCrop
        return self.size is not None or any(isinstance(w.op, crop) for w in self.before)


def plan_geometries(
    geometric: list[tuple[int, Geometric]], images: ImageRange
) -> tuple[tuple[Geometry, ...], ImageRange]:
    """The geometries, and the sizes that leave the last one."""
    geometries = [Geometry(out=images.fixed)]
    sizes = images
    for index, op in geometric:
        if isinstance(op, CenterCrop | RandomCrop):
            if isinstance(op, RandomCrop) and (op.padding or not _holds(sizes, op)):
                geometries = _with_padding(geometries, op)
            sizes = _cropped(op, sizes, is_known=images != ANY_SIZE)
            geometries[-1] = _with_window(geometries[-1], Window(index, op), sizes)
        elif isinstance(op, RandomHorizontalFlip | RandomVerticalFlip):
            geometries[-1] = _with_window(geometries[-1], Window(index, op), sizes)
        elif isinstance(op, RandomResizedCrop):
            geometries[-1] = _with_window(geometries[-1], Window(index, op), None)
            sizes = _exactly(op.height_width)
            geometries = _with_resize(geometries, op.height_width, op.antialias, sizes)
        else:
            sizes = _resized(op, sizes)
            geometries = _with_resize(geometries, op.size, op.antialias, sizes)
    return tuple(geometries), sizes


def _with_window(geometry: Geometry, window: Window, sizes: ImageRange | None) -> Geometry:
    out = sizes.fixed if sizes else None
    if geometry.size is None:
        return replace(geometry, before=(*geometry.before, window), out=out)
    return replace(geometry, after=(*geometry.after, window), out=out)


def _with_padding(geometries: list[Geometry], op: RandomCrop) -> list[Geometry]:
    if any(geometry.padding for geometry in geometries):
        raise RecipeError("Two RandomCrop that pad in one recipe: keep one.")
    if geometries[-1].crops:
        # What it shows outside is padding, though the image went on there before it was cropped.
        return [*geometries, Geometry(padding=op)]
    return [*geometries[:-1], replace(geometries[-1], padding=op)]


def _with_resize(
    geometries: list[Geometry], size: Size, antialias: Antialias, sizes: ImageRange
) -> list[Geometry]:
    last = geometries[-1]
    if last.size is None:
        return [*geometries[:-1], replace(last, size=size, antialias=antialias, out=sizes.fixed)]
    return [*geometries, Geometry(size=size, antialias=antialias, out=sizes.fixed)]


def _exactly(size: tuple[int, int]) -> ImageRange:
    height, width = size
    return ImageRange(min_height=height, max_height=height, min_width=width, max_width=width)


def _cropped(op: CenterCrop | RandomCrop, sizes: ImageRange, *, is_known: bool) -> ImageRange:
    if _holds(sizes, op) or (isinstance(op, RandomCrop) and op.pad_if_needed):
        return _exactly(op.height_width)
    height, width = op.height_width
    found = (
        f"as small as {sizes.min_height} x {sizes.min_width}"
        if is_known
        else "of sizes that nobody knows before they are read"
    )
    remedies = ["Put a Resize in front of it"]
    remedies += ["crop less"] if is_known else []
    remedies += ["pass pad_if_needed=True"] if isinstance(op, RandomCrop) else []
    raise RecipeError(
        f"{type(op).__name__}: wanted {height} x {width} (height x width) of images {found}. "
        f"{', or '.join(remedies)}."
    )


def _holds(sizes: ImageRange, op: CenterCrop | RandomCrop) -> bool:
    """Whether the smallest image is as large as a window, its padding counted."""
    height, width = op.height_width
    padding = 2 * op.padding_px if isinstance(op, RandomCrop) else 0
    return height <= sizes.min_height + padding and width <= sizes.min_width + padding


def _resized(op: Resize, sizes: ImageRange) -> ImageRange:
    if isinstance(op.size, tuple):
        return _exactly(op.size)
    if sizes.fixed:
        return _exactly(short_side(op.size, height=sizes.fixed[0], width=sizes.fixed[1]))
    short = op.size
    return ImageRange(
        min_height=max(short, short * sizes.min_height // sizes.max_width),
        max_height=max(short, short * sizes.max_height // sizes.min_width),
        min_width=max(short, short * sizes.min_width // sizes.max_height),
        max_width=max(short, short * sizes.max_width // sizes.min_height),
    )


def short_side(short: int, *, height: int, width: int) -> tuple[int, int]:
    """Height and width after a resize of the short side, rounded as torchvision rounds."""
    if height <= width:
        return short, short * width // height
    return short * height // width, short
