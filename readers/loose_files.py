"""Read the bytes of shards that lie in parts of files, or in several files, of a local folder.

These files are opened each time that they are read. Shards that are one file are mapped instead
(`local_place`).
"""

from __future__ import annotations

import os
from bisect import bisect_right
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from penstock.readers.byte_source import NO_BYTES, ByteSource, FileSpan, LocalFile
from penstock.readers.files import below, printable
from penstock.readers.types import offsets_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.cache.base import ReadMode
    from penstock.readers.byte_source import Room, SourceSpans, Unread
    from penstock.readers.types import Encoded, Ints

# A process may have 65,530 maps, and a dataset has 1,024 open shards. If a shard has many small
# files, none is mapped, because reading them costs less.
_MOST_MAPPED, _LEAST_BYTES = 4, 16 * 2**20

_BYTES = np.dtype(np.uint8)


class LooseFiles(ByteSource):
    """The bytes of a shard in files that are opened each time that they are read. It holds no file
    descriptor. Parts of them are mapped when they are viewed, unless that costs more than
    reading."""

    is_mapped = False

    def __init__(
        self, root: bytes, names: Sequence[bytes], sizes: Ints, used: tuple[Ints, Ints] | None
    ) -> None:
        """used: bytes [start, end) outside of which files aren't mapped; links that lead out of
        root are refused then."""
        self._folder, self._root = os.path.join(root, b""), root
        self._names = names
        self.shown = printable(self._folder + names[0]) if len(names) == 1 else printable(root)
        self._bounds = offsets_of(sizes)
        # Indexing a memoryview returns plain integers, and takes 8 bytes for each.
        self._starts = memoryview(self._bounds)  # type: ignore[arg-type]
        self.size_bytes = self._starts[-1]
        self.may_map = len(names) <= _MOST_MAPPED or self.size_bytes >= _LEAST_BYTES
        # Checked once per file, as it costs as much as a read.
        self._is_below = bytearray([used is None]) * len(names)
        self._used = used
        self._maps: dict[int, tuple[int, Encoded] | None] = {}

    def _find(self, start: int) -> int:
        """Return the number of the file in which a byte lies."""
        return bisect_right(self._starts, start, 0, len(self._names)) - 1

    def _path(self, file: int) -> bytes:
        name = self._names[file]
        if self._is_below[file]:
            return self._folder + name
        path = below(self._root, name)
        self._is_below[file] = True
        return path

    def _file(self, file: int) -> LocalFile:
        size_bytes = self._starts[file + 1] - self._starts[file]
        return LocalFile(self._path(file), self._names[file], size_bytes)

    # -- reading

    def load(self, wanted: Sequence[SourceSpans], mode: ReadMode) -> list[list[Unread]]:
        """Return unread spans of files."""
        return [
            [each.source._span(*span) for span in zip(each.starts, each.ends, strict=True)]  # type: ignore[attr-defined]
            for each in wanted
        ]

    def _span(self, start: int, end: int) -> FileSpan:
        file = self._find(start)
        begin, is_rest = self._starts[file], end == self._starts[file + 1]
        return FileSpan(self._path(file), self._names[file], start - begin, end - start, is_rest)

    def fill(self, starts: Sequence[int], slots: Sequence[Encoded], mode: ReadMode) -> None:
        """Read bytes past any map; each file is opened once."""
        order = sorted(range(len(slots)), key=starts.__getitem__)
        for file, places in _runs(order, [self._find(start) for start in starts]):
            opened, begin = self._file(file), self._starts[file]
            fd = opened.open()
            try:
                for place in places:
                    opened.fill(fd, starts[place] - begin, slots[place])
            finally:
                os.close(fd)

    def read_parts(self, starts: Ints, ends: Ints, room: Room, mode: ReadMode) -> list[Encoded]:
        """Read parts of files, neighbours and overlapping parts by one call."""
        lows: list[int] = starts.tolist()
        highs: list[int] = ends.tolist()
        found: list[Encoded] = [NO_BYTES] * len(lows)
        if len(lows) == 1:
            order, files = [0], [self._find(lows[0])]
        else:
            order = np.argsort(starts, kind="stable").tolist()
            files = np.searchsorted(self._bounds[1:-1], starts, side="right").tolist()
        for file, places in _runs(order, files):
            opened, begin = self._file(file), self._starts[file]
            fd = opened.open()
            try:
                at = 0
                while at < len(places):
                    first, end = at, highs[places[at]]
                    at += 1
                    while at < len(places) and lows[places[at]] <= end:
                        end = max(end, highs[places[at]])
                        at += 1
                    low = lows[places[first]]
                    data = room((end - low,), _BYTES)
                    opened.fill(fd, low - begin, data)
                    data.flags.writeable = False
                    for place in places[first:at]:
                        found[place] = data[lows[place] - low : highs[place] - low]
            finally:
                os.close(fd)
        return found

    # -- maps

    def view(self, start: int, end: int, *, touched_bytes: int) -> Encoded | None:
        """Return a view of a mapped part of a file."""
        file = self._find(start)
        if file not in self._maps:  # if two threads map it, one of the maps is dropped
            self._maps[file] = self._map_used(file)
        mapped = self._maps[file]
        if mapped is None:
            return None
        begin, data = mapped
        return data[start - begin : end - begin]

    def _map_used(self, file: int) -> tuple[int, Encoded] | None:
        """Map the used part of a file; return its first byte with it."""
        assert self._used is not None
        starts, ends = self._used
        mine = (starts >= self._starts[file]) & (ends <= self._starts[file + 1])
        start, end = int(starts[mine].min()), int(ends[mine].max())
        if start == end or (len(self._names) > _MOST_MAPPED and end - start < _LEAST_BYTES):
            return None
        opened, begin = self._file(file), self._starts[file]
        mapped = opened.map(opened.open(), start - begin, end - begin)
        return start, np.frombuffer(mapped, np.uint8)


def _runs(order: Sequence[int], files: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return each file with its places, in order. order: places, those of one file together."""
    return [(file, [*places]) for file, places in groupby(order, files.__getitem__)]
