"""Define the base classes of operations: what one class needs to be an operation of a recipe.

An operation is a frozen dataclass. It has torchvision's arguments, checks them when it is created,
and holds all that is specific to it: its draws, its DALI nodes, and how masks, boxes and keypoints
follow it. No other module knows single operations, so an operation of another package is one class
in one file (docs/howto/operations.md has examples).

- `ImageOperation` changes the pixels of images, which usually all have one size.
- `GeometricOperation` crops, resizes or flips images of any size, before they are decoded in full.
- `FieldOperation` changes fields that need no image.
"""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast, dataclass_transform

import numpy as np

from penstock.augment.argument_checks import COMMON_CHECKS, Check, argument
from penstock.cache import RecipeError, explain_arguments

if TYPE_CHECKING:
    from penstock.augment.draw_keys import Uniform
    from penstock.readers import Floats, ImageRange, Ints, Numbers
    from penstock.readers.fieldtypes import FieldType

Values = dict[str, "Numbers"]
"""Drawn values by name, one row per sample."""

Size = int | tuple[int, int]
DType = Literal["float32", "float16", "uint8"]
Antialias = bool | Literal["auto"]
Per = Literal["sample", "batch"]


class Stage(IntEnum):
    """The place of an operation in a recipe. Operations stand in this order, except that flips may
    also come after pixel operations, and operations on fields anywhere."""

    MAP = 0
    FIELD = 1
    DECODE = 2
    GEOMETRY = 3
    PIXELS = 4
    NORMALIZE = 5
    ERASE = 6
    CAST = 7
    MIX = 8
    VIEWS = 9


ORDER = (
    "The order of a recipe is: Decode; operations that crop and resize; operations that change "
    "pixels; Normalize; RandomErasing; Cast; MixUp and CutMix. Flips come anywhere before Normalize"
)


@dataclass(frozen=True, slots=True)
class ImageShape:
    """The shape of the images that an operation gets, in pixels."""

    height: int
    width: int
    channels: int


C = TypeVar("C", bound=type)


@dataclass_transform(frozen_default=True, field_specifiers=(argument,))
def operation(cls: C) -> C:
    """Make a class of an operation a frozen dataclass, whose calls explain wrong arguments."""
    made: Any = dataclass(frozen=True, slots=True)(cls)
    return cast("C", explain_arguments(RecipeError)(made))


class Operation:
    """Base class of all operations of a recipe.

    stage: its place in a recipe. is_single: a recipe has it at most once. is_random: it has draws.
    or_else: what else helps if masks can't follow it, as the end of a message. checks: checks of
    arguments by name, for classes that don't declare them by `argument`; arguments with usual names
    (`COMMON_CHECKS`) need none.
    """

    __slots__ = ()

    stage: ClassVar[Stage]
    is_single: ClassVar[bool] = False
    is_random: ClassVar[bool] = False
    or_else: ClassVar[str] = ""
    checks: ClassVar[Mapping[str, Check]] = {}

    def __post_init__(self) -> None:
        """Replace each argument by its checked value."""
        checks = {**COMMON_CHECKS, **self.checks}
        for each in fields(self):  # type: ignore[arg-type]  # each operation is a dataclass
            if check := each.metadata.get("check") or checks.get(each.name):
                value = check(f"{type(self).__name__}({each.name}=...)", getattr(self, each.name))
                object.__setattr__(self, each.name, value)

    @property
    def moves_pixels(self) -> bool:
        """True if pixels of an image may be elsewhere afterwards."""
        return self.stage is Stage.GEOMETRY

    @property
    def can_be_followed(self) -> bool:
        """True if masks, boxes and keypoints can follow the pixels that it moves."""
        return True

    def selects(self, _name: str, /) -> bool:
        """Return True if an operation of a list for several fields applies to this image."""
        return True

    def fits_field(self, _name: str, _type: FieldType, /) -> bool:
        """Return True if it may be in the list of this field, which isn't an image."""
        return False

    def check(self, shape: ImageShape, dtype: DType, /) -> None:
        """Raise RecipeError if it can't work on images of this shape, in a batch of this dtype."""


