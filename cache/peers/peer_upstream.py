"""Fetch ranges from the other nodes' caches first, and from the store what they don't have.

Ranges that no peer is known to hold are requested from the store at once, beside those that peers
are asked for; what peers don't give follows. Whatever a peer does costs its ranges a request to the
store and a bounded time, and never fails a call. Each range is delivered once, and none after the
call's end.

Peers are asked what they hold before the first range, and again after misses.
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
    NOT_THERE,
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
    """Passes answers on to a caller's `deliver` until the first of its exceptions, or the end.

    Safe for several threads. number: a range's place in the call.
    """

    def __init__(self, deliver: Callable[[int, Answer], None]) -> None:
        self._deliver = deliver
        self._changed = threading.Condition()
        self._done: set[int] = set()
        self._active = 0
        self._keeping: set[int] = set()
        self._is_over = False
        self.error: BaseException | None = None

    def give(self, number: int, answer: Answer) -> None:
        """Deliver one answer; nothing where it was delivered or all is over. Raises what `deliver`
        raised, once it has."""
        with self._changed:
            if self.error is not None:
                raise self.error
            if self._is_over or number in self._done:
                return
            self._done.add(number)
            # Nothing of another's may land behind what is delivered.
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
        """Do what keeps some bytes of a range that isn't delivered. Raises what that raises, and
        ClosedError where all is over."""
        with self._changed:
            if self.error is not None:
                raise self.error
            if self._is_over or number in self._done:
                raise ClosedError("Others have brought what a peer was asked for.")
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
        """Deliver nothing more; returns when nothing is being delivered. Raises StalledError."""
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
        """Those of some ranges that weren't delivered."""
        with self._changed:
            return [number for number in numbers if number not in self._done]


_FIRST_S = 4.0
"""So long the first ranges wait for what peers say they hold."""
_AGAIN_S, _SOON_S = 10.0, 2.0
"""Lists are asked for again behind so long: short ones sooner, as they cost little."""
_SHORT = 100_000  # blobs in all of them
_MOST = 64
"""Peers that are asked at a time."""
_SHOWN = 5  # of those that don't answer
_NO_ANSWER = (
    f"no answer within {_FIRST_S:.0f} s. Check the address, that the job runs there, and that no "
    "firewall is in between: `penstock doctor --peer ADDRESS` tries each stage."
)


class PeerLists:
    """Keeps a directory's lists of what peers hold. Safe for several threads.

    pool: asks beside the threads that read.
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
        """look: who is there by now, asked before lists are asked for again."""
        self._look = look
        self._directory, self._fetcher, self._pool = directory, fetcher, pool
        self._clock = clock
        self._first: Outcome[None] | None = None
        self._wait_until_s = 0.0
        self._due_s = 0.0
        self._has_missed = self._has_warned = False

    def missed(self) -> None:
        """Note that a range had to be fetched from the remote: somebody may hold more by now."""
        self._has_missed = True

    def hear(self) -> None:
        """Have the lists asked for where that is due; the first time wait for them, a while."""
        now_s = self._clock()
        if self._first is None:
            self._due_s, self._wait_until_s = now_s + _SOON_S, now_s + _FIRST_S
            self._first = self._pool.submit(self._ask, None)
        elif self._has_missed and now_s >= self._due_s:
            self._due_s, self._has_missed = now_s + self._again_s, False
            self._pool.submit(self._look_and_ask, None)
        if not self._first.done():
            self._first.wait(self._wait_until_s - now_s)
        if not self._has_warned:
            self._has_warned = True
            self._warn_of_silence()

    @property
    def _again_s(self) -> float:
        share = min(1.0, self._directory.told_blobs / _SHORT)
        return _SOON_S + share * (_AGAIN_S - _SOON_S)

    def _warn_of_silence(self) -> None:
        directory = self._directory
        silent = [peer for peer in directory.peers[:_MOST] if not directory.has_heard(peer)]
        reasons: dict[str, list[Peer]] = {}
        for peer in silent:
            reasons.setdefault(directory.fault(peer) or _NO_ANSWER, []).append(peer)
        for reason, peers in reasons.items():
            shown = ", ".join(f"node {one.node} ({one.address})" for one in peers[:_SHOWN])
            more = f" and {len(peers) - _SHOWN} more" if len(peers) > _SHOWN else ""
            held = "they hold" if len(peers) > 1 else "it holds"
            warnings.warn(
                f"peers: {shown}{more}: {reason} As long as that is so, what {held} comes from the "
                "remote.",
                PenstockWarning,
                stacklevel=2,
            )

    def _look_and_ask(self, _: None) -> None:
        peers = None if self._look is None else self._look()
        if peers is not None:
            self._directory.know(peers)
        self._ask(None)

    def _ask(self, _: None) -> None:
        due = self._directory.unheard(self._clock(), older_s=self._again_s / 2, most=_MOST)
        wanted = [ObjectRange(path=list_name(peer), start=0, end=1, version=None) for peer in due]
        with contextlib.suppress(PenstockError):  # closed, or late; who is asked notes the rest
            self._fetcher.fetch(wanted, lambda *_: None)


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

    def reserve_fills(self, key: str, most: int) -> AbstractContextManager[int]:
        """Grant ranges that aren't urgent, as `Upstream.reserve_fills` says: of the connections to
        peers where one has the blob."""
        fetcher = self._fetcher
        if fetcher is not None and self.is_near(key):
            return fetcher.reserve_fills(most)
        return self._store.reserve_fills(key, most)

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
        pieces: dict[int, PartialAnswer] = {}
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
        pieces: dict[int, PartialAnswer],
        *,
        urgent: bool,
    ) -> None:
        """Put pieces together, and ask the store for what no peer gave: whole ranges, and what lies
        beside pieces."""
        halves = {n: PartialRange(ranges[n], pieces[n].pieces) for n in numbers if n in pieces}
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
        pieces: dict[int, PartialAnswer],
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
            assert isinstance(answers, RangesAnswer)
            for number, answer in zip(wanted[place].numbers, answers.answers, strict=True):
                if isinstance(answer, PartialAnswer):
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
