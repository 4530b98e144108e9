"""Define the columns of a pack's shard: a natural Arrow type for each field, and our own columns.

Bytes lie as large_binary (text as large_string), numbers as primitives, arrays of one shape as
fixed_size_list (flat; the shape stands in the column's metadata), arrays whose first length differs
as large_list, and arrays of which others differ too as a struct of their values and their shape. A
complex number lies as its two parts; a bool of a ragged array as a byte, since bits have no
address. What a sample lacks is null.

Checksums, dimensions and origins stand in columns of our own. A slash stands in each of their
names, which no field's name has; so none can hide a field. Fields of one shape have a CRC-32C for
each block of rows too, in the schema's metadata: so a batch of small arrays is one gather, and a
block is checked once.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from penstock.cache import ConfigError
from penstock.readers.fields import (
    MultiLabel,
    Text,
    array_form,
    has_sides,
    is_encoded,
    number_dtype,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields import FieldType, Schema
    from penstock.readers.formats.open_shard import Storage

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


SOURCE, NAME = "penstock/source", "penstock/name"

CRC, HEIGHT, WIDTH, CHANNELS, CODEC = "crc32c", "height", "width", "channels", "codec"

SHARD, SCHEMA = b"penstock.shard", b"penstock.schema"
NAMES_SUM, BLOCK_SUMS = b"penstock.names.crc32c", b"penstock.blocks.crc32c"

_PICTURE = {HEIGHT: pa.int32(), WIDTH: pa.int32(), CHANNELS: pa.int32(), CODEC: pa.string()}
_BLOCK_BYTES = 2**20


_JOINT = b"\0"


def own_name(kind: str, field: str) -> str:
    """Such as "penstock/crc32c/image"."""
    return f"penstock/{kind}/{field}"


def arrow_schema(fields: Mapping[str, PackForm]) -> Any:
    """The columns of a shard, in order: the fields, what is noted of each, and where each sample
    came from."""
    columns = [
        pa.field(name, own.arrow, metadata=column_metadata(own)) for name, own in fields.items()
    ]
    for name, own in fields.items():
        if own.has_crcs:
            columns.append(pa.field(own_name(CRC, name), pa.uint32()))
        if own.is_picture:
            columns += [pa.field(own_name(kind, name), type) for kind, type in _PICTURE.items()]
    columns += [pa.field(SOURCE, pa.int64()), pa.field(NAME, pa.large_binary())]
    return pa.schema(columns)


def block_rows(own: PackForm) -> int:
    """Rows of a field of one shape that have a CRC together: about 1 MiB."""
    if own.is_bits:  # a block begins with a byte
        return max(8, 8 * _BLOCK_BYTES // max(1, own.numbers) // 8 * 8)
    return max(1, _BLOCK_BYTES // max(1, own.row_bytes))


def block_bounds(own: PackForm, rows: int) -> NDArray[np.int64]:
    """Where each block of a field's column begins, in bytes, and the end; int64, shape
    (blocks + 1,)."""
    each = block_rows(own)
    if own.is_bits:
        end, step = -(-rows * own.numbers // 8), each * own.numbers // 8
    else:
        end, step = rows * own.row_bytes, each * own.row_bytes
    starts = np.arange(-(-rows // each), dtype=np.int64) * step
    return np.append(starts, end)


def write_block_sums(sums: Mapping[str, Sequence[int]]) -> bytes:
    """As the schema's metadata has them: 8 hex digits a block."""
    return json.dumps(
        {name: "".join(f"{crc:08x}" for crc in crcs) for name, crcs in sums.items()}
    ).encode()


def read_block_sums(text: bytes) -> dict[str, NDArray[np.uint32]]:
    """What a shard says, which may come from anybody. Raises ValueError, TypeError."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("its blocks' checksums are nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("its blocks' checksums aren't an object")
    return {
        name: np.frombuffer(bytes.fromhex(crcs), ">u4").astype(np.uint32)
        for name, crcs in found.items()
    }


def sum_of_names(names: Sequence[bytes]) -> bytes:
    """CRC-32C of all names, in hex."""
    return f"{crc32c(_JOINT.join(names)):08x}".encode()
