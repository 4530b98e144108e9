"""Build the decoder of a Zarr array's chunks: its codecs in reverse, over flat bytes.

Common compressors are called without asyncio, and all of these libraries release the GIL. The size
that a chunk claims is compared with the expected one before memory is allocated, so a few bytes
can't claim gigabytes. numcodecs decompresses zstd, blosc and lz4 directly into a given buffer; for
gzip and similar formats, the standard library's decompressors are used with a limit, which
numcodecs calls without one. All other codecs of numcodecs (filters, checksums, those of other
packages) are used unchanged.

Chunks of other codecs are decoded by zarr's own pipeline, from a zarr array over a dictionary in
memory. The decoder puts the bytes of a chunk into the dictionary and reads this chunk of the array.
This uses public names alone, except for the buffer. A chunk of 49 kB takes 0.39 ms by this way and
0.015 ms by a direct call, so it isn't used for all.
"""

from __future__ import annotations

import bz2
import json
import lzma
import math
import warnings
import zlib
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.cache import DatasetError, MissingDependencyError
from penstock.cache.base import machine_remedy
from penstock.readers.formats.array_reader import ChunkDecoder
from penstock.readers.formats.zarr.zarr_metadata import NUMCODECS, ArrayMetadata, byte_order_of
from penstock.readers.types import Encoded, failure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.readers.formats.array_reader import Step


LZMA_MEMORY_BYTES = 2**27
"""The largest LZMA dictionary; that of the highest preset takes 64 MiB."""

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

    def checked(self, data: Any) -> Encoded:
        """Return decoded bytes, as uint8. Raises ValueError if their size doesn't match."""
        self.check(len(data))
        return np.frombuffer(data, np.uint8)


# -- steps


def _step(name: str, decode: Step, data: Encoded, out: Encoded | None) -> Encoded:
    """Call a step; raise ValueError for any error of any package's codec about damaged bytes."""
    try:
        return decode(data, out)
    except Exception as error:
        # lzma allocates the size that a damaged header may state.
        if name != "lzma" and machine_remedy(error) is not None:
            raise
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{name}: {kind}{error}") from error


def _sized(
    size_of: Callable[[bytes, int], int | None],
    decompress: Callable[[Encoded, Encoded], object],
    size: DecodedSize,
    data: Encoded,
    out: Encoded | None,
) -> Encoded:
    """Decompress bytes whose first ones state the decoded size. size_of: returns it for the first
    bytes and the number of all; None if they don't state it."""
    stated = size_of(data[:18].tobytes(), len(data))
    if stated is None or (size_of is _zstd_size and size.is_exact and stated < size.bytes):
        # A frame that doesn't state its size, or several frames, as other writers produce them.
        with pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(data)), "zstd") as stream:
            # Ask for one byte more than expected, to notice a stream that holds more.
            return size.checked(stream.read(size.bytes + 1))
    size.check(stated)
    buffer = np.empty(stated, np.uint8) if out is None else out
    decompress(data, buffer)
    return buffer


def _zstd_size(head: bytes, encoded: int) -> int | None:
    """Return the size that the first frame of Zstandard states. Source: RFC 8878, 3.1.1.1."""
    del encoded
    if len(head) < 6 or not head.startswith(b"\x28\xb5\x2f\xfd"):
        return None
    descriptor = head[4]
    is_single = descriptor >> 5 & 1
    at = 5 + (1 - is_single) + (0, 1, 2, 4)[descriptor & 3]
    width = (is_single, 2, 4, 8)[descriptor >> 6]
    if not width or len(head) < at + width:
        return None
    return int.from_bytes(head[at : at + width], "little") + (256 if width == 2 else 0)


