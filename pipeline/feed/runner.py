"""Schedule the stages of batches on threads, in the order of the walk, and deliver the batches.

Reading threads work ahead (`ReadAhead`). `PipelineRunner` feeds their batches to DALI, and the
training loop receives the finished ones. `ReadScale` chooses the number of reading threads, the
batches that a thread reads in one turn, and the batches that may wait. The runner owns the threads
and the graphs. It doesn't reference the facade, so the facade's finalizer can stop it.

The runner continues into the next epoch by itself, so the first batch of an epoch is ready at once.
If the user moves elsewhere, it drops the batches in flight and starts there.

With a function for `device_augment=` on CUDA, or images that the CPU decodes for it, the training
loop makes one more batch before it gets one, if that needs no wait, so that the copy and the
function work beside the training step.

On the CPU, a thread of its own decodes one batch ahead: feeding DALI takes 6 us a sample, for which
the training loop would otherwise wait in every step. On CUDA the training loop decodes, because
tensors belong to the stream that is current when they are made. Without images there is
nothing to decode: the reading threads finish the batches of the CPU, and the training loop takes
them.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from typing import TYPE_CHECKING, Self

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

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.pipeline.feed.batch import Batch, Output
    from penstock.pipeline.feed.batch_pipeline import BatchPipeline
    from penstock.pipeline.feed.device_augment import DeviceAugment
    from penstock.pipeline.feed.position import Position
    from penstock.pipeline.feed.prefetch import Prefetch
    from penstock.pipeline.options import LoaderOptions
    from penstock.pipeline.plan import Cursor, Step
    from penstock.readers import Source
    from penstock.readers.fieldtypes import FieldType

    Turns = Ordered[list[Step], list[Batch | Exception]]

# Batches that wait after reading, in addition to those in DALI. More would only hold mapped pages.
READ_AHEAD = 2

# Without images, so many reads are started together, because starting one takes the training
# loop's thread a third of its time for a batch.
STARTED_TOGETHER = 4


@dataclass(eq=False)
class ReadAhead:
    """Reads batches ahead, in the order of the walk, across epochs.

    For a local dataset it reads enough to keep DALI busy, and for a remote one enough to hide the
    latency. It reads only one batch of a remote epoch that the user hasn't requested, because that
    epoch may never begin. One thread at a time may call it; another one may call `cancel` while
    `pop` waits.

    A thread reads several small batches in one turn, because passing a batch between threads takes
    longer than reading it. The first batch is read alone, because the training loop waits for it,
    and the turns grow from there. pool: the reading threads.
    """

    pipeline: BatchPipeline
    position: Position
    scale: ReadScale
    pool: Workers
    prefetch: Prefetch | None
    timeout_s: float

    def __post_init__(self) -> None:
        pipeline, is_joined = self.pipeline, self.scale.is_joined
        self._prepare = pipeline.prepare_all if is_joined else pipeline.prepare_each
        # One for each thread, and one that is delivered. Turns of large arrays take more memory.
        self._least_turns = self.pool.count + 1 if is_joined else 2
        self._stream: Turns | None = None
        self._rest: deque[Batch | Exception] = deque()  # the rest of the latest turn
        self._wanted = 0  # batches to read ahead if the next epoch were requested
        self._few = 0  # batches in flight below which more are read
        self._waited_for: Turns | None = None

    def start(self, cursor: Cursor) -> None:
        """Begin to read at a cursor. `stop` must have been called after an earlier start."""
        scale = self.scale
        ahead = scale.depth + max(READ_AHEAD, scale.least_ahead) + scale.together - 1
        if scale.most_ahead is not None:
            ahead = min(ahead, max(1, scale.most_ahead))
        if scale.turn > 1:
            ahead = max(self._least_turns, ahead // scale.turn)
        self._wanted, self._few = 0, ahead - min(scale.together, (ahead + 1) // 2)
        if self.prefetch is not None:
            self.prefetch.seek(cursor)
            ahead = self._wanted = self.prefetch.first_ahead
        self._stream = Ordered(
            self._prepare,
            _turns(self.pipeline.order(cursor), scale.turn),
            pool=self.pool,
            ahead=ahead,
            timeout_s=self.timeout_s,
        )
        self._stream.fill()

    @property
    def is_waiting(self) -> bool:
        """True if pop() waits for a read of the current start."""
        return self._stream is not None and self._waited_for is self._stream

    @property
    def is_ready(self) -> bool:
        """True if pop() would not wait."""
        assert self._stream is not None
        return bool(self._rest) or self._stream.ready()

    def pop(self) -> Batch | None:
        """Return the next batch; None after the last one. Raises the error of its reading."""
        turn = self._rest or self._pop_turn()
        if not turn:
            return None
        batch = turn.popleft()
        if isinstance(batch, Exception):
            try:
                raise batch
            finally:
                del batch  # the traceback would hold this frame, and the frame the error
        return batch

    def _pop_turn(self) -> deque[Batch | Exception]:
        """Wait for the next turn; empty after the last one."""
        stream = self._stream
        assert stream is not None
        self._waited_for = stream
        try:
            turn = deque(stream.pop())
            if len(turn) > 1 and self._stream is stream:  # not stopped in the meantime
                self._rest = turn
            return turn
        except StopIteration:
            return deque()
        finally:
            if self._waited_for is stream:  # otherwise another thread pops from a new stream
                self._waited_for = None

    def begin_epoch(self, start: Cursor, *, decoding: int) -> None:
        """Read the batches that were held back until their epoch was requested.

        start: of the epoch. decoding: batches in DALI.
        """
        if self._stream is not None and self._stream.ahead < self._wanted:
            self._stream.ahead = self._ahead_in_epoch(start, start, decoding=decoding)
            self._stream.fill()

    def replenish(self, batch: Batch, *, decoding: int) -> None:
        """Start further reads after a batch was decoded, and let the prefetch count the batch."""
        stream, step, size_bytes = self._stream, batch.step, batch.content.bytes_read
        if stream is None or (self.prefetch is None and len(stream) > self._few):
            return
        if self.prefetch is not None:
            self._wanted = stream.ahead = self.prefetch.ahead(
                size_bytes, waited_s=batch.read_wait_s, ready_share=stream.ready_share()
            )
            if self.prefetch.is_cold:
                stream.ahead = self._ahead_in_epoch(step.start, step.then, decoding=decoding)
        stream.fill()
        if self.prefetch is not None:
            self.prefetch.fill(size_bytes, epoch=step.start.epoch)

    def _ahead_in_epoch(self, start: Cursor, then: Cursor, *, decoding: int) -> int:
        """Return how many of the wanted batches to read, without fetching for a later epoch.

        Of the next epoch, which may never begin, only one batch is read, so that it can begin at
        once. The others follow when it is requested.
        """
        if start.epoch > self.position.requested_epoch:
            return 0
        most = self._wanted + decoding
        left = self.pipeline.walk.left(then, most=most) if then.epoch == start.epoch else 0
        return min(self._wanted, max(0 if decoding else 1, left + 1 - decoding))

    def cancel(self, *, timeout_s: float | None) -> None:
        """Cancel all reads; a waiting pop() raises.

        timeout_s: how long to wait for reads that have begun; None waits until they end.
        """
        if self._stream is not None:
            self._stream.close(timeout_s=timeout_s)

    def stop(self) -> None:
        """Drop the batches that were read. `cancel` comes first."""
        self._stream = None
        self._rest.clear()


def _turns(steps: Iterator[Step], size: int) -> Iterator[list[Step]]:
    """Yield lists of 1, 2, 4 and then up to `size` steps; none extends beyond an epoch's end."""
    most = 1
    turn: list[Step] = []
    for step in steps:
        turn.append(step)
        if len(turn) == most or step.then.epoch != step.start.epoch:
            yield turn
            most, turn = min(2 * most, size), []
    if turn:
        yield turn


