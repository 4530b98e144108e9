"""Check the recipes of all fields of a sample: its images, and the fields that follow them.

A list of operations applies to each selected image and to the masks, boxes and keypoints `of` it.
One operation draws the same numbers for all of them: images of the same size get the same window. A
mapping has a list for each image to change, and other images are only decoded. The fields of a
tuple share a list and its draws; different entries have different draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.augment.checked_recipes import ArrayCrop, FieldRecipes, Follower
from penstock.augment.field_operations import ColumnOperation, InstanceIds, Map, SanitizeBoxes
from penstock.augment.geometric_operations import FixedCrop
from penstock.augment.operation import Operation, Stage
from penstock.augment.recipe import CheckedRecipe, Recipe, check_recipe, operations_of
from penstock.augment.views import check_views
from penstock.cache import RecipeError, log
from penstock.readers import ANY_SIZE, ImageRange
from penstock.readers.fieldtypes import MASK, SIZE, FieldType, Schema, is_mask_name, untyped_places

Recipes = Recipe | Mapping[str | tuple[str, ...], Recipe]
"""The type of `augment=`: one list of operations, or a list by field or by a tuple of fields."""
FieldLists = Recipe | Mapping[str, Recipe]
"""Recipes with a list for each field of a tuple, as returned by `by_field`."""

Lists = Mapping[str, Sequence[Operation]]
"""The operations of each field that has any; one entry for "" if no image is selected."""
Types = Mapping[str, "FieldType"]


_MAY_BE_PLACES = (
    '"%s" is %r, and delivered as stored: %s moves the pixels of images, not these numbers. If '
    "these are positions in an image, declare them to the Dataset: "
    'schema={"%s": Boxes(of=…, format=…)}, or Keypoints(of=…).'
)
_MAY_BE_MASK = (
    '"%s" is Image, and the recipe treats its pixels as colours. If they are class numbers, '
    'declare it to the Dataset: schema={"%s": Mask(of="%s")}.'
)


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
        for op in recipe if isinstance(recipe, Sequence) and not isinstance(key, str) else ():
            if isinstance(op, Map) and op.fields is not None:
                raise RecipeError(
                    f"{op.name} has fields={op.fields!r} and is in the list of {key}, which is "
                    "for each of these fields. Leave its fields out, or put it into another list."
                )
    return lists


def check_recipes(
    augment: FieldLists | None,
    schema: Types,
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
    known = [name for name, type in selected.items() if type.is_image or type.can_crop]
    for op in _each(lists, FixedCrop):
        for name in op.fields or ():
            _claim({}, op, name, "image or array", known)
    images: dict[str, CheckedRecipe] = {}
    followed = {_image_of(type, schema) for type in selected.values() if type.follows}
    for name in names:
        ops = lists.get(name, ())
        try:
            if any(op.stage is Stage.VIEWS and op.selects(name) for op in ops):
                recipe = check_views(ops, images=ranges[name], name=name)
            else:
                recipe = check_recipe(
                    lists.get(name), images=ranges[name], field=name, lists=name in followed
                )
        except RecipeError as error:
            raise RecipeError(f'augment, of "{name}": {error}') from error
        images[name] = replace(recipe, salt=(salts or {}).get(name, 0))
    _check_mixing(images, selected)
    _warn_of_untyped_fields(lists, selected, names)
    followers = _followers(lists, schema, selected, images, ranges)
    fields = _with_views(fields, images)
    for name, recipe in images.items():
        boxed = {each.of for each in followers.values() if each.type.is_boxes}
        if recipe.needs_boxes and name not in boxed:
            raise RecipeError(
                f'RandomIoUCrop needs the boxes of "{name}", and none are selected: add the field '
                f'of Boxes(of="{name}") to fields=, or leave RandomIoUCrop out.'
            )
    columns: dict[str, ColumnOperation] = {}
    delivered = {**selected, **{name: each.type for name, each in followers.items()}}
    for op in _each(lists, ColumnOperation):
        for name in op.changes:
            if name not in images:  # a Pad of images belongs to their recipe
                _claim(columns, op, name, "field", selected)
        op.check_types(delivered)
        if taken := [name for name in op.adds if name in fields]:
            raise RecipeError(
                f'{op} adds the field "{taken[0]}" to each batch, and one of that name is there. '
                "Leave that out of fields=, rename it, or pack only once."
            )
        fields = (*fields, *op.adds)
    return FieldRecipes(fields=tuple(fields), images=images, followers=followers, columns=columns)


def _with_views(fields: Sequence[str], images: Mapping[str, CheckedRecipe]) -> tuple[str, ...]:
    """Return the fields of a batch, with those of views in place of their images. Raises
    RecipeError for two fields of one name, and for sizes and masks of images with views."""
    found: list[str] = []
    for field in fields:
        recipe = images.get(field)
        views = recipe.views if recipe is not None else ()
        found += [each.name for each in views] or [field]
    for name, recipe in images.items():
        wrong = [field for field in (name + SIZE, name + MASK) if field in fields]
        if wrong and recipe.views:
            raise RecipeError(
                f'"{wrong[0]}" describes one image of a sample, and Views gives several of '
                f'"{name}", which all have one size. Leave it out of fields=.'
            )
        for each in recipe.views:
            if found.count(each.name) > 1:
                raise RecipeError(
                    f'Views makes a field "{each.name}", and a batch has another one of that name: '
                    f"{found}. Choose another key."
                )
    return tuple(found)


def _each(lists: Lists, kind: type) -> list[Any]:
    """Return the different operations of a kind."""
    return [*dict.fromkeys(op for ops in lists.values() for op in ops if isinstance(op, kind))]


def _claim(found: dict[str, Any], op: Operation, name: str, wanted: str, known: Any) -> None:
    """Enter the operation on a field. Raises RecipeError for another field than the known ones, and
    for a second operation."""
    if name not in known:
        raise RecipeError(
            f'{op}: "{name}" is no selected {wanted}. Selected: {list(known)}. Name one of these, '
            "or leave the operation out."
        )
    if name in found:
        raise RecipeError(f'Two {op.__class__.__name__} for "{name}": keep one.')
    found[name] = op


def _warn_of_untyped_fields(lists: Lists, selected: Types, images: Sequence[str]) -> None:
    """Warn about selected fields that may be boxes, points or masks, and don't follow an image."""
    moving = [op for op in _each(lists, Operation) if op.moves_pixels]
    moving = [op for op in moving if any(map(op.selects, images))]
    for name in untyped_places(selected) if moving else ():
        log.warning(_MAY_BE_PLACES, name, selected[name], type(moving[0]).__name__, name)
    others = [name for name in images if not is_mask_name(name, ())]
    for name in images if others else ():
        if name not in others and lists.get(name):
            log.warning(_MAY_BE_MASK, name, name, others[0])


