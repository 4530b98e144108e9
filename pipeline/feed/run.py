"""The moving part of a loader: threads that read and decode ahead, and one consumer.

A run owns the threads and the graph and knows nothing of the facade, so that the facade's finalizer
can stop it. It decodes on into the next epoch (`endless`), so that an epoch's first batch is there
at once; asked for any other cursor, it drops what is in flight and starts there.

On the CPU one batch is made ahead on a thread of its own: feeding DALI a batch takes 6 us a sample,
which the training loop would else wait for in every step. On CUDA the training loop makes it
itself, as tensors belong to the stream that is current where they are taken.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cache.base.heap import trim_heap
from penstock.cache.errors import ClosedError, StalledError
from penstock.cache.forks import watch
from penstock.cache.outcomes import STALL_TIMEOUT_S, Outcome
from penstock.cache.threads import (
    NAME_PREFIX,
    Workers,
    close_at_exit,
    not_at_exit,
)
from penstock.pipeline.feed.decoding import Decoding

if TYPE_CHECKING:
    import torch

    from penstock.augment.graph import Graph
    from penstock.pipeline.feed.batches import BatchReader, Prepared
    from penstock.pipeline.feed.decoding import Made
    from penstock.pipeline.feed.finish import Finish
    from penstock.pipeline.feed.prefetch import Prefetch
    from penstock.pipeline.feed.resident.graph import ResidentGraph
    from penstock.pipeline.plan.steps import Cursor, Walk
    from penstock.pipeline.report.meter import Meter

# Reads of a remote that hangs end by themselves; what stops a run waits for them no longer.
_REMOTE_CLOSE_S = 1.0
# Beyond the time after which a read is told to hang: that error is the better one.
_DECODE_SPARE_S = 30.0


@dataclass(frozen=True, slots=True)
class Taken:
    """One decoded batch: what was prepared for it, and the tensors that are handed out."""

    prepared: Prepared
    tensors: tuple[torch.Tensor, ...]


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
        made_ahead: bool,
        prefetch: Prefetch | None = None,
        timeout_s: float = STALL_TIMEOUT_S,
        finish: Finish | None = None,
    ) -> None:
        """depth: batches in DALI at once. made_ahead: one more waits, decoded. finish: makes what
        is handed out, where batches are made; None: the images alone."""
        self._finish = finish
        self._bad = reader.bad_samples
        self._endless = endless
        self._meter = meter
        self._prefetch = prefetch
        self._timeout_s = timeout_s
        self._close_until_s = math.inf  # when close() waits no longer
        self._readers = Workers(read_threads, name="read")
        self._maker = Workers(1, name="decode")
        self._made_ahead = made_ahead
        self._decoding = Decoding(
            reader=reader,
            walk=walk,
            graph=graph,
            depth=depth,
            endless=endless,
            meter=meter,
            pool=self._readers,
            prefetch=prefetch,
            timeout_s=timeout_s,
            finish=finish,
        )
        self._making: Outcome[Made] | None = None
        self._next: Cursor | None = None
        self._closed = False
        self._after: Cursor | None = None  # the place behind the last batch that was handed out
        self._checked: Cursor | None = None
        # Registered after DALI was imported: it runs before DALI's own hook takes the graph away.
        close_at_exit(self.close)
        watch(self)

    def disown(self) -> None:
        """In a forked child: there is nothing to stop, and to close what is there would hang."""
        self._closed = True
        not_at_exit(self.close)

    def start(self, cursor: Cursor) -> None:
        """Begin to read at a cursor, unless that is what is already under way."""
        if self._closed:
            raise ClosedError("This loader is closed; make a new one.")
        if self._finish is not None:
            self._finish.begin()
        if cursor == self._next:
            if cursor.position == 0:
                self._go_on(cursor)
            return
        self._stop()
        self._decoding.start(cursor)
        self._next = cursor
        if self._made_ahead:
            self._make_ahead()

    def _go_on(self, cursor: Cursor) -> None:
        if self._made_ahead:  # where batches are made, behind the one that is being made
            self._maker.submit(self._decoding.go_on, cursor)
        else:
            self._decoding.go_on(cursor)

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
        made = self._made() if self._made_ahead else self._decoding.make()
        prepared = made.prepared
        then = prepared.step.then
        if then.epoch != cursor.epoch:
            self._readers.submit(lambda _: trim_heap(), None)
        goes_on = self._endless or then.epoch == cursor.epoch
        wait_s = time.perf_counter() - began
        # What making it waited for says what we waited for.
        share = wait_s / max(made.read_s + made.decode_s, 1e-9)
        self._meter.count_batch(
            prepared.samples,
            wait_s=wait_s,
            read_s=made.read_s * share,
            decode_s=made.decode_s * share,
        )
        # Before the batch is handed out, so that the others see it when they ask for the next.
        self._bad.handed_out(cursor, prepared.bad_ids)
        self._after = then
        if then.epoch != cursor.epoch:
            self._bad.begin(then.epoch)
        if goes_on:
            if self._made_ahead:
                self._make_ahead()
            self._next = then
        return Taken(prepared, made.tensors)

    def _make_ahead(self) -> None:
        # Known before it begins: whatever interrupts this, _stop() waits for what runs.
        self._making = Outcome()
        self._maker.submit(lambda _: self._decoding.make(), None, outcome=self._making)

    def _made(self) -> Made:
        """The batch that is being made. Raises StalledError if DALI doesn't come back."""
        making = self._making
        assert making is not None
        patience_s = self._timeout_s + _DECODE_SPARE_S
        if not making.wait(patience_s):
            raise StalledError(
                f"No batch was decoded for {patience_s:.0f} s. The cores may be busy with "
                "something else, or DALI hangs: look at `top`, or raise timeout=."
            )
        made = making.result()
        self._making = None
        return made

    def bad_before(self, at: Cursor) -> int:
        """Bad samples of an epoch before a place, over all ranks: what a state says."""
        return self._bad.count_before(at)

    def restore_bad(self, bad: int) -> None:
        """Go on in an epoch of which so many bad samples were counted."""
        self._bad.restore(bad)
        self._after = self._checked = None

    @property
    def _patience_s(self) -> float | None:
        """How long to wait for reads that nobody wants any more; None: to their end."""
        if self._prefetch is None:
            return None
        # close() has that long in all, however many threads hang.
        return max(0.0, min(_REMOTE_CLOSE_S, self._close_until_s - time.monotonic()))

    def _stop(self) -> None:
        """Drop what is in flight."""
        self._next = None
        making = self._making
        runs = making is not None and not making.cancel()
        self._decoding.cancel(timeout_s=self._patience_s)
        if making is not None and runs and not self._ended(making):
            # It waits for a read that hangs and ends when that does, touching nothing.
            self._maker.close(timeout_s=0)
            self._maker = Workers(1, name="decode")
        self._making = None  # not before: interrupted, the next stop waits for it
        self._decoding.stop()

    def _ended(self, making: Outcome[Made]) -> bool:
        """Wait for a batch that is being made; False where it hangs in a read. Raises StalledError
        where it hangs in DALI."""
        patience_s = self._timeout_s if self._patience_s is None else self._patience_s
        if making.wait(patience_s):
            return True
        if self._decoding.is_reading:
            return False
        # It decodes: nobody may touch the graph before it is done.
        patience_s = self._timeout_s + _DECODE_SPARE_S
        if not making.wait(patience_s):
            raise StalledError(
                f"A batch that is not wanted any more was not decoded for {patience_s:.0f} s: DALI "
                "hangs, and is left alone. Look at `top`; end this process."
            )
        return True

    def close(self) -> None:
        """Stop the threads, drop what is in flight, release the graph."""
        if threading.current_thread().name.startswith(NAME_PREFIX):
            # The loader was collected on a thread of ours, which can't wait for itself.
            if not self._closed:
                self._maker.submit(lambda _: self._close(), None)
            return
        self._close()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._close_until_s = time.monotonic() + _REMOTE_CLOSE_S
        not_at_exit(self.close)
        is_ours = threading.current_thread().name.startswith(NAME_PREFIX)
        is_quiet = False
        try:
            self._stop()
            is_quiet = True
        finally:
            if self._prefetch is not None:
                self._prefetch.close()
            is_quiet |= self._maker.close(timeout_s=0 if is_ours else self._patience_s)
            self._readers.close(timeout_s=self._patience_s)
            if is_quiet:  # else DALI hangs or decodes, and to release it would do so too
                self._decoding.close()
