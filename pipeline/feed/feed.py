"""The moving part of a loader: the threads along the road, and the training loop at its end.

A feed owns the threads and the graphs and knows nothing of the facade, so that the facade's
finalizer can stop it. It goes on into the next epoch where the road does, so that an epoch's first
batch is there at once; where the user is anywhere else than it went, it drops what is in flight and
starts there.

On the CPU one batch is decoded ahead on a thread of its own: feeding DALI a batch takes 6 us a
sample, which the training loop would else wait for in every step. On CUDA the training loop does
it, as tensors belong to the stream that is current where they are taken; and so it does without
images, where nothing is left to do but to wrap arrays.
"""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING

from penstock.cache.base.heap import trim_heap
from penstock.cache.errors import ClosedError, StalledError
from penstock.cache.forks import watch
from penstock.cache.outcomes import STALL_TIMEOUT_S, Outcome
from penstock.cache.threads import (
    NAME_PREFIX,
    Workers,
    close_at_exit,
    is_impatient,
    not_at_exit,
)
from penstock.pipeline.feed.decoding import Decoding
from penstock.pipeline.feed.read_ahead import ReadAhead

if TYPE_CHECKING:
    from penstock.pipeline.feed.batch import Batch, Output
    from penstock.pipeline.feed.position import Position
    from penstock.pipeline.feed.prefetch import Prefetch
    from penstock.pipeline.feed.road import Road
    from penstock.pipeline.plan.steps import Cursor

# What stops a feed waits no longer for reads of a remote, which end by themselves, nor for any read
# behind a Ctrl-C.
_BRIEF_CLOSE_S = 1.0
# Beyond the time after which a read counts as hanging: that error is the better one.
_DECODE_SPARE_S = 30.0


