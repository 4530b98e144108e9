"""Define formats whose samples lie in chunks that are decoded as a whole, indexed from metadata
alone.

Such a format lists its shards with the rows of each decode unit (`Candidates.of_chunks`), without
reading a sample. An open shard is given its bytes (`ShardData`) and reads rows of fields.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar, runtime_checkable

import numpy as np

from penstock.readers.fieldtypes import array_form, put_parts
from penstock.readers.formats.chunk_data import BlobChunkData, ChunkData, LocalChunkData
from penstock.readers.formats.format import SpanFormat
from penstock.readers.formats.open_shard import BlobShard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import Blob
    from penstock.cache.blobs import Remote
    from penstock.readers.fieldtypes import Column, ColumnCrop, Schema
    from penstock.readers.formats.candidates import Candidates
    from penstock.readers.formats.extents import Extents
    from penstock.readers.formats.format import ShardEntry, ShardOpener
    from penstock.readers.formats.open_shard import Places, StridedRows
    from penstock.readers.formats.sidecar import Sidecar
    from penstock.readers.types import Encoded

    Ints = NDArray[np.int64]
    Crops = Mapping[str, ColumnCrop]

_WHOLE_BYTES = 64 * 2**20
"""Bytes of whole samples that are read at a time to take parts of them."""

_MEASURED_SAMPLES = 4096
"""Samples of a shard from which the share of its bytes that parts need is estimated."""

Chunk = TypeVar("Chunk")
"""A decoded chunk: a numpy array; an Arrow table, record batch or array."""


class ShardData(Protocol):
    """The bytes of a shard by extent, and the chunks decoded from them, as its reader receives
    them.

    Safe for several threads. Raises IndexChangedError, DatasetError or FetchError.
    """

    def read(self, extents: Sequence[int]) -> list[Encoded]:
        """Read the bytes of some extents; remote ones are fetched in parallel.

        The bytes are empty if the object of an extent is missing and the format allows that
        (`ChunkFormat.may_lack_objects`).
        """

    def read_parts(
        self, extents: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> list[Encoded]:
        """Read bytes [start, end) of extents, counted from the extent's first byte, in parallel."""

    def read_into(
        self, extents: Sequence[int], starts: Sequence[int], slots: Sequence[Encoded]
    ) -> None:
        """Read parts of extents, counted as for read_parts, into slots of their sizes.

        Use it for large parts, because each takes a read of its own.
        """

    def view(self, extent: int, *, size_bytes: int | None = None) -> Encoded | None:
        """Return a read-only view of an extent on the local disk, mapped.

        Returns None if the extent isn't local or mapping is off; read it then. size_bytes: how much
        of the view will be read now, for the statistics; None means all.
        """

    def decoded(
        self,
        chunk: int,
        decode: Callable[[], Chunk],
        *,
        uses: int,
        taken: int = 1,
        size_bytes: int = 0,
        is_view: bool = False,
    ) -> Chunk:
        """Return a chunk, decoding it if it isn't kept. The chunk is read-only.

        It is decoded once and kept as long as there is room, until it was taken `uses` times. Copy
        the rows of a batch out of it and drop it, because any view keeps all of it in memory.

        chunk: a number of the shard's own, one for each part that is decoded as a whole (of each
        field). decode: makes the chunk, on this thread or on another that came first. It raises
        ValueError, in all waiting threads, if the bytes are damaged, and must not request another
        chunk. uses: rows of the shard that need the chunk. taken: rows of this call that need it.
        size_bytes: of the chunk, if metadata record it, so that room can be made in advance; 0 if
        unknown. is_view: True if the chunk is a view of a mapped file, which takes no memory.
        """

    def kept(self, chunks: Sequence[int], taken: Sequence[int]) -> Mapping[int, Any]:
        """Return those of some chunks that are kept, by number, in one call.

        This is cheaper than calling `decoded` for each, and the same rules apply. taken: rows of
        this call that need each chunk. Get the other chunks from `decoded`.
        """

    def room(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return writable memory with undefined content to decode a chunk into. It is reused from
        chunks of which no view is left."""

    def in_order(self, chunks: Sequence[int]) -> Iterator[int]:
        """Yield the chunks in the order in which to request them.

        Chunks that another thread is decoding come last, so that threads share the work instead of
        waiting for one another.
        """


class ChunkReader(Protocol):
    """Decodes chunks of one shard. Several threads may call it.

    In its methods, `wrong` receives the reason for each bad sample, by place in rows; the values of
    bad samples are zeros or empty. Raises the errors of ShardData.
    """

    def needs(self, rows: Ints, fields: Sequence[str], crops: Crops) -> list[int]:
        """Return the extents that these rows need, each once, without reading or decoding anything.

        The extents of all the shards of a batch are then fetched in parallel. crops: the parts of
        the rows that are needed, by field, for fields of which not everything is needed. A reader
        that reads parts of extents returns them from `needs_parts` (`PartsReader`).
        """

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
        """Read a field whose samples have one shape: out[places] = the rows.

        corners: corner of the part of each sample that is needed, int64, shape (n, dimensions); the
        part has the shape of out. None reads whole samples.
        """

    def read_rows(
        self, rows: Ints, fields: Sequence[str], *, data: ShardData, wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """Read fields whose samples differ in shape, are encoded, or are texts.

        For a field that some samples lack, the result also has "<name>.present", a DenseColumn of
        bool.
        """

    def name(self, row: int) -> str:
        """Return a sample's name for messages."""

    # A reader may have two more methods: `plain(field, *, data) -> StridedRows | None`, and
    # `lengths(field, rows) -> Ints`, the first lengths of samples if it knows them without reading.


@runtime_checkable
class PartsReader(Protocol):
    """A reader of samples that can be read singly: of a large extent it needs only their bytes."""

    def needs_parts(
        self, rows: Ints, fields: Sequence[str], crops: Crops
    ) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """Return the bytes that these rows need: extents, and bytes [start, end) of each.

        Bytes are counted from the extent's first byte, as for `ShardData.read_parts`. An extent may
        occur several times.
        """


class ChunkFormat(SpanFormat, ABC):
    """The base of formats in chunks. Fetching, caching and opening are common code; decoding isn't.

    may_lack_objects: True if a missing file stands for fill values (Zarr). takes_corners: True if
    its readers read parts of samples, and need fewer bytes for them; otherwise parts are taken of
    whole samples. is_encoded: True if samples that can be read singly are decoded too, which uses a
    core.
    """

    may_lack_objects: ClassVar[bool] = False
    takes_corners: ClassVar[bool] = False
    is_encoded: ClassVar[bool] = False

    @abstractmethod
    def open_chunks(self, shard: ChunkedShardFacts) -> ChunkReader:
        """Open a shard without reading a sample. Raises CorruptShardError."""

    def opener(self, entry: ShardEntry, sidecar: Callable[[], Sidecar]) -> ShardOpener:
        """Return the object that opens a shard from local files or from the cache."""
        return _ChunkOpener(self, entry, sidecar())


class ChunkListing(ABC):
    """The listing of a format whose shards consist of chunks."""

    @abstractmethod
    def candidates(self, *, workers: int) -> Candidates:
        """Return the shards; see `Listing`."""

    def counterparts(
        self, number: int, name: bytes, *, total: int, workers: int
    ) -> Iterator[tuple[Candidates, int]]:
        """Yield the shard of the same number if there are as many shards as before."""
        del name
        candidates = self.candidates(workers=workers)
        if len(candidates.chunked) == total:
            yield candidates, number


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkedShardFacts:
    """The facts that an index records about one shard of chunks, from its `ChunkedShard`."""

    schema: Schema
    samples: int
    extents: Extents
    units: Ints
    notes: bytes


@dataclass(frozen=True, slots=True)
class _ChunkOpener:
    """Opens one shard of a format in chunks."""

    format: ChunkFormat
    entry: ShardEntry
    sidecar: Sidecar

    def _reader(self) -> ChunkReader:
        sidecar = self.sidecar
        assert sidecar.extents is not None
        reader = self.format.open_chunks(
            ChunkedShardFacts(
                schema=sidecar.layout.schema,
                samples=sidecar.samples,
                extents=sidecar.extents,
                units=np.array(sidecar.units, np.int64),
                notes=sidecar.notes,
            )
        )
        if self.format.takes_corners:
            return reader
        kind = _WholeSamplePartsReader if isinstance(reader, PartsReader) else _WholeSampleReader
        return kind(reader, sidecar.layout.schema)

    def wanted_share(
        self, fields: Sequence[str], draw: Callable[[Ints], Mapping[str, ColumnCrop]]
    ) -> float:
        """Return the share of these fields' bytes that is needed for parts of samples.

        draw: returns the parts of samples, given their numbers. In a shard with many samples, the
        first ones are used.
        """
        reader, extents = self._reader(), self.sidecar.extents
        assert extents is not None
        rows = np.arange(min(self.entry.samples, _MEASURED_SAMPLES), dtype=np.int64)
        some, all = (reader.needs(rows, fields, crops) for crops in (draw(rows), {}))
        return float(extents.sizes[some].sum() / max(1, extents.sizes[all].sum()))

    def open_local(self, root: bytes) -> ChunkShard:
        """Open the shard below a local folder."""
        data = LocalChunkData(
            root, self.sidecar, self.entry.chunks, may_lack=self.format.may_lack_objects
        )
        return ChunkShard(self._reader(), data, self.entry)

    def open_blob(self, remote: Remote, blob: Blob) -> ChunkBlob:
        """Open the shard from a blob of the cache."""
        data = BlobChunkData(
            remote,
            blob,
            self.sidecar,
            fields=self.entry.fields,
            chunks=self.entry.chunks,
            may_lack=self.format.may_lack_objects,
        )
        has_units = len(self.sidecar.units) > 0
        return ChunkBlob(remote, blob, self._reader(), data, self.entry, has_units=has_units)


class _BaseChunkShard:
    """The common part of a shard of chunks in a local folder and in a blob. It has no spans."""

    def __init__(self, reader: ChunkReader, data: ChunkData, entry: ShardEntry) -> None:
        self.reader, self.data = reader, data
        self.table = np.empty((entry.samples, entry.layout.table.count), np.int64)

    def with_data(self, data: ChunkData) -> Self:
        """Return the same shard with other data."""
        same = copy(self)
        same.data = data
        return same

    def gather(
        self,
        field: str,
        rows: Ints,
        out: NDArray[Any],
        places: Places,
        wrong: dict[int, str],
        *,
        corners: Ints | None = None,
    ) -> None:
        """Read rows of a field whose samples have one shape into their places."""
        self.reader.gather(field, rows, out, places, data=self.data, wrong=wrong, corners=corners)

    def plain(self, field: str) -> StridedRows | None:
        """Return the places of a field's rows in a map; None if they can't be copied from one."""
        plain = getattr(getattr(self.reader, "inner", self.reader), "plain", None)
        found: StridedRows | None = None if plain is None else plain(field, data=self.data)
        return found

    def lengths(self, field: str, rows: Ints) -> Ints | None:
        """Return the first lengths of samples of a field, int64, shape (n,), if they are known
        without reading."""
        lengths = getattr(getattr(self.reader, "inner", self.reader), "lengths", None)
        found: Ints | None = None if lengths is None else lengths(field, rows)
        return found

    def read_rows(
        self, rows: Ints, fields: Sequence[str], wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """Read rows of other fields."""
        return self.reader.read_rows(rows, fields, data=self.data, wrong=wrong)

    def name(self, row: int) -> str:
        """Return a sample's name for messages."""
        return self.reader.name(row)

    def source_names(self) -> list[bytes] | None:
        """Return None: the shard isn't a copy of other data."""
        return None


class _WholeSampleReader:
    """Reads whole samples with another reader and takes the needed parts of them."""

    def __init__(self, reader: ChunkReader, schema: Schema) -> None:
        self.inner, self._schema = reader, schema

    def needs(self, rows: Ints, fields: Sequence[str], crops: Crops) -> list[int]:
        """Return the extents that these rows need."""
        del crops
        return self.inner.needs(rows, fields, {})

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
        """Read a field whose samples have one shape."""
        if corners is None:
            self.inner.gather(field, rows, out, places, data=data, wrong=wrong)
            return
        form = array_form(self._schema[field])
        assert form is not None
        slots = np.arange(len(out))[places]
        size = max(1, int(np.prod(form.fixed_shape)) * out.dtype.itemsize)
        step = max(1, _WHOLE_BYTES // size)
        for start in range(0, len(rows), step):
            some = slice(start, start + step)
            whole = np.empty((len(rows[some]), *form.fixed_shape), out.dtype)
            bad: dict[int, str] = {}
            self.inner.gather(field, rows[some], whole, slice(None), data=data, wrong=bad)
            wrong |= {start + place: reason for place, reason in bad.items()}
            put_parts(whole, corners[some], out, slots[some])

    def read_rows(
        self, rows: Ints, fields: Sequence[str], *, data: ShardData, wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """Read other fields."""
        return self.inner.read_rows(rows, fields, data=data, wrong=wrong)

    def name(self, row: int) -> str:
        """Return a sample's name for messages."""
        return self.inner.name(row)


class _WholeSamplePartsReader(_WholeSampleReader):
    """The same for a reader that returns the parts of extents that it needs."""

    def needs_parts(
        self, rows: Ints, fields: Sequence[str], crops: Crops
    ) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """Return the bytes that these rows need."""
        del crops
        assert isinstance(self.inner, PartsReader)
        return self.inner.needs_parts(rows, fields, {})


class ChunkShard(_BaseChunkShard):
    """A shard of chunks in a local folder."""

    is_mapped = False
    is_file_per_sample = False

    def views(self, starts: list[int], ends: list[int]) -> list[Encoded]:
        """Raise TypeError: there are no spans."""
        raise TypeError(f"{len(starts)} spans up to {ends} of a shard that has none")

    def read_into(self, rows: list[int], starts: list[int], slots: list[Encoded]) -> None:
        """Raise TypeError: there are no spans."""
        raise TypeError(f"{len(slots)} spans from {starts} of a shard that has none, rows {rows}")

    def advise(self, starts: Ints, ends: Ints) -> None:
        """Do nothing: there are no spans."""


class ChunkBlob(_BaseChunkShard, BlobShard):
    """A shard of chunks in a blob of the cache. has_units: True if samples can't be read singly."""

    def __init__(
        self,
        remote: Remote,
        blob: Blob,
        reader: ChunkReader,
        data: ChunkData,
        entry: ShardEntry,
        *,
        has_units: bool,
    ) -> None:
        _BaseChunkShard.__init__(self, reader, data, entry)
        self.has_units = has_units
        BlobShard.__init__(self, remote, blob, self.table)
