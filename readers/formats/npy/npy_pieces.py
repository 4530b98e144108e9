"""Cut arrays into shards that consist of pieces, and record the pieces in the index.

A shard is a contiguous part of large files, or several small files. It contains all rows that its
windows need, including those behind the first row of its last sample, so it can be read without its
neighbours.

A piece is a run of samples of one group of arrays. For each field it has an extent: a part of an
array along its first axis, or a whole compressed array. The extents of a shard are sorted by piece,
then by field.
"""

from __future__ import annotations

import math
import zlib
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.readers.files import printable
from penstock.readers.formats.array_reader import ArrayPart, ArrayPiece, CodecChain
from penstock.readers.formats.array_windows import ArrayWindows, ChunkGrid
from penstock.readers.formats.candidates import PART_BYTES, part_bounds
from penstock.readers.formats.extents import ChunkedShard, Extents
from penstock.readers.formats.npy.stored_arrays import MAX_AXES
from penstock.readers.types import array_codec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.readers.formats.chunked import ChunkedShardFacts
    from penstock.readers.formats.npy.npy_fields import ChosenArrays, WindowedGroup
    from penstock.readers.formats.npy.stored_arrays import StoredArray
    from penstock.readers.origin import Entry
    from penstock.readers.types import Encoded

_VERSION = 1


def read_notes(shard: ChunkedShardFacts) -> tuple[list[ArrayPiece], bool]:
    """Decode the pieces of a shard, and whether each file is one sample. Raises as
    `ChunkFormat.reader` does."""
    version, is_by_file, rows = shard.note
    if version != _VERSION:
        raise ValueError(f"version {version!r}, expected {_VERSION}")
    sizes, pieces = iter(shard.extents.sizes.tolist()), []
    for name, samples, first, slabs in rows:
        parts = [_part(next(sizes, -1), *slab) for slab in slabs]
        if samples < 1 or first < 0 or any(first + samples > p.windows.samples for p in parts):
            raise ValueError(f"it has the samples [{first}, {first + samples}) of an array")
        named = dict(zip(shard.schema, parts, strict=True))
        pieces.append(ArrayPiece(name=name, samples=samples, first=first, parts=named))
    return pieces, bool(is_by_file)


def _part(
    size_bytes: int,
    codec: str,
    shape: list[int],
    rows: list[int],
    window: list[int],
    stride: list[int],
    is_step: int,
    repeat: int,
    packed: list[int] | None = None,
) -> ArrayPart:
    """Decode the notes on an extent of this size: the rows of an array that it holds, and the
    samples of the whole array. packed: see `CompressedArray`; None for bare numbers."""
    parsed = array_codec(codec)
    low, high = rows
    if parsed is None or not 1 <= len(shape) <= MAX_AXES or not 0 <= low <= high <= shape[0]:
        raise ValueError(f"rows {rows} of an array of {codec!r} of shape {shape}")
    windows = ArrayWindows.parse(shape, window, stride, is_step, repeat)
    held = (int(high) - int(low), *windows.shape[1:])
    numbers_bytes = math.prod(held) * parsed.dtype.itemsize
    axes = tuple(range(len(held)))
    steps: Any = ()
    if packed is not None:
        size_bytes, head_bytes, crc32 = packed
        steps = (partial(_inflated, size_bytes, head_bytes, crc32),)
        size_bytes -= head_bytes
    if size_bytes != numbers_bytes:
        raise ValueError(f"{size_bytes} bytes for an array of shape {held}")
    chain = CodecChain(
        steps=steps,
        stored=parsed.dtype,
        shape=held,
        order=axes[::-1] if parsed.is_fortran else axes,
        checks_bools=False,
    )
    return ArrayPart(
        windows=windows,
        grid=ChunkGrid(shape=held, chunk=tuple(max(1, length) for length in held)),
        first_row=int(low),
        numbers=np.zeros(1, np.int64),
        dtype=parsed.dtype,
        open_decoder=lambda: chain,
        is_ranged=packed is None and not parsed.is_fortran,
    )


