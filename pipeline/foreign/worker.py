"""What runs where a torch dataset is read: in torch's worker processes, or in the main one.

torch's own loader carries requests to these sources and what they fetch back; batching and
collating happen here, so that a batch can bring along what resuming needs: which worker made it,
and the dataset's own state behind it.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.utils.data

from penstock.cache.base.hashing import keyed_hash
from penstock.cache.threads import end_with_parent
from penstock.pipeline.foreign.state import copied, has_state, taken
from penstock.pipeline.torch_private import numpy_seed, pinned, tell_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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

    ids: of its samples: their indices; in a stream their places among all workers' streams. void:
    no batch, what a worker has to say between two. over: its stream is at its end. past: the state
    is of the pass before, and how that ended. rng: what the stream drew from (`WorkerPosition`).
    """

    batch: Any = None
    samples: int = 0
    ids: Any = ()
    worker: int = 0
    state: dict[str, Any] | None = None
    void: bool = False
    over: bool = False
    past: Literal["ended", "left"] | None = None
    rng: dict[str, str] | None = None

    def pin_memory(self) -> Fetched:
        """torch's pinning thread calls this."""
        return replace(self, batch=pinned(self.batch))


def as_it_is(item: Any) -> Any:
    """Collating is done already."""
    return item


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


def fresh_seed(generator: torch.Generator | None = None) -> int:
    """A seed drawn as torch's samplers and loaders draw theirs."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def seed_all(key: int) -> None:
    """Seed python's, numpy's and torch's CPU generator. key: 64 bits."""
    random.seed(key)
    np.random.seed([key & 0xFFFFFFFF, key >> 32])
    # Not torch.manual_seed: it queues a call for CUDA each time until CUDA is initialised.
    torch.default_generator.manual_seed(key)


def seed_worker(base_seed: int, worker: int) -> None:
    """Seed a worker as torch does from its loader's base seed."""
    seed = base_seed + worker
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(numpy_seed(base_seed, worker))


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
        seed = None if self.base_seed is None else self.base_seed + worker
        tell_worker(info, dataset=info.dataset.dataset, seed=seed)
        if self.base_seed is not None:
            seed_worker(self.base_seed, worker)
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
        self._has_state = has_state(dataset)

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
        state = self.state() if self._has_state and not in_main else None
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
            error.add_note(f"while reading sample {index!r} of {described(self.dataset)}")
            raise

    def state(self) -> dict[str, Any]:
        """The dataset's own state as it is now, if it has one."""
        return {"dataset": taken(self.dataset)} if self._has_state else {}

    def load(self, state: dict[str, Any]) -> None:
        """Hand a state back to the dataset."""
        if "dataset" in state and self._has_state:
            self.dataset.load_state_dict(copied(state["dataset"]))


def collated(collate: Collate, samples: Any, names: Sequence[Any]) -> Any:
    """collate(samples); an error gets a note that names the samples that it is about."""
    try:
        return collate(samples)
    except Exception as error:  # raised again, with the samples named
        told = _culprit(collate, samples) if len(names) == len(samples) else None
        if told is not None:
            place, why = told
            error.add_note(f"while collating: sample {names[place]!r} {why}")
        else:
            listed = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
            error.add_note(f"while collating the samples {listed}")
        raise


def _culprit(collate: Collate, samples: Any) -> tuple[int, str] | None:
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


def described(dataset: Any) -> str:
    """A dataset for people."""
    name = type(dataset).__name__
    try:
        return f"{name} of {len(dataset)} samples"
    except (TypeError, NotImplementedError):
        return name
