"""Check that operations fit one another and their images, and plan their stages.

A recipe is divided into geometry stages (windows and flips of an image, then one resize), pixel
operations, the last pass over the pixels, and operations on whole batches.

All sizes follow from the stored height and width. So numpy computes every window before a byte is
decoded, and the graph decodes only what the last window will show (see `draws`).

Pixel operations come after the windows, usually on images that all have one size. The last pass
over the pixels mirrors without additional cost, so flips among the windows are done there, or in
front of the first operation that treats left and right differently. Flips after that one are done
in their own place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from penstock.augment.dali_nodes import as_input, foreign_node, if_else
from penstock.augment.draw_keys import Uniform
from penstock.augment.field_operations import Pad
from penstock.augment.geometric_operations import (
    CenterCrop,
    FlipOperation,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    size_text,
)
from penstock.augment.image_moves import FlipMove, ImageMove, WarpMove
from penstock.augment.operation import (
    ORDER,
    Antialias,
    DType,
    FieldOperation,
    GeometricOperation,
    ImageOperation,
    ImageShape,
    Operation,
    Size,
    Stage,
    Values,
    checked_operations,
)
from penstock.augment.pixel_operations import Decode, Normalize
from penstock.cache import RecipeError, explain_arguments
from penstock.readers import ANY_SIZE, ImageRange

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.readers import Ints


Recipe = Sequence[Operation]

Form = Literal["fixed", "batch", "list"]
"""The form of a batch's images: one tensor, of one size for all batches, or of a size for each
batch; or a list of tensors of different sizes."""


PlacedWindow = tuple[int, GeometricOperation]
"""A window or a flip, with its place in the recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometryStage:
    """Windows of an image, then one resize, then windows of its result.

    resize: the operation that resizes; None: no resize, and `after` is empty. antialias: filter
    when shrinking; "auto": only samples that shrink by more than 2. cubic: interpolate bicubically.
    out: height and width of the result; None if they differ between samples. padding: the crop of
    `before` that may reach outside the image, if any; the window that `before` shows is then padded
    before it is resized. frame: the first crop of `after`, if it may reach outside the resized
    image.
    """

    before: tuple[PlacedWindow, ...] = ()
    resize: PlacedWindow | None = None
    antialias: Antialias = True
    cubic: bool = False
    after: tuple[PlacedWindow, ...] = ()
    out: tuple[int, int] | None = None
    padding: GeometricOperation | None = None
    frame: GeometricOperation | None = None

    @property
    def crops_after(self) -> bool:
        """True if it resizes only a region of its input."""
        return any(op.crops for _, op in self.after)

    @property
    def sized(self) -> tuple[int, int] | None:
        """Height and width of what it resizes; None if they differ between samples."""
        return None if self.frame else self.out


def plan_geometries(
    geometric: Sequence[PlacedWindow], images: ImageRange
) -> tuple[tuple[GeometryStage, ...], ImageRange, bool]:
    """Return the geometry stages, the sizes of the images after the last one, and True if all
    images of a batch then have one size."""
    stages: list[GeometryStage] = []
    last, sizes, is_even = GeometryStage(out=images.fixed), images, images.fixed is not None
    for index, op in [(index, part) for index, whole in geometric for part in whole.parts]:
        is_framed = False
        if op.pads(sizes):
            if any(stage.padding or stage.frame for stage in (*stages, last)):
                raise RecipeError(f"{op} is the second crop that pads in one recipe: keep one.")
            is_framed = last.resize is not None and not last.crops_after
            if not is_framed:
                if last.resize is not None or any(before.crops for _, before in last.before):
                    # Outside the earlier crop it shows padding, though the image continues there.
                    stages.append(last)
                    last = GeometryStage()
                last = replace(last, padding=op)
        sizes = op.sizes(sizes)
        is_even = op.is_even(is_even, sizes)
        if op.crops or isinstance(op, FlipOperation):
            where = "before" if last.resize is None else "after"
            windows: Any = {where: (*getattr(last, where), (index, op))}
            last = replace(last, out=None if op.resizes else sizes.fixed, **windows)
            last = replace(last, frame=op) if is_framed else last
        if op.resizes:
            if last.resize is not None:
                stages.append(last)
                last = GeometryStage()
            cubic = op.interpolation == "bicubic"
            last = replace(last, resize=(index, op), antialias=op.filters, cubic=cubic)
            last = replace(last, out=sizes.fixed)
    return (*stages, last), sizes, is_even


