"""Recognise Zarr hierarchies, and read the samples of their shards.

Arrays are fields. Chunks are decoded from mapped files or read bytes, and windows are copied out of
them.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from penstock.cache import CorruptShardError, MissingDependencyError, PenstockError
from penstock.readers.byte_source import REINDEX
from penstock.readers.fieldtypes import ColumnCrop, DenseColumn, Schema, may_not_fit, put_fitting
from penstock.readers.formats.array_windows import PartCopier, StepCopier, place_numbers
from penstock.readers.formats.candidates import PART_BYTES
from penstock.readers.formats.chunked import ChunkedDataset, ChunkFormat, ChunkReader, DatasetFiles
from penstock.readers.formats.zarr.zarr_decoder import CodecChain, decoder_of
from penstock.readers.formats.zarr.zarr_fields import choose_fields
from penstock.readers.formats.zarr.zarr_hierarchy import ROOTS, hierarchy_files, in_parallel
from penstock.readers.formats.zarr.zarr_shards import (
    cut_shards,
    list_files,
    read_notes,
    stored_chunks,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Column
    from penstock.readers.formats.chunked import ChunkedShardFacts, ShardData
    from penstock.readers.formats.open_shard import Places
    from penstock.readers.formats.zarr.zarr_decoder import Decoder
    from penstock.readers.formats.zarr.zarr_fields import WindowedArray
    from penstock.readers.origin import Origin
    from penstock.readers.types import Encoded

    Ints = NDArray[np.int64]

_FILL = -1
"""Stands for the extent of a chunk that isn't stored."""

_MAX_MAPS = 16
"""The most files of one shard that are mapped: a process may have 65,530 maps, for all its
shards."""

_DIRECT_BYTES = 2**14
"""Steps of at least this size are read directly into their slots if chunks aren't encoded."""

_READ_BYTES = 4 * 2**20
"""Chunks that are read before they are decoded, in decoded bytes."""


