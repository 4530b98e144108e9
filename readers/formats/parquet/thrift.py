"""Read and write Thrift's compact protocol, as far as Parquet's footers and page headers use it.

Footers are untrusted: every length is checked against the bytes that are left before memory is
allocated for it, and the nesting of structs is limited. What is read takes memory in proportion to
its bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_TRUE, _FALSE, _BYTE, _I16, I32, I64, _DOUBLE, BINARY, LIST, _SET, _, STRUCT = range(1, 13)
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
            raise ValueError(
                f"its structs nest deeper than {_MAX_DEPTH}, or are more than its bytes can hold"
            )
        found, data, number = Struct(), self._data, 0
        found.start = self.at
        try:
            while head := data[self.at]:
                self.at += 1
                kind = head & 15
                number = number + (head >> 4) if head > 15 else self._signed()
                if kind in (I32, I64) and (small := data[self.at]) < 128:  # most fields are so
                    self.at += 1
                    found[number] = (small >> 1) ^ -(small & 1)
                else:
                    found[number] = self.value(kind, depth)
        except IndexError:
            raise ValueError("it ends inside a struct") from None
        self.at += 1
        found.end = self.at
        return found

    def fields(self) -> Iterator[tuple[int, int]]:
        """Yield the number and kind of each field of a struct. Read a field by `value` or `structs`
        before the next one."""
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head > 15 else self._signed()
            yield number, head & 15

    def structs(self, *, most: int) -> Iterator[Struct]:
        """Read a list of at most `most` structs, one by one."""
        kind, count = self._list_head()
        if count and (kind != STRUCT or count > most):
            raise ValueError(f"it has a list of {count:,} elements that is too long, or no structs")
        for _ in range(count):
            yield self.struct(1)

    def value(self, kind: int, depth: int = 0) -> Any:
        """Read the value of a field of a kind."""
        if kind in (I64, I32, _I16):
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
        kind, count = self._list_head()
        if kind in (_TRUE, _FALSE):  # in a list they take a byte each
            return [byte == _TRUE for byte in self._bytes(count)]
        return [self.value(kind, depth + (kind != STRUCT)) for _ in range(count)]

    def _list_head(self) -> tuple[int, int]:
        """Read the kind of a list's elements, and their number."""
        head = self._byte()
        count = head >> 4
        return head & 15, self._room_for(self.unsigned() if count == 15 else count)

    def _room_for(self, count: int) -> int:
        """Return a number of elements, each of which has at least one byte."""
        if count > len(self._data) - self.at:
            raise ValueError(f"it has {count:,} elements or characters, more than it has bytes")
        return count

    def _bytes(self, count: int) -> bytes:
        start = self.at
        self.at = start + self._room_for(count)
        return bytes(self._data[start : self.at])

    def _byte(self) -> int:
        at = self.at
        if at >= len(self._data):
            raise ValueError("it ends inside a value")
        self.at = at + 1
        return self._data[at]

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


def write_struct(fields: dict[int, tuple[int, bytes]]) -> bytes:
    """Return a struct's bytes.

    fields: kind and bytes of each field, by number, ascending, as `write_number`, `write_text` and
    `write_list` return them.
    """
    parts, last = [], 0
    for number, (kind, data) in fields.items():
        step = number - last
        if 1 <= step <= 15:
            parts.append(bytes((step << 4 | kind,)))
        else:
            parts.append(bytes((kind,)) + write_number(number)[1])
        parts.append(data)
        last = number
    return b"".join(parts) + b"\0"


def write_number(value: int, kind: int = I32) -> tuple[int, bytes]:
    """Return the kind and the bytes of an integer. kind: I32 or I64."""
    return kind, _varint(value << 1 if value >= 0 else (-value << 1) - 1)


def write_text(value: bytes) -> tuple[int, bytes]:
    """Return the kind and the bytes of a text."""
    return BINARY, _varint(len(value)) + value


def write_list(kind: int, values: list[bytes]) -> tuple[int, bytes]:
    """Return the kind and the bytes of a list. values: the bytes of elements of one kind."""
    return LIST, bytes((240 | kind,)) + _varint(len(values)) + b"".join(values)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)
