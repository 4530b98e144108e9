"""Build the decoder of a Zarr array's chunks: its codecs in reverse, over flat bytes.

Common compressors are called without asyncio, and all of these libraries release the GIL. The size
that a chunk claims is compared with the expected one before memory is allocated, so a few bytes
can't claim gigabytes. numcodecs decompresses zstd, blosc and lz4 directly into a given buffer; for
gzip and similar formats, the standard library's decompressors are used with a limit, which
numcodecs calls without one. All other codecs of numcodecs (filters, checksums, those of other
packages) are used unchanged.

Chunks of other codecs are decoded by zarr's own pipeline: each thread has a zarr array that
consists of one chunk, over a dictionary in memory. The decoder puts the bytes of a chunk into the
dictionary and reads the array. This uses public names alone, except for the buffer. A chunk of
49 kB takes 0.39 ms by this way and 0.015 ms by a direct call, so it isn't used for all.
"""

from __future__ import annotations

import bz2
import json
import lzma
import math
import threading
import warnings
import zlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.cache import DatasetError, MissingDependencyError
from penstock.cache.base import machine_remedy
from penstock.readers.formats.array_reader import CodecChain
from penstock.readers.formats.zarr.zarr_metadata import NUMCODECS, byte_order_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from penstock.readers.formats.array_reader import ChunkDecoder
    from penstock.readers.formats.zarr.zarr_metadata import ArrayMetadata, CodecSpec
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
    is one whose input size is unknown."""

    bytes: int
    is_exact: bool = True

    def check(self, size: int) -> None:
        """Raise ValueError if a size doesn't match."""
        if size != self.bytes if self.is_exact else size > self.bytes:
            most = "" if self.is_exact else "at most "
            raise ValueError(f"it decodes to {size:,} bytes, expected {most}{self.bytes:,}")

    def buffer(self, size: int, out: Encoded | None) -> Encoded:
        """Check a size and return a buffer for the output: `out` if it is given, else a new one."""
        self.check(size)
        return np.empty(size, np.uint8) if out is None else out

    def deliver(self, data: Encoded, out: Encoded | None) -> Encoded:
        """Check the size of decoded bytes and return them, copied into `out` if it is given."""
        self.check(len(data))
        if out is None:
            return data
        out[:] = data
        return out


# -- steps: they decode bytes, and fill and return `out` if it is given, which has the exact size.


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


def _decompressed(name: str, decompress: Decompress, data: Encoded, buffer: Encoded) -> Encoded:
    try:
        decompress(data, buffer)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None
    return buffer


def _zstd(decompress: Decompress, size: DecodedSize, data: Encoded, out: Encoded | None) -> Encoded:
    """Decompress frames of Zstandard."""
    frame = _zstd_size(data[:18].tobytes())
    if frame is None or (size.is_exact and frame < size.bytes):
        return _zstd_stream(size, data, out)
    return _decompressed("zstd", decompress, data, size.buffer(frame, out))


def _zstd_size(head: bytes) -> int | None:
    """Return the decoded size that the header of a frame states; None if it doesn't state one.

    Source: RFC 8878, 3.1.1.1.
    """
    if len(head) < 6 or not head.startswith(_ZSTD_MAGIC):
        return None
    descriptor = head[4]
    is_single = descriptor >> 5 & 1
    at = 5 + (1 - is_single) + (0, 1, 2, 4)[descriptor & 3]
    width = (is_single, 2, 4, 8)[descriptor >> 6]
    if not width or len(head) < at + width:
        return None
    return int.from_bytes(head[at : at + width], "little") + (256 if width == 2 else 0)


def _zstd_stream(size: DecodedSize, data: Encoded, out: Encoded | None) -> Encoded:
    """Decode a frame that doesn't state its size, or several frames, as other writers produce
    them."""
    buffer, filled = np.empty(size.bytes, np.uint8) if out is None else out, 0
    try:
        with pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(data)), "zstd") as stream:
            while filled < len(buffer) and (count := stream.readinto(buffer[filled:])):
                filled += count
            is_more = bool(stream.read(1))
    except (OSError, ValueError) as error:
        if machine_remedy(error) is not None:
            raise
        raise ValueError(f"zstd: {error}") from None
    size.check(filled + is_more)
    return buffer[:filled]


