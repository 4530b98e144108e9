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

    def room_for_fills(self) -> AbstractContextManager[int]:
        """Grant ranges that aren't urgent, as `Upstream.room_for_fills` says."""
        return self._fetcher.room_for_fills()

    def uri(self, path: str) -> str:
        """Name an object as the errors of `fetch` do."""
        return self._fetcher.uri(path)

    def is_left_to_others(self, key: str) -> bool:
        """Never: it costs the same at any time."""
        del key
        return False

    def doubt(self, key: str) -> None:
        """The store is the origin of all."""

    def close(self) -> None:
        """The fetcher is its owner's to close."""
