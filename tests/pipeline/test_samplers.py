"""Test native datasets with torch samplers: the order is theirs, exact at any world and restart."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from penstock import DataLoader, Dataset, DiskCache, Map, Value, World, mix, pack
from penstock.errors import ConfigError, ResumeError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COUNT, BATCH = 60, 7
SCORES = np.arange(COUNT) + 1.0


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    """An array whose samples are 100 to 159."""
    path: Path = tmp_path_factory.mktemp("numbers") / "a.npy"
    np.save(path, 100 + np.arange(COUNT))
    with Dataset(str(path)) as dataset:
        yield dataset


def weighted(count: int = 50, **arguments: Any) -> WeightedRandomSampler:
    return WeightedRandomSampler(SCORES.tolist(), count, **arguments)


def loader(dataset: Any, sampler: Any, **arguments: Any) -> DataLoader:
    options = {"seed": 3, "global_batch_size": BATCH, "sampler": sampler}
    return DataLoader(dataset, **{**options, **arguments})


def values(batches: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


class Shifted(Sampler[int]):
    """A sampler of the user's, whose order follows the epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(self.epoch + each) % COUNT for each in range(0, COUNT, 3)])

    def __len__(self) -> int:
        return COUNT // 3


def test_positions_are_those_of_the_list(numbers):
    with loader(numbers, [5, 0, 5, 59]) as job:
        assert values(job) == values(job) == [[105, 100, 105, 159]]
        assert len(job) == 1
    with loader(numbers.subset([9, 3, 20]), [0, 2, 1, 1]) as job:
        assert values(job) == [[103, 120, 109, 109]]
        assert job.samples_of(0).tolist() == [3, 20, 9, 9]