def _blosc(
    decompress: Decompress, size: DecodedSize, data: Encoded, out: Encoded | None
) -> Encoded:
    """Decompress Blosc 1 with any inner compressor and shuffle."""
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
    return _decompressed("blosc", decompress, data, buffer)


def _lz4(decompress: Decompress, size: DecodedSize, data: Encoded, out: Encoded | None) -> Encoded:
    """Decompress a block of LZ4 that follows its size, as numcodecs writes it."""
    if len(data) < _LZ4_HEADER_BYTES:
        raise ValueError("lz4: it is empty")
    decoded = int.from_bytes(data[:_LZ4_HEADER_BYTES].tobytes(), "little")
    return _decompressed("lz4", decompress, data, size.buffer(decoded, out))


def _streams(
    name: str, new: Callable[[], Any], size: DecodedSize, data: Encoded, out: Encoded | None
) -> Encoded:
    """Decompress streams of the standard library that follow one another. new: makes a
    decompressor."""
    parts: list[bytes] = []
    filled, rest = 0, data.data
    while rest or not parts:
        decompressor = new()
        try:
            # Ask for one byte more than expected, to notice a stream that holds more.
            parts.append(decompressor.decompress(rest, size.bytes - filled + 1))
        except (zlib.error, lzma.LZMAError, OSError, EOFError, MemoryError) as error:
            if machine_remedy(error) is not None and name != "lzma":
                raise  # lzma allocates the size that a damaged header may state
            raise ValueError(f"{name}: {error}") from None
        filled += len(parts[-1])
        if filled > size.bytes:
            raise ValueError(f"{name}: it holds more than {size.bytes:,} bytes")
        if not decompressor.eof:
            raise ValueError(f"{name}: it is truncated")
        rest = memoryview(decompressor.unused_data.lstrip(b"\0"))
    return size.deliver(np.frombuffer(b"".join(parts), np.uint8), out)


