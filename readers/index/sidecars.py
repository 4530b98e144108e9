"""Read the sidecars of an index: local files, or small objects of the cache.

An index in a cache folder is only a copy of facts about the data, so damage to it must not end a
job: the shard's files or archive are listed and decoded again. The result must equal the facts in
the manifest that the job has in memory. Then ids and bytes are those that the job started with. The
part is written back if the folder still holds this index; else it stays in memory.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from typing import TYPE_CHECKING

from penstock.cache import (
    CorruptShardError,
    DatasetError,
    DestinationError,
    IndexChangedError,
    PenstockWarning,
    WriteError,
)
from penstock.readers.byte_source import REINDEX
from penstock.readers.files import below, locked, make_folder, printable
from penstock.readers.formats import read_sidecar
from penstock.readers.index.manifest import MANIFEST, SIDECARS, read_manifest, write_manifest

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.readers.formats import Sidecar
    from penstock.readers.index.manifest import Manifest
    from penstock.readers.origin import Origin

_log = logging.getLogger("penstock")

_MOST_FETCHES = 3


class Sidecars:
    """Read the sidecars of one index. Thread-safe.

    url: of the data. place: their folder, local or remote. rebuild: rebuilds a damaged one of an
    index in a cache folder, or returns None if the data have changed; without it, damage is an
    error.
    """

    def __init__(
        self,
        manifest: Manifest,
        place: bytes | Origin,
        *,
        url: str = "",
        rebuild: Callable[[Manifest, int], Sidecar | None] | None = None,
    ) -> None:
        self._manifest, self.place, self._url, self._rebuild = manifest, place, url, rebuild
        self._lock = threading.Lock()
        self._unsaved: dict[int, Sidecar] = {}  # rebuilt ones that couldn't be written, by shard
        self._has_warned = False

    @property
    def shown(self) -> str:
        """Return the folder for messages."""
        return printable(self.place) if isinstance(self.place, bytes) else self.place.url

    def read(self, shard: int) -> Sidecar:
        """Read the sidecar of one shard, and rebuild it if that is possible. Raises
        CorruptShardError, IndexChangedError, FetchError."""
        manifest, place = self._manifest, self.place
        if isinstance(place, bytes):
            sidecar = self._read_local(shard, place)
        else:
            sidecar = self._read_remote(shard, place)
        wanted = int(manifest.samples[shard]), int(manifest.shard_bytes[shard])
        if (sidecar.samples, sidecar.size_bytes) != wanted:
            raise CorruptShardError(
                f"{printable(manifest.names[shard])}: this part of the index has "
                f"{sidecar.samples:,} samples and {sidecar.size_bytes:,} bytes, but the manifest "
                f"records {wanted[0]:,} and {wanted[1]:,}. {REINDEX}"
            )
        return sidecar

    def _parse(self, shard: int, path: bytes, url: str | None = None) -> Sidecar:
        manifest = self._manifest
        return read_sidecar(
            path,
            etag=manifest.etags[shard],
            layout=manifest.about.layout,
            is_file_per_sample=manifest.format.is_file_per_sample,
            url=url,
        )

    def _read_remote(self, shard: int, place: Origin) -> Sidecar:
        """Read a small object through the cache, and fetch it again if its copy is damaged."""
        name = self._manifest.names[shard]
        # The version is the fingerprint, because another index has other sidecars.
        version = self._manifest.about.fingerprint
        url = f"{place.url.rstrip('/')}/{printable(name)}"
        for left in reversed(range(_MOST_FETCHES)):
            try:
                path = place.file(name, size_bytes=None, version=version)
                return self._parse(shard, path, url)
            except (CorruptShardError, IndexChangedError) as error:  # damaged or missing
                if not left:
                    raise
                self._warn(place.url, error)
                place.drop(name, size_bytes=None, version=version)
        raise AssertionError

    def _read_local(self, shard: int, place: bytes) -> Sidecar:
        def read() -> Sidecar:
            if (unsaved := self._unsaved.get(shard)) is not None:
                return unsaved
            return self._parse(shard, below(place, self._manifest.names[shard]))

        try:
            return read()
        except (CorruptShardError, IndexChangedError):
            if self._rebuild is None:
                raise
        with self._lock:
            try:
                return read()  # the previous holder of the lock may have written it
            except (CorruptShardError, IndexChangedError) as error:
                _log.info("A part of the index is rebuilt: %s", error)
                self._warn(self._url, error)
            sidecar = self._rebuild(self._manifest, shard)
            if sidecar is None:
                raise IndexChangedError(
                    f"{self.shown}/{printable(self._manifest.names[shard])}: this part of the "
                    "index was damaged or removed. It can't be rebuilt, because "
                    f"{self._url} has changed since it was indexed. Open the dataset again, "
                    f"or: {REINDEX}"
                )
            if not self._put_back(shard, sidecar, place):
                self._unsaved[shard] = sidecar
            return sidecar

    def _warn(self, url: str, error: Exception) -> None:
        """Warn once that a part of an index in the cache was damaged."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{url}: a part of its index in the cache was damaged or removed. It is fetched or "
                f"rebuilt, and the job continues. {error}",
                PenstockWarning,
                stacklevel=6,
            )

    def _put_back(self, shard: int, sidecar: Sidecar, place: bytes) -> bool:
        """Write the part back into the folder and return True on success. Don't wait for a process
        that is building an index there."""
        try:
            path = below(place, self._manifest.names[shard])
            make_folder(os.path.join(place, SIDECARS))
            with locked(place, busy="an index is being built there"):
                is_ours = self._is_ours(shard, os.path.join(place, MANIFEST))
                return is_ours and sidecar.write(path) == self._manifest.etags[shard]
        except (CorruptShardError, DestinationError, WriteError, OSError) as error:
            _log.info("The rebuilt part of the index stays in memory: %s", error)
            return False

    def _is_ours(self, shard: int, path: bytes) -> bool:
        """Return True if the folder holds this very index. A damaged or missing manifest is written
        back."""
        mine = self._manifest
        try:
            found = read_manifest(path, remedy=REINDEX, mapped=False)
        except (CorruptShardError, FileNotFoundError):
            write_manifest(path, mine)
            return True
        except DatasetError:  # a newer version wrote it
            return False
        row = slice(shard, shard + 1)
        return list(found.etags[row]) == list(mine.etags[row]) and list(found.names[row]) == list(
            mine.names[row]
        )