class FieldOperation(Operation):
    """Base class of operations on fields that need no image. needs_final_boxes: it comes after all
    operations that move pixels."""

    __slots__ = ()

    stage = Stage.FIELD
    needs_final_boxes: ClassVar[bool] = False


class GeometricOperation(Operation):
    """Base class of operations that crop, resize or flip images of any size.

    All windows are computed before an image is decoded, and only what the last one shows is
    decoded. An operation first crops by `window` if `crops` is True, then resizes if `resizes` is
    True. fill, mask_fill: values of pixels, and of masks, that a window shows outside an image.
    gives_lists: its results may differ in size on purpose, so batches may have lists of images.
    needs_boxes: `window` needs the boxes of the images. per: "batch" if all images of a global
    batch have the same draws, on all ranks. interpolation: of its resize, "bilinear" or "bicubic".
    """

    __slots__ = ()

    stage = Stage.GEOMETRY
    crops: ClassVar[bool] = False
    gives_lists: ClassVar[bool] = False
    needs_boxes: ClassVar[bool] = False
    fill: float = 0.0
    mask_fill: int = 0
    per: Per = "sample"
    interpolation: str = "bilinear"

    @property
    def parts(self) -> tuple[GeometricOperation, ...]:
        """The operations of which it consists, in order, all with its draws; usually itself."""
        return (self,)

    @property
    def resize(self) -> tuple[Size, Antialias] | None:
        """The new size, as in `Resize`, and the filter; None if it doesn't resize."""
        return None

    @property
    def resizes(self) -> bool:
        """True if it resizes."""
        return self.resize is not None

    @property
    def filters(self) -> Antialias:
        """The filter of its resize."""
        return True if self.resize is None else self.resize[1]

    def resized(self, height: Ints, width: Ints, _: Uniform, /) -> tuple[Ints, Ints]:
        """Return the heights and widths of images after the resize, int64, (n,)."""
        assert self.resize is not None, self
        size, _filter = self.resize
        if isinstance(size, tuple):
            return np.full_like(height, size[0]), np.full_like(width, size[1])
        short = np.minimum(height, width)
        return size * height // short, size * width // short

    def boxed_window(
        self, height: Ints, width: Ints, uniform: Uniform, _boxes: Floats, _owner: Ints, /
    ) -> tuple[Ints, Ints, Ints, Ints]:
        """Return the windows as `window`, of an operation that needs the boxes of the images.

        _boxes: x1, y1, x2, y2 in the images that it gets, float64, (k, 4). _owner: the image of
        each, int64, (k,).
        """
        return self.window(height, width, uniform)

    def is_even(self, before: bool, after: ImageRange, /) -> bool:
        """Return True if all images of a batch have one size after it, although that may be
        another one in another batch. before: the same before it. after: sizes of the results."""
        return after.fixed is not None or (before and not self.crops)

    def sizes(self, sizes: ImageRange, /) -> ImageRange:
        """Return the sizes of the results. Raises RecipeError for images that don't fit."""
        return sizes

    def pads(self, _sizes: ImageRange, /) -> bool:
        """Return True if a window may reach outside an image of these sizes."""
        return False

    def window(self, height: Ints, width: Ints, _: Uniform, /) -> tuple[Ints, Ints, Ints, Ints]:
        """Return top, left, height and width of the window in each image, int64, (n,); the full
        image by default."""
        return np.zeros_like(height), np.zeros_like(width), height, width


