"""Recognise Zarr hierarchies, and read the samples of their shards.

Arrays are fields. Chunks are decoded where they lie, and windows copied out of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from penstock.cache import CorruptShardError, MissingDependencyError, PenstockError
from penstock.readers.fields import DenseColumn, Schema, may_not_fit, put_fitting
from penstock.readers.formats.array_windows import PartCopier, StepCopier, place_numbers
from penstock.readers.formats.candidates import PART_BYTES, Candidates
from penstock.readers.formats.chunked import ChunkFormat
from penstock.readers.formats.format import Snapshot
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
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields import Column, ColumnCrop
    from penstock.readers.formats.chunked import ChunkedShardFacts, ChunkReader, ShardData
    from penstock.readers.formats.format import Format, Indexing, Listing
    from penstock.readers.formats.open_shard import Places
    from penstock.readers.formats.zarr.zarr_decoder import Decoder
    from penstock.readers.formats.zarr.zarr_fields import ChosenFields
    from penstock.readers.formats.zarr.zarr_shards import ArrayFiles, NotedField, StoredChunks
    from penstock.readers.origin import Origin
    from penstock.readers.types import Encoded

    Ints = NDArray[np.int64]

_FILL = -1
"""In an extent's place: the chunk isn't stored."""

_MOST_MAPS = 16
"""Files of a shard that are mapped: a process may have 65,530 maps, of all its shards."""

_DIRECT_BYTES = 2**14
"""Steps from here on are read each by itself where nothing has to be decoded."""

_READ_BYTES = 4 * 2**20
"""What is read before it is decoded, decoded."""


class ZarrReader:
    """The samples of one shard; its chunks are numbered as its extents are."""

    def __init__(self, shard: ChunkedShardFacts) -> None:
        notes = read_notes(shard.notes)
        self._first, self._sizes = notes.first, shard.extents.sizes
        self._fields: dict[str, _FieldReader] = {}
        are_mapped = int(shard.extents.files.max(initial=0)) < _MOST_MAPS
        extent = 0
        for field, chunks in zip(notes.fields, notes.chunks, strict=True):
            self._fields[field.name] = _FieldReader(
                field,
                chunks,
                extent,
                first=notes.first,
                samples=shard.samples,
                are_mapped=are_mapped,
                sizes=self._sizes,
            )
            extent += len(chunks)
        if extent != len(shard.extents) or list(self._fields) != list(shard.schema):
            raise CorruptShardError(
                "What the index notes of a shard doesn't fit its chunks. Run `penstock index` "
                "again."
            )
        # Fields whose numbers may not fit their type: these are looked at when they are cast.
        self._cast = {
            name: type
            for name, type in shard.schema.items()
            if may_not_fit(type, self._fields[name].field.array.dtype)
        }

    def needs(
        self, rows: Ints, fields: Sequence[str], crops: Mapping[str, ColumnCrop]
    ) -> list[int]:
        """The extents that samples, or parts of them, need."""
        found: list[int] = []
        for name in fields:
            found += self._fields[name].needs(rows + self._first, crops.get(name))
        return found

    def needs_parts(
        self, rows: Ints, fields: Sequence[str], crops: Mapping[str, ColumnCrop]
    ) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """The extents that samples need, each as a whole: said so that samples that are a chunk
        each are brought together too."""
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
            here = np.arange(len(rows))
            reader.gather(rows + self._first, raw, here, data, wrong, corners)
            for row, reason in put_fitting(field, type, raw, out, places).items():
                wrong.setdefault(row, reason)
            return
        where = place_numbers(places, len(rows))
        reader.gather(rows + self._first, out, where, data, wrong, corners)

    def read_rows(
        self, rows: Ints, fields: Sequence[str], *, data: ShardData, wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """Read windows as columns of their own."""
        found: dict[str, Column] = {}
        for name in fields:
            field = self._fields[name].field
            out = np.zeros((len(rows), *field.windows.sample_shape), field.array.dtype)
            self.gather(name, rows, out, slice(0, len(rows)), data=data, wrong=wrong)
            found[name] = DenseColumn(out)
        return found

    def name(self, row: int) -> str:
        """Where the sample lies in the first field's array, as Python would index it."""
        field = next(iter(self._fields.values())).field
        (start,) = field.windows.starts(np.array([row + self._first])).tolist()
        name = field.array.name or field.name
        if field.windows.is_step:
            return f"{name}[{start[0]}]"
        parts = zip(start, field.windows.window, field.windows.shape, strict=True)
        told = (":" if part == all else f"{low}:{low + part}" for low, part, all in parts)
        return f"{name}[{', '.join(told)}]"


