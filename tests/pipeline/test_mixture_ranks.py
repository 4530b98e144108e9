"""Test mixtures in jobs of several ranks: weights that all of them set, other worlds, caches."""

from __future__ import annotations

import contextlib
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch.distributed as dist

from penstock import DataLoader, Dataset, World, mix
from penstock.cache import JobStore
from penstock.errors import ConfigError, PlanError, ResumeError, StalledError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.readers import Mixture

SIZES = {"web": 300, "code": 90, "math": 31}
WEIGHTS = {"web": 0.5, "code": 0.3, "math": 0.2}
OTHER = {"web": 0.1, "code": 0.1, "math": 0.8}
THIRD = {"web": 0.4, "code": 0.4, "math": 0.2}
BATCH = 24


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Dataset]]:
    folder: Path = tmp_path_factory.mktemp("parts")
    for number, (name, size) in enumerate(SIZES.items()):
        np.save(folder / f"{name}.npy", 1000 * number + np.arange(size))
    found = {name: Dataset(str(folder / f"{name}.npy")) for name in SIZES}
    yield found
    for each in found.values():
        each.close()


def mixture(parts: dict[str, Dataset], **arguments: Any) -> Mixture:
    return mix(parts, **{"weights": WEIGHTS, "epoch": 240, **arguments})


def loader(source: Any, **arguments: Any) -> DataLoader:
    options = {"shuffle": True, "seed": 5, "global_batch_size": BATCH, "drop_last": True}
    return DataLoader(source, **{**options, **arguments})


def alone(source: Any, *, count: int, then: dict[int, dict[str, float]] | None = None) -> Any:
    """Return the global batches of a job of one rank. then: weights by the step where they are
    set."""
    found: list[list[int]] = []
    with loader(source, world=World(0, 1)) as job:
        while len(found) < count:
            for batch in job:
                found.append(batch[0].tolist())
                if weights := (then or {}).get(len(found)):
                    job.set_weights(weights)
                if len(found) == count:
                    break
    return found


class Job:
    """The ranks of a job in one process, with one store."""

    def __init__(self, source: Any, size: int, monkeypatch: Any, **arguments: Any) -> None:
        store = JobStore(dist.HashStore())  # type: ignore[attr-defined]
        monkeypatch.setattr(JobStore, "of_group", classmethod(lambda _: store))
        self.loaders = [
            loader(source, world=World(rank, size, place=(rank, size)), **arguments)
            for rank in range(size)
        ]
        self.passes: list[Any] = []
        self._pool = ThreadPoolExecutor(size)

    def each(self, call: Callable[[DataLoader], Any]) -> list[Any]:
        """Call a function for each rank at once; return its results, or its errors."""

        def tried(one: DataLoader) -> Any:
            try:
                return call(one)
            except Exception as error:
                return error

        return list(self._pool.map(tried, self.loaders))

    def begin(self) -> None:
        self.passes = self.each(iter)

    def step(self) -> list[int]:
        """Return the next global batch."""
        return [*itertools.chain(*(next(one)[0].tolist() for one in self.passes))]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.loaders:
            one.close()
        self._pool.shutdown()


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_set_weights(parts, monkeypatch, size):
    source = mixture(parts)
    wanted = alone(source, count=10, then={3: OTHER, 6: THIRD})
    with Job(source, size, monkeypatch) as job:
        job.begin()
        found = [job.step() for _ in range(3)]
        assert job.each(lambda one: one.set_weights(OTHER)) == [None] * size
        found += [job.step() for _ in range(3)]
        assert job.each(lambda one: one.set_weights(THIRD, step=6)) == [None] * size
        found += [job.step() for _ in range(4)]
        states = [json.dumps(one.state_dict()) for one in job.loaders]
    assert found == wanted
    assert len({*states}) == 1


@pytest.mark.parametrize("difference", ["weights", "step"])
def test_different_arguments_are_an_error_on_each_rank(parts, monkeypatch, difference):
    source = mixture(parts)
    with Job(source, 3, monkeypatch) as job:
        job.begin()
        found = [job.step()]

        def change(one: DataLoader) -> None:
            differs = one.world.rank == 1
            weights = THIRD if differs and difference == "weights" else OTHER
            one.set_weights(weights, step=4 if differs and difference == "step" else 3)

        errors = job.each(change)
        assert all(type(error) is PlanError for error in errors)
        assert all("rank 0 set" in str(e) and "rank 1 " in str(e) for e in errors)
        # Nothing has changed, and the job can set the right ones.
        assert job.each(lambda one: one.set_weights(OTHER, step=3)) == [None] * 3
        found += [job.step() for _ in range(6)]
    assert found == alone(source, count=7, then={3: OTHER})


