"""Read files of a dataset that has no index yet: local files, or objects through the cache.

A remote file is filled into the cache if the cache has room for it. Otherwise it is read in
windows, and its samples by their ranges, and it isn't kept. Footers and heads of many files are
fetched in parallel.

Candidates are examined after they are read, so the head of a file is checked before the whole file
is read. A span that is a whole file is read by itself. If the file is remote, it isn't kept,
because its place in a shard isn't known yet. Spans of larger files are read file by file, in their
order in the file, and remote ones through the cache.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import DatasetError, PenstockError, ordered
from penstock.cache.base import BlobSpans
from penstock.readers.byte_source import LocalFile, changed_file_error, unreadable_file_error
from penstock.readers.files import printable
from penstock.readers.formats.open_shard import MISSING
from penstock.readers.origin import Entry, LocalFolder, Origin, RemoteFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.readers.fieldtypes import FieldType
    from penstock.readers.formats.candidates import Candidates
    from penstock.readers.types import Encoded, Ints, Rejection

    Part = tuple[Entry, int, int]
    Load = Callable[[Sequence[int], Sequence[int]], list[Encoded]]
    LoadParts = Callable[[Sequence[Part]], list[Encoded]]
    Contents = dict[str, list[Encoded | Rejection | None]]

_FETCH_AGAIN = "Write or fetch it again, or take it out of the dataset."
_WINDOW_BYTES = 8 * 2**20
# Up to this size, reading the head of a span first costs more than it saves.
_SMALL_BYTES = 2**20


class DataFile:
    """An open file of a dataset. Its methods raise IndexChangedError, DatasetError or FetchError.

    load: reads spans completely, given by starts and ends. window_bytes: the least that is read at
    once, and kept for the next call of `read_at`.
    """

    def __init__(self, entry: Entry, load: Load, *, window_bytes: int = 0) -> None:
        self._entry, self._load, self._window_bytes = entry, load, window_bytes
        self._start, self._window = 0, memoryview(b"")

    def read_at(self, offset: int, size_bytes: int) -> bytes:
        """Read bytes of the file, fewer if the file ends. Raises ValueError for bytes before its
        beginning, which a damaged file may name."""
        if offset < 0 or size_bytes < 0:
            raise ValueError(f"it names {size_bytes} bytes at byte {offset}")
        end = min(offset + size_bytes, self._entry.size_bytes)
        if offset >= end:
            return b""
        if not self._start <= offset <= end <= self._start + len(self._window):
            stop = min(max(end, offset + self._window_bytes), self._entry.size_bytes)
            (window,) = self._load([offset], [stop])
            self._start, self._window = offset, window.data
        return bytes(self._window[offset - self._start : end - self._start])

    def load(self, parts: Sequence[Part]) -> list[Encoded]:
        """Read parts of the file completely."""
        return self._load([start for _, start, _ in parts], [end for _, _, end in parts])


def _checked(
    parts: Sequence[Part], types: Sequence[FieldType], load: LoadParts
) -> list[Encoded | Rejection]:
    """Read parts of files that may be samples of these types. A Rejection replaces a large part
    whose first bytes rule it out, which isn't read completely then."""
    heads = {
        number: (file, start, start + type.head_bytes)
        for number, ((file, start, end), type) in enumerate(zip(parts, types, strict=True))
        if type.head_bytes and end - start > _SMALL_BYTES
    }
    refused: dict[int, Rejection] = {}
    for number, head in zip(heads, load([*heads.values()]) if heads else (), strict=True):
        if (refusal := types[number].check_head(head.tobytes())) is not None:
            refused[number] = refusal
    rest = [part for number, part in enumerate(parts) if number not in refused]
    found = iter(load(rest) if rest else ())
    return [refused[number] if number in refused else next(found) for number in range(len(parts))]


@contextlib.contextmanager
def open_data_file(origin: Origin, entry: Entry, *, whole: bool = False) -> Iterator[DataFile]:
    """Open a file. whole: True if all of it will be read, so that a remote file is fetched as a
    whole.

    A local file isn't mapped, because it may be changing. Its size and time are compared with the
    listing when it is opened and closed. Raises IndexChangedError if they differ, and DatasetError;
    FetchError if a remote file changes while it is read.
    """
    if isinstance(origin, RemoteFolder):
        yield DataFile(entry, _blob_loader(origin, entry, whole=whole), window_bytes=_WINDOW_BYTES)
        return
    assert isinstance(origin, LocalFolder)
    path = os.path.join(origin.root, entry.name)
    file = LocalFile(path, entry.name, entry.size_bytes)
    fd = file.open()

    def load(starts: Sequence[int], ends: Sequence[int]) -> list[Encoded]:
        found = [np.empty(end - start, np.uint8) for start, end in zip(starts, ends, strict=True)]
        for start, data in zip(starts, found, strict=True):
            file.fill(fd, start, data)
            data.flags.writeable = False
        return found

    try:
        _check_unchanged(fd, path, entry)
        yield DataFile(entry, load)
        _check_unchanged(fd, path, entry)
    finally:
        os.close(fd)


