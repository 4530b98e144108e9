"""Count, for each position of an epoch, how many earlier positions over all ranks deliver its
sample.

The count is a part of the key of augmentation's draws, so that a sample that a sampler repeats gets
another crop. Samplers that shard by rank are evaluated for each rank, on copies, so that neither
their order nor any generator changes.
"""

from __future__ import annotations

import copy
import itertools
import operator
from array import array
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.utils.data

from penstock.cache import ConfigError
from penstock.pipeline.torch_data.mark import length_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

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
_REMEDY = (
    "Drop augment= and augment in the dataset; or pass seed= instead of the sampler, so that "
    "Penstock orders the samples and shares them out."
)


class Occurrences:
    """Numbers the repeats of one pass, batch by batch.

    Every batch of the epoch from `first` on must be asked for, in order. first: positions of this
    rank before the first batch. replay: calls a function with the states from which the sampler
    will draw, and then restores all states. Raises ConfigError for a sampler that shards by rank
    and can't be evaluated for other ranks.
    """

    def __init__(
        self, sampler: Any, *, stateful: bool, first: int, replay: Callable[[Any], Any]
    ) -> None:
        self._place = first
        self._counts: dict[int, array[int]] = {}
        self._ids: Ints | None = None  # of this rank, if other ranks matter
        self._rank, self._world = 0, 1
        holder = _rank_owner(sampler)
        if holder is not None:
            _, (size, rank) = holder
            self._world, self._rank = getattr(holder[0], size), getattr(holder[0], rank)
        # A sampler with state isn't drawn again from the start; one without a length may not end.
        self._by_place = stateful or length_of(sampler) is None
        self._never = not self._by_place and _never_repeats(sampler)
        if self._world > 1 and not self._by_place:
            lists = _for_each_rank(sampler, self._world, replay)
            self._ids, self._numbers = lists[self._rank], _numbered(lists)[self._rank]

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
        elif self._ids is None:
            numbers = np.array([self._count(each) for each in ids], np.int64)
        else:
            numbers = self._numbers[start : self._place]
            if self._ids[start : self._place].tolist() != ids:
                raise ConfigError(
                    "augment=: the sampler returns other indices than a copy of it returned for "
                    f"this rank, so it is unknown which samples other ranks repeat. {_REMEDY}"
                )
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
    return _rank_owner(sampler) is not None


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


def _rank_owner(sampler: Any, depth: int = 3) -> tuple[Any, tuple[str, str]] | None:
    """Return the object that holds the rank of a sampler that shards, and its attribute names.

    None for a sampler that doesn't shard. The object is the sampler or one inside it.
    """
    for names in _RANK_ATTRIBUTES:
        size, rank = (getattr(sampler, name, None) for name in names)
        if isinstance(size, int) and isinstance(rank, int):
            return sampler, names
    inner = [each for each in _values(sampler) if isinstance(each, torch.utils.data.Sampler)]
    found = (_rank_owner(each, depth - 1) for each in inner if depth)
    return next((each for each in found if each is not None), None)


def _values(sampler: Any) -> list[Any]:
    return list(getattr(sampler, "__dict__", {}).values())


def _for_each_rank(sampler: Any, world: int, replay: Callable[[Any], Any]) -> list[Ints]:
    """Return the indices of each rank, each drawn from the same states. Raises ConfigError."""
    if type(sampler) is torch.utils.data.DistributedSampler:
        single = copy.copy(sampler)  # for one rank that gets all: O(n), not O(n * ranks)
        single.num_replicas, single.rank, single.num_samples = 1, 0, single.total_size
        every = np.fromiter(iter(single), np.int64)
        return [every[rank::world] for rank in range(world)]
    return [replay(partial(_of_rank, sampler, rank)) for rank in range(world)]


def _of_rank(sampler: Any, rank: int) -> Ints:
    name = type(sampler).__name__
    datasets = [each for each in _values(sampler) if isinstance(each, torch.utils.data.Dataset)]
    try:
        copied = copy.deepcopy(sampler, {id(each): each for each in datasets})
        holder = _rank_owner(copied)
        assert holder is not None
        owner, (_, attribute) = holder
        setattr(owner, attribute, rank)
        reads = _record_reads(owner, attribute)
        ids = np.array([_as_int(each) for each in copied], np.int64)
    except ConfigError:
        raise
    except Exception as error:  # a copy of a user's object may fail in any way
        raise ConfigError(
            f"augment=: {name} shards by rank, and draws depend on the samples that all ranks "
            f"repeat, but a copy of it for rank {rank} fails with {type(error).__name__}: {error}. "
            f"{_REMEDY}"
        ) from error
    if not reads:
        raise ConfigError(
            f"augment=: {name} shards by rank, and draws depend on the samples that all ranks "
            f"repeat, but it doesn't read its {attribute} when it is iterated, so it can't be "
            f"evaluated for other ranks. {_REMEDY}"
        )
    return ids


def _record_reads(owner: Any, attribute: str) -> list[str]:
    """Return a list that grows by an entry each time the attribute is read from now on."""
    reads: list[str] = []
    kind = type(owner)
    plain: Any = kind.__getattribute__

    def get(self: Any, name: str) -> Any:
        if name == attribute:
            reads.append(name)
        return plain(self, name)

    owner.__class__ = type(kind.__name__, (kind,), {"__getattribute__": get})
    return reads


def _numbered(lists: Sequence[Ints]) -> list[Ints]:
    """Return how many earlier positions, over all ranks, hold each index. lists: of each rank."""
    places = [np.arange(len(ids)) * len(lists) + rank for rank, ids in enumerate(lists)]
    every = np.concatenate(lists)
    order = np.lexsort((np.concatenate(places), every))
    ordered = every[order]
    begins = np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(every)]
    count = np.arange(len(every))
    numbers = np.empty(len(every), np.int64)
    numbers[order] = count - np.maximum.accumulate(np.where(begins, count, 0))
    ends = list(itertools.accumulate(len(ids) for ids in lists))
    return np.split(numbers, ends[:-1])
