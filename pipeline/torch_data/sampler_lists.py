"""List the epochs of a torch sampler, as the order of a native dataset.

A sampler is listed once per epoch, over all ranks, when the first batch of the epoch is planned: on
any thread. So it must not draw from the generators of the process, which the training loop uses:
torch's samplers draw from `generator`, and get one here that is seeded by seed and epoch.
"""

from __future__ import annotations

import copy
import itertools
import operator
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.cache import ConfigError
from penstock.cache.base import keyed_hash
from penstock.pipeline.torch_data.mark import length_of
from penstock.pipeline.torch_data.occurrences import shards_by_rank
from penstock.readers import EpochLists

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

_LIST = 0x6C697374  # keeps the seeds of lists apart from other hashes


def sampler_lists(sampler: Any, *, samples: int) -> EpochLists:
    """Return the lists of a sampler's epochs over a dataset with a number of samples.

    Raises ConfigError for an object without a length, and for a sampler that divides its samples
    among ranks. Lists raise ConfigError for positions that the dataset lacks, for another number of
    them than the sampler's length, and if the first list draws from a global generator.
    """
    name, count = type(sampler).__name__, length_of(sampler)
    if not hasattr(sampler, "__iter__") or isinstance(sampler, str | bytes):
        raise ConfigError(
            f"sampler: got {sampler!r:.80}, wanted a torch sampler or a list of positions in the "
            "dataset."
        )
    if count is None:
        raise ConfigError(
            f"sampler: {name} has no length, so an epoch has no known end. Give it a __len__, or "
            "pass shuffle=True and weights= instead."
        )
    if not count:
        raise ConfigError(f"sampler: {name} lists no samples, wanted at least one.")
    if shards_by_rank(sampler):
        raise ConfigError(
            f"sampler: {name} divides its samples among ranks, which Penstock already does for a "
            "native dataset. Pass a sampler that lists the samples of all ranks, or drop it and "
            "pass shuffle= and seed=. If you didn't pass it, a framework rebuilt this loader: see "
            "docs/howto/trainers.md."
        )

    is_checked = False

    def draw(seed: int, epoch: int) -> Ints:
        nonlocal is_checked
        key = int(keyed_hash(seed, _LIST, epoch)) >> 1
        before = None if is_checked else _global_states()
        found = _listed(sampler, epoch, key, count=count, samples=samples)
        if before is None:
            return found
        is_checked = True  # when the loader is made, before threads plan
        again = _listed(sampler, epoch, key, count=count, samples=samples)
        is_pure = _global_states() == before
        _restore(before)
        if not is_pure or (again != found).any():
            raise ConfigError(
                f"sampler: {name} lists different positions each time, or draws from a generator "
                "of the whole process, which the training loop uses, too, so no state could repeat "
                "its order. Let it draw from its attribute `generator`, a torch.Generator, which "
                "Penstock seeds for each epoch; or by the number that set_epoch(epoch) gets."
            )
        return found

    return EpochLists(draw, samples=count)


def _listed(sampler: Any, epoch: int, key: int, *, count: int, samples: int) -> Ints:
    """Return the positions that a sampler lists in an epoch, drawn with a key. Raises
    ConfigError."""
    name = type(sampler).__name__
    if isinstance(getattr(sampler, "generator", key), torch.Generator | None):
        sampler = copy.copy(sampler)  # the user's keeps its own
        sampler.generator = torch.Generator().manual_seed(key)
    if callable(set_epoch := getattr(sampler, "set_epoch", None)):
        set_epoch(epoch)
    listed = itertools.islice(iter(sampler), count + 1)
    try:
        found = np.fromiter(map(operator.index, listed), np.int64)
    except TypeError as error:
        raise ConfigError(
            f"sampler: {name} lists something other than positions ({error}). Let it return whole "
            "numbers; batches are cut by batch_size=."
        ) from error
    if len(found) != count:
        more = "more" if len(found) > count else f"only {len(found):,}"
        raise ConfigError(f"sampler: {name} has the length {count:,}, and listed {more}.")
    wrong = found[(found < 0) | (found >= samples)]
    if len(wrong):
        raise ConfigError(
            f"sampler: {name} lists position {wrong[0]}, and the dataset has {samples:,} samples, "
            f"wanted numbers within [0, {samples})."
        )
    return found


def _global_states() -> tuple[Any, ...]:
    """Return the states of the process's generators, which can be compared."""
    words = np.random.get_state(legacy=True)
    own: Any = (words[0], words[1].tobytes(), *words[2:])  # type: ignore[index]
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), own


def _restore(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(states[0]), dtype=torch.uint8))
    random.setstate(states[1])
    kind, words, *others = states[2]
    np.random.set_state((kind, np.frombuffer(words, np.uint32), *others))
