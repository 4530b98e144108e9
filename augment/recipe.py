"""Check that operations fit one another and their images, and plan their stages.

A recipe is divided into geometry stages (windows and flips of an image, then one resize), pixel
operations, the last pass over the pixels, and operations on whole batches.

All sizes follow from the stored height and width. So numpy computes every window before a byte is
decoded, and the graph decodes only what the last window will show (see `draws`).

Pixel operations come after the windows, on images that all have one size. The last pass over the
pixels mirrors without additional cost, so flips are done there, unless an operation after them
treats left and right differently. Then they are done in their own place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from penstock.augment.argument_checks import height_width
from penstock.augment.field_operations import Pad, SanitizeBoxes, Unpack
from penstock.augment.operations import (
    AutoAugment,
    Cast,
    CenterCrop,
    ColorJitter,
    CutMix,
    Decode,
    DType,
    FlipOperation,
    GaussianBlur,
    GeometricOperation,
    MixingOperation,
    MixUp,
    Normalize,
    Operation,
    PixelOperation,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Recipe,
    Resize,
    Size,
    TrivialAugmentWide,
)
from penstock.cache import RecipeError
from penstock.readers import ANY_SIZE, ImageRange

if TYPE_CHECKING:
    from collections.abc import Iterable

Antialias = bool | Literal["auto"]


@dataclass(frozen=True, slots=True)
class Window:
    """A window or a flip by the operation at `index` of the recipe."""

    index: int
    op: CenterCrop | RandomCrop | RandomResizedCrop | FlipOperation


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometryStage:
    """Windows of an image, then one resize, then windows of its result.

    size: as in `Resize`; None: no resize, and `after` is empty. antialias: filter when shrinking;
    "auto": only samples that shrink by more than 2. out: height and width of the result; None if
    they differ between samples. padding: the crop of `before` that may reach outside the image, if
    any; the window that `before` shows is then padded before it is resized.
    """

    before: tuple[Window, ...] = ()
    size: Size | None = None
    antialias: Antialias = True
    after: tuple[Window, ...] = ()
    out: tuple[int, int] | None = None
    padding: RandomCrop | None = None

    @property
    def crops(self) -> bool:
        """True if the output is a part of the input or has another size."""
        crop = CenterCrop, RandomCrop, RandomResizedCrop
        return self.size is not None or any(isinstance(w.op, crop) for w in self.before)


def plan_geometries(
    geometric: list[tuple[int, GeometricOperation]], images: ImageRange
) -> tuple[tuple[GeometryStage, ...], ImageRange]:
    """Return the geometry stages, and the sizes of the images after the last one."""
    geometries = [GeometryStage(out=images.fixed)]
    sizes = images
    for index, op in geometric:
        if isinstance(op, CenterCrop | RandomCrop):
            if isinstance(op, RandomCrop) and (op.padding or not _is_large_enough(sizes, op)):
                geometries = _with_padding(geometries, op)
            sizes = _cropped(op, sizes, is_known=images != ANY_SIZE)
            geometries[-1] = _with_window(geometries[-1], Window(index, op), sizes)
        elif isinstance(op, FlipOperation):
            geometries[-1] = _with_window(geometries[-1], Window(index, op), sizes)
        elif isinstance(op, RandomResizedCrop):
            geometries[-1] = _with_window(geometries[-1], Window(index, op), None)
            sizes = _fixed_size(op.height_width)
            geometries = _with_resize(geometries, op.height_width, op.antialias, sizes)
        else:
            sizes = _resized(op, sizes)
            geometries = _with_resize(geometries, op.size, op.antialias, sizes)
    return tuple(geometries), sizes


def _with_window(
    geometry: GeometryStage, window: Window, sizes: ImageRange | None
) -> GeometryStage:
    out = sizes.fixed if sizes else None
    if geometry.size is None:
        return replace(geometry, before=(*geometry.before, window), out=out)
    return replace(geometry, after=(*geometry.after, window), out=out)


def _with_padding(geometries: list[GeometryStage], op: RandomCrop) -> list[GeometryStage]:
    if any(geometry.padding for geometry in geometries):
        raise RecipeError("Two RandomCrop that pad in one recipe: keep one.")
    if geometries[-1].crops:
        # Outside the earlier crop it shows padding, although the image continues there.
        return [*geometries, GeometryStage(padding=op)]
    return [*geometries[:-1], replace(geometries[-1], padding=op)]


def _with_resize(
    geometries: list[GeometryStage], size: Size, antialias: Antialias, sizes: ImageRange
) -> list[GeometryStage]:
    last = geometries[-1]
    if last.size is None:
        return [*geometries[:-1], replace(last, size=size, antialias=antialias, out=sizes.fixed)]
    return [*geometries, GeometryStage(size=size, antialias=antialias, out=sizes.fixed)]


def _fixed_size(size: tuple[int, int]) -> ImageRange:
    height, width = size
    return ImageRange(min_height=height, max_height=height, min_width=width, max_width=width)


def _cropped(op: CenterCrop | RandomCrop, sizes: ImageRange, *, is_known: bool) -> ImageRange:
    if _is_large_enough(sizes, op) or (isinstance(op, RandomCrop) and op.pad_if_needed):
        return _fixed_size(op.height_width)
    height, width = op.height_width
    found = (
        f"as small as {sizes.min_height} x {sizes.min_width}"
        if is_known
        else "of sizes that aren't known before they are read"
    )
    remedies = ["Put a Resize in front of it"]
    remedies += ["crop less"] if is_known else []
    remedies += ["pass pad_if_needed=True"] if isinstance(op, RandomCrop) else []
    raise RecipeError(
        f"{type(op).__name__}: wanted {height} x {width} (height x width) of images {found}. "
        f"{', or '.join(remedies)}."
    )


def _is_large_enough(sizes: ImageRange, op: CenterCrop | RandomCrop) -> bool:
    """Return True if the smallest image, padding included, is as large as a window."""
    height, width = op.height_width
    padding = 2 * op.padding_px if isinstance(op, RandomCrop) else 0
    return height <= sizes.min_height + padding and width <= sizes.min_width + padding


def _resized(op: Resize, sizes: ImageRange) -> ImageRange:
    if isinstance(op.size, tuple):
        return _fixed_size(op.size)
    if sizes.fixed:
        return _fixed_size(short_side(op.size, height=sizes.fixed[0], width=sizes.fixed[1]))
    short = op.size
    return ImageRange(
        min_height=max(short, short * sizes.min_height // sizes.max_width),
        max_height=max(short, short * sizes.max_height // sizes.min_width),
        min_width=max(short, short * sizes.min_width // sizes.max_height),
        max_width=max(short, short * sizes.max_width // sizes.min_height),
    )


def short_side(short: int, *, height: int, width: int) -> tuple[int, int]:
    """Return height and width after a resize of the short side, rounded as torchvision rounds."""
    if height <= width:
        return short, short * width // height
    return short * height // width, short


PIXEL_OPERATIONS: tuple[type, ...] = get_args(PixelOperation)
"""The types of pixel operations."""

FLIP_INVARIANT = (ColorJitter, RandomGrayscale, GaussianBlur)
"""Pixel operations with the same result if the image is flipped before or after them."""

_NEED_COLOURS = (RandomGrayscale, RandAugment, TrivialAugmentWide, AutoAugment)


@dataclass(frozen=True, slots=True)
class ImageShape:
    """The shape of the images that an operation gets, in pixels."""

    height: int
    width: int
    channels: int


@dataclass(frozen=True, slots=True)
class PlacedOperation:
    """A pixel operation, or RandomErasing, at place `index` of the recipe."""

    index: int
    op: Any

    def name(self, suffix: str) -> str:
        """Return the name of one of its argument inputs."""
        return f"{type(self.op).__name__}{self.index}.{suffix}"


@dataclass(frozen=True, slots=True)
class Mirror:
    """Flips that are done as one, in this place.

    name: of its argument input. flips: places and operations. windows: True if it includes the
    flips among the windows. vertical: flip upside down, not left to right.
    """

    name: str
    flips: tuple[tuple[int, FlipOperation], ...]
    windows: bool
    vertical: bool = False


def active_jitters(op: ColorJitter) -> list[str]:
    """Return the names of the arguments that change anything, in the order of their application."""
    neutral = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0}
    return [name for name, value in neutral.items() if getattr(op, name) != (value, value)]


def needs_colours(op: Any) -> bool:
    """Return True if an operation needs images of three channels."""
    if isinstance(op, ColorJitter):
        return not {"saturation", "hue"}.isdisjoint(active_jitters(op))
    return isinstance(op, _NEED_COLOURS)


def check_pixels(placed: Iterable[PlacedOperation], shape: ImageShape) -> None:
    """Raise RecipeError for an operation that can't work on images of this shape."""
    for each in placed:
        op = each.op
        if shape.channels == 1 and needs_colours(op):
            raise RecipeError(
                f'{op} needs colours, and the recipe has Decode("gray"). Leave it out, or decode '
                'to "rgb"; of ColorJitter, brightness= and contrast= work on grey images.'
            )
        if isinstance(op, GaussianBlur):
            columns, rows = op.kernel_size  # type: ignore[misc]  # checked when it was created
            if rows // 2 >= shape.height or columns // 2 >= shape.width:
                raise RecipeError(
                    f"GaussianBlur(kernel_size=...): got {columns} x {rows} (width x height) for "
                    f"images of {shape.width} x {shape.height}, wanted less than twice their size: "
                    "beyond the edge the image is mirrored once."
                )
        if isinstance(op, RandomErasing):
            count = len(op.value) if isinstance(op.value, tuple) else 1
            if count not in (1, shape.channels):
                raise RecipeError(
                    f"RandomErasing(value=...): got {count} numbers, wanted 1 or "
                    f"{shape.channels}, one per channel."
                )


