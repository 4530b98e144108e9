"""Fetch ranges from the other nodes' caches first, and the rest from the store.

Ranges that no peer is known to hold are requested from the store at once, in parallel with those
that are requested from peers; ranges that peers don't deliver follow. A failing peer delays its
ranges by a bounded time and one request to the store, and never fails a call. Each range is
delivered once, and none after the call's end.

Peers are asked for lists of their blobs before the first range, and again after misses.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from typing import TYPE_CHECKING, cast

from penstock.cache.base import Answer, FetchPolicy, StreamedAnswer, TrafficMeter
from penstock.cache.errors import ClosedError, PenstockError, PenstockWarning, StalledError
from penstock.cache.fetch import Fetcher
from penstock.cache.peers.peer_store import PeerStore, RangesAnswer, peer_ranges
from penstock.cache.threads import STALL_TIMEOUT_S, Workers, ordered

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from penstock.cache.base import Store
    from penstock.cache.blobs import BlobRange, Upstream
    from penstock.cache.peers.peer_client import Keep, PeerClient
    from penstock.cache.peers.peer_directory import Peer, PeerDirectory, PlannedHolders
    from penstock.cache.threads import Outcome


class Deliveries:
    """The deliveries of bytes from peers for one call, until one of them raises an error, or `end`
    is called.

    deliver: of the call. delivered: the numbers of the delivered ranges, which are their positions
    in the call. error: the first error. Safe for several threads.
    """

    def __init__(self, deliver: Callable[[int, Answer], None]) -> None:
        self._deliver = deliver
        self._changed = threading.Condition()
        self._active = 0
        self._is_over = False
        self.delivered: set[int] = set()
        self.error: BaseException | None = None

    def deliver(self, number: int, answer: Answer) -> None:
        """Deliver an answer; see `run`."""
        self.run(lambda: self._deliver(number, answer))
        self.delivered.add(number)

    def run(self, act: Callable[[], object]) -> None:
        """Call `act`, which delivers or stores bytes. Raises what it raises, the first error, and
        ClosedError if the call has ended."""
        with self._changed:
            if self.error is not None:
                raise self.error
            if self._is_over:
                raise ClosedError("Other nodes aren't asked for these ranges any more.")
            self._active += 1
        try:
            act()
        except BaseException as error:
            self.error = self.error or error
            raise
        finally:
            with self._changed:
                self._active -= 1
                self._changed.notify_all()

    def end(self) -> None:
        """End deliveries; return when none is in progress. Raises StalledError."""
        with self._changed:
            self._is_over = True
            if not self._changed.wait_for(lambda: not self._active, timeout=STALL_TIMEOUT_S):
                raise StalledError(
                    f"Bytes that were fetched could not be stored for {STALL_TIMEOUT_S:.0f} s. The "
                    "local disk may hang: try to list the cache folder."
                )


_FIRST_S = 4.0
"""Seconds for which the first ranges wait for the peers' lists."""
_AGAIN_S, _SOON_S = 10.0, 2.0
"""Seconds between requests for lists: fewer for short lists, which cost little."""
_SHORT = 100_000  # blobs in all of them
_MOST = 64
"""The most peers that are asked for lists, one after another on each of a few threads."""
_LIST_THREADS = 16
_SHOWN = 5  # of those that don't answer
_NO_ANSWER = (
    f"no answer within {_FIRST_S:.0f} s. Check the address, that the job runs there, and that no "
    "firewall blocks it: `penstock doctor --peer ADDRESS` tries each stage."
)


class PeerLists:
    """The lists of the peers' blobs, which are fetched again when they may be out of date.

    pool: the thread that updates the peers and their lists. Safe for several threads.
    """

    def __init__(
        self,
        directory: PeerDirectory,
        store: PeerStore,
        pool: Workers,
        *,
        look: Callable[[], Sequence[Peer] | None] | None = None,
    ) -> None:
        """look: returns the current peers, None if unchanged; called before lists are fetched
        again."""
        self._look = look
        self._directory, self._store, self._pool = directory, store, pool
        self._first: Outcome[None] | None = None
        self._wait_until_s = 0.0
        self._due_s = 0.0
        self._has_missed = self._has_warned = False

    def missed(self) -> None:
        """Record a range that only the remote had: the lists may be out of date."""
        self._has_missed = True

    def refresh(self) -> None:
        """Fetch the lists if they are due; the first time wait for them, for at most _FIRST_S."""
        now_s = time.monotonic()
        if self._first is None:
            self._due_s, self._wait_until_s = now_s + _SOON_S, now_s + _FIRST_S
            self._first = self._pool.submit(self._fetch, None)
        elif self._has_missed and now_s >= self._due_s:
            self._due_s, self._has_missed = now_s + self._again_s, False
            self._pool.submit(self._fetch, self._look)
        if not self._first.done():
            self._first.wait(self._wait_until_s - now_s)
        if not self._has_warned:
            self._has_warned = True
            self._warn_of_silence()

    @property
    def _again_s(self) -> float:
        share = min(1.0, self._directory.listed_blobs / _SHORT)
        return _SOON_S + share * (_AGAIN_S - _SOON_S)

    def _warn_of_silence(self) -> None:
        directory = self._directory
        silent = [peer for peer in directory.peers[:_MOST] if not directory.has_list(peer)]
        reasons: dict[str, list[Peer]] = {}
        for peer in silent:
            reasons.setdefault(directory.fault(peer) or _NO_ANSWER, []).append(peer)
        for reason, peers in reasons.items():
            shown = ", ".join(f"node {peer.node} ({peer.address})" for peer in peers[:_SHOWN])
            more = f" and {len(peers) - _SHOWN} more" if len(peers) > _SHOWN else ""
            held = "they hold" if len(peers) > 1 else "it holds"
            warnings.warn(
                f"peers: {shown}{more}: {reason} Until then, the data that {held} is fetched from "
                "the remote.",
                PenstockWarning,
                stacklevel=2,
            )

    def _fetch(self, look: Callable[[], Sequence[Peer] | None] | None) -> None:
        """Fetch the lists that are due, after updating the peers by look()."""
        if look is not None and (peers := look()) is not None:
            self._directory.set_peers(peers)
        due = self._directory.due_for_list(time.monotonic(), older_s=self._again_s / 2, most=_MOST)
        for _ in ordered(
            self._store.fetch_list, due, workers=_LIST_THREADS, ahead=_MOST, name="peer-lists"
        ):
            pass


