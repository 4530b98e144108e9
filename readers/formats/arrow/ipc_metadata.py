"""Parse the metadata of Arrow IPC files: the places of record batches, and of columns in them.

The footer of a file lists its record batches, and the head of each batch has its number of rows. A
stream has no footer, so its heads are read one after the other.

Footers and messages are flatbuffers, of which this module reads only the parts that Arrow IPC uses.
They are untrusted: every position is checked against the bytes that exist, and invalid ones raise
ValueError.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from penstock.cache import DatasetError
from penstock.readers.formats.shard_summary import MAX_SHARD_SAMPLES
from penstock.readers.formats.tables import refused_file_error
from penstock.readers.formats.unindexed_files import read_file_parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.readers.origin import Entry, Origin

_I32, _U16, _I64 = struct.Struct("<i"), struct.Struct("<H"), struct.Struct("<q")


class FlatTable:
    """A table of a flatbuffer. A field that isn't set reads as 0, None or empty."""

    __slots__ = ("_at", "_data", "_fields")

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at
        back = at - self._number(_I32, at)
        size = self._number(_U16, back)
        if size < 4 or back + size > len(data) or size % 2:
            raise ValueError("it has a table without fields")
        self._fields = struct.unpack_from(f"<{(size - 4) // 2}H", data, back + 4)

    @classmethod
    def root(cls, data: bytes) -> FlatTable:
        """Return the root table of a buffer."""
        return cls(data, _unpack(_I32, data, 0))

    def _number(self, kind: struct.Struct, at: int) -> int:
        return _unpack(kind, self._data, at)

    def _place(self, field: int) -> int | None:
        offset = self._fields[field] if field < len(self._fields) else 0
        return self._at + offset if offset else None

    def _vector(self, field: int, item_bytes: int) -> tuple[int, int]:
        """Return the first byte of a vector's items, and their number."""
        at = self._place(field)
        if at is None:
            return 0, 0
        start = at + self._number(_I32, at)
        count = self._number(_I32, start)
        if not 0 <= count <= (len(self._data) - start - 4) // item_bytes:
            raise ValueError(f"it has a vector of {count:,} items, more than its bytes can hold")
        return start + 4, count

    def int64(self, field: int) -> int:
        """Return a long."""
        at = self._place(field)
        return 0 if at is None else self._number(_I64, at)

    def byte(self, field: int) -> int:
        """Return a byte."""
        at = self._place(field)
        if at is None:
            return 0
        if at >= len(self._data):
            raise ValueError("it ends inside a table")
        return self._data[at]

    def table(self, field: int) -> FlatTable | None:
        """Return a table inside this one."""
        at = self._place(field)
        return None if at is None else FlatTable(self._data, at + self._number(_I32, at))

    def tables(self, field: int) -> list[FlatTable]:
        """Return the tables of a vector."""
        start, count = self._vector(field, 4)
        places = range(start, start + 4 * count, 4)
        return [FlatTable(self._data, place + self._number(_I32, place)) for place in places]

    def longs(self, field: int, *, each: int) -> NDArray[np.int64]:
        """Return a vector of structs of longs, int64, shape (n, each)."""
        start, count = self._vector(field, 8 * each)
        flat = np.frombuffer(self._data, "<i8", count * each, start)
        return flat.reshape(count, each).astype(np.int64)


def _unpack(kind: struct.Struct, data: bytes, at: int) -> int:
    if not 0 <= at <= len(data) - kind.size:
        raise ValueError("it points outside of its own bytes")
    found: int = kind.unpack_from(data, at)[0]
    return found


MAGIC = b"ARROW1"
TAIL_BYTES = 4 + len(MAGIC)
CONTINUES = b"\xff\xff\xff\xff"
MAX_METADATA_BYTES = 2**26
_MAX_DEPTH, _MAX_ARRAYS = 64, 2**20
SCHEMA, DICTIONARY, RECORDS = 1, 2, 3
CODECS = (None, "lz4", "zstd")


@dataclass(frozen=True, slots=True)
class MessageBlock:
    """The place of a message: its first byte, the size of its metadata, and that of its body."""

    start: int
    head: int
    body: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchMetadata:
    """A record batch, or a batch of the values of a dictionary.

    nodes: length and nulls of each array, int64, shape (arrays, 2). buffers: first byte in the file
    and size, int64, shape (buffers, 2). codec: a number into CODECS. dictionary: its number, None
    for a record batch; is_delta: it adds values to an earlier batch of the same dictionary.
    variadic: the number of data buffers of each array of views.
    """

    rows: int
    nodes: NDArray[np.int64]
    buffers: NDArray[np.int64]
    codec: int
    variadic: tuple[int, ...] = ()
    dictionary: int | None = None
    is_delta: bool = False


