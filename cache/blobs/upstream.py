"""Request the bytes of blobs that aren't on the local disk from an upstream.

An upstream fetches ranges of blobs, which it identifies by their keys. `Upstream` itself fetches
them from the store; `cache.peers.PeerUpstream` asks other nodes first.

If several readers need a piece, one fetches it and the others wait. If that fetch fails, it has
used the entire time limit of a range, and the others would use it again, one after another. So they
fail with the same error.

An object that is replaced while its blob is read is an error; bytes of two versions are never
mixed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cache.base import Answer, BlobSource, Deliver, ObjectRange, Segment
from penstock.cache.errors import FetchError, ObjectChangedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from penstock.cache.disk import PieceSpan
    from penstock.cache.fetch import Fetcher


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobRange:
    """Bytes [start, end) of a blob, all of one object.

    blob: the blob, whose key identifies it for every source. segment: the first segment that holds
    the bytes. at: their first byte in the segment's object. version: the version that the object
    must have if its segment names none. keep(start, data, crc): receives the bytes as they arrive,
    with their offset in the blob and their checked CRC-32C; the answer then has `passed_bytes`.
    Bytes of an incomplete range don't count.
    """

    blob: BlobSource
    segment: Segment
    at: int
    start: int
    end: int
    version: str | None = None
    keep: Callable[[int, memoryview, int], None] | None = None

    @property
    def stored(self) -> ObjectRange:
        """The same bytes as a range of the store's object, with the required version."""
        end, version = self.at + self.end - self.start, self.segment.version or self.version
        return ObjectRange(path=self.segment.path, start=self.at, end=end, version=version)


_REMEMBERED = 256


class FillFailures:
    """The recent failed fetches of this process. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # (time of the failure, key of the blob, its pieces, error)
        self._recent: deque[tuple[float, str, PieceSpan, FetchError]] = deque(maxlen=_REMEMBERED)

    def note(self, places: Iterable[tuple[str, PieceSpan]], error: FetchError) -> None:
        """Record the pieces (key of their blob, pieces) of a failed fetch."""
        now_s = time.monotonic()
        with self._lock:
            self._recent += [(now_s, key, run, error) for key, run in places]

    def since(
        self, began_s: float, wanted: Iterable[tuple[str, list[PieceSpan]]]
    ) -> FetchError | None:
        """Return the error of a fetch of some of these pieces that failed since `began_s`, or
        None."""
        with self._lock:
            recent = [failure for failure in self._recent if failure[0] >= began_s]
        if not recent:
            return None
        for key, runs in wanted:
            for _, failed_key, (low, high), error in recent:
                if failed_key == key and any(low < end and high > at for at, end in runs):
                    # A copy: one exception raised by several threads would mix their tracebacks.
                    return type(error)(str(error), uri=error.uri, missing=error.missing)
        return None


def object_changed(source: BlobSource, segment: Segment, *, reindex: str) -> ObjectChangedError:
    """Return the error for a blob whose object isn't the indexed one. segment: of that object.
    reindex: see `Fetcher.reindex`."""
    is_blob = segment.object_bytes is None and len(source.segments) == 1
    shown = source.uri if is_blob else f"{source.uri} ({segment.path})"
    return ObjectChangedError(
        f"{shown}: the object was replaced while it was being read, or isn't the one that was "
        "indexed. No versions were mixed. Run the job again; if that doesn't help, run "
        f"`{reindex}` (or upload the pack) again. Don't write to a dataset while jobs read it.",
        uri=source.uri,
    )


@dataclass(frozen=True, slots=True)
class BlobRequest:
    """A range to fetch, and the function that receives its answer.

    pieces: the pieces of the fill to which the range belongs; None for an uncached blob.
    """

    range: BlobRange
    receive: Callable[[Answer], None]
    pieces: PieceSpan | None = None


class Upstream:
    """The source of ranges of blobs for the cache: the store. Safe for several threads.

    A batch needs ranges of many blobs at once, so each range names its blob. range_bytes: the best
    size of a request. meter: of the fetcher. timeout_s: seconds after which the fetch of a range
    has failed. failures: the pieces of failed fetches. The fetcher's owner closes it.
    """

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher, self.meter = fetcher, fetcher.meter
        self.failures, self._lock = FillFailures(), threading.Lock()
        self._in_flight: dict[str, list[PieceSpan]] = {}  # pieces, by the key of their blob
        self.range_bytes = fetcher.policy.range_bytes
        self.timeout_s = fetcher.policy.retry_timeout_s

    @property
    def reindex(self) -> str:
        """The command that builds the dataset's index again, for errors."""
        return self._fetcher.reindex

    def fetch(self, ranges: Sequence[BlobRange], deliver: Deliver, *, urgent: bool = True) -> None:
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
        self._fetcher.fetch([one.stored for one in ranges], deliver, urgent=urgent)

    def reserve_fills(self, key: str, most: int) -> AbstractContextManager[int]:
        """Reserve connections for ranges of a blob that aren't urgent: yield how many may be used
        now, at most `most`; they are released at the end of the context."""
        return self._fetcher.reserve_fills(most)

    def limit_fills(self, room: Callable[[int, int], int]) -> None:
        """Set how many connections fills may use while batches fetch, too: room(now, most), by the
        current number and the limit."""
        self._fetcher.limit_fills(room)

    def request_time(self) -> tuple[float, float]:
        """Return the seconds of recent requests: mean and 99th percentile; zeros before the
        first."""
        return self._fetcher.request_time()

    def uri(self, path: str) -> str:
        """Return an object's name in the errors of `fetch`. path: of a segment."""
        return self._fetcher.uri(path)

    def is_near(self, key: str) -> bool:
        """Return True if a source nearer than the store is known to have the whole blob."""
        return False

    def is_left_to_others(self, key: str) -> bool:
        """Return True if the fill of a blob should wait until a nearer source has it."""
        return False

    def mark_wrong(self, key: str) -> None:
        """Record that bytes of a blob were wrong, so that it is fetched only from its origin."""

    def close(self) -> None:
        """End the upstream's own threads. Safe to call twice."""

    # -- the requests of this process

    def is_fetching(self, source: BlobSource, pieces: PieceSpan) -> bool:
        """Return True if this process is fetching some of these pieces."""
        with self._lock:
            in_flight = self._in_flight.get(source.key, ())
            return any(low < pieces[1] and pieces[0] < high for low, high in in_flight)

    def send(self, requests: Sequence[BlobRequest], *, urgent: bool = True) -> None:
        """Fetch all ranges; return when each answer is processed. urgent: False for a background
        fill. Raises as `fetch` does."""
        if not requests:
            return
        of_fills = [(request, request.pieces) for request in requests if request.pieces is not None]
        with self._lock:
            for request, pieces in of_fills:
                self._in_flight.setdefault(request.range.blob.key, []).append(pieces)
        try:
            self.fetch(
                [request.range for request in requests],
                lambda number, answer: requests[number].receive(answer),
                urgent=urgent,
            )
        except FetchError as error:
            failed = [
                (request.range.blob.key, pieces)
                for request, pieces in of_fills
                if self.uri(request.range.stored.path) == error.uri
            ]
            self.failures.note(failed, error)
            raise
        finally:
            with self._lock:
                for request, pieces in of_fills:
                    in_flight = self._in_flight[request.range.blob.key]
                    in_flight.remove(pieces)
                    if not in_flight:
                        del self._in_flight[request.range.blob.key]
