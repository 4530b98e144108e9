"""Run a loader over a torch dataset: passes over epochs, and the state between two batches.

torch's DataLoader sends requests to its workers and receives batches (`torch_loaders`); none of its
code is copied. A mark counts what was delivered (`mark`), and a pass can begin at any mark. Several
passes may be active; the loader's mark follows the latest (`Bookmark`). A pass passes the epoch to
the dataset, counts the bad samples that were replaced, and moves batches to their device.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.utils.data

from penstock.cache import ClosedError, ConfigError, PenstockError, check_process, watch
from penstock.cache.base import usable_cores
from penstock.pipeline.feed import BadCount, to_device
from penstock.pipeline.members import Membership
from penstock.pipeline.options import check_epoch
from penstock.pipeline.report import Meter, QuarantineFile
from penstock.pipeline.torch_data.mark import Mark, WorkerPosition, WorkerRequest
from penstock.pipeline.torch_data.owner_states import has_state
from penstock.pipeline.torch_data.pass_order import PlannedOrder, StreamOrder, TorchOrder, order_of
from penstock.pipeline.torch_data.random_states import freeze, thaw
from penstock.pipeline.torch_data.samplers import shards_by_rank
from penstock.pipeline.torch_data.torch_loaders import TorchIterator, TorchLoader, make_loader
from penstock.pipeline.torch_data.torch_state import from_state, mixture_of, to_state, with_position
from penstock.pipeline.torch_private import disown, kept_iterator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from penstock.pipeline.options import LoaderOptions
    from penstock.pipeline.plan import MixtureSettings, World
    from penstock.pipeline.report import Statistics
    from penstock.pipeline.torch_data.augmenter import Augmenter
    from penstock.pipeline.torch_data.mark import WorkerMessage
    from penstock.pipeline.torch_data.pass_order import PassOrder


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

    def open(self, order: PassOrder) -> int:
        """Begin a pass at the mark, and return its number.

        An epoch that begins draws new seeds. An epoch that was left in its middle begins again,
        except if it has reached its promised length.
        """
        if not self.is_restored and not self._is_decided:
            if order.has_reached_length(self.mark):
                self.mark = order.after(self.mark)
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

    def go_to(self, epoch: int, order: PassOrder) -> None:
        """Go to the start of an epoch; the current epoch changes nothing."""
        has_reached_length = not self.is_restored and order.has_reached_length(self.mark)
        if epoch != self.mark.epoch or has_reached_length:
            # Datasets of persistent workers keep their states in any epoch.
            self.mark = replace(order.after(self.mark), epoch=epoch)
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

    It keeps the order and the settings with which it began; attributes that are set meanwhile
    count for the next one. number: of the pass.
    """

    _iterator: TorchIterator  # unset while it forks its first worker

    def __init__(self, engine: TorchEngine) -> None:
        self._engine, self._order = engine, (order := engine.order)
        self._ranks, self._bad_count = engine.ranks, engine.bad_count
        self._bookmark, self._meter = engine.bookmark, engine.meter
        self.number = engine.bookmark.open(order)
        self.is_over = False
        self._delivered_at: float | None = None
        self._pending: list[WorkerMessage] = []  # received before the next batch, without one
        self._decoding: deque[list[WorkerMessage]] = deque()  # each ends with a batch
        self._tracks_workers = order.tracks_workers
        self._is_of_this_process = order.options.num_workers > 0 or order.augmenter is not None
        self._pid = os.getpid()
        watch(self)
        self._start(self._bookmark.mark, restored=self._bookmark.is_restored)

    def disown(self) -> None:
        """Leave torch's workers to the parent, in a forked child, so that they live on."""
        if self._order.options.num_workers and hasattr(self, "_iterator"):
            self._iterator.disown()

    def _start(self, mark: Mark, *, restored: bool) -> None:
        order, engine = self._order, self._engine
        self._fresh_restore = restored and mark.batches > 0
        mark = self._with_draws(mark, restored=restored)
        torch_loader = engine.torch_loader(order, mark)
        self._requests = order.begin(mark)
        # Persistent workers have their datasets' states already.
        requests = with_restored_states(self._requests, mark) if restored else self._requests
        self._iterator = TorchIterator(torch_loader, requests, order.dataset)
        self._is_drained = False
        self._failure: Exception | None = None
        if mark.base_seed is None:
            mark = replace(mark, base_seed=self._iterator.base_seed)
        if not mark.workers and self._tracks_workers:
            mark = replace(mark, workers=(WorkerPosition(),) * order.streams)
        self._mark, self._epoch = mark, mark.epoch
        self._bookmark.start(self.number, self.mark(), torch_loader.source)

    def _with_draws(self, mark: Mark, *, restored: bool) -> Mark:
        """Return the mark with the states from which the pass's order will be drawn."""
        order = self._order
        generator = order.own_generator()
        if generator is not None and order.options.seed is None:
            if restored and mark.generator is not None:
                generator.set_state(thaw(mark.generator))
            else:
                mark = replace(mark, generator=freeze(generator.get_state()))
        sampler_epoch = getattr(order.sampler, "epoch", None)
        if mark.sampler_epoch is None and isinstance(sampler_epoch, int):
            mark = replace(mark, sampler_epoch=sampler_epoch)
        return replace(mark, dataset_epoch=self._engine.dataset_epoch.now())

    def mark(self) -> Mark:
        """Return the pass's mark, with the seeds and states from which its order was drawn."""
        return self._requests.with_draws(self._mark)

    def decide(self, mark: Mark) -> None:
        """Draw the order from this mark, unless drawing has begun."""
        self._mark = self._requests.mark = mark

    def stop(self) -> None:
        """Drop torch's iterator, and end its workers."""
        self.is_over = True
        self._iterator.stop()

    def __iter__(self) -> Pass:
        return self

    def __len__(self) -> int:
        return self._order.length()

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
        if self._bad_count is None:  # each of the two checks sends a request
            self._ranks.check(self._epoch)
        else:
            self._bad_count.check(self._mark.cursor)
        if self._delivered_at is not None:
            meter.step_s += time.perf_counter() - self._delivered_at
            self._delivered_at = None
        began = time.perf_counter()
        try:
            messages = self._fetch()
        except StopIteration:
            if not self._restart():
                raise
            return self._next()
        batch = self._deliver(messages)
        now, samples = time.perf_counter(), messages[-1].samples
        meter.count_batch(samples, wait_s=now - began, read_s=now - began, decode_s=0.0)
        self._delivered_at = now
        self._ranks.count_batch(ended=self._epoch if self.is_over else None)
        return batch

    def _fetch(self) -> list[WorkerMessage]:
        """Return the next batch from torch's iterator, decoded and augmented if there is a recipe,
        behind the messages without one that came before it."""
        augmenter = self._order.augmenter
        if augmenter is None:
            return self._receive()
        self._feed(augmenter)
        if not self._decoding:
            failure, self._failure = self._failure, None
            raise failure or StopIteration
        *before, message = self._decoding.popleft()
        return [*before, replace(message, batch=augmenter.outputs(message.batch))]

    def _feed(self, augmenter: Augmenter) -> None:
        """Start decoding the next batches."""
        order = self._order
        # Reading ahead in this process would move a dataset's state ahead of the batch. The
        # iterator of an iterable dataset may have one.
        keeps = order.is_stream or has_state(order.dataset)
        ahead = 1 if order.options.num_workers == 0 and keeps else _FED_AHEAD
        while len(self._decoding) < ahead and not self._is_drained and self._failure is None:
            try:
                messages = self._receive()
            except StopIteration:
                self._is_drained = True
                return
            except Exception as error:  # kept, and raised when its batch is due
                self._failure = error
                return
            message = messages[-1]
            ids = np.asarray(message.ids, np.int64)
            occurrences, rank = message.occurrences, order.options.world.rank
            if order.is_stream and rank:  # each rank numbers its own stream
                occurrences = np.full(len(ids), rank)
            epochs = self._mark.epoch if message.epochs is None else message.epochs
            augmenter.feed(message.batch, ids=ids, epoch=epochs, occurrences=occurrences)
            self._decoding.append(messages)

    def _receive(self) -> list[WorkerMessage]:
        """Receive the next batch, behind the messages without one that come before it."""
        while not self._pending or self._pending[-1].void:
            self._pending.append(self._iterator.next_message(self._mark))
        messages, self._pending = self._pending, []
        return messages

    def _behind(self, messages: list[WorkerMessage], mark: Mark) -> Mark:
        """Return the mark with the workers' positions behind messages that are delivered now."""
        if not messages or not self._tracks_workers:
            return mark
        workers, following = list(mark.workers), mark.next_worker
        for message in messages:
            worker, position = message.worker, message.position
            if position is not None and not self._order.is_stream:
                position = replace(position, batches=workers[worker].batches + 1)
            workers[worker] = position or workers[worker]
            if not message.void:
                following = (worker + 1) % len(workers)
        return replace(mark, workers=tuple(workers), next_worker=following)

    def _deliver(self, messages: list[WorkerMessage]) -> Any:
        order, mark, message = self._order, self._mark, messages[-1]
        batch = message.batch
        for _ in range(self._iterator.failed):  # requests whose batches never came
            mark = self._requests.after_batch(mark)
        self._iterator.failed = 0
        valid = self._requests.valid_slots()
        if self._bad_count is not None and (message.bad or not mark.position):
            bad = sorted(message.bad.items())
            own = dict(each for row, each in bad if valid is None or valid[row])  # without padding
            self._bad_count.count(mark.cursor, own, begins_epoch=not mark.position)
        if valid is not None:
            valid = valid.copy()
            valid[list(message.bad)] = False
            batch = with_valid(batch, torch.from_numpy(valid))
        self._mark = mark = self._behind(messages, self._requests.after_batch(mark))
        self._fresh_restore = False
        if isinstance(order, StreamOrder):
            order.check_length(mark.batches)
        if not self.is_over:
            self.is_over = order.is_over(mark)
            self._bookmark.move(self.number, order.after(mark) if self.is_over else mark)
        device = order.options.device
        return batch if device.type == "cpu" else to_device(batch, device)

    def _restart(self) -> bool:
        """Continue with the next epoch at the end of torch's iterator; return False if the pass is
        over.

        It continues if the pass was restored at the end of an epoch whose length was unknown.
        """
        self._mark = mark = self._behind(self._pending, self._mark)
        self._pending, order = [], self._order
        if self._fresh_restore:
            self._engine.dataset_epoch.advance(mark.epoch)
            self._start(order.after(mark), restored=False)
            return True
        if not self.is_over:
            self.is_over = True
            self._bookmark.move(self.number, order.after(mark))
            if isinstance(order, StreamOrder):
                order.check_short(mark.batches)
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


