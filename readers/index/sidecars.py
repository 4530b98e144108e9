"""The sidecars of an index, read where they lie; remote ones are small objects of the cache."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from penstock.cache.errors import CorruptShardError, IndexChangedError
from penstock.readers.files.names import below, printable
from penstock.readers.formats.folder.shard import read_sidecar
from penstock.readers.formats.local_files import REINDEX
from penstock.readers.formats.tar.shard import read_tar_sidecar
from penstock.readers.index.mending import warn_of_damage
from penstock.readers.origin.remote import segment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.cache.base.blob import Segment
    from penstock.readers.formats.folder.shard import SidecarContent
    from penstock.readers.formats.tar.shard import TarSidecar
    from penstock.readers.index.manifest import Manifest
    from penstock.readers.index.mending import Mender
    from penstock.readers.origin.remote import RemoteFolder

T = TypeVar("T")
S = TypeVar("S", covariant=True)

_FETCHES = 3


class _Reader(Protocol[S]):
    def __call__(self, path: bytes, *, etag: str) -> S: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sidecars:
    """place: where they are, a local or a remote folder; None for a pack, which has none. mender:
    makes damaged ones anew, of an index that only we keep. Each method raises CorruptShardError,
    IndexChangedError, FetchError."""

    manifest: Manifest
    place: bytes | RemoteFolder | None
    mender: Mender | None = None
    told: threading.Event = field(default_factory=threading.Event)

    @property
    def are_local(self) -> bool:
        return isinstance(self.place, bytes)

    def files(self, shard: int) -> SidecarContent:
        """Of a folder's virtual shard."""
        content = self._read(shard, read_sidecar)
        self._compare(shard, len(content.names), int(content.sizes.sum()))
        return content

    def archive(self, shard: int) -> TarSidecar:
        """Of a tar file."""
        content = self._read(shard, read_tar_sidecar)
        self._compare(shard, len(content.names), content.archive.size_bytes)
        return content

    def segments(self, shard: int) -> Sequence[Segment]:
        """The objects that a remote shard of either kind is made of."""
        if self.manifest.about.kind == "tar":
            entry = self.archive(shard).archive
            return (segment(entry.name, entry.size_bytes, entry.version),)
        files = self.files(shard)
        rows = zip(files.names, files.sizes.tolist(), files.versions, strict=True)
        return tuple(segment(*row) for row in rows)

    def _compare(self, shard: int, samples: int, size_bytes: int) -> None:
        manifest = self.manifest
        wanted = int(manifest.samples[shard]), int(manifest.shard_bytes[shard])
        if (samples, size_bytes) != wanted:
            raise CorruptShardError(
                f"{printable(manifest.names[shard])}: this part of the index is of {samples:,} "
                f"samples and {size_bytes:,} bytes, the manifest says {wanted[0]:,} and "
                f"{wanted[1]:,}. {REINDEX}"
            )

    def _read(self, shard: int, read: _Reader[T]) -> T:
        name, etag = self.manifest.names[shard], self.manifest.etags[shard]
        place = self.place
        if place is None:
            raise TypeError("a pack has no sidecars")
        if isinstance(place, bytes):
            folder = place

            def here() -> T:
                return read(below(folder, name), etag=etag)

            return here() if self.mender is None else self.mender.read(shard, here)
        # The fingerprint is part of the version: an index built anew has other sidecars.
        version = self.manifest.about.fingerprint
        for _ in range(_FETCHES - 1):
            try:
                return read(place.file(name, size_bytes=None, version=version), etag=etag)
            except (CorruptShardError, IndexChangedError) as error:  # the copy is damaged, or gone
                self._warn(place, error)
                place.drop(name, size_bytes=None, version=version)
        return read(place.file(name, size_bytes=None, version=version), etag=etag)

    def _warn(self, place: RemoteFolder, error: Exception) -> None:
        if not self.told.is_set():
            self.told.set()
            warn_of_damage(place.url, error)