class _FieldReader:
    """One field of a shard. chunks: numbers of those that are stored; the first is that extent.
    are_mapped: they lie in few files, which a process can hold maps of. sizes: of all extents."""

    def __init__(
        self,
        field: NotedField,
        chunks: Ints,
        extent: int,
        *,
        first: int,
        samples: int,
        are_mapped: bool,
        sizes: Ints,
    ) -> None:
        self.field = field
        self._grid, self._windows = field.grid, field.windows
        self._chunks, self._extent = chunks, extent
        self._first, self._samples = first, samples
        self._are_mapped, self._sizes = are_mapped, sizes
        self._fill, self._dtype = field.array.fill_value, field.array.dtype
        self._shape = field.array.chunk_shape
        self._are_alone, self._chunk_bytes = _are_alone(field), field.array.chunk_bytes
        self._uses: list[int] | None = None
        self._decoder: Decoder | None = None

    def needs(self, samples: Ints, crop: ColumnCrop | None) -> list[int]:
        """The extents that samples need."""
        starts, lengths = self._windows.starts(samples), self._windows.window
        if crop is not None:
            starts[:, self._windows.is_step :] += crop.corners
            lengths = (*lengths[: self._windows.is_step], *crop.shape)
        touched = self._grid.touched(starts, lengths)
        extents = self._extents(np.unique(touched.chunks))
        found: list[int] = extents[extents != _FILL].tolist()
        return found

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
        starts, lengths = self._windows.starts(samples), self._windows.window
        if self._windows.is_step:
            out = out[:, None]
        if corners is not None:
            starts[:, self._windows.is_step :] += corners
            lengths = out.shape[1:]
        touched = self._grid.touched(starts, lengths)
        is_bare = lengths[0] == 1 and _is_bare(self._get_decoder())
        if self._are_alone and corners is None and out.dtype == self._dtype and not is_bare:
            self._gather_alone(self._extents(touched.chunks), out, places, data, wrong)
            return
        order = np.argsort(touched.chunks, kind="stable")
        found, firsts = np.unique(touched.chunks[order], return_index=True)
        rows, bounds = touched.samples[order], [*firsts.tolist(), len(order)]
        corner = self._corners(found).repeat(np.diff(bounds), axis=0)
        begins, into = starts[rows] - corner, places[rows]
        are_steps = lengths == (1, *self._shape[1:]) and not begins[:, 1:].any()
        if (
            are_steps
            and is_bare
            and self._read_steps(self._extents(found), bounds, begins, out, into, data)
        ):
            return
        copier = StepCopier if are_steps else PartCopier
        copy = copier(begins, lengths, out, into).copy
        extents = self._extents(found).tolist()
        number_of = dict(zip(extents, range(len(extents)), strict=True))
        missing = [number for number, extent in enumerate(extents) if extent == _FILL]
        number_of.pop(_FILL, None)
        kept = data.kept(
            list(number_of), [bounds[at + 1] - bounds[at] for at in number_of.values()]
        )
        for extent, chunk in kept.items():
            number = number_of.pop(extent)
            copy(chunk, bounds[number], bounds[number + 1])
        stored = (number_of[extent] for extent in data.in_order(list(number_of)))
        for number in chain(missing, stored):
            low, high = bounds[number], bounds[number + 1]
            extent = extents[number]
            try:
                copy(self._chunk(extent, high - low, data), low, high)
            except ValueError as error:
                out[into[low:high]] = 0
                for row in rows[low:high].tolist():
                    wrong.setdefault(row, self._reason(error))

    def _gather_alone(
        self, extents: Ints, out: NDArray[Any], places: Ints, data: ShardData, wrong: dict[int, str]
    ) -> None:
        """Decode samples that are a chunk each straight into their slots. extents: of each."""
        stored = np.flatnonzero(extents != _FILL)
        if len(stored) < len(extents):
            out[places[extents == _FILL]] = self._fill
        decode = self._get_decoder().decode
        step = max(1, _READ_BYTES // self._chunk_bytes)
        for first in range(0, len(stored), step):
            rows = stored[first : first + step]
            found = self._encoded(extents[rows].tolist(), data)
            for row, place, encoded in zip(
                rows.tolist(), places[rows].tolist(), found, strict=True
            ):
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
        """Read steps of chunks that aren't encoded straight into their slots; False where that
        can't be, and nothing was noted. extents: of the chunks, whose steps are [bounds[i],
        bounds[i + 1])."""
        step_bytes = out[:1].nbytes
        if (
            step_bytes < _DIRECT_BYTES
            or out.dtype != self._dtype
            or not _is_bare(self._get_decoder())
        ):
            return False
        if (extents == _FILL).any() or not out[:1].flags.c_contiguous:
            return False
        if (self._sizes[extents] != self._chunk_bytes).any():
            return False
        flat = out.reshape(len(out), -1).view(np.uint8)
        wanted = np.repeat(extents, np.diff(bounds)).tolist()
        slots = [flat[place] for place in places.tolist()]
        try:
            data.read_into(wanted, (begins[:, 0] * step_bytes).tolist(), slots)
        except ValueError:  # a file is gone or changed: who reads it whole says what that means
            return False
        return True

    def _corners(self, chunks: Ints) -> Ints:
        """Where chunks begin in the array, int64, shape (n, dimensions)."""
        places = np.unravel_index(chunks, self._grid.counts)
        return np.stack(places, axis=1) * np.array(self._shape, np.int64)

    def _chunk(self, extent: int, taken: int, data: ShardData) -> NDArray[Any]:
        """A decoded chunk, of which some samples are taken."""
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
        """A chunk; of fill values where its file is gone."""
        (encoded,) = self._encoded([extent], data)
        if self._is_stored(extent, encoded):
            decoder = self._get_decoder()
            is_direct = isinstance(decoder, CodecChain) and decoder.is_plain and decoder.steps
            return decoder.decode(
                encoded, data.room(self._shape, self._dtype) if is_direct else None
            )
        return np.full(self._shape, self._fill, self._dtype)

    def _is_stored(self, extent: int, encoded: Encoded) -> bool:
        """Whether a chunk has bytes; its file may have gone since it was listed. Raises ValueError
        where there was nothing in it then: no codec makes no bytes of numbers."""
        if not self._sizes[extent]:
            raise ValueError("it has no bytes: truncated, or never written to its end")
        return len(encoded) > 0

    def _encoded(self, extents: list[int], data: ShardData) -> list[Encoded]:
        """The bytes of chunks, mapped where that costs less than to read them."""
        if self._are_mapped:
            views = [data.view(extent) for extent in extents]
            there = [view for view in views if view is not None]
            if len(there) == len(extents):
                return there
        return data.read(extents)

    def _get_decoder(self) -> Decoder:
        if self._decoder is None:
            self._decoder = decoder_of(self.field.array)
        return self._decoder

    def _extents(self, chunks: Ints) -> Ints:
        """The extents of chunks by number, _FILL of those that aren't stored."""
        if not len(self._chunks):
            return np.full(len(chunks), _FILL)
        at = np.minimum(np.searchsorted(self._chunks, chunks), len(self._chunks) - 1)
        return np.where(self._chunks[at] == chunks, at + self._extent, _FILL)

    def _all_uses(self) -> list[int]:
        """How many samples of the shard need each stored chunk."""
        if self._uses is None:
            end = self._first + self._samples
            chunks, uses = self._grid.uses(self._windows, self._first, end)
            self._uses = uses[np.searchsorted(chunks, self._chunks)].tolist()
        return self._uses

    def _reason(self, error: ValueError) -> str:
        """Why samples are bad. Raises the error again where it isn't the bytes' fault."""
        if isinstance(error, PenstockError):
            raise error
        return f"{self.field.name}: a chunk is damaged: {error}"


def _is_bare(decoder: Decoder) -> bool:
    """Whether chunks are stored as they are handed out."""
    return isinstance(decoder, CodecChain) and decoder.is_plain and not decoder.steps


def _are_alone(field: NotedField) -> bool:
    """Whether each sample is a chunk, and no other sample has it."""
    windows, chunk = field.windows, field.array.chunk_shape
    axes = zip(windows.stride, chunk, windows.counts, strict=True)
    are_aligned = all(count == 1 or step % length == 0 for step, length, count in axes)
    return windows.window == chunk and are_aligned and windows.repeat == 1


class ZarrListing:
    """A hierarchy: what its documents say, and the files of the arrays that are fields."""

    def __init__(self, origin: Origin) -> None:
        self._url, self._store = origin.url, hierarchy_files(origin)
        self._chosen = choose_fields(origin, self._store)

    @cached_property
    def _files(self) -> list[ArrayFiles]:
        fields = self._chosen.fields
        return in_parallel(lambda field: list_files(self._store, field.array), fields)

    def snapshot(self) -> Snapshot:
        """What an index notes of the files."""
        documents = self._chosen.hierarchy.documents
        files = (entry for some in self._files for entry in some.files)
        return Snapshot.of((*documents, *files), {})

    def candidates(self, *, workers: int) -> Candidates:
        """The shards, as the metadata and the indexes of shards tell them."""
        del workers
        chosen = self._chosen
        _check_codecs(chosen)
        schema = Schema({field.name: field.type for field in chosen.fields})
        stored = self._stored(chosen)
        shards = cut_shards(chosen, stored, part_bytes=PART_BYTES, url=self._url)
        return Candidates.of_chunks(schema, list(shards), left_out=chosen.left_out)

    def counterparts(
        self, number: int, name: bytes, *, total: int, workers: int
    ) -> Iterator[tuple[Candidates, int]]:
        """The shard of the same number, if there are as many."""
        del name
        candidates = self.candidates(workers=workers)
        if len(candidates.chunked) == total:
            yield candidates, number

    def _stored(self, chosen: ChosenFields) -> list[StoredChunks]:
        pairs = zip(chosen.fields, self._files, strict=True)
        return in_parallel(lambda pair: stored_chunks(self._store, pair[0].array, pair[1]), pairs)


def _check_codecs(chosen: ChosenFields) -> None:
    """Raise DatasetError for codecs that can't be; those that aren't installed are missed by
    whoever reads their field."""
    from penstock.readers.formats.zarr.zarr_decoder import decoder_of

    for field in chosen.fields:
        try:
            decoder_of(field.array)
        except MissingDependencyError:
            continue


@dataclass(frozen=True, slots=True)
class ZarrIndexing:
    """How a hierarchy gets an index: it is listed each time it is opened locally, and where
    anything differs it is indexed anew, which reads metadata only."""

    keeps_facts: ClassVar[bool] = False

    def list(self, origin: Origin) -> ZarrListing:
        """Read the documents. Raises DatasetNotFoundError, ConfigError, DatasetError,
        FetchError."""
        return ZarrListing(origin)

    def is_current(
        self, origin: Origin, snapshot: Snapshot, listing: Callable[[], Listing]
    ) -> bool:
        """Whether these are the very files that were indexed."""
        del origin
        return listing().snapshot().fingerprint == snapshot.fingerprint


@dataclass(frozen=True, slots=True)
class ZarrFormat(ChunkFormat):
    """A folder with a Zarr hierarchy, of version 2 or 3."""

    name: ClassVar[str] = "zarr"
    least_sample_bytes: ClassVar[int] = 0
    indexing: ClassVar[Indexing | None] = ZarrIndexing()
    may_lack_objects: ClassVar[bool] = True
    is_encoded: ClassVar[bool] = True
    takes_corners: ClassVar[bool] = True

    def recognises(self, origin: Origin) -> bool:
        """Whether a hierarchy begins at the root."""
        return origin.selection is None and not ROOTS.isdisjoint(origin.names().files)

    def open_chunks(self, shard: ChunkedShardFacts) -> ChunkReader:
        """Open a shard."""

        return ZarrReader(shard)


FORMAT: Format = ZarrFormat()
