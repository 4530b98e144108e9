"""Keep decoded chunks in mapped files of a cache folder: arrays as in memory, tables as Arrow
IPC."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from penstock.cache.disk import MOST_SHARE, PrivateFiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.disk import DiskCache, PrivateFile

LEAST_BYTES = 2**20
"""A smaller chunk is decoded again instead of being kept in a file, because an entry in the cache's
catalogue takes one or two milliseconds."""


class ChunkFile:
    """A chunk in a file. value: mapped, read-only. size_bytes: of the file."""

    def __init__(self, file: PrivateFile, value: Any) -> None:
        self._file, self.value = file, value
        self.size_bytes = file.size_bytes

    def remove(self) -> None:
        """Remove the file as soon as no view of it is left."""
        self.value = None
        self._file.remove()


class ChunkFiles:
    """Keeps chunks in files of a cache folder, within its limit.

    cache: opens the cache, called at the first chunk. uri: of the dataset, for messages.
    least_bytes: smallest chunk that is kept.
    """

    def __init__(
        self, cache: Callable[[], DiskCache], *, uri: str, least_bytes: int | None = None
    ) -> None:
        self._cache, self._uri = cache, uri
        self._least_bytes = LEAST_BYTES if least_bytes is None else least_bytes
        self._files: PrivateFiles | None = None

    def write(self, value: Any) -> ChunkFile | None:
        """Keep a chunk; return None if there is no room for it, or if it is too small."""
        is_array = isinstance(value, np.ndarray)
        if value.nbytes < max(1, self._least_bytes):
            return None
        if not is_array and not type(value).__module__.startswith("pyarrow"):
            return None  # columns of a block, which are decoded again
        if self._files is None:
            self._files = PrivateFiles(self._cache(), uri=f"decoded chunk of {self._uri}")
        write = self._write_array if is_array else self._write_table
        return write(self._files, value)

    def _write_array(self, files: PrivateFiles, value: Any) -> ChunkFile | None:
        # In the order of memory if it has no gaps, so that the axes keep their order.
        is_column_major = value.flags.f_contiguous and not value.flags.c_contiguous
        order: Literal["C", "F"] = "F" if is_column_major else "C"
        flat = np.ascontiguousarray(value.reshape(-1, order=order))
        file = files.make(flat.nbytes)
        if file is None:
            return None
        try:
            file.write(flat.view(np.uint8).data)
        except OSError:
            file.remove()
            return None
        file.end()
        mapped = np.frombuffer(file.buffer(), value.dtype).reshape(value.shape, order=order)
        return ChunkFile(file, mapped)

    def _write_table(self, files: PrivateFiles, value: Any) -> ChunkFile | None:
        import pyarrow as pa

        table = _as_table(value)
        options = pa.ipc.IpcWriteOptions(unify_dictionaries=True)
        size = pa.MockOutputStream()
        with pa.ipc.new_file(size, table.schema, options=options) as writer:
            writer.write_table(table)
        file = files.make(size.size())
        if file is None:
            return None
        sink = _Sink(file)
        try:
            with pa.ipc.new_file(
                pa.PythonFile(sink, mode="w"), table.schema, options=options
            ) as writer:
                writer.write_table(table)
        except OSError:
            file.remove()
            return None
        file.end()
        return ChunkFile(file, _as(value, pa.ipc.open_file(file.buffer()).read_all()))

    def room_bytes(self) -> int:
        """Return how many bytes of the folder's limit such files of all processes may take."""
        limit = self._cache().use(lambda folder: folder.max_bytes)
        return int(MOST_SHARE * (limit or 0))

    def close(self) -> None:
        """Remove the remaining files. Safe to call twice."""
        if self._files is not None:
            self._files.close()


class _Sink:
    """A file for pyarrow to write to. It ignores close, which may come late."""

    closed = False

    def __init__(self, file: PrivateFile) -> None:
        self._file, self._at = file, 0

    def write(self, data: Any) -> int:
        """Write the next bytes."""
        view = memoryview(data).cast("B")
        self._file.write(view, self._at)
        self._at += len(view)
        return len(view)

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self._at

    def flush(self) -> None:
        """Do nothing: writes aren't buffered."""

    def close(self) -> None:
        """Do nothing: the owner closes the file."""


def _as_table(value: Any) -> Any:
    """Return pyarrow data as a table."""
    import pyarrow as pa

    if isinstance(value, pa.Table):
        return value
    if isinstance(value, pa.RecordBatch):
        return pa.Table.from_batches([value])
    return pa.table({"": value})


def _as(value: Any, table: Any) -> Any:
    """Convert a table back to the type of a value."""
    import pyarrow as pa

    if isinstance(value, pa.Table):
        return table
    if isinstance(value, pa.RecordBatch):
        (batch,) = table.to_batches()
        return batch
    column = table.column(0)
    return column if isinstance(value, pa.ChunkedArray) else column.chunk(0)
