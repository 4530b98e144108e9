"""Attributes that are set once the loader is made: those that torch reads work, others are
errors."""

from __future__ import annotations

import inspect
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.utils.data

from penstock.cache import ConfigError
from penstock.pipeline import WORKER_OPTIONS, DataLoader, World
from penstock.readers import Dataset
from tests.torch_datasets import Squares

if TYPE_CHECKING:
    from pathlib import Path

Torch = torch.utils.data.DataLoader
FREE = {"self", "snapshot_every_n_steps"}  # the latter never changes anything
ARGUMENTS = set(inspect.signature(DataLoader.__init__).parameters) - FREE
NATIVE = {"num_workers": 2, "prefetch_factor": 3, "timeout": 9.0, "pin_memory": True}
IN_ORDER = {"in_order": False}


class Seeds(torch.utils.data.Dataset[Any]):
    """The value that worker_init_fn set in the worker that reads a sample, and its process."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        return index, int(os.environ.get("PENSTOCK_TEST_WORKER", "-1")), os.getpid()


def tell(worker: int, *, told: int) -> None:
    os.environ["PENSTOCK_TEST_WORKER"] = str(told + worker)


def as_sum(samples: list[Any]) -> int:
    return int(sum(sample[0] for sample in samples))


def native(pack: Path, **options: Any) -> DataLoader:
    return DataLoader(Dataset(str(pack), fields=("label", "id")), 16, **options)


class TestTorchDatasets:
    @pytest.mark.parametrize("options", [{}, {"seed": 1}])
    def test_worker_init_fn(self, options: dict[str, Any]) -> None:
        loader = DataLoader(Seeds(), 4, num_workers=2, **options)
        assert [told.tolist() for _, told, _ in loader] == [[-1] * 4, [-1] * 4]
        loader.worker_init_fn = partial(tell, told=70)
        assert loader.worker_init_fn is not None
        assert [told.tolist() for _, told, _ in loader] == [[70] * 4, [71] * 4]

    def test_a_trainers_way_of_seeding_workers(self) -> None:
        """Lightning's seed_everything(workers=True) does this before the first pass."""
        loader = DataLoader(Seeds(), 4, num_workers=1, persistent_workers=True)
        assert loader.worker_init_fn is None
        loader.worker_init_fn = partial(tell, told=5)
        assert [told.tolist() for _, told, _ in loader] == [[5] * 4] * 2

    @pytest.mark.parametrize("options", [{}, {"seed": 1}])
    def test_num_workers_up_and_down(self, options: dict[str, Any]) -> None:
        loader = DataLoader(Seeds(), 4, **options)
        here = {pid for _, _, pids in loader for pid in pids.tolist()}
        loader.num_workers = 2
        there = {pid for _, _, pids in loader for pid in pids.tolist()}
        loader.num_workers = 0
        back = {pid for _, _, pids in loader for pid in pids.tolist()}
        assert here == back == {os.getpid()}
        assert len(there) == 2
        assert os.getpid() not in there

    def test_a_pass_that_runs_keeps_what_it_began_with(self) -> None:
        loader = DataLoader(Squares(12, "int"), 2)
        passing = iter(loader)
        first = [next(passing).tolist()]
        loader.num_workers, loader.collate_fn = 2, list
        assert first + [batch.tolist() for batch in passing] == [
            [i, i + 1] for i in range(0, 12, 2)
        ]
        assert list(loader) == [[i, i + 1] for i in range(0, 12, 2)]

    def test_collate_fn(self) -> None:
        ours, theirs = DataLoader(Seeds(), 4), Torch(Seeds(), 4)
        list(ours)
        for loader in (ours, theirs):
            loader.collate_fn = as_sum
        assert list(ours) == list(theirs) == [6, 22]
        assert ours.collate_fn is as_sum

    def test_generator_as_in_torch(self) -> None:
        def drawn(kind: Any) -> list[Any]:
            torch.manual_seed(3)
            loader = kind(Squares(12, "int"), 4, shuffle=True)
            loader.generator = torch.Generator().manual_seed(5)
            return [batch.tolist() for batch in loader]

        assert drawn(DataLoader) == drawn(Torch)
        seeded = DataLoader(Squares(12, "int"), 4, shuffle=True, seed=1)
        with pytest.raises(ConfigError, match="contradict"):
            seeded.generator = torch.Generator()

    def test_the_other_options_reach_torchs_loader(self) -> None:
        loader = DataLoader(Squares(12, "int"), 4, num_workers=1)
        loader.prefetch_factor, loader.timeout = 3, 40.0
        loader.multiprocessing_context = "fork"
        passing: Any = iter(loader)
        inner = passing._iterator._inner
        assert (inner._timeout, inner._prefetch_factor) == (40.0, 3)
        assert inner._workers[0].__class__.__name__ == "ForkProcess"
        assert len(list(passing)) == 3
        with pytest.raises(ValueError, match="valid start method"):
            loader.multiprocessing_context = "thread"

    def test_persistent_workers_that_live_are_not_told_in_silence(self) -> None:
        loader = DataLoader(Squares(12, "int"), 4, num_workers=1, persistent_workers=True)
        list(loader)
        with pytest.raises(ConfigError, match="persistent workers are alive"):
            loader.worker_init_fn = partial(tell, told=1)
        loader.num_workers = 1  # unchanged
        assert len(list(loader)) == 3
        loader.close()

    @pytest.mark.parametrize("options", [{}, {"seed": 1, "shuffle": True}])
    def test_every_other_argument_raises(self, options: dict[str, Any]) -> None:
        loader = DataLoader(Squares(12, "int"), 4, **options)
        live = {*WORKER_OPTIONS, "collate_fn", "generator"} - {"persistent_workers"}
        before = [batch.tolist() for batch in loader]
        for name in ARGUMENTS - live:
            with pytest.raises(ConfigError, match=f"{name} should not be set") as caught:
                setattr(loader, name, object())
            assert "state_dict()" in str(caught.value)
        loader.set_epoch(0)
        assert [batch.tolist() for batch in loader] == before

    def test_what_is_nobodys_argument_may_be_set(self) -> None:
        loader: Any = DataLoader(Squares(12, "int"), 4)
        loader.nickname = "train"
        assert loader.nickname == "train"


