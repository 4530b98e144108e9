"""Decode one column chunk of one Parquet row group, from its bytes alone.

pyarrow reads files, not chunks: so each chunk is given to it as the only one of a file of its own,
whose footer is written here from numbers that were checked. The bytes aren't copied for that. Page
headers are checked before anything is decompressed.

pyarrow copies each value out of its page. Of photographs that is as much as reading them again, so
where pages hold nothing but values one after the other (encoding PLAIN, no nulls), or places in a
dictionary of such values, large binary values are views of the pages instead. Pages that are
compressed are decompressed, once.

An index notes how each chunk is decoded (`ParquetNotes`), so that opening a shard needs no footer.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.cache.base import machine_remedy
from penstock.readers.formats.arrow import (
    tensor_of_json,
    torn_notes_error,
    units_of_json,
    units_to_json,
)
from penstock.readers.formats.parquet.parquet_footer import as_file, column_footer
from penstock.readers.formats.parquet.thrift import ThriftReader
from penstock.readers.formats.tables import values_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields import FieldType
    from penstock.readers.formats.chunked import ChunkedShardFacts
    from penstock.readers.formats.tables import ShardUnits, Tensor
    from penstock.readers.types import Encoded

    Views = NDArray[np.int32]

DATA_V1, INDEX, DICTIONARY, DATA_V2 = range(4)
PLAIN, PLAIN_DICTIONARY, RLE_DICTIONARY = 0, 2, 8

_HEAD_BYTES, _MOST_HEAD_BYTES = 128, 2**20  # statistics in a header can be long
_FREE_BYTES = 2**28
"""So much a chunk may always take when it is decompressed; beyond it a share of what it takes in
the file."""
_MOST_TIMES = 1000


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a chunk.

    kind: of page; head: where its header begins in the chunk; start, size: of its bytes behind
    that; decoded: bytes decompressed; values: nulls too; encoding: of them; crc: CRC-32 of the
    bytes, None where it isn't told. levels: bytes before the values, of version 2, which aren't
    compressed; is_compressed: the values are.
    """

    kind: int
    head: int
    start: int
    size: int
    decoded: int
    values: int = 0
    encoding: int = -1
    crc: int | None = None
    levels: int = 0
    is_compressed: bool = True


def pages_of(data: Encoded) -> Iterator[Page]:
    """The pages of a chunk, from its first byte on. Raises ValueError."""
    at, count = 0, len(data)
    while at < count:
        page = _page(data, at)
        yield page
        at = page.start + page.size


def _page(data: Encoded, at: int) -> Page:
    length = _HEAD_BYTES
    while True:
        head = data[at : at + length].tobytes()
        reader = ThriftReader(head)
        try:
            told = reader.struct()
            break
        except ValueError:
            if at + length >= len(data) or length >= _MOST_HEAD_BYTES:
                raise ValueError(f"its bytes at {at:,} are no page's header") from None
            length *= 8
    kind, decoded, size = told.count(1), told.count(2), told.count(3)
    start = at + reader.at
    if min(kind, decoded, size) < 0:
        raise ValueError(f"its page at byte {at:,} has no kind or size")
    if size > len(data) - start:
        raise ValueError(f"its page at byte {at:,} has {size:,} bytes, more than are there")
    own = told.part({DATA_V1: 5, DICTIONARY: 7, DATA_V2: 8}.get(kind, -1))
    if own is None:
        return Page(kind, at, start, size, decoded)
    values, encoding = own.count(1), own.count(4 if kind == DATA_V2 else 2)
    if min(values, encoding) < 0:
        raise ValueError(f"its page at byte {at:,} has no number of values")
    crc = told.get(4)
    found = Page(
        kind,
        at,
        start,
        size,
        decoded,
        values,
        encoding,
        crc & 0xFFFFFFFF if type(crc) is int else None,
    )
    if kind != DATA_V2:
        return found
    levels = max(own.count(5), 0) + max(own.count(6), 0)
    return replace(found, levels=levels, is_compressed=own.get(7, True) is not False)


