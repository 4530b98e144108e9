"""Check every field of a sample completely before the sample may enter a dataset.

The schema determines the checks of a field; nothing is guessed from its bytes. Images are decoded
by the installed decoder (`verify`), all of a batch at once; a type checks every other field itself.
Tables and chunks aren't read when they are indexed: `ValueChecks` checks their values in a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.readers.fieldtypes.array_forms import bare_facts, decode_array
from penstock.readers.fieldtypes.columns import ArrayColumn, EncodedColumn, RaggedColumn
from penstock.readers.fieldtypes.verification import check_images, named_verify
from penstock.readers.types import MAX_PIXELS, UNFIT, Encoded, Facts, Numbers, Rejection, Verify

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.readers.fieldtypes.columns import SampleBatch
    from penstock.readers.fieldtypes.field_type import FieldType, FieldTypes
    from penstock.readers.fieldtypes.schema import Schema

    Spans = Mapping[str, Sequence[Encoded | Rejection | None]]
    Noted = Mapping[str, Sequence[Numbers | None]]
    Checked = Mapping[str, Sequence[Facts | Rejection | None]]


def verify_for(
    schema: Schema, verify: Verify | str | None, *, workers: int, max_pixels: int = MAX_PIXELS
) -> Verify | None:
    """Return the decoder of a dataset's images: `verify`, or the one of that name, else the
    installed one; None if there are no images, so that none needs to be installed. max_pixels: of
    an image. Raises MissingDependencyError."""
    if not any(type.is_image for type in schema.values()):
        return None
    if callable(verify):
        return verify
    return named_verify(verify or "image", workers=workers, max_pixels=max_pixels)


def check_files(
    samples: Spans, schema: Schema, *, codecs: Mapping[str, str], max_pixels: int
) -> Checked:
    """Check the fields that need no decoder of images, each apart from the others. Returns the
    facts of each sample, or why it is bad; None if it lacks the field. codecs: of arrays without a
    header, by field."""

    def check(name: str, type: FieldType, data: Encoded) -> Facts | Rejection:
        try:
            if name in codecs and type.form is not None:
                return bare_facts(data, type.form, codecs[name])
            return type.check(data, field=name, max_pixels=max_pixels)
        except ValueError as error:
            return Rejection(str(error))

    return {
        name: [
            check(name, type, one) if isinstance(one, np.ndarray) else one for one in samples[name]
        ]
        for name, type in schema.items()
        if name in samples and not type.is_image
    }


def examine(
    samples: Spans,
    schema: Schema,
    verify: Verify | None,
    *,
    noted: Noted | None = None,
    checked: Checked | None = None,
    max_pixels: int = MAX_PIXELS,
) -> list[Mapping[str, Facts] | Rejection]:
    """Check all fields of each sample: return the facts of the fields that it has, or why it is
    bad.

    samples: by field, the bytes of every field that lies in files, or why they couldn't be read;
    None if the sample lacks the field. noted: values that a table holds, as `noted_values` returns
    them. verify: decodes images; None if the schema has none. checked: the result of `check_files`,
    if it was called. max_pixels: of an image or a mask.
    """
    known = {**(checked or check_files(samples, schema, codecs={}, max_pixels=max_pixels))}
    for name in samples:
        if schema[name].is_image:
            known[name] = check_images(samples[name], verify, max_pixels=max_pixels)
    tables, names = noted or {}, [name for name in schema if name in samples]
    is_alone = len(samples) + len(tables) == 1

    def sample(row: int) -> Mapping[str, Facts] | Rejection:
        found = {name: known[name][row] for name in names}
        values = {name: each[row] for name, each in tables.items()}
        facts: dict[str, Facts] = {}
        for name, each in found.items():
            if isinstance(each, Rejection):
                return each if is_alone else Rejection(f"{name}: {each.reason}")
            if each is None:
                continue
            facts[name], data = each, samples[name][row]
            if schema[name].form is not None and schema[name].checks_values:
                assert isinstance(data, np.ndarray), name
                values[name] = decode_array(data[each.start :], each.codec, each.shape)
        return check_related(values, facts, schema) or facts

    return [sample(row) for row in range(max(map(len, samples.values()), default=0))]


def check_related(
    values: Mapping[str, Numbers | None], facts: Mapping[str, Facts], schema: Schema
) -> Rejection | None:
    """Return why values of a sample are invalid or lie outside their image, why a mask doesn't have
    the size of its image, or why arrays that belong to boxes don't have one row per box; else None.
    values: those that a table holds or that have rules, None if the sample lacks the field. facts:
    of its fields in files."""
    shapes = {name: each.shape for name, each in {**facts, **values}.items() if each is not None}
    for name, type in schema.items():
        of, reason, value = type.reference or "", "", values.get(name)
        mine, its = shapes.get(name), shapes.get(of)
        image = schema[of].reference or "" if of in schema else ""
        pixels = its if type.refers_to == "image" else shapes.get(image)
        size = (pixels[0], pixels[1]) if pixels and type.refers_to is not None else None
        if value is not None:
            refusal = type.check_values(value, size)
            reason = "" if refusal is None else refusal.reason
            if type.is_encoded and not reason:
                mine = (type.rows_of(value),)
        elif mine and of and type.has_sides and size is None:
            reason = f'a mask without its image ("{of}")'
        elif mine and size and (sides := type.sides_of(mine)) not in (None, size):
            own, image = (f"{each[1]} wide and {each[0]} high" for each in (sides or mine, size))
            reason = f"it is {own}, and its image is {image}"
        if type.is_measured and value is not None and size and value.any():
            own, found = (f"{each[1]} wide and {each[0]} high" for each in (size, value.tolist()))
            if own != found:
                reason = f"the annotations are of an image {found}, and it is {own}"
        if not reason and mine and its and type.refers_to == "boxes" and mine[0] != its[0]:
            reason = f'{mine[0]} rows for the {its[0]} boxes of "{of}"'
        if reason:
            return Rejection(f"{name}: {reason}")
    return None


class ValueChecks:
    """Checks the values of fields whose type has rules for them, such as boxes. Safe on any
    thread."""

    def __init__(self, types: FieldTypes, *, samples: int) -> None:
        """samples: of the dataset."""
        from penstock.readers.fieldtypes.boxes import BoxUnits

        self._types = types
        self._units = BoxUnits(enough=min(8, samples))

    @classmethod
    def of(cls, schema: FieldTypes, fields: Sequence[str], *, samples: int) -> ValueChecks | None:
        """Return checks of those of the fields that have rules; None if there are none."""
        types = {name: schema[name] for name in fields if name in schema}
        types = {name: t for name, t in types.items() if t.checks_values and not t.is_encoded}
        return cls(types, samples=samples) if types else None

    def __call__(self, content: SampleBatch) -> dict[int, str]:
        """Return why rows are bad, by row. content: as stored. Raises DatasetError if all boxes
        have the wrong unit."""
        found: dict[int, str] = {}
        for name, type in self._types.items():
            column = content.columns[name]
            assert isinstance(column, ArrayColumn), name
            self._units.add(name, type, column.values)
            image = content.columns.get(type.reference or "")
            dims = image.dims if isinstance(image, EncodedColumn) else None
            if isinstance(column, RaggedColumn) and column.shapes is None:
                # Rows of several samples together are rows of a sample, too.
                sizes = None if dims is None else np.repeat(dims, np.diff(column.offsets), axis=0)
                if type.check_values(column.values, sizes) is None:
                    continue
            for row in np.flatnonzero(content.has(name)).tolist():
                values: Numbers = column.sample(row)
                size = None if dims is None else np.repeat(dims[row : row + 1], len(values), axis=0)
                if (refusal := type.check_values(values, size)) is not None:
                    found.setdefault(row, f"{name}: {refusal.reason}. {UNFIT}")
        return found
