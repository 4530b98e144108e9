"""Read a torch dataset in torch's workers or in the main process, and collate batches.

Batching and collating happen where the dataset is read, so that a message carries what a resume
needs: its worker, and the dataset's own state behind the batch. A map-style source fetches the
indices of a request. An iterable source returns the batches of its streams from any position on;
each worker iterates its own copy. The position of a stream is a state of the dataset or of its
iterator, and the number of batches behind it, which are read again and dropped. Without a state,
all earlier batches are.

An error in the user's collate function names the sample that causes it. With `max_bad=`, any error
of the dataset counts as a bad sample, except errors that no sample's bytes can cause.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import InitVar, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.utils.data

from penstock.cache import (
    BadSampleError,
    CorruptShardError,
    PenstockError,
    TooManyBadSamplesError,
    end_with_parent,
)
from penstock.cache.base import keyed_hash, machine_remedy
from penstock.pipeline.options import fresh_seed
from penstock.pipeline.plan import substitutes
from penstock.pipeline.torch_data.mark import WorkerMessage, WorkerPosition, WorkerRequest
from penstock.pipeline.torch_data.owner_states import (
    copy_of,
    description_of,
    has_state,
    iterator_at,
    state_of,
)
from penstock.pipeline.torch_data.random_states import MainDraws, StreamDraws, seed_all, seed_worker
from penstock.pipeline.torch_private import set_worker_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.pipeline.plan import Ints
    from penstock.pipeline.torch_data.mark import Ending

    Collate = Callable[[Any], Any]
    Many = Callable[[list[Any]], list[Any]]
    Parts = tuple[Ints, Ints, Ints]

# Reading a dataset's state may take seconds, so it may use this share of a worker's time. Batches
# between two states are counted, and after a resume they are read again and dropped.
SNAPSHOT_TIME_SHARE = 0.02


def worker_id() -> int:
    """Return the number of this worker process; 0 in the main process."""
    info = torch.utils.data.get_worker_info()
    return 0 if info is None else info.id


def start_worker(init_fn: Callable[[int], None] | None, base_seed: int | None, worker: int) -> None:
    """Begin a worker process: show the user's dataset instead of Penstock's source, and then call
    the user's init function.

    base_seed: seeds the worker instead of the seed that torch drew (in a resumed pass).
    """
    end_with_parent()
    info: Any = torch.utils.data.get_worker_info()
    seed = None if base_seed is None else base_seed + worker
    set_worker_info(info, dataset=info.dataset.dataset, seed=seed)
    if base_seed is not None:
        seed_worker(base_seed, worker)
    if init_fn is not None:
        init_fn(worker)


# -- bad samples

_REASON_CHARACTERS = 300
_OF_THE_PROGRAM = NameError, ImportError, SyntaxError, NotImplementedError, RecursionError
_OF_THE_MACHINE = torch.OutOfMemoryError, ConnectionError, TimeoutError, PermissionError


def is_sample_fault(error: Exception) -> bool:
    """Return True if an error raised while a sample was read shows that the sample is bad."""
    if isinstance(error, BadSampleError | CorruptShardError):
        return True
    if isinstance(error, (PenstockError, StopIteration, *_OF_THE_PROGRAM, *_OF_THE_MACHINE)):
        return False
    return machine_remedy(error) is None


def reason_of(error: Exception) -> str:
    """Return the reason why a sample is bad, on one line."""
    text = " ".join(str(error).split())
    if isinstance(error, BadSampleError) and text:
        return text[:_REASON_CHARACTERS]
    return f"{type(error).__name__}: {text}".removesuffix(": ")[:_REASON_CHARACTERS]


# -- sources


@dataclass(frozen=True, slots=True)
class FetchedSamples:
    """Samples that were read. ids: of the samples. bad: the bad sample of each row that holds a
    substitute, and why it is bad."""

    samples: list[Any]
    ids: list[Any]
    bad: dict[int, tuple[int, str]] = field(default_factory=dict)


def collate_named(collate: Collate, samples: Any, names: Sequence[Any]) -> Any:
    """Return collate(samples); an error gets a note that names the samples that caused it."""
    try:
        return collate(samples)
    except Exception as error:  # raised again, with the samples named
        culprit = _failing_sample(collate, samples) if len(names) == len(samples) else None
        if culprit is not None:
            place, reason = culprit
            error.add_note(f"while collating: sample {names[place]!r} {reason}")
        else:
            listed = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
            error.add_note(f"while collating the samples {listed}")
        raise


def _failing_sample(collate: Collate, samples: Any) -> tuple[int, str] | None:
    """Return the position of the one sample that can't be collated, alone or with the others, and
    why.

    None if several samples, or the function itself, cause the error.
    """
    if not isinstance(samples, list):
        return None

    def works(*places: int) -> bool:
        try:
            collate([samples[place] for place in places])
        except Exception:
            return False
        return True

    alone = [works(place) for place in range(len(samples))]
    if not all(alone):
        reason = "can't be collated because of its type or its content"
        return (alone.index(False), reason) if any(alone) else None
    if len(samples) < 2 or not works(0, 0):  # for example, a function for batches of one size
        return None
    odd = [place for place in range(1, len(samples)) if not works(0, place)]
    if len(odd) == len(samples) - 1 > 1:  # either the first is the odd one, or all differ
        odd = [0] if all(works(1, place) for place in range(2, len(samples))) else []
    reason = "doesn't match the others of its batch (their shapes, types or keys differ)"
    return (odd[0], reason) if odd else None


@dataclass(eq=False, repr=False, kw_only=True)
class MapSource(torch.utils.data.Dataset[WorkerMessage]):
    """A dataset for torch's loader whose items are requests to the user's map-style dataset.

    seed: with epoch and index, it keys each sample's random numbers; None keys none. parts: first
    index and samples of each shard, and the end of each part of a mixture, from which substitutes
    of bad samples are chosen; None if a bad sample is an error.
    """

    dataset: Any
    collate: Collate
    batched: bool
    seed: int | None = None
    parts: Parts | None = None

    def __post_init__(self) -> None:
        self._has_state = has_state(self.dataset)

    def __getitem__(self, request: WorkerRequest) -> WorkerMessage:
        if request.restore is not None:
            self.load(request.restore)
        worker = worker_id()
        if request.void:
            return WorkerMessage(worker=worker, void=True)
        in_main = torch.utils.data.get_worker_info() is None
        before = MainDraws() if in_main and self.seed is not None else None
        try:
            read, batch = self._fetch(request)
        except TooManyBadSamplesError as error:  # torch would raise it without its sample_ids
            return WorkerMessage(worker=worker, error=error)
        finally:
            if before is not None:
                before.restore()
        # Each time, unlike for a stream: samples between two states couldn't be read again.
        has_position = self._has_state and not in_main
        return WorkerMessage(
            batch=batch,
            samples=len(read.ids),
            ids=read.ids,
            epochs=None if isinstance(request.epoch, int) else request.epoch,
            occurrences=request.occurrences,
            worker=worker,
            position=WorkerPosition(state=self.state()) if has_position else None,
            bad=read.bad,
        )

    def _fetch(self, request: WorkerRequest) -> tuple[FetchedSamples, Any]:
        indices = list(request.index) if self.batched else [request.index]
        epoch = request.epoch
        epochs = [epoch] * len(indices) if isinstance(epoch, int) else epoch.tolist()
        many = getattr(self.dataset, "__getitems__", None) if self.batched else None
        read = self._read(indices, epochs, many if callable(many) else None)
        if not self.batched:
            return read, self.collate(read.samples[0])
        return read, collate_named(self.collate, read.samples, read.ids)

    def _read(self, indices: list[Any], epochs: list[int], many: Many | None) -> FetchedSamples:
        """Return samples by index. many: the dataset's `__getitems__`, if it has one.

        Raises what the dataset raises, and TooManyBadSamplesError if no substitute is good.
        """
        if many is not None:
            if indices:  # one call draws for all of them: keyed by the first
                self._seed_sample(indices[0], epochs[0])
            try:
                return FetchedSamples(many(indices), indices)
            except Exception as error:  # raised again, or each sample is read alone
                if self.parts is None or not is_sample_fault(error):
                    raise
        if self.parts is None:
            read_one, keys = self._read_one, zip(indices, epochs, strict=True)
            return FetchedSamples([read_one(*key, None) for key in keys], indices)
        read = FetchedSamples([], [])
        for row, (index, epoch) in enumerate(zip(indices, epochs, strict=True)):
            sample, used, reason = self._read_good(index, epoch, self.parts, many)
            read.samples.append(sample)
            read.ids.append(used)
            if reason is not None:
                read.bad[row] = index, reason
        return read

    def _read_good(
        self, index: Any, epoch: int, parts: Parts, many: Many | None
    ) -> tuple[Any, Any, str | None]:
        """Return a sample or its first good substitute, the index of that, and why it was
        replaced."""
        reasons: dict[int, str] = {}
        (starts, sizes, ends), seed = parts, self.seed or 0
        part = int(np.searchsorted(ends, index, side="right"))
        own = int(ends[part - 1]) if part else 0, int(ends[part])
        others = substitutes(index, seed=seed, epoch=epoch, starts=starts, sizes=sizes, within=own)
        for candidate in itertools.chain([index], others):
            if candidate in reasons:
                continue
            try:
                sample = self._read_one(candidate, epoch, many)
            except Exception as error:  # raised again unless the sample is bad
                if not is_sample_fault(error):
                    raise
                reasons[candidate] = reason_of(error)
            else:
                return sample, candidate, reasons.get(index)
        raise TooManyBadSamplesError(
            f"Sample {index} of {description_of(self.dataset)} is bad ({reasons[index]}), and so "
            f"are all {len(reasons) - 1} substitutes that were tried, the last because of "
            f"{list(reasons.values())[-1]}. The dataset's own code may be the cause: try "
            f"dataset[{index}]. max_bad= is for samples that can't be read.",
            sample_ids=tuple(sorted(reasons)),
        )

    def _read_one(self, index: Any, epoch: int, many: Many | None) -> Any:
        self._seed_sample(index, epoch)
        try:
            if many is None:
                return self.dataset[index]
            (sample,) = many([index])
            return sample
        except Exception as error:  # raised again, with the sample named
            remedy = ""
            if self.parts is None and is_sample_fault(error):
                needed = "seed= and " if self.seed is None else ""
                remedy = f"; with {needed}max_bad=, the loader replaces bad samples and goes on"
            place = f"sample {index!r} of {description_of(self.dataset)}"
            error.add_note(f"while reading {place}{remedy}")
            raise

    def _seed_sample(self, index: Any, epoch: int) -> None:
        if self.seed is not None:
            seed_all(int(keyed_hash(self.seed, epoch, int(index))))

    def position(self, batches: int, *, is_live: bool) -> WorkerPosition | None:
        """Return the position behind the last batch, with the dataset's own state; None if it has
        none."""
        del is_live
        return WorkerPosition(batches=batches, state=self.state()) if self._has_state else None

    def state(self) -> dict[str, Any]:
        """Return the dataset's own current state, if it has one."""
        return {"dataset": state_of(self.dataset)} if self._has_state else {}

    def load(self, state: dict[str, Any]) -> None:
        """Load a state into the dataset."""
        if "dataset" in state and self._has_state:
            self.dataset.load_state_dict(copy_of(state["dataset"]))


