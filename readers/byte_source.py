"""Define the bytes of a shard, whatever their place. `local_place` reads them from local files,
`blob_source` from a blob of the cache. No other module knows which of them it reads.

A format opens the `ByteSource` of a shard at its place, a local folder or a blob. Positions count
from the shard's first byte; several files lie end to end, as in a blob.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from crc32c import crc32c

from penstock.cache import CorruptShardError, DatasetError, IndexChangedError, ReadError
from penstock.cache.base import FileMap, machine_remedy, read_error
from penstock.readers.files import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import ReadMode
    from penstock.readers.types import Encoded, Ints

    Room = Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]
    Unread: TypeAlias = "Encoded | FileSpan"

REINDEX = "Run `penstock index` on the dataset again."
REOPEN = f"Open the dataset again. If that doesn't help: {REINDEX}"

NO_BYTES: Encoded = np.frombuffer(b"", np.uint8)

STEP_BYTES = 4 * 2**20
"""Bytes that are read, then checksummed while they are in the processor's cache. Smaller steps
would be a little faster (256 KiB: 3 %), but a thread needs the GIL between two steps, which a
training loop may hold for milliseconds."""


# -- files


def changed_file_error(name: bytes, what: str) -> IndexChangedError:
    """Return the error for a file that differs from the one that was listed or indexed."""
    return IndexChangedError(
        f"{printable(name)}: changed since it was listed: {what}. Restore it, or use the folder "
        f"as it is now: {REINDEX}"
    )


def unreadable_file_error(path: bytes, error: OSError) -> ReadError | DatasetError:
    """Return the error for a file that exists and can't be read: a fault of the machine, or not a
    file.

    path: absolute, because mounts and permissions are looked up by path.
    """
    if machine_remedy(error) is not None:
        return read_error(printable(path), error)
    return DatasetError(
        f"{printable(path)}: can't be read as a file ({error.strerror or error}). Restore "
        "the file, or remove it from the dataset."
    )


class LocalFile(NamedTuple):
    """A file of a local folder as it was indexed. Methods raise an error if it changed since.

    remedy: for a pack's shard, which isn't indexed again; "" for other files.
    """

    path: bytes
    name: bytes
    size_bytes: int
    remedy: str = ""

    def open(self) -> int:
        """Open the file for reading and return its descriptor."""
        try:
            return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise self.changed(None) from None
        except OSError as error:
            raise unreadable_file_error(self.path, error) from error

    def fill(self, fd: int, begin: int, into: Encoded) -> None:
        """Fill an array from a byte of the open file onwards."""
        view, got = into.data, 0
        try:
            while got < len(view) and (more := os.preadv(fd, [view[got:]], begin + got)):
                got += more
        except OSError as error:
            raise unreadable_file_error(self.path, error) from error
        if got < len(into):
            raise self.changed(begin + got)

    def map(self, fd: int, start: int, end: int) -> Any:
        """Return a buffer of mapped bytes [start, end) of the open file, and close it."""
        try:
            # Reading a map beyond the end of the file would kill the process.
            now = os.fstat(fd).st_size
            if now != self.size_bytes or start == end:
                raise self.changed(now)
            return FileMap(fd, span=(start, end)).buffer()
        except OSError as error:
            raise unreadable_file_error(self.path, error) from error
        finally:
            os.close(fd)

    def changed(self, now: int | None) -> Exception:
        """Return the error for a file that has so many bytes now, or is gone: None."""
        if self.remedy:
            found = "no file" if now is None else f"{now} bytes"
            return CorruptShardError(
                f"{printable(self.path)}: the shard is missing, truncated or changed: got {found}, "
                f"the manifest promises {self.size_bytes} bytes. {self.remedy}"
            )
        what = "it is gone" if now is None else f"it had {self.size_bytes} bytes, now {now}"
        return changed_file_error(self.name, what)


class FileSpan(NamedTuple):  # creating a frozen dataclass takes a microsecond more
    """Bytes [start, start + size_bytes) of a file, which are read later, directly into the memory
    in which they are needed. name: for messages. is_rest: True if the file must end with them; the
    call that reads the end notices a file that has grown.

    Methods raise IndexChangedError if the file is gone or has another size, DatasetError and
    ReadError if it can't be read.
    """

    path: bytes
    name: bytes
    start: int
    size_bytes: int
    is_rest: bool = False

    def copy(self, slot: Encoded) -> int:
        """Fill a slot with the bytes and return their CRC-32C."""
        crc, fd = 0, LocalFile(self.path, self.name, 0).open()
        try:
            for at in range(0, len(slot), STEP_BYTES):
                crc = self._copy_step(fd, slot[at : at + STEP_BYTES], at, crc)
        except OSError as error:
            raise unreadable_file_error(self.path, error) from error
        finally:
            os.close(fd)
        return crc

    def _copy_step(self, fd: int, slot: Encoded, begin: int, crc: int) -> int:
        size_bytes, view, offset = len(slot), slot.data, self.start + begin
        beyond = bytearray(self.is_rest and begin + size_bytes == self.size_bytes)
        got = os.preadv(fd, [view, beyond], offset)
        while 0 < got < size_bytes and (new := os.preadv(fd, [view[got:], beyond], offset + got)):
            got += new
        if got != size_bytes:
            raise self._changed("more" if got > size_bytes else os.fstat(fd).st_size)
        return int(crc32c(slot, crc))

    def _changed(self, now: int | str) -> IndexChangedError:
        had = self.start + self.size_bytes
        return changed_file_error(self.name, f"it had {had} bytes and now has {now}")


# -- sources


class SourceSpans(NamedTuple):
    """Spans [start, end) of the bytes of one source."""

    source: ByteSource
    starts: Sequence[int]
    ends: Sequence[int]


class ByteSource(ABC):
    """The bytes of one shard. Safe for several threads. Views outlive the source.

    shown: its path or address, for messages. size_bytes: of the shard. is_mapped: True if spans are
    views of mapped files, whose bytes may change, unless the mode is "pread". is_kept: True if
    bytes that are read stay on the local disk. may_map: False if `view` always returns None.
    is_fetched: True if bytes come from a store, through a cache that counts what is read; wrong
    ones can then be fetched again. inode: of the cached file; None for other sources. remedy: what
    to do if the shard can't be parsed; "" for files, whose format knows it.

    Methods raise IndexChangedError, CorruptShardError, DatasetError, ReadError or FetchError.
    """

    shown: str
    size_bytes: int
    is_mapped: bool = True
    is_kept: bool = True
    may_map: bool = True
    is_fetched: bool = False
    inode: int | None = None
    remedy: str = ""

    @property
    def is_whole(self) -> bool:
        """Return True if all bytes are on the local disk."""
        return True

    @property
    def is_outdated(self) -> bool:
        """Return True if the bytes are read past the cache, and are in the cache by now."""
        return False

    @property
    def is_spare(self) -> bool:
        """Return True if the cache needn't keep the bytes for this process, or has removed them."""
        return False

    # -- spans of samples

    @abstractmethod
    def load(self, wanted: Sequence[SourceSpans], mode: ReadMode) -> list[list[Unread]]:
        """Return the bytes of spans of several sources of one dataset, including this one,
        read-only. What is missing is fetched by one call, in parallel. A span of a file that isn't
        mapped is returned unread."""

    def advise(self, starts: Ints, ends: Ints) -> None:
        """Ask the kernel to read these mapped bytes ahead. Returns at once."""
        del starts, ends

    # -- parts of chunks

    def read_parts(self, starts: Ints, ends: Ints, room: Room, mode: ReadMode) -> list[Encoded]:
        """Return bytes [start, end), read-only. room: returns memory, into which neighbours are
        read by one call."""
        raise TypeError(f"{self.shown} has no parts")

    @abstractmethod
    def fill(self, starts: Sequence[int], slots: Sequence[Encoded], mode: ReadMode) -> None:
        """Read bytes into slots of their sizes, each by a read of its own."""

    def view(self, start: int, end: int, *, touched_bytes: int) -> Encoded | None:
        """Return a view of mapped bytes; None if they aren't mapped. touched_bytes: the number of
        them that will be accessed, for the statistics."""
        raise TypeError(f"{self.shown} has no parts")

    def check(self, starts: Ints, ends: Ints, mode: ReadMode) -> None:
        """Check the blocks of loaded bytes [start, end), each once. Raises CorruptShardError if the
        local disk returned wrong bytes."""
        del starts, ends, mode

    # -- parsing

    def buffer(self, spans: Sequence[tuple[int, int]]) -> Any:
        """Return a read-only pyarrow buffer of the shard's size that holds at least these spans
        [start, end), after fetching missing ones. For parsing headers and footers of one file."""
        raise TypeError(f"{self.shown} isn't one file")

    def parsing(self) -> AbstractContextManager[None]:
        """Return a context in which the end of the buffer is parsed: the kernel reads it ahead,
        and little around other bytes."""
        return nullcontext()

    # -- missing and wrong bytes

    def bring(self, wanted: Sequence[SourceSpans], *, here: int) -> None:
        """Fetch spans of kept sources of one dataset, including this one, to the local disk by one
        call. here: the number of other samples that are there, for the statistics."""
        del wanted, here

    def refuse(self, error: Exception, attempt: int) -> None:
        """Raise an error of reading, unless the bytes should be fetched again. attempt: counts the
        errors of one read, from 0."""
        raise error