def _lists(
    augment: FieldLists | None, schema: Types, selected: Types, fields: tuple[str, ...]
) -> dict[str, tuple[Operation, ...]]:
    """Return the operations of each field that has any, with Decode at the front of an image's."""
    images = [name for name, type in selected.items() if type.is_image]
    if not isinstance(augment, Mapping):
        ops = operations_of(augment)
        if augment is not None and not images and not _is_about_fields(ops[1:], selected):
            raise RecipeError(
                f"augment= needs images, and fields={fields!r} has none. Drop augment=, or select "
                f"one of the dataset's fields {dict(schema)}. If one of these Bytes holds encoded "
                'images, pass schema={"its name": Image()} to the Dataset.'
            )
        return {name: ops for name in images} or {"": ops}
    lists = {}
    for name, recipe in augment.items():
        if name not in selected:
            raise RecipeError(
                f"augment: got operations for {name!r}, which isn't selected. Selected: "
                f"{list(fields)}, of the fields {list(schema)}. Leave its operations out, or "
                "select it."
            )
        lists[name] = operations_of(recipe)
        if name not in images:
            _check_list_without_image(name, selected[name], lists[name][1:])
    return lists


def _is_about_fields(ops: tuple[Operation, ...], selected: Types) -> bool:
    """Return True if none of the operations works on images."""
    has_arrays = any(type.can_crop for type in selected.values())
    return bool(ops) and all(
        op.stage is Stage.FIELD or (has_arrays and isinstance(op, FixedCrop)) for op in ops
    )


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
    if wrong := [op for op in ops if not op.fits_field(name, type)]:
        raise RecipeError(f'augment: got {wrong[0]} for "{name}"; {advice}')
    if not ops:
        raise RecipeError(f'augment: the list of "{name}" does nothing; {advice}')


