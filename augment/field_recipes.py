"""Check the recipes of all fields of a sample: its images, and the fields that follow them.

A list of operations applies to each selected image and to the masks, boxes and keypoints `of` it.
One operation draws the same numbers for all of them: images of the same size get the same window. A
mapping has a list for each image to change, and other images are only decoded. The fields of a
tuple share a list and its draws; different entries have different draws.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.augment.checked_recipes import FieldRecipes, Follower
from penstock.augment.field_operations import ColumnOperation, Map, SanitizeBoxes
from penstock.augment.geometric_operations import FixedCrop
from penstock.augment.operation import Operation, Stage
from penstock.augment.recipe import Recipe, check_recipe, operations_of
from penstock.cache import RecipeError
from penstock.readers import ANY_SIZE
from penstock.readers.fieldtypes import is_mask_name, untyped_places

if TYPE_CHECKING:
    from penstock.augment.recipe import CheckedRecipe
    from penstock.readers import ImageRange
    from penstock.readers.fieldtypes import FieldType

Recipes = Recipe | Mapping[str | tuple[str, ...], Recipe]
"""The type of `augment=`: one list of operations, or a list by field or by a tuple of fields."""
FieldLists = Recipe | Mapping[str, Recipe]
"""Recipes with a list for each field of a tuple, as returned by `by_field`."""


_log = logging.getLogger("penstock")


def by_field(augment: Recipes | None) -> FieldLists | None:
    """Return the recipes with a list for each field of a tuple. Raises RecipeError for fields in
    two entries, and for Maps of several fields in the list of a tuple."""
    if not isinstance(augment, Mapping):
        return augment
    lists: dict[str, Recipe] = {}
    for key, recipe in augment.items():
        for name in (key,) if isinstance(key, str) else key:
            if name in lists:
                raise RecipeError(
                    f'augment: "{name}" is in several of the keys {list(augment)}. Give each field '
                    "one list."
                )
            lists[name] = recipe
        operations = recipe if isinstance(recipe, Sequence) else ()
        maps = [each for each in operations if isinstance(each, Map) and each.fields is not None]
        if not isinstance(key, str) and maps:
            raise RecipeError(
                f"{maps[0].name} has fields={list(maps[0].fields or ())} and is in the list of "
                f"{key}, which applies to each of these fields. Leave its fields out, or put it "
                "into the list of one field."
            )
    return lists


def check_recipes(
    augment: FieldLists | None,
    schema: Mapping[str, FieldType],
    fields: Sequence[str],
    ranges: Mapping[str, ImageRange],
    salts: Mapping[str, int] | None = None,
) -> FieldRecipes:
    """Check a recipe and return its operations on each field of a sample.

    augment: the recipe without its Maps (see `split_maps`). schema: types of the samples' fields.
    fields: selected fields in order, including "id" and "<name>.present". ranges: image sizes of
    each image field, including images that aren't selected but have masks. salts: salts of the
    draws by field (`entry_salts`). Raises RecipeError for operations that don't fit one another, or
    that selected masks, boxes or keypoints can't follow.
    """
    selected = {name: schema[name] for name in fields if name in schema}
    lists = _lists(augment, schema, selected, tuple(fields))
    names = [name for name, type in selected.items() if type.is_image]
    _check_crops(lists, selected)
    images: dict[str, CheckedRecipe] = {}
    for name in names:
        recipe = _checked(lists.get(name), name, ranges, alone=len(names) == 1)
        images[name] = replace(recipe, salt=(salts or {}).get(name, 0))
    _check_mixing(images, selected)
    _warn_of_coordinates(lists, selected)
    _warn_of_undeclared_masks(lists, selected)
    followers = {
        name: _follower(name, type, images, ranges)
        for name, type in selected.items()
        if type.follows
    }
    for name, type in selected.items():
        if (type.refers_to == "image" or type.follows) and type.reference in images:
            _check_followed(name, type, images[type.reference])
    return FieldRecipes(
        fields=tuple(fields),
        images=images,
        followers=_sanitized(lists, selected, followers),
        columns=_column_operations(lists, selected),
    )


def _warn_of_coordinates(
    lists: Mapping[str, Sequence[Operation]], selected: Mapping[str, FieldType]
) -> None:
    """Warn about selected arrays that may be boxes or points, and don't follow their image."""
    images = [name for name, type in selected.items() if type.is_image]
    moving = [
        op
        for ops in lists.values()
        for op in ops
        if op.moves_pixels and any(map(op.selects, images))
    ]
    for name in untyped_places(selected) if moving else ():
        _log.warning(
            '"%s" is %r, and delivered as stored: %s moves the pixels of images, not these '
            "numbers. If these are positions in an image, declare them to the Dataset: "
            'schema={"%s": Boxes(of=…, format=…)}, or Keypoints(of=…).',
            name,
            selected[name],
            type(moving[0]).__name__,
            name,
        )


