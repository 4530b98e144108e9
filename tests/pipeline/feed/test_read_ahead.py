"""The number of batches that are read ahead, and their epochs, with and without a prefetch."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from penstock.cache import Ordered, Workers
from penstock.pipeline.feed import READ_AHEAD, Position, ReadAhead, ReadScale
from penstock.pipeline.feed import BatchPipeline as RealRoad
from penstock.pipeline.plan import BatchSchedule, Cursor, Step, Walk

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

WALK = Walk(samples=50, schedule=BatchSchedule.constant(10), drop_last=False)
DEPTH = 2
FIRST = 2
WAIT_S = 300


class Prefetch:
    """Wants a number of batches ahead."""

    def __init__(self, *, wants: int, is_cold: bool) -> None:
        self.wants, self.is_cold, self.first_ahead = wants, is_cold, FIRST
        self.filled: list[int] = []

    def seek(self, cursor: Cursor) -> None: ...

    def ahead(self, size_bytes: int, *, waited_s: float, ready_share: float) -> int:
        del size_bytes, waited_s, ready_share
        return self.wants

    def fill(self, size_bytes: int, *, epoch: int) -> None:
        del epoch
        self.filled.append(size_bytes)


class Road:
    """Batches are their steps. bad: where batches begin that can't be read."""

    walk = WALK
    prepare_all = RealRoad.prepare_all
    prepare_each = RealRoad.prepare_each

    def __init__(self) -> None:
        self.begun: list[Cursor] = []
        self.bad: set[Cursor] = set()

    def order(self, start: Cursor) -> Iterator[Step]:
        for step in WALK.steps(start, endless=True):
            self.begun.append(step.start)
            yield step

    def prepare(self, steps: Sequence[Step]) -> list[Any]:
        class Batch:
            pass

        if len(steps) > 1:
            return []  # nothing is read by one read here
        (step,) = steps
        if step.start in self.bad:
            raise KeyError(step.start)
        batch: Any = Batch()
        batch.step, batch.read_wait_s = step, 0.0
        batch.content = SimpleNamespace(bytes_read=7)
        return [batch]


@pytest.fixture
def pool() -> Iterator[Workers]:
    workers = Workers(2, name="read")
    yield workers
    workers.close()


def read_ahead(
    pool: Workers, prefetch: Prefetch | None, *, turn: int = 1, bad: Collection[Cursor] = ()
) -> tuple[ReadAhead, Road, Position]:
    road, position = Road(), Position()
    road.bad |= set(bad)
    position.begin_pass()
    ahead = ReadAhead(
        road,  # type: ignore[arg-type]
        position,
        ReadScale(threads=pool.count, depth=DEPTH, turn=turn),
        pool=pool,
        prefetch=prefetch,  # type: ignore[arg-type]
        timeout_s=300,
    )
    ahead.start(Cursor(0, 0))
    return ahead, road, position


def consume(ahead: ReadAhead, count: int) -> list[Cursor]:
    """Pop batches and replenish after each; return where they start."""
    starts = []
    for _ in range(count):
        batch = ahead.pop()
        assert batch is not None
        starts.append(batch.step.start)
        ahead.replenish(batch, decoding=0)
    return starts


def test_of_a_local_dataset_a_few_are_read_over_the_end_of_the_epoch(pool: Workers) -> None:
    ahead, road, _ = read_ahead(pool, None)
    assert len(road.begun) == DEPTH + READ_AHEAD
    steps = itertools.islice(WALK.steps(Cursor(0, 0), endless=True), 12)
    assert consume(ahead, 12) == [step.start for step in steps]
    assert len(road.begun) == 12 + DEPTH + READ_AHEAD


@pytest.mark.parametrize("turn", [2, 3, 8])
def test_turns_grow_from_one_batch_and_keep_the_order(pool: Workers, turn: int) -> None:
    ahead, road, _ = read_ahead(pool, None, turn=turn)
    assert len(road.begun) >= 1 + 2
    steps = itertools.islice(WALK.steps(Cursor(0, 0), endless=True), 12)
    assert consume(ahead, 12) == [step.start for step in steps]