@dataclass(eq=False)
class PipelineRunner:
    """Runs a pipeline for one user: it begins at a position and moves it with every batch.

    brief_close_s: how long stopping waits for reads of a remote, which end by themselves, and for
    all reads after a Ctrl-C. decode_spare_s: a decode counts as hanging so much later than a read,
    because the error of the read is more helpful. decodes_ahead: decode one more batch ahead. One
    thread may request batches.
    """

    brief_close_s = 1.0
    decode_spare_s = 30.0

    pipeline: BatchPipeline
    position: Position
    scale: InitVar[ReadScale]
    _: KW_ONLY
    decodes_ahead: bool
    prefetch: Prefetch | None = None
    timeout_s: float = STALL_TIMEOUT_S

    def __post_init__(self, scale: ReadScale) -> None:
        pipeline = self.pipeline
        self._close_until_s = math.inf  # when close() stops waiting
        self.read_threads = scale.threads
        # DALI keeps all cores busy: a thread that waits for one would delay the feeding of DALI.
        self._workers = partial(Workers, lets_others_finish=not pipeline.has_images)
        self._readers = self._workers(scale.threads, name="read")
        self._decoder = self._workers(1, name="decode")
        self._depth = scale.depth
        self._reads = ReadAhead(
            pipeline, self.position, scale, self._readers, self.prefetch, self.timeout_s
        )
        self._in_dali: deque[Batch] = deque()  # the oldest first
        self._failure: Exception | None = None  # of the read that comes after them
        self._stopping = threading.Event()
        self._waited_s = 0.0  # for the reads of the current batch
        self._ahead: Outcome[Batch] | None = None  # the batch that is decoded ahead
        self._made: Batch | Exception | None = None  # the batch that was augmented ahead
        self._next: Cursor | None = None  # where the next batch in flight begins
        self._closed = False
        # Registered after DALI was imported, so it runs before DALI's own hook destroys the graph.
        close_at_exit(self.close)
        watch(self)

    def disown(self) -> None:
        """Mark as closed in a forked child, which has none of the threads; close() would hang."""
        self._closed = True
        not_at_exit(self.close)

    def start(self, cursor: Cursor) -> None:
        """Begin to read at a cursor, unless the next batch in flight begins there."""
        if self._closed:
            raise ClosedError("This loader is closed; make a new one.")
        self.pipeline.finisher.begin()
        if cursor == self._next:
            if cursor.position == 0:
                if self.decodes_ahead:  # on the decoding thread, after the batch that it decodes
                    self._decoder.submit(self._begin_epoch, cursor)
                else:
                    self._begin_epoch(cursor)
            return
        self._stop()
        self._stopping = threading.Event()  # a thread that hangs in a read keeps the old event
        self._reads.start(cursor)
        self._next = cursor
        if self.decodes_ahead:
            self._decode_ahead()

    def _begin_epoch(self, start: Cursor) -> None:
        """Read the batches that were held back until their epoch was requested."""
        self._reads.begin_epoch(start, decoding=len(self._in_dali))

    def check(self) -> None:
        """Raise the error for which a rank asked all ranks to stop, if there is one.

        This is TooManyBadSamplesError or RankFailedError. It is called before each batch and at the
        end of an epoch, so that ranks in step stop at the same batch.
        """
        if self.position.received is not None:
            self.pipeline.bad_count.check(self.position.received)

    def next_output(self) -> Output:
        """Return the output of the batch at the user's position, and move the position to its end.

        `check` comes first. Raises the error of reading or decoding; call again to retry.
        """
        cursor, received = self.position.cursor, self.position.received
        # Once per batch, because it sends a request.
        if cursor is not received and cursor != received:
            self.pipeline.bad_count.check(cursor)
        try:
            return self._next_output(cursor)
        except Exception as error:  # raised again; the other ranks mustn't wait for this one
            self.pipeline.bad_count.report_failure(error)
            raise

    def _next_output(self, cursor: Cursor) -> Output:
        began = time.perf_counter()
        if cursor is not self._next or cursor.position == 0:
            self.start(cursor)
        self._next = None  # if an interrupt comes from here on, the next call starts again
        device = self.pipeline.on_device
        if device is not None:
            is_ahead = self._made is not None
            batch = self._made_here(device)
            began += 0.0 if is_ahead else batch.augment_s
        elif self.decodes_ahead:
            batch = self._decoded_ahead()
        else:
            batch = self._decode()
            self.pipeline.finish(batch)
        then = batch.step.then
        if then.epoch != cursor.epoch:
            self._readers.submit(lambda _: trim_heap(), None)
        output = self.pipeline.deliver(
            batch, wait_s=time.perf_counter() - began, begins_epoch=self.position.begins_epoch
        )
        if not self.decodes_ahead:
            self._reads.replenish(batch, decoding=len(self._in_dali))
        if self.pipeline.endless or then.epoch == cursor.epoch:
            if self.decodes_ahead and self._ahead is None:
                self._decode_ahead()
            if device is not None and then.epoch == cursor.epoch:
                self._make_ahead(device)
            self._next = then
        self.position.deliver(batch.step)
        return output

    def _made_here(self, device: DeviceAugment) -> Batch:
        """Return the next batch on the device, augmented there; it may have been made ahead."""
        made, self._made = self._made, None
        if made is None:
            made = self._decoded_ahead() if self.decodes_ahead else None
            with device.on_stream():
                if made is None:
                    made = self._decode()
                    self.pipeline.finish(made)
                self.pipeline.augment(made)
        if isinstance(made, Exception):
            raise made
        return made

    def _make_ahead(self, device: DeviceAugment) -> None:
        """Make one more batch, for which the user's function then works beside the step on the
        batch that is delivered. It waits for no read. An error is raised when its batch is due."""
        if not device.is_ahead or not self._is_ready:
            return
        try:
            self._made = made = self._made_here(device)
        except Exception as error:
            self._made = error
            return
        step = made.step
        goes_on = self.pipeline.endless or step.then.epoch == step.start.epoch
        if self.decodes_ahead and goes_on:
            self._decode_ahead()

    @property
    def _is_ready(self) -> bool:
        """True if the next batch can be made without a wait for reads."""
        if self.decodes_ahead:
            return self._ahead is not None and self._ahead.done()
        return bool(self._in_dali) or self._reads.is_ready

    def _decode_ahead(self) -> None:
        # Set before the task begins: if an interrupt comes in between, _stop() waits for the task.
        self._ahead = Outcome()
        self._decoder.submit(self._finished, None, outcome=self._ahead)

    def _finished(self, _: None) -> Batch:
        """Decode and finish the next batch, on the thread that decodes ahead.

        The reading threads that wake up compete for the GIL with this one, which may hold it up for
        the interpreter's switch interval, 5 ms. So DALI comes first, and on the training loop's
        thread all other work on the batch.
        """
        batch = self._decode()
        self._reads.replenish(batch, decoding=len(self._in_dali))
        self.pipeline.finish(batch)
        return batch

    def _decode(self) -> Batch:
        """Return the next batch, decoded. Raises the error of its reading or decoding, and
        ClosedError if it was cancelled; the thread must then change nothing any more.
        """
        self._waited_s = 0.0
        if self.pipeline.images is None:
            read = self._pop()
            assert read is not None, "no step is left"
            read.read_wait_s = self._waited_s
            return read
        self._feed(wait=True)
        if not self._in_dali:
            failure, self._failure = self._failure, None
            raise failure or AssertionError("no step is left")
        waiting = time.perf_counter()
        batch = self._in_dali[0]
        self.pipeline.decode(batch)
        self._in_dali.popleft()
        batch.read_wait_s, batch.decode_wait_s = self._waited_s, time.perf_counter() - waiting
        self._feed(wait=False)
        return batch

    def _feed(self, *, wait: bool) -> None:
        """Feed batches that were read to DALI. It waits only if `wait` is set and DALI has none."""
        while len(self._in_dali) < self._depth and self._failure is None:
            if (self._in_dali or not wait) and not self._reads.is_ready:
                break
            stopping = self._stopping
            try:
                batch = self._pop()
            except Exception as error:
                if stopping.is_set():
                    raise
                self._failure = error  # raised later, when its own batch is due
                break
            if batch is None:
                break
            self.pipeline.begin_decode(batch)
            self._in_dali.append(batch)

    def _pop(self) -> Batch | None:
        """Wait for the next batch that was read; None after the last one. Raises the error of its
        reading, and ClosedError if it was cancelled."""
        stopping, began = self._stopping, time.perf_counter()
        batch = self._reads.pop()
        if stopping.is_set():
            raise ClosedError("This batch was cancelled.")
        self._waited_s += time.perf_counter() - began
        return batch

    def _decoded_ahead(self) -> Batch:
        """Wait for the batch that is decoded ahead. Raises StalledError if DALI hangs."""
        ahead = self._ahead
        assert ahead is not None
        patience_s = self.timeout_s + self.decode_spare_s
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
        """How long to wait for cancelled reads; None waits until they end."""
        if self.prefetch is None and not is_impatient():
            return None
        # This is the limit of close() in total, even if several threads hang.
        return max(0.0, min(self.brief_close_s, self._close_until_s - time.monotonic()))

    def _stop(self) -> None:
        """Drop the batches in flight."""
        self._next = None
        ahead = self._ahead
        runs = ahead is not None and not ahead.cancel()
        self._stopping.set()
        self._reads.cancel(timeout_s=self._patience_s)
        if ahead is not None and runs and not self._wait_for(ahead):
            # The thread waits for a read that hangs. It ends with that read and changes nothing.
            self._decoder.close(timeout_s=0)
            self._decoder = self._workers(1, name="decode")
        # Only now: after an interrupt, the next stop has to wait for the batch ahead.
        self._ahead = self._made = self._failure = None
        self._reads.stop()
        self._in_dali.clear()
        if self.pipeline.images is not None:
            self.pipeline.images.drain()

    def _wait_for(self, ahead: Outcome[Batch]) -> bool:
        """Wait for the batch that is decoded ahead; return False if it hangs in a read.

        Raises StalledError if it hangs in DALI.
        """
        patience_s = self.timeout_s if self._patience_s is None else self._patience_s
        if ahead.wait(patience_s):
            return True
        if self._reads.is_waiting:
            return False
        # It is decoding, and no other thread may use the graph until it has finished.
        patience_s = self.timeout_s + self.decode_spare_s
        if not ahead.wait(patience_s):
            raise StalledError(
                f"A cancelled batch has been decoding for {patience_s:.0f} s: DALI hangs and can't "
                "be stopped. Look at `top`, and end this process."
            )
        return True

    def close(self) -> None:
        """Stop the threads, drop batches in flight and release the graphs. Safe to call twice."""
        if threading.current_thread().name.startswith(NAME_PREFIX):
            # One of our own threads garbage-collected the loader, and it can't wait for itself.
            if not self._closed:
                self._decoder.submit(lambda _: self._close(), None)
            return
        self._close()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._close_until_s = time.monotonic() + self.brief_close_s
        not_at_exit(self.close)
        is_ours = threading.current_thread().name.startswith(NAME_PREFIX)
        is_quiet = False
        try:
            self.pipeline.reader.close()  # ends waits for a user's function
            self._stop()
            is_quiet = True
        finally:
            if self.prefetch is not None:
                self.prefetch.close()
            is_quiet |= self._decoder.close(timeout_s=0 if is_ours else self._patience_s)
            self._readers.close(timeout_s=self._patience_s)
            # Otherwise DALI hangs or decodes, and releasing it would hang, too.
            if is_quiet and self.pipeline.images is not None:
                self.pipeline.images.close()


