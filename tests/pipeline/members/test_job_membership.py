"""Ranks of one loader: who differs, is late, was refused, or reads what the others don't; what they
count together, and how all of them stop."""

from __future__ import annotations

import threading
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from penstock.cache import (
    JobStore,
    PenstockWarning,
    PlanError,
    RankFailedError,
    ResumeError,
    StalledError,
)
from penstock.pipeline import DataLoader, World
from penstock.pipeline.members import (
    ENDING_TIMEOUT_S,
    JobMembership,
    Membership,
    SharedFacts,
    post_refusal,
)
from penstock.readers import Dataset

if TYPE_CHECKING:
    from pathlib import Path

FACTS = SharedFacts(dataset="d", samples=10, seed=1, plan="p", size=3, url="s3://a/b")
MODULE = "penstock.pipeline.members.job_membership"


@pytest.fixture(autouse=True)
def _are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for long: what is waited for is there, or never comes."""
    monkeypatch.setattr(f"{MODULE}.ALONE_S", 0.02)
    monkeypatch.setattr(f"{MODULE}.STANDS_AFTER_S", 0.01)
    monkeypatch.setattr("penstock.cache.channel.LOOK_EVERY_S", 0.01)


@pytest.fixture
def store() -> JobStore:
    return JobStore(dist.HashStore())  # type: ignore[attr-defined]


def join(
    store: JobStore,
    rank: int,
    *,
    size: int = 3,
    dataset: str = "d",
    shuffles: bool = True,
    timeout_s: float = 0.1,
    world: World | None = None,
    **facts: Any,
) -> JobMembership:
    """A rank whose loader is built."""
    return JobMembership(
        replace(FACTS, dataset=dataset, **facts),
        world or World(rank, size),
        store=store,
        label=dataset,
        shuffles=shuffles,
        timeout_s=timeout_s,
    )


def notice(one: JobMembership) -> str:
    found = one.stop_notice()
    return "" if found is None else str(found["failed"])


class TestCounts:
    def test_counts_are_everyones(self, store: JobStore) -> None:
        first, second = join(store, 0), join(store, 1)
        assert [first.add("bad", 2), second.add("bad", 3), first.add("bad", 0)] == [2, 5, 5]

    def test_additions_have_places_once_all_are_published(self, store: JobStore) -> None:
        first, second = join(store, 0), join(store, 1)
        first.add("bad", 2, place=8)
        second.add("bad", 1, place=16)
        assert second.additions("bad") == [(8, 2), (16, 1)]
        assert first.store is not None
        first.store.add("0/bad", 4)  # by a rank that will publish the place next
        assert second.additions("bad") is None
        for one in (first, second):
            one.restart()
        assert second.additions("bad") == []

    def test_a_count_at_a_place_is_what_the_first_who_asks_decides(self, store: JobStore) -> None:
        first, second = join(store, 0), join(store, 1)
        first.add("bad", 2)
        assert first.count_at("0-40", "bad") == 2
        second.add("bad", 3)
        assert second.count_at("0-40", "bad") == 2
        assert [second.count_at("0-80", "bad"), first.count_at("0-80", "bad")] == [5, 5]

    def test_ranks_out_of_reach_agree_on_no_count(self) -> None:
        apart = Membership(World(1, 2))
        apart.add("bad", 3)
        assert apart.count_at("0-40", "bad") is None
        assert apart.additions("bad") is None

    def test_alone_it_agrees_with_itself(self) -> None:
        alone = Membership(World(0, 1))
        assert alone.store is None
        assert [alone.add("bad", 2), alone.add("bad", 1)] == [2, 3]
        alone.stop({"rank": 0})
        assert alone.stop_notice() == {"rank": 0}
        alone.restart()
        assert (alone.stop_notice(), alone.add("bad", 0)) == (None, 0)

    def test_a_store_that_is_gone_costs_one_warning(self) -> None:
        class Gone:
            def __getattr__(self, name: str) -> Any:
                def fail(*_: object) -> None:
                    raise RuntimeError("Connection reset by peer")

                return fail

        with pytest.warns(PenstockWarning, match="Connection reset by peer"):
            one = join(JobStore(Gone()), 0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert one.stop_notice() is None
            assert one.add("bad", 2) == 2
            one.meet()
            one.stop({"rank": 0})
            assert one.stop_notice() == {"rank": 0}


class TestTheEnd:
    def test_the_last_rank_lets_all_end(self, store: JobStore) -> None:
        first, second = join(store, 0), join(store, 1)
        waits = threading.Thread(target=first.end_together)
        waits.start()
        second.end_together()
        waits.join(timeout=ENDING_TIMEOUT_S)
        assert not waits.is_alive()

    def test_a_rank_that_never_ends_is_not_waited_for_for_ever(
        self, store: JobStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, _ = join(store, 0), join(store, 1)
        monkeypatch.setattr(f"{MODULE}.ENDING_TIMEOUT_S", 0.1)
        first.end_together()

    def test_the_first_notice_reaches_all(self, store: JobStore) -> None:
        first, second, third = (join(store, rank) for rank in range(3))
        assert first.stop_notice() is None
        second.stop({"rank": 1})
        first.stop({"rank": 0})
        assert first.stop_notice() is not None
        assert third.stop_notice() == {"rank": 1}

    def test_a_restored_job_forgets_the_notice(self, store: JobStore) -> None:
        first, second = join(store, 0), join(store, 1)
        first.stop({"rank": 0})
        for one in (first, second):
            one.restart()
            assert one.stop_notice() is None


class TestFacts:
    def test_loaders_that_differ_stop_all_ranks(self, store: JobStore) -> None:
        first, other = join(store, 0), join(store, 1)
        with pytest.raises(
            PlanError, match=r"^Rank 0 .*seed 1; rank 2 with seed 2.*seed="
        ) as found:
            join(store, 2, seed=2, plan="q")
        first.restart()  # it has loaded a state meanwhile
        for one in (first, other):
            assert notice(one) == str(found.value)
            with pytest.raises(RankFailedError, match="seed 2"):
                one.meet()  # waits for nobody

    def test_a_rank_that_two_processes_claim_is_refused(self, store: JobStore) -> None:
        world = World(0, 2, place=(0, 2))
        first = join(store, 0, world=world)
        with pytest.raises(
            PlanError, match=r"Rank 0 \(process 1\) is one of more than 1 processes"
        ):
            join(store, 0, world=World(0, 2, place=(1, 2)))
        assert first.stop_notice() is not None

    def test_one_process_of_a_replica_speaks(self, store: JobStore) -> None:
        worlds = [World(process // 2, 2, place=(process, 4)) for process in range(4)]
        for number in range(2):  # of the replicas' first and second loader
            joined = [join(store, 0, world=one, timeout_s=60.0) for one in worlds]
            assert [one.speaks_for_rank for one in joined] == [True, False, True, False], number
            for one in joined:
                one.meet()  # all are there


class TestLateRanks:
    def test_rank_0_goes_on_alone(self, store: JobStore) -> None:
        join(store, 0, timeout_s=600.0).meet()

    def test_any_other_waits_and_names_who_is_missing(self, store: JobStore) -> None:
        first, second = join(store, 1), join(store, 0)
        with pytest.raises(StalledError, match=r"^Rank 0 of 3 waited .* rank 2 to build"):
            second.meet()  # it isn't alone
        with pytest.raises(RankFailedError, match=r"^Rank 0 failed.* rank 2 to build"):
            first.meet()
        late = join(store, 2)
        late.meet()
        with pytest.raises(RankFailedError, match=r"^Rank 0 failed.* rank 2 to build"):
            late.check(0)

    def test_all_go_on_once_the_last_one_comes(self, store: JobStore) -> None:
        first = join(store, 1, timeout_s=600.0)
        join(store, 0)
        waits = threading.Thread(target=first.meet)
        waits.start()
        join(store, 2)
        waits.join(timeout=60.0)
        assert not waits.is_alive()
        first.meet()  # asks nobody

    def test_after_a_state_all_are_waited_for_again(self, store: JobStore) -> None:
        ranks = [join(store, rank) for rank in range(3)]
        for one in ranks:
            one.meet()
        for one in ranks[:2]:
            one.restart()
        with pytest.raises(StalledError, match=r"rank 2 to build .*, or to load the state"):
            ranks[0].meet()

    def test_of_a_rejoin_nobody_is_waited_for_long(self, store: JobStore) -> None:
        join(store, 1, at="step 7", timeout_s=600.0).meet()

    def test_states_that_differ_are_an_error_on_each(self, store: JobStore) -> None:
        first, second = (join(store, rank, size=2) for rank in range(2))
        first.compare_state("epoch 1, position 8 (ab)")
        with pytest.raises(PlanError, match=r"^Rank 0 loaded .*position 8.* rank 1 one of epoch 0"):
            second.compare_state("epoch 0, position 8 (cd)")
        first.restart()
        assert "rank 1 one of epoch 0" in notice(first)
        with pytest.raises(RankFailedError, match=r"Rank 1 failed"):
            first.check()


class TestRefusals:
    def test_a_rank_that_was_refused_ends_those_that_wait(self, store: JobStore) -> None:
        ranks = [join(store, rank, timeout_s=600.0) for rank in range(2)]
        assert ranks[0].store is not None
        post_refusal(ranks[0].store, World(2, 3), ResumeError("another dataset"))
        with pytest.raises(RankFailedError, match=r"^Rank 2 raised an error .*another") as found:
            ranks[0].meet()
        assert found.value.rank == 2
        with pytest.raises(RankFailedError, match="another dataset"):
            ranks[1].meet()

    def test_one_that_comes_after_all_ends_nobody(self, store: JobStore) -> None:
        ranks = [join(store, rank) for rank in range(2)]
        assert ranks[0].store is not None
        post_refusal(ranks[0].store, World(2, 3), ResumeError("damaged"))
        join(store, 2)
        for one in ranks:
            one.meet()

    def test_where_all_were_refused_all_go_on(self, store: JobStore) -> None:
        ranks = [join(store, rank) for rank in range(2)]
        for one in ranks:
            one.refuse(ResumeError("another dataset"))
        with pytest.raises(StalledError):  # for who is missing, not for the other's refusal
            ranks[0].meet()


class TestDatasetsInOrder:
    """Each rank's own dataset, in loaders that don't shuffle."""

    def test_two_that_nobody_shares_are_an_error_on_each(self, store: JobStore) -> None:
        ranks = [join(store, rank, dataset=f"set-{rank}", shuffles=False) for rank in range(3)]
        ranks[0].meet()
        for rank in (1, 2):
            other = rank - 1
            words = rf"^Rank {other} reads dataset set-{other} \(10 samples.* rank {rank} has no"
            with pytest.raises(PlanError, match=words):
                ranks[rank].meet()
            assert f"rank {rank} reads set-{rank} (10 samples" in notice(ranks[rank])
        assert "rank 1 has no loader" in notice(ranks[0])

    def test_rank_0_may_have_one_alone(self, store: JobStore) -> None:
        alone = join(store, 0, dataset="validation", shuffles=False)
        shared = [join(store, rank, dataset="test", shuffles=False) for rank in range(3)]
        for one in (shared[1], alone, shared[2], shared[0]):
            one.meet()
        assert [notice(one) for one in (alone, *shared)] == [""] * 4

    def test_the_odd_one_is_found_whenever_it_comes(self, store: JobStore) -> None:
        odd = join(store, 2, dataset="other", shuffles=False)
        odd.meet()
        most = [join(store, rank, dataset="most", shuffles=False) for rank in range(2)]
        with pytest.raises(PlanError, match="Rank 2 reads dataset other"):
            most[0].meet()
        assert "rank 0 has no loader" in notice(odd)
        assert "rank 0 has no loader" in notice(most[1])


class TestRanksThatDifferInShuffle:
    WORDS = r"^Rank {} built this loader with shuffle=True; rank {} with shuffle=False"

    def test_the_one_in_order_finds_it(self, store: JobStore) -> None:
        shuffled = join(store, 0, size=2)
        in_order = join(store, 1, size=2, shuffles=False)
        with pytest.raises(PlanError, match=self.WORDS.format(0, 1)):
            in_order.meet()
        with pytest.raises(RankFailedError, match="rank 1 with shuffle=False"):
            shuffled.meet()

    def test_the_shuffled_one_finds_it(self, store: JobStore) -> None:
        in_order = join(store, 0, size=2, shuffles=False)
        in_order.meet()  # waits for nobody
        shuffled = join(store, 1, size=2, timeout_s=600.0)
        with pytest.raises(PlanError, match=self.WORDS.format(1, 0)):
            shuffled.meet()
        with pytest.raises(RankFailedError, match="rank 0 with shuffle=False"):
            in_order.check(0)

    def test_a_second_loader_is_found_too(self, store: JobStore) -> None:
        for rank in range(2):
            join(store, rank, size=2)
        join(store, 0, size=2, dataset="e")
        with pytest.raises(PlanError, match=self.WORDS.format(0, 1)):
            join(store, 1, size=2, dataset="e", shuffles=False).meet()

    def test_rank_0_may_evaluate_the_samples_that_all_train_on(self, store: JobStore) -> None:
        train = [join(store, rank, size=2) for rank in range(2)]
        join(store, 0, size=2, shuffles=False).meet()
        for one in train:
            one.meet()

    def test_rank_0_may_evaluate_before_it_trains(self, store: JobStore) -> None:
        early = join(store, 1, size=2)
        join(store, 0, size=2, shuffles=False, ends="pad=mask").meet()
        join(store, 0, size=2).meet()
        early.meet()


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
