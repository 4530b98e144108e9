"""Define the requests and messages of torch's workers, and seed the workers as torch does.

Batching and collating happen where the dataset is read, in a worker process or in the main one, so
that a batch carries what a resume needs: its worker, and the dataset's own state behind it.
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
from penstock.pipeline.torch_private import numpy_seed, pinned, set_worker_info

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

# Reading a dataset's state may take seconds, so it may use this share of a worker's time. Batches
# between two states are counted, and after a resume they are read again and dropped.
SNAPSHOT_TIME_SHARE = 0.02


Ending = Literal["ended", "left"]
"""How the pass before ended: at its end, or left in its middle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRequest:
    """A request to a worker.

    index: indices of a batch's samples, or one index without batches. occurrences: of each
    (`Occurrences`); None is zeros. restore: a dataset state that the worker loads first. void:
    requests nothing; it only moves the next request to the next worker.
    """

    index: Any = None
    epoch: int = 0
    occurrences: NDArray[np.int64] | None = None
    restore: dict[str, Any] | None = None
    void: bool = False


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row of a batch whose own sample is bad.

    sample_id: the bad sample. reason: why it is bad.
    """

    sample_id: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMessage:
    """A message from a worker: a batch with what is needed to continue behind it, or a position
    alone.

    state: of the dataset; None if it wasn't read this time. ids: of the samples: their indices; in
    a stream, their positions among all workers' streams. occurrences: of the request. void: it has
    no batch. over: the stream is at its end. past: the state is from the end of the pass before,
    which ended in this way. rng: what the stream drew from (`WorkerPosition`). bad: rows whose own
    samples are bad; ids are then those of the substitutes. error: to raise instead of a batch.
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
        """Return this message with its batch in pinned memory; torch's pinning thread calls
        this."""
        return replace(self, batch=pinned(self.batch))


def identity(item: Any) -> Any:
    """Return the item: a collate function for batches that are collated already."""
    return item


def worker_id() -> int:
    """Return the number of this worker process; 0 in the main process."""
    info = torch.utils.data.get_worker_info()
    return 0 if info is None else info.id


class Snapshots:
    """Decides after which batches reading a dataset's state is worth its cost."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._spent_s = 0.0

    def due(self) -> bool:
        """Return True if the states read so far cost little enough for another one."""
        elapsed_s = time.perf_counter() - self._began
        return self._spent_s <= SNAPSHOT_TIME_SHARE * elapsed_s

    def take(self, state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return state(), and count the time that it takes."""
        began = time.perf_counter()
        snapshot = state()
        self._spent_s += time.perf_counter() - began
        return snapshot


def seed_all(key: int) -> None:
    """Seed python's, numpy's and torch's CPU generator. key: 64 bits."""
    random.seed(key)
    np.random.seed([key & 0xFFFFFFFF, key >> 32])
    # Not torch.manual_seed, which queues a call for CUDA each time until CUDA is initialised.
    torch.default_generator.manual_seed(key)


def seed_worker(base_seed: int, worker: int) -> None:
    """Seed a worker as torch does from its loader's base seed."""
    seed = base_seed + worker
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(numpy_seed(base_seed, worker))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInit:
    """The init function of each worker: it shows the user's dataset instead of Penstock's source.

    It then calls the user's own function. base_seed: seeds the worker instead of the seed that
    torch drew (in a resumed pass).
    """

    worker_init_fn: Callable[[int], None] | None
    base_seed: int | None

    def __call__(self, worker: int) -> None:
        end_with_parent()
        info: Any = torch.utils.data.get_worker_info()
        seed = None if self.base_seed is None else self.base_seed + worker
        set_worker_info(info, dataset=info.dataset.dataset, seed=seed)
        if self.base_seed is not None:
            seed_worker(self.base_seed, worker)
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker)
