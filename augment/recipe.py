"""Whether operations fit one another and their data, and what comes out.

A recipe is taken apart: *geometries* (windows and flips of one image, then one resize), pixel
operations, the last pass over the pixels, and what is done to whole batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast, get_args

from penstock.augment.checks import height_width
from penstock.augment.geometric_ops import (
    CenterCrop,
    Flipping,
    Geometric,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
)
from penstock.augment.geometry import Geometry, plan_geometries
from penstock.augment.ops import (
    Cast,
    CutMix,
    Decode,
    DType,
    Mixing,
    MixUp,
    Normalize,
    Operation,
    RandomErasing,
    Recipe,
)
from penstock.augment.pad import Pad
from penstock.augment.pixels import (
    PIXELS,
    Mirror,
    PlacedOperation,
    Shape,
    check_pixels,
    place_mirrors,
)
from penstock.augment.sanitize import SanitizeBoxes
from penstock.augment.unpack import Unpack
from penstock.cache.errors import RecipeError
from penstock.readers.types import ANY_SIZE

if TYPE_CHECKING:
    from penstock.readers.types import ImageRange

_FLIPS = get_args(Flipping)
_GEOMETRIC = get_args(Geometric)
_MIXING = (MixUp, CutMix)
_OF_FIELDS = (SanitizeBoxes, Pad, Unpack)
_KNOWN: tuple[type, ...] = (
    *(Decode, *_GEOMETRIC, *PIXELS, Normalize, RandomErasing, Cast),
    *(*_MIXING, *_OF_FIELDS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRecipe:
    """A recipe that fits its data. Made by `check_recipe` only.

    ops: the recipe with Decode at its front, operations on fields too. geometries: at least one.
    shape: (channels, height, width) of one sample of the batch. dtype: of the batch. normalize: the
    Normalize of the recipe, if any. pixels: what follows the geometries, with the flips that can't
    wait. mirror: the flip of the last pass, if any. erasing: what follows that pass. mixing: what
    is left to do with whole batches; the graph does nothing of it. salt: of its draws' key.
    """

    ops: tuple[Operation, ...]
    geometries: tuple[Geometry, ...]
    decode: Decode
    normalize: Normalize | None
    shape: tuple[int, int, int]
    dtype: DType
    pixels: tuple[PlacedOperation | Mirror, ...] = ()
    mirror: Mirror | None = None
    erasing: tuple[PlacedOperation, ...] = ()
    mixing: tuple[Mixing, ...] = ()
    salt: int = 0

    @property
    def image(self) -> Shape:
        """What the pixel operations work on."""
        channels, height, width = self.shape
        return Shape(height, width, channels)

    @property
    def flips(self) -> bool:
        """Whether a sample may be mirrored."""
        return any(isinstance(op, _FLIPS) for op in self.ops)

    @property
    def random(self) -> bool:
        """Whether a sample looks different in another epoch."""
        random = (*_FLIPS, RandomCrop, RandomResizedCrop, RandomErasing, *PIXELS)
        return any(isinstance(op, random) for op in self.ops)


def check_recipe(
    recipe: Recipe | None, *, images: ImageRange | None, field: str | None = None
) -> CheckedRecipe:
    """What a recipe will do to images of these sizes.

    images: the dataset's sizes; None: it holds no images. field: the images' name; operations that
    are for other fields are left out then, but keep their place. A recipe without Decode gets one
    at its front. None or an empty recipe decodes to uint8, CHW, if all images share one size.
    Raises RecipeError if the operations don't fit one another or the images.
    """
    if images is None:
        raise RecipeError(
            f"augment={recipe!r} works on images, and this dataset has none. Leave augment= "
            "out, or check fields= of the dataset."
        )
    ops = operations_of(recipe)
    decode = ops[0]
    assert isinstance(decode, Decode)
    groups = _split(ops, field)
    normalize, cast = groups.normalize, groups.cast
    if normalize is not None and len(normalize.mean) != decode.channels:
        raise RecipeError(
            f"Normalize: got {len(normalize.mean)} means, wanted {decode.channels}, one per "
            f'channel of Decode("{decode.color}").'
        )
    geometries, out = plan_geometries(groups.geometric, images)
    if out.fixed is None:
        what = "The recipe makes images"
        if len(ops) == 1:
            what = "The images are" if field is None else f'The images of "{field}" are'
        found = (
            f"{what} of sizes that nobody knows before they are read: the format, or the torch "
            "dataset, doesn't list them"
            if images == ANY_SIZE
            else f"{what} of different sizes: heights {out.min_height} to {out.max_height}, widths "
            f"{out.min_width} to {out.max_width}"
        )
        raise RecipeError(
            f"{found}. A batch needs one size: in augment=, add "
            "RandomResizedCrop(224), Resize((224, 224)), or Resize(256) and CenterCrop(224)."
        )
    flips = any(isinstance(op, RandomHorizontalFlip) for _, op in groups.geometric)
    upends = any(isinstance(op, RandomVerticalFlip) for _, op in groups.geometric)
    pixels, mirror = place_mirrors(flips, groups.pixels, upends=upends)
    checked = CheckedRecipe(
        ops=ops,
        geometries=geometries,
        decode=decode,
        normalize=normalize,
        shape=(decode.channels, *out.fixed),
        dtype=cast.dtype if cast else ("uint8" if normalize is None else "float32"),
        pixels=pixels,
        mirror=mirror,
        erasing=tuple(groups.erasing),
        mixing=tuple(groups.mixing),
    )
    check_pixels((each for each in pixels if isinstance(each, PlacedOperation)), checked.image)
    check_pixels(checked.erasing, checked.image)
    _check_uint8(checked)
    return checked


def _check_uint8(recipe: CheckedRecipe) -> None:
    """What can't be done to a batch of uint8."""
    if recipe.dtype != "uint8":
        return
    if recipe.mixing:
        raise RecipeError(
            f"{recipe.mixing[0]} blends numbers and labels, and the recipe ends in uint8. Add "
            'Normalize() or Cast("float32") in front of it.'
        )
    for erasing in recipe.erasing:
        if not all(0 <= value <= 255 and value == int(value) for value in erasing.op.value):
            raise RecipeError(
                f"RandomErasing(value=...): got {erasing.op.value} in a recipe that ends in uint8, "
                "wanted whole numbers from 0 to 255."
            )