def _warn_of_undeclared_masks(
    lists: Mapping[str, Sequence[Operation]], selected: Mapping[str, FieldType]
) -> None:
    """Warn about images that may be class numbers, and are resized and changed as pictures."""
    images = [name for name, type in selected.items() if type.is_image]
    others = [name for name in images if not is_mask_name(name, ())]
    for name in images:
        if others and name not in others and lists.get(name):
            _log.warning(
                '"%s" is Image, and the recipe treats its pixels as colours. If they are class '
                'numbers, declare it to the Dataset: schema={"%s": Mask(of="%s")}.',
                name,
                name,
                others[0],
            )


def _lists(
    augment: FieldLists | None,
    schema: Mapping[str, FieldType],
    selected: Mapping[str, FieldType],
    fields: tuple[str, ...],
) -> dict[str, tuple[Operation, ...]]:
    """Return the operations of each field that has any, with Decode at the front of an image's."""
    images = [name for name, type in selected.items() if type.is_image]
    if not isinstance(augment, Mapping):
        ops = operations_of(augment)
        if augment is not None and not images and not _is_about_fields(ops[1:], selected):
            raise RecipeError(
                f"augment= needs images, and fields={fields!r} has none. {_image_remedy(schema)}"
            )
        return {name: ops for name in images} or {"": ops}
    lists = {}
    for name, recipe in augment.items():
        if name not in schema:
            raise RecipeError(
                f"augment: got operations for {name!r}, which is no field of this dataset. Fields: "
                f"{list(schema)}."
            )
        if name not in selected:
            raise RecipeError(
                f"augment: got operations for {name!r}, but fields={fields!r} leaves it out. Leave "
                "its operations out too, or select it."
            )
        lists[name] = operations_of(recipe)
        if name not in images:
            _check_list_without_image(name, selected[name], lists[name][1:])
    return lists


def _is_about_fields(ops: tuple[Operation, ...], selected: Mapping[str, FieldType]) -> bool:
    """Return True if none of the operations works on images."""
    has_arrays = any(type.can_crop for type in selected.values())
    return bool(ops) and all(
        op.stage is Stage.FIELD or (has_arrays and isinstance(op, FixedCrop)) for op in ops
    )


def _image_remedy(schema: Mapping[str, FieldType]) -> str:
    images = [name for name, type in schema.items() if type.is_image]
    plain = [name for name, type in schema.items() if type.kind == "bytes"]
    if not images and plain:
        return (
            f'"{plain[0]}" is Bytes: if it holds encoded images, pass '
            f'schema={{"{plain[0]}": Image()}}, else drop augment=.'
        )
    if not images:
        return "This dataset has no image field: drop augment=."
    return f'Drop augment=, or add "{images[0]}" to the dataset\'s fields.'


def _check_list_without_image(name: str, type: FieldType, ops: tuple[Operation, ...]) -> None:
    """Raise RecipeError for operations that a field other than an image can't have."""
    kind = type.__class__.__name__
    if type.follows:
        advice = (
            f'{kind} follows the operations on "{type.reference}": put them into the list of that, '
            f'augment={{"{type.reference}": [...]}}.'
        )
    else:
        advice = f"operations work on images, and this is {kind}. Leave it out of augment=."
    if not ops:
        raise RecipeError(f'augment: the list of "{name}" does nothing; {advice}')
    for op in ops:
        if not op.fits_field(name, type):
            raise RecipeError(f'augment: got {op} for "{name}"; {advice}')


def _checked(
    ops: tuple[Operation, ...] | None, name: str, ranges: Mapping[str, ImageRange], *, alone: bool
) -> CheckedRecipe:
    """Check the recipe of an image. alone: it is the only image, so that messages don't name it."""
    try:
        return check_recipe(ops, images=ranges.get(name), field=name)
    except RecipeError as error:
        if alone:
            raise
        raise RecipeError(f'augment, of "{name}": {error}') from error


def _check_crops(
    lists: Mapping[str, tuple[Operation, ...]], selected: Mapping[str, FieldType]
) -> None:
    """Raise RecipeError for crops of fields that aren't selected images or arrays."""
    known = [name for name, type in selected.items() if type.is_image or type.can_crop]
    for ops in lists.values():
        for op in ops:
            for name in (op.fields or ()) if isinstance(op, FixedCrop) else ():
                if name not in known:
                    raise RecipeError(
                        f'{op}: "{name}" is no selected image or array. Selected: {known}.'
                    )


def _check_mixing(images: Mapping[str, CheckedRecipe], selected: Mapping[str, FieldType]) -> None:
    for recipe in images.values():
        if not recipe.mixing:
            continue
        op = type(recipe.mixing[0]).__name__
        if len(images) > 1:
            raise RecipeError(
                f"{op} blends the images and labels of two samples by one share, and each sample "
                f"has several images ({', '.join(images)}) with one label. Select one of "
                f"them, or leave {op} out and mix the batch in your training step."
            )
        followers = [other for other, type in selected.items() if type.follows]
        if followers:
            name = followers[0]
            raise RecipeError(
                f'{op} blends the pixels of two samples, and "{name}" would then be right for only '
                f'one of them. Leave "{name}" out of fields=, or {op} out of the recipe.'
            )