def _check_mixing(images: Mapping[str, CheckedRecipe], selected: Types) -> None:
    mixing = [op for recipe in images.values() for op in recipe.mixing]
    others = [name for name, type in selected.items() if type.follows]
    if mixing and (others or len(images) > 1):
        op = type(mixing[0]).__name__
        raise RecipeError(
            f"{op} blends the images and labels of two samples by one share, so a sample may have "
            f"one image and nothing that follows it, and has {[*images, *others]}. Leave some out "
            f"of fields=, or leave {op} out and mix the batch in your training step."
        )


def _followers(
    lists: Lists,
    schema: Types,
    selected: Types,
    images: Mapping[str, CheckedRecipe],
    ranges: Mapping[str, ImageRange],
) -> dict[str, Follower]:
    """Return the fields that follow images, and those that lose rows with their boxes."""
    sanitizers, drops_boxes = _sanitizers(lists, selected), bool(_each(lists, SanitizeBoxes))
    numbered: dict[str, InstanceIds] = {}
    for op in _each(lists, InstanceIds):
        _claim(numbered, op, op.field, "field", selected)
    found: dict[str, Follower] = {}
    for name, type in selected.items():
        of, boxes = type.reference, None
        if of is None:
            continue
        if type.refers_to == "boxes":
            boxes, of = of, _image_of(type, schema)
            if boxes not in selected and drops_boxes:
                raise RecipeError(
                    f'SanitizeBoxes drops boxes of "{boxes}", which isn\'t selected, and "{name}" '
                    f'has a row for each of them. Select "{boxes}" too.'
                )
        if of in images and (type.follows or type.refers_to == "image"):
            _check_followed(name, type, of, images[of])
        sanitize = sanitizers.get(boxes or name)
        if not type.follows and (boxes is None or sanitize is None):
            continue
        shape = _shape_of(name, type, of, images, ranges) if type.follows else None
        own = numbered[name].applied(type) if name in numbered else type
        kept = boxes if sanitize else None
        found[name] = Follower(type=own, of=of, shape=shape, sanitize=sanitize, boxes=kept)
    return found


def _image_of(type: FieldType, schema: Types) -> str:
    """Return the image to which a field belongs, by way of its boxes if it has a row for each."""
    of = type.reference or ""
    return (schema[of].reference or "") if type.refers_to == "boxes" else of


def _sanitizers(lists: Lists, selected: Types) -> dict[str, SanitizeBoxes]:
    """Return the operation that drops boxes, by field of boxes."""
    boxes = {name: type.reference for name, type in selected.items() if type.is_boxes}
    found: dict[str, SanitizeBoxes] = {}
    for op in _each(lists, SanitizeBoxes):
        keys = {key for key, ops in lists.items() if op in ops}
        affected = [name for name, of in boxes.items() if keys & {"", name, of}]
        for name in op.fields or affected:
            _claim(found, op, name, "field of boxes of the image in whose list it is", affected)
    return found


def _shape_of(
    name: str,
    type: FieldType,
    of: str,
    images: Mapping[str, CheckedRecipe],
    ranges: Mapping[str, ImageRange],
) -> tuple[int, int] | None:
    """Return the height and width of a follower's image in a batch, if it is known. of: the
    image."""
    if of in images:
        return images[of].shape[1:] if images[of].is_fixed else None
    shape = ranges.get(of, ANY_SIZE).fixed
    if shape is None and type.needs_size:
        raise RecipeError(
            f'"{name}" is {type!r}, and "{of}" isn\'t selected and may have different sizes, so a '
            f'batch can\'t have it: select "{of}" too, and add Resize or a crop to its recipe.'
        )
    return shape


def _check_followed(name: str, type: FieldType, of: str, recipe: CheckedRecipe) -> None:
    """Raise RecipeError for operations that a field of an image can't follow. of: the image."""
    for op in recipe.ops:
        if op.moves_pixels and not (type.follows and op.can_be_followed):
            why = "" if type.follows else ": its class has no `follow`"
            raise RecipeError(
                f'{op} may move pixels, and "{name}" ({type.__class__.__name__} of '
                f'"{of}") can\'t follow it{why}. Leave "{name}" out of fields=, or '
                f"{op.__class__.__name__} out of the recipe{op.or_else}."
            )


def is_array_crop(op: object, of: str | None, schema: Types, fields: Sequence[str]) -> bool:
    """Return True if an operation crops arrays only. of: the field whose list contains it."""
    if not isinstance(op, FixedCrop):
        return False
    names = _cropped_fields(op, of, schema, fields)
    return bool(names) and all(name in names for name in op.fields or ())


