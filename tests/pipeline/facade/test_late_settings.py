"""Test what is set after the loader was made: the world that a trainer starts, and attributes."""

from __future__ import annotations

import inspect
import json
import os
import socket
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.data

from penstock.augment import imagenet_train
from penstock.cache import ConfigError, JobStore, PlanError
from penstock.pipeline import WORKER_ARGUMENTS, DataLoader, LateWorld, World
from penstock.readers import Dataset
from tests.conftest import SAMPLES
from tests.torch_datasets import Squares
from tests.warm import Warm

if TYPE_CHECKING:
    from collections.abc import Callable


ROOT = Path(__file__).resolve().parents[3]


LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")


CHILD = {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "NODE_RANK": "0"}  # of Lightning's own launcher


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Remove the launcher's variables, and return a function that starts a process group."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)

    def start(rank: int, size: int) -> None:
        values = {"is_initialized": True, "get_rank": rank, "get_world_size": size}
        for name, value in values.items():
            monkeypatch.setattr(dist, name, lambda value=value: value)
        monkeypatch.setattr(JobStore, "of_group", classmethod(lambda _: None))

    return start


def native(pack: Path, **options: Any) -> DataLoader:
    settings: dict[str, Any] = {"shuffle": True, "seed": 3, "drop_last": True, **options}
    return DataLoader(Dataset(str(pack), fields=("label", "id")), 5, num_workers=1, **settings)


def squares(_: Path, **options: Any) -> DataLoader:
    settings: dict[str, Any] = {"shuffle": True, "seed": 3, "drop_last": True, **options}
    return DataLoader(Squares(SAMPLES, "int"), 5, **settings)


def ids_of(loader: Any) -> list[list[int]]:
    return [(batch[-1] if isinstance(batch, tuple) else batch).tolist() for batch in loader]


MAKERS = pytest.mark.parametrize("make", [native, squares])


@MAKERS
@pytest.mark.parametrize("rank", [0, 1])
def test_the_world_is_looked_for_when_a_pass_begins(
    make: Any, rank: int, pack: Path, group: Callable[[int, int], None]
) -> None:
    wanted = ids_of(make(pack, world=World(rank, 2)))
    loader = make(pack)
    assert (len(loader), loader.sampler.num_replicas) == (SAMPLES // 5, 1)
    group(rank, 2)
    assert len(loader) == SAMPLES // 10
    assert ids_of(loader) == wanted
    assert (loader.sampler.rank, loader.sampler.num_replicas) == (rank, 2)
    assert len(loader.sampler) == sum(map(len, wanted))
    assert loader.world == World(rank, 2)
    loader.close()


@MAKERS
def test_without_a_len_in_between_too(
    make: Any, pack: Path, group: Callable[[int, int], None]
) -> None:
    loader = make(pack)
    group(1, 2)
    assert ids_of(loader) == ids_of(make(pack, world=World(1, 2)))


@MAKERS
def test_a_state_and_an_epoch_from_before_stay(
    make: Any, pack: Path, group: Callable[[int, int], None]
) -> None:
    saved = make(pack, world=World(1, 2))
    passing = iter(saved)
    for _ in range(3):
        next(passing)
    state = json.loads(json.dumps(saved.state_dict()))
    rest = ids_of(passing)
    loader, later = make(pack), make(pack)
    if make is native:
        with pytest.warns(UserWarning, match="global batch goes from 10 to 5"):
            loader.load_state_dict(state)
    else:
        loader.load_state_dict(state)
    later.set_epoch(1)
    group(1, 2)
    assert ids_of(loader) == rest
    assert ids_of(later) == ids_of(saved)
    assert (loader.epoch, later.epoch) == (1, 2)


@MAKERS
def test_a_batch_over_all_ranks_is_divided_again(
    make: Any, pack: Path, group: Callable[[int, int], None]
) -> None:
    def whole(world: World | None) -> DataLoader:
        dataset = Squares(SAMPLES, "int") if make is squares else Dataset(pack, fields=("id",))
        options: dict[str, Any] = {"shuffle": True, "seed": 3, "drop_last": True}
        return DataLoader(dataset, global_batch_size=10, world=world, **options)

    loader = whole(None)
    assert loader.batch_size == 10
    group(0, 2)
    found = ids_of(loader)
    assert loader.batch_size == 5
    assert found == ids_of(whole(World(0, 2)))


@MAKERS
def test_what_only_the_world_decides_is_an_error_at_the_first_pass(
    make: Any, pack: Path, group: Callable[[int, int], None]
) -> None:
    loader = make(pack, drop_last=False)
    unseeded = make(pack, seed=None)
    group(0, 2)
    for _ in range(2):  # each time: no pass reads another world's share
        with pytest.raises(ConfigError, match="With 2 ranks the end of an epoch"):
            iter(loader)
    if make is native:
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"shuffle=True on 2 ranks needs seed="):
                iter(unseeded)


