"""Define formats whose samples lie in chunks that are decoded as a whole, indexed from metadata
alone.

A `ChunkFormat` gives two things: `index` describes the shards of a dataset from the metadata of its
files (`ChunkedDataset`), and `reader` reads rows of one shard (`ChunkReader`). Listing, snapshots,
sidecars, the cache and crops are common code. `block_format` is a base for simple formats in
chunks.
"""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from penstock.cache import CorruptShardError, DatasetError, PenstockError, log
from penstock.readers.byte_source import REINDEX
from penstock.readers.fieldtypes import put_parts
from penstock.readers.formats.chunk_data import ChunkParts, ShardData
from penstock.readers.formats.files_format import FilesFormat
from penstock.readers.formats.format import DatasetFiles, ShardEntry, Snapshot
from penstock.readers.formats.open_shard import OpenShard, RowRequest, RowsOut, StridedRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.readers.fieldtypes import Column, ColumnCrop, Schema
    from penstock.readers.formats.candidates import Candidates
    from penstock.readers.formats.chunk_cache import PendingFetch
    from penstock.readers.formats.chunk_data import Fetches
    from penstock.readers.formats.extents import ChunkedShard, Extents
    from penstock.readers.formats.format import Draw
    from penstock.readers.formats.open_shard import Places
    from penstock.readers.formats.sidecar import ShardPlace, Sidecar
    from penstock.readers.origin import LeftOut, Origin
    from penstock.readers.types import Ints, Numbers

    Crops = Mapping[str, ColumnCrop]
    Parts = tuple[Sequence[int], Sequence[int], Sequence[int]]


_WHOLE_BYTES = 64 * 2**20
"""Bytes of whole samples that are read at a time to take parts of them."""

_MEASURED_SAMPLES = 4096
"""Samples of a shard from which the share of its bytes that parts need is estimated."""

