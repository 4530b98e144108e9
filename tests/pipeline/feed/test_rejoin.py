"""Ranks join, leave and are renumbered within the process; the job's batches stay the same."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
import torch.utils.data

from penstock.cache import ClosedError, ConfigError, PlanError, RankFailedError, StalledError
from penstock.pipeline import DataLoader, Order, World
from penstock.readers import Dataset
from tests.pipeline.feed.many_nodes import Node, order_of, shards_of
from tests.pipeline.plan.plans import ids_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

B, SEED = 30, 5


def loader_of(pack: Path, rank: int, size: int, **more: Any) -> DataLoader:
    options: dict[str, Any] = {"global_batch_size": B, "shuffle": True, "seed": SEED}
    options |= {"drop_last": True, **more}
    options = {name: value for name, value in options.items() if value is not None}
    return DataLoader(Dataset(pack, fields=("id",)), world=World(rank, size), **options)


@pytest.fixture(scope="module")
def wanted(pack: Path) -> list[list[int]]:
    """The global batches of two epochs, by step."""
    with loader_of(pack, 0, 1) as loader:
        return [sorted(ids.tolist()) for _ in range(2) for (ids,) in loader]


class Job:
    """Some ranks in step; each goes on with one iterator for as long as that lives."""

    def __init__(self, loaders: Sequence[DataLoader]) -> None:
        self.loaders = list(loaders)
        self.passes: list[Any] = [iter(loader) for loader in loaders]

    def step(self) -> list[int]:
        """The ids of the next global batch; the share of each rank differs by one at most."""
        found = []
        for rank, loader in enumerate(self.loaders):
            try:
                found.append(next(self.passes[rank])[0].tolist())
            except StopIteration:
                self.passes[rank] = iter(loader)
                found.append(next(self.passes[rank])[0].tolist())
        assert max(map(len, found)) - min(map(len, found)) <= 1
        return sorted(i for ids in found for i in ids)

    def rejoin(self, loaders: Sequence[DataLoader], *, step: int, store: Any = None) -> None:
        """These go on as ranks 0, 1, 2, …; new ones begin a pass."""
        before = dict(zip(map(id, self.loaders), self.passes, strict=True))

        def one(rank: int) -> None:
            loaders[rank].rejoin(World(rank, len(loaders)), step=step, store=store)

        with ThreadPoolExecutor(len(loaders)) as pool:
            list(pool.map(one, range(len(loaders))))
        self.loaders = list(loaders)
        self.passes = [before.get(id(loader)) or iter(loader) for loader in loaders]

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()


@pytest.mark.parametrize("more", [{}, {"global_batch_size": None, "batch_size": 10}])
def test_three_rejoins_in_a_row_hand_out_every_committed_step_once(
    pack: Path, wanted: list[list[int]], more: dict[str, Any]
) -> None:
    job = Job([loader_of(pack, rank, 3, **more) for rank in range(3)])
    first, lost, third = job.loaders
    found = [job.step() for _ in range(3)]
    # Step 2 was handed out and not committed; rank 1 goes.
    lost.close()
    job.rejoin([first, third], step=2)
    assert job.step() == found[2]
    assert len({loader.batch_size for loader in job.loaders}) == 1
    found.append(job.step())
    # Another comes, with a survivor's state, as the first of three.
    new = loader_of(pack, 2, 3, **more)
    new.load_state_dict(json.loads(json.dumps(first.state_dict())))
    job.rejoin([new, first, third], step=4)
    found += [job.step() for _ in range(3)]
    assert [loader.step for loader in job.loaders] == [7] * 3
    # And all but one go, in the second epoch, back to the first.
    job.rejoin([third], step=5)
    assert third.epoch == 0
    assert [job.step() for _ in range(7)] == wanted[5:12]
    assert found == wanted[:7]
    job.close()
    first.close()
    new.close()


def test_a_fresh_loader_of_another_batch_takes_the_jobs(
    pack: Path, wanted: list[list[int]]
) -> None:
    """batch_size=10 stands for 20 on two ranks: the job's 30 go on."""
    old = loader_of(pack, 0, 1)
    next(iter(old))
    new = loader_of(pack, 1, 2, global_batch_size=None, batch_size=10)
    with pytest.warns(UserWarning, match="goes from 30 to 20"):
        new.load_state_dict(old.state_dict())
    job = Job([old])
    job.rejoin([old, new], step=1)
    assert [job.step() for _ in range(8)] == wanted[1:9]
    assert old.state_dict() == new.state_dict()
    assert new.batch_size == 15
    # What is set later leaves that so.
    new.num_workers = 1
    job.passes[1] = iter(new)
    assert new.batch_size == 15
    job.close()


def test_a_schedule_goes_on(pack: Path) -> None:
    schedule = {0: 12, 100: 30}
    with loader_of(pack, 0, 1, global_batch_size=schedule) as whole:
        wanted = [sorted(ids.tolist()) for (ids,) in whole]
    job = Job([loader_of(pack, rank, 3, global_batch_size=schedule) for rank in range(3)])
    found = [job.step() for _ in range(8)]
    job.rejoin(job.loaders[:2], step=8)
    found += [job.step() for _ in range(len(wanted) - 8)]
    assert found == wanted
    job.close()


