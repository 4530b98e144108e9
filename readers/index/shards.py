"""Opening the shards of an index: local files, or blobs of the cache."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.cache.base.machine import refuse_shortage
from penstock.cache.errors import CorruptShardError, PenstockError
from penstock.readers.formats.blob_shard import BlobShard
from penstock.readers.index.blob_names import BlobNames
from penstock.readers.origin.local import LocalFolder
from penstock.readers.origin.remote import RemoteFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.cache.base.blob import BlobSource
    from penstock.cache.blobs.remote import Remote
    from penstock.readers.fields.crops import Crop
    from penstock.readers.formats.decoded_chunks import DecodedChunks
    from penstock.readers.formats.format import ShardOpener
    from penstock.readers.formats.shard import OpenShard
    from penstock.readers.index.manifest import Manifest
    from penstock.readers.index.sidecars import Sidecars
    from penstock.readers.origin.origin import Origin

    Ints = NDArray[np.int64]

_log = logging.getLogger("penstock")


class Shards:
    """Opens the shards of one index, by number; safe for several threads. fields: of data in
    chunks, those whose bytes are kept of remote shards; None: all."""

    def __init__(
        self,
        origin: Origin,
        manifest: Manifest,
        sidecars: Sidecars,
        *,
        fields: tuple[str, ...] | None = None,
    ) -> None:
        self._origin, self._manifest, self._sidecars = origin, manifest, sidecars
        self._fields = kept = tuple(manifest.about.schema) if fields is None else fields
        self._chunks: DecodedChunks | None = None
        self._blobs: BlobNames | None = None
        if isinstance(origin, RemoteFolder):
            may_lack = getattr(manifest.format, "may_lack_objects", False)
            self._blobs = BlobNames(
                origin,
                manifest,
                lambda shard: sidecars.read(shard).segments(kept, may_lack=may_lack),
                kept,
            )

    def keeping(self, fields: tuple[str, ...]) -> Shards:
        """The same shards, of which the bytes of these fields alone are kept."""
        return Shards(self._origin, self._manifest, self._sidecars, fields=fields)

    @property
    def remote(self) -> Remote | None:
        """What a remote dataset is read through; None for a local one."""
        return self._origin.remote if isinstance(self._origin, RemoteFolder) else None

    @property
    def chunks(self) -> DecodedChunks | None:
        """Where decoded chunks are kept; None of a dataset that has none."""
        if self._chunks is None and self._manifest.about.layout.stored("chunks"):
            # Others start without it.
            from penstock.readers.formats.decoded_chunks import DecodedChunks

            self._chunks = DecodedChunks(url=self._origin.url)
        return self._chunks

    def keep_chunks(self, chunks: DecodedChunks) -> None:
        """Keep decoded chunks there. Before the first shard is opened."""
        self._chunks = chunks

    def open(self, shard: int) -> OpenShard:
        """Map a shard; of a remote one what is needed to find its samples is fetched, and fetched
        again where it is damaged. Raises CorruptShardError, IndexChangedError, FetchError."""
        remote = self.remote
        if remote is None:
            if not isinstance(self._origin, LocalFolder):
                raise TypeError(f"{self._origin.url} is neither local nor remote")
            return self._opener(shard).open_local(self._origin.root)
        try:
            return self._open_remote(shard, remote)
        except CorruptShardError as error:
            _log.warning("%s It is dropped and fetched again.", error)
        except PenstockError:  # the network's: some are OSErrors too
            raise
        except OSError as error:
            url = self._origin.url
            refuse_shortage(error, url)
            _log.warning("%s: can't be read (%s); it is fetched again", url, error)
        self.drop(shard)
        return self._open_remote(shard, remote)

    def _open_remote(self, shard: int, remote: Remote) -> OpenShard:
        blob = remote.open(self.source(shard))
        return self._opener(shard).open_blob(remote, blob)

    def _opener(self, shard: int) -> ShardOpener:
        manifest, chunks = self._manifest, self.chunks
        entry = manifest.entry(shard, self._fields)
        if chunks is not None:
            entry = replace(entry, chunks=chunks.of(shard))
        return manifest.format.opener(entry, lambda: self._sidecars.read(shard))

    def wanted_share(
        self, shard: int, fields: Sequence[str], draw: Callable[[Ints], Mapping[str, Crop]]
    ) -> float:
        """Which share of the bytes of a shard's fields is needed for parts of all its samples: a
        function draws them, of as many numbers. 1 where samples lie whole. Raises
        CorruptShardError, FetchError."""
        share = getattr(self._opener(shard), "wanted_share", None)
        return 1.0 if share is None else float(share(fields, draw))

    def drop(self, shard: int, *, opened: OpenShard | None = None) -> None:
        """Forget a remote shard's bytes, which are wrong: who opens it next fetches them again.
        opened: what has the wrong bytes; others, that came after it, stay."""
        if self._chunks is not None:
            self._chunks.forget(shard)
        if self.remote is not None:
            inode = getattr(opened.blob, "inode", None) if isinstance(opened, BlobShard) else None
            self.remote.drop(self.source(shard), inode=inode)

    def is_near(self, shard: int) -> bool:
        """Whether opening the shard needs nothing of the remote."""
        if self.remote is None:
            return True
        if self._manifest.format.indexing is None:
            return self.remote.is_whole(self.source(shard))
        return self._sidecars.are_local

    def source(self, shard: int) -> BlobSource:
        """A remote dataset's shard as a blob, without I/O; looking at its segments may fetch its
        sidecar (FetchError, CorruptShardError)."""
        return self._blob_names().source(shard)

    def keys(self) -> tuple[str, ...]:
        """The keys of all shards of a remote dataset, without I/O: 40 hex digits each."""
        return self._blob_names().keys()

    def _blob_names(self) -> BlobNames:
        if self._blobs is None:
            raise TypeError(f"{self._origin.url} is local: its shards aren't in a cache")
        return self._blobs
