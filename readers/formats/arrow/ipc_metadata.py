"""Parse the metadata of Arrow IPC files: where record batches lie, and each column in them.

A file says in its footer where its record batches are, and each of these in its head how many rows
it has; a stream says nothing at its end, so its heads are found one after the other.

Footers and messages are flatbuffers, of which this reads only the parts that Arrow IPC uses. They
may come from anybody: places are checked against the bytes that are there, and what can't be is a
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
from penstock.readers.files import printable
from penstock.readers.formats.shard_summary import MAX_SHARD_SAMPLES
from penstock.readers.formats.unindexed_files import read_file_parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.readers.origin import Entry, Origin

_I32, _U16, _I64 = struct.Struct("<i"), struct.Struct("<H"), struct.Struct("<q")


class FlatTable:
    """A table, or the root of a buffer."""

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
        """The table that a buffer holds."""
        return cls(data, _unpack(_I32, data, 0))

    def _number(self, kind: struct.Struct, at: int) -> int:
        return _unpack(kind, self._data, at)

    def _place(self, field: int) -> int | None:
        offset = self._fields[field] if field < len(self._fields) else 0
        return self._at + offset if offset else None

    def int64(self, field: int) -> int:
        """A long, 0 where it isn't there."""
        at = self._place(field)
        return 0 if at is None else self._number(_I64, at)

    def byte(self, field: int) -> int:
        """A byte, 0 where it isn't there."""
        at = self._place(field)
        if at is None:
            return 0
        if at >= len(self._data):
            raise ValueError("it ends inside of a table")
        return self._data[at]

    def table(self, field: int) -> FlatTable | None:
        """A table inside."""
        at = self._place(field)
        return None if at is None else FlatTable(self._data, at + self._number(_I32, at))

    def tables(self, field: int) -> list[FlatTable]:
        """A vector of tables."""
        at = self._place(field)
        if at is None:
            return []
        start = at + self._number(_I32, at)
        count = self._number(_I32, start)
        if not 0 <= count <= (len(self._data) - start - 4) // 4:
            raise ValueError(f"it has a vector of {count:,}, more than there are bytes")
        places = range(start + 4, start + 4 + 4 * count, 4)
        return [FlatTable(self._data, place + self._number(_I32, place)) for place in places]

    def longs(self, field: int, *, each: int) -> NDArray[np.int64]:
        """A vector of structs of longs, int64, shape (n, each)."""
        at = self._place(field)
        if at is None:
            return np.empty((0, each), np.int64)
        start = at + self._number(_I32, at)
        count = self._number(_I32, start)
        if not 0 <= count <= (len(self._data) - start - 4) // (8 * each):
            raise ValueError(f"it has a vector of {count:,}, more than there are bytes")
        flat = np.frombuffer(self._data, "<i8", count * each, start + 4)
        return flat.reshape(count, each).astype(np.int64)


def _unpack(kind: struct.Struct, data: bytes, at: int) -> int:
    if not 0 <= at <= len(data) - kind.size:
        raise ValueError("it points outside of itself")
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
    """A message of a file. start: of its metadata, which has head bytes; body: bytes behind it."""

    start: int
    head: int
    body: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchMetadata:
    """A record batch, or the values of a dictionary.

    rows; nodes: length and nulls of each array, int64, shape (arrays, 2); buffers: start, counted
    from the file's first byte, and size, int64, shape (buffers, 2). codec: in CODECS. dictionary:
    its number, of one alone; is_delta: it goes on with an earlier one's values. variadic: of each
    array of views, its buffers.
    """

    rows: int
    nodes: NDArray[np.int64]
    buffers: NDArray[np.int64]
    codec: int
    variadic: tuple[int, ...] = ()
    dictionary: int | None = None
    is_delta: bool = False


