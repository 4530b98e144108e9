"""What runs where a torch dataset is read: in torch's worker processes, or in the main one.

torch's own loader carries requests to these sources and what they fetch back; batching and
collating happen here, so that a batch can bring along what resuming needs: which worker made it,
and the dataset's own state behind it.
"""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.utils.data

from cache.hashing import keyed_hash
from cache.threads import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Collate = Callable[[Any], Any]

# A dataset's state may be costly (seconds, for some): it is taken as often as that takes this share
# of a worker's time; batches in between are counted, and read again and dropped after a resume.
SNAPSHOT_TIME_SHARE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What one batch shall hold. index: indices of its samples, or one where nothing is batched.

    restore: a dataset state that the worker takes over first. void: asks for nothing; it only makes
    the next request go to the next worker.
    """

    index: Any = None
    epoch: int = 0
    restore: dict[str, Any] | None = None
    void: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A batch, and what is needed to go on behind it. state: None if it wasn't taken this time.

    ids: of its samples: their indices; in a stream their places among all workers' streams.
    """

    batch: Any = None
    samples: int = 0
    ids: Any = ()
    worker: int = 0
    state: dict[str, Any] | None = None
    void: bool = False

    def pin_memory(self) -> Fetched:
        """torch's pinning thread calls this."""
        from torch.utils.data._utils.pin_memory import pin_memory

        return replace(self, batch=pin_memory(self.batch))  # type: ignore[no-untyped-call]


def as_it_is(item: Any) -> Any:
    """Collating is done already."""
    return item


def has_state(thing: object) -> bool:
    """Whether it has both state_dict() and load_state_dict()."""
    return callable(getattr(thing, "state_dict", None)) and callable(
        getattr(thing, "load_state_dict", None)
    )


def worker_id() -> int:
    """0 in the main process."""
    info = torch.utils.data.get_worker_info()
    return 0 if info is None else info.id


class Snapshots:
    """Decides after which batches a state is worth its cost."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._spent_s = 0.0

    def due(self) -> bool:
        """Whether the states taken so far cost little enough for another one."""
        elapsed_s = time.perf_counter() - self._began
        return self._spent_s <= SNAPSHOT_TIME_SHARE * elapsed_s

    def take(self, state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The state; its time is counted."""
        began = time.perf_counter()
        taken = state()
        self._spent_s += time.perf_counter() - began
        return taken


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


def seed_all(key: int) -> None:
    """Seed python's, numpy's and torch's CPU generator. key: 64 bits."""
    random.seed(key)
    np.random.seed([key & 0xFFFFFFFF, key >> 32])
    # Not torch.manual_seed: it queues a call for CUDA each time until CUDA is initialised.
    torch.default_generator.manual_seed(key)


def seed_worker(base_seed: int, worker: int) -> None:
    """Seed a worker as torch does from its loader's base seed."""
    from torch.utils.data._utils.worker import _generate_state

    seed = base_seed + worker
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(_generate_state(base_seed, worker))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInit:
    """First thing in each worker: torch's view of the worker is the user's dataset, not our source.

    base_seed: to seed the worker from instead of what torch drew (a resumed pass).
    """

    worker_init_fn: Callable[[int], None] | None
    base_seed: int | None

    def __call__(self, worker: int) -> None:
        end_with_parent()
        info: Any = torch.utils.data.get_worker_info()
        # WorkerInfo refuses plain assignment, to save users from themselves.
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.base_seed is not None:
            seed_worker(self.base_seed, worker)
            object.__setattr__(info, "seed", self.base_seed + worker)
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker)


