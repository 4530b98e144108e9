"""Define what a dataset format is: a frozen description and three duties.

- *Recognise and list*: decide whether a dataset has the format, and list its files
  (`Format.recognises`, `Format.list`, `Listing.candidates`).
- *Index a shard*: locate and describe its samples (`Candidates`); an index records the result in a
  `Sidecar`.
- *Read rows*: open a shard, from local files or from a blob of the cache (`Format.open`,
  `OpenShard`).

Everything else (building, reusing and repairing an index, the cache, checksums, packing) is common
code in the packages above. To add a format, add a module or package to this folder and a line to
`format_registry.py`.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.readers.fieldtypes import ColumnCrop, Schema
    from penstock.readers.formats.candidates import Candidates
    from penstock.readers.formats.chunk_cache import DecodedChunks
    from penstock.readers.formats.open_shard import OpenShard, SampleLayout
    from penstock.readers.formats.shard_summary import Sums
    from penstock.readers.formats.sidecar import ShardPlace, Sidecar
    from penstock.readers.origin import Entry, Origin, QuarantineEntry, RemoteFolder
    from penstock.readers.types import Ints

    Draw = Callable[[Ints], Mapping[str, ColumnCrop]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """The facts that a manifest records about one shard.

    name: of the shard's file, or of its sidecar. size_bytes: bytes to read. sums: checksums of the
    facts that are recorded about its samples. layout: how the samples are stored. overhead_bytes:
    the most bytes that a pack's shard holds in addition to its samples; None if unknown. fields: of
    a shard of chunks, the fields whose bytes its blob holds. chunks: keeps the shard's decoded
    chunks, under this number; None if they aren't kept, or if the shard has no chunks.
    """

    name: bytes
    size_bytes: int
    samples: int
    sums: Sums
    layout: SampleLayout
    overhead_bytes: int | None
    fields: tuple[str, ...] = ()
    chunks: tuple[DecodedChunks, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of the listing that an index was built from.

    fingerprint: a hex digest that changes with any name, size, modification time or version.
    directories: modification time in ns of each local folder that was listed, by name.
    """

    fingerprint: str
    directories: Mapping[bytes, int]

    @classmethod
    def of(cls, entries: Iterable[Entry], directories: Mapping[bytes, int]) -> Snapshot:
        """Return the snapshot of these files, in this order."""
        digest = hashlib.sha256()
        for entry in entries:
            digest.update(b"%d:%s" % (len(entry.name), entry.name))
            digest.update(f"{entry.size_bytes}:{entry.mtime_ns}:{entry.version}\n".encode())
        return cls(fingerprint=digest.hexdigest(), directories=directories)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DatasetFiles:
    """The files of a dataset, in the order of its samples, before their contents are read.

    quarantined: entries that are left out, and why. directories: modification time in ns of each
    local folder that was listed, by name, if they show that a file was added or removed. found:
    whatever else the format found while it listed the files.
    """

    entries: Sequence[Entry]
    quarantined: Sequence[QuarantineEntry] = ()
    directories: Mapping[bytes, int] = field(default_factory=dict)
    found: Any = None


class Listing(Protocol):
    """The files of a dataset by name, size and time, before any of them is read."""

    def snapshot(self) -> Snapshot:
        """Return the snapshot that an index records of this listing."""

    def candidates(self, *, workers: int) -> Candidates:
        """Return the candidates for samples, and warn about files that are left out.

        May read headers, on `workers` threads. Raises DatasetError, IndexChangedError or
        FetchError.
        """

    def counterparts(
        self, number: int, name: bytes, *, total: int, workers: int
    ) -> Iterator[tuple[Candidates, int]]:
        """Yield candidates from which a shard of an earlier index can be rebuilt, likeliest first.

        Each item holds the candidates and the number of the shard among them. number, name: of the
        shard and of its sidecar in the earlier index. total: number of shards in that index.
        """


_IDENTITY = re.compile(rb".*-([0-9a-f]{32})\.arrow", re.S)


def identity_of(name: bytes) -> str | None:
    """Return the identity of the file that is a shard, from the name of its sidecar; None if the
    shard isn't one file."""
    found = _IDENTITY.fullmatch(name)
    return None if found is None else found[1].decode()