def footer_bytes(tail: bytes, size_bytes: int) -> int:
    """The length of a file's footer, by its last TAIL_BYTES. Raises ValueError."""
    if tail[-len(MAGIC) :] != MAGIC or size_bytes < 2 * TAIL_BYTES:
        raise ValueError("it doesn't end as an Arrow file: truncated, or no Arrow file")
    found = int.from_bytes(tail[-TAIL_BYTES : -len(MAGIC)], "little", signed=True)
    if not 0 < found <= min(MAX_METADATA_BYTES, size_bytes - TAIL_BYTES - 8):
        raise ValueError(f"its footer would have {found:,} bytes: truncated, or damaged")
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IpcContents:
    """What is in a file. schema: as pyarrow has it; numbers: of the arrays' dictionaries, see
    `dictionary_numbers`; blocks: where messages are, those of dictionaries first."""

    schema: Any
    numbers: list[int | None]
    blocks: list[MessageBlock]


def read_footer(data: bytes, size_bytes: int) -> IpcContents:
    """What a file's footer says. Raises ValueError."""
    try:
        length = len(data).to_bytes(4, "little")
        schema = pa.ipc.open_file(pa.py_buffer(MAGIC + b"\0\0" + data + length + MAGIC)).schema
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"its schema can't be understood ({error})") from error
    footer = FlatTable.root(data)
    dictionaries, batches = (
        [_block(each, size_bytes) for each in footer.longs(field, each=3).tolist()]
        for field in (2, 3)
    )
    told = footer.table(1)
    if told is None:
        raise ValueError("it has no schema")
    return IpcContents(
        schema=schema, numbers=dictionary_numbers(told), blocks=[*dictionaries, *batches]
    )


def dictionary_numbers(schema: FlatTable) -> list[int | None]:
    """The number of each array's dictionary, None where it has none, of all columns and those
    inside of them, from the top. schema: the table of a footer or a message. Raises ValueError."""
    found: list[int | None] = []
    stack = [(field, 0) for field in reversed(schema.tables(1))]
    while stack:
        field, depth = stack.pop()
        if depth > _MAX_DEPTH or len(found) > _MAX_ARRAYS:
            raise ValueError("its schema nests too deep, or has too many columns")
        encoding = field.table(4)
        found.append(None if encoding is None else encoding.int64(0))
        if encoding is None:  # what is inside of a dictionary isn't in a record batch
            stack += [(child, depth + 1) for child in reversed(field.tables(5))]
    return found


def _block(told: list[int], size_bytes: int) -> MessageBlock:
    start, head, body = told
    head &= 0xFFFFFFFF  # behind it is padding
    if not (start > 0 and 8 < head <= MAX_METADATA_BYTES and body >= 0):
        raise ValueError("its footer tells of a message of no size")
    if start + head + body > size_bytes - TAIL_BYTES:
        raise ValueError(
            f"a message would lie at bytes {start:,} to {start + head + body:,} of {size_bytes:,}"
        )
    return MessageBlock(start, head, body)


def metadata_of(head: bytes) -> bytes:
    """A message's metadata without the length before it. Raises ValueError."""
    at = 8 if head[:4] == CONTINUES else 4
    size = int.from_bytes(head[at - 4 : at], "little", signed=True)
    if not 0 < size <= len(head) - at:
        raise ValueError("a message's metadata have no size")
    return head[at : at + size]