def footer_bytes(tail: bytes, size_bytes: int) -> int:
    """Return the length of a file's footer, from its last TAIL_BYTES. Raises ValueError."""
    if tail[-len(MAGIC) :] != MAGIC or size_bytes < 2 * TAIL_BYTES:
        raise ValueError("it doesn't end as an Arrow file: it is truncated, or no Arrow file")
    found = int.from_bytes(tail[-TAIL_BYTES : -len(MAGIC)], "little", signed=True)
    if not 0 < found <= min(MAX_METADATA_BYTES, size_bytes - TAIL_BYTES - 8):
        raise ValueError(f"its footer would have {found:,} bytes: it is truncated or damaged")
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IpcContents:
    """The contents of a file, as its footer lists them.

    schema: a pyarrow schema. numbers: the dictionaries of its arrays, see `dictionary_numbers`.
    blocks: the places of messages, those of dictionaries first.
    """

    schema: Any
    numbers: list[int | None]
    blocks: list[MessageBlock]


def read_footer(data: bytes, size_bytes: int) -> IpcContents:
    """Parse a file's footer. Raises ValueError."""
    try:
        length = len(data).to_bytes(4, "little")
        schema = pa.ipc.open_file(pa.py_buffer(MAGIC + b"\0\0" + data + length + MAGIC)).schema
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"its schema can't be read ({error})") from error
    footer = FlatTable.root(data)
    dictionaries, batches = (
        [_block(each, size_bytes) for each in footer.longs(field, each=3).tolist()]
        for field in (2, 3)
    )
    fields = footer.table(1)
    if fields is None:
        raise ValueError("it has no schema")
    return IpcContents(
        schema=schema, numbers=dictionary_numbers(fields), blocks=[*dictionaries, *batches]
    )


def dictionary_numbers(schema: FlatTable) -> list[int | None]:
    """Return the number of each array's dictionary, or None, for all columns and the arrays inside
    them, in the order of a record batch's nodes.

    schema: the table of a footer or a message. Raises ValueError.
    """
    found: list[int | None] = []
    stack = [(field, 0) for field in reversed(schema.tables(1))]
    while stack:
        field, depth = stack.pop()
        if depth > _MAX_DEPTH or len(found) > _MAX_ARRAYS:
            raise ValueError("its schema nests too deep, or has too many columns")
        encoding = field.table(4)
        found.append(None if encoding is None else encoding.int64(0))
        if encoding is None:  # arrays inside a dictionary aren't in a record batch
            stack += [(child, depth + 1) for child in reversed(field.tables(5))]
    return found


def _block(numbers: list[int], size_bytes: int) -> MessageBlock:
    start, head, body = numbers
    head &= 0xFFFFFFFF  # a 32-bit number, then padding
    if not (start > 0 and 8 < head <= MAX_METADATA_BYTES and body >= 0):
        raise ValueError("its footer lists a message of an invalid size")
    if start + head + body > size_bytes - TAIL_BYTES:
        raise ValueError(
            f"a message would lie at bytes {start:,} to {start + head + body:,} of {size_bytes:,}"
        )
    return MessageBlock(start, head, body)


def metadata_of(head: bytes) -> bytes:
    """Return a message's metadata without the length before it. Raises ValueError."""
    at = 8 if head[:4] == CONTINUES else 4
    size = int.from_bytes(head[at - 4 : at], "little", signed=True)
    if not 0 < size <= len(head) - at:
        raise ValueError("a message's metadata has an invalid size")
    return head[at : at + size]


def read_batch(head: bytes, block: MessageBlock) -> BatchMetadata:
    """Parse the head of a record batch or dictionary. Raises ValueError."""
    message = FlatTable.root(metadata_of(head))
    kind, batch = message.byte(1), message.table(2)
    number, is_delta = None, False
    if kind == DICTIONARY and batch is not None:
        number, is_delta, batch = batch.int64(0), bool(batch.byte(2)), batch.table(1)
    if kind not in (DICTIONARY, RECORDS) or batch is None:
        raise ValueError(f"a message at byte {block.start:,} is no record batch")
    rows, buffers = batch.int64(0), batch.longs(2, each=2)
    if not 0 <= rows <= MAX_SHARD_SAMPLES:
        raise ValueError(
            f"its record batch at byte {block.start:,} claims {rows:,} rows, wanted at most "
            f"{MAX_SHARD_SAMPLES:,}"
        )
    if len(buffers) and not (
        buffers.min() >= 0
        and int(buffers.max()) <= block.body
        and int((buffers[:, 0] + buffers[:, 1]).max()) <= block.body
    ):
        raise ValueError(f"buffers of its record batch at byte {block.start:,} are outside of it")
    buffers[:, 0] += block.start + block.head
    nodes = batch.longs(1, each=2)
    if len(nodes) and not (nodes.min() >= 0 and (nodes[:, 1] <= nodes[:, 0]).all()):
        raise ValueError(
            f"arrays of its record batch at byte {block.start:,} have an invalid length"
        )
    compression = batch.table(3)
    codec = 0 if compression is None else 1 + compression.byte(0)
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


