"""Mark how far a pass over a torch dataset has come, and from which states its order was drawn.

Requests go to torch's workers, and their messages move the mark. A mark holds the states that
datasets, their iterators and samplers return of themselves. A state is copied when it is read and
when it is loaded, because many datasets return the very dict that they change later, and keep the
one that they are given.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from penstock.cache import DatasetError
from penstock.pipeline.plan import Cursor, damaged
from penstock.pipeline.torch_data.random_states import NAMES, check_frozen
from penstock.pipeline.torch_private import pinned

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Classes whose own state doesn't hold all that a resume needs, by module and name, with their
# subclasses. They are read again up to the position instead, which is exact. The names are listed,
# because nothing in such a class distinguishes it from one whose state is exact.
INEXACT_STATES = {
    # Its documentation says that the contents of a shuffle buffer are lost. Also, each later epoch
    # begins at a state that was loaded once.
    ("datasets.iterable_dataset", "IterableDataset")
}
_SCALARS = frozenset({int, float, bool, str, bytes, complex, type(None)})


def has_state(owner: object) -> bool:
    """Return True if the object has load_state_dict() and a state_dict() without arguments."""
    take = getattr(owner, "state_dict", None)
    if not callable(take) or not callable(getattr(owner, "load_state_dict", None)):
        return False
    try:
        inspect.signature(take).bind()
    except TypeError:
        return False  # it needs arguments that are unknown here
    except ValueError:
        return True  # compiled, without a signature
    return True


def has_exact_state(dataset: object) -> bool:
    """Return True if the dataset's state is sufficient to continue exactly."""
    names = {(kind.__module__, kind.__qualname__) for kind in type(dataset).__mro__}
    return not names & INEXACT_STATES and has_state(dataset)


def copy_of(state: Any) -> Any:
    """Return a copy of a state that shares nothing with it."""
    if type(state) in _SCALARS:
        return state
    if type(state) is dict:
        return {copy_of(key): copy_of(value) for key, value in state.items()}
    if type(state) is list:
        # deepcopy takes 0.4 us per number: milliseconds for a generator's state as a list.
        plain = _SCALARS.issuperset(map(type, state))
        return state.copy() if plain else [copy_of(value) for value in state]
    return copy.deepcopy(state)


def state_of(owner: Any) -> Any:
    """Return an owner's current state. Raises DatasetError if it can't be copied."""
    state = owner.state_dict()
    try:
        return copy_of(state)
    except (TypeError, RuntimeError, RecursionError) as error:
        raise DatasetError(
            f"{type(owner).__name__}.state_dict() returned a value that can't be copied ({error}), "
            "so it can't be kept while reading continues. Return plain values: numbers, strings, "
            "lists, dicts, arrays, tensors."
        ) from error


def is_same_state(left: Any, right: Any) -> bool:
    """Return True if two states are equal, except for JSON's changes (tuples, keys)."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return bool(np.array_equal(left, right))
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        a, b = ({str(key): value for key, value in each.items()} for each in (left, right))
        return a.keys() == b.keys() and all(is_same_state(a[key], b[key]) for key in a)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(is_same_state, left, right))
    return type(left) is type(right) and bool(left == right)


def iterator_at(dataset: Any, state: Any) -> Any:
    """Return an iterator of the dataset that continues from a state of the dataset.

    A dataset that is its own iterator loads its state after iter(), which may reset it. Any other
    loads it before, because the iterator may be made from it, and again if iter() has undone that.
    """
    if callable(getattr(dataset, "__next__", None)):
        iterator = iter(dataset)
        if iterator is dataset:
            return _reset_to(dataset, state)
    dataset.load_state_dict(copy_of(state))
    before = _state_now(dataset)
    iterator = iter(dataset)
    if is_same_state(before, state) and not is_same_state(_state_now(dataset), state):
        dataset.load_state_dict(copy_of(state))
    return iterator


def _reset_to(dataset: Any, state: Any) -> Any:
    """Load a state into a dataset that is its own iterator, after iter() has reset it."""
    before = _state_now(dataset)
    dataset.load_state_dict(copy_of(state))
    now = _state_now(dataset)
    # If the state shows no change, the dataset may apply it in iter().
    is_pending = is_same_state(now, before) and not is_same_state(now, state)
    return iter(dataset) if is_pending else dataset


def _state_now(dataset: Any) -> Any:
    """Return a dataset's current state; an unequal value if it has none yet."""
    try:
        return state_of(dataset)
    except Exception:  # some datasets have a state only after their first sample
        return _state_now


def description_of(dataset: Any) -> str:
    """Return a dataset's class and length for messages."""
    name, length = type(dataset).__name__, length_of(dataset)
    return name if length is None else f"{name} of {length} samples"