@dataclass(frozen=True, slots=True)
class Survey:
    """What the headers of a chunk's pages tell. is_dictionary: all values are of a dictionary;
    largest: bytes that the values may take decoded, if each is the largest of a dictionary."""

    is_dictionary: bool
    largest: int


def survey(pages: Sequence[Page], *, values: int, size_bytes: int) -> Survey:
    """Look at all pages of a chunk. values: what the footer says; size_bytes: of the chunk. Raises
    ValueError where they can't be so, or where the pages would take far more memory than that."""
    total = numbers = of_dictionary = entry = 0
    for page in pages:
        total += page.decoded
        if page.kind == DICTIONARY:
            entry = page.decoded
        elif page.kind in (DATA_V1, DATA_V2):
            numbers += page.values
            if page.encoding in (PLAIN_DICTIONARY, RLE_DICTIONARY):
                of_dictionary += page.values
        if numbers > values:
            raise ValueError(f"its pages have {numbers:,} values or more, and {values:,} were told")
        if total > max(_FREE_BYTES, _MOST_TIMES * size_bytes):
            raise ValueError(
                f"its pages would take {total:,} bytes decompressed, of {size_bytes:,} in the file"
            )
    if numbers != values:
        raise ValueError(f"its pages have {numbers:,} values, and {values:,} were told: truncated")
    return Survey(
        is_dictionary=bool(numbers) and of_dictionary == numbers,
        largest=total + of_dictionary * entry,
    )


LEAST_BYTES = 1024
"""Mean size of values from which this is the quicker way."""

_CODECS = {0: None, 1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}
_LENGTH = struct.Struct("<I")
_INLINE_BYTES, _LARGEST_PAGE, _WIDEST = 12, 2**31 - 1, 32


def are_plain(pages: Sequence[Page], codec: int) -> bool:
    """Whether all values lie so, in pages or in a dictionary, and could be told where. Nulls and
    lists aren't looked for."""
    return codec in _CODECS and all(
        page.encoding in (PLAIN, PLAIN_DICTIONARY, RLE_DICTIONARY) and page.decoded <= _LARGEST_PAGE
        for page in pages
        if page.kind in (DATA_V1, DATA_V2, DICTIONARY)
    )


def plain_values(
    data: Encoded, pages: Sequence[Page], *, codec: int, has_levels: bool, values: int
) -> Any:
    """The values as an array of views. has_levels: pages say of each value that it is there.
    Raises ValueError for damage."""
    parts: list[Views] = []
    dictionary = np.empty((0, 4), np.int32)
    buffers: list[Any] = []
    for page in pages:
        if page.kind not in (DATA_V1, DATA_V2, DICTIONARY):
            continue
        body, at = _body(data, page, codec, has_levels=has_levels and page.kind == DATA_V1)
        if page.kind != DICTIONARY and page.encoding != PLAIN:
            places = read_indices(body, at, page.values)
            if len(places) and int(places.max()) >= len(dictionary):
                raise ValueError("it has places beyond its dictionary")
            parts.append(dictionary[places])
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
    """Views of values that lie behind one another: length, first bytes, buffer, place in it; a
    short value stands in its view. number: of the buffer."""
    size, view = len(body), body.data
    if 4 * count > size:
        raise ValueError("a page of it ends before its values do")
    told: list[tuple[int, int, int, int]] = []
    for _ in range(count):
        if at + 4 > size:
            raise ValueError("a page of it ends before its values do")
        (length,) = _LENGTH.unpack_from(view, at)
        at += 4
        if length > size - at:
            raise ValueError("a value of it would end behind its page")
        told.append((length, 0, number, at))
        at += length
    views = np.array(told, np.int32).reshape(-1, 4)
    bytes_ = views.view(np.uint8)
    for place, (length, _, _, start) in enumerate(told):
        if length <= _INLINE_BYTES:
            bytes_[place, 4:] = 0
            bytes_[place, 4 : 4 + length] = body[start : start + length]
        else:
            bytes_[place, 4:8] = body[start : start + 4]
    return views