@MAKERS
@pytest.mark.usefixtures("group")
def test_what_needs_no_world_is_an_error_at_once(
    make: Any, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CHILD.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="seed must be an integer"):
        make(pack, seed="x")
    with pytest.raises(ConfigError, match="would have no step"):
        DataLoader(make(pack).dataset, 500, shuffle=True, seed=1, drop_last=True)


@MAKERS
def test_half_a_launcher_is_no_world_of_one(
    make: Any, pack: Path, group: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CHILD.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PlanError, match=r"RANK: not set.*process group.*World\(rank, size\)"):
        World.detect()
    loader = make(pack)  # the world is neither known nor needed yet
    assert len(loader) == SAMPLES // 5
    assert loader.state_dict()["version"] > 0
    for _ in range(2):
        with pytest.raises(PlanError, match=r"RANK: not set"):
            iter(loader)
    loader.load_state_dict(make(pack, world=World(1, 2)).state_dict())
    group(1, 2)
    assert ids_of(loader) == ids_of(make(pack, world=World(1, 2)))
    loader.close()


@MAKERS
def test_a_world_that_changes_under_a_running_job_is_refused(
    make: Any, pack: Path, group: Callable[[int, int], None]
) -> None:
    group(1, 2)
    loader = make(pack)
    passing = iter(loader)
    next(passing)
    group(0, 1)
    length = len(loader)
    with pytest.raises(PlanError, match=r"has begun as rank 1 of 2.*now rank 0 of 1"):
        iter(loader)
    assert len(loader) == length == SAMPLES // 10
    group(1, 2)
    assert len(ids_of(loader)) == length


@MAKERS
def test_a_look_at_a_batch_before_the_group_does_no_harm(
    make: Any, pack: Path, group: Callable[[int, int], None]
) -> None:
    loader = make(pack)
    next(iter(loader))
    group(0, 2)
    assert ids_of(loader) == ids_of(make(pack, world=World(0, 2)))


@pytest.mark.usefixtures("group")
def test_torchs_order_needs_no_world(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**CHILD, "WORLD_SIZE": "two"}.items():
        monkeypatch.setenv(name, value)
    assert ids_of(DataLoader(Squares(6, "int"), 3)) == [[0, 1, 2], [3, 4, 5]]


def test_augmented_torch_datasets_need_it(group: Callable[[int, int], None]) -> None:
    loader = DataLoader(Squares(6), 3, augment=imagenet_train(8))
    group(0, 2)
    with pytest.raises(ConfigError, match=r"augment= on 2 ranks needs seed=.*leave sampler= out"):
        iter(loader)


@pytest.mark.parametrize(
    ("message", "place"),
    [
        (CHILD, (1, 2)),
        ({**CHILD, "MASTER_ADDR": "127.0.0.1"}, (1, 2)),
        ({**CHILD, "LOCAL_RANK": "0", "WORLD_SIZE": "8", "NODE_RANK": "2"}, (0, 3)),
        ({**CHILD, "WORLD_SIZE": "4"}, (0, 1)),  # of another world
    ],
)
def test_the_place_on_the_node_is_known_without_a_rank(
    group: Callable[[int, int], None], message: dict[str, str], place: tuple[int, int]
) -> None:
    rank, size = (6, 8) if message.get("NODE_RANK") == "2" else (1, 2)
    group(rank, size)
    world = World.detect(message)
    assert (world.rank, world.size) == (rank, size)
    assert (world.local_rank, world.local_size) == place


