"""What the Arrow files of a dataset say of themselves: footers and the heads of record batches.

A file tells in its footer where its record batches are, and each of these at its head how many rows
it has; a stream tells nothing at its end, so its heads are found one behind the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from crc32c import crc32c

from penstock.cache.errors import DatasetError
from penstock.readers.files.names import printable
from penstock.readers.formats.arrow.flatbuffers import Table
from penstock.readers.formats.arrow.messages import (
    CONTINUES,
    MAGIC,
    MAX_METADATA_BYTES,
    SCHEMA,
    TAIL_BYTES,
    Block,
    Contents,
    dictionary_numbers,
    footer_bytes,
    metadata_of,
    read_batch,
    read_footer,
)
from penstock.readers.formats.file_parts import read_parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.readers.formats.arrow.messages import Batch
    from penstock.readers.origin.origin import Entry, Origin

_FIRST_BYTES, _HEAD_BYTES = 2**16, 2**12
_AT_ONCE = 1024
_FEATHER_V1 = b"FEA1"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrowFile:
    """What a file says. contents: its schema and messages; batches: what each message holds;
    checksum: CRC-32C of all that was read for that."""

    contents: Contents
    batches: list[Batch]
    checksum: int


def read_files(origin: Origin, files: Sequence[Entry], *, workers: int) -> Iterator[ArrowFile]:
    """What files say, in their order. Raises DatasetError with the file's name, and what reading
    raises."""
    for first in range(0, len(files), _AT_ONCE):
        some = files[first : first + _AT_ONCE]
        ends = [(e, max(0, e.size_bytes - _FIRST_BYTES), e.size_bytes) for e in some]
        tails = read_parts(origin, ends, workers=workers)
        for entry, tail in zip(some, tails, strict=True):
            try:
                yield _read(origin, entry, tail, workers=workers)
            except DatasetError:
                raise
            except ValueError as error:
                raise refused(entry, error) from error


def refused(entry: Entry, error: object) -> DatasetError:
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
        tail = read_parts(origin, [(entry, start, entry.size_bytes)], workers=1)[0]
    footer = tail[len(tail) - size : -TAIL_BYTES]
    contents = read_footer(footer, entry.size_bytes)
    begin = entry.size_bytes - len(tail)
    far = [block for block in contents.blocks if block.start < begin]
    found = read_parts(origin, [(entry, b.start, b.start + b.head) for b in far], workers=workers)
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
    blocks: list[Block] = []
    batches: list[Batch] = []
    while at < entry.size_bytes:
        head = _head(origin, entry, at)
        if head is None:
            break
        checksum = crc32c(head, checksum)
        message = Table.root(metadata_of(head))
        body = message.int64(3)
        if not 0 <= body <= entry.size_bytes - at - len(head):
            raise ValueError(f"its message at byte {at:,} has {body:,} bytes, more than there are")
        if message.byte(1) == SCHEMA:
            schema, numbers = _schema(head), dictionary_numbers(_header(message))
        else:
            blocks.append(Block(at, len(head), body))
            batches.append(read_batch(head, blocks[-1]))
        at += len(head) + body
    if schema is None:
        raise ValueError("it has no schema")
    contents = Contents(schema=schema, numbers=numbers, blocks=blocks)
    return ArrowFile(contents=contents, batches=batches, checksum=checksum)


def _head(origin: Origin, entry: Entry, at: int) -> bytes | None:
    """A message's metadata with the length before it; None at the stream's end."""
    end = min(at + _HEAD_BYTES, entry.size_bytes)
    (head,) = read_parts(origin, [(entry, at, end)], workers=1)
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
        (head,) = read_parts(origin, [(entry, at, at + 8 + size)], workers=1)
    return head[: 8 + size]


def _header(message: Table) -> Table:
    told = message.table(2)
    if told is None:
        raise ValueError("a message of it has no content")
    return told


def _schema(head: bytes) -> Any:
    try:
        return pa.ipc.read_schema(pa.py_buffer(head))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"its schema can't be understood ({error})") from error
