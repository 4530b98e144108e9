"""The index of an open dataset: what is there, shard by shard, and how to open a shard.

Sample id = position in the index; it never changes while the index stands.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.errors import CorruptShardError, PenstockError
from penstock.readers.files.names import OWN_FOLDER, below, printable
from penstock.readers.formats.blob_shard import BlobShard, FilesBlob
from penstock.readers.formats.folder.shard import FolderShard, folder_table
from penstock.readers.formats.pack.blob import ArrowBlob
from penstock.readers.formats.pack.shard import ArrowShard
from penstock.readers.formats.tar.shard import TarShard, tar_table
from penstock.readers.index.blob_names import BlobNames
from penstock.readers.index.sidecars import Sidecars
from penstock.readers.origin.local import LocalFolder
from penstock.readers.origin.remote import RemoteFolder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.cache.base.blob import BlobSource
    from penstock.cache.blobs.remote import Remote
    from penstock.readers.index.about import About, Kind
    from penstock.readers.index.manifest import Manifest
    from penstock.readers.index.mending import Mender
    from penstock.readers.origin.origin import Origin
    from penstock.readers.origin.scratch import Scratch
    from penstock.readers.types import ImageRange

_log = logging.getLogger("penstock")

Shard = ArrowShard | FolderShard | TarShard | ArrowBlob | FilesBlob


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Index:
    """What a dataset holds. Sample id = position: starts[shard] + row.

    sizes: samples a shard; starts: id of a shard's first sample; shard_bytes: bytes to read a
    shard; all int64, shape (shards,), no shard empty. images: bounds of the oriented image sizes.
    icc: label correlation inside a shard, None without labels (see
    `fields.facts.label_correlation`). fingerprint: of the content, not of where it lies.
    quarantined: files that aren't in it. place: where the manifest is, for people.
    """

    url: str
    place: str
    sizes: NDArray[np.int64]
    starts: NDArray[np.int64]
    shard_bytes: NDArray[np.int64]
    about: About
    manifest: Manifest
    origin: Origin
    sidecars: Sidecars
    scratch: Scratch
    blobs: BlobNames | None

    @property
    def kind(self) -> Kind:
        return self.about.kind

    @property
    def samples(self) -> int:
        return self.about.samples

    @property
    def fields(self) -> tuple[str, ...]:
        """What a sample has, "id" left out: ("image", "label"), or ("image",) without labels."""
        return self.about.fields

    @property
    def classes(self) -> tuple[str, ...]:
        return self.about.classes

    @property
    def fingerprint(self) -> str:
        return self.about.fingerprint

    @property
    def icc(self) -> float | None:
        return self.about.icc

    @property
    def images(self) -> ImageRange:
        return self.about.images

    @property
    def shuffled(self) -> bool:
        return self.about.shuffled

    @property
    def seed(self) -> int | None:
        return self.about.seed

    @property
    def quarantined(self) -> int:
        return self.about.quarantined

    def shard_name(self, shard: int) -> str:
        """A shard's file, or its part of the index, for people."""
        return printable(self.manifest.names[shard])

    @property
    def remote(self) -> Remote | None:
        """What a remote dataset is read through; None for a local one."""
        return self.origin.remote if isinstance(self.origin, RemoteFolder) else None

    def source(self, shard: int) -> BlobSource:
        """A remote dataset's shard as a blob, without I/O; looking at its segments may fetch its
        sidecar (FetchError, CorruptShardError)."""
        return self._blob_names().source(shard)

    def keys(self) -> tuple[str, ...]:
        """The keys of all shards of a remote dataset, without I/O: 40 hex digits each."""
        return self._blob_names().keys()

    def _blob_names(self) -> BlobNames:
        if self.blobs is None:
            raise TypeError(f"{self.url} is local: its shards aren't in a cache")
        return self.blobs

    def open_shard(self, shard: int) -> Shard:
        """Map a shard; of a remote one what is needed to find its samples is fetched, and fetched
        again where it is damaged. Raises CorruptShardError, IndexChangedError, FetchError."""
        if self.remote is None:
            return self._open_local(shard)
        try:
            return self._open_remote(shard)
        except CorruptShardError as error:
            _log.warning("%s It is dropped and fetched again.", error)
        except PenstockError:  # the network's: some are OSErrors too
            raise
        except OSError as error:
            _log.warning("%s: can't be read (%s); it is fetched again", self.url, error)
        self.drop(shard)
        return self._open_remote(shard)

    def drop(self, shard: int, *, opened: Shard | None = None) -> None:
        """Forget a remote shard's bytes, which are wrong: who opens it next fetches them again.
        opened: what has the wrong bytes; others, that came after it, stay."""
        if self.remote is not None:
            inode = getattr(opened.blob, "inode", None) if isinstance(opened, BlobShard) else None
            self.remote.drop(self.source(shard), inode=inode)

    def is_near(self, shard: int) -> bool:
        """Whether opening the shard needs nothing of the remote."""
        if self.remote is None:
            return True
        if self.kind == "arrow":
            return self.remote.is_whole(self.source(shard))
        return self.sidecars.are_local

    def _open_local(self, shard: int) -> Shard:
        root = self._local_root()
        if self.kind == "folder":
            return FolderShard(root, self.sidecars.files(shard))
        if self.kind == "tar":
            return TarShard(root, self.sidecars.archive(shard))
        name = self.manifest.names[shard]
        return ArrowShard(
            below(root, name),
            size_bytes=int(self.shard_bytes[shard]),
            samples=int(self.sizes[shard]),
            sums=self.manifest.sums(shard),
            shown=printable(name),
        )

    def _local_root(self) -> bytes:
        if not isinstance(self.origin, LocalFolder):
            raise TypeError(f"{self.url} isn't local")
        return self.origin.root

    def _open_remote(self, shard: int) -> Shard:
        remote = self.remote
        if remote is None:
            raise TypeError(f"{self.url} isn't remote")
        blob = remote.open(self.source(shard))
        if self.kind == "arrow":
            return ArrowBlob(
                remote,
                blob,
                samples=int(self.sizes[shard]),
                sums=self.manifest.sums(shard),
                shown=printable(self.manifest.names[shard]),
                overhead_bytes=self.about.overhead_bytes,
            )
        if self.kind == "tar":
            tar = self.sidecars.archive(shard)
            above = tar.archive.name + b"/"
            return FilesBlob(remote, blob, tar_table(tar), names=tar.names, above=above)
        folder = self.sidecars.files(shard)
        ends = np.cumsum(folder.sizes, dtype=np.int64)
        rows = folder_table(folder, ends - folder.sizes, ends)
        return FilesBlob(remote, blob, rows, names=folder.names)


def opened(
    manifest: Manifest,
    *,
    origin: Origin,
    place: bytes | RemoteFolder | None,
    scratch: Scratch,
    mender: Mender | None = None,
) -> Index:
    """An index from its manifest. place: where manifest and sidecars are, a local or a remote
    folder; None for a pack's own. scratch: kept alive as long as the index. mender: see
    Sidecars."""
    ends = np.cumsum(manifest.samples, dtype=np.int64)
    sidecars = Sidecars(manifest=manifest, place=place, mender=mender)
    if place is None:
        shown = f"{origin.url}/{OWN_FOLDER.decode()}"
    else:
        shown = printable(place) if isinstance(place, bytes) else place.url
    return Index(
        url=origin.url,
        place=shown,
        sizes=manifest.samples,
        starts=ends - manifest.samples,
        shard_bytes=manifest.shard_bytes,
        about=manifest.about,
        manifest=manifest,
        origin=origin,
        sidecars=sidecars,
        scratch=scratch,
        blobs=BlobNames(origin, manifest, sidecars.segments)
        if isinstance(origin, RemoteFolder)
        else None,
    )
