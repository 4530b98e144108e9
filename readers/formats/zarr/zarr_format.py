"""Recognise Zarr hierarchies, cut them into shards, and record the shards.

Arrays are fields (`zarr_fields`), and samples are windows of them (`array_reader`). The name of a
chunk's file follows from the metadata, but its size and presence don't. One listing of the array's
folder gives them for a thousand chunks a request, and shows changes too. If files hold many inner
chunks, their indexes are read.

Shards are contiguous and of about equal size. A shard has all chunks that its samples touch,
including those behind its borders (windows overlap, and arrays are chunked differently), so it can
be read without its neighbours.
"""

from __future__ import annotations

import json
import math
import os
import re
from contextlib import suppress
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from crc32c import crc32c

from penstock.cache import MissingDependencyError
from penstock.readers.formats.array_reader import ArrayPart, ArrayPiece, ArrayReader
from penstock.readers.formats.array_windows import ArrayWindows, unit_rows
from penstock.readers.formats.candidates import PART_BYTES, part_bounds
from penstock.readers.formats.chunked import ChunkedDataset, ChunkFormat
from penstock.readers.formats.extents import ChunkedShard, Extents
from penstock.readers.formats.format import DatasetFiles
from penstock.readers.formats.unindexed_files import refusing
from penstock.readers.formats.zarr.zarr_codecs import decoder_of
from penstock.readers.formats.zarr.zarr_fields import (
    ROOTS,
    Hierarchy,
    WindowedArray,
    choose_fields,
    in_parallel,
)
from penstock.readers.formats.zarr.zarr_metadata import ArrayMetadata, Node, parse_array
from penstock.readers.types import Floats, Ints, accepted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.readers.formats.chunked import ChunkedShardFacts, ChunkReader
    from penstock.readers.origin import Entry, Origin


class ZarrFormat(ChunkFormat):
    """The format of a folder with a Zarr hierarchy of version 2 or 3."""

    name: ClassVar[str] = "zarr"
    sampling: ClassVar[tuple[str, ...]] = ("sample", "stride")
    is_encoded: ClassVar[bool] = True

    def recognises(self, origin: Origin) -> bool:
        """Return True if the folder has the metadata of a hierarchy's root."""
        return origin.selection is None and not ROOTS.isdisjoint(origin.names().files)

    def files(self, origin: Origin) -> DatasetFiles:
        """Read the documents, and list the files of the arrays that are fields."""
        hierarchy = Hierarchy(origin)
        schema, fields, left_out = choose_fields(origin, hierarchy)
        files = in_parallel(lambda field: _list_files(hierarchy, field.array), fields)
        entries = [entry for some in files for entry in some.values()]
        documents = sorted(hierarchy.documents, key=lambda entry: entry.name)
        found = hierarchy, schema, fields, left_out, files
        return DatasetFiles(entries=[*documents, *entries], found=found)

    def index(self, origin: Origin, files: DatasetFiles, *, workers: int) -> ChunkedDataset:
        """Return the shards, from the metadata and the indexes of Zarr shards."""
        hierarchy, schema, fields, left_out, listed = files.found
        for field in fields:  # invalid codecs raise DatasetError
            with suppress(MissingDependencyError):  # reading a field raises if its codec is missing
                decoder_of(field.array)
        pairs = zip(fields, listed, strict=True)
        stored = in_parallel(lambda pair: _stored_chunks(hierarchy, pair[0].array, pair[1]), pairs)
        shards = list(_cut_shards(fields, stored, files.entries[0]))
        return ChunkedDataset(schema=schema, shards=shards, left_out=left_out)

    def reader(self, shard: ChunkedShardFacts) -> ChunkReader:
        """Open a shard."""
        return ArrayReader(shard, [_read_notes(shard)])


# -- stored chunks

_BATCH_BYTES = 32 * 2**20
_REMEDY = "Write or fetch this shard again."


class StoredChunks(NamedTuple):
    """The stored chunks of an array; all others are fill values.

    files: sorted by number. table: int64, shape (4, chunks): the numbers of the chunks in the
    array's grid, ascending, the index of each one's file in `files`, its first byte, and its bytes.
    """

    files: list[Entry]
    table: Ints


