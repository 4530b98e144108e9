"""States that torch datasets, their iterators and samplers keep of themselves.

A state is copied at the moment when it is taken or handed back: many datasets return the very dict
that they go on to change, and keep the one that they are given.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from penstock.cache.errors import DatasetError

# Classes whose own state doesn't say all that a resume needs, by module and name, subclasses
# included; these are read again up to the place instead, which is exact. The one place for such
# names: nothing that the class shows tells it apart from one whose state is exact.
INEXACT = {
    # Its documentation: what lies in a shuffle buffer is lost. And a state, once loaded, is where
    # each later epoch begins too.
    ("datasets.iterable_dataset", "IterableDataset"),
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
