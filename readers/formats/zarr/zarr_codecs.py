"""Decode the single codecs of Zarr chunks over flat bytes: compressors, filters and checksums.

They are called without asyncio, and all of these libraries release the GIL. The size that a chunk
claims is compared with the expected one before memory is allocated, so a few bytes can't claim
gigabytes. The libraries were chosen by measurement: numcodecs decompresses directly into a given
buffer; for gzip and similar formats, the standard library's decompressors are used with a limit,
which numcodecs calls without one. Filters use numpy.
"""

from __future__ import annotations

import bz2
import lzma
import sys
import zlib
from dataclasses import dataclass
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
"""The largest LZMA dictionary; that of the highest preset takes 64 MiB."""

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_BLOSC_HEADER_BYTES, _BLOSC_VERSIONS = 16, (1, 2)
_LZ4_HEADER_BYTES = 4


@dataclass(frozen=True, slots=True)
class DecodedSize:
    """The expected size of a codec's output: exact, or an upper bound if the next codec to decode
    is a compressor, whose input size is unknown."""

    bytes: int
    is_exact: bool

    def check(self, size: int) -> None:
        """Raise ValueError if a size doesn't match."""
        if size != self.bytes if self.is_exact else size > self.bytes:
            most = "" if self.is_exact else "at most "
            raise ValueError(f"it decodes to {size:,} bytes, expected {most}{self.bytes:,}")

    def buffer(self, size: int, out: Encoded | None) -> Encoded:
        """Check a size and return a buffer for the output: `out` if it is given, else a new one."""
        self.check(size)
        return np.empty(size, np.uint8) if out is None else out


class Codec(Protocol):
    """One codec of a chain, in the direction of decoding."""

    def decode(self, data: Encoded, size: DecodedSize, out: Encoded | None) -> Encoded:
        """Return the decoded bytes: uint8, contiguous. If `out` is given, which has the exact size,
        fill and return it.

        Raises ValueError if the bytes are damaged or decode to another size.
        """


def numcodecs_module(name: str, *, codec: str) -> Any:
    """Import a module of numcodecs; no other function does. Raises MissingDependencyError."""
    try:
        from importlib import import_module

        module: Any = import_module(f"numcodecs.{name}")
    except ImportError:
        raise MissingDependencyError(
            f"The chunks are encoded by {codec!r}, which numcodecs decodes, and numcodecs isn't "
            "installed: pip install 'penstock[zarr]'."
        ) from None
    if name == "blosc":
        # Many threads decode one chunk each, so threads of Blosc's own would only compete. zarr
        # sets the same when it is imported.
        module.use_threads = False
    return module


def _delivered(data: Encoded, out: Encoded | None) -> Encoded:
    """Return decoded bytes, copied into `out` if it is given."""
    if out is None:
        return data
    out[:] = data
    return out


@dataclass(frozen=True, slots=True)
class _NumcodecsCompressor:
    """A compressor of numcodecs. decompress: decompresses bytes into a buffer of the right size."""

    decompress: Decompress

    def _decompress(self, name: str, data: Encoded, buffer: Encoded) -> Encoded:
        try:
            self.decompress(data, buffer)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from None
        return buffer


class Zstd(_NumcodecsCompressor):
    """Frames of Zstandard."""

    def decode(self, data: Encoded, size: DecodedSize, out: Encoded | None) -> Encoded:
        """Decompress."""
        frame = _zstd_size(data)
        if frame is None or (size.is_exact and frame < size.bytes):
            return _zstd_stream(data, size, out)
        return self._decompress("zstd", data, size.buffer(frame, out))