@pytest.mark.parametrize(
    "sampler",
    [
        weighted(),
        weighted(generator=torch.Generator().manual_seed(1)),
        RandomSampler(range(COUNT)),
        RandomSampler(range(COUNT), replacement=True, num_samples=40),
        SubsetRandomSampler(range(10, 40)),
        SequentialSampler(range(COUNT)),
        Shifted(),
        torch.arange(30),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
@pytest.mark.parametrize("world", [2, 3, 7])
def test_every_world_gives_the_same_global_batches(numbers, sampler, world):
    states = _states()
    with loader(numbers, sampler) as job:
        wanted = values(job) + values(job)
    assert len(np.concatenate(wanted)) == 2 * len(sampler)
    found: list[list[int]] = [[] for _ in wanted]
    for rank in range(world):
        with loader(numbers, sampler, world=World(rank, world), pad="mask") as one:
            for step, (mine, valid) in enumerate([*one, *one]):
                found[step] += mine[valid].tolist()
    assert found == wanted
    assert _states() == states


def _states() -> list[Any]:
    """Return the states of the process's generators."""
    numpy: Any = np.random.get_state(legacy=False)
    return [torch.get_rng_state().tolist(), random.getstate(), numpy["state"]["key"].tolist()]


def test_epochs_differ_and_follow_the_seed(numbers):
    sampler = weighted(2000)
    with loader(numbers, sampler) as job:
        first, second = np.concatenate(values(job)), np.concatenate(values(job))
    assert first.tolist() != second.tolist()
    counts = np.bincount(first - 100, minlength=COUNT)
    assert np.corrcoef(counts, SCORES)[0, 1] > 0.8
    with loader(numbers, sampler, seed=4) as other:
        assert np.concatenate(values(other)).tolist() != first.tolist()
    with loader(numbers, sampler) as again:
        again.set_epoch(1)
        assert np.concatenate(values(again)).tolist() == second.tolist()


def test_a_job_resumes_at_every_step(numbers):
    """On other ranks; without a seed, that of the state holds."""
    with loader(numbers, weighted(), drop_last=True) as job:
        batches, states = list[list[int]](), [job.state_dict()]
        for _ in range(2):
            for batch in job:
                batches.append(batch[0].tolist())
                states.append(json.loads(json.dumps(job.state_dict())))
    assert len(json.dumps(states[-1])) < 1000
    for step in range(len(batches)):
        found: list[int] = []
        for rank in range(2):
            world = World(rank, 2)
            with loader(numbers, weighted(), seed=3, world=world, drop_last=True) as again:
                again.load_state_dict(states[step])
                assert again.step == step
                found += next(iter(again))[0].tolist()
        assert found == batches[step]
    with loader(numbers, weighted(), seed=None, drop_last=True) as again:
        again.load_state_dict(states[1])
        assert next(iter(again))[0].tolist() == batches[1]


def test_repeats_get_draws_of_their_own(numbers):
    noise = Map(_noise, fields="array", returns={"noise": Value("float64")})
    seen = defaultdict[int, list[float]](list)
    with loader(numbers, weighted(300), augment=[noise], as_dict=True) as job:
        for batch in job:
            for number, noised in zip(
                batch["array"].tolist(), batch["noise"].tolist(), strict=True
            ):
                seen[number].append(noised)
    assert max(map(len, seen.values())) > 5
    assert all(len({*each}) == len(each) for each in seen.values())


def _noise(array: Any, rng: np.random.Generator) -> float:
    del array
    return rng.random()


def test_remote_samples(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(200))
    pack(tmp_path / "a.npy", tmp_path / "pack", shard_bytes=20 * 8)
    import fsspec

    fsspec.filesystem("memory").put(str(tmp_path / "pack"), "/sampled", recursive=True)
    cache = DiskCache(tmp_path / "cache", max_bytes="1GB")
    with Dataset("memory://sampled", cache=cache) as far:
        fetched = list[int]()
        for _ in range(2):
            with loader(far, RandomSampler(range(200))) as job:
                assert sorted(np.concatenate(values(job)).tolist()) == [*range(200)]
            fetched.append(far.bytes_fetched)
        assert fetched[0] == fetched[1] > 0


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield 0


class Short(Endless):
    def __len__(self) -> int:
        return 2


class FromPython(Short):
    def __iter__(self) -> Iterator[int]:
        return iter(random.choices(range(COUNT), k=2))


class Own(Short):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.integers(0, COUNT, 2).tolist())


class TestBadInput:
    @pytest.mark.parametrize(
        ("sampler", "message"),
        [
            (Endless(), "Endless has no length"),
            (Short(), "has the length 2, and listed only 1"),
            (FromPython(), "draws from a generator of the whole process"),
            (Own(), "lists different positions each time"),
            ([1, COUNT], f"lists position {COUNT}, and the dataset has {COUNT} samples"),
            ([-1], "lists position -1"),
            ([[1, 2]], "something other than positions"),
            ([], "lists no samples"),
            ("random", "wanted a torch sampler"),
            (5, "wanted a torch sampler"),
            (DistributedSampler(range(9), 2, 0), "divides its samples among ranks.*trainers.md"),
        ],
    )
    def test_samplers(self, numbers, sampler, message):
        with pytest.raises(ConfigError, match=message):
            loader(numbers, sampler)

    def test_other_orders(self, numbers):
        for arguments, message in (
            ({"shuffle": True}, "shuffle=True contradict"),
            ({"weights": SCORES}, "has weights of its samples"),
            ({"seed": None, "world": World(0, 2), "drop_last": True}, "sampler= on 2 ranks needs"),
        ):
            with pytest.raises(ConfigError, match=message):
                loader(numbers, [1, 2, 3, 4, 5, 6, 7], **arguments)
        with pytest.raises(ConfigError, match="has weights of its parts"):
            loader(mix({"a": numbers}), [1])
        with loader(numbers, [1]) as job, pytest.raises(ConfigError, match="weights"):
            job.set_sample_weights(SCORES)

    def test_states(self, numbers):
        with loader(numbers, weighted()) as job:
            state = job.state_dict()
        with loader(numbers, weighted(49)) as other, pytest.raises(ResumeError, match="50 samples"):
            other.load_state_dict(state)
        same_length = WeightedRandomSampler(SCORES[::-1].tolist(), 50)
        with loader(numbers, same_length) as other, pytest.raises(ResumeError, match="first list"):
            other.load_state_dict(state)
        with loader(numbers, None) as plain, pytest.raises(ResumeError, match="with a sampler"):
            plain.load_state_dict(state)
        with loader(numbers, None) as plain:
            state = plain.state_dict()
        with loader(numbers, weighted()) as job, pytest.raises(ResumeError, match="without a sam"):
            job.load_state_dict(state)
        damaged = json.loads(json.dumps(state))
        damaged["plan"]["lists"] = {"samples": 50, "first": 5}
        with loader(numbers, weighted()) as job, pytest.raises(ResumeError, match="damaged"):
            job.load_state_dict(damaged)
