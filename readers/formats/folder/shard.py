"""A virtual shard: some files of a folder, and the sidecar that says what is known of each."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from penstock.cache.errors import CorruptShardError, DatasetError, IndexChangedError
from penstock.readers.files.atomic import write_whole
from penstock.readers.files.ipc import Columns, only_batch, write_batch
from penstock.readers.files.names import are_unsafe, printable
from penstock.readers.files.pages import BROKEN, map_buffer, read_buffer
from penstock.readers.formats.pack.shard import read_up_to
from penstock.readers.formats.shard import check_rows, table
from penstock.readers.index.manifest import FORMAT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.types import Encoded

REINDEX = "Run `penstock index` on the dataset again."

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
    batch = pa.record_batch(columns).replace_schema_metadata({"penstock.sidecar": str(FORMAT)})
    write_whole(path, lambda temp: write_batch(temp, batch))
    return sidecar_etag(path)


def sidecar_etag(path: bytes) -> str:
    """A checksum of the file."""
    return _etag(map_buffer(path))


def _etag(buffer: Any) -> str:
    return f"crc32c-{crc32c(buffer):08x}"


def read_sidecar(path: bytes, *, etag: str) -> SidecarContent:
    """Map a sidecar. etag: what the manifest promises. Raises IndexChangedError (it is gone),
    CorruptShardError (torn, changed)."""
    batch = sidecar_batch(path, _COLUMNS, etag=etag)
    try:
        return _content(batch)
    except BROKEN as error:
        raise torn(path, error) from error


def is_sidecar(path: bytes, etag: str) -> bool:
    """Whether a file is what the manifest promises. Raises OSError."""
    try:
        return _etag(read_buffer(path)) == etag
    except ValueError:  # empty
        return False


def sidecar_batch(path: bytes, columns: Columns, *, etag: str) -> Any:
    """A sidecar's columns, with or without labels; raises as read_sidecar does."""
    try:
        buffer = read_buffer(path)  # not mapped: what is checked here is what is used
        if _etag(buffer) != etag:
            raise ValueError("its checksum isn't what the manifest promises")
        return only_batch(buffer, columns, optional=frozenset(("label",)))
    except FileNotFoundError:
        raise IndexChangedError(
            f"{printable(path)}: part of the index is gone; it was built anew while this dataset "
            f"was open, or deleted. Open the dataset again. If that doesn't help: {REINDEX}"
        ) from None
    except BROKEN as error:
        raise torn(path, error) from error


def torn(path: bytes, error: Exception) -> CorruptShardError:
    """A sidecar that can't be read."""
    return CorruptShardError(
        f"{printable(path)}: this part of the index is torn ({error}). {REINDEX}"
    )


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


def check_names(names: Sequence[bytes]) -> None:
    """Whether all are paths below the dataset's folder, at least one. Raises ValueError."""
    if not names or are_unsafe(names):
        raise ValueError("a file's name is no path below the dataset")


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


def read_file(path: bytes, *, name: bytes, size_bytes: int) -> Encoded:
    """A whole file that has size_bytes. Raises as read_file_into does."""
    data = np.empty(size_bytes + 1, np.uint8)
    read_file_into(path, data, name=name)
    data.flags.writeable = False
    return data[:-1]


def read_file_into(path: bytes, slot: Encoded, *, name: bytes) -> None:
    """Read a whole file that is one byte shorter than its slot: so the same call sees one that
    grew.

    Raises IndexChangedError (gone, another size), DatasetError (can't be read).
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise changed(name, "it is gone") from None
    except OSError as error:
        raise unreadable(name, error) from error
    try:
        got = read_up_to(fd, slot)
    except OSError as error:
        raise unreadable(name, error) from error
    finally:
        os.close(fd)
    wanted = len(slot) - 1
    if got != wanted:
        now = "has more" if got > wanted else f"has {got}"
        raise changed(name, f"it had {wanted} bytes and {now}")


def changed(name: bytes, what: str) -> IndexChangedError:
    """A file isn't what was listed or indexed."""
    return IndexChangedError(
        f"{printable(name)}: changed since it was listed: {what}. Put it back, or take the folder "
        f"as it is now: {REINDEX}"
    )


def unreadable(name: bytes, error: OSError) -> DatasetError:
    """A file is there and can't be read."""
    return DatasetError(
        f"{printable(name)}: can't be read ({error.strerror or error}). Give this user the right "
        "to read it and look whether the disk is well."
    )
