"""Recognise and read datasets of NumPy files: .npy files whose first axis is samples, and .npz
files.

Samples are copied from mapped files, read as byte ranges, or copied from decompressed members of an
archive. A dataset is recognised by the names at its root or in its URL.
"""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from penstock.cache import ConfigError, CorruptShardError, PenstockError
from penstock.readers.byte_source import REINDEX
from penstock.readers.fieldtypes import (
    ColumnCrop,
    DenseColumn,
    RaggedColumn,
    array_form,
    may_not_fit,
    number_dtype,
    put_fitting,
)
from penstock.readers.files import extension, is_passed_over
from penstock.readers.formats.array_windows import PartCopier, StepCopier, place_numbers
from penstock.readers.formats.chunked import ChunkedDataset, ChunkFormat, ChunkReader
from penstock.readers.formats.npy.npy_pieces import read_notes
from penstock.readers.formats.open_shard import StridedRows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Column
    from penstock.readers.formats.chunked import ChunkedShardFacts, Crops, DatasetFiles, ShardData
    from penstock.readers.formats.npy.npy_pieces import Slab
    from penstock.readers.formats.open_shard import Places
    from penstock.readers.origin import Origin
    from penstock.readers.types import Encoded

    Ints = NDArray[np.int64]

_FILE_TABLES = frozenset((b"metadata.csv", b"metadata.jsonl", b"metadata.parquet"))
"""If a folder holds one of these tables, the table describes the folder's files."""


def _has_arrays(origin: Origin) -> bool:
    """Return True if a dataset consists of .npy or .npz files: if the URL names only such files, or
    if its folder holds some and nothing that they could belong to (images, subfolders, a table of
    files)."""
    names = origin.names()
    files = [name for name in names.files if not is_passed_over(name.rpartition(b"/")[2])]
    arrays = [name for name in files if extension(name) in ("npy", "npz")]
    if origin.selection is not None:
        return bool(arrays) and len(arrays) == len(files)
    if not arrays or _FILE_TABLES.intersection(files):
        return False
    from penstock.readers.formats.file_kinds import IMAGES  # most folders hold no arrays

    folders = [name for name in names.folders if not is_passed_over(name)]
    return not folders and not any(extension(name) in IMAGES for name in files)


_MAX_MAPS = 64
"""The most files of one shard that are mapped. The files of a shard that has more are small, and
reading one is cheaper than mapping it."""

_MAX_RANGES = 4096
RANGE_COST_BYTES = 2**16
"""The cost of one more range, expressed as unneeded bytes that could be read in the same time."""


