"""Tar files as a format: WebDataset's samples, read where they lie."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from penstock.readers.formats.tar.archives import holds_tars, list_archives
from penstock.readers.formats.tar.candidates import TarListing
from penstock.readers.formats.tar.sidecar import read_tar_sidecar

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.readers.formats.format import (
        Format,
        Indexing,
        Listing,
        ShardEntry,
        ShardOpener,
        Sidecar,
        Snapshot,
    )
    from penstock.readers.formats.tar.sidecar import TarSidecar
    from penstock.readers.origin.origin import Origin
    from penstock.readers.origin.remote import RemoteFolder

_IDENTITY = re.compile(rb".*-([0-9a-f]{32})\.arrow", re.S)


@dataclass(frozen=True, slots=True)
class TarIndexing:
    """How tar files get an index: local ones are looked at each time (name, size, time), and where
    any differs the whole set is indexed anew, since a label more or less may concern every
    sample."""

    keeps_facts: ClassVar[bool] = False

    def list(self, origin: Origin) -> TarListing:
        """List all archives; raises as `list_archives` does."""
        return TarListing(origin, list_archives(origin))

    def is_current(
        self, origin: Origin, snapshot: Snapshot, listing: Callable[[], Listing]
    ) -> bool:
        """Whether these are the very archives that were indexed."""
        del origin
        return listing().snapshot().fingerprint == snapshot.fingerprint

    def read_sidecar(self, path: bytes, *, etag: str) -> TarSidecar:
        """Read the sidecar of an archive."""
        return read_tar_sidecar(path, etag=etag)


@dataclass(frozen=True, slots=True)
class TarFormat:
    """A folder of tar files, or those that a URL names."""

    name: ClassVar[str] = "tar"
    least_sample_bytes: ClassVar[int] = 1024  # its header and a block
    is_file_per_sample: ClassVar[bool] = False
    indexing: ClassVar[Indexing | None] = TarIndexing()

    def recognises(self, origin: Origin) -> bool:
        """Whether tar files were named, or the root holds some; see `holds_tars`."""
        return origin.selection is not None or holds_tars(origin)

    def opener(self, entry: ShardEntry, sidecar: Callable[[], Sidecar]) -> ShardOpener:
        """The sidecar, which knows the archive and opens it."""
        del entry
        return sidecar()

    def blob_key(
        self, origin: RemoteFolder, *, name: bytes, etag: str, crc32c: int, columns_crc32c: int
    ) -> str:
        """A key by what a listing told of the archive, which its sidecar's name carries: so it is
        the key that the archive was fetched under before it had an index."""
        del crc32c, columns_crc32c
        found = _IDENTITY.fullmatch(name)
        return (
            origin.blob_key(name, etag) if found is None else origin.archive_key(found[1].decode())
        )


FORMAT: Format = TarFormat()