SCRIPT = """
import json, os, sys
import torch.distributed as dist
from penstock.augment import imagenet_train
from penstock.pipeline import DataLoader
from penstock.readers import Dataset
from tests.torch_datasets import Squares

pack, out, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
order = {"shuffle": True, "seed": 3, "drop_last": True}
loaders = {
    "native": DataLoader(Dataset(pack, fields=("image", "id")), 5, **order,
                         augment=imagenet_train(32)),
    "seeded": DataLoader(Squares(203, "int"), 5, **order),
    "plain": DataLoader(Squares(203, "int"), 5),
}
found = {name: [len(loader)] for name, loader in loaders.items()}
os.environ.update(WORLD_SIZE="2", LOCAL_RANK=str(rank), NODE_RANK="0")  # as Lightning does in fit()
dist.init_process_group("gloo", rank=rank, world_size=2)
for name, loader in loaders.items():
    found[name].append(len(loader))
    for batch in loader:
        found[name] += (batch[1] if isinstance(batch, tuple) else batch).tolist()
    loader.close()
open(f"{out}/{rank}.json", "w").write(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
"""


def test_a_launcher_that_starts_its_group_late(pack: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    report = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    ranks = [
        Warm(
            ["-c", SCRIPT, pack, tmp_path, rank],
            env={**clean, **report, **(CHILD if rank else {})},
            cwd=ROOT,
        )
        for rank in (0, 1)
    ]
    try:
        errors = [rank.communicate()[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for name in ("native", "seeded"):
        (one, two) = (report[name] for report in found)
        assert one[:2] == two[:2] == [SAMPLES // 5, SAMPLES // 10]
        assert len(one) == len(two) == 2 + SAMPLES // 10 * 5
        assert not set(one[2:]) & set(two[2:])
        assert len({*one[2:], *two[2:]}) == SAMPLES // 10 * 10
    assert found[0]["plain"] == found[1]["plain"] == [41, 41, *range(203)]


@pytest.mark.parametrize("given", [3, (0, 2), "0 of 2", {"rank": 0}])
def test_a_world_is_a_world(given: Any) -> None:
    with pytest.raises(ConfigError, match="wanted World"):
        LateWorld(given)


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


def mark_worker(worker: int, *, first: int) -> None:
    os.environ["PENSTOCK_TEST_WORKER"] = str(first + worker)


def as_sum(samples: list[Any]) -> int:
    return int(sum(sample[0] for sample in samples))


def native_loader(pack: Path, **options: Any) -> DataLoader:
    return DataLoader(Dataset(str(pack), fields=("label", "id")), 16, **options)


class TestTorchDatasets:
    @pytest.mark.parametrize("options", [{}, {"seed": 1}])
    def test_worker_init_fn(self, options: dict[str, Any]) -> None:
        loader = DataLoader(Seeds(), 4, num_workers=2, **options)
        assert [report.tolist() for _, report, _ in loader] == [[-1] * 4, [-1] * 4]
        loader.worker_init_fn = partial(mark_worker, first=70)
        assert loader.worker_init_fn is not None
        assert [report.tolist() for _, report, _ in loader] == [[70] * 4, [71] * 4]

    def test_a_trainers_way_of_seeding_workers(self) -> None:
        """Lightning's seed_everything(workers=True) does this before the first pass."""
        loader = DataLoader(Seeds(), 4, num_workers=1, persistent_workers=True)
        assert loader.worker_init_fn is None
        loader.worker_init_fn = partial(mark_worker, first=5)
        assert [report.tolist() for _, report, _ in loader] == [[5] * 4] * 2

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

    def test_live_persistent_workers_are_not_changed_silently(self) -> None:
        loader = DataLoader(Squares(12, "int"), 4, num_workers=1, persistent_workers=True)
        list(loader)
        with pytest.raises(ConfigError, match="persistent workers are alive"):
            loader.worker_init_fn = partial(mark_worker, first=1)
        loader.num_workers = 1  # unchanged
        assert len(list(loader)) == 3
        loader.close()

    @pytest.mark.parametrize("options", [{}, {"seed": 1, "shuffle": True}])
    def test_every_other_argument_raises(self, options: dict[str, Any]) -> None:
        loader = DataLoader(Squares(12, "int"), 4, **options)
        live = {*WORKER_ARGUMENTS, "collate_fn", "generator"} - {"persistent_workers"}
        before = [batch.tolist() for batch in loader]
        for name in ARGUMENTS - live:
            with pytest.raises(ConfigError, match=f"{name} should not be set") as caught:
                setattr(loader, name, object())
            assert "state_dict()" in str(caught.value)
        loader.set_epoch(0)
        assert [batch.tolist() for batch in loader] == before

    def test_other_attributes_may_be_set(self) -> None:
        loader: Any = DataLoader(Squares(12, "int"), 4)
        loader.nickname = "train"
        assert loader.nickname == "train"


class TestNativeDatasets:
    @pytest.mark.parametrize("name", NATIVE)
    def test_what_can_change_is_honoured(self, name: str, pack: Path) -> None:
        with native_loader(pack, num_workers=1, shuffle=True, seed=1) as loader:
            wanted = [batch[1].tolist() for batch in loader]
            setattr(loader, name, NATIVE[name])
            passing = iter(loader)
            engine: Any = loader._engine
            assert getattr(engine.options, name) == NATIVE[name]
            assert [batch[1].tolist() for batch in passing] != wanted  # the next epoch
            loader.set_epoch(0)
            assert [batch[1].tolist() for batch in loader] == wanted

    def test_in_the_middle_of_a_restored_epoch(self, pack: Path) -> None:
        options: dict[str, Any] = {"num_workers": 1, "shuffle": True, "seed": 1}
        with native_loader(pack, **options) as whole, native_loader(pack, **options) as resumed:
            passing = iter(whole)
            next(passing)
            resumed.load_state_dict(whole.state_dict())
            resumed.num_workers = 2
            rest = [batch[1].tolist() for batch in resumed]
            assert rest == [batch[1].tolist() for batch in passing]
            assert resumed.state_dict() == whole.state_dict()

    def test_every_other_argument_raises(self, pack: Path) -> None:
        with native_loader(pack, num_workers=1) as loader:
            for name in ARGUMENTS - {*NATIVE, *IN_ORDER}:
                with pytest.raises(ConfigError, match=name):
                    setattr(loader, name, object())

    @pytest.mark.parametrize(
        ("name", "value"), [("num_workers", -1), ("prefetch_factor", 0), ("timeout", "soon")]
    )
    def test_values_are_checked_when_they_are_set(
        self, name: str, value: object, pack: Path
    ) -> None:
        with native_loader(pack, num_workers=1) as loader:
            with pytest.raises(ConfigError, match=name):
                setattr(loader, name, value)
            assert getattr(loader, name) in (1, 0, None)

    def test_there_is_no_worker_to_seed(self, pack: Path) -> None:
        """Lightning sets a missing worker_init_fn; a framework that rebuilds passes on an existing
        one."""
        with native_loader(pack, num_workers=1) as loader:
            assert loader.worker_init_fn is not None
            with pytest.raises(ConfigError, match="there are no worker processes"):
                loader.worker_init_fn = partial(mark_worker, first=1)
            native_loader(pack, worker_init_fn=loader.worker_init_fn, num_workers=1).close()


def test_properties_are_not_overruled(pack: Path) -> None:
    with native_loader(pack, num_workers=1) as loader, pytest.raises(ConfigError, match="world"):
        loader.world = World(0, 2)  # type: ignore[misc]


def test_annotations_may_subscript() -> None:
    kind = DataLoader[int]
    assert kind.__origin__ is DataLoader  # type: ignore[attr-defined]
    loader: DataLoader[int] = DataLoader(Squares(4, "int"), 2)
    assert isinstance(loader, DataLoader)

    class Named(DataLoader[int]):
        pass

    assert len(list(Named(Squares(4, "int"), 2))) == 2


def test_attributes_that_lightning_sets_again_leave_the_new_sampler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It rebuilds a loader with its own sampler, then repeats what was set after torch's
    __init__."""
    recorded, is_built = list[tuple[str, Any]](), list[bool]()
    build, assign = torch.utils.data.DataLoader.__init__, DataLoader.__setattr__

    def built(self: Any, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        is_built.append(True)

    def assigned(self: Any, name: str, value: Any) -> None:
        assign(self, name, value)
        if is_built:
            recorded.append((name, value))

    with monkeypatch.context() as patched:
        patched.setattr(torch.utils.data.DataLoader, "__init__", built)
        patched.setattr(DataLoader, "__setattr__", assigned)
        loader: DataLoader = DataLoader(Squares(12), 2, shuffle=True)
        loader.worker_init_fn = print
    again: DataLoader = DataLoader(Squares(12), 2, sampler=range(0, 12, 3))
    for name, value in recorded:
        setattr(again, name, value)
    assert [labels.tolist() for _, labels in again] == [[0, 9], [36, 81]]