def test_an_error_within_a_turn_comes_where_its_own_batch_is_due(pool: Workers) -> None:
    ahead, road, _ = read_ahead(pool, None, turn=4, bad=[Cursor(0, 30)])
    assert consume(ahead, 3) == [Cursor(0, 0), Cursor(0, 10), Cursor(0, 20)]
    assert ahead.is_ready
    with pytest.raises(KeyError):
        ahead.pop()
    road.bad.clear()
    ahead.cancel(timeout_s=WAIT_S)
    ahead.stop()
    ahead.start(Cursor(0, 30))
    assert consume(ahead, 2) == [Cursor(0, 30), Cursor(0, 40)]


def test_what_is_left_of_a_turn_is_dropped_by_a_stop(pool: Workers) -> None:
    ahead, _, _ = read_ahead(pool, None, turn=4)
    consume(ahead, 2)
    ahead.cancel(timeout_s=WAIT_S)
    ahead.stop()
    ahead.start(Cursor(7, 20))
    assert consume(ahead, 2) == [Cursor(7, 20), Cursor(7, 30)]


def test_of_a_warm_remote_as_many_as_the_prefetch_says(pool: Workers) -> None:
    prefetch = Prefetch(wants=7, is_cold=False)
    ahead, road, _ = read_ahead(pool, prefetch)
    assert len(road.begun) == FIRST
    consume(ahead, 3)
    assert len(road.begun) == 3 + 7  # the next epoch's too
    assert prefetch.filled == [7] * 3


def test_of_a_cold_remote_one_of_an_epoch_that_was_not_asked_for(pool: Workers) -> None:
    ahead, road, position = read_ahead(pool, Prefetch(wants=7, is_cold=True))
    consume(ahead, 3)
    assert road.begun[3:] == [Cursor(0, 30), Cursor(0, 40), Cursor(1, 0)]
    consume(ahead, 2)
    assert road.begun[-1] == Cursor(1, 0)
    consume(ahead, 1)  # decoded ahead
    assert road.begun[-1] == Cursor(1, 0)
    position.set_epoch(1)
    position.request_pass()
    ahead.begin_epoch(Cursor(1, 0), decoding=0)
    assert road.begun[-1] > Cursor(1, 20)


def test_a_read_that_was_left_behind_is_not_waited_for(
    pool: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does its end hide that its successor waits."""
    ahead, _, _ = read_ahead(pool, None)
    pops = [(threading.Event(), threading.Event()) for _ in range(2)]
    rest = iter(pops)

    def hangs(_: object) -> list[Any]:
        entered, gate = next(rest)
        entered.set()
        assert gate.wait(WAIT_S)
        return []

    monkeypatch.setattr(Ordered, "pop", hangs)
    decoders = [Workers(1, name="decode") for _ in pops]
    outcomes = []
    for decoder, (entered, _) in zip(decoders, pops, strict=True):
        ahead.cancel(timeout_s=0)
        ahead.stop()
        assert not ahead.is_waiting
        ahead.start(Cursor(3, 0))
        outcomes.append(decoder.submit(lambda _: ahead.pop(), None))
        assert entered.wait(WAIT_S)
        assert ahead.is_waiting
    for (_, gate), outcome, waits in zip(pops, outcomes, (True, False), strict=True):
        gate.set()
        outcome.result(WAIT_S)
        assert ahead.is_waiting == waits
    for decoder in decoders:
        decoder.close()


def test_where_nothing_was_held_back_nothing_is_caught_up(pool: Workers) -> None:
    ahead, road, _ = read_ahead(pool, Prefetch(wants=7, is_cold=False))
    consume(ahead, 2)
    before = list(road.begun)
    ahead.begin_epoch(Cursor(1, 0), decoding=0)
    assert road.begun == before
