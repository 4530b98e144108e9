"""Each undocumented name of torch that the library uses exists and works.

If a release of torch makes one of these fail, the message names the feature that breaks.
"""

from __future__ import annotations

import ast
import os
import random
import signal
from dataclasses import FrozenInstanceError
from functools import cache
from multiprocessing import process
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.utils.data as torchs

from penstock.cache import group_store
from penstock.pipeline import DataLoader, fresh_seed, torch_private
from penstock.pipeline.torch_data import seed_worker
from tests.layers import ROOT, modules
from tests.torch_datasets import Squares
from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Draws(torchs.Dataset[Any]):
    """The draws of a worker for a sample, and the worker's number."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, float, int, int]:
        info: Any = torchs.get_worker_info()
        drawn = int(np.random.randint(2**31))
        return info.id, random.random(), drawn, int(torch.randint(2**31, ()))


class Stream(torchs.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def as_it_is(samples: Any) -> Any:
    return samples


@pytest.fixture
def two_workers() -> Iterator[Any]:
    """Yield an iterator of torch's with two workers, whose first batch was received."""
    loader = torchs.DataLoader(Squares(40, "int"), 2, num_workers=2, timeout=PATIENCE_S)
    iterator: Any = iter(loader)
    next(iterator)
    workers = list(iterator._workers)
    yield iterator
    iterator._shutdown_workers()
    for worker in workers:
        worker.terminate()
        worker.join(PATIENCE_S)


class TestLoaders:
    def test_the_kind_of_dataset_is_shown(self) -> None:
        why = "Lightning rebuilds loaders over map datasets: samples would be shared out twice"
        ours: Any = torchs.DataLoader(Squares(4, "int"))
        theirs: Any = torchs.DataLoader(Stream())
        assert ours._dataset_kind != theirs._dataset_kind, why
        torch_private.show_as_stream(ours)
        assert ours._dataset_kind == theirs._dataset_kind, why
        planned: Any = DataLoader(Squares(4, "int"), seed=1)
        assert planned._dataset_kind == theirs._dataset_kind, why

    def test_the_context_has_a_place(self) -> None:
        why = "a native loader has no multiprocessing_context to show to trainers"
        loader: Any = torchs.DataLoader.__new__(torchs.DataLoader)
        with pytest.raises(AttributeError):
            _ = loader.multiprocessing_context
        torch_private.without_worker_context(loader)
        assert loader.multiprocessing_context is None, why

    def test_the_iterator_of_persistent_workers_is_kept(self) -> None:
        why = "a child that is forked between two passes ends its parent's persistent workers"
        loader = torchs.DataLoader(
            Squares(4, "int"), 2, num_workers=1, persistent_workers=True, timeout=PATIENCE_S
        )
        assert torch_private.kept_iterator(loader) is None, why
        iterator = iter(loader)
        assert torch_private.kept_iterator(loader) is iterator, why

    def test_a_made_loader_can_be_overwritten(self) -> None:
        why = "the sampler and batch size of a seeded loader can't follow a world that comes late"
        loader = torchs.DataLoader(Squares(4, "int"), 2)
        with pytest.raises(ValueError, match="should not be set"):
            loader.batch_size = 4
        torch_private.overwrite(loader, "batch_size", 4)
        assert loader.batch_size == 4, why


class TestIterators:
    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_the_base_seed_is_passed_and_drawn_as_ours(self, num_workers: int) -> None:
        why = "a resumed epoch of torch's own randomness can't be repeated"
        generator = torch.Generator().manual_seed(3)
        loader = torchs.DataLoader(Squares(4), generator=generator, num_workers=num_workers)
        seed = torch_private.base_seed_of(iter(loader))
        assert seed == fresh_seed(torch.Generator().manual_seed(3)), why
        assert torch_private.base_seed_of(iter(())) is None

    def test_workers_are_processes_by_number(self, two_workers: Any) -> None:
        why = "a worker that was killed can't be named"
        workers = torch_private.workers_of(two_workers)
        assert len(workers) == 2, why
        assert all(worker.is_alive() and worker.pid for worker in workers), why
        assert not torch_private.workers_of(iter(torchs.DataLoader(Squares(4))))

    def test_tasks_name_their_workers(self, two_workers: Any) -> None:
        why = "the samples that a killed worker was reading can't be named"
        tasks = torch_private.tasks_of(two_workers)
        # Two a worker are under way, numbered in the order in which they were asked for.
        assert [(task, info[0]) for task, info in sorted(tasks.items())] == [
            (1, 1),
            (2, 0),
            (3, 1),
            (4, 0),
        ], why
        assert {len(info) for info in tasks.values()} <= {1, 2}, why
        assert not torch_private.tasks_of(iter(torchs.DataLoader(Squares(4))))

    def test_workers_are_asked_by_turns(self) -> None:
        """This is undocumented too: after a resume, the worker whose turn it is continues
        (`with_restored_states`, `IterableSource`)."""
        loader: Any = torchs.DataLoader(Draws(), None, num_workers=2, timeout=PATIENCE_S)
        assert [worker for worker, *_ in loader] == [0, 1, 0, 1]

    def test_shutting_down_ends_them(self, two_workers: Any) -> None:
        why = "close() leaves worker processes behind"
        workers = torch_private.workers_of(two_workers)
        torch_private.shut_down(two_workers)
        assert not any(worker.is_alive() for worker in workers), why
        torch_private.shut_down(iter(()))

    def test_dead_workers_are_no_news_once_watching_stops(self, two_workers: Any) -> None:
        why = "the death of a worker interrupts the clean-up, and the next job of the process"
        from torch.utils.data._utils import signal_handling

        dead = torch_private.workers_of(two_workers)[0]
        before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # it would raise at any line
        try:
            dead.kill()
            assert dead.pid is not None
            os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)  # not join(): torch will ask
            with pytest.raises(RuntimeError, match="killed"):
                signal_handling._error_if_any_worker_fails()  # type: ignore[attr-defined]
            torch_private.stop_watching(two_workers)
            signal_handling._error_if_any_worker_fails()  # type: ignore[attr-defined]
            assert not two_workers._worker_pids_set, why
        finally:
            signal.signal(signal.SIGCHLD, before)

    def test_disowned_workers_live_on(self, two_workers: Any) -> None:
        """This process acts as a forked child."""
        why = "a child that is forked while a pass runs ends the pass of its parent"
        workers = set(torch_private.workers_of(two_workers))
        children = process._children  # type: ignore[attr-defined]
        assert workers <= children, why
        torch_private.disown(two_workers)
        try:
            two_workers._shutdown_workers()  # torch's, at the child's exit
            assert all(worker.is_alive() for worker in workers), why
            assert not workers & children, why
        finally:
            children |= workers
            two_workers._shutdown = False
        torch_private.disown(iter(()))


