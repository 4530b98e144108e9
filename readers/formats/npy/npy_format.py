"""Recognise datasets of NumPy files, cut their arrays into shards, and record the shards: .npy
files whose first axis is samples, and .npz files.

A dataset is recognised by the names at its root or in its URL. `array_reader` reads its samples.

A shard is a contiguous part of large files, or several small files. It contains all rows that its
windows need, including those behind the first row of its last sample, so it can be read without its
neighbours. It consists of pieces: runs of samples of one group of arrays. For each field a piece
has an extent: a part of an array along its first axis, or a whole compressed array. The extents of
a shard are sorted by piece, then by field.
"""

from __future__ import annotations

import math
import zlib
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from penstock.cache import ConfigError
from penstock.readers.files import extension, is_passed_over, printable
from penstock.readers.formats.array_reader import ArrayPart, ArrayPiece, ArrayReader, ChunkDecoder
from penstock.readers.formats.array_windows import MAX_AXES, ArrayWindows, ChunkGrid
from penstock.readers.formats.candidates import PART_BYTES, part_bounds
from penstock.readers.formats.chunked import ChunkedDataset, ChunkFormat
from penstock.readers.formats.extents import ChunkedShard
from penstock.readers.types import Encoded, array_codec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.readers.formats.chunked import ChunkedShardFacts, ChunkReader
    from penstock.readers.formats.format import DatasetFiles
    from penstock.readers.formats.npy.npy_fields import ArrayGroup, StoredArray
    from penstock.readers.origin import Entry, Origin

_FILE_TABLES = frozenset((b"metadata.csv", b"metadata.jsonl", b"metadata.parquet"))
"""If a folder holds one of these tables, the table describes the folder's files."""


class NpyFormat(ChunkFormat):
    """The format of *.npy and *.npz files."""

    name: ClassVar[str] = "npy"
    sampling: ClassVar[tuple[str, ...]] = ("sample", "stride", "file")
    extensions: ClassVar[frozenset[str]] = frozenset(("npy", "npz"))

    def recognises(self, origin: Origin) -> bool:
        """Return True if the URL names such files alone, or a folder of them that holds nothing
        they could belong to (images, subfolders, a table of files).

        A folder of .npy files alone is read as one sample per file by the `folder` format, unless
        sample= or another such argument is given.
        """
        names = origin.names()
        files = [name for name in names.files if not is_passed_over(name.rpartition(b"/")[2])]
        arrays = [name for name in files if self.is_file(name)]
        if origin.selection is not None:
            return bool(arrays) and len(arrays) == len(files)
        if not arrays or _FILE_TABLES.intersection(files):
            return False
        from penstock.readers.files import IMAGES  # most folders hold no arrays

        if not all(map(is_passed_over, names.folders)):
            return False
        others = set(map(extension, files))
        return others.isdisjoint(IMAGES) and (
            "npy" not in others or bool(origin.arrangement.sampling)
        )

    def files(self, origin: Origin) -> DatasetFiles:
        """List the files; raise ConfigError too if there are .npy and .npz files."""
        found = super().files(origin)
        if len({extension(entry.name) for entry in found.entries}) > 1:
            raise ConfigError(
                f"{origin.url}: the dataset has both .npy and .npz files. Name those of one kind, "
                f"such as {origin.url.rstrip('/')}/*.npy."
            )
        return found

    def index(self, origin: Origin, files: DatasetFiles, *, workers: int) -> ChunkedDataset:
        """Read the headers of all files and return the shards."""
        from penstock.readers.formats.npy.npy_fields import choose_samples, read_groups

        groups = read_groups(origin, files.entries, workers=workers)
        schema, chosen, is_by_file, too_short = choose_samples(origin, groups)
        pieces = [piece for group in chosen for piece in _pieces(group)]
        sizes = [_weight(sum(size for *_, size in each.extents), each.samples) for each in pieces]
        bounds = part_bounds(sizes, target_bytes=PART_BYTES).tolist()
        return ChunkedDataset(
            schema=schema,
            shards=[_shard(pieces[low:high], is_by_file) for low, high in pairwise(bounds)],
            left_out=groups[0].left_out,
            unnamed=too_short,
        )

    def reader(self, shard: ChunkedShardFacts) -> ChunkReader:
        """Open a shard."""
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
        return ArrayReader(shard, pieces, is_by_file=bool(is_by_file))


