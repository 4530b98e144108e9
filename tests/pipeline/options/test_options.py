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
    LoaderSeed,
    NativeOptions,
    Order,
    PenstockOptions,
    TorchOptions,
    WorkerOptions,
    World,
    batch_schedule,
    check_shuffles,
    shuffle_settings,
)
from penstock.pipeline.plan import BatchSchedule, LoaderState, PlanSettings
from penstock.pipeline.torch_data import check_unplanned, planned_batch_size
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


def names(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)]


def native(
    own: PenstockOptions | None = None,
    *,
    world: World = ONE,
    seed: LoaderSeed | None = None,
    **options: Any,
) -> NativeOptions:
    own = own or PenstockOptions()
    return NativeOptions.of(
        TorchOptions(**options),
        own,
        seed=seed or LoaderSeed(given=own.seed, drawn=5),
        world=world,
        agrees=True,
        device=CPU,
    )


def test_every_argument_of_the_loader_is_in_one_value() -> None:
    given = set(inspect.signature(DataLoader.__init__).parameters)
    values = [*names(TorchOptions), *names(PenstockOptions)]
    assert len(values) == len(set(values))
    apart = {"self", "dataset", "world", "data_parallel", "snapshot_every_n_steps"}
    assert set(values) == given - apart


def test_torchs_arguments_are_torchs() -> None:
    """They have torch's defaults."""
    torchs = inspect.signature(torch.utils.data.DataLoader.__init__).parameters
    ours = {field.name: field.default for field in fields(TorchOptions)}
    assert set(ours) == set(torchs) - {"self", "dataset"}
    for name, value in TorchOptions().arguments().items():
        if name != "pin_memory_device":
            assert value == torchs[name].default, name


def test_values_are_frozen() -> None:
    for value in (TorchOptions(), Order(), PenstockOptions(), native()):
        with pytest.raises(FrozenInstanceError):
            setattr(value, names(type(value))[0], 1)


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
def test_what_fits_no_dataset(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PenstockOptions(**wrong)


def test_a_state_has_to_equal_what_the_user_passed() -> None:
    assert shuffle_settings(Order(slots="rank")) == {}
    order = Order(lanes=2, window=3, reshuffle=1)
    assert shuffle_settings(order) == {"lanes": 2, "window": 3, "reshuffle": 1.0}
    assert native(shuffle=True).wanted() == {"shuffle": True}
    assert native(PenstockOptions(seed=0, order=Order(lanes=2)), shuffle=True).wanted() == {
        "shuffle": True,
        "seed": 0,
        "lanes": 2,
    }
    check_shuffles(order, shuffle=True)
    check_shuffles(Order(slots="rank"), shuffle=False)
    with pytest.raises(ConfigError, match="lanes=2 has no meaning with shuffle=False"):
        check_shuffles(order, shuffle=False)


def test_orders_of_torch_take_nothing_of_a_plan() -> None:
    check_unplanned(PenstockOptions(), is_map=True)
    for own in (
        PenstockOptions(order=Order(window=2)),
        PenstockOptions(pad="mask"),
        PenstockOptions(global_batch_size=4),
    ):
        with pytest.raises(ConfigError, match=r"Pass seed= as well"):
            check_unplanned(own, is_map=True)
        with pytest.raises(ConfigError, match="An iterable dataset brings its own order"):
            check_unplanned(own, is_map=False)


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
    TorchOptions().check_planned()
    with pytest.raises(ConfigError, match=f"{next(iter(given))}.*contradict"):
        TorchOptions(**given).check_planned()


def test_native_options_follow_the_world() -> None:
    own = PenstockOptions(seed=4, global_batch_size=7)
    one, second = (
        native(own, world=world, shuffle=True, drop_last=True) for world in (ONE, SECOND_OF_TWO)
    )
    assert (one.sizes.per_rank, second.sizes.per_rank) == (7, 4)
    assert one.sizes.global_batch == second.sizes.global_batch == 7
    assert (one.seed, one.depth, one.batch_is_default) == (4, 2, False)
    assert native(num_workers=3, prefetch_factor=5, timeout=2).depth == 5
    assert native().batch_is_default


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": [1]}, "sampler=.*can't be used with a native dataset"),
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
        native(PenstockOptions(global_batch_size=1), world=SECOND_OF_TWO, drop_last=True)


def test_a_state_brings_its_seed_and_an_omitted_batch() -> None:
    resumed = native(world=SECOND_OF_TWO, drop_last=True).resumed(STATE)
    assert (resumed.seed, resumed.sizes.global_batch, resumed.sizes.per_rank) == (9, 20, 10)
    with pytest.warns(PenstockWarning, match="goes from 20 to 6 samples"):
        other = native(world=SECOND_OF_TWO, batch_size=3, drop_last=True).resumed(STATE)
    assert (other.seed, other.sizes.global_batch) == (9, 6)
    with pytest.warns(PenstockWarning, match="ends with a batch of 3 samples"):
        native().resumed(STATE)


def test_a_seed_that_was_drawn_orders_samples_of_one_rank_only() -> None:
    def choose(given: int | None, *, draws: bool) -> LoaderSeed:
        generator = torch.Generator().manual_seed(1)
        return LoaderSeed.choose(given, generator, draws=draws)

    drawn = choose(None, draws=True)
    assert drawn == choose(None, draws=True)
    assert drawn.in_world(ONE, draws=True) == drawn.drawn
    assert drawn.in_world(SECOND_OF_TWO, draws=False) == 0
    assert choose(3, draws=True).in_world(SECOND_OF_TWO, draws=True) == 3
    with pytest.raises(ConfigError, match="on 2 ranks needs seed="):
        drawn.in_world(SECOND_OF_TWO, draws=True)


def test_a_planned_batch_is_shared_out() -> None:
    options = TorchOptions(batch_size=1, drop_last=True)
    own = PenstockOptions(global_batch_size=7)
    assert planned_batch_size(options, own, SECOND_OF_TWO) == 4
    assert planned_batch_size(replace(options, batch_size=None), PenstockOptions(), ONE) is None
    with pytest.raises(ConfigError, match="allows no global_batch_size="):
        planned_batch_size(replace(options, batch_size=None), own, ONE)


def test_without_workers_torch_is_asked_for_none() -> None:
    options = TorchOptions(prefetch_factor=3, persistent_workers=True, timeout=4)
    without = WorkerOptions.of(options)
    assert (without.prefetch_factor, without.persistent_workers, without.timeout) == (
        None,
        False,
        4,
    )
    workers = WorkerOptions.of(replace(options, num_workers=1))
    assert (workers.prefetch_factor, workers.persistent_workers) == (3, True)
    torch.utils.data.DataLoader(Squares(1), **without.arguments())


def test_no_count_is_more_than_a_state_can_hold() -> None:
    assert batch_schedule({0: 1, 2**53 - 1: 2**53 - 1}).largest == 2**53 - 1
    for given in (2**53, {0: 2**53}, {0: 1, 2**53: 2}):
        with pytest.raises(ConfigError, match=r"at most 2\^53 - 1"):
            batch_schedule(given)