class MapSource(torch.utils.data.Dataset[Fetched]):
    """Fetches requests from a map-style dataset.

    seed: None, or what each sample's random numbers are keyed by, with epoch and index.
    """

    def __init__(
        self, dataset: Any, *, collate: Collate, batched: bool, seed: int | None = None
    ) -> None:
        self.dataset = dataset
        self._collate = collate
        self._batched = batched
        self._seed = seed

    def __getitem__(self, request: Request) -> Fetched:
        if request.restore is not None:
            self.load(request.restore)
        worker = worker_id()
        if request.void:
            return Fetched(worker=worker, void=True)
        in_main = torch.utils.data.get_worker_info() is None
        before = RandomState.now() if in_main and self._seed is not None else None
        try:
            batch = self._fetch(request)
        finally:
            if before is not None:
                before.restore()
        # Every time, unlike a stream's: what lies between two could not be read again.
        state = None if in_main or not has_state(self.dataset) else self.state()
        ids = list(request.index) if self._batched else [request.index]
        return Fetched(batch=batch, samples=len(ids), ids=ids, worker=worker, state=state)

    def _fetch(self, request: Request) -> Any:
        if not self._batched:
            (key,) = self._keys(request.epoch, [request.index])
            return self._collate(self._one(request.index, key))
        indices = list(request.index)
        keys = self._keys(request.epoch, indices)
        many = getattr(self.dataset, "__getitems__", None)
        if callable(many):
            if keys and keys[0] is not None:
                seed_all(keys[0])  # one call draws for all: keyed by its first sample
            samples = many(indices)
        else:
            samples = [self._one(index, key) for index, key in zip(indices, keys, strict=True)]
        return collated(self._collate, samples, indices)

    def _keys(self, epoch: int, indices: Sequence[Any]) -> list[int | None]:
        if self._seed is None:
            return [None] * len(indices)
        hashes = keyed_hash(self._seed, epoch, np.asarray(indices, np.int64))
        return [int(key) for key in hashes]

    def _one(self, index: Any, key: int | None) -> Any:
        if key is not None:
            seed_all(key)
        try:
            return self.dataset[index]
        except Exception as error:  # raised again, with the sample named
            error.add_note(f"while reading sample {index!r} of {_described(self.dataset)}")
            raise

    def state(self) -> dict[str, Any]:
        """The dataset's own state as it is now, if it has one."""
        return {"dataset": self.dataset.state_dict()} if has_state(self.dataset) else {}

    def load(self, state: dict[str, Any]) -> None:
        """Hand a state back to the dataset."""
        if "dataset" in state and has_state(self.dataset):
            self.dataset.load_state_dict(state["dataset"])


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPosition:
    """How far one worker's stream has been handed out.

    batches: handed out of it in this epoch. state: the dataset's behind the last of these but
    `since`; None if it has none or none was taken yet (then `since` equals `batches`).
    """

    batches: int = 0
    since: int = 0
    state: dict[str, Any] | None = None

    def moved(self, fetched: Fetched) -> WorkerPosition:
        """Behind one batch more."""
        if fetched.state is not None:
            return WorkerPosition(batches=self.batches + 1, since=0, state=fetched.state)
        return replace(self, batches=self.batches + 1, since=self.since + 1)


