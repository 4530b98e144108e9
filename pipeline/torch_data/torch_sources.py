"""Read a torch dataset where it lives, in torch's workers or the main process, and collate batches.

A map-style source fetches the indices of a request. An iterable source hands out batches of its
streams from any place on: each worker iterates its own copy. Where a stream stands is a state of
the dataset or of its iterator, and how many batches came after it: those are read again and
dropped. Without any state all of them are.

An error in the user's collate function names the sample that causes it.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.utils.data

from penstock.cache import TooManyBadSamplesError
from penstock.cache.base import keyed_hash
from penstock.pipeline.torch_data.mark import (
    WorkerPosition,
    copy_of,
    description_of,
    has_exact_state,
    has_state,
    iterator_at,
    state_of,
)
from penstock.pipeline.torch_data.random_states import StreamDraws
from penstock.pipeline.torch_data.sample_faults import BadRow, is_sample_fault, reason_of
from penstock.pipeline.torch_data.worker import (
    Snapshots,
    WorkerMessage,
    fresh_seed,
    seed_all,
    worker_id,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.pipeline.torch_data.sample_faults import Substitutes
    from penstock.pipeline.torch_data.worker import Ending, WorkerRequest

    Collate = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class FetchedSamples:
    """What was read. ids: of the samples; bad: rows in which others stand in, and for which."""

    samples: list[Any]
    ids: list[Any]
    bad: dict[int, BadRow] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MapSampleReader:
    """Asks a dataset for samples. seed: None, or what each one's random numbers are keyed by, with
    epoch and index. substitutes: None where a bad sample is an error."""

    dataset: Any
    seed: int | None
    substitutes: Substitutes | None

    def read(self, indices: list[Any], epoch: int, *, together: bool) -> FetchedSamples:
        """Samples by index; together: by `__getitems__`, where the dataset has it.

        Raises what the dataset raises, and TooManyBadSamplesError where nothing can stand in."""
        many = getattr(self.dataset, "__getitems__", None)
        if not together or not callable(many):
            return self._each(indices, epoch)
        if indices:
            self._seed(indices[0], epoch)  # one call draws for all: keyed by its first sample
        try:
            return FetchedSamples(many(indices), indices)
        except Exception as error:  # raised again, or each is asked for alone
            if self.substitutes is None or not is_sample_fault(error):
                raise
        return self._each(indices, epoch, together=True)

    def _each(self, indices: list[Any], epoch: int, *, together: bool = False) -> FetchedSamples:
        if self.substitutes is None:
            return FetchedSamples(
                [self._one(i, epoch, together=together) for i in indices], indices
            )
        read = FetchedSamples([], [])
        for row, index in enumerate(indices):
            sample, used, why = self._good(index, epoch, self.substitutes, together=together)
            read.samples.append(sample)
            read.ids.append(used)
            if why is not None:
                read.bad[row] = BadRow(index, why)
        return read

    def _good(
        self, index: Any, epoch: int, substitutes: Substitutes, *, together: bool
    ) -> tuple[Any, Any, str | None]:
        """A sample, or the first good one that may stand in; its index; why it isn't its own."""
        reasons: dict[int, str] = {}
        for candidate in (index, *substitutes.of(index, epoch=epoch)):
            if candidate in reasons:
                continue
            try:
                sample = self._one(candidate, epoch, together=together)
            except Exception as error:  # the dataset's: raised again unless the sample is bad
                if not is_sample_fault(error):
                    raise
                reasons[candidate] = reason_of(error)
            else:
                return sample, candidate, reasons.get(index)
        raise TooManyBadSamplesError(
            f"Sample {index} of {description_of(self.dataset)} is bad ({reasons[index]}), and so "
            f"are all {len(reasons) - 1} substitutes that were tried, the last for: "
            f"{list(reasons.values())[-1]}. It may be the dataset's own code: try "
            f"dataset[{index}]; max_bad= is for samples that can't be read.",
            sample_ids=tuple(sorted(reasons)),
        )

    def _one(self, index: Any, epoch: int, *, together: bool) -> Any:
        self._seed(index, epoch)
        try:
            if together:
                (sample,) = self.dataset.__getitems__([index])
                return sample
            return self.dataset[index]
        except Exception as error:  # raised again, with the sample named
            error.add_note(f"while reading sample {index!r} of {description_of(self.dataset)}")
            raise

    def _seed(self, index: Any, epoch: int) -> None:
        if self.seed is not None:
            seed_all(int(keyed_hash(self.seed, epoch, int(index))))