def read_indices(body: Encoded, at: int, count: int) -> NDArray[np.int64]:
    """Places in a dictionary, as runs of one place and packed ones (RLE and bit-packing hybrid).
    Raises ValueError for damage."""
    found = np.empty(count, np.int64)
    if not count:
        return found
    if at >= len(body) or body[at] > _WIDEST:
        raise ValueError("its places in a dictionary have no width")
    width, at, filled = int(body[at]), at + 1, 0
    powers = 1 << np.arange(width, dtype=np.int64)
    while filled < count:
        head, at = _varint(body, at)
        run = head >> 1
        if not run:
            raise ValueError("it has a run of no places in a dictionary")
        if head & 1:
            size = min(run * width, len(body) - at)
            bits = np.unpackbits(body[at : at + size], bitorder="little")
            if width:
                here = bits[: len(bits) // width * width].reshape(-1, width) @ powers
            else:
                here = np.zeros(min(8 * run, count), np.int64)
        else:
            size = (width + 7) // 8
            here = np.full(
                min(run, count), int.from_bytes(body[at : at + size].tobytes(), "little")
            )
        taken = min(len(here), count - filled)
        if not taken:
            raise ValueError("its places in a dictionary end early")
        found[filled : filled + taken] = here[:taken]
        filled, at = filled + taken, at + size
    return found


def _varint(body: Encoded, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(body) and shift < 35:
        byte = int(body[at])
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError("its places in a dictionary end early")


def _body(data: Encoded, page: Page, codec: int, *, has_levels: bool) -> tuple[Encoded, int]:
    """A page's bytes decompressed, and where in them its values begin."""
    part = data[page.start : page.start + page.size]
    if page.crc is not None and zlib.crc32(part.data) != page.crc:
        raise ValueError("the checksum of a page is wrong")
    levels = page.levels if page.kind == DATA_V2 else 0
    if levels > min(page.size, page.decoded):
        raise ValueError("a page of it is smaller than its levels")
    part, wanted = part[levels:], page.decoded - levels  # those of version 2 aren't compressed
    name = _CODECS[codec] if page.is_compressed else None
    if name is not None and wanted:
        try:
            part = np.frombuffer(pa.Codec(name).decompress(pa.py_buffer(part), wanted), np.uint8)
        except (pa.ArrowException, OSError) as error:
            if machine_remedy(error) is not None:
                raise
            raise ValueError(f"its bytes are damaged ({str(error)[:200]})") from error
    if not has_levels:
        return part, 0
    if len(part) < 4:
        raise ValueError("a page of it ends before its values do")
    return part, 4 + int(_LENGTH.unpack_from(part.data, 0)[0])


BYTE_ARRAY = 6
_EXPANDS_TO = 2**30
"""Values of a dictionary are copied out of it while they can't take more than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkForm:
    """What chunks of one column have in common. path, elements, physical: see `footer.Leaf`;
    parts: names of path that lead to the values, the others are lists'; writer: of the file;
    codec: its number; is_flat: it has no lists; has_levels: its pages say of each value whether it
    is there; tensor: how its tensors are stored."""

    path: tuple[str, ...]
    elements: tuple[bytes, ...]
    physical: int
    parts: int
    writer: bytes
    codec: int
    is_flat: bool
    has_levels: bool
    tensor: Tensor | None = None


def decode_chunk(
    data: Encoded,
    form: ChunkForm,
    type: FieldType,
    *,
    rows: int,
    values: int,
    decoded: int,
    nulls: int,
) -> Any:
    """The table (`values.values_table`) of a chunk. values, decoded, nulls: as the footer tells
    them. Raises ValueError for damage."""
    pages = list(pages_of(data))
    found = survey(pages, values=values, size_bytes=len(data))
    if (
        form.physical == BYTE_ARRAY
        and form.is_flat
        and not nulls
        and decoded >= LEAST_BYTES * rows
        # Statistics of pyarrow's writer don't count the nulls of the structs around a dictionary.
        and not (found.is_dictionary and len(form.path) > 1)
        and are_plain(pages, form.codec)
    ):
        array = plain_values(
            data, pages, codec=form.codec, has_levels=form.has_levels, values=values
        )
        return values_table(type, array, ())
    is_kept = form.physical == BYTE_ARRAY and (found.is_dictionary or found.largest > _EXPANDS_TO)
    footer = as_file(
        column_footer(
            form.elements,
            form.path,
            physical=form.physical,
            codec=form.codec,
            rows=rows,
            values=values,
            size=len(data),
            decoded=decoded,
            writer=form.writer,
        )
    )
    try:
        metadata = pq.ParquetFile(pa.BufferReader(footer)).metadata
        file = pq.ParquetFile(
            pa.BufferReader(pa.py_buffer(data)),
            metadata=metadata,
            read_dictionary=[".".join(form.path)] if is_kept else None,
            # Large, since the values of a row group may be; dictionaries are read as they are only
            # where no type is asked for.
            binary_type=None if is_kept else pa.large_binary(),
            list_type=pa.LargeListType,
            page_checksum_verification=True,
            arrow_extensions_enabled=False,
            pre_buffer=False,
        )
        column = file.read_row_group(0, use_threads=False).column(0)
        return values_table(type, column, form.path[1 : form.parts], form.tensor)
    except (pa.ArrowException, OSError, MemoryError) as error:
        if machine_remedy(error) is not None:
            raise
        why = _first_line(error)
        raise ValueError(
            f"its bytes are damaged, or pyarrow doesn't read what wrote them ({why})"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParquetNotes:
    """The units of a shard, and how each chunk of it is decoded. chunks: of each extent the number
    of its form, its values, its bytes decompressed and its nulls (-1: not told), int64, shape
    (extents, 4)."""

    units: ShardUnits
    forms: Sequence[ChunkForm]
    chunks: NDArray[np.int64]

    def to_bytes(self) -> bytes:
        """As `read_notes` reads it."""
        told: dict[str, Any] = {
            **units_to_json(self.units),
            "chunks": self.chunks.tolist(),
            "forms": [
                {
                    "path": form.path,
                    "elements": [base64.b64encode(each).decode() for each in form.elements],
                    "physical": form.physical,
                    "parts": form.parts,
                    "writer": base64.b64encode(form.writer).decode(),
                    "codec": form.codec,
                    "is_flat": form.is_flat,
                    "has_levels": form.has_levels,
                    **({} if form.tensor is None else {"tensor": form.tensor}),
                }
                for form in self.forms
            ],
        }
        return json.dumps(told).encode()


def read_notes(shard: ChunkedShardFacts) -> ParquetNotes:
    """What was noted of a shard. Raises CorruptShardError."""
    try:
        told = json.loads(shard.notes)
        units = units_of_json(told, shard)
        forms = [
            ChunkForm(
                path=tuple(each["path"]),
                elements=tuple(base64.b64decode(one) for one in each["elements"]),
                physical=int(each["physical"]),
                parts=int(each["parts"]),
                writer=base64.b64decode(each["writer"]),
                codec=int(each["codec"]),
                is_flat=bool(each["is_flat"]),
                has_levels=bool(each["has_levels"]),
                tensor=tensor_of_json(each["tensor"]) if "tensor" in each else None,
            )
            for each in told["forms"]
        ]
        chunks = np.array(told["chunks"], np.int64).reshape(-1, 4)
        if len(chunks) != len(shard.extents):
            raise ValueError("its chunks differ in number")
        if len(chunks) and not (chunks[:, :3].min() >= 0 and chunks[:, 0].max() < len(forms)):
            raise ValueError("its chunks have forms that aren't there")
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise torn_notes_error(error) from error
    return ParquetNotes(units=units, forms=forms, chunks=chunks)