@pytest.mark.parametrize("rank", [0, 2])
def test_arguments_that_one_rank_refuses_are_an_error_on_each(parts, monkeypatch, rank):
    """Also where the others have called already: nobody waits for the rank that was refused."""
    with Job(mixture(parts), 3, monkeypatch, timeout=600) as job:
        job.begin()
        job.step()
        next(job.passes[rank])  # this rank has delivered one batch more

        errors = job.each(lambda one: one.set_weights(OTHER, step=1))
        assert all(type(error) is PlanError for error in errors)
        assert all("step 1 was delivered" in str(error) for error in errors)
        errors = job.each(
            lambda one: one.set_weights(OTHER if one.world.rank != rank else {"web": 1}, step=5)
        )
        assert type(errors.pop(rank)) is ConfigError
        assert all(type(error) is PlanError for error in errors)
        assert all(f"Rank {rank} couldn't set weights" in str(error) for error in errors)


def test_a_rank_that_does_not_set_weights_is_named(parts, monkeypatch):
    with Job(mixture(parts), 2, monkeypatch, timeout=0.2) as job:
        job.begin()
        found = [job.step()]
        with pytest.raises(StalledError, match=r"rank 1 to call set_weights.*equally often"):
            job.loaders[0].set_weights(OTHER)
        found.append(job.step())
        # Its call is counted, so the ranks agree again once they load a state.
        state = job.loaders[0].state_dict()
        job.each(lambda one: one.load_state_dict(state))
        assert job.each(lambda one: one.set_weights(OTHER)) == [None, None]
        job.begin()
        found += [job.step() for _ in range(3)]
    assert found == alone(mixture(parts), count=5, then={2: OTHER})


@pytest.mark.parametrize("weights", [WEIGHTS, {0: WEIGHTS, 60: OTHER, 300: THIRD}])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_job_continues_at_another_world_size(parts, size, weights):
    source = mixture(parts, weights=weights, transition="linear")
    wanted = alone(source, count=24, then={4: THIRD} if weights is WEIGHTS else {})
    with loader(source, world=World(1, 3)) as job:
        states = [job.state_dict()]
        while len(states) < 20:
            for _ in job:
                if len(states) == 4 and weights is WEIGHTS:
                    job.set_weights(THIRD)
                states.append(job.state_dict())
    for step in (4, 5, 9, 10, 13, 19):
        found: list[list[int]] = [[] for _ in range(24 - step)]
        for rank in range(size):
            with loader(source, world=World(rank, size)) as again:
                again.load_state_dict(json.loads(json.dumps(states[step])))
                assert again.step == step
                batches = itertools.chain(again, again, again)
                for one, batch in zip(found, batches, strict=False):
                    one += batch[0].tolist()
        assert found == wanted[step:]


def test_nine_world_sizes_resume_at_every_step(parts):
    """Through weights that are set, a schedule, steps that are skipped, and epochs of all parts."""
    source = mixture(parts, weights={0: WEIGHTS, 200: THIRD, 700: WEIGHTS}, epoch=480)
    with loader(source, world=World(0, 1), global_batch_size=96) as job:
        states, wanted = [job.state_dict()], list[list[int]]()
        while len(wanted) < 11:
            for batch in job:
                wanted.append([_id(number) for number in batch[0].tolist()])
                if len(wanted) in (3, 6):
                    job.set_weights(OTHER if len(wanted) == 3 else THIRD, step=len(wanted) + 1)
                states.append(job.state_dict())
    assert sum(id >= 390 for batch in wanted for id in batch) > 2 * SIZES["math"]
    for size in (1, 2, 3, 5, 7, 8, 24, 32, 96):
        with loader(source, world=World(size - 1, size), global_batch_size=96) as again:
            for step in range(len(wanted)):
                again.load_state_dict(json.loads(json.dumps(states[step])))
                assert again.step == step
                for other in range(11) if step == 10 else (step,):
                    ranks = [again.samples_of(other, rank=rank) for rank in range(size)]
                    assert np.concatenate(ranks).tolist() == wanted[other]
                again.skip(1)
                assert again.step == step + 1


