"""Image folders as a format: one file a sample, grouped into virtual shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from penstock.readers.formats.folder.candidates import FolderCandidates
from penstock.readers.formats.folder.listing import changed_directories, list_folder
from penstock.readers.formats.folder.sidecar import read_folder_sidecar
from penstock.readers.origin.local import LocalFolder

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.readers.formats.folder.sidecar import FolderSidecar
    from penstock.readers.formats.format import (
        Format,
        Indexing,
        Listing,
        ShardEntry,
        ShardOpener,
        Sidecar,
        Snapshot,
    )
    from penstock.readers.origin.origin import Origin
    from penstock.readers.origin.remote import RemoteFolder


@dataclass(frozen=True, slots=True)
class FolderIndexing:
    """How a folder gets an index: by the times of its folders it is known whether files came or
    went, so a local one isn't listed at each opening. A file that changed in place is found when it
    is read, by its size and CRC-32C."""

    keeps_facts: ClassVar[bool] = True

    def list(self, origin: Origin) -> FolderCandidates:
        """List all files; raises as `list_folder` does."""
        return FolderCandidates(origin, list_folder(origin))

    def is_current(
        self, origin: Origin, snapshot: Snapshot, listing: Callable[[], Listing]
    ) -> bool:
        """Whether no folder's time has changed, or of a remote dataset no file."""
        if isinstance(origin, LocalFolder):
            return not changed_directories(origin, snapshot.directories)
        return listing().snapshot().fingerprint == snapshot.fingerprint

    def read_sidecar(self, path: bytes, *, etag: str) -> FolderSidecar:
        """Read the sidecar of a virtual shard."""
        return read_folder_sidecar(path, etag=etag)


@dataclass(frozen=True, slots=True)
class FolderFormat:
    """A folder of images, in one sub-folder a class or directly."""

    name: ClassVar[str] = "folder"
    least_sample_bytes: ClassVar[int] = 1
    is_file_per_sample: ClassVar[bool] = True
    indexing: ClassVar[Indexing | None] = FolderIndexing()

    def recognises(self, origin: Origin) -> bool:
        """Whether no tar files were named: what no other format takes, listing says what is
        wrong."""
        return origin.selection is None

    def opener(self, entry: ShardEntry, sidecar: Callable[[], Sidecar]) -> ShardOpener:
        """The sidecar, which knows each file and opens the shard."""
        del entry
        return sidecar()

    def blob_key(
        self, origin: RemoteFolder, *, name: bytes, etag: str, crc32c: int, columns_crc32c: int
    ) -> str:
        """A key by the sidecar's checksum, and so by all that it says of the files."""
        del crc32c, columns_crc32c
        return origin.blob_key(name, etag)


FORMAT: Format = FolderFormat()
