"""The moving part of a loader: reading threads ahead, DALI behind them, one consumer.

A run owns the threads and the graph and knows nothing of the facade, so that the facade's finalizer
can stop it. It decodes on into the next epoch (`endless`), so that an epoch's first batch is there
at once; asked for any other cursor, it drops what is in flight and starts there.
"""

from __future__ import annotations

import atexit
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cache.errors import ClosedError
from cache.heap import trim_heap
from cache.threads import STALL_TIMEOUT_S, Ordered, Workers

if TYPE_CHECKING:
    import torch

    from augment.graph import Decoded, Graph
    from pipeline.bad_samples import BadState
    from pipeline.batches import BatchReader, Prepared
    from pipeline.prefetch import Prefetch
    from pipeline.resident_graph import ResidentGraph
    from pipeline.statistics import Meter
    from pipeline.steps import Cursor, Step, Walk

# Prepared batches wait here beside those in DALI; more would only hold mapped pages.
PREPARED_AHEAD = 2
# Reads of a remote that hangs end by themselves; what stops a run waits for them no longer.
_REMOTE_CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Taken:
    """One decoded batch: what was prepared for it, and the image tensor (None without images)."""

    prepared: Prepared
    images: torch.Tensor | None


class Run:
    """Takes batches in the order of the walk. One thread takes; close() is safe to call twice."""

    def __init__(
        self,
        *,
        reader: BatchReader,
        walk: Walk,
        graph: Graph | ResidentGraph | None,
        depth: int,
        endless: bool,
        meter: Meter,
        read_threads: int,
        prefetch: Prefetch | None = None,
        timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        self._reader = reader
        self._bad = reader.bad_samples
        self._walk = walk
        self._graph = graph
        self._depth = depth
        self._endless = endless
        self._meter = meter
        self._prefetch = prefetch
        self._timeout_s = timeout_s
        self._pool = Workers(read_threads, name="read")
        self._stream: Ordered[Step, Prepared] | None = None
        self._fed: deque[Prepared] = deque()
        self._failure: Exception | None = None
        self._next: Cursor | None = None
        self._closed = False
        self._after: Cursor | None = None  # the place behind the last batch that was handed out
        self._checked: Cursor | None = None
        self._held_back = 0  # batches ahead that wait for the next epoch to be asked for
        # Registered after DALI was imported: it runs before DALI's own hook takes the graph away.
        atexit.register(self.close)

    def start(self, cursor: Cursor) -> None:
        """Begin to read at a cursor, unless that is what is already under way."""
        if self._closed:
            raise ClosedError("This loader is closed; make a new one.")
        if cursor == self._next:
            if cursor.position == 0:
                self._go_on(cursor)
            return
        self._stop_stream()
        ahead = self._depth + PREPARED_AHEAD
        if self._prefetch is not None:
            self._prefetch.seek(cursor)
            ahead = self._prefetch.first_ahead
        steps = self._walk.steps(cursor, endless=self._endless)
        self._stream = Ordered(
            self._reader,
            steps,
            pool=self._pool,
            ahead=ahead,
            timeout_s=self._timeout_s,
        )
        self._stream.fill()
        self._next = cursor

    def _go_on(self, cursor: Cursor) -> None:
        """Read on with what was held back at the end of an epoch, now that the next begins."""
        if self._held_back and self._stream is not None:
            self._stream.ahead = self._within_epoch(self._held_back, cursor, cursor)
            self._stream.fill()

    def _within_epoch(self, ahead: int, cursor: Cursor, then: Cursor) -> int:
        """Of so many batches ahead, those that don't fetch for an epoch that may never come.

        One of the next epoch's is read, so that it begins at once; the others are when it is asked
        for.
        """
        left = self._walk.left(then) if then.epoch == cursor.epoch else 0
        allowed = max(0 if self._fed else 1, left + 1 - len(self._fed))
        self._held_back = ahead if allowed < ahead else 0
        return min(ahead, allowed)

    def check(self) -> None:
        """Raise what a rank told all to stop for: TooManyBadSamplesError, RankFailedError. Asked
        before each batch, and at an epoch's end: so ranks in step stop at the same one."""
        if self._after is not None:
            self._bad.check(self._after)
            self._checked = self._after

    def take(self, cursor: Cursor) -> Taken:
        """The batch at a cursor. Raises what its reading or decoding raised; ask again to retry.

        Raises what check() raises.
        """
        if cursor != self._checked:  # once for each batch: it is a question to another machine
            self._bad.check(cursor)
        self._checked = None
        try:
            return self._take(cursor)
        except Exception as error:  # raised again; the other ranks mustn't wait for this one
            self._bad.failed(error)
            raise

    def _take(self, cursor: Cursor) -> Taken:
        began = time.perf_counter()
        self.start(cursor)
        self._next = None  # whatever interrupts us from here on, the next call starts afresh
        read_s = self._feed(wait=True)
        if not self._fed:
            failure, self._failure = self._failure, None
            raise failure or AssertionError(f"no step at {cursor}")
        waiting = time.perf_counter()
        decoded = self._graph.outputs_marked() if self._graph else None
        prepared = self._fed.popleft()
        if decoded and decoded.bad.keys() - prepared.left_out.keys():
            prepared = self._repaired(prepared, decoded)
        decode_s = time.perf_counter() - waiting
        self._feed(wait=False)
        then = prepared.step.then
        if then.epoch != cursor.epoch:
            self._pool.submit(lambda _: trim_heap(), None)
        if self._endless or then.epoch == cursor.epoch:
            self._next = then
        size_bytes = sum(map(len, prepared.encoded.encoded))
        self._meter.read_s += prepared.read_s
        self._meter.load_s += prepared.load_s
        self._meter.bytes_disk += size_bytes
        self._meter.delivered(
            prepared.samples,
            wait_s=time.perf_counter() - began,
            read_s=read_s,
            decode_s=decode_s,
        )
        # Before the batch is handed out, so that the others see it when they ask for the next.
        self._bad.handed_out(cursor, prepared.bad_ids)
        self._after = then
        if then.epoch != cursor.epoch:
            self._bad.begin(then.epoch)
        # Last: readers that wake up hold the GIL for a moment, and woken before the hand-over's own
        # work they would delay it by the interpreter's switch interval, 5 ms a batch.
        if self._stream is not None:
            if self._prefetch is not None:
                ready = self._stream.ready_share()
                ahead = self._prefetch.ahead(size_bytes, waited_s=read_s, ready_share=ready)
                if self._prefetch.is_cold:
                    ahead = self._within_epoch(ahead, cursor, then)
                self._stream.ahead = ahead
            self._stream.fill()
            if self._prefetch is not None:
                self._prefetch.fill(size_bytes)
        return Taken(prepared, decoded.images if decoded else None)

    def _repaired(self, prepared: Prepared, decoded: Decoded) -> Prepared:
        """Put substitutes in the place of what didn't decode (in the images too), or mark it."""
        if prepared.valid is not None:
            return self._reader.marked(prepared, decoded.bad)
        assert self._graph is not None
        bad = decoded.bad
        while bad:
            rows = sorted(bad)
            prepared, part, draws = self._reader.replaced(prepared, bad)
            assert draws is not None
            again = self._graph.decode(part, draws)
            decoded.images[rows] = again.images
            bad = {rows[place]: why for place, why in again.bad.items()}
        return prepared

    def bad_state(self) -> BadState:
        """What a state says of bad samples."""
        return self._bad.state()

    def restore_bad(self, bad: int) -> None:
        """Go on in an epoch of which so many bad samples were counted."""
        self._bad.restore(bad)
        self._after = self._checked = None

    def _feed(self, *, wait: bool) -> float:
        """Move what is prepared into DALI; wait for it only if asked to and DALI has nothing.

        Returns the seconds waited.
        """
        assert self._stream is not None
        waited_s = 0.0
        while len(self._fed) < self._depth and self._failure is None:
            if (self._fed or not wait) and not self._stream.ready():
                break
            began = time.perf_counter()
            try:
                prepared = self._stream.pop()
            except StopIteration:
                break
            except Exception as error:  # kept, and raised where its own batch is due
                self._failure = error
                break
            waited_s += time.perf_counter() - began
            if self._graph and prepared.draws is not None:
                self._graph.feed(prepared.encoded, prepared.draws, bad=prepared.left_out)
            self._fed.append(prepared)
        return waited_s

    @property
    def _patience_s(self) -> float | None:
        """How long to wait for reads that nobody wants any more; None: to their end."""
        return _REMOTE_CLOSE_S if self._prefetch is not None else None

    def _stop_stream(self) -> None:
        self._next = None
        self._held_back = 0
        self._failure = None
        if self._stream is not None:
            self._stream.close(timeout_s=self._patience_s)
            self._stream = None
        self._fed.clear()
        if self._graph:
            self._graph.drain()

    def close(self) -> None:
        """Stop the threads, drop what is in flight, release the graph."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        try:
            self._stop_stream()
        finally:
            if self._prefetch is not None:
                self._prefetch.close()
            self._pool.close(timeout_s=self._patience_s)
            if self._graph:
                self._graph.close()
