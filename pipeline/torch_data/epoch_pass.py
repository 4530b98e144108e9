"""Run one pass over an epoch of a torch dataset, and count what it has delivered.

Several passes may be active; the loader's mark follows the latest (`Bookmark`). A pass passes the
epoch to the dataset, counts the bad samples that were replaced, and moves batches to their device.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.cache import check_process, watch
from penstock.pipeline.torch_data.mark import Mark, WorkerPosition, WorkerRequest, has_state
from penstock.pipeline.torch_data.random_states import freeze, thaw
from penstock.pipeline.torch_data.torch_loaders import TorchIterator

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.pipeline.feed import BadCount
    from penstock.pipeline.members import Membership
    from penstock.pipeline.report import Meter
    from penstock.pipeline.torch_data.index_order import PassRequests
    from penstock.pipeline.torch_data.mark import WorkerMessage
    from penstock.pipeline.torch_data.pass_setup import PassSetup
    from penstock.pipeline.torch_data.torch_loaders import TorchLoaders


class Bookmark:
    """The mark behind the latest batch of the loader's latest pass; older passes don't move it.

    mark: what was delivered. number: of the latest pass. source: the source of the latest pass,
    which without workers has the dataset's state. is_restored: the mark is a state's, and the next
    pass begins exactly there. has_begun: some pass has delivered a batch.
    """

    def __init__(self) -> None:
        self.mark = Mark()
        self.number = 0
        self.source: Any = None
        self.is_restored = False
        self.has_begun = False
        self._is_decided = False  # a state has fixed the seeds and states of the epoch's draws

    def open(self, setup: PassSetup) -> int:
        """Begin a pass at the mark, and return its number.

        An epoch that begins draws new seeds. An epoch that was left in its middle begins again,
        except if it has reached its promised length.
        """
        if not self.is_restored and not self._is_decided:
            if setup.has_reached_length(self.mark):
                self.mark = setup.after(self.mark)
            else:
                workers = () if self.mark.batches else self.mark.workers
                self.mark = Mark(epoch=self.mark.epoch, workers=workers)
        self.number += 1
        return self.number

    def start(self, number: int, mark: Mark, source: Any) -> None:
        """Set the mark and the source of the pass with this number."""
        if number == self.number:
            self.mark, self.source = mark, source

    def move(self, number: int, mark: Mark) -> None:
        """Set the mark after the pass with this number has delivered a batch or ended its epoch."""
        self.has_begun = True
        if number == self.number:
            self.mark = mark
            self.is_restored = self._is_decided = False

    def decide(self, mark: Mark) -> None:
        """Fix the seeds and states of the epoch that begins, because a state has promised them."""
        self.mark, self._is_decided = mark, True

    def go_to(self, epoch: int, setup: PassSetup) -> None:
        """Go to the start of an epoch; the current epoch changes nothing."""
        has_reached_length = not self.is_restored and setup.has_reached_length(self.mark)
        if epoch != self.mark.epoch or has_reached_length:
            # Datasets of persistent workers keep their states in any epoch.
            self.mark = replace(setup.after(self.mark), epoch=epoch)
            self.is_restored = self._is_decided = False
            self.number += 1

    def restore(self, mark: Mark) -> None:
        """Go to the mark of a state."""
        self.mark = mark
        self.is_restored, self._is_decided = True, False
        self.number += 1


class DatasetEpoch:
    """The epoch of a dataset: its attribute `epoch`, or else the one that was set here."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._latest: int | None = None

    def now(self) -> int | None:
        """Return the epoch's number; None if the dataset has no epochs or none was set."""
        if not callable(getattr(self._dataset, "set_epoch", None)):
            return None
        epoch = getattr(self._dataset, "epoch", self._latest)
        return epoch if isinstance(epoch, int) else self._latest

    def set(self, epoch: int, *others: Any) -> None:
        """Set the epoch of the dataset, and of others that may have one."""
        for target in (self._dataset, *others):
            set_epoch = getattr(target, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        self._latest = int(epoch)

    def advance(self, epoch: int) -> None:
        """Set the next epoch, if the loop has set this one.

        For a pass that continues with the next epoch by itself.
        """
        was_set = epoch > 0 or self._latest == epoch
        if was_set and self.now() == epoch:
            self._dataset.set_epoch(epoch + 1)
            self._latest = epoch + 1

    def restore(self, epoch: int | None) -> None:
        """Set the epoch of a state; None changes nothing."""
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if epoch is None or not callable(set_epoch):
            return
        set_epoch(epoch)
        if not hasattr(self._dataset, "epoch"):
            self._latest = epoch


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with every tensor on the device, in containers of the same kind."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return type(batch)({key: to_device(value, device) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def with_valid(batch: Any, valid: torch.Tensor) -> Any:
    """Return the batch with the mask of its padded slots.

    The mask is last in a list or tuple, "valid" in a dict, else the second of a pair.
    """
    if isinstance(batch, Mapping):
        return {**batch, "valid": valid}
    if isinstance(batch, list):
        return [*batch, valid]
    if isinstance(batch, tuple):
        return (*batch, valid)
    return batch, valid


_FED_AHEAD = 2  # batches in DALI, as with native datasets


class Pass:
    """One pass over an epoch: batches from torch's iterator, and a mark that moves with them.

    number: of the pass. setup: fixed for this pass; attributes that are set meanwhile count for the
    next one.
    """

    _iterator: TorchIterator  # unset while it forks its first worker

    def __init__(
        self,
        setup: PassSetup,
        *,
        number: int,
        bookmark: Bookmark,
        loaders: TorchLoaders,
        dataset_epoch: DatasetEpoch,
        meter: Meter,
        bad_count: BadCount | None,
        ranks: Membership,
    ) -> None:
        self._ranks = ranks
        self.number = number
        self.is_over = False
        self._setup = setup
        self._bookmark = bookmark
        self._loaders = loaders
        self._dataset_epoch = dataset_epoch
        self._meter = meter
        self._bad_count = bad_count
        self._delivered_at: float | None = None
        self._pending: list[WorkerMessage] = []  # received before the next batch, without one
        self._decoding: deque[tuple[list[WorkerMessage], WorkerMessage]] = deque()
        self._tracks_workers = setup.tracks_workers
        self._is_of_this_process = setup.num_workers > 0 or setup.augmenter is not None
        self._pid = os.getpid()
        watch(self)
        self._start(bookmark.mark, restored=bookmark.is_restored)

    def disown(self) -> None:
        """Leave torch's workers to the parent, in a forked child, so that they live on."""
        if self._setup.num_workers and hasattr(self, "_iterator"):
            self._iterator.disown()

    def _start(self, mark: Mark, *, restored: bool) -> None:
        setup = self._setup
        self._fresh_restore = restored and mark.batches > 0
        mark = self._with_draws(mark, restored=restored)
        torch_loader = self._loaders.for_pass(setup, mark, previous=self._bookmark.source)
        self._stream: PassRequests | None = None
        requests: Iterator[WorkerRequest] | None = None
        if setup.order is not None and torch_loader.requests is not None:
            self._stream = setup.order.begin(mark)
            # Persistent workers have their datasets' states already.
            requests = with_restored_states(self._stream, mark) if restored else iter(self._stream)
        self._iterator = TorchIterator(torch_loader, requests, setup)
        self._is_drained = False
        self._failure: Exception | None = None
        if mark.base_seed is None:
            mark = replace(mark, base_seed=self._iterator.base_seed)
        if not mark.workers and self._tracks_workers:
            mark = replace(mark, workers=(WorkerPosition(),) * setup.streams)
        self._mark, self._epoch = mark, mark.epoch
        self._bookmark.start(self.number, self.mark(), torch_loader.source)

    def _with_draws(self, mark: Mark, *, restored: bool) -> Mark:
        """Return the mark with the states from which the pass's order will be drawn."""
        setup = self._setup
        generator = setup.own_generator()
        if generator is not None and setup.options.seed is None:
            if restored and mark.generator is not None:
                generator.set_state(thaw(mark.generator))
            else:
                mark = replace(mark, generator=freeze(generator.get_state()))
        sampler_epoch = getattr(setup.sampler, "epoch", None)
        if mark.sampler_epoch is None and isinstance(sampler_epoch, int):
            mark = replace(mark, sampler_epoch=sampler_epoch)
        return replace(mark, dataset_epoch=self._dataset_epoch.now())

    def mark(self) -> Mark:
        """Return the pass's mark, with the seeds and states from which its order was drawn."""
        return self._mark if self._stream is None else self._stream.with_draws(self._mark)

    def decide(self, mark: Mark) -> None:
        """Draw the order from this mark, unless drawing has begun."""
        self._mark = mark
        if self._stream is not None:
            self._stream.mark = mark

    def stop(self) -> None:
        """Drop torch's iterator, and end its workers."""
        self.is_over = True
        self._iterator.stop()

    def __iter__(self) -> Pass:
        return self

    def __len__(self) -> int:
        return self._setup.length()

    def __next__(self) -> Any:
        try:
            return self._next()
        except RuntimeError as error:  # torch's handler of dead children may raise anywhere
            loss = self._iterator.worker_loss(error, self._mark)
            if loss is None:
                raise
            raise loss from error

    def _next(self) -> Any:
        if self._is_of_this_process:
            check_process(self._pid, "This iterator")
        meter = self._meter
        self._ranks.meet()
        self._ranks.check(self._epoch)
        if self._bad_count is not None:
            self._bad_count.check(self._mark.cursor)
        if self._delivered_at is not None:
            meter.step_s += time.perf_counter() - self._delivered_at
            self._delivered_at = None
        began = time.perf_counter()
        try:
            message = self._fetch()
        except StopIteration:
            if not self._restart():
                raise
            return self._next()
        batch = self._deliver(message)
        now = time.perf_counter()
        meter.count_batch(message.samples, wait_s=now - began, read_s=now - began, decode_s=0.0)
        self._delivered_at = now
        self._ranks.count_batch(ended=self._epoch if self.is_over else None)
        return batch

    def _fetch(self) -> WorkerMessage:
        """Return the next batch from torch's iterator, decoded and augmented if there is a
        recipe."""
        if self._setup.augmenter is not None:
            return self._fetch_augmented()
        message = self._receive()
        self._apply_pending()
        return message

    def _fetch_augmented(self) -> WorkerMessage:
        setup = self._setup
        assert setup.augmenter is not None
        # Reading ahead in this process would move a dataset's state ahead of the batch. The
        # iterator of an iterable dataset may have one.
        keeps = setup.order is None or has_state(setup.dataset)
        ahead = 1 if setup.num_workers == 0 and keeps else _FED_AHEAD
        while len(self._decoding) < ahead and not self._is_drained and self._failure is None:
            try:
                message = self._receive()
            except StopIteration:
                self._is_drained = True
                break
            except Exception as error:  # kept, and raised when its batch is due
                self._failure = error
                break
            ids = np.asarray(message.ids, np.int64)
            occurrences = message.occurrences
            if setup.order is None and setup.world.rank:  # each rank numbers its own stream
                occurrences = np.full(len(ids), setup.world.rank)
            setup.augmenter.feed(
                message.batch, ids=ids, epoch=self._mark.epoch, occurrences=occurrences
            )
            self._decoding.append((self._pending, message))
            self._pending = []
        if not self._decoding:
            failure, self._failure = self._failure, None
            raise failure or StopIteration
        messages, message = self._decoding.popleft()
        self._apply(messages)
        return replace(message, batch=setup.augmenter.outputs(message.batch))

    def _receive(self) -> WorkerMessage:
        """Receive the next batch, and keep the messages without one that come before it."""
        message = self._iterator.next_message(self._mark)
        while message.void:
            self._pending.append(message)
            message = self._iterator.next_message(self._mark)
        return message

    def _apply(self, messages: list[WorkerMessage]) -> None:
        """Update the mark with the messages that came before a batch that is delivered now."""
        if not messages or not self._tracks_workers:
            return
        workers = list(self._mark.workers)
        for message in messages:
            workers[message.worker] = workers[message.worker].after_message(message)
        self._mark = replace(self._mark, workers=tuple(workers))

    def _apply_pending(self) -> None:
        pending, self._pending = self._pending, []
        self._apply(pending)

    def _deliver(self, message: WorkerMessage) -> Any:
        setup, mark = self._setup, self._mark
        batch = message.batch
        if self._stream is not None:
            if self._iterator.failed:
                mark = self._after_failed(self._stream, mark)
            valid = self._stream.valid_slots()
            if self._bad_count is not None and (message.bad or not mark.position):
                own = {
                    bad.sample_id: bad.reason
                    for row, bad in sorted(message.bad.items())
                    if valid is None or valid[row]  # not padding
                }
                self._bad_count.count(mark.cursor, own, begins_epoch=not mark.position)
            if valid is not None:
                valid = valid.copy()
                valid[list(message.bad)] = False
                batch = with_valid(batch, torch.from_numpy(valid))
            mark = self._stream.after_batch(mark)
        else:
            mark = replace(mark, batches=mark.batches + 1)
        if self._tracks_workers:
            mark = setup.with_position(
                mark, message.worker, mark.workers[message.worker].after_batch(message)
            )
        self._mark = mark
        self._fresh_restore = False
        if setup.order is None:
            setup.check_length(mark.batches)
        if not self.is_over:
            # A stream is over when it ends, not when it reaches the length that it promised.
            steps = None if setup.order is None else setup.steps()
            self.is_over = steps is not None and mark.batches >= steps
            self._bookmark.move(self.number, setup.after(mark) if self.is_over else mark)
        device = setup.options.device
        return batch if device.type == "cpu" else to_device(batch, device)

    def _after_failed(self, stream: PassRequests, mark: Mark) -> Mark:
        """Return the mark behind requests whose batches never came."""
        for _ in range(self._iterator.failed):
            mark = stream.after_batch(mark)
        self._iterator.failed = 0
        return mark

    def _restart(self) -> bool:
        """Continue with the next epoch at the end of torch's iterator; return False if the pass is
        over.

        It continues if the pass was restored at the end of an epoch whose length was unknown.
        """
        self._apply_pending()
        mark, setup = self._mark, self._setup
        if self._fresh_restore:
            self._dataset_epoch.advance(mark.epoch)
            self._start(setup.after(mark), restored=False)
            return True
        if not self.is_over:
            self.is_over = True
            self._bookmark.move(self.number, setup.after(mark))
            setup.check_short(mark.batches)
        return False


def with_restored_states(stream: Iterable[WorkerRequest], mark: Mark) -> Iterator[WorkerRequest]:
    """Yield the stream's requests, with the dataset's state in each worker's first one.

    torch sends requests to its workers in turn, from the first. Empty requests come before those of
    the worker whose turn it is.
    """
    states = [worker.state for worker in mark.workers]
    if not any(states):
        yield from stream
        return
    for state in states[: mark.next_worker]:
        yield WorkerRequest(restore=state, void=True)
    later = iter(states[mark.next_worker :])
    for request in stream:
        yield replace(request, restore=next(later, None))