def _no_pass() -> None:
    """Return no pass: none has begun in this process."""


class TorchEngine:
    """Delivers batches of a torch dataset; DataLoader forwards to it.

    shards_itself: Penstock orders the samples and shares them out over the ranks. order: replaced
    when the loader gets other options; a pass keeps the one with which it began.
    """

    def __init__(self, dataset: Any, options: LoaderOptions, *, indices: Any) -> None:
        """indices: the sampler or batch sampler of torch's loader over the dataset."""
        self._indices = indices
        self._mixture: MixtureSettings | None = None  # of a loaded state
        self.order = order_of(dataset, options, indices, _augmenter_of(options, indices))
        self.shards_itself = options.is_planned
        augmenter = self.order.augmenter
        self.meter = Meter(
            decode_threads=0 if augmenter is None else augmenter.threads,
            device=str(options.device),
            usable_cores=options.world.threads(usable_cores()),
            workers=int(options.num_workers),
        )
        self.bad_count: BadCount | None = None
        self.ranks, self._has_joined = Membership(options.world), False
        self._join()
        self.bookmark = Bookmark()
        self._kept: TorchLoader | None = None  # with persistent workers
        self.dataset_epoch = DatasetEpoch(dataset)
        self._latest: Callable[[], Pass | None] = _no_pass
        self.closed = False  # close() was called
        watch(self)

    def disown(self) -> None:
        """Leave passes and workers to the parent, in a forked child; new ones may begin."""
        if self._kept is not None:
            # Between two passes, this is the only reference to its iterator; dropping it would end
            # the workers.
            disown(kept_iterator(self._kept.loader))
        self._kept, self._latest = None, _no_pass

    def take_over(self, options: LoaderOptions) -> None:
        """Use other options from the next pass on: for another world, with other workers.

        Raises ConfigError and PlanError for options that don't fit; the engine is then unchanged.
        """
        before, augmenter = self.order, self.order.augmenter
        if options.world == before.options.world:
            self.order = replace(before, options=options)
            return
        new = _augmenter_of(options, self._indices)
        self.order = order_of(before.dataset, options, self._indices, new, self._mixture)
        if augmenter is not None:
            augmenter.close()
        self.ranks, self._has_joined = Membership(options.world), False
        self.bad_count = None
        self._join()

    def _join(self) -> None:
        """Join the job's ranks, if there are any by now, and count bad samples with them. Raises
        PlanError."""
        order, options, world = self.order, self.order.options, self.world
        if not isinstance(order, PlannedOrder) or self._has_joined:
            return
        if options.agrees and world.processes > 1:
            # A process that is alone needs none of it.
            from penstock.pipeline.members import join_ranks

            self.ranks = join_ranks(order.job, options, plan=order.name)
            self.ranks.use_meter(self.meter)
            self._has_joined = self.ranks.store is not None
        max_bad, before = options.max_bad, self.bad_count
        if max_bad is None or (before is not None and not self._has_joined):
            return
        name = f"{type(order.dataset).__name__}-{world.file_label}.jsonl"
        self.bad_count = BadCount(
            samples=len(order.dataset),
            names=None,
            bad_samples=None,
            remedy="See the reasons; then remove them from the dataset, or raise max_bad=.",
            max_bad=max_bad,
            membership=self.ranks,
            report=QuarantineFile(None, name=name),
            meter=self.meter,
        )
        if before is not None:
            self.bad_count.take_over(before)

    @property
    def world(self) -> World:
        """Rank and size of the batches."""
        return self.order.options.world

    @property
    def batch_size(self) -> int | None:
        """The size of this rank's largest batch, if torch batches by a number."""
        return self.order.options.rank_batch

    @property
    def keeps_workers(self) -> bool:
        """True if persistent workers were started."""
        return self._kept is not None

    # -- passes

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch on this rank. Raises TypeError if
        unknown."""
        return self.order.length()

    def begin(self) -> Iterator[Any]:
        """Begin a pass over the current epoch; several may run at once, as with torch."""
        self._check_open()
        if isinstance(self.order, TorchOrder):
            self.order.warn_if_unsharded()
        self._join()
        self.ranks.begin_pass()
        if self.order.augmenter is not None:
            self.order.augmenter.drain()
        started = Pass(self)
        self._latest = weakref.ref(started)
        return started

    def torch_loader(self, order: PassOrder, mark: Mark) -> TorchLoader:
        """Return torch's loader for a pass from a mark on, the kept one if workers are
        persistent."""
        if self._kept is not None:
            if order.is_stream:
                self._kept.source.begin_epoch(mark.epoch)
            return self._kept
        torch_loader = make_loader(order, mark, previous=self.bookmark.source)
        if order.options.keeps_workers:
            self._kept = torch_loader
        return torch_loader

    def _live_pass(self) -> Pass | None:
        """Return the latest pass, if the loader's mark follows it."""
        live = self._latest()
        if live is None or live.number != self.bookmark.number or live.is_over:
            return None
        return live

    def epoch_batches(self) -> Iterator[list[int]]:
        """Return this rank's indices in a whole current epoch, batch by batch."""
        assert isinstance(self.order, PlannedOrder)
        return self.order.job.batches(self.epoch, self.world)

    def epoch_samples(self) -> int:
        """Return the number of samples in all `epoch_batches`."""
        assert isinstance(self.order, PlannedOrder)
        return self.order.job.samples(self.epoch, self.world)

    # -- epochs and state

    @property
    def has_begun(self) -> bool:
        """True if a batch was delivered."""
        return self.bookmark.has_begun

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self.bookmark.mark.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; sets it in a dataset and a sampler that have set_epoch."""
        check_epoch(epoch)
        self.dataset_epoch.set(epoch, self.order.sampler)
        self.bookmark.go_to(int(epoch), self.order)

    def state_dict(self) -> dict[str, Any]:
        """Return what was delivered, and fix the seeds and states of the epoch's draws if they are
        open."""
        order, bookmark = self.order, self.bookmark
        live = self._live_pass()
        mark = bookmark.mark
        if mark.batches == 0 and order.options.seed is None and order.options.in_order:
            mark = live.mark() if live is not None else mark
            mark = order.decided(mark, keeps_workers=self.keeps_workers)
            bookmark.decide(mark)
            if live is not None:
                live.decide(mark)
        if not bookmark.is_restored:
            if not mark.batches:
                mark = replace(mark, dataset_epoch=self.dataset_epoch.now())
            mark = with_position(order, mark, bookmark.source, is_live=live is not None)
        bad = 0 if self.bad_count is None else self.bad_count.count_before(mark.cursor)
        return to_state(order, mark, bad=bad)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly behind the last batch that was delivered before the state was read.

        All ranks must load the same state. Raises ResumeError and PlanError; the loader is then
        unchanged.
        """
        self._check_open()
        order, bookmark = self.order, self.bookmark
        try:
            if (mixture := mixture_of(order, state)) is not None:
                parts = order.dataset, order.options, self._indices, order.augmenter
                order = order_of(*parts, mixture)
            mark = from_state(order, state)
            self.ranks.compare_state(f"epoch {mark.epoch}, position {mark.position}")
        except PenstockError as error:
            self.ranks.refuse(error)
            raise
        self.order, self._mixture = order, mixture
        self.dataset_epoch.restore(mark.dataset_epoch)
        if order.augmenter is not None and isinstance(state.get("draw_seed"), int):
            order.augmenter.seed = state["draw_seed"]
        self._kept = None  # its workers are at other positions, and end with its last pass
        if order.is_stream and bookmark.source is not None:
            bookmark.source.forget()
        bookmark.restore(mark)
        self.ranks.restart()
        if self.bad_count is not None:
            self.bad_count.restore(mark.bad)

    def statistics(self) -> Statistics:
        """Return what was measured so far, and the one-line verdict."""
        return self.meter.snapshot()

    # -- life

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("This loader is closed; make a new one.")

    def close(self) -> None:
        """End torch's workers. Safe to call twice."""
        self.closed = True
        self.ranks.close()
        if (live := self._latest()) is not None:
            live.stop()
        self._kept = None
        self.bookmark.source = None
        if self.order.augmenter is not None:
            self.order.augmenter.close()

    def __repr__(self) -> str:
        mark = self.bookmark.mark
        return (
            f"DataLoader({type(self.order.dataset).__name__}, batch_size={self.batch_size}, rank "
            f"{self.world.rank} of {self.world.size}, at epoch {mark.epoch}, batch {mark.batches})"
        )


def _augmenter_of(options: LoaderOptions, indices: Any) -> Augmenter | None:
    """Return the augmenter of the batches' images; None without augment=.

    Raises ConfigError if several ranks would draw their own crops of the same samples.
    """
    if options.augment is None:
        return None
    seed = options.drawn_seed if options.seed is None else options.seed
    assert seed is not None
    # If a sampler shares the samples out, each rank has its own crops and its own state.
    if options.seed is None and options.world.size > 1 and not shards_by_rank(indices):
        raise ConfigError(
            f"augment= on {options.world.size} ranks needs seed=, the same on every rank. Penstock "
            "then orders the samples and shares them out, so leave sampler= out. Or pass a sampler "
            "that shares them out, such as torch's DistributedSampler, and no seed=."
        )
    from penstock.pipeline.torch_data.augmenter import Augmenter

    return Augmenter(options, seed=seed)