def place_mirrors(
    flips: bool, operations: Sequence[PlacedOperation], *, upends: bool = False
) -> tuple[tuple[PlacedOperation | Mirror, ...], Mirror | None]:
    """Return the operations with their flips in the places where they are done, and the flip of the
    last pass.

    flips, upends: True if earlier windows may flip left to right, and upside down. The last pass
    flips only left to right.
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
        if not isinstance(operation.op, FLIP_INVARIANT) and (waiting or windows):
            placed.append(Mirror(f"mirror{operation.index}", tuple(waiting), windows))
            waiting, windows = [], False
        placed.append(operation)
    last = Mirror("mirror", tuple(waiting), windows) if waiting or windows else None
    return tuple(placed), last


_FLIPS = get_args(FlipOperation)
_GEOMETRIC = get_args(GeometricOperation)
_MIXING = (MixUp, CutMix)
_FIELD_OPERATIONS = (SanitizeBoxes, Pad, Unpack)
_KNOWN_OPERATIONS: tuple[type, ...] = (
    *(Decode, *_GEOMETRIC, *PIXEL_OPERATIONS, Normalize, RandomErasing, Cast),
    *(*_MIXING, *_FIELD_OPERATIONS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRecipe:
    """A recipe that fits its data. Only `check_recipe` creates it.

    ops: the recipe with Decode at its front, including operations on fields. geometries: its
    geometry stages, at least one. shape: (channels, height, width) of one sample of the batch.
    dtype: dtype of the batch. normalize: the recipe's Normalize, if any. pixels: pixel operations
    after the geometry stages, and flips that the last pass can't do. mirror: the flip of the last
    pass, if any. erasing: operations after that pass. mixing: operations on whole batches, which
    the graph doesn't do. salt: part of the key of its draws.
    """

    ops: tuple[Operation, ...]
    geometries: tuple[GeometryStage, ...]
    decode: Decode
    normalize: Normalize | None
    shape: tuple[int, int, int]
    dtype: DType
    pixels: tuple[PlacedOperation | Mirror, ...] = ()
    mirror: Mirror | None = None
    erasing: tuple[PlacedOperation, ...] = ()
    mixing: tuple[MixingOperation, ...] = ()
    salt: int = 0

    @property
    def image(self) -> ImageShape:
        """The shape of the images that pixel operations get."""
        channels, height, width = self.shape
        return ImageShape(height, width, channels)

    @property
    def flips(self) -> bool:
        """True if a sample may be mirrored."""
        return any(isinstance(op, _FLIPS) for op in self.ops)

    @property
    def random(self) -> bool:
        """True if a sample's view differs from epoch to epoch."""
        random = (*_FLIPS, RandomCrop, RandomResizedCrop, RandomErasing, *PIXEL_OPERATIONS)
        return any(isinstance(op, random) for op in self.ops)


