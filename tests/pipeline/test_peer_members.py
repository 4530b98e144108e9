"""Members of a job that join, leave and change places within a process: peers follow."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

from penstock import DataLoader, Dataset, DiskCache, Order, Peers
from penstock.pipeline import World
from tests.array_packs import SAMPLES, array_pack_bytes, write_array_pack
from tests.servers import serving

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NODES, BATCH = 3, 24


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_array_pack(tmp_path_factory.mktemp("members"))


def member(url: str, folder: Path, rank: int) -> DataLoader:
    cache = DiskCache(folder, max_bytes="1GB", peers=Peers("127.0.0.1:0"))
    return DataLoader(
        Dataset(url, cache=cache, fields=("array", "id")),
        global_batch_size=BATCH,
        shuffle=True,
        drop_last=True,
        seed=7,
        order=Order(slots="rank"),
        world=World(rank, NODES),
    )


def epoch(members: Sequence[DataLoader], *, step: int) -> list[list[int]]:
    """Return the global batches of an epoch that these loaders run as ranks 0, 1, 2, … of a new
    membership."""
    store = dist.HashStore()  # type: ignore[attr-defined]

    def run(rank: int) -> list[list[int]]:
        members[rank].rejoin(World(rank, len(members)), step=step, store=store)
        found = []
        for data, id in members[rank]:
            assert (data[:, 0] == id % 251).all()
            found.append(id.tolist())
        return found

    with ThreadPoolExecutor(len(members)) as pool:
        ranks = list(pool.map(run, range(len(members))))
    return [sorted(itertools.chain.from_iterable(parts)) for parts in zip(*ranks, strict=True)]


def received(members: Sequence[DataLoader]) -> tuple[int, int]:
    """Return the bytes from the remote and from peers."""
    found = [one.statistics() for one in members]
    return sum(one.bytes_remote for one in found), sum(one.bytes_peers for one in found)


def test_places_change_and_a_node_is_replaced(data: Path, tmp_path: Path) -> None:
    size, steps = array_pack_bytes(data), SAMPLES // BATCH
    with serving(data.parent) as server:
        url = f"{server.url}/{data.name}"
        members = [member(url, tmp_path / f"cache-{rank}", rank) for rank in range(NODES)]
        first = epoch(members, step=0)
        assert sorted(itertools.chain.from_iterable(first)) == list(range(SAMPLES))
        remote, peers = received(members)

        moved = [members[2], members[0], members[1]]
        second = epoch(moved, step=steps)
        assert sorted(itertools.chain.from_iterable(second)) == list(range(SAMPLES))
        after = received(members)
        # Except shards that no node had fetched completely when the epoch ended.
        assert after[0] - remote <= 0.1 * size
        assert after[1] - peers >= 0.85 * size

        lost = moved[1]
        lost.close()
        fresh = member(url, tmp_path / "fresh", 1)
        third = epoch([moved[0], fresh, moved[2]], step=2 * steps)
        assert sorted(itertools.chain.from_iterable(third)) == list(range(SAMPLES))
        # Each node holds what two ranks read: the others have the bytes of the lost one.
        got = fresh.statistics()
        assert got.bytes_remote <= 0.1 * size  # the index and other small files
        assert got.bytes_peers > 0.2 * size
        for one in (*moved, fresh):
            one.close()
            one.dataset.close()  # type: ignore[attr-defined]
