"""Ranks at the first batch: who is late, refused, or reads what the others don't."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from penstock.cache import JobStore, PlanError, RankFailedError, ResumeError, StalledError
from penstock.pipeline import DataLoader, World
from penstock.pipeline.members import FirstBatchBarrier, SharedFacts, open_channel
from penstock.readers import Dataset

if TYPE_CHECKING:
    from pathlib import Path

FACTS = SharedFacts(dataset="d", samples=10, seed=1, plan="p", size=3, url="s3://a/b")


@pytest.fixture(autouse=True)
def _are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for long: what is waited for is there, or never comes."""
    monkeypatch.setattr("penstock.pipeline.members.handshake.MEET_TIMEOUT_S", 0.02)
    monkeypatch.setattr("penstock.pipeline.members.handshake.STANDS_AFTER_S", 0.01)
    monkeypatch.setattr("penstock.cache.job_store.FIRST_LOOK_S", 0.01)


@pytest.fixture
def store() -> JobStore:
    return JobStore(dist.HashStore())  # type: ignore[attr-defined]


def meeting(
    store: JobStore,
    rank: int,
    *,
    size: int = 3,
    dataset: str = "d",
    waits: bool = True,
    timeout_s: float | None = 0.1,
) -> FirstBatchBarrier:
    """The meeting of a rank whose loader is there."""
    world = World(rank, size)
    agreement = open_channel(dataset=dataset, shuffle=waits, world=world, store=store)
    facts = replace(FACTS, dataset=dataset)
    found = FirstBatchBarrier(agreement, facts, world=world, waits=waits, timeout_s=timeout_s)
    found.arrive()
    return found


def notice(one: FirstBatchBarrier) -> str:
    told = one._channel.stop_notice()
    return "" if told is None else str(told["failed"])


class TestLateRanks:
    def test_rank_0_goes_on_alone(self, store: JobStore) -> None:
        meeting(store, 0, timeout_s=600.0).begin()

    def test_any_other_waits_and_names_who_is_missing(self, store: JobStore) -> None:
        first, second = meeting(store, 1), meeting(store, 0)
        with pytest.raises(StalledError, match=r"^Rank 0 of 3 waited .* rank 2 to build"):
            second.begin()  # it isn't alone
        first.begin()  # ends at its first batch, as who comes late
        assert "StalledError" in notice(first)
        assert "StalledError" in notice(meeting(store, 2))

    def test_all_go_on_once_the_last_one_comes(self, store: JobStore) -> None:
        first = meeting(store, 1, timeout_s=600.0)
        meeting(store, 0)
        waits = threading.Thread(target=first.begin)
        waits.start()
        meeting(store, 2)
        waits.join(timeout=60.0)
        assert not waits.is_alive()
        first.begin()  # asks nobody

    def test_after_a_state_all_are_waited_for_again(self, store: JobStore) -> None:
        ranks = [meeting(store, rank) for rank in range(3)]
        for one in ranks:
            one.begin()
        for one in ranks[:2]:
            one._channel.begin()
            one.arrive()
        with pytest.raises(StalledError, match=r"rank 2 to build .*, or to load the state"):
            ranks[0].begin()

    def test_of_a_rejoin_nobody_is_waited_for_long(self, store: JobStore) -> None:
        meeting(store, 1, timeout_s=None).begin()

    def test_states_that_differ_are_an_error_on_each(self, store: JobStore) -> None:
        first, second = (meeting(store, rank, size=2) for rank in range(2))
        first.compare_state("epoch 1, position 8 (ab)")
        with pytest.raises(PlanError, match=r"^Rank 0 loaded .*position 8.* rank 1 one of epoch 0"):
            second.compare_state("epoch 0, position 8 (cd)")
        first._channel.begin()
        assert "rank 1 one of epoch 0" in notice(first)
        with pytest.raises(RankFailedError, match=r"Rank 1 failed"):
            first.check()


