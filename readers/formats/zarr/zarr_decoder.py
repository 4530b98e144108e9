"""Decode a chunk's bytes to its numbers: the chain of a Zarr array's codecs, in reverse.

All codecs that are known work on flat bytes, so a chain is a row of steps, each of which knows
before how many bytes it makes; then come the shape, the axes and the byte order.

What isn't known goes through zarr's own pipeline: each thread has an array of zarr's that consists
of one chunk, over a dictionary in memory; a chunk's bytes are put there and the array is read. That
uses public names alone, but for the buffer.
"""

from __future__ import annotations

import json
import math
import threading
import warnings
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penstock.cache import DatasetError, MissingDependencyError
from penstock.cache.base import machine_remedy
from penstock.readers.formats.zarr.zarr_codecs import (
    AsType,
    Blosc,
    DecodedSize,
    Delta,
    FixedScaleOffset,
    Lz4,
    NumcodecsCodec,
    PackBits,
    Shuffle,
    Zstd,
    bz2_codec,
    checksum_of,
    gzip_codec,
    lzma_codec,
    numcodecs_module,
    zlib_codec,
)
from penstock.readers.formats.zarr.zarr_metadata import byte_order_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from penstock.readers.formats.zarr.zarr_codecs import Codec
    from penstock.readers.formats.zarr.zarr_metadata import ArrayMetadata, CodecSpec
    from penstock.readers.types import Encoded

_PACKAGES = {
    "pcodec": "pcodec",
    "zfpy": "zfpy",
    "jpeg2k": "imagecodecs",
    "virtual_tiff": "virtual-tiff",
}
"""Who registers a codec; imagecodecs' begin with its name."""


class ZarrPythonDecoder:
    """Decodes an array's chunks by zarr."""

    def __init__(self, metadata: ArrayMetadata) -> None:
        self._name, self._shape = metadata.name, metadata.chunk_shape
        self._dtype = metadata.dtype
        self._codecs = [codec.name for codec in metadata.codecs]
        self._files = _documents(metadata)
        key = metadata.keys.key([0] * len(self._shape))
        self._key = key
        self._own = threading.local()
        self._open()  # here, so that a codec that nobody has is told at once

    def decode(self, data: Encoded, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """A chunk's numbers."""
        if not hasattr(self._own, "array"):
            self._open()
        self._own.files[self._key] = _buffer(data)
        try:
            found = np.asarray(self._own.array[...])
        except Exception as error:  # any codec's, of anybody's
            if machine_remedy(error) is not None:
                raise
            raise ValueError(f"{type(error).__name__}: {error}") from error
        finally:
            del self._own.files[self._key]
        if found.shape != self._shape:
            raise ValueError(f"it has the shape {found.shape}, wanted {self._shape}")
        if found.dtype.kind in "mM":
            found = found.astype(found.dtype.newbyteorder("="), copy=False).view(np.int64)
        if out is None:
            return found.astype(self._dtype, copy=False)
        out[...] = found
        return out

    def _open(self) -> None:
        try:
            import zarr
            from zarr.storage import MemoryStore
        except ImportError:
            raise MissingDependencyError(
                f"{self._name or 'The array'}: its chunks are encoded by {self._codecs}, which "
                "zarr's own pipeline decodes, and zarr isn't installed: pip install "
                "'penstock[zarr]'."
            ) from None
        files: dict[str, Any] = {name: _buffer(data) for name, data in self._files.items()}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a codec isn't in the specification
                array = zarr.open_array(MemoryStore(files), mode="r")
        except Exception as error:
            if machine_remedy(error) is not None:
                raise
            raise MissingDependencyError(
                f"{self._name or 'The array'}: its chunks are encoded by {self._codecs}, and zarr "
                f"can't open that ({type(error).__name__}: {str(error)[:200]}). Install "
                f"{self._who()} beside 'penstock[zarr]'."
            ) from error
        self._own.files, self._own.array = files, array

    def _who(self) -> str:
        for name in self._codecs:
            plain = name.removeprefix("numcodecs.")
            if plain.startswith("imagecodecs"):
                return "imagecodecs"
            if plain in _PACKAGES:
                return _PACKAGES[plain]
        return "the package that registers it"


def _documents(metadata: ArrayMetadata) -> dict[str, bytes]:
    """The metadata of an array of one chunk."""
    shape = list(metadata.chunk_shape)
    document = {**metadata.document, "shape": shape}
    if metadata.version == 2:
        document |= {"chunks": shape, "fill_value": None}
        return {".zarray": json.dumps(document).encode()}
    document |= {
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape}},
        "codecs": [
            {"name": codec.name, "configuration": dict(codec.configuration)}
            for codec in metadata.codecs
        ],
        "attributes": {},
    }
    document.pop("dimension_names", None)
    return {"zarr.json": json.dumps(document).encode()}


