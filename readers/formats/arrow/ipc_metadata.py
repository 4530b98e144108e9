"""Parse the metadata of Arrow IPC files: the places of record batches, and of columns in them.

The footer of a file lists its record batches, and the head of each batch has its number of rows. A
stream has no footer, so its heads are read one after the other.

pyarrow (26) has no interface for the places of buffers. The addresses of a batch's buffers show
them only if the whole body is in memory, uncompressed and without dictionaries; a remote file is
listed without its bodies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from penstock.readers.files import BYTE, CONTINUES, FlatTable, metadata_of
from penstock.readers.formats.shard_summary import MAX_SHARD_SAMPLES
from penstock.readers.formats.tables import arrow_errors
from penstock.readers.formats.unindexed_files import read_file_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.readers.origin import Entry, Origin
    from penstock.readers.types import Ints

MAGIC = b"ARROW1"
TAIL_BYTES = 4 + len(MAGIC)
MAX_METADATA_BYTES = 2**26
_MAX_DEPTH, _MAX_ARRAYS = 64, 2**20
SCHEMA, DICTIONARY, RECORDS = 1, 2, 3
CODECS = (None, "lz4", "zstd")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchMetadata:
    """A record batch, or a batch of the values of a dictionary.

    nodes: length and nulls of each array, int64, shape (arrays, 2). buffers: first byte in the file
    and size, int64, shape (buffers, 2). codec: a number into CODECS. dictionary: its number, None
    for a record batch; is_delta: it adds values to an earlier batch of the same dictionary.
    variadic: the number of data buffers of each array of views.
    """

    rows: int
    nodes: Ints
    buffers: Ints
    codec: int
    variadic: tuple[int, ...] = ()
    dictionary: int | None = None
    is_delta: bool = False


def dictionary_numbers(schema: FlatTable | None) -> list[int | None]:
    """Return the number of each array's dictionary, or None, for all columns and the arrays inside
    them, in the order of a record batch's nodes.

    schema: the table of a footer or a message. Raises ValueError.
    """
    if schema is None:
        raise ValueError("it has no schema")
    found: list[int | None] = []
    stack = [(field, 0) for field in reversed(schema.tables(1))]
    while stack:
        field, depth = stack.pop()
        if depth > _MAX_DEPTH or len(found) > _MAX_ARRAYS:
            raise ValueError("its schema nests too deep, or has too many columns")
        encoding = field.table(4)
        found.append(None if encoding is None else encoding.number(0))
        if encoding is None:  # arrays inside a dictionary aren't in a record batch
            stack += [(child, depth + 1) for child in reversed(field.tables(5))]
    return found


def read_batch(head: bytes, start: int, body_bytes: int) -> BatchMetadata:
    """Parse the head of a record batch or dictionary. start: of the head in the file. Raises
    ValueError."""
    message = FlatTable(metadata_of(head))
    kind, batch = message.number(1, BYTE), message.table(2)
    number, is_delta = None, False
    if kind == DICTIONARY and batch is not None:
        number, is_delta, batch = batch.number(0), bool(batch.number(2, BYTE)), batch.table(1)
    if kind not in (DICTIONARY, RECORDS) or batch is None:
        raise ValueError(f"a message at byte {start:,} is no record batch")
    rows, buffers, nodes = batch.number(0), batch.longs(2, each=2), batch.longs(1, each=2)
    if not 0 <= rows <= MAX_SHARD_SAMPLES:
        raise ValueError(
            f"its record batch at byte {start:,} claims {rows:,} rows, wanted at most "
            f"{MAX_SHARD_SAMPLES:,}"
        )
    if len(buffers) and not (
        buffers.min() >= 0
        and int(buffers.max()) <= body_bytes
        and int((buffers[:, 0] + buffers[:, 1]).max()) <= body_bytes
    ):
        raise ValueError(f"buffers of its record batch at byte {start:,} are outside of it")
    buffers[:, 0] += start + len(head)
    if len(nodes) and not (nodes.min() >= 0 and (nodes[:, 1] <= nodes[:, 0]).all()):
        raise ValueError(f"arrays of its record batch at byte {start:,} have an invalid length")
    compression = batch.table(3)
    codec = 0 if compression is None else 1 + compression.number(0, BYTE)
    if codec >= len(CODECS):
        raise ValueError(f"its buffers are compressed by the unknown codec {codec - 1}")
    return BatchMetadata(
        rows=rows,
        nodes=nodes,
        buffers=buffers,
        codec=codec,
        variadic=tuple(batch.longs(4, each=1)[:, 0].tolist()),
        dictionary=number,
        is_delta=is_delta,
    )


_HEAD_READ_BYTES = 2**12

Message = tuple[int, bytes, int]
"""The first byte of a message in the file, its head, and the bytes of its body."""


Contents = tuple[Any, list[int | None], list[BatchMetadata], int]
"""The metadata of a file or stream: the schema of pyarrow; see `dictionary_numbers`; its batches,
those of dictionaries first unless it is a stream; and the CRC-32C of the bytes that were parsed."""


def read_contents(
    origin: Origin, entry: Entry, tail: bytes, footer_bytes: int, *, workers: int
) -> Contents:
    """Read the metadata of a file. tail: its end, with the footer of so many bytes, 0 for a stream.
    Raises ValueError, and the errors of `read_file_parts`."""
    if footer_bytes:
        data = tail[-footer_bytes:-TAIL_BYTES]
        source = MAGIC + b"\0\0" + data + len(data).to_bytes(4, "little") + MAGIC
        footer = FlatTable(data)
        table = footer.table(1)
        messages = _listed(origin, entry, tail, footer, workers=workers)
    else:
        messages = _stream(origin, entry)
        _, data, _ = next(messages, (0, b"", 0))
        source, message = data, FlatTable(metadata_of(data))
        table = message.table(2) if message.number(1, BYTE) == SCHEMA else None
    numbers = dictionary_numbers(table)
    with arrow_errors("its schema can't be read"):
        read = pa.ipc.open_file if footer_bytes else pa.ipc.open_stream
        schema = read(pa.py_buffer(source)).schema
    batches, checksum = [], crc32c(data)
    for start, head, body in messages:
        batches.append(read_batch(head, start, body))
        checksum = crc32c(head, checksum)
    return schema, numbers, batches, checksum


def _listed(
    origin: Origin, entry: Entry, tail: bytes, footer: FlatTable, *, workers: int
) -> Iterator[Message]:
    """Yield the messages that a file's footer lists."""
    blocks = np.concatenate([footer.longs(field, each=3) for field in (2, 3)])
    blocks[:, 1] &= 0xFFFFFFFF  # a 32-bit number, then padding
    starts, heads, bodies = blocks.T
    if not ((starts > 0) & (heads > 8) & (heads <= MAX_METADATA_BYTES) & (bodies >= 0)).all():
        raise ValueError("its footer lists a message of an invalid size")
    outside = blocks.max(axis=1) > entry.size_bytes  # so that their sum can't overflow
    outside |= starts + heads + bodies > entry.size_bytes - TAIL_BYTES
    for start, head, body in blocks[outside].tolist():
        raise ValueError(
            f"a message would lie at bytes {start:,} to {start + head + body:,} of "
            f"{entry.size_bytes:,}"
        )
    begin = entry.size_bytes - len(tail)
    far = [(entry, start, start + head) for start, head, _ in blocks.tolist() if start < begin]
    found = iter(read_file_parts(origin, far, workers=workers))
    for start, size, body in blocks.tolist():
        at = start - begin
        yield start, next(found) if at < 0 else tail[at : at + size], body


def _stream(origin: Origin, entry: Entry) -> Iterator[Message]:
    """Yield the messages of a stream, with one or two requests each."""
    at, left = 0, entry.size_bytes
    while left:
        end = at + min(_HEAD_READ_BYTES, left)
        (head,) = read_file_parts(origin, [(entry, at, end)], workers=1)
        if len(head) < 8 or head[:4] != CONTINUES:
            raise ValueError(
                f"its bytes at {at:,} are no message of an Arrow stream: it is truncated or none"
            )
        size = 8 + int.from_bytes(head[4:8], "little", signed=True)
        if size == 8:  # the stream's end
            return
        if not 8 < size <= min(MAX_METADATA_BYTES, left):
            raise ValueError(f"its message at byte {at:,} has metadata of {size - 8:,} bytes")
        if size > len(head):
            (head,) = read_file_parts(origin, [(entry, at, at + size)], workers=1)
        body = FlatTable(head[8:size]).number(3)
        if not 0 <= body <= left - size:
            raise ValueError(f"its message at byte {at:,} has {body:,} bytes, and the file fewer")
        yield at, head[:size], body
        at, left = at + size + body, left - size - body
