"""Decode one column chunk of one Parquet row group, from its bytes alone.

pyarrow reads files, not chunks, so it is given each chunk as the only one of a file, whose footer
this module writes from checked numbers. This copies no bytes of the chunk. Page headers are checked
before anything is decompressed.

pyarrow copies each value out of its page. For photographs that costs as much as reading them again:
2,000 of 40 kB take 70 ms of CPU time as views of their pages, and 130 ms as copies. Large binary
values are therefore views if the pages contain only values without nulls (encoding PLAIN), or
indices into a dictionary of such values. Compressed pages are decompressed once.
"""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.readers.formats.parquet.thrift import STRUCT, Long, Raw, ThriftReader, write_struct
from penstock.readers.formats.tables import (
    arrow_errors,
    max_decoded_bytes,
    tensor_of_json,
    values_table,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import FieldType
    from penstock.readers.formats.tables import Tensor
    from penstock.readers.types import Encoded

    Views = NDArray[np.int32]

DATA_V1, INDEX, DICTIONARY, DATA_V2 = range(4)
PLAIN, PLAIN_DICTIONARY, RLE_DICTIONARY = 0, 2, 8

_MAX_HEAD_BYTES = 2**20  # statistics in a header can be long


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page of values, or of a dictionary of values, from its header.

    start, size: its bytes in the chunk, without the header. decoded: its bytes decompressed.
    values: their number, with nulls; encoding: of the values. crc: CRC-32 of its bytes, None if the
    header has none. levels: bytes of version 2 before the values, which aren't compressed;
    is_compressed: the values are.
    """

    kind: int
    start: int
    size: int
    decoded: int
    values: int
    encoding: int
    crc: int | None
    levels: int
    is_compressed: bool

    @property
    def has_indices(self) -> bool:
        """Return True if its values are indices into the dictionary."""
        return self.kind != DICTIONARY and self.encoding in (PLAIN_DICTIONARY, RLE_DICTIONARY)


def read_pages(data: Encoded, values: int) -> list[Page]:
    """Return the pages of a chunk, from their headers.

    values: their number in the footer. Raises ValueError if the pages have another number, or would
    take far more memory than the chunk's bytes can decode to.
    """
    pages: list[Page] = []
    at = total = numbers = 0
    while at < len(data):
        reader = ThriftReader(data.data[at : at + _MAX_HEAD_BYTES])
        try:
            header = reader.struct()
        except ValueError:
            raise ValueError(f"it has no valid page header at byte {at:,}") from None
        kind, decoded, size = header.count(1), header.count(2), header.count(3)
        start, crc, is_second = at + reader.at, header.get(4), kind == DATA_V2
        if min(kind, decoded, size) < 0:
            raise ValueError(f"its page at byte {at:,} has no kind or size")
        if size > len(data) - start:
            raise ValueError(f"its page at byte {at:,} has {size:,} bytes, more than are left")
        total += decoded
        if total > max_decoded_bytes(len(data)):
            raise ValueError(
                f"its pages claim {total:,} decompressed bytes, more than its {len(data):,} bytes "
                "can hold"
            )
        own = header.part({DATA_V1: 5, DICTIONARY: 7, DATA_V2: 8}.get(kind, -1))
        if own is not None:
            page = Page(
                kind=kind,
                start=start,
                size=size,
                decoded=decoded,
                values=own.count(1),
                encoding=own.count(4 if is_second else 2),
                crc=crc & 0xFFFFFFFF if type(crc) is int else None,
                levels=max(own.count(5), 0) + max(own.count(6), 0) if is_second else 0,
                is_compressed=not is_second or own.get(7, True) is not False,
            )
            if min(page.values, page.encoding) < 0:
                raise ValueError(f"its page at byte {at:,} has no number of values, or no encoding")
            pages.append(page)
            numbers += 0 if kind == DICTIONARY else page.values
        at = start + size
    if numbers != values:
        raise ValueError(f"its pages have {numbers:,} values, expected {values:,} by its footer")
    return pages


_MIN_VIEW_BYTES = 1024
"""The mean size of values from which views are faster than pyarrow's copies."""

_CODECS = {0: None, 1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}
_ENCODINGS = (PLAIN, PLAIN_DICTIONARY, RLE_DICTIONARY)
_LENGTH = struct.Struct("<I")
_INLINE_BYTES, _LARGEST_PAGE, _WIDEST = 12, 2**31 - 1, 32


def plain_values(
    data: Encoded, pages: Sequence[Page], *, codec: int, has_levels: bool, values: int
) -> Any:
    """Return the values of plain pages as an array of views.

    has_levels: each page begins with definition levels. Raises ValueError for damage.
    """
    parts: list[Views] = []
    dictionary = np.empty((0, 4), np.int32)
    buffers: list[Any] = []
    for page in pages:
        body, at = _body(data, page, codec, has_levels=has_levels and page.kind == DATA_V1)
        if page.has_indices:
            indices = read_indices(body, at, page.values)
            if len(indices) and int(indices.max()) >= len(dictionary):
                raise ValueError("it has indices beyond its dictionary")
            parts.append(dictionary[indices])
            continue
        views = _views(body, at, page.values, len(buffers))
        buffers.append(pa.py_buffer(body))
        if page.kind == DICTIONARY:
            dictionary = views
        else:
            parts.append(views)
    found = np.concatenate([np.empty((0, 4), np.int32), *parts])
    return pa.Array.from_buffers(
        pa.binary_view(), values, [None, pa.py_buffer(found), *buffers], null_count=0
    )


def _views(body: Encoded, at: int, count: int, number: int) -> Views:
    """Return Arrow's views of values that follow one another, int32, shape (count, 4): length,
    first bytes, buffer, and place in the buffer. A short value is inside its view.

    number: of the buffer.
    """
    size, view = len(body), body.data
    if 4 * count > size:
        raise ValueError("one of its pages ends before its values")
    values: list[tuple[int, int, int, int]] = []
    for _ in range(count):
        if at + 4 > size:
            raise ValueError("one of its pages ends before its values")
        (length,) = _LENGTH.unpack_from(view, at)
        at += 4
        if length > size - at:
            raise ValueError("one of its values is longer than its page")
        values.append((length, 0, number, at))
        at += length
    views = np.array(values, np.int32).reshape(-1, 4)
    bytes_ = views.view(np.uint8)
    for place, (length, _, _, start) in enumerate(values):
        if length <= _INLINE_BYTES:
            bytes_[place, 4:] = 0
            bytes_[place, 4 : 4 + length] = body[start : start + length]
        else:
            bytes_[place, 4:8] = body[start : start + 4]
    return views


def read_indices(body: Encoded, at: int, count: int) -> NDArray[np.int64]:
    """Read indices into a dictionary: runs of one index, and packed ones (Parquet's hybrid of RLE
    and bit-packing). Returns int64, shape (count,). Raises ValueError for damage."""
    found, total = [np.empty(0, np.int64)], 0
    reader = ThriftReader(body.data, at)
    width = reader.unsigned() if count else 0
    if width > _WIDEST:
        raise ValueError("its dictionary indices have an invalid width")
    while total < count:
        head = reader.unsigned()
        run, start = min(head >> 1, count - total), reader.at
        if not run:
            raise ValueError("it has an empty run of dictionary indices")
        reader.at += run * width if head & 1 else (width + 7) // 8
        data = body[start : reader.at]
        if not head & 1:
            found.append(np.full(run, int.from_bytes(data.tobytes(), "little")))
        elif not width:
            found.append(np.zeros(8 * run, np.int64))
        else:  # each `width` bytes hold 8 indices
            bits = np.unpackbits(data[: len(data) // width * width], bitorder="little")
            found.append(bits.reshape(-1, width) @ (1 << np.arange(width)))
        total += len(found[-1])
    return np.concatenate(found)[:count]


def _body(data: Encoded, page: Page, codec: int, *, has_levels: bool) -> tuple[Encoded, int]:
    """Return a page's bytes decompressed, and the place of its first value in them."""
    part = data[page.start : page.start + page.size]
    if page.crc is not None and zlib.crc32(part.data) != page.crc:
        raise ValueError("the CRC-32 of one of its pages differs")
    levels = page.levels if page.kind == DATA_V2 else 0
    if levels > min(page.size, page.decoded):
        raise ValueError("one of its pages is shorter than its levels")
    part, wanted = part[levels:], page.decoded - levels
    name = _CODECS[codec] if page.is_compressed else None
    if name is not None and wanted:
        with arrow_errors("its bytes are damaged"):
            part = np.frombuffer(pa.Codec(name).decompress(pa.py_buffer(part), wanted), np.uint8)
    if not has_levels:
        return part, 0
    if len(part) < 4:
        raise ValueError("one of its pages ends before its values")
    return part, 4 + int(_LENGTH.unpack_from(part.data, 0)[0])


MAGIC = b"PAR1"
BYTE_ARRAY = 6
_MAX_EXPANDED_BYTES = 2**30
"""Values are copied out of their dictionary if they can't take more than this."""


def as_file(footer: bytes) -> bytes:
    """Return a file that contains only a footer."""
    return MAGIC + footer + len(footer).to_bytes(4, "little") + MAGIC


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A column as Parquet stores it: a leaf of the schema's tree.

    path: its names from the top. elements: of the schema, from below the root to the leaf itself,
    as Thrift. physical: the number of its type. is_required: it has no nulls. is_flat: it has one
    value per row, so no lists.
    """

    path: tuple[str, ...]
    elements: tuple[bytes, ...]
    physical: int
    is_required: bool
    is_flat: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkForm:
    """The properties that chunks of one column share.

    parts: how many names of the leaf's path lead through structs to the values; the others are
    those of lists. writer: the file's `created_by`; codec: its number. tensor: how its tensors are
    stored.
    """

    leaf: Leaf
    parts: int
    writer: bytes
    codec: int
    tensor: Tensor | None = None

    def to_json(self) -> dict[str, Any]:
        """Return an object that `of_json` reads."""
        leaf = self.leaf
        found = {
            "path": leaf.path,
            "elements": [base64.b64encode(each).decode() for each in leaf.elements],
            "physical": leaf.physical,
            "parts": self.parts,
            "writer": base64.b64encode(self.writer).decode(),
            "codec": self.codec,
            "is_flat": leaf.is_flat,
            "has_levels": not leaf.is_required,
        }
        return found if self.tensor is None else {**found, "tensor": self.tensor}

    @classmethod
    def of_json(cls, notes: Any) -> ChunkForm:
        """Read a form. Raises ValueError, TypeError, KeyError."""
        leaf = Leaf(
            path=tuple(notes["path"]),
            elements=tuple(map(base64.b64decode, notes["elements"])),
            physical=int(notes["physical"]),
            is_required=not notes["has_levels"],
            is_flat=bool(notes["is_flat"]),
        )
        return cls(
            leaf=leaf,
            parts=int(notes["parts"]),
            writer=base64.b64decode(notes["writer"]),
            codec=int(notes["codec"]),
            tensor=tensor_of_json(notes["tensor"]) if "tensor" in notes else None,
        )


def decode_chunk(
    data: Encoded,
    form: ChunkForm,
    type: FieldType,
    rows: int,
    values: int,
    decoded: int,
    nulls: int,
) -> Any:
    """Decode a chunk, and return its values as `values_table` does.

    rows, values, decoded, nulls: the footer's numbers of rows, values, decompressed bytes and
    nulls. Raises ValueError for damage.
    """
    pages, leaf = read_pages(data, values), form.leaf
    indices = sum(page.values for page in pages if page.has_indices)
    entry = max((page.decoded for page in pages if page.kind == DICTIONARY), default=0)
    is_dictionary = 0 < values == indices
    if (
        leaf.physical == BYTE_ARRAY
        and leaf.is_flat
        and not nulls
        and decoded >= _MIN_VIEW_BYTES * rows
        # pyarrow's writer doesn't count the nulls of the structs around a dictionary.
        and not (is_dictionary and len(leaf.path) > 1)
        and form.codec in _CODECS
        and all(p.encoding in _ENCODINGS and p.decoded <= _LARGEST_PAGE for p in pages)
    ):
        has_levels = not leaf.is_required
        array = plain_values(data, pages, codec=form.codec, has_levels=has_levels, values=values)
        return values_table(type, array, ())
    # The values may take this if each is the largest of the dictionary.
    max_bytes = sum(page.decoded for page in pages) + indices * entry
    is_kept = leaf.physical == BYTE_ARRAY and (is_dictionary or max_bytes > _MAX_EXPANDED_BYTES)
    footer = _chunk_footer(form, rows=rows, values=values, size=len(data), decoded=decoded)
    with arrow_errors("its bytes are damaged, or pyarrow can't read files of their writer"):
        metadata = pq.ParquetFile(pa.BufferReader(as_file(footer))).metadata
        file = pq.ParquetFile(
            pa.BufferReader(pa.py_buffer(data)),
            metadata=metadata,
            read_dictionary=[".".join(leaf.path)] if is_kept else None,
            # Values of a row group may take more than 2 GiB. A dictionary is only kept if no type
            # is requested.
            binary_type=None if is_kept else pa.large_binary(),
            list_type=pa.LargeListType,
            page_checksum_verification=True,
            arrow_extensions_enabled=False,
            pre_buffer=False,
        )
        column = file.read_row_group(0, use_threads=False).column(0)
        return values_table(type, column, leaf.path[1 : form.parts], form.tensor)


def _chunk_footer(form: ChunkForm, *, rows: int, values: int, size: int, decoded: int) -> bytes:
    """Return the footer of a file whose one column chunk begins at its first byte."""
    meta = {
        1: form.leaf.physical,
        2: [],
        3: [name.encode() for name in form.leaf.path],
        4: form.codec,
        5: Long(values),
        6: Long(decoded),
        7: Long(size),
        # A dictionary page that comes first is recognised by its own header.
        9: Long(0),
    }
    group = {1: [{2: Long(0), 3: meta}], 2: Long(decoded), 3: Long(rows)}
    elements = [Raw(STRUCT, each) for each in form.leaf.elements]
    root = {4: b"schema", 5: 1}
    return write_struct({1: 2, 2: [root, *elements], 3: Long(rows), 4: [group], 6: form.writer})