def lzma_decompressor(options: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a function that makes decompressors of xz files, or of LZMA in numcodecs' other
    formats. Raises ValueError if the options are invalid."""
    form: Any = options.get("format", lzma.FORMAT_XZ)
    filters: Any = options.get("filters")
    if form in (lzma.FORMAT_XZ, lzma.FORMAT_ALONE):
        return lambda: lzma.LZMADecompressor(format=form, memlimit=LZMA_MEMORY_BYTES)
    try:
        if (
            form != lzma.FORMAT_RAW
            or max(f.get("dict_size", 0) for f in filters) > LZMA_MEMORY_BYTES
        ):
            raise ValueError("another format, or a dictionary that is too large")
        lzma.LZMADecompressor(format=lzma.FORMAT_RAW, filters=filters)
    except (lzma.LZMAError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"its codec lzma has format {form!r:.20}, filters {filters!r:.80}: {error}"
        ) from None
    return lambda: lzma.LZMADecompressor(format=lzma.FORMAT_RAW, filters=filters)


def _numcodecs(
    name: str, codec: Any, size: DecodedSize, data: Encoded, out: Encoded | None
) -> Encoded:
    """Call another codec of numcodecs, or of a package that registers one there."""
    try:
        with np.errstate(all="ignore"):
            decoded = np.asarray(codec.decode(data))
        flat = decoded.reshape(-1, order="A").view(np.uint8)
    except Exception as error:  # any error of any package's codec
        if machine_remedy(error) is not None:
            raise
        raise ValueError(f"{name}: {type(error).__name__}: {error}") from error
    return size.deliver(flat, out)


# -- chains


def decoder_of(metadata: ArrayMetadata) -> ChunkDecoder:
    """Return a decoder for the chunks of an array.

    Raises MissingDependencyError if a codec needs a package that isn't installed, DatasetError if
    the codecs are invalid.
    """
    try:
        return _v2_chain(metadata) if metadata.version == 2 else _v3_chain(metadata)
    except NotImplementedError:
        return ZarrPythonDecoder(metadata)
    except (ValueError, TypeError, OverflowError) as error:
        raise DatasetError(
            f"{metadata.name or 'The array'}: its codecs are invalid: {error}. Write it again."
        ) from None


def _v2_chain(metadata: ArrayMetadata) -> CodecChain:
    shape = metadata.chunk_shape
    builder = _Builder(metadata.type.stored, shape)
    for spec in metadata.codecs:
        builder.add(spec, is_v3=False)
    order = tuple(range(len(shape)))
    return builder.chain(metadata.type.stored, order[::-1] if metadata.order == "F" else order)


def _v3_chain(metadata: ArrayMetadata) -> CodecChain:
    shape, stored = metadata.chunk_shape, metadata.type.stored
    order, is_serialized = tuple(range(len(shape))), False
    builder = _Builder(stored, shape)
    for spec in metadata.codecs:
        if spec.name == "transpose" and not is_serialized:
            if builder.steps:
                raise NotImplementedError  # a filter before it sees the numbers in another order
            wanted: Any = spec.configuration.get("order")
            is_order = isinstance(wanted, list) and all(type(axis) is int for axis in wanted)
            if not is_order or sorted(wanted) != list(range(len(shape))):
                raise ValueError(f"the order of transpose is {wanted!r:.80}")
            order = tuple(order[axis] for axis in wanted)
        elif spec.name in ("bytes", "endian") and not is_serialized:
            is_serialized = True
            endian = byte_order_of(spec)
            if builder.steps and not np.dtype(f"{endian}u2").isnative:
                raise NotImplementedError  # filters on numbers of the other byte order
            if not builder.steps:
                stored = stored.newbyteorder(endian) if stored.itemsize > 1 else stored
        else:
            builder.add(spec, is_v3=True)
            if spec.plain_name not in _ARRAY_FILTERS and not is_serialized:
                raise NotImplementedError  # another serializer than `bytes`
    if not is_serialized:
        raise NotImplementedError
    return builder.chain(stored, order)


_V3_NAMES = {"zstd", "blosc", "gzip", "crc32c"}
_NUMBER_FILTERS = {
    **dict.fromkeys(("delta", "fixedscaleoffset", "quantize"), ("dtype", "astype")),
    "astype": ("decode_dtype", "encode_dtype"),
}
"""Filters from numbers to numbers, with the names of their dtypes before and after."""

_ARRAY_FILTERS = {*_NUMBER_FILTERS, "bitround", "packbits"}
_CHECKSUMS = {"crc32c", "crc32", "adler32", "fletcher32", "jenkins_lookup3"}
_INTO = {"zstd": _zstd, "blosc": _blosc, "lz4": _lz4}
_STREAMS: dict[str, Callable[[], Any]] = {
    "gzip": lambda: zlib.decompressobj(31),
    "zlib": zlib.decompressobj,
    "bz2": bz2.BZ2Decompressor,
}
_MOST_GROWTH = 16
"""A filter encodes a number of one byte in at most this many bytes."""


class _Builder:
    """Collects the steps of a chain in the order of encoding, and computes the size of each step's
    input."""

    def __init__(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._dtype, self._shape = dtype, shape
        self._size = DecodedSize(math.prod(shape) * dtype.itemsize)
        self.steps: list[Callable[[Encoded, Encoded | None], Encoded]] = []

    def chain(self, stored: np.dtype[Any], order: tuple[int, ...]) -> CodecChain:
        """Return the chain."""
        steps = tuple(reversed(self.steps))
        return CodecChain(steps=steps, stored=stored, shape=self._shape, order=order)

    def add(self, spec: CodecSpec, *, is_v3: bool) -> None:
        """Add the next codec. Raises NotImplementedError if only zarr may have it."""
        if is_v3 and spec.name not in _V3_NAMES and not spec.name.startswith(NUMCODECS):
            raise NotImplementedError(spec.name)
        name, options, size = spec.plain_name, spec.configuration, self._size
        if name == "bitround":
            return  # the rounding can't be undone
        if name in _INTO:
            module = numcodecs_module(name, codec=name)
            self.steps.append(partial(_INTO[name], module.decompress, size))
        elif name in _STREAMS or name == "lzma":
            new = _STREAMS.get(name) or lzma_decompressor(options)
            self.steps.append(partial(_streams, name, new, size))
        else:
            self.steps.append(partial(_numcodecs, name, self._codec(name, options, is_v3), size))
        if name in _CHECKSUMS:
            self._size = DecodedSize(size.bytes + 4, size.is_exact)
        elif name != "shuffle":
            # Incompressible bytes grow by less than this.
            growth = _MOST_GROWTH if name in _ARRAY_FILTERS else 1
            self._size = DecodedSize(growth * size.bytes + size.bytes // 8 + 4096, is_exact=False)

    def _codec(self, name: str, options: Mapping[str, Any], is_v3: bool) -> Any:
        """Return numcodecs' codec of a name. In version 3, it takes the dtype from the array."""
        options = {"id": name, **options}
        before, after = _NUMBER_FILTERS.get(name, ("", ""))
        if before:
            options[before] = options.get(before) or self._dtype.str
        if is_v3 and name == "shuffle":
            options["elementsize"] = options.get("elementsize") or self._dtype.itemsize
        registry = numcodecs_module("registry", codec=name)
        try:
            codec = registry.get_codec(options)
        except numcodecs_module("errors", codec=name).UnknownCodecError:
            raise NotImplementedError(name) from None
        if before:  # its options are used for the first time here
            codec.decode(codec.encode(np.zeros(1, options[before])))
            self._dtype = np.dtype(options.get(after) or options[before])
        return codec


class ZarrPythonDecoder:
    """Decodes the chunks of an array through zarr."""

    is_raw = is_direct = False

    def __init__(self, metadata: ArrayMetadata) -> None:
        """Raises MissingDependencyError if zarr, or the package of a codec, isn't installed."""
        self._shape, self._dtype = metadata.chunk_shape, metadata.dtype
        self._documents = _documents(metadata)
        self._key = metadata.keys.key([0] * len(self._shape))
        self._own = threading.local()
        codecs = [codec.name for codec in metadata.codecs]
        what = f"{metadata.name or 'The array'}: its chunks are encoded by {codecs}, "
        try:
            self._open()
        except ImportError as error:
            raise MissingDependencyError(
                f"{what}which zarr decodes, and zarr isn't installed ({error}): "
                "pip install 'penstock[zarr]'."
            ) from None
        except Exception as error:  # any error of any package's codec
            if machine_remedy(error) is not None:
                raise
            is_of_imagecodecs = any("imagecodecs" in name for name in codecs)
            package = "imagecodecs" if is_of_imagecodecs else "the package that registers the codec"
            raise MissingDependencyError(
                f"{what}and zarr can't open them ({type(error).__name__}: {str(error)[:200]}). "
                f"Install 'penstock[zarr]' and {package}."
            ) from error

    def decode(self, data: Encoded, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Decode a chunk; see `ChunkDecoder`."""
        if not hasattr(self._own, "array"):
            self._open()
        self._own.files[self._key] = self._buffer(data)
        try:
            chunk = np.asarray(self._own.array[...])
        except Exception as error:
            if machine_remedy(error) is not None:
                raise
            raise ValueError(f"{type(error).__name__}: {error}") from error
        finally:
            del self._own.files[self._key]
        if chunk.shape != self._shape:
            raise ValueError(f"it has the shape {chunk.shape}, expected {self._shape}")
        if chunk.dtype.kind in "mM":
            chunk = chunk.astype(chunk.dtype.newbyteorder("="), copy=False).view(np.int64)
        if out is None:
            return chunk.astype(self._dtype, copy=False)
        out[...] = chunk
        return out

    def _open(self) -> None:
        """Open this thread's array, which has no chunk yet."""
        import zarr
        from zarr.core.buffer import default_buffer_prototype
        from zarr.storage import MemoryStore

        self._buffer: Any = default_buffer_prototype().buffer.from_array_like
        files = {name: self._buffer(data) for name, data in self._documents.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about codecs outside of the specification
            self._own.array = zarr.open_array(MemoryStore(files), mode="r")
        self._own.files = files


def _documents(metadata: ArrayMetadata) -> dict[str, Encoded]:
    """Return the metadata files of an array that consists of one chunk."""
    shape = list(metadata.chunk_shape)
    document = {**metadata.document, "shape": shape}
    if metadata.version == 2:
        document |= {"chunks": shape, "fill_value": None}
    else:
        document |= {
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape}},
            "codecs": [
                {"name": codec.name, "configuration": dict(codec.configuration)}
                for codec in metadata.codecs
            ],
            "attributes": {},
            "dimension_names": None,
        }
    name = ".zarray" if metadata.version == 2 else "zarr.json"
    return {name: np.frombuffer(json.dumps(document).encode(), np.uint8)}
