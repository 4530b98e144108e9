"""Recognise and read datasets of NumPy's files: .npy whose first axis is samples, and .npz.

Samples come out of maps, by ranges of bytes, or out of decoded members. A dataset is recognised by
the names at its root or in its URL.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from penstock.cache import CorruptShardError, PenstockError
from penstock.readers.fields import (
    DenseColumn,
    RaggedColumn,
    array_form,
    may_not_fit,
    number_dtype,
    put_fitting,
)
from penstock.readers.files import extension, is_passed_over
from penstock.readers.formats.array_windows import PartCopier, StepCopier, place_numbers
from penstock.readers.formats.chunked import ChunkFormat
from penstock.readers.formats.format import Snapshot
from penstock.readers.formats.local_files import REINDEX
from penstock.readers.formats.npy.npy_pieces import read_notes
from penstock.readers.formats.open_shard import StridedRows

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields import Column
    from penstock.readers.formats.candidates import Candidates
    from penstock.readers.formats.chunked import ChunkedShardFacts, ChunkReader, Crops, ShardData
    from penstock.readers.formats.format import Format, Indexing, Listing
    from penstock.readers.formats.npy.npy_pieces import Slab
    from penstock.readers.formats.open_shard import Places
    from penstock.readers.origin import Entry, Origin
    from penstock.readers.types import Encoded

    Ints = NDArray[np.int64]

TABLES_OF_FILES = frozenset((b"metadata.csv", b"metadata.jsonl", b"metadata.parquet"))
"""Beside them a folder's files are what they list."""


def are_files(origin: Origin, extensions: Collection[str]) -> bool:
    """Whether all files that a URL names have one of these extensions; or whether some at the root
    of a folder have, and there is nothing that they may belong to: images, folders, a table of
    files."""
    names = origin.names()
    some = [name for name in names.files if not is_passed_over(name.rpartition(b"/")[2])]
    ours = [name for name in some if extension(name) in extensions]
    if origin.selection is not None:
        return bool(ours) and len(ours) == len(some)
    if not ours or TABLES_OF_FILES.intersection(some):
        return False
    from penstock.readers.formats.folder import IMAGES  # most folders hold no such files

    folders = [name for name in names.folders if not is_passed_over(name)]
    return not folders and not any(extension(name) in IMAGES for name in some)


_MOST_MAPS = 64
"""Files of a shard that are mapped: of more, which are small, a read costs less than a map."""

_MOST_RUNS = 4096
_RUN_BYTES = 2**16
"""What a range of its own costs, as bytes that are read in vain."""


