"""torch's DataLoader as the reference: the same batches, lengths, types and errors."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.utils.data

from penstock.cache import ConfigError
from penstock.pipeline import DataLoader
from tests.torch_datasets import (
    Batched,
    CountingSampler,
    Failing,
    Noisy,
    Random,
    Sized,
    Squares,
    Streams,
    same,
)

if TYPE_CHECKING:
    from pathlib import Path

Torch = torch.utils.data.DataLoader


def both(make: Any, seed: int = 3) -> tuple[list[Any], list[Any]]:
    """Return two epochs of each loader, from one state of torch's generator."""
    results = []
    for kind in (Torch, DataLoader):
        torch.manual_seed(seed)
        loader = make(kind)
        results.append([batch for _ in range(2) for batch in loader])
    return results[0], results[1]


KINDS = ["tuple", "dict", "namedtuple", "str", "int", "array", "float"]


IN_PROCESS: list[dict[str, Any]] = [
    {},
    {"batch_size": 4},
    {"batch_size": 4, "drop_last": True},
    {"batch_size": 4, "shuffle": True},
    {"batch_size": None},
]
IN_WORKERS: list[dict[str, Any]] = [
    {"batch_size": 4, "shuffle": True, "num_workers": 2},
    {"batch_size": 3, "num_workers": 2, "persistent_workers": True, "prefetch_factor": 3},
]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, options) for kind in KINDS for options in IN_PROCESS),
        # Processes are slow; two kinds are enough.
        *((kind, options) for kind in ("tuple", "dict") for options in IN_WORKERS),
    ],
    ids=str,
)
def test_the_same_batches_as_torch(kind: str, options: dict[str, Any]) -> None:
    reference, ours = both(lambda loader: loader(Squares(11, kind), **options))
    assert same(reference, ours)


@pytest.mark.parametrize("workers", [0, 2])
def test_random_numbers_inside_the_dataset_are_torchs(workers: int) -> None:
    def make(loader: Any) -> Any:
        return loader(Noisy(10), batch_size=4, num_workers=workers, shuffle=True)

    reference, ours = both(make)
    if workers:  # in this process python's and numpy's generators aren't seeded by the test
        assert same(reference, ours)
    assert same([b[0] for b in reference], [b[0] for b in ours])
    assert same([b[3] for b in reference], [b[3] for b in ours])


def weighted(samples: int) -> Any:
    return torch.utils.data.WeightedRandomSampler([1.0] * samples, samples)


def grouped(samples: int) -> list[list[int]]:
    return [[0, 2], [1], list(range(3, samples))]


@pytest.mark.parametrize(
    "options",
    [
        {"dataset": Batched(7), "batch_size": 3},
        {"sampler": weighted(11), "batch_size": 3},
        {"sampler": torch.utils.data.SubsetRandomSampler(range(2, 9)), "batch_size": 3},
        {"sampler": [3, 1, 4, 1, 5], "batch_size": 2},
        {"batch_sampler": grouped(11)},
        {"sampler": [3, 1, 4], "batch_size": None},
        {"collate_fn": list, "batch_size": 3},
    ],
    ids=lambda options: "-".join(options),
)
def test_samplers_and_collate(options: dict[str, Any]) -> None:
    reference, ours = both(lambda loader: loader(**{"dataset": Squares(11), **options}))
    assert same(reference, ours)


def test_generator() -> None:
    def make(loader: Any) -> Any:
        generator = torch.Generator().manual_seed(5)
        return loader(Squares(11), batch_size=3, shuffle=True, generator=generator)

    reference, ours = both(make)
    assert same(reference, ours)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("batch_size", "drop_last"), [(None, False), (4, False), (4, True)])
def test_iterable_datasets(workers: int, batch_size: int | None, drop_last: bool) -> None:
    for dataset in (Streams([3, 10]), Random([9, 2])):
        reference, ours = both(
            lambda loader, dataset=dataset: loader(
                dataset, batch_size=batch_size, num_workers=workers, drop_last=drop_last
            )
        )
        assert same(reference, ours)