class TestWorkers:
    def test_a_worker_can_be_seeded_again(self) -> None:
        why = "a resumed pass draws other random numbers in its workers"
        generator = torch.Generator().manual_seed(7)
        loader: Any = torchs.DataLoader(Draws(), None, num_workers=1, generator=generator)
        _, *drawn = next(iter(loader))
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        seed_worker(fresh_seed(torch.Generator().manual_seed(7)), 0)
        here = [random.random(), int(np.random.randint(2**31)), int(torch.randint(2**31, ()))]
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
        assert drawn == here, why
        assert len(torch_private.numpy_seed(1, 0)) == 4

    def test_the_info_of_a_worker_can_be_changed(self) -> None:
        why = "get_worker_info().dataset is our source, not the user's dataset"
        from torch.utils.data._utils.worker import WorkerInfo

        source, dataset = Squares(1), Squares(2)
        info: Any = WorkerInfo(id=0, num_workers=1, seed=5, dataset=source)
        with pytest.raises((RuntimeError, FrozenInstanceError), match="annot assign"):
            info.dataset = dataset
        torch_private.set_worker_info(info, dataset=dataset, seed=None)
        assert (info.dataset, info.seed) == (dataset, 5), why
        torch_private.set_worker_info(info, dataset=dataset, seed=6)
        assert info.seed == 6, why

    def test_pinning_reaches_into_containers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        why = "pin_memory=True leaves the tensors of a torch dataset's batches unpinned"
        one, other = torch.zeros(1), torch.ones(1)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor + 10)
        batch = torch_private.pinned({"a": [one], "b": (other, "text")})
        assert (batch["a"][0].item(), batch["b"][0].item(), batch["b"][1]) == (10, 11, "text"), why


def test_the_groups_store_keeps_values() -> None:
    why = "ranks can't compare their plans nor count bad samples together"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        group_store().set("penstock/test", "1")
        assert group_store().get("penstock/test") == b"1", why
        assert group_store().compare_set("penstock/new", "", "2") == b"2", why
    finally:
        dist.destroy_process_group()


# Of other libraries: DALI's pipeline and its `if`; what fsspec's file systems call themselves;
# multiprocessing's processes (of cache/forks.py); a method of named tuples.
OTHERS = {"_pipe", "_conditional", "_strip_protocol", "_children", "_replace", "_asdict"}


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def names_of_ours() -> set[str]:
    """Return every private name that the library itself defines."""
    found: set[str] = set()
    for path in modules().values():
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id in ("self", "cls")
            ):
                found.add(node.attr)
    return found


def private_names(module: str) -> Iterator[tuple[str, int]]:
    """Yield the names with an underscore that a module imports or reads from an object, with their
    lines."""
    for node in nodes_of(modules()[module]):
        if isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.ImportFrom):
            for name in (node.module or "").split("."):
                yield name, node.lineno
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.Import):
            for alias in node.names:
                for name in alias.name.split("."):
                    yield name, node.lineno
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "setattr", "hasattr", "delattr")
            and isinstance(node.args[1], ast.Constant)
        ):
            yield str(node.args[1].value), node.lineno


def test_no_other_module_uses_an_undocumented_name_of_torch() -> None:
    ours = names_of_ours()
    found = []
    for module, path in modules().items():
        if module in ("pipeline.torch_private", "cache.channel"):  # which has one name
            continue
        for name, line in private_names(module):
            is_private = name.startswith("_") and not name.endswith("__")
            if is_private and name not in ours and name not in OTHERS:
                found.append(f"{path.relative_to(ROOT)}:{line}: {name}")
    assert found == [], "put torch's names into pipeline/torch_private.py, each with a test here"


def test_the_names_are_found() -> None:
    """Otherwise a search that finds nothing would pass."""
    both = ("pipeline.torch_private", "cache.channel")
    seen = {name for module in both for name, _ in private_names(module)}
    assert {
        "_DatasetKind",
        "_base_seed",
        "_workers",
        "_task_info",
        "_shutdown_workers",
        "_worker_pids_set",
        "_remove_worker_pids",
        "_generate_state",
        "_get_default_store",
    } <= seen
    assert os.path.exists(modules()["pipeline.torch_private"])
