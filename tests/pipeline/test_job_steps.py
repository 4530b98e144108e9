"""Growing batches, numbered steps and skipping, exact over worlds and resumes."""

from __future__ import annotations

import json
import warnings
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from penstock import DataLoader, Order, World
from penstock.augment import imagenet_eval
from penstock.cache import ConfigError, PenstockWarning, PlanError
from tests.sources import Values
from tests.torch_datasets import Squares

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# 100 samples; the batch changes in the first epoch, in the second, and as the fourth begins.
SOURCE = Values([11, 0, 23, 7, 19, 1, 20, 19])
SCHEDULE = {0: 8, 37: 12, 150: 20, 300: 6}
WORLDS = (1, 2, 5)

pytestmark = pytest.mark.filterwarnings("ignore:A global batch of")


def made(world: World | None = None, **options: Any) -> DataLoader:
    options = {"shuffle": True, "seed": 3, "drop_last": True, "order": Order(lanes=2), **options}
    if "batch_size" not in options:
        options = {"global_batch_size": SCHEDULE, **options}
    return DataLoader(SOURCE, world=world or World(0, 1), **options)


def endless(loader: DataLoader) -> Iterator[list[int]]:
    """Yield the ids of batch after batch, over the epochs."""
    while True:
        for batch in loader:
            yield batch[-1].tolist()


def some_steps(count: int, *, size: int = 1, state: Any = None, **options: Any) -> list[list[int]]:
    """Return global batches from a state on, joined from all ranks of a world."""
    steps: list[list[int]] = [[] for _ in range(count)]
    for rank in range(size):
        with made(World(rank, size), **options) as loader:
            if state is not None:
                loader.load_state_dict(state)
            for step, ids in zip(steps, islice(endless(loader), count), strict=True):
                step += ids
    return steps