def _follower(
    name: str,
    type: FieldType,
    images: Mapping[str, CheckedRecipe],
    ranges: Mapping[str, ImageRange],
) -> Follower:
    of = type.reference
    assert of is not None, type
    if of in images:
        _, height, width = images[of].shape
        return Follower(type=type, of=of, moves=True, shape=(height, width))
    sizes = ranges.get(of)
    shape = None if sizes is None else sizes.fixed
    if shape is None and type.needs_size:
        has = "has" if sizes is not None and sizes != ANY_SIZE else "may have"
        raise RecipeError(
            f'"{name}" is {type!r}, and "{of}" isn\'t selected and {has} different sizes, so a '
            f'batch can\'t have it: select "{of}" too, whose recipe it follows, and add Resize or '
            "a crop to that."
        )
    return Follower(type=type, of=of, moves=False, shape=shape)


def _check_followed(name: str, type: FieldType, recipe: CheckedRecipe) -> None:
    """Raise RecipeError for operations that a field of an image can't follow."""
    for op in recipe.ops:
        if op.moves_pixels and not (type.follows and op.can_be_followed):
            why = "" if type.follows else ": its class has no `follow`"
            raise RecipeError(
                f'{op} may move pixels, and "{name}" ({type.__class__.__name__} of '
                f'"{type.reference}") can\'t follow it{why}. Leave "{name}" out of fields=, or '
                f"{op.__class__.__name__} out of the recipe{op.or_else}."
            )


def _sanitized(
    lists: Mapping[str, tuple[Operation, ...]],
    selected: Mapping[str, FieldType],
    followers: Mapping[str, Follower],
) -> dict[str, Follower]:
    """Return the followers with their SanitizeBoxes, including arrays that lose rows with boxes."""
    found = dict(followers)
    for key, ops in lists.items():
        for op in ops:
            if isinstance(op, SanitizeBoxes):
                for name in _boxes_of(op, key, selected, followers):
                    if found[name].sanitize not in (None, op):
                        raise RecipeError(f'Two SanitizeBoxes for "{name}": keep one.')
                    found[name] = replace(found[name], sanitize=op)
    for name, type in selected.items():
        if type.refers_to == "boxes" and type.reference is not None:
            boxes = found.get(type.reference)
            if boxes is not None and boxes.sanitize is not None:
                found[name] = Follower(
                    type=type,
                    of=boxes.of,
                    moves=boxes.moves,
                    sanitize=boxes.sanitize,
                    boxes=type.reference,
                )
            elif boxes is None and any(
                isinstance(op, SanitizeBoxes) for ops in lists.values() for op in ops
            ):
                raise RecipeError(
                    f'SanitizeBoxes drops boxes of "{type.reference}", which isn\'t selected, and '
                    f'"{name}" has a row for each of them. Select "{type.reference}" too.'
                )
    return found


def _boxes_of(
    op: SanitizeBoxes,
    key: str,
    selected: Mapping[str, FieldType],
    followers: Mapping[str, Follower],
) -> list[str]:
    """Return the boxes to which an operation in the list of a field applies."""
    boxes = [name for name, each in followers.items() if each.type.is_boxes and each.boxes is None]
    affected = [name for name in boxes if key in ("", name, followers[name].of)]
    for name in op.fields or ():
        if name not in boxes:
            known = f"fields of boxes that are selected: {boxes}"
            what = "isn't selected" if name not in selected else "isn't one of boxes"
            raise RecipeError(f'{op}: "{name}" {what}; {known}. Name one of these.')
        if name not in affected:
            raise RecipeError(
                f'{op} is in the list of "{key}", and "{name}" is of "{followers[name].of}". '
                "Put it into the list of that, and select it."
            )
    return [name for name in affected if op.fields is None or name in op.fields]


def _column_operations(
    lists: Mapping[str, Sequence[Operation]], selected: Mapping[str, FieldType]
) -> dict[str, ColumnOperation]:
    found: dict[str, ColumnOperation] = {}
    several: list[Sequence[Operation]] = []
    for ops in lists.values():
        if ops not in several:  # the fields of a tuple share a list
            several.append(ops)
    for op in (op for ops in several for op in ops if isinstance(op, ColumnOperation)):
        kind = op.__class__.__name__
        if op.field not in selected:
            raise RecipeError(
                f'{op}: "{op.field}" isn\'t selected. Leave {kind} out, or select it. Selected: '
                f"{list(selected)}."
            )
        if op.field in found:
            raise RecipeError(f'Two {kind} for "{op.field}": keep one.')
        op.check_types(selected)
        found[op.field] = op
    return found