class Format(ABC):
    """The base of dataset formats. By default, a sidecar records all that is needed to read a
    shard.

    name: as in `format=` and in manifests. least_sample_bytes: the fewest bytes that a sample takes
    in its shard. is_file_per_sample: True if each sample is a file or object of its own that is
    read whole; otherwise samples are views of a mapped shard. has_own_index: True if the dataset
    carries its index. keeps_facts: True if an updated index reuses the facts that it has recorded
    about unchanged files; statistics that need every file's bytes aren't computed then.
    reads_samples: True if all
    samples are read for the index, not only metadata. is_encoded: True if samples of
    arrays that can be read singly are decoded, which uses a core. sampling: the arguments of
    `Sampling` that the format uses, and "file" if it has sample="file". has_splits: True if its
    files name the parts of a dataset, of which `split=` selects one.
    """

    name: ClassVar[str]
    least_sample_bytes: ClassVar[int] = 1
    is_file_per_sample: ClassVar[bool] = False
    has_own_index: ClassVar[bool] = False
    keeps_facts: ClassVar[bool] = False
    reads_samples: ClassVar[bool] = True
    is_encoded: ClassVar[bool] = False
    sampling: ClassVar[tuple[str, ...]] = ()
    has_splits: ClassVar[bool] = False

    @abstractmethod
    def recognises(self, origin: Origin) -> bool:
        """Return True if a dataset has this format, judged by the files at its root. Raises
        ConfigError if they don't decide it, DatasetError or FetchError."""

    def list(self, origin: Origin) -> Listing:
        """List the files of a dataset that doesn't carry its index. Raises DatasetNotFoundError,
        ConfigError, DatasetError or FetchError."""
        raise TypeError(f"{origin.url}: {self.name} datasets carry their index")

    def is_current(
        self, origin: Origin, snapshot: Snapshot, listing: Callable[[], Listing]
    ) -> bool:
        """Return True if an index of this snapshot is up to date: by default, if the files are the
        same. A format with a cheaper check doesn't call `listing`."""
        return listing().snapshot().fingerprint == snapshot.fingerprint

    def default_fields(self, schema: Schema) -> tuple[str, ...] | None:
        """Return the fields of a batch if the user chose none; None for the default of all
        datasets."""
        return None

    def has_default_names(self, origin: Origin) -> bool:
        """Return True if the places that the user gives fields can only be names of fields. By
        default they may be columns, arrays or paths."""
        return False

    def stored_fields(self, schema: Schema, fields: tuple[str, ...]) -> tuple[str, ...]:
        """Return the fields for which the index records the bytes of some fields: these themselves,
        unless one chunk holds several."""
        return fields

    def open(
        self, entry: ShardEntry, sidecar: Callable[[], Sidecar], place: ShardPlace
    ) -> OpenShard:
        """Open a shard at its place: by default with its sidecar, which locates its files.

        sidecar: reads it. Raises CorruptShardError, IndexChangedError, DatasetError or FetchError.
        """
        return sidecar().open(place)

    def wanted_share(
        self, entry: ShardEntry, sidecar: Callable[[], Sidecar], fields: Sequence[str], draw: Draw
    ) -> float:
        """Return the share of the bytes of a shard's fields that is needed for parts of samples: 1
        by default, as samples are stored whole. draw: returns the parts, given sample numbers."""
        return 1.0

    def blob_key(
        self, origin: RemoteFolder, *, name: bytes, etag: str, crc32c: int, columns_crc32c: int
    ) -> str:
        """Return the key of a shard's blob in a cache, made from the identity of its file, or from
        the sidecar's checksum.

        It is derived without I/O, from the shard's row of the manifest alone, so that all processes
        and nodes derive the same key.

        The sidecar's name contains the identity of a file that is a shard, so this is the key under
        which the file was fetched before it had an index. If a shard has several files, the
        sidecar's checksum covers all that is recorded about them.
        """
        identity = identity_of(name)
        return origin.archive_key(identity) if identity else origin.blob_key(name, etag)
