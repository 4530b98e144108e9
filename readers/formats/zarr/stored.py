"""Where the chunks of an array lie: its files by one listing, and the indexes of its shards.

A chunk's name follows from the metadata, but not its size, nor whether it is there: one listing of
the array's folder tells those of a thousand chunks a request, and changes too.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.errors import DatasetError
from penstock.readers.files.names import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.readers.formats.zarr.metadata import ArrayMetadata
    from penstock.readers.formats.zarr.sharding import Sharding
    from penstock.readers.formats.zarr.store import Store
    from penstock.readers.origin.origin import Entry

    Ints = NDArray[np.int64]

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


def list_files(store: Store, array: ArrayMetadata) -> ArrayFiles:
    """The files of an array, by one listing. Raises DatasetError, FetchError."""
    found = dict(_numbered(store, array))
    numbers = np.sort(np.fromiter(found, np.int64, len(found)))
    return ArrayFiles(files=[found[number] for number in numbers.tolist()], numbers=numbers)


def _numbered(store: Store, array: ArrayMetadata) -> Iterator[tuple[int, Entry]]:
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


def stored_chunks(store: Store, array: ArrayMetadata, found: ArrayFiles) -> StoredChunks:
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

    def __init__(self, store: Store, array: ArrayMetadata, sharding: Sharding) -> None:
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
