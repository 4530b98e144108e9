"""Fetch ranges from the other nodes' caches first, and the rest from the store.

Ranges that no peer is known to hold are requested from the store at once, in parallel with those
that are requested from peers; ranges that peers don't deliver follow. A failing peer delays its
ranges by a bounded time and one request to the store, and never fails a call. Each range is
delivered once, and none after the call's end.

Peers are asked for lists of their blobs before the first range, and again after misses.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.cache.base import Answer, FetchPolicy, ObjectRange, TrafficMeter
from penstock.cache.errors import ClosedError, PenstockError, PenstockWarning, StalledError
from penstock.cache.fetch import Fetcher
from penstock.cache.peers.peer_store import (
    NOT_FOUND,
    PartialAnswer,
    PartialRange,
    PeerStore,
    RangesAnswer,
    list_name,
    peer_ranges,
)
from penstock.cache.threads import STALL_TIMEOUT_S, Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from penstock.cache.blobs import BlobRange, Upstream
    from penstock.cache.peers.peer_client import Keep, PeerClient
    from penstock.cache.peers.peer_directory import Peer, PeerDirectory, PlannedHolders
    from penstock.cache.threads import Outcome


class Deliveries:
    """The deliveries of one call: answers are passed to its `deliver` until that raises, or `end`
    is called.

    Safe for several threads. Methods identify a range by its index in the call, `number`.
    """

    def __init__(self, deliver: Callable[[int, Answer], None]) -> None:
        self._deliver = deliver
        self._changed = threading.Condition()
        self._done: set[int] = set()
        self._active = 0
        self._keeping: set[int] = set()
        self._is_over = False
        self.error: BaseException | None = None

    def deliver(self, number: int, answer: Answer) -> None:
        """Deliver one answer, unless its range was delivered or the call has ended. Raises what
        `deliver` has raised."""
        with self._changed:
            if self.error is not None:
                raise self.error
            if self._is_over or number in self._done:
                return
            self._done.add(number)
            # No other bytes of this range may be stored after its delivery.
            self._settle(lambda: number not in self._keeping)
            self._active += 1
        try:
            self._deliver(number, answer)
        except BaseException as error:
            self.error = self.error or error
            raise
        finally:
            with self._changed:
                self._active -= 1
                self._changed.notify_all()

    def keep(self, number: int, act: Callable[[], None]) -> None:
        """Call `act`, which stores bytes of a range that isn't delivered yet. Raises what it
        raises, and ClosedError if the call has ended."""
        with self._changed:
            if self.error is not None:
                raise self.error
            if self._is_over or number in self._done:
                raise ClosedError("Another source has delivered this range.")
            self._active += 1
            self._keeping.add(number)
        try:
            act()
        except BaseException as error:
            self.error = self.error or error
            raise
        finally:
            with self._changed:
                self._active -= 1
                self._keeping.discard(number)
                self._changed.notify_all()

    def end(self) -> None:
        """End deliveries; return when none is in progress. Raises StalledError."""
        with self._changed:
            self._is_over = True
            self._settle(lambda: not self._active)

    def _settle(self, is_settled: Callable[[], bool]) -> None:
        if not self._changed.wait_for(is_settled, timeout=STALL_TIMEOUT_S):
            raise StalledError(
                f"Bytes that were fetched could not be stored for {STALL_TIMEOUT_S:.0f} s. The "
                "local disk may hang: try to list the cache folder."
            )

    def left(self, numbers: list[int]) -> list[int]:
        """Return those of `numbers` that weren't delivered."""
        with self._changed:
            return [number for number in numbers if number not in self._done]


_FIRST_S = 4.0
"""Seconds for which the first ranges wait for the peers' lists."""
_AGAIN_S, _SOON_S = 10.0, 2.0
"""Seconds between requests for lists: fewer for short lists, which cost little."""
_SHORT = 100_000  # blobs in all of them
_MOST = 64
"""The most peers that are asked for lists at a time."""
_SHOWN = 5  # of those that don't answer
_NO_ANSWER = (
    f"no answer within {_FIRST_S:.0f} s. Check the address, that the job runs there, and that no "
    "firewall blocks it: `penstock doctor --peer ADDRESS` tries each stage."
)