@pytest.mark.parametrize(
    "make",
    [
        lambda loader: loader(Squares(11), batch_size=4),
        lambda loader: loader(Squares(11), batch_size=4, drop_last=True),
        lambda loader: loader(Squares(11), batch_size=None),
        lambda loader: loader(Squares(11), batch_sampler=grouped(11)),
        lambda loader: loader(Squares(11), sampler=[1, 2, 3], batch_size=2),
        lambda loader: loader(Sized([11]), batch_size=4),
        lambda loader: loader(Sized([11]), batch_size=4, drop_last=True),
        lambda loader: loader(Sized([11]), batch_size=None),
        lambda loader: loader(Streams([11]), batch_size=4),
        lambda loader: loader(Squares(0), batch_size=4),
    ],
)
def test_len(make: Any) -> None:
    def length(loader: Any) -> Any:
        try:
            return len(loader)
        except TypeError:
            return TypeError

    assert length(make(Torch)) == length(make(DataLoader))


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": -1},
        {"timeout": -1},
        {"prefetch_factor": 2},
        {"persistent_workers": True},
        {"sampler": [1], "shuffle": True},
        {"batch_sampler": [[1]], "batch_size": 2},
        {"batch_sampler": [[1]], "shuffle": True},
        {"batch_sampler": [[1]], "drop_last": True},
        {"batch_sampler": [[1]], "sampler": [1]},
        {"batch_size": None, "drop_last": True},
        {"batch_size": 0},
        {"batch_size": -3},
        {"batch_size": "4"},
        {"multiprocessing_context": "nonsense", "num_workers": 1},
        {"multiprocessing_context": "fork"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dataset", [Squares(5), Streams([5])], ids=["map", "iterable"])
def test_the_same_exceptions_for_arguments(dataset: Any, options: dict[str, Any]) -> None:
    def outcome(loader: Any) -> Any:
        try:
            loader(dataset, **options)
        except Exception as error:
            return type(error), str(error)
        return None

    assert outcome(Torch) == outcome(DataLoader)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_exception_from_a_dataset_and_the_sample_named(workers: int) -> None:
    outcomes = []
    for kind in (Torch, DataLoader):
        batches = iter(kind(Failing(11), batch_size=2, num_workers=workers))
        seen = [next(batches)[1].tolist() for _ in range(2)]
        with pytest.raises(KeyError) as caught:
            next(batches)
        seen.append(next(batches)[1].tolist())  # torch continues with the next batch
        outcomes.append(seen)
    assert outcomes[0] == outcomes[1]
    assert "sample 4" in "".join([*getattr(caught.value, "__notes__", []), str(caught.value)])


class _Ragged(Squares):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(4 if index == 7 else 3)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_that_fails_names_the_sample(workers: int) -> None:
    batches = iter(DataLoader(_Ragged(11), batch_size=4, num_workers=workers))
    next(batches)
    with pytest.raises(RuntimeError) as caught:
        next(batches)
    assert "sample 7" in "".join([*getattr(caught.value, "__notes__", []), str(caught.value)])


def test_a_length_that_lies() -> None:
    class Long(Squares):
        def __len__(self) -> int:
            return 14

    with pytest.raises(IndexError) as caught:
        list(DataLoader(Long(11), batch_size=4))
    assert "sample 11" in "".join(caught.value.__notes__)
    loader = DataLoader(Sized([11], length=6), batch_size=2)
    assert len(loader) == 3
    with pytest.warns(UserWarning, match=r"returned more.*\(as in trainers\) doesn't\.$"):
        assert len(list(loader)) == 6


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")  # from Python 3.12 on
def test_a_length_that_each_workers_last_batch_passes() -> None:
    loader = DataLoader(Sized([3, 3]), batch_size=2, num_workers=2)
    assert len(loader) == 3
    with pytest.warns(UserWarning, match="Each of 2 workers ends its own stream, often with"):
        assert len(list(loader)) == 4


def test_concurrent_iterators_as_in_torch() -> None:
    for kind in (Torch, DataLoader):
        loader = kind(Squares(6, "int"), batch_size=2)
        pairs = [(a.tolist(), b.tolist()) for a in loader for b in loader]
        assert len(pairs) == 9


def _note_dataset(worker: int) -> None:
    info: Any = torch.utils.data.get_worker_info()
    assert type(info.dataset) is Squares
    vars(info.dataset)["seen_by"] = worker
    assert info.id == worker


def test_worker_init_fn_sees_the_users_dataset() -> None:
    loader = DataLoader(Squares(4), num_workers=2, worker_init_fn=_note_dataset)
    assert len(list(loader)) == 4


class _Restarting:
    """A batch sampler that is its own iterator and restarts at iter(), like Lightning's."""

    def __iter__(self) -> Any:
        self.at = 0
        return self

    def __next__(self) -> list[int]:
        self.at += 1
        if self.at > 4:
            raise StopIteration
        return [self.at, self.at + 1]


def test_a_sampler_that_is_its_own_iterator() -> None:
    reference, ours = both(lambda loader: loader(Squares(11), batch_sampler=_Restarting()))
    assert len(reference) == 8
    assert same(reference, ours)


def test_attributes_are_honest() -> None:
    dataset = Squares(9)
    theirs = Torch(dataset, batch_size=4, num_workers=2, drop_last=True)
    ours = DataLoader(dataset, batch_size=4, num_workers=2, drop_last=True)
    for name in ("batch_size", "drop_last", "num_workers", "pin_memory", "persistent_workers"):
        assert getattr(theirs, name) == getattr(ours, name)
    for name in ("worker_init_fn", "collate_fn", "generator", "timeout", "prefetch_factor"):
        assert getattr(theirs, name) == getattr(ours, name)
    assert type(theirs.sampler) is type(ours.sampler)
    assert type(theirs.batch_sampler) is type(ours.batch_sampler)
    assert ours.dataset is dataset
    assert isinstance(ours, Torch)
    with pytest.raises(ValueError, match="should not be set"):
        ours.batch_size = 3


def test_a_stateful_sampler_continues() -> None:
    reference, ours = both(lambda loader: loader(Squares(9), sampler=CountingSampler(9)))
    assert same(reference, ours)


def test_a_temporary_folder_with_a_long_path_is_refused_before_workers_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path / ("long" * 30))
    os.mkdir(folder)
    monkeypatch.setattr("tempfile.tempdir", folder)
    with (
        DataLoader(Squares(4), batch_size=2, num_workers=1) as loader,
        pytest.raises(ConfigError, match=r"TMPDIR to a shorter path"),
    ):
        next(iter(loader))
    with DataLoader(Squares(4), batch_size=2) as loader:
        assert len(list(loader)) == 2
