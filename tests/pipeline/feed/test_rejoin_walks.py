"""Walks through the life of jobs whose ranks change: each step is the uninterrupted job's."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from penstock import DataLoader, Dataset, Order, World, concat
from penstock.readers.fieldtypes import Array
from tests import field_sets
from tests.pipeline.feed.many_nodes import Node, order_of, shards_of

if TYPE_CHECKING:
    from pathlib import Path

MOST_RANKS = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"global_batch_size": 24, "drop_last": True},
    "per rank": {"batch_size": 10, "drop_last": True},
    "schedule": {"global_batch_size": {0: 12, 100: 24, 500: 12}, "pad": "mask"},
    "tokens": {"batch_tokens": 60},
    "concat": {"global_batch_size": 24, "drop_last": True},
    "reshuffle": {
        "global_batch_size": 24,
        "drop_last": True,
        "order": Order(reshuffle=0.5, lanes=2),
    },
    "in order": {"global_batch_size": 24, "pad": "mask", "shuffle": False, "seed": None},
}


def ids_of(batch: Any) -> list[int]:
    ids, valid = (batch[-2], batch[-1]) if batch[-1].dtype == torch.bool else (batch[-1], ...)
    found: list[int] = ids[valid].tolist()
    return found


class Walk:
    """A job of some ranks in step, to which things happen that a seed draws."""

    def __init__(self, dataset: Any, options: dict[str, Any], *, ranks: int, seed: int) -> None:
        self.dataset = dataset
        self.options = {"shuffle": True, "seed": 5, **options}
        self.draw = random.Random(seed)
        self.loaders = [self.loader(World(rank, ranks)) for rank in range(ranks)]
        self.passes: list[Any] = [iter(loader) for loader in self.loaders]
        self.first_ranks, self.step = ranks, 0

    def loader(self, world: World) -> DataLoader:
        return DataLoader(self.dataset, world=world, **self.options)

    def wanted(self) -> list[list[int]]:
        """Two epochs of the job if nothing happens."""
        ranks = [self.loader(World(rank, self.first_ranks)) for rank in range(self.first_ranks)]
        steps = [
            sorted(chain.from_iterable(map(ids_of, batches)))
            for _ in range(2)
            for batches in zip(*ranks, strict=True)
        ]
        for one in ranks:
            one.close()
        return steps

    def take(self) -> list[int]:
        found = []
        for rank, loader in enumerate(self.loaders):
            batch = next(self.passes[rank], None)
            if batch is None:
                self.passes[rank] = iter(loader)
                batch = next(self.passes[rank])
            found += ids_of(batch)
        self.step += 1
        assert {loader.step for loader in self.loaders} == {self.step}
        return sorted(found)

    def rejoin(self, step: int) -> None:
        """Some go, some come with a survivor's state, and all are renumbered."""
        state = json.loads(json.dumps(self.loaders[0].state_dict()))
        old = list(zip(self.loaders, self.passes, strict=True))
        self.draw.shuffle(old)
        size = self.draw.randint(1, MOST_RANKS)
        kept = old[: min(size, self.draw.randint(1, len(old)))]
        for loader, _ in old[len(kept) :]:
            loader.close()
        for _ in range(size - len(kept)):
            new = self.loader(World(0, self.first_ranks))
            new.load_state_dict(state)
            kept.append((new, None))
        self.draw.shuffle(kept)
        self.loaders = [loader for loader, _ in kept]
        store = self.draw.choice([None, dist.HashStore()])  # type: ignore[attr-defined]

        def one(rank: int) -> None:
            self.loaders[rank].rejoin(World(rank, size), step=step, store=store)

        with ThreadPoolExecutor(size) as pool:
            list(pool.map(one, range(size)))
        self.step = step
        keeps = self.draw.random() < 0.7  # their iterators
        self.passes = [
            before if before is not None and keeps else iter(loader) for loader, before in kept
        ]

    def skip(self, steps: int) -> None:
        for loader in self.loaders:
            loader.skip(steps)
        self.step += steps


@pytest.fixture(scope="module")
def datasets(
    pack: Path, ordered_pack: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    numbers = field_sets.write_numbers(tmp_path_factory.mktemp("tokens") / "numbers", 180)
    tokens = Dataset(numbers, schema={"tokens": Array("int64", (None,))}, fields=("tokens", "id"))
    plain, other = (Dataset(each, fields=("id",)) for each in (pack, ordered_pack))
    return {"plain": plain, "tokens": tokens, "concat": concat([plain, other])}


@pytest.mark.filterwarnings("ignore:The state's global batches")
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(n, marks=pytest.mark.grid) for n in range(2, 12))]
)
def test_whatever_happens_each_step_is_the_jobs(
    datasets: dict[str, Any], kind: str, seed: int
) -> None:
    dataset = datasets.get(kind, datasets["plain"])
    walk = Walk(dataset, OPTIONS[kind], ranks=1 + seed % 3, seed=seed)
    wanted = walk.wanted()
    for _ in range(8):
        last = len(wanted) - 4
        what = walk.draw.choice(["take", "rejoin", "rejoin", "skip", "look"])
        if what == "take":
            for _ in range(min(3, last - walk.step)):
                assert walk.take() == wanted[walk.step - 1]
        elif what == "rejoin":  # back into an older epoch, or ahead
            walk.rejoin(walk.draw.randint(0, last))
        elif what == "skip":
            walk.skip(walk.draw.randint(0, min(3, max(0, last - walk.step))))
        else:
            for loader in walk.loaders:
                iter(loader)
    assert [walk.take() for _ in range(3)] == wanted[walk.step - 3 : walk.step]
    for loader in walk.loaders:
        loader.close()


def test_rejoins_in_a_row_keep_the_order_of_lanes_that_was_decided(
    pack: Path, tmp_path: Path
) -> None:
    """No batch came between them, so that only the decision tells who reads what."""
    nodes = [Node(pack, tmp_path / f"cache-{number}") for number in range(3)]

    def loader(node: Node) -> DataLoader:
        options = {"global_batch_size": 24, "shuffle": True, "seed": 5, "drop_last": True}
        return DataLoader(node.dataset, world=World(0, 1), order=Order(lanes=6), **options)

    first, second, third = map(loader, nodes)

    def rejoin(*loaders: DataLoader) -> None:
        store = dist.HashStore()  # type: ignore[attr-defined]
        with ThreadPoolExecutor(len(loaders)) as pool:
            for each in [
                pool.submit(one.rejoin, World(rank, len(loaders)), step=3, store=store)
                for rank, one in enumerate(loaders)
            ]:
                each.result()

    rejoin(first, second)
    nodes[1].fill(shards_of(first))
    rejoin(first, second)  # the second has what the first read
    decided = order_of(first).lane_order
    assert decided is not None
    third.load_state_dict(first.state_dict())
    rejoin(first, second, third)
    assert len({order_of(one).lane_order for one in (first, second, third)}) == 1
    rejoin(second, first)
    for one in (first, second, third):
        one.close()
    for node in nodes:
        node.close()