class PeerLists:
    """The lists of the peers' blobs, which are fetched again when they may be out of date.

    pool: the threads that fetch the lists. Safe for several threads.
    """

    def __init__(
        self,
        directory: PeerDirectory,
        fetcher: Fetcher,
        pool: Workers,
        *,
        look: Callable[[], Sequence[Peer] | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """look: returns the current peers, None if unchanged; called before lists are fetched
        again."""
        self._look = look
        self._directory, self._fetcher, self._pool = directory, fetcher, pool
        self._clock = clock
        self._first: Outcome[None] | None = None
        self._wait_until_s = 0.0
        self._due_s = 0.0
        self._has_missed = self._has_warned = False

    def missed(self) -> None:
        """Record a range that only the remote had: the lists may be out of date."""
        self._has_missed = True

    def refresh(self) -> None:
        """Fetch the lists if they are due; the first time wait for them, for at most _FIRST_S."""
        now_s = self._clock()
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
        due = self._directory.due_for_list(self._clock(), older_s=self._again_s / 2, most=_MOST)
        wanted = [ObjectRange(path=list_name(peer), start=0, end=1, version=None) for peer in due]
        # The fetcher was closed or is late; PeerStore records the failures of peers.
        with contextlib.suppress(PenstockError):
            self._fetcher.fetch(wanted, lambda *_: None)


_log = logging.getLogger("penstock")

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
        self._client: PeerClient | None = None
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
        before = self._fetcher
        if client is not self._client or before is None:
            self._client = client
            store = self._peer_store = PeerStore(self.directory, client, meter=self._meter)
            self._fetcher = Fetcher(store, policy=_POLICY, meter=TrafficMeter())
            if before is not None:
                before.close()
        assert self._fetcher is not None
        self._lists = PeerLists(self.directory, self._fetcher, self._side, look=look)

    def renew(self) -> None:
        """Update the peers at the next range, on another thread: a new epoch may have other
        owners."""
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
        gate = Deliveries(deliver)
        try:
            self._fetch_both(fetcher, ranges, of_peers, others, gate, urgent=urgent)
        finally:
            gate.end()

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

    # -- ranges

    def _fetch_both(
        self,
        fetcher: Fetcher,
        ranges: Sequence[BlobRange],
        of_peers: list[int],
        others: list[int],
        gate: Deliveries,
        *,
        urgent: bool,
    ) -> None:
        pieces: dict[int, PartialAnswer] = {}

        def fetch_from_peers(_: None) -> None:
            self._fetch_from_peers(fetcher, ranges, of_peers, gate, pieces, urgent=urgent)

        if not others:
            fetch_from_peers(None)
        else:
            side = self._side.submit(fetch_from_peers, None)
            self._fetch_rest(ranges, others, gate, {}, urgent=urgent)
            try:
                side.result(timeout=_POLICY.retry_timeout_s + 1.0)
            except TimeoutError:  # it may still be queued after other calls
                side.cancel()  # the store delivers the rest
        if gate.error is not None:
            raise gate.error
        self._fetch_rest(ranges, gate.left(of_peers), gate, pieces, urgent=urgent)

    def _fetch_rest(
        self,
        ranges: Sequence[BlobRange],
        numbers: list[int],
        gate: Deliveries,
        pieces: dict[int, PartialAnswer],
        *,
        urgent: bool,
    ) -> None:
        """Fetch ranges from the store: whole ones, and the gaps between the pieces of others, which
        are joined with the pieces."""
        partial = {n: PartialRange(ranges[n], pieces[n].pieces) for n in numbers if n in pieces}
        wanted = [(n, gap) for n, part in partial.items() for gap in part.gaps]
        wanted += [(n, ranges[n]) for n in numbers if n not in partial]
        for number, part in partial.items():
            if not part.gaps:  # the peer's fill was completed meanwhile
                whole_bytes = ranges[number].segment.whole_bytes
                last = Answer(data=b"", version="", object_bytes=whole_bytes)
                gate.deliver(number, part.answer(last))
        if not wanted:
            return

        def deliver(place: int, answer: Answer) -> None:
            number, fetched = wanted[place]
            part = partial.get(number)
            if part is None:
                gate.deliver(number, answer)
            elif part.put(fetched.start, memoryview(answer.data)):
                gate.deliver(number, part.answer(answer))

        if self._lists is not None:
            self._lists.missed()
        self._store.fetch([fetched for _, fetched in wanted], deliver, urgent=urgent)

    def _fetch_from_peers(
        self,
        fetcher: Fetcher,
        ranges: Sequence[BlobRange],
        numbers: list[int],
        gate: Deliveries,
        pieces: dict[int, PartialAnswer],
        *,
        urgent: bool,
    ) -> None:
        """Deliver the ranges that peers have, and collect pieces of others. Raises only what
        `deliver` raises."""

        def keep_of(number: int) -> Keep | None:
            keep = ranges[number].keep
            if keep is None:
                return None
            return lambda start, data, crc: gate.keep(number, lambda: keep(start, data, crc))

        def deliver(place: int, answers: Answer) -> None:
            assert isinstance(answers, RangesAnswer)
            for number, answer in zip(wanted[place].numbers, answers.answers, strict=True):
                if isinstance(answer, PartialAnswer):
                    pieces[number] = answer
                elif answer is not NOT_FOUND:
                    whole_bytes = ranges[number].segment.whole_bytes
                    gate.deliver(number, replace(answer, object_bytes=whole_bytes))

        wanted = peer_ranges(ranges, numbers, keep_of)
        try:
            fetcher.fetch(wanted, deliver, urgent=urgent)
        except PenstockError as error:
            if gate.error is not None or self._is_closed:
                raise
            _log.info("Peers didn't answer in time, so the remote is used: %s", error)
