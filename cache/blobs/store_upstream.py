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
        """See Upstream."""
        return self._fetcher.policy.range_bytes

    @property
    def timeout_s(self) -> float:
        """See Upstream."""
        return self._fetcher.policy.retry_timeout_s

    def fetch(
        self,
        ranges: Sequence[BlobRange],
        deliver: Callable[[int, Answer], None],
        *,
        urgent: bool = True,
    ) -> None:
        """See Upstream."""
        self._fetcher.fetch([one.stored for one in ranges], deliver, urgent=urgent)

    def room_for_fills(self) -> AbstractContextManager[int]:
        """See Upstream."""
        return self._fetcher.room_for_fills()

    def uri(self, path: str) -> str:
        """See Upstream."""
        return self._fetcher.uri(path)
