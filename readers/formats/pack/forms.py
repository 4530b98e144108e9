"""How each type of field lies in a pack: as an Arrow column of its natural type.

Bytes lie as large_binary (text as large_string), numbers as primitives, arrays of one shape as
fixed_size_list (flat; the shape stands in the column's metadata), arrays whose first length differs
as large_list, and arrays of which others differ too as a struct of their values and their shape. A
complex number lies as its two parts; a bool of a ragged array as a byte, since bits have no
address. What a sample lacks is null.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from penstock.cache.errors import ConfigError
from penstock.readers.fields.arrays import array_form, has_sides, number_dtype
from penstock.readers.fields.field_types import (
    MultiLabel,
    Text,
    is_encoded,
)

if TYPE_CHECKING:
    from penstock.readers.fields.field_types import FieldType
    from penstock.readers.fields.schema import Schema
    from penstock.readers.formats.layout import Storage

SHAPE = b"penstock.shape"
"""In a column's metadata: the shape of one sample, as a JSON list."""

VALUES, SHAPES = "values", "shape"
"""The parts of a column whose samples differ in more than their first length."""

_MAX_NUMBERS = 2**31 - 1

# Rows of at least so many bytes are worth a request of their own where a shard isn't kept.
_LEAST_ROW_BYTES = 128


_BYTES = np.dtype(np.uint8)
_STORAGE: dict[str, Storage] = {
    "bytes": "span",
    "value": "value",
    "dense": "rows",
    "ragged": "span",
    "shaped": "span",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackForm:
    """How one field lies in a shard.

    kind: "bytes" that somebody decodes; "value", one number; "dense", of one shape; "ragged" in the
    first length; "shaped", ragged in others too. arrow: the column's type. row: the shape of a
    sample where dense, of one row of it where ragged, and None where it differs if shaped. dtype:
    of what is handed out; lies: of the numbers in the file, bool where they lie as bits.
    is_picture: whether height, width, channels and codec are noted beside it.
    """

    kind: Literal["bytes", "value", "dense", "ragged", "shaped"]
    arrow: Any
    row: tuple[int | None, ...] = ()
    dtype: np.dtype[Any] = _BYTES
    lies: np.dtype[Any] = _BYTES
    is_picture: bool = False

    @property
    def is_span(self) -> bool:
        """Whether samples are byte ranges whose lengths differ."""
        return self.kind in ("bytes", "ragged", "shaped")

    @property
    def storage(self) -> Storage:
        """How it is stored, in the words of a manifest."""
        return _STORAGE[self.kind]

    @property
    def is_bits(self) -> bool:
        """Whether the numbers lie as single bits."""
        return self.lies.kind == "b"

    @property
    def numbers(self) -> int:
        """Numbers in the file that make up one row; of what is shaped, one number."""
        return _numbers(self.row if self.kind != "shaped" else ()) * _parts(self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; not of bits."""
        return self.numbers * self.lies.itemsize

    @property
    def has_crcs(self) -> bool:
        """Whether each sample has a CRC-32C of its own; one number has that of its column."""
        return self.kind != "value"

    @property
    def has_ranges(self) -> bool:
        """Whether one row is worth a request of its own."""
        return self.kind == "dense" and not self.is_bits and self.row_bytes >= _LEAST_ROW_BYTES


def pack_forms(schema: Schema) -> dict[str, PackForm]:
    """How each field lies in a pack. Raises as `pack_form` does, with the field's name."""
    found = {}
    for name, type in schema.items():
        try:
            found[name] = pack_form(type)
        except ConfigError as error:
            raise ConfigError(f'"{name}": {error}') from error
    return found


@lru_cache(maxsize=1024)
def pack_form(type: FieldType) -> PackForm:
    """How a field of this type lies in a pack. Raises ConfigError for one whose dtype or number of
    dimensions nobody knows yet, and for samples that are too large."""
    if is_encoded(type):
        arrow = pa.large_string() if isinstance(type, Text) else pa.large_binary()
        return PackForm(kind="bytes", arrow=arrow, is_picture=has_sides(type))
    number, form = number_dtype(type), array_form(type)
    if number is not None:
        return replace(_dense(number, ()), kind="value")
    if isinstance(type, MultiLabel):
        return _dense(np.dtype(np.float32), (len(type.names),), lies=np.dtype(bool))
    if form is None:
        raise ConfigError(
            f"got the type {type!r}, wanted its dtype and number of dimensions. Name them: "
            'schema={"…": Array("float32", (None, 3))}.'
        )
    if not form.is_ragged:
        return _dense(form.dtype, form.shape)
    if form.rest is not None and form.shape[0] is None:
        return _ragged(form.dtype, form.rest)
    lies = _flat(form.dtype)
    parts = (
        pa.field(VALUES, pa.large_list(pa.from_numpy_dtype(lies))),
        pa.field(SHAPES, pa.list_(pa.int64(), len(form.shape))),
    )
    arrow = pa.struct(parts)
    return PackForm(kind="shaped", arrow=arrow, row=form.shape, dtype=form.dtype, lies=lies)


def _dense(
    dtype: np.dtype[Any], row: tuple[int | None, ...], lies: np.dtype[Any] | None = None
) -> PackForm:
    each = lies or (dtype if dtype.kind == "b" else _flat(dtype))
    arrow = _rows(each, row, dtype)
    return PackForm(kind="dense", arrow=arrow, row=row, dtype=dtype, lies=each)


def _ragged(dtype: np.dtype[Any], row: tuple[int | None, ...]) -> PackForm:
    lies = _flat(dtype)
    arrow = pa.large_list(_rows(lies, row, dtype))
    return PackForm(kind="ragged", arrow=arrow, row=row, dtype=dtype, lies=lies)


def _rows(lies: np.dtype[Any], row: tuple[int | None, ...], dtype: np.dtype[Any]) -> Any:
    count, each = _numbers(row) * _parts(dtype), pa.from_numpy_dtype(lies)
    if count > _MAX_NUMBERS:
        raise ConfigError(
            f"got samples of shape {row}, wanted at most {_MAX_NUMBERS:,} numbers in each. Cut "
            "them, or give the field a shape whose first length is None."
        )
    return pa.list_(each, count) if row or count > 1 else each


def _flat(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """How a number lies among others that are addressed by bytes."""
    if dtype.kind == "c":
        return np.dtype(f"f{dtype.itemsize // 2}")
    return np.dtype(np.uint8) if dtype.kind == "b" else dtype


def _parts(dtype: np.dtype[Any]) -> int:
    return 2 if dtype.kind == "c" else 1


def _numbers(row: tuple[int | None, ...]) -> int:
    return math.prod(length or 0 for length in row)


def column_metadata(own: PackForm) -> dict[bytes, bytes] | None:
    """What stands beside a column that Arrow has no type for."""
    if own.kind in ("dense", "ragged") and len(own.row) > 1:
        return {SHAPE: json.dumps(own.row).encode()}
    return None
