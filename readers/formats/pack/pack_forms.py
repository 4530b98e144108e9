"""Define the columns of a pack's shard: one of a natural Arrow type for each field, and our own.

Bytes are stored as large_binary (text as large_string), numbers as primitives, arrays of one shape
as fixed_size_list (flat; the column's metadata holds the shape), arrays that differ in their first
length as large_list, and arrays that differ in other lengths too as a struct of their values and
their shape. A complex number is stored as its two parts. A bool of a ragged array is stored as a
byte, because a bit has no address. If a sample lacks a field, its cell is null.

Checksums, dimensions and origins are columns of our own. Their names contain a slash, which no
field's name does, so none can hide a field. A field of one shape also has a CRC-32C for each block
of rows, in the schema's metadata. A batch of small arrays is therefore one gather, and each block
is checked once.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from penstock.cache import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import FieldType, Schema
    from penstock.readers.formats.open_shard import Storage
    from penstock.readers.types import Ints, Numbers

SHAPE = b"penstock.shape"
"""In a column's metadata: the shape of one sample, as a JSON list."""

VALUES, SHAPES = "values", "shape"
"""The parts of a column whose samples differ in more than their first length."""

_MAX_NUMBERS = 2**31 - 1

# If a shard isn't kept, rows of at least this size are fetched by requests of their own.
_LEAST_ROW_BYTES = 128

_BYTES = np.dtype(np.uint8)