def _blosc_size(head: bytes, encoded: int) -> int:
    """Return the size that the header of Blosc 1 states, with any inner compressor and shuffle."""
    if len(head) < _BLOSC_HEADER_BYTES or head[0] not in _BLOSC_VERSIONS:
        raise ValueError("its header isn't Blosc's")
    decoded, block, stated = (int.from_bytes(head[at : at + 4], "little") for at in (4, 8, 12))
    # The library doesn't know where the bytes end, and relies on these numbers.
    if stated != encoded or not 0 < block <= max(decoded, 1):
        raise ValueError(
            f"its header states {stated:,} encoded bytes in blocks of {block:,}, and there are "
            f"{encoded:,}, which decode to {decoded:,}"
        )
    return decoded


def _lz4_size(head: bytes, encoded: int) -> int:
    """Return the size that precedes a block of LZ4, as numcodecs writes it."""
    if encoded < _LZ4_HEADER_BYTES:
        raise ValueError("it is empty")
    return int.from_bytes(head[:_LZ4_HEADER_BYTES], "little")


def _streams(
    new: Callable[[], Any], size: DecodedSize, data: Encoded, _: Encoded | None
) -> Encoded:
    """Decompress streams of the standard library that follow one another. new: makes a
    decompressor."""
    parts: list[bytes] = []
    filled, rest = 0, data.data
    while rest or not parts:
        decompressor = new()
        # Ask for one byte more than expected, to notice a stream that holds more.
        parts.append(decompressor.decompress(rest, size.bytes - filled + 1))
        filled += len(parts[-1])
        if filled > size.bytes:
            raise ValueError(f"it holds more than {size.bytes:,} bytes")
        if not decompressor.eof:
            raise ValueError("it is truncated")
        rest = memoryview(decompressor.unused_data.lstrip(b"\0"))
    return size.checked(b"".join(parts))


