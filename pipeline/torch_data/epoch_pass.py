"""Run one pass over an epoch of a torch dataset, and count what of it was delivered.

Several passes may be under way; the loader's mark follows the latest (`Bookmark`). A pass tells the
dataset its epoch, counts the bad samples for which others stood in, and moves batches to their
device. `Ranks` is what it needs of the job's other ranks.
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

from penstock.cache import TooManyBadSamplesError, check_process, watch
from penstock.pipeline.torch_data.mark import Mark, WorkerPosition, has_state
from penstock.pipeline.torch_data.random_states import freeze, thaw
from penstock.pipeline.torch_data.torch_loaders import TorchIterator
from penstock.pipeline.torch_data.worker import WorkerRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from penstock.pipeline.report import Meter
    from penstock.pipeline.torch_data.index_order import PassRequests
    from penstock.pipeline.torch_data.job_ranks import JobRanks
    from penstock.pipeline.torch_data.pass_setup import PassSetup
    from penstock.pipeline.torch_data.sample_faults import BadRow, BadTally
    from penstock.pipeline.torch_data.torch_loaders import TorchLoaders
    from penstock.pipeline.torch_data.worker import WorkerMessage


class Bookmark:
    """The mark behind the latest batch of the loader's latest pass; older passes don't move it.

    mark: what was handed out. number: of the latest pass. source: what that one reads from: without
    workers it has the dataset's state. is_restored: the mark is of a state, and the next pass
    begins just there. has_begun: a batch was handed out, by whichever pass.
    """

    def __init__(self) -> None:
        self.mark = Mark()
        self.number = 0
        self.source: Any = None
        self.is_restored = False
        self.has_begun = False
        self._is_decided = False  # a state says what the epoch will be drawn from

    def open(self, setup: PassSetup) -> int:
        """Let a pass begin at the mark; its number.

        An epoch begins with nothing known of what it is drawn from: each pass draws its own. One
        that was left in the middle begins again, but where all that was promised came.
        """
        if not self.is_restored and not self._is_decided:
            if setup.is_counted_out(self.mark):
                self.mark = setup.after(self.mark)
            else:
                workers = () if self.mark.batches else self.mark.workers
                self.mark = Mark(epoch=self.mark.epoch, workers=workers)
        self.number += 1
        return self.number

    def began(self, number: int, mark: Mark, source: Any) -> None:
        """Note where the pass of a number stands, and what it reads from."""
        if number == self.number:
            self.mark, self.source = mark, source

    def moved(self, number: int, mark: Mark) -> None:
        """Note that the pass of a number handed a batch out, or that its epoch ended."""
        self.has_begun = True
        if number == self.number:
            self.mark = mark
            self.is_restored = self._is_decided = False

    def decide(self, mark: Mark) -> None:
        """Let the epoch that begins be drawn from what the mark says: a state promised so."""
        self.mark, self._is_decided = mark, True

    def go_to(self, epoch: int, setup: PassSetup) -> None:
        """Stand at the start of an epoch; nothing changes where that is the one under way."""
        is_counted_out = not self.is_restored and setup.is_counted_out(self.mark)
        if epoch != self.mark.epoch or is_counted_out:
            # Datasets of workers that go on have their states whatever the epoch's number is.
            self.mark = replace(setup.after(self.mark), epoch=epoch)
            self.is_restored = self._is_decided = False
            self.number += 1

    def restore(self, mark: Mark) -> None:
        """Stand where a state says."""
        self.mark = mark
        self.is_restored, self._is_decided = True, False
        self.number += 1


class DatasetEpoch:
    """The epoch that a dataset stands at: by its attribute `epoch`, or as it was told here."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._latest: int | None = None

    def now(self) -> int | None:
        """The epoch's number; None where the dataset knows no epochs, or none was told."""
        if not callable(getattr(self._dataset, "set_epoch", None)):
            return None
        epoch = getattr(self._dataset, "epoch", self._latest)
        return epoch if isinstance(epoch, int) else self._latest

    def tell(self, epoch: int, *others: Any) -> None:
        """Tell the dataset, and others that may know epochs, which one it is."""
        for target in (self._dataset, *others):
            tell = getattr(target, "set_epoch", None)
            if callable(tell):
                tell(epoch)
        self._latest = int(epoch)

    def tell_next(self, epoch: int) -> None:
        """Tell the epoch behind this one, if the loop has told the dataset this one's number.

        For a pass that goes on by itself with the next epoch.
        """
        is_told = epoch > 0 or self._latest == epoch
        if is_told and self.now() == epoch:
            self._dataset.set_epoch(epoch + 1)
            self._latest = epoch + 1

    def restore(self, epoch: int | None) -> None:
        """Tell what a state holds; None: it holds nothing."""
        tell = getattr(self._dataset, "set_epoch", None)
        if epoch is None or not callable(tell):
            return
        tell(epoch)
        if not hasattr(self._dataset, "epoch"):
            self._latest = epoch


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on the device, in containers of the same kind."""
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
    """The batch with the mask of its padded slots.

    That is last in a list or tuple, "valid" in a dict, else the second of a pair.
    """
    if isinstance(batch, Mapping):
        return {**batch, "valid": valid}
    if isinstance(batch, list):
        return [*batch, valid]
    if isinstance(batch, tuple):
        return (*batch, valid)
    return batch, valid


_FED_AHEAD = 2  # batches in DALI, as for native datasets


class Pass:
    """One pass over an epoch: batches from torch's iterator, and a mark that moves with them.

    number: of the pass. setup: of this pass to its end: what is set meanwhile counts for the next.
    """

    _iterator: TorchIterator  # there is none yet while it forks its first worker

    def __init__(
        self,
        setup: PassSetup,
        *,
        number: int,
        bookmark: Bookmark,
        loaders: TorchLoaders,
        dataset_epoch: DatasetEpoch,
        meter: Meter,
        tally: BadTally | None,
        ranks: JobRanks | None = None,
    ) -> None:
        self._ranks = ranks
        self.number = number
        self.is_over = False
        self._setup = setup
        self._bookmark = bookmark
        self._loaders = loaders
        self._dataset_epoch = dataset_epoch
        self._meter = meter
        self._tally = tally
        self._handed_out_at: float | None = None
        self._news: list[WorkerMessage] = []  # by workers, in front of the next batch that is read
        self._in_dali: deque[tuple[list[WorkerMessage], WorkerMessage]] = deque()
        self._tracks_workers = setup.tracks_workers
        self._is_of_this_process = setup.num_workers > 0 or setup.augmenter is not None
        self._pid = os.getpid()
        watch(self)
        self._start(bookmark.mark, restored=bookmark.is_restored)

    def disown(self) -> None:
        """Leave torch's workers to the parent, in a forked child: they must live on."""
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
            # Workers that go on have their datasets' states already.
            requests = restoring(self._stream, mark) if restored else iter(self._stream)
        self._iterator = TorchIterator(torch_loader, requests, setup)
        self._is_drained = False
        self._failure: Exception | None = None
        if mark.base_seed is None:
            mark = replace(mark, base_seed=self._iterator.base_seed)
        if not mark.workers and self._tracks_workers:
            mark = replace(mark, workers=(WorkerPosition(),) * setup.streams)
        self._mark, self._epoch = mark, mark.epoch
        self._bookmark.began(self.number, self.mark(), torch_loader.source)

    def _with_draws(self, mark: Mark, *, restored: bool) -> Mark:
        """The mark with what is known of the pass's order and dataset before it is drawn."""
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
        """Where the pass stands, with what its order turned out to be drawn from."""
        return self._mark if self._stream is None else self._stream.noted(self._mark)

    def decide(self, mark: Mark) -> None:
        """Draw the order from what the mark says, unless it has begun."""
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
        except RuntimeError as error:  # torch's handler of dead children raises wherever this is
            better = self._iterator.loss_behind(error, self._mark)
            if better is None:
                raise
            raise better from error

    def _next(self) -> Any:
        if self._is_of_this_process:
            check_process(self._pid, "This iterator")
        meter = self._meter
        if self._ranks is not None:
            self._ranks.ask(self._epoch)
        if self._tally is not None:
            self._check_bad(self._tally)
        if self._handed_out_at is not None:
            meter.step_s += time.perf_counter() - self._handed_out_at
            self._handed_out_at = None
        began = time.perf_counter()
        try:
            message = self._fetch()
        except StopIteration:
            if not self._restart():
                raise
            return self._next()
        batch = self._moved(message)
        now = time.perf_counter()
        meter.count_batch(message.samples, wait_s=now - began, read_s=now - began, decode_s=0.0)
        self._handed_out_at = now
        if self._ranks is not None:
            self._ranks.count_batch(ended=self._epoch if self.is_over else None)
        return batch

    def _check_bad(self, tally: BadTally) -> None:
        """Raise TooManyBadSamplesError; no rank goes on then."""
        try:
            tally.check(self._mark, self._setup.world)
        except TooManyBadSamplesError as error:
            if self._ranks is not None:
                self._ranks.fail(error)
            raise

    def _fetch(self) -> WorkerMessage:
        """The next batch from torch's iterator, its images decoded and augmented if asked for."""
        if self._setup.augmenter is not None:
            return self._augmented()
        message = self._received()
        self._note_all()
        return message

    def _augmented(self) -> WorkerMessage:
        setup = self._setup
        assert setup.augmenter is not None
        # Reading ahead would leave the state of a dataset in this process ahead of the batch, and
        # an iterable one's iterator may have one.
        keeps = setup.order is None or has_state(setup.dataset)
        ahead = 1 if setup.num_workers == 0 and keeps else _FED_AHEAD
        while len(self._in_dali) < ahead and not self._is_drained and self._failure is None:
            try:
                message = self._received()
            except StopIteration:
                self._is_drained = True
                break
            except Exception as error:  # kept, and raised where its own batch is due
                self._failure = error
                break
            ids = np.asarray(message.ids, np.int64)
            occurrences = message.occurrences
            if setup.order is None and setup.world.rank:  # each rank numbers its own stream
                occurrences = np.full(len(ids), setup.world.rank)
            setup.augmenter.feed(
                message.batch, ids=ids, epoch=self._mark.epoch, occurrences=occurrences
            )
            self._in_dali.append((self._news, message))
            self._news = []
        if not self._in_dali:
            failure, self._failure = self._failure, None
            raise failure or StopIteration
        news, message = self._in_dali.popleft()
        self._note(news)
        return replace(message, batch=setup.augmenter.outputs(message.batch))

    def _received(self) -> WorkerMessage:
        """The next batch; what workers say in front of it is kept."""
        message = self._iterator.next_message(self._mark)
        while message.void:
            self._news.append(message)
            message = self._iterator.next_message(self._mark)
        return message

    def _note(self, news: list[WorkerMessage]) -> None:
        """Note what workers said in front of a batch that is handed out now."""
        if not news or not self._tracks_workers:
            return
        workers = list(self._mark.workers)
        for message in news:
            workers[message.worker] = workers[message.worker].noted(message)
        self._mark = replace(self._mark, workers=tuple(workers))

    def _note_all(self) -> None:
        if self._news:
            self._note(self._news)
            self._news = []

    def _moved(self, message: WorkerMessage) -> Any:
        setup, mark = self._setup, self._mark
        batch = message.batch
        if self._stream is not None:
            if self._iterator.failed:
                mark = self._behind_failed(self._stream, mark)
            valid = self._stream.valid()
            if message.bad:
                mark = self._counted(message.bad, mark, valid)
            if valid is not None:
                valid = valid.copy()
                valid[list(message.bad)] = False
                batch = with_valid(batch, torch.from_numpy(valid))
            mark = self._stream.moved(mark)
        else:
            mark = replace(mark, batches=mark.batches + 1)
        if self._tracks_workers:
            mark = setup.moved(mark, message.worker, mark.workers[message.worker].moved(message))
        self._mark = mark
        self._fresh_restore = False
        if setup.order is None:
            setup.check_length(mark.batches)
        if not self.is_over:
            # A stream's length is a promise: it is over when it ends.
            steps = None if setup.order is None else setup.steps()
            self.is_over = steps is not None and mark.batches >= steps
            self._bookmark.moved(self.number, setup.after(mark) if self.is_over else mark)
        device = setup.options.device
        return batch if device.type == "cpu" else to_device(batch, device)

    def _counted(
        self, bad: Mapping[int, BadRow], mark: Mark, valid: NDArray[np.bool_] | None
    ) -> Mark:
        """The mark with the bad samples of a batch. valid: without those that only fill it up."""
        assert self._tally is not None
        own = [bad[row] for row in sorted(bad) if valid is None or valid[row]]
        if not own:
            return mark
        count = self._tally.count(own, epoch=mark.epoch, world=self._setup.world)
        return replace(mark, bad=mark.bad + count)

    def _behind_failed(self, stream: PassRequests, mark: Mark) -> Mark:
        """The mark behind requests whose batches never came."""
        for _ in range(self._iterator.failed):
            mark = stream.moved(mark)
        self._iterator.failed = 0
        return mark

    def _restart(self) -> bool:
        """At the end of torch's iterator: whether there is more, as the pass was restored at an end
        that nobody could see."""
        self._note_all()
        mark, setup = self._mark, self._setup
        if self._fresh_restore:
            self._dataset_epoch.tell_next(mark.epoch)
            self._start(setup.after(mark), restored=False)
            return True
        if not self.is_over:
            self.is_over = True
            self._bookmark.moved(self.number, setup.after(mark))
            setup.check_short(mark.batches)
        return False


def restoring(stream: Iterable[WorkerRequest], mark: Mark) -> Iterator[WorkerRequest]:
    """The stream's requests, with the dataset's state for each worker's first one.

    torch asks its workers in turn, from the first: empty requests come before those of the worker
    whose turn it is.
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
