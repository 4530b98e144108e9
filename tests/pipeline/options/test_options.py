"""Test the argument values of a loader: each checks itself, without a loader."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import torch
import torch.utils.data

from penstock.cache import ConfigError, PenstockWarning, PlanError
from penstock.pipeline import (
    DataLoader,
    LateWorld,
    LoaderOptions,
    Order,
    World,
    batch_schedule,
    check_shuffles,
    shuffle_settings,
)
from penstock.pipeline.plan import BatchSchedule, LoaderState, PlanSettings
from tests.torch_datasets import Squares

CPU = torch.device("cpu")
ONE, SECOND_OF_TWO = World(0, 1), World(1, 2)
STATE = LoaderState(
    dataset="d" * 64,
    fingerprint="f" * 64,
    samples=103,
    plan=PlanSettings(seed=9, shuffle=True, lanes=1, window=1, reshuffle=0.0),
    epoch=1,
    position=20,
    step=6,
    schedule=BatchSchedule.constant(20),
    drop_last=True,
)


# What follows from the others and from the world.
RESOLVED = {"kind", "drawn_seed", "agrees", "schedule", "plan_seed"}


def options_of(kind: Any, **arguments: Any) -> LoaderOptions:
    return LoaderOptions(kind=kind, device=CPU, **arguments)


def native(*, world: World = ONE, **arguments: Any) -> LoaderOptions:
    options = options_of("native", **arguments).with_drawn_seed()
    return options.at(world, device=CPU, agrees=True)


def test_every_argument_of_the_loader_is_in_one_value() -> None:
    given = set(inspect.signature(DataLoader.__init__).parameters)
    # The weights belong to the source.
    apart = {"self", "dataset", "weights", "data_parallel", "snapshot_every_n_steps"}
    assert {field.name for field in fields(LoaderOptions)} - RESOLVED == given - apart


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_torchs_arguments_are_torchs(kind: Any) -> None:
    """They have torch's defaults."""
    torchs = inspect.signature(torch.utils.data.DataLoader.__init__).parameters
    ours = options_of(kind).torch_arguments()
    assert set(ours) == set(torchs) - {"self", "dataset"}
    for name, value in ours.items():
        if name != "pin_memory_device":
            assert value == torchs[name].default, name


def test_values_are_frozen() -> None:
    for value, name in ((Order(), "lanes"), (native(), "seed")):
        with pytest.raises(FrozenInstanceError):
            setattr(value, name, 1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lanes": 0}, "lanes must be an integer of at least 1, got 0"),
        ({"window": 1.5}, "window must be an integer"),
        ({"reshuffle": 2}, "reshuffle must be a share between 0 and 1, got 2"),
        ({"slots": "node"}, "slots must be 'data' or 'rank', got 'node'"),
    ],
)
def test_an_order_that_can_not_be(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Order(**wrong)


@pytest.mark.parametrize("kind", ["native", "map", "stream"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seed": "x"}, "seed must be an integer, got 'x'"),
        ({"seed": True}, "seed must be an integer"),
        ({"order": {"lanes": 8}}, r"order must be an Order, .* got \{'lanes': 8\}"),
        ({"pad": "zeros"}, "pad must be None or 'mask', got 'zeros'"),
        ({"read": "magic"}, "read must be .*'copy'.*got 'magic'"),
        ({"resident": 1}, "resident must be True, False or 'auto', got 1"),
        ({"max_bad": 1.5}, "max_bad must be a share between 0 and 1"),
    ],
)
def test_what_fits_no_dataset(kind: Any, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options_of(kind, **wrong)


def test_a_state_has_to_equal_what_the_user_passed() -> None:
    assert shuffle_settings(Order(slots="rank")) == {}
    order = Order(lanes=2, window=3, reshuffle=1)
    assert shuffle_settings(order) == {"lanes": 2, "window": 3, "reshuffle": 1.0}
    assert native(shuffle=True).wanted() == {"shuffle": True}
    assert native(seed=0, order=Order(lanes=2), shuffle=True).wanted() == {
        "shuffle": True,
        "seed": 0,
        "lanes": 2,
    }
    check_shuffles(order, shuffle=True)
    check_shuffles(Order(slots="rank"), shuffle=False)
    with pytest.raises(ConfigError, match="lanes=2 has no meaning with shuffle=False"):
        check_shuffles(order, shuffle=False)


def test_orders_of_torch_take_nothing_of_a_plan() -> None:
    given: dict[str, Any]
    for given in ({"order": Order(window=2)}, {"pad": "mask"}, {"global_batch_size": 4}):
        with pytest.raises(ConfigError, match=r"Pass seed= as well"):
            options_of("map", **given)
        with pytest.raises(ConfigError, match="An iterable dataset brings its own order"):
            options_of("stream", **given)
        assert options_of("map", seed=1, **given).is_planned


@pytest.mark.parametrize(
    "given",
    [
        {"sampler": [1]},
        {"batch_sampler": [[1]]},
        {"generator": torch.Generator()},
        {"in_order": False},
    ],
)
def test_a_plan_takes_no_other_order(given: dict[str, Any]) -> None:
    options_of("map", **given)
    with pytest.raises(ConfigError, match=f"{next(iter(given))}.*contradict"):
        options_of("map", seed=1, **given)


def test_native_options_follow_the_world() -> None:
    one, second = (
        native(seed=4, global_batch_size=7, world=world, shuffle=True, drop_last=True)
        for world in (ONE, SECOND_OF_TWO)
    )
    assert (one.per_rank, second.per_rank) == (7, 4)
    assert one.schedule.size == second.schedule.size == 7
    assert (one.plan_seed, one.depth, one.batch_is_default) == (4, 2, False)
    assert native(num_workers=3, prefetch_factor=5, timeout=2).depth == 5
    assert native().batch_is_default


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_sampler": [[1]]}, "batch_sampler=.*can't be used with a native"),
        ({"num_workers": -1}, "num_workers must be an integer of at least 0"),
        ({"timeout": "soon"}, "timeout must be seconds"),
        ({"batch_size": None}, "DALI decodes batches"),
    ],
)
def test_what_no_native_dataset_takes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        native(**options)


