"""What a format of datasets is: a frozen description and three duties.

- *Recognise and list*: is this dataset of the format, and what lies there (`Format.recognises`,
  `Indexing.list`, `Listing.candidates`).
- *Index a shard*: what is noted of its samples, in a sidecar (`Candidates.sidecar`, `Sidecar`).
- *Read rows*: open a shard, a local file or a blob of the cache (`Format.opener`).

Everything else (building, keeping and mending an index, the cache, checksums, packing) is common
and stands above. A new format is a folder here and a line in `registry.py`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.cache.base.blob import Blob, Segment
    from penstock.cache.blobs.remote import Remote
    from penstock.readers.fields.verify import SampleFacts
    from penstock.readers.formats.grouping import Grouping
    from penstock.readers.formats.shard import OpenShard
    from penstock.readers.formats.summary import ShardSummary, Sums
    from penstock.readers.origin.origin import Entry, Origin
    from penstock.readers.origin.quarantine import QuarantineEntry
    from penstock.readers.origin.remote import RemoteFolder
    from penstock.readers.types import Encoded, Rejection


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """What a manifest says of one shard.

    name: of its file, or of its sidecar; size_bytes: to read it; sums: of its samples' columns;
    overhead_bytes: what a pack's shards hold beside their images at most, where that is known.
    """

    name: bytes
    size_bytes: int
    samples: int
    sums: Sums
    overhead_bytes: int | None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorFacts:
    """What an earlier index says of today's candidates, by position.

    same: of files that look as they did, so that this holds unread; before: of all that have the
    size they had, so that this holds where the bytes have that CRC-32C; shared, gone: samples of
    that index that are still there by name, and that aren't.
    """

    same: Mapping[int, SampleFacts]
    before: Mapping[int, SampleFacts]
    shared: int
    gone: int


class ShardOpener(Protocol):
    """Opens one shard. Raises CorruptShardError, IndexChangedError, DatasetError, FetchError."""

    def open_local(self, root: bytes) -> OpenShard:
        """Open the shard below a local folder."""

    def open_blob(self, remote: Remote, blob: Blob) -> OpenShard:
        """Open the shard in a blob of the cache."""


class Sidecar(ShardOpener, Protocol):
    """What an index notes of one shard's samples: all that it takes to read them."""

    @property
    def samples(self) -> int:
        """How many samples there are, at least 1."""

    @property
    def size_bytes(self) -> int:
        """The bytes of the shard, as the manifest counts them."""

    @property
    def suffix(self) -> bytes:
        """What the stem of the sidecar's name ends in: what names the shard's blob in a cache where
        that isn't the sidecar's own checksum, else empty."""

    def segments(self) -> Sequence[Segment]:
        """The objects that the shard is made of, in a remote dataset."""

    def summary(self, *, progressive: int | None) -> ShardSummary:
        """The shard's contribution to the manifest."""

    def write(self, path: bytes) -> str:
        """Write the sidecar whole; returns its etag (a checksum of the file). Raises WriteError."""


class Candidates(Protocol):
    """What may be samples: known by name and size, none decoded yet; a position counts them.

    sizes: bytes, int64, shape (n,); labels: int64, shape (n,), or None without; classes: names by
    label. shards: which candidates make up which shard, empty ones too; shard_bytes: the mean size
    that these were cut to, None where they lie as the data has them. quarantined: what can't be a
    candidate; passed_over: what is no part of a sample, by extension.
    """

    sizes: NDArray[np.int64]
    labels: NDArray[np.int64] | None
    classes: tuple[str, ...]
    shard_bytes: int | None
    quarantined: list[QuarantineEntry]
    passed_over: dict[str, int]

    @property
    def shards(self) -> Grouping:
        """The positions of each shard's candidates."""

    def name(self, position: int) -> bytes:
        """A candidate's name below the dataset's root: for the quarantine, and a pack's source
        name."""

    def read(self, positions: NDArray[np.int64]) -> list[Encoded | Rejection]:
        """Read candidates: encoded bytes, or why one can't be a sample. Raises IndexChangedError
        (it isn't as it was listed), DatasetError, FetchError."""

    def sidecar(
        self, shard: int, positions: NDArray[np.int64], facts: Sequence[SampleFacts]
    ) -> Sidecar:
        """The sidecar of one shard's good samples, at least one. facts: of each."""

    def prior(self, sidecars: Iterable[Sidecar]) -> PriorFacts:
        """What all sidecars of an earlier index say of these; asked where `keeps_facts`."""


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
        """Whether an index over this snapshot is still true; lists only where nothing cheaper
        tells."""

    def read_sidecar(self, path: bytes, *, etag: str) -> Sidecar:
        """Read a sidecar that was written. etag: what the manifest promises. Raises
        IndexChangedError (it is gone), CorruptShardError (torn, changed)."""


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