_VERSION = 1


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
    samples of the whole array. packed: see `StoredArray`; None for bare numbers."""
    parsed = array_codec(codec)
    low, high = rows
    if parsed is None or not 1 <= len(shape) <= MAX_AXES or not 0 <= low <= high <= shape[0]:
        raise ValueError(f"rows {rows} of an array of {codec!r} of shape {shape}")
    windows = ArrayWindows.parse(shape, window, stride, is_step, repeat)
    held = (int(high) - int(low), *windows.shape[1:])
    steps = list[Any]()
    if packed is not None:
        whole_bytes, head_bytes, crc32 = packed
        steps.append(partial(_inflated, whole_bytes, head_bytes, crc32))
        size_bytes = whole_bytes - head_bytes
    if size_bytes != math.prod(held) * parsed.dtype.itemsize:
        raise ValueError(f"{size_bytes} bytes for an array of shape {held}")
    decoder = ChunkDecoder(
        steps=steps,
        stored=parsed.dtype,
        shape=held,
        order=tuple(range(len(held)))[::-1] if parsed.is_fortran else None,
        checks_bools=False,
    )
    return ArrayPart(
        windows=windows,
        grid=ChunkGrid(shape=held, chunk=tuple(max(1, length) for length in held)),
        first_row=int(low),
        numbers=np.zeros(1, np.int64),
        dtype=parsed.dtype,
        open_decoder=lambda: decoder,
        is_ranged=packed is None and not parsed.is_fortran,
    )


def _inflated(
    size_bytes: int, head_bytes: int, crc32: int, data: Encoded, _: Encoded | None
) -> Encoded:
    """Decompress a member of an archive, and remove the array's header. Raises ValueError if it is
    damaged."""
    try:
        whole = zlib.decompressobj(-15).decompress(data.data, size_bytes + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(whole) != size_bytes or zlib.crc32(whole) != crc32:
        raise ValueError("its length or CRC-32 differs from the archive's directory")
    return np.frombuffer(whole, np.uint8, offset=head_bytes)


_MIN_SAMPLE_BYTES = 16


def _weight(size_bytes: int, samples: int) -> int:
    """Return the bytes as which samples count in a shard: at least 16 each, so that no shard has
    too many samples."""
    return max(size_bytes, samples * _MIN_SAMPLE_BYTES)


class _Piece(NamedTuple):
    """A piece that isn't in a shard yet. notes: see `_part`; extents: file, first byte, size, by
    field."""

    samples: int
    notes: list[Any]
    extents: list[tuple[Entry, int, int]]


def _pieces(group: ArrayGroup) -> Iterator[_Piece]:
    """Yield the pieces of a group, cut between windows along the first axis; a compressed array is
    one piece."""
    arrays, windows = group.arrays, group.windows
    lead = max(windows.values(), key=lambda each: len(each.counts))
    steps = lead.counts[0] if lead.counts else 1
    inner = group.samples // max(1, steps)
    size_bytes = sum(array.numbers_bytes for array in arrays.values())
    count = max(1, min(steps, round(_weight(size_bytes, group.samples) / PART_BYTES)))
    if any(array.packed is not None for array in arrays.values()):
        count = 1
    for number in range(count):
        first, end = steps * number // count * inner, steps * (number + 1) // count * inner
        slabs = [_slab(arrays[name], windows[name], first, end) for name in windows]
        notes = [printable(group.name), end - first, first, [note for note, _ in slabs]]
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
    notes: list[Any] = [str(array.codec), windows.shape, rows, windows.window, windows.stride]
    notes += [int(windows.is_step), windows.repeat]
    return notes if array.packed is None else [*notes, array.packed], extent


def _shard(pieces: list[_Piece], is_by_file: bool) -> ChunkedShard:
    rows = [piece.notes for piece in pieces]
    is_packed = any(len(slab) > 7 for *_, slabs in rows for slab in slabs)
    return ChunkedShard.of(
        ((*place, field) for piece in pieces for field, place in enumerate(piece.extents)),
        samples=sum(piece.samples for piece in pieces),
        # A compressed array is decoded as a whole; samples of others can be read one by one.
        units=[piece.samples for piece in pieces] if is_packed and not is_by_file else (),
        note=[_VERSION, is_by_file, rows],
    )


FORMAT = NpyFormat()
