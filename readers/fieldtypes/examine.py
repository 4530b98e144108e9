"""Check every field of a sample completely before the sample may enter a dataset.

The schema determines the checks of a field; nothing is guessed from its bytes. Images are decoded
by the installed decoder (`verify`), all of a batch at once; a type checks every other field itself.
Tables and chunks aren't read when they are indexed: `value_checks.py` checks their values in a
batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import ConfigError
from penstock.readers.fieldtypes.array_forms import bare_facts, decode_array
from penstock.readers.fieldtypes.verification import check_images, named_verify
from penstock.readers.types import MAX_PIXELS, Facts, Rejection

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes.field_type import FieldType
    from penstock.readers.fieldtypes.schema import Schema
    from penstock.readers.types import Encoded, Verify

    Spans = Mapping[str, Sequence[Encoded | Rejection | None]]
    Noted = Mapping[str, Sequence[NDArray[Any] | None]]
    Checked = Mapping[str, Sequence[Facts | Rejection | None]]


def verify_for(
    schema: Schema, verify: Verify | None, *, workers: int, max_pixels: int | None = None
) -> Verify | None:
    """Return the decoder of a dataset's images: `verify`, else the installed one; None if there are
    no images, so that none needs to be installed. max_pixels: of an image; None uses the default.
    Raises MissingDependencyError."""
    if not any(type.is_image for type in schema.values()):
        return None
    return verify or named_verify(workers=workers, max_pixels=max_pixels)


def check_files(
    samples: Spans,
    schema: Schema,
    *,
    codecs: Mapping[str, str] | None = None,
    max_pixels: int = MAX_PIXELS,
) -> Checked:
    """Check the fields that need no decoder of images, each apart from the others. Returns the
    facts of each sample, or why it is bad; None if it lacks the field. codecs: of arrays without a
    header, by field."""

    def check(name: str, type: FieldType, data: Encoded) -> Facts | Rejection:
        if not type.in_files:
            raise ConfigError(
                f'schema["{name}"]: {type!r} is a value of a table or a JSON file. For a value in '
                'a file of its own (.npy) use an Array, such as Array("float32", ()).'
            )
        try:
            if codecs and name in codecs and type.form is not None:
                return bare_facts(data, type.form, codecs[name])
            return type.check(data, field=name, max_pixels=max_pixels)
        except ValueError as error:
            return Rejection(str(error))

    return {
        name: [
            check(name, type, each) if isinstance(each, np.ndarray) else each
            for each in samples[name]
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
    if it was called. max_pixels: of an image or a mask. Raises ConfigError for fields that can't
    lie in files.
    """
    known = {**(checked or check_files(samples, schema, max_pixels=max_pixels))}
    # Images come first: masks and boxes need their sizes.
    names = sorted((n for n in schema if n in samples), key=lambda name: not schema[name].is_image)
    for name in names:
        if schema[name].is_image:
            known[name] = check_images(samples[name], verify, max_pixels=max_pixels)
    tables = noted or {}

    def sample(row: int) -> Mapping[str, Facts] | Rejection:
        facts: dict[str, Facts] = {}
        for name in names:
            data, each = samples[name][row], known[name][row]
            if isinstance(each, Facts) and isinstance(data, np.ndarray):
                each = _check_owner(schema[name], data, each, facts) or each
            if isinstance(each, Rejection):
                is_alone = len(samples) + len(tables) == 1
                return each if is_alone else Rejection(f"{name}: {each.reason}")
            if each is not None:
                facts[name] = each
        values = {name: each[row] for name, each in tables.items()}
        refusal = check_noted(values, facts, schema)
        return refusal or {name: facts[name] for name in schema if name in facts}

    return [sample(row) for row in range(max(map(len, samples.values()), default=0))]


def _check_owner(
    type: FieldType, data: Encoded, own: Facts, facts: Mapping[str, Facts]
) -> Rejection | None:
    """Check the values of arrays, and whether a mask fits its image."""
    size = _image_size(type, facts)
    if type.form is not None and type.checks_values:
        return type.check_values(decode_array(data[own.start :], own.codec, own.shape), size)
    if not (type.has_sides and type.reference):
        return None
    if size is None:
        return Rejection(f'a mask without its image ("{type.reference}")')
    height, width = own.shape[:2]
    if (height, width) == size:
        return None
    return Rejection(
        f"it is {width} wide and {height} high, and its image is {size[1]} wide and {size[0]} high"
    )


def _image_size(type: FieldType, facts: Mapping[str, Facts]) -> tuple[int, int] | None:
    """Return the height and width of the image to which a sample belongs, None if it is unknown."""
    image = facts.get(type.reference or "") if type.refers_to == "image" else None
    return None if image is None else (image.shape[0], image.shape[1])


def check_noted(
    values: Mapping[str, NDArray[Any] | None], facts: Mapping[str, Facts], schema: Schema
) -> Rejection | None:
    """Return why the values that a table holds of one sample don't fit its image, or why arrays
    that belong to boxes don't have one row per box; else None. values: None if the table holds
    none."""
    lengths = {name: each.shape[0] for name, each in facts.items() if each.shape}
    for name, value in values.items():
        if value is None:
            continue
        lengths[name] = len(value)
        refusal = schema[name].check_values(value, _image_size(schema[name], facts))
        if refusal is not None:
            return Rejection(f"{name}: {refusal.reason}")
    for name, type in schema.items():
        if type.refers_to != "boxes" or name not in lengths or type.reference not in lengths:
            continue
        if lengths[name] != lengths[type.reference]:
            return Rejection(
                f"{name}: {lengths[name]} rows for the {lengths[type.reference]} boxes of "
                f'"{type.reference}"'
            )
    return None
