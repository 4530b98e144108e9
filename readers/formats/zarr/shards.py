"""Cutting the samples of a hierarchy into shards: contiguous, of about one size, between chunks.

A shard has all the chunks that its samples touch, those behind its borders too (windows overlap,
and arrays are cut in different places), so that it can be read by itself.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from crc32c import crc32c

from penstock.cache.errors import DatasetError
from penstock.readers.formats.chunked_shard import ChunkedShard, Extents
from penstock.readers.formats.grid import unit_rows
from penstock.readers.formats.parts import parts
from penstock.readers.formats.zarr.notes import fields_text, write_notes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.readers.formats.zarr.fields import ArrayField, ChosenFields
    from penstock.readers.formats.zarr.stored import StoredChunks
    from penstock.readers.origin.origin import Entry

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

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
        bounds = parts(sizes, target_bytes=part_bytes).tolist()
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
                (
                    places + len(files),
                    stored.starts[at],
                    stored.sizes[at],
                    np.full(len(at), number),
                )
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