def lzma_decompressor(options: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a function that makes decompressors of xz files, or of LZMA in numcodecs' other
    formats. Raises an error of `_INVALID` for invalid options."""
    form = options.get("format", lzma.FORMAT_XZ)
    limit: dict[str, Any] = {"memlimit": LZMA_MEMORY_BYTES}
    if form == lzma.FORMAT_RAW:  # it has no limit of its own
        limit = {"filters": options.get("filters")}
        if max(each.get("dict_size", 0) for each in limit["filters"]) > LZMA_MEMORY_BYTES:
            raise ValueError("the dictionary of its codec lzma is too large")
    lzma.LZMADecompressor(format=form, **limit)
    return partial(lzma.LZMADecompressor, format=form, **limit)


def _numcodecs(codec: Any, size: DecodedSize, data: Encoded, _: Encoded | None) -> Encoded:
    """Call another codec of numcodecs, or of a package that registers one there."""
    with np.errstate(all="ignore"):
        decoded = np.asarray(codec.decode(data))
    return size.checked(decoded.reshape(-1, order="A").view(np.uint8))


# -- chains


def decoder_of(metadata: ArrayMetadata) -> ChunkDecoder:
    """Return a decoder for the chunks of an array.

    Raises MissingDependencyError if a codec needs a package that isn't installed, DatasetError if
    the codecs are invalid.
    """
    try:
        try:
            return _chain(metadata)
        except _OnlyZarrKnows:
            steps = (partial(_step, "zarr", ZarrPython(metadata)),)
            return ChunkDecoder(steps=steps, stored=metadata.dtype, shape=metadata.grid.chunk)
    except ImportError as error:
        names, reason = [codec.name for codec in metadata.codecs], str(error)
        if metadata.node.version == 2:  # its documents name codecs without the prefix
            names = [name.removeprefix(NUMCODECS) for name in names]
            reason = reason.replace(f"'{NUMCODECS}", "'")
        raise MissingDependencyError(
            f"{metadata.name or 'The array'}: its chunks are encoded by {names}, which can't be "
            f"decoded ({reason}). Install 'penstock[zarr]' and the package that registers the "
            "codec, such as imagecodecs."
        ) from error
    except _INVALID as error:
        raise DatasetError(
            f"{metadata.name or 'The array'}: its codecs are invalid: {error}. Write it again."
        ) from None


class _OnlyZarrKnows(Exception):
    """Raised for a codec that only zarr may have, or an order of codecs that only zarr knows."""


_INVALID = ValueError, TypeError, OverflowError, AttributeError, lzma.LZMAError
"""The errors of invalid options of a codec."""

_V3_NAMES = {"zstd", "blosc", "gzip", "crc32c"}
_NUMBER_FILTERS = {
    **dict.fromkeys(("delta", "fixedscaleoffset", "quantize"), ("dtype", "astype")),
    "astype": ("decode_dtype", "encode_dtype"),
}
"""Filters from numbers to numbers, with the names of their dtypes before and after."""

_ARRAY_FILTERS = {*_NUMBER_FILTERS, "bitround", "packbits"}
_CHECKSUMS = {"crc32c", "crc32", "adler32", "fletcher32", "jenkins_lookup3"}
_SIZES = {"zstd": _zstd_size, "blosc": _blosc_size, "lz4": _lz4_size}
_STREAMS: dict[str, Callable[[Mapping[str, Any]], Callable[[], Any]]] = {
    "gzip": lambda _: partial(zlib.decompressobj, 31),
    "zlib": lambda _: zlib.decompressobj,
    "bz2": lambda _: bz2.BZ2Decompressor,
    "lzma": lzma_decompressor,
}
_MOST_GROWTH = 16
"""A filter encodes a number of one byte in at most this many bytes."""

_MOST_CALLS = 2**20
"""The most threads that decode chunks through one `ZarrPython` at the same time."""


def _chain(metadata: ArrayMetadata) -> ChunkDecoder:
    """Return the steps of an array's codecs. Raises _OnlyZarrKnows."""
    shape, dtype, stored = metadata.grid.chunk, metadata.dtype, metadata.dtype
    order = axes = tuple(range(len(shape)))
    size = DecodedSize(math.prod(shape) * dtype.itemsize)
    is_serialized, steps = False, list[Any]()
    for spec in metadata.codecs:
        name, options = spec.name.removeprefix(NUMCODECS), spec.configuration
        if spec.name == "transpose" and not is_serialized:
            if steps:  # a filter before it sees the numbers in another order
                raise _OnlyZarrKnows
            wanted: Any = options.get("order")
            wanted = list(axes[::-1]) if wanted == "F" else wanted
            is_order = isinstance(wanted, list) and all(type(axis) is int for axis in wanted)
            if not is_order or sorted(wanted) != list(axes):
                raise ValueError(
                    f"the order of transpose is {wanted!r:.80}, expected each of the "
                    f"{len(axes)} axes once"
                )
            order = tuple(order[axis] for axis in wanted)
        elif spec.name in ("bytes", "endian") and not is_serialized:
            is_serialized, endian = True, byte_order_of(spec)
            if steps and not np.dtype(f"{endian}u2").isnative:  # filters on such numbers
                raise _OnlyZarrKnows
            if not steps and stored.itemsize > 1:
                stored = stored.newbyteorder(endian)
        elif name == spec.name and name not in _V3_NAMES:
            raise _OnlyZarrKnows
        elif name != "bitround":  # the rounding can't be undone
            decode, dtype = _decode(name, options, dtype, size)
            steps.append(partial(_step, name, decode))
            size = _encoded_size(name, size)
            if name not in _ARRAY_FILTERS and not is_serialized:
                raise _OnlyZarrKnows  # another serializer than `bytes`
    if not is_serialized:
        raise _OnlyZarrKnows
    return ChunkDecoder(steps=tuple(reversed(steps)), stored=stored, shape=shape, order=order)


def _encoded_size(name: str, size: DecodedSize) -> DecodedSize:
    """Return the size of what a codec makes of this many bytes."""
    if name == "shuffle":
        return size
    if name in _CHECKSUMS:
        return DecodedSize(size.bytes + 4, size.is_exact)
    # Incompressible bytes grow by less than this.
    growth = _MOST_GROWTH if name in _ARRAY_FILTERS else 1
    return DecodedSize(growth * size.bytes + size.bytes // 8 + 4096, is_exact=False)


def _decode(
    name: str, given: Mapping[str, Any], dtype: np.dtype[Any], size: DecodedSize
) -> tuple[Step, np.dtype[Any]]:
    """Return the step that undoes a codec, and the dtype of what it encodes numbers of this dtype
    to."""
    if name in _SIZES:
        module: Any = import_module(f"numcodecs.{name}")
        if name == "blosc":
            # Many threads decode one chunk each, so threads of Blosc's own would only compete. zarr
            # sets the same when it is imported.
            module.use_threads = False
        return partial(_sized, _SIZES[name], module.decompress, size), dtype
    if name in _STREAMS:
        return partial(_streams, _STREAMS[name](given), size), dtype
    options = {**given, "id": name}  # a hostile document may give an "id" of its own
    before, after = _NUMBER_FILTERS.get(name, ("", ""))
    if before:
        options[before] = options.get(before) or dtype.str
    if name == "shuffle":
        options["elementsize"] = options.get("elementsize") or dtype.itemsize
    registry, errors = map(import_module, ("numcodecs.registry", "numcodecs.errors"))
    try:
        codec = registry.get_codec(options)
    except errors.UnknownCodecError:
        raise _OnlyZarrKnows from None
    if before:  # its options are used for the first time here
        codec.decode(codec.encode(np.zeros(1, options[before])))
        dtype = np.dtype(options.get(after) or options[before])
    return partial(_numcodecs, codec, size), dtype


class ZarrPython:
    """Decodes the chunks of an array through zarr; a `Step`. Several threads may call it: the array
    that zarr reads has many chunks along its first axis, and each call decodes one of its own."""

    def __init__(self, metadata: ArrayMetadata) -> None:
        """Raises ImportError if zarr, or the package of a codec, isn't installed."""
        import zarr
        from zarr.core.buffer import default_buffer_prototype
        from zarr.storage import MemoryStore

        self._shape, self._dtype = metadata.grid.chunk, metadata.dtype
        grid, fills = {"chunk_shape": self._shape}, {"b": False, "c": [0, 0]}
        document = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [self._shape[0] * _MOST_CALLS, *self._shape[1:]],
            "data_type": self._dtype.name,
            "fill_value": fills.get(self._dtype.kind, 0),
            "chunk_grid": {"name": "regular", "configuration": grid},
            "chunk_key_encoding": {"name": "v2", "configuration": {"separator": "."}},
            "codecs": [codec._asdict() for codec in metadata.codecs],
            "attributes": {},
        }
        self._buffer: Any = default_buffer_prototype().buffer.from_array_like
        encoded = np.frombuffer(json.dumps(document).encode(), np.uint8)
        self._files = {"zarr.json": self._buffer(encoded)}
        self._calls = cycle(range(_MOST_CALLS))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about codecs outside of the specification
                self._array = zarr.open_array(MemoryStore(self._files), mode="r")
        except Exception as error:  # any error of any package's codec
            raise ImportError(f"zarr: {failure(error)}") from error

    def __call__(self, data: Encoded, _: Encoded | None) -> Encoded:
        """Return the bytes of a chunk's numbers. Raises what zarr raises."""
        number, length = next(self._calls), self._shape[0]
        key = ".".join(map(str, (number, *[0] * (len(self._shape) - 1))))
        self._files[key] = self._buffer(data)
        try:
            chunk = np.asarray(self._array[number * length : (number + 1) * length])
        finally:
            del self._files[key]
        return np.ascontiguousarray(chunk, self._dtype).reshape(-1).view(np.uint8)
