"""A virtual shard: some files of a folder, and the sidecar that says what is known of each."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.readers.files.atomic import write_whole
from penstock.readers.files.ipc import write_batch
from penstock.readers.files.names import printable
from penstock.readers.files.pages import BROKEN
from penstock.readers.formats.limits import VERSION
from penstock.readers.formats.local_files import read_file_into
from penstock.readers.formats.shard import check_rows, table
from penstock.readers.formats.sidecar_file import check_names, sidecar_batch, sidecar_etag, torn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.types import Encoded

_COLUMNS = {
    "path": "large_binary",
    "bytes": "int64",
    "mtime_ns": "int64",
    "version": "string",
    "crc32c": "uint32",
    "height": "int32",
    "width": "int32",
    "channels": "int32",
    "codec": "string",
    "label": "int64",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarContent:
    """What a sidecar holds of n files; all of shape (n,). versions: etags or the like, of remote
    ones."""

    names: Sequence[bytes]
    sizes: NDArray[np.int64]
    mtimes_ns: NDArray[np.int64]
    versions: Sequence[str]
    crcs: NDArray[np.uint32]
    heights: NDArray[np.int32]
    widths: NDArray[np.int32]
    channels: NDArray[np.int32]
    codecs: Sequence[str]
    labels: NDArray[np.int64] | None


def write_sidecar(path: bytes, content: SidecarContent) -> str:
    """Write a sidecar whole; returns its etag (a checksum of the file). Raises WriteError."""
    columns = {
        "path": pa.array(list(content.names), pa.large_binary()),
        "bytes": pa.array(content.sizes, pa.int64()),
        "mtime_ns": pa.array(content.mtimes_ns, pa.int64()),
        "version": pa.array(list(content.versions), pa.string()),
        "crc32c": pa.array(content.crcs, pa.uint32()),
        "height": pa.array(content.heights, pa.int32()),
        "width": pa.array(content.widths, pa.int32()),
        "channels": pa.array(content.channels, pa.int32()),
        "codec": pa.array(list(content.codecs), pa.string()),
    }
    if content.labels is not None:
        columns["label"] = pa.array(content.labels, pa.int64())
    batch = pa.record_batch(columns).replace_schema_metadata({"penstock.sidecar": str(VERSION)})
    write_whole(path, lambda temp: write_batch(temp, batch))
    return sidecar_etag(path)


def read_sidecar(path: bytes, *, etag: str) -> SidecarContent:
    """Map a sidecar. etag: what the manifest promises. Raises IndexChangedError (it is gone),
    CorruptShardError (torn, changed)."""
    batch = sidecar_batch(path, _COLUMNS, etag=etag)
    try:
        return _content(batch)
    except BROKEN as error:
        raise torn(path, error) from error


def _content(batch: Any) -> SidecarContent:
    has_labels = "label" in batch.schema.names
    names, sizes = batch.column("path").to_pylist(), batch.column("bytes").to_numpy()
    check_names(names)
    check_rows(sizes, batch.column("height").to_numpy(), batch.column("width").to_numpy())
    return SidecarContent(
        names=names,
        sizes=sizes,
        mtimes_ns=batch.column("mtime_ns").to_numpy(),
        versions=batch.column("version").to_pylist(),
        crcs=batch.column("crc32c").to_numpy(),
        heights=batch.column("height").to_numpy(),
        widths=batch.column("width").to_numpy(),
        channels=batch.column("channels").to_numpy(),
        codecs=batch.column("codec").to_pylist(),
        labels=batch.column("label").to_numpy() if has_labels else None,
    )


def folder_table(
    sidecar: SidecarContent, starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The table of a shard; see penstock.readers.formats.shard.table."""
    return table(
        starts=starts,
        ends=ends,
        heights=sidecar.heights,
        widths=sidecar.widths,
        labels=sidecar.labels,
        crcs=sidecar.crcs,
    )


class FolderShard:
    """Some files of a folder, open as a shard. Files are opened when they are read."""

    is_mapped = False

    def __init__(self, root: bytes, sidecar: SidecarContent) -> None:
        """root: the dataset's folder."""
        self._root, self._names = root, sidecar.names
        starts = np.zeros(len(sidecar.names), np.int64)
        self.table = folder_table(sidecar, starts, sidecar.sizes)

    def views(self, starts: list[int], ends: list[int]) -> list[Encoded]:
        """Not here: mapping a small file costs more than reading it."""
        del starts, ends
        raise TypeError("a folder's files are read, not mapped")

    def read_into(self, rows: list[int], starts: list[int], slots: list[Encoded]) -> None:
        """Read whole files; see OpenShard."""
        del starts
        for row, slot in zip(rows, slots, strict=True):
            name = self._names[row]
            read_file_into(os.path.join(self._root, name), slot, name=name)

    def advise(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Nothing: each file is read whole by one call, which is its own read-ahead."""

    def name(self, row: int) -> str:
        """The file's name below the dataset's root."""
        return printable(self._names[row])