def check_recipe(
    recipe: Recipe | None, *, images: ImageRange | None, field: str | None = None
) -> CheckedRecipe:
    """Check a recipe and plan its stages for images of these sizes.

    images: the dataset's sizes; None: it holds no images. field: name of the image field;
    operations for other fields are then ignored, but count for the places. A recipe without Decode
    gets one at its front. None and an empty recipe decode to uint8, CHW, if all images have one
    size. Raises RecipeError if the operations don't fit one another or the images.
    """
    if images is None:
        raise RecipeError(
            f"augment={recipe!r} works on images, and this dataset has none. Leave augment= "
            "out, or check fields= of the dataset."
        )
    ops = operations_of(recipe)
    decode = ops[0]
    assert isinstance(decode, Decode)
    groups = _group_operations(ops, field)
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
            f"{what} of sizes that aren't known before they are read: the format, or the torch "
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
    """Raise RecipeError for operations that a batch of uint8 doesn't allow."""
    if recipe.dtype != "uint8":
        return
    if recipe.mixing:
        raise RecipeError(
            f"{recipe.mixing[0]} blends numbers and labels, and the recipe's result is uint8. Add "
            'Normalize() or Cast("float32") in front of it.'
        )
    for erasing in recipe.erasing:
        if not all(0 <= value <= 255 and value == int(value) for value in erasing.op.value):
            raise RecipeError(
                f"RandomErasing(value=...): got {erasing.op.value} in a recipe whose result is "
                "uint8, wanted whole numbers from 0 to 255."
            )


