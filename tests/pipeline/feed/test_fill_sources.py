"""The sources from which shards are filled, chosen by several threads at the same time."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock import Peers
from penstock.cache.base import Traffic
from penstock.pipeline.feed import Filler
from penstock.pipeline.plan import BatchSchedule, Cursor, Needs, Plan, Walk, World
from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


SHARDS, SHARD_BYTES = 8, 1000
WALK = Walk(samples=4 * SHARDS, schedule=BatchSchedule.constant(4), drop_last=True)


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


def filler_of(remote: Any) -> Filler:
    source: Any = SimpleNamespace(
        contents=SimpleNamespace(shard_bytes=np.full(SHARDS, SHARD_BYTES)), give_back=int
    )
    share: Any = SimpleNamespace(
        node_bytes=SHARDS * SHARD_BYTES, keeps=lambda _: True, refresh=lambda: False
    )
    order: Any = SimpleNamespace(source=source, walk=WALK, settings=SimpleNamespace(shuffle=False))
    return Filler(remote, share, order, make_plan(), World(0, 1))


def make_plan() -> Plan:
    return Plan([4] * SHARDS, seed=3, lanes=1, window=1)


def test_shards_of_other_nodes_come_in_order_while_the_remote_gives_nothing() -> None:
    needs = Needs(make_plan(), WALK, first=0, end=1, world=1)
    order = [n for _, some in needs.shards(Cursor(0, 0), endless=False) for n in some.tolist()]
    order = list(dict.fromkeys(order))
    near, left = {order[2], order[5], order[6]}, {order[1], order[4]}
    remote: Any = Scripted(near=near, left=left)
    filler = filler_of(remote)
    try:
        filler.queue.seek(Cursor(0, 0))
        filler.count_batch(10 * SHARD_BYTES, Traffic())
        for _ in range(20):
            filler.sources[1].running[-1].result(timeout=PATIENCE_S)
            filler.count_batch(10 * SHARD_BYTES, Traffic())
        assert remote.filled == [n for n in order if n in near]
        remote.gives.set()
        wait_for_fills(filler)
        assert remote.filled[len(near)] == order[0]
        assert not left & set(remote.filled)
    finally:
        remote.gives.set()
        filler.close()


def wait_for_fills(filler: Filler) -> None:
    """Wait until the tasks that run now have ended. Raises their errors."""
    for each in filler.sources:
        for task in list(each.running):
            task.result(timeout=PATIENCE_S)


class Shard(int):
    """A number of a shard that calls a function when a table looks it up."""

    on_look: Callable[[], None]

    def __hash__(self) -> int:
        self.on_look()
        return int.__hash__(self)


def test_a_choice_that_another_thread_drops_still_counts_for_its_lookup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Filler, "choice_s", 0.0)  # each search for a shard chooses again
    remote = Scripted(near=set(range(SHARDS)), left=set())
    filler = filler_of(remote)
    searches = 0

    def search() -> None:
        nonlocal searches
        searches += 1
        filler.count_batch(10 * SHARD_BYTES, Traffic())
        wait_for_fills(filler)

    try:
        filler.queue.seek(Cursor(0, 0))
        shard = Shard(SHARDS - 1)
        shard.on_look = search
        assert filler.source_of(SHARDS - 1) is filler.sources[1]
        assert filler.source_of(shard) is filler.sources[1]
        assert searches >= 1
    finally:
        filler.close()
