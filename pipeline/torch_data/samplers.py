"""Number what a torch sampler repeats, and list its epochs for a native dataset.

`Occurrences` counts, for each position of an epoch, how many earlier positions over all ranks
deliver its sample. The count is a part of the key of augmentation's draws, so that a sample that a
sampler repeats gets another crop. Of samplers that shard by rank, only torch's own is counted
over all ranks; with others, the place in the epoch stands for the count.

`sampler_lists` lists a sampler once per epoch, over all ranks, when the first batch of the epoch is
planned: on any thread. So it must not draw from the generators of the process, which the training
loop uses: torch's samplers draw from `generator`, and get one here that is seeded by seed and
epoch.
"""

from __future__ import annotations

import copy
import itertools
import operator
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.utils.data

from penstock.cache import ConfigError
from penstock.cache.base import keyed_hash
from penstock.pipeline.torch_data.owner_states import length_of
from penstock.pipeline.torch_data.random_states import MainDraws, generator_states
from penstock.readers import EpochLists

if TYPE_CHECKING:
    from penstock.pipeline.plan import Ints


# The names that samplers which shard give to the number of ranks and to their own rank.
_RANK_ATTRIBUTES = (
    ("num_replicas", "rank"),
    ("world_size", "rank"),
    ("_num_replicas", "_rank"),
    ("_world_size", "_rank"),
    ("num_processes", "process_index"),
    ("data_parallel_size", "data_parallel_rank"),
    ("num_shards", "shard_id"),
)
_BLOCK = 8  # bits of an index within a block of counts
_LIST = 0x6C697374  # keeps the seeds of lists apart from other hashes


class Occurrences:
    """Numbers the repeats of one pass, batch by batch.

    Every batch of the epoch from `first` on must be asked for, in order. first: positions of this
    rank before the first batch.
    """

    def __init__(self, sampler: Any, *, stateful: bool, first: int) -> None:
        self._place = first
        self._counts: dict[int, array[int]] = {}
        self._numbers: Ints | None = None  # of this rank, counted over all ranks
        holder = _shares_of(sampler)
        self._world, self._rank = (1, 0) if holder is None else holder
        # A sampler with state isn't drawn again from the start; one without a length may not end;
        # and what other ranks get is known of torch's own sampler only.
        is_torchs = type(sampler) is torch.utils.data.DistributedSampler
        self._by_place = stateful or length_of(sampler) is None
        self._by_place |= self._world > 1 and not is_torchs
        self._never = not self._by_place and _never_repeats(sampler)
        if self._world > 1 and not self._by_place:
            self._numbers = _numbered_over_ranks(sampler)

    def of(self, index: Any) -> Ints | None:
        """Return the occurrence of each sample of the next batch, int64; None if all are 0.

        index: a list of indices, or one.
        """
        if self._never:
            return None
        ids = [_as_int(each) for each in (index if isinstance(index, list | tuple) else (index,))]
        start, self._place = self._place, self._place + len(ids)
        if self._by_place:
            numbers = np.arange(start, self._place) * self._world + self._rank
        elif self._numbers is None:
            numbers = np.array([self._count(each) for each in ids], np.int64)
        else:
            numbers = self._numbers[start : self._place]
        return numbers if numbers.any() else None

    def _count(self, index: int) -> int:
        """Return how often the index came before."""
        block = self._counts.get(index >> _BLOCK)
        if block is None:
            block = self._counts[index >> _BLOCK] = array("L", bytes(8 << _BLOCK))
        place = index & ((1 << _BLOCK) - 1)
        block[place] += 1
        return block[place] - 1


def shards_by_rank(sampler: Any) -> bool:
    """Return True if a sampler, or one inside it, shares samples out over ranks."""
    return _shares_of(sampler) is not None


def _as_int(index: Any) -> int:
    try:
        return operator.index(index)
    except TypeError:
        raise ConfigError(
            f"augment=: the sampler returns the index {index!r}, but draws are keyed by integers. "
            "Let it return positions in the dataset."
        ) from None


def _never_repeats(sampler: Any) -> bool:
    if type(sampler) is torch.utils.data.RandomSampler:
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    return type(sampler) is torch.utils.data.SequentialSampler


def _shares_of(sampler: Any, depth: int = 3) -> tuple[int, int] | None:
    """Return the number of ranks among which a sampler, or one inside it, shares samples out, and
    its rank; None for one that doesn't."""
    for names in _RANK_ATTRIBUTES:
        size, rank = (getattr(sampler, name, None) for name in names)
        if isinstance(size, int) and isinstance(rank, int):
            return size, rank
    values = getattr(sampler, "__dict__", {}).values()
    inner = [each for each in values if isinstance(each, torch.utils.data.Sampler)]
    found = (_shares_of(each, depth - 1) for each in inner if depth)
    return next((each for each in found if each is not None), None)


def _numbered_over_ranks(sampler: Any) -> Ints:
    """Return how many earlier positions, over all ranks, hold each index of this rank's."""
    single = copy.copy(sampler)  # for one rank that gets all
    single.num_replicas, single.rank, single.num_samples = 1, 0, single.total_size
    every = np.fromiter(iter(single), np.int64)
    order = every.argsort(kind="stable")
    ordered, count = every[order], np.arange(len(every))
    begins = np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(every)]
    numbers = np.empty(len(every), np.int64)
    numbers[order] = count - np.maximum.accumulate(np.where(begins, count, 0))
    return numbers[sampler.rank :: sampler.num_replicas]


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
        if is_checked:
            return _listed(sampler, epoch, key, count=count, samples=samples)
        kept = MainDraws()
        kept.restore()
        before = generator_states()
        found = _listed(sampler, epoch, key, count=count, samples=samples)
        is_checked = True  # when the loader is made, before threads plan
        again = _listed(sampler, epoch, key, count=count, samples=samples)
        is_pure = generator_states() == before
        kept.restore()
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