class NpyReader(ChunkReader):
    """Reads the samples of one shard. Raises CorruptShardError if the notes don't match the
    extents."""

    takes_corners: ClassVar[bool] = True

    def __init__(self, shard: ChunkedShardFacts) -> None:
        self._fields = list(shard.schema)
        self._pieces, self._is_by_file = read_notes(
            shard.notes, fields=len(self._fields), samples=shard.samples
        )
        self._types = shard.schema
        stored = {
            name: np.result_type(*{piece.slabs[number].codec.dtype for piece in self._pieces})
            for number, name in enumerate(self._fields)
        }
        # The stored dtypes of fields whose numbers may not fit their type: casts check them.
        self._cast = {n: d for n, d in stored.items() if may_not_fit(self._types[n], d)}
        self._bounds = np.cumsum([0, *(piece.samples for piece in self._pieces)])
        self._are_mapped = len(np.unique(shard.extents.files)) <= _MAX_MAPS
        slabs = [slab for piece in self._pieces for slab in piece.slabs]
        self._sizes = shard.extents.sizes.tolist()
        if len(self._sizes) != len(slabs) or any(
            slab.packed is None and slab.numbers_bytes != size
            for slab, size in zip(slabs, self._sizes, strict=True)
        ):
            raise CorruptShardError(
                f"The index entry of a shard of arrays doesn't match its extents. {REINDEX}"
            )

    def needs(self, rows: Ints, fields: Sequence[str], crops: Crops) -> list[int]:
        """Return the extents that contain the samples."""
        del crops
        numbers = [self._fields.index(name) for name in fields]
        pieces = np.unique(self._piece_of(rows)).tolist()
        return [self._extent(piece, field) for piece in pieces for field in numbers]

    def needs_parts(
        self, rows: Ints, fields: Sequence[str], crops: Crops
    ) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """Return the byte ranges that hold the samples, or the cropped parts of them."""
        extents: list[int] = []
        starts: list[int] = []
        ends: list[int] = []
        for piece, at in self._by_piece(rows):
            for name in fields:
                field, crop = self._fields.index(name), crops.get(name)
                slab, extent = self._pieces[piece].slabs[field], self._extent(piece, field)
                begins, stops = [0], [self._sizes[extent]]
                if slab.packed is None and not slab.codec.is_fortran:
                    part = None if crop is None else crop.take(at)
                    first, lengths = self._parts(piece, field, rows[at], part)
                    begins, stops = _PartRanges(slab, lengths).bounds(first)
                extents += [extent] * len(begins)
                starts += begins
                ends += stops
        return extents, starts, ends

    def lengths(self, field: str, rows: Ints) -> Ints:
        """Return the lengths of samples along their first axis, int64, shape (n,)."""
        number = self._fields.index(field)
        lengths = [piece.slabs[number].windows.sample_shape[0] for piece in self._pieces]
        return np.array(lengths, np.int64)[self._piece_of(rows)]

    def plain(self, field: str, *, data: ShardData) -> StridedRows | None:
        """Return the location of a field's samples if they are runs of whole rows of one mapped
        array; None otherwise."""
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
        target, slots = out, places
        if stored is not None:
            target, slots = np.empty((len(rows), *out.shape[1:]), stored), slice(0, len(rows))
        if len(self._pieces) == 1:
            self._gather(0, number, rows, target, slots, None, data, wrong, corners)
        else:
            where = place_numbers(slots, len(rows))
            for piece, at in self._by_piece(rows):
                part = None if corners is None else corners[at]
                self._gather(piece, number, rows[at], target, where[at], at, data, wrong, part)
        if stored is not None:
            for row, reason in put_fitting(field, self._types[field], target, out, places).items():
                wrong.setdefault(row, reason)

    def read_rows(
        self, rows: Ints, fields: Sequence[str], *, data: ShardData, wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """Read fields whose samples differ in shape; read other fields into new arrays."""
        columns: dict[str, Column] = {}
        for name in fields:
            form = array_form(self._types[name])
            if form is not None and form.is_ragged:
                shape = (0,) * len(form.shape) if form.rest is None else (0, *form.rest)
                samples = self._samples(name, rows, data, wrong, np.empty(shape, form.dtype))
                shapes = None if form.rest is not None else np.empty((0, len(form.shape)), np.int64)
                like = RaggedColumn(
                    np.empty((0, *(form.rest or ())), form.dtype), np.zeros(1, np.int64), shapes
                )
                columns[name] = RaggedColumn.of(samples, like=like)
                continue
            dtype = form.dtype if form is not None else number_dtype(self._types[name])
            out = np.zeros((len(rows), *(form.fixed_shape if form is not None else ())), dtype)
            self.gather(name, rows, out, slice(0, len(rows)), data=data, wrong=wrong)
            columns[name] = DenseColumn(out)
        return columns

    def name(self, row: int) -> str:
        """Return the file and the sample's part of its first array, as an index of Python."""
        number = int(self._piece_of(np.array([row]))[0])
        piece = self._pieces[number]
        if self._is_by_file:
            return piece.name
        sample = row - int(self._bounds[number]) + piece.first
        return f"{piece.name}{piece.slabs[0].windows.label(sample)}"

    # -- pieces

    def _piece_of(self, rows: Ints) -> Ints:
        pieces: Ints = np.searchsorted(self._bounds, rows, side="right") - 1
        return pieces

    def _extent(self, piece: int, field: int) -> int:
        return piece * len(self._fields) + field

    def _by_piece(self, rows: Ints) -> Iterator[tuple[int, Ints]]:
        """Yield each piece that holds some of the rows, with the positions of these rows."""
        pieces = self._piece_of(rows)
        order = np.argsort(pieces, kind="stable")
        numbers, firsts = np.unique(pieces[order], return_index=True)
        yield from zip(numbers.tolist(), np.split(order, firsts[1:]), strict=True)

    def _parts(
        self, number: int, field: int, rows: Ints, crop: ColumnCrop | None
    ) -> tuple[Ints, tuple[int, ...]]:
        """Return where the parts of samples begin in the extent of a piece, and their lengths."""
        piece = self._pieces[number]
        samples = rows - self._bounds[number] + piece.first
        starts, lengths = piece.slabs[field].windows.parts(samples, crop)
        starts[:, 0] -= piece.slabs[field].rows[0]
        return starts, lengths

    def _gather(
        self,
        number: int,
        field: int,
        rows: Ints,
        out: NDArray[Any],
        places: Places,
        at: Ints | None,
        data: ShardData,
        wrong: dict[int, str],
        corners: Ints | None,
    ) -> None:
        """Read samples of one piece. at: positions of these rows among all rows of the call; None
        if they are all of them."""
        piece = self._pieces[number]
        slab, extent = piece.slabs[field], self._extent(number, field)
        crop = None if corners is None else ColumnCrop(corners, out.shape[1:])
        starts, lengths = self._parts(number, field, rows, crop)
        if slab.windows.is_step:
            out = out[:, None]
        try:
            array = self._array(
                slab, extent, lengths, uses=piece.samples, taken=len(rows), data=data
            )
        except ValueError as error:
            out[place_numbers(places, len(rows))] = 0
            for row in range(len(rows)) if at is None else at.tolist():
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
        """Return an extent as an array; None if its file isn't mapped. Raises ValueError if a
        compressed member is damaged."""
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
        """Read the byte ranges of all samples with one call, and copy them into their slots."""
        ranges = _PartRanges(slab, lengths)
        begins, ends = ranges.bounds(starts)
        if ranges.are_large and slab.codec.dtype == out.dtype and out.flags.c_contiguous:
            slots = [out[place].reshape(-1).view(np.uint8) for place in places.tolist()]
            data.read_into([extent] * len(begins), begins, slots)
            return
        encoded = iter(data.read_parts([extent] * len(begins), begins, ends))
        for place in places.tolist():
            ranges.copy(encoded, out[place])

    def _samples(
        self, name: str, rows: Ints, data: ShardData, wrong: dict[int, str], empty: NDArray[Any]
    ) -> list[NDArray[Any]]:
        """Return the arrays of whole files, whose shapes differ. empty: replaces a damaged one."""
        field = self._fields.index(name)
        pieces = self._piece_of(rows).tolist()
        arrays: dict[int, NDArray[Any]] = {}
        unread = []
        for piece in dict.fromkeys(pieces):
            slab, extent = self._pieces[piece].slabs[field], self._extent(piece, field)
            try:
                array = self._array(slab, extent, slab.windows.window, uses=1, taken=1, data=data)
            except ValueError as error:
                array = empty
                for row, number in enumerate(pieces):
                    if number == piece:
                        wrong.setdefault(row, self._reason(field, error))
            if array is None:
                unread.append(piece)
            else:
                arrays[piece] = array
        read = data.read([self._extent(piece, field) for piece in unread]) if unread else []
        for piece, encoded in zip(unread, read, strict=True):
            arrays[piece] = _as_array(self._pieces[piece].slabs[field], encoded)
        for piece, array in arrays.items() if name in self._cast else ():
            fitted = np.zeros((1, *array.shape), empty.dtype)
            unfit = put_fitting(name, self._types[name], array[None], fitted, slice(0, 1))
            arrays[piece] = empty if unfit else fitted[0]
            for row in [row for row, number in enumerate(pieces) if unfit and number == piece]:
                wrong.setdefault(row, unfit[0])
        return [arrays[piece].astype(empty.dtype, copy=False) for piece in pieces]

    def _reason(self, field: int, error: ValueError) -> str:
        """Return why samples are bad; re-raise an error that doesn't come from damaged bytes."""
        if isinstance(error, PenstockError):
            raise error
        return f"{self._fields[field]}: {error}"


def _as_array(slab: Slab, data: Encoded) -> NDArray[Any]:
    """Return the bytes of numbers as an array of the slab's shape."""
    flat = data.view(slab.codec.dtype)
    if slab.codec.is_fortran:
        return flat.reshape(slab.shape[::-1]).T
    return flat.reshape(slab.shape)


def _unpacked(slab: Slab, data: Encoded) -> NDArray[Any]:
    """Decompress a member of an archive. Raises ValueError if it is damaged."""
    packed = slab.packed
    assert packed is not None
    inflate = zlib.decompressobj(-15)
    try:
        whole = inflate.decompress(data.data, packed.size_bytes + 1)
    except zlib.error as error:
        raise ValueError(f"a compressed array is damaged: {error}") from None
    if len(whole) != packed.size_bytes or zlib.crc32(whole) != packed.crc32:
        raise ValueError(
            "a compressed array is damaged: its length or CRC-32 differs from the archive's "
            "directory"
        )
    return _as_array(slab, np.frombuffer(whole, np.uint8, offset=packed.head_bytes))


def _copy(
    array: NDArray[Any], starts: Ints, lengths: Sequence[int], out: NDArray[Any], places: Places
) -> None:
    """Copy parts of an array into out[places]."""
    if not array.flags.aligned and array.dtype == out.dtype and out.flags.c_contiguous:
        # In an archive, numbers may begin at any byte: copy them as opaque bytes.
        array, out = array.view(f"V{out.itemsize}"), out.view(f"V{out.itemsize}")
    is_steps = lengths[0] == 1 and tuple(lengths[1:]) == array.shape[1:]
    is_native = array.dtype == out.dtype and out.flags.c_contiguous and array.flags.c_contiguous
    if is_steps and is_native and isinstance(places, slice):
        slots = out[places].reshape(len(starts), *array.shape[1:])
        # The rows are valid; with a mode other than "raise", numpy writes directly to the slots.
        np.take(array, starts[:, 0], axis=0, out=slots, mode="clip")
        return
    copier = StepCopier if is_steps else PartCopier
    copier(starts, lengths, out, place_numbers(places, len(starts))).copy(array, 0, len(starts))


class _PartRanges:
    """Computes the byte ranges of a slab that cover parts of one shape.

    A part takes one range, or one range for each run of consecutive numbers, whichever costs less.
    lengths: of the part, along each axis.
    """

    def __init__(self, slab: Slab, lengths: Sequence[int]) -> None:
        self._dtype, self._lengths = slab.codec.dtype, tuple(lengths)
        item = slab.codec.dtype.itemsize
        strides = [math.prod(slab.shape[axis + 1 :]) * item for axis in range(len(slab.shape))]
        self._strides = np.array(strides, np.int64)
        # One range covers this axis and all behind it; each step along the others is a range.
        axes = [axis for axis in range(len(lengths) + 1) if self._ranges(axis) <= _MAX_RANGES]
        self._axis = min(axes, key=self._cost)
        self._range_bytes = self._covered_bytes(self._axis)
        self._offsets: Ints = np.zeros(1, np.int64)
        if self._axis:
            steps = np.indices(self._lengths[: self._axis]).reshape(self._axis, -1)
            self._offsets = self._strides[: self._axis] @ steps
        self._inner = self._lengths[self._axis :], tuple(strides[self._axis :])

    @property
    def are_large(self) -> bool:
        """True if each part is exactly one range that is large enough for a read of its own."""
        size_bytes = self._ranges(len(self._lengths)) * self._dtype.itemsize
        return not self._axis and self._range_bytes == size_bytes >= RANGE_COST_BYTES

    def _ranges(self, axis: int) -> int:
        return math.prod(self._lengths[:axis])

    def _covered_bytes(self, axis: int) -> int:
        """Return the bytes from the first to the last number of one range that covers this axis and
        all behind it."""
        steps = np.array(self._lengths[axis:], np.int64) - 1
        return int(steps @ self._strides[axis:]) + self._dtype.itemsize

    def _cost(self, axis: int) -> int:
        return self._ranges(axis) * (self._covered_bytes(axis) + RANGE_COST_BYTES)

    def bounds(self, starts: Ints) -> tuple[list[int], list[int]]:
        """Return the first and end bytes of the ranges of the parts that begin at these places,
        part by part."""
        begins = ((starts @ self._strides)[:, None] + self._offsets).reshape(-1)
        return begins.tolist(), (begins + self._range_bytes).tolist()

    def copy(self, encoded: Iterator[Encoded], slot: NDArray[Any]) -> None:
        """Copy the ranges of the next part into its slot."""
        inner, strides = self._inner
        dtype = self._dtype
        if slot.dtype == dtype and slot.flags.c_contiguous:  # opaque bytes, see `_copy`
            dtype = np.dtype(f"V{dtype.itemsize}")
            slot = slot.view(dtype)
        for place in np.ndindex(self._lengths[: self._axis]):
            slot[place] = np.ndarray(inner, dtype, next(encoded).data, 0, strides)


class NpyFormat(ChunkFormat):
    """The format of *.npy and *.npz files."""

    name: ClassVar[str] = "npy"
    extensions: ClassVar[frozenset[str]] = frozenset(("npy", "npz"))

    def recognises(self, origin: Origin) -> bool:
        """Return True if the URL names such files, or a folder of them that holds nothing they
        could belong to.

        A folder of .npy files alone is read as one sample per file by the `folder` format, unless
        sample= or another such argument is given.
        """
        if not _has_arrays(origin):
            return False
        if origin.selection is not None or origin.arrangement.sampling:
            return True
        return not any(extension(name) == "npy" for name in origin.names().files)

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
        from penstock.readers.formats.npy.npy_pieces import cut_shards

        groups = read_groups(origin, files.entries, workers=workers)
        chosen = choose_samples(origin, groups)
        return ChunkedDataset(
            schema=chosen.schema,
            shards=list(cut_shards(chosen)),
            left_out=groups[0].left_out,
            unnamed=chosen.too_short,
        )

    def reader(self, shard: ChunkedShardFacts) -> ChunkReader:
        """Open a shard."""
        return NpyReader(shard)


FORMAT = NpyFormat()