def operations_of(recipe: Recipe | None) -> tuple[Operation, ...]:
    """Return a recipe's operations with Decode at their front. Raises RecipeError for anything that
    isn't a recipe."""
    if recipe is None:
        return (Decode(),)
    if isinstance(recipe, _KNOWN_OPERATIONS):  # accept one operation instead of a list
        recipe = cast("Recipe", (recipe,))
    if not isinstance(recipe, Sequence) or isinstance(recipe, str):
        raise RecipeError(
            f"augment: got {recipe!r}, wanted a list of operations, such as imagenet_train(224)."
        )
    for op in recipe:
        if not isinstance(op, _KNOWN_OPERATIONS):
            raise RecipeError(_unknown_operation(op))
    ops = tuple(recipe)
    return ops if ops and isinstance(ops[0], Decode) else (Decode(), *ops)


def _unknown_operation(op: Any) -> str:
    names = ", ".join(kind.__name__ for kind in _KNOWN_OPERATIONS)
    if isinstance(op, type) and issubclass(op, _KNOWN_OPERATIONS):
        return f"augment: got the class {op.__name__}, wanted an instance: {op.__name__}(...)."
    if type(op).__module__.startswith("torchvision."):
        return (
            f"augment: got torchvision's {type(op).__name__}, wanted operations of `penstock`: "
            f"{names}. Import the one of the same name from `penstock`."
        )
    return f"augment: got {op!r} of type {type(op).__name__}, wanted one of {names}."


@dataclass(slots=True)
class _OperationGroups:
    """The operations of a recipe by kind; those with draws have their place."""

    geometric: list[tuple[int, GeometricOperation]] = field(default_factory=list)
    pixels: list[PlacedOperation] = field(default_factory=list)
    normalize: Normalize | None = None
    erasing: list[PlacedOperation] = field(default_factory=list)
    cast: Cast | None = None
    mixing: list[MixingOperation] = field(default_factory=list)
    sanitize: SanitizeBoxes | None = None

    def latest(self) -> Operation | None:
        """Return an operation after which none may move or change pixels; None without one."""
        erased = self.erasing[0].op if self.erasing else None
        return self.normalize or erased or self.cast or (self.mixing[0] if self.mixing else None)


