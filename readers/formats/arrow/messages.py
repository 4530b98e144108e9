"""Where the record batches of an Arrow IPC file or stream lie, and where each column in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.readers.formats.arrow.flatbuffers import Table
from penstock.readers.formats.limits import MAX_SHARD_SAMPLES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAGIC = b"ARROW1"
TAIL_BYTES = 4 + len(MAGIC)
CONTINUES = b"\xff\xff\xff\xff"
MAX_METADATA_BYTES = 2**26
_MAX_DEPTH, _MAX_ARRAYS = 64, 2**20
SCHEMA, DICTIONARY, RECORDS = 1, 2, 3
CODECS = (None, "lz4", "zstd")


@dataclass(frozen=True, slots=True)
class Block:
    """A message of a file. start: of its metadata, which has head bytes; body: bytes behind it."""

    start: int
    head: int
    body: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
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
class Contents:
    """What is in a file. schema: as pyarrow has it; numbers: of the arrays' dictionaries, see
    `dictionary_numbers`; blocks: where messages are, those of dictionaries first."""

    schema: Any
    numbers: list[int | None]
    blocks: list[Block]


def read_footer(data: bytes, size_bytes: int) -> Contents:
    """What a file's footer says. Raises ValueError."""
    try:
        length = len(data).to_bytes(4, "little")
        schema = pa.ipc.open_file(pa.py_buffer(MAGIC + b"\0\0" + data + length + MAGIC)).schema
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"its schema can't be understood ({error})") from error
    footer = Table.root(data)
    dictionaries, batches = (
        [_block(each, size_bytes) for each in footer.longs(field, each=3).tolist()]
        for field in (2, 3)
    )
    told = footer.table(1)
    if told is None:
        raise ValueError("it has no schema")
    return Contents(
        schema=schema, numbers=dictionary_numbers(told), blocks=[*dictionaries, *batches]
    )


def dictionary_numbers(schema: Table) -> list[int | None]:
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


def _block(told: list[int], size_bytes: int) -> Block:
    start, head, body = told
    head &= 0xFFFFFFFF  # behind it is padding
    if not (start > 0 and 8 < head <= MAX_METADATA_BYTES and body >= 0):
        raise ValueError("its footer tells of a message of no size")
    if start + head + body > size_bytes - TAIL_BYTES:
        raise ValueError(
            f"a message would lie at bytes {start:,} to {start + head + body:,} of {size_bytes:,}"
        )
    return Block(start, head, body)


def metadata_of(head: bytes) -> bytes:
    """A message's metadata without the length before it. Raises ValueError."""
    at = 8 if head[:4] == CONTINUES else 4
    size = int.from_bytes(head[at - 4 : at], "little", signed=True)
    if not 0 < size <= len(head) - at:
        raise ValueError("a message's metadata have no size")
    return head[at : at + size]


def read_batch(head: bytes, block: Block) -> Batch:
    """A record batch or dictionary by its message's head bytes. Raises ValueError."""
    message = Table.root(metadata_of(head))
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
    return Batch(
        rows=rows,
        nodes=nodes,
        buffers=buffers,
        codec=codec,
        variadic=tuple(told.longs(4, each=1)[:, 0].tolist()),
        dictionary=number,
        is_delta=is_delta,
    )
