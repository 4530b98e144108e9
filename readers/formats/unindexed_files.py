"""Read files of a dataset that has no index yet: local ones, or objects through the cache.

A remote file is filled into the cache if that has room for it. Otherwise it is read in windows, its
samples by their ranges, and it is kept nowhere. Footers and heads of many files are read at once.

Candidates are read before they are examined: what can't be a sample isn't read whole. A span that
is a whole file is read by itself, and a remote file of that kind is kept nowhere, as its place in a
shard isn't known yet. Spans of larger files are read file by file, in their order there, remote
ones through the cache.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from penstock.cache import ordered
from penstock.cache.base import BlobSpans
from penstock.readers.fields import HEAD_BYTES, has_head, refusal_by_head
from penstock.readers.formats.candidates import MISSING
from penstock.readers.formats.local_files import (
    changed_file_error,
    open_file,
    read_up_to,
    unreadable_file_error,
)
from penstock.readers.origin import LocalFolder, RemoteFolder
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from numpy.typing import NDArray

    from penstock.cache.base import Answer
    from penstock.readers.fields import FieldType
    from penstock.readers.formats.candidates import Candidates
    from penstock.readers.origin import Entry, Origin
    from penstock.readers.types import Encoded

    Part = tuple[Entry, int, int]
    Contents = dict[str, list[Encoded | Rejection | None]]

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


def is_cached(origin: Origin, entry: Entry) -> bool:
    """Whether the cache holds a remote file that is a shard."""
    return isinstance(origin, RemoteFolder) and origin.remote.is_whole(origin.archive(entry))


def drop_cached_copy(origin: Origin, entry: Entry) -> None:
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
            raise unreadable_file_error(self._path, error) from error

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
            raise unreadable_file_error(self._path, error) from error
        if got < size_bytes:
            raise changed_file_error(self._entry.name, f"it ends before byte {start + size_bytes}")
        data.flags.writeable = False
        return data

    def _check(self) -> None:
        wanted = self._entry
        try:
            found = os.fstat(self._fd)
        except OSError as error:
            raise unreadable_file_error(self._path, error) from error
        if found.st_size != wanted.size_bytes:
            raise changed_file_error(
                wanted.name, f"it had {wanted.size_bytes} bytes, now {found.st_size}"
            )
        if wanted.mtime_ns and found.st_mtime_ns != wanted.mtime_ns:
            raise changed_file_error(wanted.name, "it was written to in the meantime")


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


_AT_ONCE = 4096


def read_file_parts(origin: Origin, parts: Sequence[Part], *, workers: int) -> list[bytes]:
    """Bytes [start, end) of files as a listing named them: one request each where they are remote,
    kept nowhere; local ones on `workers` threads.

    Raises IndexChangedError (it ends before), DatasetError, FetchError.
    """
    if isinstance(origin, RemoteFolder):
        found: list[bytes] = []
        for first in range(0, len(parts), _AT_ONCE):
            found += _fetch(origin, parts[first : first + _AT_ONCE])
        return found
    if not isinstance(origin, LocalFolder):
        raise TypeError(f"unknown origin {origin!r}")
    read = partial(_read, origin.root)
    if len(parts) == 1 or workers == 1:
        return [read(part) for part in parts]
    return list(ordered(read, parts, workers=workers, ahead=4 * workers, name="footers"))


def _fetch(origin: RemoteFolder, parts: Sequence[Part]) -> list[bytes]:
    from penstock.cache.base import ObjectRange  # local data need none of it

    found = [b""] * len(parts)
    some = [number for number, (_, start, end) in enumerate(parts) if end > start]
    ranges = [
        ObjectRange(
            path=os.fsdecode(entry.name), start=start, end=end, version=entry.version or None
        )
        for entry, start, end in (parts[number] for number in some)
    ]

    def deliver(number: int, answer: Answer) -> None:
        found[some[number]] = bytes(answer.data)

    origin.remote.fetcher.fetch(ranges, deliver)
    return found


def _read(root: bytes, part: Part) -> bytes:
    entry, start, end = part
    path = os.path.join(root, entry.name)
    fd = open_file(path, entry.name)
    try:
        data = os.pread(fd, end - start, start)
    except OSError as error:
        raise unreadable_file_error(path, error) from error
    finally:
        os.close(fd)
    if len(data) != end - start:
        raise changed_file_error(entry.name, f"it ends before byte {end}")
    return data


# Of a remote file up to this size looking at its head first costs more than it saves.
_SMALL_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A span to be read, and its place in what is returned."""

    field: str
    place: int
    type: FieldType
    file: int
    start: int
    size: int