def read_batch(head: bytes, block: MessageBlock) -> BatchMetadata:
    """A record batch or dictionary by its message's head bytes. Raises ValueError."""
    message = FlatTable.root(metadata_of(head))
    kind, told = message.byte(1), message.table(2)
    number, is_delta = None, False
    if kind == DICTIONARY and told is not None:
        number, is_delta, told = told.int64(0), bool(told.byte(2)), told.table(1)
    if kind not in (DICTIONARY, RECORDS) or told is None:
        raise ValueError(f"a message at byte {block.start:,} is no record batch")
    rows, buffers = told.int64(0), told.longs(2, each=2)
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
        raise ValueError(f"buffers of its record batch at byte {block.start:,} lie outside of it")
    buffers[:, 0] += block.start + block.head
    nodes = told.longs(1, each=2)
    if len(nodes) and not (nodes.min() >= 0 and (nodes[:, 1] <= nodes[:, 0]).all()):
        raise ValueError(f"arrays of its record batch at byte {block.start:,} have no length")
    compression = told.table(3)
    codec = 0 if compression is None else 1 + compression.byte(0)
    if codec >= len(CODECS):
        raise ValueError(f"its buffers are compressed by the unknown codec {codec - 1}")
    return BatchMetadata(
        rows=rows,
        nodes=nodes,
        buffers=buffers,
        codec=codec,
        variadic=tuple(told.longs(4, each=1)[:, 0].tolist()),
        dictionary=number,
        is_delta=is_delta,
    )


_FIRST_BYTES, _HEAD_BYTES = 2**16, 2**12
_AT_ONCE = 1024
_FEATHER_V1 = b"FEA1"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrowFile:
    """What a file says. contents: its schema and messages; batches: what each message holds;
    checksum: CRC-32C of all that was read for that."""

    contents: IpcContents
    batches: list[BatchMetadata]
    checksum: int


def read_files(origin: Origin, files: Sequence[Entry], *, workers: int) -> Iterator[ArrowFile]:
    """What files say, in their order. Raises DatasetError with the file's name, and what reading
    raises."""
    for first in range(0, len(files), _AT_ONCE):
        some = files[first : first + _AT_ONCE]
        ends = [(e, max(0, e.size_bytes - _FIRST_BYTES), e.size_bytes) for e in some]
        tails = read_file_parts(origin, ends, workers=workers)
        for entry, tail in zip(some, tails, strict=True):
            try:
                yield _read(origin, entry, tail, workers=workers)
            except DatasetError:
                raise
            except ValueError as error:
                raise refused_file_error(entry, error) from error


def refused_file_error(entry: Entry, error: object) -> DatasetError:
    """The error for a file that can't be read."""
    return DatasetError(
        f"{printable(entry.name)}: {error}. Write or fetch it again, or take it out of the dataset."
    )


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
    """Go from message to message, a request each."""
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
            raise ValueError(f"its message at byte {at:,} has {body:,} bytes, more than there are")
        if message.byte(1) == SCHEMA:
            schema, numbers = _schema(head), dictionary_numbers(_header(message))
        else:
            blocks.append(MessageBlock(at, len(head), body))
            batches.append(read_batch(head, blocks[-1]))
        at += len(head) + body
    if schema is None:
        raise ValueError("it has no schema")
    contents = IpcContents(schema=schema, numbers=numbers, blocks=blocks)
    return ArrowFile(contents=contents, batches=batches, checksum=checksum)


def _head(origin: Origin, entry: Entry, at: int) -> bytes | None:
    """A message's metadata with the length before it; None at the stream's end."""
    end = min(at + _HEAD_BYTES, entry.size_bytes)
    (head,) = read_file_parts(origin, [(entry, at, end)], workers=1)
    if len(head) < 8 or head[:4] != CONTINUES:
        raise ValueError(
            f"its bytes at {at:,} are no message of an Arrow stream: truncated, or none"
        )
    size = int.from_bytes(head[4:8], "little", signed=True)
    if not size:
        return None
    if not 0 < size <= min(MAX_METADATA_BYTES, entry.size_bytes - at - 8):
        raise ValueError(f"its message at byte {at:,} has metadata of {size:,} bytes")
    if size + 8 > len(head):
        (head,) = read_file_parts(origin, [(entry, at, at + 8 + size)], workers=1)
    return head[: 8 + size]


def _header(message: FlatTable) -> FlatTable:
    told = message.table(2)
    if told is None:
        raise ValueError("a message of it has no content")
    return told


def _schema(head: bytes) -> Any:
    try:
        return pa.ipc.read_schema(pa.py_buffer(head))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"its schema can't be understood ({error})") from error