def _list_files(hierarchy: Hierarchy, array: ArrayMetadata) -> dict[int, Entry]:
    """List the files of an array with one listing, by number in the grid of files, ascending.
    Raises DatasetError or FetchError."""
    folder, prefix, counts = os.fsencode(array.name), array.prefix, array.files.counts
    if array.separator == "/":
        folder = os.path.join(folder, os.fsencode(prefix)).rstrip(b"/")
    parts = [*([prefix] if prefix else []), *([r"(0|[1-9]\d{0,18})"] * len(counts))]
    name = re.escape(array.separator).join(parts)
    above = re.escape(os.fsencode(array.name)) + b"/" if array.name else b""
    pattern, found = re.compile(above + name.encode()), {}
    for entry in hierarchy.walk(folder):
        match = pattern.fullmatch(entry.name)
        place = () if match is None else tuple(map(int, match.groups()))
        if place and all(n < count for n, count in zip(place, counts, strict=True)):
            found[int(np.ravel_multi_index(place, counts))] = entry
    return dict(sorted(found.items()))


def _stored_chunks(
    hierarchy: Hierarchy, array: ArrayMetadata, listed: Mapping[int, Entry]
) -> StoredChunks:
    """Return the locations of an array's chunks. If its files are shards, their indexes are read,
    many at a time from a remote store.

    Raises DatasetError or FetchError.
    """
    files, layout, counts = list(listed.values()), array.sharding, array.grid.counts
    if layout is None:
        sizes = [entry.size_bytes for entry in files]
        table = np.array([list(listed), range(len(files)), [0] * len(files), sizes], np.int64)
        return StoredChunks(files, table)
    numbers, tables = list(listed), [np.empty((4, 0), np.int64)]
    inner = np.indices(layout.counts).reshape(len(layout.counts), -1)
    step = max(1, _BATCH_BYTES // layout.index_bytes)
    for first in range(0, len(files), step):
        ranges: list[tuple[Entry, int, int]] = []
        for entry in files[first : first + step]:
            with refusing(entry, remedy=_REMEDY):
                ranges.append((entry, *layout.index_range(entry.size_bytes)))
        for place, data in enumerate(hierarchy.read_parts(ranges), first):
            entry = files[place]
            with refusing(entry, remedy=_REMEDY):
                index = layout.parse_index(np.frombuffer(data, np.uint8), entry.size_bytes)
            corner = np.unravel_index(numbers[place], array.files.counts)
            chunks = (np.array(corner) * np.array(layout.counts))[:, None] + inner
            # Shards at the end of the array have chunks outside of it.
            is_inside = (chunks < np.array(counts)[:, None]).all(axis=0)
            is_stored = (index[:, 0] >= 0) & is_inside
            found = np.ravel_multi_index(tuple(chunks[:, is_stored]), counts)
            tables.append(np.vstack([found, np.full(len(found), place), index[is_stored].T]))
    table = np.concatenate(tables, axis=1)
    return StoredChunks(files, table[:, np.argsort(table[0], kind="stable")])


# -- notes

_LENGTH_BYTES = 8


def _encode_fields(fields: Sequence[WindowedArray]) -> bytes:
    """Encode the fields, which are the same in all shards, as JSON."""
    omitted = ("attributes", "consolidated_metadata")
    documents = [field.array.node.document.items() for field in fields]
    values = [
        {
            "name": field.name,
            "path": field.array.name,
            "version": field.array.node.version,
            "document": {key: value for key, value in document if key not in omitted},
            "window": field.windows.window,
            "stride": field.windows.stride,
            "is_step": field.windows.is_step,
            "repeat": field.windows.repeat,
        }
        for field, document in zip(fields, documents, strict=True)
    ]
    return json.dumps(values).encode()


def _write_notes(fields: bytes, first: int, chunks: Sequence[Ints]) -> bytes:
    """Encode the notes on a shard.

    fields: encoded. first: the number of its first sample in the dataset. chunks: for each field,
    the numbers of the chunks in its extents, ascending.
    """
    flat = np.concatenate([np.array([first, *map(len, chunks)], np.int64), *chunks]).astype("<i8")
    return len(fields).to_bytes(_LENGTH_BYTES, "little") + fields + flat.tobytes()


def _read_notes(shard: ChunkedShardFacts) -> ArrayPiece:
    """Decode notes that `_write_notes` encoded. Raises as `ChunkFormat.reader` does."""
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
    parts = {
        field.name: ArrayPart(
            windows=field.windows,
            grid=field.array.grid,
            numbers=numbers,
            fill=field.array.fill_value,
            dtype=field.array.dtype,
            open_decoder=partial(decoder_of, field.array),
        )
        for field, numbers in zip(fields, chunks, strict=True)
    }
    name = fields[0].array.name or fields[0].name
    return ArrayPiece(name=name, samples=shard.samples, first=first, parts=parts)


@lru_cache(maxsize=16)
def _parse_fields(encoded: bytes) -> tuple[WindowedArray, ...]:
    found = []
    for values in json.loads(encoded):
        path, version, document = (values[key] for key in ("path", "version", "document"))
        node = Node(name=path, kind="array", version=version, document=document)
        array = accepted(parse_array(node))
        more = (values[key] for key in ("window", "stride", "is_step", "repeat"))
        windows = ArrayWindows.parse(array.shape, *more)
        found.append(WindowedArray(name=values["name"], array=array, windows=windows))
    return tuple(found)


# -- shards

UNIT_BYTES = 64 * 2**20
"""The most bytes that are decoded together, if the chunks allow it."""

_MIN_SAMPLE_BYTES = 8
"""A sample counts as at least this many bytes, so that a shard of fill values hasn't too many
samples."""

_MAX_UNIT_ROWS = 2**20
"""The most samples of a unit. A chunk of more small samples is several units."""


def _cut_shards(
    fields: list[WindowedArray], stored: list[StoredChunks], document: Entry
) -> Iterator[ChunkedShard]:
    """Yield the shards of a dataset, in order.

    stored: chunks of each field. document: the file of a shard all of whose chunks are fill values,
    as the blob of a remote shard needs one. Raises ValueError if the chunks are too small.
    """
    units = _units(fields)
    ends = np.append(0, np.cumsum(units))
    pairs = zip(fields, stored, strict=True)
    before = sum(_bytes_before(field, chunks, ends) for field, chunks in pairs)
    sizes = np.maximum(np.diff(before), units * _MIN_SAMPLE_BYTES).astype(np.int64)
    encoded_fields, are_single = _encode_fields(fields), bool((units == 1).all())
    for low, high in pairwise(part_bounds(sizes, target_bytes=PART_BYTES).tolist()):
        of_shard = () if are_single else units[low:high].tolist()
        rows = range(int(ends[low]), int(ends[high]))
        yield _shard(fields, stored, document, encoded_fields, rows, of_shard)


def _units(fields: list[WindowedArray]) -> Ints:
    """Return the numbers of samples that are decoded together, by the array with the largest
    chunks."""
    sizes = [math.prod(own.array.grid.chunk) * own.array.dtype.itemsize for own in fields]
    lead = fields[sizes.index(max(sizes))]
    grid, itemsize = lead.array.grid, lead.array.dtype.itemsize
    units = unit_rows(lead.windows, grid, max_bytes=UNIT_BYTES, itemsize=itemsize)
    if units.max(initial=0) <= _MAX_UNIT_ROWS:
        return units
    pieces = -(-units // _MAX_UNIT_ROWS)
    cut = np.full(int(pieces.sum()), _MAX_UNIT_ROWS, np.int64)
    cut[np.cumsum(pieces) - 1] = units - (pieces - 1) * _MAX_UNIT_ROWS
    return cut


def _bytes_before(field: WindowedArray, stored: StoredChunks, samples: Ints) -> Floats:
    """Estimate how many stored bytes of a field precede each sample along the first axis."""
    windows, grid = field.windows, field.array.grid
    numbers, _, _, of_chunks = stored.table
    rows = numbers // math.prod(grid.counts[1:])
    sizes = np.bincount(rows, weights=of_chunks, minlength=1)
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
    extents: list[Ints] = []
    files: list[Entry] = []
    for number, (field, of_field) in enumerate(zip(fields, stored, strict=True)):
        needed, _ = field.array.grid.uses(field.windows, rows.start, rows.stop)
        numbers = of_field.table[0]
        low, high = np.searchsorted(numbers, (needed[0], needed[-1] + 1)).tolist()
        is_needed = np.isin(numbers[low:high], needed, assume_unique=True)
        numbers, places, starts, sizes = of_field.table[:, low:high][:, is_needed]
        used, places = np.unique(places, return_inverse=True)
        extents.append(np.array([places + len(files), starts, sizes, np.full(len(starts), number)]))
        chunks.append(numbers)
        files += [of_field.files[place] for place in used.tolist()]
    files = files or [document]
    notes, table = _write_notes(encoded_fields, rows.start, chunks), np.concatenate(extents, axis=1)
    # Part of the index format: the columns, then the files.
    identity = [[entry.name.hex(), entry.size_bytes, entry.version] for entry in files]
    checksum = crc32c(table.astype("<i8").tobytes(), crc32c(notes))
    return ChunkedShard(
        samples=len(rows),
        files=files,
        extents=Extents(files=table[0], starts=table[1], sizes=table[2], fields=table[3]),
        checksum=crc32c(json.dumps(identity).encode(), checksum),
        units=units,
        note=notes,
    )


FORMAT = ZarrFormat()