def collate_named(collate: Collate, samples: Any, names: Sequence[Any]) -> Any:
    """What collate(samples) gives; an error gets a note that names the samples that it is about."""
    try:
        return collate(samples)
    except Exception as error:  # raised again, with the samples named
        culprit = _failing_sample(collate, samples) if len(names) == len(samples) else None
        if culprit is not None:
            place, why = culprit
            error.add_note(f"while collating: sample {names[place]!r} {why}")
        else:
            listed = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
            error.add_note(f"while collating the samples {listed}")
        raise


def _failing_sample(collate: Collate, samples: Any) -> tuple[int, str] | None:
    """The place of the one sample that can't be collated, alone or with the others, and which of
    the two; None where it isn't one, but all of them, or the function itself."""
    if not isinstance(samples, list):
        return None

    def works(*places: int) -> bool:
        try:
            collate([samples[place] for place in places])
        except Exception:  # whether it fails is the question
            return False
        return True

    alone = [works(place) for place in range(len(samples))]
    if not all(alone):
        first = alone.index(False)
        return (
            (first, "can't be collated: its type is the reason, or its content")
            if any(alone)
            else None
        )
    if len(samples) < 2 or not works(0, 0):  # a function that wants a batch of one size, say
        return None
    odd = [place for place in range(1, len(samples)) if not works(0, place)]
    if len(odd) == len(samples) - 1 > 1:  # the first goes with none: it, or none with any other
        odd = [0] if all(works(1, place) for place in range(2, len(samples))) else []
    why = "doesn't go with the others of its batch (their shapes, types or keys differ)"
    return (odd[0], why) if odd else None


@dataclass(frozen=True, slots=True)
class RandomState:
    """States of the three generators that datasets draw from."""

    python: Any
    numpy: Any
    torch: torch.Tensor

    @classmethod
    def now(cls) -> RandomState:
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state())

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)


class MapSource(torch.utils.data.Dataset[WorkerMessage]):
    """A dataset for torch's loader whose items are requests to the user's map-style dataset.

    seed: None, or what each sample's random numbers are keyed by, with epoch and index.
    substitutes: what stands in for bad samples; None where one is an error.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        collate: Collate,
        batched: bool,
        seed: int | None = None,
        substitutes: Substitutes | None = None,
    ) -> None:
        self.dataset = dataset
        self._collate = collate
        self._batched = batched
        self._reader = MapSampleReader(dataset, seed, substitutes)
        self._has_state = has_state(dataset)

    def __getitem__(self, request: WorkerRequest) -> WorkerMessage:
        if request.restore is not None:
            self.load(request.restore)
        worker = worker_id()
        if request.void:
            return WorkerMessage(worker=worker, void=True)
        in_main = torch.utils.data.get_worker_info() is None
        before = RandomState.now() if in_main and self._reader.seed is not None else None
        try:
            read, batch = self._fetch(request)
        except TooManyBadSamplesError as error:  # torch would raise it without its sample_ids
            return WorkerMessage(worker=worker, error=error)
        finally:
            if before is not None:
                before.restore()
        # Every time, unlike a stream's: what lies between two could not be read again.
        state = self.state() if self._has_state and not in_main else None
        return WorkerMessage(
            batch=batch,
            samples=len(read.ids),
            ids=read.ids,
            occurrences=request.occurrences,
            worker=worker,
            state=state,
            bad=read.bad,
        )

    def _fetch(self, request: WorkerRequest) -> tuple[FetchedSamples, Any]:
        if not self._batched:
            read = self._reader.read([request.index], request.epoch, together=False)
            return read, self._collate(read.samples[0])
        read = self._reader.read(list(request.index), request.epoch, together=True)
        return read, collate_named(self._collate, read.samples, read.ids)

    def state(self) -> dict[str, Any]:
        """The dataset's own state as it is now, if it has one."""
        return {"dataset": state_of(self.dataset)} if self._has_state else {}

    def load(self, state: dict[str, Any]) -> None:
        """Hand a state back to the dataset."""
        if "dataset" in state and self._has_state:
            self.dataset.load_state_dict(copy_of(state["dataset"]))


