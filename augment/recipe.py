"""Check that operations fit one another and their images, and plan what they do to one image.

A recipe is taken apart into geometry stages (windows and flips of an image, then one resize), pixel
operations, the last pass over the pixels, and what is done to whole batches.

All sizes follow from the stored height and width. So numpy computes every window before a byte is
decoded, and the graph decodes only what the last window will show (see `draws`).

Pixel operations come behind the windows, on images that all have one size. Flips are folded into
the last pass over the pixels, which mirrors for nothing, as long as no operation stands between
that treats left and right differently; else they are made in their place.
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
    """A window or a flip, from the operation at `index` of the recipe."""

    index: int
    op: CenterCrop | RandomCrop | RandomResizedCrop | FlipOperation


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometryStage:
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
        """Return True if the output is a part of the input or has another size."""
        crop = CenterCrop, RandomCrop, RandomResizedCrop
        return self.size is not None or any(isinstance(w.op, crop) for w in self.before)


def plan_geometries(
    geometric: list[tuple[int, GeometricOperation]], images: ImageRange
) -> tuple[tuple[GeometryStage, ...], ImageRange]:
    """The geometries, and the sizes that leave the last one."""
    geometries = [GeometryStage(out=images.fixed)]
    sizes = images
    for index, op in geometric:
        if isinstance(op, CenterCrop | RandomCrop):
            if isinstance(op, RandomCrop) and (op.padding or not _is_large_enough(sizes, op)):
                geometries = _with_padding(geometries, op)
            sizes = _cropped(op, sizes, is_known=images != ANY_SIZE)
            geometries[-1] = _with_window(geometries[-1], Window(index, op), sizes)
        elif isinstance(op, RandomHorizontalFlip | RandomVerticalFlip):
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
        # What it shows outside is padding, though the image went on there before it was cropped.
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
        else "of sizes that nobody knows before they are read"
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
    """Height and width after a resize of the short side, rounded as torchvision rounds."""
    if height <= width:
        return short, short * width // height
    return short * height // width, short


PIXEL_OPERATIONS: tuple[type, ...] = get_args(PixelOperation)
"""The types of pixel operations."""

FLIP_INVARIANT = (ColorJitter, RandomGrayscale, GaussianBlur)
"""Those that give the same whether the image is flipped before or after."""

_NEED_COLOURS = (RandomGrayscale, RandAugment, TrivialAugmentWide, AutoAugment)


@dataclass(frozen=True, slots=True)
class ImageShape:
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
    flips: tuple[tuple[int, FlipOperation], ...]
    windows: bool
    vertical: bool = False


def active_jitters(op: ColorJitter) -> list[str]:
    """Which of the four an operation changes, in the order in which it does."""
    still = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0}
    return [name for name, value in still.items() if getattr(op, name) != (value, value)]


def needs_colours(op: Any) -> bool:
    """Return True if an operation has no meaning for images of one channel."""
    if isinstance(op, ColorJitter):
        return not {"saturation", "hue"}.isdisjoint(active_jitters(op))
    return isinstance(op, _NEED_COLOURS)


def check_pixels(placed: Iterable[PlacedOperation], shape: ImageShape) -> None:
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


def _check_kernel(op: GaussianBlur, shape: ImageShape) -> None:
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
    """A recipe that fits its data. Made by `check_recipe` only.

    ops: the recipe with Decode at its front, operations on fields too. geometries: at least one.
    shape: (channels, height, width) of one sample of the batch. dtype: of the batch. normalize: the
    Normalize of the recipe, if any. pixels: what follows the geometries, with the flips that can't
    wait. mirror: the flip of the last pass, if any. erasing: what follows that pass. mixing: what
    is left to do with whole batches; the graph does nothing of it. salt: of its draws' key.
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
        """The images that the pixel operations work on."""
        channels, height, width = self.shape
        return ImageShape(height, width, channels)

    @property
    def flips(self) -> bool:
        """Return True if a sample may be mirrored."""
        return any(isinstance(op, _FLIPS) for op in self.ops)

    @property
    def random(self) -> bool:
        """Return True if a sample's view differs from epoch to epoch."""
        random = (*_FLIPS, RandomCrop, RandomResizedCrop, RandomErasing, *PIXEL_OPERATIONS)
        return any(isinstance(op, random) for op in self.ops)


