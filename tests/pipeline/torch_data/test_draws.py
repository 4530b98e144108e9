"""Samplers that draw from the process's own generators: the same as torch, and resumed exactly."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.utils.data

from penstock.cache import ConfigError, ResumeError
from penstock.pipeline import DataLoader
from tests.torch_datasets import Squares

if TYPE_CHECKING:
    from collections.abc import Iterator

Torch = torch.utils.data.DataLoader
SAMPLES = 23


class Python(torch.utils.data.Sampler[int]):
    """Shuffles with python's generator at the first index."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        indices = list(range(SAMPLES))
        random.shuffle(indices)
        yield from indices


class Eager(Python):
    """Shuffles in iter(), before the first index."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(SAMPLES).tolist())


class Lazy(Python):
    """Draws each index when it is needed, from python's generator and from numpy's."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield (random.randrange(SAMPLES) + int(np.random.randint(SAMPLES))) % SAMPLES


class LazyTorch(Python):
    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield int(torch.randint(SAMPLES, ()))


class Derived(torch.utils.data.DistributedSampler[int]):
    """A sampler of one rank that weighs its samples by numpy's generator."""

    def __init__(self) -> None:
        super().__init__(Squares(SAMPLES), num_replicas=1, rank=0)

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.randint(0, SAMPLES, SAMPLES).tolist())


class Batches(Python):
    """A batch sampler that draws each batch's size."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[Any]:
        for number in range(8):
            yield list(range(number, number + random.randint(1, 4)))


KINDS: dict[str, dict[str, Any]] = {
    "python": {"batch_size": 3, "sampler": Python()},
    "eager": {"batch_size": 3, "sampler": Eager()},
    "lazy": {"batch_size": 3, "sampler": Lazy()},
    "lazy torch": {"batch_size": 3, "sampler": LazyTorch()},
    "derived": {"batch_size": 3, "sampler": Derived()},
    "one by one": {"batch_size": None, "sampler": Lazy()},
    "batches": {"batch_sampler": Batches()},
    "with a generator that isn't used": {
        "batch_size": 3,
        "sampler": Python(),
        "generator": torch.Generator(),
    },
}


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def batches(loader: Any) -> list[Any]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_same_order_as_torchs(kind: str, workers: int) -> None:
    found = []
    for make in (Torch, DataLoader):
        seed(3)
        loader: Any = make(Squares(SAMPLES, "int"), num_workers=workers, **KINDS[kind])
        found.append([batches(loader), batches(loader), random.random(), np.random.rand()])
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", list(KINDS))
def test_resumed_at_every_step(kind: str) -> None:
    options: dict[str, Any] = KINDS[kind]
    whole: list[Any] = []
    states = []
    seed(3)
    loader = DataLoader(Squares(SAMPLES, "int"), **options)
    for batch in loader:
        whole.append(batch.tolist() if isinstance(batch, torch.Tensor) else batch)
        states.append(json.dumps(loader.state_dict()))
    assert max(map(len, states)) < 10_000
    for step, state in enumerate(states[:-1], start=1):
        seed(99 + step)  # another process, with other generator states
        resumed = DataLoader(Squares(SAMPLES, "int"), **options)
        resumed.load_state_dict(json.loads(state))
        before = random.getstate(), str(np.random.get_state())
        assert batches(resumed) == whole[step:]
        assert before == (random.getstate(), str(np.random.get_state()))  # the training loop's


class Noisy(Squares):
    """Draws from all generators, an odd number of normal values from numpy's."""

    def __getitem__(self, index: int) -> Any:
        return torch.rand(1) + random.random() + np.random.standard_normal(3).sum()


@pytest.mark.parametrize("ahead", [0, 1], ids=["nothing ahead", "a normal value ahead"])
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_seeded_pass_in_the_main_process_leaves_the_loops_generators(
    ahead: int, in_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The state of numpy's generator is copied in memory, or through numpy's functions.
    module = "penstock.pipeline.torch_data.random_states"
    monkeypatch.setattr(f"{module}._is_in_memory", lambda: in_memory)
    seed(5)
    np.random.standard_normal(ahead)  # two are drawn at once
    expected = [random.random(), *np.random.standard_normal(5).tolist(), torch.rand(1).item()]
    seed(5)
    np.random.standard_normal(ahead)
    for _ in DataLoader(Noisy(SAMPLES, "int"), batch_size=4, shuffle=True, seed=7):
        pass
    found = [random.random(), *np.random.standard_normal(5).tolist(), torch.rand(1).item()]
    assert found == expected


@pytest.mark.parametrize("kind", ["python", "eager", "lazy"])
@pytest.mark.parametrize("live", [False, True])
def test_a_state_from_the_start_states_what_will_come(kind: str, live: bool) -> None:
    seed(3)
    loader = DataLoader(Squares(SAMPLES, "int"), **KINDS[kind])
    passing = iter(loader) if live else None
    state = loader.state_dict()
    rest = batches(loader if passing is None else passing)
    seed(4)
    resumed = DataLoader(Squares(SAMPLES, "int"), **KINDS[kind])
    resumed.load_state_dict(state)
    assert batches(resumed) == rest


@pytest.mark.parametrize(
    ("kind", "draw", "message"),
    [
        ("lazy", random.random, "python's `random`"),
        ("lazy", np.random.rand, "numpy's global generator"),
        ("lazy torch", lambda: torch.rand(1), "torch's default generator"),
        ("batches", random.random, "python's `random`"),
    ],
)
def test_what_cannot_be_repeated_is_reported(kind: str, draw: Any, message: str) -> None:
    loader = DataLoader(Squares(SAMPLES, "int"), **KINDS[kind])
    passing = iter(loader)
    next(passing)
    assert loader.state_dict()["version"]
    draw()
    next(passing)
    with pytest.raises(ConfigError, match=r"no state can repeat its order.*state_dict") as caught:
        loader.state_dict()
    assert message in str(caught.value)
    assert len(list(passing)) > 0
    assert loader.state_dict()["mark"]["epoch"] == 1  # the next epoch can be repeated


@pytest.mark.parametrize("kind", ["python", "eager"])
def test_draws_at_once_may_run_in_parallel(kind: str) -> None:
    seed(3)
    loader = DataLoader(Squares(SAMPLES, "int"), **KINDS[kind])
    passing = iter(loader)
    for _ in range(3):
        next(passing)
        seed(random.randrange(9))
    state, rest = loader.state_dict(), batches(passing)
    resumed = DataLoader(Squares(SAMPLES, "int"), **KINDS[kind])
    resumed.load_state_dict(state)
    assert batches(resumed) == rest


@pytest.mark.parametrize("name", ["rng", "python_rng", "numpy_rng"])
@pytest.mark.parametrize("bad", ["?", "AAAA", 7])
def test_damaged_states_of_generators_are_refused(name: str, bad: object) -> None:
    loader = DataLoader(Squares(SAMPLES, "int"), **KINDS["lazy"])
    next(iter(loader))
    state = loader.state_dict()
    state["mark"][name] = bad
    with pytest.raises(ResumeError, match="State is damaged"):
        loader.load_state_dict(state)