# Reading threads. For a mapped pack, one thread checks 4 GB/s of warm pages and reads cold ones
# ahead; a second one costs a third more CPU time without being faster. Files and downloads make
# threads wait, and masks take time to decode, so several threads are used for them.
MAPPED_READ_THREADS = 1
# Small samples of one size are copied by one call for many: on 2 cores, two threads read 1.2 to 1.9
# times as many as one.
DENSE_READ_THREADS = 2
READ_THREADS = 4
# A thread reads one batch at a time, so this bounds the remote batches that hide the latency.
REMOTE_READ_THREADS = 32

# Units are decoded on the reading threads: one per core up to the first number; two if DALI decodes
# images at the same time, so that one can read while the other decodes.
MOST_UNIT_THREADS, UNIT_THREADS_WITH_IMAGES = 8, 2

# Reading a sample of this size is mostly copying, so there is one thread per core: on 2 cores, with
# 2.8 MB a sample, two threads read 2,500 samples/s and one 1,600; four are no faster.
LARGE_SAMPLE_BYTES = 2**20

# A thread reads several batches in one turn up to this size. Passing a turn to the training loop
# costs as much as reading 10 batches of 64 kB; larger turns would only hold memory.
TURN_BYTES, MOST_IN_A_TURN = 2**23, 64

