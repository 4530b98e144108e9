"""Decode the single codecs of Zarr chunks over flat bytes: compressors, filters and checksums.

Called without asyncio, and without the GIL where the library releases it (all of these do). What a
chunk claims to hold is compared with what it should before anything is allocated, so that a few
bytes can't ask for gigabytes. Which library decodes fastest was measured: numcodecs decompresses
straight into the room that it is given; for gzip and the like it is the standard library's
decompressors with a limit, which numcodecs itself calls without one. Filters use numpy.
"""

from __future__ import annotations

import bz2
import lzma
import sys
import zlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from penstock.cache import MissingDependencyError
from penstock.cache.base import machine_remedy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.types import Encoded

    Decompress = Callable[[Encoded, Encoded], object]

LZMA_MEMORY_BYTES = 2**27
"""What a dictionary of LZMA may take: that of its highest preset is 64 MiB."""

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_BLOSC_HEADER_BYTES, _BLOSC_VERSIONS = 16, (1, 2)
_LZ4_HEADER_BYTES = 4


@dataclass(frozen=True, slots=True)
class DecodedSize:
    """How many bytes come out of a codec: exactly so many, or at most, where a further codec made
    them smaller before."""

    bytes: int
    is_exact: bool

    def check(self, told: int) -> None:
        """Raise ValueError where it tells another size."""
        if told != self.bytes if self.is_exact else told > self.bytes:
            most = "" if self.is_exact else "at most "
            raise ValueError(f"it says that it holds {told:,} bytes, wanted {most}{self.bytes:,}")

    def room(self, told: int, out: Encoded | None) -> Encoded:
        """Where to put as many bytes as it says that it holds."""
        self.check(told)
        return np.empty(told, np.uint8) if out is None else out


class Codec(Protocol):
    """One codec of a chain, the way back: from what it wrote to what it was given."""

    def decode(self, data: Encoded, size: DecodedSize, out: Encoded | None) -> Encoded:
        """What was encoded: uint8, contiguous; `out` itself where one is given, which has size
        bytes. Raises ValueError where the bytes are damaged or hold another number of them."""


def numcodecs_module(name: str, *, codec: str) -> Any:
    """A module of numcodecs, imported here alone. Raises MissingDependencyError."""
    try:
        from importlib import import_module

        module: Any = import_module(f"numcodecs.{name}")
    except ImportError:
        raise MissingDependencyError(
            f"The chunks are encoded by {codec!r}, and numcodecs isn't installed, which decodes "
            "that: pip install 'penstock[zarr]'."
        ) from None
    if name == "blosc":
        # Many threads of ours decode a chunk each: none of them wants eight more for it. zarr does
        # the same when it is imported.
        module.use_threads = False
    return module


@cache
def _decompress(name: str) -> Decompress:
    function: Decompress = numcodecs_module(name, codec=name).decompress
    return function


def _into(name: str, data: Encoded, room: Encoded) -> Encoded:
    try:
        _decompress(name)(data, room)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None
    return room


@dataclass(frozen=True, slots=True)
class Zstd:
    """Frames of Zstandard."""

    def __post_init__(self) -> None:
        _decompress("zstd")

    def decode(self, data: Encoded, size: DecodedSize, out: Encoded | None) -> Encoded:
        """Decompress."""
        told = _zstd_size(data)
        if told is None or (size.is_exact and told < size.bytes):
            return _zstd_stream(data, size, out)
        return _into("zstd", data, size.room(told, out))


def _zstd_size(data: Encoded) -> int | None:
    """What the header of a frame says that it holds; None where it doesn't.

    Source: RFC 8878, 3.1.1.1.
    """
    head = data[:18].tobytes()
    if len(head) < 6 or not head.startswith(_ZSTD_MAGIC):
        return None
    descriptor = head[4]
    is_single = descriptor >> 5 & 1
    at = 5 + (1 - is_single) + (0, 1, 2, 4)[descriptor & 3]
    width = (is_single, 2, 4, 8)[descriptor >> 6]
    if not width or len(head) < at + width:
        return None
    return int.from_bytes(head[at : at + width], "little") + (256 if width == 2 else 0)


def _zstd_stream(data: Encoded, size: DecodedSize, out: Encoded | None) -> Encoded:
    """A frame that doesn't say what it holds, or several, as others write them."""
    room = np.empty(size.bytes, np.uint8) if out is None else out
    try:
        with pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(data)), "zstd") as stream:
            filled = 0
            while filled < len(room):
                count = stream.readinto(room[filled:])
                if not count:
                    break
                filled += count
            is_more = bool(stream.read(1))
    except (OSError, ValueError) as error:
        if machine_remedy(error) is not None:
            raise
        raise ValueError(f"zstd: {error}") from None
    size.check(filled + is_more)
    return room[:filled]


@dataclass(frozen=True, slots=True)
class Blosc:
    """Blosc 1, whatever compresses and shuffles inside."""

    def __post_init__(self) -> None:
        _decompress("blosc")

    def decode(self, data: Encoded, size: DecodedSize, out: Encoded | None) -> Encoded:
        """Decompress."""
        head = data[:_BLOSC_HEADER_BYTES].tobytes()
        if len(head) < _BLOSC_HEADER_BYTES or head[0] not in _BLOSC_VERSIONS:
            raise ValueError("blosc: it doesn't begin as Blosc does")
        told, block, encoded = (int.from_bytes(head[at : at + 4], "little") for at in (4, 8, 12))
        # The library isn't told where the bytes end: it believes this.
        if encoded != len(data):
            raise ValueError(
                f"blosc: it says that it takes {encoded:,} bytes, and there are {len(data):,}"
            )
        room = size.room(told, out)
        if not 0 < block <= max(told, 1):
            raise ValueError(f"blosc: it says that its blocks have {block:,} bytes")
        return _into("blosc", data, room)


