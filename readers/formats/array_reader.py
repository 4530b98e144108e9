"""Read samples of arrays that are stored in chunks: windows, or crops of them, into their slots.

Formats of arrays describe a shard as pieces: runs of samples of one group of arrays, with the
chunks of each array that the shard holds (`ArrayPart`). A Zarr array has many chunks; an array of a
NumPy file is one. The rest is the same for all of them, and is here. There are three ways from
storage to a slot:

- chunks that hold bare numbers are read by range, directly into the slots if parts are large;
- a sample that is one encoded chunk is decoded directly into its slot;
- all other chunks are decoded as a whole, or mapped, and the parts are copied out of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from penstock.cache import PenstockError
from penstock.readers.fieldtypes import Column, ColumnCrop
from penstock.readers.formats.array_windows import PartCopier, PartRanges, mark, place_numbers
from penstock.readers.formats.chunked import ChunkReader
from penstock.readers.formats.open_shard import StridedRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.readers.formats.array_windows import ArrayWindows, ChunkGrid, Shape
    from penstock.readers.formats.chunk_data import ShardData
    from penstock.readers.formats.chunked import ChunkedShardFacts, Crops, Parts
    from penstock.readers.formats.open_shard import Places
    from penstock.readers.types import Encoded, Ints, Numbers

    Step = Callable[[Encoded, Encoded | None], Encoded]
    """Decodes bytes: it returns new ones, or fills and returns the second argument, which has their
    exact size. Raises ValueError if they are damaged."""

_FILL = -1
"""Stands for the extent of a chunk that isn't stored."""

_MAX_MAPS = 64
"""The most files of one shard that are mapped. The files of a shard that has more are small, and
reading one is cheaper than mapping it."""

_READ_BYTES = 4 * 2**20
"""Chunks that are read before they are decoded, in decoded bytes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkDecoder:
    """Decodes the chunks of one array. Several threads may use it.

    steps: in the order of decoding. stored: dtype of the numbers in the last step's output. shape:
    of the chunk. order: its axes in the order in which they are stored, slowest first; None if they
    are in order. checks_bools: True if bytes other than 0 and 1 may be stored for bools; such a
    chunk is copied.
    """

    steps: Sequence[Step]
    stored: np.dtype[Any]
    shape: Shape
    order: Shape | None = None
    checks_bools: bool = True

    @cached_property
    def _are_checked(self) -> bool:
        return self.checks_bools and self.stored.kind == "b"

    @cached_property
    def _is_plain(self) -> bool:
        """True if the last step's output has the delivered dtype and layout."""
        is_row_major = self._axes == tuple(range(len(self.shape)))
        return is_row_major and self.stored.isnative and not self._are_checked

    @cached_property
    def is_raw(self) -> bool:
        """True if a chunk's bytes are its numbers, row by row, as they are delivered."""
        return not self.steps and self._is_plain

    @cached_property
    def is_direct(self) -> bool:
        """True if the last step may decode directly into a given array."""
        return bool(self.steps) and self._is_plain

    @cached_property
    def _size_bytes(self) -> int:
        return math.prod(self.shape) * self.stored.itemsize

    @cached_property
    def _layout(self) -> Shape:
        return self.shape if self.order is None else tuple(self.shape[axis] for axis in self.order)

    @cached_property
    def _axes(self) -> Shape:
        axes = range(len(self.shape))
        return tuple(axes) if self.order is None else tuple(self.order.index(axis) for axis in axes)

    def decode(self, data: Encoded, out: Numbers | None = None) -> Numbers:
        """Decode a chunk to numbers, in the shape of a whole chunk. At the end of an array, a part
        of the chunk is outside of the array.

        data: uint8, one-dimensional, contiguous. out: of the chunk's shape and native dtype; if it
        is given, it is filled and returned, which saves a copy. Otherwise, the result may be a
        read-only view of data, with any strides and byte order. Raises ValueError if the bytes are
        damaged.
        """
        if not len(data) and self._size_bytes:  # no codec encodes numbers to no bytes
            raise ValueError("it has no bytes: it was truncated or never written")
        last = out.reshape(-1).view(np.uint8) if out is not None and self.is_direct else None
        for step in self.steps[:-1]:
            data = step(data, None)
        for step in self.steps[-1:]:
            data = step(data, last)
        if len(data) != self._size_bytes:
            raise ValueError(f"it decodes to {len(data):,} bytes, expected {self._size_bytes:,}")
        if out is not None and data is last:
            return out
        # A view of bytes other than 0 and 1 would make invalid bools.
        flat = data != 0 if self._are_checked else data.view(self.stored)
        chunk: Numbers = flat.reshape(self._layout).transpose(self._axes)
        if out is None:
            return chunk
        out[...] = chunk
        return out


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrayPart:
    """The part of one array that a shard holds, in chunks.

    windows: the samples of the whole array. first_row: the row of the array at which the grid
    begins. numbers: of the chunks that are extents of the shard, ascending, int64. fill: the value
    of chunks that aren't stored; None if all are. dtype: of the numbers, in the stored byte order
    if is_ranged. open_decoder: makes the decoder; raises MissingDependencyError. is_ranged: True if
    the grid is one chunk of bare numbers, row by row, of which single samples are read.
    """

    windows: ArrayWindows
    grid: ChunkGrid
    first_row: int = 0
    numbers: Ints
    fill: np.generic[Any] | None = None
    dtype: np.dtype[Any]
    open_decoder: Callable[[], ChunkDecoder]
    is_ranged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrayPiece:
    """A run of samples of one group of arrays.

    name: of its file or array, for messages. first: number of its first sample in the group. parts:
    by field, in the order of the schema.
    """

    name: str
    samples: int
    first: int
    parts: Mapping[str, ArrayPart]