def _inflated(
    size_bytes: int, head_bytes: int, crc32: int, data: Encoded, out: Encoded | None
) -> Encoded:
    """Decompress a member of an archive, and remove the array's header. Raises ValueError if it is
    damaged."""
    try:
        whole = zlib.decompressobj(-15).decompress(data.data, size_bytes + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(whole) != size_bytes or zlib.crc32(whole) != crc32:
        raise ValueError("its length or CRC-32 differs from the archive's directory")
    numbers = np.frombuffer(whole, np.uint8, offset=head_bytes)
    if out is None:
        return numbers
    out[:] = numbers
    return out


_MIN_SAMPLE_BYTES = 16
"""A sample counts as at least this many bytes, so that no shard has too many samples."""


class _Piece(NamedTuple):
    """A piece that isn't in a shard yet. notes: see `_part`; extents: file, first byte, size, by
    field."""

    samples: int
    notes: list[Any]
    extents: list[tuple[Entry, int, int]]


def cut_shards(chosen: ChosenArrays) -> Iterator[ChunkedShard]:
    """Yield the shards of a dataset, in order."""
    pieces = [piece for group in chosen.groups for piece in _pieces(group)]
    sizes = [
        max(sum(size for *_, size in piece.extents), piece.samples * _MIN_SAMPLE_BYTES)
        for piece in pieces
    ]
    for low, high in pairwise(part_bounds(sizes, target_bytes=PART_BYTES).tolist()):
        yield _shard(pieces[low:high], is_by_file=chosen.is_by_file)


def _pieces(group: WindowedGroup) -> Iterator[_Piece]:
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
        slabs = [_slab(arrays[name], windows[name], first, end) for name in windows]
        notes = [printable(group.group.name), end - first, first, [note for note, _ in slabs]]
        yield _Piece(end - first, notes, [extent for _, extent in slabs])


def _slab(
    array: StoredArray, windows: ArrayWindows, first: int, end: int
) -> tuple[list[Any], tuple[Entry, int, int]]:
    """Return the notes on the part of an array that samples [first, end) need, and its extent."""
    rows, extent = (0, windows.shape[0]), (array.entry, array.start, array.size_bytes)
    if array.packed is None and array.shape and not array.is_fortran:
        low, last = windows.starts(np.array([first, end - 1], np.int64))[:, 0].tolist()
        rows = (low, last + windows.window[0])
        row_bytes = math.prod(array.shape[1:]) * array.codec.dtype.itemsize
        extent = (array.entry, array.start + low * row_bytes, (rows[1] - low) * row_bytes)
    codec = array.codec.dtype.str + ":F" * array.codec.is_fortran
    notes: list[Any] = [codec, windows.shape, rows, windows.window, windows.stride]
    notes += [int(windows.is_step), windows.repeat]
    if array.packed is not None:
        notes.append([array.packed.size_bytes, array.packed.head_bytes, array.packed.crc32])
    return notes, extent


def _shard(pieces: Sequence[_Piece], *, is_by_file: bool) -> ChunkedShard:
    files: dict[bytes, Entry] = {}
    numbers: dict[bytes, int] = {}
    columns: list[tuple[int, int, int, int]] = []
    for piece in pieces:
        for field, (entry, start, size) in enumerate(piece.extents):
            files[entry.name] = entry
            number = numbers.setdefault(entry.name, len(numbers))
            columns.append((number, start, size, field))
    table = np.array(columns, np.int64).reshape(-1, 4).T
    rows = [piece.notes for piece in pieces]
    is_packed = any(len(slab) > 7 for *_, slabs in rows for slab in slabs)
    return ChunkedShard(
        samples=sum(piece.samples for piece in pieces),
        files=list(files.values()),
        extents=Extents(files=table[0], starts=table[1], sizes=table[2], fields=table[3]),
        # A compressed array is decoded as a whole; samples of others can be read one by one.
        units=[piece.samples for piece in pieces] if is_packed and not is_by_file else (),
        note=[_VERSION, is_by_file, rows],
    )
