"""Name the shards of a remote dataset as blobs of the cache: their keys, sources and segments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from penstock.cache.base import BlobSource
from penstock.readers.files import printable
from penstock.readers.origin import segment

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.base import Segment
    from penstock.readers.formats import Sidecar
    from penstock.readers.index.manifest import Manifest
    from penstock.readers.origin import RemoteFolder


class BlobNames:
    """The keys and sources of a dataset's shards. sidecar: reads the sidecar of a shard. fields:
    for data in chunks, the fields whose bytes the blobs hold."""

    def __init__(
        self,
        origin: RemoteFolder,
        manifest: Manifest,
        sidecar: Callable[[int], Sidecar],
        fields: tuple[str, ...],
    ) -> None:
        self._origin, self._manifest, self._sidecar = origin, manifest, sidecar
        self._kept = fields
        self._fields = json.dumps([name for name in manifest.about.schema if name in fields])
        self._sizes = manifest.bytes_of(fields) if manifest.is_of_chunks else manifest.shard_bytes
        self._keys: tuple[str, ...] | None = None

    def keys(self) -> tuple[str, ...]:
        """Return the keys of all shards, 40 hex digits each. They are computed once."""
        if self._keys is None:
            manifest = self._manifest
            columns = (manifest.crc32c.tolist(), manifest.columns_crc32c.tolist())
            names, etags = list(manifest.names), list(manifest.etags)
            rows = zip(names, etags, *columns, strict=True)
            self._keys = tuple(self._key(*row) for row in rows)
        return self._keys

    def source(self, shard: int) -> BlobSource:
        """Describe one shard as a blob. Reading its segments may fetch its sidecar."""
        manifest, name = self._manifest, self._manifest.names[shard]
        size_bytes = int(self._sizes[shard])
        if self._keys is not None:
            key = self._keys[shard]
        else:
            sums = manifest.sums(shard)
            key = self._key(name, manifest.etags[shard], sums.samples, sums.columns)
        if manifest.format.has_own_index:
            # No version: the fill records the etag of the first answer, and the sums are checked.
            segments: Sequence[Segment] = (segment(name, size_bytes, ""),)
            return BlobSource(
                key=key, uri=self._origin.uri(name), segments=segments, size_bytes=size_bytes
            )
        may_lack = getattr(manifest.format, "may_lack_objects", False)
        segments = _LazySegments(
            lambda: self._sidecar(shard).segments(self._kept, may_lack=may_lack),
            None if manifest.is_of_chunks else int(manifest.files[shard]),
        )
        uri = f"{self._origin.url}#{printable(name.rpartition(b'/')[2])}"
        return BlobSource(key=key, uri=uri, segments=segments, size_bytes=size_bytes)

    def _key(self, name: bytes, etag: str, crc32c: int, columns_crc32c: int) -> str:
        if self._manifest.is_of_chunks:
            # Parts of a file have no names: the facts in the index identify them.
            version = f"{etag}\0{crc32c:08x}{columns_crc32c:08x}\0{self._fields}"
            return self._origin.blob_key(b"", version)
        return self._manifest.format.blob_key(
            self._origin, name=name, etag=etag, crc32c=crc32c, columns_crc32c=columns_crc32c
        )


class _LazySegments(Sequence[Any]):
    """Segments that are loaded on first access. count: their number, if it is known."""

    def __init__(self, load: Callable[[], Sequence[Segment]], count: int | None) -> None:
        self._load, self._count = cache(load), count

    def __len__(self) -> int:
        return len(self._load()) if self._count is None else self._count

    def __getitem__(self, i: Any) -> Any:
        return self._load()[i]