def _group_operations(ops: tuple[Operation, ...], name: str | None) -> _OperationGroups:
    """Group operations by kind. Raises RecipeError for a wrong order of operations."""
    groups = _OperationGroups()
    for index, op in enumerate(ops):
        if isinstance(op, _FIELD_OPERATIONS):
            if isinstance(op, SanitizeBoxes):
                groups.sanitize = groups.sanitize or op
            continue
        if isinstance(op, RandomCrop | CenterCrop):
            if op.fields and name not in (None, *op.fields):
                continue
            height_width(f"{type(op).__name__}(size=...)", op.size)
        if groups.mixing and not isinstance(op, (Decode, *_MIXING)):
            mixing = groups.mixing[0]
            raise RecipeError(
                f"{op} comes after {mixing}, which mixes whole batches: put that last."
            )
        if isinstance(op, Decode):
            if index:
                got = f"{op}, twice" if ops[0] == op else f"{ops[0]} and {op}"
                raise RecipeError(
                    f"Decode belongs once, at the front of a recipe; got {got}. Keep one."
                )
        elif isinstance(op, Normalize):
            _add_normalize(groups, op)
        elif isinstance(op, Cast):
            _add_cast(groups, op)
        elif isinstance(op, RandomErasing):
            if groups.cast is not None:
                raise RecipeError(f"{op} comes after {groups.cast}: put Cast after it.")
            groups.erasing.append(PlacedOperation(index, op))
        elif isinstance(op, _MIXING):
            if any(isinstance(other, type(op)) for other in groups.mixing):
                raise RecipeError(f"Two {type(op).__name__} in one recipe: keep one.")
            groups.mixing.append(op)
        else:
            if isinstance(op, _GEOMETRIC) and groups.sanitize:
                raise RecipeError(
                    f"{op} comes after {groups.sanitize}, which checks the final boxes: put that "
                    "after all operations that crop, resize and flip."
                )
            _add_image_operation(groups, index, op)
    return groups


def _add_normalize(groups: _OperationGroups, op: Normalize) -> None:
    if groups.normalize is not None:
        raise RecipeError(f"Two Normalize in one recipe ({groups.normalize}, {op}): keep one.")
    if groups.erasing:
        raise RecipeError(
            f"{op} comes after {groups.erasing[0].op}: put RandomErasing after it, as in "
            "torchvision; its value is in the units of the batch."
        )
    if groups.cast is not None:
        raise RecipeError(f"{op} comes after {groups.cast}: put Cast last, or leave it out.")
    groups.normalize = op


def _add_cast(groups: _OperationGroups, op: Cast) -> None:
    if groups.cast is not None:
        raise RecipeError(f"Two Cast in one recipe ({groups.cast}, {op}): keep one.")
    if groups.normalize is not None and op.dtype == "uint8":
        raise RecipeError(
            'Cast("uint8") after Normalize would round normalised numbers, about -2 to 3, to whole '
            "numbers. Leave out one of the two."
        )
    groups.cast = op


def _add_image_operation(groups: _OperationGroups, index: int, op: Any) -> None:
    if (late := groups.latest()) is not None:
        raise RecipeError(
            f"{op} comes after {late}: put operations that move or change pixels first, then "
            "Normalize, then RandomErasing, then Cast."
        )
    if isinstance(op, PIXEL_OPERATIONS) or (groups.pixels and isinstance(op, _FLIPS)):
        groups.pixels.append(PlacedOperation(index, op))
    elif groups.pixels:
        raise RecipeError(
            f"{op} comes after {groups.pixels[0].op}: put operations that crop and resize first. "
            "Then fewer pixels are changed, and all images have one size."
        )
    else:
        groups.geometric.append((index, op))