_log = logging.getLogger("penstock")

_POLICY = FetchPolicy(
    retry_timeout_s=60.0,
    max_attempts=1,
    hedge_least=2**30,
    hedge_floor_s=3600.0,
    max_hedge_share=0.0,
    min_connections=4,
    start_connections=6,
    max_connections=16,
)
"""The policy of requests to all peers. Few connections saturate a link between nodes, and each
further one delays an answer of 8 MiB: with 8 connections some exceeded a peer's time limit."""
_SIDE_CALLS = 8
"""The most calls that ask peers and the store in parallel; others ask one after the other."""
_MOST_WRONG_KEYS = 65_536
_LEFT_S = 30.0
"""Seconds for which a fill waits for the node that fetches the blob for all nodes."""
_LEFT_FOR_LATER_S = 600.0
"""The same for a blob that this node needs only in a later epoch: the node that reads it now will
have it by then, and fetching it sooner would fetch it twice."""


class PeerUpstream:
    """An upstream that fetches ranges from peers, and the rest from another upstream.

    store: the other upstream. meter: counts bytes from peers. No peer is asked before `use_peers`.
    It owns its threads (penstock-fetch, penstock-peers), which start when needed.
    """

    def __init__(self, store: Upstream, directory: PeerDirectory, *, meter: TrafficMeter) -> None:
        self._store, self.directory, self._meter = store, directory, meter
        self._peer_store: PeerStore | None = None
        self._fetcher: Fetcher | None = None
        self._side = Workers(_SIDE_CALLS, name="peers")
        self._lists: PeerLists | None = None
        self._wrong_keys: dict[str, None] = {}
        self._left_since_s: dict[str, float] = {}
        self._is_closed = False

    @property
    def range_bytes(self) -> int:
        """The best size of a request."""
        return self._store.range_bytes

    @property
    def timeout_s(self) -> float:
        """Seconds after which the fetch of a range has failed."""
        return self._store.timeout_s + _POLICY.retry_timeout_s

    def use_peers(
        self,
        peers: Sequence[Peer],
        client: PeerClient,
        *,
        planned: PlannedHolders | None = None,
        look: Callable[[], Sequence[Peer] | None] | None = None,
    ) -> None:
        """Use these peers from now on. client: closed with this object. planned: the holders of
        blobs by the job's plan. look: returns the current peers, None if unchanged."""
        self.directory.set_peers(peers, planned=planned)
        if self._fetcher is not None:
            self._fetcher.close()
        self._peer_store = store = PeerStore(self.directory, client, meter=self._meter)
        # The fetcher uses nothing else of a store for `PeerRanges`.
        self._fetcher = Fetcher(cast("Store", store), policy=_POLICY, meter=TrafficMeter())
        self._lists = PeerLists(self.directory, store, self._side, look=look)

    def renew(self) -> None:
        """Forget the plan's holders, because a new epoch may have others, and update the peers at
        the next range, on another thread."""
        self.directory.plan_again()
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
        """Fetch ranges; see `Upstream.fetch`."""
        fetcher, lists = self._fetcher, self._lists
        if fetcher is None or lists is None or not ranges or not self.directory.peers:
            self._store.fetch(ranges, deliver, urgent=urgent)
            return
        lists.refresh()
        now_s = time.monotonic()
        of_peers: list[int] = []
        others: list[int] = []
        for number, wanted in enumerate(ranges):
            key = wanted.blob.key  # it identifies the blob's bytes on every node
            may_ask = key not in self._wrong_keys and self.directory.candidates(key, now_s)
            (of_peers if may_ask else others).append(number)
        if not of_peers:
            lists.missed()
            self._store.fetch(ranges, deliver, urgent=urgent)
            return

        def fetch_from_peers(_: None = None) -> None:
            self._fetch_from_peers(fetcher, ranges, of_peers, gate, urgent=urgent)

        def fetch_from_store(numbers: list[int]) -> None:
            lists.missed()
            wanted = [ranges[number] for number in numbers]
            self._store.fetch(
                wanted, lambda place, answer: deliver(numbers[place], answer), urgent=urgent
            )

        gate = Deliveries(deliver)
        try:
            if not others:
                fetch_from_peers()
            else:
                side = self._side.submit(fetch_from_peers, None)
                fetch_from_store(others)
                # It may be queued after other calls; then the store delivers the rest.
                if side.wait(_POLICY.retry_timeout_s + 1.0) or not side.cancel():
                    side.result()
        finally:
            gate.end()  # a request that exceeded its time may still be storing bytes
        if left := [number for number in of_peers if number not in gate.delivered]:
            fetch_from_store(left)

    def reserve_fills(self, key: str, most: int) -> AbstractContextManager[int]:
        """Reserve connections for fills, to peers if one has the blob; see
        `Upstream.reserve_fills`."""
        fetcher = self._fetcher
        if fetcher is not None and self.is_near(key):
            return fetcher.reserve_fills(most)
        return self._store.reserve_fills(key, most)

    def limit_fills(self, room: Callable[[int, int], int]) -> None:
        """Set the connections of fills; see `Upstream.limit_fills`. Fills from peers keep at least
        one, because without fills batches would request each sample from peers."""
        self._store.limit_fills(room)
        if (fetcher := self._fetcher) is not None:
            now, most = fetcher.fills_beside_urgent, _POLICY.max_connections
            fetcher.fills_beside_urgent = max(1, room(now, most))

    def request_time(self) -> tuple[float, float]:
        """Return the seconds of recent requests to peers or to the store, the larger of both: mean
        and 99th percentile."""
        mean_s, p99_s = self._store.request_time()
        if self._fetcher is None:
            return mean_s, p99_s
        of_peers = self._fetcher.request_time()
        return max(mean_s, of_peers[0]), max(p99_s, of_peers[1])

    def uri(self, path: str) -> str:
        """Return an object's name in the errors of `fetch`."""
        return self._store.uri(path)

    def is_near(self, key: str) -> bool:
        """Return True if a peer's list contains the blob."""
        may_ask = self._lists is not None and key not in self._wrong_keys
        return may_ask and self.directory.holds(key, time.monotonic())

    def is_left_to_others(self, key: str) -> bool:
        """Return True if the fill of a blob should wait, because another node fetches it for this
        one."""
        lists, now_s = self._lists, time.monotonic()
        if lists is None or not self.directory.has_other_owner(key, now_s):
            return False
        lists.missed()
        lists.refresh()
        if self.directory.holds(key, now_s):
            return False
        if len(self._left_since_s) >= _MOST_WRONG_KEYS:
            self._left_since_s.clear()
        most_s = _LEFT_S if self.directory.is_needed(key) else _LEFT_FOR_LATER_S
        return now_s - self._left_since_s.setdefault(key, now_s) < most_s

    def mark_wrong(self, key: str) -> None:
        """Stop asking peers for a blob whose bytes were wrong."""
        if len(self._wrong_keys) >= _MOST_WRONG_KEYS:
            self._wrong_keys.clear()
        self._wrong_keys[key] = None
        source = self._peer_store.last_source(key) if self._peer_store is not None else None
        if source is not None:
            self.directory.failed(
                source, time.monotonic(), reason="its bytes had wrong checksums", is_wrong=True
            )

    def close(self) -> None:
        """End the threads. Safe to call twice."""
        self._is_closed = True
        if self._fetcher is not None:
            self._fetcher.close()
        self._side.close(timeout_s=1.0)
        self._store.close()

    def _fetch_from_peers(
        self,
        fetcher: Fetcher,
        ranges: Sequence[BlobRange],
        numbers: list[int],
        gate: Deliveries,
        *,
        urgent: bool,
    ) -> None:
        """Deliver the ranges that peers have. Raises only what the call's `deliver` raises."""

        def keep_of(number: int) -> Keep | None:
            keep = ranges[number].keep
            if keep is None:
                return None
            return lambda start, data, crc: gate.run(lambda: keep(start, data, crc))

        def deliver(place: int, answer: Answer) -> None:
            assert isinstance(answer, RangesAnswer)
            for number, data in zip(wanted[place].numbers, answer.parts, strict=True):
                if data is not None:
                    kind = Answer if ranges[number].keep is None else StreamedAnswer
                    whole_bytes = ranges[number].segment.whole_bytes
                    gate.deliver(number, kind(data=data, version="", object_bytes=whole_bytes))

        wanted = peer_ranges(ranges, numbers, keep_of)
        try:
            fetcher.fetch(wanted, deliver, urgent=urgent)
        except PenstockError as error:
            if gate.error is not None or self._is_closed:
                raise
            _log.info("Peers didn't answer in time, so the remote is used: %s", error)
