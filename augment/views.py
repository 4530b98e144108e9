"""Make several augmented views of each image from one decode.

An image with `Views` is decoded once, as a whole. Each view has a recipe, and draws of its own,
keyed by the sample and the view. The views of one key become one field of a batch, of shape
(n, views, channels, height, width).

On the CPU, one compiled function makes all views of a key, if their recipes have one resize and
only operations with a compiled pass (`view_kernels`). Other recipes, and all on CUDA, get DALI's
nodes, as those of an image without views.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment import argument_checks as arg
from penstock.augment import dali_nodes as nodes
from penstock.augment.argument_checks import argument
from penstock.augment.dali_runs import fn
from penstock.augment.draws import FLIPS
from penstock.augment.field_operations import Pad
from penstock.augment.geometric_operations import size_text
from penstock.augment.operation import Operation, Stage, checked_operations, operation
from penstock.augment.pixel_operations import Decode
from penstock.augment.recipe import CheckedRecipe, ViewField, check_recipe, operations_of
from penstock.cache import RecipeError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.readers import ImageRange

MAX_VIEWS = 1024  # of one field

Parts = tuple[tuple[int, tuple[Operation, ...]], ...]
"""The views of one field: numbers of views, each with the recipe that these views share."""

_WANTED = (
    'a mapping from the names of new fields to (number of views, recipe): {"global": (2, [...]), '
    '"local": (8, [...])}, or to a list of such pairs if the views of one field have several '
    "recipes"
)


def _checked_views(what: str, value: Any) -> tuple[tuple[str, Parts], ...]:
    if not isinstance(value, Mapping) or not value:
        raise RecipeError(f"{what}: got {value!r}, wanted {_WANTED}.")
    for key in value:
        if not isinstance(key, str) or not key or "." in key:
            raise RecipeError(f"{what}: got the key {key!r}, wanted the name of a field.")
    return tuple((key, _checked_parts(f'{what}, of "{key}"', each)) for key, each in value.items())


def _checked_parts(what: str, value: Any) -> Parts:
    pairs = value if isinstance(value, list) else [value]
    if not pairs or not all(isinstance(each, tuple) and len(each) == 2 for each in pairs):
        raise RecipeError(f"{what}: got {value!r}, wanted {_WANTED}.")
    count = arg.whole_number(1, MAX_VIEWS)
    parts = tuple((count(what, number), checked_operations(what, ops)) for number, ops in pairs)
    if sum(number for number, _ in parts) > MAX_VIEWS:
        raise RecipeError(f"{what}: got more than {MAX_VIEWS} views, wanted at most so many.")
    for op in (op for _, ops in parts for op in ops):
        if op.stage in (Stage.MAP, Stage.FIELD, Stage.VIEWS):
            raise RecipeError(
                f"{what}: got {op}, wanted operations on one image. Put Maps in front of Views, "
                "and operations on fields into the list that has Views."
            )
        if op.stage is Stage.MIX:
            raise RecipeError(
                f"{what}: got {op}, which mixes the images and labels of two samples; views have "
                "several images. Mix them in your training step."
            )
    return parts


@operation
class Views(Operation):
    """Make several augmented views of each image from one decode, as self-supervised methods need.

    ```python
    from penstock import DataLoader, Dataset, Normalize, RandomResizedCrop, Views

    large, small = [RandomResizedCrop(96), Normalize()], [RandomResizedCrop(32), Normalize()]
    views = Views({"global": (2, large), "local": (4, small)})
    photos = Dataset("photos/train", fields=("image",))
    with DataLoader(photos, 16, shuffle=True, seed=7, augment=[views], as_dict=True) as loader:
        print(next(iter(loader))["local"].shape)  # torch.Size([16, 4, 3, 32, 32])
    ```

    views: for each new field of a batch the number of its views and their recipe, as
    {"global": (2, [...]), "local": (8, [...])}. In place of the image, a batch has these fields, of
    shape (n, views, channels, height, width), so the views of one field have one size and dtype. A
    list of such pairs, as {"global": [(1, [...]), (1, [...])]}, has several recipes for the views
    of one field, in this order.

    It is the only operation on the image in its list; Maps precede it. Each view has draws of its
    own, keyed by (seed, epoch, sample id, occurrence, key, number of the view). Masks, boxes and
    keypoints can't follow views.
    """

    views: Mapping[str, Any] = argument(_checked_views)

    stage = Stage.VIEWS
    is_single = True
    or_else = ", or make the views in your training step"
    moves_pixels = True
    can_be_followed = False

    def __str__(self) -> str:
        parts: Any = self.views  # as the check returns it
        counts = ((key, sum(count for count, _ in each)) for key, each in parts)
        return f"Views({', '.join(f'{key}: {count}' for key, count in counts)})"


def check_views(ops: Sequence[Operation], *, images: ImageRange, name: str) -> CheckedRecipe:
    """Return the views of an image, as a recipe that fits its data.

    ops: the list that has Views, with Decode at the front, including operations on fields. images:
    the dataset's sizes. name: of the image. Raises RecipeError for other operations on the image,
    and for views that don't fit one another or the images.
    """
    own = [
        op for op in ops if op.selects(name) and (op.stage is not Stage.FIELD or _pads(op, name))
    ]
    (views, *more) = (op for op in own if isinstance(op, Views))
    if others := [*more, *(op for op in own[1:] if op.stage is not Stage.VIEWS)]:
        raise RecipeError(
            f"{others[0]} is in the list that has {views}, which is the only operation on an image "
            "there: put it into the recipes of Views."
        )
    parts: Any = views.views  # as the check returns it
    lists = [operations_of(recipe) for _, each in parts for _, recipe in each]
    decodes = {ops[0] for ops in (own, *lists)} - {Decode()} or {Decode()}
    if len(decodes) > 1:
        raise RecipeError(
            f"Views decodes an image once, and got {' and '.join(map(str, decodes))}: keep one, in "
            "front of Views."
        )
    (decode,) = decodes
    fields = tuple(_view_field(key, each, decode, images) for key, each in parts)
    largest = max((field.recipe for field in fields), key=lambda recipe: recipe.values)
    return replace(largest, ops=tuple(ops), views=fields)


def _pads(op: Operation, name: str) -> bool:
    return isinstance(op, Pad) and op.pads_image(name)


def _view_field(name: str, parts: Parts, decode: Operation, images: ImageRange) -> ViewField:
    checked = []
    for count, recipe in parts:
        try:
            ops = (decode, *operations_of(recipe)[1:])
            one = check_recipe(ops, images=images, may_pad=False)
            if not one.is_fixed:
                raise RecipeError(
                    f"The images of a view have one size, and these are {size_text(one.sizes)}. "
                    "Add RandomResizedCrop(224), or Resize(256) and CenterCrop(224)."
                )
            checked.append((count, one))
        except RecipeError as error:
            raise RecipeError(f'Views, of "{name}": {error}') from error
    forms = list(dict.fromkeys((recipe.shape, recipe.dtype) for _, recipe in checked))
    if len(forms) > 1:
        raise RecipeError(
            f'Views: the views of one field have one shape and dtype, and those of "{name}" have '
            f"{forms[0]} and {forms[1]} (channels, height, width). Give them different keys."
        )
    return ViewField(name, tuple(checked))


def part_draws(draws: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Return the draws of one part by their own names. part: "<field>.<part>" of `draw_views`, or
    what else precedes the name."""
    prefix = f"{part}."
    return {n.removeprefix(prefix): each for n, each in draws.items() if n.startswith(prefix)}


