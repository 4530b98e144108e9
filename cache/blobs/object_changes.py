"""What happens when an object is replaced while its blob is read: an error, and no mixed bytes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from penstock.cache.errors import ObjectChangedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.cache.base.blob import BlobSource, Segment
    from penstock.cache.blobs.cached_blob import CachedBlob
    from penstock.cache.blobs.dataset_cache import DatasetCache
    from penstock.cache.blobs.upstream import Upstream


def object_changed(source: BlobSource, segment: Segment) -> ObjectChangedError:
    """Make the error of a blob whose bytes came from another object than was indexed. segment: of
    that object."""
    is_blob = segment.object_bytes is None and len(source.segments) == 1
    shown = source.uri if is_blob else f"{source.uri} ({segment.path})"
    return ObjectChangedError(
        f"{shown}: the object was replaced while it was being read, or isn't the one that was "
        "indexed. No versions were mixed: run the job again, and don't write to a dataset while "
        "jobs read it.",
        uri=source.uri,
    )


@contextlib.contextmanager
def drop_if_changed(
    blobs: Sequence[CachedBlob], *, cache: DatasetCache, upstream: Upstream
) -> Iterator[None]:
    """Drop what was filled from an object that isn't that one any more: it is of no use."""
    try:
        yield
    except ObjectChangedError as error:
        for blob in blobs:
            names = {upstream.uri(segment.path) for segment in blob.source.segments}
            if error.uri in (*names, blob.source.uri) and blob.fill is not None:
                cache.drop(blob.source, inode=blob.inode)
        raise
