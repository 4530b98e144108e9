"""Which blob of the cache each shard of a remote dataset is, without any I/O.

Every process and node derives the same keys from the manifest, as the format says. What a blob's
segments are is looked up in the sidecar when somebody opens or fills it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

from penstock.readers.files.names import printable
from penstock.readers.origin.remote import segment

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.base.blob import BlobSource, Segment
    from penstock.readers.index.manifest import Manifest
    from penstock.readers.origin.remote import RemoteFolder


class BlobNames:
    """The keys and sources of a dataset's shards. segments: looks a shard's segments up; may
    fetch. fields: of data in chunks, those whose bytes the blobs hold."""

    def __init__(
        self,
        origin: RemoteFolder,
        manifest: Manifest,
        segments: Callable[[int], Sequence[Segment]],
        fields: tuple[str, ...],
    ) -> None:
        self._origin, self._manifest, self._segments = origin, manifest, segments
        self._fields = json.dumps([name for name in manifest.about.schema if name in fields])
        self._sizes = manifest.bytes_of(fields) if manifest.is_of_chunks else manifest.shard_bytes
        self._keys: tuple[str, ...] | None = None

    def keys(self) -> tuple[str, ...]:
        """The keys of all shards, 40 hex digits each; worked out once."""
        if self._keys is None:
            manifest = self._manifest
            columns = (manifest.crc32c.tolist(), manifest.columns_crc32c.tolist())
            names, etags = list(manifest.names), list(manifest.etags)
            rows = zip(names, etags, *columns, strict=True)
            self._keys = tuple(self._key(*row) for row in rows)
        return self._keys

    def source(self, shard: int) -> BlobSource:
        """One shard as a blob; looking at its segments may fetch its sidecar."""
        manifest, name = self._manifest, self._manifest.names[shard]
        size_bytes = int(self._sizes[shard])
        if self._keys is not None:
            key = self._keys[shard]
        else:
            sums = manifest.sums(shard)
            key = self._key(name, manifest.etags[shard], sums.samples, sums.columns)
        if manifest.format.indexing is None:
            # No version: the first answer's etag is noted by the fill, and the sums are checked.
            segments: Sequence[Segment] = (segment(name, size_bytes, ""),)
            return self._origin.blob(
                key, uri=self._origin.uri(name), segments=segments, size_bytes=size_bytes
            )
        count = None if manifest.is_of_chunks else int(manifest.files[shard])
        segments = _LazySegments(lambda: self._segments(shard), count)
        uri = f"{self._origin.url}#{printable(name.rpartition(b'/')[2])}"
        return self._origin.blob(key, uri=uri, segments=segments, size_bytes=size_bytes)

    def _key(self, name: bytes, etag: str, crc32c: int, columns_crc32c: int) -> str:
        if self._manifest.is_of_chunks:
            # Parts of a file have no names of their own: what the index notes of one tells it.
            said = f"{etag}\0{crc32c:08x}{columns_crc32c:08x}\0{self._fields}"
            return self._origin.blob_key(b"", said)
        return self._manifest.format.blob_key(
            self._origin, name=name, etag=etag, crc32c=crc32c, columns_crc32c=columns_crc32c
        )


class _LazySegments(Sequence["Segment"]):
    """Parts that are looked up when someone asks. count: how many, where that is known."""

    def __init__(self, load: Callable[[], Sequence[Segment]], count: int | None) -> None:
        self._load, self._count = load, count
        self._found: Sequence[Segment] | None = None

    def __len__(self) -> int:
        return len(self._looked_up()) if self._count is None else self._count

    @overload
    def __getitem__(self, i: int) -> Segment: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Segment]: ...
    def __getitem__(self, i: int | slice) -> Segment | Sequence[Segment]:
        return self._looked_up()[i]

    def _looked_up(self) -> Sequence[Segment]:
        if self._found is None:
            self._found = self._load()
        return self._found
