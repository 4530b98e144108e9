"""The sidecar of a virtual shard: what an index notes of some files of a folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.readers.files.atomic import write_whole
from penstock.readers.files.ipc import write_batch
from penstock.readers.files.pages import BROKEN
from penstock.readers.formats.blob_shard import FilesBlob
from penstock.readers.formats.folder.shard import FolderShard
from penstock.readers.formats.image_columns import ARROW_TYPES, ImageColumns
from penstock.readers.formats.limits import VERSION
from penstock.readers.formats.shard import check_rows
from penstock.readers.formats.sidecar_file import check_names, sidecar_batch, sidecar_etag, torn
from penstock.readers.origin.remote import segment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.cache.base.blob import Blob, Segment
    from penstock.cache.blobs.remote import Remote
    from penstock.readers.formats.summary import ShardSummary

_COLUMNS = {
    "path": "large_binary",
    "bytes": "int64",
    "mtime_ns": "int64",
    "version": "string",
    **ARROW_TYPES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSidecar:
    """What an index notes of n files. versions: etags or the like, of remote ones."""

    names: Sequence[bytes]
    sizes: NDArray[np.int64]
    mtimes_ns: NDArray[np.int64]
    versions: Sequence[str]
    images: ImageColumns

    suffix = b""

    @property
    def samples(self) -> int:
        """How many files there are."""
        return len(self.names)

    @property
    def size_bytes(self) -> int:
        """The bytes of all files."""
        return int(self.sizes.sum())

    def segments(self) -> Sequence[Segment]:
        """The files, in order."""
        rows = zip(self.names, self.sizes.tolist(), self.versions, strict=True)
        return tuple(segment(*row) for row in rows)

    def summary(self, *, progressive: int | None) -> ShardSummary:
        """The shard's contribution to the manifest."""
        return self.images.summary(size_bytes=self.size_bytes, progressive=progressive)

    def write(self, path: bytes) -> str:
        """Write the sidecar whole; returns its etag."""
        columns = {
            "path": pa.array(list(self.names), pa.large_binary()),
            "bytes": pa.array(self.sizes, pa.int64()),
            "mtime_ns": pa.array(self.mtimes_ns, pa.int64()),
            "version": pa.array(list(self.versions), pa.string()),
            **self.images.arrow(),
        }
        batch = pa.record_batch(columns).replace_schema_metadata({"penstock.sidecar": str(VERSION)})
        write_whole(path, lambda temp: write_batch(temp, batch))
        return sidecar_etag(path)

    def open_local(self, root: bytes) -> FolderShard:
        """Open the files below a local folder, each with bytes from 0."""
        table = self.images.table(np.zeros(len(self.names), np.int64), self.sizes)
        return FolderShard(root, self.names, table)

    def open_blob(self, remote: Remote, blob: Blob) -> FilesBlob:
        """Open the blob, in which the files lie end to end."""
        ends = np.cumsum(self.sizes, dtype=np.int64)
        table = self.images.table(ends - self.sizes, ends)
        return FilesBlob(remote, blob, table, names=self.names)


def read_folder_sidecar(path: bytes, *, etag: str) -> FolderSidecar:
    """Read the sidecar of a virtual shard; raises as `Indexing.read_sidecar` does."""
    batch = sidecar_batch(path, _COLUMNS, etag=etag)
    try:
        return _content(batch)
    except BROKEN as error:
        raise torn(path, error) from error


def _content(batch: Any) -> FolderSidecar:
    names, sizes = batch.column("path").to_pylist(), batch.column("bytes").to_numpy()
    images = ImageColumns.read(batch)
    check_names(names)
    check_rows(sizes, images.heights, images.widths)
    return FolderSidecar(
        names=names,
        sizes=sizes,
        mtimes_ns=batch.column("mtime_ns").to_numpy(),
        versions=batch.column("version").to_pylist(),
        images=images,
    )