def operations_of(recipe: Recipe | None) -> tuple[Operation, ...]:
    """A recipe's operations with Decode at their front. Raises RecipeError for what is none."""
    if recipe is None:
        return (Decode(),)
    if isinstance(recipe, _KNOWN):  # one operation is a slip that can be understood
        recipe = cast("Recipe", (recipe,))
    if not isinstance(recipe, Sequence) or isinstance(recipe, str):
        raise RecipeError(
            f"augment: got {recipe!r}, wanted a list of operations, such as imagenet_train(224)."
        )
    for op in recipe:
        if not isinstance(op, _KNOWN):
            raise RecipeError(_unknown(op))
    ops = tuple(recipe)
    return ops if ops and isinstance(ops[0], Decode) else (Decode(), *ops)


def _unknown(op: Any) -> str:
    names = ", ".join(kind.__name__ for kind in _KNOWN)
    if isinstance(op, type) and issubclass(op, _KNOWN):
        return f"augment: got the class {op.__name__}, wanted a value: {op.__name__}(...)."
    if type(op).__module__.startswith("torchvision."):
        return (
            f"augment: got torchvision's {type(op).__name__}, wanted operations of `penstock`: "
            f"{names}. Import the one of the same name from `penstock`."
        )
    return f"augment: got {op!r} of type {type(op).__name__}, wanted one of {names}."


@dataclass(slots=True)
class _Groups:
    """The operations by what they work on; those with draws with their place."""

    geometric: list[tuple[int, Geometric]] = field(default_factory=list)
    pixels: list[PlacedOperation] = field(default_factory=list)
    normalize: Normalize | None = None
    erasing: list[PlacedOperation] = field(default_factory=list)
    cast: Cast | None = None
    mixing: list[Mixing] = field(default_factory=list)
    sanitize: SanitizeBoxes | None = None

    def latest(self) -> Operation | None:
        """Of what must stand after all that moves or changes pixels."""
        erased = self.erasing[0].op if self.erasing else None
        return self.normalize or erased or self.cast or (self.mixing[0] if self.mixing else None)