_DONE: Any = object()


@dataclass(eq=False, repr=False, kw_only=True)
class IterableSource(torch.utils.data.IterableDataset[WorkerMessage]):
    """Batches of an iterable dataset; each worker iterates its own copy, as with torch.

    positions: of each worker, where the first pass continues. first: the worker of the next batch.
    seed: with epoch, rank and worker, it keys a worker's random numbers; None keys none.
    persistent: workers continue with the next epoch. draws_seeds: torch's loader in this process
    draws a seed from torch's generator for each pass. previous: without workers, the source of the
    pass before, over the same dataset.
    """

    dataset: Any
    collate: Collate
    batch_size: int | None
    drop_last: bool
    epoch: int
    positions: tuple[WorkerPosition, ...] = ()
    first: int = 0
    seed: tuple[int, int] | None = None
    persistent: bool = False
    draws_seeds: bool = False
    previous: InitVar[IterableSource | None] = None

    def __post_init__(self, previous: IterableSource | None) -> None:
        # In shared memory, from which persistent workers read the epoch.
        self._shared_epoch = torch.tensor([self.epoch])
        if self.persistent:
            self._shared_epoch.share_memory_()  # type: ignore[no-untyped-call]
        self._exact = has_state(self.dataset, is_exact=True)
        self._iterator: Any = None
        self._has_begun = False  # this pass
        self._over = False
        self._past: Ending | None = None  # the end of the latest pass so far
        self._next_position: WorkerPosition | None = None  # where the next pass begins
        self._draws: StreamDraws | None = None
        self._prepared: Any = None  # the next pass's iterator, if its state was read already
        self._prepared_position: WorkerPosition | None = None  # of that iterator
        if previous is not None and not self.positions:
            self._iterator, self._next_position = previous._iterator, previous._next_position
            self._past = previous._past

    def begin_epoch(self, epoch: int) -> None:
        """Set the epoch that persistent workers begin next."""
        self._shared_epoch[0] = epoch

    def __iter__(self) -> Iterator[WorkerMessage]:
        worker = worker_id()
        positions, self.positions = self.positions, ()
        first, self.first = self.first, 0
        if self.seed is not None:
            seed, rank = self.seed
            seed_all(int(keyed_hash(seed, int(self._shared_epoch[0]), rank, worker)))
        if worker < first:
            yield WorkerMessage(worker=worker, void=True)
        position = positions[worker] if positions else WorkerPosition()
        known = position  # by the loader
        if self.persistent and self._past is not None:
            # Each worker sends one, because torch reads from them in turn.
            behind = WorkerPosition(state=self.state() or None, past=self._past)
            known = self._next_position or behind
            yield WorkerMessage(worker=worker, void=True, position=known)
        self._has_begun = True
        if position.over:
            self._over, self._past = True, "ended"
            self._next_position = position.next_epoch()
            return
        if self._next_position is not None:
            position, self._next_position = self._next_position, None
        yield from self._batches(worker, position, known)

    @property
    def mixed(self) -> str | None:
        """The generator that both the stream and other code draw from, without workers; or None."""
        return None if self._draws is None else self._draws.mixed

    def forget(self) -> None:
        """Forget the dataset's position, because another one will be loaded."""
        self._next_position = None

    def _batches(
        self, worker: int, position: WorkerPosition, known: WorkerPosition
    ) -> Iterator[WorkerMessage]:
        """Yield the batches behind a position. known: where the loader knows the stream to be."""
        info = torch.utils.data.get_worker_info()
        in_main, streams = info is None, 1 if info is None else info.num_workers
        # A worker's first pass begins with its seed.
        goes_on = self.persistent and self._past is not None
        draws = self._draws = StreamDraws(position.rng, in_main=in_main)
        self._over, self._past = False, "left"
        iterator = draws(lambda: self._begin(position))
        is_stateful = self._exact or has_state(self._iterator)
        is_watched = not is_stateful and self.seed is None
        if not is_watched:
            draws.ignore()
        for _ in range(position.since):
            if self._over:
                break
            draws(lambda: self._next(iterator))
        number, spent_s, began_s = position.batches, 0.0, time.perf_counter()
        while not self._over and (samples := draws(lambda: self._next(iterator))):
            if self.batch_size is None:
                batch = self.collate(samples[0])
            else:
                batch = collate_named(self.collate, samples, [f"{len(samples)} of batch {number}"])
            begin = number * (self.batch_size or 1)
            ids = [(begin + i) * streams + worker for i in range(len(samples))]
            number += 1
            now_s, state = time.perf_counter(), None
            is_due = self._over or spent_s <= SNAPSHOT_TIME_SHARE * (now_s - began_s)
            if is_stateful and not in_main and is_due:
                state = self.state()
                spent_s += time.perf_counter() - now_s
            watches = is_watched and (self.persistent if self._over else in_main or goes_on)
            rng = draws.recorded(is_over=self._over) if watches else None
            known = known.after(1, state=state, over=self._over, rng=rng)
            count = len(samples)
            yield WorkerMessage(batch=batch, samples=count, ids=ids, worker=worker, position=known)
            goes_on = False  # the message has reported it
        if self.persistent:
            rng = draws.recorded(is_over=True) if is_watched else None
            known = known.after(0, state=self.state() or None, over=True, rng=rng)
            yield WorkerMessage(worker=worker, void=True, position=known)

    def _begin(self, position: WorkerPosition) -> Any:
        """Return the pass's iterator at a position, before the batches since its state."""
        self._prepared_position = None
        if position.state is None:
            self._iterator = iter(self.dataset) if self._prepared is None else self._prepared
            self._prepared = None
            return self._iterator
        self._prepared = None
        generator = torch.get_rng_state()
        self._iterator = self._iterator_at(position.state)
        if position.past is None:
            return self._iterator
        if self.draws_seeds and not torch.equal(generator, torch.get_rng_state()):
            fresh_seed()  # torch's loader drew its seed before the state reset the generator
        return self._next_epoch(position.past)

    def _next_epoch(self, past: Ending) -> Any:
        """Return the iterator of the epoch after the one whose state was loaded."""
        first = _DONE
        if self._iterator is not self.dataset and not has_state(self._iterator):
            # A generator applies a state with its first sample. At the end of an epoch, some states
            # hold where that epoch ended, others where the next one begins.
            first = next(self._iterator, _DONE)
        if past == "ended" and first is not _DONE:
            return itertools.chain([first], self._iterator)
        self._iterator = iter(self.dataset)
        return self._iterator

    def _iterator_at(self, state: dict[str, Any]) -> Any:
        dataset = self.dataset
        if "dataset" in state and self._exact:
            iterator = iterator_at(dataset, state["dataset"])
        else:
            iterator = iter(dataset)
        if "iterator" in state and has_state(iterator):
            iterator.load_state_dict(copy_of(state["iterator"]))
        return iterator

    def _next(self, iterator: Any) -> list[Any]:
        """Return the samples of the next batch; none at the end."""
        wanted = self.batch_size or 1
        # Not islice(), which would call iter() again: some iterators restart then.
        samples = list(map(next, itertools.repeat(iterator, wanted)))
        if len(samples) < wanted:
            self._over, self._past = True, "ended"
        return [] if self.drop_last and self._over else samples

    def position(self, batches: int, *, is_live: bool) -> WorkerPosition | None:
        """Return the position of this process's stream between two batches.

        None if only the number of delivered batches is known. batches: delivered in this epoch.
        is_live: a pass is active there.
        """
        if batches or (is_live and self._has_begun):
            return self._with_state(WorkerPosition(batches=batches, over=self._over))
        if self._next_position is not None:
            return self._next_position
        behind = self._past and self._with_state(WorkerPosition(past=self._past))
        if not is_live:
            return behind
        if self._prepared is None:
            self._prepared_position, self._prepared = behind, iter(self.dataset)
        if has_state(self._prepared):
            return WorkerPosition(state=self._state_of(self._prepared))
        # Before its first pass a dataset is unchanged, and many have no state yet.
        return self._prepared_position

    def _with_state(self, position: WorkerPosition) -> WorkerPosition | None:
        state = self.state()
        return replace(position, state=state) if state else None

    def state(self) -> dict[str, Any]:
        """Return the current state of the dataset and the iterator, if they have one."""
        return self._state_of(self._iterator)

    def _state_of(self, iterator: Any) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        if self._exact:
            kept["dataset"] = state_of(self.dataset)
        if iterator is not self.dataset and has_state(iterator):
            kept["iterator"] = state_of(iterator)
        return kept
