"""Send requests for ranges of blobs upstream, and share their failures with waiting readers.

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
from typing import TYPE_CHECKING, NamedTuple

from penstock.cache.errors import FetchError, ObjectChangedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.cache.base import Answer, BlobSource, Segment
    from penstock.cache.blobs.upstream import BlobRange, Upstream
    from penstock.cache.disk import PieceSpan

_REMEMBERED = 256


class _FailedFetch(NamedTuple):
    at_s: float
    key: str
    run: PieceSpan
    error: FetchError


class FillFailures:
    """The recent failed fetches of this process. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: deque[_FailedFetch] = deque(maxlen=_REMEMBERED)

    def note(self, places: Iterable[tuple[str, PieceSpan]], error: FetchError) -> None:
        """Record the pieces (key of their blob, pieces) of a failed fetch."""
        now_s = time.monotonic()
        with self._lock:
            self._recent += [_FailedFetch(now_s, key, run, error) for key, run in places]

    def since(
        self, began_s: float, wanted: Iterable[tuple[str, list[PieceSpan]]]
    ) -> FetchError | None:
        """Return the error of a fetch of some of these pieces that failed since `began_s`, or
        None."""
        with self._lock:
            recent = [each for each in self._recent if each.at_s >= began_s]
        if not recent:
            return None
        for key, runs in wanted:
            for failure in recent:
                low, high = failure.run
                if failure.key == key and any(low < end and high > at for at, end in runs):
                    error = failure.error
                    # A copy: one exception raised by several threads would mix their tracebacks.
                    return type(error)(str(error), uri=error.uri, missing=error.missing)
        return None


def object_changed(source: BlobSource, segment: Segment) -> ObjectChangedError:
    """Return the error for a blob whose object isn't the indexed one. segment: of that object."""
    is_blob = segment.object_bytes is None and len(source.segments) == 1
    shown = source.uri if is_blob else f"{source.uri} ({segment.path})"
    return ObjectChangedError(
        f"{shown}: the object was replaced while it was being read, or isn't the one that was "
        "indexed. No versions were mixed. Run the job again, and don't write to a dataset while "
        "jobs read it.",
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


class Requester:
    """The requests of this process to an upstream. failures: records the pieces of failed ones."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream, self.failures = upstream, FillFailures()
        self._lock = threading.Lock()
        self._in_flight: dict[str, list[PieceSpan]] = {}  # pieces, by the key of their blob

    def is_fetching(self, source: BlobSource, pieces: PieceSpan) -> bool:
        """Return True if this process is fetching some of these pieces."""
        with self._lock:
            in_flight = self._in_flight.get(source.key, ())
            return any(low < pieces[1] and pieces[0] < high for low, high in in_flight)

    def send(self, requests: Sequence[BlobRequest], *, urgent: bool = True) -> None:
        """Fetch all ranges; return when each answer is processed. urgent: False for a background
        fill. Raises as Upstream.fetch does."""
        if not requests:
            return
        of_fills = [(request, request.pieces) for request in requests if request.pieces is not None]
        with self._lock:
            for request, pieces in of_fills:
                self._in_flight.setdefault(request.range.blob.key, []).append(pieces)
        try:
            self._upstream.fetch(
                [request.range for request in requests],
                lambda number, answer: requests[number].receive(answer),
                urgent=urgent,
            )
        except FetchError as error:
            failed = [
                (request.range.blob.key, pieces)
                for request, pieces in of_fills
                if self._upstream.uri(request.range.stored.path) == error.uri
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
