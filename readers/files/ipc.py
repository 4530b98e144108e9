"""Write Arrow IPC files of one record batch, and read them strictly, as untrusted input.

Before a batch is read, its schema must be the expected one, and the batch must be neither
compressed nor encoded by a dictionary: otherwise a few bytes could become gigabytes. pyarrow
doesn't report that without reading, so this module parses the two flatbuffer tables that do. Every
position in them is compared with the bytes that exist, and invalid ones raise ValueError.

Source: the Arrow columnar format, "IPC File Format"; Flatbuffers, "Internals".
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from penstock.readers.types import Ints

CONTINUES = b"\xff\xff\xff\xff"
"""Precedes the size of a message; absent in files of before Arrow 0.15."""

BYTE, _U16, _I32, _I64 = (struct.Struct(f"<{kind}") for kind in "BHiq")


class FlatTable:
    """A table of a flatbuffer. A field that isn't set reads as 0, None or empty. Raises ValueError
    for positions outside of the buffer."""

    __slots__ = ("_at", "_data", "_fields")

    def __init__(self, data: bytes, at: int | None = None) -> None:
        """at: the table's place; None for the root."""
        self._data = data
        self._at = at = _unpack(_I32, data, 0) if at is None else at
        back = at - _unpack(_I32, data, at)
        size = _unpack(_U16, data, back)
        if size < 4 or back + size > len(data) or size % 2:
            raise ValueError("it has a table without fields")
        self._fields = struct.unpack_from(f"<{(size - 4) // 2}H", data, back + 4)

    def _place(self, field: int) -> int | None:
        offset = self._fields[field] if field < len(self._fields) else 0
        return self._at + offset if offset else None

    def _vector(self, field: int, item_bytes: int) -> tuple[int, int]:
        """Return the first byte of a vector's items, and their number."""
        at = self._place(field)
        if at is None:
            return 0, 0
        start = at + _unpack(_I32, self._data, at)
        count = _unpack(_I32, self._data, start)
        if not 0 <= count <= (len(self._data) - start - 4) // item_bytes:
            raise ValueError(f"it has a vector of {count:,} items, more than its bytes can hold")
        return start + 4, count

    def number(self, field: int, kind: struct.Struct = _I64) -> int:
        """Return a number, by default a long."""
        at = self._place(field)
        return 0 if at is None else _unpack(kind, self._data, at)

    def table(self, field: int) -> FlatTable | None:
        """Return a table inside this one."""
        at = self._place(field)
        return None if at is None else FlatTable(self._data, at + _unpack(_I32, self._data, at))

    def tables(self, field: int) -> list[FlatTable]:
        """Return the tables of a vector."""
        start, count = self._vector(field, 4)
        places = range(start, start + 4 * count, 4)
        return [FlatTable(self._data, at + _unpack(_I32, self._data, at)) for at in places]

    def longs(self, field: int, *, each: int) -> Ints:
        """Return a vector of structs of longs, int64, shape (n, each)."""
        start, count = self._vector(field, 8 * each)
        flat = np.frombuffer(self._data, "<i8", count * each, start)
        return flat.reshape(count, each).astype(np.int64)


def _unpack(kind: struct.Struct, data: bytes, at: int) -> int:
    if not 0 <= at <= len(data) - kind.size:
        raise ValueError("it points outside of its own bytes")
    found: int = kind.unpack_from(data, at)[0]
    return found


def metadata_of(head: bytes) -> bytes:
    """Return a message's metadata without the length before it. Raises ValueError."""
    at = 8 if head[:4] == CONTINUES else 4
    size = int.from_bytes(head[at - 4 : at], "little", signed=True)
    if not 0 < size <= len(head) - at:
        raise ValueError("a message's metadata has an invalid size")
    return head[at : at + size]


_MAGIC = b"ARROW1"
_FOOTER_DICTIONARIES, _FOOTER_BATCHES = 2, 3
_MESSAGE_TYPE, _MESSAGE_HEADER = 1, 2
_RECORD_BATCH = 3
_BATCH_COMPRESSION = 3

Columns = dict[str, str]
"""The name and Arrow type of each column, in order."""