def test_what_can_not_be_is_refused_and_changes_nothing(
    pack: Path, wanted: list[list[int]]
) -> None:
    loader = loader_of(pack, 0, 1)
    job = Job([loader])
    assert job.step() == wanted[0]
    for error, told, arguments in (
        (ConfigError, "wanted World", {"world": (0, 2), "step": 1}),
        (ConfigError, "step must be an integer", {"world": World(0, 2), "step": -1}),
        (ConfigError, "step must be an integer", {"world": World(0, 2), "step": 1.5}),
        (ConfigError, "stores", {"world": World(0, 2), "step": 1, "store": "tcp://a"}),
        (PlanError, "world of 31 ranks", {"world": World(0, 31), "step": 1}),
    ):
        with pytest.raises(error, match=told):
            loader.rejoin(**arguments)
    assert loader.world == World(0, 1)
    assert job.step() == wanted[1]
    loader.close()
    with pytest.raises(ClosedError):
        loader.rejoin(World(0, 2), step=1)


def test_torch_datasets_are_refused_by_name() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(20))
    with (
        DataLoader(data, 2, seed=1, shuffle=True) as loader,
        pytest.raises(ConfigError, match=r"loader\.rejoin works on native datasets"),
    ):
        loader.rejoin(World(0, 2), step=0)


def test_any_step_of_the_job_costs_the_same(pack: Path, wanted: list[list[int]]) -> None:
    job = Job([loader_of(pack, 0, 1)])
    each = len(wanted) // 2
    job.rejoin(job.loaders, step=10**9 * each + 3)
    assert job.loaders[0].epoch == 10**9
    job.rejoin(job.loaders, step=3)
    assert job.step() == wanted[3]
    job.close()


class TestWithAStore:
    """Exchanges between the new ranks."""

    @pytest.mark.parametrize(
        ("seed", "step", "words"), [(SEED + 1, 0, "rank 2 with seed 6"), (SEED, 3, "at step 3 ")]
    )
    def test_ranks_that_differ_are_an_error_on_each(
        self, pack: Path, seed: int, step: int, words: str
    ) -> None:
        loaders = [loader_of(pack, rank, 2) for rank in range(2)]
        loaders.append(loader_of(pack, 2, 3, seed=seed))
        store = dist.HashStore()  # type: ignore[attr-defined]
        for rank in range(2):
            loaders[rank].rejoin(World(rank, 3), step=0, store=store)
        with pytest.raises(PlanError, match=r"Rank 0 .*(seed 5|at step 0 ).*rank 2") as error:
            loaders[2].rejoin(World(2, 3), step=step, store=store)
        assert words in str(error.value)
        for loader in loaders[:2]:  # which the others hear at their next batch
            with pytest.raises(RankFailedError, match=words):
                next(iter(loader))
        for loader in loaders:
            loader.close()

    def test_a_store_that_is_gone_is_not_asked(self, pack: Path) -> None:
        server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
        client = dist.TCPStore("127.0.0.1", server.port, None, False)  # type: ignore[attr-defined]
        job = Job([loader_of(pack, 0, 1)])
        job.rejoin(job.loaders, step=0, store=client)
        first = job.step()
        del server
        with pytest.warns(UserWarning, match="store doesn't answer"):
            second = job.step()
        job.rejoin(job.loaders, step=0)  # and no second warning
        assert [job.step(), job.step()] == [first, second]
        job.close()

    def test_slots_follow_the_data_of_the_new_ranks(self, pack: Path, tmp_path: Path) -> None:
        nodes = [Node(pack, tmp_path / f"cache-{number}") for number in range(3)]

        def loader(node: Node, rank: int, size: int) -> DataLoader:
            return DataLoader(
                node.dataset,
                world=World(rank, size),
                global_batch_size=B,
                shuffle=True,
                seed=SEED,
                drop_last=True,
                order=Order(lanes=6),
            )

        job = Job([loader(node, rank, 3) for rank, node in enumerate(nodes)])
        for node, one in zip(nodes, job.loaders, strict=True):
            node.fill(shards_of(one))
        # The first is renumbered as the last, and a cold one takes its place.
        nodes.append(Node(pack, tmp_path / "cache-new"))
        new = loader(nodes[3], 0, 3)
        state = job.loaders[0].state_dict()
        new.load_state_dict(state)
        wanted = [sorted(ids_of(order_of(new).plan(), 0, 0, B).tolist())]
        first, second, _ = job.loaders
        job.rejoin([second, new, first], step=0, store=dist.HashStore())  # type: ignore[attr-defined]
        assert len({order_of(one).lane_order for one in job.loaders}) == 1
        held = [nodes[1].missing_bytes(shards_of(second)), nodes[0].missing_bytes(shards_of(first))]
        assert held == [0, 0]
        assert job.step() == wanted[0]
        # Without a store who reads what stays.
        order = order_of(first).lane_order
        job.rejoin([first, second], step=1)
        assert order_of(first).lane_order == order
        job.close()
        new.close()
        for node in nodes:
            node.close()

    def test_ranks_that_do_not_come_are_named(self, pack: Path, tmp_path: Path) -> None:
        node = Node(pack, tmp_path / "cache")
        loader = DataLoader(
            node.dataset,
            world=World(0, 1),
            global_batch_size=B,
            shuffle=True,
            seed=SEED,
            drop_last=True,
            timeout=0.05,
            order=Order(lanes=6),
        )
        with pytest.raises(StalledError, match="ranks 1 to 2 to begin"):
            loader.rejoin(World(0, 3), step=0, store=dist.HashStore())  # type: ignore[attr-defined]
        assert loader.world == World(0, 1)
        loader.close()
        node.close()