class ImageOperation(Operation, metaclass=ABCMeta):
    """Base class of operations that change the pixels of images, which usually have one size.

    `draw` returns the numbers of each sample, and `node` builds DALI's nodes from them. An
    operation that moves pixels also has `geometry`. If one of the drawn values is called "on", a
    bool, only samples for which it is True pass through the node.

    p: probability with which an image is changed, unless the class has a `draw` of its own.
    commutes_with_flips: the result is the same if images are mirrored before or after it; a flip
    then costs nothing. needs_colours: it doesn't work on grey images. moves: it moves pixels, also
    without a `geometry` that masks, boxes and keypoints can follow. mask_fill: value of masks where
    the result shows nothing of the image. compiled: name of the pass of `view_kernels` that has the
    same result on the CPU, if there is one; `arguments` returns what it gets.
    """

    __slots__ = ()

    stage = Stage.PIXELS
    is_random = True
    commutes_with_flips: ClassVar[bool] = False
    needs_colours: ClassVar[bool] = False
    needs_size: ClassVar[bool] = True
    compiled: ClassVar[str | None] = None
    p: float = 1.0
    moves: bool = False
    mask_fill: int = 0

    @property
    def moves_pixels(self) -> bool:
        """True if pixels of an image may be elsewhere afterwards."""
        return self.moves or self.can_be_followed

    @property
    def can_be_followed(self) -> bool:
        """True if its class declares how pixels move."""
        return type(self).geometry is not ImageOperation.geometry

    def check(self, shape: ImageShape, _dtype: DType, /) -> None:
        """Raise RecipeError if images are grey and it needs colours."""
        if self.needs_colours and shape.channels == 1:
            raise RecipeError(
                f'{self} needs colours, and the recipe has Decode("gray"). Leave it out, or decode '
                'to "rgb"; of ColorJitter, brightness= and contrast= work on grey images.'
            )

    @property
    def is_foreign(self) -> bool:
        """True for a node that isn't Penstock's: it is tried on one image before it is used."""
        return not type(self).__module__.startswith("penstock.")

    def draw(self, uniform: Uniform, _shape: ImageShape, /) -> Values:
        """Return the numbers of each sample by name, shape (n, ...).

        uniform: uniform(k) returns the sample's keyed draws 0 to k - 1, in [0, 1), float64, shape
        (k, n). The node gets floats as float32, integers as int32, and bools.
        """
        return {"on": uniform(1)[0] < self.p} if self.p < 1 else {}

    @abstractmethod
    def node(self, images: Any, inputs: dict[str, Any], shape: ImageShape, /) -> Any:
        """Return the DALI node of the changed images: uint8, HWC, of the same shape.

        images: the node of the images, on the CPU or the GPU. inputs: nodes of the drawn values by
        name, on the CPU.
        """

    def arguments(self, _values: Values, /) -> tuple[Any, ...]:
        """Return the arguments of its compiled pass: numbers, or arrays of the shape that the drawn
        values have in front of their own dimensions."""
        return ()

    def geometry(self, _values: Values, _shape: ImageShape, /) -> Numbers | None:
        """Return how pixels move: matrices, shape (n, 3, 3), from (x, y, 1) of a point of the
        result to that of the point of the image that it shows; None: they stay where they are.

        Pixel k covers [k, k + 1). values: of `draw`, as the node gets them.
        """
        return None


def checked_operations(name: str, recipe: object) -> tuple[Operation, ...]:
    """Return the operations of a recipe. name: the argument, for errors. Raises RecipeError for
    anything but operations in a list or another iterable."""
    wanted = (
        "wanted operations in a list or tuple, such as imagenet_train(224) or [Resize(256), "
        "Normalize()]"
    )
    if isinstance(recipe, Operation):
        raise RecipeError(f"{name}: got the operation {recipe!r} alone, {wanted}. Put it in [...].")
    own = (
        "`penstock` has torchvision's operations by their names. To use a function of your own, "
        "put it into the list as Map(function, fields=...), which runs before images are decoded, "
        "or as Apply(function), if it builds DALI nodes; or call it in a torch dataset's "
        "__getitem__, or on the batch in your loop"
    )
    if not isinstance(recipe, Iterable) or isinstance(recipe, str | bytes | Mapping):
        raise RecipeError(f"{name}: got {recipe!r}, {wanted}. {own}.")
    operations = tuple(recipe)
    for place, op in enumerate(operations):
        if isinstance(op, type) and issubclass(op, Operation):
            raise RecipeError(
                f"{name}: got the class {op.__name__}, wanted an instance: {op.__name__}(...)."
            )
        if not isinstance(op, Operation):
            raise RecipeError(f"{name}: got {op!r} at place {place}, {wanted}. {own}.")
    return operations
