"""Rebuild damaged or missing parts of an index in a cache folder.

Such an index is only a copy of facts about the data, so damage to it must not end a job: the
shard's files or archive are listed and decoded again. The result must equal the facts in the
manifest that the job has in memory. Then ids and bytes are those that the job started with. The
part is written back if the folder still holds this index; else it stays in memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING

from penstock.cache import (
    CorruptShardError,
    DatasetError,
    DestinationError,
    IndexChangedError,
    WriteError,
)
from penstock.readers.byte_source import REINDEX
from penstock.readers.files import below, locked, make_folder, printable
from penstock.readers.index.index_folders import warn_of_damage
from penstock.readers.index.manifest import MANIFEST, SIDECARS, read_manifest, write_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.readers.formats import Candidates, Listing, ShardSummary, Sidecar
    from penstock.readers.index.building import IndexBuilder
    from penstock.readers.index.manifest import Manifest

_log = logging.getLogger("penstock")


class IndexRepair:
    """Repair one open index in a local folder. Thread-safe."""

    def __init__(self, manifest: Manifest, *, builder: IndexBuilder, place: bytes) -> None:
        self._manifest, self._builder, self._place = manifest, builder, place
        self._lock = threading.Lock()
        self._unsaved: dict[int, Sidecar] = {}  # sidecars that couldn't be written, by shard
        # Listed at the first damage, and kept: if the folder was removed, all parts are damaged.
        self._listing: Listing | None = None
        self._has_warned = False

    def read(self, shard: int, read: Callable[[], Sidecar]) -> Sidecar:
        """Read a sidecar by read(), and rebuild it if it is damaged or missing. Raises
        IndexChangedError if the data has changed, DatasetError, FetchError."""
        if (unsaved := self._unsaved.get(shard)) is not None:
            return unsaved
        with contextlib.suppress(CorruptShardError, IndexChangedError):
            return read()
        with self._lock:
            if (unsaved := self._unsaved.get(shard)) is not None:
                return unsaved
            try:
                return read()  # the previous holder of the lock may have written it
            except (CorruptShardError, IndexChangedError) as error:
                _log.info("A part of the index is rebuilt: %s", error)
                if not self._has_warned:
                    self._has_warned = True
                    warn_of_damage(self._builder.origin.url, error)
            sidecar = self._rebuild(shard)
            if not self._put_back(shard, sidecar):
                self._unsaved[shard] = sidecar
            return sidecar

    def _rebuild(self, shard: int) -> Sidecar:
        manifest = self._manifest
        wanted = manifest.samples[shard], manifest.shard_bytes[shard], manifest.sums(shard)
        for attempt in range(2):
            try:
                for sidecar, summary in self._attempts(shard):
                    if (summary.samples, summary.size_bytes, summary.sums) == wanted:
                        return sidecar
                break
            except IndexChangedError:  # the data changed after the listing
                self._listing = None
                if attempt:
                    raise
        raise IndexChangedError(
            f"{printable(os.path.join(self._place, manifest.names[shard]))}: this part of the "
            "index was damaged or removed. It can't be rebuilt, because "
            f"{self._builder.origin.url} has changed since it was indexed. Open the dataset again, "
            f"or: {REINDEX}"
        )

    def _attempts(self, shard: int) -> Iterator[tuple[Sidecar, ShardSummary]]:
        """Yield the possible sidecars of the shard from its current files."""
        manifest, builder = self._manifest, self._builder
        if self._listing is None:
            self._listing = builder.format.list(builder.origin)
        for candidates, number in self._listing.counterparts(
            shard, manifest.names[shard], total=len(manifest.names), workers=builder.workers
        ):
            if _are_alike(candidates, manifest):
                found = builder.rebuild_shard(candidates, number, layout=manifest.about.layout)
                if found is not None:
                    yield found

    def _put_back(self, shard: int, sidecar: Sidecar) -> bool:
        """Write the part back into the folder and return True on success. Don't wait for a process
        that is building an index there."""
        name, etag = self._manifest.names[shard], self._manifest.etags[shard]
        try:
            path = below(self._place, name)
            make_folder(os.path.join(self._place, SIDECARS))
            with locked(self._place, busy="an index is being built there"):
                if not self._is_ours(shard):
                    return False
                return sidecar.write(path) == etag
        except (CorruptShardError, DestinationError, WriteError, OSError) as error:
            _log.info("The rebuilt part of the index stays in memory: %s", error)
            return False

    def _is_ours(self, shard: int) -> bool:
        """Return True if the folder holds this very index. A damaged or missing manifest is written
        back."""
        path = os.path.join(self._place, MANIFEST)
        try:
            found = read_manifest(path, remedy=REINDEX, mapped=False)
        except (CorruptShardError, FileNotFoundError):
            write_manifest(path, self._manifest)
            return True
        except DatasetError:  # a newer version wrote it
            return False
        mine = self._manifest
        return len(found.names) > shard and (found.names[shard], found.etags[shard]) == (
            mine.names[shard],
            mine.etags[shard],
        )


def _are_alike(candidates: Candidates, manifest: Manifest) -> bool:
    """Return True if candidates have the fields of an index, as far as that is known before they
    are read."""
    open, wanted = candidates.schema.unsettled, manifest.about.layout
    return candidates.layout.storage == wanted.storage and all(
        type == wanted.schema[name] for name, type in candidates.schema.items() if name not in open
    )