def test_ranks_rejoin_after_weights_were_set(parts, monkeypatch):
    """A rank dies, the others go on without it, and another one comes with their state."""
    source = mixture(parts)
    wanted = alone(source, count=12, then={2: OTHER, 5: THIRD})
    with Job(source, 3, monkeypatch) as job, contextlib.ExitStack() as stack:
        job.begin()
        found = [job.step() for _ in range(2)]
        job.each(lambda one: one.set_weights(OTHER))
        found += [job.step() for _ in range(2)]
        job.step()  # delivered, and never committed: rank 1 is killed
        job.loaders.pop(1).close()
        job.passes.pop(1)
        store = dist.HashStore()  # type: ignore[attr-defined]

        def store_under(name: str) -> Any:
            return dist.PrefixStore(name, store)  # type: ignore[attr-defined]

        def rejoin(name: str, step: int, size: int) -> None:
            def call(one: DataLoader) -> None:
                world = World(job.loaders.index(one), size)
                one.rejoin(world, step=step, store=store_under(name))

            assert job.each(call) == [None] * size

        rejoin("two", 4, 2)
        found += [job.step()]
        job.each(lambda one: one.set_weights(THIRD, step=5))
        found += [job.step() for _ in range(2)]
        state = json.loads(json.dumps(job.loaders[0].state_dict()))
        new = stack.enter_context(loader(source, world=World(0, 1)))
        new.load_state_dict(state)
        job.loaders.append(new)
        rejoin("three", 7, 3)
        job.passes.append(iter(new))
        found += [job.step() for _ in range(3)]
        for one in job.loaders:
            one.skip(0)
        assert found == wanted[:10]
        for step in range(2, 12):
            ids = [i for rank in range(3) for i in new.samples_of(step, rank=rank).tolist()]
            assert ids == [_id(number) for number in wanted[step]]


def test_a_rank_that_rejoins_with_other_weights_is_refused(parts, monkeypatch):
    source = mixture(parts)
    with Job(source, 2, monkeypatch) as job:
        state = job.loaders[0].state_dict()
        job.begin()
        job.step()
        job.each(lambda one: one.set_weights(OTHER))
        store = dist.HashStore()  # type: ignore[attr-defined]
        job.loaders[0].rejoin(World(0, 2), step=1, store=store)
        with loader(source, world=World(0, 1)) as new:
            new.load_state_dict(state)
            with pytest.raises(PlanError, match=r"were set for sample 24.*set_weights"):
                new.rejoin(World(1, 2), step=1, store=store)


def test_weights_stay_when_a_loader_is_built_again(parts):
    """By a state, by the start of an epoch before it, and by an attribute that is set late."""
    source = mixture(parts)
    wanted = alone(source, count=20, then={3: OTHER})
    with loader(source, world=World(0, 1)) as job:
        passed = iter(job)
        for _ in range(2):
            next(passed)
        state = job.state_dict()
    with loader(source, world=World(0, 1)) as job:
        job.load_state_dict(state)
        job.set_weights(OTHER, step=3)
        job.rejoin(World(0, 1), step=2)
        found = [next(iter(job))[0].tolist()]
        job.timeout = 100.0
        found += [batch[0].tolist() for batch in itertools.chain(job, job)]
        assert found[0] == wanted[2]
        assert found[1:] == wanted[:20]


def _id(number: int) -> int:
    return number % 1000 + (0, 300, 390)[number // 1000]


class TestStates:
    @pytest.mark.parametrize("count", [3, 30, 100, 500])
    def test_size(self, tmp_path, count):
        """Below 10 kB up to 100 parts, with all changes and batch sizes; O(parts) beyond."""
        np.save(tmp_path / "a.npy", np.arange(200))
        with Dataset(str(tmp_path / "a.npy")) as part:
            parts = {f"common-crawl-{n}": part for n in range(count)}
            random = np.random.default_rng(0)
            weights = dict(zip(parts, random.random(count).tolist(), strict=True))
            source = mix(parts, weights=weights, epoch=10**12)
            sizes = {10**11 * n: 512 + 512 * (n % 2) for n in range(128)}
            with loader(source, world=World(0, 1), global_batch_size=sizes) as job:
                job.skip(10**9)
                for _ in range(17):
                    values = random.permutation([*weights.values()]).tolist()
                    job.set_weights(dict(zip(weights, values, strict=True)))
                    job.skip(10**8)
                size = len(json.dumps(job.state_dict()))
        assert size < max(10_000, 100 * count), size

    def test_damaged(self, parts):
        source = mixture(parts)
        with loader(source, world=World(0, 1)) as job:
            next(iter(job))
            job.set_weights(OTHER)
            state = job.state_dict()
        (first, change) = state["plan"]["mixture"]["changes"]
        lanes = state["plan"]["mixture"]["lanes"]
        for damage in (
            {"changes": [first, {**change, "start": 25}]},
            {"changes": [first, {**change, "shares": first["shares"]}]},
            {"changes": [first]},
            {"changes": [change]},
            {"changes": [first, change, {**change, "start": 3}]},
            {"counts": lanes},
            {"counts": "AAAA"},
            {"owed": lanes},
            {"names": ["web", "code", "mathematics"]},
            {"lanes": first["shares"]},
            {"windows": first["shares"]},
            {"samples": 264},
            {"unit": 24},
            {"unit": 0},
        ):
            damaged = json.loads(json.dumps(state))
            damaged["plan"]["mixture"].update(damage)
            with loader(source, world=World(0, 1)) as again, pytest.raises(ResumeError):
                again.load_state_dict(damaged)
        with loader(source, world=World(0, 1)) as again, pytest.raises(ResumeError):
            again.load_state_dict({**state, "lane_order": "0"})