_TAIL_READ_BYTES, _HEAD_READ_BYTES = 2**16, 2**12
_AT_ONCE = 1024
_FEATHER_V1 = b"FEA1"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrowFile:
    """The metadata of a file: its schema, the places of its messages, and what each contains.

    checksum: CRC-32C of the bytes that were parsed.
    """

    contents: IpcContents
    batches: list[BatchMetadata]
    checksum: int


def read_files(origin: Origin, files: Sequence[Entry], *, workers: int) -> Iterator[ArrowFile]:
    """Yield the metadata of files, in their order. Raises DatasetError with the file's name, and
    the errors of `read_file_parts`."""
    for first in range(0, len(files), _AT_ONCE):
        group = files[first : first + _AT_ONCE]
        ends = [(e, max(0, e.size_bytes - _TAIL_READ_BYTES), e.size_bytes) for e in group]
        tails = read_file_parts(origin, ends, workers=workers)
        for entry, tail in zip(group, tails, strict=True):
            try:
                yield _read(origin, entry, tail, workers=workers)
            except DatasetError:
                raise
            except ValueError as error:
                raise refused_file_error(entry, error) from error


def _read(origin: Origin, entry: Entry, tail: bytes, *, workers: int) -> ArrowFile:
    if tail[-len(_FEATHER_V1) :] == _FEATHER_V1:
        raise ValueError("it is a Feather file of version 1: write it with version 2")
    if tail[-len(MAGIC) :] != MAGIC:
        return _read_stream(origin, entry)
    size = footer_bytes(tail, entry.size_bytes) + TAIL_BYTES
    if size > len(tail):
        start = entry.size_bytes - size
        tail = read_file_parts(origin, [(entry, start, entry.size_bytes)], workers=1)[0]
    footer = tail[len(tail) - size : -TAIL_BYTES]
    contents = read_footer(footer, entry.size_bytes)
    begin = entry.size_bytes - len(tail)
    far = [block for block in contents.blocks if block.start < begin]
    found = read_file_parts(
        origin, [(entry, b.start, b.start + b.head) for b in far], workers=workers
    )
    heads = dict(zip((block.start for block in far), found, strict=True))
    batches, checksum = [], crc32c(footer)
    for block in contents.blocks:
        at = block.start - begin
        head = heads[block.start] if at < 0 else tail[at : at + block.head]
        batches.append(read_batch(head, block))
        checksum = crc32c(head, checksum)
    return ArrowFile(contents=contents, batches=batches, checksum=checksum)


def _read_stream(origin: Origin, entry: Entry) -> ArrowFile:
    """Read the head of one message after the other, with one request each."""
    at, checksum = 0, 0
    schema: Any = None
    numbers: list[int | None] = []
    blocks: list[MessageBlock] = []
    batches: list[BatchMetadata] = []
    while at < entry.size_bytes:
        head = _head(origin, entry, at)
        if head is None:
            break
        checksum = crc32c(head, checksum)
        message = FlatTable.root(metadata_of(head))
        body = message.int64(3)
        if not 0 <= body <= entry.size_bytes - at - len(head):
            raise ValueError(
                f"its message at byte {at:,} has {body:,} bytes, more than are left in the file"
            )
        if message.byte(1) == SCHEMA:
            fields = message.table(2)
            if fields is None:
                raise ValueError("its schema has no content")
            try:
                schema = pa.ipc.read_schema(pa.py_buffer(head))
            except (pa.ArrowException, OSError) as error:
                raise ValueError(f"its schema can't be read ({error})") from error
            numbers = dictionary_numbers(fields)
        else:
            blocks.append(MessageBlock(at, len(head), body))
            batches.append(read_batch(head, blocks[-1]))
        at += len(head) + body
    if schema is None:
        raise ValueError("it has no schema")
    contents = IpcContents(schema=schema, numbers=numbers, blocks=blocks)
    return ArrowFile(contents=contents, batches=batches, checksum=checksum)


def _head(origin: Origin, entry: Entry, at: int) -> bytes | None:
    """Return a message's metadata with the length before it, or None at the stream's end."""
    end = min(at + _HEAD_READ_BYTES, entry.size_bytes)
    (head,) = read_file_parts(origin, [(entry, at, end)], workers=1)
    if len(head) < 8 or head[:4] != CONTINUES:
        raise ValueError(
            f"its bytes at {at:,} are no message of an Arrow stream: it is truncated, or no stream"
        )
    size = int.from_bytes(head[4:8], "little", signed=True)
    if not size:
        return None
    if not 0 < size <= min(MAX_METADATA_BYTES, entry.size_bytes - at - 8):
        raise ValueError(f"its message at byte {at:,} has metadata of {size:,} bytes")
    if size + 8 > len(head):
        (head,) = read_file_parts(origin, [(entry, at, at + 8 + size)], workers=1)
    return head[: 8 + size]
