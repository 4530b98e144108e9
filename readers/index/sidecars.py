"""Read the sidecars of an index: local files, or small objects of the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache import CorruptShardError, IndexChangedError
from penstock.readers.byte_source import REINDEX
from penstock.readers.files import below, printable
from penstock.readers.formats import read_sidecar
from penstock.readers.index.index_folders import warn_of_damage

if TYPE_CHECKING:
    from penstock.readers.formats import Sidecar
    from penstock.readers.index.manifest import Manifest
    from penstock.readers.index.repair import IndexRepair
    from penstock.readers.origin import Origin

_MOST_FETCHES = 3


class Sidecars:
    """Read the sidecars of one index. Thread-safe.

    place: their folder, local or remote. repair: rebuilds damaged ones of an index in a cache
    folder.
    """

    def __init__(
        self, manifest: Manifest, place: bytes | Origin, repair: IndexRepair | None = None
    ) -> None:
        self._manifest, self._place, self._repair = manifest, place, repair
        self._layout = manifest.about.layout
        self._has_warned = False

    @property
    def are_local(self) -> bool:
        """Return True if sidecars are read without a request to the remote."""
        return isinstance(self._place, bytes)

    def read(self, shard: int) -> Sidecar:
        """Read the sidecar of one shard. Raises CorruptShardError, IndexChangedError,
        FetchError."""
        sidecar = self._read(shard)
        manifest = self._manifest
        wanted = int(manifest.samples[shard]), int(manifest.shard_bytes[shard])
        if (sidecar.samples, sidecar.size_bytes) != wanted:
            raise CorruptShardError(
                f"{printable(manifest.names[shard])}: this part of the index has "
                f"{sidecar.samples:,} samples and {sidecar.size_bytes:,} bytes, but the manifest "
                f"records {wanted[0]:,} and {wanted[1]:,}. {REINDEX}"
            )
        return sidecar

    def _read(self, shard: int) -> Sidecar:
        name, etag = self._manifest.names[shard], self._manifest.etags[shard]
        place = self._place
        if isinstance(place, bytes):
            folder = place

            def read() -> Sidecar:
                return self._parse(below(folder, name), etag)

            return read() if self._repair is None else self._repair.read(shard, read)
        # The version is the fingerprint, because another index has other sidecars.
        version = self._manifest.about.fingerprint
        url = f"{place.url.rstrip('/')}/{printable(name)}"
        for _ in range(_MOST_FETCHES - 1):
            try:
                path = place.file(name, size_bytes=None, version=version)
                return self._parse(path, etag, url)
            except (
                CorruptShardError,
                IndexChangedError,
            ) as error:  # damaged or missing in the cache
                if not self._has_warned:
                    self._has_warned = True
                    warn_of_damage(place.url, error)
                place.drop(name, size_bytes=None, version=version)
        path = place.file(name, size_bytes=None, version=version)
        return self._parse(path, etag, url)

    def _parse(self, path: bytes, etag: str, url: str | None = None) -> Sidecar:
        manifest = self._manifest
        return read_sidecar(
            path,
            etag=etag,
            layout=self._layout,
            is_file_per_sample=manifest.format.is_file_per_sample,
            url=url,
        )
