"""Read and write Thrift's compact protocol, as far as Parquet's footers and page headers use it.

Footers may come from anybody: every length is checked against the bytes that are there before
anything is made of it, and the nesting of structs is bounded. What is read takes memory in
proportion to its bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_MAX_DEPTH = 24

I32, I64, BINARY, LIST, STRUCT = _I32, _I64, _BINARY, _LIST, _STRUCT


class Struct(dict[int, Any]):
    """The fields of a struct by number. start, end: of its bytes."""

    __slots__ = ("end", "start")

    start: int
    end: int

    def count(self, field: int) -> int:
        """A number that is at least 0; -1 where there is none."""
        value = self.get(field)
        return value if type(value) is int and value >= 0 else -1

    def part(self, field: int) -> Struct | None:
        """A struct; None where there is none."""
        value = self.get(field)
        return value if isinstance(value, Struct) else None


class ThriftReader:
    """Reads one value behind the other. Raises ValueError for bytes that can't be."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self._data, self.at = data, at
        # An empty struct is a byte, and 100 in memory: none has that many.
        self._structs_left = 1000 + len(data) // 4

    def struct(self, depth: int = 0) -> Struct:
        """A struct and all that is in it."""
        if depth > _MAX_DEPTH:
            raise ValueError(f"its structs nest deeper than {_MAX_DEPTH}")
        self._structs_left -= 1
        if self._structs_left < 0:
            raise ValueError("it has more structs than its bytes can be")
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
                if kind in (_I32, _I64, _I16):
                    first = data[self.at]
                    if first < 128:  # most numbers are small
                        self.at += 1
                        found[number] = (first >> 1) ^ -(first & 1)
                    else:
                        found[number] = self._signed()
                else:
                    found[number] = self._value(kind, depth)
        except IndexError:
            raise ValueError("it ends inside of a struct") from None
        found.end = self.at
        return found

    def fields(self) -> Iterator[tuple[int, int]]:
        """The fields of a struct that is read by hand: number and kind of each. Whoever gets one
        reads its `value`, or its `structs`, before the next."""
        number = 0
        while head := self._bytes(1)[0]:
            number = number + (head >> 4) if head > 15 else self._signed()
            yield number, head & 15

    def value(self, kind: int) -> Any:
        """The value of such a field."""
        return self._value(kind, 0)

    def structs(self, *, most: int) -> Iterator[Struct]:
        """The structs of a list, one by one."""
        head = self._bytes(1)[0]
        kind, count = head & 15, head >> 4
        if count == 15:
            count = self._unsigned()
        if count and (kind != _STRUCT or count > min(most, len(self._data) - self.at)):
            raise ValueError(f"it has a list of {count:,} that isn't one of structs, or too long")
        for _ in range(count):
            yield self.struct(1)

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE
        if kind == _BINARY:
            return self._bytes(self._unsigned())
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in (_LIST, _SET):
            return self._list(depth + 1)
        if kind in (_I16, _I32, _I64):
            return self._signed()
        if kind in (_BYTE, _DOUBLE):
            return self._bytes(1 if kind == _BYTE else 8)
        if kind == _MAP:
            return self._map(depth + 1)
        raise ValueError(f"it has a value of the unknown kind {kind}")

    def _list(self, depth: int) -> list[Any]:
        head = self._bytes(1)[0]
        kind, count = head & 15, head >> 4
        if count == 15:
            count = self._unsigned()
        if (
            depth > _MAX_DEPTH or count > len(self._data) - self.at
        ):  # an element has a byte at least
            raise ValueError(f"it has a list of {count:,} elements, more than it has bytes")
        if kind == _STRUCT:
            return [self.struct(depth) for _ in range(count)]
        if kind in (_TRUE, _FALSE):  # as elements they are a byte each
            return [byte == _TRUE for byte in self._bytes(count)]
        return [self._value(kind, depth) for _ in range(count)]

    def _map(self, depth: int) -> list[tuple[Any, Any]]:
        count = self._unsigned()
        if not count:
            return []
        if depth > _MAX_DEPTH or 2 * count > len(self._data) - self.at:
            raise ValueError(f"it has a map of {count:,} entries, more than it has bytes")
        kinds = self._bytes(1)[0]
        key, value = kinds >> 4, kinds & 15
        return [(self._value(key, depth), self._value(value, depth)) for _ in range(count)]

    def _bytes(self, count: int) -> bytes:
        start = self.at
        if count > len(self._data) - start:
            raise ValueError(f"it has a text of {count:,} bytes, more than there are")
        self.at = start + count
        return self._data[start : self.at]

    def _unsigned(self) -> int:
        value = shift = 0
        while shift < 70:
            if self.at >= len(self._data):
                raise ValueError("it ends inside of a number")
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
    """A struct. fields: by number, ascending, each its kind and its bytes (of `number`, `text`,
    `items`, `write_struct`)."""
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
    """An integer as a field. kind: I32 or I64."""
    return kind, _zigzag(value)


def write_text(value: bytes) -> tuple[int, bytes]:
    """Bytes as a field."""
    return BINARY, _varint(len(value)) + value


def write_list(kind: int, values: list[bytes]) -> tuple[int, bytes]:
    """A list as a field. values: bytes of elements of one kind."""
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