_INVALID = ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError
"""The errors of code that reads a damaged note, or the note of another format."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkedShardFacts:
    """The facts that an index records about one shard of chunks, from its `ChunkedShard`.

    files: the names of its files, which `Extents.files` numbers.
    """

    schema: Schema
    samples: int
    extents: Extents
    units: Ints
    files: Sequence[bytes]
    notes: bytes

    @property
    def note(self) -> Any:
        """Return `ChunkedShard.note`, decoded from JSON. Raises ValueError."""
        return json.loads(self.notes)


class ChunkReader(ABC):
    """Reads the rows of one shard, and decodes its chunks. Several threads may call it.

    `wrong` receives the reason for each bad sample, by place in rows; the values of bad samples are
    zeros or empty. Methods raise the errors of ShardData. takes_corners: True if the reader reads
    parts of samples, and needs fewer bytes for them; otherwise common code takes the parts from
    whole samples.
    """

    takes_corners: ClassVar[bool] = False

    @abstractmethod
    def needs(self, rows: Ints, fields: Sequence[str], crops: Crops) -> list[int]:
        """Return the extents that these rows need, each once, without reading or decoding anything.

        The extents of all the shards of a batch are then fetched in parallel. crops: the parts of
        the rows that are needed, by field, for fields of which not everything is needed; empty
        unless takes_corners.
        """

    def needs_parts(self, rows: Ints, fields: Sequence[str], crops: Crops) -> Parts | None:
        """Return the bytes that these rows need: extents, and bytes [start, end) of each, counted
        as for `ShardData.read_parts`. An extent may occur several times.

        None, the default, means the extents of `needs` as a whole. Implement it if samples can be
        read singly, so that little is read of large extents.
        """
        return None

    @abstractmethod
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
        """Read a field whose samples have one shape: out[places] = the rows.

        corners: corner of the part of each sample that is needed, int64, shape (n, dimensions); the
        part has the shape of out. None reads whole samples, always unless takes_corners.
        """

    @abstractmethod
    def read_rows(
        self, rows: Ints, fields: Sequence[str], *, data: ShardData, wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """Read fields whose samples differ in shape, are encoded, or are texts.

        For a field that some samples lack, the result also has "<name>.present", a DenseColumn of
        bool.
        """

    @abstractmethod
    def name(self, row: int) -> str:
        """Return a sample's name for messages."""

    def plain(self, field: str, *, data: ShardData) -> StridedRows | None:
        """Return the places of a field's rows in a map; None, the default, if they can't be copied
        from one."""
        return None

    def lengths(self, field: str, rows: Ints) -> Ints | None:
        """Return the first lengths of samples of a field, int64, shape (n,); None, the default, if
        they aren't known without reading."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkedDataset:
    """A dataset in chunks as the metadata of its files describe it.

    schema: with all dtypes and shapes. left_out: the reason why data isn't a field, by the name
    that the field would have. unnamed: samples that are left out, by reason. announce: issues
    warnings about the data; it is called if an index is built, not if a shard of it is rebuilt.
    """

    schema: Schema
    shards: Sequence[ChunkedShard]
    left_out: Mapping[str, str] = field(default_factory=dict)
    unnamed: Mapping[str, LeftOut] = field(default_factory=dict)
    announce: Callable[[], None] | None = None


class ChunkFormat(FilesFormat):
    """The base of formats in chunks."""

    least_sample_bytes: ClassVar[int] = 0
    reads_samples: ClassVar[bool] = False

    @abstractmethod
    def index(self, origin: Origin, files: DatasetFiles, *, workers: int) -> ChunkedDataset:
        """Describe the dataset from the metadata of its files, on `workers` threads.

        Raises ConfigError, DatasetError, DatasetNotFoundError, IndexChangedError or FetchError.
        """

    @abstractmethod
    def reader(self, shard: ChunkedShardFacts) -> ChunkReader:
        """Open a shard without reading a sample.

        Raises CorruptShardError, or ValueError, TypeError, KeyError or IndexError if the facts
        contradict each other: they come from a file that may be damaged.
        """

    # -- common code

    def list(self, origin: Origin) -> ChunkListing:
        """List the files. Raises as `files` does."""
        return ChunkListing(self, origin, self.files(origin))

    def open(
        self, entry: ShardEntry, sidecar: Callable[[], Sidecar], place: ShardPlace
    ) -> ChunkShard:
        """Open a shard at its place."""
        facts = sidecar()
        data = ShardData(facts, place, fields=entry.fields, chunks=entry.chunks)
        return ChunkShard(self._reader(facts), data, entry, has_units=len(facts.units) > 0)

    def wanted_share(
        self, entry: ShardEntry, sidecar: Callable[[], Sidecar], fields: Sequence[str], draw: Draw
    ) -> float:
        """Return the share of these fields' bytes that is needed for parts of samples; in a shard
        with many samples, of the first ones."""
        facts = sidecar()
        reader, extents = self._reader(facts), facts.extents
        assert extents is not None
        if not reader.takes_corners:
            return 1.0
        rows = np.arange(min(entry.samples, _MEASURED_SAMPLES), dtype=np.int64)
        some, all = (reader.needs(rows, fields, crops) for crops in (draw(rows), {}))
        return float(extents.sizes[some].sum() / max(1, extents.sizes[all].sum()))

    def _reader(self, sidecar: Sidecar) -> ChunkReader:
        assert sidecar.extents is not None
        facts = ChunkedShardFacts(
            schema=sidecar.layout.schema,
            samples=sidecar.samples,
            extents=sidecar.extents,
            units=np.array(sidecar.units, np.int64),
            files=sidecar.files.names,
            notes=sidecar.notes,
        )
        try:
            return self.reader(facts)
        except _INVALID as error:
            if isinstance(error, PenstockError):
                raise
            raise CorruptShardError(
                f"The index entry of a {self.name} shard is damaged ({error}). {REINDEX}"
            ) from error


@dataclass(frozen=True, slots=True, eq=False)
class ChunkListing:
    """The files of a dataset in chunks."""

    format: ChunkFormat
    origin: Origin
    files: DatasetFiles

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the files for the index."""
        return Snapshot.of(self.files.entries, {})

    def candidates(self, *, workers: int) -> Candidates:
        """Read the metadata of all files and return the shards, with warnings about the data."""
        return self._candidates(workers=workers, announces=True)

    def counterparts(
        self, number: int, name: bytes, *, total: int, workers: int
    ) -> Iterator[tuple[Candidates, int]]:
        """Yield the shard of the same number if there are as many shards as before."""
        found = self._candidates(workers=workers, announces=False)
        if len(found.chunked) == total:
            yield found, number

    def _candidates(self, *, workers: int, announces: bool) -> Candidates:
        from penstock.readers.formats.candidates import Candidates

        try:
            found = self.format.index(self.origin, self.files, workers=workers)
        except Exception as error:  # another package's code may raise anything
            if isinstance(error, PenstockError | OSError | MemoryError):
                raise
            raise DatasetError(
                f"{self.origin.url}: a file isn't valid {self.format.name} data "
                f"({type(error).__name__}: {error}). Write or fetch it again, or leave it out."
            ) from error
        if announces:
            for name, reason in found.left_out.items():
                log.info("%s: %s isn't a field: %s", self.origin.url, name, reason)
        if announces and found.announce is not None:
            found.announce()
        return Candidates(
            schema=found.schema,
            chunked=found.shards,
            quarantined=self.files.quarantined,
            left_out=found.left_out,
            unnamed=found.unnamed,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class ChunkRequest(RowRequest):
    """The rows of a shard of chunks that a batch reads.

    data: from which they are read. parts: of it to fetch. claim: the fetch, for which other batches
    may wait. awaited: extents that other batches fetch.
    """

    data: ShardData
    parts: Sequence[ChunkParts] = ()
    claim: PendingFetch | None = None
    awaited: Fetches = field(default_factory=dict)

    def receive(self, loaded: Sequence[Sequence[Any]]) -> None:
        """Accept the bytes of `spans`, and publish them to batches that wait for them."""
        with contextlib.suppress(CorruptShardError):  # reading raises it again
            self.data = self.data.with_fetched(self.parts, loaded, self.awaited)
            if self.claim is not None:
                self.claim.settle(self.data)

    def release(self) -> None:
        """End the waits of other batches for bytes that weren't received."""
        if self.claim is not None:
            self.claim.settle(None)


class ChunkShard(OpenShard):
    """A shard of chunks. It has no spans."""

    def __init__(
        self, reader: ChunkReader, data: ShardData, entry: ShardEntry, *, has_units: bool
    ) -> None:
        """has_units: True if samples can't be read singly."""
        self.reader, self.data, self.source = reader, data, data.source
        self._has_units = has_units
        self.can_divide = not has_units
        self.table = np.empty((entry.samples, entry.layout.table.count), np.int64)
        self._schema = entry.layout.schema

    def request(self, request: RowRequest) -> ChunkRequest:
        """Return the request with the parts that must be fetched for it."""
        data, reader = self.data.in_mode(request.mode), self.reader
        found = ChunkRequest(
            rows=request.rows,
            dense=request.dense,
            others=request.others,
            crops=request.crops,
            mode=request.mode,
            data=data,
        )
        if data.has_all:
            return found
        fields = (*request.dense, *request.others)
        crops = request.crops if reader.takes_corners else {}
        parts: tuple[Sequence[int], Sequence[int], Sequence[int] | None] | None
        parts = reader.needs_parts(request.rows, fields, crops)
        if parts is None and self._has_units:
            extents = reader.needs(request.rows, fields, crops)
            parts = extents, [0] * len(extents), None
        if parts is not None:  # otherwise it reads parts of large chunks, and doesn't report which
            found.parts, found.claim, found.awaited = data.missing_parts(*parts)
            found.spans = [each.spans for each in found.parts]
        return found

    @classmethod
    def fetch(cls, requests: Sequence[tuple[Self, RowRequest]]) -> None:
        """Load all parts that the requests need by one call. If the local disk can't be read,
        nothing is loaded: reading the shards reports it."""
        some = [each for _, each in requests if isinstance(each, ChunkRequest)]
        some = [each for each in some if each.spans or each.awaited]
        spans = [span for each in some for span in each.spans]
        loaded: Iterable[Sequence[Any]] = ()
        if spans:
            source = spans[0].source
            try:
                loaded = source.load(spans, some[0].mode)
            except (OSError, EOFError) as error:
                source.refuse(error, 0)
                return
        found = iter(loaded)
        for each in some:
            each.receive([next(found) for _ in each.spans])

    def read(self, request: RowRequest, out: RowsOut) -> None:
        """Read rows of fields."""
        assert isinstance(request, ChunkRequest)
        reader, rows, data = self.reader, request.rows, request.data
        for name in request.dense:
            crop, array = request.crops.get(name), out.arrays[name]
            if crop is not None and not reader.takes_corners:
                self._read_parts(name, request, out, crop.corners)
                continue
            more = {} if crop is None else {"corners": crop.corners}
            reader.gather(name, rows, array, out.places, data=data, wrong=out.wrong, **more)
        if request.others:
            others = tuple(request.others)
            out.columns.update(reader.read_rows(rows, others, data=data, wrong=out.wrong))

    def _read_parts(self, name: str, request: ChunkRequest, out: RowsOut, corners: Ints) -> None:
        """Read whole samples and copy the needed parts of them."""
        form, array = self._schema[name].form, out.arrays[name]
        assert form is not None
        slots = np.arange(len(array))[out.places]
        size = max(1, int(np.prod(form.fixed_shape)) * array.dtype.itemsize)
        step = max(1, _WHOLE_BYTES // size)
        for start in range(0, len(request.rows), step):
            some = slice(start, start + step)
            rows, bad = request.rows[some], dict[int, str]()
            whole = np.empty((len(rows), *form.fixed_shape), array.dtype)
            self.reader.gather(name, rows, whole, slice(None), data=request.data, wrong=bad)
            out.wrong.update({start + place: reason for place, reason in bad.items()})
            put_parts(whole, corners[some], array, slots[some])

    def strided(self, field: str) -> StridedRows | None:
        """Return the places of a field's rows in a map; None if they can't be copied from one."""
        is_readable = not (self._has_units or self.source.is_fetched)
        return self.reader.plain(field, data=self.data) if is_readable else None

    def lengths(self, field: str, rows: Ints) -> Ints | None:
        """Return the first lengths of samples of a field, if they are known without reading."""
        return self.reader.lengths(field, rows)

    def name(self, row: int) -> str:
        """Return a sample's name for messages."""
        return self.reader.name(row)
