"""The index of an open dataset: what is there, shard by shard, and how to open a shard.

Sample id = position in the index; it never changes while the index stands.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from readers.arrow_shard import ArrowShard
from readers.folder_shard import FolderShard, read_sidecar
from readers.names import printable
from readers.tar_shard import TarShard, read_tar_sidecar

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from readers.facts import Sums
    from readers.manifest import About, Kind, Manifest
    from readers.origin import Origin
    from readers.scratch import Scratch
    from readers.tar_shard import TarSidecar
    from readers.types import ImageRange


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Index:
    """What a dataset holds. Sample id = position: starts[shard] + row.

    sizes: samples a shard; starts: id of a shard's first sample; shard_bytes: bytes to read a
    shard; all int64, shape (shards,), no shard empty. images: bounds of the oriented image sizes.
    icc: label correlation inside a shard, None without labels (see
    readers.facts.label_correlation). fingerprint: of the content, not of where it lies.
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
    folder: bytes | None
    own: bytes
    scratch: Scratch

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

    def open_shard(self, shard: int) -> ArrowShard | FolderShard | TarShard:
        """Map a shard; fetches it if it is remote. Raises CorruptShardError, IndexChangedError,
        FetchError."""
        name, sums = self.manifest.names[shard], self.manifest.sums(shard)
        if self.kind == "folder":
            etag = self.manifest.etags[shard]
            return FolderShard(self.origin, read_sidecar(self._sidecar(name), etag=etag))
        if self.kind == "tar":
            return TarShard(self.origin, self._tar_sidecar(shard))
        size_bytes = int(self.shard_bytes[shard])
        path = self.origin.file(name, size_bytes=size_bytes, version=_version(sums))
        return ArrowShard(
            path,
            size_bytes=size_bytes,
            samples=int(self.sizes[shard]),
            sums=sums,
            shown=printable(name),
        )

    def drop_copy(self, shard: int) -> bool:
        """Forget the local copy of a remote shard of a pack or tar file; False where nothing can be
        fetched anew."""
        if self.kind == "tar":
            tar = self._tar_sidecar(shard).archive
            return self.origin.drop(tar.name, size_bytes=tar.size_bytes, version=tar.version)
        name, version = self.manifest.names[shard], _version(self.manifest.sums(shard))
        return self.origin.drop(name, size_bytes=int(self.shard_bytes[shard]), version=version)

    def _tar_sidecar(self, shard: int) -> TarSidecar:
        path = self._sidecar(self.manifest.names[shard])
        return read_tar_sidecar(path, etag=self.manifest.etags[shard])

    def _sidecar(self, name: bytes) -> bytes:
        if self.folder is not None:
            return os.path.join(self.folder, name)
        # The fingerprint is part of the version: an index built anew has other sidecars.
        return self.origin.file(self.own + b"/" + name, size_bytes=None, version=self.fingerprint)


def _version(sums: Sums) -> str:
    """A shard's version by content: copies are told apart without asking the store."""
    return f"crc32c-{sums.samples:08x}-{sums.columns:08x}"


def opened(
    manifest: Manifest, *, origin: Origin, folder: bytes | None, own: bytes, scratch: Scratch
) -> Index:
    """An index from its manifest. folder: where manifest and sidecars are, None for beside the data
    behind the origin, where they are in `own`. scratch: kept alive as long as the index."""
    ends = np.cumsum(manifest.samples, dtype=np.int64)
    return Index(
        url=origin.url,
        place=printable(folder) if folder is not None else f"{origin.url}/{own.decode()}",
        sizes=manifest.samples,
        starts=ends - manifest.samples,
        shard_bytes=manifest.shard_bytes,
        about=manifest.about,
        manifest=manifest,
        origin=origin,
        folder=folder,
        own=own,
        scratch=scratch,
    )