class TestNativeDatasets:
    @pytest.mark.parametrize("name", NATIVE)
    def test_what_can_change_is_honoured(self, name: str, pack: Path) -> None:
        with native(pack, num_workers=1, shuffle=True, seed=1) as loader:
            wanted = [batch[1].tolist() for batch in loader]
            setattr(loader, name, NATIVE[name])
            settings = {
                "num_workers": "threads",
                "prefetch_factor": "depth",
                "timeout": "timeout_s",
            }
            passing = iter(loader)
            engine: Any = loader._engine
            assert getattr(engine.options, settings.get(name, name)) == NATIVE[name]
            assert [batch[1].tolist() for batch in passing] != wanted  # the next epoch
            loader.set_epoch(0)
            assert [batch[1].tolist() for batch in loader] == wanted

    def test_in_the_middle_of_a_restored_epoch(self, pack: Path) -> None:
        options: dict[str, Any] = {"num_workers": 1, "shuffle": True, "seed": 1}
        with native(pack, **options) as whole, native(pack, **options) as resumed:
            passing = iter(whole)
            next(passing)
            resumed.load_state_dict(whole.state_dict())
            resumed.num_workers = 2
            rest = [batch[1].tolist() for batch in resumed]
            assert rest == [batch[1].tolist() for batch in passing]
            assert resumed.state_dict() == whole.state_dict()

    def test_every_other_argument_raises(self, pack: Path) -> None:
        with native(pack, num_workers=1) as loader:
            for name in ARGUMENTS - {*NATIVE, *IN_ORDER}:
                with pytest.raises(ConfigError, match=name):
                    setattr(loader, name, object())

    @pytest.mark.parametrize(
        ("name", "value"), [("num_workers", -1), ("prefetch_factor", 0), ("timeout", "soon")]
    )
    def test_values_are_checked_when_they_are_set(
        self, name: str, value: object, pack: Path
    ) -> None:
        with native(pack, num_workers=1) as loader:
            with pytest.raises(ConfigError, match=name):
                setattr(loader, name, value)
            assert getattr(loader, name) in (1, 0, None)

    def test_there_is_no_worker_to_seed(self, pack: Path) -> None:
        """Lightning sets a missing worker_init_fn; a framework that rebuilds passes on an existing
        one."""
        with native(pack, num_workers=1) as loader:
            assert loader.worker_init_fn is not None
            with pytest.raises(ConfigError, match="there are no worker processes"):
                loader.worker_init_fn = partial(tell, told=1)
            native(pack, worker_init_fn=loader.worker_init_fn, num_workers=1).close()


def test_properties_are_not_overruled(pack: Path) -> None:
    with native(pack, num_workers=1) as loader, pytest.raises(ConfigError, match="world"):
        loader.world = World(0, 2)  # type: ignore[misc]


def test_annotations_may_subscript() -> None:
    kind = DataLoader[int]
    assert kind.__origin__ is DataLoader  # type: ignore[attr-defined]
    loader: DataLoader[int] = DataLoader(Squares(4, "int"), 2)
    assert isinstance(loader, DataLoader)

    class Named(DataLoader[int]):
        pass

    assert len(list(Named(Squares(4, "int"), 2))) == 2
