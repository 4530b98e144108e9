"""Read and write Thrift's compact protocol, as far as Parquet's footers and page headers use it.

Footers are untrusted: every length is checked against the bytes that are left before memory is
allocated for it, and the nesting of structs is limited. What is read takes memory in proportion to
its bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_TRUE, _FALSE, _BYTE, _I16, I32, I64, _DOUBLE, BINARY, LIST, _SET, _MAP, STRUCT = range(1, 13)
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

    def __init__(self, data: bytes, at: int = 0) -> None:
        self._data, self.at = data, at
        # An empty struct is one byte, but takes 100 in memory. No valid footer has so many.
        self._structs_left = 1000 + len(data) // 4

    def struct(self, depth: int = 0) -> Struct:
        """Read a struct and everything inside it."""
        if depth > _MAX_DEPTH:
            raise ValueError(f"its structs nest deeper than {_MAX_DEPTH}")
        self._structs_left -= 1
        if self._structs_left < 0:
            raise ValueError("it has more structs than its bytes can hold")
        found, data, number = Struct(), self._data, 0
        found.start = self.at
        try:
            while True:
                head = data[self.at]
                self.at += 1
                if not head:
                    break
                kind = head & 15
                number = number + (head >> 4) if head > 15 else self._signed()
                if kind in (I32, I64, _I16):
                    first = data[self.at]
                    if first < 128:  # most numbers are small
                        self.at += 1
                        found[number] = (first >> 1) ^ -(first & 1)
                    else:
                        found[number] = self._signed()
                else:
                    found[number] = self.value(kind, depth)
        except IndexError:
            raise ValueError("it ends inside a struct") from None
        found.end = self.at
        return found

    def fields(self) -> Iterator[tuple[int, int]]:
        """Yield the number and kind of each field of a struct. Read a field by `value` or `structs`
        before the next one."""
        number = 0
        while head := self._bytes(1)[0]:
            number = number + (head >> 4) if head > 15 else self._signed()
            yield number, head & 15

    def structs(self, *, most: int) -> Iterator[Struct]:
        """Read a list of at most `most` structs, one by one."""
        kind, count = self._list_head()
        if count and (kind != STRUCT or count > min(most, len(self._data) - self.at)):
            raise ValueError(f"it has a list of {count:,} elements that is too long, or no structs")
        for _ in range(count):
            yield self.struct(1)

    def value(self, kind: int, depth: int = 0) -> Any:
        """Read the value of a field of a kind."""
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE
        if kind == BINARY:
            return self._bytes(self._unsigned())
        if kind == STRUCT:
            return self.struct(depth + 1)
        if kind in (LIST, _SET):
            return self._list(depth + 1)
        if kind in (_I16, I32, I64):
            return self._signed()
        if kind in (_BYTE, _DOUBLE):
            return self._bytes(1 if kind == _BYTE else 8)
        if kind == _MAP:
            return self._map(depth + 1)
        raise ValueError(f"it has a value of the unknown kind {kind}")

    def _list_head(self) -> tuple[int, int]:
        """Read the kind of a list's elements, and their number."""
        head = self._bytes(1)[0]
        count = head >> 4
        return head & 15, self._unsigned() if count == 15 else count

    def _list(self, depth: int) -> list[Any]:
        kind, count = self._list_head()
        # An element has at least one byte.
        if depth > _MAX_DEPTH or count > len(self._data) - self.at:
            raise ValueError(f"it has a list of {count:,} elements, more than it has bytes")
        if kind == STRUCT:
            return [self.struct(depth) for _ in range(count)]
        if kind in (_TRUE, _FALSE):  # in a list they take a byte each
            return [byte == _TRUE for byte in self._bytes(count)]
        return [self.value(kind, depth) for _ in range(count)]

    def _map(self, depth: int) -> list[tuple[Any, Any]]:
        count = self._unsigned()
        if not count:
            return []
        if depth > _MAX_DEPTH or 2 * count > len(self._data) - self.at:
            raise ValueError(f"it has a map of {count:,} entries, more than it has bytes")
        kinds = self._bytes(1)[0]
        key, value = kinds >> 4, kinds & 15
        return [(self.value(key, depth), self.value(value, depth)) for _ in range(count)]

    def _bytes(self, count: int) -> bytes:
        start = self.at
        if count > len(self._data) - start:
            raise ValueError(f"it has a text of {count:,} bytes, more than are left")
        self.at = start + count
        return self._data[start : self.at]

    def _unsigned(self) -> int:
        value = shift = 0
        while shift < 70:
            if self.at >= len(self._data):
                raise ValueError("it ends inside a number")
            byte = self._data[self.at]
            self.at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
        raise ValueError("it has a number of more than 64 bits")

    def _signed(self) -> int:
        value = self._unsigned()
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
            parts.append(bytes((kind,)) + _zigzag(number))
        parts.append(data)
        last = number
    return b"".join(parts) + b"\0"


def write_number(value: int, kind: int = I32) -> tuple[int, bytes]:
    """Return the kind and the bytes of an integer. kind: I32 or I64."""
    return kind, _zigzag(value)


def write_text(value: bytes) -> tuple[int, bytes]:
    """Return the kind and the bytes of a text."""
    return BINARY, _varint(len(value)) + value


def write_list(kind: int, values: list[bytes]) -> tuple[int, bytes]:
    """Return the kind and the bytes of a list. values: the bytes of elements of one kind."""
    count = len(values)
    head = bytes((count << 4 | kind,)) if count < 15 else bytes((240 | kind,)) + _varint(count)
    return LIST, head + b"".join(values)


def _zigzag(value: int) -> bytes:
    return _varint(value << 1 if value >= 0 else (-value << 1) - 1)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)
