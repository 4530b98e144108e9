"""Define what torch's workers are asked and what they send back, and seed them as torch does.

Batching and collating happen where the dataset is read, in a worker process or in the main one, so
that a batch can bring along what resuming needs: which worker made it, and the dataset's own state
behind it.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.utils.data

from penstock.cache import end_with_parent
from penstock.pipeline.torch_private import numpy_seed, pinned, tell_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from penstock.pipeline.torch_data.sample_faults import BadRow

# A dataset's state may be costly (seconds, for some): it is taken as often as that takes this share
# of a worker's time; batches in between are counted, and read again and dropped after a resume.
SNAPSHOT_TIME_SHARE = 0.02


Ending = Literal["ended", "left"]
"""How the pass before ended: at its end, or it was left in its middle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRequest:
    """What a worker is asked to fetch.

    index: indices of a batch's samples, or one where nothing is batched. occurrences: of each
    (`Occurrences`); None stands for zeros. restore: a dataset state
    that the worker takes over first. void: asks for nothing; it only makes the next request go to
    the next worker.
    """

    index: Any = None
    epoch: int = 0
    occurrences: NDArray[np.int64] | None = None
    restore: dict[str, Any] | None = None
    void: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMessage:
    """What a worker sends: a batch with what is needed to go on behind it, or news between two.

    state: of the dataset; None if it wasn't taken this time. ids: of its samples: their indices; in
    a stream their places among all workers' streams. occurrences: of the request. void: no batch,
    only news. over: its stream is at its end. past: the state is of the pass before, and how that
    ended. rng: what the stream drew from (`WorkerPosition`). bad: rows whose own samples are bad;
    ids are then of those that stand in. error: what there is to raise in place of a batch.
    """

    batch: Any = None
    samples: int = 0
    ids: Any = ()
    occurrences: NDArray[np.int64] | None = None
    worker: int = 0
    state: dict[str, Any] | None = None
    void: bool = False
    over: bool = False
    past: Ending | None = None
    rng: dict[str, str] | None = None
    bad: Mapping[int, BadRow] = field(default_factory=dict)
    error: Exception | None = None

    def pin_memory(self) -> WorkerMessage:
        """This message with its batch in pinned memory; torch's pinning thread calls this."""
        return replace(self, batch=pinned(self.batch))


def identity(item: Any) -> Any:
    """The item itself: a collate function where all is collated already."""
    return item


def worker_id() -> int:
    """The number of this worker process; 0 in the main process."""
    info = torch.utils.data.get_worker_info()
    return 0 if info is None else info.id


class Snapshots:
    """Decides behind which batches a dataset's state is worth its cost."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._spent_s = 0.0

    def due(self) -> bool:
        """Whether the states taken so far cost little enough for another one."""
        elapsed_s = time.perf_counter() - self._began
        return self._spent_s <= SNAPSHOT_TIME_SHARE * elapsed_s

    def take(self, state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What state() gives; its time is counted."""
        began = time.perf_counter()
        snapshot = state()
        self._spent_s += time.perf_counter() - began
        return snapshot


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
    """The init function of each worker: it shows the user's dataset in our source's place.

    Then it calls the user's own. base_seed: to seed the worker from instead of what torch drew (a
    resumed pass).
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
