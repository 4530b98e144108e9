"""Resuming a torch dataset delivers exactly what a loop without a stop would have delivered."""

from __future__ import annotations

import copy
import gc
import json
import multiprocessing
import warnings
from typing import Any

import pytest
import torch
import torch.utils.data

from penstock.cache import ClosedError, ConfigError, PenstockWarning, PlanError, ResumeError
from penstock.pipeline import DataLoader, Order, World
from tests.torch_datasets import (
    CountingSampler,
    Drawn,
    Failing,
    Noisy,
    Random,
    Remembering,
    Sized,
    Squares,
    StatefulMap,
    Streams,
    Walked,
    same,
)


def weighted(samples: int) -> Any:
    return torch.utils.data.WeightedRandomSampler([1.0] * samples, samples)


def shuffled_by_generator(samples: int) -> Any:
    return torch.utils.data.RandomSampler(
        range(samples), generator=torch.Generator().manual_seed(13)
    )


MAKERS: dict[str, Any] = {
    "in order": lambda w: DataLoader(Squares(23, "int"), batch_size=3, num_workers=w),
    "shuffled": lambda w: DataLoader(Squares(23, "int"), 3, shuffle=True, num_workers=w),
    "single": lambda w: DataLoader(Squares(11, "int"), None, shuffle=True, num_workers=w),
    "weighted": lambda w: DataLoader(Squares(23, "int"), 3, sampler=weighted(23), num_workers=w),
    "generator": lambda w: DataLoader(
        Squares(23, "int"), 3, sampler=shuffled_by_generator(23), num_workers=w
    ),
    "loader's generator": lambda w: DataLoader(
        Squares(23, "int"),
        3,
        shuffle=True,
        num_workers=w,
        generator=torch.Generator().manual_seed(4),
    ),
    "stateful sampler": lambda w: DataLoader(
        Squares(23, "int"), 3, sampler=CountingSampler(23), num_workers=w
    ),
    "stateful map": lambda w: DataLoader(StatefulMap(23), 3, shuffle=True, num_workers=w),
    "seed": lambda w: DataLoader(Noisy(23), 3, shuffle=True, num_workers=w, seed=7),
    "stream": lambda w: DataLoader(Streams([4, 19]), 3, num_workers=w),
    "single stream": lambda w: DataLoader(Streams([4, 19]), None, num_workers=w),
    "sized": lambda w: DataLoader(Sized([12, 12]), 3, num_workers=w),
    "remembering": lambda w: DataLoader(Remembering([4, 19]), 3, num_workers=w),
    "walked": lambda w: DataLoader(Walked([17, 6]), 3, num_workers=w),
    "drawn": lambda w: DataLoader(Drawn([17, 6]), 3, num_workers=w),
    "seeded stream": lambda w: DataLoader(Random([4, 19]), 3, num_workers=w, seed=7),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", list(MAKERS))
def test_resume_continues_exactly(name: str, workers: int) -> None:
    make = MAKERS[name]
    stops = range(9) if not workers else (4,)  # each takes four processes
    for stop in stops:
        torch.manual_seed(stop)
        first = make(workers)
        batches = iter(first)
        for _ in range(stop):
            if next(batches, None) is None:
                break
        state = json.loads(json.dumps(first.state_dict()))
        rest = list(batches)
        torch.manual_seed(999)
        second = make(workers)
        second.load_state_dict(state)
        resumed = list(second)
        if not rest and stop:  # the end of the epoch: the next one follows
            assert resumed
        else:
            assert same(rest, resumed), (stop, rest, resumed)
        assert first.epoch == 1
        first.close()
        second.close()


# Samplers run in the loader's process, so one of them is enough with workers.
ENDS = [(name, 0) for name in MAKERS] + [
    (name, 2)
    for name in MAKERS
    if name not in ("in order", "single", "weighted", "generator", "loader's generator")
]


@pytest.mark.parametrize(("name", "workers"), ENDS)
def test_a_state_from_the_end_gives_the_next_epoch(name: str, workers: int) -> None:
    torch.manual_seed(1)
    first = MAKERS[name](workers)
    list(first)
    state = json.loads(json.dumps(first.state_dict()))
    assert len(json.dumps(state)) < 25_000
    second_epoch = list(first)
    torch.manual_seed(999)
    second = MAKERS[name](workers)
    second.load_state_dict(state)
    assert second.epoch == 1
    if name != "stateful map" and (name != "drawn" or not workers):
        # What it drew in the first epoch isn't part of the second's start.
        assert same(second_epoch, list(second))


@pytest.mark.parametrize("name", ["shuffled", "weighted", "seed"])
def test_epochs_differ(name: str) -> None:
    loader = MAKERS[name](0)
    epochs = []
    for _ in range(3):
        loader.state_dict()
        epochs.append(str(list(loader)))
    assert len(set(epochs)) == 3


def test_a_state_taken_before_the_first_batch_states_what_will_come() -> None:
    loader = MAKERS["shuffled"](0)
    state = loader.state_dict()
    expected = list(loader)
    again = MAKERS["shuffled"](0)
    again.load_state_dict(state)
    assert same(expected, list(again))


@pytest.mark.parametrize(
    ("name", "workers"),
    [(name, 0) for name in ("shuffled", "generator", "single", "stream")]
    + [("shuffled", 2), ("stream", 2)],
)
def test_taking_a_state_at_an_epochs_start_changes_nothing(name: str, workers: int) -> None:
    def three_epochs(*, asks: bool) -> list[Any]:
        torch.manual_seed(5)
        loader, batches = MAKERS[name](workers), []
        for _ in range(3):
            if asks:
                loader.state_dict()
            batches += list(loader)
        return [*batches, torch.rand(1)]

    assert same(three_epochs(asks=False), three_epochs(asks=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_behind_a_resume_are_those_of_a_loop_that_kept_torchs_generator(
    workers: int,
) -> None:
    torch.manual_seed(5)
    loader = MAKERS["shuffled"](workers)
    batches = iter(loader)
    next(batches)
    state, generator = loader.state_dict(), torch.get_rng_state()
    expected = [*batches, *loader, *loader]
    torch.manual_seed(99)
    again = MAKERS["shuffled"](workers)
    again.load_state_dict(state)
    torch.set_rng_state(generator)
    assert same(expected, [*again, *again, *again])


@pytest.mark.parametrize("persistent", [False, True])
def test_going_back_and_forth_in_one_loader(persistent: bool) -> None:
    loader = DataLoader(StatefulMap(10), shuffle=True, num_workers=2, persistent_workers=persistent)
    batches = iter(loader)
    start = loader.state_dict()
    expected = [next(batches) for _ in range(4)]
    middle = copy.deepcopy(loader.state_dict())
    loader.load_state_dict(middle)
    expected += list(loader)
    loader.load_state_dict(start)
    assert same(expected, list(loader))
    loader.close()


def test_persistent_workers_keep_their_datasets_over_epochs() -> None:
    def make() -> DataLoader:
        generator = torch.Generator().manual_seed(5)
        return DataLoader(
            StatefulMap(10), 3, num_workers=2, persistent_workers=True, generator=generator
        )

    first = make()
    list(first)
    state = json.loads(json.dumps(first.state_dict()))
    expected = list(first)
    second = make()
    second.load_state_dict(state)
    assert same(expected, list(second))
    first.close()
    second.close()


def test_the_state_is_there_after_a_loop_was_left() -> None:
    for name in ("remembering", "walked", "shuffled", "stream"):
        loader = MAKERS[name](0)
        seen: list[Any] = []
        for batch in loader:
            seen.append(batch)
            if len(seen) == 3:
                break
        state = loader.state_dict()
        again = MAKERS[name](0)
        again.load_state_dict(state)
        seen += list(again)
        assert sorted(i for b in seen for i in b.tolist()) == list(range(23))


def test_a_state_is_loaded_without_reading_again() -> None:
    dataset = Remembering([100])
    loader = DataLoader(dataset, 5)
    batches = iter(loader)
    for _ in range(12):
        next(batches)
    state = loader.state_dict()
    fresh = Remembering([100])
    again = DataLoader(fresh, 5)
    again.load_state_dict(state)
    assert next(iter(again)).tolist() == [60, 61, 62, 63, 64]
    assert fresh.read == 5


def test_map_datasets_resume_at_any_number_of_workers() -> None:
    loader = DataLoader(Noisy(20), 3, shuffle=True, seed=5, num_workers=2)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    rest = list(batches)
    again = DataLoader(Noisy(20), 3, shuffle=True, seed=5)
    again.load_state_dict(state)
    assert same(rest, list(again))


def test_streams_refuse_another_number_of_workers() -> None:
    state = MAKERS["stream"](2).state_dict()
    with pytest.raises(ResumeError, match="num_workers"):
        MAKERS["stream"](0).load_state_dict(state)


def test_two_loaders_side_by_side_do_not_touch_each_other() -> None:
    alone = list(MAKERS["seed"](0))
    one, other = iter(MAKERS["seed"](0)), iter(MAKERS["seed"](0))
    pairs = list(zip(one, other, strict=True))
    assert same(alone, [a for a, _ in pairs])
    assert same(alone, [b for _, b in pairs])


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"version": 1},
        {"version": 1, "kind": "native"},
        "state",
        None,
        {"kind": "torch", "version": 99},
    ],
)
def test_a_state_that_is_none(bad: Any) -> None:
    loader = MAKERS["shuffled"](0)
    before = loader.state_dict()
    with pytest.raises(ResumeError):
        loader.load_state_dict(bad)
    assert loader.state_dict() == before


