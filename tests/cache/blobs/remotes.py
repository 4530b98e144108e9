"""Blobs of a store in memory, and helpers of the tests of remotes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.base import BlobSource, Segment, blob_key
from tests.stores import MemoryStore

if TYPE_CHECKING:
    from penstock.cache.blobs import Remote
    from penstock.cache.disk import DiskCache, PinnedShare

SIZES = [300_000, 4096, 1, 65_537, 200_000, 123_456]
MIB = 2**20


def cache_of(remote: Remote) -> DiskCache:
    assert remote.cache is not None
    return remote.cache


def job_of(remote: Remote, keys: list[str], sizes: list[int]) -> PinnedShare:
    job = remote.join(keys, sizes)
    assert job is not None
    return job


def single(store: MemoryStore, number: int, *, version: str | None = None) -> BlobSource:
    path = f"o{number}"
    segment = Segment(path=path, size_bytes=len(store.objects[path]), version=version)
    uri = f"{store.url}/{path}"
    key = blob_key(scope=store.scope, uri=uri, version="1")
    return BlobSource(key=key, uri=uri, segments=(segment,), size_bytes=segment.size_bytes)


def joined(store: MemoryStore) -> BlobSource:
    segments = tuple(
        Segment(path=path, size_bytes=len(data), version=store.version(path))
        for path, data in store.objects.items()
    )
    key = blob_key(scope=store.scope, uri="all", version="1")
    return BlobSource(
        key=key, uri="mem://all", segments=segments, size_bytes=sum(p.size_bytes for p in segments)
    )


def of_ranges(store: MemoryStore, *ranges: tuple[int, int, int]) -> BlobSource:
    """A blob of ranges: (number of the object, start, end)."""
    segments = []
    for number, start, end in ranges:
        path = f"o{number}"
        segments.append(
            Segment(
                path=path,
                size_bytes=end - start,
                version=None,
                start=start,
                object_bytes=len(store.objects[path]),
            )
        )
    return BlobSource(
        key=blob_key(scope=store.scope, uri=str(ranges), version="1"),
        uri="mem://ranges",
        segments=segments,
        size_bytes=sum(one.size_bytes for one in segments),
    )


def content(store: MemoryStore, source: BlobSource) -> bytes:
    return b"".join(
        store.objects[one.path][one.start : one.start + one.size_bytes] for one in source.segments
    )


def many(count: int, size: int) -> MemoryStore:
    rng = np.random.default_rng(count)
    return MemoryStore({f"o{i}": rng.bytes(size) for i in range(count)})
