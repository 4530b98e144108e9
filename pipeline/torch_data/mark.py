"""Mark where a pass over a torch dataset stands, and what its order was drawn from.

A mark holds the states that datasets, their iterators and samplers keep of themselves. A state is
copied at the moment when it is taken or handed back: many datasets return the very dict that they
go on to change, and keep the one that they are given.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.cache import DatasetError, ResumeError
from penstock.pipeline.torch_data.random_states import NAMES, check_frozen

if TYPE_CHECKING:
    from penstock.pipeline.torch_data.worker import Ending, WorkerMessage

# Classes whose own state doesn't say all that a resume needs, by module and name, subclasses
# included; these are read again up to the place instead, which is exact. The one place for such
# names: nothing that the class shows tells it apart from one whose state is exact.
INEXACT = {
    # Its documentation: what lies in a shuffle buffer is lost. And a state, once loaded, is where
    # each later epoch begins too.
    ("datasets.iterable_dataset", "IterableDataset")
}
_SCALARS = frozenset({int, float, bool, str, bytes, complex, type(None)})


def has_state(thing: object) -> bool:
    """Whether a thing has state_dict(), to be called as it is, and load_state_dict()."""
    take = getattr(thing, "state_dict", None)
    if not callable(take) or not callable(getattr(thing, "load_state_dict", None)):
        return False
    try:
        inspect.signature(take).bind()
    except TypeError:
        return False  # it wants arguments that we don't know
    except ValueError:
        return True  # compiled: no signature to look at
    return True


def has_exact_state(dataset: object) -> bool:
    """Whether a dataset has a state that is enough to go on behind it."""
    names = {(kind.__module__, kind.__qualname__) for kind in type(dataset).__mro__}
    return not names & INEXACT and has_state(dataset)


def copy_of(state: Any) -> Any:
    """A copy of a state that shares nothing with it."""
    if type(state) in _SCALARS:
        return state
    if type(state) is dict:
        return {copy_of(key): copy_of(value) for key, value in state.items()}
    if type(state) is list:
        # deepcopy takes 0.4 us for each number: milliseconds for a generator's state as a list.
        plain = _SCALARS.issuperset(map(type, state))
        return state.copy() if plain else [copy_of(value) for value in state]
    return copy.deepcopy(state)


def state_of(owner: Any) -> Any:
    """The state that an owner has now. Raises DatasetError if it can't be copied."""
    state = owner.state_dict()
    try:
        return copy_of(state)
    except (TypeError, RuntimeError, RecursionError) as error:
        raise DatasetError(
            f"{type(owner).__name__}.state_dict() returned what can't be copied ({error}), so it "
            "can't be kept while reading goes on. Return plain values: numbers, strings, lists, "
            "dicts, arrays, tensors."
        ) from error


def is_same_state(one: Any, other: Any) -> bool:
    """Whether two states say the same, JSON's changes (tuples, keys) aside."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        mine, theirs = ({str(key): value for key, value in each.items()} for each in (one, other))
        return mine.keys() == theirs.keys() and all(
            is_same_state(mine[key], theirs[key]) for key in mine
        )
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_same_state, one, other))
    return type(one) is type(other) and bool(one == other)


def iterator_at(dataset: Any, state: Any) -> Any:
    """An iterator of the dataset that goes on from a state of the dataset's.

    A dataset that is its own iterator takes its state behind iter(), which may begin anew. Any
    other takes it before, as its iterator may be made of it, and again where iter() undid that.
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
    """The dataset, its own iterator, which iter() has just begun anew, at a state."""
    before = _state_now(dataset)
    dataset.load_state_dict(copy_of(state))
    now = _state_now(dataset)
    # Nothing to be seen of it: some take it over when they are asked to iterate.
    return (
        iter(dataset) if is_same_state(now, before) and not is_same_state(now, state) else dataset
    )


def _state_now(dataset: Any) -> Any:
    """A dataset's state as it is now; something like no state where it has none yet."""
    try:
        return state_of(dataset)
    except Exception:  # some have a state from their first sample on only
        return _state_now