def check_recipe(
    recipe: Recipe | None, *, images: ImageRange | None, field: str | None = None
) -> CheckedRecipe:
    """Check a recipe and plan its stages for images of these sizes.

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
    """Raise RecipeError for operations that a batch of uint8 doesn't allow."""
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
    if isinstance(recipe, _KNOWN_OPERATIONS):  # one operation is a slip that can be understood
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
        return f"augment: got the class {op.__name__}, wanted a value: {op.__name__}(...)."
    if type(op).__module__.startswith("torchvision."):
        return (
            f"augment: got torchvision's {type(op).__name__}, wanted operations of `penstock`: "
            f"{names}. Import the one of the same name from `penstock`."
        )
    return f"augment: got {op!r} of type {type(op).__name__}, wanted one of {names}."


@dataclass(slots=True)
class _OperationGroups:
    """The operations by what they work on; those with draws with their place."""

    geometric: list[tuple[int, GeometricOperation]] = field(default_factory=list)
    pixels: list[PlacedOperation] = field(default_factory=list)
    normalize: Normalize | None = None
    erasing: list[PlacedOperation] = field(default_factory=list)
    cast: Cast | None = None
    mixing: list[MixingOperation] = field(default_factory=list)
    sanitize: SanitizeBoxes | None = None

    def latest(self) -> Operation | None:
        """Return an operation after which none may move or change pixels; None if there is none so
        far."""
        erased = self.erasing[0].op if self.erasing else None
        return self.normalize or erased or self.cast or (self.mixing[0] if self.mixing else None)


def _group_operations(ops: tuple[Operation, ...], name: str | None) -> _OperationGroups:
    """Group operations by kind. Raises RecipeError for another order than a recipe must have."""
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
            raise RecipeError(
                f"{op} stands after {groups.mixing[0]}: whole batches are mixed, so put it last."
            )
        if isinstance(op, Decode):
            if index:
                raise RecipeError(
                    _second_decode(op) if ops[0] == op else _second_decode(op, ops[0])
                )
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


def _add_normalize(groups: _OperationGroups, op: Normalize) -> None:
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


def _add_cast(groups: _OperationGroups, op: Cast) -> None:
    if groups.cast is not None:
        raise RecipeError(f"Two Cast in one recipe ({groups.cast}, {op}): keep one.")
    if groups.normalize is not None and op.dtype == "uint8":
        raise RecipeError(
            'Cast("uint8") after Normalize would round normalised numbers, about -2 to 3, '
            "to nothing. Leave out one of the two."
        )
    groups.cast = op


def _add_image_operation(groups: _OperationGroups, index: int, op: Any) -> None:
    if (late := groups.latest()) is not None:
        raise RecipeError(
            f"{op} stands after {late}: put what moves or changes pixels first, then Normalize, "
            "then RandomErasing, then Cast."
        )
    if isinstance(op, PIXEL_OPERATIONS) or (groups.pixels and isinstance(op, _FLIPS)):
        groups.pixels.append(PlacedOperation(index, op))
    elif groups.pixels:
        raise RecipeError(
            f"{op} stands after {groups.pixels[0].op}: put what crops and resizes first. Then "
            "fewer pixels are changed, and all images have one size."
        )
    else:
        groups.geometric.append((index, op))


def _second_decode(op: Decode, first: Operation | None = None) -> str:
    where = f"{first} and {op}" if first else f"{op}, twice"
    return f"Decode belongs once, at the front of a recipe; got {where}. Keep one."
