"""Reading a tar file that has no index yet: a local file, or an object through the cache.

A remote archive is filled into the cache if that has room for it. Else its headers are walked in
windows, its images come by their ranges, and it is kept nowhere.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

import numpy as np

from penstock.cache.base.blob import BlobSpans
from penstock.readers.fields.sniff import HEAD_BYTES, sniff
from penstock.readers.formats.local_files import changed, open_file, read_up_to, unreadable
from penstock.readers.origin.local import LocalFolder
from penstock.readers.origin.remote import RemoteFolder
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from penstock.readers.origin.origin import Entry, Origin
    from penstock.readers.types import Encoded

_WINDOW_BYTES = 8 * 2**20


class Archive(Protocol):
    """An open archive, a context manager. Raises IndexChangedError, DatasetError, FetchError."""

    def __enter__(self) -> Archive: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...

    def read_at(self, offset: int, size_bytes: int) -> bytes:
        """Bytes of the archive, fewer where it ends."""

    def images(self, starts: list[int], sizes: list[int]) -> list[Encoded | Rejection]:
        """Members that may be images; of another kind: why they aren't."""


def open_archive(origin: Origin, entry: Entry, *, whole: bool = False) -> Archive:
    """Open an archive. whole: all of it will be read, so a remote one is fetched as a whole."""
    if isinstance(origin, LocalFolder):
        return LocalTar(origin, entry)
    if isinstance(origin, RemoteFolder):
        return RemoteTar(origin, entry, whole=whole)
    raise TypeError(f"unknown origin {origin!r}")


def is_here(origin: Origin, entry: Entry) -> bool:
    """Whether the cache holds a remote archive."""
    return isinstance(origin, RemoteFolder) and origin.remote.is_whole(origin.archive(entry))


def drop_copy(origin: Origin, entry: Entry) -> None:
    """Forget what the cache holds of a remote archive: it was damaged before it was whole, when it
    had no checksums yet."""
    if isinstance(origin, RemoteFolder):
        origin.remote.drop(origin.archive(entry))


class LocalTar:
    """A local archive, open for reading at offsets; if it changes meanwhile, that is found at
    close.

    Not mapped: headers are read here before anyone knows whether the file stands still. A context
    manager. Raises IndexChangedError (another size or time than listed), DatasetError.
    """

    def __init__(self, origin: LocalFolder, entry: Entry) -> None:
        self._entry = entry
        self._fd = open_file(os.path.join(origin.root, entry.name), entry.name)
        try:
            self._check()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> LocalTar:
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
            raise unreadable(self._entry.name, error) from error

    def images(self, starts: list[int], sizes: list[int]) -> list[Encoded | Rejection]:
        """Read members; a large one of another kind isn't read whole."""
        samples: list[Encoded | Rejection] = []
        for start, size_bytes in zip(starts, sizes, strict=True):
            codec = sniff(self.read_at(start, min(HEAD_BYTES, size_bytes)))
            if isinstance(codec, Rejection):
                samples.append(codec)
            else:
                samples.append(self._read(start, size_bytes))
        return samples

    def _read(self, start: int, size_bytes: int) -> Encoded:
        """One member's bytes."""
        data = np.empty(size_bytes, np.uint8)
        try:
            got = read_up_to(self._fd, data, start)
        except OSError as error:
            raise unreadable(self._entry.name, error) from error
        if got < size_bytes:
            raise changed(self._entry.name, f"it ends before byte {start + size_bytes}")
        data.flags.writeable = False
        return data

    def _check(self) -> None:
        found, wanted = os.fstat(self._fd), self._entry
        if found.st_size != wanted.size_bytes:
            raise changed(wanted.name, f"it had {wanted.size_bytes} bytes, now {found.st_size}")
        if wanted.mtime_ns and found.st_mtime_ns != wanted.mtime_ns:
            raise changed(wanted.name, "it was written to in the meantime")


class RemoteTar:
    """An archive in a remote store. One that changes meanwhile is a FetchError."""

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

    def __enter__(self) -> RemoteTar:
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

    def images(self, starts: list[int], sizes: list[int]) -> list[Encoded | Rejection]:
        """Fetch members, all at once."""
        ends = [start + size_bytes for start, size_bytes in zip(starts, sizes, strict=True)]
        samples: list[Encoded | Rejection] = []
        for data in self._load(starts, ends):
            codec = sniff(data[:HEAD_BYTES].tobytes())
            samples.append(codec if isinstance(codec, Rejection) else data)
        return samples

    def _load(self, starts: Sequence[int], ends: Sequence[int]) -> list[Encoded]:
        wanted = BlobSpans(blob=self._blob, starts=starts, ends=ends)
        (members,) = self._remote.load([wanted])
        return members
