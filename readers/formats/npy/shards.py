"""Cutting arrays into shards: contiguous parts of large files, and several small files together.

A shard has all the rows that its windows need, those behind its last sample's first row too, so
that it can be read by itself.
"""

from __future__ import annotations

import json
import math
import os
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from crc32c import crc32c

from penstock.readers.files.names import printable
from penstock.readers.formats.chunked_shard import ChunkedShard, Extents
from penstock.readers.formats.npy.notes import Piece, Slab, write_notes
from penstock.readers.formats.parts import PART_BYTES, parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.readers.formats.grid import Windows
    from penstock.readers.formats.npy.fields import ChosenArrays, WindowedGroup
    from penstock.readers.formats.npy.stored import StoredArray
    from penstock.readers.origin.origin import Entry

    Placed = tuple[Piece, "WindowedGroup"]

_LEAST_BYTES = 16
"""A sample counts as much at least, so that no shard has too many."""


def cut_shards(chosen: ChosenArrays) -> Iterator[ChunkedShard]:
    """The shards of a dataset, in order."""
    part_bytes = PART_BYTES
    placed = [
        (piece, group) for group in chosen.groups for piece in _pieces(group, part_bytes=part_bytes)
    ]
    sizes = [max(_stored_bytes(*each), each[0].samples * _LEAST_BYTES) for each in placed]
    for low, high in pairwise(parts(sizes, target_bytes=part_bytes).tolist()):
        yield _shard(placed[low:high], is_by_file=chosen.is_by_file)


def _pieces(group: WindowedGroup, *, part_bytes: int) -> Iterator[Piece]:
    """The runs of samples that a group is cut into, at steps of the windows along the first
    axis."""
    arrays, windows = group.group.arrays, group.windows
    lead = max(windows.values(), key=lambda each: len(each.counts))
    steps = lead.counts[0] if lead.counts else 1
    inner = group.samples // max(1, steps)
    count = 1
    if all(array.packed is None for array in arrays.values()):
        size_bytes = sum(array.numbers_bytes for array in arrays.values())
        weight = max(size_bytes, group.samples * _LEAST_BYTES)
        count = max(1, min(steps, round(weight / part_bytes)))
    for number in range(count):
        first, end = steps * number // count * inner, steps * (number + 1) // count * inner
        yield Piece(
            name=printable(group.group.name),
            samples=end - first,
            first=first,
            slabs=[_slab(arrays[name], windows[name], first, end) for name in windows],
        )


def _slab(array: StoredArray, windows: Windows, first: int, end: int) -> Slab:
    rows = (0, array.shape[0] if array.shape else 1)
    if array.packed is None and array.shape and not array.is_fortran:
        begins = windows.starts(np.array([first, end - 1], np.int64))[:, 0].tolist()
        rows = (begins[0], begins[1] + windows.window[0])
    return Slab(codec=array.codec, rows=rows, windows=windows, packed=array.packed)


def _row_bytes(array: StoredArray) -> int:
    return math.prod(array.shape[1:]) * array.codec.dtype.itemsize


def _span(slab: Slab, array: StoredArray) -> tuple[int, int]:
    """First byte and bytes of a slab in its file."""
    if array.packed is not None or not array.shape:
        return array.start, array.size_bytes
    low, high = slab.rows
    return array.start + low * _row_bytes(array), (high - low) * _row_bytes(array)


def _stored_bytes(piece: Piece, group: WindowedGroup) -> int:
    arrays = group.group.arrays.values()
    return sum(_span(slab, array)[1] for slab, array in zip(piece.slabs, arrays, strict=True))


def _shard(placed: Sequence[Placed], *, is_by_file: bool) -> ChunkedShard:
    files: dict[bytes, Entry] = {}
    numbers: dict[bytes, int] = {}
    columns: list[tuple[int, int, int, int]] = []
    is_packed = False
    for piece, group in placed:
        arrays = group.group.arrays.values()
        for field, (slab, array) in enumerate(zip(piece.slabs, arrays, strict=True)):
            name = array.entry.name
            files[name] = array.entry
            number = numbers.setdefault(name, len(numbers))
            columns.append((number, *_span(slab, array), field))
            is_packed = is_packed or array.packed is not None
    table = np.array(columns, np.int64).reshape(-1, 4).T
    pieces = [piece for piece, _ in placed]
    notes = write_notes(pieces, is_by_file=is_by_file)
    told = [[os.fsdecode(e.name), e.size_bytes, e.version] for e in files.values()]
    checksum = crc32c(json.dumps(told).encode(), crc32c(notes))
    return ChunkedShard(
        samples=sum(piece.samples for piece in pieces),
        files=list(files.values()),
        extents=Extents(files=table[0], starts=table[1], sizes=table[2], fields=table[3]),
        checksum=crc32c(np.ascontiguousarray(table, "<i8"), checksum),
        # What is compressed is decoded as a whole; a sample of anything else can be had alone.
        units=[piece.samples for piece in pieces] if is_packed and not is_by_file else (),
        notes=notes,
    )