@dataclass(frozen=True, slots=True)
class Lz4:
    """A block of LZ4 behind its size, as numcodecs writes it."""

    def __post_init__(self) -> None:
        _decompress("lz4")

    def decode(self, data: Encoded, size: DecodedSize, out: Encoded | None) -> Encoded:
        """Decompress."""
        if len(data) < _LZ4_HEADER_BYTES:
            raise ValueError("lz4: it is empty")
        told = int.from_bytes(data[:_LZ4_HEADER_BYTES].tobytes(), "little")
        return _into("lz4", data, size.room(told, out))


class _Decompressor(Protocol):
    """What zlib's, bz2's and lzma's decompressors have in common."""

    @property
    def eof(self) -> bool:
        """Whether the end of a stream was reached."""

    @property
    def unused_data(self) -> bytes:
        """What follows it."""

    def decompress(self, data: Any, max_length: int = ..., /) -> bytes:
        """The next bytes."""


@dataclass(frozen=True, slots=True)
class StreamCodec:
    """A compressor of the standard library. new: makes a decompressor; joins: whether several
    streams may follow one another."""

    name: str
    new: Callable[[], _Decompressor]
    joins: bool

    def decode(self, data: Encoded, size: DecodedSize, out: Encoded | None) -> Encoded:
        """Decompress."""
        parts: list[bytes] = []
        filled, rest = 0, data.data
        while True:
            decompressor = self.new()
            try:
                # One more than wanted, so that what holds more is seen.
                part = decompressor.decompress(rest, size.bytes - filled + 1)
            except (zlib.error, lzma.LZMAError, OSError, EOFError, MemoryError) as error:
                if machine_remedy(error) is not None and self.name != "lzma":
                    raise  # lzma asks for what a damaged header says
                raise ValueError(f"{self.name}: {error}") from None
            parts.append(part)
            filled += len(part)
            if filled > size.bytes:
                raise ValueError(f"{self.name}: it holds more than {size.bytes:,} bytes")
            if not decompressor.eof:
                # zlib stops at its limit before it has seen the stream's end, where it fits it.
                raise ValueError(f"{self.name}: it is cut short")
            rest = memoryview(decompressor.unused_data.lstrip(b"\0"))
            if not rest:
                break
            if not self.joins:
                raise ValueError(f"{self.name}: {len(rest):,} bytes follow its end")
        size.check(filled)
        found = np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), np.uint8)
        if out is None:
            return found
        out[:] = found
        return out


def gzip_codec() -> StreamCodec:
    """Files of gzip."""
    return StreamCodec("gzip", lambda: zlib.decompressobj(31), joins=True)


def zlib_codec() -> StreamCodec:
    """Streams of zlib."""
    return StreamCodec("zlib", zlib.decompressobj, joins=False)


def bz2_codec() -> StreamCodec:
    """Files of bzip2."""
    return StreamCodec("bz2", bz2.BZ2Decompressor, joins=True)


def lzma_codec(configuration: Mapping[str, Any]) -> StreamCodec:
    """Files of xz, or LZMA as numcodecs has it. Raises ValueError for what can't be."""
    form = configuration.get("format", lzma.FORMAT_XZ)
    filters = configuration.get("filters")
    if form in (lzma.FORMAT_XZ, lzma.FORMAT_ALONE):
        return StreamCodec(
            "lzma",
            lambda: lzma.LZMADecompressor(format=form, memlimit=LZMA_MEMORY_BYTES),
            joins=form == lzma.FORMAT_XZ,
        )
    if form != lzma.FORMAT_RAW or not _are_lzma_filters(filters):
        raise ValueError(f"its codec lzma says format {str(form)[:20]!r}, filters {filters!r:.80}")
    return StreamCodec(
        "lzma", lambda: lzma.LZMADecompressor(format=lzma.FORMAT_RAW, filters=filters), joins=False
    )


def _are_lzma_filters(filters: Sequence[Any] | None) -> bool:
    if not isinstance(filters, list) or not 0 < len(filters) <= 4:
        return False
    if not all(
        isinstance(each, dict) and all(type(value) is int for value in each.values())
        for each in filters
    ):
        return False
    if any(each.get("dict_size", 0) > LZMA_MEMORY_BYTES for each in filters):
        return False
    try:
        lzma.LZMADecompressor(format=lzma.FORMAT_RAW, filters=filters)
    except (lzma.LZMAError, ValueError, TypeError, OverflowError):
        return False
    return True


_CHECKSUM_BYTES = 4
_BLOCK_ITEMS = 2**14

Place = Literal["start", "end"]


@dataclass(frozen=True, slots=True)
class Shuffle:
    """The first bytes of all items, then the second ones, and so on. itemsize: of an item."""

    itemsize: int

    def decode(self, data: Encoded, size: DecodedSize, out: Encoded | None) -> Encoded:
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

    def decode(self, data: Encoded, size: DecodedSize, out: Encoded | None) -> Encoded:
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

    def decode(self, data: Encoded, size: DecodedSize, out: Encoded | None) -> Encoded:
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

    def decode(self, data: Encoded, size: DecodedSize, out: Encoded | None) -> Encoded:
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

    def decode(self, data: Encoded, size: DecodedSize, out: Encoded | None) -> Encoded:
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

    def decode(self, data: Encoded, size: DecodedSize, out: Encoded | None) -> Encoded:
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
class NumcodecsCodec:
    """A codec of numcodecs that takes bytes and gives them back, called as it is."""

    name: str
    codec: Any

    def decode(self, data: Encoded, size: DecodedSize, out: Encoded | None) -> Encoded:
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
