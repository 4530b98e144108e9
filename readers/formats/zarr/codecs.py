"""From a chunk's bytes to its numbers: the chain of a Zarr array's codecs, the way back.

All codecs that are known work on flat bytes, so a chain is a row of steps, each of which knows
before how many bytes it makes; then come the shape, the axes and the byte order. What isn't known
goes through zarr's own pipeline (`foreign.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penstock.cache.errors import DatasetError
from penstock.readers.formats.zarr.compressors import (
    Blosc,
    Lz4,
    Size,
    Zstd,
    bz2_codec,
    gzip_codec,
    lzma_codec,
    numcodecs_module,
    zlib_codec,
)
from penstock.readers.formats.zarr.filters import (
    AsType,
    Delta,
    FixedScaleOffset,
    Guest,
    PackBits,
    Shuffle,
    checksum_of,
)
from penstock.readers.formats.zarr.foreign import ForeignDecoder
from penstock.readers.formats.zarr.sharding import byte_order_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from penstock.readers.formats.zarr.compressors import Codec
    from penstock.readers.formats.zarr.metadata import ArrayMetadata
    from penstock.readers.formats.zarr.specs import CodecSpec
    from penstock.readers.types import Encoded


class Decoder(Protocol):
    """Makes one array's chunks from their bytes. Several threads may use it."""

    def decode(self, data: Encoded, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """A chunk's numbers, of the machine's byte order, in the shape of a whole chunk (of an
        inner one where there are shards; at the array's end some of it lies outside).

        data: uint8, one-dimensional, contiguous. out: contiguous in C's order, of the chunk's dtype
        and shape: it is filled and given back, which spares a copy. Without it the result may be a
        read-only view of data, and of any strides. Raises ValueError where the bytes are damaged.
        """


def decoder_of(metadata: ArrayMetadata) -> Decoder:
    """What decodes an array's chunks.

    Raises MissingDependencyError where a codec needs a package that isn't there, DatasetError where
    the codecs can't be.
    """
    try:
        chain = _v2(metadata) if metadata.version == 2 else _v3(metadata)
    except NotImplementedError:
        return ForeignDecoder(metadata)
    except (ValueError, TypeError, OverflowError) as error:
        raise DatasetError(
            f"{metadata.name or 'The array'}: its codecs can't be: {error}. Write it again."
        ) from None
    return chain


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Step:
    """codec: what to undo; size: of what comes out."""

    codec: Codec
    size: Size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """A row of steps from a chunk's bytes to its numbers.

    steps: in the order of decoding. size_bytes: of what they end in. stored, layout: its dtype and
    shape; axes: of that, in the order of the chunk's. is_plain: it is what is handed out.
    """

    steps: tuple[_Step, ...]
    size_bytes: int
    stored: np.dtype[Any]
    layout: tuple[int, ...]
    axes: tuple[int, ...]
    is_plain: bool

    @classmethod
    def of(
        cls,
        steps: tuple[_Step, ...],
        stored: np.dtype[Any],
        shape: tuple[int, ...],
        order: tuple[int, ...],
    ) -> Chain:
        """A chain for chunks of a shape. order: the chunk's axes in the order that they lie in."""
        layout = tuple(shape[axis] for axis in order)
        return cls(
            steps=steps,
            size_bytes=math.prod(layout) * stored.itemsize,
            stored=stored,
            layout=layout,
            axes=tuple(np.argsort(order).tolist()),
            is_plain=order == tuple(range(len(order))) and stored.isnative and stored.kind != "b",
        )

    def decode(self, data: Encoded, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """A chunk's numbers."""
        room = None
        if out is not None and self.is_plain and self.steps:
            room = out.reshape(-1).view(np.uint8)
        last = len(self.steps) - 1
        for number, step in enumerate(self.steps):
            data = step.codec.decode(data, step.size, room if number == last else None)
        if len(data) != self.size_bytes:
            raise ValueError(f"it holds {len(data):,} bytes, wanted {self.size_bytes:,}")
        if out is not None and data is room:
            return out
        flat = data if data.flags.aligned and data.flags.c_contiguous else data.copy()
        # Bytes other than 0 and 1 would make bools that are neither.
        typed = flat != 0 if self.stored.kind == "b" else flat.view(self.stored)
        found = typed.reshape(self.layout).transpose(self.axes)
        if out is None:
            native: NDArray[Any] = found.astype(self.stored.newbyteorder("="), copy=False)
            return native
        out[...] = found
        return out


def _v2(metadata: ArrayMetadata) -> Chain:
    shape, stored = metadata.chunk_shape, metadata.type.stored
    axes = tuple(range(len(shape)))
    builder = _Builder(stored, Size(math.prod(shape) * stored.itemsize, is_exact=True))
    for spec in metadata.codecs:
        builder.add(spec, is_v3=False)
    return Chain.of(builder.steps(), stored, shape, axes[::-1] if metadata.order == "F" else axes)


def _v3(metadata: ArrayMetadata) -> Chain:
    shape, stored = metadata.chunk_shape, metadata.type.stored
    axes = tuple(range(len(shape)))
    builder = _Builder(stored, Size(math.prod(shape) * stored.itemsize, is_exact=True))
    is_serialized = False
    for spec in metadata.codecs:
        if spec.name == "transpose" and not is_serialized:
            if builder.count:
                raise NotImplementedError  # a filter before it sees other neighbours
            order = _order(spec.configuration.get("order"), len(shape))
            axes = tuple(axes[axis] for axis in order)
        elif spec.name in ("bytes", "endian") and not is_serialized:
            is_serialized = True
            endian = byte_order_of(spec)
            if builder.count and not np.dtype(f"{endian}u2").isnative:
                raise NotImplementedError  # filters over numbers of the other byte order
            if not builder.count:
                stored = stored.newbyteorder(endian) if stored.itemsize > 1 else stored
        else:
            builder.add(spec, is_v3=True)
            if spec.plain_name not in _ARRAY_FILTERS and not is_serialized:
                raise NotImplementedError  # another way from numbers to bytes
    if not is_serialized:
        raise NotImplementedError
    return Chain.of(builder.steps(), stored, shape, axes)


class _Builder:
    """A chain in the order of writing, with the sizes that go along."""

    def __init__(self, dtype: np.dtype[Any], size: Size) -> None:
        self._dtype, self._size = dtype, size
        self._steps: list[_Step] = []

    @property
    def count(self) -> int:
        """Codecs so far."""
        return len(self._steps)

    def steps(self) -> tuple[_Step, ...]:
        """In the order of decoding."""
        return tuple(reversed(self._steps))

    def add(self, spec: CodecSpec, *, is_v3: bool) -> None:
        """The next codec. Raises NotImplementedError for one that isn't known."""
        if is_v3 and spec.name not in _V3_NAMES and not spec.is_numcodecs:
            raise NotImplementedError(spec.name)
        told, name = spec.configuration, spec.plain_name
        if name in ("bitround",):
            return  # what was rounded stays so
        codec = _plain(name) or self._configured(name, told, is_v3=is_v3)
        self._steps.append(_Step(codec=codec, size=self._size))
        self._size = self._encoded(name)

    def _configured(self, name: str, told: Mapping[str, Any], *, is_v3: bool) -> Codec:
        match name:
            case "lzma":
                return lzma_codec(told)
            case "shuffle":
                width = told.get("elementsize", self._dtype.itemsize if is_v3 else 4)
                width = self._dtype.itemsize if width is None else width
                if type(width) is not int or not 1 <= width <= 255:
                    raise ValueError(f"shuffle's elementsize is {width!r:.40}")
                return Shuffle(width)
            case "crc32c" | "crc32" | "adler32":
                place = told.get("location", "end" if name == "crc32c" else "start")
                if place not in ("start", "end"):
                    raise ValueError(f"{name}'s location is {place!r:.40}")
                return checksum_of(name, place)
            case "fletcher32" | "jenkins_lookup3":
                registry = numcodecs_module("registry", codec=name)
                return Guest(name, registry.get_codec({"id": name, **told}))
            case "packbits":
                return PackBits()
            case "delta":
                return Delta(*self._dtypes(told, "dtype", "astype"))
            case "quantize":
                return AsType(*self._dtypes(told, "dtype", "astype"))
            case "astype":
                return AsType(*self._dtypes(told, "decode_dtype", "encode_dtype"))
            case "fixedscaleoffset":
                offset, scale = told.get("offset"), told.get("scale")
                if not isinstance(offset, int | float) or not isinstance(scale, int | float):
                    raise ValueError(f"fixedscaleoffset says {offset!r:.40} and {scale!r:.40}")
                return FixedScaleOffset(offset, scale, *self._dtypes(told, "dtype", "astype"))
        raise NotImplementedError(name)

    def _dtypes(
        self, told: Mapping[str, Any], first: str, second: str
    ) -> tuple[np.dtype[Any], np.dtype[Any]]:
        before = _number(told.get(first), self._dtype)
        return before, _number(told.get(second), before)

    def _encoded(self, name: str) -> Size:
        """Bytes of what the codec makes of those that it is given."""
        size = self._size
        codec = self._steps[-1].codec
        if isinstance(codec, Delta | FixedScaleOffset | AsType):
            count, rest = divmod(size.bytes, codec.dtype.itemsize)
            if rest:
                raise ValueError(f"{name} says numbers of {codec.dtype}, {size.bytes:,} bytes")
            self._dtype = codec.astype
            return replace(size, bytes=count * codec.astype.itemsize)
        if isinstance(codec, PackBits):
            self._dtype = np.dtype(np.uint8)
            return replace(size, bytes=1 + -(-size.bytes // 8))
        if name in ("crc32c", "crc32", "adler32", "fletcher32", "jenkins_lookup3"):
            return replace(size, bytes=size.bytes + 4)
        if name == "shuffle":
            return size
        # Whatever can't be compressed grows by less than this.
        return Size(size.bytes + size.bytes // 8 + 4096, is_exact=False)


@cache
def _plain(name: str) -> Codec | None:
    """A compressor whose configuration says nothing that decoding asks for."""
    makers: Mapping[str, Any] = {
        "zstd": Zstd,
        "blosc": Blosc,
        "lz4": Lz4,
        "gzip": gzip_codec,
        "zlib": zlib_codec,
        "bz2": bz2_codec,
    }
    codec: Codec | None = makers[name]() if name in makers else None
    return codec


_V3_NAMES = {"zstd", "blosc", "gzip", "crc32c"}
_ARRAY_FILTERS = {"delta", "bitround", "fixedscaleoffset", "quantize", "packbits", "astype"}


def _number(told: object, default: np.dtype[Any]) -> np.dtype[Any]:
    if told is None:
        return default
    if not isinstance(told, str):
        raise ValueError(f"a filter's dtype is {told!r:.40}")
    dtype = np.dtype(told)
    if dtype.kind not in "biufcmM":
        raise ValueError(f"a filter's dtype is {told!r:.40}")
    # Times are the integers that count them.
    return np.dtype(f"{dtype.byteorder}i8") if dtype.kind in "mM" else dtype


def _order(told: object, count: int) -> tuple[int, ...]:
    is_order = isinstance(told, list) and all(type(axis) is int for axis in told)
    if not isinstance(told, list) or not is_order or sorted(told) != list(range(count)):
        raise ValueError(f"transpose's order is {told!r:.80}")
    return tuple(told)
