"""Decode a chunk's bytes to its numbers: run the codec chain of a Zarr array in reverse.

All codecs that are implemented here work on flat bytes. A chain is therefore a sequence of steps
whose output sizes are known in advance, followed by the shape, the order of axes and the byte
order.

Chunks of other codecs are decoded by zarr's own pipeline: each thread has a zarr array that
consists of one chunk, over a dictionary in memory. The decoder puts the bytes of a chunk into the
dictionary and reads the array. This uses public names alone, except for the buffer.
"""

from __future__ import annotations

import json
import math
import threading
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penstock.cache import DatasetError, MissingDependencyError
from penstock.cache.base import machine_remedy
from penstock.readers.formats.zarr.zarr_codecs import (
    AsType,
    Checksum,
    DecodedSize,
    Delta,
    FixedScaleOffset,
    NumcodecsCodec,
    PackBits,
    Shuffle,
    compressor,
    lzma_codec,
    numcodecs_module,
)
from penstock.readers.formats.zarr.zarr_metadata import NUMCODECS, byte_order_of

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
"""The packages that register codecs. Names of imagecodecs' codecs begin with "imagecodecs"."""


class ZarrPythonDecoder:
    """Decodes the chunks of an array through zarr."""

    def __init__(self, metadata: ArrayMetadata) -> None:
        self._name, self._shape = metadata.name, metadata.chunk_shape
        self._dtype = metadata.dtype
        self._codecs = [codec.name for codec in metadata.codecs]
        self._files = _documents(metadata)
        self._key = metadata.keys.key([0] * len(self._shape))
        self._own = threading.local()
        self._open()  # so that a missing codec raises now and not at the first chunk

    def decode(self, data: Encoded, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Decode a chunk; see `Decoder`."""
        if not hasattr(self._own, "array"):
            self._open()
        self._own.files[self._key] = _buffer(data)
        try:
            chunk = np.asarray(self._own.array[...])
        except Exception as error:  # any error of any package's codec
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
        try:
            import zarr
            from zarr.storage import MemoryStore
        except ImportError:
            raise MissingDependencyError(
                f"{self._name or 'The array'}: its chunks are encoded by {self._codecs}, which "
                "zarr decodes, and zarr isn't installed: pip install 'penstock[zarr]'."
            ) from None
        files: dict[str, Any] = {name: _buffer(data) for name, data in self._files.items()}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about codecs outside of the specification
                array = zarr.open_array(MemoryStore(files), mode="r")
        except Exception as error:
            if machine_remedy(error) is not None:
                raise
            raise MissingDependencyError(
                f"{self._name or 'The array'}: its chunks are encoded by {self._codecs}, and zarr "
                f"can't open them ({type(error).__name__}: {str(error)[:200]}). Install "
                f"'penstock[zarr]' and {self._package()}."
            ) from error
        self._own.files, self._own.array = files, array

    def _package(self) -> str:
        for name in self._codecs:
            plain = name.removeprefix(NUMCODECS)
            if plain.startswith("imagecodecs"):
                return "imagecodecs"
            if plain in _PACKAGES:
                return _PACKAGES[plain]
        return "the package that registers the codec"


def _documents(metadata: ArrayMetadata) -> dict[str, bytes]:
    """Return the metadata files of an array that consists of one chunk."""
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
    """Decodes the chunks of one array. Several threads may use it."""

    def decode(self, data: Encoded, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Decode a chunk to numbers in the machine's byte order, in the shape of a whole chunk or
        inner chunk. At the end of an array, a part of the chunk is outside of the array.

        data: uint8, one-dimensional, contiguous. out: C-contiguous, of the chunk's dtype and shape;
        if it is given, it is filled and returned, which saves a copy. Otherwise, the result may be
        a read-only view of data, with any strides. Raises ValueError if the bytes are damaged.
        """


def decoder_of(metadata: ArrayMetadata) -> Decoder:
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _CodecStep:
    """A codec, and the size of its decoded output."""

    codec: Codec
    size: DecodedSize


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CodecChain:
    """The steps from a chunk's bytes to its numbers.

    steps: in the order of decoding. size_bytes: of the last step's output. stored, layout: dtype
    and shape of that output. axes: its axes in the order of the chunk's. is_plain: the output has
    the delivered dtype and shape already.
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
        """Make a chain for chunks of a shape. order: the chunk's axes in the order in which they
        are stored."""
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
        """Decode a chunk; see `Decoder`."""
        buffer = None
        if out is not None and self.is_plain and self.steps:
            buffer = out.reshape(-1).view(np.uint8)
        last = len(self.steps) - 1
        for number, step in enumerate(self.steps):
            data = step.codec.decode(data, step.size, buffer if number == last else None)
        if len(data) != self.size_bytes:
            raise ValueError(f"it decodes to {len(data):,} bytes, expected {self.size_bytes:,}")
        if out is not None and data is buffer:
            return out
        flat = data if data.flags.aligned and data.flags.c_contiguous else data.copy()
        # Compare bools with 0: a view of bytes other than 0 and 1 would make invalid bools.
        typed = flat != 0 if self.stored.kind == "b" else flat.view(self.stored)
        chunk = typed.reshape(self.layout).transpose(self.axes)
        if out is None:
            native: NDArray[Any] = chunk.astype(self.stored.newbyteorder("="), copy=False)
            return native
        out[...] = chunk
        return out


def _v2_chain(metadata: ArrayMetadata) -> CodecChain:
    shape, stored = metadata.chunk_shape, metadata.type.stored
    axes = tuple(range(len(shape)))
    builder = _Builder(stored, DecodedSize(math.prod(shape) * stored.itemsize, is_exact=True))
    for spec in metadata.codecs:
        builder.add(spec, is_v3=False)
    return CodecChain.of(
        builder.steps(), stored, shape, axes[::-1] if metadata.order == "F" else axes
    )


def _v3_chain(metadata: ArrayMetadata) -> CodecChain:
    shape, stored = metadata.chunk_shape, metadata.type.stored
    axes = tuple(range(len(shape)))
    builder = _Builder(stored, DecodedSize(math.prod(shape) * stored.itemsize, is_exact=True))
    is_serialized = False
    for spec in metadata.codecs:
        if spec.name == "transpose" and not is_serialized:
            if builder.count:
                raise NotImplementedError  # a filter before it sees the numbers in another order
            order: Any = spec.configuration.get("order")
            is_order = isinstance(order, list) and all(type(axis) is int for axis in order)
            if not is_order or sorted(order) != list(range(len(shape))):
                raise ValueError(f"the order of transpose is {order!r:.80}")
            axes = tuple(axes[axis] for axis in order)
        elif spec.name in ("bytes", "endian") and not is_serialized:
            is_serialized = True
            endian = byte_order_of(spec)
            if builder.count and not np.dtype(f"{endian}u2").isnative:
                raise NotImplementedError  # filters on numbers of the other byte order
            if not builder.count:
                stored = stored.newbyteorder(endian) if stored.itemsize > 1 else stored
        else:
            builder.add(spec, is_v3=True)
            if spec.plain_name not in _ARRAY_FILTERS and not is_serialized:
                raise NotImplementedError  # another serializer than `bytes`
    if not is_serialized:
        raise NotImplementedError
    return CodecChain.of(builder.steps(), stored, shape, axes)


class _Builder:
    """Collects a chain in the order of encoding, and computes the size of each codec's input."""

    def __init__(self, dtype: np.dtype[Any], size: DecodedSize) -> None:
        self._dtype, self._size = dtype, size
        self._steps: list[_CodecStep] = []

    @property
    def count(self) -> int:
        """The number of codecs so far."""
        return len(self._steps)

    def steps(self) -> tuple[_CodecStep, ...]:
        """Return the steps in the order of decoding."""
        return tuple(reversed(self._steps))

    def add(self, spec: CodecSpec, *, is_v3: bool) -> None:
        """Add the next codec. Raises NotImplementedError if it isn't implemented here."""
        if is_v3 and spec.name not in _V3_NAMES and not spec.name.startswith(NUMCODECS):
            raise NotImplementedError(spec.name)
        name = spec.plain_name
        if name == "bitround":
            return  # the rounding can't be undone
        codec = compressor(name) or self._configured(name, spec.configuration, is_v3=is_v3)
        self._steps.append(_CodecStep(codec=codec, size=self._size))
        self._size = self._encoded(name)

    def _configured(self, name: str, options: Mapping[str, Any], *, is_v3: bool) -> Codec:
        match name:
            case "lzma":
                return lzma_codec(options)
            case "shuffle":
                width = options.get("elementsize", self._dtype.itemsize if is_v3 else 4)
                width = self._dtype.itemsize if width is None else width
                if type(width) is not int or not 1 <= width <= 255:
                    raise ValueError(f"the elementsize of shuffle is {width!r:.40}")
                return Shuffle(width)
            case "crc32c" | "crc32" | "adler32":
                place = options.get("location", "end" if name == "crc32c" else "start")
                if place not in ("start", "end"):
                    raise ValueError(f"the location of {name} is {place!r:.40}")
                return Checksum(name, place)
            case "fletcher32" | "jenkins_lookup3":
                registry = numcodecs_module("registry", codec=name)
                return NumcodecsCodec(name, registry.get_codec({"id": name, **options}))
            case "packbits":
                return PackBits()
            case "delta":
                return Delta(*self._dtypes(options, "dtype", "astype"))
            case "quantize":
                return AsType(*self._dtypes(options, "dtype", "astype"))
            case "astype":
                return AsType(*self._dtypes(options, "decode_dtype", "encode_dtype"))
            case "fixedscaleoffset":
                offset, scale = options.get("offset"), options.get("scale")
                if not isinstance(offset, int | float) or not isinstance(scale, int | float):
                    raise ValueError(
                        f"fixedscaleoffset has offset {offset!r:.40} and scale {scale!r:.40}"
                    )
                return FixedScaleOffset(offset, scale, *self._dtypes(options, "dtype", "astype"))
        raise NotImplementedError(name)

    def _dtypes(
        self, options: Mapping[str, Any], first: str, second: str
    ) -> tuple[np.dtype[Any], np.dtype[Any]]:
        decoded = _filter_dtype(options.get(first), self._dtype)
        return decoded, _filter_dtype(options.get(second), decoded)

    def _encoded(self, name: str) -> DecodedSize:
        """Return the size of the last codec's encoded output."""
        size = self._size
        codec = self._steps[-1].codec
        if isinstance(codec, Delta | FixedScaleOffset | AsType):
            count, rest = divmod(size.bytes, codec.dtype.itemsize)
            if rest:
                raise ValueError(
                    f"{name} has numbers of {codec.dtype}, which don't fill {size.bytes:,} bytes"
                )
            self._dtype = codec.astype
            return replace(size, bytes=count * codec.astype.itemsize)
        if isinstance(codec, PackBits):
            self._dtype = np.dtype(np.uint8)
            return replace(size, bytes=1 + -(-size.bytes // 8))
        if name in ("crc32c", "crc32", "adler32", "fletcher32", "jenkins_lookup3"):
            return replace(size, bytes=size.bytes + 4)
        if name == "shuffle":
            return size
        # Incompressible bytes grow by less than this.
        return DecodedSize(size.bytes + size.bytes // 8 + 4096, is_exact=False)


_V3_NAMES = {"zstd", "blosc", "gzip", "crc32c"}
_ARRAY_FILTERS = {"delta", "bitround", "fixedscaleoffset", "quantize", "packbits", "astype"}


def _filter_dtype(value: object, default: np.dtype[Any]) -> np.dtype[Any]:
    if value is None:
        return default
    dtype = np.dtype(value) if isinstance(value, str) else None
    if dtype is None or dtype.kind not in "biufcmM":
        raise ValueError(f"the dtype of a filter is {value!r:.40}")
    # Dates and durations are stored as integers.
    return np.dtype(f"{dtype.byteorder}i8") if dtype.kind in "mM" else dtype
