"""What an index notes of a shard of a hierarchy, beside where its chunks lie."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache.errors import CorruptShardError, DatasetError
from penstock.readers.formats.grid import ChunkGrid, Windows
from penstock.readers.formats.zarr.documents import Node
from penstock.readers.formats.zarr.metadata import ArrayMetadata, parse_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.formats.zarr.fields import ArrayField

    Ints = NDArray[np.int64]

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NotedField:
    """What is noted of a field, the same in all shards."""

    name: str
    array: ArrayMetadata
    windows: Windows

    @property
    def grid(self) -> ChunkGrid:
        """How the array is cut."""
        return ChunkGrid(shape=self.array.shape, chunk=self.array.chunk_shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardNotes:
    """What is noted of a shard. first: the number of its first sample in the dataset. chunks: of
    each field, the numbers of the chunks that extents hold, ascending, in the order of extents."""

    fields: tuple[NotedField, ...]
    first: int
    chunks: list[Ints]


def fields_text(fields: Sequence[ArrayField]) -> bytes:
    """What is noted of the fields, as JSON."""
    told = [
        {
            "name": field.name,
            "path": field.array.name,
            "version": field.array.version,
            "document": _essence(field.array),
            "window": field.windows.window,
            "stride": field.windows.stride,
            "is_step": field.windows.is_step,
            "repeat": field.windows.repeat,
        }
        for field in fields
    ]
    return json.dumps(told).encode()


def _essence(array: ArrayMetadata) -> dict[str, Any]:
    left_out = ("attributes", "consolidated_metadata")
    return {key: value for key, value in array.document.items() if key not in left_out}


def write_notes(fields: bytes, first: int, chunks: Sequence[Ints]) -> bytes:
    """The notes of a shard. fields: as `fields_text` has it."""
    numbers = [first, *map(len, chunks)]
    flat = np.concatenate([np.array(numbers, np.int64), *chunks]).astype("<i8")
    return len(fields).to_bytes(_LENGTH_BYTES, "little") + fields + flat.tobytes()


def read_notes(notes: bytes) -> ShardNotes:
    """What `write_notes` wrote. Raises CorruptShardError."""
    try:
        end = _LENGTH_BYTES + int.from_bytes(notes[:_LENGTH_BYTES], "little")
        fields = _fields(notes[_LENGTH_BYTES:end])
        flat = np.frombuffer(notes, "<i8", offset=end).astype(np.int64, copy=False)
        first, counts, rest = int(flat[0]), flat[1 : len(fields) + 1], flat[len(fields) + 1 :]
        if counts.min() < 0 or counts.sum() != len(rest) or first < 0:
            raise ValueError("its chunks aren't as many as it says")
        chunks = np.split(rest, np.cumsum(counts)[:-1])
        if any((np.diff(some) <= 0).any() for some in chunks):
            raise ValueError("its chunks aren't in order")
    except (ValueError, KeyError, IndexError, TypeError) as error:
        if isinstance(error, DatasetError):
            raise
        raise CorruptShardError(
            f"What the index notes of a shard is damaged ({error}). Run `penstock index` again."
        ) from error
    return ShardNotes(fields=fields, first=first, chunks=chunks)


@lru_cache(maxsize=16)
def _fields(text: bytes) -> tuple[NotedField, ...]:
    return tuple(map(_field, json.loads(text)))


def _field(told: dict[str, Any]) -> NotedField:
    node = Node(name=told["path"], kind="array", version=told["version"], document=told["document"])
    array = parse_array(node)
    if not isinstance(array, ArrayMetadata):
        raise array.error()
    windows = Windows(
        shape=array.shape,
        window=tuple(told["window"]),
        stride=tuple(told["stride"]),
        is_step=bool(told["is_step"]),
        repeat=int(told["repeat"]),
    )
    axes = zip(windows.shape, windows.window, windows.stride, strict=True)
    if windows.repeat < 1 or any(not 1 <= b <= a or c < 1 for a, b, c in axes):
        raise ValueError("its windows can't be")
    return NotedField(name=told["name"], array=array, windows=windows)
