"""Filters and checksums of Zarr chunks, over flat bytes, by numpy and without the GIL."""

from __future__ import annotations

import sys
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from crc32c import crc32c

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from penstock.readers.formats.zarr.compressors import Size
    from penstock.readers.types import Encoded

_CHECKSUM_BYTES = 4
_BLOCK_ITEMS = 2**14

Place = Literal["start", "end"]


@dataclass(frozen=True, slots=True)
class Shuffle:
    """The first bytes of all items, then the second ones, and so on. itemsize: of an item."""

    itemsize: int

    def decode(self, data: Encoded, size: Size, out: Encoded | None) -> Encoded:
        """Put each item's bytes together."""
        room = size.room(len(data), out)
        if len(data) % self.itemsize:
            raise ValueError(f"shuffle: {len(data):,} bytes are no items of {self.itemsize}")
        planes = data.reshape(self.itemsize, -1)
        if self.itemsize in (2, 4, 8) and sys.byteorder == "little":
            items = room.view(f"<u{self.itemsize}")
            for start in range(0, len(items), _BLOCK_ITEMS):
                block = slice(start, start + _BLOCK_ITEMS)
                items[block] = _joined(planes[:, block])
        else:
            rows = room.reshape(-1, self.itemsize)
            for number, plane in enumerate(planes):
                rows[:, number] = plane
        return room


def _joined(planes: NDArray[Any]) -> NDArray[Any]:
    """Items of which each plane has a part, the lowest first; shape (items,). Pairs of planes are
    joined into wider ones, which is three times as fast as a copy with strides."""
    while len(planes) > 1:
        bits = 8 * planes.dtype.itemsize
        wide = planes[1::2].astype(f"<u{bits // 4}")
        np.left_shift(wide, bits, out=wide)
        np.bitwise_or(wide, planes[::2], out=wide)
        planes = wide
    items: NDArray[Any] = planes[0]
    return items


@dataclass(frozen=True, slots=True)
class Delta:
    """The first number, and the difference of each from the one before. dtype: of the numbers;
    astype: of the differences."""

    dtype: np.dtype[Any]
    astype: np.dtype[Any]

    def decode(self, data: Encoded, size: Size, out: Encoded | None) -> Encoded:
        """Add them up."""
        told = data.view(self.astype)
        room = size.room(len(told) * self.dtype.itemsize, out)
        with np.errstate(all="ignore"):
            np.cumsum(told, out=room.view(self.dtype))
        return room


@dataclass(frozen=True, slots=True)
class FixedScaleOffset:
    """Numbers less an offset, times a scale, rounded to smaller ones."""

    offset: float
    scale: float
    dtype: np.dtype[Any]
    astype: np.dtype[Any]

    def decode(self, data: Encoded, size: Size, out: Encoded | None) -> Encoded:
        """Undo it, up to the rounding."""
        told = data.view(self.astype)
        room = size.room(len(told) * self.dtype.itemsize, out)
        with np.errstate(all="ignore"):
            np.copyto(room.view(self.dtype), told / self.scale + self.offset, casting="unsafe")
        return room


@dataclass(frozen=True, slots=True)
class AsType:
    """Numbers of another type. dtype: before; astype: as written. What was rounded stays so."""

    dtype: np.dtype[Any]
    astype: np.dtype[Any]

    def decode(self, data: Encoded, size: Size, out: Encoded | None) -> Encoded:
        """Convert them back."""
        told = data.view(self.astype)
        if out is None and self.dtype == self.astype:
            size.check(len(data))
            return data
        room = size.room(len(told) * self.dtype.itemsize, out)
        with np.errstate(all="ignore"):
            np.copyto(room.view(self.dtype), told, casting="unsafe")
        return room


@dataclass(frozen=True, slots=True)
class PackBits:
    """Bools as bits, behind a byte that says how many bits at the end are none."""

    def decode(self, data: Encoded, size: Size, out: Encoded | None) -> Encoded:
        """A byte for each bit."""
        if not len(data) or data[0] > 7:
            raise ValueError("packbits: it doesn't begin with how many bits it fills up")
        count = 8 * (len(data) - 1) - int(data[0])
        room = size.room(count, out)
        room[:] = np.unpackbits(data[1:], count=count)
        return room


def checksum_of(name: str, place: Place) -> Checksum:
    """The checksum that a codec of that name writes."""
    return Checksum(
        name, {"crc32c": crc32c, "crc32": zlib.crc32, "adler32": zlib.adler32}[name], place
    )


@dataclass(frozen=True, slots=True)
class Checksum:
    """The bytes, and a checksum of 32 bits at their start or end, which is compared."""

    name: str
    function: Callable[[Encoded], int]
    place: Place

    def decode(self, data: Encoded, size: Size, out: Encoded | None) -> Encoded:
        """Take the checksum off."""
        if len(data) < _CHECKSUM_BYTES:
            raise ValueError(f"{self.name}: it is too short to have a checksum")
        is_first = self.place == "start"
        told = data[:_CHECKSUM_BYTES] if is_first else data[-_CHECKSUM_BYTES:]
        rest = data[_CHECKSUM_BYTES:] if is_first else data[:-_CHECKSUM_BYTES]
        size.check(len(rest))
        if self.function(rest) != int.from_bytes(told.tobytes(), "little"):
            raise ValueError(f"{self.name}: the checksum differs, so these aren't what was written")
        if out is None:
            return rest
        out[:] = rest
        return out


@dataclass(frozen=True, slots=True)
class Guest:
    """A codec of numcodecs that takes bytes and gives them back, called as it is."""

    name: str
    codec: Any

    def decode(self, data: Encoded, size: Size, out: Encoded | None) -> Encoded:
        """What it says."""
        try:
            found = np.frombuffer(self.codec.decode(data), np.uint8)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise ValueError(f"{self.name}: {error}") from None
        size.check(len(found))
        if out is None:
            return found
        out[:] = found
        return out
