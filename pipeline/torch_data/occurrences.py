"""Count how many earlier places of an epoch, over all ranks, deliver the sample of a place.

The count is a part of the key of augmentation's draws: a sample that a sampler repeats gets another
crop. Samplers that shard by rank are evaluated for each rank, on copies, so that neither their
order nor any generator changes.
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

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

# What samplers that shard call the number of their ranks and their own.
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
    "Leave augment= out and augment in the dataset, or pass seed= in place of the sampler: then "
    "Penstock orders the samples and shares them out."
)


class Occurrences:
    """Numbers the repeats of one pass, batch by batch. Every batch of the epoch is to be asked for,
    in order, from `first` on.

    first: places of this rank before the first batch. beside: runs a function with what the sampler
    draws from as it is now, and leaves that as it was. Raises ConfigError for a sampler that shards
    in a way that can't be evaluated for other ranks.
    """

    def __init__(
        self, sampler: Any, *, stateful: bool, first: int, beside: Callable[[Any], Any]
    ) -> None:
        self._place = first
        self._counts: dict[int, array[int]] = {}
        self._ids: Ints | None = None  # of this rank, where other ranks matter
        self._rank, self._world = 0, 1
        holder = _rank_owner(sampler)
        if holder is not None:
            _, (size, rank) = holder
            self._world, self._rank = getattr(holder[0], size), getattr(holder[0], rank)
        # Such a sampler isn't drawn again from the start, or may have no end.
        self._by_place = stateful or not _is_sized(sampler)
        self._never = not self._by_place and _never_repeats(sampler)
        if self._world > 1 and not self._by_place:
            lists = _for_each_rank(sampler, self._world, beside)
            self._ids, self._numbers = lists[self._rank], _numbered(lists)[self._rank]

    def of(self, index: Any) -> Ints | None:
        """The occurrence of each sample of the next batch, int64; None: all are 0.

        index: a list of indices, or one."""
        if self._never:
            return None
        ids = [_as_int(each) for each in (index if isinstance(index, list | tuple) else (index,))]
        start, self._place = self._place, self._place + len(ids)
        if self._by_place:
            found = np.arange(start, self._place) * self._world + self._rank
        elif self._ids is None:
            found = np.array([self._counted(each) for each in ids], np.int64)
        else:
            found = self._numbers[start : self._place]
            if self._ids[start : self._place].tolist() != ids:
                raise ConfigError(
                    "augment=: the sampler gives other indices than a copy of it gave for this "
                    f"rank, so that nobody knows which samples other ranks repeat. {_REMEDY}"
                )
        return found if found.any() else None

    def _counted(self, index: int) -> int:
        """How often the index came before."""
        block = self._counts.get(index >> _BLOCK)
        if block is None:
            block = self._counts[index >> _BLOCK] = array("L", bytes(8 << _BLOCK))
        place = index & ((1 << _BLOCK) - 1)
        block[place] += 1
        return block[place] - 1


def shards_by_rank(sampler: Any) -> bool:
    """Whether a sampler, or one inside it, shares samples out over ranks."""
    return _rank_owner(sampler) is not None


def _as_int(index: Any) -> int:
    try:
        return operator.index(index)
    except TypeError:
        raise ConfigError(
            f"augment=: the sampler gives the index {index!r}, and draws are keyed by whole "
            "numbers. Let it give places in the dataset."
        ) from None


def _is_sized(sampler: Any) -> bool:
    try:
        len(sampler)
    except (TypeError, NotImplementedError):
        return False
    return True


def _never_repeats(sampler: Any) -> bool:
    if type(sampler) is torch.utils.data.RandomSampler:
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    return type(sampler) is torch.utils.data.SequentialSampler


def _rank_owner(sampler: Any, depth: int = 3) -> tuple[Any, tuple[str, str]] | None:
    """Who knows the rank of a sampler that shards, itself or one inside it, and under which names;
    None for one that doesn't shard."""
    for names in _RANK_ATTRIBUTES:
        size, rank = (getattr(sampler, name, None) for name in names)
        if isinstance(size, int) and isinstance(rank, int):
            return sampler, names
    inner = [each for each in _values(sampler) if isinstance(each, torch.utils.data.Sampler)]
    found = (_rank_owner(each, depth - 1) for each in inner if depth)
    return next((each for each in found if each is not None), None)


def _values(sampler: Any) -> list[Any]:
    return list(getattr(sampler, "__dict__", {}).values())


def _for_each_rank(sampler: Any, world: int, beside: Callable[[Any], Any]) -> list[Ints]:
    """The indices of each rank, each drawn from the same states. Raises ConfigError."""
    if type(sampler) is torch.utils.data.DistributedSampler:
        whole = copy.copy(sampler)  # of one rank that gets all: O(n), not O(n * ranks)
        whole.num_replicas, whole.rank, whole.num_samples = 1, 0, whole.total_size
        every = np.fromiter(iter(whole), np.int64)
        return [every[rank::world] for rank in range(world)]
    return [beside(partial(_of_rank, sampler, rank)) for rank in range(world)]


def _of_rank(sampler: Any, rank: int) -> Ints:
    name = type(sampler).__name__
    datasets = [each for each in _values(sampler) if isinstance(each, torch.utils.data.Dataset)]
    try:
        found = copy.deepcopy(sampler, {id(each): each for each in datasets})
        holder = _rank_owner(found)
        assert holder is not None
        owner, (_, attribute) = holder
        setattr(owner, attribute, rank)
        asked = _record_reads(owner, attribute)
        ids = np.array([_as_int(each) for each in found], np.int64)
    except ConfigError:
        raise
    except Exception as error:  # a copy of a user's object may fail in any way
        raise ConfigError(
            f"augment=: {name} shards by rank, and draws need to know which samples all ranks "
            f"repeat; a copy of it for rank {rank} fails with {type(error).__name__}: {error}. "
            f"{_REMEDY}"
        ) from error
    if not asked:
        raise ConfigError(
            f"augment=: {name} shards by rank, and draws need to know which samples all ranks "
            f"repeat; it doesn't look at its {attribute} when it is iterated, so it can't be "
            f"evaluated for other ranks. {_REMEDY}"
        )
    return ids


def _record_reads(owner: Any, attribute: str) -> list[str]:
    """A list that gets an entry each time that somebody reads the attribute from now on."""
    asked: list[str] = []
    kind = type(owner)
    plain: Any = kind.__getattribute__

    def get(self: Any, name: str) -> Any:
        if name == attribute:
            asked.append(name)
        return plain(self, name)

    owner.__class__ = type(kind.__name__, (kind,), {"__getattribute__": get})
    return asked


def _numbered(lists: Sequence[Ints]) -> list[Ints]:
    """How many earlier places, over all ranks, hold each index. lists: of each rank."""
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
