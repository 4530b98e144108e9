"""Parts of many files of a dataset, read at once: footers and heads, before there is an index."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from penstock.cache.threads import ordered
from penstock.readers.formats.local_files import changed, open_file, unreadable
from penstock.readers.origin.local import LocalFolder
from penstock.readers.origin.remote import RemoteFolder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.cache.base.store import Answer
    from penstock.readers.origin.origin import Entry, Origin

    Part = tuple[Entry, int, int]

_AT_ONCE = 4096


def read_parts(origin: Origin, parts: Sequence[Part], *, workers: int) -> list[bytes]:
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
    from penstock.cache.fetch.object_range import ObjectRange  # local data need none of it

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
        raise unreadable(path, error) from error
    finally:
        os.close(fd)
    if len(data) != end - start:
        raise changed(entry.name, f"it ends before byte {end}")
    return data