def _split(ops: tuple[Operation, ...], name: str | None) -> _Groups:
    """The operations in the order that a recipe must have, or RecipeError."""
    groups = _Groups()
    for index, op in enumerate(ops):
        if isinstance(op, _OF_FIELDS):
            if isinstance(op, SanitizeBoxes):
                groups.sanitize = groups.sanitize or op
            continue
        if isinstance(op, RandomCrop | CenterCrop):
            if op.fields and name not in (None, *op.fields):
                continue
            height_width(f"{type(op).__name__}(size=...)", op.size)
        if groups.mixing and not isinstance(op, (Decode, *_MIXING)):
            raise RecipeError(
                f"{op} stands after {groups.mixing[0]}: whole batches are mixed, so put it last."
            )
        if isinstance(op, Decode):
            if index:
                raise RecipeError(_second(op) if ops[0] == op else _second(op, ops[0]))
        elif isinstance(op, Normalize):
            _add_normalize(groups, op)
        elif isinstance(op, Cast):
            _add_cast(groups, op)
        elif isinstance(op, RandomErasing):
            if groups.cast is not None:
                raise RecipeError(f"{op} stands after {groups.cast}: put Cast after it.")
            groups.erasing.append(PlacedOperation(index, op))
        elif isinstance(op, _MIXING):
            if any(isinstance(other, type(op)) for other in groups.mixing):
                raise RecipeError(f"Two {type(op).__name__} in one recipe: keep one.")
            groups.mixing.append(op)
        else:
            if isinstance(op, _GEOMETRIC) and groups.sanitize:
                raise RecipeError(
                    f"{op} stands after {groups.sanitize}, which looks at what is left of boxes in "
                    "the end: put it behind all that crops, resizes and flips."
                )
            _add_image_operation(groups, index, op)
    return groups


def _add_normalize(groups: _Groups, op: Normalize) -> None:
    if groups.normalize is not None:
        raise RecipeError(f"Two Normalize in one recipe ({groups.normalize}, {op}): keep one.")
    if groups.erasing:
        raise RecipeError(
            f"{op} stands after {groups.erasing[0].op}: put RandomErasing behind it, as "
            "torchvision does; its value is in the units of the batch."
        )
    if groups.cast is not None:
        raise RecipeError(f"{op} stands after {groups.cast}: put Cast last, or leave it out.")
    groups.normalize = op


def _add_cast(groups: _Groups, op: Cast) -> None:
    if groups.cast is not None:
        raise RecipeError(f"Two Cast in one recipe ({groups.cast}, {op}): keep one.")
    if groups.normalize is not None and op.dtype == "uint8":
        raise RecipeError(
            'Cast("uint8") after Normalize would round normalised numbers, about -2 to 3, '
            "to nothing. Leave out one of the two."
        )
    groups.cast = op


def _add_image_operation(groups: _Groups, index: int, op: Any) -> None:
    if (late := groups.latest()) is not None:
        raise RecipeError(
            f"{op} stands after {late}: put what moves or changes pixels first, then Normalize, "
            "then RandomErasing, then Cast."
        )
    if isinstance(op, PIXELS) or (groups.pixels and isinstance(op, _FLIPS)):
        groups.pixels.append(PlacedOperation(index, op))
    elif groups.pixels:
        raise RecipeError(
            f"{op} stands after {groups.pixels[0].op}: put what crops and resizes first. Then "
            "fewer pixels are changed, and all images have one size."
        )
    else:
        groups.geometric.append((index, op))


def _second(op: Decode, first: Operation | None = None) -> str:
    where = f"{first} and {op}" if first else f"{op}, twice"
    return f"Decode belongs once, at the front of a recipe; got {where}. Keep one."
