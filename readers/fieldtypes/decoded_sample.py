"""Decode one sample completely, for a person who looks at it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.fieldtypes.columns import EncodedColumn, SampleBatch
from penstock.readers.fieldtypes.field_type import MASK, PRESENT, is_number
from penstock.readers.fieldtypes.schema import Schema, base_name, stored_fields
from penstock.readers.types import MAX_PIXELS

if TYPE_CHECKING:
    from collections.abc import Iterable


def fields_to_decode(fields: Iterable[str], schema: Schema) -> tuple[str, ...]:
    """Return the fields that `decoded_sample` needs for these: also the images that others
    follow."""
    wanted = stored_fields(fields, schema)
    images = (image_of(name, schema) for name in wanted if schema[name].follows)
    return tuple(dict.fromkeys([*wanted, *(name for name in images if name)]))


def image_of(name: str, schema: Schema) -> str | None:
    """Return the image to which a field belongs, perhaps by way of its boxes; None without one."""
    seen: set[str] = set()
    while name in schema and name not in seen:
        if schema[name].is_image:
            return name
        seen.add(name)
        name = schema[name].reference or ""
    return None


def decoded_sample(
    content: SampleBatch, schema: Schema, fields: Iterable[str], *, max_pixels: int = MAX_PIXELS
) -> dict[str, Any]:
    """Return the values of a batch's only sample by field, as batches without a recipe have them.

    content: has at least `fields_to_decode`. Images are uint8, (3, height, width); arrays and
    numbers are numpy's; a field that the sample lacks is None. Raises ValueError, with the field's
    name, for a value that doesn't decode, and DatasetError for one that doesn't fit its image.
    """
    values: dict[str, Any] = {}
    for name in fields:
        if is_number(name, schema):
            values[name] = content.ids[0]
            continue
        base = base_name(name, schema)
        present = content.present.get(base)
        if base != name and name.endswith(PRESENT):
            values[name] = np.bool_(present is None or present[0])
        elif present is not None and not present[0]:
            values[name] = None
        elif base != name:
            size = _decoded(base, content, schema, max_pixels=max_pixels).shape[1:]
            values[name] = np.ones(size, np.bool_) if name.endswith(MASK) else np.array(size)
        else:
            values[name] = _decoded(name, content, schema, max_pixels=max_pixels)
    return values


def _decoded(name: str, content: SampleBatch, schema: Schema, *, max_pixels: int) -> Any:
    column, type = content.columns[name], schema[name]
    value: Any = None
    if isinstance(column, EncodedColumn):
        try:
            value = type.decoder(max_pixels=max_pixels)(column.samples[0])
        except ValueError as error:
            raise ValueError(f'"{name}": {error}') from error
        if type.is_image:
            return np.ascontiguousarray(value.transpose(2, 0, 1))
        column = type.column([value])
    if type.follows:
        image = content.columns.get(image_of(name, schema) or "")
        size = None
        if isinstance(image, EncodedColumn) and image.dims is not None:
            height, width = image.dims[0].tolist()
            size = height, width
        column = type.follow(column, None, size=size)
    return column.sample(0)