class ArrayReader(ChunkReader):
    """Reads the samples of one shard. The extents are sorted by piece, field and chunk.

    Raises ValueError if the pieces don't match the extents.
    """

    takes_corners: ClassVar[bool] = True

    def __init__(
        self, shard: ChunkedShardFacts, pieces: Sequence[ArrayPiece], *, is_by_file: bool = False
    ) -> None:
        self._pieces, self._is_by_file, self._types = pieces, is_by_file, shard.schema
        self._bounds = np.cumsum([0, *(piece.samples for piece in pieces)])
        sizes, are_mapped = shard.extents.sizes, len(np.unique(shard.extents.files)) <= _MAX_MAPS
        self._readers: dict[str, list[_PartReader]] = {}
        extent = 0
        for piece in pieces:
            for name, part in piece.parts.items():
                own = sizes[extent : extent + len(part.numbers)]
                reader = _PartReader(name, part, piece, extent, own, are_mapped)
                self._readers.setdefault(name, []).append(reader)
                extent += len(part.numbers)
        are_fields = all(list(piece.parts) == list(shard.schema) for piece in pieces)
        if not are_fields or extent != len(shard.extents) or self._bounds[-1] != shard.samples:
            raise ValueError("its pieces don't match its samples, fields or extents")
        # Fields whose numbers may not fit their type: casts check them.
        self._cast = {
            name: readers[0].part.dtype.newbyteorder("=")
            for name, readers in self._readers.items()
            if shard.schema[name].may_not_fit(readers[0].part.dtype)
        }

    def needs(self, rows: Ints, fields: Sequence[str], crops: Crops) -> list[int]:
        """Return the extents that samples, or the cropped parts of them, need."""
        return list(dict.fromkeys(self.needs_parts(rows, fields, crops)[0]))

    def needs_parts(self, rows: Ints, fields: Sequence[str], crops: Crops) -> Parts:
        """Return the byte ranges that hold the samples, or the cropped parts of them."""
        needed: tuple[list[int], list[int], list[int]] = ([], [], [])
        for piece, at in self._by_piece(rows):
            for name in fields:
                crop = crops[name].take(at) if name in crops else None
                of_field = self._readers[name][piece].needs(rows[at] + self._offset(piece), crop)
                for column, more in zip(needed, of_field, strict=True):
                    column += more
        return needed

    def _by_piece(self, rows: Ints) -> Iterator[tuple[int, Ints]]:
        """Yield each piece that holds some of the rows, with the positions of these rows."""
        if len(self._pieces) == 1:
            yield 0, np.arange(len(rows))
            return
        pieces = self._piece_of(rows)
        order = np.argsort(pieces, kind="stable")
        numbers, firsts = np.unique(pieces[order], return_index=True)
        yield from zip(numbers.tolist(), np.split(order, firsts[1:]), strict=True)

    def _piece_of(self, rows: Ints) -> Ints:
        return np.searchsorted(self._bounds, rows, side="right") - 1

    def _offset(self, piece: int) -> int:
        """Return what a row's number differs by from its sample's number in the piece's group."""
        return self._pieces[piece].first - int(self._bounds[piece])

    def lengths(self, field: str, rows: Ints) -> Ints:
        """Return the lengths of samples along their first axis, int64, shape (n,)."""
        lengths = [reader.part.windows.sample_shape[0] for reader in self._readers[field]]
        return np.array(lengths, np.int64)[self._piece_of(rows)]

    def plain(self, field: str, *, data: ShardData) -> StridedRows | None:
        """Return the location of a field's samples if they are runs of whole rows of one mapped
        array; None otherwise."""
        reader = self._readers[field][0]
        if len(self._pieces) > 1 or not reader.part.is_ranged or field in self._cast:
            return None
        return reader.plain(data)

    def gather(
        self,
        field: str,
        rows: Ints,
        out: Numbers,
        places: Places,
        *,
        data: ShardData,
        wrong: dict[int, str],
        corners: Ints | None = None,
    ) -> None:
        """Read samples, or parts of them, into their slots."""
        target, slots = out, places
        if field in self._cast:
            target = np.empty((len(rows), *out.shape[1:]), self._cast[field])
            slots = slice(0, len(rows))
        readers = self._readers[field]
        if len(readers) == 1:
            readers[0].gather(rows + self._offset(0), target, slots, data, wrong, corners)
        else:
            numbers = place_numbers(slots, len(rows))
            for piece, at in self._by_piece(rows):
                bad: dict[int, str] = {}
                part = None if corners is None else corners[at]
                samples = rows[at] + self._offset(piece)
                readers[piece].gather(samples, target, numbers[at], data, bad, part)
                for place, reason in bad.items():
                    wrong.setdefault(int(at[place]), reason)
        if field in self._cast:
            for row, reason in self._types[field].put_fitting(field, target, out, places).items():
                wrong.setdefault(row, reason)

    def read_rows(
        self, rows: Ints, fields: Sequence[str], *, data: ShardData, wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """Read fields whose samples differ in shape."""
        columns: dict[str, Column] = {}
        for name in fields:
            form = self._types[name].form
            assert form is not None
            columns[name] = form.column(self._whole(name, rows, data, wrong, form.empty))
        return columns

    def _whole(
        self, name: str, rows: Ints, data: ShardData, wrong: dict[int, str], empty: Numbers
    ) -> list[Numbers]:
        """Return the arrays of samples that are one chunk each, whose shapes differ. empty:
        replaces a damaged one."""
        pieces, of_rows = np.unique(self._piece_of(rows), return_inverse=True)
        readers = [self._readers[name][piece] for piece in pieces.tolist()]
        read = readers[0].encoded([reader.extent for reader in readers], data)
        arrays = []
        for number, (reader, encoded) in enumerate(zip(readers, read, strict=True)):
            reason, array = "", empty
            try:
                array = reader.decoder.decode(encoded).astype(reader.part.dtype, copy=False)
            except ValueError as error:
                reason = reader.reason(error)
            if name in self._cast and not reason:
                found, array = array, np.zeros((1, *array.shape), empty.dtype)
                wrongs = self._types[name].put_fitting(name, found[None], array, slice(0, 1))
                reason = wrongs.get(0, "")
                array = empty if reason else array[0]
            if reason:
                mark(wrong, np.flatnonzero(of_rows == number), reason)
            arrays.append(array.astype(empty.dtype, copy=False))
        return [arrays[number] for number in of_rows.tolist()]

    def name(self, row: int) -> str:
        """Return the sample's file or first array, and the sample's part of it, as an index of
        Python."""
        number = int(self._piece_of(np.array([row]))[0])
        piece = self._pieces[number]
        if self._is_by_file:
            return piece.name
        windows = next(iter(piece.parts.values())).windows
        return f"{piece.name}{windows.label(row + self._offset(number))}"


@dataclass(eq=False)
class _PartReader:
    """Reads the part of one field that a piece holds.

    extent: number of its first chunk's extent. sizes: of its extents, in bytes.
    """

    field: str
    part: ArrayPart
    piece: ArrayPiece
    extent: int
    sizes: Ints
    are_mapped: bool

    def __post_init__(self) -> None:
        self._shape, self._dtype = self.part.grid.chunk, self.part.dtype.newbyteorder("=")
        self._chunk_bytes = math.prod(self._shape) * self._dtype.itemsize

    @cached_property
    def decoder(self) -> ChunkDecoder:
        """Return the decoder, which is made at the first chunk."""
        return self.part.open_decoder()

    @cached_property
    def _are_chunks(self) -> bool:
        """True if each sample is one chunk, and no two samples share one."""
        windows = self.part.windows
        axes = zip(windows.stride, self._shape, windows.counts, strict=True)
        are_aligned = all(count == 1 or step % length == 0 for step, length, count in axes)
        return windows.window == self._shape and are_aligned and windows.repeat == 1

    @cached_property
    def _uses(self) -> list[int]:
        """How many samples of the piece need each stored chunk."""
        first, end = self.piece.first, self.piece.first + self.piece.samples
        chunks, uses = self.part.grid.uses(self.part.windows, first, end)
        found: list[int] = uses[np.searchsorted(chunks, self.part.numbers)].tolist()
        return found

    def reason(self, error: ValueError) -> str:
        """Return why samples are bad; re-raise an error that doesn't come from damaged bytes."""
        if isinstance(error, PenstockError):
            raise error
        return f"{self.field}: a chunk is damaged: {error}"

    def _parts(self, samples: Ints, crop: ColumnCrop | None) -> tuple[Ints, Shape]:
        """Return where samples, or parts of them, begin in the grid, and their lengths."""
        starts, lengths = self.part.windows.parts(samples, crop)
        starts[:, 0] -= self.part.first_row
        return starts, lengths

    def _extents(self, chunks: Ints) -> Ints:
        """Return the extents of chunks; _FILL for those that aren't stored."""
        numbers = self.part.numbers
        if not len(numbers):
            return np.full(len(chunks), _FILL)
        at = np.minimum(np.searchsorted(numbers, chunks), len(numbers) - 1)
        return np.where(numbers[at] == chunks, at + self.extent, _FILL)

    def needs(
        self, samples: Ints, crop: ColumnCrop | None
    ) -> tuple[list[int], list[int], list[int]]:
        """Return the bytes that samples need: extents, and bytes [start, end) of each."""
        starts, lengths = self._parts(samples, crop)
        if self.part.is_ranged:
            begins, ends = PartRanges(self._shape, self.part.dtype, lengths).bounds(starts)
            return [self.extent] * len(begins), begins, ends
        extents = self._extents(np.unique(self.part.grid.touched(starts, lengths).chunks))
        extents = extents[extents != _FILL]
        return extents.tolist(), [0] * len(extents), self.sizes[extents - self.extent].tolist()

    # -- bytes

    def plain(self, data: ShardData) -> StridedRows | None:
        """Return the location of samples that are runs of whole rows of a mapped array."""
        windows, dtype = self.part.windows, self.part.dtype
        if (
            windows.repeat > 1
            or windows.window[1:] != windows.shape[1:]
            or (view := data.view(self.extent, size_bytes=0)) is None
        ):
            return None
        row_bytes = math.prod(windows.shape[1:]) * dtype.itemsize
        return StridedRows(
            data=view,
            stride_bytes=windows.stride[0] * row_bytes,
            row_bytes=windows.window[0] * row_bytes,
            dtype=dtype,
        )

    def encoded(self, extents: Sequence[int], data: ShardData) -> list[Encoded]:
        """Return the bytes of chunks, mapped if that costs less than reading them."""
        if self.are_mapped:
            views = [view for extent in extents if (view := data.view(extent)) is not None]
            if len(views) == len(extents):
                return views
        return data.read(extents)

    # -- samples

    def gather(
        self,
        samples: Ints,
        out: Numbers,
        places: Places,
        data: ShardData,
        wrong: dict[int, str],
        corners: Ints | None,
    ) -> None:
        """Read samples, or parts of them, into out[places]."""
        crop = None if corners is None else ColumnCrop(corners, out.shape[1:])
        starts, lengths = self._parts(samples, crop)
        if self.part.windows.is_step:
            out = out[:, None]
        if self.part.is_ranged:
            self._gather_numbers(starts, lengths, out, places, data)
            return
        places = place_numbers(places, len(samples))
        touched = self.part.grid.touched(starts, lengths)
        is_same = out.dtype == self._dtype and out[:1].flags.c_contiguous
        is_raw = self.decoder.is_raw
        if self._are_chunks and crop is None and is_same and not (is_raw and lengths[0] == 1):
            self._gather_chunks(self._extents(touched.chunks), out, places, data, wrong)
            return
        order = np.argsort(touched.chunks, kind="stable")
        rows, chunks = touched.samples[order], touched.chunks[order]
        begins, slots = starts[rows] - touched.corners[order], places[rows]
        is_first = np.ones(len(chunks), np.bool_)
        np.not_equal(chunks[1:], chunks[:-1], out=is_first[1:])
        firsts = np.flatnonzero(is_first)
        extents = self._extents(chunks[firsts])
        copier = PartCopier(begins, lengths, out, slots, self._shape)
        if is_raw and is_same and copier.are_steps and self._are_complete(extents):
            ranges = PartRanges(self._shape, self._dtype, lengths)
            if ranges.read_into(data, self._extents(chunks).tolist(), begins, out, slots):
                return
        stored: dict[int, tuple[int, int]] = {}
        bounds = pairwise([*firsts.tolist(), len(rows)])
        for extent, (low, high) in zip(extents.tolist(), bounds, strict=True):
            if extent == _FILL:
                copier.copy(np.broadcast_to(np.array(self.part.fill), self._shape), low, high)
            else:
                stored[extent] = low, high
        for extent, chunk in self._chunks(stored, data):
            low, high = stored[extent]
            if not isinstance(chunk, ValueError):
                copier.copy(chunk, low, high)
                continue
            out[slots[low:high]] = 0
            mark(wrong, rows[low:high], self.reason(chunk))

    def _are_complete(self, extents: Ints) -> bool:
        """Return True if chunks of bare numbers are stored, with the right size."""
        if (extents == _FILL).any():
            return False
        return bool((self.sizes[extents - self.extent] == self._chunk_bytes).all())

    def _gather_numbers(
        self, starts: Ints, lengths: Shape, out: Numbers, places: Places, data: ShardData
    ) -> None:
        """Copy parts out of the mapped numbers of an array, or read their byte ranges."""
        view, dtype = None, self.part.dtype
        if self.are_mapped:
            touched = len(starts) * math.prod(lengths) * dtype.itemsize
            view = data.view(self.extent, size_bytes=min(touched, int(self.sizes[0])))
        if view is not None:
            array = self.decoder.decode(view)
            if not array.flags.aligned and array.dtype == out.dtype and out.flags.c_contiguous:
                # In an archive, numbers may begin at any byte: copy them as opaque bytes.
                array, out = array.view(f"V{out.itemsize}"), out.view(f"V{out.itemsize}")
            PartCopier(starts, lengths, out, places, self._shape).copy(array, 0, len(starts))
            return
        ranges = PartRanges(self._shape, dtype, lengths)
        numbers = place_numbers(places, len(starts))
        if ranges.read_into(data, [self.extent] * len(starts), starts, out, numbers):
            return
        begins, ends = ranges.bounds(starts)
        encoded = iter(data.read_parts([self.extent] * len(begins), begins, ends))
        for place in numbers.tolist():
            ranges.copy(encoded, out[place])

    def _gather_chunks(
        self, extents: Ints, out: Numbers, places: Ints, data: ShardData, wrong: dict[int, str]
    ) -> None:
        """Decode samples that are one chunk each directly into their slots. extents: one for each
        sample."""
        stored = np.flatnonzero(extents != _FILL)
        if len(stored) < len(extents):
            out[places[extents == _FILL]] = self.part.fill
        slots = [out[place] for place in places[stored].tolist()]
        decoded = self._decode(extents[stored].tolist(), data, slots)
        for row, slot, (_, chunk) in zip(stored.tolist(), slots, decoded, strict=True):
            if isinstance(chunk, ValueError):
                slot[...] = 0
                wrong.setdefault(row, self.reason(chunk))

    # -- chunks

    def _chunks(
        self, wanted: Mapping[int, tuple[int, int]], data: ShardData
    ) -> Iterator[tuple[int, Numbers | ValueError]]:
        """Yield decoded chunks with their extents, in any order, or the error of a damaged one.
        wanted: by extent, bounds of the samples of this call that need it."""
        extents = [*wanted]
        uses = [self._uses[extent - self.extent] for extent in extents]
        if max(uses, default=0) <= 1:
            return self._decode(extents, data)
        return data.decode_all(
            extents,
            lambda some: [chunk for _, chunk in self._decode(some, data)],
            uses=uses,
            taken=[high - low for low, high in wanted.values()],
            size_bytes=self._chunk_bytes,
        )

    def _decode(
        self, extents: Sequence[int], data: ShardData, slots: Sequence[Numbers] = ()
    ) -> Iterator[tuple[int, Numbers | ValueError]]:
        """Yield decoded chunks with their extents, or the error of a damaged one. Chunks are
        decoded into slots if they are given."""
        decoder, shape, dtype = self.decoder, self._shape, self._dtype
        has_room = decoder.is_direct and not slots
        step = max(1, _READ_BYTES // self._chunk_bytes)
        for first in range(0, len(extents), step):
            some = extents[first : first + step]
            for place, encoded in enumerate(self.encoded(some, data), first):
                slot = data.room(shape, dtype) if has_room else slots[place] if slots else None
                try:
                    yield extents[place], decoder.decode(encoded, slot)
                except ValueError as error:
                    if isinstance(error, PenstockError):
                        raise
                    yield extents[place], error
