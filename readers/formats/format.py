"""Define what a dataset format is: a frozen description and three duties.

- *Recognise and list*: is this dataset of the format, and which files does it have
  (`Format.recognises`, `Indexing.list`, `Listing.candidates`).
- *Index a shard*: where its samples lie and what is known of them (`Candidates`); what an index
  notes of that is a `Sidecar`.
- *Read rows*: open a shard, local files or a blob of the cache (`Format.opener`, `OpenShard`).

Everything else (building, keeping and mending an index, the cache, checksums, packing) is common
and lives above. A new format is a module or package here and a line in `format_registry.py`.
`SpanFormat` is the base of formats whose samples are byte ranges that a sidecar locates.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from penstock.cache.base import Blob
    from penstock.cache.blobs import Remote
    from penstock.readers.fields import Schema
    from penstock.readers.formats.candidates import Candidates
    from penstock.readers.formats.chunk_cache import ShardChunks
    from penstock.readers.formats.open_shard import OpenShard, SampleLayout
    from penstock.readers.formats.shard_summary import Sums
    from penstock.readers.formats.sidecar import Sidecar
    from penstock.readers.origin import Entry, Origin, RemoteFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """What a manifest says of one shard.

    name: of its file, or of its sidecar; size_bytes: to read it; sums: of what is noted of its
    samples; layout: how they are stored; overhead_bytes: what a pack's shards hold beside the bytes
    of their samples at most, where that is known. fields: of a shard of chunks, those whose bytes
    its blob holds. chunks: where its decoded chunks are kept; None: nowhere, or it has none.
    """

    name: bytes
    size_bytes: int
    samples: int
    sums: Sums
    layout: SampleLayout
    overhead_bytes: int | None
    fields: tuple[str, ...] = ()
    chunks: ShardChunks | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What an index notes of the listing that it was built over.

    fingerprint: changes with any name, size, time or version, hex; directories: modification time
    in ns of each local folder that was listed, by name.
    """

    fingerprint: str
    directories: Mapping[bytes, int]

    @classmethod
    def of(cls, entries: Iterable[Entry], directories: Mapping[bytes, int]) -> Snapshot:
        """A snapshot of these files, in their order."""
        digest = hashlib.sha256()
        for entry in entries:
            digest.update(b"%d:%s" % (len(entry.name), entry.name))
            digest.update(f"{entry.size_bytes}:{entry.mtime_ns}:{entry.version}\n".encode())
        return cls(fingerprint=digest.hexdigest(), directories=directories)


class ShardOpener(Protocol):
    """Opens one shard. Raises CorruptShardError, IndexChangedError, DatasetError, FetchError."""

    def open_local(self, root: bytes) -> OpenShard:
        """Open the shard below a local folder."""

    def open_blob(self, remote: Remote, blob: Blob) -> OpenShard:
        """Open the shard in a blob of the cache."""


class Listing(Protocol):
    """What lies there by names, sizes and times; nothing was read."""

    def snapshot(self) -> Snapshot:
        """What an index notes of this listing."""

    def candidates(self, *, workers: int) -> Candidates:
        """What may be samples, with a warning of what is left out; may read headers, on `workers`
        threads. Raises DatasetError, IndexChangedError, FetchError."""

    def counterparts(
        self, number: int, name: bytes, *, total: int, workers: int
    ) -> Iterator[tuple[Candidates, int]]:
        """What a shard of an earlier index can be made from today, likeliest first: candidates and
        the number of the shard among them.

        number, name: of the shard and its sidecar in that index; total: shards in it.
        """


class Indexing(Protocol):
    """How a dataset without an index of its own gets one.

    keeps_facts: an index that is brought up to date takes over what it knows of unchanged files; so
    nothing is counted that needs every file's bytes.
    """

    keeps_facts: ClassVar[bool]

    def list(self, origin: Origin) -> Listing:
        """List what lies there. Raises DatasetNotFoundError, ConfigError, DatasetError,
        FetchError."""

    def is_current(
        self, origin: Origin, snapshot: Snapshot, listing: Callable[[], Listing]
    ) -> bool:
        """Return True if an index over this snapshot is still current: by default, if the files
        are the same ones. A format that has a cheaper check doesn't call listing()."""
        del origin
        return listing().snapshot().fingerprint == snapshot.fingerprint


class Format(Protocol):
    """How one kind of dataset lies in storage.

    name: as in `format=` and in manifests. least_sample_bytes: what a sample takes in its shard at
    least. is_file_per_sample: a sample is a file or an object of its own, read whole; else samples
    are views of a mapped shard. indexing: None where the dataset carries its index itself.
    """

    name: ClassVar[str]
    least_sample_bytes: ClassVar[int]
    is_file_per_sample: ClassVar[bool]
    indexing: ClassVar[Indexing | None]

    def recognises(self, origin: Origin) -> bool:
        """Whether a dataset is of this format, by what lies at its root. Raises ConfigError where
        that can't be told, DatasetError, FetchError."""

    def opener(self, entry: ShardEntry, sidecar: Callable[[], Sidecar]) -> ShardOpener:
        """What opens a shard. sidecar: reads the shard's; raises as ShardOpener does."""

    def blob_key(
        self, origin: RemoteFolder, *, name: bytes, etag: str, crc32c: int, columns_crc32c: int
    ) -> str:
        """Names a shard's blob in a cache, by its row of the manifest alone, without I/O: every
        process and node derives the same."""


def chosen_by(format: Format, schema: Schema) -> tuple[str, ...] | None:
    """The fields of a batch that a format itself chooses where nobody named any (it needn't)."""
    choose = getattr(format, "default_fields", None)
    return None if choose is None else choose(schema)


_IDENTITY = re.compile(rb".*-([0-9a-f]{32})\.arrow", re.S)


class SpanFormat:
    """A format whose samples are spans: a sidecar says all that it takes to read them."""

    least_sample_bytes: ClassVar[int] = 1
    is_file_per_sample: ClassVar[bool] = False

    def default_fields(self, schema: Schema) -> tuple[str, ...] | None:
        """The fields of a batch where nobody chose any; None: as of any dataset."""
        del schema
        return None

    def opener(self, entry: ShardEntry, sidecar: Callable[[], Sidecar]) -> ShardOpener:
        """The sidecar, which knows each file and opens the shard."""
        del entry
        return sidecar()

    def blob_key(
        self, origin: RemoteFolder, *, name: bytes, etag: str, crc32c: int, columns_crc32c: int
    ) -> str:
        """A key by what a listing told of a file that is a shard, which its sidecar's name carries:
        so it is the key that the file was fetched under before it had an index. Of several files a
        key by the sidecar's checksum, and so by all that it says of them."""
        del crc32c, columns_crc32c
        found = _IDENTITY.fullmatch(name)
        return (
            origin.blob_key(name, etag) if found is None else origin.archive_key(found[1].decode())
        )