class Feed:
    """Carries batches along a road, for one user. One thread takes; close() is safe to call twice.

    It begins where `position` says and moves that with every batch that it hands over.
    """

    def __init__(
        self,
        road: Road,
        position: Position,
        *,
        depth: int,
        read_threads: int,
        decodes_ahead: bool,
        prefetch: Prefetch | None = None,
        timeout_s: float = STALL_TIMEOUT_S,
        least_ahead: int = 0,
        most_ahead: int | None = None,
        turn: int = 1,
    ) -> None:
        """depth: batches in DALI at once. decodes_ahead: one more waits, finished. least_ahead:
        batches that are read ahead at least; most_ahead: at most, of a local dataset. turn: batches
        that a thread reads in one go."""
        self._road = road
        self._position = position
        self.prefetch = prefetch
        self._timeout_s = timeout_s
        self._close_until_s = math.inf  # when close() waits no longer
        self._readers = Workers(read_threads, name="read")
        self._decoder = Workers(1, name="decode")
        self._decodes_ahead = decodes_ahead
        read_ahead = ReadAhead(
            road,
            position,
            pool=self._readers,
            depth=depth,
            prefetch=prefetch,
            timeout_s=timeout_s,
            least_ahead=least_ahead,
            most_ahead=most_ahead,
            turn=turn,
        )
        self._decoding = Decoding(road, read_ahead, depth=depth)
        self._ahead: Outcome[Batch] | None = None  # the batch that is decoded ahead
        # Where the batch begins that comes next: the end of the one before it. None: there is none.
        self._coming: Cursor | None = None
        self._closed = False
        # Registered after DALI was imported: it runs before DALI's own hook takes the graph away.
        close_at_exit(self.close)
        watch(self)

    def disown(self) -> None:
        """Stop nothing in a forked child: the threads aren't there, and to close would hang."""
        self._closed = True
        not_at_exit(self.close)

    def start(self, cursor: Cursor) -> None:
        """Begin to read at a cursor, unless that is what is already under way."""
        if self._closed:
            raise ClosedError("This loader is closed; make a new one.")
        self._road.finisher.begin()
        if cursor == self._coming:
            if cursor.position == 0:
                self._go_on(cursor)
            return
        self._stop()
        self._decoding.start(cursor)
        self._coming = cursor
        if self._decodes_ahead:
            self._decode_ahead()

    def _go_on(self, start: Cursor) -> None:
        if self._decodes_ahead:  # where batches are decoded, behind the one that is
            self._decoder.submit(self._decoding.go_on, start)
        else:
            self._decoding.go_on(start)

    def check(self) -> None:
        """Raise what a rank told all to stop for: TooManyBadSamplesError, RankFailedError. Asked
        before each batch, and at an epoch's end: so ranks in step stop at the same one."""
        if self._position.received is not None:
            self._road.bad_count.check(self._position.received)

    def take(self) -> Output:
        """The batch at the user's position, behind check(); the position moves to its end. Raises
        what its reading or decoding raised; ask again to retry."""
        cursor = self._position.cursor
        if cursor != self._position.received:  # once for a batch: it asks another machine
            self._road.bad_count.check(cursor)
        try:
            return self._take(cursor)
        except Exception as error:  # raised again; the other ranks mustn't wait for this one
            self._road.bad_count.failed(error)
            raise

    def _take(self, cursor: Cursor) -> Output:
        began = time.perf_counter()
        self.start(cursor)
        self._coming = None  # whatever interrupts us from here on, the next call starts afresh
        batch = self._decoded_ahead() if self._decodes_ahead else self._decoding.next_batch()
        then = batch.step.then
        if then.epoch != cursor.epoch:
            self._readers.submit(lambda _: trim_heap(), None)
        output = self._road.hand_out(
            batch,
            wait_s=time.perf_counter() - began,
            begins_epoch=self._position.begins_epoch,
        )
        if self._road.endless or then.epoch == cursor.epoch:
            if self._decodes_ahead:
                self._decode_ahead()
            self._coming = then
        self._position.hand_over(batch.step)
        return output

    def _decode_ahead(self) -> None:
        # Known before it begins: whatever interrupts this, _stop() waits for what runs.
        self._ahead = Outcome()
        self._decoder.submit(lambda _: self._decoding.next_batch(), None, outcome=self._ahead)

    def _decoded_ahead(self) -> Batch:
        """The batch that is decoded ahead. Raises StalledError if DALI doesn't come back."""
        ahead = self._ahead
        assert ahead is not None
        patience_s = self._timeout_s + _DECODE_SPARE_S
        if not ahead.wait(patience_s):
            raise StalledError(
                f"No batch was decoded for {patience_s:.0f} s. The cores may be busy with "
                "something else, or DALI hangs: look at `top`, or raise timeout=."
            )
        batch = ahead.result()
        self._ahead = None
        return batch

    @property
    def _patience_s(self) -> float | None:
        """How long to wait for reads that nobody wants any more; None: to their end."""
        if self.prefetch is None and not is_impatient():
            return None
        # close() has that long in all, however many threads hang.
        return max(0.0, min(_BRIEF_CLOSE_S, self._close_until_s - time.monotonic()))

    def _stop(self) -> None:
        """Drop what is in flight."""
        self._coming = None
        ahead = self._ahead
        runs = ahead is not None and not ahead.cancel()
        self._decoding.cancel(timeout_s=self._patience_s)
        if ahead is not None and runs and not self._ended(ahead):
            # It waits for a read that hangs and ends when that does, touching nothing.
            self._decoder.close(timeout_s=0)
            self._decoder = Workers(1, name="decode")
        self._ahead = None  # not before: interrupted, the next stop waits for it
        self._decoding.stop()

    def _ended(self, ahead: Outcome[Batch]) -> bool:
        """Wait for the batch that is decoded ahead; False where it hangs in a read. Raises
        StalledError where it hangs in DALI."""
        patience_s = self._timeout_s if self._patience_s is None else self._patience_s
        if ahead.wait(patience_s):
            return True
        if self._decoding.is_reading:
            return False
        # It decodes: nobody may touch the graph before it is done.
        patience_s = self._timeout_s + _DECODE_SPARE_S
        if not ahead.wait(patience_s):
            raise StalledError(
                f"A batch that nobody wants any more has been decoding for {patience_s:.0f} s: "
                "DALI hangs and is left alone. Look at `top`, and end this process."
            )
        return True

    def close(self) -> None:
        """Stop the threads, drop what is in flight, release the graph."""
        if threading.current_thread().name.startswith(NAME_PREFIX):
            # The loader was collected on a thread of ours, which can't wait for itself.
            if not self._closed:
                self._decoder.submit(lambda _: self._close(), None)
            return
        self._close()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._close_until_s = time.monotonic() + _BRIEF_CLOSE_S
        not_at_exit(self.close)
        is_ours = threading.current_thread().name.startswith(NAME_PREFIX)
        is_quiet = False
        try:
            self._road.reader.close()  # whoever waits for a user's function waits no longer
            self._stop()
            is_quiet = True
        finally:
            if self.prefetch is not None:
                self.prefetch.close()
            is_quiet |= self._decoder.close(timeout_s=0 if is_ours else self._patience_s)
            self._readers.close(timeout_s=self._patience_s)
            if is_quiet:  # else DALI hangs or decodes, and to release it would do so too
                self._decoding.close()