class CompiledViews:
    """Makes the views of one field by `view_kernels`, in one operator of a graph on the CPU."""

    def __init__(self, field: ViewField, place: int) -> None:
        """place: number of the field."""
        from penstock.augment import view_kernels as kernels  # compiled at its first import

        self._kernels, self._field, self._place = kernels, field, place
        codes = [
            [kernels.PASSES[placed.compiled or ""][0] for placed in recipe.pixels]
            for _, recipe in field.parts
        ]
        most = max(1, *map(len, codes))
        rows = [[*each, *[kernels.NO_PASS] * (most - len(each))] for each in codes]
        counts = [count for count, _ in field.parts]
        self._programs = np.repeat(np.array(rows, np.float32), counts, axis=0)

    def numbers(self, draws: Mapping[str, Any], samples: int) -> NDArray[np.float32]:
        """Return what the compiled function gets of each view, shape (samples, views, numbers).
        draws: of `draw_views`."""
        parts = []
        for number, (count, recipe) in enumerate(self._field.parts):
            columns = self._columns(recipe, part_draws(draws, f"{self._place}.{number}"))
            parts.append(np.empty((samples, count, len(columns)), np.float32))
            for place, values in enumerate(columns):
                parts[-1][..., place] = values
        if len(parts) == 1:
            return parts[0]
        most = max(part.shape[-1] for part in parts)
        wide = [((0, 0), (0, 0), (0, most - part.shape[-1])) for part in parts]
        padded = [np.pad(part, more) for part, more in zip(parts, wide, strict=True)]
        return np.concatenate(padded, axis=1)

    def _columns(self, recipe: CheckedRecipe, draws: dict[str, Any]) -> list[Any]:
        """Return the numbers of views in their order, each of all views or an array."""
        stage = recipe.geometries[0]
        filtered = draws["filter0"] if stage.antialias == "auto" else stage.antialias
        columns: list[Any] = []
        for name in ("start", "shape", "low0", "high0"):  # zeros stand for the full image
            columns += [draws[name][..., k] if name in draws else 0 for k in range(2)]
        columns += [filtered + 2 * stage.cubic, *(draws.get(name, 0) for name in FLIPS)]
        columns.append(recipe.dtype == "uint8")
        assert len(columns) == self._kernels.HEADER
        for placed in recipe.pixels:
            columns += placed.numbers(draws)
        return columns

    def node(self, images: Any, numbers: Any) -> Any:
        """Return the node of the views, (views, channels, height, width). images, numbers: nodes on
        the CPU."""
        recipe = self._field.recipe
        scaling = (recipe.normalize.mean, recipe.normalize.std) if recipe.normalize else None
        given = images, numbers, self._programs, nodes.planes_like(recipe.shape, scaling)
        views = nodes.compiled_views(*given, is_bytes=recipe.dtype == "uint8")
        if recipe.dtype == "float16":
            views = fn.cast(views, dtype=nodes.dali_type(recipe.dtype))
        return views


def has_passes(recipe: CheckedRecipe) -> bool:
    """Return True if all operations of a recipe have compiled passes."""
    stage = recipe.geometries[0]
    return (
        len(recipe.geometries) == 1
        and stage.resize is not None
        and stage.padding is None
        and stage.frame is None
        and not recipe.has_canvas
        and not recipe.erasing
        and recipe.shape[1] * recipe.shape[2] >= 2  # as `planes_like` needs
        and all(placed.compiled is not None for placed in recipe.pixels)
    )
