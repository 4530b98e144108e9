"""Cut arrays into shards made of pieces, and note the pieces in the index to find samples again.

A shard is contiguous parts of large files, or several small files together. It has all the rows
that its windows need, those behind its last sample's first row too, so that it can be read by
itself.

A piece is a run of samples of one group of arrays: of each field a slab of an array along its first
axis, or a compressed array as a whole. Its extents stand in the order of the pieces, those of one
in the order of the fields.
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
from penstock.readers.files import printable
from penstock.readers.formats.array_windows import ArrayWindows
from penstock.readers.formats.candidates import PART_BYTES, part_bounds
from penstock.readers.formats.extents import ChunkedShard, Extents
from penstock.readers.formats.local_files import REINDEX
from penstock.readers.formats.npy.stored_arrays import MAX_AXES, CompressedArray
from penstock.readers.types import array_codec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.readers.formats.npy.npy_fields import ChosenArrays, WindowedGroup
    from penstock.readers.formats.npy.stored_arrays import StoredArray
    from penstock.readers.origin import Entry
    from penstock.readers.types import ArrayCodec

    Placed = tuple["Piece", WindowedGroup]

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """What a piece has of one array. rows: first and end along the first axis of what its extent
    holds. windows: of the array's samples. packed: see `StoredArray`."""

    codec: ArrayCodec
    rows: tuple[int, int]
    windows: ArrayWindows
    packed: CompressedArray | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what the extent holds."""
        return (self.rows[1] - self.rows[0], *self.windows.shape[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A run of samples of one group. name: of its file, for people; first: the number of its first
    sample in the group; slabs: of each field."""

    name: str
    samples: int
    first: int
    slabs: Sequence[Slab]


def write_notes(pieces: Sequence[Piece], *, is_by_file: bool) -> bytes:
    """Notes of a shard."""
    told = [
        [piece.name, piece.samples, piece.first, [_slab_to_json(slab) for slab in piece.slabs]]
        for piece in pieces
    ]
    return json.dumps([_VERSION, is_by_file, told], separators=(",", ":")).encode()


def _slab_to_json(slab: Slab) -> list[Any]:
    windows, packed = slab.windows, slab.packed
    told: list[Any] = [
        slab.codec.dtype.str + ":F" * slab.codec.is_fortran,
        windows.shape,
        slab.rows,
        windows.window,
        windows.stride,
        int(windows.is_step),
        windows.repeat,
    ]
    if packed is not None:
        told.append([packed.size_bytes, packed.head_bytes, packed.crc32])
    return told


def read_notes(notes: bytes, *, fields: int, samples: int) -> tuple[list[Piece], bool]:
    """The pieces of a shard, and whether each is a sample. Raises CorruptShardError."""
    try:
        version, is_by_file, told = json.loads(notes)
        if version != _VERSION:
            raise ValueError(f"version {version!r}")
        pieces = [_piece(*each, fields=fields) for each in told]
        if sum(piece.samples for piece in pieces) != samples:
            raise ValueError("other numbers of samples")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptShardError(
            f"An index of arrays says what can't be ({error}). {REINDEX}"
        ) from error
    return pieces, bool(is_by_file)


def _piece(name: str, samples: int, first: int, slabs: list[list[Any]], *, fields: int) -> Piece:
    found = [_parse_slab(*each) for each in slabs]
    if len(found) != fields or samples < 1 or first < 0:
        raise ValueError(f"{samples} samples of {len(found)} fields")
    for slab in found:
        if first + samples > slab.windows.samples:
            raise ValueError("samples behind an array's end")
    return Piece(name=str(name), samples=int(samples), first=int(first), slabs=found)


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
    found = array_codec(codec)
    axes = [*zip(shape, window, stride, strict=True)]
    low, high = rows
    if found is None or not 1 <= len(axes) <= MAX_AXES or repeat < 1:
        raise ValueError(f"an array of {codec!r}, {len(axes)} axes")
    if any(not 0 <= part <= length or step < 1 for length, part, step in axes):
        raise ValueError(f"windows {window} of {shape}")
    if not 0 <= low <= high <= shape[0]:
        raise ValueError(f"rows {rows} of {shape}")
    return Slab(
        codec=found,
        rows=(int(low), int(high)),
        windows=ArrayWindows(
            shape=tuple(map(int, shape)),
            window=tuple(map(int, window)),
            stride=tuple(map(int, stride)),
            is_step=bool(is_step),
            repeat=int(repeat),
        ),
        packed=None if packed is None else _packed(found, shape, *packed),
    )


def _packed(
    codec: ArrayCodec, shape: list[int], size_bytes: int, head_bytes: int, crc32: int
) -> CompressedArray:
    if head_bytes < 0 or size_bytes - head_bytes != math.prod(shape) * codec.dtype.itemsize:
        raise ValueError(f"{size_bytes} bytes of shape {shape}")
    return CompressedArray(size_bytes=int(size_bytes), head_bytes=int(head_bytes), crc32=int(crc32))


_LEAST_BYTES = 16
"""A sample counts as much at least, so that no shard has too many."""


def cut_shards(chosen: ChosenArrays) -> Iterator[ChunkedShard]:
    """The shards of a dataset, in order."""
    part_bytes = PART_BYTES
    placed = [
        (piece, group) for group in chosen.groups for piece in _pieces(group, part_bytes=part_bytes)
    ]
    sizes = [max(_stored_bytes(*each), each[0].samples * _LEAST_BYTES) for each in placed]
    for low, high in pairwise(part_bounds(sizes, target_bytes=part_bytes).tolist()):
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
            slabs=[_slab_of(arrays[name], windows[name], first, end) for name in windows],
        )


def _slab_of(array: StoredArray, windows: ArrayWindows, first: int, end: int) -> Slab:
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
