"""Read, copy, compare and load the states that datasets, iterators and samplers have of themselves.

A state is copied when it is read and when it is loaded, because many datasets return the very dict
that they change later, and keep the one that they are given.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from penstock.cache import DatasetError

# Classes whose own state doesn't hold all that a resume needs, by module and name, with their
# subclasses. They are read again up to the position instead, which is exact. The names are listed,
# because nothing in such a class distinguishes it from one whose state is exact.
INEXACT_STATES = {
    # Its documentation says that the contents of a shuffle buffer are lost. Also, each later epoch
    # begins at a state that was loaded once.
    ("datasets.iterable_dataset", "IterableDataset")
}
_SCALARS = frozenset({int, float, bool, str, bytes, complex, type(None)})


def has_state(owner: object, *, is_exact: bool = False) -> bool:
    """Return True if the object has load_state_dict() and a state_dict() without arguments.

    is_exact: only if its state is sufficient to continue exactly, too.
    """
    if is_exact and INEXACT_STATES & {(k.__module__, k.__qualname__) for k in type(owner).__mro__}:
        return False
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
