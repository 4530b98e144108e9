"""The batches that reading threads have in hand, and how many these shall be."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from penstock.cache.threads import Ordered

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.cache.threads import Workers
    from penstock.pipeline.feed.batch import Batch
    from penstock.pipeline.feed.position import Position
    from penstock.pipeline.feed.prefetch import Prefetch
    from penstock.pipeline.feed.road import Road
    from penstock.pipeline.plan.steps import Cursor, Step

# Batches that were read wait here beside those in DALI; more would only hold mapped pages.
READ_AHEAD = 2


class ReadAhead:
    """Reads batches ahead, in the order of the walk, over the end of an epoch too.

    Of a local dataset as many as keep DALI fed; of a remote one as many as hide its latency, but
    only one of an epoch that nobody has asked for yet: it may never be. One thread at a time may
    call; `cancel` may be called by another while `pop` waits.

    Small batches are read several in a turn of a thread: to hand one over from thread to thread
    takes longer than to read it. The first batch comes alone, as somebody waits for it.
    """

    def __init__(
        self,
        road: Road,
        position: Position,
        *,
        pool: Workers,
        depth: int,
        prefetch: Prefetch | None,
        timeout_s: float,
        least_ahead: int = 0,
        most_ahead: int | None = None,
        turn: int = 1,
    ) -> None:
        """pool: the reading threads. depth: batches in DALI at once. least_ahead: batches that are
        read ahead at least, most_ahead: at most, of a local dataset. turn: batches that a thread
        reads in one go; 1 with a prefetch, which counts them."""
        self._road = road
        self._position = position
        self._pool = pool
        self._depth, self._least_ahead, self._most_ahead = depth, least_ahead, most_ahead
        self._prefetch = prefetch
        self._timeout_s = timeout_s
        self._turn = turn
        self._stream: Ordered[list[Step], list[Batch | Exception]] | None = None
        self._at_hand: deque[Batch | Exception] = deque()  # what is left of a turn that was popped
        self._wanted = 0  # batches ahead, were the next epoch asked for
        self._waited_for: Ordered[list[Step], list[Batch | Exception]] | None = None

    def start(self, cursor: Cursor) -> None:
        """Begin to read at a cursor. Only where nothing was started since the last stop()."""
        ahead = self._depth + max(READ_AHEAD, self._least_ahead)
        if self._most_ahead is not None:
            ahead = min(ahead, max(1, self._most_ahead))
        if self._turn > 1:
            ahead = max(2, ahead // self._turn)
        self._wanted = 0
        if self._prefetch is not None:
            self._prefetch.seek(cursor)
            ahead = self._wanted = self._prefetch.first_ahead
        self._stream = Ordered(
            self._road.prepare_all,
            _turns(self._road.order(cursor), self._turn),
            pool=self._pool,
            ahead=ahead,
            timeout_s=self._timeout_s,
        )
        self._stream.fill()

    @property
    def is_waiting(self) -> bool:
        """Whether pop() waits for a read, other than one that was left behind by stop()."""
        return self._stream is not None and self._waited_for is self._stream

    @property
    def is_ready(self) -> bool:
        """Whether pop() would not wait."""
        assert self._stream is not None
        return bool(self._at_hand) or self._stream.ready()

    def pop(self) -> Batch | None:
        """The next batch; None behind the last one. Raises what its reading raised."""
        turn = self._at_hand or self._pop_turn()
        if not turn:
            return None
        batch = turn.popleft()
        if isinstance(batch, Exception):
            try:
                raise batch
            finally:
                del batch  # a traceback holds this frame, and that the error
        return batch

    def _pop_turn(self) -> deque[Batch | Exception]:
        """The next turn; nothing behind the last one."""
        stream = self._stream
        assert stream is not None
        self._waited_for = stream
        try:
            turn = deque(stream.pop())
            if len(turn) > 1 and self._stream is stream:  # else nobody wants the others any more
                self._at_hand = turn
            return turn
        except StopIteration:
            return deque()
        finally:
            if self._waited_for is stream:  # else another thread has taken this one's place
                self._waited_for = None

    def go_on(self, start: Cursor, *, decoding: int) -> None:
        """The epoch that begins there was asked for: read on with what was held back. decoding:
        batches in DALI."""
        if self._stream is not None and self._stream.ahead < self._wanted:
            self._stream.ahead = self._within_epoch(start, start, decoding=decoding)
            self._stream.fill()

    def read_on(self, batch: Batch, size_bytes: int, *, decoding: int) -> None:
        """A batch was decoded: read on, and let the prefetch count it. size_bytes: of it."""
        stream, step = self._stream, batch.step
        if stream is None:
            return
        if self._prefetch is not None:
            self._wanted = stream.ahead = self._prefetch.ahead(
                size_bytes, waited_s=batch.read_wait_s, ready_share=stream.ready_share()
            )
            if self._prefetch.is_cold:
                stream.ahead = self._within_epoch(step.start, step.then, decoding=decoding)
        stream.fill()
        if self._prefetch is not None:
            self._prefetch.fill(size_bytes, epoch=step.start.epoch)

    def _within_epoch(self, start: Cursor, then: Cursor, *, decoding: int) -> int:
        """Of the batches that are wanted ahead of a step, those that don't fetch for an epoch that
        may never come.

        One of the next epoch's is read, so that it begins at once; the others are when it is asked
        for.
        """
        if start.epoch > self._position.asked_epoch:
            return 0
        most = self._wanted + decoding
        left = self._road.walk.left(then, most=most) if then.epoch == start.epoch else 0
        return min(self._wanted, max(0 if decoding else 1, left + 1 - decoding))

    def cancel(self, *, timeout_s: float | None) -> None:
        """Let go of all reads; a pop() that waits for one raises. timeout_s: how long to wait for
        those that run already, None: to their end."""
        if self._stream is not None:
            self._stream.close(timeout_s=timeout_s)

    def stop(self) -> None:
        """Drop what was read, behind cancel()."""
        self._stream = None
        self._at_hand.clear()


def _turns(steps: Iterator[Step], size: int) -> Iterator[list[Step]]:
    """The first step alone, the others in lists of so many, while there are some."""
    for step in steps:
        yield [step]
        if size > 1:
            break
    while turn := list(islice(steps, size)):
        yield turn