class TestRefusals:
    def test_a_rank_that_was_refused_ends_those_that_wait(self, store: JobStore) -> None:
        ranks = [meeting(store, rank, timeout_s=600.0) for rank in range(2)]
        late = open_channel(dataset="d", shuffle=True, world=World(2, 3), store=store)
        refused = FirstBatchBarrier(late, FACTS, world=World(2, 3), waits=True, timeout_s=600.0)
        refused.refuse("ResumeError: another dataset")
        with pytest.raises(RankFailedError, match=r"^Rank 2 raised an error .*another") as told:
            ranks[0].begin()
        assert told.value.rank == 2
        ranks[1].begin()
        assert "another dataset" in notice(ranks[1])

    def test_one_that_comes_after_all_ends_nobody(self, store: JobStore) -> None:
        ranks = [meeting(store, rank) for rank in range(2)]
        late = open_channel(dataset="d", shuffle=True, world=World(2, 3), store=store)
        again = FirstBatchBarrier(late, FACTS, world=World(2, 3), waits=True, timeout_s=600.0)
        again.refuse("ResumeError: damaged")
        again.arrive()
        for one in ranks:
            one.begin()

    def test_where_all_were_refused_all_go_on(self, store: JobStore) -> None:
        ranks = [meeting(store, rank) for rank in range(2)]
        for one in ranks:
            one.refuse("ResumeError: another dataset")
        with pytest.raises(StalledError):  # for who is missing, not for the other's refusal
            ranks[0].begin()
        assert ranks[0].refusals is not None
        assert ranks[0].refusals.error() is None


class TestDatasetsInOrder:
    """Each rank's own dataset, in loaders that don't shuffle."""

    def test_two_that_nobody_shares_are_an_error_on_each(self, store: JobStore) -> None:
        ranks = [meeting(store, rank, dataset=f"set-{rank}", waits=False) for rank in range(3)]
        ranks[0].begin()
        for rank in (1, 2):
            other = rank - 1
            words = rf"^Rank {other} reads dataset set-{other} \(10 samples.* rank {rank} has no"
            with pytest.raises(PlanError, match=words):
                ranks[rank].begin()
            assert f"rank {rank} reads set-{rank} (10 samples" in notice(ranks[rank])
        assert "rank 1 has no loader" in notice(ranks[0])

    def test_rank_0_may_have_one_alone(self, store: JobStore) -> None:
        alone = meeting(store, 0, dataset="validation", waits=False)
        shared = [meeting(store, rank, dataset="test", waits=False) for rank in range(3)]
        for one in (shared[1], alone, shared[2], shared[0]):
            one.begin()
        assert [notice(one) for one in (alone, *shared)] == [""] * 4

    def test_the_odd_one_is_found_whenever_it_comes(self, store: JobStore) -> None:
        odd = meeting(store, 2, dataset="other", waits=False)
        odd.begin()
        most = [meeting(store, rank, dataset="most", waits=False) for rank in range(2)]
        with pytest.raises(PlanError, match="Rank 2 reads dataset other"):
            most[0].begin()
        assert "rank 0 has no loader" in notice(odd)
        assert "rank 0 has no loader" in notice(most[1])


def test_a_state_that_is_refused_is_told(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = JobStore(dist.HashStore())  # type: ignore[attr-defined]
    monkeypatch.setattr(JobStore, "of_group", classmethod(lambda _: store))

    def loader(rank: int, **more: Any) -> DataLoader:
        world = World(rank, 2, place=(rank, 2))
        options: dict[str, Any] = {"shuffle": True, "seed": 1, "drop_last": True}
        options |= {"global_batch_size": 8, **more}
        return DataLoader(Dataset(pack, fields=("id",)), world=world, **options)

    first, second = loader(0), loader(1)
    state = first.state_dict()
    first.load_state_dict(state)
    with pytest.raises(ResumeError):
        second.load_state_dict({**state, "dataset": "another"})
    with pytest.raises(RankFailedError, match=r"Rank 1 raised an error .*ResumeError"):
        next(iter(first))
    with pytest.raises(PlanError, match="no step"):
        loader(1, global_batch_size=10**6)
    third = loader(0)
    with pytest.raises(RankFailedError, match=r"Rank 1 raised an error .*PlanError"):
        next(iter(third))
    for one in (first, second, third):
        one.close()