def _zstd_size(data: Encoded) -> int | None:
    """Return the decoded size that the header of a frame states; None if it doesn't state one.

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
    """Decode a frame that doesn't state its size, or several frames, as other writers produce
    them."""
    buffer = np.empty(size.bytes, np.uint8) if out is None else out
    try:
        with pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(data)), "zstd") as stream:
            filled = 0
            while filled < len(buffer):
                count = stream.readinto(buffer[filled:])
                if not count:
                    break
                filled += count
            is_more = bool(stream.read(1))
    except (OSError, ValueError) as error:
        if machine_remedy(error) is not None:
            raise
        raise ValueError(f"zstd: {error}") from None
    size.check(filled + is_more)
    return buffer[:filled]


class Blosc(_NumcodecsCompressor):
    """Blosc 1 with any inner compressor and shuffle."""

    def decode(self, data: Encoded, size: DecodedSize, out: Encoded | None) -> Encoded:
        """Decompress."""
        head = data[:_BLOSC_HEADER_BYTES].tobytes()
        if len(head) < _BLOSC_HEADER_BYTES or head[0] not in _BLOSC_VERSIONS:
            raise ValueError("blosc: its header isn't Blosc's")
        decoded, block, encoded = (int.from_bytes(head[at : at + 4], "little") for at in (4, 8, 12))
        # The library doesn't know where the bytes end, and relies on this number.
        if encoded != len(data):
            raise ValueError(
                f"blosc: its header states {encoded:,} encoded bytes, and there are {len(data):,}"
            )
        buffer = size.buffer(decoded, out)
        if not 0 < block <= max(decoded, 1):
            raise ValueError(f"blosc: its header states blocks of {block:,} bytes")
        return self._decompress("blosc", data, buffer)


class Lz4(_NumcodecsCompressor):
    """A block of LZ4 that follows its size, as numcodecs writes it."""

    def decode(self, data: Encoded, size: DecodedSize, out: Encoded | None) -> Encoded:
        """Decompress."""
        if len(data) < _LZ4_HEADER_BYTES:
            raise ValueError("lz4: it is empty")
        decoded = int.from_bytes(data[:_LZ4_HEADER_BYTES].tobytes(), "little")
        return self._decompress("lz4", data, size.buffer(decoded, out))


class _Decompressor(Protocol):
    """The common interface of the decompressors of zlib, bz2 and lzma."""

    @property
    def eof(self) -> bool:
        """True if the end of the stream was reached."""

    @property
    def unused_data(self) -> bytes:
        """The bytes that follow the stream."""

    def decompress(self, data: Any, max_length: int = ..., /) -> bytes:
        """Return the next decompressed bytes."""


@dataclass(frozen=True, slots=True)
class StreamCodec:
    """A compressor of the standard library.

    new: makes a decompressor. joins: several streams may follow one another.
    """

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
                # Ask for one byte more than expected, to notice a stream that holds more.
                part = decompressor.decompress(rest, size.bytes - filled + 1)
            except (zlib.error, lzma.LZMAError, OSError, EOFError, MemoryError) as error:
                if machine_remedy(error) is not None and self.name != "lzma":
                    raise  # lzma allocates the size that a damaged header may state
                raise ValueError(f"{self.name}: {error}") from None
            parts.append(part)
            filled += len(part)
            if filled > size.bytes:
                raise ValueError(f"{self.name}: it holds more than {size.bytes:,} bytes")
            if not decompressor.eof:
                raise ValueError(f"{self.name}: it is truncated")
            rest = memoryview(decompressor.unused_data.lstrip(b"\0"))
            if not rest:
                break
            if not self.joins:
                raise ValueError(f"{self.name}: {len(rest):,} bytes follow the end of its stream")
        size.check(filled)
        decoded = parts[0] if len(parts) == 1 else b"".join(parts)
        return _delivered(np.frombuffer(decoded, np.uint8), out)


def compressor(name: str) -> Codec | None:
    """Return the codec of a compressor that needs no configuration to decode; None for any other
    name.

    Raises MissingDependencyError.
    """
    match name:
        case "gzip":
            return StreamCodec("gzip", lambda: zlib.decompressobj(31), joins=True)
        case "zlib":
            return StreamCodec("zlib", zlib.decompressobj, joins=False)
        case "bz2":
            return StreamCodec("bz2", bz2.BZ2Decompressor, joins=True)
        case "zstd" | "blosc" | "lz4":
            decompress = numcodecs_module(name, codec=name).decompress
            kinds: dict[str, Callable[[Decompress], Codec]]
            kinds = {"zstd": Zstd, "blosc": Blosc, "lz4": Lz4}
            return kinds[name](decompress)
    return None


def lzma_codec(configuration: Mapping[str, Any]) -> StreamCodec:
    """Return the codec of xz files, or of LZMA in numcodecs' other formats. Raises ValueError if
    the configuration is invalid."""
    form = configuration.get("format", lzma.FORMAT_XZ)
    filters = configuration.get("filters")
    if form in (lzma.FORMAT_XZ, lzma.FORMAT_ALONE):
        return StreamCodec(
            "lzma",
            lambda: lzma.LZMADecompressor(format=form, memlimit=LZMA_MEMORY_BYTES),
            joins=form == lzma.FORMAT_XZ,
        )
    if form != lzma.FORMAT_RAW or not _are_lzma_filters(filters):
        raise ValueError(f"its codec lzma has format {str(form)[:20]!r}, filters {filters!r:.80}")
    return StreamCodec(
        "lzma", lambda: lzma.LZMADecompressor(format=lzma.FORMAT_RAW, filters=filters), joins=False
    )


def _are_lzma_filters(filters: Sequence[Any] | None) -> bool:
    if not isinstance(filters, list) or not 0 < len(filters) <= 4:
        return False
    for each in filters:
        if not isinstance(each, dict) or not all(type(value) is int for value in each.values()):
            return False
        if each.get("dict_size", 0) > LZMA_MEMORY_BYTES:
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
    """The first bytes of all items, then their second bytes, and so on. itemsize: of an item, in
    bytes."""

    itemsize: int

    def decode(self, data: Encoded, size: DecodedSize, out: Encoded | None) -> Encoded:
        """Put the bytes of each item together."""
        buffer = size.buffer(len(data), out)
        if len(data) % self.itemsize:
            raise ValueError(
                f"shuffle: {len(data):,} bytes isn't a multiple of its itemsize {self.itemsize}"
            )
        planes = data.reshape(self.itemsize, -1)
        if self.itemsize in (2, 4, 8) and sys.byteorder == "little":
            items = buffer.view(f"<u{self.itemsize}")
            for start in range(0, len(items), _BLOCK_ITEMS):
                block = slice(start, start + _BLOCK_ITEMS)
                items[block] = _joined(planes[:, block])
        else:
            rows = buffer.reshape(-1, self.itemsize)
            for number, plane in enumerate(planes):
                rows[:, number] = plane
        return buffer


def _joined(planes: NDArray[Any]) -> NDArray[Any]:
    """Join planes, each of which has one part of every item, lowest part first; returns items,
    shape (items,). It joins pairs of planes into wider planes, which is three times as fast as a
    copy with strides."""
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
    """The first number, then the difference of each number from the one before.

    dtype: of the numbers. astype: of the differences.
    """

    dtype: np.dtype[Any]
    astype: np.dtype[Any]

    def decode(self, data: Encoded, size: DecodedSize, out: Encoded | None) -> Encoded:
        """Sum up the differences."""
        differences = data.view(self.astype)
        buffer = size.buffer(len(differences) * self.dtype.itemsize, out)
        with np.errstate(all="ignore"):
            np.cumsum(differences, out=buffer.view(self.dtype))
        return buffer


@dataclass(frozen=True, slots=True)
class FixedScaleOffset:
    """Numbers minus an offset, times a scale, rounded to a smaller dtype."""

    offset: float
    scale: float
    dtype: np.dtype[Any]
    astype: np.dtype[Any]

    def decode(self, data: Encoded, size: DecodedSize, out: Encoded | None) -> Encoded:
        """Undo offset and scale; the rounding remains."""
        scaled = data.view(self.astype)
        buffer = size.buffer(len(scaled) * self.dtype.itemsize, out)
        with np.errstate(all="ignore"):
            np.copyto(buffer.view(self.dtype), scaled / self.scale + self.offset, casting="unsafe")
        return buffer


@dataclass(frozen=True, slots=True)
class AsType:
    """Numbers that were converted to another dtype. dtype: before; astype: as stored."""

    dtype: np.dtype[Any]
    astype: np.dtype[Any]

    def decode(self, data: Encoded, size: DecodedSize, out: Encoded | None) -> Encoded:
        """Convert them back; the rounding remains."""
        stored = data.view(self.astype)
        if out is None and self.dtype == self.astype:
            size.check(len(data))
            return data
        buffer = size.buffer(len(stored) * self.dtype.itemsize, out)
        with np.errstate(all="ignore"):
            np.copyto(buffer.view(self.dtype), stored, casting="unsafe")
        return buffer


@dataclass(frozen=True, slots=True)
class PackBits:
    """Bools as bits, after a byte with the number of padding bits at the end."""

    def decode(self, data: Encoded, size: DecodedSize, out: Encoded | None) -> Encoded:
        """Return one byte for each bit."""
        if not len(data) or data[0] > 7:
            raise ValueError("packbits: its first byte isn't a number of padding bits, 0 to 7")
        count = 8 * (len(data) - 1) - int(data[0])
        buffer = size.buffer(count, out)
        buffer[:] = np.unpackbits(data[1:], count=count)
        return buffer


_CHECKSUMS: dict[str, Callable[..., int]] = {
    "crc32c": crc32c,
    "crc32": zlib.crc32,
    "adler32": zlib.adler32,
}


@dataclass(frozen=True, slots=True)
class Checksum:
    """The bytes, with a 32-bit checksum at their start or end."""

    name: str
    place: Place

    def decode(self, data: Encoded, size: DecodedSize, out: Encoded | None) -> Encoded:
        """Compare the checksum and remove it."""
        if len(data) < _CHECKSUM_BYTES:
            raise ValueError(f"{self.name}: it is too short to have a checksum")
        is_first = self.place == "start"
        checksum = data[:_CHECKSUM_BYTES] if is_first else data[-_CHECKSUM_BYTES:]
        rest = data[_CHECKSUM_BYTES:] if is_first else data[:-_CHECKSUM_BYTES]
        size.check(len(rest))
        if _CHECKSUMS[self.name](rest) != int.from_bytes(checksum.tobytes(), "little"):
            raise ValueError(f"{self.name}: the checksum differs: the bytes are damaged")
        return _delivered(rest, out)


@dataclass(frozen=True, slots=True)
class NumcodecsCodec:
    """A codec of numcodecs from bytes to bytes, used unchanged."""

    name: str
    codec: Any

    def decode(self, data: Encoded, size: DecodedSize, out: Encoded | None) -> Encoded:
        """Call numcodecs."""
        try:
            decoded = np.frombuffer(self.codec.decode(data), np.uint8)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise ValueError(f"{self.name}: {error}") from None
        size.check(len(decoded))
        return _delivered(decoded, out)
