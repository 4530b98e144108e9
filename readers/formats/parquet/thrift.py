"""Read and write Thrift's compact protocol, as far as Parquet's footers and page headers use it.

Footers are untrusted: every length is checked against the bytes that are left before memory is
allocated for it, and the nesting of structs is limited. What is read takes memory in proportion to
its bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

_TRUE, _FALSE, _BYTE, _I16, I32, _I64, _DOUBLE, BINARY, LIST, _SET, _, STRUCT = range(1, 13)
_MAX_DEPTH = 24


class Struct(dict[int, Any]):
    """The fields of a struct by number. start, end: the place of its bytes."""

    __slots__ = ("end", "start")

    start: int
    end: int

    def count(self, field: int) -> int:
        """Return a field's number, or -1 if there is none or it is negative."""
        value = self.get(field)
        return value if type(value) is int and value >= 0 else -1

    def part(self, field: int) -> Struct | None:
        """Return a field's struct, or None if there is none."""
        value = self.get(field)
        return value if isinstance(value, Struct) else None

    def structs(self, field: int) -> list[Struct]:
        """Return a field's list of structs, empty if there is none. Raises ValueError for another
        value."""
        found = self.get(field, [])
        if not isinstance(found, list) or not all(isinstance(each, Struct) for each in found):
            raise ValueError(f"its field {field} isn't a list of structs")
        return found


class ThriftReader:
    """Reads one value after the other. Raises ValueError for invalid bytes."""

    def __init__(self, data: bytes | memoryview, at: int = 0) -> None:
        self._data, self.at = data, at
        # An empty struct is one byte, but takes 100 in memory. No valid footer has so many.
        self._structs_left = 1000 + len(data) // 4

    def struct(self, depth: int = 0) -> Struct:
        """Read a struct and everything inside it."""
        self._structs_left -= 1
        if depth > _MAX_DEPTH or self._structs_left < 0:
            raise ValueError(f"its structs nest deeper than {_MAX_DEPTH}, or are too many for it")
        found, data, number = Struct(), self._data, 0
        found.start = self.at
        try:
            while head := data[self.at]:
                self.at += 1
                kind = head & 15
                number = number + (head >> 4) if head > 15 else self._signed()
                if kind in (I32, _I64) and (small := data[self.at]) < 128:  # most fields are so
                    self.at += 1
                    found[number] = (small >> 1) ^ -(small & 1)
                else:
                    found[number] = self._value(kind, depth)
        except IndexError:
            raise ValueError("it ends inside a struct") from None
        self.at += 1
        found.end = self.at
        return found

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (_I64, I32, _I16):
            return self._signed()
        if kind == STRUCT:
            return self.struct(depth + 1)
        if kind == BINARY:
            return self._bytes(self.unsigned())
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE
        if kind in (_BYTE, _DOUBLE):
            return self._bytes(1 if kind == _BYTE else 8)
        if kind not in (LIST, _SET) or depth > _MAX_DEPTH:  # Parquet has no maps
            raise ValueError(f"it has a value of the unknown kind {kind}, or values nest too deep")
        (head,) = self._bytes(1)
        kind, count = head & 15, head >> 4
        count = self._room_for(self.unsigned() if count == 15 else count)
        if kind in (_TRUE, _FALSE):  # in a list they take a byte each
            return [byte == _TRUE for byte in self._bytes(count)]
        return [self._value(kind, depth + (kind != STRUCT)) for _ in range(count)]

    def _room_for(self, count: int) -> int:
        """Return a number of elements, each of which has at least one byte."""
        if count > len(self._data) - self.at:
            raise ValueError(f"it has {count:,} elements or characters, more than it has bytes")
        return count

    def _bytes(self, count: int) -> bytes:
        start = self.at
        self.at = start + self._room_for(count)
        return bytes(self._data[start : self.at])

    def unsigned(self) -> int:
        """Read a number without a sign."""
        data, at, value, shift = self._data, self.at, 0, 0
        while at < len(data) and shift < 70:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                self.at = at
                return value
            shift += 7
        raise ValueError("it ends inside a number, or the number has more than 64 bits")

    def _signed(self) -> int:
        value = self.unsigned()
        return (value >> 1) ^ -(value & 1)


class Long(int):
    """An integer that is written as one of 64 bits."""


class Raw(NamedTuple):
    """A value that is written already."""

    kind: int
    data: bytes


def write_struct(fields: Mapping[int, Any]) -> bytes:
    """Return a struct's bytes. fields: by number, ascending: integers, texts as bytes, lists of
    values of one kind, and structs as mappings."""
    parts, last = [], 0
    for number, value in fields.items():
        kind, data = _written(value)
        step = number - last
        is_near = 1 <= step <= 15
        parts.append(
            bytes((step << 4 | kind,)) if is_near else bytes((kind,)) + _written(number)[1]
        )
        parts.append(data)
        last = number
    return b"".join(parts) + b"\0"


def _written(value: Any) -> tuple[int, bytes]:
    """Return the kind of a value, and its bytes."""
    if isinstance(value, Raw):
        return value
    if isinstance(value, int):
        number = value << 1 if value >= 0 else (-value << 1) - 1
        return _I64 if isinstance(value, Long) else I32, _varint(number)
    if isinstance(value, bytes):
        return BINARY, _varint(len(value)) + value
    if isinstance(value, list):
        items = [_written(each) for each in value]
        head = bytes((240 | (items[0][0] if items else STRUCT),)) + _varint(len(items))
        return LIST, head + b"".join(data for _, data in items)
    return STRUCT, write_struct(value)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)
