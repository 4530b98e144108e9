"""Iterable datasets of any kind lose and repeat no sample, at any position of a resume."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

from penstock.cache import DatasetError, PenstockWarning
from penstock.pipeline import DataLoader
from tests.stream_datasets import KINDS, Chancy, Told
from tests.torch_datasets import Sized, Squares, Streams

EPOCHS = 3
SIZES = [9, 4]  # of the workers' parts; one batch is short, and one worker ends before the other


def make(kind: str, *, batch_size: int | None = 3, **options: Any) -> DataLoader:
    generator = torch.Generator().manual_seed(5) if options.get("num_workers") else None
    return DataLoader(KINDS[kind](SIZES), batch_size, generator=generator, **options)


def numbers(batch: Any) -> list[int]:
    return torch.as_tensor(batch).reshape(-1).tolist()


def rest(loader: DataLoader) -> list[Any]:
    """Return what is left of EPOCHS epochs, batch by batch."""
    batches: list[Any] = []
    while loader.epoch < EPOCHS:
        before = len(batches)
        batches += [numbers(batch) for batch in loader]
        assert len(batches) > before, "an empty epoch"
    return batches


def stopped(loader: DataLoader, batches: int) -> tuple[list[Any], dict[str, Any]]:
    """Return that many batches over epochs, and the state after them.

    The loader then continues by one batch, as a job does that writes its checkpoint meanwhile.
    """
    seen: list[Any] = []
    while True:
        iterator = iter(loader)
        while len(seen) < batches and (batch := next(iterator, None)) is not None:
            seen.append(numbers(batch))
        if len(seen) == batches:
            state = loader.state_dict()
            next(iterator, None)
            return seen, state


def check(kind: str, cuts: Any, **options: Any) -> None:
    torch.manual_seed(1)
    loader = make(kind, **options)
    whole = rest(loader)
    loader.close()
    assert {n % 100 for batch in whole for n in batch} == set(range(13)) or kind == "drawn"
    for cut in cuts:
        if cut > len(whole):
            break
        torch.manual_seed(1)
        first = make(kind, **options)
        seen, state = stopped(first, cut)
        first.close()
        assert seen == whole[:cut]
        torch.manual_seed(99)
        second = make(kind, **options)
        second.load_state_dict(state)
        further = min(2, len(whole) - cut - 1)
        if further > 0:  # and stopped again
            seen, state = stopped(second, further)
            assert seen == whole[cut : cut + further], (cut, whole)
            second.close()
            torch.manual_seed(77)
            second = make(kind, **options)
            second.load_state_dict(state)
            cut += further
        if cut < len(whole):
            assert rest(second) == whole[cut:], (cut, whole)
        second.close()


@pytest.mark.parametrize("batch_size", [3, None])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_continues_exactly_from_every_place(kind: str, batch_size: int | None) -> None:
    check(kind, range(0, 40, 1 if batch_size else 5), batch_size=batch_size)


@pytest.mark.parametrize(  # the whole grid follows
    ("kind", "persistent"),
    [("restarting counted", False), ("live dict", True), ("wrapping", True), ("drawn", False)],
)
def test_with_workers(kind: str, persistent: bool) -> None:
    check(kind, (3, 4), num_workers=2, persistent_workers=persistent)


@pytest.mark.grid
@pytest.mark.parametrize("batch_size", [3, None])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_with_workers_from_every_place(kind: str, persistent: bool, batch_size: int | None) -> None:
    cuts = range(0, 40, 1 if batch_size else 3)
    check(kind, cuts, num_workers=2, persistent_workers=persistent, batch_size=batch_size)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_iter_restarts_is_asked_once_a_pass(workers: int) -> None:
    loader = make("restarting", num_workers=workers)
    for _ in range(2):
        assert sorted(n for batch in loader for n in numbers(batch)) == list(range(13))


def test_a_state_does_not_change_behind_its_owners_back() -> None:
    loader = make("live dict")
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    kept = copy.deepcopy(state)
    next(batches)
    assert state == kept
    expected = [numbers(batch) for batch in batches]
    second = make("live dict")
    second.load_state_dict(state)
    again = iter(second)
    next(again)
    assert state == kept
    second.state_dict()["mark"]["workers"][0]["state"].clear()  # the state belongs to the user
    assert [numbers(batch) for batch in again] == expected


def test_a_samplers_state_does_not_change_either() -> None:
    class Live(torch.utils.data.Sampler[int]):
        def __init__(self) -> None:
            self.live = {"at": 0}

        def __iter__(self) -> Any:
            while self.live["at"] < 9:
                self.live["at"] += 1
                yield self.live["at"]

        def __len__(self) -> int:
            return 9

        def state_dict(self) -> dict[str, int]:
            return self.live

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.live = state

    loader = DataLoader(Squares(10, "int"), 2, sampler=Live(), num_workers=1)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    expected = [numbers(batch) for batch in batches]
    second = DataLoader(Squares(10, "int"), 2, sampler=Live(), num_workers=1)
    second.load_state_dict(state)
    assert [numbers(batch) for batch in second] == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_that_cannot_be_kept_is_named(workers: int) -> None:
    class Odd(Streams):
        def state_dict(self) -> Any:
            return {"rest": (i for i in range(3))}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError(state)

    # A local class can't be pickled, and other tests make workers start by pickling.
    context = "fork" if workers else None
    loader = DataLoader(Odd([5]), num_workers=workers, multiprocessing_context=context)

    def first_state() -> Any:
        next(iter(loader))
        return loader.state_dict()

    with pytest.raises(
        DatasetError, match=r"Odd\.state_dict\(\) returned a value that can't be copied"
    ):
        first_state()


def test_two_iterators_over_one_loader_draw_their_own_orders() -> None:
    torch.manual_seed(0)
    loader = DataLoader(Squares(20, "int"), 5, shuffle=True, num_workers=2)
    pairs = [(numbers(one), numbers(other)) for one, other in zip(loader, loader, strict=True)]
    assert sorted(n for one, _ in pairs for n in one) == list(range(20))
    assert sorted(n for _, other in pairs for n in other) == list(range(20))
    assert [one for one, _ in pairs] != [other for _, other in pairs]


def test_of_two_iterators_the_latest_is_the_states() -> None:
    torch.manual_seed(0)
    loader = DataLoader(Squares(20, "int"), 5, shuffle=True, num_workers=1)
    first, latest = iter(loader), iter(loader)
    next(first)
    next(first)
    next(latest)
    state = loader.state_dict()
    expected = [numbers(batch) for batch in latest]
    again = DataLoader(Squares(20, "int"), 5, shuffle=True, num_workers=1)
    again.load_state_dict(state)
    assert [numbers(batch) for batch in again] == expected


def test_a_decided_order_stays_when_iter_is_called_once_more() -> None:
    loader = DataLoader(Squares(20, "int"), 5, shuffle=True, num_workers=1)
    state = loader.state_dict()
    iter(loader)  # some trainers call iter() twice
    expected = [numbers(batch) for batch in loader]
    again = DataLoader(Squares(20, "int"), 5, shuffle=True, num_workers=1)
    again.load_state_dict(state)
    assert [numbers(batch) for batch in again] == expected
    assert [numbers(batch) for batch in again] != expected


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")  # from Python 3.12 on
@pytest.mark.filterwarnings("ignore:Sized has:penstock.cache.errors.PenstockWarning")
@pytest.mark.parametrize("batch_size", [3, None])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_stream_may_give_more_than_its_length(persistent: bool, batch_size: int | None) -> None:
    def make() -> DataLoader:
        # 8 + 4 samples: one batch more than the length's 4.
        dataset = Sized([8, 4]) if batch_size else Sized([8, 4], length=11)
        return DataLoader(
            dataset, batch_size, num_workers=2, persistent_workers=persistent, prefetch_factor=3
        )

    loader = make()
    batches = iter(loader)
    seen = [numbers(next(batches)) for _ in range(len(loader))]
    state = loader.state_dict()
    assert loader.epoch == 0
    again = make()
    again.load_state_dict(state)
    with pytest.warns(PenstockWarning, match="returned more"):
        left = [numbers(batch) for batch in again]
    assert sorted(n for batch in seen + left for n in batch) == list(range(12))
    assert again.epoch == 1
    next(iter(loader))  # a loop that stops at the length continues with the next iter()
    assert loader.epoch == 1
    loader.close()
    again.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_who_never_asks_past_the_length_moves_on(workers: int) -> None:
    loader = DataLoader(Sized([6, 6]), 3, num_workers=workers)
    states = []
    for epoch in range(3):
        batches = iter(loader)
        assert [len(next(batches)) for _ in range(len(loader))] == [3] * 4
        assert loader.epoch == epoch
        states.append(loader.state_dict())
    for epoch, state in enumerate(states):
        again = DataLoader(Sized([6, 6]), 3, num_workers=workers)
        again.load_state_dict(state)
        assert len(list(again)) == 4  # nothing is left, so the next epoch begins at once
        assert again.epoch == epoch + 2


def test_going_back_to_an_epoch_by_its_number() -> None:
    loader = DataLoader(Sized([12]), 3)
    for _ in range(2):
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        loader.set_epoch(0)
        assert loader.epoch == 0
        next(iter(loader))
        assert loader.epoch == 0
        loader.set_epoch(0)  # the current one: nothing changes


def test_the_epoch_that_a_dataset_received_is_kept() -> None:
    loader = DataLoader(Told([11]), 3)
    for epoch in range(2):
        loader.set_epoch(epoch)
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        expected = [numbers(batch) for batch in batches]
        again = DataLoader(Told([11]), 3)
        again.load_state_dict(state)
        assert [numbers(batch) for batch in again] == expected
        again.load_state_dict(state)
        again.set_epoch(epoch)  # like the resumed loop
        assert [numbers(batch) for batch in again] == expected


def test_a_resumed_pass_that_continues_by_itself_sets_the_next_epoch() -> None:
    def epochs(loader: DataLoader) -> list[list[int]]:
        batches = []
        while loader.epoch < 3:
            loader.set_epoch(loader.epoch)
            batches += [numbers(batch) for batch in loader]
        return batches

    whole = epochs(DataLoader(Told([12]), 3))
    loader = DataLoader(Told([12]), 3)
    loader.set_epoch(0)
    iterator = iter(loader)
    for _ in range(4):  # all batches, but not the end
        next(iterator)
    again = DataLoader(Told([12]), 3)
    again.load_state_dict(loader.state_dict())
    assert epochs(again) == whole[4:]


def test_snapshot_every_n_steps_changes_nothing() -> None:
    states = []
    for more in ({}, {"snapshot_every_n_steps": 5}, {"snapshot_every_n_steps": 0}):
        torch.manual_seed(1)
        loader = make("shuffling", **more)
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        loader.snapshot_every_n_steps = 7
        states.append(loader.state_dict())
    assert states[0] == states[1] == states[2]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.mark.parametrize("cut", range(5))
def test_a_stream_that_shuffles_by_the_processs_generators_continues(cut: int) -> None:
    seed_all(1)
    loader = DataLoader(Chancy([11]), 3)
    seen: list[Any] = []
    state = loader.state_dict()
    for batch in loader:
        if len(seen) == cut:
            break
        seen.append(numbers(batch))
        state = loader.state_dict()
    seed_all(1)
    whole = [numbers(batch) for batch in DataLoader(Chancy([11]), 3)]
    for _ in range(2 if 0 < cut < 4 else 0):
        seed_all(99)
        again = DataLoader(Chancy([11]), 3)
        again.load_state_dict(state)
        left = []
        for batch in again:
            left.append(numbers(batch))
            random.random()  # the training loop draws while a resumed stream is read
        assert left == whole[cut:]


@pytest.mark.parametrize("cut", [1, 5, 9])
def test_workers_that_continue_shuffle_on_behind_a_resume(cut: int) -> None:
    def make() -> DataLoader:
        return DataLoader(Chancy([5, 3]), 2, num_workers=2, persistent_workers=True)

    seed_all(1)
    loader = make()
    whole = rest(loader)
    loader.close()
    seed_all(1)
    loader = make()
    seen, state = stopped(loader, cut)
    loader.close()
    assert seen == whole[:cut]
    seed_all(99)
    loader = make()
    loader.load_state_dict(state)
    assert rest(loader) == whole[cut:]
    loader.close()


def test_a_stream_that_shares_a_generator_with_others_is_warned_of() -> None:
    batches = iter(loader := DataLoader(Chancy([11]), 3))
    for _ in range(3):
        next(batches)
        np.random.rand()
    with pytest.warns(PenstockWarning, match="Chancy draws from numpy's global generator"):
        loader.state_dict()
