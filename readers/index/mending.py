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
import warnings
from typing import TYPE_CHECKING, TypeVar, cast

from penstock.cache.errors import (
    CorruptShardError,
    DatasetError,
    DestinationError,
    IndexChangedError,
    PenstockWarning,
    WriteError,
)
from penstock.readers.fields.verify import find_verify
from penstock.readers.files.atomic import locked, make_folder
from penstock.readers.files.names import below, printable
from penstock.readers.formats.folder.building import SIDECARS, judge_shard
from penstock.readers.formats.folder.listing import list_folder, virtual_shards
from penstock.readers.formats.folder.shard import SidecarContent, write_sidecar
from penstock.readers.formats.local_files import REINDEX
from penstock.readers.formats.tar.building import judge_archive
from penstock.readers.formats.tar.listing import list_archives
from penstock.readers.formats.tar.remote import drop_copy
from penstock.readers.formats.tar.shard import write_tar_sidecar
from penstock.readers.index.manifest import MANIFEST, read_manifest, write_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.readers.fields.facts import ShardFacts
    from penstock.readers.formats.folder.listing import Listing
    from penstock.readers.formats.grouping import Grouping
    from penstock.readers.formats.tar.shard import TarSidecar
    from penstock.readers.index.manifest import Manifest
    from penstock.readers.origin.origin import Entry, Origin
    from penstock.readers.types import Verify

_log = logging.getLogger("penstock")

T = TypeVar("T")


class Mender:
    """Of one open index in a local folder; safe for several threads. verify: as in open_index."""

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
        self._held: dict[
            int, SidecarContent | TarSidecar
        ] = {}  # what couldn't be put back, by shard
        # Listed at the first damage, and kept: a folder that is gone has all its parts damaged.
        self._listed: tuple[Listing, Grouping] | None = None
        self._archives: Sequence[Entry] | None = None
        self._has_warned = False

    def read(self, shard: int, read: Callable[[], T]) -> T:
        """What read() gives, or where it says that this part is damaged or gone, the same made
        anew. Raises IndexChangedError (of other data now), DatasetError, FetchError."""
        if (held := self._held.get(shard)) is not None:
            return cast("T", held)
        with contextlib.suppress(CorruptShardError, IndexChangedError):
            return read()
        with self._lock:
            if (held := self._held.get(shard)) is not None:
                return cast("T", held)
            try:
                return read()  # who held the lock may have put it back
            except (CorruptShardError, IndexChangedError) as error:
                self._warn(error)
            content = self._make(shard)
            if not self._put_back(shard, content):
                self._held[shard] = content
            return cast("T", content)

    def _warn(self, error: Exception) -> None:
        _log.info("A part of the index is made anew: %s", error)
        if not self._has_warned:
            self._has_warned = True
            warn_of_damage(self._origin.url, error)

    def _make(self, shard: int) -> SidecarContent | TarSidecar:
        manifest = self._manifest
        wanted = manifest.samples[shard], manifest.shard_bytes[shard], manifest.sums(shard)
        make: Callable[[int], Iterator[tuple[SidecarContent | TarSidecar, ShardFacts]]]
        make = self._archive if manifest.about.kind == "tar" else self._files
        for attempt in range(2):
            try:
                for content, facts in make(shard):
                    if (facts.samples, facts.size_bytes, facts.sums) == wanted:
                        return content
                break
            except IndexChangedError:  # since it was listed
                self._listed = self._archives = None
                if attempt:
                    raise
        raise IndexChangedError(
            f"{printable(os.path.join(self._place, manifest.names[shard]))}: this part of the "
            f"index was damaged or removed, and {self._origin.url} isn't what was indexed any "
            f"more, so it can't be made anew. Open the dataset again, or: {REINDEX}"
        )

    def _files(self, shard: int) -> Iterator[tuple[SidecarContent, ShardFacts]]:
        """What the shard can be: virtual shards of which no file decodes aren't in the index."""
        if self._listed is None:
            listing = list_folder(self._origin)
            self._listed = listing, virtual_shards(listing)
        listing, shards = self._listed
        if listing.classes != self._manifest.about.classes:
            return
        none_decodes = shards.shards - len(self._manifest.names)
        for number in range(shard, shard + none_decodes + 1):
            positions = shards.positions(number)
            found = judge_shard(
                self._origin, listing, positions, verify=self._checks(), workers=self._workers
            )
            if found is not None:
                yield found

    def _archive(self, shard: int) -> Iterator[tuple[TarSidecar, ShardFacts]]:
        """By itself first, then without the cache's copy; with all others where what they hold says
        what is a sample here."""
        if self._archives is None:
            self._archives = list_archives(self._origin)
        name = self._manifest.names[shard]
        here = [i for i, e in enumerate(self._archives) if e.identity.encode() + b".arrow" in name]
        if not here:
            return
        entry = self._archives[here[0]]
        for archives, drops in (([entry], False), ([entry], True), (self._archives, False)):
            if drops:
                drop_copy(self._origin, entry)
            found = judge_archive(
                self._origin,
                archives,
                archives.index(entry),
                verify=self._checks(),
                workers=self._workers,
            )
            if found is not None:
                yield found

    def _checks(self) -> Verify:
        return self._verify or find_verify(workers=self._workers)

    def _put_back(self, shard: int, content: SidecarContent | TarSidecar) -> bool:
        """Whether the folder has the part again. Whoever is building an index there isn't waited
        for."""
        name, etag = self._manifest.names[shard], self._manifest.etags[shard]
        try:
            path = below(self._place, name)
            make_folder(os.path.join(self._place, SIDECARS))
            with locked(self._place, busy="an index is being built there"):
                if not self._is_ours(shard):
                    return False
                if isinstance(content, SidecarContent):
                    return write_sidecar(path, content) == etag
                return write_tar_sidecar(path, content) == etag
        except (CorruptShardError, DestinationError, WriteError, OSError) as error:
            _log.info("What was made anew stays in memory: %s", error)
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


def warn_of_damage(url: str, error: Exception) -> None:
    """Tell that a part of an index in the cache was damaged."""
    warnings.warn(
        f"{url}: a part of its index in the cache was damaged or removed, and is fetched or made "
        f"anew; the job goes on. {error}",
        PenstockWarning,
        stacklevel=6,
    )