Kind = Literal["bytes", "value", "dense", "ragged", "shaped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackForm:
    """How one field is stored in a shard.

    kind: "bytes", which are decoded later; "value", one number; "dense", arrays of one shape;
    "ragged", arrays that differ in their first length; "shaped", arrays that differ in others too.
    arrow: the column's type. row: the shape of a sample if dense, of one of its rows if ragged; if
    shaped, the sample's shape with None for each length that differs. dtype: of the numbers that
    are read back. stored: dtype of the numbers in the file, bool if they are stored as bits.
    is_picture: True if height, width, channels and codec have columns of their own.
    """

    kind: Kind
    arrow: Any
    row: tuple[int | None, ...] = ()
    dtype: np.dtype[Any] = _BYTES
    stored: np.dtype[Any] = _BYTES
    is_picture: bool = False

    @property
    def is_span(self) -> bool:
        """Return True if samples are byte ranges whose lengths differ."""
        return self.kind in ("bytes", "ragged", "shaped")

    @property
    def storage(self) -> Storage:
        """Return the manifest's name for this kind of storage."""
        return "span" if self.is_span else "rows" if self.kind == "dense" else "value"

    @property
    def is_bits(self) -> bool:
        """Return True if the numbers are stored as single bits."""
        return self.stored.kind == "b"

    @property
    def numbers(self) -> int:
        """Return the count of stored numbers in one row; 1 or 2 if shaped."""
        return _numbers(self.row if self.kind != "shaped" else (), self.dtype)

    @property
    def codec(self) -> str:
        """Return the codec of arrays that are read back, as facts name it."""
        return self.dtype.newbyteorder("<").str

    @property
    def empty(self) -> Numbers:
        """Return the value that is stored for a sample that lacks the field."""
        row = (0, *self.row) if self.kind in ("bytes", "ragged") else self.row
        return np.zeros(tuple(length or 0 for length in row), self.dtype)

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row. Not defined for bits."""
        return self.numbers * self.stored.itemsize

    @property
    def has_crcs(self) -> bool:
        """Return True if each sample has its own CRC-32C; single numbers don't."""
        return self.kind != "value"

    @property
    def has_ranges(self) -> bool:
        """Return True if one row is large enough for a request of its own."""
        return self.kind == "dense" and not self.is_bits and self.row_bytes >= _LEAST_ROW_BYTES


def pack_forms(schema: Schema) -> dict[str, PackForm]:
    """Return how a pack stores each field. Raises ConfigError as `pack_form`, with the name."""
    forms = {}
    for name, type in schema.items():
        try:
            forms[name] = pack_form(type)
        except ConfigError as error:
            raise ConfigError(f'"{name}": {error}') from error
    return forms


@lru_cache(maxsize=1024)
def pack_form(type: FieldType) -> PackForm:
    """Return how a pack stores a field of this type.

    Raises ConfigError if the type's dtype or number of dimensions isn't settled yet, and if samples
    are too large.
    """
    if type.is_encoded:
        arrow = pa.large_string() if type.codec == "utf-8" else pa.large_binary()
        return PackForm(kind="bytes", arrow=arrow, is_picture=type.has_sides)
    form = type.stored
    if form is None:
        raise ConfigError(
            f"got the type {type!r}, wanted its dtype and number of dimensions. Pass them: "
            'schema={"…": Array("float32", (None, 3))}.'
        )
    dtype, stored = form.dtype, form.dtype
    if dtype.kind == "c":
        stored = np.dtype(f"f{dtype.itemsize // 2}")
    elif not form.is_ragged and type.is_bits:
        stored = np.dtype(bool)
    elif form.is_ragged and dtype.kind == "b":
        stored = _BYTES
    if not form.is_ragged:
        kind: Kind = "dense" if type.number is None else "value"
        arrow, row = _rows(stored, form.shape, dtype), form.shape
    elif form.rest is not None and form.shape[0] is None:
        kind, row = "ragged", form.rest
        arrow = pa.large_list(_rows(stored, row, dtype))
    else:
        kind, row = "shaped", form.shape
        values = pa.large_list(pa.from_numpy_dtype(stored))
        arrow = pa.struct({VALUES: values, SHAPES: pa.list_(pa.int64(), len(row))})
    return PackForm(kind=kind, arrow=arrow, row=row, dtype=dtype, stored=stored)


def _rows(stored: np.dtype[Any], row: tuple[int | None, ...], dtype: np.dtype[Any]) -> Any:
    """Return the Arrow type of rows of this shape."""
    count, each = _numbers(row, dtype), pa.from_numpy_dtype(stored)
    if count > _MAX_NUMBERS:
        raise ConfigError(
            f"got samples of shape {row}, wanted at most {_MAX_NUMBERS:,} numbers in each. Split "
            "the samples, or give the field a shape whose first length is None."
        )
    return pa.list_(each, count) if row or count > 1 else each


def _numbers(row: tuple[int | None, ...], dtype: np.dtype[Any]) -> int:
    """Return the count of stored numbers: a complex one is two."""
    return math.prod(length or 0 for length in row) * (2 if dtype.kind == "c" else 1)


SOURCE, NAME = "penstock/source", "penstock/name"

CRC, CODEC, SIDES = "crc32c", "codec", ("height", "width", "channels")

SHARD, SCHEMA = b"penstock.shard", b"penstock.schema"
NAMES_SUM, BLOCK_SUMS = b"penstock.names.crc32c", b"penstock.blocks.crc32c"

_PICTURE = {**dict.fromkeys(SIDES, pa.int32()), CODEC: pa.string()}
_BLOCK_BYTES = 2**20


def own_name(kind: str, field: str) -> str:
    """Return the name of one of our own columns: "penstock/KIND/FIELD"."""
    return f"penstock/{kind}/{field}"


def arrow_schema(fields: Mapping[str, PackForm]) -> Any:
    """Return the columns of a shard in order: the fields, their facts, and each sample's origin."""
    columns = []
    for name, form in fields.items():
        has_shape = form.kind in ("dense", "ragged") and len(form.row) > 1
        metadata = {SHAPE: json.dumps(form.row).encode()} if has_shape else None
        columns.append(pa.field(name, form.arrow, metadata=metadata))
    for name, form in fields.items():
        if form.has_crcs:
            columns.append(pa.field(own_name(CRC, name), pa.uint32()))
        if form.is_picture:
            columns += [pa.field(own_name(kind, name), type) for kind, type in _PICTURE.items()]
    columns += [pa.field(SOURCE, pa.int64()), pa.field(NAME, pa.large_binary())]
    return pa.schema(columns)


def block_rows(form: PackForm) -> int:
    """Return how many rows of a field of one shape share a CRC-32C: about 1 MiB of them."""
    if form.is_bits:  # a block starts at a whole byte
        return max(8, 8 * _BLOCK_BYTES // max(1, form.numbers) // 8 * 8)
    return max(1, _BLOCK_BYTES // max(1, form.row_bytes))


def block_bounds(form: PackForm, rows: int) -> Ints:
    """Return the first byte of each block of a column, and the end; int64, shape (blocks + 1,)."""
    each = block_rows(form)
    if form.is_bits:
        end, step = -(-rows * form.numbers // 8), each * form.numbers // 8
    else:
        end, step = rows * form.row_bytes, each * form.row_bytes
    starts = np.arange(-(-rows // each), dtype=np.int64) * step
    return np.append(starts, end)


def write_block_sums(sums: Mapping[str, Sequence[int]]) -> bytes:
    """Serialise the checksums of blocks for the schema's metadata: 8 hex digits each."""
    return json.dumps(
        {name: "".join(f"{crc:08x}" for crc in crcs) for name, crcs in sums.items()}
    ).encode()


def read_block_sums(text: bytes) -> dict[str, NDArray[np.uint32]]:
    """Parse the checksums of blocks, which may be forged. Raises ValueError or TypeError."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("the checksums of its blocks are nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("the checksums of its blocks aren't a JSON object")
    return {
        name: np.frombuffer(bytes.fromhex(crcs), ">u4").astype(np.uint32)
        for name, crcs in found.items()
    }


def sum_of_names(names: Sequence[bytes]) -> bytes:
    """Return the CRC-32C of all names, in hex."""
    return b"%08x" % crc32c(b"\0".join(names))
