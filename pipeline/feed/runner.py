"""Schedule the stages of batches on threads, in the order of the walk, and deliver the batches.

Reading threads work ahead (`ReadAhead`), DALI decodes behind them (`BatchDecoder`), and the
training loop takes what is finished (`PipelineRunner`). `ReadScale` sizes this: threads that read,
batches that a thread reads in one turn, batches that may wait. The runner owns the threads and the
graphs and knows nothing of the facade, so that the facade's finalizer can stop it.

It continues into the next epoch by itself, so the first batch of an epoch is ready at once. Where
the user goes anywhere else, it drops what is in flight and starts there.

On the CPU one batch is decoded ahead on a thread of its own: to feed DALI a batch takes 6 us a
sample, for which the training loop would otherwise wait in every step. On CUDA the training loop
decodes, because tensors belong to the stream that is current where they are taken. Without images
it does so too, because nothing is left to do but to wrap arrays.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from penstock.cache import (
    NAME_PREFIX,
    STALL_TIMEOUT_S,
    ClosedError,
    Ordered,
    Outcome,
    StalledError,
    Workers,
    close_at_exit,
    is_impatient,
    not_at_exit,
    watch,
)
from penstock.cache.base import trim_heap, usable_cores
from penstock.readers.fields import array_form, number_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.pipeline.feed.batch import Batch, Output
    from penstock.pipeline.feed.batch_pipeline import BatchPipeline
    from penstock.pipeline.feed.position import Position
    from penstock.pipeline.feed.prefetch import Prefetch
    from penstock.pipeline.options import NativeOptions
    from penstock.pipeline.plan import Cursor, Step
    from penstock.readers import Source
    from penstock.readers.fields import FieldType

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
        road: BatchPipeline,
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


class BatchDecoder:
    """Makes the batches behind a cursor, one after the other, over the end of an epoch too.

    One thread at a time may call: the feed's own where batches are decoded ahead, else the training
    loop's. `cancel` may be called by another while `next_batch` waits for a read.
    """

    def __init__(self, road: BatchPipeline, read_ahead: ReadAhead, *, depth: int) -> None:
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
        if self._road.graphs is not None:
            self._road.graphs.drain()

    def close(self) -> None:
        """Release the graphs, behind stop()."""
        if self._road.graphs is not None:
            self._road.graphs.close()


# What stops a feed waits no longer for reads of a remote, which end by themselves, nor for any read
# behind a Ctrl-C.
_BRIEF_CLOSE_S = 1.0
# Beyond the time after which a read counts as hanging: that error is the better one.
_DECODE_SPARE_S = 30.0


class PipelineRunner:
    """Carries batches along a road, for one user. One thread takes; close() is safe to call twice.

    It begins where `position` says and moves that with every batch that it hands over.
    """

    def __init__(
        self,
        road: BatchPipeline,
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
        self._decoding = BatchDecoder(road, read_ahead, depth=depth)
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
            batch, wait_s=time.perf_counter() - began, begins_epoch=self._position.begins_epoch
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


# Threads that read ahead. From a mapped pack one thread checks 4 GB/s of warm pages and reads cold
# ones ahead; a second spends a third more CPU time to be no faster. Files and downloads wait, and
# masks are decoded there, so then several work at once.
MAPPED_READ_THREADS = 1
READ_THREADS = 4
# A thread reads a batch; of a remote as many batches as hide its latency, up to so many.
REMOTE_READ_THREADS = 32

# Units are decoded on the reading threads: by as many as there are cores, up to so many; beside
# those that decode images, by two, as there one goes on while the other decodes.
MOST_UNIT_THREADS, UNIT_THREADS_BESIDE = 8, 2

# To read samples of so many bytes is to copy them, whatever holds them: a thread a core, as two do
# twice as much as one (2.8 MB on 2 cores: 2,500 against 1,600), and four no more than one.
LARGE_SAMPLE_BYTES = 2**20

# A thread reads batches of so few bytes several in a turn; more would only hold memory.
TURN_BYTES = 2**20
MOST_IN_A_TURN = 8

# Batches of local data that are read ahead take so many bytes at most, or are two: one that waits
# and one that is read.
AHEAD_BYTES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadScale:
    """What batches of a loader take to read. threads: that read; turn: batches that one reads in a
    go; most_ahead: batches that wait or are read at most, but for one that is always read."""

    threads: int
    turn: int
    most_ahead: int

    @classmethod
    def of(
        cls,
        dataset: Source,
        options: NativeOptions,
        *,
        fields: Iterable[str],
        are_slow: bool,
        is_plain: bool,
    ) -> ReadScale:
        """Of the fields that are read. are_slow: some are decoded there, and that takes longer than
        to read them. is_plain: nothing but reading is done with batches: no images, no Map."""
        sample_bytes = sample_bytes_of(dataset, fields)
        most_ahead = max(1, int(AHEAD_BYTES / max(1, sample_bytes * options.sizes.per_rank)))
        contents = dataset.contents
        turn, threads = 1, READ_THREADS
        if dataset.remote_shards is not None:
            threads = REMOTE_READ_THREADS
        elif contents.units is not None or contents.is_encoded:
            most = MOST_UNIT_THREADS if is_plain else UNIT_THREADS_BESIDE
            threads = min(most, options.world.threads(usable_cores()))
            if is_plain:
                turn = _turn(sample_bytes * options.sizes.per_rank)
        elif is_plain and sample_bytes >= LARGE_SAMPLE_BYTES:
            threads = max(2, min(READ_THREADS, options.world.threads(usable_cores())))
        elif not contents.is_file_per_sample and options.read != "pread" and not are_slow:
            threads = MAPPED_READ_THREADS
            # Threads that wait for files had better wait for a batch each.
            mean_bytes = float(contents.shard_bytes.sum()) / max(1, contents.samples)
            if is_plain:
                turn = _turn(mean_bytes * options.sizes.per_rank)
        return cls(threads=threads, turn=turn, most_ahead=most_ahead)


def _turn(batch_bytes: float) -> int:
    return max(1, min(MOST_IN_A_TURN, int(TURN_BYTES / max(1.0, batch_bytes))))


def sample_bytes_of(dataset: Source, fields: Iterable[str]) -> float:
    """Bytes of memory that a sample takes once it is read: as the schema says where arrays have one
    shape, and for what else is read what the files hold beside those."""
    contents = dataset.contents
    schema, fields = dataset.schema, [*fields]
    known = {name: _dense_bytes(type) for name, type in schema.items()}
    read = float(sum(known.get(name) or 0 for name in fields))
    if all(known.get(name) is not None for name in fields if name in schema):
        return read
    stored = float(contents.shard_bytes.sum()) / max(1, contents.samples)
    return read + max(0.0, stored - sum(size or 0 for size in known.values()))


def _dense_bytes(type: FieldType) -> int | None:
    """Bytes of a sample where all have the same."""
    number, form = number_dtype(type), array_form(type)
    if number is not None:
        return number.itemsize
    if form is None or form.is_ragged:
        return None
    return math.prod(form.fixed_shape) * form.dtype.itemsize