# Of large batches it reads a few: starting a turn takes the training loop's thread as long as
# receiving a batch. Of batches of units, more samples then share a unit, and of 3 MB each they take
# 10 % less CPU time.
LARGE_TURN_BYTES, MOST_LARGE_IN_A_TURN = 2**24, 4

# Of images a thread reads at least two batches at once: a read makes some 100 calls of numpy, with
# their code out of the processor's cache, so two small ones take 15 % more time than a large one.
# Each part of a mixture is read by a call of its own, so that many parts need more batches.
PART_READ_S, PART_SAMPLE_S = 6e-5, 2.5e-6
IMAGES_TURN_BYTES, MOST_IMAGES_IN_A_TURN = 2**26, 16

# Local batches are read ahead up to this size, but at least two: one that waits and one being read.
AHEAD_BYTES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadScale:
    """The scale of a loader's reading.

    threads: reading threads. depth: batches in DALI at once. least_ahead, most_ahead: the least and
    the most batches of a local dataset that wait or are being read, without the one that is always
    being read. turn: batches that a thread reads at once; 1 with a prefetch, which counts batches.
    is_joined: they are read by one read. together: turns of a local dataset that are started at
    once, when so many are missing.
    """

    threads: int
    depth: int
    least_ahead: int = 0
    most_ahead: int | None = None
    turn: int = 1
    is_joined: bool = True
    together: int = 1

    @classmethod
    def of(cls, pipeline: BatchPipeline, options: LoaderOptions, fields: Sequence[str]) -> Self:
        """Choose the scale for the fields that are read."""
        reader, has_images = pipeline.reader, pipeline.has_images
        dataset, maps = reader.dataset, [each.maps for each in reader.readers or (reader,)]
        # Threads that keep all processes of Maps busy; None without Maps.
        map_threads = max((each.threads for each in maps if each is not None), default=None)
        is_plain = not has_images and map_threads is None  # batches are only read
        sample_bytes = sample_bytes_of(dataset, fields)
        batch_bytes = max(1.0, sample_bytes * options.per_rank)
        most_ahead = max(1, int(AHEAD_BYTES / batch_bytes))
        contents = dataset.contents
        turn, is_joined, threads = 1, True, READ_THREADS
        if dataset.remote_shards is not None:
            threads = REMOTE_READ_THREADS
        elif contents.units is not None or contents.is_encoded:
            most = MOST_UNIT_THREADS if is_plain else UNIT_THREADS_WITH_IMAGES
            threads = min(most, options.world.threads(usable_cores()))
            if is_plain:
                turn = _turn(batch_bytes, most_ahead)
        elif is_plain and sample_bytes >= LARGE_SAMPLE_BYTES:
            turn, is_joined = _turn(batch_bytes, most_ahead), False
            threads = max(2, min(READ_THREADS, options.world.threads(usable_cores())))
        elif not (
            contents.is_file_per_sample or options.read == "pread" or reader.payloads.are_slow
        ):
            threads = MAPPED_READ_THREADS
            # Not for image folders: threads that wait for files should wait for one batch each.
            if has_images and map_threads is None:
                turn = _turn_of_images(1, options.per_rank, batch_bytes)
            elif is_plain:
                turn = _turn(batch_bytes, most_ahead)
                if all(
                    _dense_bytes(dataset.schema[name]) for name in fields if name in dataset.schema
                ):
                    threads = min(DENSE_READ_THREADS, options.world.threads(usable_cores()))
        if contents.mixture is not None and has_images and dataset.remote_shards is None:
            turn = _turn_of_images(len(contents.mixture.parts), options.per_rank, batch_bytes)
        # Without images DALI gets nothing: one batch waits in its place, the others are read ahead.
        depth = options.depth if has_images else 1
        units_threads = threads if contents.units is not None else 0
        return cls(
            threads=max(threads, map_threads or 0),
            depth=depth,
            least_ahead=max(map_threads or 0, units_threads, READ_AHEAD + options.depth - depth),
            most_ahead=most_ahead - depth,
            turn=turn,
            is_joined=is_joined,
            together=1 if has_images or turn > 1 else STARTED_TOGETHER,
        )


