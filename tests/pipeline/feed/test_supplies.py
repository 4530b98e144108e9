"""Where shards are filled from, decided by several threads at once."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np

from penstock import Peers
from penstock.cache.base import Traffic
from penstock.cache.disk import DiskCache
from penstock.pipeline import DataLoader
from penstock.pipeline.feed import Filler
from penstock.pipeline.plan import BatchSchedule, Cursor, Needs, Plan, Walk
from penstock.readers import Dataset
from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Watched(dict[int, Any]):
    """What was decided; as soon as one looks for a shard, another thread begins anew."""

    def __init__(self, filler: Any) -> None:
        super().__init__()
        self._filler = filler

    def __contains__(self, shard: object) -> bool:
        found = super().__contains__(shard)
        self._filler._decided_until = 0.0
        self._filler._forget_decisions(now=1.0)
        return found


def test_a_decision_that_another_thread_takes_back_stands_for_who_has_looked_it_up(
    pack: Path, tmp_path: Path
) -> None:
    cache = DiskCache(tmp_path / "cache", max_bytes="64MiB", peers=Peers("127.0.0.1:0"))
    files = fsspec.filesystem("file", skip_instance_cache=True)
    with (
        Dataset(str(pack), fields=("label", "id"), filesystem=files, cache=cache) as remote,
        DataLoader(remote, batch_size=8, shuffle=True, seed=5, drop_last=True) as loader,
    ):
        filler = loader._engine._setup.ready.feed.prefetch._filler  # type: ignore[union-attr]
        far, _ = filler._supplies
        filler._decided = decided = Watched(filler)
        decided[0] = far
        assert filler._supply_of(0) is far
        assert filler._decided == {}


SHARDS, SHARD_BYTES = 8, 1000


class Scripted:
    """Shards of which other nodes hold some, and fetch some; the remote gives nothing at first."""

    caches = (SimpleNamespace(peers=Peers("127.0.0.1:0")),)

    def __init__(self, *, near: set[int], left: set[int]) -> None:
        self.near, self.left = near, left
        self.filled: list[int] = []
        self.gives = threading.Event()

    def traffic(self) -> Traffic:
        return Traffic()

    def in_flight_bytes(self, shard_bytes: int) -> tuple[int, int]:
        return shard_bytes, shard_bytes

    def is_whole(self, shard: int) -> bool:
        return shard in self.filled

    def is_near(self, shard: int) -> bool:
        return shard in self.near

    def is_left_to_others(self, shard: int) -> bool:
        return shard in self.left

    def fill(self, shard: int, *, progress: Callable[[int], None], stop: threading.Event) -> int:
        if shard not in self.near:
            assert self.gives.wait(PATIENCE_S)
        self.filled.append(shard)
        progress(SHARD_BYTES)
        return 0 if stop.is_set() else SHARD_BYTES


def test_what_other_nodes_hold_comes_in_order_while_the_remote_gives_nothing() -> None:
    sizes = np.full(SHARDS, 4)
    walk = Walk(samples=4 * SHARDS, schedule=BatchSchedule.constant(4), drop_last=True)
    needs = Needs(Plan(sizes.tolist(), seed=3, lanes=1, window=1), walk, first=0, end=1, world=1)
    order = [n for _, some in needs.shards(Cursor(0, 0), endless=False) for n in some.tolist()]
    order = list(dict.fromkeys(order))
    near, left = {order[2], order[5], order[6]}, {order[1], order[4]}
    remote: Any = Scripted(near=near, left=left)
    source: Any = SimpleNamespace(
        contents=SimpleNamespace(shard_bytes=np.full(SHARDS, SHARD_BYTES)), give_back=int
    )
    share: Any = SimpleNamespace(
        node_bytes=SHARDS * SHARD_BYTES, keeps=lambda _: True, refresh=lambda: False
    )
    filler = Filler(
        remote,
        source,
        share,
        needs=needs,
        mine=np.arange(SHARDS),
        endless=False,
        epoch_steps=SHARDS,
    )
    try:
        filler.seek(Cursor(0, 0))
        filler.count_batch(10 * SHARD_BYTES, Traffic())
        for _ in range(20):
            filler._supplies[1].running[-1].result(timeout=PATIENCE_S)
            filler.count_batch(10 * SHARD_BYTES, Traffic())
        assert remote.filled == [n for n in order if n in near]
        remote.gives.set()
        filler.wait(timeout_s=PATIENCE_S)
        assert remote.filled[len(near)] == order[0]
        assert not left & set(remote.filled)
    finally:
        remote.gives.set()
        filler.close()
