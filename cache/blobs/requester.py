"""Requests for ranges of blobs, and what their failures mean to others."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cache.errors import FetchError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.cache.base.blob import BlobSource
    from penstock.cache.base.store import Answer
    from penstock.cache.blobs.fill_failures import FillFailures
    from penstock.cache.blobs.upstream import BlobRange, Upstream
    from penstock.cache.disk.pieces import PieceSpan


@dataclass(frozen=True, slots=True)
class BlobRequest:
    """A blob request is a range to fetch, and what takes its bytes.

    pieces: of the fill that it is for; None where the blob passes.
    """

    range: BlobRange
    take: Callable[[Answer], None]
    pieces: PieceSpan | None = None


class Requester:
    """Sends requests upstream, and notes which pieces of which fills a failure has cost."""

    def __init__(self, upstream: Upstream, failures: FillFailures) -> None:
        self._upstream, self._failures = upstream, failures
        self._lock = threading.Lock()
        self._asked: dict[str, list[PieceSpan]] = {}  # of fills, by key: on their way

    def asks(self, source: BlobSource, pieces: PieceSpan) -> bool:
        """Whether this process is fetching some of these pieces."""
        with self._lock:
            asked = self._asked.get(source.key, ())
            return any(low < pieces[1] and pieces[0] < high for low, high in asked)

    def send(self, requests: Sequence[BlobRequest], *, urgent: bool = True) -> None:
        """Fetch all; returns when each is taken. urgent: False for a fill in the background.
        Raises as Upstream.fetch does."""
        if not requests:
            return
        self._note(requests)
        try:
            self._upstream.fetch(
                [request.range for request in requests],
                lambda number, answer: requests[number].take(answer),
                urgent=urgent,
            )
        except FetchError as error:
            failed = [
                (request.range.blob.key, request.pieces)
                for request in requests
                if request.pieces is not None
                and self._upstream.uri(request.range.stored.path) == error.uri
            ]
            self._failures.note(failed, error)
            raise
        finally:
            self._forget(requests)

    def _note(self, requests: Sequence[BlobRequest]) -> None:
        with self._lock:
            for request in requests:
                if request.pieces is not None:
                    self._asked.setdefault(request.range.blob.key, []).append(request.pieces)

    def _forget(self, requests: Sequence[BlobRequest]) -> None:
        with self._lock:
            for request in requests:
                if request.pieces is not None:
                    asked = self._asked[request.range.blob.key]
                    asked.remove(request.pieces)
                    if not asked:
                        del self._asked[request.range.blob.key]
