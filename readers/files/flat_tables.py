"""Parse flatbuffers, in which Arrow files keep their metadata, as untrusted input.

Only the parts that Arrow's IPC format uses are read. Every position is checked against the bytes
that exist, and invalid ones raise ValueError.

Source: Flatbuffers, "Internals"; the Arrow columnar format, "Encapsulated message format".
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

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


def metadata_of(head: bytes) -> bytes:
    """Return a message's metadata without the length before it. Raises ValueError."""
    at = 8 if head[:4] == CONTINUES else 4
    size = int.from_bytes(head[at - 4 : at], "little", signed=True)
    if not 0 < size <= len(head) - at:
        raise ValueError("a message's metadata has an invalid size")
    return head[at : at + size]