def _check_unchanged(fd: int, path: bytes, listed: Entry) -> None:
    try:
        found = os.fstat(fd)
    except OSError as error:
        raise unreadable_file_error(path, error) from error
    if found.st_size != listed.size_bytes:
        raise LocalFile(path, listed.name, listed.size_bytes).changed(found.st_size)
    if listed.mtime_ns and found.st_mtime_ns != listed.mtime_ns:
        raise changed_file_error(listed.name, "it was modified while it was read")


def _blob_loader(origin: RemoteFolder, entry: Entry, *, whole: bool) -> Load:
    """Return the function that reads spans of a remote file that is a shard."""
    source, remote = origin.archive(entry), origin.remote
    if whole and entry.size_bytes:
        # The samples have no checksums yet, so the copy's block checksums are compared.
        remote.check(source)
        remote.fill(source)  # if the cache has no room, windows are read
    blob = remote.open(source)
    return lambda starts, ends: remote.load([BlobSpans(blob=blob, starts=starts, ends=ends)])[0]


@contextlib.contextmanager
def refusing(entry: Entry, where: str = "", *, remedy: str = _FETCH_AGAIN) -> Iterator[None]:
    """Raise a DatasetError with the file's name instead of an error of code that reads the file.
    where: begins the reason."""
    try:
        yield
    except Exception as error:  # another package's code may raise anything
        if isinstance(error, PenstockError | OSError | MemoryError):
            raise
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise DatasetError(f"{printable(entry.name)}: {where}{reason}. {remedy}") from error


_MAX_REQUESTS = 4096


def read_file_parts(origin: Origin, parts: Sequence[Part], *, workers: int) -> list[bytes]:
    """Read bytes [start, end) of files as they were listed.

    Remote parts take one request each and aren't kept; local parts are read on `workers` threads.
    Raises IndexChangedError if a file has changed, DatasetError or FetchError.
    """
    if isinstance(origin, RemoteFolder):
        found: list[bytes] = []
        for first in range(0, len(parts), _MAX_REQUESTS):
            found += (data.tobytes() for data in origin.read(parts[first : first + _MAX_REQUESTS]))
        return found

    def read(part: Part) -> bytes:
        entry, start, end = part
        with open_data_file(origin, entry) as opened:
            data = opened.read_at(start, end - start)
        if len(data) != end - start:
            raise changed_file_error(entry.name, f"it ends before byte {end}")
        return data

    if len(parts) == 1 or workers == 1:
        return [read(part) for part in parts]
    return list(ordered(read, parts, workers=workers, ahead=4 * workers, name="footers"))


def read_candidates(origin: Origin, candidates: Candidates, positions: Ints) -> Contents:
    """Read candidates: for each span field the bytes of each candidate, a Rejection if they can't
    be a sample, or None if the candidate lacks the field.

    Raises IndexChangedError if a file differs from the listing, DatasetError or FetchError.
    """
    contents: Contents = {name: [None] * len(positions) for name in candidates.spans}
    # For each file, the start and the size of its parts, and their places in the result.
    of_files: dict[int, list[tuple[int, int, str, int]]] = defaultdict(list)
    for name, spans in candidates.spans.items():
        columns = (spans.files, spans.starts, spans.sizes)
        rows = zip(*(column[positions].tolist() for column in columns), strict=True)
        for place, (file, start, size) in enumerate(rows):
            if file != MISSING:
                of_files[file].append((start, size, name, place))

    def read(wanted: Sequence[tuple[Part, str, int]], load: LoadParts) -> None:
        types = [candidates.schema[name] for _, name, _ in wanted]
        found = _checked([part for part, _, _ in wanted], types, load)
        for (_, name, place), sample in zip(wanted, found, strict=True):
            contents[name][place] = sample

    whole: list[tuple[Part, str, int]] = []
    for number, some in sorted(of_files.items()):
        file = candidates.files[number]
        wanted = [((file, start, start + size), n, at) for start, size, n, at in sorted(some)]
        if isinstance(origin, RemoteFolder) and all(part[1] == file.size_bytes for part in some):
            whole += wanted
            continue
        with open_data_file(origin, file) as opened:
            read(wanted, opened.load)
    if isinstance(origin, RemoteFolder):
        read(whole, origin.read)
    return contents
