"""Define formats whose samples lie in chunks that are decoded as a whole, indexed from metadata.

Such a format lists its shards with the rows of each decode unit (`Candidates.of_chunks`); no sample
is read for that. When a shard is opened it is given the shard's bytes, and reads rows of fields.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar, runtime_checkable

import numpy as np

from penstock.readers.fields import array_form, put_parts
from penstock.readers.formats.chunk_data import BlobChunkData, ChunkData, LocalChunkData
from penstock.readers.formats.format import SpanFormat
from penstock.readers.formats.open_shard import BlobShard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import Blob
    from penstock.cache.blobs import Remote
    from penstock.readers.fields import Column, ColumnCrop, Schema
    from penstock.readers.formats.candidates import Candidates
    from penstock.readers.formats.extents import Extents
    from penstock.readers.formats.format import ShardEntry, ShardOpener
    from penstock.readers.formats.open_shard import Places, StridedRows
    from penstock.readers.formats.sidecar import Sidecar
    from penstock.readers.types import Encoded

    Ints = NDArray[np.int64]
    Crops = Mapping[str, ColumnCrop]

_WHOLE_BYTES = 64 * 2**20
"""Of whole samples that are read at once for parts of them."""

_LOOKED_AT = 4096
"""Samples of a shard that tell which share of it parts of samples need."""

Chunk = TypeVar("Chunk")
"""A decoded chunk: a numpy array; an Arrow table, record batch or array."""


class ShardData(Protocol):
    """What a shard's reader is given at each call: the shard's bytes by extent, and what was
    decoded of them before. Several threads may use it.

    Raises IndexChangedError, DatasetError, FetchError.
    """

    def read(self, extents: Sequence[int]) -> list[Encoded]:
        """The bytes of some extents, of remote ones all at once; empty where the object that held
        one is gone, if the format says that this can be (`ChunkFormat.may_lack_objects`)."""

    def read_parts(
        self, extents: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> list[Encoded]:
        """Bytes [start, end) of extents, counted from the extent's first, all at once."""

    def read_into(
        self, extents: Sequence[int], starts: Sequence[int], slots: Sequence[Encoded]
    ) -> None:
        """Read parts of extents, counted as for read_parts, into slots of their sizes: large ones,
        as each takes a read of its own."""

    def view(self, extent: int, *, size_bytes: int | None = None) -> Encoded | None:
        """A read-only view of an extent that lies on the local disk, mapped; None where it doesn't,
        or where a map isn't wanted: read it then. size_bytes: that will be looked at now, for the
        statistics; None: all."""

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
        """A chunk that was decoded, now or before: it is decoded once and kept as long as there is
        room, until it was taken `uses` times. Copy out of it what a batch needs, and let it go: a
        view that is handed on keeps all of it in memory. It is read-only.

        chunk: a number of the shard's own, for each part that is decoded as a whole (of each
        field); decode: makes it, on this thread or another that came first; raises ValueError where
        the bytes are damaged, in all that wait; takes no other chunk. uses: rows of the shard that
        need it; taken: rows of this call that do. size_bytes: that it will take, where metadata
        tell, so that room is made before; 0: unknown. is_view: it looks into a map of the file, so
        it takes no memory.
        """

    def kept(self, chunks: Sequence[int], taken: Sequence[int]) -> Mapping[int, Any]:
        """Those of some chunks that are kept, by number, at once: cheaper than a `decoded` each,
        whose rules hold. taken: rows of this call that need each. Take the others by `decoded`."""

    def room(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Writable memory to decode a chunk into, its numbers anything: that of chunks that nobody
        looks into any more."""

    def in_order(self, chunks: Sequence[int]) -> Iterator[int]:
        """The same chunks in the order in which to take them: those that another thread decodes at
        this moment come last, so that threads share the work rather than wait for one another."""


class ChunkReader(Protocol):
    """Decodes chunks of one shard. Several threads may call it.

    wrong: where samples that can't be had are noted, by place in rows, with the reason; their
    values are zeros or empty. Raises what ShardData raises.
    """

    def needs(self, rows: Ints, fields: Sequence[str], crops: Crops) -> list[int]:
        """The extents that these rows need, each once: so that those of all the shards of a batch
        are fetched at once. Nothing is read or decoded here. crops: the parts that are wanted of
        the rows, by field, of those of which not all is. A reader that reads parts of extents says
        which by `needs_parts` (`PartsReader`)."""

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
        """Read a field whose samples have one shape: out[places] = the rows. corners: of the part
        of each sample that is wanted, int64, shape (n, dimensions), the part being of the shape of
        out; None: all of it."""

    def read_rows(
        self, rows: Ints, fields: Sequence[str], *, data: ShardData, wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """Read fields whose samples differ in shape, are encoded or texts; of a field that some
        samples lack also "<name>.present", a DenseColumn of bool."""

    def name(self, row: int) -> str:
        """A sample's name for people."""

    # A reader may have two more: `plain(field, *, data) -> Plain | None`, see `formats.plain`, and
    # `lengths(field, rows) -> Ints`, the first lengths of samples where it knows them unread.


@runtime_checkable
class PartsReader(Protocol):
    """A reader of samples that can be had alone: of a large extent it needs just their bytes."""

    def needs_parts(
        self, rows: Ints, fields: Sequence[str], crops: Crops
    ) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """What these rows need: of some extents bytes [start, end), counted from the extent's
        first, as for `ShardData.read_parts`. An extent may come several times."""


class ChunkFormat(SpanFormat, ABC):
    """The base of such formats: fetching, caching and opening are common, decoding isn't.

    may_lack_objects: a file that isn't there stands for fill values (Zarr). takes_corners: its
    readers take parts of samples, and need less for them; else these are taken of whole samples.
    is_encoded: samples that can be had alone are decoded too, which takes a core.
    """

    may_lack_objects: ClassVar[bool] = False
    takes_corners: ClassVar[bool] = False
    is_encoded: ClassVar[bool] = False

    @abstractmethod
    def open_chunks(self, shard: ChunkedShardFacts) -> ChunkReader:
        """Open a shard; reads none of its samples. Raises CorruptShardError."""

    def opener(self, entry: ShardEntry, sidecar: Callable[[], Sidecar]) -> ShardOpener:
        """What opens a shard, here and in the cache."""
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
    """What an index notes of one shard of chunks, as `ChunkedShard` told it."""

    schema: Schema
    samples: int
    extents: Extents
    units: Ints
    notes: bytes


@dataclass(frozen=True, slots=True)
class _ChunkOpener:
    """Opens one shard of such a format."""

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
        whole = _WholePartsReader if isinstance(reader, PartsReader) else _WholeReader
        return whole(reader, sidecar.layout.schema)

    def wanted_share(
        self, fields: Sequence[str], draw: Callable[[Ints], Mapping[str, ColumnCrop]]
    ) -> float:
        """Which share of the bytes of these fields is needed for parts of samples, which a function
        draws of their numbers; of the first ones of a shard that has many."""
        reader, extents = self._reader(), self.sidecar.extents
        assert extents is not None
        rows = np.arange(min(self.entry.samples, _LOOKED_AT), dtype=np.int64)
        some, all = (reader.needs(rows, fields, crops) for crops in (draw(rows), {}))
        return float(extents.sizes[some].sum() / max(1, extents.sizes[all].sum()))

    def open_local(self, root: bytes) -> ChunkShard:
        """Open the shard below a local folder."""
        data = LocalChunkData(
            root, self.sidecar, self.entry.chunks, may_lack=self.format.may_lack_objects
        )
        return ChunkShard(self._reader(), data, self.entry)

    def open_blob(self, remote: Remote, blob: Blob) -> ChunkBlob:
        """Open the shard in a blob of the cache."""
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


class _Chunks:
    """What a shard of chunks answers, wherever its bytes are; it has no spans."""

    def __init__(self, reader: ChunkReader, data: ChunkData, entry: ShardEntry) -> None:
        self.reader, self.data = reader, data
        self.table = np.empty((entry.samples, entry.layout.table.count), np.int64)

    def reading(self, data: ChunkData) -> Self:
        """The same shard, whose bytes are had so."""
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
        """Where a field's rows lie, if they can be copied out of a map; None: gather them."""
        tell = getattr(getattr(self.reader, "inner", self.reader), "plain", None)
        found: StridedRows | None = None if tell is None else tell(field, data=self.data)
        return found

    def lengths(self, field: str, rows: Ints) -> Ints | None:
        """First lengths of samples of a field, int64, shape (n,), if they are known unread."""
        tell = getattr(getattr(self.reader, "inner", self.reader), "lengths", None)
        found: Ints | None = None if tell is None else tell(field, rows)
        return found

    def read_rows(
        self, rows: Ints, fields: Sequence[str], wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """Read rows of other fields."""
        return self.reader.read_rows(rows, fields, data=self.data, wrong=wrong)

    def name(self, row: int) -> str:
        """A sample's name for people."""
        return self.reader.name(row)

    def source_names(self) -> list[bytes] | None:
        """Always None: these are the data themselves."""
        return None


class _WholeReader:
    """A reader whose samples are asked for as a whole, whatever part of them is wanted."""

    def __init__(self, reader: ChunkReader, schema: Schema) -> None:
        self.inner, self._schema = reader, schema

    def plain(self, field: str, *, data: ShardData) -> StridedRows | None:
        """Where a field's rows lie in a map."""
        tell = getattr(self.inner, "plain", None)
        found: StridedRows | None = None if tell is None else tell(field, data=data)
        return found

    def needs(self, rows: Ints, fields: Sequence[str], crops: Crops) -> list[int]:
        """The extents that these rows need."""
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
            found: dict[int, str] = {}
            self.inner.gather(field, rows[some], whole, slice(None), data=data, wrong=found)
            wrong |= {start + place: why for place, why in found.items()}
            put_parts(whole, corners[some], out, slots[some])

    def read_rows(
        self, rows: Ints, fields: Sequence[str], *, data: ShardData, wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """Read other fields."""
        return self.inner.read_rows(rows, fields, data=data, wrong=wrong)

    def name(self, row: int) -> str:
        """A sample's name for people."""
        return self.inner.name(row)


class _WholePartsReader(_WholeReader):
    """One that says which parts of extents it needs."""

    def needs_parts(
        self, rows: Ints, fields: Sequence[str], crops: Crops
    ) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """What these rows need."""
        del crops
        assert isinstance(self.inner, PartsReader)
        return self.inner.needs_parts(rows, fields, {})


class ChunkShard(_Chunks):
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


class ChunkBlob(_Chunks, BlobShard):
    """A shard of chunks in a blob of the cache. has_units: samples can't be had alone."""

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
        _Chunks.__init__(self, reader, data, entry)
        self.has_units = has_units
        BlobShard.__init__(self, remote, blob, self.table)