class ZarrReader(ChunkReader):
    """Reads the samples of one shard. Its chunks have the numbers of their extents."""

    takes_corners: ClassVar[bool] = True

    def __init__(self, shard: ChunkedShardFacts) -> None:
        notes = read_notes(shard.notes)
        self._first, self._sizes = notes.first, shard.extents.sizes
        self._fields: dict[str, _FieldReader] = {}
        extent = 0
        for field, chunks in zip(notes.fields, notes.chunks, strict=True):
            self._fields[field.name] = _FieldReader(field, chunks, extent, shard, notes.first)
            extent += len(chunks)
        if extent != len(shard.extents) or list(self._fields) != list(shard.schema):
            raise CorruptShardError(
                f"The index entry of a Zarr shard doesn't match its extents. {REINDEX}"
            )
        # Fields whose numbers may not fit their type: casts check them.
        self._cast = {
            name: type
            for name, type in shard.schema.items()
            if may_not_fit(type, self._fields[name].field.array.dtype)
        }

    def needs(
        self, rows: Ints, fields: Sequence[str], crops: Mapping[str, ColumnCrop]
    ) -> list[int]:
        """Return the extents that samples, or the cropped parts of them, need."""
        extents: list[int] = []
        for name in fields:
            extents += self._fields[name].needs(rows + self._first, crops.get(name))
        return extents

    def needs_parts(
        self, rows: Ints, fields: Sequence[str], crops: Mapping[str, ColumnCrop]
    ) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """Return the extents that samples need, each as a whole.

        A reader that has this method may read samples one by one, which serves samples that are one
        chunk each.
        """
        extents = self.needs(rows, fields, crops)
        return extents, [0] * len(extents), self._sizes[extents].tolist()

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
        """Read windows, or parts of them, into their slots."""
        reader = self._fields[field]
        if (type := self._cast.get(field)) is not None:
            raw = np.empty((len(rows), *out.shape[1:]), reader.field.array.dtype)
            reader.gather(rows + self._first, raw, np.arange(len(rows)), data, wrong, corners)
            for row, reason in put_fitting(field, type, raw, out, places).items():
                wrong.setdefault(row, reason)
            return
        slots = place_numbers(places, len(rows))
        reader.gather(rows + self._first, out, slots, data, wrong, corners)

    def read_rows(
        self, rows: Ints, fields: Sequence[str], *, data: ShardData, wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """Read windows into new arrays."""
        columns: dict[str, Column] = {}
        for name in fields:
            field = self._fields[name].field
            out = np.zeros((len(rows), *field.windows.sample_shape), field.array.dtype)
            self.gather(name, rows, out, slice(0, len(rows)), data=data, wrong=wrong)
            columns[name] = DenseColumn(out)
        return columns

    def name(self, row: int) -> str:
        """Return the first field's array and the sample's part of it, as an index of Python."""
        field = next(iter(self._fields.values())).field
        return f"{field.array.name or field.name}{field.windows.label(row + self._first)}"


class _FieldReader:
    """Reads one field of a shard.

    chunks: numbers of the stored chunks, ascending. extent: that of the first one. first: the
    number of the shard's first sample in the dataset.
    """

    def __init__(
        self, field: WindowedArray, chunks: Ints, extent: int, shard: ChunkedShardFacts, first: int
    ) -> None:
        self.field = field
        self._grid, self._windows = field.grid, field.windows
        self._chunks, self._extent = chunks, extent
        self._first, self._samples = first, shard.samples
        self._are_mapped = int(shard.extents.files.max(initial=0)) < _MAX_MAPS
        self._sizes = shard.extents.sizes
        self._fill, self._dtype = field.array.fill_value, field.array.dtype
        self._shape = field.array.chunk_shape
        self._are_chunks, self._chunk_bytes = _are_chunks(field), field.array.chunk_bytes
        self._uses: list[int] | None = None
        self._decoder: Decoder | None = None

    def needs(self, samples: Ints, crop: ColumnCrop | None) -> list[int]:
        """Return the extents that samples need."""
        starts, lengths = self._windows.parts(samples, crop)
        touched = self._grid.touched(starts, lengths)
        extents = self._extents(np.unique(touched.chunks))
        stored: list[int] = extents[extents != _FILL].tolist()
        return stored

    def gather(
        self,
        samples: Ints,
        out: NDArray[Any],
        places: Ints,
        data: ShardData,
        wrong: dict[int, str],
        corners: Ints | None,
    ) -> None:
        """Read samples into out[places]."""
        crop = None if corners is None else ColumnCrop(corners, out.shape[1:])
        starts, lengths = self._windows.parts(samples, crop)
        if self._windows.is_step:
            out = out[:, None]
        touched = self._grid.touched(starts, lengths)
        is_raw = lengths[0] == 1 and self._is_raw()
        if self._are_chunks and corners is None and out.dtype == self._dtype and not is_raw:
            self._gather_chunks(self._extents(touched.chunks), out, places, data, wrong)
            return
        order = np.argsort(touched.chunks, kind="stable")
        chunks, firsts = np.unique(touched.chunks[order], return_index=True)
        rows, bounds = touched.samples[order], [*firsts.tolist(), len(order)]
        corner = self._corners(chunks).repeat(np.diff(bounds), axis=0)
        begins, slots = starts[rows] - corner, places[rows]
        are_steps = lengths == (1, *self._shape[1:]) and not begins[:, 1:].any()
        extents = self._extents(chunks)
        if are_steps and is_raw and self._read_steps(extents, bounds, begins, out, slots, data):
            return
        copier = StepCopier if are_steps else PartCopier
        copy = copier(begins, lengths, out, slots).copy
        numbers = {extent: number for number, extent in enumerate(extents.tolist())}
        numbers.pop(_FILL, None)
        kept = data.kept(list(numbers), [bounds[at + 1] - bounds[at] for at in numbers.values()])
        for extent, chunk in kept.items():
            number = numbers.pop(extent)
            copy(chunk, bounds[number], bounds[number + 1])
        missing = np.flatnonzero(extents == _FILL).tolist()
        stored = (numbers[extent] for extent in data.in_order(list(numbers)))
        for number in chain(missing, stored):
            low, high = bounds[number], bounds[number + 1]
            try:
                copy(self._chunk(int(extents[number]), high - low, data), low, high)
            except ValueError as error:
                out[slots[low:high]] = 0
                for row in rows[low:high].tolist():
                    wrong.setdefault(row, self._reason(error))

    def _gather_chunks(
        self, extents: Ints, out: NDArray[Any], places: Ints, data: ShardData, wrong: dict[int, str]
    ) -> None:
        """Decode samples that are one chunk each directly into their slots. extents: one for each
        sample."""
        stored = np.flatnonzero(extents != _FILL)
        if len(stored) < len(extents):
            out[places[extents == _FILL]] = self._fill
        decode = self._get_decoder().decode
        step = max(1, _READ_BYTES // self._chunk_bytes)
        for first in range(0, len(stored), step):
            rows = stored[first : first + step]
            chunks = self._encoded(extents[rows].tolist(), data)
            slots = places[rows].tolist()
            for row, place, encoded in zip(rows.tolist(), slots, chunks, strict=True):
                slot = out[place]
                try:
                    if self._is_stored(int(extents[row]), encoded):
                        decode(encoded, slot)
                    else:
                        slot[...] = self._fill
                except ValueError as error:
                    slot[...] = 0
                    wrong.setdefault(row, self._reason(error))

    def _read_steps(
        self,
        extents: Ints,
        bounds: list[int],
        begins: Ints,
        out: NDArray[Any],
        places: Ints,
        data: ShardData,
    ) -> bool:
        """Read steps of chunks that aren't encoded directly into their slots; return False, without
        effect, if that is impossible.

        extents: of the chunks; chunk i holds the steps [bounds[i], bounds[i + 1]).
        """
        step_bytes = out[:1].nbytes
        if (
            step_bytes < _DIRECT_BYTES
            or out.dtype != self._dtype
            or (extents == _FILL).any()
            or not out[:1].flags.c_contiguous
            or (self._sizes[extents] != self._chunk_bytes).any()
        ):
            return False
        flat = out.reshape(len(out), -1).view(np.uint8)
        sources = np.repeat(extents, np.diff(bounds)).tolist()
        slots = [flat[place] for place in places.tolist()]
        try:
            data.read_into(sources, (begins[:, 0] * step_bytes).tolist(), slots)
        except ValueError:  # a file is gone or changed: reading whole chunks finds out which
            return False
        return True

    def _corners(self, chunks: Ints) -> Ints:
        """Return the first element of each chunk in the array, int64, shape (n, dimensions)."""
        places = np.unravel_index(chunks, self._grid.counts)
        return np.stack(places, axis=1) * np.array(self._shape, np.int64)

    def _chunk(self, extent: int, taken: int, data: ShardData) -> NDArray[Any]:
        """Return a decoded chunk. taken: samples of this call that need it."""
        if extent == _FILL:
            return np.broadcast_to(self._fill, self._shape)
        uses = self._all_uses()[extent - self._extent]
        if uses <= 1:
            return self._decode(extent, data)
        return data.decoded(
            extent,
            lambda: self._decode(extent, data),
            uses=uses,
            taken=taken,
            size_bytes=self._chunk_bytes,
        )

    def _decode(self, extent: int, data: ShardData) -> NDArray[Any]:
        """Decode a chunk; it has fill values if its file is gone."""
        (encoded,) = self._encoded([extent], data)
        if self._is_stored(extent, encoded):
            decoder = self._get_decoder()
            is_direct = isinstance(decoder, CodecChain) and decoder.is_plain and decoder.steps
            return decoder.decode(
                encoded, data.room(self._shape, self._dtype) if is_direct else None
            )
        return np.full(self._shape, self._fill, self._dtype)

    def _is_stored(self, extent: int, encoded: Encoded) -> bool:
        """Return True if a chunk has bytes; its file may have been removed since the dataset was
        indexed.

        Raises ValueError if it was empty when it was indexed: no codec encodes numbers to no bytes.
        """
        if not self._sizes[extent]:
            raise ValueError("it has no bytes: it was truncated or never written")
        return len(encoded) > 0

    def _encoded(self, extents: list[int], data: ShardData) -> list[Encoded]:
        """Return the bytes of chunks, mapped if that costs less than reading them."""
        if self._are_mapped:
            views = [view for extent in extents if (view := data.view(extent)) is not None]
            if len(views) == len(extents):
                return views
        return data.read(extents)

    def _get_decoder(self) -> Decoder:
        if self._decoder is None:
            self._decoder = decoder_of(self.field.array)
        return self._decoder

    def _is_raw(self) -> bool:
        """Return True if chunks are stored as they are delivered."""
        decoder = self._get_decoder()
        return isinstance(decoder, CodecChain) and decoder.is_plain and not decoder.steps

    def _extents(self, chunks: Ints) -> Ints:
        """Return the extents of chunks; _FILL for those that aren't stored."""
        if not len(self._chunks):
            return np.full(len(chunks), _FILL)
        at = np.minimum(np.searchsorted(self._chunks, chunks), len(self._chunks) - 1)
        return np.where(self._chunks[at] == chunks, at + self._extent, _FILL)

    def _all_uses(self) -> list[int]:
        """Return how many samples of the shard need each stored chunk."""
        if self._uses is None:
            end = self._first + self._samples
            chunks, uses = self._grid.uses(self._windows, self._first, end)
            self._uses = uses[np.searchsorted(chunks, self._chunks)].tolist()
        return self._uses

    def _reason(self, error: ValueError) -> str:
        """Return why samples are bad; re-raise an error that doesn't come from damaged bytes."""
        if isinstance(error, PenstockError):
            raise error
        return f"{self.field.name}: a chunk is damaged: {error}"


def _are_chunks(field: WindowedArray) -> bool:
    """Return True if each sample is one chunk, and no two samples share one."""
    windows, chunk = field.windows, field.array.chunk_shape
    axes = zip(windows.stride, chunk, windows.counts, strict=True)
    are_aligned = all(count == 1 or step % length == 0 for step, length, count in axes)
    return windows.window == chunk and are_aligned and windows.repeat == 1


class ZarrFormat(ChunkFormat):
    """The format of a folder with a Zarr hierarchy of version 2 or 3."""

    name: ClassVar[str] = "zarr"
    may_lack_objects: ClassVar[bool] = True
    is_encoded: ClassVar[bool] = True

    def recognises(self, origin: Origin) -> bool:
        """Return True if the folder has the metadata of a hierarchy's root."""
        return origin.selection is None and not ROOTS.isdisjoint(origin.names().files)

    def files(self, origin: Origin) -> DatasetFiles:
        """Read the documents, and list the files of the arrays that are fields."""
        store = hierarchy_files(origin)
        chosen = choose_fields(origin, store)
        files = in_parallel(lambda field: list_files(store, field.array), chosen.fields)
        entries = [entry for some in files for entry in some.files]
        return DatasetFiles(
            entries=[*chosen.hierarchy.documents, *entries], found=(store, chosen, files)
        )

    def index(self, origin: Origin, files: DatasetFiles, *, workers: int) -> ChunkedDataset:
        """Return the shards, from the metadata and the indexes of Zarr shards."""
        del workers
        store, chosen, listed = files.found
        for field in chosen.fields:  # invalid codecs raise DatasetError
            with suppress(MissingDependencyError):  # reading a field raises if its codec is missing
                decoder_of(field.array)
        pairs = zip(chosen.fields, listed, strict=True)
        stored = in_parallel(lambda pair: stored_chunks(store, pair[0].array, pair[1]), pairs)
        return ChunkedDataset(
            schema=Schema({field.name: field.type for field in chosen.fields}),
            shards=list(cut_shards(chosen, stored, part_bytes=PART_BYTES, url=origin.url)),
            left_out=chosen.left_out,
        )

    def reader(self, shard: ChunkedShardFacts) -> ChunkReader:
        """Open a shard."""
        return ZarrReader(shard)


FORMAT = ZarrFormat()
