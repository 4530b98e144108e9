"""Reading a dataset's file that has no index yet: a local one, or an object through the cache.

A remote file is filled into the cache if that has room for it. Else it is walked in windows, its
samples come by their ranges, and it is kept nowhere.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

import numpy as np

from penstock.cache.base.blob import BlobSpans
from penstock.readers.fields.heads import HEAD_BYTES, has_head, refusal_by_head
from penstock.readers.formats.local_files import changed, open_file, read_up_to, unreadable
from penstock.readers.origin.local import LocalFolder
from penstock.readers.origin.remote import RemoteFolder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from penstock.readers.fields.field_types import FieldType
    from penstock.readers.origin.origin import Entry, Origin
    from penstock.readers.types import Encoded, Rejection

_WINDOW_BYTES = 8 * 2**20


class DataFile(Protocol):
    """An open file of a dataset, a context manager. Raises IndexChangedError, DatasetError,
    FetchError."""

    def __enter__(self) -> DataFile: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...

    def read_at(self, offset: int, size_bytes: int) -> bytes:
        """Bytes of the file, fewer where it ends."""

    def read(
        self, starts: Sequence[int], sizes: Sequence[int], types: Sequence[FieldType]
    ) -> list[Encoded | Rejection]:
        """Spans that may be samples of these types; or why one can't be by its first bytes."""


def open_data_file(origin: Origin, entry: Entry, *, whole: bool = False) -> DataFile:
    """Open a file. whole: all of it will be read, so a remote one is fetched as a whole."""
    if isinstance(origin, LocalFolder):
        return LocalFile(origin, entry)
    if isinstance(origin, RemoteFolder):
        return RemoteFile(origin, entry, whole=whole)
    raise TypeError(f"unknown origin {origin!r}")


def is_here(origin: Origin, entry: Entry) -> bool:
    """Whether the cache holds a remote file that is a shard."""
    return isinstance(origin, RemoteFolder) and origin.remote.is_whole(origin.archive(entry))


def drop_copy(origin: Origin, entry: Entry) -> None:
    """Forget what the cache holds of a remote file that is a shard: it was damaged before it was
    whole, when it had no checksums yet."""
    if isinstance(origin, RemoteFolder):
        origin.remote.drop(origin.archive(entry))


class LocalFile:
    """A local file, open for reading at offsets; if it changes meanwhile, that is found at close.

    Not mapped: it is read before anyone knows whether it stands still. A context manager. Raises
    IndexChangedError (another size or time than listed), DatasetError.
    """

    def __init__(self, origin: LocalFolder, entry: Entry) -> None:
        self._entry = entry
        self._path = os.path.join(origin.root, entry.name)
        self._fd = open_file(self._path, entry.name)
        try:
            self._check()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> LocalFile:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._check()
        finally:
            os.close(self._fd)

    def read_at(self, offset: int, size_bytes: int) -> bytes:
        """Bytes of the file, fewer where it ends."""
        try:
            return os.pread(self._fd, size_bytes, offset)
        except OSError as error:
            raise unreadable(self._path, error) from error

    def read(
        self, starts: Sequence[int], sizes: Sequence[int], types: Sequence[FieldType]
    ) -> list[Encoded | Rejection]:
        """Read spans; a large one of another kind isn't read whole."""
        rows = zip(starts, sizes, types, strict=True)
        return [self._read(start, size_bytes, type) for start, size_bytes, type in rows]

    def _read(self, start: int, size_bytes: int, type: FieldType) -> Encoded | Rejection:
        if has_head(type):
            refusal = refusal_by_head(type, self.read_at(start, min(HEAD_BYTES, size_bytes)))
            if refusal is not None:
                return refusal
        data = np.empty(size_bytes, np.uint8)
        try:
            got = read_up_to(self._fd, data, start)
        except OSError as error:
            raise unreadable(self._path, error) from error
        if got < size_bytes:
            raise changed(self._entry.name, f"it ends before byte {start + size_bytes}")
        data.flags.writeable = False
        return data

    def _check(self) -> None:
        wanted = self._entry
        try:
            found = os.fstat(self._fd)
        except OSError as error:
            raise unreadable(self._path, error) from error
        if found.st_size != wanted.size_bytes:
            raise changed(wanted.name, f"it had {wanted.size_bytes} bytes, now {found.st_size}")
        if wanted.mtime_ns and found.st_mtime_ns != wanted.mtime_ns:
            raise changed(wanted.name, "it was written to in the meantime")


class RemoteFile:
    """A file in a remote store that is a shard. One that changes meanwhile is a FetchError."""

    def __init__(self, origin: RemoteFolder, entry: Entry, *, whole: bool) -> None:
        source = origin.archive(entry)
        self._size_bytes = entry.size_bytes
        self._remote = origin.remote
        if whole and self._size_bytes:
            # Nobody knows the samples' checksums yet: those of the copy's blocks must do.
            self._remote.check(source)
            self._remote.fill(source)  # without room in the cache: windows
        self._blob = self._remote.open(source)
        self._start, self._window = 0, memoryview(b"")

    def __enter__(self) -> RemoteFile:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held."""

    def read_at(self, offset: int, size_bytes: int) -> bytes:
        """Bytes of the object, fewer where it ends."""
        end = min(offset + size_bytes, self._size_bytes)
        if offset >= end:
            return b""
        if not self._start <= offset <= end <= self._start + len(self._window):
            stop = min(max(end, offset + _WINDOW_BYTES), self._size_bytes)
            (window,) = self._load([offset], [stop])
            self._start, self._window = offset, window.data
        at = offset - self._start
        return bytes(self._window[at : at + end - offset])

    def read(
        self, starts: Sequence[int], sizes: Sequence[int], types: Sequence[FieldType]
    ) -> list[Encoded | Rejection]:
        """Fetch spans, all at once."""
        ends = [start + size_bytes for start, size_bytes in zip(starts, sizes, strict=True)]
        samples: list[Encoded | Rejection] = []
        for data, type in zip(self._load(starts, ends), types, strict=True):
            refusal = refusal_by_head(type, data[:HEAD_BYTES].tobytes()) if has_head(type) else None
            samples.append(data if refusal is None else refusal)
        return samples

    def _load(self, starts: Sequence[int], ends: Sequence[int]) -> list[Encoded]:
        wanted = BlobSpans(blob=self._blob, starts=starts, ends=ends)
        (members,) = self._remote.load([wanted])
        return members
