"""The sidecar of a tar file: what an index notes of its images, and where in it each lies.

Each archive is one shard, small ones too: a shard is then one map and one object to fetch.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.readers.files.atomic import write_whole
from penstock.readers.files.ipc import write_batch
from penstock.readers.files.pages import BROKEN
from penstock.readers.formats.blob_shard import FilesBlob
from penstock.readers.formats.image_columns import ARROW_TYPES, ImageColumns
from penstock.readers.formats.limits import VERSION
from penstock.readers.formats.shard import check_rows
from penstock.readers.formats.sidecar_file import check_names, sidecar_batch, sidecar_etag, torn
from penstock.readers.formats.tar.shard import TarShard
from penstock.readers.origin.origin import Entry
from penstock.readers.origin.remote import segment

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.cache.base.blob import Blob, Segment
    from penstock.cache.blobs.remote import Remote
    from penstock.readers.formats.summary import ShardSummary

_ARCHIVE = b"penstock.tar"
_COLUMNS = {
    "path": "large_binary",
    "key": "large_binary",
    "start": "int64",
    "bytes": "int64",
    **ARROW_TYPES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TarSidecar:
    """What an index notes of one archive's n samples; arrays of shape (n,). starts, sizes: bytes of
    the images in the archive; names: of their members; keys: of the samples."""

    archive: Entry
    names: Sequence[bytes]
    keys: Sequence[bytes]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    images: ImageColumns

    @property
    def samples(self) -> int:
        """How many images are noted."""
        return len(self.names)

    @property
    def size_bytes(self) -> int:
        """The bytes of the archive."""
        return self.archive.size_bytes

    @property
    def suffix(self) -> bytes:
        """The archive's identity, so that processes agree on its blob by the manifest alone."""
        return b"-" + self.archive.identity.encode()

    def segments(self) -> Sequence[Segment]:
        """The archive, as one object."""
        return (segment(self.archive.name, self.archive.size_bytes, self.archive.version),)

    def summary(self, *, progressive: int | None) -> ShardSummary:
        """The shard's contribution to the manifest."""
        return self.images.summary(size_bytes=self.size_bytes, progressive=progressive)

    def write(self, path: bytes) -> str:
        """Write the sidecar whole; returns its etag."""
        columns = {
            "path": pa.array(list(self.names), pa.large_binary()),
            "key": pa.array(list(self.keys), pa.large_binary()),
            "start": pa.array(self.starts, pa.int64()),
            "bytes": pa.array(self.sizes, pa.int64()),
            **self.images.arrow(),
        }
        facts = {
            "name": os.fsdecode(self.archive.name),
            "size_bytes": self.archive.size_bytes,
            "mtime_ns": self.archive.mtime_ns,
            "version": self.archive.version,
        }
        metadata = {
            b"penstock.sidecar": str(VERSION).encode(),
            _ARCHIVE: json.dumps(facts).encode(),
        }
        batch = pa.record_batch(columns).replace_schema_metadata(metadata)
        write_whole(path, lambda temp: write_batch(temp, batch))
        return sidecar_etag(path)

    def open_local(self, root: bytes) -> TarShard:
        """Map the archive below a local folder."""
        return TarShard(root, self.archive, self.names, self._table())

    def open_blob(self, remote: Remote, blob: Blob) -> FilesBlob:
        """Open the blob, which is the archive."""
        above = self.archive.name + b"/"
        return FilesBlob(remote, blob, self._table(), names=self.names, above=above)

    def _table(self) -> NDArray[np.int64]:
        return self.images.table(self.starts, self.starts + self.sizes)


def read_tar_sidecar(path: bytes, *, etag: str) -> TarSidecar:
    """Read the sidecar of a tar file; raises as `Indexing.read_sidecar` does."""
    batch = sidecar_batch(path, _COLUMNS, etag=etag)
    try:
        return _content(batch)
    except BROKEN as error:
        raise torn(path, error) from error


def _content(batch: Any) -> TarSidecar:
    facts = json.loads(batch.schema.metadata[_ARCHIVE])
    archive = Entry(
        name=os.fsencode(facts["name"]),
        size_bytes=int(facts["size_bytes"]),
        mtime_ns=int(facts["mtime_ns"]),
        version=str(facts["version"]),
    )
    check_names([archive.name])
    starts, sizes = batch.column("start").to_numpy(), batch.column("bytes").to_numpy()
    images = ImageColumns.read(batch)
    check_rows(sizes, images.heights, images.widths)
    # In this order: a sum of two may pass 2^63.
    if not (
        len(starts)
        and starts.min() >= 0
        and starts.max() <= archive.size_bytes < 2**60
        and (starts + sizes).max() <= archive.size_bytes
    ):
        raise ValueError("its offsets lead out of the archive")
    return TarSidecar(
        archive=archive,
        names=batch.column("path").to_pylist(),
        keys=batch.column("key").to_pylist(),
        starts=starts,
        sizes=sizes,
        images=images,
    )
