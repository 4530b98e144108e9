"""Define an upstream: where bytes of blobs come from that aren't on the local disk.

An upstream fetches ranges of blobs, which it knows by their keys. `StoreUpstream` is the one of a
dataset without peers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from penstock.cache.base import Answer, BlobSource, ObjectRange, Segment
    from penstock.cache.fetch import Fetcher


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobRange:
    """A blob range is bytes [start, end) of a blob, all of one object.

    blob.key says which blob, whoever is asked. segment: the first that they lie in. stored: the
    same bytes as the store knows them, with the version that they must be of. keep(start, data,
    crc): may be given the bytes as they come, each once that its CRC-32C is right, where it begins
    in the blob; the answer is then `Kept`. Without all of them it counts for nothing.
    """

    blob: BlobSource
    segment: Segment
    start: int
    end: int
    stored: ObjectRange
    keep: Callable[[int, memoryview, int], None] | None = None


class Upstream(Protocol):
    """Fetches ranges of blobs for the cache. Safe for several threads.

    A batch needs ranges of many blobs at once, so each range names its blob. range_bytes: how much
    is asked for best at a time. timeout_s: so long a range may take until it has failed.
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
        """Fetch ranges; returns when all are delivered.

        deliver(number, answer): called once for each range (number: its place in `ranges`), on any
        thread, in any order and several at a time; never any more when this returns or raises. Its
        exception stops the rest and is raised here. The answer's bytes are of the version
        that the range says, if it says one. Its object_bytes are the size of the segment's object,
        its version is that object's, or "" where only the blob's key says what it is.
        urgent: False for a fill in the background.

        Raises FetchError and ObjectChangedError, each with the uri of the object; ClosedError,
        StalledError.
        """

    def reserve_fills(self, key: str, most: int) -> AbstractContextManager[int]:
        """Grant ranges of a blob that aren't urgent: as many as may be asked for now, of the `most`
        that the caller needs; the room is the caller's inside."""

    def let_fills(self, room: Callable[[int, int], int]) -> None:
        """Set how many connections fills may use while batches fetch too: room(now, most)."""

    def request_time(self) -> tuple[float, float]:
        """Seconds of recent requests, mean and 99th percentile; (0.0, 0.0) before the first."""

    def uri(self, path: str) -> str:
        """Name an object as the errors of `fetch` do. path: of a segment."""

    def is_near(self, key: str) -> bool:
        """Whether a blob is known to lie nearer than the store, all of it."""

    def is_left_to_others(self, key: str) -> bool:
        """Whether the fill of a blob shall wait for a while, as it can come cheaper then."""

    def doubt(self, key: str) -> None:
        """Note that bytes of a blob were wrong: whoever isn't its origin isn't asked for it."""

    def close(self) -> None:
        """End threads of its own. Safe to call twice."""


class StoreUpstream:
    """Asks the store for every range, through a fetcher."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    @property
    def range_bytes(self) -> int:
        """How many bytes are best asked for at a time."""
        return self._fetcher.policy.range_bytes

    @property
    def timeout_s(self) -> float:
        """How long a range may take until it has failed."""
        return self._fetcher.policy.retry_timeout_s

    def fetch(
        self,
        ranges: Sequence[BlobRange],
        deliver: Callable[[int, Answer], None],
        *,
        urgent: bool = True,
    ) -> None:
        """Fetch ranges from the store, as `Upstream.fetch` says."""
        self._fetcher.fetch([one.stored for one in ranges], deliver, urgent=urgent)

    def reserve_fills(self, key: str, most: int) -> AbstractContextManager[int]:
        """Grant ranges that aren't urgent, as `Upstream.reserve_fills` says."""
        del key
        return self._fetcher.reserve_fills(most)

    def let_fills(self, room: Callable[[int, int], int]) -> None:
        """Set the connections of fills beside batches, as `Upstream.let_fills` says."""
        fetcher = self._fetcher
        most = fetcher.policy.max_connections
        fetcher.fills_beside_urgent = room(fetcher.fills_beside_urgent, most)

    def request_time(self) -> tuple[float, float]:
        """Seconds of recent requests, mean and 99th percentile."""
        return self._fetcher.request_time()

    def uri(self, path: str) -> str:
        """Name an object as the errors of `fetch` do."""
        return self._fetcher.uri(path)

    def is_near(self, key: str) -> bool:
        """Never: all is the store's."""
        del key
        return False

    def is_left_to_others(self, key: str) -> bool:
        """Never: it costs the same at any time."""
        del key
        return False

    def doubt(self, key: str) -> None:
        """The store is the origin of all."""

    def close(self) -> None:
        """The fetcher is its owner's to close."""