def check_array_crops(
    augment: FieldLists | None,
    schema: Schema,
    fields: Sequence[str],
    salts: Mapping[str, int] | None = None,
) -> dict[str, ArrayCrop]:
    """Return the crop of each array field that has one.

    augment: the recipe without its Maps. schema: types of the stored samples. fields: selected
    fields. salts: salts of the draws by field (`entry_salts`). Raises RecipeError for crops that
    don't fit their arrays.
    """
    found: dict[str, ArrayCrop] = {}
    lists = augment if isinstance(augment, Mapping) else {None: augment}
    for of, recipe in lists.items():
        for index, op in enumerate(operations_of(recipe)):
            if not isinstance(op, FixedCrop):
                continue
            crops: dict[str, ArrayCrop] = {}
            for name in _cropped_fields(op, of, schema, fields):
                if name in found:
                    raise RecipeError(f'{found[name].op} and {op} both crop "{name}": keep one.')
                salt = (salts or {}).get(name, 0)
                crops[name] = _checked_crop(op, name, schema[name], index=index, salt=salt)
            _check_equal_sides(op, crops)
            found |= crops
    return found


def cropped_schema(schema: Schema, crops: Mapping[str, ArrayCrop]) -> Schema:
    """Return the schema of samples whose arrays are cropped."""
    changed: dict[str, FieldType] = {
        name: replace(schema[name], shape=crop.shape)  # type: ignore[type-var]
        for name, crop in crops.items()
    }
    return schema.__class__({**schema, **changed}) if crops else schema


def _cropped_fields(
    op: FixedCrop, of: str | None, schema: Types, selected: Sequence[str]
) -> list[str]:
    """Return the names of the arrays that an operation crops. of: the field whose list contains
    it."""
    types = {name: schema[name] for name in selected if name in schema}
    arrays = [name for name, type in types.items() if type.can_crop and of in (None, name)]
    if op.fields is not None:
        return [name for name in arrays if name in op.fields]
    if of is not None:
        return arrays
    if any(type.is_image for type in types.values()):
        return []
    fitting = [name for name in arrays if types[name].reference is None and _fits(op, types[name])]
    if not fitting:
        raise RecipeError(
            f"{op}: no selected array has {len(op.lengths)} axes or more. Pass another size. "
            f"Selected: {types}."
        )
    return fitting


def _fits(op: FixedCrop, type: FieldType) -> bool:
    return type.form is not None and len(type.form.shape) >= len(op.lengths)


def _checked_crop(op: FixedCrop, name: str, type: FieldType, *, index: int, salt: int) -> ArrayCrop:
    sides = () if type.form is None else type.form.shape
    lengths = (None,) * (len(sides) - len(op.lengths)) + op.lengths
    pairs = list(zip(sides, lengths, strict=False))
    if op.padding_px or op.pad_if_needed:
        why = "only images can be padded: crop them by another operation, or leave the padding out"
    elif type.reference is not None:
        why = f'it has a row for each of "{type.reference}", and follows them: leave it out'
    elif not _fits(op, type):
        why = f"the crop has {len(op.lengths)} lengths for the last axes of a sample: pass fewer"
    elif (None, None) in pairs:
        axis = pairs.index((None, None))
        why = f"samples differ in length along axis {axis}, which a batch can't: pass a length"
    elif any(length and side and length > side for side, length in pairs):
        why = f"its samples have the smaller shape {sides}"
    else:
        shape = tuple(length or side or 1 for side, length in pairs)
        return ArrayCrop(op=op, index=index, sides=sides, shape=shape, salt=salt)
    raise RecipeError(f'{op} can\'t crop "{name}", {type}: {why}.')


def _check_equal_sides(op: FixedCrop, crops: Mapping[str, ArrayCrop]) -> None:
    """Raise RecipeError unless the fields of one crop have the same lengths along cropped axes:
    they have the same corner."""
    lengths = {
        tuple(crop.sides[axis] for axis in crop.axes if crop.shape[axis] != crop.sides[axis])
        for crop in crops.values()
    }
    if len([each for each in lengths if None not in each]) > 1:
        shapes = {name: crop.sides for name, crop in crops.items()}
        raise RecipeError(
            f"{op} crops the same part of all its fields, and they differ in length along cropped "
            f"axes: {shapes}. Pass fields=, and crop the other fields by another operation."
        )
