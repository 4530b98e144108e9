"""Flatbuffers, as much of them as the footers and messages of Arrow IPC have.

They may come from anybody: places are checked against the bytes that are there. What can't be is a
ValueError.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_I32, _U16, _I64 = struct.Struct("<i"), struct.Struct("<H"), struct.Struct("<q")


class Table:
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
    def root(cls, data: bytes) -> Table:
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

    def table(self, field: int) -> Table | None:
        """A table inside."""
        at = self._place(field)
        return None if at is None else Table(self._data, at + self._number(_I32, at))

    def tables(self, field: int) -> list[Table]:
        """A vector of tables."""
        at = self._place(field)
        if at is None:
            return []
        start = at + self._number(_I32, at)
        count = self._number(_I32, start)
        if not 0 <= count <= (len(self._data) - start - 4) // 4:
            raise ValueError(f"it has a vector of {count:,}, more than there are bytes")
        places = range(start + 4, start + 4 + 4 * count, 4)
        return [Table(self._data, place + self._number(_I32, place)) for place in places]

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
