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

import os
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from penstock.cache import ordered
from penstock.cache.base import BlobSpans
from penstock.readers.byte_source import (
    changed_file_error,
    open_file,
    read_up_to,
    unreadable_file_error,
)
from penstock.readers.fieldtypes import HEAD_BYTES, has_head, refusal_by_head
from penstock.readers.formats.candidates import MISSING
from penstock.readers.origin import LocalFolder, RemoteFolder
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from numpy.typing import NDArray

    from penstock.cache.base import Answer
    from penstock.readers.fieldtypes import FieldType
    from penstock.readers.formats.candidates import Candidates
    from penstock.readers.origin import Entry, Origin
    from penstock.readers.types import Encoded

    Part = tuple[Entry, int, int]
    Contents = dict[str, list[Encoded | Rejection | None]]

_WINDOW_BYTES = 8 * 2**20


class DataFile(Protocol):
    """An open file of a dataset; a context manager. Raises IndexChangedError, DatasetError or
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
        """Read bytes of the file, fewer if the file ends. Raises ValueError for bytes before its
        beginning, which a damaged file may name."""

    def read(
        self, starts: Sequence[int], sizes: Sequence[int], types: Sequence[FieldType]
    ) -> list[Encoded | Rejection]:
        """Read spans that may be samples of these types. A Rejection replaces a span whose first
        bytes rule it out."""


def open_data_file(origin: Origin, entry: Entry, *, whole: bool = False) -> DataFile:
    """Open a file. whole: True if all of it will be read, so that a remote file is fetched as a
    whole."""
    if isinstance(origin, LocalFolder):
        return LocalFile(origin, entry)
    if isinstance(origin, RemoteFolder):
        return RemoteFile(origin, entry, whole=whole)
    raise TypeError(f"unknown origin {origin!r}")


class LocalFile:
    """A local file, open for reading at offsets; a context manager.

    The file isn't mapped, because it may be changing. Its size and time are compared with the
    listing when it is opened and closed. Raises IndexChangedError if they differ, and DatasetError.
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
        """Read bytes of the file, fewer if the file ends."""
        count = min(size_bytes, max(0, self._entry.size_bytes - offset))
        if offset < 0 or count < 0:
            raise ValueError(f"it names {size_bytes} bytes at byte {offset}")
        try:
            return os.pread(self._fd, count, offset)
        except OSError as error:
            raise unreadable_file_error(self._path, error) from error

    def read(
        self, starts: Sequence[int], sizes: Sequence[int], types: Sequence[FieldType]
    ) -> list[Encoded | Rejection]:
        """Read spans. A large file of another type is rejected without reading all of it."""
        samples: list[Encoded | Rejection] = []
        for start, size_bytes, type in zip(starts, sizes, types, strict=True):
            if has_head(type):
                head = self.read_at(start, min(HEAD_BYTES, size_bytes))
                if (refusal := refusal_by_head(type, head)) is not None:
                    samples.append(refusal)
                    continue
            data = np.empty(size_bytes, np.uint8)
            try:
                got = read_up_to(self._fd, data, start)
            except OSError as error:
                raise unreadable_file_error(self._path, error) from error
            if got < size_bytes:
                end = start + size_bytes
                raise changed_file_error(self._entry.name, f"it ends before byte {end}")
            data.flags.writeable = False
            samples.append(data)
        return samples

    def _check(self) -> None:
        listed = self._entry
        try:
            found = os.fstat(self._fd)
        except OSError as error:
            raise unreadable_file_error(self._path, error) from error
        if found.st_size != listed.size_bytes:
            raise changed_file_error(
                listed.name, f"it had {listed.size_bytes} bytes, now {found.st_size}"
            )
        if listed.mtime_ns and found.st_mtime_ns != listed.mtime_ns:
            raise changed_file_error(listed.name, "it was modified while it was read")


class RemoteFile:
    """A file of a remote store that is a shard. Raises FetchError if it changes while it is
    read."""

    def __init__(self, origin: RemoteFolder, entry: Entry, *, whole: bool) -> None:
        source = origin.archive(entry)
        self._size_bytes = entry.size_bytes
        self._remote = origin.remote
        if whole and self._size_bytes:
            # The samples have no checksums yet, so the copy's block checksums are compared.
            self._remote.check(source)
            self._remote.fill(source)  # if the cache has no room, windows are read
        self._blob = self._remote.open(source)
        self._start, self._window = 0, memoryview(b"")

    def __enter__(self) -> RemoteFile:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: the file holds no resources."""

    def read_at(self, offset: int, size_bytes: int) -> bytes:
        """Read bytes of the object, fewer if the object ends."""
        end = min(offset + size_bytes, self._size_bytes)
        if offset < 0 or size_bytes < 0:
            raise ValueError(f"it names {size_bytes} bytes at byte {offset}")
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
        """Fetch spans, all in parallel."""
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


_MAX_REQUESTS = 4096


def read_file_parts(origin: Origin, parts: Sequence[Part], *, workers: int) -> list[bytes]:
    """Read bytes [start, end) of files as they were listed.

    Remote parts take one request each and aren't kept; local parts are read on `workers` threads.
    Raises IndexChangedError if a file ends before its part does, DatasetError or FetchError.
    """
    if isinstance(origin, RemoteFolder):
        found: list[bytes] = []
        for first in range(0, len(parts), _MAX_REQUESTS):
            found += _fetch(origin, parts[first : first + _MAX_REQUESTS])
        return found
    if not isinstance(origin, LocalFolder):
        raise TypeError(f"unknown origin {origin!r}")
    read = partial(_read, origin)
    if len(parts) == 1 or workers == 1:
        return [read(part) for part in parts]
    return list(ordered(read, parts, workers=workers, ahead=4 * workers, name="footers"))


def _fetch(origin: RemoteFolder, parts: Sequence[Part]) -> list[bytes]:
    from penstock.cache.base import ObjectRange  # not needed for local data

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


def _read(origin: LocalFolder, part: Part) -> bytes:
    entry, start, end = part
    with LocalFile(origin, entry) as opened:
        data = opened.read_at(start, end - start)
    if len(data) != end - start:
        raise changed_file_error(entry.name, f"it ends before byte {end}")
    return data


# For a remote file up to this size, fetching its head first costs more than it saves.
_SMALL_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A span to read, and its place in the result."""

    field: str
    place: int
    type: FieldType
    file: int
    start: int
    size: int


def read_candidates(
    origin: Origin, candidates: Candidates, positions: NDArray[np.int64]
) -> Contents:
    """Read candidates: for each span field the bytes of each candidate, a Rejection if they can't
    be a sample, or None if the candidate lacks the field.

    Raises IndexChangedError if a file differs from the listing, DatasetError or FetchError.
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
    """Read whole files."""
    types = [each.type for each in wanted]
    if isinstance(origin, RemoteFolder):
        return _read_remote(origin, files, types)
    if isinstance(origin, LocalFolder):
        samples: list[Encoded | Rejection] = []
        for file, type in zip(files, types, strict=True):
            with LocalFile(origin, file) as opened:
                samples += opened.read([0], [file.size_bytes], [type])
        return samples
    raise TypeError(f"unknown origin {origin!r}")


def _read_remote(
    origin: RemoteFolder, files: Sequence[Entry], types: Sequence[FieldType]
) -> list[Encoded | Rejection]:
    """Fetch whole files in parallel; of large files the head is checked first."""
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
