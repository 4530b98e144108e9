"""The other nodes' caches as an upstream: asked before the store, which has what they haven't.

Ranges that nobody is known to hold go to the store at once, beside those that peers are asked for;
what peers don't give follows. Whatever a peer does costs its ranges a request to the store and a
bounded time, and never fails a call.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.cache.base.counters import TrafficMeter
from penstock.cache.base.fetch_policy import FetchPolicy
from penstock.cache.base.store import Answer
from penstock.cache.errors import PenstockError
from penstock.cache.fetch.fetcher import Fetcher
from penstock.cache.peers.deliveries import Deliveries
from penstock.cache.peers.half_ranges import HalfRange, Pieces
from penstock.cache.peers.peer_lists import PeerLists
from penstock.cache.peers.peer_ranges import NOT_THERE, Given, peer_ranges
from penstock.cache.peers.peer_store import PeerStore
from penstock.cache.threads import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from penstock.cache.blobs.upstream import BlobRange, Upstream
    from penstock.cache.peers.peer_client import Keep, PeerClient
    from penstock.cache.peers.peer_directory import Peer, PeerDirectory, PlannedHolders

log = logging.getLogger("penstock")

_POLICY = FetchPolicy(
    retry_timeout_s=60.0,
    max_attempts=1,
    hedge_least=2**30,
    hedge_floor_s=3600.0,
    max_hedge_share=0.0,
    min_connections=4,
    standing_connections=4,
    start_connections=6,
    max_connections=16,
)
"""Of requests to all peers. Few connections: a link between nodes is full with few, and each more
makes an answer of 8 MiB later: with 8 some took longer than a peer may, and it was left alone."""
_SIDE_CALLS = 8
"""Calls whose peers are asked beside the store; others ask one behind the other."""
_MOST_DOUBTED = 65_536
_LEFT_S = 30.0
"""So long a fill is left to the node that fetches the blob for all that need it."""
_LEFT_FOR_LATER_S = 600.0
"""So long where this node needs the blob in a later epoch: who reads it now has it when that
begins, however slow the store is, and what is fetched sooner is fetched twice."""


class PeerUpstream:
    """Asks peers for ranges, and another upstream for what they don't give.

    Nobody is asked before `know`. store: of the rest. meter: counts what came from peers. Owns its
    threads (penstock-fetch, penstock-peers), started when needed.
    """

    def __init__(self, store: Upstream, directory: PeerDirectory, *, meter: TrafficMeter) -> None:
        self._store, self.directory, self._meter = store, directory, meter
        self._client: PeerClient | None = None
        self._peer_store: PeerStore | None = None
        self._fetcher: Fetcher | None = None
        self._side = Workers(_SIDE_CALLS, name="peers")
        self._lists: PeerLists | None = None
        self._doubted: dict[str, None] = {}
        self._left_since_s: dict[str, float] = {}
        self._is_closed = False

    @property
    def range_bytes(self) -> int:
        """How many bytes are best asked for at a time."""
        return self._store.range_bytes

    @property
    def timeout_s(self) -> float:
        """How long a range may take until it has failed."""
        return self._store.timeout_s + _POLICY.retry_timeout_s

    def know(
        self,
        peers: Sequence[Peer],
        client: PeerClient,
        *,
        planned: PlannedHolders | None = None,
        look: Callable[[], Sequence[Peer] | None] | None = None,
    ) -> None:
        """Ask these peers from now on. client: this one's own, closed with it. planned: what the
        job's plan says of them. look: who is there by now, None: as before."""
        self.directory.know(peers, planned=planned)
        fetcher = self._fetcher
        if client is not self._client or fetcher is None:
            self._client = client
            store = self._peer_store = PeerStore(self.directory, client, meter=self._meter)
            before, self._fetcher = fetcher, Fetcher(store, policy=_POLICY, meter=TrafficMeter())
            fetcher = self._fetcher
            if before is not None:
                before.close()
        self._lists = PeerLists(self.directory, fetcher, self._side, look=look)

    def renew(self) -> None:
        """Have it looked who is there by now, on another thread, at the next range: it may be
        another epoch, with other owners."""
        self._left_since_s.clear()
        if self._lists is not None:
            self._lists.missed()

    def fetch(
        self,
        ranges: Sequence[BlobRange],
        deliver: Callable[[int, Answer], None],
        *,
        urgent: bool = True,
    ) -> None:
        """Fetch ranges, as `Upstream.fetch` says."""
        fetcher, lists = self._fetcher, self._lists
        if fetcher is None or lists is None or not ranges or not self.directory.peers:
            self._store.fetch(ranges, deliver, urgent=urgent)
            return
        lists.hear()
        now_s = time.monotonic()
        asked: list[int] = []
        others: list[int] = []
        for number, one in enumerate(ranges):
            (asked if self._may_ask(one, now_s) else others).append(number)
        if not asked:
            lists.missed()
            self._store.fetch(ranges, deliver, urgent=urgent)
            return
        gate = Deliveries(deliver)
        try:
            self._fetch_both(fetcher, ranges, asked, others, gate, urgent=urgent)
        finally:
            gate.end()

    def room_for_fills(self, key: str, most: int) -> AbstractContextManager[int]:
        """Grant ranges that aren't urgent, as `Upstream.room_for_fills` says: of the connections to
        peers where one has the blob."""
        fetcher = self._fetcher
        if fetcher is not None and self.is_near(key):
            return fetcher.room_for_fills(most)
        return self._store.room_for_fills(key, most)

    def let_fills(self, room: Callable[[int, int], int]) -> None:
        """Set the connections of fills beside batches, as `Upstream.let_fills` says. One goes on
        beside what batches ask of peers: with none they would ask for each sample."""
        self._store.let_fills(room)
        if (fetcher := self._fetcher) is not None:
            now, most = fetcher.fills_beside_urgent, _POLICY.max_connections
            fetcher.fills_beside_urgent = max(1, room(now, most))

    def request_time(self) -> tuple[float, float]:
        """Seconds of recent requests, mean and 99th percentile: of the slower ones."""
        mean_s, p99_s = self._store.request_time()
        if self._fetcher is None:
            return mean_s, p99_s
        of_peers = self._fetcher.request_time()
        return max(mean_s, of_peers[0]), max(p99_s, of_peers[1])

    def uri(self, path: str) -> str:
        """Name an object as the errors of `fetch` do."""
        return self._store.uri(path)

    def is_near(self, key: str) -> bool:
        """Whether a peer said that it holds a blob."""
        is_asked = self._lists is not None and key not in self._doubted
        return is_asked and self.directory.holds(key, time.monotonic())

    def is_left_to_others(self, key: str) -> bool:
        """Whether the fill of a blob shall wait, as another node fetches it for this one too."""
        lists, now_s = self._lists, time.monotonic()
        if lists is None or not self.directory.has_other_owner(key, now_s):
            return False
        lists.missed()
        lists.hear()
        if self.directory.holds(key, now_s):
            return False
        if len(self._left_since_s) >= _MOST_DOUBTED:
            self._left_since_s.clear()
        most_s = _LEFT_S if self.directory.is_needed(key) else _LEFT_FOR_LATER_S
        return now_s - self._left_since_s.setdefault(key, now_s) < most_s

    def doubt(self, key: str) -> None:
        """Ask no peer any more for a blob whose bytes were wrong."""
        if len(self._doubted) >= _MOST_DOUBTED:
            self._doubted.clear()
        self._doubted[key] = None
        giver = self._peer_store.giver(key) if self._peer_store is not None else None
        if giver is not None:
            self.directory.failed(
                giver, time.monotonic(), reason="what it gave had wrong checksums", is_wrong=True
            )

    def close(self) -> None:
        """End the threads. Safe to call twice."""
        self._is_closed = True
        if self._fetcher is not None:
            self._fetcher.close()
        self._side.close(timeout_s=1.0)
        self._store.close()

    # -- ranges

    def _may_ask(self, one: BlobRange, now_s: float) -> bool:
        key = one.blob.key  # it tells the blob's bytes, whoever has them
        return key not in self._doubted and bool(self.directory.candidates(key, now_s))

    def _fetch_both(
        self,
        fetcher: Fetcher,
        ranges: Sequence[BlobRange],
        asked: list[int],
        others: list[int],
        gate: Deliveries,
        *,
        urgent: bool,
    ) -> None:
        pieces: dict[int, Pieces] = {}
        if not others:
            self._ask_peers(fetcher, ranges, asked, gate, pieces, urgent=urgent)
        else:
            side = self._side.submit(
                lambda _: self._ask_peers(fetcher, ranges, asked, gate, pieces, urgent=urgent), None
            )
            self._ask_store(ranges, others, gate, urgent=urgent)
            try:
                side.result(timeout=_POLICY.retry_timeout_s + 1.0)
            except TimeoutError:  # behind other calls it may not even have begun
                side.cancel()  # the store has what is left
        if gate.error is not None:
            raise gate.error
        self._ask_rest(ranges, gate.left(asked), gate, pieces, urgent=urgent)

    def _ask_rest(
        self,
        ranges: Sequence[BlobRange],
        numbers: list[int],
        gate: Deliveries,
        pieces: dict[int, Pieces],
        *,
        urgent: bool,
    ) -> None:
        """Put pieces together, and ask the store for what no peer gave: whole ranges, and what lies
        beside pieces."""
        halves = {n: HalfRange(ranges[n], pieces[n].pieces) for n in numbers if n in pieces}
        wanted = [(n, gap) for n, half in halves.items() for gap in half.gaps]
        wanted += [(n, ranges[n]) for n in numbers if n not in halves]
        for number, half in halves.items():
            if not half.gaps:  # it was filled while the peer looked what it lacks
                whole_bytes = ranges[number].segment.whole_bytes
                last = Answer(data=b"", version="", object_bytes=whole_bytes)
                gate.give(number, half.answer(last))
        if not wanted:
            return

        def deliver(place: int, answer: Answer) -> None:
            number, one = wanted[place]
            half = halves.get(number)
            if half is None:
                gate.give(number, answer)
            elif half.put(one.start, memoryview(answer.data)):
                gate.give(number, half.answer(answer))

        if self._lists is not None:
            self._lists.missed()
        self._store.fetch([one for _, one in wanted], deliver, urgent=urgent)

    def _ask_store(
        self, ranges: Sequence[BlobRange], numbers: list[int], gate: Deliveries, *, urgent: bool
    ) -> None:
        if numbers:
            if self._lists is not None:
                self._lists.missed()
            self._store.fetch(
                [ranges[number] for number in numbers],
                lambda place, answer: gate.give(numbers[place], answer),
                urgent=urgent,
            )

    def _ask_peers(
        self,
        fetcher: Fetcher,
        ranges: Sequence[BlobRange],
        numbers: list[int],
        gate: Deliveries,
        pieces: dict[int, Pieces],
        *,
        urgent: bool,
    ) -> None:
        """Deliver what peers have of some ranges, and note the pieces of others. Raises what
        delivering raises, nothing else."""

        def keep_of(number: int) -> Keep | None:
            keep = ranges[number].keep
            if keep is None:
                return None
            return lambda start, data, crc: gate.keep(number, lambda: keep(start, data, crc))

        def deliver(place: int, answers: Answer) -> None:
            assert isinstance(answers, Given)
            for number, answer in zip(wanted[place].numbers, answers.answers, strict=True):
                if isinstance(answer, Pieces):
                    pieces[number] = answer
                elif answer is not NOT_THERE:
                    whole_bytes = ranges[number].segment.whole_bytes
                    gate.give(number, replace(answer, object_bytes=whole_bytes))

        wanted = peer_ranges(ranges, numbers, keep_of)
        try:
            fetcher.fetch(wanted, deliver, urgent=urgent)
        except PenstockError as error:
            if gate.error is not None or self._is_closed:
                raise
            log.info("Peers gave no answer in time, the remote is asked: %s", error)
