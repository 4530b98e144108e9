"""Parts of an index that a cache folder keeps, made anew where they are damaged or gone.

Nobody but us keeps such an index, so damage to it is no reason to end a job: the shard's files or
archive are listed and decoded again, and what comes of that must be what the manifest, which a job
has in memory, says of the shard. Then ids and bytes are those that the job began with. The part is
put back if the folder still holds this index, else it stays in memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING

from penstock.cache.errors import (
    CorruptShardError,
    DatasetError,
    DestinationError,
    IndexChangedError,
    WriteError,
)
from penstock.readers.fields.examine import verify_for
from penstock.readers.files.atomic import locked, make_folder
from penstock.readers.files.names import below, printable
from penstock.readers.formats.local_files import REINDEX
from penstock.readers.formats.registry import indexing_of
from penstock.readers.index.building import IndexBuilder
from penstock.readers.index.index_folder import warn_of_damage
from penstock.readers.index.manifest_file import MANIFEST, read_manifest, write_manifest
from penstock.readers.index.sidecar_names import SIDECARS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.readers.formats.candidates import Candidates
    from penstock.readers.formats.format import Listing
    from penstock.readers.formats.sidecar import Sidecar
    from penstock.readers.formats.summary import ShardSummary
    from penstock.readers.index.manifest import Manifest
    from penstock.readers.origin.origin import Origin
    from penstock.readers.types import Verify

_log = logging.getLogger("penstock")


class Mender:
    """Mends one open index in a local folder; safe for several threads. verify: as in
    open_index."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        origin: Origin,
        place: bytes,
        verify: Verify | None,
        workers: int,
    ) -> None:
        self._manifest, self._origin, self._place = manifest, origin, place
        self._verify, self._workers = verify, workers
        self._lock = threading.Lock()
        self._unsaved: dict[int, Sidecar] = {}  # what couldn't be put back, by shard
        # Listed at the first damage, and kept: a folder that is gone has all its parts damaged.
        self._listing: Listing | None = None
        self._has_warned = False

    def read(self, shard: int, read: Callable[[], Sidecar]) -> Sidecar:
        """Read a sidecar by read(), or where that says that it is damaged or gone, make it anew.
        Raises IndexChangedError (of other data now), DatasetError, FetchError."""
        if (unsaved := self._unsaved.get(shard)) is not None:
            return unsaved
        with contextlib.suppress(CorruptShardError, IndexChangedError):
            return read()
        with self._lock:
            if (unsaved := self._unsaved.get(shard)) is not None:
                return unsaved
            try:
                return read()  # who held the lock may have put it back
            except (CorruptShardError, IndexChangedError) as error:
                self._warn(error)
            sidecar = self._rebuild(shard)
            if not self._put_back(shard, sidecar):
                self._unsaved[shard] = sidecar
            return sidecar

    def _warn(self, error: Exception) -> None:
        _log.info("A part of the index is rebuilt: %s", error)
        if not self._has_warned:
            self._has_warned = True
            warn_of_damage(self._origin.url, error)

    def _rebuild(self, shard: int) -> Sidecar:
        manifest = self._manifest
        wanted = manifest.samples[shard], manifest.shard_bytes[shard], manifest.sums(shard)
        for attempt in range(2):
            try:
                for sidecar, summary in self._attempts(shard):
                    if (summary.samples, summary.size_bytes, summary.sums) == wanted:
                        return sidecar
                break
            except IndexChangedError:  # since it was listed
                self._listing = None
                if attempt:
                    raise
        raise IndexChangedError(
            f"{printable(os.path.join(self._place, manifest.names[shard]))}: this part of the "
            f"index was damaged or removed, and {self._origin.url} isn't what was indexed any "
            f"more, so it can't be rebuilt. Open the dataset again, or: {REINDEX}"
        )

    def _attempts(self, shard: int) -> Iterator[tuple[Sidecar, ShardSummary]]:
        """What the shard can be, as its files are today."""
        manifest = self._manifest
        format = manifest.format
        if self._listing is None:
            self._listing = indexing_of(format).list(self._origin)
        builder = IndexBuilder(
            origin=self._origin,
            format=format,
            verify=verify_for(
                manifest.about.schema,
                self._verify,
                workers=self._workers,
                max_pixels=self._origin.arrangement.max_pixels,
            ),
            workers=self._workers,
        )
        counterparts = self._listing.counterparts(
            shard, manifest.names[shard], total=len(manifest.names), workers=self._workers
        )
        for candidates, number in counterparts:
            if _are_alike(candidates, manifest):
                layout = manifest.about.layout
                found = builder.rebuild_shard(candidates, number, layout=layout)
                if found is not None:
                    yield found

    def _put_back(self, shard: int, sidecar: Sidecar) -> bool:
        """Whether the folder has the part again. Whoever is building an index there isn't waited
        for."""
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
        """Whether the folder holds this very index; a manifest that is damaged or gone is put
        back."""
        path = os.path.join(self._place, MANIFEST)
        try:
            there = read_manifest(path, remedy=REINDEX, mapped=False)
        except (CorruptShardError, FileNotFoundError):
            write_manifest(path, self._manifest)
            return True
        except DatasetError:  # a newer version's
            return False
        mine = self._manifest
        return len(there.names) > shard and (there.names[shard], there.etags[shard]) == (
            mine.names[shard],
            mine.etags[shard],
        )


def _are_alike(candidates: Candidates, manifest: Manifest) -> bool:
    """Whether candidates have the fields of an index, as far as that is known before they were
    seen."""
    open, wanted = candidates.schema.unsettled, manifest.about.layout
    return candidates.layout.storage == wanted.storage and all(
        type == wanted.schema[name] for name, type in candidates.schema.items() if name not in open
    )