class NpyReader:
    """Reads one shard. Raises CorruptShardError for notes that don't fit its extents."""

    def __init__(self, shard: ChunkedShardFacts) -> None:
        self._fields = list(shard.schema)
        self._pieces, self._is_by_file = read_notes(
            shard.notes, fields=len(self._fields), samples=shard.samples
        )
        self._types = shard.schema
        stored = {
            name: np.result_type(*{each.slabs[number].codec.dtype for each in self._pieces})
            for number, name in enumerate(self._fields)
        }
        # Fields whose numbers may not fit their type: these are looked at when they are cast.
        self._cast = {n: d for n, d in stored.items() if may_not_fit(self._types[n], d)}
        self._bounds = np.cumsum([0, *(piece.samples for piece in self._pieces)])
        self._are_mapped = len(np.unique(shard.extents.files)) <= _MOST_MAPS
        sizes = [_stored_bytes(slab) for piece in self._pieces for slab in piece.slabs]
        told = shard.extents.sizes.tolist()
        if len(told) != len(sizes) or any(
            wanted is not None and wanted != got for wanted, got in zip(sizes, told, strict=True)
        ):
            raise CorruptShardError(f"An index of arrays doesn't fit its extents. {REINDEX}")
        self._sizes = told

    def needs(self, rows: Ints, fields: Sequence[str], crops: Crops) -> list[int]:
        """The extents that samples lie in."""
        del crops
        wanted = [self._fields.index(name) for name in fields]
        pieces = np.unique(self._piece_of(rows)).tolist()
        return [self._extent(piece, field) for piece in pieces for field in wanted]

    def needs_parts(
        self, rows: Ints, fields: Sequence[str], crops: Crops
    ) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """The bytes that samples need, or parts of them."""
        extents: list[int] = []
        starts: list[int] = []
        ends: list[int] = []
        for piece, here in self._by_piece(rows):
            for name in fields:
                field, crop = self._fields.index(name), crops.get(name)
                slab, extent = self._pieces[piece].slabs[field], self._extent(piece, field)
                begins, stops = [0], [self._sizes[extent]]
                if slab.packed is None and not slab.codec.is_fortran:
                    first = self._starts(piece, field, rows[here])
                    lengths = slab.windows.window
                    if crop is not None:
                        first[:, slab.windows.is_step :] += crop.corners[here]
                        lengths = (*lengths[: slab.windows.is_step], *crop.shape)
                    begins, stops = _Ranges(slab, lengths).of(first)
                extents += [extent] * len(begins)
                starts += begins
                ends += stops
        return extents, starts, ends

    def lengths(self, field: str, rows: Ints) -> Ints:
        """First lengths of samples."""
        number = self._fields.index(field)
        of_pieces = [piece.slabs[number].windows.sample_shape[0] for piece in self._pieces]
        return np.array(of_pieces, np.int64)[self._piece_of(rows)]

    def plain(self, field: str, *, data: ShardData) -> StridedRows | None:
        """Where samples lie that are runs of whole rows of one mapped array."""
        number = self._fields.index(field)
        slab, windows = self._pieces[0].slabs[number], self._pieces[0].slabs[number].windows
        if (
            len(self._pieces) > 1
            or slab.packed is not None
            or slab.codec.is_fortran
            or field in self._cast
            or windows.repeat > 1
            or windows.window[1:] != windows.shape[1:]
            or (view := data.view(number, size_bytes=0)) is None
        ):
            return None
        row_bytes = math.prod(windows.shape[1:]) * slab.codec.dtype.itemsize
        return StridedRows(
            data=view,
            stride_bytes=windows.stride[0] * row_bytes,
            row_bytes=windows.window[0] * row_bytes,
            dtype=slab.codec.dtype,
        )

    def gather(
        self,
        field: str,
        rows: Ints,
        out: NDArray[Any],
        places: Places,
        *,
        data: ShardData,
        wrong: dict[int, str],
        corners: Ints | None = None,
    ) -> None:
        """Read samples, or parts of them, into their slots."""
        number = self._fields.index(field)
        stored = self._cast.get(field)
        if stored is not None:
            raw = np.empty((len(rows), *out.shape[1:]), stored)
            self._gather_all(number, rows, raw, slice(0, len(rows)), data, wrong, corners)
            for row, reason in put_fitting(field, self._types[field], raw, out, places).items():
                wrong.setdefault(row, reason)
            return
        self._gather_all(number, rows, out, places, data, wrong, corners)

    def _gather_all(
        self,
        number: int,
        rows: Ints,
        out: NDArray[Any],
        places: Places,
        data: ShardData,
        wrong: dict[int, str],
        corners: Ints | None,
    ) -> None:
        """Read samples of any piece as they are stored, cast to the dtype of out."""
        if len(self._pieces) == 1:
            self._gather(0, number, rows, out, places, None, data, wrong, corners)
            return
        where = place_numbers(places, len(rows))
        for piece, here in self._by_piece(rows):
            part = None if corners is None else corners[here]
            self._gather(piece, number, rows[here], out, where[here], here, data, wrong, part)

    def read_rows(
        self, rows: Ints, fields: Sequence[str], *, data: ShardData, wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """Read fields whose samples differ in shape; others as columns of their own."""
        found: dict[str, Column] = {}
        for name in fields:
            form = array_form(self._types[name])
            if form is not None and form.is_ragged:
                none = (0,) * len(form.shape) if form.rest is None else (0, *form.rest)
                nothing = np.empty(none, form.dtype)
                samples = self._samples(name, rows, data, wrong, nothing)
                shapes = None if form.rest is not None else np.empty((0, len(form.shape)), np.int64)
                like = RaggedColumn(
                    np.empty((0, *(form.rest or ())), form.dtype), np.zeros(1, np.int64), shapes
                )
                found[name] = RaggedColumn.of(samples, like=like)
                continue
            dtype = form.dtype if form is not None else number_dtype(self._types[name])
            out = np.zeros((len(rows), *(form.fixed_shape if form is not None else ())), dtype)
            self.gather(name, rows, out, slice(0, len(rows)), data=data, wrong=wrong)
            found[name] = DenseColumn(out)
        return found

    def name(self, row: int) -> str:
        """The file and where the sample begins in its first array, as Python would index it."""
        number = int(self._piece_of(np.array([row]))[0])
        piece = self._pieces[number]
        if self._is_by_file:
            return piece.name
        windows = piece.slabs[0].windows
        (start,) = windows.starts(np.array([row - self._bounds[number] + piece.first])).tolist()
        if windows.is_step:
            return f"{piece.name}[{start[0]}]"
        axes = zip(start, windows.window, windows.shape, strict=True)
        told = (":" if part == all else f"{low}:{low + part}" for low, part, all in axes)
        return f"{piece.name}[{', '.join(told)}]"

    # -- pieces

    def _piece_of(self, rows: Ints) -> Ints:
        found: Ints = np.searchsorted(self._bounds, rows, side="right") - 1
        return found

    def _extent(self, piece: int, field: int) -> int:
        return piece * len(self._fields) + field

    def _by_piece(self, rows: Ints) -> Iterator[tuple[int, Ints]]:
        """The pieces that rows lie in, and the places of each one's among them."""
        pieces = self._piece_of(rows)
        order = np.argsort(pieces, kind="stable")
        found, firsts = np.unique(pieces[order], return_index=True)
        yield from zip(found.tolist(), np.split(order, firsts[1:]), strict=True)

    def _starts(self, piece: int, field: int, rows: Ints) -> Ints:
        """Where samples begin in what the extent of a piece holds."""
        told = self._pieces[piece]
        starts = told.slabs[field].windows.starts(rows - self._bounds[piece] + told.first)
        starts[:, 0] -= told.slabs[field].rows[0]
        return starts

    def _gather(
        self,
        piece: int,
        field: int,
        rows: Ints,
        out: NDArray[Any],
        places: Places,
        here: Ints | None,
        data: ShardData,
        wrong: dict[int, str],
        corners: Ints | None,
    ) -> None:
        """Read samples of one piece. here: their places among the rows that were asked for; None:
        they are all of them."""
        told = self._pieces[piece]
        slab, extent = told.slabs[field], self._extent(piece, field)
        windows = slab.windows
        starts = self._starts(piece, field, rows)
        lengths = windows.window
        if windows.is_step:
            out = out[:, None]
        if corners is not None:
            starts[:, windows.is_step :] += corners
            lengths = out.shape[1:]
        try:
            array = self._array(
                slab, extent, lengths, uses=told.samples, taken=len(rows), data=data
            )
        except ValueError as error:
            where = place_numbers(places, len(rows))
            out[where] = 0
            for row in range(len(rows)) if here is None else here.tolist():
                wrong.setdefault(row, self._reason(field, error))
            return
        if array is None:
            self._read_parts(
                slab, extent, starts, lengths, out, place_numbers(places, len(rows)), data
            )
        else:
            _copy(array, starts, lengths, out, places)

    def _array(
        self,
        slab: Slab,
        extent: int,
        lengths: Sequence[int],
        *,
        uses: int,
        taken: int,
        data: ShardData,
    ) -> NDArray[Any] | None:
        """What an extent holds as an array; None where it isn't mapped. Raises ValueError for a
        member that is damaged."""
        if slab.packed is not None:
            return data.decoded(
                extent,
                lambda: _unpacked(slab, data.read([extent])[0]),
                uses=uses,
                taken=taken,
                size_bytes=slab.packed.size_bytes,
            )
        touched = taken * math.prod(lengths) * slab.codec.dtype.itemsize
        view = (
            data.view(extent, size_bytes=min(touched, self._sizes[extent]))
            if self._are_mapped
            else None
        )
        if view is None and slab.codec.is_fortran:
            (view,) = data.read([extent])
        return None if view is None else _as_array(slab, view)

    def _read_parts(
        self,
        slab: Slab,
        extent: int,
        starts: Ints,
        lengths: Sequence[int],
        out: NDArray[Any],
        places: Ints,
        data: ShardData,
    ) -> None:
        """Read the bytes of each sample's part, all at once, and copy them into their slots."""
        ranges = _Ranges(slab, lengths)
        begins, ends = ranges.of(starts)
        if ranges.are_large and slab.codec.dtype == out.dtype and out.flags.c_contiguous:
            slots = [out[place].reshape(-1).view(np.uint8) for place in places.tolist()]
            data.read_into([extent] * len(begins), begins, slots)
            return
        found = iter(data.read_parts([extent] * len(begins), begins, ends))
        for place in places.tolist():
            ranges.copy(found, out[place])

    def _samples(
        self, name: str, rows: Ints, data: ShardData, wrong: dict[int, str], nothing: NDArray[Any]
    ) -> list[NDArray[Any]]:
        """Whole files' arrays, whose shapes differ. nothing: what a damaged one is."""
        field = self._fields.index(name)
        pieces = self._piece_of(rows).tolist()
        arrays: dict[int, NDArray[Any]] = {}
        unread = []
        for piece in dict.fromkeys(pieces):
            slab, extent = self._pieces[piece].slabs[field], self._extent(piece, field)
            try:
                array = self._array(slab, extent, slab.windows.window, uses=1, taken=1, data=data)
            except ValueError as error:
                array = nothing
                for row, where in enumerate(pieces):
                    if where == piece:
                        wrong.setdefault(row, self._reason(field, error))
            if array is None:
                unread.append(piece)
            else:
                arrays[piece] = array
        found = data.read([self._extent(piece, field) for piece in unread]) if unread else []
        for piece, encoded in zip(unread, found, strict=True):
            arrays[piece] = _as_array(self._pieces[piece].slabs[field], encoded)
        type = self._types[name]
        for piece, array in arrays.items():
            if name in self._cast:
                room = np.zeros((1, *array.shape), nothing.dtype)
                unfit = put_fitting(name, type, array[None], room, slice(0, 1))
                arrays[piece] = nothing if unfit else room[0]
                for row in [row for row, where in enumerate(pieces) if unfit and where == piece]:
                    wrong.setdefault(row, unfit[0])
        return [arrays[piece].astype(nothing.dtype, copy=False) for piece in pieces]

    def _reason(self, field: int, error: ValueError) -> str:
        """Why samples are bad. Raises the error again where it isn't the bytes' fault."""
        if isinstance(error, PenstockError):
            raise error
        return f"{self._fields[field]}: {error}"


def _stored_bytes(slab: Slab) -> int | None:
    """The bytes of an extent; None of what is compressed."""
    if slab.packed is not None:
        return None
    return math.prod(slab.shape) * slab.codec.dtype.itemsize


def _as_array(slab: Slab, data: Encoded) -> NDArray[Any]:
    """Bare numbers as an array."""
    flat = data.view(slab.codec.dtype)
    if slab.codec.is_fortran:
        return flat.reshape(slab.shape[::-1]).T
    return flat.reshape(slab.shape)


def _unpacked(slab: Slab, data: Encoded) -> NDArray[Any]:
    """A compressed member, decoded. Raises ValueError for one that is damaged."""
    packed = slab.packed
    assert packed is not None
    inflate = zlib.decompressobj(-15)
    try:
        whole = inflate.decompress(data.data, packed.size_bytes + 1)
    except zlib.error as error:
        raise ValueError(f"a compressed array is damaged: {error}") from None
    if len(whole) != packed.size_bytes or zlib.crc32(whole) != packed.crc32:
        raise ValueError("a compressed array is damaged: its CRC-32 or length is wrong")
    return _as_array(slab, np.frombuffer(whole, np.uint8, offset=packed.head_bytes))


def _copy(
    array: NDArray[Any], starts: Ints, lengths: Sequence[int], out: NDArray[Any], places: Places
) -> None:
    """Copy parts of an array into out[places]."""
    if not array.flags.aligned and array.dtype == out.dtype and out.flags.c_contiguous:
        # In an archive numbers begin anywhere. As bare bytes they are copied as they lie.
        array, out = array.view(f"V{out.itemsize}"), out.view(f"V{out.itemsize}")
    is_steps = lengths[0] == 1 and tuple(lengths[1:]) == array.shape[1:]
    is_native = array.dtype == out.dtype and out.flags.c_contiguous and array.flags.c_contiguous
    if is_steps and is_native and isinstance(places, slice):
        slots = out[places].reshape(len(starts), *array.shape[1:])
        # Rows were checked; a mode other than "raise" writes straight into the slots.
        np.take(array, starts[:, 0], axis=0, out=slots, mode="clip")
        return
    copier = StepCopier if is_steps else PartCopier
    copier(starts, lengths, out, place_numbers(places, len(starts))).copy(array, 0, len(starts))


class _Ranges:
    """Which bytes of a slab a part of it takes, wherever it begins: one range, or one for each run
    of numbers in a row where that is less. lengths: of the part."""

    def __init__(self, slab: Slab, lengths: Sequence[int]) -> None:
        self._dtype, self._lengths = slab.codec.dtype, tuple(lengths)
        item = slab.codec.dtype.itemsize
        strides = [math.prod(slab.shape[axis + 1 :]) * item for axis in range(len(slab.shape))]
        self._strides = np.array(strides, np.int64)
        # From which axis on one range has all: the others' steps are ranges of their own.
        most = [axis for axis in range(len(lengths) + 1) if self._runs(axis) <= _MOST_RUNS]
        self._axis = min(most, key=self._cost)
        self._run_bytes = self._cover(self._axis)
        self._offsets: Ints = np.zeros(1, np.int64)
        if self._axis:
            steps = np.indices(self._lengths[: self._axis]).reshape(self._axis, -1)
            self._offsets = self._strides[: self._axis] @ steps
        self._inner = self._lengths[self._axis :], tuple(strides[self._axis :])

    @property
    def are_large(self) -> bool:
        """Whether each part is one range of nothing else, and worth a read of its own."""
        size_bytes = self._runs(len(self._lengths)) * self._dtype.itemsize
        return not self._axis and self._run_bytes == size_bytes >= _RUN_BYTES

    def _runs(self, axis: int) -> int:
        return math.prod(self._lengths[:axis])

    def _cover(self, axis: int) -> int:
        """Bytes from the first number behind an axis to the end of the last."""
        steps = np.array(self._lengths[axis:], np.int64) - 1
        return int(steps @ self._strides[axis:]) + self._dtype.itemsize

    def _cost(self, axis: int) -> int:
        return self._runs(axis) * (self._cover(axis) + _RUN_BYTES)

    def of(self, starts: Ints) -> tuple[list[int], list[int]]:
        """First and end bytes of the ranges of parts that begin there, part by part."""
        begins = ((starts @ self._strides)[:, None] + self._offsets).reshape(-1)
        return begins.tolist(), (begins + self._run_bytes).tolist()

    def copy(self, found: Iterator[Encoded], slot: NDArray[Any]) -> None:
        """Copy the next part's ranges into its slot."""
        inner, strides = self._inner
        dtype = self._dtype
        if slot.dtype == dtype and slot.flags.c_contiguous:  # wherever they begin, see `_copy`
            dtype = np.dtype(f"V{dtype.itemsize}")
            slot = slot.view(dtype)
        for place in np.ndindex(self._lengths[: self._axis]):
            slot[place] = np.ndarray(inner, dtype, next(found).data, 0, strides)


class NpyListing:
    """Files of arrays, by name; nothing of them was read."""

    def __init__(self, origin: Origin, entries: list[Entry]) -> None:
        self._origin, self._entries = origin, entries

    def snapshot(self) -> Snapshot:
        """What an index notes of the files."""
        return Snapshot.of(self._entries, {})

    def candidates(self, *, workers: int) -> Candidates:
        """The shards, as the headers of the files tell them."""
        from penstock.readers.formats.candidates import Candidates
        from penstock.readers.formats.npy.npy_fields import choose_samples, read_groups
        from penstock.readers.formats.npy.npy_pieces import cut_shards

        groups = read_groups(self._origin, self._entries, workers=workers)
        chosen = choose_samples(self._origin, groups)
        return Candidates.of_chunks(
            chosen.schema,
            list(cut_shards(chosen)),
            left_out=groups[0].left_out,
            unnamed=chosen.too_short,
        )

    def counterparts(
        self, number: int, name: bytes, *, total: int, workers: int
    ) -> Iterator[tuple[Candidates, int]]:
        """The shard of the same number, if there are as many."""
        del name
        candidates = self.candidates(workers=workers)
        if len(candidates.chunked) == total:
            yield candidates, number


@dataclass(frozen=True, slots=True)
class NpyIndexing:
    """How arrays get an index: the files are looked at each time (name, size, time), and where any
    differs all headers are read anew."""

    keeps_facts: ClassVar[bool] = False

    def list(self, origin: Origin) -> NpyListing:
        """List the files. Raises DatasetNotFoundError, ConfigError, DatasetError, FetchError."""
        from penstock.readers.formats.npy.npy_fields import list_entries

        return NpyListing(origin, list_entries(origin))

    def is_current(
        self, origin: Origin, snapshot: Snapshot, listing: Callable[[], Listing]
    ) -> bool:
        """Whether these are the very files that were indexed."""
        del origin
        return listing().snapshot().fingerprint == snapshot.fingerprint


@dataclass(frozen=True, slots=True)
class NpyFormat(ChunkFormat):
    """Files called *.npy or *.npz."""

    name: ClassVar[str] = "npy"
    least_sample_bytes: ClassVar[int] = 0
    indexing: ClassVar[Indexing | None] = NpyIndexing()
    takes_corners: ClassVar[bool] = True

    def recognises(self, origin: Origin) -> bool:
        """Whether such files were named, or lie in a folder with nothing that they may belong to.
        A folder of .npy files alone is one of samples, unless it is said what of them is one."""
        if not are_files(origin, ("npy", "npz")):
            return False
        if origin.selection is not None or origin.arrangement.sampling:
            return True
        return not any(extension(name) == "npy" for name in origin.names().files)

    def open_chunks(self, shard: ChunkedShardFacts) -> ChunkReader:
        """Open a shard."""

        return NpyReader(shard)


FORMAT: Format = NpyFormat()