def test_a_state_of_other_data_or_another_seed() -> None:
    state = MAKERS["seed"](0).state_dict()
    for other in (
        DataLoader(Noisy(24), 3, shuffle=True, seed=7),
        DataLoader(Noisy(23), 3, shuffle=True, seed=8),
        DataLoader(Noisy(23), 3, shuffle=True),
        DataLoader(Noisy(23), 3, shuffle=False, seed=7),
        DataLoader(Streams([23]), 3),
    ):
        with pytest.raises(ResumeError):
            other.load_state_dict(state)


def test_an_order_that_differs_is_named_by_the_argument_that_makes_it() -> None:
    seeded, torchs = DataLoader(Noisy(23), 3, seed=7), DataLoader(Noisy(23), 3)
    message = "saved with seed=7, but this loader has no seed="
    with pytest.raises(ResumeError, match=message):
        torchs.load_state_dict(seeded.state_dict())
    with pytest.raises(ResumeError, match="saved with no seed=, but this loader has seed=7"):
        seeded.load_state_dict(torchs.state_dict())


def test_damaged_marks_are_refused() -> None:
    stream = MAKERS["stream"](0).state_dict()
    for odd in ({"past": "soon"}, {"since": -1}, {"batches": "1"}):
        worker = {"batches": 0, "since": 0, "state": None, **odd}
        mark = {**stream["mark"], "workers": [worker]}
        with pytest.raises(ResumeError, match="damaged"):
            MAKERS["stream"](0).load_state_dict({**stream, "mark": mark})
    state = MAKERS["shuffled"](0).state_dict()
    for odd_mark in (None, {}, {**state["mark"], "batches": -1}, {**state["mark"], "more": 1}):
        with pytest.raises(ResumeError, match="damaged"):
            MAKERS["shuffled"](0).load_state_dict({**state, "mark": odd_mark})


