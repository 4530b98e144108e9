"""Chunks whose codecs are none of ours: through zarr's own pipeline.

Each thread has an array of zarr's that consists of one chunk, over a dictionary in memory: a
chunk's bytes are put there and the array is read. Public names alone, but for the buffer.
"""

from __future__ import annotations

import json
import threading
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache.base.machine import machine_remedy
from penstock.cache.errors import MissingDependencyError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.readers.formats.zarr.metadata import ArrayMetadata
    from penstock.readers.types import Encoded

_PACKAGES = {
    "pcodec": "pcodec",
    "zfpy": "zfpy",
    "jpeg2k": "imagecodecs",
    "virtual_tiff": "virtual-tiff",
}
"""Who registers a codec; imagecodecs' begin with its name."""


class ForeignDecoder:
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
