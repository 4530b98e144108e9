"""From prepared batches to decoded ones: reading threads ahead, DALI behind them.

One thread at a time may call: where batches are made ahead that is the run's own thread, else the
training loop's. `stop` and `close` may be called by another while `make` waits for a read.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cache.errors import ClosedError
from penstock.cache.threads import Ordered

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from penstock.augment.batches import DecodedBatch
    from penstock.augment.graph import Graph
    from penstock.cache.threads import Workers
    from penstock.pipeline.feed.batches import BatchReader, Prepared
    from penstock.pipeline.feed.prefetch import Prefetch
    from penstock.pipeline.feed.resident.graph import ResidentGraph
    from penstock.pipeline.plan.steps import Cursor, Step, Walk
    from penstock.pipeline.report.meter import Meter

# Prepared batches wait here beside those in DALI; more would only hold mapped pages.
PREPARED_AHEAD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """One decoded batch: what was prepared for it, and the tensors that are handed out.

    read_s, decode_s: that making it waited for bytes and for DALI.
    """

    prepared: Prepared
    tensors: tuple[torch.Tensor, ...]
    read_s: float
    decode_s: float


class Decoding:
    """Makes the batches behind a cursor, one after the other, over the end of an epoch too."""

    def __init__(
        self,
        *,
        reader: BatchReader,
        walk: Walk,
        graph: Graph | ResidentGraph | None,
        depth: int,
        endless: bool,
        meter: Meter,
        pool: Workers,
        prefetch: Prefetch | None,
        timeout_s: float,
        finish: Callable[[Prepared, torch.Tensor | None], tuple[torch.Tensor, ...]] | None = None,
    ) -> None:
        """depth: batches in DALI at once. pool: the reading threads. finish: makes what is handed
        out; None: the images alone."""
        self._finish = finish or _images_alone
        self._reader = reader
        self._walk = walk
        self._graph = graph
        self._depth = depth
        self._endless = endless
        self._meter = meter
        self._pool = pool
        self._prefetch = prefetch
        self._timeout_s = timeout_s
        self._stream: Ordered[Step, Prepared] | None = None
        self._fed: deque[Prepared] = deque()
        self._failure: Exception | None = None
        self._held_back = 0  # batches ahead that wait for the next epoch to be asked for
        self._asked_epoch = 0
        self._stopping = threading.Event()
        self.is_reading = False  # make() waits for a read

    def start(self, cursor: Cursor) -> None:
        """Begin to read at a cursor. Only where nothing was started since the last stop()."""
        self._stopping = threading.Event()  # a make() that hangs in a read keeps the old one
        self._asked_epoch = cursor.epoch
        ahead = self._depth + PREPARED_AHEAD
        if self._prefetch is not None:
            self._prefetch.seek(cursor)
            ahead = self._prefetch.first_ahead
        steps = self._walk.steps(cursor, endless=self._endless)
        self._stream = Ordered(
            self._reader, steps, pool=self._pool, ahead=ahead, timeout_s=self._timeout_s
        )
        self._stream.fill()

    def go_on(self, cursor: Cursor) -> None:
        """The epoch that begins at a cursor is asked for: read on with what was held back."""
        self._asked_epoch = cursor.epoch
        if self._held_back and self._stream is not None:
            self._stream.ahead = self._within_epoch(self._held_back, cursor, cursor)
            self._stream.fill()

    def make(self) -> Made:
        """The next batch. Raises what its reading or decoding raised."""
        read_s = self._feed(wait=True)
        if not self._fed:
            failure, self._failure = self._failure, None
            raise failure or AssertionError("no step is left")
        waiting = time.perf_counter()
        decoded = self._graph.outputs_marked() if self._graph else None
        prepared = self._fed.popleft()
        if decoded and decoded.bad.keys() - prepared.left_out.keys():
            prepared = self._repaired(prepared, decoded)
        decode_s = time.perf_counter() - waiting
        self._feed(wait=False)
        size_bytes = sum(map(len, prepared.encoded.encoded))
        self._meter.read_s += prepared.read_s
        self._meter.load_s += prepared.load_s
        self._meter.bytes_disk += size_bytes
        self._read_on(prepared.step, size_bytes, read_s=read_s)
        tensors = self._finish(prepared, decoded.images if decoded else None)
        return Made(prepared=prepared, tensors=tensors, read_s=read_s, decode_s=decode_s)

    def _read_on(self, step: Step, size_bytes: int, *, read_s: float) -> None:
        """Wake the readers. Last in making a batch: they hold the GIL for a moment, and woken
        before they would delay it by the interpreter's switch interval, 5 ms a batch."""
        if self._stream is None:
            return
        if self._prefetch is not None:
            ready = self._stream.ready_share()
            ahead = self._prefetch.ahead(size_bytes, waited_s=read_s, ready_share=ready)
            if self._prefetch.is_cold:
                ahead = self._within_epoch(ahead, step.start, step.then)
            self._stream.ahead = ahead
        self._stream.fill()
        if self._prefetch is not None:
            self._prefetch.fill(size_bytes)

    def _within_epoch(self, ahead: int, cursor: Cursor, then: Cursor) -> int:
        """Of so many batches ahead, those that don't fetch for an epoch that may never come.

        One of the next epoch's is read, so that it begins at once; the others are when it is asked
        for.
        """
        if cursor.epoch > self._asked_epoch:
            self._held_back = ahead
            return 0
        left = self._walk.left(then) if then.epoch == cursor.epoch else 0
        allowed = max(0 if self._fed else 1, left + 1 - len(self._fed))
        self._held_back = ahead if allowed < ahead else 0
        return min(ahead, allowed)

    def _repaired(self, prepared: Prepared, decoded: DecodedBatch) -> Prepared:
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

    def _feed(self, *, wait: bool) -> float:
        """Move what is prepared into DALI; wait for it only if asked to and DALI has nothing.

        Returns the seconds waited. Raises ClosedError where it was stopped meanwhile: then nothing
        here may be touched any more.
        """
        assert self._stream is not None
        stream, stopping, waited_s = self._stream, self._stopping, 0.0
        while len(self._fed) < self._depth and self._failure is None:
            if (self._fed or not wait) and not stream.ready():
                break
            began = time.perf_counter()
            prepared, failure = self._popped(stream)
            if stopping.is_set():
                raise ClosedError("This batch is not wanted any more.")
            if prepared is None:
                self._failure = failure
                break
            waited_s += time.perf_counter() - began
            if self._graph and prepared.draws is not None:
                self._graph.feed(prepared.encoded, prepared.draws, bad=prepared.left_out)
            self._fed.append(prepared)
        return waited_s

    def _popped(self, stream: Ordered[Step, Prepared]) -> tuple[Prepared | None, Exception | None]:
        """The next that is read; or its error, kept to be raised where its own batch is due."""
        self.is_reading = True
        try:
            return stream.pop(), None
        except StopIteration:
            return None, None
        except Exception as error:
            return None, error
        finally:
            self.is_reading = False

    def cancel(self, *, timeout_s: float | None) -> None:
        """Let go of all reads; a make() that waits for one raises. timeout_s: how long to wait for
        those that run already, None: to their end."""
        self._stopping.set()
        if self._stream is not None:
            self._stream.close(timeout_s=timeout_s)

    def stop(self) -> None:
        """Drop what is in flight, behind cancel() and when no make() runs."""
        self._stream = None
        self._held_back = 0
        self._failure = None
        self._fed.clear()
        if self._graph:
            self._graph.drain()

    def close(self) -> None:
        """Release the graph, behind stop()."""
        if self._graph:
            self._graph.close()


def _images_alone(_: Prepared, images: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return () if images is None else (images,)
