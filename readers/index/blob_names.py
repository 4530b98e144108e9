"""Which blob of the cache each shard of a remote dataset is, without any I/O.

Every process and node derives the same keys from the manifest, as the format says. What a blob's
segments are is looked up in the sidecar when somebody opens or fills it.
"""

from __future__ import annotations

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
    fetch."""

    def __init__(
        self,
        origin: RemoteFolder,
        manifest: Manifest,
        segments: Callable[[int], Sequence[Segment]],
    ) -> None:
        self._origin, self._manifest, self._segments = origin, manifest, segments
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
        size_bytes = int(manifest.shard_bytes[shard])
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
        count = int(manifest.files[shard])
        segments = _LazySegments(lambda: self._segments(shard), count)
        uri = f"{self._origin.url}#{printable(name.rpartition(b'/')[2])}"
        return self._origin.blob(key, uri=uri, segments=segments, size_bytes=size_bytes)

    def _key(self, name: bytes, etag: str, crc32c: int, columns_crc32c: int) -> str:
        return self._manifest.format.blob_key(
            self._origin, name=name, etag=etag, crc32c=crc32c, columns_crc32c=columns_crc32c
        )


class _LazySegments(Sequence["Segment"]):
    """Parts that are looked up when someone asks; how many there are is known."""

    def __init__(self, load: Callable[[], Sequence[Segment]], count: int) -> None:
        self._load, self._count = load, count
        self._found: Sequence[Segment] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, i: int) -> Segment: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Segment]: ...
    def __getitem__(self, i: int | slice) -> Segment | Sequence[Segment]:
        if self._found is None:
            self._found = self._load()
        return self._found[i]
