"""Read blobs that aren't cached, directly from upstream into new memory."""

from __future__ import annotations

import mmap
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache.base import ABSENT, ObjectRange, absent_bytes
from penstock.cache.blobs.blob_requests import BlobRequest, object_changed
from penstock.cache.blobs.upstream import BlobRange
from penstock.cache.disk import Segments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import Answer, BlobSource, BlobSpans, TrafficMeter
    from penstock.cache.blobs.blob_requests import Requester

    Spans = Sequence[tuple[int, int]]
    Bytes = NDArray[np.uint8]

_MAP_NORESERVE = 0x4000  # Linux; Python's module names it from 3.12 on


class PassingBlob:
    """A blob that isn't cached. fetch: fetches spans into its buffer."""

    is_cached = False
    is_whole = False
    path: bytes | None = None

    def __init__(self, source: BlobSource, fetch: Callable[[PassingBlob, Spans], None]) -> None:
        self.source = source
        self.version: str | None = None  # of the first answer, if the source names none
        self._fetch = fetch
        self._memory: mmap.mmap | None = None
        self._table: Segments | None = None  # made at first use

    @property
    def segments(self) -> Segments:
        """The table of the objects that hold its bytes."""
        if self._table is None:
            self._table = Segments(self.source.segments)
        return self._table

    def ranges(self, start: int, end: int) -> Iterator[BlobRange]:
        """Divide bytes [start, end) into one range for each object that holds some of them."""
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
        """Return a buffer in which these spans are filled; other pages use no memory."""
        import pyarrow as pa

        if self._memory is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            self._memory = mmap.mmap(-1, self.source.size_bytes, flags=flags)
        self._fetch(self, spans)
        return pa.py_buffer(memoryview(self._memory).toreadonly())

    def put(self, start: int, data: Any) -> None:
        """Write bytes into the buffer."""
        assert self._memory is not None
        view = memoryview(data)
        self._memory[start : start + len(view)] = view

    def address(self) -> int | None:
        """Return None: no file is mapped."""
        return None


class PassingReads:
    """Read passing blobs. range_bytes: of one request at most; meter: counts fetched bytes."""

    def __init__(self, requester: Requester, *, range_bytes: int, meter: TrafficMeter) -> None:
        self._requester, self._meter = requester, meter
        self._range_bytes = range_bytes

    def open(self, source: BlobSource) -> PassingBlob:
        """Open a blob that isn't cached; fetches nothing."""
        return PassingBlob(source, self._fill_buffer)

    def requests(
        self, blob: PassingBlob, starts: Sequence[int], ends: Sequence[int]
    ) -> tuple[list[Bytes], list[BlobRequest]]:
        """Return arrays, and the requests that fill them when they are sent."""
        found: list[Bytes] = [np.empty(0, np.uint8)] * len(starts)
        requests: list[BlobRequest] = []
        for place, (start, end) in enumerate(zip(starts, ends, strict=True)):
            ranges = self._ranges(blob, start, end)
            if len(ranges) == 1:
                (one,) = ranges
                requests.append(BlobRequest(one, self._take_one(blob, one, found, place)))
            elif ranges:  # over several objects, or a large one
                array = np.empty(end - start, np.uint8)
                found[place] = array.view()
                found[place].flags.writeable = False
                requests += [
                    BlobRequest(one, self._take_some(blob, one, array, one.start - start))
                    for one in ranges
                ]
        return found, requests

    def read(self, wanted: Sequence[BlobSpans]) -> list[list[Bytes]]:
        """Read the bytes of all spans without the cache. Raises FetchError."""
        found: list[list[Bytes]] = []
        requests: list[BlobRequest] = []
        for want in wanted:
            arrays, more = self.requests(self.open(want.blob.source), want.starts, want.ends)
            found.append(arrays)
            requests += more
        self._requester.send(requests)
        return found

    def _ranges(self, blob: PassingBlob, start: int, end: int) -> list[BlobRange]:
        """Cut bytes [start, end) into ranges of at most range_bytes."""
        count = max(1, -(-(end - start) // self._range_bytes))
        cuts = pairwise(start + (end - start) * i // count for i in range(count + 1))
        return [one for low, high in cuts for one in blob.ranges(low, high)]

    def _fill_buffer(self, blob: PassingBlob, spans: Sequence[tuple[int, int]]) -> None:
        """Fetch spans into a blob's buffer."""
        self._requester.send(
            [
                BlobRequest(one, self._take_buffer(blob, one))
                for start, end in spans
                for one in self._ranges(blob, start, end)
            ]
        )

    def _take_one(
        self, blob: PassingBlob, wanted: BlobRange, found: list[Bytes], place: int
    ) -> Callable[[Answer], None]:
        def take(answer: Answer) -> None:
            sample = np.frombuffer(self._checked(blob, wanted, answer), np.uint8)
            sample.flags.writeable = False
            found[place] = sample

        return take

    def _take_some(
        self, blob: PassingBlob, wanted: BlobRange, array: Bytes, at: int
    ) -> Callable[[Answer], None]:
        def take(answer: Answer) -> None:
            data = np.frombuffer(self._checked(blob, wanted, answer), np.uint8)
            array[at : at + len(data)] = data

        return take

    def _take_buffer(self, blob: PassingBlob, wanted: BlobRange) -> Callable[[Answer], None]:
        def take(answer: Answer) -> None:
            blob.put(wanted.start, self._checked(blob, wanted, answer))

        return take

    def _checked(self, blob: PassingBlob, wanted: BlobRange, answer: Answer) -> Any:
        """Return the bytes of an answer. Raises ObjectChangedError if they are another object's."""
        if answer is ABSENT:
            return absent_bytes(wanted.start, wanted.end)
        version, same = answer.version, True
        if blob.segments.is_of_one_object:
            if blob.version is None and version:
                blob.version = version
            same = not version or version == blob.version
        if not same or answer.object_bytes != wanted.segment.whole_bytes:
            blob.version = None
            raise object_changed(blob.source, wanted.segment)
        self._meter.add(bytes_passed=len(memoryview(answer.data)))
        return answer.data
