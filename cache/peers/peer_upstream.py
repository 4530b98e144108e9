"""Fetch ranges from the other nodes' caches first, and the rest from the store.

Ranges that no peer is known to hold are requested from the store at once, in parallel with those
that are requested from peers; ranges that peers don't deliver follow. A failing peer delays its
ranges by a bounded time and one request to the store, and never fails a call. Each range is
delivered once, and none after the call's end.

Peers are asked for lists of their blobs before the first range, and again after misses.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

from penstock.cache.base import Answer, Deliver, FetchPolicy, Store
from penstock.cache.blobs import BlobRange, Upstream
from penstock.cache.errors import ClosedError, FetchError, log
from penstock.cache.fetch import Fetcher
from penstock.cache.peers.peer_client import PeerClient, PeerStore, peer_ranges
from penstock.cache.peers.peer_directory import Peer, PeerDirectory, PlannedReaders
from penstock.cache.threads import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

_POLICY = FetchPolicy(
    retry_timeout_s=60.0,
    max_attempts=1,
    hedge_least=2**30,  # never
    min_connections=4,
    start_connections=6,
    max_connections=16,
)
"""The policy of requests to all peers. Few connections saturate a link between nodes, and each
further one delays an answer of 8 MiB: with 8 connections some exceeded a peer's time limit."""
_MOST_LEFT = 65_536
_LEFT_S = 30.0
"""Seconds for which a fill waits for the node that fetches the blob for all nodes."""
_LEFT_FOR_LATER_S = 600.0
"""The same for a blob that this node needs only in a later epoch: the node that reads it now will
have it by then, and fetching it sooner would fetch it twice. Measured with reshuffle=1.0 and both
waits a tenth as long: 1.03 instead of 1.05 datasets from the store in four epochs."""


class PeerUpstream(Upstream):
    """An upstream that fetches ranges from peers, and the rest from the store.

    fetcher: of the store; its meter counts the bytes from peers, too. No peer is asked before
    `use_peers`. It owns its threads (penstock-fetch, penstock-peers), which start when needed.
    """

    def __init__(self, fetcher: Fetcher) -> None:
        super().__init__(fetcher)
        self.timeout_s += _POLICY.retry_timeout_s
        self.directory = PeerDirectory()
        self._pool = Workers(1, name="peers")
        self._peers: Fetcher | None = None
        self._lists: PeerStore | None = None
        self._left_since_s: dict[str, float] = {}

    def use_peers(
        self,
        peers: Sequence[Peer],
        client: PeerClient,
        *,
        planned: PlannedReaders | None = None,
        look: Callable[[], Sequence[Peer] | None] | None = None,
    ) -> None:
        """Use these peers from now on. client: closed with this object. planned: the readers of
        blobs by the job's plan. look: returns the current peers, None if unchanged."""
        self.directory.set_peers(peers, planned=planned)
        if self._peers is not None:
            self._peers.close()
        self._lists = PeerStore(self.directory, client, self._pool, meter=self.meter, look=look)
        # The fetcher uses nothing else of a store for `PeerRanges`.
        self._peers = Fetcher(cast("Store", self._lists), policy=_POLICY)

    def renew(self) -> None:
        """Wait again for nodes that fetch blobs for all, because a new epoch may have others, and
        update the peers at the next range, on another thread."""
        self._left_since_s.clear()
        if self._lists is not None:
            self._lists.missed()

    def fetch(self, ranges: Sequence[BlobRange], deliver: Deliver, *, urgent: bool = True) -> None:
        """Fetch ranges; see `Upstream.fetch`."""
        peers, lists = self._peers, self._lists
        if peers is None or lists is None or not ranges or not self.directory.peers:
            super().fetch(ranges, deliver, urgent=urgent)
            return
        lists.refresh()
        now_s = time.monotonic()
        of_peers: list[int] = []
        others: list[int] = []
        for number, wanted in enumerate(ranges):
            # The key identifies the blob's bytes on every node.
            may_ask = self.directory.candidates(wanted.blob.key, now_s)
            (of_peers if may_ask else others).append(number)
        delivered: set[int] = set()

        def deliver_from_peer(number: int, answer: Answer) -> None:
            deliver(number, answer)
            delivered.add(number)

        fetch_from_store = super().fetch

        def fetch_others(numbers: list[int]) -> None:
            """Fetch those of the ranges that `numbers` lists from the store."""
            if numbers:
                lists.missed()
                some = [ranges[number] for number in numbers]
                fetch_from_store(some, lambda at, data: deliver(numbers[at], data), urgent=urgent)

        requests = peer_ranges(ranges, of_peers, deliver_from_peer)
        with peers.fetching(requests, lambda *_: None, urgent=urgent) as finish:
            fetch_others(others)
            try:
                finish()
            except ClosedError:
                if self._peers is peers:  # else other peers have replaced these
                    raise
            except FetchError as error:
                if not error.uri.startswith(f"{PeerStore.url}/"):  # of a delivery
                    raise
                log.info("Peers didn't answer in time, so the remote is used: %s", error)
        fetch_others([number for number in of_peers if number not in delivered])

    def reserve_fills(self, key: str, most: int) -> AbstractContextManager[int]:
        """Reserve connections for fills, to peers if one has the blob; see
        `Upstream.reserve_fills`."""
        if self._peers is not None and self.is_near(key):
            return self._peers.reserve_fills(most)
        return super().reserve_fills(key, most)

    def limit_fills(self, room: Callable[[int, int], int]) -> None:
        """Set the connections of fills; see `Upstream.limit_fills`. Fills from peers keep at least
        one, because without fills batches would request each sample from peers."""
        super().limit_fills(room)
        if self._peers is not None:
            self._peers.limit_fills(lambda now, most: max(1, room(now, most)))

    def request_time(self) -> tuple[float, float]:
        """Return the seconds of recent requests to peers or to the store, the larger of both: mean
        and 99th percentile."""
        mean_s, p99_s = super().request_time()
        if self._peers is None:
            return mean_s, p99_s
        of_peers = self._peers.request_time()
        return max(mean_s, of_peers[0]), max(p99_s, of_peers[1])

    def is_near(self, key: str) -> bool:
        """Return True if a peer's list contains the blob."""
        return bool(self.directory.candidates(key, time.monotonic()))

    def is_left_to_others(self, key: str) -> bool:
        """Return True if the fill of a blob should wait, because another node fetches it for this
        one."""
        lists, now_s = self._lists, time.monotonic()
        if lists is None or not self.directory.has_other_owner(key, now_s):
            return False
        lists.missed()
        lists.refresh()
        if self.directory.candidates(key, now_s):
            return False
        if len(self._left_since_s) >= _MOST_LEFT:
            self._left_since_s.clear()
        most_s = _LEFT_S if self.directory.is_needed(key) else _LEFT_FOR_LATER_S
        return now_s - self._left_since_s.setdefault(key, now_s) < most_s

    def mark_wrong(self, key: str) -> None:
        """Stop asking peers for a blob whose bytes were wrong."""
        self.directory.mark_wrong(key, time.monotonic())

    def close(self) -> None:
        """End the threads. Safe to call twice."""
        if self._peers is not None:
            self._peers.close()
        self._pool.close(timeout_s=1.0)