# -- seed=: our order over ranks


def rank_ids(rank: int, size: int, *, samples: int = 29, **more: Any) -> list[list[int]]:
    options: dict[str, Any] = {"shuffle": True, "seed": 3, "drop_last": True, **more}
    loader = DataLoader(
        Squares(samples, "int"), world=World(rank, size), global_batch_size=8, **options
    )
    assert loader.batch_sampler is not None
    assert len(loader) == len(list(loader.batch_sampler))
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8])
def test_global_batches_are_the_same_at_every_world_size(size: int) -> None:
    alone = rank_ids(0, 1)
    ranks = [rank_ids(rank, size) for rank in range(size)]
    for step, batch in enumerate(alone):
        assert [i for rank in ranks for i in rank[step]] == batch


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8])
def test_evaluation_is_exactly_once(size: int) -> None:
    seen: list[int] = []
    steps = set()
    for rank in range(size):
        loader = DataLoader(
            Squares(29), world=World(rank, size), global_batch_size=8, pad="mask", seed=0
        )
        batches = list(loader)
        steps.add(len(batches))
        for _, y, valid in batches:
            assert len(y) == len(valid) == -(-8 // size)
            seen += y[valid].tolist()
    assert len(steps) == 1
    assert sorted(seen) == [i * i for i in range(29)]


def test_the_world_may_change_in_the_middle_of_an_epoch() -> None:
    whole = rank_ids(0, 1)
    one = DataLoader(
        Squares(29, "int"), world=World(0, 1), global_batch_size=8, shuffle=True, seed=3,
        drop_last=True,
    )  # fmt: skip
    next(iter(one))
    state = one.state_dict()
    rest = []
    for rank in range(4):
        loader = DataLoader(
            Squares(29, "int"), world=World(rank, 4), global_batch_size=8, shuffle=True, seed=3,
            drop_last=True,
        )  # fmt: skip
        loader.load_state_dict(state)
        rest.append([batch.tolist() for batch in loader])
    for step, batch in enumerate(whole[1:]):
        assert [i for rank in rest for i in rank[step]] == batch


def test_the_epoch_ends_with_its_last_sample_also_after_smaller_batches() -> None:
    options: dict[str, Any] = {"seed": 1, "shuffle": True}
    before = DataLoader(Squares(40, "int"), 1, **options)
    passing = iter(before)
    for _ in range(10):  # more batches than the later loader has in an epoch
        next(passing)
    after = DataLoader(Squares(40, "int"), 10, **options)
    after.load_state_dict(before.state_dict())
    assert [after.epoch for _ in after] == [0, 0, 1]


@pytest.mark.parametrize("workers", [0, 2])
def test_random_numbers_are_keyed_by_sample(workers: int) -> None:
    def draws(size: int, batch: int, epoch: int) -> dict[int, Any]:
        found: dict[int, Any] = {}
        for rank in range(size):
            loader = DataLoader(
                Noisy(24), batch, shuffle=True, seed=3, drop_last=True, world=World(rank, size),
                num_workers=workers,
            )  # fmt: skip
            loader.set_epoch(epoch)
            for index, *values in loader:
                found |= zip(
                    index.tolist(), zip(*(v.tolist() for v in values), strict=True), strict=True
                )
        return found

    reference = draws(1, 4, 0)
    assert len(set(reference.values())) == 24
    assert draws(2, 3, 0) == reference
    assert draws(1, 4, 1).keys() == reference.keys()
    assert not set(draws(1, 4, 1).values()) & set(reference.values())


def test_the_training_loops_own_random_numbers_are_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    list(DataLoader(Noisy(24), 4, shuffle=True, seed=3))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"seed": 1, "sampler": [1]}, "sampler= and seed="),
        ({"seed": 1, "batch_sampler": [[1]]}, "batch_sampler= and seed="),
        ({"seed": 1, "generator": torch.Generator()}, "generator= and seed="),
        ({"pad": "mask"}, "pad"),
        ({"order": Order(lanes=2)}, "lanes"),
        ({"global_batch_size": 4}, "global_batch_size"),
        ({"deterministic": True}, "deterministic"),
        ({"read": "pread"}, "read"),
        ({"seed": 1, "batch_size": 3, "global_batch_size": 6}, "global_batch_size"),
        ({"seed": 1, "world": World(0, 2)}, "drop_last"),
        ({"seed": 1, "drop_last": True, "pad": "mask"}, "drop_last"),
        ({"seed": 1, "drop_last": True, "batch_size": 100}, "no step"),
        ({"seed": 1, "order": Order(lanes=2), "shuffle": False}, "lanes"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_arguments_that_contradict_each_other(options: dict[str, Any], error: str) -> None:
    with pytest.raises((ConfigError, PlanError), match=error):
        DataLoader(Squares(9), **options)


def test_iterable_datasets_and_our_arguments() -> None:
    with pytest.raises(ConfigError, match="own order"):
        DataLoader(Streams([9]), pad="mask", seed=1)


def test_a_stream_that_ends_early_stops_its_rank_with_the_reason() -> None:
    loader = DataLoader(Sized([5], length=9), world=World(0, 2))
    with pytest.raises(ValueError, match="promises 9"):
        list(loader)


def test_closed() -> None:
    loader = DataLoader(Squares(9), num_workers=1)
    batches = iter(loader)
    next(batches)
    loader.close()
    loader.close()
    with pytest.raises(ClosedError):
        iter(loader)
    with pytest.raises(ClosedError), loader:
        pass


@pytest.mark.parametrize("workers", [0, 2])
def test_going_on_behind_an_error_counts_its_batch_as_gone(workers: int) -> None:
    loader = DataLoader(Failing(11, "int"), 2, seed=1, pad="mask", num_workers=workers)
    batches = iter(loader)
    seen = [next(batches), next(batches)]
    with pytest.raises(KeyError):
        next(batches)
    stopped = loader.state_dict()
    seen.append(next(batches))
    behind = loader.state_dict()
    seen += list(batches)
    assert [valid.tolist() for _, valid in seen] == [[True, True]] * 4 + [[True, False]]
    again = DataLoader(Failing(11, "int"), 2, seed=1, pad="mask", num_workers=workers)
    again.load_state_dict(behind)
    assert same(seen[3:], list(again))
    again.load_state_dict(stopped)  # the failed batch is read again
    with pytest.raises(KeyError):
        next(iter(again))


class _Witness:
    """Lists the live worker processes in its destructor."""

    alive: list[Any] | None = None

    def __init__(self) -> None:
        self.workers: set[Any] = set()

    def __del__(self) -> None:
        type(self).alive = [worker for worker in self.workers if worker.is_alive()]


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_end_before_the_destructors_of_a_cycle_that_dropped_their_loader(
    persistent: bool,
) -> None:
    """torch ends workers in a destructor, when it can't reach them any more, and waits 5 s for
    each."""

    def leave_a_cycle() -> set[Any]:
        before, witness = set(multiprocessing.active_children()), _Witness()
        loader = DataLoader(Squares(11), num_workers=2, persistent_workers=persistent, seed=1)
        witness.cycle = (witness, loader, iter(loader))  # type: ignore[attr-defined]
        witness.workers = set(multiprocessing.active_children()) - before
        return witness.workers

    gc.collect()
    gc.disable()
    try:
        started = leave_a_cycle()
        assert [worker.is_alive() for worker in started] == [True, True]
        _Witness.alive = None
        gc.collect()
    finally:
        gc.enable()
    assert _Witness.alive == []
    assert [worker.exitcode for worker in started] == [0, 0]


def test_batches_out_of_order_have_no_state() -> None:
    loader = DataLoader(Squares(9, "int"), num_workers=2, in_order=False)
    assert sorted(int(b) for b in loader) == list(range(9))
    with pytest.raises(ConfigError, match="in_order"):
        loader.state_dict()
    with pytest.raises(ConfigError, match="in_order"):
        DataLoader(Squares(9), num_workers=2, in_order=False, seed=1)


def test_statistics_count_samples() -> None:
    loader = DataLoader(Squares(9), 4)
    list(loader)
    assert loader.statistics().samples == 9
    assert loader.statistics().batches == 3
    assert loader.statistics().limit in ("dataset", "model")
    assert "num_workers" in loader.statistics().verdict or loader.statistics().limit == "model"


# -- another drop_last


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("batches", [1, 3])
def test_a_state_with_another_drop_last(seed: int | None, saved: bool, batches: int) -> None:
    """As with native datasets, the batches before an epoch's end stay, and a warning describes the
    end."""

    def make(*, drop_last: bool, samples: int = 14) -> DataLoader[Any]:
        return DataLoader(
            Squares(samples, "int"), 4, shuffle=seed is not None, seed=seed, drop_last=drop_last
        )

    first = make(drop_last=saved)
    whole = [batch.tolist() for batch in make(drop_last=False)]
    handed_out = iter(first)
    for _ in range(batches):
        next(handed_out)
    state = first.state_dict()
    second = make(drop_last=not saved)
    change = "ends with its last 2" if saved else "leaves out its last 2"
    with pytest.warns(PenstockWarning, match=change):
        second.load_state_dict(state)
    moved_on = batches == 3  # and one of the two has nothing left of the epoch
    assert second.epoch == (1 if moved_on else 0)
    rest = [batch.tolist() for batch in second]
    if not moved_on:
        assert rest == (whole if saved else whole[:3])[1:]
    else:
        assert len(rest) == (4 if saved else 3)
    with warnings.catch_warnings():  # every batch is whole: nothing changes
        warnings.simplefilter("error")
        even = make(drop_last=saved, samples=12)
        next(iter(even))
        make(drop_last=not saved, samples=12).load_state_dict(even.state_dict())
