"""The sidecars of an index, read where they lie; remote ones are small objects of the cache."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from penstock.cache.errors import CorruptShardError, IndexChangedError
from penstock.readers.files.names import below, printable
from penstock.readers.formats.local_files import REINDEX
from penstock.readers.index.index_folder import warn_of_damage

if TYPE_CHECKING:
    from penstock.readers.formats.sidecar import Sidecar
    from penstock.readers.index.manifest import Manifest
    from penstock.readers.index.mending import Mender
    from penstock.readers.origin.remote import RemoteFolder

_FETCHES = 3


class Sidecars:
    """Reads the sidecars of one index; safe for several threads.

    place: where they are, a local or a remote folder; None for a dataset that carries its index and
    has none. mender: makes damaged ones anew, of an index that only we keep.
    """

    def __init__(
        self, manifest: Manifest, place: bytes | RemoteFolder | None, mender: Mender | None = None
    ) -> None:
        self._manifest, self._place, self._mender = manifest, place, mender
        self._layout = manifest.about.layout
        self._has_warned = threading.Event()

    @property
    def are_local(self) -> bool:
        """Whether reading one needs no remote."""
        return isinstance(self._place, bytes)

    def read(self, shard: int) -> Sidecar:
        """Read the sidecar of one shard. Raises CorruptShardError, IndexChangedError,
        FetchError."""
        sidecar = self._read(shard)
        manifest = self._manifest
        wanted = int(manifest.samples[shard]), int(manifest.shard_bytes[shard])
        if (sidecar.samples, sidecar.size_bytes) != wanted:
            raise CorruptShardError(
                f"{printable(manifest.names[shard])}: this part of the index is of "
                f"{sidecar.samples:,} samples and {sidecar.size_bytes:,} bytes, the manifest says "
                f"{wanted[0]:,} and {wanted[1]:,}. {REINDEX}"
            )
        return sidecar

    def _read(self, shard: int) -> Sidecar:
        name, etag = self._manifest.names[shard], self._manifest.etags[shard]
        place = self._place
        if place is None:
            raise TypeError("a pack has no sidecars")
        if isinstance(place, bytes):
            folder = place

            def here() -> Sidecar:
                return self._parse(below(folder, name), etag)

            return here() if self._mender is None else self._mender.read(shard, here)
        # The fingerprint is part of the version: an index built anew has other sidecars.
        version = self._manifest.about.fingerprint
        url = f"{place.url.rstrip('/')}/{printable(name)}"
        for _ in range(_FETCHES - 1):
            try:
                path = place.file(name, size_bytes=None, version=version)
                return self._parse(path, etag, url)
            except (CorruptShardError, IndexChangedError) as error:  # the copy is damaged, or gone
                self._warn(place, error)
                place.drop(name, size_bytes=None, version=version)
        path = place.file(name, size_bytes=None, version=version)
        return self._parse(path, etag, url)

    def _parse(self, path: bytes, etag: str, url: str | None = None) -> Sidecar:
        from penstock.readers.formats.sidecar import read_sidecar  # a pack needs none

        manifest = self._manifest
        return read_sidecar(
            path,
            etag=etag,
            layout=self._layout,
            is_file_per_sample=manifest.format.is_file_per_sample,
            url=url,
        )

    def _warn(self, place: RemoteFolder, error: Exception) -> None:
        if not self._has_warned.is_set():
            self._has_warned.set()
            warn_of_damage(place.url, error)
