"""Locate the chunks of arrays, cut samples into shards between chunks, and record the shards.

The name of a chunk's file follows from the metadata, but its size and presence don't. One listing
of the array's folder gives them for a thousand chunks a request, and shows changes too. If files
hold many inner chunks, their indexes are read.

Shards are contiguous and of about equal size. A shard has all chunks that its samples touch,
including those behind its borders (windows overlap, and arrays are chunked differently), so it can
be read without its neighbours.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

from penstock.cache import DatasetError, PenstockError
from penstock.readers.files import printable
from penstock.readers.formats.array_reader import ArrayPart, ArrayPiece
from penstock.readers.formats.array_windows import ArrayWindows, unit_rows
from penstock.readers.formats.candidates import part_bounds
from penstock.readers.formats.extents import ChunkedShard, Extents
from penstock.readers.formats.zarr.zarr_codecs import decoder_of
from penstock.readers.formats.zarr.zarr_fields import WindowedArray
from penstock.readers.formats.zarr.zarr_hierarchy import encoded_path
from penstock.readers.formats.zarr.zarr_metadata import ArrayMetadata, Node, parse_array

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.formats.chunked import ChunkedShardFacts
    from penstock.readers.formats.zarr.zarr_hierarchy import Hierarchy
    from penstock.readers.formats.zarr.zarr_metadata import Sharding
    from penstock.readers.origin import Entry

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

_BATCH_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredChunks:
    """The stored chunks of an array; all others are fill values.

    files: sorted by number. numbers: of the chunks in the array's grid, ascending. places: the
    index of each chunk's file in `files`. starts, sizes: bytes in the file. The arrays are int64,
    shape (chunks,).
    """

    files: list[Entry]
    numbers: Ints
    places: Ints
    starts: Ints
    sizes: Ints


def list_files(hierarchy: Hierarchy, array: ArrayMetadata) -> dict[int, Entry]:
    """List the files of an array with one listing, by number in the grid of files, ascending.
    Raises DatasetError or FetchError."""
    folder, prefix, separator = encoded_path(array.name), array.keys.prefix, array.keys.separator
    depth = 0
    if separator == "/":
        depth = len(array.shape) - 1
        folder = os.path.join(folder, encoded_path(prefix)).rstrip(b"/")
    parts = [*([prefix] if prefix else []), *([r"(0|[1-9]\d{0,18})"] * len(array.shape))]
    name = re.escape(separator).join(parts)
    above = re.escape(encoded_path(array.name)) + b"/" if array.name else b""
    pattern, found = re.compile(above + name.encode()), {}
    for entry in hierarchy.walk(folder, depth):
        match = pattern.fullmatch(entry.name)
        place = () if match is None else tuple(map(int, match.groups()))
        if place and all(n < count for n, count in zip(place, array.files, strict=True)):
            found[int(np.ravel_multi_index(place, array.files))] = entry
    return dict(sorted(found.items()))


def stored_chunks(
    hierarchy: Hierarchy, array: ArrayMetadata, listed: Mapping[int, Entry]
) -> StoredChunks:
    """Return the locations of an array's chunks. If its files are shards, their indexes are read,
    many at a time from a remote store.

    Raises DatasetError or FetchError.
    """
    files = list(listed.values())
    if array.sharding is None:
        columns = np.array(
            [(number, place, 0, files[place].size_bytes) for place, number in enumerate(listed)],
            np.int64,
        ).reshape(-1, 4)
    else:
        parts = list(_indexed_chunks(hierarchy, array, array.sharding, listed))
        columns = np.concatenate([np.empty((0, 4), np.int64), *parts])
        columns = columns[np.argsort(columns[:, 0], kind="stable")]
    numbers, places, starts, sizes = columns.T
    return StoredChunks(files=files, numbers=numbers, places=places, starts=starts, sizes=sizes)


def _indexed_chunks(
    hierarchy: Hierarchy, array: ArrayMetadata, sharding: Sharding, listed: Mapping[int, Entry]
) -> Iterator[Ints]:
    """Read the indexes of an array's shards; yield the numbers, files, starts and sizes of the
    chunks of each shard, int64, shape (chunks, 4)."""
    inner = np.indices(sharding.counts).reshape(len(sharding.counts), -1).T
    step = max(1, _BATCH_BYTES // max(1, sharding.index_bytes))
    files = [*enumerate(listed.items())]
    for first in range(0, len(files), step):
        some = files[first : first + step]
        try:
            ranges = []
            for _, (_, entry) in some:
                ranges.append((entry, *sharding.index_range(entry.size_bytes)))
            for (place, (number, entry)), data in zip(
                some, hierarchy.read_parts(ranges), strict=True
            ):
                index = sharding.parse_index(np.frombuffer(data, np.uint8), entry.size_bytes)
                index = index.reshape(-1, 2)
                corner = np.array(np.unravel_index(number, array.files), np.int64)
                chunks = corner * np.array(sharding.counts, np.int64) + inner
                # Shards at the end of the array have chunks outside of it.
                counts = array.grid.counts
                is_stored = (index[:, 0] >= 0) & (chunks < np.array(counts)).all(axis=1)
                numbers = np.ravel_multi_index(tuple(chunks[is_stored].T), counts)
                places = np.full(len(numbers), place)
                yield np.column_stack([numbers, places, index[is_stored]])
        except ValueError as error:
            if isinstance(error, PenstockError):
                raise
            raise DatasetError(
                f"{printable(entry.name)}: {error}. Write or fetch this shard again."
            ) from None


_LENGTH_BYTES = 8


def _encode_fields(fields: Sequence[WindowedArray]) -> bytes:
    """Encode the fields, which are the same in all shards, as JSON."""
    values = [
        {
            "name": field.name,
            "path": field.array.name,
            "version": field.array.version,
            "document": {
                key: value
                for key, value in field.array.document.items()
                if key not in ("attributes", "consolidated_metadata")
            },
            "window": field.windows.window,
            "stride": field.windows.stride,
            "is_step": field.windows.is_step,
            "repeat": field.windows.repeat,
        }
        for field in fields
    ]
    return json.dumps(values).encode()


def write_notes(fields: bytes, first: int, chunks: Sequence[Ints]) -> bytes:
    """Encode the notes on a shard.

    fields: encoded. first: the number of its first sample in the dataset. chunks: for each field,
    the numbers of the chunks in its extents, ascending.
    """
    numbers = [first, *map(len, chunks)]
    flat = np.concatenate([np.array(numbers, np.int64), *chunks]).astype("<i8")
    return len(fields).to_bytes(_LENGTH_BYTES, "little") + fields + flat.tobytes()


def read_notes(shard: ChunkedShardFacts) -> ArrayPiece:
    """Decode notes that `write_notes` encoded. Raises as `ChunkFormat.reader` does."""
    notes = shard.notes
    end = _LENGTH_BYTES + int.from_bytes(notes[:_LENGTH_BYTES], "little")
    fields = _parse_fields(notes[_LENGTH_BYTES:end])
    flat = np.frombuffer(notes, "<i8", offset=end).astype(np.int64, copy=False)
    first, counts, rest = int(flat[0]), flat[1 : len(fields) + 1], flat[len(fields) + 1 :]
    if counts.min() < 0 or counts.sum() != len(rest) or first < 0:
        raise ValueError("it lists another number of chunks than it states")
    chunks = np.split(rest, np.cumsum(counts)[:-1])
    if any((np.diff(numbers) <= 0).any() for numbers in chunks):
        raise ValueError("its chunks aren't sorted")
    return ArrayPiece(
        name=fields[0].array.name or fields[0].name,
        samples=shard.samples,
        first=first,
        parts={
            field.name: ArrayPart(
                windows=field.windows,
                grid=field.array.grid,
                numbers=numbers,
                fill=field.array.fill_value,
                dtype=field.array.dtype,
                open_decoder=partial(decoder_of, field.array),
            )
            for field, numbers in zip(fields, chunks, strict=True)
        },
    )


@lru_cache(maxsize=16)
def _parse_fields(encoded: bytes) -> tuple[WindowedArray, ...]:
    return tuple(map(_parse_field, json.loads(encoded)))


def _parse_field(values: dict[str, Any]) -> WindowedArray:
    node = Node(
        name=values["path"], kind="array", version=values["version"], document=values["document"]
    )
    array = parse_array(node)
    if not isinstance(array, ArrayMetadata):
        raise array.error()
    windows = ArrayWindows.parse(
        array.shape, values["window"], values["stride"], values["is_step"], values["repeat"]
    )
    return WindowedArray(name=values["name"], array=array, windows=windows)


UNIT_BYTES = 64 * 2**20
"""The most bytes that are decoded together, if the chunks allow it."""

_MIN_SAMPLE_BYTES = 8
"""A sample counts as at least this many bytes, so that a shard of fill values hasn't too many
samples."""

_MAX_UNIT_ROWS = 2**20
"""The most samples of a unit. A chunk of more small samples is several units."""


def cut_shards(
    fields: list[WindowedArray],
    stored: list[StoredChunks],
    document: Entry,
    *,
    part_bytes: int,
    url: str,
) -> Iterator[ChunkedShard]:
    """Yield the shards of a dataset, in order.

    stored: chunks of each field. document: the file of a shard all of whose chunks are fill values,
    as the blob of a remote shard needs one. Raises DatasetError.
    """
    try:
        units = _units(fields)
        ends = np.append(0, np.cumsum(units))
        before = np.zeros(len(ends))
        for field, chunks in zip(fields, stored, strict=True):
            before += _bytes_before(field, chunks, ends)
        sizes = np.maximum(np.diff(before), units * _MIN_SAMPLE_BYTES).astype(np.int64)
        encoded_fields = _encode_fields(fields)
        are_single = bool((units == 1).all())
        for low, high in pairwise(part_bounds(sizes, target_bytes=part_bytes).tolist()):
            of_shard = () if are_single else units[low:high].tolist()
            rows = range(int(ends[low]), int(ends[high]))
            yield _shard(fields, stored, document, encoded_fields, rows, of_shard)
    except ValueError as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError(
            f"{url}: the hierarchy can't be cut into shards: {error}. Its chunks are too small for "
            "its size: write it with larger ones."
        ) from None


def _units(fields: list[WindowedArray]) -> Ints:
    """Return the numbers of samples that are decoded together, by the array with the largest
    chunks."""
    lead = max(fields, key=lambda field: field.array.chunk_bytes)
    units = unit_rows(
        lead.windows, lead.array.grid, max_bytes=UNIT_BYTES, itemsize=lead.array.dtype.itemsize
    )
    if units.max(initial=0) <= _MAX_UNIT_ROWS:
        return units
    pieces = -(-units // _MAX_UNIT_ROWS)
    cut = np.full(int(pieces.sum()), _MAX_UNIT_ROWS, np.int64)
    cut[np.cumsum(pieces) - 1] = units - (pieces - 1) * _MAX_UNIT_ROWS
    return cut


def _bytes_before(field: WindowedArray, stored: StoredChunks, samples: Ints) -> Floats:
    """Estimate how many stored bytes of a field precede each sample along the first axis."""
    windows, grid = field.windows, field.array.grid
    rows = stored.numbers // math.prod(grid.counts[1:])
    sizes = np.bincount(rows, weights=stored.sizes, minlength=1) if len(rows) else np.zeros(1)
    borders = np.arange(len(sizes) + 1) * grid.chunk[0]
    inner = math.prod(windows.counts[1:]) * windows.repeat
    places = samples / inner * windows.stride[0]
    before: Floats = np.interp(places, borders, np.append(0, np.cumsum(sizes)))
    return before


def _shard(
    fields: list[WindowedArray],
    stored: list[StoredChunks],
    document: Entry,
    encoded_fields: bytes,
    rows: range,
    units: Sequence[int],
) -> ChunkedShard:
    """Make the shard of some samples of the dataset."""
    chunks: list[Ints] = []
    columns: list[tuple[Ints, Ints, Ints, Ints]] = []
    files: list[Entry] = []
    for number, (field, of_field) in enumerate(zip(fields, stored, strict=True)):
        needed, _ = field.array.grid.uses(field.windows, rows.start, rows.stop)
        low, high = np.searchsorted(of_field.numbers, (needed[0], needed[-1] + 1)).tolist()
        is_needed = np.isin(of_field.numbers[low:high], needed, assume_unique=True)
        at = low + np.flatnonzero(is_needed)
        used, places = np.unique(of_field.places[at], return_inverse=True)
        columns.append(
            (places + len(files), of_field.starts[at], of_field.sizes[at], np.full(len(at), number))
        )
        chunks.append(of_field.numbers[at])
        files += [of_field.files[place] for place in used.tolist()]
    files = files or [document]
    table = [np.concatenate(column).astype(np.int64) for column in zip(*columns, strict=True)]
    notes = write_notes(encoded_fields, rows.start, chunks)
    checksum = crc32c(notes)
    for column in table:
        checksum = crc32c(column.astype("<i8"), checksum)
    identity = [[entry.name.hex(), entry.size_bytes, entry.version] for entry in files]
    return ChunkedShard(
        samples=len(rows),
        files=files,
        extents=Extents(files=table[0], starts=table[1], sizes=table[2], fields=table[3]),
        checksum=crc32c(json.dumps(identity).encode(), checksum),
        units=units,
        note=notes,
    )