_DONE: Any = object()


class IterableSource(torch.utils.data.IterableDataset[WorkerMessage]):
    """Batches of an iterable dataset; each worker iterates its own copy, as torch has it.

    positions: of each worker, where the first pass goes on. first: the worker whose batch is next.
    seed: None, or what a worker's random numbers are keyed by, with epoch, rank and worker.
    persistent: whether workers go on with the next epoch. draws_seeds: whether torch's loader in
    this process draws a seed of torch's generator for each pass. previous: without workers, the
    source of the pass before, over the same dataset.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        collate: Collate,
        batch_size: int | None,
        drop_last: bool,
        epoch: int,
        positions: Sequence[WorkerPosition] = (),
        first: int = 0,
        seed: tuple[int, int] | None = None,
        persistent: bool = False,
        draws_seeds: bool = False,
        previous: IterableSource | None = None,
    ) -> None:
        self.dataset = dataset
        self._collate = collate
        self._batch_size = batch_size
        self._drop_last = drop_last
        # In shared memory: workers that go on read there what epoch it is.
        self._epoch = torch.tensor([epoch])
        if persistent:
            self._epoch.share_memory_()  # type: ignore[no-untyped-call]
        self._positions = tuple(positions)
        self._first = first
        self._seed = seed
        self._persistent = persistent
        self._draws_seeds = draws_seeds
        self._exact = has_exact_state(dataset)
        self._iterator: Any = None
        self._begun = False  # this pass
        self._over = False
        self._past: Ending | None = None  # how the latest pass that began ended so far
        self._owed: WorkerPosition | None = None  # the next pass begins behind it
        self._draws: StreamDraws | None = None  # what it draws from
        self._prepared: Any = None  # the next pass's iterator, if its state was asked for already
        self._start: WorkerPosition | None = None  # of the next pass, if that was asked for
        if previous is not None and not self._positions:
            self._iterator, self._owed = previous._iterator, previous._owed
            self._past = previous._past

    def tell_epoch(self, epoch: int) -> None:
        """Let workers that go on begin this epoch next."""
        self._epoch[0] = epoch

    def __iter__(self) -> Iterator[WorkerMessage]:
        worker = worker_id()
        positions, self._positions = self._positions, ()
        first, self._first = self._first, 0
        if self._seed is not None:
            seed, rank = self._seed
            seed_all(int(keyed_hash(seed, int(self._epoch[0]), rank, worker)))
        if worker < first:
            yield WorkerMessage(worker=worker, void=True)
        if self._persistent and self._past is not None:
            # From each worker: torch asks them by turns.
            position = self._owed or WorkerPosition(state=self._state_or_none(), past=self._past)
            yield WorkerMessage(
                worker=worker, void=True, past=position.past, state=position.state, rng=position.rng
            )
        position = positions[worker] if positions else WorkerPosition()
        self._begun = True
        if position.over:  # the next pass begins behind it
            self._over, self._past = True, "ended"
            self._owed = position.next_epoch()
            return
        if self._owed is not None:
            position, self._owed = self._owed, None
        yield from self._batches(worker, position)

    @property
    def mixed(self) -> str | None:
        """A generator that the stream and others draw from by turns, without workers."""
        return None if self._draws is None else self._draws.mixed

    def forget(self) -> None:
        """Forget where the dataset stands: it is to stand elsewhere now."""
        self._owed = None

    def _batches(self, worker: int, position: WorkerPosition) -> Iterator[WorkerMessage]:
        info = torch.utils.data.get_worker_info()
        in_main, streams = info is None, 1 if info is None else info.num_workers
        # A worker's first pass begins with its seed.
        goes_on = self._persistent and self._past is not None
        draws = self._draws = StreamDraws(position.rng, in_main=in_main)
        self._over, self._past = False, "left"
        iterator = draws(lambda: self._begin(position))
        is_stateful = self._is_stateful()
        is_watched = not is_stateful and self._seed is None
        if not is_watched:
            draws.ignore()
        for _ in range(position.since):
            if self._over:
                break
            draws(lambda: self._next(iterator))
        snapshots = Snapshots()
        number = position.batches
        while not self._over and (samples := draws(lambda: self._next(iterator))):
            if self._batch_size is None:
                batch = self._collate(samples[0])
            else:
                batch = collate_named(self._collate, samples, [f"{len(samples)} of batch {number}"])
            begin = number * (self._batch_size or 1)
            ids = [(begin + i) * streams + worker for i in range(len(samples))]
            number += 1
            takes = is_stateful and not in_main and (self._over or snapshots.due())
            state = snapshots.take(self.state) if takes else None
            watches = is_watched and (self._persistent if self._over else in_main or goes_on)
            yield WorkerMessage(
                batch=batch,
                samples=len(samples),
                ids=ids,
                worker=worker,
                state=state,
                over=self._over,
                rng=draws.noted(is_over=self._over) if watches else None,
            )
            goes_on = False  # it has been said
        if self._persistent:
            rng = draws.noted(is_over=True) if is_watched else None
            state = self._state_or_none()
            yield WorkerMessage(worker=worker, void=True, over=True, state=state, rng=rng)

    def _begin(self, position: WorkerPosition) -> Any:
        """The pass's iterator at a position, but for the batches since its state."""
        self._start = None
        if position.state is None:
            self._iterator, self._prepared = self._fresh(), None
            return self._iterator
        self._prepared = None
        generator = torch.get_rng_state()
        self._iterator = self._loaded(position.state)
        if position.past is None:
            return self._iterator
        if self._draws_seeds and not torch.equal(generator, torch.get_rng_state()):
            fresh_seed()  # torch's loader has drawn its own before the state put this back
        return self._anew(position.past)

    def _anew(self, past: Ending) -> Any:
        """The iterator of the epoch behind the one whose state was loaded."""
        first = _DONE
        if self._iterator is not self.dataset and not has_state(self._iterator):
            # A generator takes a state over with its first sample. At the end of an epoch some say
            # where that ended, others where the next one begins.
            first = next(self._iterator, _DONE)
        if past == "ended" and first is not _DONE:
            return itertools.chain([first], self._iterator)
        self._iterator = iter(self.dataset)
        return self._iterator

    def _fresh(self) -> Any:
        return iter(self.dataset) if self._prepared is None else self._prepared

    def _loaded(self, state: dict[str, Any]) -> Any:
        dataset = self.dataset
        if "dataset" in state and self._exact:
            iterator = iterator_at(dataset, state["dataset"])
        else:
            iterator = iter(dataset)
        if "iterator" in state and has_state(iterator):
            iterator.load_state_dict(copy_of(state["iterator"]))
        return iterator

    def _next(self, iterator: Any) -> list[Any]:
        """Samples of the next batch; none at the end."""
        wanted = self._batch_size or 1
        # iter() is never called again, as islice() would: there are iterators that begin anew then.
        samples = list(map(next, itertools.repeat(iterator, wanted)))
        if len(samples) < wanted:
            self._over, self._past = True, "ended"
        return [] if self._drop_last and self._over else samples

    def _is_stateful(self) -> bool:
        return self._exact or has_state(self._iterator)

    def position(self, batches: int, *, is_live: bool) -> WorkerPosition | None:
        """Where the stream of this process stands now, between two batches. None: no more is known
        than how many batches were handed out.

        batches: handed out in this epoch. is_live: whether a pass stands there.
        """
        if batches or (is_live and self._begun):
            return self._known(WorkerPosition(batches=batches, over=self._over))
        if self._owed is not None:
            return self._owed
        behind = self._known(WorkerPosition(past=self._past)) if self._past is not None else None
        if not is_live:
            return behind
        if self._prepared is None:
            self._start, self._prepared = behind, iter(self.dataset)
        if has_state(self._prepared):
            return WorkerPosition(state=self._state_of(self._prepared))
        # Before its first pass a dataset is as it was made, and many have no state yet.
        return self._start

    def _known(self, position: WorkerPosition) -> WorkerPosition | None:
        state = self._state_or_none()
        return None if state is None else replace(position, state=state)

    def _state_or_none(self) -> dict[str, Any] | None:
        return self.state() or None

    def state(self) -> dict[str, Any]:
        """The state of dataset and iterator as it is now, where they have one."""
        return self._state_of(self._iterator)

    def _state_of(self, iterator: Any) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        if self._exact:
            kept["dataset"] = state_of(self.dataset)
        if iterator is not self.dataset and has_state(iterator):
            kept["iterator"] = state_of(iterator)
        return kept