@pytest.fixture(scope="module")
def uninterrupted() -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Return the global batches of five epochs, the state before each, and the state behind the
    last."""
    steps, states = [], []
    with made() as loader:
        states.append(json.loads(json.dumps(loader.state_dict())))
        for ids in endless(loader):
            steps.append(ids)
            states.append(json.loads(json.dumps(loader.state_dict())))
            if loader.epoch == 5:
                return steps, states
    raise AssertionError


def test_sizes_follow_the_schedule(uninterrupted: Any) -> None:
    steps, states = uninterrupted
    at = 0
    for ids, state in zip(steps, states, strict=False):
        at = 100 * state["epoch"] + state["position"]
        assert len(ids) == [size for first, size in SCHEDULE.items() if first <= at][-1]
    for epoch in range(5):
        those = [i for i, s in zip(steps, states, strict=False) if s["epoch"] == epoch]
        assert len(set(chain(*those))) == sum(map(len, those)) > 100 - 20
    assert [state["step"] for state in states] == list(range(len(states)))
    assert states[-1]["batches"] == [list(entry) for entry in SCHEDULE.items()]
    assert len(json.dumps(states[-1])) < 1000


def test_a_resume_at_every_step_continues_alike_at_other_worlds(uninterrupted: Any) -> None:
    steps, states = uninterrupted
    for number in range(len(steps)):
        size = WORLDS[number % len(WORLDS)]
        # A loader without a batch of its own takes the state's; one with the same schedule, too.
        options = {} if number % 2 else {"batch_size": 1}
        count = min(7, len(steps) - number)
        found = some_steps(count, size=size, state=states[number], **options)
        assert found == steps[number : number + count]


def test_len_is_that_of_the_current_epoch(uninterrupted: Any) -> None:
    _, states = uninterrupted
    with made() as loader:
        for epoch in range(5):
            loader.set_epoch(epoch)
            wanted = sum(state["epoch"] == epoch for state in states[:-1])
            assert len(loader) == len(loader.batch_sampler) == wanted
            assert loader.step == next(s["step"] for s in states if s["epoch"] == epoch)
            assert len(loader.sampler) == sum(map(len, loader.batch_sampler))


def test_batch_size_is_this_ranks_as_a_pass_begins() -> None:
    with made(World(0, 5)) as loader:
        assert loader.batch_size == 2
        loader.set_epoch(2)
        next(iter(loader))
        assert loader.batch_size == 4


def test_samples_of_any_step(uninterrupted: Any) -> None:
    steps, _ = uninterrupted
    for size in WORLDS:
        with made(World(size - 1, size)) as loader:
            for number in [*range(0, len(steps), 3), len(steps) - 1, 0]:
                ids = loader.samples_of(number)
                assert ids.dtype == np.int64
                assert ids.tolist() == steps[number]
                parts = [loader.samples_of(number, rank=rank).tolist() for rank in range(size)]
                assert [*chain(*parts)] == steps[number]
                assert max(map(len, parts)) - min(map(len, parts)) <= 1
            assert loader.step == 0
            assert len(loader.samples_of(10**12)) == 6


def test_samples_that_do_not_exist() -> None:
    with made() as loader:
        for step in (-1, 1.5, "3", None, True):
            with pytest.raises(ConfigError, match="step must be an integer of at least 0, got"):
                loader.samples_of(step)
        with pytest.raises(PlanError, match=r"rank: got 1, wanted one within \[0, 1\)"):
            loader.samples_of(0, rank=1)
        for steps in (-1, 2.0, "3", None):
            with pytest.raises(ConfigError, match="steps must be an integer of at least 0, got"):
                loader.skip(steps)


def test_another_batch_joins_the_history_and_older_steps_stay(uninterrupted: Any) -> None:
    steps, states = uninterrupted
    wanted = steps[:13]
    state = states[13]
    for size, batch in ((1, 10), (2, 16), (1, 9)):
        with made(World(0, size), global_batch_size=batch) as loader:
            with pytest.warns(PenstockWarning, match="The global batch goes from"):
                loader.load_state_dict(state)
            before = len(wanted)
            assert loader.step == before
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PenstockWarning)
            wanted += some_steps(9, size=size, state=state, global_batch_size=batch)
        with made(World(0, 1), batch_size=1) as loader:  # the state's batches apply
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PenstockWarning)
                with made(World(0, 1), global_batch_size=batch) as other:
                    other.load_state_dict(state)
                    for _ in islice(endless(other), 9):
                        pass
                    state = json.loads(json.dumps(other.state_dict()))
            loader.load_state_dict(state)
            assert loader.step == len(wanted) == state["step"]
            assert [loader.samples_of(n).tolist() for n in range(len(wanted))] == wanted
    assert all(len(step) == 8 for step in wanted[:5])
    assert [size for _, size in state["batches"]][-3:] == [10, 16, 9]


def test_a_resume_with_another_schedule_keeps_the_past_and_plans_again(uninterrupted: Any) -> None:
    _, states = uninterrupted
    state = next(s for s in states if s["epoch"] == 1 and s["position"] > 60)
    at = 100 + state["position"]
    with made(global_batch_size={0: 99, 120: 25, 400: 50}) as loader:
        with pytest.warns(PenstockWarning, match="goes from 20 to 25"):
            loader.load_state_dict(state)
        assert loader.state_dict()["batches"] == [[0, 8], [37, 12], [150, 20], [at, 25], [400, 50]]
    later = {**SCHEDULE, 350: 10}
    with made(global_batch_size=later) as loader:
        with pytest.warns(
            PenstockWarning, match=r"will change at other samples.*\{0: 20, 300: 6\}"
        ):
            loader.load_state_dict(state)
        assert loader.state_dict()["batches"] == [list(entry) for entry in later.items()]


def test_history_is_bounded_and_states_what_it_forgot() -> None:
    with made(global_batch_size=7) as loader:
        state = loader.state_dict()
    for number in range(400):
        with made(global_batch_size=3 + number % 3) as loader:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PenstockWarning)
                loader.load_state_dict(state)
            next(iter(loader))
            state = json.loads(json.dumps(loader.state_dict()))
    assert state["step"] == 400
    assert len(state["batches"]) <= 160
    assert len(json.dumps(state)) < 5000
    with made(batch_size=1) as loader:
        loader.load_state_dict(state)
        assert loader.step == 400
        assert [len(loader.samples_of(n)) for n in (399, 398, 397)] == [3, 5, 4]
        with pytest.raises(PlanError, match=r"step: got 3, wanted \d+ or later"):
            loader.samples_of(3)


def test_an_epoch_that_restarts_is_cut_by_this_loaders_schedule(uninterrupted: Any) -> None:
    _, states = uninterrupted
    state = next(s for s in states if s["epoch"] == 1 and 20 < s["position"] < 50)
    with made(global_batch_size=30) as loader:
        with pytest.warns(PenstockWarning, match="goes from 12 to 30"):
            loader.load_state_dict(state)
        assert [len(batch[-1]) for batch in islice(loader, 1)] == [30]
        # The epoch began with another loader's batches; from its start, this loader's apply.
        assert [len(batch[-1]) for batch in loader] == [30, 30, 30]
        assert loader.step == 10 + 3
        loader.set_epoch(0)
        assert [len(batch[-1]) for batch in loader] == [30, 30, 30]
        assert loader.step == 3


def test_another_end_of_epochs_counts_on_and_forgets_what_was_before() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PenstockWarning)
        with made(drop_last=False) as loader:
            *_, last = loader  # 8 x 5, 12 x 5: nothing is left
            assert (loader.epoch, loader.step, len(last[-1])) == (1, 10, 12)
            for _ in islice(loader, 2):
                pass
            state = loader.state_dict()
        with made(drop_last=True) as loader:
            loader.load_state_dict(state)
            assert loader.step == 12
            ahead = [ids.tolist() for *_, ids in islice(loader, 3)]
            assert [loader.samples_of(number).tolist() for number in (12, 13, 14)] == ahead
            with pytest.raises(PlanError, match="step: got 11, wanted 12 or later"):
                loader.samples_of(11)
            again = json.loads(json.dumps(loader.state_dict()))
            assert again["first_step"] == 12
            loader.load_state_dict(again)
            assert loader.step == 15
            loader.set_epoch(0)  # before the rest of the schedule
            assert (loader.step, loader.state_dict()["step"]) == (0, 0)


def test_a_state_that_comes_before_the_world_is_given_back(
    monkeypatch: pytest.MonkeyPatch, uninterrupted: Any
) -> None:
    steps, states = uninterrupted
    options = {"global_batch_size": SCHEDULE, "shuffle": True, "seed": 3, "drop_last": True}
    monkeypatch.setenv("WORLD_SIZE", "2")
    with DataLoader(SOURCE, **options) as loader:
        loader.load_state_dict(states[14])
        assert loader.state_dict() == states[14]
        loader.set_epoch(2)
        there = next(state for state in states if state["epoch"] == 2)
        assert loader.state_dict() == there
        loader.load_state_dict(states[14])
        for ask in (lambda: loader.step, lambda: loader.samples_of(3), lambda: loader.skip(1)):
            with pytest.raises(PlanError, match="world isn't known yet"):
                ask()
        monkeypatch.setenv("RANK", "1")
        assert next(iter(loader))[-1].tolist() == loader.samples_of(14, rank=1).tolist()
        assert loader.samples_of(14).tolist() == steps[14]
        assert loader.step == 15


class TestSkip:
    def test_all_ranks_continue_later(self, uninterrupted: Any) -> None:
        steps, _ = uninterrupted
        for size in WORLDS:
            found: list[list[int]] = [[] for _ in range(4)]
            for rank in range(size):
                with made(World(rank, size)) as loader:
                    ours = endless(loader)
                    next(ours)
                    loader.skip(19)
                    assert loader.step == loader.state_dict()["step"] == 20
                    for step, ids in zip(found, ours, strict=False):
                        step += ids
            assert found == steps[20:24]

    def test_a_running_iterator_continues_in_its_epoch_and_ends_with_it(
        self, uninterrupted: Any
    ) -> None:
        steps, states = uninterrupted
        with made() as loader:
            running = iter(loader)
            assert next(running)[-1].tolist() == steps[0]
            loader.skip(3)
            assert next(running)[-1].tolist() == steps[4]
            loader.skip(0)
            assert next(running)[-1].tolist() == steps[5]
            loader.skip(len(loader))
            assert next(running, None) is None
            assert loader.epoch == 1
            assert loader.state_dict() == {**states[loader.step]}
            assert next(iter(loader))[-1].tolist() == steps[loader.step - 1]

    def test_a_state_behind_a_skip_continues_there(self, uninterrupted: Any) -> None:
        steps, _ = uninterrupted
        with made() as loader:
            loader.skip(17)
            state = loader.state_dict()
        assert some_steps(3, size=2, state=state) == steps[17:20]

    def test_many_epochs_cost_nothing(self) -> None:
        with made() as loader:
            loader.skip(10**12)
            assert loader.step == 10**12
            assert len(next(iter(loader))[-1]) == 6


@pytest.mark.parametrize("steps", [(0, 3, 2), (0, 12, 25), (4, 9, 3)])
def test_ranks_that_come_and_go_keep_the_growing_batches(
    steps: tuple[int, ...], uninterrupted: Any
) -> None:
    wanted, _ = uninterrupted
    ranks = [made(World(rank, 5)) for rank in range(5)]
    for size, step in zip((5, 2, 3), steps, strict=True):
        found: list[list[int]] = [[] for _ in range(4)]
        for rank, loader in enumerate(ranks[:size]):
            loader.rejoin(World(rank, size), step=step)
            for batch, ids in zip(found, endless(loader), strict=False):
                batch += ids
        assert found == wanted[step : step + 4]
        assert [loader.samples_of(step).tolist() for loader in ranks[:size]] == [found[0]] * size
    for loader in ranks:
        loader.close()


def test_padded_batches_are_filled_up_to_their_steps_size() -> None:
    sizes = []
    for rank in range(3):
        options = {"drop_last": False, "pad": "mask", "shuffle": False, "order": Order()}
        with made(World(rank, 3), **options) as loader:
            count = len(loader)
            sizes.append([len(batch[-1]) for batch in loader])
            assert len(sizes[-1]) == count
    assert sizes[0] == sizes[1] == sizes[2] == [3, 3, 3, 3, 3, 4, 4, 4, 4, 4]


@pytest.mark.parametrize("resident", [False, True])
def test_images_have_room_for_the_largest_batch(pack: Path, resident: bool) -> None:
    from penstock.readers import Dataset

    recipe = imagenet_eval(16, resize=40)
    with Dataset(str(pack), fields=("image", "id")) as data:
        with DataLoader(data, batch_size=len(data), augment=recipe) as loader:
            ((all_, _),) = loader
        with DataLoader(
            data, global_batch_size={0: 4, 8: 32}, augment=recipe, resident=resident
        ) as loader:
            for images, ids in islice(loader, 4):
                assert torch.equal(images, all_[ids])
            assert loader.step == 4
            assert len(ids) == 32


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "got 0 sizes .* wanted 1 to 128"),
        ({number: 8 + number for number in range(200)}, "got 200 sizes"),
        ({5: 8}, r"from the samples \[5\] on, wanted .* from 0 on"),
        ({0: 8, 90: 10, 50: 12}, r"from the samples \[0, 90, 50\] on, wanted .* in ascending"),
        ({0: 8, -5: 10}, "integer of at least 0, got -5"),
        ({0: 8, 1.5: 10}, "integer of at least 0, got 1.5"),
        ({"0": 8}, "integer of at least 0, got '0'"),
        ({0: 0}, r"global_batch_size\[0\] must be an integer of at least 1, got 0"),
        ({0: 8, 10: 2.5}, r"global_batch_size\[10\] must be"),
        ({0: 8, 10: True}, r"global_batch_size\[10\] must be"),
        ([8, 10], "global_batch_size must be an integer"),
    ],
)
def test_schedules_that_go_backwards_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(global_batch_size=given)


def test_schedules_that_cannot_be_are_refused() -> None:
    with pytest.raises(PlanError, match="smaller than the world of 4 ranks"):
        made(World(0, 4), global_batch_size={0: 8, 100: 3})
    with pytest.raises(PlanError, match="One global batch of 101 samples is more than the 100"):
        made(global_batch_size={0: 8, 1000: 101})
    with pytest.raises(ConfigError, match="Pass one of them"):
        made(batch_size=4, global_batch_size={0: 8})
    with pytest.raises(ConfigError, match="Got batch_tokens= and global_batch_size="):
        made(batch_tokens=8)


def test_torch_datasets_refuse_by_name() -> None:
    with pytest.raises(ConfigError, match="global_batch_size= by samples works on native"):
        DataLoader(Squares(29), global_batch_size={0: 8}, seed=1)
    with DataLoader(Squares(29), batch_size=8, seed=1) as loader:
        for use in (lambda: loader.step, lambda: loader.samples_of(1), lambda: loader.skip(1)):
            with pytest.raises(ConfigError, match="works on native datasets"):
                use()
