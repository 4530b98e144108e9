"""Loaders over torch datasets with seed=: ranks compare them and publish their errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from penstock.cache import JobStore, PlanError, RankFailedError, ResumeError, TooManyBadSamplesError
from penstock.pipeline import DataLoader, Order, World
from tests.torch_datasets import Squares


@pytest.fixture(autouse=True)
def _one_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = JobStore(dist.HashStore())  # type: ignore[attr-defined]
    monkeypatch.setattr(JobStore, "of_group", classmethod(lambda _: store))
    monkeypatch.setattr("penstock.pipeline.members.job_membership.ALONE_S", 0.02)
    monkeypatch.setattr("penstock.pipeline.members.job_membership.STANDS_AFTER_S", 0.01)


def loader(rank: int, *, dataset: Any = None, **more: Any) -> DataLoader:
    options: dict[str, Any] = {"shuffle": True, "seed": 1, "drop_last": True, **more}
    world = World(rank, 2, place=(rank, 2))
    return DataLoader(dataset or Squares(40, "int"), 4, world=world, **options)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"seed": 2}, r"with seed 1; rank 1 with seed 2"),
        ({"dataset": Squares(30, "int")}, r"Squares-40 \(40 samples\).*Squares-30 \(30 samples"),
        ({"drop_last": False, "pad": "mask"}, r"pad=None; rank 1 with drop_last=False, pad=mask"),
        ({"order": Order(reshuffle=0.5)}, "reshuffle=0.5"),
    ],
)
def test_what_differs_is_named_on_both(more: dict[str, Any], words: str) -> None:
    first = loader(0)
    with pytest.raises(PlanError, match=words):
        loader(1, **more)
    with pytest.raises(RankFailedError, match=words):
        next(iter(first))


def test_each_rank_s_own_data_in_order_are_found_and_one_alone_is_not() -> None:
    options: dict[str, Any] = {"shuffle": False, "drop_last": False, "pad": "mask"}
    assert len(list(loader(0, dataset=Squares(12, "int"), **options))) == 2
    first = loader(0, dataset=Squares(20, "int"), **options)
    second = loader(1, dataset=Squares(24, "int"), **options)
    passing = iter(first)
    next(passing)
    with pytest.raises(PlanError, match=r"Rank 0 reads dataset Squares-20 .*\(24 samples"):
        next(iter(second))
    with pytest.raises(RankFailedError, match=r"Rank 1 failed.*shared out twice"):
        next(passing)


def test_a_state_that_one_rank_refuses_ends_the_other() -> None:
    first, second = loader(0), loader(1)
    next(iter(first))
    state = first.state_dict()
    first.load_state_dict(state)
    with pytest.raises(ResumeError):
        second.load_state_dict({**state, "seed": 9})
    with pytest.raises(RankFailedError, match=r"Rank 1 raised an error .*ResumeError"):
        next(iter(first))


def test_states_that_differ_are_an_error() -> None:
    first, second = loader(0), loader(1)
    one, two = (iter(each) for each in (first, second))
    early, later = [(next(one), next(two), first.state_dict())[-1] for _ in range(2)]
    first.load_state_dict(early)
    with pytest.raises(PlanError, match=r"position 8; rank 1 one of epoch 0, position 16"):
        second.load_state_dict(later)
    with pytest.raises(RankFailedError, match="Load the same state"):
        next(iter(first))


def test_all_stop_where_one_has_too_many_bad_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bad(Squares):
        def __getitem__(self, index: int) -> Any:
            if index % 2:
                raise ValueError("broken")
            return super().__getitem__(index)

    data = Bad(40, "int")
    monkeypatch.setattr("penstock.pipeline.members.job_membership.ENDING_TIMEOUT_S", 0.01)
    first, second = (loader(rank, dataset=data, max_bad=0.01) for rank in range(2))
    passes = iter(first), iter(second)
    with pytest.warns(UserWarning, match="is bad"):
        batches = [next(each) for each in passes]  # each rank delivers the batch with the notice
    assert [len(batch) for batch in batches] == [4, 4]
    for each in passes:
        with pytest.raises(
            TooManyBadSamplesError, match=r"of 40 samples\. Rank 0 passed"
        ) as caught:
            next(each)
        assert "broken" in str(caught.value)


def test_the_job_s_statistics_hold_both_ranks() -> None:
    ranks = [loader(rank) for rank in range(2)]
    for one in ranks:
        assert len(list(one)) == 5
    for one in ranks:
        job = one.statistics().job
        assert job is not None
        assert (job.heard, job.processes) == (2, 2)
    assert sorted(i for one in (loader(0), loader(1)) for batch in one for i in batch.tolist())
