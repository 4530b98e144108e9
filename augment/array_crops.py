"""Crop arrays: check the crops of a recipe, and draw the part of each sample before it is read.

A crop is drawn before its samples are read, so that only that part of them is read. So it precedes
all other operations on them, and its arrays have their stored shapes.

The draws are those of images: if one operation of a list, or of a tuple's entry, crops an array and
an image of the same height and width, both have the same window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.augment.draw_keys import Uniform, draw_base
from penstock.augment.geometric_operations import FixedCrop
from penstock.augment.recipe import operations_of
from penstock.cache import RecipeError
from penstock.readers.fieldtypes import ColumnCrop, DenseColumn, RaggedColumn, put_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.augment.draw_keys import Ints
    from penstock.augment.field_recipes import FieldLists
    from penstock.readers.fieldtypes import Column, FieldType, SampleBatch, Schema


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayCrop:
    """A crop of one array field. Only `check_array_crops` creates it.

    op: the operation. index: its place in the recipe. sides: lengths of the field's samples, None
    if they differ. shape: shape of the cropped part. salt: part of the key of its draws.
    """

    op: FixedCrop
    index: int
    sides: tuple[int | None, ...]
    shape: tuple[int, ...]
    salt: int = 0

    @property
    def is_random(self) -> bool:
        """True if a sample's crop differs from epoch to epoch."""
        return self.op.is_random

    @property
    def axes(self) -> range:
        """The axes that have a length in the operation's size: the last ones."""
        return range(len(self.sides) - len(self.op.lengths), len(self.sides))


def is_array_crop(
    op: object, of: str | None, schema: Mapping[str, FieldType], fields: Sequence[str]
) -> bool:
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
    op: FixedCrop, of: str | None, schema: Mapping[str, FieldType], selected: Sequence[str]
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
    cropped = [
        tuple(crop.sides[axis] for axis in crop.axes if crop.shape[axis] != crop.sides[axis])
        for crop in crops.values()
    ]
    if len({sides for sides in cropped if None not in sides}) > 1:
        shapes = {name: crop.sides for name, crop in crops.items()}
        raise RecipeError(
            f"{op} crops the same part of all its fields, and they differ in length along cropped "
            f"axes: {shapes}. Pass fields=, and crop the other fields by another operation."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayDraws:
    """The draws of the parts of arrays: pure functions of (seed, epoch, sample id), on any
    thread."""

    crops: Mapping[str, ArrayCrop]
    seed: int

    @property
    def is_random(self) -> bool:
        """True if a sample's crop differs from epoch to epoch."""
        return any(crop.is_random for crop in self.crops.values())

    def before(self, ids: Ints, epoch: int) -> dict[str, ColumnCrop]:
        """Return the crops of fields whose samples have the same shape; only these parts are
        read."""
        return {
            name: ColumnCrop(self._corners(crop, ids, epoch, crop.sides), crop.shape)
            for name, crop in self.crops.items()
            if None not in crop.sides
        }

    def after(self, content: SampleBatch, epoch: int, bad: dict[int, str]) -> SampleBatch:
        """Return the batch with the cropped parts of fields whose samples differ in shape, which is
        known after they were read.

        bad: rows that are known to be bad; rows of samples that are too small are added, with
        reasons.
        """
        columns: dict[str, Column] = {}
        for name, crop in self.crops.items():
            if None in crop.sides:
                columns[name] = self._cropped(name, content, crop, epoch, bad)
        return content.with_columns(columns) if columns else content

    def _cropped(
        self, name: str, content: SampleBatch, crop: ArrayCrop, epoch: int, bad: dict[int, str]
    ) -> DenseColumn:
        column = content.columns[name]
        assert isinstance(column, DenseColumn | RaggedColumn)
        shapes = _shapes(column, len(crop.shape))
        is_small = (shapes < crop.shape).any(axis=1)
        present = content.present.get(name)
        for row in np.flatnonzero(is_small).tolist():
            if row not in bad and (present is None or present[row]):
                bad[row] = (
                    f'"{name}" has the shape {tuple(shapes[row].tolist())}, and the recipe crops '
                    f"parts of shape {crop.shape}"
                )
        corners = self._corners(crop, content.ids, epoch, shapes)
        out = np.zeros((len(content), *crop.shape), column.values.dtype)
        there = np.flatnonzero(~is_small)
        put_parts(map(column.sample, there.tolist()), corners[there], out, there)
        return DenseColumn(out)

    def _corners(
        self, crop: ArrayCrop, ids: Ints, epoch: int, sides: Ints | Sequence[int | None]
    ) -> Ints:
        """Return the first index along each axis, int64, shape (n, dimensions)."""
        found = np.zeros((len(ids), len(crop.shape)), np.int64)
        whole = np.broadcast_to(np.asarray(sides, np.int64), found.shape)
        places = np.zeros((len(crop.axes), 1))
        if crop.is_random:
            base = draw_base(self.seed, epoch, ids, salt=crop.salt)
            places = Uniform(base, crop.index)(len(crop.axes))
        for number, axis in enumerate(crop.axes):
            length = crop.shape[axis]
            side = np.maximum(whole[:, axis], length)  # of a sample that is too small: any index
            found[:, axis] = crop.op.corner(side, length, places[number])
        return found


def _shapes(column: DenseColumn | RaggedColumn, dimensions: int) -> Ints:
    if isinstance(column, RaggedColumn) and column.shapes is not None:
        return column.shapes
    samples = map(column.sample, range(len(column)))
    return np.array([each.shape for each in samples], np.int64).reshape(-1, dimensions)