class IterableSource(torch.utils.data.IterableDataset[Fetched]):
    """Batches of an iterable dataset; each worker iterates its own copy, as torch has it.

    positions: of each worker, where the first pass goes on. first: the worker whose batch is next.
    seed: None, or what a worker's random numbers are keyed by, with epoch, rank and worker.
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
    ) -> None:
        self.dataset = dataset
        self._collate = collate
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._epoch = epoch
        self._positions = tuple(positions)
        self._first = first
        self._seed = seed
        self._iterator: Any = None
        self._prepared: Any = None  # the next pass's iterator, if its state was asked for already

    def __iter__(self) -> Iterator[Fetched]:
        worker = worker_id()
        epoch, self._epoch = self._epoch, self._epoch + 1  # a persistent worker's next pass
        positions, self._positions = self._positions, ()
        first, self._first = self._first, 0
        if self._seed is not None:
            seed, rank = self._seed
            seed_all(int(keyed_hash(seed, epoch, rank, worker)))
        if worker < first:
            yield Fetched(worker=worker, void=True)
        yield from self._batches(worker, positions[worker] if positions else WorkerPosition())

    def _batches(self, worker: int, position: WorkerPosition) -> Iterator[Fetched]:
        iterator = self._start(position.state)
        for _ in range(position.since):
            if not self._next(iterator):
                return
        info = torch.utils.data.get_worker_info()
        in_main, streams = info is None, 1 if info is None else info.num_workers
        snapshots = Snapshots()
        number = position.batches
        while samples := self._next(iterator):
            if self._batch_size is None:
                batch = self._collate(samples[0])
            else:
                batch = collated(self._collate, samples, [f"{len(samples)} of batch {number}"])
            begin = number * (self._batch_size or 1)
            ids = [(begin + i) * streams + worker for i in range(len(samples))]
            number += 1
            is_stateful = not in_main and (has_state(iterator) or has_state(self.dataset))
            state = snapshots.take(self.state) if is_stateful and snapshots.due() else None
            yield Fetched(batch=batch, samples=len(samples), ids=ids, worker=worker, state=state)

    def _start(self, state: dict[str, Any] | None) -> Any:
        # A generator's state is its dataset's, which must know before it starts.
        if state and "dataset" in state and has_state(self.dataset):
            self.dataset.load_state_dict(state["dataset"])
        if self._prepared is None:
            self._prepared = iter(self.dataset)
        self._iterator, self._prepared = self._prepared, None
        if state and "iterator" in state and has_state(self._iterator):
            self._iterator.load_state_dict(state["iterator"])
        return self._iterator

    def _next(self, iterator: Any) -> list[Any]:
        """Samples of the next batch; none at the end."""
        if self._batch_size is None:
            return list(itertools.islice(iterator, 1))
        samples = list(itertools.islice(iterator, self._batch_size))
        return [] if self._drop_last and len(samples) < self._batch_size else samples

    def first_state(self) -> dict[str, Any]:
        """The state of an iterator at its start. A dataset's own is left out unless it is the
        iterator: what it says now is where the last epoch ended."""
        if self._prepared is None:
            self._prepared = iter(self.dataset)
        if not has_state(self._prepared):
            return {}
        key = "dataset" if self._prepared is self.dataset else "iterator"
        return {key: self._prepared.state_dict()}

    def state(self) -> dict[str, Any]:
        """The state of dataset and iterator as it is now, where they have one."""
        taken: dict[str, Any] = {}
        if has_state(self.dataset):
            taken["dataset"] = self.dataset.state_dict()
        if self._iterator is not self.dataset and has_state(self._iterator):
            taken["iterator"] = self._iterator.state_dict()
        return taken


def collated(collate: Collate, samples: Any, names: Sequence[Any]) -> Any:
    """collate(samples); an error gets a note that names the samples that it is about."""
    try:
        return collate(samples)
    except Exception as error:  # raised again, with the samples named
        culprit = _culprit(collate, samples)
        if culprit is not None and len(names) == len(samples):
            error.add_note(
                f"while collating: sample {names[culprit]!r} doesn't go with the others of its "
                "batch (their shapes, types or keys differ)"
            )
        else:
            listed = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
            error.add_note(f"while collating the samples {listed}")
        raise


def _culprit(collate: Collate, samples: Any) -> int | None:
    """The place of a sample that can't be collated alone, or not with the first."""
    if not isinstance(samples, list):
        return None
    pairs = [[sample] for sample in samples] + [[samples[0], sample] for sample in samples]
    for i, part in enumerate(pairs):
        try:
            collate(part)
        except Exception:  # which one fails is the question
            return i % len(samples)
    return None


def _described(dataset: Any) -> str:
    name = type(dataset).__name__
    try:
        return f"{name} of {len(dataset)} samples"
    except (TypeError, NotImplementedError):
        return name
