"""Locate the chunks of arrays, cut samples into shards between chunks, and note the shards.

A chunk's name follows from the metadata, but neither its size nor its presence: one listing of the
array's folder gives those of a thousand chunks a request, and changes too. Of files that hold many
inner chunks the indexes are read.

Shards are contiguous and of about one size. A shard has all the chunks that its samples touch,
those behind its borders too (windows overlap, and arrays are cut in different places), so that it
can be read by itself.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

from penstock.cache import CorruptShardError, DatasetError
from penstock.readers.files import printable
from penstock.readers.formats.array_windows import ArrayWindows, ChunkGrid, unit_rows
from penstock.readers.formats.candidates import part_bounds
from penstock.readers.formats.extents import ChunkedShard, Extents
from penstock.readers.formats.zarr.zarr_metadata import ArrayMetadata, Node, parse_array

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.readers.formats.zarr.zarr_fields import ArrayField, ChosenFields
    from penstock.readers.formats.zarr.zarr_hierarchy import HierarchyFiles
    from penstock.readers.formats.zarr.zarr_metadata import Sharding
    from penstock.readers.origin import Entry

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

_BATCH_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredChunks:
    """The chunks of an array that are stored; the others are fill values.

    files: those that they lie in, in the order of their numbers. numbers: of the chunks in the
    array's grid, ascending; places: of their files among files; starts, sizes: bytes in those; all
    int64, shape (chunks,).
    """

    files: list[Entry]
    numbers: Ints
    places: Ints
    starts: Ints
    sizes: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrayFiles:
    """The files of an array that are there. numbers: in the grid of files, ascending, int64."""

    files: list[Entry]
    numbers: Ints


def list_files(store: HierarchyFiles, array: ArrayMetadata) -> ArrayFiles:
    """The files of an array, by one listing. Raises DatasetError, FetchError."""
    found = dict(_numbered(store, array))
    numbers = np.sort(np.fromiter(found, np.int64, len(found)))
    return ArrayFiles(files=[found[number] for number in numbers.tolist()], numbers=numbers)


def _numbered(store: HierarchyFiles, array: ArrayMetadata) -> Iterator[tuple[int, Entry]]:
    root = array.name.encode("utf-8", "surrogateescape")
    folder, keys = root, array.keys
    if keys.prefix and keys.separator == "/":
        folder = b"/".join(part for part in (root, keys.prefix.encode()) if part)
    rank, counts = len(array.shape), array.files
    number = rb"(0|[1-9]\d{0,18})"
    separator = re.escape(keys.separator.encode())
    parts = [re.escape(keys.prefix.encode())] if keys.prefix else []
    above = re.escape(root) + b"/" if root else b""
    pattern = re.compile(above + separator.join([*parts, *([number] * rank)]))
    depth = rank - 1 if keys.separator == "/" else 0
    for entry in store.walk(folder, depth):
        match = pattern.fullmatch(entry.name)
        if match is None:
            continue
        at = 0
        for place, count in zip(map(int, match.groups()), counts, strict=True):
            if place >= count:
                break
            at = at * count + place
        else:
            yield at, entry


def stored_chunks(store: HierarchyFiles, array: ArrayMetadata, found: ArrayFiles) -> StoredChunks:
    """Where the chunks of an array lie in its files; of shards their indexes are read, remote ones
    many at a time. Raises DatasetError, FetchError."""
    if array.sharding is None:
        return StoredChunks(
            files=found.files,
            numbers=found.numbers,
            places=np.arange(len(found.files)),
            starts=np.zeros(len(found.files), np.int64),
            sizes=np.array([entry.size_bytes for entry in found.files], np.int64),
        )
    reader = _ShardIndexes(store, array, array.sharding)
    parts = [part for some in reader.batches(found) for part in some]
    numbers, places, starts, sizes = (
        np.concatenate([np.empty(0, np.int64), *columns])
        for columns in (zip(*parts, strict=True) if parts else [()] * 4)
    )
    order = np.argsort(numbers, kind="stable")
    return StoredChunks(
        files=found.files,
        numbers=numbers[order],
        places=places[order],
        starts=starts[order],
        sizes=sizes[order],
    )


class _ShardIndexes:
    """Reads the indexes of an array's shards."""

    def __init__(self, store: HierarchyFiles, array: ArrayMetadata, sharding: Sharding) -> None:
        self._store, self._array, self._sharding = store, array, sharding
        counts = array.chunks
        self._strides = np.array(
            [math.prod(counts[axis + 1 :]) for axis in range(len(counts))], np.int64
        )
        self._limits = np.array(counts, np.int64)
        self._inner = np.indices(sharding.counts).reshape(len(counts), -1).T

    def batches(self, found: ArrayFiles) -> Iterator[list[tuple[Ints, Ints, Ints, Ints]]]:
        """Numbers, files, starts and sizes of the chunks of some files at a time."""
        step = max(1, _BATCH_BYTES // max(1, self._sharding.index_bytes))
        for first in range(0, len(found.files), step):
            yield self._batch(found, range(first, min(first + step, len(found.files))))

    def _batch(
        self, found: ArrayFiles, places: Sequence[int]
    ) -> list[tuple[Ints, Ints, Ints, Ints]]:
        entries = [found.files[place] for place in places]
        ranges = []
        for entry in entries:
            try:
                ranges.append((entry, *self._sharding.index_range(entry.size_bytes)))
            except ValueError as error:
                raise _damaged(entry, error) from None
        parts = []
        for place, entry, data in zip(places, entries, self._store.read(ranges), strict=True):
            try:
                index = self._sharding.parse_index(data, entry.size_bytes).reshape(-1, 2)
            except ValueError as error:
                raise _damaged(entry, error) from None
            parts.append(self._chunks(int(found.numbers[place]), place, index))
        return parts

    def _chunks(self, file: int, place: int, index: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        corner = np.array(np.unravel_index(file, self._array.files), np.int64)
        places = corner * np.array(self._sharding.counts, np.int64) + self._inner
        is_there = (index[:, 0] >= 0) & (places < self._limits).all(axis=1)
        numbers = (places[is_there] * self._strides).sum(axis=1)
        starts, sizes = index[is_there].T
        return numbers, np.full(len(numbers), place), starts, sizes


def _damaged(entry: Entry, why: ValueError) -> DatasetError:
    return DatasetError(f"{printable(entry.name)}: {why}. Write or fetch this shard again.")


_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NotedField:
    """What is noted of a field, the same in all shards."""

    name: str
    array: ArrayMetadata
    windows: ArrayWindows

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
    windows = ArrayWindows(
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


UNIT_BYTES = 64 * 2**20
"""What is decoded together isn't more, decoded, where chunks allow it."""

_LEAST_BYTES = 8
"""A sample counts as much at least, so that a shard of fill values hasn't too many."""

_MOST_ROWS = 2**20
"""Samples of a unit: a chunk of more small ones is several."""


def cut_shards(
    chosen: ChosenFields, stored: list[StoredChunks], *, part_bytes: int, url: str
) -> Iterator[ChunkedShard]:
    """The shards of a dataset, in order. stored: of each field. Raises DatasetError."""
    fields = chosen.fields
    try:
        units = _units(fields)
        ends = np.append(0, np.cumsum(units))
        told = sum(
            (
                _bytes_before(field, chunks, ends)
                for field, chunks in zip(fields, stored, strict=True)
            ),
            np.zeros(len(ends)),
        )
        sizes = np.maximum(np.diff(told), units * _LEAST_BYTES).astype(np.int64)
        cutter = _Cutter(chosen, stored)
        are_single = bool((units == 1).all())
        bounds = part_bounds(sizes, target_bytes=part_bytes).tolist()
        for low, high in pairwise(bounds):
            inside = () if are_single else units[low:high].tolist()
            yield cutter.shard(int(ends[low]), int(ends[high]), inside)
    except ValueError as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError(
            f"{url}: can't be cut into shards: {error}. Its chunks are too small for its size: "
            "write it with larger ones."
        ) from None


def _units(fields: list[ArrayField]) -> Ints:
    """Samples that are decoded together: by the chunks of the array whose are the largest."""
    lead = max(fields, key=lambda field: field.array.chunk_bytes)
    units = unit_rows(
        lead.windows, lead.grid, max_bytes=UNIT_BYTES, itemsize=lead.array.dtype.itemsize
    )
    if units.max(initial=0) <= _MOST_ROWS:
        return units
    pieces = -(-units // _MOST_ROWS)
    rest = units - (pieces - 1) * _MOST_ROWS
    found = np.full(int(pieces.sum()), _MOST_ROWS, np.int64)
    found[np.cumsum(pieces) - 1] = rest
    return found


def _bytes_before(field: ArrayField, stored: StoredChunks, samples: Ints) -> Floats:
    """Stored bytes of a field before each of some samples, about: along the first axis."""
    windows, grid = field.windows, field.grid
    rows = stored.numbers // math.prod(grid.counts[1:])
    sizes = np.bincount(rows, weights=stored.sizes, minlength=1) if len(rows) else np.zeros(1)
    borders = np.arange(len(sizes) + 1) * grid.chunk[0]
    inner = math.prod(windows.counts[1:]) * windows.repeat
    places = samples / inner * windows.stride[0]
    found: Floats = np.interp(places, borders, np.append(0, np.cumsum(sizes)))
    return found


class _Cutter:
    """Makes the shards of one dataset."""

    def __init__(self, chosen: ChosenFields, stored: list[StoredChunks]) -> None:
        self._fields, self._stored = chosen.fields, stored
        self._text = fields_text(chosen.fields)
        self._document = chosen.hierarchy.documents[0]

    def shard(self, first: int, end: int, units: tuple[int, ...] | list[int]) -> ChunkedShard:
        """The shard of samples [first, end)."""
        chunks: list[Ints] = []
        columns: list[tuple[Ints, Ints, Ints, Ints]] = []
        files: list[Entry] = []
        for number, (field, stored) in enumerate(zip(self._fields, self._stored, strict=True)):
            wanted, _ = field.grid.uses(field.windows, first, end)
            low, high = np.searchsorted(stored.numbers, (wanted[0], wanted[-1] + 1)).tolist()
            is_wanted = np.isin(stored.numbers[low:high], wanted, assume_unique=True)
            at = low + np.flatnonzero(is_wanted)
            used, places = np.unique(stored.places[at], return_inverse=True)
            columns.append(
                (places + len(files), stored.starts[at], stored.sizes[at], np.full(len(at), number))
            )
            chunks.append(stored.numbers[at])
            files += [stored.files[place] for place in used.tolist()]
        # A remote shard of fill values alone still is a blob of something.
        files = files or [self._document]
        numbers, starts, sizes, fields = (
            np.concatenate(column).astype(np.int64) for column in zip(*columns, strict=True)
        )
        notes = write_notes(self._text, first, chunks)
        checksum = crc32c(notes)
        for column in (numbers, starts, sizes, fields):
            checksum = crc32c(column.astype("<i8"), checksum)
        told = [[entry.name.hex(), entry.size_bytes, entry.version] for entry in files]
        return ChunkedShard(
            samples=end - first,
            files=files,
            extents=Extents(files=numbers, starts=starts, sizes=sizes, fields=fields),
            checksum=crc32c(json.dumps(told).encode(), checksum),
            units=units,
            notes=notes,
        )