def test_several_ranks_need_an_end_and_a_seed() -> None:
    with pytest.raises(ConfigError, match="With 2 ranks the end of an epoch"):
        native(world=SECOND_OF_TWO)
    with pytest.raises(ConfigError, match="needs seed="):
        native(world=SECOND_OF_TWO, shuffle=True, drop_last=True)
    with pytest.raises(PlanError, match="smaller than the world of 2"):
        native(global_batch_size=1, world=SECOND_OF_TWO, drop_last=True)


def test_a_state_brings_its_seed_and_an_omitted_batch() -> None:
    resumed = native(world=SECOND_OF_TWO, drop_last=True).resumed(STATE)
    assert (resumed.plan_seed, resumed.schedule.size, resumed.per_rank) == (9, 20, 10)
    with pytest.warns(PenstockWarning, match="goes from 20 to 6 samples"):
        other = native(world=SECOND_OF_TWO, batch_size=3, drop_last=True).resumed(STATE)
    assert (other.plan_seed, other.schedule.size) == (9, 6)
    with pytest.warns(PenstockWarning, match="ends with its last 3 samples"):
        native().resumed(STATE)


def test_a_seed_that_was_drawn_orders_samples_of_one_rank_only() -> None:
    def drawn(**arguments: Any) -> LoaderOptions:
        generator = torch.Generator().manual_seed(1)
        return options_of("native", generator=generator, drop_last=True, **arguments)

    first, second = (drawn(shuffle=True).with_drawn_seed() for _ in range(2))
    assert first.drawn_seed == second.drawn_seed == first.at(ONE, device=CPU).plan_seed
    assert first.drawn_seed != drawn(shuffle=True, seed=3).with_drawn_seed().drawn_seed is None
    assert drawn().with_drawn_seed().at(SECOND_OF_TWO, device=CPU).plan_seed == 0
    assert drawn(shuffle=True, seed=3).at(SECOND_OF_TWO, device=CPU).plan_seed == 3
    with pytest.raises(ConfigError, match="on 2 ranks needs seed="):
        first.at(SECOND_OF_TWO, device=CPU)


def test_a_planned_batch_is_shared_out() -> None:
    def planned(world: World, **arguments: Any) -> LoaderOptions:
        options = options_of("map", seed=1, drop_last=world.size > 1, **arguments)
        return options.at(world, device=CPU)

    assert planned(SECOND_OF_TWO, global_batch_size=7).rank_batch == 4
    assert planned(SECOND_OF_TWO, batch_size=7).rank_batch == 7
    single = planned(ONE, batch_size=None)
    assert (single.rank_batch, single.is_batched) == (None, False)
    with pytest.raises(ConfigError, match="allows no global_batch_size="):
        planned(ONE, batch_size=None, global_batch_size=7)


def test_torchs_batch_stays_in_any_world() -> None:
    options = options_of("map", batch_size=5).at(SECOND_OF_TWO, device=CPU)
    assert (options.rank_batch, options.is_batched) == (5, True)
    sampled = options_of("map", batch_sampler=[[1]])
    assert (sampled.rank_batch, sampled.is_batched) == (None, True)


def test_without_workers_torch_is_asked_for_none() -> None:
    options = options_of("map", prefetch_factor=3, persistent_workers=True, timeout=4)
    without = options.worker_arguments()
    assert without["prefetch_factor"] is None
    assert (without["persistent_workers"], without["timeout"]) == (False, 4)
    workers = replace(options, num_workers=1)
    assert workers.worker_arguments()["prefetch_factor"] == 3
    assert (options.keeps_workers, workers.keeps_workers) == (False, True)
    torch.utils.data.DataLoader(Squares(1), **without)


def test_a_rank_that_rejoins_keeps_its_device_and_its_place() -> None:
    late = LateWorld(World(0, 4, local_rank=1, local_size=2))
    moved = late.rejoined(World(2, 3))
    assert moved.world == World(2, 3, local_rank=1, local_size=2)
    assert moved.device == late.device


def test_no_count_is_more_than_a_state_can_hold() -> None:
    assert batch_schedule({0: 1, 2**53 - 1: 2**53 - 1}).largest == 2**53 - 1
    for given in (2**53, {0: 2**53}, {0: 1, 2**53: 2}):
        with pytest.raises(ConfigError, match=r"at most 2\^53 - 1"):
            batch_schedule(given)