def length_of(dataset: Any) -> int | None:
    """Return a dataset's length; None if it has none."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


Ending = Literal["ended", "left"]
"""How the pass before ended: at its end, or left in its middle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRequest:
    """A request to a worker.

    index: indices of a batch's samples, or one index without batches. epoch: of all, or of each,
    int64. occurrences: of each (`Occurrences`); None is zeros. restore: a dataset state that the
    worker loads first. void: requests nothing; it only moves the next request to the next worker.
    """

    index: Any = None
    epoch: int | NDArray[np.int64] = 0
    occurrences: NDArray[np.int64] | None = None
    restore: dict[str, Any] | None = None
    void: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPosition:
    """How far one worker's stream has been delivered.

    batches: delivered of it in this epoch. state: the dataset's, behind the last of these except
    `since`; None if it has none or none was read yet (then `since` equals `batches`). over: the
    stream has ended in this epoch. past: the state is from the end of the pass before, which ended
    or was left; the next epoch begins behind it. rng: without any state, the states of those of the
    process's generators that the stream drew from, at its start, or at its end if it is over.
    """

    batches: int = 0
    since: int = 0
    state: dict[str, Any] | None = None
    over: bool = False
    past: Ending | None = None
    rng: dict[str, str] | None = None

    def check(self) -> None:
        """Raise ValueError for an impossible position."""
        if self.past not in (None, "ended", "left"):
            raise ValueError(f"past is {self.past!r}")
        if any(type(count) is not int or count < 0 for count in (self.batches, self.since)):
            raise ValueError(f"counts are {(self.batches, self.since)}")

    def after(
        self, batches: int, *, state: dict[str, Any] | None, over: bool, rng: dict[str, str] | None
    ) -> WorkerPosition:
        """Return the position behind some more batches. state: None if it wasn't read this time."""
        count = self.batches + batches
        if state is not None:
            return WorkerPosition(batches=count, state=state, over=over)
        if not over and rng is None:
            rng = self.rng
        return replace(self, batches=count, since=self.since + batches, over=over, rng=rng)

    def next_epoch(self) -> WorkerPosition:
        """Return the position at the start of the next epoch, in a persistent worker."""
        if self.over:
            return WorkerPosition(state=self.state, past="ended", rng=self.rng)
        return WorkerPosition(state=self.state, past="left")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMessage:
    """A message from a worker: a batch with what is needed to continue behind it, or a position
    alone.

    ids: of the samples: their indices; in a stream, their positions among all workers' streams.
    epochs, occurrences: of each, of the request; None if all are of the pass's epoch. position: of
    the worker behind this message; a map-style dataset's has its state alone; None if there is
    none. void: it has no batch. bad: rows whose own samples are bad: their indices, and why; ids
    are then those of the substitutes. error: to raise instead of a batch.
    """

    batch: Any = None
    samples: int = 0
    ids: Any = ()
    epochs: NDArray[np.int64] | None = None
    occurrences: NDArray[np.int64] | None = None
    worker: int = 0
    position: WorkerPosition | None = None
    void: bool = False
    bad: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    error: Exception | None = None

    def pin_memory(self) -> WorkerMessage:
        """Return this message with its batch in pinned memory; torch's pinning thread calls
        this."""
        return replace(self, batch=pinned(self.batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The position of a pass: what was delivered of an epoch, and what its order was drawn from.

    batches: delivered on this rank. position: samples of the epoch over all ranks (plans only).
    base_seed: torch's, of the workers. sampler_seed, rng, python_rng, numpy_rng, generator: what
    the sampler drew from: a seed, or the states of torch's, python's and numpy's generators, or of
    the user's. mixed: the one of them whose draws can't be repeated. sampler: its own state.
    sampler_epoch, dataset_epoch: of a sampler or an iterable dataset with set_epoch. workers:
    positions of torch's workers (one without workers). next_worker: the worker of the next batch.
    bad: samples of the epoch that were replaced before the state was taken, over all ranks.
    """

    epoch: int = 0
    batches: int = 0
    position: int = 0
    base_seed: int | None = None
    sampler_seed: int | None = None
    rng: str | None = None
    python_rng: str | None = None
    numpy_rng: str | None = None
    mixed: str | None = None
    generator: str | None = None
    sampler: Any = None
    sampler_epoch: int | None = None
    dataset_epoch: int | None = None
    workers: tuple[WorkerPosition, ...] = field(default=())
    next_worker: int = 0
    bad: int = 0

    @property
    def cursor(self) -> Cursor:
        """The beginning of the next batch in a plan."""
        return Cursor(self.epoch, self.position)

    def to_dict(self) -> dict[str, Any]:
        """Return the mark as JSON types, except for states of the user's own dataset and
        sampler."""
        own = {name: getattr(self, name) for name in self.__slots__ if name != "workers"}
        kept = {name: copy_of(value) for name, value in own.items() if value is not None}
        names = WorkerPosition.__slots__
        workers = [{name: copy_of(getattr(each, name)) for name in names} for each in self.workers]
        return {**kept, "workers": workers}

    @classmethod
    def from_dict(cls, values: Any) -> Mark:
        """Return the mark of a `to_dict`; raises ResumeError for values that it can't have
        written."""
        try:
            given = copy_of(dict(values))
            workers = tuple(WorkerPosition(**worker) for worker in given.pop("workers"))
            mark = cls(workers=workers, **given)
            for worker in workers:
                worker.check()
            counts = (mark.epoch, mark.batches, mark.position, mark.next_worker, mark.bad)
            if any(type(count) is not int or count < 0 for count in counts):
                raise ValueError(f"counts are {counts}")
            frozen = {name: getattr(mark, name) for name in NAMES}
            own = {"rng": mark.generator}
            for states in (frozen, own, *(worker.rng or {} for worker in workers)):
                check_frozen(states)
        except (TypeError, ValueError, KeyError) as error:
            raise damaged(error) from error
        return mark