def _turn(batch_bytes: float, most_ahead: int) -> int:
    """Return the number of batches of a size that a thread reads at once.

    most_ahead: batches that may wait or be read; there are two turns.
    """
    batch_bytes = max(1.0, batch_bytes)
    small = min(MOST_IN_A_TURN, int(TURN_BYTES / batch_bytes))
    large = min(MOST_LARGE_IN_A_TURN, int(LARGE_TURN_BYTES / batch_bytes), most_ahead // 2)
    return max(1, small, large)


def _turn_of_images(parts: int, batch_size: int, batch_bytes: float) -> int:
    """Return the number of batches of images that a thread reads at once: two, or as many as make
    the reads of its parts, of `PART_READ_S` each, cost at most `PART_SAMPLE_S` a sample."""
    wanted = max(2, math.ceil(parts * PART_READ_S / (PART_SAMPLE_S * batch_size)))
    return max(1, min(wanted, MOST_IMAGES_IN_A_TURN, int(IMAGES_TURN_BYTES / batch_bytes)))


def sample_bytes_of(dataset: Source, fields: Iterable[str]) -> float:
    """Return the bytes of memory that a sample takes once it is read.

    For fields of one shape they follow from the schema; all other fields together are estimated by
    the rest of the sample's bytes in the files.
    """
    contents = dataset.contents
    schema, fields = dataset.schema, [*fields]
    known = {name: _dense_bytes(type) for name, type in schema.items()}
    read = float(sum(known.get(name) or 0 for name in fields))
    if all(known.get(name) is not None for name in fields if name in schema):
        return read
    return read + max(0.0, contents.sample_bytes - sum(size or 0 for size in known.values()))


def _dense_bytes(type: FieldType) -> int | None:
    """Return the bytes of each sample of a type; None if samples differ."""
    number, form = type.number, type.form
    if number is not None:
        return number.itemsize
    if form is None or form.is_ragged:
        return None
    return math.prod(form.fixed_shape) * form.dtype.itemsize
