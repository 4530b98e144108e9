"""A blob that isn't kept: its bytes come from upstream each time. It fetches nothing itself."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

from penstock.cache.base.segments import Segments
from penstock.cache.blobs.upstream import BlobRange
from penstock.cache.fetch.object_range import ObjectRange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.cache.base.blob import BlobSource

    Spans = Sequence[tuple[int, int]]

_MAP_NORESERVE = 0x4000  # Linux; Python's module names it from 3.12 on


class PassingBlob:
    """A passing blob is kept nowhere. fetch: brings spans into its buffer."""

    is_cached = False
    is_whole = False
    path: bytes | None = None

    def __init__(self, source: BlobSource, fetch: Callable[[PassingBlob, Spans], None]) -> None:
        self.source = source
        self.version: str | None = None  # of the first answer, where the source doesn't say
        self._fetch = fetch
        self._memory: mmap.mmap | None = None
        self._table: Segments | None = None  # once it is asked for

    @property
    def segments(self) -> Segments:
        """Where its bytes lie."""
        if self._table is None:
            self._table = Segments(self.source.segments)
        return self._table

    def ranges(self, start: int, end: int) -> Iterator[BlobRange]:
        """Divide bytes [start, end): a range for each object that holds some of them."""
        table = self.segments
        agreed = self.version if table.is_of_one_object else None
        for segment, at, first, last in table.stretches(start, end):
            stored = ObjectRange(
                path=segment.path,
                start=at,
                end=at + last - first,
                version=segment.version or agreed,
                may_lack=segment.may_lack,
            )
            yield BlobRange(blob=self.source, segment=segment, start=first, end=last, stored=stored)

    def buffer(self, spans: Spans) -> Any:
        """A buffer in memory with these spans filled; pages that nobody asked for take none."""
        import pyarrow as pa

        if self._memory is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            self._memory = mmap.mmap(-1, self.source.size_bytes, flags=flags)
        self._fetch(self, spans)
        return pa.py_buffer(memoryview(self._memory).toreadonly())

    def put(self, start: int, data: Any) -> None:
        """Put bytes into the buffer."""
        assert self._memory is not None
        view = memoryview(data)
        self._memory[start : start + len(view)] = view

    def address(self) -> int | None:
        """Always None: nothing is mapped from a file."""
        return None
