"""Formats whose samples lie in chunks that are decoded as a whole, indexed from metadata alone.

Such a format lists its shards with the rows of each decode unit (`Candidates.of_chunks`); no sample
is read for that. When a shard is opened it is given the shard's bytes, and reads rows of fields.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penstock.cache.base.blob import BlobSpans
from penstock.readers.fields.columns import DenseColumn
from penstock.readers.files.names import below
from penstock.readers.formats.blob_shard import BlobShard
from penstock.readers.formats.local_files import read_file_into
from penstock.readers.formats.span_format import SpanFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base.blob import Blob
    from penstock.cache.blobs.remote import Remote
    from penstock.readers.fields.columns import Column
    from penstock.readers.formats.format import ShardEntry, ShardOpener
    from penstock.readers.formats.shard import Places
    from penstock.readers.formats.shard_files import ShardFiles
    from penstock.readers.formats.sidecar import Sidecar
    from penstock.readers.types import Encoded

    Ints = NDArray[np.int64]


class ShardBytes(Protocol):
    """The bytes of a shard's files, end to end."""

    size_bytes: int

    def read(self, start: int, end: int) -> Encoded:
        """Bytes [start, end). Raises IndexChangedError, DatasetError, FetchError."""


class ChunkReader(Protocol):
    """Decodes chunks of one shard. Several threads may call it."""

    def read_rows(
        self, rows: Ints, fields: Sequence[str], wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """Some rows of some fields; as `OpenShard.read_rows`."""

    def name(self, row: int) -> str:
        """A sample's name for people."""


class ChunkFormat(SpanFormat, ABC):
    """The base of such formats: opening a shard is common, decoding its chunks isn't."""

    @abstractmethod
    def open_chunks(self, data: ShardBytes, entry: ShardEntry, notes: bytes) -> ChunkReader:
        """Open a shard. notes: what the format noted of it. Raises CorruptShardError."""

    def opener(self, entry: ShardEntry, sidecar: Callable[[], Sidecar]) -> ShardOpener:
        """What opens a shard, here and in the cache."""
        return _ChunkOpener(self, entry, sidecar())


@dataclass(frozen=True, slots=True)
class _ChunkOpener:
    """Opens one shard of such a format."""

    format: ChunkFormat
    entry: ShardEntry
    sidecar: Sidecar

    def open_local(self, root: bytes) -> ChunkShard:
        """Open the shard below a local folder."""
        data = _LocalBytes(root, self.sidecar.files)
        return ChunkShard(self.format.open_chunks(data, self.entry, self.sidecar.notes), self.entry)

    def open_blob(self, remote: Remote, blob: Blob) -> ChunkBlob:
        """Open the shard in a blob of the cache."""
        data = _BlobBytes(remote, blob)
        reader = self.format.open_chunks(data, self.entry, self.sidecar.notes)
        return ChunkBlob(remote, blob, reader, self.entry)


class _LocalBytes:
    """The bytes of a shard's files in a local folder."""

    def __init__(self, root: bytes, files: ShardFiles) -> None:
        self._root, self._names, self._starts = root, files.names, files.starts
        self.size_bytes = files.size_bytes

    def read(self, start: int, end: int) -> Encoded:
        """Bytes [start, end)."""
        data = np.empty(end - start, np.uint8)
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        at = start
        for number in range(first, len(self._names)):
            begin, stop = int(self._starts[number]), int(self._starts[number + 1])
            part = data[at - start : min(end, stop) - start]
            if len(part):
                name = self._names[number]
                path = below(self._root, name)
                read_file_into(path, part, name=name, start=at - begin, is_rest=False)
            at = min(end, stop)
            if at == end:
                break
        data.flags.writeable = False
        return data


class _BlobBytes:
    """The bytes of a blob of the cache."""

    def __init__(self, remote: Remote, blob: Blob) -> None:
        self._remote, self._blob = remote, blob
        self.size_bytes = blob.source.size_bytes

    def read(self, start: int, end: int) -> Encoded:
        """Bytes [start, end)."""
        wanted = BlobSpans(blob=self._blob, starts=[start], ends=[end])
        ((data,),) = self._remote.load([wanted])
        return data


class _Chunks:
    """What a shard of chunks answers, wherever its bytes are; it has no spans."""

    def __init__(self, reader: ChunkReader, entry: ShardEntry) -> None:
        self._reader = reader
        self.table = np.empty((entry.samples, entry.layout.table.count), np.int64)

    def gather(
        self, field: str, rows: Ints, out: NDArray[Any], places: Places, wrong: dict[int, str]
    ) -> None:
        """Read rows of a field whose samples have one shape into their places."""
        column = self._reader.read_rows(rows, (field,), wrong)[field]
        assert isinstance(column, DenseColumn), field
        out[places] = column.values

    def read_rows(
        self, rows: Ints, fields: Sequence[str], wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """Read rows of other fields."""
        return self._reader.read_rows(rows, fields, wrong)

    def name(self, row: int) -> str:
        """A sample's name for people."""
        return self._reader.name(row)

    def source_names(self) -> list[bytes] | None:
        """Always None: these are the data themselves."""
        return None


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
    """A shard of chunks in a blob of the cache."""

    def __init__(self, remote: Remote, blob: Blob, reader: ChunkReader, entry: ShardEntry) -> None:
        _Chunks.__init__(self, reader, entry)
        BlobShard.__init__(self, remote, blob, self.table)
