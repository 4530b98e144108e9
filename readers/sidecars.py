"""The sidecars of an index, read where they lie; remote ones are small objects of the cache."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from cache.errors import CorruptShardError
from readers.folder_shard import read_sidecar
from readers.origin import part
from readers.tar_shard import read_tar_sidecar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.blob import Part
    from readers.folder_shard import SidecarContent
    from readers.manifest import Manifest
    from readers.origin import RemoteFolder
    from readers.tar_shard import TarSidecar

T = TypeVar("T")
S = TypeVar("S", covariant=True)


class _Reader(Protocol[S]):
    def __call__(self, path: bytes, *, etag: str) -> S: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sidecars:
    """place: where they are, a local or a remote folder; None for a pack, which has none. Each
    method raises CorruptShardError, IndexChangedError, FetchError."""

    manifest: Manifest
    place: bytes | RemoteFolder | None

    @property
    def are_local(self) -> bool:
        return isinstance(self.place, bytes)

    def files(self, shard: int) -> SidecarContent:
        """Of a folder's virtual shard."""
        return self._read(shard, read_sidecar)

    def archive(self, shard: int) -> TarSidecar:
        """Of a tar file."""
        return self._read(shard, read_tar_sidecar)

    def parts(self, shard: int) -> Sequence[Part]:
        """The objects that a remote shard of either kind is made of."""
        if self.manifest.about.kind == "tar":
            entry = self.archive(shard).archive
            return (part(entry.name, entry.size_bytes, entry.version),)
        files = self.files(shard)
        rows = zip(files.names, files.sizes.tolist(), files.versions, strict=True)
        return tuple(part(*row) for row in rows)

    def _read(self, shard: int, read: _Reader[T]) -> T:
        name, etag = self.manifest.names[shard], self.manifest.etags[shard]
        place = self.place
        if place is None:
            raise TypeError("a pack has no sidecars")
        if isinstance(place, bytes):
            return read(os.path.join(place, name), etag=etag)
        # The fingerprint is part of the version: an index built anew has other sidecars.
        version = self.manifest.about.fingerprint
        try:
            return read(place.file(name, size_bytes=None, version=version), etag=etag)
        except CorruptShardError:
            place.drop(name, size_bytes=None, version=version)
        return read(place.file(name, size_bytes=None, version=version), etag=etag)