class LazyColumn(Sequence[Any]):
    """The values of an Arrow column, decoded one at a time: 10^6 of them cost no memory."""

    def __init__(self, column: Any) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, i: Any) -> Any:
        found = self._column[i]
        return found.to_pylist() if isinstance(i, slice) else found.as_py()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._column.to_pylist())


def write_batch(path: bytes, batch: Any) -> None:
    """Write one record batch as an uncompressed Arrow IPC file."""
    with pa.OSFile(os.fsdecode(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def metadata(buffer: Any) -> Mapping[bytes, bytes]:
    """Return the metadata in a file's schema. Raises one of BROKEN."""
    return pa.ipc.open_file(pa.BufferReader(buffer)).schema.metadata or {}


def only_batch(
    buffer: Any, columns: Columns, *, optional: frozenset[str] = frozenset(), is_full: bool = True
) -> Any:
    """Return the only record batch of a mapped Arrow IPC file.

    columns: the expected ones, of which those in `optional` may be absent. is_full: check the
    values too, which may not be missing; unchecked offsets may point anywhere, and unchecked text
    may not be UTF-8. Raises one of BROKEN.
    """
    reader = pa.ipc.open_file(pa.BufferReader(buffer))
    found = [(field.name, str(field.type)) for field in reader.schema]
    names = {name for name, _ in found}
    wanted = [(n, kind) for n, kind in columns.items() if n in names or n not in optional]
    if found != wanted:
        got, expected = _differing(found, wanted), _differing(wanted, found)
        raise ValueError(f"its columns are {got}, wanted {expected}")
    _refuse_packed(memoryview(buffer))
    batch = reader.get_batch(0)
    batch.validate(full=is_full)  # without it, offsets out of bounds would crash the process
    if is_full and any(column.null_count for column in batch.columns):
        raise ValueError("a column has missing values")
    return batch


def _differing(columns: Sequence[tuple[str, str]], others: Sequence[tuple[str, str]]) -> str:
    """Return the columns that the others don't contain, for messages."""
    odd = [each for each in columns if each not in others]
    return ", ".join(f"{name[:32]} {kind[:32]}" for name, kind in (odd or columns)[:12]) or "none"


def footer_start(buffer: Any) -> int:
    """Return the position of the footer in a buffer that ends with it. Raises ValueError."""
    view = memoryview(buffer)
    end = len(view) - 10
    if end < 0 or bytes(view[-6:]) != _MAGIC:
        raise ValueError("its end mark is missing")
    start = end - int.from_bytes(view[end:-6], "little", signed=True)
    if not 0 <= start <= end:
        raise ValueError("its footer points outside the file")
    return start


def batch_head_end(buffer: Any) -> int:
    """Return the position at which the numbers of the only record batch begin, from a buffer that
    ends with the file's footer. The metadata before that position locates them. Raises
    ValueError."""
    return _only_head(memoryview(buffer))[1]


def _only_head(view: memoryview) -> tuple[int, int]:
    """Return the start and the end of the metadata of the only record batch. Raises ValueError."""
    footer = FlatTable(bytes(view[footer_start(view) : -10]))
    if len(footer.longs(_FOOTER_DICTIONARIES, each=3)):
        raise ValueError("it has dictionaries")
    blocks = footer.longs(_FOOTER_BATCHES, each=3)
    if len(blocks) != 1:
        raise ValueError(f"{len(blocks)} record batches, wanted 1")
    start, head = int(blocks[0, 0]), int(blocks[0, 1]) & 0xFFFFFFFF  # a 32-bit number, then padding
    if not 0 <= start <= start + head <= len(view):
        raise ValueError("its footer points outside the file")
    return start, start + head


def _refuse_packed(view: memoryview) -> None:
    """Reject compression and dictionaries. Raises ValueError."""
    start, end = _only_head(view)
    message = FlatTable(metadata_of(bytes(view[start:end])))
    batch = message.table(_MESSAGE_HEADER)
    if batch is None or message.number(_MESSAGE_TYPE, BYTE) != _RECORD_BATCH:
        raise ValueError("its message isn't a record batch")
    if batch.table(_BATCH_COMPRESSION) is not None:
        raise ValueError("it is compressed")