def read_candidates(
    origin: Origin, candidates: Candidates, positions: NDArray[np.int64]
) -> Contents:
    """Read candidates: of each span field the bytes of each, why one can't be a sample, or None
    where it lacks the field.

    Raises IndexChangedError (a file isn't as it was listed), DatasetError, FetchError.
    """
    contents: Contents = {name: [None] * len(positions) for name in candidates.spans}
    whole: list[_Wanted] = []
    parts: dict[int, list[_Wanted]] = defaultdict(list)
    for wanted in _wanted(candidates, positions):
        size_bytes = candidates.files[wanted.file].size_bytes
        is_whole = wanted.start == 0 and wanted.size == size_bytes
        (whole if is_whole else parts[wanted.file]).append(wanted)
    files = [candidates.files[each.file] for each in whole]
    for each, sample in zip(whole, _read_files(origin, files, whole), strict=True):
        contents[each.field][each.place] = sample
    for number in sorted(parts):
        some = sorted(parts[number], key=lambda each: each.start)
        starts, sizes = [each.start for each in some], [each.size for each in some]
        with open_data_file(origin, candidates.files[number]) as opened:
            found = opened.read(starts, sizes, [each.type for each in some])
        for each, sample in zip(some, found, strict=True):
            contents[each.field][each.place] = sample
    return contents


def _wanted(candidates: Candidates, positions: NDArray[np.int64]) -> Iterator[_Wanted]:
    for name, spans in candidates.spans.items():
        columns = (spans.files, spans.starts, spans.sizes)
        rows = zip(*(column[positions].tolist() for column in columns), strict=True)
        for place, (file, start, size) in enumerate(rows):
            if file != MISSING:
                yield _Wanted(name, place, candidates.schema[name], file, start, size)


def _read_files(
    origin: Origin, files: Sequence[Entry], wanted: Sequence[_Wanted]
) -> list[Encoded | Rejection]:
    """Whole files."""
    types = [each.type for each in wanted]
    if isinstance(origin, RemoteFolder):
        return _read_remote(origin, files, types)
    if isinstance(origin, LocalFolder):
        return [_read_local(origin, file, type) for file, type in zip(files, types, strict=True)]
    raise TypeError(f"unknown origin {origin!r}")


def _read_remote(
    origin: RemoteFolder, files: Sequence[Entry], types: Sequence[FieldType]
) -> list[Encoded | Rejection]:
    """Over many files at once: of large ones the head is looked at first."""
    first = [
        HEAD_BYTES if has_head(type) and file.size_bytes > _SMALL_BYTES else file.size_bytes
        for file, type in zip(files, types, strict=True)
    ]
    samples: list[Encoded | Rejection] = []
    heads = origin.read(list(zip(files, first, strict=True))) if files else []
    for data, type in zip(heads, types, strict=True):
        refusal = refusal_by_head(type, data[:HEAD_BYTES].tobytes()) if has_head(type) else None
        samples.append(data if refusal is None else refusal)
    large = [
        i
        for i, sample in enumerate(samples)
        if not isinstance(sample, Rejection) and first[i] < files[i].size_bytes
    ]
    rest = origin.read([(files[i], files[i].size_bytes) for i in large]) if large else []
    for i, data in zip(large, rest, strict=True):
        samples[i] = data
    return samples


def _read_local(origin: LocalFolder, file: Entry, type: FieldType) -> Encoded | Rejection:
    with LocalFile(origin, file) as opened:
        (sample,) = opened.read([0], [file.size_bytes], [type])
        return sample