@dataclass(frozen=True, slots=True)
class PlacedOperation:
    """An operation on pixels, or a flip after one, at place `index` of the recipe."""

    index: int
    op: ImageOperation | FlipOperation

    def values(self, base: NDArray[np.uint64], shape: ImageShape) -> Values:
        """Return its argument inputs by name, C-contiguous. base: from `draw_base`."""
        drawn = self.op.draw(Uniform(base, self.index), shape)
        return {f"{self._prefix}{name}": as_input(each) for name, each in drawn.items()}

    def node(self, images: Any, inputs: dict[str, Any], shape: ImageShape) -> Any:
        """Return the changed images. inputs: nodes of all inputs of the graph, by name. Raises
        RecipeError for a foreign node that fails."""
        own = self._own(inputs)
        op, build = self.op, cast("Any", self.op.node)
        if isinstance(op, ImageOperation) and op.stage is Stage.PIXELS and op.is_foreign:
            build = foreign_node(op, images.device, own, shape)

        def changed(nodes: dict[str, Any]) -> Any:
            return build(nodes.pop("images"), nodes, shape)

        on = own.pop("on", None)
        own["images"] = images
        return changed(own) if on is None else if_else(own, on, changed, lambda x: x["images"])

    def moves(self, values: Values, shape: ImageShape, sizes: Ints) -> list[ImageMove]:
        """Return how it moves pixels by these argument inputs of the graph. shape: of the images,
        or of the largest. sizes: of each, int64, (2, n)."""
        own = self._own(values)
        if isinstance(self.op, FlipOperation):
            return [FlipMove(size=sizes, on=own["on"], axis=self.op.axis)]
        matrix = self.op.geometry(own, shape)
        if matrix is None:
            return []
        matrix = matrix.astype(np.float64)
        if "on" in own:
            matrix = np.where(own["on"][:, None, None], matrix, np.eye(3))
        return [WarpMove(size=sizes, matrix=matrix, fill=self.op.mask_fill)]

    @property
    def compiled(self) -> str | None:
        """The name of its compiled pass, if it has one. A class of another package may change the
        node that it inherits."""
        op = self.op
        return None if isinstance(op, FlipOperation) or op.is_foreign else op.compiled

    def numbers(self, inputs: Values) -> tuple[Any, ...]:
        """Return what its compiled pass gets: which samples it changes, and its arguments."""
        own = self._own(inputs)
        assert isinstance(self.op, ImageOperation)
        return own.get("on", True), *self.op.arguments(own)

    @property
    def _prefix(self) -> str:
        return f"{type(self.op).__name__}{self.index}."

    def _own(self, inputs: dict[str, Any]) -> dict[str, Any]:
        prefix = self._prefix
        return {n.removeprefix(prefix): each for n, each in inputs.items() if n.startswith(prefix)}


