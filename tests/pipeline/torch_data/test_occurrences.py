"""A sample that a torch sampler repeats within an epoch gets another crop each time."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, Sampler, WeightedRandomSampler

from penstock.augment import RandomCrop
from penstock.cache import ConfigError
from penstock.pipeline import DataLoader, World
from tests.torch_datasets import KeepsPlace

if TYPE_CHECKING:
    from collections.abc import Iterator

SIDE = 64
CROP = [RandomCrop(8, pad_if_needed=True)]


class Grids(Dataset[Any]):
    """Pictures whose pixels hold their position: the first pixel of a crop is its corner."""

    def __init__(self, count: int = 10) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        rows, columns = np.mgrid[:SIDE, :SIDE].astype(np.uint8)
        return np.dstack([rows, columns, np.full_like(rows, index)]), index


class Repeated(Sampler[int]):
    """timm's sampler: a sample goes to several ranks, one after another."""

    def __init__(self, count: int, num_replicas: int, rank: int, repeats: int = 3) -> None:
        self.count, self.num_replicas, self.rank, self.repeats = count, num_replicas, rank, repeats
        self.epoch = 0
        self.num_samples = math.ceil(count * repeats / num_replicas)
        self.total_size = self.num_samples * num_replicas

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.epoch))
        indices = [each for each in order.tolist() for _ in range(self.repeats)]
        indices += indices[: self.total_size - len(indices)]
        return iter(indices[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class ByWorldSize(Repeated):
    """A sampler with other attribute names that draws from python's own generator."""

    def __init__(self, count: int, world_size: int, rank: int) -> None:
        super().__init__(count, world_size, rank)
        del self.num_replicas
        self.world_size = world_size

    def __iter__(self) -> Iterator[int]:
        indices = random.choices(range(self.count), k=self.total_size)
        return iter(indices[self.rank :: self.world_size])


class Wrapped(Sampler[int]):
    def __init__(self, inner: Sampler[int]) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]


class Sharded(Sampler[int]):
    """A sampler that was cut into shards when it was made."""

    def __init__(self, count: int, num_replicas: int, rank: int) -> None:
        self.num_replicas, self.rank = num_replicas, rank
        self.indices = list(range(count))[rank::num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class Endless(Sampler[int]):
    """A sampler without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter([4, 4, 4, 7, 4, 7] * 2)


class Stateful(KeepsPlace, Sampler[int]):
    """A sampler with a length and a state of its own: a resumed pass doesn't draw the past
    again."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < len(self):
            self.at += 1
            yield 3
        self.at = 0

    def __len__(self) -> int:
        return 12


def loader_of(sampler: Any, **options: Any) -> DataLoader[Any]:
    torch.manual_seed(11)  # the draws' seed is drawn from it
    options = {"batch_size": 4, "augment": CROP, **options}
    return DataLoader(Grids(), sampler=sampler, **options)


def corners(batches: Any) -> list[tuple[int, tuple[int, int]]]:
    """Return the sample that each position delivers, and the corner of its crop."""
    found = []
    for pixels, ids in batches:
        first = pixels[:, :, 0, 0].int()
        assert first[:, 2].tolist() == ids.tolist()
        found += [(int(i), (int(y), int(x))) for (y, x, _), i in zip(first, ids, strict=True)]
    return found


def delivered(sampler: Any, **options: Any) -> list[tuple[int, tuple[int, int]]]:
    with loader_of(sampler, **options) as loader:
        return corners(loader)


def all_differ(found: list[tuple[int, tuple[int, int]]]) -> bool:
    """Return True if the crops of each sample differ; two of 57 * 57 may be equal by chance."""
    of = defaultdict(list)
    for index, corner in found:
        of[index].append(corner)
    return sum(len(crops) - len(set(crops)) for crops in of.values()) <= 1


@pytest.mark.parametrize(
    "sampler",
    [
        [0] * 12,
        lambda: WeightedRandomSampler([1.0] * 10, 60),
        lambda: torch.utils.data.RandomSampler(range(10), replacement=True, num_samples=60),
        lambda: torch.utils.data.RandomSampler(range(10), num_samples=35),
        lambda: Repeated(10, 1, 0),
        Endless,
        Stateful,
    ],
    ids=["list", "weighted", "replacement", "longer", "repeated", "endless", "stateful"],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_repeats_differ_and_resume_exactly(sampler: Any, workers: int) -> None:
    def made() -> Any:
        torch.manual_seed(5)
        return sampler() if callable(sampler) else sampler

    whole = delivered(made(), num_workers=workers)
    assert all_differ(whole)
    with loader_of(made(), num_workers=workers) as loader:
        batches = iter(loader)
        begun = corners([next(batches), next(batches)])
        state = loader.state_dict()
    torch.manual_seed(77)  # must not change what follows
    with DataLoader(
        Grids(), sampler=made(), batch_size=4, augment=CROP, num_workers=workers
    ) as again:
        again.load_state_dict(state)
        assert begun + corners(again) == whole


def test_the_first_of_each_sample_has_the_crop_that_it_had() -> None:
    once = dict(delivered(None))
    for sampler in ([3, 3, 5, 3, 5], Repeated(10, 1, 0)):
        first: dict[int, Any] = {}
        for index, corner in delivered(sampler):
            first.setdefault(index, corner)
        assert all(once[index] == corner for index, corner in first.items())


@pytest.mark.parametrize("kind", [Repeated, ByWorldSize, "distributed", "wrapped"])
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_number_repeats_together(kind: Any, ranks: int, is_known: bool) -> None:
    """Repeats differ over all ranks; torch's sampler gives what one rank with all samples has.

    is_known: Penstock knows the ranks too, as in a job.
    """

    def found(world: int, rank: int) -> list[Any]:
        random.seed(4)
        options = {"world": World(rank, world)} if is_known else {}
        if kind == "distributed":
            sharded: Any = DistributedSampler(range(10), num_replicas=world, rank=rank)
            return delivered(sharded, **options)
        made = Repeated if kind == "wrapped" else kind
        sampler = made(10, world, rank)
        return delivered(Wrapped(sampler) if kind == "wrapped" else sampler, **options)

    each = [found(ranks, rank) for rank in range(ranks)]
    every = [place for places in zip(*each, strict=True) for place in places]
    assert all_differ(every)
    if kind == "distributed":
        alone = found(1, 0)
        assert every[: len(alone)] == alone[: len(every)]


def test_a_sampler_that_was_cut_into_shards_works_and_indices_must_be_integers() -> None:
    assert [len(delivered(Sharded(10, ranks, 0))) for ranks in (1, 2)] == [10, 5]
    with pytest.raises(ConfigError, match="keyed by integers"):
        delivered(["a", "b"])


@pytest.mark.parametrize(
    "make",
    [
        lambda: ByWorldSize(10, 2, 1),
        lambda: WeightedRandomSampler([1.0] * 10, 30),
        lambda: WeightedRandomSampler([1.0] * 10, 30, generator=torch.Generator().manual_seed(1)),
    ],
)
def test_the_order_and_all_generators_stay_what_torch_leaves(make: Any) -> None:
    states = []
    orders = []
    for kind in (torch.utils.data.DataLoader, DataLoader):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(6)
        options: Any = {} if kind is torch.utils.data.DataLoader else {"augment": CROP}
        loader = kind(Grids(), sampler=make(), batch_size=4, **options)
        if kind is DataLoader:  # the draws' seed takes one more number of torch's
            torch.manual_seed(6)
        orders.append([ids.tolist() for _ in range(2) for _, ids in loader])
        states.append((random.getstate(), np.random.bytes(8), torch.rand(3).tolist()))
    assert orders[0] == orders[1]
    assert states[0] == states[1]


def test_ranks_of_a_stream_draw_apart() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return (Grids()[place] for place in range(8))

    def found(rank: int, size: int) -> list[Any]:
        with DataLoader(
            Stream(), batch_size=4, augment=CROP, seed=3, world=World(rank, size)
        ) as loader:
            return corners(loader)

    first, second = found(0, 2), found(1, 2)
    assert found(0, 1) == first
    assert sum(a == b for a, b in zip(first, second, strict=True)) <= 1