def _buffer(data: Encoded | bytes) -> Any:
    from zarr.core.buffer import default_buffer_prototype

    buffer = default_buffer_prototype().buffer
    if isinstance(data, bytes):
        return buffer.from_bytes(data)
    return buffer.from_array_like(data)


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
        return ZarrPythonDecoder(metadata)
    except (ValueError, TypeError, OverflowError) as error:
        raise DatasetError(
            f"{metadata.name or 'The array'}: its codecs can't be: {error}. Write it again."
        ) from None
    return chain


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _CodecStep:
    """codec: what to undo; size: of what comes out."""

    codec: Codec
    size: DecodedSize


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CodecChain:
    """A row of steps from a chunk's bytes to its numbers.

    steps: in the order of decoding. size_bytes: of what they end in. stored, layout: its dtype and
    shape; axes: of that, in the order of the chunk's. is_plain: it is what is handed out.
    """

    steps: tuple[_CodecStep, ...]
    size_bytes: int
    stored: np.dtype[Any]
    layout: tuple[int, ...]
    axes: tuple[int, ...]
    is_plain: bool

    @classmethod
    def of(
        cls,
        steps: tuple[_CodecStep, ...],
        stored: np.dtype[Any],
        shape: tuple[int, ...],
        order: tuple[int, ...],
    ) -> CodecChain:
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


def _v2(metadata: ArrayMetadata) -> CodecChain:
    shape, stored = metadata.chunk_shape, metadata.type.stored
    axes = tuple(range(len(shape)))
    builder = _Builder(stored, DecodedSize(math.prod(shape) * stored.itemsize, is_exact=True))
    for spec in metadata.codecs:
        builder.add(spec, is_v3=False)
    return CodecChain.of(
        builder.steps(), stored, shape, axes[::-1] if metadata.order == "F" else axes
    )


def _v3(metadata: ArrayMetadata) -> CodecChain:
    shape, stored = metadata.chunk_shape, metadata.type.stored
    axes = tuple(range(len(shape)))
    builder = _Builder(stored, DecodedSize(math.prod(shape) * stored.itemsize, is_exact=True))
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
    return CodecChain.of(builder.steps(), stored, shape, axes)


class _Builder:
    """A chain in the order of writing, with the sizes that go along."""

    def __init__(self, dtype: np.dtype[Any], size: DecodedSize) -> None:
        self._dtype, self._size = dtype, size
        self._steps: list[_CodecStep] = []

    @property
    def count(self) -> int:
        """Codecs so far."""
        return len(self._steps)

    def steps(self) -> tuple[_CodecStep, ...]:
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
        self._steps.append(_CodecStep(codec=codec, size=self._size))
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
                return NumcodecsCodec(name, registry.get_codec({"id": name, **told}))
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

    def _encoded(self, name: str) -> DecodedSize:
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
        return DecodedSize(size.bytes + size.bytes // 8 + 4096, is_exact=False)


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
