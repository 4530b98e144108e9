"""Define an upstream: the source of blob bytes that aren't on the local disk.

An upstream fetches ranges of blobs, which it identifies by their keys. A dataset without peers uses
`StoreUpstream`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.cache.base import ObjectRange

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from penstock.cache.base import Answer, BlobSource, Segment
    from penstock.cache.disk import Stretch
    from penstock.cache.fetch import Fetcher


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobRange:
    """Bytes [start, end) of a blob, all of one object.

    blob: the blob, whose key identifies it for every source. segment: the first segment that holds
    the bytes. stored: the same bytes as a range of the store's object, with the required version.
    keep(start, data, crc): receives the bytes as they arrive, with their offset in the blob and
    their checked CRC-32C; the answer is then a `StreamedAnswer`. Bytes of an incomplete range don't
    count.
    """

    blob: BlobSource
    segment: Segment
    start: int
    end: int
    stored: ObjectRange
    keep: Callable[[int, memoryview, int], None] | None = None

    @classmethod
    def of_stretch(
        cls,
        blob: BlobSource,
        stretch: Stretch,
        *,
        version: str | None,
        keep: Callable[[int, memoryview, int], None] | None = None,
    ) -> BlobRange:
        """Return the range of a stretch. version: the version that the object must have if its
        segment names none."""
        segment, at, start, end = stretch
        stored = ObjectRange(
            path=segment.path, start=at, end=at + end - start, version=segment.version or version
        )
        return cls(blob=blob, segment=segment, start=start, end=end, stored=stored, keep=keep)


class Upstream(Protocol):
    """A source of ranges of blobs for the cache. Safe for several threads.

    A batch needs ranges of many blobs at once, so each range names its blob. range_bytes: the best
    size of a request. timeout_s: seconds after which the fetch of a range has failed.
    """

    @property
    def range_bytes(self) -> int: ...

    @property
    def timeout_s(self) -> float: ...

    def fetch(
        self,
        ranges: Sequence[BlobRange],
        deliver: Callable[[int, Answer], None],
        *,
        urgent: bool = True,
    ) -> None:
        """Fetch ranges; return when all are delivered.

        deliver(number, answer): called once for each range (number: its index in `ranges`), on any
        thread, in any order and concurrently, but never after this method returns or raises. Its
        exception stops the fetch and is raised again. The answer's bytes have the range's version,
        if it names one. The answer's object_bytes is the size of the segment's object; its version
        is that object's, or "" if only the blob's key identifies it. urgent: False for a background
        fill.

        Raises FetchError and ObjectChangedError, each with the uri of the object; ClosedError,
        StalledError.
        """

    def reserve_fills(self, key: str, most: int) -> AbstractContextManager[int]:
        """Reserve connections for ranges of a blob that aren't urgent: yield how many may be used
        now, at most `most`; they are released at the end of the context."""

    def limit_fills(self, room: Callable[[int, int], int]) -> None:
        """Set how many connections fills may use while batches fetch, too: room(now, most), by the
        current number and the limit."""

    def request_time(self) -> tuple[float, float]:
        """Return the seconds of recent requests: mean and 99th percentile; zeros before the
        first."""

    def uri(self, path: str) -> str:
        """Return an object's name in the errors of `fetch`. path: of a segment."""

    def is_near(self, key: str) -> bool:
        """Return True if a source nearer than the store is known to have the whole blob."""

    def is_left_to_others(self, key: str) -> bool:
        """Return True if the fill of a blob should wait until a nearer source has it."""

    def mark_wrong(self, key: str) -> None:
        """Record that bytes of a blob were wrong, so that it is fetched only from its origin."""

    def close(self) -> None:
        """End the upstream's threads. Safe to call twice."""


class StoreUpstream:
    """The upstream that fetches every range from the store."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    @property
    def range_bytes(self) -> int:
        """The best size of a request."""
        return self._fetcher.policy.range_bytes

    @property
    def timeout_s(self) -> float:
        """Seconds after which the fetch of a range has failed."""
        return self._fetcher.policy.retry_timeout_s

    def fetch(
        self,
        ranges: Sequence[BlobRange],
        deliver: Callable[[int, Answer], None],
        *,
        urgent: bool = True,
    ) -> None:
        """Fetch ranges from the store; see `Upstream.fetch`."""
        self._fetcher.fetch([one.stored for one in ranges], deliver, urgent=urgent)

    def reserve_fills(self, key: str, most: int) -> AbstractContextManager[int]:
        """Reserve connections for fills; see `Upstream.reserve_fills`."""
        del key
        return self._fetcher.reserve_fills(most)

    def limit_fills(self, room: Callable[[int, int], int]) -> None:
        """Set the connections of fills; see `Upstream.limit_fills`."""
        fetcher = self._fetcher
        most = fetcher.policy.max_connections
        fetcher.fills_beside_urgent = room(fetcher.fills_beside_urgent, most)

    def request_time(self) -> tuple[float, float]:
        """Return the seconds of recent requests: mean and 99th percentile."""
        return self._fetcher.request_time()

    def uri(self, path: str) -> str:
        """Return an object's name in the errors of `fetch`."""
        return self._fetcher.uri(path)

    def is_near(self, key: str) -> bool:
        """Return False: there is only the store."""
        del key
        return False

    def is_left_to_others(self, key: str) -> bool:
        """Return False: a fetch from the store costs the same at any time."""
        del key
        return False

    def mark_wrong(self, key: str) -> None:
        """Do nothing: the store is the origin of all blobs."""

    def close(self) -> None:
        """Do nothing: the fetcher's owner closes it."""
