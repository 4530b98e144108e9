"""The store as the one upstream of a dataset's blobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from penstock.cache.base.store import Answer
    from penstock.cache.blobs.upstream import BlobRange
    from penstock.cache.fetch.fetcher import Fetcher


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

    def room_for_fills(self, key: str, most: int) -> AbstractContextManager[int]:
        """Grant ranges that aren't urgent, as `Upstream.room_for_fills` says."""
        del key
        return self._fetcher.room_for_fills(most)

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
