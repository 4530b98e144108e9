"""Test processes that aren't ranks: replicas of a model, pods, odd distributions."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import ConfigError, PlanError
from penstock.pipeline import DataLoader, LateWorld
from penstock.pipeline.plan import World, node_ranks, pod_index
from penstock.readers import Dataset

if TYPE_CHECKING:
    from pathlib import Path


def in_group(monkeypatch: pytest.MonkeyPatch, *, rank: int, size: int) -> None:
    """Make torch report an initialised default process group."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: size)


def mesh(names: tuple[str, ...] | None, shape: tuple[int, ...], along: str, process: int) -> Any:
    """Return what a DeviceMesh over processes 0, 1, … reports for one dimension."""
    grid = torch.arange(int(torch.tensor(shape).prod())).reshape(shape)
    if names is None:
        return SimpleNamespace(mesh=grid, ndim=grid.ndim, mesh_dim_names=None)
    place = (grid == process).nonzero()[0].tolist()
    at = tuple(slice(None) if name == along else place[i] for i, name in enumerate(names))
    return SimpleNamespace(mesh=grid[at], ndim=1, mesh_dim_names=(along,))


@given(
    shape=st.tuples(*[st.sampled_from([1, 2, 3, 4])] * 3),
    order=st.permutations(["dp", "pp", "tp"]),
    local_size=st.sampled_from([1, 2, 4, 8]),
    data=st.data(),
)
def test_a_mesh_defines_replicas_and_the_ranks_of_a_node(
    shape: tuple[int, ...], order: list[str], local_size: int, data: st.DataObject
) -> None:
    grid = torch.arange(int(torch.tensor(shape).prod())).reshape(shape)
    processes, names = grid.numel(), tuple(order)
    process = data.draw(st.integers(0, processes - 1))
    local_size = min(local_size, processes - process // local_size * local_size)
    first = process // local_size * local_size
    if first + local_size > processes:
        return
    launched = World(process, processes, local_rank=process - first, local_size=local_size)
    world = launched.in_mesh(mesh(names, shape, "dp", process))
    dimension = names.index("dp")
    ranks = {
        (grid == one).nonzero()[0].tolist()[dimension] for one in range(first, first + local_size)
    }
    assert world.rank == (grid == process).nonzero()[0].tolist()[dimension]
    assert (world.size, world.process, world.processes) == (shape[dimension], process, processes)
    assert (world.local_rank, world.local_size) == (process - first, local_size)
    low, end = node_ranks(world)
    in_a_row = max(ranks) - min(ranks) + 1 == len(ranks)
    assert (low, end) == (
        (min(ranks), max(ranks) + 1) if in_a_row else (world.rank, world.rank + 1)
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (mesh(None, (2, 2), "", 0), r"no names.*mesh_dim_names"),
        (
            SimpleNamespace(mesh=torch.zeros(2, 2), ndim=2, mesh_dim_names=("dp", "tp")),
            r"2 dimensions \('dp', 'tp'\).*mesh\['dp'\].*_flatten",
        ),
        (mesh(("dp",), (2,), "dp", 0), r"process 3 isn't among the mesh's 2"),
        ("dp", r"got str, wanted.*from_mesh\(mesh\[\"dp\"\]\)"),
    ],
)
def test_other_meshes_are_refused_with_what_to_pass(wrong: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        World(3, 4).in_mesh(wrong)


def test_torch_s_own_meshes_are_read() -> None:
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("fake", store=fake.FakeStore(), rank=5, world_size=8)
    try:
        whole = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        launcher = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
        world = World.from_mesh(whole["dp"], launcher)
        assert world == World(0, 2, local_rank=1, local_size=4, place=(5, 8), node=(0, 2))
        for wrong in (whole, whole["dp", "tp"], init_device_mesh("cpu", (8,))):
            with pytest.raises(PlanError, match=r"World\.from_mesh"):
                World.from_mesh(wrong)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"place": (4, 4)}, "process rank must be in"),
        ({"place": (0, 1)}, "size 2 is more than the 1 processes"),
        ({"place": (0.5, 4)}, r"wanted \(process, processes\)"),
        ({"node": (1, 2)}, "with rank 0 among them"),
        ({"node": (0, 3)}, "with rank 0 among them"),
    ],
)
def test_places_check_themselves(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        World(0, 2, **arguments)


def test_a_process_knows_whom_it_speaks_for() -> None:
    usual = World(11, 16, local_rank=3, local_size=8)
    assert (usual.process, usual.processes, usual.nodes) == (11, 16, 2)
    assert (usual.label, usual.file_label) == ("rank 11", "rank-00011")
    assert not usual.is_first_on_node
    split = usual.with_replicas(2, 4)
    assert (split.rank, split.size, split.process, split.processes) == (2, 4, 11, 16)
    assert split.nodes == 2
    assert split.threads(16) == usual.threads(16) == 2  # of all processes of the node
    assert node_ranks(split) == (2, 3)
    assert split.label == "rank 2 (process 11)"
    assert split.file_label == "rank-00002-process-00011"
    assert usual.with_replicas(11, 16) is usual


# -- the loader's argument


@pytest.mark.parametrize(
    ("given_world", "replica", "message"),
    [
        (World(0, 1), (0, 1), "world= and data_parallel="),
        (None, 2, r"got int, wanted \(rank, size\)"),
        (None, (0, 1, 2), r"wanted \(rank, size\)"),
        (None, mesh(("dp",), (2,), "dp", 0), r"World\.from_mesh"),
        (None, (2, 2), r"rank must be in \[0, 2\)"),
        (None, ("0", 2), "whole number"),
        (None, (0, 3), "4 processes can't be 3 replicas"),
    ],
)
def test_replicas_that_cannot_be_are_refused(
    monkeypatch: pytest.MonkeyPatch, given_world: World | None, replica: Any, message: str
) -> None:
    in_group(monkeypatch, rank=1, size=4)
    with pytest.raises((ConfigError, PlanError), match=message):
        LateWorld(given_world, data_parallel=replica)


def test_members_of_a_replica_get_the_same_batches(
    pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def batches(process: int) -> list[list[int]]:
        in_group(monkeypatch, rank=process, size=4)
        monkeypatch.setattr("penstock.cache.channel.JobStore.of_group", lambda: None)
        dataset = Dataset(pack, fields=("label", "id"))
        options: dict[str, Any] = {"shuffle": True, "seed": 3, "drop_last": True}
        with DataLoader(dataset, 5, data_parallel=(process // 2, 2), **options) as loader:
            assert loader.sampler.num_replicas == 2
            return [ids.tolist() for _, ids in loader]

    ranks = [batches(process) for process in range(4)]
    assert ranks[0] == ranks[1] != ranks[2] == ranks[3]
    ids = [i for batch in ranks[0] + ranks[2] for i in batch]
    assert len(set(ids)) == len(ids) > 190


# -- pods and horovod


@pytest.fixture
def no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    monkeypatch.delitem(sys.modules, "horovod.torch", raising=False)


@pytest.mark.usefixtures("no_group")
def test_a_pod_s_index_is_no_rank() -> None:
    pod = {"JOB_COMPLETION_INDEX": "3"}
    assert pod_index(pod) == 3
    assert pod_index({}) is None
    with pytest.raises(PlanError, match=r"JOB_COMPLETION_INDEX=3.*not a rank.*World\(0, 1\)"):
        World.detect(pod)
    inside = {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert World.detect({**pod, **inside}) == World(7, 8, local_rank=1, local_size=2)
    with pytest.raises(PlanError, match="JOB_COMPLETION_INDEX"):
        pod_index({"JOB_COMPLETION_INDEX": "x"})


@pytest.mark.usefixtures("no_group")
def test_a_loader_in_a_pod_reports_that_its_rank_is_unknown(
    pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    loader = DataLoader(Dataset(pack, fields=("id",)), 5)
    with pytest.raises(PlanError, match=r"Indexed Job.*torchrun"):
        iter(loader)
    alone = DataLoader(Dataset(pack, fields=("id",)), 5, world=World(0, 1))
    assert len(next(iter(alone))[0]) == 5
    alone.close()


@pytest.mark.usefixtures("no_group")
@pytest.mark.parametrize("stands", [True, False])
def test_horovod_is_asked_where_it_was_initialised(
    monkeypatch: pytest.MonkeyPatch, stands: bool
) -> None:
    horovod = SimpleNamespace(
        is_initialized=lambda: stands,
        rank=lambda: 5,
        size=lambda: 8,
        local_rank=lambda: 1,
        local_size=lambda: 4,
    )
    monkeypatch.setitem(sys.modules, "horovod.torch", horovod)
    wanted = World(5, 8, local_rank=1, local_size=4) if stands else World(0, 1)
    assert World.detect({}) == wanted


@pytest.mark.usefixtures("no_group")
@pytest.mark.parametrize(
    ("tasks", "node"), [("2,3", None), ("0,2", (2, 3)), ("4,5", None), ("", None), ("0,x", None)]
)
def test_slurm_s_cyclic_tasks_are_no_row(tasks: str, node: tuple[int, int] | None) -> None:
    report = {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "2",
        "SLURM_NTASKS": "4",
        "SLURM_LOCALID": "0" if tasks == "2,3" else "1",
        "SLURM_NODEID": "0",
        "SLURM_TASKS_PER_NODE": "2(x2)",
        "SLURM_GTIDS": tasks,
    }
    world = World.detect(report)
    assert world.node == node
    if node is not None:
        assert node_ranks(world) == (2, 3)