def description_of(dataset: Any) -> str:
    """A dataset in words, for messages."""
    name = type(dataset).__name__
    try:
        return f"{name} of {len(dataset)} samples"
    except (TypeError, NotImplementedError):
        return name


def length_of(dataset: Any) -> int | None:
    """What a dataset says that its length is; None if it says nothing."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPosition:
    """How far one worker's stream has been handed out.

    batches: handed out of it in this epoch. state: the dataset's behind the last of these but
    `since`; None if it has none or none was taken yet (then `since` equals `batches`). over:
    nothing more comes of it in this epoch. past: the state is of the pass before, which ended or
    was left there; the epoch begins anew behind it. rng: without any state, of the process's
    generators those that the stream drew from, as they were at its start, or if it is over now.
    """

    batches: int = 0
    since: int = 0
    state: dict[str, Any] | None = None
    over: bool = False
    past: Ending | None = None
    rng: dict[str, str] | None = None

    def check(self) -> None:
        """Raise ValueError for what no worker's stream can be at."""
        if self.past not in (None, "ended", "left"):
            raise ValueError(f"past is {self.past!r}")
        if any(type(count) is not int or count < 0 for count in (self.batches, self.since)):
            raise ValueError(f"counts are {(self.batches, self.since)}")

    def moved(self, message: WorkerMessage) -> WorkerPosition:
        """The position behind one batch more."""
        if message.state is not None:
            return WorkerPosition(batches=self.batches + 1, state=message.state, over=message.over)
        return replace(
            self,
            batches=self.batches + 1,
            since=self.since + 1,
            over=message.over,
            rng=message.rng if message.over or message.rng is not None else self.rng,
        )

    def noted(self, message: WorkerMessage) -> WorkerPosition:
        """The position with what a worker said between two batches."""
        if message.past is not None:
            return WorkerPosition(state=message.state, past=message.past, rng=message.rng)
        if not message.over:
            return self
        if message.state is None:
            return replace(self, over=True, rng=message.rng)
        return WorkerPosition(batches=self.batches, state=message.state, over=True)

    def next_epoch(self) -> WorkerPosition:
        """The position at the start of the next epoch, in a worker that goes on."""
        if self.over:
            return WorkerPosition(state=self.state, past="ended", rng=self.rng)
        return WorkerPosition(state=self.state, past="left")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Where a pass stands: what of an epoch was handed out, and what its order was drawn from.

    batches: handed out on this rank. position: samples of the epoch over all ranks (plans only).
    base_seed: torch's, of the workers. sampler_seed, rng, python_rng, numpy_rng, generator: what
    the sampler drew from: a seed, the states of torch's, python's and numpy's generators, or of
    the user's; mixed: that of them which can't be repeated. sampler: its own state.
    sampler_epoch, dataset_epoch: of a sampler or an iterable dataset with set_epoch. workers: of
    each torch worker (one without workers); next_worker: whose batch is due. bad: samples of the
    epoch that others stood in for.
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

    def to_dict(self) -> dict[str, Any]:
        """The mark in JSON types, but for states of the user's own dataset and sampler."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "workers"}
        kept = {name: value for name, value in values.items() if value is not None}
        return {
            **copy_of(kept),
            "workers": [
                {each.name: copy_of(getattr(worker, each.name)) for each in fields(worker)}
                for worker in self.workers
            ],
        }

    @classmethod
    def from_dict(cls, values: Any) -> Mark:
        """The mark behind `to_dict`; raises ResumeError for what that can't have written."""
        try:
            given = copy_of(dict(values))
            workers = tuple(WorkerPosition(**worker) for worker in given.pop("workers"))
            mark = cls(workers=workers, **given)
            for worker in workers:
                worker.check()
            counts = (mark.epoch, mark.batches, mark.position, mark.next_worker, mark.bad)
            if any(type(count) is not int or count < 0 for count in counts):
                raise ValueError(f"counts are {counts}")
        except (TypeError, ValueError, KeyError) as error:
            raise ResumeError(
                f"State is damaged ({error}). Start from an older checkpoint."
            ) from error
        for frozen in (
            {name: getattr(mark, name) for name in NAMES},
            *(worker.rng for worker in mark.workers if worker.rng is not None),
        ):
            check_frozen(frozen)
        return mark