@dataclass(frozen=True, slots=True)
class ViewField:
    """A field of a batch that has several views of an image.

    parts: numbers of views, each with the recipe of these views, in order; the recipes have one
    shape and dtype.
    """

    name: str
    parts: tuple[tuple[int, CheckedRecipe], ...]

    @property
    def count(self) -> int:
        """The number of views."""
        return sum(count for count, _ in self.parts)

    @property
    def recipe(self) -> CheckedRecipe:
        """A recipe that shows the form of all views."""
        return self.parts[0][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRecipe:
    """A recipe that fits its data. Only `check_recipe` and `check_views` create it.

    ops: the recipe with Decode at its front, including operations on fields. geometries: its
    geometry stages, at least one. shape: (channels, height, width) of one sample of the batch, or,
    unless `is_fixed`, of the largest possible one. dtype: dtype of the batch. normalize: the
    recipe's Normalize, if any. pixels: operations between the geometry stages and the last pass.
    erasing: operations after that pass. mixing: operations on whole batches, which the graph
    doesn't do. sizes: of the images before `pad`, the operation that pads them to one size. form:
    of a batch. is_even: all images of a batch have one size before `pad`. salt: part of the key of
    its draws, of all samples or of each. views: the fields that a batch has in place of the image,
    if it has views; all but ops, decode and salt then describe the largest view.
    """

    ops: tuple[Operation, ...]
    geometries: tuple[GeometryStage, ...]
    decode: Decode
    normalize: Normalize | None
    shape: tuple[int, int, int]
    dtype: DType
    pixels: tuple[PlacedOperation, ...] = ()
    erasing: tuple[PlacedOperation, ...] = ()
    mixing: tuple[Any, ...] = ()
    sizes: ImageRange
    form: Form = "fixed"
    is_even: bool = True
    pad: Pad | None = None
    salt: int | NDArray[np.uint64] = 0
    views: tuple[ViewField, ...] = ()

    @property
    def image(self) -> ImageShape:
        """The shape of the images that pixel operations get: the largest, if they differ."""
        return ImageShape(self.sizes.max_height, self.sizes.max_width, self.decode.channels)

    @property
    def is_fixed(self) -> bool:
        """True if all batches have images of one size."""
        return self.form == "fixed"

    @property
    def draws_alone(self) -> bool:
        """True if the draws of a sample depend on no other sample of its batch."""
        is_shared = any(isinstance(op, GeometricOperation) and op.per == "batch" for op in self.ops)
        return self.is_fixed and not (is_shared or self.views or self.needs_boxes)

    @property
    def has_canvas(self) -> bool:
        """True if images of other sizes are put on the canvas of their batch."""
        return self.sizes.fixed is None or self.pad is not None

    def canvas(self, sizes: Ints) -> tuple[int, int] | None:
        """Return the height and width of the images of a batch; None if each has its own. sizes: of
        the images, int64, (2, n)."""
        if self.form == "list":
            return None
        if self.is_fixed:
            return self.shape[1:]
        most = sizes.max(axis=1, initial=1)
        return self.pad.canvas(most) if self.pad else (int(most[0]), int(most[1]))

    @property
    def random(self) -> bool:
        """True if a sample's view differs from epoch to epoch."""
        parts = (recipe for field in self.views for _, recipe in field.parts)
        return any(op.is_random for op in self.ops) or any(each.random for each in parts)

    @property
    def values(self) -> int:
        """The number of values that a batch has of a sample."""
        if not self.views:
            return math.prod(self.shape)
        return sum(field.count * field.recipe.values for field in self.views)

    @property
    def needs_boxes(self) -> bool:
        """True if its windows depend on the boxes of the images."""
        return any(isinstance(op, GeometricOperation) and op.needs_boxes for op in self.ops)

    @property
    def decodes_window(self) -> bool:
        """True if decoding a part of each image is enough."""
        if self.views:
            return False
        first = self.geometries[0]
        return any(op.crops for _, op in (*first.before, *first.after))


def check_recipe(
    recipe: Recipe | None,
    *,
    images: ImageRange,
    field: str | None = None,
    lists: bool = False,
    may_pad: bool = True,
) -> CheckedRecipe:
    """Check a recipe and plan its stages for images of these sizes.

    images: the dataset's sizes. field: name of the image field;
    operations for other fields are then ignored, but count for the places. lists: a batch may have
    a list of images of different sizes; otherwise only if the recipe has an operation for that.
    may_pad: a message may advise to pad them. A
    recipe without Decode gets one at its front. None and an empty recipe decode to uint8, CHW, if
    all images have one size. Raises RecipeError if the operations don't fit one another or the
    images.
    """
    ops = operations_of(recipe)
    if several := [op for op in ops if op.stage is Stage.VIEWS]:
        raise RecipeError(
            f"{several[0]} works on native datasets. Let __getitem__ return the views, or read the "
            "files with penstock.Dataset."
        )
    stages = _by_stage(ops, field)
    (decode,), geometric = (op for _, op in stages[Stage.DECODE]), stages[Stage.GEOMETRY]
    geometries, sizes, is_even = plan_geometries(geometric, images)
    pads = [op for op in ops if isinstance(op, Pad) and op.pads_image(field)]
    if len(pads) > 1:
        raise RecipeError(f"{pads[0]} and {pads[1]} both pad the images. Keep one of them.")
    pad = pads[0] if pads else None
    form: Form = "list"
    if sizes.fixed is not None or (pad is not None and pad.to is not None):
        form = "fixed"
    elif pad is not None or is_even:
        form = "batch"
    elif not lists and not any(op.gives_lists for _, op in geometric):
        raise RecipeError(
            f"The images are {size_text(ANY_SIZE if images == ANY_SIZE else sizes)}. A batch "
            "needs one size: in augment=, add RandomResizedCrop(224), Resize((224, 224)), or "
            "Resize(256) and CenterCrop(224)"
            f"{'; or pad them: LongestSide(640), Pad(to_multiple=32)' if may_pad else ''}."
        )
    largest = (sizes.max_height, sizes.max_width)
    if pad is not None:
        largest = pad.largest(largest)
    normalize = next((op for _, op in stages[Stage.NORMALIZE]), None)
    to = next((op for _, op in stages[Stage.CAST]), None)
    checked = CheckedRecipe(
        ops=ops,
        geometries=geometries,
        decode=decode,
        normalize=normalize,
        shape=(decode.channels, *largest),
        dtype=to.dtype if to else ("uint8" if normalize is None else "float32"),
        pixels=tuple(PlacedOperation(index, op) for index, op in stages[Stage.PIXELS]),
        erasing=tuple(PlacedOperation(index, op) for index, op in stages[Stage.ERASE]),
        mixing=tuple(op for _, op in stages[Stage.MIX]),
        sizes=sizes,
        form=form,
        is_even=is_even,
        pad=pad,
    )
    _check_needs_of_size(checked)
    for placed in stages.values():
        for _, op in placed:
            op.check(checked.image, checked.dtype)
    return checked


def _check_needs_of_size(recipe: CheckedRecipe) -> None:
    """Raise RecipeError for operations that need one size, if images differ in size."""
    others = () if recipe.form == "fixed" else recipe.mixing
    if recipe.sizes.fixed is None:
        pixels = [placed.op for placed in (*recipe.pixels, *recipe.erasing)]
        needy = [op for op in pixels if isinstance(op, ImageOperation) and op.needs_size]
        others = (*(op for op in needy if op.is_foreign or not recipe.is_even), *others)
    if others:
        raise RecipeError(
            f"{others[0]} works on images of one size, and they are {size_text(recipe.sizes)}. Put "
            "Letterbox(640), or a crop of a fixed size, in front of it, or leave it out."
        )


def operations_of(recipe: Recipe | None) -> tuple[Operation, ...]:
    """Return a recipe's operations with Decode at their front. Raises RecipeError for anything that
    isn't a recipe."""
    if isinstance(recipe, Operation):  # accept one operation instead of a list
        recipe = cast("Recipe", (recipe,))
    ops = () if recipe is None else checked_operations("augment", recipe)
    for op in ops:
        if op.stage is Stage.MAP:
            raise RecipeError(f"augment: got {op!r}, wanted operations on what Maps return.")
    return ops if ops and ops[0].stage is Stage.DECODE else (Decode(), *ops)


def _by_stage(ops: Sequence[Operation], field: str | None) -> dict[Stage, list[tuple[int, Any]]]:
    """Return the operations on an image with their places, by stage.

    A flip after a pixel operation counts as one, unless the result is the same if it comes before
    all of them. Raises RecipeError for a wrong order.
    """
    stages: dict[Stage, list[tuple[int, Any]]] = {stage: [] for stage in Stage}
    final: Operation | None = None
    for index, op in enumerate(ops):
        if field is not None and not op.selects(field):
            continue
        stage = op.stage
        if stage is Stage.FIELD:
            assert isinstance(op, FieldOperation)
            final = op if op.needs_final_boxes else final
            continue
        last = Stage.PIXELS if isinstance(op, FlipOperation) else stage
        for later in (each for k in Stage if k > last for _, each in stages[k]):
            raise RecipeError(f"{op} comes after {later}. {ORDER}.")
        if not all(each.commutes_with_flips for _, each in stages[Stage.PIXELS]):
            stage = last
        same = [each for _, each in stages[stage] if type(each) is type(op)]
        if same and op.is_single:
            raise RecipeError(f"Two {type(op).__name__} in one recipe ({same[0]}, {op}): keep one.")
        if final is not None and op.moves_pixels:
            raise RecipeError(
                f"{op} comes after {final}, which checks the final boxes: put that after all "
                "operations that move pixels."
            )
        stages[stage].append((index, op))
    return stages


CIFAR_MEAN = (0.4914, 0.4822, 0.4465)
"""Mean of CIFAR-10's training images, R, G, B, in units of 0..1."""

CIFAR_STD = (0.2470, 0.2435, 0.2616)
"""Standard deviation of CIFAR-10's training images, R, G, B, in units of 0..1."""


@explain_arguments(RecipeError)
def imagenet_train(size: Size = 224) -> tuple[Operation, ...]:
    """Return the usual training recipe: decode, random window of `size`, flip, normalise. float32,
    CHW."""
    return (Decode(), RandomResizedCrop(size), RandomHorizontalFlip(), Normalize())


@explain_arguments(RecipeError)
def imagenet_eval(size: Size = 224, resize: Size = 256) -> tuple[Operation, ...]:
    """Return the usual evaluation recipe: decode, short side to `resize`, middle of `size`,
    normalise."""
    return (Decode(), Resize(resize), CenterCrop(size), Normalize())


@explain_arguments(RecipeError)
def cifar_train(size: Size = 32, *, padding: int = 4) -> tuple[Operation, ...]:
    """Return the usual recipe for CIFAR: decode, random window of the padded image, flip,
    normalise."""
    crop = RandomCrop(size, padding=padding)
    return (Decode(), crop, RandomHorizontalFlip(), Normalize(CIFAR_MEAN, CIFAR_STD))
