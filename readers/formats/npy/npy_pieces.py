"""Cut arrays into shards that consist of pieces, and record the pieces in the index.

A shard is a contiguous part of large files, or several small files. It contains all rows that its
windows need, including those behind the first row of its last sample, so it can be read without its
neighbours.

A piece is a run of samples of one group of arrays. For each field it has a slab, which is a part of
an array along its first axis or a whole compressed array. The extents of a shard are sorted by
piece, then by field.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

from penstock.cache import CorruptShardError
from penstock.readers.byte_source import REINDEX
from penstock.readers.files import printable
from penstock.readers.formats.array_windows import ArrayWindows
from penstock.readers.formats.candidates import PART_BYTES, part_bounds
from penstock.readers.formats.extents import ChunkedShard, Extents
from penstock.readers.formats.npy.stored_arrays import MAX_AXES, CompressedArray
from penstock.readers.types import array_codec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.readers.formats.npy.npy_fields import ChosenArrays, WindowedGroup
    from penstock.readers.formats.npy.stored_arrays import StoredArray
    from penstock.readers.origin import Entry
    from penstock.readers.types import ArrayCodec

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """A piece's part of one array.

    rows: first and end row of the array that the extent holds. windows: the samples of the whole
    array. packed: see `StoredArray`.
    """

    codec: ArrayCodec
    rows: tuple[int, int]
    windows: ArrayWindows
    packed: CompressedArray | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rows that the extent holds."""
        return (self.rows[1] - self.rows[0], *self.windows.shape[1:])

    @property
    def numbers_bytes(self) -> int:
        """The bytes of those rows, decompressed."""
        return math.prod(self.shape) * self.codec.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A run of samples of one group of arrays.

    name: of its file, for messages. first: number of its first sample in the group. slabs: one for
    each field.
    """

    name: str
    samples: int
    first: int
    slabs: Sequence[Slab]


def write_notes(pieces: Sequence[Piece], *, is_by_file: bool) -> bytes:
    """Encode the pieces of a shard as the notes of its index entry."""
    rows = [
        [piece.name, piece.samples, piece.first, [_slab_to_json(slab) for slab in piece.slabs]]
        for piece in pieces
    ]
    return json.dumps([_VERSION, is_by_file, rows], separators=(",", ":")).encode()


def _slab_to_json(slab: Slab) -> list[Any]:
    windows, packed = slab.windows, slab.packed
    values: list[Any] = [
        slab.codec.dtype.str + ":F" * slab.codec.is_fortran,
        windows.shape,
        slab.rows,
        windows.window,
        windows.stride,
        int(windows.is_step),
        windows.repeat,
    ]
    if packed is not None:
        values.append([packed.size_bytes, packed.head_bytes, packed.crc32])
    return values


def read_notes(notes: bytes, *, fields: int, samples: int) -> tuple[list[Piece], bool]:
    """Decode the pieces of a shard, and whether each file is one sample.

    fields, samples: counts that the notes must match. Raises CorruptShardError.
    """
    try:
        version, is_by_file, rows = json.loads(notes)
        if version != _VERSION:
            raise ValueError(f"version {version!r}, expected {_VERSION}")
        pieces = [_piece(*row, fields=fields) for row in rows]
        if (total := sum(piece.samples for piece in pieces)) != samples:
            raise ValueError(f"{total:,} samples, expected {samples:,}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptShardError(
            f"The index entry of a shard of arrays is damaged ({error}). {REINDEX}"
        ) from error
    return pieces, bool(is_by_file)


def _piece(name: str, samples: int, first: int, slabs: list[list[Any]], *, fields: int) -> Piece:
    parsed = [_parse_slab(*slab) for slab in slabs]
    if len(parsed) != fields or samples < 1 or first < 0:
        raise ValueError(f"{samples} samples of {len(parsed)} fields, the first one {first}")
    if any(first + samples > slab.windows.samples for slab in parsed):
        raise ValueError("it has samples behind the end of an array")
    return Piece(name=str(name), samples=int(samples), first=int(first), slabs=parsed)


def _parse_slab(
    codec: str,
    shape: list[int],
    rows: list[int],
    window: list[int],
    stride: list[int],
    is_step: int,
    repeat: int,
    packed: list[int] | None = None,
) -> Slab:
    parsed = array_codec(codec)
    axes = [*zip(shape, window, stride, strict=True)]
    low, high = rows
    if parsed is None or not 1 <= len(axes) <= MAX_AXES or repeat < 1:
        raise ValueError(f"an array of {codec!r} with {len(axes)} axes")
    if any(not 0 <= part <= length or step < 1 for length, part, step in axes):
        raise ValueError(f"windows {window} of an array of shape {shape}")
    if not 0 <= low <= high <= shape[0]:
        raise ValueError(f"rows {rows} of an array of shape {shape}")
    member = None
    if packed is not None:
        size_bytes, head_bytes, crc32 = packed
        if head_bytes < 0 or size_bytes - head_bytes != math.prod(shape) * parsed.dtype.itemsize:
            raise ValueError(f"{size_bytes} bytes for an array of shape {shape}")
        member = CompressedArray(
            size_bytes=int(size_bytes), head_bytes=int(head_bytes), crc32=int(crc32)
        )
    return Slab(
        codec=parsed,
        rows=(int(low), int(high)),
        windows=ArrayWindows(
            shape=tuple(map(int, shape)),
            window=tuple(map(int, window)),
            stride=tuple(map(int, stride)),
            is_step=bool(is_step),
            repeat=int(repeat),
        ),
        packed=member,
    )


_MIN_SAMPLE_BYTES = 16
"""A sample counts as at least this many bytes, so that no shard has too many samples."""


def cut_shards(chosen: ChosenArrays) -> Iterator[ChunkedShard]:
    """Yield the shards of a dataset, in order."""
    pieces = [(piece, group) for group in chosen.groups for piece in _pieces(group)]
    sizes = []
    for piece, group in pieces:
        arrays = group.group.arrays.values()
        spans = (_span(slab, array) for slab, array in zip(piece.slabs, arrays, strict=True))
        sizes.append(max(sum(size for _, size in spans), piece.samples * _MIN_SAMPLE_BYTES))
    for low, high in pairwise(part_bounds(sizes, target_bytes=PART_BYTES).tolist()):
        yield _shard(pieces[low:high], is_by_file=chosen.is_by_file)


def _pieces(group: WindowedGroup) -> Iterator[Piece]:
    """Yield the pieces of a group, cut between windows along the first axis."""
    arrays, windows = group.group.arrays, group.windows
    lead = max(windows.values(), key=lambda each: len(each.counts))
    steps = lead.counts[0] if lead.counts else 1
    inner = group.samples // max(1, steps)
    count = 1
    if all(array.packed is None for array in arrays.values()):
        size_bytes = sum(array.numbers_bytes for array in arrays.values())
        weight = max(size_bytes, group.samples * _MIN_SAMPLE_BYTES)
        count = max(1, min(steps, round(weight / PART_BYTES)))
    for number in range(count):
        first, end = steps * number // count * inner, steps * (number + 1) // count * inner
        yield Piece(
            name=printable(group.group.name),
            samples=end - first,
            first=first,
            slabs=[_slab_of(arrays[name], windows[name], first, end) for name in windows],
        )


def _slab_of(array: StoredArray, windows: ArrayWindows, first: int, end: int) -> Slab:
    rows = (0, array.shape[0] if array.shape else 1)
    if array.packed is None and array.shape and not array.is_fortran:
        begins = windows.starts(np.array([first, end - 1], np.int64))[:, 0].tolist()
        rows = (begins[0], begins[1] + windows.window[0])
    return Slab(codec=array.codec, rows=rows, windows=windows, packed=array.packed)


def _span(slab: Slab, array: StoredArray) -> tuple[int, int]:
    """Return the first byte of a slab in its file, and its size in bytes."""
    if array.packed is not None or not array.shape:
        return array.start, array.size_bytes
    low, high = slab.rows
    row_bytes = math.prod(array.shape[1:]) * array.codec.dtype.itemsize
    return array.start + low * row_bytes, (high - low) * row_bytes


def _shard(placed: Sequence[tuple[Piece, WindowedGroup]], *, is_by_file: bool) -> ChunkedShard:
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
    identity = [[os.fsdecode(e.name), e.size_bytes, e.version] for e in files.values()]
    checksum = crc32c(json.dumps(identity).encode(), crc32c(notes))
    return ChunkedShard(
        samples=sum(piece.samples for piece in pieces),
        files=list(files.values()),
        extents=Extents(files=table[0], starts=table[1], sizes=table[2], fields=table[3]),
        checksum=crc32c(np.ascontiguousarray(table, "<i8"), checksum),
        # A compressed array is decoded as a whole; samples of others can be read one by one.
        units=[piece.samples for piece in pieces] if is_packed and not is_by_file else (),
        note=notes,
    )
