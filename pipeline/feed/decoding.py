"""The batches that DALI works on: from those that were read to those that can be handed out."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from penstock.cache.errors import ClosedError

if TYPE_CHECKING:
    from penstock.pipeline.feed.batch import Batch
    from penstock.pipeline.feed.read_ahead import ReadAhead
    from penstock.pipeline.feed.road import Road
    from penstock.pipeline.plan.steps import Cursor


class Decoding:
    """Makes the batches behind a cursor, one after the other, over the end of an epoch too.

    One thread at a time may call: the feed's own where batches are decoded ahead, else the training
    loop's. `cancel` may be called by another while `next_batch` waits for a read.
    """

    def __init__(self, road: Road, read_ahead: ReadAhead, *, depth: int) -> None:
        """depth: batches in DALI at once."""
        self._road = road
        self._read_ahead = read_ahead
        self._depth = depth
        self._in_dali: deque[Batch] = deque()  # in DALI, the oldest first
        self._failure: Exception | None = None
        self._stopping = threading.Event()

    @property
    def is_reading(self) -> bool:
        """Whether next_batch() waits for a read."""
        return self._read_ahead.is_waiting

    def start(self, cursor: Cursor) -> None:
        """Begin to read at a cursor. Only where nothing was started since the last stop()."""
        self._stopping = threading.Event()  # who hangs in a read keeps the old one
        self._read_ahead.start(cursor)

    def go_on(self, start: Cursor) -> None:
        """Read on with what was held back, as the epoch that begins there was asked for."""
        self._read_ahead.go_on(start, decoding=len(self._in_dali))

    def next_batch(self) -> Batch:
        """The next batch, finished. Raises what its reading or decoding raised."""
        read_wait_s = self._refill(wait=True)
        if not self._in_dali:
            failure, self._failure = self._failure, None
            raise failure or AssertionError("no step is left")
        waiting = time.perf_counter()
        batch = self._in_dali[0]
        self._road.decode(batch)
        self._in_dali.popleft()
        batch.read_wait_s, batch.decode_wait_s = read_wait_s, time.perf_counter() - waiting
        self._refill(wait=False)
        size_bytes, meter = batch.size_bytes, self._road.meter
        meter.read_s += batch.read_s
        meter.load_s += batch.load_s
        meter.bytes_disk += size_bytes
        # Behind DALI: the readers hold the GIL for a moment, and woken before they would delay it
        # by the interpreter's switch interval, 5 ms a batch.
        self._read_ahead.read_on(batch, size_bytes, decoding=len(self._in_dali))
        self._road.finish(batch)
        return batch

    def _refill(self, *, wait: bool) -> float:
        """Move what was read into DALI; wait for it only if asked to and DALI has nothing.

        Returns the seconds waited. Raises ClosedError where it was stopped meanwhile: then nothing
        here may be touched any more.
        """
        stopping, waited_s = self._stopping, 0.0
        while len(self._in_dali) < self._depth and self._failure is None:
            if (self._in_dali or not wait) and not self._read_ahead.is_ready:
                break
            began = time.perf_counter()
            batch, failure = self._pop()
            if stopping.is_set():
                raise ClosedError("This batch is not wanted any more.")
            if batch is None:
                self._failure = failure
                break
            waited_s += time.perf_counter() - began
            self._road.begin_decode(batch)
            self._in_dali.append(batch)
        return waited_s

    def _pop(self) -> tuple[Batch | None, Exception | None]:
        """The next that was read; or its error, kept to be raised where its own batch is due."""
        try:
            return self._read_ahead.pop(), None
        except Exception as error:
            return None, error

    def cancel(self, *, timeout_s: float | None) -> None:
        """Let go of all reads, as `ReadAhead.cancel`; a next_batch() that waits for one touches
        nothing any more."""
        self._stopping.set()
        self._read_ahead.cancel(timeout_s=timeout_s)

    def stop(self) -> None:
        """Drop what is in flight, behind cancel() and when no next_batch() runs."""
        self._read_ahead.stop()
        self._failure = None
        self._in_dali.clear()
        self._road.graphs.drain()

    def close(self) -> None:
        """Release the graphs, behind stop()."""
        self._road.graphs.close()
