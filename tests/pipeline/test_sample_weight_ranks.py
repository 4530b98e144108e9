"""Test weights of samples in jobs of several ranks, which set them together."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from penstock.errors import ConfigError, PlanError, StalledError
from tests.pipeline.test_mixture_ranks import Job, alone
from tests.sources import Values

COUNT = 300
RNG = np.random.default_rng(3)
WEIGHTS, OTHER = RNG.random(COUNT) * 2, RNG.random(COUNT)


def source() -> Any:
    return Values([25] * 12, {"value": np.arange(COUNT)}).subset(weights=WEIGHTS)


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_set_weights(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    with Job(source(), 1, monkeypatch) as job:
        job.begin()
        wanted = [job.step() for _ in range(2)]
        job.each(lambda one: one.set_sample_weights(OTHER))
        steps = len(job.loaders[0])
        wanted += [job.step() for _ in range(steps - 2)]
        job.begin()
        wanted += [job.step() for _ in range(steps)]
    with Job(source(), size, monkeypatch) as job:
        job.begin()
        found = [job.step() for _ in range(2)]
        assert job.each(lambda one: one.set_sample_weights(OTHER)) == [None] * size
        found += [job.step() for _ in range(steps - 2)]
        job.begin()
        found += [job.step() for _ in range(steps)]
        states = [json.dumps(one.state_dict()) for one in job.loaders]
    assert found == wanted
    assert found[:steps] == alone(source(), count=steps)
    assert len({*states}) == 1


def test_different_weights_are_an_error_on_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with Job(source(), 3, monkeypatch) as job:
        errors = job.each(lambda one: one.set_sample_weights(OTHER * (1 + (one.world.rank == 1))))
        assert all(type(error) is PlanError for error in errors)
        assert all("Call set_sample_weights with the same arguments" in str(e) for e in errors)
        errors = job.each(lambda one: one.set_sample_weights(OTHER[one.world.rank // 2 :]))
        assert type(errors.pop(2)) is ConfigError
        assert all("Rank 2 couldn't set weights: weights: got 299" in str(e) for e in errors)
        job.begin()
        found = [job.step() for _ in range(3)]
    assert found == alone(source(), count=3)


def test_a_rank_that_does_not_set_weights_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        Job(source(), 2, monkeypatch, timeout=0.2) as job,
        pytest.raises(StalledError, match="rank 1 to call set_sample_weights"),
    ):
        job.loaders[0].set_sample_weights(OTHER)


def test_loaders_with_other_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock import DataLoader, World
    from penstock.cache import JobStore

    with Job(source(), 1, monkeypatch):
        store = JobStore.of_group()
        assert store is not None

        def make(rank: int, weights: Any) -> DataLoader:
            own = Values([25] * 12, {"value": np.arange(COUNT)})
            world = World(rank, 2, place=(rank, 2))
            return DataLoader(
                own, 24, shuffle=True, seed=5, world=world, drop_last=True, weights=weights
            )

        with make(0, WEIGHTS), pytest.raises(PlanError, match=r"with weights of samples \w+ from"):
            make(1, OTHER)
